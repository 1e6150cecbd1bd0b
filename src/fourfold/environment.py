"""The environment in which this process was started: which rank of a job it is, by torchrun, SLURM or our launcher.

Imports no torch: a command asks before it imports torch. Nothing else in the package reads these variables.
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from fourfold.errors import nearest

LAUNCHED = "FOURFOLD_LAUNCHED"
"""Our launcher sets it for the ranks that it starts, to its own process id."""
RESTARTED = "FOURFOLD_RESTARTED"
"""How often our launcher has restarted the ranks."""
BEGAN = "FOURFOLD_BEGAN"
"""When our launcher started the ranks for the first time, in seconds by the monotonic clock of their machine."""
INTERFACES = GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The variables that name the network interface on which gloo and NCCL listen."""

AGENT_HAS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""By this variable torch knows that the store at MASTER_ADDR exists already."""
WHO_SETS = "torchrun, srun or your own script sets it before it starts a rank"
"""The way out of every error about a variable that whoever starts the ranks must set."""


LARGEST = (1 << 31) - 1
"""The largest number that a variable may hold; every number of ranks, restarts and ports is far below."""
LARGEST_SLURM = (1 << 32) - 1
"""The largest number of a job or a step of SLURM: jobs of federated clusters have the cluster in their upper bits."""
STEP_STRIDE = 997
"""How far apart the ports of two steps of one job are, so that they do not meet those of the next jobs."""
MAX_SECONDS = 10**6
"""Stands for no limit where an API wants a finite number of seconds; about eleven days."""
PR_SET_PDEATHSIG = 1
"""The operation of Linux's prctl that sets the signal which a process gets when its parent ends."""


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
        if "RANK" in env:
            world = _number("WORLD_SIZE", least=1)
            rank = _number("RANK", below=("WORLD_SIZE", world))
            local_world = _number("LOCAL_WORLD_SIZE", world, least=1)
            local_rank = _number("LOCAL_RANK", 0, below=("the number of ranks of a node,", min(local_world, world)))
            return cls(rank, world, local_rank, _number("GROUP_RANK", 0), per_node)
        if _in_slurm_step():
            world = _number("SLURM_STEP_NUM_TASKS")
            rank, local_rank = (
                _number(name, default, below=("SLURM_STEP_NUM_TASKS", world))
                for name, default in (("SLURM_PROCID", None), ("SLURM_LOCALID", 0))
            )
            per_node = per_node or env.get("SLURM_NTASKS_PER_NODE") or ""
            return cls(rank, world, local_rank, _number("SLURM_NODEID", 0), per_node)
        return cls(0, 1, _number("LOCAL_RANK", 0), _number("GROUP_RANK", 0), per_node)

    @property
    def local_world(self) -> int | None:
        """The number of ranks on this node; None where the launcher does not say."""
        counts = [(int(n), int(nodes or 1)) for n, nodes in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", self.per_node)]
        nodes = 0
        for count, equal in counts:
            nodes += equal
            if self.node < nodes:
                return count
        return counts[0][0] if counts else None


def inside_a_job() -> bool:
    """Return whether torchrun, SLURM or our own launcher started this process as a rank."""
    return "RANK" in os.environ or _in_slurm_step()


def _in_slurm_step() -> bool:
    # what is not a number counts as a step too, so that `Environment.read` reports it
    return os.environ.get("SLURM_STEP_NUM_TASKS", "") not in ("", "0", "1")


def _number(
    name: str,
    default: int | None = None,
    *,
    least: int = 0,
    below: tuple[str, int] | None = None,
    most: int = LARGEST,
) -> int:
    """Return the whole number that a variable holds; raise if it holds none, or one outside of its limits.

    `below` is the number that it must stay below, with the name of that number. A variable that is missing or empty
    means the default, and is an error without one.
    """
    text = os.environ.get(name) or ""
    if not text and default is not None:
        return default
    if not text:
        raise ValueError(f"{name} is not set, though this process is a rank of a job; {WHO_SETS}")
    try:
        number = int(text)
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number; {WHO_SETS}") from None
    if number > most:
        raise ValueError(f"{name}={number} is not a number of anything in a job; {WHO_SETS}")
    if number < least:
        raise ValueError(f"{name}={number} must be at least {least}; {WHO_SETS}")
    if below is not None and number >= below[1]:
        raise ValueError(f"{name}={number} must be below {below[0]} {below[1]}; {WHO_SETS}")
    return number


def rank_name() -> str:
    """Return words for this rank at the beginning of a message, such as `rank 3: `; empty outside of a job.

    A message about the environment itself is told in this way too, so nothing here is checked.
    """
    name = "RANK" if "RANK" in os.environ else "SLURM_PROCID"
    return f"rank {os.environ.get(name) or '?'}: " if inside_a_job() else ""


def is_watched() -> bool:
    """Return whether our launcher started this rank, and so will see which process dies."""
    return LAUNCHED in os.environ


def end_with_launcher(launcher: int | None = None) -> None:
    """Let this rank end when the process that started it ends, however that happens.

    Without its launcher a rank has no store, and nobody would end it. `launcher` is that process, if the rank knows it:
    then a launcher that has ended already is noticed too.
    """
    parent = os.getppid() if launcher is None else launcher
    if sys.platform == "linux":
        # the kernel sends the signal: also while this process imports, waits in C++, or holds Python's lock
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:

        def wait_for_end() -> None:
            while os.getppid() == parent:
                time.sleep(1.0)
            os._exit(1)

        Thread(target=wait_for_end, daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)  # the launcher ended before this process asked for the signal


def machine_name() -> str:
    """Return a name that processes share which see each other's numbers; containers of one host do not."""
    names = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            names.append(os.readlink(path) if os.path.islink(path) else Path(path).read_text().strip())
    return "/".join(names)


def launcher_name() -> str:
    """Return a name for the process that starts and restarts this rank, which no other process ever has.

    It serves to recognise a job where no clock can: clocks of two machines are never compared.
    """
    if began := os.environ.get(BEGAN):
        return f"{machine_name()} {began}"
    parent = os.getppid()
    return f"{machine_name()} {parent}:{process_stat(parent)[1]}"


def start_name() -> str:
    """Return a name for this start of the ranks, which no other start has: the launcher and the starts before."""
    return f"{launcher_name()} {_number(RESTARTED, 0) + starts_before()}"


def command_began() -> float:
    """Return when the command that this process belongs to began, in seconds by the monotonic clock.

    Ranks that were restarted belong to the command that started them first. A process that no launcher of ours started
    may have a parent that is much older, such as a shell, so for it the command begins now.
    """
    if text := os.environ.get(BEGAN):
        try:
            return float(text)
        except ValueError:
            raise ValueError(
                f"{BEGAN}={text!r} is not a number of seconds; unset it, fourfold sets it itself"
            ) from None
    if was_restarted() and (ticks := process_stat(os.getppid())[1]):
        # the kernel counts the ticks from the start of the machine, with the time in which it slept
        return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return time.monotonic()


def process_stat(process: int) -> tuple[str, int]:
    """Return the kernel's letter for the state of a process, and when it began in ticks since the machine started."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    # The other fields follow the name, which is in parentheses and may contain any character.
    fields = stat.rpartition(")")[2].split()
    return fields[0], int(fields[19])


def started_by_torchrun() -> bool:
    """Return whether torchrun has started this rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and not is_watched()


def was_restarted() -> bool:
    """Return whether the ranks of this node were started before, by our launcher or by torchrun."""
    return _number(RESTARTED, 0) > 0 or starts_before() > 0


def max_restarts() -> int:
    """Return how often torchrun may restart these ranks."""
    return _number("TORCHELASTIC_MAX_RESTARTS", 0)


def starts_before() -> int:
    """Return how often torchrun has started the ranks of this node before."""
    return _number("TORCHELASTIC_RESTART_COUNT", 0)


def agent_has_store() -> bool:
    """Return whether the agent that started this rank serves the job's store; otherwise rank 0 does."""
    return os.environ.get(AGENT_HAS_STORE) == "True"


def master_address() -> tuple[str, int]:
    """Return the host and port of the job's store; raise if the environment does not name both."""
    set_master_address()
    host = os.environ.get("MASTER_ADDR")
    if not host:
        raise ValueError(f"MASTER_ADDR is not set, so no rank finds the others; {WHO_SETS}")
    return host, _number("MASTER_PORT", least=1, below=("the number of ports,", 1 << 16))


def set_master_address() -> None:
    """Fill in the variables by which torch finds a job's store, under SLURM and where they are missing."""
    if "RANK" in os.environ or not _in_slurm_step():
        return
    names = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
    if nodes := next(
        filter(None, map(os.environ.get, names)), ""
    ):  # without any, `master_address` says what is missing
        os.environ.setdefault("MASTER_ADDR", first_node(nodes))
    # jobs and steps that share a node get different ports, out of the range of registered ones that is free by custom
    job, step = (_number(name, 0, most=LARGEST_SLURM) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    os.environ.setdefault("MASTER_PORT", str(20000 + (job + STEP_STRIDE * step) % 20000))


def stay_on_loopback(here: Environment, *, nccl: bool) -> None:
    """Let gloo and NCCL listen on the loopback alone if all ranks are on this node and nobody named an interface.

    Without this they listen on the interface of the host's name, where other machines reach them. Names that were given
    must be those of interfaces; `nccl` says whether NCCL is used, since a name for it alone harms nobody else.
    """
    known = [name for _, name in socket.if_nameindex()]
    for variable in INTERFACES if nccl else INTERFACES[:1]:
        if missing := _missing_interface(variable, known):
            raise ValueError(
                f"{variable}={os.environ[variable]!r}: {missing!r} is no network interface of {socket.gethostname()}"
                f"{nearest(missing, known)}; it has {', '.join(known)}; set it to one of them, or unset it"
            )
    loopback = next((name for name in known if name.startswith("lo")), None)
    if loopback is not None and _on_one_node(here):
        for name in INTERFACES:
            os.environ[name] = os.environ.get(name) or loopback  # empty counts as not set, for gloo and NCCL too


def _missing_interface(variable: str, known: Sequence[str]) -> str:
    """Return the interface that a variable asks for and the machine lacks; empty if there is none.

    gloo needs every interface of its list. NCCL takes whichever of its list it finds, where each word is the beginning
    of a name and may have a port; after `=` the words are whole names, and after `^` those that it must not use.
    """
    given = os.environ.get(variable) or ""
    if not given:
        return ""
    whole = variable == NCCL and given.startswith("=")
    # what follows a colon is a port of NCCL's, or makes an alias such as eth0:1 of the interface eth0
    words = [word.partition(":")[0] for word in given[whole:].split(",") if word]
    if variable == GLOO:
        return next((word for word in words if word not in known), "")
    if given.startswith("^"):
        return ""
    found = any(name == word if whole else name.startswith(word) for name in known for word in words)
    return "" if found else ",".join(words)


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
