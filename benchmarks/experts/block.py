"""Forward and backward of a mixture of experts on several ranks, beside expert parallelism in plain torch.

    python benchmarks/experts/block.py                  # 4 NCCL ranks, each with a quarter of a GPU
    python benchmarks/experts/block.py --device cpu     # 4 gloo ranks of this machine
    python benchmarks/experts/block.py --wait           # and how long the host waits for counts
    python benchmarks/experts/block.py --wait --layers 4    # a whole model of 4 blocks, with attention

A block is a router, the dispatch of tokens, gated experts and the combination of what they return; no attention, no
optimizer. With `--layers` it is a model of so many blocks (`whole_model.py`). Every rank has its own tokens; weights
and tokens of all sides are equal, and outputs and gradients are compared before anything is timed. Each side of
Fourfold is a grid; `halves` cuts the tokens of a rank into two parts that take turns. Sides take turns, one step each
in every round, in one order and then in the other; a step takes as long as its slowest rank. Beside each step of
Fourfold its computation alone and its communication alone are timed: the larger of both bounds a step whose messages
hide behind its products.

Without attention there is nothing behind which the first dispatch could hide, so waits for counts (`--wait`) are the
longest that a model can have; `--layers` tells how long they are in one. With `--budget` no round begins that would not
end in time; what was measured is written.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

import fourfold as ff
from benchmarks.experts.bounds import Bounds, MessageBuffers
from benchmarks.experts.plain_experts import ExpertParallelBlock
from benchmarks.experts.waits import HostWaits, WaitTimes, waits_of_dispatch
from benchmarks.experts.whole_model import ExpertParallelModel, FourfoldWholeModel
from benchmarks.experts.workload import (
    LARGEST_ERROR,
    BlockSide,
    BlockSize,
    FourfoldBlock,
    Way,
    errors,
    told_error,
    weights_of,
)
from benchmarks.shared.rank_pool import PARTITION, RankContext, RankPool, has_gpu, multi_process_service
from benchmarks.shared.tables import RESULTS, markdown_table, verdict
from benchmarks.speed.gpu_ranks import Clock, OutOfTime

PLAIN = "plain torch"
EXPERTS, CHOSEN = (16, 64), (2, 8)
SIZES = {"cuda": (2048, 768, 4096), "cpu": (256, 128, 128)}
"""Width, hidden units of an expert and tokens of a rank; on a GPU the experts of Qwen3-30B-A3B."""
ROUNDS = 7
BOUND_BAR, PEER_BAR = 1.15, 1.1
"""The most that a step may take of the larger of its bounds, and how much faster than plain torch Fourfold is to be."""
TIMEOUT = 300.0


class MeasuredStep(NamedTuple):
    """Seconds of one step of one side on one rank."""

    step: float
    compute: float | None
    communication: float | None
    """Of the bounds; plain torch has none."""
    waits: WaitTimes | None


class BlockRank(RankContext):
    """A rank with the sides of one question."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        super().__init__(rank, world, device)
        self.sides: dict[str, BlockSide] = {}
        self.bounds: dict[str, Bounds] = {}
        self.waits: dict[str, HostWaits] = {}


def prepare(state: BlockRank, size: BlockSize, ways: Sequence[Way]) -> dict[str, float]:
    """Build all sides on this rank; return how much the results of each differ from those of plain torch."""
    state.sides.clear()
    state.bounds.clear()
    buffers = MessageBuffers()
    plain: ExpertParallelModel | ExpertParallelBlock
    make: Callable[[BlockRank, Way], FourfoldWholeModel | FourfoldBlock]
    if size.layers:
        plain, make = ExpertParallelModel(state, size), partial(FourfoldWholeModel, size=size)
    else:
        weights = weights_of(size, state.device)
        plain, make = ExpertParallelBlock(state, size, weights), partial(FourfoldBlock, size=size, weights=weights)
    state.sides[PLAIN], state.waits[PLAIN] = plain, plain.waits
    right, found = plain.results(), {}
    # in bf16 whole models are compared by their loss alone: rounding sends some tokens to other experts,
    # and moves the gradients of both sides by up to a quarter of their norm from those in fp32
    gradients = not size.layers or state.device.type == "cpu"
    for way in ways:
        side = make(state, way)
        found[str(way)] = errors(side.results(), right, gradients=gradients)
        state.sides[str(way)], state.waits[str(way)] = side, HostWaits(state.device)
        state.bounds[str(way)] = Bounds(side.step, side.grid, buffers)
        state.bounds[str(way)].compute()
    return found


def measure_round(state: BlockRank, names: Sequence[str], with_waits: bool) -> dict[str, MeasuredStep]:
    """Take one step of each side in this order."""
    found = {}
    for name in names:
        step, bounds, waits = state.sides[name].step, state.bounds.get(name), state.waits[name]
        alone = (None, None) if bounds is None else (timed(state, bounds.compute), timed(state, bounds.communicate))
        found[name] = MeasuredStep(timed(state, step), *alone, None)
        waits.take()
        if with_waits:  # of a step of its own, because events take time
            with waits_of_dispatch(waits):
                timed(state, step)
            found[name] = found[name]._replace(waits=waits.take())
    return found


def timed(state: BlockRank, act: Callable[[], object]) -> float:
    state.barrier()
    began = time.perf_counter()
    act()
    state.synchronize()
    return time.perf_counter() - began


def ways_on(ranks: int) -> list[Way]:
    """Return Fourfold's sides: experts over all ranks, over half of them, and weights that travel instead."""
    half = ranks // 2
    return [
        Way(ff.Shape(z=ranks, expert=ranks)),
        Way(ff.Shape(z=ranks, expert=ranks), 2),
        Way(ff.Shape(data=ranks, expert=ranks)),
        Way(ff.Shape(data=ranks, expert=ranks), 2),
        Way(ff.Shape(z=ranks, expert=half, ez=2)),
        Way(ff.Shape(z=ranks, expert=half, ez=2), 2),
        Way(ff.Shape(z=ranks)),
        Way(ff.Shape(x=2, z=half, expert=ranks)),
        Way(ff.Shape(x=2, z=half, expert=ranks), 2),
        Way(ff.Shape(x=2, z=half, expert=half, ex=2)),
        Way(ff.Shape(x=2, z=half)),
        Way(ff.Shape(x=2, z=half), 2),
    ]


@dataclass
class Answer:
    """What was measured of one size of a block."""

    size: BlockSize
    errors: dict[str, float] = field(default_factory=dict)
    rounds: list[dict[str, MeasuredStep]] = field(default_factory=list)
    """The slowest rank of each side in each round."""

    def add(self, every: Sequence[dict[str, MeasuredStep]]) -> None:
        """Add a round, from what every rank measured."""
        self.rounds.append({name: slowest([found[name] for found in every]) for name in every[0]})

    def ratios(self, name: str) -> list[float]:
        """Return the time of a side as a share of plain torch's in the same round."""
        return [found[name].step / found[PLAIN].step for found in self.rounds]

    def of_bound(self, name: str) -> float | None:
        """Return the time of a step as a share of the larger of its bounds, both medians of all rounds."""
        bounds = [self.median(name, each) for each in ("compute", "communication")]
        known = [bound for bound in bounds if bound is not None]
        step = self.median(name, "step")
        return step / max(known) if known and step is not None else None

    def median(self, name: str, what: str) -> float | None:
        found = [getattr(each[name], what) for each in self.rounds]
        return None if None in found else statistics.median(found)

    @property
    def fastest(self) -> str:
        """The side of Fourfold that takes the least of plain torch's time."""
        return min(self.errors, key=lambda name: statistics.median(self.ratios(name)))


def slowest(every: Sequence[MeasuredStep]) -> MeasuredStep:
    """Return the longest of all ranks, of each part."""
    bounds = [[getattr(found, what) for found in every] for what in ("compute", "communication")]
    waits = [found.waits for found in every if found.waits is not None]
    return MeasuredStep(
        max(found.step for found in every),
        *(None if None in times else max(times) for times in bounds),
        WaitTimes(*(max(each) for each in zip(*waits, strict=True))) if waits else None,
    )


def measure(pool: RankPool, answer: Answer, ways: Sequence[Way], rounds: int, with_waits: bool, clock: Clock) -> None:
    """Measure one size of a block until it has this many rounds."""
    began, names = clock.spent, [PLAIN, *map(str, ways)]
    every = pool.run(prepare, answer.size, ways, timeout=TIMEOUT)
    pool.run(measure_round, names, with_waits, timeout=TIMEOUT)  # a warm-up
    answer.errors = {name: max(found[name] for found in every) for name in every[0]}
    print(f"{answer.size.experts} experts, {answer.size.chosen} chosen: warm after {clock.spent - began:.0f} s")
    for number in range(rounds):
        began = clock.spent
        order = names if number % 2 else names[::-1]
        answer.add(pool.run(measure_round, order, with_waits, timeout=TIMEOUT))
        print(f"  round {number + 1} of {rounds} took {clock.spent - began:.1f} s", flush=True)
        if number + 1 < rounds:
            clock.require("a round", clock.spent - began)


def step_rows(answer: Answer, device: str) -> list[list[str]]:
    """Return a row for each side."""
    rows = []
    for name in (PLAIN, *answer.errors):
        ratios = answer.ratios(name)
        times = [answer.median(name, what) for what in ("step", "compute", "communication")]
        of_bound = answer.of_bound(name)
        error = answer.errors.get(name)
        rows.append(
            [
                str(answer.size.experts),
                str(answer.size.chosen),
                name,
                *("" if seconds is None else f"{1e3 * seconds:.1f}" for seconds in times),
                "" if of_bound is None else f"{of_bound:.2f}",
                f"{statistics.median(ratios):.2f}",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
                "" if error is None else told_error(error, LARGEST_ERROR[device]),
            ]
        )
    return rows


def bars(answer: Answer) -> list[str]:
    """Return what Fourfold's fastest side is held to, as lines of a list."""
    name, of = answer.fastest, f"{answer.size.experts} experts, {answer.size.chosen} chosen"
    faster, of_bound = 1 / statistics.median(answer.ratios(name)), answer.of_bound(name)
    if of_bound is None:
        raise ValueError(f"{name} was measured without its bounds")
    return [
        f"- {of}: {PEER_BAR} times as fast as plain torch: {verdict(faster >= PEER_BAR)}, {faster:.2f} times ({name})",
        f"- {of}: at most {BOUND_BAR} of the larger of computation alone and communication alone: "
        f"{verdict(of_bound <= BOUND_BAR)}, {of_bound:.2f} ({name})",
    ]


def wait_rows(answer: Answer) -> list[list[str]]:
    """Return a row for each side that waits for counts."""
    rows = []
    for name in (PLAIN, *answer.errors):
        waits = [found[name].waits for found in answer.rounds]
        known = [each for each in waits if each is not None and each.number]
        if not known:
            continue
        host, idle = (
            statistics.median(times) for times in zip(*((each.host, each.idle) for each in known), strict=True)
        )
        step = answer.median(name, "step") or 0.0
        rows.append(
            [
                str(answer.size.experts),
                str(answer.size.chosen),
                name,
                str(known[0].number),
                f"{1e3 * host:.2f}",
                f"{1e3 * idle:.2f}",
                f"{idle / step:.1%}",
            ]
        )
    return rows


def page(answers: Sequence[Answer], device: str, where: str) -> str:
    """Return the page of results."""
    measured = [answer for answer in answers if answer.rounds]
    counts = sorted({len(answer.rounds) for answer in measured})
    head = [
        "experts", "chosen", "side", "ms", "computation alone", "communication alone", "of the larger",
        "of plain torch's", "all rounds", "error",
    ]  # fmt: skip
    rows = [row for answer in measured for row in step_rows(answer, device)]
    text = (
        "# A mixture of experts beside expert parallelism in plain torch\n\n"
        f"`{shlex.join(['python', 'benchmarks/experts/block.py', *sys.argv[1:]])}`, {date.today()}, {where}, torch "
        f"{torch.__version__}. Forward and backward. {answers[0].size.about}; "
        f"{'bf16' if device == 'cuda' else 'fp32'}. Medians of {' or '.join(map(str, counts))} rounds in which sides "
        "took turns, ratios within a round; errors are differences from plain torch, as shares of norms."
    )
    if answers[0].size.layers and device == "cuda":
        text += " Errors are those of the losses."
    if device == "cpu":
        text += " Messages take the time of the cores that compute, so that little can hide behind anything else."
    text += "\n\n"
    text += "\n".join([*markdown_table(head, rows), "", *(bar for answer in measured for bar in bars(answer))]) + "\n"
    if waiting := [row for answer in measured for row in wait_rows(answer)]:
        head = ["experts", "chosen", "side", "waits in a step", "host waits, ms", "device idle, ms", "idle, of a step"]
        text += (
            "\n## Waits for counts\n\nHow long the host waits until it knows how many rows come, and how long the "
            "device has nothing to compute meanwhile; on the CPU the host is the device. In a block without attention "
            "nothing else can be computed while the first counts travel.\n\n"
        )
        text += "\n".join(markdown_table(head, waiting)) + "\n"
    missing = [f"{each.size.experts} experts, {each.size.chosen} chosen" for each in answers if not each.rounds]
    return text + (f"\nNot measured, for lack of time: {'; '.join(missing)}.\n" if missing else "")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--experts", type=int, nargs="+", default=EXPERTS)
    parser.add_argument("--chosen", type=int, nargs="+", default=CHOSEN, help="how many experts a token chooses")
    parser.add_argument("--tokens", type=int, help="of a rank")
    parser.add_argument("--layers", type=int, default=0, help="measure a model of so many blocks, with attention")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--sides", nargs="+", help="grids of Fourfold, such as 'z=4 expert=4'; default: all")
    parser.add_argument("--wait", action="store_true", help="also measure how long the host waits for counts")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds that the call may take")
    parser.add_argument("--out", type=Path, help="default: a page of today in benchmarks/results")
    options = parser.parse_args(arguments)
    if options.ranks < 2 or options.ranks % 2:
        parser.error(f"--ranks {options.ranks}: grids with expert={options.ranks} and x=2 need an even number of ranks")
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: a median needs at least 1")
    ways = [
        way
        for way in ways_on(options.ranks)
        if not options.sides or any(str(way).removeprefix("fourfold ") == side for side in options.sides)
    ]
    if not ways:
        parser.error(f"--sides {' '.join(options.sides)}: sides are {'; '.join(map(str, ways_on(options.ranks)))}")
    width, hidden, tokens = SIZES[options.device]
    answers = [
        Answer(BlockSize(experts, chosen, width, hidden, options.tokens or tokens, options.layers))
        for experts in options.experts
        for chosen in options.chosen
    ]
    os.environ[PARTITION] = str(100 // options.ranks)
    load = os.getloadavg()[0]
    try:
        measure_all(answers, ways, options)
    except OutOfTime as late:
        print(late)
    finally:  # ranks that fail leave what was measured before
        if any(answer.rounds for answer in answers):
            cores = f"{os.cpu_count()} {os.uname().machine} cores"
            device = torch.cuda.get_device_name(0) if options.device == "cuda" else cores
            where = f"{options.ranks} ranks that share {device}, load average before {load:.1f}"
            out = options.out or RESULTS / f"{date.today()}-experts-{options.device}.md"
            out.write_text(page(answers, options.device, where))
            print(out.read_text())
    return int(any(error > LARGEST_ERROR[options.device] for answer in answers for error in answer.errors.values()))


def measure_all(answers: Sequence[Answer], ways: Sequence[Way], options: argparse.Namespace) -> None:
    """Measure all sizes of a block on one pool of ranks."""
    clock = Clock(options.budget)
    with multi_process_service(options.device):
        pool = RankPool(options.ranks, options.device, BlockRank)
        try:
            for number, answer in enumerate(answers):
                if number:
                    clock.require("the next size", clock.spent / number)
                measure(pool, answer, ways, options.rounds, options.wait, clock)
        finally:
            pool.close()


if __name__ == "__main__":
    raise SystemExit(main())
