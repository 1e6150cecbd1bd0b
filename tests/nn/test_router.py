"""Routers of mixtures: bias, groups, capacity, losses and what experts read, equal to one process on every grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fourfold as ff
import plain
from fourfold.checkpoint.load import load_training
from fourfold.checkpoint.save import Saver
from fourfold.context.assign import assign_documents, assign_rows
from fourfold.nn.layer import specs_of
from fourfold.nn.router import Routing, Sequences, within_capacity
from fourfold.optim import SGD, AdamW, ShardedOptimizer, on_shards
from fourfold.params import local_of
from fourfold.policy import Overlap, Policy
from fourfold.shape import Shape
from harness import grid_of, join_shards
from share import others_slow

ROWS, STEPS = 8, 3
RATE = 0.05
HALVES = Overlap(halves=2)
DOCUMENTS = ([5, 6], [11], [1, 10], [3, 4, 4], [11], [6, 5], [2, 8, 1], [11])
"""The lengths of the documents in each row of 11 tokens."""


def mixture(**changes: Any) -> ff.models.ModelConfig:
    sizes = dict(layers=2, hidden=24, heads=24, kv_heads=24, head_dim=8, mlp_hidden=24, vocab=48, seq=16, tied=False)
    return ff.models.config("llama-tiny", **{**sizes, **dict(experts=8, top_k=2, expert_hidden=24), **changes})


DEEPSEEK = dict(score="sigmoid", groups=4, top_groups=2, top_k=3, route_scale=2.5, bias_rate=RATE, shared_hidden=24)
"""The routing of DeepSeek-V3."""
EVERYTHING = mixture(**DEEPSEEK, capacity=0.9, aux=0.5, z_loss=0.1)
PREVIOUS = mixture(
    score="softmax", experts=5, capacity=0.8, aux=0.5, bias_rate=RATE, shared_hidden=24, moe_reads="previous"
)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(48, (ROWS, 11), generator=generator) for _ in range(2))
    return tokens, targets


def expected(config: ff.models.ModelConfig, *, packed: bool) -> dict[str, Any]:
    """What one process computes in some steps of SGD."""
    model = plain.make(config, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for row, (tokens, targets) in enumerate(zip(*batch(step), strict=True)):
            lengths = DOCUMENTS[row] if packed else [11]
            for ids, aims in zip(tokens.split(lengths), targets.split(lengths), strict=True):
                logits = model.logits(model.hidden(ids[None]))[0]
                total = total + functional.cross_entropy(logits, aims, reduction="sum") / (ROWS * 11)
        (total + plain.router_losses(model, ROWS * 11)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        for each in model.mixtures:
            each.routed.clear()
            if config.bias_rate:
                each.move_biases()
    return {
        "losses": losses,
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "biases": [each.bias for each in model.mixtures],
        "dropped": [each.dropped for each in model.mixtures],
    }


def on_ranks(
    shape: Shape, policy: dict[str, Any], micro_steps: int, config: ff.models.ModelConfig, packed: bool
) -> dict[str, Any]:
    grid = grid_of(shape)
    model = ff.models.build(config, grid, policy=Policy(**policy), dtype=torch.float64, seed=5)
    optimizer = SGD(model, 0.1, momentum=0.0)
    losses = [take_step(model, optimizer, step, micro_steps, packed=packed) for step in range(STEPS)]
    specs = specs_of(model)
    parts = {name: join_shards(local_of(each), specs[name], grid) for name, each in model.named_parameters()}
    biases = {name: held.tolist() for name, held in model.named_buffers() if name.endswith("router.bias")}
    load = model.expert_load().sum(1)
    dropped = model.dropped_pairs()
    assert (load + dropped).tolist() == [STEPS * ROWS * 11 * config.top_k] * config.layers
    return {"losses": losses, "parameters": parts, "biases": biases, "dropped": dropped.tolist()}


def take_step(
    model: ff.models.Transformer, optimizer: ShardedOptimizer, step: int, micro_steps: int, *, packed: bool
) -> float:
    """Take a step; before the first, one that is skipped and a pass in evaluation, which leave nothing behind."""
    grid = model.grid
    if step == 0:
        backward(model, 99, micro_steps, packed=packed)
        optimizer.clip_and_step(unless=torch.ones((), dtype=torch.bool))
        optimizer.zero_grad()
        model.eval()
        model(ff.local_rows(batch(77)[0], grid))
        model.train()
        model.update_router_biases()
        assert model.expert_load().sum() + model.dropped_pairs().sum() > 0
    loss = backward(model, step, micro_steps, packed=packed)
    optimizer.clip_and_step()
    optimizer.zero_grad()
    model.update_router_biases()  # the optimizer has called it in its step
    return loss


def backward(model: ff.models.Transformer, step: int, micro_steps: int, *, packed: bool) -> float:
    grid = model.grid
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch(step))
    rows = ff.local_rows(torch.arange(ROWS), grid).chunk(micro_steps)
    parts = [
        {"tokens": ids, "targets": aims}
        | ({"documents": [length for row in own.tolist() for length in DOCUMENTS[row]]} if packed else {})
        for ids, aims, own in zip(tokens.chunk(micro_steps), targets.chunk(micro_steps), rows, strict=True)
    ]
    if grid.size("pipe") > 1:
        return ff.forward_backward(model, parts).item()
    count = ff.count_targets(targets, grid) if micro_steps > 1 else None
    model.gradients.begin_step(micro_steps)
    losses = [model(**part, count=count) for part in parts]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses)


def compare(found: dict[str, Any], wanted: dict[str, Any], layers: int) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-11)
    for name, parameter in found["parameters"].items():
        torch.testing.assert_close(parameter, wanted["parameters"][name], rtol=0, atol=1e-11, msg=name)
    known = {f"layers.{layer}.mlp.router.bias": bias for layer, bias in enumerate(wanted["biases"])}
    assert found["biases"].items() <= known.items()  # equal bits
    assert found["dropped"] == wanted["dropped"]
    assert len(wanted["dropped"]) == layers


ALONE: dict[str, dict[str, Any]] = {
    "groups": dict(groups=4, top_groups=2, top_k=3),
    "scale": dict(route_scale=2.5, score="sigmoid"),
    "bias": dict(bias_rate=RATE),
    "capacity": dict(capacity=0.7),
    "previous": dict(moe_reads="previous", shared_hidden=24),
}


@pytest.mark.parametrize("name", ALONE)
def test_each_field_does_what_its_definition_says(name: str) -> None:
    config = mixture(**ALONE[name])
    wanted = expected(config, packed=False)
    compare(on_ranks(Shape(), {}, 1, config, packed=False), wanted, config.layers)
    usual = expected(mixture(shared_hidden=config.shared_hidden, top_k=config.top_k), packed=False)
    assert wanted["losses"] != usual["losses"]
    assert any(wanted["dropped"]) == bool(config.capacity)


CASES: list[tuple[Shape, dict[str, Any], int, bool]] = [
    (Shape(x=2, z=2), dict(overlap=HALVES, recompute="block"), 1, False),
    (Shape(z=2, data=2, context=2), {}, 4, True),
    (Shape(x=2, pipe=2), dict(schedule="zb-h1"), 4, True),
    (Shape(z=4, context=2), {}, 4, False),  # 11 tokens of a row on 2 places, which are filled up
    (Shape(y=2, z=2), dict(activations="replicated"), 2, True),
    (Shape(x=2, y=2), dict(keep_gathered=True), 1, True),
    (Shape(x=4), dict(recompute="block"), 2, False),
    (Shape(z=2, pipe=2), dict(recompute="block"), 2, False),
    (Shape(data=4, context=4), dict(overlap=HALVES), 1, True),
    (Shape(x=2, z=2, context=2), dict(overlap=HALVES, recompute="block"), 2, True),
    (Shape(z=2, pipe=2, context=2), {}, 2, True),
    (Shape(x=2, data=2), dict(overlap=HALVES, shard_optimizer=True, recompute="attention"), 2, False),
]


@pytest.mark.parametrize("case", others_slow(CASES, 3), ids=lambda case: f"{case[0]}{case[1:]}")
@pytest.mark.parametrize("config", [EVERYTHING, PREVIOUS], ids=["everything", "previous"])
def test_a_grid_routes_as_one_process(ranks, case: Any, config: ff.models.ModelConfig) -> None:
    shape, policy, micro_steps, packed = case
    pool = ranks(shape.world)
    pool.start(on_ranks, shape, policy, micro_steps, config, packed)
    wanted = expected(config, packed=packed)
    assert any(wanted["dropped"])
    assert any(any(bias) for bias in wanted["biases"])
    for found in pool.results():
        compare(found, wanted, config.layers)
