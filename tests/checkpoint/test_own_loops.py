"""`ff.save` and `ff.load` in loops of one's own: any optimizer of torch's, from any grid onto any other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint import Crash, crashing
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import MultiStepLR, ReduceLROnPlateau

import families
import fourfold as ff
from checkpoints import made
from checkpoints import take as step_of
from fourfold import atomic
from fourfold.atomic import AtomicFolder
from fourfold.checkpoint.dcp import from_dcp, to_dcp
from fourfold.checkpoint.load import find_checkpoint, load_training, verify_checkpoint
from fourfold.checkpoint.save import Saver
from fourfold.cli import main
from fourfold.errors import NotFiniteError
from fourfold.grid import Grid, Shape
from fourfold.params import local_of
from harness import DEVICE, grid_of, what_is_said

ROWS, STEPS, SAVE_AT = 12, 4, 2
SAVING = Shape(x=2, z=2)


class Net(nn.Module):
    """Sizes that do not divide, a parameter without dims, one that is frozen, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 5)
        self.scale = nn.Parameter(torch.rand(()) + 1)
        self.down.bias.requires_grad_(False)
        self.register_buffer("mask", torch.full((3,), -inf))

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        hidden = functional.gelu(self.norm(self.up(rows))) * self.scale
        return functional.cross_entropy(self.down(hidden), labels)


def build(shape: Shape | None, seed: int = 0, policy: ff.Policy | None = None) -> tuple[nn.Module, Grid | None]:
    """On a grid of this shape, on one of this process alone, or plain."""
    model = Net(seed).double()
    if shape is None:
        return model, None
    grid = Grid.alone(DEVICE) if shape.world == 1 else grid_of(shape)
    return ff.parallelize(model, grid, policy=policy or ff.Policy()), grid


def take(model: nn.Module, grid: Grid | None, optimizer: Optimizer, step: int) -> float:
    """One step on the rows of that step, the same on every grid."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(ROWS, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(5, (ROWS,), generator=generator)
    if grid is not None:
        rows, labels = ff.local_rows(rows, grid), ff.local_rows(labels, grid)
    device = next(model.parameters()).device
    loss = model(rows.to(device), labels.to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


class Signed(Optimizer):
    """Keeps its state in plain shards of a DTensor's memory, in DTensors without dims, and in Python's numbers."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                on_grid = isinstance(parameter, DTensor)
                own, gradient = (
                    (local_of(parameter), local_of(parameter.grad)) if on_grid else (parameter, parameter.grad)
                )
                state = self.state[parameter]
                if not state:
                    one = torch.ones((), dtype=torch.float64, device=own.device)
                    mesh = parameter.device_mesh if on_grid else None
                    weight = DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim) if mesh is not None else one
                    state.update(mean=torch.zeros_like(own), weight=weight, steps=0, note=None)
                state["steps"] += 1
                state["weight"].mul_(0.5)
                state["mean"].lerp_(gradient, 0.5)
                own.sub_(state["mean"].tanh(), alpha=group["lr"] * (1 + state["weight"].item()) / state["steps"])


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    named = dict(model.named_parameters())
    vectors = [parameter for parameter in named.values() if parameter.requires_grad and parameter.dim() < 2]
    return [
        {"params": [parameter for parameter in named.values() if parameter.dim() == 2], "weight_decay": 0.1},
        {"params": vectors, "lr": 2e-2},
    ]


def added(model: nn.Module) -> Optimizer:
    """A second group that came later."""
    matrices, vectors = grouped(model)
    optimizer = torch.optim.SGD([matrices], lr=0.1, momentum=0.9, nesterov=True)
    optimizer.add_param_group(vectors)
    return optimizer


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(grouped(model), lr=1e-2, fused=True),
    "SGD": added,
    "ff.AdamW": lambda model: ff.optim.AdamW(model, lr=1e-2),
    "Signed": lambda model: Signed(model.parameters()),
    "AMSGrad": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True, foreach=True),
    "plain SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2, centered=True, momentum=0.5),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=1e-2),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=1.0),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.1),
}
QUICK = ("AdamW",)
"""Those that run in `make test`: for the others torch derives how each of many operations on DTensors is cut."""


def train(folder: Path, name: str, shape: Shape | None, resumes: bool) -> dict[str, Any]:
    """Train and save on the way, or go on from there in a model of other weights: losses, and the model at the end."""
    model, grid = build(shape, seed=int(resumes))
    optimizer = OPTIMIZERS[name](model)
    first, losses = 1, []
    if resumes:
        extra = ff.load(folder, model, optimizer)
        assert extra == {"step": SAVE_AT, "best": inf}
        first = extra["step"] + 1
    for step in range(first, STEPS + 1):
        losses.append(take(model, grid, optimizer, step))
        if step == SAVE_AT and not resumes:
            ff.save(folder, model, optimizer, extra={"step": step, "best": inf})
    return {"losses": losses, "model": whole(model), "rates": [group["lr"] for group in optimizer.param_groups]}


def whole(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict().items()
    return {key: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu() for key, value in state}


def require_equal(found: dict[str, Any], first: dict[str, Any], tolerance: float) -> None:
    assert found["losses"] == pytest.approx(first["losses"][SAVE_AT:], rel=tolerance or 1e-300, abs=0)
    assert found["rates"] == first["rates"]
    assert found["model"].keys() == first["model"].keys()
    for key, value in first["model"].items():
        assert (
            torch.equal(found["model"][key], value)
            if not tolerance
            else torch.allclose(found["model"][key], value, rtol=tolerance, atol=tolerance)
        ), key


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in OPTIMIZERS]
)
def test_a_loop_goes_on_anywhere(ranks, tmp_path: Path, name: str) -> None:
    """Bit for bit on the grid that saved, up to rounding on other grids, on one rank and in the plain module."""
    folder = tmp_path / "last"
    first = ranks(4).run(train, folder, name, SAVING, False)[0]
    verify_checkpoint(folder)
    require_equal(ranks(4).run(train, folder, name, SAVING, True)[0], first, 0.0)
    for shape in (Shape(z=2, data=2), Shape(z=4))[: 2 if name == "AdamW" else 1]:
        require_equal(ranks(4).run(train, folder, name, shape, True)[0], first, 1e-12)
    require_equal(train(folder, name, Shape(), True), first, 1e-12)
    if name != "ff.AdamW":  # its model is on a grid
        require_equal(train(folder, name, None, True), first, 1e-12)


@pytest.mark.slow
def test_three_ranks_go_on_and_hand_back(ranks, tmp_path: Path) -> None:
    first = ranks(3).run(train, tmp_path / "last", "AdamW", Shape(z=3), False)[0]
    require_equal(ranks(3).run(train, tmp_path / "last", "AdamW", Shape(data=3), True)[0], first, 1e-12)
    require_equal(ranks(2).run(train, tmp_path / "last", "AdamW", Shape(data=2), True)[0], first, 1e-12)
    require_equal(train(tmp_path / "last", "AdamW", None, True), first, 1e-12)


def test_a_plain_loop_goes_on_on_a_grid(ranks, tmp_path: Path) -> None:
    first = train(tmp_path / "last", "AdamW", None, False)
    require_equal(ranks(4).run(train, tmp_path / "last", "AdamW", SAVING, True)[0], first, 1e-12)


# Dropout, and the trainer's optimizer


def draw(folder: Path, resumes: bool) -> list[float]:
    """Train a GPT with dropout and, in the same process or with another seed, once more from the middle on."""
    config = ff.models.config("gpt-tiny", layers=1, vocab=53, dropout=0.3, attention_dropout=0.3)
    model = ff.models.build(config, grid_of(SAVING), seed=int(resumes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    losses: list[float] = []
    for first in (1, SAVE_AT + 1)[int(resumes) :]:
        if first > 1:
            assert ff.load(folder, model, optimizer) == SAVE_AT
        for step in range(first, STEPS + 1):
            batch = torch.randint(53, (4, 9), generator=torch.Generator().manual_seed(step))
            rows = ff.local_rows(batch, grid_of(SAVING)).to(DEVICE)
            loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if (first, step) == (1, SAVE_AT):
                ff.save(folder, model, optimizer, extra=step)
    return losses


@pytest.mark.slow
def test_dropout_draws_the_masks_that_it_would_have_drawn(ranks, tmp_path: Path) -> None:
    first = ranks(4).run(draw, tmp_path / "last", False)[0]
    assert first[STEPS:] == first[SAVE_AT:STEPS]
    assert ranks(4).run(draw, tmp_path / "last", True)[0] == first[SAVE_AT:STEPS]


def sharded(folder: Path) -> list[float]:
    """The trainer's optimizer with its state cut over data too: the losses after the save."""
    grid = grid_of(Shape(z=2, data=2))
    model, optimizer = made("gpt-tiny", grid, sharded=True)
    step_of(model, optimizer, 1)
    ff.save(folder, model, optimizer)
    return [step_of(model, optimizer, step) for step in (2, 3)]


def test_a_run_of_the_trainer_goes_on_with_torchs_adamw(ranks, tmp_path: Path) -> None:
    expected = ranks(4).run(sharded, tmp_path / "last")[0]
    model, _ = made("gpt-tiny", Grid.alone(DEVICE), sharded=False, seed=1)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) == many] for many in (True, False))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], fused=True)
    ff.load(tmp_path / "last", model, optimizer)
    assert [(group["weight_decay"], group["lr"]) for group in optimizer.param_groups] == [(0.1, 1e-2), (0.0, 1e-2)]
    losses = []
    for step in (2, 3):
        tokens = torch.randint(0, 53, (8, 9), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        ff.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-12)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=3, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return get_peft_model(families.build("gpt2"), adapters)


def adapted(folder: Path, shape: Shape, resumes: bool) -> list[float]:
    """Train the adapters of a GPT-2, whose weights hold several layers in one."""
    grid = grid_of(shape)
    model = ff.parallelize(lora(), grid)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
    if resumes:
        with torch.no_grad():
            for parameter in trained:
                parameter.zero_()
        ff.load(folder, model, optimizer)
    losses = []
    for step in range(SAVE_AT if resumes else 0, STEPS):
        batch = torch.randint(families.VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))
        tokens = ff.local_rows(batch, grid).to(grid.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == SAVE_AT - 1:
            ff.save(folder, model, optimizer)
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Adapter 'default'")
def test_adapters_of_a_frozen_model_go_on(ranks, tmp_path: Path) -> None:
    first = ranks(4).run(adapted, tmp_path / "last", SAVING, False, timeout=120)[0]
    assert first[-1] < first[0]
    again = ranks(4).run(adapted, tmp_path / "last", Shape(y=2, data=2), True, timeout=120)[0]
    assert again == pytest.approx(first[SAVE_AT:], rel=1e-11)  # adapters multiply small numbers
    with pytest.raises(
        ValueError, match=r"hold 'base_model.*' and \d+ more in different forms: .* ff.parallelize\(model"
    ):
        ff.load(tmp_path / "last", lora())


# What else is saved


def alone(seed: int = 0, lr: float = 1e-2) -> tuple[nn.Module, torch.optim.AdamW]:
    """Of one process, so that no test that is about one waits for ranks."""
    model, _ = build(Shape(), seed)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def test_an_optimizer_before_its_first_step(tmp_path: Path) -> None:
    model, optimizer = alone()
    ff.save(tmp_path / "last", model, optimizer)
    other, fresh = alone(seed=1, lr=5.0)
    take(other, None, fresh, 1)  # its state goes
    assert ff.load(tmp_path / "last", other, fresh) is None
    assert not fresh.state and fresh.param_groups[0]["lr"] == 1e-2
    for one, two in zip(whole(model).values(), whole(other).values(), strict=True):
        assert torch.equal(one, two)


def test_options_come_back_in_their_own_form(tmp_path: Path) -> None:
    """Learning rates of schedulers, tuples, and tensors; how a step is computed stays as it is."""
    model, _ = alone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9), maximize=True, foreach=True)
    scheduler = MultiStepLR(optimizer, [1, 3], gamma=0.1)
    take(model, None, optimizer, 1)
    scheduler.step()
    ff.save(tmp_path / "last", model, optimizer)
    other, _ = alone(seed=1)
    rate = torch.tensor(1.0, dtype=torch.float64)
    fresh = torch.optim.AdamW(other.parameters(), lr=rate, fused=True)
    ff.load(tmp_path / "last", other, fresh)
    group = fresh.param_groups[0]
    assert group["lr"] is rate and rate.item() == 0.05
    assert (group["betas"], group["maximize"], group["initial_lr"]) == ((0.8, 0.9), True, 0.5)
    assert group["fused"] and not group["foreach"]
    take(other, None, fresh, 2)
    take(model, None, optimizer, 2)
    for one, two in zip(whole(model).values(), whole(other).values(), strict=True):
        assert torch.allclose(one, two, rtol=1e-12)


class Wrapped(Optimizer):
    """As accelerate wraps an optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state, self.param_groups = optimizer.state, optimizer.param_groups  # type: ignore[assignment]


def test_a_wrapper_around_the_optimizer_does_not_matter(tmp_path: Path) -> None:
    model, optimizer = alone()
    take(model, None, optimizer, 1)
    ff.save(tmp_path / "last", model, Wrapped(optimizer))
    other, fresh = alone(seed=1)
    ff.load(tmp_path / "last", other, fresh)
    assert take(other, None, fresh, 2) == take(model, None, optimizer, 2)


def test_schedulers_and_scalers_fit_in_extra(tmp_path: Path) -> None:
    model, optimizer = alone()
    schedulers = MultiStepLR(optimizer, [1, 3]), ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    take(model, None, optimizer, 1)
    schedulers[0].step()
    extra = {"steps": [each.state_dict() for each in schedulers], "scaler": scaler.state_dict(), "pair": (1, 2.5)}
    ff.save(tmp_path / "last", model, optimizer, extra=extra)
    found = ff.load(tmp_path / "last", *alone(seed=1))
    assert found == {**extra, "pair": [1, 2.5]}
    assert found["steps"][0]["milestones"] == {1: 1, 3: 1} and found["steps"][1]["best"] == inf
    other = MultiStepLR(optimizer, [7])
    other.load_state_dict(found["steps"][0])
    assert other.milestones[3] == 1


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"loss": torch.ones(2)}, r"extra\['loss'\] is of type Tensor, which JSON cannot hold; .* tensor.tolist\(\)"),
        ([1, {"a": {2}}], r"extra\[1\]\['a'\] is of type set"),
        ({(1, 2): 3}, "a key of extra is of type tuple"),
    ],
)
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, extra: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        ff.save(tmp_path / "last", *alone(), extra=extra)
    assert not [*tmp_path.iterdir()]


def test_weights_alone(tmp_path: Path) -> None:
    """Saved so, or read so from a checkpoint of training; then the dtype may be another."""
    model, optimizer = alone()
    take(model, None, optimizer, 1)
    ff.save(tmp_path / "weights", model, extra="told")
    ff.save(tmp_path / "training", model, optimizer, extra="told")
    for name in ("weights", "training"):
        narrow = ff.parallelize(Net(1), Grid.alone(DEVICE))
        random = torch.get_rng_state()
        assert ff.load(tmp_path / name, narrow) == "told"
        assert torch.equal(torch.get_rng_state(), random)
        for key, value in whole(narrow).items():
            assert torch.equal(value, whole(model)[key].float())
    with pytest.raises(ValueError, match=r"holds weights and no state of an optimizer; .* ff.load\(folder, model\)"):
        ff.load(tmp_path / "weights", model, optimizer)
    with pytest.raises(ValueError, match=r"is torch.float64 in .* and torch.float32 here"):
        ff.load(tmp_path / "training", narrow, torch.optim.AdamW(narrow.parameters()))


def test_the_trainers_saver_takes_any_optimizer(tmp_path: Path) -> None:
    """And `ff.load`, the commands and torch's own checkpoints take what it saves."""
    model, optimizer = alone()
    take(model, None, optimizer, 1)
    saver = Saver(Grid.alone(DEVICE), tmp_path / "run")
    saver.save(1, model, optimizer, {"told": "by the test"})
    expected = take(model, None, optimizer, 2)  # while it is written
    saver.wait()
    with pytest.raises(ValueError, match="the key 'training' of the state belongs to the checkpoint"):
        saver.save(2, model, optimizer, {"training": 3})
    folder = find_checkpoint(tmp_path / "run")
    assert main(["checkpoint", "verify", str(folder)]) == main(["checkpoint", "inspect", str(folder)]) == 0
    to_dcp(folder, tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "back")
    for source in (folder, tmp_path / "back"):
        other, fresh = alone(seed=1)
        state = load_training(source, other, fresh)
        assert (state["step"], state["told"]) == (1, "by the test")
        assert take(other, None, fresh, 2) == expected
        assert all(torch.equal(one, two) for one, two in zip(whole(model).values(), whole(other).values(), strict=True))


# A save that is killed


CALLS = ((os, "fsync"), (os, "rename"), (os, "open"), (shutil, "rmtree"), (atomic, "exchange"))


@pytest.mark.parametrize("swaps", [True, False])
def test_a_save_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    """At every call that changes the folder, on a file system that can exchange two names and on one that cannot."""
    model, optimizer = alone()
    ff.save(tmp_path / "first", model, optimizer, extra="old")
    if not swaps:
        monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    monkeypatch.setattr(AtomicFolder, "abandon", lambda _: None)  # nobody cleans up after a kill
    seen, other = [], alone(seed=1)
    for calls in range(100):
        left, root = iter(range(calls)), tmp_path / str(calls)
        root.mkdir()
        shutil.copytree(tmp_path / "first", root / "last")
        try:
            with monkeypatch.context() as patch:
                for owner, name in (
                    (os, "fsync"),
                    (os, "rename"),
                    (os, "open"),
                    (shutil, "rmtree"),
                    (atomic, "exchange"),
                ):
                    patch.setattr(owner, name, crashing(getattr(owner, name), left))
                ff.save(root / "last", model, optimizer, extra="new")
            break
        except Crash:
            seen.append(ff.load(root / "last", *other))
            assert (root / "last").exists() or not swaps
            ff.save(root / "last", model, optimizer, extra="next")
            assert [entry.name for entry in root.iterdir()] == ["last"]
            assert ff.load(root / "last", *other) == "next"
    assert {"old", "new"} == set(seen) and seen == sorted(seen, reverse=True)
    assert ff.load(root / "last", *other) == "new"


def test_nan_is_not_saved_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    model, optimizer = alone()
    take(model, None, optimizer, 1)
    ff.save(tmp_path / "last", model, optimizer, extra="old")
    local_of(optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"]).fill_(inf)
    with pytest.raises(NotFiniteError, match="'optimizer/exp_avg/scale' holds NaN or infinity"):
        ff.save(tmp_path / "last", model, optimizer)
    assert ff.load(tmp_path / "last", model, optimizer) == "old"


# What cannot be saved or does not fit


class Factored(Optimizer):
    """Keeps a number for each row of a matrix."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                self.state[parameter]["row"] = torch.zeros(parameter.shape[0], 1)


def lbfgs() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model, optimizer


def adafactor() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def elsewhere() -> tuple[nn.Module, Optimizer]:
    model, optimizer = alone()
    optimizer.state["seen"] = 3  # type: ignore[index]
    return model, optimizer


UNFIT: dict[str, tuple[Callable[[], tuple[nn.Module, Optimizer]], str]] = {
    "Adafactor": (adafactor, r"torch.optim.Adafactor .*: 'row_var' of 'weight' has shape \(2, 1\), and the"),
    "LBFGS": (lbfgs, r"torch.optim.lbfgs.LBFGS cannot be saved: 'd' of 'weight' has shape \(8,\)"),
    "factored": (
        lambda: (model := alone()[0], Factored(model.parameters())),
        r"Factored cannot be saved: 'row' of 'up.weight' has shape \(10, 1\), and the parameter \(10, 6\); .* ff.save",
    ),
    "no parameter's": (elsewhere, "AdamW cannot be saved: the entry 'seen' belongs to no parameter of its groups"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_state_that_does_not_fit_every_grid_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    made, said = UNFIT[name]
    with pytest.raises(TypeError, match=said):
        ff.save(tmp_path / "last", *made())
    assert not [*tmp_path.iterdir()]


def refuse(folder: Path) -> str:
    """A job: one rank alone finds that its state does not fit, where the others hold nothing of the parameter."""
    model = ff.parallelize(nn.Sequential(nn.Linear(3, 1)).double(), grid_of(Shape(z=4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = next(model.parameters())
    optimizer.state[weight]["moment"] = torch.zeros(local_of(weight).shape[0], 2)
    return what_is_said({"save": lambda _: ff.save(folder, model, optimizer)}, grid_of(Shape(z=4)))["save"]


def test_one_ranks_refusal_is_that_of_all(ranks, tmp_path: Path) -> None:
    for said in ranks(4).run(refuse, tmp_path / "last"):
        assert "SGD cannot be saved: 'moment' of '0.weight' has shape" in said
    assert not [*tmp_path.iterdir()]


class Deeper(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 5)


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(10, 7)


def on_one(model: nn.Module) -> nn.Module:
    return ff.parallelize(model.double(), Grid.alone(DEVICE))


def with_adamw(model: nn.Module, parameters: Any = None) -> tuple[nn.Module, Optimizer]:
    return model, torch.optim.AdamW(model.parameters() if parameters is None else parameters(model), fused=True)


def in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    first, *others = model.parameters()
    return [{"params": others}, {"params": [first]}]


MISFITS: dict[str, tuple[Callable[[], tuple[nn.Module, Optimizer]], str]] = {
    "more": (
        lambda: with_adamw(on_one(Deeper())),
        "another model: it lacks 'model/head.weight', 'model/head.bias'; bu",
    ),
    "wider": (
        lambda: with_adamw(on_one(Wider())),
        r"'model/down.weight' has shape \(5, 10\) in .* and \(7, 10\) here; build",
    ),
    "class": (
        lambda: (model := on_one(Net()), torch.optim.SGD(model.parameters())),
        r"holds the state of torch.optim.adamw.AdamW \(exp_avg, exp_avg_sq, step\), and this optimizer is "
        r"torch.optim.sgd.SGD; make the optimizer as saved, or load the weights alone: ff.load\(folder, model\)",
    ),
    "groups": (
        lambda: with_adamw(on_one(Net()), in_two_groups),
        "has 1 parameter groups and this optimizer 2; the one that is only here holds 'scale'; make the same groups",
    ),
    "fewer": (
        lambda: with_adamw(on_one(Net()), lambda model: [p for p in model.parameters() if p.requires_grad]),
        "parameter group 0 of this optimizer lacks 'down.bias', compared with .*last; make the same groups",
    ),
    "strange": (
        lambda: with_adamw(on_one(Net()), lambda model: [*model.parameters(), nn.Parameter(torch.ones(9))]),
        r"parameter group 0 of torch.optim.adamw.AdamW has a parameter of shape \(9,\) that is none of Net; make the",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_and_changes_nothing(tmp_path: Path, name: str) -> None:
    model, optimizer = alone()
    take(model, None, optimizer, 1)
    ff.save(tmp_path / "last", model, optimizer)
    made, said = MISFITS[name]
    other, its_optimizer = made()
    before = whole(other)
    with pytest.raises(ValueError, match=said):
        ff.load(tmp_path / "last", other, its_optimizer)
    assert all(torch.equal(value, before[key]) for key, value in whole(other).items())
    assert not its_optimizer.state


def test_a_path_that_is_no_checkpoint_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = alone()
    ff.save(tmp_path / "run" / "checkpoints" / "step-00000001", model, optimizer)
    ff.save(tmp_path / "own" / "100", model, optimizer)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, said in {
        "nowhere": "nowhere is not there; give the folder of a checkpoint, which all ranks must see",
        "file": "file is a file; give the folder",
        "empty": "empty is a folder but not a checkpoint: it has none in it either",
        "run": r"it has the checkpoints '.*checkpoints/step-00000001'; load one of them",
        "own": r"it has the checkpoints '.*own/100'; load",
    }.items():
        with pytest.raises(FileNotFoundError, match=said):
            ff.load(tmp_path / name, model, optimizer)
    (tmp_path / "own" / "100" / "checkpoint.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"checkpoint.json is missing; copy the folder again"):
        ff.load(tmp_path / "own" / "100", model)
    one = tmp_path / "run" / "checkpoints" / "step-00000001"
    assert main(["checkpoint", "list", str(one)]) == 1
    assert f"is one checkpoint; show it with `fourfold checkpoint inspect {one}`" in capsys.readouterr().err


def test_home_is_found_and_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As paths, both would be folders of strange names in the working folder."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    model, optimizer = alone()
    ff.save("~/last", model, optimizer, extra=1)
    assert ff.load("~/last", model) == ff.load(tmp_path / "home" / "last", model) == 1
    for address in ("s3://bucket/last", Path("gs://bucket/last"), "file:///last"):
        for act in (ff.save, ff.load):
            with pytest.raises(ValueError, match="is an address, not a folder; checkpoints are written to and read"):
                act(address, model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_arguments_in_another_order_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    model, optimizer = alone()
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        ("folder is of type .*Net;", (model, tmp_path / "last")),
        ("model is of type OrderedDict", (tmp_path / "last", model.state_dict())),
        ("optimizer is of type MultiStepLR.* goes into extra", (tmp_path / "last", model, MultiStepLR(optimizer, [1]))),
    ]
    for said, arguments in wrong:
        for act in (ff.save, ff.load):
            with pytest.raises(TypeError, match=said):
                act(*arguments)
    assert not [*tmp_path.iterdir()]


class Counted(nn.Module):
    """A module with state that is neither a parameter nor a buffer, and with a buffer that is expanded on request."""

    def __init__(self, expands: bool = False) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("ones", torch.ones(1, 4).expand(3, 4) if expands else torch.ones(3, 4))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("plain", [True, False])
def test_extra_state_of_modules_comes_back(tmp_path: Path, plain: bool) -> None:
    def made() -> nn.Module:
        module = nn.Sequential(Counted(), nn.Linear(4, 4))
        return module if plain else ff.parallelize(module, Grid.alone(DEVICE))

    def counted(model: nn.Module) -> Any:
        return next(module for module in model.modules() if isinstance(module, Counted))

    model = made()
    optimizer = torch.optim.SGD(model.parameters())
    counted(model).calls = 7
    ff.save(tmp_path / "last", model, optimizer)
    one, other = made(), made()
    ff.load(tmp_path / "last", one)
    ff.load(tmp_path / "last", other, torch.optim.SGD(other.parameters()))
    assert counted(one).calls == counted(other).calls == 7
    counted(model).calls = torch.ones(2)
    with pytest.raises(TypeError, match=r"the extra state of the module '.*'.* is of type Tensor"):
        ff.save(tmp_path / "last", model, optimizer)


def test_a_tensor_whose_elements_share_memory_is_refused_before_anything_changes(tmp_path: Path) -> None:
    ff.save(tmp_path / "last", Counted())
    other = Counted(expands=True)
    before = other.inner.weight.detach().clone()
    with pytest.raises(ValueError, match=r"'model/ones' is an expanded tensor, .* with .clone\(\)"):
        ff.load(tmp_path / "last", other)
    assert torch.equal(other.inner.weight, before)


def load_unlike(folder: Path) -> str:
    """A job: the first rank alone gives its optimizer."""
    model, grid = build(SAVING)
    assert grid is not None
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ff.save(folder, model, optimizer)
    return what_is_said({"load": lambda _: ff.load(folder, model, None if grid.rank else optimizer)}, grid)["load"]


def test_an_optimizer_on_one_rank_alone_is_refused(ranks, tmp_path: Path) -> None:
    for said in ranks(4).run(load_unlike, tmp_path / "last"):
        assert "rank 0 has 'weights and optimizer', rank 1 has 'weights'" in said


def save_plain(folder: Path) -> str:
    """A job: a module that is on no grid, which all ranks would write to one folder."""
    return what_is_said({"save": lambda _: ff.save(folder, nn.Linear(2, 2))}, grid_of(SAVING))["save"]


def test_a_plain_module_of_several_ranks_is_refused(ranks, tmp_path: Path) -> None:
    for said in ranks(4).run(save_plain, tmp_path / "last"):
        assert "Linear is not on a grid, and this job has 4 ranks" in said
