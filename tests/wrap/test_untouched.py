"""The check of rows leaves no trace: after some steps everything of the user's ran as often as on one process.

A way to keep state is a class whose `note` forward calls; `kept` says what it has kept after three steps. The plain
module takes the same steps on the rows of the rank's place.
"""

# ruff: noqa: ARG002  # ways that count read nothing

from __future__ import annotations

import functools
import itertools
import queue
import random
import re
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.params import whole_tensor
from harness import grid_of

ROWS = 8
CALLS = 0
SEEN: list[int] = []


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def note(self, h: Tensor) -> None:
        pass

    def kept(self) -> Any:
        return None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        self.note(h)
        return self.b(h)


class Counts(Keeps):
    """A number, a dict, a list, a deque, a set and a bytearray."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.by_name, self.order, self.last = 0, {"deep": {"calls": 0}}, [], deque(maxlen=2)
        self.lengths, self.bits = {0}, bytearray(1)

    def note(self, h: Tensor) -> None:
        self.calls += 1
        self.by_name["deep"]["calls"] += 1
        self.order.append(self.calls)
        self.last.append(len(h))
        self.lengths.add(self.calls)
        self.bits[0] += 1

    def kept(self) -> Any:
        return self.calls, self.by_name, self.order, list(self.last), self.lengths, bytes(self.bits)


class Iterates(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.ticks, self.tick, self.turns = itertools.count(), itertools.count().__next__, iter([5, 6, 7, 8, 9])
        self.last = ()

    def note(self, h: Tensor) -> None:
        self.last = next(self.ticks), self.tick(), next(self.turns)

    def kept(self) -> Any:
        return self.last, next(self.ticks), self.tick(), next(self.turns)


class OfClass(Keeps):
    seen = 0
    ticks = itertools.count()

    def note(self, h: Tensor) -> None:
        OfClass.seen += 1
        type(self).own = vars(type(self)).get("own", 0) + 1
        next(self.ticks)

    def kept(self) -> Any:
        return OfClass.seen, type(self).own, next(self.ticks)


class Numpy(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.hits, self.table = np.zeros(3), {"sizes": np.zeros((2, 2), dtype=np.int64)}
        self.shared = torch.zeros(2)
        self.as_array = self.shared.numpy()

    def note(self, h: Tensor) -> None:
        self.hits[1] += 1
        self.table["sizes"] += 1
        self.as_array += 1

    def kept(self) -> Any:
        return self.hits.tolist(), self.table["sizes"].tolist(), self.shared.tolist()


class Tracker:
    __slots__ = ("calls", "values")

    def __init__(self) -> None:
        self.calls, self.values = 0, []


class Meter:
    def __init__(self) -> None:
        self.total, self.tracker = 0.0, Tracker()
        self.call = self.update

    def update(self) -> None:
        self.total += 1
        self.tracker.calls += 1
        self.tracker.values.append(self.total)

    def __call__(self) -> None:
        self.call()


class Objects(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def note(self, h: Tensor) -> None:
        self.meter()

    def kept(self) -> Any:
        return self.meter.total, self.meter.tracker.calls, self.meter.tracker.values


def count_globally() -> None:
    global CALLS  # noqa: PLW0603
    CALLS += 1
    SEEN.append(CALLS)


class Globals(Keeps):
    def note(self, h: Tensor) -> None:
        count_globally()

    def kept(self) -> Any:
        global CALLS  # noqa: PLW0603
        found = CALLS, list(SEEN)
        CALLS = 0
        SEEN.clear()
        return found


def counter() -> Callable[[], int]:
    calls, order = 0, []

    def count() -> int:
        nonlocal calls
        calls += 1
        order.append(calls)
        return sum(order)

    return count


class Functions(Keeps):
    """Closures, attributes and defaults of functions, partial functions, decorators."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.last = counter(), 0
        self.part = functools.partial(self.log, counter())
        self.parts: list[int] = []

    def log(self, count: Callable[[], int], more: list[int]) -> None:
        more.append(count())

    @torch.no_grad()
    def note(self, h: Tensor, calls: list[int] = []) -> None:  # noqa: B006
        calls.append(1)
        self.last = self.count() + 100 * len(calls)
        self.part(self.parts)
        later.calls = getattr(later, "calls", 0) + 1
        later()

    def kept(self) -> Any:
        found = self.last, self.parts, later.calls
        Functions.note.__wrapped__.__defaults__[0].clear()
        del later.calls
        return found


def later() -> None:
    pass


class Generators(Keeps):
    """Generators of random numbers of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.python, self.numpy, self.old = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
        self.torch = torch.Generator().manual_seed(1)

    def note(self, h: Tensor) -> None:
        self.last = (
            self.python.random(),
            self.numpy.random(),
            self.old.rand(),
            float(torch.rand((), generator=self.torch)),
        )

    def kept(self) -> Any:
        return self.last


def numbers() -> Iterator[int]:
    yield from range(9)


class Advances(Keeps):
    """What cannot be copied: the check cannot be made then."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.last = numbers(), -1

    def note(self, h: Tensor) -> None:
        self.last = next(self.numbers)

    def kept(self) -> Any:
        return self.last


class Zips(Advances):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.cycle([0, 1, 2, 3])


class Writes(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def note(self, h: Tensor) -> None:
        self.log.write("pass\n")

    def kept(self) -> Any:
        self.log.seek(0)
        return self.log.read()


class HandsOn(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = queue.Queue()

    def note(self, h: Tensor) -> None:
        self.sizes.put(len(h))

    def kept(self) -> Any:
        return self.sizes.qsize()


class Caches(Keeps):
    """The first call fills a cache, and that call counts."""

    def __init__(self) -> None:
        super().__init__()
        self.count = counter()
        self.cached = functools.lru_cache(lambda rows: self.count() * 10 + rows)

    def note(self, h: Tensor) -> None:
        self.last = self.cached(len(h))

    def kept(self) -> Any:
        return self.last, self.count()


class Trains(Keeps):
    """An optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = [torch.zeros(3, requires_grad=True)]
        self.optimizer = torch.optim.SGD(self.scale, lr=0.1, momentum=0.9)

    def note(self, h: Tensor) -> None:
        with torch.enable_grad():
            (self.scale[0] - 1).square().sum().backward()
        self.optimizer.step()

    def kept(self) -> Any:
        return self.scale[0].tolist(), self.scale[0].grad.tolist()


class Hidden(Keeps):
    """A module that is no child, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [Counts()]
        self.others[0].register_forward_hook(lambda *_: SEEN.append(1))

    def note(self, h: Tensor) -> None:
        self.others[0](h.detach()[..., :6].float())

    def kept(self) -> Any:
        found = self.others[0].kept(), list(SEEN)
        SEEN.clear()
        return found


class Average(Keeps):
    """Averages of weights, in parameters, in a dict, and by `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(6, 8).requires_grad_(False)
        for p in self.slow.parameters():
            nn.init.zeros_(p)
        self.shadow = {name: torch.zeros_like(p) for name, p in self.a.named_parameters()}
        self.register_buffer("mean", torch.zeros(8, 6))

    def note(self, h: Tensor) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.a.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            for name, fast in self.a.named_parameters():
                self.shadow[name] = self.shadow[name] * 0.9 + 0.1 * fast
            self.mean.data = self.mean.data * 0.9 + 0.1 * self.a.weight

    def kept(self) -> Any:
        values = [*self.slow.parameters(), *self.shadow.values(), self.mean]
        with torch.no_grad():
            return [
                round(float(whole_tensor(v).abs().sum() if hasattr(v, "full_tensor") else v.abs().sum()), 9)
                for v in values
            ]


class Hooks(Keeps):
    """Hooks that count and collect, of every kind, on the model, on its parts and on all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[int]] = {}
        for name, module in dict(root=self, a=self.a, b=self.b).items():
            module.register_forward_hook(functools.partial(self.see, f"{name} forward"))
            module.register_forward_pre_hook(functools.partial(self.see, f"{name} pre"))
            module.register_forward_hook(lambda *_, own=name, **__: self.see(f"{own} always"), always_call=True)
            module.register_full_backward_hook(functools.partial(self.see, f"{name} backward"))
        every = self.see_if_own
        self.handle = nn.modules.module.register_module_forward_hook(every)

    def see(self, name: str, *_: Any) -> None:
        self.seen.setdefault(name, []).append(len(self.seen))

    def see_if_own(self, module: nn.Module, *_: Any) -> None:
        if module in (self.a, self.b):
            self.see("every")

    def kept(self) -> Any:
        self.handle.remove()
        return {name: len(found) for name, found in self.seen.items()}


WAYS = (
    *(Counts, Iterates, OfClass, Numpy, Objects, Globals, Functions, Generators, Advances, Zips, Writes, Hidden),
    *(Average, Hooks, HandsOn, Caches, Trains),
)
NO_HOOKS = "hooks take no part"
UNCHECKED = {Advances: "uses a generator", Zips: "uses a cycle", Writes: "uses a ", HandsOn: "uses a Queue"}
UNCHECKED |= {Hooks: NO_HOOKS, Hidden: NO_HOOKS}


def keep(way: type[Keeps], shape: Shape | None) -> tuple[Any, str]:
    """What a way has kept after three steps, and what `explain` says."""
    torch.manual_seed(0)
    model, grid = way().double(), None
    if shape is not None:
        grid = grid_of(shape)
        model = ff.parallelize(model, grid)
    OfClass.seen, OfClass.ticks = 0, itertools.count()
    rows = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(3):
        own = rows[: ROWS // 2] if grid is None else ff.local_rows(rows, grid)
        model(own).square().mean().backward()
    lines = [] if grid is None else ff.explain(model).splitlines()
    said = next((line for line in lines if re.search("check of rows|be checked", line)), "")
    return model.kept(), said


def differences(shape: Shape) -> dict[str, Any]:
    wrong = {}
    for way in WAYS:
        (expected, _), (found, said) = keep(way, None), keep(way, shape)
        if found != expected:
            wrong[way.__name__] = f"{found}, not {expected}"
        reason = UNCHECKED.get(way, "")
        if bool(said) != bool(reason) or reason not in said:
            wrong[f"{way.__name__} said"] = said
    return wrong


def test_the_check_leaves_no_trace(ranks) -> None:
    for shape in (Shape(z=2), Shape(data=2)):
        for wrong in ranks(2).run(differences, shape):
            assert not wrong, "\n".join(f"{name}: {what}" for name, what in wrong.items())


def remember(shape: Shape) -> dict[str, str]:
    """Rows that depend on each other are found in models that keep state as well."""
    said, grid = {}, grid_of(shape)
    for way in (Counts, Iterates, Hooks, Average, Generators):
        torch.manual_seed(0)
        model = ff.parallelize(type(way.__name__, (Centred, way), {})().double(), grid)
        try:
            model(ff.local_rows(torch.randn(4, 6, dtype=torch.float64), grid)).sum().backward()
        except RuntimeError as error:
            said[way.__name__] = str(error)
        else:
            said[way.__name__] = "nothing"
        if isinstance(model, Hooks):
            model.handle.remove()
    return said


class Centred(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


def test_models_with_state_are_checked(ranks) -> None:
    for said in ranks(2).run(remember, Shape(z=2)):
        assert all("ff.whole_batch(tensor)" in text for text in said.values()), said


def test_attributes_with_names_of_the_grids_are_refused() -> None:
    for name, own in dict(clock=itertools.count(), gradients=nn.Linear(2, 2)).items():
        model = Keeps()
        setattr(model, name, own)
        with pytest.raises(ValueError, match=f"rename the model's own attribute '{name}'"):
            ff.parallelize(model, Grid.alone())
        assert not isinstance(model.a.weight, DTensor)  # it is as it was
