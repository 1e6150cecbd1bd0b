"""All sides of a comparison as whole training steps on gloo ranks: the same Llama, batch, first weights and optimizer.

    groups = Groups()
    trainer = make("FSDP2 x TP", size, ff.Shape(x=2, z=2), groups=groups)
    losses = [trainer.step() for _ in range(3)]   # the mean over ranks is that of the batch
    trainer.close()

Every layout is a `Shape`, whoever the side is: x cuts tensors, z cuts weights, data replicates, and the order says
which of them are neighbours. This file owns the base and Fourfold's side; each framework has a file of its own, which
is imported when it is asked for.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fourfold as ff
from fourfold.arriving import local_of
from fourfold.optim import AdamW
from fourfold.train.launch import share_cores
from sides import Size

RATE = 1e-3
MAX_NORM = 1.0

AXES_OF = {
    "fourfold": ("x", "y", "z", "data"),
    "DDP": ("data",),
    "FSDP2": ("z",),
    "FSDP2 explicit prefetch": ("z",),
    "HSDP": ("z", "data"),
    "TP": ("x",),
    "FSDP2 x TP": ("x", "z"),
    "DeepSpeed ZeRO-3": ("z",),
    "Megatron TP": ("x", "data"),
}
"""The sides, and which axes of a layout each can use."""


class Groups:
    """The grids of one rank, and the same ranks as meshes of torch. Process groups are dear: all sides on a layout
    share them. They live as long as the process, since torch remembers meshes and takes equal ones for the same."""

    def __init__(self) -> None:
        self._grids: dict[ff.Shape, ff.Grid] = {}
        self._meshes: dict[ff.Shape, DeviceMesh] = {}

    def grid(self, shape: ff.Shape) -> ff.Grid:
        if shape not in self._grids:
            self._grids[shape] = ff.Grid(**shape.sizes, order=shape.order, device="cpu")
            share_cores()
        return self._grids[shape]

    def mesh(self, shape: ff.Shape) -> DeviceMesh:
        """Dims replicate, dp and tp are the axes data, z and x."""
        if shape not in self._meshes:
            grid = self.grid(shape)
            mesh = DeviceMesh.from_group(
                [grid.mesh.get_group(axis) for axis in ("data", "z", "x")],
                "cpu",
                mesh=shape.mesh_ranks()[:, 0].permute(2, 1, 0).contiguous(),
                mesh_dim_names=("replicate", "dp", "tp"),
            )
            if shape.z > 1 and shape.x > 1:
                mesh["dp", "tp"]._flatten()  # the norm of gradients in one message, as torch advises
            self._meshes[shape] = mesh
        return self._meshes[shape]


class Trainer(ABC):
    """A model on this rank that takes whole training steps: forward, backward, clip to norm 1, AdamW."""

    @abstractmethod
    def step(self) -> Tensor:
        """This rank's loss, detached; the mean over ranks is that of the batch."""

    def close(self) -> None:
        """Give back the memory; no step may follow."""
        self.__dict__.clear()
        gc.collect()  # hooks and their modules hold each other


class Fourfold(Trainer):
    """As `fourfold train` takes its steps, but that each ends with all it sent: in training the next forward pass hides
    the parameters that a sharded optimizer gathers."""

    def __init__(self, size: Size, grid: ff.Grid, policy: ff.Policy) -> None:
        self.model = ff.models.build(size.config, grid, policy=policy, dtype=size.dtype)
        self.optimizer = AdamW(self.model, RATE)
        self.tokens, self.targets = (ff.local_rows(part, grid) for part in size.batch(grid.device))
        self.count = size.tokens

    def step(self) -> Tensor:
        loss = self.model(self.tokens, self.targets, count=self.count)
        loss.backward()
        self.optimizer.clip_and_step(MAX_NORM)
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            local_of(parameter)  # waits
        return loss.detach()


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """torch's, with the settings that Fourfold's has: decay on matrices only."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else others).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, RATE, betas=(0.9, 0.95), eps=1e-8, fused=True)


def make(
    side: str,
    size: Size,
    layout: ff.Shape | Mapping[str, int],
    policy: ff.Policy | None = None,
    *,
    groups: Groups,
) -> Trainer:
    """That side on that layout, with its first weights. All ranks make the same trainers in the same order."""
    shape = layout if isinstance(layout, ff.Shape) else ff.Shape(**layout)
    if side not in AXES_OF:
        raise ValueError(f"there is no side {side!r}; there are {', '.join(AXES_OF)}")
    if unused := [axis for axis in shape.several if axis not in AXES_OF[side]]:
        raise ValueError(f"{side} cannot use axis {unused[0]} of {shape}; it uses {', '.join(AXES_OF[side])}")
    if side == "fourfold":
        return Fourfold(size, groups.grid(shape), policy or ff.Policy())
    if policy is not None:
        raise ValueError(f"{side} has no policy; leave it out, it is for fourfold alone")
    if side == "DeepSpeed ZeRO-3":
        from trainers_deepspeed import DeepSpeed

        return DeepSpeed(size, groups.mesh(shape))
    if side == "Megatron TP":
        from trainers_megatron import Megatron

        return Megatron(size, groups.mesh(shape))
    from trainers_torch import DataParallel, Sharded

    if side == "DDP":
        return DataParallel(size, groups.mesh(shape))
    return Sharded(size, groups.mesh(shape), explicit=side == "FSDP2 explicit prefetch")
