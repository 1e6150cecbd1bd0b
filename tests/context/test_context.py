"""A context axis changes nothing: losses and gradients are those of one process, for rows and packed documents, however
K and V travel, and what travels is what E16 says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from fourfold.axes import CONTEXT
from fourfold.context.traffic import moved_by
from fourfold.grid import Grid, Shape
from fourfold.models.generate import generate
from fourfold.nn.layer import specs_of
from fourfold.nn.lora import LoraConfig
from fourfold.params import local_of
from fourfold.policy import Policy
from harness import grid_of, join_shards

SEED = 3
ROWS, SEQ = 4, 24
SMALL: dict[str, Any] = dict(layers=2, hidden=32, head_dim=8, mlp_hidden=32, vocab=29, seq=SEQ)
CONFIGS = {
    "gpt": ff.models.config("gpt-tiny", **SMALL),
    "llama": ff.models.config("llama-tiny", **SMALL, heads=8, kv_heads=4, qk_norm=True),
    "shared": ff.models.config("llama-tiny", **SMALL, heads=6, kv_heads=3),
}
"""With shared KV heads x or y cuts through them."""


def lengths_of(kind: str) -> list[list[int]]:
    """Documents of each row."""
    drawn = random.Random(kind)
    if kind == "one token":
        return [[1] * SEQ] * ROWS
    if kind == "apart":  # one document is cut over members, and in groups without it nothing travels
        return [[SEQ], *[[1] * SEQ] * (ROWS - 1)]
    found = []
    for _ in range(ROWS):
        row: list[int] = []
        while sum(row) < SEQ:
            row.append(min(drawn.randint(1, SEQ if drawn.random() < 0.3 else 6), SEQ - sum(row)))
        found.append(row)
    return found


def batch(documents: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """tokens, targets (some masked) and positions [rows, seq]."""
    generator = torch.Generator().manual_seed(SEED)
    tokens, targets = torch.randint(29, (2, ROWS, SEQ), generator=generator)
    targets = targets.masked_fill(torch.rand(targets.shape, generator=generator) < 0.2, -100)
    if not documents:
        return tokens, targets, None
    return tokens, targets, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths_of(documents)])


@cache
def alone(kind: str, documents: str) -> tuple[float, dict[str, Tensor]]:
    model = ff.models.build(CONFIGS[kind], Grid.alone("cpu"), seed=SEED, dtype=torch.float64)
    tokens, targets, positions = batch(documents)
    loss = model(tokens, targets, positions=positions)
    loss.backward()
    return loss.item(), {name: local_of(one.grad) for name, one in model.named_parameters()}


def steps(shape: Shape, cases: list[tuple[str, str, Policy]]) -> list[dict[str, Any]]:
    """One forward and backward for each model, kind of documents, and policy."""
    grid, found = grid_of(shape), []
    for kind, documents, policy in cases:
        rows = [None if whole is None else ff.local_rows(whole, grid) for whole in batch(documents)]
        model = ff.models.build(CONFIGS[kind], grid, policy=policy, seed=SEED, dtype=torch.float64)
        with grid.ledger.watch() as records:
            loss = model(*rows[:2], positions=rows[2])
            loss.backward()
        specs = specs_of(model)
        gradients = {name: join_shards(local_of(one.grad), specs[name], grid) for name, one in model.named_parameters()}
        sent = sum(record.wire_bytes for record in records if record.axis == CONTEXT)
        found.append({"loss": loss.item(), "gradients": gradients, "sent": sent})
    return found


def compare(found: list[list[dict[str, Any]]], cases: list[tuple[str, str, Policy]]) -> None:
    for results in found:
        for (kind, documents, _), result in zip(cases, results, strict=True):
            loss, gradients = alone(kind, documents)
            assert result["loss"] == pytest.approx(loss, rel=0, abs=1e-12)
            for name, found_here in result["gradients"].items():  # a rank along pipe has some of them
                torch.testing.assert_close(found_here, gradients[name], rtol=0, atol=1e-12, msg=name)


# --- groups


def test_groups_by_hand() -> None:
    """Neighbouring places, z before data."""
    shape = Shape(x=2, z=4, data=2, pipe=2, context=4)
    assert shape.world == 32
    assert shape.row_places == 2
    assert (shape.place(13), shape.row_place(13), shape.member(13)) == (6, 1, 2)
    assert shape.context_ranks(13) == shape.ranks_along(CONTEXT, 13) == [9, 11, 13, 15]
    whole = Shape(z=2, data=4, context=8)
    assert whole.context_ranks(5) == list(range(8))
    assert Shape(**shape.named, order=shape.order) == shape != Shape(**shape.sizes)
    assert shape.reordered(("z", "x", "y", "data")).context == 4


def test_rows_of_a_group_are_those_of_its_members(ranks) -> None:
    rows = ranks(4).run(rows_here, Shape(z=4, context=2))
    assert [part.tolist() for part in rows] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def rows_here(shape: Shape) -> Tensor:
    return ff.local_rows(torch.arange(4), grid_of(shape))


# --- parity


WAYS = ("auto", "gather", "exchange", "ring", "ulysses:2")
SHAPES: list[tuple[Shape, list[tuple[str, str, Sequence[str]]]]] = [
    (Shape(z=2, context=2), [("llama", "", WAYS), ("llama", "mixed", WAYS)]),
    (Shape(data=4, context=4), [("llama", "", (*WAYS, "ulysses:4")), ("gpt", "mixed", (*WAYS, "ulysses:2+ring"))]),
    (
        Shape(z=2, data=2, context=4),
        [("llama", "mixed", (*WAYS, "ulysses:2+gather", "ulysses:2+ring")), ("llama", "one token", ("auto",))],
    ),
    (Shape(x=2, z=2, context=2), [("shared", "mixed", WAYS[1:4]), ("llama", "", ("ulysses:2",))]),
    (
        Shape(y=2, data=2, context=2),
        [("shared", "mixed", ("exchange",)), ("gpt", "", ("gather",)), ("llama", "", ("ring",))],
    ),
]


QUICK = Shape(x=2, z=2, context=2), Shape(y=2, data=2, context=2)
CASES = [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in QUICK)) for case in SHAPES]


@pytest.mark.parametrize(("shape", "lines"), CASES, ids=[str(shape) for shape, _ in SHAPES])
def test_every_way_gives_the_gradients_of_one_process(ranks, shape: Shape, lines: Any) -> None:
    cases = [(kind, documents, Policy(context_way=way)) for kind, documents, ways in lines for way in ways]
    compare(ranks(shape.world).run(steps, shape, cases, timeout=200), cases)


POLICIES = [
    Policy(recompute="block"),
    Policy(recompute="attention"),
    Policy(keep_gathered=True),
    Policy(assignment="rows"),
    Policy(assignment="documents", loss_chunk=7),
    Policy("replicated", overlap=ff.Overlap(halves=2)),
    Policy(overlap=ff.Overlap(halves=2), context_way="ulysses:2"),
    Policy(overlap=ff.Overlap.off()),
    Policy(even_tokens=True),
]


@pytest.mark.parametrize(
    ("shape", "both"),
    [(Shape(x=2, z=2, context=2), False), pytest.param(Shape(z=4, context=2), True, marks=pytest.mark.slow)],
    ids=str,
)
def test_every_policy_gives_the_gradients_of_one_process(ranks, shape: Shape, both: bool) -> None:
    if both:
        cases = [("llama", documents, policy) for policy in POLICIES for documents in ("", "mixed")]
    else:
        cases = [("llama", "mixed", policy) for policy in POLICIES[::2]]
    compare(ranks(shape.world).run(steps, shape, cases, timeout=200), cases)


def test_with_pipe(ranks) -> None:
    """Every stage has the rows of its group, and cuts them alike."""
    shape = Shape(z=2, pipe=2, context=2)
    cases = [("llama", documents, Policy(recompute=kind)) for documents in ("", "mixed") for kind in ("none", "block")]
    compare(ranks(shape.world).run(steps, shape, cases, timeout=200), cases)


# --- what travels


def sent_of(shape: Shape, documents: str, way: str) -> tuple[int, int, int]:
    """Bytes that this rank sends along context in forward, those that its part of the assignment says by hand, and
    those that `moved_by` says."""
    grid = grid_of(shape)
    tokens, targets, positions = (None if one is None else ff.local_rows(one, grid) for one in batch(documents))
    model = ff.models.build(CONFIGS["llama"], grid, policy=Policy(context_way=way), seed=SEED, dtype=torch.float64)
    with grid.ledger.watch() as records, torch.no_grad():
        model(tokens, targets, positions=positions)
    here = model.context_of(tokens.shape, positions)
    others = [other for other in range(here.members) if other != here.member]
    read = sum(len(rows) for other in others for rows, _ in here.assignment.sends(here.member, other))
    config, m, c = CONFIGS["llama"], here.tokens, here.members
    key, query = 2 * config.kv_heads * config.head_dim, config.heads * config.head_dim
    half = m * (2 * query + key) // 2  # of what two neighbours swap
    expected = {
        "gather": (c - 1) * m * key,
        "ring": (c - 1) * m * key,
        "exchange": read * key,
        "ulysses:2+gather": half + (c // 2 - 1) * 2 * m * key // 2,
    }
    sent = sum(record.wire_bytes for record in records if record.axis == CONTEXT)
    counted, _ = moved_by(here.assignment, here.way, here.member, query * 8, key * 8)
    return sent, config.layers * expected[way] * 8, config.layers * counted


@pytest.mark.parametrize("way", ["gather", "exchange", "ring", "ulysses:2+gather"])
@pytest.mark.parametrize("documents", ["", "mixed"])
def test_what_travels_is_e16(ranks, way: str, documents: str) -> None:
    for sent, expected, counted in ranks(4).run(sent_of, Shape(z=4, context=4), documents, way):
        assert sent == expected == counted
        assert sent or way == "exchange"


def test_documents_inside_a_place_send_nothing(ranks) -> None:
    assert set(ranks(4).run(sent_of, Shape(z=4, context=4), "one token", "exchange")) == {(0, 0, 0)}


# --- several steps


EXTREME = {"long": (90, *[1] * 6), "one token": (1,) * 96}
"""Documents of four rows: one that is 90 times as long as the others, and none that anybody else reads."""


def trained(shape: Shape, policy: Policy, lora: LoraConfig | None = None, dropout: float = 0.0) -> list[float]:
    """Losses of training with clipped gradients and of evaluation, in turn."""
    grid = grid_of(shape) if shape.world > 1 else Grid.alone("cpu")
    config = replace(CONFIGS["llama"], dropout=dropout, attention_dropout=0.0)
    model = ff.models.build(config, grid, policy=policy, seed=SEED, dtype=torch.float64, lora=lora)
    optimizer, found = ff.optim.AdamW(model, lr=1e-2), []
    tokens, targets, _ = batch("")
    for documents in EXTREME.values():
        loss = model.train()(tokens, targets, documents=documents)
        loss.backward()
        optimizer.clip_and_step(0.1)
        model.zero_grad()
        with torch.no_grad():
            found += [loss.item(), model.eval()(tokens, targets, documents=documents).item()]
    return found


@pytest.mark.parametrize(
    ("policy", "lora"),
    [(Policy(shard_optimizer=True), None), (Policy(context_way="ring"), LoraConfig(4))],
    ids=["sharded optimizer", "LoRA"],
)
def test_steps_are_those_of_one_process(ranks, policy: Policy, lora: LoraConfig | None) -> None:
    expected = trained(Shape(), replace(policy, shard_optimizer=False), lora)
    for found in ranks(2).run(trained, Shape(data=2, context=2), policy, lora):
        assert found == pytest.approx(expected, rel=0, abs=1e-12)


KINDS: tuple[Any, ...] = ("none", "block")


def test_dropout_is_drawn_again_as_it_was(ranks) -> None:
    """What runs again in backward drops the same units, and members of a group agree on every loss."""
    none, block = (ranks(2).run(trained, Shape(z=2, context=2), Policy(recompute=kind), None, 0.2) for kind in KINDS)
    assert none[0] == none[1]
    assert none == block
    assert none[0] != trained(Shape(), Policy())


# --- the rest of a model


def refused_without_documents(assignment: Any) -> list[bool]:
    """Whether `whole_rows` refuses logits of documents, and of plain rows, if it is not told of any."""
    grid, refused = grid_of(Shape(z=2, context=2)), []
    model = ff.models.build(CONFIGS["llama"], grid, policy=Policy(assignment=assignment))
    for documents in ("mixed", ""):
        tokens, _, positions = batch(documents)
        with torch.no_grad():
            own = model(tokens, positions=positions)
        try:
            model.whole_rows(own, tokens.shape)
            refused.append(False)
        except ValueError as error:
            refused.append("give whole_rows the same positions or documents" in str(error))
    return refused


def test_whole_rows_must_know_documents(ranks) -> None:
    """Without them, tokens would be put where they do not belong."""
    assert ranks(2).run(refused_without_documents, "auto") == [[True, False]] * 2
    assert ranks(2).run(refused_without_documents, "rows") == [[False, False]] * 2


def logits_of(shape: Shape, documents: str, rows: int, seq: int) -> Tensor:
    """Logits of the first row place, from rows whose tokens do not divide evenly."""
    grid = grid_of(shape)
    model = ff.models.build(CONFIGS["llama"], grid, seed=SEED, dtype=torch.float64)
    tokens, _, positions = (None if one is None else one[:rows, :seq] for one in batch(documents))
    return model.whole_rows(model(tokens, positions=positions), tokens.shape, positions).detach()


@pytest.mark.parametrize(("rows", "seq"), [(2, 24), (1, 7), (3, 5)])
@pytest.mark.parametrize("documents", ["", "mixed"])
def test_whole_rows_of_logits(ranks, rows: int, seq: int, documents: str) -> None:
    expected = logits_of(Shape(), documents, rows, seq)
    for found in ranks(4).run(logits_of, Shape(z=4, context=4), documents, rows, seq):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def generated(shape: Shape) -> list[list[int]]:
    model = ff.models.build(CONFIGS["llama"], grid_of(shape), seed=SEED)
    return generate(model, [[1, 2, 3], [4, 5], [6]], 4)


def test_generation(ranks) -> None:
    expected = generated(Shape())
    for found in ranks(4).run(generated, Shape(z=4, context=2)):
        assert found == expected


def refusals() -> list[str]:
    grid, said = grid_of(Shape(z=2, context=2)), []
    tokens = torch.zeros(2, 8, dtype=torch.long)
    model = ff.models.build(CONFIGS["gpt"], grid)
    own = model(tokens, documents=[3, 13])
    for act in (
        lambda: ff.models.build(CONFIGS["gpt"], grid, policy=Policy(context_way="ulysses:3"))(tokens, tokens),
        lambda: ff.models.build(CONFIGS["shared"], grid, policy=Policy(context_way="ulysses:2"))(tokens, tokens),
        lambda: Policy(context_way="around"),
        lambda: ff.models.build(replace(CONFIGS["gpt"], dropout=0.1), grid),
        lambda: ff.parallelize(torch.nn.Linear(4, 4), grid, policy=Policy(assignment="documents")),
        lambda: ff.models.build(CONFIGS["gpt"], grid)(tokens + grid.rank, tokens),
        lambda: model.whole_rows(own, (2, 8), documents=[3, 12]),
        lambda: model.whole_rows(own, (3, 8), documents=[3, 21]),
    ):
        try:
            act()
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_is_impossible_is_refused(ranks) -> None:
    for said in ranks(2).run(refusals):
        assert "3 neighbours do not divide context=2" in said[0]
        assert (
            "2 neighbours do not divide the 6 query heads and 3 KV heads of a rank; use ulysses:U with a U" in said[1]
        )
        assert "context_way='around': it is one of auto, gather, exchange, ring, ulysses:U" in said[2]
        assert "attention cannot drop weights; build the model with attention_dropout=0.0" in said[3]
        assert "where documents begin in a module's rows is not known; use 'rows' or 'auto'" in said[4]
        assert "different rows" in said[5] or "refused" in said[5]
        assert "got 15 tokens in 2 documents for 2 rows of 8 tokens, which are 16" in said[6]
        assert "logits of 8 tokens, but of 3 rows of 8 tokens this place holds 12" in said[7]


@pytest.mark.parametrize("text", ["ulysses:0", "ulysses:2+", "ulysses:2gather", "ulysses:", "+ring", "ulysses:2+auto"])
def test_ways_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"ulysses:U for U neighbours, at least 1, or ulysses:U\+ one of them"):
        Policy(context_way=text)
