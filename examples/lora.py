"""Fine-tune a Hugging Face Llama with LoRA (peft) on a 4D grid.

    torchrun --nproc-per-node 4 examples/lora.py

By default a tiny random model learns to count. Frozen layers have no gradients and no optimizer state, and need no
communication for either. To fine-tune a real model from its folder on a text of yours:

    torchrun --nproc-per-node 8 examples/lora.py \
        --model llama/ --text notes.txt --grid x=2,z=4 --learning-rate 2e-4 \
        --seq 512
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import fourfold as ff
from fourfold.commands.options import grid as axes
from fourfold.data.tokenizer import load_tokenizer

ROWS, SEQ, VOCAB, STEPS = 8, 16, 64, 4


def model(folder: Path | None = None) -> PeftModel:
    torch.manual_seed(0)  # adapters start with random values
    if folder is None:
        sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=VOCAB)
        llama = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        llama = AutoModelForCausalLM.from_pretrained(folder)
    return get_peft_model(llama, LoraConfig(r=4, target_modules="all-linear"))


def batch(step: int, text: Tensor | None = None, rows: int = ROWS, seq: int = SEQ) -> Tensor:
    """Return rows that count up, or random rows of a text."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCAB if text is None else len(text) - seq, (rows, 1), generator=generator)
    positions = starts + torch.arange(seq)
    return positions % VOCAB if text is None else text[positions]


def train(
    grid: ff.Grid,
    out: str,
    folder: Path | None = None,
    file: Path | None = None,
    *,
    steps: int = STEPS,
    rows: int = ROWS,
    seq: int = SEQ,
    learning_rate: float = 1e-2,
) -> list[float]:
    parallel = ff.parallelize(model(folder), grid)  # or parallelize, add adapters, parallelize again
    trained = [parameter for parameter in parallel.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, fused=True)
    text = None if file is None else load_tokenizer(folder / "tokenizer.json").encode(file.read_text())
    losses = []
    for step in range(steps):
        mine = ff.local_rows(batch(step, text, rows, seq), grid).to(grid.device)
        loss = parallel(input_ids=mine, labels=mine).loss  # the mean over the whole batch, equal on all ranks
        loss.backward()
        ff.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parallel.save_pretrained(out)  # whole adapters in peft's format
    return losses


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=axes, default={"x": 2, "z": 2}, help="such as x=2,z=2")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a Llama of transformers, with its tokenizer.json")
    parser.add_argument("--text", type=Path, metavar="FILE", help="the text to train on; needs --model")
    parser.add_argument("--out", help="folder for the adapters")
    parser.add_argument("--learning-rate", type=float, default=1e-2, help="for a real model, for example 2e-4")
    for name, default in (("steps", STEPS), ("rows", ROWS), ("seq", SEQ)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    if (given.model is None) != (given.text is None):
        parser.error("--model and --text must be given together")
    grid = ff.Grid(**given.grid)
    sizes = dict(steps=given.steps, rows=given.rows, seq=given.seq)
    out = grid.broadcast_text(given.out or tempfile.mkdtemp())
    losses = train(grid, out, given.model, given.text, learning_rate=given.learning_rate, **sizes)
    if grid.rank == 0:
        print(f"{grid}: losses {losses[0]:.4f} to {losses[-1]:.4f}; adapters in {out}")
    grid.close()
    return losses


if __name__ == "__main__":
    main()
