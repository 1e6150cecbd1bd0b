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

from fourfold.planner.machine import load_machine
from fourfold.train.auto_grid import AUTO
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.launch import kill_seconds
from fourfold.train.rendezvous import BACKEND, PORT

LONGEST_GRACE = 65_000
TIMES = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){1,2}")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
FORMS = {
    TIMES: "hours:minutes:seconds, such as 24:00:00, or days-hours:minutes",
    WORD: "letters, digits and . _ / : @ -, without spaces",
    NAME: "at most 52 small letters, digits and dashes, such as my-run",
}
NEEDED = {
    "image": "the container that has fourfold, such as registry/fourfold:1",
    "claim": "the volume claim that is mounted where --out lies",
}


def launch(options: argparse.Namespace, _: Sequence[str]) -> int:
    place = ClusterJob.of(read_config(options.config), options)
    print(slurm(place) if options.slurm else kubernetes(place, options.config.read_text()))
    return 0


@dataclass(frozen=True, slots=True)
class ClusterJob:
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
    def of(cls, config: TrainConfig, options: argparse.Namespace) -> ClusterJob:
        for option in ("devices", "per_node", "tries", "cpus"):
            if (number := getattr(options, option)) is not None and number < 1:
                raise ValueError(f"--{option.replace('_', '-')} {number} must be at least 1")
        if options.k8s and not Path(options.out).is_absolute():
            raise ValueError(
                f"--out {options.out} must be a whole path, such as /shared/{options.out}, below which --claim is "
                "mounted"
            )
        if not config.watch.grace <= LONGEST_GRACE:
            raise ValueError(
                f"watch.grace={config.watch.grace} is longer than a scheduler waits; set at most {LONGEST_GRACE} s"
            )
        world = _world(config, options.devices)
        per_node = options.per_node or _per_node(config)
        if world % per_node and world > per_node:
            raise ValueError(f"{world} devices do not fill nodes of {per_node}; give a grid or --per-node that divides")
        for option, form in (("name", NAME), ("time", TIMES), ("partition", WORD), ("account", WORD)):
            _require(option, getattr(options, option), form)
        for option in ("image", "claim"):
            _require(option, getattr(options, option), WORD)
            if options.k8s and getattr(options, option) is None:
                raise ValueError(f"--k8s needs --{option}, {NEEDED[option]}")
        more = {"partition": options.partition, "account": options.account, "cpus-per-task": options.cpus}
        return cls(
            config=str(options.config),
            out=options.out,
            name=options.name,
            nodes=max(1, world // per_node),
            per_node=min(world, per_node),
            tries=options.tries,
            stop_seconds=kill_seconds(config.watch.grace),
            time=options.time,
            more={key: str(value) for key, value in more.items() if value is not None},
            image=options.image or "",
            claim=options.claim or "",
        )


def _require(option: str, value: str | None, form: re.Pattern[str]) -> None:
    if value is not None and not form.fullmatch(value):
        raise ValueError(f"--{option} {value!r} is not one that a scheduler takes; give {FORMS[form]}")


def _world(config: TrainConfig, devices: int | None) -> int:
    if config.grid.auto:
        if devices is None:
            raise ValueError("the config's grid is auto: give --devices, or a config of `fourfold plan --config`")
        return devices
    world = config.grid.shape.world
    if devices not in (None, world):
        raise ValueError(f"--devices {devices}, but the config's grid {config.grid.shape} has {world}; leave one away")
    return world


def _per_node(config: TrainConfig) -> int:
    if config.plan.machine == AUTO:
        raise ValueError("how many devices a node has is not known; give --per-node, or set plan.machine in the config")
    return load_machine(config.plan.machine).devices_per_node


def slurm(place: ClusterJob) -> str:
    """A script for sbatch: a task for each device, so that signals reach the ranks themselves."""
    return "\n".join(_slurm_lines(place))


def _slurm_lines(place: ClusterJob) -> Iterator[str]:
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


def kubernetes(place: ClusterJob, config: str) -> str:
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
