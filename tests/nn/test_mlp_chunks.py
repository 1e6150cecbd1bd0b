"""The MLP in chunks of tokens: the loss and the gradients of one process, with hidden units of one chunk at a time."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fourfold as ff
from closed_form import APART, ClosedForm
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective
from fourfold.nn.layer import specs_of
from fourfold.nn.lora import LoraConfig
from fourfold.params import local_of
from fourfold.pipeline import forward_backward
from fourfold.policy import Overlap, Policy
from fourfold.schedule.stages import Stages
from harness import grid_of, join_shards

SEED, MICRO_STEPS = 7, 2
CONFIGS = {
    "gpt": ff.models.config("gpt-tiny", layers=2, vocab=53),
    "llama": ff.models.config("llama-tiny", layers=2, vocab=53),
}


def batch() -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a step, 8 rows of 7 tokens each, some of which have no target."""
    draw = torch.Generator().manual_seed(2)
    whole = torch.randint(53, (MICRO_STEPS, 2, 8, 7), generator=draw)
    return [(tokens, targets.masked_fill(targets % 5 == 0, -100)) for tokens, targets in whole]


@cache
def alone(kind: str) -> tuple[float, dict[str, Tensor]]:
    model = ff.models.build(CONFIGS[kind], Grid.alone("cpu"), seed=SEED, dtype=torch.float64)
    loss = forward_backward(model, batch())
    return loss.item(), {name: local_of(one.grad) for name, one in model.named_parameters()}


def steps(shape: Shape, cases: list[tuple[str, Policy]]) -> list[dict[str, Any]]:
    grid, found = grid_of(shape), []
    for kind, policy in cases:
        model = ff.models.build(CONFIGS[kind], grid, policy=policy, seed=SEED, dtype=torch.float64)
        rows = [tuple(ff.local_rows(part, grid) for part in micro_batch) for micro_batch in batch()]
        with grid.ledger.watch() as records:
            loss = forward_backward(model, rows)
        specs = specs_of(model)
        gradients = {name: join_shards(local_of(one.grad), specs[name], grid) for name, one in model.named_parameters()}
        found.append({"loss": loss.item(), "gradients": gradients, "records": records})
    return found


TWO = Overlap(halves=2)
EVERY = [
    *(Policy(mlp_chunk=5, recompute=kind) for kind in ("none", "attention", "block")),
    *(Policy(mlp_chunk=5, recompute=kind, overlap=TWO) for kind in ("none", "block")),
    *(Policy("replicated", mlp_chunk=5, recompute=kind, overlap=TWO) for kind in ("none", "block")),
    Policy(mlp_chunk=1),
    Policy(mlp_chunk=1000, recompute="block"),  # more than there are
    Policy(mlp_chunk=5, keep_gathered=True, keep_weights=True, overlap=TWO),
    Policy(mlp_chunk=5, keep_gathered=True, keep_weights=True, recompute="block"),
    Policy(mlp_chunk=5, overlap=Overlap.off()),
    Policy(mlp_chunk=4, loss_chunk=6, recompute="block", shard_optimizer=True),
]
PIPES = [
    Policy(mlp_chunk=5, schedule="zb-h1"),
    Policy(mlp_chunk=5, schedule="zb-h1", recompute="block", overlap=TWO),
    Policy(mlp_chunk=3, stages=Stages((0, 2, 4), (0, 1), ("none", "block"))),
    Policy(mlp_chunk=5, gather_weights="step"),
    Policy(mlp_chunk=5, gather_weights="block", schedule="gpipe"),
]
SHAPES = [
    (Shape(x=2, y=2), EVERY[:-1]),
    (Shape(x=2, z=2), EVERY[:-1]),
    (Shape(y=2, z=2), EVERY[:-1]),
    (Shape(z=2, data=2), EVERY),
    (Shape(x=3), EVERY[:5]),
    (Shape(x=2, z=2, context=2), EVERY[:-1]),
    (Shape(z=2, pipe=2), PIPES),
    (Shape(x=2, pipe=2), PIPES[:3]),
    (Shape(y=2, pipe=2), PIPES[:3]),
]


QUICK = (3, 6)
"""The places of grids that run here with some policies; the slow tests run all of both."""


def cases_of(shape: Shape, policies: list[Policy]) -> list[tuple[str, Policy]]:
    kinds = [kind for kind in CONFIGS if CONFIGS[kind].misfit(shape, Policy()) is None]
    return [(kind, policy) for policy in policies for kind in kinds]


def compare(ranks: Any, shape: Shape, cases: list[tuple[str, Policy]]) -> None:
    for results in ranks(shape.world).run(steps, shape, cases, timeout=180):
        for (kind, policy), result in zip(cases, results, strict=True):
            loss, gradients = alone(kind)
            assert result["loss"] == pytest.approx(loss, rel=0, abs=1e-12), (kind, policy)
            for name, found in result["gradients"].items():  # a rank along pipe has some of them
                if not policy.shard_optimizer:
                    torch.testing.assert_close(found, gradients[name], rtol=0, atol=1e-12, msg=f"{name} {policy}")


@pytest.mark.parametrize("place", QUICK, ids=lambda place: str(SHAPES[place][0]))
def test_chunks_give_the_gradients_of_one_process(ranks, place: int) -> None:
    shape, policies = SHAPES[place]
    compare(ranks, shape, [case for case in cases_of(shape, policies) if case[1].mlp_chunk > 1][::8])


@pytest.mark.slow
@pytest.mark.parametrize("place", range(len(SHAPES)), ids=lambda place: str(SHAPES[place][0]))
def test_all_chunks_on_all_grids_give_the_gradients_of_one_process(ranks, place: int) -> None:
    compare(ranks, SHAPES[place][0], cases_of(*SHAPES[place]))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_of_any_size(chunk: int) -> None:
    for kind, config in CONFIGS.items():
        model = ff.models.build(
            config, Grid.alone("cpu"), policy=Policy(mlp_chunk=chunk), seed=SEED, dtype=torch.float64
        )
        loss, gradients = alone(kind)
        assert forward_backward(model, batch()).item() == pytest.approx(loss, rel=0, abs=1e-13)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(local_of(parameter.grad), gradients[name], rtol=0, atol=1e-13, msg=name)


def records_of(shape: Shape, policy: Policy) -> list[Collective]:
    grid = grid_of(shape)
    model = ff.models.build(CONFIGS["gpt"], grid, policy=policy, dtype=torch.float64)
    tokens, targets = (ff.local_rows(part, grid) for part in batch()[0])
    with grid.ledger.watch() as records:
        model(tokens, targets).backward()
    return records


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
@pytest.mark.parametrize("recompute", ["none", pytest.param("block", marks=pytest.mark.slow)])
def test_messages_over_y_are_sent_by_chunk_and_all_others_once(ranks, mode: str, recompute: str) -> None:
    shape, policy = Shape(x=2, y=2, z=2), Policy(mode, mlp_chunk=5, recompute=recompute, overlap=APART)
    for rank, found in enumerate(ranks(8).run(records_of, shape, policy)):
        form = ClosedForm(CONFIGS["gpt"], shape, policy, 4, 7, torch.float64, rank)
        assert Counter(found) == Counter([*form.micro_step(), *form.gradients()])
        spread = [one for one in found if one.axis == "y" and one.label == "layers.0.mlp.up"]
        forward = [one for one in spread if one.op == ("reduce_scatter" if mode == "sharded" else "all_reduce")]
        assert len(forward) == 2 * 6  # 28 tokens in chunks of 5, in forward and once more in backward
        assert len([one for one in found if one.axis == "z" and one.label == "layers.0.mlp.up"]) == 3


class WideTensors(TorchDispatchMode):
    """Notes how many rows tensors with so many columns have."""

    def __init__(self, columns: set[int]) -> None:
        super().__init__()
        self.columns = columns
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.dim() == 2 and tensor.shape[1] in self.columns:
                self.rows[tensor.shape[0]] += 1
        return out


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_hidden_units_exist_for_one_chunk_and_are_computed_twice(kind: str, recompute: str) -> None:
    config, chunk, tokens = CONFIGS[kind], 10, batch()[0][0]
    hidden, features = config.mlp_hidden, config.hidden
    grid = Grid.alone("cpu")
    model = ff.models.build(config, grid, policy=Policy(mlp_chunk=chunk, recompute=recompute))
    with WideTensors({hidden, 2 * hidden}) as wide, grid.ledger.events() as events:
        model(tokens, tokens).backward()
    assert tokens.numel() == 56
    assert set(wide.rows) <= {chunk, 56 % chunk, features}  # the last is the weight of `down` and its gradient
    up = "layers.0.mlp.gate+up" if kind == "llama" else "layers.0.mlp.up"
    products = Counter(event.what for event in events if isinstance(event.what, str))
    assert products[f"E1 {up}"] == 2 * 6
    assert products["E1 layers.0.mlp.down"] == products["E3 layers.0.mlp.down"] == products[f"E2 {up}"] == 6


def test_evaluation_keeps_nothing_and_gives_the_same_logits() -> None:
    tokens = batch()[0][0]
    with torch.no_grad():
        found = [
            ff.models.build("llama-tiny", Grid.alone("cpu"), policy=Policy(mlp_chunk=size), dtype=torch.float64)(tokens)
            for size in (0, 10)
        ]
    torch.testing.assert_close(*found, rtol=0, atol=1e-13)


@pytest.mark.parametrize("frozen", ["up", "down", "mlp", "bias"])
def test_frozen_weights_of_the_mlp_get_no_gradient(frozen: str) -> None:
    found = []
    for chunk in (0, 10):
        model = ff.models.build(CONFIGS["gpt"], Grid.alone("cpu"), policy=Policy(mlp_chunk=chunk), dtype=torch.float64)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (".mlp." in name and f".{frozen}" in name))
        model(*batch()[0]).backward()
        found.append({name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        torch.testing.assert_close(local_of(found[0][name]), local_of(found[1][name]), rtol=0, atol=1e-13, msg=name)


def test_dropout_draws_the_same_with_and_without_recompute() -> None:
    config, found = ff.models.config("gpt-tiny", layers=2, vocab=53, dropout=0.2), []
    for policy in (Policy(), Policy(mlp_chunk=9), Policy(mlp_chunk=9, recompute="block")):
        model = ff.models.build(config, Grid.alone("cpu"), policy=policy, dtype=torch.float64)
        model(*batch()[0]).backward()
        found.append([local_of(one.grad) for one in model.parameters()])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-13)


def test_a_hook_on_the_dropout_behind_the_mlp_reads_its_result_when_the_block_runs_again() -> None:
    seen: list[Tensor] = []
    config = ff.models.config("gpt-tiny", layers=2, vocab=53, dropout=0.2)
    model = ff.models.build(config, Grid.alone("cpu"), policy=Policy(mlp_chunk=9, recompute="block"))
    model.layers[0].mlp_dropout.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().clone()))
    model(*batch()[0]).backward()
    first, again = seen
    assert torch.equal(first, again)
    assert first.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch warns of what its own compiler uses
def test_compiled_chunks_compute_the_same() -> None:
    found = []
    for policy in (Policy(), Policy(mlp_chunk=10, compile=True)):
        model = ff.models.build(CONFIGS["llama"], Grid.alone("cpu"), policy=policy, dtype=torch.float64)
        model(*batch()[0]).backward()
        found.append([local_of(one.grad) for one in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_lora_pairs_of_an_mlp_are_refused() -> None:
    policy, grid = Policy(mlp_chunk=10), Grid.alone("cpu")
    with pytest.raises(ValueError, match="mlp_chunk=10: an MLP in chunks has no LoRA pairs; use mlp_chunk=0"):
        ff.models.build(CONFIGS["gpt"], grid, policy=policy, lora=LoraConfig(2, targets=("up",)))
    model = ff.models.build(CONFIGS["gpt"], grid, policy=policy, lora=LoraConfig(2, targets=("q", "v")))
    model(*batch()[0]).backward()
    with pytest.raises(ValueError, match="mlp_chunk=-1 must be a number of tokens, or 0 for all at once"):
        Policy(mlp_chunk=-1)
