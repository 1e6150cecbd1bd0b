"""Tensors that a collective is still writing. Whoever touches one gets the finished value, never a stale one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only


class Arriving(Tensor):
    """Stands for `held` until it is used for the first time; `settle` then waits for the collective."""

    held: Tensor
    settle: Callable[[], None]

    @staticmethod
    def __new__(cls, held: Tensor, settle: Callable[[], None]) -> Arriving:
        new = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        new.held, new.settle = held, settle
        return new

    def arrived(self) -> Tensor:
        self.settle()
        return self.held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Arriving, Arriving.arrived, (args, kwargs or {}))
        return func(*args, **kwargs)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; `to_local()` would record a node in the graph."""
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local.arrived() if type(local) is Arriving else local


def await_use(tensor: Tensor, settle: Callable[[], None]) -> None:
    """From now on the first use of this DTensor's shard calls `settle`, which must end in `restore`."""
    tensor._local_tensor = Arriving(local_of(tensor), settle)  # type: ignore[attr-defined]


def restore(tensor: Tensor) -> None:
    local = tensor._local_tensor  # type: ignore[attr-defined]
    if type(local) is Arriving:
        tensor._local_tensor = local.held  # type: ignore[attr-defined]
