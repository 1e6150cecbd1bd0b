"""Which window of which source is sample k of a run: arithmetic on whole numbers, the same on every machine and grid.

A source of N tokens is cut into windows of `seq` tokens; window i has the tokens [i*seq, (i+1)*seq + 1), the last
one as a target only, so every token but the first is a target once. The last windows are held out. An epoch of a
source visits each of its training windows once, in an order of its own. Several sources take turns by their shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from fourfold.nn.initial import key_of

ROUNDS = 8  # an even number, so that the halves end in their own places
MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Part:
    """A source as the order sees it: its windows, of which the first `train` are trained on."""

    name: str
    tokens: int
    seq: int
    windows: int
    train: int


def part_of(name: str, tokens: int, seq: int, held_out: float = 0.0) -> Part:
    """Cut a source into windows and hold out the last fraction of them, at least one unless that is 0."""
    if seq < 1 or not 0 <= held_out < 1:
        raise ValueError(f"seq={seq} must be at least 1 and held_out={held_out} at least 0 and below 1")
    windows = -(-(tokens - 1) // seq)
    held = max(1, int(Fraction(str(held_out)) * windows)) if held_out else 0
    if windows <= held:
        needed = seq + 2 if held_out else 2
        raise ValueError(
            f"the source {name} of {tokens} tokens is too short: seq={seq} and held_out={held_out} need {needed} "
            "tokens; give more text, or make seq or held_out smaller"
        )
    return Part(name, tokens, seq, windows, windows - held)


class Permutation:
    """A pseudo-random order of range(n) of which any place is computed by itself.

    A Feistel network permutes the numbers of the fewest bits that hold n; what falls outside of range(n) is
    permuted again until it falls inside (twice on average, at most).
    """

    def __init__(self, n: int, key: int) -> None:
        if n < 1:
            raise ValueError(f"a permutation of {n} numbers: there must be at least one")
        self.n = n
        bits = max(1, (n - 1).bit_length())
        self._low = bits - bits // 2
        masks = (1 << bits // 2) - 1, (1 << self._low) - 1  # the halves change places, and so do their sizes
        self._rounds = [(key_of(key, turn), masks[turn % 2]) for turn in range(ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(f"place {index} of a permutation of {self.n} numbers")
        index = self._permuted(index)
        while index >= self.n:
            index = self._permuted(index)
        return index

    def _permuted(self, index: int) -> int:
        left, right = divmod(index, 1 << self._low)
        for key, mask in self._rounds:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        return left << self._low | right


def _mixed(value: int) -> int:
    """Every bit of the result depends on every bit of the value (the finalizer of splitmix64)."""
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & MASK
    return value ^ value >> 31


class Order:
    """The samples of a run one after another, from a seed; its position can be kept and taken up again.

    Of the sources that have not had their share of the first k samples yet, the one whose next sample is due first
    gives sample k: no source is ever a whole sample away from its share, neither ahead nor behind. (Taking the one
    that is furthest behind lets others fall behind by more than one.)
    """

    def __init__(self, parts: Sequence[Part], weights: Sequence[float] | None, seed: int) -> None:
        self.parts = tuple(parts)
        self.seed = seed
        self.weights = _whole(self.parts, weights)
        self._total = sum(self.weights)
        self._periods = [lcm(*self.weights) // weight for weight in self.weights]
        self.sample = 0
        self.given = [0] * len(self.parts)
        self._permutations: dict[int, tuple[int, Permutation]] = {}

    def take(self, count: int) -> list[tuple[int, int]]:
        """The next samples, each as (source, its how-many-th sample)."""
        return [self._turn() for _ in range(count)]

    def _turn(self) -> tuple[int, int]:
        self.sample += 1
        behind = [i for i, w in enumerate(self.weights) if self.given[i] * self._total < w * self.sample]
        # its share reaches given + 1 at sample (given + 1) * total / weight, which periods put in whole numbers
        source = min(behind, key=lambda i: ((self.given[i] + 1) * self._periods[i], i))
        self.given[source] += 1
        return source, self.given[source] - 1

    def window(self, source: int, ordinal: int) -> int:
        """The window that is the ordinal-th sample of a source."""
        epoch, place = divmod(ordinal, self.parts[source].train)
        if self._permutations.get(source, (-1,))[0] != epoch:
            key = key_of(self.seed, "order", source, epoch)
            self._permutations[source] = epoch, Permutation(self.parts[source].train, key)
        return self._permutations[source][1](place)

    def state(self) -> dict[str, Any]:
        """The position, and by what it can be recognized; only numbers, texts, lists and dicts."""
        return {"sample": self.sample, "given": list(self.given), "of": self._identity()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a position of a run with the same sources, seq, seed and shares."""
        try:
            sample, given, of = state["sample"], list(state["given"]), state["of"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no position in data: {state!r} lacks {error}; pass what state() gave") from error
        if not _is_position(sample, given, of):
            raise ValueError(f"this is no position in data: {state!r}; pass what state() gave")
        differing = _differences(of, self._identity())
        if differing:
            raise ValueError(
                f"the data differs from that of the saved position: {'; '.join(differing)}; give the same data to go "
                "on, or start a new run to train on other data"
            )
        if len(given) != len(self.parts) or sum(given) != sample:
            raise ValueError(f"this position is damaged: {given} samples of each source do not add up to {sample}")
        self.sample, self.given = sample, given

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seq": self.parts[0].seq,
            "weights": list(self.weights),
            "sources": [{"name": p.name, "tokens": p.tokens, "trained windows": p.train} for p in self.parts],
        }


def _whole(parts: tuple[Part, ...], weights: Sequence[float] | None) -> tuple[int, ...]:
    """Weights as the smallest whole numbers in the same proportion."""
    if not parts:
        raise ValueError("there is no source to take samples from; name at least one")
    weights = [1] * len(parts) if weights is None else weights
    if len(weights) != len(parts):
        raise ValueError(f"{len(weights)} weights for {len(parts)} sources; give each source one")
    wrong = [weight for weight in weights if not 0 < weight < float("inf")]
    if wrong:
        raise ValueError(f"weights {list(weights)}: {wrong[0]} is not above 0; leave a source away to not use it")
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 is a tenth
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    return tuple(weight // gcd(*whole) for weight in whole)


def _is_position(sample: Any, given: list[Any], of: Any) -> bool:
    """Whether these are of the kinds that `Order.state` writes: they may come from a file of somebody else's."""
    if not isinstance(of, dict) or not isinstance(sources := of.get("sources"), list):
        return False
    counts = all(type(count) is int and count >= 0 for count in (sample, *given))
    return counts and all(isinstance(source, dict) for source in sources)


def _differences(saved: dict[str, Any], here: dict[str, Any]) -> list[str]:
    found = [f"{key} was {saved.get(key)}, is {here[key]}" for key in ("seed", "seq") if saved.get(key) != here[key]]
    before, now = saved["sources"], here["sources"]
    if len(before) != len(now):
        return [*found, f"there were {len(before)} sources, now {len(now)}"]
    for number, (old, new) in enumerate(zip(before, now, strict=True)):
        changed = [key for key in new if old.get(key) != new[key]]
        found += [f"{key} of source {number} was {old.get(key)}, is {new[key]}" for key in changed]
    if saved.get("weights") != here["weights"]:
        found.append(f"weights were {saved.get('weights')}, are {here['weights']}")
    return found
