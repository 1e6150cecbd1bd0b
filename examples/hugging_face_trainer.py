"""Hugging Face's Trainer on a 4D grid.

    torchrun --nproc-per-node 4 examples/hugging_face_trainer.py

The Trainer recognises that a parallelised model reduces its own gradients, so it neither wraps nor moves the model.
Only the rows that a process reads must be set here, because ranks that differ only in x and y read the same rows.
"""

import sys
import tempfile

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fourfold as ff
from fourfold.data.sampling import place_sampler

SEQ, VOCAB = 16, 64


class GridTrainer(Trainer):
    """A Trainer that reads the rows of this rank's place; `per_device_train_batch_size` is the rows of one place."""

    def __init__(self, grid: ff.Grid, **options) -> None:
        self.grid = grid
        super().__init__(**options)

    def get_train_dataloader(self) -> DataLoader:
        return self._loader(self.train_dataset, self.args.per_device_train_batch_size, shuffle=True)

    def get_eval_dataloader(self, eval_dataset=None) -> DataLoader:
        return self._loader(eval_dataset or self.eval_dataset, self.args.per_device_eval_batch_size, shuffle=False)

    def _loader(self, rows, size: int, *, shuffle: bool) -> DataLoader:
        sampler = place_sampler(rows, self.grid, shuffle=shuffle, seed=self.args.seed)
        loader = DataLoader(rows, batch_size=size, sampler=sampler, collate_fn=self.data_collator)
        loader.set_epoch = sampler.set_epoch  # the Trainer calls it, so that each epoch has its own order
        return loader


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=64, num_attention_heads=4, num_hidden_layers=2, vocab_size=VOCAB)
    return LlamaForCausalLM(LlamaConfig(**sizes))


def dataset() -> list[dict[str, Tensor]]:
    """Return rows that count up; the first tokens of each are not targets, and their number grows from row to row."""
    rows = [(torch.arange(SEQ) + start) % VOCAB for start in range(0, VOCAB, 2)]
    return [dict(input_ids=row, labels=row.where(torch.arange(SEQ) >= i // 4, -100)) for i, row in enumerate(rows)]


def arguments(folder: str, rows: int) -> TrainingArguments:
    options = dict(gradient_accumulation_steps=2, max_grad_norm=1.0, learning_rate=1e-2, num_train_epochs=1)
    quiet = dict(logging_steps=1, report_to="none", disable_tqdm=True, save_strategy="no", eval_strategy="epoch")
    on_gpu = torch.cuda.is_available()
    # losses are already means over all places, so the Trainer must not scale them by the number of processes
    options |= dict(average_tokens_across_devices=False)
    sizes = dict(per_device_train_batch_size=rows, per_device_eval_batch_size=rows)
    return TrainingArguments(folder, use_cpu=not on_gpu, dataloader_pin_memory=on_gpu, **sizes, **options, **quiet)


def train(grid: ff.Grid, folder: str) -> list[dict[str, float]]:
    places = grid.size("z") * grid.size("data")
    trainer = GridTrainer(
        grid,
        model=ff.parallelize(model(), grid),
        args=arguments(folder, rows=8 // places),
        train_dataset=dataset(),
        eval_dataset=dataset()[:8],
    )
    trainer.train()
    trainer.save_model()  # whole tensors under their original names, for from_pretrained
    return trainer.state.log_history


if __name__ == "__main__":
    grid = ff.Grid(x=2, z=2)
    history = train(grid, sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    if grid.rank == 0:
        print(f"{grid}: losses", *(f"{entry['loss']:.4f}" for entry in history if "loss" in entry))
    grid.close()
