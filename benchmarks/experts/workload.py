"""What benchmarks of mixtures of experts compute: the size of a block, its weights and tokens, and Fourfold's side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fourfold as ff
from benchmarks.shared.models import filled_on_device
from benchmarks.shared.rank_pool import RankContext
from fourfold import comm
from fourfold.engine import Turns, Wait
from fourfold.layout import Init
from fourfold.nn.layer import assemble, specs_of
from fourfold.nn.moe import MoE
from fourfold.nn.router import Routing
from fourfold.params import local_of

STD = 0.02
"""The standard deviation of weights."""
LARGEST_ERROR = {"cuda": 0.03, "cpu": 1e-5}
"""The largest difference of two sides by rounding, as a share of the norm of what differs: bf16 and fp32."""
KEEPING = ff.Policy(keep_gathered=True, keep_weights=True)
"""Keeps for backward what forward has gathered, as expert parallelism in plain torch does."""


@dataclass(frozen=True)
class BlockSize:
    """A mixture of gated experts, and how many tokens each rank has."""

    experts: int
    chosen: int
    """How many experts a token chooses."""
    width: int
    hidden: int
    """The hidden units of an expert."""
    tokens: int
    """The tokens of a rank."""
    layers: int = 0
    """The blocks of a whole model (`whole_model.py`); 0 for a mixture by itself."""

    @property
    def flops(self) -> int:
        """The FLOPs of the products of experts in forward and backward, for the tokens of one rank."""
        return 3 * 2 * 3 * self.tokens * self.chosen * self.width * self.hidden

    @property
    def about(self) -> str:
        whole = f"A model of {self.layers} blocks with attention, w" if self.layers else "W"
        return (
            f"{whole}idth {self.width}, {self.hidden} hidden units of an expert, {self.tokens:,} tokens of a rank, "
            "gated experts, no token dropped"
        )


class BlockResult(NamedTuple):
    """The outputs of this rank's tokens, and the gradients of these tokens and of all weights, by name."""

    out: Tensor
    da: Tensor
    weights: dict[str, Tensor]
    """The gradients of whole weights, summed over all ranks."""


class BlockSide(Protocol):
    """A block on this rank, as somebody computes it."""

    def step(self) -> tuple[Tensor, Tensor]:
        """Run forward and backward; return the outputs and the gradients of this rank's tokens."""
        ...

    def results(self) -> BlockResult:
        """Run forward and backward, and join the gradients of weights."""
        ...


def dtype_on(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def drawn(seed: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return normal random numbers, equal on all ranks."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype_on(device))


def shapes_of(size: BlockSize) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole weights of a mixture."""
    return {
        "router.weight": (size.experts, size.width),
        "gate": (size.experts, size.hidden, size.width),
        "up": (size.experts, size.hidden, size.width),
        "down": (size.experts, size.width, size.hidden),
    }


def weights_of(size: BlockSize, device: torch.device) -> dict[str, Tensor]:
    """Return the whole weights, equal on all ranks."""
    return {name: STD * drawn(seed, shape, device) for seed, (name, shape) in enumerate(shapes_of(size).items())}


def tokens_of(size: BlockSize, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of a rank, [tokens, width], and the gradient of their outputs."""
    shape = size.tokens, size.width
    return drawn(100 + rank, shape, device), drawn(1000 + rank, shape, device)


@dataclass(frozen=True)
class Way:
    """A grid, and into how many parts the tokens of a rank are cut."""

    shape: ff.Shape
    halves: int = 1

    def __str__(self) -> str:
        return f"fourfold {self.shape}" + (" halves" if self.halves > 1 else "")


class FourfoldBlock:
    """Fourfold's side: one layer, without attention and without an optimizer."""

    def __init__(self, context: RankContext, way: Way, size: BlockSize, weights: Mapping[str, Tensor]) -> None:
        self.way, self.grid = way, context.grid(way.shape)
        init = Init(std=STD)
        routing = Routing(size.experts, size.chosen)
        self.layer = MoE(self.grid, KEEPING, size.width, size.hidden, routing, init=init, out_init=init)
        with filled_on_device():
            assemble(self.layer, self.grid, KEEPING, dtype=dtype_on(context.device))
        load_whole(self.layer, self.grid, lambda name, _: weights[name])
        a, self.dout = tokens_of(size, context.rank, context.device)
        self.parts = [part.contiguous().requires_grad_() for part in a.chunk(way.halves)]
        self.tokens = size.tokens * way.shape.x // way.halves
        """The tokens of a place in each part."""

    def step(self) -> tuple[Tensor, Tensor]:
        found = self._forward_backward()
        for parameter in self.layer.parameters():
            parameter.grad = None
        return found

    def results(self) -> BlockResult:
        out, da = self._forward_backward()
        # a gradient is the mean over places; that of the other side is a sum
        means = take_gradients(self.layer, self.grid)
        return BlockResult(out, da, {name: self.grid.shape.places * mean for name, mean in means.items()})

    def _forward_backward(self) -> tuple[Tensor, Tensor]:
        self.layer.gradients.begin_forward("block")
        outs = self.layer.engine.take_turns([self._turns(part) for part in self.parts])
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        out.backward(self.dout)
        da = torch.cat([part.grad for part in self.parts])  # type: ignore[misc]
        for part in self.parts:
            part.grad = None
        return out.detach(), da

    def _turns(self, part: Tensor) -> Turns[Tensor]:
        routed = yield from self.layer.route(part, self.tokens)
        leaving = self.layer.leave((yield from self.layer.turns(part, self.tokens, routed)), self.tokens)
        yield Wait.ROWS  # the other half computes while the outputs travel back
        return leaving.wait()


def load_whole(module: nn.Module, grid: ff.Grid, whole: Callable[[str, tuple[int, ...]], Tensor]) -> None:
    """Give each parameter of Fourfold's module its part of the whole weight of its name and shape."""
    specs = specs_of(module)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spec = specs[name]
            local_of(parameter).copy_(spec.storage.take(whole(name, tuple(spec.shape)), grid))


def take_gradients(module: nn.Module, grid: ff.Grid) -> dict[str, Tensor]:
    """Return the whole gradients of Fourfold's module by name, which it then has no more."""
    specs, found = specs_of(module), {}
    for name, parameter in module.named_parameters():
        own = local_of(cast("Tensor", parameter.grad))
        found[name] = comm.join(own, specs[name].storage, specs[name].shape, grid, counted=False)
        parameter.grad = None
    return found


def joined(own: Tensor) -> Tensor:
    """Return what ranks have of experts, by rank, on every rank."""
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own.contiguous())  # noqa: TID251  # of a peer, which has no grid
    return torch.cat(parts)


def errors(found: BlockResult, right: BlockResult, *, gradients: bool = True) -> float:
    """Return the largest difference of two results, as a share of the norm of what differs."""
    pairs = [(found.out, right.out)]
    if gradients:
        pairs += [(found.da, right.da), *((found.weights[name], whole) for name, whole in right.weights.items())]
    return max(float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs)


def told_error(error: float, largest: float) -> str:
    """Return an error for a table, which says so if it is more than rounding."""
    return f"{error:.0e}" if error <= largest else f"{error:.0e} **WRONG**"
