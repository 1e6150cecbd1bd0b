"""Every operation on a tensor that is cut gives what plain torch gives on the whole, forward and backward.

The operations are those that have a rule (`RULES`, walked so that none goes untested) and some that have none. Each is
called in several ways, on every layout, beside plain operands of every shape that broadcasts (operations.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from fourfold.gradients import Gradients
from fourfold.grid import Grid, Shape
from fourfold.nn.embedding import Head
from fourfold.nn.rng import seeded
from fourfold.policy import Policy
from fourfold.wrap.grid_tensor import RULES, GridTensor, ModelContext, distribute, to_whole
from fourfold.wrap.ops import META
from fourfold.wrap.placements import LogitsPlacement
from harness import grid_of
from operations import CALLS, DRAWN, FALLBACK, HOOKS, KINDS, PROPERTIES, Operands
from share import share

TOLERANCE = 1e-12


def compare(label: str, context: ModelContext, kind: str, call: Callable[[Operands], Any], seed: int) -> list[str]:
    """How the two sides differ."""
    expected_in, found_in = Operands(seed, kind, None), Operands(seed, kind, context)
    with seeded(seed, torch.device("cpu")):
        expected = leaves_of(call(expected_in))
    with seeded(seed, torch.device("cpu")):
        found = leaves_of(call(found_in))
    wrong = []
    if len(expected) != len(found):
        return [f"{label} on {kind}: {len(found)} results instead of {len(expected)}"]
    pairs: list[tuple[Tensor, Tensor]] = []
    for number, (one, two) in enumerate(zip(expected, found, strict=True)):
        if isinstance(two, GridTensor) and two.shape != one.shape:
            wrong.append(f"{label} on {kind}, result {number}: shape {tuple(two.shape)}, not {tuple(one.shape)}")
            continue
        if not isinstance(one, Tensor):
            if one != two:
                wrong.append(f"{label} on {kind}, result {number}: {two}, not {one}")
            continue
        two = to_whole(two)
        if (one.shape, one.dtype, one.requires_grad) != (two.shape, two.dtype, two.requires_grad):
            wrong.append(f"{label} on {kind}, result {number}: {describe(two)}, not {describe(one)}")
        elif not close(one, two):
            wrong.append(f"{label} on {kind}, result {number}: differs")
        elif one.requires_grad:
            pairs.append((one, two))
    if not wrong and pairs:
        wrong += compare_gradients(f"{label} on {kind}", pairs, expected_in, found_in, seed)
    return wrong


def compare_gradients(
    label: str, pairs: list[tuple[Tensor, Tensor]], one: Operands, two: Operands, seed: int
) -> list[str]:
    generator = torch.Generator().manual_seed(seed + 1)
    narrow = min((first for first, _ in pairs), key=lambda tensor: tensor.dtype.itemsize).dtype
    weights = [torch.rand(first.shape, generator=generator, dtype=torch.float64).to(first.dtype) for first, _ in pairs]
    gradients = [
        torch.autograd.grad([pair[side] for pair in pairs], operands.leaves, weights, allow_unused=True)
        for side, operands in enumerate((one, two))
    ]
    return [
        f"{label}: gradient of operand {number} ({tuple(leaf.shape)})"
        for number, (leaf, a, b) in enumerate(zip(one.leaves, *gradients, strict=True))
        if not close(torch.zeros_like(leaf) if a is None else a, torch.zeros_like(leaf) if b is None else b, narrow)
    ]


def leaves_of(result: Any) -> list[Any]:
    return tree_leaves(list(result) if isinstance(result, tuple) else result)


def describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} requires_grad={tensor.requires_grad}"


def close(one: Tensor, two: Tensor, narrow: torch.dtype | None = None) -> bool:
    """Up to rounding in the narrowest dtype that took part."""
    if one.shape != two.shape:
        return False
    dtype = narrow or one.dtype
    loose = 1e-5 if dtype == torch.float32 else 1e-2 if dtype in (torch.float16, torch.bfloat16) else TOLERANCE
    return torch.allclose(one.double(), two.double(), rtol=loose, atol=loose, equal_nan=True)


def context_of(grid: Grid, mode: str) -> ModelContext:
    context = ModelContext(grid, Policy(activations=mode))  # type: ignore[arg-type]
    context.gradients = Gradients(grid, {}, context.policy)
    context.begin_pass()
    return context


def label_of(func: Callable) -> str:
    place = getattr(func, "__objclass__", None) or getattr(func, "__module__", "")
    return f"{getattr(place, '__name__', place)}.{getattr(func, '__name__', func)}"


def check_operations(shape: Shape, mode: str, share: int, turn: int) -> list[str]:
    """What is wrong, of one in `share` of the combinations of calls and layouts."""
    context = context_of(grid_of(shape), mode)
    ways: list[tuple[str, Callable[[Operands], Any]]] = [
        (label_of(func), partial(call, func)) for func in RULES for call in CALLS.get(func.__name__, ())
    ]
    ways += [(f"way {number}", way) for number, way in enumerate(FALLBACK)]
    wrong: list[str] = []
    for number, (label, way) in enumerate(ways):
        for at, kind in enumerate(KINDS):
            if (number + at + turn) % share == 0:
                wrong += compare(label, context, kind, way, number)
    return wrong


GRIDS = [
    (Shape(x=2), "replicated"),
    (Shape(y=2), "sharded"),
    (Shape(x=2, y=2), "sharded"),
    (Shape(x=2, y=2), "replicated"),
    (Shape(x=3), "sharded"),
]
"""In the order of their ranks, which stay up."""
SHARE = 120
"""Each grid tries another one in so many of the calls and layouts; soak_operations.py tries all of them."""


@pytest.mark.parametrize(("shape", "mode"), share(GRIDS, 3), ids=lambda value: str(value))
def test_operations_on_parts_equal_those_on_the_whole(ranks, shape: Shape, mode: str) -> None:
    for wrong in ranks(shape.world).run(check_operations, shape, mode, SHARE, GRIDS.index((shape, mode)), timeout=200):
        assert not wrong, "\n".join(wrong)


def never_on_parts() -> list[str]:
    """Functions of which no call, on no layout, ran on parts, whatever torch makes of it."""
    context = context_of(grid_of(Shape()), "sharded")
    plain: dict[Callable, Callable] = dict(RULES)
    ran: list[Callable] = []

    def watched(rule: Callable, *given: Any) -> Any:
        result = rule(*given)
        ran.extend([] if result is NotImplemented else [rule])
        return result

    RULES.update({func: partial(watched, rule) for func, rule in plain.items()})
    found = []
    for func, rule in plain.items():
        ran.clear()
        for kind in KINDS:
            for call in CALLS.get(func.__name__, ()):
                if rule not in ran:
                    call(func, Operands(0, kind, context))
        if func.__name__ in CALLS and rule not in ran:
            found.append(label_of(func))
    RULES.update(plain)
    return found


def test_every_rule_is_tried_and_of_use(ranks) -> None:
    names = {func.__name__ for func in RULES} - {"__get__"}
    untried = names - {*CALLS, *PROPERTIES, *META.split(), *DRAWN, *HOOKS}
    assert not untried, f"no calls in CALLS: {untried}"
    assert ranks(1).run(never_on_parts) == [[]]


def check_properties() -> list[str]:
    context = context_of(grid_of(Shape(x=2, y=2)), "sharded")
    wrong = []
    for kind in KINDS:
        a, plain = Operands(0, kind, context).a(), Operands(0, kind, None).a()
        for name in META.split():
            if hasattr(plain, name) and getattr(a, name) != getattr(plain, name):
                wrong.append(f"{name} on {kind}")
        for name in ("is_floating_point", "is_complex", "element_size", "is_inference", "get_device", "is_contiguous"):
            if getattr(a, name)() != getattr(plain, name)():
                wrong.append(f"{name}() on {kind}")
        same = [
            (a.new_zeros(2), plain.new_zeros(2)),
            (a.new_ones(2, dtype=torch.int64), plain.new_ones(2, dtype=torch.int64)),
            (a.new_full((2,), 3.0), plain.new_full((2,), 3.0)),
            (a.new_tensor([1.0]), plain.new_tensor([1.0])),
            (a.new_empty(3).shape, plain.new_empty(3).shape),
            (torch.empty_like(a).shape, plain.shape),
            (a.data, plain.data),
            (a.reshape(15, 6).T, plain.reshape(15, 6).T),
            (a.mT, plain.mT),
            (a.requires_grad_(), plain),
        ]
        if kind != "fused":
            same += [(torch.empty_like(a).fill_(2.0), torch.full_like(plain, 2.0))]
            same += [(torch.ones_like(a).zero_(), torch.zeros_like(plain))]
        for number, (one, two) in enumerate(same):
            alike = torch.equal(to_whole(one), two) if isinstance(two, Tensor) else one == two
            wrong += [] if alike else [f"property {number} on {kind}"]
    return wrong


def test_a_cut_tensor_has_the_properties_of_the_whole(ranks) -> None:
    assert ranks(4).run(check_properties) == [[]] * 4


def draws(mode: str) -> dict[str, Any]:
    """What functions that draw give on tensors of ones, whole, with ranks whose own generators differ."""
    context = context_of(grid_of(Shape(x=2, y=2)), mode)
    torch.manual_seed(context.grid.rank)
    found: dict[str, Any] = {}
    for kind in ("rest", "blocks 1", "columns", "shared 1", "fused"):
        with seeded(7, torch.device("cpu")):  # as a model does
            ones = torch.ones(40, 30, 24, dtype=torch.float64)
            layout = LogitsPlacement(
                context, 2, ("x", "y")[: 2 if mode == "sharded" else 1], Head(context.grid, context.policy, 4, 24)
            )
            operands = Operands(0, kind, context)
            a = operands.a().detach() * 0 + 1
            if kind == "columns":
                a = distribute(ones, layout)
            elif kind in ("rest", "blocks 1"):
                a = operands._cut(ones, kind)
            found[f"dropout {kind}"] = to_whole(functional.dropout(a, 0.25))
            found[f"alpha {kind}"] = to_whole(functional.alpha_dropout(a, 0.25, True))
            found[f"torch {kind}"] = to_whole(torch.dropout(a, 0.25, True))
            found[f"off {kind}"] = to_whole(functional.dropout(a, 0.25, False))
            if kind in ("rest", "blocks 1", "columns"):
                b = a * 1
                functional.dropout(b, 0.25, inplace=True)
                found[f"in place {kind}"] = to_whole(b)
                found[f"uniform {kind}"] = to_whole(torch.empty_like(a).uniform_())
                found[f"normal {kind}"] = to_whole(torch.empty_like(a).normal_(3.0))
                found[f"bernoulli {kind}"] = to_whole(torch.empty_like(a).bernoulli_(0.75))
                found[f"exponential {kind}"] = to_whole(torch.empty_like(a).exponential_())
    return {name: value.numpy().copy() for name, value in found.items()}


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_what_is_drawn_differs_where_a_tensor_is_cut_and_nowhere_else(ranks, mode: str) -> None:
    first, *others = ranks(4).run(draws, mode)
    for name, values in first.items():
        assert all((other[name] == values).all() for other in others), f"{name}: ranks drew apart"
        value = torch.as_tensor(values)
        kind = name.split()[0]
        kept = (value != value.flatten()[value.flatten().argmin()]).double().mean().item()
        if kind in ("dropout", "torch", "in", "bernoulli") and value.numel() > 1000:
            assert kept == pytest.approx(0.75, abs=0.02), name
        if kind in ("dropout", "torch", "in"):
            assert set(value.unique().tolist()) == {0.0, 1 / 0.75}, name
        if kind == "alpha":  # what torch makes of ones
            assert len(value.unique()) == 2 and 0.0 not in value.unique(), name
        if kind == "off":
            assert (value == 1).all(), name
        if kind in ("uniform", "normal", "exponential"):
            assert len(value.unique()) == value.numel(), f"{name}: parts drew the same"


def refusals() -> dict[str, str]:
    """What is said where a change is not possible."""
    context = context_of(grid_of(Shape(x=2)), "sharded")
    context.last_layer = "layers.0.up"

    def out(a: Tensor) -> None:
        torch.add(a, 1, out=a)

    def data(a: Tensor) -> None:
        a.data = torch.zeros(a.shape)

    tries = dict(out=out, data=data, transposed=lambda a: a.transpose_(0, 1), unsqueezed=lambda a: a.unsqueeze_(0))
    tries |= dict(backward=lambda a: a.backward(), retain=lambda a: a.retain_grad())
    tries |= dict(detach=lambda a: a.requires_grad_(False))
    found = {}
    for name, act in tries.items():
        try:
            act(Operands(0, "rest", context).a())
            found[name] = "nothing"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_changes_that_are_not_possible_are_refused(ranks) -> None:
    for found in ranks(2).run(refusals):
        for name, said in found.items():
            assert said.startswith("RuntimeError") and "after layers.0.up" in said, f"{name}: {said}"
