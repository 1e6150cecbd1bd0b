"""Mixtures of experts that several tests build, one step of them, and what that step must be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fourfold as ff
import plain
from fourfold.nn.layer import specs_of
from fourfold.params import local_of
from fourfold.policy import Policy
from fourfold.shape import Shape
from harness import grid_of, join_shards


def mixture(**changes: Any) -> ff.models.ModelConfig:
    sizes = dict(layers=2, hidden=24, heads=24, kv_heads=24, head_dim=8, mlp_hidden=24, vocab=48, seq=16)
    return ff.models.config("llama-tiny", **{**sizes, **dict(experts=5, expert_hidden=24), **changes})


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(48, (8, 12), generator=generator) for _ in range(2))
    return tokens, targets


def step_on(
    shape: Shape, policy: dict[str, Any], micro_steps: int, config: ff.models.ModelConfig
) -> tuple[float, dict[str, Tensor], list[list[int]]]:
    """Take a step, with a loss that is scaled by 3 where it is not the runtime that runs backward."""
    grid = grid_of(shape)
    model = ff.models.build(config, grid, policy=Policy(**policy), dtype=torch.float64, seed=5)
    tokens, targets = (ff.local_rows(whole, grid) for whole in batch())
    parts = list(zip(tokens.chunk(micro_steps), targets.chunk(micro_steps), strict=True))
    scheduled = shape.pipe > 1 and micro_steps > 1
    scale = 1.0 if scheduled else 3.0
    if scheduled:
        loss = ff.forward_backward(model, parts).item()
    else:
        count = ff.count_targets(targets, grid) if micro_steps > 1 else None
        model.gradients.begin_step(micro_steps)
        loss = 0.0
        for part in parts:
            share = model(*part, count=count)
            (scale * share).backward()
            loss += share.item()
    specs = specs_of(model)
    gradients = {
        name: join_shards(parameter.grad._local_tensor, specs[name], grid) / scale
        for name, parameter in model.named_parameters()
    }
    return loss, gradients, model.expert_load().tolist()


def expected(config: ff.models.ModelConfig) -> tuple[float, dict[str, Tensor]]:
    """The same from the definition (E20): the loss that is shown, and the gradients of all losses together."""
    model = plain.make(config, 5)
    tokens, targets = batch()
    logits = model.logits(model.hidden(tokens))
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    (loss + plain.router_losses(model, tokens.numel())).backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


# --- with documents

PACKED_ROWS, PACKED_SEQ = 8, 12


def packed(documents: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens, targets and, for documents, positions; some targets are masked.

    `documents` is the seed of their lengths; without it rows are one document each.
    """
    tokens, targets = batch()
    drawn = random.Random(documents)
    targets = targets.masked_fill(torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.2, -100)
    if not documents:
        return tokens, targets, None
    rows = []
    for _ in range(PACKED_ROWS):
        row: list[int] = []
        while len(row) < PACKED_SEQ:
            row += range(min(drawn.randint(1, 8), PACKED_SEQ - len(row)))
        rows.append(row)
    return tokens, targets, torch.tensor(rows)


def packed_step(
    shape: Shape, policy: Policy, config: ff.models.ModelConfig, documents: str
) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of a training pass, and the gradients of what this pipe rank holds."""
    grid = grid_of(shape)
    model = ff.models.build(config, grid, policy=policy, dtype=torch.float64, seed=5)
    tokens, targets, positions = (None if part is None else ff.local_rows(part, grid) for part in packed(documents))
    loss = model(tokens, targets, positions=positions)
    loss.backward()
    specs = specs_of(model)
    parameters = {name: one for name, one in model.named_parameters() if one.grad is not None}
    return loss.item(), {name: join_shards(local_of(one.grad), specs[name], grid) for name, one in parameters.items()}


def packed_errors(
    alone: tuple[float, dict[str, Tensor]], found: Sequence[tuple[float, dict[str, Tensor]]]
) -> list[float]:
    """Return how far losses and gradients are from those of one process, as parts of the largest gradient."""
    loss, gradients = alone
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    errors = [abs(one - loss) for one, _ in found]
    return errors + [float((grads[name] - gradients[name]).abs().max()) / scale for _, grads in found for name in grads]
