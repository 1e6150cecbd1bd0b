"""Sizes on one rank: its part of a model and of a batch, on a grid, under a policy.

Names, layouts and owed axes of parameters come from the real layers: `parameter_specs` declares a model of one layer on
meta tensors and reads its specs. Activations have the two layouts of docs/algorithm.md, rest and inner.

A program is written for a `Structure`: the axes in use, the policy, the number of halves, the kinds of layers. The
structure alone decides which work a step has, and in which order; `LocalSizes` says how much work it is. The search
compares thousands of candidates that share few structures. It rehearses each structure once with `SizeNames`, in which
every size is a sum of names (`Term`), and then fills in the numbers of each candidate (`SizeMatrix`).

Notation: m tokens of a place, which is a coordinate of data and z; k and n this rank's features of the residual stream
and inside a sublayer. Attributes whose name ends in `nbytes` count bytes; others count elements, unless a comment says
otherwise.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch

from fourfold.axes import BATCH, CUTS, PIPE, REPLICA
from fourfold.engine import Overlap
from fourfold.gradients import Bucket, OwingGradient, bucket_unit, fill_buckets
from fourfold.grid import Grid, Shape
from fourfold.layout import GATHERED, Spec, logits_columns
from fourfold.ledger import Collective, Op
from fourfold.models.config import ModelConfig, halves_of, unit_of
from fourfold.models.transformer import Transformer
from fourfold.nn.embedding import looks_up_in_place
from fourfold.nn.layer import specs_of
from fourfold.policy import Activations, Policy, Recompute
from fourfold.schedule.action import Schedule
from fourfold.schedule.choose import FOUND, choose
from fourfold.schedule.stages import Stages

STATISTIC_NBYTES = 8
"""Bytes of a loss, a count or a squared norm: these sums are fp64."""
ID_NBYTES = 8
"""Bytes of a token's id, an int64."""
BY_LAYERS = ("auto", FOUND)
"""The names of schedules that may depend on the layers of each stage; others depend on its rank alone."""
LAYER = "layers.0."
"""The beginning of the names of the first layer's parameters; all layers have the same sizes."""


class PaperGrid(Grid):
    """A grid of one rank without a process group: layers can be declared on it, but nothing can run."""

    def __init__(self) -> None:
        self.shape, self.rank = Shape(), 0
        self.coords = self.shape.coords(0)


@lru_cache(maxsize=256)
def parameter_specs(config: ModelConfig, activations: Activations) -> dict[str, Spec]:
    """Return the spec of every parameter of the model's first layer, embedding, last norm and head, by name."""
    return specs_of(Transformer(replace(config, layers=1), PaperGrid(), Policy(activations=activations)))


def in_first_layer(name: str) -> str:
    """Return the name of the same parameter in the first layer."""
    return LAYER + name.split(".", 2)[2] if name.startswith("layers.") else name


def part(length: int, parts: int, index: int) -> int:
    """Return the length of the `index`-th part as `layout.chunk` cuts."""
    size = -(-length // parts)
    return min(size, max(0, length - index * size))


# --- the structure of a step


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
    shares_kv: bool
    """Whether ranks exchange K and V, because KV heads do not follow the cut of the queries."""
    cuts_kv_head: bool
    """Whether x cuts through a KV head."""
    looks_up_in_place: bool
    """Whether tokens go to the embedding's table over z, instead of the table to the tokens."""

    def __post_init__(self) -> None:
        config, policy, axes = self.config, self.policy, self.used_axes
        # programs are cached by it
        self._hash = hash((config, policy, self.dtype, axes, self.halves, self.shares_kv, self.looks_up_in_place))
        self.sharded = policy.activations == "sharded"
        self.over_x, self.over_y = "x" in axes, "y" in axes
        self.cuts_rest = self.sharded and self.over_x  # x cuts tokens at rest
        self.cuts_inner = self.sharded and self.over_y  # y cuts features inside a sublayer, beyond x
        self.gathers_weights = GATHERED in axes
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
        # Contract layers keep an input that was gathered over y
        self.keeps_collected = policy.keep_gathered and self.cuts_inner
        self.chunked = bool(policy.loss_chunk)  # head and loss run in chunks of tokens
        self.up_layers = ("gate", "up") if config.mlp == "swiglu" else ("up",)  # they read the residual stream
        self.table = "embedding.weight" if config.tied else "head.weight"  # the parameter that makes logits

    def __hash__(self) -> int:
        return self._hash

    def matrices(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the parameters that are matrices."""
        return tuple(name for name in names if len(self._specs[in_first_layer(name)].shape) > 1)

    def parameters_of(self, *modules: str) -> tuple[str, ...]:
        """Return the parameters of modules that share one message: all weights, then the biases that exist."""
        names = (f"{module}.{kind}" for kind in ("weight", "bias") for module in modules)
        return tuple(name for name in names if in_first_layer(name) in self._specs)

    @cached_property
    def _specs(self) -> dict[str, Spec]:
        return parameter_specs(self.config, self.policy.activations)


@lru_cache(maxsize=4096)
def _structure(*arguments: Any) -> Structure:
    return Structure(*arguments)


@lru_cache(maxsize=4096)
def structure_of_names(
    structure: Structure, *, recompute: Recompute | None = None, chunked: bool | None = None
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
    )
    axes = tuple(axis for axis in structure.used_axes if axis != REPLICA)
    return replace(structure, policy=policy, used_axes=axes)


_ONES = dict(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=2, mlp_hidden=1, vocab=1, seq=1, norm_eps=1.0)
"""The sizes of the config of a structure; a head has an even number of dims."""


@lru_cache(maxsize=256)
def _kinds_of_layers(config: ModelConfig) -> ModelConfig:
    return replace(config, **_ONES, rope_theta=1.0, dropout=0.5 if config.dropout else 0.0)


@lru_cache(maxsize=1024)
def _kinds_of_work(policy: Policy) -> Policy:
    """Return the policy reduced to what shapes a rehearsed program.

    Numbers that only set sizes become 1. Stages and schedule are left out: every stage is rehearsed by itself. Overlap
    settings become the defaults, except the one that changes the order of
    products: rehearsals neither prefetch nor defer, and the readings add the bytes that are in flight.
    """
    overlap = Overlap(wgrad_behind_messages=policy.overlap.wgrad_behind_messages)
    chunk = 1 if policy.loss_chunk else 0
    return replace(policy, loss_chunk=chunk, bucket_bytes=1, overlap=overlap, stages=None, schedule="auto")


# --- the sizes of a candidate


@lru_cache(maxsize=1 << 16)
def _cutting_axes(shape: Shape) -> tuple[str, ...]:
    return tuple(axis for axis in shape.used_axes if axis != PIPE)


@dataclass(eq=False)
class LocalSizes:
    """Sizes on one rank of a model and a batch on a grid, under a policy."""

    config: ModelConfig
    shape: Shape
    policy: Policy
    rows: int
    """Rows of a (data, z) place in one micro-step."""
    seq: int
    dtype: torch.dtype = torch.float32
    """The parameters' dtype."""
    rank: int = 0
    number_of_halves: int = 0
    """The number of parts of the rows that take turns; 0: as the runtime chooses."""

    def __post_init__(self) -> None:
        config, shape, policy, seq = self.config, self.shape, self.policy, self.seq
        self.item = item = (policy.compute_dtype or self.dtype).itemsize  # bytes of one element of an activation
        if not self.number_of_halves:
            self.number_of_halves = halves_of(config, shape, policy, self.rows, seq, item).number
        self.coords = shape.coords(self.rank)
        x, y, sharded = shape.x, shape.y, policy.activations == "sharded"
        inner_cut = y if sharded else 1  # this many ranks cut features inside a sublayer beyond x
        number = self.number_of_halves
        self.structure = structure = _structure(
            _kinds_of_layers(config), _kinds_of_work(policy), self.dtype, _cutting_axes(shape), number,
            self.rows % number == 0, config.kv_heads % (x * inner_cut) != 0, config.kv_heads % x != 0,
            looks_up_in_place(policy, shape, config.vocab, -(-self.rows // number) * seq),
        )  # fmt: skip
        wide = structure.wide_itemsize

        self.m = m = self.rows * seq
        self.m_rest = m_rest = -(-m // x) if sharded else m  # tokens that a rank holds at rest
        self.k = k = config.hidden // y
        self.n = n = config.mlp_hidden // x  # hidden units of the MLP
        self.q = q = config.heads * config.head_dim // x
        self.kv = kv = config.kv_heads * config.head_dim // x
        self.local_kv, copies_kv = self._local_kv(inner_cut)  # features of the keys that this rank's queries read
        self.vocab_columns = logits_columns(config.vocab, x, inner_cut, item)  # columns of logits, with padding
        self.logits_padded = self.vocab_columns > part(config.vocab, x, self.coords["x"])
        self.chunk_tokens = min(policy.loss_chunk or m, m)  # tokens of the first chunk of head and loss

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
        self.rope_nbytes = 2 * seq * config.head_dim * wide  # tables of rotary positions

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
        self.attention_flops = 2 * m * q // inner_cut * seq  # scores and their use; a causal mask leaves half of them

        # tensors that forward keeps
        keeps_collected = structure.keeps_collected
        self.kept_normed_nbytes = (  # a norm's output as the product that reads it keeps it
            self.entered_nbytes if policy.keep_gathered and structure.over_x else self.rest_nbytes
        )
        self.kept_hidden_nbytes = self.hidden_nbytes if keeps_collected else self.hidden_cut_nbytes
        self.kept_query_nbytes = self.query_nbytes if keeps_collected else 0  # else attention keeps its output itself
        self.kept_output_nbytes = 0 if keeps_collected else self.query_cut_nbytes  # if attention is recomputed
        self.read_nbytes = self._read_nbytes(copies_kv)
        self.query_statistic_nbytes = m * wide * q // inner_cut // config.head_dim  # one statistic per head and token
        self.key_statistic_nbytes = m * wide * self.local_kv // config.head_dim
        self.head_gradient = self.vocab_columns * k  # elements of the gradient of the head's table, with padding

    def _local_kv(self, inner_cut: int) -> tuple[int, bool]:
        """Return the features of the keys that this rank's queries read, and whether keys are copied per query head."""
        config = self.config
        if not self.structure.shares_kv:
            return self.kv // inner_cut, False
        block = self.coords["x"] * inner_cut + (self.coords["y"] if self.structure.sharded else 0)
        heads, group = config.heads // (self.shape.x * inner_cut), config.heads // config.kv_heads
        wanted = Counter(query // group for query in range(block * heads, (block + 1) * heads))
        if len(set(wanted.values())) == 1:
            return len(wanted) * config.head_dim, False
        return heads * config.head_dim, True

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
        number = self.number_of_halves
        if number == 1:
            return [self]
        rows = [part(self.rows, number, index) for index in range(number)]
        whole = self.config, self.shape, self.policy
        made = {each: LocalSizes(*whole, each, self.seq, self.dtype, self.rank, 1) for each in set(rows)}
        return [made[each] for each in rows]

    @property
    def chunks(self) -> list[int]:
        """The tokens of each chunk in which head and loss run."""
        size = self.chunk_tokens
        return [min(size, self.m - first) for first in range(0, self.m, size)]

    # --- activations

    def reread_nbytes(self, attribute: str) -> int:
        """Return the bytes of an input that is gathered a second time for dw; 0 if the gathered input was kept."""
        return 0 if self.policy.keep_gathered else getattr(self, attribute)

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
        wanted, stages = self.policy.schedule, replace(self.stages, recompute=())
        if not isinstance(wanted, str):  # found by the planner, or checked when the config was read
            return wanted
        if wanted not in BY_LAYERS:  # the same for all cuts, so it is made once
            stages = replace(stages, cuts=(0, *range(1, len(stages.placement)), len(stages.placement) + 1))
        return choose(wanted, stages, micro_steps)

    @cached_property
    def held(self) -> HeldUnits:
        """The units of the model that this rank holds."""
        return _held_units(self.stages, self.coords[PIPE], self.config.tied)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Specs of this rank's parameters by name, in the model's order."""
        first, found, held = parameter_specs(self.config, self.policy.activations), {}, self.held
        block = [name for name in first if name.startswith(LAYER)]
        for name, spec in first.items():
            if name == block[0]:
                for index in held.layers:
                    found |= {f"layers.{index}.{each.removeprefix(LAYER)}": first[each] for each in block}
            elif name not in block and held.has(name):
                found[name] = spec
        return found

    @cached_property
    def _parameters(self) -> ParameterTable:
        return _parameter_table(self.config, self.shape, self.rank)

    def parameter(self, name: str) -> ParameterSizes:
        return self._parameters.sizes[in_first_layer(name)]

    def elements(self, names: tuple[str, ...]) -> int:
        """Return the elements of parameters as products use them, gathered over z."""
        return self._parameters.group(names)[0]

    def most_elements(self, names: tuple[str, ...]) -> int:
        """Return `elements` of the rank that holds most, by which all ranks order their messages."""
        return _parameter_table(self.config, self.shape, 0).group(names)[0] if self.rank else self.elements(names)

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

    @property
    def layer_shard(self) -> int:
        """The elements of this rank's shards of one layer."""
        return self._parameters.layer

    @property
    def parameters(self) -> int:
        """The elements of all shards of this rank."""
        return len(self.held.layers) * self._parameters.layer + self._parameters.outside_layers(self.held)

    def units_nbytes(self, layers: int, *, embedding: bool, head: bool) -> int:
        """Return the bytes of a rank's shards of some layers, and of embedding and head where they are asked for."""
        held = HeldUnits(range(layers), embedding, head, self.config.tied and head and not embedding)
        elements = layers * self._parameters.layer + self._parameters.outside_layers(held)
        return elements * self.dtype.itemsize

    @cached_property
    def parameter_nbytes(self) -> int:
        return self.parameters * self.dtype.itemsize

    def buckets(self) -> list[Bucket]:
        """Return the runtime's buckets, in which gradients are summed over the axes that they owe beyond z."""
        item = self.dtype.itemsize
        layers, axes = self.config.layers, self.shape.sizes
        gradients = [
            OwingGradient(
                name,
                spec.owes,
                self.dtype,
                self.parameter(name).shard * item,
                bucket_unit(unit_of(name, layers), spec.owes, axes),
            )
            for name, spec in self.specs.items()
        ]
        return fill_buckets(gradients, self.policy.bucket_bytes)

    # --- messages

    def message(self, op: Op, axis: str, nbytes: int, label: str) -> list[Collective]:
        """Return the record of a message, or none if the axis has one rank or nothing is sent."""
        ranks = self.shape.sizes[axis]
        return [Collective(op, axis, nbytes, ranks, label)] if ranks > 1 and nbytes else []


class HeldUnits(NamedTuple):
    """The units of a model that the ranks of one pipe coordinate hold."""

    layers: Sequence[int]
    embedding: bool
    head: bool
    """Whether they hold the last norm and the head."""
    copies_table: bool = False
    """Whether they hold a copy of a tied embedding's table, for the head."""

    def has(self, name: str) -> bool:
        """Return whether a parameter outside of layers is among them."""
        if name.startswith(("norm.", "head.")):
            return self.head
        return self.embedding or (self.copies_table and name.startswith("embedding."))


_even_stages = lru_cache(maxsize=1024)(Stages.even)


@lru_cache(maxsize=4096)
def _held_units(stages: Stages, pipe_rank: int, tied: bool) -> HeldUnits:
    own = stages.of_rank(pipe_rank)
    layers = tuple(index for stage in own for index in stages.layers_of(stage))
    embedding, head = (any(map(has, own)) for has in (stages.has_embedding, stages.has_head))
    return HeldUnits(tuple(sorted(layers)), embedding, head, tied and head and not embedding)


class ParameterSizes(NamedTuple):
    """The sizes of one parameter on a rank, in elements except for the rows."""

    rows: int
    """Rows of the shard."""
    row: int
    """Elements of a row of the shard."""
    gathered: int
    """Elements of the parameter as products use it."""
    message: int
    """Elements in a message over z."""

    @property
    def shard(self) -> int:
        return self.rows * self.row


class ParameterTable:
    """Sizes of the parameters of the first layer and of those outside of layers, on one rank of a grid."""

    def __init__(self, specs: Mapping[str, Spec], sizes: Mapping[str, int], coords: Mapping[str, int]) -> None:
        self.sizes: dict[str, ParameterSizes] = {}
        self._groups: dict[tuple[str, ...], tuple[int, int, int]] = {}
        z = sizes[GATHERED]
        for name, spec in specs.items():
            lengths, gathered = list(spec.shape), list(spec.shape)
            for axis, dim in spec.storage.cuts:
                lengths[dim] = part(lengths[dim], sizes[axis], coords[axis])
                if axis != GATHERED:
                    gathered[dim] = part(gathered[dim], sizes[axis], coords[axis])
            columns = prod(gathered[1:])
            padded = part(gathered[0], z, 0) * z * columns
            self.sizes[name] = ParameterSizes(lengths[0], prod(lengths[1:]), gathered[0] * columns, padded)
        self.layer = self.group(tuple(name for name in specs if name.startswith(LAYER)))[2]
        """Elements of the shards of one layer."""
        self._others = tuple(name for name in specs if not name.startswith(LAYER))

    def outside_layers(self, held: HeldUnits) -> int:
        """Return the elements of the shards outside of layers that a rank with these units holds."""
        return self.group(tuple(name for name in self._others if held.has(name)))[2]

    def group(self, names: tuple[str, ...]) -> tuple[int, int, int]:
        """Return elements of these parameters: as products use them, in a message over z, in this rank's shards."""
        found = self._groups.get(names)
        if found is None:
            every = [self.sizes[in_first_layer(name)] for name in names]
            gathered, sent = sum(one.gathered for one in every), sum(one.message for one in every)
            found = self._groups[names] = gathered, sent, sum(one.shard for one in every)
        return found


@lru_cache(maxsize=4096)
def _parameter_table(config: ModelConfig, shape: Shape, rank: int) -> ParameterTable:
    specs = parameter_specs(config, "sharded")  # the mode decides which sums gradients owe, not the shards
    return ParameterTable(specs, shape.sizes, shape.coords(rank))


# --- names instead of sizes


class Name(NamedTuple):
    """A size by its name: an attribute of `LocalSizes`, or the result of one of its methods."""

    half: int
    """The index of the half of the rows, or WHOLE for all rows."""
    attribute: str
    arguments: tuple[Any, ...] | None = None
    """Arguments of the method; a `Term` among them is a sum of sizes of the same half."""

    def getter(self) -> Callable[[LocalSizes], int]:
        """Return a function that reads this size of a half."""
        attribute, arguments = self.attribute, self.arguments
        if arguments is None:
            return attrgetter(attribute)
        if not any(isinstance(one, Term) for one in arguments):
            return methodcaller(attribute, *arguments)
        return lambda half: getattr(half, attribute)(
            *(one.of_half(half) if isinstance(one, Term) else one for one in arguments)
        )


WHOLE = -1


class SizeReader:
    """Reads the numbers of a list of names from a candidate."""

    def __init__(self, names: Sequence[Name]) -> None:
        self._number = len(names)
        self._methods = [
            (place, name.half, name.getter()) for place, name in enumerate(names) if name.arguments is not None
        ]
        self._attributes = []
        for half in {name.half for name in names}:
            places = [place for place, name in enumerate(names) if name.half == half and name.arguments is None]
            if len(places) > 1:  # one call reads all of them
                self._attributes.append((half, places, attrgetter(*(names[place].attribute for place in places))))
            else:
                self._methods += [(place, half, names[place].getter()) for place in places]

    def __call__(self, sizes: LocalSizes) -> list[int]:
        parts = [*sizes.halves, sizes]  # WHOLE is the last
        values = [0] * self._number
        for half, places, get in self._attributes:
            for place, value in zip(places, get(parts[half]), strict=True):
                values[place] = value
        for place, half, get in self._methods:
            values[place] = get(parts[half])
        return values


class SizeMatrix:
    """Sums of sizes as rows of a matrix that has a column for each name.

    One product with the numbers of a candidate, or of many, gives all sums.
    """

    def __init__(self) -> None:
        self._columns: dict[Name, int] = {}
        self._rows: dict[tuple[tuple[int, int], ...], int] = {}

    def column(self, name: Name) -> int:
        return self._columns.setdefault(name, len(self._columns))

    def row(self, times: Mapping[int, int]) -> int:
        """Return the row with these coefficients, given by column."""
        parts = tuple((column, many) for column, many in times.items() if many)
        return self._rows.setdefault(parts, len(self._rows))

    def row_of(self, size: Any) -> int:
        """Return the row of a `Term`."""
        return self.row({self.column(name): many for name, many in size.parts.items()})

    @cached_property
    def _read(self) -> SizeReader:
        return SizeReader(list(self._columns))

    @cached_property
    def _matrix(self) -> torch.Tensor:
        places = [(row, column, many) for parts, row in self._rows.items() for column, many in parts]
        rows, columns, many = zip(*places, strict=True)
        matrix = torch.zeros(len(self._rows), len(self._columns), dtype=torch.float64)  # exact up to 2^53 bytes
        matrix[list(rows), list(columns)] = torch.tensor(many, dtype=torch.float64)
        return matrix

    def values(self, sizes: LocalSizes) -> torch.Tensor:
        """Return all sums of a candidate: [row]."""
        return self._matrix @ torch.frombuffer(array("d", self._read(sizes)), dtype=torch.float64)

    def values_of_many(self, sizes: Sequence[LocalSizes]) -> torch.Tensor:
        """Return all sums of many candidates: [row, candidate]."""
        return self._matrix @ torch.tensor([self._read(one) for one in sizes], dtype=torch.float64).T


class Term:
    """A sum of names with integer coefficients. It never changes."""

    __slots__ = ("_hash", "_times", "parts")

    def __init__(self, parts: dict[Name, int]) -> None:
        self.parts = parts
        self._times: dict[int, Term] = {}
        self._hash: int | None = None

    def __add__(self, other: Any) -> Term:
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Term:
        return self._plus(other, -1)

    def _plus(self, other: Any, sign: int) -> Term:
        if not isinstance(other, Term):
            if other != 0:
                raise TypeError(f"a size plus {other}: only sizes add up")
            return self
        parts = dict(self.parts)
        for name, times in other.parts.items():
            parts[name] = parts.get(name, 0) + sign * times
        return Term(parts)

    def __mul__(self, times: int) -> Term:
        found = self._times.get(times)
        if found is None:
            found = self._times[times] = Term({name: times * value for name, value in self.parts.items()})
        return found

    __rmul__ = __mul__

    def __neg__(self) -> Term:
        return self * -1

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Term) and self.parts == other.parts)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.parts.items()))
        return self._hash

    def of_half(self, half: LocalSizes) -> int:
        """Return the number of the sum, with every name read from this half."""
        return sum(times * name.getter()(half) for name, times in self.parts.items())


class SizeNames:
    """Stands for the `LocalSizes` of every candidate of one structure: each attribute is its own name."""

    def __init__(self, structure: Structure, half: int = WHOLE) -> None:
        self.structure, self._half = structure, half
        self._known: dict[str, Any] = {}

    @property
    def config(self) -> ModelConfig:
        return self.structure.config

    @property
    def policy(self) -> Policy:
        return self.structure.policy

    @property
    def dtype(self) -> torch.dtype:
        return self.structure.dtype

    @cached_property
    def halves(self) -> list[SizeNames]:
        number = self.structure.halves
        if self.structure.equal_halves:
            return [SizeNames(self.structure, 0)] * number
        return [SizeNames(self.structure, half) for half in range(number)]

    @property
    def chunks(self) -> list[Any]:
        """The tokens of the first chunk, which stands for all chunks: their number differs between candidates."""
        return [Term({Name(self._half, "chunk_tokens"): 1})]

    def message(self, op: Op, axis: str, nbytes: Any, label: str) -> list[Collective]:
        return [Collective(op, axis, nbytes, 0, label)] if axis in self.structure.used_axes else []

    def __getattr__(self, attribute: str) -> Any:
        known = self._known.get(attribute)
        if known is None:
            is_method = callable(getattr(LocalSizes, attribute, None))
            known = self._method(attribute) if is_method else Term({Name(self._half, attribute): 1})
            self._known[attribute] = known
        return known

    def _method(self, attribute: str) -> Callable[..., Term]:
        known: dict[tuple[Any, ...], Term] = {}

        def call(*arguments: Any) -> Term:
            if arguments not in known:
                plain = tuple(tuple(map(in_first_layer, one)) if isinstance(one, tuple) else one for one in arguments)
                known[arguments] = Term({Name(self._half, attribute, plain): 1})
            return known[arguments]

        return call


def sum_over_batch(sizes: LocalSizes, numbers: int, label: str) -> list[Collective]:
    """Return the messages that sum `numbers` statistics over all places."""
    axes = [axis for axis in CUTS if axis in BATCH]
    return [one for axis in axes for one in sizes.message("all_reduce", axis, numbers * STATISTIC_NBYTES, label)]
