"""GPT-80B on 1,024 A100: the best Megatron-style grid under the memory limit against the planner's best.

Tensor parallelism is x with sharded activations (sequence parallelism), data parallelism with a sharded optimizer is
data; y = z = 1. Pipelines are not Fourfold's: their seconds are an estimate around the simulation of one stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import get_args

import torch

from fourfold.cost.machine import load_machine
from fourfold.cost.memory import kept_for_backward
from fourfold.cost.price import Choice, Task, memory_of, price
from fourfold.cost.search import Space, search
from fourfold.grid import Shape, shapes_of
from fourfold.layout import Policy, Recompute
from fourfold.models.config import config
from fourfold.overlap import Overlap
from planner_points import ROWS, SEQ
from planner_replay import choices_of, replays

MACHINE, MODEL, DEVICES = "perlmutter", "gpt-80b", 1024
PUBLISHED_GAIN = 0.26
ROWS_OF_MICRO_STEPS = (1, 2, 4, 8)
FEW, MORE = 4, 8
"""Layers of the simulations from which the seconds of a stage are drawn."""

ASSUMPTIONS = (
    "Both sides have the machine's constants as they are in its file, the same kernels, batch 16.8M tokens, and any "
    "recompute that fits unless it says otherwise.",
    "The pipeline's stages have equal parts of the layers, rounded up; the embedding and the head are spread evenly; "
    "the bubble is that of 1F1B, (stages - 1) micro-batches; the first stage holds the activations of as many "
    "micro-batches as there are stages; messages between stages take no time.",
    "The published figure is a measurement of the published system, which recomputes all, against Megatron-LM; batch, "
    "grids and recompute of that run are not known here. Where both recompute all is the nearest to it.",
)


@dataclass(frozen=True, slots=True)
class Side:
    """A way to train it, and what a step takes."""

    name: str
    how: str
    seconds: float


def task() -> Task:
    return Task(config(MODEL), load_machine(MACHINE), ROWS, SEQ)


def compare() -> tuple[list[Side], list[str]]:
    """Megatron's ways, the last of them recomputing all, the published system, ours; and what does not fit."""
    refused: list[str] = []
    sides: list[Side] = []
    per_node = load_machine(MACHINE).devices_per_node
    tensor = [shape for shape in shapes_of(DEVICES) if shape.y == shape.z == 1]
    for name, shapes in (
        ("tensor parallelism inside a node", [shape for shape in tensor if shape.x <= per_node]),
        ("tensor parallelism across nodes", [shape for shape in tensor if shape.x > per_node]),
    ):
        try:
            sides.append(planned(name, Space(shapes=tuple(shapes))))
        except ValueError as error:
            refused.append(f"{name}: {error}")
    sides.append(pipeline("tensor parallelism and a pipeline", get_args(Recompute)))
    sides.append(pipeline("the same, all recomputed", ("block",)))
    replayed = replays(task(), choices_of(MACHINE, MODEL, DEVICES))[0]
    micro_steps = f"{replayed.choice.micro_steps} micro-steps"
    sides.append(Side("the published system", f"{replayed.choice.shape}, {micro_steps}", replayed.totals.seconds))
    sides.append(planned("Fourfold's best", Space()))
    return sides, refused


def planned(name: str, space: Space) -> Side:
    best = search(task(), DEVICES, space=space).best
    choice, policy = best.choice, best.choice.policy
    how = f"{choice.shape}, {policy.activations}, recompute {policy.recompute}, {choice.micro_steps} micro-steps"
    return Side(name, how, best.seconds)


# --- a pipeline of stages


def pipeline(name: str, recompute: Sequence[Recompute]) -> Side:
    """The best of all pipelines of tensor-parallel stages that fit."""
    return min((Side(name, *found) for found in _pipelines(task(), recompute)), key=lambda side: side.seconds)


def _pipelines(whole: Task, recompute: Sequence[Recompute]) -> Iterator[tuple[str, float]]:
    """How, and the seconds of a step."""
    per_node = whole.machine.devices_per_node
    for x, stages in product(range(1, per_node + 1), range(2, whole.config.layers + 1)):
        if DEVICES % (x * stages) or whole.config.heads % x:
            continue
        shape = Shape(x=x, data=DEVICES // (x * stages))
        for rows, policy in product(ROWS_OF_MICRO_STEPS, map(_policy, recompute)):
            micro_steps, rest = divmod(whole.rows, shape.data * rows)
            if rest == 0 and micro_steps:
                choice = Choice(shape, policy, rows, micro_steps)
                if _fits(whole, choice, stages):
                    yield _staged(whole, choice, stages)


def _policy(recompute: Recompute) -> Policy:
    overlap = Overlap(halves=1, data=True)
    return Policy(recompute=recompute, compute=torch.bfloat16, shard_optimizer=True, overlap=overlap)


def _fits(whole: Task, choice: Choice, stages: int) -> bool:
    stage = replace(whole, config=replace(whole.config, layers=ceil(whole.config.layers / stages)))
    waiting = (stages - 1) * kept_for_backward(choice.volume(stage))
    return memory_of(stage, choice).total + waiting <= whole.machine.memory - whole.machine.reserve


def _staged(whole: Task, choice: Choice, stages: int) -> tuple[str, float]:
    few, more = (
        price(replace(whole, config=replace(whole.config, layers=layers)), choice).seconds for layers in (FEW, MORE)
    )
    layer, layers = (more - few) / (MORE - FEW), whole.config.layers
    ends = few - FEW * layer
    slowest = max(ceil(layers / stages) * layer, (layers * layer + ends) / stages)
    seconds = slowest * (choice.micro_steps + stages - 1) / choice.micro_steps
    how = (
        f"{choice.shape}, {stages} stages, recompute {choice.policy.recompute}, {choice.micro_steps} micro-steps of "
        f"{choice.rows} rows"
    )
    return how, seconds
