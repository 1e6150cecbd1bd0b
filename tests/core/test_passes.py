"""Passes that are unlike the one before: overlap must not change what they give, nor what they send."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.nn.layer import Layer, assemble
from fourfold.params import local_of
from fourfold.policy import Overlap, Policy
from harness import RankFailed, grid_of

CONFIG = ff.models.config("gpt-tiny", layers=2, hidden=24, heads=4, kv_heads=4, head_dim=6, mlp_hidden=24, vocab=53)


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        return a.clone()

    @staticmethod
    def backward(ctx, *_: Tensor) -> Tensor:
        raise RuntimeError("out of luck")


class Batch:
    """A model and two batches, ready for passes."""

    def __init__(self, shape: Shape, overlap: Overlap, **options: object) -> None:
        self.grid = grid_of(shape)
        policy = Policy(overlap=overlap, bucket_bytes=4000, **options)
        self.model = ff.models.build(CONFIG, self.grid, policy=policy, seed=3, dtype=torch.float64)
        draw = torch.Generator().manual_seed(1)
        whole = torch.randint(48, (2, 2 * shape.z * shape.data, 9), generator=draw)
        self.rows, self.others = (ff.local_rows(rows, self.grid) for rows in whole)

    def loss(self, rows: Tensor | None = None) -> Tensor:
        rows = self.rows if rows is None else rows
        return self.model(rows[:, :-1], rows[:, 1:])

    def train(self) -> None:
        self.loss().backward()
        self.model.zero_grad()

    def gradients(self) -> list[Tensor]:
        return [local_of(parameter.grad).clone() for parameter in self.model.parameters()]


def weights_change_in_between(batch: Batch) -> None:
    state = {name: 2 * value for name, value in batch.model.state_dict().items()}
    loss = batch.loss()
    batch.model.load_state_dict(state)
    loss.backward()


def optimizer_steps_in_between(batch: Batch) -> None:
    optimizer = ff.optim.AdamW(batch.model, lr=0.1)
    batch.loss().backward()
    loss = batch.loss()
    optimizer.step()
    optimizer.zero_grad()
    loss.backward()


def two_forwards_one_backward(batch: Batch) -> None:
    (batch.loss() + batch.loss(batch.others)).backward()


def evaluation_in_between(batch: Batch) -> None:
    loss = batch.loss()
    with torch.no_grad():
        batch.loss(batch.others)
    loss.backward()


def a_part_of_the_graph_first(batch: Batch) -> None:
    read: list[Tensor] = []
    hook = batch.model.layers[1].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    torch.autograd.grad(batch.loss(), read[0])
    hook.remove()
    batch.model.zero_grad()
    batch.train()
    batch.loss().backward()


def frozen_then_trained(batch: Batch) -> None:
    for name, parameter in batch.model.named_parameters():
        parameter.requires_grad_("mlp" in name)
    batch.train()
    batch.model.requires_grad_(True)
    batch.loss().backward()


def a_copy_beside_it(batch: Batch) -> None:
    loss = batch.loss()
    other = copy.deepcopy(batch.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(3)
    other(batch.rows[:, :-1], batch.rows[:, 1:]).backward()
    loss.backward()


def a_failure_before_it(batch: Batch) -> None:
    hook = batch.model.dropout.register_forward_hook(lambda *parts: Fail.apply(parts[-1]))
    with pytest.raises(RuntimeError, match="out of luck"):
        batch.loss().backward()
    hook.remove()
    batch.model.zero_grad()
    batch.loss().backward()


def inference_first(batch: Batch) -> None:
    with torch.inference_mode():
        batch.loss()
    batch.loss().backward()


def with_and_without(shape: Shape, halves: int, options: dict, scenarios: list[Callable[[Batch], None]]) -> list[str]:
    """The scenarios in which overlap changed a bit."""
    found = []
    for scenario in scenarios:
        sides = []
        for overlap in (Overlap.off(halves=halves), Overlap(halves=halves)):
            batch = Batch(shape, overlap, **options)
            if scenario is not inference_first:
                batch.train()
            scenario(batch)
            sides.append(batch.gradients())
        if not all(torch.equal(a, b) for a, b in zip(*sides, strict=True)):
            found.append(scenario.__name__)
    return found


@pytest.mark.parametrize(
    ("shape", "halves", "options", "scenarios"),
    [
        (Shape(z=2), 1, {}, [weights_change_in_between, inference_first]),
        pytest.param(Shape(z=2), 1, {}, [evaluation_in_between, a_copy_beside_it], marks=pytest.mark.slow),
        (Shape(data=2), 1, {}, [two_forwards_one_backward, a_part_of_the_graph_first, frozen_then_trained]),
        pytest.param(
            Shape(x=2),
            2,
            {"loss_chunk": 4, "recompute": "block"},
            [optimizer_steps_in_between, two_forwards_one_backward, a_failure_before_it],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["z=2", "z=2 beside other uses", "data=2", "x=2"],
)
def test_unusual_passes_give_the_same_bits(ranks, shape, halves, options, scenarios) -> None:
    assert ranks(2).run(with_and_without, shape, halves, options, scenarios) == [[], []]


def gathers(shape: Shape) -> list[int]:
    """Gathers over z of an evaluation before and after one stood between forward and backward, and of forward alone."""
    batch = Batch(shape, Overlap())
    counts = []

    def count(grad: bool) -> None:
        with torch.set_grad_enabled(grad), batch.grid.ledger.watch() as records:
            batch.loss()
        counts.append(sum(record.nbytes for record in records if (record.op, record.axis) == ("all_gather", "z")))

    batch.train()
    count(False)
    evaluation_in_between(batch)
    count(False)
    count(False)
    batch.train()
    for _ in range(3):
        count(True)
    return counts


def test_nothing_is_gathered_for_a_backward_that_does_not_come(ranks) -> None:
    before, after, again, first, *forwards = ranks(2).run(gathers, Shape(z=2))[0]
    assert before == after == again
    assert first > before  # backward had followed the forward pass before it
    assert forwards == [before] * 2


class Stack(Layer):
    """Layers of which replicas may skip some, the first two perhaps computed again by a backward inside backward."""

    def __init__(self, grid: Grid, policy: Policy) -> None:
        super().__init__(grid, policy)
        self.ups = nn.ModuleList(ff.nn.Expand(grid, policy, 8, 8, bias=False) for _ in range(4))

    def forward(self, a: Tensor, *, skip: int | None = None, nested: bool = False) -> Tensor:
        def first(a: Tensor) -> Tensor:
            return self.ups[1](self.ups[0](a, 8), 8)

        a = checkpoint(first, a, use_reentrant=True) if nested else first(a)
        for index in (2, 3):
            a = a if index == skip else a + self.ups[index](a, 8)
        return a


def stacked(shape: Shape, overlap: Overlap, nested: bool) -> list[Tensor]:
    grid = grid_of(shape)
    policy = Policy(overlap=overlap, bucket_bytes=1)
    model = Stack(grid, policy)
    assemble(model, grid, policy, dtype=torch.float64)
    draw = torch.Generator().manual_seed(grid.rank)
    a = torch.randn(8, 8, dtype=torch.float64, generator=draw).requires_grad_()
    for skip in (None, 3 if grid.coords["data"] == 1 else None):
        model.zero_grad()
        model(a, skip=skip, nested=nested).square().sum().backward()
    return [local_of(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def test_replicas_may_use_different_layers(ranks) -> None:
    off, on = (ranks(2).run(stacked, Shape(data=2), overlap, False) for overlap in (Overlap.off(), Overlap()))
    for a, b in zip(off, on, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_backward_inside_backward_loses_nothing(ranks) -> None:
    plain, nested = (ranks(2).run(stacked, Shape(z=2), Overlap(), nested) for nested in (False, True))
    for a, b in zip(plain, nested, strict=True):
        assert len(b) == 4
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=0)


def different_rows(later: bool) -> None:
    batch = Batch(Shape(x=2, z=2), Overlap(halves=2), recompute="attention")  # which does not cut a single row
    if later:  # the rows of the first batch alone are compared
        batch.train()
        batch.grid.channel.seconds = 2.0
    batch.loss(batch.rows[: 1 + batch.grid.coords["z"]])


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (False, "rows of this place are cut into . halves"),
        (True, "ranks disagree on the number of halves of a batch: this rank, ., has '1' since now"),
    ],
)
def test_places_that_would_be_cut_differently_are_refused(ranks, later: bool, said: str) -> None:
    with pytest.raises(RankFailed, match=said):
        ranks(4).run(different_rows, later, moment=1)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *parts: object) -> object:
        return self.inner(*parts)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("halves", [1, 2])
def test_hooked_and_wrapped_blocks_are_called_and_change_nothing(recompute: str, halves: int) -> None:
    grid = Grid.alone("cpu")
    rows = torch.arange(16).view(2, 8)
    policy = Policy(overlap=Overlap(halves=halves), recompute=recompute)
    found, calls = [], []
    for change in ("none", "hook", "wrap"):
        model = ff.models.build(replace(CONFIG, dropout=0.5), grid, policy=policy, seed=3, dtype=torch.float64)
        if change == "hook":
            model.layers[0].register_forward_hook(lambda *_: calls.append(1))
        elif change == "wrap":
            model.layers[1] = Wrapped(model.layers[1])
        loss = model(rows, rows)
        loss.backward()
        found.append([loss.detach(), *(local_of(p.grad) for p in model.parameters())])
    assert len(calls) == halves
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_a_hook_on_a_layer_that_is_never_called_is_refused() -> None:
    model = ff.models.build(CONFIG, Grid.alone("cpu"))
    model.layers[1].mlp.down.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down has a hook .* put the hook on layers\.1\.mlp"):
        model(torch.arange(8).view(1, 8))


def never_waited_for() -> list[str]:
    """With biases trained alone nothing is gathered for dw."""
    batch = Batch(Shape(x=2), Overlap())
    for name, parameter in batch.model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    with batch.grid.ledger.events() as events:
        batch.loss().backward()
    waited = {id(what) for kind, what in events if kind == "wait"}
    return [str(what) for kind, what in events if kind == "launch" and id(what) not in waited]


def test_everything_that_is_launched_is_waited_for(ranks) -> None:
    assert ranks(2).run(never_waited_for) == [[], []]


def test_gradients_are_gone_once_they_are_dropped() -> None:
    model = ff.models.build(CONFIG, Grid.alone("cpu"))
    rows = torch.arange(16).view(2, 8)
    for _ in range(3):
        model(rows, rows).backward()
        held = [StorageWeakRef(local_of(parameter.grad).untyped_storage()) for parameter in model.parameters()]
        model.zero_grad()
        assert all(reference.expired() for reference in held)
