"""A model on one rank that takes training steps, for Fourfold and for its peers, and the bounds of Fourfold's steps.

A step is forward, backward, clipping and fused AdamW, the same for every line. So that many lines fit on one device at
once, gradients are dropped after the step, and lines share their optimizer state: a line resets weights and state
before each turn, so every turn starts from the same weights, and a loss that differs between turns shows that something
went wrong.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fourfold as ff
from benchmarks.shared.workloads import Line, Measure, Workload
from fourfold import comm
from fourfold.layout import Init, Spec
from fourfold.ledger import Collective
from fourfold.models import ModelConfig
from fourfold.nn import layer
from fourfold.nn.rng import key_of
from fourfold.optim import AdamW
from fourfold.step_graph import StepGraph

LEARNING_RATE = 1e-3
"""Large enough that the loss on a repeated batch falls visibly, in bf16 too."""
MAX_NORM = 1.0
"""Gradients are clipped to this norm."""
SGD_LEARNING_RATE = 0.1
"""The learning rate of models that take plain SGD steps; the loss falls visibly in bf16 too."""
IN_FLIGHT = 4
"""How many collectives a replay of the ledger keeps launched but not yet waited for."""
GRAPH_WARMUP = 3
"""Eager calls before a captured step is recorded, as torch recommends."""


@dataclass(frozen=True)
class ShardInit:
    """A shard, its initial distribution, and the key of its random numbers."""

    shard: Tensor
    init: Init
    key: int

    def fill(self) -> None:
        if self.init.std == 0:
            self.shard.fill_(self.init.mean)
        else:
            generator = torch.Generator(self.shard.device).manual_seed(self.key)
            self.shard.normal_(self.init.mean, self.init.std, generator=generator)


class BenchmarkModel(ABC):
    """A model on this rank with a step that can be timed."""

    module: nn.Module
    shard_inits: list[ShardInit]
    held_bytes = 0
    """Bytes of the model's weights that were allocated before the model was built."""
    base_bytes = 0
    """Bytes that the device held for other models when this one was built."""
    kept_bytes = 0
    """Bytes that the model keeps between steps."""

    @abstractmethod
    def step(self) -> Tensor | None:
        """Take a step and return this rank's loss, detached, or None if the rank has none; the mean over all ranks that
        have one is the loss of the batch."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers whose state may be shared with other models."""
        return []

    def reset(self) -> None:
        """Set the weights to their initial values and the optimizer state to zeros."""
        with torch.no_grad():
            for shard_init in self.shard_inits:
                shard_init.fill()
            for state in self.states():
                state.zero_()

    def states(self) -> Iterator[Tensor]:
        """Yield this rank's shards of the optimizer state, and the counters of steps, which have no dims."""
        for optimizer in self.optimizers():
            for state in optimizer.state.values():
                yield from (local_shard(value) for value in state.values() if torch.is_tensor(value))

    def measure(self, what: Measure) -> Callable[[], Tensor | None]:
        """Return the function whose calls are timed."""
        if what != "step":
            raise ValueError(f"{type(self).__name__} has no measure {what!r}; it has 'step'")
        return self.step


class UpdatedModel(BenchmarkModel):
    """A model that computes gradients and then applies them, as a training loop of plain torch does."""

    @abstractmethod
    def forward_backward(self) -> Tensor | None:
        """Compute complete gradients and return this rank's loss, if it has one."""

    @abstractmethod
    def update(self) -> None:
        """Step the optimizer and drop the gradients."""

    def step(self) -> Tensor | None:
        loss = self.forward_backward()
        self.update()
        return None if loss is None else loss.detach()


class SwitchedModel(UpdatedModel):
    """A model whose parts run compiled or eagerly, as its line asks before each turn. So the lines of both modes share
    one model, with its weights and its optimizer."""

    def __init__(self) -> None:
        self._compiled: list[tuple[nn.Module, Any]] = []

    def compile(self, parts: Iterable[nn.Module]) -> None:
        """Prepare these modules to be compiled when they first run so; they run eagerly until `switch`."""
        for part in parts:
            part.compile(dynamic=False)
            self._compiled.append((part, part._compiled_call_impl))
        self.switch(compiled=False)

    def switch(self, *, compiled: bool) -> None:
        for part, call in self._compiled:
            part._compiled_call_impl = call if compiled else None


class SgdModel(UpdatedModel):
    """A model that steps p -= lr * grad, without clipping and without optimizer state."""

    @torch.no_grad()
    def update(self) -> None:
        shards, gradients = [], []
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                shards.append(local_shard(parameter))
                gradients.append(local_shard(_placed_gradient(parameter)))
            parameter.grad = None
        torch._foreach_add_(shards, gradients, alpha=-SGD_LEARNING_RATE)


def local_shard(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _placed_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient with the parameter's placements. torch leaves the gradient of a norm under sequence
    parallelism as a partial sum, which its optimizers reduce in their step."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        return gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return gradient  # type: ignore[return-value]


def adamw(parameters: Iterable[nn.Parameter], *, capturable: bool = False) -> torch.optim.AdamW:
    """Return torch's AdamW with the settings of Fourfold's: weight decay on matrices only."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    kept = [group for group in groups if group["params"]]
    return torch.optim.AdamW(kept, LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, fused=True, capturable=capturable)


class StatePool:
    """Memory for optimizer state that all models of a rank share. Models take turns and reset their state, and shards
    of different grids often have equal sizes, so that this saves most of the memory of many lines."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)

    def share(self, model: BenchmarkModel) -> int:
        """Move the state of a model that has taken its first step into the pool; return the bytes it already had."""
        taken: dict[tuple[int, torch.dtype], int] = defaultdict(int)
        found = 0
        for state in (state for state in model.states() if state.dim()):
            key = state.numel(), state.dtype
            place, taken[key] = taken[key], taken[key] + 1
            if place < len(self._tensors[key]):
                shared, values = self._tensors[key][place], state.clone()
                state.set_(shared.untyped_storage(), shared.storage_offset(), state.shape, state.stride())
                state.copy_(values)
                found += state.nbytes
            else:
                self._tensors[key].append(state)
        return found


class Arena:
    """One buffer that holds the weights of all Fourfold lines, each on top of the others.

    Lines take turns and initialise their weights before each turn, so many lines fit on one GPU. Initial values are
    drawn on the device; the package draws them on the CPU, so that weights are equal on every grid.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.empty(elements, dtype=dtype, device=device)
        self.used = 0
        self.shard_inits: list[ShardInit] = []
        self.paddings: list[Tensor] = []
        self._reserve = layer.reserve

    def build(
        self, config: ModelConfig, grid: ff.Grid, policy: ff.Policy
    ) -> tuple[ff.models.Transformer, list[ShardInit]]:
        """Return a model with its weights in this buffer, not yet initialised."""
        self.used, self.shard_inits, self.paddings = 0, [], []
        before = layer.reserve, layer.fill_
        layer.reserve, layer.fill_ = self.reserve, self.record_init
        try:
            model = ff.models.build(config, grid, policy=policy, dtype=self.buffer.dtype)
            return model, [*self.shard_inits, *(ShardInit(padding, Init(), 0) for padding in self.paddings)]
        finally:
            layer.reserve, layer.fill_ = before

    def reserve(
        self,
        names: Sequence[str],
        specs: Mapping[str, Spec],
        grid: ff.Grid,
        dtype: torch.dtype,
        _: torch.device,
        *,
        padding: int = 0,
    ) -> dict[str, layer.ShardMemory]:
        """Replace the package's function of this name."""
        made = self._reserve(names, specs, grid, dtype, torch.device("meta"), padding=padding)
        sizes = [made[name].shard.numel() for name in names]
        used = sum(sizes)
        needed = used + padding * made[names[-1]].shard[:1].numel()
        memory = self.buffer[self.used : self.used + needed]
        if memory.numel() < needed:
            raise ValueError(f"the arena of {self.buffer.numel()} elements is too small for {names} after {self.used}")
        self.used += -(-needed // 256) * 256  # aligned like the allocator's blocks
        if padding:
            self.paddings.append(memory[used:])
        for name, piece in zip(names, memory[:used].split(sizes), strict=True):
            of = made[name]
            joint = None if of.joint is None else memory
            made[name] = of._replace(shard=piece.view(of.shard.shape), joint=joint)
        return made

    def record_init(
        self, shard: Tensor, box: Sequence[range], shape: Sequence[int], init: Init, seed: int, name: str
    ) -> None:
        """Replace the package's `fill_`. Ranks that hold the same part get the same key."""
        self.shard_inits.append(ShardInit(shard, init, key_of(seed, name, tuple(shape), *box)))


class FourfoldModel(BenchmarkModel):
    """One of Fourfold's lines, with its two bounds: computation alone and communication alone.

    A captured line records its step as a CUDA graph. So do its bounds, with a model of their own: all calls of a model
    whose step is recorded must run on the stream of its graph.
    """

    def __init__(self, line: Line, workload: Workload, grid: ff.Grid, arena: Arena, *, muted: bool = False) -> None:
        self.grid, self.count, self.line, self.muted = grid, workload.tokens, line, muted
        self.module, self.shard_inits = arena.build(workload.config, grid, line.policy)
        self.held_bytes = arena.used * arena.buffer.element_size()
        self.optimizer = AdamW(self.module, LEARNING_RATE)
        self.tokens, self.targets = (ff.local_rows(part, grid) for part in workload.batch(grid.device))
        self.dtype = workload.dtype
        self.records: list[Collective] = []
        self._graphs: list[StepGraph[Tensor]] = []
        self._step = self._captured(self._train)
        self._make_muted = lambda: FourfoldModel(line, workload, grid, arena, muted=True)
        self._bounds: dict[Measure, Callable[[], Tensor | None]] = {}
        self._alone: FourfoldModel | None = None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer, *([] if self._alone is None else [self._alone.optimizer])]

    def step(self) -> Tensor:
        return self._step(self.tokens, self.targets)

    def measure(self, what: Measure) -> Callable[[], Tensor | None]:
        if what == "step":
            return self.step
        if what not in self._bounds:
            self._bounds[what] = self._compute() if what == "compute" else self._communicate()
        return self._bounds[what]

    def recorded_step(self) -> Tensor:
        """Take a step, which must run eagerly, and keep its ledger for communication alone."""
        with self.grid.ledger.watch() as records:
            loss = self.step()
        self.records = list(records)
        return loss

    def _train(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with comm.muted(self.grid) if self.muted else nullcontext():
            loss = self._forward_backward(tokens, targets)
            self.optimizer.clip_and_step(MAX_NORM)
            self.optimizer.zero_grad()
        return loss.detach()

    def _forward_backward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if (parts := self.line.micro_batches) > 1:
            rows = zip(tokens.chunk(parts), targets.chunk(parts), strict=True)
            return ff.forward_backward(cast(ff.models.Transformer, self.module), rows)
        loss = self.module(tokens, targets, count=self.count)
        loss.backward()
        return loss

    def _captured(self, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if not self.line.captured:
            return step
        self._graphs.append(StepGraph(step, self.module, warmup=GRAPH_WARMUP, always=True))
        return self._graphs[-1]

    @property
    def not_captured(self) -> str:
        """Why a captured line would run eagerly, which is no error for `StepGraph`. On the CPU, where only tests run,
        it may."""
        graphs = [*self._graphs, *([] if self._alone is None else self._alone._graphs)]
        return next((graph.reason for graph in graphs if graph.reason and self.grid.device.type == "cuda"), "")

    def _compute(self) -> Callable[[], Tensor]:
        """Return a function that takes a step without any communication, which makes meaningless weights."""
        self._alone = self._make_muted()
        return self._alone.step

    def _communicate(self) -> Callable[[], Tensor]:
        """Return a function that runs the collectives of a step in order, with no computation between them."""
        if not self.records:
            raise ValueError(f"{self.line.name} communicates nothing, so there is nothing to replay")
        buffers = {nbytes: self._buffer(nbytes) for nbytes in {self._input_bytes(record) for record in self.records}}
        done = torch.zeros((), device=self.grid.device)

        def replay(done: Tensor) -> Tensor:
            pending = []
            for record in self.records:
                pending.append(self._launch(record, buffers[self._input_bytes(record)]))
                if len(pending) > IN_FLIGHT:
                    pending.pop(0).wait()
            for one in pending:
                one.wait()
            return done + 1  # a step returns a tensor

        act = self._captured(replay)
        return lambda: act(done)

    def _launch(self, record: Collective, buffer: Tensor) -> comm.Pending[Tensor]:
        if record.op == "all_gather":
            return comm.all_gather(buffer, self.grid, record.axis, label=record.label)
        if record.op == "reduce_scatter":
            return comm.reduce_scatter(buffer, self.grid, record.axis, label=record.label)
        return comm.all_reduce(buffer, self.grid, record.axis, label=record.label, owned=True)

    def _buffer(self, nbytes: int) -> Tensor:
        """Return zeros, which stay zeros however often they are summed; as bytes where the dtype does not divide."""
        dtype = self.dtype if nbytes % (self.dtype.itemsize * self.grid.shape.world) == 0 else torch.uint8
        return torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=self.grid.device)

    @staticmethod
    def _input_bytes(record: Collective) -> int:
        return record.nbytes // record.ranks if record.op == "all_gather" else record.nbytes


@contextmanager
def filled_on_device() -> Iterator[None]:
    """Draw initial weights on the device inside the block: the CPU's generator takes half a minute for 1 B."""
    original, numbers = layer.fill_, itertools.count()

    def fill(shard: Tensor, _box: Any, _shape: Any, init: Init, *_: Any) -> None:
        torch.manual_seed(next(numbers))  # ranks that hold the same shard of a parameter draw the same numbers
        shard.normal_(init.mean, init.std) if init.std else shard.fill_(init.mean)

    layer.fill_ = fill
    try:
        yield
    finally:
        layer.fill_ = original


def build_on_device(
    config: ModelConfig, grid: ff.Grid, policy: ff.Policy, dtype: torch.dtype = torch.float32
) -> ff.models.Transformer:
    """Build a model with initial weights drawn on the device."""
    with filled_on_device():
        model = ff.models.build(config, grid, policy=policy, dtype=dtype)
    model.places_alike = True  # benchmarks give all ranks equally many rows
    return model
