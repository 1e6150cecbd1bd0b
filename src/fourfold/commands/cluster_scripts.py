"""`fourfold launch`: writes a SLURM script or a Kubernetes manifest that trains a config.

Both start the same command on every device of the grid, send SIGTERM early enough to save, and restart the command when
it dies, up to a bound. The command resumes from the newest checkpoint by itself, so a restart is always safe.

Nothing from a config reaches a shell unquoted: names may only have plain characters, the words of the command are
quoted, and the manifest is JSON, which Kubernetes reads like YAML.
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
from fourfold.train.config import AUTO, TrainConfig, read_config
from fourfold.train.launch import kill_seconds
from fourfold.train.rendezvous import BACKEND, PORT

LONGEST_GRACE = 65_000
"""Seconds; SLURM stores the time of --signal in 16 bits, so that it is at most 65535."""
TIMES = re.compile(r"(\d+-)?\d{1,2}(:\d{2}){1,2}")
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?")
FORMS = {
    TIMES: "hours:minutes:seconds, such as 24:00:00, or days-hours:minutes",
    WORD: "letters, digits and . _ / : @ -, without spaces",
    NAME: "at most 52 lower-case letters, digits and dashes, such as my-run",
}
NEEDED = {
    "image": "the container image with fourfold, such as registry/fourfold:1",
    "claim": "the volume claim to mount at the parent folder of --out",
}


def launch(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the script or the manifest."""
    job = ClusterJob.of(read_config(options.config), options)
    print(slurm(job) if options.slurm else kubernetes(job, options.config.read_text()))
    return 0


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """What a scheduler needs to know; every text in it has plain characters only."""

    config: str
    out: str
    name: str
    nodes: int
    per_node: int
    tries: int
    stop_seconds: int
    """Seconds from SIGTERM until the scheduler kills the ranks."""
    time: str
    more: dict[str, str]
    """Further options of sbatch."""
    image: str
    claim: str

    @classmethod
    def of(cls, config: TrainConfig, options: argparse.Namespace) -> ClusterJob:
        for option in ("devices", "per_node", "tries", "cpus"):
            if (number := getattr(options, option)) is not None and number < 1:
                raise ValueError(f"--{option.replace('_', '-')} {number} must be at least 1")
        if options.k8s and not Path(options.out).is_absolute():
            raise ValueError(
                f"--out {options.out} must be an absolute path, such as /shared/{options.out}: --claim is mounted at "
                "its parent folder"
            )
        if not config.watch.grace <= LONGEST_GRACE:
            raise ValueError(
                f"watch.grace={config.watch.grace} is longer than a scheduler waits; set at most {LONGEST_GRACE}"
            )
        world = _world(config, options.devices)
        per_node = options.per_node or _per_node(config)
        if world % per_node and world > per_node:
            raise ValueError(
                f"{world} devices do not fill nodes of {per_node}; choose a grid or --per-node so that they do"
            )
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
        raise ValueError(f"--{option} {value!r} is not valid for a scheduler; give {FORMS[form]}")


def _world(config: TrainConfig, devices: int | None) -> int:
    if config.grid.auto:
        if devices is None:
            raise ValueError("the config's grid is auto: give --devices, or a config from `fourfold plan --config`")
        return devices
    world = config.grid.shape.world
    if devices not in (None, world):
        raise ValueError(
            f"--devices {devices}, but the config's grid {config.grid.shape} has {world}; leave --devices out"
        )
    return world


def _per_node(config: TrainConfig) -> int:
    if config.plan.machine == AUTO:
        raise ValueError(
            "the number of devices per node is unknown; give --per-node, or set plan.machine in the config"
        )
    return load_machine(config.plan.machine).devices_per_node


def slurm(job: ClusterJob) -> str:
    """Return a script for sbatch. It has one task per device, so that signals reach the ranks directly."""
    return "\n".join(_slurm_lines(job))


def _slurm_lines(job: ClusterJob) -> Iterator[str]:
    limits = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": job.per_node,
        "gpus-per-node": job.per_node,
        "time": job.time,
        "signal": f"TERM@{job.stop_seconds}",
        "open-mode": "append",
        **job.more,
    }
    command = ["python", "-m", "fourfold.cli", "train", job.config, "--resume", job.out]
    yield "#!/usr/bin/env bash"
    yield from (f"#SBATCH --{key}={value}" for key, value in limits.items())
    yield "#SBATCH --requeue"
    yield ""
    yield "# the run resumes from its newest checkpoint; exit code 143 means that it was asked to stop and has saved"
    yield f"for try in $(seq {job.tries}); do"
    yield f"    srun --kill-on-bad-exit=1 {shlex.join(command)} && exit 0 || code=$?"
    yield '    [ "$code" -ne 143 ] || { echo "saved; submit this script again to resume"; exit 0; }'
    yield '    echo "try $try ended with $code"'
    yield "done"
    yield 'exit "$code"'


def kubernetes(job: ClusterJob, config: str) -> str:
    """Return a manifest for kubectl. It has one pod per node, which runs torchrun with the config mounted."""
    command = [
        *("torchrun", f"--nnodes={job.nodes}", f"--nproc-per-node={job.per_node}"),
        *(f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={job.name}-0.{job.name}:{PORT}"),
        *(f"--rdzv-id={job.name}", f"--max-restarts={job.tries - 1}", f"--shutdown-timeout={job.stop_seconds}"),
        *("-m", "fourfold.cli", "train", "/config/run.toml", "--resume", job.out),
    ]
    container = {
        "name": "train",
        "image": job.image,
        "command": command,
        "resources": {"limits": {"nvidia.com/gpu": job.per_node}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "config", "mountPath": "/config", "readOnly": True},
            {"name": "runs", "mountPath": str(Path(job.out).parent)},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.stop_seconds + 60,
        "securityContext": {"runAsNonRoot": True},
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": job.name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    spec = {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": job.nodes * job.tries,
        "template": {"metadata": {"labels": {"app": job.name}}, "spec": pod},
    }
    named = {"metadata": {"name": job.name}}
    items = [
        {"apiVersion": "v1", "kind": "ConfigMap", **named, "data": {"run.toml": config}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            **named,
            "spec": {"clusterIP": "None", "selector": {"app": job.name}},
        },
        {"apiVersion": "batch/v1", "kind": "Job", **named, "spec": spec},
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2)
