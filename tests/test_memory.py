"""What a rank holds: its share of the parameters, and few gathered units at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import fourfold as ff
from fourfold import comm
from fourfold.arriving import local_of
from fourfold.comm import join_shards
from fourfold.grid import Grid, Shape
from fourfold.layout import Policy
from fourfold.nn.initial import BLOCK_ELEMENTS
from fourfold.nn.layer import specs_of
from harness import Largest, grid_of

SHAPE = Shape(x=2, z=2)


def start() -> dict[str, Any]:
    grid = grid_of(SHAPE)
    config = ff.models.config("llama-tiny", vocab=8192, hidden=128)
    with Largest() as largest:
        model = ff.models.build(config, grid, seed=9)
    alone = ff.models.build(config, Grid.alone(), seed=9)
    specs = specs_of(model)
    return {
        "largest": largest.elements,
        "held": sum(local_of(parameter).numel() for parameter in model.parameters()),
        "share": config.parameters / 4,
        "equal": all(
            torch.equal(join_shards(local_of(a), specs[name], grid), local_of(b))
            for (name, a), b in zip(model.named_parameters(), alone.parameters(), strict=True)
        ),
        "other seed": torch.equal(
            local_of(model.head.weight), local_of(ff.models.build(config, grid, seed=10).head.weight)
        ),
    }


def test_weights_depend_on_seed_and_name_and_are_never_whole_on_a_rank(ranks) -> None:
    for found in ranks(4).run(start):
        assert found["equal"]
        assert not found["other seed"]
        assert found["largest"] <= BLOCK_ELEMENTS < 8192 * 128
        assert found["held"] <= found["share"] * 1.001  # norm weights are not cut over x


def gathered(policy: Policy) -> dict[str, Any]:
    """Bytes of gathered weights that are alive, watched at every gather, free buffers included."""
    grid = grid_of(SHAPE)
    model = ff.models.build(ff.models.config("gpt-tiny", vocab=53, layers=6), grid, policy=policy)
    live: dict[int, tuple[StorageWeakRef, int]] = {}
    peak, units = 0, []
    original = comm.all_gather_together

    def held() -> int:
        return sum(nbytes for reference, nbytes in live.values() if not reference.expired())

    def watch(*args: Any, **kwargs: Any) -> Any:
        nonlocal peak
        pending = original(*args, **kwargs)
        buffers = {whole.untyped_storage().data_ptr(): whole.untyped_storage() for whole in pending.wait()}
        live.update({at: (StorageWeakRef(storage), storage.nbytes()) for at, storage in buffers.items()})
        units.append(sum(storage.nbytes() for storage in buffers.values()))
        peak = max(peak, held())
        return pending

    comm.all_gather_together = watch
    tokens = ff.local_rows(torch.arange(32).view(4, 8), grid)
    try:
        for _ in range(2):  # the first pass records the order, the second gathers ahead
            loss = model(tokens, tokens)
            after_forward = held()
            loss.backward()
    finally:
        comm.all_gather_together = original
    block = sum(p.numel() for p in model.layers[0].parameters()) // grid.size("x") * 4
    return {"peak": peak, "largest unit": max(units), "block": block, "kept": after_forward - held()}


def test_gathered_weights_take_the_memory_of_a_block_and_of_what_is_in_flight(ranks) -> None:
    for found in ranks(4).run(gathered, Policy()):
        assert found["peak"] <= found["block"] + 3 * found["largest unit"]  # one is used, two are in flight
        assert found["kept"] <= found["largest unit"]  # the head's, gathered again for backward


def test_keeping_weights_is_seen_by_the_count(ranks) -> None:
    for found in ranks(4).run(gathered, Policy(keep_weights=True)):
        assert found["kept"] > 5 * found["block"]
