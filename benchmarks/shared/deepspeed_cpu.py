"""DeepSpeed on the CPU, an optional peer: `pip install 'fourfold[peers]'`."""

from __future__ import annotations

import logging
import os
from typing import Any


def start_deepspeed() -> Any:
    """Return the package, with its communication over this job's gloo ranks.

    DeepSpeed reads its accelerator from an environment variable when it is first imported; its shared-memory
    collectives, which it compiles at the start, are disabled, because they would bypass the network that is measured.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        import deepspeed  # slow to import
    except ImportError as error:
        raise ImportError(f"this peer needs deepspeed ({error}); pip install 'fourfold[peers]'") from error
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed
