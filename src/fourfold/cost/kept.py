"""What a forward pass keeps for backward, found by running the model dry: one rank of its grid on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.grid import Grid
from fourfold.layout import Policy, Recompute
from fourfold.models.config import Config
from fourfold.models.transformer import Transformer
from fourfold.nn.layer import assemble


class Alive(TorchDispatchMode):
    """Bytes of the tensors made inside the block that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._made or self._made[storage._cdata][0].expired():
                    self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def nbytes(self) -> int:
        return sum(nbytes for reference, nbytes in self._made.values() if not reference.expired())


def kept_bytes(
    config: Config,
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


def _kept(config: Config, grid: Grid, policy: Policy, rows: int, seq: int, dtype: torch.dtype, documents: bool) -> int:
    model = Transformer(config, grid, policy)
    assemble(model, grid, policy, dtype=dtype, device=torch.device("meta"))
    tokens = torch.zeros(rows, seq, dtype=torch.long, device="meta")
    with grid.ledger.aside(), Alive() as alive:
        loss = model(tokens, tokens, positions=tokens if documents else None)
        kept = alive.nbytes
    del loss
    return kept
