"""Plans of grids with a context size: where they are considered, what they cost, and packed documents of a sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

import fourfold as ff
from fourfold.axes import CONTEXT, CUTS
from fourfold.cli import main
from fourfold.context.assign import area, plan_context
from fourfold.ledger import Collective
from fourfold.planner.lengths import LengthSample
from fourfold.planner.machine import Seconds, load_machine
from fourfold.planner.price import Candidate, Task, price
from fourfold.planner.search import search
from fourfold.planner.space import Space, ways_of
from fourfold.policy import Policy
from fourfold.shape import Shape, shapes_of
from share import share

H100 = load_machine("dgx-h100")
LLAMA = ff.models.config("llama-3.1-8b")


def shapes() -> Iterator[Shape]:
    """Grids of 8 and 12 ranks in every order with every context size."""
    for world in (8, 12):
        for order in permutations(CUTS):
            for shape in shapes_of(world, order):
                for context in range(1, shape.places + 1):
                    if shape.places % context == 0:
                        yield shape.with_context(context)


def test_strides_lead_through_the_ranks_of_a_context_group() -> None:
    for shape in share(list(shapes()), 200):
        walked = [0]
        for stride, size in shape.strides(CONTEXT):
            walked = [rank + step * stride for step in range(size) for rank in walked]
        group = shape.context_ranks(0)
        assert set(walked) >= set(group), shape
        if shape.context % min(shape.context, shape.z) == 0:
            assert walked == group, shape


@pytest.mark.slow
def test_a_sequence_that_is_too_long_for_a_device_is_cut() -> None:
    space = Space(axes=("z", "data"))
    plan = search(Task(LLAMA, H100, 8, 131072), 16, space=space, simulations=8, top=3)
    assert all(one.candidate.shape.context > 1 for one in plan.ranked)
    best = plan.best.candidate
    assert best.rows * best.micro_steps * best.shape.row_places == 8
    assert plan.best.memory.total <= plan.task.usable_bytes
    short = search(Task(LLAMA, H100, 512, 2048), 16, space=space, simulations=8, top=3)
    assert all(one.candidate.shape.context == 1 for one in short.ranked)


def test_fewer_rows_than_places_share_them_unless_attention_drops_weights() -> None:
    small = ff.models.config("gpt-125m", seq=4096)
    space = Space(shapes=tuple(shape for shape in shapes_of(8) if shape.x * shape.y == 1))
    with pytest.raises(ValueError, match="do not divide a batch of 2 rows"):
        search(Task(small, H100, 2, 4096), 8, space=space)
    found = search(Task(small, H100, 2, 4096), 8, simulations=8)
    assert {one.candidate.shape.context for one in found.ranked} - {1}
    drops = replace(small, attention_dropout=0.1)
    assert all(one.candidate.shape.context == 1 for one in search(Task(drops, H100, 2, 4096), 8, simulations=8).ranked)


def test_the_way_of_k_and_v_is_chosen_by_its_price() -> None:
    task = Task(LLAMA, H100, 8, 32768)
    candidate = Candidate(Shape(z=8, context=8), Policy(compute_dtype=task.compute), 1, 8)
    assert ways_of(task, candidate) == [
        "ring", "ulysses:2+gather", "ulysses:2+ring", "ulysses:4+gather", "ulysses:4+ring", "ulysses:8",
    ]  # fmt: skip
    seconds = {
        way: price(task, replace(candidate, policy=replace(candidate.policy, context_way=way))).seconds
        for way in ("auto", *ways_of(task, candidate))
    }
    found = search(task, 8, space=Space(shapes=(candidate.shape,)), top=1)
    assert found.best.seconds <= 1.01 * min(seconds.values())


def test_an_all_to_all_pays_for_what_leaves_the_node() -> None:
    def cost(shape: Shape) -> float:
        record = Collective("all_to_all", CONTEXT, 1 << 30, shape.context, "kv", sent=1 << 29)
        return Seconds(H100, shape).collective(record)

    inside, across = Shape(z=16, context=8), Shape(z=16, context=16)
    far_apart = Shape(x=8, z=2, context=2)
    assert cost(inside) < cost(across) < cost(far_apart)


# --- packed documents


def test_documents_are_packed_and_cut_at_the_ends_of_rows() -> None:
    sample = LengthSample((5, 3, 12))
    assert sample.busiest(rows=2, seq=8, places=1) == (5, 3, 8)
    assert sample.busiest(rows=1, seq=8, places=4) == (8,)
    assert sample.busiest(rows=1, seq=8, places=1) == (5, 3)
    rows = (5, 3), (8,), (4, 4)  # 20 tokens are in three rows, with 4 of the next round
    pairs = sum(area(0, length) for row in rows for length in row)
    assert sample.reach(8) == round(2 * pairs / 24)


def test_a_plan_prices_the_busiest_member_and_balances_documents() -> None:
    sample = LengthSample((30000, *[600] * 60, 9000, *[300] * 40))
    task = Task(LLAMA, H100, 64, 16384, documents=sample)
    policy = Policy(compute_dtype=task.compute)
    alone, shared = Candidate(Shape(z=16), policy, 1, 4), Candidate(Shape(z=16, context=16), policy, 16, 4)
    documents = sample.busiest(16, 16384, 1)
    work = plan_context(policy.assignment, policy.context_way, 16, 16384, 16, documents)[0].work
    heads = LLAMA.heads * LLAMA.head_dim
    assert shared.sizes(task).attention_flops == 4 * max(work) * heads
    assert alone.sizes(task).attention_flops == 4 * sum(area(0, n) for n in sample.busiest(1, 16384, 16)) * heads
    assert shared.sizes(task).attention_flops < 0.8 * alone.sizes(task).attention_flops
    short = price(replace(task, documents=LengthSample((600, 300))), alone)
    plain = price(replace(task, documents=None), alone)
    assert short.seconds < 0.9 * plain.seconds and short.flops.model < plain.flops.model


def test_samples_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"sample": [3, 4]}))
    assert LengthSample.read(path).lengths == (3, 4)
    path.write_text("3\n4 5\n")
    assert LengthSample.read(path).lengths == (3, 4, 5)
    for wrong in ("{}", "a b", "", "3 0", '{"sample": [1.5, 2]}', '{"sample": [true]}', '{"sample": "34"}'):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="has no lengths of documents"):
            LengthSample.read(path)


@pytest.mark.slow
def test_the_command_explains_a_grid_and_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, document = tmp_path / "plan.html", tmp_path / "plan.json"
    asked = ["plan", "--model", "llama-3-8b", "--machine", "dgx-h100", "--devices", "4", "--seq", "131072"]
    written = ["--why", "z=4,context=4", "--html", str(page), "--json", str(document)]
    assert main([*asked, "--batch-tokens", "1M", "--top", "2", *written]) == 0
    assert "exposed over context" in capsys.readouterr().out and "context=" in page.read_text()
    grids = json.loads(document.read_text())["grids"]
    asked_for = next(one for one in grids if one["grid"]["context"] > 1)  # others save memory instead
    assert asked_for["policy"]["context_way"] and "context" in asked_for["link_seconds"]
