"""The benchmarks of mixtures of experts: sides compute the same, bounds do what a step does, missed bars are said."""

from __future__ import annotations

import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch

import fourfold as ff
from benchmarks.experts import block, deepspeed_moe, products
from benchmarks.experts.bounds import COLLECTIVES, Bounds, MessageBuffers
from benchmarks.experts.waits import HostWaits, WaitTimes
from benchmarks.experts.workload import BlockSize, FourfoldBlock, Way, weights_of
from benchmarks.shared.rank_pool import RankPool
from fourfold import wire

CPU = torch.device("cpu")
SMALL = BlockSize(experts=4, chosen=2, width=16, hidden=8, tokens=12)


@pytest.mark.slow
def test_every_grid_computes_what_plain_torch_does(tmp_path: Path) -> None:
    out = tmp_path / "block.md"
    small = ["--experts", "8", "--chosen", "2", "--tokens", "24", "--rounds", "2", "--wait", "--out", str(out)]
    assert block.main(["--device", "cpu", *small]) == 0, "no side differs by more than rounding"
    text = out.read_text()
    sides = [block.PLAIN, *map(str, block.ways_on(4))]
    assert all(f"| {side} " in text for side in sides)
    assert "WRONG" not in text and "times as fast as plain torch: " in text
    waiting = text.split("## Waits for counts")[1]
    assert f"| {block.PLAIN} " in waiting and "| fourfold z=4 expert=4 halves " in waiting
    assert "| fourfold z=4  " not in waiting, "weights travel, and nobody counts"
    with pytest.raises(SystemExit):
        block.main(["--device", "cpu", "--ranks", "3"])


def bounds_of_a_step(state: block.BlockRank, way: Way) -> tuple[int, int, list[int]]:
    """Return how many messages are sent again, how many a step has, and the rows that they send."""
    side = FourfoldBlock(state, way, SMALL, weights_of(SMALL, CPU))
    bounds = Bounds(side.step, side.grid, MessageBuffers())
    with side.grid.ledger.watch() as records:
        side.step()
    with side.grid.ledger.watch() as again, ExitStack() as stack:
        for name in COLLECTIVES:
            stack.enter_context(mock.patch.object(wire, name, side_effect=AssertionError(f"{name} was sent")))
        bounds.compute()
    assert [record.nbytes for record in again] == [
        record.nbytes for record in records if record.label != "moe" or record.nbytes != 8 * 4
    ], "a muted step has the messages of a real one, except for the counts"
    bounds.communicate()
    return len(bounds.messages), len(records), [sum(each.sent) for each in bounds.counts]


@pytest.mark.slow
def test_bounds_have_the_messages_and_the_counts_of_a_step() -> None:
    pool = RankPool(2, "cpu", block.BlockRank)
    try:
        for halves in (1, 2):
            for again, sent, rows in pool.run(bounds_of_a_step, Way(ff.Shape(z=2, expert=2), halves)):
                assert again == sent > 0
                part = SMALL.tokens // halves  # each goes to one rank or to both, however many experts it has there
                assert len(rows) == halves
                assert all(part <= sent <= 2 * part for sent in rows)
        for again, sent, rows in pool.run(bounds_of_a_step, Way(ff.Shape(x=2))):
            assert again == sent > 0
            assert rows == []
    finally:
        pool.close()


def test_waits_are_timed_and_taken_once() -> None:
    waits = HostWaits(CPU)
    for _ in range(2):
        with waits.waiting():
            time.sleep(0.01)
    found = waits.take()
    assert found.number == 2
    assert found.host == found.idle >= 0.02
    assert waits.take() == WaitTimes(0, 0.0, 0)


def answer(step: float, compute: float, communication: float, error: float) -> block.Answer:
    """Two rounds in which plain torch takes 1 s, then 2 s, and one side of Fourfold as many times these."""
    rounds = [
        {
            block.PLAIN: block.MeasuredStep(plain, None, None, WaitTimes(1, 0.01, 0.004)),
            "ours": block.MeasuredStep(plain * step, compute, communication, WaitTimes(0, 0.0, 0.0)),
        }
        for plain in (1.0, 2.0)
    ]
    return block.Answer(SMALL, {"ours": error}, rounds)


def test_missed_bars_of_a_block_stay_visible() -> None:
    good = block.page([answer(0.8, 1.1, 0.5, 1e-7)], "cpu", "here")
    assert "MISSED" not in good and "WRONG" not in good
    assert "1.1 times as fast as plain torch: reached, 1.25 times (ours)" in good
    assert "reached, 1.09 (ours)" in good, "1.2 s of 1.1 s"
    assert "| 4       | 2      | plain torch | 1               | 10.00          | 4.00            | 0.3% " in good
    bad = block.page([answer(0.95, 1.0, 0.5, 1e-3), block.Answer(SMALL)], "cpu", "here")
    assert bad.count("MISSED") == 2
    assert "1e-03 **WRONG**" in bad
    assert "Not measured, for lack of time: 4 experts, 2 chosen." in bad


def test_the_slowest_rank_counts() -> None:
    ranks = [
        block.MeasuredStep(1.0, 0.5, 0.9, WaitTimes(1, 0.2, 0.1)),
        block.MeasuredStep(2.0, 0.4, 0.3, WaitTimes(1, 0.1, 0.2)),
    ]
    assert block.slowest(ranks) == block.MeasuredStep(2.0, 0.5, 0.9, WaitTimes(1, 0.2, 0.2))
    plain = [block.MeasuredStep(1.0, None, None, None)] * 2
    assert block.slowest(plain) == plain[0]


def test_all_ways_to_multiply_compute_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    size = products.ProductSize(3, 4, 8, 5)
    for ways in products.ways_of(size, CPU, torch.float64).values():
        products.require_equal(ways, 1e-12)
        wrong = {**ways, products.LOOP: lambda ways=ways: 1.1 * ways[products.LOOP]()}
        with pytest.raises(ValueError, match=r"loop differs from bmm by 1\.0e-01"):
            products.require_equal(wrong, 1e-2)
    (row,) = products.rows_of(size, {"E1": {"grouped": 1e-9, "bmm": 0.8e-9, "loop": 2e-9}})
    assert row[-2:] == ["0.80", "0.85: **MISSED**"]
    with mock.patch.object(torch.cuda, "is_available", lambda: False), pytest.raises(SystemExit):
        products.main([])
    assert "on the CPU it is a loop" in capsys.readouterr().err


def test_the_table_beside_deepspeed_judges_the_fastest_grid() -> None:
    def rank(*seconds: float) -> list[dict[str, list[object]]]:
        sides = (deepspeed_moe.DEEPSPEED, "slow", "fast")
        return [
            {side: [[each, each], 1e-3 if side == "slow" else 0.0] for side, each in zip(sides, seconds, strict=True)}
        ]

    lines = deepspeed_moe.table([rank(1.0, 3.0, 0.5), rank(0.5, 1.0, 0.9)], [SMALL])
    assert ["reached" in line for line in lines[2:]] == [False, False, True]
    assert "| slow      | 3000.0 | 3.00 " in lines[3] and "1e-03 **WRONG**" in lines[3]
    assert "| fast      | 900.0  | 0.90 " in lines[4], "the slowest rank counts"
    assert "1.0: **MISSED**" in deepspeed_moe.table([rank(1.0, 3.0, 1.5)], [SMALL])[4]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("deepspeed"), reason="deepspeed is not installed")
def test_deepspeed_computes_what_we_do(tmp_path: Path) -> None:
    out = tmp_path / "deepspeed.md"
    small = ["--tokens", "16", "--width", "32", "--hidden", "16", "--rounds", "2", "--out", str(out)]
    assert deepspeed_moe.main(small) == 0
    assert "WRONG" not in out.read_text()
