"""The reference model: a decoder-only transformer, GPT or Llama by its config.

    tokens -> embedding (+ positions) -> blocks -> norm -> head -> loss or logits

The residual stream rests fully cut between sublayers; each sublayer enters, computes in inner, leaves.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fourfold.comm import equal_along
from fourfold.grid import Grid
from fourfold.layout import Init, Policy
from fourfold.models.config import Config, config
from fourfold.nn.attention import Attention, Batch, rope_tables
from fourfold.nn.chunked import chunked_loss
from fourfold.nn.dropout import Dropout
from fourfold.nn.embedding import Embedding, Head, Positions
from fourfold.nn.initial import key_of
from fourfold.nn.layer import Layer, assemble
from fourfold.nn.loss import IGNORE_INDEX, cross_entropy, sum_over_batch
from fourfold.nn.mlp import MLP
from fourfold.nn.norm import Norm
from fourfold.nn.recompute import recompute

Stream = tuple[Tensor, Tensor | None]
"""The residual stream: what it held, and what the last sublayer adds. The next norm adds it up as it reads."""
Rope = tuple[Tensor, Tensor] | None


class Block(Layer):
    """a + attention(norm(a)), then a + mlp(norm(a)), both in rest."""

    def __init__(self, config: Config, grid: Grid, policy: Policy) -> None:
        super().__init__(grid, policy)
        init = Init(std=0.02)
        out_init = Init(std=0.02 / (2 * config.layers) ** 0.5)  # keeps the stream's variance as depth grows
        self.attention_norm = _norm(config, grid, policy)
        self.attention = Attention(
            grid,
            policy,
            config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            bias=config.bias,
            qk_norm=config.qk_norm,
            dropout=config.dropout,
            eps=config.norm_eps,
            init=init,
            out_init=out_init,
        )
        self.attention_dropout = Dropout(grid, policy, config.dropout)
        self.mlp_norm = _norm(config, grid, policy)
        self.mlp = MLP(
            grid,
            policy,
            config.hidden,
            config.mlp_hidden,
            kind=config.mlp,
            bias=config.bias,
            init=init,
            out_init=out_init,
        )
        self.mlp_dropout = Dropout(grid, policy, config.dropout)

    def forward(self, a: Tensor, delta: Tensor | None, batch: Batch, rope: Rope) -> Stream:
        if self.policy.recompute == "block":
            whole = a if delta is None else a + delta  # one tensor to keep instead of two
            return recompute(self._compute, self.clock, whole, None, batch, rope)
        return self._compute(a, delta, batch, rope)

    def _compute(self, a: Tensor, delta: Tensor | None, batch: Batch, rope: Rope) -> Stream:
        a, normed = self.attention_norm.add(a, delta)
        a, normed = self.mlp_norm.add(a, self.attention_dropout(self.attention(normed, batch, rope)))
        return a, self.mlp_dropout(self.mlp(normed, batch.tokens))


class Transformer(Layer):
    """A model of `config` on the grid. Takes the rows of this rank's (data, z) place.

    `model(tokens, targets)` is the mean loss over the whole batch's unmasked targets, equal on all ranks.
    `model(tokens)` is the logits of the place's rows, over the whole vocabulary.
    """

    def __init__(self, config: Config, grid: Grid, policy: Policy) -> None:
        super().__init__(grid, policy)
        config.check(grid.shape, policy)
        self.config = config
        self._compared = False
        self.embedding = Embedding(grid, policy, config.vocab, config.hidden)
        learned = config.positions == "learned"
        self.positions = Positions(grid, policy, config.seq, config.hidden) if learned else None
        self.dropout = Dropout(grid, policy, config.dropout)
        self.layers = nn.ModuleList(Block(config, grid, policy) for _ in range(config.layers))
        self.norm = _norm(config, grid, policy)
        tied_to = self.embedding if config.tied else None
        self.head = Head(grid, policy, config.hidden, config.vocab, tied_to=tied_to)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        count: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> Tensor:
        """With `positions` [rows, seq] rows hold packed documents: each token's place in its own, counted from 0,
        and nothing reads across. With `count`, the targets of a whole batch of which these rows are a micro-step."""
        fault = self._fault(tokens, targets, positions, ignore_index)
        if fault and not self._reads(tokens):
            raise ValueError(fault)
        if fault:  # goes on with other ids, since the ranks beside it do: all of them hear of it at the end
            tokens = torch.zeros(1, 1, dtype=torch.long, device=tokens.device)
            targets = None if targets is None else tokens
            positions = None
        if self.training:
            self.clock.advance()
        batch = Batch.of(tokens, positions)
        a = self.hidden(tokens, positions)
        rope = None
        if self.positions is None:
            rope = rope_tables(batch, self.config.head_dim, self.config.rope_theta, a)
        stream: Stream = (a, None)
        for layer in self.layers:
            stream = layer(*stream, batch, rope)
        _, a = self.norm.add(*stream)
        targets = None if targets is None else targets.long()
        if targets is None:
            faults = sum_over_batch(torch.full((), float(bool(fault)), device=a.device), self.grid, "faults")
            result = self.head.whole(self.head(a, batch.tokens)).unflatten(0, (batch.rows, batch.seq))
        elif self.policy.loss_chunk:
            result, faults = chunked_loss(self.head, a, targets, ignore_index, count=count, faults=int(bool(fault)))
        else:
            logits = self.head(a, batch.tokens)
            vocabulary = self.head.vocabulary(ignore_index)
            result, faults = cross_entropy(logits, targets, vocabulary, count=count, faults=int(bool(fault)))
        if self._reads(tokens) and faults:
            raise ValueError(fault or "the batch of another (data, z) place is refused; its ranks say why")
        return result

    def hidden(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the first block reads: embedded tokens at rest."""
        a = self.embedding(tokens)
        if self.positions is not None:
            a = self.positions(a, tokens.shape[1], positions)
        return self.dropout(a)

    def _reads(self, tokens: Tensor) -> bool:
        """Whether ids are checked: always where that needs no reading back from a device."""
        return not tokens.is_meta and (tokens.device.type == "cpu" or self.policy.check_inputs)

    def _fault(self, tokens: Tensor, targets: Tensor | None, positions: Tensor | None, ignore_index: int) -> str:
        """What is wrong with the batch of this place, if anything."""
        fault = self._fault_of_shape(tokens, targets, positions)
        if not fault and self._reads(tokens):
            fault = self._fault_of_ids("token", tokens)
            if targets is not None and not fault:
                fault = self._fault_of_ids("target", targets.masked_fill(targets == ignore_index, 0))
            if positions is not None and not fault and not _count_up(positions):
                fault = "positions must start at 0 in every row, then count up by 1 or start anew at 0"
        if not tokens.is_meta and (self.policy.check_inputs or not self._compared):
            self._compared = True  # once is enough for a loop that reads its rows wrongly
            if not equal_along(_digest(tokens, targets, positions), self.grid, ("x", "y")):
                fault = fault or (
                    "ranks of one (data, z) place were given different rows; all ranks that differ in x and y alone "
                    "read the same ones (ff.local_rows cuts a batch so)"
                )
        return fault

    def _fault_of_shape(self, tokens: Tensor, targets: Tensor | None, positions: Tensor | None) -> str:
        if tokens.dim() != 2 or tokens.numel() == 0:
            return f"tokens has shape {tuple(tokens.shape)}; it must be [rows, seq], at least one of each"
        for what, ids in (("targets", targets), ("positions", positions)):
            if ids is not None and ids.shape != tokens.shape:
                return f"{what} {tuple(ids.shape)} and tokens {tuple(tokens.shape)} differ in shape"
        for what, ids in (("tokens", tokens), ("targets", targets), ("positions", positions)):
            if ids is not None and ids.dtype not in (torch.int64, torch.int32):
                return f"{what} has dtype {ids.dtype}; ids must be torch.int64 or torch.int32"
        if self.positions is not None and tokens.shape[1] > self.config.seq:
            return (
                f"a sequence of {tokens.shape[1]} tokens is longer than the {self.config.seq} learned positions; "
                "cut it or build the model with a larger seq"
            )
        if torch.is_autocast_enabled(self.grid.device.type):
            return "torch.autocast is on; leave it and build the model with Policy(compute=torch.bfloat16)"
        return ""

    def _fault_of_ids(self, what: str, ids: Tensor) -> str:
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.config.vocab:
            return f"{what} ids from {low} to {high}: all must be at least 0 and below vocab={self.config.vocab}"
        return ""


def _count_up(positions: Tensor) -> bool:
    steps = positions.diff(dim=1, prepend=positions.new_full((len(positions), 1), -1))
    return bool(((steps == 1) | (positions == 0)).all() and (positions[:, 0] == 0).all())


def _digest(*ids: Tensor | None) -> int:
    """A number that tells batches apart."""
    parts = [part for part in ids if part is not None]
    weighted = [part.flatten().long() * torch.arange(1, part.numel() + 1, device=part.device) for part in parts]
    return key_of(*((tuple(part.shape), int(sums.sum())) for part, sums in zip(parts, weighted, strict=True)))


def _norm(config: Config, grid: Grid, policy: Policy) -> Norm:
    bias = config.bias and config.norm == "layer"
    return Norm(grid, policy, config.hidden, kind=config.norm, bias=bias, eps=config.norm_eps)


def build(
    model: str | Config,
    grid: Grid,
    *,
    policy: Policy = Policy(),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> Transformer:
    """A reference model on the grid, by name or config, with this rank's shards of the initial weights.

    The same seed gives the same weights on every grid.
    """
    grid.agree("the model", f"{model!r} {policy} seed={seed} dtype={dtype}")
    built = Transformer(config(model) if isinstance(model, str) else model, grid, policy)
    assemble(built, grid, policy, seed=seed, dtype=dtype, device=None if device is None else torch.device(device))
    return built
