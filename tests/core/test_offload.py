"""The inputs of blocks on the host: the step is bitwise the same, and one input is on the device between its passes."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.offload import HostPool
from fourfold.params import local_of
from fourfold.pipeline import forward_backward
from fourfold.policy import Overlap, Policy
from fourfold.schedule.stages import Stages
from fourfold.step_graph import why_not
from harness import grid_of
from share import others_slow

CPU = torch.device("cpu")
LAYERS = 4
CONFIG = ff.models.config("llama-tiny", layers=LAYERS, vocab=53)
ON = Policy(recompute="block", offload=True)


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(53, (2, rows, 7), generator=torch.Generator().manual_seed(3))
    return tokens[0], tokens[1]


def built(policy: Policy, grid: Grid | None = None, config: Any = CONFIG, **options: Any) -> Any:
    return ff.models.build(config, grid or Grid.alone("cpu"), policy=policy, **options)


def gradients(model: Any) -> list[Tensor]:
    return [local_of(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("halves", [1, 2])
def test_inputs_are_on_the_host_between_forward_and_backward(halves: int) -> None:
    model = built(Policy(recompute="block", offload=True, overlap=Overlap(halves=halves)))
    offloader, tokens = model.engine.offloader, batch()[0]
    stream = tokens.numel() * CONFIG.hidden * 4
    loss = model(*batch())
    assert offloader.counts.sent == LAYERS * halves
    assert offloader.pool.nbytes == LAYERS * stream
    assert offloader.device_nbytes == stream  # that of the last block
    loss.backward()
    counts = offloader.counts
    assert counts.found == halves  # those of the last block
    assert counts.fetched == counts.prefetched == (LAYERS - 1) * halves  # all others, each behind another block
    assert counts.fetched_nbytes == (LAYERS - 1) * stream
    assert offloader.pool.nbytes == offloader.device_nbytes == 0
    made = offloader.pool.made
    for _ in range(2):
        model(*batch()).backward()
    assert offloader.pool.made == made == LAYERS * halves  # buffers are pinned once


def test_a_device_never_has_more_than_two_inputs() -> None:
    model = built(ON)
    offloader, most = model.engine.offloader, []
    for layer in model.layers:
        layer.attention.register_forward_hook(lambda *_: most.append(offloader.device_nbytes))
    model(*batch()).backward()
    stream = batch()[0].numel() * CONFIG.hidden * 4
    # in forward the one before is on its way, in backward the next one; the one that is used is the block's own
    assert [nbytes // stream for nbytes in most] == [0, 1, 1, 1, 1, 1, 1, 0]


def steps(shape: Shape, policies: list[Policy], micro_steps: int) -> list[tuple[list[Tensor], dict[str, int]]]:
    grid, found = grid_of(shape), []
    rows = [tuple(ff.local_rows(part, grid) for part in batch())] * micro_steps
    for policy in policies:
        model = built(policy, grid)
        loss = forward_backward(model, rows)
        offloader = model.engine.offloader
        left = dict(sent=offloader.counts.sent, left=offloader.pool.nbytes, here=offloader.device_nbytes)
        found.append(([loss, *gradients(model)], left))
    return found


WAVE = Stages.even(LAYERS, 2, 2, "wave")
TWO = Overlap(halves=2)
GRIDS: list[tuple[Shape, dict[str, Any]]] = [
    (Shape(z=2, context=2), {}),
    (Shape(x=2, z=2), dict(overlap=TWO)),
    (Shape(y=2, data=2), dict(mlp_chunk=5, loss_chunk=6, shard_optimizer=True)),
    (Shape(pipe=2), dict(schedule="gpipe")),
    (Shape(pipe=2), dict(schedule="zb-h1", overlap=TWO)),
    (Shape(pipe=2), dict(schedule="zb-v", stages=WAVE)),
    (Shape(z=2, pipe=2), dict(schedule="1f1b", mlp_chunk=9)),
]


@pytest.mark.parametrize("place", others_slow(range(len(GRIDS)), 3), ids=lambda place: f"{GRIDS[place][0]} {place}")
def test_a_step_is_bitwise_the_same(ranks, place: int) -> None:
    shape, options = GRIDS[place]
    policies = [Policy(recompute="block", offload=offload, **options) for offload in (False, True)]
    found = ranks(shape.world).run(steps, shape, policies, 4)
    assert any(counted["sent"] for _, (_, counted) in found)  # a rank may have no block but the first of its stages
    for (without, none), (with_it, counted) in found:
        assert len(without) == len(with_it)
        assert all(map(torch.equal, without, with_it))
        assert none["sent"] == 0
        assert counted["left"] == counted["here"] == 0


def test_every_micro_batch_of_a_pipeline_has_its_inputs_on_the_host(ranks) -> None:
    """Both ranks have two layers; the second one's first input has arrived from the first, which holds it anyway."""
    policy = Policy(recompute="block", offload=True, schedule="gpipe")
    found = [result[0][1]["sent"] for result in ranks(2).run(steps, Shape(pipe=2), [policy], 4)]
    assert found == [4 * 2, 4 * 1]


def test_dropout_frozen_weights_and_packed_documents() -> None:
    config = ff.models.config("gpt-tiny", layers=3, vocab=53, dropout=0.2)
    positions = torch.arange(7).expand(8, 7) % 4
    found = []
    for policy in (Policy(recompute="block"), ON):
        model = built(policy, config=config)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" not in name and "layers.1" not in name)
        model(*batch(), positions=positions).backward()
        found.append(gradients(model))
    assert all(map(torch.equal, *found))


def test_evaluation_sends_nothing() -> None:
    model = built(ON)
    with torch.no_grad():
        model(*batch())
    with torch.inference_mode():
        model(batch()[0])
    assert model.engine.offloader.counts.sent == 0


def test_a_graph_that_is_dropped_or_fails_returns_its_buffers() -> None:
    model = built(ON)
    pool = model.engine.offloader.pool
    loss = model(*batch())
    assert pool.nbytes
    del loss
    assert pool.nbytes == 0


def test_an_error_in_the_middle_of_a_pass_returns_the_buffers() -> None:
    model = built(ON)
    pool = model.engine.offloader.pool

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    for hook in (model.layers[1].register_forward_hook, model.layers[1].attention.register_full_backward_hook):
        handle = hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(*batch()).backward()
        handle.remove()
        gc.collect()  # the error's frames
        assert pool.nbytes == 0
    model.zero_grad()
    made = pool.made
    model(*batch()).backward()
    assert (pool.made, pool.nbytes) == (made, 0)


def test_a_retained_graph_fetches_its_inputs_again() -> None:
    model = built(ON)
    loss = model(*batch())
    loss.backward(retain_graph=True)
    once = [gradient.clone() for gradient in gradients(model)]
    loss.backward()
    for one, two in zip(once, gradients(model), strict=True):
        torch.testing.assert_close(two, 2 * one)
    assert model.engine.offloader.counts.fetched == 2 * LAYERS - 1
    del loss
    assert model.engine.offloader.pool.nbytes == 0


def test_a_batch_of_another_shape_frees_idle_buffers() -> None:
    pool = HostPool()
    small, other = pool.take(8, CPU), pool.take(8, CPU)
    pool.give_back(small, CPU)
    pool.give_back(other, CPU)
    assert pool.take(8, CPU) in (small, other)
    pool.take(16, CPU)
    assert pool.take(8, CPU) not in (small, other)
    assert (pool.made, pool.nbytes, pool.most_nbytes) == (4, 32, 32)


@pytest.mark.parametrize("recompute", ["none", "attention"])
def test_blocks_that_keep_more_than_their_inputs_are_refused(recompute: str) -> None:
    with pytest.raises(ValueError, match=rf"offload=True with recompute='{recompute}': .*use recompute='block'"):
        built(Policy(recompute=recompute, offload=True))  # type: ignore[arg-type]


def test_recorded_steps_are_refused() -> None:
    model = built(ON)
    assert "offload=True" in why_not(model, torch.device("cuda"))
