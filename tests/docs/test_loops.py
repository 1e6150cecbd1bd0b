"""The loops that people have, each an example: its losses are those of one plain process."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from fourfold.data.sampling import place_sampler
from fourfold.grid import Shape
from harness import as_torchrun, grid_of

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SHAPE = Shape(x=2, data=2)
"""One for all that steps DTensors: torch takes seconds to derive for each mesh how its operations are cut."""
CLIPPED = ("accelerate_loop", "fabric_loop", "hugging_face_trainer")
"""By torch's own clip_grad_norm_."""
TOLERANCE = 1e-5
"""fp32 rounds at 6e-8; a few steps of Adam, which divides small gradients by their size, let that grow."""


def one_layer(**sizes: Any) -> Any:
    """Instead of LlamaConfig: torch takes half a second for each parameter to derive how clipping is cut."""
    from transformers import LlamaConfig

    return LlamaConfig(**sizes | {"num_hidden_layers": 1})


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if name in CLIPPED:
        module.LlamaConfig = one_layer  # type: ignore[attr-defined]
    return module


def on_ranks(name: str, shape: Shape, *args: Any) -> Any:
    with as_torchrun():
        found = example(name).train(grid_of(shape), *args)
    if name in ("accelerate_loop", "hugging_face_trainer"):
        from accelerate import PartialState

        assert PartialState().num_processes == shape.world  # it knows of the others, and yet wraps nothing
    return found


def check(ranks: Callable, name: str, shape: Shape, plain: list[float], *args: Any) -> None:
    for losses in ranks(4).run(on_ranks, name, shape, *args):
        assert losses == pytest.approx(plain, rel=TOLERANCE)
    assert plain[-1] < plain[0]


def step(model: Any, optimizer: torch.optim.Optimizer, losses: list[Tensor]) -> None:
    """A step on the mean of the losses."""
    (sum(losses) / len(losses)).backward()  # type: ignore[attr-defined]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("shape", [Shape(y=2, z=2), SHAPE], ids=str)
def test_own_loop(ranks, shape: Shape, tmp_path: Path) -> None:
    """And once more from its checkpoint, with two steps more."""
    told = example("own_loop")
    model, found = told.model(), []
    optimizer = adamw(model)
    for number in range(told.STEPS + 2):
        loss = model(*told.batch(number))
        step(model, optimizer, [loss])
        found.append(loss.item())
    check(ranks, "own_loop", shape, found[: told.STEPS], tmp_path / "last")
    for losses in ranks(4).run(resumed_own_loop, SHAPE, tmp_path / "last", told.STEPS + 2):
        assert losses == pytest.approx(found[told.STEPS :], rel=TOLERANCE)


def resumed_own_loop(shape: Shape, last: Path, steps: int) -> list[float]:
    told = example("own_loop")
    told.STEPS = steps  # type: ignore[attr-defined]
    return told.train(grid_of(shape), last)


def test_accelerate_loop(ranks) -> None:
    told = example("accelerate_loop")
    model, found = told.model(), []
    optimizer = adamw(model)
    rows = told.dataset()
    loader = DataLoader(rows, batch_size=told.ROWS, sampler=DistributedSampler(rows, 1, 0))
    batches = iter(loader)
    while micro_steps := list(islice(batches, told.MICRO_STEPS)):
        losses = [model(input_ids=batch, labels=batch).loss for batch in micro_steps]
        step(model, optimizer, losses)
        found += [loss.item() for loss in losses]
    check(ranks, "accelerate_loop", SHAPE, found)


def test_fabric_loop(ranks) -> None:
    told = example("fabric_loop")
    model, found = told.model(), []
    optimizer = adamw(model)
    for batch in DataLoader(told.dataset(), batch_size=told.ROWS):
        loss = model(input_ids=batch, labels=batch).loss
        step(model, optimizer, [loss])
        found.append(loss.item())
    check(ranks, "fabric_loop", SHAPE, found)


def test_lora(ranks, tmp_path: Path) -> None:
    from peft import PeftModel

    told = example("lora")
    model, found = told.model(), []
    optimizer = adamw(model)
    for number in range(told.STEPS):
        rows = told.batch(number)
        loss = model(input_ids=rows, labels=rows).loss
        step(model, optimizer, [loss])
        found.append(loss.item())
    check(ranks, "lora", SHAPE, found, str(tmp_path))
    saved = PeftModel.from_pretrained(told.model().unload(), tmp_path)
    assert saved(input_ids=rows, labels=rows).loss.item() == pytest.approx(
        model(input_ids=rows, labels=rows).loss.item(), rel=TOLERANCE
    )


def test_hugging_face_trainer(ranks, tmp_path: Path) -> None:
    """Accumulation over rows with unlike numbers of targets, clipping, evaluation, and what is saved."""
    from transformers import LlamaForCausalLM, Trainer

    told = example("hugging_face_trainer")

    class Plain(Trainer):
        def get_train_dataloader(self) -> DataLoader:
            rows = DistributedSampler(self.train_dataset, 1, 0, seed=self.args.seed)
            return DataLoader(self.train_dataset, batch_size=8, sampler=rows, collate_fn=self.data_collator)

    args = told.arguments(str(tmp_path / "plain"), rows=8)
    trainer = Plain(told.model(), args, train_dataset=told.dataset(), eval_dataset=told.dataset()[:8])
    trainer.train()
    for history in ranks(4).run(on_ranks, "hugging_face_trainer", SHAPE, str(tmp_path)):
        for kind in ("loss", "grad_norm", "eval_loss"):
            assert logged(history, kind) == pytest.approx(logged(trainer.state.log_history, kind), rel=TOLERANCE), kind
    rows = trainer.data_collator(told.dataset()[:8])
    saved = LlamaForCausalLM.from_pretrained(tmp_path)(**rows).loss.item()
    assert saved == pytest.approx(logged(history, "eval_loss")[-1], rel=TOLERANCE)


def logged(history: list[dict[str, Any]], kind: str) -> list[float]:
    found = [float(entry[kind]) for entry in history if kind in entry]
    assert found
    return found


def test_places_read_together_what_one_process_reads(ranks) -> None:
    for shape in (Shape(y=2, z=2), SHAPE, Shape(z=2, data=2)):
        for own, places in ranks(4).run(rows_read, shape):
            batches = list(torch.utils.data.BatchSampler(DistributedSampler(range(32), 1, 0, seed=3), 8, False))  # type: ignore[arg-type]
            assert [sorted(rows) for rows in zip_places(places)] == [sorted(rows) for rows in batches]
            assert places[(0, 0)] != places[max(places)]
            assert own in places.values()


def zip_places(places: dict[tuple[int, int], list[list[int]]]) -> list[list[int]]:
    return [[row for part in parts for row in part] for parts in zip(*places.values(), strict=True)]


def rows_read(shape: Shape) -> tuple[list[list[int]], dict[tuple[int, int], list[list[int]]]]:
    """This rank's batches, and those of every place."""
    grid = grid_of(shape)
    rows = 8 // (grid.size("z") * grid.size("data"))
    own = list(torch.utils.data.BatchSampler(place_sampler(range(32), grid, seed=3), rows, False))  # type: ignore[arg-type]
    everyone: list[Any] = [None] * 4
    torch.distributed.all_gather_object(everyone, ((grid.coords["data"], grid.coords["z"]), own))
    return own, dict(everyone)
