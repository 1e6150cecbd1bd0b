"""Offload and chunks of the MLP in a plan: the time of copies, the memory of the host, when the search takes them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fourfold as ff
from fourfold.axes import OFFLOAD
from fourfold.errors import NoPlanError
from fourfold.grid import Grid, Shape
from fourfold.planner.explain import model_facts, plan_document
from fourfold.planner.machine import Seconds, load_machine, parse_machine, to_toml
from fourfold.planner.memory import peak_memory, pinned_nbytes
from fourfold.planner.price import Candidate, Task, price
from fourfold.planner.program import CopyOp, MatmulOp, WaitOp, Work
from fourfold.planner.search import search
from fourfold.planner.simulate import simulate
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.space import Space
from fourfold.planner.step_program import step_program
from fourfold.policy import Overlap, Policy
from fourfold.report.plan_text import plan_table

MACHINE = replace(
    load_machine("dgx-h100"),
    host_bandwidth=1e9,
    host={},
    gemm={"bf16": 1e12},
    gemm_half=0.0,
    memory_bandwidth=1e20,
    overhead=0.0,
)
LLAMA = ff.models.config("llama-3-8b", layers=8)


def product_of(seconds: float) -> MatmulOp:
    """A product that takes so many seconds on `MACHINE`."""
    return MatmulOp("", round(seconds * 1e12 / 2e6), 1000, 1000)


def run(*work: Work):
    return simulate(work, Seconds(MACHINE, Shape()), "bf16", trace=True)


@pytest.mark.parametrize("compute", [0.25, 1.0, 3.0])
def test_what_computation_does_not_hide_of_a_copy_is_exposed(compute: float) -> None:
    line = run(CopyOp(0, "input", 10**9, False), product_of(compute), WaitOp(0))
    assert line.totals.link == {OFFLOAD: 1.0}
    assert line.totals.exposed.get(OFFLOAD, 0.0) == pytest.approx(max(0.0, 1.0 - compute))
    assert line.totals.compute == pytest.approx(compute)  # copy engines slow nothing down
    assert line.seconds == pytest.approx(max(1.0, compute))


def test_copies_of_one_direction_follow_each_other_and_directions_do_not_wait() -> None:
    out = [CopyOp(flight, "input", 10**9, False) for flight in range(2)]
    assert run(*out, WaitOp(0), WaitOp(1)).seconds == pytest.approx(2.0)
    line = run(out[0], CopyOp(1, "input", 10**9, True), WaitOp(0), WaitOp(1))
    assert line.seconds == pytest.approx(1.0)
    assert {span.track for span in line.spans} == {"offload out", "offload back"}


@pytest.mark.parametrize(("halves", "micro_steps"), [(1, 1), (2, 1), (1, 2)])
def test_planned_copies_are_those_of_the_runtime(halves: int, micro_steps: int) -> None:
    config = ff.models.config("llama-tiny", layers=4)
    policy = Policy(recompute="block", offload=True, overlap=Overlap(halves=halves))
    model = ff.models.build(config, Grid.alone("cpu"), policy=policy)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    for _ in range(micro_steps):
        model(tokens, tokens).backward()
    sizes = LocalSizes(config, Shape(), policy, 2, 16)
    copies = [item for item in step_program(sizes, micro_steps=micro_steps).work if isinstance(item, CopyOp)]
    counts = model.engine.offloader.counts
    assert sum(not copy.back for copy in copies) == counts.sent
    assert sum(copy.back for copy in copies) == counts.fetched == counts.prefetched
    assert sum(copy.nbytes for copy in copies) == counts.sent_nbytes + counts.fetched_nbytes


def task_of(bandwidth: float | None, **machine: object) -> Task:
    found = replace(load_machine("dgx-h100"), host_bandwidth=bandwidth, name=f"with {bandwidth}", **machine)
    return Task(LLAMA, found, rows=8, seq=32768)


POLICY = Policy(compute_dtype=torch.bfloat16, recompute="block", loss_chunk=2048, compile=True)


def test_a_plan_waits_for_what_it_cannot_hide() -> None:
    candidate = Candidate(Shape(z=8), replace(POLICY, offload=True), 1, 1)
    without = price(task_of(None), replace(candidate, policy=POLICY)).seconds
    fast, slow = (price(task_of(bandwidth), candidate).totals for bandwidth in (1e15, 1e9))
    assert fast.exposed.get(OFFLOAD, 0.0) < 1e-5
    assert fast.seconds == pytest.approx(without, rel=1e-3)  # only the host issues more
    stream = 32768 * LLAMA.hidden * 2
    copies = (2 * LLAMA.layers - 1) * stream / 1e9  # the last input stays on the device
    assert slow.link[OFFLOAD] == pytest.approx(copies)
    assert 0 < slow.exposed[OFFLOAD] < copies
    assert slow.seconds == pytest.approx(fast.seconds + slow.exposed[OFFLOAD], rel=0.02)


def test_stages_of_a_pipeline_copy_too() -> None:
    candidate = Candidate(Shape(z=4, pipe=2), replace(POLICY, offload=True, schedule="1f1b"), 1, 2)
    fast, slow = (price(task_of(bandwidth), candidate) for bandwidth in (1e15, 1e9))
    assert slow.totals.exposed[OFFLOAD] > 0
    assert slow.seconds > fast.seconds


def test_host_memory_is_that_of_pinned_buffers() -> None:
    assert [pinned_nbytes(nbytes) for nbytes in (1, 5, 8, 9)] == [1, 8, 8, 16]
    config = replace(LLAMA, hidden=3072, heads=24)
    sizes = LocalSizes(config, Shape(), replace(POLICY, offload=True), 1, 32768)
    assert peak_memory(sizes).host == config.layers * 32768 * 4096 * 2


LONG = ff.models.config("llama-3.1-8b")
ALONE = Space(shapes=(Shape(z=8),))


def long_task(seq: int, **machine: object) -> Task:
    return Task(LONG, replace(load_machine("dgx-h100"), **machine), rows=8, seq=seq)


def test_the_search_takes_offload_where_nothing_fits_without() -> None:
    task = long_task(196608)
    found = search(task, 8, space=ALONE, top=1)
    policy = found.best.candidate.policy
    assert policy.offload and policy.recompute == "block"
    assert found.best.memory.total <= task.usable_bytes
    document = plan_document(found, model_facts(LONG, "llama-3.1-8b"))
    (entry,) = document["grids"]
    assert entry["host_bytes"] == found.best.memory.host > 0
    assert entry["policy"]["offload"] and OFFLOAD in entry["exposed_seconds"]
    assert "policy.offload=true, which takes" in plan_table(document, 1, width=200, colour=False)
    with pytest.raises(NoPlanError, match="host's memory for block inputs"):
        search(replace(task, machine=replace(task.machine, host_memory=1 << 30)), 8, space=ALONE, top=1)
    with pytest.raises(NoPlanError):  # a link of unknown speed is no reason to take it
        search(replace(task, machine=replace(task.machine, host_bandwidth=None)), 8, space=ALONE, top=1)


def test_the_search_saves_no_memory_where_there_is_enough() -> None:
    policy = search(long_task(8192), 8, space=ALONE, top=1).best.candidate.policy
    assert not policy.offload and not policy.mlp_chunk


def test_links_to_the_host_are_written_and_read() -> None:
    machine = load_machine("dgx-h100")
    assert machine.host_bandwidth == 55e9 and machine.host_memory == 250_000_000_000
    assert parse_machine(to_toml(machine), "written") == machine
    lines = [line for line in to_toml(machine).splitlines() if not line.startswith("host_")]
    without = parse_machine("\n".join(lines), "written")
    assert without.host_bandwidth is None and without.host_memory is None
