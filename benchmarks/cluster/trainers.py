"""Every participant of the comparison as a trainer on gloo ranks: same Llama, batch, initial weights and optimizer.

    groups = Groups()
    trainer = make_trainer("FSDP2 x TP", workload, ff.Shape(x=2, z=2), groups=groups)
    losses = [trainer.step() for _ in range(3)]   # the mean over ranks is the loss of the batch
    trainer.close()

Every layout is a `Shape`, for the peers too: x is tensor parallelism, z shards weights, data replicates, and the order
says which of them are neighbours. Each framework has a file of its own, which is imported only when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

import fourfold as ff
from benchmarks.cluster.trainer_base import ADAMW_LEARNING_RATE, MAX_NORM, Groups, Trainer
from benchmarks.shared.workloads import Workload
from fourfold.optim import AdamW
from fourfold.params import local_of

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
"""The participants, and the axes of a layout that each can use."""


class FourfoldTrainer(Trainer):
    """Steps as `fourfold train` takes them, except that each step ends only when everything it sent has arrived: in
    training, the next forward pass hides the parameters that a sharded optimizer gathers."""

    def __init__(self, workload: Workload, grid: ff.Grid, policy: ff.Policy) -> None:
        self.model = ff.models.build(workload.config, grid, policy=policy, dtype=workload.dtype)
        self.optimizer = AdamW(self.model, ADAMW_LEARNING_RATE)
        self.tokens, self.targets = (ff.local_rows(part, grid) for part in workload.batch(grid.device))
        self.count = workload.tokens

    def step(self) -> Tensor:
        loss = self.model(self.tokens, self.targets, count=self.count)
        loss.backward()
        self.optimizer.clip_and_step(MAX_NORM)
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            local_of(parameter)  # waits until the parameter has arrived
        return loss.detach()


def make_trainer(
    kind: str,
    workload: Workload,
    layout: ff.Shape | Mapping[str, int],
    policy: ff.Policy | None = None,
    *,
    groups: Groups,
) -> Trainer:
    """Return a trainer with its initial weights. All ranks must make the same trainers in the same order."""
    shape = layout if isinstance(layout, ff.Shape) else ff.Shape(**layout)
    if kind not in AXES_OF:
        raise ValueError(f"there is no trainer {kind!r}; choose one of {', '.join(AXES_OF)}")
    if unused := [axis for axis in shape.used_axes if axis not in AXES_OF[kind]]:
        raise ValueError(f"{kind} cannot use axis {unused[0]} of {shape}; it uses {', '.join(AXES_OF[kind])}")
    if kind == "fourfold":
        return FourfoldTrainer(workload, groups.grid(shape), policy or ff.Policy())
    if policy is not None:
        raise ValueError(f"{kind} takes no policy; only fourfold does")
    if kind == "DeepSpeed ZeRO-3":
        from benchmarks.cluster.trainer_deepspeed import DeepSpeedTrainer

        return DeepSpeedTrainer(workload, groups.mesh(shape))
    if kind == "Megatron TP":
        from benchmarks.cluster.trainer_megatron import MegatronTrainer

        return MegatronTrainer(workload, groups.mesh(shape))
    from benchmarks.cluster.trainer_torch import DDPTrainer, DTensorTrainer

    if kind == "DDP":
        return DDPTrainer(workload, groups.mesh(shape))
    return DTensorTrainer(workload, groups.mesh(shape), explicit=kind == "FSDP2 explicit prefetch")
