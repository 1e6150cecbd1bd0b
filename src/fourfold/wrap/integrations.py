"""Answers to what other libraries (transformers, accelerate, Fabric) ask of a model, for a wrapped one.

A wrapped model reduces its own gradients and is already on its devices, so nobody may wrap, move or shard it again.
Accumulation, saving and `generate` keep their usual names. A precision that a training loop asks for must be the
policy's: gathered weights and messages have the policy's dtype, so any other precision is refused instead of ignored.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from fourfold import comm
from fourfold.axes import BATCH
from fourfold.data.sampling import local_rows
from fourfold.gradients import accumulate
from fourfold.grid import Grid
from fourfold.layout import GATHERED
from fourfold.nn.rng import key_of, seeded
from fourfold.wrap.grid_tensor import ModelContext, ShardedPlacement, distribute
from fourfold.wrap.ops import rule
from fourfold.wrap.parameters import join_shards
from fourfold.wrap.placements import SharedHeadsPlacement

# training loops

SAVES = "save_pretrained"
RESIZES = "resize_token_embeddings"


def answer_training_loops(model: nn.Module, grid: Grid) -> None:
    """Set the attributes by which training loops know a model that is already distributed."""
    own = vars(model)
    own["_is_accelerate_prepared"] = True  # accelerate then neither wraps the model in DDP nor moves it
    own["no_sync"] = partial(accumulate, model)  # accelerate and the Trainer enter it for all but the last micro-batch
    for module in model.modules():
        if hasattr(type(module), "_is_distributed_loading_by_transformers"):  # the Trainer then does not wrap the model
            vars(module)["_is_distributed_loading_by_transformers"] = True
        if callable(save := getattr(type(module), SAVES, None)):
            vars(module)[SAVES] = partial(_save_pretrained, module, partial(save, module), grid)
        if callable(getattr(type(module), RESIZES, None)):
            vars(module)[RESIZES] = partial(_keep_vocabulary, module)


def _save_pretrained(module: nn.Module, save: Callable[..., Any], grid: Grid, directory: Any, **options: Any) -> None:
    """Write whole tensors under the plain names, from rank 0.

    All ranks call it. If the caller gives a `state_dict`, the plain class's own method writes that.
    """
    if options.get("state_dict") is not None:
        save(directory, **options)
        return
    whole: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        tensor = join_shards(value, grid) if isinstance(value, DTensor) else value
        if grid.rank == 0:
            whole[name] = tensor.cpu()
    whole_options = options | dict(state_dict=whole, is_main_process=True)
    grid.run_on_rank0(f"save_pretrained({str(directory)!r})", lambda: save(directory, **whole_options))


def _keep_vocabulary(
    module: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **_: Any
) -> Any:
    """Accept the size that the embedding has, for which loops also ask, and refuse any other."""
    table = module.get_input_embeddings()
    size = table.weight.shape[0]
    wanted = size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != size:
        raise ValueError(
            f"{RESIZES}({wanted}): the embedding of {size} tokens is cut over the grid and keeps its size; call "
            f"{RESIZES} before ff.parallelize"
        )
    return table


def refuse_scaled_losses() -> None:
    """Refuse a Trainer that multiplies losses by the number of processes.

    The Trainer does so when the model gets the number of targets of the batch. Here that number counts one place's
    targets, and the loss is already the mean over the whole batch.
    """
    if "transformers.trainer" not in sys.modules:
        return
    # the Trainer does not say that it will scale the loss, so look for it among the callers; once per model
    frame = sys._getframe(1)
    while frame is not None:
        arguments = getattr(frame.f_locals.get("self"), "args", None)
        if frame.f_code.co_name == "compute_loss" and getattr(arguments, "average_tokens_across_devices", False):
            raise ValueError(
                "the Trainer's average_tokens_across_devices=True multiplies losses by the number of processes, and "
                "the losses of a parallelised model are means over the whole batch already; use "
                "TrainingArguments(average_tokens_across_devices=False)"
            )
        frame = frame.f_back


@rule(Tensor.register_hook)
def register_hook(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Register a hook on a cut tensor. The hook gets, and may replace, the gradient as a tensor that is cut alike.

    Fabric registers one on everything that a model returns, which includes logits that are still cut.
    """
    tensor, hook = (*args, *kwargs.values())
    placement = tensor.placement
    # several ranks hold a shared head, and each finds only a part of its gradient
    if not isinstance(placement, ShardedPlacement) or isinstance(placement, SharedHeadsPlacement):
        raise RuntimeError(
            f"register_hook on a tensor made {placement.context.label}: no rank has its complete gradient; "
            "use it on the model's result or its parameters"
        )

    def on_part(gradient: Tensor) -> Tensor | None:
        given = hook(tensor.like(gradient))
        return None if given is None else distribute(given, placement).local

    return func(tensor.local, on_part)


# precision

ACCELERATE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""accelerate's names of the dtypes in which it computes."""


def require_accelerate_precision(context: ModelContext) -> None:
    """Refuse a mixed precision of accelerate or of the Trainer that is not the policy's.

    accelerate leaves a wrapped model as it is, so its mixed precision never arrives as autocast.
    """
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None:
        return
    asked = accelerate.AcceleratorState._shared_state.get("_mixed_precision") or "no"
    if asked not in ("no", *ACCELERATE_DTYPES):
        raise ValueError(
            f"accelerate's mixed_precision={asked!r} does not work on a grid; use 'no', or one of "
            f"{[*ACCELERATE_DTYPES]}"
        )
    if asked != "no":
        source = f"accelerate's mixed_precision={asked!r} (the Trainer's {asked}=True)"
        require_dtype(context, source, ACCELERATE_DTYPES[asked])


def require_dtype(context: ModelContext, source: str, dtype: torch.dtype) -> None:
    """Refuse a precision that is not the policy's; `source` says who asked for it."""
    if context.policy.compute_dtype == dtype:
        return
    raise ValueError(
        f"{source} is on, but the model was parallelised with Policy(compute_dtype={context.policy.compute_dtype}) and "
        f"would not follow it; use ff.parallelize(model, grid, policy=ff.Policy(compute_dtype={dtype})), with which it "
        "may stay on, or turn it off"
    )


# generation

SYNCED = "synced_gpus"
"""The argument of transformers' `generate` that means: keep running until all ranks are done."""


def runs_until_all_are_done(own: Callable[..., Any], plain: type[nn.Module]) -> bool:
    """Return whether a `generate` takes `synced_gpus`, by name or, in a class of transformers, among other options."""
    parameters = inspect.signature(own).parameters.values()
    of_transformers = any(base.__module__.startswith("transformers.generation.") for base in plain.__mro__)
    return any(one.name == SYNCED or (of_transformers and one.kind is one.VAR_KEYWORD) for one in parameters)


def generate_alike(own: Callable[..., Any], model: nn.Module, grid: Grid, *args: Any, **kwargs: Any) -> Any:
    """Run a module's own `generate` on all rows on every rank, with the same random numbers.

    Such a loop decides by itself when it ends. With equal rows and draws all ranks end together, so that none waits in
    a gather for a rank that has returned.
    """
    with seeded(_draw(grid), grid.device):
        return own(model, *args, **kwargs)


def _draw(grid: Grid) -> int:
    """Return a number of 52 bits, equal on all ranks, so that torch.manual_seed on rank 0 decides."""
    # fp64 holds 52 bits exactly
    return int(comm.from_first(torch.randint(1 << 52, (1,), dtype=torch.float64, device=grid.device), grid))


def generate_by_place(own: Callable[..., Any], model: nn.Module, grid: Grid, *args: Any, **kwargs: Any) -> Any:
    """Run transformers' `generate` on the same prompts on all ranks; return the tokens of all rows, padded alike.

    `own` is the plain class's method. It runs on the rows of each (data, z) place; the last row is repeated where rows
    do not divide. Ranks of a place that is done early keep running with the others, because they hold a part of their
    weights. All ranks of a place draw the same tokens.
    """
    if kwargs.get("return_dict_in_generate") or kwargs.get("streamer") is not None:
        raise ValueError(
            "generate on a grid returns token ids; return_dict_in_generate and streamer would see the rows of one "
            "place only: leave them out"
        )
    if grid.shape.context > 1:
        raise ValueError(
            f"generate on the grid {grid}: a cache of keys and values is not cut over context; use a grid with "
            "context=1, into which a checkpoint of this one loads"
        )
    rows = _count_rows(args, kwargs)
    places = grid.shape.places
    missing = -rows % places

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != rows:
            return value
        return local_rows(torch.cat([value, value[-1:].expand(missing, *value.shape[1:])]), grid).to(grid.device)

    args = tree_map(cut, args)
    # a tensor of token ids, such as several end tokens, may have as many entries as there are rows
    kwargs = {name: value if name.endswith("_token_id") else tree_map(cut, value) for name, value in kwargs.items()}
    kwargs.setdefault(SYNCED, grid.size(GATHERED) > 1)
    key = key_of(_draw(grid), *(f"{axis}={grid.coords[axis]}" for axis in BATCH))
    with seeded(key, grid.device):
        tokens = own(model, *args, **kwargs)
    sequences = len(tokens) * places // (rows + missing)  # returned per row
    return _join_rows(tokens, grid, _padding_id(model, kwargs))[: rows * sequences]


def _count_rows(args: tuple, kwargs: dict) -> int:
    others = {name: value for name, value in kwargs.items() if not name.endswith("_token_id")}
    for value in tree_leaves((args, kwargs.get("inputs"), kwargs.get("input_ids"), others)):
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    raise ValueError("generate on a grid needs the prompts as a tensor [rows, ...]; give the same tensor on all ranks")


def _padding_id(model: nn.Module, kwargs: dict) -> int:
    """Return the id that fills rows which ended early."""
    for config in (kwargs.get("generation_config"), getattr(model, "generation_config", None)):
        for name in ("pad_token_id", "eos_token_id"):
            value = kwargs.get(name, getattr(config, name, None))
            if value is not None:
                return int(torch.as_tensor(value).flatten()[0])
    return 0


def _join_rows(tokens: Tensor, grid: Grid, padding: int) -> Tensor:
    """Gather the rows of all places, which may have different lengths."""
    for axis in reversed(BATCH):  # innermost cut first
        length = torch.tensor([tokens.shape[1]], device=tokens.device)
        longest = int(comm.all_gather(length, grid, axis, label="generate").wait().max())
        tokens = functional.pad(tokens, (0, longest - tokens.shape[1]), value=padding)
        tokens = comm.all_gather(tokens.contiguous(), grid, axis, label="generate").wait()
    return tokens
