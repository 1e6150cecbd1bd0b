"""Packed documents: each computes what it would alone, on every grid, and no byte more is communicated.

The oracle never packs: plain torch runs each document by itself.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fourfold as ff
import plain
from closed_form import APART
from fourfold.grid import Grid, Shape
from fourfold.nn.layer import specs_of
from fourfold.params import local_of
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy
from harness import grid_of, join_shards
from share import others_slow

SEED = 5
LENGTHS = ((5, 6), (11,), (1, 1, 9), (3, 7, 1))
"""Documents of each row. Cuts of 44 tokens over x=2 and x=3, and of 22 over x=2, fall inside some of them."""
SEQ = sum(LENGTHS[0])
SMALL = dict(layers=1, hidden=24, head_dim=8, mlp_hidden=24, vocab=29, seq=16)
GPT = ff.models.config("gpt-tiny", **SMALL)
LLAMA = ff.models.config("llama-tiny", **SMALL, kv_heads=3, qk_norm=True)
"""3 KV heads for 24: x or y of 2 cuts through them or leaves ranks without one of their own."""
CONFIGS = {"gpt": GPT, "llama": LLAMA}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """tokens, targets (some masked) and positions [rows, seq]."""
    generator = torch.Generator().manual_seed(SEED)
    tokens, targets = torch.randint(29, (2, len(LENGTHS), SEQ), generator=generator)
    targets = targets.masked_fill(torch.rand(targets.shape, generator=generator) < 0.2, -100)
    return tokens, targets, torch.stack([torch.cat([torch.arange(n) for n in row]) for row in LENGTHS])


def documents(rows: Tensor) -> list[Tensor]:
    """[1, length] each, in the order of the batch."""
    return [part for row, lengths in zip(rows, LENGTHS, strict=True) for part in row[None].split(lengths, dim=1)]


@cache
def alone(kind: str) -> tuple[list[Tensor], float, dict[str, Tensor]]:
    """Logits of each document, loss and gradients of the batch, in plain torch."""
    model = plain.make(CONFIGS[kind], SEED)
    tokens, targets, _ = batch()
    logits = [model.logits(model.hidden(document))[0] for document in documents(tokens)]
    loss = functional.cross_entropy(torch.cat(logits), torch.cat(documents(targets), dim=1)[0])
    loss.backward()
    return [part.detach() for part in logits], loss.item(), {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_token_of_a_packed_row_has_the_logits_of_its_document_alone(kind: str) -> None:
    model = ff.models.build(CONFIGS[kind], Grid.alone("cpu"), seed=SEED, dtype=torch.float64)
    tokens, _, positions = batch()
    packed, whole = model(tokens, positions=positions), model(tokens)
    for document, expected in zip(documents_of(packed), alone(kind)[0], strict=True):
        torch.testing.assert_close(document, expected, rtol=0, atol=1e-12)
    assert (packed - whole).abs().max() > 1e-3, "a model that reads across documents computes something else"
    narrow = model(tokens.int(), positions=positions.int())
    assert torch.equal(narrow, packed)


def documents_of(logits: Tensor) -> list[Tensor]:
    return [part for row, lengths in zip(logits, LENGTHS, strict=True) for part in row.split(lengths)]


@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_of_one_document_need_no_positions(kind: str) -> None:
    model = ff.models.build(CONFIGS[kind], Grid.alone("cpu"), seed=SEED, dtype=torch.float64)
    tokens, targets, _ = batch()
    found = []
    for positions in (None, torch.arange(SEQ).expand_as(tokens)):
        loss = model(tokens, targets, positions=positions)
        loss.backward()
        found.append((loss.detach(), [local_of(p.grad) for p in model.parameters()]))
        model.zero_grad()
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


def step(shape: Shape, policies: list[Policy], kinds: list[str]) -> list[dict[str, Any]]:
    """One forward and backward on packed rows under each policy and model."""
    grid = grid_of(shape)
    rows = [ff.local_rows(whole, grid).to(grid.device) for whole in batch()]
    found = []
    for policy in policies:
        for kind in kinds:
            model = ff.models.build(CONFIGS[kind], grid, policy=policy, seed=SEED, dtype=torch.float64)
            with grid.ledger.watch() as records:
                loss = model(*rows[:2], positions=rows[2])
                loss.backward()
            specs = specs_of(model)
            gradients = {n: join_shards(local_of(p.grad), specs[n], grid).cpu() for n, p in model.named_parameters()}
            found.append({"kind": kind, "loss": loss.item(), "gradients": gradients, "records": records})
    return found


CASES = [
    (Shape(x=3), [Policy()], ["gpt", "llama"]),  # 44 tokens over 3: padded
    (Shape(x=2, z=2), [Policy(overlap=APART)], ["gpt", "llama"]),
    (Shape(x=2, y=2), [Policy(), Policy("replicated")], ["gpt", "llama"]),
    (Shape(y=2, data=2), [Policy(), Policy(loss_chunk=9)], ["llama"]),
]
SOME = [pytest.param(*case, marks=[pytest.mark.slow] if place == 1 else []) for place, case in enumerate(CASES)]


@pytest.mark.parametrize(("shape", "policies", "kinds"), SOME, ids=[str(case[0]) for case in CASES])
def test_packed_rows_on_a_grid_equal_documents_alone_and_send_what_is_predicted(ranks, shape, policies, kinds) -> None:
    found = ranks(shape.world).run(step, shape, policies, kinds)
    for rank, results in enumerate(found):
        for index, result in enumerate(results):
            _, loss, gradients = alone(result["kind"])
            scale = max(gradient.abs().max() for gradient in gradients.values())
            assert result["loss"] == pytest.approx(loss, rel=1e-10)
            assert result["gradients"].keys() == gradients.keys()
            for name, gradient in gradients.items():
                assert (result["gradients"][name] - gradient).abs().max() <= 1e-10 * scale, name
            policy, rows = policies[index // len(kinds)], len(LENGTHS) // (shape.z * shape.data)
            sizes = LocalSizes(CONFIGS[result["kind"]], shape, policy, rows, SEQ, torch.float64, rank)
            assert Counter(result["records"]) == Counter(step_program(sizes, optimizer=False).records)


@pytest.mark.parametrize("shape", others_slow([Shape(x=2, y=2), Shape(x=2, z=2)], 2), ids=str)
def test_recompute_of_packed_rows_is_bitwise_equal(ranks, shape: Shape) -> None:
    policies = [Policy(recompute=kind) for kind in ("none", "attention", "block")]
    for none, *others in ranks(4).run(step, shape, policies, ["llama"]):
        for other in others:
            assert other["loss"] == none["loss"]
            for name, gradient in none["gradients"].items():
                assert torch.equal(other["gradients"][name], gradient), name


COUNT_UP = "positions must start at 0 in every row, then count up by 1 or start again at 0"
FLOATS = "positions has dtype torch.float64; ids must be torch.int64 or torch.int32"
ELSEWHERE = "the batch of another place was refused; see the error of its ranks"


def wrong_positions() -> dict[str, Tensor]:
    """Faults of a place that has 2 rows."""
    good = torch.arange(SEQ).repeat(2, 1)
    late, jumping, back = good.clone(), good.clone(), good.clone()
    late[1] += 1
    jumping[1, 6:] += 1
    back[0, 6:] -= 3
    return {
        "late": late,
        "jumping": jumping,
        "back": back,
        "standing": good.clamp(max=5),
        "negative": good - 1,
        "short": good[:, 1:],
        "one row": good[0],
        "floats": good.double(),
    }


def refused() -> dict[str, str]:
    """The error of each fault, when every place has it and when the second place alone has it."""
    grid = grid_of(Shape(x=2, z=2))
    model = ff.models.build(LLAMA, grid, seed=SEED, dtype=torch.float64)
    tokens, targets, positions = (ff.local_rows(whole, grid).to(grid.device) for whole in batch())
    found = {}
    for name, wrong in wrong_positions().items():
        for where, given in ((name, wrong), (f"{name} at z=1", wrong if grid.coords["z"] else positions)):
            try:
                model(tokens, targets, positions=given.to(grid.device))
            except ValueError as error:
                found[where] = str(error)
    found["good"] = f"{model(tokens, targets, positions=positions).item():.9f}"
    return found


def test_wrong_positions_are_refused_on_all_ranks_and_the_next_batch_works(ranks) -> None:
    shapes = {"short": (2, SEQ - 1), "one row": (SEQ,)}
    for rank, found in enumerate(ranks(4).run(refused)):
        for name in wrong_positions():
            message = COUNT_UP
            if name in shapes:
                message = f"positions {shapes[name]} and tokens (2, {SEQ}) differ in shape"
            elif name == "floats":
                message = FLOATS
            assert found[name] == message
            # ranks 2 and 3 are those of z=1
            assert found[f"{name} at z=1"] == (message if rank >= 2 else ELSEWHERE)
        assert found["good"] == f"{alone('llama')[1]:.9f}"
