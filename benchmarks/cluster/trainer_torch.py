"""PyTorch's own peers as trainers: DDP, FSDP2, HSDP, TP and FSDP2 x TP, on the plain Llama of `shared/peers.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.cluster.trainer_base import MAX_NORM, Trainer, adamw
from benchmarks.shared.peers import Llama, PeerModel, init_weights, rows_of
from benchmarks.shared.workloads import Workload


class DTensorTrainer(Trainer):
    """FSDP2, HSDP, TP or FSDP2 x TP: parameters are DTensors, and gradients are clipped as in torchtitan."""

    def __init__(self, workload: Workload, mesh: DeviceMesh, *, explicit: bool) -> None:
        self.peer = PeerModel(workload, mesh, explicit=explicit)
        init_weights(self.peer.module, workload.config)
        self.optimizer = adamw(self.peer.module.parameters())

    def step(self) -> Tensor:
        loss = self.peer.forward_backward()
        parameters = list(self.peer.module.parameters())
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip_grads_with_norm_(parameters, MAX_NORM, norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class DDPTrainer(Trainer):
    """DDP: every rank holds the whole model, and gradients are all-reduced in buckets during backward."""

    def __init__(self, workload: Workload, mesh: DeviceMesh) -> None:
        self.tokens, self.targets = rows_of(workload, mesh["replicate"], torch.device("cpu"))
        with torch.device("meta"):
            module: nn.Module = Llama(workload.config).to(workload.dtype)
        init_weights(module.to_empty(device="cpu"), workload.config)
        self.module = module
        self.model = DistributedDataParallel(module, process_group=mesh.get_group("replicate"), init_sync=False)
        self.optimizer = adamw(module.parameters())

    def step(self) -> Tensor:
        logits = self.model(self.tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
        del logits
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
