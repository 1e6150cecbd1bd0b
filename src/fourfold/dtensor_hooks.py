"""What DTensors on a grid answer, once per process: numbers, random numbers, and whom they communicate with.

**Numbers.** `.item()` of a DTensor is this rank's number: its shard's, or its part of a sum that is still owed. On a
grid `.item()`, `float()`, `bool()`, `.tolist()`, `.numpy()`, comparisons and formatting answer for the whole tensor.

**The gate.** For that, and in many operations on DTensors, ranks communicate. Those that hold parts meet at the grid's
gate first, so that a rank that is there alone is refused.

**Random numbers** for a DTensor are drawn for the whole of it, as one process would, from a generator that must be in
the same state on all ranks; on GPUs torch draws by itself, from a state that it shares between ranks.

DTensors on meshes of others are left to torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

GRID = "_fourfold_grid"
"""Attribute of a mesh that belongs to a grid: the grid."""
DRAWS = tuple(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overloads in {
        **dict.fromkeys(("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_"), ("default",)),
        **dict.fromkeys(("rand_like", "randn_like", "bernoulli"), ("default",)),
        "bernoulli_": ("float",),
        "random_": ("default", "from", "to"),
        "randint_like": ("default", "low_dtype"),
    }.items()
    for overload in overloads
)
"""Operations on a tensor that draw random numbers."""
DRAWS_THAT_READ = (torch.ops.aten.bernoulli.default,)
"""Draws that read the tensor's values."""


def install_dtensor_hooks() -> None:
    """Change DTensor for the rest of this process, for meshes of a grid."""
    gate_redistribution()
    read_whole_numbers()


def gate_redistribution() -> None:
    """Let DTensors on a grid communicate only once all ranks that hold parts of them have come."""
    move = _redistribute.redistribute_local_tensor
    if hasattr(move, "__fourfold__"):
        return

    @functools.wraps(move)
    def together(local_tensor: Tensor, now: DTensorSpec, then: DTensorSpec, **options: Any) -> Tensor:
        grid = getattr(now.mesh, GRID, None)
        if grid is not None and not local_tensor.is_meta:
            # of a whole tensor each rank takes its part by itself
            moved = [not a.is_replicate() and a != b for a, b in zip(now.placements, then.placements, strict=True)]
            grid.gate.enter(now.mesh, tuple(moved), "joining the parts of a sharded tensor")
            for here, there in pairwise(_one_at_a_time(now, then)):
                local_tensor = move(local_tensor, here, there, **options)
            return local_tensor
        return move(local_tensor, now, then, **options)

    together.__fourfold__ = True  # type: ignore[attr-defined]
    for module in (_redistribute, _api, _dispatch):  # each has imported it under its name
        setattr(module, move.__name__, together)


def _one_at_a_time(now: DTensorSpec, then: DTensorSpec) -> Iterator[DTensorSpec]:
    """Yield the specs through which a tensor becomes another one: to become whole, it joins one dim of the mesh a time.

    torch 2.11 joins several dims in one message, over a mesh that it cannot make of a grid's.
    """
    yield now
    lies = list(now.placements)
    if all(a == b or b.is_replicate() for a, b in zip(now.placements, then.placements, strict=True)):
        for dim in reversed(range(now.mesh.ndim)):  # the innermost cut first
            if lies[dim] != then.placements[dim]:
                lies[dim] = then.placements[dim]
                yield DTensorSpec(now.mesh, tuple(lies), now.tensor_meta)
    else:
        yield then


def read_whole_numbers() -> None:
    """Let numbers that are read from a DTensor on a grid be those of the whole tensor."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    aten = torch.ops.aten
    if aten._local_scalar_dense.default in handlers:
        return
    handlers[aten._local_scalar_dense.default] = lambda read, args, _: read(whole_of(args[0]))
    handlers[aten.item.default] = lambda _, args, __: whole_of(args[0]).item()  # so it arrives in inference mode
    # torch compares the shards and asks all ranks of the job, also those of other pipe coordinates
    handlers[aten.equal.default] = lambda _, args, __: args[0].shape == args[1].shape and _all(args[0] == args[1])
    handlers[aten.allclose.default] = lambda _, args, options: _all(torch.isclose(*args, **options))
    for draw in DRAWS:
        handlers[draw] = functools.partial(_draw_whole, handlers)
    for name in ("tolist", "numpy", "__format__"):
        setattr(DTensor, name, _of_whole(name))


def _draw_whole(handlers: dict[Any, Any], draw: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Draw random numbers for the whole tensor, as one process would, and keep this rank's part.

    Where torch's DTensor draws by itself, on GPUs, from a state that it shares between ranks, it does so.
    """
    tensor, mesh = args[0], args[0].device_mesh
    if not hasattr(mesh, GRID) or mesh.device_type != "cpu":
        own = handlers.pop(draw)
        try:
            return draw(*args, **options)
        finally:
            handlers[draw] = own
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if draw in DRAWS_THAT_READ:  # they read the tensor: its probabilities
        whole = whole_of(tensor)
    drawn = draw(whole, *args[1:], **options)
    meta = TensorMeta(tensor.shape, drawn.stride(), drawn.dtype)
    # a sum that is still owed is paid once: what is drawn is whole
    lies = tuple(Replicate() if each.is_partial() else each for each in tensor.placements)
    spec = DTensorSpec(mesh, lies, meta)
    part = _redistribute.redistribute_local_tensor(drawn, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, meta), spec)
    if not draw._schema.is_mutable:
        return DTensor(part.contiguous(), spec, requires_grad=False)
    if lies != tensor.placements:
        raise RuntimeError(f"{draw} on a gradient that is not summed over ranks yet; draw after the backward pass")
    tensor._local_tensor.copy_(part)
    return tensor


def whole_of(tensor: DTensor) -> Tensor:
    """Return the whole tensor if it is on a grid, else this rank's part, as torch would."""
    mesh = tensor.device_mesh
    if not hasattr(mesh, GRID):
        return tensor._local_tensor
    local = tensor._local_tensor.to(mesh.device_type)  # where its groups communicate
    # a part on an axis of one rank is whole; torch would send it to itself
    lies = [Replicate() if mesh.size(dim) == 1 else each for dim, each in enumerate(tensor.placements)]
    now, then = (DTensorSpec(mesh, tuple(each), tensor._spec.tensor_meta) for each in (lies, [Replicate()] * mesh.ndim))
    return _redistribute.redistribute_local_tensor(local, now, then)


def _all(flags: Any) -> bool:
    return bool(whole_of(flags.all()))


def _of_whole(name: str) -> Callable[..., Any]:
    """Return torch's method of this name, for DTensors on a grid applied to the whole tensor."""
    own = getattr(Tensor, name)

    @functools.wraps(own)
    def read(self: DTensor, *args: Any, **options: Any) -> Any:
        if not hasattr(self.device_mesh, GRID) or (name == "__format__" and self.dim()):
            return own(self, *args, **options)
        if name == "__format__":
            return format(self.item(), *args)
        found = whole_of(self) if not self.requires_grad else self.full_tensor()
        answer = own(found.to(self.device), *args, **options)
        if name == "numpy" and self.device_mesh.device_type == "cpu":
            answer.flags.writeable = False  # one process would share its memory with the parameter
        return answer

    return read
