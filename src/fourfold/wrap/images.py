"""Convolutions and channel norms of a user's model: which role each plays, and what it does on the grid.

Between these layers an image's channels are cut over x and y, in the order in which the layer that made them leaves
them; space is whole. An expanding convolution leaves its output cut over x and then y, a contracting one over y
and then x, and the other kind reads it as it lies. A weight's storage depends on this role, so roles are chosen before
anything runs. Modules are taken to run in the order in which they stand in the model, with two exceptions: a shortcut
starts where its block does and ends as the block's other branch ends, and between convolutions that fill a ModuleList
other modules run.

Where a model does otherwise, a tensor is gathered and cut again; results are the same. A whole tensor, such as a
model's input, is cut without communication.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fourfold.axes import BATCH
from fourfold.layout import Spec
from fourfold.nn.images.channel_norm import BatchNorm, ChannelNorm, GroupNorm
from fourfold.nn.images.conv import Conv, Geometry, GroupedConv
from fourfold.wrap.adapters import Adapter, LayerAdapter, uses_forward_of
from fourfold.wrap.grid_tensor import GridTensor, ModelContext, distribute
from fourfold.wrap.placements import ChunkPlacement
from fourfold.wrap.plan import ChannelNormParallel, ConvParallel, StyleChoice

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
NORMS = (*BATCH_NORMS, nn.GroupNorm, *INSTANCE_NORMS)
SHORTCUTS = ("downsample", "shortcut", "conv_shortcut", "nin_shortcut", "skip", "skip_connection", "conv_skip")
"""The usual names of a module that stands beside a block's other modules and is added to their output."""


# roles


def is_convolution(module: nn.Module) -> bool:
    """Return whether a module is one of torch's convolutions, or a subclass that calls its forward and does more."""
    return uses_forward_of(module, CONVOLUTIONS) and module._parameters.get("weight") is not None


def is_channel_norm(module: nn.Module) -> bool:
    """Return whether a module is one of torch's channel norms that can run on cut channels.

    An InstanceNorm with running statistics cannot: it would record the rows of one place.
    """
    records_rows = isinstance(module, INSTANCE_NORMS) and module.track_running_stats
    return uses_forward_of(module, NORMS) and not records_rows


def find_images(model: nn.Module, given: Mapping[str, StyleChoice]) -> dict[str, StyleChoice]:
    """Return the style of every convolution and every channel norm that is not `given` one."""
    walk = _RoleWalk(given)
    walk.visit("", model)
    return walk.found


class _RoleWalk:
    """Walks through the modules and keeps track of how channels are cut."""

    def __init__(self, given: Mapping[str, StyleChoice]) -> None:
        self.given = given
        self.found: dict[str, StyleChoice] = {}
        self.contracted = True
        """Whether channels are cut as a contracting convolution leaves them. The model's input is whole, and the first
        convolution expands it."""
        self.ends: dict[str, tuple[bool, str]] = {}
        """Convolutions that do not alternate: whether each contracts, and why, by name."""
        self._seen: set[nn.Module] = set()

    def visit(self, name: str, module: nn.Module) -> None:
        """Choose styles in a module and the modules inside it; a module that stands in two places counts once."""
        if module in self._seen:
            return
        self._seen.add(module)
        if is_convolution(module):
            self._convolve(name, module)
        elif is_channel_norm(module):
            if name not in self.given:
                style = ChannelNormParallel(self.contracted)
                self.found[name] = StyleChoice(style, "a norm of channels, cut as they come")
        elif isinstance(module, nn.Linear):
            self.contracted = False  # it leaves features cut over x and then y, as an expanding convolution does
        else:
            self._visit_children(name, module)

    def _convolve(self, name: str, module: Any) -> None:
        if name in self.given:
            style = self.given[name].style
            self.contracted = style.contract if isinstance(style, ConvParallel) else self.contracted
            return
        why = "a convolution, in turn with the one before"
        if module.groups > 1:
            why = "a convolution in groups of channels, cut as they come"
        else:
            self.contracted, why = self.ends.get(name, (not self.contracted, why))
        self.found[name] = StyleChoice(ConvParallel(self.contracted), why)

    def _visit_children(self, name: str, module: nn.Module) -> None:
        before = self.contracted
        children = [(own, f"{name}.{own}".lstrip("."), child) for own, child in module.named_children()]
        beside = [(path, child) for own, path, child in children if own in SHORTCUTS]
        branch = [(path, child) for own, path, child in children if own not in SHORTCUTS]
        shortcuts = [conv for path, child in beside for conv in _dense(path, child)]
        inside = [conv for path, child in branch for conv in _dense(path, child)]
        # a block without a shortcut layer adds its input as it lies, so its output should lie in the same way
        if name and not shortcuts and _is_bottleneck([conv for _, conv in inside]):
            self.ends[inside[-1][0]] = before, "a convolution that ends as its block's input lies"
        # convolutions in a list are applied to tensors of other modules, so each begins as the list does
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
    """Yield the convolutions that are not grouped."""
    for path, child in module.named_modules(prefix=name):
        if is_convolution(child) and child.groups == 1:
            yield path, child


def _is_bottleneck(convs: list[nn.Module]) -> bool:
    """Return whether a block's output is probably added to its input, with a narrow last convolution.

    With an odd number of convolutions the output would be cut otherwise than the input. It is cheaper to change the cut
    at the narrow input of the last convolution than at the wide output.
    """
    if len(convs) < 2 or len(convs) % 2 == 0:
        return False
    first, last = convs[0], convs[-1]
    return first.in_channels == last.out_channels > last.in_channels  # type: ignore[operator]


# adapters

C = TypeVar("C", Conv, GroupedConv)
N = TypeVar("N", bound=ChannelNorm)


def by_channels(context: ModelContext, axes: Sequence[str]) -> ChunkPlacement:
    """Return the placement of channels cut over these axes.

    Axes of size 1 are left out, so that placements that differ only in those are equal.
    """
    return ChunkPlacement(context, 1, tuple(axis for axis in axes if context.grid.size(axis) > 1))


def is_placed_as(a: Tensor, placement: ChunkPlacement) -> bool:
    """Return whether a tensor is cut as the placement says."""
    held = a.placement if isinstance(a, GridTensor) else None
    return type(held) is ChunkPlacement and held.dim == 1 and by_channels(held.context, held.over) == placement


def cut_channels(a: Tensor, placement: ChunkPlacement, name: str) -> GridTensor:
    """Return [rows, channels, *space] in this placement, for the layer of that name."""
    if is_placed_as(a, placement):
        return GridTensor(a.local, placement, a.shape)  # type: ignore[attr-defined]
    if isinstance(a, GridTensor):
        placement.context.made_whole[f"for {name}", "input that is cut otherwise"] += 1
    return distribute(a, placement)


def require_channels(a: Tensor, count: int, name: str) -> None:
    """Refuse a wrong number of channels on every rank; a rank's own part would not show it."""
    if a.shape[1] != count:
        raise ValueError(f"{name}: expected [rows, {count} channels, *space], but the input is {tuple(a.shape)}")


class ConvAdapter(LayerAdapter[C]):
    """A convolution, dense or grouped."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        layer, dims = self.layer, len(self.layer.geometry.kernel)
        alone = input.dim() == dims + 1  # one image without a batch dim
        a = input.unsqueeze(0) if alone else input
        require_channels(a, layer.reads.count, self.name)
        out = self.convolve(a, _output_padding(module, input, *args, **kwargs))
        shape = (a.shape[0], layer.gives.count, *out.shape[2:])
        result = GridTensor(out, by_channels(self.context, layer.gives.axes), shape)
        return result.squeeze(0) if alone else result

    @abstractmethod
    def convolve(self, a: Tensor, output_padding: Sequence[int] | None) -> Tensor:
        """Return this rank's channels of the output."""


class DenseConvAdapter(ConvAdapter[Conv]):
    """A convolution of all channels with all."""

    def convolve(self, a: Tensor, output_padding: Sequence[int] | None) -> Tensor:
        reads = by_channels(self.context, self.layer.reads.axes)
        if is_placed_as(a, reads):
            return self.layer(cut_channels(a, reads, self.name).local, output_padding=output_padding)
        # a whole tensor need not be cut over the axis over which the layer would gather it next
        once = cut_channels(a, by_channels(self.context, self.layer.reads.axes[:1]), self.name)
        return self.layer(once.local, whole=True, output_padding=output_padding)

    def describe(self) -> tuple[str, str]:
        layer = self.layer
        n, k = f"n/{layer.t}", f"k/{layer.s}"
        weight = f"w[{k}, {n}]/z" if layer.geometry.transposed else f"w[{n}, {k}]/z"
        reads, gives = (",".join(channels.axes) for channels in (layer.reads, layer.gives))
        return f"{weight}: channels over {reads} -> {gives}", f"enter over {layer.t}, w over z, leave over {layer.s}"


class GroupedConvAdapter(ConvAdapter[GroupedConv]):
    """A convolution in groups of channels."""

    def convolve(self, a: Tensor, output_padding: Sequence[int] | None) -> Tensor:
        held = cut_channels(a, by_channels(self.context, self.layer.reads.axes), self.name)
        return self.layer(held.local, output_padding=output_padding)

    def describe(self) -> tuple[str, str]:
        layer, over = self.layer, ",".join(self.layer.gives.axes)
        rows = f"k/{over}" if layer.geometry.transposed else f"n/{over}"
        if not layer.aligned:
            return f"w/z: {layer.groups} groups of channels over {over}", f"input over {over}, w over z"
        return f"w[{rows}]/z: {layer.groups} groups of channels over {over}", "w over z"


def make_convolution(name: str, module: Any, why: str, context: ModelContext, *, contract: bool) -> Adapter:
    """Return the adapter of a convolution."""
    if not is_convolution(module):
        raise ValueError("ConvParallel() is for torch's convolutions; give it WholeTensors()")
    sizes = (context.grid, context.policy, module.in_channels, module.out_channels, Geometry.of(module))
    bias = module.bias is not None
    if module.groups > 1:
        layer = GroupedConv(*sizes, groups=module.groups, axes=_channel_axes(context, contract=contract), bias=bias)
        return GroupedConvAdapter(name, context, why, layer)
    return DenseConvAdapter(name, context, why, Conv(*sizes, role="contract" if contract else "expand", bias=bias))


def _channel_axes(context: ModelContext, *, contract: bool) -> tuple[str, ...]:
    """Return the axes that cut channels, outermost first: over x and then y, or over y and then x if contracted."""
    axes = ("y", "x") if contract else ("x", "y")
    return axes if context.policy.activations == "sharded" else axes[:1]


def _output_padding(module: Any, a: Tensor, output_size: Sequence[int] | None = None) -> Sequence[int] | None:
    """Return the output padding of a transposed convolution that is called with the size of its output."""
    if output_size is None:
        return None
    options = (module.stride, module.padding, module.kernel_size, len(module.kernel_size), module.dilation)
    # torch's own method reads the shape alone
    return module._output_padding(torch.empty(a.shape, device="meta"), list(output_size), *options)


class ChannelNormAdapter(LayerAdapter[N]):
    """A norm of channels, or of groups of them."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Any:  # noqa: ARG002
        alone = isinstance(module, INSTANCE_NORMS) and input.dim() == module._get_no_batch_dim()
        a = input.unsqueeze(0) if alone else input
        require_channels(a, self.layer.channels.count, self.name)
        self.update_layer(module)  # before it computes: users change `eps`, `momentum` and the mode between passes
        own = cut_channels(a, by_channels(self.context, self.layer.channels.axes), self.name)
        out = own.like(self.layer(own.local))
        return out.squeeze(0) if alone else out

    def update_layer(self, module: nn.Module) -> None:
        """Copy settings that may have been changed on the module."""
        self.layer.eps = module.eps  # type: ignore[assignment]

    @property
    def statistics_axes(self) -> tuple[str, ...]:
        """The axes over which ranks combine their statistics."""
        layer = self.layer
        return layer.channels.axes[layer.cuts :] if isinstance(layer, GroupNorm) else BATCH

    def describe(self) -> tuple[str, str]:
        axes, weight = ",".join(self.layer.channels.axes), self.layer.specs
        travels = [f"statistics over {','.join(self.statistics_axes)}"] if self.statistics_axes else []
        rests = f"w[k/{axes}]/z: " if weight else ""
        return f"{rests}channels over {axes}", ", ".join([*travels, *(["w over z"] if weight else [])])


class BatchNormAdapter(ChannelNormAdapter[BatchNorm]):
    """A norm over the whole batch, which lies on all places. The module holds the running statistics."""

    def update_layer(self, module: Any) -> None:
        super().update_layer(module)
        layer = self.layer
        layer._buffers.update(module._buffers)
        layer.training, layer.momentum = module.training, module.momentum
        counted = module.running_mean is not None
        layer.track_running_stats = counted and (module.track_running_stats or not module.training)

    def buffers(self) -> Mapping[str, Spec]:
        return self.layer.buffer_specs


def make_channel_norm(name: str, module: Any, why: str, context: ModelContext, *, contract: bool) -> Adapter:
    """Return the adapter of a norm of channels."""
    if not is_channel_norm(module):
        raise ValueError(
            "ChannelNormParallel() is for torch's BatchNorm, GroupNorm and InstanceNorm; give it WholeTensors()"
        )
    place, axes = (context.grid, context.policy), _channel_axes(context, contract=contract)
    options: Any = dict(axes=axes, eps=module.eps, affine=module.affine, bias=module.bias is not None)
    if isinstance(module, BATCH_NORMS):
        options |= dict(momentum=module.momentum, track_running_stats=module.running_mean is not None)
        return BatchNormAdapter(name, context, why, BatchNorm(*place, module.num_features, **options))
    if isinstance(module, nn.GroupNorm):
        groups, channels = module.num_groups, module.num_channels
    else:  # InstanceNorm: every channel is a group
        groups = channels = module.num_features
    return ChannelNormAdapter(name, context, why, GroupNorm(*place, groups, channels, **options))
