"""Fixtures: ranks that stay up between tests, one pool at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from curves import write_texts
from fourfold.data.sources import prepare
from fourfold.data.tokenizer import load_tokenizer
from harness import PRELOAD, Ranks, _context, close_pools, close_worn, pool

torch.set_num_threads(1)  # the cores belong to the ranks ...
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ... one each: threads that spin on shared cores hold each other up


@pytest.fixture
def ranks() -> Callable[[int], Ranks]:
    """`ranks(n)`: a running pool of n ranks."""
    return pool


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    """A process of its own for commands of one rank, which end the process group of theirs."""
    own = Ranks(1)
    yield own
    own.close()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small file of tokens, which a run can read without preparing anything."""
    texts = write_texts(tmp_path_factory.mktemp("data"))
    return str(prepare([texts], texts.parent / "texts.tokens", load_tokenizer("bytes")).path)


@pytest.fixture(scope="session")
def alone() -> Iterator[Callable[..., Any]]:
    """Runs a job in a process that has joined no process group."""
    with ProcessPoolExecutor(1, _context) as process:
        yield lambda job, *args, **options: process.submit(job, *args, **options).result(timeout=120)


@pytest.fixture(scope="module", autouse=True)
def _close_worn() -> Iterator[None]:
    yield
    close_worn()


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    _context.set_forkserver_preload(PRELOAD)  # the benchmarks that were collected have asked for less
    gc.freeze()  # what was imported for the tests lives until the end: no collection needs to walk it
    yield
    close_pools()
