"""Where the numbers of a parallelised model come from: the plain module's, or its own way of drawing them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.grid import Grid
from fourfold.nn.initial import key_of


class Values:
    """The whole tensors of a plain model, one at a time.

    Where it has numbers those of the first rank count, so that ranks which drew others still agree. On the meta device
    they are drawn, block by block, by the model's own code from a generator that depends on the seed and the block's
    name alone.
    """

    def __init__(self, model: nn.Module, grid: Grid, seed: int, blocks: Iterable[str]) -> None:
        self.model, self.grid, self.seed = model, grid, seed
        self.blocks = [name for name in blocks if any(p.is_meta for p in model.get_submodule(name).parameters())]
        self._drawn: tuple[str, nn.Module] | None = None

    def of(self, module: str, name: str, parameter: Tensor) -> Tensor:
        """A tensor of that module, on the device of the grid."""
        if self.grid.device.type == "meta":
            return parameter.detach().to("meta")
        if not parameter.is_meta:
            return comm.from_first(parameter.detach().to(self.grid.device), self.grid)
        block = next((block for block in self.blocks if module == block or module.startswith(f"{block}.")), module)
        if self._drawn is None or self._drawn[0] != block:
            self._drawn = block, self._draw(block)
        inside = self._drawn[1].get_submodule(module[len(block) :].lstrip("."))
        return getattr(inside, name).detach().to(self.grid.device)

    def _draw(self, name: str) -> nn.Module:
        """A copy of the module with initial values, on the CPU."""
        drawn = copy.deepcopy(self.model.get_submodule(name)).to_empty(device="cpu", recurse=self._takes_all(name))
        own = getattr(self.model, "_init_weights", None)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(key_of(self.seed, name))
            for path, module in drawn.named_modules():
                if own is not None:
                    own(module)
                elif callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
                elif any(True for _ in _own_tensors(module)):
                    raise ValueError(
                        f"{'.'.join(part for part in (name, path) if part)} ({type(module).__name__}) is on the meta "
                        "device and has no reset_parameters() to draw its values; give it one, or build the model on a "
                        "real device"
                    )
        return drawn

    def _takes_all(self, name: str) -> bool:
        return name in self.blocks


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
