"""Parameters that travel over z together: gathered in one message before their use, reduced in one after it.

Gathers are handed to the overlap engine, which launches them ahead of use and keeps them until the last half has used
them. Gradients are added up over the halves, reduced behind the rest of backward, and deposited.
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


@dataclass(frozen=True, slots=True, eq=False)  # by identity: tensors do not compare
class GroupMember:
    """A parameter in compute layout: the length of its dim 0 on this rank, and its elements on the rank that has most,
    the same number on all ranks."""

    parameter: nn.Parameter
    rows: int
    most: int

    @classmethod
    def of(cls, parameter: nn.Parameter, spec: Spec, grid: Grid) -> GroupMember:
        box = partial(spec.storage.compute.box, spec.shape, grid.shape.sizes)
        return cls(parameter, len(box(grid.coords)[0]), prod(len(part) for part in box(dict.fromkeys(AXES, 0))))


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """Parameters that are gathered over z in one message and given back in one."""

    grid: Grid
    policy: Policy
    gradients: Gradients
    label: str
    members: tuple[GroupMember, ...]
    during: ForwardPass
    """The forward pass that uses the members; what it expects is counted there."""

    @property
    def compute(self) -> torch.dtype:
        own = self.members[0].parameter.dtype
        return self.policy.compute_dtype or own if own.is_floating_point else own

    @property
    def reduce(self) -> torch.dtype:
        return self.policy.reduce_dtype or self.members[0].parameter.dtype

    @property
    def engine(self) -> Engine:
        return self.gradients.engine

    def using(self, *, turns: int) -> AbstractContextManager[list[Tensor]]:
        """The members in compute layout and dtype, for one of so many halves."""
        return self.gathered("unit", self.gather, lambda wholes: wholes if self.even else (), turns=turns)

    def gathered(
        self,
        kind: Hashable,
        launch: Callable[[], Pending[T]],
        buffers: Callable[[T], Sequence[Tensor]],
        *,
        turns: int,
        keep: bool = False,
    ) -> AbstractContextManager[T]:
        """What `launch` gathers from the members, ahead of time where the engine can, for one of so many halves.

        Kinds of one unit differ in what they launch; `buffers` of the result are used again unless it is kept. In
        forward this counts as a use of the members, each of which will deposit its gradient.
        """
        if not in_backward():  # recompute runs forward again in backward: the first run was counted
            for member in self.members:
                self.during.use(member.parameter)
        travels = self.grid.size(GATHERED) > 1
        gathering = WeightGather(
            key=(kind, self.label, self.members),
            launch=launch,
            nbytes=self.elements * self.compute.itemsize if travels else 0,
            version=lambda: tuple((m.parameter._version, local_of(m.parameter)._version) for m in self.members),
            buffers=buffers if travels else lambda _: (),
        )
        return self.engine.prefetcher.using(gathering, uses=turns, keep=keep)

    @property
    def elements(self) -> int:
        """In compute layout, the same number on all ranks."""
        return sum(member.most for member in self.members)

    @property
    def even(self) -> bool:
        """Every rank on z holds as many rows as every other, so that they are gathered where they are used."""
        return all(member.rows % self.grid.size(GATHERED) == 0 for member in self.members)

    def gather(self, into: Sequence[Tensor] | None = None) -> Pending[list[Tensor]]:
        """Launch the gather of all members, into these buffers where given. Cast before the wire."""
        z = self.grid.size(GATHERED)
        if z > 1 and self.gradients.guarded:
            self._require_company()
        locals_ = [local_of(member.parameter) for member in self.members]
        if z == 1 and into is not None:  # copying casts as well
            return Pending(lambda: [place.copy_(held) for place, held in zip(into, locals_, strict=True)])
        rows = [member.rows for member in self.members]
        shards = [held.to(self.compute) for held in locals_]
        if into is None and z > 1 and self.even:
            into = [
                self.engine.buffers.take((length, *shard.shape[1:]), shard.dtype, shard.device)
                for shard, length in zip(shards, rows, strict=True)
            ]
        return comm.all_gather_together(shards, self.grid, GATHERED, rows=rows, into=into, label=self.label)

    def _require_company(self) -> None:
        """All ranks along z must be about to gather these parameters: a rank that is not would be sent them all the
        same, in place of others."""
        name = zlib.crc32(self.label.encode())
        if not comm.equal_along(name, self.grid, (GATHERED,)):
            raise RuntimeError(
                f"this place is about to use {self.label}, and another place of axis z another layer: parameters are "
                "gathered over z, so all places must use the same layers in the same order (as under FSDP); let every "
                "place run the layer, on no rows if need be, or use a grid with z=1"
            )

    def add(self, gradients: list[Tensor], *, turns: int) -> None:
        """Gradients in compute layout from one of so many halves; the last one's call sends the sum of all."""
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
        wide = [gradient.to(self.reduce) for gradient in gradients]
        parameters = [member.parameter for member in self.members]
        nbytes = self.elements * self.reduce.itemsize
        self.gradients.scatter(parameters, wide, nbytes, label=self.label, during=self.during, uses=turns)

    def only(self, members: Sequence[GroupMember]) -> ParamGroup:
        """A part of the unit, under the same label."""
        return replace(self, members=tuple(members))
