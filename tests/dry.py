"""Jobs of test_dry.py, test_outside.py and soak_dry.py: dry runs, for a process that has no process group of its own.

`python tests/dry.py` compares the dry run with the rehearsed program and prints how many collectives were equal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold.engine import Overlap
from fourfold.grid import Grid, Shape
from fourfold.models import ModelConfig
from fourfold.models.open import open_model
from fourfold.models.transformer import Transformer
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.planner.trace import DryRun, StorageCounter, dry_run, fake_ranks

LLAMA = ff.models.config(
    "llama-3-8b", layers=2, hidden=4032, heads=96, kv_heads=12, head_dim=84, mlp_hidden=14400, qk_norm=True
)
GPT = ff.models.config("gpt-5b", layers=2)
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A dry run."""

    shape: Shape
    policy: ff.Policy = ff.Policy()
    rank: int = 0
    config: ModelConfig = GPT
    rows: int = 2
    seq: int = 1000
    micro_steps: int = 1
    optimizer: bool = False

    def run(self) -> DryRun:
        return dry_run(self.config, self.shape, **self.options)

    @property
    def options(self) -> dict[str, Any]:
        names = ("rank", "rows", "seq", "policy", "micro_steps", "optimizer")
        return {name: getattr(self, name) for name in names}


CASES = [
    Case(Shape(4, 2, 4, 2), rank=37, config=LLAMA),
    Case(Shape(2, 2, 2, 2), ff.Policy(overlap=Overlap.off(halves=2)), rank=5, micro_steps=2),
    Case(Shape(data=16), ff.Policy(compute_dtype=BF16, reduce_dtype=BF16), rank=15, optimizer=True),
    Case(
        Shape(3, 2, 5, 7, order=("z", "data", "x", "y")),
        ff.Policy(shard_optimizer=True),
        rank=101,
        config=LLAMA,
        micro_steps=2,
        optimizer=True,
    ),
    Case(
        Shape(8, 4, 8, 4),
        ff.Policy("replicated", compute_dtype=BF16, recompute="block", loss_chunk=700),
        rank=1023,
        config=LLAMA,
    ),
    Case(Shape(16, 1, 64, 16), ff.Policy(compute_dtype=BF16, recompute="attention", keep_gathered=True), rank=9000),
    Case(Shape(8, 2, 64, 16), ff.Policy(compute_dtype=BF16, recompute="block", shard_optimizer=True), optimizer=True),
]


def compare(case: Case) -> int:
    """Return how many collectives the dry run and the rehearsed program agree in; raise where they do not."""
    found = Counter(case.run().records)
    sizes = LocalSizes(case.config, case.shape, case.policy, case.rows, case.seq, torch.float32, case.rank)
    wanted = Counter(step_program(sizes, micro_steps=case.micro_steps, optimizer=case.optimizer).records)
    if found != wanted:
        raise ValueError(f"{case}: the dry run has {found - wanted}, the program {wanted - found}")
    return found.total()


def run(case: Case) -> DryRun:
    return case.run()


def kept(case: Case) -> int:
    """By the dry run of a forward pass alone."""
    return kept_by_forward(case.config, case.shape, case.policy, case.rows, case.seq, rank=case.rank)


def kept_by_forward(
    config: ModelConfig, shape: Shape, policy: ff.Policy, rows: int, seq: int, *, rank: int = 0, packed: bool = False
) -> int:
    """The bytes that a forward pass of the model itself leaves for backward, on meta tensors."""
    with fake_ranks(shape, rank) as grid:
        model = Transformer(config, grid, policy)
        model.assemble(dtype=torch.float32, device=torch.device("meta"))
        tokens = torch.zeros(rows, seq, dtype=torch.long, device="meta")
        with grid.ledger.not_counted(), StorageCounter() as alive:
            loss = model(tokens, tokens, positions=tokens if packed else None)
            found = alive.nbytes
        del loss
        return found - sum(cast.copy.nbytes for cast in model.gradients.casts.values())  # those stay beyond backward


def in_company() -> DryRun:
    """A dry run in a process that has joined a group."""
    ff.Grid()
    try:
        return CASES[0].run()
    finally:
        torch.distributed.destroy_process_group()


def run_named(text: str, shape: Shape, **options: Any) -> DryRun:
    return dry_run(open_model(text).model, shape, **options)


# --- models that are named from outside as dry:function


@dataclass(frozen=True)
class Sizes:
    vocab: int = 1000
    width: int = 64
    heads: int = 4
    hidden: list[int] = field(default_factory=lambda: [256, 512])


class Plain(nn.Module):
    """A plain module: attention and a few layers."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.table = nn.Embedding(sizes.vocab, sizes.width)
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width)
        widths = [sizes.width, *sizes.hidden, sizes.vocab]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        a = self.table(tokens) + torch.arange(tokens.shape[1])[:, None]  # on whatever device is the default
        q, k, v = (part.unflatten(2, (self.sizes.heads, -1)).transpose(1, 2) for part in self.qkv(a).chunk(3, dim=2))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        for layer in self.layers:
            a = functional.relu(layer(a))
        return functional.cross_entropy(a.flatten(0, 1), targets.flatten())


class Image(nn.Module):
    """Rows of tokens as images of one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 6, 3, stride=2, padding=1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        a = self.second(self.first(tokens.float().unflatten(1, (8, 8))[:, None]))
        return a.square().mean() + targets.float().mean()


def plain() -> nn.Module:
    return Plain(Sizes())


def image(grid: Grid, policy: ff.Policy) -> nn.Module:
    return ff.parallelize(Image(), grid, policy=policy)


def on_the_grid(grid: Grid, policy: ff.Policy) -> nn.Module:
    return ff.models.build(GPT, grid, policy=policy)  # asks for no device: nothing may be drawn all the same


def plain_on_the_grid(grid: Grid, policy: ff.Policy) -> nn.Module:
    del grid, policy
    return plain()


def with_memory() -> nn.Module:
    return nn.Linear(2, 2, device="cpu")


def no_module() -> object:
    return 3


def three(a: object, b: object, c: object) -> None: ...


if __name__ == "__main__":
    print(sum(compare(case) for case in CASES))
