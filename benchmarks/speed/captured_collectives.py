"""What a collective costs inside a recorded step and outside of one: NCCL ranks that share one GPU.

    python benchmarks/speed/captured_collectives.py                          # 4 ranks along z
    python benchmarks/speed/captured_collectives.py --device cpu --count 4   # a smoke test; nothing is recorded

A sequence of collectives runs eagerly and as a CUDA graph, in turns. Over sockets NCCL has host threads that move the
bytes, and a graph calls the host for every collective to give them their work; this shows what such a call costs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch
from torch import Tensor

import fourfold as ff
from benchmarks.shared.rank_pool import RankContext, RankPool, has_gpu, multi_process_service
from fourfold import comm

NBYTES = (8 << 10, 1 << 20, 16 << 20)
"""The sizes of gathered tensors: a norm, a small weight, and a message of several weights."""
SIDE = 1024
"""The dims of the product between two collectives."""


@dataclass(frozen=True)
class CollectiveSequence:
    """A sequence of collectives."""

    name: str
    ahead: int = 0
    """The number of collectives in flight while one is waited for."""
    reduces: bool = False
    """Whether every second one is a reduce-scatter, on the other communicator of the axis."""
    multiplies: bool = False
    """Whether a product runs after each wait."""
    tensors: int = 1
    """The number of tensors of that size in each message; they are gathered and reduced together."""


SEQUENCES = [
    CollectiveSequence("one after another"),
    CollectiveSequence("two ahead", ahead=2),
    CollectiveSequence("two ahead, both lanes", ahead=2, reduces=True),
    CollectiveSequence("two ahead, both lanes, products", ahead=2, reduces=True, multiplies=True),
    CollectiveSequence("two ahead, both lanes, 12 tensors", ahead=2, reduces=True, tensors=12),
]
"""What the last one takes more than the third is what 12 tensors in one message cost, as a block of a GPT has."""


class CollectiveTimer(RankContext):
    """One rank and its sequences, eager and recorded."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        super().__init__(rank, world, device)
        self.line = self.grid(ff.Shape(z=world))
        # a graph belongs to a model, whose grid counts its collectives
        self.model = ff.models.build("gpt-tiny", self.line)
        self.steps: dict[tuple[str, int, bool], Callable[[], Tensor]] = {}

    def step(self, which: CollectiveSequence, nbytes: int, count: int, *, captured: bool) -> Callable[[], Tensor]:
        key = which.name, nbytes, captured
        if key not in self.steps:
            self.steps[key] = self._make(which, nbytes, count, captured=captured)
            for _ in range(5):  # the graph is recorded in the fourth
                self.steps[key]()
        return self.steps[key]

    def _make(self, which: CollectiveSequence, nbytes: int, count: int, *, captured: bool) -> Callable[[], Tensor]:
        device, world = self.line.device, self.world
        # each tensor is a part of the whole message, so that sequences with more of them send as many bytes
        shards = [torch.zeros(nbytes // 4 // world // which.tensors, device=device) for _ in range(which.tensors)]
        wholes = [torch.zeros(len(shard) * world, device=device) for shard in shards]
        factor = torch.zeros(SIDE, SIDE, device=device)
        done = torch.zeros((), device=device)

        def run(done: Tensor) -> Tensor:
            pending: deque[comm.Pending[list[Tensor]]] = deque()
            for number in range(count):
                if which.reduces and number % 2:
                    pending.append(comm.reduce_scatter_together(wholes, self.line, "z"))
                else:
                    pending.append(comm.all_gather_together(shards, self.line, "z"))
                if len(pending) > which.ahead:
                    done = done + pending.popleft().wait()[0][0]
                    if which.multiplies:
                        done = done + (factor @ factor)[0, 0]
            while pending:
                done = done + pending.popleft().wait()[0][0]
            return done

        if not captured:
            return lambda: run(done)
        graph = ff.StepGraph(run, self.model, always=True)
        return lambda: graph(done)


def seconds_of(timer: CollectiveTimer, which: CollectiveSequence, nbytes: int, count: int, captured: bool) -> float:
    """Return the seconds per collective on this rank."""
    step = timer.step(which, nbytes, count, captured=captured)
    timer.barrier()
    began = time.perf_counter()
    step()
    timer.synchronize()
    return (time.perf_counter() - began) / count


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--count", type=int, default=64, help="collectives of a sequence")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    print(f"{options.ranks} ranks on {options.device}, torch {torch.__version__}, us per collective, medians")
    with multi_process_service(options.device):
        pool = RankPool(options.ranks, options.device, CollectiveTimer)
        try:
            for which in SEQUENCES:
                for nbytes in NBYTES:
                    found: dict[bool, list[float]] = {False: [], True: []}
                    for _ in range(options.rounds):
                        for captured, seconds in found.items():
                            job = which, nbytes, options.count, captured
                            seconds.append(max(pool.run(seconds_of, *job)))
                    eager, replayed = (median(seconds) * 1e6 for seconds in found.values())
                    print(
                        f"{which.name:<32} {nbytes >> 10:>6} KiB {eager:>9.0f} eager {replayed:>9.0f} recorded",
                        flush=True,
                    )
        finally:
            pool.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
