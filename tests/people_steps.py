"""What loops do with numbers of gradients and weights between backward and the next step: `HABITS` by name, loops of
several passes in `PASSES`, and optimizers written by hand in `BY_HAND`.

A habit is a generator: the code before its `yield` runs after backward, the code behind it after the optimizer's step.
The same code runs on one process and on a grid. `side.log` keeps the numbers that it has read.

Thresholds, seeds and sizes of epsilon lie such that rounding decides nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from people import Side

EPS = 1e-3
"""Keeps a gradient that is 0 but for rounding from being blown up."""
HABITS: dict[str, Callable[[Side], Iterator[None]]] = {}


def habit(name: str) -> Callable[[Callable[[Side], Any]], Callable[[Side], Any]]:
    def add(code: Callable[[Side], Any]) -> Callable[[Side], Any]:
        HABITS[name] = code
        return code

    return add


def trained(side: Side) -> list[nn.Parameter]:
    return [parameter for parameter in side.model.parameters() if parameter.grad is not None]


def grads(side: Side) -> list[Tensor]:
    return [parameter.grad for parameter in trained(side)]  # type: ignore[misc]


def rest_of(tensor: Tensor) -> tuple[int, ...]:
    """All dims but the first, as norms of rows take them; the only one of a vector."""
    return tuple(range(1, tensor.dim())) or tuple(range(tensor.dim()))


# numbers that are read


@habit("reads numbers of gradients")
def reads_gradients(side: Side) -> Iterator[None]:
    for p in side.model.parameters():
        if p.grad is None or not p.grad.any():
            continue
        g = p.grad
        side.log("gradient", g.norm().item(), float(g.mean()), g.abs().max().item(), g.sum().tolist())
        side.log("gradient", int((g.abs() > 1e-2).sum()), (g * p).sum().item(), g.std(unbiased=False).item())
        side.log("gradient", float(f"{g.abs().mean():.4f}"), float(g.detach().cpu().numpy().std()), g.numel())
        side.log("gradient", float(g.argmax() >= 0), g.square().mean().sqrt().item(), 1.0 if g.norm() > 1e-3 else 0.0)
    yield


@habit("reads numbers of weights")
def reads_weights(side: Side) -> Iterator[None]:
    before = [p.detach().clone() for p in side.model.parameters()]
    yield
    for p, old in zip(side.model.parameters(), before, strict=True):
        side.log("weight", p.norm().item(), float(p.mean()), p.min().item(), float(max(p.flatten())), p.norm(1).item())
        side.log("weight", p.norm(float("inf")).item(), p.data.pow(2).sum().item(), p.var(unbiased=False).item())
        side.log("weight", p.flatten()[-1].item(), float(p.detach().numpy().max()), torch.numel(p))
        side.log("weight", ((p.data - old).norm() / (old.norm() + EPS)).item(), bool(torch.isfinite(p).all()))
        side.log("weight", torch.allclose(p, old), torch.equal(p, p.data), *(p.detach() * 2).flatten().tolist())


@habit("reads numbers of rows")
def reads_rows(side: Side) -> Iterator[None]:
    for p in trained(side):
        if p.dim():
            side.log("row", *p.grad.norm(2, dim=rest_of(p)).flatten().tolist(), p.grad.norm(dim=-1).max().item())
            side.log("row", *p.detach().mean(dim=-1).flatten().tolist(), *p.grad.sum(0).flatten().tolist())
            side.log("row", float(torch.linalg.vector_norm(p.data, dim=0).min()), p[0].norm().item(), len(p))
            side.log("row", *(row.norm().item() for row in p.grad), p.data.amax(0).sum().item())
    yield


@habit("reads quantiles")
def reads_quantiles(side: Side) -> Iterator[None]:
    for p in trained(side):
        flat = p.grad.detach().abs().flatten()
        side.log("quantile", flat.median().item(), torch.quantile(flat, 0.9).item(), flat.sort().values[-1].item())
        side.log("quantile", *flat.topk(min(2, len(flat))).values.tolist(), flat.kthvalue(1).values.item())
    yield


@habit("reads histograms")
def reads_histograms(side: Side) -> Iterator[None]:
    yield
    for p in side.model.parameters():
        side.log("histogram", *torch.histc(p.detach(), bins=4, min=-1.37, max=1.41).tolist())
        side.log("histogram", (p.detach() > 0.137).double().mean().item(), torch.count_nonzero(p.data).item())


@habit("reads spectra")
def reads_spectra(side: Side) -> Iterator[None]:
    yield
    for p in side.model.parameters():
        if p.dim() == 2:
            side.log("spectrum", torch.linalg.matrix_norm(p.detach(), 2).item())
            side.log("spectrum", *torch.linalg.svdvals(p.detach()).tolist())


@habit("reads cosines")
def reads_cosines(side: Side) -> Iterator[None]:
    old = side.kept.setdefault("first", [p.detach().clone() for p in side.model.parameters()])
    yield
    for p, first in zip(side.model.parameters(), old, strict=True):
        a, b = p.detach().flatten(), first.flatten()
        side.log("cosine", torch.dot(a, b).item(), (a @ b).item())
        if p.norm() > 0.1:  # else a bias of zeros, but for rounding
            side.log("cosine", functional.cosine_similarity(a, b, dim=0).item(), (a * b).sum().item())


@habit("reads norms of all")
def reads_total(side: Side) -> Iterator[None]:
    each = torch._foreach_norm(grads(side))
    side.log("total", torch.linalg.vector_norm(torch.stack(each)).item(), sum(each).item())
    side.log("total", torch.stack([g.norm() for g in grads(side)]).norm().item(), max(g.norm() for g in grads(side)))
    side.log("total", nn.utils.get_total_norm(grads(side)), sum(g.square().sum() for g in grads(side)).sqrt().item())
    side.log("total", sum(float(g.norm()) ** 2 for g in grads(side)) ** 0.5, sum(p.numel() for p in trained(side)))
    side.log("total", torch.cat([g.flatten() for g in grads(side)]).norm().item())
    yield


@habit("keeps numbers in a tensor")
def keeps_numbers(side: Side) -> Iterator[None]:
    numbers = torch.zeros(len(trained(side)), 2, dtype=torch.float64)
    for at, p in enumerate(trained(side)):
        numbers[at, 0] = p.grad.norm()
        numbers[at, 1] = p.data.mean().item()
    side.log("kept", *numbers.flatten().tolist())
    yield


@habit("one vector of all")
def one_vector(side: Side) -> Iterator[None]:
    side.log("vector", nn.utils.parameters_to_vector(grads(side)).norm().item())
    yield
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(side.model.parameters())
        nn.utils.vector_to_parameters(vector * 0.99, side.model.parameters())


# gradients that are changed


@habit("clips by hand, on the host")
def clips_on_host(side: Side) -> Iterator[None]:
    total = sum(p.grad.norm().item() ** 2 for p in trained(side)) ** 0.5
    side.log("total", total)
    if total > 0.1:
        for p in trained(side):
            p.grad.mul_(0.1 / (total + 1e-6))
    yield


@habit("clips by hand, on the device")
def clips_on_device(side: Side) -> Iterator[None]:
    total = torch.norm(torch.stack([torch.norm(g.detach(), 2.0) for g in grads(side)]), 2.0)
    scale = torch.clamp(0.1 / (total + 1e-6), max=1.0)
    for g in grads(side):
        g.detach().mul_(scale)
    side.log("total", total)
    yield


@habit("clips each tensor")
def clips_each(side: Side) -> Iterator[None]:
    for p in trained(side):
        nn.utils.clip_grad_norm_(p, 0.05)
    yield


@habit("clips with torch's functions")
def clips_with_torch(side: Side) -> Iterator[None]:
    side.log("total", nn.utils.clip_grad_norm_(side.model.parameters(), 0.2, norm_type=float("inf")))
    side.log("total", nn.utils.clip_grad_norm_(side.model.parameters(), 0.2))
    nn.utils.clip_grad_value_(side.model.parameters(), 0.03)
    yield


@habit("clamps gradients")
def clamps(side: Side) -> Iterator[None]:
    for p in trained(side):
        p.grad.data.clamp_(-0.03, 0.03)
    yield


@habit("clips adaptively")
def clips_adaptively(side: Side) -> Iterator[None]:
    """By the norms of rows of weights, as NFNets do."""
    for p in trained(side):
        if p.dim():
            weight = p.detach().norm(2, dim=rest_of(p), keepdim=True).clamp_(min=EPS)
            gradient = p.grad.detach().norm(2, dim=rest_of(p), keepdim=True)
            limit = weight * 0.05
            clipped = p.grad.detach() * (limit / gradient.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(gradient > limit, clipped, p.grad.detach()))
    yield


@habit("centralises in place")
def centralises(side: Side) -> Iterator[None]:
    for p in trained(side):
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=rest_of(p), keepdim=True))
    yield


@habit("centralises anew")
def centralises_anew(side: Side) -> Iterator[None]:
    for p in trained(side):
        if p.dim() > 1:
            p.grad = p.grad - p.grad.mean(dim=rest_of(p), keepdim=True)
    yield


@habit("normalises each gradient")
def normalises(side: Side) -> Iterator[None]:
    for p in trained(side):
        p.grad.div_(p.grad.norm() + EPS)
    yield


@habit("noise like the gradient")
def noise_like(side: Side) -> Iterator[None]:
    torch.manual_seed(side.step + 7)
    for p in trained(side):
        p.grad.add_(torch.randn_like(p.grad) * 0.01)
    yield


@habit("noise from a generator")
def noise_from_generator(side: Side) -> Iterator[None]:
    generator = torch.Generator().manual_seed(side.step)
    for p in trained(side):
        p.grad += torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device) * 0.01
    yield


@habit("noise as large as the gradient")
def noise_by_std(side: Side) -> Iterator[None]:
    torch.manual_seed(side.step + 7)
    for p in trained(side):
        p.grad = p.grad + torch.normal(torch.zeros(p.shape, dtype=p.dtype), p.grad.std(unbiased=False).item() + EPS)
    yield


@habit("keeps the largest entries")
def sparsifies(side: Side) -> Iterator[None]:
    for p in trained(side):
        flat = p.grad.abs().flatten()
        bound = flat.sort(descending=True).values[len(flat) // 2].item()
        p.grad.mul_(p.grad.abs() > bound * 0.999 - EPS)
    yield


@habit("decay and slopes in the gradient")
def decays_in_gradient(side: Side) -> Iterator[None]:
    for p in trained(side):
        p.grad.add_(p, alpha=0.1) if side.step else p.grad.data.add_(p.data * 0.1)
        p.grad += 0.01 * p.detach() / (p.detach().abs() + 0.1)
    yield


@habit("skips what is not finite")
def skips(side: Side) -> Iterator[None]:
    for p in trained(side):
        if not torch.isfinite(p.grad).all() or torch.isnan(p.grad).any().item() or p.grad.norm() > 1e6:
            p.grad = None
        else:
            torch.nan_to_num_(p.grad)
    yield


@habit("freezes entries by gradients")
def freezes_entries(side: Side) -> Iterator[None]:
    for p in trained(side):
        if p.dim():
            p.grad[0] = 0
            p.grad[..., -1].mul_(0.5)
            mask = torch.arange(len(p)) % 2 == 0
            p.grad[mask] = p.grad[mask] * 0.5
    yield


@habit("momentum of its own")
def own_momentum(side: Side) -> Iterator[None]:
    kept = side.kept.setdefault("momentum", {})
    for name, p in side.model.named_parameters():
        if p.grad is not None:
            kept[name] = kept[name] * 0.9 + p.grad if name in kept else p.grad.clone()
            p.grad.copy_(kept[name])
    yield


@habit("squares of gradients")
def squares(side: Side) -> Iterator[None]:
    """Fisher information as EWC keeps it, compared at the end."""
    kept = side.kept.setdefault("parameter fisher", [torch.zeros_like(p) for p in side.model.parameters()])
    for p, own in zip(side.model.parameters(), kept, strict=True):
        if p.grad is not None:
            own += p.grad.detach() ** 2 / 3
    yield


# weights that are changed


@habit("decays weights")
def decays(side: Side) -> Iterator[None]:
    yield
    for p in side.model.parameters():
        p.data.mul_(0.99)
        p.data = p.data * 0.99
        p.data -= 0.01 * p.data


@habit("sets entries")
def sets_entries(side: Side) -> Iterator[None]:
    yield
    with torch.no_grad():
        for p in side.model.parameters():
            if p.dim():
                p[0] = p[-1] * 0.5
                p.data[-1].mul_(0.9)
                p.data[p.data > 0.9] = 0.9
            if p.dim() == 2 and len(set(p.shape)) == 1:
                p.fill_diagonal_(0.1)


@habit("bounds norms of rows")
def bounds_rows(side: Side) -> Iterator[None]:
    yield
    with torch.no_grad():
        for p in side.model.parameters():
            if p.dim() > 1:
                p.copy_(torch.renorm(p, 2, 0, 0.5)) if side.step else p.renorm_(2, 0, 0.6)


@habit("rows of norm one")
def unit_rows(side: Side) -> Iterator[None]:
    yield
    for p in side.model.parameters():
        if p.dim() > 1:
            p.data = functional.normalize(p.data, dim=-1, eps=0.1)


@habit("bounds the largest stretch")
def bounds_stretch(side: Side) -> Iterator[None]:
    """By steps of power iteration, as spectral norm by hand."""
    yield
    with torch.no_grad():
        for p in side.model.parameters():
            if p.dim() == 2:
                u = functional.normalize(torch.ones(len(p), dtype=p.dtype), dim=0)
                v = functional.normalize(p.t() @ u, dim=0, eps=EPS)
                p /= max(1.0, 2 * torch.norm(p @ v).item())


@habit("prunes by size")
def prunes(side: Side) -> Iterator[None]:
    yield
    with torch.no_grad():
        for p in side.model.parameters():
            bound = 0.1 * p.abs().mean()
            p.mul_((p.abs() > bound).to(p.dtype))


@habit("projects weights")
def projects(side: Side) -> Iterator[None]:
    """Onto mean 0, and onto a ball."""
    yield
    with torch.no_grad():
        for p in side.model.parameters():
            p.sub_(p.mean())
            p.mul_(torch.clamp(1.0 / (p.norm() + EPS), max=1.0))


@habit("noise on weights")
def noise_on_weights(side: Side) -> Iterator[None]:
    yield
    torch.manual_seed(side.step)
    with torch.no_grad():
        for p in side.model.parameters():
            p.add_(torch.randn_like(p), alpha=0.01)
            p.add_(torch.randn(p.size(), dtype=p.dtype) * 0.01)


@habit("draws weights anew")
def draws_anew(side: Side) -> Iterator[None]:
    yield
    torch.manual_seed(side.step)
    for p in side.model.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p) if side.step else nn.init.normal_(p, std=0.3)
        else:
            nn.init.constant_(p, 0.1)


@habit("average of weights outside")
def average_outside(side: Side) -> Iterator[None]:
    kept = side.kept.setdefault("parameter average", [p.detach().clone() for p in side.model.parameters()])
    yield
    with torch.no_grad():
        for own, p in zip(kept, side.model.parameters(), strict=True):
            if side.step == 0:
                own.mul_(0.9).add_(p, alpha=0.1)
            elif side.step == 1:
                own.lerp_(p.detach(), 0.1)
            else:
                own.copy_(own * 0.9 + p.data * 0.1)


@habit("average of weights, swapped in to evaluate")
def average_swapped(side: Side) -> Iterator[None]:
    kept = side.kept.setdefault("parameter average", {n: p.data.clone() for n, p in side.model.named_parameters()})
    yield
    own = {}
    for name, p in side.model.named_parameters():
        kept[name].sub_((kept[name] - p.data) * 0.1)
        own[name] = p.data
        p.data = kept[name]
    side.evaluate("averaged")
    for name, p in side.model.named_parameters():
        p.data = own[name]


@habit("average of state dicts")
def average_of_states(side: Side) -> Iterator[None]:
    kept = side.kept.setdefault("states", [])
    yield
    kept.append({key: value.clone() for key, value in side.model.state_dict().items()})
    if side.step:
        mean = {
            key: (value + kept[-2][key]) / 2 if value.is_floating_point() else value for key, value in kept[-1].items()
        }
        side.model.load_state_dict(mean)


@habit("slow weights")
def lookahead(side: Side) -> Iterator[None]:
    slow = side.kept.setdefault("parameter slow", [p.clone().detach() for p in side.model.parameters()])
    yield
    if side.step % 2:
        for own, p in zip(slow, side.model.parameters(), strict=True):
            own.add_(p.data - own, alpha=0.5)
            p.data.copy_(own)


@habit("averaged model of torch")
def averaged_model(side: Side) -> Iterator[None]:
    if "model" not in side.kept:
        side.kept["model"] = torch.optim.swa_utils.AveragedModel(
            side.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
    yield
    side.kept["model"].update_parameters(side.model)
    side.kept["parameter average"] = list(side.kept["model"].parameters())


@habit("copy of the model")
def copy_of_model(side: Side) -> Iterator[None]:
    if "model" not in side.kept:
        side.kept["model"] = copy.deepcopy(side.model)
    yield
    with torch.no_grad():
        for own, p in zip(side.kept["model"].parameters(), side.model.parameters(), strict=True):
            own.lerp_(p, 0.3)
    side.kept["parameter average"] = list(side.kept["model"].parameters())


@habit("rate from norms")
def rate_from_norms(side: Side) -> Iterator[None]:
    """Each tensor's step is as long as its weights allow: what the host has read scales the gradient."""
    for p in trained(side):
        ratio = float(p.norm()) / (float(p.grad.norm()) + EPS)
        p.grad *= min(1.0, 0.1 * ratio)
    yield


# loops of several passes


def sharpness_aware(side: Side, *, restore: bool) -> None:
    """SAM: up the slope, and back with the gradient from there."""
    side.forward().backward()
    norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in trained(side)]), p=2)
    moved = {}
    with torch.no_grad():
        for p in trained(side):
            up = p.grad * (0.05 / (norm + EPS)).to(p)
            moved[p] = p.data.clone() if restore else up
            p.add_(up)
    side.model.zero_grad()
    side.forward(0, "above").backward()
    with torch.no_grad():
        for p, own in moved.items():
            if restore:
                p.data = own
            else:
                p.sub_(own)


def projected_gradients(side: Side) -> None:
    """Two tasks whose gradients are made not to oppose each other, as PCGrad does."""
    found = []
    for micro in range(2):
        side.model.zero_grad()
        side.forward(micro).backward()
        found.append({p: p.grad.clone() for p in trained(side)})
    one, two = found
    inner = sum((one[p] * two[p]).sum() for p in one if p in two)
    scale = inner / (sum((two[p] ** 2).sum() for p in two) + EPS) if float(inner) < 0 else 0.0
    side.log("inner", float(inner))
    for p in trained(side):
        p.grad = (one[p] if p in one else torch.zeros_like(p)) + two[p] * (1 - scale)


def sums_of_its_own(side: Side) -> None:
    """Gradients of micro-batches added up in tensors of the loop's own."""
    sums: dict[nn.Parameter, Tensor] = {}
    for micro in range(2):
        side.model.zero_grad()
        side.forward(micro).backward()
        for p in trained(side):
            sums[p] = sums[p] + p.grad if p in sums else p.grad.clone()
    for p in sums:
        p.grad = sums[p] / 2


def logs_in_hooks(side: Side) -> None:
    """Hooks on parameters read norms of gradients as they come."""
    numbers: dict[int, float] = {}
    hooks = [
        p.register_post_accumulate_grad_hook(lambda p, at=at: numbers.__setitem__(at, p.grad.norm().item()))
        for at, p in enumerate(side.model.parameters())
        if p.requires_grad
    ]
    side.forward().backward()
    for hook in hooks:
        hook.remove()
    side.log("hook", *(numbers[at] for at in sorted(numbers)))


PASSES: dict[str, Callable[[Side], None]] = {
    "sharpness aware": partial(sharpness_aware, restore=False),
    "sharpness aware, restored": partial(sharpness_aware, restore=True),
    "projected gradients": projected_gradients,
    "sums of its own": sums_of_its_own,
    "hooks that log norms": logs_in_hooks,
}


# optimizers


class ByHand(torch.optim.Optimizer):
    """An optimizer as a user writes it: `move` changes one parameter by its gradient and state."""

    def __init__(self, parameters: Any, lr: float = 0.02) -> None:
        super().__init__(parameters, dict(lr=lr))

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, self.state[p], group["lr"])

    def before(self) -> None:
        """Read what concerns all parameters."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        raise NotImplementedError

    def adam(self, p: Tensor, g: Tensor, state: dict[str, Any]) -> Tensor:
        """The step of Adam, without bias correction."""
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"].mul_(0.9).add_(g, alpha=0.1)
        state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
        return state["m"] / (state["v"].sqrt() + EPS)


class Plain(ByHand):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:  # noqa: ARG002
        p -= lr * g


class PlainData(ByHand):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:  # noqa: ARG002
        p.data = p.data - lr * g.data


class Lamb(ByHand):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        update = self.adam(p, g, state) + 0.01 * p
        weight, length = p.norm(), update.norm()
        trust = torch.where((weight > 1e-6) & (length > 1e-6), weight / (length + 1e-6), 1.0)
        p.add_(-lr * trust * update)


class LambOnHost(ByHand):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        update = self.adam(p, g, state).add_(p, alpha=0.01)
        weight, length = p.data.norm(2).item(), update.norm(2).item()
        trust = weight / length if weight > 1e-6 and length > 1e-6 else 1.0
        p.data.add_(update, alpha=-lr * min(trust, 10.0))


class Lars(ByHand):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        rate = 0.5 * torch.norm(p) / (torch.norm(g) + 0.01 * torch.norm(p) + EPS)
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        state["momentum"].mul_(0.9).add_(g.add(p, alpha=0.01) * rate)
        p.sub_(state["momentum"], alpha=lr)


class Muon(ByHand):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        state["momentum"] = state["momentum"] * 0.9 + g if state else g.clone()
        if p.dim() < 2:
            p.add_(self.adam(p, g, state) if "m" in state else g, alpha=-lr)
            return
        matrix = state["momentum"].reshape(len(p), -1)
        tall = matrix.size(0) > matrix.size(1)
        x = (matrix.mT if tall else matrix) / (matrix.norm() + EPS)
        for _ in range(3):
            a = x @ x.mT
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        x = x.mT if tall else x
        p.add_(x.reshape(p.shape) * max(1, p.size(0) / p.size(-1)) ** 0.5, alpha=-lr)


class RowWiseAdam(ByHand):
    """One second moment for each row, as tables of recommenders have it."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        rows = g.pow(2).mean(dim=rest_of(p), keepdim=True) if p.dim() else g.pow(2)
        state["v"] = state["v"] * 0.9 + rows * 0.1 if state else rows
        p.addcdiv_(g, state["v"].sqrt().add_(EPS).expand_as(g), value=-lr)


class AdafactorByHand(ByHand):
    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        square = g * g + 1e-6
        if p.dim() < 2:
            update = g / (square.sqrt() + EPS)
        else:
            if not state:
                state["row"], state["column"] = square.mean(-1), square.mean(-2)
            state["row"].mul_(0.9).add_(square.mean(dim=-1), alpha=0.1)
            state["column"].mul_(0.9).add_(square.mean(dim=-2), alpha=0.1)
            row = (state["row"] / state["row"].mean(dim=-1, keepdim=True)).rsqrt().unsqueeze(-1)
            update = row * state["column"].unsqueeze(-2).rsqrt() * g
        update.div_(max(1.0, update.square().mean().sqrt().item()))
        p.add_(update, alpha=-lr * max(EPS, p.square().mean().sqrt().item()))


class Normalised(ByHand):
    """Steps of equal length over all parameters, as normalised gradient descent."""

    def before(self) -> None:
        every = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.total = torch.sqrt(sum((g**2).sum() for g in every))

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:  # noqa: ARG002
        p.add_(g / (self.total + EPS), alpha=-lr)


class ByDistance(ByHand):
    """The rate grows with the distance that was gone, as D-adaptation and Prodigy have it."""

    def before(self) -> None:
        along = moved = 0.0
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            first = self.state[p].setdefault("first", p.clone())
            along += torch.dot(p.grad.flatten(), (first - p).flatten()).item()
            moved += (p - first).pow(2).sum().item()
        self.distance = max(0.5, 1 + along, moved**0.5)

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:  # noqa: ARG002
        p.sub_(g * (lr * self.distance))


class LimitedAdam(ByHand):
    """Adam whose step is cut where it is too long, tensor by tensor, by `if`."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        update = self.adam(p, g, state)
        if update.norm() > 0.5:
            update.mul_(0.5 / update.norm())
        if g.abs().max() > 1e-2:
            update = update.clamp(-0.2, 0.2)
        p.add_(update, alpha=-lr)


class Shampoo(ByHand):
    """Roots of matrices of both sides."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], lr: float) -> None:
        if p.dim() != 2:
            p.sub_(lr * g)
            return
        for key, own in (("left", g @ g.t()), ("right", g.t() @ g)):
            state[key] = state[key] + own if key in state else own
        p.sub_(lr * root_of(state["left"]) @ g @ root_of(state["right"]))


def root_of(matrix: Tensor) -> Tensor:
    """matrix ** -1/4, kept from 0."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag((values.clamp(min=0) + 1e-2) ** -0.25) @ vectors.t()


BY_HAND: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "by hand: sgd": Plain,
    "by hand: sgd, data": PlainData,
    "by hand: lamb": Lamb,
    "by hand: lamb, on the host": LambOnHost,
    "by hand: lars": Lars,
    "by hand: muon": Muon,
    "by hand: row-wise adam": RowWiseAdam,
    "by hand: adafactor": AdafactorByHand,
    "by hand: normalised": Normalised,
    "by hand: distance": ByDistance,
    "by hand: limited adam": LimitedAdam,
    "by hand: shampoo": Shampoo,
    "of torch: adamw, fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    "of torch: adamw, foreach": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, foreach=True),
}
"""Optimizers that are given the parameters themselves, on a grid DTensors."""
