"""The bounds of a step with experts: its computation alone, and its communication alone.

Both run what a real step has done. Computation alone mutes the grid, and takes the choices and counts of the real step,
because those of messages that are not sent would be any numbers. Communication alone sends the messages of the real
step, with nothing computed between them; its all-to-alls have the same uneven parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from benchmarks.experts.waits import counts_through
from benchmarks.shared.models import IN_FLIGHT
from fourfold import comm, wire
from fourfold.grid import Grid
from fourfold.nn.dispatch import Dispatch, Pairs, RowCounts

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
"""The functions of `wire` that a step calls."""


class SentMessage(NamedTuple):
    """A call of `wire`."""

    function: Callable[..., Callable[[], Any]]
    args: tuple[Any, ...]


class MessageBuffers:
    """Zeros for messages that are sent again. Sides take turns, so they share them; those of one side are distinct."""

    def __init__(self) -> None:
        self._tensors: defaultdict[tuple[Any, ...], list[Tensor]] = defaultdict(list)

    def taking(self) -> Callable[[Tensor], Tensor]:
        """Return the function that gives a buffer for each tensor of one side."""
        taken = Counter[tuple[Any, ...]]()

        def take(like: Tensor) -> Tensor:
            key = like.shape, like.dtype
            place, taken[key] = taken[key], taken[key] + 1
            if place == len(self._tensors[key]):
                self._tensors[key].append(torch.zeros(like.shape, dtype=like.dtype, device=like.device))
            return self._tensors[key][place]

        return take


class Bounds:
    """The bounds of one side on this rank."""

    def __init__(self, step: Callable[[], object], grid: Grid, buffers: MessageBuffers) -> None:
        self.step, self.grid = step, grid
        sent: list[SentMessage] = []
        self.counts: list[RowCounts] = []
        self.choices: list[Tensor] = []
        """The destinations of tokens: the ranks of those that are sent, and the experts of those that have come."""
        with _noting_messages(sent, grid), _noting_counts(self.counts), _noting_choices(self.choices):
            step()
        take = buffers.taking()
        self.messages = [SentMessage(each.function, tree_map_only(Tensor, take, each.args)) for each in sent]

    def compute(self) -> None:
        """Take a step that sends nothing; its results mean nothing."""
        counts, choices, sort = deque(self.counts), deque(self.choices), Pairs.__init__

        def known(*_: object) -> Callable[[], RowCounts]:
            return counts.popleft

        def sort_known(pairs: Pairs, _: Tensor, number: int) -> None:
            sort(pairs, choices.popleft(), number)

        with (
            comm.muted(self.grid),
            mock.patch.object(Dispatch, "_launch_counts", known),
            mock.patch.object(Pairs, "__init__", sort_known),
        ):
            self.step()

    def communicate(self) -> None:
        """Send the messages of a step in their order."""
        pending: deque[Callable[[], Any]] = deque()
        for message in self.messages:
            pending.append(message.function(*message.args))
            if len(pending) > IN_FLIGHT:
                pending.popleft()()
        while pending:
            pending.popleft()()


@contextmanager
def _noting_messages(sent: list[SentMessage], grid: Grid) -> Iterator[None]:
    """Note the messages that the grid's ledger counts: others belong to no step, such as comparisons of copies."""
    inside = False  # `wire` may send one kind of message as another

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal inside
            if inside or len(counted) == len(sent):
                return function(*args)
            sent.append(SentMessage(function, args))
            inside = True
            try:
                return function(*args)
            finally:
                inside = False

        return call

    with grid.ledger.watch() as counted, ExitStack() as stack:  # which counts a message before it is sent
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(wire, name, noting(getattr(wire, name))))
        yield


def _noting_counts(found: list[RowCounts]) -> AbstractContextManager[None]:
    def noted(counting: Callable[[], RowCounts]) -> RowCounts:
        found.append(counting())
        return found[-1]

    return counts_through(noted)


@contextmanager
def _noting_choices(found: list[Tensor]) -> Iterator[None]:
    sort = Pairs.__init__

    def noting(self: Pairs, ids: Tensor, number: int) -> None:
        found.append(ids.clone())
        sort(self, ids, number)

    with mock.patch.object(Pairs, "__init__", noting):
        yield
