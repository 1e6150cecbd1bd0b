"""The state of training as named tensors, each rank with its own shards, and as a table of what is not a tensor.

    model/NAME                 parameters and persistent buffers, under the names of the unsharded model
    optimizer/KEY/NAME         the optimizer's state, KEY as torch names it: exp_avg, momentum_buffer, step, ...
    random/cpu, random/cuda    the states of torch's random generators, one row per rank
    random/clock               step and micro-step, on which the next dropout masks depend

Names and global shapes do not depend on the grid, which is why any grid loads what any other has saved. So state of the
shape of its parameter is cut like the parameter, with the sharded optimizer over data too, and a scalar is not cut.
State of any other shape, such as the moments of rows and columns that Adafactor keeps, is refused.

The table, `training` in the state of a record, has what torch keeps outside of tensors:

    {"stored": ["c_attn.weight_0", ...],                     parameters that the plain module holds in another form
     "modules": {"head": {"scale": 2}},                      what get_extra_state of a module returns, by module
     "seed": 0,                                              the seed of dropout masks
     "pipeline": {"cuts": [0, 3, 6], "placement": [0, 1], "schedule": "1f1b"},        for the record: nobody reads it
     "optimizer": {"class": "torch.optim.adamw.AdamW",
                   "groups": [{"names": ["head.weight", ...], "options": {"lr": 0.001, ...}}],
                   "kinds": {"optimizer/exp_avg/NAME": "local"},       where `StateKind.usual` is not the kind
                   "values": {"head.weight": {"count": 3}}}}           state that consists of Python's numbers

A rank holds the parameters of its own pipe coordinate. `join_training_tables` and `HeldNames` say what the ranks along
pipe hold together; a checkpoint has that, and is compared with it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from fourfold.axes import AXES
from fourfold.checkpoint.format import MODEL, OPTIMIZER, RANDOM, Record, TensorInfo, pack_json, unpack_json
from fourfold.errors import name_some
from fourfold.gradients import gradients_of
from fourfold.grid import Grid
from fourfold.layout import Box, Layout, Spec
from fourfold.nn.layer import PLAIN_SLICES, specs_of
from fourfold.nn.rng import StepRng
from fourfold.optim import AdamW, ShardedOptimizer
from fourfold.params import local_of
from fourfold.schedule.action import Schedule
from fourfold.schedule.stages import Stages
from fourfold.schedule.text import to_csv

TRAINING = "training"
"""The key of the table in the state of a record."""
COUNT = "step"
"""The key under which torch's optimizers count steps."""
NOT_OPTIONS = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Keys of a parameter group that are no hyperparameters: the parameters, and how a step is computed. The latter is up
to whoever makes the optimizer, since not every device can compute a step in every way."""
CLOCK = f"{RANDOM}clock"
"""The name of the counts of a model's `StepRng`."""
ROW_PER_RANK = Layout.along(0, AXES)
"""The layout of a tensor with one row for each rank of the grid."""


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity, since tensors do not compare to one bool
class LocalShard:
    """This rank's shard of a tensor, with the global shape and how it is cut."""

    local: Tensor
    shape: tuple[int, ...]
    storage: Layout
    parameter: Tensor | None = None
    """The DTensor of the shard, if it has one: torch counts in-place operations on a DTensor and on its shard apart."""
    finite: bool = False
    """Whether it is saved only if all its numbers are finite: parameters and optimizer state, but not buffers."""

    @property
    def version(self) -> tuple[int, int]:
        """Torch's counts of in-place operations: they differ once the values have been changed."""
        return self.local._version, 0 if self.parameter is None else self.parameter._version

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.shape, self.local.dtype, self.storage, self.finite)

    def require_box(self, name: str, grid: Grid) -> Box:
        """Return this rank's box of the tensor; raise unless the shard has its shape."""
        box = self.info.box(grid.shape, grid.coords)
        if tuple(self.local.shape) != tuple(map(len, box)):
            raise ValueError(
                f"{name!r}: rank {grid.rank} holds {tuple(self.local.shape)}, but its part of {self.shape} is "
                f"{tuple(map(len, box))}; pass the local shard and the layout that cut it"
            )
        return box


LocalShards = Mapping[str, LocalShard]
"""Shards of this rank by the names of their tensors."""


def training_shards(model: nn.Module, optimizer: Optimizer) -> dict[str, LocalShard]:
    """Return this rank's shards of all tensors that are needed to resume training."""
    return {
        **model_shards(model),
        **optimizer_shards(model, optimizer),
        **random_states(grid_of(model)),
        **clock_shards(model),
    }


def training_table(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return what is needed beside the tensors, under the key of a record's state."""
    states = {name: module.get_extra_state() for name, module in _with_extra_state(model)}
    packed = {name: pack_json(state, f"the extra state of the module {name!r}") for name, state in states.items()}
    table: dict[str, Any] = {"stored": stored_otherwise(model), "modules": packed}
    if optimizer is not None:
        table["optimizer"] = describe_optimizer(model, optimizer)
        if (clock := clock_of(model)) is not None:
            table["seed"] = clock.seed
    stages = getattr(model, "stages", None)
    if isinstance(stages, Stages) and stages.pipe > 1:
        schedule: str | Schedule = model.policy.schedule  # type: ignore[assignment,missing-attribute,union-attr]
        written = schedule if isinstance(schedule, str) else to_csv(schedule)
        table["pipeline"] = {"cuts": stages.cuts, "placement": stages.placement, "schedule": written}
    return {TRAINING: table}


def join_training_tables(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one table of what the ranks along pipe hold together, given the table of each.

    Raise ValueError where their optimizers are no parts of one.
    """
    joined = {key: value for table in reversed(tables) for key, value in table.items()}
    joined["stored"] = list(dict.fromkeys(name for table in tables for name in table["stored"]))
    joined["modules"] = {name: state for table in reversed(tables) for name, state in table["modules"].items()}
    if any("optimizer" in table for table in tables):
        if lacking := [rank for rank, table in enumerate(tables) if "optimizer" not in table]:
            raise ValueError(f"pipe rank {lacking[0]} was given no optimizer, and others were; give all ranks theirs")
        joined["optimizer"] = _join_optimizers([table["optimizer"] for table in tables])
    return joined


def _join_optimizers(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the description of one optimizer, given those of its parts; groups of the same number are one group."""
    first = tables[0]
    groups: list[dict[str, Any]] = []
    for rank, table in enumerate(tables):
        if table["class"] != first["class"]:
            raise ValueError(
                f"the optimizer is {first['class']} on pipe rank 0 and {table['class']} on pipe rank {rank}; make the "
                "same one on all ranks"
            )
        for number, group in enumerate(table["groups"]):
            if number == len(groups):
                groups.append({"names": [], "options": group["options"]})
            known = groups[number]
            if not known["names"]:
                known["options"] = group["options"]  # a group that is empty so far decides nothing
            if group["names"] and known["options"] != group["options"]:
                options = known["options"], group["options"]
                key = next(key for one in options for key in one if options[0].get(key) != options[1].get(key))
                raise ValueError(
                    f"parameter group {number} has {key}={options[1].get(key)} on pipe rank {rank} and "
                    f"{key}={options[0].get(key)} on an earlier one; make the same groups in the same order on all "
                    "ranks, also those that are empty there"
                )
            known["names"] = list(dict.fromkeys([*known["names"], *group["names"]]))
    both = {key: {name: each for table in tables for name, each in table[key].items()} for key in ("kinds", "values")}
    return {"class": first["class"], "groups": groups, **both}


@dataclass(frozen=True, slots=True)
class HeldNames:
    """The names of what a model and its optimizer hold, on this rank or on all ranks along pipe together."""

    tensors: list[str]
    """The tensors of the model."""
    stored: list[str]
    """`stored_otherwise`."""
    groups: list[list[str]]
    """The parameters of each parameter group; no group without an optimizer."""

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer | None = None) -> HeldNames:
        """Return the names on this rank."""
        groups = [] if optimizer is None else group_names(stepped_parameters(model, optimizer), optimizer)
        return cls(list(model_shards(model)), stored_otherwise(model), groups)

    def over_pipe(self, grid: Grid) -> HeldNames:
        """Return the names on all ranks along pipe; all ranks call it."""
        by_rank = [HeldNames(**json.loads(text)) for text in grid.texts_by_pipe(json.dumps(asdict(self)))]
        most = max(len(held.groups) for held in by_rank)
        groups = [[name for held in by_rank for name in held.groups[number : number + 1]] for number in range(most)]
        return HeldNames(
            _once(held.tensors for held in by_rank),
            _once(held.stored for held in by_rank),
            [_once(group) for group in groups],
        )

    @property
    def stepped(self) -> list[str]:
        """The parameters that the optimizer steps."""
        return [name for group in self.groups for name in group]


def _once(lists: Iterable[Iterable[str]]) -> list[str]:
    """Return the names of all lists, each once."""
    return list(dict.fromkeys(name for names in lists for name in names))


def training_table_of(record: Record) -> Mapping[str, Any]:
    """Return the table of a record; it is empty in those of earlier versions."""
    table = record.state.get(TRAINING)
    return table if isinstance(table, Mapping) else {}


# The model


def grid_of(model: nn.Module) -> Grid:
    """Return the grid of a model; for a plain module, whose job has one process, a grid of that process."""
    if not is_plain(model):
        return gradients_of(model).grid
    grid = Grid.alone(next((tensor.device for tensor in (*model.parameters(), *model.buffers())), None))
    if (ranks := dist.get_world_size()) > 1:
        raise ValueError(
            f"{type(model).__name__} is not on a grid, and this job has {ranks} ranks, which would all write the same "
            "folder; put it on the grid first: ff.parallelize(model, grid)"
        )
    return grid


def is_plain(model: nn.Module) -> bool:
    """Return whether no parameter of a module is on a grid."""
    return not specs_of(model)


def stored_otherwise(model: nn.Module) -> list[str]:
    """Return the parameters of a parallelised module that the plain module holds transposed, or as a part of one."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, part in vars(module).get(PLAIN_SLICES, {}).items()
        if not part.is_all
    ]


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that have state beside parameters and buffers, as `state_dict` finds them."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield name, module


def set_extra_states(model: nn.Module, record: Record) -> None:
    """Give the modules of a model the extra state that a record has of them; the others keep theirs."""
    saved = training_table_of(record).get("modules", {})
    for name, module in _with_extra_state(model):
        if name in saved:
            module.set_extra_state(unpack_json(saved[name]))


def model_shards(model: nn.Module) -> dict[str, LocalShard]:
    """Return this rank's shard of every parameter and of every buffer that a state dict has.

    The names are the ones under which the model stores them: `state_dict` would join what a parallelised module holds
    in parts.
    """
    specs = specs_of(model)
    parameters = {
        f"{prefix}.{name}".lstrip("."): parameter
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    }
    # in a plain module no parameter is on a grid, but one may be a DTensor of somebody else
    foreign = parameters if specs else [name for name, each in parameters.items() if isinstance(each, DTensor)]
    if strangers := [name for name in foreign if name not in specs]:
        raise ValueError(
            f"{name_some(strangers)} of {type(model).__name__} are not on the grid; "
            "declare parameters through a fourfold.nn layer, or use ff.parallelize"
        )
    shards = {MODEL + name: _parameter_shard(parameter, specs.get(name)) for name, parameter in parameters.items()}
    shards |= {MODEL + name: shard for name, shard in _buffers(model)}
    if any(shard.local.is_meta for shard in shards.values()):
        raise ValueError(f"{type(model).__name__} is on the meta device and has no values; build it on a real one")
    return shards


def _parameter_shard(parameter: nn.Parameter, spec: Spec | None) -> LocalShard:
    """Return the shard of a parameter; one of a plain module, without a spec, is whole."""
    if spec is None:
        return LocalShard(parameter.detach(), tuple(parameter.shape), Layout(), finite=True)
    return LocalShard(local_of(parameter), spec.shape, spec.storage, parameter, finite=True)


def _buffers(model: nn.Module) -> Iterator[tuple[str, LocalShard]]:
    """Yield the persistent buffers. A buffer that is cut is a DTensor; any other is equal on all ranks."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                continue
            is_cut = isinstance(buffer, DTensor)
            storage = Layout.of(buffer) if is_cut else Layout()
            shard = LocalShard(local_of(buffer) if is_cut else buffer, tuple(buffer.shape), storage)
            yield f"{prefix}.{name}".lstrip("."), shard


# The optimizer


class StateKind(StrEnum):
    """What a tensor of an optimizer's state is, which decides what is made of it when it is loaded."""

    PARAMETER = "parameter"
    """It has the shape of its parameter and is a tensor of the same class: a DTensor where the parameter is one."""
    LOCAL = "local"
    """It is a plain tensor of the shape of this rank's shard, where the parameter is a DTensor."""
    SCALAR = "scalar"
    """It is a plain tensor without dims, equal on all ranks."""
    REPLICATED = "replicated"
    """It is a DTensor without dims, where the parameter has some."""

    @classmethod
    def usual(cls, key: str, shape: tuple[int, ...], parameter: tuple[int, ...]) -> StateKind:
        """Return the kind of most tensors of this key and shape at a parameter of this shape."""
        return cls.SCALAR if shape == () and (parameter != () or key == COUNT) else cls.PARAMETER


@dataclass(frozen=True, slots=True, eq=False)
class SteppedParameter:
    """A parameter as an optimizer sees it, and how state of the parameter's shape is cut."""

    tensor: Tensor
    """The tensor that the optimizer steps, which is the key of its state."""
    group: dict[str, Any]
    shape: tuple[int, ...]
    storage: Layout

    @property
    def local(self) -> Tensor:
        return local_of(self.tensor) if isinstance(self.tensor, DTensor) else self.tensor

    def shard(self, key: str, value: Tensor) -> tuple[StateKind, LocalShard]:
        """Return what a tensor of the state is, and this rank's shard of it; ValueError says why it is not fit."""
        shape = tuple(value.shape)
        if isinstance(value, DTensor):
            if not isinstance(self.tensor, DTensor) or value.device_mesh != self.tensor.device_mesh:
                raise ValueError("is a DTensor on another mesh than the parameter")
            if any(placement.is_partial() for placement in value.placements):
                raise ValueError("is a DTensor with sums that are still owed over ranks")
            if shape not in ((), self.shape):
                raise ValueError(f"has shape {shape}, and the parameter {self.shape}")
            kind = StateKind.PARAMETER if shape == self.shape else StateKind.REPLICATED
            return kind, LocalShard(local_of(value), shape, Layout.of(value), value, finite=True)
        if shape == () and (self.shape != () or isinstance(self.tensor, DTensor)):
            return StateKind.SCALAR, LocalShard(value, (), Layout(), finite=True)
        if shape != tuple(self.local.shape):
            held = (
                "" if self.shape == tuple(self.local.shape) else f", of which this rank holds {tuple(self.local.shape)}"
            )
            raise ValueError(f"has shape {shape}, and the parameter {self.shape}{held}")
        kind = StateKind.LOCAL if isinstance(self.tensor, DTensor) else StateKind.usual(key, shape, self.shape)
        return kind, LocalShard(value, self.shape, self.storage, finite=True)

    def allocate(self, key: str, kind: StateKind, dtype: torch.dtype) -> LocalShard:
        """Return memory for a tensor of the state, to be filled."""
        if kind in (StateKind.PARAMETER, StateKind.LOCAL):
            # Laid out in memory like the parameter: fused kernels read both in the order of memory.
            return LocalShard(torch.empty_like(self.local, dtype=dtype, requires_grad=False), self.shape, self.storage)
        # as torch's own load_state_dict: the count is on the device only where a kernel reads it there
        on_host = key == COUNT and not (self.group.get("fused") or self.group.get("capturable"))
        device = torch.device("cpu") if on_host else self.local.device
        return LocalShard(torch.empty((), dtype=dtype, device=device), (), Layout())

    def value(self, kind: StateKind, local: Tensor) -> Tensor:
        """Return the tensor that the optimizer keeps, made of this rank's shard."""
        if not isinstance(self.tensor, DTensor) or kind in (StateKind.LOCAL, StateKind.SCALAR):
            return local
        mesh = self.tensor.device_mesh
        if kind is StateKind.REPLICATED:
            return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
        whole = dict(shape=self.tensor.shape, stride=self.tensor.stride())
        return DTensor.from_local(local, mesh, self.storage.placements(), run_check=False, **whole)


def stepped_parameters(model: nn.Module, optimizer: Optimizer) -> dict[str, SteppedParameter]:
    """Return the parameters of an optimizer by their names in the model, group by group."""
    specs, replicas_cut = specs_of(model), False
    if isinstance(optimizer, ShardedOptimizer):  # it steps this rank's rows of the shards
        names = {id(part): name for name, part in optimizer.parts.items()}
        replicas_cut = optimizer.gradients.policy.shard_optimizer
        if not is_plain(model) and optimizer.gradients is not gradients_of(model):
            names = {}
    else:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, SteppedParameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group["params"]:
            if id(tensor) not in names:
                raise ValueError(
                    f"parameter group {number} of {_class_name(optimizer)} has a parameter of shape "
                    f"{tuple(tensor.shape)} that is none of {type(model).__name__}; make the optimizer from the "
                    "parameters of this model, after ff.parallelize, or give a module that holds all of them"
                )
            name = names[id(tensor)]
            if name in specs:
                shape, storage = specs[name].shape, specs[name].storage
                storage = Layout((*storage.cuts, (specs[name].replicas, 0))) if replicas_cut else storage
            else:
                shape, storage = tuple(tensor.shape), Layout()
            found[name] = SteppedParameter(tensor, group, shape, storage)
    return found


def group_names(stepped: Mapping[str, SteppedParameter], optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the parameters in each parameter group of an optimizer."""
    names = {id(parameter.tensor): name for name, parameter in stepped.items()}
    return [[names[id(tensor)] for tensor in group["params"]] for group in optimizer.param_groups]


def _class_name(optimizer: Optimizer) -> str:
    """Return the class of an optimizer, without the wrapper that accelerate or Fabric may have put around it."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return _class_name(inner)
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _entries(
    model: nn.Module, optimizer: Optimizer
) -> Iterator[tuple[str, str, SteppedParameter, tuple[StateKind, LocalShard] | None]]:
    """Yield name, key, parameter and shard of all entries of the state; None for one that is not a tensor.

    Raise TypeError for an entry that no checkpoint holds.
    """
    stepped = stepped_parameters(model, optimizer)
    known = {id(parameter.tensor) for parameter in stepped.values()}
    for stranger, state in optimizer.state.items():
        if id(stranger) not in known and state != {}:
            what = f"a tensor of shape {tuple(stranger.shape)}" if isinstance(stranger, Tensor) else repr(stranger)
            raise _unfit(optimizer, f"the entry {what}", "belongs to no parameter of its groups")
    for name, parameter in stepped.items():
        for key, value in optimizer.state.get(parameter.tensor, {}).items():
            yield name, key, parameter, _entry_shard(optimizer, name, key, parameter, value)


def _entry_shard(
    optimizer: Optimizer, name: str, key: str, parameter: SteppedParameter, value: object
) -> tuple[StateKind, LocalShard] | None:
    """Return what an entry of the state is, None if it is not a tensor; raise TypeError if no checkpoint holds it."""
    entry = f"{key!r} of {name!r}"
    if not isinstance(key, str) or "/" in key:
        raise _unfit(optimizer, entry, "has a key that is not a text without slashes")
    if isinstance(value, Tensor):
        try:
            return parameter.shard(key, value)
        except ValueError as error:
            raise _unfit(optimizer, entry, str(error)) from None
    if value is None or isinstance(value, (bool, int, float, str)):
        return None
    raise _unfit(optimizer, entry, f"is of type {type(value).__name__}")


def require_fit(model: nn.Module, optimizer: ShardedOptimizer) -> None:
    """Raise TypeError if a checkpoint could not hold the state that the optimizer is going to have."""
    stepped = stepped_parameters(model, optimizer)
    by_dims = {parameter.tensor.dim(): name for name, parameter in stepped.items()}  # these stand for the others
    for name in by_dims.values():
        for key, value in optimizer.fresh_state(stepped[name].tensor).items():
            _entry_shard(optimizer, name, key, stepped[name], value)


def _unfit(optimizer: Optimizer, entry: str, why: str) -> TypeError:
    return TypeError(
        f"the state of {_class_name(optimizer)} cannot be saved: {entry} {why}; a checkpoint holds tensors of the "
        "shape of their parameter, tensors without dims, and numbers, because these fit every grid. Use an optimizer "
        "that treats each element by itself, such as AdamW or SGD, or save the weights alone: ff.save(folder, model)"
    )


def optimizer_shards(model: nn.Module, optimizer: Optimizer) -> dict[str, LocalShard]:
    """Return this rank's shards of the optimizer's state; a parameter that never had a gradient has none."""
    return {
        f"{OPTIMIZER}{key}/{name}": shard[1] for name, key, _, shard in _entries(model, optimizer) if shard is not None
    }


def describe_optimizer(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the class, the parameter groups with their options, and what the names of the state do not say."""
    held = group_names(stepped_parameters(model, optimizer), optimizer)
    groups, kinds, values = [], {}, {}
    for number, (names, group) in enumerate(zip(held, optimizer.param_groups, strict=True)):
        options = {
            key: pack_json(_numbers(value), f"the option {key!r} of parameter group {number}")
            for key, value in group.items()
            if key not in NOT_OPTIONS
        }
        groups.append({"names": names, "options": options})
    for name, key, parameter, shard in _entries(model, optimizer):
        if shard is None:
            values.setdefault(name, {})[key] = optimizer.state[parameter.tensor][key]
        elif shard[0] is not StateKind.usual(key, shard[1].shape, parameter.shape):
            kinds[f"{OPTIMIZER}{key}/{name}"] = shard[0]
    return {"class": _class_name(optimizer), "groups": groups, "kinds": kinds, "values": values}


def _numbers(option: Any) -> Any:
    """Return an option with plain numbers where it has tensors of one element, as a learning rate may be."""
    if isinstance(option, Tensor) and option.numel() == 1:
        return option.item()
    return [_numbers(each) for each in option] if isinstance(option, (list, tuple)) else option


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """A parameter group of an optimizer that was saved."""

    names: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """The optimizer that a record describes."""

    kind: str
    """Its class."""
    keys: dict[str, dict[str, TensorInfo]]
    """The tensors of its state, by parameter and key."""
    groups: tuple[SavedGroup, ...] | None
    """None in a checkpoint of an earlier version, which has no table."""
    kinds: dict[str, StateKind]
    values: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, record: Record) -> SavedOptimizer | None:
        """Return the optimizer of a record, None if it has none; ValueError if the record makes no sense."""
        keys: dict[str, dict[str, TensorInfo]] = {}
        for full in record.names(OPTIMIZER):
            key, _, name = full.removeprefix(OPTIMIZER).partition("/")
            keys.setdefault(name, {})[key] = record.tensors[full]
        table = training_table_of(record).get("optimizer")
        if table is None:  # earlier versions saved this optimizer alone
            return cls(f"{AdamW.__module__}.{AdamW.__qualname__}", keys, None, {}, {}) if keys else None
        try:
            groups = tuple(
                SavedGroup(tuple(group["names"]), {key: unpack_json(value) for key, value in group["options"].items()})
                for group in table["groups"]
            )
            kinds = {full: StateKind(kind) for full, kind in table["kinds"].items()}
            values = {name: dict(held) for name, held in table["values"].items()}
            return cls(str(table["class"]), keys, groups, kinds, values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the record does not describe an optimizer ({type(error).__name__}: {error})") from error

    def require_class(self, optimizer: Optimizer, folder: object) -> None:
        """Raise unless the optimizer is of the class that was saved, whichever package has it."""
        if self.kind.rpartition(".")[2] != _class_name(optimizer).rpartition(".")[2]:
            keys = sorted({key for held in (*self.keys.values(), *self.values.values()) for key in held})
            raise ValueError(
                f"{folder} holds the state of {self.kind} ({', '.join(keys) or 'before its first step'}), and this "
                f"optimizer is {_class_name(optimizer)}; make the optimizer as saved, or load the weights alone: "
                "ff.load(folder, model)"
            )

    def require_groups(self, here: Sequence[Sequence[str]], folder: object) -> None:
        """Raise unless the optimizer has the parameter groups that were saved, in their order.

        `here` are the names of the parameters in its groups, on all ranks along pipe together.
        """
        if self.groups is None:
            return
        saved = [list(group.names) for group in self.groups]
        if (both := min(len(saved), len(here))) < max(len(saved), len(here)):
            where, more = ("here", here) if len(here) > both else ("there", saved)
            raise ValueError(
                f"{folder} has {len(saved)} parameter groups and this optimizer {len(here)}; the one that is only "
                f"{where} holds {name_some(more[both])}; make the same groups before loading, also with add_param_group"
            )
        for number, (there, now) in enumerate(zip(saved, here, strict=True)):
            both_have = {*there} & {*now}
            missing, added = ([name for name in group if name not in both_have] for group in (there, now))
            if missing or added:
                lacks = [f"lacks {name_some(missing, added)}"] if missing else []
                has = [f"also holds {name_some(added, missing)}"] if added else []
                raise ValueError(
                    f"parameter group {number} of this optimizer {' and '.join(lacks + has)}, compared with {folder}; "
                    "make the same groups before loading"
                )

    def allocate(
        self, stepped: Mapping[str, SteppedParameter], everywhere: Collection[str], folder: object
    ) -> dict[str, LocalShard]:
        """Return memory for the state of these parameters, to be filled; the optimizer's own state does not change.

        Raise if a parameter has state and is none of those that are stepped `everywhere`, also at other pipe
        coordinates.
        """
        known = set(everywhere)
        if unknown := [name for name in (*self.keys, *self.values) if name not in known]:
            raise ValueError(
                f"{folder} holds optimizer state of {name_some(unknown, everywhere)}, which this optimizer does not "
                "step; make the optimizer as saved"
            )
        return {
            f"{OPTIMIZER}{key}/{name}": stepped[name].allocate(key, self._kind(name, key, stepped[name]), info.dtype)
            for name, held in self.keys.items()
            if name in stepped
            for key, info in held.items()
        }

    def _kind(self, name: str, key: str, parameter: SteppedParameter) -> StateKind:
        usual = StateKind.usual(key, self.keys[name][key].shape, parameter.shape)
        return self.kinds.get(f"{OPTIMIZER}{key}/{name}", usual)

    def set_state(
        self, stepped: Mapping[str, SteppedParameter], optimizer: Optimizer, shards: Mapping[str, LocalShard]
    ) -> None:
        """Replace the optimizer's whole state by these shards and the saved numbers."""
        for name, parameter in stepped.items():
            state = {
                key: parameter.value(self._kind(name, key, parameter), shards[f"{OPTIMIZER}{key}/{name}"].local)
                for key in self.keys.get(name, ())
            }
            state |= self.values.get(name, {})
            optimizer.state.pop(parameter.tensor, None)
            if state:
                optimizer.state[parameter.tensor] = state

    def set_options(self, optimizer: Optimizer) -> None:
        """Give the parameter groups the options that were saved, such as learning rates."""
        for group, saved in zip(optimizer.param_groups, self.groups or (), strict=False):
            for key, value in saved.options.items():
                if key not in NOT_OPTIONS:
                    group[key] = _as_before(group.get(key), value)


def _as_before(present: Any, saved: Any) -> Any:
    """Return a saved option in the form that it has in the optimizer: a tuple, or a tensor, which is filled."""
    if isinstance(present, Tensor):
        return present.fill_(saved)
    if isinstance(present, tuple) and isinstance(saved, list) and len(present) == len(saved):
        return tuple(_as_before(one, other) for one, other in zip(present, saved, strict=True))
    return saved


# Random generators


def random_states(grid: Grid) -> dict[str, LocalShard]:
    """Return the states of this rank's random generators, each a row of one tensor for all ranks."""
    states = {"cpu": torch.get_rng_state()}
    if grid.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(grid.device)
    return {
        f"{RANDOM}{kind}": LocalShard(state.unsqueeze(0), (grid.shape.world, len(state)), ROW_PER_RANK)
        for kind, state in states.items()
    }


def set_random_states(shards: LocalShards, grid: Grid) -> None:
    """Restore the random generators from their states among these shards, if any."""
    if f"{RANDOM}cpu" in shards:
        torch.set_rng_state(shards[f"{RANDOM}cpu"].local[0])
    if f"{RANDOM}cuda" in shards:
        torch.cuda.set_rng_state(shards[f"{RANDOM}cuda"].local[0], grid.device)


def clock_of(model: nn.Module) -> StepRng | None:
    """Return what a model on a grid draws its dropout masks from, unless a trainer tells it every step."""
    clocks = (getattr(module, "clock", None) for module in model.modules())
    return next((clock for clock in clocks if isinstance(clock, StepRng) and not clock.announced), None)


def clock_shards(model: nn.Module) -> dict[str, LocalShard]:
    """Return a copy of the counts on which the next dropout masks of a model depend; nobody waits for the device."""
    clock = clock_of(model)
    return {} if clock is None else {CLOCK: LocalShard(clock.counts(), (2,), Layout())}


def restore_clock(model: nn.Module, record: Record, shards: LocalShards) -> None:
    """Let dropout draw what it would have drawn next when this record was saved."""
    clock, seed = clock_of(model), training_table_of(record).get("seed")
    if clock is not None and CLOCK in shards and isinstance(seed, int):
        clock.restore(seed, *shards[CLOCK].local.tolist())
