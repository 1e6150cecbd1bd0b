"""Routers of mixtures: bias, groups, capacity, losses and what experts read, equal to one process on every grid."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fourfold as ff
import plain
from fourfold.checkpoint.training_state import training_shards
from fourfold.context.assign import Assignment, Segment, assign_documents, assign_rows
from fourfold.layout import chunk
from fourfold.models.generate import generate
from fourfold.nn.layer import specs_of
from fourfold.nn.lora import LoraConfig
from fourfold.nn.router import Routing, Sequences, within_capacity
from fourfold.optim import SGD, AdamW, ShardedOptimizer, on_shards
from fourfold.params import local_of
from fourfold.policy import Overlap, Policy
from fourfold.shape import Shape
from harness import grid_of, join_shards
from share import others_slow

ROWS, STEPS = 8, 3
RATE = 0.05
HALVES = Overlap(halves=2)
DOCUMENTS = ([5, 6], [11], [1, 10], [3, 4, 4], [11], [6, 5], [2, 8, 1], [11])
"""The lengths of the documents in each row of 11 tokens."""


def mixture(**changes: Any) -> ff.models.ModelConfig:
    sizes = dict(layers=2, hidden=24, heads=24, kv_heads=24, head_dim=8, mlp_hidden=24, vocab=48, seq=16, tied=False)
    return ff.models.config("llama-tiny", **{**sizes, **dict(experts=8, top_k=2, expert_hidden=24), **changes})


DEEPSEEK = dict(score="sigmoid", groups=4, top_groups=2, top_k=3, route_scale=2.5, bias_rate=RATE, shared_hidden=24)
"""The routing of DeepSeek-V3."""
EVERYTHING = mixture(**DEEPSEEK, capacity=0.9, aux=0.5, z_loss=0.1)
PREVIOUS = mixture(
    score="softmax", experts=5, capacity=0.8, aux=0.5, bias_rate=RATE, shared_hidden=24, moe_reads="previous"
)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, targets = (torch.randint(48, (ROWS, 11), generator=generator) for _ in range(2))
    return tokens, targets


def expected(config: ff.models.ModelConfig, *, packed: bool) -> dict[str, Any]:
    """What one process computes in some steps of SGD."""
    model = plain.make(config, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for row, (tokens, targets) in enumerate(zip(*batch(step), strict=True)):
            lengths = DOCUMENTS[row] if packed else [11]
            for ids, aims in zip(tokens.split(lengths), targets.split(lengths), strict=True):
                logits = model.logits(model.hidden(ids[None]))[0]
                total = total + functional.cross_entropy(logits, aims, reduction="sum") / (ROWS * 11)
        (total + plain.router_losses(model, ROWS * 11)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        for each in model.mixtures:
            each.routed.clear()
            if config.bias_rate:
                each.move_biases()
    return {
        "losses": losses,
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "biases": [each.bias for each in model.mixtures],
        "dropped": [each.dropped for each in model.mixtures],
    }


def on_ranks(
    shape: Shape, policy: dict[str, Any], micro_steps: int, config: ff.models.ModelConfig, packed: bool
) -> dict[str, Any]:
    grid = grid_of(shape)
    model = ff.models.build(config, grid, policy=Policy(**policy), dtype=torch.float64, seed=5)
    optimizer = SGD(model, 0.1, momentum=0.0)
    losses = [take_step(model, optimizer, step, micro_steps, packed=packed) for step in range(STEPS)]
    specs = specs_of(model)
    parts = {name: join_shards(local_of(each), specs[name], grid) for name, each in model.named_parameters()}
    biases = {name: held.tolist() for name, held in model.named_buffers() if name.endswith("router.bias")}
    load = model.expert_load().sum(1)
    dropped = model.dropped_pairs()
    assert (load + dropped).tolist() == [STEPS * ROWS * 11 * config.top_k] * config.layers
    return {"losses": losses, "parameters": parts, "biases": biases, "dropped": dropped.tolist()}


def take_step(
    model: ff.models.Transformer, optimizer: ShardedOptimizer, step: int, micro_steps: int, *, packed: bool
) -> float:
    """Take a step; before the first, one that is skipped and a pass in evaluation, which leave nothing behind."""
    grid = model.grid
    if step == 0:
        backward(model, 99, micro_steps, packed=packed)
        optimizer.clip_and_step(unless=torch.ones((), dtype=torch.bool))
        optimizer.zero_grad()
        model.eval()
        model(ff.local_rows(batch(77)[0], grid))
        model.train()
        model.update_router_biases()
        assert model.expert_load().sum() + model.dropped_pairs().sum() > 0
    loss = backward(model, step, micro_steps, packed=packed)
    optimizer.clip_and_step()
    optimizer.zero_grad()
    model.update_router_biases()  # the optimizer has called it in its step
    return loss


def backward(model: ff.models.Transformer, step: int, micro_steps: int, *, packed: bool) -> float:
    grid = model.grid
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch(step))
    rows = ff.local_rows(torch.arange(ROWS), grid).chunk(micro_steps)
    parts = [
        {"tokens": ids, "targets": aims}
        | ({"documents": [length for row in own.tolist() for length in DOCUMENTS[row]]} if packed else {})
        for ids, aims, own in zip(tokens.chunk(micro_steps), targets.chunk(micro_steps), rows, strict=True)
    ]
    if grid.size("pipe") > 1:
        return ff.forward_backward(model, parts).item()
    count = ff.count_targets(targets, grid) if micro_steps > 1 else None
    model.gradients.begin_step(micro_steps)
    losses = [model(**part, count=count) for part in parts]
    for loss in losses:
        loss.backward()
    return sum(loss.item() for loss in losses)


def compare(found: dict[str, Any], wanted: dict[str, Any], layers: int) -> None:
    assert found["losses"] == pytest.approx(wanted["losses"], abs=1e-11)
    for name, parameter in found["parameters"].items():
        torch.testing.assert_close(parameter, wanted["parameters"][name], rtol=0, atol=1e-11, msg=name)
    known = {f"layers.{layer}.mlp.router.bias": bias for layer, bias in enumerate(wanted["biases"])}
    assert found["biases"].items() <= known.items()  # equal bits
    assert found["dropped"] == wanted["dropped"]
    assert len(wanted["dropped"]) == layers


ALONE: dict[str, dict[str, Any]] = {
    "groups": dict(groups=4, top_groups=2, top_k=3),
    "scale": dict(route_scale=2.5, score="sigmoid"),
    "bias": dict(bias_rate=RATE),
    "capacity": dict(capacity=0.7),
    "previous": dict(moe_reads="previous", shared_hidden=24),
}


@pytest.mark.parametrize("name", ALONE)
def test_each_field_does_what_its_definition_says(name: str) -> None:
    config = mixture(**ALONE[name])
    wanted = expected(config, packed=False)
    compare(on_ranks(Shape(), {}, 1, config, packed=False), wanted, config.layers)
    usual = expected(mixture(shared_hidden=config.shared_hidden, top_k=config.top_k), packed=False)
    assert wanted["losses"] != usual["losses"]
    assert any(wanted["dropped"]) == bool(config.capacity)


CASES: list[tuple[Shape, dict[str, Any], int, bool]] = [
    (Shape(x=2, z=2), dict(overlap=HALVES, recompute="block"), 1, False),
    (Shape(z=2, data=2, context=2), {}, 4, True),
    (Shape(y=2, z=2), dict(activations="replicated"), 2, True),
    (Shape(x=4), dict(recompute="block"), 2, False),
    (Shape(x=2, pipe=2), dict(schedule="zb-h1"), 4, True),
    (Shape(x=2, y=2), dict(keep_gathered=True), 1, True),
    (Shape(z=4, context=2), {}, 4, False),  # 11 tokens of a row on 2 places, which are filled up
    (Shape(z=2, pipe=2), dict(recompute="block"), 2, False),
    (Shape(x=2, z=2, context=2), dict(overlap=HALVES, recompute="block"), 2, True),
    (Shape(data=4, context=4), dict(overlap=HALVES), 1, True),
    (Shape(z=2, pipe=2, context=2), {}, 2, True),
    (Shape(x=2, data=2), dict(overlap=HALVES, shard_optimizer=True, recompute="attention"), 2, False),
]


def name_of(case: tuple[Shape, dict[str, Any], int, bool]) -> str:
    shape, policy, micro_steps, packed = case
    return f"{shape}, {'+'.join(policy) or 'plain'}, {micro_steps} micro-steps{', packed' if packed else ''}"


@pytest.mark.parametrize("case", others_slow(CASES, len(CASES)), ids=name_of)
@pytest.mark.parametrize("config", others_slow([EVERYTHING, PREVIOUS], 2), ids=["everything", "previous"])
def test_a_grid_routes_as_one_process(ranks, case: Any, config: ff.models.ModelConfig) -> None:
    shape, policy, micro_steps, packed = case
    pool = ranks(shape.world)
    pool.start(on_ranks, shape, policy, micro_steps, config, packed)
    wanted = expected(config, packed=packed)
    assert any(wanted["dropped"])
    assert any(any(bias) for bias in wanted["biases"])
    for found in pool.results():
        compare(found, wanted, config.layers)


# --- the bias in everything that keeps, moves or steps a model


def small(**changes: Any) -> tuple[ff.models.Transformer, Tensor, Tensor]:
    """Return a model of one process with a bias, and a batch."""
    config = mixture(**{**dict(layers=1, bias_rate=RATE, capacity=0.5), **changes})
    return ff.models.build(config, grid_of(Shape()), seed=5), *batch(0)


def bias_of(model: ff.models.Transformer) -> Tensor:
    return model.layers[0].mlp.router.bias  # type: ignore[return-value,union-attr]


@pytest.mark.parametrize(("optimizer", "skips"), [(SGD, True), (on_shards(torch.optim.RMSprop), True), (SGD, False)])
def test_a_step_that_is_skipped_moves_no_bias_and_is_forgotten(optimizer: type[ShardedOptimizer], skips: bool) -> None:
    model, tokens, targets = small()
    steps = optimizer(model, 0.0, weight_decay=0.0)
    loss = model(tokens, targets)
    (loss * float("nan") if skips else loss).backward()
    steps.clip_and_step(1.0)
    assert bias_of(model).any() != skips
    before = bias_of(model).clone()
    model.update_router_biases()
    assert torch.equal(bias_of(model), before)


def test_a_loop_with_an_optimizer_of_torch_moves_the_biases_itself() -> None:
    model, tokens, targets = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with ff.accumulate(model):
        model(tokens[:4], targets[:4]).backward()
    model(tokens[4:], targets[4:]).backward()
    optimizer.step()
    assert not bias_of(model).any()
    model.update_router_biases()
    assert set(bias_of(model).tolist()) <= {0.0, float(torch.tensor(RATE)), -float(torch.tensor(RATE))}
    assert bias_of(model).any()


def test_recompute_and_evaluation_count_nothing() -> None:
    model, tokens, targets = small()
    again = ff.models.build(model.config, grid_of(Shape()), policy=Policy(recompute="block"), seed=5)
    for each in (model, again):
        each(tokens, targets).backward()
        with torch.no_grad():
            each(tokens, targets)
        each.eval()
        each(tokens, targets)
        each.update_router_biases()
    assert torch.equal(bias_of(model), bias_of(again))
    assert torch.equal(model.expert_load(), again.expert_load())


def test_a_frozen_router_keeps_its_bias() -> None:
    lora = ff.models.build(mixture(bias_rate=RATE), grid_of(Shape()), lora=LoraConfig(4, targets=("q",)))
    optimizer = AdamW(lora, 1e-3)
    lora(*batch(0)).backward()
    optimizer.step()
    assert not bias_of(lora).any()


def test_a_bias_stays_in_fp32_and_in_the_state_and_counts_do_neither() -> None:
    model, *_ = small()
    bias_of(model).fill_(1.001)
    assert bias_of(model.to(torch.bfloat16))[0].item() == torch.tensor(1.001).item()
    state = [name for name in model.state_dict() if "router" in name]
    assert state == ["layers.0.mlp.router.weight", "layers.0.mlp.router.bias"]
    assert "model/layers.0.mlp.router.bias" in training_shards(model, AdamW(model, 1e-3))
    assert not [name for name in ff.models.build(mixture(), grid_of(Shape())).state_dict() if "router.bias" in name]
    meta = ff.models.build(model.config, grid_of(Shape()), device="meta")
    assert {buffer.device.type for buffer in meta.buffers()} == {"meta"}


# --- choices


def test_tokens_choose_in_their_best_groups_by_score_and_bias() -> None:
    routing = Routing(6, 2, "sigmoid", normalized=False, scale=2.0, groups=3, top_groups=1)
    logits = torch.tensor([[5.0, -5.0, 1.0, 1.0, 0.0, 2.0], [0.0] * 6])
    scores, ids = routing.choose(logits)
    assert ids.tolist() == [[2, 3], [0, 1]]  # the best expert is in a group whose second is bad; ties to the lower id
    torch.testing.assert_close(scores, 2 * logits.sigmoid().gather(1, ids))
    biased, ids = routing.choose(logits, torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
    assert ids.tolist() == [[4, 5], [4, 5]]
    torch.testing.assert_close(biased, 2 * logits.sigmoid().gather(1, ids))  # the bias is in no score


def test_experts_take_the_first_pairs_of_each_sequence() -> None:
    routing = Routing(3, 2, capacity=0.75)
    ids = torch.tensor([[0, 1], [0, 2], [0, 1], [0, 1], [1, 0], [2, 0]])
    documents = Sequences.of_documents(torch.tensor([[0, 1, 2, 3, 0, 1]]))  # capacities 2 and 1
    taken = [[True, True], [True, True], [False, True], [False, False], [True, True], [True, False]]
    assert within_capacity(routing, documents, ids, None).tolist() == taken
    rows = Sequences.of_rows(2, 3, ids.device)  # capacity 2
    taken = [[True, True], [True, True], [False, True], [True, True], [True, True], [True, False]]
    assert within_capacity(routing, rows, ids, None).tolist() == taken
    before = torch.tensor([[0, 1, 0], [2, 0, 0]])
    expected = [[True, True], [True, True], [False, False], [False, True], [True, False], [True, False]]
    assert within_capacity(routing, rows, ids, before).tolist() == expected


@pytest.mark.parametrize("members", [2, 4])
def test_segments_know_what_stands_before_them_at_other_members(members: int) -> None:
    for assignment in (assign_rows(3, 16, (9, 7, 16, 16), members), assign_documents((29, 1, 2, 11, 5), members)):
        numbered = {number: segment for _, number, segment in all_segments(assignment)}
        for member, held in enumerate(assignment.members):
            found = assignment.segment_order(member)
            assert [numbered[number] for number in found.order] == sorted(numbered.values())
            for segment, own, first, end in zip(held, found.own, found.first, found.end, strict=True):
                line = [numbered[number] for number in found.order[first:end]]
                assert {each.document for each in line} == {segment.document}
                assert sum(each.tokens for each in line[: own - first]) == segment.start
                assert sum(each.tokens for each in line) == assignment.lengths[segment.document]


def all_segments(assignment: Assignment) -> list[tuple[int, int, Segment]]:
    """Return the segments of all members, each with its member and its number, as if all had equally many."""
    most = max(map(len, assignment.members))
    return [
        (member, member * most + number, segment)
        for member, held in enumerate(assignment.members)
        for number, segment in enumerate(held)
    ]


# --- equal use


EQUAL_USE = [
    (routing, ranks)
    for routing in (
        Routing(5, 2),
        Routing(6, 2, groups=3, top_groups=2),
        Routing(8, 3, groups=2),
        Routing(9, 3, groups=3),
    )
    for ranks in (2, 3, 4)
]


@pytest.mark.parametrize("case", EQUAL_USE, ids=str)
def test_as_many_tokens_choose_a_ranks_experts_as_all_equally_likely_choices_say(case: tuple[Routing, int]) -> None:
    """Also where a rank has parts of several groups, or no experts."""
    routing, ranks = case
    size, tokens = routing.experts // routing.groups, 5040
    choices = [
        set(chosen)
        for groups in combinations(range(routing.groups), routing.top_groups)
        for chosen in combinations([e for e in range(routing.experts) if e // size in groups], routing.chosen)
    ]
    for rank in range(ranks):
        share = chunk(routing.experts, ranks, rank)
        rows, pairs = routing.balanced(tokens, share)
        assert rows == round(tokens * sum(not chosen.isdisjoint(share) for chosen in choices) / len(choices))
        assert pairs == tokens * routing.chosen * len(share) // routing.experts


# --- other ways through a model


def test_generation_drops_nothing() -> None:
    model, tokens, _ = small()
    free = ff.models.build(mixture(layers=1, bias_rate=RATE), grid_of(Shape()), seed=5)
    with torch.no_grad():
        assert not torch.equal(model(tokens), free(tokens))
        with model.dropless():
            assert torch.equal(model(tokens), free(tokens))
        model.dropped_pairs()
        generate(model, [[1] * 9, [2]], 2)
        assert model.dropped_pairs().tolist() == [0]
        assert not torch.equal(model(tokens), free(tokens))


@pytest.mark.parametrize("config", [EVERYTHING, PREVIOUS], ids=["everything", "previous"])
def test_a_hook_on_a_mixture_changes_nothing(config: ff.models.ModelConfig) -> None:
    found = []
    for hooked in (False, True):
        model = ff.models.build(config, grid_of(Shape()), seed=5)
        if hooked:
            model.layers[1].mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
        model(*batch(0)).backward()
        found.append([local_of(parameter.grad) for parameter in model.parameters()])  # type: ignore[arg-type]
    for plain_gradient, gradient in zip(*found, strict=True):
        torch.testing.assert_close(gradient, plain_gradient)


def test_routers_compute_in_the_dtype_of_the_policy() -> None:
    policy = Policy(compute_dtype=torch.bfloat16, router_dtype=torch.float64)
    model = ff.models.build(mixture(), grid_of(Shape()), policy=policy)
    router = model.layers[1].mlp.router  # type: ignore[union-attr]
    with torch.no_grad():
        scores, _ = router(torch.zeros(3, 24, dtype=torch.bfloat16), router.site(3))  # type: ignore[operator]
    assert scores.dtype is torch.float64
    with pytest.raises(ValueError, match=r"router_dtype=torch\.bfloat16 must be torch\.float32 or torch\.float64"):
        Policy(router_dtype=torch.bfloat16)


def test_a_row_whose_experts_are_counted_is_not_cut_into_halves() -> None:
    model = ff.models.build(mixture(capacity=1.0), grid_of(Shape()), policy=Policy(overlap=HALVES))
    assert model.halves(1, 12).number == 1
    assert "counted together" in model.halves(1, 12).reason
