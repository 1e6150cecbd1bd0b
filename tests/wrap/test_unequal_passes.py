"""A place that runs other passes than the others is named within the deadline, in one sentence, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold.grid import Grid, Shape
from harness import RankFailed, grid_of

CONFIG = ff.models.config("gpt-tiny", layers=2, hidden=24, heads=4, kv_heads=4, head_dim=6, mlp_hidden=24, vocab=53)
SECONDS, QUIET = 6.0, 3


class Net(nn.Module):
    """Three equal layers, so that a gather of one fits where another was expected."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class Loss(Net):
    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(super().forward(x), x)


def of_rows(make: Callable[[], nn.Module]) -> Callable[[Grid], tuple[nn.Module, Callable[[], Tensor]]]:
    def build(grid: Grid) -> tuple[nn.Module, Callable[[], Tensor]]:
        torch.manual_seed(0)
        model, draw = ff.parallelize(make().double(), grid), torch.Generator().manual_seed(grid.rank)
        return model, lambda: model(torch.randn(4, 6, generator=draw, dtype=torch.float64)).mean()

    return build


def reference(grid: Grid) -> tuple[nn.Module, Callable[[], Tensor]]:
    model, draw = ff.models.build(CONFIG, grid, seed=3), torch.Generator().manual_seed(grid.rank)

    def loss() -> Tensor:
        rows = torch.randint(53, (2, 9), generator=draw)
        return model(rows[:, :-1], rows[:, 1:])

    return model, loss


MODELS = {"net": of_rows(Net), "loss": of_rows(Loss), "reference": reference}


def unequal(name: str, how: str, shape: Shape, quiet: int) -> list[float]:
    """Run steps in which all ranks do the same, then some in which the first rank runs one pass more."""
    grid = grid_of(shape)
    grid.channel.seconds = SECONDS
    model, loss = MODELS[name](grid)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(quiet + 2):
        odd = step >= quiet and grid.rank == 0
        total = loss()
        if how == "two losses":
            total = total + loss() if odd else total
        elif how == "two backward" and odd:
            loss().backward()
        elif how == "forgotten" and odd:
            loss()
        total.backward()
        found.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return found


Z, DATA, BOTH = Shape(z=2), Shape(data=2), Shape(z=2, data=2)
CASES = [
    ("net", "two losses", Z, QUIET),
    ("reference", "two losses", DATA, QUIET),
    *(
        pytest.param(name, how, shape, quiet, marks=pytest.mark.slow)
        for name in MODELS
        for how in ("two losses", "two backward", "forgotten")
        for shape in (Z, DATA, BOTH)
        for quiet in (0, QUIET)
        if not (name == "net" and shape == DATA and how != "two backward")
    ),
]


@pytest.mark.parametrize(("name", "how", "shape", "quiet"), CASES)
def test_a_place_with_more_passes_is_named(ranks, name: str, how: str, shape: Shape, quiet: int) -> None:
    with pytest.raises(RankFailed) as failed:
        ranks(shape.world).run(unequal, name, how, shape, quiet, timeout=90, moment=1)
    said = [str(error) for error in failed.value.errors.values()]
    assert any(text.startswith("ranks disagree on the order of passes: ") for text in said), said


def test_forward_passes_without_messages_may_be_unequal(ranks) -> None:
    """Over data such a pass sends nothing, as under DDP."""
    found = ranks(2).run(unequal, "net", "two losses", DATA, 0)
    assert all(len(losses) == 2 for losses in found)


class Failing(nn.Module):
    """Fails for rows that begin with a positive number, if there are fewer than four."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.a, self.b = late, nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        out = self.b(a) if self.late else a
        if len(x) < 4 and x[0, 0] > 0:
            raise KeyError("no such row")
        return out if self.late else self.b(out)


def fails_in_check(shape: Shape, late: bool, seconds: float, prefetch: bool = True) -> list[float]:
    grid = grid_of(shape)
    before, grid.channel.seconds = grid.channel.seconds, seconds
    torch.manual_seed(0)
    model, plain = (Failing(late).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    ff.parallelize(model, grid, policy=ff.Policy(overlap=ff.Overlap(prefetch=prefetch)))
    whole = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole[:, 0] = torch.tensor([-1.0] * 4 + [1.0] * 4)  # only the second place's sample begins with a positive number
    try:
        model(ff.local_rows(whole, grid)).mean().backward()
    finally:
        grid.channel.seconds = before
    plain(whole).mean().backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return [float((parameter.grad.full_tensor() - other.grad).abs().max()) for parameter, other in pairs]


def test_all_places_leave_the_check_of_rows_if_the_model_fails_on_one(ranks) -> None:
    for shape, late in ((DATA, False), (Z, True)):
        for off in ranks(2).run(fails_in_check, shape, late, 60.0):
            assert max(off) < 1e-12, (shape, off)


def test_a_place_that_fails_in_the_check_while_others_wait_is_named(ranks) -> None:
    with pytest.raises(RankFailed) as failed:
        ranks(2).run(fails_in_check, Z, False, SECONDS, False, moment=1)
    assert "the model failed on this rank, 1, and not on rank 0" in str(failed.value.errors[1])
    assert "KeyError: 'no such row'" in str(failed.value.errors[1])
