"""Randomness that is a function of where and when, with no state to save.

A draw depends on (seed, step, micro-step, half, module name, coordinates of the axes that cut the tensor): equal
on ranks that hold equal copies, independent on ranks that hold different parts, and the same when a
forward pass is run again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fourfold.axes import AXES
from fourfold.engine import Engine, HalfTurn
from fourfold.grid import Grid
from fourfold.layout import Layout
from fourfold.nn.initial import key_of


class RngPoint(NamedTuple):
    step: int
    micro_step: int
    turn: HalfTurn


class StepRng:
    """When it is. A model's training forward advances the micro-step; a trainer sets the step; the overlap engine knows
    which half of a batch has its turn."""

    def __init__(self, seed: int, engine: Engine) -> None:
        self.seed = seed
        self.engine = engine
        self.step = 0
        self.micro_step = 0

    @property
    def now(self) -> RngPoint:
        return RngPoint(self.step, self.micro_step, self.engine.turn)

    def advance(self) -> None:
        self.micro_step += 1

    def begin_step(self, step: int) -> None:
        self.step, self.micro_step = step, 0

    @contextmanager
    def at(self, moment: RngPoint) -> Iterator[None]:
        """Inside the block it is that moment again."""
        now = self.now
        self.step, self.micro_step, self.engine.turn = moment
        try:
            yield
        finally:
            self.step, self.micro_step, self.engine.turn = now

    def key(self, name: str, grid: Grid, cut: Layout) -> int:
        """The seed of what `name` draws now, for this rank's part of a tensor that is cut like this."""
        place = [f"{axis}={grid.coords[axis]}" for axis in AXES if axis in cut.axes]
        half = [f"half={self.engine.turn.index}"] if self.engine.turn.of > 1 else []
        return key_of(self.seed, self.step, self.micro_step, name, *place, *half)


@contextmanager
def seeded(key: int, device: torch.device) -> Iterator[None]:
    """Inside the block torch's own generator of that device draws from `key`; afterwards it is as before."""
    generator = torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
    state = generator.get_state()
    generator.manual_seed(key)
    try:
        yield
    finally:
        generator.set_state(state)


@contextmanager
def seeded_outside_torch(key: int) -> Iterator[None]:
    """Inside the block Python's `random` draws from `key`, and numpy's where it is imported; afterwards as before.

    Model code may use them, and ranks that compute parts of one tensor must draw the same.
    """
    numpy = sys.modules.get("numpy")
    state, numpys = random.getstate(), None if numpy is None else numpy.random.get_state()
    random.seed(key)
    if numpy is not None:
        numpy.random.seed(key % (1 << 32))
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None and numpys is not None:
            numpy.random.set_state(numpys)
