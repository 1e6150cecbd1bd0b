"""Compares ranks with their peers during a run: no rank or link should be slower, and replicas must be equal.

**Stragglers.** All ranks end a step together, so the seconds of a step do not show who is slow. The waits show it: a
rank that computes slowly waits little while the others wait for it, and a slow link makes all ranks of its group wait,
the first to arrive as well as the last.

    own       seconds per step in which a rank did not wait: computation and the host
    waited    seconds per step that it waited along each axis; the last rank to arrive at a group waited for the link
              itself, so the smallest wait of a group is the link's

A single slow window is noise. A rank or link that is slower than its peers in several windows in a row is named, once.

**Replicas.** Ranks that differ along data alone hold the same parameters, and the same optimizer state unless it is
sharded over data, bit for bit. So do the two pipe ranks at the ends of a model whose embedding is tied to its head, of
that one table. A flipped bit in memory, or a kernel that is not deterministic, makes replicas differ,
and no other check shows it: each replica continues with its own numbers. Each rank adds up the bits of these tensors as
integers, and the sums are compared, so each rank sends one number. (`replicas` compares parameters along all axes, in
every loop; this check knows the optimizer's state too, and comes before a save.)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from fourfold import comm
from fourfold.axes import CUTS, FOLD, PIPE
from fourfold.checkpoint.training_state import LocalShards
from fourfold.errors import ReplicasDifferError
from fourfold.grid import Grid, Shape
from fourfold.job import ranks_text
from fourfold.replicas import checksums, unlike

SLOWER = 0.15
"""A rank or link is slow when it takes longer than the median of its peers by this share of a step. Steps of a healthy
but busy machine vary by less."""
IN_A_ROW = 3
"""Number of slow windows in a row after which a straggler is named: one or two may be a pause of the machine."""
COMPUTE = "compute"
"""The kind of a straggler that computes slowly; a slow link has its axis as kind."""


# --- stragglers


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per step of a rank, averaged over a window of steps."""

    own: float
    waited: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks that hold up the others: one that computes slowly, or the group of a slow link."""

    kind: str
    """`COMPUTE`, or the axis of the link."""
    ranks: tuple[int, ...]
    seconds: float
    """Seconds per step of its own work, or of the wait along that axis."""
    peers: float
    """The median of the same seconds over its peers."""

    def __str__(self) -> str:
        times = f"{self.seconds * 1e3:.0f} ms per step where its peers take {self.peers * 1e3:.0f}"
        if self.kind == COMPUTE:
            return f"{ranks_text(self.ranks)} is slow: its own work takes {times}"
        return f"the link of {ranks_text(self.ranks)} along {self.kind} is slow: waiting for it takes {times}"


class Stragglers:
    """Takes one window after the other and names the ranks and links that stay slow."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._streaks: dict[tuple[str, tuple[int, ...]], int] = {}

    def add(self, times: Sequence[StepTimes]) -> list[Straggler]:
        """Take a window of all ranks, in rank order; return those that have just become stragglers."""
        found = list(slow(times, self._shape))
        # Only those that are slow in this window too keep a streak: one good window ends it.
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in ((one.kind, one.ranks) for one in found)}
        return [one for one in found if self._streaks[one.kind, one.ranks] == IN_A_ROW]


def slow(times: Sequence[StepTimes], shape: Shape) -> Iterator[Straggler]:
    """Yield the ranks and links that are slower than their peers in this window."""
    step = max(one.own + sum(one.waited.values()) for one in times)
    own = median(one.own for one in times)
    for rank, one in enumerate(times):
        if one.own - own > SLOWER * step:
            yield Straggler(COMPUTE, (rank,), one.own, own)
    for axis in shape.used_axes:
        groups = sorted({tuple(shape.ranks_along(axis, rank)) for rank in range(shape.world)})
        waited = {group: min(times[rank].waited.get(axis, 0.0) for rank in group) for group in groups}
        usual = median(waited.values())
        for group, seconds in waited.items():
            if seconds - usual > SLOWER * step:
                yield Straggler(axis, group, seconds, usual)


class StepWindows:
    """Windows of steps between two meetings of all ranks; the ranks exchange the seconds of each window.

    A rank puts its figures of a window after the meeting that ends it. So at the next meeting all ranks have put
    theirs, and the first rank reads them without waiting for anyone.
    """

    MIN_STEPS = 8
    """The fewest steps of a window: in fewer steps a single pause of a busy machine would count for much."""

    def __init__(self, grid: Grid) -> None:
        self._channel = grid.channel.open("steps", fresh=True)
        self._stragglers = Stragglers(grid.shape)
        self._window = 0
        self._clear()

    def _clear(self) -> None:
        self._steps, self._own, self._waited = 0, 0.0, Counter[str]()

    def took(self, seconds: float, waited: Mapping[str, float]) -> None:
        """Count a step: its seconds, and how many of them this rank waited along each axis."""
        self._steps += 1
        self._own += seconds - sum(waited.values())
        self._waited.update(waited)

    def exchange(self) -> list[Straggler]:
        """Put the figures of the window that ends here; on the first rank return the new stragglers."""
        if self._steps < self.MIN_STEPS:
            return []
        found: list[Straggler] = []
        if self._window and self._channel.leads:
            texts = self._channel.collect(str(self._window))
            found = self._stragglers.add([StepTimes(*json.loads(text)) for text in texts.values()])
        if self._window > 1:
            self._channel.drop(str(self._window - 1))  # the first rank has read it: all ranks have met since
        self._window += 1
        waited = {axis: seconds / self._steps for axis, seconds in self._waited.items()}
        self._channel.put(str(self._window), json.dumps([self._own / self._steps, waited]))
        self._clear()
        return found


# --- replicas


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of all bits, one int64 on the tensors' device; the host waits for nothing."""
    sums = checksums(tensors)
    # Each sum has its own odd factor, so that equal changes of two parameters do not cancel; odd, to lose no bit.
    return (sums * (torch.arange(len(sums), device=sums.device) * 2 + 1)).sum()


@dataclass(frozen=True, slots=True)
class Copies:
    """A parameter that two pipe ranks hold, each with its optimizer state."""

    name: str
    ends: tuple[int, int]
    """Their pipe coordinates."""


def check_replicas(shards: LocalShards, grid: Grid, copies: Copies | None = None) -> None:
    """Raise on all ranks if the tensors of some rank differ from those of its replicas, or two copies on pipe ranks."""
    groups: list[tuple[Sequence[int], Sequence[int]]] = []
    with grid.ledger.not_counted():  # the check belongs to no step, and the planner predicts steps
        for view in (CUTS, FOLD) if grid.shape.folded else (CUTS,):
            replicas = view[-1]
            if grid.size(replicas) > 1:
                of_view = [shard for shard in shards.values() if shard.storage.view is view]
                # a count of steps may be on the host, and all sums are added up on the device
                held = [shard.local.to(grid.device) for shard in of_view if replicas not in shard.storage.axes]
                sums = comm.all_gather(checksum(held).view(1), grid, replicas, label="checksums").wait().tolist()
                groups.append((grid.shape.ranks_along(replicas, grid.rank), sums))
        if copies is not None:
            held = [shard.local.to(grid.device) for name, shard in shards.items() if copies.name in name]
            line = torch.zeros(grid.size(PIPE), dtype=torch.int64, device=grid.device)
            if held:
                line[grid.coords[PIPE]] = checksum(held)
            sums = comm.all_reduce(line, grid, PIPE, label="checksums").wait().tolist()
            along = grid.shape.ranks_along(PIPE, grid.rank)
            groups.append(([along[end] for end in copies.ends], [sums[end] for end in copies.ends]))
    if not groups:
        return

    def judge() -> None:
        for group, sums in groups:
            if differ := [group[place] for place in unlike(sums)]:
                others = f"the other replicas of {ranks_text(group)}" if len(differ) < len(group) else "each other"
                raise ReplicasDifferError(
                    f"parameters or optimizer state of {ranks_text(differ)} differ from {others}, though they must be "
                    "equal bit for bit: a device or its memory is at fault; take it out of the job, and resume from "
                    "the last checkpoint"
                )

    # Only the ranks of one group see the difference; together all ranks raise, so that none waits for them.
    grid.run_together("comparing replicas", judge)
