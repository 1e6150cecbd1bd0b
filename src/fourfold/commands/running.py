"""demo, train, report, sample, data prepare: a model, from text to text."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fourfold.commands.parser import add, below, grid, number, setting, steps, whole

RANKS = "local ranks to start; default those of the grid, else the GPUs, else 1"
DEVICE = "default a GPU where there is one"
SET = "change a key of the config; may be given several times; `fourfold train --print-config` shows all keys"
EOD = "the token that ends a document; default the usual names, such as <|endoftext|>"


def add_demo(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(commands, shape, "demo", "train.demo:demo", "a tour of all this, in two minutes", DEMO)
    one.add_argument("--out", type=Path, metavar="FOLDER", help="for all that is made; default runs/demo-DATE-TIME")
    one.add_argument("--pause", action="store_true", help="wait for Enter before each step")
    one.add_argument("--quick", action="store_true", help="few steps: to see that it works, not to see it learn")


def add_train(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(commands, shape, "train", "train.command:train", "train a model", TRAIN)
    one.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG.toml",
        help="sections and keys as --print-config shows; what is given below counts more",
    )

    what = one.add_argument_group("what to train")
    what.add_argument("--model", metavar="NAME", help="a published size, such as gpt-125m; default gpt-tiny")
    what.add_argument(
        "--data",
        action="append",
        metavar="PATH",
        help="a text file, a folder of them, a .tokens file, a Megatron or nanoGPT .bin; may be given several times; "
        "default standard-library, the source of Python's own modules",
    )
    what.add_argument("--steps", type=whole, metavar="N", help="optimizer steps; default 100")
    what.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp64"],
        help="of products and messages; default bf16 on GPUs, fp32 on the CPU",
    )
    what.add_argument("--out", metavar="RUN", help="the run's folder; default runs/MODEL-DATE-TIME")
    what.add_argument(
        "--set", action="append", type=setting, default=[], metavar="SECTION.KEY=VALUE", dest="changes", help=SET
    )

    where = one.add_argument_group("on which devices")
    where.add_argument(
        "--grid", type=grid, help="sizes of the axes, such as x=2,z=2; default auto, the fastest by the planner"
    )
    where.add_argument("--ranks", type=whole, metavar="N", help=RANKS)
    where.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)
    where.add_argument(
        "--machine",
        metavar="NAME",
        help="the hardware that --grid auto plans for: a packaged machine or a machine file; default the packaged one "
        "that is most like this one",
    )

    again = one.add_argument_group("stop and go on")
    again.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="go on with the run in this folder from its newest checkpoint, on its grid or another; with CONFIG.toml "
        "or --model begin one where there is none",
    )
    again.add_argument(
        "--step",
        type=whole,
        metavar="N",
        help="with --resume: go on from the checkpoint of this step; newer ones are removed when the run begins; "
        "default the newest",
    )
    again.add_argument(
        "--restarts",
        type=whole,
        metavar="N",
        help="start the local ranks again when one dies, up to N times without a new checkpoint in between; default "
        "3 with several ranks where checkpoint.every is set, else 0",
    )

    look = one.add_argument_group("look at it")
    look.add_argument("--print-config", action="store_true", help="show the resolved config and stop")
    look.add_argument(
        "--profile",
        type=steps,
        default=range(0),
        metavar="STEPS",
        help="trace these steps, such as 7 or 7-9, on every rank; RUN/profile/rank-R.json opens in ui.perfetto.dev; "
        "default none",
    )
    look.add_argument(
        "--compare-serial", type=whole, metavar="N", help="instead of training compare N steps with one process"
    )
    look.add_argument(
        "--json", metavar="FILE", help="write config, grid and steps there as one object; -: standard output"
    )


def add_report(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(commands, shape, "report", report, "a page about a run: loss, speed, memory, bytes", REPORT)
    one.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    one.add_argument("--out", type=Path, metavar="FILE.html", help="the page; default RUN/report.html")


def add_sample(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(commands, shape, "sample", "train.sample:sample", "text from a trained model", SAMPLE)
    one.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    one.add_argument("--prompt", default="", metavar="TEXT", help="how the text begins; default nothing")
    one.add_argument("--tokens", type=whole, default=200, metavar="N", help="how many to add at most; default 200")
    one.add_argument(
        "--temperature", type=number, default=0.8, metavar="T", help="0: always the likeliest token; default 0.8"
    )
    one.add_argument("--top-k", type=whole, metavar="N", help="draw from the N likeliest tokens; default all")
    one.add_argument(
        "--top-p", type=number, metavar="P", help="draw from the likeliest that together have this part of 1; default 1"
    )
    one.add_argument("--seed", type=whole, default=0, metavar="N", help="of the draws; default 0")
    one.add_argument("--step", type=whole, metavar="N", help="the checkpoint of this step; default the newest")
    one.add_argument(
        "--grid", type=grid, default={"data": 1}, help="any, whatever the model was trained on; default one process"
    )
    one.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)


def add_data(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    inner = below(add(commands, shape, "data", None, "prepare text for training", DATA))
    one = add(inner, shape, "prepare", prepare, "write a token file", PREPARE)
    one.add_argument("inputs", nargs="+", metavar="INPUT", help="text or .jsonl files, folders, or standard-library")
    one.add_argument("--out", type=Path, required=True, metavar="FILE.tokens", help="the file to write")
    one.add_argument(
        "--tokenizer", default="bytes", metavar="FILE", help="a Hugging Face tokenizer.json; default bytes, of 257 ids"
    )
    one.add_argument("--eod", metavar="TOKEN", help=EOD)


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


DEMO = """\
A tour of about two minutes, on the CPU of this machine: plan a large model,
train a small one on 4 local ranks, look at its report, go on with it on another
grid, export it, and let it write. Every command is shown before it runs.

Examples:
  fourfold demo
  fourfold demo --pause
  fourfold demo --quick --out runs/tour"""
TRAIN = """\
Train a model. Every rank of the grid is a process: outside of torchrun and
SLURM they are started here. The run's folder has config, metrics, checkpoints.

Examples:
  fourfold train --model gpt-tiny --grid x=2,z=2 --steps 100
  fourfold train run.toml --set optimizer.rate=3e-4 --set batch.rows=64
  fourfold train --data texts/ --data more.tokens --ranks 8 --out runs/one --set checkpoint.every=500
  fourfold train --resume runs/one --grid x=4,z=2
  torchrun --nnodes 4 --nproc-per-node 8 -m fourfold.cli train run.toml"""
REPORT = """\
Write one self-contained HTML page about a run: loss, throughput, time and
bytes by axis, the grid; and, where steps were profiled, seconds on the link
and exposed.

Examples:
  fourfold report runs/one
  fourfold report runs/one --out one.html"""
SAMPLE = """\
Print text from a trained model.

Examples:
  fourfold sample runs/one --prompt 'def main('
  fourfold sample runs/one --prompt 'import ' --tokens 50 --temperature 0
  fourfold sample runs/one --step 500 --grid x=2"""
DATA = """\
Prepare text for training. `fourfold train --data` takes plain text too; a token
file is read faster, and keeps its tokenizer's name.

Examples:
  fourfold data prepare texts/ --out texts.tokens
  fourfold train --data texts.tokens"""
PREPARE = """\
Turn text into a memory-mapped token file. A line of a .jsonl file is a
document, with its text under "text"; any other file is one document.

Examples:
  fourfold data prepare texts/ --out texts.tokens
  fourfold data prepare corpus.jsonl --tokenizer tokenizer.json --out corpus.tokens"""
