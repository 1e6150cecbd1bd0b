"""Recompute: bitwise the same results, fewer bytes kept, and the collectives that run again are predicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import fourfold as ff
from closed_form import APART, ClosedForm
from fourfold.grid import Shape
from fourfold.params import local_of
from fourfold.policy import Policy
from harness import grid_of
from share import others_slow

CONFIG = ff.models.config("llama-tiny", layers=2, qk_norm=True, vocab=53)
KINDS = ("none", "attention", "block")


def train(shape: Shape, policy: Policy, config: ff.models.ModelConfig) -> dict[str, Any]:
    """Two forwards before one backward, so that backward comes at a later moment than the first forward."""
    grid = grid_of(shape)
    model = ff.models.build(config, grid, policy=policy)
    tokens = ff.local_rows(torch.arange(64).view(4, 16) % 53, grid)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        first = model(tokens, tokens)
    kept_bytes = sum(kept.values())
    second = model(tokens, tokens)
    with grid.ledger.watch() as records:
        (first + second).backward()
    return {
        "losses": (first.item(), second.item()),
        "gradients": [local_of(parameter.grad) for parameter in model.parameters()],
        "kept": kept_bytes,
        "backward": records,
    }


@pytest.mark.parametrize(
    ("shape", "dropout"), [pytest.param(Shape(x=2, z=2), 0.0, marks=pytest.mark.slow), (Shape(x=2, y=2), 0.3)], ids=str
)
def test_recompute_is_bitwise_equal_and_keeps_less(ranks, shape: Shape, dropout: float) -> None:
    mode = "sharded" if dropout else "replicated"
    config = replace(CONFIG, dropout=dropout)
    found = {kind: ranks(4).run(train, shape, Policy(mode, recompute=kind), config) for kind in KINDS}
    for rank in range(4):
        none, attention, block = (found[kind][rank] for kind in KINDS)
        for other in (attention, block):
            assert other["losses"] == none["losses"]
            pairs = zip(other["gradients"], none["gradients"], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
        if dropout:
            assert none["losses"][0] != none["losses"][1]
        assert block["kept"] < attention["kept"] < none["kept"]


POLICIES = [
    Policy(overlap=APART),
    Policy("replicated", overlap=APART),
    Policy(keep_weights=True, keep_gathered=True, overlap=APART),
]


@pytest.mark.parametrize("policy", others_slow(POLICIES, 3))
def test_what_runs_again_is_predicted(ranks, policy: Policy) -> None:
    """The full product of options is in `make soak`."""
    for dropout, kind in ((0.0, "attention"), (0.3, "block")):
        config, chosen = replace(CONFIG, dropout=dropout), replace(policy, recompute=kind)
        for rank, found in enumerate(ranks(4).run(train, Shape(x=2, z=2), chosen, config)):
            volume = ClosedForm(config, Shape(x=2, z=2), chosen, rows=2, seq=16, rank=rank)
            whole, forward = Counter(volume.training_step()), Counter(forward_of(volume))
            # two backward passes in one: gradients travel once, everything else twice
            gradients = Counter(volume.gradients())
            expected = whole - forward - gradients
            assert Counter(found["backward"]) == expected + expected + gradients


def forward_of(volume: ClosedForm) -> list:
    """What forward alone communicates, which recompute does not change."""
    records = [record for index in range(volume.config.layers) for record in volume.layer_forward(index)]
    records += [*volume.norm_forward("norm"), *volume.loss_statistics(), *volume.loss(counted=False)]
    records += [*volume.enter("head"), *volume.spread(volume.vocab_columns, "head"), *volume.leave("embedding")]
    for label in ("embedding", "head"):
        records += volume.weights("all_gather", [(volume.vocab_rows, volume.k)], [], label)
    return records


@pytest.mark.parametrize("kind", ["attention", "block"])
def test_a_graph_that_is_retained_is_recomputed_in_every_backward_pass(kind: str) -> None:
    config, tokens = replace(CONFIG, dropout=0.3), torch.arange(32).view(2, 16)
    found = []
    for recompute in ("none", kind):
        model = ff.models.build(config, ff.Grid.alone("cpu"), policy=Policy(recompute=recompute))
        loss = model(tokens, tokens)
        loss.backward(retain_graph=True)
        model(tokens, tokens)  # draws other masks
        loss.backward()
        found.append([local_of(parameter.grad) for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_hooks_on_saved_tensors_see_the_inputs_of_attention_that_is_recomputed() -> None:
    """Otherwise `save_on_cpu` would leave them on the device."""
    model = ff.models.build(CONFIG, ff.Grid.alone("cpu"), policy=Policy(recompute="attention"))
    tokens, kept = torch.arange(32).view(2, 16), {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens)
    columns = (CONFIG.heads + 2 * CONFIG.kv_heads) * CONFIG.head_dim  # of q, k and v, which lie side by side
    sizes = [tensor.untyped_storage().nbytes() for tensor in kept.values()]
    assert sizes.count(tokens.numel() * columns * 4) == CONFIG.layers
