"""The reference model: a decoder-only transformer, GPT or Llama by its config.

    tokens -> embedding (+ positions) -> blocks -> norm -> head -> loss or logits

The rows of a place are checked (`row_checks`) and cut into halves (`row_cutter`) that take turns, so that the messages
of one run behind the products of the other. In a pipeline a rank has some of the layers, and runs them stage by stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.axes import BATCH, CONTEXT, PIPE
from fourfold.comm import all_gather
from fourfold.context.move import ContextAttention
from fourfold.engine import Turns
from fourfold.gradients import Units
from fourfold.grid import Grid
from fourfold.models.block import ResidualStream, TransformerBlock, add_pairs, call_module, norm_of
from fourfold.models.config import ModelConfig, config, unit_of
from fourfold.models.row_checks import RowChecks, document_fault, is_batch, reads_ids, whole_lengths
from fourfold.models.row_cutter import RowCutter
from fourfold.nn.attention import document_positions, positions_on_device
from fourfold.nn.embedding import Embedding, Head, Positions
from fourfold.nn.layer import Dropout, Layer, assemble
from fourfold.nn.lora import LoraConfig, is_lora
from fourfold.nn.loss import IGNORE_INDEX, count_first, cross_entropy, sum_halves, sum_of_places, sum_over_batch
from fourfold.nn.moe import MoE
from fourfold.nn.router import LossWeight, Router
from fourfold.operators import Ready
from fourfold.pipeline import Half, MicroBatch, run_plain
from fourfold.policy import Halves, Policy
from fourfold.schedule.action import Schedule
from fourfold.schedule.stages import Stages
from fourfold.tiles import indices, to_device

HALVES = "the number of halves of a batch"
"""What ranks call it where they disagree."""


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
        self.places_alike = False
        """Whether the caller promises that all places always have equally many rows of one length, as `fourfold train`
        does. Batches on a fold may then be cut into halves without an `overlap.halves`: rows of each half go to experts
        of other places, so all places must have equally many halves."""
        self._usual = torch.Size((1, 1))
        """The shape of the last batch that could be read."""
        self._had_documents = False
        """Whether the last batch was told where its documents begin."""
        self._drops = True
        """Whether the capacity of experts counts."""
        self.stages = _stages(config, grid, policy)
        own = self.stages.of_rank(grid.coords[PIPE])
        first, last = (any(map(has, own)) for has in (self.stages.has_embedding, self.stages.has_head))
        held = {index: policy.of_stage(stage) for stage in own for index in self.stages.layers_of(stage)}
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
        self.norm: Any = norm_of(config, grid, policy) if last else Elsewhere()
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
        self.gradients.meet()
        if self.training:
            self.clock.advance()  # the next micro-step draws other dropout masks
        self.gradients.begin_forward("training" if torch.is_grad_enabled() else "evaluation", of_batch=True)
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
            if positions is None and is_batch(tokens):
                positions = positions_on_device(documents, tokens.shape)
            documents, most = None, len(documents)
        documents = whole_lengths(documents)
        cutter = self._cutter()
        compare = not tokens.is_meta and (self.policy.check_inputs or not self._compared)
        checks = RowChecks(cutter, learned=self.positions is not None)
        fault = checks.fault(tokens, targets, positions, documents, ignore_index, compare=compare)
        if compare:  # once: a loop that gives ranks the wrong rows does so in the first step
            self._compared = True
        if fault and not reads_ids(tokens, self.policy):
            raise ValueError(fault)
        if fault:
            # as many ids as other places have, since LookupInPlace and halves rely on it
            shape = tokens.shape if is_batch(tokens) else self._usual
            tokens = torch.zeros(shape, dtype=torch.long, device=tokens.device)
            targets = None if targets is None else tokens
            if positions is not None or documents is not None:  # packed rows are cut in another way
                positions = torch.arange(shape[1], device=tokens.device).expand(shape)
            documents = None
        if documents is not None and positions is None:
            positions = to_device(document_positions(documents).view(tokens.shape), tokens.device)
        self._usual, self._had_documents = tokens.shape, positions is not None
        targets = None if targets is None else targets.long()  # torch gathers by int64 only
        halves = cutter.cut(tokens, targets, positions, documents, most, ignore_index)
        if compare:  # the checks have
            self.grid.agreed[HALVES] = str(len(halves))
        elif not tokens.is_meta:  # a place with another number would send other messages
            self.grid.agree_on_change(HALVES, str(len(halves)))
        shape = tokens.shape if self.grid.shape.context == 1 else (1, sum(half.tokens.numel() for half in halves))
        return MicroBatch(halves, torch.Size(shape), targets is not None, ignore_index, fault)

    def report(self, batch: MicroBatch, faults: Tensor) -> None:
        """Raise if the rows of this place or of another one were refused."""
        if reads_ids(batch.halves[0].tokens, self.policy) and faults:
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
        cutter, documents = self._cutter(), whole_lengths(documents)
        if documents is not None and (fault := document_fault(cutter, rows, seq, documents)):
            raise ValueError(fault)
        left, wholes, found = logits.detach().flatten(0, 1), [], []
        done = 0
        for part, lengths in cutter.cut_rows(rows, seq, documents):
            where = None if positions is None else positions[done : done + part]
            done += part
            found.append((part, cutter.context_of((part, seq), where, lengths)))
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
        return self._cutter().halves(rows, seq, packed=packed)

    def cut_rows(
        self, rows: int, seq: int, documents: Sequence[int] | None = None
    ) -> list[tuple[int, Sequence[int] | None]]:
        """Return the rows of each half of a batch that is packed or shared by places, with the lengths of its documents
        where they are known."""
        return self._cutter().cut_rows(rows, seq, documents)

    def context_of(
        self, shape: Sequence[int], positions: Tensor | None = None, documents: Sequence[int] | None = None
    ) -> ContextAttention:
        """Return who holds which tokens of [rows, seq] in this rank's context group, and how they are read."""
        return self._cutter().context_of(shape, positions, documents)

    @property
    def compute(self) -> torch.dtype:
        """The dtype of products and messages."""
        asked = self.policy.compute_dtype
        return asked or next((parameter.dtype for parameter in self.parameters()), self.stored)

    @property
    def table_on_two_ranks(self) -> nn.Parameter | None:
        """The table of the embedding if another pipe rank has it too, for the head."""
        first, last = self.stages.placement[0], self.stages.placement[-1]
        shared = self.config.tied and first != last and self.grid.coords[PIPE] in (first, last)
        return self.embedding.weight if shared else None

    def _cutter(self) -> RowCutter:
        return RowCutter(self.config, self.grid, self.policy, self.compute, self._drops, self.places_alike)

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
        again = self.policy.of_stage(stage).runs_blocks_again
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
            if isinstance(layer, TransformerBlock) and not layer.runs_again:
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


def _stages(config: ModelConfig, grid: Grid, policy: Policy) -> Stages:
    """Return the stages of a model on this grid; a schedule that was given says which rank holds which."""
    pipe, schedule = grid.size(PIPE), policy.schedule
    stages = policy.stages or Stages.even(config.layers, pipe)
    if policy.stages is None and isinstance(schedule, Schedule):
        stages = Stages(Stages.even(config.layers, len(schedule.placement)).cuts, schedule.placement)
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
        add_pairs(built.layers, built.config, lora)
    built.assemble(seed=seed, dtype=dtype, device=None if device is None else torch.device(device))
    if lora is not None:
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(is_lora(name))
    return built
