"""Any family on any grid computes what the unmodified model computes on one process.

For each case: loss, logits and every gradient of the first step; losses and parameters of three AdamW steps; names and
shapes of `state_dict`, and its values after the plain model's has been loaded; greedy generation.
soak_families.py walks every family over many grids, with all laws; here those of `BOTH` have two, the larger with
generation, the smaller with loading, and the others one of the two by turns.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

import fourfold as ff
from families import FAMILIES, Case, batch, build, generate
from fourfold.axes import CUTS
from fourfold.grid import Shape
from fourfold.params import local_of
from fourfold.policy import Policy
from fourfold.wrap import whole_tensors
from harness import Ranks, grid_of
from parity import LocalAdamW, local_block
from share import others_slow, share

STEPS = 3
PAIRS = [
    (Shape(x=2, y=2), Shape(z=2)),
    (Shape(x=2, z=2), Shape(data=2)),
    (Shape(y=2, z=2), Shape(x=2)),
    (Shape(z=2, data=2), Shape(y=2)),
    (Shape(x=2, data=2), Shape(z=2)),
    (Shape(y=2, data=2), Shape(x=2)),
]
BOTH = ("llama", "qwen2", "gemma2", "gpt2", "opt", "bert", "vit", "t5")
"""One of each structure: the other families are built of the same parts."""


def cases() -> list[Case]:
    found = []
    for number, (name, family) in enumerate((n, f) for n, f in FAMILIES.items() if not f.extra):
        for turn, shape in enumerate(PAIRS[number % len(PAIRS)]):
            if name not in BOTH and turn != (number + number // len(PAIRS)) % 2:
                continue
            found.append(
                Case(
                    name,
                    shape,
                    ("sharded", "replicated")[(number + number // len(PAIRS) + turn) % 2],
                    padded=(number + turn) % 2 == 1 and family.batch != "images",
                    widened=(number // 2 + turn) % 2 == 1,
                    generates=turn == 0,
                    loads=turn == 1,
                )
            )
    # two pools of ranks in turn, and ranks keep their grid from case to case
    return sorted(found, key=lambda case: (case.shape.world, str(case.shape)))


@pytest.mark.parametrize("case", others_slow(share(cases(), 12), 2), ids=str)
def test_family_on_a_grid_equals_the_plain_model(ranks, case: Case) -> None:
    check(ranks(case.shape.world), case)


def test_every_axis_occurs_with_every_mode_and_option() -> None:
    for axis in CUTS:
        cut = [case for case in cases() if case.shape.sizes[axis] > 1]
        for option in ("activations", "padded", "widened", "generates", "loads"):
            assert len({getattr(case, option) for case in cut}) == 2, f"{axis}: {option}"
    assert {case.name for case in cases()} == {name for name, family in FAMILIES.items() if not family.extra}
    for name in BOTH:
        own = [case for case in cases() if case.name == name]
        assert {case.activations for case in own} == {"sharded", "replicated"}, name
        assert {case.widened for case in own} == {False, True}, name


def check(pool: Ranks, case: Case, timeout: float = 150) -> float:
    """The largest error; raises where one is above the tolerance, or names, shapes or tokens differ. The first case of
    a pool waits until all of its ranks have imported transformers."""
    pool.start(on_ranks, case)
    one = on_one_process(case.alone)
    ranks = pool.results(timeout)
    worst = errors(case, one, ranks)
    wrong = {kind: f"{error:.1e} in {name}" for kind, (error, name) in worst.items() if not error <= case.tolerance}
    assert not wrong, f"{case}: above {case.tolerance}: {wrong}"
    for found in ranks:
        assert found["shapes"] == one["shapes"], f"{case}: {sorted(found['shapes'].items() ^ one['shapes'].items())}"
        assert found["changed"] == [], f"{case}: loaded from the plain model, and differ"
        if case.generates:
            assert found["tokens"] == one["tokens"], f"{case}: {found['tokens']} generated, not {one['tokens']}"
    return max(error for error, _ in worst.values())


@cache
def on_one_process(case: Case) -> dict[str, Any]:
    model = build(case.name)
    found: dict[str, Any] = {"losses": [], "shapes": shapes(model.state_dict())}
    found["tokens"] = generate(model, case)
    optimizer = torch.optim.AdamW(model.parameters(), **case.adam, fused=True)
    for step in range(STEPS):
        loss = 0.0
        micro_steps = case.micro_steps(batch(case, step), case.shape.places)
        for inputs in micro_steps:
            with case.arithmetic(case.padded):
                output = model(**inputs)
            (output.loss / len(micro_steps)).backward()
            loss += output.loss.item() / len(micro_steps)
        if step == 0:
            found["logits"] = output.logits.detach()
            found["gradients"] = {name: p.grad.clone() for name, p in named(model)}
        found["losses"].append(loss)
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = {name: p.detach() for name, p in named(model)}
    return found


def named(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A tied weight under each of its names, as in `state_dict`."""
    return model.named_parameters(remove_duplicate=False)


def on_ranks(case: Case) -> dict[str, Any]:
    grid = grid_of(case.shape)
    model = build(case.name)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    if case.checkpoints and model.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = ff.parallelize(model, grid, policy=Policy(activations=case.activations))
    found: dict[str, Any] = {"losses": [], "coords": grid.coords, "shapes": shapes(model.state_dict())}
    found["tokens"] = generate(model, case) if case.generates else None
    optimizer = adamw(model, case)
    for step in range(STEPS):
        own = {name: ff.local_rows(rows, grid).to(grid.device) for name, rows in batch(case, step).items()}
        micro_steps, loss = case.micro_steps(own, 1), 0.0
        for number, inputs in enumerate(micro_steps):
            last = number == len(micro_steps) - 1
            with contextlib.nullcontext() if last else ff.accumulate(model):
                with case.arithmetic(case.padded):
                    output = model(**inputs)
                (output.loss / len(micro_steps)).backward()
            loss += output.loss.item() / len(micro_steps)
        if step == 0:
            found["logits"] = array(output.logits)
            found["gradients"] = arrays(whole_tensors(model, "gradient"))
        found["losses"].append(loss)
        optimizer.step()
        model.zero_grad()
    found["parameters"] = arrays(whole_tensors(model, "parameter"))
    if case.loads:
        model.load_state_dict(plain)
    found["changed"] = changed(plain, model.state_dict()) if case.loads else []
    return found


def changed(plain: dict[str, Tensor], state: dict[str, Tensor]) -> list[str]:
    """Names whose part on this rank is not, bit for bit, that part of the plain tensor. No `full_tensor`, which takes
    torch long to plan anew for each mesh and shape."""
    names = []
    for name, value in state.items():
        whole = plain[name]
        if isinstance(value, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
            whole = whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
            value = local_of(value)
        if not torch.equal(value.cpu(), whole):
            names.append(name)
    return names


def adamw(model: torch.nn.Module, case: Case) -> Any:
    if case.through_dtensors:
        return torch.optim.AdamW(model.parameters(), **case.adam, fused=True)
    optimizer = LocalAdamW(model.parameters())
    optimizer.adamw.param_groups[0].update(case.adam)
    return optimizer


def shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def array(tensor: Tensor) -> Any:
    """numpy: a tensor would cross the pipe as shared memory."""
    return tensor.detach().cpu().numpy().copy()


def arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: array(tensor) for name, tensor in tensors.items()}


def errors(case: Case, one: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """Law 1's error by kind, with the name and rank where it is largest: max|a - b| / max(max|b|, s), s the largest
    value of that kind over the whole model."""
    worst: dict[str, tuple[float, str]] = {}

    def compare(kind: str, name: str, a: Any, b: Tensor | None, scale: float) -> None:
        same = a is not None and b is not None and a.shape == b.shape
        difference = (torch.as_tensor(a) - b).abs().max().item() if same else math.inf
        error = difference / scale if math.isfinite(difference) else math.inf
        worst[kind] = max(worst.get(kind, (0.0, "")), (error, name))

    for rank, found in enumerate(ranks):
        losses = torch.tensor(one["losses"])
        compare("losses", f"rank {rank}", torch.tensor(found["losses"]), losses, losses.abs().max().item())
        logits = local_block(one["logits"], case.shape, found["coords"])
        compare("logits", f"rank {rank}", found["logits"], logits, one["logits"].abs().max().item())
        for kind in ("gradients", "parameters"):
            scale = max(whole.abs().max().item() for whole in one[kind].values())
            for name in one[kind].keys() | found[kind].keys():
                compare(kind, f"{name} on rank {rank}", found[kind].get(name), one[kind].get(name), scale)
    return worst
