"""Law 1 for context at length: grids of at most 8 ranks with context 2, 4 and 8, every way, documents of many lengths.

python tests/context/soak_context.py [DRAWS]

Each of DRAWS draws (default 8) of a grid takes another model, way, assignment, policy and other documents. All is in
fp64, and at most 1e-10 off one process.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from itertools import product
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

from test_context import CONFIGS, ROWS, alone, steps

from fourfold.axes import AXES
from fourfold.policy import Overlap, Policy
from fourfold.shape import Shape, shapes_of
from harness import Ranks
from soak_grids import soak

CONTEXTS = (2, 4, 8)


class Drawn(NamedTuple):
    shape: Shape
    case: tuple[str, str, Policy]
    """The model, the documents and the policy."""


def grids() -> list[Shape]:
    """Grids that cut the models and the rows, with a context size."""
    found = []
    for world, context in product(range(2, 9), CONTEXTS):
        for shape in shapes_of(world, axes=AXES):
            if shape.places % context == 0 and ROWS * context % shape.places == 0 and shape.pipe <= 2:
                found.append(shape.with_context(context))
    return [shape for shape in found if any(config.misfit(shape, Policy()) is None for config in CONFIGS.values())]


def case_of(draw: random.Random, shape: Shape) -> Drawn:
    policy = Policy(
        activations=draw.choice(["sharded", "replicated"]),
        recompute=draw.choice(["none", "attention", "block"]),
        keep_gathered=draw.random() < 0.3,
        keep_weights=draw.random() < 0.3,
        loss_chunk=draw.choice([0, 5]),
        mlp_chunk=draw.choice([0, 0, 7]),
        assignment=draw.choice(["auto", "rows", "documents"]),
        overlap=draw.choice([Overlap(), Overlap(halves=2), Overlap.off()]),
    )
    if policy.recompute == "block" and draw.random() < 0.5:
        policy = dataclasses.replace(policy, offload=True)
    kinds = [kind for kind, config in CONFIGS.items() if config.misfit(shape, policy) is None]
    kind = draw.choice(kinds or ["gpt"])
    cut = shape.x * (shape.y if policy.activations == "sharded" else 1)
    heads = CONFIGS[kind].kv_heads // cut if CONFIGS[kind].kv_heads % cut == 0 else 1
    near = [size for size in range(2, shape.context + 1) if shape.context % size == 0 and heads % size == 0]
    swaps = [f"ulysses:{size}{over}" for size in near for over in ("", "+gather", "+exchange", "+ring")]
    way = draw.choice(["auto", "gather", "exchange", "ring", *swaps])
    documents = draw.choice(["", "one token", "apart", f"draw {draw.random()}"])
    return Drawn(shape, (kind, documents, dataclasses.replace(policy, context_way=way)))


def error_of(pool: Ranks, drawn: Drawn) -> float:
    """Return the largest error of loss and gradients."""
    pool.start(steps, drawn.shape, [drawn.case])
    loss, gradients = alone(*drawn.case[:2])
    errors: list[float] = []
    for (result,) in pool.results(120):
        errors.append(abs(result["loss"] - loss))
        errors += [float((part - gradients[name]).abs().max()) for name, part in result["gradients"].items()]
    return max(errors)


def main(draws: int = 8) -> int:
    return soak(grids(), draws, case_of, error_of, lambda drawn: f"{drawn.case[0]} {drawn.case[2].context_way}")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
