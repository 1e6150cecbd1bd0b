"""The four conjugate operators between the two layouts; each one's backward is its partner's forward.

    operator   sharded: forward / backward                   replicated: forward / backward
    enter      all-gather tokens x / reduce-scatter          identity / all-reduce x
    leave      reduce-scatter tokens x / all-gather          all-reduce x / identity
    spread     reduce-scatter features y / all-gather        all-reduce y / identity
    collect    all-gather features y / reduce-scatter        identity / all-reduce y

An operator launches its collective and returns an `AsyncResult`; `wait()` returns the tensor. Launching and waiting are
two autograd functions. Backward runs them in reverse order: it launches where forward waited and waits where forward
launched, so a computation between the two is overlapped in both directions. On an axis of size 1 nothing is launched
and nothing is recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from fourfold import comm
from fourfold.comm import Pending
from fourfold.engine import Engine, Wait
from fourfold.grid import Grid
from fourfold.policy import Policy


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward as torch's function of this name does, but refuse `create_graph=True` in the pass itself.

    torch would fail one pass later, with an error that names no cause.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # in backward autograd enables it for create_graph alone
            raise RuntimeError(
                "create_graph=True: gradients of gradients do not pass through layers on a grid; leave create_graph "
                "out, or keep the module that needs it out of ff.parallelize and call it beside the model"
            )
        return backward(ctx, *gradients)  # autograd records nothing here

    return refusing


Body = Callable[[Tensor], Pending[Tensor]]
"""One direction of an operator: launches the collective for a tensor."""


def identity(tensor: Tensor) -> Pending[Tensor]:
    return Pending(tensor.detach)  # an autograd function must not return its input itself


class AsyncResult:
    """The result of an operator whose collective is in flight."""

    travels = True
    waits: Wait | None = None
    """What reading the result waits for, if not for a message between two products."""
    hides_products = True
    """Whether backward runs a queued product of dw behind the message."""

    def __init__(self, there: Body, back: Body, engine: Engine) -> None:
        """`there` launches the forward direction, `back` the backward direction."""
        self.there, self.back, self.engine = there, back, engine
        self.pending: Pending[Tensor] | None = None
        self.token: Tensor | None = None

    def launch(self, a: Tensor) -> Self:
        """Launch the forward direction for a tensor."""
        self.token = Launch.apply(self, a)
        return self

    def wait(self) -> Tensor:
        return Land.apply(self, self.take_token())

    def take_token(self) -> Tensor | None:
        """Return the token and forget it. Its autograd node refers to this object: keeping the token would make a
        cycle, and what forward saved would stay in memory until Python's garbage collector runs."""
        token, self.token = self.token, None
        return token

    def take(self) -> Tensor:
        """Wait for the collective of the direction that runs now."""
        if self.pending is None:
            raise RuntimeError("this operator's result was read already; call wait() once")
        pending, self.pending = self.pending, None
        return pending.wait()


class Ready:
    """The result of an operator on an axis of size 1, where nothing is sent."""

    travels = False
    waits: Wait | None = None

    def __init__(self, a: Tensor) -> None:
        self.a = a

    def wait(self) -> Tensor:
        return self.a


class Launch(torch.autograd.Function):
    """Forward launches the collective; backward waits for the one that `Land` launched.

    The returned token stands for the tensor in flight: it makes `Land` depend on this node in autograd's graph.
    """

    @staticmethod
    def forward(ctx: Any, result: AsyncResult, a: Tensor) -> Tensor:
        ctx.result = result
        result.pending = result.there(a)
        return a.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        if ctx.result.hides_products:
            ctx.result.engine.wgrad_queue.run_one()  # a product behind the message, before waiting for it
        return None, ctx.result.take()


class Land(torch.autograd.Function):
    """Forward waits for the collective that `Launch` launched; backward launches the one back."""

    @staticmethod
    def forward(ctx: Any, result: AsyncResult, _: Tensor) -> Tensor:
        ctx.result = result
        return changeable(result.take())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        ctx.result.pending = ctx.result.back(gradient)
        return None, gradient.new_empty(0)


class OpContext:
    """The context in which an operator runs."""

    def __init__(self, grid: Grid, policy: Policy, tokens: int, label: str, engine: Engine) -> None:
        """`tokens` is the number of tokens of this (data, z) place."""
        self.grid, self.policy, self.tokens, self.label, self.engine = grid, policy, tokens, label, engine
        self.x, self.y = grid.size("x"), grid.size("y")
        self.sharded = policy.activations == "sharded"
        self.rows_at_rest = -(-tokens // self.x) if self.sharded else tokens
        """The number of tokens that a rank holds between sublayers, padding included."""

    def launch(self, a: Tensor, there: Body, back: Body) -> AsyncResult:
        """Launch an operator along an axis of several ranks."""
        result = AsyncResult(there, back, self.engine)
        result.token = Launch.apply(result, a)  # not through `launch`: every layer comes here, and a frame costs time
        return result

    @property
    def gather_tokens(self) -> Body:
        """Gather [ceil(m/x), f] -> [m, f]; the padding that `scatter_tokens` added is dropped."""
        return partial(comm.all_gather, grid=self.grid, axis="x", length=self.tokens, label=self.label)

    def scatter_tokens(self, whole: Tensor) -> Pending[Tensor]:
        """Reduce-scatter [m, f] {sum x} -> [ceil(m/x), f]; if x does not divide m, zeros are added at the end."""
        missing = -self.tokens % self.grid.size("x")
        whole = functional.pad(whole, (0, 0, 0, missing)) if missing else whole
        return comm.reduce_scatter(whole, self.grid, "x", label=self.label)

    def sum_x(self, owed: Tensor) -> Pending[Tensor]:
        return comm.all_reduce(owed, self.grid, "x", label=self.label)

    def gather_features(self, cut: Tensor, widths: Sequence[int], axis: str = "y") -> Pending[Tensor]:
        """Gather [m, sum w_i/y] -> [m, sum w_i] in one message; each of the w_i is joined by itself."""
        ranks = self.grid.size(axis)

        def join(joined: Tensor) -> Tensor:
            if ranks == 1:
                return joined
            parts = joined.unflatten(0, (ranks, -1)).split([width // ranks for width in widths], dim=2)
            return torch.cat([part.movedim(0, 1).flatten(1) for part in parts], dim=1)

        return comm.all_gather(cut, self.grid, axis, label=self.label).then(join)

    def scatter_features(self, whole: Tensor, widths: Sequence[int], axis: str = "y") -> Pending[Tensor]:
        """Reduce-scatter [m, sum w_i] {sum y} -> [m, sum w_i/y] in one message; each of the w_i is cut by itself."""
        ranks = self.grid.size(axis)
        if ranks > 1:
            parts = [part.unflatten(1, (ranks, -1)).movedim(1, 0) for part in whole.split(list(widths), dim=1)]
            whole = torch.cat(parts, dim=2).flatten(0, 1)
        return comm.reduce_scatter(whole, self.grid, axis, label=self.label)

    def sum_y(self, owed: Tensor) -> Pending[Tensor]:
        return comm.all_reduce(owed, self.grid, "y", label=self.label)


def enter(a: Tensor, site: OpContext) -> AsyncResult | Ready:
    """rest -> [m/z, k/y]"""
    if site.x == 1:
        return Ready(a)
    return site.launch(a, *((site.gather_tokens, site.scatter_tokens) if site.sharded else (identity, site.sum_x)))


def leave(a: Tensor, site: OpContext) -> AsyncResult | Ready:
    """[m/z, k/y] {sum x} -> rest"""
    if site.x == 1:
        return Ready(a)
    return site.launch(a, *((site.scatter_tokens, site.gather_tokens) if site.sharded else (site.sum_x, identity)))


def spread_bodies(site: OpContext, widths: Sequence[int]) -> tuple[Body, Body]:
    """Return the forward and the backward direction of `spread`."""
    if site.sharded:
        return partial(site.scatter_features, widths=widths), partial(site.gather_features, widths=widths)
    return site.sum_y, identity


def spread(a: Tensor, site: OpContext, widths: Sequence[int]) -> AsyncResult | Ready:
    """[m/z, n/x] {sum y} -> inner, for outputs of these widths side by side"""
    return Ready(a) if site.y == 1 else site.launch(a, *spread_bodies(site, widths))


def collect_bodies(site: OpContext, width: int) -> tuple[Body, Body]:
    """Return the forward and the backward direction of `collect`."""
    if site.sharded:
        return partial(site.gather_features, widths=[width]), partial(site.scatter_features, widths=[width])
    return identity, site.sum_y


def collect(a: Tensor, site: OpContext, width: int) -> AsyncResult | Ready:
    """inner -> [m/z, n/x]"""
    return Ready(a) if site.y == 1 else site.launch(a, *collect_bodies(site, width))


def whole_over_y(a: Tensor, site: OpContext) -> AsyncResult | Ready:
    """[m/z, w] {sum y} -> whole over y, where each rank reads the part that the inner layout gives it.

    The gradients of those parts are owed a sum over exactly the axes that cut the inner layout, so backward sums over y
    if activations are sharded.
    """
    return Ready(a) if site.y == 1 else site.launch(a, site.sum_y, site.sum_y if site.sharded else identity)


def whole_over_x(a: Tensor, site: OpContext, widths: Sequence[int]) -> AsyncResult | Ready:
    """[m/z, sum w_i/x] -> whole over x as well, for K and V where x would cut through a head"""
    if site.x == 1:
        return Ready(a)
    whole = [width * site.x for width in widths]
    gather = partial(site.gather_features, widths=whole, axis="x")
    return site.launch(a, gather, partial(site.scatter_features, widths=whole, axis="x"))


def take_apart(a: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Split dim 1 into tensors of these widths that can each be changed in place.

    Autograd refuses that for the views that `split` returns, because they share one version counter. The parts do not
    overlap, so here each has a counter of its own.
    """
    return list(TakeApart.apply(a, list(widths)))


class TakeApart(torch.autograd.Function):
    """Forward splits along dim 1; backward joins the gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, widths: list[int]) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(part.data for part in a.split(widths, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # noqa: ARG004
        return torch.cat(gradients, dim=1), None


def changeable(output: Tensor, *inputs: Tensor) -> Tensor:
    """Return an autograd function's output in a form that model code may change in place.

    Autograd refuses that for views. A view of a buffer that belongs to nobody else is detached from it.
    """
    if not output._is_view():
        return output
    memory = output.untyped_storage()._cdata
    return output if any(tensor.untyped_storage()._cdata == memory for tensor in inputs) else output.detach()


class Conjugate(torch.autograd.Function):
    """An operator that waits where it launches: forward runs `there`, backward runs `back`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return changeable(there(tensor), tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(gradient), None, None
