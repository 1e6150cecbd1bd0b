"""Optimizers that a config names: each steps shards as torch steps whole tensors, skips bad steps, and resumes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
import plugins
from curves import config_of
from fourfold.checkpoint.format import OPTIMIZER, read_record
from fourfold.grid import Grid, Shape
from fourfold.nn.layer import specs_of
from fourfold.optim import on_shards
from fourfold.params import local_of
from fourfold.policy import Policy
from fourfold.step_graph import OptimizerSteps
from fourfold.torch_hooks import ELEMENTWISE
from fourfold.train.config import OptimizerSection, TrainConfig
from fourfold.train.loop import make_optimizer
from harness import Ranks, grid_of, join_shards
from runs import SMALL, assert_error, cli, column, train_arguments, trained

CONFIG = ff.models.config("gpt-tiny", layers=1, vocab=53, bias=False)
MAX_NORM = 0.25
"""Below the norm of the gradients here, so that they are scaled."""
NESTEROV = {"momentum": 0.8, "nesterov": True}
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, NESTEROV),
    "torch.optim:RMSprop": (torch.optim.RMSprop, {"alpha": 0.9, "momentum": 0.5}),
    "torch.optim:NAdam": (torch.optim.NAdam, {}),  # its state has two scalars
}


def whole_batch(step: int) -> Tensor:
    return torch.arange(step, step + 64).view(4, 16) % 53


def by_torch(name: str) -> dict[str, Tensor]:
    """Parameters after steps 0 and 1 by torch's optimizer on whole tensors, with weight decay on matrices alone."""
    kind, options = KINDS[name]
    model = ff.models.build(CONFIG, Grid.alone("cpu"), dtype=torch.float64)
    named = {name: torch.nn.Parameter(local_of(p).detach()) for name, p in model.named_parameters()}
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = kind(groups, lr=1e-2, **options)  # type: ignore[call-arg]
    for step in range(2):
        model(whole_batch(step), whole_batch(step)).backward()
        ff.clip_grad_norm_(model.parameters(), MAX_NORM)
        for name, parameter in model.named_parameters():
            named[name].grad = local_of(parameter.grad)
        optimizer.step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in named.items()}


def on_grid(name: str, shape: Shape, policy: Policy) -> dict[str, Tensor]:
    """A job: the parameters after two good steps, with a bad step before each of them."""
    grid = grid_of(shape)
    model = ff.models.build(CONFIG, grid, policy=policy, dtype=torch.float64)
    section = OptimizerSection(name, KINDS[name][1], weight_decay=0.3)
    optimizer = make_optimizer(model, section, 1e-2)
    for step, bad in ((7, True), (0, False), (8, True), (1, False)):
        tokens = ff.local_rows(whole_batch(step), grid)
        model(tokens, tokens).backward()
        skip = torch.tensor(bad)
        assert not optimizer.clip_and_step(MAX_NORM, unless=skip).norm.isinf()
        optimizer.zero_grad()
    specs = specs_of(model)
    return {
        name: join_shards(local_of(parameter).detach(), specs[name], grid)
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("name", KINDS)
def test_shards_are_stepped_as_torch_steps_whole_tensors(ranks, name: str) -> None:
    """With state that is cut over data, and bad steps that leave no trace."""
    policy = Policy(shard_optimizer=True, bucket_bytes=10_000)
    expected = by_torch(name)
    for found in ranks(4).run(on_grid, name, Shape(x=2, data=2), policy):
        for parameter, value in expected.items():
            torch.testing.assert_close(found[parameter], value, rtol=0, atol=1e-12)


def resumed(config: TrainConfig, folder: Path) -> None:
    """A job: the rest of a run."""
    trained(config, folder, resume=True)


@pytest.mark.parametrize(
    ("name", "options", "state"),
    [
        ("sgd", NESTEROV, {"momentum_buffer"}),
        ("torch.optim:NAdam", {}, {"exp_avg", "exp_avg_sq", "step", "mu_product"}),
        ("plugins:CountingSGD", {"power": 0.25}, set()),  # its count is a number, which stands in the record
    ],
)
def test_a_run_resumes_with_the_state_of_its_optimizer(
    ranks, tokens: str, tmp_path: Path, name: str, options: dict[str, Any], state: set[str]
) -> None:
    """Bit for bit on the same grid, from a checkpoint that holds the state of every parameter."""
    changes = {
        "optimizer.name": name,
        "optimizer.options": options,
        "optimizer.weight_decay": 0.0,
        "optimizer.learning_rate": 0.01,
        "policy.shard_optimizer": True,
        "data.sources": [{"path": tokens}],
        "model.layers": 1,
        "checkpoint.every": 2,
        "plan.compare": False,
        "train.evaluate_every": 0,
    }
    config = config_of("gpt-tiny", "fp32", 4, tmp_path, Shape(z=2), changes)
    whole, half = tmp_path / "whole", tmp_path / "half"
    ranks(2).run(trained, config, whole)
    shutil.copytree(whole, half)
    shutil.rmtree(half / "checkpoints" / "step-00000004")
    names = read_record(half / "checkpoints" / "step-00000002").names(OPTIMIZER)
    assert {name.removeprefix(OPTIMIZER).partition("/")[0] for name in names} == state
    ranks(2).run(resumed, config, half)
    assert column(half, "step", "step") == [1, 2, 3, 4]
    assert column(half, "step", "loss") == column(whole, "step", "loss")
    assert len(set(column(half, "step", "loss"))) == 4


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            ["name=torch.optim:Muon"],
            ["Muon cannot step parameters that are cut over a grid", "; use an optimizer that"],
        ),
        (["name=plugins:TrustRatio"], ["TrustRatio cannot step parameters that are cut over a grid", "otherwise than"]),
        (["name=torch.optim:LBFGS"], ["LBFGS calls a closure several times a step, as no step on shards can; use an"]),
        (["name=torch.optim:SDG"], ["torch.optim has no 'SDG' (did you mean 'SGD'?); give package.module:Class"]),
        (["name=torch.nn:Linear"], ["optimizer.name=torch.nn:Linear is no subclass of torch.optim.Optimizer"]),
        (["name=sgd", "options={beta=1}"], ["optimizer.options={'beta': 1}: sgd does not take them", "'beta'"]),
        (["name=sgd", "beta1=0.5"], ["beta1=0.5 is a key of adamw; give sgd its own in options"]),
        (["name=plugins:CountingSGD"], ["plugins:CountingSGD has no weight decay; set optimizer.weight_decay=0"]),
        (
            ["name=plugins:RowSGD"],
            ["plugins.RowSGD cannot be saved: 'rows' of", "a checkpoint holds tensors of the shape of"],
        ),
    ],
)
def test_optimizers_that_cannot_be_used_are_errors_of_one_line(
    one: Ranks, tokens: str, tmp_path: Path, settings: list[str], parts: list[str]
) -> None:
    more = [word for setting in settings for word in ("--set", f"optimizer.{setting}")]
    (left,) = one.run(cli, *train_arguments(tokens, tmp_path / "run", *more, "--set", "plan.compare=false", steps=1))
    assert_error(left, *parts)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def fit() -> dict[type[torch.optim.Optimizer], list[dict[str, Any]]]:
    """Optimizers that treat each element by itself, with options of several kinds."""
    o = torch.optim
    fast: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}, {"foreach": False}]
    found: dict[type[torch.optim.Optimizer], list[dict[str, Any]]] = dict.fromkeys((o.AdamW, o.Adam, o.SGD), fast)
    found |= {kind: [{}] for kind in (o.Adamax, o.NAdam, o.RAdam, o.Adadelta, o.Rprop, o.ASGD, o.Adagrad)}
    found[o.Adam] = [*fast, {"amsgrad": True, "maximize": True}]
    found[o.RMSprop] = [{"centered": True, "momentum": 0.5}]
    return found | {kind: [{}] for kind in (plugins.Lion, plugins.ScheduleFree)}


def test_whether_an_optimizer_treats_elements_by_themselves_is_tried() -> None:
    """Whatever it is called; and the trial leaves the random numbers of the user alone."""
    import transformers

    model = ff.models.build(CONFIG, Grid.alone("cpu"))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    for kind, several in fit().items():
        for options in several:
            on_shards(kind)(model, 1e-2, weight_decay=0.0, **options)
    p = plugins
    unfit = [p.Orthogonal, p.LargeOrthogonal, p.TrustRatio, p.ByRow, p.ByColumn, p.Noisy, p.Clipping]
    accepted = []
    for kind in (*unfit, torch.optim.Adafactor, torch.optim.Muon, transformers.Adafactor, torch.optim.LBFGS):
        options = {"relative_step": False} if kind is transformers.Adafactor else {}
        try:
            on_shards(kind)(model, 1e-2, weight_decay=0.0, **options)
            accepted.append(kind)
        except ValueError as error:
            assert ELEMENTWISE in str(error), kind
    assert accepted == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_resumed_run_keeps_its_optimizer(one: Ranks, tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (left,) = one.run(cli, *train_arguments(tokens, folder, steps=1))
    assert (left.code, left.err) == (0, "")
    (left,) = one.run(
        cli,
        "train",
        "--resume",
        str(folder),
        "--steps",
        "2",
        "--set",
        "optimizer.name=sgd",
        "--set",
        "plan.compare=true",
    )
    assert_error(left, "optimizer.name was adamw in", "and is sgd; a resumed run keeps it")


def test_only_optimizers_that_the_device_can_skip_are_recorded() -> None:
    model = ff.models.build(CONFIG, Grid.alone("cpu"))
    steps = OptimizerSteps()
    for name in ("adamw", "sgd"):
        steps(make_optimizer(model, OptimizerSection(name), 1e-3))
    with pytest.raises(TypeError, match="RMSprop: the host decides whether to skip a step"):
        steps(on_shards(torch.optim.RMSprop)(model, 1e-3, weight_decay=0.0))


def test_the_prediction_says_that_it_is_one_for_adamw(one: Ranks, tokens: str, tmp_path: Path) -> None:
    arguments = ["train", *SMALL, "--data", tokens, "--steps", "1", "--out", str(tmp_path / "run")]
    (left,) = one.run(cli, *arguments, "--set", "optimizer.name=sgd", "--set", "plan.compare=true")
    assert (left.code, left.err) == (0, "")
    assert "the memory and time of sgd are those of adamw" in left.out
