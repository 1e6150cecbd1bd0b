"""Norms are recognised by numbers under any name, and torch's functions of them run on cut features; what is only
nearly a norm keeps its own code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold.grid import Shape
from fourfold.policy import Policy
from fourfold.wrap import whole_tensors
from fourfold.wrap.adapters import NormAdapter, adapters_of
from fourfold.wrap.detect import NormFormula, norm_formula_of
from harness import grid_of

TOLERANCE = 1e-10
WIDTH = 12


class Written(nn.Module):
    """Somebody's own: `body` of the module, with a weight `w`, perhaps a bias `b`, and its input."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor], *, bias: bool = False, features: int = WIDTH) -> None:
        super().__init__()
        self.w, self.body, self.calls = nn.Parameter(torch.randn(features)), body, 0
        self.b = nn.Parameter(torch.randn(features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)

    def count(self) -> None:
        self.calls += 1


def nano(m: Any, x: Tensor) -> Tensor:
    return functional.layer_norm(x, m.w.shape, m.w, m.b, 1e-5)


def llama(m: Any, x: Tensor) -> Tensor:
    return m.w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def gemma(m: Any, x: Tensor) -> Tensor:
    return (1 + m.w) * x / (x.square().mean(-1, keepdim=True) + 3e-6).sqrt()


def narrow(m: Any, x: Tensor) -> Tensor:
    return m.w * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 0.01)).to(x)


def like_torch(m: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, (len(m.w),), m.w)


def old(m: Any, x: Tensor) -> Tensor:
    return m.w * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + m.b


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


NEARLY: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "unbiased deviation": lambda m, x: m.w * x / (x.std(-1, keepdim=True) + 1e-6),
    "of the largest": lambda m, x: m.w * x / x.abs().amax(-1, keepdim=True).clamp(min=1e-6),
    "drops": lambda m, x: functional.dropout(m.w * rms(x), 0.1, m.training),
    "clamps": lambda m, x: m.w * rms(x.clamp(-100, 100)),
    "clamps its result": lambda m, x: (m.w * rms(x)).clamp(-20, 20),
    "counts": lambda m, x: (m.count(), m.w * rms(x))[1],
    "groups": lambda m, x: m.w * rms(x.unflatten(-1, (3, -1))).flatten(-2),
    "detached statistics": lambda m, x: m.w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6).detach(),
    "frozen weight": lambda m, x: m.w.detach() * rms(x),
    "over tokens": lambda m, x: m.w * x * torch.rsqrt(x.square().mean(-2, keepdim=True) + 1e-6),
    "over rows of a batch": lambda m, x: m.w * rms(x - x.mean(0, keepdim=True)),
    "eps of the input's dtype": lambda m, x: m.w * x / (x.square().mean(-1, True) + torch.finfo(x.dtype).eps).sqrt(),
    "scales only": lambda m, x: m.w * x,
    "keeps the sum": lambda m, x: x + m.w * rms(x),
}


def test_a_trial_tells_norms_from_what_is_nearly_one() -> None:
    def formula(kind: str, eps: float | None, shift: float = 0.0, bias: bool = False) -> NormFormula:
        return NormFormula(kind, WIDTH, eps, shift, "w", "b" if bias else None)

    cases = [
        (Written(nano), formula("layer", 1e-5)),
        (Written(nano, bias=True), formula("layer", 1e-5, bias=True)),
        (Written(llama), formula("rms", 1e-6)),
        (Written(gemma), formula("rms", 3e-6, 1.0)),
        (Written(narrow), formula("rms", 0.01)),
        (Written(like_torch), formula("rms", None)),
        (nn.RMSNorm(WIDTH), NormFormula("rms", WIDTH, None, 0.0, "weight", None)),
        (nn.LayerNorm(WIDTH, eps=1e-12), NormFormula("layer", WIDTH, 1e-12, 0.0, "weight", "bias")),
        (Written(old, bias=True), None),
        *((Written(body), None) for body in NEARLY.values()),
        *((kind, None) for kind in (nn.PReLU(WIDTH), nn.GroupNorm(1, WIDTH), nn.GroupNorm(3, WIDTH))),
        *((kind(WIDTH, affine=True), None) for kind in (nn.BatchNorm1d, nn.InstanceNorm1d)),
        (nn.BatchNorm1d(WIDTH, track_running_stats=False), None),
    ]
    names = {id(body): name for name, body in NEARLY.items()}
    drawn = torch.get_rng_state()
    for module, expected in cases:
        assert norm_formula_of(module) == expected, names.get(id(getattr(module, "body", None)), type(module).__name__)
    assert torch.equal(torch.get_rng_state(), drawn) and not any(getattr(m, "calls", 0) for m, _ in cases)
    with torch.device("meta"), torch.no_grad():
        assert norm_formula_of(Written(nano, bias=True)) == formula("layer", 1e-5, bias=True)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "nano": lambda: Written(nano),
    "nano with a bias": lambda: Written(nano, bias=True),
    "llama": lambda: Written(llama),
    "gemma": lambda: Written(gemma),
    "torch's RMS": lambda: nn.RMSNorm(WIDTH),
    "torch's layer norm": lambda: nn.LayerNorm(WIDTH),
}


class Block(nn.Module):
    def __init__(self, norm: nn.Module, inside: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.inside = norm, nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), inside
        self.hidden, self.wide = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inside(self, self.norm(x))


def plain(m: Any, x: Tensor) -> Tensor:
    return m.down(torch.tanh(m.up(x)))


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "layer norm": lambda m, x: m.down(m.up(functional.layer_norm(x, (WIDTH,)))),
    "layer norm with weights": lambda m, x: m.down(m.up(functional.layer_norm(x, (WIDTH,), m.wide, m.wide, 1e-3))),
    "rms norm": lambda m, x: m.down(m.up(functional.rms_norm(x, (WIDTH,)))),
    "rms norm with a weight": lambda m, x: m.down(m.up(functional.rms_norm(x, (WIDTH,), weight=m.wide, eps=1e-3))),
    "of hidden units": lambda m, x: m.down(functional.rms_norm(m.up(x), [16], m.hidden)),
    "of hidden units, layer": lambda m, x: m.down(functional.layer_norm(m.up(x), [16], m.hidden, None)),
    "of heads": lambda m, x: m.down(functional.layer_norm(m.up(x).unflatten(-1, (4, 4)), (4,)).flatten(-2)),
    "a module without weights": lambda m, x: m.down(m.up(nn.LayerNorm(WIDTH, elementwise_affine=False)(x))),
}


def build(norm: str, inside: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(NORMS[norm](), inside) for _ in range(2)))
    return nn.Sequential(nn.Linear(6, WIDTH), blocks).double()


def differences(shape: Shape, mode: str) -> dict[str, Any]:
    """The errors of output and gradients, and the operations for which tensors were made whole."""
    grid, found = grid_of(shape), {}
    cases = [(name, name, plain) for name in NORMS] + [(name, "llama", inside) for name, inside in FUNCTIONS.items()]
    for name, norm, inside in cases:
        one, model = build(norm, inside), ff.parallelize(build(norm, inside), grid, policy=Policy(activations=mode))
        x = torch.randn(4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        expected, output = one(x), model(ff.local_rows(x, grid).clone())
        expected.square().mean().backward()
        output.square().mean().backward()
        gradients = whole_tensors(model, "gradient")
        errors = [(output - ff.local_rows(expected, grid)).abs().max().item()]
        for own, p in one.named_parameters():
            wanted = torch.zeros_like(p) if p.grad is None else p.grad
            errors.append((gradients[own] - wanted).abs().max().item())
        own_code = [
            at for at, m in model.named_modules() if at.endswith("norm") and type(adapters_of(m)[0]) is not NormAdapter
        ]
        whole = [line for line in ff.explain(model).splitlines() if "_norm " in line and " x " in line]
        if not max(errors) <= TOLERANCE or own_code or whole:
            found[name] = max(errors), own_code, whole
    return found


@pytest.mark.parametrize("shape", [Shape(x=2), Shape(y=2), Shape(z=2)], ids=str)
def test_norms_are_cut_and_exact(ranks, shape: Shape) -> None:
    assert ranks(2).run(differences, shape, "sharded") == [{}] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "mode"),
    [(Shape(x=2, y=2), "sharded"), (Shape(x=2, y=2), "replicated"), (Shape(y=2, z=2), "sharded")],
    ids=str,
)
def test_norms_are_cut_and_exact_on_two_axes(ranks, shape: Shape, mode: str) -> None:
    assert ranks(4).run(differences, shape, mode) == [{}] * 4
