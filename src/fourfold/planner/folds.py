"""The folds that a search tries for a mixture of experts.

A fold numbers the ranks of one pipe coordinate that hold different tokens in a second way: `expert` ranks share the
experts, `ex` ranks the hidden units of each, `ez` ranks its stored weights (shape.py). There are too many folds to
estimate all of them, so they are found in two steps. `folds_of` returns folds of a grid without ex, before anything
is simulated. `folds_over_ex` returns folds with ex of the grids that were the fastest, in addition to what was
simulated: so a search with ex never has fewer candidates than one without.

Along ex rows travel, which products wait for, where along ez weights travel ahead of their use. So ex is worth its
messages if a step has few tokens for large experts. A row is sent to all ranks along ex, so they are no more than a
node has; they may lie on several nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from fourfold.axes import PIPE, REPLICAS
from fourfold.layout import GATHERED_AXES
from fourfold.models.config import ModelConfig
from fourfold.planner.estimate import Lever
from fourfold.planner.machine import Machine
from fourfold.planner.price import Price, Task
from fourfold.shape import Shape

TEXTBOOK_X = (1, 2, 4, 8)
"""Sizes of x in the grids that people take without a planner; see `is_textbook`."""
ROOM_FOR_EXPERTS = 0.5
"""The share of a device's memory that weights and gradients of experts may take on a fold that cuts them no further."""
LEAST_GAIN = 0.02
"""The share of the best step that folds with ex must possibly save to be tried."""


def is_textbook(machine: Machine, shape: Shape) -> bool:
    """Return whether people would take this grid without a search: a small x inside a node, z, data and pipe."""
    return shape.y == 1 and shape.x in TEXTBOOK_X and shape.x <= machine.devices_per_node


def folds_of(task: Task, shape: Shape) -> list[Shape]:
    """Return folds of a grid for a mixture of experts that cut no hidden units.

    Tokens are sent inside a node, or to as many ranks as there are experts, or where z is alone to nobody. Weights
    are cut over the fewest ranks that leave room for all else, or over all that have the same experts. Grids with
    pipe have the first of these folds alone.
    """
    ranks = shape.x * shape.z * shape.data
    if not task.config.experts or ranks == 1 or not is_textbook(task.machine, shape):
        return []
    experts = _ranks_of_experts(task, ranks)
    if shape.pipe > 1:
        experts = experts[:1]
    elif shape.z == ranks:
        experts = list(dict.fromkeys([*experts, 1]))
    folds = [fold for expert in experts for fold in _with_ez(task, shape, expert, 1)]
    return [fold for fold in folds if fold.folded and (fold.expert > 1 or fold.ez < shape.z)]


def folds_over_ex(task: Task, shape: Shape, expert: int) -> Iterator[Shape]:
    """Yield the folds of a grid on which so many ranks share the experts, and others the hidden units of each."""
    left = shape.x * shape.z * shape.data // expert
    for ex in range(2, min(left, task.machine.devices_per_node) + 1):
        if left % ex == 0 and task.config.expert_hidden % ex == 0:
            yield from _with_ez(task, shape, expert, ex)


def bases_for_ex(task: Task, devices: int, simulated: Sequence[Price]) -> dict[tuple[Shape, int], None]:
    """Return grids and the ranks that share their experts, of which `folds_over_ex` may be faster than all others.

    For each x they are the fastest grid that was simulated, unless ex cannot make it faster than all others, and the
    one with z in place of data; with pipe the fastest one alone.
    """
    if not task.config.experts:
        return {}
    best = min((one.seconds for one in simulated), default=inf)
    fastest: dict[tuple[int, bool], Price] = {}
    for one in sorted(simulated, key=lambda one: one.seconds):
        shape = one.candidate.shape
        if shape.context == 1 and is_textbook(task.machine, shape):
            fastest.setdefault((shape.x, shape.pipe > 1), one)
    hopeful = [one.candidate.shape for one in fastest.values() if _least_seconds(one) <= (1 - LEAST_GAIN) * best]
    sizes = {shape.x for shape in hopeful if shape.pipe == 1}
    sizes |= {x for x in TEXTBOOK_X if devices % x == 0 and (x, False) not in fastest}
    in_z = (Shape(x=x, z=devices // x) for x in sorted(sizes))
    shapes = [shape.with_fold() for shape in hopeful] + [shape for shape in in_z if is_textbook(task.machine, shape)]
    bases = {}
    for shape in shapes:
        experts = _ranks_of_experts(task, shape.x * shape.z * shape.data)
        for expert in experts[:1] if shape.pipe > 1 else experts:
            bases[shape, expert] = None
    return bases


def _least_seconds(one: Price) -> float:
    """Return how long a step would take if it waited for nothing that depends on how experts are cut: weights,
    gradients, other stages and the host. It is 0 if it computes something twice, which may be for want of memory."""
    if Lever.of(one.candidate.policy).compute_twice:
        return 0.0
    waits = sum(one.totals.exposed.get(axis, 0.0) for axis in (*GATHERED_AXES, *REPLICAS, PIPE))
    return one.seconds - waits - one.totals.host


def _ranks_of_experts(task: Task, ranks: int) -> list[int]:
    """Return the most ranks inside a node that can share the experts, and the most of all: 1 if none can."""
    sizes = [size for size in range(2, ranks + 1) if ranks % size == 0 and task.config.experts % size == 0]
    near = max((size for size in sizes if size <= task.machine.devices_per_node), default=1)
    return list(dict.fromkeys([near, max(sizes, default=1)]))


def _with_ez(task: Task, shape: Shape, expert: int, ex: int) -> Iterator[Shape]:
    """Yield the fold with the least ez that leaves room for all else, and without pipe that with the largest."""
    left = shape.x * shape.z * shape.data // (expert * ex)
    most = ROOM_FOR_EXPERTS * task.usable_bytes
    state = _expert_state(task.config, task.parameters.itemsize) / (shape.pipe * expert * ex)
    least = next((size for size in range(1, left + 1) if left % size == 0 and state / size <= most), left)
    for ez in dict.fromkeys([least, left] if shape.pipe == 1 else [least]):
        yield shape.with_fold(expert=expert, ex=ex, ez=ez)


def _expert_state(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of the weights and gradients of all experts."""
    return 2 * itemsize * 3 * config.layers * config.experts * config.hidden * config.expert_hidden
