"""The reference model: a decoder-only transformer, GPT or Llama by its config.

    tokens -> embedding (+ positions) -> blocks -> norm -> head -> loss or logits

Between sublayers the residual stream is in rest, fully cut. Each sublayer enters, computes in inner, and leaves. The
rows of a place are cut into halves that take turns, so that the messages of one run behind the products of the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fourfold import comm
from fourfold.axes import AXES, BATCH, CONTEXT, CUTS, PIPE
from fourfold.comm import all_gather, equal_along
from fourfold.context.assign import plan_context
from fourfold.context.move import ContextAttention, own_tokens
from fourfold.engine import Turns
from fourfold.errors import nearest
from fourfold.gradients import Units
from fourfold.grid import Grid
from fourfold.layout import GATHERED, Init
from fourfold.models.compiled_block import BlockWeights, CompiledBlock, can_run_whole
from fourfold.models.config import ModelConfig, config, halves_of, unit_of
from fourfold.nn.attention import Attention, Batch, CutRow, cut_documents, document_positions, positions_on_device
from fourfold.nn.embedding import Embedding, Head, Positions, uneven_tokens
from fourfold.nn.layer import Dropout, Layer, assemble, recompute
from fourfold.nn.linear import MLP, Contract, Expand
from fourfold.nn.lora import LORA, LoraConfig, LoraPair
from fourfold.nn.loss import IGNORE_INDEX, count_first, cross_entropy, sum_halves, sum_of_places, sum_over_batch
from fourfold.nn.moe import Leaving, MoE
from fourfold.nn.norm import Norm
from fourfold.nn.rng import key_of
from fourfold.nn.router import LossWeight, Router, Sequences
from fourfold.offload import OffloadedInputs, Offloader
from fourfold.operators import AsyncResult, Ready
from fourfold.pipeline import Half, MicroBatch, run_plain
from fourfold.policy import Halves, Policy, Recompute
from fourfold.schedule.stages import Stages
from fourfold.tiles import document_lengths, indices, to_device, without_padding


class ResidualStream:
    """The residual stream in two parts: a sum, and what the last sublayer adds, which may still be in flight.

    The next norm adds the two as it reads them, in one pass over memory.
    """

    def __init__(self, a: Tensor, delta: AsyncResult | Ready | Leaving | None = None) -> None:
        self.a, self.delta = a, delta

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
        self._streams = streams
        self._offloaded: OffloadedInputs | None = None

    def read(self) -> Streams:
        if self._offloaded is None:
            return self._streams
        return [ResidualStream(a) for a in self._offloaded.take()]

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
        self.attention_norm = _norm(config, grid, policy)
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
        self.mlp_norm = _norm(config, grid, policy)
        self.mlp: MLP | MoE
        self.reads_previous = mixture and config.reads_previous
        """Whether router and experts read the stream before attention."""
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
        if self.policy.recompute != "block":
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
        if stream.delta is not None:
            yield  # the output of the block before may be in flight
        if self.policy.recompute == "block":
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
            yield
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


class Elsewhere(nn.Module):
    """Stands for a layer that a rank at another pipe coordinate holds."""

    def _load_from_state_dict(self, *_: Any) -> None:  # type: ignore[override]
        """Leave the tensors of the layer, which a state dict of the whole model has, to the ranks that hold it."""

    def forward(self, *_: Any) -> None:
        raise RuntimeError("this layer is on another rank along pipe; run the model, not its layers one by one")


class Transformer(Layer):
    """The model of a config on the grid. It takes the rows of this rank's place.

    On a grid with a pipe axis each rank has the layers of its own stages, under their names in the whole model.

    `model(tokens, targets)` returns the mean loss over the unmasked targets of the whole batch, equal on all ranks.
    `model(tokens)` returns the logits of the place's rows, over the whole vocabulary; on a grid with a context size
    those of the tokens that the place holds, from which `whole_rows` makes those of all.
    """

    def __init__(self, config: ModelConfig, grid: Grid, policy: Policy) -> None:
        super().__init__(grid, policy)
        config.check(grid.shape, policy)
        if grid.shape.context > 1 and config.dropout_of_attention > 0:
            raise ValueError(
                f"the grid {grid} cuts sequences over places, where attention cannot drop weights; "
                "build the model with attention_dropout=0.0 (model.attention_dropout of a config)"
            )
        self.config = config
        self._compared = False
        self._usual = torch.Size((1, 1))
        """The shape of the last batch that could be read."""
        self._had_documents = False
        """Whether the last batch was told where its documents begin."""
        self._drops = True
        """Whether the capacity of experts counts."""
        self.stages = _stages(config, grid, policy)
        own = self.stages.of_rank(grid.coords[PIPE])
        first, last = (any(map(has, own)) for has in (self.stages.has_embedding, self.stages.has_head))
        held = {index: self._policy_of(stage) for stage in own for index in self.stages.layers_of(stage)}
        for each in held.values():
            each.require_offload()
        copied = last and config.tied and not first
        table = Embedding(grid, policy, config.vocab, config.hidden, is_copy=copied) if first or copied else None
        self.embedding: Any = table or Elsewhere()
        self.positions: Positions | None
        if config.positions == "learned":
            # also where another rank holds them: the name is then known, and `load_state_dict` passes over it
            held_here = Positions(grid, policy, config.seq, config.hidden) if first else None
            self.register_module("positions", held_here)
        else:
            self.positions = None
        self.dropout = Dropout(grid, policy, config.dropout)
        self.layers = nn.ModuleList(
            TransformerBlock(config, grid, held[index], mixture=config.is_mixture(index))
            if index in held
            else Elsewhere()
            for index in range(config.layers)
        )
        self.norm: Any = _norm(config, grid, policy) if last else Elsewhere()
        tied_to = table if config.tied else None
        self.head: Any = Head(grid, policy, config.hidden, config.vocab, tied_to=tied_to) if last else Elsewhere()
        self.stored = torch.float32
        """The dtype of the parameters; a rank may hold none."""

    def assemble(
        self, *, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | None = None
    ) -> None:
        """Make this rank's shards of the parameters."""
        layers = self.config.layers
        units = Units(layers + 2, partial(unit_of, layers=layers))
        assemble(self, self.grid, self.policy, seed=seed, dtype=dtype, device=device, units=units)
        self.stored = dtype
        for router in self._routers():
            for name, buffer in router.named_buffers():
                setattr(router, name, buffer.to(device or buffer.device))
        if self.table_on_two_ranks is not None:
            self.gradients.on_two_ranks = frozenset({"embedding.weight"})

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Sequence[int] | Tensor | None = None,
        count: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> Tensor:
        """Return the loss, or the logits if there are no targets.

        `positions` [rows, seq] is for rows of packed documents: each token's position in its document, from 0, and
        attention does not read across documents. `documents` says the same as lengths, of the documents in all rows one
        after another, which the host then need not read from the device; positions follow from them if they are left
        out. A document given by its length may go on in the next row. Lengths in a tensor on a GPU are not read by the
        host, so that a recorded step can replay with others: zeros fill it up (`pad_lengths`), and no document goes on
        in the next row. `count` is for accumulation: the number of
        targets of the whole batch.
        """
        batch = self.prepare(tokens, targets, positions=positions, documents=documents, ignore_index=ignore_index)
        if self.grid.size(PIPE) > 1:
            return run_plain(self, batch, count)
        if self.training:
            self.clock.advance()  # the next micro-step draws other dropout masks
        self.gradients.begin_forward("training" if torch.is_grad_enabled() else "evaluation")
        result, faults = self.run_stage(0, batch, None, count)
        self.report(batch, faults)
        return result

    def prepare(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Sequence[int] | Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> MicroBatch:
        """Return the rows of a place as stages take them.

        If something is wrong with them on the CPU, other ids take their place: other ranks wait in the collectives, and
        all ranks raise at the end (`report`).
        """
        most = None
        if isinstance(documents, Tensor) and documents.is_cuda:
            if positions is None and _is_batch(tokens):
                positions = positions_on_device(documents, tokens.shape)
            documents, most = None, len(documents)
        documents = _whole_lengths(documents)
        fault = self._fault(tokens, targets, positions, documents, ignore_index)
        if fault and not self._reads(tokens):
            raise ValueError(fault)
        if fault:
            # as many ids as other places have, since LookupInPlace and halves rely on it
            shape = tokens.shape if _is_batch(tokens) else self._usual
            tokens = torch.zeros(shape, dtype=torch.long, device=tokens.device)
            targets = None if targets is None else tokens
            positions = documents = None
        if documents is not None and positions is None:
            positions = to_device(document_positions(documents).view(tokens.shape), tokens.device)
        self._usual, self._had_documents = tokens.shape, positions is not None
        targets = None if targets is None else targets.long()  # torch gathers by int64 only
        halves = self._cut(tokens, targets, positions, documents, most, ignore_index)
        shape = tokens.shape if self.grid.shape.context == 1 else (1, sum(half.tokens.numel() for half in halves))
        return MicroBatch(halves, torch.Size(shape), targets is not None, ignore_index, fault)

    def report(self, batch: MicroBatch, faults: Tensor) -> None:
        """Raise if the rows of this place or of another one were refused."""
        if self._reads(batch.halves[0].tokens) and faults:
            raise ValueError(batch.fault or "the batch of another place was refused; see the error of its ranks")

    def run_stage(
        self, stage: int, batch: MicroBatch, arrived: Tensor | None, count: Tensor | int | None
    ) -> tuple[Tensor, Tensor]:
        """Run a stage on what the stage before has sent, or on tokens; return its result, and the faults of all places.

        The result is the stream at rest, half by half, or in the last stage the loss, or the logits if there are no
        targets. Only the last stage knows faults of other places.
        """
        streams = None if arrived is None else arrived.split([self._rest_rows(half) for half in batch.halves])
        halves, weight = self._balanced(batch.halves, count)
        if weight is not None:
            batch.router_losses.append(weight)
        aims = [half.targets for half in halves]
        run = partial(self._run, stage, halves, streams)
        fault = torch.full((), float(bool(batch.fault)), device=halves[0].tokens.device)
        if not self.stages.has_head(stage):
            parts = run(self._logits)
            return parts[0] if len(parts) == 1 else torch.cat(parts), fault
        if not batch.has_targets:
            faults = sum_over_batch(fault, self.grid, "faults")
            whole = [self.head.whole(logits) for logits in run(self._logits)]
            return (whole[0] if len(whole) == 1 else torch.cat(whole)).unflatten(0, batch.shape), faults
        ignore_index, known = batch.ignore_index, int(bool(batch.fault))
        if self.policy.loss_chunk:
            self.refuse_hooks(self.head)
            total, faults = count_first(aims, ignore_index, self.grid, count=count, faults=known)
            shares = run(lambda a, half: self.head.loss_share(a, half.targets, ignore_index, total))
            result = sum_of_places(sum_halves(shares), self.grid, "loss")
            result = result.to(torch.promote_types(self.compute, torch.float32))
        else:
            vocabulary = self.head.vocabulary(ignore_index)
            result, faults = cross_entropy(run(self._logits), aims, vocabulary, count=count, faults=known)
        if weight is not None and result.requires_grad:
            weight.follow(result)
        return result, faults

    def _balanced(self, halves: list[Half], count: Tensor | int | None) -> tuple[list[Half], LossWeight | None]:
        """Return the halves with the weight of their routers' losses, and the weight, if these count.

        `count` is the number of targets of the whole batch; without it all tokens of all places count.
        """
        if not self.config.routing.balances or not (self.training and torch.is_grad_enabled()):
            return halves, None
        sequences = [half.batch.sequences for half in halves]
        groups = self.grid.shape.places // self.grid.shape.context
        weight = LossWeight(sum(each.tokens for each in sequences if each) * groups if count is None else count)
        weighed = [None if each is None else replace(each, weight=weight) for each in sequences]
        pairs = zip(halves, weighed, strict=True)
        return [replace(half, batch=replace(half.batch, sequences=each)) for half, each in pairs], weight

    def _sequences(self, batch: Batch, documents: int | None, device: torch.device) -> Sequences | None:
        """Return which tokens of a half make a sequence, if routers ask; `documents` is how many there are at most."""
        if not (self.config.routing.balances or self.config.routing.counts_by_sequence):
            return None
        if batch.positions is None or batch.cut is not None:
            found = Sequences.of_rows(batch.rows, batch.seq, device)
        else:
            found = Sequences.of_documents(batch.positions, documents)
        return found if self._drops else replace(found, limited=False)

    def _sequences_of_member(self, here: ContextAttention, tokens: int, device: torch.device) -> Sequences | None:
        """Return the same for a member of a context group, whose line has this many tokens and maybe others behind."""
        fills_up = self.config.experts > 0 and sum(here.assignment.lengths) != tokens
        if not (self.config.routing.balances or self.config.routing.counts_by_sequence or fills_up):
            return None
        found = Sequences.of_member(here.assignment, here.member, tokens, device)
        return found if self._drops else replace(found, limited=False)

    @contextmanager
    def dropless(self) -> Iterator[None]:
        """Let experts take all pairs inside the block, whatever `capacity` says."""
        before, self._drops = self._drops, False
        try:
            yield
        finally:
            self._drops = before

    def _routers(self) -> list[Router]:
        """Return the routers of this rank's blocks."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def expert_load(self) -> Tensor:
        """Return how many tokens each expert of each block has taken since the last call, [layers, experts].

        All ranks call it and get the sum over all places. Passes that backward computes again do not count.
        """
        return self._counted("load", self.config.experts)

    def dropped_pairs(self) -> Tensor:
        """Return how many pairs of a token and its expert each block has dropped since the last call, [layers].

        An expert drops what is beyond its `capacity`. All ranks call it and get the sum over all places.
        """
        return self._counted("dropped", 1)[:, 0]

    def count_companions(self) -> None:
        """Count from now on how many tokens choose both of two experts (`companions`)."""
        experts = self.config.experts
        for router in self._routers():
            if router.companions is None:
                router.companions = torch.zeros(experts, experts, dtype=torch.long, device=self.grid.device)

    def companions(self) -> Tensor:
        """Return how many tokens of each block chose both of two experts since the last call, [layers, E, E], in passes
        of training.

        Call `count_companions` before. All ranks call it and get the sum over all places. Passes that backward computes
        again do not count.
        """
        if any(router.companions is None for router in self._routers()):
            raise RuntimeError("companions are not counted; call model.count_companions() before the steps, once")
        return self._counted("companions", self.config.experts, self.config.experts)

    def _routers_by_layer(self) -> Iterator[tuple[int, Router]]:
        """Yield the routers of this rank's blocks, with the number of the block."""
        for index, block in enumerate(self.layers):
            if isinstance(mixture := getattr(block, "mlp", None), MoE):
                yield index, mixture.router

    def _counted(self, name: str, *sizes: int) -> Tensor:
        """Return counts of all routers, summed over all places, [layers, *sizes], and begin to count anew."""
        counts = torch.zeros(self.config.layers, *sizes, dtype=torch.long, device=self.grid.device)
        for index, router in self._routers_by_layer():
            own = getattr(router, name)
            counts[index] = own
            own.zero_()
        with self.grid.ledger.not_counted():
            for axis in (*BATCH, PIPE):
                counts = comm.all_reduce(counts, self.grid, axis, label=f"{name} of experts").wait()
        return counts

    @torch.no_grad()
    def update_router_biases(self, *, unless: Tensor | None = None) -> None:
        """Move the biases of the routers by `bias_rate`, towards equal use of the experts in this step (E21).

        The optimizers of `ff.optim` call it in their step. With another optimizer a loop calls it once a step, on all
        ranks, whatever the number of its passes; a second call in a step changes nothing. Biases stay as they are if
        `unless`, which must be equal on all ranks, is true, and where the weight of a router is frozen. The counts of
        the step are forgotten in any case.
        """
        if not self.config.bias_rate:
            return
        routers = [router for router in self._routers() if router.bias is not None]
        if not routers:  # of other stages
            return
        counts = torch.stack([router.chosen for router in routers])
        for axis in BATCH:
            counts = comm.all_reduce(counts, self.grid, axis, label="choices of experts").wait()
        signs = (counts.sum(dim=1, keepdim=True) - self.config.experts * counts).sign()
        if unless is not None:
            signs = signs * ~unless.bool()
        for router, own in zip(routers, signs, strict=True):
            if router.bias is not None and router.weight.requires_grad:
                router.bias.add_(own.to(router.bias.dtype), alpha=self.config.bias_rate)
            router.chosen.zero_()

    def whole_rows(
        self,
        logits: Tensor,
        shape: Sequence[int],
        positions: Tensor | None = None,
        documents: Sequence[int] | Tensor | None = None,
    ) -> Tensor:
        """Return the logits of all tokens of a context group, [rows, seq, vocab], from those of this member's tokens.

        `shape`, `positions` and `documents` are those of the tokens that the model was given. No gradients go back from
        here.
        """
        rows, seq = shape
        if self.grid.shape.context == 1:
            return logits
        if self._had_documents and positions is None and documents is None and self.policy.assignment != "rows":
            raise ValueError(
                "the last batch was cut over its context group by its documents, but whole_rows was given none; "
                "give whole_rows the same positions or documents as the model"
            )
        documents = _whole_lengths(documents)
        if documents is not None and (fault := self._document_fault(rows, seq, documents)):
            raise ValueError(fault)
        left, wholes, found = logits.detach().flatten(0, 1), [], []
        done = 0
        for part, lengths in self.cut_rows(rows, seq, documents):
            where = None if positions is None else positions[done : done + part]
            done += part
            found.append((part, self.context_of((part, seq), where, lengths)))
        held_here = sum(here.tokens for _, here in found)
        if held_here != len(left):
            raise ValueError(
                f"whole_rows was given logits of {len(left)} tokens, but of {rows} rows of {seq} tokens this place "
                f"holds {held_here}; give it the shape of the tokens that the model was given"
            )
        for part, here in found:
            own, left = left.split([here.tokens, len(left) - here.tokens])
            held = [tokens for member in range(here.members) for tokens in here.assignment.own(member)]
            order = indices(held, own.device)
            whole = own.new_empty(len(order), own.shape[1])
            whole[order] = all_gather(own, self.grid, CONTEXT, label="logits").wait()
            wholes.append(whole[: part * seq].unflatten(0, (-1, seq)))
        return torch.cat(wholes)

    def _policy_of(self, stage: int) -> Policy:
        """Return the policy of the blocks of a stage."""
        of_stages = cast("Sequence[Recompute]", self.stages.recompute)
        return replace(self.policy, recompute=of_stages[stage]) if of_stages else self.policy

    def empty_stream(self, batch: MicroBatch) -> Tensor:
        """Return memory for the stream of a micro-batch between two stages."""
        rows, width = sum(map(self._rest_rows, batch.halves)), self.config.hidden // self.grid.size("y")
        return torch.empty(rows, width, dtype=self.compute, device=batch.halves[0].tokens.device)

    def empty_logits(self, batch: MicroBatch) -> Tensor:
        """Return memory for the logits of a micro-batch."""
        return torch.empty(*batch.shape, self.config.vocab, dtype=self.compute, device=batch.halves[0].tokens.device)

    def _rest_rows(self, half: Half) -> int:
        """Return how many tokens of a half this rank holds at rest."""
        cuts = self.grid.size("x") if self.policy.activations == "sharded" else 1
        return -(-half.batch.tokens // cuts)

    def halves(self, rows: int, seq: int, *, packed: bool = False) -> Halves:
        """Return into how many halves the rows of a place are cut, and why; `packed` rows have several documents."""
        return halves_of(self.config, self.grid.shape, self.policy, rows, seq, self.compute.itemsize, packed=packed)

    def cut_rows(
        self, rows: int, seq: int, documents: Sequence[int] | None = None
    ) -> list[tuple[int, Sequence[int] | None]]:
        """Return the rows of each half of a batch that is packed or shared by places, with the lengths of its documents
        where they are known."""
        number = self.halves(rows, seq, packed=True).number
        parts = [len(part) for part in torch.arange(rows, device="cpu").chunk(number)]
        return list(zip(parts, _documents_of(documents, [part * seq for part in parts]), strict=True))

    @property
    def compute(self) -> torch.dtype:
        """The dtype of products and messages."""
        stored = next((parameter.dtype for parameter in self.parameters()), self.stored)
        return self.policy.compute_dtype or stored

    @property
    def table_on_two_ranks(self) -> nn.Parameter | None:
        """The table of the embedding if another pipe rank has it too, for the head."""
        first, last = self.stages.placement[0], self.stages.placement[-1]
        shared = self.config.tied and first != last and self.grid.coords[PIPE] in (first, last)
        return self.embedding.weight if shared else None

    def _cut(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        positions: Tensor | None,
        documents: Sequence[int] | None,
        most: int | None,
        ignore_index: int,
    ) -> list[Half]:
        """Return the halves of a batch; `most` is the number of packed documents where their lengths are not known."""
        number = self.halves(*tokens.shape, packed=positions is not None).number
        if number > len(tokens):
            return self._cut_row(tokens, targets)
        rows = tokens.chunk(number)
        aims = (tokens[:, :0] if targets is None else targets).chunk(number)
        places = [None] * number if positions is None else positions.chunk(number)
        lengths = _documents_of(documents, [part.numel() for part in rows])
        halves = zip(rows, aims, places, lengths, strict=True)
        if self.grid.shape.context > 1:
            found = [self._member(*half, ignore_index) for half in halves]
        else:
            # Without packed documents, all halves share one pair of tables.
            longest = tokens.shape[1] if documents is None else max(documents)
            shared = self._rope(longest, None, tokens.device) if positions is None else None
            found = []
            for ids, aim, where, known in halves:
                batch = Batch.of(ids, where, shared or self._rope(longest, where, ids.device), known, most)
                sequences = self._sequences(batch, most if known is None else len(known), ids.device)
                found.append((ids, aim, replace(batch, sequences=sequences)))
        return [Half(*half, found[0][0].numel()) for half in found]

    def _cut_row(self, tokens: Tensor, targets: Tensor | None) -> list[Half]:
        """Return the two halves of a single row."""
        _, seq = tokens.shape
        ids, places = (part.chunk(2, dim=1) for part in (tokens, torch.arange(seq, device=tokens.device)[None]))
        aims = [tokens[:, :0]] * 2 if targets is None else targets.chunk(2, dim=1)
        sizes = [part.shape[1] for part in ids]
        tables, cut = self._rope(seq, None, tokens.device), CutRow(*sizes)
        ropes = [None] * 2 if tables is None else list(zip(*(table.split(sizes) for table in tables), strict=True))
        batches = [
            Batch(1, own, where, rope=rope, cut=cut, half=half)
            for half, (own, where, rope) in enumerate(zip(sizes, places, ropes, strict=True))
        ]
        batches = [replace(batch, sequences=self._sequences(batch, None, tokens.device)) for batch in batches]
        return [Half(*half, sizes[0]) for half in zip(ids, aims, batches, strict=True)]

    def _rope(self, seq: int, positions: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rope":
            return None
        return self.config.rope.tables(seq, positions, dtype=self.compute, device=device)

    def _member(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None,
        documents: Sequence[int] | None,
        ignore_index: int,
    ) -> tuple[Tensor, Tensor, Batch]:
        """Return the tokens of this member of a context group, as one row, and their targets."""
        here = self.context_of(tokens.shape, positions, documents)
        own, where = tables = own_tokens(here.assignment, here.member, tokens.device)
        if self.grid.recording is not None:
            self.grid.recording.kept += [here, tables]
        lacking = sum(here.assignment.lengths) - tokens.numel()
        ids = pad(tokens.flatten(), (0, lacking))[own][None]
        aims = pad(targets.flatten(), (0, lacking), value=ignore_index)[own][None] if targets.numel() else targets
        rope = self._rope(max(here.assignment.lengths), where[None], tokens.device)
        sequences = self._sequences_of_member(here, tokens.numel(), tokens.device)
        if self.grid.recording is not None:
            self.grid.recording.kept.append(sequences)
        return ids, aims, Batch(1, ids.shape[1], where[None], context=here, rope=rope, sequences=sequences)

    def context_of(
        self, shape: Sequence[int], positions: Tensor | None = None, documents: Sequence[int] | None = None
    ) -> ContextAttention:
        """Return who holds which tokens of [rows, seq] in this rank's context group, and how they are read.

        The host waits for the positions, unless it is given the lengths of the documents.
        """
        rows, seq = shape
        if documents is None and positions is not None and not positions.is_meta:
            documents = document_lengths(positions)
        chosen = self.policy.assignment, self.policy.context_way
        assignment, way = plan_context(*chosen, rows, seq, self.grid.shape.context, documents)
        return ContextAttention(assignment, way, self.grid, keep=self.policy.keep_gathered)

    def _run(
        self,
        stage: int,
        halves: Sequence[Half],
        arrived: Sequence[Tensor] | None,
        read: Callable[[Tensor, Half], Turns[Tensor]],
    ) -> list[Tensor]:
        """Run every half through a stage, and return the stream, or in the last stage what `read` makes of it.

        `arrived` is the stream of each half at rest, where the stage does not begin with the tokens.
        """
        self.engine.offloader.begin()
        layers = [self.layers[index] for index in self.stages.layers_of(stage)]
        streams = [None] * len(halves) if arrived is None else arrived
        begins = [self._begin(*each) for each in zip(halves, streams, strict=True)]
        again = self._policy_of(stage).recompute == "block"
        if not again or not all(isinstance(layer, TransformerBlock) for layer in layers):
            parts = zip(begins, halves, strict=True)
            return self.engine.take_turns([self._through(stage, begin, half, read) for begin, half in parts])
        batches = [half.batch for half in halves]
        streams = self.engine.take_turns(begins)
        for index, layer in enumerate(layers):
            # the pipeline itself holds a stream that has arrived, for its gradient
            offload = arrived is None or index > 0
            streams = cast(TransformerBlock, layer).together(streams, batches, offload=offload)
        ends = zip(streams, halves, strict=True)
        return self.engine.take_turns([self._finish(stage, stream, half, read) for stream, half in ends])

    def _begin(self, half: Half, arrived: Tensor | None) -> Turns[ResidualStream]:
        return (yield from self._embed(half)) if arrived is None else ResidualStream(arrived)

    def _through(
        self, stage: int, begin: Turns[ResidualStream], half: Half, read: Callable[[Tensor, Half], Turns[Tensor]]
    ) -> Turns[Tensor]:
        stream = yield from begin
        for layer in [self.layers[index] for index in self.stages.layers_of(stage)]:
            if isinstance(layer, TransformerBlock) and layer.policy.recompute != "block":
                stream = yield from layer.turns(stream, half.batch)
            else:
                stream = call_module(layer, stream, half.batch)
        return (yield from self._finish(stage, stream, half, read))

    def _embed(self, half: Half) -> Turns[ResidualStream]:
        """Embed the tokens: the stream that the first block reads, in rest."""
        embedding, ids = self.embedding, (half.tokens, half.most)
        leaving = Ready(embedding(*ids)) if embedding.hooked else embedding.launch(*ids)
        if leaving.travels:
            yield  # the other half looks up its tokens while this sum over x is in flight
        a = leaving.wait()
        if self.positions is not None:
            a = self.positions(a, half.batch.seq, half.batch.positions)
        return ResidualStream(self.dropout(a))

    def _finish(
        self, stage: int, stream: ResidualStream, half: Half, read: Callable[[Tensor, Half], Turns[Tensor]]
    ) -> Turns[Tensor]:
        yield  # the output of the last block may be in flight
        if not self.stages.has_head(stage):
            stream.add_now()
            return stream.a
        self.refuse_hooks(self.norm)
        _, a = self.norm.add(*stream.read())
        return (yield from read(a, half))

    def _logits(self, a: Tensor, half: Half) -> Turns[Tensor]:
        if self.head.hooked:
            return self.head(a, half.batch.tokens)
        return (yield from self.head.turns(a, half.batch.tokens))

    def _reads(self, tokens: Tensor) -> bool:
        """Return whether ids are checked: always on the CPU; on a GPU only on request, since the host must wait."""
        return not tokens.is_meta and (tokens.device.type == "cpu" or self.policy.check_inputs)

    def _fault(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        positions: Tensor | None,
        documents: Sequence[int] | None,
        ignore_index: int,
    ) -> str:
        """Return what is wrong with the batch of this place; empty if nothing is."""
        fault = self._shape_fault(tokens, targets, positions, documents)
        if not fault and self._reads(tokens):
            fault = self._id_fault("token", tokens)
            if targets is not None and not fault:
                fault = self._id_fault("target", targets.masked_fill(targets == ignore_index, 0))
            if positions is not None and not fault:
                fault = _position_fault(positions, documents)
        if not tokens.is_meta and (self.policy.check_inputs or not self._compared):
            alike = (*(axis for axis in AXES if axis not in BATCH), CONTEXT)
            told = None if documents is None or fault else torch.tensor(documents, device="cpu")
            if not equal_along(_digest(tokens, targets, positions, told), self.grid, alike):
                fault = fault or (
                    f"ranks of one place were given different rows; ranks that have the same coordinates on "
                    f"{' and '.join(BATCH)}, or are in one context group, must read the same rows (ff.local_rows gives "
                    "each rank its rows)"
                )
            if self.policy.even_tokens:
                even = equal_along(tokens.numel() if _is_batch(tokens) else 0, self.grid, (GATHERED,))
                if not equal_along(int(even), self.grid, CUTS) or not even:  # all ranks raise, or none
                    raise ValueError(fault or uneven_tokens(tokens.numel()))
            packed = positions is not None or documents is not None
            halves = self.halves(*tokens.shape, packed=packed).number if tokens.dim() == 2 else 1
            if not equal_along(halves, self.grid, BATCH):
                fault = fault or (
                    f"the {len(tokens)} rows of this place are cut into {halves} halves, but the rows of another place "
                    "are not; give all places the same number of rows, or build with "
                    "Policy(overlap=ff.Overlap(halves=1))"
                )
            self._compared = True  # a loop that gives ranks the wrong rows does so in the first step
        return fault

    def _shape_fault(
        self, tokens: Tensor, targets: Tensor | None, positions: Tensor | None, documents: Sequence[int] | None
    ) -> str:
        if not _is_batch(tokens):
            return f"tokens has shape {tuple(tokens.shape)}; it must be [rows, seq] with at least one of each"
        for what, ids in (("tokens", tokens), ("targets", targets), ("positions", positions)):
            if ids is not None and ids.shape != tokens.shape:
                return f"{what} {tuple(ids.shape)} and tokens {tuple(tokens.shape)} differ in shape"
            if ids is not None and ids.dtype not in (torch.int64, torch.int32):
                return f"{what} has dtype {ids.dtype}; ids must be torch.int64 or torch.int32"
        longest = tokens.shape[1]
        if documents is not None:
            if fault := self._document_fault(len(tokens), tokens.shape[1], documents):
                return fault
            longest = max(documents)
        if self.positions is not None and longest > self.config.seq:
            packed = documents is None and positions is not None  # positions on a GPU are not read here
            also = ", or if its documents are shorter give their lengths too (documents=)" if packed else ""
            return (
                f"a sequence of {longest} tokens is longer than the {self.config.seq} learned positions; "
                f"shorten it or build the model with a larger seq{also}"
            )
        if torch.is_autocast_enabled(self.grid.device.type):
            return "torch.autocast is on; turn it off and build the model with Policy(compute_dtype=torch.bfloat16)"
        return ""

    def _document_fault(self, rows: int, seq: int, documents: Sequence[int]) -> str:
        """Return what is wrong with the lengths of documents, which the host checks without the device."""
        rule = "documents are the lengths of the documents in all rows, one after another"
        if not isinstance(documents, tuple) or not all(isinstance(length, int) for length in documents):
            return f"{rule}: whole numbers, not {documents!r:.80}"
        wrong = [length for length in documents if length < 1]
        if wrong or sum(documents) != rows * seq:
            found = f"a length of {wrong[0]}" if wrong else f"{sum(documents)} tokens in {len(documents)} documents"
            return f"{rule}: got {found} for {rows} rows of {seq} tokens, which are {rows * seq}"
        ends = set(accumulate(documents))
        border = next((row for row in range(1, rows) if row * seq not in ends), None)
        if border is None:
            return ""
        across = f"a document goes on from row {border - 1} to row {border} of {seq} tokens"
        number = self.halves(rows, seq, packed=True).number
        borders = accumulate(len(part) for part in torch.arange(rows, device="cpu").chunk(number))
        if any(row * seq not in ends for row in borders):
            return (
                f"{across}, but the {rows} rows are cut into {number} halves there; give tokens as one row, "
                f"[1, {rows * seq}], or build with Policy(overlap=ff.Overlap(halves=1))"
            )
        return ""

    def _id_fault(self, what: str, ids: Tensor) -> str:
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.config.vocab:
            return f"{what} ids from {low} to {high}: all must be at least 0 and below vocab={self.config.vocab}"
        return ""


def _is_batch(tokens: Tensor) -> bool:
    """Return whether the tokens have the shape [rows, seq], with at least one of each."""
    return tokens.dim() == 2 and tokens.numel() > 0


def _count_up(positions: Tensor) -> bool:
    """Return whether positions start at 0 in every row and then count up or start again at 0."""
    steps = positions.diff(dim=1, prepend=positions.new_full((len(positions), 1), -1))
    return bool(((steps == 1) | (positions == 0)).all() and (positions[:, 0] == 0).all())


def _position_fault(positions: Tensor, documents: Sequence[int] | None) -> str:
    """Return what is wrong with positions; with documents, which may go on in the next row, both must say the same."""
    if documents is None:
        rule = "positions must start at 0 in every row, then count up by 1 or start again at 0"
        return "" if _count_up(positions) else rule
    wrong = (positions.flatten().cpu() != document_positions(documents)).nonzero()
    if not len(wrong):
        return ""
    row, token = divmod(int(wrong[0]), positions.shape[1])
    return (
        f"positions and documents differ: token {token} of row {row} has position {int(positions[row, token])}; leave "
        "positions out, or make them count up from 0 in every document"
    )


def _whole_lengths(documents: Any) -> tuple[int, ...] | None:
    """Return the lengths of documents as whole numbers. What cannot be that is returned as it was given, for
    `_document_fault` to name: a rank that raised here would leave the others waiting."""
    if isinstance(documents, Tensor):
        documents = without_padding(documents.tolist()) if documents.dim() == 1 else documents.tolist()
    if documents is not None:
        with suppress(TypeError):
            documents = tuple(map(operator.index, documents))
    return documents


def _documents_of(documents: Sequence[int] | None, tokens: Sequence[int]) -> Sequence[Sequence[int] | None]:
    """Return the lengths of the documents of each of several parts, or None for each if they are not known."""
    return [None] * len(tokens) if documents is None else cut_documents([*map(operator.index, documents)], tokens)


def _digest(*ids: Tensor | None) -> int:
    """Return a hash of a batch, which depends on the order of its ids."""
    parts = [part for part in ids if part is not None]
    weighted = [part.flatten().long() * torch.arange(1, part.numel() + 1, device=part.device) for part in parts]
    return key_of(*((tuple(part.shape), int(sums.sum())) for part, sums in zip(parts, weighted, strict=True)))


def _stages(config: ModelConfig, grid: Grid, policy: Policy) -> Stages:
    """Return the stages of a model on this grid."""
    pipe = grid.size(PIPE)
    stages = policy.stages or Stages.even(config.layers, pipe)
    if stages.pipe != pipe or stages.layers != config.layers:
        raise ValueError(
            f"stages of {stages.layers} layers on {stages.pipe} pipe ranks, but the model has {config.layers} layers "
            f"and the grid pipe={pipe}; leave Policy.stages out, or give Stages of that many"
        )
    for rank in range(pipe):
        if not any(map(len, map(stages.units, stages.of_rank(rank)))):
            raise ValueError(
                f"pipe={pipe} leaves pipe rank {rank} without a layer of the {config.layers}; use fewer pipe ranks, or "
                "other Stages"
            )
    return stages


def _norm(config: ModelConfig, grid: Grid, policy: Policy) -> Norm:
    bias = config.bias and config.norm == "layer"
    return Norm(grid, policy, config.hidden, kind=config.norm, bias=bias, eps=config.norm_eps)


def build(
    model: str | ModelConfig,
    grid: Grid,
    *,
    policy: Policy = Policy(),
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    lora: LoraConfig | None = None,
) -> Transformer:
    """Build a reference model on the grid, by name or config, with this rank's shards of the initial weights.

    The same seed gives the same weights on every grid. With `lora` the linear layers of the blocks get pairs, and only
    those are trained.
    """
    grid.agree("the model", f"{model!r} {policy} seed={seed} dtype={dtype} lora={lora}")
    built = Transformer(config(model) if isinstance(model, str) else model, grid, policy)
    if lora is not None:
        _add_pairs(built, lora)
    built.assemble(seed=seed, dtype=dtype, device=None if device is None else torch.device(device))
    if lora is not None:
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(is_lora(name))
    return built


def is_lora(name: str) -> bool:
    """Return whether a parameter of this name is one of a LoRA pair."""
    return f".{LORA}." in name


def _add_pairs(model: Transformer, lora: LoraConfig) -> None:
    """Put a pair beside every linear layer that the config names."""
    found = {name: layer for name, layer in model.layers.named_modules() if isinstance(layer, (Expand, Contract))}
    known = list(dict.fromkeys(name.rpartition(".")[2] for name in found))
    for target in lora.targets if found else ():  # a rank along pipe may have no block
        if target not in known:
            raise ValueError(f"there is no layer {target!r}{nearest(target, known)}; a block has {', '.join(known)}")
    for name, layer in found.items():
        own = name.rpartition(".")[2]
        if lora.targets and own not in lora.targets:
            continue
        block = cast(TransformerBlock, model.layers[int(name.partition(".")[0])])
        if own in ("k", "v") and block.attention.held.shared:
            raise ValueError(
                f"the grid {model.grid} cuts through the {model.config.kv_heads} key and value heads, which LoRA at k "
                "and v does not support; leave them out of the targets, or use a grid whose x times y divides the heads"
            )
        if own in ("gate", "up", "down") and model.policy.mlp_chunk:
            raise ValueError(
                f"mlp_chunk={model.policy.mlp_chunk}: an MLP in chunks has no LoRA pairs; use mlp_chunk=0, or leave "
                f"{own} out of the targets"
            )
        sizes = layer.in_features, layer.out_features
        pair = LoraPair(model.grid, model.policy, *sizes, lora, contracts=isinstance(layer, Contract))
        layer.add_module(LORA, pair)
