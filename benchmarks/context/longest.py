"""The longest sequence that trains in a part of one GPU's memory, beside plain torch.

    python benchmarks/context/longest.py                    # on a GPU; writes RESULTS.jsonl and its table
    python benchmarks/context/longest.py --table RESULTS.jsonl
    python benchmarks/context/longest.py --device cpu       # a smoke test

Some layers of Llama-3-8B, with their embedding and head, all in bf16; a step is forward, backward and AdamW. Sides:

- plain: torch as it comes.
- careful: torch with block checkpointing, the loss in checkpointed chunks, and inputs of blocks in pinned host memory
  (`save_on_cpu`).
- fourfold: `recompute="block"`, `offload`, `mlp_chunk`, `loss_chunk`.

Every sequence runs in a process of its own, which may use --gib of the GPU. Sequences grow by a quarter until one does
not fit. Then careful and fourfold are timed on the longest sequence that careful can do. The table compares the peak
memory of fourfold's steps with what the planner says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fourfold as ff
from benchmarks.shared.tables import RESULTS, markdown_table, verdict
from benchmarks.speed.plain_models import Transformer
from fourfold.models import ModelConfig
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Candidate, Task, price

CHUNK, GRAIN = 4096, 64
"""Tokens of a chunk of the loss, on both sides; sequences have a multiple of GRAIN tokens."""
POLICY: dict[str, Any] = dict(recompute="block", offload=True, mlp_chunk=8192, loss_chunk=CHUNK)
GROWTH, LONGER, MEMORY = 1.25, 1.5, 0.10
"""Each sequence is so many times as long as the one before; bars: how many times as long as careful torch's, and the
error of the planner's memory."""


class CarefulTransformer(Transformer):
    """Plain torch, as somebody trains long sequences with it."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        a = self.embedding(tokens)
        rope = self.rope.tables(tokens.shape[1], a.device, a.dtype)
        with save_on_cpu(pin_memory=a.is_cuda):
            for layer in self.layers:
                a = checkpoint(layer, a, rope, use_reentrant=True)  # saves its input, which `save_on_cpu` then sees
        chunks = zip(a.flatten(0, 1).split(CHUNK), targets.flatten().split(CHUNK), strict=True)
        return sum(checkpoint(self.loss_of, *each, use_reentrant=False) for each in chunks) / targets.numel()

    def loss_of(self, a: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.norm(a)), targets, reduction="sum")


def config_of(layers: int, seq: int, device: str) -> ModelConfig:
    if device == "cpu":
        return ff.models.config("llama-tiny", layers=layers, seq=seq)
    return ff.models.config("llama-3-8b", layers=layers, seq=seq)


def train(side: str, layers: int, seq: int, steps: int, device: str) -> dict[str, Any]:
    """Return the seconds of each step, the peak of the GPU's memory in bytes, and the last loss."""
    config, dtype = config_of(layers, seq, device), torch.bfloat16
    torch.manual_seed(0)
    if side == "fourfold":
        policy = ff.Policy(compute_dtype=dtype, **{**POLICY, "offload": device == "cuda"})
        model: Any = ff.models.build(config, ff.Grid.alone(device), policy=policy, dtype=dtype)
        optimizer: Any = ff.optim.AdamW(model, lr=1e-4)
    else:
        kind = CarefulTransformer if side == "careful" else Transformer
        with torch.device(device):
            model = kind(config).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    tokens = torch.randint(0, config.vocab, (1, seq), device=device)
    seconds, loss = [], torch.zeros(())
    for _ in range(steps):
        began = time.perf_counter()
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return dict(seconds=seconds, peak=peak, loss=loss.item())


def attempt(side: str, seq: int, steps: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train in a process of its own; its record says whether the sequence fits."""
    one = ["--one", side, str(seq), str(steps), "--layers", str(options.layers), "--gib", str(options.gib)]
    command = [sys.executable, __file__, *one, "--device", options.device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    about = dict(side=side, seq=seq, layers=options.layers, gib=options.gib, steps=steps)
    if done.returncode:
        if "out of memory" not in done.stderr.lower():
            raise RuntimeError(done.stderr[-2000:])
        return dict(about, fits=False)
    return dict(about, fits=True, **json.loads(done.stdout.splitlines()[-1]))


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the record of every attempt."""
    longest: dict[str, int] = {}
    for side, first in (("plain", options.first), ("careful", options.first), ("fourfold", 0)):
        seq = first or rounded(longest["careful"] * LONGER)
        while seq <= options.most:
            record = attempt(side, seq, 2, options)  # the first step makes the optimizer's state
            yield record
            if not record["fits"]:
                break
            longest[side] = seq
            seq = rounded(seq * GROWTH)
    for side in ("careful", "fourfold", "careful", "fourfold"):
        yield attempt(side, longest["careful"], 4, options)


def rounded(tokens: float) -> int:
    return int(tokens) // GRAIN * GRAIN


def predicted(record: dict[str, Any], device: str) -> int:
    """Return the bytes that the planner says fourfold's step needs."""
    config = config_of(record["layers"], record["seq"], device)
    policy = ff.Policy(compute_dtype=torch.bfloat16, **POLICY)
    task = Task(config, load_machine("h200-node"), 1, record["seq"], torch.bfloat16, torch.bfloat16, False)
    memory = price(task, Candidate(ff.Shape(), policy, 1, 1)).memory
    return memory.total - (memory.optimizer if record["steps"] == 1 else 0)  # which the first step makes at its end


def table(records: list[dict[str, Any]], device: str) -> str:
    rows, errors = [], []
    for record in records:
        row = [record["side"], f"{record['seq']:,}", str(record["steps"])]
        if not record["fits"]:
            rows.append([*row, "does not fit", "-", "-"])
            continue
        said = predicted(record, device) if record["side"] == "fourfold" and record["peak"] else 0
        errors += [said / record["peak"] - 1] if said else []
        micros = 1e6 * median(record["seconds"][1:] or record["seconds"]) / record["seq"]
        rows.append([*row, f"{record['peak'] / 2**30:.1f}", f"{said / 2**30:.1f}" if said else "-", f"{micros:.1f}"])
    fits = [record for record in records if record["fits"]]
    sides = ("plain", "careful", "fourfold")
    longest = {side: max((one["seq"] for one in fits if one["side"] == side), default=0) for side in sides}
    rates = {side: [median(one["seconds"][1:]) / one["seq"] for one in fits if one["side"] == side and one["steps"] > 2]
             for side in sides}  # fmt: skip
    ratio, worst = longest["fourfold"] / longest["careful"], max(errors, key=abs, default=0.0)
    timed = rates["fourfold"] and rates["careful"]
    slower = median(rates["fourfold"]) / median(rates["careful"]) if timed else None
    speed = f"{verdict(slower <= 1)}, {slower:.2f} of its time" if slower else "not measured"
    return "\n".join(
        [
            *markdown_table(["side", "tokens", "steps", "peak GiB", "planned GiB", "us per token"], rows),
            "",
            f"- at least {LONGER} times as long as careful torch: {verdict(ratio >= LONGER)}, {ratio:.2f}; "
            f"plain torch's longest has {longest['plain']:,} tokens",
            f"- not slower than careful torch on its longest: {speed}",
            f"- the planner's memory within {MEMORY:.0%}: {verdict(abs(worst) <= MEMORY)}, {worst:+.1%}",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--gib", type=float, default=40.0, help="the part of the GPU's memory that a process may use")
    parser.add_argument("--first", type=int, default=32768, help="the first sequence")
    parser.add_argument("--most", type=int, default=1 << 22, help="the longest sequence to try")
    parser.add_argument("--one", nargs=3, metavar=("SIDE", "TOKENS", "STEPS"), help="one attempt, in this process")
    parser.add_argument("--table", type=Path, help="the table of these results")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-longest.jsonl")
    options = parser.parse_args()
    if options.one:
        side, seq, steps = options.one
        if options.device == "cuda":
            share = options.gib * 2**30 / torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        print(json.dumps(train(side, options.layers, int(seq), int(steps), options.device)))
        return 0
    if options.table:
        records = [json.loads(line) for line in options.table.read_text().splitlines()]
    else:
        records = []
        with options.out.open("w") as lines:
            for record in measure(options):
                records.append(record)
                print(json.dumps(record), file=lines, flush=True)
                print(record, flush=True)
    print(table(records, options.device))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
