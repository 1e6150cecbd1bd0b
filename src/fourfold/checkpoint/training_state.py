"""The state of training as named tensors, each rank with its own shards.

    model/NAME                 parameters and persistent buffers, under the names of the unsharded model
    optimizer/KEY/NAME         the optimizer's state, such as AdamW's exp_avg, exp_avg_sq and step: tensors of the
                               parameter's shape are cut like it, with the sharded optimizer over data too; scalars
                               are not cut
    random/cpu, random/cuda    the states of torch's random generators, one row per rank

Names and global shapes do not depend on the grid, which is why any grid loads what any other has saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.axes import AXES, REPLICA
from fourfold.checkpoint.format import MODEL, OPTIMIZER, RANDOM, TensorInfo
from fourfold.grid import Grid
from fourfold.layout import Box, Layout
from fourfold.nn.layer import specs_of
from fourfold.optim import ParameterState, ShardedOptimizer
from fourfold.params import local_of

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


def training_shards(model: nn.Module, optimizer: ShardedOptimizer) -> dict[str, LocalShard]:
    """Return this rank's shards of all tensors that are needed to resume training."""
    return {**model_shards(model), **optimizer_shards(optimizer), **random_states(optimizer.gradients.grid)}


def model_shards(model: nn.Module) -> dict[str, LocalShard]:
    """Return this rank's shard of every parameter and of every buffer that a state dict has.

    The names are the ones under which the model stores them: `state_dict` would join what a parallelised module holds
    in parts.
    """
    specs = specs_of(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if strangers := sorted(parameters.keys() - specs.keys()):
        raise ValueError(
            f"{', '.join(map(repr, strangers[:5]))} of {type(model).__name__} are not on the grid; "
            "declare parameters through a fourfold.nn layer, or use ff.parallelize"
        )
    shards = {
        MODEL + name: LocalShard(local_of(parameters[name]), spec.shape, spec.storage, parameters[name], finite=True)
        for name, spec in specs.items()
    }
    shards |= {MODEL + name: shard for name, shard in _buffers(model)}
    if any(shard.local.is_meta for shard in shards.values()):
        raise ValueError(f"{type(model).__name__} is on the meta device and has no values; build it on a real one")
    return shards


def _buffers(model: nn.Module) -> Iterator[tuple[str, LocalShard]]:
    """Yield the persistent buffers. A buffer that is cut is a DTensor; any other is equal on all ranks."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                continue
            is_cut = isinstance(buffer, DTensor)
            storage = Layout.of(buffer.placements) if is_cut else Layout()
            shard = LocalShard(local_of(buffer) if is_cut else buffer, tuple(buffer.shape), storage)
            yield f"{prefix}.{name}".lstrip("."), shard


def optimizer_shards(optimizer: ShardedOptimizer) -> dict[str, LocalShard]:
    """Return this rank's shards of the optimizer's state; a parameter that never had a gradient has none."""
    _require_sharded(optimizer)
    found: dict[str, LocalShard] = {}
    for name, part in optimizer.parts.items():
        if state := optimizer.state.get(part):
            found |= _state_shards(optimizer, name, state)
    return found


def new_optimizer_shards(optimizer: ShardedOptimizer, names: set[str]) -> dict[str, LocalShard]:
    """Allocate the state of these parameters, to be filled; the optimizer's own state does not change."""
    _require_sharded(optimizer)
    found: dict[str, LocalShard] = {}
    for name, part in optimizer.parts.items():
        if name in names:
            found |= _state_shards(optimizer, name, optimizer.fresh_state(part))
    return found


def set_optimizer_state(optimizer: ShardedOptimizer, shards: LocalShards) -> None:
    """Replace the optimizer's whole state by these shards."""
    for name, part in optimizer.parts.items():
        optimizer.state.pop(part, None)
        kinds = optimizer.fresh_state(part.detach()[:0] if part.dim() else part.detach())  # without its memory
        found = {key: shards.get(f"{OPTIMIZER}{key}/{name}") for key in kinds}
        if any(found.values()):
            optimizer.state[part] = {
                key: None if shard is None else shard.local if isinstance(kinds[key], Tensor) else shard.local.item()
                for key, shard in found.items()
            }


def _require_sharded(optimizer: object) -> None:
    if not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"a checkpoint knows the state of the optimizers of ff.optim, not of {type(optimizer).__module__}."
            f"{type(optimizer).__name__}; torch.distributed.checkpoint saves the state of torch's optimizers"
        )


def _state_shards(optimizer: ShardedOptimizer, name: str, state: ParameterState) -> dict[str, LocalShard]:
    """Return the shards of one parameter's state: what has its shape is cut like it, scalars are not cut."""
    part, (_, spec) = optimizer.parts[name], optimizer.gradients.parameters[name]
    cuts = spec.storage.cuts
    if optimizer.gradients.policy.shard_optimizer:
        cuts = (*cuts, (REPLICA, 0))
    found: dict[str, LocalShard] = {}
    for key, value in state.items():
        if value is None:
            continue  # a key that this optimizer does not use with its options
        try:
            local = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            local = torch.empty(0, 0)
        if local.shape == part.shape:
            shard = LocalShard(local, spec.shape, Layout(cuts), finite=True)
        elif not local.shape:
            shard = LocalShard(local, (), Layout(), finite=True)
        else:
            shown = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                f"the state {key!r} of {type(optimizer).__name__} for {name} is of {shown}, and a checkpoint holds "
                f"tensors of the parameter's shape {tuple(part.shape)} and scalars; use another optimizer"
            )
        found[f"{OPTIMIZER}{key}/{name}"] = shard
    return found


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
