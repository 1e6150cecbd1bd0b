"""Closed forms of what a reference model communicates in a training step, call by call: an oracle for the planner.

Written from the equations (docs/math.md), by hand and independently of the layers and of the planner's program, so that
the three can disagree. The laws: this list equals the launches of the program, and those equal the ledger of a real
run, byte for byte, on every grid. Notation: m tokens of a (data, z) place, k the width of the residual stream, n that
inside a sublayer; sizes are those on one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, lcm

import torch

from fourfold.gradients import Bucket, OwingGradient, fill_buckets
from fourfold.grid import Shape
from fourfold.layout import chunk
from fourfold.ledger import Collective, Op
from fourfold.models.config import ModelConfig, halves_of
from fourfold.policy import Overlap, Policy

APART = Overlap(joint_bytes=0)
"""Sends every message over z by itself, as the formulas list them, and as a first pass does anyway."""
STATISTIC_NBYTES = 8
"""Sums of losses, counts and squared norms are fp64."""
ID_NBYTES = 8
"""Ids of tokens are int64."""
Owed = tuple[str, tuple[str, ...], int, int]
Members = dict[str, tuple[int, int]]
"""Rows of each parameter's shard and bytes of a row, by name."""


@dataclass(frozen=True)
class ClosedForm:
    """The collectives of one rank for a model, a grid, a policy and a batch."""

    config: ModelConfig
    shape: Shape
    policy: Policy
    rows: int
    """Rows of a (data, z) place in one micro-step."""
    seq: int
    dtype: torch.dtype = torch.float32
    """The parameters' dtype."""
    rank: int = 0
    half: int = 0
    """The index of the half of the rows; the first half also has the messages that all halves send together."""

    def halves(self) -> list[dict[str, int]]:
        """The rows of each half of a micro-step, or its tokens of a single row."""
        sizes = self.rows, self.seq, self.compute_itemsize
        number = halves_of(self.config, self.shape, self.policy, *sizes, packed=False, alike=True).number
        cut, whole = ("rows", self.rows) if number <= self.rows else ("seq", self.seq)
        return [{cut: len(chunk(whole, number, index)), "half": index} for index in range(number)]

    @cached_property
    def coords(self) -> dict[str, int]:
        return self.shape.coords(self.rank)

    @cached_property
    def sharded(self) -> bool:
        return self.policy.activations == "sharded"

    @cached_property
    def m(self) -> int:
        return self.rows * self.seq

    @cached_property
    def m_padded(self) -> int:
        """Tokens of a place with the zeros that `leave` adds where x does not divide them."""
        return ceil(self.m / self.shape.x) * self.shape.x

    @cached_property
    def m_rest(self) -> int:
        """Tokens that a rank holds at rest."""
        return self.m_padded // self.shape.x if self.sharded else self.m

    @cached_property
    def k(self) -> int:
        return self.config.hidden // self.shape.y

    @cached_property
    def wide(self) -> int:
        """Bytes of a norm's or loss's statistics."""
        return max(4, self.compute_itemsize)

    @cached_property
    def compute_itemsize(self) -> int:
        return (self.policy.compute_dtype or self.dtype).itemsize

    @cached_property
    def reduce_itemsize(self) -> int:
        return (self.policy.reduce_dtype or self.dtype).itemsize

    @cached_property
    def vocab_rows(self) -> int:
        return len(chunk(self.config.vocab, self.shape.x, self.coords["x"]))

    @cached_property
    def vocab_columns(self) -> int:
        columns, unit = ceil(self.config.vocab / self.shape.x), self.shape.y if self.sharded else 1
        if self.compute_itemsize == 2 and columns >= 16 * lcm(64, unit):
            unit = lcm(64, unit)
        return ceil(columns / unit) * unit

    def message(
        self, op: Op, axis: str, elements: int, label: str, itemsize: int | None = None
    ) -> Iterator[Collective]:
        nbytes = elements * (self.compute_itemsize if itemsize is None else itemsize)
        if self.shape.sizes[axis] > 1 and nbytes:
            yield Collective(op, axis, nbytes, self.shape.sizes[axis], label)

    def rows_of(self, length: int, *axes: str) -> int:
        """This rank's part of a length that is cut over the axes one after another."""
        coords = self.coords
        for axis in axes:
            length = len(chunk(length, self.shape.sizes[axis], coords[axis]))
        return length

    # --- the operators

    def tokens_over_x(self, op: Op, label: str) -> Iterator[Collective]:
        yield from self.message(op, "x", self.m_padded * self.k, label)

    def enter(self, label: str, *, backward: bool = False) -> Iterator[Collective]:
        if self.sharded:
            yield from self.tokens_over_x("reduce_scatter" if backward else "all_gather", label)
        elif backward:
            yield from self.message("all_reduce", "x", self.m * self.k, label)

    def leave(self, label: str, *, backward: bool = False) -> Iterator[Collective]:
        if self.sharded:
            yield from self.tokens_over_x("all_gather" if backward else "reduce_scatter", label)
        elif not backward:
            yield from self.message("all_reduce", "x", self.m * self.k, label)

    def spread(self, n: int, label: str, *, tokens: int | None = None, backward: bool = False) -> Iterator[Collective]:
        elements = n * (self.m if tokens is None else tokens)
        if self.sharded:
            yield from self.message("all_gather" if backward else "reduce_scatter", "y", elements, label)
        elif not backward:
            yield from self.message("all_reduce", "y", elements, label)

    def collect(self, n: int, label: str, *, tokens: int | None = None, backward: bool = False) -> Iterator[Collective]:
        elements = n * (self.m if tokens is None else tokens)
        if self.sharded:
            yield from self.message("reduce_scatter" if backward else "all_gather", "y", elements, label)
        elif backward:
            yield from self.message("all_reduce", "y", elements, label)

    # --- parameters over z

    def padded(self, rows: int) -> int:
        return ceil(rows / self.shape.z) * self.shape.z

    def weights(self, op: Op, matrices: list[tuple[int, int]], vectors: list[int], label: str) -> Iterator[Collective]:
        """One message for matrices [rows, columns] and vectors, in compute layout; the halves of a batch share it."""
        if self.half:
            return
        elements = sum(self.padded(rows) * columns for rows, columns in matrices)
        elements += sum(self.padded(rows) for rows in vectors)
        itemsize = self.compute_itemsize if op == "all_gather" else self.reduce_itemsize
        yield from self.message(op, "z", elements, label, itemsize)

    def again(self, matrices: list[tuple[int, int]], label: str) -> Iterator[Collective]:
        if not self.policy.keep_weights:
            yield from self.weights("all_gather", matrices, [], label)

    # --- the layers, forward and backward apart, because recompute runs forward twice

    def embedding(self) -> Iterator[Collective]:
        table = [(self.vocab_rows, self.k)]
        tokens = self.m * self.shape.z
        if self.policy.even_tokens and tokens < ceil(self.config.vocab / self.shape.x):
            yield from self.message("all_gather", "z", tokens, "embedding", ID_NBYTES)
            for op in ("reduce_scatter", "all_gather"):
                yield from self.message(op, "z", tokens * self.k, "embedding")
        else:
            yield from self.weights("all_gather", table, [], "embedding")
            yield from self.weights("reduce_scatter", table, [], "embedding")
        yield from self.leave("embedding")
        yield from self.leave("embedding", backward=True)
        if self.config.positions == "learned":
            for op in ("all_gather", "reduce_scatter"):
                yield from self.weights(op, [(self.config.seq, self.k)], [], "positions")

    @cached_property
    def norm_vectors(self) -> list[int]:
        return [self.k] * (2 if self.config.norm == "layer" and self.config.bias else 1)

    def norm_forward(self, label: str) -> Iterator[Collective]:
        yield from self.weights("all_gather", [], self.norm_vectors, label)
        yield from self.norm_statistics(label)

    def norm_statistics(self, label: str) -> Iterator[Collective]:
        if self.config.norm == "layer":
            yield from self.message("all_gather", "y", 2 * self.m_rest * self.shape.y, label, self.wide)
        else:
            yield from self.message("all_reduce", "y", self.m_rest, label, self.wide)

    def norm_backward(self, label: str) -> Iterator[Collective]:
        yield from self.weights("all_gather", [], [self.k], label)
        yield from self.norm_sums(label)
        yield from self.weights("reduce_scatter", [], self.norm_vectors, label)

    def norm_sums(self, label: str) -> Iterator[Collective]:
        sums = 2 if self.config.norm == "layer" else 1
        yield from self.message("all_reduce", "y", sums * self.m_rest, label, self.wide)

    def expand_weights(self, widths: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
        y = self.coords["y"]
        biases = [len(chunk(width, self.shape.y, y)) for width in widths] if self.config.bias else []
        return [(width, self.k) for width in widths], biases

    def expand_forward(self, widths: list[int], label: str, *, spread: int | None = None) -> Iterator[Collective]:
        """Layers that read one tensor. `widths` are columns of the product, `spread` those that are spread."""
        yield from self.enter(label)
        yield from self.weights("all_gather", *self.expand_weights(widths), label)
        yield from self.spread(sum(widths) if spread is None else spread, label)

    def expand_backward(self, widths: list[int], label: str, *, spread: int | None = None) -> Iterator[Collective]:
        matrices, biases = self.expand_weights(widths)
        yield from self.spread(sum(widths) if spread is None else spread, label, backward=True)
        yield from self.again(matrices, label)
        yield from self.entered_again(label)
        yield from self.enter(label, backward=True)
        yield from self.weights("reduce_scatter", matrices, biases, label)

    def contract_forward(self, n: int, label: str) -> Iterator[Collective]:
        yield from self.collect(n, label)
        yield from self.weights("all_gather", [(self.k, n)], [self.k] if self.config.bias else [], label)
        yield from self.leave(label)

    def contract_backward(self, n: int, label: str) -> Iterator[Collective]:
        yield from self.leave(label, backward=True)
        yield from self.again([(self.k, n)], label)
        yield from self.collected_again(n, label)
        yield from self.collect(n, label, backward=True)
        yield from self.weights("reduce_scatter", [(self.k, n)], [self.k] if self.config.bias else [], label)

    def entered_again(self, label: str) -> Iterator[Collective]:
        yield from self.reread(self.enter(label))

    def collected_again(self, n: int, label: str) -> Iterator[Collective]:
        yield from self.reread(self.collect(n, label))

    def reread(self, gather: Iterator[Collective]) -> Iterator[Collective]:
        """The gathered input of a product once more, for dw."""
        if not self.policy.keep_gathered:
            yield from gather

    # --- attention and MLP

    @cached_property
    def q(self) -> int:
        return self.config.heads * self.config.head_dim // self.shape.x

    @cached_property
    def kv(self) -> int:
        return self.config.kv_heads * self.config.head_dim // self.shape.x

    @cached_property
    def shares_kv(self) -> bool:
        return self.config.kv_heads % (self.shape.x * self.shape.y if self.sharded else self.shape.x) != 0

    def head_norms(self, op: Op, prefix: str) -> Iterator[Collective]:
        if self.config.qk_norm:
            for name in ("q_norm", "k_norm"):
                yield from self.weights(op, [], [self.config.head_dim], f"{prefix}.{name}")

    def attention_forward(self, prefix: str) -> Iterator[Collective]:
        label = f"{prefix}.q+k+v"
        yield from self.expand_forward([self.q, self.kv, self.kv], label, spread=self.q if self.shares_kv else None)
        if self.shares_kv:
            yield from self.kv_over_y(label)
            yield from self.kv_over_x(label)
        yield from self.head_norms("all_gather", prefix)
        yield from self.contract_forward(self.q, f"{prefix}.out")

    def kv_over_y(self, label: str, *, backward: bool = False) -> Iterator[Collective]:
        """K and V whole over y, whose heads do not follow the queries' cut."""
        if self.sharded or not backward:
            yield from self.message("all_reduce", "y", self.m * 2 * self.kv, label)

    def kv_over_x(self, label: str, *, backward: bool = False) -> Iterator[Collective]:
        """... and over x where it cuts through a head."""
        if self.config.kv_heads % self.shape.x:
            op: Op = "reduce_scatter" if backward else "all_gather"
            yield from self.message(op, "x", self.m * 2 * self.kv * self.shape.x, label)

    def attention_backward(self, prefix: str) -> Iterator[Collective]:
        label = f"{prefix}.q+k+v"
        yield from self.contract_backward(self.q, f"{prefix}.out")
        if self.policy.recompute == "attention":
            yield from self.head_norms("all_gather", prefix)
        yield from self.head_norms("all_gather", prefix)
        yield from self.head_norms("reduce_scatter", prefix)
        if self.shares_kv:
            yield from self.kv_over_x(label, backward=True)
            yield from self.kv_over_y(label, backward=True)
        yield from self.expand_backward([self.q, self.kv, self.kv], label, spread=self.q if self.shares_kv else None)

    def mlp_reads(self, prefix: str) -> tuple[list[int], str]:
        names = ["gate", "up"] if self.config.mlp == "swiglu" else ["up"]
        return [self.config.mlp_hidden // self.shape.x] * len(names), f"{prefix}.{'+'.join(names)}"

    def mlp_forward(self, prefix: str) -> Iterator[Collective]:
        if self.policy.mlp_chunk:
            yield from self.chunked_mlp_forward(prefix)
            return
        yield from self.expand_forward(*self.mlp_reads(prefix))
        yield from self.contract_forward(self.config.mlp_hidden // self.shape.x, f"{prefix}.down")

    @cached_property
    def mlp_chunks(self) -> list[int]:
        """Tokens whose hidden units exist at once."""
        size = self.policy.mlp_chunk
        return [min(size, self.m - first) for first in range(0, self.m, size)]

    def chunked_mlp_forward(self, prefix: str) -> Iterator[Collective]:
        (widths, label), down = self.mlp_reads(prefix), f"{prefix}.down"
        yield from self.enter(label)
        yield from self.weights("all_gather", *self.expand_weights(widths), label)
        yield from self.weights("all_gather", *self.down_weights, down)
        yield from self.hidden_units(widths, label, down)
        yield from self.leave(down)

    @cached_property
    def down_weights(self) -> tuple[list[tuple[int, int]], list[int]]:
        return [(self.k, self.config.mlp_hidden // self.shape.x)], [self.k] if self.config.bias else []

    def hidden_units(self, widths: list[int], label: str, down: str, *, backward: bool = False) -> Iterator[Collective]:
        for tokens in self.mlp_chunks:
            yield from self.spread(sum(widths), label, tokens=tokens, backward=backward)
            yield from self.collect(widths[0], down, tokens=tokens, backward=backward)

    def chunked_mlp_backward(self, prefix: str) -> Iterator[Collective]:
        """The hidden units once more, then their gradients; the biases of the first layers are needed again."""
        (widths, label), down = self.mlp_reads(prefix), f"{prefix}.down"
        yield from self.leave(down, backward=True)
        yield from self.entered_again(label)
        if not self.policy.keep_weights or self.policy.recompute == "block":
            yield from self.weights("all_gather", *self.expand_weights(widths), label)
            yield from self.weights("all_gather", self.down_weights[0], [], down)
        yield from self.hidden_units(widths, label, down)
        yield from self.hidden_units(widths, label, down, backward=True)
        yield from self.enter(label, backward=True)
        yield from self.weights("reduce_scatter", *self.expand_weights(widths), label)
        yield from self.weights("reduce_scatter", *self.down_weights, down)

    def mlp_again(self, prefix: str) -> Iterator[Collective]:
        """The MLP in chunks of a block that is computed again: no chunk runs, but a gathered input is kept again."""
        if self.policy.keep_gathered:
            yield from self.enter(self.mlp_reads(prefix)[1])
        yield from self.leave(f"{prefix}.down")

    def mlp_backward(self, prefix: str) -> Iterator[Collective]:
        if self.policy.mlp_chunk:
            yield from self.chunked_mlp_backward(prefix)
            return
        yield from self.contract_backward(self.config.mlp_hidden // self.shape.x, f"{prefix}.down")
        yield from self.expand_backward(*self.mlp_reads(prefix))

    @cached_property
    def chunks(self) -> list[int]:
        """Tokens whose logits exist at once."""
        size = self.policy.loss_chunk or self.m
        return [min(size, self.m - first) for first in range(0, self.m, size)]

    def head(self) -> Iterator[Collective]:
        """An Expand layer whose table has this rank's true rows and whose logits are padded.

        In chunks forward finds the gradients as well, with one gather of the table and of the input.
        """
        table = [(self.vocab_rows, self.k)]
        yield from self.enter("head")
        yield from self.weights("all_gather", table, [], "head")
        for tokens in self.chunks:
            yield from self.spread(self.vocab_columns, "head", tokens=tokens)
            yield from self.spread(self.vocab_columns, "head", tokens=tokens, backward=True)
        if not self.policy.loss_chunk:
            yield from self.again(table, "head")
            yield from self.reread(self.enter("head"))
        yield from self.enter("head", backward=True)
        yield from self.weights("reduce_scatter", table, [], "head")

    def loss_statistics(self) -> Iterator[Collective]:
        """Three statistics a token from every rank that cuts the vocabulary."""
        for tokens in self.chunks:
            yield from self.merged(tokens)

    def merged(self, tokens: int) -> Iterator[Collective]:
        for axis in ("y", "x") if self.sharded else ("x",):
            yield from self.message("all_gather", axis, 3 * tokens * self.shape.sizes[axis], "loss", self.wide)

    def loss(self, *, counted: bool) -> Iterator[Collective]:
        """Over the batch: the sum, the faults, and the count unless it is given; in chunks the sum comes last."""
        sums = 2 if counted else 3
        for numbers in (sums - 1, 1) if self.policy.loss_chunk else (sums,):
            yield from self.loss_sums(numbers)

    def loss_sums(self, numbers: int) -> Iterator[Collective]:
        yield from self.sum_over_batch(numbers, "loss")

    def count_targets(self) -> Iterator[Collective]:
        yield from self.sum_over_batch(1, "count targets")

    def sum_over_batch(self, numbers: int, label: str) -> Iterator[Collective]:
        for axis in ("z", "data"):
            yield from self.message("all_reduce", axis, numbers, label, STATISTIC_NBYTES)

    # --- the model

    def layer_forward(self, index: int, *, again: bool = False) -> Iterator[Collective]:
        yield from self.norm_forward(f"layers.{index}.attention_norm")
        yield from self.attention_forward(f"layers.{index}.attention")
        yield from self.norm_forward(f"layers.{index}.mlp_norm")
        mlp = self.mlp_again if again and self.policy.mlp_chunk else self.mlp_forward
        yield from mlp(f"layers.{index}.mlp")

    def layer_backward(self, index: int) -> Iterator[Collective]:
        if self.policy.recompute == "block":
            again = list(self.layer_forward(index, again=True))
            last = list(self.leave(f"layers.{index}.mlp.down"))
            # it stops at the last tensor that backward needs: the input of the last product, or a mask after it
            yield from again if self.config.dropout else again[: len(again) - len(last)]
        yield from self.mlp_backward(f"layers.{index}.mlp")
        yield from self.norm_backward(f"layers.{index}.mlp_norm")
        yield from self.attention_backward(f"layers.{index}.attention")
        yield from self.norm_backward(f"layers.{index}.attention_norm")

    def layer(self, index: int) -> Iterator[Collective]:
        yield from self.layer_forward(index)
        yield from self.layer_backward(index)

    def micro_step(self, *, counted: bool = False) -> Iterator[Collective]:
        """Forward and backward of the rows, half by half, without the sums that gradients owe."""
        for half in self.halves():
            yield from replace(self, **half).one_half()
        yield from self.loss(counted=counted)

    def one_half(self) -> Iterator[Collective]:
        yield from self.embedding()
        for index in range(self.config.layers):
            yield from self.layer(index)
        yield from self.norm_forward("norm")
        yield from self.norm_backward("norm")
        yield from self.head()
        yield from self.loss_statistics()

    def training_step(self, *, micro_steps: int = 1, clip: bool = False) -> list[Collective]:
        """Everything from the first forward to the optimizer. Accumulation counts the targets once."""
        records: list[Collective] = []
        if micro_steps > 1:
            records += self.count_targets()
        for _ in range(micro_steps):
            records += self.micro_step(counted=micro_steps > 1)
        records += self.gradients()
        if clip:
            records += self.clip()
        return records

    # --- gradients and optimizer

    def gradients(self) -> Iterator[Collective]:
        """What gradients owe beyond z, in buckets."""
        members = self.members()
        for bucket in self.buckets():
            for axis in bucket.owes:
                yield from self.bucket_sum(bucket, axis, members)

    def bucket_sum(self, bucket: Bucket, axis: str, members: Members) -> Iterator[Collective]:
        """The sum of a bucket over one of the axes that it owes."""
        if axis == "data" and self.policy.shard_optimizer:
            yield from self.over_replicas("reduce_scatter", bucket, members, bucket.label)
        else:
            yield from self.message("all_reduce", axis, bucket.nbytes, bucket.label, 1)

    def optimizer_step(self) -> Iterator[Collective]:
        """Parameters that the sharded optimizer stepped, gathered over data."""
        if self.policy.shard_optimizer:
            members = self.members()
            for bucket in self.buckets():
                yield from self.stepped(bucket, members)

    def stepped(self, bucket: Bucket, members: Members) -> Iterator[Collective]:
        yield from self.over_replicas("all_gather", bucket, members, f"parameters {bucket.span}")

    def buckets(self) -> list[Bucket]:
        sizes = [
            OwingGradient(name, owes, self.dtype, rows * row_nbytes, self.unit(name, owes))
            for name, owes, rows, row_nbytes in self.owed()
        ]
        return fill_buckets(sizes, self.policy.bucket_bytes)

    def unit(self, name: str, owes: tuple[str, ...]) -> int:
        """A layer's number, and other numbers before and behind the layers, where three ranks or more are summed."""
        if all(self.shape.sizes[axis] < 3 for axis in owes):
            return 0
        kind, _, rest = name.partition(".")
        return int(rest.split(".")[0]) + 1 if kind == "layers" else (0 if kind[0] in "ep" else self.config.layers + 1)

    def members(self) -> Members:
        """Rows of each parameter's shard and bytes of a row, by name."""
        return {name: (rows, row_nbytes) for name, _, rows, row_nbytes in self.owed()}

    def over_replicas(self, op: Op, bucket: Bucket, members: Members, label: str) -> Iterator[Collective]:
        """One message with the rows of each member padded until data divides them."""
        replicas = self.shape.data
        padded = (ceil(members[name][0] / replicas) * replicas * members[name][1] for name in bucket.names)
        yield from self.message(op, "data", sum(padded), label, 1)

    @property
    def owed_at_rest(self) -> tuple[str, ...]:
        return ("x", "data") if self.sharded else ("data",)

    def owed(self) -> Iterator[Owed]:
        """Every parameter: its name, the axes that owe it a sum beyond z, rows of its shard, bytes of a row."""
        table = self.rows_of(self.config.vocab, "x", "z"), self.k * self.dtype.itemsize
        yield "embedding.weight", ("data",), *table
        if self.config.positions == "learned":
            rows = self.rows_of(self.config.seq, "z")
            yield "positions.weight", self.owed_at_rest, rows, self.k * self.dtype.itemsize
        for index in range(self.config.layers):
            yield from self.owed_by_norm(f"layers.{index}.attention_norm")
            yield from self.owed_by_attention(f"layers.{index}.attention")
            yield from self.owed_by_norm(f"layers.{index}.mlp_norm")
            yield from self.owed_by_mlp(f"layers.{index}.mlp")
        yield from self.owed_by_norm("norm")
        if not self.config.tied:
            yield "head.weight", ("data",), *table

    def owed_by_attention(self, prefix: str) -> Iterator[Owed]:
        config = self.config
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        for name, out in (("q", q), ("k", kv), ("v", kv)):
            yield from self.owed_by_expand(f"{prefix}.{name}", out)
        yield from self.owed_by_contract(f"{prefix}.out", q)
        if config.qk_norm:
            by_head = ("x", "y", "data") if self.sharded else ("x", "data")
            for name in ("q_norm", "k_norm"):
                yield f"{prefix}.{name}.weight", by_head, self.rows_of(config.head_dim, "z"), self.dtype.itemsize

    def owed_by_mlp(self, prefix: str) -> Iterator[Owed]:
        for name in ("gate", "up") if self.config.mlp == "swiglu" else ("up",):
            yield from self.owed_by_expand(f"{prefix}.{name}", self.config.mlp_hidden)
        yield from self.owed_by_contract(f"{prefix}.down", self.config.mlp_hidden)

    def owed_by_norm(self, prefix: str) -> Iterator[Owed]:
        yield f"{prefix}.weight", self.owed_at_rest, self.rows_of(self.config.hidden, "y", "z"), self.dtype.itemsize
        if self.config.norm == "layer" and self.config.bias:
            yield f"{prefix}.bias", self.owed_at_rest, self.rows_of(self.config.hidden, "y", "z"), self.dtype.itemsize

    def owed_by_expand(self, prefix: str, n: int) -> Iterator[Owed]:
        yield f"{prefix}.weight", ("data",), self.rows_of(n, "x", "z"), self.k * self.dtype.itemsize
        if self.config.bias:
            yield f"{prefix}.bias", ("data",), self.rows_of(n, "x", "y", "z"), self.dtype.itemsize

    def owed_by_contract(self, prefix: str, n: int) -> Iterator[Owed]:
        rows = self.rows_of(self.config.hidden, "y", "z")
        yield f"{prefix}.weight", ("data",), rows, n // self.shape.x * self.dtype.itemsize
        if self.config.bias:
            yield f"{prefix}.bias", ("data",), rows, self.dtype.itemsize

    def clip(self) -> Iterator[Collective]:
        for axis in ("x", "y", "z", "data") if self.policy.shard_optimizer else ("x", "y", "z"):
            yield from self.message("all_reduce", axis, 1, "gradient norm", STATISTIC_NBYTES)
