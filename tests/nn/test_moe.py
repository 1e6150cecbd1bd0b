"""Mixtures of experts: equal to one process on every grid, with the losses of their routers, and refused where they do
not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
import fourfold as ff
from fourfold.nn.dispatch import Pairs
from fourfold.nn.router import Routing
from fourfold.policy import Overlap, Policy
from fourfold.shape import Shape
from harness import grid_of
from mixtures import expected, mixture, step_on
from parity import Case, Options, errors, on_one_process, on_ranks
from share import others_slow

HALVES = Overlap(halves=2)
CASES = [
    *(
        Case(shape, mode, Options(experts=True, **options))
        for shape, mode, options in (
            (Shape(x=2, y=2), "sharded", dict(keep_gathered=True, keep_weights=True)),
            (Shape(x=2, z=2), "sharded", dict(halves=True)),
            (Shape(y=2, z=2), "replicated", dict(accumulate=True, masked=True)),
            (Shape(x=4), "sharded", dict(odd_tokens=True)),  # 7 tokens on 4 ranks
            (Shape(x=2, data=2), "replicated", {}),
            (Shape(z=4), "sharded", dict(qk_norm=True)),  # 5 experts over 4 ranks
            (Shape(x=2, y=2, z=2), "sharded", dict(few_kv_heads=True)),
            (Shape(x=3, data=2), "sharded", {}),
            (Shape(y=4), "replicated", {}),
        )
    )
]


@pytest.mark.parametrize("case", others_slow(CASES, 4), ids=str)
def test_a_mixture_on_a_grid_equals_one_process(ranks, case: Case) -> None:
    pool = ranks(case.shape.world)
    pool.start(on_ranks, case)
    one = on_one_process(case)
    found = errors(case, one, pool.results())
    assert {kind: error for kind, error in found.items() if error > 1e-10} == {}


# --- with everything that cuts the work of a step


STEPS: list[tuple[Shape, dict[str, Any], int]] = [
    (Shape(x=2, y=2), {}, 2),
    (Shape(x=2, z=2), dict(overlap=HALVES, recompute="block"), 1),
    (Shape(x=2, pipe=2), dict(schedule="zb-h1"), 4),
    (Shape(y=2, z=2), dict(activations="replicated"), 1),
    (Shape(z=2, data=2), dict(recompute="attention"), 2),
    (Shape(z=2, pipe=2), dict(gather_weights="step"), 2),
    (Shape(x=4), {}, 1),
    (Shape(y=2, pipe=2), {}, 1),
]


@pytest.mark.parametrize("score", others_slow(["softmax", "sigmoid"], 2))
def test_the_losses_of_routers_have_the_gradients_of_their_definition(ranks, score: str) -> None:
    config = mixture(aux=0.5, z_loss=0.1, score=score, tied=False)
    loss, gradients = expected(config)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for shape, policy, micro_steps in STEPS[:3] if score == "softmax" else STEPS[3:]:
        for found, grads, load in ranks(4).run(step_on, shape, policy, micro_steps, config):
            assert abs(found - loss) < 1e-12, shape
            worst = max(float((grads[name] - gradients[name]).abs().max()) for name in grads)
            assert worst / scale < 1e-12, shape
            assert [sum(layer) for layer in load] == [8 * 12 * config.top_k] * 2


@pytest.mark.parametrize("shape", others_slow([Shape(z=2, context=2), Shape(x=2, data=2, context=2)], 2), ids=str)
def test_a_mixture_runs_on_parts_of_sequences(ranks, shape: Shape) -> None:
    config = mixture(shared_hidden=24, dense_layers=1)
    loss, gradients, _ = step_on(Shape(), {}, 1, config)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for found, grads, _ in ranks(shape.world).run(step_on, shape, {}, 1, config):
        assert abs(found - loss) < 1e-12
        assert max(float((grads[name] - gradients[name]).abs().max()) for name in grads) / scale < 1e-12


# --- choices


def test_equal_scores_choose_the_lower_expert() -> None:
    scores, ids = Routing(4, 2).choose(torch.tensor([[1.0, 2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]]))
    assert ids.tolist() == [[1, 2], [0, 1]]
    assert scores.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_scores_that_are_not_normalized_stay_as_they_are() -> None:
    scores, ids = Routing(3, 2, "sigmoid", normalized=False).choose(torch.tensor([[0.0, 3.0, -1.0]]))
    assert ids.tolist() == [[1, 0]]
    torch.testing.assert_close(scores, torch.tensor([[3.0, 0.0]]).sigmoid())


def test_pairs_are_sorted_by_expert_and_come_back() -> None:
    pairs = Pairs(torch.tensor([[2, 0], [1, 0], [2, 1]]), 4)
    assert pairs.tokens.tolist() == [0, 1, 1, 2, 0, 2]  # experts 0 0 1 1 2 2
    assert pairs.groups.ends.tolist() == [2, 4, 6, 6]  # nobody chose expert 3
    rows = torch.arange(3.0)[:, None]
    assert pairs.combine(pairs.pick(rows)).tolist() == [[0.0], [2.0], [4.0]]


# --- sizes, checkpoints, and what is refused


def test_published_sizes_have_their_parameters() -> None:
    for name, parameters, active in (
        ("mixtral-8x7b", 46.7e9, 12.9e9),
        ("mixtral-8x22b", 140.6e9, 39.2e9),
        ("qwen3-30b-a3b", 30.5e9, 3.35e9),
    ):
        config = ff.models.config(name)
        assert config.parameters == pytest.approx(parameters, rel=2e-3)
        assert config.active_parameters == pytest.approx(active, rel=2e-3)
    model = ff.models.build("moe-tiny", grid_of(Shape()))
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.parameters


@pytest.mark.slow
def test_a_checkpoint_of_a_mixture_loads_on_other_grids(ranks, tmp_path: Path) -> None:
    saved = ranks(4).run(checkpoints.trained, tmp_path, "moe-tiny", Shape(x=2, z=2), False, 4, 3)[0]
    folder = next(path for path in sorted(tmp_path.iterdir()) if path.is_dir())
    biases = [name for name in saved["saved"] if name.endswith("mlp.router.bias")]
    assert len(biases) == 2
    assert all(saved["saved"][name].any() for name in biases)
    for shape, sharded in ((Shape(y=2, data=2), True), (Shape(z=4), False), (Shape(x=2, pipe=2), False)):
        again = ranks(4).run(checkpoints.resumed, folder, "moe-tiny", shape, sharded, 4)[0]
        assert again["losses"][-1] == pytest.approx(saved["losses"][-1], abs=1e-12)
        assert all(torch.equal(again["loaded"][name], saved["saved"][name]) for name in biases)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(expert_hidden=0), "experts=5 needs expert_hidden"),
        (dict(top_k=6), "top_k=6 must be at most experts=5"),
        (dict(dense_layers=2), "dense_layers=2 of layers=2 leaves no block"),
        (dict(bias=True), "experts are gated and have no biases"),
        (dict(experts=0), "expert_hidden=24 is for a mixture of experts; give experts as well"),
        (dict(aux=-1.0), "aux=-1.0 must be a finite number of at least 0"),
        (dict(capacity=-0.5), "capacity=-0.5 must be a finite number of at least 0"),
        (dict(bias_rate=float("inf")), "bias_rate=inf must be a finite number of at least 0"),
        (dict(route_scale=0.0), "route_scale=0.0 must be a number above 0"),
        (dict(groups=2), "groups=2 must divide experts=5"),
        (dict(experts=6, groups=2, top_groups=3), "top_groups=3 must be at most groups"),
        (dict(experts=6, groups=6), "groups=6 of experts=6 have one expert each.*use at most 3 groups"),
        (dict(experts=6, groups=3, top_k=3), "top_k=3 must be at most 2, the number of experts in top_groups=1"),
        (dict(moe_reads="previous"), "moe_reads='previous' with shared_hidden=0: .*give shared_hidden"),
        (dict(experts=0, expert_hidden=0, capacity=1.0), "capacity=1.0 is for a mixture of experts"),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(**changes)


def test_chunks_of_an_mlp_are_refused() -> None:
    with pytest.raises(ValueError, match="mlp_chunk=4: experts run on all tokens"):
        ff.models.build(mixture(), grid_of(Shape()), policy=Policy(mlp_chunk=4))


def odd_width() -> str:
    with pytest.raises(ValueError, match=r"expert_hidden=25 is not divisible by x\*y=2\*1") as refused:
        ff.models.build(mixture(expert_hidden=25), grid_of(Shape(x=2)))
    return str(refused.value)


def test_grids_that_do_not_fit_are_refused_with_those_that_do(ranks) -> None:
    assert "grids of 2 ranks that fit" in ranks(2).run(odd_width)[0]
