"""Rates that a GPU sustains at its power limit, beside those of the first moments after a pause.

    python benchmarks/planner/sustained.py --seconds 15 --out sustained.md

Large products of random numbers draw more power than a GPU may take for long. Within seconds its clock falls, and
with it the rate. A short benchmark shows the first rate, training runs at the second. Each line is one kind of work,
which repeats for `--seconds` after a pause; `burst` is its first tenth of a second, `sustained` the last third.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.shared.tables import markdown_table

PAUSE_SECONDS = 3.0
"""The device is idle for this long before each line, so that its clock recovers."""
BURST_SECONDS = 0.1
"""The first part of a line, before the clock has fallen."""
BATCH_SECONDS = 0.02
"""About the time between two events: long against a launch, short against the burst."""


class SteadyWork(NamedTuple):
    """Work that repeats, and how much of it one call does."""

    name: str
    run: Callable[[], object]
    amount: float
    """FLOPs, or bytes, of one call."""
    unit: str


def products() -> Iterator[SteadyWork]:
    """Yield a large square product and those of a block with hidden 4096 on 16,384 tokens."""
    for m, k, n in ((8192, 8192, 8192), (16384, 4096, 12288), (16384, 4096, 16384), (16384, 16384, 4096)):
        a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        yield SteadyWork(
            f"product {m} x {k} x {n}", lambda a=a, b=b, out=out: torch.mm(a, b, out=out), 2.0 * m * k * n, "FLOP/s"
        )


def attentions() -> Iterator[SteadyWork]:
    """Yield causal attention, forward alone and with backward; FLOPs as the planner counts them."""
    for rows, seq, heads, dim in ((8, 2048, 32, 128), (2, 8192, 32, 128), (1, 32768, 16, 128), (8, 2048, 16, 64)):
        q, k, v = (
            torch.randn(rows, heads, seq, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        flops = 2.0 * rows * heads * seq * seq * dim  # half of 4: causal
        yield SteadyWork(f"attention, {seq} tokens, head {dim}", lambda q=q, k=k, v=v: attend(q, k, v), flops, "FLOP/s")
        gradient = torch.randn_like(q)
        yield SteadyWork(
            f"attention with backward, {seq} tokens, head {dim}",
            lambda q=q, k=k, v=v, gradient=gradient: torch.autograd.grad(attend(q, k, v), (q, k, v), gradient),
            3 * flops,
            "FLOP/s",
        )


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def copies() -> Iterator[SteadyWork]:
    source = torch.randn(1 << 29, device="cuda", dtype=torch.bfloat16)
    target = torch.empty_like(source)
    yield SteadyWork("copy of 1 GiB", lambda: target.copy_(source), 2.0 * source.nbytes, "B/s")


class Rates(NamedTuple):
    """Amounts per second, and what the device reported at the end."""

    burst: float
    sustained: float
    state: str


def measure(workload: SteadyWork, seconds: float) -> Rates:
    for _ in range(3):
        workload.run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    workload.run()
    torch.cuda.synchronize()
    calls = max(1, round(BATCH_SECONDS / (time.perf_counter() - began)))
    time.sleep(PAUSE_SECONDS)
    times, state = [0.0], ""
    began = time.perf_counter()
    while times[-1] < seconds:
        for _ in range(calls):
            workload.run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        if not state and times[-1] > 0.9 * seconds:
            state = device_state()
    per_batch = calls * workload.amount

    def rate(first: float, last: float) -> float:
        inside = [moment for moment in times if first <= moment <= last]
        return (len(inside) - 1) * per_batch / (inside[-1] - inside[0])

    return Rates(rate(0.0, max(BURST_SECONDS, times[1])), rate(seconds * 2 / 3, times[-1]), state)


def device_state() -> str:
    """Return power, clock and temperature, as nvidia-smi reports them."""
    query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm,temperature.gpu", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="duration of each line")
    parser.add_argument("--out", type=Path, help="where to write the table")
    options = parser.parse_args()
    rows = []
    for kind in (products, attentions, copies):
        for workload in kind():
            rates = measure(workload, options.seconds)
            print(workload.name, rates, flush=True)
            burst, sustained = (f"{rate / 1e12:.3g} T{workload.unit}" for rate in (rates.burst, rates.sustained))
            rows.append([workload.name, burst, sustained, f"{rates.sustained / rates.burst:.2f}", rates.state])
    heads = ["work", "burst", "sustained", "sustained / burst", "power, clock, temperature"]
    lines = [
        f"# Sustained rates of one {torch.cuda.get_device_name()}, {date.today()}",
        f"`python benchmarks/planner/sustained.py --seconds {options.seconds:g}`; torch {torch.__version__}",
        "",
        *markdown_table(heads, rows),
    ]
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
