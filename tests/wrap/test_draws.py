"""Models that draw random numbers in forward train by DDP's rule, and are refused if their rows need each other.

Each way is a loss of a module `m` (layers a: 6 -> 8, b: 8 -> 6) and its input [rows, 6]. `m.drawn` notes the numbers,
so that one process can compute with the same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold.grid import Shape
from fourfold.wrap import whole_tensors
from fourfold.wrap.grid_tensor import to_whole
from harness import grid_of
from share import share

TOLERANCE = 1e-9
ROWS = 8


class Model(nn.Module):
    def __init__(self, way: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.way = nn.Linear(6, 8), nn.Linear(8, 6), way
        self.own = torch.Generator().manual_seed(3)
        self.numpy, self.python = np.random.default_rng(3), random.Random(3)
        self.rnn = nn.LSTM(6, 5, num_layers=2, dropout=0.5)
        self.noted: list[Tensor] = []
        self.given: list[Tensor] = []

    def drawn(self, draw: Callable[[], Any]) -> Tensor:
        """What was drawn, or what was given instead."""
        if self.given:
            return self.given.pop(0)
        numbers = torch.as_tensor(draw()).detach()
        self.noted.append(to_whole(numbers))
        return numbers

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


# rows get the same numbers alone and together


def vae(m: Any, x: Tensor) -> Tensor:
    mean, log_variance = m.a(x).chunk(2, -1)
    noise = m.drawn(lambda: torch.randn_like(mean))
    z = mean + (0.5 * log_variance).exp() * noise
    kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
    return (m.b(z.repeat(1, 2)) - x).square().mean() + 0.1 * kl


def sampled(m: Any, x: Tensor) -> Tensor:
    mean, scale = m.a(x).chunk(2, -1)
    z = m.drawn(lambda: torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean)).rsample())
    return m.b((mean + functional.softplus(scale) * z).repeat(1, 2)).square().mean()


def diffusion(m: Any, x: Tensor) -> Tensor:
    steps = m.drawn(lambda: torch.randint(0, 10, (len(x),)))
    noise = m.drawn(lambda: torch.randn(x.shape, dtype=x.dtype))
    kept = (1 - steps / 10)[:, None].to(x)
    return functional.mse_loss(m.b(m.a(kept * x + (1 - kept) * noise).tanh()), noise)


def drop_path(m: Any, x: Tensor) -> Tensor:
    kept = m.drawn(lambda: x.new_empty(len(x), 1).bernoulli_(0.6))
    return (x + m.b(m.a(x).tanh()) * kept / 0.6).square().sum(-1).mean()


def masked(m: Any, x: Tensor) -> Tensor:
    order = m.drawn(lambda: torch.rand(len(x), 6)).argsort(dim=1)
    kept = torch.zeros_like(x).scatter(1, order[:, :2], 1.0)
    return ((m.b(m.a(x * kept)) - x).square() * (1 - kept)).sum() / (1 - kept).sum()


def chosen(m: Any, x: Tensor) -> Tensor:
    noise = m.drawn(lambda: -torch.empty_like(x).exponential_().log())
    return (m.b(m.a(x)) + noise).softmax(-1).square().sum(-1).mean()


def of_probabilities(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    return (m.b(h.tanh()) * m.drawn(lambda: torch.bernoulli(m.b(h.detach()).sigmoid()))).square().mean()


def own_generator(m: Any, x: Tensor) -> Tensor:
    noise = m.drawn(lambda: torch.randn(x.shape, generator=m.own, dtype=x.dtype))
    return m.b(m.a(x + noise)).square().mean()


def seeded_inside(m: Any, x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return m.b(m.a(x + m.drawn(lambda: torch.randn_like(x)))).square().mean()


def one_for_all(m: Any, x: Tensor) -> Tensor:
    scale = m.drawn(lambda: torch.tensor(random.random() + np.random.rand() + m.python.random(), dtype=x.dtype))
    return m.b(m.a(x) * scale).square().mean()


def recurrent(m: Any, x: Tensor) -> Tensor:
    return m.rnn(x.expand(3, *x.shape))[0].square().mean()


MATCHED = (
    vae,
    sampled,
    diffusion,
    drop_path,
    masked,
    chosen,
    of_probabilities,
    own_generator,
    seeded_inside,
    one_for_all,
)


# they cannot get the same numbers


def numpy_by_row(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x + m.drawn(lambda: torch.as_tensor(np.random.randn(*x.shape))))).square().mean()


def own_numpy_by_row(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x * m.drawn(lambda: torch.as_tensor(m.numpy.random((len(x), 1)))))).square().mean()


def python_by_row(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x * m.drawn(lambda: torch.tensor([[random.random()] for _ in x]).to(x)))).square().mean()


def row_by_row(m: Any, x: Tensor) -> Tensor:
    noise = m.drawn(lambda: torch.stack([torch.randn(6, dtype=x.dtype) for _ in range(len(x))]))
    return m.b(m.a(x + noise)).square().mean()


def mixed_up(m: Any, x: Tensor) -> Tensor:
    order = m.drawn(lambda: torch.randperm(len(x)))
    return m.b(m.a(0.7 * x + 0.3 * x[order])).square().mean()


BY_CHANCE = (numpy_by_row, own_numpy_by_row, python_by_row, row_by_row, mixed_up)


# rows need each other


def centred_vae(m: Any, x: Tensor) -> Tensor:
    return vae(m, x - x.mean(0))


def contrastive_of_masked(m: Any, x: Tensor) -> Tensor:
    kept = m.drawn(lambda: torch.rand(len(x), 6)) < 0.7
    u = functional.normalize(m.b(m.a(x * kept)), dim=-1)
    return -(u @ u.t() * 5).log_softmax(-1).diagonal().mean()


def contrastive_with_own_generator(m: Any, x: Tensor) -> Tensor:
    u = m.b(m.a(x + m.drawn(lambda: torch.randn(x.shape, generator=m.own, dtype=x.dtype))))
    return functional.cross_entropy(u @ u.t(), torch.arange(len(u)))


def probabilities_of_the_batch(m: Any, x: Tensor) -> Tensor:
    h = m.b(m.a(x))
    drawn = m.drawn(lambda: torch.bernoulli((5 * (h.detach() - h.detach().mean(0))).sigmoid()))
    return (h * drawn).square().mean()


def root_of_diffusion(m: Any, x: Tensor) -> Tensor:
    return diffusion(m, x) + m.b(m.a(x)).square().mean().sqrt()


NEEDY = (
    *(centred_vae, contrastive_of_masked, contrastive_with_own_generator),
    *(probabilities_of_the_batch, root_of_diffusion),
)
WAYS = {way.__name__: way for way in (*MATCHED, recurrent, *BY_CHANCE, *NEEDY)}


def build(way: Callable) -> Model:
    torch.manual_seed(0)
    return Model(way).double()


def rows_of(step: int) -> Tensor:
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(name: str, shape: Shape) -> dict[str, Any]:
    """Two steps on the grid, then with the same numbers on one process: each place's rows, averaged."""
    grid, one = grid_of(shape), build(WAYS[name])
    model = ff.parallelize(build(WAYS[name]), grid)
    try:
        for step in range(2):
            model(ff.local_rows(rows_of(step), grid)).backward()
    except RuntimeError as error:
        return dict(said=str(error))
    one.given = [noted.clone() for noted in model.noted]
    for step in range(2):
        one(ff.local_rows(rows_of(step), grid)).backward()
    error, gradients = 0.0, whole_tensors(model, "gradient")
    for own, parameter in one.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(expected)
        error = max(error, (gradients[own] - expected / shape.world).abs().max().item())
    unchecked = next((line for line in ff.explain(model).splitlines() if "be checked" in line), "")
    return dict(error=error, unchecked=unchecked)


def all_of(shape: Shape) -> dict[str, dict[str, Any]]:
    return {name: train(name, shape) for name in WAYS}


@pytest.mark.parametrize("shape", share([Shape(z=2), Shape(data=2), Shape(x=2, z=2)], 2), ids=str)
def test_random_numbers_in_forward(ranks, shape: Shape) -> None:
    for by_name in ranks(shape.world).run(all_of, shape, timeout=120):
        wrong = {}
        for name, found in by_name.items():
            said = found.get("said", "")
            if WAYS[name] in NEEDY:
                right = "ff.whole_batch(tensor)" in said
            else:
                chance = WAYS[name] in BY_CHANCE
                right = not said and ("draws random numbers" in found["unchecked"]) == chance
                right = right and (name == "recurrent" or found["error"] < TOLERANCE)
            if not right:
                wrong[name] = found
        assert not wrong, wrong
