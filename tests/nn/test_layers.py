"""Layers beside plain torch: what parity of whole models does not single out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fourfold as ff
import plain
from fourfold.grad_norm import grad_norm
from fourfold.grid import Grid, Shape
from fourfold.layout import Init, inner, rest
from fourfold.nn.layer import specs_of
from fourfold.params import local_of
from fourfold.policy import Policy
from harness import grid_of, join_shards

GRID = Shape(x=2, y=2)
INIT = Init(std=0.02)


def logits(shape: Shape, config: ff.models.ModelConfig, mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    grid = grid_of(shape)
    model = ff.models.build(config, grid, policy=Policy(activations=mode), dtype=torch.float64, seed=5)
    found = model(torch.arange(14).view(2, 7))
    found.square().sum().backward()
    specs = specs_of(model)
    gradients = {name: join_shards(p.grad._local_tensor, specs[name], grid) for name, p in model.named_parameters()}
    return found.detach(), gradients


@pytest.mark.slow
def test_logits_are_whole_and_their_gradient_counts_once(ranks) -> None:
    for mode in ("sharded", "replicated"):
        config = ff.models.config("gpt-tiny", vocab=53, seq=8)
        ranks(4).start(logits, GRID, config, mode)
        model = plain.make(config, seed=5)
        expected = model.logits(model.hidden(torch.arange(14).view(2, 7)))
        expected.square().sum().backward()
        for found, gradients in ranks(4).results():
            torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-10, atol=1e-12)


def norms(kind: str) -> tuple[Tensor, Tensor]:
    """A norm of features with a large mean, cut over y=4."""
    grid = grid_of(Shape(y=4))
    norm = ff.nn.Norm(grid, Policy(), 8, kind=kind)
    ff.nn.assemble(norm, grid, Policy(), dtype=torch.float32)
    a = features().chunk(4, dim=1)[grid.coords["y"]].clone().requires_grad_()
    out = norm(a)
    (out * torch.arange(2.0 * grid.coords["y"], 2.0 * grid.coords["y"] + 2)).sum().backward()
    return out.detach(), a.grad


def features() -> Tensor:
    return 1e4 + torch.arange(24.0).view(3, 8) ** 2 / 10


def test_norm_statistics_cover_the_whole_feature_dim_without_cancellation(ranks) -> None:
    for kind in ("layer", "rms"):
        found = ranks(4).run(norms, kind)
        a = features().double().requires_grad_()
        mean = a.mean(-1, keepdim=True) if kind == "layer" else 0
        expected = (a - mean) * torch.rsqrt((a - mean).square().mean(-1, keepdim=True) + 1e-5)
        (expected * torch.arange(8.0)).sum().backward()
        out, gradient = (torch.cat(parts, dim=1).double() for parts in zip(*found, strict=True))
        # fp32 holds 1e4 to 1e-3; E[x^2] - E[x]^2 would be off by 1e8 * 1e-7 = 10
        torch.testing.assert_close(out, expected.detach(), rtol=0, atol=2e-3)
        torch.testing.assert_close(gradient, a.grad, rtol=1e-2, atol=1e-3)


def masks(shape: Shape, mode: str) -> dict:
    grid = grid_of(shape)
    policy = Policy(activations=mode)
    dropout = ff.nn.Dropout(grid, policy, 0.5)
    ff.nn.assemble(dropout, grid, policy, seed=3)
    clock = dropout.clock
    draws = []
    for step, micro_step in [(0, 0), (0, 0), (0, 1), (1, 0)]:
        clock.begin_step(step)
        for _ in range(micro_step):
            clock.advance()
        draws.append(dropout(torch.ones(64)))
    state = torch.get_rng_state()
    dropout(torch.ones(64))
    config = ff.models.config("gpt-tiny", dropout=0.2)
    model = ff.models.build(config, grid, policy=policy, seed=3)
    loss = model(torch.arange(16).view(1, 16), torch.arange(16).view(1, 16))
    loss.backward()
    return {
        "draws": draws,
        "untouched": torch.equal(state, torch.get_rng_state()),
        "coords": grid.coords,
        "loss": loss.item(),
        "norm": model.norm.weight.grad._local_tensor,
        "q": model.layers[0].attention.q.weight.grad._local_tensor,
    }


def test_dropout_is_independent_where_cut_and_equal_where_replicated(ranks) -> None:
    for mode in ("sharded", "replicated"):
        found = ranks(4).run(masks, GRID, mode)
        for a in found:
            same_time, next_micro, next_step = a["draws"][1:]
            assert torch.equal(a["draws"][0], same_time)
            assert not torch.equal(same_time, next_micro)
            assert not torch.equal(same_time, next_step)
            assert a["untouched"]  # the user's own random numbers go on as if nothing had happened
            for b in found:
                equal = all(a["coords"][axis] == b["coords"][axis] for axis in rest(mode).axes)
                assert torch.equal(a["draws"][0], b["draws"][0]) == equal
                assert a["loss"] == b["loss"]
                if a["coords"]["y"] == b["coords"]["y"]:
                    assert torch.equal(a["norm"], b["norm"])


def attention_masks(mode: str) -> tuple[dict, Tensor]:
    """Dropout of attention alone: V is the identity, so the output shows which probabilities were dropped."""
    grid = grid_of(GRID)
    policy = Policy(activations=mode)
    attention = ff.nn.Attention(
        grid, policy, 8, heads=4, kv_heads=4, head_dim=8, bias=False, dropout=0.5, init=INIT, out_init=INIT
    )
    ff.nn.assemble(attention, grid, policy)
    q = torch.zeros(1, 8, 1, 8)
    return grid.coords, attention._mix(ff.nn.Batch(1, 8), q, q, torch.eye(8).view(1, 8, 1, 8))


def test_attention_dropout_follows_the_cut_of_heads(ranks) -> None:
    for mode in ("sharded", "replicated"):
        found = ranks(4).run(attention_masks, mode)
        for here, a in found:
            for there, b in found:
                equal = all(here[axis] == there[axis] for axis in inner(mode).axes)
                assert torch.equal(a, b) == equal


def means() -> list[float]:
    grid = grid_of(Shape(z=2, data=2))
    place = grid.coords["data"] * 2 + grid.coords["z"]
    own = torch.arange(1.0, place + 2, dtype=torch.float64, requires_grad=True)  # place p has p + 1 values
    loss = ff.global_mean(own.mean(), len(own), grid)
    loss.backward()
    count = ff.count_targets(torch.tensor([-100] * 3 + [1] * place), grid)
    return [loss.item(), *own.grad.tolist(), count.item()]


def test_global_mean_is_the_mean_over_all_places(ranks) -> None:
    values = [float(value) for place in range(4) for value in range(1, place + 2)]
    for loss, *gradient, count in ranks(4).run(means):
        assert abs(loss - sum(values) / len(values)) < 1e-12
        # each place has its own share times the number of places: gradients are averaged over them (E6)
        assert all(abs(share - 4 / len(values)) < 1e-12 for share in gradient)
        assert count == 0 + 1 + 2 + 3


def masked() -> tuple[float, float]:
    grid = grid_of(GRID)
    model = ff.models.build("gpt-tiny", grid)
    tokens = torch.arange(8).view(1, 8)
    loss = model(tokens, torch.full_like(tokens, -100))
    loss.backward()
    return loss.item(), grad_norm(model.parameters()).item()


def test_a_batch_without_targets_has_no_loss_and_no_gradient(ranks) -> None:
    assert ranks(4).run(masked) == [(0.0, 0.0)] * 4


def test_a_second_derivative_is_refused_not_wrong() -> None:
    grid = grid_of(Shape())
    mlp = ff.nn.MLP(grid, Policy(), 8, 16, kind="gelu", bias=True, init=INIT, out_init=INIT)
    ff.nn.assemble(mlp, grid, Policy())
    a = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True: gradients of gradients"):
        torch.autograd.grad(mlp(a, 4).sum(), a, create_graph=True)
    with pytest.raises(ValueError, match="9 tokens of a place are 9 rows"):
        mlp(a, 9)


def test_initial_weights_do_not_depend_on_defaults() -> None:
    first = ff.models.build("gpt-tiny", grid_of(Shape()))
    torch.set_default_dtype(torch.float64)
    try:
        second = ff.models.build("gpt-tiny", grid_of(Shape()))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(first.embedding.weight._local_tensor, second.embedding.weight._local_tensor)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_in_one_memory_count_their_changes_apart(device: str) -> None:
    """What is gathered ahead is gathered again when its weight has changed, and not when a neighbour has."""
    grid = Grid.alone("cpu")
    model = ff.models.build("llama-tiny", grid, device=torch.device(device))
    gate, up = (local_of(getattr(model.layers[0].mlp, name).weight) for name in ("gate", "up"))
    before = gate._version, up._version
    gate.add_(1)
    assert (gate._version, up._version) == (before[0] + 1, before[1])
