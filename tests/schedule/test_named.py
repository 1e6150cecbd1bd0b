"""Named schedules: valid for every size, with the idle time and memory that their papers state (E11)."""

from __future__ import annotations

import pytest

from fourfold.schedule.action import Action
from fourfold.schedule.named import BUILDERS, blocks, named
from fourfold.schedule.play import equal_seconds, play

SIZES = [(pipe, micro) for pipe in (1, 2, 3, 4, 7) for micro in (1, 2, 3, 4, 5, 8, 9)]
ALL = [(name, chunks) for name, (_, fits) in BUILDERS.items() for chunks in (1, 2, 3, 4) if chunks in fits]


@pytest.mark.parametrize(("name", "chunks"), [*ALL, ("blocks:1", 1), ("blocks:3", 2), ("blocks:20", 1)])
def test_every_size_is_valid(name: str, chunks: int) -> None:
    """Fewer micro-batches than ranks, one micro-batch and one rank too."""
    for pipe, micro in SIZES:
        named(name, pipe, chunks, micro).check()


@pytest.mark.parametrize(("pipe", "micro"), [(2, 4), (4, 8), (4, 16), (8, 24)])
@pytest.mark.parametrize("times", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.8)])
def test_idle_times_are_the_closed_forms(pipe: int, micro: int, times: tuple[float, float, float]) -> None:
    def idle(name: str, chunks: int = 1) -> tuple[float, ...]:
        return play(named(name, pipe, chunks, micro), equal_seconds(*times, pipe, chunks)).idle

    whole = (pipe - 1) * sum(times)
    for name in ("gpipe", "1f1b"):
        assert idle(name) == pytest.approx([whole] * pipe)
    for chunks in (2, 4):
        assert idle("interleaved", chunks) == pytest.approx([whole / chunks] * pipe)
        assert idle("looped-bfs", chunks) == pytest.approx([whole / chunks] * pipe)


def test_zb_h1_keeps_as_much_as_1f1b_and_waits_less() -> None:
    """(P - 1)(F + B - W), as Qi et al. state for H1, if W takes no longer than B."""
    for pipe, micro in ((2, 6), (4, 8), (8, 24)):
        for times in ((1.0, 1.0, 1.0), (1.0, 1.3, 0.8)):
            played = play(named("zb-h1", pipe, 1, micro), equal_seconds(*times, pipe, 1))
            assert played.idle == pytest.approx([(pipe - 1) * (times[0] + times[1] - times[2])] * pipe)
            assert max(played.peaks) == pipe


def test_v_half_keeps_half_of_1f1b() -> None:
    """And one micro-batch more; it waits half as long."""
    for pipe, micro in ((2, 4), (4, 16), (6, 24), (8, 24)):
        played = play(named("v-half", pipe, 2, micro), equal_seconds(1, 1, 1, pipe, 2))
        assert max(played.peaks) == pipe / 2 + 1
        assert played.idle == pytest.approx([1.5 * (pipe - 1)] * pipe)


def test_zb_v_keeps_as_much_as_1f1b_and_waits_only_while_the_first_micro_batch_goes_down() -> None:
    for pipe in (2, 3, 4, 8):
        for micro in (pipe, 2 * pipe, 2 * pipe + 1, 4 * pipe):
            played = play(named("zb-v", pipe, 2, micro), equal_seconds(1, 1, 1, pipe, 2))
            assert max(played.peaks) == pipe
            assert max(played.idle) == pytest.approx((pipe - 1) / 2)


def test_blocks_keep_a_block_and_wait_once() -> None:
    """W fills the turn from F to B in every block but the first, so further blocks add no idle time."""
    for pipe, chunks, size in ((4, 1, 8), (4, 2, 8), (8, 2, 16)):
        one, three = (
            play(blocks(pipe, chunks, micro, size), equal_seconds(1, 1, 1, pipe, chunks)) for micro in (size, 3 * size)
        )
        assert one.idle == three.idle == pytest.approx([2 * (pipe - 1) / chunks] * pipe)
        assert max(three.peaks) <= size + 2 * (pipe - 1) / chunks


def test_blocks_run_a_stage_without_another_in_between() -> None:
    schedule = blocks(2, 2, 8, 4)
    for order in schedule.orders:
        stages = [(kind, stage) for kind, stage, _ in order if kind != "W"]
        runs = [each for place, each in enumerate(stages) if place == 0 or stages[place - 1] != each]
        assert len(runs) == 2 * (2 * 2)  # two blocks, each with F and B of two stages


def test_worked_numbers() -> None:
    """F = B = W = 1, 4 ranks, 8 micro-batches."""
    expected = {("gpipe", 1): (33, 9, 8), ("1f1b", 1): (33, 9, 4), ("interleaved", 2): (28.5, 4.5, 5.5)}
    expected[("interleaved", 4)] = 26.25, 2.25, 4.75
    for (name, chunks), numbers in expected.items():
        played = play(named(name, 4, chunks, 8), equal_seconds(1, 1, 1, 4, chunks))
        assert (played.makespan, played.idle[0], played.peaks[0]) == pytest.approx(numbers)


def test_1f1b_by_hand() -> None:
    text = [" ".join(map(str, order)) for order in named("1f1b", 2, 1, 3).orders]
    assert text == [
        "F(0, 0) F(0, 1) BW(0, 0) F(0, 2) BW(0, 1) BW(0, 2)",
        "F(1, 0) BW(1, 0) F(1, 1) BW(1, 1) F(1, 2) BW(1, 2)",
    ]


def test_interleaved_has_megatrons_order() -> None:
    order = named("interleaved", 2, 2, 4).orders[0]
    assert [(action.stage, action.micro) for action in order if action.kind == "F"] == [
        (0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3),
    ]  # fmt: skip
    assert [(action.stage, action.micro) for action in order if action.kind == "BW"] == [
        (2, 0), (2, 1), (0, 0), (0, 1), (2, 2), (2, 3), (0, 2), (0, 3),
    ]  # fmt: skip
    assert order.index(Action("BW", 2, 0)) == 2 * (2 - 1) + (2 - 1) * 2 + 1  # after Megatron's warm-up and one F


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("1f1c", 2, 1, 4), r"there is no schedule '1f1c' \(did you mean '1f1b'\?\); choose from gpipe, 1f1b, "),
        (("blocks", 2, 1, 4), "'blocks': give the micro-batches of a block as a number, such as blocks:8"),
        (("blocks:0", 2, 1, 4), "give the micro-batches of a block as a number"),
        (("interleaved", 2, 1, 4), "it needs chunks=2 or more; with chunks=1 use gpipe, 1f1b, zb-h1 or blocks:u"),
        (("v-half", 2, 4, 4), "it needs chunks=2; with chunks=4 use interleaved, looped-bfs or blocks:u"),
        (("1f1b", 0, 1, 4), "pipe=0, chunks=1, micro-batches=4: a schedule needs at least 1 of each"),
    ],
)
def test_what_does_not_exist(given: tuple[str, int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        named(*given)
