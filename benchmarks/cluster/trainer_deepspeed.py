"""DeepSpeed's ZeRO-3 as a trainer, with its defaults, on the plain decoder of `shared/decoder.py`.

DeepSpeed reads its accelerator, here the CPU, from an environment variable when it is first imported. It uses all ranks
of the job for data parallelism.
"""

from __future__ import annotations

import inspect
import os

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from benchmarks.cluster.trainer_base import Trainer
from benchmarks.shared.decoder import Decoder
from benchmarks.shared.deepspeed_cpu import start_deepspeed
from benchmarks.shared.models import MAX_NORM, adamw
from benchmarks.shared.peers import init_weights, rows_of
from benchmarks.shared.workloads import Workload

os.environ.setdefault("DS_ACCELERATOR", "cpu")
try:
    import deepspeed
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
except ImportError as error:
    raise ImportError(f"DeepSpeed ZeRO-3 needs deepspeed ({error}); pip install 'fourfold[peers]'") from error

CACHED = "_PartitionedParameterCoordinator__params_to_release"
"""A private method; it is a decorator around the function that has the cache."""


class DeepSpeedTrainer(Trainer):
    """ZeRO-3 with clipping by DeepSpeed's engine and torch's AdamW."""

    def __init__(self, workload: Workload, mesh: DeviceMesh) -> None:
        start_deepspeed()
        self.tokens, self.targets = rows_of(workload, mesh["dp"], torch.device("cpu"))
        module = Decoder(workload.config).to(workload.dtype)
        init_weights(module, workload.config)
        config = {
            "train_batch_size": workload.rows,
            "train_micro_batch_size_per_gpu": len(self.tokens),
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": 3},
            "zero_force_ds_cpu_optimizer": False,  # DeepSpeed's own CPU optimizer needs a compiler
            "zero_allow_untested_optimizer": True,
        }
        self.engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module.parameters()), config=config)

    def step(self) -> Tensor:
        logits = self.engine(self.tokens)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
        del logits
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def close(self) -> None:
        self.engine.destroy()
        # `destroy` leaves two references that would keep the model alive: a global list and a method's cache
        FWD_MODULE_STACK.clear()
        inspect.getclosurevars(getattr(PartitionedParameterCoordinator, CACHED)).nonlocals["func"].cache_clear()
        super().close()
