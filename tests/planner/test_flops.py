"""FLOPs of a training step: by hand, and against what torch counts on a plain model."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import fourfold as ff
from benchmarks.speed.plain_models import Transformer
from fourfold.planner.step_program import Flops, flops_per_token


def test_by_hand() -> None:
    """Products of one token, at seq 128.

    gpt-tiny: 2 layers; q, k, v, out 4 * 48 * 48 = 9,216 weights, up and down 2 * 48 * 192 = 18,432; the head 257 * 48.
    llama-tiny: q and out 2 * 48 * 48 = 4,608, k and v 2 * 48 * 8 = 768, gate, up, down 3 * 48 * 96 = 13,824.
    Attention: 64 of 128 keys on average, 48 multiplications each for scores and for their use: 4 * 64 * 48 = 12,288.
    """
    gpt, llama = ff.models.config("gpt-tiny"), ff.models.config("llama-tiny")
    forward = 2 * (2 * 27_648 + 12_288) + 2 * 12_336
    assert forward == 159_840
    assert flops_per_token(gpt, 128) == Flops(479_520, 479_520)
    assert flops_per_token(llama, 128).model == 3 * (2 * (2 * 19_200 + 12_288) + 24_672) == 378_144
    assert flops_per_token(gpt, 256).model - flops_per_token(gpt, 128).model == 3 * 2 * 12_288


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "llama-3-8b"])
def test_recompute_adds_the_forward_of_what_is_forgotten(name: str) -> None:
    config = ff.models.config(name)
    none, attention, block = (
        flops_per_token(config, 64, ff.Policy(recompute=kind)) for kind in ("none", "attention", "block")
    )
    assert none.hardware == none.model == attention.model == block.model
    head = 2 * config.vocab * config.hidden
    assert block.hardware - none.hardware == none.model / 3 - head
    # what grows with the sequence is attention: its forward is a third of the growth
    assert attention.hardware - none.hardware == (flops_per_token(config, 128).model - none.model) / 3


WIDE = dict(heads=6, kv_heads=2, head_dim=16)  # heads * head_dim is not hidden


@pytest.mark.parametrize(("name", "changes"), [("gpt-tiny", {}), ("llama-tiny", {}), ("llama-tiny", WIDE)], ids=str)
def test_equals_what_torch_counts(name: str, changes: dict[str, int]) -> None:
    """torch counts every score, also those that the causal mask drops: twice our attention. Composed from plain
    products (MATH), for a fused kernel's backward computes scores again, which neither MFU nor HFU counts."""
    config = ff.models.config(name, **changes)
    rows, seq = 3, 32
    model, tokens = Transformer(config), torch.zeros(rows, seq, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    masked = 3 * config.layers * 2 * seq * config.heads * config.head_dim
    assert counter.get_total_flops() == rows * seq * (flops_per_token(config, seq).model + masked)


def test_of_experts_only_those_count_that_a_token_goes_through() -> None:
    """moe-tiny at seq 128, with a first block that has an MLP: attention as llama-tiny; K experts and an MLP beside."""
    config = ff.models.config("moe-tiny", layers=3, dense_layers=1, shared_hidden=24)
    attention, mlp = 4_608 + 768 + 12_288 / 2, 13_824
    mixture = 8 * 48 + 2 * 3 * 48 * 48 + 3 * 48 * 24  # the router, two experts, the MLP beside them
    forward = 2 * (3 * attention + mlp + 2 * mixture + 12_336)
    assert flops_per_token(config, 128).model == 3 * forward
    many = ff.models.config("moe-tiny", experts=16)
    added = 6 * 2 * 8 * 48  # in the routers of two blocks
    assert flops_per_token(many, 128).model - flops_per_token(ff.models.config("moe-tiny"), 128).model == added
