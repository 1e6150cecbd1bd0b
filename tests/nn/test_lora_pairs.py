"""LoRA of the reference models: every grid trains the pairs of one process, and the weights stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.nn.layer import specs_of
from fourfold.nn.lora import LoraConfig, is_lora
from fourfold.params import local_of
from fourfold.policy import Overlap, Policy
from harness import grid_of, join_shards

SIZES = dict(layers=2, hidden=16, heads=4, kv_heads=4, head_dim=4, mlp_hidden=32, vocab=53, seq=16)
GPT = ff.models.config("gpt-tiny", **SIZES)
LLAMA = ff.models.config("llama-tiny", **{**SIZES, "kv_heads": 2})
LORA = LoraConfig(rank=3, alpha=6.0)
STEPS = 3


def trained(shape: Shape, config: ff.models.ModelConfig, policy: Policy, lora: LoraConfig) -> dict[str, Any]:
    """A job: the losses of a few steps, the parameters before and after, and how many numbers AdamW keeps."""
    grid = Grid.alone("cpu") if shape.world == 1 else grid_of(shape)
    model = ff.models.build(config, grid, policy=policy, dtype=torch.float64, lora=lora)
    with torch.no_grad():  # a B of 0 would hide a wrong gradient of A in the first step
        for name, parameter in model.named_parameters():
            if name.endswith(".lora.b"):
                local_of(parameter).fill_(0.02)
    specs = specs_of(model)

    def whole() -> dict[str, Tensor]:
        return {
            name: join_shards(local_of(parameter).detach(), specs[name], grid).clone()
            for name, parameter in model.named_parameters()
        }

    before, losses = whole(), []
    optimizer = ff.optim.AdamW(model, lr=1e-2)
    for step in range(STEPS):
        tokens = ff.local_rows((torch.arange(step, step + 60).view(4, 15) * 7) % 53, grid)
        model.clock.begin_step(step)
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "before": before, "after": whole(), "state": len(optimizer.state)}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return {name: trained(Shape(), config, Policy(), LORA) for name, config in (("gpt", GPT), ("llama", LLAMA))}


CASES = [
    ("gpt", Shape(x=2, y=2), Policy()),
    ("gpt", Shape(x=2, y=2), Policy(activations="replicated")),
    ("gpt", Shape(y=2, z=2), Policy(recompute="block", overlap=Overlap(halves=2))),
    ("llama", Shape(x=2, z=2), Policy()),
    ("llama", Shape(z=2, data=2), Policy(shard_optimizer=True)),
]


@pytest.mark.parametrize(
    ("name", "shape", "policy"),
    [pytest.param(*case, marks=[pytest.mark.slow] if at else []) for at, case in enumerate(CASES)],
    ids=[f"{name} {shape}" for name, shape, _ in CASES],
)
def test_pairs_are_trained_as_by_one_process(ranks, alone, name: str, shape: Shape, policy: Policy) -> None:
    expected = alone[name]
    for found in ranks(4).run(trained, shape, GPT if name == "gpt" else LLAMA, policy, LORA):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for parameter, value in expected["after"].items():
            torch.testing.assert_close(found["after"][parameter], value, rtol=0, atol=1e-8)


def test_only_the_pairs_are_trained(alone) -> None:
    before, after = alone["gpt"]["before"], alone["gpt"]["after"]
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if is_lora(name)}
    assert alone["gpt"]["state"] == len(changed) == 2 * 2 * 6  # A and B of q, k, v, out, up and down in two blocks


def test_a_pair_adds_its_product_and_new_pairs_add_nothing() -> None:
    grid, tokens = Grid.alone("cpu"), torch.arange(30).view(2, 15)
    plain = ff.models.build(GPT, grid, dtype=torch.float64)
    model = ff.models.build(GPT, grid, dtype=torch.float64, lora=LORA)
    assert torch.equal(model(tokens), plain(tokens))
    layer = model.layers[1].mlp.down
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        a, b = (local_of(each) for each in (layer.lora.a, layer.lora.b))
        b.copy_(torch.randn(b.shape, generator=generator, dtype=b.dtype))
        merged = local_of(plain.layers[1].mlp.down.weight)
        merged += 2.0 * b @ a
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-12)
    assert functional.mse_loss(model(tokens), ff.models.build(GPT, grid, dtype=torch.float64)(tokens)) > 1e-6


def test_dropout_is_drawn_in_training_alone() -> None:
    model = ff.models.build(GPT, Grid.alone("cpu"), lora=LoraConfig(rank=2, dropout=0.5, targets=("q", "down")))
    assert {name.rpartition(".lora.")[0].rpartition(".")[2] for name in specs_of(model) if is_lora(name)} == {
        "q",
        "down",
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".lora.b"):
                local_of(parameter).fill_(0.1)
    tokens = torch.arange(30).view(2, 15)
    model.clock.begin_step(1)
    first, second = (model(tokens, tokens).item() for _ in range(2))
    assert first != second
    model.eval()
    first, second = (model(tokens, tokens).item() for _ in range(2))
    assert first == second


def refused(shape: Shape, targets: tuple[str, ...]) -> str:
    """A job: the error of a model that cannot have these pairs."""
    with pytest.raises(ValueError) as caught:
        ff.models.build(LLAMA, grid_of(shape), lora=LoraConfig(rank=2, targets=targets))
    ff.models.build(LLAMA, grid_of(shape), lora=LoraConfig(rank=2, targets=("q", "out")))
    return str(caught.value)


def test_pairs_that_cannot_be_are_refused(ranks) -> None:
    assert "cuts through the 2 key and value heads" in ranks(4).run(refused, Shape(x=2, y=2), ("q", "v"))[0]
    said = ranks(4).run(refused, Shape(x=2, y=2), ("gates",))[0]
    assert said == "there is no layer 'gates' (did you mean 'gate'?); a block has q, k, v, out, gate, up, down"
    with pytest.raises(ValueError, match="rank=0 must be at least 1"):
        LoraConfig(rank=0)
