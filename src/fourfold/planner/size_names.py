"""Names in place of sizes, so that a structure is rehearsed once for all candidates that share it.

In a rehearsal with `SizeNames` every size is a sum of names (`Term`). `SizeMatrix` collects such sums, reads the
numbers behind the names from each candidate's `LocalSizes`, and gives all sums by one product.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter, methodcaller
from typing import Any, NamedTuple

import torch

from fourfold.axes import CONTEXT
from fourfold.ledger import Collective, Op
from fourfold.models.config import ModelConfig
from fourfold.planner.parameters import in_first_layer
from fourfold.planner.sizes import LocalSizes, Structure
from fourfold.policy import Policy


class Name(NamedTuple):
    """A size by its name: an attribute of `LocalSizes`, or the result of one of its methods."""

    half: int
    """The index of the half of the rows, or WHOLE for all rows."""
    attribute: str
    arguments: tuple[Any, ...] | None = None
    """Arguments of the method; a `Term` among them is a sum of sizes of the same half."""

    def getter(self) -> Callable[[LocalSizes], int]:
        """Return a function that reads this size of a half."""
        attribute, arguments = self.attribute, self.arguments
        if arguments is None:
            return attrgetter(attribute)
        if not any(isinstance(one, Term) for one in arguments):
            return methodcaller(attribute, *arguments)
        return lambda half: getattr(half, attribute)(
            *(one.of_half(half) if isinstance(one, Term) else one for one in arguments)
        )


WHOLE = -1


class SizeReader:
    """Reads the numbers of a list of names from a candidate, in an order of its own."""

    def __init__(self, names: Sequence[Name]) -> None:
        self.order: list[int] = []
        """The place among the names of each number that is read."""
        self._attributes: list[tuple[int, Callable[[LocalSizes], Sequence[int]]]] = []
        for half in {name.half for name in names}:
            places = [place for place, name in enumerate(names) if name.half == half and name.arguments is None]
            if len(places) > 1:  # one call reads all of them
                self._attributes.append((half, attrgetter(*(names[place].attribute for place in places))))
                self.order += places
        left = sorted({*range(len(names))}.difference(self.order))
        self._methods = [(names[place].half, names[place].getter()) for place in left]
        self.order += left

    def __call__(self, sizes: LocalSizes) -> list[int]:
        parts = [*sizes.halves, sizes]  # WHOLE is the last
        values: list[int] = []
        for half, get in self._attributes:
            values += get(parts[half])
        values += [get(parts[half]) for half, get in self._methods]
        return values


class SizeMatrix:
    """Sums of sizes as rows of a matrix that has a column for each name.

    One product with the numbers of a candidate, or of many, gives all sums.
    """

    def __init__(self) -> None:
        self.columns: dict[Name, int] = {}
        self._rows: dict[tuple[tuple[int, int], ...], int] = {}

    def column(self, name: Name) -> int:
        return self.columns.setdefault(name, len(self.columns))

    def row(self, times: Mapping[int, int]) -> int:
        """Return the row with these coefficients, given by column."""
        parts = tuple((column, many) for column, many in times.items() if many)
        return self._rows.setdefault(parts, len(self._rows))

    def row_of(self, size: Any) -> int:
        """Return the row of a `Term`."""
        return self.row({self.column(name): many for name, many in size.parts.items()})

    @cached_property
    def _read(self) -> SizeReader:
        return SizeReader(list(self.columns))

    @cached_property
    def _matrix(self) -> torch.Tensor:
        places = [(row, column, many) for parts, row in self._rows.items() for column, many in parts]
        rows, columns, many = zip(*places, strict=True)
        matrix = torch.zeros(len(self._rows), len(self.columns), dtype=torch.float64)  # exact up to 2^53 bytes
        matrix[list(rows), list(columns)] = torch.tensor(many, dtype=torch.float64)
        return matrix[:, self._read.order]

    def values(self, sizes: LocalSizes) -> torch.Tensor:
        """Return all sums of a candidate: [row]."""
        return self._matrix @ torch.frombuffer(array("d", self._read(sizes)), dtype=torch.float64)

    def values_of_many(self, sizes: Sequence[LocalSizes]) -> torch.Tensor:
        """Return all sums of many candidates: [row, candidate]."""
        return self._matrix @ torch.tensor([self._read(one) for one in sizes], dtype=torch.float64).T


class Term:
    """A sum of names with integer coefficients. It never changes."""

    __slots__ = ("_hash", "_times", "parts")

    def __init__(self, parts: dict[Name, int]) -> None:
        self.parts = parts
        self._times: dict[int, Term] = {}
        self._hash: int | None = None

    def __add__(self, other: Any) -> Term:
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Term:
        return self._plus(other, -1)

    def _plus(self, other: Any, sign: int) -> Term:
        if not isinstance(other, Term):
            if other != 0:
                raise TypeError(f"a size plus {other}: only sizes add up")
            return self
        parts = dict(self.parts)
        for name, times in other.parts.items():
            parts[name] = parts.get(name, 0) + sign * times
        return Term(parts)

    def __mul__(self, times: int) -> Term:
        found = self._times.get(times)
        if found is None:
            found = self._times[times] = Term({name: times * value for name, value in self.parts.items()})
        return found

    __rmul__ = __mul__

    def __neg__(self) -> Term:
        return self * -1

    def __bool__(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Term) and self.parts == other.parts)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.parts.items()))
        return self._hash

    def of_half(self, half: LocalSizes) -> int:
        """Return the number of the sum, with every name read from this half."""
        return sum(times * name.getter()(half) for name, times in self.parts.items())


class SizeNames:
    """Stands for the `LocalSizes` of every candidate of one structure: each attribute is its own name."""

    def __init__(self, structure: Structure, half: int = WHOLE) -> None:
        self.structure, self._half = structure, half

    @property
    def config(self) -> ModelConfig:
        return self.structure.config

    @property
    def policy(self) -> Policy:
        return self.structure.policy

    @property
    def dtype(self) -> torch.dtype:
        return self.structure.dtype

    @cached_property
    def halves(self) -> list[SizeNames]:
        number = self.structure.halves
        if self.structure.equal_halves:
            return [SizeNames(self.structure, 0)] * number
        return [SizeNames(self.structure, half) for half in range(number)]

    @property
    def chunks(self) -> list[Any]:
        """The tokens of the first chunk, which stands for all chunks: their number differs between candidates."""
        return [Term({Name(self._half, "chunk_tokens"): 1})]

    @property
    def mlp_chunks(self) -> list[Any]:
        """The tokens of the first chunk, as above."""
        return [Term({Name(self._half, "mlp_chunk_tokens"): 1})]

    def message(self, op: Op, axis: str, nbytes: Any, label: str) -> list[Collective]:
        return [Collective(op, axis, nbytes, 0, label)] if axis in self.structure.used_axes else []

    def all_to_all(self, nbytes: Any, sent: Any, label: str, axis: str = CONTEXT) -> list[Collective]:
        return [Collective("all_to_all", axis, nbytes, 0, label, sent=sent)]

    def __getattr__(self, attribute: str) -> Any:
        is_method = callable(getattr(LocalSizes, attribute, None))
        named = self._method(attribute) if is_method else Term({Name(self._half, attribute): 1})
        setattr(self, attribute, named)  # found without this function from now on
        return named

    def _method(self, attribute: str) -> Callable[..., Term]:
        known: dict[tuple[Any, ...], Term] = {}

        def call(*arguments: Any) -> Term:
            if arguments not in known:
                plain = tuple(tuple(map(in_first_layer, one)) if isinstance(one, tuple) else one for one in arguments)
                known[arguments] = Term({Name(self._half, attribute, plain): 1})
            return known[arguments]

        return call
