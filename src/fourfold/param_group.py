"""Parameters that travel over z together: gathered in one message before their use, reduced in one after it.

A `ParamGroup` is made once and kept by its layer: everything about it that stays the same from step to step is worked
out then. The overlap engine launches the gathers before their use and keeps the gathered weights until the last half of
the batch has used them. Gradients are summed over the halves, reduce-scattered behind the rest of backward, and
deposited in `Gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.comm import Arrived, Pending
from fourfold.engine import in_backward
from fourfold.gradients import NOTHING, CastShard, ForwardPass, Gradients
from fourfold.grid import Grid
from fourfold.layout import GATHERED, Spec
from fourfold.ledger import joint_label
from fourfold.params import shards_of, to_back, to_front
from fourfold.policy import Policy

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

ZEROS_BEHIND = "_fourfold_zeros_behind"
"""Attribute of a weight: the rows of zeros that lie behind it in memory, as padding for a product. Copies do not have
it."""


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity, because tensors have no truth value
class GroupMember:
    """A parameter and its sizes in compute layout."""

    parameter: nn.Parameter
    gathered: str
    """The axis over which it is gathered."""
    dim: int
    """The dim that this axis cuts; 0 if it cuts none."""
    rows: int
    """The length of that dim on this rank."""
    most: int
    """The number of elements on the rank that holds most of them, so that all ranks know the same number."""
    owner: Mapping[str, nn.Parameter | None]
    """The parameters of the layer that has this one, by name."""
    name: str

    @classmethod
    def of(cls, layer: nn.Module, name: str, spec: Spec, grid: Grid) -> GroupMember:
        box = partial(spec.storage.compute.box, spec.shape, grid.shape.cuts)
        most = prod(len(part) for part in box(dict.fromkeys(spec.view, 0)))
        dim = dict(spec.storage.cuts).get(spec.gathered, 0)
        rows = len(box(grid.coords)[dim])
        return cls(getattr(layer, name), spec.gathered, dim, rows, most, layer._parameters, name)


class Parcel(NamedTuple, Generic[T]):
    """What is gathered over z of some weights: this rank's shards, and the whole tensors that others make of them."""

    shards: Sequence[Tensor]
    rows: Sequence[int]
    """The rows of each whole tensor."""
    into: Sequence[Tensor] | None
    """Buffers for the whole tensors."""
    arrange: Callable[[list[Tensor]], T]
    """Makes of the whole tensors what was asked for."""


class Travelling(Protocol[T_co]):
    """Weights that are gathered over z, alone or with others."""

    @property
    def grid(self) -> Grid: ...
    @property
    def axis(self) -> str: ...
    @property
    def label(self) -> str: ...
    def at_hand(self) -> T_co | None:
        """Return the weights if there is nothing to gather."""
        ...

    def parcel(self) -> Parcel[T_co]: ...


def launch_together(*together: Travelling) -> Sequence[Pending[Any] | Arrived[Any]]:
    """Launch gathers in one message for each axis; return what to wait for, one for each."""
    if (weights := together[0].at_hand()) is not None:  # then it is alone
        return [Arrived(weights)]
    if len(axes := dict.fromkeys(each.axis for each in together)) > 1:
        along = {axis: iter(launch_together(*(each for each in together if each.axis == axis))) for axis in axes}
        return [next(along[each.axis]) for each in together]
    parcels = [each.parcel() for each in together]
    pending = comm.all_gather_together(
        [shard for parcel in parcels for shard in parcel.shards],
        together[0].grid,
        together[0].axis,
        rows=[rows for parcel in parcels for rows in parcel.rows],
        into=[buffer for parcel in parcels for buffer in parcel.into or [None] * len(parcel.rows)],
        label=joint_label([each.label for each in together]),
    )
    parts = comm.split_results(pending, [len(parcel.rows) for parcel in parcels])
    return [part.then(parcel.arrange) for part, parcel in zip(parts, parcels, strict=True)]


class ParamGroup:
    """Parameters that are gathered over z in one message, and whose gradients are reduced in one.

    It is itself what the engine's prefetcher gathers: the members in compute layout and dtype. A forward pass calls
    `use` once; backward calls `add` with the gradients and the pass that `use` returned.
    """

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        gradients: Gradients,
        label: str,
        members: tuple[GroupMember, ...],
        kind: str = "group",
    ) -> None:
        """`kind` distinguishes, for the prefetcher, groups of the same members that are used in different places."""
        self.grid, self.policy, self.gradients, self.label, self.members = grid, policy, gradients, label, members
        self.engine = gradients.engine
        self.parameters = [member.parameter for member in members]
        self.rows = [member.rows for member in members]
        self.ids = [id(parameter) for parameter in self.parameters]
        """What `ForwardPass` counts by: hashing a tensor is slow."""
        self.dtypes = [parameter.dtype for parameter in self.parameters]
        own = self.dtypes[0] if members else torch.float32
        self.compute_dtype = policy.compute_dtype or own if own.is_floating_point else own
        self.reduce_dtype = policy.reduce_dtype or own
        self.casts = any(dtype is not self.compute_dtype for dtype in self.dtypes)
        self.axis = members[0].gathered if members else GATHERED
        """The axis over which they are gathered."""
        self.travels = grid.size(self.axis) > 1
        self.dims = [member.dim for member in members] if any(member.dim for member in members) else ()
        """The dims that this axis cuts; empty if all are 0."""
        self.elements = sum(member.most for member in members)
        """The number of elements in compute layout, the same on all ranks."""
        self.even = all(rows % grid.size(self.axis) == 0 for rows in self.rows)
        """Whether all ranks along z hold the same number of rows, so that a gather needs no padding and no copy."""
        self._parts: dict[tuple[str, tuple[GroupMember, ...]], ParamGroup] = {}
        self._flags: list[bool] = []  # which members are those of `_trained`
        self._trained: ParamGroup | None = None
        self.kind = kind
        # with the dtypes: a gather that was recorded before `model.to(...)` must not be taken for this one
        self.key = kind, label, members, *self.dtypes
        self.message = kind, *self.ids, *self.dtypes
        self.nbytes = self.elements * self.compute_dtype.itemsize if self.travels else 0

    def is_current(self) -> bool:
        """Return whether the layers still have these parameters, in these dtypes.

        Loading or wrapping a model may have replaced a parameter, `model.to` may have changed its dtype.
        """
        for member, dtype in zip(self.members, self.dtypes, strict=True):
            if member.owner.get(member.name) is not member.parameter or member.parameter.dtype is not dtype:
                return False
        return True

    def only(self, members: Sequence[GroupMember], kind: str = "group") -> ParamGroup:
        """Return the group of some of the members, under the same label."""
        key = kind, tuple(members)
        if key == (self.kind, self.members):
            return self
        if key not in self._parts:
            self._parts[key] = ParamGroup(self.grid, self.policy, self.gradients, self.label, key[1], kind)
        return self._parts[key]

    @property
    def trained(self) -> ParamGroup:
        """The group of those members that have gradients now."""
        trained = [parameter.requires_grad for parameter in self.parameters]
        if False not in trained:
            return self
        if self._trained is None or trained != self._flags:
            self._flags = trained
            self._trained = self.only([member for member, flag in zip(self.members, trained, strict=True) if flag])
        return self._trained

    # --- weights

    def use(self) -> ForwardPass:
        """Count a use of the members, each of which will deposit a gradient, and return the pass that counts it."""
        during = self.gradients.forward_pass
        if not in_backward():  # activation checkpointing runs forward again in backward: the first run was counted
            during.use(self.ids)
        return during

    def using(self, *, turns: int, keep: bool = False) -> AbstractContextManager[list[Tensor]]:
        """Yield the members in compute layout and dtype, for one of `turns` halves; with `keep` they are not reused."""
        return self.engine.prefetcher.using(self, uses=turns, keep=keep)

    launch = launch_together

    def at_hand(self) -> list[Tensor] | None:
        return None if self.travels else self.shards()

    def parcel(self) -> Parcel[list[Tensor]]:
        shards = self.shards()
        if not self.dims:
            return Parcel(shards, self.rows, self.reserve(shards), list)
        shards = to_front(shards, self.dims)
        return Parcel(shards, self.rows, self.reserve(shards), partial(to_back, dims=self.dims))

    def version(self) -> list[tuple[int, int]]:
        # a DTensor and its local tensor count separately: torch's functions change one, ours the other
        shards = zip(self.parameters, shards_of(self.parameters), strict=True)
        return [(parameter._version, shard._version) for parameter, shard in shards]

    def adopt(self, gathered: list[Tensor]) -> list[Tensor]:
        return gathered

    def buffers(self, gathered: list[Tensor]) -> Sequence[Tensor]:
        """Return what `launch` wrote into buffers of the pool."""
        if not self.travels or not self.even:
            return ()
        return to_front(gathered, self.dims) if self.dims else gathered

    def reserve(self, shards: Sequence[Tensor]) -> list[Tensor] | None:
        """Take buffers from the engine's pool for what is gathered from these shards, if it needs no padding."""
        if not self.travels or not self.even:
            return None
        return [
            self.engine.buffers.take((length, *shard.shape[1:]), shard.dtype, shard.device)
            for shard, length in zip(shards, self.rows, strict=True)
        ]

    def shards(self, *, copied: bool = False) -> list[Tensor]:
        """Return this rank's shards to be gathered, cast before the message so that it carries the narrower dtype.

        With `copied` the caller copies them into a buffer where z is 1, and the copy casts.
        """
        if self.travels:
            self.gradients.come_to_backward()  # in backward a gather may be the first message of the pass
        shards = shards_of(self.parameters)
        if not self.casts:
            return shards
        if self.policy.keep_casts:
            return self._kept_casts(shards)
        if copied and not self.travels:
            return shards
        return [shard if shard.dtype is self.compute_dtype else shard.to(self.compute_dtype) for shard in shards]

    def _kept_casts(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return the copies of these shards in the compute dtype; cast those that are not of this pass.

        A pass casts again even if the counters say that nothing changed: they do not count a change through `.data`.
        """
        known, this_pass = self.gradients.casts, self.gradients.passes
        new = [at for at, key in enumerate(self.ids) if key not in known or known[key].shard is not shards[at]]
        if new:
            # Weights that one product reads lie side by side, with the zeros behind them that it reads too.
            zeros = [getattr(self.parameters[at], ZEROS_BEHIND, 0) * shards[at].shape[1:].numel() for at in new]
            sizes = [shards[at].numel() + more for at, more in zip(new, zeros, strict=True)]
            with torch.inference_mode(False):  # the copies may be used for training next
                memory = torch.empty(sum(sizes), dtype=self.compute_dtype, device=shards[0].device)
            for at, part in zip(new, memory.split(sizes), strict=True):
                used = shards[at].numel()
                part[used:].zero_()
                known[self.ids[at]] = CastShard(part[:used].view(shards[at].shape), shards[at], (this_pass, -1, -1))
        copies, stale, sources, changed = [], [], [], False
        for key, parameter, shard in zip(self.ids, self.parameters, shards, strict=True):
            kept = known[key]
            version = this_pass, parameter._version, shard._version
            if kept.version != version:
                changed = changed or kept.version[1:] != version[1:]
                kept.version = version
                stale.append(kept.copy)
                sources.append(shard)
            copies.append(kept.copy)
        if stale:
            # Autograd must not count a second cast of the same values as a change: an earlier pass may have saved them.
            counted = nullcontext() if changed else torch.autograd._unsafe_preserve_version_counter(tuple(stale))
            with torch.no_grad(), counted:
                torch._foreach_copy_(stale, sources)
        return copies

    # --- gradients

    def add(self, gradients: list[Tensor], *, turns: int, during: ForwardPass) -> None:
        """Add gradients in compute layout from one of `turns` halves; the last half's call launches their reduction.

        `during` is the pass that used the members.
        """
        self.gradients.expect_end()
        if turns > 1:
            begun = self.engine.sums.begun(self.members)
            if begun is not None:
                for total, gradient in zip(begun, gradients, strict=True):
                    total.add_(gradient)
            complete = self.engine.sums.add(self.members, begun or gradients, turns)
            if complete is None:
                return
            gradients = complete
        self.scatter(gradients, turns=turns, during=during)

    def deposit(self, gradients: list[Tensor], *, during: ForwardPass) -> None:
        """Add gradients of this rank's shards that are complete over z already, from one half."""
        self.gradients.expect_end()
        self.gradients.deposit(self.parameters, gradients, during=during)

    def scatter(self, gradients: Sequence[Tensor], *, turns: int, during: ForwardPass) -> None:
        """Sum gradients of all halves over z and deposit this rank's shards (`Gradients.scatter`)."""
        dtype = self.reduce_dtype
        if [gradient.dtype for gradient in gradients].count(dtype) != len(gradients):
            gradients = [gradient.to(dtype) for gradient in gradients]
        nbytes = self.elements * dtype.itemsize
        of_group = dict(label=self.label, during=during, uses=turns, axis=self.axis, dims=self.dims)
        self.gradients.scatter(self.parameters, gradients, nbytes, **of_group)

    def hand_in_nothing(self) -> None:
        """Take part in the reduction of a group that this place has not used."""
        shards = shards_of(self.parameters)
        shapes = [list(shard.shape) for shard in shards]
        for shape, member in zip(shapes, self.members, strict=True):
            shape[member.dim] = member.rows
        nothing = [
            torch.full(shape, NOTHING, dtype=self.reduce_dtype, device=shard.device)
            for shape, shard in zip(shapes, shards, strict=True)
        ]
        nbytes = self.elements * self.reduce_dtype.itemsize
        of_group = dict(label=self.label, axis=self.axis, dims=self.dims)
        self.gradients.scatter(self.parameters, nothing, nbytes, **of_group, unused=True)
