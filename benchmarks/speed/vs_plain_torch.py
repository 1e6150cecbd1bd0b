"""One Fourfold process beside the same model in plain torch, interleaved in one run.

    python benchmarks/speed/vs_plain_torch.py                                   # CPU or GPU, with fitting sizes
    python benchmarks/speed/vs_plain_torch.py gpt-1.4b:8x2048 gpt-2.8b:4x2048   # model:ROWSxSEQ

A step is forward, backward, clipping and AdamW. Both sides keep fp32 weights unless --weights bf16 is given. On a GPU
both compute in bf16 (plain torch through autocast) and both are compiled. The two sides alternate and swap their order
every round; the ratio is the median over rounds. MFU counts 6 FLOPs per matmul parameter and token, and half of the
attention scores because attention is causal. Peak memory is measured for the step of one side,
without the memory of the other.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

import fourfold as ff
from benchmarks.speed import plain_models
from fourfold.planner.machine import PEAK_FLOPS
from fourfold.planner.transformer import flops_per_token
from fourfold.policy import Policy

CPU_CASES = [
    "gpt-125m,layers=4,hidden=512,heads=8,kv_heads=8,head_dim=64,mlp_hidden=2048,vocab=8192:8x256",
    "llama-tiny,layers=4,hidden=512,heads=8,kv_heads=4,head_dim=64,mlp_hidden=1376,vocab=8192:8x256",
]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
GPU_CASES = ["gpt-1.4b:8x2048", "gpt-2.8b:4x2048"]


@dataclass
class Contender:
    """One of the two sides, with its measurements."""

    name: str
    step: Callable[[], torch.Tensor] = field(repr=False)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    loss: float = 0.0


def main() -> int:
    options = parse()
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    results = []
    for case in options.cases:
        results.append(measure(case, device, options))
        show(results[-1])
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


def measure(case: str, device: torch.device, options: argparse.Namespace) -> dict:
    name, _, batch = case.partition(":")
    rows, seq = (int(number) for number in batch.split("x"))
    model, *changes = name.split(",")
    fields = dict(change.split("=") for change in changes)
    config = ff.models.config(model, **{"seq": seq, **{key: int(value) for key, value in fields.items()}})
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(config.vocab, (rows, seq + 1), generator=generator).to(device)
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    sides = []
    held = 0
    for make in (plain_torch, fourfold):
        side = make(config, tokens, targets, device, options)
        for _ in range(options.warmup):
            side.loss = float(side.step())
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            side.step()
            side.peak_bytes = torch.cuda.max_memory_allocated() - held
            held = torch.cuda.memory_allocated()
        sides.append(side)
    for turn in range(options.rounds):
        for side in sides if turn % 2 == 0 else reversed(sides):
            side.seconds.append(timed(side.step, options.steps, device))
    return report(case, config, sides, rows * seq, seq, device, options)


def timed(step: Callable[[], torch.Tensor], steps: int, device: torch.device) -> float:
    began = time.perf_counter()
    for _ in range(steps):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def plain_torch(config, tokens, targets, device, options) -> Contender:
    model = plain_models.Transformer(config).to(device, DTYPES[options.weights])
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if options.compile else model
    casts = options.dtype != options.weights
    half = torch.autocast(device.type, DTYPES[options.dtype]) if casts else nullcontext()

    def step() -> torch.Tensor:
        with half:
            loss = forward(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Contender("plain torch" + (" compiled" if options.compile else ""), step)


def fourfold(config, tokens, targets, device, options) -> Contender:
    grid = ff.Grid(device=device)
    policy = Policy(compute_dtype=DTYPES[options.dtype], compile=options.compile, **options.policy)
    model = ff.models.build(config, grid, policy=policy, dtype=DTYPES[options.weights])
    optimizer = ff.optim.AdamW(model, lr=1e-4)

    def step() -> torch.Tensor:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        return loss.detach()

    return Contender("fourfold", step)


def report(case, config, sides, tokens, seq, device, options) -> dict:
    peak = PEAK_FLOPS.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops = flops_per_token(config, seq).model
    found = []
    for side in sides:
        seconds = statistics.median(side.seconds)
        found.append(
            {
                "side": side.name,
                "seconds": seconds,
                "spread": (max(side.seconds) - min(side.seconds)) / seconds,
                "tokens_per_second": tokens / seconds,
                "mfu": flops * tokens / seconds / peak if peak and options.dtype == "bf16" else None,
                "peak_bytes": side.peak_bytes or None,
                "loss": side.loss,
            }
        )
    return {
        "case": case,
        "date": str(date.today()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "command": re.sub(r" --json \S+", "", "python " + " ".join(sys.argv)),
        "parameters": config.parameters,
        "config": asdict(config),
        "sides": found,
        "fourfold_over_plain": statistics.median(b / a for a, b in zip(*(side.seconds for side in sides), strict=True)),
    }


def show(result: dict) -> None:
    print(
        f"\n{result['case']}: {result['parameters'] / 1e6:.0f}M parameters, {result['device']}, torch {result['torch']}"
    )
    print(f"{'':<22} {'ms/step':>10} {'spread':>7} {'tokens/s':>10} {'MFU':>6} {'peak GiB':>9} {'loss':>7}")
    for side in result["sides"]:
        mfu = f"{side['mfu']:.1%}" if side["mfu"] else "-"
        peak = f"{side['peak_bytes'] / 2**30:.2f}" if side["peak_bytes"] else "-"
        print(
            f"{side['side']:<22} {side['seconds'] * 1e3:>10.1f} {side['spread']:>7.1%} "
            f"{side['tokens_per_second']:>10.0f} {mfu:>6} {peak:>9} {side['loss']:>7.3f}"
        )
    print(f"Fourfold takes {result['fourfold_over_plain']:.3f} of plain torch's time", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("cases", nargs="*", default=GPU_CASES if gpu else CPU_CASES, help="model[,field=N]:ROWSxSEQ")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16" if gpu else "fp32")
    parser.add_argument("--weights", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=gpu)
    parser.add_argument("--policy", type=json.loads, default={}, help='ff.Policy as JSON: {"loss_chunk": 2048}')
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of each side per round")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", help="write the results here")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
