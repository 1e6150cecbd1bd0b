"""Experts on a folded grid: tokens travel to them, and everything equals one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import checkpoints
import fourfold as ff
from fourfold import comm
from fourfold.layout import chunk
from fourfold.models.generate import generate
from fourfold.nn.dispatch import Dispatch, PackRows, Pairs, _bits, _columns, write_choices
from fourfold.nn.layer import specs_of
from fourfold.nn.router import Routing
from fourfold.params import local_of
from fourfold.policy import Overlap, Policy
from fourfold.shape import Shape
from harness import RankFailed, grid_of, join_shards
from mixtures import batch, expected, mixture, packed, packed_errors, packed_step, step_on
from parity import Case, Options, errors, on_one_process, on_ranks
from share import others_slow

CASES = [
    Case(shape, mode, Options(experts=True, **options))
    for shape, mode, options in (
        (Shape(z=2, expert=2), "sharded", {}),
        (Shape(z=4, expert=2, ez=2), "sharded", dict(halves=True)),
        (Shape(x=2, z=2, expert=4), "sharded", dict(odd_tokens=True)),
        (Shape(x=2, z=2, ex=2, ez=2), "sharded", dict(few_kv_heads=True)),
        (Shape(x=2, data=2, expert=2), "replicated", dict(odd_tokens=True)),
        (Shape(y=2, z=2, expert=2), "sharded", dict(keep_gathered=True, keep_weights=True)),
        (Shape(z=4, ez=4), "sharded", dict(masked=True)),
        (Shape(x=2, y=2, z=2, expert=2, ex=2), "sharded", dict(halves=True, accumulate=True)),
        (Shape(data=4, expert=4), "sharded", dict(odd_tokens=True)),
        (Shape(x=4, expert=2, ex=2), "replicated", {}),
        (Shape(y=2, z=2, data=2, expert=2, ez=2), "replicated", dict(accumulate=True)),
        (Shape(z=4, data=2, expert=2, ex=2, ez=2), "sharded", dict(qk_norm=True)),
    )
]


@pytest.mark.parametrize("case", others_slow(CASES, 3), ids=str)
def test_a_mixture_on_a_fold_equals_one_process(ranks, case: Case) -> None:
    pool = ranks(case.shape.world)
    pool.start(on_ranks, case)
    one = on_one_process(case)
    found = errors(case, one, pool.results())
    assert {kind: error for kind, error in found.items() if error > 1e-10} == {}


def test_the_fold_numbers_ranks_as_the_design_says() -> None:
    shape = Shape(x=2, z=4, data=2, pipe=2, context=4, expert=4, ez=2)
    assert shape.world == 32
    assert shape.coords(13) == dict(x=1, y=0, z=2, data=1, pipe=0)
    assert (shape.place(13), shape.row_place(13), shape.member(13)) == (6, 1, 2)
    assert shape.fold_coords(13) == dict(expert=1, ex=0, ez=1, edata=1)
    assert shape.edata == 2
    assert [shape.strides(axis) for axis in ("expert", "ez", "edata")] == [[(1, 4)], [(4, 2)], [(8, 2)]]


@pytest.mark.parametrize(
    "shape",
    [
        Shape(x=3, y=2, z=2, data=2, pipe=2, expert=3, ex=2),
        Shape(x=2, y=2, z=2, expert=2, ez=2, order=("z", "y", "x", "data")),
        Shape(x=2, z=3, data=2, expert=6, order=("x", "pipe", "z", "y", "data")),
    ],
    ids=str,
)
def test_every_rank_has_one_place_in_a_fold(shape: Shape) -> None:
    mesh = shape.fold_mesh_ranks()
    assert sorted(mesh.flatten().tolist()) == list(range(shape.world))
    for rank in range(shape.world):
        here = {**shape.coords(rank), **shape.fold_coords(rank)}
        assert shape.rank_in_fold(here) == rank
        for axis in ("expert", "ex", "ez", "edata"):
            group = shape.ranks_along(axis, rank)
            assert group[here[axis]] == rank
            assert len({(shape.coords(one)["y"], shape.coords(one)["pipe"]) for one in group}) == 1


# --- with everything that cuts the work of a step

STEPS: list[tuple[Shape, dict[str, Any], int]] = [
    (Shape(x=2, z=2, expert=2, ez=2), dict(overlap=Overlap(halves=2), recompute="block"), 1),
    (Shape(data=4, expert=4), dict(overlap=Overlap(halves=2), recompute="block"), 1),
    (Shape(z=4, expert=2, ex=2), dict(overlap=Overlap(halves=2), recompute="block", offload=True), 1),
    (Shape(z=2, pipe=2, expert=2), dict(schedule="zb-h1"), 4),
    (Shape(y=2, z=2, expert=2), dict(activations="replicated"), 1),
    (Shape(z=2, data=2, expert=4), dict(recompute="attention"), 2),
    (Shape(x=2, pipe=2, ex=2), dict(gather_weights="step"), 2),
    (Shape(data=4, expert=2, ez=2), dict(keep_weights=True), 2),
    (Shape(x=4, expert=4), {}, 1),
]


@pytest.mark.parametrize("step", others_slow(STEPS, 6), ids=lambda step: str(step[0]))
def test_a_step_on_a_fold_has_the_losses_and_gradients_of_their_definition(ranks, step) -> None:
    config = mixture(aux=0.5, z_loss=0.1, tied=False, shared_hidden=24)
    loss, gradients = expected(config)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for found, grads, load in ranks(4).run(step_on, *step, config):
        assert abs(found - loss) < 1e-12
        worst = max(float((grads[name] - gradients[name]).abs().max()) for name in grads)
        assert worst / scale < 1e-12
        assert [sum(layer) for layer in load] == [8 * 12 * config.top_k] * 2


@pytest.mark.parametrize(
    "shape", others_slow([Shape(z=2, context=2, expert=2), Shape(z=4, context=4, ez=2, expert=2)], 2)
)
def test_a_fold_may_lie_over_a_context_group(ranks, shape: Shape) -> None:
    config = mixture(dense_layers=1)
    loss, gradients, _ = step_on(Shape(), {}, 1, config)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for found, grads, _ in ranks(shape.world).run(step_on, shape, {}, 1, config):
        assert abs(found - loss) < 1e-12
        assert max(float((grads[name] - gradients[name]).abs().max()) for name in grads) / scale < 1e-12


ROUTINGS: list[tuple[Shape, dict[str, Any], dict[str, Any]]] = [
    (Shape(x=2, z=2, expert=4), dict(capacity=0.8), {}),
    (Shape(x=2, z=2, expert=2), dict(moe_reads="previous", shared_hidden=24), dict(recompute="block")),
    (Shape(x=4, expert=2, ex=2), dict(capacity=1.0), dict(activations="replicated")),
    (Shape(z=4, context=2, expert=4), dict(capacity=0.7, aux=0.5, z_loss=0.1), {}),
    (Shape(z=2, pipe=2, expert=2), dict(capacity=0.8, moe_reads="previous", shared_hidden=24), {}),
    (Shape(data=4, expert=2, ez=2), dict(experts=6, groups=3, top_groups=2, route_scale=1.5), {}),
    (Shape(y=2, z=2, ez=2), dict(capacity=0.8, score="sigmoid"), dict(overlap=Overlap(halves=2))),
    (Shape(x=2, z=2, expert=4), dict(capacity=0.8), dict(pad_experts=True)),
    (Shape(z=4, expert=2, ex=2), dict(capacity=1.3, shared_hidden=24), dict(pad_experts=True, recompute="block")),
    (Shape(x=4, expert=2, ez=2), dict(capacity=0.6), dict(pad_experts=True, activations="replicated")),
    (Shape(y=2, z=2, expert=2), dict(capacity=1.0), dict(pad_experts=True, overlap=Overlap(halves=2))),
]


@pytest.mark.parametrize("routing", others_slow(ROUTINGS, 3), ids=lambda routing: f"{routing[0]} {routing[1]}")
def test_every_routing_has_the_same_step_on_a_fold_as_on_one_process(ranks, routing) -> None:
    shape, changes, policy = routing
    config = mixture(**changes)
    loss, gradients, load = step_on(Shape(), {}, 1, config)
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    micro_steps = 4 if shape.pipe > 1 else 1
    for found, grads, counted in ranks(shape.world).run(step_on, shape, policy, micro_steps, config):
        assert abs(found - loss) < 1e-12
        assert max(float((grads[name] - gradients[name]).abs().max()) for name in grads) / scale < 1e-12
        assert counted == load


def biases(shape: Shape) -> list[list[float]]:
    """Return the bias of each router after three steps."""
    grid = grid_of(shape)
    model = ff.models.build(mixture(bias_rate=0.01), grid, dtype=torch.float64, seed=5)
    optimizer = ff.optim.SGD(model, lr=1e-2)
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
    for _ in range(3):
        model(tokens, targets).backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
    return [layer.mlp.router.bias.tolist() for layer in model.layers]


@pytest.mark.parametrize("shape", others_slow([Shape(x=2, z=2, expert=4), Shape(y=2, z=2, expert=2)], 2), ids=str)
def test_biases_have_the_same_bits_on_a_fold(ranks, shape: Shape) -> None:
    alone = biases(Shape())
    assert any(map(any, alone))
    assert all(found == alone for found in ranks(shape.world).run(biases, shape))


def test_all_axes_together_give_the_step_of_one_process(ranks) -> None:
    """Tokens of packed documents, cut over a context group and stages, travel to experts on all ranks of a stage."""
    shape = Shape(x=2, z=2, pipe=2, context=2, expert=4)
    config = mixture(capacity=1.0, aux=0.1, bias_rate=0.01, shared_hidden=24)
    pool = ranks(8)
    pool.start(packed_step, shape, Policy(), config, "documents")
    alone = packed_step(Shape(), Policy(), config, "documents")
    assert max(packed_errors(alone, pool.results())) < 1e-12


def trained(shape: Shape, shard_optimizer: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Take three clipped steps; return norms, losses, and the parameters."""
    grid = grid_of(shape)
    model = ff.models.build(
        mixture(), grid, policy=Policy(shard_optimizer=shard_optimizer), dtype=torch.float64, seed=5
    )
    optimizer = ff.optim.AdamW(model, lr=1e-2)
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
    norms, losses = [], []
    for _ in range(3):
        loss = model(tokens, targets)
        loss.backward()
        assert float(ff.clip_grad_norm_(model.parameters(), 1e9)) == pytest.approx(
            float(optimizer.clip_and_step(0.1).norm), rel=1e-12
        )
        norms.append(float(ff.clip_grad_norm_(model.parameters(), 1e9)))
        optimizer.zero_grad()
        losses.append(loss.item())
    specs = specs_of(model)
    whole = {name: join_shards(local_of(p), specs[name], grid) for name, p in model.named_parameters()}
    return norms, losses, whole


def test_padded_rows_may_go_to_a_rank_without_experts(ranks) -> None:
    """Three ranks have the five experts."""
    config, shape = mixture(capacity=0.8), Shape(x=2, z=2, expert=4)
    loss, gradients, _ = step_on(Shape(), {}, 1, config)
    for found, grads, _ in ranks(4).run(step_on, shape, dict(pad_experts=True), 1, config):
        assert abs(found - loss) < 1e-12
        assert max(float((grads[name] - gradients[name]).abs().max()) for name in grads) < 1e-12


FOLDS = [
    (Shape(z=4, expert=4), True),
    (Shape(x=2, z=2, expert=2), True),
    (Shape(x=2, z=2, expert=2), False),
    (Shape(data=4, expert=2), True),
    (Shape(y=2, data=2, expert=2), False),
    (Shape(x=2, data=2, ex=2), True),
    (Shape(z=2, data=2, ez=4), False),
]


@pytest.mark.parametrize("fold", others_slow(FOLDS, len(FOLDS)), ids=str)
def test_norms_and_clipped_steps_on_a_fold_equal_one_process(ranks, fold: tuple[Shape, bool]) -> None:
    shape, shard_optimizer = fold
    norms, losses, whole = trained(Shape(), False)
    for found in ranks(shape.world).run(trained, shape, shard_optimizer):
        assert found[0] == pytest.approx(norms, rel=1e-12)
        assert found[1] == pytest.approx(losses, rel=1e-12)
        assert max(float((found[2][name] - whole[name]).abs().max()) for name in whole) < 1e-12


def clipped_by_torch(shape: Shape, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return torch's own norms of a step's gradients, and the gradients as its clipping leaves them."""
    grid = grid_of(shape)
    model = ff.models.build(mixture(), grid, dtype=torch.float64, seed=5)
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
    model(tokens, targets).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    norms = {"total": nn.utils.get_total_norm(gradients, **options)}
    norms["largest"] = nn.utils.get_total_norm(gradients, float("inf"), **options)
    norms["returned"] = nn.utils.clip_grad_norm_(model.parameters(), 0.1, **options)
    specs = specs_of(model)
    found = {name: join_shards(local_of(p.grad), specs[name], grid) for name, p in model.named_parameters()}
    return found | {name: norm.full_tensor() for name, norm in norms.items()}


TORCH_CLIPS = [
    Shape(z=2, expert=2),
    Shape(x=2, data=2, expert=2),
    Shape(data=2, ez=2),
    Shape(x=2, z=2, expert=2, ex=2),
]


@pytest.mark.parametrize("options", [dict(foreach=True), dict(foreach=False)], ids=str)
@pytest.mark.parametrize("shape", others_slow(TORCH_CLIPS, len(TORCH_CLIPS)), ids=str)
def test_torchs_own_norms_and_clipping_on_a_fold_equal_one_process(ranks, shape: Shape, options) -> None:
    alone = clipped_by_torch(Shape(), options)
    for found in ranks(shape.world).run(clipped_by_torch, shape, options):
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-14, msg=name)


def clipped_unless_finite() -> None:
    grid = grid_of(Shape(z=2, expert=2))
    model = ff.models.build(mixture(), grid, dtype=torch.float64, seed=5)
    model(*(ff.local_rows(whole, grid) for whole in batch())).backward()
    local_of(model.layers[0].mlp.gate.grad).fill_(float("inf"))
    with pytest.raises(RuntimeError, match="is non-finite, so it cannot be clipped"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


def test_torchs_clipping_on_a_fold_can_refuse_infinite_norms(ranks) -> None:
    ranks(2).run(clipped_unless_finite)


# --- checkpoints

PAIRS = [
    ((Shape(x=2, z=2), True), (Shape(z=4, expert=2, ez=2), True)),
    ((Shape(z=4, expert=4), True), (Shape(x=2, data=2, expert=2), False)),
    ((Shape(data=4, expert=2), True), (Shape(x=2, z=2, ex=2), True)),
    ((Shape(x=2, z=2, expert=2, ex=2), False), (Shape(y=2, z=2), True)),
]


@pytest.mark.parametrize("pair", others_slow(PAIRS, len(PAIRS)), ids=str)
def test_a_checkpoint_of_a_fold_loads_on_other_folds(ranks, tmp_path: Path, pair) -> None:
    saved, loaded = pair
    kept = ranks(4).run(checkpoints.trained, tmp_path, "moe-tiny", *saved, 3, 2)[0]
    folder = next(path for path in sorted(tmp_path.iterdir()) if path.is_dir())
    again = ranks(4).run(checkpoints.resumed, folder, "moe-tiny", *loaded, 3)[0]
    assert again["losses"][-1] == pytest.approx(kept["losses"][-1], abs=1e-12)


# --- bytes


CHOICES = [[0, 1], [0, 2], [3, 1], [2, 3]]


def send_and_return() -> tuple[int, int, list[int]]:
    """Send four tokens of eight features to four experts on two ranks, and what they are, doubled and weighted, back.

    Returns the bytes that went out and came back besides counts, and where the pairs of each expert end.
    """
    grid = grid_of(Shape(z=2, expert=2))
    site = ff.models.build(mixture(), grid, seed=5).layers[0].mlp.site(4)
    a = torch.arange(32.0).view(4, 8) + 100 * grid.rank
    scores = torch.tensor([[0.5, 0.25]]).expand(4, 2)
    dispatch = Dispatch(Routing(4, 2), site)
    before = grid.ledger.wire_bytes["expert"]
    arrived = site.engine.alone(dispatch.turns(a, scores, torch.tensor(CHOICES)))()
    out = grid.ledger.wire_bytes["expert"] - before - 2 * 8  # rows and pairs for the other rank
    weighted = 2 * arrived.pairs.pick(arrived.a) * arrived.pairs.sort(arrived.p)
    found = dispatch.combine(dispatch.returning(arrived.pairs.combine(weighted)).wait())
    assert torch.equal(found, 1.5 * a)
    return out, grid.ledger.wire_bytes["expert"] - before - 2 * 8 - out, arrived.pairs.groups.ends.tolist()


def test_three_of_four_tokens_leave_a_rank_once_each_with_their_choices_and_come_back(ranks) -> None:
    first, second = ranks(2).run(send_and_return)
    assert first == (3 * (8 * 4 + 2 * (4 + 4)), 3 * 8 * 4, [4, 8])  # experts 0 and 1, two pairs of each rank for each
    assert second == first


def one_token_is_not_finite(limit: int) -> torch.Tensor:
    """Send the same tokens, of which the first is infinite; return what came back."""
    grid = grid_of(Shape(z=2, expert=2))
    site = ff.models.build(mixture(), grid, seed=5).layers[0].mlp.site(4)
    dispatch = Dispatch(Routing(4, 2), site, limit)
    a = torch.arange(32.0).view(4, 8).index_fill_(0, torch.tensor([0]), float("inf"))
    arrived = site.engine.alone(dispatch.turns(a, torch.full((4, 2), 0.5), torch.tensor(CHOICES)))()
    weighted = arrived.pairs.pick(arrived.a) * arrived.pairs.sort(arrived.p)
    return dispatch.combine(dispatch.returning(arrived.pairs.combine(weighted)).wait()) - a


@pytest.mark.parametrize("limit", [0, 4], ids=["counted", "padded"])
def test_what_is_not_finite_stays_in_its_token(ranks, limit: int) -> None:
    for found in ranks(2).run(one_token_is_not_finite, limit):
        assert found[0].isnan().all()
        assert not found[1:].any()


def test_ranks_without_experts_and_without_tokens_have_no_pairs() -> None:
    no_expert, scores = Pairs(torch.zeros(3, 2, dtype=torch.long), 0).keep(0), torch.ones(3, 2, requires_grad=True)
    no_expert.sort(scores).sum().backward()
    assert scores.grad is not None and not scores.grad.any()
    assert no_expert.combine(no_expert.pick(torch.ones(3, 4))).equal(torch.zeros(3, 4))
    no_token = Pairs(torch.zeros(0, 2, dtype=torch.long), 2)
    assert no_token.pad(3).all()
    sent = no_token.pick(torch.ones(0, 4))
    assert sent.equal(torch.zeros(6, 4))
    assert no_token.combine(sent).shape == (0, 4)


def test_a_token_without_pairs_gets_nothing_from_one_that_is_not_finite() -> None:
    infinite = torch.tensor([[1.0], [2.0], [float("inf")], [4.0]])
    for room in (None, 2):
        pairs = Pairs(torch.tensor([[0, 1], [2, 2], [1, 0], [2, 2]]), 2)
        if room is None:
            pairs.keep(4)
        else:
            assert not pairs.pad(room).any()
        assert pairs.combine(pairs.pick(infinite)).flatten().tolist() == [2, 0, float("inf"), 0]
        scores = torch.ones(4, 2, requires_grad=True)
        (pairs.sort(scores) * pairs.pick(infinite)).sum().backward()
        assert scores.grad is not None
        assert scores.grad.tolist() == [[1, 1], [0, 0], [float("inf")] * 2, [0, 0]]


def test_pairs_beyond_the_expected_ones_are_left_out() -> None:
    """As on a muted grid, where counts are expected and choices are whatever memory held."""
    pairs = Pairs(torch.tensor([[0, 1], [0, 2], [1, 0]]), 3).keep(4)
    assert pairs.groups.counts == [3, 1, 0]
    assert pairs.pick(torch.eye(3)).shape == (4, 3)


def test_a_single_row_of_odd_width_is_unpacked() -> None:
    a, p, ids = torch.ones(1, 5, dtype=torch.bfloat16), torch.tensor([[0.7, 0.3]]), torch.tensor([[3, 1]])
    row = Pairs(torch.zeros(1, 1, dtype=torch.long), 1)
    found, scores, written = _columns(PackRows.apply(a, p, write_choices(a, p, ids), row, None), 5)
    assert (found.tolist(), _bits(scores, torch.float32).tolist()) == (a.tolist(), p.tolist())
    assert _bits(written, torch.int32).tolist() == [[4, 2]]


def sent_in_a_step(shape: Shape) -> list[dict[str, Any]]:
    """Return, for each pass through the one mixture, what was sent over expert and how many rows had to be."""
    grid, sent = grid_of(shape), []
    model = ff.models.build(mixture(layers=1), grid, dtype=torch.float64, seed=5)
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
    turns = Dispatch.turns

    def noting(self: Dispatch, a: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> Any:
        sent.append((self, ids.tolist()))
        return turns(self, a, scores, ids)

    with mock.patch.object(Dispatch, "turns", noting):
        before = grid.ledger.wire_bytes["expert"]
        loss = model(tokens, targets)
        there = grid.ledger.wire_bytes["expert"] - before
        loss.backward()
    ((dispatch, chosen),) = sent
    ranks, own = grid.size("expert"), grid.coords["expert"]
    shares = [chunk(5, ranks, rank) for rank in range(ranks)]
    of_token = [{next(r for r in range(ranks) if each in shares[r]) for each in ids} for ids in chosen]
    out = sum(len(destinations - {own}) for destinations in of_token)
    assert list(dispatch.counts.sent) == [sum(rank in each for each in of_token) for rank in range(ranks)]
    back = sum(dispatch.counts.taken) - dispatch.counts.taken[own]
    return [
        dict(forward=there, backward=grid.ledger.wire_bytes["expert"] - before - there),
        dict(out=out, back=back, counts=2 * (ranks - 1), width=24 // shape.y),
    ]


@pytest.mark.parametrize("shape", others_slow([Shape(x=2, z=2, expert=4), Shape(y=2, z=2, expert=2)], 2), ids=str)
def test_the_bytes_of_dispatch_and_combine_follow_from_the_choices(ranks, shape: Shape) -> None:
    for measured, counted in ranks(shape.world).run(sent_in_a_step, shape):
        out, back, row, choices = counted["out"], counted["back"], 8 * counted["width"], 2 * (8 + 8)
        assert out
        assert measured["forward"] == out * (row + choices) + back * row + 8 * counted["counts"]
        assert measured["backward"] == back * (row + choices) + out * row


def waits_of(pad_experts: bool, compute_dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """Return the messages over expert of a forward pass, and why its layers could not be recorded."""
    grid = grid_of(Shape(z=2, expert=2))
    policy = Policy(pad_experts=pad_experts, compute_dtype=compute_dtype)
    model = ff.models.build(mixture(layers=1, capacity=1.0), grid, policy=policy, dtype=torch.float64, seed=5)
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
    with grid.ledger.watch() as records:
        model(tokens, targets)
    return [str(one.nbytes) for one in records if one.axis == "expert"], [model.layers[0].mlp.not_recordable]


def test_padded_rows_need_no_counts(ranks) -> None:
    (counted, why), *_ = ranks(2).run(waits_of, False, torch.bfloat16)
    (padded, nothing), *_ = ranks(2).run(waits_of, True, torch.bfloat16)
    (_, wide), *_ = ranks(2).run(waits_of, True, torch.float32)
    assert [len(counted), len(padded)] == [3, 2]
    assert "policy.pad_experts" in why[0]
    assert nothing == [""]
    assert "bf16 or fp16" in wide[0]
    limit = -(-12 * 2 // 5)  # of a row of 12 tokens an expert takes 5 pairs, of 4 rows 20
    rows = 2 * min(4 * 12, 3 * 4 * limit)  # to two ranks of 3 and 2 experts, at most every token
    assert padded == [str(rows * (24 * 2 + 2 * 2 * 4)), str(rows * 24 * 2)]


def penalized(shape: Shape, only_first: bool) -> dict[str, torch.Tensor]:
    """Return gradients with a penalty on expert weights, on all places or on those with the first replica alone."""
    grid = grid_of(shape)
    model = ff.models.build(mixture(layers=1), grid, dtype=torch.float64, seed=5)
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
    loss, places = model(tokens, targets), shape.data if only_first else 1
    if not only_first or grid.coords["data"] == 0:
        for weight in (model.layers[0].mlp.gate, model.layers[0].mlp.down):
            loss = loss + places * 0.1 * (weight**2).sum()
    loss.backward()
    specs = specs_of(model)
    return {name: join_shards(local_of(p.grad), specs[name], grid) for name, p in model.named_parameters()}


PENALIZED = [
    (Shape(z=2, data=2, expert=2), True),
    (Shape(x=2, z=2, expert=2, ez=2), False),
    (Shape(y=2, data=2, expert=2), False),
    (Shape(x=2, data=2, ex=2), False),
    (Shape(x=2, z=2, expert=2, order=("z", "x", "y", "data")), False),
]


@pytest.mark.parametrize("case", others_slow(PENALIZED, 3), ids=str)
def test_a_penalty_on_expert_weights_counts_once(ranks, case: tuple[Shape, bool]) -> None:
    alone = penalized(Shape(), False)
    for found in ranks(4).run(penalized, *case):
        for name, gradient in alone.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def read_apart() -> str:
    grid = grid_of(Shape(data=2, expert=2))
    moe = ff.models.build(mixture(layers=1), grid, dtype=torch.float64, seed=5).layers[0].mlp
    with pytest.raises(RuntimeError, match="must read the same parameters in the same order") as refused:
        ((moe.gate if grid.rank == 0 else moe.up) ** 2).sum()
    return str(refused.value)


def test_ranks_that_read_different_expert_weights_are_told(ranks) -> None:
    first, second = ranks(2).run(read_apart)
    assert "layers.0.mlp.gate is read here" in first
    assert "layers.0.mlp.up is read here" in second


def muted_step(shape: Shape) -> bool:
    grid = grid_of(shape)
    model = ff.models.build(mixture(), grid, dtype=torch.float64, seed=5)
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
    with comm.muted(grid):
        model(tokens, targets).backward()
    return all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("shape", [Shape(x=2, z=2), Shape(x=2, z=2, expert=4)], ids=str)
def test_a_muted_step_runs_to_its_end(ranks, shape: Shape) -> None:
    assert all(ranks(4).run(muted_step, shape))


# --- what is refused


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (dict(z=2, expert=4), r"expert\*ex\*ez = 4\*1\*1 = 4 does not divide x\*z\*data = 2"),
        (dict(y=4, expert=2), r"expert\*ex\*ez = 2\*1\*1 = 2 does not divide x\*z\*data = 1"),
        (dict(z=2, ez=0), "ez=0: the size of an axis is a whole number"),
    ],
)
def test_folds_that_do_not_divide_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shape(**sizes)


def rows_of_unequal_places(pad_experts: bool) -> float:
    grid = grid_of(Shape(z=2, expert=2))
    policy = Policy(pad_experts=pad_experts)
    model = ff.models.build(mixture(layers=1, capacity=1.0), grid, policy=policy, dtype=torch.float64, seed=5)
    tokens = torch.zeros(1 + grid.coords["z"], 8, dtype=torch.long)
    return model(tokens, tokens).item()


def test_padded_rows_of_unequal_places_are_refused(ranks) -> None:
    first, second = ranks(2).run(rows_of_unequal_places, False)
    assert first == second
    with pytest.raises(RankFailed, match=r"rows of a place, here \(1, 8\), and those of another place differ"):
        ranks(2).run(rows_of_unequal_places, True)


def losses_of_unequal_places(first: int, second: int, alike: bool, **policy: Any) -> tuple[list[float], int]:
    """Return the losses of two batches, of so many rows in the first place and in the second, and into how many halves
    the rows of this place are cut."""
    grid = grid_of(Shape(z=2, expert=2))
    config = mixture(layers=1, hidden=192, heads=4, kv_heads=4, head_dim=48, seq=512)
    model = ff.models.build(config, grid, policy=Policy(**policy), dtype=torch.float64, seed=5)
    model.places_alike, found = alike, []
    for rows in ((2, 2), (first, second)):
        tokens = torch.arange(400 * rows[grid.coords["z"]]).view(-1, 400) % 48
        loss = model(tokens, tokens)
        loss.backward()
        found.append(loss.item())
    return found, model.halves(len(tokens), 400).number


def test_rows_to_experts_are_cut_by_themselves_only_if_all_places_are_alike(ranks) -> None:
    """Halves send rows to other places, so a place with fewer rows must not have fewer halves than they."""
    cut = ranks(2).run(losses_of_unequal_places, 2, 2, True)
    whole = ranks(2).run(losses_of_unequal_places, 2, 2, False)
    assert [number for _, number in cut + whole] == [2, 2, 1, 1]
    for one, other in zip(cut[0][0], whole[0][0], strict=True):
        assert abs(one - other) < 1e-12
    (first, *_), (second, *_) = (found for found, _ in ranks(2).run(losses_of_unequal_places, 1, 2, False))
    assert first == second


def gradients_with_dropout(recompute: Any) -> list[torch.Tensor]:
    """Return the gradients of two halves that drop activations behind experts, whose outputs travel back."""
    grid = grid_of(Shape(z=2, expert=2))
    policy = Policy(overlap=Overlap(halves=2), recompute=recompute)
    config = mixture(moe_reads="previous", shared_hidden=24, dropout=0.3, attention_dropout=0.0)
    model = ff.models.build(config, grid, policy=policy, dtype=torch.float64, seed=5)
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
    model(tokens, targets).backward()
    return [local_of(parameter.grad) for parameter in model.parameters()]


def test_blocks_on_a_fold_that_run_again_have_the_same_bits(ranks) -> None:
    """Halves take the same turns then: sums of gradients have the same order."""
    kept, again = (ranks(2).run(gradients_with_dropout, recompute) for recompute in ("none", "block"))
    for one, other in zip(kept, again, strict=True):
        assert all(map(torch.equal, one, other))


def refusal(fault: str) -> str:
    """Return what a place says of a batch in halves if the second place was given too many rows, or bad ids."""
    grid, policy = grid_of(Shape(z=2, expert=2)), Policy(overlap=Overlap(halves=2))
    model = ff.models.build(mixture(layers=1, capacity=2.0), grid, policy=policy, dtype=torch.float64)
    second = grid.coords["z"] == 1
    tokens = torch.zeros(1 + (fault == "rows" and second), 8, dtype=torch.long)  # one row is not cut, two are
    packed = {} if fault == "rows" else {"positions": torch.arange(8).expand(1, 8) % 4}
    if fault == "ids" and second:
        tokens += 1000
    with pytest.raises(ValueError) as raised:
        model(tokens, tokens, **packed)
    return str(raised.value)


def test_bad_batches_in_halves_are_refused_by_all_places(ranks) -> None:
    assert ["the rows of another place are not" in text for text in ranks(2).run(refusal, "rows")] == [True, True]
    first, second = ranks(2).run(refusal, "ids")
    assert "the batch of another place was refused" in first
    assert "1000" in second


def folded_without_experts() -> None:
    grid, padded = grid_of(Shape(z=2, expert=2)), Policy(pad_experts=True)
    with pytest.raises(ValueError, match="capacity=0 has no limit"):
        ff.models.build(mixture(), grid, policy=padded)
    model = ff.models.build(mixture(capacity=1.0), grid, policy=padded, dtype=torch.float64)
    rows = [ff.local_rows(part, grid) for part in packed("documents") if part is not None]
    with pytest.raises(ValueError, match="rows of one document each on grids without context"):
        model(*rows[:2], positions=rows[2])
    assert len(generate(model, [[1, 2, 3], [4, 5]], 2)) == 2  # nothing is dropped, so nothing is padded
    with pytest.raises(ValueError, match="is folded for experts, and the model has none; leave out expert"):
        ff.models.build("gpt-tiny", grid_of(Shape(z=2, expert=2)))
    with pytest.raises(ValueError, match="expert_hidden=25 is not divisible by ex=2"):
        ff.models.build(mixture(expert_hidden=25), grid_of(Shape(z=2, ex=2)), policy=Policy(activations="replicated"))


def test_folds_that_do_not_fit_a_model_are_refused(ranks) -> None:
    ranks(2).run(folded_without_experts)
