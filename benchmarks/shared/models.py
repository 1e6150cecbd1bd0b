"""A model on one rank that takes SGD steps, for Fourfold and for its peers, and the two bounds of Fourfold's steps.

A step is forward, backward and a plain update `p -= lr * grad` of the local shards, the same for every line. Gradients
are dropped after the step and there is no optimizer state, so that many lines fit on one device at once. Weights are
initialised again before each turn: every turn of a line starts from the same weights, so a loss that differs between
turns shows that something went wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

SGD_LEARNING_RATE = 0.1
"""Large enough that the loss on a repeated batch falls visibly, in bf16 too."""
IN_FLIGHT = 4
"""How many collectives a replay of the ledger keeps launched but not yet waited for."""


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

    @abstractmethod
    def forward_backward(self) -> Tensor:
        """Compute complete gradients and return this rank's loss; its mean over all ranks is the loss of the batch."""

    def reset_weights(self) -> None:
        with torch.no_grad():
            for shard_init in self.shard_inits:
                shard_init.fill()

    def step(self) -> Tensor:
        loss = self.forward_backward()
        self.update()
        return loss.detach()

    @torch.no_grad()
    def update(self, *, keep: bool = True) -> None:
        """Apply p -= lr * grad; without `keep`, compute the same and throw the result away."""
        shards, gradients = [], []
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                shards.append(local_shard(parameter))
                gradients.append(local_shard(_placed_gradient(parameter)))
            parameter.grad = None
        (torch._foreach_add_ if keep else torch._foreach_add)(shards, gradients, alpha=-SGD_LEARNING_RATE)

    def measure(self, what: Measure) -> Callable[[], Tensor | None]:
        if what != "step":
            raise ValueError(f"{type(self).__name__} has no measure {what!r}; it has 'step'")
        return self.step


def local_shard(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _placed_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient with the parameter's placements. torch leaves the gradient of a norm under sequence
    parallelism as a partial sum, which its optimizers reduce in their step."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        return gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return gradient  # type: ignore[return-value]


class Arena:
    """One buffer that holds the weights of all Fourfold lines, each on top of the others.

    Lines take turns and initialise their weights before each turn, so many lines fit on one GPU. Initial values are
    drawn on the device; the package draws them on the CPU, so that weights are equal on every grid.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.empty(elements, dtype=dtype, device=device)
        self.used = 0
        self.shard_inits: list[ShardInit] = []
        self._reserve = layer.reserve

    def build(
        self, config: ModelConfig, grid: ff.Grid, policy: ff.Policy
    ) -> tuple[ff.models.Transformer, list[ShardInit]]:
        """Return a model with its weights in this buffer, not yet initialised."""
        self.used, self.shard_inits = 0, []
        before = layer.reserve, layer.fill_
        layer.reserve, layer.fill_ = self.reserve, self.record_init
        try:
            return ff.models.build(config, grid, policy=policy, dtype=self.buffer.dtype), self.shard_inits
        finally:
            layer.reserve, layer.fill_ = before

    def reserve(
        self, names: Sequence[str], specs: Mapping[str, Spec], grid: ff.Grid, dtype: torch.dtype, _: torch.device
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Replace the package's function of this name."""
        whole, parts = self._reserve(names, specs, grid, dtype, torch.device("meta"))
        memory = self.buffer[self.used : self.used + whole.numel()]
        if memory.numel() < whole.numel():
            raise ValueError(f"the arena of {self.buffer.numel()} elements is too small for {names} after {self.used}")
        self.used += -(-whole.numel() // 256) * 256  # aligned like the allocator's blocks
        pieces = memory.split([part.numel() for part in parts.values()])
        return memory, {name: piece.view(parts[name].shape) for name, piece in zip(parts, pieces, strict=True)}

    def record_init(
        self, shard: Tensor, box: Sequence[range], shape: Sequence[int], init: Init, seed: int, name: str
    ) -> None:
        """Replace the package's `fill_`. Ranks that hold the same part get the same key."""
        self.shard_inits.append(ShardInit(shard, init, key_of(seed, name, tuple(shape), *box)))


class FourfoldModel(BenchmarkModel):
    """One of Fourfold's lines, with its two bounds: computation alone and communication alone."""

    def __init__(self, line: Line, workload: Workload, grid: ff.Grid, arena: Arena) -> None:
        self.grid, self.count, self.line = grid, workload.tokens, line
        self.module, self.shard_inits = arena.build(workload.config, grid, line.policy)
        self.held_bytes = arena.used * arena.buffer.element_size()
        self.tokens, self.targets = (ff.local_rows(part, grid) for part in workload.batch(grid.device))
        self.dtype = workload.dtype
        self.records: list[Collective] = []

    def forward_backward(self) -> Tensor:
        loss = self.module(self.tokens, self.targets, count=self.count)
        loss.backward()
        return loss

    def measure(self, what: Measure) -> Callable[[], Tensor | None]:
        if what == "step":
            return self.step
        return self.compute if what == "compute" else self.communicate()

    def recorded_step(self) -> Tensor:
        """Take a step and keep its ledger for `communicate`."""
        with self.grid.ledger.watch() as records:
            loss = self.step()
        self.records = list(records)
        return loss

    def compute(self) -> None:
        """Take a step without any communication. Its gradients are meaningless, so the weights stay unchanged."""
        with comm.muted(self.grid):
            self.forward_backward()
            self.update(keep=False)

    def communicate(self) -> Callable[[], None]:
        """Return a function that runs the collectives of a step in order, with no computation between them."""
        if not self.records:
            raise ValueError(f"{self.line.name} communicates nothing, so there is nothing to replay")
        buffers = {nbytes: self._buffer(nbytes) for nbytes in {self._input_bytes(record) for record in self.records}}

        def replay() -> None:
            pending = []
            for record in self.records:
                pending.append(self._launch(record, buffers[self._input_bytes(record)]))
                if len(pending) > IN_FLIGHT:
                    pending.pop(0).wait()
            for one in pending:
                one.wait()

        return replay

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


def build_on_device(config: ModelConfig, grid: ff.Grid, policy: ff.Policy) -> ff.models.Transformer:
    """Build a model with initial weights drawn on the device: the CPU's generator takes half a minute for 1 B."""
    original = layer.fill_

    def fill(shard: Tensor, _box: Any, _shape: Any, init: Init, *_: Any) -> None:
        shard.normal_(init.mean, init.std) if init.std else shard.fill_(init.mean)

    layer.fill_ = fill
    try:
        return ff.models.build(config, grid, policy=policy)
    finally:
        layer.fill_ = original
