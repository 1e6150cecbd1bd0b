"""Classes and functions of users, which configs of tests name as `plugins:Name`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class CountingSGD(torch.optim.Optimizer):
    """SGD with a learning rate that falls with its own count of steps, which is a plain number, and with no decay."""

    def __init__(self, params: Any, lr: float = 0.1, power: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "power": power, "kind": "counting"})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(parameter.grad * (group["lr"] / state["count"] ** group["power"]))


class RowSGD(torch.optim.SGD):
    """SGD whose state has one number for each row, which no checkpoint of ours holds."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = parameter.new_zeros(len(parameter), 1)
        return super().step(closure)


class Elsewhere(torch.optim.Optimizer):
    """An optimizer whose update of a parameter is `change`, given its gradient, value and state."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each.mul_(1 - group["lr"] * group["weight_decay"])
                    each.sub_(self.change(each.grad, each, self.state[each]), alpha=group["lr"])


class Orthogonal(Elsewhere):
    """Muon by hand: matrices are made orthogonal."""

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:  # noqa: ARG002
        momentum = state.setdefault("momentum", torch.zeros_like(gradient)).mul_(0.9).add_(gradient)
        if momentum.dim() != 2:
            return momentum
        found = momentum / (momentum.norm() + 1e-7)
        for _ in range(5):
            square = found @ found.mT
            found = 3.4445 * found + (-4.775 * square + 2.0315 * square @ square) @ found
        return found


class LargeOrthogonal(Orthogonal):
    """The same for large matrices alone."""

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        return super().change(gradient, parameter, state) if min(gradient.shape) >= 64 else gradient


class TrustRatio(Elsewhere):
    """LAMB and LARS: the norm of a parameter decides about its step."""

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:  # noqa: ARG002
        return gradient * (parameter.norm() / (gradient.norm() + 1e-6)).clamp(max=10.0)


class ByRow(Elsewhere):
    """One scale for each row."""

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:  # noqa: ARG002
        return gradient / (gradient.norm(dim=-1, keepdim=True) + 1e-6) if gradient.dim() > 1 else gradient


class ByColumn(Elsewhere):
    """One scale for each column."""

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:  # noqa: ARG002
        return gradient / (gradient.norm(dim=0, keepdim=True) + 1e-6) if gradient.dim() > 1 else gradient


class Noisy(Elsewhere):
    """Langevin's noise."""

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:  # noqa: ARG002
        return gradient + torch.randn_like(gradient) * 0.01


class Clipping(Elsewhere):
    """Gradients that are clipped by the norm of all of them inside the step."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        torch.nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], 0.1)
        super().step(closure)

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:  # noqa: ARG002
        return gradient


class Lion(Elsewhere):
    """Signs of a momentum."""

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:  # noqa: ARG002
        momentum = state.setdefault("exp_avg", torch.zeros_like(gradient))
        sign = momentum.lerp(gradient, 0.1).sign_()
        momentum.lerp_(gradient, 0.01)
        return sign


class ScheduleFree(Elsewhere):
    """Steps only once it was told that the model trains."""

    training = False

    def train(self) -> None:
        self.training = True

    def change(self, gradient: Tensor, parameter: Tensor, state: dict[str, Any]) -> Tensor:
        if not self.training:
            raise RuntimeError("call train() before step()")
        average = state.setdefault("z", parameter.clone()).sub_(gradient, alpha=0.1)
        return (parameter - average) * 0.5


class Tower(nn.Module):
    """A language model of one layer that returns logits."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(257, width), nn.Linear(width, 257)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        a = self.table(tokens)
        return self.head(a + self.down(functional.gelu(self.dropout(self.up(a)))))


class Narrow(Tower):
    """A model that forgot the id that ends a document."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens)[..., :256]


class TowerWithLoss(Tower):
    """The same with a loss of its own, returned beside the logits as many people do."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        logits = super().forward(idx)
        if targets is None:
            return logits, None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class TowerWithMean(Tower):
    """The same with a mean by hand, which is that of one place's rows."""

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").mean()


class TowerOfRows(Tower):
    """A module that returns one number for each row, which is neither logits nor a loss."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).mean((1, 2))


def llama() -> nn.Module:
    """Return a tiny model of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1, vocab_size=257)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def nothing() -> str:
    return "no module"


class Diary:
    """A callback that writes down every call."""

    def on_start(self, folder: Path, config: dict[str, Any]) -> None:
        self.path = folder / "diary.jsonl"
        self._write("start", str(folder), config["train"]["steps"])

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        self._write("step", step, metrics.pop("loss"))

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self._write("evaluation", step, metrics["loss"])

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self._write("checkpoint", step, (folder / "checkpoint.json").is_file())

    def on_end(self, step: int, reason: str) -> None:
        self._write("end", step, reason)

    def _write(self, *what: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\n")


class Broken:
    """A callback that fails after the second step, and again when the run ends."""

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        if step == 2:
            raise KeyError(sorted(metrics)[0])

    def on_end(self, step: int, reason: str) -> None:
        raise RuntimeError(f"{step} {reason}")


class BrokenEnd:
    """A callback that fails when the run ends."""

    def on_end(self, step: int, reason: str) -> None:
        raise RuntimeError(f"{step} {reason}")


class Misspelt:
    def on_steps(self, step: int, metrics: dict[str, Any]) -> None:
        """Is never called."""


class Needy(Diary):
    def __init__(self, path: str) -> None:
        self.path = Path(path)
