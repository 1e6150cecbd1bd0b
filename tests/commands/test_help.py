"""What the commands say of themselves: options, examples that parse, the nearest spelling; what shells complete."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fourfold import cli
from fourfold.commands import completion, options
from fourfold.models.sizes import SIZES

NAMES = [
    "demo",
    "plan",
    "train",
    "report",
    "sample",
    "data",
    "checkpoint",
    "import",
    "export",
    "calibrate",
    "launch",
    "doctor",
    "schedule",
    "experts",
    "completion",
]


def commands_of(one: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [action for action in one._actions if isinstance(action, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def all_of(one: argparse.ArgumentParser, *path: str) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield path, one
    for name, inner in commands_of(one).items():
        yield from all_of(inner, *path, name)


ALL = dict(all_of(cli.parser()))
COMMANDS = {path: one for path, one in ALL.items() if path}


def examples(text: str) -> list[list[str]]:
    """The arguments of `fourfold` in each line that runs it; what the shell does with the output is left out."""
    lines = re.sub(r"\\\n +", "", text).splitlines()  # a command may take two lines
    found = [re.search(r"^ +(?:fourfold|torchrun .*-m fourfold\.cli) (.*)$", line) for line in lines]
    return [shlex.split(match[1].partition(" > ")[0]) for match in found if match]


def test_commands_stand_in_the_order_of_a_first_day() -> None:
    assert list(commands_of(cli.parser())) == NAMES


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_command_has_examples_that_parse(path: tuple[str, ...]) -> None:
    one = COMMANDS[path]
    found = examples(one.format_help())
    assert 1 <= len(found) <= 5
    assert any(tuple(words[: len(path)]) == path for words in found)
    for words in found:
        assert callable(cli.command(cli.parser().parse_args(words).run))
    for line in one.format_help().splitlines():
        assert len(line) <= options.WIDEST + 12, line


def test_the_first_help_says_where_to_begin() -> None:
    top = cli.parser()
    text = top.format_help()
    assert ["demo"] in examples(text)
    assert "docs/index.md" in text
    for name in NAMES:
        assert re.search(rf"^    {name} +\w", text, re.MULTILINE), f"{name} and its help stand in one line"
    for words in examples(text):
        top.parse_args(words)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_every_option_has_a_help_with_its_default(path: tuple[str, ...]) -> None:
    text = ALL[path].format_help()
    for action in ALL[path]._actions:
        if isinstance(action, argparse._SubParsersAction):
            assert all(listed.help for listed in action._choices_actions)
            continue
        assert action.help, action
        assert all(option in text for option in action.option_strings)
        takes_a_value = action.option_strings and action.nargs != 0 and not action.required
        if takes_a_value and action.default not in (None, argparse.SUPPRESS, []):
            assert "default" in action.help, action


def test_names_that_options_repeat_are_those_that_exist() -> None:
    from fourfold.commands.import_export import DTYPES
    from fourfold.schedule.named import BUILDERS
    from fourfold.schedule.stages import PLACEMENTS
    from fourfold.train.signals import INTERRUPTED

    assert (tuple(BUILDERS), PLACEMENTS) == (options.SCHEDULES, options.PLACEMENTS)
    assert tuple(DTYPES) == options.EXPORT_DTYPES
    assert cli.INTERRUPTED == INTERRUPTED


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "fourfold: error: there is no command 'trian' (did you mean 'train'?); choose from demo, plan, "),
        ("checkpoint lst runs", "fourfold checkpoint: error: there is no command 'lst' (did you mean 'list'?)"),
        ("train --gird x=2", "fourfold train: error: there is no option --gird (did you mean '--grid'?)"),
        ("plan --modle=gpt-80b", "fourfold plan: error: there is no option --modle (did you mean '--model'?)"),
        ("--verison", "fourfold: error: there is no option --verison (did you mean '--version'?)"),
        ("train --zzz", "fourfold train: error: there is no option --zzz\n"),
        ("train --dtype bf61", "argument --dtype: invalid value 'bf61' (did you mean 'bf16'?); choose from fp32, bf16"),
        ("train --steps ten", "argument --steps: 'ten' is not a whole number; write for example 8"),
        ("sample runs --top-p most", "argument --top-p: 'most' is not a number; write for example 0.8 or 60"),
        ("train one.toml two.toml", "fourfold train: error: unexpected argument 'two.toml'"),
        ("plan --model gpt-80b", "required: --machine, --devices"),
        ("report", "fourfold report: error: the following arguments are required: RUN"),
    ],
)
def test_what_is_misspelt_gets_the_nearest_spelling(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(shlex.split(words))
    assert left.value.code == 2
    found = capsys.readouterr().err
    assert said in found
    assert found.endswith(" --help` shows options and examples\n")
    assert len(found.splitlines()) == 2


@pytest.mark.parametrize("words", [[], ["checkpoint"], ["data"], ["schedule"]])
def test_without_a_command_the_help_is_shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    assert left.value.code == 2
    assert capsys.readouterr().err == ALL[tuple(words)].format_help()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "train folder",
            "folder is a folder; give a config, CONFIG.toml, or resume the run in it with --resume",
        ),
        ("train absent.toml", "the config absent.toml does not exist; give the path of a TOML file"),
        (
            "train --set rows=3",
            "'rows' is not a key (did you mean batch.rows?); write section.key=value; the sections",
        ),
        ("train --set optimizer.rat=3", "unknown key optimizer.rat (did you mean 'learning_rate'?); optimizer has"),
        ("train --set seq=3", "'seq' is not a key (did you mean model.seq or batch.seq?); write section.key=value"),
        (
            "train --set batch.rows=16 --set batch.micro_steps=3",
            "batch.rows=16 cannot be split into micro_steps=3 equal parts; use 18",
        ),
        ("train --steps 0", "train.steps=0 must be at least 1"),
        ("train --set 'data.sources=[{weight=1}]'", "data.sources[0].path is missing; data.sources[0] needs path"),
        ("plan PLAN --price 2.5", "--price 2.5 needs the length of the training; give --tokens, such as 300G"),
        ("plan PLAN --tokens 1G --price 0", "--price 0: it must be above 0"),
        (
            "plan PLAN --why x=4",
            "that grid has 4 ranks, but the plan has 8 devices; give sizes with the product 8, or",
        ),
        (
            "plan PLAN --seq 9999",
            "--seq 9999 is longer than the 128 learned positions of gpt-tiny; give 128 or less, or ",
        ),
        ("report absent", "absent is not a folder; give the folder that `fourfold train` wrote its run to"),
        ("sample folder", "folder has no config.toml; give the folder of a run"),
        ("demo --out file/one", "file/one: Not a directory; give another path"),
    ],
)
def test_errors_give_the_rule_the_values_and_the_way_out(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    planned = "--model gpt-tiny --machine perlmutter --devices 8 --batch-tokens 1k"
    assert cli.main(shlex.split(words.replace("PLAN", planned))) == 1
    found = capsys.readouterr().err
    assert said in found
    assert found.startswith("fourfold: error: ")
    assert len(found.splitlines()) == 1


def test_errors_of_the_system_have_a_way_out_and_no_number() -> None:
    assert cli.plain(FileNotFoundError(2, "No such file or directory", "a/b")) == (
        "a/b: No such file or directory; check the path, or make its folder first"
    )
    assert cli.plain(OSError(28, "cannot write a.json (No space left on device)")) == (
        "cannot write a.json (No space left on device)"
    )
    assert cli.plain(FileNotFoundError("there is no config a.toml")) == "there is no config a.toml"


# --- completion

COMPLETED = {
    "tr": ["train"],
    "checkpoint ver": ["verify"],
    "train --gr": ["--grid"],
    "train --grid a": ["auto"],
    "train --dtype b": ["bf16"],
    "train --model llama-3-8": ["llama-3-8b"],
    "train --model mo": ["moe-tiny", "model.toml"],
    "plan --machine per": ["perlmutter"],
    "train mo": ["model.toml"],
    "report ru": ["runs"],
    "completion f": ["fish"],
}
DRIVE = """
source "$1"
shift
COMP_WORDS=(fourfold "$@")
COMP_CWORD=$#
_shtab_fourfold 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, folder: Path) -> Path:
    path = folder / f"fourfold.{shell}"
    path.write_text(completion.script(cli.parser(), shell))
    return path


def test_names_that_are_completed() -> None:
    assert completion.known_models() == list(SIZES)
    assert "perlmutter" in completion.known_machines()


def test_bash_completes_commands_options_names_and_files(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    path = script("bash", tmp_path)
    subprocess.run(["bash", "-n", path], check=True, timeout=30)
    (tmp_path / "model.toml").touch()
    (tmp_path / "runs").mkdir()
    for words, expected in COMPLETED.items():
        command = ["bash", "-c", DRIVE, "bash", path, *words.split()]
        left = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=30)
        assert left.stdout.split() == expected, words


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_accept_the_script(shell: str, tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    path = script(shell, tmp_path)
    assert "gpt-125m" in path.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    subprocess.run([shell, "-n", path], check=True, timeout=30)
    if shell == "fish":
        for words, expected in {"train --model gpt-12": "gpt-125m", "launch --sl": "--slurm"}.items():
            command = ["fish", "-c", f"source {path}; complete -C 'fourfold {words}'"]
            left = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
            assert [line.split("\t")[0] for line in left.stdout.splitlines()] == [expected], words


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == completion.script(cli.parser(), "bash") + "\n"


def test_without_shtab_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['shtab'] = None\nfrom fourfold.cli import main\nsys.exit(main(['completion', 'bash']))"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert left.returncode == 1
    assert left.stderr == (
        "fourfold: error: fourfold completion needs the package shtab; install fourfold[train], or shtab\n"
    )


def test_a_plan_does_not_promise_the_fastest_grid() -> None:
    """By default the choice is robust: `fourfold plan` and `--grid auto` may take a grid that is not the fastest."""
    asked = ["plan", "--model", "gpt-tiny", "--machine", "laptop", "--devices", "4"]
    assert cli.parser().parse_args(asked).risk == "robust"
    pages = [Path(__file__).parents[2] / name for name in ("README.md", "docs/index.md", "docs/config.md")]
    texts = [ALL[()].format_help(), *(ALL[name,].format_help() for name in ("plan", "train"))]
    for text in [*texts, *(page.read_text(encoding="utf-8") for page in pages)]:
        assert not re.search(
            r"finds?\s+the\s+fastest\s+grid|planner\s+finds\s+(the\s+mesh\s+that\s+is\s+)?fastest", text
        )
    for text in texts[1:]:
        assert "loses least if the machine is not as its file says" in " ".join(text.split())
