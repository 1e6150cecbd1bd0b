"""Going on from a checkpoint, on the grid that wrote it or on any other."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from fourfold.checkpoint.read import read_tensors
from fourfold.checkpoint.record import Record, require_same_names
from fourfold.checkpoint.training import (
    OPTIMIZER,
    RANDOM,
    fresh_optimizer_tensors,
    give_to,
    parameters_with_state,
    random_tensors,
    restore_random,
)
from fourfold.checkpoint.weights import weights_of
from fourfold.checkpoint.write import Held, Tensors
from fourfold.optim import AdamW


def load_training(folder: str | os.PathLike[str], model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """Give model and optimizer what a checkpoint holds, and return its `state`; all ranks call it.

    All of it is verified on all ranks before anything changes. A checkpoint without the optimizer's state (imported
    weights) may have another dtype and leaves the optimizer fresh. Random states are those of the ranks on the same
    grid; on another one they stay as they are.
    """
    grid = optimizer.gradients.grid
    chosen: dict[str, Held] = {}

    def choose(record: Record) -> Tensors:
        with_state = parameters_with_state(list(record.tensors))
        chosen.update(weights_of(model))
        chosen.update(fresh_optimizer_tensors(optimizer, with_state))
        continues = {name: None for name in record.tensors if not name.startswith(RANDOM)}
        require_same_names(chosen, continues, folder)
        if with_state:
            _require_same_dtypes(chosen, record, folder)
        if record.shape == grid.shape:
            chosen.update({name: held for name, held in random_tensors(grid).items() if _fits(held, record, name)})
        return chosen

    record = read_tensors(grid, folder, choose)
    give_to(optimizer, {name: held for name, held in chosen.items() if name.startswith(OPTIMIZER)})
    restore_random(chosen, grid)
    return record.state


def _require_same_dtypes(tensors: Tensors, record: Record, folder: object) -> None:
    for name, held in tensors.items():
        if record.tensors[name].dtype != held.local.dtype:
            raise ValueError(
                f"{name!r} is {record.tensors[name].dtype} in {folder} and {held.local.dtype} here; go on with the "
                "dtype of the saved run"
            )


def _fits(held: Held, record: Record, name: str) -> bool:
    """Whether the state of a generator is one of this version of torch."""
    return name in record.tensors and record.tensors[name].shape == held.shape
