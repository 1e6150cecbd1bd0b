"""Pretrain a GPT with the library's own pieces.

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py

By default it trains a tiny model on the source of Python's standard library. Started again with more `--steps`, on any
grid and any number of ranks, it resumes from its newest checkpoint. A larger model:

    torchrun --nproc-per-node 8 examples/pretrain_gpt.py \
        --model gpt-125m --grid z=8 --data texts/ --seq 1024 --rows 256
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import fourfold as ff
from fourfold.checkpoint.load import Checkpoints, load_training
from fourfold.checkpoint.save import Saver
from fourfold.commands.options import grid as axes
from fourfold.data.loader import Loader
from fourfold.data.sources import open_source
from fourfold.data.tokenizer import load_tokenizer

EVERY = 20
"""Steps between two checkpoints."""


def train(given: argparse.Namespace, grid: ff.Grid) -> list[float]:
    """Train to the last step and return the losses of the steps taken now."""
    model = ff.models.build(given.model, grid, policy=ff.Policy(shard_optimizer=True))
    optimizer = ff.optim.AdamW(model, given.learning_rate)
    schedule = ff.optim.LearningRateSchedule(given.learning_rate, steps=given.steps, warmup=min(10, given.steps))
    saver, losses, done = Saver(grid, given.out), [], 0
    text = dict(tokenizer=load_tokenizer(given.tokenizer), cache=given.out / "data")
    grid.run_on_rank0("reading the text", lambda: open_source(given.data, **text))  # rank 0 tokenizes it into a file
    source, sizes = open_source(given.data, **text), dict(rows=given.rows, seq=given.seq, vocab=model.config.vocab)
    with Loader([source], None, grid, **sizes) as loader:
        if (newest := Checkpoints(given.out).newest()) is not None:
            state = load_training(newest, model, optimizer)
            loader.restore(state["data"])
            done = state["step"]
        for step in range(done + 1, given.steps + 1):
            ((tokens, targets, *_),) = loader.next()  # the rows of this rank's place (data, z)
            schedule.apply(optimizer, step)
            loss = model(tokens, targets)  # the mean over the whole batch, equal on all ranks
            loss.backward()
            optimizer.clip_and_step(1.0)  # skips the step if gradients are not finite
            optimizer.zero_grad()
            if step % EVERY == 0 or step == given.steps:
                saver.save(step, model, optimizer, {"data": loader.state()})  # written in the background
            losses.append(loss.item())
            if grid.rank == 0 and step % 10 == 0:
                print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
        saver.wait()
    return losses


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=axes, default={"x": 2, "z": 2}, help="such as x=2,z=2")
    parser.add_argument("--model", default="gpt-tiny", help="a published size")
    parser.add_argument("--data", default="standard-library", help="text, a folder of it, or a token file")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, or a tokenizer.json")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain-gpt"), help="folder for checkpoints")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    for name, default in (("steps", 40), ("rows", 16), ("seq", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    grid = ff.Grid(**given.grid)
    losses = train(given, grid)
    if grid.rank == 0:
        print(f"{grid}: {len(losses)} steps; checkpoints in {given.out}")
    grid.close()
    return losses


if __name__ == "__main__":
    main()
