"""Embedding of tokens, learned positions, and the head that reads logits out.

The table `w[V/x, h/y]` is cut like an Expand weight, so embedding and head can share one. Its global shape
is the vocabulary's true one; ranks on x hold ceil(V/x) rows or fewer. Padding lives in logits only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import comm
from fourfold.grid import Grid
from fourfold.layout import EXPAND_WEIGHT, HEAD_BIAS, OUTPUT_OF_HEAD, POSITIONS, PRODUCT, Init, Spec, chunk, inner, rest
from fourfold.nn.layer import Layer
from fourfold.nn.linear import Expand, require_divisible
from fourfold.nn.loss import IGNORE_INDEX, Vocabulary
from fourfold.operators import AsyncResult, Conjugate, Ready, leave, once_differentiable
from fourfold.param_group import GroupMember, ParamGroup
from fourfold.policy import Policy


class Lookup(torch.autograd.Function):
    """out[i] = w[id_i - first] where this rank holds that row, else 0; dw[r] = sum of dout over ids of row r.

    w [r, h/y] gathered over z, ids [m/z]; out [m/z, h/y] {sum x} where x cuts the rows. The row of the id `untrained`
    gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, unit: ParamGroup, ids: Tensor, first: int, untrained: int | None, _: nn.Parameter) -> Tensor:
        ctx.unit, ctx.turns = unit, unit.engine.turn.of
        with unit.using(turns=ctx.turns) as (w,):
            rows = ids - first
            elsewhere = (rows < 0) | (rows >= w.shape[0])
            ctx.held = w.shape[0]
            left_out = elsewhere if untrained is None else elsewhere | (ids == untrained)
            ctx.save_for_backward(rows.masked_fill(left_out, w.shape[0]))
            if w.shape[0] == 0:
                return w.new_zeros(len(ids), w.shape[1])
            found = functional.embedding(rows.masked_fill(elsewhere, 0), w)
        return found.masked_fill_(elsewhere[:, None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        if ctx.unit.members[0].parameter.requires_grad:
            # Rows that other ranks hold point past the end, at the row that the kernel leaves out. Cast first:
            # a frequent token's sum must not be rounded at every term.
            dw = torch.ops.aten.embedding_dense_backward(
                dout.to(ctx.unit.reduce_dtype), rows, ctx.held + 1, ctx.held, False
            )
            ctx.unit.add([dw[: ctx.held]], turns=ctx.turns)
        return None, None, None, None, None


class Embedding(Layer):
    """ids [m/z] -> lookup [m/z, h/y] {sum x} -> leave -> rest"""

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        vocab: int,
        features: int,
        *,
        init: Init = Init(std=0.02),
        untrained: int | None = None,
    ) -> None:
        """`untrained`: an id whose row gets no gradient from here, such as that of padding."""
        super().__init__(grid, policy)
        require_divisible(self, "features", features, y=grid.size("y"))
        self.vocab, self.untrained = vocab, untrained
        self.declare("weight", Spec((vocab, features), EXPAND_WEIGHT, PRODUCT, init))

    def forward(self, ids: Tensor) -> Tensor:
        return self.launch(ids).wait()

    def launch(self, ids: Tensor) -> AsyncResult | Ready:
        first = chunk(self.vocab, self.grid.size("x"), self.grid.coords["x"]).start
        found = Lookup.apply(self.unit("weight"), ids.flatten(), first, self.untrained, self.weight)
        return leave(found, self.site(ids.numel()))


class Positions(Layer):
    """Adds w[position] to tokens at rest, a learned vector for each place in a sequence."""

    def __init__(self, grid: Grid, policy: Policy, length: int, features: int, *, init: Init = Init(std=0.02)) -> None:
        super().__init__(grid, policy)
        self.declare("weight", Spec((length, features), POSITIONS, rest(policy.activations), init))

    def forward(self, a: Tensor, seq: int, positions: Tensor | None = None) -> Tensor:
        """`positions` [rows, seq] are those of packed documents; otherwise every row counts from 0."""
        first = self.grid.coords["x"] * a.shape[0] if "x" in rest(self.policy.activations).axes else 0
        tokens = torch.arange(first, first + a.shape[0], device=a.device)
        # what x pads reads any place
        places = tokens % seq if positions is None else positions.flatten()[tokens.clamp(max=positions.numel() - 1)]
        return a + Lookup.apply(self.unit("weight"), places, 0, None, self.weight)


class Head(Expand):
    """Logits: an Expand layer over a vocabulary of any size, with the embedding's table or one of its own.

    rest -> enter -> [m/z, k/y] -> product [m/z, p] {sum y} -> spread -> [m/z, p/y], where p is ceil(V/x)
    padded until y divides it; `columns` says which ids a rank's columns stand for.
    """

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        features: int,
        vocab: int,
        *,
        tied_to: Embedding | None = None,
        bias: bool = False,
    ) -> None:
        Layer.__init__(self, grid, policy)
        self.vocab = vocab
        self.tied_to = (tied_to,)  # in a tuple, so that torch does not register the embedding here again
        if tied_to is None:
            self.declare("weight", Spec((vocab, features), EXPAND_WEIGHT, PRODUCT, Init(std=0.02)))
        if bias:
            self.declare("bias", Spec((vocab,), HEAD_BIAS, OUTPUT_OF_HEAD))
        else:
            self.register_parameter("bias", None)

    @property
    def weight_member(self) -> GroupMember:
        return self.member("weight") if self.tied_to[0] is None else self.tied_to[0].member("weight")

    @property
    def width(self) -> int:
        most = -(-self.vocab // self.grid.size("x"))
        ranks = self.grid.size("y") if self.policy.activations == "sharded" else 1
        return -(-most // ranks) * ranks

    @property
    def bias_columns(self) -> range:
        return range(len(chunk(self.vocab, self.grid.size("x"), self.grid.coords["x"])))

    @property
    def adds_bias(self) -> bool:
        """The first rank on y adds all of it to its partial sum, since padding may lie between the ids of two ranks."""
        return self.grid.coords["y"] == 0

    def vocabulary(self, ignore_index: int = IGNORE_INDEX, *, of_place: bool = False) -> Vocabulary:
        """What the loss must know of this rank's logits."""
        cut = inner(self.policy.activations)
        return Vocabulary(self.grid, cut, self.columns(), ignore_index, "loss", self.policy.compile, of_place)

    @property
    def columns_held(self) -> int:
        """Columns of logits on every rank, padding included."""
        return self.width // self.grid.size("y") if self.policy.activations == "sharded" else self.width

    def columns(self) -> range:
        """The ids that this rank's columns stand for; further columns are padding."""
        held = chunk(self.vocab, self.grid.size("x"), self.grid.coords["x"])
        sharded = self.policy.activations == "sharded"
        first = held.start + (self.grid.coords["y"] * self.columns_held if sharded else 0)
        return range(min(first, held.stop), min(first + self.columns_held, held.stop))

    def whole(self, logits: Tensor) -> Tensor:
        """inner -> [m/z, V] on every rank of the place, for use that is repeated there."""
        return Conjugate.apply(logits, self.join, self.cut)

    def join(self, logits: Tensor) -> Tensor:
        """inner -> [m/z, V], outside of autograd."""
        if self.policy.activations == "sharded":
            logits = comm.all_gather(logits, self.grid, "y", dim=1, label=self.label).wait()
        ranks = self.grid.size("x")
        blocks = comm.all_gather(logits, self.grid, "x", dim=1, label=self.label).wait().chunk(ranks, dim=1)
        held = [block[:, : len(chunk(self.vocab, ranks, x))] for x, block in enumerate(blocks)]
        return torch.cat(held, dim=1)

    def cut(self, dlogits: Tensor) -> Tensor:
        """[m/z, V] -> inner, outside of autograd."""
        held = chunk(self.vocab, self.grid.size("x"), self.grid.coords["x"])
        mine = functional.pad(dlogits[:, held.start : held.stop], (0, self.width - len(held)))
        if self.policy.activations == "sharded":
            mine = mine.chunk(self.grid.size("y"), dim=1)[self.grid.coords["y"]]
        return mine.contiguous()
