"""One Fourfold process beside the same model in plain torch, in every mode of both, interleaved in one run.

    python benchmarks/speed/vs_plain_torch.py                                  # all cases of this device
    python benchmarks/speed/vs_plain_torch.py gpt-125m:8x1024 --budget 500     # MODEL[,field=N...]:ROWSxSEQ
    python benchmarks/speed/vs_plain_torch.py gpt-2.8b:4x2048 --sides 'plain.* compiled|captured compiled'
    python benchmarks/speed/vs_plain_torch.py gpt-125m:8x1024 --weights fp32
    python benchmarks/speed/vs_plain_table.py RESULTS.jsonl TABLE.md           # the table again, on any machine

A step is forward, backward, clipping and fused AdamW. Plain torch runs eagerly, compiled (torch's default mode and
reduce-overhead), and as a CUDA graph of the whole step, eager and compiled inside; Fourfold runs eagerly, compiled, and
captured, eager and compiled inside. On a GPU weights are bf16, or fp32 with products in bf16 (plain torch through
autocast). All sides start from the same weights, and their losses are compared. Sides take turns in rounds that each
start with another side; the first step of a turn is not timed.

Peak memory is what the allocator reserves for a side during a step: weights, optimizer state, activations, and the
pools of CUDA graphs, without the memory of the other sides. Results are added to --out, one line per call and case.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch
from torch import Tensor

import fourfold as ff
from benchmarks.shared.models import GRAPH_WARMUP, LEARNING_RATE, MAX_NORM, adamw, build_on_device
from benchmarks.shared.tables import RESULTS
from benchmarks.speed import vs_plain_table
from benchmarks.speed.plain_models import Transformer
from benchmarks.speed.vs_plain_table import FOURFOLD, PLAIN
from fourfold.models import ModelConfig
from fourfold.params import local_of
from fourfold.planner.machine import PEAK_FLOPS
from fourfold.planner.step_program import flops_per_token
from fourfold.step_graph import StepGraph

SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "gpt-350m": ("gpt-125m", dict(layers=24, hidden=1024, heads=16, kv_heads=16, head_dim=64, mlp_hidden=4096)),
    "llama-1b": (
        "llama-3-8b",
        dict(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, mlp_hidden=8192, vocab=32000),
    ),
}
"""Models that only this benchmark names: a published size with other fields."""
CPU_CASES = [
    "gpt-125m,layers=4,hidden=512,heads=8,kv_heads=8,head_dim=64,mlp_hidden=2048,vocab=8192:8x256",
    "llama-tiny,layers=4,hidden=512,heads=8,kv_heads=4,head_dim=64,mlp_hidden=1376,vocab=8192:8x256",
    "llama-tiny:16x128",
]
GPU_CASES = [
    "gpt-125m:8x1024",
    "gpt-125m:16x128",
    "gpt-350m:8x1024",
    "llama-1b:4x2048",
    "gpt-1.4b:8x2048",
    "gpt-2.8b:4x2048",
]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIDES = {
    PLAIN: ("eager", "compiled", "reduce-overhead", "graph", "graph compiled"),
    FOURFOLD: ("eager", "compiled", "captured", "captured compiled"),
}
EAGER_SIDES = f"^({PLAIN}|{FOURFOLD}) eager$"
"""What is measured on the CPU, where nothing can be captured and few users compile."""
WARMUP = 6
"""Steps of each side before it is measured; captured sides replay from the fifth on, so their losses are compared."""
TURN_SECONDS = 0.25
"""A turn takes about this long, so that starting and ending it do not count."""
MOST_STEPS = 20


@dataclass
class Contender:
    """One side, with its measurements."""

    name: str
    step: Callable[[], Tensor] = field(repr=False)
    losses: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    steps: int = 1
    """Timed steps of a turn."""
    seconds: list[float] = field(default_factory=list)
    """Seconds per step, one number per round."""

    def report(self) -> dict[str, Any]:
        return {"side": self.name, "seconds": self.seconds, "peak_bytes": self.peak_bytes, "losses": self.losses}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    began = time.monotonic()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.recompile_limit = 64
    if options.device == "cuda":
        # All sides on one stream that is not the default one: autograd remembers the stream of each parameter's node,
        # and the plain sides, which share a model, could not be recorded after a step on another stream.
        torch.cuda.set_stream(torch.cuda.Stream())
    for case in options.cases:
        if time.monotonic() - began > options.budget:
            print(f"{case}: not begun, because {options.budget:.0f} s are over", flush=True)
            continue
        found = PlainCase(case, options).measure(options.budget - (time.monotonic() - began))
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(vs_plain_table.section(found), flush=True)
        torch.compiler.reset()
        gc.collect()
    if options.out.exists():
        options.table.write_text(vs_plain_table.render(options.out))
        print(f"wrote {options.out} and {options.table}")
    return 0


class PlainCase:
    """A model and a batch, and the sides that train it."""

    def __init__(self, case: str, options: argparse.Namespace) -> None:
        self.case, self.options = case, options
        self.config, rows, seq = parse_case(case)
        self.device, self.cuda = torch.device(options.device), options.device == "cuda"
        self.weights, self.compute = DTYPES[options.weights], DTYPES[options.dtype]
        generator = torch.Generator().manual_seed(0)
        batch = torch.randint(self.config.vocab, (rows, seq + 1), generator=generator).to(self.device)
        self.tokens, self.targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        self.plain = PlainSides(self)
        self.failures: dict[str, str] = {}

    def measure(self, budget: float) -> dict[str, Any]:
        began = time.monotonic()
        sides = [side for name in self.names() if (side := self.prepare(name))]
        once = sum(median(side.seconds) * (side.steps + 1) for side in sides)
        left = budget - (time.monotonic() - began)
        rounds = max(1, int(min(self.options.rounds, left / once))) if sides else 0
        print(f"  {rounds} rounds of {once:.1f} s, about {rounds * once:.0f} s", flush=True)
        for side in sides:
            side.seconds.clear()
        for turn in range(rounds):
            first = turn * len(sides) // rounds
            for side in (*sides[first:], *sides[:first]):
                side.seconds.append(self.timed(side))
        return self.report(sides)

    def names(self) -> list[str]:
        names = [f"{who} {mode}" for who, modes in SIDES.items() for mode in modes]
        return [name for name in names if self.options.sides.search(name)]

    def prepare(self, name: str) -> Contender | None:
        """Build a side, take its first steps and measure its memory; or note why that fails."""
        began = time.monotonic()
        self.plain.reset()
        before = self.reserved()
        try:
            side = Contender(name, self.make(name))
            side.losses = [float(side.step()) for _ in range(WARMUP)]
            if self.cuda:
                self.reserved()
                torch.cuda.reset_peak_memory_stats()
                side.step()
                side.peak_bytes = torch.cuda.max_memory_reserved() - before
                if name.startswith(PLAIN):
                    side.peak_bytes += self.plain.nbytes  # weights and state, which all plain sides share
            took = self.timed(side)
        except (RuntimeError, TypeError) as error:
            self.failures[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            print(f"  FAILED: {name}: {self.failures[name]}", flush=True)
            gc.collect()
            return None
        side.steps = max(1, min(MOST_STEPS, math.ceil(TURN_SECONDS / took)))
        side.seconds.append(took)
        print(f"  warm: {name} ({time.monotonic() - began:.1f} s), a step takes about {took * 1e3:.1f} ms", flush=True)
        return side

    def make(self, name: str) -> Callable[[], Tensor]:
        who, _, mode = name.partition(" ")
        return self.make_plain(mode) if who == PLAIN else self.make_fourfold(mode)

    def make_plain(self, mode: str) -> Callable[[], Tensor]:
        step = self.plain.step(compiled=mode.endswith("compiled"), reduce_overhead=mode == "reduce-overhead")
        return GraphedStep(step) if mode.startswith("graph") else step

    def make_fourfold(self, mode: str) -> Callable[[], Tensor]:
        policy = ff.Policy(compute_dtype=self.compute, compile=mode.endswith("compiled"), **self.options.policy)
        grid = ff.Grid(device=self.device)
        model = build_on_device(self.config, grid, policy, self.weights)
        self.plain.model.copy_to({name: local_of(parameter) for name, parameter in model.named_parameters()})
        optimizer = ff.optim.AdamW(model, lr=LEARNING_RATE)
        optimizer.make_state()

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss = model(tokens, targets)
            loss.backward()
            optimizer.clip_and_step(MAX_NORM)
            optimizer.zero_grad()
            return loss.detach()

        if mode.startswith("captured"):
            return self.captured(StepGraph(step, model, warmup=GRAPH_WARMUP, always=True))
        return lambda: step(self.tokens, self.targets)

    def captured(self, graph: StepGraph[Tensor]) -> Callable[[], Tensor]:
        """Return a step that must be recorded: one that would silently run eagerly on a GPU is an error."""

        def step() -> Tensor:
            if graph.reason and self.cuda:
                raise RuntimeError(f"the step was not captured: {graph.reason}")
            return graph(self.tokens, self.targets)

        return step

    def timed(self, side: Contender) -> float:
        side.step()
        self.synchronize()
        began = time.perf_counter()
        for _ in range(side.steps):
            side.step()
        self.synchronize()
        return (time.perf_counter() - began) / side.steps

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def reserved(self) -> int:
        """Return the bytes that the allocator holds for tensors and graphs, without what it caches."""
        gc.collect()
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def report(self, sides: Sequence[Contender]) -> dict[str, Any]:
        device = torch.cuda.get_device_name(self.device) if self.cuda else "cpu"
        seq = self.tokens.shape[1]
        return {
            "case": self.case,
            "weights": self.options.weights,
            "dtype": self.options.dtype,
            "date": str(date.today()),
            "device": device,
            "torch": torch.__version__,
            "command": shlex.join(["python", "benchmarks/speed/vs_plain_torch.py", *self.options.given]),
            "parameters": self.config.parameters,
            "tokens": self.tokens.numel(),
            "flops_per_token": flops_per_token(self.config, seq).model,
            "peak_flops": PEAK_FLOPS.get(device) if self.options.dtype == "bf16" else None,
            "config": asdict(self.config),
            "sides": [side.report() for side in sides],
            "failures": self.failures,
        }


class PlainSides:
    """The plain model and its optimizer, which all modes of plain torch share."""

    def __init__(self, case: PlainCase) -> None:
        self.case = case
        with torch.device(case.device):
            self.model = Transformer(case.config).to(case.weights)
        self.optimizer = adamw(self.model.parameters(), capturable=case.cuda)
        self.step(compiled=False)()  # makes the optimizer state

    @property
    def nbytes(self) -> int:
        """Bytes of weights and optimizer state."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *states))

    @torch.no_grad()
    def reset(self) -> None:
        """Set weights to their initial values and the optimizer state to zeros."""
        self.model.init_weights(torch.Generator(self.case.device).manual_seed(0))
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()

    def step(self, *, compiled: bool, reduce_overhead: bool = False) -> Callable[[], Tensor]:
        case, optimizer = self.case, self.optimizer
        forward: Callable[[Tensor, Tensor], Tensor] = self.model
        if reduce_overhead:
            forward = torch.compile(self.model, mode="reduce-overhead")
        elif compiled:
            forward = torch.compile(self.model)
        casts = case.weights != case.compute
        parameters = list(self.model.parameters())

        def step() -> Tensor:
            if reduce_overhead:
                torch.compiler.cudagraph_mark_step_begin()
            with torch.autocast(case.device.type, case.compute) if casts else nullcontext():
                loss = forward(case.tokens, case.targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM, foreach=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step


class GraphedStep:
    """A whole step of plain torch as a CUDA graph, as torch's documentation records it: eager calls on a side stream,
    which is the current one here, then one recording, then replays."""

    def __init__(self, step: Callable[[], Tensor]) -> None:
        self.step, self.calls = step, 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.loss: Tensor | None = None

    def __call__(self) -> Tensor:
        if self.calls < GRAPH_WARMUP:
            self.calls += 1
            return self.step()
        if self.graph is None or self.loss is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.loss = self.step()
        self.graph.replay()
        return self.loss


def parse_case(case: str) -> tuple[ModelConfig, int, int]:
    """Return the model, the rows and the tokens of a row of `MODEL[,field=N...]:ROWSxSEQ`."""
    try:
        name, batch = case.split(":")
        rows, seq = (int(number) for number in batch.split("x"))
        model, *changes = name.split(",")
        base, fields = SIZES.get(model, (model, {}))
        given = {key: int(value) for key, value in (change.split("=") for change in changes)}
        return ff.models.config(base, **{"seq": seq, **fields, **given}), rows, seq
    except ValueError as error:
        raise SystemExit(f"{case}: {error}; a case is MODEL[,field=N...]:ROWSxSEQ, such as {GPU_CASES[0]}") from error


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    parser.add_argument("cases", nargs="*", default=GPU_CASES if gpu else CPU_CASES, help="MODEL[,field=N...]:ROWSxSEQ")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16" if gpu else "fp32", help="of products")
    parser.add_argument("--weights", choices=list(DTYPES), default="bf16" if gpu else "fp32")
    parser.add_argument(
        "--sides",
        type=re.compile,
        default=re.compile("" if gpu else EAGER_SIDES),
        help="regular expression over the sides: "
        + "; ".join(f"{who} {', '.join(modes)}" for who, modes in SIDES.items())
        + " (default on the CPU: eager)",
    )
    parser.add_argument("--policy", type=json.loads, default={}, help='ff.Policy as JSON: {"loss_chunk": 2048}')
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--budget", type=float, default=math.inf, help="seconds; fewer rounds, and no new case, when they are over"
    )
    stem = RESULTS / f"{date.today()}-vs-plain-torch"
    parser.add_argument("--out", type=Path, default=Path(f"{stem}.jsonl"), help="results are added to this file")
    parser.add_argument("--table", type=Path, help="default: next to --out")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    options.table = options.table or options.out.with_suffix(".md")
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())
