"""What attacks on the package found: each situation is exact now, beside one process, or refused with a way out."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.wrap import whole_tensors
from harness import grid_of, what_is_said

TOLERANCE = 1e-9
ROWS = 4


class Net(nn.Module):
    """Layers for a body that a test gives it."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.out, self.t, self.body = nn.Linear(6, 6), nn.Parameter(torch.tensor(0.7)), body
        self.queue, self.meter, self.seen = deque([0]), SimpleNamespace(count=0, nested=[[0]]), torch.zeros(())

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)

    def encode(self, x: Tensor) -> Tensor:
        return self.out(x) * self.t


def product(m: Any, x: Tensor, y: Tensor) -> Tensor:
    h = m.out(m.q(x))
    return functional.mse_loss(h, y) * (1 + h.square().mean())


def ragged(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """One loss for each row, of another length."""
    h, lengths = m.out(m.q(x)), 2 + (x[:, 0, 0] > 0).long() * 2
    return torch.stack([functional.mse_loss(h[i, :n], y[i, :n]) for i, n in enumerate(lengths.tolist())]).mean()


def side_by_side(m: Any, x: Tensor, y: Tensor) -> Tensor:
    q, k, v = m.q(x), m.k(x), m.v(x)
    q /= 2.0
    k.clamp_(-1, 1)
    v[..., 0] = 0
    return functional.mse_loss(m.out(q * k + v), y)


def counts(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Keeps count in attributes of every kind."""
    m.queue.append(len(m.queue))
    m.meter.count += 1
    m.meter.nested[0].append(1)
    m.seen += 1
    return functional.mse_loss(m.out(x), y)


def selected(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """No target on the last place."""
    h, kept = m.out(x).flatten(0, 1), y.flatten(0, 1)[:, 0] > 99
    labels = y.flatten(0, 1).argmax(-1)
    return functional.cross_entropy(h, labels) + functional.cross_entropy(h, labels.masked_fill(~kept, -100)) * 0


BODIES = (product, ragged, side_by_side, counts, selected)


def build(body: Callable[..., Any], grid: Grid | None) -> Any:
    torch.manual_seed(0)
    model = Net(body).double()
    return model if grid is None else ff.parallelize(model, grid)


def rows(grid: Grid | None) -> tuple[Tensor, Tensor]:
    whole = torch.randn(2, ROWS, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole[0, :2, 0, 0], whole[0, 2:, 0, 0] = 1, torch.tensor([1.0, -1.0])  # the check sees rows of one length
    x, y = (rows if grid is None else ff.local_rows(rows, grid) for rows in whole)
    return x, y


def gradients(model: Any, grid: Grid | None) -> dict[str, Tensor]:
    if grid is not None:
        return whole_tensors(model, "gradient")
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def differ(one: Any, model: Any, grid: Grid) -> float:
    found = gradients(model, grid)
    return max((found[name] - g).abs().max().item() for name, g in gradients(one, None).items())


def errors(shape: Shape) -> dict[str, float]:
    grid, found = grid_of(shape), {}
    for body in BODIES:
        one, model = build(body, None), build(body, grid)
        for _ in range(2):
            one(*rows(None)).backward()
            model(*rows(grid)).backward()
        found[body.__name__] = differ(one, model, grid)
        kept = (len(model.queue), model.meter.count, len(model.meter.nested[0]), model.seen.item())
        found[f"{body.__name__} keeps count"] = float(
            kept != (len(one.queue), one.meter.count, len(one.meter.nested[0]), one.seen.item())
        )
    one, model = build(counts, None), build(counts, grid)
    for side, own in ((one, None), (model, grid)):  # a method that is not forward, and its parameters
        side.encode(rows(own)[0]).square().mean().backward()
    found["another method"] = differ(one, model, grid)
    with torch.no_grad():
        for p in model.parameters():
            p.data = p.data * 0.5
        vector_to_parameters(parameters_to_vector(one.parameters()) * 0.25, one.parameters())
    vector_to_parameters(parameters_to_vector(model.parameters()).detach() * 0.5, model.parameters())
    halved = whole_tensors(model)
    found["assigned data"] = max((halved[name] - p).abs().max().item() for name, p in one.named_parameters())
    return found


@pytest.mark.slow
def test_found_situations_are_exact(ranks) -> None:
    for shape in (Shape(x=2, z=2), Shape(y=2, data=2)):
        for found in ranks(4).run(errors, shape):
            assert {name: error for name, error in found.items() if not error < TOLERANCE} == {}, shape


def draws(m: Any, x: Tensor) -> Tensor:
    return m.out(x) * (random.random() + numpy.random.rand())


def drawn() -> list[float]:
    """Ranks of one place draw the same numbers, whatever they were seeded with."""
    grid = grid_of(Shape(x=2))
    random.seed(grid.rank)
    numpy.random.seed(grid.rank)
    model = build(draws, grid)
    first, second = (model(rows(grid)[0]).detach() for _ in range(2))
    plain = model.out(rows(grid)[0])
    with torch.no_grad():
        factors = (first / (plain.whole() if hasattr(plain, "whole") else plain)).flatten()
    return [factors.min().item(), factors.max().item(), (first - second).abs().max().item()]


def test_python_and_numpy_draw_alike_on_the_ranks_of_a_place(ranks) -> None:
    (low, high, moved), other = ranks(2).run(drawn)
    assert high - low < 1e-9 and moved > 1e-6
    assert [low, high, moved] == other


def centred(m: Any, x: Tensor, *flags: Any) -> Tensor:
    h = m.out(x if isinstance(x, Tensor) else x.rows)
    return h - h.mean(0) if flags in ((), (True,)) else h


def in_evaluation(grid: Grid) -> None:
    build(centred, grid).eval()(rows(grid)[0])


def by_a_flag(grid: Grid) -> None:
    model = build(centred, grid)
    model(rows(grid)[0], False).sum().backward()
    model(rows(grid)[0], True)


def optimizer_before(grid: Grid) -> None:
    model = build(counts, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ff.parallelize(model, grid)(*rows(grid)).backward()
    optimizer.step()


def uneven_rows(grid: Grid) -> None:
    model = build(lambda m, x: ff.whole_batch(m.out(x)).mean(), grid)
    model(rows(grid)[0][: 1 + grid.coords["z"]])


class Scaling:
    """What the Trainer does around a model's pass: it scales the loss by the number of processes afterwards."""

    args = SimpleNamespace(average_tokens_across_devices=True)

    def compute_loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return model(x, num_items_in_batch=torch.tensor(4)) * 2


def scaled_count(grid: Grid) -> None:
    import transformers.trainer  # noqa: F401

    model = ff.parallelize(Counted().double(), grid)
    Scaling().compute_loss(model, rows(grid)[0])


class Counted(nn.Module):
    """Takes the count and does not use it, as Hugging Face's classifiers do."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor, **_: Any) -> Tensor:
        return self.out(x).square().mean()


REFUSED: dict[str, tuple[str, Callable[[Grid], None]]] = {
    "in evaluation": ("depends on the other rows.*ff.whole_batch", in_evaluation),
    "by a flag": ("depends on the other rows.*ff.whole_batch", by_a_flag),
    "optimizer before": ("made before ff.parallelize.*make it after", optimizer_before),
    "scaled count": (
        "average_tokens_across_devices=True multiplies.*average_tokens_across_devices=False",
        scaled_count,
    ),
    "uneven rows": ("equally many rows of each place.*pad the rows", uneven_rows),
}


def refusals() -> dict[str, str]:
    grid = grid_of(Shape(z=2))
    found = what_is_said({name: act for name, (_, act) in REFUSED.items()}, grid)
    model = build(centred, grid)
    model(SimpleNamespace(rows=rows(grid)[0])).sum().backward()
    found["hidden"] = ff.explain(model)
    return found


def test_found_situations_are_refused(ranks) -> None:
    for found in ranks(2).run(refusals):
        for name, said in found.items():
            assert re.search(REFUSED.get(name, ("an input of type SimpleNamespace may hide",))[0], said), (
                f"{name}: {said}"
            )
