"""Batches for the steps of a run: a thread prefetches the rows of this rank, and the position can be saved.

The batch of a step is the next `rows` samples of the order, whatever the grid and the number of micro-steps are; a rank
reads the rows of its place. `Evaluation` gives the held-out windows in the same way. A loader with `bag_rows` gives
bags of whole documents instead, each a line of so many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fourfold.data.bags import BagOrder, PackedPiece, check_bag_rows, padding
from fourfold.data.sampling import SampleOrder, cut_windows, rows_of
from fourfold.data.token_files import BLOCK, TokenSource
from fourfold.grid import Grid
from fourfold.nn.attention import document_positions
from fourfold.nn.loss import IGNORE_INDEX
from fourfold.tiles import pad_lengths, to_device


class TokenBatch(NamedTuple):
    """The rows of one micro-step, as a model takes them; tensors are [rows, seq] of int64."""

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None = None
    """Each token's position in its document; None unless documents are kept apart."""
    documents: tuple[int, ...] | Tensor | None = None
    """The same as the lengths of the documents in all rows, one after another, which stay on the host."""

    def pinned(self, device: torch.device) -> TokenBatch:
        """Return the batch in pinned memory if the device is a GPU."""
        return self._map(Tensor.pin_memory) if device.type == "cuda" else self

    def to(self, device: torch.device) -> TokenBatch:
        """Copy the batch to the device."""
        # non_blocking: torch keeps the pinned memory until the copy is done, so the host need not wait for it.
        return self._map(lambda part: part.to(device, non_blocking=True))

    def for_replay(self, device: torch.device) -> TokenBatch:
        """Return the batch for a recorded step: lengths on the host would be those of the recorded batch for ever."""
        if self.documents is None or isinstance(self.documents, Tensor):
            return self
        return self._replace(documents=to_device(pad_lengths(self.documents, self.tokens.numel()), device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> TokenBatch:
        positions = None if self.positions is None else change(self.positions)
        return TokenBatch(change(self.tokens), change(self.targets), positions, self.documents)


class StepRead(NamedTuple):
    """What the thread has read: the micro-steps of a step, and where the order stands after them."""

    batches: list[TokenBatch]
    state: dict[str, Any]
    real_tokens: int


class Loader:
    """The loader of training batches: `next()` returns the micro-steps of a step, each a `TokenBatch` on the device.

    `rows` is the number of rows of a whole step, over all ranks and micro-steps. With `bag_rows` a step consists of
    bags of whole documents, which are kept apart, and each bag is one row of bag_rows*seq tokens. One step is
    prefetched. `state` is the position after the steps that `next` has returned; the prefetched step does not count.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
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
        bag_rows: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        if micro_steps < 1:
            raise ValueError(f"micro_steps={micro_steps}: a step has at least one micro-step")
        self.device = grid.device if device is None else device
        self._rows = rows
        self._local_rows = rows_of(grid.shape, grid.rank, rows, micro_steps)
        documents = documents or bag_rows is not None
        self._reader = WindowReader(sources, seq=seq, held_out=held_out, vocab=vocab, documents=documents)
        windows = self._reader.windows
        self._order = SampleOrder(windows, weights, seed)  # where reading stands, a step ahead of _state
        self._bag_rows = bag_rows
        if bag_rows is not None:
            check_bag_rows(bag_rows, len(self._local_rows[0]))
            sizes: Any = dict(bags=rows // bag_rows, tokens=bag_rows * seq)
            self._order = BagOrder(sources, windows, weights, seed, **sizes)
        self._state = self._order.state()
        self._require_agreement(grid)
        self._pool = ThreadPoolExecutor(1, "fourfold-data", initializer=_set_device, initargs=(self.device,))
        self._closed = False
        self._prefetched: Future[StepRead] | None = None
        self.real_tokens = 0
        """The tokens of the step that `next` returned last, over all ranks, without padding of bags."""

    def _require_agreement(self, grid: Grid) -> None:
        """Raise unless all ranks read the same data: sources of equal content, wherever their files are."""
        of = self._state["of"]
        # the name of a file counts only where its content is not identified
        same = [{key: source[key] for key in source if key != "content"} for source in of["sources"]]
        for source, shown in zip(of["sources"], same, strict=True):
            if source["content"]:
                del shown["name"]
        grid.agree("the data", str(({**of, "sources": same}, self._rows, self._reader.documents, self._bag_rows)))
        for number, source in enumerate(of["sources"]):
            grid.agree(f"the content of source {number} ({source['name']})", str(source["content"]))

    def next(self) -> list[TokenBatch]:
        """Return the micro-steps of the next step. An error while reading it is raised here."""
        if self._closed:
            raise RuntimeError("this loader is closed; make a new one and restore its state")
        prefetched = self._prefetched or self._pool.submit(self._read)
        self._prefetched = prefetched  # kept if reading failed, so that the next call raises the same error
        read = prefetched.result()  # usually done already: it was read during the previous step
        self._prefetched = self._pool.submit(self._read)
        self._state, self.real_tokens = read.state, read.real_tokens
        return [batch.to(self.device) for batch in read.batches]

    @property
    def notes(self) -> list[str]:
        """What somebody should know about the data before the first step."""
        order = self._order
        cut = sum(each.cut for each in order.pieces) if isinstance(order, BagOrder) else 0
        if not isinstance(order, BagOrder) or not cut:
            return []
        longest, number = max(each.longest_cut for each in order.pieces), sum(each.documents for each in order.pieces)
        return [
            f"{cut:,} of {number:,} documents are longer than a bag of {order.tokens:,} tokens and are cut into "
            f"pieces; the longest has {longest:,}"
        ]

    def state(self) -> dict[str, Any]:
        """Return the position after the last step that `next` returned; it can be stored as JSON."""
        return {key: list(value) if isinstance(value, list) else value for key, value in self._state.items()}

    def restore(self, state: dict[str, Any], *, accept_changes: bool = False) -> list[str]:
        """Continue from a saved position. The prefetched step is dropped.

        Raise ChangedDataError if a source has other content than it had, unless `accept_changes`. Return what a user
        should know: the changes that were accepted, and sources whose content the position does not identify.
        """
        if self._prefetched is not None:
            wait([self._prefetched])  # the thread changes the order while it reads
            self._prefetched = None
            self._order.restore(self._state)
        notes = self._order.restore(state, accept_changes=accept_changes)
        self._state = self._order.state()
        return notes

    def close(self) -> None:
        """End the thread."""
        self._closed = True
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> StepRead:
        order, reader, real_tokens = self._order, self._reader, self._rows * self._reader.seq
        if isinstance(order, BagOrder) and self._bag_rows is not None:
            bags = order.take_bags()
            real_tokens = sum(piece.inputs for bag in bags for piece in bag)
            ranges = [slice(local.start // self._bag_rows, local.stop // self._bag_rows) for local in self._local_rows]
            batches = [reader.bags(bags[local], order.tokens) for local in ranges]
        else:
            samples = order.take(self._rows)
            picks = [
                [(source, order.window(source, number)) for source, number in samples[local.start : local.stop]]
                for local in self._local_rows
            ]
            batches = [reader.batch(each) for each in picks]
        return StepRead([batch.pinned(self.device) for batch in batches], order.state(), real_tokens)


def _set_device(device: torch.device) -> None:
    """Make the thread pin memory for this rank's GPU; otherwise it would create a context on the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Evaluation:
    """The held-out windows of the sources in batches of `rows`, in order: the same batches on every grid.

    With `batches`, at most that many batches, with windows spread evenly over all held-out ones. The last batch is
    padded with rows without targets. It can be iterated over any number of times.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
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
                f"held_out={held_out} and batches={batches}: there is nothing to evaluate on; hold out a fraction "
                "above 0, such as 0.01, and take at least one batch"
            )
        self.device = grid.device if device is None else device
        (self._local_rows,) = rows_of(grid.shape, grid.rank, rows)
        self._rows = rows
        self._reader = WindowReader(sources, seq=seq, held_out=held_out, vocab=vocab, documents=documents)
        self._held_out = sum(windows.held_out for windows in self._reader.windows)
        self.windows = self._held_out if batches is None else min(self._held_out, batches * rows)

    def __len__(self) -> int:
        return -(-self.windows // self._rows)

    def __iter__(self) -> Iterator[TokenBatch]:
        for start in range(0, self.windows, self._rows):
            picks = [self.window(start + row) if start + row < self.windows else None for row in self._local_rows]
            yield self._reader.batch(picks).to(self.device)

    def window(self, index: int) -> tuple[int, int]:
        """Return the (source, window) at this index of the evaluation."""
        index = index * self._held_out // self.windows
        for number, windows in enumerate(self._reader.windows):
            if index < windows.held_out:
                return number, windows.train + index
            index -= windows.held_out
        raise IndexError(f"the evaluation has {self.windows} windows")


class WindowReader:
    """Reads windows of its sources as rows. With `documents`, rows also have positions that keep documents apart."""

    def __init__(
        self, sources: Sequence[TokenSource], *, seq: int, held_out: float, vocab: int, documents: bool
    ) -> None:
        for source in sources:
            if source.vocab is not None and source.vocab > vocab:
                raise ValueError(
                    f"the source {source.name} has ids 0 to {source.vocab - 1}, but the model has vocab={vocab}; build "
                    f"the model with vocab={source.vocab} or more, or prepare the text with the model's tokenizer"
                )
            if source.eod is not None and not 0 <= source.eod < vocab:
                raise ValueError(
                    f"the source {source.name} has eod={source.eod}, but the ids of a model with vocab={vocab} are 0 "
                    f"to {vocab - 1}; give another eod or build the model with a larger vocab"
                )
            if documents and not source.has_documents:
                raise ValueError(
                    f"documents=True, but the source {source.name} does not say where documents start; "
                    "give the id that ends them as its eod, or use documents=False"
                )
        self.sources, self.seq, self.vocab, self.documents = tuple(sources), seq, vocab, documents
        self.windows = tuple(
            cut_windows(source.name, source.tokens, seq, held_out, source.fingerprint) for source in sources
        )

    def batch(self, picks: Sequence[tuple[int, int] | None]) -> TokenBatch:
        """Return a row for each (source, window), and a row without targets for each None."""
        tokens, targets = self._blank(len(picks), self.seq)
        lengths = []
        for pick, row, aims in zip(picks, tokens, targets, strict=True):
            if pick is not None:
                self._fill(*pick, row, aims)
            if self.documents:
                lengths.append([self.seq] if pick is None else self.lengths(*pick))
        return self._packed(tokens, targets, lengths)

    def bags(self, bags: Sequence[Sequence[PackedPiece]], size: int) -> TokenBatch:
        """Return a row of `size` tokens for each bag; what its pieces leave is padding, which has no targets."""
        tokens, targets = self._blank(len(bags), size)
        lengths = []
        for bag, row, aims in zip(bags, tokens, targets, strict=True):
            at = 0
            for number, start, inputs in bag:
                ids = self._read(number, start, start + inputs + 1)
                row[at : at + inputs], aims[at : at + inputs] = ids[:-1], ids[1:]
                at += inputs
            row[at:] = (self.sources[bag[0].source].eod or 0) if bag else 0
            lengths.append([*(piece.inputs for piece in bag), *padding(size - at)])
        return self._packed(tokens, targets, lengths)

    def _packed(self, tokens: Tensor, targets: Tensor, lengths: Iterable[Sequence[int]]) -> TokenBatch:
        if not self.documents:
            return TokenBatch(tokens, targets)
        documents = tuple(chain.from_iterable(lengths))
        return TokenBatch(tokens, targets, document_positions(documents).view_as(tokens), documents)

    def _fill(self, number: int, window: int, tokens: Tensor, targets: Tensor) -> None:
        """Write one window into a row. A short one is padded with end-of-document tokens (or 0), without targets.

        The first token of a document is not a target, since no token before it belongs to its document.
        """
        span = self._span(number, window)
        ids = self._read(number, span.start, span.stop)
        count = len(ids) - 1
        tokens[:count], targets[:count] = ids[:-1], ids[1:]
        tokens[count:] = self.sources[number].eod or 0
        if self.documents:
            targets[self._starts(number, span) - 1] = IGNORE_INDEX

    def lengths(self, number: int, window: int) -> list[int]:
        """Return the lengths of the documents of a window, of which padding is one."""
        span = self._span(number, window)
        borders = {0, *self._starts(number, span).tolist(), len(span) - 1, self.seq}
        return [after - before for before, after in pairwise(sorted(borders))]

    def _span(self, number: int, window: int) -> range:
        """Return the tokens of a window, and the one behind it, which is a target."""
        return range(window * self.seq, min((window + 1) * self.seq + 1, self.sources[number].tokens))

    def _starts(self, number: int, span: range) -> Tensor:
        """Return where documents begin behind the first token of a window."""
        return self.sources[number].document_starts(span.start + 1, span.stop) - span.start

    def _read(self, number: int, start: int, stop: int) -> Tensor:
        ids = self.sources[number].read(start, stop)
        check_ids(self.sources[number], start, ids, self.vocab)
        return ids

    def _blank(self, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Return rows of tokens 0 without targets."""
        ids = torch.zeros(rows, tokens, dtype=torch.int64, device="cpu")
        return ids, torch.full_like(ids, IGNORE_INDEX)


def check_ids(source: TokenSource, start: int, ids: Tensor, vocab: int) -> None:
    """Raise if an id of a window that begins at token `start` is not in the model's vocabulary."""
    wrong = ((ids < 0) | (ids >= vocab)).nonzero()
    if len(wrong):
        index = int(wrong[0])
        found = int(ids[index])
        raise ValueError(
            f"the source {source.name} has the id {found} at token {start + index}, but the model's ids are 0 to "
            f"{vocab - 1}; build the model with vocab={max(found + 1, vocab)} or more, or check that the file really "
            "has the format that it is read as"
        )


def unigram_entropy(
    source: TokenSource, vocab: int, *, held_out: float = 0.0, seq: int = 1, most: int = 4 << 20
) -> float:
    """Return the loss, in nats per token, of a model that knows only how frequent each token is.

    The frequencies are those of the first `most` training tokens: enough for a stable number, read in a moment.
    """
    windows = cut_windows(source.name, source.tokens, seq, held_out)
    stop = min(most, windows.train * seq + 1, source.tokens)
    counts = torch.zeros(vocab, dtype=torch.int64, device="cpu")
    for start in range(0, stop, BLOCK):
        ids = source.read(start, min(start + BLOCK, stop))
        check_ids(source, start, ids, vocab)
        counts += torch.bincount(ids, minlength=vocab)
    # fp64, so that the sum over a large vocabulary keeps its digits
    frequency = counts[counts > 0].double() / stop
    return float(-(frequency * frequency.log()).sum())
