"""Predicted peak memory beside the measured peak: real steps on several ranks that share one GPU, or on the CPU.

    python benchmarks/planner/memory_on_gpu.py                     # four NCCL ranks on one GPU
    python benchmarks/planner/memory_on_gpu.py --device cpu        # a tiny model on gloo ranks, a smoke test

Each line builds a model on its grid and takes steps: forward, backward, AdamW. The measured value is the most memory
that torch's allocator handed out in a step after the first, above what was allocated before the model. On the CPU the
allocator does not count; there it is the most bytes of live tensors, including copies that gloo needs, and it is shown
but not judged. Writes results/DATE-memory.md and .jsonl; exits with 1 if a prediction is off by more than 10%.
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

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

import fourfold as ff
from benchmarks.shared.models import build_on_device
from benchmarks.shared.rank_pool import RankPool, multi_process_service
from benchmarks.shared.tables import RESULTS
from benchmarks.shared.workloads import Workload
from fourfold.params import local_of
from fourfold.planner.memory import peak_memory
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.trace import StorageCounter
from fourfold.policy import Policy

RANKS = 4
STEPS = 3
BOUND = 0.10
"""The largest error of a prediction."""
TIMEOUT = 120.0
BF16 = torch.bfloat16

WORKLOADS = {
    "cuda": Workload("cuda", ff.models.config("gpt-1.4b", layers=16), 16, torch.float32),  # 1.0 B parameters
    "cpu": Workload(
        "cpu",
        ff.models.config("gpt-tiny", hidden=64, heads=8, kv_heads=8, head_dim=8, mlp_hidden=256, seq=32),
        8,
        torch.float32,
    ),
}


@dataclass(frozen=True)
class MemoryCase:
    """A grid and a policy; one line of the table."""

    shape: ff.Shape
    policy: Policy

    @property
    def name(self) -> str:
        words = [str(self.shape), self.policy.recompute]
        words += ["keep_gathered"] if self.policy.keep_gathered else []
        words += [f"loss_chunk={self.policy.loss_chunk}"] if self.policy.loss_chunk else []
        return ", ".join(words)


def cases_of(workload: Workload) -> list[MemoryCase]:
    return [
        MemoryCase(ff.Shape(z=4), Policy(compute_dtype=BF16)),
        MemoryCase(ff.Shape(z=4), Policy(compute_dtype=BF16, recompute="block")),
        MemoryCase(ff.Shape(x=4), Policy(compute_dtype=BF16)),
        MemoryCase(ff.Shape(x=2, z=2), Policy(compute_dtype=BF16, recompute="attention")),
        MemoryCase(ff.Shape(x=2, y=2), Policy(compute_dtype=BF16, keep_gathered=True)),
        MemoryCase(ff.Shape(data=4), Policy(compute_dtype=BF16, recompute="block", loss_chunk=workload.config.seq)),
    ]


@dataclass(frozen=True)
class MemoryResult:
    """The predicted and the measured peak of one line."""

    line: str
    predicted: dict[str, int]
    """Predicted bytes at the peak, by kind."""
    at: str
    """The moment of the step at which the peak is predicted."""
    predicted_bytes: int
    measured_bytes: int
    seconds: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def device_of(_rank: int, _world: int, device: str) -> torch.device:
    """Return the state of a rank in the pool: its device."""
    return torch.device(device)


def measure_peak(device: torch.device, case: MemoryCase, workload: Workload) -> int:
    """Return the peak of the last step on this rank; the first step allocates optimizer state and learns orders."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    grid = ff.Grid(**case.shape.sizes, device=device)
    model = build_on_device(workload.config, grid, case.policy)
    optimizer = ff.optim.AdamW(model, lr=1e-4)
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(workload.config.vocab, (workload.rows, workload.config.seq + 1), generator=generator)
    tokens = ff.local_rows(batch, grid).to(device)
    peak = 0
    for _ in range(STEPS):
        peak = one_step(model, optimizer, tokens)
    if device.type == "cuda":
        peak -= before
    else:
        parameters = sum(local_of(parameter).nbytes for parameter in model.parameters())
        peak += 3 * parameters  # the parameters and the optimizer's two moments existed before the step
    del model, optimizer, tokens
    grid.close()
    return peak


def one_step(model: torch.nn.Module, optimizer: ff.optim.AdamW, tokens: torch.Tensor) -> int:
    """Take one step and return its peak in bytes."""
    if tokens.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        take_step(model, optimizer, tokens)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()
    with StorageCounter() as alive:
        take_step(model, optimizer, tokens)
    return alive.peak_nbytes


def take_step(model: torch.nn.Module, optimizer: ff.optim.AdamW, tokens: torch.Tensor) -> None:
    model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
    optimizer.step()
    optimizer.zero_grad()


def measure_all(pool: RankPool, workload: Workload, device: str, cases: Sequence[MemoryCase]) -> list[MemoryResult]:
    results = []
    for case in cases:
        began = time.monotonic()
        measured = max(pool.run(measure_peak, case, workload, timeout=TIMEOUT))
        rows = workload.rows // (case.shape.z * case.shape.data)
        memory = peak_memory(LocalSizes(workload.config, case.shape, case.policy, rows, workload.config.seq))
        result = MemoryResult(case.name, memory.kinds, memory.at, memory.total, measured, time.monotonic() - began)
        results.append(result)
        judged = verdict(result) if device == "cuda" else "not judged on the CPU"
        print(f"{result.line}: {result.error:+.1%}, {judged} ({result.seconds:.1f} s)", flush=True)
    return results


def verdict(result: MemoryResult) -> str:
    return "held" if abs(result.error) <= BOUND else "MISSED"


def page(results: Sequence[MemoryResult], device: str, command: str) -> str:
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
    facts = f"{date.today()}, torch {torch.__version__}, `{command}`. Last columns: prediction by kind, MiB."
    return "\n".join([title, "", facts, "", *lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-memory", help="path without a suffix")
    parser.add_argument("--lines", default="", help="measure only lines whose name matches this regex")
    options = parser.parse_args(arguments)
    workload = WORKLOADS[options.device]
    cases = [case for case in cases_of(workload) if re.search(options.lines, case.name)]
    if not cases:
        names = "; ".join(case.name for case in cases_of(workload))
        parser.error(f"--lines {options.lines!r} matches none of the lines: {names}")
    with multi_process_service(options.device):
        pool = RankPool(RANKS, options.device, device_of)
        try:
            results = measure_all(pool, workload, options.device, cases)
        finally:
            pool.close()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    command = f"python benchmarks/planner/memory_on_gpu.py --device {options.device}"
    command += f" --lines {options.lines!r}" if options.lines else ""
    records = [json.dumps({**asdict(result), "error": result.error}) for result in results]
    options.out.with_suffix(".jsonl").write_text("\n".join(records) + "\n")
    options.out.with_suffix(".md").write_text(page(results, options.device, command))
    return int(options.device == "cuda" and any(abs(result.error) > BOUND for result in results))


if __name__ == "__main__":
    sys.exit(main())
