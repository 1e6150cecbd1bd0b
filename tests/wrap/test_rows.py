"""Models whose rows need each other are refused in the first step; with `ff.whole_batch` they are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.wrap import whole_tensors
from harness import grid_of
from share import share

TOLERANCE = 1e-9
ROWS = 8


class Model(nn.Module):
    """Two layers around what a case does with the rows; `gathers`: written with `ff.whole_batch`."""

    def __init__(self, body: Callable[[Any, Tensor, Callable], Any], gathers: bool) -> None:
        super().__init__()
        self.a, self.b, self.bn, self.drop = nn.Linear(6, 8), nn.Linear(8, 6), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.mix = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=False)
        self.body, self.gathers, self.calls = body, gathers, 0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:  # noqa: ARG002
        self.calls += 1
        with torch.no_grad():
            self.seen += 1
        return self.body(self, x, ff.whole_batch if self.gathers else lambda rows: rows)


def centred(m: Any, x: Tensor, gather: Callable) -> Tensor:
    h = m.a(x)
    everyones = gather(h)
    return m.b((h - everyones.mean(0)) / everyones.std(0))


def contrastive(m: Any, x: Tensor, gather: Callable) -> Tensor:
    u, v = gather(m.b(m.a(x))), gather(x.tanh())
    return functional.cross_entropy(u @ v.t(), torch.arange(len(u)))


def contrastive_by_hand(m: Any, x: Tensor, gather: Callable) -> dict[str, Tensor]:
    u = functional.normalize(gather(m.a(x)), dim=-1)
    return dict(loss=-(u @ u.t()).log_softmax(-1).diagonal().mean())


def spread_of_the_batch(m: Any, x: Tensor, gather: Callable) -> tuple[Tensor, Tensor]:
    h = m.b(m.a(x))
    return h, h.square().mean() + gather(h).var(0).sum()


def normalized_loss(m: Any, x: Tensor, gather: Callable) -> Tensor:
    return gather(m.b(m.a(x))).square().mean().sqrt()


NEEDS = (centred, contrastive, contrastive_by_hand, spread_of_the_batch, normalized_loss)


def batch_norm(m: Any, x: Tensor, _: Callable) -> Tensor:
    return m.b(m.bn(m.a(x)))


def dropped(m: Any, x: Tensor, _: Callable) -> Tensor:
    return m.b(m.drop(m.a(x)))


def noisy(m: Any, x: Tensor, _: Callable) -> Tensor:
    return m.b(m.a(x) + torch.randn_like(x[..., :1]))


def sequence_first(m: Any, x: Tensor, _: Callable) -> Tensor:
    return m.mix(x.view(-1, 1, 6).expand(-1, 3, -1).transpose(0, 1)).transpose(0, 1).flatten(1)


def summed(m: Any, x: Tensor, _: Callable) -> Tensor:
    return m.b(m.a(x)).square().sum()


def with_a_metric(m: Any, x: Tensor, _: Callable) -> tuple[Tensor, Tensor]:
    loss = m.b(m.a(x)).square().mean()
    return loss, loss.detach().exp()


def one_number_of_rows(m: Any, x: Tensor, _: Callable) -> Tensor:
    return m.b(m.a(x.view(ROWS // 2, 6)))


FINE = (batch_norm, dropped, noisy, sequence_first, summed, with_a_metric, one_number_of_rows)
BODIES = {body.__name__: body for body in (*NEEDS, *FINE)}


def build(body: str, gathers: bool) -> nn.Module:
    torch.manual_seed(0)
    return Model(BODIES[body], gathers).double()


def loss_of(output: Any) -> Tensor:
    """The model's own scalar, or one made of its output."""
    if isinstance(output, dict):
        return output["loss"]
    if isinstance(output, tuple):
        return next(value for value in output if not value.dim())
    return output if not output.dim() else (output * torch.ones_like(output).cumsum(-1)).square().mean()


def whole_rows(step: int = 0) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(shape: Shape, body: str, gathers: bool) -> dict[str, Any]:
    """The largest error of two steps beside one process, or what was said."""
    grid = grid_of(shape)
    model = ff.parallelize(build(body, gathers), grid)
    try:
        losses = []
        for step in range(2):
            loss = loss_of(model(ff.local_rows(whole_rows(step), grid)))
            loss.backward()
            losses.append(loss.item())
    except RuntimeError as error:
        return dict(said=str(error))
    found = dict(losses=losses, calls=model.calls, seen=model.seen.item(), explained=ff.explain(model))
    return found | dict(gradients={name: g.numpy() for name, g in whole_tensors(model, "gradient").items()})


def alone(body: str) -> tuple[list[float], dict[str, Tensor]]:
    """One process, where `whole_batch` has nothing to gather; gradients of both steps together."""
    model = build(body, True)
    losses = []
    for step in range(2):
        loss = loss_of(model(whole_rows(step)))
        loss.backward()
        losses.append(loss.item())
    return losses, {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


SHAPES = [Shape(z=2), Shape(data=2), Shape(x=2, z=2), Shape(z=2, data=2), Shape(y=2, data=2)]
CASES = [(body.__name__, shape) for body in NEEDS for shape in SHAPES]


@pytest.mark.parametrize(("body", "shape"), share(CASES, 9), ids=str)
def test_rows_that_need_each_other(ranks, body: str, shape: Shape) -> None:
    for found in ranks(shape.world).run(train, shape, body, False):
        assert "ff.whole_batch(tensor) in" in found.get("said", "nothing was said"), found
    losses, gradients = alone(body)
    ways = ranks(shape.world).run(train, shape, body, True)
    for step, loss in enumerate(losses):  # one outside of the model is each place's own
        assert abs(sum(found["losses"][step] for found in ways) / len(ways) - loss) < TOLERANCE
    for found in ways:
        for name, gradient in gradients.items():
            assert (torch.as_tensor(found["gradients"][name]) - gradient).abs().max() < TOLERANCE, name
        assert (found["calls"], found["seen"]) == (2, 2)  # the check leaves no trace


@pytest.mark.parametrize("body", [body.__name__ for body in FINE])
def test_rows_that_do_not_are_not_refused(ranks, body: str) -> None:
    for found in ranks(2).run(train, Shape(z=2), body, False):
        assert "said" not in found, found
        assert (found["calls"], found["seen"]) == (2, 2)
        unchecked = "could not be checked: the model does not run on other numbers" in found["explained"]
        assert unchecked == (body == "one_number_of_rows"), found["explained"]


def outside(shape: Shape) -> dict[str, float]:
    """A contrastive loss outside of the model: DDP's rule, or with `whole_batch` that of the whole batch."""
    grid, found = grid_of(shape), {}
    for name, gather in dict(whole=lambda rows: ff.whole_batch(rows, grid), local=lambda rows: rows).items():
        one, model = build("batch_norm", False), ff.parallelize(build("batch_norm", False), grid)
        contrast(model(ff.local_rows(whole_rows(), grid)), gather).backward()
        outputs = one(whole_rows())
        parts = [outputs] if name == "whole" else outputs.chunk(shape.places)
        torch.stack([contrast(part, lambda rows: rows) for part in parts]).mean().backward()
        gradients = whole_tensors(model, "gradient")
        found[name] = max(
            (gradients[own] - p.grad).abs().max().item() for own, p in one.named_parameters() if p.grad is not None
        )
    try:
        ff.whole_batch(whole_rows())
    except ValueError as error:
        found["said"] = float("ff.whole_batch(rows, grid)" not in str(error))
    return found


def contrast(rows: Tensor, gather: Callable) -> Tensor:
    everyones = gather(rows)
    return functional.cross_entropy(everyones @ everyones.t(), torch.arange(len(everyones)))


def test_whole_batch_outside_of_the_model(ranks) -> None:
    for found in ranks(4).run(outside, Shape(x=2, z=2)):
        assert set(found) == {"whole", "local", "said"} and max(found.values()) < TOLERANCE, found


def hugging_face(name: str, grid: Grid | None) -> tuple[float, dict[str, Any]]:
    import transformers

    torch.manual_seed(0)
    sizes = dict(hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
    text = dict(sizes, vocab_size=30, max_position_embeddings=8, projection_dim=24, eos_token_id=2)
    if name == "Siglip":
        text |= dict(projection_size=24)
    vision = dict(sizes, image_size=8, patch_size=4, projection_dim=24)
    options = dict(projection_dim=24)
    if name == "GroupViT":
        vision |= dict(depths=[1, 1, 1], num_hidden_layers=3, patch_size=2)
        vision |= dict(num_group_tokens=[8, 4, 0], num_output_groups=[8, 4, 4])
        options |= dict(projection_intermediate_dim=32)
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **options)
    model = getattr(transformers, f"{name}Model")(config).double()
    model.train(name != "GroupViT")  # which groups by random numbers in training
    generator = torch.Generator().manual_seed(0)
    batch = dict(
        input_ids=torch.randint(3, 30, (ROWS, 8), generator=generator).index_fill(1, torch.tensor(7), 2),
        pixel_values=torch.randn(ROWS, 3, 8, 8, generator=generator, dtype=torch.float64),
    )
    if grid is not None:
        model = ff.parallelize(model, grid)
        batch = {own: ff.local_rows(rows, grid) for own, rows in batch.items()}
    loss = model(**batch, return_loss=True).loss
    loss.backward()
    if grid is None:
        return loss.item(), {own: p.grad for own, p in model.named_parameters() if p.grad is not None}
    return loss.item(), {own: g.numpy() for own, g in whole_tensors(model, "gradient").items()}


def hugging_face_on(shape: Shape, name: str) -> tuple[float, dict[str, Any]]:
    return hugging_face(name, grid_of(shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), share([(n, s) for n in ("CLIP", "GroupViT", "Siglip") for s in SHAPES[1:4]], 4), ids=str
)
def test_contrastive_models_of_hugging_face(ranks, name: str, shape: Shape) -> None:
    loss, gradients = hugging_face(name, None)
    scale = max(gradient.abs().max() for gradient in gradients.values())
    for found, by_name in ranks(shape.world).run(hugging_face_on, shape, name, timeout=150):
        assert abs(found - loss) < TOLERANCE
        for own, gradient in gradients.items():
            assert (torch.as_tensor(by_name[own]) - gradient).abs().max() <= TOLERANCE * scale, own
