"""Sizes on one rank: its part of a model and of a batch, on a grid, under a policy.

A program is written for a `Structure`: the axes in use, the policy, the number of halves, the kinds of layers. The
structure alone decides which work a step has, and in which order; `LocalSizes` says how much work it is. Thousands of
candidates of a search share few structures. Activations have the two layouts of docs/algorithm.md, rest and inner.

Notation: m tokens of a place, which is a coordinate of data and z; k and n this rank's features of the residual stream
and inside a sublayer. Attributes whose name ends in `nbytes` count bytes; others count elements, unless a comment says
otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache, partial
from math import ceil
from typing import Any, NamedTuple

import torch

from fourfold.axes import BATCH, CONTEXT, CUTS, FOLD_SIZES, FOLDED, PIPE, REPLICAS
from fourfold.context.assign import area, plan_context
from fourfold.context.move import pieces_of
from fourfold.engine import Overlap
from fourfold.gradients import Bucket, OwingGradient, bucket_unit, fill_buckets
from fourfold.grid import Shape
from fourfold.layout import GATHERED, Spec, chunk, logits_columns
from fourfold.ledger import Collective, Op
from fourfold.models.config import ModelConfig, halves_of, unit_of
from fourfold.nn.attention import cut_documents
from fourfold.nn.embedding import looks_up_in_place
from fourfold.planner.parameters import (
    LAYER,
    HeldUnits,
    ParameterSizes,
    ParameterTable,
    held_units,
    in_first_layer,
    names_of_experts,
    names_of_layer,
    owed_axes,
    parameter_specs,
    parameter_table,
    part,
)
from fourfold.policy import Policy, Recompute
from fourfold.schedule.action import Schedule
from fourfold.schedule.choose import FOUND, choose
from fourfold.schedule.stages import Stages

STATISTIC_NBYTES = 8
"""Bytes of a loss, a count or a squared norm: these sums are fp64."""
ID_NBYTES = 8
"""Bytes of a token's id, an int64."""
BY_LAYERS = ("auto", FOUND)
"""The names of schedules that may depend on the layers of each stage; others depend on its rank alone."""


# --- the structure of a step


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
        self.router_itemsize = max(self.compute_itemsize, policy.router_dtype.itemsize)
        self.casts = self.compute_itemsize != self.dtype.itemsize  # weights are cast before they are used
        self.keeps_casts = self.casts and policy.keep_casts  # cast shards exist all the time
        # weights in use have memory of their own
        self.copies_weights = self.gathers_weights or (self.casts and not self.keeps_casts)
        self.keeps_weights = policy.keeps_for_backward and self.copies_weights  # products keep them until backward
        self.copies_experts = self.gathers_experts or (self.casts and not self.keeps_casts)
        casts_router = self.router_itemsize != self.dtype.itemsize
        self.keeps_router_casts = casts_router and policy.keep_casts
        self.copies_router = self.gathers_weights or (casts_router and not policy.keep_casts)
        # Contract layers keep an input that was gathered over y
        self.keeps_collected = policy.keep_gathered and self.cuts_inner
        self.chunked = bool(policy.loss_chunk)  # head and loss run in chunks of tokens
        self.chunks_mlp = bool(policy.mlp_chunk)  # MLPs run in chunks of tokens
        self.up_layers = ("gate", "up") if config.mlp == "swiglu" else ("up",)  # they read the residual stream
        self.table = "embedding.weight" if config.tied else "head.weight"  # the parameter that makes logits
        self._names: dict[tuple[str, ...], tuple[str, ...]] = {}  # parameters by modules

    def __hash__(self) -> int:
        return self._hash

    def itemsize_of(self, router: bool) -> int:
        """Return the bytes of an element of weights in use: those of a router, or others."""
        return self.router_itemsize if router else self.compute_itemsize

    def copies(self, names: tuple[str, ...], router: bool) -> bool:
        """Return whether these weights in use have memory of their own; `router` as in `itemsize_of`."""
        if self.folded and self.gathered_over(names) != GATHERED:
            return self.copies_experts
        return self.copies_router if router else self.copies_weights

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


# --- the sizes of a candidate


@lru_cache(maxsize=1 << 16)
def _cutting_axes(shape: Shape) -> tuple[str, ...]:
    return tuple(axis for axis in shape.message_axes if axis != PIPE)


@dataclass(eq=False)
class LocalSizes:
    """Sizes on one rank of a model and a batch on a grid, under a policy."""

    config: ModelConfig
    shape: Shape
    policy: Policy
    rows: int
    """Rows of a (data, z) place, or of a context group, in one micro-step."""
    seq: int
    dtype: torch.dtype = torch.float32
    """The parameters' dtype."""
    rank: int = 0
    number_of_halves: int = 0
    """The number of parts of the rows that take turns; 0: as the runtime chooses."""
    documents: tuple[int, ...] | None = None
    """The lengths of packed documents, in all rows one after another; None if a row is one document."""
    before: int = 0
    """The tokens of the row before these, if they are its second half; attention reads their keys as well."""

    def __post_init__(self) -> None:
        config, shape, policy, seq = self.config, self.shape, self.policy, self.seq
        self.item = item = (policy.compute_dtype or self.dtype).itemsize  # bytes of one element of an activation
        if not self.number_of_halves:
            packed = self.documents is not None
            found = halves_of(config, shape, policy, self.rows, seq, item, packed=packed, alike=True)
            self.number_of_halves = found.number
        self.coords = shape.coords(self.rank)
        if shape.folded:
            self.coords |= shape.fold_coords(self.rank)
        x, y, sharded = shape.x, shape.y, policy.activations == "sharded"
        inner_cut = y if sharded else 1  # this many ranks cut features inside a sublayer beyond x
        number = self.number_of_halves
        cuts_row = number > self.rows
        most = -(-seq // number) if cuts_row else -(-(-(-self.rows // number) * seq) // shape.context)  # of a half
        kv_heads = self._kv_heads(inner_cut)
        traffic = self._traffic(kv_heads.number) if shape.context > 1 else None
        self.structure = structure = structure_of(
            config, policy, self.dtype, _cutting_axes(shape), number,
            self.rows % number == 0 and self.documents is None, cuts_row, kv_heads.shared, config.kv_heads % x != 0,
            looks_up_in_place(policy, shape, config.vocab, most), traffic and traffic.form,
        )  # fmt: skip
        wide = structure.wide_itemsize

        self.m = m = -(-self.rows * seq // shape.context)
        self.m_rest = m_rest = -(-m // x) if sharded else m  # tokens that a rank holds at rest
        self.k = k = config.hidden // y
        self.n = n = config.mlp_hidden // x  # hidden units of the MLP
        self.q = q = config.heads * config.head_dim // x
        self.kv = kv = config.kv_heads * config.head_dim // x
        self.local_kv = kv_heads.number * config.head_dim  # features of the keys that this rank's queries read
        self.vocab_columns = logits_columns(config.vocab, x, inner_cut, item)  # columns of logits, with padding
        self.logits_padded = self.vocab_columns > part(config.vocab, x, self.coords["x"])
        self.chunk_tokens = min(policy.loss_chunk or m, m)  # tokens of the first chunk of head and loss
        self.mlp_chunk_tokens = min(policy.mlp_chunk or m, m)  # tokens of the first chunk of an MLP

        # activations of the residual stream
        self.rest = m_rest * k  # elements of a tensor at rest
        self.rest_nbytes = self.rest * item
        self.entered_nbytes = m_rest * x * k * item if sharded else self.rest_nbytes  # gathered over x, with padding
        self.stream = m * k  # elements of the input of an Expand product or the output of a Contract product
        self.stream_nbytes = self.stream * item
        self.statistic_nbytes = m_rest * wide  # one statistic of a norm for each token at rest
        self.merged_nbytes = 2 * self.statistic_nbytes * y  # the statistics of a LayerNorm, gathered over y
        self.token_nbytes = m * wide  # one statistic of the loss for each token of the place
        self.id_nbytes = m * ID_NBYTES
        # the same of all places along z
        self.all_stream = self.stream * shape.z
        self.all_stream_nbytes = self.stream_nbytes * shape.z
        self.all_id_nbytes = self.id_nbytes * shape.z
        self.position_nbytes = m_rest * ID_NBYTES
        self.mask_nbytes = self.rest if config.dropout else 0  # the mask of a dropout at rest
        # tables of rotary positions: of one row, or of the tokens that a member of a context group holds
        self.rope_nbytes = 2 * (seq if traffic is None else m) * config.head_dim * wide

        # inside sublayers, before y cuts features and after
        self.hidden_nbytes = m * n * item
        self.hidden_cut_nbytes = self.hidden_nbytes // inner_cut
        self.query_nbytes = m * q * item
        self.query_cut_nbytes = self.query_nbytes // inner_cut
        self.wide_query_nbytes = self.query_cut_nbytes // item * wide  # in the dtype of statistics
        self.kv_nbytes = 2 * m * kv * item  # K and V as their product gives them
        self.kv_whole_nbytes = self.kv_nbytes * x  # K and V gathered over x
        self.qkv_nbytes = self.query_nbytes + self.kv_nbytes
        self.qkv_cut_nbytes = self.qkv_nbytes // inner_cut
        self.local_k_nbytes = m * self.local_kv * item  # the keys that this rank's attention kernel reads
        self.local_kv_nbytes = 2 * self.local_k_nbytes
        self.before_kv_nbytes = 2 * self.before * self.local_kv * item  # those of the half before
        # scores and their use; a causal mask leaves half of them
        pairs = m * (self.before + seq / 2) if self.documents is None else sum(map(partial(area, 0), self.documents))
        self.attention_flops = round(4 * pairs * q // inner_cut)

        self._size_kept(inner_cut, kv_heads)
        if config.experts:
            self._size_mixture(inner_cut)
        if traffic is not None:
            self._size_traffic(traffic)

    def _size_kept(self, inner_cut: int, kv_heads: LocalHeads) -> None:
        """Set the sizes of tensors that forward keeps."""
        structure, keeps_collected = self.structure, self.structure.keeps_collected
        wide_tokens = self.m * structure.wide_itemsize
        self.kept_normed_nbytes = (  # a norm's output as the product that reads it keeps it
            self.entered_nbytes if self.policy.keep_gathered and structure.over_x else self.rest_nbytes
        )
        self.kept_hidden_nbytes = self.hidden_nbytes if keeps_collected else self.hidden_cut_nbytes
        self.kept_query_nbytes = self.query_nbytes if keeps_collected else 0  # else attention keeps its output itself
        self.kept_output_nbytes = 0 if keeps_collected else self.query_cut_nbytes  # if attention is recomputed
        self.read_nbytes = self._read_nbytes(kv_heads.copied)
        # one statistic per head and token
        self.query_statistic_nbytes = wide_tokens * self.q // inner_cut // self.config.head_dim
        self.key_statistic_nbytes = wide_tokens * self.local_kv // self.config.head_dim
        self.head_gradient = self.vocab_columns * self.k  # elements of the gradient of the head's table, with padding

    def _size_mixture(self, inner_cut: int) -> None:
        """Set the sizes of a mixture of experts, and of the MLP beside them."""
        config, structure, x = self.config, self.structure, self.shape.x
        wide, item, m, chosen = structure.router_itemsize, self.item, self.m, config.top_k
        padded = self.m_rest * x if structure.sharded else m  # tokens of a message over x
        self.experts = config.experts
        self.pairs = m * chosen  # that the experts of this rank have
        self.expert_parts = min(config.experts, self.pairs)  # products of experts that have rows, if all have as many
        if self.shape.folded:
            self._size_dispatch()
        self.expert_n = n = config.expert_hidden // (self.shape.ex if self.shape.folded else x)
        # the router, in its own dtype
        self.wide_rest_nbytes = self.rest * wide
        self.router_nbytes = self.m_rest * config.experts * wide
        self.choice_nbytes = padded * 2 * chosen * wide  # scores and ids
        self.choice_owed_nbytes = m * chosen * wide
        self.choice_back_nbytes = padded * chosen * wide
        # what it reads and writes: scores, the ids of all experts in order, and those that are chosen
        self.router_cast_nbytes = 0 if wide == item else self.rest * (item + wide)
        self.choosing_nbytes = 4 * self.router_nbytes + 2 * self.m_rest * config.experts * ID_NBYTES
        # experts keep copies of the stream, or the stream itself, which the MLP beside them and the router keep as well
        gathers = self.policy.keep_gathered and structure.over_x
        copies = structure.copies_rows or (gathers and not structure.folded)
        alone = gathers or not config.shared_hidden or config.reads_previous  # no MLP beside them keeps the stream
        kept = self.joined_nbytes if structure.folded else self.kept_normed_nbytes
        self.kept_by_experts_nbytes = kept if copies or alone else 0
        itself = self.rest_nbytes if copies and alone else 0
        self.kept_router_nbytes = self.rest * wide if wide != item else itself
        statistics = self.m_rest * (chosen + (1 if config.normalize_top_k else 0)) * wide
        logits = self.router_nbytes * (2 if config.routing.balances else 1)
        self.kept_choice_nbytes = logits + self.m_rest * config.experts * ID_NBYTES + statistics
        # pairs of a token and one of its experts, by expert
        sent, arrived = (self.sent_pairs, self.arrived_pairs) if structure.folded else (self.pairs, 0)
        self.sorting_nbytes, self.arrived_sorting_nbytes = 12 * sent * ID_NBYTES, 12 * arrived * ID_NBYTES
        self.pair_index_nbytes = 2 * sent * ID_NBYTES  # their tokens, and where each choice is
        self.arrived_index_nbytes = arrived * (2 * ID_NBYTES + 1)  # with what says which of them have an expert here
        self.pair_score_nbytes = self.pairs * item
        self.pair_stream_nbytes = self.pairs * self.k * item  # a row of the stream for each
        self.pairs_nbytes = self.pairs * n * item
        self.pairs_cut_nbytes = self.pairs_nbytes // inner_cut
        self.kept_pairs_nbytes = self.pairs_nbytes if structure.keeps_collected else self.pairs_cut_nbytes
        # the choices of a context group's segments, gathered over it
        self.choices_nbytes = self._segments * self.shape.context * config.experts * ID_NBYTES
        self.choice_rest_nbytes = self.m_rest * chosen * wide  # p of the tokens at rest
        # the MLP beside the experts
        self.shared_n = config.shared_hidden // x
        self.shared_nbytes = m * self.shared_n * item
        self.shared_cut_nbytes = self.shared_nbytes // inner_cut
        self.kept_shared_nbytes = self.shared_nbytes if structure.keeps_collected else self.shared_cut_nbytes

    def _size_dispatch(self) -> None:
        """Set the sizes of what travels to experts on a fold and back, if every expert has equally many pairs."""
        config, shape, structure, item = self.config, self.shape, self.structure, self.item
        x, ranks, routing = shape.x, shape.expert, self.config.routing
        tokens = self.m_rest if structure.sharded else part(self.m, x, self.coords["x"])  # that this rank sends
        shares = [chunk(config.experts, ranks, rank) for rank in range(ranks)]
        own = shares[self.coords["expert"]]
        if not structure.sends:  # every rank has all experts
            to_ranks, pairs = [tokens], tokens * config.top_k
        elif self.policy.pad_experts:
            limit, most = self._limit(), -(-self.m // x)
            to_ranks = [routing.most(most, len(shares[0]), limit)[0]] * ranks
            pairs = routing.most(most, len(own), limit)[1]
        else:
            to_ranks = [routing.balanced(tokens, share)[0] for share in shares]
            pairs = routing.balanced(tokens, own)[1]
        sent, stayed = sum(to_ranks), to_ranks[self.coords["expert"]]
        arrived = ranks * stayed
        joined = shape.ex * arrived
        self.sent_pairs, self.arrived_pairs = tokens * config.top_k, joined * config.top_k if structure.sends else 0
        self.pairs = shape.ex * ranks * pairs
        self.expert_parts = max(1, min(len(own), self.pairs))
        wide = structure.router_itemsize
        row, scores = self.k * item, config.top_k * wide
        packed = row + 2 * scores  # the bits of p and ids travel in further columns
        away = sent - stayed
        larger = max(sent, arrived)
        self.dispatch_nbytes, self.dispatch_sent_nbytes = larger * packed, away * packed
        self.dispatch_back_nbytes = (arrived - stayed) * packed
        self.combine_nbytes, self.combine_sent_nbytes = larger * row, (arrived - stayed) * row
        self.combine_back_nbytes = away * row
        self.counts_nbytes = 2 * ranks * ID_NBYTES  # rows and pairs
        self.counts_sent_nbytes = 2 * (ranks - 1) * ID_NBYTES
        self.counts_joined_nbytes = shape.ex * self.counts_nbytes
        self.sent_stream_nbytes, self.packed_nbytes = sent * row, sent * packed
        self.arrived_stream_nbytes, self.arrived_packed_nbytes = arrived * row, arrived * packed
        self.joined_nbytes, self.joined_scores_nbytes = joined * row, joined * scores
        self.joined_packed_nbytes = joined * packed
        self.gathered_ids_nbytes = self.m_rest * x * config.top_k * 4  # int32
        # whole along x again, where activations are not sharded
        self.own_scores_nbytes = part(self.m, x, 0) * x * config.top_k * wide
        self.own_stream_nbytes = part(self.m, x, 0) * x * row

    def _limit(self) -> int:
        """Return how many pairs an expert takes of a rank's tokens (`nn.router.most_of_an_expert`)."""
        config, seq = self.config, self.seq
        if not config.capacity or self.shape.context > 1 or self.documents is not None:
            raise ValueError(
                "pad_experts=True sends as many rows as the capacity of experts allows: it needs model.capacity, rows "
                "of one document each and a grid without context; use pad_experts=False (policy.pad_experts)"
            )
        rows = -(-self.m // self.shape.x)
        begun = min(self.rows, -(-(rows - 1) // seq) + 1)
        return min(rows, begun * ceil(config.capacity * seq * config.top_k / config.experts))

    @cached_property
    def _segments(self) -> int:
        """The segments of a member of a context group whose choices are counted together; 0 if they are not."""
        routing = self.config.routing
        if self.shape.context == 1 or not (routing.aux or routing.capacity):
            return 0
        lengths = self.rows, self.seq, self.shape.context, self.documents
        return most_segments(self.policy.assignment, self.policy.context_way, *lengths)

    def _kv_heads(self, inner_cut: int) -> LocalHeads:
        """Return the KV heads that this rank's queries read."""
        config, cut = self.config, self.shape.x * inner_cut
        if config.kv_heads % cut == 0:
            return LocalHeads(config.kv_heads // cut)
        block = self.coords["x"] * inner_cut + (self.coords["y"] if inner_cut > 1 else 0)
        heads, group = config.heads // cut, config.heads // config.kv_heads
        wanted = Counter(query // group for query in range(block * heads, (block + 1) * heads))
        if len(set(wanted.values())) == 1:
            return LocalHeads(len(wanted), shared=True)
        return LocalHeads(heads, shared=True, copied=True)

    # --- what travels inside a context group

    def _traffic(self, kv_heads: int) -> ContextTraffic:
        lengths = self.rows, self.seq, self.shape.context, self.documents
        return context_traffic(self.policy, *lengths, self.shape.member(self.rank), kv_heads)

    def _size_traffic(self, traffic: ContextTraffic) -> None:
        """Set the sizes of what travels, of one piece of the heads if there are several, and of attention over it."""
        form, near = traffic.form, traffic.neighbours
        pieces = form.pieces
        token = 2 * self.local_kv * self.item // near // pieces  # bytes of the K and V of a token in one piece
        self.attention_flops = 4 * traffic.pairs * (self.query_cut_nbytes // self.item // self.m) // near
        self.piece_flops = self.attention_flops // (pieces * (form.hops + 1))
        self.piece_query_nbytes = self.query_cut_nbytes // pieces
        self.own_nbytes = traffic.tokens * token  # K and V that a holder has
        self.piece_nbytes = max(traffic.to, traffic.taken) * token
        self.piece_sent_nbytes = (traffic.to - traffic.to_itself) * token
        self.piece_returned_nbytes = (traffic.taken - traffic.to_itself) * token
        self.arrived_nbytes = traffic.taken * token
        self.keys_nbytes = traffic.read * token  # K and V that the queries of a holder read, in order
        # what attention keeps of K and V
        self.kept_keys_nbytes = self.keys_nbytes * pieces if self.policy.keep_gathered else self.local_kv_nbytes
        self.swapped_nbytes = self.query_cut_nbytes + self.local_kv_nbytes  # q, k and v, for heads of other tokens
        self.swapped_sent_nbytes = self.swapped_nbytes * (near - 1) // near
        self.swapped_back_nbytes = self.query_cut_nbytes * (near - 1) // near

    def all_to_all(self, nbytes: int, sent: int, label: str, axis: str = CONTEXT) -> list[Collective]:
        """Return the record of an all-to-all, by default of a context group, of which this rank sends some bytes."""
        return [_collective("all_to_all", axis, nbytes, self.shape.group_sizes[axis], label, sent=sent)]

    def _read_nbytes(self, copies_kv: bool) -> int:
        """Return the bytes of the tensors of which q, k and v are views when attention begins."""
        structure = self.structure
        if not structure.shares_kv:
            return self.qkv_cut_nbytes
        own = self.kv_whole_nbytes if structure.cuts_kv_head else self.kv_nbytes
        own = self.local_kv_nbytes if copies_kv else own
        if structure.over_y:
            return self.query_cut_nbytes + own
        return self.qkv_nbytes + (own if structure.cuts_kv_head or copies_kv else 0)

    @cached_property
    def halves(self) -> list[LocalSizes]:
        """The sizes of each half of a micro-step."""
        number, whole = self.number_of_halves, (self.config, self.shape, self.policy)
        if number == 1:
            return [self]
        if number > self.rows:
            first, second = (part(self.seq, number, index) for index in range(number))
            rest = self.dtype, self.rank, 1
            return [LocalSizes(*whole, 1, first, *rest), LocalSizes(*whole, 1, second, *rest, before=first)]
        rows = [part(self.rows, number, index) for index in range(number)]
        held: list[tuple[int, ...] | None] = [None] * number
        if self.documents is not None:
            held = list(map(tuple, cut_documents(self.documents, [each * self.seq for each in rows])))
        made = {
            half: LocalSizes(*whole, half[0], self.seq, self.dtype, self.rank, 1, half[1])
            for half in set(zip(rows, held, strict=True))
        }
        return [made[half] for half in zip(rows, held, strict=True)]

    @property
    def chunks(self) -> list[int]:
        """The tokens of each chunk in which head and loss run."""
        return self._chunks(self.chunk_tokens)

    @property
    def mlp_chunks(self) -> list[int]:
        """The tokens of each chunk in which MLPs run."""
        return self._chunks(self.mlp_chunk_tokens)

    def _chunks(self, size: int) -> list[int]:
        return [min(size, self.m - first) for first in range(0, self.m, size)]

    # --- activations

    def reread_nbytes(self, attribute: str) -> int:
        """Return the bytes of an input that is gathered a second time for dw; 0 if the gathered input was kept."""
        return 0 if self.policy.keep_gathered else getattr(self, attribute)

    def hidden_chunk_nbytes(self, tokens: int) -> int:
        """Return the bytes of the hidden units of some tokens, before y cuts features."""
        return tokens * self.n * self.item

    def hidden_chunk_cut_nbytes(self, tokens: int) -> int:
        """Return the bytes of these hidden units as the activation reads them."""
        return self.hidden_chunk_nbytes(tokens) // (self.shape.y if self.structure.sharded else 1)

    def logits_nbytes(self, tokens: int) -> int:
        """Return the bytes of the logits of some tokens before `spread`."""
        return tokens * self.vocab_columns * self.item

    def logits_cut_nbytes(self, tokens: int) -> int:
        """Return the bytes of these logits as the loss reads them."""
        columns = self.vocab_columns // self.shape.y if self.structure.sharded else self.vocab_columns
        return tokens * columns * self.item

    def loss_copies_nbytes(self, tokens: int) -> int:
        """Return the bytes of the copies that the loss makes of these logits, in forward or in backward.

        They are a copy in the dtype of statistics, and, if that is another dtype or the logits are padded, the result.
        """
        structure, cut = self.structure, self.logits_cut_nbytes(tokens)
        if self.policy.compile or (not structure.over_x and not structure.cuts_inner and structure.wide == 1):
            return cut
        return (structure.wide + (1 if structure.wide > 1 or self.logits_padded else 0)) * cut

    def statistics_nbytes(self, tokens: int, axis: str) -> int:
        """Return the bytes of the loss's three statistics per token, gathered over an axis."""
        return 3 * tokens * self.structure.wide_itemsize * self.shape.sizes[axis]

    def chunk_before_nbytes(self, tokens: int) -> int:
        """Return the bytes of the previous chunk's gradient, which exists while the next one is computed."""
        return self.logits_nbytes(tokens) if tokens < self.m else 0

    # --- parameters

    @cached_property
    def stages(self) -> Stages:
        """The stages of the model, of which this rank holds those of its pipe coordinate."""
        return self.policy.stages or _even_stages(self.config.layers, self.shape.pipe)

    def schedule(self, micro_steps: int) -> Schedule:
        """Return the schedule of a step, as the runtime chooses it."""
        wanted = self.policy.schedule
        if not isinstance(wanted, str):  # found by the planner, or checked when the config was read
            return wanted
        return choose(wanted, _stages_that_matter(wanted, self.stages), micro_steps)

    @cached_property
    def held(self) -> HeldUnits:
        """The units of the model that this rank holds."""
        return held_units(self.stages, self.coords[PIPE], self.config.tied)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Specs of this rank's parameters by name, in the model's order."""
        config, held, begun = self.config, self.held, False
        first, found = parameter_specs(config, self.policy.activations, folded=self.shape.folded), {}
        for name, spec in first.items():
            if not name.startswith(LAYER):
                if held.has(name):
                    found[name] = spec
            elif not begun:
                begun = True
                for index in held.layers:
                    names = names_of_layer(config, config.is_mixture(index))
                    found |= {f"layers.{index}.{each.removeprefix(LAYER)}": first[each] for each in names}
        return found

    @cached_property
    def _parameters(self) -> ParameterTable:
        return parameter_table(self.config, self.shape, self.coords)

    @cached_property
    def _most_parameters(self) -> ParameterTable:
        """The same on the first rank, which holds most."""
        if not self.rank:
            return self._parameters
        return parameter_table(self.config, self.shape, dict.fromkeys((*CUTS, *FOLDED), 0))

    def parameter(self, name: str) -> ParameterSizes:
        return self._parameters.sizes[in_first_layer(name)]

    def elements(self, names: tuple[str, ...]) -> int:
        """Return the elements of parameters as products use them, gathered over z."""
        return self._parameters.group(names)[0]

    def most_elements(self, names: tuple[str, ...]) -> int:
        """Return `elements` of the rank that holds most, by which all ranks order their messages."""
        return self._most_parameters.group(names)[0]

    def message_elements(self, names: tuple[str, ...]) -> int:
        """Return the elements of these parameters in one message over z, where shards are padded to equal rows."""
        return self._parameters.group(names)[1]

    def shard_elements(self, names: tuple[str, ...]) -> int:
        """Return the elements of this rank's shards of these parameters."""
        return self._parameters.group(names)[2]

    def kept_elements(self, names: tuple[str, ...]) -> int:
        """Return the elements of gathered weights that a product keeps for backward."""
        return self.elements(names) if self.structure.keeps_weights else 0

    def elements_again(self, names: tuple[str, ...]) -> int:
        """Return the elements of weights that are gathered a second time for backward."""
        return 0 if self.structure.keeps_weights else self.elements(names)

    def message_elements_again(self, names: tuple[str, ...]) -> int:
        """Return the elements of the message of that second gather."""
        return 0 if self.structure.keeps_weights else self.message_elements(names)

    def layer_shard(self, mixture: bool) -> int:
        """Return the elements of this rank's shards of one layer, which is a mixture of experts or not."""
        return self.shard_elements(names_of_layer(self.config, mixture))

    def layers_shard(self, layers: Sequence[int]) -> int:
        """Return the elements of this rank's shards of some layers."""
        mixtures = self._mixtures(layers)
        dense = len(layers) - mixtures
        return (mixtures and mixtures * self.layer_shard(True)) + (dense and dense * self.layer_shard(False))

    @property
    def parameters(self) -> int:
        """The elements of all shards of this rank."""
        return self.layers_shard(self.held.layers) + self._parameters.outside_layers(self.held)

    def expert_shard(self, layers: Sequence[int]) -> int:
        """Return the elements of this rank's shards of the experts of some layers on a fold; 0 on other grids."""
        if not self.shape.folded:
            return 0
        return self._mixtures(layers) * sum(self.parameter(name).shard for name in names_of_experts(self.config))

    def _mixtures(self, layers: Sequence[int]) -> int:
        """Return how many of some layers are mixtures of experts."""
        return sum(map(self.config.is_mixture, layers)) if self.config.experts else 0

    def casts_nbytes(self, parameters: int) -> int:
        """Return the bytes of cast shards that exist all the time, of a rank with so many elements of shards."""
        structure, mixtures = self.structure, self._mixtures(self.held.layers)
        routers = mixtures and mixtures * self.parameter(f"{LAYER}mlp.router.weight").shard
        others = (parameters - routers) * structure.compute_itemsize if structure.keeps_casts else 0
        return others + (routers * structure.router_itemsize if structure.keeps_router_casts else 0)

    @cached_property
    def replica_share(self) -> float:
        """The share of a rank's parameters that it steps, if replicas share the steps of a sharded optimizer."""
        data, edata = (self.shape.cuts[axis] for axis in REPLICAS)
        experts = self.expert_shard(self.held.layers)
        if not experts:
            return 1 / data
        return ((self.parameters - experts) / data + experts / edata) / self.parameters

    def units_nbytes(self, layers: Sequence[int], *, embedding: bool, head: bool) -> int:
        """Return the bytes of a rank's shards of some layers, and of embedding and head where they are asked for."""
        held = HeldUnits(layers, embedding, head, self.config.tied and head and not embedding)
        elements = self.layers_shard(layers) + self._parameters.outside_layers(held)
        return elements * self.dtype.itemsize

    @cached_property
    def parameter_nbytes(self) -> int:
        return self.parameters * self.dtype.itemsize

    def buckets(self) -> list[Bucket]:
        """Return the runtime's buckets, in which gradients are summed over the axes that they owe beyond z."""
        item, layers, axes = self.dtype.itemsize, self.config.layers, self.shape.cuts
        owed, gradients = owed_axes(self.config, self.policy.activations, folded=self.shape.folded), []
        for name in self.specs:
            first = in_first_layer(name)
            owes = owed[first]
            nbytes, unit = self._parameters.sizes[first].shard * item, bucket_unit(unit_of(name, layers), owes, axes)
            gradients.append(OwingGradient(name, owes, self.dtype, nbytes, unit))
        return fill_buckets(gradients, self.policy.bucket_bytes)

    # --- messages

    def message(self, op: Op, axis: str, nbytes: int, label: str) -> list[Collective]:
        """Return the record of a message, or none if the axis has one rank or nothing is sent."""
        ranks = self.shape.group_sizes[axis]
        return [_collective(op, axis, nbytes, ranks, label)] if ranks > 1 and nbytes else []


_collective = lru_cache(maxsize=1 << 16)(Collective)  # both halves, every pass and every rehearsal send the same ones


class LocalHeads(NamedTuple):
    """The KV heads that the queries of one rank read."""

    number: int
    shared: bool = False
    """Whether ranks exchange K and V, because KV heads do not follow the cut of the queries."""
    copied: bool = False
    """Whether there is a copy for every query head."""


class ContextTraffic(NamedTuple):
    """The tokens whose K and V one member of a context group sends and reads in a layer; neighbours that swap tokens
    for heads are one holder."""

    form: ContextForm
    neighbours: int
    tokens: int
    """What a holder has."""
    to: int
    """The rows of an all-to-all, over all holders."""
    taken: int
    to_itself: int
    """The rows among them that stay, which a gather copies."""
    read: int
    """The keys that the queries of a holder read, each once."""
    pairs: int
    """The pairs of query and key (E14)."""


@lru_cache(maxsize=4096)
def context_traffic(
    policy: Policy, rows: int, seq: int, members: int, documents: tuple[int, ...] | None, member: int, kv_heads: int
) -> ContextTraffic:
    """Return what a member sends and reads, from the assignment that the runtime makes (`context.move`)."""
    assignment, way = plan_context(policy.assignment, policy.context_way, rows, seq, members, documents)
    near, holders = way.neighbours, assignment.joined(way.neighbours)
    here, all_of_them = member // near, range(len(holders.members))
    tokens = sum(segment.tokens for segment in holders.members[here])
    read, pairs = sum(holders.last(here).values()), holders.work[here]
    if way.over == "ring" and len(all_of_them) > 1:
        directions = 2 if kv_heads // near % 2 == 0 else 1
        form = ContextForm("ring", near > 1, directions, len(all_of_them) - 1, moves=True, to_all=False)
        return ContextTraffic(form, near, tokens, tokens, tokens, 0, read, pairs)
    everything = way.over == "gather"
    moves = len(all_of_them) > 1 if everything else holders.moved > 0
    pieces = pieces_of(kv_heads // near) if moves else 1
    form = ContextForm(way.over, near > 1, pieces, 0, moves, everything and near == 1)
    if everything:
        whole = tokens * len(all_of_them)
        return ContextTraffic(form, near, tokens, whole, whole, tokens, read, pairs)
    return ContextTraffic(form, near, tokens, *holders.exchanged(here), 0, read, pairs)


@lru_cache(maxsize=4096)
def most_segments(
    assignment: Any, way: Any, rows: int, seq: int, members: int, documents: tuple[int, ...] | None
) -> int:
    """Return the segments of the member of a context group that has most."""
    found, _ = plan_context(assignment, way, rows, seq, members, documents)
    return max(map(len, found.members))


_even_stages = lru_cache(maxsize=1024)(Stages.even)


@lru_cache(maxsize=4096)
def _stages_that_matter(schedule: str, stages: Stages) -> Stages:
    """Return the stages without what does not change this schedule, so that it is made once for all of them."""
    if schedule in BY_LAYERS:
        return replace(stages, recompute=())
    return replace(stages, recompute=(), cuts=(0, *range(1, len(stages.placement)), len(stages.placement) + 1))


def sum_over_batch(sizes: LocalSizes, numbers: int, label: str) -> list[Collective]:
    """Return the messages that sum `numbers` statistics over all places."""
    axes = [axis for axis in CUTS if axis in BATCH]
    return [one for axis in axes for one in sizes.message("all_reduce", axis, numbers * STATISTIC_NBYTES, label)]
