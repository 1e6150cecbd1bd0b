"""An emulated cluster on one machine: nodes with a network of their own between them, and torchrun on each.

    python benchmarks/cluster.py --nodes 4 --ranks 2 --mbit 400 -- script.py its arguments
    python benchmarks/cluster.py --nodes 2 --ranks 2 -- --no-python fourfold train --grid x=2,z=2

What follows `--` is what torchrun would be given. A node is a network namespace; a link joins it to a switch, a bridge
in one more namespace, and `tbf` holds what the link carries each way to --mbit. Ranks of one node talk over its
loopback. Nothing of the machine's own network is touched: all interfaces and addresses are inside the namespaces, and
go with them, on Ctrl-C and after a crash too; what a killed call left behind the next call takes away.

While a job runs (`Cluster.start`) a node's link can be cut and healed, and a node can end.

Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, NamedTuple

from namespaces import PREFIX, NotHereError, ip, kill_all, output_of, remove, sweep

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


@dataclass(frozen=True)
class Elastic:
    """A job that torchrun starts again when ranks fail, with the nodes that are left if these are enough."""

    least: int
    """Nodes."""
    restarts: int = 1000
    lost: int = 5
    """Seconds without a sign of life after which a node is taken for lost."""
    last_call: int = 5
    """Seconds in which others may still join once the least are there."""

    def options(self, shape: Shape, node: int) -> tuple[str, ...]:
        """Of torchrun on that node; the first one keeps the store by which they find each other."""
        times = f"keep_alive_interval=1,keep_alive_max_attempt={self.lost},last_call_timeout={self.last_call}"
        return (
            *("--nnodes", f"{self.least}:{shape.nodes}", "--max-restarts", str(self.restarts)),
            *("--rdzv-backend", "fourfold", "--rdzv-endpoint", f"{address(0)}:{PORT}", "--local-addr", address(node)),
            *("--rdzv-conf", f"is_host={int(node == 0)},{times}"),
        )


class Cluster:
    """The network; `run` starts a job on it. A context manager: what it makes is gone when it ends.

    Several of one process have names, and networks that know nothing of each other.
    """

    def __init__(self, shape: Shape, name: str = "") -> None:
        self.shape = shape
        self._names = [f"{PREFIX}-{os.getpid()}-{name}{node}" for node in range(shape.nodes)]
        self._switch = f"{PREFIX}-{os.getpid()}-{name}switch"
        self._started: list[Process] = []

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
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for node, name in enumerate(self._names):
            port = port_of(node)
            ip("netns", "add", name)
            ip("-n", name, "link", "set", LOOPBACK, "up")
            ip("-n", name, "link", "add", LINK, "type", "veth", "peer", "name", port, "netns", self._switch)
            ip("-n", name, "address", "add", f"{address(node)}/24", "dev", LINK)
            ip("-n", name, "link", "set", LINK, "gso_max_size", str(PACKET), "up")
            ip("-n", self._switch, "link", "set", port, "gso_max_size", str(PACKET), "master", "bridge", "up")
            for setting, value in SETTINGS.items():
                output_of("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")
            self._limit(name, LINK)
            self._limit(self._switch, port)

    def _limit(self, name: str, device: str) -> None:
        if self.shape.mbit is None:
            return
        rate = self.shape.mbit * 1e6 / 8
        burst = max(LEAST_BURST, int(rate * BURST_SECONDS))
        limits = ("rate", f"{self.shape.mbit:g}mbit", "burst", str(burst), "limit", str(QUEUE))
        output_of("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limits)

    def close(self) -> None:
        for process in self._started:  # the first ones: they might just be on their way into their namespace
            process.kill()
        for name in (*self._names, self._switch):
            remove(name)
        for process in self._started:
            process.wait()

    def traffic(self) -> list[Traffic]:
        """Of each node, since the cluster was made."""
        return [counted(output_of("ip", "netns", "exec", name, "cat", "/proc/net/dev")) for name in self._names]

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> int:
        """What torchrun would be given, on every rank; the first exit code that is not 0, else 0."""
        job = [self.start(node, command, env=env) for node in range(self.shape.nodes)]
        try:
            return _wait(job, timeout)
        finally:
            stop(job)

    def start(
        self,
        node: int,
        command: Sequence[str],
        *,
        elastic: Elastic | None = None,
        env: Mapping[str, str] | None = None,
        log: IO[str] | None = None,
    ) -> Process:
        """torchrun on one node, whose ranks wait for those of the others; what it and they print goes to the log."""
        alone = (
            *("--nnodes", str(self.shape.nodes), "--node-rank", str(node)),
            *("--master-addr", address(0), "--master-port", str(PORT)),
        )
        options = alone if elastic is None else elastic.options(self.shape, node)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(self.shape.ranks), *options)
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._names[node], *torchrun, *command],
            env={
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "GLOO_SOCKET_IFNAME": LINK,
                "NCCL_SOCKET_IFNAME": LINK,
                **(env or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C comes to us, and we stop them in order
            preexec_fn=partial(_become, host(node)),
        )
        self._started.append(process)
        return process

    def cut(self, node: int) -> None:
        """Pull the cable between a node and the switch: nothing arrives any more, and nobody is told."""
        ip("-n", self._switch, "link", "set", port_of(node), "down")

    def heal(self, node: int) -> None:
        ip("-n", self._switch, "link", "set", port_of(node), "up")

    def end(self, node: int) -> None:
        """Kill all processes of a node: nobody but this cluster starts any there."""
        kill_all(self._names[node])


def address(node: int) -> str:
    """Inside the cluster's own network."""
    return f"10.44.0.{node + 1}"


def host(node: int) -> str:
    """What the processes of a node read as the name of their machine."""
    return f"node-{node}"


def port_of(node: int) -> str:
    """Where a node's link ends, at the switch."""
    return f"port{node}"


# --- jobs


def _become(name: str) -> None:
    """In the child: have a host's name, and be told to end when whoever started it is gone, killed perhaps."""
    parent_death_signal, own_name = 1, 0x04000000
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(parent_death_signal, signal.SIGTERM)
    if libc.unshare(own_name):
        raise OSError(ctypes.get_errno(), "a node needs a name of its own")
    socket.sethostname(name)


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
