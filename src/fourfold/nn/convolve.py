"""The convolution: the 3D product with a kernel in each place of the weight, and space carried along.

`Convolve` reads a weight that is gathered over z. As `Product`, it does not know in which layout it stands, which mode
is on, or how large an axis is; its backward finds da at once and leaves dw to the backlog.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold.comm import Pending
from fourfold.nn.channels import embed, take
from fourfold.nn.norm import add_gradients
from fourfold.operators import Body, identity, once_differentiable
from fourfold.param_group import ParamGroup
from fourfold.params import local_of

PlainConv = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

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
    """What is put around the input first, as functional.pad takes it: modes and sides that `padding` does not have."""
    margin_mode: str = "constant"

    @classmethod
    def of(cls, conv: PlainConv) -> Geometry:
        """That of torch's own layer."""
        padding, margins, mode = conv.padding, (), conv.padding_mode
        if padding == "valid":
            padding = (0,) * len(conv.kernel_size)
        elif padding == "same" or mode != "zeros":
            margins, padding = tuple(conv._reversed_padding_repeated_twice), (0,) * len(conv.kernel_size)
        return cls(
            kernel=tuple(conv.kernel_size),
            stride=tuple(conv.stride),
            padding=tuple(padding),  # type: ignore[arg-type]
            dilation=tuple(conv.dilation),
            output_padding=tuple(conv.output_padding),
            transposed=conv.transposed,
            margins=margins,
            margin_mode="constant" if mode == "zeros" else mode,
        )

    def weight_shape(self, in_channels: int, out_channels: int, groups: int) -> tuple[int, ...]:
        if self.transposed:
            return in_channels, out_channels // groups, *self.kernel
        return out_channels, in_channels // groups, *self.kernel

    def surround(self, a: Tensor) -> Tensor:
        return functional.pad(a, self.margins, self.margin_mode) if any(self.margins) else a

    def convolve(self, a: Tensor, w: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        """E1. A rank without in-channels has a sum of nothing, which torch would not compute."""
        if a.shape[1] and w.numel():
            return _convolution(a, w, bias, *self._in_torchs_order(groups))
        channels = w.shape[1] * groups if self.transposed else w.shape[0]
        out = a.new_zeros(a.shape[0], channels, *self._space(a.shape[2:]))
        return out if bias is None else out + bias.view(-1, *[1] * len(self.kernel))

    def find_da(self, dout: Tensor, shape: torch.Size, w: Tensor, groups: int) -> Tensor:
        """E2, for an input of this shape."""
        if not (dout.shape[1] and w.numel()):
            return dout.new_zeros(shape)
        like = dout.new_empty(1).expand(shape)  # torch reads its shape alone
        options = self._in_torchs_order(groups)
        return _convolution_backward(dout, like, w, None, *options, [True, False, False])[0]

    def find_dw(self, dout: Tensor, a: Tensor, shape: torch.Size, groups: int) -> Tensor:
        """E3, for a weight of this shape."""
        if not (dout.shape[1] and a.shape[1]):
            return dout.new_zeros(shape)
        like = dout.new_empty(1).expand(shape)
        options = self._in_torchs_order(groups)
        return _convolution_backward(dout, a, like, None, *options, [False, True, False])[1]

    def _in_torchs_order(self, groups: int) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, groups

    def _space(self, space: Sequence[int]) -> torch.Size:
        a, w = (torch.empty(1, 1, *sizes, device="meta") for sizes in (space, self.kernel))
        return _convolution(a, w, None, *self._in_torchs_order(1)).shape[2:]


@dataclass(frozen=True, slots=True)
class Kernel:
    """The weight of one convolution, and what is added to its output.

    `rows` are those of the weight's dim 0, of the compute layout's, that this rank uses, `part` those of the bias;
    `columns` are the out-channels that the bias covers. `adds` is off on ranks whose partial sum must go without,
    because another rank's has it.
    """

    unit: ParamGroup
    geometry: Geometry
    groups: int
    rows: range
    part: range
    columns: range
    adds: bool
    keep_weights: bool

    @property
    def trained(self) -> bool:
        return any(member.parameter.requires_grad for member in self.unit.members)

    def using(self, *, bias: bool, turns: int) -> AbstractContextManager[list[Tensor]]:
        """The weight, and with `bias` the bias, in compute layout for one of so many halves."""
        unit = self.unit if bias else self.unit.only(self.unit.members[:1])
        keep = bias and self.keep_weights
        return unit.gathered(
            ("kernel", bias), unit.gather, lambda wholes: wholes if unit.even else (), turns=turns, keep=keep
        )

    def multiplying(self, equation: str) -> AbstractContextManager[None]:
        return self.unit.grid.ledger.multiplying(f"{equation} {self.unit.label}")

    def own(self, w: Tensor) -> Tensor:
        return take(w, self.rows, dim=0)

    def bias(self, vectors: Sequence[Tensor], channels: int) -> Tensor | None:
        """What this rank adds to so many out-channels."""
        if not (vectors and self.adds):
            return None
        return embed(take(vectors[0], self.part, dim=0), self.columns, channels)

    def add_gradients(self, dout: Tensor, a: Pending[Tensor], turns: int) -> None:
        """E3 and E4 of one of so many halves."""
        weight, *biases = self.unit.members
        gradients: list[Tensor | None] = [None]
        if weight.parameter.requires_grad:
            own = (len(self.rows), *local_of(weight.parameter).shape[1:])
            whole = a.wait()
            with self.multiplying("E3"):
                dw = self.geometry.find_dw(dout, whole, torch.Size(own), self.groups)
            gradients = [embed(dw, self.rows, weight.rows)]
        for bias in biases:
            db = take(dout, self.columns).sum((0, *range(2, dout.dim())), dtype=self.unit.reduce_dtype)
            gradients.append(embed(db, self.part, bias.rows))
        add_gradients(self.unit, gradients, turns)


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
        ctx.kernel, ctx.reread, ctx.turns, ctx.shape = kernel, reread, kernel.unit.engine.turn.of, a.shape
        with kernel.using(bias=True, turns=ctx.turns) as (weight, *vectors), kernel.multiplying("E1"):
            ctx.save_for_backward(kept, weight if kernel.keep_weights else None)
            w = kernel.own(weight)
            channels = w.shape[1] * kernel.groups if kernel.geometry.transposed else w.shape[0]
            return kernel.geometry.convolve(a, w, kernel.bias(vectors, channels), kernel.groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kernel: Kernel = ctx.kernel
        engine = kernel.unit.engine
        kept, weight = ctx.saved_tensors
        reread = ctx.reread if kernel.unit.members[0].parameter.requires_grad else identity
        reading = reread(kept) if engine.policy.wgrad_behind_messages else None
        da = None
        if ctx.needs_input_grad[2]:
            held = None if weight is None else nullcontext([weight])
            with held or kernel.using(bias=False, turns=ctx.turns) as wholes, kernel.multiplying("E2"):
                da = kernel.geometry.find_da(dout, ctx.shape, kernel.own(wholes[0]), kernel.groups)
        if kernel.trained:
            kernel.unit.gradients.expect_end()
            engine.wgrad_queue.add(lambda: kernel.add_gradients(dout, reading or reread(kept), ctx.turns))
        return (None, None, da, *[None] * (len(ctx.needs_input_grad) - 3))
