"""Inputs whose rows are no dim of one tensor, or that each place has padded to a length of its own."""

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

TOLERANCE = 1e-10


class Detector(nn.Module):
    """Takes a list of images of several sizes and one of their boxes, as torchvision's models do."""

    def __init__(self, body: Callable[..., Any]) -> None:
        super().__init__()
        self.conv, self.head, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4), body

    def forward(self, *args: Any) -> Any:
        return self.body(self, *args)


def one_by_one(m: Any, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One loss for each image."""
    found = [m.head(m.conv(image[None]).mean((2, 3)))[0] for image in images]
    each = [functional.l1_loss(a, target["boxes"].mean(0)) for a, target in zip(found, targets, strict=True)]
    return {"boxes": torch.stack(each).mean()}


def padded(m: Any, images: list[Tensor], targets: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
    sizes = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
    maps = m.conv(torch.stack([functional.pad(image, size) for image, size in zip(images, sizes, strict=True)]))
    found = m.head(
        torch.stack([a[:, : i.shape[1], : i.shape[2]].mean((1, 2)) for a, i in zip(maps, images, strict=True)])
    )
    wanted = torch.stack([target["boxes"].mean(0) for target in targets])
    return {"boxes": functional.l1_loss(found, wanted), "squares": (found - wanted).square().mean()}


def of_images_alone(m: Any, images: list[Tensor]) -> list[Tensor]:
    """Returns an entry for each image."""
    return [m.head(m.conv(image[None]).mean((2, 3)))[0].square().sum() for image in images]


def of_samples(m: Any, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return padded(m, [sample["image"] for sample in samples], samples)


def listed(body: Callable[..., Any], count: int = 4) -> tuple[list[Any], ...]:
    g = torch.Generator().manual_seed(0)
    images = [torch.randn(3, 4 + i, 6 - i % 2, generator=g, dtype=torch.float64) for i in range(count)]
    boxes = [{"boxes": torch.randn(1 + i, 4, generator=g, dtype=torch.float64)} for i in range(count)]
    if body is of_samples:
        return ([{"image": image, **box} for image, box in zip(images, boxes, strict=True)],)
    return (images,) if body is of_images_alone else (images, boxes)


def loss_of(output: Any) -> Tensor:
    return sum(output.values()) if isinstance(output, dict) else torch.stack(output).mean()  # type: ignore[return-value]


def place_of(grid: Grid, rows: int) -> slice:
    each, at = rows // grid.shape.places, grid.shape.row_place(grid.rank)
    return slice(at * each, (at + 1) * each)


def differences(shape: Shape) -> dict[str, Any]:
    grid, found = grid_of(shape), {}
    for body in (one_by_one, padded, of_images_alone, of_samples):
        torch.manual_seed(0)
        one = Detector(body).double()
        torch.manual_seed(0)
        model = ff.parallelize(Detector(body).double(), grid)
        for count in (4, 8):  # another number of images in a later step
            whole = listed(body, count)
            loss_of(one(*whole)).backward()
            loss_of(model(*(part[place_of(grid, count)] for part in whole))).backward()
        gradients = whole_tensors(model, "gradient")
        error = max((gradients[name] - p.grad).abs().max().item() for name, p in one.named_parameters())
        if not error <= TOLERANCE or (grid.shape.places > 1 and "an entry for each row" not in ff.explain(model)):
            found[body.__name__] = error, ff.explain(model)
    return found


class Tagger(nn.Module):
    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.table, self.up, self.head, self.mixes = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 11), mixes

    def forward(self, ids: Tensor, mask: Tensor, targets: Tensor) -> Tensor:
        h = torch.tanh(self.up(self.table(ids))) * mask[..., None]
        h = h - h.mean((0, 1)) if self.mixes else h
        return functional.cross_entropy(self.head(h).flatten(0, 1), targets.flatten(), ignore_index=0)


def with_padding(shape: Shape) -> dict[str, Any]:
    """Each place pads its rows to the longest of its own; a model that mixes rows is still refused."""
    grid, found = grid_of(shape), {}
    g = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 5, 2, 7])
    ids = torch.randint(1, 11, (4, 7), generator=g) * (torch.arange(7) < lengths[:, None])
    targets = torch.randint(1, 11, (4, 7), generator=g) * (torch.arange(7) < lengths[:, None])
    own = place_of(grid, 4)
    longest = int(lengths[own].max())
    for mixes in (False, True):
        torch.manual_seed(0)
        one = Tagger(mixes).double()
        torch.manual_seed(0)
        model = ff.parallelize(Tagger(mixes).double(), grid)
        one(ids, ids > 0, targets).backward()
        try:
            model(*(each[own][:, :longest] for each in (ids, ids > 0, targets))).backward()
        except RuntimeError as error:
            found[f"mixes={mixes}"] = str(error)
            continue
        gradients = whole_tensors(model, "gradient")
        found[f"mixes={mixes}"] = max(
            (gradients[name] - p.grad).abs().max().item() for name, p in one.named_parameters()
        )
        found["explained"] = ff.explain(model)
    return found


class Images(nn.Module):
    """Returns an entry for each image, of which rows have unequal numbers, as SmolVLM does."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.up, self.down, self.mixes = nn.Linear(6, 8), nn.Linear(8, 6), mixes

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.up(images))
        there = images.abs().sum(-1) > 0
        features = h[there] - (h[there].mean(0) if self.mixes else 0)
        return {"hidden": features, "loss": self.down((h * there[..., None]).sum(1)).square().mean()}


def with_images(shape: Shape) -> dict[str, Any]:
    grid, found = grid_of(shape), {}
    images = torch.randn(8, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    images[0, 1:] = images[5, 2] = images[6] = 0
    for mixes in (False, True):
        torch.manual_seed(0)
        one = Images(mixes).double()
        torch.manual_seed(0)
        model = ff.parallelize(Images(mixes).double(), grid)
        one(images)["loss"].backward()
        try:
            model(images[place_of(grid, 8)])["loss"].backward()
        except RuntimeError as error:
            found[f"mixes={mixes}"] = str(error)
            continue
        whole = whole_tensors(model, "gradient")
        found[f"mixes={mixes}"] = max((whole[name] - p.grad).abs().max().item() for name, p in one.named_parameters())
    return found


def test_results_may_have_an_entry_for_each_image(ranks) -> None:
    for found in ranks(2).run(with_images, Shape(z=2)):
        assert found["mixes=False"] <= TOLERANCE
        assert "depends on the other rows" in found["mixes=True"]


@pytest.mark.parametrize("shape", [Shape(z=2), Shape(data=2)], ids=str)
def test_lists_with_an_entry_for_each_row(ranks, shape: Shape) -> None:
    assert ranks(2).run(differences, shape) == [{}] * 2


def test_places_may_pad_their_rows_to_different_lengths(ranks) -> None:
    for found in ranks(2).run(with_padding, Shape(z=2)):
        assert found["mixes=False"] <= TOLERANCE and "could not be checked" not in found["explained"]
        assert "whole_batch" in found["mixes=True"]
