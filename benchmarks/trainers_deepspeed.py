"""DeepSpeed's ZeRO-3 as training steps, on the plain Llama of `peers`, with its defaults.

DeepSpeed is told that its accelerator is the CPU by the environment variable that it reads when it is first imported.
It takes all ranks of the job for data-parallel ones. Its collectives through shared memory, which it compiles when it
starts, are left out: they would pass by the network that is measured.
"""

from __future__ import annotations

import inspect
import logging
import os

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from peers import Llama, rows_of, start
from sides import Size
from trainers import MAX_NORM, Trainer, adamw

os.environ.setdefault("DS_ACCELERATOR", "cpu")
try:
    import deepspeed
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
except ImportError as error:
    raise ImportError(f"DeepSpeed ZeRO-3 needs deepspeed ({error}); pip install 'fourfold[peers]'") from error

CACHED = "_PartitionedParameterCoordinator__params_to_release"
"""A private method, which is a decorator around the function with the cache."""


class DeepSpeed(Trainer):
    def __init__(self, size: Size, mesh: DeviceMesh) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        self.tokens, self.targets = rows_of(size, mesh["dp"], torch.device("cpu"))
        module = Llama(size.config).to(size.dtype)
        start(module, size.config)
        config = {
            "train_batch_size": size.rows,
            "train_micro_batch_size_per_gpu": len(self.tokens),
            "gradient_clipping": MAX_NORM,
            "zero_optimization": {"stage": 3},
            "zero_force_ds_cpu_optimizer": False,  # its own needs a compiler
            "zero_allow_untested_optimizer": True,
        }
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
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
        # what destroy leaves would hold the model for ever: a global list, and a cache of a method by its arguments
        FWD_MODULE_STACK.clear()
        inspect.getclosurevars(getattr(PartitionedParameterCoordinator, CACHED)).nonlocals["func"].cache_clear()
        super().close()
