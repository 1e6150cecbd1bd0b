"""Training that is saved and loaded, for the tests of checkpoints and their soak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fourfold as ff
from fourfold.checkpoint.load import load_training
from fourfold.checkpoint.save import Saver
from fourfold.checkpoint.training_state import RANDOM, training_shards
from fourfold.grid import Grid, Shape
from fourfold.optim import AdamW
from fourfold.params import whole_over_pipe
from harness import grid_of

ROWS, SEQ = 8, 8
MODELS: dict[str, dict[str, Any]] = {
    "gpt-tiny": dict(layers=1, vocab=53, seq=SEQ),
    "llama-tiny": dict(layers=1, vocab=53, heads=8, kv_heads=4, head_dim=6),
    "moe-tiny": dict(layers=2, vocab=53, heads=8, kv_heads=4, head_dim=6, bias_rate=0.02),
}
SHAPES = [
    Shape(),
    Shape(x=2),
    Shape(z=2),
    Shape(data=2),
    Shape(x=2, y=2),
    Shape(z=2, data=2),
    Shape(x=2, z=2, order=("z", "x", "y", "data")),
    Shape(data=4),
    Shape(y=2, z=2, data=2),
    Shape(x=2, y=2, z=2),
    Shape(z=8),
    Shape(x=2, data=4, order=("data", "x", "y", "z")),
    Shape(pipe=2),
    Shape(x=2, pipe=2),
    Shape(data=2, pipe=2, order=("pipe", "x", "y", "z", "data")),
    Shape(y=2, z=2, pipe=2),
]
"""Grids of 1 to 8 ranks."""


def made(
    name: str, grid: Grid, *, sharded: bool, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[ff.models.Transformer, AdamW]:
    policy = ff.Policy(shard_optimizer=sharded)
    config = ff.models.config(name, **MODELS[name])
    model = ff.models.build(config, grid, policy=policy, seed=seed, dtype=dtype)
    return model, AdamW(model, 1e-2)


def take(model: ff.models.Transformer, optimizer: AdamW, step: int) -> float:
    """One step on the samples of that step, the same on every grid."""
    grid = model.grid
    tokens = torch.randint(0, 53, (ROWS, SEQ + 1), generator=torch.Generator().manual_seed(step))
    mine = tokens.chunk(grid.size("data") * grid.size("z"))[grid.coords["data"] * grid.size("z") + grid.coords["z"]]
    loss = model(mine[:, :-1], mine[:, 1:])
    loss.backward()
    optimizer.clip_and_step(1.0)
    optimizer.zero_grad()
    return loss.item()


def everything(model: ff.models.Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters and optimizer state, joined."""
    shards = {
        name: (held.local, held.storage, held.shape)
        for name, held in training_shards(model, optimizer).items()
        if not name.startswith(RANDOM)
    }
    return {name: whole.clone() for name, whole in whole_over_pipe(shards, model.grid)}


def trained(root: Path, name: str, shape: Shape, sharded: bool, steps: int, save_at: int) -> dict[str, Any]:
    """Train and save after one of the steps: the losses, and what was to be saved."""
    model, optimizer = made(name, grid_of(shape), sharded=sharded)
    saver = Saver(model.grid, root)
    losses, saved = [], {}
    for step in range(1, steps + 1):
        losses.append(take(model, optimizer, step))
        if step == save_at:
            saved = everything(model, optimizer)
            saver.save(step, model, optimizer, {"told": "by the test"})
    saver.wait()
    return {"losses": losses, "saved": saved}


def resumed(folder: Path, name: str, shape: Shape, sharded: bool, steps: int) -> dict[str, Any]:
    """Load into a model of other weights and go on: what was loaded, and the losses."""
    model, optimizer = made(name, grid_of(shape), sharded=sharded, seed=1)
    state = load_training(folder, model, optimizer)
    loaded = everything(model, optimizer)
    losses = [take(model, optimizer, step) for step in range(state["step"] + 1, steps + 1)]
    return {"losses": losses, "loaded": loaded, "state": state}
