"""Which modules are linear layers, under any name: found by trying them on numbers, since names and classes say little.

A copy of the module in fp64 is called with random inputs of several shapes and sizes. It is a linear layer where every
result, and every gradient, is that of `a W^T + b` or `a W + b`, and where the call changes nothing else. The trial also
says with how many dims an input may come; for any other input the module's own code runs.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Trial:
    """How a module is called: code may branch by its mode, and by the size and the shape of its input."""

    training: bool
    scale: float
    leading: dict[int, tuple[int, ...]]
    """The dims of the input but the last, by the number of all dims."""
    gradients: bool


TRIALS = (
    Trial(True, 1.0, {1: (), 2: (5,), 3: (2, 5), 4: (1, 2, 3)}, gradients=True),
    Trial(False, 1e3, {1: (), 2: (67,), 3: (3, 23), 4: (2, 3, 11)}, gradients=False),
    Trial(True, 1e-3, {1: (), 2: (67,), 3: (3, 23), 4: (2, 3, 11)}, gradients=True),
    Trial(False, 1.0, {1: (), 2: (1,), 3: (1, 1), 4: (1, 1, 1)}, gradients=False),
)
TRIALS_OF_LARGE = (
    Trial(True, 1.0, {2: (1,), 3: (2, 3), 4: (2, 1, 2)}, gradients=True),
    Trial(False, 1e3, {2: (9,), 3: (1, 1), 4: (1, 1, 1)}, gradients=False),
)
LARGE = 1 << 22
"""Elements of a weight above which a module is tried less, since every trial takes a second."""
TOLERANCE = 1e-11
"""Of the largest value. fp64 rounds at 1e-16 and sums of some ten thousand products at 1e-14; a module that computes in
fp32 inside errs by 1e-7 and keeps its own code."""
BLOCK = 1 << 20
"""Random numbers that are drawn for a large weight, which repeats them: drawing them all would take seconds."""
ROWS = 64
"""Rows of a weight's gradient that are compared: all of it would take as much memory again."""


@dataclass(frozen=True, slots=True)
class Form:
    """A linear map of the last dim: a W^T + b with W [outputs, inputs], or a W + b with W [inputs, outputs]
    (`transposed`), and the names of the two parameters."""

    inputs: int
    outputs: int
    weight: str = "weight"
    bias: str | None = None
    transposed: bool = False
    dims: frozenset[int] | None = None
    """How many dims an input may have: those that the module was tried with. None: any number, as nn.Linear takes."""
    computed: bool = False
    """The weight is no parameter: the module computes it from others before each use."""

    @property
    def names(self) -> dict[str, str]:
        """What the module calls its weight and its bias."""
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    def takes(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments is one that the form describes."""
        if len(args) + len(kwargs) != 1:
            return False
        (a,) = (*args, *kwargs.values())
        if not isinstance(a, Tensor) or not a.dtype.is_floating_point or a.shape[-1:] != (self.inputs,):
            return False
        return self.dims is None or a.ndim in self.dims


LASTING: weakref.WeakKeyDictionary[type[nn.Module], dict[Hashable, Form | None]] = weakref.WeakKeyDictionary()
"""What was found of large weights, by class: a planner builds a model many times in one process."""


class Trials:
    """Tries modules, once for all that have the same class, shapes and attributes."""

    def __init__(self) -> None:
        self._known: dict[type[nn.Module], dict[Hashable, Form | None]] = {}

    def form_of(self, module: nn.Module) -> Form | None:
        """None where the module is no linear layer, or has hooks, buffers, children or other parameters."""
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        weights, biases = ([name for name, p in own.items() if p.dim() == dims] for dims in (2, 1))
        if len(weights) != 1 or len(weights) + len(biases) != len(own) or len(biases) > 1:
            return None
        if any(module.children()) or any(buffer is not None for buffer in module._buffers.values()):
            return None
        if not all(p.is_floating_point() and p.numel() for p in own.values()) or has_hooks(module):
            return None
        if type(module).forward is nn.Module.forward or "forward" in vars(module):
            return None
        key, lasting = _key(module, own)
        large = own[weights[0]].numel() > LARGE
        known = (LASTING if lasting and large else self._known).setdefault(type(module), {})
        if key not in known:
            known[key] = _tried(module, weights[0], biases[0] if biases else None)
        return known[key]


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody else's code runs when the module is called."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _key(module: nn.Module, own: Mapping[str, Tensor]) -> tuple[Hashable, bool]:
    """What the module's result can depend on, besides numbers; and whether that says the same at any later time."""
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in own.items())
    values = _attributes(module)
    plain = {name: value is None or isinstance(value, (int, float, str, torch.dtype)) for name, value in values.items()}
    kept = tuple((name, type(value), value if plain[name] else id(value)) for name, value in values.items())
    return (shapes, kept), all(plain.values())


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Those that its own code has set."""
    ours = vars(nn.Module()).keys()
    return {name: value for name, value in vars(module).items() if name not in ours}


def _tried(module: nn.Module, weight: str, bias: str | None) -> Form | None:
    rows, columns = (int(size) for size in module._parameters[weight].shape)  # type: ignore[union-attr]
    for transposed in (False, True):
        inputs, outputs = (rows, columns) if transposed else (columns, rows)
        if bias is not None and module._parameters[bias].shape != (outputs,):  # type: ignore[union-attr]
            continue
        dims = _dims(module, Form(inputs, outputs, weight, bias, transposed))
        if dims:
            return Form(inputs, outputs, weight, bias, transposed, dims)
    return None


def _dims(module: nn.Module, form: Form) -> frozenset[int]:
    """The numbers of dims for which a copy of the module computes what the form says."""
    generator = torch.Generator().manual_seed(0)
    with _by_itself():
        try:
            tried = _copy(module, form, generator)
        except Exception:  # a copy runs code of anybody's
            return frozenset()
        trials = TRIALS if form.inputs * form.outputs <= LARGE else TRIALS_OF_LARGE
        found = set(trials[0].leading)
        for trial in trials:
            tried.train(trial.training)
            found = {dims for dims in found if _computes(tried, form, trial, dims, generator)}
    return frozenset(found) if found & {2, 3} else frozenset()


@contextmanager
def _by_itself() -> Iterator[None]:
    """Whatever surrounds the trial (the meta device, no gradients, autocast) has no part in it, nor does it draw from
    torch's generator or warn."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        warnings.simplefilter("ignore")
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            yield


def _copy(module: nn.Module, form: Form, generator: torch.Generator) -> nn.Module:
    """The module with random parameters in fp64 on the CPU."""
    drawn: dict[int, Any] = {}
    for own in form.names.values():
        plain = module._parameters[own]
        drawn[id(plain)] = nn.Parameter(_numbers(plain.numel(), generator).view(plain.shape))  # type: ignore[union-attr]
    return copy.deepcopy(module, drawn)


def _numbers(count: int, generator: torch.Generator) -> Tensor:
    block = torch.randn(min(count, BLOCK - 1), generator=generator, dtype=torch.float64)
    return block if len(block) == count else block.repeat(-(-count // len(block)))[:count].clone()


def _computes(module: nn.Module, form: Form, trial: Trial, dims: int, generator: torch.Generator) -> bool:
    """Whether one call gives the form's result and gradients and leaves the module as it was."""
    parameters = [module._parameters[own] for own in form.names.values()]
    leading = trial.leading[dims]
    a = torch.randn(*leading, form.inputs, generator=generator, dtype=torch.float64).mul_(trial.scale).requires_grad_()
    given = torch.randn(*leading, form.outputs, generator=generator, dtype=torch.float64)
    before = list(_state(module))
    gradients: tuple[Tensor | None, ...] = ()
    try:
        with torch.set_grad_enabled(trial.gradients):
            out = module.forward(a)
        if not isinstance(out, Tensor) or out.shape != given.shape or out.requires_grad != trial.gradients:
            return False
        if trial.gradients:
            gradients = torch.autograd.grad(out, [a, *parameters], given, allow_unused=True)  # type: ignore[list-item]
    except Exception:  # a call runs code of anybody's, forward and backward
        return False
    after = list(_state(module))
    if len(after) != len(before) or not all(map(_same, before, after)):
        return False
    with torch.no_grad():
        w, *b = parameters
        turned = w if form.transposed else w.t()  # type: ignore[union-attr]
        if not _close(out, a @ turned + b[0] if b else a @ turned):  # type: ignore[operator]
            return False
        return not gradients or _are_gradients(gradients, form, a, given, turned)


def _are_gradients(
    found: tuple[Tensor | None, ...], form: Form, a: Tensor, given: Tensor, turned: Tensor | None
) -> bool:
    """Whether these are the gradients of the input, the weight and the bias, for this one of the output."""
    flat, rows = a.reshape(-1, form.inputs), given.reshape(-1, form.outputs)
    left, right = (flat, rows) if form.transposed else (rows, flat)
    if found[1] is None:
        return False
    return (
        _close(found[0], given @ turned.t())  # type: ignore[union-attr]
        and _close(found[1][:ROWS], left[:, :ROWS].t() @ right)
        and _close(found[1][-ROWS:], left[:, -ROWS:].t() @ right)
        and all(_close(sums, rows.sum(0)) for sums in found[2:])
    )


def _close(found: Tensor | None, expected: Tensor) -> bool:
    if found is None or found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _state(module: nn.Module) -> Iterator[Any]:
    """What a call must not change: attributes, what lists and dicts among them hold, and parameters."""
    for name, value in sorted(vars(module).items()):
        yield name
        yield value
        if isinstance(value, (list, set, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from (entry for item in value.items() for entry in item)
    for parameter in module._parameters.values():
        yield None if parameter is None else parameter._version


def _same(one: Any, two: Any) -> bool:
    plain = (int, float, str)
    return one is two or (type(one) is type(two) and isinstance(one, plain) and one == two)
