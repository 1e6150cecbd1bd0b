"""The four conjugate operators between the two layouts; each one's backward is its partner's forward.

    operator   sharded: forward / backward                   replicated: forward / backward
    enter      all-gather tokens x / reduce-scatter          identity / all-reduce x
    leave      reduce-scatter tokens x / all-gather          all-reduce x / identity
    spread     reduce-scatter features y / all-gather        all-reduce y / identity
    collect    all-gather features y / reduce-scatter        identity / all-reduce y

An operator returns a `AsyncResult`: launched now, read by `wait()` later. The two are a pair of autograd functions, and
backward launches where forward landed and lands where forward launched, so whatever ran between the two runs between
them in backward again. On an axis of size 1 nothing is launched and nothing recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable as once_of_torch
from torch.nn import functional

from fourfold import comm
from fourfold.comm import Pending
from fourfold.engine import Engine
from fourfold.grid import Grid
from fourfold.policy import Policy


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of this name, which refuses `create_graph=True` where backward runs, not a pass later."""
    once = once_of_torch(backward)

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # autograd turns it on with create_graph alone
            raise RuntimeError(
                "create_graph=True: gradients of gradients do not pass through layers on a grid; leave create_graph "
                "out, or keep the module that needs it out of ff.parallelize and call it beside the model"
            )
        return once(ctx, *gradients)

    return refusing


Body = Callable[[Tensor], Pending[Tensor]]


def identity(tensor: Tensor) -> Pending[Tensor]:
    return Pending(tensor.detach)  # autograd wants an output that is not its input


class AsyncResult:
    """A tensor on its way through an operator with these two bodies."""

    travels = True

    def __init__(self, a: Tensor, there: Body, back: Body, engine: Engine) -> None:
        self.there, self.back, self.engine = there, back, engine
        self.pending: Pending[Tensor] | None = None
        self._token: Tensor | None = Launch.apply(self, a)

    def wait(self) -> Tensor:
        # the token's autograd node holds the flight: keeping it would keep what forward saved until Python looks for
        # cycles
        token, self._token = self._token, None
        return Land.apply(self, token)

    def take(self) -> Tensor:
        """The result of the direction that is in flight."""
        if self.pending is None:
            raise RuntimeError("this flight has landed already; an operator's result is read once")
        pending, self.pending = self.pending, None
        return pending.wait()


class Ready:
    """What never travelled: an operator on an axis of size 1."""

    travels = False

    def __init__(self, a: Tensor) -> None:
        self.a = a

    def wait(self) -> Tensor:
        return self.a


class Launch(torch.autograd.Function):
    """Forward launches `there`; backward waits for what `Land` launched, with a product of the backlog behind it.

    The token stands for the tensor in flight, so that autograd knows what follows what.
    """

    @staticmethod
    def forward(ctx: Any, flight: AsyncResult, a: Tensor) -> Tensor:
        ctx.flight = flight
        flight.pending = flight.there(a)
        return a.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        ctx.flight.engine.wgrad_queue.run_one()
        return None, ctx.flight.take()


class Land(torch.autograd.Function):
    """Forward waits for what `Launch` launched; backward launches `back`."""

    @staticmethod
    def forward(ctx: Any, flight: AsyncResult, _: Tensor) -> Tensor:
        ctx.flight = flight
        return changeable(flight.take())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        ctx.flight.pending = ctx.flight.back(gradient)
        return None, gradient.new_empty(0)


@dataclass(frozen=True, slots=True)
class OpContext:
    """Where an operator runs: the grid, the mode, the tokens of a (data, z) place, the label, the overlap."""

    grid: Grid
    policy: Policy
    tokens: int
    label: str
    engine: Engine

    def named(self, label: str) -> OpContext:
        return OpContext(self.grid, self.policy, self.tokens, label, self.engine)

    @property
    def sharded(self) -> bool:
        return self.policy.activations == "sharded"

    @property
    def rows_at_rest(self) -> int:
        """Tokens that a rank holds between sublayers."""
        return -(-self.tokens // self.grid.size("x")) if self.sharded else self.tokens

    def launch(self, a: Tensor, axis: str, there: Body, back: Body) -> AsyncResult | Ready:
        return AsyncResult(a, there, back, self.engine) if self.grid.size(axis) > 1 else Ready(a)

    def gather_tokens(self, cut: Tensor) -> Pending[Tensor]:
        """[ceil(m/x), f] -> [m, f]; the padding that `scatter_tokens` added is dropped."""
        return comm.all_gather(cut, self.grid, "x", label=self.label).then(lambda whole: whole[: self.tokens])

    def scatter_tokens(self, whole: Tensor) -> Pending[Tensor]:
        """[m, f] {sum x} -> [ceil(m/x), f]; where x does not divide m zeros are added at the end."""
        missing = -self.tokens % self.grid.size("x")
        whole = functional.pad(whole, (0, 0, 0, missing)) if missing else whole
        return comm.reduce_scatter(whole, self.grid, "x", label=self.label)

    def sum_x(self, owed: Tensor) -> Pending[Tensor]:
        return comm.all_reduce(owed, self.grid, "x", label=self.label)

    def gather_features(self, cut: Tensor, widths: Sequence[int], axis: str = "y") -> Pending[Tensor]:
        """[m, sum w_i/y] -> [m, sum w_i]: one message, each of the w_i joined on its own."""
        ranks = self.grid.size(axis)

        def join(joined: Tensor) -> Tensor:
            if ranks == 1:
                return joined
            parts = joined.unflatten(0, (ranks, -1)).split([width // ranks for width in widths], dim=2)
            return torch.cat([part.movedim(0, 1).flatten(1) for part in parts], dim=1)

        return comm.all_gather(cut, self.grid, axis, label=self.label).then(join)

    def scatter_features(self, whole: Tensor, widths: Sequence[int], axis: str = "y") -> Pending[Tensor]:
        """[m, sum w_i] {sum y} -> [m, sum w_i/y]: one message, each of the w_i cut on its own."""
        ranks = self.grid.size(axis)
        if ranks > 1:
            parts = [part.unflatten(1, (ranks, -1)).movedim(1, 0) for part in whole.split(list(widths), dim=1)]
            whole = torch.cat(parts, dim=2).flatten(0, 1)
        return comm.reduce_scatter(whole, self.grid, axis, label=self.label)

    def sum_y(self, owed: Tensor) -> Pending[Tensor]:
        return comm.all_reduce(owed, self.grid, "y", label=self.label)


def enter(a: Tensor, site: OpContext) -> AsyncResult | Ready:
    """rest -> [m/z, k/y]"""
    return site.launch(a, "x", *((site.gather_tokens, site.scatter_tokens) if site.sharded else (identity, site.sum_x)))


def leave(a: Tensor, site: OpContext) -> AsyncResult | Ready:
    """[m/z, k/y] {sum x} -> rest"""
    return site.launch(a, "x", *((site.scatter_tokens, site.gather_tokens) if site.sharded else (site.sum_x, identity)))


def spread_bodies(site: OpContext, widths: Sequence[int]) -> tuple[Body, Body]:
    """The two directions of `spread`."""
    if site.sharded:
        return partial(site.scatter_features, widths=widths), partial(site.gather_features, widths=widths)
    return site.sum_y, identity


def spread(a: Tensor, site: OpContext, widths: Sequence[int]) -> AsyncResult | Ready:
    """[m/z, n/x] {sum y} -> inner, for the outputs of these widths side by side"""
    return site.launch(a, "y", *spread_bodies(site, widths))


def collect(a: Tensor, site: OpContext, width: int) -> AsyncResult | Ready:
    """inner -> [m/z, n/x]"""
    if site.sharded:
        bodies = partial(site.gather_features, widths=[width]), partial(site.scatter_features, widths=[width])
    else:
        bodies = identity, site.sum_y
    return site.launch(a, "y", *bodies)


def whole_over_y(a: Tensor, site: OpContext) -> AsyncResult | Ready:
    """[m/z, w] {sum y} -> whole over y, for ranks that each read a part.

    Those ranks are the ones that the inner layout cuts features over. What they send back are sums that are owed over
    exactly those axes.
    """
    return site.launch(a, "y", site.sum_y, site.sum_y if site.sharded else identity)


def whole_over_x(a: Tensor, site: OpContext, widths: Sequence[int]) -> AsyncResult | Ready:
    """[m/z, sum w_i/x] -> whole over x too, where x cuts through a head."""
    whole = [width * site.grid.size("x") for width in widths]
    gather = partial(site.gather_features, widths=whole, axis="x")
    return site.launch(a, "x", gather, partial(site.scatter_features, widths=whole, axis="x"))


def take_apart(a: Tensor, widths: Sequence[int]) -> list[Tensor]:
    """Cut dim 1 into tensors of these widths that can each be changed in place.

    Autograd does not allow that for the views that `split` gives, since they share a count of changes; what they hold
    does not overlap, so here each has its own.
    """
    return list(TakeApart.apply(a, list(widths)))


class TakeApart(torch.autograd.Function):
    """`split` along dim 1; backward joins the gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, widths: list[int]) -> tuple[Tensor, ...]:  # noqa: ARG004
        return tuple(part.data for part in a.split(widths, dim=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # noqa: ARG004
        return torch.cat(gradients, dim=1), None


def changeable(output: Tensor, *inputs: Tensor) -> Tensor:
    """An autograd function's output that model code may change in place.

    Autograd refuses that for views. One of a buffer that nobody else has is as good as a tensor of its own.
    """
    if not output._is_view():
        return output
    memory = output.untyped_storage()._cdata
    return output if any(tensor.untyped_storage()._cdata == memory for tensor in inputs) else output.detach()


class Conjugate(torch.autograd.Function):
    """An operator that is over where it begins: forward `there`, backward `back`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return changeable(there(tensor), tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(gradient), None, None
