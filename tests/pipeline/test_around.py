"""What is around a pipelined step: plain loops, evaluation, logits, generation, refused batches, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

import fourfold as ff
from fourfold.models.generate import generate
from fourfold.params import local_of
from fourfold.pipeline import forward_backward
from fourfold.policy import Policy
from fourfold.schedule.stages import Stages
from fourfold.shape import Shape
from harness import grid_of
from pipeline.test_pipeline import SEED, Case
from share import others_slow

INTERLEAVED = Policy(stages=Stages.even(4, 2, 2))
SHAPES = [
    Case(Shape(pipe=2), INTERLEAVED),
    Case(Shape(x=2, pipe=2)),
    Case(Shape(data=2, pipe=2), Policy(shard_optimizer=True)),
]


def model_of(case: Case, **changes: Any) -> ff.models.Transformer:
    return ff.models.build(
        case.config, grid_of(case.shape), policy=case.policy, seed=SEED, dtype=torch.float64, **changes
    )


def rows_of(case: Case, grid: ff.Grid) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [tuple(ff.local_rows(part, grid) for part in pair) for pair in zip(*case.batch(), strict=True)]  # type: ignore[misc]


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: local_of(parameter.grad).clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def plain_loops(case: Case) -> dict[str, Any]:
    model = model_of(case)
    rows = rows_of(case, model.grid)
    loss = forward_backward(model, rows).item()
    wanted = gradients_of(model)
    count = ff.count_targets(torch.cat([targets for _, targets in rows]), model.grid)
    total = 0.0
    with ff.accumulate(model):
        for pair in rows[:-1]:
            share = model(*pair, count=count)
            share.backward()
            total += share.item()
    share = model(*rows[-1], count=count)
    (2 * share).backward()  # a loss may be scaled
    total += share.item()
    accumulated = gradients_of(model)
    model(*rows[-1], count=count).backward()
    last = gradients_of(model)
    off = {name: (accumulated[name] - last[name] - wanted[name]).abs().max().item() for name in wanted}
    forward_backward(model, rows)
    forward_backward(model, rows)  # adds to the gradients of the step before
    twice = gradients_of(model)
    off |= {f"{name} twice": (twice[name] - 2 * wanted[name]).abs().max().item() for name in wanted}
    for pair in rows[-1:] * 2:
        model(*pair, count=count).backward()
    twice = gradients_of(model)
    off |= {f"{name} plain twice": (twice[name] - 2 * last[name]).abs().max().item() for name in wanted}
    model(*rows[-1], count=count).backward(inputs=list(model.parameters()))
    named = gradients_of(model)
    off |= {f"{name} by name": (named[name] - last[name]).abs().max().item() for name in wanted}
    model.eval()
    with torch.no_grad():
        shares = [model(*pair, count=count).item() for pair in rows]
    return {"loss": loss, "accumulated": total, "evaluated": sum(shares), "off": max(off.values())}


@pytest.mark.parametrize("case", others_slow(SHAPES, 2), ids=str)
def test_a_plain_loop_computes_what_forward_backward_computes(ranks, case: Case) -> None:
    for found in ranks(case.shape.world).run(plain_loops, case):
        assert found["off"] < 1e-12
        assert found["accumulated"] == pytest.approx(found["loss"], abs=1e-12)
        assert found["evaluated"] == pytest.approx(found["loss"], abs=1e-12)


def logits_and_text(case: Case) -> dict[str, Any]:
    model = model_of(case).eval()
    tokens = rows_of(case, model.grid)[0][0]
    with torch.no_grad():
        logits = model(tokens)
    text = generate(model, case.batch()[0][0][:1, :3], new_tokens=4, temperature=0)
    return {"logits": logits, "text": text, "places": tokens}


@pytest.mark.parametrize("case", others_slow(SHAPES[:2], 2), ids=str)
def test_logits_and_generated_tokens_are_those_of_one_process(ranks, case: Case) -> None:
    alone = Case(Shape())
    one = ranks(1).run(logits_and_text, alone)[0]
    for found in ranks(case.shape.world).run(logits_and_text, case):
        assert (found["logits"] - one["logits"]).abs().max() < 1e-12
        assert found["text"] == one["text"]


def errors_of(tries: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """What each try raises, by name."""
    said = {}
    for name, act in tries.items():
        try:
            act()
            said[name] = "nothing"
        except (ValueError, RuntimeError) as error:
            said[name] = str(error)
    return said


def losses_or_errors(model: ff.models.Transformer, steps: Sequence[Any]) -> list[str]:
    """The loss of each step, or what it raises."""
    said = []
    for rows in steps:
        try:
            said.append(f"{forward_backward(model, rows).item():.6f}")
        except ValueError as error:
            said.append(str(error))
        model.zero_grad()
    return said


def refused_batches(case: Case) -> list[str]:
    model = model_of(case)
    good = rows_of(case, model.grid)
    bad = [*good[:2], (good[2][0] + 1000 * (model.grid.coords["x"] == 0), good[2][1]), *good[3:]]
    return losses_or_errors(model, [bad, good])


def test_all_ranks_refuse_a_batch_and_go_on_with_the_next(ranks) -> None:
    case = Case(Shape(data=2, pipe=2))
    found = ranks(4).run(refused_batches, case)
    assert all("below vocab=53" in refused for refused, _ in found)
    assert len({loss for _, loss in found}) == 1


def unlike_ranks(case: Case) -> list[str]:
    model = model_of(case)
    here, rows = model.grid.coords["pipe"], rows_of(case, model.grid)
    others = [(tokens + here * (tokens < 9), targets) for tokens, targets in rows]
    return losses_or_errors(model, [rows[: 4 - here], others, rows])


def test_pipe_ranks_with_other_rows_or_other_numbers_of_them_are_refused(ranks) -> None:
    found = ranks(2).run(unlike_ranks, Case(Shape(pipe=2)))
    for number, rows, loss in found:
        assert "ranks disagree on the number of micro-batches" in number
        assert "ranks of one place were given different rows" in rows
        assert float(loss) > 0


def what_is_refused(case: Case) -> dict[str, str]:
    model = model_of(case)
    forward_backward(model, rows_of(case, model.grid))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    tries: dict[str, Callable[[], Any]] = {
        "norm of torch": lambda: clip_grad_norm_(model.parameters(), 1.0),
        "torch's own total": lambda: nn.utils.get_total_norm([p.grad for p in model.parameters()]),
        "scaler of torch": lambda: scaler.unscale_(torch.optim.SGD(model.parameters())),
        "a norm without parameters": lambda: ff.clip_grad_norm_([], 1.0),
        "any module": lambda: ff.parallelize(nn.Linear(4, 4), model.grid),
        "a layer of another rank": lambda: model.layers[3 if model.grid.coords["pipe"] == 0 else 0](None),
        "no layer for a rank": lambda: model_of(Case(case.shape, Policy(stages=Stages((0, 3, 3, 6), (0, 1, 0))))),
        "stages of another model": lambda: model_of(Case(case.shape, Policy(stages=Stages.even(7, 2)))),
        "an unknown schedule": lambda: forward_backward(
            model_of(Case(case.shape, Policy(schedule="2f2b"))), rows_of(case, model.grid)
        ),
        "no micro-batch": lambda: forward_backward(model, []),
        "some parameters": lambda: model(*rows_of(case, model.grid)[0]).backward(inputs=[next(model.parameters())]),
    }
    return errors_of(tries)


def test_what_a_pipeline_cannot_do_is_refused_with_a_way_out(ranks) -> None:
    for said in ranks(2).run(what_is_refused, Case(Shape(pipe=2))):
        assert "call ff.clip_grad_norm_(model.parameters(), max_norm)" in said["norm of torch"]
        assert said["torch's own total"] == said["norm of torch"]
        assert "use Policy(compute_dtype=torch.bfloat16)" in said["scaler of torch"]
        assert "the parameters of the whole model" in said["a norm without parameters"]
        assert "use pipe=1" in said["any module"]
        assert "on another rank along pipe" in said["a layer of another rank"]
        assert "leaves pipe rank 1 without a layer" in said["no layer for a rank"]
        assert "leave Policy.stages out" in said["stages of another model"]
        assert "there is no schedule '2f2b'" in said["an unknown schedule"]
        assert "at least one micro-batch" in said["no micro-batch"]
        assert "freeze the others" in said["some parameters"]
