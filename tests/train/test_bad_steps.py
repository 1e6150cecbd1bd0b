"""Bad numbers: what is a spike, what becomes of it, and that a run which was rolled back leaves the data out."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold as ff
from fourfold.checkpoint.format import read_record
from fourfold.checkpoint.load import Checkpoints
from fourfold.cli import main
from fourfold.errors import BadStepsError, Failure, NotFiniteError, RollBackError, failure_of
from fourfold.grid import Shape
from fourfold.optim import AdamW
from fourfold.params import local_of
from fourfold.train.checkpoints import PASSED_OVER
from fourfold.train.config import WatchSection
from fourfold.train.guard import MIN_LOSSES, WINDOW, StepJudge, spike_limit
from fourfold.train.loop import Run
from harness import grid_of
from share import others_slow

# --- what is a spike


def noisy(steps: int, seed: int = 0) -> list[float]:
    """A loss that falls, with noise."""
    draw = random.Random(seed)
    return [2 + 3 * 0.99**step + draw.gauss(0, 0.05) for step in range(steps)]


def test_no_clean_run_has_a_spike() -> None:
    for seed in range(50):
        losses = noisy(500, seed)
        for step, loss in enumerate(losses):
            assert loss <= spike_limit(losses[max(0, step - WINDOW) : step], 8.0)


def test_a_jump_is_one_and_a_few_do_not_move_the_limit() -> None:
    losses = noisy(300)[-WINDOW:]
    limit = spike_limit(losses, 8.0)
    assert 2.2 < limit < 3.2
    assert spike_limit([*losses[5:], *[40.0] * 5], 8.0) < 1.2 * limit


def test_nothing_is_a_spike_at_first_nor_where_they_are_off() -> None:
    assert spike_limit(noisy(MIN_LOSSES - 1), 8.0) == inf
    assert spike_limit(noisy(MIN_LOSSES), 8.0) < inf
    assert spike_limit(noisy(MIN_LOSSES), 0.0) == inf


def test_losses_that_do_not_vary_have_a_limit_above_them() -> None:
    assert spike_limit([1.0] * MIN_LOSSES, 8.0) == pytest.approx(1.08)


# --- what becomes of it


def numbers_of(losses: Sequence[float] = (), **changes: Any) -> StepJudge:
    found = StepJudge(WatchSection(**changes), max_skipped=2)
    for step, loss in enumerate(losses, 1):
        assert found.judge(step, loss, 1.0, found.limit) is None
    return found


def test_skipped_steps_in_a_row_end_the_run_and_a_good_one_between_counts_anew() -> None:
    numbers = numbers_of()
    for step, norm in enumerate([inf, 1.0, nan], 1):
        bad = numbers.judge(step, 2.0, norm, inf)
        assert (bad is None) == (norm == 1.0)
        if bad is not None:
            numbers.act(bad, "weight", {})
    bad = numbers.judge(4, 2.0, nan, inf)
    assert bad is not None
    with pytest.raises(BadStepsError, match=r"2 bad steps in a row: the gradients of step 4 .* the first in weight"):
        numbers.act(bad, "weight", {})


@pytest.mark.parametrize(("action", "raised"), [("tell", None), ("skip", None), ("roll_back", RollBackError)])
def test_a_spike_is_told_skipped_or_rolled_back(action: str, raised: type[Exception] | None) -> None:
    numbers = numbers_of([2.0] * MIN_LOSSES, spikes=action)
    assert numbers.skip_above == (numbers.limit if action == "skip" else inf)
    bad = numbers.judge(40, 9.0, 1.0, numbers.limit)
    assert bad is not None
    assert (bad.spike, bad.action, bad.in_a_row) == (True, action, int(action == "skip"))
    if raised is None:
        numbers.act(bad, None, {})
    else:
        with pytest.raises(raised, match=r"the loss of step 40 is 9, above the limit of 2.16"):
            numbers.act(bad, None, {"given": [40]})


def test_a_loss_that_stays_high_is_no_spike_after_a_while_and_one_that_is_no_number_always_is() -> None:
    numbers = numbers_of([2.0] * MIN_LOSSES)
    jumps = [numbers.judge(100 + step, 9.0, 1.0, numbers.limit) is not None for step in range(400)]
    assert jumps[0]
    assert not jumps[-1]
    assert numbers.judge(600, nan, 1.0, numbers.limit) is not None


def test_what_was_seen_goes_on_with_a_checkpoint() -> None:
    numbers = numbers_of(noisy(100), spikes="skip")
    assert numbers.judge(101, 90.0, 1.0, numbers.limit) is not None
    again = numbers_of(spikes="skip")
    again.restore(json.loads(json.dumps(numbers.state())))
    assert (again.limit, again.state()) == (numbers.limit, numbers.state())
    again.restore({})  # of a checkpoint that has none
    assert again.limit == inf


# --- on ranks

CONFIG = ff.models.config("gpt-tiny", layers=1, vocab=53)


def stepped(shape: Shape, shard_optimizer: bool) -> list[Any]:
    """Whether a step with a loss above the limit has changed anything, one below it, and the losses."""
    grid = grid_of(shape)
    model = ff.models.build(CONFIG, grid, policy=ff.Policy(shard_optimizer=shard_optimizer))
    optimizer = AdamW(model, lr=1e-2)
    found: list[Any] = []
    for limit in (1.0, 100.0):
        before = [local_of(parameter).detach().clone() for parameter in model.parameters()]
        rows = ff.local_rows(torch.arange(64).view(4, 16) % 53, grid)
        loss = model(rows, rows)
        loss.backward()
        clipped = optimizer.clip_and_step(1.0, unless=loss.detach() > limit)
        optimizer.zero_grad()
        after = [local_of(parameter).detach() for parameter in model.parameters()]
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found += [same, bool(clipped.norm.isfinite()), loss.item()]
    return found


@pytest.mark.parametrize(
    "shape", others_slow([Shape(x=2, z=2), Shape(z=2, data=2), Shape(y=2, data=2), Shape(x=2, y=2)], 2), ids=str
)
def test_all_ranks_see_the_same_loss_bit_for_bit_and_skip_together(ranks: Any, shape: Shape) -> None:
    found = ranks(4).run(stepped, shape, shape.data > 1)
    assert all(one == found[0] for one in found), "the loss decides, so it must not differ in one bit"
    assert found[0][:2] == [True, True]
    assert found[0][3] is False


# --- whole runs

BAD_DATA = 8
"""The batch, counted from 1, with which gradients are not finite."""


def poison(monkeypatch: pytest.MonkeyPatch, bad: Collection[int] = (BAD_DATA,)) -> list[int]:
    """Make the gradients of these batches not finite; return the batches that are seen, in order."""
    seen: list[int] = []
    launch = Run._launch

    def poisoned(run: Run, step: int) -> None:
        clip_and_step = run.optimizer.clip_and_step

        def spoilt(*call: Any, **named: Any) -> Any:
            seen.append(sum(run.loader.state()["given"]) // run.config.batch.rows)
            if seen[-1] in bad:
                local_of(run.model.norm.weight.grad)[0] = nan
            return clip_and_step(*call, **named)

        run.optimizer.clip_and_step = spoilt  # type: ignore[method-assign]
        try:
            launch(run, step)
        finally:
            run.optimizer.clip_and_step = clip_and_step  # type: ignore[method-assign]

    monkeypatch.setattr(Run, "_launch", poisoned)
    return seen


def train(out: Path, *more: str) -> int:
    settings = ["train.evaluate_every=0", "plan.compare=false", "model.layers=1", "batch.rows=4", "checkpoint.every=5"]
    settings += ["log.peak_flops=1e12", "log.tensorboard=false", "batch.seq=16"]
    text = out.parent / "text.txt"
    text.write_text("".join(f"{number * number} " for number in range(5000)))
    given = ["--data", str(text), *(f"--set={setting}" for setting in (*settings, *more))]
    return main(["train", "--model", "gpt-tiny", "--steps", "10", "--device", "cpu", "--out", str(out), *given])


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def test_a_run_is_rolled_back_and_leaves_that_data_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = poison(monkeypatch)
    assert train(tmp_path / "run", "watch.not_finite=roll_back") == 0
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert [step["step"] for step in events(tmp_path / "run", "step")] == list(range(1, 11))
    (resumed,) = events(tmp_path / "run", "resumed")
    assert "without the data of steps 6 to 8: the gradients of step 8 are not finite" in resumed["passed_over"]
    assert resumed["passed_over"] in capsys.readouterr().out
    # a run that goes on from that checkpoint later leaves it out too; from another it does not
    seen.clear()
    resume = ["train", "--resume", str(tmp_path / "run"), "--step", "5", "--device", "cpu"]
    assert main(resume) == 0
    assert seen == [9, 10, 11, 12, 13]


def test_a_run_that_cannot_be_rolled_back_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch)
    assert train(tmp_path / "none", "watch.not_finite=roll_back", "checkpoint.every=0") == 1
    assert "there is no checkpoint to roll back to, set checkpoint.every" in capsys.readouterr().err
    monkeypatch.setattr("fourfold.train.checkpoints.MOST_ROLL_BACKS", 0)
    assert train(tmp_path / "often", "watch.not_finite=roll_back") == 1
    assert "rolled back to step 5 0 times" in capsys.readouterr().err


def test_a_run_stops_at_once_where_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poison(monkeypatch)
    assert train(tmp_path / "run", "watch.not_finite=stop") == 1
    said = capsys.readouterr().err
    assert "stopped: the gradients of step 8 are not finite" in said
    assert "the newest checkpoint is that of step 7" in said
    assert saved_steps(tmp_path / "run") == [5, 7]
    assert not (tmp_path / "run" / PASSED_OVER).exists()


# --- checkpoints while steps are skipped


STEADY = ("optimizer.schedule=constant", "optimizer.warmup=0", "checkpoint.keep_last=9", "model.dropout=0.1")
"""Settings with which a step does not depend on how many steps the run has."""


def overflow(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Make a moment of the optimizer infinite after this step."""
    launch = Run._launch

    def overflowing(run: Run, step: int) -> None:
        launch(run, step)
        if step == at:
            next(iter(run.optimizer.state.values()))["exp_avg_sq"][0] = inf

    monkeypatch.setattr(Run, "_launch", overflowing)


def read_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the results of a step when the next one has been launched, as on a GPU."""
    real = Run._read_steps
    monkeypatch.setattr(Run, "_read_steps", lambda run, leave=None: real(run, 0 if leave is None else 1))


def saved_steps(out: Path) -> list[int]:
    return [step for step, _ in Checkpoints(out / "checkpoints").complete()]


def checkpoint_bytes(out: Path, step: int) -> bytes:
    return (out / "checkpoints" / f"step-{step:08}" / "rank-00000.safetensors").read_bytes()


def test_a_run_that_ends_with_skipped_steps_keeps_the_last_good_one_and_goes_on_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps 8 to 10 are skipped; the checkpoint of step 7 is that of a run that never saw them, tensors and state.

    As on a GPU, a step is read when the next one is launched, so the loader has moved on when step 7 is known as good.
    """
    sound, run = tmp_path / "sound", tmp_path / "run"
    assert train(sound, *STEADY, "checkpoint.every=7") == 0
    with monkeypatch.context() as patch:
        read_late(patch)
        poison(patch, (8, 9, 10))
        assert train(run, *STEADY, "checkpoint.every=4", "train.max_skipped=9") == 0
    assert saved_steps(run) == [4, 7]
    said = capsys.readouterr().out
    assert "step 8: the step was skipped; its checkpoint is put off until a step is not\n" in said
    assert "step 10: steps 8 to 10 were skipped; the newest checkpoint is that of step 7\n" in said
    assert checkpoint_bytes(run, 7) == checkpoint_bytes(sound, 7)
    left, right = (read_record(out / "checkpoints" / "step-00000007").state for out in (run, sound))
    assert all(left[key] == right[key] for key in ("data", "losses", "skipped", "step"))
    assert main(["train", "--resume", str(run), "--device", "cpu"]) == 0
    assert checkpoint_bytes(run, 10) == checkpoint_bytes(sound, 10)
    assert [step["loss"] for step in events(run, "step")] == [step["loss"] for step in events(sound, "step")]


def test_a_save_that_is_due_at_a_skipped_step_is_made_after_the_next_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, (4, 5, 8))
    assert train(tmp_path / "run", *STEADY, "checkpoint.every=4") == 0
    assert saved_steps(tmp_path / "run") == [6, 9, 10]
    assert [saved["step"] for saved in events(tmp_path / "run", "saved")] == [6, 9, 10]


def test_too_many_skipped_steps_leave_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless that one is not finite either: then the save is refused, and the message says what there is."""
    poison(monkeypatch, (8, 9))
    assert train(tmp_path / "run", "train.max_skipped=2", "checkpoint.every=7") == 1  # it is saved already
    assert "stopped after 2 bad steps in a row" in (said := capsys.readouterr().err)
    assert said.endswith("; the newest checkpoint is that of step 7\n")
    assert saved_steps(tmp_path / "run") == [7]
    overflow(monkeypatch, 7)
    assert train(tmp_path / "first", "train.max_skipped=2", "checkpoint.every=0") == 1
    said = capsys.readouterr().err
    assert "stopped after 2 bad steps" in said and "was not saved; there is no checkpoint before it" in said
    assert saved_steps(tmp_path / "first") == []


def test_a_step_in_flight_behind_the_last_bad_one_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, step 10 is launched before step 9 is read and ends the run: the parameters are those of step 10."""
    read_late(monkeypatch)
    poison(monkeypatch, (8, 9))
    run = tmp_path / "run"
    assert train(run, *STEADY, "train.max_skipped=2") == 1
    assert saved_steps(run) == [5, 10]
    assert [step["skipped"] for step in events(run, "step")] == [False] * 7 + [True] * 2 + [False]
    state = read_record(run / "checkpoints" / "step-00000010").state
    assert (state["data"]["sample"], state["skipped"], len(state["losses"])) == (40, 0, 8)


def test_a_run_whose_numbers_are_not_finite_ends_with_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A moment that overflows while the gradients are finite: no step is skipped, and yet nothing can be saved."""
    overflow(monkeypatch, 8)
    assert train(tmp_path / "run", "checkpoint.keep_last=1") == 1
    said = capsys.readouterr().err
    assert "'optimizer/exp_avg_sq/" in said and "holds NaN or infinity" in said
    assert "step-00000010 was not saved; the newest checkpoint is" in said and "step-00000005\n" in said
    assert saved_steps(tmp_path / "run") == [5]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000005"]
    assert failure_of(NotFiniteError()) is Failure.USER  # restarts would fail in the same way


def test_a_run_whose_steps_were_all_skipped_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exit code of 0 would hide that from whatever started the run."""
    launch = Run._launch

    def poisoned(run: Run, step: int) -> None:
        with torch.no_grad():
            local_of(run.model.get_parameter("embedding.weight")).fill_(nan)
        launch(run, step)

    monkeypatch.setattr(Run, "_launch", poisoned)
    assert train(tmp_path / "run", "train.max_skipped=99") == 1
    said = capsys.readouterr().err
    assert (
        "all steps from 1 to 10 were skipped, so nothing was trained; there is no checkpoint; lower optimizer" in said
    )
    assert saved_steps(tmp_path / "run") == []
    assert events(tmp_path / "run", "end")[0]["reason"].startswith("BadStepsError: all steps from 1 to 10 were skipped")
