"""Several steps on top of each other, hooks and frozen stages: what one process computes, in every way to write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
import plain
from fourfold.models.block import TransformerBlock
from fourfold.nn.layer import specs_of
from fourfold.pipeline import forward_backward
from fourfold.policy import Policy
from fourfold.schedule.stages import Stages
from fourfold.shape import Shape
from pipeline.test_around import errors_of, gradients_of, model_of, rows_of
from pipeline.test_pipeline import SEED, Case, slice_of

Pair = tuple[Tensor, Tensor]
Backward = Callable[[Any, list[Pair]], None]


def together(model: Any, rows: list[Pair]) -> None:
    """Run backward of the mean loss of these rows."""
    if isinstance(model, ff.models.Transformer):
        forward_backward(model, rows)
        return
    total = sum((targets != -100).sum() for _, targets in rows)
    (sum(loss_of(model, *pair, reduction="sum") for pair in rows) / total).backward()


def alone(model: Any, rows: list[Pair]) -> None:
    for pair in rows:
        loss_of(model, *pair).backward()


def added(model: Any, rows: list[Pair]) -> None:
    sum(loss_of(model, *pair) for pair in rows).backward()  # type: ignore[union-attr]


def loss_of(model: Any, tokens: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    if isinstance(model, ff.models.Transformer):
        return model(tokens, targets)
    logits = model.logits(model.hidden(tokens))
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


def without_sums(act: Backward) -> Backward:
    def inside(model: Any, rows: list[Pair]) -> None:
        if isinstance(model, ff.models.Transformer):
            with ff.accumulate(model):
                act(model, rows)
        else:
            act(model, rows)

    return inside


WAYS: dict[str, list[Backward]] = {
    "two steps": [together, together],
    "plain passes": [alone, alone],
    "losses added up": [added, alone],
    "a step inside accumulate": [without_sums(together), together],
    "passes accumulated onto a step": [together, without_sums(alone), added],
}


def hook(model: nn.Module) -> None:
    """Add hooks that see whether a gradient is the whole one: they are not linear."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * gradient.abs())
        parameter.register_post_accumulate_grad_hook(double)


def double(parameter: Tensor) -> None:
    parameter.grad.mul_(2)  # type: ignore[union-attr]


def freeze(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("embedding", "positions", "layers.0", "layers.1")))


def differences(case: Case) -> dict[str, float]:
    """How far gradients are from those of one process, in every way to write a loop, with hooks, and frozen."""
    found = {}
    for name, way in {**WAYS, "hooks": [together, alone], "a frozen stage": [together, alone]}.items():
        model, one = model_of(case), plain.make(case.config, SEED)
        for each in (model, one):
            if name == "hooks":
                hook(each)
            elif name == "a frozen stage":
                freeze(each)
        pairs, rows = list(zip(*case.batch(), strict=True)), rows_of(case, model.grid)
        for number, act in enumerate(way):
            part = slice(number, number + 2)
            act(one, pairs[part])
            act(model, rows[part])
        specs, wanted = specs_of(model), dict(one.named_parameters())
        off = [0.0]
        for label, parameter in model.named_parameters():
            whole = wanted[label].grad
            assert (whole is None) == (parameter.grad is None), (name, label)
            if whole is not None:
                own = whole[tuple(map(slice_of, specs[label].box(model.grid)))]
                off.append((parameter.grad._local_tensor - own).abs().max().item())  # type: ignore[union-attr]
        found[name] = max(off)
    return found


CASES = [
    Case(Shape(pipe=2)),
    Case(Shape(pipe=2), Policy(schedule="zb-h1")),
    Case(Shape(pipe=2), Policy(stages=Stages.even(4, 2, 2))),
    Case(Shape(z=2, pipe=2), Policy(schedule="zb-h1")),
]


@pytest.mark.parametrize(
    "case", [CASES[0], *(pytest.param(each, marks=pytest.mark.slow) for each in CASES[1:])], ids=str
)
def test_gradients_add_up_over_steps_as_in_one_process(ranks, case: Case) -> None:
    for found in ranks(case.shape.world).run(differences, case):
        assert max(found.values()) < 1e-10, found


def refusals(case: Case) -> dict[str, str]:
    model = model_of(case)
    rows = rows_of(case, model.grid)
    loss = model(*rows[0])
    loss.backward(retain_graph=True)
    tries: dict[str, Callable[[], Any]] = {
        "backward again": loss.backward,
        "no gradients": torch.no_grad()(lambda: forward_backward(model, rows)),
        "no targets": lambda: forward_backward(model, [rows[0][:1]]),
        "other names": lambda: forward_backward(model, [{"input_ids": rows[0][0], "labels": rows[0][1]}]),
        "too many parts": lambda: forward_backward(model, [(*rows[0], *rows[0], None)]),
        "own loss": lambda: functional.cross_entropy(model(rows[0][0]).flatten(0, 1), rows[0][1].flatten()).backward(),
        "wrong ids": lambda: forward_backward(model, [(rows[0][0] + 53, rows[0][1])]),
    }
    said = errors_of(tries)
    said["left of refused rows"] = ", ".join(name for name, each in model.named_parameters() if each.grad is not None)
    return said


def test_what_forward_backward_refuses_it_refuses_on_all_ranks(ranks) -> None:
    for said in ranks(2).run(refusals, Case(Shape(pipe=2))):
        assert "run forward again" in said["backward again"]
        assert "gradients are off" in said["no gradients"]
        assert "the tokens and the targets" in said["no targets"]
        assert "named tokens, targets, positions" in said["other names"]
        assert "5 parts" in said["too many parts"]
        assert "give the targets to model(tokens, targets)" in said["own loss"]
        assert "below vocab=53" in said["wrong ids"]
        assert said["left of refused rows"] == ""


def broken_off(case: Case) -> dict[str, Any]:
    """What a step raises that fails on all ranks, and what a pass raises or computes after it."""
    model = model_of(case)
    rows = rows_of(case, model.grid)
    model(*rows[0]).backward()
    wanted = gradients_of(model)
    passes = iter([False] * (1 - model.grid.coords["pipe"]))  # rank 1 fails before it would wait for rank 0

    def fail(*_: Any) -> None:
        if next(passes, True):
            raise RuntimeError("out of luck")

    layer = next(each for each in model.layers if isinstance(each, TransformerBlock))
    failing = layer.register_forward_hook(fail)
    said = errors_of({"first": lambda: forward_backward(model, rows)})
    failing.remove()
    model.zero_grad()
    said |= errors_of({"then": lambda: model(*rows[0]).backward()})
    if said["then"] != "nothing":
        return said
    found = gradients_of(model)
    return {**said, "off": max((found[name] - wanted[name]).abs().max().item() for name in wanted)}


@pytest.mark.parametrize("case", [Case(Shape(data=2)), Case(Shape(pipe=2))], ids=str)
def test_after_a_step_that_broke_off_gradients_are_complete_or_the_pipeline_refuses(ranks, case: Case) -> None:
    pool = ranks(2)
    results = pool.run(broken_off, case)
    pool.close()  # messages of the step are left between these ranks
    for found in results:
        assert "out of luck" in found["first"]
        if case.shape.pipe == 1:
            assert (found["then"], found["off"]) == ("nothing", 0.0)
        else:
            assert "broke off with RuntimeError: out of luck" in found["then"]
            assert "start the ranks again" in found["then"]
