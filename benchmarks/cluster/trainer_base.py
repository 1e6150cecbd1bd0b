"""What all trainers of the comparison share: the process groups and the interface."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fourfold as ff
from fourfold.train.launch import share_cores


class Groups:
    """The grids of one rank, and device meshes over the same ranks.

    Process groups are expensive, so all trainers on a layout share them. They live as long as the process, because
    torch caches meshes and treats equal ones as the same.
    """

    def __init__(self) -> None:
        self._grids: dict[ff.Shape, ff.Grid] = {}
        self._meshes: dict[ff.Shape, DeviceMesh] = {}
        self._pipes: dict[ff.Shape, DeviceMesh] = {}

    def grid(self, shape: ff.Shape) -> ff.Grid:
        if shape not in self._grids:
            self._grids[shape] = ff.Grid.of_shape(shape, device="cpu")
            share_cores()
        return self._grids[shape]

    def mesh(self, shape: ff.Shape) -> DeviceMesh:
        """Return the mesh with dims replicate, dp and tp, which are the axes data, z and x."""
        if shape not in self._meshes:
            grid = self.grid(shape)
            mesh = DeviceMesh.from_group(
                [grid.mesh.get_group(axis) for axis in ("data", "z", "x")],
                "cpu",
                mesh=shape.mesh_ranks()[:, 0, :, :, 0].permute(2, 1, 0).contiguous(),
                mesh_dim_names=("replicate", "dp", "tp"),
            )
            if shape.x > 1 and shape.world > shape.x:
                mesh["dp", "tp"]._flatten()  # lets the gradient norm travel in one message, as torch advises
            self._meshes[shape] = mesh
        return self._meshes[shape]

    def pipe(self, ranks: int, replicas: int) -> DeviceMesh:
        """Return the mesh of a pipeline with this many ranks, and with replicas of each stage side by side."""
        shape = ff.Shape(x=replicas, data=ranks)
        if shape not in self._pipes:
            grid = self.grid(shape)
            self._pipes[shape] = DeviceMesh.from_group(
                [grid.mesh.get_group(axis) for axis in ("data", "x")],
                "cpu",
                mesh=torch.arange(ranks * replicas).view(ranks, replicas),
                mesh_dim_names=("pipe", "replicate"),
            )
        return self._pipes[shape]


class Trainer(ABC):
    """A model on this rank that takes whole training steps: forward, backward, clipping, AdamW."""

    @abstractmethod
    def step(self) -> Tensor | None:
        """Take one step and return this rank's loss, detached, or None if the rank has none; the mean over all ranks
        that have one is the loss of the batch."""

    def close(self) -> None:
        """Release the memory; no step may follow."""
        self.__dict__.clear()
        gc.collect()  # hooks and their modules refer to each other
