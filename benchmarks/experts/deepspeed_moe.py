"""A mixture of experts beside DeepSpeed's MoE layer: forward and backward on gloo ranks, every side in one run.

    pip install 'fourfold[peers]'
    python benchmarks/experts/deepspeed_moe.py                                    # 4 ranks of this machine
    python benchmarks/experts/deepspeed_moe.py --nodes 2 --ranks 2 --mbit 1000    # 2 emulated nodes; needs root

Both compute the same: the same weights and tokens, each token's experts chosen in fp32 with scores that sum to 1, no
token dropped, the router's gradient summed over all ranks. Outputs and gradients are compared before anything is timed.
DeepSpeed's `MoE(drop_tokens=False)` sends equally many rows for every expert, as many as the fullest one has, and
computes them all. Sides take turns, one step each in every round, in one order and then in the other; a step takes as
long as its slowest rank.

Ranks are processes that share the machine's cores. Without `--nodes` they send over loopback: times tell what the host
and copies cost, not how links would be used. With it torchrun starts them on an emulated cluster
(`cluster/emulate.py`), whose nodes are joined by links of `--mbit`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from benchmarks.cluster.each_rank import add_ranks, ranks_of, run_rank
from benchmarks.experts.workload import (
    LARGEST_ERROR,
    BlockResult,
    BlockSide,
    BlockSize,
    FourfoldBlock,
    Way,
    errors,
    joined,
    tokens_of,
    told_error,
    weights_of,
)
from benchmarks.shared.deepspeed_cpu import start_deepspeed
from benchmarks.shared.rank_pool import RankContext
from benchmarks.shared.tables import RESULTS, markdown_table, verdict

DEEPSPEED = "DeepSpeed"
BAR = 1.0
"""The most that the fastest grid may take of DeepSpeed's time."""
ROUNDS = 7
SIZES = ((16, 2), (16, 4))
"""How many experts there are, and how many a token chooses."""


class SideRounds(NamedTuple):
    """What a rank measured of one side."""

    seconds: list[float]
    error: float
    """The largest difference from DeepSpeed's results, as a share of the norm of what differs."""


class DeepSpeedExpert(nn.Module):
    """One expert, as a user of DeepSpeed would write it."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, a: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(a)) * self.up(a))


class DeepSpeedBlock:
    """DeepSpeed's side: its layer with an equal share of the experts on each rank."""

    def __init__(self, size: BlockSize, weights: Mapping[str, Tensor]) -> None:
        start_deepspeed()
        from deepspeed.moe.layer import MoE as DeepSpeedMoE

        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.layer = DeepSpeedMoE(
            size.width,
            DeepSpeedExpert(size.width, size.hidden),
            size.experts,
            ep_size=ranks,
            k=size.chosen,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )
        self.layer.set_deepspeed_parallelism()
        self.router = self.layer.deepspeed_moe.gate.wg.weight
        self.experts = list(self.layer.deepspeed_moe.experts.deepspeed_experts)
        with torch.no_grad():
            self.router.copy_(weights["router.weight"])
            for number, expert in enumerate(self.experts, start=rank * len(self.experts)):
                for name in ("gate", "up", "down"):
                    getattr(expert, name).weight.copy_(weights[name][number])
        a, self.dout = tokens_of(size, rank, torch.device("cpu"))
        self.a = a.requires_grad_()

    def step(self) -> tuple[Tensor, Tensor]:
        found = self._forward_backward()
        self.layer.zero_grad()
        return found

    def results(self) -> BlockResult:
        out, da = self._forward_backward()
        whole = {"router.weight": self.router.grad.clone()}
        for name in ("gate", "up", "down"):
            whole[name] = joined(torch.stack([getattr(expert, name).weight.grad for expert in self.experts]))
        self.layer.zero_grad()
        return BlockResult(out, da, whole)

    def _forward_backward(self) -> tuple[Tensor, Tensor]:
        out, *_ = self.layer(self.a)
        out.backward(self.dout)
        for expert in self.experts:  # an expert without tokens
            for parameter in expert.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # as DeepSpeed's engine does for what is not an expert's
        dist.all_reduce(self.router.grad)  # noqa: TID251
        da: Tensor = self.a.grad  # type: ignore[assignment]
        self.a.grad = None
        return out.detach(), da


def ways_on(ranks: int) -> list[Way]:
    shapes = [ff.Shape(z=ranks, expert=ranks), ff.Shape(data=ranks, expert=ranks), ff.Shape(z=ranks)]
    if ranks % 2 == 0:
        shapes += [ff.Shape(x=2, z=ranks // 2, expert=ranks), ff.Shape(z=ranks, expert=ranks // 2, ez=2)]
    return [Way(shape) for shape in shapes]


def measure_size(context: RankContext, size: BlockSize, rounds: int) -> dict[str, SideRounds]:
    """Run every side in turn, on this rank."""
    weights = weights_of(size, context.device)
    deepspeed = DeepSpeedBlock(size, weights)
    right, found = deepspeed.results(), {DEEPSPEED: SideRounds([], 0.0)}
    sides: dict[str, BlockSide] = {DEEPSPEED: deepspeed}
    for way in ways_on(dist.get_world_size()):
        side = sides[str(way)] = FourfoldBlock(context, way, size, weights)
        found[str(way)] = SideRounds([], errors(side.results(), right))
    names = list(sides)
    for number in range(-1, rounds):
        for name in names if number % 2 else names[::-1]:
            context.barrier()
            began = time.perf_counter()
            sides[name].step()
            if number >= 0:  # the first is a warm-up
                found[name].seconds.append(time.perf_counter() - began)
    return found


def measure_all(context: RankContext, setting: dict[str, Any]) -> list[dict[str, SideRounds]]:
    """Measure every size of the setting on this rank."""
    return [measure_size(context, BlockSize(*size), setting["rounds"]) for size in setting["sizes"]]


def table(every: Sequence[Sequence[Mapping[str, Any]]], sizes: Sequence[BlockSize]) -> list[str]:
    """Return the lines of the table, by what every rank found for every size."""
    rows = []
    for number, size in enumerate(sizes):
        ranks = {side: [SideRounds(*found[number][side]) for found in every] for side in every[0][number]}
        times = {
            side: [max(each) for each in zip(*(one.seconds for one in found), strict=True)]
            for side, found in ranks.items()
        }
        ratios = {
            side: [own / peer for own, peer in zip(found, times[DEEPSPEED], strict=True)]
            for side, found in times.items()
        }
        fastest = min((side for side in times if side != DEEPSPEED), key=lambda side: statistics.median(ratios[side]))
        for side, found in times.items():
            low, ratio, high = statistics.quantiles(ratios[side])
            rows.append(
                [
                    str(size.experts),
                    str(size.chosen),
                    side,
                    f"{1e3 * statistics.median(found):.1f}",
                    f"{ratio:.2f}",
                    f"{low:.2f} to {high:.2f}",
                    f"{BAR}: {verdict(ratio <= BAR)}" if side == fastest else "",
                    ""
                    if side == DEEPSPEED
                    else told_error(max(one.error for one in ranks[side]), LARGEST_ERROR["cpu"]),
                ]
            )
    head = ["experts", "chosen", "side", "ms", "of DeepSpeed's", "half of the rounds", "bar of the fastest", "error"]
    return list(markdown_table(head, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_ranks(parser, ROUNDS)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=128, help="hidden units of an expert")
    parser.add_argument("--tokens", type=int, default=256, help="of a rank")
    options = parser.parse_args(arguments)
    if options.rank_of is not None:
        return run_rank(options.rank_of, measure_all)
    ranks = ranks_of(parser, options)
    sizes = [BlockSize(*size, options.width, options.hidden, options.tokens) for size in SIZES]
    setting = {"sizes": [list(vars(size).values()) for size in sizes], "rounds": options.rounds}
    load = os.getloadavg()[0]
    every = ranks.measure(__file__, measure_all, setting)
    text = (
        "# A mixture of experts beside DeepSpeed's MoE\n\n"
        f"`{shlex.join(['python', 'benchmarks/experts/deepspeed_moe.py', *sys.argv[1:]])}`, {date.today()}, {ranks}, "
        f"torch {torch.__version__}, DeepSpeed {version('deepspeed')}. Forward and backward. {sizes[0].about}; fp32. "
        f"Medians of {options.rounds} rounds, ratios within a round; errors are differences of outputs and gradients "
        f"from DeepSpeed's. Load average of the machine before: {load:.1f}.\n\n" + "\n".join(table(every, sizes))
    )
    (options.out or RESULTS / f"{date.today()}-{ranks.named('experts-deepspeed')}.md").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
