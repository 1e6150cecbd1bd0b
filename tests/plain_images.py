"""Small networks for images in plain torch, written as people write them: a ResNet and a U-Net."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution where the shape changes."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, a: Tensor) -> Tensor:
        shortcut = a if self.downsample is None else self.downsample(a)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(a)))))
        out += shortcut
        return self.relu(out)


class ResNet(nn.Module):
    """A stem with pooling, a stage of basic blocks for each width, the mean over space, a linear classifier."""

    def __init__(self, widths: tuple[int, ...] = (8, 12), *, classes: int = 10, blocks: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        stages, before = [], widths[0]
        for index, width in enumerate(widths):
            first = BasicBlock(before, width, stride=2 if index else 1)
            stages.append(nn.Sequential(first, *(BasicBlock(width, width) for _ in range(blocks - 1))))
            before = width
        self.stages = nn.Sequential(*stages)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        a = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        return self.fc(torch.flatten(self.avgpool(self.stages(a)), 1))


class Double(nn.Module):
    """Two 3x3 convolutions, each with a GroupNorm and SiLU."""

    def __init__(self, channels: int, out: int, groups: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(groups, out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, padding=1), nn.GroupNorm(groups, out)

    def forward(self, a: Tensor) -> Tensor:
        a = functional.silu(self.norm1(self.conv1(a)))
        return functional.silu(self.norm2(self.conv2(a)))


class UNet(nn.Module):
    """Down by pooling, up by transposed convolutions, each level joined with what it was on the way down."""

    def __init__(self, widths: tuple[int, ...] = (4, 8), *, channels: int = 3, out: int = 3, groups: int = 2) -> None:
        super().__init__()
        self.enter = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            Double(before, width, groups) for before, width in zip((widths[0], *widths), widths, strict=False)
        )
        self.middle = Double(widths[-1], 2 * widths[-1], groups)
        ups, doubles, before = [], [], 2 * widths[-1]
        for width in reversed(widths):
            ups.append(nn.ConvTranspose2d(before, width, 2, stride=2))
            doubles.append(Double(2 * width, width, groups))
            before = width
        self.up, self.joined = nn.ModuleList(ups), nn.ModuleList(doubles)
        self.leave = nn.Conv2d(widths[0], out, 1)

    def forward(self, images: Tensor) -> Tensor:
        a, skips = self.enter(images), []
        for level in self.down:
            a = level(a)
            skips.append(a)
            a = functional.max_pool2d(a, 2)
        a = self.middle(a)
        for up, joined, skip in zip(self.up, self.joined, reversed(skips), strict=True):
            a = joined(torch.cat([skip, up(a)], dim=1))
        return self.leave(a)
