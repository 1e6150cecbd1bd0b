"""FLOPs of a training step, and what a device could do.

A product of m tokens with p weights is 2 m p FLOPs; backward is two such products. Causal attention reads half of
the scores: forward 2 * 2 * seq/2 * heads * head_dim a token and layer, backward twice that. Embedding lookups,
norms and activations are not counted.

    model FLOPs      forward + backward, each product once: what MFU counts
    hardware FLOPs   the same plus the products that recompute runs again: what HFU counts

Neither counts the scores that a fused attention kernel computes again inside its own backward.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.models.config import ModelConfig
from fourfold.policy import Recompute

PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bf16 FLOP/s by torch's name of the device, from the vendor's data sheets."""


@dataclass(frozen=True, slots=True)
class Flops:
    """Per token of a training step."""

    model: float
    hardware: float


def flops_per_token(config: ModelConfig, seq: int, recompute: Recompute = "none") -> Flops:
    """What one token of a sequence of `seq` costs in forward and backward."""
    attention = 2 * seq * config.heads * config.head_dim  # scores and their use, half of each
    block = 2 * _block_weights(config) + attention
    model = 3 * (config.layers * block + 2 * config.vocab * config.hidden)
    again = {"none": 0, "attention": attention, "block": block}[recompute]
    return Flops(model, model + config.layers * again)


def _block_weights(config: ModelConfig) -> int:
    """Matrix weights of one block."""
    attention = config.hidden * config.head_dim * 2 * (config.heads + config.kv_heads)
    return attention + config.hidden * config.mlp_hidden * (3 if config.mlp == "swiglu" else 2)
