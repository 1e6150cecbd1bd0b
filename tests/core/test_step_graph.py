"""Recorded steps as far as they need no GPU; tests/on_gpu_graphs.py records and replays them."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold import step_graph
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective, Ledger
from fourfold.params import local_of
from fourfold.recording import Recording
from fourfold.step_graph import GradientsBefore, OptimizerSteps, _cause, _first_fault, _fits, slower_replays, why_not
from fourfold.watch.tape import Tape, Waits, read, tape_path
from harness import grid_of
from share import others_slow

CPU = torch.device("cpu")
GATHER, REDUCE = (Collective(op, "z", 64, 2, op) for op in ("all_gather", "reduce_scatter"))
SUM = Collective("all_reduce", "data", 64, 2, "sum")


def test_on_the_cpu_a_step_runs_as_it_is() -> None:
    grid = ff.Grid.alone("cpu")
    model = ff.models.build("gpt-tiny", grid)
    optimizer = ff.optim.AdamW(model, lr=1e-2)
    tokens = torch.arange(32).view(2, 16)

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        return loss.detach()

    step = ff.StepGraph(compute, model)
    losses = [step(tokens).item() for _ in range(6)]
    assert losses[-1] < losses[0]
    assert not step.recorded
    assert "cpu" in step.reason


def test_what_forbids_a_recording_is_said() -> None:
    grid, cuda = ff.Grid.alone("cpu"), torch.device("cuda")
    build = ff.models.build
    drops = build(ff.models.config("gpt-tiny", dropout=0.1), grid)
    assert "attention dropout of layers.0.attention" in why_not(drops, cuda)
    assert why_not(drops.eval(), cuda) == ""
    assert why_not(build(ff.models.config("gpt-tiny", dropout=0.1, attention_dropout=0.0), grid), cuda) == ""
    assert "check_inputs" in why_not(build("gpt-tiny", grid, policy=ff.Policy(check_inputs=True)), cuda)


def test_only_inputs_like_the_recorded_ones_are_replayed() -> None:
    recorded = [(torch.zeros(2, 3), None)], torch.zeros(())
    assert _fits(([(torch.ones(2, 3), None)], torch.ones(())), recorded)
    assert not _fits(([(torch.ones(1, 3), None)], torch.ones(())), recorded)
    assert not _fits(([(torch.ones(2, 3).double(), None)], torch.ones(())), recorded)
    assert not _fits(([(torch.ones(2, 3), torch.ones(3))], torch.ones(())), recorded)
    assert not _fits(([(torch.ones(2, 3), None)] * 2, torch.ones(())), recorded)


def test_a_step_that_was_switched_since_its_recording_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ff.models.build("gpt-tiny", ff.Grid.alone("cpu"))
    step = ff.StepGraph(lambda: "ran", model)
    # as after a recording, which needs a GPU
    step.reason, step._inputs, step._outputs = "", (), "replayed"
    monkeypatch.setattr(step, "_graph", object())
    monkeypatch.setattr(step, "_recorded_switches", step._switches.now())
    monkeypatch.setattr(step, "_replay", lambda _: None)
    weight = model.layers[0].mlp.up.weight
    results = [step()]
    for requires_grad, training in ((False, True), (True, False), (True, True)):
        weight.requires_grad_(requires_grad)
        model.train(training)
        results.append(step())
    assert results == ["replayed", "ran", "ran", "replayed"]


def test_only_steps_with_an_optimizer_that_replays_can_follow_are_recorded() -> None:
    weights = [torch.nn.Parameter(torch.zeros(1))]
    steps = OptimizerSteps()
    steps.check_gradients(weights)
    weights[0].sum().backward()
    with pytest.raises(TypeError, match="leaves gradients to an optimizer outside"):
        steps.check_gradients(weights)
    with pytest.raises(TypeError, match="SGD has its learning rate on the host"):
        steps(torch.optim.SGD(weights, lr=0.1))
    steps(torch.optim.AdamW(weights, lr=torch.tensor(0.1)))
    steps.check_gradients(weights)


def test_a_step_that_could_not_be_recorded_adds_to_the_gradients_before_it() -> None:
    model, tokens = ff.models.build("gpt-tiny", ff.Grid.alone("cpu")), torch.arange(32).view(2, 16)
    with ff.accumulate(model):
        model(tokens, tokens).backward()
    weight = model.layers[0].mlp.up.weight
    gradient = weight.grad
    shard, spec = gradient._local_tensor, gradient._spec
    before = GradientsBefore([weight])
    model(tokens, tokens).backward()  # completes the gradient; a recording would not compute it
    assert gradient._spec is not spec
    model.gradients.forget_step()
    before.restore()
    assert weight.grad is gradient
    assert gradient._local_tensor is shard
    assert gradient._spec is spec


def test_a_recorded_step_that_adds_to_gradients_of_the_step_before_is_refused() -> None:
    """A replay would add to the recorded ones."""
    model = ff.models.build("gpt-tiny", Grid.alone("cpu"))
    tokens = torch.arange(16).view(2, 8)
    model(tokens, tokens).backward()
    parameters = list(model.parameters())
    for cleared in (parameters, parameters[:-1]):
        for parameter in cleared:
            local_of(parameter.grad).zero_()
        model.gradients.grid.recording = Recording(CPU, GradientsBefore(parameters).versions())
        for parameter in cleared:  # the step sets them to zero, so a replay does it too
            local_of(parameter.grad).zero_()
        with pytest.raises(RuntimeError, match="call zero_grad") if cleared != parameters else nullcontext():
            model(tokens, tokens).backward()
        model.gradients.grid.recording = None


def test_an_optimizer_sees_that_the_memory_of_a_recorded_step_has_moved() -> None:
    model = ff.models.build("gpt-tiny", ff.Grid.alone("cpu"))
    optimizer, tokens = ff.optim.AdamW(model, lr=1e-2), torch.arange(32).view(2, 16)
    model(tokens, tokens).backward()
    optimizer.step()
    recording = Recording(CPU, {})
    optimizer._joins(recording)
    (write_rates,) = recording.before
    write_rates()
    shard = model.layers[0].mlp.up.weight._local_tensor
    shard.data = shard.data.clone()
    with pytest.raises(RuntimeError, match="make a new StepGraph"):
        write_rates()


def test_the_first_error_of_a_failed_recording_is_the_reason() -> None:
    def fail() -> None:
        try:
            raise RuntimeError("reads a number\non the host")
        finally:
            raise ValueError("the recording was ended")

    try:
        fail()
    except ValueError as error:
        assert _cause(error, None) == "RuntimeError: reads a number"
    try:
        raise KeyError("what a loop handles while it makes a step")
    except KeyError as outer:
        try:
            fail()
        except ValueError as error:
            assert _cause(error, outer) == "RuntimeError: reads a number"
    assert _first_fault(["", "a", "b"]) == "rank 1: a"
    assert _first_fault(["", ""]) == ""


def test_a_ledger_counts_replays_and_not_the_recording() -> None:
    ledger, recording = Ledger(), Recording(CPU, {})
    with ledger.recorded(recording):
        ledger.append(GATHER)
        ledger.append(SUM)
    assert not ledger.calls
    assert recording.launches == [GATHER, SUM]
    ledger.replayed(recording)
    ledger.replayed(recording)
    assert ledger.calls == {"z": 2, "data": 2}


def test_a_recording_shows_how_far_a_replay_has_come() -> None:
    recording = Recording(CPU, {})
    assert recording.progress == (0, 0)
    for replay in (1, 2):
        recording.begin()
        assert recording.progress == (replay, 0)
        recording.landed(GATHER)
        recording.landed(SUM)
        assert recording.progress[1] == 2 * replay  # every call is one more wait of the recorded step


def test_a_tape_names_the_collective_that_the_device_waits_for(tmp_path: Path) -> None:
    tape = Tape(tape_path(tmp_path, 0), 0, ff.Shape(z=2, data=2))
    recording = Recording(CPU, {})
    recording.launches = [GATHER, REDUCE, SUM]
    recording.waits = [GATHER, SUM, REDUCE]
    tape.launched(GATHER)  # by a step before
    for begun, passed, expected in ((1, 0, ("z", 2)), (1, 1, ("data", 1)), (2, 2, ("z", 5))):
        if begun > tape._replayed:
            tape.replayed(recording)
        recording._progress.copy_(torch.tensor([begun, passed]))
        tape.doing("reading results of its device", Waits.DEVICE)
        tape.look()
        waiting = read(tape_path(tmp_path, 0)).waiting
        assert waiting is not None
        assert (waiting.line, waiting.number) == expected
    tape.replayed(recording)  # the host is ahead; the device is still in the replay before
    tape.doing("reading results of its device", Waits.DEVICE)
    tape.look()
    waiting = read(tape_path(tmp_path, 0)).waiting
    assert waiting is not None
    assert (waiting.line, waiting.number) == ("z", 5)
    tape.doing("computing")
    assert read(tape_path(tmp_path, 0)).waiting is None
    tape.look()  # the host does not wait, so neither does the rank
    assert read(tape_path(tmp_path, 0)).waiting is None
    tape.close()


@pytest.mark.parametrize("probability", others_slow([0.1, 0.5], 2))
def test_dropout_depends_on_seed_position_and_name_alone(probability: float) -> None:
    from fourfold.kernels import DROP_BLOCK, drop

    a = torch.ones(3, DROP_BLOCK // 2)
    key, position = torch.tensor(7), torch.tensor([3, 1])
    kept = drop(a, probability, position, key)
    assert torch.equal(kept, drop(a, probability, position.clone(), key.clone()))
    assert torch.equal(kept.flatten()[: 2 * DROP_BLOCK // 2], drop(a[:2].flatten(), probability, position, key))
    assert abs(kept.mean().item() - 1) < 1e-3  # scaled, and four standard deviations of six million draws
    assert abs((kept == 0).float().mean().item() - probability) < 1e-3
    for other in (
        drop(a, probability, torch.tensor([4, 1]), key),
        drop(a, probability, torch.tensor([3, 2]), key),
        drop(a, probability, torch.tensor([1, 3]), key),
        drop(a, probability, position, torch.tensor(8)),
    ):
        both = ((kept == 0) & (other == 0)).float().mean().item()
        assert abs(both - probability**2) < 1e-3  # independent of each other


def test_masks_follow_the_step_that_is_set() -> None:
    model = ff.models.build(ff.models.config("gpt-tiny", dropout=0.3, attention_dropout=0.0), ff.Grid.alone("cpu"))
    tokens = torch.arange(32).view(2, 16)

    def losses(step: int) -> list[float]:
        model.clock.begin_step(step)
        return [model(tokens, tokens).item() for _ in range(2)]

    first, second = losses(1), losses(2)
    assert len({*first, *second}) == 4
    assert losses(1) == first


def test_training_counts_on_from_a_first_pass_in_inference_mode() -> None:
    config = ff.models.config("gpt-tiny", layers=1, dropout=0.3, attention_dropout=0.0)
    first, second = (ff.models.build(config, ff.Grid.alone("cpu")) for _ in range(2))
    tokens = torch.arange(32).view(2, 16)
    with torch.inference_mode():  # in training mode, as for an estimate of the model's uncertainty
        first(tokens, tokens)
    second(tokens, tokens)
    losses = [model(tokens, tokens) for model in (first, second)]
    losses[0].backward()
    assert losses[0].item() == losses[1].item()


def test_a_new_step_draws_anew_where_no_model_counts_micro_steps() -> None:
    grid, policy = ff.Grid.alone("cpu"), ff.Policy()
    dropout = ff.nn.Dropout(grid, policy, 0.5)
    ff.nn.assemble(dropout, grid, policy)
    masks = []
    for step in (1, 1, 2):
        dropout.clock.begin_step(step)
        masks.append(dropout(torch.ones(64)))
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_replays_are_given_up_if_the_slowest_rank_says_so() -> None:
    assert slower_replays(["10.0 9.0", "11.0 12.0"]) == ""
    assert slower_replays(["10.0 12.0", "11.0 12.2"]) == (
        "a replay takes 12.2 ms, where the step without a graph takes 11.0 ms"
    )


class FakeEvent:
    """A CUDA event of a device that counts the milliseconds of a clock."""

    now = 0.0

    def __init__(self, **_: bool) -> None:
        self.at = -1.0

    def record(self) -> None:
        self.at = FakeEvent.now

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def seem_recorded(step: ff.StepGraph, inputs: tuple) -> None:
    """Leave a step as a recording leaves it, which needs a GPU."""
    step._graph, step._inputs, step._outputs = SimpleNamespace(reset=lambda: None), inputs, torch.zeros(1)
    step._recorded_switches = step._switches.now()


@pytest.mark.parametrize(("replay", "stays"), [(3.0, True), (10.9, True), (30.0, False)])
def test_slow_replays_are_given_up(replay: float, stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager calls take 50 ms, then 10; evaluations in between, with other rows, take 1 and count for nothing."""
    grid = ff.Grid.alone("cpu")
    model = ff.models.build("gpt-tiny", grid)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(step_graph, "why_not", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: None)
    calls: list[str] = []

    def compute(rows: torch.Tensor) -> torch.Tensor:
        FakeEvent.now += 1.0 if len(rows) == 1 else 10.0 if calls else 50.0
        calls.append("eager")
        return rows

    def replayed(_: object) -> None:
        FakeEvent.now += replay
        calls.append("replay")

    step = ff.StepGraph(compute, model)
    monkeypatch.setattr(step, "_replay", replayed)

    monkeypatch.setattr(step, "_record", partial(seem_recorded, step))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    for number in range(12):
        step(torch.ones(2))
        if number > 4:
            step(torch.ones(1))
    own = [call for at, call in enumerate(calls) if at < 5 or at % 2]
    # the fifth call after the recording compares; two of them were evaluations
    assert own == ["eager"] * 3 + ["replay"] * (9 if stays else 4) + ["eager"] * (0 if stays else 5)
    assert bool(step.reason) is not stays


def calls_of(odd: int) -> list[bool]:
    """Whether each call on this rank was a replay; call `odd` of rank 1 has fewer tokens."""
    grid = grid_of(Shape(data=2))
    model = ff.models.build("gpt-tiny", grid)
    optimizer = ff.optim.AdamW(model, lr=1e-3)

    def compute(rows: torch.Tensor) -> torch.Tensor:
        loss = model(rows, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with (
        patch.object(torch.cuda, "Event", FakeEvent),
        patch.object(step_graph, "why_not", lambda *_: ""),
        patch.object(torch.cuda, "Stream", lambda _: None),
    ):
        step = ff.StepGraph(compute, model)

        def record(inputs: tuple) -> None:
            grid.channel.decide("", _first_fault)
            seem_recorded(step, inputs)

        # as recordings and replays on a GPU do, they ask the other ranks and send what the step sends
        with patch.object(step, "_record", record), patch.object(step, "_replay", lambda inputs: compute(*inputs)):
            found = []
            for call in range(20):
                step(torch.ones(2, 8 if call == odd and grid.rank == 1 else 16, dtype=torch.long))
                found.append(step.replayed)
    return found


@pytest.mark.parametrize("odd", others_slow([1, 3, 5, 8, 9], 2))
def test_ranks_that_get_other_shapes_do_not_wait_for_each_other(ranks, odd: int) -> None:
    """Neither before the recording, nor when replays are compared with the calls before."""
    first, second = ranks(2).run(calls_of, odd)
    assert first[-1] and second[-1]
    assert first.index(True) == second.index(True) == (3 if odd > 3 else 7)


class Draws(nn.Module):
    """A model that draws random numbers, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        a = self.up(a)
        a = a + nn.functional.scaled_dot_product_attention(a[None], a[None], a[None])[0]
        if self.how == "dropout":
            a = nn.functional.dropout(a, 0.5, training=self.training)
        if self.how == "attention":
            a = nn.functional.scaled_dot_product_attention(a[None], a[None], a[None], dropout_p=0.5)[0]
        if self.how == "nothing":
            a = nn.functional.dropout(nn.functional.rrelu(a, training=False), 0.0, training=self.training)
        if self.how == "noise":
            a = a + torch.randn_like(a)
        if self.how == "layer drop" and random.random() < 2.0:
            a = a * 2
        return self.down(a).mean()


@pytest.mark.parametrize("how", ["nothing", "dropout", "attention", "noise", "layer drop"])
def test_a_wrapped_model_is_recorded_only_if_it_draws_nothing(how: str) -> None:
    grid = ff.Grid.alone("cpu")
    model = ff.parallelize(Draws(how), grid)
    rows = torch.ones(4, 8)
    model(rows).backward()
    grid.recording = Recording(CPU, {})  # as while a step is recorded, which needs a GPU
    with nullcontext() if how == "nothing" else pytest.raises(RuntimeError, match="draws random numbers"):
        model(rows).backward()


def test_compiled_code_of_a_wrapped_model_runs_while_it_is_recorded_and_afterwards() -> None:
    grid = ff.Grid.alone("cpu")
    plain = Draws("nothing")
    calls: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *args: (calls.append("compiled"), graph(*args))[1]

    twice = torch.compile(lambda a: a * 2, backend=backend)
    plain.up.register_forward_pre_hook(lambda _, given: (twice(given[0]),))
    model = ff.parallelize(plain, grid)
    rows = torch.ones(4, 8)
    losses = []
    for recording in (None, Recording(CPU, {}), None):
        grid.recording = recording
        losses.append(model(rows))
        assert calls == ["compiled"] * len(losses)
    assert losses[0] == losses[1] == losses[2]
