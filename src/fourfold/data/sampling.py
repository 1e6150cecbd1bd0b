"""Which samples a step trains on, and which of its rows a rank reads: integer arithmetic, equal on every machine.

A source of N tokens is cut into windows of `seq` tokens. Window i has the tokens [i*seq, (i+1)*seq + 1), the last one
as a target only, so every token but the first is a target once. The last windows are held out for evaluation. An epoch
of a source visits each of its training windows once, in a different order in each epoch. Several sources take turns in
proportion to their weights. None of this depends on the grid.

Of the rows of a step a rank reads those of its place, so all ranks of a place read the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, lcm
from typing import Any, ClassVar

from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from fourfold.axes import BATCH, CONTEXT
from fourfold.errors import ChangedDataError
from fourfold.grid import Grid, Shape
from fourfold.nn.rng import key_of

ROUNDS = 8
"""Rounds of the Feistel network. Four rounds are the fewest that look random. The number must be even, so that the two
halves of the bits end in their own places."""

MASK = (1 << 64) - 1
"""Keeps the low 64 bits of a number, since Python's integers do not overflow as the hash needs them to."""


# The order of samples


@dataclass(frozen=True, slots=True)
class SourceWindows:
    """A source cut into windows. The first `train` of its `windows` are trained on, the others are held out."""

    name: str
    tokens: int
    seq: int
    windows: int
    train: int
    content: dict[str, str] = field(default_factory=dict)
    """What identifies the content: the source's `fingerprint`."""

    @property
    def held_out(self) -> int:
        """The number of windows for evaluation."""
        return self.windows - self.train


def cut_windows(
    name: str, tokens: int, seq: int, held_out: float = 0.0, content: dict[str, str] | None = None
) -> SourceWindows:
    """Cut a source into windows and hold out the last fraction of them: at least one window, unless it is 0."""
    if seq < 1 or not 0 <= held_out < 1:
        raise ValueError(f"seq={seq} must be at least 1, and held_out={held_out} must be at least 0 and below 1")
    windows = -(-(tokens - 1) // seq)
    # Exact arithmetic on the decimal that was written: 0.1 of 30 windows is 3 on every machine.
    held = max(1, int(Fraction(str(held_out)) * windows)) if held_out else 0
    if windows <= held:
        needed = seq + 2 if held_out else 2
        raise ValueError(
            f"the source {name} of {tokens} tokens is too short: seq={seq} and held_out={held_out} need {needed} "
            "tokens; give more text, or make seq or held_out smaller"
        )
    return SourceWindows(name, tokens, seq, windows, windows - held, content or {})


class Permutation:
    """A pseudo-random permutation of range(n). Each element is computed by itself, so nothing of size n is stored.

    A Feistel network permutes all numbers with as many bits as n - 1 has. A result outside of range(n) is permuted
    again until it is inside, which takes fewer than two tries on average.
    """

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"cannot permute {n} numbers; there must be at least one")
        self.n = n
        bits = max(1, (n - 1).bit_length())
        self._low = bits - bits // 2
        masks = (1 << bits // 2) - 1, (1 << self._low) - 1  # the halves swap in each round, and so do their sizes
        self._rounds = [(key_of(key, turn), masks[turn % 2]) for turn in range(ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(f"index {index} is outside of a permutation of {self.n} numbers")
        index = self._permuted(index)
        while index >= self.n:
            index = self._permuted(index)
        return index

    def _permuted(self, index: int) -> int:
        left, right = divmod(index, 1 << self._low)
        for key, mask in self._rounds:
            left, right = right, left ^ (_hash(right ^ key) & mask)
        return left << self._low | right


def _hash(value: int) -> int:
    """Return a hash in which every bit depends on every bit of the value (the finalizer of splitmix64)."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


class SampleOrder:
    """The samples of a run in their order, from a seed. The position can be saved and restored.

    Sample k comes from the source that is due first among those that have not had their share of the first k samples.
    So no source is ever a whole sample ahead of its share or behind it. (Always taking the source that is furthest
    behind lets others fall behind by more than one sample.)
    """

    pack: ClassVar[str] = "windows"
    """What a sample is: a window of a source."""

    def __init__(self, sources: Sequence[SourceWindows], weights: Sequence[float] | None, seed: int) -> None:
        self.sources = tuple(sources)
        self.seed = seed
        self.weights = _integer_weights(self.sources, weights)
        self._total = sum(self.weights)
        self._periods = [lcm(*self.weights) // weight for weight in self.weights]
        self.sample = 0
        self.given = [0] * len(self.sources)
        self._permutations: dict[int, tuple[int, Permutation]] = {}  # by source: the current epoch and its order

    def take(self, count: int) -> list[tuple[int, int]]:
        """Return the next samples, each as (source, number of the sample within that source)."""
        return [self._next() for _ in range(count)]

    def _next(self) -> tuple[int, int]:
        self.sample += 1
        behind = [i for i, w in enumerate(self.weights) if self.given[i] * self._total < w * self.sample]
        # The share of source i reaches given + 1 at sample (given + 1) * total / weight. The periods are 1 / weight on
        # a common denominator, so the comparison is exact.
        source = min(behind, key=lambda i: ((self.given[i] + 1) * self._periods[i], i))
        self.given[source] += 1
        return source, self.given[source] - 1

    def window(self, source: int, number: int) -> int:
        """Return the window that is sample `number` of a source."""
        return self._permuted(source, number, self.sources[source].train)

    def _permuted(self, source: int, number: int, samples: int) -> int:
        """Return which of the samples of a source its sample `number` is, in the order of its epoch."""
        epoch, index = divmod(number, samples)
        if self._permutations.get(source, (-1,))[0] != epoch:
            self._permutations[source] = epoch, Permutation(samples, key_of(self.seed, "order", source, epoch))
        return self._permutations[source][1](index)

    def state(self) -> dict[str, Any]:
        """Return the position and what identifies the data; numbers, texts, lists and dicts only."""
        return {"sample": self.sample, "given": list(self.given), "of": self._identity()}

    def restore(self, state: dict[str, Any], *, accept_changes: bool = False) -> list[str]:
        """Continue from a position that was saved with the same sources, seq, seed and weights.

        With `accept_changes` the sources may have other content, but there must be as many. Return what a user should
        know: the changes that were accepted, and sources whose content the position does not identify.
        """
        # A position comes from a file that anybody may have written, so every type is checked before it is relied on.
        try:
            sample, given = state["sample"], list(state["given"])
            settings, contents = _differences(state["of"], self._identity())
            if not all(type(count) is int and count >= 0 for count in (sample, *given)):
                raise TypeError("a count is not a whole number")
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"this is not a saved position in the data: {state!r} ({error}); pass what state() returned"
            ) from error
        if settings or (contents and not accept_changes):
            raise (ValueError if settings else ChangedDataError)(
                f"the data differs from the data of the saved position: {'; '.join([*settings, *contents])}; give the "
                "same data to continue, or start a new run to train on other data"
            )
        if len(given) != len(self.sources) or sum(given) != sample:
            raise ValueError(f"this position is damaged: {given} samples of each source do not add up to {sample}")
        self._restore_more(state, given)
        self.sample, self.given = sample, given
        unknown = [
            f"whether the content of {source.name} has changed is unknown, because the checkpoint does not identify it"
            for source, saved in zip(self.sources, state["of"]["sources"], strict=True)
            if source.content and "content" not in saved
        ]
        return [*(f"a change of the data was accepted: {text}" for text in contents), *unknown]

    def _restore_more(self, state: dict[str, Any], given: Sequence[int]) -> None:
        """Take over what other kinds of samples store besides; raise if it is damaged."""

    def _identity(self) -> dict[str, Any]:
        return {
            "pack": self.pack,
            "seed": self.seed,
            "seq": self.sources[0].seq,
            "weights": list(self.weights),
            "sources": [
                {"name": s.name, "tokens": s.tokens, "trained windows": s.train, "content": dict(s.content)}
                for s in self.sources
            ],
        }


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return how an identity differs from a saved one: in what the config determines, and in the sources' content."""
    saved = {"pack": SampleOrder.pack, **saved}  # positions of earlier versions do not say
    keys = [key for key in here if key != "sources"] if saved["pack"] == here["pack"] else ["pack"]
    settings = [f"{key} was {saved[key]}, is {here[key]}" for key in keys if saved[key] != here[key]]
    if len(saved["sources"]) != len(here["sources"]):
        settings.append(f"number of sources was {len(saved['sources'])}, is {len(here['sources'])}")
    contents: list[str] = []
    for number, (before, now) in enumerate(zip(saved["sources"], here["sources"], strict=False)):
        content: dict[str, Any] = before.get("content", {})  # positions of earlier versions have none
        compared = now["content"].keys() & content.keys()
        changed = {
            key: f"{key} of source {number} was {before[key]}, is {now[key]}"
            for key in ("name", "tokens", "trained windows")
            if before[key] != now[key]
        }
        if compared:
            changed.pop("name", None)  # a file that was renamed or moved is the same where its content is
        if changed.keys() == {"trained windows"}:
            settings += changed.values()  # the source is as long as it was, so another share of it is held out
        elif changed:
            contents.append(f"{now['name']}: {'; '.join(changed.values())}")
        elif any(content[key] != now["content"][key] for key in compared):
            contents.append(f"{now['name']}: source {number} has as many tokens as before, but other ones")
    return settings, contents


def _integer_weights(sources: tuple[SourceWindows, ...], weights: Sequence[float] | None) -> tuple[int, ...]:
    """Return the weights as the smallest whole numbers in the same proportion."""
    if not sources:
        raise ValueError("there is no source to take samples from; name at least one")
    weights = [1] * len(sources) if weights is None else weights
    if len(weights) != len(sources):
        raise ValueError(f"there are {len(weights)} weights for {len(sources)} sources; give each source one weight")
    wrong = [weight for weight in weights if not 0 < weight < float("inf")]
    if wrong:
        raise ValueError(
            f"weights {list(weights)}: {wrong[0]} is not a finite number above 0; to not use a source, leave it out"
        )
    exact = [Fraction(str(weight)) for weight in weights]  # through the decimal: 0.1 is exactly a tenth
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple(weight // gcd(*whole) for weight in whole)


# The rows of a rank


def local_rows(batch: Tensor, grid: Grid) -> Tensor:
    """Return the rows of the whole batch that belong to this rank's place, or to its context group."""
    (rows,) = rows_of(grid.shape, grid.rank, batch.shape[0])
    return batch[rows.start : rows.stop]


def rows_of(shape: Shape, rank: int, rows: int, micro_steps: int = 1) -> list[range]:
    """Return, for each micro-step, which of the `rows` of a whole step the rank reads.

    The batch is cut into places first and into micro-steps inside each place. So a place reads the same rows
    whatever the number of micro-steps is.
    """
    parts = shape.row_places * micro_steps
    if rows < 1 or rows % parts:
        sizes = {axis: shape.sizes[axis] for axis in BATCH}
        if micro_steps > 1:
            sizes["micro_steps"] = micro_steps
        names, numbers = "*".join(sizes), "*".join(map(str, sizes.values()))
        if shape.context > 1:
            names, numbers = f"{names}/{CONTEXT}", f"{numbers}/{shape.context}"
        raise ValueError(
            f"a batch of {rows} rows cannot be cut over {names} = {numbers}; "
            f"use a multiple of {parts} rows, such as {max(1, -(-rows // parts)) * parts}"
        )
    first = shape.row_place(rank) * micro_steps
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
        dataset, shape.row_places, shape.row_place(grid.rank), shuffle=shuffle, seed=seed, drop_last=drop_last
    )
