"""The weights of a model in a folder: a checkpoint without the state of training."""

from __future__ import annotations

import os
from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor import DTensor

from fourfold.arriving import local_of
from fourfold.checkpoint.read import read_tensors
from fourfold.checkpoint.record import Record, require_same_names
from fourfold.checkpoint.write import Held, Tensors, Writing
from fourfold.gradients import gradients_of
from fourfold.layout import Layout
from fourfold.nn.layer import specs_of

MODEL = "model/"
"""Before the names of parameters."""


def save_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the parameters of a model into a folder, which all ranks must see.

    All ranks call it. A folder of weights that is already there is replaced once the new one is complete; an
    error on any rank raises on all of them and leaves it as it was.
    """
    Writing(weights_of(model), gradients_of(model).grid, folder, {}).result()


def load_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Read the parameters of a model, in place, from weights or a checkpoint that any grid of any size has written.

    All ranks call it; each reads only what it holds, and values are cast to the dtype of the model. Whatever
    is missing or does not fit raises on all ranks before any of them has changed a parameter.
    """

    def choose(record: Record) -> Tensors:
        wanted = weights_of(model)
        require_same_names(wanted, {name: None for name in record.tensors if name.startswith(MODEL)}, folder)
        return wanted

    read_tensors(gradients_of(model).grid, folder, choose)


def weights_of(model: nn.Module) -> dict[str, Held]:
    """This rank's shard of every parameter and of every buffer that a state dict has.

    They have the names under which they are stored: `state_dict` would join what a parallelised module holds in parts.
    """
    specs = specs_of(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if strangers := sorted(parameters.keys() - specs.keys()):
        raise ValueError(
            f"{', '.join(map(repr, strangers[:5]))} of {type(model).__name__} are not on the grid; "
            "declare parameters through a fourfold.nn layer, or use ff.parallelize"
        )
    tensors = {
        MODEL + name: Held(local_of(parameters[name]), spec.shape, spec.storage, parameters[name])
        for name, spec in specs.items()
    }
    tensors |= {MODEL + name: held for name, held in _buffers_of(model)}
    if any(held.local.is_meta for held in tensors.values()):
        raise ValueError(f"{type(model).__name__} is on the meta device and has no values; build it on a real one")
    return tensors


def _buffers_of(model: nn.Module) -> Iterator[tuple[str, Held]]:
    """Those that are cut are DTensors; the others are equal on all ranks."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name in module._non_persistent_buffers_set:
                continue
            cut = isinstance(buffer, DTensor)
            storage = Layout.of(buffer.placements) if cut else Layout(())
            held = Held(local_of(buffer) if cut else buffer, tuple(buffer.shape), storage)
            yield f"{prefix}.{name}".lstrip("."), held
