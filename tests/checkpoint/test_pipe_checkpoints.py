"""Checkpoints of pipelines: any grid and any stages load what any others have saved, bit for bit."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fourfold as ff
from checkpoints import everything
from fourfold.checkpoint.dcp import from_dcp, to_dcp
from fourfold.checkpoint.format import Record, TensorFile, rank_file, read_record, write_record
from fourfold.checkpoint.load import load_training, read_full_tensor, verify_checkpoint
from fourfold.checkpoint.save import Saver
from fourfold.cli import main
from fourfold.grid import Grid, Shape
from fourfold.nn.lora import LoraConfig
from fourfold.optim import SGD, AdamW, ShardedOptimizer, on_shards
from fourfold.params import local_of
from fourfold.schedule.stages import Stages
from fourfold.train.config import read_config
from fourfold.wrap import whole_tensors
from harness import DEVICE, grid_of, what_is_said

LAYERS, SEQ, ROWS, VOCAB = 4, 8, 4, 53
STEPS, SAVE_AT = 3, 1


@dataclass(frozen=True)
class Side:
    """A grid, and how a model lies on it."""

    shape: Shape
    stages: Stages | None = None
    sharded: bool = False

    def __str__(self) -> str:
        cuts = "" if self.stages is None else f" cuts={','.join(map(str, self.stages.cuts))}"
        return f"{self.shape}{cuts}{' sharded' if self.sharded else ''}"


@dataclass(frozen=True)
class Kind:
    """A model."""

    tied: bool = True
    rank: int = 0
    """The rank of its LoRA pairs; 0: no pairs, and everything is trained."""

    def __str__(self) -> str:
        return f"{'tied' if self.tied else 'untied'}{' lora' if self.rank else ''}"


def made(kind: Kind, side: Side, seed: int = 0) -> tuple[ff.models.Transformer, AdamW]:
    sizes: dict[str, Any] = dict(layers=LAYERS, hidden=16, heads=4, kv_heads=4, head_dim=4, mlp_hidden=24)
    config = ff.models.config("gpt-tiny", **sizes, vocab=VOCAB, seq=SEQ, tied=kind.tied)
    grid = Grid.alone(DEVICE) if side.shape.world == 1 else grid_of(side.shape)
    policy = ff.Policy(shard_optimizer=side.sharded, stages=side.stages)
    lora = LoraConfig(kind.rank) if kind.rank else None
    model = ff.models.build(config, grid, policy=policy, seed=seed, dtype=torch.float64, lora=lora)
    return model, AdamW(model, 1e-2)


def take(model: ff.models.Transformer, optimizer: AdamW, step: int) -> float:
    """One step of two micro-batches, the same on every grid."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (2, ROWS, SEQ + 1), generator=generator, device="cpu").to(DEVICE)
    rows = [ff.local_rows(part, model.grid) for part in tokens]
    loss = ff.forward_backward(model, [(part[:, :-1], part[:, 1:]) for part in rows])
    optimizer.clip_and_step(1.0)
    optimizer.zero_grad()
    return loss.item()


def trained(root: Path, kind: Kind, side: Side) -> dict[str, Any]:
    """Train and save after one of the steps: the losses, what was saved, and how the run ended."""
    model, optimizer = made(kind, side)
    saver = Saver(model.grid, root)
    losses, saved = [], {}
    for step in range(1, STEPS + 1):
        losses.append(take(model, optimizer, step))
        if step == SAVE_AT:
            saved = everything(model, optimizer)
            saver.save(step, model, optimizer, {"told": "by the test"})
    saver.wait()
    return {"losses": losses, "saved": saved, "ended": everything(model, optimizer)}


def resumed(folder: Path, kind: Kind, side: Side) -> dict[str, Any]:
    """Load into a model of other weights and go on."""
    model, optimizer = made(kind, side, seed=1)
    state = load_training(folder, model, optimizer)
    loaded = everything(model, optimizer)
    losses = [take(model, optimizer, step) for step in range(SAVE_AT + 1, STEPS + 1)]
    return {"losses": losses, "loaded": loaded, "state": state, "ended": everything(model, optimizer)}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


LOOP, WAVE = Stages.even(LAYERS, 2, 2), Stages.even(LAYERS, 2, 2, "wave")
UNEVEN, EMPTY = Stages((0, 4, 6), (0, 1)), Stages((0, 2, 2, 5, 6), (0, 1, 0, 1))
TIED, UNTIED, LORA = Kind(), Kind(tied=False), Kind(rank=2)

PAIRS = [
    (TIED, Side(Shape(data=2), sharded=True), Side(Shape(pipe=2), UNEVEN)),
    (UNTIED, Side(Shape(pipe=2), LOOP), Side(Shape(x=2))),
    (TIED, Side(Shape(pipe=2, x=2)), Side(Shape(z=2, data=2), sharded=True)),
    (UNTIED, Side(Shape(data=2, z=2)), Side(Shape(pipe=4))),
    (TIED, Side(Shape(pipe=4)), Side(Shape(pipe=2, data=2), LOOP, sharded=True)),
    (UNTIED, Side(Shape(pipe=2, y=2), LOOP), Side(Shape(pipe=4))),
    (LORA, Side(Shape(pipe=4), Stages((0, 1, 3, 5, 6), (0, 1, 2, 3))), Side(Shape(x=2, pipe=2), UNEVEN)),
    (TIED, Side(Shape(pipe=2, z=2, order=("pipe", "z", "x", "y", "data")), UNEVEN), Side(Shape(pipe=2, x=2), EMPTY)),
    (UNTIED, Side(Shape(pipe=2, data=2), WAVE, sharded=True), Side(Shape(pipe=2, data=2))),
    (TIED, Side(Shape(pipe=2, data=2), WAVE), Side(Shape(y=2, pipe=2), sharded=True)),
    (LORA, Side(Shape(x=2, z=2)), Side(Shape(pipe=2, data=2), EMPTY, sharded=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "one", "other"), PAIRS, ids=str)
def test_any_grid_loads_what_any_other_has_saved(ranks, tmp_path: Path, kind: Kind, one: Side, other: Side) -> None:
    """Also the grid that saved, and one process; the same grid goes on bit for bit."""
    pool = ranks(one.shape.world)
    first = pool.run(trained, tmp_path, kind, one)
    folder = tmp_path / "step-00000001"
    assert all(equal(found["saved"], first[0]["saved"]) for found in first)
    again, elsewhere = (pool.run(resumed, folder, kind, side) for side in (one, other))
    for found in (*again, *elsewhere):
        assert equal(found["loaded"], first[0]["saved"])
        assert found["state"]["told"] == "by the test"
    assert all(equal(found["ended"], first[0]["ended"]) for found in again)
    assert again[0]["losses"] == first[0]["losses"][SAVE_AT:]
    assert elsewhere[0]["losses"] == pytest.approx(first[0]["losses"][SAVE_AT:], rel=1e-11)
    alone = resumed(folder, kind, Side(Shape()))
    assert equal(alone["loaded"], first[0]["saved"])
    assert alone["losses"] == pytest.approx(first[0]["losses"][SAVE_AT:], rel=1e-11)


# On two ranks, small

PIPE = Side(Shape(pipe=2))


@pytest.mark.slow
def test_the_record_says_who_held_what(ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that two pipe ranks hold is written once; what all hold, or each has a row of, lists no ranks."""
    ranks(2).run(trained, tmp_path, TIED, PIPE)
    folder = tmp_path / "step-00000001"
    entries = json.loads((folder / "checkpoint.json").read_text())["tensors"]
    record = verify_checkpoint(folder)
    assert record.grid == Shape(pipe=2)
    assert record.state["training"]["pipeline"] == {"cuts": [0, 3, 6], "placement": [0, 1], "schedule": "auto"}
    alone, _ = made(TIED, Side(Shape()))
    assert record.names("model/") == [f"model/{name}" for name, _ in alone.named_parameters()]
    held = {name: entry.get("pipe") for name, entry in entries.items()}
    assert held["model/embedding.weight"] is held["random/cpu"] is held["random/clock"] is None
    assert held["model/layers.1.mlp.up.weight"] == held["optimizer/exp_avg/positions.weight"] == [0]
    assert held["model/norm.weight"] == held["optimizer/step/layers.2.mlp.up.weight"] == [1]
    files = [{*TensorFile(folder / rank_file(rank)).tensors} for rank in range(2)]
    assert files[0] & files[1] == {"random/cpu"}
    assert files[0] | files[1] == record.tensors.keys()
    assert main(["checkpoint", "inspect", str(folder)]) == 0
    shown = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if "/" in line}
    assert shown["model/norm.weight"].endswith("dim 0 over y, z; on pipe 1")
    assert shown["model/embedding.weight"].endswith("dim 1 over y")
    to_dcp(folder, tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "back")
    back = read_record(tmp_path / "back")
    for name in record.tensors:
        assert torch.equal(read_full_tensor(folder, record, name), read_full_tensor(tmp_path / "back", back, name))


def rewritten(folder: Path, record: Record, name: str, pipe: list[int]) -> Path:
    """The record with other pipe ranks for a tensor."""
    tensors = {**record.tensors, name: replace(record.tensors[name], pipe=tuple(pipe))}
    write_record(folder, Record(record.grid, record.state, tensors, record.files))
    return folder


def test_a_record_that_lists_impossible_pipe_ranks_is_refused(ranks, tmp_path: Path) -> None:
    ranks(2).run(trained, tmp_path, TIED, PIPE)
    folder = tmp_path / "step-00000001"
    record = read_record(folder)
    for wrong in ([2], [-1], [1, 0], [0, 0]):
        with pytest.raises(ValueError, match=r"'model/norm.weight' is on the pipe ranks .* of 2"):
            read_record(rewritten(folder, record, "model/norm.weight", wrong))
    with pytest.raises(ValueError, match=r"'random/cpu' is cut over pipe, and only on its ranks \(0,\)"):
        read_record(rewritten(folder, record, "random/cpu", [0]))


def continues(folder: Path) -> dict[str, Any]:
    """Random states, dropout, options and extra state, by way of `ff.save` and `ff.load`, with an optimizer of torch's
    that has two groups; the copy of the model goes on bit for bit."""
    grid = grid_of(Shape(pipe=2))
    config = ff.models.config("gpt-tiny", layers=2, vocab=VOCAB, seq=SEQ, dropout=0.2)

    def both(seed: int, rate: float) -> tuple[ff.models.Transformer, torch.optim.Optimizer]:
        model = ff.models.build(config, grid, policy=ff.Policy(schedule="zb-h1"), seed=seed, dtype=torch.float64)
        split = [[each for each in model.parameters() if (each.dim() > 1) is wide] for wide in (True, False)]
        groups = [{"params": split[0], "weight_decay": 0.1}, {"params": split[1], "weight_decay": 0.0}]
        return model, torch.optim.AdamW(groups, lr=rate)

    def steps(model: ff.models.Transformer, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
        losses = []
        for number in numbers:
            tokens = torch.randint(VOCAB, (2, 3, SEQ), generator=torch.Generator().manual_seed(number)).to(DEVICE)
            losses.append(ff.forward_backward(model, [(part, part) for part in tokens]).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    model, optimizer = both(0, 0.1)
    torch.manual_seed(grid.rank)
    ff.save(folder, model, optimizer)  # before any step, so without moments: the next one replaces it
    steps(model, optimizer, range(2))
    ff.save(folder, model, optimizer, extra={"of": grid.rank})
    drawn, losses = torch.rand(3), steps(model, optimizer, range(2, 4))
    other, its_optimizer = both(1, 0.3)
    extra = ff.load(folder, other, its_optimizer)
    same = torch.equal(torch.rand(3), drawn)
    again = steps(other, its_optimizer, range(2, 4))
    options = [(group["lr"], group["weight_decay"]) for group in its_optimizer.param_groups]
    alike = [torch.equal(local_of(a), local_of(b)) for a, b in zip(model.parameters(), other.parameters(), strict=True)]
    return {"extra": extra, "random": same, "losses": again == losses, "options": options, "alike": all(alike)}


def test_a_loop_of_ones_own_goes_on_bit_for_bit(ranks, tmp_path: Path) -> None:
    expected = {"random": True, "losses": True, "options": [(0.1, 0.1), (0.1, 0.0)], "alike": True, "extra": {"of": 0}}
    assert ranks(2).run(continues, tmp_path / "last") == [expected, expected]


def refusals(folder: Path) -> dict[str, str]:
    """What is said where ranks along pipe, or a checkpoint and all of them together, do not fit."""
    side = Side(Shape(pipe=2))
    model, optimizer = made(UNTIED, side)
    grid, here = model.grid, grid_of(side.shape).coords["pipe"]
    ff.save(folder, model, optimizer)
    longer = ff.models.build(replace(model.config, layers=LAYERS + 1), grid, dtype=torch.float64)
    plain = torch.optim.AdamW(model.parameters(), lr=0.1 + here)
    some = torch.optim.AdamW([each for name, each in model.named_parameters() if name != "norm.weight"])
    not_finite, _ = made(UNTIED, side)
    if here == 1:
        local_of(not_finite.norm.weight)[0] = nan
    acts = {
        "more layers": lambda _: ff.load(folder, longer),
        "fewer layers": lambda _: ff.load(folder.parent / "longer", model),
        "tied": lambda _: ff.load(folder, made(TIED, side)[0]),
        "options": lambda _: ff.save(folder, model, plain),
        "no optimizer": lambda _: ff.save(folder, model, optimizer if here == 0 else None),
        "class": lambda _: ff.save(folder, model, (torch.optim.SGD if here else torch.optim.Adam)(model.parameters())),
        "groups": lambda _: ff.load(folder.parent / "some", model, torch.optim.AdamW(model.parameters())),
        "nan": lambda _: ff.save(folder, not_finite),
    }
    ff.save(folder.parent / "longer", longer)
    ff.save(folder.parent / "some", model, some)
    said = what_is_said(acts, grid)
    verify_checkpoint(folder)
    return said


def test_names_are_judged_over_all_pipe_ranks(ranks, tmp_path: Path) -> None:
    first, second = ranks(2).run(refusals, tmp_path / "last")
    for said in (first, second):
        assert "is of another model: it lacks 'model/layers.4.attention_norm.weight'" in said["more layers"]
        assert "it also holds 'model/layers.4.attention_norm.weight'" in said["fewer layers"]
        assert "is of another model: it also holds 'model/head.weight'" in said["tied"]
        assert "parameter group 0 has lr=1.1 on pipe rank 1 and lr=0.1 on an earlier one" in said["options"]
        assert said["no optimizer"].startswith("pipe rank 1 was given no optimizer, and others were")
        assert "is torch.optim.adam.Adam on pipe rank 0 and torch.optim.sgd.SGD on pipe rank 1" in said["class"]
        assert "parameter group 0 of this optimizer also holds 'norm.weight'" in said["groups"]
        assert "'model/norm.weight' holds NaN or infinity" in said["nan"]


def with_a_frozen_stage(folder: Path, kind: str) -> dict[str, Any]:
    """The first pipe rank trains nothing; its optimizer has the groups of the others, and no state."""

    def both(seed: int) -> tuple[ff.models.Transformer, torch.optim.Optimizer]:
        model, _ = made(UNTIED, PIPE, seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("layers.3", "norm", "head")))
        if kind == "torch":
            return model, torch.optim.AdamW([{"params": [each for each in model.parameters() if each.requires_grad]}])
        makers = {"AdamW": AdamW, "SGD": SGD, "Adam": partial(on_shards(torch.optim.Adam), weight_decay=0.1)}
        return model, makers[kind](model, 1e-2)

    model, optimizer = both(0)
    tokens = torch.arange(2 * SEQ, device=DEVICE).view(2, SEQ)
    ff.forward_backward(model, [(tokens, tokens)])
    if isinstance(optimizer, ShardedOptimizer):
        norm = optimizer.clip_and_step(1.0).norm
    else:
        norm = ff.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    ff.save(folder, model, optimizer)
    other, its_optimizer = both(1)
    ff.load(folder, other, its_optimizer)
    return {
        "norm": norm.item(),
        "same": equal(everything(other, its_optimizer), everything(model, optimizer)),
        "state": sum(map(bool, optimizer.state.values())),
    }


LATER = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("SGD", "Adam", "torch")]


@pytest.mark.parametrize("kind", ["AdamW", *LATER])
def test_a_stage_may_be_frozen(ranks, tmp_path: Path, kind: str) -> None:
    first, second = ranks(2).run(with_a_frozen_stage, tmp_path / "last", kind)
    assert first["norm"] == second["norm"] > 0
    assert first["same"] and second["same"]
    assert first["state"] == 0 < second["state"]


def blamed(_: Path) -> str | None:
    """A gradient that is not finite, of a parameter that only the second pipe rank has."""
    model, optimizer = made(UNTIED, PIPE)
    tokens = torch.arange(2 * SEQ, device=DEVICE).view(2, SEQ)
    ff.forward_backward(model, [(tokens, tokens)])
    if model.grid.coords["pipe"] == 1:
        local_of(model.head.weight.grad)[0, 0] = nan
    return optimizer.clip_and_step(1.0).first_not_finite()


def test_a_gradient_that_is_not_finite_is_named_on_all_pipe_ranks(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(blamed, tmp_path) == ["head.weight", "head.weight"]


def old_on_a_pipeline(checkpoint: Path, expected: dict[str, Tensor]) -> bool:
    config = read_config(checkpoint.parent.parent / "config.toml").model.build()
    model = ff.models.build(config, grid_of(Shape(pipe=2)), seed=1)
    optimizer = AdamW(model, 1e-3)
    load_training(checkpoint, model, optimizer)
    return equal(everything(model, optimizer), expected)


def test_a_checkpoint_of_version_1_loads_into_a_pipeline(ranks) -> None:
    checkpoint = Path(__file__).parent.parent / "core" / "old" / "run-x2z2" / "checkpoints" / "step-00000004"
    record = read_record(checkpoint)
    expected = {name: read_full_tensor(checkpoint, record, name) for name in record.names("model/", "optimizer/")}
    assert ranks(2).run(old_on_a_pipeline, checkpoint, expected) == [True, True]


# Beside checkpoints


def whole_states(_: Path) -> bool:
    """Whole tensors on every rank, and back into the model's own parts."""
    model, _ = made(TIED, PIPE)
    other, _ = made(TIED, PIPE, seed=1)
    alone, _ = made(TIED, Side(Shape()))
    expected = whole_tensors(alone, "state")
    if model.grid.coords["pipe"] == 1:
        local_of(model.norm.bias)[0] = -0.0
    found = whole_tensors(model, "state")
    if not found["norm.bias"][0].signbit():
        raise ValueError("a sum over pipe ranks has turned -0 into 0")
    other.load_state_dict(found)
    return equal(found, expected) and equal(whole_tensors(other, "state"), expected)


def test_whole_tensors_come_from_all_pipe_ranks_and_go_back(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(whole_states, tmp_path) == [True, True]


def with_torch(folder: Path) -> bool:
    """The state dicts of a model on a pipeline and of its optimizer, written by torch itself; read on another grid."""
    model, _ = made(TIED, PIPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(2 * SEQ, device=DEVICE).view(2, SEQ)
    ff.forward_backward(model, [(tokens, tokens)])
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)
    other, _ = made(TIED, Side(Shape(data=2)), seed=1)
    its_optimizer = torch.optim.AdamW(other.parameters(), lr=0.2)
    weights, state = get_state_dict(other, its_optimizer)
    dcp.load({"model": weights, "optim": state}, checkpoint_id=folder)
    set_state_dict(other, its_optimizer, model_state_dict=weights, optim_state_dict=state)
    return equal(everything(other, its_optimizer), everything(model, optimizer))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, about its storage
def test_torch_writes_and_reads_the_state_of_a_pipeline(ranks, tmp_path: Path) -> None:
    assert ranks(2).run(with_torch, tmp_path / "dcp") == [True, True]


def compared(_: Path) -> tuple[float, set[str]]:
    grid = grid_of(Shape(pipe=2))
    config = ff.models.config("gpt-tiny", layers=1, vocab=VOCAB, seq=SEQ)
    batches = [(rows, rows.flip(1)) for rows in torch.arange(2 * 2 * SEQ).view(2, 2, SEQ)]
    found = ff.compare_serial(
        lambda grid: ff.models.build(config, grid, dtype=torch.float64), batches, grid, max_norm=1.0
    )
    return found.worst.relative, {difference.name for difference in found.differences}


def test_a_pipeline_is_compared_with_one_process(ranks, tmp_path: Path) -> None:
    (worst, names), other = ranks(2).run(compared, tmp_path)
    assert (worst, names) == other
    assert worst < 1e-10
    assert {"embedding.weight", "layers.0.mlp.up.weight", "norm.weight"} <= names
