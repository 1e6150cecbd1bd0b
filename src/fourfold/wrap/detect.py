"""Detects linear layers, norms and experts of any class by trying them on numbers: names and classes say little.

A copy of the module in fp64 is called with random inputs. The module is a linear layer if every result, and every
gradient, agrees with `a W^T + b` or `a W + b`, and if the call changes nothing else. The trial also shows how many dims
an input may have; for any other input the module's own code runs. Norms are compared with the formulas of an RMS norm
and of LayerNorm, experts with the sum over a token's experts of gated MLPs.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

# linear layers


@dataclass(frozen=True, slots=True)
class TrialCall:
    """One way to call a module. Code may branch on its mode, and on the size and shape of its input."""

    training: bool
    scale: float
    """The scale of the random input."""
    leading: dict[int, tuple[int, ...]]
    """The sizes of all dims of the input but the last, by the total number of dims."""
    gradients: bool


TRIALS = (
    TrialCall(True, 1.0, {1: (), 2: (5,), 3: (2, 5), 4: (1, 2, 3)}, gradients=True),
    TrialCall(False, 1e3, {1: (), 2: (67,), 3: (3, 23), 4: (2, 3, 11)}, gradients=False),
    TrialCall(True, 1e-3, {1: (), 2: (67,), 3: (3, 23), 4: (2, 3, 11)}, gradients=True),
    TrialCall(False, 1.0, {1: (), 2: (1,), 3: (1, 1), 4: (1, 1, 1)}, gradients=False),
)
TRIALS_OF_LARGE = (
    TrialCall(True, 1.0, {2: (1,), 3: (2, 3), 4: (2, 1, 2)}, gradients=True),
    TrialCall(False, 1e3, {2: (9,), 3: (1, 1), 4: (1, 1, 1)}, gradients=False),
)
"""Fewer and smaller calls, for large weights: each call takes about a second."""
LARGE = 1 << 22
"""The number of elements above which a weight is large."""
TOLERANCE = 1e-11
"""The largest error, relative to the largest value. fp64 rounds at 1e-16 and a sum of ten thousand products at 1e-14; a
module that computes in fp32 inside errs by 1e-7 and keeps its own code."""
RANDOM_BLOCK = 1 << 20
"""How many random numbers are drawn for a large weight, which repeats them: drawing them all would take seconds."""
GRADIENT_ROWS = 64
"""How many first and last rows of a weight's gradient are compared: all of them would need as much memory again."""


@dataclass(frozen=True, slots=True)
class LinearForm:
    """A linear map of the last dim, and the names of its two parameters.

    It is a W^T + b with W [outputs, inputs], or, if `transposed`, a W + b with W [inputs, outputs].
    """

    inputs: int
    outputs: int
    weight: str = "weight"
    bias: str | None = None
    transposed: bool = False
    dims: frozenset[int] | None = None
    """How many dims an input may have, as the trial found. None: any number, as for nn.Linear."""
    computed: bool = False
    """Whether the module computes its weight from other parameters before each use."""

    @property
    def names(self) -> dict[str, str]:
        """The module's own names of its weight and its bias."""
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Return whether the form describes a call with these arguments."""
        if len(args) + len(kwargs) != 1:
            return False
        (a,) = (*args, *kwargs.values())
        if not isinstance(a, Tensor) or not a.dtype.is_floating_point or a.shape[-1:] != (self.inputs,):
            return False
        return self.dims is None or a.ndim in self.dims


KNOWN_LARGE: weakref.WeakKeyDictionary[type[nn.Module], dict[Hashable, LinearForm | None]] = weakref.WeakKeyDictionary()
"""Results for large weights, by class, kept for the process: a planner builds the same model many times. The keys are
weak, so that a user's class can be collected."""


class LinearDetector:
    """Tries modules, once for all modules with the same class, shapes and attributes."""

    def __init__(self) -> None:
        self._known: dict[type[nn.Module], dict[Hashable, LinearForm | None]] = {}

    def form_of(self, module: nn.Module) -> LinearForm | None:
        """Return None if the module is not a linear layer, or has hooks, buffers, children or other parameters."""
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
        known = (KNOWN_LARGE if lasting and large else self._known).setdefault(type(module), {})
        if key not in known:
            known[key] = _try_linear(module, weights[0], biases[0] if biases else None)
        return known[key]


def has_hooks(module: nn.Module) -> bool:
    """Return whether a call of the module runs hooks, which see and may change inputs, outputs and gradients."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _key(module: nn.Module, own: Mapping[str, Tensor]) -> tuple[Hashable, bool]:
    """Return the key under which a result is kept, and whether the key stays valid.

    The key has everything that the result can depend on, except numbers. An object is known by its `id`, which another
    object may have later.
    """
    shapes = tuple((name, tuple(parameter.shape)) for name, parameter in own.items())
    torchs = vars(nn.Module()).keys()
    values = {name: value for name, value in vars(module).items() if name not in torchs}
    plain = {name: value is None or isinstance(value, (int, float, str, torch.dtype)) for name, value in values.items()}
    kept = tuple((name, type(value), value if plain[name] else id(value)) for name, value in values.items())
    return (shapes, kept), all(plain.values())


def _try_linear(module: nn.Module, weight: str, bias: str | None) -> LinearForm | None:
    rows, columns = (int(size) for size in module._parameters[weight].shape)  # type: ignore[union-attr]
    for transposed in (False, True):
        inputs, outputs = (rows, columns) if transposed else (columns, rows)
        if bias is not None and module._parameters[bias].shape != (outputs,):  # type: ignore[union-attr]
            continue
        dims = _dims_that_work(module, LinearForm(inputs, outputs, weight, bias, transposed))
        if dims:
            return LinearForm(inputs, outputs, weight, bias, transposed, dims)
    return None


def _dims_that_work(module: nn.Module, form: LinearForm) -> frozenset[int]:
    """Return the numbers of dims for which a copy of the module computes what the form says."""
    generator = torch.Generator().manual_seed(0)
    with _isolated():
        try:
            tried = _random_copy(module, form, generator)
        except Exception:  # deepcopy may run the user's code, which may raise anything
            return frozenset()
        trials = TRIALS if form.inputs * form.outputs <= LARGE else TRIALS_OF_LARGE
        found = set(trials[0].leading)
        for trial in trials:
            tried.train(trial.training)
            found = {dims for dims in found if _computes_linear(tried, form, trial, dims, generator)}
    return frozenset(found) if found & {2, 3} else frozenset()


@contextmanager
def _isolated() -> Iterator[None]:
    """Keep the caller's modes (meta device, no gradients, autocast) out of a trial, and the trial's random numbers and
    warnings out of the caller's process."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
        warnings.simplefilter("ignore")
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            yield


def _random_copy(module: nn.Module, form: LinearForm, generator: torch.Generator) -> nn.Module:
    """Copy the module, with random parameters in fp64 on the CPU."""
    drawn: dict[int, Any] = {}
    for own in form.names.values():
        plain = module._parameters[own]
        drawn[id(plain)] = nn.Parameter(_random_numbers(plain.numel(), generator).view(plain.shape))  # type: ignore[union-attr]
    return copy.deepcopy(module, drawn)


def _random_numbers(count: int, generator: torch.Generator) -> Tensor:
    # one less than a power of two, so that the repetition does not line up with the rows of a weight
    block = torch.randn(min(count, RANDOM_BLOCK - 1), generator=generator, dtype=torch.float64)
    return block if len(block) == count else block.repeat(-(-count // len(block)))[:count].clone()


def _computes_linear(
    module: nn.Module, form: LinearForm, trial: TrialCall, dims: int, generator: torch.Generator
) -> bool:
    """Return whether one call gives the form's result and gradients and leaves the module as it was."""
    parameters = [module._parameters[own] for own in form.names.values()]
    leading = trial.leading[dims]
    a = torch.randn(*leading, form.inputs, generator=generator, dtype=torch.float64).mul_(trial.scale).requires_grad_()
    given = torch.randn(*leading, form.outputs, generator=generator, dtype=torch.float64)
    before = list(_state(module))
    gradients: tuple[Tensor | None, ...] = ()
    try:
        with torch.set_grad_enabled(trial.gradients):
            out = module.forward(a)
        # a result without a gradient would show that the module detaches its input
        if not isinstance(out, Tensor) or out.shape != given.shape or out.requires_grad != trial.gradients:
            return False
        if trial.gradients:
            gradients = torch.autograd.grad(out, [a, *parameters], given, allow_unused=True)  # type: ignore[list-item]
    except Exception:  # forward and backward run the user's code, which may raise anything
        return False
    after = list(_state(module))  # a module that counts its calls, or caches its weight, keeps its own code
    if len(after) != len(before) or not all(map(_unchanged, before, after)):
        return False
    with torch.no_grad():
        w, *b = parameters
        turned = w if form.transposed else w.t()  # type: ignore[union-attr]
        if not _close(out, a @ turned + b[0] if b else a @ turned):  # type: ignore[operator]
            return False
        return not gradients or _are_gradients(gradients, form, a, given, turned)


def _are_gradients(
    found: tuple[Tensor | None, ...], form: LinearForm, a: Tensor, given: Tensor, turned: Tensor | None
) -> bool:
    """Return whether these are the gradients of input, weight and bias for the output's gradient `given`."""
    flat, rows = a.reshape(-1, form.inputs), given.reshape(-1, form.outputs)
    left, right = (flat, rows) if form.transposed else (rows, flat)
    if found[1] is None:
        return False
    return (
        _close(found[0], given @ turned.t())  # type: ignore[union-attr]
        and _close(found[1][:GRADIENT_ROWS], left[:, :GRADIENT_ROWS].t() @ right)
        and _close(found[1][-GRADIENT_ROWS:], left[:, -GRADIENT_ROWS:].t() @ right)
        and all(_close(sums, rows.sum(0)) for sums in found[2:])
    )


def _close(found: Tensor | None, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    if found is None or found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


def _state(module: nn.Module) -> Iterator[Any]:
    """Yield what a call must not change: attributes, the entries of containers among them, and parameters."""
    for name, value in sorted(vars(module).items()):
        yield name
        yield value
        if isinstance(value, (list, set, tuple)):
            yield from value
        elif isinstance(value, dict):
            yield from (entry for item in value.items() for entry in item)
    for parameter in module._parameters.values():
        yield None if parameter is None else parameter._version


def _unchanged(before: Any, after: Any) -> bool:
    plain = (int, float, str)
    return before is after or (type(before) is type(after) and isinstance(before, plain) and before == after)


# norms


@dataclass(frozen=True, slots=True)
class NormFormula:
    """w x / sqrt(mean(x^2) + eps) (kind "rms"), or the same with mean and bias (kind "layer").

    `shift` is added to the weight before it is used.
    """

    kind: str
    features: int
    eps: float | None
    """None: that of torch's RMSNorm, which depends on the dtype of the input (`eps_for`)."""
    shift: float
    weight: str
    """The module's own names of its weight and its bias."""
    bias: str | None

    def eps_for(self, dtype: torch.dtype) -> float:
        """Return the epsilon for an input of this dtype."""
        return torch.finfo(torch.promote_types(dtype, torch.float32)).eps if self.eps is None else self.eps


KNOWN_NORMS: weakref.WeakKeyDictionary[type[nn.Module], dict[Hashable, NormFormula | None]] = (
    weakref.WeakKeyDictionary()
)
"""Results by class, as in `KNOWN_LARGE`: a model has many equal norms."""
SMALL = 1e-8
"""The scale of an input that is far below any epsilon, which the result therefore shows."""
LEAST_EPS = 1e-20
"""An epsilon below this is taken for 0, and then rows of zeros are no numbers."""
NORM_TOLERANCE = 1e-5
"""The largest error relative to the largest value: many norms compute in fp32 inside, ours in fp64 if the input is."""
NORM_TRIALS = (
    *((True, 1e-6, (2, 5)), (False, 1e-3, (1, 2, 3)), (True, 1.0, (2, 5)), (False, 1.0, (3,)), (True, 1e3, (2, 5))),
)
"""Mode, scale of the input, and the sizes of all its dims but the last, for each call."""


def norm_formula_of(module: nn.Module) -> NormFormula | None:
    """Return the formula that a norm of the last dim computes; None for any other module."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    shapes = {tuple(parameter.shape) for parameter in own.values()}
    if not own or len(own) > 2 or len(shapes) > 1 or any(len(shape) != 1 or shape[0] < 2 for shape in shapes):
        return None
    if any(module.children()) or any(buffer is not None for buffer in module._buffers.values()):
        return None  # the formulas have no buffers
    if not all(parameter.is_floating_point() for parameter in own.values()) or "forward" in vars(module):
        return None
    key, lasting = _key(module, own)
    known = KNOWN_NORMS.setdefault(type(module), {}) if lasting else {}
    if key not in known:
        known[key] = _try_norm(module, list(own))
    return known[key]


def _try_norm(module: nn.Module, own: Sequence[str]) -> NormFormula | None:
    generator = torch.Generator().manual_seed(0)
    with _isolated():
        drawn: dict[int, Any] = {}
        for name in own:
            plain: Any = module._parameters[name]
            numbers = torch.randn(plain.shape, generator=generator, dtype=torch.float64)
            drawn[id(plain)] = nn.Parameter(numbers * 30)
        try:
            tried = copy.deepcopy(module, dict(drawn))
        except Exception:  # deepcopy may run the user's code, which may raise anything
            return None
        for weight in own:
            bias = next((name for name in own if name != weight), None)
            for kind, shift in (("rms", 0.0), ("rms", 1.0), ("layer", 0.0)):
                if kind == "rms" and bias is not None:
                    continue
                formula = NormFormula(kind, drawn[id(module._parameters[weight])].numel(), 0.0, shift, weight, bias)
                eps = _eps_of(tried, formula, generator)
                if eps is not None and _computes_norm(tried, formula := replace(formula, eps=eps), generator):
                    return _with_torchs_eps(tried, formula, generator)
    return None


def _eps_of(module: nn.Module, formula: NormFormula, generator: torch.Generator) -> float | None:
    """Return the epsilon with which the formula gives what the module gives for a small input; None if none does."""
    dtype = module._parameters[formula.weight].dtype  # type: ignore[union-attr]
    a = (torch.randn(2, 3, formula.features, generator=generator, dtype=torch.float64) * SMALL).to(dtype)
    with torch.no_grad():
        try:
            out = module.forward(a)
        except Exception:  # the call runs the user's code, which may raise anything
            return None
        if not isinstance(out, Tensor) or out.shape != a.shape:
            return None
        out, a = out.double(), a.double()
        centred = a if formula.kind == "rms" else a - a.mean(-1, keepdim=True)
        scaled = centred * (module._parameters[formula.weight].double() + formula.shift)  # type: ignore[union-attr]
        out = out if formula.bias is None else out - module._parameters[formula.bias].double()  # type: ignore[union-attr]
        rstd = (out * scaled).sum(-1) / scaled.square().sum(-1)
        every = rstd.square().reciprocal() - centred.square().mean(-1)
    eps = float(every.median())
    if not isfinite(eps) or eps < LEAST_EPS:
        return None
    attributes = [value for value in vars(module).values() if isinstance(value, float)]
    # the number that somebody wrote: a module that computes in fp32 inside shows it to seven digits
    near = [value for value in (*attributes, float(f"{eps:.3g}")) if abs(value - eps) <= NORM_TOLERANCE * eps]
    return next(iter(near), eps)


def _computes_norm(module: nn.Module, formula: NormFormula, generator: torch.Generator) -> bool:
    """Return whether a module gives what the formula gives, with its gradients, and leaves nothing behind."""
    inputs = [module._parameters[name] for name in (formula.weight, formula.bias) if name is not None]
    for training, scale, leading in NORM_TRIALS:
        a = torch.randn(*leading, formula.features, generator=generator, dtype=torch.float64)
        given = torch.randn(a.shape, generator=generator, dtype=torch.float64)
        a[..., :1, :] += 3  # rows with a mean
        if len(leading) == 2:
            a[0, 0] = 0
        a = a.mul_(scale).requires_grad_()
        before = list(_state(module.train(training)))
        try:
            out = module.forward(a)
            if not isinstance(out, Tensor) or out.shape != a.shape or out.dtype != a.dtype:
                return False
            found = out, *torch.autograd.grad(out, [a, *inputs], given)  # type: ignore[list-item]
        except Exception:  # forward and backward run the user's code, which may raise anything
            return False
        after = list(_state(module))
        if len(after) != len(before) or not all(map(_unchanged, before, after)):
            return False
        centred = a if formula.kind == "rms" else a - a.mean(-1, keepdim=True)
        expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + formula.eps_for(a.dtype))
        expected = expected * (inputs[0] + formula.shift)  # type: ignore[operator]
        expected = expected if formula.bias is None else expected + inputs[1]  # type: ignore[operator]
        of_formula = expected, *torch.autograd.grad(expected, [a, *inputs], given)  # type: ignore[list-item]
        if not all(_close(one, other.detach(), NORM_TOLERANCE) for one, other in zip(found, of_formula, strict=True)):
            return False
    return True


def _with_torchs_eps(module: nn.Module, formula: NormFormula, generator: torch.Generator) -> NormFormula | None:
    """Return the formula with torch's epsilon if the module's depends on the dtype as torch's does.

    None if it depends on it in another way.
    """
    least = torch.finfo(torch.float64).eps
    if formula.eps is None or abs(formula.eps - least) > NORM_TOLERANCE * least:
        return formula
    for dtype in (torch.float32, torch.bfloat16):
        eps = _eps_of(module.to(dtype), replace(formula, eps=0.0), generator)
        wanted = torch.finfo(torch.float32).eps
        if eps is None or abs(eps - wanted) > 0.1 * wanted:
            return None
    return replace(formula, eps=None)


# experts


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """Gated experts, called with tokens a [m, k], the ids of their experts [m, K] and how much these count, p [m, K].

    It is out[t] = sum_j p[t, j] W_down[e] (silu(W_gate[e] a[t]) * (W_up[e] a[t])) with e = ids[t, j]; W_gate and W_up
    stand one behind the other in one weight [experts, 2 hidden, features], W_down is [experts, features, hidden].
    """

    experts: int
    features: int
    hidden: int
    gate_up: str
    """The name of the weight that holds gate and up."""
    down: str


TRIED_FEATURES, TRIED_HIDDEN, TRIED_ROWS, TRIED_CHOICES = 16, 8, 11, 3
"""The sizes of a trial of experts, whose true weights may fill a device. Rows of weights are multiples of 16 bytes,
which grouped products ask for."""
TRIED_SCALES = (1e-2, 1.0, 1e2)
"""The scales of the tokens of a trial. Some experts clamp what is large."""
EXPERTS_TOLERANCES = {torch.float64: TOLERANCE, torch.float32: 1e-5}
"""The largest errors relative to the largest value, by the dtype of a trial. Kernels for grouped products lack fp64; in
fp32 a few dozen roundings of 6e-8 follow each other."""


class ExpertsDetector:
    """Tries modules with experts, once for all modules with the same class, shapes and attributes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, ExpertsForm | None] = {}

    def form_of(self, module: nn.Module) -> ExpertsForm | None:
        """Return None if the module is not made of experts, or has hooks, buffers or other parameters."""
        form = _experts_by_shape(module)
        if form is None or has_hooks(module) or "forward" in vars(module):
            return None
        inside = [child for child in module.modules() if child is not module]
        if any(child._parameters or has_hooks(child) for child in inside) or any(True for _ in module.buffers()):
            return None
        children = tuple((type(child), _key(child, {})) for child in inside)
        key = type(module), _key(module, dict(module.named_parameters())), children
        if key not in self._known:
            self._known[key] = form if _computes_experts(module, form) else None
        return self._known[key]


def _experts_by_shape(module: nn.Module) -> ExpertsForm | None:
    """Return what the shapes of a module's two parameters say."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if len(own) != 2 or len(module._parameters) != 2 or any(parameter.dim() != 3 for parameter in own.values()):
        return None
    for gate_up, down in (tuple(own), tuple(own)[::-1]):
        experts, features, hidden = (int(size) for size in own[down].shape)
        if own[gate_up].shape == (experts, 2 * hidden, features):
            return ExpertsForm(experts, features, hidden, gate_up, down)
    return None


def _computes_experts(module: nn.Module, form: ExpertsForm) -> bool:
    """Return whether a copy of the module with small weights gives what the form says, and its gradients."""
    for dtype, tolerance in EXPERTS_TOLERANCES.items():
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, of: torch.dtype = dtype, by: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=by, dtype=torch.float64).to(of)

        sizes = {
            form.gate_up: (form.experts, 2 * TRIED_HIDDEN, TRIED_FEATURES),
            form.down: (form.experts, TRIED_FEATURES, TRIED_HIDDEN),
        }
        with _isolated():
            small = {id(module._parameters[own]): nn.Parameter(draw(*size)) for own, size in sizes.items()}
            try:
                tried = copy.deepcopy(module, dict(small))
            except Exception:  # deepcopy may run the user's code, which may raise anything
                return False
            found = [_tried_experts(tried, form, draw, scale, tolerance) for scale in TRIED_SCALES]
        if found != [None] * len(found):
            return all(found)
    return False


def _tried_experts(module: nn.Module, form: ExpertsForm, draw: Any, scale: float, tolerance: float) -> bool | None:
    """Return whether calls in both modes give the form's result and gradients; None if the module cannot be called."""
    chosen = min(TRIED_CHOICES, form.experts)
    ids = draw(TRIED_ROWS, form.experts).topk(chosen, dim=1).indices
    a, weights = draw(TRIED_ROWS, TRIED_FEATURES) * scale, draw(TRIED_ROWS, chosen).sigmoid()
    given = draw(TRIED_ROWS, TRIED_FEATURES)
    inputs: list[Any] = [
        a.requires_grad_(),
        weights.requires_grad_(),
        *(module._parameters[own] for own in (form.gate_up, form.down)),
    ]
    gate_up, down = inputs[2:]
    hidden = torch.einsum("tk,tjnk->tjn", a, gate_up[ids])
    gate, up = hidden.chunk(2, dim=-1)
    expected = torch.einsum("tjn,tjkn,tj->tk", torch.nn.functional.silu(gate) * up, down[ids], weights)
    of_formula = torch.autograd.grad(expected, inputs, given)
    before = list(_state(module.train()))
    for training in (True, False):
        module.train(training)
        try:
            out = module.forward(a, ids, weights)
            gradients = torch.autograd.grad(out, inputs, given)
        except Exception:  # forward and backward run the user's code, which may raise anything
            return None
        pairs = zip((out, *gradients), (expected, *of_formula), strict=True)
        if not all(_close(one, other.detach(), tolerance) for one, other in pairs):
            return False
    after = list(_state(module.train()))
    return len(after) == len(before) and all(map(_unchanged, before, after))
