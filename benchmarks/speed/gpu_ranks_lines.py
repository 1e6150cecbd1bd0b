"""What `gpu_ranks.py` compares, fixed before anything is measured: workloads, groups of ranks, and their lines.

A group is a number of ranks and a workload; all lines of a group are measured side by side. Every peer stands on each
grid that it can use, and Fourfold on all of these grids. `every` adds Fourfold's other grids, and the lines that show
what each mechanism gains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

import fourfold as ff
from benchmarks.shared.decoder import piece_costs
from benchmarks.shared.pipelines import INTERLEAVED, PIPELINE, stages_of
from benchmarks.shared.workloads import Line, Mode, Workload
from fourfold.shape import shapes_of

DEFAULT = ""
KEPT = "kept weights"
REGATHER = "regather"
CUT = "cut row"
REPLICATED = "replicated"
MEGATRON = "Megatron's generalised TP"
OFF = "off"
MECHANISMS = ("+prefetch", "+defer", "+wgrad_behind_messages", "+halves", "+reduce_early")
SCHEDULES = ("1f1b", "zb-h1", "found")
"""The schedules of Fourfold's pipelines, with one stage per rank."""
MODES: tuple[Mode, ...] = ("eager", "compiled", "captured", "captured compiled")
PEER_MODES: tuple[Mode, ...] = ("eager", "compiled")
"""The peers have no captured step: neither FSDP2 nor DTensor nor the pipelines support one. Nor has our pipeline."""


BASE = ff.Policy(keep_gathered=True, even_tokens=True)
"""Keeps gathered inputs for backward, as torch's TP does. `regather` lines gather them again instead, and lines with
kept weights also keep the weights that were gathered over z, as FSDP2 does without resharding."""


def _llama(layers: int, hidden: int, mlp_hidden: int) -> ff.models.ModelConfig:
    heads = hidden // 128
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=128, mlp_hidden=mlp_hidden)
    return ff.models.config("llama-3-8b", **sizes, vocab=32000, seq=2048)


WORKLOADS = {
    # 1.1 B parameters, communication dominates
    "deep": Workload("deep", _llama(4, 4096, 11008), 8, torch.bfloat16),
    # 2.1 B parameters, computation and communication are comparable
    "wide": Workload("wide", _llama(2, 8192, 22016), 16, torch.bfloat16),
    # a single row
    "long": Workload("long", replace(_llama(2, 4096, 11008), seq=16384), 1, torch.bfloat16),
    # small kernels and small messages: the host decides
    "gpt-125m": Workload("gpt-125m", ff.models.config("gpt-125m"), 8, torch.bfloat16),
    # smoke tests for gloo ranks on the CPU; the vocabulary of the second divides by nothing, and its head is tied
    "tiny": Workload("tiny", ff.models.config("llama-tiny", kv_heads=24, vocab=256, seq=16), 8, torch.float32),
    "tiny-gpt": Workload("tiny-gpt", ff.models.config("gpt-tiny", layers=4, vocab=257, seq=16), 8, torch.float32),
}
STEPS = {"gpt-125m": 5}
"""Steps of a turn, by size, where one step is too short to be timed."""


def lines_of(world: int, workload: Workload, modes: Sequence[Mode] = ("eager",), *, every: bool = False) -> list[Line]:
    """Return the lines of a group with this many ranks."""
    if world not in (4, 8):
        raise ValueError(f"a group has 4 or 8 ranks, not {world}")
    found = []
    for mode in modes:
        if mode in PEER_MODES:
            found += [replace(line, mode=mode) for line in (*_peers(world), *_pipelines(world))]
        found += [_in_mode(line, mode) for line in (*_fourfold(world), *_cut_rows(world, workload.rows))]
        if mode in PEER_MODES:
            found += [_in_mode(line, mode) for line in _fourfold_pipelines(world)]
    if every:
        found += [*_other_grids(world), *_mechanisms(world)]
    return [line for line in found if _fits(line, workload)]


def _in_mode(line: Line, mode: Mode) -> Line:
    line = replace(line, mode=mode)
    return replace(line, policy=replace(line.policy, compile=line.compiled))


def _fits(line: Line, workload: Workload) -> bool:
    """Return whether the model and the batch can be cut over the line's grid, for Fourfold and for the peers."""
    if line.pipe > 1:
        rows = line.shape.data * line.micro_batches
        return workload.rows % rows == 0 and stages_of(line) <= len(piece_costs(workload.config))
    parts = line.shape.z * line.shape.data * line.micro_batches
    layers = workload.config.layers >= line.shape.pipe
    return layers and workload.config.misfit(line.shape, line.policy) is None and workload.rows % parts == 0


def _peers(world: int) -> Iterator[Line]:
    half = world // 2
    yield Line("DDP", ff.Shape(data=world))
    yield Line("FSDP2", ff.Shape(z=world))
    yield Line("FSDP2", ff.Shape(z=world), reshard=False)
    yield Line("FSDP2 explicit prefetch", ff.Shape(z=world))
    yield Line("HSDP", ff.Shape(z=half, data=2))
    yield Line("HSDP", ff.Shape(z=half, data=2), reshard=False)
    yield Line("TP", ff.Shape(x=world))
    yield Line("FSDP2 x TP", ff.Shape(x=2, z=half))
    yield Line("FSDP2 x TP", ff.Shape(x=2, z=half), reshard=False)
    yield Line("DDP x TP", ff.Shape(x=2, data=half))
    yield Line("HSDP x TP", ff.Shape(x=2, data=half), reshard=False)  # on one shard there is nothing to reshard
    if world == 8:
        yield Line("HSDP x TP", ff.Shape(x=2, z=2, data=2))
        yield Line("HSDP x TP", ff.Shape(x=2, z=2, data=2), reshard=False)


def _pipelines(world: int) -> Iterator[Line]:
    """Yield the pipelines over all ranks, and over half of them with two replicas of each stage, with every number of
    micro-batches that 1F1B can use; 1F1B needs as many as it has stages."""
    for replicas in (1, 2):
        ranks = world // replicas
        for factor in (1, 2, 4):
            for kind in (PIPELINE, INTERLEAVED):
                yield Line(kind, ff.Shape(data=replicas), pipe=ranks, micro_batches=factor * ranks)


def _fourfold_pipelines(world: int) -> Iterator[Line]:
    """Yield Fourfold's pipelines over all ranks, with the micro-batches of torch's."""
    for factor in (1, 2, 4):
        for schedule in SCHEDULES:
            policy = replace(BASE, schedule=schedule)
            yield Line("fourfold", ff.Shape(pipe=world), schedule, policy, micro_batches=factor * world)


def _fourfold(world: int) -> Iterator[Line]:
    """Yield the default line on every grid of a peer, and beside FSDP2 without resharding a line that keeps weights."""
    for shape in dict.fromkeys(line.shape for line in _peers(world)):
        yield Line("fourfold", shape, DEFAULT, BASE, bounded=True)
        if shape.z > 1:
            yield Line("fourfold", shape, KEPT, replace(BASE, keep_weights=True), bounded=True)


def _cut_rows(world: int, rows: int) -> Iterator[Line]:
    """Yield lines that cut the only row of a place into halves, where x sends messages for them to hide."""
    for shape in dict.fromkeys(line.shape for line in _peers(world)):
        if shape.x > 1 and shape.z * shape.data == rows:
            yield Line("fourfold", shape, CUT, replace(BASE, overlap=ff.Overlap(halves=2)))


def _other_grids(world: int) -> Iterator[Line]:
    """Yield the default line on the other grids of four ranks, or with all three axes on eight; the published algorithm
    where it differs, which takes x or y; and, on the grids of torch's TP, a line that regathers inputs: less memory,
    more messages."""
    theirs = [line.shape for line in _fourfold(world)]
    others = list(shapes_of(4)) if world == 4 else [ff.Shape(x=2, y=2, z=2)]
    for shape in others:
        if shape not in theirs:
            yield Line("fourfold", shape, DEFAULT, BASE, bounded=True)
    for shape in dict.fromkeys((*theirs, *others)):
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
