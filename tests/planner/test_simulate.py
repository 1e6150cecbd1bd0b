"""The simulator against closed forms: rings, no overlap, full overlap, shared cards, contention; then whole steps."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fourfold as ff
from fourfold.grid import Shape
from fourfold.ledger import Collective, Op
from fourfold.planner.estimate import LEVERS, Cells, Estimates, Lever
from fourfold.planner.machine import HOST_MODES, HostSpeed, LinkSpeed, Machine, Seconds, load_machine
from fourfold.planner.price import Candidate, Task, price, timeline
from fourfold.planner.program import AttentionOp, ElementwiseOp, LaunchOp, MatmulOp, WaitOp, Work
from fourfold.planner.simulate import COMPUTE, chrome_trace, simulate
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy, Recompute

MACHINE = Machine(
    name="toy",
    about="round numbers",
    device="toy",
    devices_per_node=4,
    memory=10**12,
    reserve=0,
    peak={"bf16": 1e12},
    gemm={"bf16": 1e12},
    gemm_half=0.0,
    attention=1.0,
    memory_bandwidth=1e18,
    overhead=0.0,
    launch=1e-3,
    contention=1.0,
    turn=0.0,
    inside={(1, 2): LinkSpeed(1e9, 2e-3), (1, 4): LinkSpeed(1e9, 2e-3), (2, 2): LinkSpeed(1e9, 2e-3)},
    between=LinkSpeed(1e8, 5e-3),
)
SHAPE = Shape(x=4, z=4, data=2)


def collective(op: Op, axis: str, nbytes: int) -> Collective:
    return Collective(op, axis, nbytes, SHAPE.sizes[axis], "message")


def product_of(seconds: float) -> MatmulOp:
    """A product that takes so long on MACHINE: 1e12 FLOP/s."""
    return MatmulOp("product", 1000, 1000, round(seconds * 1e12 / 2e6))


def run(*work: Work, machine: Machine = MACHINE):
    return simulate(work, Seconds(machine, SHAPE), "bf16", trace=True)


@pytest.mark.parametrize(("op", "passes"), [("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)])
def test_ring(op: Op, passes: int) -> None:
    record = collective(op, "x", 400_000_000)
    line = run(LaunchOp(0, record, "x"), WaitOp(0))
    assert line.seconds == pytest.approx(1e-3 + passes * (3 * 2e-3 + 0.75 * 0.4), rel=1e-12)
    assert line.totals.exposed == {"x": line.seconds}
    assert line.totals.link == {"x": line.seconds}


def test_no_overlap_is_the_sum_and_full_overlap_the_larger() -> None:
    record = collective("all_gather", "x", 400_000_000)
    alone = Seconds(MACHINE, SHAPE).collective(record)
    for compute in (0.1, 1.0):
        waited = run(LaunchOp(0, record, "x"), WaitOp(0), product_of(compute))
        assert waited.seconds == pytest.approx(alone + compute, rel=1e-12)
        hidden = run(LaunchOp(0, record, "x"), product_of(compute), WaitOp(0))
        assert hidden.seconds == pytest.approx(max(alone, compute), rel=1e-12)
        assert hidden.totals.exposed.get("x", 0.0) == pytest.approx(max(0.0, alone - compute), abs=1e-12)


def test_a_lane_takes_one_after_another_and_lanes_run_beside_each_other() -> None:
    record = collective("all_gather", "x", 400_000_000)
    alone = Seconds(MACHINE, SHAPE).collective(record)
    one = run(LaunchOp(0, record, "x"), LaunchOp(1, record, "x"), WaitOp(0), WaitOp(1))
    assert one.seconds == pytest.approx(2 * alone, rel=1e-12)
    two = run(LaunchOp(0, record, "x gather"), LaunchOp(1, record, "x reduce"), WaitOp(0), WaitOp(1))
    assert two.seconds == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("sharing", [0.0, 0.5, 1.0])
def test_communicators_inside_a_node_share_its_links_as_measured(sharing: float) -> None:
    short, long = collective("all_gather", "x", 200_000_000), collective("all_gather", "x", 400_000_000)
    seconds = Seconds(MACHINE, SHAPE)
    (fixed, a), (_, b) = [(cost.fixed, cost.moving) for cost in map(seconds.transfer, (short, long))]
    both = LaunchOp(0, short, "x gather"), LaunchOp(1, long, "x reduce"), WaitOp(0), WaitOp(1)
    line = run(*both, machine=replace(MACHINE, sharing=sharing))
    assert line.seconds == pytest.approx(fixed + b + sharing * a, rel=1e-9)  # what `calibrate` solves for


def test_more_nodes_slow_down_transfers_between_nodes_by_the_congestion() -> None:
    record = collective("all_gather", "data", 10_000_000)
    alone = Seconds(MACHINE, SHAPE).transfer(record)
    congested = Seconds(replace(MACHINE, congestion=0.1, name="congested"), SHAPE).transfer(record)
    doublings = math.log2(SHAPE.world / MACHINE.devices_per_node)
    assert congested.moving == pytest.approx((1 + 0.1 * doublings) * alone.moving, rel=1e-12)


def test_nothing_sent_takes_no_turn() -> None:
    machine = replace(MACHINE, device="cpu", turn=0.05, inside={(1, 2): LinkSpeed(1e9, 0.0)}, name="cores")
    assert Seconds(machine, Shape(data=2)).transfer(Collective("all_reduce", "data", 0, 2, "")).beside == 1.0


def test_transfers_that_cross_nodes_share_the_card() -> None:
    over_z, over_data = collective("all_gather", "z", 10_000_000), collective("all_gather", "data", 10_000_000)
    z, data = (Seconds(MACHINE, SHAPE).transfer(record) for record in (over_z, over_data))
    line = run(LaunchOp(0, over_z, "z"), LaunchOp(1, over_data, "data"), WaitOp(0), WaitOp(1))
    # data's latency is over first; its transfer is alone until z's begins, then each has half of the card
    assert data.fixed < z.fixed
    left = data.moving - (z.fixed - data.fixed)
    expected = z.fixed + 2 * min(z.moving, left) + abs(z.moving - left)
    assert line.seconds == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("ring", [0.4e8, 0.5e8, 0.8e8])
def test_rings_that_leave_the_cards_bandwidth_run_beside_each_other(ring: float) -> None:
    """Two transfers of one ring each: the cards slow them down by what both would need together."""
    machine = replace(MACHINE, name=f"ring {ring}", devices_per_node=1, between=LinkSpeed(1e8, 0.0, ring))
    record = collective("all_gather", "z", 10_000_000)
    alone = Seconds(machine, SHAPE).transfer(record)
    assert (alone.load, alone.moving) == (ring / 1e8, 7_500_000 / ring)
    both = LaunchOp(0, record, "z gather"), LaunchOp(1, record, "z reduce"), WaitOp(0), WaitOp(1)
    assert run(*both, machine=machine).seconds == pytest.approx(
        1e-3 + max(1.0, 2 * ring / 1e8) * alone.moving, rel=1e-9
    )


def test_congestion_slows_down_a_single_ring_too() -> None:
    machine = replace(MACHINE, name="one ring", devices_per_node=1, between=LinkSpeed(1e8, 0.0, 0.4e8))
    seconds = Seconds(replace(machine, name="congested", congestion=0.1), SHAPE)
    assert seconds.link("z").bandwidth == pytest.approx(0.4e8 / (1 + 0.1 * 5), rel=1e-12)  # 32 nodes
    assert seconds.link("z").load == 0.4


def test_a_collective_waits_for_what_was_computed_before_its_launch() -> None:
    record = collective("all_gather", "x", 400_000_000)
    line = run(product_of(0.5), LaunchOp(0, record, "x"), product_of(2.0), WaitOp(0))
    (span,) = [span for span in line.spans if span.track == "x"]
    assert span.start == pytest.approx(0.5, rel=1e-12)
    assert line.seconds == pytest.approx(2.5, rel=1e-12)


def test_computation_is_slower_while_something_is_in_flight() -> None:
    record = collective("all_gather", "x", 400_000_000)
    busy = Seconds(MACHINE, SHAPE).collective(record)
    line = run(LaunchOp(0, record, "x"), product_of(1.0), WaitOp(0), machine=replace(MACHINE, contention=1.25))
    assert line.seconds == pytest.approx(busy + (1.0 - busy / 1.25), rel=1e-12)
    assert line.totals.compute == pytest.approx(line.seconds, rel=1e-12)


@pytest.mark.parametrize("contention", [1.0, 1.25])
@pytest.mark.parametrize("axis", ["x", "z"])
@pytest.mark.parametrize("compute", [0.04, 4.0])
def test_a_collective_is_slower_while_the_device_computes(contention: float, axis: str, compute: float) -> None:
    """It waits for its turn; what is left of it when computation ends takes what it takes alone."""
    record, machine = collective("all_gather", axis, 40_000_000), replace(MACHINE, contention=contention, turn=0.05)
    alone = Seconds(machine, SHAPE).collective(record)
    slow = 1 + 0.05 / alone
    line = run(LaunchOp(0, record, axis), product_of(compute), WaitOp(0), machine=machine)
    if contention * compute < slow * alone:
        left = alone - contention * compute / slow
        assert line.totals.exposed[axis] == pytest.approx(left, rel=1e-9)
        assert line.seconds == pytest.approx(contention * compute + left, rel=1e-9)
    else:
        assert line.totals.link[axis] == pytest.approx(alone + 0.05, rel=1e-9)
        assert not line.totals.exposed


def test_the_launch_of_a_collective_is_computation_on_the_cpu() -> None:
    """Alone it takes the same; beside computation a GPU hides it, and a CPU does not."""
    record, machine = collective("all_gather", "x", 400_000_000), replace(MACHINE, device="cpu")
    assert run(LaunchOp(0, record, "x"), WaitOp(0), machine=machine).seconds == Seconds(MACHINE, SHAPE).collective(
        record
    )
    for on, seconds in ((MACHINE, 1.0), (machine, 1.0 + MACHINE.launch)):
        hidden = run(LaunchOp(0, record, "x"), product_of(1.0), WaitOp(0), machine=on)
        assert hidden.seconds == hidden.totals.compute == pytest.approx(seconds, rel=1e-12)


# --- the host

HOST = replace(
    MACHINE,
    host={"eager": HostSpeed(0.1, 0.5), "compiled": HostSpeed(0.06, 0.0), "captured": HostSpeed(0.01, 0.2)},
)


def test_a_gpu_waits_for_a_late_host_and_the_host_works_ahead_of_a_busy_gpu() -> None:
    late = run(*[product_of(0.02)] * 10, machine=HOST)
    assert late.seconds == pytest.approx(10 * 0.1 + 0.5, rel=1e-12)
    assert late.totals.compute == pytest.approx(10 * 0.02, rel=1e-12)
    assert late.totals.host == pytest.approx(late.seconds - late.totals.compute, rel=1e-12)
    busy = run(*[product_of(0.2)] * 10, machine=HOST)
    assert busy.seconds == pytest.approx(0.1 + 10 * 0.2, rel=1e-12)  # the device waits for the first product alone
    # short products are issued while a long one runs: the larger of both, not the sum of the larger of each
    mixed = run(product_of(1.0), *[product_of(0.02)] * 9, machine=HOST)
    assert mixed.seconds == pytest.approx(10 * 0.1 + 0.5, rel=1e-12)
    assert run(product_of(2.0), *[product_of(0.02)] * 9, machine=HOST).seconds == pytest.approx(0.1 + 2.18, rel=1e-12)


def test_a_collective_begins_when_the_host_has_launched_it() -> None:
    record = collective("all_gather", "x", 400_000_000)
    line = run(product_of(0.02), LaunchOp(0, record, "x"), WaitOp(0), machine=HOST)
    (span,) = [span for span in line.spans if span.track == "x"]
    assert span.start == pytest.approx(2 * 0.1, rel=1e-12)


def test_on_the_cpu_the_host_computes_itself() -> None:
    machine = replace(HOST, device="cpu")
    line = run(*[product_of(0.02)] * 10, machine=machine)
    assert line.seconds == line.totals.compute == pytest.approx(10 * (0.02 + 0.1) + 0.5, rel=1e-12)
    assert line.totals.host == 0


def test_a_step_is_priced_in_the_mode_in_which_it_runs() -> None:
    """And one that the machine file does not know is priced as if the host were never late."""
    config = ff.models.config("gpt-125m", layers=2)
    speeds = {"eager": HostSpeed(1e-3, 0.0), "compiled": HostSpeed(5e-4, 0.0), "captured": HostSpeed(1e-6, 0.0)}
    h100 = load_machine("dgx-h100")
    found = {}
    for mode in (*HOST_MODES, "none"):
        machine = replace(h100, name=mode, host={} if mode == "none" else speeds)
        task = Task(config, machine, 8, 1024, captured=mode == "captured")
        candidate = Candidate(Shape(), Policy(compute_dtype=torch.bfloat16, compile=mode == "compiled"), 8, 1)
        found[mode] = price(task, candidate)
    items = sum(
        isinstance(item, MatmulOp | AttentionOp | ElementwiseOp)
        for item in step_program(LocalSizes(config, Shape(), found["eager"].candidate.policy, 8, 1024)).work
    )
    for mode in ("eager", "compiled"):
        after = found[mode].seconds - items * speeds[mode].item
        assert 0 <= after < 1e-3  # the last kernel ends after it was issued
        assert found[mode].bound_by == "host"
    assert found["none"].totals.host == 0
    assert found["none"].bound_by == "compute"
    assert found["captured"].seconds <= found["none"].seconds * 1.001
    # a CPU replays nothing
    assert replace(task, machine=replace(h100, device="cpu"), captured=True).host_mode(Policy()) == "eager"


def test_many_layers_and_micro_steps_wait_for_the_host_too() -> None:
    config = ff.models.config("gpt-125m", layers=24)
    machine = replace(load_machine("dgx-h100"), name="slow host", host={"eager": HostSpeed(1e-3, 0.02)})
    task = Task(config, machine, 32, 256)
    candidate = Candidate(Shape(), Policy(compute_dtype=torch.bfloat16), 8, 4)
    whole = timeline(task, candidate).totals
    found = price(task, candidate).totals
    assert found.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert found.host == pytest.approx(whole.host, rel=0.01)
    assert found.seconds == pytest.approx(found.compute + found.host, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "rows", "micro_steps", "said"),
    [
        (Shape(z=2, data=2), 2, 1, r"rows=2, micro_steps=1 and 4 places \(data\*z\) .* 8 rows in all, but .* has 16"),
        (Shape(z=2, pipe=2), 8, 2, "32 rows in all, but the batch of the task has 16"),
        (Shape(), -8, -2, "each at least 1"),
        (Shape(x=5), 16, 1, "heads=12 is not divisible by x\\*y=5\\*1 on the grid x=5"),
    ],
)
@pytest.mark.parametrize("quick", [True, False])
def test_what_does_not_cut_the_batch_or_the_model_has_no_price(
    shape: Shape, rows: int, micro_steps: int, said: str, quick: bool
) -> None:
    task = Task(ff.models.config("gpt-125m"), load_machine("dgx-h100"), 16, 1024)
    with pytest.raises(ValueError, match=said):
        price(task, Candidate(shape, Policy(), rows, micro_steps), quick=quick)


def test_trace_has_a_thread_for_each_track() -> None:
    record = collective("all_gather", "x", 4_000_000)
    events = chrome_trace(run(LaunchOp(0, record, "x"), ElementwiseOp("norm", 10**15), WaitOp(0)).spans)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {COMPUTE, "x"}
    assert {event["name"] for event in events if event["ph"] == "X"} == {"message", "norm"}


CHOICES = [
    (Shape(z=16, data=2), "block", 2, 1),
    (Shape(x=4, z=4, data=2), "none", 2, 3),
    (Shape(x=2, y=2, z=2, data=4, order=("y", "x", "data", "z")), "attention", 4, 2),
    (Shape(x=2, data=16), "none", 2, 5),
    (Shape(z=4, data=8), "none", 1, 1),
]


def deep(
    config: ff.models.ModelConfig, shape: Shape, recompute: Recompute, rows: int, micro_steps: int
) -> tuple[Task, Candidate]:
    machine = replace(MACHINE, gemm={"bf16": 3e14}, memory_bandwidth=2e12, overhead=5e-6, launch=1e-5, contention=1.1)
    links = {group: LinkSpeed(1e11, 5e-6) for group in machine.inside}
    machine = replace(machine, inside=links, between=LinkSpeed(5e10, 1e-5))
    task = Task(config, machine, rows * micro_steps * shape.data * shape.z, 2048)
    policy = ff.Policy(recompute=recompute, compute_dtype=torch.bfloat16, shard_optimizer=True)
    return task, Candidate(shape, policy, rows, micro_steps)


@pytest.mark.parametrize("dense", [0, 2, 14])
def test_a_few_layers_of_each_kind_stand_for_all(dense: int) -> None:
    config = ff.models.config("mixtral-8x7b", layers=24, dense_layers=dense)
    task, candidate = deep(config, Shape(x=4, data=8), "none", 8, 1)
    found, whole = price(task, candidate), timeline(task, candidate)
    assert found.seconds == pytest.approx(whole.seconds, rel=0.02)
    assert price(task, candidate, quick=True).seconds == pytest.approx(whole.seconds, rel=0.05)
    if dense != 2:
        return
    rough = Estimates(task, Cells(task, [candidate]), [candidate.shape.order])
    assert rough.seconds[0, LEVERS.index(Lever.of(candidate.policy)), 0] == pytest.approx(whole.seconds, rel=0.15)


def test_an_uneven_load_changes_only_the_speed_of_small_products() -> None:
    """Without an expert axis every device computes the same number of rows, however uneven they are."""
    task, candidate = deep(ff.models.config("mixtral-8x7b", layers=4), Shape(x=4), "none", 8, 1)
    task = replace(task, machine=replace(task.machine, gemm_half=500.0))
    even, uneven = price(task, candidate), price(replace(task, imbalance=3.0), candidate)
    assert even.seconds < uneven.seconds < 1.05 * even.seconds
    assert even.flops == uneven.flops


@pytest.mark.parametrize(("shape", "recompute", "rows", "micro_steps"), CHOICES)
def test_a_few_layers_stand_for_all(shape: Shape, recompute: Recompute, rows: int, micro_steps: int) -> None:
    """The price of a deep model from a few of its layers, beside a simulation of all of them."""
    task, candidate = deep(ff.models.config("llama-3-8b", layers=20), shape, recompute, rows, micro_steps)
    found, whole = price(task, candidate), timeline(task, candidate)
    assert found.seconds == pytest.approx(whole.seconds, rel=0.02)
    # A quick price sees too few layers to know what they wait for along four axes: there it is 12.02% too low.
    assert price(task, candidate, quick=True).seconds == pytest.approx(whole.seconds, rel=0.125)
    assert sum(found.totals.exposed.values()) == pytest.approx(
        sum(whole.totals.exposed.values()), abs=0.02 * whole.seconds
    )
    assert found.totals.compute == pytest.approx(whole.totals.compute, rel=0.02)
    for axis, seconds in whole.totals.link.items():
        assert found.totals.link[axis] == pytest.approx(seconds, rel=0.05, abs=0.01 * whole.seconds)
