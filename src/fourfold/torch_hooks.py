"""What a grid changes in torch, once per process: layouts of DTensor operations, norms, optimizers that are refused.

**Layouts.** For every operation, shape and layout, DTensor lists all combinations of what each dim of the mesh could
do: hundreds to thousands on a mesh of four dims. Then it takes one that moves no data, if there is one. On a grid's
mesh the list is first built from the operands' own placements alone, and in full only if none of those is possible. The
choice is the same; an optimizer's first step takes a second instead of a minute. If this release of torch has no such
function, nothing changes.

**Optimizers.** One that treats each element by itself steps DTensors correctly. One that needs whole matrices, norms of
rows or products of all gradients fails inside torch, or silently computes them from shards. Those are refused before
their first step.

**Wrappers and computed weights.** DistributedDataParallel, FSDP, pruning and parametrizations of a module on a grid
fail inside torch, or in the next forward pass. They are refused where they are called.

**Norms and scalers.** torch's `clip_grad_norm_` and `GradScaler` see the gradients of one rank. Those of other pipe
ranks they would leave out silently, so they are refused on a grid with a pipe axis. On a folded grid the weights of
experts are on a mesh of their own, and torch's norm and scaling take tensors of one mesh: they are called for each
mesh, and the norm once more for what it returned.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops import utils
from torch.nn import Module, parallel
from torch.nn.utils import clip_grad, parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from fourfold.axes import PIPE
from fourfold.dtensor_hooks import GRID, install_dtensor_hooks

REPLACED = "_fourfold_replaced"
"""Attribute of a plain parameter that `parallelize` has replaced by shards in the model."""

NAME = "expand_to_full_mesh_op_strategy"
"""torch's function that lists the combinations: `(mesh, op_schema, strategies of one mesh dim, *, ...)`."""
REFUSED = ("Adafactor", "LBFGS", "Muon", "Rprop")
"""Optimizers of torch and transformers that cannot step shards. Rprop would be correct, but it indexes DTensors in
place, which torch does not support."""
HOMES = ("torch", "transformers")
"""The packages whose classes `REFUSED` names."""
ELEMENTWISE = (
    "use an optimizer that treats each element by itself, such as torch.optim.AdamW, SGD, RMSprop, Adagrad or RAdam"
)
"""The way out of errors about optimizers that cannot step shards."""


@functools.cache
def install_torch_hooks() -> None:
    """Change torch for the rest of this process, for meshes and parameters of a grid."""
    register_optimizer_step_pre_hook(_refuse_unfit)
    register_optimizer_step_pre_hook(_come_to_step)
    speed_up_strategies()
    install_dtensor_hooks()
    extend_norms()
    extend_clipping()
    refuse_scalers_of_a_stage()
    refuse_on_grid()


def speed_up_strategies() -> None:
    """Replace torch's function that lists strategies by a faster one."""
    expand = getattr(utils, NAME, None)
    known = expand is not None and hasattr(OpSchema, "args_strategy") and hasattr(OpSchema, "kwargs_strategy")
    if known and not hasattr(expand, "__wrapped__"):
        setattr(utils, NAME, _own_placements_first(expand))


def extend_norms() -> None:
    """Replace torch's norm of many gradients by one for a grid: it refuses to see one stage of a pipeline alone, and
    sums over several meshes."""
    norm: Callable[..., Any] = clip_grad._get_total_norm
    if hasattr(norm, "__fourfold__"):
        return

    @functools.wraps(norm)
    def whole(
        tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if _of_a_stage(tensors):
            raise RuntimeError(
                "torch's clip_grad_norm_ sees only the gradients of this pipe rank's stages; call "
                "ff.clip_grad_norm_(model.parameters(), max_norm), which sums over all of them"
            )
        by_mesh = _by_mesh(tensors)
        if len(by_mesh) < 2:
            return norm(tensors, norm_type, error_if_nonfinite, foreach)
        found = [norm(part, norm_type, foreach=foreach).full_tensor() for part in by_mesh.values()]
        total, (mesh, *_) = norm(found, norm_type, error_if_nonfinite), by_mesh
        # a DTensor, as the norm over one mesh is, so that a loop can treat both alike
        return DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, run_check=False)

    whole.__fourfold__ = True  # type: ignore[attr-defined]
    clip_grad._get_total_norm = whole
    torch.nn.utils.get_total_norm = whole


def extend_clipping() -> None:
    """Replace torch's scaling of gradients by one that takes gradients on several meshes."""
    clip = clip_grad._clip_grads_with_norm_
    if hasattr(clip, "__fourfold__"):
        return

    @functools.wraps(clip)
    def whole(parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None) -> None:
        if isinstance(total_norm, DTensor) and hasattr(total_norm.device_mesh, GRID):
            total_norm = total_norm.full_tensor()  # one mesh has it, and every gradient is multiplied by it
        for part in _by_mesh([parameters] if isinstance(parameters, Tensor) else list(parameters)).values():
            clip(part, max_norm, total_norm, foreach)

    whole.__fourfold__ = True  # type: ignore[attr-defined]
    clip_grad._clip_grads_with_norm_ = whole
    torch.nn.utils.clip_grads_with_norm_ = whole


def _by_mesh(tensors: Sequence[Tensor]) -> dict[Any, list[Tensor]]:
    """Return tensors by the mesh of a grid that they are on; all under None if some are on none."""
    meshes = [each.device_mesh if isinstance(each, DTensor) else None for each in tensors]
    if not all(hasattr(mesh, GRID) for mesh in meshes):
        return {None: list(tensors)}
    found: dict[Any, list[Tensor]] = {}
    for mesh, tensor in zip(meshes, tensors, strict=True):
        found.setdefault(mesh, []).append(tensor)
    return found


def refuse_scalers_of_a_stage() -> None:
    """Replace torch's search for non-finite gradients by one that raises where it would see one stage alone."""
    unscale = GradScaler._unscale_grads_
    if hasattr(unscale, "__fourfold__"):
        return

    @functools.wraps(unscale)
    def whole(scaler: GradScaler, optimizer: Optimizer, *args: Any, **options: Any) -> Any:
        if _of_a_stage(parameter for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError(
                "torch's GradScaler sees only the gradients of this pipe rank's stages, so ranks would skip different "
                "steps; use Policy(compute_dtype=torch.bfloat16), which needs no scaler, and ff.optim.AdamW, whose "
                "clip_and_step skips a step with non-finite gradients on all ranks"
            )
        return unscale(scaler, optimizer, *args, **options)

    whole.__fourfold__ = True  # type: ignore[attr-defined]
    GradScaler._unscale_grads_ = whole  # type: ignore[method-assign]


WRAPS = (
    "a model on a grid is distributed already: its parameters are sharded and its gradients are summed when backward() "
    "returns; call the model itself (a grid with data=N does what DistributedDataParallel does, z=N what FSDP does)"
)
REPLACES = (
    "a parameter on a grid cannot be replaced by one that is computed; do it before ff.parallelize, which computes "
    "such weights whole (for a trained model: load whole_tensors(model, 'state') into the plain one, change that, and "
    "call ff.parallelize and make the optimizer again), or set entries of the parameter under torch.no_grad()"
)


def refuse_on_grid() -> None:
    """Refuse what torch would do to modules on a grid, and cannot. What is imported later is not refused here."""
    refused: list[tuple[Any, str, str, str]] = [
        (parallel.DistributedDataParallel, "__init__", "DistributedDataParallel", WRAPS),
        (parallel.DataParallel, "__init__", "DataParallel", WRAPS),
        (parametrize, "register_parametrization", "register_parametrization", REPLACES),
        (prune, "global_unstructured", "prune", REPLACES),
        (prune.BasePruningMethod, "apply", "prune", REPLACES),
        (WeightNorm, "apply", "weight_norm", REPLACES),
        (SpectralNorm, "apply", "spectral_norm", REPLACES),
    ]
    if fsdp := sys.modules.get("torch.distributed.fsdp"):
        refused.append((fsdp.FullyShardedDataParallel, "__init__", "FullyShardedDataParallel", WRAPS))
    if sharding := sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard"):
        # users have imported fully_shard itself under its name, but it looks this up when it is called
        refused.append((sharding, "_validate_module", "fully_shard", WRAPS))
    for owner, name, said, why in refused:
        if name in vars(owner) and not hasattr(getattr(owner, name), "__fourfold__"):
            _refuse_for_modules_on_grid(owner, name, f"{said}: {why}")


def _refuse_for_modules_on_grid(owner: Any, name: str, message: str) -> None:
    found = vars(owner)[name]
    kind = type(found) if isinstance(found, (classmethod, staticmethod)) else None
    own = found.__func__ if kind else found

    @functools.wraps(own)
    def refuse(*args: Any, **options: Any) -> Any:
        # the object that __init__ was called for is a module without parameters yet
        given = [leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, Module) and "_modules" in vars(leaf)]
        parameters = (parameter for module in given for parameter in module.parameters())
        if any(isinstance(each, DTensor) and hasattr(each.device_mesh, GRID) for each in parameters):
            raise ValueError(message)
        return own(*args, **options)

    refuse.__fourfold__ = True  # type: ignore[attr-defined]
    setattr(owner, name, kind(refuse) if kind else refuse)


def _of_a_stage(tensors: Iterable[Any]) -> bool:
    """Return whether some of these tensors are on a grid with a pipe axis, so that other ranks have more of them."""
    grids = [getattr(each.device_mesh, GRID, None) for each in tensors if isinstance(each, DTensor)]
    return any(grid is not None and grid.size(PIPE) > 1 for grid in grids)


def _own_placements_first(expand: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expand)
    def quick(mesh: Any, op_schema: OpSchema, strategies: Sequence[Sequence[Placement | None]], **options: Any) -> Any:
        operands = [*op_schema.args_strategy, *op_schema.kwargs_strategy]
        specs = [operand.strategies[0].output_spec for operand in operands]
        if not hasattr(mesh, GRID) or any(spec.mesh != mesh for spec in specs):
            return expand(mesh, op_schema, strategies, **options)
        first = options.get("input_index", 1)  # a strategy lists the results, then the operands
        by_dim = set(zip(*(spec.placements for spec in specs), strict=True))
        kept = [each for each in strategies if tuple(entry for entry in each[first:] if entry is not None) in by_dim]
        own = [spec.placements for spec in specs]
        if kept:
            found = expand(mesh, op_schema, kept, **options)
            if any([spec.placements for spec in each.input_specs] == own for each in found.strategies):
                return found
        return expand(mesh, op_schema, strategies, **options)

    return quick


def _refuse_unfit(optimizer: Optimizer, *_: Any) -> None:
    """Raise if this optimizer cannot step its parameters; torch calls this before every step of any optimizer."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if True in [hasattr(parameter, REPLACED) for parameter in parameters]:
        raise RuntimeError(
            "this optimizer was made before ff.parallelize and steps parameters that the model no longer has; make it "
            "after, from model.parameters()"
        )
    unfit = unfit_kind(type(optimizer))
    if unfit is None:
        return
    if any(isinstance(each, DTensor) and hasattr(each.device_mesh, GRID) for each in parameters):
        raise TypeError(f"{unfit.__name__} cannot step parameters that are sharded over a grid; {ELEMENTWISE}")


def _come_to_step(optimizer: Optimizer, *_: Any) -> None:
    """Let the ranks of a grid take their steps between the same passes; torch calls this before every step."""
    first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
    if (owner := getattr(first, "gradients", None)) is not None and (gradients := owner()) is not None:
        gradients.come_to_step()


def unfit_kind(kind: type[Optimizer]) -> type | None:
    """Return the optimizer that cannot step shards, if this class is or derives from one; else None."""
    kinds = [each for each in kind.__mro__ if each.__name__ in REFUSED]
    return kinds[0] if any(each.__module__.partition(".")[0] in HOMES for each in kinds) else None
