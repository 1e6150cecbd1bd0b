"""Parameters on the grid: DTensors of which every rank holds a shard.

Layers read their shards and nothing else. Any other computation with a parameter that autograd records, such as a
weight penalty outside of the model, runs on the gathered tensor, so that plain tensors and parameters mix as in a plain
model; the gradient returns to the shards through `Gradients`. Where autograd records nothing, in optimizers and
checkpoints, a parameter is an ordinary DTensor.

A shard into which a collective is still writing is a `LazyTensor`: the first use waits for the collective, so nobody
reads a stale value.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map_only

from fourfold import comm
from fourfold.axes import FOLD
from fourfold.engine import in_backward
from fourfold.grid import Grid
from fourfold.layout import Layout, Spec


class LazyTensor(Tensor):
    """Stands for the tensor `held` until its first use, which calls `wait` to wait for the collective."""

    held: Tensor
    wait: Callable[[], None]

    @staticmethod
    def __new__(cls, held: Tensor, wait: Callable[[], None]) -> LazyTensor:
        new = Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), dtype=held.dtype, device=held.device
        )
        new.held, new.wait = held, wait
        return new

    def arrived(self) -> Tensor:
        self.wait()
        return self.held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.arrived, (args, kwargs or {}))
        return func(*args, **kwargs)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor without a node in autograd's graph, which `to_local()` would record."""
    local: Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local.arrived() if type(local) is LazyTensor else local


def shards_of(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return `local_of` each of several parameters, without a call for each."""
    shards = [parameter._local_tensor for parameter in parameters]  # type: ignore[attr-defined]
    return [local_of(parameter) for parameter in parameters] if LazyTensor in map(type, shards) else shards


def wait_on_use(tensor: Tensor, wait: Callable[[], None]) -> None:
    """Make the first use of this DTensor's shard call `wait`, which must call `restore`."""
    tensor._local_tensor = LazyTensor(local_of(tensor), wait)  # type: ignore[attr-defined]


def restore(tensor: Tensor) -> None:
    """Put the plain shard back after its collective has arrived."""
    local = tensor._local_tensor  # type: ignore[attr-defined]
    if type(local) is LazyTensor:
        tensor._local_tensor = local.held  # type: ignore[attr-defined]


aten = torch.ops.aten

ON_SHARDS = {
    *(aten.detach.default, aten.alias.default),
    *(aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default),
}
"""Operations through which no gradient reaches a parameter; they always return a DTensor and gather nothing."""


class ShardedParameter(DTensor):
    """This rank's shard of a parameter, with the shape of the whole."""

    spec: Spec
    grid: Grid
    label: str = "parameter"
    """Its name in the model, which the ledger shows."""
    gradients: Callable[[], Any] = staticmethod(lambda: None)
    """Returns the `Gradients` of its model: a weak reference, because those refer to the parameter."""
    complete: DTensorSpec | None = None
    """The spec of its gradient once nothing is owed any more."""
    counted: bool | None = None
    """Whether this rank's shard counts for the norm of all gradients."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func in ON_SHARDS or func._schema.is_mutable or not _recorded():
            return DTensor.__torch_dispatch__(func, types, args, kwargs)
        args, kwargs = tree_map_only(DTensor, read_whole, (args, kwargs))
        return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:
        """The parameter as a DTensor that autograd does not follow."""
        return torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy values into the shard, from a DTensor of the same shape or from a whole tensor."""
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
        """Pickle the plain DTensor, because a grid belongs to its process."""
        return self.detach().__reduce_ex__(proto)


def apply_where_it_changes(
    own: Callable[..., nn.Module], module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool
) -> nn.Module:
    """Call a module's `_apply`, which `to(...)` and its like call, but leave alone what `fn` does not change.

    torch would make a new parameter of each, and refuses to make one of a shard that is a parameter already.
    """
    parameters = module._parameters
    with torch.no_grad():
        made = {id(each): fn(each) for each in parameters.values() if isinstance(each, ShardedParameter)}
    module._parameters = {name: each for name, each in parameters.items() if made.get(id(each)) is not each}
    try:
        return own(module, lambda tensor: made.pop(id(tensor)) if id(tensor) in made else fn(tensor), recurse)
    finally:
        parameters.update(module._parameters)  # in the order that they had
        module._parameters = parameters


def leaf_of(parameter: nn.Parameter) -> torch.autograd.graph.Node:
    """Return autograd's AccumulateGrad node of a trained parameter; the caller must hold it, autograd does not."""
    with torch.enable_grad():
        return torch.ops.aten.alias(parameter).grad_fn.next_functions[0][0]


def _recorded() -> bool:
    """Return whether autograd records this operation, or runs it as the backward of a recorded one."""
    if torch.is_grad_enabled():
        return True
    node = torch._C._current_autograd_node()
    # hooks of AccumulateGrad may run an optimizer, which steps shards
    return node is not None and node.name() != "torch::autograd::AccumulateGrad"


def whole_tensor(tensor: DTensor) -> Tensor:
    """Gather a parameter, or a DTensor that was computed from one, on every rank of a place."""
    if not isinstance(tensor, ShardedParameter):
        return tensor.full_tensor()
    spec = tensor.spec
    return comm.join(local_of(tensor), spec.storage, spec.shape, tensor.grid, label=tensor.label)


def whole_over_pipe(
    shards: Mapping[str, tuple[Tensor, Layout, Sequence[int]]], grid: Grid
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all pipe coordinates, whole, on every rank, one at a time; the ledger does not count it.

    This rank's tensors are given as its shard, the layout that cut it, and the global shape. All ranks call it.
    """
    own = {name: [list(shape), str(local.dtype).removeprefix("torch.")] for name, (local, _, shape) in shards.items()}
    by_pipe = [json.loads(text) for text in grid.texts_by_pipe(json.dumps(own))]
    homes = {name: place for place, held in reversed(list(enumerate(by_pipe))) for name in held}
    for name in dict.fromkeys(name for held in by_pipe for name in held):
        if name in shards:
            local, layout, shape = shards[name]
            whole = comm.join(local, layout, shape, grid, counted=False)
        else:
            shape, dtype = by_pipe[homes[name]][name]
            whole = torch.empty(shape, dtype=getattr(torch, dtype), device=grid.device)
        yield name, comm.from_pipe(whole, grid, homes[name])


def read_whole(tensor: DTensor) -> Tensor:
    """Gather a tensor for an operation that autograd records, and announce that the parameter gets a gradient."""
    if isinstance(tensor, ShardedParameter) and tensor.spec.view is FOLD:
        _require_same_expert_weights(tensor)
    owner = tensor.gradients() if isinstance(tensor, ShardedParameter) and not in_backward() else None
    if owner is not None:
        owner.forward_pass.read(id(tensor))
    return whole_tensor(tensor)


def _require_same_expert_weights(parameter: ShardedParameter) -> None:
    """Raise unless all ranks that hold parts of the same experts are about to gather this parameter."""
    along = ("expert", "ex", "ez")
    if not comm.equal_along(zlib.crc32(parameter.label.encode()), parameter.grid, along):
        raise RuntimeError(
            f"{parameter.label} is read here outside of its layer, and another parameter on another rank along "
            f"{', '.join(along)}: parts of it lie on all of these, so they must read the same parameters in the same "
            "order; let every place compute the same terms, or use a grid without a fold"
        )


def adopt(parameter: nn.Parameter, spec: Spec, grid: Grid) -> None:
    """Make a plain DTensor a parameter on the grid; `module.to(...)` replaces each parameter by a plain DTensor."""
    parameter.__class__ = ShardedParameter  # type: ignore[assignment,bad-argument-type]
    parameter.spec, parameter.grid = spec, grid  # type: ignore[attr-defined]


def shard_parameter(local: Tensor, spec: Spec, grid: Grid) -> nn.Parameter:
    """Return this rank's shard as a parameter of the global shape."""
    whole = torch.empty(spec.shape, dtype=local.dtype, device="meta")
    lies = DTensorSpec(
        grid.mesh_of(spec.view), tuple(spec.storage.placements()), TensorMeta(whole.shape, whole.stride(), whole.dtype)
    )
    trained = local.is_floating_point() or local.is_complex()  # integers have no gradients
    # `.data` has a version counter of its own. Views of one memory share a counter, so a prefetched weight would be
    # gathered again whenever a neighbour changes.
    parameter = ShardedParameter(own_storage(local).data, lies, requires_grad=trained)
    adopt(parameter, spec, grid)  # type: ignore[arg-type]
    # as nn.Parameter does, but without its detach, for which torch would derive the layout again
    parameter._is_param = True
    return parameter  # type: ignore[return-value]


def own_storage(local: Tensor) -> Tensor:
    """Return the same memory as a tensor with a storage of its own, at offset 0, and its own version counter.

    A DTensor takes over the storage offset of its local tensor, and torch's deepcopy mistakes a DTensor with an offset
    for a tensor with memory of its own. The memory stays allocated while any part of it is used.
    """
    if local.is_meta or local.numel() == 0 or local.untyped_storage().nbytes() == local.nbytes:
        return local
    # the quickest way: a slice of the storage takes eight times as long, and every backward pass needs this
    return torch._C._from_dlpack(torch._C._to_dlpack(local.detach()))  # type: ignore[attr-defined]


def to_front(tensors: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """Return each tensor with one of its dims as dim 0, contiguous: messages join and cut tensors along that one."""
    return [t.movedim(dim, 0).contiguous() if dim else t for t, dim in zip(tensors, dims, strict=True)]


def to_back(tensors: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
    """Return views in which dim 0 is where `to_front` took it from."""
    return [t.movedim(0, dim) if dim else t for t, dim in zip(tensors, dims, strict=True)]
