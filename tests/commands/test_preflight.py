"""What a preflight finds against a run: every warning and failure from made-up facts, and the command on two ranks."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import warm
from fourfold import models
from fourfold.cli import main, parser
from fourfold.commands.doctor import PlannedRun, Preflight, planned, rank_of, why_unlinked
from fourfold.commands.probe import (
    Budget,
    FolderMark,
    LinkTimer,
    ask_clock,
    free_bytes,
    look_at,
    myself,
    pairs_of,
    versions,
    within,
)
from fourfold.grid import Shape
from fourfold.job import Channel
from fourfold.watch.checks import Check, Disk, Facts, MeasuredLink, Needs, Rank, judge, lines, most_kept

GIB = 1 << 30
HOSTS = ("one", "one", "two", "two")
VERSIONS = {
    "python": "3.12.1",
    "torch": "2.13.0",
    "fourfold": "0.1 (ab)",
    "driver": "550",
    "CUDA": "12.8",
    "NCCL": "2.27",
}
NEEDS = Needs(
    peak=40 * GIB, reserve=4 * GIB, folder="/shared/one", saves=True, checkpoint=12 * GIB, kept=4
)  # 48 GiB of checkpoints


def rank(number: int, **changes: Any) -> Rank:
    """One of four GPUs on two nodes, against which nothing can be said."""
    host = HOSTS[number]
    sound = Rank(
        rank=number,
        host=host,
        node=host,
        versions=VERSIONS,
        device="NVIDIA H200",
        uuid=f"GPU-{number}",
        flops=6e14,
        free=70 * GIB,
        clock=(0.002, 0.0004) if number == 2 else None,
        disk=Disk(seen=True, free=100 * GIB, nbytes=100 << 20, seconds=0.1),
    )
    return replace(sound, **changes)


LINKS = (
    MeasuredLink("x", (0, 1), 2e11),
    MeasuredLink("x", (2, 3), 2.1e11),
    MeasuredLink("z", (0, 2), 2e10),
    MeasuredLink("z", (1, 3), 2.2e10),
)


def facts(
    *different: Rank,
    links: tuple[MeasuredLink, ...] = LINKS,
    needs: Needs = NEEDS,
    missing: int | None = None,
    unlinked: str = "",
) -> Facts:
    ranks = {number: rank(number) for number in range(4)} | {one.rank: one for one in different}
    return Facts(4, {key: one for key, one in ranks.items() if key != missing}, links, needs, unlinked)


def channel_of(rank: int, world: int, store: dist.Store) -> Channel:
    return Channel("preflight", range(world), store, rank=rank)


def look_of(
    rank: int, world: int, store: dist.Store, seconds: float = 20.0, plan: PlannedRun | None = None
) -> Preflight:
    plan = plan or PlannedRun(None, Shape(data=world), None)
    return Preflight(channel_of(rank, world, store), Budget(seconds), plan, torch.device("cpu"), first_of_node=True)


def on_cpu(number: int, **changes: Any) -> Rank:
    return rank(number, device="cpu", uuid="", cores=2, **changes)


def test_nothing_stands_against_a_sound_job() -> None:
    checks = judge(facts())
    names = ["ranks", "versions", "devices", "speed", "memory", "clocks", "links", "disk", "space"]
    assert [(check.name, check.state) for check in checks] == [(name, "ok") for name in names]
    said = {check.name: check.evidence for check in checks}
    assert said["ranks"] == "4 ranks on 2 nodes"
    assert said["devices"] == "4 x NVIDIA H200, a rank on each"
    assert said["clocks"] == "at most 2.0 ms (+- 0.4 ms) from that of rank 0"
    assert said["links"] == "x: 2 inside a node, 200 GB/s to 210 GB/s; z: 2 between nodes, 20 GB/s to 22 GB/s"
    assert said["space"] == (
        "100 GiB free; a rank writes 100 MiB in at most 0.1 s, a checkpoint in about 3.07 s; 4 checkpoints of 12 GiB "
        "at once need 48 GiB"
    )


FULL = Disk(seen=True, free=40 * GIB, nbytes=100 << 20, seconds=0.1)
TIGHT = replace(FULL, free=50 * GIB)
CASES = {
    "a rank is missing": (facts(missing=3, links=LINKS[:1]), "ranks", "FAILED", "rank 3 of 4 did not answer in time"),
    "a rank cannot measure": (
        facts(rank(1, faults={"a product": "no memory"})), "ranks", "FAILED", "rank 1 (one): a product: no memory",
    ),
    "another torch": (
        facts(rank(3, versions=VERSIONS | {"torch": "2.12.0"})), "versions", "FAILED",
        "torch is 2.12.0 on rank 3 (two), and 2.13.0 on most",
    ),
    "no NCCL": (
        facts(rank(1, versions={key: text for key, text in VERSIONS.items() if key != "NCCL"})), "versions", "FAILED",
        "NCCL is none on rank 1 (one)",
    ),
    "another driver": (
        facts(*(rank(number, versions=VERSIONS | {"driver": "535"}) for number in (1, 3)), rank(0)), "versions",
        "warning", "driver is 535 on ranks 1, 3 (one, two), and 550 on most",
    ),
    "a shared GPU": (facts(rank(1, uuid="GPU-0")), "devices", "FAILED", "ranks 0, 1 (one) share the GPU GPU-0"),
    "two kinds": (facts(rank(0, device="NVIDIA A100")), "devices", "warning", "1 x NVIDIA A100, 3 x NVIDIA H200"),
    "too few cores": (
        facts(*(replace(on_cpu(number, free=99 * GIB), cores=1) for number in range(4))), "devices", "warning",
        "2 ranks share 1 core of one",
    ),
    "a slow device": (
        facts(rank(2, flops=5e14)), "speed", "warning",
        "a product runs at 500 TFLOP/s on rank 2 (two), at 600 TFLOP/s on most",
    ),
    "too little memory": (facts(rank(1, free=39 * GIB)), "memory", "FAILED", "rank 1 (one) has 39 GiB free"),
    "little memory left": (facts(rank(1, free=43 * GIB)), "memory", "warning", "want 4 GiB more"),
    "too little memory of a node": (
        facts(*(on_cpu(number, free=70 * GIB) for number in range(4))), "memory", "FAILED",
        "one has 70 GiB free, and the planner predicts a peak of 80 GiB for 2 ranks",
    ),
    "no prediction": (
        facts(needs=replace(NEEDS, peak=None, unknown="no such machine")), "memory", "warning", "no such machine",
    ),
    "a clock ahead": (
        facts(rank(2, clock=(1.5, 0.001))), "clocks", "warning",
        "the clock of two is 1.500 s ahead of that of rank 0 (+- 1.0 ms)",
    ),
    "a clock behind": (facts(rank(2, clock=(-2.0, 0.001))), "clocks", "warning", "2.000 s behind that of rank 0"),
    "no clock": (facts(rank(2, clock=None)), "clocks", "warning", "the clock of two is not known"),
    "a slow link": (
        facts(links=(*LINKS, MeasuredLink("data", (2, 0), 0.9e10))), "links", "warning",
        "data: ranks 2, 0 (two, one) exchange 9 GB/s, other links between nodes 20 GB/s",
    ),
    "no answer": (
        facts(links=(*LINKS[:3], MeasuredLink("z", (1, 3), None))), "links", "FAILED",
        "z: ranks 1, 3 (one, two) do not reach each other in time",
    ),
    "nobody joined": (facts(links=(), unlinked="rank 3 of 4"), "links", "FAILED", "not measured: rank 3 of 4"),
    "a forbidden folder": (
        facts(rank(2, disk=Disk(seen=False, fault="Permission denied"))), "disk", "FAILED",
        "rank 2 (two) cannot write to /shared/one: Permission denied",
    ),
    "a folder of one node": (
        facts(rank(2, disk=Disk(seen=False)), rank(3, disk=Disk(seen=False))), "disk", "FAILED",
        "ranks 2, 3 (two) do not see the file that rank 0 has written to /shared/one",
    ),
    "a folder of one node without checkpoints": (
        facts(rank(2, disk=Disk(seen=False)), needs=replace(NEEDS, saves=False)), "disk", "warning", "do not see",
    ),
    "a folder for everybody": (
        facts(rank(0, disk=replace(FULL, free=99 * GIB, mode=0o40777))), "disk", "warning", "everybody may write",
    ),
    "a full disk": (facts(rank(0, disk=FULL)), "space", "FAILED", "4 checkpoints of 12 GiB at once need 48 GiB"),
    "a nearly full disk": (facts(rank(0, disk=TIGHT)), "space", "warning", "50 GiB free"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_stands_against_a_run_is_named(case: str) -> None:
    """That alone, with what to do about it."""
    given, name, state, evidence = CASES[case]
    against = [check for check in judge(given) if check.state != "ok"]
    assert {check.name for check in against} == {name}
    assert {check.state for check in against} == {state}
    assert any(evidence in check.evidence for check in against), against
    assert all(check.advice for check in against)


def test_bounds_are_not_passed_by_a_hair() -> None:
    links = (
        MeasuredLink("x", (0, 1), 1.0),
        MeasuredLink("x", (2, 3), 0.5 * 0.75),
        MeasuredLink("z", (0, 2), 9.0),
    )  # of two the median is between
    near = facts(rank(1, flops=0.86 * 6e14, free=44 * GIB), rank(2, clock=(-1.0, 0.1)), links=links)
    assert {check.state for check in judge(near)} == {"ok"}


def test_one_rank_without_a_config_has_little_to_fail() -> None:
    alone = Facts(1, {0: rank(0, disk=None)}, (), Needs())
    said = {check.name: check.evidence for check in judge(alone)}
    assert {check.state for check in judge(alone)} == {"ok"}
    assert said["links"] == "one rank, no links"
    assert said["clocks"] == "one node, one clock"
    assert "not checked" in said["disk"]
    assert "space" not in said


def test_checkpoints_that_are_there_already_need_no_room() -> None:
    there = replace(NEEDS, there=20 * GIB)
    assert {check.state for check in judge(facts(rank(0, disk=FULL), needs=there))} == {"ok"}


def test_a_table_has_what_to_do_below_what_was_found() -> None:
    shown = list(lines([Check("disk", "ok", "fine"), Check("versions", "FAILED", "differ", "install")]))
    assert shown == ["ok       disk      fine", "FAILED   versions  differ", " " * 19 + "-> install"]


def slowly(steps: int, every: int, keep_last: int, keep_every: int) -> int:
    """Save by save, as `Checkpoints.prune` does."""
    kept: list[int] = []
    most = 0
    for step in sorted({*range(every, steps + 1, every), steps} if every else {steps}):
        kept.append(step)
        most = max(most, len(kept))
        kept = [one for one in kept if one in kept[-keep_last:] or (keep_every and one % keep_every == 0)]
    return most


def test_so_many_checkpoints_are_kept_at_once() -> None:
    for steps in (1, 7, 100, 101):
        for every in (0, 1, 10, 100, 200):
            for keep_last in (1, 2, 5):
                for keep_every in (0, 1, 4, 10, 15, 50):
                    case = steps, every, keep_last, keep_every
                    assert most_kept(*case) == slowly(*case), case


@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_ring_is_measured_in_rounds_of_pairs(ranks: int) -> None:
    rounds = list(pairs_of(ranks))
    links = [frozenset(pair) for pairs in rounds for pair in pairs]
    ring = {frozenset((place, (place + 1) % ranks)) for place in range(ranks)} if ranks > 1 else set()
    assert set(links) == ring
    assert len(links) == len(ring)
    assert all(len({place for pair in pairs for place in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) <= 3


def test_what_does_not_end_is_left_behind() -> None:
    assert within(5.0, lambda: 3) == 3
    with pytest.raises(KeyError, match="gone"):
        within(5.0, lambda: {}["gone"])
    held = threading.Event()
    with pytest.raises(TimeoutError, match="no end after"):
        within(0.05, held.wait)
    held.set()


def test_who_is_silent_is_known_in_time() -> None:
    assert Budget(0.0).left(10.0) == 0
    assert Budget(20.0).left(10.0) == 10.0
    alone = look_of(0, 3, dist.HashStore(), 0.2)
    began = time.monotonic()
    alone.meet()  # the other two never come
    assert time.monotonic() - began < 3


def test_clocks_are_compared_over_the_store() -> None:
    store = dist.HashStore()
    looks = [
        Preflight(
            channel_of(number, 2, store),
            Budget(20.0),
            PlannedRun(None, Shape(data=2), None),
            torch.device("cpu"),
            first_of_node=True,
        )
        for number in range(2)
    ]
    thread = threading.Thread(target=looks[0]._clock)
    thread.start()
    found = looks[1]._clock()
    thread.join()
    assert found is not None
    offset, within_seconds = found
    assert abs(offset) <= within_seconds < 1.0
    assert ask_clock(channel_of(1, 2, dist.HashStore()), 0.0) is None


def measured_links(
    world: int, monkeypatch: pytest.MonkeyPatch, stuck: int | None, dead: int | None
) -> tuple[list[MeasuredLink], list[LinkTimer]]:
    """What rank 0 hears of ranks along x that are threads: one does not answer along its links, one is not there."""
    monkeypatch.setattr("fourfold.commands.probe.LINK_SECONDS", 0.2)
    monkeypatch.setattr("fourfold.commands.probe.MEET_SECONDS", 1.0)
    monkeypatch.setattr(LinkTimer, "_open", lambda *_: float("inf"))
    over = threading.Event()

    def rate(links: LinkTimer, _: str, __: int, leads: bool) -> float:
        if links.grid.rank == stuck:
            over.wait(20.0)
        return 2e9 if leads else 1e9

    monkeypatch.setattr(LinkTimer, "_rate", rate)
    store, shape, cpu = dist.HashStore(), Shape(x=world), torch.device("cpu")
    all_links, found = [], {}
    for rank in (rank for rank in range(world) if rank != dead):
        grid = SimpleNamespace(shape=shape, rank=rank, coords=shape.coords(rank), device=cpu)
        all_links.append(LinkTimer(channel_of(rank, world, store), Budget(20.0), grid))  # type: ignore[arg-type]
    threads = [
        threading.Thread(target=lambda one=one: found.update({one.grid.rank: one.measure()})) for one in all_links
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15.0)
        assert not thread.is_alive()
    over.set()
    return found[0], all_links


def test_every_link_is_heard_of_on_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, ranks = measured_links(5, monkeypatch, None, None)
    assert {link.ranks for link in heard} == {(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)}
    assert {link.rate for link in heard} == {1e9}  # what the slower end says
    assert not any(one.broken for one in ranks)


def test_the_first_link_without_an_answer_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, ranks = measured_links(4, monkeypatch, 3, None)
    assert {link.ranks: link.rate for link in heard} == {(0, 1): 1e9, (2, 3): None}
    assert all(one.broken for one in ranks)


def test_a_rank_that_dies_meanwhile_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ranks = measured_links(3, monkeypatch, None, 2)
    assert ranks[0].lost == [2]
    assert all(one.broken for one in ranks)


def test_a_mark_is_seen_and_leaves_nothing(tmp_path: Path) -> None:
    mark = FolderMark.leave(tmp_path / "runs" / "one", "test")
    found = look_at(mark.path, 3)
    assert found.seen
    assert not found.fault
    assert found.free > 0
    assert found.seconds > 0
    assert [path.name for path in (tmp_path / "runs" / "one").iterdir()] == [mark.path.name]
    mark.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_others_use_stays(tmp_path: Path) -> None:
    mark = FolderMark.leave(tmp_path / "runs" / "one", "test")
    (tmp_path / "runs" / "other").touch()
    mark.remove()
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other"]


def test_a_mark_that_is_not_there_is_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.commands.probe.SEEN_SECONDS", 0.0)
    assert look_at(tmp_path / "nowhere" / "mark", 0) == Disk(seen=False)


def test_a_folder_that_cannot_be_made_is_the_disks_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    plan = PlannedRun(None, Shape(), str(tmp_path / "file" / "one"))
    look = look_of(0, 1, dist.HashStore(), plan=plan)
    found = look._disk()
    assert found is not None
    assert found.fault == "Not a directory"


def test_a_rank_knows_itself_and_its_facts_travel() -> None:
    me = replace(myself(0, torch.device("cpu")), clock=(0.5, 0.1), disk=Disk(seen=True), faults={"a": "b"})
    assert {*versions(on_gpu=False)} == {"python", "torch", "fourfold"}
    assert free_bytes(torch.device("cpu")) > 0
    assert rank_of(json.dumps(asdict(me))) == me
    assert why_unlinked({0: me}, 1) == ""
    assert why_unlinked({0: me}, 3) == "ranks 1, 2 of 3 did not join the job"
    assert why_unlinked({0: replace(me, faults={"joining the job": "no"})}, 1) == "rank 0 of 1 did not join the job"


def test_the_plan_is_the_configs_or_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "gpt-tiny"\n[grid]\nx = 2\n[train]\nout = "runs/one"\n')

    def plan(*arguments: str) -> PlannedRun:
        return planned(parser().parse_args(["doctor", "--preflight", *arguments]), 2, "cpu")

    assert (plan().config, plan().shape, plan().folder) == (None, Shape(data=2), None)
    assert plan("--grid", "z=2", "--out", "here") == PlannedRun(None, Shape(z=2), "here")
    found = plan(str(path))
    assert found.config is not None
    assert (found.shape, found.folder) == (Shape(x=2), "runs/one")
    other = plan(str(path), "--grid", "data=2", "--out", "there", "--set", "checkpoint.keep_last=7")
    assert other.config is not None
    assert (other.shape, other.folder, other.config.checkpoint.keep_last) == (Shape(data=2), "there", 7)


def test_what_a_run_needs_follows_from_its_config(tmp_path: Path) -> None:
    config = planned(parser().parse_args(["doctor", "--preflight", str(write(tmp_path))]), 2, "cpu")
    needs = look_of(0, 2, dist.HashStore(), plan=config)._needs()
    assert needs.checkpoint == 12 * models.config("gpt-tiny").parameters
    assert needs.kept == 3  # by the clock: the last two, and the one that is written
    assert needs.saves
    assert needs.peak is not None
    assert needs.peak > needs.checkpoint // 2  # parameters, gradients and moments of half of the model, and activations


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), r"give the folder of a run, or --preflight"),
        (("runs/one", "--ranks", "2"), r"--ranks only works with --preflight"),
        (("runs/one", "--grid", "auto"), r"--grid only works with --preflight"),
        (("runs/one", "--set", "grid.x=2"), r"--set only works with --preflight"),
        (("--preflight", "."), r"--preflight . is a folder; give the config"),
        (("--preflight", "no.toml"), r"the config no.toml does not exist"),
        (("--preflight", "--set", "batch.rows=2"), r"--set batch.rows changes a config; give CONFIG.toml"),
        (("--preflight", "--ranks", "0"), r"--ranks 0: at least one rank is needed"),
        (("--preflight", "--grid", "x=2", "--ranks", "3"), r"--ranks 3, but the grid x=2 has 2"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments, *(("--device", "cpu") if "--preflight" in arguments else ())]) == 1
    assert re.search(said, capsys.readouterr().err)


def write(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "gpt-tiny"\n[grid]\nx = 2\n')
    return path


def test_two_ranks_look_and_say_what_fails(tmp_path: Path) -> None:
    """Through the command: all is measured; of a batch too large for any memory that alone fails."""
    out, errors = (tmp_path / name for name in ("out", "err"))
    arguments = ["doctor", "--preflight", str(write(tmp_path)), "--out", str(tmp_path / "runs" / "one"), "--json", "-"]
    arguments += ["--device", "cpu", "--set", f"batch.rows={1 << 24}"]
    assert warm.Process(warm.command, *arguments, stdout=out, stderr=errors).wait(120) == 1, errors.read_text()
    found, told = json.loads(out.read_text()), errors.read_text()
    assert found["seconds"] < 60
    by_name = {check["name"]: check for check in found["checks"]}
    assert [name for name, check in by_name.items() if check["state"] == "FAILED"] == ["memory"], told
    assert "the planner predicts a peak of" in by_name["memory"]["evidence"]
    assert "fourfold: error: not fit for a long run: memory FAILED" in told
    assert [one["ranks"] for one in found["links"]] == [[0, 1]]
    assert found["links"][0]["rate"] > 1e6
    assert all(one["flops"] > 1e8 and one["disk"]["seconds"] > 0 for one in found["ranks"])
    assert not (tmp_path / "runs").exists()
