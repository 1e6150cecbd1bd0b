"""Grouped products of experts beside one batched product, at balance, on one GPU.

    python benchmarks/experts/products.py

Every expert has equally many rows, so that `bmm` can compute the same: it tells what the GPU reaches where it knows all
sizes beforehand. The three products are those of a layer: out = a w^T (E1), da = dout w (E2) and dw = dout^T a (E3).
`loop` multiplies one expert after another. Products take turns; each turn repeats one of them and is timed by the
device. Results are compared before.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch
from torch import Tensor

from benchmarks.shared.tables import RESULTS, markdown_table, verdict
from fourfold import kernels

BAR = 0.85
"""The least share of the TFLOP/s of `bmm`."""
REPEATS, ROUNDS = 20, 15
LARGEST_ERROR = 0.02
"""The largest difference of two ways to multiply in bf16, as a share of the norm."""


class ProductSize(NamedTuple):
    """Experts with equally many rows each."""

    experts: int
    rows: int
    """The rows of each expert."""
    width: int
    hidden: int

    @property
    def flops(self) -> int:
        return 2 * self.experts * self.rows * self.width * self.hidden


SIZES = (ProductSize(8, 2048, 4096, 1536), ProductSize(32, 512, 2048, 768), ProductSize(128, 128, 2048, 768))
GROUPED, BATCHED, LOOP = "grouped", "bmm", "loop"
Ways = dict[str, Callable[[], Tensor]]


def ways_of(size: ProductSize, device: torch.device, dtype: torch.dtype) -> dict[str, Ways]:
    """Return each product, and each way to compute it."""
    experts, rows, width, hidden = size
    torch.manual_seed(0)
    a = torch.randn(experts * rows, width, device=device, dtype=dtype)
    dout = torch.randn(experts * rows, hidden, device=device, dtype=dtype)
    w = torch.randn(experts, hidden, width, device=device, dtype=dtype)
    ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows
    groups = kernels.RowGroups(ends, experts * rows)
    of_a, of_dout = a.view(experts, rows, width), dout.view(experts, rows, hidden)
    return {
        "E1": {
            GROUPED: lambda: kernels.grouped(a, [w.transpose(1, 2)], groups),
            BATCHED: lambda: torch.bmm(of_a, w.transpose(1, 2)).flatten(0, 1),
            LOOP: lambda: torch.cat([one @ factor.T for one, factor in zip(of_a, w, strict=True)]),
        },
        "E2": {
            GROUPED: lambda: kernels.grouped(dout, [w], groups),
            BATCHED: lambda: torch.bmm(of_dout, w).flatten(0, 1),
            LOOP: lambda: torch.cat([one @ factor for one, factor in zip(of_dout, w, strict=True)]),
        },
        "E3": {
            GROUPED: lambda: kernels.grouped_weights(dout, a, groups),
            BATCHED: lambda: torch.bmm(of_dout.transpose(1, 2), of_a),
            LOOP: lambda: torch.stack([d.T @ one for d, one in zip(of_dout, of_a, strict=True)]),
        },
    }


def require_equal(ways: Ways, largest: float) -> None:
    """Raise unless all ways compute the same."""
    right = ways[BATCHED]().float()
    for name, way in ways.items():
        error = float((way().float() - right).norm() / right.norm())
        if not error <= largest:
            raise ValueError(
                f"{name} differs from {BATCHED} by {error:.1e} of its norm; at most {largest:.0e} is rounding"
            )


def seconds_of(way: Callable[[], Tensor]) -> float:
    """Return the seconds that the device takes for one call."""
    began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    began.record()
    for _ in range(REPEATS):
        way()
    ended.record()
    ended.synchronize()
    return began.elapsed_time(ended) / 1e3 / REPEATS


def measure(size: ProductSize) -> dict[str, dict[str, float]]:
    """Return the median seconds of each product in each way."""
    found = {}
    for product, ways in ways_of(size, torch.device("cuda"), torch.bfloat16).items():
        require_equal(ways, LARGEST_ERROR)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(-1, ROUNDS):
            for name, way in ways.items():
                seconds = seconds_of(way)
                if number >= 0:  # the first is a warm-up
                    times[name].append(seconds)
        found[product] = {name: statistics.median(each) for name, each in times.items()}
    return found


def rows_of(size: ProductSize, found: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return a row for each product: TFLOP/s of each way, and whether the bar is reached."""
    rows = []
    for product, seconds in found.items():
        share = seconds[BATCHED] / seconds[GROUPED]
        rows.append(
            [
                *map(str, size),
                product,
                *(f"{size.flops / seconds[name] / 1e12:.0f}" for name in (GROUPED, BATCHED, LOOP)),
                f"{share:.2f}",
                f"{BAR}: {verdict(share >= BAR)}",
            ]
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-experts-products.md")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error(
            "one kernel multiplies all experts on a GPU only; on the CPU it is a loop, with nothing to compare"
        )
    rows = [row for size in SIZES for row in rows_of(size, measure(size))]
    head = [
        "experts", "rows of each", "width", "hidden", "product", f"{GROUPED}, TFLOP/s", BATCHED, LOOP,
        f"of {BATCHED}", "bar",
    ]  # fmt: skip
    text = (
        "# Grouped products of experts beside a batched product\n\n"
        f"`{shlex.join(['python', 'benchmarks/experts/products.py', *sys.argv[1:]])}`, {date.today()}, "
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, bf16. Medians of {ROUNDS} rounds of {REPEATS} "
        "products each, in which the ways took turns.\n\n" + "\n".join(markdown_table(head, rows))
    )
    options.out.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
