"""torch.einsum on parts: each rank computes its block of one of the letters.

The letter is that of a dim which is cut already, such as heads. Where none is, it is one of the output that only whole
operands have, as heads are in `bsk,khd->bshd` with a weight [k, h, d]: the product is then cut by head.

    letter in the output       each rank's result is its block of it
    letter summed over         each rank's result is a partial sum, which is summed over the axes that cut the letter

An operand with the letter is read by block, and its gradient is gathered from blocks; one without it is read whole by
every rank, and its gradient is the sum of what the ranks find.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor

from fourfold.operators import Conjugate
from fourfold.wrap.placed import Blocks, Parted, Placed, conjugate, placed_in
from fourfold.wrap.rules import rule


@dataclass(frozen=True, slots=True)
class Equation:
    """The letters of every operand's dims, and of the result's."""

    operands: tuple[str, ...]
    result: str

    @classmethod
    def read(cls, text: Any, count: int) -> Equation | None:
        """None where dims have no letters of their own: with an ellipsis, a diagonal, or no arrow."""
        if not isinstance(text, str) or "." in text or text.count("->") != 1:
            return None
        left, _, result = text.replace(" ", "").partition("->")
        operands = tuple(left.split(","))
        if len(operands) != count or any(len(set(letters)) != len(letters) for letters in operands):
            return None
        return cls(operands, result)

    def sizes(self, operands: Sequence[Tensor]) -> dict[str, int] | None:
        """None where operands do not have one size for each letter: torch broadcasts, or says what is wrong."""
        found: dict[str, int] = {}
        for letters, operand in zip(self.operands, operands, strict=True):
            if len(letters) != operand.dim():
                return None
            for letter, size in zip(letters, operand.shape, strict=True):
                if found.setdefault(letter, size) != size:
                    return None
        return found if set(self.result) <= found.keys() else None


@rule(torch.einsum)
def einsum(func: Callable, args: tuple, kwargs: dict) -> Any:
    text, operands = args[0], args[1:]
    if kwargs or not all(isinstance(operand, Tensor) for operand in operands):
        return NotImplemented
    equation = Equation.read(text, len(operands))
    sizes = None if equation is None else equation.sizes(operands)
    if equation is None or sizes is None:
        return NotImplemented
    run = placed_in(operands)[0].placement.run
    layout = Blocks(run, 0, run.over)
    letter = _letter(equation, operands, sizes, layout)
    if letter is None:
        return NotImplemented

    def own(letters: str, operand: Tensor) -> Tensor:
        at = layout.moved(letters.index(letter)) if letter in letters else None
        if isinstance(operand, Placed):
            if operand.placement == at:
                return operand.local
            run.made_whole[run.label, "einsum"] += 1
            operand = operand.whole()
        if at is not None:
            return at.part(operand, operand.shape)
        return conjugate(operand, _same, lambda gradient: layout.sum(gradient, layout.over))

    local = func(text, *(own(letters, operand) for letters, operand in zip(equation.operands, operands, strict=True)))
    if letter in equation.result:
        shape = Size(sizes[one] for one in equation.result)
        return Placed(local, layout.moved(equation.result.index(letter)), shape)
    return Conjugate.apply(local, lambda owed: layout.sum(owed, layout.over), _same)


def _letter(equation: Equation, operands: Sequence[Tensor], sizes: dict[str, int], layout: Blocks) -> str | None:
    """The letter by which the product is cut, of those that can be cut in equal blocks."""
    cut, placed, flows = [], set(), False
    for letters, operand in zip(equation.operands, operands, strict=True):
        if isinstance(operand, Placed):
            placed |= set(letters)
            flows |= isinstance(operand.placement, Parted)  # an activation, and not a parameter of another module
            if type(operand.placement) is Blocks and operand.placement.over == layout.over:
                cut.append(letters[operand.placement.dim])
    free = [letter for letter in equation.result if letter not in placed and flows]
    candidates = [*(letter for letter in cut if letter in equation.result), *cut, *free]
    return next((letter for letter in candidates if sizes[letter] % layout.parts == 0), None)


def _same(tensor: Tensor) -> Tensor:
    return tensor
