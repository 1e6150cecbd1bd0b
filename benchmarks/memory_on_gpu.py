"""Predicted peak memory beside the measured one: real steps on several ranks that share one GPU, or on the CPU.

    python benchmarks/memory_on_gpu.py                     # four NCCL ranks on one GPU
    python benchmarks/memory_on_gpu.py --device cpu        # a tiny size on gloo ranks, a smoke test

Each line builds a model on its grid and takes steps: forward, backward, AdamW. Measured is the most that torch's
allocator handed out in a step after the first, above what was there before the model; on the CPU, where the allocator
does not count, the most bytes of tensors alive, which includes copies that gloo needs: shown and not judged.
Writes results/DATE-memory.md and .jsonl; ends with 1 where a prediction is off by more than 10%.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

import fourfold as ff
from bed import Bed, multi_process_service
from fourfold.arriving import local_of
from fourfold.cost.kept import Alive
from fourfold.cost.memory import peak_memory
from fourfold.cost.share import Share
from fourfold.models.config import ModelConfig
from fourfold.nn import layer
from fourfold.policy import Policy

RANKS = 4
STEPS = 3
BOUND = 0.10
TIMEOUT = 120.0
RESULTS = Path(__file__).parent / "results"
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Size:
    config: ModelConfig
    seq: int
    rows: int
    """Of the whole batch."""
    chunk: int


SIZES = {
    "cuda": Size(ff.models.config("gpt-1.4b", layers=16), 2048, 16, 2048),  # 1.0 B parameters
    "cpu": Size(ff.models.config("gpt-tiny", hidden=64, heads=8, kv_heads=8, head_dim=8, mlp_hidden=256), 32, 8, 32),
}


@dataclass(frozen=True)
class Line:
    shape: ff.Shape
    policy: Policy

    @property
    def name(self) -> str:
        words = [str(self.shape), self.policy.recompute]
        words += ["keep_gathered"] if self.policy.keep_gathered else []
        words += [f"loss_chunk={self.policy.loss_chunk}"] if self.policy.loss_chunk else []
        return ", ".join(words)


def lines_of(size: Size) -> list[Line]:
    return [
        Line(ff.Shape(z=4), Policy(compute=BF16)),
        Line(ff.Shape(z=4), Policy(compute=BF16, recompute="block")),
        Line(ff.Shape(x=4), Policy(compute=BF16)),
        Line(ff.Shape(x=2, z=2), Policy(compute=BF16, recompute="attention")),
        Line(ff.Shape(x=2, y=2), Policy(compute=BF16, keep_gathered=True)),
        Line(ff.Shape(data=4), Policy(compute=BF16, recompute="block", loss_chunk=size.chunk)),
    ]


@dataclass(frozen=True)
class Result:
    line: str
    predicted: dict[str, int]
    at: str
    predicted_bytes: int
    measured_bytes: int
    seconds: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


class Seat:
    """One rank of the bed."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        self.rank, self.world, self.device = rank, world, torch.device(device)


def measure(seat: Seat, line: Line, size: Size) -> int:
    """The peak of one rank's steps, of which the first makes the optimizer's state and records orders."""
    gc.collect()
    if seat.device.type == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if seat.device.type == "cuda" else 0
    grid = ff.Grid(**line.shape.sizes, device=seat.device)
    model = build(line, size, grid)
    optimizer = ff.optim.AdamW(model, lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(size.config.vocab, (size.rows, size.seq + 1), generator=generator)
    tokens = ff.local_rows(batch, grid).to(seat.device)
    peak = 0
    for _ in range(STEPS):
        peak = one_step(model, optimizer, tokens)
    if seat.device.type == "cuda":
        peak -= before
    else:
        parameters = sum(local_of(parameter).nbytes for parameter in model.parameters())
        peak += 3 * parameters  # those and the optimizer's two moments were there before the step
    del model, optimizer, tokens
    grid.close()
    return peak


def build(line: Line, size: Size, grid: ff.Grid) -> torch.nn.Module:
    """Initial weights drawn on the device: from the CPU's generator a billion take half a minute."""
    drawn = layer.fill_

    def draw(shard: torch.Tensor, _box: Any, _shape: Any, init: Any, *_: Any) -> None:
        shard.normal_(init.mean, init.std) if init.std else shard.fill_(init.mean)

    layer.fill_ = draw
    try:
        return ff.models.build(size.config, grid, policy=line.policy)
    finally:
        layer.fill_ = drawn


def one_step(model: torch.nn.Module, optimizer: ff.optim.AdamW, tokens: torch.Tensor) -> int:
    """Forward, backward, optimizer; the peak in bytes."""
    if tokens.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        take_step(model, optimizer, tokens)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with Alive() as alive:
        take_step(model, optimizer, tokens)
    return alive.peak_nbytes


def take_step(model: torch.nn.Module, optimizer: ff.optim.AdamW, tokens: torch.Tensor) -> None:
    model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
    optimizer.step()
    optimizer.zero_grad()


def run(bed: Bed, size: Size, device: str, lines: Sequence[Line]) -> list[Result]:
    results = []
    for line in lines:
        began = time.monotonic()
        measured = max(bed.run(measure, line, size, timeout=TIMEOUT))
        rows = size.rows // (line.shape.z * line.shape.data)
        memory = peak_memory(Share(size.config, line.shape, line.policy, rows, size.seq))
        result = Result(line.name, memory.kinds, memory.at, memory.total, measured, time.monotonic() - began)
        results.append(result)
        judged = verdict(result) if device == "cuda" else "not judged on the CPU"
        print(f"{result.line}: {result.error:+.1%}, {judged} ({result.seconds:.1f} s)", flush=True)
    return results


def verdict(result: Result) -> str:
    return "held" if abs(result.error) <= BOUND else "MISSED"


def table(results: Sequence[Result], device: str, command: str) -> str:
    judged = f"within {BOUND:.0%}" if device == "cuda" else "not judged on the CPU"
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    kinds = list(results[0].predicted)
    heads = ["line", "predicted MiB", "measured MiB", "error", judged, "peak at", *kinds]
    rows = [heads, ["---"] * len(heads)]
    for result in results:
        parts = [f"{nbytes / 2**20:.1f}" for nbytes in result.predicted.values()]
        held = verdict(result) if device == "cuda" else ""
        total, measured = (f"{nbytes / 2**20:.1f}" for nbytes in (result.predicted_bytes, result.measured_bytes))
        rows.append([result.line, total, measured, f"{result.error:+.1%}", held, result.at, *parts])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    title = f"# Predicted and measured peak memory of a step, {RANKS} ranks on one {name}"
    facts = f"{date.today()}, torch {torch.__version__}, `{command}`. Kinds are predicted, in MiB at the peak."
    return "\n".join([title, "", facts, "", *lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-memory", help="path without a suffix")
    parser.add_argument("--lines", default="", help="regular expression of the lines to measure; all of them if empty")
    options = parser.parse_args(arguments)
    size = SIZES[options.device]
    lines = [line for line in lines_of(size) if re.search(options.lines, line.name)]
    if not lines:
        names = "; ".join(line.name for line in lines_of(size))
        parser.error(f"--lines {options.lines!r} matches none of the lines: {names}")
    with multi_process_service(options.device):
        bed = Bed(RANKS, options.device, Seat)
        try:
            results = run(bed, size, options.device, lines)
        finally:
            bed.close()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/memory_on_gpu.py --device {options.device}"
    command += f" --lines {options.lines!r}" if options.lines else ""
    records = [json.dumps({**asdict(result), "error": result.error}) for result in results]
    options.out.with_suffix(".jsonl").write_text("\n".join(records) + "\n")
    options.out.with_suffix(".md").write_text(table(results, options.device, command))
    return int(options.device == "cuda" and any(abs(result.error) > BOUND for result in results))


if __name__ == "__main__":
    sys.exit(main())
