"""A collective in flight, and its name wherever somebody asks: in errors, profiles, the ledger's events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from fourfold.grid import Grid
from fourfold.ledger import Collective, span

FAILED = "collective failed"
"""How the errors of collectives begin."""
T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A collective in flight. `wait()` gives its result and may be called again."""

    def __init__(self, finish: Callable[[], T], record: Collective | None = None, grid: Grid | None = None) -> None:
        self._finish: Callable[[], T] | None = finish
        self._record = record
        self._grid = grid
        self._result: T | None = None

    def wait(self) -> T:
        if self._finish is not None:
            if self._record is None or self._grid is None:
                self._result = self._finish()
            else:
                on_gpu = self._grid.device.type == "cuda"
                with named(self._record, "wait "), self._grid.ledger.waiting(self._record, on_gpu=on_gpu):
                    self._result = self._finish()
            self._finish = None  # lets go of the buffers that only the flight needed
        return self._result  # type: ignore[return-value]

    def then(self, step: Callable[[T], U]) -> Pending[U]:
        """The same with a local step after it."""
        return Pending(lambda: step(self.wait()))


@contextmanager
def named(record: Collective, doing: str = "") -> Iterator[None]:
    """Says in a profile, or in an error, which collective it is."""
    try:
        with span(f"{doing}{record}"):
            yield
    except torch.OutOfMemoryError:
        raise  # keeps its type: callers may free memory and try again
    except RuntimeError as error:
        raise RuntimeError(f"{FAILED}: {record}: {error}") from error
