"""Stages: which units a stage has, and which pipe rank holds it."""

from __future__ import annotations

import pytest

from fourfold.schedule.stages import Stages, place, stages_of


def test_placements() -> None:
    assert place("loop", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert place("wave", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert place("wave", 2, 4) == (0, 1, 1, 0, 0, 1, 1, 0)
    assert place("wave", 4, 1) == place("loop", 4, 1)
    assert stages_of(place("wave", 3, 2), 0) == (0, 5)  # the first and the last: a tied table needs no copy


@pytest.mark.parametrize("pipe", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("layers", [0, 1, 5, 12, 13])
def test_even_stages_hold_every_unit_once(layers: int, pipe: int, chunks: int) -> None:
    stages = Stages.even(layers, pipe, chunks, "wave")
    every = range(pipe * chunks)
    assert [unit for stage in every for unit in stages.units(stage)] == list(range(layers + 2))
    assert [layer for stage in every for layer in stages.layers_of(stage)] == list(range(layers))
    sizes = [len(stages.layers_of(stage)) for stage in every]
    assert max(sizes) - min(sizes) <= 1
    assert [stages.has_embedding(stage) for stage in every] == [stage == 0 for stage in every]
    assert [stages.has_head(stage) for stage in every] == [stage == every[-1] for stage in every]
    assert sorted(stage for rank in range(pipe) for stage in stages.of_rank(rank)) == list(every)


def test_uneven_and_empty_stages() -> None:
    stages = Stages((0, 1, 1, 4, 6), (0, 1, 2, 3), ("none", "none", "block", "none"))
    assert stages.layers == 4
    assert list(map(stages.layers_of, range(4))) == [range(0), range(0), range(3), range(3, 4)]
    assert [stages.has_embedding(stage) for stage in range(4)] == [True, False, False, False]
    assert [stages.has_head(stage) for stage in range(4)] == [False, False, False, True]
    alone = Stages((0, 3, 3, 4), (0, 1, 2))  # the head in a stage of its own, and an empty one before it
    assert [alone.has_head(stage) for stage in range(3)] == [False, False, True]
    assert [len(alone.layers_of(stage)) for stage in range(3)] == [2, 0, 0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (((0, 2, 4), (0, 1, 2)), "3 cuts for 3 stages: give the first unit of each stage, and the number of units"),
        (((0, 3, 2, 4), (0, 1, 2)), "stage 1 begins at unit 3 and ends before unit 2; cuts must not decrease"),
        (((1, 2, 4), (0, 1)), "miss a unit: the first must be 0, the embedding, and the last the number of units"),
        (((0, 1, 1), (0, 1)), "miss a unit"),
        (((0, 0, 3, 6), (0, 1, 0)), "the first takes the tokens and needs the embedding"),
        (((0, 3, 6, 6), (0, 1, 0)), "the last computes the loss and needs the head"),
        (((0, 2, 4), (0, 2)), "pipe rank 1 has no stage; give it one, if an empty one"),
        (((0, 2, 4), (0, 1), ("none",)), "recompute names 1 kinds for 2 stages: give one for each stage"),
    ],
)
def test_stages_that_make_no_sense(given: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Stages(*given)


def test_placements_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match=r"there is no placement 'wav' \(did you mean 'wave'\?\); use loop or wave"):
        place("wav", 2, 2)
    with pytest.raises(ValueError, match="pipe=0, chunks=1: a pipeline needs at least 1 rank and 1 chunk per rank"):
        place("loop", 0, 1)
