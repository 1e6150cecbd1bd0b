"""An emulated cluster on one machine: nodes with a network of their own between them, and torchrun on each.

    python benchmarks/cluster.py --nodes 4 --ranks 2 --mbit 400 -- script.py its arguments
    python benchmarks/cluster.py --nodes 2 --ranks 2 -- --no-python fourfold train --grid x=2,z=2

What follows `--` is what torchrun would be given. A node is a network namespace; a link joins it to a switch, a bridge
in one more namespace, and `tbf` holds what the link carries each way to --mbit. Ranks of one node talk over its
loopback. Nothing of the machine's own network is touched: all interfaces and addresses are inside the namespaces, and
go with them, on Ctrl-C and after a crash too; what a killed call left behind the next call takes away.

Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

PREFIX = "fourfold"
"""Namespaces are PREFIX-PID-NODE: a name tells whose they are."""
LINK, LOOPBACK = "eth0", "lo"
"""What a node's link is called inside it, and the way between its ranks."""
PORT = 29500
"""Of the rendezvous, on the first node; every cluster has its own network, so it is always free."""
PACKET = 16 << 10
"""What a socket hands over at once at the most; by itself it is 64 KiB."""
BURST_SECONDS, LEAST_BURST = 1e-3, 3 * PACKET
"""What a link may send at once after a pause, as seconds at its rate, but no less than a few packets. A real link has
no such gift, and with much of it short messages would pass at no cost."""
QUEUE = 64 << 20
"""Bytes that may wait in front of a link: more than all sockets together hold, so that nothing is ever dropped, as on
the fabrics of real clusters."""
SETTINGS = {
    "tcp_congestion_control": "reno",  # others pace by what they believe of the link, which takes a while to be true
    "tcp_wmem": "4096 65536 1048576",  # what a socket may have under way: a little queue, short waits behind it
    "tcp_slow_start_after_idle": "0",  # a collective after a pause begins as fast as one in a row
}
"""Of each node's TCP."""
STOP_SECONDS = 10.0
"""How long a job may take to end once it was told to."""


Process = subprocess.Popen[bytes]


class NotHereError(RuntimeError):
    """This machine cannot emulate a cluster; the message says what it lacks."""


class Traffic(NamedTuple):
    """Bytes that a node has sent, as its interfaces have counted them, headers included."""

    inside: int
    """Between its own ranks."""
    between: int
    """To other nodes."""

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.inside - before.inside, self.between - before.between)


def traffic() -> Traffic:
    """Of the node on which this is called."""
    return counted(Path("/proc/self/net/dev").read_text())


def counted(table: str) -> Traffic:
    """From the kernel's table of interfaces: two lines of heads, then a name and its numbers each."""
    sent = {}
    for line in table.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        sent[name.strip()] = int(numbers.split()[8])
    return Traffic(sent.get(LOOPBACK, 0), sent.get(LINK, 0))


def require_emulation() -> None:
    """Raise unless a cluster can be made here."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise NotHereError(f"no {' and no '.join(missing)} on this machine: install iproute2")
    if os.geteuid() != 0:
        raise NotHereError("network namespaces are made by root: run it as root, or in a container that may")


@dataclass(frozen=True)
class Shape:
    """Nodes, ranks on each, and megabits a second that each node's link carries each way; None: what it can."""

    nodes: int
    ranks: int
    mbit: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 64 or not 1 <= self.ranks <= 64:
            raise ValueError(f"{self.nodes} nodes of {self.ranks} ranks: both are from 1 to 64")
        if self.mbit is not None and not 1 <= self.mbit <= 100_000:
            raise ValueError(f"{self.mbit:g} Mbit/s: a link carries from 1 to 100000; leave it away for no limit")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    def __str__(self) -> str:
        rate = "unlimited links" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        return f"{self.nodes} nodes x {self.ranks} ranks, {rate}"


class Cluster:
    """The network; `run` starts a job on it. A context manager: what it makes is gone when it ends."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._names = [f"{PREFIX}-{os.getpid()}-{node}" for node in range(shape.nodes)]
        self._switch = f"{PREFIX}-{os.getpid()}-switch"

    def __enter__(self) -> Cluster:
        require_emulation()
        sweep()
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _build(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for node, name in enumerate(self._names):
            port = f"port{node}"
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", LOOPBACK, "up")
            _ip("-n", name, "link", "add", LINK, "type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", name, "address", "add", f"{address(node)}/24", "dev", LINK)
            _ip("-n", name, "link", "set", LINK, "gso_max_size", str(PACKET), "up")
            _ip("-n", self._switch, "link", "set", port, "gso_max_size", str(PACKET), "master", "bridge", "up")
            for setting, value in SETTINGS.items():
                _run("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")
            self._limit(name, LINK)
            self._limit(self._switch, port)

    def _limit(self, name: str, device: str) -> None:
        if self.shape.mbit is None:
            return
        rate = self.shape.mbit * 1e6 / 8
        burst = max(LEAST_BURST, int(rate * BURST_SECONDS))
        limits = ("rate", f"{self.shape.mbit:g}mbit", "burst", str(burst), "limit", str(QUEUE))
        _run("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limits)

    def close(self) -> None:
        for name in (*self._names, self._switch):
            remove(name)

    def traffic(self) -> list[Traffic]:
        """Of each node, since the cluster was made."""
        return [counted(_run("ip", "netns", "exec", name, "cat", "/proc/net/dev")) for name in self._names]

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> int:
        """What torchrun would be given, on every rank; the first exit code that is not 0, else 0."""
        job = [self._start(node, command, env or {}) for node in range(self.shape.nodes)]
        try:
            return _wait(job, timeout)
        finally:
            stop(job)

    def _start(self, node: int, command: Sequence[str], env: Mapping[str, str]) -> Process:
        torchrun = (
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(self.shape.nodes), "--node-rank", str(node)),
            *("--nproc-per-node", str(self.shape.ranks)),
            *("--master-addr", address(0), "--master-port", str(PORT)),
        )
        return subprocess.Popen(
            ["ip", "netns", "exec", self._names[node], *torchrun, *command],
            env={
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "GLOO_SOCKET_IFNAME": LINK,
                "NCCL_SOCKET_IFNAME": LINK,
                **env,
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C comes to us, and we stop them in order
            preexec_fn=_die_with_parent,
        )


def address(node: int) -> str:
    """Inside the cluster's own network."""
    return f"10.44.0.{node + 1}"


# --- jobs


def _die_with_parent() -> None:
    """In the child: be told to end when whoever started it is gone, killed perhaps."""
    parent_death_signal = 1
    ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)


def _wait(job: Sequence[Process], timeout: float | None) -> int:
    """Until all have ended, one has failed, or time is up."""
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in job]
        failed = [code for code in codes if code]
        if failed or None not in codes:
            return failed[0] if failed else 0
        if until is not None and time.monotonic() > until:
            raise TimeoutError(f"the job did not end within {timeout:g} s")
        time.sleep(0.1)


def stop(job: Sequence[Process]) -> None:
    """Ask, wait a little, then kill what is left."""
    for process in job:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + STOP_SECONDS
    for process in job:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


# --- namespaces


def remove(name: str) -> None:
    """A namespace and the processes in it; its interfaces go with it."""
    if name not in namespaces():
        return
    for pid in _run("ip", "netns", "pids", name).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "delete", name)


def sweep() -> list[str]:
    """Remove what calls that were killed have left; returns the names."""
    left = []
    for name in namespaces():
        parts = name.split("-")
        ours = len(parts) == 3 and parts[0] == PREFIX and parts[1].isdigit()
        if ours and not Path(f"/proc/{parts[1]}").exists():
            remove(name)
            left.append(name)
    return left


def namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line]


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHereError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


# --- the command


@contextmanager
def ending_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP end what is inside as Ctrl-C does, so that everything is taken away."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2, help="of each node")
    parser.add_argument("--mbit", type=float, help="Mbit/s of each node's link, each way; default: no limit")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--timeout", type=float, help="seconds after which the job is stopped")
    parser.add_argument("command", nargs="+", help="after --: a script and its arguments, or torchrun's options")
    options = parser.parse_args(arguments)
    try:
        shape = Shape(options.nodes, options.ranks, options.mbit)
        with ending_in_order(), Cluster(shape) as cluster:
            code = cluster.run(options.command, timeout=options.timeout)
            sent = cluster.traffic()
    except (NotHereError, ValueError, TimeoutError) as error:
        print(f"cluster: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cluster: interrupted; its nodes are gone", file=sys.stderr)
        return 130
    for node, (inside, between) in enumerate(sent):
        print(f"node {node}: sent {inside / 1e6:.1f} MB between its ranks, {between / 1e6:.1f} MB to other nodes")
    return code


if __name__ == "__main__":
    sys.exit(main())
