"""Which rows of a batch a rank reads: those of its (data, z) place, the same on all ranks of the place."""

from __future__ import annotations

from torch import Tensor

from fourfold.grid import Grid, Shape


def local_rows(batch: Tensor, grid: Grid) -> Tensor:
    """The rows of this rank's place out of the whole batch; data is the outer cut, z the inner."""
    (rows,) = rows_of(grid.shape, grid.rank, batch.shape[0])
    return batch[rows.start : rows.stop]


def rows_of(shape: Shape, rank: int, rows: int, micro_steps: int = 1) -> list[range]:
    """The rows that a rank reads in each micro-step, out of the `rows` of a whole step.

    The place is cut first and the micro-steps inside it, so a place sees the same rows however many
    micro-steps it takes them in.
    """
    data, z = shape.sizes["data"], shape.sizes["z"]
    parts = data * z * micro_steps
    if rows < 1 or rows % parts:
        over = f"data*z = {data}*{z}" if micro_steps == 1 else f"data*z*micro_steps = {data}*{z}*{micro_steps}"
        raise ValueError(
            f"a batch of {rows} rows cannot be cut over {over}; "
            f"use a multiple of {parts} rows, such as {max(1, -(-rows // parts)) * parts}"
        )
    first = shape.place(rank) * micro_steps
    count = rows // parts
    return [range(part * count, (part + 1) * count) for part in range(first, first + micro_steps)]
