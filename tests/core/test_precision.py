"""bf16 products on fp32 weights: what is cast, what travels, and how far the result is off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fourfold as ff
from closed_form import APART
from fourfold.grid import Grid, Shape
from fourfold.nn.layer import specs_of
from fourfold.params import local_of
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy
from harness import grid_of, join_shards

CONFIG = ff.models.config("gpt-tiny", layers=1, vocab=53)
SHAPE = Shape(x=2, z=2)


def train(policy: Policy) -> dict:
    grid = grid_of(SHAPE)
    model = ff.models.build(CONFIG, grid, policy=policy)
    tokens = torch.arange(64).view(4, 16) % 53
    with grid.ledger.watch() as records:
        loss = model(*(ff.local_rows(tokens, grid) for _ in range(2)))
        loss.backward()
    specs = specs_of(model)
    serial = ff.models.build(CONFIG, Grid.alone("cpu"))
    serial_loss = serial(tokens, tokens)
    serial_loss.backward()
    pairs = [
        (join_shards(local_of(a.grad), specs[name], grid), local_of(b.grad))
        for (name, a), b in zip(model.named_parameters(), serial.parameters(), strict=True)
    ]
    return {
        "dtypes": {(parameter.dtype, parameter.grad.dtype) for parameter in model.parameters()},
        "loss": (loss.item(), serial_loss.item()),
        "off": sum((a - b).square().sum() for a, b in pairs).sqrt().item(),
        "norm": sum(b.square().sum() for _, b in pairs).sqrt().item(),
        "records": records,
    }


def check(ranks, policy: Policy) -> None:
    for rank, found in enumerate(ranks(4).run(train, policy)):
        assert found["dtypes"] == {(torch.float32, torch.float32)}
        sizes = LocalSizes(CONFIG, SHAPE, policy, rows=2, seq=16, dtype=torch.float32, rank=rank)
        assert Counter(found["records"]) == Counter(step_program(sizes, optimizer=False).records)
        # bf16 keeps 8 bits: a product is off by about 2^-9 of its size, a chain of ten by a few times that
        assert abs(found["loss"][0] - found["loss"][1]) < 0.01 * found["loss"][1]
        assert 1e-4 < found["off"] / found["norm"] < 0.03


def test_bf16_compute_with_fp32_weights_and_reductions(ranks) -> None:
    check(ranks, Policy(compute_dtype=torch.bfloat16, overlap=APART))


def test_bf16_reductions_and_the_published_mode(ranks) -> None:
    check(ranks, Policy("replicated", compute_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, overlap=APART))


def test_what_travels_is_cast_first() -> None:
    """Against fp32: half the bytes of activations and gathered weights, reductions as asked for."""

    def sizes(policy: Policy) -> dict[tuple[str, str], int]:
        found: Counter[tuple[str, str]] = Counter()
        for record in step_program(LocalSizes(CONFIG, Shape(2, 2, 2, 2), policy, 2, 16), optimizer=False).records:
            if "norm" not in record.label and record.label != "loss":
                found[record.op, record.axis] += record.nbytes
        return found

    whole, half, both = (
        sizes(policy)
        for policy in (
            Policy(),
            Policy(compute_dtype=torch.bfloat16),
            Policy(compute_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        )
    )
    assert half["all_gather", "z"] * 2 == whole["all_gather", "z"]
    assert half["all_gather", "x"] * 2 == whole["all_gather", "x"]
    assert half["reduce_scatter", "y"] * 2 == whole["reduce_scatter", "y"]
    assert half["reduce_scatter", "z"] == whole["reduce_scatter", "z"] == both["reduce_scatter", "z"] * 2
    assert half["all_reduce", "data"] == whole["all_reduce", "data"] == both["all_reduce", "data"]


class CastCounter(TorchDispatchMode):
    """Counts the elements of some fp32 tensors that are cast to bf16."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.counted, self.elements = {tensor.data_ptr() for tensor in tensors}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sources = []
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") == torch.bfloat16:
            sources = [args[0]]
        elif func is torch.ops.aten._foreach_copy_.default and args[0][0].dtype == torch.bfloat16:
            sources = args[1]
        self.elements += sum(source.numel() for source in sources if source.data_ptr() in self.counted)
        return func(*args, **(kwargs or {}))


def cast_and_train(shape: Shape, keep: bool) -> tuple[list[torch.Tensor], float]:
    """This rank's parameters after some steps, and how often its shards are cast in one of them."""
    grid = grid_of(shape)
    policy = Policy(compute_dtype=torch.bfloat16, keep_casts=keep)
    model = ff.models.build(ff.models.config("llama-tiny", layers=2, vocab=53, tied=True), grid, policy=policy)
    optimizer = ff.optim.AdamW(model, lr=1e-2)
    tokens = ff.local_rows(torch.arange(64).view(4, 16) % 53, grid)
    for step in range(3):
        with CastCounter([local_of(parameter) for parameter in model.parameters()]) as casts:
            model(tokens, tokens).backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        for parameter in model.parameters():  # torch counts no change through `.data`
            parameter.data.mul_(1 + 0.1 * step)
            local_of(parameter).data.mul_(1.1)
    shards = [local_of(parameter).clone() for parameter in model.parameters()]
    return shards, casts.elements / sum(shard.numel() for shard in shards)


@pytest.mark.slow
def test_casts_that_are_kept_are_made_once_in_a_pass_and_change_nothing(ranks) -> None:
    for shape in (Shape(), Shape(x=2), Shape(z=2)):
        kept, made = (ranks(shape.world).run(cast_and_train, shape, keep) for keep in (True, False))
        for (shards, often), (same, oftener) in zip(kept, made, strict=True):
            assert all(torch.equal(*pair) for pair in zip(shards, same, strict=True))
            assert often == 1
            assert oftener > 1.5  # a joint cast of q, k and v counts once for q


def test_layers_without_a_model_read_what_any_optimizer_has_written() -> None:
    """Nobody begins their passes, and torch's foreach and fused kernels do not count changes of a DTensor."""
    losses = []
    for keep in (True, False):
        grid, policy = Grid.alone("cpu"), Policy(compute_dtype=torch.float32, keep_casts=keep)
        layer = ff.nn.Expand(grid, policy, 4, 4)
        ff.nn.assemble(layer, grid, policy, dtype=torch.float64)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=True)
        for _ in range(3):
            loss = layer(torch.ones(2, 4), 2).square().sum()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


def change_dtype() -> set[torch.dtype]:
    """The dtypes of gradients and of the loss after a model that has run before was cast."""
    grid = grid_of(Shape(z=2))
    model = ff.models.build(CONFIG, grid, dtype=torch.float64)
    tokens = ff.local_rows(torch.arange(64).view(4, 16) % 53, grid)
    for dtype in (torch.float64, torch.float32):
        if dtype != model.embedding.weight.dtype:
            model.to(dtype)
        for _ in range(2):  # the second pass gathers ahead what the first one used
            loss = model(tokens, tokens)
            loss.backward()
            found = {loss.dtype, *(parameter.grad.dtype for parameter in model.parameters())}
            model.zero_grad()
    return found


def test_a_model_that_was_cast_gathers_in_its_new_dtype(ranks) -> None:
    assert ranks(2).run(change_dtype) == [{torch.float32}] * 2
