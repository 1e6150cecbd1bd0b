"""The structure of a step: what decides which work it has, and in which order, but not how much work that is.

Thousands of candidates of a search share few structures: the axes in use, the policy, the number of halves, the kinds
of layers. Programs are written for a structure, and cached by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from fourfold.axes import CONTEXT, FOLD_SIZES, FOLDED, REPLICAS
from fourfold.engine import Overlap
from fourfold.layout import GATHERED, Spec
from fourfold.models.config import ModelConfig
from fourfold.planner.parameters import in_first_layer, parameter_specs
from fourfold.policy import Policy, Recompute


class ContextForm(NamedTuple):
    """What decides in which messages K and V travel inside a context group, but not how large they are."""

    over: str
    """gather, exchange or ring."""
    swaps: bool
    """Whether neighbours swap tokens for heads before and after."""
    pieces: int
    """The messages of one gather or exchange, or the directions of a ring."""
    hops: int
    """How often a ring hands K and V on; 0 for other ways."""
    moves: bool
    """Whether anybody sends K and V to another holder."""
    to_all: bool
    """Whether a gather is a collective of its own, since neighbours do not share heads."""


@dataclass
class Structure:
    """What decides which work a step has and in which order, but not how much; an object never changes."""

    config: ModelConfig
    """The kinds of layers; its sizes are all 1."""
    policy: Policy
    dtype: torch.dtype
    """The parameters' dtype."""
    used_axes: tuple[str, ...]
    halves: int
    """The number of interleaved parts that the rows of a place are cut into, 1 or 2."""
    equal_halves: bool
    """Whether all halves have the same number of rows."""
    cuts_row: bool
    """Whether the halves are those of a single row, of which the second also reads the keys of the first."""
    shares_kv: bool
    """Whether ranks exchange K and V, because KV heads do not follow the cut of the queries."""
    cuts_kv_head: bool
    """Whether x cuts through a KV head."""
    looks_up_in_place: bool
    """Whether tokens go to the embedding's table over z, instead of the table to the tokens."""
    context: ContextForm | None = None
    """How K and V travel, if places share their rows."""

    def __post_init__(self) -> None:
        config, policy, axes = self.config, self.policy, self.used_axes
        # programs are cached by it
        kinds = axes, self.halves, self.cuts_row, self.shares_kv, self.looks_up_in_place, self.context
        self._hash = hash((config, policy, self.dtype, *kinds))
        self.sharded = policy.activations == "sharded"
        self.over_x, self.over_y = "x" in axes, "y" in axes
        self.cuts_rest = self.sharded and self.over_x  # x cuts tokens at rest
        self.cuts_inner = self.sharded and self.over_y  # y cuts features inside a sublayer, beyond x
        self.sends = "expert" in axes or "ex" in axes  # tokens go to their experts
        self.folded = any(axis in FOLD_SIZES for axis in axes)  # experts are cut in a way of their own
        self.copies_rows = self.sends or (self.folded and self.over_x and not self.sharded)  # experts read copies
        self.gathers_weights = GATHERED in axes
        self.gathers_experts = ("ez" if self.folded else GATHERED) in axes
        self.gathers = self.gathers_weights or (self.folded and self.gathers_experts)  # any parameters at all
        self.compute_itemsize = (policy.compute_dtype or self.dtype).itemsize
        self.reduce_itemsize = (policy.reduce_dtype or self.dtype).itemsize
        # bytes of one statistic of a norm, of attention or of the loss: fp32 or wider
        self.wide_itemsize = max(4, self.compute_itemsize)
        self.wide = self.wide_itemsize // self.compute_itemsize  # a tensor is larger by this factor in that dtype
        self.casts = self.compute_itemsize != self.dtype.itemsize  # weights are cast before they are used
        self.keeps_casts = self.casts and policy.keep_casts  # cast shards exist all the time
        # weights in use have memory of their own
        self.copies_weights = self.gathers_weights or (self.casts and not self.keeps_casts)
        self.keeps_weights = policy.keeps_for_backward and self.copies_weights  # products keep them until backward
        self.copies_experts = self.gathers_experts or (self.casts and not self.keeps_casts)
        self.copies_wide = self.gathers_weights or (self.wide_itemsize != self.dtype.itemsize and not policy.keep_casts)
        # Contract layers keep an input that was gathered over y
        self.keeps_collected = policy.keep_gathered and self.cuts_inner
        self.chunked = bool(policy.loss_chunk)  # head and loss run in chunks of tokens
        self.chunks_mlp = bool(policy.mlp_chunk)  # MLPs run in chunks of tokens
        self.up_layers = ("gate", "up") if config.mlp == "swiglu" else ("up",)  # they read the residual stream
        self.table = "embedding.weight" if config.tied else "head.weight"  # the parameter that makes logits
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}  # parameters by modules

    def __hash__(self) -> int:
        return self._hash

    def itemsize_of(self, wide: bool) -> int:
        """Return the bytes of an element of weights in use, of those that are used in fp32 at least if `wide`."""
        return self.wide_itemsize if wide else self.compute_itemsize

    def copies(self, names: tuple[str, ...], wide: bool) -> bool:
        """Return whether these weights in use have memory of their own; `wide` as in `itemsize_of`."""
        if self.folded and self.gathered_over(names) != GATHERED:
            return self.copies_experts
        return self.copies_wide if wide else self.copies_weights

    def gathered_over(self, names: tuple[str, ...]) -> str:
        """Return the axis over which these parameters are gathered before their use."""
        return self._specs[in_first_layer(names[0])].gathered if self.folded and names else GATHERED

    def gathers_over(self, names: tuple[str, ...]) -> bool:
        """Return whether these parameters travel before their use."""
        return self.gathered_over(names) in self.used_axes

    def matrices(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the parameters that are matrices."""
        return tuple(name for name in names if len(self._specs[in_first_layer(name)].shape) > 1)

    def parameters_of(self, *modules: str) -> tuple[str, ...]:
        """Return the parameters of modules that share one message: all weights, then the biases that exist."""
        found = self._names.get(modules)
        if found is None:  # every rehearsal asks for the same ones in every layer
            names = (f"{module}.{kind}" for kind in ("weight", "bias") for module in modules)
            found = self._names[modules] = tuple(name for name in names if in_first_layer(name) in self._specs)
        return found

    @cached_property
    def _specs(self) -> dict[str, Spec]:
        return parameter_specs(self.config, self.policy.activations, folded=self.folded)


def structure_of(config: ModelConfig, policy: Policy, *details: Any) -> Structure:
    """Return the structure of steps of this model under this policy; `details` are the other fields, in order."""
    return _structure(_kinds_of_layers(config), _kinds_of_work(policy), *details)


_structure = lru_cache(maxsize=4096)(Structure)


@lru_cache(maxsize=4096)
def structure_of_names(
    structure: Structure,
    *,
    recompute: Recompute | None = None,
    chunked: bool | None = None,
    chunks_mlp: bool | None = None,
) -> Structure:
    """Return the structure without choices that only set some sizes to 0, so that few structures are rehearsed.

    A tensor that is kept or not is a size that may be 0, and replicas only repeat the work of one of them.
    """
    policy = replace(
        structure.policy,
        keep_gathered=False,
        keep_weights=False,
        shard_optimizer=False,
        recompute=structure.policy.recompute if recompute is None else recompute,
        loss_chunk=structure.policy.loss_chunk if chunked is None else int(chunked),
        mlp_chunk=structure.policy.mlp_chunk if chunks_mlp is None else int(chunks_mlp),
    )
    axes = tuple(axis for axis in structure.used_axes if axis not in REPLICAS)
    return replace(structure, policy=policy, used_axes=axes)


@lru_cache(maxsize=4096)
def structure_of_layers(
    structure: Structure, recompute: Recompute | None = None, *, chunks_mlp: bool | None = None
) -> Structure:
    """Return the same for a program of layers alone: what embedding and head do does not count."""
    names = structure_of_names(structure, recompute=recompute, chunked=False, chunks_mlp=chunks_mlp)
    return replace(names, looks_up_in_place=False)


@lru_cache(maxsize=4096)
def structure_of_kind(structure: Structure, mixture: bool) -> Structure:
    """Return the same for a model in which all layers are mixtures of experts, or none is."""
    axes = structure.used_axes if mixture else tuple(axis for axis in structure.used_axes if axis not in FOLDED)
    return replace(structure, config=structure.config.one_layer(mixture=mixture), used_axes=axes)


@lru_cache(maxsize=4096)
def structure_of_ends(structure: Structure, *, chunked: bool | None = None) -> Structure:
    """Return the same for a program of embedding, head and loss alone: what layers do does not count."""
    names = structure_of_names(structure, recompute="none", chunked=chunked, chunks_mlp=False)
    axes = tuple(axis for axis in names.used_axes if axis not in (CONTEXT, *FOLDED))
    config = names.config.one_layer(mixture=False)
    return replace(names, config=config, used_axes=axes, shares_kv=False, cuts_kv_head=False, context=None)


_ONES = dict(hidden=1, heads=1, kv_heads=1, head_dim=2, mlp_hidden=1, vocab=1, seq=1, norm_eps=1.0)
"""The sizes of the config of a structure; a head has an even number of dims."""
_ROPE: dict[str, Any] = {one.name: one.default for one in fields(ModelConfig) if one.name.startswith("rope_")}
"""Rotary positions, which change numbers and not work."""


@lru_cache(maxsize=256)
def _kinds_of_layers(config: ModelConfig) -> ModelConfig:
    """Return the config reduced to what decides which work its layers have."""
    ones: dict[str, Any] = {"layers": config.dense_layers + 1, **_ONES}
    if config.experts:
        shared, routing = min(1, config.shared_hidden), config.routing
        ones |= dict(experts=1, top_k=1, expert_hidden=1, shared_hidden=shared, score="softmax", bias_rate=0.0)
        ones |= dict(groups=1, top_groups=1, route_scale=1.0, capacity=float(routing.capacity > 0))
        ones |= dict(aux=float(routing.aux > 0), z_loss=float(routing.z_loss > 0))
    return replace(config, **ones, **_ROPE, dropout=0.5 if config.dropout else 0.0)


@lru_cache(maxsize=1024)
def _kinds_of_work(policy: Policy) -> Policy:
    """Return the policy reduced to what shapes a rehearsed program.

    Numbers that only set sizes become 1. Stages and schedule are left out: every stage is rehearsed by itself. What
    travels inside a context group is said by `ContextForm`. Overlap settings become the defaults, except the one that
    changes the order of products: rehearsals neither prefetch nor defer, and the readings add the bytes in flight.
    """
    overlap = Overlap(wgrad_behind_messages=policy.overlap.wgrad_behind_messages)
    chunks = dict(loss_chunk=min(1, policy.loss_chunk), mlp_chunk=min(1, policy.mlp_chunk))
    left_out: Any = dict(stages=None, schedule="auto", assignment="auto", context_way="auto")
    return replace(policy, **chunks, bucket_bytes=1, overlap=overlap, **left_out)
