"""The command `fourfold` and its subcommands; `fourfold --help` lists them.

Every error that a user can cause is one line that names the cause; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold import __version__
from fourfold.grid import FailedElsewhereError
from fourfold.train.checkpoint import add_checkpoint
from fourfold.train.doctor import add_doctor
from fourfold.train.exchange import add_exchange
from fourfold.train.places import add_launch

USER_ERRORS = (ValueError, OSError, ImportError, FailedElsewhereError)


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    import torch

    from fourfold.train.launch import INTERRUPTED, LOST_PEER, inside_a_job, report_failure
    from fourfold.train.numbers import BadNumbersError
    from fourfold.watch.replicas import ReplicasDifferError

    try:
        return options.run(options, arguments)
    except KeyboardInterrupt:
        if not inside_a_job():
            print("fourfold: interrupted; what was written stays readable", file=sys.stderr)
        return _leave(INTERRUPTED, at_once=inside_a_job())
    except BrokenPipeError:
        return _leave(1, at_once=inside_a_job())  # whoever read our output is gone
    except (*USER_ERRORS, BadNumbersError, ReplicasDifferError) as error:
        report_failure(str(error), users=True)
        return _leave(1, at_once=inside_a_job())
    except torch.OutOfMemoryError as error:
        less = "policy.recompute=block, policy.loss_chunk, more batch.micro_steps, or a grid with a larger z"
        report_failure(
            f"the device's memory does not suffice ({str(error).split('.')[0]}); {less} need less", users=True
        )
        return _leave(1, at_once=inside_a_job())
    except Exception as error:
        lost = any(words in str(error) for words in LOST_PEER)
        report_failure(str(error) if lost else traceback.format_exc(), users=False)
        return _leave(1, at_once=inside_a_job())


def _leave(code: int, *, at_once: bool) -> int:
    """A rank that ends early must not wait for the others in the destructors of its process groups."""
    if at_once:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def train(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from fourfold.train.command import train

    return train(options, arguments)


def plan(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from fourfold.train.plan import plan

    return plan(options, arguments)


def calibrate(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from fourfold.train.calibrate import calibrate

    return calibrate(options, arguments)


def sample(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    from fourfold.train.sample import sample

    return sample(options, arguments)


def report(options: argparse.Namespace, _: Sequence[str]) -> int:
    from fourfold.report import write_report

    print(write_report(options.folder, options.out))
    return 0


def prepare(options: argparse.Namespace, _: Sequence[str]) -> int:
    from fourfold.data.text import prepare
    from fourfold.data.tokenizer import load_tokenizer
    from fourfold.train.progress import percent_of

    found = prepare(options.inputs, options.out, load_tokenizer(options.tokenizer, options.eod), progress=percent_of())
    print(f"{found.path}: {found.tokens} tokens of {found.documents} documents, vocabulary {found.vocab}")
    return 0


def setting(text: str) -> tuple[str, Any]:
    """`batch.rows=32`; the value as TOML has it, or a plain text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} lacks a value; write section.key=value, such as batch.rows=32")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def grid(text: str) -> dict[str, int]:
    """`x=2,z=2`, or `auto`."""
    if text == "auto":
        return {}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in ("x", "y", "z", "data") or not size.isdigit() or int(size) < 1 or axis in sizes:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no axis with a size; write auto, or such as x=2,z=2 with axes x, y, z, data, each once"
            )
        sizes[axis] = int(size)
    return sizes


def quantity(text: str) -> float:
    """`16.8M`, `4096`, `1.5e6`"""
    scale = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}.get(text[-1:].lower(), 1.0)
    try:
        value = float(text if scale == 1.0 else text[:-1]) * scale
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write such as 16.8M, 512k or 4096")
    return value


def steps(text: str) -> range:
    """`7`, or `7-9` with both ends."""
    first, _, last = text.partition("-")
    last = last if "-" in text else first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no steps; write one, such as 7, or the first and the last, such as 7-9, counted from 1"
        )
    return range(int(first), int(last) + 1)


def parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="fourfold", description="Train large models on a four-dimensional grid of devices."
    )
    top.add_argument("--version", action="version", version=f"fourfold {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    one = commands.add_parser("train", help="train a model", description=TRAIN, formatter_class=shape)
    one.add_argument(
        "config", nargs="?", type=Path, metavar="CONFIG.toml", help="sections and keys as --print-config shows"
    )
    one.add_argument("--grid", type=grid, help="such as x=2,z=2; auto: chosen for the number of ranks")
    one.add_argument(
        "--ranks", type=int, help="local ranks to start; by default those of the grid, else the GPUs, else 1"
    )
    one.add_argument("--model", help="a published size, such as gpt-125m or llama-3-8b")
    one.add_argument("--steps", type=int)
    one.add_argument("--dtype", choices=["fp32", "bf16", "fp64"], help="of products and messages")
    one.add_argument("--data", action="append", metavar="PATH", help="train on this; may be given several times")
    one.add_argument("--out", help="the run's folder")
    one.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with the run in this folder from its newest checkpoint, on its grid or another; with CONFIG.toml "
        "or --model begin one where there is none",
    )
    one.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="with --resume: go on from the checkpoint of this step; newer ones are removed when the run begins",
    )
    one.add_argument(
        "--restarts",
        type=int,
        metavar="N",
        help="start the local ranks again when one dies, up to N times without a new checkpoint in between; by default "
        "3 with several ranks where checkpoint.every is set, else 0",
    )
    one.add_argument("--set", action="append", type=setting, default=[], metavar="SECTION.KEY=VALUE", dest="changes")
    one.add_argument("--device", choices=["cpu", "cuda"], help="by default a GPU where there is one")
    one.add_argument(
        "--json", metavar="FILE", help="write config, grid and steps there as one object; -: standard output"
    )
    one.add_argument("--print-config", action="store_true", help="show the resolved config and stop")
    one.add_argument(
        "--compare-serial", type=int, metavar="N", help="instead of training compare N steps with one process"
    )
    one.add_argument(
        "--profile",
        type=steps,
        default=range(0),
        metavar="STEPS",
        help="trace these steps, such as 7 or 7-9, on every rank; RUN/profile/rank-R.json opens in ui.perfetto.dev",
    )
    one.add_argument(
        "--machine", help="the hardware, for --grid auto and for what is predicted: a name or a machine file"
    )
    one.set_defaults(run=train)

    add_plan(commands, shape)
    add_calibrate(commands, shape)
    add_checkpoint(commands, shape)
    add_exchange(commands, shape)
    add_doctor(commands, shape, grid, setting)
    add_launch(commands, shape)

    two = commands.add_parser("sample", help="text from a trained model", description=SAMPLE, formatter_class=shape)
    two.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    two.add_argument("--step", type=int, help="of which checkpoint; by default the newest")
    two.add_argument("--prompt", default="", help="how the text begins")
    two.add_argument("--tokens", type=int, default=200, help="how many to add at most")
    two.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest")
    two.add_argument("--top-k", type=int, default=None)
    two.add_argument("--top-p", type=float, default=None)
    two.add_argument("--seed", type=int, default=0)
    two.add_argument("--grid", type=grid, default={"data": 1}, help="any grid, whatever the model was trained on")
    two.add_argument("--device", choices=["cpu", "cuda"])
    two.set_defaults(run=sample)

    three = commands.add_parser("report", help="a page about a run", description=REPORT, formatter_class=shape)
    three.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    three.add_argument("--out", type=Path, help="by default RUN/report.html")
    three.set_defaults(run=report)

    four = commands.add_parser("data", help="prepare text for training").add_subparsers(
        required=True, metavar="COMMAND"
    )
    five = four.add_parser("prepare", help="write a token file", description=PREPARE, formatter_class=shape)
    five.add_argument("inputs", nargs="+", metavar="INPUT", help="text files, folders, or standard-library")
    five.add_argument("--out", type=Path, required=True, metavar="FILE.tokens")
    five.add_argument("--tokenizer", default="bytes", help="bytes, or the path of a Hugging Face tokenizer.json")
    five.add_argument("--eod", help="the token that ends a document, where the tokenizer names it unusually")
    five.set_defaults(run=prepare)
    return top


def add_plan(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = commands.add_parser("plan", help="the fastest grid for a model", description=PLAN, formatter_class=shape)
    one.add_argument(
        "--model",
        required=True,
        help="a published size such as gpt-80b, a Hugging Face config.json, a .toml, or package.module:function",
    )
    one.add_argument("--machine", required=True, help="a name such as perlmutter, or a machine file (.toml)")
    one.add_argument("--devices", type=int, required=True)
    one.add_argument(
        "--batch-tokens", type=quantity, required=True, metavar="N", help="tokens of a step, such as 16.8M"
    )
    one.add_argument("--seq", type=int, help="tokens of a sequence; by default the model's")
    one.add_argument("--dtype", choices=["bf16", "fp32"], help="of products; by default bf16 where the machine has it")
    one.add_argument("--top", type=int, default=8, metavar="N", help="grids to show; default 8")
    one.add_argument("--why", type=grid, metavar="GRID", help="what this grid, such as x=8,z=4, loses on")
    one.add_argument("--json", metavar="FILE", help="the whole plan; -: standard output, and nothing else there")
    one.add_argument("--html", type=Path, metavar="FILE", help="one page with everything, to explore")
    one.add_argument("--trace", type=Path, metavar="FILE", help="the best grid's step, opens in ui.perfetto.dev")
    one.add_argument("--config", type=Path, metavar="FILE.toml", help="the best grid as a config for fourfold train")
    one.set_defaults(run=plan)


def add_calibrate(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = commands.add_parser("calibrate", help="measure this machine", description=CALIBRATE, formatter_class=shape)
    one.add_argument("--out", type=Path, required=True, metavar="FILE.toml")
    one.add_argument("--ranks", type=int, help="local ranks to start; by default the GPUs, else the cores")
    one.add_argument("--device", choices=["cpu", "cuda"], help="by default a GPU where there is one")
    one.add_argument("--seconds", type=float, default=60.0, help="about how long to measure; default 60")
    one.set_defaults(run=calibrate)


TRAIN = """\
Train a model. Outside of torchrun and SLURM the local ranks are started here.

  fourfold train --model gpt-tiny --grid x=2,z=2 --steps 100
  fourfold train run.toml --set optimizer.rate=3e-4 --set batch.rows=64
  fourfold train --data texts/ --data more.tokens --ranks 8
  fourfold train run.toml --profile 20-22 --set overlap.halves=2
  fourfold train run.toml --out runs/one --set checkpoint.every=500
  fourfold train --resume runs/one --grid x=4,z=2
  fourfold train --resume runs/one --step 500
  torchrun --nnodes 4 --nproc-per-node 8 -m fourfold.cli train run.toml"""
PLAN = """\
Rank the grids, rank orders and policies for a model on a machine, before anything runs. Needs no device.

  fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M
  fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M --why x=4,data=256
  fourfold plan --model my/config.json --machine here.toml --devices 64 --batch-tokens 4M --html plan.html
  fourfold plan --model package.module:function --seq 2048 --machine here.toml --devices 8 --batch-tokens 64k

function(grid, policy) returns a module made of Fourfold layers, function() a plain one, which is replicated over data;
its forward(tokens, targets) returns the loss. It is run dry: no device, no memory."""
CALIBRATE = """\
Measure this machine: links between its ranks, products, attention, memory. The file is a machine for fourfold plan.
Outside of torchrun and SLURM the local ranks are started here; with several nodes the network is measured too.

  fourfold calibrate --out here.toml
  torchrun --nnodes 2 --nproc-per-node 8 -m fourfold.cli calibrate --out cluster.toml --seconds 180"""
SAMPLE = """\
Print text from a trained model.

  fourfold sample runs/gpt-tiny-20261115-120000 --prompt 'def main('"""
REPORT = """\
Write one self-contained HTML page about a run: loss, throughput, time and bytes by axis, the grid; and, where steps
were profiled, seconds on the link and exposed.

  fourfold report runs/gpt-tiny-20261115-120000"""
PREPARE = """\
Turn text into a memory-mapped token file.

  fourfold data prepare texts/ --out texts.tokens
  fourfold data prepare corpus.jsonl --tokenizer tokenizer.json --out corpus.tokens"""


if __name__ == "__main__":
    sys.exit(main())
