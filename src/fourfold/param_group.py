"""Parameters that travel over z together: gathered in one message before their use, reduced in one after it.

The overlap engine launches the gathers before their use and keeps the gathered weights until the last half of the batch
has used them. Gradients are summed over the halves, reduce-scattered behind the rest of backward, and deposited in
`Gradients`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TypeVar

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.axes import AXES
from fourfold.comm import Pending
from fourfold.engine import Engine, WeightGather, in_backward
from fourfold.gradients import ForwardPass, Gradients
from fourfold.grid import Grid
from fourfold.layout import GATHERED, Spec
from fourfold.params import local_of
from fourfold.policy import Policy

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity, because tensors have no truth value
class GroupMember:
    """A parameter and its sizes in compute layout."""

    parameter: nn.Parameter
    rows: int
    """The length of dim 0 on this rank."""
    most: int
    """The number of elements on the rank that holds most of them, so that all ranks know the same number."""

    @classmethod
    def of(cls, parameter: nn.Parameter, spec: Spec, grid: Grid) -> GroupMember:
        box = partial(spec.storage.compute.box, spec.shape, grid.shape.sizes)
        return cls(parameter, len(box(grid.coords)[0]), prod(len(part) for part in box(dict.fromkeys(AXES, 0))))


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters that are gathered over z in one message, and whose gradients are reduced in one."""

    grid: Grid
    policy: Policy
    gradients: Gradients
    label: str
    members: tuple[GroupMember, ...]
    during: ForwardPass
    """The forward pass that uses the members. It counts their uses and the gradients that came for them."""

    @property
    def compute_dtype(self) -> torch.dtype:
        own = self.members[0].parameter.dtype
        return self.policy.compute_dtype or own if own.is_floating_point else own

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.policy.reduce_dtype or self.members[0].parameter.dtype

    @property
    def engine(self) -> Engine:
        return self.gradients.engine

    def using(self, *, turns: int) -> AbstractContextManager[list[Tensor]]:
        """Yield the members in compute layout and dtype, for one of `turns` halves of the batch."""
        return self.gathered("group", self.gather, lambda wholes: wholes if self.even else (), turns=turns)

    def gathered(
        self,
        kind: Hashable,
        launch: Callable[[], Pending[T]],
        buffers: Callable[[T], Sequence[Tensor]],
        *,
        turns: int,
        keep: bool = False,
    ) -> AbstractContextManager[T]:
        """Yield what `launch` gathers from the members, prefetched if the engine can, for one of `turns` halves.

        `kind` distinguishes what a group can launch. The `buffers` of the result are reused unless it is kept. In a
        forward pass this counts as a use of the members, each of which will deposit a gradient.
        """
        if not in_backward():  # activation checkpointing runs forward again in backward: the first run was counted
            for member in self.members:
                self.during.use(member.parameter)
        travels = self.grid.size(GATHERED) > 1
        gathering = WeightGather(
            key=(kind, self.label, self.members),
            launch=launch,
            nbytes=self.elements * self.compute_dtype.itemsize if travels else 0,
            # a DTensor and its local tensor count separately: torch's functions change one, ours the other
            version=lambda: tuple((m.parameter._version, local_of(m.parameter)._version) for m in self.members),
            buffers=buffers if travels else lambda _: (),
        )
        return self.engine.prefetcher.using(gathering, uses=turns, keep=keep)

    @property
    def elements(self) -> int:
        """The number of elements in compute layout, the same on all ranks."""
        return sum(member.most for member in self.members)

    @property
    def even(self) -> bool:
        """Whether all ranks along z hold the same number of rows, so that a gather needs no padding and no copy."""
        return all(member.rows % self.grid.size(GATHERED) == 0 for member in self.members)

    @property
    def rows(self) -> list[int]:
        return [member.rows for member in self.members]

    def gather(self) -> Pending[list[Tensor]]:
        """Launch the gather of all members."""
        shards = self.shards()
        into = self.buffers(shards)
        return comm.all_gather_together(shards, self.grid, GATHERED, rows=self.rows, into=into, label=self.label)

    def buffers(self, shards: Sequence[Tensor]) -> list[Tensor] | None:
        """Take buffers from the engine's pool for what is gathered from these shards, if it needs no padding."""
        if self.grid.size(GATHERED) == 1 or not self.even:
            return None
        return [
            self.engine.buffers.take((length, *shard.shape[1:]), shard.dtype, shard.device)
            for shard, length in zip(shards, self.rows, strict=True)
        ]

    def shards(self, *, copied: bool = False) -> list[Tensor]:
        """Return this rank's shards to be gathered, cast before the message so that it carries the narrower dtype.

        With `copied` the caller copies them into a buffer where z is 1, and the copy casts.
        """
        alone = self.grid.size(GATHERED) == 1
        if self.gradients.guarded and not alone:
            self._require_same_group()
        shards = [local_of(member.parameter) for member in self.members]
        return shards if alone and copied else [shard.to(self.compute_dtype) for shard in shards]

    def _require_same_group(self) -> None:
        """Raise unless all ranks along z are about to gather this group; otherwise they would receive wrong weights."""
        name = zlib.crc32(self.label.encode())
        if not comm.equal_along(name, self.grid, (GATHERED,)):
            raise RuntimeError(
                f"this place is about to use {self.label}, and another place of axis z another layer: parameters are "
                "gathered over z, so all places must use the same layers in the same order (as under FSDP); let every "
                "place run the layer, on no rows if need be, or use a grid with z=1"
            )

    def add(self, gradients: list[Tensor], *, turns: int) -> None:
        """Add gradients in compute layout from one of `turns` halves; the last half's call launches their reduction."""
        self.gradients.expect_end()
        begun = self.engine.sums.begun(self.members)
        if begun is not None:
            for total, gradient in zip(begun, gradients, strict=True):
                total.add_(gradient)
        complete = self.engine.sums.add(self.members, begun or gradients, turns)
        if complete is not None:
            self.scatter(complete, turns=turns)

    def scatter(self, gradients: Sequence[Tensor], *, turns: int) -> None:
        """Sum gradients of all halves over z and deposit this rank's shards (`Gradients.scatter`)."""
        wide = [gradient.to(self.reduce_dtype) for gradient in gradients]
        parameters = [member.parameter for member in self.members]
        nbytes = self.elements * self.reduce_dtype.itemsize
        self.gradients.scatter(parameters, wide, nbytes, label=self.label, during=self.during, uses=turns)

    def only(self, members: Sequence[GroupMember]) -> ParamGroup:
        """Return the group of some of the members, under the same label."""
        return replace(self, members=tuple(members))
