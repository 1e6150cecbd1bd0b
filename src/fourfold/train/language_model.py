"""The model that a run trains: a reference model, or a module that a function of the user returns.

    model.name = "gpt-125m"                  a reference model, which the planner can price
    model.name = "package.module:function"   `function(**model.options)` returns an nn.Module

A module of the user is put on the grid by `parallelize` and trained as a language model. Its forward takes tokens
[rows, seq] and returns logits [rows, seq, vocab], or it also takes targets and returns the loss. Results of
transformers, with `.logits` or `.loss`, and a pair of logits and loss are understood as well. A target of -100 does not
count, as in torch.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import comm
from fourfold.action_times import ActionTimes
from fourfold.axes import AXES, PIPE
from fourfold.context.assign import plan_context
from fourfold.data.loader import TokenBatch
from fourfold.data.tokenizer import load_tokenizer
from fourfold.gradients import gradients_of
from fourfold.grid import Grid
from fourfold.models.transformer import Transformer, build
from fourfold.nn.layer import specs_of
from fourfold.nn.lora import is_lora
from fourfold.nn.loss import count_targets
from fourfold.nn.rng import StepRng
from fourfold.parse import import_object
from fourfold.pipeline import forward_backward, schedule_of
from fourfold.planner.memory import kept_by_recompute
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import Flops, flops_per_token
from fourfold.policy import Recompute
from fourfold.schedule.action import Schedule
from fourfold.train.config import TrainConfig
from fourfold.train.run_folder import RunEvent
from fourfold.watch.peers import Copies
from fourfold.wrap import parallelize

CONTRACT = (
    "it must take tokens and return logits of shape [rows, seq, vocab], or take tokens and targets and return the loss"
)
"""What the forward of a user's module must do, for errors."""


class LanguageModel(ABC):
    """A model on the grid, with the loss that a run minimises and what the run's folder says about it."""

    module: nn.Module
    grid: Grid
    flops: Flops | None = None
    """FLOPs per token; None if nobody counts them."""
    schedule: Schedule | None = None
    """The order in which pipe ranks work; None on a grid without them."""
    times: ActionTimes | None = None
    """Records when the actions of a pipeline run, in a step in which somebody wants to know it."""
    copies: Copies | None = None
    """The parameter that two pipe ranks hold, if there is one."""

    experts: tuple[int, int] | None = None
    """The numbers of blocks and of experts in a block; None without a mixture of experts."""
    experts_of_a_token: int = 0

    @property
    @abstractmethod
    def parameters(self) -> int:
        """The number of parameters of the whole model."""

    @abstractmethod
    def loss(self, batch: TokenBatch, count: Tensor | None) -> Tensor:
        """Return the loss of a micro-batch, to call backward on.

        It is the micro-batch's share of the mean over `count` targets; if that is None, it is the mean over its own.
        """

    def value(self, loss: Tensor) -> Tensor:
        """Return the value of a loss for records, equal bit for bit on all ranks."""
        return loss.detach()

    def forward_backward(self, batches: Sequence[TokenBatch]) -> Tensor:
        """Run forward and backward of a step's micro-batches; return its loss, equal bit for bit on all ranks."""
        grid = self.grid
        count = None  # each forward counts its own targets, unless several of them share one mean
        if len(batches) > 1:
            count = count_targets(torch.stack([batch.targets for batch in batches]), grid)
        loss = torch.zeros((), dtype=torch.float64, device=grid.device)
        gradients_of(self.module).begin_step(len(batches))
        for batch in batches:
            share = self.loss(batch, count)
            share.backward()
            loss += self.value(share)  # its share of the mean over the whole batch
        return loss

    @property
    def clock(self) -> StepRng:
        """The clock of the model's random numbers."""
        return self.module.clock  # type: ignore[return-value]

    def parts(self, batch: TokenBatch) -> list[RunEvent]:  # noqa: ARG002
        """Return the parts of a micro-batch whose tokens are assigned to places, each by itself, for records.

        It is empty if places have rows of their own, of one document each, and for modules of the user.
        """
        return []

    def imbalance(self, batches: Sequence[TokenBatch]) -> float | None:  # noqa: ARG002
        """Return the attention of the busiest member of this rank's context group divided by the mean, in a step.

        All members wait for the busiest one in every part. None on a grid without context.
        """
        return None

    def expert_load(self) -> Tensor | None:
        """Return how many tokens each expert of each block has had since the last call, [blocks, experts], on the
        device. All ranks call it and get the sum over all places. None without experts."""
        return None

    def companions(self) -> Tensor | None:
        """Return how many tokens of each block chose both of two experts since the last call, [blocks, E, E], on the
        device. All ranks call it and get the sum over all places. None if it is not counted."""
        return None

    def notes(self) -> list[str]:
        """Return lines about the model that people read before the first step."""
        return []

    def facts(self) -> RunEvent:
        """Return what run.json says about the model besides its size."""
        return {}


class ReferenceModel(LanguageModel):
    """A GPT or Llama of `fourfold.models`."""

    def __init__(self, config: TrainConfig, grid: Grid) -> None:
        self._run, self.grid, self._policy = config, grid, config.build_policy()
        if grid.size(PIPE) == 1:  # one process beside the pipeline of the config, to compare with
            self._policy = replace(self._policy, stages=None, schedule="auto")
        self.config = config.model.build()
        if self.config.experts:
            self.experts, self.experts_of_a_token = (self.config.layers, self.config.experts), self.config.top_k
        dtype, seed = config.policy.parameters, config.train.seed
        self._lora = config.lora.build()
        self.module = build(self.config, grid, policy=self._policy, seed=seed, dtype=dtype, lora=self._lora)
        self.module.places_alike = True  # loaders give every place equally many rows of one length
        gradients_of(self.module).all_come = True
        if config.log.companions_every:
            self.module.count_companions()
        if self._lora is None:  # frozen weights have fewer FLOPs, which nobody counts
            self.flops = flops_per_token(self.config, config.batch.seq, self._policy)
        batch = config.batch
        if grid.size(PIPE) > 1:
            self.schedule = schedule_of(self.module, batch.micro_steps)
            ends = self.schedule.placement[0], self.schedule.placement[-1]
            if self.config.tied and ends[0] != ends[1]:
                self.copies = Copies("embedding.weight", ends)
        bag_rows = config.data.bag_rows or 1
        self._sizes = batch.rows // batch.micro_steps // grid.shape.row_places // bag_rows, bag_rows * batch.seq
        """The rows of a place in a micro-batch, and their tokens."""

    @property
    def parameters(self) -> int:
        return self.config.parameters + self._pairs

    @property
    def _pairs(self) -> int:
        """The number of parameters of LoRA pairs."""
        return sum(prod(spec.shape) for name, spec in specs_of(self.module).items() if is_lora(name))

    def loss(self, batch: TokenBatch, count: Tensor | None) -> Tensor:
        known = dict(positions=batch.positions, documents=batch.documents)
        return self.module(batch.tokens, batch.targets, **known, count=count)

    def forward_backward(self, batches: Sequence[TokenBatch]) -> Tensor:
        if self.schedule is None:
            return super().forward_backward(batches)
        model = cast(Transformer, self.module)
        return forward_backward(model, [batch._asdict() for batch in batches], times=self.times).double()

    def parts(self, batch: TokenBatch) -> list[RunEvent]:
        if batch.documents is None and self.grid.shape.context == 1:
            return []
        rows, seq = batch.tokens.shape
        lengths = cast(tuple[int, ...] | None, batch.documents)  # as the loader hands them over
        halves = cast(Transformer, self.module).cut_rows(rows, seq, lengths)
        return [{"rows": rows, "seq": seq, "lengths": lengths and list(lengths)} for rows, lengths in halves]

    def imbalance(self, batches: Sequence[TokenBatch]) -> float | None:
        members, busiest, work = self.grid.shape.context, 0, 0
        if members == 1:
            return None
        for part in (part for batch in batches for part in self.parts(batch)):
            chosen = self._policy.assignment, self._policy.context_way
            # the same arguments as those of the pass, which has found the assignment already
            assignment, _ = plan_context(*chosen, part["rows"], part["seq"], members, part["lengths"])
            busiest, work = busiest + max(assignment.work), work + sum(assignment.work)
        return busiest * members / work

    def expert_load(self) -> Tensor | None:
        return cast(Transformer, self.module).expert_load() if self.config.experts else None

    def companions(self) -> Tensor | None:
        counted = self.config.experts and self._run.log.companions_every
        return cast(Transformer, self.module).companions() if counted else None

    @cached_property
    def _local(self) -> LocalSizes:
        """The sizes of this rank's tensors."""
        rows, seq = self._sizes
        documents = (seq,) * rows if self._run.data.apart else None  # shorter ones would keep as much
        dtype, rank = self._run.policy.parameters, self.grid.rank
        return LocalSizes(self.config, self.grid.shape, self._policy, rows, seq, dtype, rank, documents=documents)

    @cached_property
    def kept_bytes(self) -> dict[Recompute, int]:
        """Bytes that one rank keeps for backward, by kind of recompute."""
        return kept_by_recompute(self._local)

    def facts(self) -> RunEvent:
        if self._lora is not None:
            about: RunEvent = {"trained_parameters": self._pairs}
        else:
            halves = self.module.halves(*self._sizes, packed=self._run.data.apart)  # type: ignore[operator]
            about = {"kept_bytes": self.kept_bytes, "halves": halves._asdict()}
        experts = {"active_parameters": self.config.active_parameters} if self.config.experts else {}
        return {**about, **experts, "recompute": self._policy.recompute, **self._context()}

    def _context(self) -> RunEvent:
        """Return how tokens are assigned to places and what K and V of a token are, if there is a choice."""
        if self.grid.shape.context == 1 and not self._run.data.apart:
            return {}
        policy, sizes = self._policy, self._local
        context = {
            "assignment": policy.assignment,
            "way": policy.context_way,
            "layers": len(sizes.held.layers),
            "query_bytes": sizes.query_cut_nbytes // sizes.m,
            "key_bytes": 2 * sizes.local_kv * sizes.item,
        }
        return {"context": context}

    def notes(self) -> list[str]:
        if self._lora is not None:
            trained = f"{self._pairs} of {self.parameters} parameters are trained"
            return [f"LoRA of rank {self._lora.rank}: {trained}, those of the pairs; the others are frozen"]
        sizes = ", ".join(f"{kind} {nbytes / 1e6:.1f} MB" for kind, nbytes in self.kept_bytes.items())
        kept = f"kept for backward on each rank, by kind of recompute: {sizes}; this run uses {self._policy.recompute}"
        return [kept]


class OwnModel(LanguageModel):
    """A module of the user on the grid."""

    def __init__(self, config: TrainConfig, grid: Grid) -> None:
        self.grid = grid
        plain = make_module(config)
        self._parameters = sum(parameter.numel() for parameter in plain.parameters())
        self.module = put_on_grid(plain, config, grid)

    @property
    def parameters(self) -> int:
        return self._parameters

    def loss(self, batch: TokenBatch, count: Tensor | None) -> Tensor:
        loss = self.module(batch.tokens, batch.targets)
        if count is None:
            return loss
        return loss * (count_targets(batch.targets, self.grid) / count).to(loss.dtype)

    def value(self, loss: Tensor) -> Tensor:
        # A mean that the module computes by itself is that of one place; the run records the mean over places.
        mean = loss.detach().double()
        for axis in AXES:
            mean = comm.all_reduce(mean, self.grid, axis, label="loss").wait()
        return mean / self.grid.shape.world


def build_model(config: TrainConfig, grid: Grid) -> LanguageModel:
    """Build the model of a resolved config on the grid."""
    return OwnModel(config, grid) if config.model.is_own else ReferenceModel(config, grid)


def vocab_of(config: TrainConfig) -> int:
    """Return the number of ids that the model knows; a user's module knows those of the tokenizer by default."""
    if config.model.is_own:
        return config.model.vocab or load_tokenizer(config.data.tokenizer, config.data.eod).vocab
    return config.model.build().vocab


def make_module(config: TrainConfig) -> nn.Module:
    """Call the user's function, with the same random numbers on all ranks, and return its module."""
    name, options = config.model.name, config.model.options
    function = import_object(name, "package.module:function")
    if not callable(function):
        raise ValueError(f"{name} is {type(function).__name__}; give package.module:function")
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ValueError(f"model.options={options}: {name} does not take them: {error}") from error
    with torch.random.fork_rng(devices=[]):  # the run's own random numbers stay where they are
        torch.manual_seed(config.train.seed)
        module = function(**options)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{name} returned {type(module).__name__}; it must return an nn.Module")
    return module.to(config.policy.parameters)


def put_on_grid(plain: nn.Module, config: TrainConfig, grid: Grid) -> nn.Module:
    """Put a user's module on the grid, with a forward that takes tokens and targets and returns the loss."""
    _compute_loss(plain, config.model.name, vocab_of(config))
    return parallelize(plain, grid, policy=config.build_policy(), seed=config.train.seed)


def _compute_loss(module: nn.Module, name: str, vocab: int) -> None:
    """Give the module a subclass of its class, of the same name, whose forward returns the loss over `vocab` ids.

    The loss is computed inside of the module's forward. So on a grid logits stay cut over the vocabulary, and the loss
    is the mean over the whole batch.
    """
    kind = type(module)
    takes_targets = _takes_targets(kind, name)

    def forward(self: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        result = kind.forward(self, tokens, targets) if takes_targets else kind.forward(self, tokens)
        found = _loss_in(result) if takes_targets else _logits_in(result)
        if found is None:
            given = "(tokens, targets)" if takes_targets else "(tokens)"
            raise ValueError(f"{name}: forward{given} returned {_shown(result)}; {CONTRACT}")
        if takes_targets:
            return found
        if found.shape[-1] < vocab:
            raise ValueError(
                f"{name}: forward returned logits of {found.shape[-1]} ids, but the data has {vocab}; give the module "
                "more, or set data.tokenizer or model.vocab"
            )
        return functional.cross_entropy(found.flatten(0, 1), targets.flatten())

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "forward": forward}
    module.__class__ = type(kind.__name__, (kind,), names)


def _takes_targets(kind: type[nn.Module], name: str) -> bool:
    """Return whether the forward of a class takes targets as its second argument."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    _, *arguments = inspect.signature(kind.forward).parameters.values()  # without self
    taken = [argument for argument in arguments if argument.kind in positional]
    needed = [argument.name for argument in taken if argument.default is argument.empty]
    if len(needed) > 2:
        raise ValueError(f"{name}: forward needs {', '.join(needed)}; {CONTRACT}")
    return len(needed) == 2 or [argument.name for argument in taken[1:2]] == ["targets"]


def _loss_in(result: Any) -> Tensor | None:
    """Return the loss in what a forward with targets has returned: itself, its `.loss`, or the scalar of a tuple."""
    if isinstance(result, tuple) and not hasattr(result, "loss"):
        scalars = [value for value in result if isinstance(value, Tensor) and value.dim() == 0]
        result = scalars[0] if len(scalars) == 1 else None
    found = result if isinstance(result, Tensor) else getattr(result, "loss", None)
    return found if isinstance(found, Tensor) and found.dim() == 0 else None


def _logits_in(result: Any) -> Tensor | None:
    """Return the logits in what a forward without targets has returned: itself, or its `.logits`."""
    found = result if isinstance(result, Tensor) else getattr(result, "logits", None)
    return found if isinstance(found, Tensor) and found.dim() == 3 else None


def _shown(result: Any) -> str:
    return f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
