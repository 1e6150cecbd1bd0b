"""Lightning Fabric on a 4D grid.

    torchrun --nproc-per-node 4 examples/fabric_loop.py

`ModelParallelStrategy` passes the model to your own function instead of wrapping it in DDP, and gives all processes of
a tensor-parallel group the same rows. Its tensor-parallel groups are our places: ranks that differ only in x and y.
"""

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import fourfold as ff

ROWS, SEQ, VOCAB = 8, 16, 64


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=VOCAB)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def dataset() -> list[Tensor]:
    """Return rows that count up from different starts."""
    return [(torch.arange(SEQ) + start) % VOCAB for start in range(0, VOCAB, 2)]


def train(grid: ff.Grid) -> list[float]:
    places = grid.size("z") * grid.size("data")
    strategy = ModelParallelStrategy(
        lambda model, _: ff.parallelize(model, grid),
        data_parallel_size=places,
        tensor_parallel_size=grid.shape.world // places,
    )
    fabric = Fabric(accelerator=grid.device.type, devices=grid.shape.world, strategy=strategy)
    fabric.launch()
    parallel = fabric.setup(model())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(parallel.parameters(), lr=1e-2, fused=True))
    loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=ROWS // places, shuffle=False))
    losses = []
    for rows in loader:
        loss = parallel(input_ids=rows, labels=rows).loss  # the mean over the whole batch, equal on all ranks
        fabric.backward(loss)
        ff.clip_grad_norm_(parallel.parameters(), 1.0)
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
