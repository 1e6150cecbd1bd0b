"""The options and help texts of every command, in the order of a first day.

Nothing here imports torch, so that `fourfold --help` and the error for a misspelled option appear at once. A command
names its body as `module:function` in this package; `fourfold.cli` imports the body after it has parsed the options.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fourfold import __version__
from fourfold.commands.parser import (
    Help,
    Parser,
    add,
    grid,
    number,
    quantity,
    setting,
    shard_bytes,
    steps,
    subcommands,
    whole,
)

RANKS = "local ranks to start; default: the size of the grid, else the number of GPUs, else 1"
DEVICE = "default: cuda if there is a GPU, else cpu"
SET = "change a key of the config; may be repeated; `fourfold train --print-config` shows all keys"
EOD = "the token that ends a document; default: one of the usual names, such as <|endoftext|>"
EXPORT_DTYPES = ("fp32", "bf16", "fp16")
MAX_SHARD_BYTES = 5_000_000_000
"""The largest file that `fourfold export` writes by default; transformers uses the same limit."""


SHELLS = ("bash", "zsh", "fish")


def parser() -> argparse.ArgumentParser:
    """Return the parser of `fourfold` with all its commands."""
    top = Parser(prog="fourfold", description=TOP, epilog=LEARN, formatter_class=Help, add_help=False)
    commands = subcommands(top)
    add_demo(commands)
    add_plan(commands)
    add_train(commands)
    add_report(commands)
    add_sample(commands)
    add_data(commands)
    add_checkpoint(commands)
    add_import(commands)
    add_export(commands)
    add_calibrate(commands)
    add_launch(commands)
    add_doctor(commands)
    add_completion(commands)
    more = top.add_argument_group("options")
    more.add_argument("-h", "--help", action="help", help="show this help and exit")
    more.add_argument(
        "--version", action="version", version=f"fourfold {__version__}", help="show the version and exit"
    )
    return top


def add_demo(commands: Any) -> None:
    command = add(commands, "demo", "demo:demo", "a tour of Fourfold, in two minutes", DEMO)
    command.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for everything the tour writes; default: runs/demo-DATE-TIME"
    )
    command.add_argument("--pause", action="store_true", help="wait for Enter before each part")
    command.add_argument("--quick", action="store_true", help="train only a few steps, enough to see that it works")


def add_plan(commands: Any) -> None:
    command = add(commands, "plan", "plan:plan", "find the fastest grid for a model, without running it", PLAN)
    asked = command.add_argument_group("the question")
    asked.add_argument(
        "--model",
        required=True,
        metavar="NAME",
        help="a published size such as gpt-80b, a Hugging Face config.json, a .toml, or package.module:function",
    )
    asked.add_argument(
        "--machine",
        required=True,
        metavar="NAME",
        help="a packaged machine such as perlmutter, or a machine file (.toml) from fourfold calibrate",
    )
    asked.add_argument("--devices", type=whole, required=True, metavar="N", help="number of devices")
    asked.add_argument(
        "--batch-tokens", type=quantity, required=True, metavar="N", help="tokens per step, such as 16.8M or 512k"
    )
    asked.add_argument("--seq", type=whole, metavar="N", help="tokens per sequence; default: the model's")
    asked.add_argument(
        "--dtype",
        choices=["bf16", "fp32"],
        help="dtype of matrix products; default: bf16 if the machine has it, else fp32",
    )
    shown = command.add_argument_group("the answer")
    shown.add_argument("--top", type=whole, default=8, metavar="N", help="number of grids to show; default: 8")
    shown.add_argument("--why", type=grid, metavar="GRID", help="explain why this grid, such as x=8,z=4, is slower")
    shown.add_argument("--config", type=Path, metavar="FILE.toml", help="write a config that trains on the best grid")
    shown.add_argument("--html", type=Path, metavar="FILE", help="write the whole plan as one interactive page")
    shown.add_argument("--json", metavar="FILE", help="write the whole plan as JSON; - prints it instead of the table")
    shown.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a timeline of one step on the best grid, for ui.perfetto.dev"
    )


def add_train(commands: Any) -> None:
    command = add(commands, "train", "train:train", "train a model", TRAIN)
    command.add_argument(
        "config",
        nargs="?",
        type=Path,
        metavar="CONFIG.toml",
        help="sections and keys as --print-config shows them; options override it",
    )

    what = command.add_argument_group("what to train")
    what.add_argument("--model", metavar="NAME", help="a published size, such as gpt-125m; default: gpt-tiny")
    what.add_argument(
        "--data",
        action="append",
        metavar="PATH",
        help="a text file, a folder of text files, a .tokens file, or a Megatron or nanoGPT .bin; may be repeated; "
        "default: standard-library, the source of Python's own modules",
    )
    what.add_argument("--steps", type=whole, metavar="N", help="optimizer steps; default: 100")
    what.add_argument(
        "--dtype",
        choices=["fp32", "bf16", "fp64"],
        help="dtype of matrix products and messages; default: bf16 on GPUs, fp32 on the CPU",
    )
    what.add_argument("--out", metavar="RUN", help="the run's folder; default: runs/MODEL-DATE-TIME")
    what.add_argument(
        "--set", action="append", type=setting, default=[], metavar="SECTION.KEY=VALUE", dest="changes", help=SET
    )

    where = command.add_argument_group("where to train")
    where.add_argument(
        "--grid", type=grid, help="sizes of the axes, such as x=2,z=2; default: auto, the planner's fastest grid"
    )
    where.add_argument("--ranks", type=whole, metavar="N", help=RANKS)
    where.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)
    where.add_argument(
        "--machine",
        metavar="NAME",
        help="the hardware that --grid auto plans for: a packaged machine or a machine file; default: the packaged "
        "machine most like this one",
    )

    again = command.add_argument_group("resume")
    again.add_argument(
        "--resume",
        type=Path,
        metavar="RUN",
        help="resume the run in this folder from its newest checkpoint, on the same or another grid; with CONFIG.toml "
        "or --model, start a run if the folder has none",
    )
    again.add_argument(
        "--step",
        type=whole,
        metavar="N",
        help="with --resume: resume from the checkpoint of this step and remove newer ones; default: the newest",
    )
    again.add_argument(
        "--restarts",
        type=whole,
        metavar="N",
        help="restart the local ranks when one dies, at most N times without a new checkpoint; default: 3 with several "
        "ranks and checkpoint.every set, else 0",
    )

    look = command.add_argument_group("inspect")
    look.add_argument("--print-config", action="store_true", help="print the resolved config and exit")
    look.add_argument(
        "--profile",
        type=steps,
        default=range(0),
        metavar="STEPS",
        help="trace these steps, such as 7 or 7-9, on every rank; RUN/profile/rank-R.json opens in ui.perfetto.dev; "
        "default: none",
    )
    look.add_argument(
        "--compare-serial", type=whole, metavar="N", help="do not train; compare N steps with a single process"
    )
    look.add_argument("--json", metavar="FILE", help="write config, grid and steps as one JSON object; - prints it")


def add_report(commands: Any) -> None:
    command = add(commands, "report", "report:report", "write a page about a run: loss, speed, memory, bytes", REPORT)
    command.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("--out", type=Path, metavar="FILE.html", help="the page; default: RUN/report.html")


def add_sample(commands: Any) -> None:
    command = add(commands, "sample", "sample:sample", "generate text with a trained model", SAMPLE)
    command.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    command.add_argument("--prompt", default="", metavar="TEXT", help="how the text begins; default: empty")
    command.add_argument(
        "--tokens", type=whole, default=200, metavar="N", help="maximum number of new tokens; default: 200"
    )
    command.add_argument(
        "--temperature", type=number, default=0.8, metavar="T", help="0 always takes the likeliest token; default: 0.8"
    )
    command.add_argument("--top-k", type=whole, metavar="N", help="sample from the N likeliest tokens; default: all")
    command.add_argument(
        "--top-p",
        type=number,
        metavar="P",
        help="sample from the likeliest tokens that together have probability P; default: 1",
    )
    command.add_argument("--seed", type=whole, default=0, metavar="N", help="seed of the sampling; default: 0")
    command.add_argument("--step", type=whole, metavar="N", help="use the checkpoint of this step; default: the newest")
    command.add_argument(
        "--grid",
        type=grid,
        default={"data": 1},
        help="any grid, whichever the model was trained on; default: one process",
    )
    command.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)


def add_data(commands: Any) -> None:
    inner = subcommands(add(commands, "data", None, "prepare text for training", DATA))
    prepare = add(inner, "prepare", "data:prepare", "write a token file", PREPARE)
    prepare.add_argument(
        "inputs", nargs="+", metavar="INPUT", help="text or .jsonl files, folders, or standard-library"
    )
    prepare.add_argument("--out", type=Path, required=True, metavar="FILE.tokens", help="the file to write")
    prepare.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="FILE",
        help="a Hugging Face tokenizer.json; default: bytes, with 257 ids",
    )
    prepare.add_argument("--eod", metavar="TOKEN", help=EOD)


def add_checkpoint(commands: Any) -> None:
    inner = subcommands(add(commands, "checkpoint", None, "list, inspect, verify and convert checkpoints", CHECKPOINT))

    listing = add(inner, "list", "checkpoint:list_checkpoints", "list the checkpoints of a run", LIST)
    listing.add_argument("path", type=Path, metavar="RUN", help="the run's folder")

    inspect = add(inner, "inspect", "checkpoint:inspect", "show what a checkpoint holds", INSPECT)
    inspect.add_argument(
        "path", type=Path, metavar="PATH", help="a checkpoint, or a run for its newest complete checkpoint"
    )
    inspect.add_argument("--json", action="store_true", help="print everything as one JSON object")

    verify = add(inner, "verify", "checkpoint:verify", "compare every byte with its checksum", VERIFY)
    verify.add_argument(
        "path", type=Path, metavar="PATH", help="a checkpoint, or a run for all its complete checkpoints"
    )

    convert = add(inner, "convert", "checkpoint:convert", "convert to and from PyTorch's DCP format", CONVERT)
    convert.add_argument(
        "source", type=Path, metavar="SOURCE", help="a run or a checkpoint; with --from-dcp a DCP folder"
    )
    convert.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="folder to write; must not exist yet")
    direction = convert.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--to-dcp", action="store_true", help="write a folder that torch.distributed.checkpoint.load reads"
    )
    direction.add_argument(
        "--from-dcp", action="store_true", help="read a folder that torch.distributed.checkpoint.save wrote"
    )
    convert.add_argument(
        "--prefix",
        help="prefix of the parameters' keys in a DCP folder from elsewhere; default: model. if any key has it",
    )


def add_import(commands: Any) -> None:
    command = add(commands, "import", "import_export:run_import", "make a run from a Hugging Face model folder", IMPORT)
    command.add_argument(
        "source", type=Path, metavar="DIR", help="folder with config.json and model.safetensors, possibly sharded"
    )
    command.add_argument("--out", type=Path, required=True, metavar="RUN", help="the run's folder; must not exist yet")
    command.add_argument("--eod", metavar="TOKEN", help=EOD)


def add_export(commands: Any) -> None:
    command = add(commands, "export", "import_export:run_export", "make a Hugging Face model folder from a run", EXPORT)
    command.add_argument("run_folder", type=Path, metavar="RUN", help="the folder of a run or of one checkpoint")
    command.add_argument("--to", type=Path, required=True, metavar="DIR", help="folder to write; must not exist yet")
    command.add_argument("--step", type=whole, metavar="N", help="use the checkpoint of this step; default: the newest")
    command.add_argument("--dtype", choices=EXPORT_DTYPES, help="dtype of the weights; default: unchanged")
    command.add_argument(
        "--max-shard",
        type=shard_bytes,
        default=MAX_SHARD_BYTES,
        metavar="SIZE",
        help="maximum size of a file, such as 500MB; default: 5GB",
    )


def add_calibrate(commands: Any) -> None:
    command = add(commands, "calibrate", "calibrate:calibrate", "measure this machine for the planner", CALIBRATE)
    command.add_argument("--out", type=Path, required=True, metavar="FILE.toml", help="the machine file to write")
    command.add_argument(
        "--ranks", type=whole, metavar="N", help="local ranks to start; default: the number of GPUs, else of cores"
    )
    command.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)
    command.add_argument(
        "--seconds", type=number, default=60.0, metavar="SECONDS", help="approximate measuring time; default: 60"
    )


def add_launch(commands: Any) -> None:
    command = add(commands, "launch", "cluster_scripts:launch", "write a job for SLURM or Kubernetes", LAUNCH)
    command.add_argument(
        "config", type=Path, metavar="CONFIG.toml", help="what to train, for example from fourfold plan --config"
    )
    kind = command.add_mutually_exclusive_group(required=True)
    kind.add_argument("--slurm", action="store_true", help="write a script for sbatch")
    kind.add_argument("--k8s", action="store_true", help="write a manifest for kubectl apply")
    command.add_argument(
        "--out", required=True, metavar="RUN", help="the run's folder, on a file system that all nodes share"
    )
    command.add_argument("--name", default="fourfold", help="name of the job; default: fourfold")
    command.add_argument(
        "--devices", type=whole, metavar="N", help="number of devices if the config's grid is auto; default: the grid's"
    )
    command.add_argument(
        "--per-node", type=whole, metavar="N", help="devices per node; default: from the config's plan.machine"
    )
    command.add_argument(
        "--tries", type=whole, default=5, metavar="N", help="maximum number of times to start the run; default: 5"
    )
    slurm = command.add_argument_group("SLURM only")
    slurm.add_argument(
        "--time",
        default="24:00:00",
        metavar="LIMIT",
        help="hours:minutes:seconds, or days-hours:minutes; the run saves before the limit; default: 24:00:00",
    )
    slurm.add_argument("--partition", metavar="NAME", help="partition to queue in; default: the cluster's")
    slurm.add_argument("--account", metavar="NAME", help="account to charge; default: yours")
    slurm.add_argument("--cpus", type=whole, metavar="N", help="cores per rank; default: the cluster's")
    pods = command.add_argument_group("Kubernetes only")
    pods.add_argument("--image", metavar="NAME", help="container image with fourfold installed; required")
    pods.add_argument("--claim", metavar="NAME", help="volume claim to mount at the parent folder of --out; required")


def add_doctor(commands: Any) -> None:
    command = add(commands, "doctor", "doctor:doctor", "find out why a run failed, or would fail", DOCTOR)
    command.add_argument(
        "path", nargs="?", type=Path, metavar="RUN", help="the run's folder; with --preflight optionally a CONFIG.toml"
    )
    command.add_argument("--preflight", action="store_true", help="check what a long run needs before it starts")
    ahead = command.add_argument_group("with --preflight")
    ahead.add_argument(
        "--grid", type=grid, help="such as x=2,z=2; default: the config's, without a config all ranks along data"
    )
    ahead.add_argument("--ranks", type=whole, metavar="N", help=RANKS)
    ahead.add_argument("--device", choices=["cpu", "cuda"], help=DEVICE)
    ahead.add_argument("--out", metavar="RUN", help="the future run's folder; it is left unchanged")
    ahead.add_argument(
        "--set", action="append", type=setting, default=[], metavar="SECTION.KEY=VALUE", dest="changes", help=SET
    )
    ahead.add_argument("--json", metavar="FILE", help="write the checks and measurements as JSON; - prints them")


def add_completion(commands: Any) -> None:
    command = add(
        commands, "completion", "completion:completion", "let the shell complete commands and options", COMPLETION
    )
    command.add_argument("shell", choices=SHELLS, help="the shell to print the script for")


TOP = """\
Train large models on a four-dimensional grid of devices."""
LEARN = """\
Start with:
  fourfold demo

`fourfold COMMAND --help` shows the options of a command, with examples.
The documentation starts at docs/index.md of the source."""
DEMO = """\
A tour of about two minutes on the CPU of this machine: plan a large model,
train a small one on 4 local ranks, write its report, resume it on another
grid, export it, and generate text. Each command is shown before it runs.

Examples:
  fourfold demo
  fourfold demo --pause
  fourfold demo --quick --out runs/tour"""
PLAN = """\
Rank the grids, rank orders and policies for a model on a machine before
anything runs. Needs no device.

package.module:function names your own code. function(grid, policy) returns a
module of Fourfold layers; function() returns a plain module, which is
replicated over data. Its forward(tokens, targets) returns the loss. The
planner traces it on meta tensors, without a device or memory.

Examples:
  fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M
  fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M --why x=4,data=256
  fourfold plan --model my/config.json --machine here.toml --devices 64 --batch-tokens 4M --html plan.html
  fourfold plan --model package.module:function --seq 2048 --machine here.toml --devices 8 --batch-tokens 64k"""
TRAIN = """\
Train a model. Each rank of the grid is a process; outside of torchrun and
SLURM this command starts them. The run's folder receives the config, metrics
and checkpoints.

Examples:
  fourfold train --model gpt-tiny --grid x=2,z=2 --steps 100
  fourfold train run.toml --set optimizer.learning_rate=3e-4 --set batch.rows=64
  fourfold train --data texts/ --data more.tokens --ranks 8 --out runs/one --set checkpoint.every=500
  fourfold train --resume runs/one --grid x=4,z=2
  torchrun --nnodes 4 --nproc-per-node 8 -m fourfold.cli train run.toml"""
REPORT = """\
Write one self-contained HTML page about a run: loss, throughput, time and
bytes by axis, and the grid. For profiled steps it also shows the seconds on
the link and the exposed seconds.

Examples:
  fourfold report runs/one
  fourfold report runs/one --out one.html"""
SAMPLE = """\
Print text generated by a trained model.

Examples:
  fourfold sample runs/one --prompt 'def main('
  fourfold sample runs/one --prompt 'import ' --tokens 50 --temperature 0
  fourfold sample runs/one --step 500 --grid x=2"""
DATA = """\
Prepare text for training. `fourfold train --data` also takes plain text; a
token file loads faster and records the name of its tokenizer.

Examples:
  fourfold data prepare texts/ --out texts.tokens
  fourfold train --data texts.tokens"""
PREPARE = """\
Turn text into a memory-mapped token file. Each line of a .jsonl file is a
document, with its text under "text"; any other file is one document.

Examples:
  fourfold data prepare texts/ --out texts.tokens
  fourfold data prepare corpus.jsonl --tokenizer tokenizer.json --out corpus.tokens"""
CHECKPOINT = """\
List, inspect and verify the checkpoints of a run, and convert them to and from
PyTorch's distributed checkpoint format (DCP).

Examples:
  fourfold checkpoint list runs/one
  fourfold checkpoint verify runs/one"""
LIST = """\
List the checkpoints of a run, the newest last, and what interrupted saves have
left behind.

Examples:
  fourfold checkpoint list runs/one"""
INSPECT = """\
Show what a checkpoint holds: step, grid, model, bytes, and every tensor with
its shape, dtype and cuts.

Examples:
  fourfold checkpoint inspect runs/one
  fourfold checkpoint inspect runs/one/checkpoints/step-00000100 --json"""
VERIFY = """\
Read every file and compare it with its checksums. If anything is damaged, name
the file and exit with code 1.

Examples:
  fourfold checkpoint verify runs/one
  fourfold checkpoint verify runs/one/checkpoints/step-00000100"""
CONVERT = """\
Convert to and from folders of PyTorch's distributed checkpoint (DCP), one
tensor at a time.

A DCP folder contains a pickle, .metadata. It is read through a list of allowed
names, so nothing in it is executed. From a folder that Fourfold did not write,
only the parameters are read, and the keys that are left out are listed.

Examples:
  fourfold checkpoint convert runs/one --to-dcp --to dcp/
  fourfold checkpoint convert dcp/ --from-dcp --to step-00000100
  fourfold checkpoint convert titan/step-500 --from-dcp --prefix model. --to weights/"""
IMPORT = """\
Turn a Hugging Face folder (GPT-2, Llama, Mistral, Qwen3, GPT-NeoX) into a run
that trains on any grid. No code from the folder is executed. A model that
Fourfold would compute differently is refused.

Examples:
  fourfold import models/gpt2 --out runs/gpt2
  fourfold train --resume runs/gpt2 --data texts/ --steps 500 --grid x=2,z=2"""
EXPORT = """\
Turn a run into a folder that transformers opens: config, safetensors and
tokenizer.

Examples:
  fourfold export runs/one --to models/mine
  fourfold export runs/gpt2 --step 500 --dtype bf16 --max-shard 2GB --to models/mine"""
CALIBRATE = """\
Measure this machine: the links between its ranks, matrix products, attention
and memory. The resulting file is a machine for fourfold plan. Outside of
torchrun and SLURM this command starts the local ranks; on several nodes it
also measures the network.

Examples:
  fourfold calibrate --out here.toml
  fourfold plan --model gpt-1.4b --machine here.toml --devices 8 --batch-tokens 64k
  torchrun --nnodes 2 --nproc-per-node 8 -m fourfold.cli calibrate --out cluster.toml --seconds 180"""
LAUNCH = """\
Write what a scheduler needs to run a config: a SLURM script or a Kubernetes
manifest. Both start every rank, send SIGTERM early enough for a last
checkpoint, and restart the run when it dies; it resumes by itself.

Examples:
  fourfold plan --model gpt-80b --machine perlmutter --devices 1024 --batch-tokens 16.8M --config run.toml
  fourfold launch --slurm run.toml --out /shared/runs/one --time 24:00:00 --account physics > job.sh
  fourfold launch --k8s run.toml --out /runs/one --image registry/fourfold:1 --claim runs > job.json"""
DOCTOR = """\
Explain what went wrong with a run: why it ended, what its ranks diagnosed
together, and what each rank did last, from the tapes in the run's folder.
Also works on a run that still exists but makes no progress.

With --preflight, check what a long run needs, on the ranks that it will use,
in at most a minute: versions, devices and their speed, memory, clocks, every
link of every axis, disk. Each check is ok, a warning or FAILED, with advice. A
FAILED check gives exit code 1. Outside of torchrun and SLURM this command
starts the local ranks.

Examples:
  fourfold doctor runs/one
  fourfold doctor --preflight run.toml --out /shared/runs/one
  fourfold doctor --preflight --ranks 8
  torchrun --nnodes 4 --nproc-per-node 8 -m fourfold.cli doctor --preflight run.toml --out /shared/runs/one"""
COMPLETION = """\
Print a script that lets the shell complete commands, options, models, machines
and files. Install it once, and again after each update:

  bash   fourfold completion bash > ~/.local/share/bash-completion/completions/fourfold
         (the package bash-completion loads it; without that package, source it in ~/.bashrc)
  zsh    fourfold completion zsh > ~/.zfunc/_fourfold
         (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  fish   fourfold completion fish > ~/.config/fish/completions/fourfold.fish

Examples:
  fourfold completion bash > fourfold.bash
  fourfold completion zsh > _fourfold
  fourfold completion fish > fourfold.fish"""
