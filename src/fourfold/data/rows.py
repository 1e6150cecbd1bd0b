"""Which rows of a batch a rank reads: the rows of its place, the same ones on all ranks of the place."""

from __future__ import annotations

from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from fourfold.axes import BATCH
from fourfold.grid import Grid, Shape


def local_rows(batch: Tensor, grid: Grid) -> Tensor:
    """Return the rows of the whole batch that belong to this rank's place."""
    (rows,) = rows_of(grid.shape, grid.rank, batch.shape[0])
    return batch[rows.start : rows.stop]


def rows_of(shape: Shape, rank: int, rows: int, micro_steps: int = 1) -> list[range]:
    """Return, for each micro-step, which of the `rows` of a whole step the rank reads.

    The batch is cut into places first and into micro-steps inside each place. So a place reads the same rows
    whatever the number of micro-steps is.
    """
    parts = shape.places * micro_steps
    if rows < 1 or rows % parts:
        names, sizes = list(BATCH), [shape.sizes[axis] for axis in BATCH]
        if micro_steps > 1:
            names, sizes = [*names, "micro_steps"], [*sizes, micro_steps]
        raise ValueError(
            f"a batch of {rows} rows cannot be cut over {'*'.join(names)} = {'*'.join(map(str, sizes))}; "
            f"use a multiple of {parts} rows, such as {max(1, -(-rows // parts)) * parts}"
        )
    first = shape.place(rank) * micro_steps
    count = rows // parts
    return [range(part * count, (part + 1) * count) for part in range(first, first + micro_steps)]


def place_sampler(
    dataset: Dataset, grid: Grid, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler:
    """Return a sampler for a DataLoader over any dataset: all ranks of a place read the same rows.

    The places take turns over the rows. Set the DataLoader's batch_size to the rows of one place; the batches of all
    places together are then the batches that one process reads with the sampler of a grid of one rank. Call
    `set_epoch` to shuffle differently in each epoch.
    """
    shape = grid.shape
    return DistributedSampler(
        dataset, shape.places, shape.place(grid.rank), shuffle=shuffle, seed=seed, drop_last=drop_last
    )
