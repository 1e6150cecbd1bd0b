"""GPT-80B on 1,024 A100: the best Megatron-style layout that fits into memory, against the planner's best grid.

Tensor parallelism with sequence parallelism is axis x with sharded activations; data parallelism with a sharded
optimizer is axis data; y = z = 1. Fourfold has no pipelines: their seconds are estimated from the simulation of one
stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import get_args

import torch

from benchmarks.planner.published_runs import ROWS, SEQ
from benchmarks.planner.replay import choices_of, replays
from fourfold.models.config import config
from fourfold.planner.machine import load_machine
from fourfold.planner.memory import kept_for_backward
from fourfold.planner.price import Candidate, Task, memory_of, price
from fourfold.planner.search import search
from fourfold.planner.space import Space
from fourfold.planner.step_program import flops_per_token
from fourfold.policy import Overlap, Policy, Recompute
from fourfold.shape import Shape, shapes_of

MACHINE, MODEL, DEVICES = "perlmutter", "gpt-80b", 1024
PUBLISHED_GAIN = 0.26
ROWS_OF_MICRO_STEPS = (1, 2, 4, 8)
FEW, MORE = 4, 8
"""The numbers of layers that are simulated; the seconds of a stage are extrapolated from these two."""

ASSUMPTIONS = (
    "Both sides use the constants of the machine file, the same kernels, a batch of 16.8M tokens, and any recompute "
    "policy that fits unless stated otherwise.",
    "The pipeline's stages have equal numbers of layers, rounded up; the embedding and the head are spread evenly; "
    "the bubble is that of 1F1B, (stages - 1) micro-batches; the first stage holds the activations of as many "
    "micro-batches as there are stages; messages between stages take no time.",
    "The published figure is a measurement of the published system, which recomputes everything, against Megatron-LM; "
    "the batch, grids and recompute policy of that run are not known here. The comparison in which both recompute "
    "everything is the closest to it.",
)


@dataclass(frozen=True, slots=True)
class Alternative:
    """One way to train the model, with the seconds per step."""

    name: str
    how: str
    seconds: float


def task() -> Task:
    return Task(config(MODEL), load_machine(MACHINE), ROWS, SEQ)


def compare_with_megatron() -> tuple[list[Alternative], list[str]]:
    """Return Megatron's ways (the last one recomputes everything), the published system and ours, in this order, and
    the reasons why others do not fit."""
    refused: list[str] = []
    sides: list[Alternative] = []
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
    sides.append(pipeline("the same, everything recomputed", ("block",)))
    replayed = replays(task(), choices_of(MACHINE, MODEL, DEVICES))[0]
    micro_steps = f"{replayed.candidate.micro_steps} micro-steps"
    sides.append(
        Alternative("the published system", f"{replayed.candidate.shape}, {micro_steps}", replayed.totals.seconds)
    )
    sides.append(planned("Fourfold's best", Space()))
    return sides, refused


def planned(name: str, space: Space) -> Alternative:
    best = search(task(), DEVICES, space=space).best
    choice, policy = best.candidate, best.candidate.policy
    how = f"{choice.shape}, {policy.activations}, recompute {policy.recompute}, {choice.micro_steps} micro-steps"
    return Alternative(name, how, best.seconds)


# --- a pipeline of stages


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A pipeline of tensor-parallel stages, with its seconds per step."""

    candidate: Candidate
    """The grid, policy and micro-batches of one stage."""
    stages: int
    seconds: float
    compute: float
    """Seconds of computation per device, averaged over stages."""

    @property
    def how(self) -> str:
        choice = self.candidate
        return (
            f"{choice.shape}, {self.stages} stages, recompute {choice.policy.recompute}, {choice.micro_steps} "
            f"micro-steps of {choice.rows} rows"
        )


def pipeline(name: str, recompute: Sequence[Recompute]) -> Alternative:
    """Return the fastest pipeline of tensor-parallel stages that fits."""
    best = fastest_pipeline(task(), DEVICES, recompute)
    if best is None:
        raise ValueError(f"{name}: no pipeline of {MODEL} fits on {DEVICES} devices of {MACHINE}")
    return Alternative(name, best.how, best.seconds)


def fastest_pipeline(whole: Task, devices: int, recompute: Sequence[Recompute]) -> Pipeline | None:
    """Return the fastest pipeline of two or more stages with tensor parallelism inside a node, or None if none fits.
    Only pipelines are simulated that could beat the fastest one so far if all their FLOPs ran at full speed."""
    tried = [(_least_seconds(whole, devices, *one), *one) for one in _pipelines(whole, devices, recompute)]
    best: Pipeline | None = None
    for least, choice, stages in sorted(tried, key=lambda one: one[0]):
        if best is not None and least >= best.seconds:
            break
        if _fits(whole, choice, stages):
            found = _staged(whole, choice, stages)
            best = found if best is None or found.seconds < best.seconds else best
    return best


def _pipelines(whole: Task, devices: int, recompute: Sequence[Recompute]) -> Iterator[tuple[Candidate, int]]:
    """Yield all pipelines that divide devices and batch evenly, whether they fit or not: a stage and the number of
    stages."""
    per_node = whole.machine.devices_per_node
    for x, stages in product(range(1, per_node + 1), range(2, whole.config.layers + 1)):
        if devices % (x * stages) or whole.config.heads % x:
            continue
        shape = Shape(x=x, data=devices // (x * stages))
        for rows, policy in product(ROWS_OF_MICRO_STEPS, map(megatron_policy, recompute)):
            micro_steps, rest = divmod(whole.rows, shape.data * rows)
            if rest == 0 and micro_steps:
                yield Candidate(shape, policy, rows, micro_steps), stages


def _least_seconds(whole: Task, devices: int, choice: Candidate, stages: int) -> float:
    flops = flops_per_token(whole.config, whole.seq, choice.policy).hardware * whole.tokens
    return flops / (devices * whole.machine.gemm[whole.dtype]) * _with_bubble(choice, stages)


def _with_bubble(choice: Candidate, stages: int) -> float:
    return (choice.micro_steps + stages - 1) / choice.micro_steps


def megatron_policy(recompute: Recompute) -> Policy:
    """Return Megatron's policy: sequence parallelism, a sharded optimizer, no halves."""
    overlap = Overlap(halves=1, reduce_early=True)
    return Policy(recompute=recompute, compute_dtype=torch.bfloat16, shard_optimizer=True, overlap=overlap)


def _fits(whole: Task, choice: Candidate, stages: int) -> bool:
    stage = replace(whole, config=replace(whole.config, layers=ceil(whole.config.layers / stages)))
    waiting = (stages - 1) * kept_for_backward(choice.sizes(stage))
    return memory_of(stage, choice).total + waiting <= whole.machine.memory - whole.machine.reserve


def _staged(whole: Task, choice: Candidate, stages: int) -> Pipeline:
    few, more = (
        price(replace(whole, config=replace(whole.config, layers=layers)), choice).totals for layers in (FEW, MORE)
    )
    layers = whole.config.layers
    layer, all_layers = _layer_and_all(few.seconds, more.seconds, layers)
    slowest = max(ceil(layers / stages) * layer, all_layers / stages)
    seconds = slowest * _with_bubble(choice, stages)
    _, compute = _layer_and_all(few.compute, more.compute, layers)
    return Pipeline(choice, stages, seconds, compute / stages)


def _layer_and_all(few: float, more: float, layers: int) -> tuple[float, float]:
    """Return the seconds of one layer, and of the whole model with embedding and head."""
    layer = (more - few) / (MORE - FEW)
    return layer, few + (layers - FEW) * layer
