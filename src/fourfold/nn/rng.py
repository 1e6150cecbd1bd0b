"""Random numbers that are a function of where and when they are drawn, so that there is no state to save.

Initial weights depend on the seed and the parameter's name only, never on the grid. A tensor is drawn in blocks of
rows, and each block has its own generator, seeded by (seed, name, block). A rank draws the blocks that its shard
touches and keeps its columns of them, so no rank ever holds a whole large weight.

A draw of a forward pass (dropout) depends on (seed, step, micro-step, half, module name, coordinates of the axes that
cut the tensor). It is equal on ranks that hold equal copies, independent on ranks that hold different parts, and the
same when the forward pass is recomputed. Dropout reads step and micro-step from the device, where a recorded step
counts them too; what torch draws itself (attention dropout) needs them on the host.
"""

from __future__ import annotations

import copy
import hashlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold.axes import CUTS
from fourfold.engine import Engine, HalfTurn
from fourfold.grid import Grid
from fourfold.layout import Init, Layout

BLOCK_ELEMENTS = 1 << 18
"""Elements of one block of an initial weight: 1 MiB in fp32, which bounds what a rank draws beyond its own shard."""


def key_of(*parts: object) -> int:
    """Return a seed of 63 bits made from texts and numbers, the same in every process."""
    digest = hashlib.blake2b("\0".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch takes a seed as a signed 64-bit integer


@torch.no_grad()
def fill_(local: Tensor, box: Sequence[range], shape: Sequence[int], init: Init, seed: int, name: str) -> None:
    """Fill a shard with its part `box` of the initial tensor of this global shape."""
    if init.std == 0:
        local.fill_(init.mean)
        return
    if local.numel() == 0:
        return
    block_rows = max(1, BLOCK_ELEMENTS // prod(shape[1:]))
    columns = tuple(slice(part.start, part.stop) for part in box[1:])
    generator = torch.Generator("cpu")
    for block in range(box[0].start // block_rows, -(-box[0].stop // block_rows)):
        first = block * block_rows
        generator.manual_seed(key_of(seed, name, block))
        rows = min(block_rows, shape[0] - first)
        # In fp32 on the CPU, whatever the dtype and device of the shard: the values must not depend on either.
        drawn = torch.randn(rows, *shape[1:], generator=generator, dtype=torch.float32, device="cpu")
        start, stop = max(first, box[0].start), min(first + block_rows, box[0].stop)
        part = drawn[(slice(start - first, stop - first), *columns)]
        local[start - box[0].start : stop - box[0].start].copy_(part.mul_(init.std).add_(init.mean))


RngPoint = tuple[int, int, HalfTurn, Tensor | None]
"""A point in training at which random numbers are drawn: the step, the micro-step, the half of the batch, and step and
micro-step on the device."""


class Recomputing:
    """A block in which a forward pass runs again from the point of its first run, so that it draws the same masks.

    It may be entered again: a graph that is retained is recomputed in every backward pass.
    """

    def __init__(self, clock: StepRng, point: RngPoint) -> None:
        self.clock, self.point = clock, point
        self._before: list[tuple[RngPoint, bool]] = []

    def __enter__(self) -> None:
        engine = self.clock.engine
        self._before.append((self.clock.now, engine.recomputing))
        self.clock.go_to(self.point)
        engine.recomputing = True

    def __exit__(self, *_: object) -> None:
        now, self.clock.engine.recomputing = self._before.pop()
        self.clock.go_to(now)


class StepRng:
    """The seeds of a model's random draws at the current step, micro-step and half of the batch.

    A training forward pass advances the micro-step, a trainer sets the step, and the overlap engine knows which half of
    the batch is running.
    """

    def __init__(self, seed: int, engine: Engine) -> None:
        self.seed = seed
        self.engine = engine
        self.step = 0
        self.micro_step = 0
        self.announced = False
        """Whether a trainer begins every step here. Then draws follow from the step, and there is no state to save."""
        # Step and micro-step on the device, once somebody has asked for them there. The counter is changed in place, so
        # that a recorded step counts on; the position is a copy, to which `go_to` can return.
        self._counter: Tensor | None = None
        self._position: Tensor | None = None
        self._keys: dict[tuple[str, HalfTurn], Tensor] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> StepRng:
        new = StepRng(self.seed, copy.deepcopy(self.engine, memo))
        new.step, new.micro_step, new.announced = self.step, self.micro_step, self.announced
        # replays count on the device alone
        new._counter, new._position = copy.deepcopy((self._counter, self._position), memo)
        return new

    @property
    def now(self) -> RngPoint:
        return self.step, self.micro_step, self.engine.turn, self._position

    def advance(self) -> None:
        self.micro_step += 1
        if self._counter is not None:
            self._counter[1:].add_(1)
            self._position = self._counter.clone()

    def go_on_at(self, micro_step: int) -> None:
        """Draw from here on as in this micro-step; passes that run again still draw as they did."""
        self.micro_step = micro_step - 1
        if self._counter is not None:
            self._counter[1:].fill_(micro_step - 1)
        self.advance()

    def begin_step(self, step: int) -> None:
        self.announced = True
        self._go_on_at(step, 0)

    def _go_on_at(self, step: int, micro_step: int) -> None:
        self.step, self.micro_step = step, micro_step
        if self._counter is not None and self._position is not None:
            self._counter[:1].fill_(step)
            self._counter[1:].fill_(micro_step)
            # in place: a recorded step of a model that never advances reads this tensor
            self._position.copy_(self._counter)

    def counts(self) -> Tensor:
        """Return a copy of [step, micro-step]: of those on the device if they are there, since replays count there."""
        return torch.tensor([self.step, self.micro_step]) if self._counter is None else self._counter.clone()

    def restore(self, seed: int, step: int, micro_step: int) -> None:
        """Draw from here on what a clock with this seed would draw at these counts."""
        if seed != self.seed:
            self.seed = seed
            self._keys.clear()
        self._go_on_at(step, micro_step)

    def position(self, device: torch.device) -> Tensor:
        """Return [step, micro-step] on the device."""
        if self._position is None or self._position.device != device:
            with torch.inference_mode(False):  # training may count on from here
                self._counter = torch.tensor([self.step, self.micro_step], device=device)
                self._position = self._counter.clone()
        return self._position

    def go_to(self, point: RngPoint) -> None:
        """Draw as at another point of training."""
        self.step, self.micro_step, self.engine.turn, self._position = point

    def key_on(self, device: torch.device, name: str, grid: Grid, cut: Layout) -> Tensor:
        """Return on the device what module `name` draws with at every position: `key` without step and micro-step."""
        known = self._keys.get((name, self.engine.turn))
        if known is None or known.device != device:
            key = key_of(self.seed, name, *self._place(grid, cut))
            with torch.inference_mode(False):  # kept for training
                known = self._keys[name, self.engine.turn] = torch.tensor(key, device=device)
        return known

    def key(self, name: str, grid: Grid, cut: Layout) -> int:
        """Return the seed of what module `name` draws now for this rank's part of a tensor in layout `cut`."""
        return key_of(self.seed, self.step, self.micro_step, name, *self._place(grid, cut))

    def _place(self, grid: Grid, cut: Layout) -> list[str]:
        """Return the part of a tensor in layout `cut` for which this rank draws now."""
        half = [f"half={self.engine.turn.index}"] if self.engine.turn.of > 1 else []
        return [*(f"{axis}={grid.coords[axis]}" for axis in CUTS if axis in cut.axes), *half]


@contextmanager
def seeded(key: int, device: torch.device) -> Iterator[None]:
    """Seed torch's default generator of the device with `key` inside the block, and restore its state afterwards."""
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
    """Seed Python's `random`, and numpy's if it is imported, inside the block, and restore both afterwards.

    Model code may use them, and ranks that compute parts of one tensor must draw the same numbers.
    """
    numpy = sys.modules.get("numpy")
    state, numpys = random.getstate(), None if numpy is None else numpy.random.get_state()
    random.seed(key)
    if numpy is not None:
        numpy.random.seed(key % (1 << 32))  # numpy takes seeds of 32 bits
    try:
        yield
    finally:
        random.setstate(state)
        if numpy is not None and numpys is not None:
            numpy.random.set_state(numpys)


@contextmanager
def no_draws() -> Iterator[None]:
    """Refuse random numbers of torch, Python's `random` and numpy inside the block.

    For model code that is recorded: what it draws on the host would stay the same in every replay, and what torch draws
    on the device would not be what the step itself draws, which seeds torch's generator in every pass. Generators that
    the model has made for itself on the host are not seen.
    """
    before = states_outside_torch()
    with NoDraws():
        yield
    if states_outside_torch() != before:
        raise RuntimeError("the model draws random numbers with Python or numpy, which replays would not draw again")


class NoDraws(TorchDispatchMode):
    """Refuses torch's random numbers."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # torch would run no compiled code inside of another mode, nor afterwards

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not draws_nothing(func, args, kwargs):
            raise RuntimeError(f"the model draws random numbers ({func}), which replays would not draw again")
        return func(*args, **kwargs)


def draws_nothing(func: Any, args: tuple, kwargs: dict) -> bool:
    """Return whether an operation that may draw does not: attention without dropout, or dropout in evaluation."""
    given = {argument.name: argument.default_value for argument in func._schema.arguments}
    given |= {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    return any(given.get(name, 1) == 0 for name in ("dropout_p", "dropout", "train", "training"))


def states_outside_torch() -> tuple[object, ...]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return (random.getstate(),)
    _, keys, position, *gauss = numpy.random.get_state()
    return random.getstate(), keys.tobytes(), position, *gauss
