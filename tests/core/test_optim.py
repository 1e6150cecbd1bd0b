"""AdamW on shards: what torch's AdamW computes, with state whole or cut over data."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.nn.layer import specs_of
from fourfold.optim import AdamW, LearningRateSchedule
from fourfold.params import local_of
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy
from harness import grid_of, join_shards
from share import share

CONFIG = ff.models.config("gpt-tiny", layers=1, vocab=53, qk_norm=True)
STEPS = 4


def whole_batch(step: int) -> torch.Tensor:
    return torch.arange(step, step + 64).view(4, 16) % 53


def train(shape: Shape, policy: Policy, accumulated: bool) -> dict[str, Any]:
    grid = grid_of(shape)
    model = ff.models.build(CONFIG, grid, policy=policy, dtype=torch.float64)
    optimizer = AdamW(model, lr=1e-3, weight_decay=0.3)
    norms = []
    for step in range(STEPS):
        with grid.ledger.watch() as records:
            tokens = ff.local_rows(whole_batch(step), grid)
            if accumulated:
                count = ff.count_targets(tokens, grid)
                half = tokens.shape[1] // 2  # of the sequence: two micro-steps of other data than one
                with ff.accumulate(model):
                    model(tokens[:, :half], tokens[:, :half], count=count).backward()
                model(tokens[:, half:], tokens[:, half:], count=count).backward()
            else:
                model(tokens, tokens).backward()
            norms.append(ff.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
        optimizer.zero_grad()
    specs = specs_of(model)
    return {
        "parameters": {
            name: join_shards(local_of(parameter).detach(), specs[name], grid)
            for name, parameter in model.named_parameters()
        },
        "norms": norms,
        "state": sum(state["exp_avg"].numel() for state in optimizer.state.values()),
        "held": sum(local_of(parameter).numel() for parameter in model.parameters()),
        "records": records,
    }


def test_state_that_is_made_early_is_what_the_first_step_makes() -> None:
    states = []
    for early in (True, False):
        model = ff.models.build(CONFIG, Grid.alone("cpu"), dtype=torch.float64)
        optimizer = AdamW(model, lr=1e-3)
        assert not optimizer.state
        if early:
            optimizer.make_state()
            assert len(optimizer.state) == len(list(model.parameters()))
        model(whole_batch(0), whole_batch(0)).backward()
        optimizer.step()
        before = [tensor.data_ptr() for state in optimizer.state.values() for tensor in state.values()]
        optimizer.make_state()  # changes nothing that exists
        assert [tensor.data_ptr() for state in optimizer.state.values() for tensor in state.values()] == before
        states.append([optimizer.state[part] for part in optimizer.parts.values()])
    torch.testing.assert_close(*states, rtol=0, atol=0)


def by_torch() -> dict[str, torch.Tensor]:
    model = ff.models.build(CONFIG, Grid.alone("cpu"), dtype=torch.float64)
    named = {name: torch.nn.Parameter(local_of(p).detach()) for name, p in model.named_parameters()}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    for step in range(STEPS):
        model(whole_batch(step), whole_batch(step)).backward()
        ff.clip_grad_norm_(model.parameters(), 0.5)
        for name, parameter in model.named_parameters():
            named[name].grad = local_of(parameter.grad)
        optimizer.step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in named.items()}


@pytest.mark.slow
@pytest.mark.parametrize("shape", share([Shape(z=2, data=2), Shape(x=2, data=2), Shape(data=4)], 2), ids=str)
def test_sharded_state_gives_the_same_parameters(ranks, shape: Shape) -> None:
    expected = by_torch()
    whole = ranks(4).run(train, shape, Policy(), False)
    policy = Policy(shard_optimizer=True, bucket_bytes=10_000)
    cut = ranks(4).run(train, shape, policy, False)
    for rank, (a, b) in enumerate(zip(whole, cut, strict=True)):
        for name, parameter in expected.items():
            torch.testing.assert_close(a["parameters"][name], parameter, rtol=0, atol=1e-12)
            torch.testing.assert_close(b["parameters"][name], parameter, rtol=0, atol=1e-12)
        assert a["norms"] == pytest.approx(b["norms"], rel=1e-12)
        assert a["state"] == a["held"]
        assert b["state"] <= b["held"] / shape.data + 40  # an uneven row or two of each vector
        sizes = LocalSizes(CONFIG, shape, policy, 4 // shape.places, seq=16, dtype=torch.float64, rank=rank)
        predicted = Counter(step_program(sizes).records)
        assert Counter(b["records"]) == predicted


@pytest.mark.slow
def test_accumulated_gradients_are_scattered_once(ranks) -> None:
    shape = Shape(x=2, data=2)
    whole = ranks(4).run(train, shape, Policy(), True)
    cut = ranks(4).run(train, shape, Policy(shard_optimizer=True), True)
    for a, b in zip(whole, cut, strict=True):
        for name, parameter in a["parameters"].items():
            torch.testing.assert_close(b["parameters"][name], parameter, rtol=0, atol=1e-12)
        scattered = [record for record in b["records"] if (record.op, record.axis) == ("reduce_scatter", "data")]
        assert len(scattered) == len({record.label for record in scattered}) > 0


def test_a_closure_computes_the_gradients_that_are_stepped() -> None:
    model = ff.models.build(CONFIG, Grid.alone("cpu"))
    optimizer = AdamW(model, lr=1e-2)
    before = local_of(model.norm.weight).detach().clone()
    tokens = whole_batch(0)

    def closure() -> torch.Tensor:
        loss = model(tokens, tokens)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert (local_of(model.norm.weight) - before).abs().max() > 1e-3
    model.double()
    with pytest.raises(RuntimeError, match="has moved since"):
        optimizer.step(closure)


def test_parameters_instead_of_the_model_are_refused() -> None:
    model = ff.models.build(CONFIG, Grid.alone("cpu"))
    with pytest.raises(TypeError, match=r"AdamW takes the model itself, not its parameters: generator was given"):
        AdamW(model.parameters(), lr=1e-3)  # type: ignore[arg-type]


def test_schedules_by_hand() -> None:
    cosine = LearningRateSchedule(learning_rate=1.0, steps=110, warmup=10, floor=0.1)
    assert LearningRateSchedule(learning_rate=1.0, steps=10).at(0) == 1.0
    assert [cosine.at(step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert cosine.at(60) == pytest.approx(0.1 + 0.9 / 2)  # half way down
    assert cosine.at(110) == pytest.approx(0.1)
    stable = LearningRateSchedule(learning_rate=2.0, steps=100, warmup=4, shape="stable", decay=0.2, floor=0.0)
    assert [stable.at(step) for step in (2, 4, 80, 90, 100)] == pytest.approx([1.0, 2.0, 2.0, 1.0, 0.0])
    assert LearningRateSchedule(learning_rate=1.0, steps=10, shape="constant").at(7) == 1.0
    scaled = LearningRateSchedule(learning_rate=1e-3, steps=10, batch=512, base_batch=256)
    assert scaled.at(1) <= scaled.peak == pytest.approx(2e-3)


def test_schedules_refuse_what_makes_no_sense() -> None:
    for wrong in ({"warmup": 11}, {"shape": "cosin"}, {"decay": 0.0}, {"floor": 1.5}, {"batch": 4}):
        with pytest.raises(ValueError, match=r"must|none of|needs"):
            LearningRateSchedule(learning_rate=1.0, steps=10, **wrong)
