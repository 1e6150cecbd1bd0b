"""Files that are not what they should be: every reader answers with one error for the user, never with a traceback."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold import cli
from fourfold.axes import AXES
from fourfold.checkpoint.format import RECORD, read_record
from fourfold.checkpoint.hf_weights import INDEX, _weight_files
from fourfold.commands.completion import parsers
from fourfold.commands.options import parser
from fourfold.data.sources import _text_of_line
from fourfold.data.tokenizer import load_tokenizer
from fourfold.errors import USERS
from fourfold.models.hugging_face import read_keys
from fourfold.models.open import open_model
from fourfold.parse import MAX_DEPTH, parse_json, parse_toml
from fourfold.planner.machine import load_machine
from fourfold.report.run_data import read_run
from fourfold.train.checkpoints import PASSED_OVER, earlier_parts, read_skipped
from fourfold.train.config import read_config
from fourfold.train.run_folder import read_events

DEEP = 100_000
"""Levels of nesting: far beyond Python's limit of recursion."""
JSON = {
    "empty": b"",
    "words": b"hello",
    "cut": b'{"model": "gpt',
    "binary": bytes(range(256)),
    "invalid UTF-8": b'{"model": "\xff\xfe"}',
    "deep lists": b'{"model": ' + b"[" * DEEP,
    "deep lists that are complete": b"[" * DEEP + b"]" * DEEP,
    "deep tables": b'{"a":' * DEEP,
    "deeper than any file": b"[" * 500 + b"]" * 500,
    "an enormous number": b'{"step": ' + b"9" * 10_000 + b"}",
    "another type": b"[1, 2]",
    "null": b"null",
}
TOML = {
    "words": b"hello",
    "cut": b"[model",
    "binary": bytes(range(256)),
    "invalid UTF-8": b'name = "\xff\xfe"',
    "deep lists": b"a = " + b"[" * DEEP,
    "deep lists that are complete": b"a = " + b"[" * 500 + b"]" * 500,
    "deep tables": b"a = " + b"{b = " * DEEP,
    "dots": b".".join([b"a"] * 5000) + b" = 1",
    "an enormous number": b"a = " + b"9" * 10_000,
}


def _run(folder: Path) -> None:
    for name in ("config.toml", "metrics.jsonl"):
        (folder / name).write_text("")
    read_run(folder)


READERS: dict[str, tuple[str, dict[str, bytes], Callable[[Path], object]]] = {
    "config of a run": ("run.toml", TOML, lambda folder: read_config(folder / "run.toml")),
    "model": ("model.toml", TOML, lambda folder: open_model(str(folder / "model.toml"))),
    "machine": ("machine.toml", TOML, lambda folder: load_machine(str(folder / "machine.toml"))),
    "config.json": ("config.json", JSON, lambda folder: read_keys(folder / "config.json")),
    "index of weights": (INDEX, JSON, _weight_files),
    "record of a checkpoint": (RECORD, JSON, read_record),
    "data to pass over": (PASSED_OVER, JSON, lambda folder: read_skipped(folder, 1)),
    "run.json": ("run.json", JSON, _run),
    "tokenizer": ("tokenizer.json", JSON, lambda folder: load_tokenizer(folder / "tokenizer.json")),
    "texts": (
        "a.jsonl",
        {name: content for name, content in JSON.items() if content},  # a blank line has no text
        lambda folder: _text_of_line(
            folder / "a.jsonl", 1, (folder / "a.jsonl").read_bytes().replace(b"\n", b" "), "text"
        ),
    ),
}
CASES = [(reader, kind) for reader, (_, contents, _) in READERS.items() for kind in contents]


@pytest.mark.parametrize(("reader", "kind"), CASES, ids=[" - ".join(case) for case in CASES])
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, reader: str, kind: str) -> None:
    name, contents, read = READERS[reader]
    (tmp_path / name).write_bytes(contents[kind])
    with pytest.raises(USERS) as caught:
        read(tmp_path)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("kind", JSON)
def test_a_bad_line_of_a_record_is_left_out(tmp_path: Path, kind: str) -> None:
    """metrics.jsonl and the history in run.json: a run continues without them, and its report says so."""
    path, good = tmp_path / "metrics.jsonl", b'{"event": "step", "step": 1, "loss": 2.0}'
    bad = JSON[kind].replace(b"\n", b" ")
    path.write_bytes(b"\n".join([good, bad, good.replace(b"1,", b"2,")]) + b"\n")
    assert [event["step"] for _, event in read_events(path)] == [1, 2]
    (tmp_path / "run.json").write_bytes(JSON[kind])
    assert earlier_parts(tmp_path, 1) == []
    (tmp_path / "run.json").write_text(json.dumps({"model": "a", "grid": {"x": 2}}))
    (tmp_path / "config.toml").write_bytes(JSON[kind])
    run = read_run(tmp_path)
    assert [step.step for step in run.steps] == [1, 2]
    assert bool(run.notes) == bool(bad.strip() and kind)


@pytest.mark.parametrize("value", ["[" * DEEP, "[" * 500 + "]" * 500, "{a=" * DEEP, "9" * 10_000])
def test_a_setting_that_nobody_can_mean(capsys: pytest.CaptureFixture[str], value: str) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["train", "--set", f"batch.rows={value}"])
    assert left.value.code == 2
    assert "batch.rows: " in capsys.readouterr().err


def test_a_command_answers_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.toml").write_bytes(TOML["deep lists"])
    assert cli.main(["train", str(tmp_path / "run.toml")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"nested more than {MAX_DEPTH} deep" in said


def test_marks_of_editors_and_double_keys_are_no_trouble() -> None:
    mark = b"\xef\xbb\xbf"
    assert parse_json(mark + b'{"a": 1, "a": 2}') == {"a": 2}
    assert parse_toml(mark + b"a = 1") == {"a": 1}
    with pytest.raises(ValueError, match="overwrite"):
        parse_toml("a = 1\na = 2")
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert parse_json(deepest) and parse_toml(f"a = {deepest[1:-1]}")


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"

    def write(**vocab: int) -> None:
        path.write_text(
            json.dumps({"version": "1.0", "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}})
        )

    write()
    with pytest.raises(ValueError, match="without a token"):
        load_tokenizer(path)
    write(a=0, **{"</s>": 1})
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot encode a text"):
        load_tokenizer(path).encode_many([b"b"])
    with pytest.raises(FileNotFoundError, match="there is no tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no tokenizer"):
        load_tokenizer("a\0b")


# --- options and variables

OUTPUTS = {
    "plan --model gpt-tiny --machine perlmutter --devices 8": ("--json", "--html", "--trace", "--config"),
    "train": ("--json",),
    "doctor": ("--json",),
    "report RUN": ("--out",),
    "calibrate": ("--out",),
    "data lengths a.txt": ("--json",),
    "experts show RUN": ("--json",),
}
"""The options of commands that name a file to write."""
HUGE = str(10**12)
ABSURD = (
    f"train --grid x={2**40}",
    f"train --grid x={HUGE},y={HUGE}",
    f"train --grid {','.join(f'{axis}=1024' for axis in AXES)}",
    "train --ranks 100000",
    f"train --ranks {HUGE}",
    "train --grid data=100000",
    f"plan --model gpt-tiny --machine perlmutter --devices {HUGE}",
    f"plan --model gpt-tiny --machine perlmutter --devices 8..{HUGE}",
    f"plan --model gpt-tiny --machine perlmutter --devices 8 --grid x={2**40}",
    f"plan --model gpt-tiny --machine perlmutter --devices 8 --seq {HUGE}",
    "plan --model gpt-tiny --machine perlmutter --devices 8 --batch-tokens 9999999T",
    f"schedule show 1f1b --pipe 4 --micro {10**9}",
    "schedule show gpipe --pipe 100000 --micro 1",
    f"schedule show blocks:{10**9} --pipe 2 --micro {10**6}",
    f"schedule show interleaved --pipe 2 --chunks {10**9} --micro 2",
    f"schedule find --pipe 4 --micro {10**9}",
    f"schedule find --pipe 4 --chunks {10**9} --micro 4",
    "data lengths three.txt",
    f"data lengths long.txt --rows {HUGE}",
    f"data lengths long.txt --bags {HUGE}",
    f"data lengths long.txt --seq 8 --rows 2 --context {HUGE}",
    f"launch run.toml --slurm --out /runs/one --devices {HUGE}",
    f"launch run.toml --slurm --out /runs/one --devices 8 --per-node {HUGE}",
    f"calibrate --out here.toml --ranks {HUGE} --device cpu",
    f"doctor --preflight --ranks {HUGE} --device cpu",
    f"train --set batch.rows={10**30}",
    f"train --set batch.rows={HUGE}",
    f"train --set batch.seq={HUGE}",
    f"train --set batch.micro_steps={HUGE} --set batch.rows={HUGE}",
    f"train --set model.layers={HUGE}",
    f"train --set model.hidden={HUGE}",
    "train --set model.hidden=2000000000 --set model.mlp_hidden=2000000000",
    f"train --set model.vocab={HUGE}",
    "train --set model.norm_eps=nan",
    "train --set model.norm_eps=-1.0",
    "train --set model.rope_theta=-1.0",
    "train --set model.rope_theta=inf",
    "train --set model.rope_factor=nan",
    "train --set model.rope_attention=-0.5",
    "train --set model.route_scale=nan",
    "train --set optimizer.eps=nan",
    "train --set optimizer.floor=nan",
    "train --set optimizer.decay=nan",
    "train --set lora.rank=4 --set lora.alpha=nan",
    "train --set lora.rank=4 --set lora.alpha=inf",
    "train --set log.peak_flops=inf",
    "train --minutes nan",
    "train --epochs inf",
    "sample RUN --temperature nan",
    "train --set train.out=",
    "train --set data.tokenizer=",
    "train --set 'data.sources=[{path = \"\"}]'",
    "train --set batch=3",
)
"""Command lines that cannot be meant: each is refused within seconds, in one line."""


def test_no_option_takes_an_empty_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--data "$UNSET"` would train on the working directory, and `--resume "$UNSET"` resume there."""
    monkeypatch.chdir(tmp_path)
    may = {"--prompt", "--prefix"}
    checked = 0
    for command in parsers(parser()):
        for action in command._actions:
            if action.nargs == 0 or isinstance(action, argparse._SubParsersAction):
                continue
            name = "/".join(action.option_strings) or action.dest
            for empty in ("", "  "):
                try:
                    command._get_values(action, [empty])
                    refused = False
                except argparse.ArgumentError as error:
                    refused = "is empty" in str(error)
                assert refused or name in may, f"{command.prog} {name} takes {empty!r}"
            checked += 1
    assert checked > 100


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.toml").mkdir()
    for words, names in OUTPUTS.items():
        for name in names:
            for path, said in (("folder.toml", "is a folder"), ("no/such.toml", "the folder no does not exist")):
                with pytest.raises(SystemExit) as left:
                    cli.main([*words.split(), name, path])
                assert left.value.code == 2
                assert said in capsys.readouterr().err, f"{words} {name} {path}"
    Path("a.txt").write_text("words")
    Path("folder.tokens").mkdir()
    assert cli.main(["data", "prepare", "a.txt", "--out", "folder.tokens"]) == 1
    assert "folder.tokens is a folder" in capsys.readouterr().err
    assert sorted(map(str, Path().iterdir())) == ["a.txt", "folder.tokens", "folder.toml"]


def test_what_nobody_can_mean_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("three.txt").write_text("abc")
    Path("long.txt").write_text("words " * 20_000)
    Path("run.toml").write_text('[model]\nname = "gpt-tiny"\n')
    faults = []
    for words in ABSURD:
        began = time.monotonic()
        try:
            code = cli.main(shlex.split(words))
        except SystemExit as left:
            code = left.code
        except Exception as error:  # what a user would see as a traceback
            code = f"{type(error).__name__}: {error}"
        said, seconds = capsys.readouterr().err, time.monotonic() - began
        if code not in (1, 2) or "error: " not in said or "Traceback" in said or seconds > 20:
            faults.append((words, code, round(seconds, 1), said[-300:]))
    assert not faults
    assert not Path("runs").exists()
