"""Weights from and to the safetensors files of a Hugging Face folder, a tensor at a time.

Neither way holds the whole model: a tensor is read, cut or joined, written, and let go before the next. Names, shapes
and dtypes of all files are checked before the first tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoint.files import File, TensorTypes, write_file
from fourfold.checkpoint.folder import Place, flush
from fourfold.checkpoint.names import FAMILIES, HEAD, Piece, match, pieces_of, shapes_of
from fourfold.checkpoint.record import Record, require_same_names
from fourfold.checkpoint.weights import MODEL
from fourfold.checkpoint.whole import read_whole, write_whole
from fourfold.errors import DamagedCheckpointError
from fourfold.models.config import Config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which appears as `target` once the block has ended well, and else not at all."""
    target = target.resolve()
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} is there already and not an empty folder; choose another to write")
    with Place(target).filling() as partial:
        yield partial


def write_bytes(path: Path, content: bytes) -> None:
    """Through to the disk, so that the folder never appears without it."""
    path.write_bytes(content)
    flush(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


# Theirs to ours


def import_weights(source: Path, kind: str, config: Config, folder: Path, state: dict[str, Any]) -> torch.dtype:
    """Write a checkpoint of a Hugging Face folder's weights, in their dtypes; returns that of the embedding."""
    pieces, shapes = pieces_of(config, kind), shapes_of(config)
    with _opened(source) as files:
        names = match(pieces, kind, files, source)
        layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for piece in pieces:
            dtype = _checked(files[names[piece.theirs]], names[piece.theirs], piece.shape(shapes))
            layout |= {MODEL + name: (dtype, shapes[name]) for name in piece.ours}
        if config.tied and HEAD in names:
            _require_tied(files, names, pieces)
        write_whole(folder, layout, _cut(files, names, pieces), state)
        return layout[MODEL + "embedding.weight"][0]


def _cut(files: Mapping[str, File], names: Mapping[str, str], pieces: Iterable[Piece]) -> Iterator[Tensor]:
    for piece in pieces:
        name = names[piece.theirs]
        yield from piece.cut(files[name].read(name))


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, File]]:
    """By the name of every tensor of a folder the file that holds it."""
    with ExitStack() as stack:
        found: dict[str, File] = {}
        for path, promised in _paths(folder).items():
            file = stack.enter_context(File(path))
            if lacking := sorted(promised - file.stored.keys()):
                raise DamagedCheckpointError(
                    f"{path} does not hold {lacking[0]!r}, but {INDEX} says so; copy the folder again"
                )
            for name in file.stored:
                if name in found:
                    raise DamagedCheckpointError(
                        f"{name!r} is both in {found[name].path} and in {path}; copy the folder again"
                    )
                found[name] = file
        yield found


def _paths(folder: Path) -> dict[Path, set[str]]:
    """The files of a folder that hold weights, and what its index says of each."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: set()}
    index = folder / INDEX
    if not index.is_file():
        raise _no_weights(folder)
    try:
        where = json.loads(index.read_text())["weight_map"]
        files: dict[Path, set[str]] = {}
        for name, file in where.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not the name of a file beside it")
            files.setdefault(folder / file, set()).add(name)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{index} is no index of weights ({type(error).__name__}: {error}); copy it again"
        ) from error
    return files


def _no_weights(folder: Path) -> Exception:
    pickles = [name for name in PICKLES if (folder / name).exists()]
    if pickles:
        return ValueError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run code and is never opened; where you "
            'trust it, convert it: python -c "from transformers import AutoModelForCausalLM as M; '
            f"M.from_pretrained('{folder}').save_pretrained('NEW')\""
        )
    return FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}; give a Hugging Face folder with its weights")


def _checked(file: File, name: str, shape: tuple[int, ...]) -> torch.dtype:
    stored = file.stored[name]
    if stored.shape != shape:
        raise DamagedCheckpointError(
            f"{file.path}: {name!r} has shape {stored.shape}, and by config.json {shape}; copy both again"
        )
    if stored.dtype not in FLOATS:
        raise ValueError(
            f"{file.path}: {name!r} has dtype {stored.dtype}, so the weights are packed; save them in one of "
            f"{', '.join(map(str, FLOATS))}"
        )
    return stored.dtype


def _require_tied(files: Mapping[str, File], names: Mapping[str, str], pieces: Iterable[Piece]) -> None:
    """Raise where a head that is said to be the embedding's table is another."""
    table = next(names[piece.theirs] for piece in pieces if piece.ours == ("embedding.weight",))
    head = names[HEAD]
    if not torch.equal(files[table].read(table), files[head].read(head)):
        raise ValueError(
            f"{files[head].path}: {head!r} is not equal to {table!r}, though config.json ties them; "
            "say tie_word_embeddings=false there to keep both"
        )


# Ours to theirs


@dataclass(frozen=True, slots=True)
class Written:
    """What an export has written."""

    files: int
    nbytes: int
    dtype: torch.dtype
    """Of the embedding."""


def export_weights(
    checkpoint: Path, record: Record, kind: str, config: Config, to: Path, dtype: torch.dtype | None, max_shard: int
) -> Written:
    """Write the weights of a checkpoint into files of at most `max_shard` bytes, or one tensor where that is larger.

    Without a dtype each tensor keeps its own.
    """
    shapes = shapes_of(config)
    _require_model(checkpoint, record, shapes)
    pieces = {FAMILIES[kind].written(piece.theirs): piece for piece in pieces_of(config, kind)}
    layout = {name: (dtype or _dtype(record, piece), piece.shape(shapes)) for name, piece in pieces.items()}
    shards = _shards(layout, max_shard)
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(names, shards, strict=True):
        part = {name: layout[name] for name in shard}
        write_file(to / file, part, (_join(checkpoint, record, name, pieces[name], part[name][0]) for name in shard))
    nbytes = sum(_nbytes(entry) for entry in layout.values())
    if len(shards) > 1:
        where = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        write_json(to / INDEX, {"metadata": {"total_size": nbytes}, "weight_map": where})
    return Written(len(shards), nbytes, next(iter(layout.values()))[0])


def _require_model(checkpoint: Path, record: Record, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise unless the checkpoint has the parameters of the model, each in its shape."""
    wanted = {MODEL + name: shape for name, shape in shapes.items()}
    found = {name: entry.shape for name, entry in record.tensors.items() if name.startswith(MODEL)}
    require_same_names(wanted, found, checkpoint)
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ValueError(f"{name!r} has shape {found[name]} in {checkpoint}, and by the config {shape}")


def _dtype(record: Record, piece: Piece) -> torch.dtype:
    return reduce(torch.promote_types, (record.tensors[MODEL + name].dtype for name in piece.ours))


def _join(checkpoint: Path, record: Record, name: str, piece: Piece, dtype: torch.dtype) -> Tensor:
    whole = piece.join([read_whole(checkpoint, record, MODEL + part) for part in piece.ours])
    cast = whole.to(dtype)
    if cast.dtype != whole.dtype and not torch.equal(cast.isfinite(), whole.isfinite()):
        raise ValueError(f"{name!r} has values that {dtype} cannot hold; export in another dtype, such as --dtype bf16")
    return cast


def _shards(layout: TensorTypes, most: int) -> list[list[str]]:
    """Names in order, as many to a file as fit."""
    shards: list[list[str]] = []
    held = 0
    for name, entry in layout.items():
        if not shards or held + _nbytes(entry) > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += _nbytes(entry)
    return shards


def _nbytes(entry: tuple[torch.dtype, tuple[int, ...]]) -> int:
    dtype, shape = entry
    return prod(shape) * dtype.itemsize
