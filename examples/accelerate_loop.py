"""accelerate with gradient accumulation on a 4D grid.

torchrun --nproc-per-node 4 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff
from fourfold.data.sampling import place_sampler

ROWS, SEQ, VOCAB, MICRO_STEPS = 8, 16, 64, 2


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=VOCAB)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def dataset() -> list[Tensor]:
    """Return rows that count up from different starts."""
    return [(torch.arange(SEQ) + start) % VOCAB for start in range(0, VOCAB, 2)]


def train(grid: ff.Grid) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_STEPS, cpu=grid.device.type == "cpu")
    parallel = ff.parallelize(model(), grid)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2, fused=True)
    parallel, optimizer = accelerator.prepare(parallel, optimizer)  # leaves the model as it is, without DDP
    # not prepared: accelerate would give every process different rows, but ranks along x and y must read the same rows
    places = grid.size("z") * grid.size("data")
    loader = DataLoader(dataset(), batch_size=ROWS // places, sampler=place_sampler(dataset(), grid))
    losses = []
    for rows in loader:
        rows = rows.to(grid.device)
        with accelerator.accumulate(parallel):
            loss = parallel(input_ids=rows, labels=rows).loss  # the mean over the whole batch, equal on all ranks
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(parallel.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    grid = ff.Grid(x=2, z=2)
    losses = train(grid)
    if grid.rank == 0:
        print(f"{grid}: losses", *(f"{loss:.4f}" for loss in losses))
    grid.close()
