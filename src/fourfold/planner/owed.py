"""Closed forms of what gradients owe beyond z, and of what the optimizer communicates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from fourfold.gradients import Bucket, fill_buckets
from fourfold.ledger import Collective, Op
from fourfold.planner.share import STATISTIC_NBYTES, Share

Owed = tuple[str, tuple[str, ...], int, int]
Members = dict[str, tuple[int, int]]
"""Rows of each parameter's shard and bytes of a row, by name."""


@dataclass(frozen=True)
class GradientVolume(Share):
    """The sums over axes that do not cut a parameter, in buckets; the sharded optimizer; the norm."""

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
        sizes = [(name, owes, self.dtype, rows * row_nbytes) for name, owes, rows, row_nbytes in self.owed()]
        return fill_buckets(sizes, self.policy.bucket_bytes)

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
