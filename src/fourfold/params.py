"""Parameters on the grid: DTensors of which every rank holds a shard.

Layers read their shards and nothing else. Whoever else computes with a parameter while autograd records (a weight
penalty outside of the model, say) is given the whole tensor, so that plain tensors and parameters mix as in a plain
model; the gradient of the whole goes back to the shards through `Gradients`. Where nothing is recorded, in optimizers
and checkpoints, a parameter is an ordinary DTensor.

A shard that a collective is still writing is a `LazyTensor`: whoever touches it gets the finished value, never a stale
one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map_only

from fourfold import comm
from fourfold.engine import in_backward
from fourfold.grid import Grid
from fourfold.layout import Spec


class LazyTensor(Tensor):
    """Stands for `held` until it is used for the first time; `settle` then waits for the collective."""

    held: Tensor
    settle: Callable[[], None]

    @staticmethod
    def __new__(cls, held: Tensor, settle: Callable[[], None]) -> LazyTensor:
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
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.arrived, (args, kwargs or {}))
        return func(*args, **kwargs)


def local_of(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; `to_local()` would record a node in the graph."""
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local.arrived() if type(local) is LazyTensor else local


def wait_on_use(tensor: Tensor, settle: Callable[[], None]) -> None:
    """From now on the first use of this DTensor's shard calls `settle`, which must end in `restore`."""
    tensor._local_tensor = LazyTensor(local_of(tensor), settle)  # type: ignore[attr-defined]


def restore(tensor: Tensor) -> None:
    local = tensor._local_tensor  # type: ignore[attr-defined]
    if type(local) is LazyTensor:
        tensor._local_tensor = local.held  # type: ignore[attr-defined]


aten = torch.ops.aten

ON_SHARDS = {
    *(aten.detach.default, aten.alias.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default),
}
"""Operations through which autograd carries no gradient of a parameter: they give a DTensor in every case."""


class ShardedParameter(DTensor):
    """This rank's shard of a parameter, with the shape of the whole."""

    spec: Spec
    grid: Grid
    label: str = "parameter"
    """Its name in the model, for the ledger."""
    gradients: Callable[[], Any] = staticmethod(lambda: None)
    """Return the `Gradients` of its model, which it refers to weakly: those hold the parameter."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in ON_SHARDS or func._schema.is_mutable or not _recorded():
            return DTensor.__torch_dispatch__(func, types, args, kwargs)
        args, kwargs = tree_map_only(DTensor, read_whole, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """This rank's shard as a DTensor that autograd does not follow."""
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy other values into the shard: those of a DTensor that is cut alike, or of a whole tensor."""
        if value.shape != self.shape:
            raise ValueError(f"{self.label}: .data of shape {tuple(self.shape)} cannot become {tuple(value.shape)}")
        with torch.no_grad():
            if isinstance(value, DTensor):
                local_of(self).copy_(local_of(value.redistribute(self.device_mesh, self.placements)))
            else:
                local_of(self).copy_(self.spec.storage.take(value, self.grid))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        if id(self) not in memo:
            copied = shard_parameter(local_of(self).detach().clone(), self.spec, self.grid)
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle the DTensor: a grid belongs to its process."""
        return self.detach().__reduce_ex__(proto)


def leaf_of(parameter: nn.Parameter) -> torch.autograd.graph.Node:
    """The node with which autograd would accumulate a trained parameter's gradient; autograd does not hold it."""
    with torch.enable_grad():
        return torch.ops.aten.alias(parameter).grad_fn.next_functions[0][0]


def _recorded() -> bool:
    """Whether autograd records this operation, or runs it as the backward of a recorded one."""
    if torch.is_grad_enabled():
        return True
    node = torch._C._current_autograd_node()
    return node is not None and node.name() != "torch::autograd::AccumulateGrad"  # whose hooks may run an optimizer


def whole_tensor(tensor: DTensor) -> Tensor:
    """Gather a parameter, or what was computed from shards, on every rank of a place."""
    if not isinstance(tensor, ShardedParameter):
        return tensor.full_tensor()
    spec = tensor.spec
    return comm.join(local_of(tensor), spec.storage, spec.shape, tensor.grid, label=tensor.label)


def read_whole(tensor: DTensor) -> Tensor:
    """Gather a tensor for an operation that autograd records: a trained parameter's gradient will come from there."""
    owner = tensor.gradients() if isinstance(tensor, ShardedParameter) and not in_backward() else None
    if owner is not None:
        owner.forward_pass.read(tensor)
    return whole_tensor(tensor)


def adopt(parameter: nn.Parameter, spec: Spec, grid: Grid) -> None:
    """Make a DTensor a parameter on the grid. `module.to(...)` leaves one in the place of each parameter."""
    parameter.__class__ = ShardedParameter  # type: ignore[assignment,bad-argument-type]
    parameter.spec, parameter.grid = spec, grid  # type: ignore[attr-defined]


def shard_parameter(local: Tensor, spec: Spec, grid: Grid) -> nn.Parameter:
    """This rank's shard as a parameter of the global shape."""
    whole = torch.empty(spec.shape, dtype=local.dtype, device="meta")
    lies = DTensorSpec(
        grid.mesh, tuple(spec.storage.placements()), TensorMeta(whole.shape, whole.stride(), whole.dtype)
    )
    trained = local.is_floating_point() or local.is_complex()  # torch has no gradients of whole numbers
    # `.data` counts its own changes: views of one memory count together, and what is gathered ahead would be gathered
    # again when a neighbour changes
    parameter = ShardedParameter(own_storage(local).data, lies, requires_grad=trained)
    adopt(parameter, spec, grid)  # type: ignore[arg-type]
    parameter._is_param = True  # what nn.Parameter does, but for a detach, of which torch would derive the layout anew
    return parameter  # type: ignore[return-value]


def own_storage(local: Tensor) -> Tensor:
    """The same memory in a storage that holds nothing else.

    A DTensor takes over its local tensor's offset, and with one torch's deepcopy mistakes it for a tensor that has
    memory of its own. The memory lives as long as any part of it is used.
    """
    storage = local.untyped_storage()
    if local.is_meta or local.numel() == 0 or storage.nbytes() == local.nbytes:
        return local
    first, size = local.storage_offset(), local.element_size()
    last = first + sum((length - 1) * stride for length, stride in zip(local.shape, local.stride(), strict=True))
    own = storage[first * size : (last + 1) * size]
    return local.new_empty(0).set_(own, 0, local.shape, local.stride())  # type: ignore[arg-type]
