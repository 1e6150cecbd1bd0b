"""What a forward pass keeps for backward, found by running the model dry: one rank of its grid on the meta device."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.grid import Grid
from fourfold.models.config import ModelConfig
from fourfold.models.transformer import Transformer
from fourfold.nn.layer import assemble
from fourfold.policy import Policy, Recompute


class Alive(TorchDispatchMode):
    """Bytes of the tensors made inside the block: those that are still alive, and the most that ever were.

    What a kernel allocates for itself and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.peak_nbytes = 0
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((*args, *kwargs.values()) if kwargs else args)}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out if isinstance(out, tuple | list) else (out,)):
            if storage._cdata not in given:  # a view of a parameter is no memory of its own
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._made:
            return
        # torch keeps a storage's Python object for as long as the storage, so this is told when the memory goes
        self._made[key] = weakref.ref(storage, partial(self._forget, key, nbytes))
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _forget(self, key: int, nbytes: int, _: object) -> None:
        del self._made[key]
        self.nbytes -= nbytes


def _storages(values: Sequence[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if type(value) is torch.Tensor:
            yield value.untyped_storage()
        elif isinstance(value, tuple | list):
            yield from _storages(value)


def kept_bytes(
    config: ModelConfig,
    grid: Grid,
    policy: Policy,
    rows: int,
    seq: int,
    *,
    dtype: torch.dtype = torch.float32,
    documents: bool = False,
) -> dict[str, int]:
    """Bytes that a rank keeps from forward to backward of `rows` rows of its place, by kind of recompute.

    With `documents` the rows are packed, and their mask is kept too.
    """
    return {
        kind: _kept(config, grid, replace(policy, recompute=kind), rows, seq, dtype, documents)
        for kind in get_args(Recompute)
    }


def _kept(
    config: ModelConfig, grid: Grid, policy: Policy, rows: int, seq: int, dtype: torch.dtype, documents: bool
) -> int:
    model = Transformer(config, grid, policy)
    assemble(model, grid, policy, dtype=dtype, device=torch.device("meta"))
    tokens = torch.zeros(rows, seq, dtype=torch.long, device="meta")
    with grid.ledger.not_counted(), Alive() as alive:
        loss = model(tokens, tokens, positions=tokens if documents else None)
        kept = alive.nbytes
    del loss
    return kept
