"""When one layer's tensors are alive in backward: its moments, each with the bytes that come on top of what is kept.

Plays backward of a layer once with sizes in place of tensors: operators, products, and the backlog that keeps dw's
product until something is in flight.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from fourfold.engine import WgradQueue
from fourfold.planner.held import Held

DOWN, UP, OUT, QKV = range(4)
"""A layer's products in the order of backward."""
NONE = -1


class Moment(NamedTuple):
    """Bytes beyond what the layers keep; which products' weights are used, which dw is made, what came before."""

    nbytes: int
    using: int
    making: int
    used: int
    sent: int
    """How many of the layer's dw have been sent; -1: not even the last one of the layer above."""


class Lives:
    """One layer's backward, from the gradient of its output to that of its input."""

    def __init__(self, held: Held) -> None:
        self.held = held
        share = held.share
        self.policy = share.policy
        self.over_x, self.over_y = share.shape.x > 1, share.shape.y > 1
        self.cut_x, self.cut_y = self.over_x and held.sharded, self.over_y and held.sharded
        behind = self.policy.overlap.wgrad_behind_messages and (self.over_x or self.over_y)
        self.most = WgradQueue.MOST if behind else 0
        self.rereads = not self.policy.keep_gathered
        self.reading = held.entered if self.cut_x and self.rereads else 0
        """An Expand layer's input, gathered once more."""
        self.wide = held.wide // held.compute
        """How many times as large a tensor is in the dtype of statistics."""
        self.now, self.used, self.sent = 0, 0, 0
        self.jobs: deque[tuple[int, int, int]] = deque()
        self.moments: list[Moment] = []

    def play(self) -> list[Moment]:
        held = self.held
        qkv = held.m * (held.q + 2 * held.kv) * held.compute
        if self.most:  # the layer above has left its last one
            self.sent = -1
            self.queue(QKV, qkv + self.reading + held.normed)
        self.now += held.at_rest  # the gradient of the residual stream
        if self.policy.recompute == "block":
            self.now += held.attention(recompute=False) + held.mlp() - held.at_rest
            self.now += held.layer_weights() if held.keeps_weights else 0
        self.contract(DOWN, held.hidden, held.mlp_input())
        self.activation()
        self.expand(UP, held.gates * held.hidden, held.gates * held.hidden_cut)
        self.norm()
        self.contract(OUT, held.queries, 0)
        self.attention()
        self.expand(QKV, qkv, qkv // held.inner_cut)
        self.norm()
        return self.moments

    # --- bookkeeping

    def mark(self, extra: int = 0, *, using: int = NONE, making: int = NONE) -> None:
        """With `extra` bytes for a moment, for one half after the other."""
        nbytes = self.now + extra // self.held.halves
        self.moments.append(Moment(nbytes, using, making, self.used, self.sent))

    def whole_over_y(self, whole: int, cut: int) -> int:
        """A tensor that is whole over y for one half at a time."""
        return (whole + (self.held.halves - 1) * cut) // self.held.halves if self.cut_y else whole

    def queue(self, product: int, nbytes: int, joining: int = 0) -> None:
        """dw's product reads so many bytes that nothing else holds, some of which are joined first."""
        self.now += nbytes
        self.jobs.append((product, nbytes, joining))

    def run_one(self, *, using: int = NONE) -> None:
        if self.jobs:
            product, nbytes, joining = self.jobs.popleft()
            if joining:
                self.mark(joining)
            self.mark(using=using, making=product)
            self.now -= nbytes
            self.sent += 1

    def product(self, index: int, dout: int, reading: int, da: int, kept: int, joining: int = 0) -> None:
        """E2, then E3 or its place in the backlog. `dout` bytes are there already, `kept` belongs to the layer."""
        self.used += 1
        self.now += da - dout - kept
        self.queue(index, dout + reading + kept, joining)
        self.mark(using=index)
        while len(self.jobs) > self.most:
            self.run_one(using=index)  # its weights are let go when backward of the product returns

    # --- the steps

    def contract(self, index: int, da: int, kept: int) -> None:
        held = self.held
        gathered = held.entered if self.cut_x else 0
        self.now += gathered
        if self.over_x:
            self.run_one()
        cut = da // held.inner_cut
        reading = da if self.cut_y and self.rereads else 0
        one = self.whole_over_y(da, cut)
        self.product(index, gathered, reading // held.halves, one, kept, joining=2 * reading)
        if self.over_y:
            self.mark(da)  # sent from a copy
            self.run_one()
            self.now -= one - cut

    def expand(self, index: int, dout: int, cut: int) -> None:
        held = self.held
        one = self.whole_over_y(dout, cut)
        if self.over_y:
            if self.cut_y:
                self.now += one
                self.mark(2 * dout)  # what arrived is cut apart and joined
                self.now -= cut
            self.run_one()
        self.product(index, one, self.reading, held.entered_whole, held.normed)
        if self.over_x:
            self.now += held.at_rest
            self.mark()
            self.run_one()
            self.now -= held.entered_whole

    def activation(self) -> None:
        hidden = self.held.hidden_cut
        if self.held.gates == 1:
            self.mark(hidden)
            self.now -= hidden  # what GELU read; its gradient takes the place of the output's
            return
        self.mark(2 * hidden)  # the gradients of silu(gate) and of up beside that of their product
        self.now -= 2 * hidden  # silu(gate), then gate and up, less the second gradient
        self.mark(2 * hidden)  # the two gradients side by side

    def attention(self) -> None:
        held = self.held
        config = held.share.config
        saved, output = held.mixing, held.queries_cut
        features = held.queries_cut + 2 * held.m * held.selected[0] * held.compute
        if self.policy.recompute == "attention":
            reread = config.positions != "rope" or config.qk_norm
            self.now += saved - (held.read if reread else 0) + output
        sums = held.m * held.q // held.inner_cut * held.wide  # the kernel adds up dq in fp32
        self.mark(features + sums)
        self.now += features - held.queries_cut - saved - output
        if self.policy.recompute == "attention":
            self.now -= output + (0 if config.positions != "rope" or config.qk_norm else held.read)
        if config.positions == "rope":
            self.mark(3 * self.wide * held.queries_cut)  # rotated back in fp32
        joined = held.m * (held.q + 2 * held.kv) * held.compute // held.inner_cut
        self.mark(joined)
        self.now += joined - features

    def norm(self) -> None:
        held = self.held
        if self.over_y:
            self.mark(4 * self.wide * held.at_rest)  # no single kernel, where statistics travel
        self.mark(held.at_rest)
        self.now -= 2 * held.at_rest + held.statistics + held.masks
        # dout and what was normed are gone, and da takes the place of the stream's gradient
