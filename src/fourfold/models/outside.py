"""A model named from outside: a published size, a file that describes one, or a function that builds one.

    gpt-80b                        a published size
    path/config.json, path/        Hugging Face's description of a model, or the folder that holds it
    path/model.toml                fields of `Config`; with `base = "gpt-5b"` those that differ from it
    package.module:function        `function(grid, policy)` or `function()` returns an nn.Module

A file is read as a `Config`, which says exactly what a step computes and communicates. What a `Config` cannot say is
refused with the reason, never approximated; keys that change nothing that is priced are named in `Opened.notes`.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fourfold.grid import Grid
from fourfold.models.config import Config, config
from fourfold.models.foreign import read_foreign
from fourfold.models.sizes import SIZES
from fourfold.models.transformer import build
from fourfold.nn.layer import SPECS, Layer
from fourfold.policy import Policy
from fourfold.spelling import nearest

Builder = Callable[..., nn.Module]
Model = Config | Builder

FORMS = "a published size, the path of a config.json or of its folder, the path of a .toml, or package.module:function"
PLAIN = (
    "a function without arguments builds a plain module, which no grid cuts: it is replicated over data alone "
    "(x=y=z=1); to cut it take function(grid, policy) and ff.parallelize, or the layers of fourfold.nn"
)
TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "bool": (bool,)}
"""What a field may hold, by its annotation; all others are texts."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A model, and what its description says that a plan does not read."""

    model: Model
    notes: tuple[str, ...] = ()


def read_model(text: str) -> Opened:
    """The model of that name, file or function, with notes on what was not read."""
    if text in SIZES:
        return Opened(config(text))
    path = Path(text).expanduser()
    if path.suffix == ".toml":
        return Opened(_from_toml(_existing(path)))
    if path.suffix == ".json" or path.is_dir():
        fields, notes = read_foreign(_existing(path / "config.json" if path.is_dir() else path))
        return Opened(_checked(fields, str(path)), notes)
    if ":" in text:
        return Opened(_function(text))
    if "/" in text:
        raise FileNotFoundError(f"there is no {path}; a model is {FORMS}")
    raise ValueError(f"no model {text!r}{nearest(text, list(SIZES))}; a model is {FORMS}; sizes: {', '.join(SIZES)}")


def only_over_data(model: Model) -> str:
    """Why a model runs on grids with x=y=z=1 alone; empty where any grid may do."""
    return "" if isinstance(model, Config) or _arguments(model) == 2 else PLAIN


def make(model: Model, grid: Grid, policy: Policy) -> nn.Module:
    """The model on the meta device, for this rank of the grid."""
    if isinstance(model, Config):
        return build(model, grid, policy=policy, device="meta")
    name = getattr(model, "__name__", repr(model))
    on, grid.device = grid.device, torch.device("meta")  # layers make their parameters on the grid's device
    try:
        with torch.device("meta"):
            made = model(grid, policy) if _arguments(model) == 2 else model()
    finally:
        grid.device = on
    if not isinstance(made, nn.Module):
        raise TypeError(f"{name} returned {type(made).__name__}; it must return an nn.Module")
    layers = [module for module in made.modules() if isinstance(module, Layer)]
    if is_plain(made) and grid.shape.world > grid.size("data"):
        raise ValueError(
            f"{name} builds a plain module, which the grid {grid} cannot cut; take data={grid.shape.world} alone, or "
            "return ff.parallelize(module, grid, policy=policy)"
        )
    if any(not hasattr(layer, "gradients") for layer in layers):
        raise ValueError(f"{name} builds layers on a grid without fourfold.nn.layer.assemble(model, grid, policy)")
    for what, tensor in (*made.named_parameters(), *made.named_buffers()):
        if not tensor.is_meta:
            raise ValueError(
                f"{name}: {what} lies on {tensor.device}; it is called inside torch.device('meta') and must not ask "
                "for another device, since a plan needs no memory"
            )
    return made


def is_plain(module: nn.Module) -> bool:
    """No layer of it is cut over a grid."""
    return not any(isinstance(part, Layer) or SPECS in vars(part) for part in module.modules())


def _arguments(function: Builder) -> int:
    """2 for (grid, policy), 0 for none."""
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(needed) not in (0, 2):
        raise ValueError(
            f"{getattr(function, '__name__', function)} needs {', '.join(part.name for part in needed)}; a function "
            "that builds a model takes (grid, policy), or nothing for a plain module"
        )
    return len(needed)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; a model is {FORMS}")
    return path


def _from_toml(path: Path) -> Config:
    try:
        fields = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    base = fields.pop("base", None)
    if base is None:
        return _checked(fields, str(path))
    if base not in SIZES:
        raise ValueError(f"{path}: no model base={base!r}{nearest(str(base), list(SIZES))}; sizes: {', '.join(SIZES)}")
    return _checked({**SIZES[base], **fields}, str(path))


def _checked(fields: Mapping[str, Any], source: str) -> Config:
    """A `Config` of these fields, each of the right kind."""
    known = {field.name: field for field in dataclasses.fields(Config)}
    for key, value in fields.items():
        if key not in known:
            raise ValueError(f"{source}: a model has no {key!r}{nearest(key, list(known))}; it has {', '.join(known)}")
        kind = str(known[key].type)
        allowed = TYPES.get(kind, (str,))
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ValueError(f"{source}: {key}={value!r} is {type(value).__name__}; it must be {kind}")
    missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields]
    if missing:
        raise ValueError(f"{source} lacks {', '.join(missing)}; give them, or base, a published size they differ from")
    try:
        return Config(**fields)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _function(text: str) -> Builder:
    where, _, name = text.rpartition(":")
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # the module is there and lacks something itself
        raise ValueError(f"{text}: there is no module {error.name!r}; install it, or set PYTHONPATH=.") from error
    if not hasattr(module, name):
        raise ValueError(f"{text}: {where} has no {name!r}{nearest(name, dir(module))}; give package.module:function")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(
            f"{text} is {type(function).__name__}, not a function that builds a model; give package.module:function"
        )
    _arguments(function)
    return function
