"""A module's own `generate` runs on a grid as on one process: no argument that it does not know, equal on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.grid import Shape
from harness import grid_of

PROMPTS = torch.arange(9).view(3, 3) % 32
"""Rows that no number of places above 1 divides."""
SEED = 3


class Loop(nn.Module):
    """A language model with a `generate` as people write one: it draws, and stops when all rows have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.up(self.embed(ids))))

    @torch.no_grad()
    def generate(self, ids: Tensor, new: int, stop: int = -1) -> Tensor:
        for _ in range(new):
            drawn = torch.multinomial(self(ids)[:, -1].softmax(-1), 1)
            ids = torch.cat([ids, drawn], 1)
            if (drawn == stop).any():  # ranks with other rows would end at another step
                break
        return ids


class Options(Loop):
    """Hands its options on, as a wrapper does, and would fail at one that it does not know."""

    def generate(self, ids: Tensor, **options: Any) -> Tensor:
        return super().generate(ids, **options)


class Around(nn.Module):
    """Calls the `generate` of a module inside, with another name for the prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = Loop()

    def forward(self, ids: Tensor) -> Tensor:
        return self.inside(ids)

    def generate(self, *, prompt: Tensor, **options: Any) -> dict[str, Tensor]:
        return {"tokens": self.inside.generate(prompt, **options)}


class Static(Loop):
    """Has a `generate` that is no method at all."""

    @staticmethod
    def generate(count: int) -> Tensor:
        return torch.arange(count)


OPTIONS = {"new": 12, "stop": 5}
CALLS: dict[type[nn.Module], Any] = {
    Loop: lambda model: model.generate(PROMPTS, 12, stop=5),
    Options: lambda model: model.generate(PROMPTS, **OPTIONS),
    Around: lambda model: model.generate(prompt=PROMPTS, **OPTIONS)["tokens"],
    Static: lambda model: model.generate(4),
}


def generated(shape: Shape) -> dict[str, list]:
    grid, found = grid_of(shape), {}
    for kind, call in CALLS.items():
        torch.manual_seed(0)
        model = ff.parallelize(kind(), grid)
        torch.manual_seed(SEED + grid.rank)  # as ranks of a launcher are: only rank 0's seed may count
        found[kind.__name__] = call(model).tolist(), call(model).tolist()
    return found


def test_a_generate_of_ones_own_runs_as_it_is(ranks) -> None:
    """With equal draws everywhere; two calls draw differently."""
    (one,) = ranks(1).run(generated, Shape())
    for shape in (Shape(x=2, z=2), Shape(z=2, data=2)):
        assert ranks(4).run(generated, shape) == [one] * 4, shape
    assert one["Loop"][0] != one["Loop"][1]
    assert one["Static"] == ([0, 1, 2, 3], [0, 1, 2, 3])
