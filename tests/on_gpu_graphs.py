"""The GPU tier of recorded steps, several NCCL ranks on one GPU. Needs torch and numpy, no pytest.

    FOURFOLD_TEST_DEVICE=cuda python tests/on_gpu_graphs.py [names of checks]

Every check prints a line. Start an MPS daemon first where ranks are to run at the same time.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import fourfold as ff
from benchmarks.speed.plain_models import Transformer
from fourfold.checkpoint.load import load_training
from fourfold.checkpoint.save import Saver
from fourfold.grid import Shape
from fourfold.nn.lora import LoraConfig
from fourfold.params import local_of
from fourfold.step_graph import StepGraph
from fourfold.tiles import pad_lengths
from fourfold.train.guard import Guard
from gpu_checks import Check, on_ranks, run_checks
from harness import grid_of

SHAPES = [Shape(x=2, z=2), Shape(x=2, data=2), Shape(z=4), Shape(x=4), Shape(y=2, z=2), Shape(data=4)]


def batches(grid: ff.Grid, steps: int, rows: int = 8, seq: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    drawn = [torch.randint(0, 250, (rows, seq), generator=generator) for _ in range(steps)]
    return [ff.local_rows(tokens, grid).to(grid.device) for tokens in drawn]


def lengths_of(tokens: torch.Tensor, step: int, grid: ff.Grid) -> list[int]:
    """Return other lengths of packed documents in every step and at every place."""
    drawn = random.Random(f"{step} {grid.coords['z']} {grid.coords['data']}")
    found = []
    for _ in tokens:
        left = tokens.shape[1]
        while left:
            found.append(drawn.choice([left, left // 2 or 1, min(left, 9)]))
            left -= found[-1]
    return found


def train(
    grid: ff.Grid,
    name: str,
    steps: int,
    *,
    recorded: bool,
    wrapped: bool = False,
    optimizer_kind: str = "AdamW",
    lora: LoraConfig | None = None,
    micro_steps: int = 1,
    documents: bool = False,
    policy: dict[str, Any],
    **changes: Any,
) -> tuple[list[float], list[torch.Tensor], str]:
    """Return the losses and norms of all steps, the parameters afterwards, and why nothing was recorded."""
    torch.use_deterministic_algorithms(True)
    policy = {key: getattr(torch, value) if key.endswith("dtype") else value for key, value in policy.items()}
    config = ff.models.config(name, **changes)
    if wrapped:
        torch.manual_seed(0)
        with torch.device(grid.device):
            plain = Transformer(config)
        plain.init_weights(torch.Generator(grid.device).manual_seed(0))
        model: Any = ff.parallelize(plain, grid, policy=ff.Policy(**policy))
    else:
        model = ff.models.build(config, grid, policy=ff.Policy(**policy), lora=lora)
    optimizer = getattr(ff.optim, optimizer_kind)(model, lr=1e-3)
    schedule = ff.optim.LearningRateSchedule(1e-2, steps, warmup=3)

    def compute(
        parts: list[torch.Tensor], limit: torch.Tensor, lengths: list[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = ff.count_targets(torch.stack(parts), grid) if len(parts) > 1 else None
        given = {} if count is None else {"count": count}
        model.gradients.begin_step(len(parts))
        loss = torch.zeros((), device=grid.device)
        for part, known in zip(parts, lengths, strict=True):
            packed = {} if known is None else {"documents": known}
            share = model(part, part, **given, **packed)
            share.backward()
            loss += share.detach()
        clipped = optimizer.clip_and_step(1.0, unless=loss > limit)
        optimizer.zero_grad()
        return loss, clipped.norm

    step = StepGraph(compute, model, always=True) if recorded else compute
    found: list[torch.Tensor] = []
    for number, tokens in enumerate(batches(grid, steps)):
        model.clock.begin_step(number)
        schedule.apply(optimizer, number + 1)
        limit = torch.full((), 0.0 if number == 7 else torch.inf, device=grid.device)  # step 7 is skipped
        parts = list(tokens.chunk(micro_steps))
        packed = [lengths_of(part, number, grid) if documents else None for part in parts]
        if recorded:
            packed = [one and pad_lengths(one, parts[0].numel()).to(grid.device) for one in packed]
        found += step(parts, limit, packed)
        if number == 9:  # evaluation in between
            with torch.no_grad():
                model.eval()
                found.append(model(tokens, tokens))
                model.train()
    why = step.reason if isinstance(step, StepGraph) else ""
    if isinstance(step, StepGraph) and not why and not step.recorded:
        why = "nothing was recorded"
    parameters = [local_of(parameter).clone() for parameter in model.parameters()]
    parameters += [held.clone() for name, held in model.named_buffers() if name.endswith("router.bias")]
    if isinstance(step, StepGraph):
        step.release()
    return [one.item() for one in found], parameters, why


def agree(shape: Shape, name: str, policy: dict[str, Any], micro_steps: int, changes: dict[str, Any]) -> str:
    """Return an empty text if 14 recorded steps equal 14 eager ones bit for bit, else what differs."""
    grid = grid_of(shape)
    options: dict[str, Any] = dict(micro_steps=micro_steps, policy=policy, **changes)
    eager, parameters, _ = train(grid, name, 14, recorded=False, **options)
    found, others, why = train(grid, name, 14, recorded=True, **options)
    if why:
        return why
    if eager != found:
        worst = max(abs(a - b) / abs(a) for a, b in zip(eager, found, strict=True))
        return f"losses or norms differ by {worst:.1e}: {eager} and {found}"
    same = all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    return "" if same else "parameters differ"


WIDE = {"heads": 4, "kv_heads": 4, "head_dim": 16, "hidden": 64}
"""Heads that the kernel for many lengths takes."""
CASES: dict[str, tuple[str, dict[str, Any], int, dict[str, Any]]] = {
    "gpt": ("gpt-tiny", {}, 1, {}),
    "llama bf16": ("llama-tiny", {"compute_dtype": "bfloat16"}, 1, {}),
    "halves": ("gpt-tiny", {"overlap": ff.Overlap(halves=2)}, 1, {}),
    "accumulation": ("llama-tiny", {}, 2, {}),
    "recompute": ("gpt-tiny", {"recompute": "block"}, 1, {}),
    "sharded optimizer": ("gpt-tiny", {"shard_optimizer": True}, 1, {}),
    "dropout": ("gpt-tiny", {"recompute": "block"}, 2, {"dropout": 0.2, "attention_dropout": 0.0}),
    "chunked loss": ("gpt-tiny", {"loss_chunk": 16}, 1, {}),
    "compiled": ("gpt-tiny", {"compile": True}, 1, {}),
    "documents": ("llama-tiny", {"compute_dtype": "bfloat16"}, 2, {"documents": True, **WIDE}),
    "documents and halves": (
        "gpt-tiny",
        {"compute_dtype": "bfloat16", "overlap": ff.Overlap(halves=2)},
        1,
        {"documents": True, **WIDE},
    ),
    "sgd": ("gpt-tiny", {}, 1, {"optimizer_kind": "SGD"}),
    "tokens to the table": ("gpt-tiny", {"even_tokens": True}, 1, {"vocab": 1000}),
    "lora": ("gpt-tiny", {}, 1, {"lora": LoraConfig(rank=4, dropout=0.1)}),
    "mixture": (
        "moe-tiny",
        {"compute_dtype": "bfloat16"},
        2,
        {"bias_rate": 0.01, "capacity": 1.0, "groups": 4, "expert_hidden": 64},  # rows of 16 bytes on x=4
    ),
    "parallelize gpt": ("gpt-tiny", {}, 1, {"wrapped": True}),
    "parallelize llama bf16": ("llama-tiny", {"compute_dtype": "bfloat16"}, 1, {"wrapped": True}),
}


def replays(shape: Shape, folder: str, number: int) -> str:
    """Replay a step many times while the watch is on; say how many milliseconds a step takes, eager and replayed."""
    grid = grid_of(shape)
    model = ff.models.build(
        ff.models.config("gpt-125m", layers=4), grid, policy=ff.Policy(compute_dtype=torch.bfloat16)
    )
    optimizer = ff.optim.AdamW(model, lr=1e-4)
    guard = Guard(grid, Path(folder), 20.0)

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        return loss.detach()

    (tokens,) = batches(grid, 1, seq=128)
    step = StepGraph(compute, model, always=True)
    times = {}
    for kind, count in (("eager", 3), ("recording", 1), ("replayed", number)):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for index in range(count):
            guard.begin_step(index)
            loss = step(tokens)
            if index % 50 == 49:
                loss.item()
        torch.cuda.synchronize()
        times[kind] = (time.perf_counter() - began) / count * 1e3
    times["loss"] = loss.item()
    guard.close(done=True)
    recorded = step.recorded
    step.release()
    said = ", ".join(f"{kind} {value:.2f}" for kind, value in times.items())
    return f"ok {said}" if recorded else step.reason


def saves(shape: Shape, folder: str) -> str:
    """Save beside replays, with a copy that takes longer than a step; return whether the last save is what it saved."""
    grid = grid_of(shape)
    model = ff.models.build("gpt-125m", grid, policy=ff.Policy(compute_dtype=torch.bfloat16))
    optimizer = ff.optim.AdamW(model, lr=1e-4)

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        return loss.detach()

    (tokens,) = batches(grid, 1)
    step, saver = StepGraph(compute, model, always=True), Saver(grid, Path(folder))
    for _ in range(5):
        step(tokens)
    for number in range(1, 4):
        saved = [local_of(parameter).clone() for parameter in model.parameters()]
        saver.save(number, model, optimizer, {})
        step(tokens)
    saver.wait()
    load_training(Path(folder) / "step-00000003", model, optimizer)
    same = all(torch.equal(local_of(now), was) for now, was in zip(model.parameters(), saved, strict=True))
    recorded = step.recorded
    step.release()
    return "" if same and recorded else "the last save is not what was saved, or nothing was recorded"


def refused(shape: Shape) -> str:
    """Return why a step that reads a number on the host is not recorded, and its losses: it must train all the same."""
    grid = grid_of(shape)
    model = ff.models.build("gpt-tiny", grid)
    optimizer = ff.optim.AdamW(model, lr=1e-3)

    def compute(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens, tokens)
        if loss.item() < 0:
            raise ValueError("a loss below 0")
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        return loss.detach()

    step = StepGraph(compute, model)
    losses = [step(tokens).item() for tokens in batches(grid, 8)]
    torch.rand(1, device=grid.device)  # a failed recording leaves torch's generators as they were
    said = f"{step.reason} | {losses[0]:.3f} {losses[-1]:.3f}"
    return f"ok {said}" if step.reason and not step.recorded else said


def main(names: list[str]) -> int:
    checks: dict[str, Check] = {}
    folder = tempfile.mkdtemp()
    for shape in (Shape(x=2, z=2), Shape(x=2, data=2)):
        checks[f"1000 replays on {shape}"] = on_ranks(4, replays, shape, folder, 1000)
    checks["saves beside replays"] = on_ranks(4, saves, Shape(x=2, z=2), tempfile.mkdtemp())
    checks["refused"] = on_ranks(4, refused, Shape(x=2, z=2))
    for number, (name, case) in enumerate(CASES.items()):
        for shape in SHAPES[:3] if name == "compiled" else (SHAPES[number % 6], SHAPES[(number + 1) % 6]):
            checks[f"{name} on {shape}"] = on_ranks(4, agree, shape, *case)
    padded = {"compute_dtype": "bfloat16", "pad_experts": True}
    for shape in (Shape(z=4, expert=4), Shape(x=2, z=2, expert=2, ex=2), Shape(data=4, expert=2, ez=2)):
        changes = {"bias_rate": 0.01, "capacity": 1.5}
        checks[f"mixture on {shape}"] = on_ranks(4, agree, shape, "moe-tiny", padded, 2, changes)
    for way in ("gather", "ring", "ulysses:2", "auto"):
        policy = {"context_way": way, "compute_dtype": "bfloat16"}
        checks[f"context, {way}"] = on_ranks(4, agree, Shape(z=4, context=2), "llama-tiny", policy, 1, {})
    return run_checks(checks, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
