"""Packed documents: how even and how cheap each assignment over a context group is, and attention without a mask.

    python benchmarks/context/documents.py

First three distributions of lengths, 20 draws each, on 4, 8 and 16 members: the attention of the busiest member divided
by the mean, and the K and V that travel as a share of what a gather moves. `rows` cuts the packed line in pairs of
chunks, whatever the documents are. Then one process: time of attention, forward and backward, over tiles and with
torch's kernel under a mask of every token against every other, and the bytes of that mask.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.shared.tables import RESULTS, markdown_table, verdict
from fourfold.context.assign import Assignment, assign_documents, assign_rows
from fourfold.tiles import attend, document_tiles

DRAWS = 20
MEMBERS = 4, 8, 16
MEAN, WORST, MOVED = 1.05, 1.15, 0.4
"""Bars: imbalance on average and at worst, and the share of a gather's K and V."""
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
ROUNDS = 3


def filled(draw: Callable[[], int], tokens: int) -> list[int]:
    """Draw lengths until they fill so many tokens; the last document is cut short."""
    lengths: list[int] = []
    left = tokens
    while left:
        lengths.append(min(max(1, draw()), left))
        left -= lengths[-1]
    return lengths


def lognormal(drawn: random.Random) -> list[int]:
    return filled(lambda: int(drawn.lognormvariate(6.55, 1.0)), 131_072)


def long_tail(drawn: random.Random) -> list[int]:
    return filled(lambda: min(131_072, int(300 * drawn.paretovariate(1.0))), 262_144)


def one_long(drawn: random.Random) -> list[int]:
    lengths = [65_536, *filled(lambda: int(drawn.lognormvariate(5.5, 0.8)), 65_536)]
    drawn.shuffle(lengths)
    return lengths


DISTRIBUTIONS = {
    "lognormal, median 700, 128K tokens": lognormal,
    "Pareto from 300 to 128K, 256K tokens": long_tail,
    "one of 64K and many short, 128K tokens": one_long,
}


def assignments() -> Iterator[str]:
    yield "## Attention of the busiest member, and K and V that travel"
    rows, reached = [], True
    for name, lengths_of in DISTRIBUTIONS.items():
        for members in MEMBERS:
            drawn = [tuple(lengths_of(random.Random(seed))) for seed in range(DRAWS)]
            by_rows = [assign_rows(1, sum(lengths), lengths, members) for lengths in drawn]
            began = time.process_time()
            placed = [assign_documents(lengths, members) for lengths in drawn]
            took = (time.process_time() - began) / DRAWS
            even, moved = [one.imbalance for one in placed], share_moved(placed)
            reached &= statistics.mean(even) <= MEAN and max(even) <= WORST and moved <= MOVED
            before = [one.imbalance for one in by_rows]
            rows.append(
                [
                    name, str(members),
                    f"{statistics.mean(before):.2f}, {max(before):.2f}", f"{share_moved(by_rows):.0%}",
                    f"{statistics.mean(even):.3f}, {max(even):.3f}", f"{moved:.0%}", f"{1e3 * took:.1f}",
                ]
            )  # fmt: skip
    head = ["lengths", "members", "rows: mean, worst", "moved", "documents: mean, worst", "moved", "ms"]
    yield from markdown_table(head, rows)
    yield ""
    bars = f"on average at most {MEAN}, at worst {WORST}, and at most {MOVED:.0%} of a gather's K and V"
    yield f"- documents: {bars}: {verdict(reached)}"


def share_moved(found: Sequence[Assignment]) -> float:
    """Return the K and V that travel as a share of what a gather moves, on average."""
    return statistics.mean(one.moved / ((len(one.members) - 1) * sum(one.lengths)) for one in found)


def packed() -> Iterator[str]:
    yield "## Attention of one process to packed documents, forward and backward"
    rows = []
    for seq, mean in ((2048, 256), (4096, 512), (8192, 512)):
        drawn = random.Random(seq)
        lengths = filled(lambda drawn=drawn, mean=mean: drawn.randint(1, 2 * mean), seq)
        document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        mask = torch.ones(seq, seq, dtype=torch.bool).tril() & (document[:, None] == document[None])
        tiles = document_tiles(lengths)
        parts = [torch.randn(seq, heads, HEAD_DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]

        def masked(parts: Sequence[torch.Tensor] = parts, mask: torch.Tensor = mask) -> None:
            q, k, v = (part.transpose(0, 1)[None] for part in parts)
            functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).sum().backward()

        def tiled(parts: Sequence[torch.Tensor] = parts, tiles: Sequence = tiles) -> None:
            q, k, v = parts
            attend(q, k, v, tiles).sum().backward()

        times = {act: [] for act in (masked, tiled)}
        for act in (masked, tiled) * (1 + ROUNDS):
            began = time.perf_counter()
            act()
            times[act].append(time.perf_counter() - began)
        before, after = (statistics.median(found[1:]) for found in times.values())
        cells = [f"{seq:,}", str(len(lengths)), f"{1e3 * before:.0f}", f"{1e3 * after:.0f}", f"{before / after:.1f}"]
        rows.append([*cells, f"{mask.numel() / 2**20:.0f}"])
    head = ["tokens", "documents", "with a mask, ms", "over tiles, ms", "times faster", "MiB of the mask"]
    yield from markdown_table(head, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="default: results/DATE-documents.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    command = f"`python benchmarks/context/documents.py`; CPU only, one core; torch {torch.__version__}; {HEADS} query "
    command += f"heads and {KV_HEADS} KV heads of {HEAD_DIM}, fp32"
    text = "\n".join([f"# Packed documents, {date.today()}", "", command, "", *assignments(), "", *packed()]) + "\n"
    (options.out or RESULTS / f"{date.today()}-documents.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
