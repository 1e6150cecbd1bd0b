"""The trainer on documents of mixed lengths: `policy.assignment` documents beside rows, in one run.

    python benchmarks/context/trainer_documents.py                            # 2 emulated nodes of 2 ranks; needs root
    python benchmarks/context/trainer_documents.py --nodes 4 --mbit 1000      # 4 nodes
    python benchmarks/context/trainer_documents.py --device cuda --ranks 4    # quarters of a GPU, by NCCL

Both sides are runs of `fourfold train` on one context group, with the same bags of whole documents (`data.pack`), whose
lengths follow a long tail. They differ in which tokens a place holds; how K and V travel follows from that
(`policy.context_way` auto). Sides take turns, one step each in every round, and start in turn. A step is loader,
forward, backward, clipping and optimizer, and takes as long as its slowest rank. Bytes are those that the busiest rank
sends over context in a step. Before that, a few steps of both sides in fp64 must have the same losses, on smaller bags
of the same kind, in which sides must also differ in how even they are.

On the CPU torchrun starts the ranks on an emulated cluster (`cluster/emulate.py`). On a GPU ranks share one device,
each with an equal part of its multiprocessors.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

import fourfold as ff
from benchmarks.cluster.each_rank import add_rank_of, measure_on_cluster, run_rank
from benchmarks.cluster.emulate import ClusterShape
from benchmarks.shared.rank_pool import PARTITION, RankContext, RankPool, multi_process_service
from benchmarks.shared.tables import RESULTS, markdown_table, verdict
from fourfold.axes import CONTEXT
from fourfold.train.config import read_config
from fourfold.train.loop import Run
from fourfold.train.planning import resolve

SIDES = ("rows", "documents")
BAR = 1.3
"""How many times faster a token must be with documents than with rows, on quarters of a GPU."""
SAME = 1e-10
"""The largest difference of losses in fp64."""
EXACT_STEPS = 3
"""Steps in fp64."""
WARMUP = 2
MODELS: dict[str, dict[str, int]] = {
    "cpu": dict(layers=2, hidden=128, head_dim=32, heads=4, kv_heads=2, mlp_hidden=256),
    "cuda": dict(layers=4, hidden=1024, head_dim=64, heads=16, kv_heads=4, mlp_hidden=2816),
}
TOKENS = {"cpu": 8192, "cuda": 65_536}
"""Tokens of a bag: attention takes a good part of a step."""


@dataclass(frozen=True)
class DocumentsSetting:
    """What every rank is told."""

    device: str
    tokens: int
    """Tokens of a bag, which is the whole batch."""
    rounds: int
    folder: str
    """Where the texts are."""

    @property
    def exact_tokens(self) -> int:
        """Tokens of a bag in fp64: on a GPU scores of whole tiles exist there, 8 GiB for half of so many tokens."""
        return min(self.tokens // 4, 16_384)

    def corpus(self, tokens: int) -> Path:
        """Return the file of documents for bags of so many tokens."""
        return Path(self.folder) / f"for-{tokens}.jsonl"


def write_corpus(path: Path, tokens: int, bags: int) -> None:
    """Write documents of random letters; the tokenizer makes a token of each, so that lengths are as drawn.

    Lengths follow Pareto's distribution, from a 512th of a bag to half a bag.
    """
    draw, left = random.Random(0), bags * tokens
    with path.open("w") as file:
        while left > 0:
            length = min(tokens // 2, int(tokens / 512 * draw.paretovariate(1.0)))
            file.write(json.dumps({"text": "".join(draw.choices("etaoinshrdlu ", k=length))}) + "\n")
            left -= length


class DocumentsSide:
    """A run of the trainer with one assignment, one step at a time."""

    def __init__(self, setting: DocumentsSetting, grid: ff.Grid, assignment: str, dtype: str, tokens: int) -> None:
        rows = grid.shape.context
        given: dict[str, Any] = {
            "model.name": "llama-tiny", "model.seq": tokens, "data.sources": [{"path": str(setting.corpus(tokens))}],
            "data.pack": "whole", "batch.rows": rows, "batch.seq": tokens // rows, "policy.dtype": dtype,
            "policy.assignment": assignment, "policy.recompute": "none", "policy.loss_chunk": 2048,
            "train.steps": 1000, "train.graph": "off", "train.evaluate_every": 0, "log.peak_flops": 1e12,
            "plan.compare": False, **{f"grid.{axis}": size for axis, size in grid.shape.named.items()},
            **{f"model.{name}": size for name, size in MODELS[setting.device].items()},
        }  # fmt: skip
        config = read_config(None, list(given.items()))
        on_gpu = setting.device == "cuda"
        config = resolve(config, grid.shape.world, on_gpu=on_gpu, memory_bytes=1 << 36)
        self.run, self.grid, self.done = Run(config, grid, Path(setting.folder)), grid, 0
        self.run.optimizer.make_state()

    def step(self) -> dict[str, Any]:
        """Take one step; return its loss, the bytes sent over context, and how uneven attention was."""
        run, before = self.run, self.grid.ledger.wire_bytes[CONTEXT]
        self.done += 1
        run.language_model.clock.begin_step(self.done)
        run.schedule.apply(run.optimizer, self.done)
        batches = run.loader.next()
        loss = run.language_model.forward_backward(batches)
        run.optimizer.clip_and_step(run.config.optimizer.clip)
        run.optimizer.zero_grad()
        sent = self.grid.ledger.wire_bytes[CONTEXT] - before
        return {"loss": loss, "sent": sent, "imbalance": run.language_model.imbalance(batches)}

    def close(self) -> None:
        self.run.loader.close()


def measure(context: RankContext, setting: DocumentsSetting) -> dict[str, list[dict[str, Any]]]:
    """Run both sides on this rank: some steps in fp64, then rounds that are timed."""
    grid = context.grid(ff.Shape(z=context.world, context=context.world))
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    exact = {}
    for side in SIDES:
        one = DocumentsSide(setting, grid, side, "fp64", setting.exact_tokens)
        steps = [one.step() for _ in range(EXACT_STEPS)]
        exact[side] = [(step["loss"].item(), step["imbalance"]) for step in steps]
        one.close()
    dtype = "bf16" if setting.device == "cuda" else "fp32"
    sides = {side: DocumentsSide(setting, grid, side, dtype, setting.tokens) for side in SIDES}
    for number in range(-WARMUP, setting.rounds):
        for side in SIDES if number % 2 else reversed(SIDES):
            gc.collect()
            context.barrier()
            began = time.perf_counter()
            step = sides[side].step()
            context.synchronize()
            seconds = time.perf_counter() - began
            if number >= 0:
                found[side].append({**step, "loss": step["loss"].item(), "seconds": seconds})
    for side in SIDES:
        sides[side].close()
        found[side].insert(0, {"exact": exact[side]})
    return found


# --- ranks


def on_gpu(ranks: int, setting: DocumentsSetting) -> list[Any]:
    """Run the job on ranks that share a GPU, each with its part of it."""
    os.environ[PARTITION] = str(100 // ranks)  # the ranks inherit it
    with multi_process_service("cuda"):
        pool = RankPool(ranks, "cuda", RankContext)
        try:
            return pool.run(measure, setting, timeout=540)
        finally:
            pool.close()


# --- the table


def table(every: Sequence[Mapping[str, Any]], setting: DocumentsSetting) -> tuple[list[str], list[float], float]:
    """Return the lines of the table, how many times faster documents are by round, and the difference in fp64."""
    seconds, rows = {}, []
    for side in SIDES:
        rounds = list(zip(*(found[side][1:] for found in every), strict=True))
        seconds[side] = [max(step["seconds"] for step in ranks) for ranks in rounds]
        sent = [max(step["sent"] for step in ranks) for ranks in rounds]
        uneven = [ranks[0]["imbalance"] for ranks in rounds]
        rows.append(
            [
                side,
                f"{1e6 * statistics.median(seconds[side]) / setting.tokens:.1f}",
                f"{statistics.median(sent) / 2**20:.2f}",
                f"{statistics.mean(uneven):.2f}, {max(uneven):.2f}",
                f"{every[0][side][-1]['loss']:.4f}",
            ]
        )
    gains = [before / after for before, after in zip(*(seconds[side] for side in SIDES), strict=True)]
    exact = list(zip(*(every[0][side][0]["exact"] for side in SIDES), strict=True))
    if all(one[1] == other[1] for one, other in exact):
        raise SystemExit("in fp64 both sides gave places the same tokens, so equal losses say nothing")
    head = [
        "assignment", "us per token", "MiB sent over context in a step", "imbalance: mean, worst", "last loss",
    ]  # fmt: skip
    return list(markdown_table(head, rows)), gains, max(abs(one[0] - other[0]) for one, other in exact)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nodes", type=int, default=2, help="emulated nodes, on the CPU")
    parser.add_argument("--ranks", type=int, help="ranks of a node, default 2; on a GPU all ranks, default 4")
    parser.add_argument("--mbit", type=float, default=1000.0, help="Mbit/s of each node's link, on the CPU")
    parser.add_argument("--tokens", type=int, help="of a bag; default 8192 on the CPU, 65536 on a GPU")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-documents-trainer.md")
    add_rank_of(parser)
    options = parser.parse_args()
    if options.rank_of is not None:
        return run_rank(options.rank_of, lambda context, told: measure(context, DocumentsSetting(**told)))
    if options.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    gpu, load = options.device == "cuda", os.getloadavg()[0]
    ranks = options.ranks or (4 if gpu else 2)
    with tempfile.TemporaryDirectory() as folder:
        tokens = options.tokens or TOKENS[options.device]
        setting = DocumentsSetting(options.device, tokens, options.rounds, folder)
        write_corpus(setting.corpus(tokens), tokens, options.rounds + 2 * WARMUP)
        write_corpus(setting.corpus(setting.exact_tokens), setting.exact_tokens, 4 * EXACT_STEPS)
        if gpu:
            every = on_gpu(ranks, setting)
            where = f"{torch.cuda.get_device_name(0)} shared by {ranks} NCCL ranks of a part each"
        else:
            shape = ClusterShape(options.nodes, ranks, options.mbit)
            every = measure_on_cluster(__file__, shape, asdict(setting))
            where = f"{os.cpu_count()} {os.uname().machine} cores that emulate {shape}"
    lines, gains, difference = table(every, setting)
    gain, (low, _, high) = statistics.median(gains), statistics.quantiles(gains)
    bar = f" (bar: {BAR}: {verdict(gain >= BAR)})" if gpu else ""
    sizes = ", ".join(f"{name} {size}" for name, size in MODELS[options.device].items())
    text = [
        f"# The trainer on documents of mixed lengths, {date.today()}", "",
        f"`{shlex.join(['python', 'benchmarks/context/trainer_documents.py', *sys.argv[1:]])}`, {where}, torch "
        f"{torch.__version__}. Llama with {sizes}, {'bf16' if gpu else 'fp32'}; bags of {tokens:,} tokens over "
        f"{len(every)} places of one context group, documents by Pareto's distribution from {tokens // 512} to "
        f"{tokens // 2:,} tokens; medians of {options.rounds} rounds, ratios within a round. "
        f"Load average of the machine before: {load:.1f}.", "",
        *lines, "",
        f"- time per token with rows divided by that with documents: {gain:.2f}, half of the rounds from {low:.2f} to "
        f"{high:.2f}{bar}",
        f"- losses of {EXACT_STEPS} steps in fp64: {difference:.0e} apart (bar: {SAME:.0e}: "
        f"{verdict(difference <= SAME)})",
    ]  # fmt: skip
    options.out.write_text("\n".join(text) + "\n", encoding="utf-8")
    print("\n".join(text))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
