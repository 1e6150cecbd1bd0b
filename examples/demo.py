"""The first two minutes: train a small byte-level GPT on a grid of local CPU ranks.

    make demo
    make demo GRID=y=2,z=2
    python examples/demo.py --grid x=4 --steps 50

It starts as many ranks as the grid has, on torch's elastic agent, unless torchrun has started it. The corpus is
the source of Python's standard library, which is on this machine already.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import time
from collections import Counter
from functools import partial

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import fourfold as ff
from fourfold.data.corpus import random_windows, standard_library

ROWS, SEQ, SEED = 16, 128, 1


def main() -> int:
    options = parse()
    if "RANK" not in os.environ:
        return launch(ff.Shape(**options.grid).world)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent hears Ctrl-C and ends the ranks
    try:
        run(options)
    except ValueError as error:  # the same on every rank; once is enough
        if os.environ["RANK"] == "0":
            print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def launch(ranks: int) -> int:
    """Run this script on local ranks."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(1, 1, ranks, run_id="demo", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)
    try:
        elastic_launch(config, sys.executable)("-u", __file__, *sys.argv[1:])
    except ChildFailedError as failed:
        return max((failure.exitcode for failure in failed.failures.values()), default=1)
    except (KeyboardInterrupt, SignalException):
        print("stopped", file=sys.stderr)
        return 130
    return 0


def run(options: argparse.Namespace) -> None:
    grid = ff.Grid(**options.grid, device="cpu")
    say = print if grid.rank == 0 else lambda *_: None
    config = ff.models.config(
        "gpt-tiny", layers=3, hidden=128, heads=8, kv_heads=8, head_dim=16, mlp_hidden=512, vocab=256, seq=SEQ
    )
    corpus = standard_library()
    say(f"{grid.shape.world} ranks on the grid {grid}: a GPT of {config.parameters / 1e6:.1f}M parameters,")
    say(f"{len(corpus) / 1e6:.1f} MB of Python source, {ROWS} x {SEQ} bytes a step.")
    say(f"Knowing only how frequent each byte is, the loss would be {unigram_entropy(corpus):.2f}.\n")
    train(grid, config, corpus, options.steps, say)

    batches = [random_windows(corpus, ROWS, SEQ, seed=SEED, step=step) for step in range(2)]
    build = partial(ff.models.build, config, seed=SEED, dtype=torch.float64)
    worst = ff.compare_serial(build, batches, grid).worst
    say(f"\nTwo steps in fp64 beside one process: largest relative difference {worst.relative:.0e}, of all tensors.")
    say("The grid changes who computes what, never the result. What to try next:")
    say("  make demo GRID=z=4           fully sharded data parallelism (FSDP)")
    say("  make demo GRID=x=4           tensor parallelism with sequence parallelism (Megatron)")
    say("  make demo GRID=x=2,y=2       both sides of every matrix cut")
    say("  make test                    every grid of 1, 2, 3, 4, 6 and 8 ranks beside plain torch")


def train(grid: ff.Grid, config: ff.models.Config, corpus: torch.Tensor, steps: int, say) -> None:
    model = ff.models.build(config, grid, seed=SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), fused=True)
    say(f"{'step':>5} {'loss':>7} {'gradient norm':>14} {'tokens/s':>9}   sent per rank and step")
    began, since, sent = time.perf_counter(), 0, Counter(grid.ledger.wire_bytes)
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 10)
        batch = random_windows(corpus, ROWS, SEQ, seed=SEED, step=step)
        tokens, targets = (ff.local_rows(whole, grid) for whole in batch)
        loss = model(tokens, targets)
        loss.backward()
        norm = ff.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            now, total = time.perf_counter(), Counter(grid.ledger.wire_bytes)
            rate = (step - since) * ROWS * SEQ / (now - began)
            bytes_of = {axis: (total[axis] - sent[axis]) / (step - since) / 1e6 for axis in total}
            by_axis = ", ".join(f"{axis} {megabytes:.2f} MB" for axis, megabytes in bytes_of.items())
            say(f"{step:>5} {loss.item():>7.3f} {norm.item():>14.2f} {rate:>9.0f}   {by_axis or 'nothing'}")
            began, since, sent = now, step, total


def unigram_entropy(corpus: torch.Tensor) -> float:
    frequency = torch.bincount(corpus.int(), minlength=256).double() / len(corpus)
    return -sum(f * math.log(f) for f in frequency.tolist() if f)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=grid_sizes, default=grid_sizes("x=2,z=2"), help="such as x=2,z=2")
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args()


def grid_sizes(text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        axis, equals, size = part.partition("=")
        if axis not in ("x", "y", "z", "data") or not equals or not size.isdigit():
            raise argparse.ArgumentTypeError(f"{part!r} is no axis with a size; write x=2,z=2 with axes x, y, z, data")
        sizes[axis] = int(size)
    return sizes


if __name__ == "__main__":
    sys.exit(main())
