"""A U-Net that removes noise from images, on a 4D grid.

    torchrun --nproc-per-node 4 examples/unet.py

Convolutions, group norms and skip connections in ordinary PyTorch: `ff.parallelize` shards channels over x and y, and
images over z and data. The images are generated discs on a plain background. A larger model:

    torchrun --nproc-per-node 8 examples/unet.py \
        --grid x=2,z=4 --widths 64 128 256 --size 128 --rows 64 --steps 1000
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold.commands.options import grid as axes


class Double(nn.Sequential):
    """Two convolutions, each with a group norm and SiLU."""

    def __init__(self, channels: int, out: int) -> None:
        one = nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU()
        super().__init__(*one, nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(4, out), nn.SiLU())


class UNet(nn.Module):
    """A U-Net: each level on the way up is concatenated with the same level on the way down."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.down = nn.ModuleList(Double(a, b) for a, b in zip((1, *widths), widths, strict=False))
        self.middle = Double(widths[-1], 2 * widths[-1])
        wide = [2 * widths[-1], *reversed(widths)]
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairwise(wide))
        self.joined = nn.ModuleList(Double(2 * width, width) for width in wide[1:])
        self.last = nn.Conv2d(widths[0], 1, 1)

    def forward(self, noisy: Tensor, clean: Tensor) -> Tensor:
        a, skips = noisy, []
        for level in self.down:
            skips.append(level(a))
            a = functional.max_pool2d(skips[-1], 2)
        a = self.middle(a)
        for up, joined in zip(self.up, self.joined, strict=True):
            a = joined(torch.cat([skips.pop(), up(a)], dim=1))
        return functional.mse_loss(self.last(a), clean)  # the mean over the whole batch, on every rank


def batch(step: int, rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Return discs with noise and the same discs without."""
    generator = torch.Generator().manual_seed(step)
    x, y, radius = torch.rand(3, rows, 1, 1, generator=generator)
    across = torch.linspace(0, 1, size)
    clean = ((across - x) ** 2 + (across[:, None] - y) ** 2 < (0.1 + 0.3 * radius) ** 2).float()[:, None]
    return clean + 0.5 * torch.randn(clean.shape, generator=generator), clean


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=axes, default={"x": 2, "z": 2}, help="such as x=2,z=2")
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16], help="channels of each level")
    for name, default in (("steps", 20), ("rows", 16), ("size", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    grid, losses = ff.Grid(**given.grid), []
    torch.manual_seed(0)
    parallel = ff.parallelize(UNet(given.widths), grid)  # in place: parameters keep their names and become shards
    optimizer = ff.optim.AdamW(parallel, lr=3e-3)
    for step in range(given.steps):
        noisy, clean = (ff.local_rows(part, grid).to(grid.device) for part in batch(step, given.rows, given.size))
        loss = parallel(noisy, clean)
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        losses.append(loss.item())
    if grid.rank == 0:
        print(f"{grid}: squared error {losses[0]:.4f} to {losses[-1]:.4f} in {given.steps} steps")
    grid.close()
    return losses


if __name__ == "__main__":
    main()
