"""Law 1 for the pipe axis: every schedule on every grid computes what one process computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import fourfold as ff
import plain
from fourfold.axes import CUTS
from fourfold.grad_norm import grad_norm
from fourfold.layout import chunk
from fourfold.nn.layer import specs_of
from fourfold.params import local_of
from fourfold.pipeline import forward_backward
from fourfold.policy import Overlap, Policy
from fourfold.schedule.stages import Stages
from fourfold.shape import Shape
from harness import grid_of

SEED = 5


@dataclass(frozen=True)
class Case:
    shape: Shape
    policy: Policy = Policy()
    tied: bool = True
    layers: int = 4
    micro_steps: int = 4
    llama: bool = False

    def __str__(self) -> str:
        return f"{self.shape} {self.policy.schedule} {self.policy.gather_weights} n={self.micro_steps}"

    @property
    def config(self) -> ff.models.ModelConfig:
        return ff.models.config(
            "llama-tiny" if self.llama else "gpt-tiny",
            layers=self.layers, hidden=24, heads=4, kv_heads=4, head_dim=6, mlp_hidden=24, vocab=53, seq=8,
            tied=self.tied,
        )  # fmt: skip

    def batch(self) -> tuple[Tensor, Tensor]:
        """[micro_steps, rows, seq] of the whole batch."""
        generator = torch.Generator().manual_seed(1)
        whole = self.micro_steps, 2 * self.shape.places, 7
        tokens, targets = (torch.randint(53, whole, generator=generator) for _ in range(2))
        targets[:, :, 0] = -100
        return tokens, targets


def on_one_process(case: Case) -> dict[str, Any]:
    model = plain.make(case.config, SEED)
    tokens, targets = case.batch()
    loss = torch.zeros((), dtype=torch.float64)
    for rows, aims in zip(tokens, targets, strict=True):
        logits = model.logits(model.hidden(rows))
        loss = loss + functional.cross_entropy(logits.flatten(0, 1), aims.flatten(), reduction="sum")
    loss = loss / (targets != -100).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    return {"loss": loss.item(), "gradients": gradients, "norm": norm.item()}


def on_ranks(case: Case) -> dict[str, Any]:
    grid = grid_of(case.shape)
    model = ff.models.build(case.config, grid, policy=case.policy, seed=SEED, dtype=torch.float64)
    tokens, targets = case.batch()
    rows = [tuple(ff.local_rows(part[i], grid) for part in (tokens, targets)) for i in range(case.micro_steps)]
    loss = forward_backward(model, rows)
    specs, gradients = specs_of(model), {}
    for name, parameter in model.named_parameters():
        (first, *rest), shard = specs[name].box(grid), parameter.grad._local_tensor
        if case.policy.shard_optimizer:
            first = first[slice_of(chunk(len(first), grid.size("data"), grid.coords["data"]))]
        gradients[name] = (first, *rest), shard.clone()
    return {"loss": loss.item(), "gradients": gradients, "norm": grad_norm(model.parameters()).item()}


def slice_of(part: range) -> slice:
    return slice(part.start, part.stop)


def largest_error(one: dict[str, Any], found: list[dict[str, Any]]) -> float:
    errors = [0.0]
    seen = set()
    for result in found:
        errors += [abs(result["loss"] - one["loss"]), abs(result["norm"] - one["norm"])]
        for name, (box, gradient) in result["gradients"].items():
            seen.add(name)
            whole = one["gradients"][name][tuple(map(slice_of, box))]
            if gradient.numel():
                errors.append((gradient - whole).abs().max().item())
    assert seen == one["gradients"].keys()
    return max(errors)


WAVE = Stages.even(4, 2, 2, "wave")
LOOP = Stages.even(4, 2, 2)
CASES = [
    Case(Shape(pipe=2), Policy(schedule="gpipe")),
    Case(Shape(pipe=2)),
    Case(Shape(pipe=2), tied=False, llama=True, micro_steps=1),
    Case(Shape(pipe=2), Policy(schedule="zb-h1")),
    Case(Shape(pipe=2), Policy(stages=LOOP)),
    Case(Shape(pipe=2), Policy(stages=LOOP, schedule="looped-bfs"), micro_steps=8),  # sends long before receives
    Case(Shape(pipe=2), Policy(stages=WAVE, schedule="v-half")),
    Case(Shape(pipe=2), Policy(stages=WAVE, schedule="zb-v", overlap=Overlap(receive_ahead=False)), micro_steps=8),
    Case(Shape(pipe=2), Policy(stages=Stages((0, 4, 6), (0, 1)), recompute="block")),
    Case(Shape(x=2, pipe=2), Policy(overlap=Overlap(halves=2))),
    Case(Shape(z=2, pipe=2), Policy(schedule="zb-h1")),
    Case(Shape(z=2, pipe=2), Policy(stages=LOOP, keep_weights=True), llama=True),
    Case(Shape(z=2, pipe=2), Policy(stages=LOOP, gather_weights="block", overlap=Overlap(halves=2))),
    Case(Shape(z=2, pipe=2), Policy(gather_weights="step", recompute="block"), llama=True),
    Case(Shape(z=2), Policy(gather_weights="step")),
    Case(Shape(data=2, pipe=2), Policy(shard_optimizer=True)),
    Case(Shape(y=2, pipe=2), Policy(schedule="zb-h1", recompute="attention")),
    Case(Shape(pipe=4), micro_steps=3),
    Case(Shape(pipe=4), Policy(schedule="zb-h1", stages=Stages((0, 1, 2, 3, 4), (0, 1, 2, 3))), layers=2, tied=False),
    Case(Shape(pipe=2), Policy(stages=Stages((0, 2, 2, 3, 6), (0, 1, 0, 1))), tied=False),
]


SOME = [pytest.param(case, marks=[pytest.mark.slow] if place % 4 else []) for place, case in enumerate(CASES)]


@pytest.mark.parametrize("case", SOME, ids=str)
def test_every_schedule_computes_what_one_process_computes(ranks, case: Case) -> None:
    pool = ranks(case.shape.world)
    pool.start(on_ranks, case)
    assert largest_error(on_one_process(case), pool.results()) < 1e-10


@dataclass(frozen=True)
class Variant:
    """One way to run the same step: other pipe ranks, cuts, placement and order."""

    pipe: int
    policy: Policy


VARIANTS = [
    Variant(1, Policy()),
    Variant(2, Policy(schedule="gpipe")),
    Variant(2, Policy(schedule="zb-h1", stages=Stages((0, 2, 6), (0, 1)))),
    Variant(2, Policy(stages=LOOP)),
    Variant(2, Policy(stages=WAVE, schedule="found")),
    Variant(2, Policy(stages=Stages((0, 3, 6), (0, 1), ("block", "none")))),
]


def trained(case: Case) -> dict[str, Any]:
    """Two steps of clipped AdamW in fp32 with dropout: the losses, norms and shards of all parameters."""
    grid = grid_of(case.shape)
    config = replace(case.config, dropout=0.1)
    model = ff.models.build(config, grid, policy=case.policy, seed=SEED)
    optimizer = ff.optim.AdamW(model, 0.01)
    tokens, targets = case.batch()
    rows = [tuple(ff.local_rows(part[i], grid) for part in (tokens, targets)) for i in range(case.micro_steps)]
    told = []
    for _ in range(2):
        told += [forward_backward(model, rows).item(), optimizer.clip_and_step(0.1).norm.item()]
        optimizer.zero_grad()
    shards = {name: local_of(parameter).clone() for name, parameter in model.named_parameters()}
    place = tuple(grid.coords[axis] for axis in CUTS)
    return {"told": told, "shards": shards, "place": place}


LATER = [pytest.param(cuts, marks=pytest.mark.slow) for cuts in ({"data": 2}, {"x": 2}, {"z": 2}, {"data": 4})]


@pytest.mark.parametrize("cuts", [{}, *LATER], ids=str)
def test_schedules_cuts_and_placements_change_no_bit(ranks, cuts: dict[str, int]) -> None:
    results = []
    for variant in VARIANTS:
        case = Case(Shape(**cuts, pipe=variant.pipe), variant.policy, tied=False)
        found: dict[tuple[int, ...], dict[str, Any]] = {}
        for rank in ranks(case.shape.world).run(trained, case):
            place = found.setdefault(rank["place"], {"told": rank["told"], "shards": {}})
            assert place["told"] == rank["told"]
            place["shards"] |= rank["shards"]
        results.append(found)
    for variant, other in zip(VARIANTS[1:], results[1:], strict=True):
        for place, one in results[0].items():
            assert other[place]["told"] == one["told"], variant
            assert other[place]["shards"].keys() == one["shards"].keys()
            unequal = [name for name, shard in one["shards"].items() if not shard.equal(other[place]["shards"][name])]
            assert not unequal, variant
