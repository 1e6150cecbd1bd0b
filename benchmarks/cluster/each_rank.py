"""Scripts that measure on ranks of this machine, or as every rank of an emulated cluster.

On a cluster torchrun starts the script again with `--rank-of FILE`: the script calls `measure_on_cluster`, which writes
what ranks are told to a file. Started with `--rank-of` and that file, the script calls `run_rank`, which measures and
leaves the result beside the file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster.emulate import Cluster, ClusterShape, exit_on_signals
from benchmarks.shared.rank_pool import RankContext, RankPool

JOB_SECONDS = 580.0
"""How long a job may take."""


@dataclass(frozen=True)
class RanksOfCommand:
    """The ranks that a command measures on: of an emulated cluster, or without one of this machine."""

    cluster: ClusterShape | None
    world: int

    def __str__(self) -> str:
        cores = f"{os.cpu_count()} {os.uname().machine} cores"
        return (
            f"{cores} shared by {self.world} ranks" if self.cluster is None else f"{cores} that emulate {self.cluster}"
        )

    def named(self, page: str) -> str:
        """Return the name of a page of results, which says whether nodes were emulated."""
        return page if self.cluster is None else f"{page}-cluster"

    def measure(self, script: str, measure: Callable[[RankContext, Any], Any], setting: Any) -> list[Any]:
        """Measure on every rank, and return the results of the ranks, in their order."""
        if self.cluster is not None:
            return measure_on_cluster(script, self.cluster, setting)
        pool = RankPool(self.world, "cpu", RankContext)
        try:
            return pool.run(measure, setting, timeout=JOB_SECONDS)
        finally:
            pool.close()


def add_ranks(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the options that say which ranks measure, for how many rounds, and where the page goes."""
    parser.add_argument("--nodes", type=int, help="emulated nodes; default: this machine as it is")
    parser.add_argument("--ranks", type=int, help="all ranks, default 4; with --nodes those of a node, default 2")
    parser.add_argument("--mbit", type=float, help="Mbit/s of each node's link; default: no limit")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, help="default: a page of today in benchmarks/results")
    add_rank_of(parser)


def ranks_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> RanksOfCommand:
    """Return the ranks that the options of `add_ranks` say; end the command if they contradict each other."""
    if options.rounds < 2:
        parser.error("--rounds: quartiles need at least 2")
    if options.mbit is not None and options.nodes is None:
        parser.error("--mbit: only emulated nodes (--nodes) are joined by links")
    if options.nodes is None:
        return RanksOfCommand(None, options.ranks or 4)
    cluster = ClusterShape(options.nodes, options.ranks or 2, options.mbit)
    return RanksOfCommand(cluster, cluster.world)


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
