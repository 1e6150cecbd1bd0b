"""One rank of a large grid in a process of its own: meta tensors under a fake process group.

Prints how many collectives were compared with the closed form; run by test_dry.py.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fourfold as ff
from fourfold.cost.volume import Volume
from fourfold.grid import Shape

CASES = [
    (Shape(4, 2, 4, 2), 37, ff.Policy()),
    (Shape(3, 2, 5, 7, order=("z", "data", "x", "y")), 101, ff.Policy(shard_optimizer=True)),
    (Shape(8, 4, 8, 4), 1023, ff.Policy("replicated", compute=torch.bfloat16, recompute="block", loss_chunk=1000)),
    (Shape(16, 1, 64, 16), 9000, ff.Policy(compute=torch.bfloat16, recompute="attention", keep_gathered=True)),
]


def main() -> None:
    compared = 0
    for shape, rank, policy in CASES:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.world)
        grid = ff.Grid(**shape.sizes, order=shape.order, device="cpu")
        config = ff.models.config(
            "llama-3-8b", layers=2, hidden=4032, heads=96, kv_heads=12, head_dim=84, mlp_hidden=14400, qk_norm=True
        )
        model = ff.models.build(config, grid, policy=policy, device="meta")
        tokens = torch.zeros(2, 1000, dtype=torch.long, device="meta")
        with grid.ledger.watch() as records:
            model(tokens, tokens).backward()
        volume = Volume(config, shape, policy, 2, 1000, torch.float32, rank)
        if Counter(records) != Counter(volume.training_step()):
            raise SystemExit(f"{shape}, rank {rank}: the dry run differs from the closed form")
        compared += len(records)
        dist.destroy_process_group()
    print(compared)


if __name__ == "__main__":
    main()
