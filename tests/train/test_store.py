"""Who can talk to a job: its store and its ranks listen at one address each, those of a local run on the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

import warm
from fourfold import job
from fourfold.environment import AGENT_HAS_STORE, INTERFACES, Environment, stay_on_loopback
from fourfold.train import launch as launching
from fourfold.train.rendezvous import BACKEND
from runs import needs_proc

PROBE = """
import os, sys, time
from pathlib import Path
sys.path[:0] = [os.environ["TESTS"], str(Path(os.environ["TESTS"]).parent)]
from test_store import listening
import fourfold as ff
grid = ff.Grid(data=2, device="cpu")
found = listening(os.getpid()) | listening(int(os.environ["AGENT"]))
Path(os.environ["FOUND"] + str(grid.rank)).write_text("\\n".join({address for address, _ in found}))
while not Path(os.environ["FOUND"] + "1").exists():  # rank 0 has the store
    time.sleep(0.05)
os._exit(0)
"""
"""Two ranks of a job, each of which writes where it and the agent that started it listen."""


def listening(process: int) -> set[tuple[str, str]]:
    """The addresses and ports at which a process takes connections."""
    links = Path(f"/proc/{process}/fd")
    inodes = {os.readlink(link).removeprefix("socket:[").removesuffix("]") for link in links.iterdir() if link.exists()}
    found = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                address, _, port = local.partition(":")
                raw = bytes.fromhex(address)
                words = [raw[at : at + 4][::-1] for at in range(0, len(raw), 4)]  # each in the order of this machine
                found.add((socket.inet_ntop(family, b"".join(words)), port))
    return found


@needs_proc
def test_what_listens_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0)):
        assert {"127.0.0.1", "0.0.0.0"} <= {address for address, _ in listening(os.getpid())}


@needs_proc
def test_a_local_run_listens_on_the_loopback_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "RANK", PROBE)
    monkeypatch.setenv("TESTS", str(Path(__file__).parent))
    monkeypatch.setenv("FOUND", str(tmp_path / "rank-"))
    monkeypatch.setenv("AGENT", str(os.getpid()))
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)  # another test may have run a rank in this process
    with warm.ranks():
        assert launching.launch(2, [], sys.stderr) == 0
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}").read_text() == "127.0.0.1"
    assert not set(INTERFACES) & os.environ.keys()


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("way", ["torchrun", "plain"])
def test_ranks_on_one_node_listen_on_the_loopback_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Ranks that torchrun has started with our backend, and ranks that only have the variables of a job."""
    for name in INTERFACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TESTS", str(Path(__file__).parent))
    monkeypatch.setenv("FOUND", str(tmp_path / "rank-"))
    script = tmp_path / "probe.py"
    script.write_text(PROBE.replace('int(os.environ["AGENT"])', "os.getppid()" if way == "torchrun" else "os.getpid()"))
    if way == "torchrun":
        options = "--rdzv-backend", BACKEND, "--nproc-per-node", "2"
        subprocess.run([sys.executable, "-m", "torch.distributed.run", *options, script], check=True, timeout=120)
    else:
        with socket.create_server(("127.0.0.1", 0)) as free:
            told = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
        env = [{**os.environ, **told, "RANK": str(rank)} for rank in range(2)]
        ranks = [subprocess.Popen([sys.executable, script], env=one) for one in env]
        assert [rank.wait(120) for rank in ranks] == [0, 0]
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}").read_text() == "127.0.0.1"


def test_plain_torchrun_restarts_ranks_of_one_node_and_warns_of_nothing_else(tmp_path: Path) -> None:
    """Its store keeps the addresses of ranks that are gone; those that come after must not wait for them."""
    script, errors = tmp_path / "script.py", tmp_path / "errors"
    script.write_text(
        "import os, sys, fourfold as ff\n"
        "grid = ff.Grid(data=2, device='cpu')\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and grid.rank == 1:\n"
        "    os._exit(7)\n"
        "assert grid.broadcast_text('hello') == 'hello'\n"
        "open(f'{sys.argv[1]}/rank-{grid.rank}', 'w').close()\n"
        "grid.close()\n"
    )
    options = "--nproc-per-node", "2", "--max-restarts", "1"
    process = warm.Process(warm.torchrun, *options, str(script), str(tmp_path), stderr=errors)
    try:
        assert process.wait(120) == 0, errors.read_text()
    finally:
        process.kill()
    assert {path.name for path in tmp_path.glob("rank-*")} == {"rank-0", "rank-1"}
    assert "run.py" not in errors.read_text(), "torchrun warns of an option of the command"


@pytest.mark.parametrize(
    ("env", "chosen"),
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node0"}, True),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, False),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost"}, True),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.7"}, False),
        ({"RANK": "0", "WORLD_SIZE": "4"}, False),
    ],
)
def test_only_a_job_on_one_node_chooses_the_loopback(
    monkeypatch: pytest.MonkeyPatch, env: dict[str, str], chosen: bool
) -> None:
    monkeypatch.setattr(os, "environ", dict(env))
    stay_on_loopback(Environment.read(), nccl=True)
    assert [name in os.environ for name in INTERFACES] == [chosen, chosen]
    named = socket.if_nameindex()[-1][1]
    monkeypatch.setattr(os, "environ", {**env, INTERFACES[0]: named, INTERFACES[1]: ""})
    stay_on_loopback(Environment.read(), nccl=True)
    assert os.environ[INTERFACES[0]] == named, "the user has named one"
    assert bool(os.environ[INTERFACES[1]]) == chosen, "an empty name is none"


@needs_proc
def test_ranks_that_were_told_an_address_find_the_store_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SLURM's are: rank 0 has it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    before = listening(os.getpid())
    first, second = (job.find_store(Environment(rank, 2), 10.0) for rank in range(2))
    second.set("a", "b")
    assert first.get("a") == b"b"
    assert {address for address, _ in listening(os.getpid()) - before} == {"127.0.0.1"}
    monkeypatch.setenv(AGENT_HAS_STORE, "True")
    assert job.find_store(Environment(0, 2), 10.0).get("a") == b"b", "torchrun's is there, and is used"


@needs_proc
def test_agents_of_several_nodes_listen_at_their_addresses_alone() -> None:
    before = listening(os.getpid())
    config = {"join_timeout": "5", "last_call_timeout": "1"}
    params = RendezvousParameters(BACKEND, "127.0.0.1:0", "name", 1, 2, local_addr="127.0.0.1", **config)
    handler = get_rendezvous_handler(params)  # as torchrun finds it
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    assert {address for address, _ in listening(os.getpid()) - before} == {"127.0.0.1"}
    handler.shutdown()


def test_a_store_serves_those_who_reach_it() -> None:
    served = job.serve(job.LOOPBACK)
    client = dist.TCPStore(job.LOOPBACK, served.port)
    client.set("a", "b")
    assert served.get("a") == b"b"


def test_a_name_that_means_the_loopback_is_no_use_to_other_nodes() -> None:
    job.require_reachable("localhost", nodes=1)
    with pytest.raises(ValueError, match=r"MASTER_ADDR=localhost is .*127\.0\.0\.1.* set MASTER_ADDR"):
        job.require_reachable("localhost", nodes=2)
