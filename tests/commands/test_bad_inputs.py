"""Files that are not what they should be: every reader answers with one error for the user, never with a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold import cli
from fourfold.checkpoint.format import RECORD, read_record
from fourfold.checkpoint.hf_weights import INDEX, _weight_files
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
