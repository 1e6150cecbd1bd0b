"""Files that are not what they should be: every reader answers with one error for the user, never with a traceback."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fourfold import cli, environment
from fourfold.axes import AXES
from fourfold.checkpoint.format import RECORD, read_record
from fourfold.checkpoint.hf_weights import INDEX, _weight_files
from fourfold.commands.completion import parsers
from fourfold.commands.doctor import explain
from fourfold.commands.options import parser
from fourfold.data.sources import _text_of_line, open_source
from fourfold.data.tokenizer import load_tokenizer
from fourfold.errors import USERS, nearest, readable
from fourfold.expert_counts import CountsFile, StepCounts
from fourfold.models.hugging_face import read_keys
from fourfold.models.open import open_model
from fourfold.parse import MAX_DEPTH, parse_json, parse_toml
from fourfold.planner.machine import load_machine
from fourfold.report.run_data import read_run
from fourfold.report.run_page import write_report
from fourfold.schedule.action import ScheduleError
from fourfold.schedule.text import from_csv
from fourfold.shape import Shape
from fourfold.train.checkpoints import PASSED_OVER, earlier_parts, read_skipped
from fourfold.train.config import read_config
from fourfold.train.launch import MAX_PAUSE, restart_pause
from fourfold.train.run_folder import read_events
from fourfold.watch.tape import Tape, tape_path

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


def test_a_name_of_megabytes_is_neither_compared_nor_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, name = tmp_path / "run.toml", "optimizer" * 5000
    megabytes = name * 240
    began = time.monotonic()
    for text in (
        f"[{megabytes}]\na = 1\n",
        f"[{name}]\na = 1\n",
        f'[model]\nname = "{name}"\n',
        f"[optimizer]\n{name} = 3\n",
        f'[data]\npack = "{name}"\n',
    ):
        path.write_text(text)
        assert cli.main(["train", str(path)]) == 1
        said = capsys.readouterr().err
        assert len(said) < 5000 and said.count("\n") == 1, text[:20]
    assert nearest(megabytes, ["optimizer"]) == ""
    said = readable(f"the key {megabytes} is unknown; give another")
    assert said.startswith("the key optimizer") and said.endswith("is unknown; give another") and len(said) < 4100
    assert time.monotonic() - began < 20


def test_variables_of_launchers_that_make_no_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    alone = {"RANK": "0", "WORLD_SIZE": "1"}

    def read(*, nccl: bool = True) -> None:
        here = environment.Environment.read()
        environment.was_restarted()
        environment.master_address()
        assert here.local_world is None or here.local_world < 10**9
        environment.stay_on_loopback(here, nccl=nccl)
        environment.command_began()

    for variables, said in (
        (slurm, "MASTER_ADDR is not set"),
        (slurm | {"SLURM_NODELIST": "", "SLURM_JOB_NODELIST": ""}, "MASTER_ADDR is not set"),
        (slurm | {"SLURM_NODELIST": "[]"}, "cannot read the SLURM node list '\\[\\]'"),
        (slurm | {"SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "abc"}, "SLURM_JOB_ID='abc' is not a whole number"),
        (slurm | {"SLURM_PROCID": ""}, "SLURM_PROCID is not set"),
        (slurm | {"SLURM_LOCALID": "-1"}, "SLURM_LOCALID=-1 must be at least 0"),
        (slurm | {"SLURM_STEP_NUM_TASKS": "9" * 30}, "SLURM_STEP_NUM_TASKS=9+ is not a number of anything in a job"),
        (alone | {"TORCHELASTIC_RESTART_COUNT": "many"}, "TORCHELASTIC_RESTART_COUNT='many' is not a whole number"),
        (alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 must be below"),
        *(
            (alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} | odd, said)
            for odd, said in (
                (
                    {"GLOO_SOCKET_IFNAME": "nope0"},
                    "GLOO_SOCKET_IFNAME='nope0': 'nope0' is no network interface of .*has .*lo",
                ),
                ({"NCCL_SOCKET_IFNAME": "=nope"}, "NCCL_SOCKET_IFNAME='=nope': 'nope' is no network interface"),
                ({"NCCL_SOCKET_IFNAME": "=l"}, "NCCL_SOCKET_IFNAME='=l': 'l' is no network interface"),
                ({"GLOO_SOCKET_IFNAME": "lo,nope0"}, "'nope0' is no network interface"),
                ({"GLOO_SOCKET_IFNAME": "^lo"}, "'\\^lo' is no network interface"),
                ({"FOURFOLD_BEGAN": "today"}, "FOURFOLD_BEGAN='today' is not a number of seconds"),
            )
        ),
    ):
        monkeypatch.setattr(os, "environ", dict(variables))
        with pytest.raises(ValueError, match=said):
            read()
    sound = alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "lo"}
    for more in (
        {"NCCL_SOCKET_IFNAME": "^docker"},
        {"NCCL_SOCKET_IFNAME": "^=lo"},
        {"NCCL_SOCKET_IFNAME": "l"},
        {"NCCL_SOCKET_IFNAME": "nope0,=lo,lo:20000"},
        {"NCCL_SOCKET_IFNAME": "=lo:20000"},
        {"GLOO_SOCKET_IFNAME": "lo:1"},
        {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": ""},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x999999999),nonsense"},
        {"TORCHELASTIC_RESTART_COUNT": "2000"},
    ):
        monkeypatch.setattr(os, "environ", sound | more)
        read()
    monkeypatch.setattr(os, "environ", sound | {"NCCL_SOCKET_IFNAME": "ib0"})
    read(nccl=False)  # a name for a cluster, in a job that runs on the CPU of a login node
    ports = set()
    for step, job in ((0, 7), (1, 7), (0, 8), (0xFFFFFFFA, 7), (0, 0xFC000007)):  # federated clusters have such jobs
        variables = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step), "SLURM_STEP_NODELIST": "localhost"}
        monkeypatch.setattr(os, "environ", slurm | variables)
        ports.add(environment.master_address()[1])
    assert len(ports) == 5, "steps of one job that run at the same time meet"
    assert [restart_pause(times) for times in (1, 3, 1026, 10**9)] == [1, 4, MAX_PAUSE, MAX_PAUSE]


def test_numbers_without_end_and_paths_that_a_shell_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, said in (
        ("sample run --tokens 100000000000", "--tokens: 100000000000 is not within its bounds; give 0 to 1048576"),
        ("sample run --tokens -1", "--tokens: -1 is not within its bounds"),
        ("train --compare-serial 1000000000", "--compare-serial: 1000000000 is not within its bounds; give 1 to 1000"),
        ("train --compare-serial 0", "--compare-serial: 0 is not within its bounds"),
    ):
        with pytest.raises(SystemExit):
            cli.main(words.split())
        assert said in capsys.readouterr().err
    monkeypatch.setenv("HOME", str(tmp_path))
    for words, name in (("train --out=~/a", "out"), ("train --resume=~/a", "resume"), ("report ~/a", "folder")):
        assert getattr(parser().parse_args(words.split()), name) == tmp_path / "a"
    for name, place in (("gone.tokens", "/not/mounted"), ("loop.tokens", "loop.tokens")):
        (tmp_path / name).symlink_to(place)
        with pytest.raises(FileNotFoundError, match=f"{name} is a link to '{place}', which is not there"):
            open_source(tmp_path / name, tokenizer=None, cache=tmp_path)


def test_files_that_no_reader_expects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is an error that names the file or what is wrong with it, in words."""
    wide = tmp_path / "wide.csv"
    wide.write_text("0F0," + "x" * 200_000)
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    model = {"type": "WordLevel", "vocab": {"a": 0, "?": 1, "</s>": 2}, "unk_token": "?"}
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(json.dumps({"version": "1.0", "pre_tokenizer": pattern, "model": model}))
    (tmp_path / "text.txt").write_text("a" * 30 + "b")
    pickles = tmp_path / "it's; a folder"
    pickles.mkdir()
    (pickles / "pytorch_model.bin").touch()
    for number in ("F99999999999", "1F" + "9" * 30):
        with pytest.raises(ScheduleError, match="is no action"):
            from_csv(f"0{number}")
    out = str(tmp_path / "a.tokens")
    for words, said in (
        (["schedule", "check", str(wide)], "wide.csv: the file is no CSV (field larger than field limit"),
        (["data", "prepare", str(chats), "--out", out], '"messages" is a list of turns, so this is a file of chats'),
        (
            ["data", "prepare", str(chats), "--column", "messages", "--out", out],
            "apply_chat_template(..., tokenize=",
        ),
        (
            ["data", "prepare", str(tmp_path / "text.txt"), "--tokenizer", str(tokenizer), "--out", out],
            "the tokenizer tokenizer.json cannot encode a text: Onig: Regex search error: retry-limit-in-match over",
        ),
    ):
        assert cli.main(words) == 1, words
        assert said in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(ValueError, match="a pickle, which can run code and is never opened") as caught:
        _weight_files(pickles)
    command = shlex.split(str(caught.value).partition("convert it: ")[2])
    assert command[:2] == ["python", "-c"] and len(command) == 3
    compile(command[2], "the line for the shell", "exec")
    assert json.dumps(str(pickles)) in command[2]


def test_sizes_in_a_config_json_that_no_model_has(tmp_path: Path) -> None:
    keys = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64,
    }  # fmt: skip
    path = tmp_path / "config.json"
    for name, value in (
        *((name, 10**30) for name in keys if name != "model_type"),
        ("num_hidden_layers", 10**6),
        ("hidden_size", 2**30),
        ("rms_norm_eps", -1.0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0.0),
        ("rope_theta", float("inf")),
        ("rope_theta", 10**400),
        ("num_hidden_layers", "2"),
        ("hidden_size", 64.5),
        ("vocab_size", True),
        ("hidden_size", [64]),
    ):
        more = {"intermediate_size": 2**30, "num_hidden_layers": 4096} if value == 2**30 else {}
        path.write_text(json.dumps(keys | {name: value} | more))
        with pytest.raises(ValueError, match=r"config\.json|=") as caught:
            open_model(str(path))
        assert len(str(caught.value)) < 2000, name


def test_one_damaged_tape_hides_no_other(tmp_path: Path) -> None:
    for rank in range(3):
        Tape(tape_path(tmp_path, rank), rank, Shape(x=3)).doing("computing")
    (tmp_path / "run.json").write_text("{}")
    tape = tape_path(tmp_path, 1)
    whole = tape.read_bytes()
    for kind, content in {
        "cut": whole[:100],
        "empty": b"",
        "head": whole[:12] + b"\xff" * 20 + whole[32:],
        "noise": whole[:8] + bytes(value ^ 0x5A for value in whole[8:]),
    }.items():
        tape.write_bytes(content)
        lines = "\n".join(explain(tmp_path))
        assert "rank-00001.tape" in lines and "rank 0, last seen" in lines and "rank 2, last seen" in lines, kind


def test_a_report_of_counts_alone(tmp_path: Path) -> None:
    """A run that ended before its first record has counts of its experts in a file of their own."""
    for name, text in {
        "config.toml": "",
        "metrics.jsonl": "",
        "run.json": '{"model": "moe-tiny", "grid": {"x": 1}}',
    }.items():
        (tmp_path / name).write_text(text)
    counts = CountsFile(tmp_path, blocks=1, experts=2)
    for step in (1, 2):
        counts.write(StepCounts(step, [[3, 5]]))
    counts.close()
    page = write_report(tmp_path).read_text()
    assert "<html" in page and "expert" in page
