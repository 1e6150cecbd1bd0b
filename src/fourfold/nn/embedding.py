"""The layers at both ends of a language model: embedding, learned positions, and the head with its chunked loss.

The table `w[V/x, h/y]` is cut like an Expand weight, so embedding and head can share one. Its global shape has the true
size of the vocabulary; ranks on x hold ceil(V/x) rows or fewer. Only logits are padded (`layout.logits_columns`), and
with them the table as the head's product reads it: by rows of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import comm
from fourfold.engine import Turns
from fourfold.grid import Grid, Shape
from fourfold.layout import (
    EXPAND_WEIGHT,
    GATHERED,
    HEAD_BIAS,
    OUTPUT_OF_HEAD,
    POSITIONS,
    PRODUCT,
    Init,
    Spec,
    chunk,
    inner,
    logits_columns,
    rest,
)
from fourfold.nn.layer import Layer
from fourfold.nn.linear import Expand, join, require_divisible
from fourfold.nn.loss import IGNORE_INDEX, Vocabulary, gradient_of_logits, log_sum_exp
from fourfold.operators import AsyncResult, Body, Conjugate, Ready, enter, leave, once_differentiable, spread_bodies
from fourfold.param_group import GroupMember, ParamGroup
from fourfold.policy import Policy
from fourfold.product import Factor, matmul_into


def looks_up_in_place(policy: Policy, shape: Shape, vocab: int, tokens: int) -> bool:
    """Return whether `tokens` tokens of each place go to the table over z, instead of the table to the tokens.

    A lookup in place sends z * tokens rows where a gathered table has ceil(V/x). All ranks must come to the same
    answer, so places must have equally many tokens.
    """
    ranks = shape.sizes[GATHERED]
    return policy.even_tokens and ranks > 1 and ranks * tokens < -(-vocab // shape.x)


def uneven_tokens(tokens: int) -> str:
    """Return the error of places that break the promise of `Policy.even_tokens`, on one that has `tokens` tokens."""
    return (
        f"places along {GATHERED} have different numbers of tokens, this place {tokens}; give all places equally many, "
        "or build with Policy(even_tokens=False)"
    )


class Lookup(torch.autograd.Function):
    """out[i] = w[id_i - first] if this rank holds that row, else 0; dw[r] = sum of dout over ids of row r.

    w [r, h/y] gathered over z, ids [m/z]; out [m/z, h/y] {sum x} if x cuts the rows. The row of the id `untrained` gets
    no gradient.
    """

    @staticmethod
    def forward(ctx: Any, group: ParamGroup, ids: Tensor, first: int, untrained: int | None, _: nn.Parameter) -> Tensor:
        ctx.group, ctx.turns, ctx.during = group, group.engine.turn.of, group.use()
        with group.using(turns=ctx.turns) as (w,):
            ctx.held = len(w)
            found, rows = look_up(w, ids - first, None if untrained is None else untrained - first)
        ctx.save_for_backward(rows)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        if ctx.group.members[0].parameter.requires_grad:
            dw = gradient_of_table(dout.to(ctx.group.reduce_dtype), rows, ctx.held)
            ctx.group.add([dw], turns=ctx.turns, during=ctx.during)
        return None, None, None, None, None


class LookupInPlace(torch.autograd.Function):
    """The same as `Lookup`, in the rows that this rank stores: ids travel over z, then what they find, but no table.

    w [r/z, h/y], ids [m/z] gathered over z to [m]; found [m, h/y] {sum x z}, of which out is this place's part:
    [m/z, h/y] {sum x}. In backward dout is gathered over z, and dw is complete over z.
    """

    @staticmethod
    def forward(ctx: Any, group: ParamGroup, ids: Tensor, first: int, untrained: int | None, _: nn.Parameter) -> Tensor:
        ctx.group, ctx.during, grid = group, group.use(), group.grid
        ids = comm.all_gather(ids.long(), grid, GATHERED, label=group.label).wait()
        first += chunk(group.rows[0], grid.size(GATHERED), grid.coords[GATHERED]).start
        (w,) = group.shards()
        ctx.held = len(w)
        found, rows = look_up(w, ids - first, None if untrained is None else untrained - first)
        ctx.save_for_backward(rows)
        return comm.reduce_scatter(found, grid, GATHERED, label=group.label).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        (rows,) = ctx.saved_tensors
        if ctx.group.members[0].parameter.requires_grad:
            dout = comm.all_gather(dout, ctx.group.grid, GATHERED, label=ctx.group.label).wait()
            dw = gradient_of_table(dout.to(ctx.group.reduce_dtype), rows, ctx.held)
            ctx.group.deposit([dw], during=ctx.during)
        return None, None, None, None, None


def look_up(w: Tensor, rows: Tensor, untrained: int | None) -> tuple[Tensor, Tensor]:
    """Return w[rows], and the rows that get a gradient.

    A row outside of w is 0, and is replaced by the row behind the end, as `untrained` is: it gets no gradient.
    """
    elsewhere = (rows < 0) | (rows >= len(w))
    left_out = elsewhere if untrained is None else elsewhere | (rows == untrained)
    trained = rows.masked_fill(left_out, len(w))
    if len(w) == 0:  # a rank past the end of a small vocabulary: torch cannot look up in an empty table
        return w.new_zeros(len(rows), w.shape[1]), trained
    found = functional.embedding(rows.masked_fill(elsewhere, 0), w)
    return found.masked_fill_(elsewhere[:, None], 0), trained


def gradient_of_table(dout: Tensor, rows: Tensor, held: int) -> Tensor:
    """Return dw [held, h/y]; the row behind the end, at which rows of other ranks point, is left out.

    Its dtype is that of dout: a cast comes first, since the sum of a frequent token must not be rounded at every term.
    """
    return torch.ops.aten.embedding_dense_backward(dout, rows, held + 1, held, False)[:held]


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
        is_copy: bool = False,
    ) -> None:
        """`untrained`: an id with a row that gets no gradient from this layer, such as padding.

        With `is_copy` a rank at another pipe coordinate has the same table.
        """
        super().__init__(grid, policy)
        require_divisible(self, "features", features, ("y",))
        self.vocab, self.untrained = vocab, untrained
        self.declare("weight", Spec((vocab, features), EXPAND_WEIGHT, PRODUCT, init, is_copy))

    def forward(self, ids: Tensor, most: int | None = None) -> Tensor:
        return self.launch(ids, most).wait()

    def launch(self, ids: Tensor, most: int | None = None) -> AsyncResult | Ready:
        """`most` is the number of ids of the largest half, which decides for all halves: their gradients are summed."""
        group, tokens = self.group("weight"), ids.numel()
        checks = self.policy.even_tokens and group.gradients.guarded
        if checks and not comm.equal_along(tokens, self.grid, (GATHERED,)):
            raise ValueError(uneven_tokens(tokens))
        first = chunk(self.vocab, self.grid.size("x"), self.grid.coords["x"]).start
        in_place = looks_up_in_place(self.policy, self.grid.shape, self.vocab, tokens if most is None else most)
        find = LookupInPlace if in_place else Lookup
        found = find.apply(group, ids.flatten(), first, self.untrained, self.weight)
        return leave(found, self.site(tokens))


class Positions(Layer):
    """Adds w[position] to tokens at rest: a learned vector for each position in a sequence."""

    def __init__(self, grid: Grid, policy: Policy, length: int, features: int, *, init: Init = Init(std=0.02)) -> None:
        super().__init__(grid, policy)
        self.declare("weight", Spec((length, features), POSITIONS, rest(policy.activations), init))

    def forward(self, a: Tensor, seq: int, positions: Tensor | None = None) -> Tensor:
        """`positions` [rows, seq] are those of packed documents; without them every row counts from 0."""
        first = self.grid.coords["x"] * a.shape[0] if "x" in rest(self.policy.activations).axes else 0
        tokens = torch.arange(first, first + a.shape[0], device=a.device)
        # The tokens that pad the last rank on x may read any position; their results are dropped.
        ids = tokens % seq if positions is None else positions.flatten()[tokens.clamp(max=positions.numel() - 1)]
        return a + Lookup.apply(self.group("weight"), ids, 0, None, self.weight)


class Head(Expand):
    """Logits: an Expand layer over a vocabulary of any size, with the embedding's table or its own.

    rest -> enter -> [m/z, k/y] -> product [m/z, p] {sum y} -> spread -> [m/z, p/y], where p is ceil(V/x) padded until y
    divides it and its rows are aligned. `columns` are the ids that a rank's columns stand for.
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
        self.declare("bias", Spec((vocab,), HEAD_BIAS, OUTPUT_OF_HEAD) if bias else None)

    @property
    def weight_member(self) -> GroupMember:
        return self.member("weight") if self.tied_to[0] is None else self.tied_to[0].member("weight")

    @property
    def columns_held(self) -> int:
        """Columns of logits on every rank, padding included."""
        return self.width // self._cuts

    @property
    def width(self) -> int:
        return self._width(self.weight_member.parameter.dtype)

    def _width(self, stored: torch.dtype) -> int:
        """Return the columns of the product with a table that is stored in this dtype."""
        itemsize = (self.policy.compute_dtype or stored).itemsize
        return logits_columns(self.vocab, self.grid.size("x"), self._cuts, itemsize)

    def padding_of(self, dtype: torch.dtype) -> dict[tuple[Layer, str], int]:
        padding = self._width(dtype) - len(self._rows)
        if self.grid.size(GATHERED) > 1 or padding == 0:
            return {}  # a gathered table has its padding in the buffer
        return {(self.tied_to[0] or self, "weight"): padding}

    @property
    def _cuts(self) -> int:
        """Into how many parts `spread` cuts the columns of the product."""
        return self.grid.size("y") if self.policy.activations == "sharded" else 1

    @property
    def _rows(self) -> range:
        """The rows of the table on this rank, by id."""
        return chunk(self.vocab, self.grid.size("x"), self.grid.coords["x"])

    @property
    def bias_columns(self) -> range:
        return range(len(self._rows))

    @property
    def adds_bias(self) -> bool:
        # The first rank on y adds the whole bias to its partial sum: padding may lie between the ids of two ranks.
        return self.grid.coords["y"] == 0

    def vocabulary(self, ignore_index: int = IGNORE_INDEX, *, of_place: bool = False) -> Vocabulary:
        """Return what the loss must know about this rank's logits."""
        cut = inner(self.policy.activations)
        return Vocabulary(self.grid, cut, self.columns(), ignore_index, self.policy.compile, of_place)

    def columns(self) -> range:
        """Return the ids that this rank's columns stand for; further columns are padding."""
        rows, index = self._rows, self.grid.coords["y"] if self._cuts > 1 else 0
        first = rows.start + index * self.columns_held
        return range(min(first, rows.stop), min(first + self.columns_held, rows.stop))

    def whole(self, logits: Tensor) -> Tensor:
        """inner -> [m/z, V] on every rank of the place, for a computation that those ranks repeat."""
        return Conjugate.apply(logits, self.join, self.cut)

    def join(self, logits: Tensor) -> Tensor:
        """inner -> [m/z, V], outside of autograd."""
        if self.policy.activations == "sharded":
            logits = comm.all_gather(logits, self.grid, "y", dim=1, label=self.label).wait()
        ranks = self.grid.size("x")
        blocks = comm.all_gather(logits, self.grid, "x", dim=1, label=self.label).wait().chunk(ranks, dim=1)
        return torch.cat([block[:, : len(chunk(self.vocab, ranks, x))] for x, block in enumerate(blocks)], dim=1)

    def cut(self, dlogits: Tensor) -> Tensor:
        """[m/z, V] -> inner, outside of autograd."""
        rows = self._rows
        own = functional.pad(dlogits[:, rows.start : rows.stop], (0, self.width - len(rows)))
        if self.policy.activations == "sharded":
            own = own.chunk(self.grid.size("y"), dim=1)[self.grid.coords["y"]]
        return own.contiguous()

    def loss_share(self, a: Tensor, targets: Tensor, ignore_index: int, count: Tensor) -> Turns[Tensor]:
        """Return a half's share of the loss in fp64 from `a` at rest; the logits of one chunk are all that ever exists.

        `count` is the number of targets of the whole batch.
        """
        site, factor = self.site(targets.numel()), join(self)
        spec = ChunkedHead(
            factor, self.vocabulary(ignore_index), *spread_bodies(site, [self.width]), self.policy.loss_chunk
        )
        entering = enter(a, site)
        if entering.travels:
            yield  # the other half computes while this half's input is gathered
        return ChunkedLoss.apply(spec, entering.wait(), targets.flatten(), count, factor.weights[0].parameter)


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """The table, the vocabulary, the two directions of `spread`, and the tokens of a chunk."""

    factor: Factor
    vocabulary: Vocabulary
    spread: Body
    unspread: Body
    chunk: int


class ChunkedLoss(torch.autograd.Function):
    """share = sum over a half's tokens of nll / count, with a [m/z, k/y] and w [p, k/y] gathered over z.

    For each chunk c of tokens: l_c = spread(a_c w^T); nll by E9; dl_c by E10; dout_c = unspread(dl_c);
    da_c = dout_c w (E2); dw += dout_c^T a_c (E3).

    The count of targets is known beforehand, so the gradient of a chunk's logits follows from the chunk alone. Forward
    computes da and dw as well, and backward only scales them: the table and the input are gathered once, and no product
    is computed twice.
    """

    @staticmethod
    def forward(ctx: Any, spec: ChunkedHead, a: Tensor, targets: Tensor, count: Tensor, _: nn.Parameter) -> Tensor:
        factor = spec.factor
        ctx.factor, ctx.turns, ctx.during = factor, factor.group.engine.turn.of, factor.matrices.use()
        wants_da, wants_dw = ctx.needs_input_grad[1], ctx.needs_input_grad[4]
        da = torch.empty_like(a) if wants_da else None
        nll = torch.zeros((), dtype=torch.float64, device=a.device)
        share = 1 / count
        held = factor.group.engine.prefetcher.take(factor.without, ctx.turns)
        w = held.value.w
        dw = torch.zeros_like(w, dtype=factor.group.reduce_dtype) if wants_dw else None
        for first in range(0, len(a), spec.chunk):
            part, aims = a[first : first + spec.chunk], targets[first : first + spec.chunk]
            # Waited for at once: a second chunk in flight would need memory for a second chunk of logits.
            logits = spec.spread(part @ w.t()).wait()
            kept, lse, chunk_nll = log_sum_exp(spec.vocabulary, logits, aims)
            nll += chunk_nll
            if da is not None or dw is not None:
                dout = spec.unspread(gradient_of_logits(spec.vocabulary, kept, aims, lse, share)).wait()
                if da is not None:
                    torch.mm(dout, w, out=da[first : first + spec.chunk])
                if dw is not None:
                    matmul_into(dout.t(), part, dw.dtype, onto=dw)
        factor.group.engine.prefetcher.release(factor.without, held)
        ctx.save_for_backward(da, dw)
        return nll * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dshare: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        da, dw = ctx.saved_tensors
        if dw is not None:
            (member,) = ctx.factor.weights
            # Rows past the member's are padding of the vocabulary.
            ctx.factor.matrices.add([dw[: member.rows] * dshare.to(dw.dtype)], turns=ctx.turns, during=ctx.during)
        return None, None if da is None else da * dshare.to(da.dtype), None, None, None
