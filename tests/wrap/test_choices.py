"""Modules that run where some row chose them: places along z then run different ones, and equal one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.switch_transformers.configuration_switch_transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

import fourfold as ff
from families import Widened
from fourfold.gradients import BucketSum
from fourfold.grid import Shape
from fourfold.wrap import whole_tensors
from harness import RankFailed, grid_of
from share import ALL

EXPERTS, WIDTH, PLACE_ROWS, STEPS = 4, 6, 4, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


class Mixture(nn.Module):
    """Each row goes to the `slots` experts that its last columns name; an expert without rows does not run."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out, scores = torch.zeros_like(x), self.router(x).softmax(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen[:, : self.slots] == number).any(1)
            if rows.any():
                out = out.index_add(0, rows.nonzero()[:, 0], expert(x[rows]) * scores[rows, number, None])
        return out


class ByName(Mixture):
    """The experts have names of their own in a dict."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.experts = nn.ModuleDict({f"expert_{number}": Expert() for number in range(EXPERTS)})

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out, scores = torch.zeros_like(x), self.router(x).softmax(-1)
        for number in chosen[:, : self.slots].unique().tolist():
            rows = (chosen[:, : self.slots] == number).any(1)
            out[rows] = out[rows] + self.experts[f"expert_{number}"](x[rows]) * scores[rows, number, None]
        return out


class Switch(nn.Module):
    """The mixture of transformers' SwitchTransformers, whose router reads the rows themselves."""

    def __init__(self) -> None:
        super().__init__()
        sizes = dict(d_model=WIDTH, d_ff=8, num_experts=EXPERTS, expert_capacity=64)
        self.mlp = SwitchTransformersSparseMLP(SwitchTransformersConfig(**sizes, router_jitter_noise=0, dropout_rate=0))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return self.mlp((x + chosen[:, :1])[None])[0]


class Net(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        x = self.first(x)
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = x + layer(norm(x), chosen.roll(number, 1))
        return self.last(x)


class Dropped(nn.Module):
    """Some rows ask for fewer layers: the layers of a place end where none of its rows asks for more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(Expert() for _ in range(EXPERTS)), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            wanted = chosen[:, 0] >= number
            if wanted.any():
                x = torch.where(wanted[:, None], x + layer(x), x)
        return self.last(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "top 1": lambda: Net(lambda: Mixture(1)),
    "top 2": lambda: Net(lambda: Mixture(2)),
    "switch": lambda: Net(Switch, layers=1),
    "by name": lambda: Net(lambda: ByName(2), layers=1),
    "layers": Dropped,
}

CHOICES: dict[str, Callable[[int, int, torch.Generator], list[int]]] = {
    # the experts from which the rows of a place choose in a step
    "all first": lambda step, place, _: [0, 1, 2, 3] if step == 0 else [(place + step) % 4, (place + 2 * step) % 4],
    "one first": lambda step, place, _: [2] if step == 0 else [(place + step) % 4, (place + 2 * step) % 4],
    "one each": lambda step, place, _: [(place + step) % 4],
    "one never": lambda step, place, _: [(place + step) % 3],
    "equal": lambda step, _, __: [step % 4, (step + 1) % 4],
    "drawn": lambda _, __, draw: torch.randint(4, (2,), generator=draw).tolist(),
}


def rows_of(choice: str, places: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(places * PLACE_ROWS, WIDTH, generator=draw, dtype=torch.float64)
    chosen = []
    for place in range(places):
        among = torch.tensor(CHOICES[choice](step, place, draw))
        chosen.append(among[torch.randint(len(among), (PLACE_ROWS, 2), generator=draw)])
    return x, torch.cat(chosen)


def train(
    name: str, choice: str, places: int, grid: ff.Grid | None, **policy: Any
) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the parameters without a gradient in each step, and the state at the end."""
    torch.manual_seed(0)
    model, without = MODELS[name]().double(), []
    if grid is not None:
        ff.parallelize(model, grid, policy=ff.Policy(**policy))
    # it moves a parameter whose gradient is 0, and leaves one without a gradient alone
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, weight_decay=0.3)
    for step in range(STEPS):
        x, chosen = rows_of(choice, places, step)
        chosen = chosen.double() if name == "switch" else chosen
        if grid is not None:
            x, chosen = ff.local_rows(x, grid), ff.local_rows(chosen, grid)
        target = x[:, :3]
        if step % 2:
            with torch.no_grad():
                target = model.eval()(x, chosen).roll(1, 1) + 1
        loss = functional.mse_loss(model.train()(x, chosen), target)
        loss.backward()
        without.append([own for own, parameter in model.named_parameters() if parameter.grad is None])
        optimizer.step()
        optimizer.zero_grad()
    return without, dict(model.state_dict()) if grid is None else whole_tensors(model, "state")


def train_all(cases: list[Case], places: int, grid: ff.Grid | None, **policy: Any) -> list[Any]:
    found = []
    for name, choice in cases:
        with Widened() if name == "switch" else nullcontext():  # which costs every operation of the others
            found.append(train(name, choice, places, grid, **policy))
    return found


def on_ranks(cases: list[Case], shape: Shape, policy: dict[str, Any]) -> list[Any]:
    return train_all(cases, shape.places, grid_of(shape), **policy)


Case = tuple[str, str]
FEW: list[Case] = [
    *(("top 1", "one first"), ("top 1", "equal"), ("top 2", "drawn"), ("switch", "one never")),
    *(("by name", "all first"), ("layers", "one each")),
]
SLOW_GRIDS: list[tuple[Shape, dict[str, Any]]] = [
    (Shape(z=4), {}),
    (Shape(x=2, z=2), {}),
    (Shape(z=2, data=2), dict(overlap=ff.Overlap(prefetch=False))),
    (Shape(z=2), dict(overlap=ff.Overlap(defer=False))),
]
GRIDS = [
    pytest.param(Shape(z=2), {}, FEW, id="z=2"),
    # with and without experts inside of blocks that are alike
    pytest.param(
        Shape(x=2, z=2), {}, [("top 2", "all first"), ("switch", "one never"), ("layers", "drawn")], id="x=2 z=2"
    ),
    *(
        pytest.param(
            shape, policy, [(name, choice) for choice in CHOICES], id=f"{shape} {policy} {name}", marks=pytest.mark.slow
        )
        for number, (shape, policy) in enumerate(SLOW_GRIDS)
        for at, name in enumerate(MODELS)
        if ALL or at % len(SLOW_GRIDS) == number  # each model on one of them
    ),
]


@pytest.mark.parametrize(("shape", "policy", "cases"), GRIDS)
def test_places_that_run_different_experts_equal_one_process(
    ranks, shape: Shape, policy: dict[str, Any], cases: list[Case]
) -> None:
    pool = ranks(shape.world)
    pool.start(on_ranks, cases, shape, policy)
    alone = train_all(cases, shape.places, None)
    wrong = []
    for rank, results in enumerate(pool.results(120)):
        for case, (without, state), (plain_without, plain) in zip(cases, results, alone, strict=True):
            off = torch.stack([(state[name] - plain[name]).abs().max() for name in plain]).max().item()
            if without != plain_without or not off <= 1e-12:
                wrong.append((rank, case, off, [set(a) ^ set(b) for a, b in zip(without, plain_without, strict=True)]))
    assert not wrong, "\n".join(map(str, wrong))


# --- what only one place knows


class Odd(nn.Module):
    """Does something for a place whose rows begin with a positive number, and not for others."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        out, odd = self.a(x), bool(x[0, 0] > 0)
        if self.how == "buffer" and odd:
            self.seen.add_(1)
        if self.how == "layer" and odd:
            out = self.b(out)
        if self.how == "loss":
            loss = functional.mse_loss(out, x)
            return loss + functional.l1_loss(out, x) if odd else loss
        if self.how == "whole batch" and odd:
            out = out + ff.whole_batch(out).mean()
        return out if extra is None else out + extra


def odd_pass(how: str, shape: Shape, quiet: int, seconds: float) -> str:
    """Run passes in which places do the same, then one in which only the first place does something more."""
    grid = grid_of(shape)
    deadline = grid.channel.seconds
    model = ff.parallelize(Odd(how).double(), grid)
    draw = torch.Generator().manual_seed(grid.rank)
    try:
        for step in range(quiet + 2):
            odd = step >= quiet and grid.rank == 0
            if step == quiet:
                grid.channel.seconds = seconds
            x = torch.rand(PLACE_ROWS, WIDTH, generator=draw, dtype=torch.float64) * (1 if odd else -1)
            model(x, extra=x if how == "argument" and odd else None).sum().backward()
    except (RuntimeError, ValueError) as error:
        if "collective failed" in str(error):
            raise
        return str(error)
    finally:
        grid.channel.seconds = deadline
    return "nothing"


@pytest.mark.parametrize("shape", [Shape(z=2), Shape(data=2)], ids=str)
def test_a_buffer_that_one_place_writes_is_refused_on_all(ranks, shape: Shape) -> None:
    for quiet in (0, 2):
        for said in ranks(2).run(odd_pass, "buffer", shape, quiet, 60.0):
            assert "writes its buffer 'seen' in forward from the rows it sees" in said


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("layer", "this place is about to use b, and another place of axis z another layer"),
        (
            "loss",
            "ranks disagree on which of torch's losses and ff.whole_batch the model calls: this rank, 0, has "
            "'l1_loss as number 2' since now",
        ),
        pytest.param(
            "whole batch",
            "ranks disagree on which of torch's losses and ff.whole_batch the model calls: this rank, 0, has "
            "'ff.whole_batch as number 1' since now",
            marks=pytest.mark.slow,  # found as a loss is
        ),
        ("argument", "ranks disagree on the arguments that the model is given: this rank, 0, has"),
    ],
)
def test_a_pass_that_differs_on_one_place_later_is_named(ranks, how: str, said: str) -> None:
    with pytest.raises(RankFailed) as failed:
        # the other rank waits in a collective, which the end of this one ends
        ranks(2).run(fail_with, how, Shape(z=2), 2, 1.0, moment=0.2)
    assert said in str(failed.value.errors[0])


def fail_with(*case: Any) -> None:
    raise RuntimeError(odd_pass(*case))


def late_gradients(shape: Shape) -> list[tuple[bool, float, bool]]:
    """A kept loss runs backward twice, so gradients come after their sum; the second time with experts of its own."""
    grid, found = grid_of(shape), []
    torch.manual_seed(0)
    plain = MODELS["top 1"]().double()
    model = ff.parallelize(copy.deepcopy(plain), grid, policy=ff.Policy(bucket_bytes=1))

    def loss(each: nn.Module, step: int) -> Tensor:
        rows = rows_of("drawn", shape.places, step)
        x, chosen = rows if each is plain else [ff.local_rows(part, grid) for part in rows]
        return functional.mse_loss(each(x, chosen), x[:, :3])

    for step in range(2):
        unused = []
        with mock.patch.object(BucketSum, "complete", autospec=True, side_effect=BucketSum.complete) as late:
            for each in (plain, model):
                each.zero_grad()
                kept = loss(each, step)
                kept.backward(retain_graph=True)
                (kept + loss(each, step + 1)).backward()
                unused.append([name for name, p in each.named_parameters() if p.grad is None])
        whole = whole_tensors(model, "gradient")
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
        error = max(float((whole[name] - gradient).abs().max()) for name, gradient in gradients.items())
        found.append((late.call_count > 0, error, unused[0] == unused[1]))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Shape(z=2), Shape(x=2, z=2)], ids=str)
def test_gradients_that_come_after_their_sum_are_added(ranks, shape: Shape) -> None:
    """On x=2, z=2 buckets differ between ranks along x: the small head leaves some of them less."""
    for found in ranks(shape.world).run(late_gradients, shape):
        for late, error, alike in found:
            assert late
            assert alike
            assert error < 1e-12
