"""Batches for the steps of a run: this rank's rows of them, read ahead by a thread, with a position to go on from.

The batch of a step is the next `rows` samples of the order, whatever the grid and the number of micro-steps are;
a rank reads the rows of its (data, z) place. `Evaluation` gives the held-out windows in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Self

import torch

from fourfold.data.order import Order
from fourfold.data.rows import rows_of
from fourfold.data.samples import Batch, sampler_of
from fourfold.data.source import Source
from fourfold.grid import Grid


class Loader:
    """`next()` gives the micro-steps of a step as (tokens, targets, positions or None), each [rows, seq] on the device.

    `rows` counts those of a whole step, over all ranks and micro-steps. One step is read ahead; `state` is the
    position after the steps that `next` has given, without it.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float] | None,
        grid: Grid,
        *,
        rows: int,
        seq: int,
        vocab: int,
        micro_steps: int = 1,
        seed: int = 0,
        held_out: float = 0.0,
        documents: bool = False,
        device: torch.device | None = None,
    ) -> None:
        if micro_steps < 1:
            raise ValueError(f"micro_steps={micro_steps}: a step has at least one")
        self.device = grid.device if device is None else device
        self._rows = rows
        self._mine = rows_of(grid.shape, grid.rank, rows, micro_steps)
        self._sampler = sampler_of(sources, seq=seq, held_out=held_out, vocab=vocab, documents=documents)
        self._order = Order(self._sampler.parts, weights, seed)  # stands where reading stands
        self._state = self._order.state()
        grid.agree("the data", str((self._state["of"], rows, documents)))
        self._pool = ThreadPoolExecutor(1, "fourfold-data", initializer=_use, initargs=(self.device,))
        self._closed = False
        self._ahead: Future[tuple[list[Batch], dict[str, Any]]] | None = None

    def next(self) -> list[Batch]:
        """The micro-steps of the next step; an error of reading it comes out here."""
        if self._closed:
            raise RuntimeError("this loader is closed; make a new one and restore its state")
        ahead = self._ahead or self._pool.submit(self._read)
        self._ahead = ahead  # if reading failed it stays, and so does the position
        batches, state = ahead.result()
        self._ahead = self._pool.submit(self._read)
        self._state = state
        return [_moved(batch, self.device) for batch in batches]

    def state(self) -> dict[str, Any]:
        """The position after the last step given; can be stored as JSON."""
        return {**self._state, "given": list(self._state["given"])}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a position; what was read ahead is dropped."""
        if self._ahead is not None:
            wait([self._ahead])  # the thread must be done with the order
            self._ahead = None
            self._order.restore(self._state)
        self._order.restore(state)
        self._state = self._order.state()

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> tuple[list[Batch], dict[str, Any]]:
        turns = self._order.take(self._rows)
        batches = []
        for mine in self._mine:
            picks = [(source, self._order.window(source, ordinal)) for source, ordinal in turns[mine.start : mine.stop]]
            batches.append(_pinned(self._sampler.batch(picks), self.device))
        return batches, self._order.state()


class Evaluation:
    """The held-out windows of the sources in batches of `rows`, in order: the same batches on every grid.

    With `batches` that many of them at most, of windows spread evenly over all. The last batch is filled up with
    rows without targets. Iterate over it as often as needed.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        grid: Grid,
        *,
        rows: int,
        seq: int,
        vocab: int,
        held_out: float,
        documents: bool = False,
        batches: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        if not held_out or (batches is not None and batches < 1):
            raise ValueError(
                f"held_out={held_out} and batches={batches}: nothing to evaluate on; hold out a fraction above 0, "
                "such as 0.01, and take at least one batch"
            )
        self.device = grid.device if device is None else device
        (self._mine,) = rows_of(grid.shape, grid.rank, rows)
        self._rows = rows
        self._sampler = sampler_of(sources, seq=seq, held_out=held_out, vocab=vocab, documents=documents)
        self._held = sum(part.windows - part.train for part in self._sampler.parts)
        self.windows = self._held if batches is None else min(self._held, batches * rows)

    def __len__(self) -> int:
        return -(-self.windows // self._rows)

    def __iter__(self) -> Iterator[Batch]:
        for start in range(0, self.windows, self._rows):
            picks = [self.window(start + row) if start + row < self.windows else None for row in self._mine]
            yield _moved(self._sampler.batch(picks), self.device)

    def window(self, place: int) -> tuple[int, int]:
        """The (source, window) at a place of the evaluation."""
        place = place * self._held // self.windows
        for number, part in enumerate(self._sampler.parts):
            if place < part.windows - part.train:
                return number, part.train + place
            place -= part.windows - part.train
        raise IndexError(f"the evaluation has {self.windows} windows")


def _use(device: torch.device) -> None:
    """Let this thread pin memory for the rank's own GPU, not make a context on the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _pinned(batch: Batch, device: torch.device) -> Batch:
    if device.type != "cuda":
        return batch
    tokens, targets, positions = batch
    return tokens.pin_memory(), targets.pin_memory(), None if positions is None else positions.pin_memory()


def _moved(batch: Batch, device: torch.device) -> Batch:
    """To the device; from pinned memory without waiting, torch keeps that until the copy is done."""
    tokens, targets, positions = batch
    if positions is not None:
        positions = positions.to(device, non_blocking=True)
    return tokens.to(device, non_blocking=True), targets.to(device, non_blocking=True), positions
