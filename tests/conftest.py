"""Fixtures: ranks that stay up between tests, one pool at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from harness import Ranks

torch.set_num_threads(1)  # the cores belong to the ranks

_pools: dict[int, Ranks] = {}


@pytest.fixture
def ranks() -> Callable[[int], Ranks]:
    """`ranks(n)`: a running pool of n ranks."""

    def pool(world: int) -> Ranks:
        if world not in _pools:
            for other in list(_pools):
                _pools.pop(other).close()
            _pools[world] = Ranks(world)
        return _pools[world]

    return pool


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    for pool in _pools.values():
        pool.close()
