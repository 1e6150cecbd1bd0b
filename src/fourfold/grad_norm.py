"""The norm of complete gradients, and clipping: torch's `clip_grad_norm_` for parameters on a grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.axes import CUTS, PIPE, REPLICA, REPLICAS
from fourfold.grid import Grid
from fourfold.params import shards_of

REPLICA_DIM = -1
"""The dim of a mesh along which replicas lie: that of `data` and of `edata` is the last."""
MOST_OF_A_UNIT = 64
"""Parameters that a unit of a model has at most. Each has a place of its own in the line of all squares, which does not
depend on how units are cut into stages."""


def grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the 2-norm of all gradients together, equal on every rank and to that of one process."""
    return measure_norms(parameters)[0]


class NormOwner(Protocol):
    """The gradients of a model, as far as their norm is concerned."""

    grid: Grid
    line: int
    """The length of the line of all squares; 0 if the model has no units."""


def measure_norms(parameters: Iterable[nn.Parameter], owner: NormOwner | None = None) -> tuple[Tensor, Tensor]:
    """Return `grad_norm` and, for each parameter that has a gradient, the norm of this rank's shard of it.

    `owner` has the gradients, for a pipe rank that may have none of the parameters and takes part in the sum.
    """
    parameters = list(parameters)
    gradients = _complete_gradients(parameters)
    owner = _owner_of(parameters) if owner is None else owner
    if owner is None and not parameters:
        if Grid.with_pipe:
            raise ValueError(
                "no parameters for a norm: if this pipe rank has none of those that others give, these wait for its "
                "part; give the parameters of the whole model, model.parameters(), on all ranks"
            )
        return torch.zeros(()), torch.zeros(0)
    grid = Grid.of(parameters[0]) if owner is None else owner.grid
    shards: list[Tensor] = []
    if gradients:
        wide = torch.promote_types(gradients[0][1].dtype, torch.float32)
        shards = list(torch._foreach_norm([gradient for _, gradient in gradients], 2, wide))
    here = [getattr(parameter, "counted", None) for parameter, _ in gradients]
    if None in here:  # the model has not run since `model.to(...)` replaced its parameters
        here = [
            counts_here(parameter, grid, cut_over_replicas=_cut_over_replicas(parameter)) for parameter, _ in gradients
        ]
    counted = list(itertools.compress(shards, here))
    device = gradients[0][1].device if gradients else grid.device
    squares = torch.stack(counted).double().square() if counted else torch.zeros(0, dtype=torch.float64, device=device)
    squares = _sum(squares, list(itertools.compress(gradients, here)), grid, 0 if owner is None else owner.line)
    specs = [parameter.grad._spec for parameter, _ in gradients]  # type: ignore[union-attr,missing-attribute]
    cut_over_replicas = True in [spec.placements[REPLICA_DIM].is_shard() for spec in specs]
    for axis in CUTS:
        if grid.size(axis) > 1 and (axis != REPLICA or cut_over_replicas or grid.shape.folded):
            squares = comm.all_reduce(squares, grid, axis, label="gradient norm").wait()
    return squares.sqrt(), torch.stack(shards) if shards else torch.zeros(0, device=device)


def _owner_of(parameters: Sequence[nn.Parameter]) -> NormOwner | None:
    """Return the gradients that all these parameters belong to; None if there are several, or none is known."""
    try:
        owners = {parameter.gradients for parameter in parameters}  # type: ignore[attr-defined]
    except AttributeError:  # the model has not run since its parameters were replaced
        return None
    return owners.pop()() if len(owners) == 1 else None


def _sum(squares: Tensor, counted: Sequence[tuple[nn.Parameter, Tensor]], grid: Grid, line: int) -> Tensor:
    """Return the sum of squares over this rank's shards, and over pipe ranks.

    The squares of a reference model are added unit by unit, each at its own place in a line that is the same for all
    cuts of stages: so no cut changes a bit.
    """
    if not line:
        if grid.size(PIPE) > 1:
            raise RuntimeError(
                "on a grid with a pipe axis the norm is that of one model's parameters, which has run since it was "
                "moved; give model.parameters() after a backward pass"
            )
        return squares.sum()
    whole = squares.new_zeros(line)
    if counted:  # a list, because a generator would cost a call for each
        places = tuple([parameter.place for parameter, _ in counted])  # type: ignore[attr-defined]
        whole[_index(places, whole.device)] = squares
    by_unit = whole.view(-1, MOST_OF_A_UNIT).sum(dim=1)
    if grid.size(PIPE) > 1:
        by_unit = comm.all_reduce(by_unit, grid, PIPE, label="gradient norm").wait()
    return by_unit.sum()


@lru_cache(maxsize=64)
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(places, device=device)


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`, and return the norm before scaling.

    This is torch's function of the same name for parameters on a grid.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters)
    scale_gradients(parameters, norm, max_norm)
    return norm


def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm so that it is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients := [gradient for _, gradient in _complete_gradients(parameters)]:
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))


def _complete_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Return the parameters that have a gradient, each with this rank's shard of it; refuse incomplete ones."""
    found, gradients = [], []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if is_incomplete(parameter):
            raise RuntimeError(
                "gradients are not summed over ranks yet: the last backward() ran inside ff.accumulate, or begin_step "
                "announced more passes than have run; run the last micro-step's backward() outside of ff.accumulate, "
                "and announce every step with the number of its passes"
            )
        found.append(parameter)
        gradients.append(gradient)
    return list(zip(found, shards_of(gradients), strict=True))


def is_incomplete(parameter: nn.Parameter) -> bool:
    """Return whether the gradient of a parameter on a grid is not summed over ranks yet."""
    complete = getattr(parameter, "complete", None)
    if complete is None:
        Grid.of(parameter)  # raises for a parameter that is not on a grid
    gradient = parameter.grad
    return gradient is not None and gradient._spec is not complete and is_owed(gradient)  # type: ignore[attr-defined]


def is_owed(gradient: Tensor) -> bool:
    # isinstance is slow for placements, and a generator would cost a call for each
    return True in [placement.is_partial() for placement in gradient._spec.placements]  # type: ignore[attr-defined]


def _cut_over_replicas(parameter: nn.Parameter) -> bool:
    """Return whether each replica has rows of its own of a parameter's gradient."""
    return parameter.grad._spec.placements[REPLICA_DIM].is_shard()  # type: ignore[union-attr,missing-attribute]


def counts_here(parameter: nn.Parameter, grid: Grid, *, cut_over_replicas: bool) -> bool:
    """Return whether this rank's shard counts for the norm.

    On x, y and z only the first of several equal copies counts. Every replica counts, because the norm is summed over
    replicas only if gradients are sharded over them. On a folded grid it is always summed over all ranks, so only the
    first replica counts, unless `cut_over_replicas`.
    """
    spec = parameter._spec  # type: ignore[attr-defined]
    placements = zip(spec.mesh.mesh_dim_names, spec.placements, strict=True)
    all_count = cut_over_replicas or not grid.shape.folded
    return all((axis in REPLICAS and all_count) or cut.is_shard() or grid.coords[axis] == 0 for axis, cut in placements)
