"""What training loops of other libraries ask a model, answered for one that is on the grid.

It reduces its own gradients and lies where it should, so nobody wraps, moves or shards it again; accumulation and
saving have their usual names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from fourfold.gradients import accumulate
from fourfold.grid import Grid
from fourfold.wrap.layouts import Shared
from fourfold.wrap.placed import Parted, Placed, laid
from fourfold.wrap.rules import rule
from fourfold.wrap.state import joined_shards

SAVES = "save_pretrained"
RESIZES = "resize_token_embeddings"


def answer_loops(model: nn.Module, grid: Grid) -> None:
    """Once per parallelised model, on the outermost module."""
    own = vars(model)
    own["_is_accelerate_prepared"] = True  # accelerate: neither wrapped in DDP nor moved
    own["no_sync"] = partial(accumulate, model)  # accelerate and the Trainer: micro-steps before the last
    for module in model.modules():
        if hasattr(type(module), "_is_distributed_loading_by_transformers"):  # the Trainer: likewise
            vars(module)["_is_distributed_loading_by_transformers"] = True
        if callable(save := getattr(type(module), SAVES, None)):
            vars(module)[SAVES] = partial(_save_pretrained, module, partial(save, module), grid)
        if callable(getattr(type(module), RESIZES, None)):
            vars(module)[RESIZES] = partial(_keep_size, module)


def _save_pretrained(module: nn.Module, save: Callable[..., Any], grid: Grid, directory: Any, **options: Any) -> None:
    """Whole tensors under the plain names, written by the first rank. All ranks call it, unless they give a
    `state_dict`: then it is the plain class's."""
    if options.get("state_dict") is not None:
        save(directory, **options)
        return
    whole: dict[str, Tensor] = {}
    for name, value in module.state_dict().items():
        tensor = joined_shards(value, grid) if isinstance(value, DTensor) else value
        if grid.rank == 0:
            whole[name] = tensor.cpu()
    whole_options = options | dict(state_dict=whole, is_main_process=True)
    grid.first_alone(f"save_pretrained({str(directory)!r})", lambda: save(directory, **whole_options))


def _keep_size(module: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, **_: Any) -> Any:
    """Loops ask for the size that the table has as well."""
    table = module.get_input_embeddings()
    size = table.weight.shape[0]
    wanted = size if new_num_tokens is None else new_num_tokens
    if pad_to_multiple_of is not None:
        wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
    if wanted != size:
        raise ValueError(
            f"{RESIZES}({wanted}): the table of {size} tokens is cut over the grid and keeps its size; call "
            f"{RESIZES} before ff.parallelize"
        )
    return table


@rule(torch.autograd.grad)
def refuse_grad(func: Callable, args: tuple, kwargs: dict) -> NoReturn:  # noqa: ARG001
    """Cut tensors make up their wholes anew for every reader: one whole is not in the graph of another."""
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Placed))
    raise RuntimeError(
        f"torch.autograd.grad on a tensor made {next(tensors).placement.run.label}, inside the model: gradients of "
        "tensors that are cut cannot be taken there; keep the module that needs it out of ff.parallelize and call it "
        "beside the model"
    )


def require_unscaled_count() -> None:
    """A model is told the batch's count: refuse a Trainer that scales losses by the number of processes because of it.

    What the model is told is about one place, and its loss is already that of the whole batch.
    """
    if "transformers.trainer" not in sys.modules:
        return
    frame = sys._getframe(1)
    while frame is not None:
        arguments = getattr(frame.f_locals.get("self"), "args", None)
        if frame.f_code.co_name == "compute_loss" and getattr(arguments, "average_tokens_across_devices", False):
            raise ValueError(
                "the Trainer's average_tokens_across_devices=True multiplies losses by the number of processes, and "
                "those of a parallelised model are means over the whole batch already; use "
                "TrainingArguments(average_tokens_across_devices=False)"
            )
        frame = frame.f_back


@rule(Tensor.register_hook)
def register_hook(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Fabric puts one on all that a model returns, logits that are still cut among it. The gradient that a hook sees,
    and may give another for, is cut as the tensor is."""
    tensor, hook = (*args, *kwargs.values())
    layout = tensor.placement
    # of what is shared a rank's share of a gradient is not a part of it
    if not isinstance(layout, Parted) or isinstance(layout, Shared):
        raise RuntimeError(
            f"register_hook on a tensor made {layout.run.label} whose gradient is not whole on any rank; "
            "use it on the model's result or its parameters"
        )

    def on_part(gradient: Tensor) -> Tensor | None:
        given = hook(tensor.like(gradient))
        if given is None:
            return None
        return (given.laid(layout) if isinstance(given, Placed) else laid(given, layout)).local

    return func(tensor.local, on_part)
