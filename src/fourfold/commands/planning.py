"""plan, calibrate, launch, doctor: before a long run, and after one that went wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fourfold.commands.parser import add, grid, number, quantity, setting, whole
from fourfold.commands.running import DEVICE, RANKS, SET


def add_plan(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(commands, shape, "plan", "train.plan:plan", "the fastest grid for a model, before anything runs", PLAN)
    asked = one.add_argument_group("the question")
    asked.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a published size such as gpt-80b, a Hugging Face config.json, a .toml, or package.module:function",
    )
    asked.add_argument(
        "--machine",
        required=True,
        metavar="NAME",
        help="a packaged machine such as perlmutter, or a machine file (.toml), which fourfold calibrate writes",
    )
    asked.add_argument("--devices", type=whole, required=True, metavar="N", help="how many devices there will be")
    asked.add_argument(
        "--batch-tokens", type=quantity, required=True, metavar="N", help="tokens of a step, such as 16.8M or 512k"
    )
    asked.add_argument("--seq", type=whole, metavar="N", help="tokens of a sequence; default the model's")
    asked.add_argument(
        "--dtype", choices=["bf16", "fp32"], help="of products; default bf16 where the machine has it, else fp32"
    )
    shown = one.add_argument_group("the answer")
    shown.add_argument("--top", type=whole, default=8, metavar="N", help="grids to show; default 8")
    shown.add_argument("--why", type=grid, metavar="GRID", help="say what this grid, such as x=8,z=4, loses on")
    shown.add_argument("--config", type=Path, metavar="FILE.toml", help="write the best grid as a config to train")
    shown.add_argument("--html", type=Path, metavar="FILE", help="write one page with everything, to explore")
    shown.add_argument("--json", metavar="FILE", help="write the whole plan; -: to standard output, and nothing else")
    shown.add_argument(
        "--trace", type=Path, metavar="FILE", help="write the best grid's step, which opens in ui.perfetto.dev"
    )


def add_calibrate(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(
        commands, shape, "calibrate", "train.calibrate:calibrate", "measure this machine for the planner", CALIBRATE
    )
    one.add_argument("--out", type=Path, required=True, metavar="FILE.toml", help="the machine file to write")
    one.add_argument("--ranks", type=whole, metavar="N", help="local ranks to start; default the GPUs, else the cores")
    one.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)
    one.add_argument(
        "--seconds", type=number, default=60.0, metavar="SECONDS", help="about how long to measure; default 60"
    )


def add_launch(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(commands, shape, "launch", "train.places:launch", "write a job for SLURM or Kubernetes", LAUNCH)
    one.add_argument("config", type=Path, metavar="CONFIG.toml", help="what to train, such as fourfold plan --config")
    kind = one.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", action="store_true", help="a script for sbatch")
    kind.add_argument("--k8s", action="store_true", help="a manifest for kubectl apply")
    one.add_argument(
        "--out", required=True, metavar="RUN", help="the run's folder, on a file system that all nodes share"
    )
    one.add_argument("--name", default="fourfold", help="of the job; default fourfold")
    one.add_argument("--devices", type=whole, metavar="N", help="where the config's grid is auto; default the grid's")
    one.add_argument(
        "--per-node", type=whole, metavar="N", help="devices of a node; default those of the config's plan.machine"
    )
    one.add_argument(
        "--tries", type=whole, default=5, metavar="N", help="how often the run is started at the most; default 5"
    )
    slurm = one.add_argument_group("SLURM alone")
    slurm.add_argument(
        "--time",
        default="24:00:00",
        metavar="LIMIT",
        help="hours:minutes:seconds, or days-hours:minutes; the run saves before it; default 24:00:00",
    )
    slurm.add_argument("--partition", metavar="NAME", help="where to queue; default the cluster's")
    slurm.add_argument("--account", metavar="NAME", help="who pays; default yours")
    slurm.add_argument("--cpus", type=whole, metavar="N", help="cores of a rank; default the cluster's")
    pods = one.add_argument_group("Kubernetes alone")
    pods.add_argument("--image", metavar="NAME", help="the container, with fourfold installed; needed")
    pods.add_argument("--claim", metavar="NAME", help="the volume claim that is mounted where --out lies; needed")


def add_doctor(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(commands, shape, "doctor", "train.doctor:doctor", "what went wrong with a run, or would", DOCTOR)
    one.add_argument(
        "path", nargs="?", type=Path, metavar="RUN", help="the run's folder; with --preflight its CONFIG.toml, if any"
    )
    one.add_argument("--preflight", action="store_true", help="look at what a long run needs, before it begins")
    ahead = one.add_argument_group("with --preflight")
    ahead.add_argument(
        "--grid", type=grid, help="such as x=2,z=2; default the config's, without one a line of all ranks"
    )
    ahead.add_argument("--ranks", type=whole, metavar="N", help=RANKS)
    ahead.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)
    ahead.add_argument("--out", metavar="RUN", help="the run's folder to be; it is left as it was")
    ahead.add_argument(
        "--set", action="append", type=setting, default=[], metavar="SECTION.KEY=VALUE", dest="changes", help=SET
    )
    ahead.add_argument("--json", metavar="FILE", help="write checks and what they were found from; -: standard output")


PLAN = """\
Rank the grids, rank orders and policies for a model on a machine, before
anything runs. Needs no device.

package.module:function names your own code. function(grid, policy) returns a
module of Fourfold layers, function() a plain one, which is replicated over
data; its forward(tokens, targets) returns the loss. It is run dry: without
a device, without memory.

Examples:
  fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M
  fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M --why x=4,data=256
  fourfold plan --model my/config.json --machine here.toml --devices 64 --batch-tokens 4M --html plan.html
  fourfold plan --model package.module:function --seq 2048 --machine here.toml --devices 8 --batch-tokens 64k"""
CALIBRATE = """\
Measure this machine: links between its ranks, products, attention, memory. The
file is a machine for fourfold plan. Outside of torchrun and SLURM the local
ranks are started here; with several nodes the network is measured too.

Examples:
  fourfold calibrate --out here.toml
  fourfold plan --model gpt-1.4b --machine here.toml --devices 8 --batch-tokens 64k
  torchrun --nnodes 2 --nproc-per-node 8 -m fourfold.cli calibrate --out cluster.toml --seconds 180"""
LAUNCH = """\
Write what a scheduler needs to run a config: a SLURM script or a Kubernetes
manifest. Both start every rank, send SIGTERM in time for a last checkpoint,
and start the run again when it dies; it goes on by itself.

Examples:
  fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M --config run.toml
  fourfold launch --slurm run.toml --out /shared/runs/one --time 24:00:00 --account physics > job.sh
  fourfold launch --k8s run.toml --out /runs/one --image registry/fourfold:1 --claim runs > job.json"""
DOCTOR = """\
Say what went wrong with a run: why it ended, what its ranks found out together,
and what each of them did last, from the tapes that they keep in its folder.
Also of one that is still there and does not move.

With --preflight look, for a minute at the most, at what a long run needs, on
the ranks that it will have: versions, devices and how fast they are, memory,
clocks, every link of every axis, disk. Each is ok, a warning or FAILED, with
what to do; one that FAILED gives exit code 1. Outside of torchrun and SLURM
the local ranks are started here.

Examples:
  fourfold doctor runs/one
  fourfold doctor --preflight run.toml --out /shared/runs/one
  fourfold doctor --preflight --ranks 8
  torchrun --nnodes 4 --nproc-per-node 8 -m fourfold.cli doctor --preflight run.toml --out /shared/runs/one"""
