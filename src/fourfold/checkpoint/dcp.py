"""Exchange with folders of torch's distributed checkpoint (DCP), tensor by tensor, for one process.

    model/NAME                 <->  model.NAME
    optimizer/exp_avg/NAME     <->  optim.state.NAME.exp_avg    as torch's get_optimizer_state_dict names it
    random/cpu                 <->  random.cpu
    the state of the run       <->  fourfold, a string of JSON

That string has the names too, so that a folder which was written here comes back as it was; of a folder that others
wrote the parameters are taken. Its `.metadata` is read as `dcp_metadata` says, its data through torch's own reader of
nothing but tensors, so that nothing in it is run.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from fourfold.checkpoint.dcp_metadata import Box, Contents, Parts, Span, read_metadata
from fourfold.checkpoint.files import CODES, File
from fourfold.checkpoint.folder import Place
from fourfold.checkpoint.record import Record, read_record
from fourfold.checkpoint.training import OPTIMIZER, RANDOM
from fourfold.checkpoint.weights import MODEL
from fourfold.checkpoint.whole import read_whole, write_whole
from fourfold.errors import DamagedCheckpointError, MissingCheckpointError

STATE = "fourfold"
"""The key of what is no tensor."""
VERSION = 1
PREFIX = "model."
"""Before the parameters of a folder that others wrote, where any key begins so."""
OTHERS = ("optim.", "optimizer.", "lr_scheduler.", "scheduler.", "dataloader.", "train_state.")
"""Where no key begins with `model.`: what is not taken for a parameter."""

Progress = Callable[[int, int], object]
"""Hears of bytes done, and of how many there are."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What became of a folder: tensors and bytes that were taken, keys that were not."""

    tensors: int
    nbytes: int
    left_out: tuple[str, ...] = ()


def to_dcp(source: Path, target: Path, *, progress: Progress = lambda *_: None) -> Converted:
    """Write a checkpoint as a folder that `torch.distributed.checkpoint.load` reads; every byte is verified.

    A file for each tensor, since torch's writer keeps all tensors of a file in memory until it is closed.
    """
    require_free(target)
    record = read_record(source)
    paths = {name: path_of(name) for name in record.tensors}
    names = {".".join(path): name for name, path in paths.items()}
    if len(names) < len(paths):
        twice = next(name for name, path in paths.items() if names[".".join(path)] != name)
        raise ValueError(f"{source}: {twice!r} and {names['.'.join(paths[twice])]!r} would get the same key")
    total = sum(entry.nbytes for entry in record.tensors.values())
    planner = _Planner(lambda key: read_whole(source, record, names[key]), lambda done: progress(done, total))
    place = Place(target.resolve())
    try:
        with place.filling() as partial, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
            writer = dcp.FileSystemWriter(partial, single_file_per_rank=False, per_thread_copy_ahead=0)
            dcp.save(_nested(record, paths, names), storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))  # torch wraps whatever happened, even Ctrl-C
        if isinstance(cause, RuntimeError) and isinstance(cause.__context__, OSError):
            cause = OSError(cause.__context__.errno, f"cannot write {place.partial} ({cause.__context__.strerror})")
        raise cause from None
    return Converted(len(names), total)


def path_of(name: str) -> tuple[str, ...]:
    """Where a tensor stands in the nested state dict of a DCP folder; its key is the path with dots."""
    group, _, rest = name.partition("/")
    if name.startswith(OPTIMIZER):
        moment, _, parameter = rest.partition("/")
        return "optim", "state", parameter, moment
    if not name.startswith((MODEL, RANDOM)):
        raise ValueError(f"{name!r} is neither of {MODEL}, {OPTIMIZER} nor {RANDOM} and has no name in a DCP folder")
    return group, rest


def _nested(record: Record, paths: Mapping[str, tuple[str, ...]], names: Mapping[str, str]) -> dict[str, Any]:
    """The state dict, with tensors that have a shape and no memory."""
    nested: dict[str, Any] = {STATE: json.dumps({"version": VERSION, "state": record.state, "names": names})}
    for name, (*folders, last) in paths.items():
        at = nested
        for folder in folders:
            at = at.setdefault(folder, {})
        entry = record.tensors[name]
        at[last] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
    return nested


class _Planner(DefaultSavePlanner):
    """Reads a tensor when torch comes to write it."""

    def __init__(self, read: Callable[[str], Tensor], say: Callable[[int], object]) -> None:
        super().__init__()
        self._read, self._say, self._done = read, say, 0

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if not isinstance(found, Tensor):
            return found
        self._done += found.nbytes
        self._say(self._done)
        return self._read(index.fqn)


def from_dcp(
    source: Path, target: Path, *, prefix: str | None = None, progress: Progress = lambda *_: None
) -> Converted:
    """Write a DCP folder as a checkpoint; runs nothing that is in it, whoever wrote it.

    Of a folder that `to_dcp` has not written the tensors are taken whose keys begin with `prefix`, as parameters
    without it; None: `model.` where any key begins so, else all that are not of OTHERS.
    """
    require_free(target)
    contents = read_metadata(source)
    state: dict[str, Any] = {}
    if STATE in contents.others:
        if prefix is not None:
            raise ValueError(f"{source} was written by Fourfold and knows its names; leave the prefix {prefix!r} out")
        state, names = _ours(source, contents)
        left_out: list[str] = []
    else:
        names = _parameters(source, contents, prefix)
        left_out = [key for key in (*contents.tensors, *contents.others) if key not in names]
    taken = {name: (key, contents.tensors[key]) for key, name in names.items()}
    for key, parts in taken.values():
        _require_readable(source, key, parts)

    total = sum(parts.nbytes for _, parts in taken.values())

    def tensors() -> Iterator[Tensor]:
        done = 0
        for key, parts in taken.values():
            yield _read(source, key, parts)
            done += parts.nbytes
            progress(done, total)

    write_whole(target, {name: (parts.dtype, parts.shape) for name, (_, parts) in taken.items()}, tensors(), state)
    return Converted(len(taken), total, tuple(left_out))


def require_free(target: Path) -> None:
    """A conversion replaces nothing."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already; choose another folder to write")


def _require_readable(source: Path, key: str, tensor: Parts) -> None:
    """Raise before anything is written unless a checkpoint can hold the tensor and the files are long enough."""
    if tensor.dtype not in CODES:
        held = ", ".join(str(dtype).removeprefix("torch.") for dtype in CODES)
        raise ValueError(f"{source}: {key!r} has dtype {tensor.dtype}; a checkpoint holds {held}")
    for _, span in tensor.parts:
        _require_whole(source / span.file, key, span)


def _require_whole(path: Path, key: str, span: Span) -> None:
    if not path.is_file():
        raise MissingCheckpointError(f"{path} is missing; copy the folder again with all its files")
    if span.offset + span.nbytes > path.stat().st_size:
        raise DamagedCheckpointError(
            f"{path} is cut short: {key!r} ends at byte {span.offset + span.nbytes}; copy it again"
        )


def _ours(source: Path, contents: Contents) -> tuple[dict[str, Any], dict[str, str]]:
    """State and names by key of a folder that `to_dcp` has written."""
    span = contents.others[STATE]
    _require_whole(source / span.file, STATE, span)
    text = _loaded(source, STATE, span)
    try:
        table = json.loads(text)
        version, state, names = table["version"], table["state"], table["names"]
        fine = isinstance(state, dict) and all(isinstance(name, str) and "/" in name for name in names.values())
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{source}: {STATE!r} is damaged ({type(error).__name__}: {error}); save it again") from error
    if version != VERSION:
        raise ValueError(
            f"{source} is of version {version!r}, and this Fourfold reads {VERSION}; use the one that wrote it"
        )
    if not fine or names.keys() != contents.tensors.keys() or len(set(names.values())) < len(names):
        raise ValueError(f"{source}: the names in {STATE!r} are not those of its tensors; save it again")
    return state, names


def _parameters(source: Path, contents: Contents, prefix: str | None) -> dict[str, str]:
    """What the tensors of a folder that others wrote are called here, by key."""
    unwanted = ()
    if prefix is None:
        prefix = PREFIX if any(key.startswith(PREFIX) for key in contents.tensors) else ""
        unwanted = () if prefix else OTHERS
    names = {
        key: MODEL + key.removeprefix(prefix)
        for key in contents.tensors
        if key.startswith(prefix) and not key.startswith(unwanted)
    }
    if not names:
        shown = ", ".join(map(repr, list(contents.tensors)[:5])) or "none"
        raise ValueError(f"{source} has no tensor that begins with {prefix!r}; its tensors are {shown} ...")
    return names


def _read(source: Path, key: str, tensor: Parts) -> Tensor:
    """A tensor joined from its parts."""
    if len(tensor.parts) == 1:
        return _read_part(source, key, tensor, *tensor.parts[0])
    whole = torch.empty(tensor.shape, dtype=tensor.dtype)
    for box, span in tensor.parts:
        part = _read_part(source, key, tensor, box, span)
        whole[tuple(slice(of_dim.start, of_dim.stop) for of_dim in box)].copy_(part)
    return whole


def _read_part(source: Path, key: str, tensor: Parts, box: Box, span: Span) -> Tensor:
    path = source / span.file
    with path.open("rb") as file:
        file.seek(span.offset + 8)
        is_safetensors = file.read(2) == b'{"'
    part = _from_safetensors(path, key) if is_safetensors else _loaded(source, key, span)
    # a tensor of another class would be code of its own
    if type(part) is not Tensor or part.layout != torch.strided or part.device.type != "cpu":
        raise ValueError(f"{path} holds no plain tensor for {key!r}; save it again")
    found, expected = (part.dtype, tuple(part.shape)), (tensor.dtype, tuple(map(len, box)))
    if found != expected:
        raise DamagedCheckpointError(
            f"{path} holds {found} for {key!r}, but .metadata says {expected}; copy the folder again"
        )
    return part


def _from_safetensors(path: Path, key: str) -> Tensor:
    """From a file of SerializationFormat.SAFETENSORS: by its key, since .metadata does not know the place."""
    with File(path) as content:
        if key not in content.stored:
            raise DamagedCheckpointError(f"{path} does not hold {key!r}; copy the folder again")
        return content.read(key)


def _loaded(source: Path, key: str, span: Span) -> Any:
    """What torch.save wrote there, if it is made of tensors and plain values."""
    path = source / span.file
    with path.open("rb") as file:
        file.seek(span.offset)
        content = io.BytesIO(file.read(span.nbytes))
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or hostile stream makes torch raise
        raise DamagedCheckpointError(
            f"{path} holds something else than a tensor for {key!r} and nothing of it was run "
            f"({_reason(error)}); copy it again, or do not trust it"
        ) from error


def _reason(error: Exception) -> str:
    """Of torch's long advice the line that says what was found."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    said = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
    return said if said.isprintable() else ascii(said)  # it may quote the file
