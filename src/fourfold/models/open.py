"""Opens a model by name: a published size, a file that describes a model, or a function that builds one.

    gpt-80b                        a published size
    path/config.json, path/        Hugging Face's description of a model, or the folder that holds it
    path/model.toml                fields of `ModelConfig`; with `base = "gpt-5b"` only those that differ from it
    package.module:function        `function(grid, policy)` or `function()` returns an nn.Module

A file is read as a `ModelConfig`, which says exactly what a step computes and communicates. A model that it cannot
express is refused with the reason, never approximated. Keys that do not change the cost of a step are named in
`OpenedModel.notes`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from fourfold.grid import Grid
from fourfold.models.config import MODEL_FIELDS, ModelConfig, config, nearest_size, require_fields
from fourfold.models.hugging_face import read_config_json
from fourfold.models.sizes import SIZES
from fourfold.models.transformer import build
from fourfold.nn.layer import SPECS, Layer
from fourfold.parse import import_object, parse_toml
from fourfold.policy import Policy

ModelBuilder = Callable[..., nn.Module]
ModelDefinition = ModelConfig | ModelBuilder
"""A config, or a function that builds a module."""

FORMS = "a published size, the path of a config.json or of its folder, the path of a .toml, or package.module:function"
DATA_ONLY = (
    "a function without arguments builds a plain module, which is replicated over data and cut over no other axis; to "
    "cut it, write function(grid, policy) with ff.parallelize or the layers of fourfold.nn"
)
"""Why a plain module runs on grids that use no axis but data."""

TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}
"""The types of values that a field of this type accepts; a field of any other type accepts a text."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model, and notes on keys of its description that were not read."""

    model: ModelDefinition
    notes: tuple[str, ...] = ()


def open_model(text: str) -> OpenedModel:
    """Return the model of this name, file or function."""
    if text in SIZES:
        return OpenedModel(config(text))
    path = Path(text).expanduser()
    if path.suffix == ".toml":
        return OpenedModel(_from_toml(_existing(path)))
    if path.suffix == ".json" or path.exists():
        fields, notes = read_config_json(config_json_path(text))
        return OpenedModel(_make_config(fields, str(path)), notes)
    if ":" in text:
        return OpenedModel(_import_function(text))
    if "/" in text:
        raise FileNotFoundError(
            f"there is no {path}; a model is {FORMS}; nothing is fetched from the Hugging Face hub: download its "
            "config.json"
        )
    raise ValueError(f"there is no model {text!r}{nearest_size(text)}; a model is {FORMS}; sizes: {', '.join(SIZES)}")


def config_json_path(text: str) -> Path:
    """Return the config.json that a path names, by itself or by its folder."""
    path = Path(text).expanduser()
    return _existing(path / "config.json" if path.is_dir() else path)


def why_data_only(model: ModelDefinition) -> str:
    """Return why a model runs only on grids that use no axis but data; empty if it runs on any grid."""
    return "" if isinstance(model, ModelConfig) or _arguments(model) == 2 else DATA_ONLY


def build_on_meta(model: ModelDefinition, grid: Grid, policy: Policy) -> nn.Module:
    """Build this rank's part of the model on the meta device."""
    if isinstance(model, ModelConfig):
        return build(model, grid, policy=policy, device="meta")
    name = getattr(model, "__name__", repr(model))
    real, grid.device = grid.device, torch.device("meta")  # layers create their parameters on the grid's device
    try:
        with torch.device("meta"):
            made = model(grid, policy) if _arguments(model) == 2 else model()
    finally:
        grid.device = real
    if not isinstance(made, nn.Module):
        raise TypeError(f"{name} returned {type(made).__name__}; it must return an nn.Module")
    layers = [module for module in made.modules() if isinstance(module, Layer)]
    if is_plain(made) and grid.shape.world > grid.size("data"):
        raise ValueError(
            f"{name} builds a plain module, which the grid {grid} cannot cut; use data={grid.shape.world} and no other "
            "axis, or return ff.parallelize(module, grid, policy=policy)"
        )
    if any(not hasattr(layer, "gradients") for layer in layers):
        raise ValueError(
            f"{name} builds layers of fourfold.nn but does not call nn.layer.assemble(model, grid, policy)"
        )
    for what, tensor in (*made.named_parameters(), *made.named_buffers()):
        if not tensor.is_meta:
            raise ValueError(
                f"{name}: {what} is on {tensor.device}; the function runs inside torch.device('meta') and must not ask "
                "for another device, since a plan needs no memory"
            )
    return made


def is_plain(module: nn.Module) -> bool:
    """Return whether no layer of the module is cut over a grid."""
    return not any(isinstance(part, Layer) or SPECS in vars(part) for part in module.modules())


def _arguments(function: ModelBuilder) -> int:
    """Return the number of required arguments: 2 for (grid, policy), or 0."""
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


def _from_toml(path: Path) -> ModelConfig:
    try:
        fields = parse_toml(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    base = fields.pop("base", None)
    if base is not None and base not in SIZES:
        raise ValueError(f"{path}: there is no model base={base!r}{nearest_size(str(base))}; sizes: {', '.join(SIZES)}")
    sizes = {} if base is None else SIZES[base]
    return _make_config({**sizes, **fields}, str(path))


def _make_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """Return a config of these fields after checking their names and types."""
    require_fields(fields, f"{source}: ")
    for key, value in fields.items():
        kind = MODEL_FIELDS[key]
        allowed = TYPES.get(kind, (str,))
        # A bool is an int to Python, but layers = true is a mistake.
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            wanted = " or ".join(map(repr, get_args(kind))) or kind.__name__
            raise ValueError(f"{source}: {key}={value!r} is {type(value).__name__}; it must be {wanted}")
    required = [field.name for field in dataclasses.fields(ModelConfig) if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in fields]
    if missing:
        raise ValueError(
            f"{source} lacks {', '.join(missing)}; give them, or give base, the published size that has the others"
        )
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _import_function(text: str) -> ModelBuilder:
    function = import_object(text, "package.module:function")
    if not callable(function):
        raise ValueError(
            f"{text} is {type(function).__name__}, not a function that builds a model; give package.module:function"
        )
    _arguments(function)
    return function
