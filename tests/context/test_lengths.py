"""Lengths of documents from the host: the results of positions, without a read of the device; documents over rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from fourfold.axes import CONTEXT
from fourfold.context.assign import assign_rows
from fourfold.context.move import KeyPlan, own_tokens, ring_tiles
from fourfold.grid import Grid, Shape
from fourfold.models import transformer
from fourfold.nn import attention
from fourfold.nn.attention import cut_documents, document_positions
from fourfold.nn.layer import specs_of
from fourfold.params import local_of
from fourfold.policy import Policy
from harness import grid_of, join_shards

SEED, ROWS, SEQ = 7, 4, 12
SMALL: dict[str, Any] = dict(layers=2, hidden=32, head_dim=8, mlp_hidden=32, vocab=29)
CONFIGS = {
    "gpt": ff.models.config("gpt-tiny", **SMALL, seq=ROWS * SEQ),
    "llama": ff.models.config("llama-tiny", **SMALL, seq=SEQ, heads=8, kv_heads=4),
}
INSIDE = ((5, 7), (12,), (1, 1, 10), (3, 8, 1))
"""Documents of each row."""
ACROSS = (20, 1, 9, 15, 3)
"""Documents of the line of all rows: three of them go on in the next row."""
IN_PLACES = (20, 1, 3), (15, 9)
"""The same for two places of two rows."""


def batch() -> tuple[Tensor, Tensor]:
    """tokens, targets (some masked): [rows, seq]."""
    generator = torch.Generator().manual_seed(SEED)
    tokens, targets = torch.randint(29, (2, ROWS, SEQ), generator=generator)
    return tokens, targets.masked_fill(torch.rand(targets.shape, generator=generator) < 0.2, -100)


@cache
def alone(kind: str, lengths: Sequence[int]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one process, whose documents lie in one row: today's packed rows."""
    model = ff.models.build(CONFIGS[kind], Grid.alone("cpu"), seed=SEED, dtype=torch.float64)
    line = [part.reshape(1, -1) for part in batch()]
    loss = model(*line, positions=document_positions(lengths)[None])
    loss.backward()
    return loss.item(), {name: local_of(one.grad) for name, one in model.named_parameters()}


def refuse(_: Tensor) -> list[int]:
    raise AssertionError("the host reads lengths from positions")


def steps(shape: Shape, cases: Sequence[tuple[str, Any, Policy]], in_steps: int = 1) -> list[dict[str, Any]]:
    """Forward and backward for each model, documents of each row place, and policy, which read no positions."""
    read = attention.document_lengths
    attention.document_lengths = transformer.document_lengths = refuse
    try:
        return [_step(shape, *case, in_steps) for case in cases]
    finally:
        attention.document_lengths = transformer.document_lengths = read


def _step(shape: Shape, kind: str, places: Any, policy: Policy, in_steps: int) -> dict[str, Any]:
    grid = grid_of(shape)
    rows = [ff.local_rows(whole, grid) for whole in batch()]
    lengths = places[grid.shape.row_place(grid.rank)]
    model = ff.models.build(CONFIGS[kind], grid, policy=policy, seed=SEED, dtype=torch.float64)
    with grid.ledger.watch() as records:
        if in_steps == 1:
            loss = model(*rows, documents=lengths)
            loss.backward()
        else:
            parts = [part.chunk(in_steps) for part in rows]
            known = cut_documents(lengths, [part.numel() for part in parts[0]])
            loss = ff.forward_backward(model, [(*each, None, own) for *each, own in zip(*parts, known, strict=True)])
    specs = specs_of(model)
    gradients = {name: join_shards(local_of(one.grad), specs[name], grid) for name, one in model.named_parameters()}
    sent = sum(record.wire_bytes for record in records if record.axis == CONTEXT)
    return {"loss": loss.item(), "gradients": gradients, "sent": sent}


def compare(found: list[list[dict[str, Any]]], cases: Sequence[tuple[str, Any, Policy]]) -> None:
    for results in found:
        for (kind, places, _), result in zip(cases, results, strict=True):
            loss, gradients = alone(kind, tuple(length for place in places for length in place))
            assert result["loss"] == pytest.approx(loss, rel=0, abs=1e-12)
            for name, here in result["gradients"].items():
                torch.testing.assert_close(here, gradients[name], rtol=0, atol=1e-12, msg=name)


def flat(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(length for row in rows for length in row)


ONE_HALF, TWO_HALVES = Policy(overlap=ff.Overlap(halves=1)), Policy(overlap=ff.Overlap(halves=2))
TWO_PLACES = flat(INSIDE[:2]), flat(INSIDE[2:])
ONE_PLACE = (flat(INSIDE),)


def test_lengths_give_what_positions_give(ranks: Any) -> None:
    """Also in halves and micro-batches, which get the lengths of their own rows."""
    cases = [(kind, ONE_PLACE, policy) for kind in CONFIGS for policy in (ONE_HALF, TWO_HALVES)]
    compare([steps(Shape(), cases)], cases)
    shape, cases = Shape(x=2, z=2), [("llama", TWO_PLACES, policy) for policy in (Policy(), TWO_HALVES)]
    compare(ranks(4).run(steps, shape, cases), cases)


@pytest.mark.parametrize("shape", [Shape(z=2, context=2), Shape(z=4, context=2)], ids=str)
def test_over_a_context_group(ranks: Any, shape: Shape) -> None:
    places = ONE_PLACE if shape.row_places == 1 else TWO_PLACES
    across = (ACROSS,) if shape.row_places == 1 else IN_PLACES
    cases = [
        ("llama", places, TWO_HALVES),
        ("gpt", places, Policy(context_way="gather", assignment="rows")),
        ("llama", across, ONE_HALF),
        ("gpt", across, Policy(overlap=ff.Overlap(halves=1), assignment="rows", context_way="ring")),
    ]
    found = ranks(shape.world).run(steps, shape, cases)
    compare(found, cases)
    assert all(result["sent"] for results in found for result in results[1::2])


def test_through_stages_and_micro_batches(ranks: Any) -> None:
    cases = [("llama", ONE_PLACE, TWO_HALVES), ("gpt", ONE_PLACE, Policy())]
    compare(ranks(2).run(steps, Shape(pipe=2), cases, 2), cases)
    shape, cases = Shape(z=2, pipe=2, context=2), [("llama", ONE_PLACE, Policy())]
    compare(ranks(4).run(steps, shape, cases, 2), cases)


def test_a_document_that_goes_on_in_the_next_row_is_one_document(ranks: Any) -> None:
    """On one process and on grids, with and without recompute: as if its rows were one."""
    overlap = ff.Overlap(halves=1)
    policies = [Policy(overlap=overlap), *(Policy(overlap=overlap, recompute=kind) for kind in ("attention", "block"))]
    cases = [(kind, (ACROSS,), policy) for kind in CONFIGS for policy in policies]
    compare([steps(Shape(), cases)], cases)
    cases = [(kind, IN_PLACES, ONE_HALF) for kind in CONFIGS]
    compare(ranks(4).run(steps, Shape(x=2, z=2), cases), cases)


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_lengths_of_any_kind(kind: Any) -> None:
    model = ff.models.build(CONFIGS["llama"], Grid.alone("cpu"), seed=SEED, policy=ONE_HALF)
    assert torch.equal(model(*batch(), documents=kind(ACROSS)), model(*batch(), documents=ACROSS))


def test_halves_where_no_document_lies_in_two() -> None:
    cases = [("llama", ((20, 4, 15, 9),), TWO_HALVES)]
    compare([steps(Shape(), cases)], cases)


def test_logits_of_all_tokens(ranks: Any) -> None:
    expected = logits_of(Shape(), (ACROSS,))
    for found in ranks(2).run(logits_of, Shape(data=2, context=2), (ACROSS,)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def logits_of(shape: Shape, places: Any) -> Tensor:
    grid = grid_of(shape) if shape.world > 1 else Grid.alone("cpu")
    model = ff.models.build(CONFIGS["llama"], grid, policy=ONE_HALF, seed=SEED, dtype=torch.float64)
    tokens, lengths = batch()[0], places[0]
    again = torch.tensor(lengths)
    return model.whole_rows(model(tokens, documents=lengths), tokens.shape, documents=again).detach()


# --- what is wrong


FAULTS: list[tuple[Any, Policy, str]] = [
    ((20, 20), ONE_HALF, "got 40 tokens in 2 documents for 4 rows of 12 tokens, which are 48"),
    ((50, -2), ONE_HALF, "got a length of -2 for 4 rows of 12 tokens"),
    ((), ONE_HALF, "got 0 tokens in 0 documents"),
    (((20, 28),), ONE_HALF, r"one after another: whole numbers, not \(\(20, 28\),\)"),
    (torch.tensor(48), ONE_HALF, "one after another: whole numbers, not 48"),
    (torch.tensor([[20, 28]]), ONE_HALF, r"one after another: whole numbers, not \[\[20, 28\]\]"),
    (
        ACROSS,
        TWO_HALVES,
        r"goes on from row 0 to row 1 .* are cut into 2 halves there; give tokens as one row, \[1, 48\]",
    ),
]


@pytest.mark.parametrize(("lengths", "policy", "message"), FAULTS)
def test_wrong_lengths_are_refused(lengths: Any, policy: Policy, message: str) -> None:
    model = ff.models.build(CONFIGS["llama"], Grid.alone("cpu"), policy=policy)
    with pytest.raises(ValueError, match=message):
        model(*batch(), documents=lengths)


def test_positions_that_say_something_else_are_refused() -> None:
    model = ff.models.build(CONFIGS["llama"], Grid.alone("cpu"), policy=ONE_HALF)
    positions = document_positions(ACROSS).view(ROWS, SEQ).clone()
    assert torch.equal(model(*batch(), positions=positions, documents=ACROSS), model(*batch(), documents=ACROSS))
    positions[1, 9] = 5
    with pytest.raises(ValueError, match=r"differ: token 9 of row 1 has position 5; leave positions out, or"):
        model(*batch(), positions=positions, documents=ACROSS)


def test_learned_positions_must_reach_the_longest_document() -> None:
    """Whatever the rows are: a row may be longer, if its documents are not."""
    config = ff.models.config("gpt-tiny", **SMALL, seq=20)
    model = ff.models.build(config, Grid.alone("cpu"), policy=ONE_HALF)
    line = [part.reshape(1, -1) for part in batch()]
    assert torch.isfinite(model(*line, documents=(20, 20, 8)))
    with pytest.raises(ValueError, match="a sequence of 21 tokens is longer than the 20 learned positions"):
        model(*line, documents=(21, 19, 8))


def refused_elsewhere() -> str:
    """What a rank says if the other place has wrong lengths."""
    grid = grid_of(Shape(z=2))
    model = ff.models.build(CONFIGS["llama"], grid, policy=ONE_HALF)
    rows = [ff.local_rows(whole, grid) for whole in batch()]
    try:
        model(*rows, documents=(24,) if grid.rank == 0 else (23,))
    except ValueError as error:
        return str(error)
    return ""


def test_all_ranks_hear_of_wrong_lengths(ranks: Any) -> None:
    said = ranks(2).run(refused_elsewhere)
    assert "the batch of another place was refused" in said[0]
    assert "got 23 tokens in 1 documents" in said[1]


# --- plans


def plans_of_two_batches(shape: Shape) -> list[tuple[int, int]]:
    """How often plans were found and made in two batches of two layers, without documents and in rows."""
    grid, found = grid_of(shape), []
    for way in ("gather", "exchange", "ring"):
        for one in (KeyPlan.of, own_tokens, ring_tiles):
            one.cache_clear()
        policy = Policy(assignment="rows", context_way=way, overlap=ff.Overlap(halves=1))
        model = ff.models.build(CONFIGS["llama"], grid, policy=policy)
        losses = []
        with torch.inference_mode():
            model(batch()[0])  # plans that are made now serve training too
        for _ in range(2):
            loss = model(*batch())
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        plans = ring_tiles if way == "ring" else KeyPlan.of
        found += [one.cache_info()[:2] for one in (plans, own_tokens)]
    return found


def test_rows_are_planned_once(ranks: Any) -> None:
    for found in ranks(2).run(plans_of_two_batches, Shape(z=2, context=2)):
        assert found == [(2, 1)] * 6


def test_plans_know_their_rows_and_device() -> None:
    one, other = (assign_rows(2, 8, (8, 8), members) for members in (2, 4))
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert KeyPlan.of(one, 0, everything=True, device=cpu) is KeyPlan.of(one, 0, everything=True, device=cpu)
    kinds = [
        (one, 0, True, cpu),
        (one, 1, True, cpu),
        (one, 0, False, cpu),
        (one, 0, True, meta),
        (other, 0, True, cpu),
    ]
    plans = [KeyPlan.of(holders, me, everything=all_of_it, device=on) for holders, me, all_of_it, on in kinds]
    assert len({id(plan) for plan in plans}) == len(kinds)
    assert [plan.order.device for plan in plans[2:4]] == [cpu, meta]
