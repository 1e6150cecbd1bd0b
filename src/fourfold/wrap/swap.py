"""A module's class, replaced in place by one that runs on the grid; identity, hooks, children and names stay."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._pytree import tree_map_only

from fourfold.wrap.borrow import borrow
from fourfold.wrap.generate import generate_on_grid
from fourfold.wrap.layers import Adapter
from fourfold.wrap.placed import Placed, refuse_inside_functions
from fourfold.wrap.precision import require_same_as_autocast
from fourfold.wrap.run import Run
from fourfold.wrap.together import state_of

ADAPTERS = "_fourfold_adapters"
"""Attribute of a converted module: what it does on the grid, outermost first."""


PARENTS = (
    *(nn.Linear, nn.Embedding),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.GroupNorm, nn.SyncBatchNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm),
)
"""Classes of torch whose forward a subclass may ask for."""


def adapters_of(module: nn.Module) -> list[Adapter]:
    return vars(module).get(ADAPTERS, [])


def convert(module: nn.Module, adapter: Adapter) -> None:
    """From now on `adapter` runs the module; where one does already, the new one goes around it."""
    if adapters_of(module):
        vars(module)[ADAPTERS].insert(0, adapter)
        return
    vars(module)[ADAPTERS] = [adapter]
    module.__class__ = _on_grid(type(module))


@functools.cache
def _on_grid(plain: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name whose forward, and that alone, is run by adapters.

    A linear layer, say, with a forward of its own that asks its parent class's (to scale what it gives, to pad what it
    takes) keeps it: what stands in for the parent's then comes after it.
    """
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__getattr__": _getattr(plain)}
    names["_apply"] = _apply(plain)
    for parent in PARENTS:
        if asks_parent(plain, parent):
            between = type(parent.__name__, (parent,), {"forward": _forward(parent)})
            return type(plain.__name__, (plain, between), names)
    methods = {"forward": _forward(plain)}
    if callable(getattr(plain, "generate", None)):
        methods["generate"] = _generate(plain)
    return type(plain.__name__, (plain,), names | methods)


def asks_parent(plain: type[nn.Module], parent: type[nn.Module]) -> bool:
    """Whether a subclass has a forward of its own around its parent's."""
    own = plain.forward
    if not issubclass(plain, parent) or own is parent.forward:
        return False
    code = getattr(own, "__code__", None)
    return code is not None and "__class__" in code.co_freevars and "forward" in code.co_names


def runs(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether its forward is, or asks, that of one of these classes, with no parameters but theirs. What uses its
    weight in a way of its own must not be taken for a layer."""
    if adapters_of(module):
        return isinstance(module, kinds)
    plain = type(module)
    if not module._parameters.keys() <= {"weight", "bias"} or any(module.children()):
        return False
    return any(
        issubclass(plain, kind) and (plain.forward is kind.forward or asks_parent(plain, kind)) for kind in kinds
    )


def _forward(plain: type[nn.Module]) -> Any:
    own = plain.forward

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _refuse_transforms(adapters_of(self)[0])
        refuse_inside_functions(adapters_of(self)[0].run)
        run = functools.partial(own, self)
        for adapter in reversed(adapters_of(self)):
            run = functools.partial(_run, adapter, self, run)
        return run(*args, **kwargs)

    return forward


def _refuse_transforms(adapter: Adapter) -> None:
    """torch.compile would trace through tensors that are cut and through collectives, for many minutes; torch.func's
    transforms replace tensors by ones that neither can take."""
    if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
        raise ValueError(compiled(adapter.name))
    if torch._C._functorch.maybe_current_level() is not None:
        raise ValueError(
            f"{adapter.name or 'the model'} is called inside torch.vmap, torch.func.grad or another transform of "
            "torch.func, which cannot pass through modules on a grid; call the model on a batch of rows, and use "
            "loss.backward() and parameter.grad"
        )


def compiled(name: str) -> str:
    return (
        f"{name or 'the model'} is compiled by torch.compile, which cannot compile modules on a grid; leave "
        "torch.compile and module.compile() out and use ff.parallelize(model, grid, "
        "policy=ff.Policy(compile=True)), which compiles the computation between collectives"
    )


def _run(adapter: Adapter, module: nn.Module, inside: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the precision that the adapter computes in: casts that torch makes in forward alone would not fit backward."""
    device = adapter.run.grid.device.type
    autocast = torch.is_autocast_enabled(device)
    if autocast:
        require_same_as_autocast(adapter.run, torch.get_autocast_dtype(device))
    dtype = adapter.takes(autocast=autocast)
    if dtype is not None:
        args, kwargs = tree_map_only(Tensor, functools.partial(_cast, adapter.run, dtype=dtype), (args, kwargs))
    known = adapter.holds(module) and adapter.accepts(args, kwargs)
    call = functools.partial(adapter, module, inside) if known else inside
    with torch.autocast(device, enabled=False) if autocast and dtype is not None else nullcontext():
        out = call(*args, **kwargs)
    return out.whole() if isinstance(out, Placed) and not adapter.run.cuts else out


def _cast(run: Run, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor once for all layers that read it one after the other: they know it by its identity."""
    if not a.is_floating_point() or a.dtype == dtype:
        return a
    key = dtype, state_of(a)
    if run.cast is None or run.cast[0] is not a or run.cast[1] != key:
        run.cast = a, key, a.to(dtype)
    return run.cast[2]


def _getattr(plain: type[nn.Module]) -> Any:
    own = plain.__getattr__

    @functools.wraps(own)
    def getattribute(self: nn.Module, name: str) -> Any:
        adapters = adapters_of(self)
        lent = borrow(self, name, adapters[-1].run, adapters[-1].name) if adapters else None
        return own(self, name) if lent is None else lent

    return getattribute


def _apply(plain: type[nn.Module]) -> Any:
    own = plain._apply

    @functools.wraps(own)
    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """`to(...)`. Inside forward, where a graph holds the parameters, one that changes nothing is left out."""
        first = next((parameter for parameter in self._parameters.values() if parameter is not None), None)
        if adapters_of(self)[0].run.depth and first is not None:
            tried = torch.empty(0, dtype=first.dtype, device=first.device)
            if (made := fn(tried)).dtype == tried.dtype and made.device == tried.device:
                return self
        return own(self, fn, recurse)

    return apply


def _generate(plain: type[nn.Module]) -> Any:
    own = plain.generate  # type: ignore[attr-defined]

    @functools.wraps(own)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = adapters_of(self)[0].run
        if run.generating:  # inside that of a module around this one
            return own(self, *args, **kwargs)
        run.generating = True
        try:
            return generate_on_grid(own, self, run.grid, *args, **kwargs)
        finally:
            run.generating = False

    return generate
