"""What all trainers of the comparison share: the process groups, the interface, and AdamW's settings."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fourfold as ff
from fourfold.train.launch import share_cores

ADAMW_LEARNING_RATE = 1e-3
MAX_NORM = 1.0
"""Gradients are clipped to this norm."""


class Groups:
    """The grids of one rank, and device meshes over the same ranks.

    Process groups are expensive, so all trainers on a layout share them. They live as long as the process, because
    torch caches meshes and treats equal ones as the same.
    """

    def __init__(self) -> None:
        self._grids: dict[ff.Shape, ff.Grid] = {}
        self._meshes: dict[ff.Shape, DeviceMesh] = {}

    def grid(self, shape: ff.Shape) -> ff.Grid:
        if shape not in self._grids:
            self._grids[shape] = ff.Grid(**shape.sizes, order=shape.order, device="cpu")
            share_cores()
        return self._grids[shape]

    def mesh(self, shape: ff.Shape) -> DeviceMesh:
        """Return the mesh with dims replicate, dp and tp, which are the axes data, z and x."""
        if shape not in self._meshes:
            grid = self.grid(shape)
            mesh = DeviceMesh.from_group(
                [grid.mesh.get_group(axis) for axis in ("data", "z", "x")],
                "cpu",
                mesh=shape.mesh_ranks()[:, 0].permute(2, 1, 0).contiguous(),
                mesh_dim_names=("replicate", "dp", "tp"),
            )
            if shape.z > 1 and shape.x > 1:
                mesh["dp", "tp"]._flatten()  # lets the gradient norm travel in one message, as torch advises
            self._meshes[shape] = mesh
        return self._meshes[shape]


class Trainer(ABC):
    """A model on this rank that takes whole training steps: forward, backward, clipping, AdamW."""

    @abstractmethod
    def step(self) -> Tensor:
        """Take one step and return this rank's loss, detached; its mean over ranks is the loss of the batch."""

    def close(self) -> None:
        """Release the memory; no step may follow."""
        self.__dict__.clear()
        gc.collect()  # hooks and their modules refer to each other


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return torch's AdamW with the settings of Fourfold's: weight decay on matrices only."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, ADAMW_LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)
