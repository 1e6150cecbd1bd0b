"""LoRA (peft) on a 4D grid: torchrun --nproc-per-node 4 examples/lora.py

The frozen layers cost no gradients, no optimizer state and no communication of either.
"""

import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff

ROWS, SEQ, VOCAB, STEPS = 8, 16, 64, 4


def model() -> PeftModel:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=VOCAB)
    return get_peft_model(LlamaForCausalLM(LlamaConfig(**sizes)), LoraConfig(r=4, target_modules="all-linear"))


def batch(step: int) -> Tensor:
    """Rows that count up from anywhere."""
    starts = torch.randint(VOCAB, (ROWS, 1), generator=torch.Generator().manual_seed(step))
    return (torch.arange(SEQ) + starts) % VOCAB


def train(grid: ff.Grid, folder: str) -> list[float]:
    parallel = ff.parallelize(model(), grid)  # or get_peft_model(ff.parallelize(...)), and ff.parallelize of that
    trained = [parameter for parameter in parallel.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    losses = []
    for step in range(STEPS):
        rows = ff.local_rows(batch(step), grid).to(grid.device)
        loss = parallel(input_ids=rows, labels=rows).loss
        loss.backward()
        ff.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    parallel.save_pretrained(folder)  # the adapters whole, as peft writes them
    return losses


if __name__ == "__main__":
    grid = ff.Grid(x=2, z=2)
    losses = train(grid, sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    if grid.rank == 0:
        print(f"{grid}: losses", *(f"{loss:.4f}" for loss in losses))
    grid.close()
