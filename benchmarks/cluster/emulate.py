"""Emulate a cluster on one machine: nodes joined by a network of their own, with torchrun on each node.

    python benchmarks/cluster/emulate.py --nodes 4 --ranks 2 --mbit 400 -- script.py its arguments
    python benchmarks/cluster/emulate.py --nodes 2 --ranks 2 -- --no-python fourfold train --grid x=2,z=2

Everything after `--` is passed to torchrun. Each node is a network namespace. A link joins it to a switch, which is a
bridge in another namespace, and `tbf` limits the link to --mbit in each direction. Ranks on the same node communicate
over its loopback. The machine's own network is not touched: all interfaces and addresses are inside the namespaces and
are removed with them, also on Ctrl-C and after a crash; each call removes what a killed call has left behind.

While a job runs (`Cluster.start`), a node's link can be cut and restored, and a node can be killed.

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

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

from benchmarks.cluster.namespaces import PREFIX, EmulationUnavailableError, ip, kill_all, remove, run_command, sweep

LINK, LOOPBACK = "eth0", "lo"
"""The interfaces inside a node: its link to the switch, and the loopback between its ranks."""
PORT = 29500
"""The rendezvous port on the first node; every cluster has its own network, so the port is always free."""
PACKET = 16 << 10
"""The largest segment, in bytes, that a socket hands over at once; the kernel's default is 64 KiB."""
BURST_SECONDS, LEAST_BURST = 1e-3, 3 * PACKET
"""How much a link may send at full speed after a pause: seconds at its rate, but at least a few packets in bytes. A
real link has no such burst, and with a large one short messages would be free."""
QUEUE = 64 << 20
"""Bytes that may queue in front of a link: more than all sockets hold together, so that no packet is ever dropped, as
on the fabrics of real clusters."""
TCP_SETTINGS = {
    "tcp_congestion_control": "reno",  # others pace by an estimate of the link, which takes a while to become right
    "tcp_wmem": "4096 65536 1048576",  # limits what a socket has in flight: a short queue, so a short wait behind it
    "tcp_slow_start_after_idle": "0",  # a collective after a pause starts as fast as one without a pause
}
"""TCP settings of each node."""
STOP_SECONDS = 10.0
"""How long a job may take to end after SIGTERM."""


Process = subprocess.Popen[bytes]


class Traffic(NamedTuple):
    """Bytes that a node has sent, as counted by its interfaces, including headers."""

    inside: int
    """Bytes between the node's own ranks."""
    between: int
    """Bytes to other nodes."""

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.inside - before.inside, self.between - before.between)


def traffic() -> Traffic:
    """Return the traffic of the node on which this is called."""
    return parse_traffic(Path("/proc/self/net/dev").read_text())


def parse_traffic(table: str) -> Traffic:
    """Parse the kernel's table of interfaces: two lines of headings, then a name and numbers per line."""
    sent = {}
    for line in table.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        sent[name.strip()] = int(numbers.split()[8])
    return Traffic(sent.get(LOOPBACK, 0), sent.get(LINK, 0))


def require_emulation() -> None:
    """Raise an error unless a cluster can be emulated on this machine."""
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        raise EmulationUnavailableError(f"this machine has no {' and no '.join(missing)}: install iproute2")
    if os.geteuid() != 0:
        raise EmulationUnavailableError(
            "creating network namespaces needs root: run this as root or in a privileged container"
        )


@dataclass(frozen=True)
class ClusterShape:
    """Nodes, ranks per node, and Mbit/s of each node's link in each direction (None for no limit)."""

    nodes: int
    ranks: int
    mbit: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 64 or not 1 <= self.ranks <= 64:
            raise ValueError(f"{self.nodes} nodes of {self.ranks} ranks: both must be from 1 to 64")
        if self.mbit is not None and not 1 <= self.mbit <= 100_000:
            raise ValueError(f"{self.mbit:g} Mbit/s: a link carries from 1 to 100000; omit it for no limit")

    @property
    def world(self) -> int:
        return self.nodes * self.ranks

    def __str__(self) -> str:
        rate = "unlimited links" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        return f"{self.nodes} nodes x {self.ranks} ranks, {rate}"


@dataclass(frozen=True)
class Elastic:
    """An elastic job: torchrun restarts it when ranks fail, on the nodes that are left if these are enough."""

    least: int
    """The fewest nodes that the job may run on."""
    restarts: int = 1000
    lost: int = 5
    """Seconds without a heartbeat after which a node counts as lost."""
    last_call: int = 5
    """Seconds in which more nodes may join after the least number is there."""

    def options(self, shape: ClusterShape, node: int) -> tuple[str, ...]:
        """Return torchrun's options for a node; the first node hosts the rendezvous store."""
        times = f"keep_alive_interval=1,keep_alive_max_attempt={self.lost},last_call_timeout={self.last_call}"
        return (
            *("--nnodes", f"{self.least}:{shape.nodes}", "--max-restarts", str(self.restarts)),
            *("--rdzv-backend", "fourfold", "--rdzv-endpoint", f"{address(0)}:{PORT}", "--local-addr", address(node)),
            *("--rdzv-conf", f"is_host={int(node == 0)},{times}"),
        )


class Cluster:
    """The emulated network, on which `run` starts a job. As a context manager it removes everything on exit.

    A process may have several clusters with different names; their networks are separate.
    """

    def __init__(self, shape: ClusterShape, name: str = "") -> None:
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
            for setting, value in TCP_SETTINGS.items():
                run_command("ip", "netns", "exec", name, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{setting}")
            self._limit(name, LINK)
            self._limit(self._switch, port)

    def _limit(self, name: str, device: str) -> None:
        if self.shape.mbit is None:
            return
        rate = self.shape.mbit * 1e6 / 8
        burst = max(LEAST_BURST, int(rate * BURST_SECONDS))
        limits = ("rate", f"{self.shape.mbit:g}mbit", "burst", str(burst), "limit", str(QUEUE))
        run_command("tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", *limits)

    def close(self) -> None:
        for process in self._started:  # first, because they may not have entered their namespace yet
            process.kill()
        for name in (*self._names, self._switch):
            remove(name)
        for process in self._started:
            process.wait()

    def traffic(self) -> list[Traffic]:
        """Return the traffic of each node since the cluster was created."""
        return [parse_traffic(run_command("ip", "netns", "exec", name, "cat", "/proc/net/dev")) for name in self._names]

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> int:
        """Run torchrun with these arguments on every node; return the first exit code that is not 0, or 0."""
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
        """Start torchrun on one node; its ranks wait for the other nodes. All output goes to the log."""
        static = (
            *("--nnodes", str(self.shape.nodes), "--node-rank", str(node)),
            *("--master-addr", address(0), "--master-port", str(PORT)),
        )
        options = static if elastic is None else elastic.options(self.shape, node)
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
            start_new_session=True,  # so that Ctrl-C reaches only this process, which then stops the job in order
            preexec_fn=partial(become_host, host(node)),
        )
        self._started.append(process)
        return process

    def cut_link(self, node: int) -> None:
        """Unplug a node from the switch: packets are lost from now on, and no connection is closed."""
        ip("-n", self._switch, "link", "set", port_of(node), "down")

    def restore_link(self, node: int) -> None:
        ip("-n", self._switch, "link", "set", port_of(node), "up")

    def kill_node(self, node: int) -> None:
        """Kill all processes of a node; only this cluster starts processes there."""
        kill_all(self._names[node])


def address(node: int) -> str:
    """Return a node's address in the cluster's own network."""
    return f"10.44.0.{node + 1}"


def host(node: int) -> str:
    """Return the host name that the processes of a node see."""
    return f"node-{node}"


def port_of(node: int) -> str:
    """Return the name of the switch's end of a node's link."""
    return f"port{node}"


# --- jobs


def become_host(name: str) -> None:
    """Give this child process a host name, and have it receive SIGTERM when its parent dies, even if killed."""
    parent_death_signal, own_name = 1, 0x04000000
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(parent_death_signal, signal.SIGTERM)
    if libc.unshare(own_name):
        raise OSError(ctypes.get_errno(), "cannot give the node a host name of its own")
    socket.sethostname(name)


def _wait(job: Sequence[Process], timeout: float | None) -> int:
    """Wait until all processes have ended, one has failed, or the timeout has passed."""
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
    """Terminate the processes, wait a while, then kill those that are left."""
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
def exit_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise an exception, as Ctrl-C does, so that everything is cleaned up."""

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
    parser.add_argument("--ranks", type=int, default=2, help="ranks per node")
    parser.add_argument("--mbit", type=float, help="Mbit/s of each node's link in each direction; default: no limit")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--timeout", type=float, help="seconds after which the job is stopped")
    parser.add_argument("command", nargs="+", help="after --: a script and its arguments, or torchrun's options")
    options = parser.parse_args(arguments)
    try:
        shape = ClusterShape(options.nodes, options.ranks, options.mbit)
        with exit_on_signals(), Cluster(shape) as cluster:
            code = cluster.run(options.command, timeout=options.timeout)
            sent = cluster.traffic()
    except (EmulationUnavailableError, ValueError, TimeoutError) as error:
        print(f"emulate: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("emulate: interrupted; the nodes are removed", file=sys.stderr)
        return 130
    for node, (inside, between) in enumerate(sent):
        print(f"node {node}: sent {inside / 1e6:.1f} MB between its ranks, {between / 1e6:.1f} MB to other nodes")
    return code


if __name__ == "__main__":
    sys.exit(main())
