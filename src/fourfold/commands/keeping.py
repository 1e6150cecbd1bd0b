"""checkpoint, import, export: what a run has saved, and exchange with others."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fourfold.commands.parser import add, below, shard_bytes, whole
from fourfold.commands.running import EOD

SAVED_AS = ("fp32", "bf16", "fp16")
LARGEST_SHARD = 5_000_000_000


def add_checkpoint(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    inner = below(add(commands, shape, "checkpoint", None, "look into checkpoints, verify, convert", CHECKPOINT))

    one = add(inner, shape, "list", "train.checkpoint_command:show_list", "the checkpoints of a run", LIST)
    one.add_argument("path", type=Path, metavar="RUN", help="the run's folder")

    two = add(inner, shape, "inspect", "train.checkpoint_command:inspect", "what a checkpoint holds", INSPECT)
    two.add_argument("path", type=Path, metavar="PATH", help="a run, for its newest complete checkpoint, or one")
    two.add_argument("--json", action="store_true", help="everything, as one JSON object")

    three = add(
        inner, shape, "verify", "train.checkpoint_command:verify", "compare every byte with its checksum", VERIFY
    )
    three.add_argument("path", type=Path, metavar="PATH", help="a run, for all its complete checkpoints, or one")

    four = add(
        inner, shape, "convert", "train.checkpoint_command:convert", "to and from torch's own checkpoints", CONVERT
    )
    four.add_argument("source", type=Path, metavar="SOURCE", help="a run or a checkpoint; with --from-dcp a DCP folder")
    four.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where to write; must not exist yet")
    way = four.add_mutually_exclusive_group(required=True)
    way.add_argument("--to-dcp", action="store_true", help="write what torch.distributed.checkpoint.load reads")
    way.add_argument("--from-dcp", action="store_true", help="read what torch.distributed.checkpoint.save wrote")
    four.add_argument(
        "--prefix", help="of the parameters' keys in a foreign DCP folder; default model. where any key has it"
    )


def add_import(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(commands, shape, "import", "train.import_export:run_import", "a run from a Hugging Face folder", IMPORT)
    one.add_argument("source", type=Path, metavar="DIR", help="has config.json and model.safetensors, perhaps in parts")
    one.add_argument("--out", type=Path, required=True, metavar="RUN", help="the run's folder, which must be new")
    one.add_argument("--eod", metavar="TOKEN", help=EOD)


def add_export(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = add(commands, shape, "export", "train.import_export:run_export", "a Hugging Face folder from a run", EXPORT)
    one.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, or that of one checkpoint")
    one.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to write, which must be new")
    one.add_argument("--step", type=whole, metavar="N", help="the checkpoint of this step; default the newest")
    one.add_argument("--dtype", choices=SAVED_AS, help="of the weights; default as they are")
    one.add_argument(
        "--max-shard",
        type=shard_bytes,
        default=LARGEST_SHARD,
        metavar="SIZE",
        help="of a file, such as 500MB; default 5GB",
    )


CHECKPOINT = """\
Look into the checkpoints of a run, verify them, exchange them with torch's
distributed checkpoint.

Examples:
  fourfold checkpoint list runs/one
  fourfold checkpoint verify runs/one"""
LIST = """\
The checkpoints of a run, the newest last, and what saves that died have left.

Examples:
  fourfold checkpoint list runs/one"""
INSPECT = """\
What a checkpoint holds: step, grid, model, bytes, and every tensor with its
shape, dtype and cuts.

Examples:
  fourfold checkpoint inspect runs/one
  fourfold checkpoint inspect runs/one/checkpoints/step-00000100 --json"""
VERIFY = """\
Read everything and compare it with its checksums; ends with 1 and names the
file where something is damaged.

Examples:
  fourfold checkpoint verify runs/one
  fourfold checkpoint verify runs/one/checkpoints/step-00000100"""
CONVERT = """\
To and from folders of torch's distributed checkpoint (DCP), a tensor at a time.

A DCP folder has a pickle, .metadata, which is read through a list of allowed
names: nothing in it is run. Of a folder that others wrote the parameters are
taken, and what is left out is named.

Examples:
  fourfold checkpoint convert runs/one --to-dcp --to dcp/
  fourfold checkpoint convert dcp/ --from-dcp --to step-00000100
  fourfold checkpoint convert titan/step-500 --from-dcp --prefix model. --to weights/"""
IMPORT = """\
Turn a Hugging Face folder (GPT-2, Llama, Mistral, Qwen3, GPT-NeoX) into a run,
which trains on any grid. No code of the folder is run; a model that would
compute other numbers here is refused.

Examples:
  fourfold import models/gpt2 --out runs/gpt2
  fourfold train --resume runs/gpt2 --data texts/ --steps 500 --grid x=2,z=2"""
EXPORT = """\
Turn a run into a folder that transformers opens: config, safetensors,
tokenizer.

Examples:
  fourfold export runs/one --to models/mine
  fourfold export runs/gpt2 --step 500 --dtype bf16 --max-shard 2GB --to models/mine"""
