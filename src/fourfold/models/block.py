"""The block of the reference model: attention and an MLP, or a mixture of experts, around the residual stream.

Between sublayers the stream is in rest, fully cut. Each sublayer enters, computes in inner, and leaves. The halves of a
batch take turns inside a block, so that the messages of one run behind the products of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fourfold.engine import Turns
from fourfold.errors import nearest
from fourfold.grid import Grid
from fourfold.layout import GATHERED, Init
from fourfold.models.compiled_block import BlockWeights, CompiledBlock, can_run_whole
from fourfold.models.config import ModelConfig
from fourfold.nn.attention import Attention, Batch
from fourfold.nn.layer import Dropout, Layer, recompute
from fourfold.nn.linear import MLP, Contract, Expand
from fourfold.nn.lora import LORA, LoraConfig, LoraPair
from fourfold.nn.moe import Leaving, MoE
from fourfold.nn.norm import Norm
from fourfold.offload import OffloadedInputs, Offloader
from fourfold.operators import AsyncResult, Ready
from fourfold.policy import Policy


class ResidualStream:
    """The residual stream in two parts: a sum, and what the last sublayer adds, which may still be in flight.

    The next norm adds the two as it reads them, in one pass over memory.
    """

    def __init__(self, a: Tensor, delta: AsyncResult | Ready | Leaving | None = None) -> None:
        self.a, self.delta = a, delta
        self.begins = [] if delta is None else [delta.waits]
        """What the block that reads the stream yields first. It does so again when it runs again, though nothing is in
        flight then: torch finds what a block keeps by its order, so halves must take the same turns."""

    def read(self) -> tuple[Tensor, Tensor | None]:
        """Return both parts; wait for the second one."""
        return self.a, None if self.delta is None else self.delta.wait()

    def add_now(self) -> None:
        """Add the two parts. When a block is recomputed there is only one: the block has kept the sum."""
        if self.delta is not None:
            self.a, self.delta = self.a + self.delta.wait(), None


Streams = list[ResidualStream]


class BlockInputs:
    """What a block that runs again keeps: the stream of each half, on the device or on the host."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self._begins = streams, [stream.begins for stream in streams]
        self._offloaded: OffloadedInputs | None = None

    def read(self) -> Streams:
        if self._offloaded is None:
            return self._streams
        streams = [ResidualStream(a) for a in self._offloaded.take()]
        for stream, begins in zip(streams, self._begins, strict=True):
            stream.begins = begins
        return streams

    def offload(self, offloader: Offloader) -> None:
        """Let the streams wait on the host, when the first run has added their parts."""
        self._offloaded = offloader.send([stream.a for stream in self._streams])
        self._streams = []


class TransformerBlock(Layer):
    """Computes b = a + attention(attention_norm(a)), then b + mlp(mlp_norm(b)), both in rest.

    In a block of a mixture, mlp is the sum of the experts of a token and the MLP beside them. With
    `moe_reads="previous"` router and experts read the stream a before attention, as in ScMoE (arXiv 2404.05019), and
    the MLP beside them the stream b behind it:

        b + shared(mlp_norm(b)) + experts(mlp_norm(a))

    What brings tokens to the experts can then be in flight during attention.
    """

    def __init__(self, config: ModelConfig, grid: Grid, policy: Policy, *, mixture: bool = False) -> None:
        """`mixture`: whether the block has a mixture of experts in place of an MLP."""
        super().__init__(grid, policy)
        # As in GPT-2: scaled by depth, so that the variance of the residual stream does not grow with it.
        out_init = Init(std=0.02 / (2 * config.layers) ** 0.5)
        both: Any = dict(bias=config.bias, init=Init(std=0.02), out_init=out_init)
        self.attention_norm = norm_of(config, grid, policy)
        self.attention = Attention(
            grid,
            policy,
            config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            dropout=config.dropout_of_attention,
            head_norm_eps=config.norm_eps if config.qk_norm else None,
            **both,
        )
        self.attention_dropout = Dropout(grid, policy, config.dropout)
        self.mlp_norm = norm_of(config, grid, policy)
        self.mlp: MLP | MoE
        self.reads_previous = mixture and config.reads_previous
        """Whether router and experts read the stream before attention."""
        self.runs_again = policy.runs_blocks_again
        """Whether backward runs all of the block again."""
        if mixture:
            if policy.mlp_chunk:
                raise ValueError(f"mlp_chunk={policy.mlp_chunk}: experts run on all tokens of a place; use mlp_chunk=0")
            sizes = config.hidden, config.expert_hidden, config.routing
            inits = dict(init=both["init"], out_init=out_init)
            self.mlp = MoE(grid, policy, *sizes, shared_hidden=config.shared_hidden, **inits)
        else:
            self.mlp = MLP(grid, policy, config.hidden, config.mlp_hidden, kind=config.mlp, **both)
        self.mlp_dropout = Dropout(grid, policy, config.dropout)
        alone = all(grid.size(axis) == 1 for axis in ("x", "y", GATHERED))
        plain_norm = config.norm == "rms" or config.bias  # a LayerNorm without bias runs by itself
        in_one = policy.compile and policy.recompute == "none" and not policy.mlp_chunk
        self._may_run_whole = in_one and alone and plain_norm
        """Whether the block may run as one compiled function where it draws nothing: nothing travels inside it."""
        self._whole: CompiledBlock | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_whole": None}

    def forward(self, a: Tensor, delta: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor | None]:
        (stream,) = self._together([ResidualStream(a, None if delta is None else Ready(delta))], [batch])
        return stream.read()

    def together(self, streams: Streams, batches: Sequence[Batch], *, offload: bool = True) -> Streams:
        """Run all halves of a batch through the block; with recompute, they are recomputed together.

        With `offload` and the policy's, their inputs wait for backward on the host.
        """
        if self.hooked:
            return self.engine.take_turns([self.turns(*half) for half in zip(streams, batches, strict=True)])
        return self._together(streams, batches, offload=offload)

    def _together(self, streams: Streams, batches: Sequence[Batch], *, offload: bool = True) -> Streams:
        def take_turns(inputs: BlockInputs) -> Streams:
            parts = zip(inputs.read(), batches, strict=True)
            return self.engine.take_turns([self._compute(*half) for half in parts])

        inputs = BlockInputs(streams)
        if not self.runs_again:
            return take_turns(inputs)
        outputs = recompute(take_turns, self.clock, inputs)
        if offload and self.policy.offload and torch.is_grad_enabled():
            inputs.offload(self.engine.offloader)
        return outputs

    def turns(self, stream: ResidualStream, batch: Batch) -> Turns[ResidualStream]:
        """Run one half through the block, with a `yield` wherever the other half can continue."""
        if self.hooked:
            return call_module(self, stream, batch)
        return (yield from self._compute(stream, batch))

    def _compute(self, stream: ResidualStream, batch: Batch) -> Turns[ResidualStream]:
        self.refuse_hooks(self.attention_norm, self.mlp_norm)
        in_one = self._may_run_whole and not stream.a.is_meta and batch.by_rows
        if in_one and (weights := self._weights_of_whole()) is not None:
            a, delta = weights.block(*stream.read(), batch)
            return ResidualStream(a, Ready(delta))
        yield from stream.begins  # the output of the block before may be in flight
        if self.runs_again:
            stream.add_now()  # recompute then keeps one tensor instead of two
        a, normed = self.attention_norm.add(*stream.read())
        before, routed = (yield from self._route_before(a, batch)) if self.reads_previous else (None, None)
        if self.attention.hooked:
            leaving = Ready(self.attention(normed, batch))
        else:
            leaving = self.attention.out.leave((yield from self.attention.turns(normed, batch)), batch.tokens)
        yield  # even if nothing is in flight: the messages of the other half need a product to hide behind
        delta = leaving.wait()
        a, normed = self.mlp_norm.add(a, self.attention_dropout(delta) if self.attention_dropout.acts else delta)
        if self.mlp.hooked:
            more = (batch.sequences, before) if isinstance(self.mlp, MoE) else ()
            leaving = Ready(self.mlp(normed, batch.tokens, *more))
        else:
            # backward reads no value of what the MLP computes; a hook on the dropout behind it would
            engine = self.engine
            wanted = not engine.recomputing or self.mlp_dropout.hooked
            mlp: Any = self.mlp
            if isinstance(mlp, MoE):
                if routed is None:
                    routed = yield from mlp.route(normed, batch.tokens, batch.sequences)
                owed, leave = (yield from mlp.turns(normed, batch.tokens, routed)), mlp.leave
            else:
                owed, leave = (yield from mlp.turns(normed, batch.tokens, wanted=wanted)), mlp.down.leave
            if engine.recomputing and not self.mlp_dropout.acts:
                return ResidualStream(a)  # backward needs no value of what follows, so it is not recomputed
            leaving = leave(owed, batch.tokens)
        if self.mlp_dropout.acts:
            yield leaving.waits
            leaving = Ready(self.mlp_dropout(leaving.wait()))
        return ResidualStream(a, leaving)

    def _route_before(self, a: Tensor, batch: Batch) -> Turns[tuple[Tensor, Any]]:
        """Return what router and experts read of the stream before attention, and where its tokens go."""
        before = self.mlp_norm(a)
        if not isinstance(self.mlp, MoE) or self.mlp.hooked:
            return before, None
        return before, (yield from self.mlp.route(before, batch.tokens, batch.sequences))

    def _weights_of_whole(self) -> BlockWeights | None:
        """Return the weights for the compiled block, or None if its parts have to run one by one."""
        if isinstance(self.mlp, MoE) or self.attention_dropout.acts or self.mlp_dropout.acts or self.attention.drops:
            return None
        parts = self.attention_norm, self.attention, self.mlp_norm, self.mlp
        if not can_run_whole(*parts):
            return None
        if self._whole is None or self._whole.parts != parts:
            self._whole = CompiledBlock(*parts)
        weights = self._whole.weights()
        return weights if weights.trained or not torch.is_grad_enabled() else None


def call_module(layer: nn.Module, stream: ResidualStream, batch: Batch) -> ResidualStream:
    """Run a block through its `__call__`: it was hooked or wrapped, so its inside cannot take turns."""
    a, delta = layer(*stream.read(), batch)
    return ResidualStream(a, None if delta is None else Ready(delta))


def norm_of(config: ModelConfig, grid: Grid, policy: Policy) -> Norm:
    """Return a norm of the residual stream."""
    bias = config.bias and config.norm == "layer"
    return Norm(grid, policy, config.hidden, kind=config.norm, bias=bias, eps=config.norm_eps)


def add_pairs(layers: nn.ModuleList, config: ModelConfig, lora: LoraConfig) -> None:
    """Put a LoRA pair beside every linear layer of the blocks that `lora` names."""
    found = {name: layer for name, layer in layers.named_modules() if isinstance(layer, (Expand, Contract))}
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in found))
    for target in lora.targets if found else ():  # a rank along pipe may have no block
        if target not in known:
            raise ValueError(f"there is no layer {target!r}{nearest(target, known)}; a block has {', '.join(known)}")
    for name, layer in found.items():
        own = name.rpartition(".")[2]
        if lora.targets and own not in lora.targets:
            continue
        block = cast(TransformerBlock, layers[int(name.partition(".")[0])])
        if own in ("k", "v") and block.attention.held.shared:
            raise ValueError(
                f"the grid {layer.grid} cuts through the {config.kv_heads} key and value heads, which LoRA at k "
                "and v does not support; leave them out of the targets, or use a grid whose x times y divides the heads"
            )
        if own in ("gate", "up", "down") and layer.policy.mlp_chunk:
            raise ValueError(
                f"mlp_chunk={layer.policy.mlp_chunk}: an MLP in chunks has no LoRA pairs; use mlp_chunk=0, or leave "
                f"{own} out of the targets"
            )
        sizes = layer.in_features, layer.out_features
        pair = LoraPair(layer.grid, layer.policy, *sizes, lora, contracts=isinstance(layer, Contract))
        layer.add_module(LORA, pair)
