"""What continues a training run, as tensors: parameters, the optimizer's state, the random states of the ranks.

model/NAME                 parameters, under the names of the unsharded model
optimizer/exp_avg/NAME     AdamW's moments, cut as the parameter is, with the sharded optimizer over data too
optimizer/step/NAME        how many steps it took
random/cpu, random/cuda    torch's generators, a row a rank
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.axes import AXES
from fourfold.checkpoint.weights import weights_of
from fourfold.checkpoint.write import Held
from fourfold.gradients import REPLICA
from fourfold.grid import Grid
from fourfold.layout import Layout
from fourfold.optim import AdamW

OPTIMIZER, RANDOM = "optimizer/", "random/"
RANKS = Layout(tuple((axis, 0) for axis in AXES))
"""A row for every rank."""
MOMENTS = ("exp_avg", "exp_avg_sq")
COUNT = "step"


def training_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Held]:
    """This rank's part of everything."""
    return {**weights_of(model), **optimizer_tensors(optimizer), **random_tensors(optimizer.gradients.grid)}


def optimizer_tensors(optimizer: AdamW) -> dict[str, Held]:
    """The state of the optimizer, of those parameters that have one."""
    require_ours(optimizer)
    found: dict[str, Held] = {}
    for name, part in optimizer.parts.items():
        state = optimizer.state.get(part)
        if state:
            found |= _state_of(optimizer, name, {key: state[key] for key in (*MOMENTS, COUNT)})
    return found


def require_ours(optimizer: object) -> None:
    if not isinstance(optimizer, AdamW):
        raise TypeError(
            f"a checkpoint knows the state of ff.optim.AdamW, not of {type(optimizer).__module__}."
            f"{type(optimizer).__name__}; torch.distributed.checkpoint saves that of torch's optimizers"
        )


def fresh_optimizer_tensors(optimizer: AdamW, names: set[str]) -> dict[str, Held]:
    """Memory for the state of these parameters, not yet the optimizer's."""
    require_ours(optimizer)
    found: dict[str, Held] = {}
    for name, part in optimizer.parts.items():
        if name in names:
            state: dict[str, Tensor] = {key: torch.zeros_like(part, requires_grad=False) for key in MOMENTS}
            state[COUNT] = torch.zeros((), dtype=torch.float32, device=part.device)
            found |= _state_of(optimizer, name, state)
    return found


def give_to(optimizer: AdamW, tensors: dict[str, Held]) -> None:
    """Make these the optimizer's state, and leave it none beside."""
    for name, part in optimizer.parts.items():
        keys = [key for key in (*MOMENTS, COUNT) if f"{OPTIMIZER}{key}/{name}" in tensors]
        optimizer.state.pop(part, None)
        if keys:
            optimizer.state[part] = {key: tensors[f"{OPTIMIZER}{key}/{name}"].local for key in keys}


def _state_of(optimizer: AdamW, name: str, state: dict[str, Tensor]) -> dict[str, Held]:
    _, spec = optimizer.gradients.parameters[name]
    cuts = spec.storage.cuts
    if optimizer.gradients.policy.shard_optimizer:
        cuts = (*cuts, (REPLICA, 0))
    found = {f"{OPTIMIZER}{key}/{name}": Held(state[key], spec.shape, Layout(cuts)) for key in MOMENTS}
    return {**found, f"{OPTIMIZER}{COUNT}/{name}": Held(state[COUNT], (), Layout(()))}


def parameters_with_state(names: list[str]) -> set[str]:
    """Of which parameters a checkpoint has the optimizer's state."""
    return {name.removeprefix(OPTIMIZER).partition("/")[2] for name in names if name.startswith(OPTIMIZER)}


def random_tensors(grid: Grid) -> dict[str, Held]:
    states = {"cpu": torch.get_rng_state()}
    if grid.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(grid.device)
    return {
        f"{RANDOM}{kind}": Held(state.unsqueeze(0), (grid.shape.world, len(state)), RANKS)
        for kind, state in states.items()
    }


def restore_random(tensors: dict[str, Held], grid: Grid) -> None:
    for name, held in tensors.items():
        if name == f"{RANDOM}cpu":
            torch.set_rng_state(held.local[0])
        elif name == f"{RANDOM}cuda":
            torch.cuda.set_rng_state(held.local[0], grid.device)
