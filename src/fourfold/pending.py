"""A collective in flight, and its name wherever somebody asks: in errors, profiles, the ledger's events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from fourfold.grid import Grid
from fourfold.job import typed_errors
from fourfold.ledger import Collective, span

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
    """Name the collective in profiles and in the error that the backend raises inside."""
    with typed_errors(str(record)), span(f"{doing}{record}"):
        yield
