"""What one rank's tensors take: shards of parameters, gathered weights, and what forward keeps for backward.

Closed forms in bytes, for one layer, so that they are cheap: all layers are equal. They describe a GPU, where norms
and attention are single kernels; a dry run on the meta device differs from it in what is freed at once.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from math import ceil

from fourfold.layout import chunk
from fourfold.planner.share import Share

IDS = 8
"""Bytes of a token's id."""


class Held:
    """Sizes on one rank, in bytes unless said otherwise; `m` tokens of its (data, z) place, all halves together."""

    def __init__(self, share: Share) -> None:
        self.share = share
        config, shape, policy = share.config, share.shape, share.policy
        self.sharded = share.sharded
        self.coords = shape.coords(share.rank)
        self.stored, self.compute, self.reduce = share.dtype.itemsize, share.compute_itemsize, share.reduce_itemsize
        self.wide = share.wide
        self.m, self.k, self.m_rest = share.m, share.k, share.m_rest
        self.halves = len(share.halves())
        self.inner_cut = shape.y if self.sharded else 1
        """How many ranks cut features inside a sublayer beyond x."""
        self.q = config.heads * config.head_dim // shape.x
        self.kv = config.kv_heads * config.head_dim // shape.x
        self.gates = 2 if config.mlp == "swiglu" else 1
        self.n = config.mlp_hidden // shape.x
        self.columns = share.vocab_columns

        # activations of the whole place, by where they lie
        c = self.compute
        self.at_rest = self.m_rest * self.k * c
        self.entered = share.m_padded * self.k * c if self.sharded else self.at_rest
        self.hidden = self.m * self.n * c
        self.hidden_cut = self.hidden // self.inner_cut
        self.queries = self.m * self.q * c
        self.queries_cut = self.queries // self.inner_cut
        self.logits = self.m * self.columns * c
        self.logits_cut = self.logits // self.inner_cut

        # weights in compute layout, as elements
        self.table = ceil(config.vocab / shape.x) * self.k
        self.qkv = (self.q + 2 * self.kv) * self.k
        self.out = self.q * self.k
        self.up = self.gates * self.n * self.k
        self.down = self.n * self.k
        self.travels = shape.z > 1
        self.casts = policy.compute_dtype not in (None, share.dtype)
        self.keeps_weights = policy.keep_weights and (self.travels or self.casts)
        """Products keep them, where block recompute does not forget them again."""

    # --- parameters

    def part(self, length: int, *axes: str) -> int:
        for axis in axes:
            length = len(chunk(length, self.share.shape.sizes[axis], self.coords[axis]))
        return length

    @cached_property
    def layer_shard(self) -> int:
        """Elements of a layer's parameters."""
        config, part, z = self.share.config, self.part, "z"
        q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        widths = [q, kv, kv, *[config.mlp_hidden] * self.gates]
        expand = sum(part(width, "x", z) for width in widths)
        residual = part(config.hidden, "y", z)
        elements = expand * self.k + residual * (self.q + self.n)
        norms = 4 if config.norm == "layer" and config.bias else 2
        elements += norms * residual
        if config.bias:
            elements += sum(part(width, "x", "y", z) for width in widths) + 2 * residual
        if config.qk_norm:
            elements += 2 * part(config.head_dim, z)
        return elements

    @cached_property
    def table_shard(self) -> int:
        return self.part(self.share.config.vocab, "x", "z") * self.k

    @cached_property
    def other_shard(self) -> int:
        """Elements of learned positions and the last norm."""
        config = self.share.config
        norm = self.part(config.hidden, "y", "z") * (2 if config.norm == "layer" and config.bias else 1)
        return norm + (self.part(config.seq, "z") * self.k if config.positions == "learned" else 0)

    @property
    def tables(self) -> int:
        return 1 if self.share.config.tied else 2

    @cached_property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return self.share.config.layers * self.layer_shard + self.tables * self.table_shard + self.other_shard

    # --- what forward keeps

    @cached_property
    def statistics(self) -> int:
        """Of one norm over tokens at rest: the deviation, of LayerNorm the mean too."""
        return self.m_rest * self.wide * (2 if self.share.config.norm == "layer" else 1)

    @cached_property
    def normed(self) -> int:
        """A norm's output as the product keeps it."""
        gathered = self.share.policy.keep_gathered and self.share.shape.x > 1
        return self.entered if gathered else self.at_rest

    def norm_and_input(self) -> int:
        return self.at_rest + self.statistics + self.normed

    @cached_property
    def selected(self) -> tuple[int, bool]:
        """Features of the keys that this rank's queries read, and whether they are a copy."""
        config, shape = self.share.config, self.share.shape
        if not self.shares_kv:
            return self.kv // self.inner_cut, False
        parts = shape.x * self.inner_cut
        block = self.coords["x"] * self.inner_cut + (self.coords["y"] if self.sharded else 0)
        held = config.heads // parts
        group = config.heads // config.kv_heads
        wanted = Counter(query // group for query in range(block * held, (block + 1) * held))
        if len(set(wanted.values())) == 1:
            return len(wanted) * config.head_dim, False
        return held * config.head_dim, True

    @cached_property
    def shares_kv(self) -> bool:
        return self.share.config.kv_heads % (self.share.shape.x * self.inner_cut) != 0

    @cached_property
    def read(self) -> int:
        """The tensors that q, k and v are parts of, as the products and operators before attention leave them."""
        config, shape, c = self.share.config, self.share.shape, self.compute
        if not self.shares_kv:
            return self.m * (self.q + 2 * self.kv) * c // self.inner_cut
        over_x = config.kv_heads % shape.x != 0
        features, copied = self.selected
        kv = 2 * features if copied else 2 * self.kv * (shape.x if over_x else 1)
        if shape.y > 1:
            return self.queries_cut + self.m * kv * c
        product = self.m * (self.q + 2 * self.kv) * c
        return product + (self.m * kv * c if over_x or copied else 0)

    @cached_property
    def rotated(self) -> int:
        """q, k, v after rotary positions."""
        return self.queries_cut + 2 * self.m * self.selected[0] * self.compute

    @cached_property
    def mixing(self) -> int:
        """What attention keeps between its two products, its output apart."""
        config = self.share.config
        heads = self.m * self.wide * self.q // self.inner_cut // config.head_dim
        kept = heads  # log of the sum of exponentials
        if config.qk_norm:
            kept += heads + self.m * self.wide * self.selected[0] // config.head_dim
        if config.positions == "rope":
            kept += self.rotated
        if config.positions != "rope" or config.qk_norm:
            kept += self.read
        return kept

    def attention_output(self) -> int:
        """As `out` keeps it. Gathered it is another tensor than the one that attention keeps itself."""
        if self.share.policy.keep_gathered and self.inner_cut > 1:
            forgets = self.share.policy.recompute == "attention"
            return self.queries + (0 if forgets else self.queries_cut)
        return self.queries_cut

    def attention(self, *, recompute: bool) -> int:
        """Norm, attention and its products; with `recompute` its inside is forgotten."""
        kept = self.norm_and_input() + self.attention_output() + self.masks
        return kept + (self.read if recompute else self.mixing)

    def mlp_input(self) -> int:
        """Hidden units as `down` keeps them."""
        gathered = self.share.policy.keep_gathered and self.inner_cut > 1
        return self.hidden if gathered else self.hidden_cut

    def mlp(self) -> int:
        inside = self.hidden_cut if self.gates == 1 else 3 * self.hidden_cut  # gate, up, silu(gate)
        return self.norm_and_input() + inside + self.mlp_input() + self.masks

    @cached_property
    def masks(self) -> int:
        """Of dropout after a sublayer."""
        return self.m_rest * self.k if self.share.config.dropout else 0

    def layer_weights(self) -> int:
        """A layer's gathered weights."""
        return (self.qkv + self.out + self.up + self.down) * self.compute

    def layer(self) -> int:
        """What a layer keeps."""
        recompute = self.share.policy.recompute
        if recompute == "block":
            return self.at_rest
        weights = self.layer_weights() if self.keeps_weights else 0
        return self.attention(recompute=recompute == "attention") + self.mlp() + weights

    def before_layers(self) -> int:
        """Ids, rotary tables, the mask of the embedding's dropout."""
        config = self.share.config
        kept = self.m * IDS + self.masks
        if config.positions == "learned":
            return kept + self.m_rest * IDS
        return kept + 2 * self.share.seq * config.head_dim * self.wide

    def after_layers(self) -> int:
        """The last norm, and what head and loss keep; in chunks those are gradients already."""
        table = self.table * self.compute if self.keeps_weights else 0
        if self.share.policy.loss_chunk:
            gradients = self.entered_whole + self.halves * self.padded_table * self.reduce
            return self.at_rest + self.statistics + gradients
        return self.norm_and_input() + table + self.logits_cut + self.m * self.wide

    @property
    def padded_table(self) -> int:
        """Elements of the table with as many rows as there are logits."""
        return self.columns * self.k

    @property
    def entered_whole(self) -> int:
        """A tensor of the place's tokens before a product."""
        return self.m * self.k * self.compute

    def kept(self) -> int:
        """Bytes that forward keeps for backward: activations, logits, weights where the policy says so."""
        return self.before_layers() + self.share.config.layers * self.layer() + self.after_layers()
