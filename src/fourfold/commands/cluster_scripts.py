"""`fourfold launch`: writes a SLURM script or a Kubernetes manifest that trains a config.

Both start the same command on every device of the grid, send SIGTERM early enough to save, and restart the command when
it dies, up to a bound. The command resumes from the newest checkpoint by itself, so a restart is always safe.

Nothing from a config reaches a shell unquoted: names may only have plain characters, the words of the command are
quoted, and so are the texts of the manifest. The config stands in the manifest as it is, so that people can read and
change it there.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fourfold.planner.machine import load_machine
from fourfold.train.config import AUTO, TrainConfig, read_config
from fourfold.train.launch import kill_seconds
from fourfold.train.rendezvous import BACKEND, PORT

LONGEST_GRACE = 65_000
"""The longest watch.grace in seconds; SLURM stores the time of --signal in 16 bits, so it is at most 65535."""
TIMES = r"(\d+-)?\d{1,2}(:\d{2}){1,2}"
WORD = r"[A-Za-z0-9][A-Za-z0-9._/:@-]*"
NAME = r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?"
FORMS = {
    TIMES: "hours:minutes:seconds, such as 24:00:00, or days-hours:minutes",
    WORD: "letters, digits and . _ / : @ -, without spaces",
    NAME: "at most 52 lower-case letters, digits and dashes, such as my-run",
}
"""What the error for a wrong value asks for, by the pattern that the value must match."""
OPTION_FORMS = {"name": NAME, "time": TIMES, "partition": WORD, "account": WORD, "image": WORD, "claim": WORD}
NEEDED = {
    "image": "the container image with fourfold, such as registry/fourfold:1",
    "claim": "the volume claim to mount at the parent folder of --out",
}
"""Options that a Kubernetes manifest cannot do without."""
SCRIPT = """\
#!/usr/bin/env bash
{limits}
#SBATCH --requeue

# YOURS: what makes `python -m fourfold.cli` work on every node, such as
#   module load cuda && source /shared/venv/bin/activate
# In a container, put its options behind srun below, such as srun --container-image=... (enroot) or
#   srun ... apptainer exec --nv image.sif python ...

# the run resumes from its newest checkpoint; exit code 143 means that it was asked to stop and has saved
for try in $(seq {tries}); do
    srun --kill-on-bad-exit=1 {command} && exit 0 || code=$?
    [ "$code" -ne 143 ] || {{ echo "saved; submit this script again to resume"; exit 0; }}
    echo "try $try ended with $code"
done
exit "$code\""""


def launch(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the script or the manifest."""
    config = read_config(options.config)
    check(options, config)
    world = world_of(config, options.devices)
    per_node = options.per_node or devices_per_node(config)
    if world % per_node and world > per_node:
        raise ValueError(
            f"{world} devices do not fill nodes of {per_node}; choose a grid or --per-node so that they do"
        )
    write = slurm if options.slurm else kubernetes
    print(write(options, max(1, world // per_node), min(world, per_node), kill_seconds(config.watch.grace)))
    return 0


def check(options: argparse.Namespace, config: TrainConfig) -> None:
    """Raise if a scheduler could not use an option; afterwards every text has plain characters only."""
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
    for option, form in OPTION_FORMS.items():
        value = getattr(options, option)
        if value is not None and not re.fullmatch(form, value):
            raise ValueError(f"--{option} {value!r} is not valid for a scheduler; give {FORMS[form]}")
        if options.k8s and value is None and option in NEEDED:
            raise ValueError(f"--k8s needs --{option}, {NEEDED[option]}")


def world_of(config: TrainConfig, devices: int | None) -> int:
    """Return the number of devices of the grid, or --devices if the grid is auto."""
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


def devices_per_node(config: TrainConfig) -> int:
    """Return the number of devices per node of the machine that the config is planned for."""
    if config.plan.machine == AUTO:
        raise ValueError(
            "the number of devices per node is unknown; give --per-node, or set plan.machine in the config"
        )
    return load_machine(config.plan.machine).devices_per_node


def slurm(options: argparse.Namespace, nodes: int, per_node: int, stop_seconds: int) -> str:
    """Return a script for sbatch; SLURM sends SIGTERM `stop_seconds` before the time limit."""
    limits = {
        "job-name": options.name,
        "nodes": nodes,
        "ntasks-per-node": per_node,  # one task per device, so that signals reach the ranks directly
        "gpus-per-node": per_node,
        "time": options.time,
        "signal": f"TERM@{stop_seconds}",
        "output": f"{options.name}-%j.log",
        "open-mode": "append",  # a requeued job continues the log of the first one
        "partition": options.partition,
        "account": options.account,
        "cpus-per-task": options.cpus,
    }
    command = ["python", "-m", "fourfold.cli", "train", str(options.config), "--resume", options.out]
    return SCRIPT.format(
        limits="\n".join(f"#SBATCH --{key}={value}" for key, value in limits.items() if value is not None),
        tries=options.tries,
        command=shlex.join(command),
    )


def kubernetes(options: argparse.Namespace, nodes: int, per_node: int, stop_seconds: int) -> str:
    """Return a manifest for kubectl. It has one pod per node, which runs torchrun with the config mounted."""
    name = options.name
    command = [
        *("torchrun", f"--nnodes={nodes}", f"--nproc-per-node={per_node}"),
        *(f"--rdzv-backend={BACKEND}", f"--rdzv-endpoint={name}-0.{name}:{PORT}"),
        *(f"--rdzv-id={name}", f"--max-restarts={options.tries - 1}", f"--shutdown-timeout={stop_seconds}"),
        *("-m", "fourfold.cli", "train", "/config/run.toml", "--resume", options.out),
    ]
    container = {
        "name": "train",
        "image": options.image,
        "command": command,
        "resources": {"limits": {"nvidia.com/gpu": per_node}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [
            {"name": "config", "mountPath": "/config", "readOnly": True},
            {"name": "runs", "mountPath": str(Path(options.out).parent)},
            {"name": "memory", "mountPath": "/dev/shm"},
        ],
    }
    pod = {
        "subdomain": name,
        "restartPolicy": "Never",
        # torchrun needs a moment to end its ranks after they have had their own time to save
        "terminationGracePeriodSeconds": stop_seconds + 60,
        "securityContext": {"runAsNonRoot": True},
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            {"name": "config", "configMap": {"name": name}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},  # NCCL needs more shared memory than the usual 64 MB
        ],
    }
    job = {
        "completions": nodes,
        "parallelism": nodes,
        "completionMode": "Indexed",
        "backoffLimit": nodes * options.tries,
        "template": {"metadata": {"labels": {"app": name}}, "spec": pod},
    }

    def item(kind: str, version: str, **content: Any) -> dict[str, Any]:
        return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}

    items = [
        item("ConfigMap", "v1", data={"run.toml": options.config.read_text()}),
        item("Service", "v1", spec={"clusterIP": "None", "selector": {"app": name}}),
        item("Job", "batch/v1", spec=job),
    ]
    return "\n---\n".join("\n".join(yaml_lines(item)) for item in items)


def is_block(text: str) -> bool:
    """Return whether a text can be a block of YAML as it is: several whole lines without tabs or special characters."""
    *lines, end = text.split("\n")
    begins = next(filter(None, lines), " ")
    plain = all(line.isprintable() and not line.isspace() for line in lines)
    return len(lines) > 1 and not end and bool(lines[-1]) and not begins.startswith(" ") and plain


def yaml_lines(value: dict[str, Any] | list[Any]) -> Iterator[str]:
    """Yield a mapping or a list as lines of YAML; a text of several lines is a block, any other is written as in JSON.

    YAML reads all of JSON, so whatever stands in a text, it stays one.
    """
    for key, one in value.items() if isinstance(value, dict) else (("-", one) for one in value):
        head = key if key == "-" else f"{key}:"
        if isinstance(one, (dict, list)) and one:
            first, *rest = yaml_lines(one)
            if head == "-":  # the first line of an entry stands beside its dash
                yield f"- {first}"
            else:
                yield head
                yield f"  {first}"
            yield from (f"  {line}" if line else line for line in rest)
        elif isinstance(one, str) and is_block(one):
            yield f"{head} |"
            yield from (f"  {line}" if line else line for line in one.removesuffix("\n").split("\n"))
        else:
            yield f"{head} {quoted(one) if isinstance(one, str) else json.dumps(one)}"


def quoted(text: str) -> str:
    """Return a text in JSON's notation, except for what it writes as a pair of surrogates, which YAML does not join."""
    inner = (json.dumps(each)[1:-1] if each <= "\uffff" else f"\\U{ord(each):08x}" for each in text)
    return f'"{"".join(inner)}"'
