"""Check that replicas are equal: ranks that differ along data alone hold the same parameters, bit for bit.

A flipped bit in memory, or a kernel that is not deterministic, makes replicas differ, and nothing else would show it:
each replica continues with its own numbers. Each rank adds up the bits of its parameters as integers, and the sums are
compared, so each rank sends one number. A single flipped bit always changes the sum, because it changes exactly one of
the added integers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.errors import ReplicasDifferError
from fourfold.gradients import REPLICA
from fourfold.grid import Grid
from fourfold.job import ranks_text
from fourfold.params import local_of

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type by bytes of an element."""


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return a checksum of all bits, one int64 on the tensors' device; the host waits for nothing."""
    sums = [found.detach().reshape(-1).view(INTEGERS[found.element_size()]).sum(dtype=torch.int64) for found in tensors]
    odd = torch.arange(len(sums), device=sums[0].device) * 2 + 1  # equal changes of two parameters do not cancel
    return (torch.stack(sums) * odd).sum()


def unlike(sums: Sequence[int]) -> list[int]:
    """Return the places whose number differs from the majority's; all places where there is no majority."""
    (most, times), *_ = Counter(sums).most_common()
    if times == len(sums):
        return []
    return [place for place, number in enumerate(sums) if number != most or 2 * times <= len(sums)]


def check_replicas(model: nn.Module, grid: Grid) -> None:
    """Raise on all ranks if the parameters of some rank differ from those of its replicas."""
    if grid.size(REPLICA) == 1:
        return
    mine = checksum(local_of(parameter) for parameter in model.parameters())
    with grid.ledger.not_counted():  # belongs to no step
        sums = comm.all_gather(mine.view(1), grid, REPLICA, label="checksums").wait().tolist()

    def judge() -> None:
        group = grid.shape.ranks_along(REPLICA, grid.rank)
        if differ := [group[place] for place in unlike(sums)]:
            others = f"the other replicas of {ranks_text(group)}" if len(differ) < len(group) else "each other"
            raise ReplicasDifferError(
                f"parameters of {ranks_text(differ)} differ from {others}, though they must be equal bit for bit: a "
                "device or its memory is at fault; take it out of the job, and resume from the last checkpoint"
            )

    grid.run_together("comparing replicas", judge)
