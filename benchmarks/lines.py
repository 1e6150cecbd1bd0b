"""What is compared, fixed before anything is measured: sizes, groups of ranks, and the lines of each.

A group is a number of ranks and a size; all its lines are measured side by side. Fourfold stands on every grid of four
ranks and on four named grids of eight, its peers on their own grids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

import fourfold as ff
from fourfold.grid import shapes_of
from sides import Line, Size

DEFAULT = ""
REGATHER = "regather"
REPLICATED = "replicated"
MEGATRON = "Megatron's generalised TP"
OFF = "off"
MECHANISMS = ("+prefetch", "+defer", "+behind_products", "+halves", "+data")


BASE = ff.Policy(keep_gathered=True)
"""Gathered inputs are kept for backward, as torch's TP keeps them; `regather` lines gather them again instead."""


def _llama(layers: int, hidden: int, mlp_hidden: int) -> ff.models.ModelConfig:
    heads = hidden // 128
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=128, mlp_hidden=mlp_hidden)
    return ff.models.config("llama-3-8b", **sizes, vocab=32000, seq=2048)


SIZES = {
    # 1.1 B parameters, communication dominates
    "deep": Size("deep", _llama(4, 4096, 11008), 8, torch.bfloat16),
    # 2.1 B parameters, computation and communication are comparable
    "wide": Size("wide", _llama(2, 8192, 22016), 16, torch.bfloat16),
    # a smoke test for gloo ranks on the CPU
    "tiny": Size("tiny", ff.models.config("llama-tiny", kv_heads=24, vocab=256, seq=16), 8, torch.float32),
}

GRIDS_OF_EIGHT = (ff.Shape(z=8), ff.Shape(x=8), ff.Shape(x=2, z=4), ff.Shape(x=2, y=2, z=2))


def lines_of(world: int, *, compiled: bool = False) -> list[Line]:
    """Every line of a group of that many ranks."""
    if world not in (4, 8):
        raise ValueError(f"groups have 4 or 8 ranks, not {world}")
    found = [*_peers(world), *_fourfold(world), *_mechanisms(world)]
    return [replace(line, policy=replace(line.policy, compile=compiled)) for line in found]


def _peers(world: int) -> Iterator[Line]:
    yield Line("FSDP2", ff.Shape(z=world))
    yield Line("FSDP2 explicit prefetch", ff.Shape(z=world))
    yield Line("TP", ff.Shape(x=world))
    yield Line("FSDP2 x TP", ff.Shape(x=2, z=world // 2))


def _fourfold(world: int) -> Iterator[Line]:
    """Ours; the published algorithm, which is the same as ours where neither x nor y cuts anything; and, where
    torch's TP stands too, with less memory and more messages."""
    shapes = list(shapes_of(4)) if world == 4 else GRIDS_OF_EIGHT
    for shape in shapes:
        yield Line("fourfold", shape, DEFAULT, BASE, bounded=True)
    for shape in shapes:
        if shape.x * shape.y > 1:
            policy = replace(BASE, activations="replicated", overlap=ff.Overlap(halves=1))
            yield Line("fourfold", shape, REPLICATED, policy)
    for shape in (ff.Shape(x=world), ff.Shape(x=2, z=world // 2)):
        yield Line("fourfold", shape, REGATHER, replace(BASE, keep_gathered=False))


def _mechanisms(world: int) -> Iterator[Line]:
    """Each mechanism on top of the ones before it, where it has something to do; and Megatron's choice of them."""
    two = [ff.Shape(x=2, z=2), ff.Shape(x=2, data=2), ff.Shape(z=4), ff.Shape(z=2, data=2)]
    shapes = two if world == 4 else [ff.Shape(x=2, z=4)]
    for shape in shapes:
        overlap = ff.Overlap.off()
        yield Line("fourfold", shape, OFF, replace(BASE, overlap=overlap))
        for name in MECHANISMS:
            field = name.removeprefix("+")
            overlap = replace(overlap, **{field: 2 if field == "halves" else True})
            if _acts(field, shape):
                yield Line("fourfold", shape, name, replace(BASE, overlap=overlap))
        if shape.x * shape.z > shape.x > 1:
            # stored 1/(TP*Z), one weight gathered ahead, deferred reduce-scatter
            ahead = ff.Overlap(
                prefetch=True, bytes_in_flight=1, defer=True, behind_products=False, halves=1, data=False
            )
            yield Line("fourfold", shape, MEGATRON, replace(BASE, overlap=ahead))


def _acts(mechanism: str, shape: ff.Shape) -> bool:
    if mechanism in ("prefetch", "defer"):
        return shape.z > 1
    if mechanism == "data":
        return shape.data > 1
    return shape.x * shape.y > 1
