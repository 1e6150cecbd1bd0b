"""Small networks for images in plain torch, written as people write them: a ResNet, a U-Net, a MobileNet."""

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


class Same(nn.Conv2d):
    """A convolution that pads its input itself, below and on the right, as other frameworks do."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(functional.pad(input, (0, 1, 0, 1), mode="replicate"))


class Squeeze(nn.Module):
    """Weighs channels by what they hold on average."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, 3, 1), nn.Conv2d(3, channels, 1)

    def forward(self, a: Tensor) -> Tensor:
        mean = functional.adaptive_avg_pool2d(a, 1)
        return a * self.fc2(functional.relu(self.fc1(mean))).sigmoid()


class Inverted(nn.Module):
    """Wide inside, where channels are convolved by themselves; added to its input where the shape stays."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(True))
        depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.depthwise = nn.Sequential(depthwise, nn.BatchNorm2d(wide, momentum=None), nn.SiLU())
        self.squeeze = Squeeze(wide)
        self.project = nn.Sequential(nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out, affine=False))
        self.adds = channels == out and stride == 1

    def forward(self, a: Tensor) -> Tensor:
        out = self.project(self.squeeze(self.depthwise(self.expand(a))))
        return a + out if self.adds else out


class Bottleneck(nn.Module):
    """Three convolutions, narrow inside, added to the input."""

    def __init__(self, channels: int, inside: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, inside, 1)
        self.conv2, self.norm = nn.Conv2d(inside, inside, 3, padding=1), nn.InstanceNorm2d(inside, affine=True)
        self.conv3 = nn.Conv2d(inside, channels, 1)

    def forward(self, a: Tensor) -> Tensor:
        return functional.leaky_relu(a + self.conv3(functional.gelu(self.norm(self.conv2(self.conv1(a))))), 0.1)


class MobileNet(nn.Module):
    """Inverted residuals and a bottleneck, then sequences of positions, numbers of channels that nothing divides."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = Same(3, 8, 2, bias=False)
        self.blocks = nn.Sequential(Inverted(8, 8), Inverted(8, 10, stride=2), Bottleneck(10, 5))
        self.reads = nn.Conv1d(10, 7, 3, padding=1)
        self.norm = nn.BatchNorm1d(7)
        self.drop, self.fc = nn.Dropout1d(0.0), nn.Linear(7, classes)
        self.last = nn.BatchNorm1d(classes)

    def forward(self, images: Tensor) -> Tensor:
        a = functional.avg_pool2d(self.blocks(self.stem(images)), 2)
        a = functional.interpolate(a, scale_factor=2, mode="bilinear")
        a = self.norm(self.reads(a.flatten(2))).mean(-1)
        return self.last(self.fc(self.drop(a)))
