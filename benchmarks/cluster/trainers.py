"""Every participant of the comparison as a trainer on gloo ranks: same decoder, batch, initial weights and optimizer.

    groups = Groups()
    trainer = make_trainer(Line("FSDP2 x TP", ff.Shape(x=2, z=2)), workload, groups=groups)
    losses = [trainer.step() for _ in range(3)]   # the mean over ranks that have one is the loss of the batch
    trainer.close()

Every layout is a `Shape`, for the peers too: x is tensor parallelism, z shards weights, data replicates, and the order
says which of them are neighbours; a pipeline has stages instead. DeepSpeed and Megatron have files of their own, which
are imported only when they are used.
"""

from __future__ import annotations

from torch import Tensor

import fourfold as ff
from benchmarks.cluster.settings import OURS
from benchmarks.cluster.trainer_base import Groups, Trainer
from benchmarks.cluster.trainer_torch import TorchTrainer
from benchmarks.shared import peers
from benchmarks.shared.models import LEARNING_RATE, MAX_NORM
from benchmarks.shared.pipelines import PIPELINES
from benchmarks.shared.workloads import Line, Workload
from fourfold.axes import AXES
from fourfold.optim import AdamW
from fourfold.params import local_of

AXES_OF = {
    **dict.fromkeys(OURS, AXES),
    **peers.AXES_OF,
    "DeepSpeed ZeRO-3": ("z",),
    "Megatron TP": ("x", "data"),
    **dict.fromkeys(PIPELINES, ("data",)),
}
"""The participants, and the axes of a layout that each can use."""


class FourfoldTrainer(Trainer):
    """Steps as `fourfold train` takes them, except that each step ends only when everything it sent has arrived: in
    training, the next forward pass hides the parameters that a sharded optimizer gathers."""

    def __init__(self, workload: Workload, grid: ff.Grid, policy: ff.Policy, micro_batches: int) -> None:
        self.model = ff.models.build(workload.config, grid, policy=policy, dtype=workload.dtype)
        self.micro_batches = micro_batches
        self.optimizer = AdamW(self.model, LEARNING_RATE)
        self.tokens, self.targets = (ff.local_rows(part, grid) for part in workload.batch(grid.device))
        self.count = workload.tokens

    def step(self) -> Tensor:
        if self.micro_batches > 1:
            parts = zip(*(rows.chunk(self.micro_batches) for rows in (self.tokens, self.targets)), strict=True)
            loss = ff.forward_backward(self.model, parts)
        else:
            loss = self.model(self.tokens, self.targets, count=self.count)
            loss.backward()
        self.optimizer.clip_and_step(MAX_NORM)
        self.optimizer.zero_grad()
        for parameter in self.model.parameters():
            local_of(parameter)  # waits until the parameter has arrived
        return loss.detach()


def make_trainer(line: Line, workload: Workload, *, groups: Groups) -> Trainer:
    """Return a trainer with its initial weights. All ranks must make the same trainers in the same order."""
    if line.kind not in AXES_OF:
        raise ValueError(f"there is no trainer {line.kind!r}; choose one of {', '.join(AXES_OF)}")
    if unused := [axis for axis in line.shape.used_axes if axis not in AXES_OF[line.kind]]:
        raise ValueError(
            f"{line.kind} cannot use axis {unused[0]} of {line.shape}; it uses {', '.join(AXES_OF[line.kind])}"
        )
    if line.kind in OURS:
        return FourfoldTrainer(workload, groups.grid(line.shape), line.policy, line.micro_batches)
    if line.policy != ff.Policy():
        raise ValueError(f"{line.kind} takes no policy; only fourfold does")
    if line.kind == "DeepSpeed ZeRO-3":
        from benchmarks.cluster.trainer_deepspeed import DeepSpeedTrainer

        return DeepSpeedTrainer(workload, groups.mesh(line.shape))
    if line.kind == "Megatron TP":
        from benchmarks.cluster.trainer_megatron import MegatronTrainer

        return MegatronTrainer(workload, groups.mesh(line.shape))
    return TorchTrainer(
        line, workload, groups.pipe(line.pipe, line.shape.data) if line.pipe > 1 else groups.mesh(line.shape)
    )
