"""Mixtures of experts that several tests build, one step of them, and what that step must be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fourfold as ff
import plain
from fourfold.nn.layer import specs_of
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
    scale = 1.0 if shape.pipe > 1 else 3.0
    if shape.pipe > 1:
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
    model, kept = plain.make(config, 5), []
    for block in model.layers:
        block.mlp.router.register_forward_hook(lambda _, __, logits: kept.append(logits))
    tokens, targets = batch()
    logits = model.logits(model.hidden(tokens))
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    whole = loss
    for each in kept:
        each = each.view(8, 12, config.experts)
        scores = each.softmax(-1) if config.score == "softmax" else each.sigmoid()
        shares = scores / scores.sum(-1, keepdim=True)
        chosen = functional.one_hot(scores.topk(config.top_k, -1).indices, config.experts).double()
        used = chosen.sum((1, 2)) / (12 * config.top_k)
        whole = whole + config.aux * config.experts * (used * shares.mean(1)).sum(-1).mean()
        whole = whole + config.z_loss * each.logsumexp(-1).square().mean()
    whole.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}
