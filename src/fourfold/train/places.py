"""`fourfold launch`: a config as a SLURM script or as a Kubernetes manifest.

Both start the same command on every device of the grid, tell it in time to save, and start it again when it dies, up
to a bound; it goes on from the newest checkpoint by itself, so starting it again is always right.

Nothing that a config says reaches a shell unquoted: names are held to plain characters, the command's words are quoted,
and the manifest is JSON, which Kubernetes reads as it reads YAML.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.cost.machine import load_machine
from fourfold.train.config import Config, read_config
from fourfold.train.job import AUTO
from fourfold.train.launch import stop_seconds
from fourfold.train.rendezvous import BACKEND, PORT

LAUNCH = """\
Write what a scheduler needs to run a config: a SLURM script or a Kubernetes manifest. Both start every rank, send
SIGTERM in time for a last checkpoint, and start the run again when it dies; it goes on by itself.

  fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M --config run.toml
  fourfold launch --slurm run.toml --out /shared/runs/one --time 24:00:00 --account physics > job.sh
  fourfold launch --k8s run.toml --out /runs/one --image registry/fourfold:1 --claim runs > job.json"""
LONGEST_GRACE = 65_000
TIMES = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){1,2}")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")


def add_launch(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = commands.add_parser("launch", help="write a job for a scheduler", description=LAUNCH, formatter_class=shape)
    kind = one.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", action="store_true", help="a script for sbatch")
    kind.add_argument("--k8s", action="store_true", help="a manifest for kubectl apply")
    one.add_argument("config", type=Path, metavar="CONFIG.toml")
    one.add_argument("--out", required=True, help="the run's folder, on a file system that all nodes share")
    one.add_argument("--name", default="fourfold", help="of the job")
    one.add_argument("--devices", type=int, help="where the config's grid is auto")
    one.add_argument("--per-node", type=int, help="devices of a node; by default those of the config's plan.machine")
    one.add_argument("--tries", type=int, default=5, help="how often the run is started at the most; default 5")
    one.add_argument("--time", default="24:00:00", help="SLURM: the limit, such as 24:00:00; the run saves before it")
    one.add_argument("--partition", help="SLURM")
    one.add_argument("--account", help="SLURM")
    one.add_argument("--cpus", type=int, help="SLURM: cores of a rank")
    one.add_argument("--image", help="Kubernetes: the container, with fourfold installed")
    one.add_argument("--claim", help="Kubernetes: the volume claim that is mounted where --out lies")
    one.set_defaults(run=launch)


def launch(options: argparse.Namespace, _: Sequence[str]) -> int:
    place = Place.of(read_config(options.config), options)
    print(slurm(place) if options.slurm else kubernetes(place, options.config.read_text()))
    return 0


@dataclass(frozen=True, slots=True)
class Place:
    """What a scheduler is told; every text of it is a plain word."""

    config: str
    out: str
    name: str
    nodes: int
    per_node: int
    tries: int
    stop_seconds: int
    """From SIGTERM to the end."""
    time: str
    more: dict[str, str]
    """Options of SLURM's own."""
    image: str
    claim: str

    @classmethod
    def of(cls, config: Config, options: argparse.Namespace) -> Place:
        for option in ("devices", "per_node", "tries", "cpus"):
            if (number := getattr(options, option)) is not None and number < 1:
                raise ValueError(f"--{option.replace('_', '-')} {number} must be at least 1")
        if options.k8s and not Path(options.out).is_absolute():
            raise ValueError(f"--out {options.out} must be a whole path, below which --claim is mounted")
        if not config.watch.grace <= LONGEST_GRACE:
            raise ValueError(f"watch.grace={config.watch.grace} is longer than a scheduler waits: {LONGEST_GRACE} s")
        world = _world(config, options.devices)
        per_node = options.per_node or _per_node(config)
        if world % per_node and world > per_node:
            raise ValueError(f"{world} devices do not fill nodes of {per_node}; give a grid or --per-node that divides")
        for option, form in (("name", NAME), ("time", TIMES), ("partition", WORD), ("account", WORD)):
            _require(option, getattr(options, option), form)
        for option in ("image", "claim"):
            _require(option, getattr(options, option), WORD)
            if options.k8s and getattr(options, option) is None:
                raise ValueError(f"--k8s needs --{option}; --help says what it is")
        more = {"partition": options.partition, "account": options.account, "cpus-per-task": options.cpus}
        return cls(
            config=str(options.config),
            out=options.out,
            name=options.name,
            nodes=max(1, world // per_node),
            per_node=min(world, per_node),
            tries=options.tries,
            stop_seconds=stop_seconds(config.watch.grace),
            time=options.time,
            more={key: str(value) for key, value in more.items() if value is not None},
            image=options.image or "",
            claim=options.claim or "",
        )


def _require(option: str, value: str | None, form: re.Pattern[str]) -> None:
    if value is not None and not form.fullmatch(value):
        raise ValueError(f"--{option} {value!r} is not one that a scheduler takes; it must match {form.pattern}")


def _world(config: Config, devices: int | None) -> int:
    if config.grid.auto:
        if devices is None:
            raise ValueError("the config's grid is auto: give --devices, or a config of `fourfold plan --config`")
        return devices
    world = config.grid.shape.world
    if devices not in (None, world):
        raise ValueError(f"--devices {devices}, but the config's grid {config.grid.shape} has {world}; leave one away")
    return world


def _per_node(config: Config) -> int:
    if config.plan.machine == AUTO:
        raise ValueError("how many devices a node has is not known; give --per-node, or set plan.machine in the config")
    return load_machine(config.plan.machine).devices_per_node


def slurm(place: Place) -> str:
    """A script for sbatch: a task for each device, so that signals reach the ranks themselves."""
    return "\n".join(_slurm_lines(place))


def _slurm_lines(place: Place) -> Iterator[str]:
    limits = {
        "job-name": place.name,
        "nodes": place.nodes,
        "ntasks-per-node": place.per_node,
        "gpus-per-node": place.per_node,
        "time": place.time,
        "signal": f"TERM@{place.stop_seconds}",
        "open-mode": "append",
        **place.more,
    }
    command = ["python", "-m", "fourfold.cli", "train", place.config, "--resume", place.out]
    yield "#!/usr/bin/env bash"
    yield from (f"#SBATCH --{key}={value}" for key, value in limits.items())
    yield "#SBATCH --requeue"
    yield ""
    yield "# goes on from the newest checkpoint; 143: it was told to stop, and has saved"
    yield f"for try in $(seq {place.tries}); do"
    yield f"    srun --kill-on-bad-exit=1 {shlex.join(command)} && exit 0 || code=$?"
    yield '    [ "$code" -ne 143 ] || { echo "saved; submit this script again to go on"; exit 0; }'
    yield '    echo "try $try ended with $code"'
    yield "done"
    yield 'exit "$code"'


def kubernetes(place: Place, config: str) -> str:
    """A manifest for kubectl: a pod for each node, torchrun in it, the config mounted beside."""
    command = [
        *("torchrun", f"--nnodes={place.nodes}", f"--nproc-per-node={place.per_node}"),
        *(f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={place.name}-0.{place.name}:{PORT}"),
        *(f"--rdzv-id={place.name}", f"--max-restarts={place.tries - 1}", f"--shutdown-timeout={place.stop_seconds}"),
        *("-m", "fourfold.cli", "train", "/config/run.toml", "--resume", place.out),
    ]
    container = {
        "name": "train",
        "image": place.image,
        "command": command,
        "resources": {"limits": {"nvidia.com/gpu": place.per_node}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "config", "mountPath": "/config", "readOnly": True},
            {"name": "runs", "mountPath": str(Path(place.out).parent)},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "subdomain": place.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": place.stop_seconds + 60,
        "securityContext": {"runAsNonRoot": True},
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": place.name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": place.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    job = {
        "completions": place.nodes,
        "parallelism": place.nodes,
        "completionMode": "Indexed",
        "backoffLimit": place.nodes * place.tries,
        "template": {"metadata": {"labels": {"app": place.name}}, "spec": pod},
    }
    named = {"metadata": {"name": place.name}}
    items = [
        {"apiVersion": "v1", "kind": "ConfigMap", **named, "data": {"run.toml": config}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            **named,
            "spec": {"clusterIP": "None", "selector": {"app": place.name}},
        },
        {"apiVersion": "batch/v1", "kind": "Job", **named, "spec": job},
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)
