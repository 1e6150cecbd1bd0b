"""Linear layers on the grid, and the MLP that is made of them: Expand leads from rest to inner, Contract leads back.

Layers that read the same tensor run together: one `enter`, one product, one `spread`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import kernels, layout
from fourfold.comm import Pending
from fourfold.engine import Turns, in_backward
from fourfold.grid import Grid
from fourfold.layout import FEATURES, GATHERED, Init, Layout, Spec, chunk
from fourfold.nn.layer import Layer
from fourfold.nn.lora import LORA, add_delta
from fourfold.operators import (
    AsyncResult,
    OpContext,
    Ready,
    collect_bodies,
    enter,
    identity,
    leave,
    once_differentiable,
    spread,
    spread_bodies,
    take_apart,
)
from fourfold.param_group import GroupMember
from fourfold.policy import Activations, Policy
from fourfold.product import Factor, SideBySide, contract, expand, wrong_rows


class Linear(Layer):
    """The base class of Expand and Contract: a weight [out, in] and a bias, each cut in its own way."""

    reads: ClassVar[Callable[[Activations], Layout]]
    """The layout of the input."""
    weight_storage: ClassVar[Layout]
    bias_storage: ClassVar[Layout]
    bias_use: ClassVar[Layout]

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init: Init = Init(std=0.02),
    ) -> None:
        super().__init__(grid, policy)
        self.in_features, self.out_features = in_features, out_features
        require_divisible(self, "in_features", in_features, self.reads(policy.activations).over(FEATURES))
        require_divisible(self, "out_features", out_features, self.weight_storage.compute.over(0))
        self.declare("weight", Spec((out_features, in_features), self.weight_storage, layout.PRODUCT, init))
        self.declare("bias", Spec((out_features,), self.bias_storage, self.bias_use) if bias else None)

    @property
    def width(self) -> int:
        """Columns of the product on this rank."""
        # Not padded for alignment, unlike the logits of a head: heads and hidden units of published models stay
        # multiples of 8 elements on every grid that cuts them (tests/nn/test_padding.py). For a model of odd sizes
        # padding would save little: its columns must be dropped before heads are cut, which costs a copy of the output
        # and of its gradient, and the inner dim of the Contract product that follows would be as odd as before.
        return self.out_features // self.weight_storage.compute.parts(self.grid.shape.sizes, 0)

    @property
    def weight_member(self) -> GroupMember:
        return self.member("weight")


class Expand(Linear):
    """A linear layer from rest to inner.

    w[n/x, k/y] stored cut over z, b[n/(xy)] likewise:

        a [m/(zx), k/y] -> enter -> [m/z, k/y] -> a w^T -> [m/z, n/x] {sum y} -> spread -> [m/z, n/(xy)]

    Rank y adds its part of the bias to its partial sum, so that `spread` carries it to where it belongs.
    """

    reads = staticmethod(layout.rest)
    weight_storage, bias_storage, bias_use = layout.EXPAND_WEIGHT, layout.EXPAND_BIAS, layout.PRODUCT

    @property
    def bias_columns(self) -> range:
        """The columns of the product to which this rank's bias belongs."""
        return chunk(self.width, self.grid.size("y"), self.grid.coords["y"])

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds its bias to its partial sum."""
        return True

    def forward(self, a: Tensor, tokens: int) -> Tensor:
        return self.engine.alone(self.turns(a, tokens))

    def turns(self, a: Tensor, tokens: int) -> Turns[Tensor]:
        return (yield from expand_joined([self], a, tokens))


class Contract(Linear):
    """A linear layer from inner to rest.

    w[k/y, n/x] stored cut over z, b[k/y] likewise:

        a [m/z, n/(xy)] -> collect -> [m/z, n/x] -> a w^T -> [m/z, k/y] {sum x} -> leave -> [m/(zx), k/y]

    The bias joins the partial sum of the first rank on x; every rank on x computes the bias's whole gradient.
    """

    reads = staticmethod(layout.inner)
    weight_storage, bias_storage = layout.CONTRACT_WEIGHT, layout.RESIDUAL_VECTOR
    bias_use = layout.OUTPUT_OF_CONTRACT

    @property
    def bias_columns(self) -> range:
        return range(self.width)

    @property
    def adds_bias(self) -> bool:
        return self.grid.coords["x"] == 0

    def forward(self, a: Tensor, tokens: int) -> Tensor:
        return self.leave(self.engine.alone(self.turns(a, tokens)), tokens).wait()

    def turns(self, a: Tensor, tokens: int) -> Turns[Tensor]:
        """Compute the product, which is still owed over x; `leave` brings it to rest."""
        width = self.in_features // self.grid.size("x")
        out = yield from contract(join(self), a, self.site(tokens), width)
        return out if LORA not in self._modules else add_delta(self, a, tokens, out)

    def leave(self, out: Tensor, tokens: int) -> AsyncResult | Ready:
        return leave(out, self.site(tokens))


class MLP(Layer):
    """The MLP of a transformer block. The activation runs on hidden units that are fully cut.

    `gelu`: down(gelu(up(a))). `swiglu`: down(silu(gate(a)) * up(a)), where gate and up run together. With
    `Policy.mlp_chunk` it runs chunk by chunk (`ChunkedMLP`).
    """

    side_by_side = (("gate.weight", "up.weight"),)

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        features: int,
        hidden: int,
        *,
        kind: str,
        bias: bool,
        init: Init,
        out_init: Init,
    ) -> None:
        super().__init__(grid, policy)
        if kind not in ("gelu", "swiglu"):
            raise ValueError(f"mlp={kind!r} is none of 'gelu', 'swiglu'")
        gated = kind == "swiglu"
        self.gate = Expand(grid, policy, features, hidden, bias=bias, init=init) if gated else None
        self.up = Expand(grid, policy, features, hidden, bias=bias, init=init)
        self.down = Contract(grid, policy, hidden, features, bias=bias, init=out_init)

    def forward(self, a: Tensor, tokens: int) -> Tensor:
        return self.down.leave(self.engine.alone(self.turns(a, tokens)), tokens).wait()

    def turns(self, a: Tensor, tokens: int, *, wanted: bool = True) -> Turns[Tensor]:
        """Compute everything up to `down.leave`, which brings the result to rest.

        Unless the result is `wanted`, chunks compute nothing and return zeros: for a block that runs again in backward,
        which reads no value of the result.
        """
        gate, up, down = self.gate, self.up, self.down
        self.refuse_hooks(gate, up, down)
        if self.policy.mlp_chunk:
            return (yield from self._in_chunks([up] if gate is None else [gate, up], a, tokens, wanted))
        out = yield from expand_joined([up] if gate is None else [gate, up], a, tokens)
        function = kernels.gelu if gate is None else kernels.swiglu
        hidden = kernels.region(function, a, compiled=self.policy.compile)(out)
        return (yield from down.turns(hidden, tokens))

    def _in_chunks(self, layers: Sequence[Expand], a: Tensor, tokens: int, wanted: bool) -> Turns[Tensor]:
        up, down = join(*layers), join(self.down)
        site = layers[0].site(tokens, up.group.label)
        if a.shape[0] != site.rows_at_rest:
            raise wrong_rows(a, site)
        spec = MLPChunks(up, down, site, self.down.site(tokens), self.down.in_features, wanted=wanted)
        # an input that backward gathers by itself need not be gathered where nothing is computed
        entering = enter(a, site) if wanted or spec.reread is None else Ready(a)
        if site.x > 1:
            # The other half computes meanwhile. Without a message too: torch finds what a block keeps by its order, so
            # halves must take the same turns when the block runs again.
            yield
        whole = entering.wait()
        cut = None if spec.reread is None else a.detach()
        return ChunkedMLP.apply(spec, whole, cut, *up.parameters, *down.parameters)


class MLPWeights(NamedTuple):
    """Gathered weights of an MLP; those of gate and up lie side by side."""

    w_up: Tensor
    b_up: Tensor | None
    w_down: Tensor
    b_down: Tensor | None = None


class MLPChunks:
    """An MLP that runs on one chunk of tokens after another."""

    def __init__(
        self, up: Factor, down: Factor, site: OpContext, below: OpContext, hidden: int, *, wanted: bool
    ) -> None:
        """`up`: the weights of gate, if there is one, and up, which run at `site`; `down` runs at `below`.

        `wanted`: whether somebody reads the result.
        """
        self.up, self.down, self.wanted, self.engine = up, down, wanted, site.engine
        self.tokens, self.chunk = site.tokens, site.policy.mlp_chunk
        self.over_y, self._compiled = site.y > 1, site.policy.compile
        bodies = (*spread_bodies(site, up.widths), *collect_bodies(below, hidden // site.x))
        self.spread, self.unspread, self.collect, self.uncollect = bodies if self.over_y else [identity] * 4
        self.keep = up.keep_weights and not site.policy.runs_blocks_again
        """Whether weights stay gathered until backward; of a block that runs again nothing stays."""
        rereads = site.x > 1 and site.sharded and not site.policy.keep_gathered
        self.reread = site.gather_tokens if rereads else None
        """Gathers the input over x again in backward; None if the gathered input is kept."""
        gated = len(up.widths) > 1
        self._activate = kernels.swiglu if gated else kernels.gelu
        self._activate_back = kernels.swiglu_backward if gated else kernels.gelu_backward

    @property
    def parts(self) -> Iterator[slice]:
        """The tokens of each chunk."""
        return (slice(first, first + self.chunk) for first in range(0, self.tokens, self.chunk))

    @contextmanager
    def using(
        self, up: SideBySide, down: SideBySide, turns: int, *, known: MLPWeights | None = None, keep: bool = False
    ) -> Iterator[MLPWeights]:
        """Have the gathered weights for all chunks of one of `turns` halves, unless they are `known`."""
        if known is not None:
            yield known
            return
        using = self.engine.prefetcher.using
        with using(up, uses=turns, keep=keep) as first, using(down, uses=turns, keep=keep) as second:
            yield MLPWeights(first.w, first.bias, second.w, second.bias)

    def land(self, moving: Pending[Tensor]) -> Tensor:
        """Wait for a message over y; in backward behind a product of dw that another layer has queued."""
        if self.over_y and in_backward():
            self.engine.wgrad_queue.run_one()
        return moving.wait()

    def activated(self, a: Tensor, w: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the input of the activation, inner, and its output as `down` reads it, for the tokens of a chunk."""
        with self.up.ledger.multiplying(self.up.e1):
            u = functional.linear(a, w, bias)
        s = self.land(self.spread(u))
        del u  # hidden units of a chunk are much memory
        return s, self.land(self.collect(kernels.region(self._activate, s, compiled=self._compiled)(s)))

    def back(self, dout: Tensor, a: Tensor, weights: MLPWeights, sums: dict[Factor, list[Tensor]], da: Tensor) -> None:
        """Run a chunk backward: write its gradient into `da`, and add to the gradients of the weights."""
        up, down = self.up, self.down
        s, g = self.activated(a, weights.w_up, weights.b_up)
        if down in sums:
            sums[down] = down.add_tokens(sums[down], dout, g)
        del g
        with down.ledger.multiplying(down.e2):
            dg = dout @ weights.w_down
        backward = kernels.region(self._activate_back, s, compiled=self._compiled)
        ds = backward(self.land(self.uncollect(dg)), s)
        del dg, s
        du = self.land(self.unspread(ds))
        del ds
        if up in sums:
            sums[up] = up.add_tokens(sums[up], du, a)
        with up.ledger.multiplying(up.e2):
            torch.mm(du, weights.w_up, out=da)


class ChunkedMLP(torch.autograd.Function):
    """out = down(act(up(a))), one chunk of tokens after another; a [m/z, k/y], out [m/z, k/y] {sum x}.

    For each chunk c of tokens, with u [c, n/x] {sum y} of each of gate and up, s and h [c, n/(xy)], g [c, n/x]:

        forward    u = a_c w_up^T + b_up    s = spread(u)    h = act(s)    g = collect(h)    out_c = g w_down^T + b_down
        backward   u, s, h, g again; dg = dout_c w_down; dw_down += dout_c^T g; ds = act'(s) uncollect(dg)
                   du = unspread(ds); da_c = du w_up; dw_up += du^T a_c

    No tensor with hidden units has more tokens than a chunk. Tensors of [m/z, k/y] are whole: the input, which is
    gathered over x once in each pass, the result and their gradients. Messages over y are sent for each chunk, those
    over x for all tokens. Weights are gathered once in a pass, and gradients are handed in once, summed over chunks.

    Up, gate and the activation run once in forward and once in backward, also if backward runs the whole block again:
    that needs no value of the MLP, so it leaves out the chunks (`wanted`). `down` runs once.

    The products of dw run in backward itself, not later: what they read exists for one chunk. A schedule that splits
    backward into B and W has them in B.
    """

    @staticmethod
    def forward(ctx: Any, spec: MLPChunks, a: Tensor, cut: Tensor | None, *_: nn.Parameter) -> Tensor:
        up, down = spec.up, spec.down
        ctx.spec, ctx.turns, ctx.during = spec, spec.engine.turn.of, (up.group.use(), down.group.use())
        kept: list[Tensor | None] = [None, None, None]
        make = a.new_empty if spec.wanted else a.new_zeros
        out = make(spec.tokens, sum(down.widths))
        if spec.wanted:
            with spec.using(up.with_biases, down.with_biases, ctx.turns, keep=spec.keep) as weights:
                kept = [*weights[:3]] if spec.keep else kept
                for part in spec.parts:
                    g = spec.activated(a[part], *weights[:2])[1]
                    with down.ledger.multiplying(down.e1):
                        linear_into(g, weights.w_down, weights.b_down, out[part])
                    del g  # before the next chunk
        ctx.save_for_backward(a if cut is None else cut, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        spec: MLPChunks = ctx.spec
        a, *kept = ctx.saved_tensors
        if spec.reread is not None:
            reading = spec.reread(a)
            spec.engine.wgrad_queue.run_one()  # a product behind the message, before waiting for it
            a = reading.wait()
        da = torch.empty_like(a)
        sums = {factor: factor.begun() for factor in (spec.down, spec.up) if factor.trained[0].members}
        known = None if kept[0] is None else MLPWeights(*kept)
        with spec.using(spec.up.again, spec.down.without, ctx.turns, known=known) as weights:
            for part in spec.parts:
                spec.back(dout[part], a[part], weights, sums, da[part])
        for factor, during in zip((spec.down, spec.up), ctx.during[::-1], strict=True):
            if factor in sums:
                factor.group.gradients.expect_end()
                factor.hand_in(sums.pop(factor), ctx.turns, during)  # nobody else holds them while they travel
        return (None, da, None, *[None] * (len(ctx.needs_input_grad) - 3))


def keeps_weights(layer: Layer, weight: GroupMember) -> bool:
    """Return whether the gathered weights are kept for backward.

    If z is 1 and nothing is cast, or casts are kept anyway, the weights are whole already, and a second copy would save
    nothing.
    """
    casts = layer.policy.compute_dtype not in (None, weight.parameter.dtype) and not layer.policy.keep_casts
    return layer.policy.keeps_for_backward and (layer.grid.size(GATHERED) > 1 or casts)


def join(*layers: Expand | Contract) -> Factor:
    """Return the weights and biases of layers that read the same tensor as one factor of a product; it is kept."""
    first, *others = layers
    key = tuple(others)  # without the first, which would refer to itself and stay in memory until Python collects
    known = first._factors.get(key)
    if known is None or known.group.gradients is not first.gradients or not known.group.is_current():
        known = first._factors[key] = _joined(layers)
    return known


def _joined(layers: Sequence[Expand | Contract]) -> Factor:
    first = layers[0]
    widths = [layer.width for layer in layers]
    columns = [
        range(offset + layer.bias_columns.start, offset + layer.bias_columns.stop)
        for layer, offset in zip(layers, accumulate(widths, initial=0), strict=False)
        if layer.bias is not None
    ]
    weights = tuple(layer.weight_member for layer in layers)
    biases = tuple(layer.member("bias") for layer in layers if layer.bias is not None)
    return Factor(
        first.group_of(*weights, *biases, label=label_of(layers)),
        tuple(widths),
        tuple(columns),
        adds=first.adds_bias,
        keep_weights=keeps_weights(first, weights[0]),
    )


def read(layers: Sequence[Expand], a: Tensor, tokens: int) -> Turns[Tensor]:
    """Run one `enter` and one product for all layers: [m/(zx), k/y] -> [m/z, sum n_i/x] {sum y}."""
    factor = join(*layers)
    return expand(factor, a, layers[0].site(tokens, factor.group.label))


def expand_together(layers: Sequence[Expand], a: Tensor, tokens: int) -> list[Tensor]:
    """Return the outputs of layers that read the same tensor, in as few messages as one layer needs."""
    return layers[0].engine.alone(expand_in_turns(layers, a, tokens))


def expand_in_turns(layers: Sequence[Expand], a: Tensor, tokens: int) -> Turns[list[Tensor]]:
    """Run `expand_joined` and return the output of each layer, [m/z, n_i/(xy)]."""
    out = yield from expand_joined(layers, a, tokens)
    if len(layers) == 1:
        return [out]  # taking a tensor apart costs a copy in backward, even if there is only one part
    widths = join(*layers).widths
    cuts = sum(widths) // out.shape[1]
    return take_apart(out, [width // cuts for width in widths])


def expand_joined(layers: Sequence[Expand], a: Tensor, tokens: int) -> Turns[Tensor]:
    """Run `read` and one `spread`, and return the outputs of all layers side by side, [m/z, sum n_i/(xy)]."""
    factor = join(*layers)
    site = layers[0].site(tokens, factor.group.label)
    spreading = spread((yield from expand(factor, a, site)), site, factor.widths)
    yield  # even if nothing is in flight: the messages of the other half need a product to hide behind
    out = spreading.wait()
    for layer in layers:
        if LORA in layer._modules:
            return add_deltas(layers, a, tokens, out)
    return out


def add_deltas(layers: Sequence[Expand], a: Tensor, tokens: int, out: Tensor) -> Tensor:
    """Return the outputs of layers side by side, [m/z, sum n_i/(xy)], plus what their LoRA pairs compute."""
    cuts = sum(layer.width for layer in layers) // out.shape[1]
    parts = out.split([layer.width // cuts for layer in layers], dim=1)
    added = [
        part if LORA not in layer._modules else add_delta(layer, a, tokens, part)
        for layer, part in zip(layers, parts, strict=True)
    ]
    return added[0] if len(added) == 1 else torch.cat(added, dim=1)


def linear_into(a: Tensor, w: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write a w^T + b into memory that exists."""
    if bias is None:
        torch.mm(a, w.t(), out=out)
    else:
        torch.addmm(bias, a, w.t(), out=out)


def label_of(layers: Sequence[Layer]) -> str:
    """Return the label of layers that run together: `layers.0.attention.q+k+v`."""
    prefix, _, first = layers[0].label.rpartition(".")
    names = "+".join([first, *(layer.label.rpartition(".")[2] for layer in layers[1:])])
    return f"{prefix}.{names}" if prefix else names


def require_divisible(layer: Layer, what: str, value: int, axes: Sequence[str]) -> None:
    """Raise an error unless the product of the sizes of these axes divides the value."""
    sizes = [layer.grid.size(axis) for axis in axes]
    cuts = prod(sizes)
    if value % cuts == 0:
        return
    divisors = [str(size) for size in range(1, value + 1) if value % size == 0]
    choices = ", ".join([*divisors[:12], *(["..."] if len(divisors) > 12 else [])])
    raise ValueError(
        f"{type(layer).__name__}: {what}={value} is not divisible by {'*'.join(axes)} = {'*'.join(map(str, sizes))}; "
        f"pad it to {-(-value // cuts) * cuts} or choose {'*'.join(axes)} from {choices}"
    )
