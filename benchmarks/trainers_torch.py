"""The peers of PyTorch itself as training steps: DDP, and FSDP2, HSDP, TP and FSDP2 x TP on the models of `peers`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from peers import Llama, Peer, rows_of, start
from sides import Size
from trainers import MAX_NORM, Trainer, adamw


class Sharded(Trainer):
    """Parameters are DTensors; gradients are clipped as torchtitan does."""

    def __init__(self, size: Size, mesh: DeviceMesh, *, explicit: bool) -> None:
        self.peer = Peer(size, mesh, explicit=explicit)
        start(self.peer.module, size.config)
        self.optimizer = adamw(self.peer.module.parameters())

    def step(self) -> Tensor:
        loss = self.peer.forward_backward()
        parameters = list(self.peer.module.parameters())
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        clip_grads_with_norm_(parameters, MAX_NORM, norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class DataParallel(Trainer):
    """Whole models, gradients summed in buckets during backward."""

    def __init__(self, size: Size, mesh: DeviceMesh) -> None:
        self.tokens, self.targets = rows_of(size, mesh["replicate"], torch.device("cpu"))
        with torch.device("meta"):
            module: nn.Module = Llama(size.config).to(size.dtype)
        start(module.to_empty(device="cpu"), size.config)
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
