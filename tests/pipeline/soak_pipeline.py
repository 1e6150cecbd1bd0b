"""Law 1 for pipe at length: every grid of at most 8 ranks with pipe 2, 3, 4 or 8, every named schedule and found ones.

python tests/pipeline/soak_pipeline.py [DRAWS]

Each of DRAWS draws (default 8) of a grid takes other stages, schedules, micro-batches and options. All is in fp64, and
at most 1e-10 off one process.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

from test_pipeline import Case, largest_error, on_one_process, on_ranks

from fourfold.axes import AXES
from fourfold.policy import Overlap, Policy
from fourfold.schedule.choose import FOUND
from fourfold.schedule.find import find
from fourfold.schedule.named import BUILDERS
from fourfold.schedule.stages import PLACEMENTS, Stages, place
from fourfold.shape import Shape, shapes_of
from harness import Ranks
from soak_grids import soak

PIPES = (2, 3, 4, 8)


def random_cuts(draw: random.Random, layers: int, stages: int) -> tuple[int, ...]:
    """Cuts of a model into stages, some of them empty."""
    inner = sorted(draw.choices(range(1, layers + 2), k=stages - 1))
    return (0, *inner, layers + 2)


def stages_of(draw: random.Random, layers: int, pipe: int, chunks: int, placement: str) -> Stages:
    """Stages that leave no pipe rank without a unit."""
    for _ in range(20):
        found = Stages(random_cuts(draw, layers, pipe * chunks), place(placement, pipe, chunks))
        if all(any(map(len, map(found.units, found.of_rank(rank)))) for rank in range(pipe)):
            return found
    return Stages.even(layers, pipe, chunks, placement)


def case_of(draw: random.Random, shape: Shape) -> Case:
    pipe, chunks = shape.pipe, draw.choice([1, 2])
    layers = draw.choice([6, 8]) if pipe < 8 else 2 * pipe  # a layer for every rank, however stages are placed
    micro_steps = draw.choice([1, pipe - 1, pipe, 2 * pipe + 1])
    names = [name for name, (_, allowed) in BUILDERS.items() if chunks in allowed]
    name = draw.choice([*names, f"blocks:{draw.choice([1, 2, 3])}", FOUND, "searched"])
    on_loop = name in names or ":" in name
    placement = "wave" if name in ("v-half", "zb-v") else "loop" if on_loop else draw.choice(PLACEMENTS)
    stages = stages_of(draw, layers, pipe, chunks, placement)
    schedule: object = name
    if name == "searched":
        seconds = {kind: [draw.uniform(0.5, 2.0) for _ in stages.placement] for kind in "FBW"}
        memory = draw.choice([pipe, 0.75 * pipe, None])
        schedule = find(stages.placement, micro_steps, seconds, draw.choice([0.0, 0.1]), memory).schedule
    policy = Policy(
        stages=stages,
        schedule=schedule,  # type: ignore[arg-type]
        activations=draw.choice(["sharded", "replicated"]),
        recompute=draw.choice(["none", "attention", "block"]),
        keep_weights=draw.random() < 0.3,
        gather_weights=draw.choice(["use", "block", "step"]),
        shard_optimizer=draw.random() < 0.4,
        loss_chunk=draw.choice([0, 5]),
        overlap=draw.choice([Overlap(), Overlap(halves=2), Overlap.off()]),
    )
    return Case(shape, policy, draw.random() < 0.5, layers, max(1, micro_steps), draw.random() < 0.5)


def error_of(pool: Ranks, case: Case) -> float:
    pool.start(on_ranks, case)
    return largest_error(on_one_process(case), pool.results(120))


def name_of(case: Case) -> str:
    schedule = case.policy.schedule
    return f"{schedule if isinstance(schedule, str) else 'searched'} n={case.micro_steps}"


def main(draws: int = 8) -> int:
    small = [shape for world in range(2, 9) for shape in shapes_of(world, axes=AXES) if shape.pipe in PIPES]
    shapes = [shape for shape in small if Case(shape).config.misfit(shape, Policy()) is None]
    return soak(shapes, draws, case_of, error_of, name_of)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
