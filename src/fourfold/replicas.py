"""Compares parameters that several ranks must hold alike, and names the one that drifted.

A rank holds a copy of a parameter along every axis that does not cut it: a norm's weight along x, everything along
data. Copies stay equal because all their ranks add the same sums to them. Noise drawn from a seed of the rank, weights
initialised anew on each rank, a flipped bit or a kernel that is not deterministic end that, and nothing else shows it:
each rank goes on with its own numbers.

The copies are compared at the end of the first two backward passes that complete gradients, before and after the first
step of the optimizer, and at every `EVERY`-th. All ranks complete gradients together, so all of them take part.

Along an axis that a gradient owes, all ranks get the same sum, so a difference of one bit is an error. Along the others
each rank computes the gradient again. On a GPU that may round differently where kernels are not deterministic, and Adam
magnifies the rounding of a gradient that is almost zero. There a difference is a warning.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fourfold import comm
from fourfold.axes import CUTS, FOLD
from fourfold.errors import ReplicasDifferError, name_some
from fourfold.grid import Grid
from fourfold.job import ranks_text
from fourfold.layout import Spec
from fourfold.params import shards_of

EVERY = 100
"""Steps between two comparisons: each reads all parameters once."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type by bytes of an element."""


def checksums(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of all bits of each tensor, as integers, in one int64 tensor; the host waits for nothing.

    A single flipped bit always changes the sum, because it changes exactly one of the added integers.
    """
    bits = [torch.view_as_real(found) if found.is_complex() else found for found in (each.detach() for each in tensors)]
    return torch.stack([each.reshape(-1).view(INTEGERS[each.element_size()]).sum(dtype=torch.int64) for each in bits])


def unlike(sums: Sequence[int]) -> list[int]:
    """Return the places whose number differs from the majority's; all places where there is no majority."""
    (most, times), *_ = Counter(sums).most_common()
    if times == len(sums):
        return []
    return [place for place, number in enumerate(sums) if number != most or 2 * times <= len(sums)]


class Comparison(NamedTuple):
    """A comparison of copies whose verdict may still be on its way to the host."""

    sums: Sequence[tuple[str, list[str], Tensor]]
    """By axis: the names of parameters, and their checksums on all ranks along the axis."""
    differs: Tensor
    """Whether the copies of each of them differ anywhere, on the host."""
    arrived: torch.cuda.Event | None


class ReplicaCheck:
    """Compares the copies of one model's parameters, now and then.

    On a GPU the host reads the verdict at the end of the next backward pass, so that it never waits for this one.
    """

    def __init__(self, grid: Grid, parameters: Mapping[str, tuple[Tensor, Spec]]) -> None:
        self._grid, self._parameters, self._steps = grid, parameters, 0
        self._running: Comparison | None = None
        self._warned = False

    def step(self) -> None:
        """Count a backward pass that completed gradients, and compare copies if it is time."""
        if self._grid.recording is not None:
            return  # replays would repeat the comparison, and a recording may not wait for the last one
        if self._running is not None:
            self._judge()
        self._steps += 1
        if self._steps <= 2 or self._steps % EVERY == 0:
            self._running = self._launch()
            if self._running is not None and self._running.arrived is None:
                self._judge()

    def compare(self) -> None:
        """Raise on all ranks of this pipe coordinate if some of them differ where they must be equal, or warn."""
        self._running = self._launch()
        self._judge()

    def _launch(self) -> Comparison | None:
        """Compare the copies on the device; return None if there is nothing to compare."""
        grid = self._grid
        on_meta = any(parameter.is_meta for parameter, _ in self._parameters.values())
        if len(grid.channel.ranks) == 1 or on_meta or grid.muted:
            return None
        compared: list[tuple[str, list[str], Tensor]] = []
        with grid.ledger.not_counted():  # it belongs to no step, and the planner predicts steps
            for axis in (*CUTS, *(FOLD if grid.shape.folded else ())):
                names = [
                    name
                    for name, (_, spec) in self._parameters.items()
                    if axis in spec.view and axis not in spec.storage.axes
                ]
                if grid.size(axis) > 1 and names:
                    own = checksums(shards_of([self._parameters[name][0] for name in names]))
                    compared.append((axis, names, comm.all_gather(own[None], grid, axis, label="checksums").wait()))
            if not compared:
                return None
            # only the ranks of one group see that they differ; all must raise, so that none waits for them
            differs = torch.cat([(found != found[:1]).any(0) for *_, found in compared]).float()
            for axis in CUTS:
                differs = comm.all_reduce(differs, grid, axis, label="checksums").wait()
        if not differs.is_cuda:
            return Comparison(compared, differs, None)
        on_host = torch.empty_like(differs, device="cpu", pin_memory=True).copy_(differs, non_blocking=True)
        (arrived := torch.cuda.Event()).record()
        return Comparison(compared, on_host, arrived)

    def _judge(self) -> None:
        """Raise or warn on all ranks if the copies compared last differ."""
        compared, self._running = self._running, None
        if compared is None:
            return
        if compared.arrived is not None:
            compared.arrived.synchronize()
        if not compared.differs.any():
            return
        columns = [(axis, name, found[:, at]) for axis, names, found in compared.sums for at, name in enumerate(names)]
        bad = [column for column, flag in zip(columns, compared.differs.tolist(), strict=True) if flag]
        if any(self._is_exact(axis, name) for axis, name, _ in bad):
            raise ReplicasDifferError(self._describe([each for each in bad if self._is_exact(*each[:2])]))
        if self._grid.rank == 0 and not self._warned:
            warnings.warn(self._describe(bad), stacklevel=2)
        self._warned = True

    def _is_exact(self, axis: str, name: str) -> bool:
        """Return whether the copies of a parameter along an axis must be equal in every bit."""
        parameter, spec = self._parameters[name]
        return axis in spec.owes or parameter.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()

    def _describe(self, bad: Sequence[tuple[str, str, Tensor]]) -> str:
        """Name parameters that differ, given the axis, the name, and the checksums on the ranks along the axis."""
        groups = []
        for axis, _, sums in bad:
            if places := unlike(sums.tolist()):
                ranks = self._grid.shape.ranks_along(axis, self._grid.rank)
                groups.append(ranks_text([self._grid.ranks[ranks[place]] for place in places]))
        where = groups[0] if groups else "other ranks"
        names = dict.fromkeys(name for _, name, _ in bad)
        return (
            f"{name_some(names)} must be equal on all ranks along {bad[0][0]} and is not ({where}): weights or "
            "gradients were changed by numbers of one rank, such as noise drawn from a seed of the rank or an "
            "initialisation after ff.parallelize, or a device or its memory is at fault; draw from the same seed on "
            "all ranks (torch.manual_seed), initialise before ff.parallelize, or take the device out"
        )
