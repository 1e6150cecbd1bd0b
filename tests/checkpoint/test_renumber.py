"""Renumbered checkpoints: the same function, the same training, bit for bit the same rows, on every grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from fourfold.checkpoint.format import RANDOM, TensorFile, TensorType, read_record
from fourfold.checkpoint.load import read_full_tensor, verify_checkpoint
from fourfold.checkpoint.renumber import RENUMBERED, renumber
from fourfold.optim import AdamW
from fourfold.shape import Shape
from harness import grid_of
from mixtures import batch, mixture

CONFIG = mixture(
    layers=3, experts=8, top_k=3, dense_layers=1, shared_hidden=24, bias_rate=0.05, aux=0.1,
    score="sigmoid", groups=4, top_groups=2,
)  # fmt: skip
ORDERS = {1: [6, 7, 1, 0, 3, 2, 4, 5], 2: [4, 5, 0, 1, 7, 6, 3, 2]}
"""Other numbers of the experts of both mixtures, which leave groups of two together."""


def made(shape: Shape) -> tuple[ff.models.Transformer, AdamW]:
    model = ff.models.build(CONFIG, grid_of(shape), dtype=torch.float64, seed=5)
    return model, AdamW(model, lr=1e-2)


def take_steps(model: ff.models.Transformer, optimizer: AdamW, steps: int) -> list[float]:
    tokens, targets = (ff.local_rows(whole, model.grid) for whole in batch())
    losses = []
    for _ in range(steps):
        if model.grid.size("pipe") > 1:
            loss = ff.forward_backward(model, [(tokens, targets)])
        else:
            loss = model(tokens, targets)
            loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def saved(shape: Shape, folder: Path) -> None:
    model, optimizer = made(shape)
    take_steps(model, optimizer, 2)
    ff.save(folder, model, optimizer, extra={"mine": 1})


def goes_on(shape: Shape, folder: Path) -> tuple[Tensor, list[float], Tensor]:
    """Return the outputs of a checkpoint, the losses of three steps from it, and how often experts were used."""
    model, optimizer = made(shape)
    assert ff.load(folder, model, optimizer) == {"mine": 1}
    with torch.no_grad():
        out = model(ff.local_rows(batch()[0], model.grid))
    model.expert_load()
    return out, take_steps(model, optimizer, 3), model.expert_load()


GRIDS = [
    (Shape(x=2, z=2), Shape(z=4, expert=4)),
    (Shape(z=4, expert=2, ez=2), Shape()),
    (Shape(), Shape(y=2, pipe=2)),
    (Shape(z=2, pipe=2), Shape(x=2, data=2, expert=2, ex=2)),
]


@pytest.mark.slow
@pytest.mark.parametrize("grids", GRIDS, ids=lambda grids: "-".join(map(str, grids)))
def test_a_renumbered_checkpoint_trains_as_the_original(ranks: Any, grids: tuple[Shape, Shape], tmp_path: Path) -> None:
    before, after = grids
    original, copy = tmp_path / "original", tmp_path / "copy"
    ranks(before.world).run(saved, before, original)
    sizes: list[int] = []
    state = renumber(original, copy, ORDERS, sizes.append)
    record, copied = read_record(original), verify_checkpoint(copy)
    assert sum(sizes) == sum(info.nbytes for name in record.files for info in _tensors(original / name))
    assert copied.state == state
    assert state[RENUMBERED] == [{"from": "original", "orders": {str(block): own for block, own in ORDERS.items()}}]
    assert (copied.grid, copied.tensors) == (record.grid, record.tensors)
    moved = 0
    for name in record.tensors:
        old, new = read_full_tensor(original, record, name), read_full_tensor(copy, copied, name)
        block = next((block for block in ORDERS if f"layers.{block}.mlp." in name and ".shared." not in name), None)
        if block is not None and old.dim():
            old, moved = old[ORDERS[block]], moved + 1
        assert old.equal(new), name
    assert moved == 2 * (5 + 2 * 4)  # five tensors of each mixture, and two moments of all but the bias
    for (out, losses, load), (wanted, others, used) in zip(
        ranks(after.world).run(goes_on, after, copy), ranks(after.world).run(goes_on, after, original), strict=True
    ):
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
        assert losses == pytest.approx(others, abs=1e-10)
        for block, order in ORDERS.items():
            assert load[block].equal(used[block][order])


def _tensors(path: Path) -> list[TensorType]:
    with TensorFile(path) as file:
        return list(file.tensors.values())


def test_what_has_been_renumbered_can_be_renumbered_back(ranks: Any, tmp_path: Path) -> None:
    ranks(1).run(saved, Shape(), tmp_path / "0")
    back = {block: torch.tensor(order).argsort().tolist() for block, order in ORDERS.items()}
    renumber(tmp_path / "0", tmp_path / "1", ORDERS)
    state = renumber(tmp_path / "1", tmp_path / "2", back)
    assert [each["from"] for each in state[RENUMBERED]] == ["0", "1"]
    (first, last) = ((tmp_path / name / "rank-00000.safetensors").read_bytes() for name in "02")
    assert first == last
    assert any(name.startswith(RANDOM) for name in read_record(tmp_path / "2").tensors)


@pytest.mark.parametrize(
    ("orders", "said"),
    [
        ({0: [0, 1]}, "is no tensor with a row for each of 2 experts; only router.weight, router.bias, gate, up, down"),
        ({1: [1, 0]}, "of shape (8, 24, 24) is no tensor with a row for each of 2 experts"),
        ({1: ORDERS[1], 7: ORDERS[1]}, "has no experts in 'layers.7'; give the run that the counts are of"),
    ],
)
def test_another_model_is_refused(ranks: Any, tmp_path: Path, orders: dict[int, list[int]], said: str) -> None:
    ranks(1).run(saved, Shape(), tmp_path / "0")
    with pytest.raises(ValueError) as refused:
        renumber(tmp_path / "0", tmp_path / "1", orders)
    assert said in str(refused.value)
    assert not (tmp_path / "1").exists()
