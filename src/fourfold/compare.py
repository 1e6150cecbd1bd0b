"""Compares a model on the grid with the same model in one process: is a difference a bug or rounding?

Both start from the same seed and read the same batches. After every step the loss, the gradient norm, all gradients and
all parameters are compared, tensor by tensor. Rank 0 runs the serial model while the other ranks wait, so the whole
model must fit there. Dropout must be off, since its masks depend on the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Protocol

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.data.sampling import local_rows
from fourfold.grad_norm import clip_grad_norm_, grad_norm
from fourfold.gradients import gradients_of
from fourfold.grid import Grid
from fourfold.nn.layer import Dropout, specs_of
from fourfold.params import local_of, whole_over_pipe


class Stepper(Protocol):
    """The methods that an optimizer must have."""

    def step(self) -> object: ...
    def zero_grad(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of one tensor after one step. `scale` is the largest serial value of the same kind."""

    step: int
    kind: str
    name: str
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        """The difference divided by the scale; infinite if a value is not finite, so that it is never overlooked."""
        relative = self.largest / self.scale if self.scale else self.largest
        return relative if isfinite(relative) else inf


@dataclass(slots=True)
class SerialComparison:
    """All differences between a grid and one process, the same on every rank."""

    grid: str
    differences: list[Difference] = field(default_factory=list)

    @property
    def worst(self) -> Difference:
        return max(self.differences, key=lambda difference: difference.relative)

    def __str__(self) -> str:
        """Return a line for each tensor with its worst step, worst tensor first."""
        worst: dict[tuple[str, str], Difference] = {}
        for found in self.differences:
            before = worst.get((found.kind, found.name))
            if before is None or found.relative > before.relative:
                worst[found.kind, found.name] = found
        lines = [f"{self.grid} compared with one process: the largest difference of each tensor"]
        lines.append(f"{'relative':>10} {'absolute':>10} {'step':>5}  tensor")
        for found in sorted(worst.values(), key=lambda difference: -difference.relative):
            lines.append(f"{found.relative:>10.1e} {found.largest:>10.1e} {found.step:>5}  {found.kind} {found.name}")
        return "\n".join(lines)


def compare_serial(
    build: Callable[[Grid], nn.Module],
    batches: Iterable[tuple[Tensor, Tensor]],
    grid: Grid,
    *,
    optimizer: Callable[[Iterable[nn.Parameter]], Stepper] | None = None,
    max_norm: float | None = None,
) -> SerialComparison:
    """Train on the grid and in one process, one step per batch, and compare.

    `build(grid)` builds the model, with the same weights on any grid. Every rank passes the same whole batches of
    (tokens, targets). The default optimizer is torch's AdamW.
    """
    make_optimizer = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True))
    sides = [_Side(build, grid, make_optimizer)]
    if any(isinstance(module, Dropout) and module.probability for module in sides[0].model.modules()):
        raise ValueError("the masks of dropout depend on the grid; compare models with dropout=0")
    if gradients_of(sides[0].model).policy.shard_optimizer and grid.size("data") > 1:
        raise ValueError("a sharded optimizer cuts gradients over data; compare with shard_optimizer=False")
    # Only rank 0 has the serial model. If it fails there, it fails on all ranks, which would hang otherwise.
    grid.run_on_rank0("the serial model", lambda: sides.append(_Side(build, Grid.alone(grid.device), make_optimizer)))
    found = SerialComparison(str(grid))
    for step, (tokens, targets) in enumerate(batches):
        values = [sides[0].backward(tokens, targets, max_norm)]
        values += grid.run_together(
            "the serial model",
            lambda: [side.backward(tokens, targets, max_norm) for side in sides[1:]],  # noqa: B023
        )
        for kind in ("loss", "gradient norm"):
            found.differences += _compare_values(step, kind, [value[kind] for value in values], grid)
        found.differences += _compare_tensors(step, "gradient", sides, grid)
        for side in sides:
            side.optimizer.step()
            side.optimizer.zero_grad()
        found.differences += _compare_tensors(step, "parameter", sides, grid)
    return found


class _Side:
    """One of the two models: the one on the grid or, on rank 0 only, the serial one."""

    def __init__(
        self,
        build: Callable[[Grid], nn.Module],
        grid: Grid,
        optimizer: Callable[[Iterable[nn.Parameter]], Stepper],
    ) -> None:
        self.grid = grid
        self.model = build(grid)
        self.optimizer = optimizer(self.model.parameters())

    def backward(self, tokens: Tensor, targets: Tensor, max_norm: float | None) -> dict[str, Tensor]:
        """Run forward and backward on this rank's rows; return the loss and the gradient norm."""
        rows = (local_rows(whole, self.grid).to(self.grid.device) for whole in (tokens, targets))
        loss = self.model(*rows)
        loss.backward()
        parameters = list(self.model.parameters())
        norm = grad_norm(parameters) if max_norm is None else clip_grad_norm_(parameters, max_norm)
        return {"loss": loss.detach().double(), "gradient norm": norm}

    def whole(self, kind: str) -> Iterable[tuple[str, Tensor]]:
        """Yield every gradient or parameter, joined from its shards, one at a time."""
        specs, shards = specs_of(self.model), {}
        for name, parameter in self.model.named_parameters():
            local = local_of(parameter).detach()
            if kind == "gradient":  # a missing gradient is zero
                local = torch.zeros_like(local) if parameter.grad is None else local_of(parameter.grad)
            shards[name] = local, specs[name].storage, specs[name].shape
        return whole_over_pipe(shards, self.grid)


def _compare_values(step: int, kind: str, values: Sequence[Tensor], grid: Grid) -> list[Difference]:
    """Compare a number. Rank 0 has two values, its own and the serial one; the other ranks get the result from it."""
    pair = torch.zeros(2, dtype=torch.float64, device=grid.device)
    if len(values) == 2:
        pair = torch.stack([(values[0] - values[1]).abs(), values[1].abs()])
    largest, scale = comm.from_first(pair, grid).tolist()
    return [Difference(step, kind, "", largest, scale)]


def _compare_tensors(step: int, kind: str, sides: Sequence[_Side], grid: Grid) -> list[Difference]:
    serial = dict(sides[1].whole(kind)) if len(sides) == 2 else {}
    names: list[str] = []
    largest: list[Tensor] = []
    for name, tensor in sides[0].whole(kind):
        names.append(name)
        largest.append((tensor - serial[name]).abs().max().double() if serial else tensor.new_zeros(()).double())
    scale = torch.stack([tensor.abs().max() for tensor in serial.values()]).max() if serial else torch.zeros(())
    values = comm.from_first(torch.stack([*largest, scale.double().to(grid.device)]), grid).tolist()
    return [Difference(step, kind, name, value, values[-1]) for name, value in zip(names, values, strict=False)]
