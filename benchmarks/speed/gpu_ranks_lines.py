"""What `gpu_ranks.py` compares, fixed before anything is measured: workloads, groups of ranks, and their lines.

A group is a number of ranks and a workload; all lines of a group are measured side by side. Fourfold runs on every grid
of four ranks and on four named grids of eight; each peer runs on its own grid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

import fourfold as ff
from benchmarks.shared.workloads import Line, Workload
from fourfold.shape import shapes_of

DEFAULT = ""
REGATHER = "regather"
REPLICATED = "replicated"
MEGATRON = "Megatron's generalised TP"
OFF = "off"
MECHANISMS = ("+prefetch", "+defer", "+wgrad_behind_messages", "+halves", "+reduce_early")


BASE = ff.Policy(keep_gathered=True)
"""Keeps gathered inputs for backward, as torch's TP does. `regather` lines gather them again instead."""


def _llama(layers: int, hidden: int, mlp_hidden: int) -> ff.models.ModelConfig:
    heads = hidden // 128
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=128, mlp_hidden=mlp_hidden)
    return ff.models.config("llama-3-8b", **sizes, vocab=32000, seq=2048)


WORKLOADS = {
    # 1.1 B parameters, communication dominates
    "deep": Workload("deep", _llama(4, 4096, 11008), 8, torch.bfloat16),
    # 2.1 B parameters, computation and communication are comparable
    "wide": Workload("wide", _llama(2, 8192, 22016), 16, torch.bfloat16),
    # a smoke test for gloo ranks on the CPU
    "tiny": Workload("tiny", ff.models.config("llama-tiny", kv_heads=24, vocab=256, seq=16), 8, torch.float32),
}

GRIDS_OF_EIGHT = (ff.Shape(z=8), ff.Shape(x=8), ff.Shape(x=2, z=4), ff.Shape(x=2, y=2, z=2))


def lines_of(world: int, *, compiled: bool = False) -> list[Line]:
    """Return every line of a group with this many ranks."""
    if world not in (4, 8):
        raise ValueError(f"a group has 4 or 8 ranks, not {world}")
    found = [*_peers(world), *_fourfold(world), *_mechanisms(world)]
    return [replace(line, policy=replace(line.policy, compile=compiled)) for line in found]


def _peers(world: int) -> Iterator[Line]:
    yield Line("FSDP2", ff.Shape(z=world))
    yield Line("FSDP2 explicit prefetch", ff.Shape(z=world))
    yield Line("TP", ff.Shape(x=world))
    yield Line("FSDP2 x TP", ff.Shape(x=2, z=world // 2))


def _fourfold(world: int) -> Iterator[Line]:
    """Yield the default line on every grid; the published algorithm where it differs, which takes x or y; and, on the
    grids of torch's TP, a line that regathers inputs: less memory, more messages."""
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
    """Yield lines that add the overlap mechanisms one by one where they have an effect, and Megatron's choice."""
    four = [ff.Shape(x=2, z=2), ff.Shape(x=2, data=2), ff.Shape(z=4), ff.Shape(z=2, data=2)]
    shapes = four if world == 4 else [ff.Shape(x=2, z=4)]
    for shape in shapes:
        overlap = ff.Overlap.off()
        yield Line("fourfold", shape, OFF, replace(BASE, overlap=overlap))
        for name in MECHANISMS:
            field = name.removeprefix("+")
            overlap = replace(overlap, **{field: 2 if field == "halves" else True})
            if _has_effect(field, shape):
                yield Line("fourfold", shape, name, replace(BASE, overlap=overlap))
        if shape.x * shape.z > shape.x > 1:
            # weights sharded over TP and z, one weight prefetched, reduce-scatters deferred
            overlap = ff.Overlap(
                prefetch=True, bytes_in_flight=1, defer=True, wgrad_behind_messages=False, halves=1, reduce_early=False
            )
            yield Line("fourfold", shape, MEGATRON, replace(BASE, overlap=overlap))


def _has_effect(mechanism: str, shape: ff.Shape) -> bool:
    if mechanism in ("prefetch", "defer"):
        return shape.z > 1
    if mechanism == "reduce_early":
        return shape.data > 1
    return shape.x * shape.y > 1
