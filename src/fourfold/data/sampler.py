"""Rows of anybody's dataset for a rank's (data, z) place, in the order that one process would read them."""

from __future__ import annotations

from torch.utils.data import Dataset, DistributedSampler

from fourfold.grid import Grid


def place_sampler(
    dataset: Dataset, grid: Grid, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
) -> DistributedSampler:
    """A sampler for a DataLoader: the places take turns over the rows, ranks of one place read the same ones.

    Give the DataLoader the rows of one place as its batch_size. Then each batch of all places together is that of one
    process with the sampler of a grid of one rank. `set_epoch` shuffles anew.
    """
    places = grid.shape.places
    place = grid.shape.place(grid.rank)
    return DistributedSampler(dataset, places, place, shuffle=shuffle, seed=seed, drop_last=drop_last)
