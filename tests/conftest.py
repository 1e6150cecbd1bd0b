"""Fixtures: ranks that stay up between tests, one pool at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from harness import Ranks, _context

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


@pytest.fixture(scope="session")
def alone() -> Iterator[Callable[..., Any]]:
    """Runs a job in a process that has joined no process group."""
    with ProcessPoolExecutor(1, _context) as process:
        yield lambda job, *args, **options: process.submit(job, *args, **options).result(timeout=120)


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    for pool in _pools.values():
        pool.close()
