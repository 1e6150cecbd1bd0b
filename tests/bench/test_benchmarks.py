"""The benchmark of several ranks: its peers are what they claim to be, it measures, goes on, judges and survives."""

from __future__ import annotations

import ast
import json
import os
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

import plain
from benchmarks.shared import rank_pool
from benchmarks.shared.peers import PeerModel
from benchmarks.speed import gpu_ranks, gpu_ranks_table, rank_jobs
from benchmarks.speed.gpu_ranks_lines import MECHANISMS, WORKLOADS, lines_of
from benchmarks.speed.gpu_ranks_results import LineRecord, Results

pytestmark = pytest.mark.slow

TINY = WORKLOADS["tiny"]


MAY_IMPORT = {
    "shared": {"shared"},
    "speed": {"shared", "speed"},
    "cluster": {"shared", "cluster"},
    "planner": {"shared", "cluster", "planner"},
    "checkpoint": {"shared", "checkpoint"},
}


def test_benchmarks_import_one_way_and_define_each_class_once() -> None:
    folder = Path(gpu_ranks.__file__).parents[1]
    classes: dict[str, str] = {}
    imports: dict[str, set[str]] = {}
    for path in folder.rglob("*/*.py"):
        module = f"benchmarks.{path.parent.name}.{path.stem}"
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                assert node.name not in classes, f"{node.name} is defined in {classes[node.name]} and {module}"
                classes[node.name] = module
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        names = {name for node in found for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names))}
        imports[module] = {name for name in names if name.startswith("benchmarks.")}
        assert {name.split(".")[1] for name in imports[module]} <= MAY_IMPORT[path.parent.name], module
    TopologicalSorter({module: names & imports.keys() for module, names in imports.items()}).prepare()  # no cycles


def gradients_of_peer(
    data_parallel: int, tensor_parallel: int, explicit: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and whole gradients of a peer with the reference's weights."""
    mesh = init_device_mesh("cpu", (data_parallel, tensor_parallel), mesh_dim_names=("dp", "tp"))
    peer = PeerModel(TINY, mesh, explicit=explicit)
    weights = plain.make(TINY.config, 0, torch.float32).state_dict()
    set_model_state_dict(peer.module, weights, options=StateDictOptions(full_state_dict=True))
    loss = peer.forward_backward().item()
    found = {}
    for name, parameter in peer.module.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return loss, found


@pytest.mark.parametrize(("data_parallel", "tensor_parallel", "explicit"), [(4, 1, True), (1, 4, False), (2, 2, False)])
def test_peers_compute_what_one_process_computes(
    ranks: Any, data_parallel: int, tensor_parallel: int, explicit: bool
) -> None:
    found = ranks(4).run(gradients_of_peer, data_parallel, tensor_parallel, explicit)
    model = plain.make(TINY.config, 0)
    tokens, targets = TINY.batch(torch.device("cpu"))
    loss = functional.cross_entropy(model.logits(model.hidden(tokens)).flatten(0, 1), targets.flatten())
    loss.backward()
    assert sum(of_rank for of_rank, _ in found) / 4 == pytest.approx(loss.item(), rel=1e-6)
    scale = max(parameter.grad.abs().max().item() for parameter in model.parameters())
    for _, gradients in found:
        for name, parameter in model.named_parameters():
            # fp32: a few hundred roundings of 6e-8
            assert (gradients[name] - parameter.grad).abs().max().item() < 2e-5 * scale, name


def test_measures_goes_on_and_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.jsonl"

    def call(lines: str) -> dict[str, LineRecord]:
        options = ["--device", "cpu", "--rounds", "1", "--out", str(out), "--lines", lines]
        assert gpu_ranks.main(options) == 0
        return {line: record for (_, line), record in Results.open(out).records.items()}

    few = "FSDP2 z=4"
    more = f"{few}|FSDP2 x TP|fourfold x=2 z=2( replicated| Megatron.*)?$"
    first = call(few)
    assert len(first) == 1
    found = call(more)
    assert {line: found[line] for line in first} == first, "what was measured is not measured again"
    assert len(found) == 5
    for record in found.values():
        assert record.error is None
        assert len(record.seconds["step"]) == 1
        assert record.first_losses == pytest.approx(record.losses[:1], abs=1e-6), "a turn starts from the same weights"
        assert record.losses[0] == pytest.approx(torch.tensor(TINY.config.vocab).log().item(), abs=0.2)
        assert record.losses[1] < record.losses[0]
    plainly = found["fourfold x=2 z=2"]
    assert all(len(plainly.seconds[measure]) == 1 for measure in ("step", "compute", "communication"))
    assert plainly.collectives > 0
    monkeypatch.setattr(rank_pool.RankPool, "run", None)  # nothing is left for ranks to do
    assert call(more) == found
    text = out.with_suffix(".md").read_text()
    assert all(f"| {record.kind} " in text for record in found.values())
    assert "not slower than FSDP2 on z=4: not measured" in text
    assert "not slower than FSDP2 x TP on x=2 z=2: " in text
    assert "WRONG" not in text
    with pytest.raises(SystemExit, match="another --out"):
        gpu_ranks.main(["--device", "cpu", "--out", str(out), "--compile"])


def fail_on(held: rank_jobs.RankModels, ranks: list[int]) -> int:
    if held.rank in ranks:
        raise ValueError(f"rank {held.rank} will not")
    return os.getpid()


def test_a_line_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 0.5)
    six_rows = replace(TINY, rows=6)
    lines = [line for line in lines_of(4) if line.name in ("FSDP2 z=4", "TP x=4")]
    results = Results.open(tmp_path / "found.jsonl", {"compile": False})
    four = rank_pool.RankPool(4, "cpu", rank_jobs.RankModels)
    try:
        pids = four.run(fail_on, [])
        with pytest.raises(rank_pool.RanksFailedError, match="rank 0 will not") as failed:
            four.run(fail_on, [0, 1, 2, 3])
        assert failed.value.everyone
        assert four.run(fail_on, []) == pids
        gpu_ranks.GroupBenchmark("4:tiny", four, six_rows, lines, results, gpu_ranks.Clock(float("inf"))).measure(1, 1)
        assert "6 rows" in (results.of("4:tiny", lines[0]).error or "")
        assert results.of("4:tiny", lines[1]).measured
        with pytest.raises(rank_pool.RanksFailedError, match="rank 2 will not"):
            four.run(fail_on, [2])
        assert not four.up, "ranks that others may wait for are not used again"
    finally:
        four.close()


def test_a_budget_ends_before_a_round_that_does_not_fit() -> None:
    clock = gpu_ranks.Clock(100)
    clock.require("a round", 50)
    with pytest.raises(gpu_ranks.OutOfTime, match="a round would take 101 s more"):
        clock.require("a round", 101)


def test_every_grid_and_every_mechanism_has_a_line() -> None:
    four, eight = lines_of(4), lines_of(8)
    assert len({str(line.shape) for line in four if line.bounded}) == 10
    assert len({str(line.shape) for line in eight if line.bounded}) == 4
    for lines in (four, eight):
        assert len({line.name for line in lines}) == len(lines)
        grids = {str(line.shape) for line in lines if line.bounded}
        assert {str(line.shape) for line in lines if line.kind != "fourfold"} <= grids, (
            "each peer is met on its own grid"
        )
    assert {line.variant for line in four} >= set(MECHANISMS)


def recorded(kind: str, seconds: float, peak: int, **bounds: list[float]) -> LineRecord:
    grid = {"x": 1, "y": 1, "z": 4, "data": 1}
    times = {"step": [seconds * 0.99, seconds, seconds * 1.01], **bounds}
    return LineRecord("4:deep", f"{kind} z=4", kind, grid, "", times, [10.0, 9.0], [10.0], peak)


def test_missed_bars_stay_visible(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    run = {
        "command": "python it",
        "date": "2026-01-02",
        "device": "G",
        "torch": "2",
        "nccl": "3",
        "mps": "own",
        "cores": 1,
    }
    results = Results.open(path, {"compile": False})
    results.begin("4:deep", WORKLOADS["deep"], 4, run)

    def bars(ours: LineRecord) -> str:
        for record in (ours, recorded("FSDP2", 1.0, 100)):
            results.records[record.group, record.line] = record
        results.write()
        return gpu_ranks_table.render(path)

    good = bars(recorded("fourfold", 0.6, 105, compute=[0.4], communication=[0.55]))
    assert "MISSED" not in good
    assert "at least 1.25 times the best peer's speed, aiming at 1.5 (communication alone is 92% of the step)" in good
    assert "| fourfold | z=4 | 600.0 | 594.0 .. 606.0 |" in good
    bad = bars(recorded("fourfold", 1.1, 106, compute=[0.4], communication=[0.55]))
    assert bad.count("MISSED") == 6
    assert all(json.loads(line) for line in path.read_text().splitlines())
    strange = replace(recorded("fourfold", 0.6, 100), first_losses=[float("nan")])
    assert "**WRONG**" in bars(strange)
