"""Gradients: complete when backward returns, summed once, accumulated, clipped, and taken by torch's optimizers."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Partial

import fourfold as ff
from fourfold.grad_norm import grad_norm
from fourfold.gradients import OwingGradient, fill_buckets
from fourfold.grid import Shape
from fourfold.params import local_of
from harness import RankFailed, grid_of

GRID = Shape(x=2, data=2)
CONFIG = ff.models.config("gpt-tiny", vocab=53)


def make(shape: Shape = GRID) -> tuple[ff.models.Transformer, torch.Tensor]:
    grid = grid_of(shape)
    model = ff.models.build(CONFIG, grid, dtype=torch.float64)
    return model, ff.local_rows(torch.arange(32).view(4, 8), grid)


def shards(model: torch.nn.Module) -> list[torch.Tensor]:
    return [local_of(parameter.grad).clone() for parameter in model.parameters()]


def passes() -> dict[str, float]:
    """Largest relative error of several ways to run backward."""
    model, tokens = make()
    model(tokens, tokens).backward()
    once = shards(model)
    errors = {}

    def error(times: float) -> float:
        largest = max(gradient.abs().max() for gradient in once)
        pairs = zip(shards(model), once, strict=True)
        return max((a - times * b).abs().max().item() for a, b in pairs) / largest.item()

    model(tokens, tokens).backward()
    errors["twice without zero_grad is the sum"] = error(2)
    with ff.accumulate(model):
        model(tokens, tokens).backward()
    model(tokens, tokens).backward()
    errors["accumulation on top of complete gradients"] = error(4)
    model.zero_grad()
    with ff.accumulate(model):
        model(tokens, tokens).backward()
    owed = {name for name, p in model.named_parameters() if any(isinstance(q, Partial) for q in p.grad.placements)}
    errors["owed while accumulating"] = len(owed ^ {name for name, _ in model.named_parameters()})
    model.zero_grad()
    model(tokens, tokens).backward()
    errors["zero_grad drops what was accumulated"] = error(1)
    with ff.accumulate(model):
        model(tokens, tokens).backward()
    model.zero_grad(set_to_none=False)
    model(tokens, tokens).backward()
    errors["zeroed in place"] = error(1)
    return errors


def test_gradients_are_summed_exactly_once(ranks) -> None:
    for errors in ranks(4).run(passes):
        assert {law: error for law, error in errors.items() if error > 1e-12} == {}


class Fail(torch.autograd.Function):
    """Identity whose backward fails."""

    @staticmethod
    def forward(ctx, a):
        return a.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("in the middle of backward")


def unusual_uses() -> dict[str, float]:
    model, tokens = make()
    other = copy.deepcopy(model)
    model(tokens, tokens).backward()
    norm = grad_norm(model.parameters()).item()
    found = {}
    other(tokens, tokens).backward()
    found["a copy has gradients of its own"] = grad_norm(other.parameters()).item() / norm
    found["and leaves the first alone"] = grad_norm(model.parameters()).item() / norm
    model.zero_grad()
    (model(tokens, tokens) / 4 + 3 * model(tokens, tokens) / 4).backward()
    found["two forwards, one backward, scaled"] = grad_norm(model.parameters()).item() / norm
    hook = model.layers[0].register_forward_pre_hook(lambda _, inputs: (Fail.apply(inputs[0]), *inputs[1:]))
    with contextlib.suppress(ArithmeticError):
        model(tokens, tokens).backward()
    hook.remove()
    model.zero_grad()
    model(tokens, tokens).backward()
    found["after a backward that failed"] = grad_norm(model.parameters()).item() / norm
    model.eval()
    with torch.no_grad():
        found["without gradients"] = (model(tokens, tokens) / model(tokens, tokens)).item()
    return found


def test_copies_failures_and_scaled_losses(ranks) -> None:
    for found in ranks(4).run(unusual_uses):
        assert {use: ratio for use, ratio in found.items() if abs(ratio - 1) > 1e-12} == {}


class Counted:
    """A model whose gradients are many buckets, and how often they are summed and when."""

    def __init__(self, **options: object) -> None:
        self.grid = grid_of(Shape(data=2))
        policy = ff.Policy(bucket_bytes=4 << 10, **options)  # type: ignore[arg-type]
        self.model = ff.models.build(CONFIG, self.grid, policy=policy, dtype=torch.float64)
        self.tokens = ff.local_rows(torch.arange(32).view(4, 8), self.grid)
        self.buckets = len(self.model.gradients.buckets())

    def loss(self) -> torch.Tensor:
        return self.model(self.tokens, self.tokens)

    def sums(self, act) -> tuple[bool, bool]:
        """Whether every bucket was summed once, and whether some were launched before the last product."""
        with self.grid.ledger.events() as events:
            act()
        launches = [i for i, event in enumerate(events) if event.kind == "launch" and "gradients" in event.what.label]
        last = max(i for i, event in enumerate(events) if event.kind == "product")
        return len(launches) == self.buckets, any(i < last for i in launches)


def count_uses() -> dict[str, tuple[bool, bool]]:
    found = {}
    counted = Counted()
    found["the first pass of all"] = counted.sums(lambda: counted.loss().backward())
    kept = counted.loss()
    kept.detach_()
    counted.loss()
    found["passes were discarded"] = counted.sums(lambda: counted.loss().backward())

    def several_in_flight() -> None:
        counted.model.gradients.begin_step(3)
        losses = [counted.loss() for _ in range(3)]
        for loss in losses:
            loss.backward()

    found["three passes in flight"] = counted.sums(several_in_flight)
    found["after them"] = counted.sums(lambda: counted.loss().backward())
    weight = counted.model.layers[0].mlp.up.weight
    found["a penalty beside the layer"] = counted.sums(lambda: (counted.loss() + weight.square().sum()).backward())
    loss = counted.loss()
    loss.backward(retain_graph=True)
    found["a retained graph again"] = counted.sums(lambda: loss.backward())
    recomputed = Counted(recompute="block")
    found["blocks run again"] = recomputed.sums(lambda: recomputed.loss().backward())
    one, other = counted.loss(), counted.loss()
    found["the first of two losses"] = counted.sums(lambda: one.backward())
    found["the second of two losses"] = counted.sums(lambda: other.backward())
    return found


def test_buckets_are_launched_when_no_gradient_is_to_come(ranks) -> None:
    """Once each, and before backward ends unless a pass that is alive, or one that nobody counted, may give more."""
    waits = {"a retained graph again", "the first of two losses"}
    for found in ranks(2).run(count_uses):
        assert found == {case: (True, case not in waits) for case in found}


def in_flight_together() -> float:
    """The largest difference between three passes in flight at once and one after another."""
    model, tokens = make(Shape(x=2, data=2))
    batches = [tokens, tokens + 1, tokens + 2]
    with ff.accumulate(model):
        for batch in batches[:-1]:
            model(batch, batch).backward()
    model(batches[-1], batches[-1]).backward()
    expected = shards(model)
    model.zero_grad()
    model.gradients.begin_step(len(batches))
    losses = [model(batch, batch) for batch in batches]
    for loss in losses:
        loss.backward()
    one_by_one = shards(model)
    model.zero_grad()
    model.gradients.begin_step(len(batches))
    sum(model(batch, batch) for batch in batches).backward()
    both = (one_by_one, shards(model))
    return max((a - b).abs().max().item() for found in both for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
def test_passes_in_flight_together_give_the_sum_of_their_gradients(ranks) -> None:
    assert max(ranks(4).run(in_flight_together)) < 1e-14


def clip_too_early() -> None:
    model, tokens = make()
    with ff.accumulate(model):
        model(tokens, tokens).backward()
    ff.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.slow
def test_gradients_of_weights_that_are_read_together_are_tensors_of_their_own() -> None:
    """They lie side by side in memory."""
    model = ff.models.build("gpt-tiny", ff.Grid.alone("cpu"))
    tokens = torch.arange(16).view(2, 8)
    model(tokens, tokens).backward()
    attention = model.layers[0].attention
    q, k, v = (layer.weight.grad for layer in (attention.q, attention.k, attention.v))
    for gradient in (q, k, v):
        local = gradient.to_local()
        assert local.storage_offset() == 0
        assert local.untyped_storage().nbytes() == local.nbytes
        for each in (gradient, gradient.detach(), gradient[:], gradient.view(-1)):
            copied = copy.deepcopy(each)
            assert torch.equal(copied.to_local().flatten(), local.flatten())
    before = k.to_local()._version
    q.zero_()
    assert k.to_local()._version == before
    assert k.to_local().abs().sum() > 0


def test_an_owed_gradient_is_refused(ranks) -> None:
    with pytest.raises(RankFailed, match="not summed over ranks yet") as failed:
        ranks(4).run(clip_too_early)
    assert len(failed.value.errors) == 4


def freeze() -> tuple[set[str], set[str], int]:
    model, tokens = make(Shape(z=2, data=2))
    with model.grid.ledger.watch() as all_records:
        model(tokens, tokens).backward()
    model.zero_grad()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("layers.1.mlp."))
    with model.grid.ledger.watch() as records:
        model(tokens, tokens).backward()
    reduced = {record.label for record in records if record.op == "reduce_scatter"}
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    return trained, reduced, len(all_records) - len(records)


def test_frozen_parameters_cost_no_gradient_and_no_reduction(ranks) -> None:
    for trained, reduced, saved in ranks(4).run(freeze):
        assert trained == {f"layers.1.mlp.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
        assert reduced == {"layers.1.mlp.down .. layers.1.mlp.up"}
        assert saved > 10


def optimize() -> dict[str, float]:
    """Torch's own optimizers and clipping on the DTensors, beside the same on the bare shards. Few shapes: for each
    torch derives anew how every operation is cut."""
    errors = {}
    width = CONFIG.hidden
    config = replace(CONFIG, layers=1, bias=False, mlp_hidden=width, seq=width)
    for name, optimizer in {
        "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    }.items():
        grid = grid_of(Shape(z=2))
        model = ff.models.build(config, grid, dtype=torch.float64)
        tokens = ff.local_rows(torch.arange(32).view(4, 8), grid)
        bare = [torch.nn.Parameter(local_of(parameter).detach().clone()) for parameter in model.parameters()]
        on_grid, on_bare = optimizer(model.parameters()), optimizer(bare)
        for _ in range(2):
            model(tokens, tokens).backward()
            for parameter, shard in zip(model.parameters(), bare, strict=True):
                shard.grad = local_of(parameter.grad).clone()
            on_grid.step()
            on_bare.step()
            on_grid.zero_grad()
        pairs = zip(model.parameters(), bare, strict=True)
        errors[name] = max((local_of(p) - shard).abs().max().item() if shard.numel() else 0.0 for p, shard in pairs)
    model(tokens, tokens).backward()
    ours = grad_norm(model.parameters()).item()
    torchs = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False).full_tensor().item()
    errors["clip_grad_norm_"] = abs(ours - torchs) / torchs
    return errors


@pytest.mark.slow
def test_optimizers_of_torch_take_the_parameters(ranks) -> None:
    for errors in ranks(2).run(optimize):
        # elementwise on the same numbers, so bitwise; the norm sums in another order
        assert {name: error for name, error in errors.items() if error > 1e-14} == {}


def repeat() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    runs = []
    for _ in range(2):
        model, tokens = make(Shape(x=2, z=2))
        model(tokens, tokens).backward()
        runs.append(shards(model))
    return runs[0], runs[1]


def test_the_same_run_twice_is_bitwise_equal(ranks) -> None:
    for first, second in ranks(4).run(repeat):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_buckets_hold_what_owes_the_same_and_close_when_full() -> None:
    data, both = ("data",), ("x", "data")
    gradients = [
        ("a", data, torch.float32, 60),
        ("n", both, torch.float32, 8),
        ("b", data, torch.float32, 50),
        ("c", data, torch.float32, 50),
        ("h", data, torch.bfloat16, 10),
        ("big", data, torch.float32, 500),
    ]
    buckets = fill_buckets([OwingGradient(*each) for each in gradients], 100)
    assert [(bucket.owes, bucket.names, bucket.nbytes) for bucket in buckets] == [
        (data, ("big",), 500),
        (data, ("h",), 10),
        (data, ("c", "b"), 100),
        (both, ("n",), 8),
        (data, ("a",), 60),
    ]
