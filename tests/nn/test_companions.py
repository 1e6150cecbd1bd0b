"""Which experts tokens choose together: counted alike on every grid."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
import plain
from fourfold.policy import Overlap, Policy
from fourfold.shape import Shape
from harness import grid_of
from mixtures import batch, mixture
from share import others_slow

CONFIG = mixture(layers=4, top_k=3, dense_layers=1)
CASES = [
    (Shape(), {}, 1),
    (Shape(x=2, z=2, expert=2, ex=2), {"overlap": Overlap(halves=2), "recompute": "block"}, 1),
    (Shape(z=4, context=2), {}, 2),
    (Shape(y=2, pipe=2), {}, 2),
    (Shape(x=2, data=2), {"recompute": "block"}, 2),
    (Shape(z=2, data=2, expert=4), {"overlap": Overlap(halves=2)}, 2),
]


def expected() -> Tensor:
    """Count over the tokens, one by one, what a model in one process has chosen."""
    model = plain.make(CONFIG, 5)
    model.logits(model.hidden(batch()[0]))
    counts = torch.zeros(CONFIG.layers, CONFIG.experts, CONFIG.experts, dtype=torch.long)
    for block, layer in enumerate(model.mixtures):
        for _, choices in layer.routed:
            for chosen in choices:
                for e in chosen:
                    counts[block + CONFIG.dense_layers, e, chosen] += 1
    return counts


def counted(shape: Shape, policy: dict[str, Any], micro_steps: int) -> list[Tensor]:
    grid = grid_of(shape)
    model = ff.models.build(CONFIG, grid, policy=Policy(**policy), dtype=torch.float64, seed=5)
    with pytest.raises(RuntimeError, match=r"call model\.count_companions\(\)"):
        model.companions()
    model.count_companions()
    found = []
    for _ in range(2):
        tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
        parts = list(zip(tokens.chunk(micro_steps), targets.chunk(micro_steps), strict=True))
        if shape.pipe > 1:
            ff.forward_backward(model, parts)
        else:
            model.gradients.begin_step(micro_steps)
            for part in parts:
                model(*part).backward()
        with torch.no_grad():
            model(tokens)
        found.append(model.companions())
    return found


@pytest.mark.parametrize("case", others_slow(CASES, 3), ids=lambda case: f"{case[0]}-{case[2]}")
def test_companions_are_those_of_one_process(ranks: Any, case: tuple[Shape, dict[str, Any], int]) -> None:
    """Every pass of training counts once, and evaluation does not."""
    wanted = expected()
    assert int(wanted.sum()) == 3 * batch()[0].numel() * 3 * 3
    for found in ranks(case[0].world).run(counted, *case):
        assert [each.equal(wanted) for each in found] == [True, True]
