"""Losses as people write them: gradients are averaged over places, so on every grid they are those of one process.

Each way is a function of (model, tokens, targets) and gives the loss; the model is a module of one's own, a Llama of
transformers, or a reference model. All places have equally many targets, so the average is the whole batch's gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from families import Widened
from fourfold.grid import Grid, Shape
from fourfold.params import local_of
from fourfold.wrap import whole_tensors
from harness import grid_of, join_shards
from share import share

VOCAB = 23


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, 12), nn.Linear(12, VOCAB)
        self.inside: Callable[..., Tensor] | None = None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        h = self.hidden(self.table(tokens))
        if self.inside is not None:
            return self.inside(self, h, self.head(h), targets)
        return self.head(h)


def flat(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.flatten(0, -2), targets.flatten()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(logits, targets))


def none_then_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(logits, targets), reduction="none").mean()


def sum_over_count(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(logits, targets), reduction="sum") / targets.numel()


def gathered_log_probabilities(logits: Tensor, targets: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()


def squares(logits: Tensor, targets: Tensor) -> Tensor:
    return ((logits - targets[..., None] / VOCAB) ** 2).mean()


def module(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(label_smoothing=0.1)(*flat(logits, targets))


WAYS = {
    way.__name__: way
    for way in (cross_entropy, none_then_mean, sum_over_count, gathered_log_probabilities, squares, module)
}
Loss = Callable[[Any, Tensor, Tensor], Tensor]


def outside(way: str) -> Loss:
    return lambda model, tokens, targets: WAYS[way](model(tokens), targets)


def inside(way: str, penalty: str = "") -> Loss:
    def of_batch(model: Any, h: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        loss = WAYS[way](logits, targets)
        if penalty == "weight":
            return loss + 0.1 * model.hidden.weight.pow(2).sum()
        return loss + 0.1 * h.pow(2).mean() if penalty else loss

    def loss(model: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        model.inside = of_batch
        return model(tokens, targets)

    return loss


def with_weights(loss: Loss) -> Loss:
    """Penalties outside of the model: on one weight, and on all parameters."""
    return lambda model, tokens, targets: (
        loss(model, tokens, targets)
        + 0.1 * next(model.parameters()).pow(2).sum()
        + 0.01 * sum(p.abs().sum() + p.norm() for p in model.parameters())
    )


OWN: dict[str, Loss] = {
    **{f"outside: {way}": outside(way) for way in WAYS},
    **{f"inside: {way}": inside(way) for way in WAYS},
    "outside and weights": with_weights(outside("cross_entropy")),
    "inside and weights": with_weights(inside("cross_entropy")),
    "a weight inside": inside("cross_entropy", "weight"),
    "activations inside": inside("cross_entropy", "activations"),
    "a weight alone": lambda model, tokens, targets: (
        0 * cross_entropy(model(tokens), targets) + model.head.weight.square().mean()
    ),
}
HUGGING_FACE: dict[str, Loss] = {
    "labels": lambda model, tokens, _: model(input_ids=tokens, labels=tokens).loss,
    "logits": lambda model, tokens, targets: cross_entropy(model(input_ids=tokens).logits, targets),
    "logits beside labels": lambda model, tokens, targets: sum_over_count(
        model(input_ids=tokens, labels=tokens).logits, targets
    ),
}
REFERENCE: dict[str, Loss] = {
    "own": lambda model, tokens, targets: model(tokens, targets),
    "and weights": with_weights(lambda model, tokens, targets: model(tokens, targets)),
}


def build(kind: str, grid: Grid | None) -> Any:
    torch.manual_seed(0)
    if kind == "reference":
        return ff.models.build("llama-tiny", grid or Grid.alone(), dtype=torch.float64)
    if kind == "own":
        model: Any = Own().double()
    else:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = dict(hidden_size=24, intermediate_size=32, num_attention_heads=4, num_hidden_layers=1)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)).double()
    return model if grid is None else ff.parallelize(model, grid)


def gradients_of(kind: str, model: Any, grid: Grid | None) -> dict[str, Tensor]:
    if kind == "reference":
        return {
            name: join_shards(local_of(p.grad), spec, model.grid)
            for name, (p, spec) in model.gradients.parameters.items()
        }
    if grid is None:
        return {name: p.grad for name, p in model.named_parameters()}
    return whole_tensors(model, "gradient")


def errors(kind: str, shape: Shape) -> dict[str, float]:
    """The largest error of any gradient, of each way to write a loss; of two passes that add up."""
    grid, found = grid_of(shape), {}
    ways = {"own": OWN, "hugging face": HUGGING_FACE, "reference": REFERENCE}[kind]
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(VOCAB, (2, 12, 5), generator=generator)
    one, model = build(kind, None), build(kind, grid)
    for name, way in ways.items():
        for side, own in ((one, lambda rows: rows), (model, lambda rows: ff.local_rows(rows, grid))):
            for _ in range(2):  # onto what is complete: nothing may be divided twice
                with Widened():  # transformers computes norms and losses in fp32
                    loss = way(side, own(tokens), own(targets))
                loss.backward()
        wanted, gradients = gradients_of(kind, one, None), gradients_of(kind, model, grid)
        scale = max(gradient.abs().max() for gradient in wanted.values())
        found[name] = max(((gradients[own] - g).abs().max() / scale).item() for own, g in wanted.items())
        one.zero_grad()
        model.zero_grad()
        for side in (one, model):
            side.inside = None
    return found


SHAPES = [Shape(z=2), Shape(x=2, z=2), Shape(data=3), Shape(z=2, data=2), Shape(y=2, data=2), Shape(z=3), Shape(x=2)]
CASES = [(kind, shape) for kind in ("own", "hugging face", "reference") for shape in SHAPES]


@pytest.mark.parametrize(("kind", "shape"), share(CASES, 23), ids=str)
def test_losses_have_the_gradient_of_one_process(ranks, kind: str, shape: Shape) -> None:
    for found in ranks(shape.world).run(errors, kind, shape, timeout=120):
        wrong = {name: error for name, error in found.items() if not error < 1e-12}
        assert not wrong, wrong


# sums over rows


def ctc(logits: Tensor, targets: Tensor) -> Tensor:
    rows, length = logits.shape[:2]
    lengths = torch.full((rows,), length), torch.full((rows,), 2)
    return functional.ctc_loss(logits.log_softmax(-1).transpose(0, 1), targets[:, :2] + 1, *lengths, reduction="sum")


def sum_of_rows(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(*flat(logits, targets), reduction="sum")


def sum_by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits - targets[..., None] / VOCAB).square().sum()


SUMS = {way.__name__: way for way in (ctc, sum_of_rows, sum_by_hand)}


def sums(shape: Shape) -> dict[str, Any]:
    """What is said of a loss that is a sum, and the error of its gradient after the way out; what is said of others."""
    grid, found = grid_of(shape), {}
    generator = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(1, VOCAB - 1, (2, 12, 5), generator=generator)
    for name, way in {**SUMS, **WAYS}.items():
        one, model = build("own", None), build("own", grid)
        one.inside = model.inside = lambda m, h, logits, targets, way=way: way(logits, targets)  # noqa: ARG005
        one(tokens, targets).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):  # the second pass says nothing
                loss = model(ff.local_rows(tokens, grid), ff.local_rows(targets, grid))
        (loss * (grid.shape.places if name in SUMS else 1)).backward()
        gradients = whole_tensors(model, "gradient")
        scale = max(p.grad.abs().max() for p in one.parameters())
        error = max(((gradients[own] - p.grad).abs().max() / scale).item() for own, p in one.named_parameters())
        said = [str(warning.message) for warning in caught]
        found[name] = error, [text for text in said if "is a sum over the rows" in text]
    return found


@pytest.mark.parametrize("shape", share([Shape(z=2), Shape(x=2, data=2)], 2), ids=str)
def test_a_loss_that_is_a_sum_over_rows_is_named(ranks, shape: Shape) -> None:
    for rank, found in enumerate(ranks(shape.world).run(sums, shape)):
        for name, (error, said) in found.items():
            assert error < 1e-12, name
            assert len(said) == (name in SUMS and rank == 0), (name, said)
            assert all("or multiply it by 2;" in text for text in said), said
