"""What ranks do for `test_exchange.py`; apart from it, since every rank would import transformers for seconds."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import Tensor

import fourfold as ff
from fourfold.checkpoint.training_state import model_shards
from fourfold.grid import Grid, Shape
from fourfold.layout import boxed
from fourfold.models import ModelConfig
from fourfold.models.generate import evaluating
from fourfold.nn.rng import key_of
from fourfold.train.config import ModelSection, read_config
from fourfold.train.config import TrainConfig as RunConfig
from harness import grid_of

VOCAB, SEQ = 101, 16
TOKENS = torch.randint(0, VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(5))


def whole(name: str, shape: tuple[int, ...], *, mixture: bool = False) -> Tensor:
    """Values that tell every element of every tensor apart, large enough that logits do too.

    Those of a mixture are half as large: with 0.3, transformers' own logits in fp32 and in fp64 differ by 2e-5.
    """
    generator = torch.Generator().manual_seed(key_of(name))
    return (0.15 if mixture else 0.3) * torch.randn(shape, generator=generator) + (1.0 if "norm.weight" in name else 0)


def logits(run: Path, grid: Grid) -> Tensor:
    """Of the model of a run as it trains: fp32, each place all rows."""
    config = read_config(run / "config.toml").model.build()
    model = ff.models.build(config, grid, seed=3)
    ff.load(run / "checkpoints" / "step-00000000", model)
    with torch.no_grad(), evaluating(model):
        return model(TOKENS.to(grid.device)).cpu()


def logits_on(run: Path, shape: Shape) -> Tensor:
    return logits(run, grid_of(shape))


def write_run(folder: Path, config: ModelConfig, grid: Grid, step: int = 7) -> Path:
    """A run as training leaves it, with weights that are known."""
    model = ff.models.build(config, grid)
    for name, held in model_shards(model).items():
        box = held.storage.box(held.shape, grid.shape.sizes, grid.coords)
        held.local.copy_(boxed(whole(name, held.shape, mixture=config.experts > 0), box))
    ff.save(folder / "checkpoints" / f"step-{step:08d}", model)
    if grid.rank == 0:
        section = ModelSection("mine", **dataclasses.asdict(config))
        (folder / "config.toml").write_text(RunConfig(model=section).toml())
    with torch.no_grad(), evaluating(model):
        torch.save(model(TOKENS.to(grid.device)).cpu(), folder / f"logits-{grid.rank}.pt")
    return folder


def write_run_on(folder: Path, config: ModelConfig, shape: Shape) -> None:
    write_run(folder, config, grid_of(shape))
