"""Runs on grids with a context size: the curves of one process, checkpoints that load on other grids."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from curves import DOCUMENTS, PACKED, ROWS, SEQ, Case, alone, check, config_of, write_texts
from fourfold.grid import Grid, Shape
from fourfold.report.run_data import read_run
from fourfold.report.run_places import load_of
from fourfold.train.config import read_config
from fourfold.train.loop import Run, open_sources_here
from fourfold.train.planning import count_steps, resolve
from runs import column, lines_of, trained
from share import others_slow

STEPS = 3
CONSTANT = {"optimizer.schedule": "constant", "optimizer.warmup": 0, **PACKED}
"""A rate that does not depend on the number of steps."""
CASES = [
    Case(Shape(z=2, context=2), {}, PACKED),
    Case(Shape(x=2, z=2, context=2), {"policy.context_way": "ring", "policy.recompute": "block"}),
    Case(Shape(z=2, data=2, context=4), {"policy.shard_optimizer": True, "policy.assignment": "rows"}, PACKED),
    Case(Shape(data=2, pipe=2, context=2), {"policy.context_way": "gather"}, {"batch.micro_steps": 2, **PACKED}),
    Case(Shape(z=2, context=2), {}, {"data.pack": "whole"}),
    Case(Shape(x=2, z=2), {}, {"data.pack": "whole", "data.bag_rows": 2}),
    Case(Shape(data=2, pipe=2, context=2), {}, {"data.pack": "whole", "data.bag_rows": 4, "batch.micro_steps": 2}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("context")
    write_texts(made)
    return made


@pytest.mark.parametrize("case", others_slow(CASES, 4), ids=str)
def test_curves_are_those_of_one_process(ranks: Any, folder: Path, case: Case) -> None:
    found = check(ranks, "llama-tiny", "fp64", STEPS, folder, cases=[case], changes={"train.evaluate_every": 2})
    assert found[str(case)].largest < 1e-9


@pytest.mark.slow
def test_a_run_goes_on_without_context_and_with_it_again(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """Nothing that is stored depends on it."""
    run = tmp_path / "run"
    shapes = [Shape(z=2, context=2), Shape(x=2), Shape(data=2, context=2)]
    for number, shape in enumerate(shapes):
        config = config_of("llama-tiny", "fp64", number + 1, folder, shape, CONSTANT)
        ranks(2).run(partial(trained, resume=number > 0), config, run)
    one = alone("llama-tiny", "fp64", 3, folder, CONSTANT)
    assert column(run, "step", "loss") == pytest.approx(one["loss"], rel=1e-10)


@pytest.mark.slow
def test_bags_go_on_on_other_grids(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """With bags of equal size batches are those of one process, whatever the grid and the micro-steps are."""
    run, whole = tmp_path / "run", {**CONSTANT, "data.pack": "whole", "data.bag_rows": 2}
    for number, (shape, micro_steps) in enumerate([(Shape(z=2), 2), (Shape(z=2, context=2), 1), (Shape(x=2), 4)]):
        changes = {**whole, "batch.micro_steps": micro_steps}
        config = config_of("llama-tiny", "fp64", number + 1, folder, shape, changes)
        ranks(2).run(partial(trained, resume=number > 0), config, run)
    one = alone("llama-tiny", "fp64", 3, folder, whole)
    assert column(run, "step", "loss") == pytest.approx(one["loss"], rel=1e-10)


@pytest.mark.parametrize("way", ["exchange", "gather"])
def test_the_page_of_a_run_counts_what_its_ranks_sent(ranks: Any, folder: Path, tmp_path: Path, way: str) -> None:
    """From the recorded lengths alone: K and V in forward, again in backward, and their gradients back."""
    run, shape = tmp_path / "run", Shape(z=2, context=2)
    changes = {"policy.context_way": way, "batch.micro_steps": 2, "data.pack": "whole"}
    ranks(2).run(trained, config_of("llama-tiny", "fp64", STEPS, folder, shape, changes), run)
    found = read_run(run)
    (note,) = found.notes
    assert "documents are longer than a bag of 48 tokens and are cut into pieces" in note
    assert found.documents is not None and found.documents.step == STEPS
    load = load_of(found.documents)
    assert sum(place.tokens for place in load.places) == ROWS * SEQ
    sent = column(run, "step", "wire_bytes")[-1]["context"]
    assert sent == 2 * load.places[0].sent + load.places[0].received > 0
    assert column(run, "step", "imbalance")[-1] == pytest.approx(load.imbalance)


def test_documents_without_context_are_recorded_too(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(config_of("llama-tiny", "fp64", 1, folder, Shape(), PACKED), run)
    found = read_run(run).documents
    assert found is not None and sum(place.tokens for place in load_of(found).places) == ROWS * SEQ
    assert "imbalance" not in lines_of(run)[0]


def test_a_run_with_bags_says_what_is_padding(folder: Path, tmp_path: Path) -> None:
    """Tokens of bags that are not filled are not counted; documents that are cut are told once."""
    config = config_of("llama-tiny", "fp64", 3, folder, Shape(), {"data.pack": "whole", "batch.rows": 4})
    assert config.data.bag_rows == 4
    run = tmp_path / "run"
    trained(config, run)
    steps = [line for line in lines_of(run) if line["event"] == "step"]
    assert [0 <= line["padding"] < 0.5 for line in steps] == [True] * 3
    for line in steps:
        assert line["tokens_per_second"] * line["seconds"] == pytest.approx(48 * (1 - line["padding"]))
    notes = [line["said"] for line in lines_of(run) if line["event"] == "note"]
    assert len(notes) == 1 and "documents are longer than a bag of 48 tokens and are cut into pieces" in notes[0]


class Recorder:
    """Stands for a step graph: it notes the lengths that a step is given, and runs it."""

    replayed = False

    def __init__(self, run: Run, reason: str) -> None:
        self.run, self.reason = run, reason
        self.seen: list[Any] = []

    def __call__(self, batches: Any, *more: Any) -> Any:
        self.seen += [batch.documents for batch in batches]
        return self.run._compute(batches, *more)

    def on_stream(self) -> AbstractContextManager[None]:
        return nullcontext()

    def release(self) -> None:
        pass


@pytest.mark.parametrize("reason", ["", "something cannot be recorded"])
def test_a_recorded_step_has_no_lengths_of_the_host(folder: Path, tmp_path: Path, reason: str) -> None:
    """A replay would read those of the step that was recorded, so it gets a tensor with room for more documents, of the
    same size in every step; a step that is not recorded has them."""
    config = config_of("llama-tiny", "fp64", 2, folder, Shape(), {"data.pack": "whole"})
    run = Run(config, Grid.alone("cpu"), tmp_path)
    run.step_graph = graph = Recorder(run, reason)  # type: ignore[assignment]
    run.train()
    assert len(graph.seen) == 2
    assert all(isinstance(lengths, tuple) == bool(reason) for lengths in graph.seen)
    if not reason:
        assert len({len(lengths) for lengths in graph.seen}) == 1
        assert all(lengths.sum() == ROWS * SEQ and lengths[-1] == 0 for lengths in graph.seen)


def test_epochs_of_bags(folder: Path, tmp_path: Path) -> None:
    """Two epochs of 40 short documents: an epoch has the tokens that are not held out, and some padding."""
    changes = {"data.pack": "whole", "train.epochs": 2.0}
    config = config_of("llama-tiny", "fp64", 3, folder, Shape(), changes)
    sources = open_sources_here(config, tmp_path)
    tokens = sum(source.tokens for source in sources)
    steps = count_steps(config, sources).train.steps
    assert 2 * 0.9 * (tokens - DOCUMENTS) <= steps * ROWS * SEQ <= 2 * 0.9 * tokens / 0.8


def test_the_size_of_bags() -> None:
    def bag_rows(name: str, *changes: tuple[str, Any]) -> int | None:
        given = [("model.name", name), ("batch.rows", 12), ("batch.seq", 32), ("data.pack", "whole"), *changes]
        return resolve(read_config(None, given), 1, on_gpu=False, memory_bytes=1 << 34).data.bag_rows

    assert bag_rows("llama-tiny") == 12
    assert bag_rows("llama-tiny", ("batch.micro_steps", 3)) == 4
    assert bag_rows("llama-tiny", ("data.bag_rows", 6)) == 6
    assert bag_rows("gpt-tiny", ("model.seq", 160)) == 4  # five rows have learned positions, and four divide twelve
    for changes, message in (
        ((("data.bag_rows", 5),), "data: bag_rows=5: a place has 12 rows .* use bag_rows=4,"),
        ((("data.bag_rows", 24),), "data: bag_rows=24: a place has 12 rows .* use bag_rows=12,"),
        ((("data.pack", "windows"), ("data.bag_rows", 2)), 'bag_rows=2 is for data.pack="whole"'),
        ((("data.bag_rows", 0),), "bag_rows=0 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            bag_rows("llama-tiny", *changes)
    with pytest.raises(ValueError, match=r"documents have 192 tokens, but the model has 160 learned positions; .*=5"):
        bag_rows("gpt-tiny", ("model.seq", 160), ("data.bag_rows", 6))
    with pytest.raises(ValueError, match=r'data.pack="whole" needs a model that takes positions'):
        bag_rows("people:make_model")


def test_what_a_config_says() -> None:
    def config(*changes: tuple[str, Any]) -> Any:
        return read_config(None, [("model.name", "llama-tiny"), *changes])

    assert config(("grid.z", 4), ("grid.context", 2)).grid.shape == Shape(z=4, context=2)
    found = resolve(config(("grid.z", 2), ("grid.context", 2)), 2, on_gpu=False, memory_bytes=1 << 34)
    assert found.grid.shape == Shape(z=2, context=2)
    with pytest.raises(ValueError, match="context=2 needs a grid whose z and data it divides, such as --grid z=2"):
        config(("grid.context", 2))
    with pytest.raises(ValueError, match=r"context=3 does not divide data\*z = 4"):
        _ = config(("grid.z", 4), ("grid.context", 3)).grid.shape
