"""The commands `fourfold import` and `fourfold export`: a Hugging Face folder as a run, and a run as such a folder.

What a run is besides its weights is decided here: the config it trains with, its tokenizer. Both commands write a new
folder, which appears whole or not at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fourfold import models
from fourfold.checkpoint.exchange import Written, export_weights, import_weights, new_folder, write_bytes, write_json
from fourfold.checkpoint.folder import CHECKPOINTS, Checkpoints, find_checkpoint
from fourfold.checkpoint.names import ARCHITECTURES, describe, kind_of
from fourfold.checkpoint.record import RECORD, Record, read_record
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.models.hugging_face import read_config_json, read_keys
from fourfold.report.units import count, nbytes
from fourfold.train.config import Config, beside, read_config
from fourfold.train.schema import parse, to_table
from fourfold.train.sections import BatchSection, DataSection, Model, OptimizerSection

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model")
SEQ, RATE = 1024, 2e-5
"""What an imported run trains with unless told otherwise: sequences no longer than that, and a rate that does not undo
what the model has learned."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import has made."""

    kind: str
    config: Config
    dtype: torch.dtype
    notes: tuple[str, ...]


def import_model(source: Path, out: Path, *, eod: str | None = None) -> Imported:
    """Make a run of a Hugging Face folder: its config, its weights as the checkpoint of step 0, its tokenizer.

    `eod` is the token that ends a document, where the tokenizer names it unusually.
    """
    path = source / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; give the folder of a Hugging Face model, with its {CONFIG}")
    kind, model, notes = _read_model(path)
    with new_folder(out) as folder:
        data, more = _import_tokenizer(source, folder, model.vocab, eod)
        config = Config(
            model=Model(source.resolve().name, **dataclasses.asdict(model)),
            data=data,
            batch=BatchSection(seq=min(SEQ, model.seq)),
            optimizer=OptimizerSection(rate=RATE),
        )
        state = {"step": 0, "config": to_table(config)}
        dtype = import_weights(source, kind, model, Checkpoints(folder / CHECKPOINTS).path(0), state)
        write_bytes(folder / "config.toml", config.toml().encode())
    return Imported(kind, config, dtype, (*notes, *more))


def _read_model(path: Path) -> tuple[str, models.ModelConfig, tuple[str, ...]]:
    """The type, the model that computes the same, and what its file says beyond."""
    fields, notes = read_config_json(path, exact=True)
    try:
        section = parse(Model, {"name": "", **fields})  # every value of the right kind
        chosen = {name: getattr(section, name) for name in fields}
        return read_keys(path)["model_type"], models.ModelConfig(**chosen), notes
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _import_tokenizer(source: Path, folder: Path, vocab: int, eod: str | int | None) -> tuple[DataSection, list[str]]:
    """The section that names the tokenizer, which is copied into the run, and what is to be said of it."""
    path = source / TOKENIZER
    if not path.is_file():
        said = f"{source} has no {TOKENIZER}: the run reads text as bytes; set data.tokenizer to the model's own"
        if others := [name for name in OTHER_TOKENIZERS if (source / name).exists()]:
            said += (
                f'; {others[0]} becomes one by: python -c "from transformers import AutoTokenizer as T; '
                f"T.from_pretrained('{source}').save_pretrained('NEW')\""
            )
        return DataSection(), [said]
    notes = []
    if eod is None:
        eod, notes = _end_of_document(source)
    tokenizer = load_tokenizer(path, eod)
    if tokenizer.vocab > vocab:
        notes.append(f"{path} has ids up to {tokenizer.vocab - 1}, and the model knows those below {vocab} alone")
    write_bytes(folder / TOKENIZER, path.read_bytes())
    return DataSection(tokenizer=TOKENIZER, eod=eod), notes


def _end_of_document(source: Path) -> tuple[int | None, list[str]]:
    """The id that ends a document, where the tokenizer has no token that is usually called so."""
    try:
        load_tokenizer(source / TOKENIZER)
    except ValueError:
        eos = read_keys(source / CONFIG).get("eos_token_id")
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if not isinstance(eos, int):
            raise  # which says that eod may name it
        return eos, [f"documents end with the id {eos}, which {CONFIG} calls eos_token_id"]
    return None, []


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export has made."""

    kind: str
    checkpoint: str
    """The name of its folder."""
    parameters: int
    written: Written
    tokenizer: bool
    notes: tuple[str, ...]


def export_model(
    run: Path,
    to: Path,
    *,
    step: int | None = None,
    dtype: torch.dtype | None = None,
    max_shard: int = 5_000_000_000,
) -> Exported:
    """Make a Hugging Face folder of a run's newest checkpoint, of that of a step, or of a checkpoint's own folder.

    Without a dtype the weights keep theirs.
    """
    checkpoint = find_checkpoint(run, step)
    record = read_record(checkpoint)
    section, data = _sections_of(checkpoint, record)
    model = section.build()
    kind = kind_of(model)
    notes = []
    if model.dropout and kind in ("llama", "qwen3"):
        notes.append(f"dropout={model.dropout} is left out, for {kind} has none; it acts in training alone")
    with new_folder(to) as folder:
        tokenizer, more = _export_tokenizer(data, checkpoint, folder, model.seq)
        written = export_weights(checkpoint, record, kind, model, folder, dtype, max_shard)
        keys = describe(model, kind)
        keys["bos_token_id"], keys["eos_token_id"] = None, None if tokenizer is None else tokenizer.eod
        keys["dtype"] = keys["torch_dtype"] = _name(written.dtype)  # older readers know the second alone
        write_json(folder / CONFIG, keys)
    return Exported(kind, checkpoint.name, model.parameters, written, (to / TOKENIZER).exists(), (*notes, *more))


def _sections_of(checkpoint: Path, record: Record) -> tuple[Model, DataSection]:
    """Model and data as a checkpoint says they were, or else as its run does."""
    written = record.state.get("config")
    if isinstance(written, dict):
        try:
            return parse(Model, written.get("model"), "model"), parse(DataSection, written.get("data"), "data")
        except ValueError as error:
            raise ValueError(f"{checkpoint / RECORD}: {error}") from error
    path = checkpoint.resolve().parent.parent / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint} names no config and there is no {path}; export the checkpoint of a run")
    config = read_config(path)
    return config.model, config.data


def _export_tokenizer(
    data: DataSection, checkpoint: Path, folder: Path, seq: int
) -> tuple[Tokenizer | None, list[str]]:
    """The run's tokenizer, whose file is copied where it has one."""
    name = beside(data.tokenizer, checkpoint.resolve().parent.parent)
    if name == "bytes":
        return load_tokenizer(name), []
    path = Path(name).expanduser()
    if not path.is_file():
        return None, [f"there is no tokenizer {name}: the folder has none"]
    tokenizer = load_tokenizer(path, data.eod)
    content = path.read_bytes()
    write_bytes(folder / TOKENIZER, content)
    keys: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": seq}
    added = json.loads(content).get("added_tokens") or ()
    ends = [token["content"] for token in added if token["id"] == tokenizer.eod]
    keys |= {"eos_token": ends[0]} if ends else {}
    write_json(folder / "tokenizer_config.json", keys)
    return tokenizer, []


def run_import(options: argparse.Namespace, _: Sequence[str]) -> int:
    made = import_model(options.source, options.out, eod=options.eod)
    model = made.config.model.build()
    tokenizer = "bytes" if made.config.data.tokenizer == "bytes" else TOKENIZER
    print(
        f"{options.out}: {made.kind}, {count(model.parameters)} parameters in {_name(made.dtype)}, "
        f"vocabulary {model.vocab}, tokenizer {tokenizer}"
    )
    for note in made.notes:
        print(f"  {note}")
    run = shlex.quote(str(options.out))
    print(f"  fourfold sample {run} --prompt 'Once upon a time'")
    print(f"  fourfold train --resume {run} --data PATH")
    return 0


def run_export(options: argparse.Namespace, _: Sequence[str]) -> int:
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    made = export_model(options.run_folder, options.to, step=options.step, dtype=dtype, max_shard=options.max_shard)
    files = f"{made.written.files} file{'s' if made.written.files > 1 else ''}"
    print(
        f"{options.to}: {ARCHITECTURES[made.kind]} of {made.checkpoint}, {count(made.parameters)} parameters in "
        f"{_name(made.written.dtype)}, {files}, {nbytes(made.written.nbytes)}"
    )
    for note in made.notes:
        print(f"  {note}")
    to = json.dumps(str(options.to), ensure_ascii=False)  # in double quotes, since the shell takes the single ones
    code = f"from transformers import AutoModelForCausalLM as M; print(M.from_pretrained({to}))"
    if made.tokenizer:
        code = f'from transformers import pipeline; print(pipeline("text-generation", {to})("Once upon a time"))'
    print(f"  python -c {shlex.quote(code)}")
    return 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
