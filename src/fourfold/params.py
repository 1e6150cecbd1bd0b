"""Parameters on the grid: DTensors of which every rank holds a shard.

Layers read their shards and nothing else. Any other computation with a parameter that autograd records, such as a
weight penalty outside of the model, runs on the gathered tensor, so that plain tensors and parameters mix as in a plain
model; the gradient returns to the shards through `Gradients`. Where autograd records nothing, in optimizers and
checkpoints, a parameter is a DTensor, and so is its gradient: `GridDTensor`, which code may also change by hand.

A shard into which a collective is still writing is a `LazyTensor`: the first use waits for the collective, so nobody
reads a stale value.
"""

from __future__ import annotations

import json
import sys
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold import comm
from fourfold.axes import FOLD
from fourfold.dtensor_hooks import whole_of
from fourfold.engine import in_backward
from fourfold.grid import Grid, shards_alone_error
from fourfold.layout import Layout, Spec
from fourfold.torch_hooks import GRID


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

LIKE = {aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default, aten.full_like.default}
"""Operations that make tensors as optimizers keep them; those stay torch's DTensors, for which its fused kernels take
the shortest way."""
ON_SHARDS = {aten.detach.default, aten.alias.default, *LIKE}
"""Operations through which no gradient reaches a parameter; they always return a DTensor and gather nothing."""


RESHAPES = {aten.view.default, aten._unsafe_view.default}
"""Operations that torch runs on shards as if all were equally large, and that then fail on some ranks."""
EXTREMES = {
    getattr(packet, overload)
    for packet in (aten.max, aten.min, aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin, aten.median)
    for overload in packet.overloads()
} | {aten.linalg_vector_norm.default}
"""Operations that may fail on a shard without entries, and so on some ranks alone."""
POINTWISE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
"""Operations that torch, once it has done them with a number and a tensor that owes a sum, does with any tensor of no
dims as if that were a number, and fails."""


class PartOf(NamedTuple):
    """The plain weight that is stored as several parameters, for one of these or what was computed from it."""

    weight: str
    dim: int | None
    """The dim along which the parts lie one after another; None where that is not known."""
    label: str
    """Names the part."""


MIXES_ROWS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
"""Operations that sum over rows, whatever the size of their result."""


class GridDTensor(DTensor):
    """A parameter on a grid, its values or its gradient: a DTensor for code that was written for one process.

    An operation runs on shards where torch can do that, and its result is a `ComputedDTensor`. Any other (a flattened
    tensor whose rows do not divide, roots of a matrix, a change of an entry, by a plain mask, by a mean over a dim that
    is cut) runs on the whole tensor, of which a changed one keeps its part, so all ranks must run it.
    """

    earlier: tuple[weakref.ref[DTensor], ...] = ()
    """What `.data` has returned; it keeps its values when `.data` is set."""
    part_of: PartOf | None = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        changes, changed = func._schema.is_mutable, args[0] if args else None
        if isinstance(kwargs.get("out"), DTensor):
            return _compute_into(func, args, **kwargs)
        if changes and not isinstance(changed, Tensor):  # lists of tensors, as optimizers give them
            return DTensor.__torch_dispatch__(func, types, args, kwargs)
        mixed = any(_is_plain(leaf) for leaf in tree_leaves((args, kwargs)))
        if changes and isinstance(changed, DTensor):
            return _change(func, types, args, kwargs, mixed=mixed)
        if mixed or changes:  # what is changed is a plain tensor, also of one number
            args, kwargs = tree_map_only(DTensor, _met_and_whole, (args, kwargs))
            return func(*args, **kwargs)
        out = _compute(func, types, args, kwargs)
        if func in LIKE:
            return out
        one = changed[0] if isinstance(changed, (list, tuple)) and len(changed) == 1 else changed
        if isinstance(one, GridDTensor) and one.part_of is not None:
            _follow_part(one.part_of, func, args, kwargs, one, out)
        if func._schema._is_view_op() and isinstance(changed, DTensor):
            return _as_views(func, args, kwargs, out)
        return _as_computed(out)

    def __setitem__(self, index: Any, value: Any) -> None:
        if torch.is_grad_enabled() and self.requires_grad:
            raise RuntimeError("an entry of a parameter that requires grad is set; do it under torch.no_grad()")
        change_whole(self, (index, value), lambda whole, more: whole.__setitem__(*more))

    def storage(self) -> NoReturn:
        """Refuse to be written by safetensors, which asks every tensor for its storage."""
        raise shards_alone_error()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), self.clone())

    @property
    def data(self) -> Tensor:
        """The values as a DTensor that autograd does not follow."""
        values = torch._C.TensorBase.data.__get__(self)  # type: ignore[attr-defined]
        self.earlier = *(ref for ref in self.earlier if ref() is not None), weakref.ref(values)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy values into the shard, from a DTensor of the same shape or from a whole tensor."""
        with torch.no_grad():
            part = own_part(value, self._spec, f"{getattr(self, 'label', 'a gradient')}: .data")
            shard = local_of(self)
            # `kept = p.data; p.data = average` keeps the old values of a plain parameter, which gets other memory
            earlier = [values for ref in self.earlier if (values := ref()) is not None and values is not value]
            memory = own_storage(shard.clone()) if earlier else shard
            for values in earlier:
                values._local_tensor = memory
            self.earlier = ()
            shard.copy_(part)


class ComputedDTensor(GridDTensor):
    """What was computed from parameters and gradients on a grid."""

    def __reduce_ex__(self, proto: Any) -> Any:
        """Pickle the plain DTensor, as torch computes it."""
        return DTensor(self._local_tensor, self._spec, requires_grad=False).__reduce_ex__(proto)  # type: ignore[call-arg]


class GatheredView(GridDTensor):
    """A view for which torch has moved data, such as a row of another rank. A change of it is made to `base`."""

    base: DTensor
    of: Callable[[Tensor], Tensor]
    """Takes the view of the whole base."""


def _follow_part(part: PartOf, func: Any, args: Any, kwargs: Any, one: DTensor, out: Any) -> None:
    """Mark what was computed from a part of a weight, or warn where the parts and the whole give different numbers."""
    weight, dim, label = part
    names = [argument.name for argument in func._schema.arguments]
    over = (dict(zip(names, args, strict=False)) | kwargs).get("dim")
    within = dim is not None and over is not None and all(d % one.dim() != dim for d in tree_leaves(over))
    for result in filter(lambda result: isinstance(result, DTensor), tree_leaves(out)):
        smaller = result.numel() < one.numel() and not func._schema._is_view_op() and not within
        if (smaller or func in MIXES_ROWS) and not _in_norm_of_all():
            warnings.warn(PARTS_DIFFER.format(weight=weight, label=label), stacklevel=2)
        else:
            result.part_of = part if result.shape == one.shape else part._replace(dim=None)


def _in_norm_of_all() -> bool:
    """Return whether torch computes the norm of several gradients, which it does one by one on the CPU."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != "_get_total_norm":
        frame = frame.f_back
    return frame is not None and len(frame.f_locals.get("tensors", ())) > 1


PARTS_DIFFER = (
    "{label} is one of the parts that {weight} is stored as, and a norm, a mean or a product of it is not that of the "
    "whole weight: an optimizer or a loop that treats each tensor by itself differs here from one process (sums over "
    "all parameters, such as the norm of all gradients, do not)"
)


def _as_views(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Give views of a tensor on a grid, one or a list, the class by which they are changed."""
    for number, view in enumerate(out if isinstance(out, (list, tuple)) else [out]):
        own, base = view._local_tensor, args[0]._local_tensor
        # a detached shard may be one that a collective still writes, which nobody waits for here
        shares = own is base or own.untyped_storage()._cdata == base.untyped_storage()._cdata
        if shares and not isinstance(args[0], GatheredView) and _is_cut_plainly(view):
            # torch makes parameters only of tensors whose detach() has their own class
            view.__class__ = ComputedDTensor if isinstance(args[0], ComputedDTensor) else GridDTensor
            continue
        view.__class__ = GatheredView
        view.base, earlier = (args[0].base, args[0].of) if isinstance(args[0], GatheredView) else (args[0], None)

        def of(whole: Tensor, number: int = number, earlier: Any = earlier) -> Tensor:
            seen = func(whole if earlier is None else earlier(whole), *args[1:], **kwargs)
            return seen[number] if isinstance(seen, (list, tuple)) else seen

        view.of = of
    return out


def _change(func: Any, types: Any, args: Any, kwargs: Any, *, mixed: bool) -> DTensor:
    """Change a DTensor in place, on shards where torch can."""
    if not mixed and _lie_alike(args[0], args[1:], kwargs):
        try:
            return DTensor.__torch_dispatch__(func, types, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            _require_no_strategy(error)
    change_whole(args[0], (args[1:], kwargs), lambda whole, more: func(whole, *more[0], **more[1]))
    return args[0]


def _compute_into(func: Any, args: Any, *, out: DTensor, **options: Any) -> DTensor:
    """Run an operation that writes its result into a tensor, on whole tensors."""
    change_whole(out, (args, options), lambda whole, given: func(*given[0], **given[1], out=whole))
    return out


def _require_no_strategy(error: Exception) -> None:
    """Raise the error, unless torch found no way to run an operation on shards.

    torch says so before it changes or sends anything, and on all ranks: it has no strategy, or chains to its error that
    of the search. An error of a message, or of the gate, has no cause.
    """
    known = isinstance(error, NotImplementedError) or str(error) == "as_strided not supported with DTensor"
    if not known and error.__cause__ is None:
        raise error


def _as_computed(out: Any) -> Any:
    """Give a result, or a list of results, the class of what is computed from tensors on a grid."""
    for tensor in out if isinstance(out, (list, tuple)) else [out]:
        if isinstance(tensor, DTensor):
            tensor.__class__ = ComputedDTensor
    return out


def _compute(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on shards where torch can do that, else on whole tensors."""
    if func in POINTWISE:
        args = _paid(args)
    uneven = func in RESHAPES and _is_cut_unevenly(args[0])
    if not uneven and not (func in EXTREMES and _is_empty_somewhere(args[0])):
        try:
            return DTensor.__torch_dispatch__(func, types, args, kwargs)
        except (NotImplementedError, RuntimeError) as error:
            _require_no_strategy(error)
    return _compute_whole(func, args, kwargs)


def _compute_whole(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on whole tensors; every rank gets the whole result, as a DTensor."""
    mesh = next(leaf.device_mesh for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, DTensor))
    # a DTensor says that it is contiguous however its parts lie
    args, kwargs = tree_map_only(DTensor, lambda part: _met_and_whole(part).contiguous(), (args, kwargs))
    return tree_map_only(Tensor, lambda out: _everywhere(mesh, out), func(*args, **kwargs))  # type: ignore[call-arg]


def _everywhere(mesh: Any, whole: Tensor) -> DTensor:
    return DTensor(whole, _on_every_rank(mesh, whole), requires_grad=False)  # type: ignore[call-arg]


def _on_every_rank(mesh: Any, whole: Tensor) -> DTensorSpec:
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, TensorMeta(whole.shape, whole.stride(), whole.dtype))


def _is_cut_plainly(tensor: DTensor) -> bool:
    """Return whether a `Layout` can say how a tensor lies: nothing is owed, and no part is strided."""
    return all(type(placement) in (Shard, Replicate) for placement in tensor.placements)


def _paid(operands: Any) -> Any:
    """Return the operands of a pointwise operation; where tensors lie differently, what they owe is paid."""
    lies = [operand.placements for operand in operands if isinstance(operand, DTensor)]
    if len(lies) < 2 or lies[0] == lies[1]:
        return operands
    return tree_map_only(DTensor, _paid_whole, operands)


def _paid_whole(tensor: DTensor) -> DTensor:
    whole = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor if whole == list(tensor.placements) else tensor.redistribute(placements=whole)


def _is_cut_unevenly(tensor: DTensor) -> bool:
    """Return whether some ranks hold more of a tensor than others."""
    return any(length % parts for length, parts in zip(tensor.shape, _parts(tensor), strict=True))


def _is_empty_somewhere(tensor: Tensor) -> bool:
    """Return whether the last ranks may hold nothing of a tensor, because all others hold a part rounded up."""
    return isinstance(tensor, DTensor) and any(
        parts > 1 and length < parts**2 for length, parts in zip(tensor.shape, _parts(tensor), strict=True)
    )


def _parts(tensor: DTensor) -> list[int]:
    """Return into how many parts each dim of a tensor is cut."""
    parts = [1] * tensor.dim()
    for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] *= size
    return parts


def _lie_alike(changed: DTensor, *operands: Any) -> bool:
    """Return whether shards may suffice for a change: torch would search for seconds how to move other operands."""
    own = changed._spec
    return not isinstance(changed, GatheredView) and all(
        leaf.dim() == 0 or (leaf.shape == own.shape and leaf._spec.placements == own.placements)
        for leaf in tree_leaves(operands)
        if isinstance(leaf, DTensor)
    )


def _is_plain(value: Any) -> bool:
    """Return whether DTensors refuse this operand: it is a tensor of no mesh, and more than one number."""
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() > 1


def change_whole(changed: DTensor, operands: Any, change: Callable[[Tensor, Any], Any]) -> None:
    """Change the whole of a tensor on a grid by operands, and keep this rank's part."""
    if isinstance(changed, GatheredView):
        _change_base(changed, operands, change)
        return
    computed = isinstance(changed, ComputedDTensor)
    if not computed and not _is_cut_plainly(changed):
        raise RuntimeError(
            "a gradient is changed while it still owes a sum over ranks; change it after backward(), outside of "
            "ff.accumulate"
        )
    _meet(changed, [True] * changed.device_mesh.ndim, "changing a sharded tensor")  # operands come from rank 0 to all
    with torch.no_grad():
        # on a grid of one rank the whole is the shard itself
        whole = whole_tensor(changed).clone(memory_format=torch.contiguous_format)
        change(whole, tree_map_only(Tensor, lambda operand: _whole_operand(operand, changed._spec), operands))
        if computed and not _is_cut_plainly(changed):  # a sum that is owed is paid once: the result is whole
            changed._local_tensor, changed._spec = whole, _on_every_rank(changed.device_mesh, whole)
        else:
            local_of(changed).copy_(Layout.of(changed).take(whole, Grid.of(changed)))


def _meet(tensor: DTensor, along: Sequence[bool], what: str) -> None:
    """Meet other ranks along these dims of a tensor's mesh before a message that the user's own code asks for."""
    if not in_backward():
        Grid.of(tensor).gate.enter(tensor.device_mesh, tuple(along), what)


def _met_and_whole(tensor: DTensor, what: str = "joining the parts of a sharded tensor") -> Tensor:
    _meet(tensor, [not placement.is_replicate() for placement in tensor.placements], what)
    return whole_tensor(tensor)


def _change_base(view: GatheredView, operands: Any, change: Callable[[Tensor, Any], Any]) -> None:
    def change_and_keep(whole: Tensor, more: Any) -> None:
        seen = view.of(whole)
        change(seen, more)
        view._local_tensor, view._spec = seen.clone(), _on_every_rank(view.device_mesh, seen)

    change_whole(view.base, operands, change_and_keep)


def _whole_operand(operand: Tensor, spec: DTensorSpec) -> Tensor:
    """Return the whole of a DTensor; of a plain tensor rank 0's, because ranks may have drawn it differently."""
    if isinstance(operand, DTensor):
        return whole_tensor(operand)
    grid: Grid = getattr(spec.mesh, GRID)
    if operand.numel() < 2:
        return operand
    return comm.from_first(operand.to(grid.device), grid, spec.mesh.mesh_dim_names)


def own_part(value: Tensor, spec: DTensorSpec, said: str) -> Tensor:
    """Return this rank's part of a whole tensor, which is rank 0's, or of a DTensor, as `spec` cuts it."""
    if value.shape != spec.shape:
        raise ValueError(f"{said} of shape {tuple(spec.shape)} cannot become {tuple(value.shape)}")
    if isinstance(value, DTensor):
        return local_of(value.redistribute(spec.mesh, spec.placements))
    whole, grid = _whole_operand(value, spec), getattr(spec.mesh, GRID)
    return Layout.of(spec).take(whole, grid)


GRAD: Any = torch._C.TensorBase.grad  # type: ignore[attr-defined]
"""torch's descriptor of `.grad`. Code that a step runs for each parameter sets gradients through it, without checks."""


class ShardedParameter(GridDTensor):
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
        if func in ON_SHARDS or func._schema.is_mutable or not _recorded() or _shows_frozen(func, args):
            return GridDTensor.__torch_dispatch__.__func__(cls, func, types, args, kwargs)
        args, kwargs = tree_map_only(DTensor, read_whole, (args, kwargs))
        return func(*args, **kwargs)

    def _set_grad(self, value: Tensor | None) -> None:
        spec = self.complete or self._spec
        if value is not None and type(value) is not GridDTensor:
            owes = isinstance(value, DTensor) and self._owes_as(value)
            part = local_of(value) if owes else own_part(value.detach(), spec, f"{self.label}: .grad")  # type: ignore[arg-type]
            value = grid_dtensor(part, value._spec if owes else spec, self)  # type: ignore[attr-defined]
        GRAD.__set__(self, value)

    def _owes_as(self, value: DTensor) -> bool:
        """Return whether a gradient that code sets still owes the sum over ranks that a backward pass has left.

        What torch computes from complete gradients may owe a sum of its own, which is paid when it is set.
        """
        now = self.grad
        if isinstance(now, DTensor):
            return value.placements == now.placements and not _is_cut_plainly(now)
        return any(placement.is_partial("sum") for placement in value.placements)

    # torch's own getter: a step reads gradients hundreds of times a layer, and one in Python would be a call each time
    grad = property(  # type: ignore[bad-assignment]
        GRAD.__get__,
        _set_grad,
        GRAD.__delete__,
        "The gradient, sharded as the parameter; it may also be set, as a DTensor or as a whole tensor.",
    )

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


def _shows_frozen(func: Any, args: Any) -> bool:
    """Return whether a view shows a frozen parameter to code outside of the model, which may change it there."""
    if not func._schema._is_view_op() or args[0].requires_grad or in_backward():
        return False
    owner = args[0].gradients()
    return owner is not None and not owner.in_pass


def whole_tensor(tensor: DTensor) -> Tensor:
    """Gather a parameter, or a DTensor that was computed from one, on every rank of a place."""
    if isinstance(tensor, ShardedParameter):
        return comm.join(local_of(tensor), tensor.spec.storage, tensor.spec.shape, tensor.grid, label=tensor.label)
    if not _is_cut_plainly(tensor):
        return whole_of(tensor)
    return comm.join(local_of(tensor), Layout.of(tensor), tensor.shape, Grid.of(tensor), counted=False)


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
    if isinstance(tensor, ShardedParameter):
        _meet(tensor, [placement.is_shard() for placement in tensor.placements], f"reading {tensor.label}")
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


def grid_dtensor(local: Tensor, spec: DTensorSpec, of: Tensor) -> GridDTensor:
    """Return a gradient. DTensor.from_local would take a millisecond, and DTensor.__init__ does nothing, slowly."""
    gradient = DTensor.__new__(GridDTensor, own_storage(local), spec, requires_grad=False)
    if (part_of := getattr(of, "part_of", None)) is not None:
        gradient.part_of = part_of
    return gradient


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
