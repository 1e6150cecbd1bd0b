"""A script that measures as every rank of an emulated cluster: torchrun starts it again with `--rank-of FILE`.

The script calls `measure_on_cluster`, which writes what ranks are told to a file. Started with `--rank-of` and that
file, the script calls `run_rank`, which measures and leaves the result beside the file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.emulate import Cluster, ClusterShape, exit_on_signals
from benchmarks.shared.rank_pool import RankContext

JOB_SECONDS = 580.0
"""How long a job may take."""


def add_rank_of(parser: argparse.ArgumentParser) -> None:
    """Add the option by which torchrun starts a script as a rank."""
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)


def measure_on_cluster(script: str, shape: ClusterShape, setting: Any) -> list[Any]:
    """Run a script as every rank of an emulated cluster; return the results of the ranks, in their order.

    The setting and the results are written as JSON.
    """
    with tempfile.TemporaryDirectory(prefix="fourfold-job-") as folder:
        told = Path(folder) / "setting.json"
        told.write_text(json.dumps(setting))
        with exit_on_signals(), Cluster(shape) as cluster:
            code = cluster.run([str(Path(script).resolve()), "--rank-of", str(told)], timeout=JOB_SECONDS)
        if code:
            raise SystemExit(f"the job failed with exit code {code}")
        return [json.loads(_result_of(told, rank).read_text()) for rank in range(shape.world)]


def run_rank(told: Path, measure: Callable[[RankContext, Any], Any]) -> int:
    """Be one rank of the emulated cluster: measure with the setting in the file, and leave the result beside it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    context = RankContext(dist.get_rank(), dist.get_world_size(), "cpu")
    found = measure(context, json.loads(told.read_text()))
    _result_of(told, context.rank).write_text(json.dumps(found))
    context.barrier()  # nobody leaves while others still talk to it
    dist.destroy_process_group()
    return 0


def _result_of(told: Path, rank: int) -> Path:
    return told.with_name(f"rank-{rank}.json")
