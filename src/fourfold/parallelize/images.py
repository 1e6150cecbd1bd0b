"""Convolutions and norms of channels in a user's model: what they do on the grid in place of their own forward.

Between them an image's channels are cut over x and y, outermost first as the layer that made them leaves them; space is
whole. Which cut a layer reads and gives is fixed with its parameters (alternate.py says how it is chosen); a tensor
that lies otherwise is gathered and cut anew, and one that is whole, as a model's input is, is cut without a message.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from fourfold.axes import BATCH
from fourfold.layout import Spec
from fourfold.nn.batch_norm import BatchNorm
from fourfold.nn.channel_norm import ChannelNorm, GroupNorm
from fourfold.nn.conv import Conv, GroupedConv
from fourfold.nn.convolve import Geometry
from fourfold.parallelize.alternate import BATCH_NORMS, INSTANCE_NORMS, is_channel_norm, is_convolution
from fourfold.parallelize.layers import Adapter, Single
from fourfold.parallelize.placed import Blocks, Placed, laid
from fourfold.parallelize.plan import Choice, Word
from fourfold.parallelize.run import Run

if TYPE_CHECKING:
    from fourfold.parallelize.structure import Found

C = TypeVar("C", Conv, GroupedConv)
N = TypeVar("N", bound=ChannelNorm)


def by_channels(run: Run, axes: Sequence[str]) -> Blocks:
    """Channels cut over these axes. Those of one rank are left out, so that cuts which differ in them alone agree."""
    return Blocks(run, 1, tuple(axis for axis in axes if run.grid.size(axis) > 1))


def lies_by(a: Tensor, layout: Blocks) -> bool:
    held = a.placement if isinstance(a, Placed) else None
    return type(held) is Blocks and held.dim == 1 and by_channels(held.run, held.over) == layout


def cut_channels(a: Tensor, layout: Blocks, name: str) -> Placed:
    """The same [rows, channels, *space] in that layout, for the layer of that name."""
    if not isinstance(a, Placed):
        return laid(a, layout)
    if lies_by(a, layout):
        return Placed(a.local, layout, a.shape)
    layout.run.made_whole[f"for {name}", "input that is cut otherwise"] += 1
    return a.laid(layout)


def require_channels(a: Tensor, count: int, name: str) -> None:
    """On all ranks alike, which a rank's own part would not tell."""
    if a.shape[1] != count:
        raise ValueError(f"{name}: expected [rows, {count} channels, *space], but the input is {tuple(a.shape)}")


class Convolver(Single[C]):
    """A convolution, whether of all channels with all or in groups."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        self.run.where = self.name
        layer, dims = self.layer, len(self.layer.geometry.kernel)
        alone = input.dim() == dims + 1  # an image without a batch around it
        a = input.unsqueeze(0) if alone else input
        require_channels(a, layer.reads.count, self.name)
        out = self.convolve(a, _output_padding(module, input, *args, **kwargs))
        shape = (a.shape[0], layer.gives.count, *out.shape[2:])
        placed = Placed(out, by_channels(self.run, layer.gives.axes), shape)
        return placed.squeeze(0) if alone else placed

    @abstractmethod
    def convolve(self, a: Tensor, output_padding: Sequence[int] | None) -> Tensor:
        """This rank's channels of the output."""


class DenseConvolver(Convolver[Conv]):
    def convolve(self, a: Tensor, output_padding: Sequence[int] | None) -> Tensor:
        reads = by_channels(self.run, self.layer.reads.axes)
        if lies_by(a, reads):
            return self.layer(cut_channels(a, reads, self.name).local, output_padding=output_padding)
        # what is whole, or has to be made so, need not be cut over the axis that it would be gathered over next
        once = cut_channels(a, by_channels(self.run, self.layer.reads.axes[:1]), self.name)
        return self.layer(once.local, whole=True, output_padding=output_padding)

    def describe(self) -> tuple[str, str]:
        layer = self.layer
        n, k = f"n/{layer.t}", f"k/{layer.s}"
        weight = f"w[{k}, {n}]/z" if layer.geometry.transposed else f"w[{n}, {k}]/z"
        reads, gives = (",".join(channels.axes) for channels in (layer.reads, layer.gives))
        return f"{weight}: channels over {reads} -> {gives}", f"enter over {layer.t}, w over z, leave over {layer.s}"


class GroupedConvolver(Convolver[GroupedConv]):
    def convolve(self, a: Tensor, output_padding: Sequence[int] | None) -> Tensor:
        held = cut_channels(a, by_channels(self.run, self.layer.reads.axes), self.name)
        return self.layer(held.local, output_padding=output_padding)

    def describe(self) -> tuple[str, str]:
        layer, over = self.layer, ",".join(self.layer.gives.axes)
        rows = f"k/{over}" if layer.geometry.transposed else f"n/{over}"
        if not layer.aligned:
            return f"w/z: {layer.groups} groups of channels over {over}", f"input over {over}, w over z"
        return f"w[{rows}]/z: {layer.groups} groups of channels over {over}", "w over z"


def _output_padding(module: Any, a: Tensor, output_size: Sequence[int] | None = None) -> Sequence[int] | None:
    """Of a transposed convolution that is told the size of its output."""
    if output_size is None:
        return None
    options = (module.stride, module.padding, module.kernel_size, len(module.kernel_size), module.dilation)
    return module._output_padding(torch.empty(a.shape, device="meta"), list(output_size), *options)


class ChannelNormer(Single[N]):
    """A norm of channels, or of groups of them."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Any:  # noqa: ARG002
        self.run.where = self.name
        alone = isinstance(module, INSTANCE_NORMS) and input.dim() == module._get_no_batch_dim()
        a = input.unsqueeze(0) if alone else input
        require_channels(a, self.layer.channels.count, self.name)
        self.prepare(module)
        placed = cut_channels(a, by_channels(self.run, self.layer.channels.axes), self.name)
        out = placed.like(self.layer(placed.local))
        return out.squeeze(0) if alone else out

    def prepare(self, module: nn.Module) -> None:
        """Take over what a module may have been told since."""
        self.layer.eps = module.eps  # type: ignore[assignment]

    @property
    def merged(self) -> tuple[str, ...]:
        """The axes over which ranks tell each other their statistics."""
        layer = self.layer
        return layer.channels.axes[layer.cuts :] if isinstance(layer, GroupNorm) else BATCH

    def describe(self) -> tuple[str, str]:
        axes, weight = ",".join(self.layer.channels.axes), self.layer.specs
        travels = [f"statistics over {','.join(self.merged)}"] if self.merged else []
        rests = f"w[k/{axes}]/z: " if weight else ""
        return f"{rests}channels over {axes}", ", ".join([*travels, *(["w over z"] if weight else [])])


class BatchNormer(ChannelNormer[BatchNorm]):
    """A norm over the whole batch, which lies on all places. The module holds the running statistics."""

    def prepare(self, module: Any) -> None:
        super().prepare(module)
        layer = self.layer
        layer._buffers.update(module._buffers)
        layer.training, layer.momentum = module.training, module.momentum
        counted = module.running_mean is not None
        layer.track_running_stats = counted and (module.track_running_stats or not module.training)

    def buffers(self) -> Mapping[str, Spec]:
        return self.layer.buffer_specs


def convolution(name: str, module: Any, choice: Choice, found: Found, run: Run) -> Adapter:  # noqa: ARG001
    if not is_convolution(module):
        raise ValueError("Convolution() is for torch's convolutions; give it a plan of Whole()")
    sizes = (run.grid, run.policy, module.in_channels, module.out_channels, Geometry.of(module))
    bias, contract = module.bias is not None, choice.word.contract  # type: ignore[attr-defined]
    if module.groups > 1:
        layer = GroupedConv(*sizes, groups=module.groups, axes=_axes(choice.word, run), bias=bias)
        return GroupedConvolver(name, run, choice.why, layer)
    layer = Conv(*sizes, role="contract" if contract else "expand", bias=bias)
    return DenseConvolver(name, run, choice.why, layer)


def channel_norm(name: str, module: Any, choice: Choice, found: Found, run: Run) -> Adapter:  # noqa: ARG001
    if not is_channel_norm(module):
        raise ValueError(
            "ChannelNorm() is for torch's BatchNorm, GroupNorm and InstanceNorm; give it a plan of Whole()"
        )
    options = dict(axes=_axes(choice.word, run), eps=module.eps, affine=module.affine, bias=module.bias is not None)
    place = (run.grid, run.policy)
    if isinstance(module, BATCH_NORMS):
        kept = dict(momentum=module.momentum, track_running_stats=module.running_mean is not None)
        return BatchNormer(name, run, choice.why, BatchNorm(*place, module.num_features, **options, **kept))
    if isinstance(module, nn.GroupNorm):
        layer = GroupNorm(*place, module.num_groups, module.num_channels, **options)
    else:
        layer = GroupNorm(*place, module.num_features, module.num_features, **options)
    return ChannelNormer(name, run, choice.why, layer)


def _axes(word: Word, run: Run) -> tuple[str, ...]:
    axes = ("y", "x") if word.contract else ("x", "y")  # type: ignore[attr-defined]
    return axes if run.policy.activations == "sharded" else axes[:1]
