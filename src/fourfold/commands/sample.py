"""`fourfold sample`: generates text with a trained model, on any grid."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from fourfold.checkpoint.load import find_checkpoint, load
from fourfold.commands.local_ranks import chosen_device, close
from fourfold.data.tokenizer import load_tokenizer
from fourfold.environment import inside_a_job
from fourfold.grid import Grid, Shape
from fourfold.models.generate import generate
from fourfold.models.transformer import build
from fourfold.train.config import read_config
from fourfold.train.launch import launch
from fourfold.train.signals import raise_on_signals


def visible(text: str) -> str:
    """Return a text without characters that a terminal obeys, such as a bell or an escape: those are spelled out."""
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


def sample(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the prompt and the generated text."""
    if not (options.folder / "config.toml").is_file():
        raise FileNotFoundError(f"{options.folder} has no config.toml; give the folder of a run")
    checkpoint = find_checkpoint(options.folder, options.step)
    config = read_config(options.folder / "config.toml")
    shape = Shape(**options.grid)
    device = chosen_device(options.device)
    if not inside_a_job() and shape.world > 1:
        return launch(shape.world, [*arguments, "--device", device], sys.stderr)
    grid = Grid.of_shape(shape, device=device)
    raise_on_signals()
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod)
    # without the stages of the run, which were for its own grid; and every new token changes the shapes, each of which
    # would be compiled again
    policy = replace(config.build_policy(), compile=False, stages=None, schedule="auto")
    dtype, lora = config.policy.parameters, config.lora.build()
    model = build(config.model.build(), grid, policy=policy, dtype=dtype, lora=lora)
    # rank 0 decides which checkpoint: a run in progress may save a newer one before the other ranks look
    load(grid.broadcast_text(str(checkpoint)), model)
    prompt = tokenizer.encode(options.prompt).tolist() or [tokenizer.eod]
    (found,) = generate(
        model,
        [prompt],
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        ids=min(tokenizer.vocab, model.config.vocab),
        seed=options.seed,
        stop=tokenizer.eod,
    )
    if grid.rank == 0:
        print(options.prompt + visible(tokenizer.decode(found)))
    close(grid)
    return 0
