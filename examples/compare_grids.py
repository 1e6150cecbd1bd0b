"""The same training on several grids of the same ranks.

    torchrun --nproc-per-node 4 examples/compare_grids.py

The losses are equal; the seconds per step and the bytes that a rank sends over each axis differ. Prints a table and, if
plotly is installed, writes an HTML file with a figure. A larger model on grids of your choice:

    torchrun --nproc-per-node 8 examples/compare_grids.py \
        --model gpt-125m --rows 64 --seq 1024 x=8 z=8 x=2,z=4
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import fourfold as ff
from fourfold.commands.options import grid as axes

GRIDS = ["data=4", "z=4", "x=4", "x=2,z=2", "x=2,y=2", "y=2,data=2"]


class GridResult(NamedTuple):
    """The measurements on one grid."""

    losses: list[float]
    seconds: float
    """Median seconds per step."""
    sent: dict[str, float]
    """Bytes that rank 0 sends per step, by axis."""


def measure(given: argparse.Namespace, sizes: dict[str, int]) -> GridResult:
    grid = ff.Grid(**sizes)
    model = ff.models.build(given.model, grid)  # the same weights on every grid
    optimizer, generator = ff.optim.AdamW(model, lr=3e-3), torch.Generator().manual_seed(0)
    losses, seconds = [], []
    for _ in range(given.steps):
        rows = torch.randint(model.config.vocab, (given.rows, 1), generator=generator) + torch.arange(given.seq + 1)
        rows = ff.local_rows(rows % model.config.vocab, grid).to(grid.device)  # they count up from random starts
        began = time.perf_counter()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the GPU
        seconds.append(time.perf_counter() - began)
    sent = {axis: nbytes / given.steps for axis, nbytes in grid.ledger.wire_bytes.items() if nbytes}
    grid.close()
    return GridResult(losses, median(seconds[1:]), sent)  # the first step includes warm-up


def show(found: dict[str, GridResult], plot: Path) -> None:
    first = next(iter(found.values())).losses
    print(f"{'grid':14}{'last loss':>12}{'difference':>12}{'s/step':>9}   MB sent per step")
    for name, (losses, seconds, sent) in found.items():
        differs = max(abs(loss - other) for loss, other in zip(losses, first, strict=True))
        by_axis = ", ".join(f"{axis} {nbytes / 1e6:.2f}" for axis, nbytes in sent.items())
        print(f"{name:14}{losses[-1]:12.6f}{differs:12.1e}{seconds:9.4f}   {by_axis}")
    try:
        from plotly import graph_objects as plotly
    except ImportError:
        print("no plot: pip install 'fourfold[report]'")
        return
    bars = [
        plotly.Bar(name=f"over {axis}", x=list(found), y=[each.sent.get(axis, 0) / 1e6 for each in found.values()])
        for axis in ("x", "y", "z", "data")
    ]
    seconds = plotly.Scatter(name="seconds", x=list(found), y=[each.seconds for each in found.values()], yaxis="y2")
    second = dict(title="seconds per step", overlaying="y", side="right", rangemode="tozero")
    layout = dict(barmode="stack", yaxis=dict(title="MB that a rank sends per step"), yaxis2=second)
    plotly.Figure([*bars, seconds], layout).write_html(plot)
    print(f"figure: {plot}")


def main(arguments: Sequence[str] | None = None) -> dict[str, GridResult]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="*", metavar="GRID", default=GRIDS, help="such as x=2,z=2")
    parser.add_argument("--model", default="gpt-tiny", help="a published size")
    parser.add_argument("--plot", type=Path, default=Path("compare_grids.html"), help="the figure to write")
    for name, default in (("steps", 5), ("rows", 16), ("seq", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    found = {name: measure(given, axes(name)) for name in given.grids}
    if torch.distributed.get_rank() == 0:
        show(found, given.plot)
    return found


if __name__ == "__main__":
    main()
