"""Convolutional layers: `Conv` of all channels with all, `GroupedConv` in groups of channels.

A convolution is the 3D product with a kernel in each entry of the weight; space is carried along. `Conv` cuts
in-channels over one of x and y and out-channels over the other, and the next `Conv` of the other role reads its output
as it is. `GroupedConv` keeps the cut of its input.

`Convolve` reads a weight that is gathered over z. Like `Product`, it does not know in which layout it runs, which mode
is on, or how large an axis is. Its backward computes da at once and leaves dw to the wgrad queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import layout
from fourfold.comm import Pending
from fourfold.engine import Turns
from fourfold.gradients import ForwardPass
from fourfold.grid import Grid
from fourfold.layout import PRODUCT, Init, Spec
from fourfold.nn.images.channels import Channels, embed, enter, gather, leave, require_block, take, whole_groups, within
from fourfold.nn.layer import Layer, add_gradients
from fourfold.nn.linear import keeps_weights
from fourfold.operators import Body, identity, once_differentiable
from fourfold.param_group import ParamGroup
from fourfold.params import local_of
from fourfold.policy import Policy

PlainConv = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Role = Literal["expand", "contract"]

_convolution, _convolution_backward = torch.ops.aten.convolution, torch.ops.aten.convolution_backward


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a convolution does in space, the same for all channels."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    transposed: bool
    margins: tuple[int, ...] = ()
    """What functional.pad puts around the input first: padding modes and unequal sides that aten's padding lacks."""
    margin_mode: str = "constant"

    @classmethod
    def of(cls, conv: PlainConv) -> Geometry:
        """Return the geometry of a layer of torch's."""
        padding, margins, mode = conv.padding, (), conv.padding_mode
        if padding == "valid":
            padding = (0,) * len(conv.kernel_size)
        elif padding == "same" or mode != "zeros":
            margins, padding = tuple(conv._reversed_padding_repeated_twice), (0,) * len(conv.kernel_size)
        sizes = (conv.kernel_size, conv.stride, padding, conv.dilation, conv.output_padding)
        mode = "constant" if mode == "zeros" else mode
        return cls(*(tuple(size) for size in sizes), conv.transposed, margins, mode)  # type: ignore[arg-type]

    def weight_shape(self, in_channels: int, out_channels: int, groups: int) -> tuple[int, ...]:
        if self.transposed:
            return in_channels, out_channels // groups, *self.kernel
        return out_channels, in_channels // groups, *self.kernel

    def out_channels(self, w: Tensor, groups: int) -> int:
        return w.shape[1] * groups if self.transposed else w.shape[0]

    def convolve(self, a: Tensor, w: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """Return E1. A rank without in-channels has an empty sum, which torch refuses to compute."""
        if a.shape[1] and w.numel():
            return _convolution(a, w, bias, *self._options(groups))
        one, kernel = (torch.empty(1, 1, *space, device="meta") for space in (a.shape[2:], self.kernel))
        space = _convolution(one, kernel, None, *self._options(1)).shape[2:]
        out = a.new_zeros(a.shape[0], self.out_channels(w, groups), *space)
        return out if bias is None else out + bias.view(-1, *[1] * len(self.kernel))

    def find_da(self, dout: Tensor, shape: torch.Size, w: Tensor, groups: int) -> Tensor:
        """Return E2, for an input of this shape."""
        if not (dout.shape[1] and w.numel()):
            return dout.new_zeros(shape)
        like = dout.new_empty(1).expand(shape)  # torch reads only its shape, so it needs no memory
        return _convolution_backward(dout, like, w, None, *self._options(groups), [True, False, False])[0]

    def find_dw(self, dout: Tensor, a: Tensor, shape: torch.Size, groups: int) -> Tensor:
        """Return E3, for a weight of this shape."""
        if not (dout.shape[1] and a.shape[1]):
            return dout.new_zeros(shape)
        like = dout.new_empty(1).expand(shape)
        return _convolution_backward(dout, a, like, None, *self._options(groups), [False, True, False])[1]

    def _options(self, groups: int) -> tuple[Any, ...]:
        """Return the arguments of aten's convolution, in its order."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups


@dataclass(frozen=True, slots=True)
class Kernel:
    """The weight of one convolution, and the bias that is added to its output.

    `rows` are the rows of the weight in compute layout that this rank uses, and `part` those of the bias. `columns` are
    the out-channels that the bias covers. `adds` is off on ranks that leave the bias out of their partial sum, because
    another rank adds it.
    """

    group: ParamGroup
    geometry: Geometry
    groups: int
    rows: range
    part: range
    columns: range
    adds: bool
    keep_weights: bool

    def using(self, *, bias: bool, turns: int) -> AbstractContextManager[list[Tensor]]:
        """Gather the weight, and with `bias` the bias, in compute layout for one of `turns` halves."""
        group = self.group if bias else self.group.only(self.group.members[:1], "weight")
        return group.using(turns=turns, keep=bias and self.keep_weights)

    def multiplying(self, equation: str) -> AbstractContextManager[object]:
        return self.group.grid.ledger.multiplying(f"{equation} {self.group.label}")

    def own(self, w: Tensor) -> Tensor:
        return take(w, self.rows, dim=0)

    def add_gradients(self, dout: Tensor, a: Pending[Tensor], turns: int, during: ForwardPass) -> None:
        """Add E3 and E4 of one of `turns` halves."""
        weight, *biases = self.group.members
        gradients: list[Tensor | None] = [None]
        if weight.parameter.requires_grad:
            own = (len(self.rows), *local_of(weight.parameter).shape[1:])
            whole = a.wait()
            with self.multiplying("E3"):
                dw = self.geometry.find_dw(dout, whole, torch.Size(own), self.groups)
            gradients = [embed(dw, self.rows, weight.rows)]
        for bias in biases:
            db = take(dout, self.columns).sum((0, *range(2, dout.dim())), dtype=self.group.reduce_dtype)
            gradients.append(embed(db, self.part, bias.rows))
        add_gradients(self.group, gradients, turns, during)


class Convolve(torch.autograd.Function):
    """out = a * w + b, with w stored cut over z.

        a     [r, k, *in]             E1   out = a * w + b             w gathered over z
        out   [r, n, *out] {sum s}    E2   da  = dout * w transposed   w gathered over z again
        dout  [r, n, *out]            E3   dw  = a * dout              reduce-scattered over z
                                      E4   db  = sum over rows and space of dout, in its columns

    Instead of `a` it may keep the cut tensor that `a` was gathered from, and `reread` gathers it again, behind E2.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Kernel, reread: Body, a: Tensor, kept: Tensor, *_: nn.Parameter) -> Tensor:
        ctx.kernel, ctx.reread, ctx.turns, ctx.shape = kernel, reread, kernel.group.engine.turn.of, a.shape
        ctx.during = kernel.group.use()
        with kernel.using(bias=True, turns=ctx.turns) as (weight, *vectors), kernel.multiplying("E1"):
            ctx.save_for_backward(kept, weight if kernel.keep_weights else None)
            w, bias = kernel.own(weight), None
            if vectors and kernel.adds:
                channels = kernel.geometry.out_channels(w, kernel.groups)
                bias = embed(take(vectors[0], kernel.part, dim=0), kernel.columns, channels)
            return kernel.geometry.convolve(a, w, bias, kernel.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kernel: Kernel = ctx.kernel
        engine, trained = kernel.group.engine, [member.parameter.requires_grad for member in kernel.group.members]
        kept, weight = ctx.saved_tensors
        reread = ctx.reread if trained[0] else identity
        # Launched before E2, so that the input is gathered behind that convolution.
        reading = reread(kept) if engine.policy.wgrad_behind_messages else None
        da = None
        if ctx.needs_input_grad[2]:
            held = None if weight is None else nullcontext([weight])
            with held or kernel.using(bias=False, turns=ctx.turns) as wholes, kernel.multiplying("E2"):
                da = kernel.geometry.find_da(dout, ctx.shape, kernel.own(wholes[0]), kernel.groups)
        if any(trained):
            kernel.group.gradients.expect_end()
            engine.wgrad_queue.add(lambda: kernel.add_gradients(dout, reading or reread(kept), ctx.turns, ctx.during))
        return (None, None, da, *[None] * (len(ctx.needs_input_grad) - 3))


class _Convolution(Layer):
    """The base class of both layers: a weight and a bias, the cuts of the input and of the output."""

    reads: Channels
    gives: Channels

    def __init__(self, grid: Grid, policy: Policy, geometry: Geometry) -> None:
        super().__init__(grid, policy)
        self.geometry = geometry

    def received(self, a: Tensor, channels: Channels) -> Tensor:
        """Check the input; return it in the compute dtype, with its margins."""
        require_block(a, channels, self.grid, self.label)
        if a.dim() != len(self.geometry.kernel) + 2:
            raise ValueError(
                f"{self.label}: a kernel of {self.geometry.kernel} reads [rows, channels, *space] with "
                f"{len(self.geometry.kernel)} dims of space, but the input is {tuple(a.shape)}"
            )
        a, geometry = a if self.policy.compute_dtype is None else a.to(self.policy.compute_dtype), self.geometry
        return functional.pad(a, geometry.margins, geometry.margin_mode) if any(geometry.margins) else a

    def convolve(
        self, a: Tensor, cut: Tensor, reread: Body, output_padding: Sequence[int] | None, **options: Any
    ) -> Tensor:
        """Convolve `a`, which `reread` gathers again from `cut`; `options` are those of the kernel."""
        geometry = self.geometry
        if output_padding is not None:  # a transposed convolution is given the size of its output at each call
            geometry = replace(geometry, output_padding=tuple(output_padding))
        keep = keeps_weights(self, self.member("weight"))
        kernel = Kernel(group=self.group(*self.specs), geometry=geometry, keep_weights=keep, **options)
        parameters = [member.parameter for member in kernel.group.members]
        if self.policy.keep_gathered:
            return Convolve.apply(kernel, identity, a, a.detach(), *parameters)
        return Convolve.apply(kernel, reread, a, cut.detach(), *parameters)


class Conv(_Convolution):
    """A convolution of all k in-channels with all n out-channels.

    Expand has in-channels over s = y, over which its sum is owed, and out-channels over t = x. Contract has the two
    swapped, so that the two alternate. w[n/t, k/s] (transposed: w[k/s, n/t]) is stored cut over z:

        a [r, k/(s t)] -> enter t -> [r, k/s] -> a * w -> [r, n/t] {sum s} -> leave s -> [r, n/(t s)]

    Expand's bias is cut like the output, and each rank on y adds its part to its partial sum. Contract's is cut over y,
    and the first rank on x adds it. Messages in elements, with r rows, P positions of the input, Q of the output,
    K = k/s, N = n/t, |w| and |b| in compute layout, and [.] for sizes that are padded until the axis divides them (for
    w and b: their dim 0):

                 sharded                                     replicated
        forward  all_gather t       r [K] P                  -
                 all_gather z       [|w|] + [|b|]            the same
                 reduce_scatter s   r [N] Q                  all_reduce s   r N Q
        backward all_gather s       r [N] Q                  -
                 all_gather t       r [K] P, for dw; not with keep_gathered
                 all_gather z       [|w|]; not with keep_weights
                 reduce_scatter t   r [K] P                  all_reduce t   r K P
                 reduce_scatter z   [|w|] + [|b|]            the same

    If the input needs no gradient, as with images, backward has neither the gather over z nor the sum over t.
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
        storage = layout.EXPAND_WEIGHT if expands != geometry.transposed else layout.CONTRACT_WEIGHT
        contract_bias = layout.RESIDUAL_VECTOR, layout.OUTPUT_OF_CONTRACT
        bias_layouts = (layout.EXPAND_BIAS, PRODUCT) if expands else contract_bias
        self.declare("weight", Spec(geometry.weight_shape(in_channels, out_channels, 1), storage, PRODUCT, init))
        self.declare("bias", Spec((out_channels,), *bias_layouts) if bias else None)

    def forward(self, a: Tensor, *, whole: bool = False, output_padding: Sequence[int] | None = None) -> Tensor:
        """`whole`: the input is whole over the axis that would be gathered, as if activations were replicated."""
        return self.engine.alone(self.turns(a, whole=whole, output_padding=output_padding))

    def turns(self, a: Tensor, *, whole: bool = False, output_padding: Sequence[int] | None = None) -> Turns[Tensor]:
        reads = self.reads.outer(1) if whole else self.reads
        a = self.received(a, reads)
        site, count = self.site(a.shape[0]), len(reads.outer(1).block(self.grid))
        cut = len(reads.axes) > 1
        entering = enter(a, site, self.t, count, cut=cut)
        if entering.travels:
            yield
        reread = partial(gather, site=site, axis=self.t, count=count) if cut else identity
        block = self.gives.outer(1).block(self.grid)
        columns, adds = range(len(block)), self.grid.coords["x"] == 0
        if self.role == "expand":
            columns, adds = within(Channels(self.gives.count, ("x", "y")).block(self.grid), block), True
        rows, part = range(self.member("weight").rows), range(len(columns))
        bias = dict(part=part, columns=columns, adds=adds)
        out = self.convolve(entering.wait(), a, reread, output_padding, groups=1, rows=rows, **bias)
        leaving = leave(out, site, self.s, cut=self.policy.activations == "sharded")
        yield  # even if nothing is in flight: the messages of the other half need a product to hide behind
        return leaving.wait()


class GroupedConv(_Convolution):
    """A convolution in groups of channels, which keeps the cut over `axes` that its input has.

    If every rank holds whole groups, the same ones of the input and of the output, nothing is communicated over x and
    y, and w[n/axes, k/groups] is stored cut like the channels. Otherwise the input is gathered, each rank computes all
    groups that its out-channels are in, and w is stored cut over z alone.

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
        rows = self.reads if geometry.transposed else self.gives
        self.rows = rows.part(grid) if self.aligned else self._all_of(self._touched(), rows.count)
        shape = geometry.weight_shape(in_channels, out_channels, groups)
        use = self.gives.use
        self.declare("weight", Spec(shape, rows.storage if self.aligned else layout.WHOLE, use, init))
        self.declare("bias", Spec((out_channels,), self.gives.storage, use) if bias else None)

    def forward(self, a: Tensor, *, output_padding: Sequence[int] | None = None) -> Tensor:
        a = self.received(a, self.reads)
        groups = self._touched()
        columns = within(self.gives.block(self.grid), self._all_of(groups, self.gives.count))
        if not self.aligned:
            site = self.site(a.shape[0])
            for cut in reversed(range(len(self.reads.axes))):
                count = len(self.reads.outer(cut).block(self.grid))
                a = enter(a, site, self.reads.axes[cut], count, cut=True).wait()
            a = take(a, self._all_of(groups, self.reads.count))
        bias = dict(part=self.gives.part(self.grid), columns=columns, adds=True)
        out = self.convolve(a, a, identity, output_padding, groups=len(groups), rows=self.rows, **bias)
        return take(out, columns)

    def _touched(self) -> range:
        """Return the groups that this rank's out-channels are in."""
        own, size = self.gives.block(self.grid), self.gives.count // self.groups
        return range(own.start // size, -(-own.stop // size)) if own else range(0)

    def _all_of(self, groups: range, count: int) -> range:
        """Return the channels of these groups, out of `count` channels."""
        size = count // self.groups
        return range(groups.start * size, groups.stop * size)
