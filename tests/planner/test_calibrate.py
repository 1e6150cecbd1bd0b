"""What calibrate measures is what the machine does, and what it fits is what was measured."""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from fourfold import kernels
from fourfold.cli import parser
from fourfold.commands.calibrate import calibrate, check_writable, ranks_of_node, showing, summary, write
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective, Op
from fourfold.planner import calibrate as planner_calibrate
from fourfold.planner.calibrate import COLLECTIVES, LEAST_LARGEST, Calibration, LaunchCall, groups_of, training_step
from fourfold.planner.fit import (
    BLOCK_ROWS,
    BLOCKS,
    HIDDEN,
    HIDDEN_ROWS,
    MOST_TURN,
    SMALL,
    SMALL_LAYERS,
    SMALL_ROWS,
    Computation,
    Measured,
    Message,
    TimedBlocks,
    TimedStep,
    fit_links,
    fit_products,
    machine_of,
    not_negative,
)
from fourfold.planner.machine import (
    KERNEL_MODES,
    HostMode,
    LinkSpeed,
    Machine,
    Seconds,
    Timed,
    load_machine,
    parse_machine,
    to_toml,
)
from fourfold.planner.simulate import simulate
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_parts import ATTENTION, KERNELS, PRODUCTS, WorkSeconds, pieces, work_seconds
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy
from fourfold.train.launch import share_cores
from harness import grid_of

LINKS = {(1, 2): LinkSpeed(2e9, 3e-6), (2, 4): LinkSpeed(5e8, 40e-6)}


def messages(launch: float, links: dict[tuple[int, int], LinkSpeed]) -> list[Message]:
    """Collectives that take exactly what the rule says."""
    found = []
    for group, link in links.items():
        for op in ("all_gather", "reduce_scatter", "all_reduce"):
            for nbytes in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
                record = Collective(op, "z", nbytes, group[1])
                hops = (group[1] - 1) * (2 if op == "all_reduce" else 1)
                seconds = launch + hops * link.latency + record.wire_bytes / link.bandwidth
                found.append(Message(group, record, seconds))
    return found


def test_links_are_found_again() -> None:
    launch, links = fit_links(messages(20e-6, LINKS))
    assert launch == pytest.approx(20e-6, rel=1e-6)
    for group, link in LINKS.items():
        assert links[group].bandwidth == pytest.approx(link.bandwidth, rel=1e-6)
        assert links[group].latency == pytest.approx(link.latency, rel=1e-6)
    assert fit_links([]) == (0.0, {})


def test_every_operation_of_a_group_is_timed_and_no_other() -> None:
    """A message between two ranks is none: its record would not have the bytes that a collective sends. An all-to-all
    takes the links of a context group, which machine files do not have."""
    assert set(COLLECTIVES) == set(get_args(Op)) - {"send", "receive", "all_to_all"}


def test_no_constant_is_negative_however_noisy_the_times() -> None:
    torch.manual_seed(0)
    for _ in range(50):
        noisy = [
            Message(message.group, message.record, message.seconds * float(torch.exp(torch.randn(()))))
            for message in messages(1e-6, LINKS)
        ]
        launch, links = fit_links(noisy)
        assert launch >= 0
        assert all(link.latency >= 0 and link.bandwidth > 0 for link in links.values())


def test_times_that_grow_by_nothing_still_give_a_bandwidth() -> None:
    flat = [Message((1, 2), Collective("all_gather", "z", nbytes, 2), 1.0 / nbytes) for nbytes in (8, 64, 512)]
    _, links = fit_links(flat)
    assert links[1, 2].bandwidth == 256 * 512


def test_least_squares_drops_what_would_be_negative() -> None:
    rows = torch.tensor([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=torch.float64)
    assert not_negative(rows, rows @ torch.tensor([2.0, 3.0], dtype=torch.float64)) == pytest.approx([2, 3])
    falling = not_negative(rows, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    assert falling == pytest.approx([2.0, 0.0])
    assert not_negative(rows, -torch.ones(3, dtype=torch.float64)) == [0.0, 0.0]


def timed(gemm: float, half: float) -> list[Timed]:
    shapes = ((64, 512, 512), (512, 512, 512), (4096, 4096, 128), (2048, 2048, 2048))
    return [Timed(m, k, n, "bf16", 2 * m * k * n / (gemm * min(m, k, n) / (min(m, k, n) + half))) for m, k, n in shapes]


def test_rates_of_products_are_found_again_and_stay_below_the_peak() -> None:
    assert fit_products(timed(1e14, 200.0), peak=2e14) == pytest.approx((1e14, 200.0), rel=1e-6)
    gemm, half = fit_products(timed(1e14, 200.0), peak=0.9e14)
    assert gemm == 0.9e14
    assert 0 <= half < 200


STEPS = tuple(
    TimedStep(mode, layers, fixed + layers * each)
    for mode, fixed, each in (("eager", 9e-3, 3e-3), ("compiled", 6e-3, 2e-3), ("captured", 6e-4, 2e-4))
    for layers in SMALL_LAYERS
)


def found(**changes: object) -> Measured:
    values = dict(
        device="NVIDIA H200",
        devices_per_node=2,
        memory=1000,
        held=100,
        advertised={"bf16": 9e14},
        messages=messages(20e-6, LINKS),
        computation=Computation((*timed(1e14, 200.0), Timed(8, 8, 8, "fp32", 1e-6)), 6e13, 1e12, 1e-6, STEPS),
        contention=1.2,
        sharing=0.5,
        turn=3e-4,
    )
    return Measured(**{**values, **changes})  # type: ignore[arg-type]


def test_a_machine_of_what_was_measured_can_be_written_and_read() -> None:
    machine = machine_of("here", "two nodes", found(), "today")
    assert parse_machine(to_toml(machine), "here.toml") == machine
    assert list(machine.inside) == [(1, 2)]
    assert machine.between is not None
    assert machine.between.bandwidth == pytest.approx(2 * 5e8)  # two rings of a node shared its cards
    assert (machine.peak["bf16"], machine.peak["fp32"]) == (9e14, pytest.approx(1.024e9))
    assert machine.attention == pytest.approx(0.6)
    assert machine.contention == pytest.approx(1.2)
    assert machine.turn == pytest.approx(3e-4)
    assert machine.sources["turn"] == "today"
    assert machine.reserve == 130
    assert machine.sources["gemm.bf16"] == "today"
    assert machine.sources["peak.bf16"] == "data sheet of NVIDIA H200"


def block_seconds(machine: Machine, mode: HostMode) -> WorkSeconds:
    """The predicted seconds of the blocks by kind of work, and those of a pass, which must be their sum."""
    sizes = LocalSizes(BLOCKS, Shape(), Policy(), BLOCK_ROWS, BLOCKS.seq, torch.bfloat16)
    work, seconds = step_program(sizes, optimizer=False).work, Seconds(machine, Shape(), mode)
    alone = work_seconds(seconds, "bf16", pieces(work))
    # the device waits for the host's first item
    assert simulate(work, seconds, "bf16").seconds == pytest.approx(sum(alone[:4]), rel=1e-3)
    return alone


def machine_of_blocks(**blocks: TimedBlocks) -> Machine:
    computation = replace(found().computation, blocks=blocks)
    return machine_of("here", "two nodes", replace(found(), computation=computation), "today")


def test_what_products_and_attention_leave_of_blocks_is_the_traffic_of_their_mode() -> None:
    """Norms and activations that are not compiled move more bytes than the program counts; the fit says how many."""
    plain = machine_of("here", "two nodes", found(), "today")
    slow, fast = 1.5 * sum(block_seconds(plain, "eager")[:4]), 1.1 * sum(block_seconds(plain, "compiled")[:4])
    machine = machine_of_blocks(eager=TimedBlocks(slow), compiled=TimedBlocks(fast))
    assert machine.traffic["eager"] > machine.traffic["compiled"] > 1.0
    assert sum(block_seconds(machine, "eager")[:4]) == pytest.approx(slow)
    assert sum(block_seconds(machine, "compiled")[:4]) == pytest.approx(fast)
    assert machine.gemm == plain.gemm
    assert machine.sources["traffic.eager"] == "today"
    assert parse_machine(to_toml(machine), "here.toml").traffic == machine.traffic


def test_products_attention_and_kernels_each_take_what_they_took_in_traced_blocks() -> None:
    """Products by themselves are slower than between other kernels: the whole alone would give these too little."""
    plain = machine_of("here", "two nodes", found(), "today")
    alone = block_seconds(plain, "eager")
    kinds = {PRODUCTS: 0.8 * alone.products, ATTENTION: 1.2 * alone.attention}
    kernels = {"eager": 5 * alone.fused + alone.plain, "compiled": 2 * alone.fused + alone.plain}
    machine = machine_of_blocks(
        **{mode: TimedBlocks(1.0, {**kinds, KERNELS: seconds}) for mode, seconds in kernels.items()}
    )
    for mode in KERNEL_MODES:
        seconds = block_seconds(machine, mode)
        assert seconds.products == pytest.approx(kinds[PRODUCTS])
        assert seconds.attention == pytest.approx(kinds[ATTENTION])
        assert seconds.fused + seconds.plain == pytest.approx(kernels[mode])
    assert machine.gemm["bf16"] == pytest.approx(plain.gemm["bf16"] / 0.8)
    assert machine.gemm["fp32"] == plain.gemm["fp32"]
    assert parse_machine(to_toml(machine), "here.toml") == machine


def test_kernels_take_no_less_than_their_bytes() -> None:
    """Where other kernels seem to take less, what is off is no property of theirs."""
    plain = machine_of("here", "two nodes", found(), "today")
    alone = block_seconds(plain, "eager")
    assert machine_of_blocks(eager=TimedBlocks(0.9 * (alone.products + alone.attention))).traffic["eager"] == 1.0


def test_blocks_are_timed_and_traced_in_each_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_calibrate, "BLOCKS", replace(SMALL, layers=1))
    monkeypatch.setattr(planner_calibrate, "HOT_AGAIN", 0.01)
    grid = Grid.alone(torch.device("cpu"))
    calibration = Calibration(grid, 1, 0.1, settle=lambda: None, progress=lambda _: None)
    assert calibration.modes == ["eager"]  # too few seconds to compile
    (blocks,) = calibration._blocks().values()
    assert set(blocks.traced) == {PRODUCTS, ATTENTION, KERNELS}
    assert min(blocks.traced.values()) > 0
    assert (
        sum(blocks.traced.values()) < 3 * blocks.seconds
    )  # tracing makes the CPU slower, and only the last runs count
    monkeypatch.setattr(planner_calibrate, "host_parts", lambda _: ({PRODUCTS: 0.0, ATTENTION: 0.0, KERNELS: 0.0}, {}))
    assert calibration._traced(lambda: None, 1.0) == {}  # the driver lets nobody trace


def small_step(machine: Machine, layers: int, mode: HostMode = "eager") -> float:
    """The predicted seconds of a small step."""
    sizes = LocalSizes(replace(SMALL, layers=layers), Shape(), Policy(), SMALL_ROWS, SMALL.seq, torch.bfloat16)
    return simulate(step_program(sizes).work, Seconds(machine, Shape(), mode), "bf16").seconds


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200"])
def test_small_steps_take_what_they_took_in_each_mode(device: str) -> None:
    """The host's seconds per item and per step are such that the programs of those steps take their seconds again."""
    machine = machine_of("here", "two nodes", found(device=device), "today")
    assert list(machine.host) == ["eager", "compiled", "captured"]
    assert machine.sources["host.captured.item"] == machine.sources["host.eager.step"] == "today"
    for step in STEPS:
        assert small_step(machine, step.layers, step.mode) == pytest.approx(step.seconds, rel=1e-6)
    # on a GPU the host works ahead, so the least time of a kernel is the device's own
    assert machine.overhead == (machine.host["eager"].item if device == "cpu" else 1e-6)


def test_a_mode_that_was_not_measured_is_left_out() -> None:
    computation = replace(found().computation, steps=tuple(step for step in STEPS if step.mode == "eager"))
    machine = machine_of("here", "two nodes", found(computation=computation), "today")
    assert list(machine.host) == ["eager"]
    assert parse_machine(to_toml(machine), "here.toml") == machine
    assert small_step(machine, 4, "captured") < small_step(machine, 4, "eager") / 5


def test_noise_makes_no_constant_of_the_host_negative() -> None:
    falling = tuple(TimedStep("eager", layers, 1e-2 / layers) for layers in SMALL_LAYERS)
    machine = machine_of("here", "here", found(computation=replace(found().computation, steps=falling)), "today")
    assert machine.host["eager"].item == 0
    assert machine.host["eager"].step > 0


def test_a_small_step_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner_calibrate, "WARM_UP", 1)
    act = training_step("eager", 1, Grid.alone("cpu"), torch.float32)
    assert act is not None
    losses = [float(act()) for _ in range(3)]  # type: ignore[arg-type]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


@pytest.mark.parametrize("turn", [0.0, 3e-3, 20e-3])
def test_the_step_on_z_takes_what_it_took(turn: float) -> None:
    """What messages wait is such that the program of that step takes its seconds again."""
    machine = machine_of("here", "two nodes", found(device="cpu"), "today")
    sizes = LocalSizes(HIDDEN, Shape(z=4), Policy(), HIDDEN_ROWS, HIDDEN.seq, torch.bfloat16)
    program = step_program(sizes, optimizer=False)
    seconds = Seconds(replace(machine, turn=turn, name="waiting"), Shape(z=4))
    step = simulate(program.work, seconds, "bf16").seconds
    again = machine_of("here", "two nodes", found(device="cpu", hidden=step, ranks=4), "today")
    assert again.turn == pytest.approx(turn, abs=1e-4)
    assert again.sources["turn"] == "today"


def test_a_step_slower_than_any_wait_explains_has_the_longest() -> None:
    machine = machine_of("here", "two nodes", found(device="cpu", hidden=1e3, ranks=4), "today")
    assert machine.turn == pytest.approx(MOST_TURN, rel=1e-3)
    assert machine.sources["turn"].startswith("estimate: the step was slower than any wait explains")


def test_a_machine_without_a_compiler_has_no_compiled_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Callable[..., Any]:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(kernels, "region", fails)
    line = Grid.alone("cpu")
    assert training_step("compiled", 1, line, torch.float32) is None
    with pytest.raises(RuntimeError, match="no compiler"):
        training_step("eager", 1, line, torch.float32)
    fractions: list[float] = []
    measuring = Calibration(line, 1, 1.0, settle=lambda: None, progress=fractions.append)
    assert measuring.modes == ["eager"]
    assert Calibration(line, 1, 60.0, settle=lambda: None, progress=fractions.append).modes == ["eager", "compiled"]
    assert list(measuring._small_steps("compiled", 0.1)) == []
    assert measuring.done == len(SMALL_LAYERS)  # the progress goes on


def test_one_rank_is_a_machine_too() -> None:
    machine = machine_of("one", "one rank", found(devices_per_node=1, messages=[], contention=1.0, turn=None), "today")
    assert parse_machine(to_toml(machine), "one.toml") == machine
    assert not machine.inside
    assert machine.between is None
    assert machine.sources["launch"].startswith("estimate: one rank")
    assert (machine.contention, machine.turn) == (1.0, 0.0)


def test_every_group_that_tiles_the_ranks_is_measured() -> None:
    assert groups_of(1) == []
    assert groups_of(8) == [(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)]
    assert groups_of(6) == [(1, 2), (1, 3), (1, 6), (2, 3), (3, 2)]


class Stopwatch:
    """Times every message of a calibration by itself: what the fit is held against is measured in the same moments, so
    that others who want the cores slow down both."""

    def __init__(self, collective: Callable[..., tuple[Collective, LaunchCall]]) -> None:
        self.collective = collective
        self.seconds: dict[Collective, list[float]] = {}

    def __call__(self, *args: Any) -> tuple[Collective, Callable[[], Finished]]:
        record, launch = self.collective(*args)

        def timed() -> Finished:
            began = time.perf_counter()
            launch().wait()
            self.seconds.setdefault(record, []).append(time.perf_counter() - began)
            return Finished()

        return record, timed

    def bandwidths(self) -> tuple[float, float]:
        """Bytes a second of the large messages: the slowest kind of them on average, and the best of all."""
        large = {record: times for record, times in self.seconds.items() if record.nbytes >= LEAST_LARGEST}
        slowest = min(len(times) * record.wire_bytes / sum(times) for record, times in large.items())
        return slowest, max(record.wire_bytes / min(times) for record, times in large.items())


class Finished:
    def wait(self) -> None: ...


def calibrated(path: str) -> tuple[tuple[float, float], list[float], float]:
    """Bandwidths that a calibration met, its progress, and its seconds."""
    line = grid_of(Shape(data=2))
    fractions: list[float] = []
    began = time.perf_counter()
    with pytest.MonkeyPatch.context() as patch:
        watch = Stopwatch(planner_calibrate.collective)
        patch.setattr(planner_calibrate, "collective", watch)
        machine = Calibration(line, 2, 3.0, settle=share_cores, progress=fractions.append).measure("here")
    took = time.perf_counter() - began
    if line.rank == 0:
        write(machine, Path(path))
    return watch.bandwidths(), fractions, took


@pytest.mark.slow
def test_two_ranks_measure_what_an_independent_timing_does(ranks, tmp_path: Path) -> None:
    path = tmp_path / "here.toml"
    ((slowest, best), fractions, took), _ = ranks(2).run(calibrated, str(path), timeout=120)
    machine = load_machine(str(path))
    assert (machine.device, machine.devices_per_node, list(machine.inside)) == ("cpu", 2, [(1, 2)])
    assert slowest / 2 < machine.inside[1, 2].bandwidth < 2 * best  # one line through messages of all kinds and sizes
    assert machine.contention >= 1
    assert list(machine.host) == ["eager"]  # a CPU replays nothing, and 3 s are too short to compile
    assert 1e-6 < machine.host["eager"].item < 1e-2
    assert machine.host["eager"].item <= machine.overhead
    assert "2 ranks, torch" in machine.sources["gemm.fp32"]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert took < 30  # a budget of 3 s, on a machine that others use too
    lines = list(summary(machine, path))
    assert f"  the host, {machine.describe_host('eager')}" in lines
    assert "ranks 1 apart, 2 together" in lines[-2]
    assert f"fourfold plan --model gpt-1.4b --machine {path} --devices 2 " in lines[-1]


def options(*arguments: str) -> argparse.Namespace:
    return parser().parse_args(["calibrate", *arguments])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--out", "here.txt"), r"--out here.txt: the name of a machine file must end in .toml"),
        (("--out", "here.toml", "--seconds", "0"), r"--seconds 0 must be above 0"),
        (("--out", "here.toml", "--ranks", "0"), r"--ranks 0: at least one rank is needed"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        calibrate(options(*arguments), arguments)


def test_nodes_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_of_node(8) == 8
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4(x2)")
    assert ranks_of_node(8) == 4
    monkeypatch.setenv("SLURM_STEP_TASKS_PER_NODE", "4,3")
    with pytest.raises(ValueError, match="start the same number of ranks on every node"):
        ranks_of_node(7)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert ranks_of_node(8) == 2


def test_progress_is_a_line_every_tenth() -> None:
    stream = io.StringIO()
    with showing(stream, True, "measuring") as progress:
        for done in range(1, 41):
            progress(done / 40)
    assert stream.getvalue().split() == ["measuring", *(f"{tenth}0%" for tenth in range(1, 11))]
    with showing(stream, False, "never") as progress:
        progress(1.0)
    assert "never" not in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal() -> None:
    stream = Terminal()
    with showing(stream, True, "measuring") as progress:
        progress(0.5)
        progress(1.0)
    assert "measuring" in stream.getvalue()
    assert "100%" in stream.getvalue()


def test_a_file_is_tried_before_anything_is_measured(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.toml")
    assert not (tmp_path / "new.toml").exists()
    (tmp_path / "old.toml").write_text("kept")
    check_writable(tmp_path / "old.toml")
    assert (tmp_path / "old.toml").read_text() == "kept"
    with pytest.raises(OSError):
        check_writable(tmp_path / "no" / "folder.toml")
