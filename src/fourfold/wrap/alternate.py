"""Which convolutions expand and which contract, so that each reads channels as the one before it leaves them.

A convolution's output has its channels cut over x and then y, or, of a contracting one, over y and then x, and the
other kind reads that as it lies. How a weight rests depends on it, so it is decided before anything runs. Modules are
taken to run in the order in which they stand, but for shortcuts, which start where their block does and end as its
other branch ends, and for convolutions that are all there is in a list, between which other modules run. Where a model
does otherwise a tensor is gathered and cut anew; results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from torch import nn

from fourfold.wrap.plan import ChannelNorm, Choice, Convolution
from fourfold.wrap.swap import runs

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*BATCH_NORMS, nn.GroupNorm, *INSTANCE_NORMS)
SHORTCUTS = ("downsample", "shortcut", "conv_shortcut", "nin_shortcut", "skip", "skip_connection", "conv_skip")
"""Names of what stands beside a block's other modules and is added to what they give."""


def is_convolution(module: nn.Module) -> bool:
    """One of torch's, or one that does something before or after; not one that uses its weight in a way of its own."""
    return runs(module, CONVOLUTIONS) and module._parameters.get("weight") is not None


def is_channel_norm(module: nn.Module) -> bool:
    """One of torch's. A norm of each channel by itself must not keep statistics of the rows that a place sees."""
    counts_rows = isinstance(module, INSTANCE_NORMS) and module.track_running_stats
    return runs(module, NORMS) and not counts_rows


def find_images(model: nn.Module, given: Mapping[str, Choice]) -> dict[str, Choice]:
    """A word for every convolution and every norm of channels; what is `given` stays."""
    walk = _Walk(given)
    walk.visit("", model)
    return walk.found


class _Walk:
    """Through the modules, with the cut that channels have there."""

    def __init__(self, given: Mapping[str, Choice]) -> None:
        self.given = given
        self.found: dict[str, Choice] = {}
        self.contracted = True
        """Channels lie as a contracting convolution leaves them. An image is whole, and is read so at first."""
        self.ends: dict[str, tuple[bool, str]] = {}
        """Convolutions whose output is to lie otherwise than in turn, and why."""
        self._seen: set[nn.Module] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        if module in self._seen:
            return
        self._seen.add(module)
        if is_convolution(module):
            self._convolve(name, module)
        elif is_channel_norm(module):
            if name not in self.given:
                self.found[name] = Choice(ChannelNorm(self.contracted), "a norm of channels, cut as they come")
        elif isinstance(module, nn.Linear):
            self.contracted = False
        else:
            self._visit_children(name, module)

    def _convolve(self, name: str, module: Any) -> None:
        if name in self.given:
            word = self.given[name].word
            self.contracted = word.contract if isinstance(word, Convolution) else self.contracted
            return
        why = "a convolution, in turn with the one before"
        if module.groups > 1:
            why = "a convolution in groups of channels, cut as they come"
        else:
            self.contracted, why = self.ends.get(name, (not self.contracted, why))
        self.found[name] = Choice(Convolution(self.contracted), why)

    def _visit_children(self, name: str, module: nn.Module) -> None:
        before = self.contracted
        children = [(own, f"{name}.{own}".lstrip("."), child) for own, child in module.named_children()]
        beside = [(path, child) for own, path, child in children if own in SHORTCUTS]
        branch = [(path, child) for own, path, child in children if own not in SHORTCUTS]
        shortcuts = list(chain.from_iterable(_dense(path, child) for path, child in beside))
        inside = list(chain.from_iterable(_dense(path, child) for path, child in branch))
        if name and not shortcuts and _is_bottleneck([conv for _, conv in inside]):
            self.ends[inside[-1][0]] = before, "a convolution that ends as its block's input lies"
        apart = isinstance(module, nn.ModuleList) and all(is_convolution(child) for _, child in branch)
        for path, child in branch:
            self.contracted = before if apart else self.contracted
            self.visit(path, child)
        after = self.contracted
        for path, child in beside:
            self.contracted = before
            for last, _ in list(_dense(path, child))[-1:]:
                self.ends[last] = after, "a shortcut that ends as the branch beside it"
            self.visit(path, child)
        self.contracted = after


def _dense(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Convolutions of all channels with all."""
    for path, child in module.named_modules(prefix=name):
        if is_convolution(child) and child.groups == 1:
            yield path, child


def _is_bottleneck(convs: list[nn.Module]) -> bool:
    """Whether its result is likely added to its input, and is better brought to lie as that does where it is narrow."""
    if len(convs) < 2 or len(convs) % 2 == 0:
        return False
    first, last = convs[0], convs[-1]
    return first.in_channels == last.out_channels > last.in_channels  # type: ignore[operator]
