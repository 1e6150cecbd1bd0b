"""Your own module and your own loop, on a 4D grid.

    torchrun --nproc-per-node 4 examples/own_loop.py

It saves every other step. Started again with a larger `STEPS`, on any grid and any number of ranks, it resumes.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff

FEATURES, CLASSES, STEPS = 32, 7, 4
LAST = Path("runs/own-loop")
"""The folder of the last checkpoint."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 4 * FEATURES), nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, a: Tensor) -> Tensor:
        return a + self.down(functional.gelu(self.up(self.norm(a))))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return functional.cross_entropy(self.head(images), labels)  # the mean over the whole batch, on every rank


def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(16, FEATURES, generator=generator)
    return images, images[:, :CLASSES].argmax(1)


def train(grid: ff.Grid, last: Path = LAST) -> list[float]:
    """Train to the last step and return the losses of the steps taken now."""
    parallel = ff.parallelize(model(), grid)  # in place: parameters keep their names and become shards
    # fused: torch derives for every operation on shards how it is cut, and a fused step is one instead of about ten
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, fused=True)
    done = ff.load(last, parallel, optimizer)["step"] if last.exists() else 0
    losses = []
    for step in range(done, STEPS):
        images, labels = (ff.local_rows(part, grid).to(grid.device) for part in batch(step))
        loss = parallel(images, labels)
        loss.backward()  # gradients are fully reduced when this returns
        ff.clip_grad_norm_(parallel.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 2 == 1:
            ff.save(last, parallel, optimizer, extra={"step": step + 1})  # complete, or the one before stays
    return losses


if __name__ == "__main__":
    grid = ff.Grid(x=2, z=2)
    losses = train(grid)
    if grid.rank == 0:
        print(f"{grid}: losses", *(f"{loss:.4f}" for loss in losses))
        print(f"checkpoint: {LAST}")
    grid.close()
