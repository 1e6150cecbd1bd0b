"""Convolutional layers: `Conv` of all channels with all, `GroupedConv` in groups of channels.

`Conv` cuts in-channels over one of x and y and out-channels over the other, and its output lies as the next one of the
other role reads it. `GroupedConv` keeps the cut of its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor

from fourfold.engine import Turns
from fourfold.grid import Grid
from fourfold.layout import (
    CONTRACT_WEIGHT,
    EXPAND_BIAS,
    EXPAND_WEIGHT,
    OUTPUT_OF_CONTRACT,
    PRODUCT,
    RESIDUAL_VECTOR,
    WHOLE,
    Init,
    Spec,
)
from fourfold.nn.channels import Channels, enter, gather, leave, require_block, take, whole_groups, within
from fourfold.nn.convolve import Convolve, Geometry, Kernel
from fourfold.nn.layer import Layer
from fourfold.nn.linear import keeps_weights
from fourfold.operators import Body, identity
from fourfold.policy import Policy

Role = Literal["expand", "contract"]


class _Convolution(Layer):
    """What both kinds share: a weight and a bias, the cuts of what it reads and of what it gives."""

    reads: Channels
    gives: Channels

    def __init__(self, grid: Grid, policy: Policy, geometry: Geometry) -> None:
        super().__init__(grid, policy)
        self.geometry = geometry

    def declare_all(self, weight: Spec, bias: Spec | None) -> None:
        self.declare("weight", weight)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.declare("bias", bias)

    def received(self, a: Tensor, channels: Channels) -> Tensor:
        """The input, checked, in the dtype of the computation, with its margins."""
        require_block(a, channels, self.grid, self.label)
        if a.dim() != len(self.geometry.kernel) + 2:
            raise ValueError(
                f"{self.label}: a kernel of {self.geometry.kernel} reads [rows, channels, *space] with "
                f"{len(self.geometry.kernel)} dims of space, but the input is {tuple(a.shape)}"
            )
        return self.geometry.surround(a if self.policy.compute_dtype is None else a.to(self.policy.compute_dtype))

    def kernel(self, output_padding: Sequence[int] | None, **options: Any) -> Kernel:
        geometry = self.geometry
        if output_padding is not None:
            geometry = replace(geometry, output_padding=tuple(output_padding))
        keep = keeps_weights(self, self.member("weight"))
        return Kernel(unit=self.unit(*self.specs), geometry=geometry, keep_weights=keep, **options)

    def convolve(self, kernel: Kernel, reread: Body, a: Tensor, cut: Tensor) -> Tensor:
        parameters = [member.parameter for member in kernel.unit.members]
        if self.policy.keep_gathered:
            return Convolve.apply(kernel, identity, a, a.detach(), *parameters)
        return Convolve.apply(kernel, reread, a, cut.detach(), *parameters)


class Conv(_Convolution):
    """A convolution of all k in-channels with all n out-channels. Expand has in-channels over s = y, where its sum is
    owed, and out-channels over t = x; contract has the two swapped, so that the two alternate. w[n/t, k/s] (transposed:
    w[k/s, n/t]) is stored cut over z:

        a [r, k/(s t)] -> enter t -> [r, k/s] -> a * w -> [r, n/t] {sum s} -> leave s -> [r, n/(t s)]

    Expand's bias is cut like the output, each rank on y adds its part to its partial sum; contract's is cut over y, and
    the first rank on x adds it. In elements, with r rows, P positions of the input, Q of the output, K = k/s, N = n/t,
    |w| and |b| in compute layout, and [.] for what is padded until the axis divides it (of w and b: their dim 0):

                 sharded                                     replicated
        forward  all_gather t       r [K] P                  -
                 all_gather z       [|w|] + [|b|]            the same
                 reduce_scatter s   r [N] Q                  all_reduce s   r N Q
        backward all_gather s       r [N] Q                  -
                 all_gather t       r [K] P, for dw; not with keep_gathered
                 all_gather z       [|w|]; not with keep_weights
                 reduce_scatter t   r [K] P                  all_reduce t   r K P
                 reduce_scatter z   [|w|] + [|b|]            the same

    Where the input needs no gradient, as images, backward has neither the gather over z nor the sum over t.
    """

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        in_channels: int,
        out_channels: int,
        geometry: Geometry,
        *,
        role: Role,
        bias: bool = True,
        init: Init = Init(std=0.02),
    ) -> None:
        super().__init__(grid, policy, geometry)
        if role not in get_args(Role):
            raise ValueError(f"role={role!r} is none of {get_args(Role)}")
        self.role: Role = role
        expands = role == "expand"
        self.s, self.t = ("y", "x") if expands else ("x", "y")
        cuts = 2 if policy.activations == "sharded" else 1
        self.reads = Channels(in_channels, (self.s, self.t)[:cuts])
        self.gives = Channels(out_channels, (self.t, self.s)[:cuts])
        storage = EXPAND_WEIGHT if expands != geometry.transposed else CONTRACT_WEIGHT
        vector = (EXPAND_BIAS, PRODUCT) if expands else (RESIDUAL_VECTOR, OUTPUT_OF_CONTRACT)
        shape = geometry.weight_shape(in_channels, out_channels, 1)
        self.declare_all(Spec(shape, storage, PRODUCT, init), Spec((out_channels,), *vector) if bias else None)

    def forward(self, a: Tensor, *, whole: bool = False, output_padding: Sequence[int] | None = None) -> Tensor:
        """`whole`: the input is whole over the axis that would be gathered, as if activations were replicated."""
        return self.engine.alone(self.turns(a, whole=whole, output_padding=output_padding))

    def turns(self, a: Tensor, *, whole: bool = False, output_padding: Sequence[int] | None = None) -> Turns[Tensor]:
        sharded = self.policy.activations == "sharded"
        reads = self.reads.outer(1) if whole else self.reads
        a = self.received(a, reads)
        site, count = self.site(a.shape[0]), len(reads.outer(1).block(self.grid))
        cut = len(reads.axes) > 1
        entering = enter(a, site, self.t, count, cut=cut)
        if entering.travels:
            yield
        reread = partial(gather, site=site, axis=self.t, count=count) if cut else identity
        out = self.convolve(self._kernel(output_padding), reread, entering.wait(), a)
        leaving = leave(out, site, self.s, cut=sharded)
        yield  # also where nothing travels: the other half's messages need a product between them
        return leaving.wait()

    def _kernel(self, output_padding: Sequence[int] | None) -> Kernel:
        block = self.gives.outer(1).block(self.grid)
        columns, adds = range(len(block)), self.grid.coords["x"] == 0
        if self.role == "expand":
            columns, adds = within(Channels(self.gives.count, ("x", "y")).block(self.grid), block), True
        rows = range(self.member("weight").rows)
        part = range(len(columns))
        return self.kernel(output_padding, groups=1, rows=rows, part=part, columns=columns, adds=adds)


class GroupedConv(_Convolution):
    """A convolution in groups of channels, which keeps the cut over `axes` that its input has.

    Where every rank holds whole groups, the same of the input and of the output, nothing travels over x and y and
    w[n/axes, k/groups] rests cut like the channels. Elsewhere the input is gathered, each rank computes all groups that
    its out-channels are in, and w rests cut over z alone.

    Channels that are cut over ("y", "x") have parameters that are cut over y: each rank on x reads its part of them,
    and their gradients are owed over x.
    """

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        in_channels: int,
        out_channels: int,
        geometry: Geometry,
        *,
        groups: int,
        axes: tuple[str, ...],
        bias: bool = True,
        init: Init = Init(std=0.02),
    ) -> None:
        super().__init__(grid, policy, geometry)
        if groups < 1 or in_channels % groups or out_channels % groups:
            raise ValueError(
                f"GroupedConv: groups={groups} must divide in_channels={in_channels} and out_channels={out_channels}"
            )
        self.groups = groups
        self.reads, self.gives = Channels(in_channels, axes), Channels(out_channels, axes)
        read, given = (whole_groups(cut, groups, grid) for cut in (self.reads, self.gives))
        self.aligned = read is not None and read == given
        rows = Channels(in_channels if geometry.transposed else out_channels, axes)
        self.rows = rows.part(grid) if self.aligned else self._all_of(self._touched(), rows.count)
        shape = geometry.weight_shape(in_channels, out_channels, groups)
        use = self.gives.use
        self.declare_all(
            Spec(shape, rows.storage if self.aligned else WHOLE, use, init),
            Spec((out_channels,), self.gives.storage, use) if bias else None,
        )

    def forward(self, a: Tensor, *, output_padding: Sequence[int] | None = None) -> Tensor:
        a = self.received(a, self.reads)
        groups = self._touched()
        mine = self.gives.block(self.grid)
        columns = within(mine, self._all_of(groups, self.gives.count))
        kernel = self.kernel(
            output_padding,
            groups=len(groups),
            rows=self.rows,
            part=self.gives.part(self.grid),
            columns=columns,
            adds=True,
        )
        if self.aligned:
            return self.convolve(kernel, identity, a, a)
        site = self.site(a.shape[0])
        for cut in range(len(self.reads.axes) - 1, -1, -1):
            count = len(self.reads.outer(cut).block(self.grid))
            a = enter(a, site, self.reads.axes[cut], count, cut=True).wait()
        a = take(a, self._all_of(groups, self.reads.count))
        return take(self.convolve(kernel, identity, a, a), columns)

    def _touched(self) -> range:
        """The groups that this rank's out-channels are in."""
        mine, size = self.gives.block(self.grid), self.gives.count // self.groups
        return range(mine.start // size, -(-mine.stop // size)) if mine else range(0)

    def _all_of(self, groups: range, count: int) -> range:
        size = count // self.groups
        return range(groups.start * size, groups.stop * size)
