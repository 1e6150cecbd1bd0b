"""Compares parameters that several ranks must hold alike, and names the one that drifted.

A rank holds a copy of a parameter along every axis that does not cut it: a norm's weight along x, everything along
data. Copies stay equal because all their ranks add the same sums to them. Noise drawn from a seed of the rank, weights
initialised anew on each rank, a flipped bit or a kernel that is not deterministic end that, and nothing else shows it:
each rank goes on with its own numbers.

The copies are compared at the end of the first two backward passes that complete gradients, before and after the first
step of the optimizer, and at every `EVERY`-th. All ranks complete gradients together, so all of them take part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

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
"""Steps between two comparisons: each reads all parameters once and makes the host wait for the device."""
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


class ReplicaCheck:
    """Compares the copies of one model's parameters, now and then."""

    def __init__(self, grid: Grid, parameters: Mapping[str, tuple[Tensor, Spec]]) -> None:
        self._grid, self._parameters, self._steps = grid, parameters, 0

    def step(self) -> None:
        """Count a backward pass that completed gradients, and compare copies if it is time."""
        self._steps += 1
        if self._steps <= 2 or self._steps % EVERY == 0:
            self.compare()

    def compare(self) -> None:
        """Raise on all ranks of this pipe coordinate if some of them differ where they must be equal."""
        grid = self._grid
        on_meta = any(parameter.is_meta for parameter, _ in self._parameters.values())
        if len(grid.channel.ranks) == 1 or on_meta or grid.muted or grid.recording is not None:
            return
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
                return
            # only the ranks of one group see that they differ; all must raise, so that none waits for them
            differs = torch.cat([(found != found[:1]).any(0) for *_, found in compared]).float()
            for axis in CUTS:
                differs = comm.all_reduce(differs, grid, axis, label="checksums").wait()
        if differs.any().item():
            raise ReplicasDifferError(self._describe(compared, differs.bool().tolist()))

    def _describe(self, compared: Sequence[tuple[str, list[str], Tensor]], differs: Sequence[bool]) -> str:
        at, groups, along = 0, [], []
        bad: dict[str, None] = {}
        for axis, names, found in compared:
            for column, name in enumerate(names):
                if differs[at + column]:
                    bad[name] = None
                    along.append(axis)
                    if places := unlike(found[:, column].tolist()):
                        ranks = self._grid.shape.ranks_along(axis, self._grid.rank)
                        groups.append(ranks_text([self._grid.ranks[ranks[place]] for place in places]))
            at += len(names)
        where = groups[0] if groups else "other ranks"
        return (
            f"{name_some(bad)} must be equal on all ranks along {along[0]} and is not ({where}): weights or gradients "
            "were changed by numbers of one rank, such as noise drawn from a seed of the rank or an initialisation "
            "after ff.parallelize, or a device or its memory is at fault; draw from the same seed on all ranks "
            "(torch.manual_seed), initialise before ff.parallelize, or take the device out"
        )
