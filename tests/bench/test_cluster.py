"""The emulated cluster: what its links carry and count, and that nothing of it is left, however a call ends."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import warm
from benchmarks.cluster import emulate
from benchmarks.cluster.namespaces import namespaces

pytestmark = pytest.mark.slow


RECEIVED, SENT = "10 0 0 0 0 0 0", "90 0 0 0 0 0 0"
TABLE = f"""Inter-|   Receive  |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier
    lo:    7000      {RECEIVED}     7000      {SENT}
  eth0:  123456      {RECEIVED}      900      {SENT}
"""


def test_what_a_node_sent_is_told_apart_by_interface() -> None:
    assert emulate.parse_traffic(TABLE) == (7000, 900)
    assert emulate.Traffic(10, 30).since(emulate.Traffic(4, 5)) == (6, 25)


@pytest.mark.parametrize("wrong", [(0, 1, None), (4, 65, None), (2, 2, 0.5)])
def test_impossible_clusters_are_refused(wrong: tuple[int, int, float | None]) -> None:
    with pytest.raises(ValueError, match="from 1 to"):
        emulate.ClusterShape(*wrong)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(emulate.shutil, "which", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert emulate.main(["--", "script.py"]) == 2
    assert "run this as root" in capsys.readouterr().err


def test_without_iproute2_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(emulate.shutil, "which", lambda program: None if program == "tc" else f"/sbin/{program}")
    assert emulate.main(["--", "script.py"]) == 2
    assert "this machine has no tc: install iproute2" in capsys.readouterr().err


@pytest.fixture(scope="module")
def emulation() -> None:
    """Skips where no cluster can be made."""
    try:
        with emulate.Cluster(emulate.ClusterShape(1, 1, 100)):
            pass
    except emulate.EmulationUnavailableError as error:
        pytest.skip(f"no emulated cluster here: {error}")


RANK = """
import json, sys, time
import torch, torch.distributed as dist
from benchmarks.cluster.emulate import traffic
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
part, whole = torch.zeros(1 << 20), [torch.empty(1 << 20) for _ in range(world)]  # 4 MiB each
dist.all_gather(whole, part)
dist.barrier()
before = traffic()
dist.barrier()  # nobody sends before all have read
began = time.perf_counter()
dist.all_gather(whole, part)
dist.barrier()
seconds, sent = time.perf_counter() - began, traffic().since(before)
if rank % 2 == 0:
    open(f"{sys.argv[1]}/{rank}", "w").write(json.dumps([seconds, *sent]))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("emulation")
def test_links_carry_what_they_were_given_and_count_it(tmp_path: Path) -> None:
    """Two nodes of two ranks: a ring of four sends 3 parts of 4 MiB over each of its hops, two of them inside."""
    script, out = tmp_path / "rank.py", tmp_path / "out"
    script.write_text(RANK)
    out.mkdir()
    with emulate.Cluster(emulate.ClusterShape(2, 2, 80)) as made:
        with warm.nodes():
            assert made.run([str(script), str(out)], timeout=120) == 0
        counted = made.traffic()
    wire = 3 * (4 << 20)
    for node, place in enumerate(("0", "2")):
        seconds, inside, between = json.loads((out / place).read_text())
        assert wire < inside < 1.03 * wire and wire < between < 1.03 * wire
        assert counted[node].between > between
        assert seconds > 0.95 * wire / 10e6  # 80 Mbit/s
        assert seconds < 3 * wire / 10e6


ECHO = """
import socket
talk, _ = socket.create_server(("", 5000)).accept()
while heard := talk.recv(1):
    talk.sendall(heard)
"""
ASK = """
import os, socket, sys, time
while True:
    try:
        talk = socket.create_connection((sys.argv[1], 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
while asked := os.read(0, 1):
    talk.sendall(asked)
    os.write(1, talk.recv(1))
"""


@pytest.mark.usefixtures("emulation")
def test_a_cut_link_is_silent_until_it_is_healed() -> None:
    with ExitStack() as stack, emulate.Cluster(emulate.ClusterShape(2, 1), "c") as made:

        def start(node: int, *program: str) -> subprocess.Popen[bytes]:
            enter = ["ip", "netns", "exec", f"{emulate.PREFIX}-{os.getpid()}-c{node}"]
            command = [*enter, sys.executable, "-c", *program]
            return stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))

        start(1, ECHO)
        ask = start(0, ASK, emulate.address(1))

        def answered(seconds: float) -> bool:
            return bool(select.select([ask.stdout], [], [], seconds)[0])

        os.write(ask.stdin.fileno(), b"1")
        assert answered(30) and os.read(ask.stdout.fileno(), 1) == b"1"
        made.cut_link(1)
        os.write(ask.stdin.fileno(), b"2")
        assert not answered(0.5)
        made.restore_link(1)
        assert answered(30) and os.read(ask.stdout.fileno(), 1) == b"2"


@pytest.fixture
def call(emulation: None) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:  # noqa: ARG001
    """A call whose job sleeps on one node."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, emulate.__file__, "--nodes", "1", "--ranks", "1"]
        process = subprocess.Popen(
            [*command, "--", "--no-python", "sleep", "300"], stderr=subprocess.DEVNULL, preexec_fn=hear_ctrl_c
        )
        started.append(process)
        wait_until(lambda: "sleep" in commands_on(f"{emulate.PREFIX}-{process.pid}-0"))
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
    emulate.sweep()


def hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell has the tests ignore it if it runs them in the background


def wait_until(done: Callable[[], bool], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"not within {seconds} s"
        time.sleep(0.1)


def commands_on(name: str) -> list[str]:
    """Names of the processes in a namespace; none where there is no such."""
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    paths = [Path(f"/proc/{pid}/comm") for pid in found.stdout.split()]
    return [path.read_text().strip() for path in paths if path.exists()]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_call_leaves_nothing(
    call: Callable[[], subprocess.Popen[bytes]], sent: signal.Signals, code: int
) -> None:
    process = call()
    process.send_signal(sent)
    process.wait(timeout=30 + emulate.STOP_SECONDS)  # torchrun, if it does not end by itself, is killed after these
    assert process.returncode == code
    assert not [name for name in namespaces() if f"-{process.pid}-" in name]


def test_what_a_killed_call_has_left_is_taken_away(call: Callable[[], subprocess.Popen[bytes]]) -> None:
    process = call()
    name = f"{emulate.PREFIX}-{process.pid}-0"
    process.kill()
    process.wait()
    assert name in namespaces()
    assert name in emulate.sweep()
    assert name not in namespaces()
    wait_until(lambda: not commands_on(name), 10)
