"""The environment in which this process was started: which rank of a job it is, by torchrun, SLURM or our launcher.

Imports no torch: a command asks before it imports torch. Nothing else in the package reads these variables.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from dataclasses import dataclass

LAUNCHED = "FOURFOLD_LAUNCHED"
"""Our launcher sets it for the ranks that it starts."""
RESTARTED = "FOURFOLD_RESTARTED"
"""How often our launcher has restarted the ranks."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The variables that name the network interface on which gloo and NCCL listen."""


@dataclass(frozen=True, slots=True)
class Environment:
    """This process among the ranks of its job."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    """The rank's number among those of its node."""
    node: int = 0
    """The number of its node in the job."""
    per_node: str = ""
    """Ranks per node as the launcher writes it: `4`, SLURM also `4(x2)` or `4(x2),3`; empty where nobody says."""

    @classmethod
    def read(cls) -> Environment:
        """Read torchrun's variables if it started this process, else SLURM's; without either it is the only rank.

        SLURM's number of ranks is that of the job step, which srun alone sets: a plain `python` in a batch script is
        one rank.
        """
        env = os.environ
        per_node = env.get("LOCAL_WORLD_SIZE") or env.get("SLURM_STEP_TASKS_PER_NODE") or ""
        local_rank, node = int(env.get("LOCAL_RANK") or 0), int(env.get("GROUP_RANK") or 0)
        if "RANK" in env:
            return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), local_rank, node, per_node)
        if _in_slurm_step():
            rank, world = int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"])
            local_rank, node = int(env.get("SLURM_LOCALID") or 0), int(env.get("SLURM_NODEID") or 0)
            return cls(rank, world, local_rank, node, per_node or env.get("SLURM_NTASKS_PER_NODE") or "")
        return cls(0, 1, local_rank, node, per_node)

    @property
    def local_world(self) -> int | None:
        """The number of ranks on this node; None where the launcher does not say."""
        counts = [
            int(found[1])
            for found in re.finditer(r"(\d+)(?:\(x(\d+)\))?", self.per_node)
            for _ in range(int(found[2] or 1))
        ]
        return counts[self.node] if self.node < len(counts) else counts[0] if counts else None


def inside_a_job() -> bool:
    """Return whether torchrun, SLURM or our own launcher started this process as a rank."""
    return "RANK" in os.environ or _in_slurm_step()


def _in_slurm_step() -> bool:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def is_watched() -> bool:
    """Return whether our launcher started this rank, and so will see which process dies."""
    return LAUNCHED in os.environ


def was_restarted() -> bool:
    """Return whether the ranks of this node were started before, by our launcher or by torchrun."""
    return any(int(os.environ.get(name) or 0) > 0 for name in (RESTARTED, "TORCHELASTIC_RESTART_COUNT"))


def max_restarts() -> int:
    """Return how often torchrun may restart these ranks."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)


def set_master_address() -> None:
    """Fill in the variables by which torch finds a job's store, under SLURM and where they are missing."""
    if "RANK" in os.environ or not _in_slurm_step():
        return
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ["SLURM_NODELIST"]
    os.environ.setdefault("MASTER_ADDR", first_node(nodes))
    # jobs that share a node get different ports, out of the range of registered ones that is free by custom
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", 0)) % 20000))


def stay_on_loopback(here: Environment) -> None:
    """Let gloo and NCCL listen on the loopback alone if all ranks are on this node and nobody named an interface.

    Without this they listen on the interface of the host's name, where other machines reach them.
    """
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None and _on_one_node(here):
        for name in INTERFACES:
            os.environ.setdefault(name, loopback)


def _on_one_node(here: Environment) -> bool:
    """Return whether all ranks of the job are on this node, by their number or by the address of the job's store."""
    if here.local_world is not None:
        return here.local_world >= here.world
    if here.world == 1:
        return True
    try:
        return is_loopback(os.environ["MASTER_ADDR"])
    except (
        KeyError,
        OSError,
    ):  # without an address, or with one that means nothing, the job's store says what is wrong
        return False


def is_loopback(host: str) -> bool:
    """Return whether a host's name means only addresses that no other machine reaches."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def first_node(nodelist: str) -> str:
    """Return the first host of a SLURM node list: `gpu[003-010,020],cpu1` -> `gpu003`."""
    first = re.match(r"[^,\[](?:[^,\[]|\[[^\]]*\])*", nodelist)  # up to a comma that stands outside of brackets
    if first is None:
        raise ValueError(f"cannot read the SLURM node list {nodelist!r}; set MASTER_ADDR to the first node")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())
