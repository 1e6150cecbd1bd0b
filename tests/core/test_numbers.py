"""Numbers that people read from sharded tensors, and draw for them: those of the whole tensor, or one sentence."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold import gate
from fourfold.errors import ReplicasDifferError
from fourfold.gradients import gradients_of
from fourfold.grid import Shape
from fourfold.optim import SGD
from fourfold.policy import Policy
from harness import grid_of
from share import others_slow

READS: dict[str, Callable[[Tensor], Any]] = {
    "norm": lambda t: t.norm().item(),
    "mean": lambda t: float(t.detach().mean()),
    "largest": lambda t: t.abs().max().item(),
    "smallest": lambda t: (-t.min()).item(),
    "sum of squares": lambda t: (t**2).sum().item(),
    "other norms": lambda t: [t.norm(1).tolist(), float(torch.linalg.vector_norm(t.detach(), float("inf")))],
    "computed on": lambda t: ((1.0 / (t.norm() + 1e-6)).clamp(max=1.0) * 2).item(),
    "a sum of two": lambda t: (t.mean() * 2 + t.sum()).item(),
    "counted": lambda t: [int((t > 0).sum()), torch.count_nonzero(t).item()],
    "any": lambda t: [bool((t > 0.02).any()), 1 if t.norm() > 0.1 else 0],
    "finite": lambda t: torch.isfinite(t).all().item(),
    "equal": lambda t: [torch.equal(t, t), torch.equal(t, t * 2), torch.allclose(t, t + 1e-12)],
    "stacked": lambda t: torch.stack([t.norm(), t.detach().norm()]).norm().item(),
    "of several": lambda t: torch.stack(torch._foreach_norm([t, t])).norm().item(),
    "total norm": lambda t: torch.nn.utils.get_total_norm([t.detach()]).item(),
    "lists": lambda t: t.detach().tolist(),
    "arrays": lambda t: t.detach().cpu().numpy().tolist(),
    "text": lambda t: [f"{t.detach().norm():.9f}", f"{t.detach().mean()}"[:9], str(round(float(t.detach().mean()), 9))],
    "sorted": lambda t: [float(each) for each in sorted([t.detach().norm(), t.detach().mean()])],
}
"""What is read from a parameter, its gradient and its optimizer's state."""
QUICK = ("norm", "largest", "smallest", "sum of squares", "any", "lists", "text")
"""Of these in `make test`: for each operation torch derives anew how it is cut."""


def model_and_batch() -> tuple[nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.GELU(), nn.Linear(6, 6, bias=False)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model, torch.randn(8, 6, generator=generator, dtype=torch.float64)


def clipped_by_hand(parameters: list[Tensor], most: float) -> float:
    """Clipping as people write it."""
    total = sqrt(sum(parameter.grad.norm().item() ** 2 for parameter in parameters))
    for parameter in parameters:
        parameter.grad.mul_(min(1.0, most / (total + 1e-6)))
    return total


class HostLamb(torch.optim.Optimizer):
    """A LAMB that reads norms on the host."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].mul_(0.9).addcmul_(parameter.grad, parameter.grad, value=0.1)
                update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6) + 0.01 * parameter
                ratio = parameter.norm().item() / update.norm().item() if float(update.norm()) > 0 else 1.0
                parameter.add_(update, alpha=-group["lr"] * min(ratio, 10.0))


def trained(
    model: nn.Module, batch: Tensor, reads: Sequence[str] = QUICK
) -> tuple[dict[str, Any], list[float], dict[str, Tensor]]:
    """What is read after a step of LAMB, the norms of three steps that are clipped by hand, and the parameters."""
    optimizer = HostLamb(model.parameters(), 0.01)
    norms, found = [], {}
    for _ in range(3):
        model(batch).square().mean().backward()
        norms.append(clipped_by_hand(list(model.parameters()), 0.1))
        optimizer.step()
        if len(norms) == 1:
            for name, parameter in list(model.named_parameters())[:1]:
                tensors = {"": parameter, ".grad": parameter.grad, ".exp_avg": optimizer.state[parameter]["exp_avg"]}
                for kind, tensor in tensors.items():
                    found |= {f"{act} of {name}{kind}": READS[act](tensor) for act in reads}
        optimizer.zero_grad()
    return (
        found,
        norms,
        {name: torch.tensor(p.detach().tolist(), dtype=p.dtype) for name, p in model.named_parameters()},
    )


def on_grid(shape: Shape, reads: Sequence[str]) -> Any:
    grid = grid_of(shape)
    model, batch = model_and_batch()
    return trained(ff.parallelize(model, grid), ff.local_rows(batch, grid), reads)


SHAPES = [Shape(x=2), Shape(z=2), Shape(y=2), Shape(data=2), Shape(x=2, z=2)]


@pytest.mark.parametrize("shape", others_slow(SHAPES, len(SHAPES)), ids=str)
def test_numbers_and_loops_on_the_host_equal_those_of_one_process(ranks, shape: Shape) -> None:
    reads = QUICK if shape.z == 1 else tuple(READS)
    expected, norms, parameters = trained(*model_and_batch(), reads)
    for found, own_norms, own in ranks(shape.world).run(on_grid, shape, reads, timeout=180):
        assert not {key: (found[key], value) for key, value in expected.items() if not close(found[key], value)}
        assert own_norms == pytest.approx(norms, rel=1e-10)
        for name, value in parameters.items():
            torch.testing.assert_close(own[name], value, rtol=0, atol=1e-10)


def close(found: Any, expected: Any) -> bool:
    if isinstance(expected, list) and isinstance(expected[0], str):
        return found == expected
    return torch.allclose(torch.tensor(found).double(), torch.tensor(expected).double(), rtol=1e-10, atol=1e-13)


# one rank asks alone


def ask_alone() -> list[str]:
    """The refusals of a rank that asks alone, in two ways, while the other one goes on with its next step."""
    grid = grid_of(Shape(x=2))
    model, batch = model_and_batch()
    model = ff.parallelize(model, grid)
    model(batch).square().mean().backward()
    gate.GATE_SECONDS, before = 1.0, gate.GATE_SECONDS
    said: list[str] = []
    weight = model[0].weight
    try:
        for _ in range(2):
            if grid.rank == 0:
                reads = (lambda: weight.grad.norm().item(), lambda: weight.norm(), weight.detach().full_tensor)
                for read in (*reads, torch.no_grad()(lambda: model(batch))):
                    begun = time.monotonic()
                    with pytest.raises(RuntimeError) as refused:
                        read()
                    said.append(str(refused.value))
                    seconds = time.monotonic() - begun
                assert seconds < 1 or len(said) == 4, "known from the first time"
            model(batch).square().mean().backward()
        assert weight.grad.norm().item() > 0  # all of them ask: nothing is left of the refusals
        with torch.no_grad():
            assert model(batch).isfinite().all()
    finally:
        gate.GATE_SECONDS = before
    return said


def test_a_rank_that_asks_alone_is_refused_and_both_go_on(ranks) -> None:
    refused, nothing = ranks(2).run(ask_alone)
    assert len(refused) == 8
    assert nothing == []
    for each in refused:
        assert "test_numbers.py:" in each
        assert "between ranks 0, 1, which hold parts of what it reads, and rank 1 did not come here within 1 s" in each
        assert "do it on all of them, from the same line, and print or log the result on one" in each


def ask_from_two_lines() -> str:
    grid = ff.Grid(2, device="cpu")
    model = ff.parallelize(model_and_batch()[0], grid)
    gate.GATE_SECONDS, before = 1.0, gate.GATE_SECONDS
    grid.channel.meet()
    try:
        with pytest.raises(RuntimeError) as refused:
            if grid.rank == 0:
                model[0].weight.norm().item()
            else:
                model[0].weight.norm().item()
        return str(refused.value)
    finally:
        gate.GATE_SECONDS = before


def test_ranks_that_ask_from_two_lines_are_shown_both(ranks) -> None:
    said = ranks(2).run(ask_from_two_lines)
    assert any(
        re.search(r"rank \d did not come here within 1 s \(rank \d came to test_numbers.py:\d+\)", s) for s in said
    )


def come_with_hooks() -> float:
    """Only rank 0 has hooks, as for a log, and only it runs in a profiler."""
    grid = ff.Grid(2, device="cpu")
    model, batch = model_and_batch()
    model = ff.parallelize(model, grid)
    before, gate.GATE_SECONDS, gate.PASS_SECONDS = (gate.GATE_SECONDS, gate.PASS_SECONDS), 5.0, 5.0
    try:
        if grid.rank == 0:
            model.register_forward_hook(lambda *_: None)
            model[0].weight.register_hook(lambda _: None)
        for _ in range(2):
            activities = [torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities) if grid.rank == 0 else nullcontext():
                model(batch).square().mean().backward()
            with torch.no_grad():
                model(batch)
        return model[0].weight.grad.norm().item()
    finally:
        gate.GATE_SECONDS, gate.PASS_SECONDS = before


def test_ranks_with_hooks_or_a_profiler_of_their_own_come_together(ranks) -> None:
    one, other = ranks(2).run(come_with_hooks)
    assert one == other


def extremes_of_one_row(shape: Shape | None) -> list[Any]:
    """Of parameters that are too small for every rank to hold a part."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    if shape is not None:
        model = ff.parallelize(model, grid_of(shape))
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    found: list[Any] = []
    for p in model.parameters():
        for tensor in (p.detach(), p.grad):
            found += [tensor.abs().max().item(), tensor.min().item(), tensor.amax().item(), int(tensor.argmax())]
            found += [float(tensor.norm(float("inf"))), float(tensor.norm()), tensor.flatten().max().item()]
            found += [tensor.median().item(), *(part.item() for part in tensor.aminmax())]
    return [round(number, 12) for number in found]


@pytest.mark.parametrize("shape", [Shape(x=2), Shape(y=2), Shape(z=2)], ids=str)
def test_extremes_of_what_some_ranks_hold_nothing_of(shape: Shape, ranks) -> None:
    assert ranks(2).run(extremes_of_one_row, shape) == [extremes_of_one_row(None)] * 2


def parts_differ(read: str) -> list[str]:
    """The warnings of a line that reads an encoder layer, whose weight of q, k and v is stored as three parts."""
    grid = ff.Grid(x=2, device="cpu")
    model = ff.parallelize(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), grid)
    model(torch.randn(4, 3, 8)).mean().backward()
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        eval(read, {"torch": torch, "model": model, "q": model.self_attn.in_proj_weight_0})
    return [str(each.message) for each in said]


@pytest.mark.parametrize(
    ("read", "differs"),
    [
        ("q.norm()", True),
        ("q.data.pow(2).sum().sqrt().item()", True),
        ("q.grad.norm()", True),
        ("q.grad.mean(0)", True),
        ("q @ q.mT", True),
        ("torch.nn.utils.clip_grad_norm_(q, 1.0)", True),
        ("q.norm(dim=1)", False),
        ("q[0].tolist()", False),
        ("model.linear1.weight.norm()", False),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", False),
    ],
)
def test_numbers_of_a_part_of_a_weight_are_said_to_differ(read: str, differs: bool, ranks) -> None:
    for said in ranks(2).run(parts_differ, read):
        assert [
            bool(re.search("in_proj_weight_0 is one of the parts that .*in_proj_weight is", text)) for text in said
        ] == ([True] * differs)


# what ranks draw


def init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.kaiming_uniform_(module.weight)
    if isinstance(module, nn.LayerNorm):
        nn.init.trunc_normal_(module.weight, std=0.1)
        nn.init.uniform_(module.bias)


def noisy(model: nn.Module, batch: Tensor, *, steps: int = 2) -> list[Tensor]:
    """Weights that were initialised after the model was made, and trained with noise in gradients and parameters."""
    model.apply(init)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(batch).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad.add_(torch.randn_like(parameter.grad), alpha=0.01)
                parameter.add_(torch.empty_like(parameter).normal_(), alpha=0.01)
        optimizer.step()
        optimizer.zero_grad()
    return [torch.tensor(parameter.detach().tolist(), dtype=torch.float64) for parameter in model.parameters()]


def with_norm() -> tuple[nn.Module, Tensor]:
    model, batch = model_and_batch()
    return nn.Sequential(nn.LayerNorm(6).double(), *model), batch


def noisy_on_grid(shape: Shape, seed_by_rank: str) -> tuple[list[Tensor], str]:
    grid = grid_of(shape)
    model, batch = with_norm()
    model, rows = ff.parallelize(model, grid), ff.local_rows(batch, grid)
    torch.manual_seed(7)
    try:
        if seed_by_rank == "init":
            torch.manual_seed(grid.rank)
            return noisy(model, rows), ""
        if seed_by_rank == "step":
            model(rows).square().mean().backward()
            with torch.no_grad():
                model[0].weight.grad.to_local().add_(grid.rank)
            torch.optim.SGD(model.parameters(), 0.1).step()
            model.zero_grad()
            model(rows).square().mean().backward()
        return noisy(model, rows), ""
    except ReplicasDifferError as error:
        return [], str(error)


def test_random_numbers_are_those_of_one_process_or_a_drift_is_named(ranks) -> None:
    model, batch = with_norm()
    torch.manual_seed(7)
    expected = noisy(model, batch)
    for shape in (Shape(x=2), Shape(z=2), Shape(data=2)):
        for found, said in ranks(2).run(noisy_on_grid, shape, ""):
            assert said == ""
            for own, whole in zip(found, expected, strict=True):
                torch.testing.assert_close(own, whole, rtol=0, atol=1e-10)
    for shape, when, name in (
        (Shape(x=2), "init", "0.weight"),
        (Shape(data=2), "init", "0.weight"),
        (Shape(x=2), "step", "0.weight"),
    ):
        for _, said in ranks(2).run(noisy_on_grid, shape, when):
            axis = "x" if shape.x > 1 else "data"
            assert f"{name!r}" in said, said
            assert f"must be equal on all ranks along {axis} and is not (ranks 0, 1)" in said
            assert "draw from the same seed on all ranks" in said


def drift_where_kernels_round_differently() -> list[list[str]]:
    """The warnings of three comparisons after the copies along x differ, if they need not be equal bit for bit."""
    grid = grid_of(Shape(x=2))
    model = ff.parallelize(with_norm()[0], grid)
    check = gradients_of(model)._replicas
    check._is_exact = lambda axis, name: False  # noqa: ARG005  # as on a GPU, where x only repeats the computation
    warned = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            check.compare()
        warned.append([str(each.message) for each in caught])
        with torch.no_grad():
            model[0].weight.to_local().add_(grid.rank)
    return warned


def test_copies_that_a_gpu_may_round_differently_are_named_in_a_warning(ranks) -> None:
    (before, first, later), other = ranks(2).run(drift_where_kernels_round_differently)
    assert before == later == []
    assert len(first) == 1
    assert first[0].startswith("'0.weight' must be equal on all ranks along x and is not (ranks 0, 1)")
    assert other == [[], [], []]


# every kind of parameter

TINY = ff.models.config("gpt-tiny", layers=2, hidden=8, heads=2, kv_heads=2, mlp_hidden=8, vocab=16, seq=8, bias=False)
MIXTURE = ff.models.config("moe-tiny", layers=1, hidden=8, heads=2, kv_heads=2, vocab=16, seq=8)
KINDS = {
    "rows of replicas": (TINY, Shape(x=2, data=2), Policy(shard_optimizer=True)),
    "a stage": (TINY, Shape(x=2, pipe=2), Policy()),
    "a fold": (MIXTURE, Shape(x=2, z=2, expert=2, ex=2), Policy()),
    "a copy in bf16": (TINY, Shape(y=2, z=2), Policy(compute_dtype=torch.bfloat16, keep_casts=True)),
}


def norms_of_all(kind: str, shape: Shape) -> dict[str, list[float]]:
    """Norms that are read while sums are owed, when they are paid, and of parameters on their way after a step."""
    config, _, policy = KINDS[kind]
    grid = grid_of(shape)
    model = ff.models.build(config, grid, policy=policy, dtype=torch.float64)
    tokens = ff.local_rows(torch.arange(64).view(8, 8) % 16, grid)
    optimizer = SGD(model, 0.1)
    found: dict[str, list[float]] = {name: [] for name, _ in model.named_parameters()}

    def read(of: Callable[[Tensor], Tensor]) -> None:
        for name, parameter in model.named_parameters():
            found[name].append(of(parameter.detach() if of is torch.norm else parameter.grad).norm().item())

    if kind == "a stage":
        ff.forward_backward(model, [(tokens, tokens)] * 2)
    else:
        with ff.accumulate(model):
            model(tokens, tokens).backward()
        read(torch.clone)
        model(tokens, tokens).backward()
    read(torch.clone)
    optimizer.step()
    read(torch.norm)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_every_kind_of_parameter_are_those_of_one_process(ranks, kind: str) -> None:
    shape = KINDS[kind][1]
    expected = norms_of_all(kind, Shape())
    tolerance = 1e-2 if "bf16" in kind else 1e-10  # products of bf16 round at 2^-9
    for found in ranks(shape.world).run(norms_of_all, kind, shape, timeout=180):
        assert found
        for name, numbers in found.items():
            assert numbers == pytest.approx(expected[name], rel=tolerance, abs=1e-12), name
