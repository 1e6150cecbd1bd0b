"""Random numbers in the check of rows: the same rows draw the same numbers, whoever runs them.

The check (`rows.py`) runs rows of several places together, and each place's by themselves. A model that draws random
numbers can be compared only if a row gets the same ones in both passes. So the first pass, of all these rows, records
what is drawn, and the second takes the numbers of its rows from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fourfold.nn.rng import draws_nothing
from fourfold.wrap.untouched import Untouched, written_by


@dataclass(frozen=True)
class Draw:
    """An operation that drew random numbers for the rows of all places."""

    func: Any
    settings: list[Any]
    """Its arguments apart from tensors and sizes."""
    inputs: list[Tensor]
    """The tensors whose values it read, such as probabilities."""
    numbers: list[Tensor]


class SameDraws:
    """The random numbers of two passes: one of all rows, recorded first, and one of a place's own."""

    def __init__(self, places: int, place: int, rows: int) -> None:
        self.places, self.place, self.rows = places, place, rows
        self.recorded: list[Draw] = []
        self.outside: object = None
        """What the recorded pass has drawn from generators other than torch's: their states at its end."""
        self.by_chance = False
        """Whether the two passes drew in ways that do not correspond, so that equal rows may differ by chance."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        self.recorded = []
        with _Draws(self._record):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        self._left = iter(self.recorded)
        with _Draws(self._replay):
            yield
        self.by_chance |= next(self._left, None) is not None

    @contextmanager
    def others(self, state: Untouched) -> Iterator[None]:
        """Draw numbers that have nothing to do with those of the other two passes."""
        state.draw_others()
        with _Draws(lambda func, args, kwargs: func(*args, **kwargs)):
            yield

    def _record(self, func: Any, args: tuple, kwargs: dict) -> Any:
        inputs = [tensor.clone() for tensor in _inputs(func, args, kwargs)]
        result = func(*args, **kwargs)
        numbers = [leaf.clone() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.recorded.append(Draw(func, _settings(args, kwargs), inputs, numbers))
        return result

    def _replay(self, func: Any, args: tuple, kwargs: dict) -> Any:
        inputs = [tensor.clone() for tensor in _inputs(func, args, kwargs)]
        result = func(*args, **kwargs)
        draw = next(self._left, None)
        if draw is None or draw.func is not func or draw.settings != _settings(args, kwargs):
            self.by_chance = True
            return result
        own = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if not all(map(self._corresponds, (*own, *inputs), (*draw.numbers, *draw.inputs))):
            self.by_chance = True
            return result
        # other probabilities for the same rows show that rows depend on each other: these draw numbers of their own
        if all(_alike(a, self._of_place(a, b)) for a, b in zip(inputs, draw.inputs, strict=True)):
            for tensor, numbers in zip(own, draw.numbers, strict=True):
                tensor.copy_(self._of_place(tensor, numbers))
        return result

    def _corresponds(self, own: Tensor, joint: Tensor) -> bool:
        """Return whether a tensor for this place's rows can be a part of one for all rows."""
        if own.dim() != joint.dim():
            return False
        cut = [(a, b) for a, b in zip(own.shape, joint.shape, strict=True) if a != b]
        return not cut or (len(cut) == 1 and cut[0][1] == self.places * cut[0][0])

    def _of_place(self, own: Tensor, joint: Tensor) -> Tensor:
        """Return the part of a tensor for all rows that corresponds to one for this place's."""
        cut = [dim for dim, (a, b) in enumerate(zip(own.shape, joint.shape, strict=True)) if a != b]
        if not cut:
            return joint
        length = own.shape[cut[0]]
        # rows and other dims may lie flattened in this dim, and only perhaps rows first
        self.by_chance |= length != self.rows
        return joint.narrow(cut[0], self.place * length, length)


class _Draws(TorchDispatchMode):
    """Passes every operation that draws random numbers to a function. The model's own generators are not used."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch would run no compiled code inside of another mode, nor afterwards

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or draws_nothing(func, args, kwargs):
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            kwargs = kwargs | {"generator": None}  # places may have seeded their own in different ways
        return self.draw(func, args, kwargs)


def _settings(args: tuple, kwargs: dict) -> list[Any]:
    """Return the arguments of an operation that are the same for any number of rows."""
    named = [*enumerate(args), *kwargs.items()]
    return [(name, value) for name, value in named if not isinstance(value, (Tensor, list, tuple))]


def _inputs(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """Return the tensors whose values an operation reads; of some it reads the shape alone."""
    if func._schema.name.endswith("_like"):
        return []
    written = [id(tensor) for tensor in written_by(func, args, kwargs)]
    return [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and id(leaf) not in written]


def _alike(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal but for rounding, which differs by the shape that a kernel computes on."""
    digits = torch.finfo(a.dtype).eps ** 0.5 if a.is_floating_point() else 0.0
    return torch.allclose(a, b, rtol=max(digits, 1e-5), equal_nan=True)
