"""One line of the table on one rank: a model that takes steps, and what Fourfold's lines are bounded by.

A step is forward, backward and a plain update `p -= lr * grad` of the local shards, the same on all sides; gradients
are dropped after it and there is no optimizer state, so that many lines are resident at once. Weights are drawn anew
before each turn: every turn of a line starts from the same weights, so its losses tell whether anything went wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fourfold as ff
from fourfold import comm
from fourfold.layout import Init, Spec
from fourfold.ledger import Collective
from fourfold.models import ModelConfig
from fourfold.nn import layer
from fourfold.nn.initial import key_of

Measure = Literal["step", "compute", "communication"]

RATE = 0.1
"""Of the update: the loss on the same batch falls, in bf16 too."""
IN_FLIGHT = 4
"""Collectives that a replay of the ledger has launched and not waited for."""


@dataclass(frozen=True)
class Size:
    """A model and a batch, the same for all sides."""

    name: str
    config: ModelConfig
    rows: int
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.rows * self.config.seq

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the whole batch."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab, (self.rows, self.config.seq + 1), generator=generator).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True)
class Line:
    """One line of the table: which side, on which grid, how."""

    kind: str
    """`fourfold`, or the name of a peer."""
    shape: ff.Shape
    variant: str = ""
    policy: ff.Policy = ff.Policy()
    """Of Fourfold's lines."""
    bounded: bool = False
    """Also measured: its computation alone, and its communication alone."""

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.kind, str(self.shape), self.variant) if part)

    @property
    def measures(self) -> tuple[Measure, ...]:
        return ("step", "compute", "communication") if self.bounded else ("step",)


@dataclass(frozen=True)
class Draw:
    """Memory of a shard, and how its values start."""

    shard: Tensor
    init: Init
    key: int

    def __call__(self) -> None:
        if self.init.std == 0:
            self.shard.fill_(self.init.mean)
        else:
            generator = torch.Generator(self.shard.device).manual_seed(self.key)
            self.shard.normal_(self.init.mean, self.init.std, generator=generator)


class Side(ABC):
    """A model on this rank, ready for steps."""

    module: nn.Module
    draws: list[Draw]
    held_bytes = 0
    """Memory of its weights that was allocated before the line was built."""
    base_bytes = 0
    """What the device held for others when the line was built."""

    @abstractmethod
    def forward_backward(self) -> Tensor:
        """Leaves complete gradients; the loss is this rank's, and the mean over all ranks is that of the batch."""

    def refresh(self) -> None:
        """The first weights again."""
        with torch.no_grad():
            for draw in self.draws:
                draw()

    def step(self) -> Tensor:
        loss = self.forward_backward()
        self.update()
        return loss.detach()

    @torch.no_grad()
    def update(self, *, keep: bool = True) -> None:
        """p -= rate * grad; without `keep` the result is thrown away."""
        shards, gradients = [], []
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                shards.append(local(parameter))
                gradients.append(local(_as_parameter(parameter)))
            parameter.grad = None
        (torch._foreach_add_ if keep else torch._foreach_add)(shards, gradients, alpha=-RATE)

    def measure(self, what: Measure) -> Callable[[], Tensor | None]:
        if what != "step":
            raise ValueError(f"{type(self).__name__} has no measure {what!r}; it has 'step'")
        return self.step


def local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _as_parameter(parameter: nn.Parameter) -> Tensor:
    """Its gradient, laid out as it is: torch leaves that of a norm with sequence parallelism owed a sum, which its
    optimizers pay in their step."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
        return gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
    return gradient  # type: ignore[return-value]


class Arena:
    """One buffer that the weights of all Fourfold lines lie in, one line over the other.

    Lines take turns and draw their weights before each, so many lines fit on one GPU; and values are drawn on the
    device, which the package does on the CPU for the sake of equal weights on every grid.
    """

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = torch.empty(elements, dtype=dtype, device=device)
        self.used = 0
        self.draws: list[Draw] = []
        self._reserve = layer.reserve

    def build(self, config: ModelConfig, grid: ff.Grid, policy: ff.Policy) -> tuple[ff.models.Transformer, list[Draw]]:
        """A model whose weights lie here, still to be drawn."""
        self.used, self.draws = 0, []
        before = layer.reserve, layer.fill_
        layer.reserve, layer.fill_ = self.reserve, self.remember
        try:
            return ff.models.build(config, grid, policy=policy, dtype=self.buffer.dtype), self.draws
        finally:
            layer.reserve, layer.fill_ = before

    def reserve(
        self, names: Sequence[str], specs: Mapping[str, Spec], grid: ff.Grid, dtype: torch.dtype, _: torch.device
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """In place of the package's function of this name."""
        whole, parts = self._reserve(names, specs, grid, dtype, torch.device("meta"))
        memory = self.buffer[self.used : self.used + whole.numel()]
        if memory.numel() < whole.numel():
            raise ValueError(f"the arena of {self.buffer.numel()} elements is too small for {names} after {self.used}")
        self.used += -(-whole.numel() // 256) * 256  # aligned as the allocator would
        pieces = memory.split([part.numel() for part in parts.values()])
        return memory, {name: piece.view(parts[name].shape) for name, piece in zip(parts, pieces, strict=True)}

    def remember(
        self, shard: Tensor, box: Sequence[range], shape: Sequence[int], init: Init, seed: int, name: str
    ) -> None:
        """In place of `fill_`: equal keys where ranks hold the same part."""
        self.draws.append(Draw(shard, init, key_of(seed, name, tuple(shape), *box)))


class Fourfold(Side):
    """A line of Fourfold, with its two bounds."""

    def __init__(self, line: Line, size: Size, grid: ff.Grid, arena: Arena) -> None:
        self.grid, self.count, self.line = grid, size.tokens, line
        self.module, self.draws = arena.build(size.config, grid, line.policy)
        self.held_bytes = arena.used * arena.buffer.element_size()
        self.tokens, self.targets = (ff.local_rows(part, grid) for part in size.batch(grid.device))
        self.dtype = size.dtype
        self.records: list[Collective] = []

    def forward_backward(self) -> Tensor:
        loss = self.module(self.tokens, self.targets, count=self.count)
        loss.backward()
        return loss

    def measure(self, what: Measure) -> Callable[[], Tensor | None]:
        if what == "step":
            return self.step
        return self.compute if what == "compute" else self.communicate()

    def watched_step(self) -> Tensor:
        """A step whose collectives are kept for the replay."""
        with self.grid.ledger.watch() as records:
            loss = self.step()
        self.records = list(records)
        return loss

    def compute(self) -> None:
        """A step in which nothing travels. What it computes means nothing, so the weights stay."""
        with comm.muted(self.grid):
            self.forward_backward()
            self.update(keep=False)

    def communicate(self) -> Callable[[], None]:
        """The collectives of a step one after the other, with nothing between them."""
        if not self.records:
            raise ValueError(f"{self.line.name} communicates nothing to replay")
        buffers = {nbytes: self._buffer(nbytes) for nbytes in {self._input_bytes(record) for record in self.records}}

        def replay() -> None:
            flying = []
            for record in self.records:
                flying.append(self._launch(record, buffers[self._input_bytes(record)]))
                if len(flying) > IN_FLIGHT:
                    flying.pop(0).wait()
            for pending in flying:
                pending.wait()

        return replay

    def _launch(self, record: Collective, buffer: Tensor) -> comm.Pending[Tensor]:
        if record.op == "all_gather":
            return comm.all_gather(buffer, self.grid, record.axis, label=record.label)
        if record.op == "reduce_scatter":
            return comm.reduce_scatter(buffer, self.grid, record.axis, label=record.label)
        return comm.all_reduce(buffer, self.grid, record.axis, label=record.label, owned=True)

    def _buffer(self, nbytes: int) -> Tensor:
        """Zeros, which stay zeros however often they are summed; bytes where the dtype does not divide them."""
        dtype = self.dtype if nbytes % (self.dtype.itemsize * self.grid.shape.world) == 0 else torch.uint8
        return torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=self.grid.device)

    @staticmethod
    def _input_bytes(record: Collective) -> int:
        return record.nbytes // record.ranks if record.op == "all_gather" else record.nbytes
