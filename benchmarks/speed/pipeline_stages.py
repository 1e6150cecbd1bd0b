"""The stages of the pipeline benchmarks: their size, and as modules of plain torch, sleeping or MLP blocks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class StackSize:
    """The stages of a pipeline: blocks of equal size, or sleeps."""

    layers: int
    hidden: int
    tokens: int
    """Tokens of a micro-batch."""
    dtype: torch.dtype
    mlp_hidden: int = 0
    sleep_seconds: float = 0.0
    """Seconds that a rank sleeps for the F of one micro-batch, the same for B and for W; 0: it computes."""

    @property
    def about(self) -> dict[str, Any]:
        """What a reader of the results must know."""
        parameters = 2 * self.layers * self.hidden * self.mlp_hidden
        model = {"layers": self.layers, "hidden": self.hidden, "parameters": parameters}
        dtype = str(self.dtype).removeprefix("torch.")
        sizes = {"rows": 1, "seq": self.tokens, "dtype": dtype, "sleep_seconds": self.sleep_seconds}
        return {"size": "sleeps" if self.sleep_seconds else "MLP blocks", "model": model, **sizes}


class Sleeper:
    """Sleeps in place of computation, and notes for how long."""

    def __init__(self, seconds: float) -> None:
        """Take the seconds of one F, B or W of a stage."""
        self.seconds = seconds
        self.awake = False
        """Whether nobody sleeps: the first step of a line only opens connections."""
        self.slept: list[tuple[str, float]] = []

    def sleep(self, kind: str) -> None:
        began = time.perf_counter()
        if not self.awake:
            time.sleep(self.seconds)
        self.slept.append((kind, time.perf_counter() - began))


def loss_of(a: Tensor, _: object = None) -> Tensor:
    return a.float().square().mean()


class SleepB(torch.autograd.Function):
    """Hands a tensor on; its backward sleeps as the gradient of a stage's input does."""

    kind = "B"

    @classmethod
    def forward(cls, ctx: Any, a: Tensor, sleeper: Sleeper) -> Tensor:
        ctx.sleeper = sleeper
        return a.clone()

    @classmethod
    def backward(cls, ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.sleeper.sleep(cls.kind)
        return gradient, None


class SleepW(SleepB):
    """The same for the gradients of a stage's weights."""

    kind = "W"


class SleepingModule(nn.Module):
    """A stage of torch that sleeps for F, B and W. B and W are on separate paths, so that torch can tell them apart."""

    def __init__(self, sleeper: Sleeper, hidden: int) -> None:
        super().__init__()
        self.sleeper, self.weight = sleeper, nn.Parameter(torch.zeros(hidden))

    def forward(self, a: Tensor) -> Tensor:
        self.sleeper.sleep("F")
        if not a.requires_grad:
            a = a + self.weight  # the first stage: its backward passes through its layers as well
        return SleepB.apply(a, self.sleeper) + SleepW.apply(self.weight, self.sleeper)


class Block(nn.Module):
    """An MLP block of plain torch, a + mlp(a)."""

    def __init__(self, size: StackSize) -> None:
        super().__init__()
        self.up = nn.Linear(size.hidden, size.mlp_hidden, bias=False)
        self.down = nn.Linear(size.mlp_hidden, size.hidden, bias=False)
        nn.init.normal_(self.up.weight, std=0.02)
        nn.init.normal_(self.down.weight, std=0.02 / (2 * size.layers) ** 0.5)

    def forward(self, a: Tensor) -> Tensor:
        return a + self.down(functional.gelu(self.up(a), approximate="tanh"))
