"""Losses as people write them, inside and outside of a model: `ENDINGS` by name, and penalties: `PENALTIES`.

An ending is the last part of a model, `head`, and what the loop makes of the model's result, `loss`. `rule` says what
one process must compute to be compared with a grid: the mean over places of each place's loss, as under DDP, or that of
the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold.grid import Grid

CLASSES = 7
IGNORED = -100
Batch = Mapping[str, Tensor]
Results = dict[str, Tensor]


def draw_batch(rows: int, seq: int, features: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A batch with all that any ending asks for, rows first. Masks keep a different number of targets in each row, one
    at least."""
    ids = torch.randint(CLASSES, (rows, seq), generator=generator)
    masked = torch.rand(rows, seq, generator=generator) < torch.linspace(0, 0.9, rows)[:, None]
    masked[:, 0] = False
    return dict(
        x=torch.randn(rows, seq, features, generator=generator, dtype=torch.float64),
        tokens=torch.randint(11, (rows, seq), generator=generator),
        ids=ids,
        some=ids.masked_fill(masked, IGNORED),
        mask=~masked,
        label=torch.randint(CLASSES, (rows,), generator=generator),
        signs=torch.randint(2, (rows,), generator=generator).double() * 2 - 1,
        number=torch.randn(rows, generator=generator, dtype=torch.float64),
        floats=torch.rand(rows, seq, CLASSES, generator=generator, dtype=torch.float64),
    )


@dataclass(frozen=True)
class Ending:
    head: Callable[[int], nn.Module]
    """From the width. Called with the stream and, where the loss is inside, the targets; returns tensors by name."""
    loss: Callable[[Results, Batch, nn.Module], Tensor] = lambda results, batch, model: results["loss"]  # noqa: ARG005
    inside: bool = False
    rule: Literal["place", "batch"] = "place"
    by_rows: bool = True
    """The loss of the batch is the mean of the losses of its rows, each with the same weight."""
    companions: bool = False
    """Rows are compared with each other inside the model."""
    whole: bool = False
    """The same through `ff.whole_batch`."""
    globally: Callable[[Tensor, Batch, Grid], Tensor] | None = None
    """What the loop does on a grid so that the loss becomes that of the whole batch."""
    tokens: bool = False
    """The model must have a table of tokens, which it reads again as its head."""


ENDINGS: dict[str, Ending] = {}
WEIGHTS = torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64)


class Tokens(nn.Module):
    """A linear layer on every token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, CLASSES)

    def forward(self, h: Tensor, targets: Batch | None = None) -> Results:  # noqa: ARG002
        return {"out": self.out(h)}


class Rows(nn.Module):
    """A linear layer on the mean over the sequence."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.classifier = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, h: Tensor, targets: Batch | None = None) -> Results:  # noqa: ARG002
        return {"out": self.classifier(self.norm(h).mean(dim=1))}


class Numbers(nn.Module):
    """One number a row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, 1)

    def forward(self, h: Tensor, targets: Batch | None = None) -> Results:  # noqa: ARG002
        return {"out": self.out(h[:, -1]).squeeze(-1)}


class Plain(nn.Module):
    """The stream itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, h: Tensor, targets: Batch | None = None) -> Results:  # noqa: ARG002
        return {"out": h * self.gain}


class Pair(nn.Module):
    """Two embeddings of each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, 6), nn.Linear(width, 6)

    def forward(self, h: Tensor, targets: Batch | None = None) -> Results:  # noqa: ARG002
        return {"out": self.left(h[:, 0]), "extra": functional.normalize(self.right(h.mean(1)), dim=-1)}


# losses outside of the model


def outside(name: str, head: Callable[[int], nn.Module], **options: Any) -> Callable[[Callable], Callable]:
    def register(loss: Callable[[Tensor, Batch], Tensor]) -> Callable:
        ENDINGS[name] = Ending(head, lambda results, batch, model: loss(results["out"], batch), **options)  # noqa: ARG005
        return loss

    return register


OUTSIDE: dict[str, tuple[type[nn.Module], Callable[[Tensor, Batch], Tensor], bool]] = {
    "cross entropy": (Tokens, lambda out, b: functional.cross_entropy(out.view(-1, CLASSES), b["ids"].view(-1)), True),
    "cross entropy, ignored": (
        Tokens,
        lambda out, b: functional.cross_entropy(out.flatten(0, 1), b["some"].flatten(), ignore_index=IGNORED),
        False,
    ),
    "cross entropy, classes second": (
        Tokens,
        lambda out, b: functional.cross_entropy(out.transpose(1, 2), b["some"], label_smoothing=0.1),
        False,
    ),
    "nn.CrossEntropyLoss": (Rows, lambda out, b: nn.CrossEntropyLoss(WEIGHTS)(out, b["label"]), False),
    "none, then mean": (
        Tokens,
        lambda out, b: functional.cross_entropy(out.flatten(0, 1), b["ids"].flatten(), reduction="none").mean(),
        True,
    ),
    "none, then masked mean": (
        Tokens,
        lambda out, b: (
            (functional.cross_entropy(out.mT, b["ids"], reduction="none") * b["mask"]).sum() / b["mask"].sum()
        ),
        False,
    ),
    "log_softmax, gather": (
        Tokens,
        lambda out, b: -out.log_softmax(-1).gather(-1, b["ids"].unsqueeze(-1)).mean(),
        True,
    ),
    "chosen by mask": (
        Tokens,
        lambda out, b: functional.cross_entropy(out[b["mask"]], b["ids"][b["mask"]]),
        False,
    ),
    "sum over count": (
        Tokens,
        lambda out, b: (
            functional.cross_entropy(out.flatten(0, 1), b["some"].flatten(), reduction="sum")
            / (b["some"] != IGNORED).sum()
        ),
        False,
    ),
    "sum over rows": (Tokens, lambda out, b: ((out - b["floats"]) ** 2).sum() / len(out), True),
    "sum": (Rows, lambda out, b: functional.cross_entropy(out, b["label"], reduction="sum"), False),
    "squares": (Tokens, lambda out, b: ((out - b["floats"]) ** 2).mean(), True),
    "mse": (Numbers, lambda out, b: functional.mse_loss(out, b["number"]), True),
    "huber": (Numbers, lambda out, b: nn.HuberLoss(delta=0.5)(out, b["number"]), True),
    "smooth l1": (Tokens, lambda out, b: functional.smooth_l1_loss(out, b["floats"], beta=0.3), True),
    "bce": (Tokens, lambda out, b: functional.binary_cross_entropy(out.sigmoid(), b["floats"]), True),
    "bce with logits": (
        Rows,
        lambda out, b: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)(out, functional.one_hot(b["label"], CLASSES).to(out)),
        True,
    ),
    "kl": (
        Rows,
        lambda out, b: functional.kl_div(out.log_softmax(-1), b["floats"][:, 0].softmax(-1), reduction="batchmean"),
        True,
    ),
    "normal distribution": (
        Numbers,
        lambda out, b: -torch.distributions.Normal(out, 0.5).log_prob(b["number"]).mean(),
        True,
    ),
    "policy gradient": (
        Rows,
        lambda out, b: (
            -(torch.distributions.Categorical(logits=out).log_prob(b["label"]) * b["number"]).mean()
            - 0.1 * torch.distributions.Categorical(logits=out).entropy().mean()
        ),
        True,
    ),
    "stream": (Plain, lambda out, b: (out.flatten(1).norm(dim=1) - b["number"]).abs().mean(), True),
    "largest logit": (Tokens, lambda out, b: out.amax((1, 2)).sub(b["number"]).square().mean(), True),
    "batch statistics": (Rows, lambda out, b: (out - out.mean(0)).pow(2).mean() + out.sum() * 0.1, False),  # noqa: ARG005
    "contrastive": (Rows, lambda out, b: functional.cross_entropy(out @ out.T, torch.arange(len(out))), False),  # noqa: ARG005
    "z loss": (
        Tokens,
        lambda out, b: (
            functional.cross_entropy(out.flatten(0, 1), b["ids"].flatten()) + 1e-2 * out.logsumexp(-1).square().mean()
        ),
        True,
    ),
    "root of the mean": (Numbers, lambda out, b: (out - b["number"]).square().mean().sqrt(), False),
}
for _name, (_head, _loss, _by_rows) in OUTSIDE.items():
    outside(f"outside: {_name}", _head, by_rows=_by_rows)(_loss)


def pair_loss(results: Results, batch: Batch, model: nn.Module) -> Tensor:  # noqa: ARG001
    return functional.cosine_embedding_loss(results["out"], results["extra"], batch["signs"], margin=0.1)


def triplet_loss(results: Results, batch: Batch, model: nn.Module) -> Tensor:  # noqa: ARG001
    left, right = results["out"], results["extra"]
    return functional.triplet_margin_loss(left, right, -left.detach()) + (left * right).sum(-1).mean()


ENDINGS["outside: cosine embedding"] = Ending(Pair, pair_loss)
ENDINGS["outside: triplet"] = Ending(Pair, triplet_loss)


class Remembering(Tokens):
    """Keeps a part of the loss on itself, for the loop to read."""

    def forward(self, h: Tensor, targets: Batch | None = None) -> Results:  # noqa: ARG002
        self.aux_loss = h.pow(2).mean()
        self.last_hidden = h
        return {"out": self.out(h)}


def remembered(results: Results, batch: Batch, model: nn.Module) -> Tensor:
    loss = functional.cross_entropy(results["out"].flatten(0, 1), batch["ids"].flatten())
    return loss + 0.1 * model.head.aux_loss + 0.1 * model.head.last_hidden.abs().mean()


ENDINGS["outside: what a module keeps"] = Ending(Remembering, remembered)


def hooked(results: Results, batch: Batch, model: nn.Module) -> Tensor:
    """A loss on what a hook kept, as feature extractors do."""
    return functional.mse_loss(results["out"], batch["floats"]) + 0.1 * model.kept["hidden"].pow(2).mean()


ENDINGS["outside: what a hook kept"] = Ending(Tokens, hooked)


def gradient_penalty(results: Results, batch: Batch, model: nn.Module) -> Tensor:
    """A penalty on the gradient of the result by the input, as in WGAN-GP."""
    (slope,) = torch.autograd.grad(results["out"].sum(), model.given, create_graph=True)
    return functional.mse_loss(results["out"], batch["number"]) + (slope.flatten(1).norm(dim=1) - 1).square().mean()


ENDINGS["outside: gradient penalty"] = Ending(Numbers, gradient_penalty)


def globally(name: str, base: str, count: Callable[[Batch], Any]) -> None:
    ending = ENDINGS[base]
    ENDINGS[name] = Ending(
        ending.head,
        ending.loss,
        rule="batch",
        by_rows=False,
        globally=lambda loss, batch, grid: ff.global_mean(loss, count(batch), grid),
    )


globally("global_mean: cross entropy", "outside: cross entropy, ignored", lambda b: (b["some"] != IGNORED).sum())
globally("global_mean: masked", "outside: none, then masked mean", lambda b: b["mask"].sum())
globally("global_mean: squares", "outside: squares", lambda b: len(b["x"]))


# losses inside of the model


class Scored(nn.Module):
    """A head with a loss: what torch's functions compute is that of the whole batch."""

    def __init__(
        self, width: int, base: type[nn.Module], loss: Callable[[Results, Batch], Tensor], *, only: bool
    ) -> None:
        super().__init__()
        self.base, self.criterion, self.only = base(width), loss, only

    def forward(self, h: Tensor, targets: Batch | None = None) -> Results:
        results = self.base(h)
        if targets is None:
            return results
        loss = self.criterion(results, targets)
        return {"loss": loss} if self.only else {**results, "loss": loss}


INSIDE: dict[str, tuple[type[nn.Module], Callable[[Results, Batch], Tensor]]] = {
    "cross entropy": (
        Tokens,
        lambda r, b: functional.cross_entropy(r["out"].view(-1, CLASSES), b["some"].view(-1), ignore_index=IGNORED),
    ),
    "smoothed and weighted": (
        Tokens,
        lambda r, b: functional.cross_entropy(
            r["out"].flatten(0, 1), b["some"].flatten(), weight=WEIGHTS, label_smoothing=0.1
        ),
    ),
    "classes second": (Tokens, lambda r, b: nn.CrossEntropyLoss()(r["out"].permute(0, 2, 1), b["some"])),
    "rows": (Rows, lambda r, b: functional.cross_entropy(r["out"], b["label"])),
    "chosen by mask": (Tokens, lambda r, b: functional.cross_entropy(r["out"][b["mask"]], b["ids"][b["mask"]])),
    "nll": (Rows, lambda r, b: functional.nll_loss(r["out"].log_softmax(-1), b["label"], WEIGHTS)),
    "mse": (Tokens, lambda r, b: functional.mse_loss(r["out"], b["floats"])),
    "two": (
        Tokens,
        lambda r, b: (
            functional.cross_entropy(r["out"].flatten(0, 1), b["some"].flatten())
            + 0.3 * functional.l1_loss(r["out"].sigmoid(), b["floats"])
        ),
    ),
    "next token": (
        Tokens,
        lambda r, b: functional.cross_entropy(
            functional.pad(r["out"], (0, 0, 1, 0))[:, :-1].flatten(0, 1), b["some"].flatten()
        ),
    ),
    "bce": (Rows, lambda r, b: functional.binary_cross_entropy_with_logits(r["out"], b["floats"][:, 0])),
    "kl": (
        Rows,
        lambda r, b: functional.kl_div(r["out"].log_softmax(-1), b["floats"][:, 0].softmax(-1), reduction="batchmean"),
    ),
    "huber": (Numbers, lambda r, b: nn.HuberLoss()(r["out"], b["number"])),
    "cosine": (Pair, lambda r, b: functional.cosine_embedding_loss(r["out"], r["extra"], b["signs"])),
    "margin": (Rows, lambda r, b: functional.multi_margin_loss(r["out"], b["label"])),
    "gaussian": (Numbers, lambda r, b: nn.GaussianNLLLoss()(r["out"], b["number"], torch.ones_like(r["out"]))),
}
"""Losses of torch's with reduction="mean": over the whole batch."""
BY_HAND: dict[str, tuple[type[nn.Module], Callable[[Results, Batch], Tensor], bool]] = {
    "none, then mean": (
        Tokens,
        lambda r, b: functional.cross_entropy(r["out"].flatten(0, 1), b["ids"].flatten(), reduction="none").mean(),
        True,
    ),
    "none, then masked mean": (
        Tokens,
        lambda r, b: (
            (functional.cross_entropy(r["out"].mT, b["ids"], reduction="none") * b["mask"]).sum() / b["mask"].sum()
        ),
        False,
    ),
    "log_softmax, gather": (
        Tokens,
        lambda r, b: -torch.log_softmax(r["out"], -1).gather(2, b["ids"][..., None]).mean(),
        True,
    ),
    "squares": (Tokens, lambda r, b: (r["out"] - b["floats"]).pow(2).mean(), True),
    "squares over numel": (Tokens, lambda r, b: (r["out"] - b["floats"]).pow(2).sum() / r["out"].numel(), True),
    "sum": (Rows, lambda r, b: functional.cross_entropy(r["out"], b["label"], reduction="sum"), False),
    "sum over count": (
        Tokens,
        lambda r, b: (
            functional.cross_entropy(r["out"].flatten(0, 1), b["some"].flatten(), reduction="sum")
            / (b["some"] != IGNORED).sum()
        ),
        False,
    ),
    "normal distribution": (
        Numbers,
        lambda r, b: -torch.distributions.Normal(r["out"], 0.5).log_prob(b["number"]).mean(),
        True,
    ),
    "logits by hand": (
        Tokens,
        lambda r, b: (r["out"].logsumexp(-1) - (r["out"] * functional.one_hot(b["ids"], CLASSES)).sum(-1)).mean(),
        True,
    ),
    "each row": (
        Numbers,
        lambda r, b: sum((row - aim) ** 2 for row, aim in zip(r["out"], b["number"], strict=True)),
        False,
    ),
    "cosine by hand": (Pair, lambda r, b: (1 - (r["out"] * r["extra"]).sum(-1) * b["signs"]).mean(), True),
}
"""Losses that a model's own code divides: each place's own."""


def inside(
    base: type[nn.Module], loss: Callable[[Results, Batch], Tensor], *, only: bool = False
) -> Callable[[int], nn.Module]:
    return lambda width: Scored(width, base, loss, only=only)


for _name, (_head, _loss) in INSIDE.items():
    ENDINGS[f"inside: {_name}"] = Ending(inside(_head, _loss), inside=True, rule="batch", by_rows=False)
for _name, (_head, _loss, _by_rows) in BY_HAND.items():
    ENDINGS[f"inside, by hand: {_name}"] = Ending(inside(_head, _loss), inside=True, by_rows=_by_rows)
ENDINGS["inside: the loss alone"] = Ending(
    inside(*INSIDE["cross entropy"], only=True), inside=True, rule="batch", by_rows=False
)


class Tied(nn.Module):
    """Logits by the table of tokens, which the model hands over."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, h: Tensor, targets: Batch | None, table: Tensor) -> Results:
        logits = functional.linear(self.norm(h), table)
        if targets is None:
            return {"out": logits}
        loss = functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets["some"].view(-1))
        return {"out": logits, "loss": loss}


ENDINGS["inside: tied head"] = Ending(Tied, inside=True, rule="batch", by_rows=False, tokens=True)


class Contrastive(nn.Module):
    """Two views of each row, which must find each other among the rows of the batch."""

    def __init__(self, width: int, *, whole: bool) -> None:
        super().__init__()
        self.left, self.right, self.whole = nn.Linear(width, 6), nn.Linear(width, 6), whole
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, h: Tensor, targets: Batch | None = None) -> Results:
        left, right = (functional.normalize(layer(h.mean(1)), dim=-1) for layer in (self.left, self.right))
        if targets is None:
            return {"out": left}
        if self.whole:
            left_all, right_all = ff.whole_batch(left), ff.whole_batch(right)
        else:
            left_all, right_all = left, right
        logits = self.log_scale.exp() * left_all @ right_all.T
        aims = torch.arange(len(logits))
        return {
            "out": left,
            "loss": (functional.cross_entropy(logits, aims) + functional.cross_entropy(logits.T, aims)) / 2,
        }


ENDINGS["inside: contrastive"] = Ending(
    lambda width: Contrastive(width, whole=False), inside=True, rule="batch", by_rows=False, companions=True
)
ENDINGS["inside: contrastive, whole batch"] = Ending(
    lambda width: Contrastive(width, whole=True), inside=True, rule="batch", by_rows=False, whole=True
)


# penalties


def weights_outside(model: nn.Module) -> Tensor:
    return 1e-2 * sum(p.pow(2).sum() for p in model.parameters())


def squares_of_own(model: nn.Module, h: Tensor) -> Tensor:  # noqa: ARG001
    return model.own.pow(2).sum()


def squares_of_all(model: nn.Module, h: Tensor) -> Tensor:  # noqa: ARG001
    return sum(p.square().sum() for p in model.parameters() if p.requires_grad)


def absolute_of_children(model: nn.Module, h: Tensor) -> Tensor:  # noqa: ARG001
    return sum(module.weight.abs().sum() for module in model.modules() if isinstance(module, nn.Linear))


def orthogonal(model: nn.Module, h: Tensor) -> Tensor:  # noqa: ARG001
    w = next(module.weight for module in model.modules() if isinstance(module, nn.Linear))
    return (w @ w.T - torch.eye(len(w), dtype=w.dtype)).pow(2).mean()


def activations(model: nn.Module, h: Tensor) -> Tensor:  # noqa: ARG001
    return h.pow(2).mean()


def entropy(model: nn.Module, h: Tensor) -> Tensor:  # noqa: ARG001
    p = h.softmax(-1)
    return -(p * p.log()).sum(-1).mean()


def slopes(model: nn.Module, h: Tensor) -> Tensor:  # noqa: ARG001
    return (h[..., 1:] - h[..., :-1]).abs().mean() + functional.mse_loss(h, h.detach().roll(1, -1))


PENALTIES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "own weight": squares_of_own,
    "all weights": squares_of_all,
    "children's weights": absolute_of_children,
    "orthogonality": orthogonal,
    "activations": activations,
    "entropy": entropy,
    "slopes": slopes,
}
"""Computed inside the model, from its weights or from the stream. Where the loss is outside the model returns them."""
OF_WEIGHTS = ("own weight", "all weights", "children's weights", "orthogonality")
