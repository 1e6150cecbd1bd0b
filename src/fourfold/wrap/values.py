"""Where the numbers of a parallelised model come from: the plain module's, or its own way of drawing them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.grid import Grid
from fourfold.nn.initial import key_of
from fourfold.wrap.swap import adapters_of


class Values:
    """The whole tensors of a plain model, one at a time.

    Where it has numbers those of the first rank count, so that ranks which drew others still agree. On the meta device
    they are drawn, block by block, by the model's own code from a generator that depends on the seed and the block's
    name alone.
    """

    def __init__(self, model: nn.Module, grid: Grid, seed: int, blocks: Iterable[str]) -> None:
        self.grid, self.seed = grid, seed
        self.blocks = [name for name in blocks if any(p.is_meta for p in model.get_submodule(name).parameters())]
        self.plain = as_it_is(model) if any(tensor.is_meta for tensor in _tensors(model)) else model
        """Shards will take the place of the model's tensors one by one."""
        self._drawn: tuple[str, nn.Module, dict[int, int]] | None = None
        """A block, a copy with values, and the state of its tensors before it had any, by `id`."""

    def of(self, module: str, name: str, parameter: Tensor) -> Tensor:
        """A tensor of that module, on the device of the grid."""
        if self.grid.device.type == "meta":
            return parameter.detach().to("meta")
        if not parameter.is_meta:
            return comm.from_first(parameter.detach().to(self.grid.device), self.grid)
        block = next((block for block in self.blocks if module == block or module.startswith(f"{block}.")), module)
        if self._drawn is None or self._drawn[0] != block:
            self._drawn = block, *self._draw(block)
        _, drawn, empty = self._drawn
        inside = drawn.get_submodule(module[len(block) :].lstrip("."))
        found = {**inside._parameters, **inside._buffers}[name]
        if found is None or empty.get(id(found), -1) == found._version:
            raise ValueError(
                f"{f'{module}.{name}'.lstrip('.')} is on the meta device and nothing draws its values; give "
                f"{type(inside).__name__} a reset_parameters() that does, or build the model on a real device"
            )
        return found.detach().to(self.grid.device)

    def _draw(self, name: str) -> tuple[nn.Module, dict[int, int]]:
        """A copy of the module with initial values, on the CPU: of all that is inside a block, else of its own."""
        drawn = copy.deepcopy(self.plain.get_submodule(name)).to_empty(device="cpu", recurse=name in self.blocks)
        empty = {id(tensor): tensor._version for module in drawn.modules() for tensor in _own_tensors(module)}
        own = getattr(self.plain, "_init_weights", None)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(key_of(self.seed, name))
            for module in drawn.modules() if name in self.blocks else (drawn,):
                resets = (getattr(module, word, None) for word in ("reset_parameters", "_reset_parameters"))
                if own is not None:
                    own(module)
                elif reset := next((reset for reset in resets if callable(reset)), None):
                    reset()
        return drawn, empty


def as_it_is(model: nn.Module) -> nn.Module:
    """A copy that has no memory of its own: what is not on the meta device is the model's."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in _tensors(model) if not tensor.is_meta}
    for module in model.modules():
        if adapters_of(module):  # on the grid already
            own = (value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules"))
            shared |= {id(value): value for value in own}
    return copy.deepcopy(model, shared)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
