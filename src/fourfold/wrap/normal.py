"""Which formula a user's norm computes: found by trying it on numbers, since names and classes say little."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

EPS = ("eps", "variance_epsilon", "epsilon", "norm_eps", "layer_norm_eps", "rms_norm_eps")


@dataclass(frozen=True, slots=True)
class Formula:
    """w x / sqrt(mean(x^2) + eps) (`rms`), or with mean and bias (`layer`); `shift` is added to the weight."""

    kind: str
    features: int
    eps: float
    shift: float
    bias: bool


def formula_of(module: nn.Module) -> Formula | None:
    """None where it is no such norm, or normalises more than the last dim."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    weight = own.get("weight")
    if weight is None or weight.dim() != 1 or set(own) - {"weight", "bias"} or any(module.children()):
        return None
    if any(buffer is not None for buffer in module._buffers.values()):
        return None  # the formulas have no place for it
    if "norm" not in type(module).__name__.lower() or any(p.shape != weight.shape for p in own.values()):
        return None
    eps = next((float(value) for name in EPS if isinstance(value := getattr(module, name, None), float)), None)
    if eps is None or isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)):
        return None
    for kind, shift in (("rms", 0.0), ("rms", 1.0), ("layer", 0.0)):
        formula = Formula(kind, len(weight), eps, shift, "bias" in own)
        if (kind == "rms" and formula.bias) or not computes(module, formula):
            continue
        return formula
    return None


def computes(module: nn.Module, formula: Formula) -> bool:
    """Whether the module gives what the formula gives, on numbers of its own."""
    generator = torch.Generator().manual_seed(0)
    try:
        tried = copy.deepcopy(module).to_empty(device="cpu").double()
    except Exception:  # a copy runs code of anybody's
        return False
    with torch.no_grad(), torch.device("cpu"):  # also where somebody builds on the meta device
        for parameter in tried.parameters():
            parameter.copy_(torch.randn(formula.features, generator=generator, dtype=torch.float64))
        a = torch.randn(1, 3, formula.features, generator=generator, dtype=torch.float64) * 3 + 1
        try:
            out = tried(a)
        except Exception:  # as does a call
            return False
        expected = _expected(a, tried, formula)
    # modules may compute in fp32
    return (
        isinstance(out, Tensor)
        and out.shape == a.shape
        and torch.allclose(out.double(), expected, rtol=1e-4, atol=1e-4)
    )


def _expected(a: Tensor, module: nn.Module, formula: Formula) -> Tensor:
    centred = a if formula.kind == "rms" else a - a.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + formula.eps)
    out = out * (module.weight + formula.shift)  # type: ignore[operator]
    return out + module.bias if formula.bias else out  # type: ignore[operator]
