"""`fourfold train` and what follows it: the run's folder, output, records, faults, signals, samples, the report.

Most commands run as `cli.main` inside a process of a pool, since importing torch takes longer than the runs do;
those that are about processes (signals, a rank that dies) are processes of `warm.py`, torchrun starts ranks for real.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import json
import os
import pty
import re
import resource
import signal
import sys
import threading
import time
import tomllib
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import warm
from curves import Curves, config_of, write_texts
from fourfold import models
from fourfold.axes import AXES
from fourfold.checkpoint.format import read_record
from fourfold.checkpoint.training_state import model_shards
from fourfold.commands import train
from fourfold.commands.options import parser
from fourfold.data.sources import prepare
from fourfold.data.tokenizer import load_tokenizer
from fourfold.errors import BadStepsError, FailedElsewhereError, ReplicasDifferError
from fourfold.grid import Shape
from fourfold.params import local_of
from fourfold.planner.machine import load_machine
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Overlap
from fourfold.report.run_data import read_run
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.loop import Run
from fourfold.train.run_folder import open_sinks
from fourfold.train.schema import parse
from fourfold.train.signals import CTRL_C_HEARD, SAME_PRESS_SECONDS
from harness import Ranks, grid_of
from runs import (
    STEPS,
    Job,
    Left,
    alive,
    assert_error,
    cli,
    column,
    end,
    ended,
    interrupted,
    lines_of,
    needs_proc,
    ranks_of,
    started,
    train_arguments,
    trained,
    wait_for_steps,
)
from share import share

STEP_KEYS = {
    "event", "step", "loss", "grad_norm", "learning_rate", "seconds", "tokens_per_second", "mfu", "hfu", "wire_bytes",
    "exposed_seconds", "peak_memory_bytes", "skipped",
}  # fmt: skip


def cli_as_rank(*commands: Sequence[str]) -> list[Left]:
    """A job: commands one after another on ranks that a launcher has started already."""
    import fourfold.cli
    from fourfold.commands import sample, train

    rank, world = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
    os.environ |= {"RANK": rank, "WORLD_SIZE": world}
    fourfold.cli._leave = lambda code: code  # the process serves other jobs
    train.close = sample.close = lambda grid: grid.close()  # so does its process group
    return [cli(*arguments) for arguments in commands]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def tokens(texts: Path) -> str:
    """The same as a token file, so that nothing needs preparing."""
    return str(prepare([texts], texts.parent / "texts.tokens", load_tokenizer("bytes")).path)


@pytest.fixture(scope="module")
def finished(one: Ranks, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Left]:
    """A finished run and what the command said."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    more = ["--dtype", "fp64", "--set", "train.evaluate_every=4", "--set", "plan.compare=true"]
    (left,) = one.run(cli, *train_arguments(texts, folder, *more))
    assert (left.code, left.err) == (0, "")
    return folder, left


# --- the folder


def test_a_folder_tells_what_ran(finished: tuple[Path, Left]) -> None:
    folder, _ = finished
    assert {path.name for path in folder.iterdir()} == {
        "config.toml", "run.json", "metrics.jsonl", "events.jsonl", "log.txt", "logs", "tensorboard", "data",
        "checkpoints", "machine.toml", ".lock",
    }  # fmt: skip
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    assert [path.suffix for path in (folder / "data").iterdir()] == [".tokens"]
    facts = json.loads((folder / "run.json").read_text())
    model = models.config("gpt-tiny", layers=1)
    assert facts["grid"] == Shape().named
    assert facts["order"] == list(AXES)
    assert (facts["ranks"], facts["model"], facts["steps"], facts["tokens_per_step"]) == (1, "gpt-tiny", STEPS, 48)
    assert facts["parameters"] == model.parameters
    assert (facts["peak_flops"], facts["peak_flops_from"]) == (1e12, "log.peak_flops")
    assert facts["flops_per_token"]["hardware"] >= facts["flops_per_token"]["model"] > 6 * 48 * 257
    assert facts["recompute"] == "none"
    assert facts["halves"]["number"] == 1
    assert facts["halves"]["reason"]
    assert facts["kept_bytes"].keys() == {"none", "attention", "block"}
    assert facts["kept_bytes"]["none"] > facts["kept_bytes"]["block"] > 0
    assert 1 < facts["unigram_entropy"] < 3.6  # of a dozen letters and a blank
    assert facts["tokens"] > 1000
    assert {"fourfold", "torch", "device", "started"} <= facts.keys()
    assert "resumed" not in facts
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{STEPS:08}"]
    state = read_record(folder / "checkpoints" / f"step-{STEPS:08}").state
    assert state["step"] == STEPS
    assert parse(TrainConfig, state["config"]).model == read_config(folder / "config.toml").model
    assert state["data"]["sample"] == STEPS * 4


def test_metrics_are_lines_with_every_figure(finished: tuple[Path, Left]) -> None:
    folder, _ = finished
    lines = lines_of(folder)
    kinds = ["step"] * 4 + ["evaluation"] + ["step"] * 2 + ["evaluation", "saved"]
    kinds += ["compared", "corrected", "end"]
    assert [line["event"] for line in lines] == kinds
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    entropy = json.loads((folder / "run.json").read_text())["unigram_entropy"]
    flops = json.loads((folder / "run.json").read_text())["flops_per_token"]
    for line in steps:
        assert line.keys() == STEP_KEYS
        assert line["loss"] > 0
        assert line["grad_norm"] > 0
        assert line["tokens_per_second"] == pytest.approx(48 / line["seconds"])
        assert line["mfu"] == pytest.approx(flops["model"] * line["tokens_per_second"] / 1e12)
        assert line["peak_memory_bytes"] > 10 << 20
        assert (line["wire_bytes"], line["skipped"]) == ({}, False)
    schedule = read_config(folder / "config.toml").schedule
    rates = torch.tensor([schedule.at(step) for step in range(1, STEPS + 1)])  # in fp32, as the optimizer takes them
    assert [line["learning_rate"] for line in steps] == rates.tolist()
    for line in (line for line in lines if line["event"] == "evaluation"):
        assert line.keys() == {"event", "step", "loss", "unigram_entropy"}
        assert line["unigram_entropy"] == entropy
    assert [line["step"] for line in lines if line["event"] == "evaluation"] == [4, 6]
    assert lines[-1] == {"event": "end", "step": STEPS, "reason": "finished"}


def test_the_stored_config_gives_the_run_again(one: Ranks, finished: tuple[Path, Left], tmp_path: Path) -> None:
    folder, _ = finished
    (left,) = one.run(cli, "train", str(folder / "config.toml"), "--out", str(tmp_path / "again"))
    assert left.code == 0
    for event, key in (("step", "loss"), ("step", "grad_norm"), ("evaluation", "loss")):
        assert column(tmp_path / "again", event, key) == column(folder, event, key)
    last = Path("checkpoints", f"step-{STEPS:08}", "rank-00000.safetensors")
    files = [path / last for path in (folder, tmp_path / "again")]
    assert files[0].read_bytes() == files[1].read_bytes()
    first, again = (tomllib.loads((path / "config.toml").read_text()) for path in (folder, tmp_path / "again"))
    assert again == first
    assert "out" not in first["train"]  # run again without --out it must not meet the first run's folder


def test_a_folder_with_a_run_is_refused_and_stays(one: Ranks, finished: tuple[Path, Left], texts: Path) -> None:
    folder, _ = finished
    before = (folder / "metrics.jsonl").read_bytes(), (folder / "config.toml").read_bytes()
    (left,) = one.run(cli, *train_arguments(texts, folder, "--set", "train.seed=5"))
    assert_error(left, "already holds a run; give another --out")
    assert ((folder / "metrics.jsonl").read_bytes(), (folder / "config.toml").read_bytes()) == before


# --- output


def test_lines_without_a_terminal(finished: tuple[Path, Left]) -> None:
    folder, left = finished
    assert "\r" not in left.out
    assert "\x1b" not in left.out
    rows = [line.split() for line in left.out.splitlines() if re.match(r" +\d+ ", line)]
    assert [int(row[0]) for row in rows] == list(range(1, STEPS + 1))
    assert [float(row[1]) for row in rows] == pytest.approx(column(folder, "step", "loss"), abs=1e-4)
    assert "step 4: validation loss" in left.out
    assert f"fourfold sample {folder}" in left.out


def cli_on_terminal(*arguments: str) -> tuple[int, str]:
    """A job: the command with a terminal as its standard output."""
    from fourfold.cli import main

    ours, theirs = pty.openpty()
    read: list[bytes] = []

    def keep() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while piece := os.read(ours, 4096):
                read.append(piece)

    reader = threading.Thread(target=keep)
    reader.start()
    os.environ |= {"TERM": "xterm", "COLUMNS": "100"}
    with os.fdopen(theirs, "w") as terminal, contextlib.redirect_stdout(terminal):
        code = main(arguments)
    reader.join(5)
    os.close(ours)
    return code, b"".join(read).decode()


def test_a_bar_on_a_terminal(one: Ranks, tokens: str, tmp_path: Path) -> None:
    ((code, shown),) = one.run(cli_on_terminal, *train_arguments(tokens, tmp_path / "run", steps=3))
    assert code == 0
    assert "\x1b[" in shown
    assert "3/3" in shown
    assert "tokens/s" in shown
    assert "validation loss" in shown
    assert len(column(tmp_path / "run", "step", "loss")) == 3


def test_json_on_standard_output_is_all_there_is(one: Ranks, tokens: str, tmp_path: Path) -> None:
    """Also where steps are profiled, which is said to people."""
    profiled = ["--profile", "2-3", "--json", "-"]
    (left,) = one.run(cli, *train_arguments(tokens, tmp_path / "run", *profiled, steps=3))
    assert left.code == 0
    trace = tmp_path / "run" / "profile" / "rank-0.json"
    assert f"steps 2 to 3 profiled: {trace}; open them in ui.perfetto.dev" in left.err
    assert {"step 2", "step 3"} <= {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    found = json.loads(left.out)
    assert found.keys() == {
        "config", "grid", "predicted", "compared", "corrected", "steps", "evaluations", "skipped", "spikes", "saved",
        "resumed", "stragglers", "end",
    }  # fmt: skip
    config = parse(TrainConfig, found["config"])
    assert replace(config, train=replace(config.train, out=None)) == read_config(tmp_path / "run" / "config.toml")
    assert found["grid"] == Shape().named
    lines = [line for line in lines_of(tmp_path / "run") if line["event"] == "step"]
    assert found["steps"] == [{key: value for key, value in line.items() if key != "event"} for line in lines]
    assert found["end"] == {"step": 3, "reason": "finished"}
    assert (len(found["evaluations"]), found["skipped"], found["resumed"]) == (1, [], [])
    assert [saved["step"] for saved in found["saved"]] == [3]
    assert "validation loss" in left.err  # people read on there

    file = tmp_path / "result.json"
    (left,) = one.run(cli, *train_arguments(tokens, tmp_path / "other", "--json", str(file), steps=3))
    assert left.code == 0
    assert "validation loss" in left.out
    again = json.loads(file.read_text())
    assert [step["loss"] for step in again["steps"]] == [step["loss"] for step in found["steps"]]


def test_a_result_that_cannot_be_written_is_found_before_training(one: Ranks, tokens: str, tmp_path: Path) -> None:
    absent = tmp_path / "absent" / "result.json"
    (left,) = one.run(cli, *train_arguments(tokens, tmp_path / "run", "--json", str(absent), steps=2))
    assert left.code == 2 and f"argument --json: {absent}" in left.err and "Traceback" not in left.err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_print_config_reads_back_and_starts_nothing(one: Ranks, tmp_path: Path) -> None:
    more = ["--grid", "x=2,z=2", "--dtype", "fp64", "--set", "overlap.halves=2", "--profile", "2", "--print-config"]
    arguments = train_arguments("absent", tmp_path / "run", *more)
    (left,) = one.run(cli, *arguments)
    assert (left.code, left.err) == (0, "")
    path = tmp_path / "c.toml"
    path.write_text(left.out)
    config = read_config(path)
    assert config.grid.shape.sizes == Shape(x=2, z=2).sizes
    assert (config.policy.dtype, config.policy.compile, config.model.layers) == ("fp64", False, 1)
    assert config.overlap == Overlap(halves=2)
    assert config.toml(explained=True) == left.out
    assert "default: 0)\nrows = 4\n" in left.out
    assert not (tmp_path / "run").exists()
    (left,) = one.run(cli, "train", str(path), "--grid", "auto", "--ranks", "4", "--print-config", "--device", "cpu")
    chosen = read_config(None, [*_flat(tomllib.loads(left.out))]).grid.shape
    assert chosen.world == 4
    assert left.err.startswith(f"grid {chosen}")
    assert " by the planner: " in left.err
    assert left.err.count("\n") == 1


def test_a_printed_config_is_for_the_machine_that_it_names(one: Ranks) -> None:
    """On a login node too: dtype, sequence, batch and compiling as `fourfold plan` has them; a node's ranks."""
    arguments = ["train", "--model", "gpt-1.4b", "--print-config", "--machine"]
    found = {}
    for more in (["dgx-h100", "--grid", "x=2,z=32"], ["dgx-h100"], ["laptop", "--grid", "z=4"]):
        (left,) = one.run(cli, *arguments, *more)
        assert left.code == 0, left.err
        config = read_config(None, [*_flat(tomllib.loads(left.out))])
        batch = config.batch
        found[" ".join(more)] = (
            config.grid.shape.world,
            config.policy.dtype,
            config.policy.compile,
            batch.seq,
            batch.rows,
        )
    on_gpus = ("bf16", True, 2048, 512)
    assert found == {
        "dgx-h100 --grid x=2,z=32": (64, *on_gpus),
        "dgx-h100": (load_machine("dgx-h100").devices_per_node, *on_gpus),
        "laptop --grid z=4": (4, "fp32", False, 128, 16),
    }


def _flat(table: dict[str, dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(f"{section}.{key}", value) for section, keys in table.items() for key, value in keys.items()]


# --- what a step sends


def record(config: TrainConfig, folder: Path) -> list[dict[str, Any]]:
    """A job: the events of a run on this rank."""
    run = Run(config, grid_of(config.grid.shape), folder)
    kept = Curves()
    run.sinks = [kept]
    run.train()
    return kept.events


def predicted(config: TrainConfig, rank: int) -> dict[str, int]:
    """Bytes by axis that a rank sends in a step."""
    shape, batch = config.grid.shape, config.batch
    rows = batch.rows // batch.micro_steps // (shape.data * shape.z)
    policy = config.build_policy()
    sizes = LocalSizes(config.model.build(), shape, policy, rows, batch.seq, config.policy.parameters, rank)
    sent: Counter[str] = Counter()
    for found in step_program(sizes, micro_steps=batch.micro_steps).records:
        sent[found.axis] += found.wire_bytes
    return dict(sent)


@pytest.mark.parametrize(
    ("shape", "changes"),
    share(
        [
            (Shape(z=2, data=2), {"policy.shard_optimizer": True, "batch.micro_steps": 2}),
            (Shape(x=2, y=2), {"policy.recompute": "block", "policy.loss_chunk": 5}),
        ],
        2,
    ),
    ids=str,
)
def test_every_step_sends_what_was_predicted(ranks, tmp_path: Path, shape: Shape, changes: dict[str, Any]) -> None:
    """Each step alone: neither the start nor an evaluation between two steps counts."""
    write_texts(tmp_path)
    changes = {"model.layers": 1, "train.evaluate_every": 2, **changes}
    config = config_of("gpt-tiny", "fp32", 4, tmp_path, shape, changes)
    for rank, events in enumerate(ranks(4).run(record, config, tmp_path)):
        sent = [event["wire_bytes"] for event in events if event["event"] == "step"]
        assert sent == [predicted(config, rank)] * 4
        assert sum(event["event"] == "evaluation" for event in events) == 2
        for event in (event for event in events if event["event"] == "step"):
            assert event["exposed_seconds"].keys() == event["wire_bytes"].keys()
            assert 0 < sum(event["exposed_seconds"].values()) < event["seconds"]


# --- numbers that are not finite


UP, DOWN = "layers.0.mlp.up.weight", "layers.0.mlp.down.weight"


def poisoned(config: TrainConfig, folder: Path, steps: list[int]) -> dict[str, Any]:
    """A job: a run in which on rank 1 alone something in backward is not finite in some steps.

    Where data replicates that is an activation's gradient, which spoils this rank's share of all sums; otherwise
    two parameters' shards of the gradient.
    """
    run = Run(config, grid_of(config.grid.shape), folder)
    kept = Curves()
    run.sinks = [kept]
    clip_and_step = run.optimizer.clip_and_step
    before: list[dict[str, torch.Tensor]] = []

    def values() -> dict[str, torch.Tensor]:
        return {name: held.local.clone() for name, held in model_shards(run.model).items()}

    def spoil(step: int, tensor: torch.Tensor) -> torch.Tensor:
        if step in steps and run.grid.rank == 1:
            tensor.view(-1)[3] = float("inf" if step % 2 else "nan")
        return tensor

    def spoil_shards(max_norm: float, **more: Any) -> Any:
        before.append(values())
        for name in (DOWN, UP) if config.grid.shape.data == 1 else ():
            spoil(len(before), local_of(run.model.gradients.parameters[name][0].grad))
        return clip_and_step(max_norm, **more)

    if config.grid.shape.data > 1:
        run.model.layers[0].mlp.register_forward_hook(
            lambda _module, _inputs, out: out.register_hook(lambda dout: spoil(len(before) + 1, dout.clone())) and None
        )
    run.optimizer.clip_and_step = spoil_shards
    error = ""
    try:
        run.train()
    except BadStepsError as caught:
        error = str(caught)
    before.append(values())
    changed = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(before)]
    finite = all(value.isfinite().all() for value in before[-1].values())
    first = next(iter(run.optimizer.parts))
    return {"events": kept.events, "error": error, "changed": changed, "finite": finite, "first": first}


@pytest.mark.parametrize("shape", [Shape(x=2), Shape(data=2)], ids=str)
def test_a_step_without_finite_gradients_is_skipped_on_all_ranks(ranks, tmp_path: Path, shape: Shape) -> None:
    write_texts(tmp_path)
    config = config_of("gpt-tiny", "fp32", 6, tmp_path, shape, {"model.layers": 1, "train.evaluate_every": 0})
    results = ranks(2).run(poisoned, config, tmp_path, [3, 4])
    for rank, found in enumerate(results):
        assert (found["error"], found["finite"]) == ("", True)
        steps = [event for event in found["events"] if event["event"] == "step"]
        assert [step["skipped"] for step in steps] == [False, False, True, True, False, False]
        assert found["changed"] == [True, True, False, False, True, True]
        assert all(0 < step["loss"] < 10 for step in steps)
        name = UP if shape.data == 1 else found["first"]  # what stands before the spoilt activation in the model
        assert [event for event in found["events"] if event["event"] == "skipped"] == [
            {"event": "skipped", "step": step, "parameter": name, "in_a_row": number}
            for number, step in enumerate((3, 4), 1)
        ]
        # what is asked about a skipped step belongs to no other
        assert [step["wire_bytes"] for step in steps] == [predicted(config, rank)] * 6


def test_too_many_skipped_steps_end_the_run(ranks, tmp_path: Path) -> None:
    write_texts(tmp_path)
    changes = {"model.layers": 1, "train.evaluate_every": 0, "train.max_skipped": 2}
    config = config_of("gpt-tiny", "fp64", 8, tmp_path, Shape(z=2), changes)
    for found in ranks(2).run(poisoned, config, tmp_path, [2, 4, 5]):  # one alone is not enough
        assert "stopped after 2 bad steps in a row: the gradients of step 5 are not finite" in found["error"]
        assert f"the first in {UP}" in found["error"]
        assert found["finite"]
        end = found["events"][-1]
        assert (end["event"], end["step"]) == ("end", 5)
        assert end["reason"] == f"BadStepsError: {found['error']}"
        assert sum(event["event"] == "step" for event in found["events"]) == 5


# --- disks


def cli_with_little_disk(largest: int, *arguments: str) -> Left:
    """A job: the command while no file can be longer than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
    try:
        return cli(*arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_lets_the_run_finish_and_is_an_error_then(one: Ranks, tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = train_arguments(tokens, folder, "--set", "checkpoint.save=false", "--json", "-", steps=30)
    (left,) = one.run(cli_with_little_disk, 4000, *arguments)
    assert left.code == 1
    *_, error = left.err.splitlines()
    assert error.startswith(f"fourfold: error: cannot log to {folder / 'metrics.jsonl'} (File too large); its last ")
    assert left.err.count(f"fourfold: warning: cannot write to {folder / 'metrics.jsonl'} (File too large)") == 1
    assert [step["step"] for step in json.loads(left.out)["steps"]] == list(range(1, 31))
    *whole, _ = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [found["step"] for found in map(json.loads, whole) if found["event"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(whole) > 5
    assert len(read_run(folder).steps) == len(steps)


def test_preparing_text_on_a_full_disk_names_the_file(tmp_path: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "a.txt").write_text("words")
    out = tmp_path / "a.tokens"
    with monkeypatch.context() as patched:
        patched.setattr("fourfold.data.token_files._write", full)
        with pytest.raises(OSError, match=f"cannot write {re.escape(str(out))} .No space left on device"):
            prepare([tmp_path / "a.txt"], out, load_tokenizer("bytes"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_checkpoint_that_does_not_fit_is_an_error_of_one_line(one: Ranks, tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = train_arguments(tokens, folder, "--set", "log.tensorboard=false", steps=2)
    (left,) = one.run(cli_with_little_disk, 50_000, *arguments)
    target = folder / "checkpoints" / "step-00000002"
    assert_error(left, "File too large", f"{target} was not saved; there is no checkpoint before it")
    assert list(target.parent.iterdir()) == []
    end = lines_of(folder)[-1]
    assert end["step"] == 2
    assert end["reason"].startswith("NotSavedError: [Errno 27] cannot write ")


# --- what users do wrong


def test_mistakes_are_errors_of_one_line(one: Ranks, tokens: str, tmp_path: Path) -> None:
    empty, bad = tmp_path / "empty", tmp_path / "bad.tokens"
    empty.mkdir()
    bad.write_bytes(Path(tokens).read_bytes()[:100])
    blank = tmp_path / "blank.txt"
    blank.write_text("")

    def attempt(data: str | Path, *more: str) -> Left:
        return one.run(cli, *train_arguments(data, tmp_path / "run", *more, steps=1))[0]

    assert_error(attempt(tmp_path / "absent"), "there is no 'absent'", str(tmp_path))
    assert_error(attempt(empty), str(empty))
    assert_error(attempt(blank), str(blank))
    assert_error(attempt(bad), str(bad))
    assert_error(attempt(tokens, "--set", "model.vocab=100"), "vocab=100", "vocab=257 or more")
    assert_error(attempt(tokens, "--set", "batch.seq=100000"), "too short")
    assert_error(attempt(tokens, "--set", "batch.row=3"), "unknown key batch.row (did you mean 'rows'?)")
    assert_error(attempt(tokens, "--set", "data.tokenizer=absent.json"), "absent.json")
    assert_error(attempt(tokens, "--model", "gpt-tinny"), "did you mean 'gpt-tiny'?")
    assert_error(attempt(tokens, "--grid", "x=2", "--ranks", "3"), "--ranks 3", "x=2")
    assert_error(attempt(tokens, "--ranks", "0"), "--ranks 0")
    assert_error(attempt(tokens, "--grid", "x=5"), "grids of 5 ranks that fit")
    assert_error(one.run(cli, "train", str(tmp_path / "absent.toml"))[0], "the config", "absent.toml does not exist")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert_error(one.run(cli, "sample", str(empty))[0], "has no config.toml")
    assert_error(one.run(cli, "report", str(empty))[0], "is not a run")
    assert one.run(cli, "train", "--grid", "x=0")[0].code == 2
    left = one.run(cli, "train", "--profile", "3-2")[0]
    assert left.code == 2
    assert "argument --profile: '3-2' is not a range of steps" in left.err


# --- after training


def test_a_column_of_zipped_lines_is_trained_on_and_a_change_of_it_is_refused(one: Ranks, tmp_path: Path) -> None:
    path, folder = tmp_path / "data.jsonl.gz", tmp_path / "run"

    def write(text: str) -> None:
        path.write_bytes(gzip.compress("".join(json.dumps({"body": text}) + "\n" for _ in range(40)).encode()))

    write("some words to train on")
    arguments = train_arguments("absent", folder, "--set", "plan.compare=false", steps=1)
    at = arguments.index("--data")
    arguments[at : at + 2] = ["--set", f'data.sources=[{{path = "{path}", column = "body"}}]']
    (left,) = one.run(cli, *arguments)
    assert (left.code, left.err) == (0, "")
    (left,) = one.run(cli, "train", "--resume", str(folder), "--steps", "2")
    assert (left.code, left.err) == (0, "")
    write("more words to train on")
    (left,) = one.run(cli, "train", "--resume", str(folder), "--steps", "3")
    assert_error(left, "data.jsonl.gz: source 0 has as many tokens as before, but other ones", "data.changed=accept")


def test_a_sample_does_not_depend_on_the_grid(one: Ranks, ranks, finished: tuple[Path, Left]) -> None:
    folder, _ = finished
    arguments = ["sample", str(folder), "--prompt", "the ", "--tokens", "24", "--temperature", "0", "--device", "cpu"]
    (alone,) = one.run(cli, *arguments)
    assert (alone.code, alone.err) == (0, "")
    assert alone.out.startswith("the ")
    assert len(alone.out) > 20
    data = read_config(folder / "config.toml").data.sources[0].path
    compare = train_arguments(data, folder.parent / "none", "--grid", "z=2", "--dtype", "fp64", "--compare-serial", "2")
    first, second = ranks(2).run(cli_as_rank, [*arguments, "--grid", "x=2"], compare)
    ranks(2).close()  # these ranks have the environment of a launcher now
    assert [left.out for left in first[:1] + second[:1]] == [alone.out, ""]
    assert_compared(first[1])
    assert second[1] == Left(0, "", "")


def assert_compared(left: Left) -> None:
    """`--compare-serial` shows the difference of every tensor, worst first."""
    assert (left.code, left.err) == (0, "")
    title, head, *rows = left.out.splitlines()
    assert title == "z=2 compared with one process: the largest difference of each tensor"
    assert head.split() == ["relative", "absolute", "step", "tensor"]
    relative = [float(row.split()[0]) for row in rows]
    assert relative == sorted(relative, reverse=True)
    assert 0 < relative[0] < 1e-10
    assert {row.split(maxsplit=3)[3].split()[0] for row in rows} == {"loss", "gradient", "parameter"}
    assert any(row.endswith("parameter layers.0.mlp.up.weight") for row in rows)


def test_report_writes_the_page(one: Ranks, finished: tuple[Path, Left], tmp_path: Path) -> None:
    folder, _ = finished
    (left,) = one.run(cli, "report", str(folder), "--out", str(tmp_path / "page.html"))
    assert (left.code, left.err) == (0, "")
    assert left.out.strip() == str(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<html" in page
    assert folder.name in page


# --- signals and processes


def test_ctrl_c_saves_the_step(one: Ranks, tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (left,) = one.run(interrupted, folder, signal.SIGINT, *train_arguments(tokens, folder, steps=100_000))
    step = column(folder, "step", "step")[-1]
    resume = f"fourfold train --resume {folder}"
    assert (left.code, left.err) == (
        130,
        f"fourfold: stopped by Ctrl-C; saved at step {step}; to continue: {resume}\n",
    )
    assert lines_of(folder)[-1] == {"event": "end", "step": step, "reason": "stopped by Ctrl-C"}


def test_a_second_ctrl_c_ends_at_once_and_says_what_is_not_saved(one: Ranks, tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = ("--set", "checkpoint.every=2", "--set", "checkpoint.asynchronous=false")
    (left,) = one.run(interrupted_twice, *train_arguments(tokens, folder, *more, steps=100_000))
    step = column(folder, "step", "step")[-1]
    assert left.code == 130
    saved = f"the newest checkpoint is that of step {step - 1}; to continue: fourfold train --resume {folder}"
    assert left.err == f"fourfold: interrupted; step {step} is not saved, {saved}\n"
    assert lines_of(folder)[-1] == {"event": "end", "step": step, "reason": "interrupted"}


def interrupted_twice(*arguments: str) -> Left:
    """A job: Ctrl-C in the third step, and once more in the same step."""
    launch_step = Run._launch

    def launch(run: Run, step: int) -> None:
        launch_step(run, step)
        if step == 3:
            run._read_steps()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.5 * SAME_PRESS_SECONDS)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_launch", launch)
        return cli(*arguments)


@pytest.fixture
def endless(tokens: str, tmp_path: Path) -> Iterator[Job]:
    """A job that trains until its test stops it. Each test has its own: one that waits for its test takes the cores."""
    folder = tmp_path / "run"
    more = ("--grid", "z=2", "--set", "train.evaluate_every=0", "--set", "log.tensorboard=false")
    job = started(warm.command, folder, train_arguments(tokens, folder, *more, steps=10**6))
    yield job
    end([job])


@pytest.fixture
def torchrun(tokens: str, tmp_path: Path) -> Iterator[Job]:
    """A job of two steps that torchrun starts."""
    folder = tmp_path / "run"
    arguments = ["--standalone", "--nproc-per-node", "2", "-m", "fourfold.cli"]
    arguments += train_arguments(tokens, folder, "--grid", "x=2", "--json", "-", steps=2)
    job = started(cold_torchrun, folder, arguments)
    yield job
    end([job])


def cold_torchrun(*arguments: str) -> int:
    """Whose ranks import everything themselves, as ranks of users do."""
    from torch.distributed.run import main

    main(list(arguments))
    return 0


@needs_proc
def test_a_rank_that_dies_ends_the_job(endless: Job) -> None:
    job = endless
    wait_for_steps(job)
    pids = ranks_of(job)
    assert pids.keys() == {0, 1}
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    left = ended(job, timeout=20)
    assert time.monotonic() - began < 10
    assert left.code not in (0, 130)
    assert f"fourfold: error: rank 1 (process {pids[1]}) was killed by SIGKILL" in left.err
    assert "Traceback" not in left.err
    assert not any(alive(pid) for pid in pids.values())
    assert len(read_run(job.folder).steps) >= 2


@needs_proc
def test_ctrl_c_ends_the_job_in_order(endless: Job) -> None:
    job = endless
    wait_for_steps(job)
    pids = ranks_of(job)
    began = time.monotonic()
    os.killpg(job.pid, signal.SIGINT)
    left = ended(job, timeout=20)
    assert time.monotonic() - began < 10
    step = column(job.folder, "step", "step")[-1]
    saved = f"stopped by Ctrl-C; saved at step {step}; to continue: fourfold train --resume {job.folder}"
    assert (left.code, left.err) == (130, f"{CTRL_C_HEARD}fourfold: {saved}\n")
    assert "Traceback" not in left.out
    assert not any(alive(pid) for pid in pids.values())
    assert lines_of(job.folder)[-1] == {"event": "end", "step": step, "reason": "stopped by Ctrl-C"}
    assert (job.folder / "checkpoints" / f"step-{step:08}").is_dir()


@pytest.mark.slow
def test_torchrun_starts_the_ranks(torchrun: Job) -> None:
    job = torchrun
    left = ended(job, timeout=120)
    assert left.code == 0, left.err
    found = json.loads(left.out)
    assert found["grid"] == Shape(x=2).named
    assert [step["loss"] for step in found["steps"]] == column(job.folder, "step", "loss")
    assert found["steps"][0]["wire_bytes"].keys() == {"x"}
    assert (job.folder / "checkpoints" / "step-00000002" / "rank-00001.safetensors").exists()


def test_weights_and_biases_gets_what_the_file_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for the package: what it is asked to start, log and finish."""
    calls: list[tuple[str, Any]] = []

    class Stub:
        def log(self, values: dict[str, float], step: int) -> None:
            calls.append(("log", (step, values)))

        def finish(self) -> None:
            calls.append(("finish", None))

    def init(**options: Any) -> Stub:
        calls.append(("init", options))
        return Stub()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    config = read_config(None, [("log.wandb", "project"), ("log.tensorboard", False)])
    lines, wandb = open_sinks(config.log, tmp_path, config)
    for sink in (lines, wandb):
        sink.write({"event": "step", "step": 3, "loss": 1.5, "mfu": None, "wire_bytes": {"x": 7}, "skipped": False})
        sink.close()
    started, logged, finished = calls
    assert started[1]["project"] == "project"
    assert started[1]["config"]["log"] == {
        "tensorboard": False,
        "wandb": "project",
        "peak_flops": None,
        "companions_every": 100,
    }
    assert logged == ("log", (3, {"step/loss": 1.5, "step/wire_bytes/x": 7.0, "step/skipped": 0.0}))
    assert finished == ("finish", None)


def test_weights_and_biases_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = read_config(None, [("log.wandb", "project"), ("log.tensorboard", False)])
    with pytest.raises(ImportError, match="pip install wandb"):
        open_sinks(config.log, tmp_path, config)


# --- ranks that differ


def joins(arguments: Sequence[str], change: Sequence[str], patched: Mapping[str, Any]) -> str:
    """A job: what joining says if rank 1 has other options or other code, as a second node under torchrun may have."""
    other = dist.get_rank() == 1
    with pytest.MonkeyPatch.context() as patch:
        for name, value in patched.items() if other else ():
            patch.setattr(name, value)
        try:
            options = parser().parse_args([*arguments, *(change if other else ())])
            train.make_grid(train.requested(options, 2), "cpu", options)
        except ValueError as error:
            return str(error)
    return ""


def no_sources() -> str:
    return "0badc0de"


@pytest.mark.parametrize(
    ("change", "patched", "said"),
    [
        (["--set", "optimizer.beta2=0.9"], {}, ["optimizer.beta2: rank 0 has '0.95', rank 1 has '0.9'"]),
        (["--set", "train.seed=7", "--set", "optimizer.clip=3"], {}, ["optimizer.clip", "also differ in train.seed"]),
        (["--profile", "2"], {}, ["--profile: rank 0 has 'range(0, 0)'"]),
        (["--grid", "x=2"], {}, ["grid.x: rank 0 has '1', rank 1 has '2'", "grid.data"]),
        ([], {"torch.__version__": "1.0"}, ["torch: rank 0 has", "rank 1 has '1.0'"]),
        ([], {"fourfold.commands.probe.sources": no_sources}, ["fourfold: rank 0 has", "(0badc0de)'"]),
    ],
)
def test_ranks_that_differ_do_not_train_together(change, patched, said, ranks, tokens: str, tmp_path: Path) -> None:
    arguments = train_arguments(tokens, tmp_path / "run", "--grid", "data=2")
    for found in ranks(2).run(joins, arguments, change, patched):
        assert found.startswith("ranks disagree on ")
        assert all(part in found for part in said), found


def test_differences_that_do_not_matter_pass(ranks, tokens: str, tmp_path: Path) -> None:
    """The folder is rank 0's, and data may be at another place on another node."""
    arguments = train_arguments(tokens, tmp_path / "run", "--grid", "data=2")
    where = [{"path": str(tmp_path / "copy.tokens")}]
    change = ["--out", str(tmp_path / "other"), "--set", f"data.sources={json.dumps(where).replace(':', ' =')}"]
    assert ranks(2).run(joins, arguments, change, {}) == ["", ""]


def test_replicas_are_compared_before_every_save(ranks, tokens: str, tmp_path: Path) -> None:
    """Between the comparisons after every N steps too: what differs is not saved."""
    more = {"watch.replicas_every": 0, "checkpoint.every": 2, "checkpoint.asynchronous": False}
    more |= {"data.sources": [{"path": tokens}], "model.layers": 1}
    config = config_of("gpt-tiny", "fp32", STEPS, tmp_path, Shape(data=2), more)
    for found in ranks(2).run(flips, config, tmp_path / "run"):
        assert "parameters or optimizer state of ranks 0, 1 differ" in found
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def flips(config: TrainConfig, folder: Path) -> str:
    """A job: a bit of one of rank 1's moments flips in step 3."""
    launch_step = Run._launch

    def launch(run: Run, step: int) -> None:
        launch_step(run, step)
        if step == 3 and run.grid.rank == 1:
            state = next(iter(run.optimizer.state.values()))
            state["exp_avg_sq"].view(torch.int32).view(-1)[5] ^= 1 << 20

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "_launch", launch)
        try:
            trained(config, folder)
        except (ReplicasDifferError, FailedElsewhereError) as error:
            return str(error)
    return ""
