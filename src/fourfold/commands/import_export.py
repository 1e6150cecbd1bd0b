"""`fourfold data prepare | verify`, `import`, `export`: text to token files, Hugging Face folders to runs and back.

An import decides what a run has besides its weights: the config that it trains with, and its tokenizer. Import and
export write a new folder, which appears complete or not at all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fourfold import models
from fourfold.atomic import AtomicFolder, write_bytes
from fourfold.checkpoint.format import RECORD, Record, read_record
from fourfold.checkpoint.hf_weights import (
    ExportedWeights,
    export_weights,
    import_weights,
    write_json,
)
from fourfold.checkpoint.load import CHECKPOINTS, Checkpoints, find_checkpoint
from fourfold.data import sources
from fourfold.data.token_files import TokenFile
from fourfold.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from fourfold.models.hugging_face import ARCHITECTURES, config_keys, model_type_of, read_config_json, read_keys
from fourfold.parse import parse_json
from fourfold.report.units import count, nbytes
from fourfold.train.config import (
    BatchSection,
    DataSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    TrainConfig,
    beside,
    read_config,
)
from fourfold.train.progress import percent_of
from fourfold.train.schema import parse, to_table

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "spiece.model")
LONGEST_SEQ = 1024
"""Maximum sequence length, in tokens, in the config of an imported run: many models allow far longer sequences, which
would not fit into memory."""
LEARNING_RATE = 2e-5
"""The learning rate in the config of an imported run: a usual one for fine-tuning, which does not undo what the model
has learned."""


def prepare_data(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the token file and print a summary of it."""
    tokenizer = load_tokenizer(options.tokenizer, options.eod)
    written = sources.prepare(options.inputs, options.out, tokenizer, column=options.column, progress=percent_of())
    print(f"{written.path}: {written.tokens} tokens of {written.documents} documents, vocabulary {written.vocab}")
    return 0


def verify_data(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Verify files of tokens; name the damaged ones, and return 1 if there is any."""
    damaged = 0
    for path in options.inputs:
        try:
            print(f"{path}: {_verify_source(path)}")
        except (OSError, ValueError) as error:  # continue, so that one call names all damaged files
            print(f"fourfold: {error}", file=sys.stderr)
            damaged += 1
    return 1 if damaged else 0


def _verify_source(path: str) -> str:
    """Verify a file of tokens and return a summary of it."""
    if sources.is_text(path):
        raise ValueError(f"{path} is text, which has no checksum; give files of tokens")
    source = sources.open_source(path, tokenizer=None, cache=Path())  # files of tokens need no cache
    found = f"{source.tokens} tokens"
    if not isinstance(source, TokenFile):
        return f"{found}; its size is right, and the format has no checksum"
    known = source.verify(percent_of(source.name))
    return f"{found} of {source.documents} documents; {'the checksum is right' if known else 'it has no checksum'}"


@dataclass(frozen=True, slots=True)
class Imported:
    """Describes the run that an import has made."""

    model_type: str
    config: TrainConfig
    dtype: torch.dtype
    notes: tuple[str, ...]


def import_model(source: Path, out: Path, *, eod: str | None = None) -> Imported:
    """Make a run from a Hugging Face folder: its config, its weights as the checkpoint of step 0, its tokenizer.

    `eod` names the token that ends a document, for tokenizers that have an unusual name for it.
    """
    path = source / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; give the folder of a Hugging Face model, with its {CONFIG}")
    model_type, model, notes = _read_model(path)
    with AtomicFolder(out.resolve()).fill() as folder:
        data, more = _import_tokenizer(source, folder, model.vocab, eod)
        config = TrainConfig(
            model=ModelSection(source.resolve().name, **dataclasses.asdict(model)),
            data=data,
            batch=BatchSection(seq=min(LONGEST_SEQ, model.seq)),
            optimizer=OptimizerSection(learning_rate=LEARNING_RATE),
        )
        state = {"step": 0, "config": to_table(config)}
        dtype = import_weights(source, model_type, model, Checkpoints(folder / CHECKPOINTS).path(0), state)
        write_bytes(folder / "config.toml", config.toml().encode())
    return Imported(model_type, config, dtype, (*notes, *more))


def _read_model(path: Path) -> tuple[str, models.ModelConfig, tuple[str, ...]]:
    """Return the model type, a model config that computes the same, and notes about keys that were not read."""
    fields, notes = read_config_json(path, exact=True)
    try:
        section = parse(ModelSection, {"name": "imported", **fields})  # checks the type of every value
        chosen = {name: getattr(section, name) for name in fields}
        return read_keys(path)["model_type"], models.ModelConfig(**chosen), notes
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _import_tokenizer(source: Path, folder: Path, vocab: int, eod: str | int | None) -> tuple[DataSection, list[str]]:
    """Copy the tokenizer into the run; return the section that names it, and notes for the user."""
    path = source / TOKENIZER
    if not path.is_file():
        note = f"{source} has no {TOKENIZER}: the run reads text as bytes; set data.tokenizer to the model's own"
        if others := [name for name in OTHER_TOKENIZERS if (source / name).exists()]:
            note += (
                f'; to convert {others[0]}: python -c "from transformers import AutoTokenizer as T; '
                f"T.from_pretrained('{source}').save_pretrained('NEW')\""
            )
        return DataSection(), [note]
    if ByteTokenizer.is_json(parse_json(path.read_bytes())):
        return DataSection(), []  # an export of ours: text and tokens that were read as bytes still fit
    notes = []
    if eod is None:
        eod, notes = _end_of_document(source)
    tokenizer = load_tokenizer(path, eod)
    if tokenizer.vocab > vocab:
        notes.append(f"{path} has ids up to {tokenizer.vocab - 1}, but the model only knows ids below {vocab}")
    write_bytes(folder / TOKENIZER, path.read_bytes())
    return DataSection(tokenizer=TOKENIZER, eod=eod), notes


def _end_of_document(source: Path) -> tuple[int | None, list[str]]:
    """Return None if the tokenizer has a usual token that ends a document, else the id from config.json, and a note."""
    try:
        load_tokenizer(source / TOKENIZER)
    except ValueError:
        eos = read_keys(source / CONFIG).get("eos_token_id")
        # models for chats list several ids; the first ends a document
        eos = eos[0] if isinstance(eos, list) and eos else eos
        if not isinstance(eos, int):
            raise  # the error says that --eod can name the token
        return eos, [f"documents end with the id {eos}, the eos_token_id of {CONFIG}"]
    return None, []


@dataclass(frozen=True, slots=True)
class Exported:
    """Describes the Hugging Face folder that an export has made."""

    model_type: str
    checkpoint: str
    """The name of the checkpoint's folder."""
    parameters: int
    weights: ExportedWeights
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
    """Make a Hugging Face folder from a checkpoint: the newest of a run, the one of a step, or a given folder.

    Without a dtype the weights keep their own. Files have at most `max_shard` bytes.
    """
    checkpoint = find_checkpoint(run, step)
    record = read_record(checkpoint)
    section, lora, data = _sections_of(checkpoint, record)
    model = section.build()
    model_type = model_type_of(model)
    notes = ["the LoRA pairs are merged into the weights"] if lora.rank else []
    left_out = {"dropout": model.dropout if model_type not in ("gpt2", "gpt_neox") else 0.0, "z_loss": model.z_loss}
    notes += [
        f"{name}={value} is left out, because {model_type} has no {name}; it only affects training"
        for name, value in left_out.items()
        if value
    ]
    with AtomicFolder(to.resolve()).fill() as folder:
        tokenizer, more = _export_tokenizer(data, checkpoint, folder, model)
        weights = export_weights(checkpoint, record, model_type, model, folder, dtype, max_shard, lora.build())
        keys = config_keys(model, model_type)
        # explicit, because transformers would otherwise assume the ids of the original model's tokenizer
        keys["bos_token_id"], keys["eos_token_id"] = None, None if tokenizer is None else tokenizer.eod
        keys["dtype"] = keys["torch_dtype"] = _name(weights.dtype)  # older versions of transformers read the second
        write_json(folder / CONFIG, keys)
    has_tokenizer = (to / TOKENIZER).exists()
    return Exported(model_type, checkpoint.name, model.parameters, weights, has_tokenizer, (*notes, *more))


def _sections_of(checkpoint: Path, record: Record) -> tuple[ModelSection, LoraSection, DataSection]:
    """Return the sections model, lora and data of the config in a checkpoint, or else of the config of its run."""
    written = record.state.get("config")
    if isinstance(written, dict):
        try:
            return (
                parse(ModelSection, written.get("model"), "model"),
                parse(LoraSection, written.get("lora", {}), "lora"),  # checkpoints of earlier versions have none
                parse(DataSection, written.get("data"), "data"),
            )
        except ValueError as error:
            raise ValueError(f"{checkpoint / RECORD}: {error}") from error
    path = checkpoint.resolve().parent.parent / "config.toml"
    if not path.is_file():
        raise FileNotFoundError(f"{checkpoint} names no config and there is no {path}; export the checkpoint of a run")
    config = read_config(path)
    return config.model, config.lora, config.data


def _export_tokenizer(
    data: DataSection, checkpoint: Path, folder: Path, model: models.ModelConfig
) -> tuple[Tokenizer | None, list[str]]:
    """Write the run's tokenizer for transformers, whose ids and texts equal ours; return it, and notes for the user."""
    name = beside(data.tokenizer, checkpoint.resolve().parent.parent)
    path = Path(name).expanduser()
    if name != "bytes" and not path.is_file():
        return None, [f"the run's tokenizer {name} does not exist, so the folder has no tokenizer"]
    tokenizer = load_tokenizer(name, data.eod)
    if name == "bytes" and tokenizer.vocab > model.vocab:
        return None, [
            f"the run reads text as bytes, with ids up to {tokenizer.vocab - 1}, but the model only knows ids below "
            f"{model.vocab}, so the folder has no tokenizer"
        ]
    content = json.dumps(ByteTokenizer.to_json()).encode() if name == "bytes" else path.read_bytes()
    write_bytes(folder / TOKENIZER, content)
    keys: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.seq,
        # transformers would remove spaces before punctuation
        "clean_up_tokenization_spaces": False,
    }
    if name == "bytes":
        keys["split_special_tokens"] = True  # a text that spells the special token is bytes like any other
    added = parse_json(content).get("added_tokens") or ()
    ends = [token["content"] for token in added if token["id"] == tokenizer.eod]
    keys |= {"eos_token": ends[0]} if ends else {}
    write_json(folder / "tokenizer_config.json", keys)
    return tokenizer, []


def run_import(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Import a model, and print what was made and how to use it."""
    made = import_model(options.source, options.out, eod=options.eod)
    model = made.config.model.build()
    tokenizer = "bytes" if made.config.data.tokenizer == "bytes" else TOKENIZER
    print(
        f"{options.out}: {made.model_type}, {count(model.parameters)} parameters in {_name(made.dtype)}, "
        f"vocabulary {model.vocab}, tokenizer {tokenizer}"
    )
    for note in made.notes:
        print(f"  {note}")
    run = shlex.quote(str(options.out))
    print(f"  fourfold sample {run} --prompt 'Once upon a time'")
    print(f"  fourfold train --resume {run} --data PATH")
    return 0


def run_export(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Export a model, and print what was made and how transformers opens it."""
    dtype = None if options.dtype is None else DTYPES[options.dtype]
    made = export_model(options.run_folder, options.to, step=options.step, dtype=dtype, max_shard=options.max_shard)
    files = f"{made.weights.files} file{'s' if made.weights.files > 1 else ''}"
    print(
        f"{options.to}: {ARCHITECTURES[made.model_type]} of {made.checkpoint}, {count(made.parameters)} parameters in "
        f"{_name(made.weights.dtype)}, {files}, {nbytes(made.weights.nbytes)}"
    )
    for note in made.notes:
        print(f"  {note}")
    to = json.dumps(str(options.to), ensure_ascii=False)  # double quotes, because shlex.quote adds single ones
    code = f"from transformers import AutoModelForCausalLM as M; print(M.from_pretrained({to}))"
    if made.tokenizer:
        code = f'from transformers import pipeline; print(pipeline("text-generation", {to})("Once upon a time"))'
    print(f"  python -c {shlex.quote(code)}")
    return 0


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
