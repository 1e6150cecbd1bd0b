"""Law 1 for mixtures at length: grids of at most 8 ranks with every fold, every routing, documents, context and pipe.

    python tests/nn/soak_fold.py [DRAWS [STEP]]

Each of DRAWS draws (default 1) of a grid takes another routing, policy and other documents. All is in fp64, and loss
and gradients must be those of one process to 1e-10. With STEP only every STEP-th grid runs.
"""

from __future__ import annotations

import random
import sys
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from fourfold.axes import AXES
from fourfold.models import ModelConfig
from fourfold.policy import Overlap, Policy
from fourfold.shape import Shape, shapes_of
from harness import Ranks
from mixtures import PACKED_ROWS, mixture, packed_errors, packed_step
from soak_grids import soak


class Drawn(NamedTuple):
    shape: Shape
    policy: Policy
    changes: dict[str, Any]
    documents: str

    @property
    def config(self) -> ModelConfig:
        return mixture(**self.changes)


def grids() -> list[Shape]:
    """Grids that cut the model and the rows, each with every context size and every fold."""
    found = []
    for world in (2, 3, 4, 6, 8):
        for shape in shapes_of(world, axes=AXES):
            if shape.pipe > 2:
                continue
            tokens = shape.x * shape.places
            sizes = [size for size in range(1, tokens + 1) if tokens % size == 0]
            for context, fold in product((1, 2, 4, 8), product(sizes, repeat=3)):
                expert, ex, ez = fold
                fits = tokens % (expert * ex * ez) == 0 and expert * ex * ez > 1 and shape.places % context == 0
                if fits and PACKED_ROWS * context % shape.places == 0:
                    found.append(shape.with_context(context).with_fold(*fold))
    return [shape for shape in found if mixture().misfit(shape, Policy()) is None]


def case_of(draw: random.Random, shape: Shape) -> Drawn:
    policy = Policy(
        activations=draw.choice(["sharded", "replicated"]),
        recompute=draw.choice(["none", "attention", "block"]),
        keep_gathered=draw.random() < 0.3,
        keep_weights=draw.random() < 0.3,
        loss_chunk=draw.choice([0, 5]),
        overlap=draw.choice([Overlap(), Overlap(halves=2), Overlap.off()]),
    )
    shared = draw.choice([0, 24])
    changes = dict(
        experts=draw.choice([5, 6, 8]),
        top_k=draw.choice([1, 2, 3]),
        score=draw.choice(["softmax", "sigmoid"]),
        normalize_top_k=draw.random() < 0.5,
        capacity=draw.choice([0.0, 0.0, 0.7, 1.25]),
        aux=draw.choice([0.0, 0.5]),
        z_loss=draw.choice([0.0, 0.1]),
        bias_rate=draw.choice([0.0, 0.01]),
        shared_hidden=shared,
        dense_layers=draw.choice([0, 1]),
        moe_reads=draw.choice(["current", "previous"]) if shared else "current",
    )
    if changes["experts"] > 5 and draw.random() < 0.3:
        changes |= dict(groups=2, top_groups=1)
    return Drawn(shape, policy, changes, draw.choice(["", f"{draw.random()}"]))


def error_of(pool: Ranks, drawn: Drawn) -> float:
    """Return the largest error of loss and gradients."""
    pool.start(packed_step, drawn.shape, drawn.policy, drawn.config, drawn.documents)
    alone = packed_step(Shape(), Policy(), drawn.config, drawn.documents)
    return max(packed_errors(alone, pool.results(120)))


def main(draws: int = 1, step: int = 1) -> int:
    return soak(grids()[::step], draws, case_of, error_of, lambda drawn: f"{drawn.changes['experts']} experts")


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
