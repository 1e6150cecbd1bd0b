"""Which rows of a batch a rank reads: those of its (data, z) place, the same on all ranks of the place."""

from __future__ import annotations

from torch import Tensor

from fourfold.grid import Grid


def local_rows(batch: Tensor, grid: Grid) -> Tensor:
    """The rows of this rank's place out of the whole batch; data is the outer cut, z the inner."""
    places = grid.size("data") * grid.size("z")
    if batch.shape[0] == 0 or batch.shape[0] % places:
        raise ValueError(
            f"a batch of {batch.shape[0]} rows cannot be cut over data*z = {grid.size('data')}*{grid.size('z')}; "
            f"use a multiple of {places} rows, such as {max(1, -(-batch.shape[0] // places)) * places}"
        )
    rows = batch.shape[0] // places
    place = grid.coords["data"] * grid.size("z") + grid.coords["z"]
    return batch[place * rows : (place + 1) * rows]
