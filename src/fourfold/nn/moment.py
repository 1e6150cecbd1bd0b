"""Randomness that is a function of where and when, with no state to save.

A draw depends on (seed, step, micro-step, module name, coordinates of the axes that cut the tensor): equal
on ranks that hold equal copies, independent on ranks that hold different parts, and the same when a
forward pass is run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fourfold.grid import AXES, Grid
from fourfold.layout import Cut
from fourfold.nn.initial import key_of


class Clock:
    """When it is. A model's training forward advances the micro-step; a trainer sets the step."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0
        self.micro_step = 0

    def advance(self) -> None:
        self.micro_step += 1

    def begin_step(self, step: int) -> None:
        self.step, self.micro_step = step, 0

    @contextmanager
    def at(self, step: int, micro_step: int) -> Iterator[None]:
        """Inside the block it is that moment again."""
        now = self.step, self.micro_step
        self.step, self.micro_step = step, micro_step
        try:
            yield
        finally:
            self.step, self.micro_step = now

    def key(self, name: str, grid: Grid, cut: Cut) -> int:
        """The seed of what `name` draws now, for this rank's part of a tensor that is cut like this."""
        place = [f"{axis}={grid.coords[axis]}" for axis in AXES if axis in cut.axes]
        return key_of(self.seed, self.step, self.micro_step, name, *place)


@contextmanager
def drawing(key: int, device: torch.device) -> Iterator[None]:
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
