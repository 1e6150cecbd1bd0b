"""PyTorch's own peers as trainers, on the plain decoder of `shared/decoder.py`: DDP, FSDP2, HSDP, TP, each of them with
TP inside, and pipelines."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.cluster.trainer_base import Trainer
from benchmarks.shared.pipelines import make_peer
from benchmarks.shared.workloads import Line, Workload


class TorchTrainer(Trainer):
    """A peer of `shared/peers.py` or `shared/pipelines.py`."""

    def __init__(self, line: Line, workload: Workload, mesh: DeviceMesh) -> None:
        self.peer = make_peer(line, workload, mesh)
        self.peer.init_weights()

    def step(self) -> Tensor | None:
        return self.peer.step()
