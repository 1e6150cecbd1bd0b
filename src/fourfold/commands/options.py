"""The command line: the parser, the options and help texts of every command, and the types of option values.

Nothing here imports torch, so that `fourfold --help` and the error for a misspelled option appear at once. A command
names its body as `module:function` in this package; `fourfold.cli` imports the body after it has parsed the options.
"""

from __future__ import annotations

import argparse
import inspect
import math
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, NoReturn

from fourfold import __version__
from fourfold.axes import AXES, GIVEN_BESIDES, MOST_DEVICES
from fourfold.errors import nearest, readable
from fourfold.parse import parse_toml
from fourfold.synonyms import explain_axis, explain_synonym

RANKS = "number of local ranks to start; default: the size of the grid, else the number of GPUs, else 1"
DEVICE = "device of the ranks; default: cuda if there is a GPU, else cpu"
DEVICES = ("cpu", "cuda")
SET = "change a key of the config; may be repeated; `fourfold train --print-config` shows all keys"
EOD = "the token that ends a document; default: a token with one of the usual names, such as <|endoftext|>"
EXPORT_DTYPES = ("fp32", "bf16", "fp16")
SHELLS = ("bash", "zsh", "fish")
MOST_COMPARED = 1000
"""The most steps of --compare-serial: their batches are read before the first, and rounding grows from step to step."""
MOST_SAMPLED = 1 << 20
"""The most tokens of a sample: each computes its whole context again."""
PLACEMENTS = ("loop", "wave")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "v-half", "zb-v")
"""The named schedules of pipelines, besides blocks:u; a test compares them with those that exist."""
OTHER_WORDS = {
    "resume": "train --resume RUN",
    "continue": "train --resume RUN",
    "finetune": "train --resume IMPORTED, after fourfold import",
    "generate": "sample RUN",
    "inference": "sample RUN",
    "tokenize": "data prepare",
    "convert": "checkpoint convert",
    "bench": "calibrate --out FILE.toml",
    "benchmark": "calibrate --out FILE.toml",
    "slurm": "launch --slurm CONFIG.toml",
    "k8s": "launch --k8s CONFIG.toml",
    "config": "train --print-config",
    "init": "train --print-config > run.toml",
    "version": "--version",
    "help": "--help",
}
"""What people type for commands that exist under another name."""
EXAMPLES = "\n\nExamples:\n"
"""Separates the help of a command: the description stands above the list of options, the examples below it."""
LARGEST = (1 << 63) - 1
"""The largest whole number, which is that of torch."""
WIDEST = 108
"""Maximum width of a help text in columns; longer lines are hard to read."""

Declare = Callable[[argparse.ArgumentParser], None]
DECLARED: list[tuple[str, str, str | None, Declare]] = []
"""Every command, in the order of the help: its name, one line about it, its body, and the function with its options."""


class Help(argparse.RawDescriptionHelpFormatter):
    """A formatter with a column wide enough for the names of options and commands, which never breaks a name."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(shutil.get_terminal_size().columns - 2, WIDEST))
        self._action_max_length = 14  # a minimum: argparse ignores the names of commands here

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser that answers an unknown word with the nearest known one, and a missing command with its help."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # a subcommand's parser runs inside `super()`, so it checks its own arguments first
        self._given = list(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unexpected argument {' '.join(map(repr, rest))}")
        if getattr(found, "run", None) is None:
            self.exit(2, self.format_help())
        return found, rest

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        known = [str(each) for each in action.choices]
        fault = f"{value!r}{nearest(value, known)}; choose from {', '.join(known)}"
        if isinstance(action, argparse._SubParsersAction):
            if value in OTHER_WORDS:
                fault = f"{value!r}; use `fourfold {OTHER_WORDS[value]}`"
            raise argparse.ArgumentError(None, f"there is no command {fault}")
        raise argparse.ArgumentError(action, f"invalid value {fault}")

    def error(self, message: str) -> NoReturn:
        # a misspelled option often causes the error that argparse found, such as a required option that is missing
        name, value = self._unknown()
        if name:
            message = f"there is no option {name}{nearest(name, list(self._option_string_actions))}"
            # the keys of a config are given with --set, so a command without it has none
            if "--set" in self._option_string_actions and (answer := explain_synonym(name, value)):
                message = f"there is no option {name}; {answer}"
        self.exit(2, f"{self.prog}: error: {readable(message)}\n`{self.prog} --help` shows options and examples\n")

    def _unknown(self) -> tuple[str, Any]:
        """Return the first given option that neither exists nor abbreviates one that does, and its value, if any."""
        for word, after in zip_longest(self._given, self._given[1:], fillvalue="--"):
            name, equals, value = word.partition("=")
            if name == "--" or (not name.startswith("-") and self._subparsers is not None):
                break  # the remaining words belong to a subcommand or are positional
            if re.match(r"--?[A-Za-z]", name) and not any(
                each.startswith(name) for each in self._option_string_actions
            ):
                if equals or not after.startswith("--"):
                    return name, _toml_value(value if equals else after)
                return name, True  # an option without a value is turned on
        return "", None


def parser() -> argparse.ArgumentParser:
    """Return the parser of `fourfold` with all its commands."""
    top = Parser(prog="fourfold", description=TOP, epilog=LEARN, formatter_class=Help, add_help=False)
    parsers: dict[str, argparse.ArgumentParser] = {"": top}
    inner: dict[str, Any] = {}
    for path, line, run, declare in DECLARED:
        parent, _, name = path.rpartition(" ")
        if parent not in inner:
            inner[parent] = parsers[parent].add_subparsers(title="commands", metavar="COMMAND")
        description, examples, lines = inspect.cleandoc(declare.__doc__ or "").partition(EXAMPLES)
        command = inner[parent].add_parser(
            name, help=line, description=description, epilog=(examples + lines).strip(), formatter_class=Help
        )
        command.set_defaults(run=run)
        declare(command)
        parsers[path] = command
    more = top.add_argument_group("options")
    more.add_argument("-h", "--help", action="help", help="show this help and exit")
    version = f"fourfold {__version__}"
    more.add_argument("--version", action="version", version=version, help="show the version and exit")
    return top


def command(path: str, line: str, run: str | None) -> Callable[[Declare], Declare]:
    """Declare a command such as `checkpoint list`; the docstring of the decorated function is its help text.

    `run` names the body as `module:function`; it is None for a command that only has subcommands.
    """

    def declared(declare: Declare) -> Declare:
        DECLARED.append((path, line, run, declare))
        return declare

    return declared


def option(
    to: Any,
    name: str,
    help: str,
    type: Callable[[str], Any] = str,
    metavar: str | None = None,
    *,
    default: Any = None,
    may_be_empty: bool = False,
    **more: Any,
) -> None:
    """Add an option with a value, or a positional argument, and name its default in the help.

    An empty value is refused, unless it has a meaning: a shell makes one of a variable that is not set, and as a path
    it would be the working directory.
    """
    if isinstance(default, str | int | float) and default != "":
        help = f"{help}; default: {default}"
    metavar = "N" if type in (whole, world) and metavar is None else metavar
    read = type if may_be_empty else filled(type)
    to.add_argument(name, help=help, type=read, metavar=metavar, default=default, **more)


def flag(to: Any, name: str, help: str) -> None:
    """Add an option without a value."""
    to.add_argument(name, help=help, action="store_true")


# --- types of option values


def filled(type: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a type of values like this one, which refuses an empty text."""

    def read(text: str) -> Any:
        if not text.strip():
            raise argparse.ArgumentTypeError(
                f"the value {text!r} is empty, perhaps a variable of the shell that is not set; give one, or leave the "
                "option out"
            )
        return type(text)

    return read


def expanded(text: str) -> Path:
    """Parse the path of a file or a folder. A shell leaves the `~` of `--out=~/runs` to the command."""
    return Path(text).expanduser()


def target(text: str) -> Path:
    """Parse the path of a file to write, and raise at once if that could not be written after all the work."""
    path = Path(text).expanduser()
    try:
        folder, there = path.is_dir(), path.parent.is_dir()
    except OSError as error:  # such as a name that is too long
        raise argparse.ArgumentTypeError(f"{text!r}: {error.strerror}; give another path") from None
    if folder:
        raise argparse.ArgumentTypeError(f"{text} is a folder; give the path of a file, such as {path / 'FILE'}")
    if not there:
        raise argparse.ArgumentTypeError(f"{text}: the folder {path.parent} does not exist; make it first")
    return path


def target_or_output(text: str) -> str:
    """Parse the path of a file to write, or `-`, which stands for standard output."""
    return text if text == "-" else str(target(text))


def setting(text: str) -> tuple[str, Any]:
    """Parse `batch.rows=32`. The value is read as TOML, or else taken as plain text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no value; write section.key=value, such as batch.rows=32")
    try:
        return key, _toml_value(value)
    except ValueError as error:  # it is TOML, of a kind that nobody can mean
        raise argparse.ArgumentTypeError(f"{key}: {error}") from error


def _toml_value(text: str) -> Any:
    """Return the value of a text in TOML's notation; any other text stands for itself."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def grid(text: str) -> dict[str, int]:
    """Parse `x=2,z=2`, or with context or a fold `z=4,context=2`, or `auto`, which is the empty dict."""
    if text == "auto":
        return {}
    sizes: dict[str, int] = {}
    known = (*AXES, *GIVEN_BESIDES)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in known and (answer := explain_axis(axis, _toml_value(size))):
            raise argparse.ArgumentTypeError(answer)
        if axis not in known or not size.isdigit() or int(size) < 1 or axis in sizes:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not an axis with a size; write auto, or for example x=2,z=2, with each of the axes "
                f"{', '.join(AXES)} at most once, and {', '.join(GIVEN_BESIDES)} besides"
            )
        sizes[axis] = int(size)
    return sizes


def whole(text: str) -> int:
    """Parse a whole number such as `8`."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write for example 8") from None
    if not -LARGEST <= value <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is not a number of anything; numbers go up to {LARGEST}")
    return value


def number(text: str) -> float:
    """Parse a number such as `0.8` or `1e-4`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write for example 0.8 or 60")
    return value


def quantity(text: str) -> float:
    """Parse a number of tokens such as `16.8M`, `15T`, `4096` or `1.5e6`."""
    scale = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    try:
        value = float(text if scale == 1.0 else text[:-1]) * scale
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; write for example 16.8M, 512k or 4096")
    return value


def devices(text: str) -> int | list[int]:
    """Parse a number of devices such as `64`, or the first and the last of several, such as `64..1024`, each twice the
    one before it."""
    found = re.fullmatch(r"(\d+)\.\.(\d+)", text, re.ASCII)
    if found is None:
        return world(text)
    first, last = world(found[1]), world(found[2])
    if first > last:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range of devices; write the first and last, at least 1, such as 64..1024"
        )
    numbers = [first]
    while 2 * numbers[-1] <= last:
        numbers.append(2 * numbers[-1])
    return numbers if numbers[-1] == last else [*numbers, last]


def steps(text: str) -> range:
    """Parse the steps `7`, or `7-9` with both ends included."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text, re.ASCII)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range of steps; write one step, such as 7, or the first and last, such as 7-9"
        )
    return range(first, last + 1)


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if whole(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1; give 1 or more")
    return int(text)


def within(least: int, most: int) -> Callable[[str], int]:
    """Return the type of a whole number from `least` to `most`."""

    def read(text: str) -> int:
        if not least <= whole(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not within its bounds; give {least} to {most}")
        return int(text)

    return read


def world(text: str) -> int:
    """Parse a number of devices or ranks."""
    if positive(text) > MOST_DEVICES:
        raise argparse.ArgumentTypeError(f"{text} devices are more than a grid has; give {MOST_DEVICES} or fewer")
    return int(text)


def several(text: str) -> list[int]:
    """Parse several numbers of ranks, such as `2,4,8`."""
    return [world(part) for part in text.split(",")]


def not_negative(text: str) -> float:
    """Parse a number of at least 0, such as `0.005`."""
    if not 0 <= number(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a duration; give 0 or more")
    return float(text)


def schedule_name(text: str) -> str:
    """Parse the name of a pipeline schedule, such as `1f1b` or `blocks:8`."""
    if text in SCHEDULES or re.fullmatch(r"blocks:[1-9]\d*", text, re.ASCII):
        return text
    known = (*SCHEDULES, "blocks:u")
    number_of = " with a number for u, such as blocks:8" if text.startswith("blocks") else ""
    raise argparse.ArgumentTypeError(
        f"there is no schedule {text!r}{nearest(text, known)}; choose from {', '.join(known)}{number_of}"
    )


def stage_seconds(text: str) -> tuple[tuple[float, float, float], ...]:
    """Parse the seconds of F, B and W: `1,1,1` of a whole rank, or `1,1,1/2,2,1/...` of each stage."""
    found = []
    for part in text.split("/"):
        words = part.split(",")
        try:
            values = tuple(map(float, words))
        except ValueError:
            values = ()
        if len(values) != 3 or not all(0 <= value < float("inf") for value in values):
            raise argparse.ArgumentTypeError(
                f"{part!r} is not seconds of F, B and W; write for example 1,1.2,0.9 for a rank, or that for each "
                "stage, such as 1,1,1/2,2,1"
            )
        found.append(values)
    return tuple(found)


def shard_bytes(text: str) -> int:
    """Parse the size of a file such as `5GB` or `500MB`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B", text)
    nbytes = int(float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2]]) if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a file size; write for example 5GB or 500MB")
    return nbytes


# --- the commands, in the order of a first day

TOP = "Train large models on a grid of devices."
LEARN = """\
Start with:
  fourfold demo

`fourfold COMMAND --help` shows the options of a command, with examples.
The documentation starts at docs/index.md in the source."""


@command("demo", "a tour of Fourfold in two minutes", "demo:demo")
def demo_options(command: argparse.ArgumentParser) -> None:
    """Take a tour of about two minutes on the CPU of this machine: plan a large
    model, train a small one on 4 local ranks, write its report, resume it on
    another grid, export it, and generate text. Each command is shown before it
    runs.

    Examples:
      fourfold demo
      fourfold demo --pause
      fourfold demo --quick --out runs/tour
    """
    option(command, "--out", "folder for everything the tour writes; default: runs/demo-DATE-TIME", expanded, "FOLDER")
    flag(command, "--pause", "wait for Enter before each part")
    flag(command, "--quick", "train only a few steps, enough to see that it works")


@command("plan", "choose a grid for a model without running it", "plan:plan")
def plan_options(command: argparse.ArgumentParser) -> None:
    """Compare grids, orders of ranks and policies for a model on a machine before
    anything runs. The first grid is the choice: the one that loses least if the
    machine is not as its file says, or with --risk fastest the fastest by the file.
    The others follow, the fastest first. Planning needs no GPU.

    package.module:function names your own code. function(grid, policy) returns a
    module of Fourfold layers; function() returns a plain module, which is
    replicated over data. The module's forward(tokens, targets) returns the loss.
    The planner traces the module on meta tensors, so it needs no memory for it.

    Any Hugging Face config.json is answered. Grids and seconds need a model that
    Fourfold can train as it is (gpt2, gpt_neox, llama, mistral, qwen3, mixtral, qwen3_moe); of any
    other, mixtures of experts and multimodal ones included, the plan has the
    parameters, the memory, and the least time.

    Examples:
      fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M
      fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M --why x=4,data=256
      fourfold plan --model llama-3-70b --machine dgx-h100 --devices 64..1024 --tokens 2T --price 2.5 --mtbf 20000
      fourfold plan --hf my/config.json --machine here.toml --devices 64 --batch-tokens 4M --html plan.html
      fourfold plan --model package.module:function --seq 2048 --machine here.toml --devices 8 --batch-tokens 64k
    """
    asked = command.add_argument_group("the question")
    model = (
        "a published size such as gpt-80b, a Hugging Face config.json or its folder (--hf is another name of this "
        "option), a .toml, or package.module:function"
    )
    asked.add_argument("--model", "--hf", help=model, metavar="NAME", required=True, type=filled(str))
    machine = "a packaged machine such as perlmutter, or a machine file (.toml) from fourfold calibrate"
    option(asked, "--machine", machine, metavar="NAME", required=True)
    number_of = "number of devices, or the first and last of several to compare, such as 64..1024"
    option(asked, "--devices", number_of, devices, "N", required=True)
    tokens = "tokens per step, such as 16.8M or 512k; default: by the size of the model, as in fourfold train"
    option(asked, "--batch-tokens", tokens, quantity, "N")
    option(asked, "--seq", "tokens per sequence; default: the model's", whole)
    lengths = "lengths of the documents that are packed into rows, from fourfold data lengths --json FILE"
    option(asked, "--lengths", lengths, expanded, "FILE")
    imbalance = "how many times the mean the busiest expert of a mixture has, in pairs of a token and an expert"
    option(asked, "--imbalance", imbalance, number, "N", default=1.0)
    dtype = "dtype of matrix products; default: bf16 if the machine file lists it, else fp32"
    option(asked, "--dtype", dtype, choices=("bf16", "fp32"))
    total = "tokens of the whole training, such as 300G or 15T; shows how many hours it takes; default: one step"
    option(asked, "--tokens", total, quantity, "N")
    price = "price of one device for one hour, in any currency; with --tokens shows the cost; default: none"
    option(asked, "--price", price, number, "PRICE")
    failures = command.add_argument_group("failures and checkpoints, counted with --tokens or if one of these is given")
    mtbf = (
        "mean hours between failures of one device with all that belongs to it: the hours between interruptions of "
        "a job times its devices; default: 50000, the rate of Llama 3 405B on 16,384 GPUs"
    )
    option(failures, "--mtbf", mtbf, number, "HOURS")
    restart = "seconds from a failure until training continues; default: 600, an estimate"
    option(failures, "--restart", restart, not_negative, "SECONDS")
    stop = (
        "seconds for which one save stops training; default: 1 s, and the copy of a device's part (12 bytes per "
        "parameter over all devices) to its host at 5 GB/s"
    )
    option(failures, "--checkpoint", stop, not_negative, "SECONDS")
    storage = (
        "GB/s at which all devices together write a checkpoint while training goes on; default: 0.12 for each "
        "device, as of Llama 3's storage"
    )
    option(failures, "--storage", storage, number, "GB/S")
    shown = command.add_argument_group("the answer")
    option(shown, "--grid", "plan this grid alone, such as z=8,data=8 or z=64,expert=8,ez=8", grid, "GRID")
    risk = "robust: the grid that loses least if the machine is not as its file says; fastest: the fastest by the file"
    option(shown, "--risk", risk, choices=("robust", "fastest"), default="robust")
    option(shown, "--top", "number of grids to show", whole, default=8)
    why = "explain why this grid, such as x=8,z=4, is slower than the best one, or was not chosen although it is faster"
    option(shown, "--why", why, grid, "GRID")
    option(shown, "--config", "write a config that trains on the best grid", target, "FILE.toml")
    option(shown, "--html", "write the whole plan as one interactive page", target, "FILE")
    option(shown, "--json", "write the whole plan as JSON; - prints it instead of the table", target_or_output, "FILE")
    option(shown, "--trace", "write a timeline of one step on the best grid, for ui.perfetto.dev", target, "FILE")


@command("train", "train a model", "train:train")
def train_options(command: argparse.ArgumentParser) -> None:
    """Train a model. Each rank of the grid is a process. Unless torchrun or SLURM has
    started the ranks, this command starts them. It writes the config, metrics and
    checkpoints into the run's folder.

    Examples:
      fourfold train --model gpt-tiny --grid x=2,z=2 --steps 100
      fourfold train run.toml --set optimizer.learning_rate=3e-4 --set batch.rows=64
      fourfold train --data texts/ --data more.tokens --ranks 8 --out runs/one --set checkpoint.every=500
      fourfold train --resume runs/one --grid x=4,z=2
      torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend fourfold --rdzv-endpoint node0:29400 \\
          -m fourfold.cli train run.toml
    """
    config = "a config with the sections and keys that --print-config shows; options override it"
    option(command, "config", config, expanded, "CONFIG.toml", nargs="?")

    what = command.add_argument_group("what to train")
    model = "a published size, such as gpt-125m, or package.module:function, which returns a module; default: gpt-tiny"
    option(what, "--model", model, metavar="NAME")
    data = (
        "a text, .jsonl or .parquet file, a folder of them, a .tokens file, or a .bin of Megatron, nanoGPT or llm.c; "
        "may be repeated; default: standard-library, the source of Python's own modules"
    )
    option(what, "--data", data, metavar="PATH", action="append")
    option(what, "--steps", "number of optimizer steps; default: 100", whole)
    option(what, "--epochs", "passes over the training data, in place of --steps; default: none", number, "N")
    minutes = "end the run after this many minutes, with an evaluation and a checkpoint; default: no limit"
    option(what, "--minutes", minutes, number, "N")
    dtype = "dtype of matrix products and messages; default: bf16 on GPUs, fp32 on the CPU"
    option(what, "--dtype", dtype, choices=("fp32", "bf16", "fp64"))
    option(what, "--out", "the run's folder; default: runs/MODEL-DATE-TIME", expanded, "RUN")
    option(what, "--set", SET, setting, "SECTION.KEY=VALUE", dest="changes", action="append", default=[])

    where = command.add_argument_group("where to train")
    sizes = (
        "sizes of the axes, such as x=2,z=2; default: auto, the planner's choice, which loses least if the machine is "
        "not as its file says"
    )
    option(where, "--grid", sizes, grid)
    option(where, "--ranks", RANKS, whole)
    option(where, "--device", DEVICE, choices=DEVICES)
    machine = (
        "the hardware that --grid auto plans for: a packaged machine or a machine file; default: the packaged "
        "machine most like this one"
    )
    option(where, "--machine", machine, metavar="NAME")

    again = command.add_argument_group("resume")
    resume = (
        "resume the run in this folder from its newest checkpoint, on the same or another grid; with CONFIG.toml "
        "or --model, start a run if the folder has none"
    )
    option(again, "--resume", resume, expanded, "RUN")
    step = "with --resume: resume from the checkpoint of this step and remove newer ones; default: the newest"
    option(again, "--step", step, whole)
    restarts = (
        "restart the local ranks when one dies, at most N times without a new checkpoint; default: 3 with several "
        "ranks, once there is a checkpoint to resume from"
    )
    option(again, "--restarts", restarts, whole)

    look = command.add_argument_group("inspect")
    flag(look, "--print-config", "print the resolved config and exit")
    profile = (
        "trace these steps, such as 7 or 7-9, on every rank; RUN/profile/rank-R.json opens in ui.perfetto.dev; "
        "default: none"
    )
    option(look, "--profile", profile, steps, "STEPS", default=range(0))
    compared = "run N steps and compare them with a single process, instead of training"
    option(look, "--compare-serial", compared, within(1, MOST_COMPARED), "N")
    option(look, "--json", "write config, grid and steps as one JSON object; - prints it", target_or_output, "FILE")


@command("report", "write a page about a run: loss, speed, memory, bytes", "report:report")
def report_options(command: argparse.ArgumentParser) -> None:
    """Write one self-contained HTML page about a run: loss, throughput, time and
    bytes by axis, and the grid. For profiled steps it also shows how long
    messages were in flight and how much of that time was exposed.

    Examples:
      fourfold report runs/one
      fourfold report runs/one --out one.html
    """
    option(command, "folder", "the run's folder", expanded, "RUN")
    option(command, "--out", "the page to write; default: RUN/report.html", target, "FILE.html")


@command("sample", "generate text with a trained model", "sample:sample")
def sample_options(command: argparse.ArgumentParser) -> None:
    """Print text generated by a trained model.

    Examples:
      fourfold sample runs/one --prompt 'def main('
      fourfold sample runs/one --prompt 'import ' --tokens 50 --temperature 0
      fourfold sample runs/one --step 500 --grid x=2
    """
    option(command, "folder", "the run's folder", expanded, "RUN")
    option(command, "--prompt", "the text to continue; default: empty", metavar="TEXT", default="", may_be_empty=True)
    option(command, "--tokens", "maximum number of new tokens", within(0, MOST_SAMPLED), "N", default=200)
    option(command, "--temperature", "0 always takes the most likely token", number, "T", default=0.8)
    option(command, "--top-k", "sample from the N most likely tokens; default: all", whole)
    top_p = "sample from the most likely tokens that together have probability P; default: 1"
    option(command, "--top-p", top_p, number, "P")
    option(command, "--seed", "random seed", whole, default=0)
    option(command, "--step", "use the checkpoint of this step; default: the newest", whole)
    option(command, "--grid", "any grid, not only the one used in training", grid, default="data=1")
    option(command, "--device", DEVICE, choices=DEVICES)


@command("data", "prepare text for training, verify it, show the lengths of documents", None)
def data_options(_: argparse.ArgumentParser) -> None:
    """Prepare text for training, verify the result, and show how long documents are.
    `fourfold train --data` also takes plain text, but a token file loads faster and
    records the name of its tokenizer.

    Examples:
      fourfold data prepare texts/ --out texts.tokens
      fourfold data verify texts.tokens
      fourfold data lengths texts.tokens
      fourfold train --data texts.tokens
    """


@command("data prepare", "write a token file", "import_export:prepare_data")
def prepare_options(command: argparse.ArgumentParser) -> None:
    """Turn text into a memory-mapped token file. Each line of a .jsonl file and each
    row of a .parquet file is a document; any other file is one document.

    Examples:
      fourfold data prepare texts/ --out texts.tokens
      fourfold data prepare corpus.jsonl --tokenizer tokenizer.json --out corpus.tokens
    """
    inputs = "text, .jsonl, .jsonl.gz or .parquet files, folders, or standard-library"
    option(command, "inputs", inputs, metavar="INPUT", nargs="+")
    option(command, "--out", "the file to write", expanded, "FILE.tokens", required=True)
    tokenizer = "a Hugging Face tokenizer.json; `bytes` has 257 ids and needs no file"
    option(command, "--tokenizer", tokenizer, metavar="FILE", default="bytes")
    column = "the key of .jsonl files and the column of .parquet files that has the text; default: text"
    option(command, "--column", column, metavar="NAME", default="text")
    option(command, "--eod", EOD, metavar="TOKEN")


@command("data verify", "compare every byte of a token file with its checksum", "import_export:verify_data")
def verify_data_options(command: argparse.ArgumentParser) -> None:
    """Read whole token files and compare them with their checksums. Training compares
    the header and the document starts whenever it opens a file, and reads the tokens
    as it needs them. If a file is damaged, name it and exit with code 1.

    Examples:
      fourfold data verify texts.tokens
    """
    option(command, "inputs", "token files, .bin of Megatron, nanoGPT or llm.c", metavar="FILE", nargs="+")


@command(
    "data lengths", "show how long documents are, and how even a context group would be", "data_lengths:show_lengths"
)
def lengths_options(command: argparse.ArgumentParser) -> None:
    """Show the lengths of documents, and draw bags of rows as training would, to see how
    even attention over a context group would be: for windows that are cut anywhere
    (data.pack=windows) and whole documents (whole), for both values of
    policy.assignment.

    Examples:
      fourfold data lengths texts.tokens
      fourfold data lengths texts.tokens --seq 8192 --rows 16 --context 4,16 --json -
    """
    inputs = "token files, .bin of Megatron, nanoGPT or llm.c, text files, folders, or standard-library"
    option(command, "inputs", inputs, metavar="INPUT", nargs="+")
    option(command, "--seq", "tokens of a row", positive, default=2048)
    option(command, "--rows", "rows of a bag, which the members of a context group share", positive, default=8)
    option(command, "--context", "sizes of context groups", several, "N,N", default="2,4,8")
    option(command, "--bags", "number of bags to draw", positive, default=20)
    option(command, "--seed", "random seed", whole, default=0)
    option(command, "--tokenizer", "a tokenizer.json for text", metavar="FILE", default="bytes")
    option(command, "--column", "the key or column with the text", metavar="NAME", default="text")
    option(command, "--eod", "the token that ends a document; for a .bin its id; default: as it is recorded")
    option(command, "--json", "write everything as JSON; - prints it instead of the table", target_or_output, "FILE")


@command("checkpoint", "list, inspect, verify and convert checkpoints", None)
def checkpoint_options(_: argparse.ArgumentParser) -> None:
    """List, inspect and verify the checkpoints of a run, and convert them to and from
    PyTorch's distributed checkpoint format (DCP).

    Examples:
      fourfold checkpoint list runs/one
      fourfold checkpoint verify runs/one
    """


@command("checkpoint list", "list the checkpoints of a run", "checkpoint:list_checkpoints")
def list_options(command: argparse.ArgumentParser) -> None:
    """List the checkpoints of a run, the newest last, and what interrupted saves have
    left behind.

    Examples:
      fourfold checkpoint list runs/one
    """
    option(command, "path", "the run's folder", expanded, "RUN")


@command("checkpoint inspect", "show what a checkpoint holds", "checkpoint:inspect")
def inspect_options(command: argparse.ArgumentParser) -> None:
    """Show what a checkpoint holds: step, grid, model, bytes, and every tensor with
    its shape, dtype and cuts.

    Examples:
      fourfold checkpoint inspect runs/one
      fourfold checkpoint inspect runs/one/checkpoints/step-00000100 --json
    """
    option(command, "path", "a checkpoint, or a run for its newest complete checkpoint", expanded, "PATH")
    flag(command, "--json", "print everything as one JSON object")


@command("checkpoint verify", "compare every byte with its checksum", "checkpoint:verify")
def verify_options(command: argparse.ArgumentParser) -> None:
    """Read every file and compare it with its checksums. If a file is damaged, name it
    and exit with code 1.

    Examples:
      fourfold checkpoint verify runs/one
      fourfold checkpoint verify runs/one/checkpoints/step-00000100
    """
    option(command, "path", "a checkpoint, or a run for all its complete checkpoints", expanded, "PATH")


@command("checkpoint convert", "convert to and from PyTorch's DCP format", "checkpoint:convert")
def convert_options(command: argparse.ArgumentParser) -> None:
    """Convert to and from folders of PyTorch's distributed checkpoint (DCP), one
    tensor at a time.

    A DCP folder contains a pickle, .metadata. It is read through a list of allowed
    names, so nothing in it is executed. From a folder that Fourfold did not write,
    only the parameters are read, and the keys that are left out are listed.

    Examples:
      fourfold checkpoint convert runs/one --to-dcp --to dcp/
      fourfold checkpoint convert dcp/ --from-dcp --to step-00000100
      fourfold checkpoint convert titan/step-500 --from-dcp --prefix model. --to weights/
    """
    option(command, "source", "a run or a checkpoint; with --from-dcp a DCP folder", expanded, "SOURCE")
    option(command, "--to", "folder to write; must not exist yet", expanded, "FOLDER", required=True)
    direction = command.add_mutually_exclusive_group(required=True)
    flag(direction, "--to-dcp", "write a folder that torch.distributed.checkpoint.load reads")
    flag(direction, "--from-dcp", "read a folder that torch.distributed.checkpoint.save wrote")
    prefix = "prefix of the parameters' keys in a DCP folder from elsewhere; default: model. if any key has it"
    option(command, "--prefix", prefix, may_be_empty=True)


@command("import", "make a run from a Hugging Face model folder", "import_export:run_import")
def import_options(command: argparse.ArgumentParser) -> None:
    """Turn a Hugging Face folder (GPT-2, GPT-NeoX, Llama, Mistral, Mixtral, Qwen3, Qwen3-MoE) into a run
    that trains on any grid. No code from the folder is executed. A model that
    Fourfold would compute differently is refused.

    Examples:
      fourfold import models/gpt2 --out runs/gpt2
      fourfold train --resume runs/gpt2 --data texts/ --steps 500 --grid x=2,z=2
    """
    option(command, "source", "folder with config.json and model.safetensors, possibly sharded", expanded, "DIR")
    option(command, "--out", "the run's folder; must not exist yet", expanded, "RUN", required=True)
    option(command, "--eod", EOD, metavar="TOKEN")


@command("export", "make a Hugging Face model folder from a run", "import_export:run_export")
def export_options(command: argparse.ArgumentParser) -> None:
    """Turn a run into a folder that transformers opens: config, safetensors and
    tokenizer.

    Examples:
      fourfold export runs/one --to models/mine
      fourfold export runs/gpt2 --step 500 --dtype bf16 --max-shard 2GB --to models/mine
    """
    option(command, "run_folder", "the folder of a run or of one checkpoint", expanded, "RUN")
    option(command, "--to", "folder to write; must not exist yet", expanded, "DIR", required=True)
    option(command, "--step", "use the checkpoint of this step; default: the newest", whole)
    option(command, "--dtype", "dtype of the weights; default: unchanged", choices=EXPORT_DTYPES)
    # transformers limits its files to 5 GB too
    option(command, "--max-shard", "maximum size of a file, such as 500MB", shard_bytes, "SIZE", default="5GB")


@command("calibrate", "measure this machine for the planner", "calibrate:calibrate")
def calibrate_options(command: argparse.ArgumentParser) -> None:
    """Measure this machine: the links between its ranks, matrix products, attention
    and memory. The result is a machine file for fourfold plan. On several nodes
    it also measures the network. Unless torchrun or SLURM has started the ranks,
    this command starts them.

    Examples:
      fourfold calibrate --out here.toml
      fourfold plan --model gpt-1.4b --machine here.toml --devices 8 --batch-tokens 64k
      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend fourfold --rdzv-endpoint node0:29400 \\
          -m fourfold.cli calibrate --out cluster.toml --seconds 180
    """
    option(command, "--out", "the machine file to write", target, "FILE.toml", required=True)
    ranks = "number of local ranks to start; default: the number of GPUs, or of cores if there is no GPU"
    option(command, "--ranks", ranks, whole)
    option(command, "--device", DEVICE, choices=DEVICES)
    option(command, "--seconds", "approximate measuring time", number, "SECONDS", default=60)


@command("launch", "write a job for SLURM or Kubernetes", "cluster_scripts:launch")
def launch_options(command: argparse.ArgumentParser) -> None:
    """Write what a scheduler needs to run a config: a SLURM script or a Kubernetes
    manifest. Both start every rank, send SIGTERM early enough for a last
    checkpoint, and restart the run when it dies; the run then resumes by itself.

    Examples:
      fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M --config run.toml
      fourfold launch --slurm run.toml --out /shared/runs/one --time 24:00:00 --account physics > job.sh
      fourfold launch --k8s run.toml --out /runs/one --image registry/fourfold:1 --claim runs > job.json
    """
    option(command, "config", "what to train, for example from fourfold plan --config", expanded, "CONFIG.toml")
    kind = command.add_mutually_exclusive_group(required=True)
    flag(kind, "--slurm", "write a script for sbatch")
    flag(kind, "--k8s", "write a manifest for kubectl apply")
    option(command, "--out", "the run's folder, on a file system that all nodes share", metavar="RUN", required=True)
    option(command, "--name", "name of the job", metavar="NAME", default="fourfold")
    option(
        command,
        "--devices",
        "number of devices; required if the config's grid is auto",
        world,
    )
    option(command, "--per-node", "devices per node; default: from the config's plan.machine", world)
    option(command, "--tries", "maximum number of times to start the run", whole, default=5)
    slurm = command.add_argument_group("SLURM only")
    time = "time limit as hours:minutes:seconds or days-hours:minutes; the run saves before it"
    option(slurm, "--time", time, metavar="LIMIT", default="24:00:00")
    option(slurm, "--partition", "partition to queue in; default: the cluster's", metavar="NAME")
    option(slurm, "--account", "account to charge; default: yours", metavar="NAME")
    option(slurm, "--cpus", "cores per rank; default: the cluster's", whole)
    pods = command.add_argument_group("Kubernetes only")
    option(pods, "--image", "container image with fourfold installed; required", metavar="NAME")
    option(pods, "--claim", "volume claim to mount at the parent folder of --out; required", metavar="NAME")


@command("doctor", "find out why a run failed, or would fail", "doctor:doctor")
def doctor_options(command: argparse.ArgumentParser) -> None:
    """Explain what went wrong with a run: why it ended, what its ranks diagnosed
    together, and what each rank did last, from the tapes in the run's folder. This
    also works while a run hangs.

    With --preflight, check in at most a minute what a long run needs, on the ranks
    that it will use: versions, devices and their speed, memory, clocks, every link
    of every axis, disk. Each check is ok, a warning or FAILED, with advice. If a
    check has FAILED, the exit code is 1. Unless torchrun or SLURM has started the
    ranks, this command starts them.

    Examples:
      fourfold doctor runs/one
      fourfold doctor --preflight run.toml --out /shared/runs/one
      fourfold doctor --preflight --ranks 8
      torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend fourfold --rdzv-endpoint node0:29400 \\
          -m fourfold.cli doctor --preflight run.toml --out /shared/runs/one
    """
    path = "the run's folder; with --preflight, optionally a CONFIG.toml"
    option(command, "path", path, expanded, "RUN", nargs="?")
    flag(command, "--preflight", "check what a long run needs before it starts")
    ahead = command.add_argument_group("with --preflight")
    sizes = "sizes of the axes, such as x=2,z=2; default: the config's grid, or all ranks along data without a config"
    option(ahead, "--grid", sizes, grid)
    option(ahead, "--ranks", RANKS, whole)
    option(ahead, "--device", DEVICE, choices=DEVICES)
    option(ahead, "--out", "the future run's folder; it is left unchanged", metavar="RUN")
    option(ahead, "--set", SET, setting, "SECTION.KEY=VALUE", dest="changes", action="append", default=[])
    option(ahead, "--json", "write the checks and measurements as JSON; - prints them", target_or_output, "FILE")


MICRO = "number of micro-batches of a step"
STAGE_SECONDS = "seconds of F, B and W of a whole rank, or of each stage, with / between stages"
HOP = "seconds of a message between two ranks"


@command("schedule", "draw, find and check the schedules of a pipeline", None)
def schedule_options(_: argparse.ArgumentParser) -> None:
    """Look at schedules of a pipeline before anything runs: the order in which each
    rank runs the forward (F) and backward passes of its stages for every
    micro-batch. Backward is B for the gradient of a stage's input and W for those
    of its weights; BW is both in one.

    Examples:
      fourfold schedule show 1f1b --pipe 4 --micro 8
      fourfold schedule find --pipe 4 --micro 16 --memory 4
      fourfold schedule check mine.csv
    """


@command("schedule show", "draw a named schedule", "schedule:show")
def show_options(command: argparse.ArgumentParser) -> None:
    """Draw a named schedule, with the times of its actions, or print it in the CSV
    format of torch.distributed.pipelining.

    The names: gpipe, 1f1b, interleaved, looped-bfs, zb-h1, v-half, zb-v, and
    blocks:u for blocks of u micro-batches.

    Examples:
      fourfold schedule show 1f1b --pipe 4 --micro 8
      fourfold schedule show interleaved --pipe 4 --chunks 2 --micro 8 --hop 0.1
      fourfold schedule show blocks:4 --pipe 2 --micro 8 --csv > blocks.csv
    """
    option(command, "name", "name of the schedule", schedule_name, "NAME")
    option(command, "--pipe", "number of pipe ranks", world, "N", required=True)
    option(command, "--micro", MICRO, positive, "N", required=True)
    option(command, "--chunks", "stages of each rank; default: the fewest that the schedule takes", positive, "N")
    option(command, "--seconds", f"{STAGE_SECONDS}; default: 1,1,1", stage_seconds, "F,B,W")
    option(command, "--hop", HOP, not_negative, "SECONDS", default=0.0)
    flag(command, "--csv", "print the schedule as CSV instead of a picture")


@command("schedule find", "find a fast schedule for given times and memory", "schedule:find_schedule")
def find_options(command: argparse.ArgumentParser) -> None:
    """Find the fastest schedule for the seconds of stages and messages and the memory
    that there is, and draw it. Unless --chunks or --placement say otherwise, ranks
    with 1, 2 and 4 stages are tried, dealt in loops and in waves.

    Examples:
      fourfold schedule find --pipe 4 --micro 16 --memory 4
      fourfold schedule find --pipe 4 --micro 16 --seconds 43,43,43 --hop 5 --memory 5
      fourfold schedule find --pipe 2 --chunks 1 --micro 6 --seconds 1,1,1/1.5,1.5,1 --csv > found.csv
    """
    option(command, "--pipe", "number of pipe ranks", world, "N", required=True)
    option(command, "--micro", MICRO, positive, "N", required=True)
    option(command, "--chunks", "stages of each rank; default: 1, 2 and 4 are tried", positive, "N")
    placement = "how stages are dealt: loop, or wave, down the ranks and up again; default: both are tried"
    option(command, "--placement", placement, choices=PLACEMENTS)
    option(command, "--seconds", f"{STAGE_SECONDS}; default: 1,1,1", stage_seconds, "F,B,W")
    option(command, "--hop", HOP, not_negative, "SECONDS", default=0.0)
    memory = "micro-batches that a rank may keep; 1F1B keeps as many as there are ranks; default: no limit"
    option(command, "--memory", memory, number, "MICRO")
    flag(command, "--csv", "print the schedule as CSV instead of a picture")


@command("schedule check", "say whether a schedule from a CSV file is valid", "schedule:check")
def check_options(command: argparse.ArgumentParser) -> None:
    """Read a schedule in the CSV format of torch.distributed.pipelining and draw it.
    If it could deadlock, or misses an action, name the action, the rank and the
    way out, and exit with code 1.

    Examples:
      fourfold schedule check mine.csv
      fourfold schedule check mine.csv --seconds 1,1.2,0.8 --hop 0.1
    """
    option(command, "path", "the file", expanded, "FILE.csv")
    option(command, "--seconds", f"{STAGE_SECONDS}; default: 1,1,1", stage_seconds, "F,B,W")
    option(command, "--hop", HOP, not_negative, "SECONDS", default=0.0)


EXPERT_RANKS = "ranks along expert to place for; default: those of the run's grid"
EXPERT_NODE = "ranks along expert in a node; default: 8 if that divides the ranks, else all of them"


@command("experts", "show how a mixture uses its experts, and place them on ranks", None)
def experts_options(_: argparse.ArgumentParser) -> None:
    """Look at the experts of a run: which of them tokens choose, and which rank should
    hold which. Both are read from what the run has recorded in its last 100 steps.

    Examples:
      fourfold experts show runs/moe --expert 8 --node 4
      fourfold experts place runs/moe --expert 8 --node 4
    """


@command("experts show", "show the load of every expert, and what placing them would bring", "experts:show")
def show_experts_options(command: argparse.ArgumentParser) -> None:
    """Show how many tokens each expert of each block has had, how uneven that is, and
    which had none. With ranks along expert, in the run's grid or given, also show how
    even these are, and how many tokens change their node from one block to the next,
    with today's numbering of the experts and with a better one.

    Examples:
      fourfold experts show runs/moe
      fourfold experts show runs/moe --expert 8 --node 4 --json -
    """
    option(command, "folder", "the run's folder", expanded, "RUN")
    option(command, "--expert", EXPERT_RANKS, world, "N")
    option(command, "--node", EXPERT_NODE, world, "N")
    option(command, "--json", "write everything as JSON; - prints it instead of the text", target_or_output, "FILE")


@command("experts place", "renumber experts, so that ranks have equal loads", "experts:place_experts")
def place_experts_options(command: argparse.ArgumentParser) -> None:
    """Number the experts of each block anew, so that all ranks have equally much to
    compute and tokens find their experts on few of them, and write a run's folder
    with a renumbered copy of the newest checkpoint. The model is the same function, and
    training goes on from there on any grid as it would have.

    Examples:
      fourfold experts place runs/moe
      fourfold experts place runs/moe --expert 8 --node 4 --out runs/even
    """
    option(command, "folder", "the run's folder", expanded, "RUN")
    option(command, "--expert", EXPERT_RANKS, world, "N")
    option(command, "--node", EXPERT_NODE, world, "N")
    option(command, "--out", "the folder to write, which must not exist yet; default: RUN-placed", expanded, "FOLDER")


@command("completion", "let the shell complete commands and options", "completion:completion")
def completion_options(command: argparse.ArgumentParser) -> None:
    """Print a script that lets the shell complete commands, options, models, machines
    and files. Install it once, and again after each update:

      bash   fourfold completion bash > ~/.local/share/bash-completion/completions/fourfold
             (the package bash-completion loads it; without that package, source it in ~/.bashrc)
      zsh    fourfold completion zsh > ~/.zfunc/_fourfold
             (with fpath+=~/.zfunc before compinit in ~/.zshrc)
      fish   fourfold completion fish > ~/.config/fish/completions/fourfold.fish

    Examples:
      fourfold completion bash > fourfold.bash
      fourfold completion zsh > _fourfold
      fourfold completion fish > fourfold.fish
    """
    option(command, "shell", "the shell to print the script for", choices=SHELLS)
