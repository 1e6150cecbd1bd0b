"""Loss curves of the trainer on a grid and in one process: the model, the grids, and how far the curves may differ.

`check(pools, name, dtype, steps, folder)` trains the model once in one process and once for every case, through the
trainer's own `Run`, and returns the largest deviations of each case, which `bound` limits. The tests ask for 20
steps of `CASES`; 200 steps and `MORE_CASES` are for the soak.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.grid import Grid, Shape
from fourfold.params import local_of
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.loop import Run
from fourfold.train.planning import resolve
from fourfold.train.run_folder import MemorySink
from harness import Ranks, grid_of

DOCUMENTS = 40
ROWS, SEQ = 8, 12

Changes = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A grid and its options. `data` changes what is trained on, so the run in one process has the same change."""

    shape: Shape
    policy: Changes = field(default_factory=dict)
    data: Changes = field(default_factory=dict)

    def __str__(self) -> str:
        return " ".join([str(self.shape), *(f"{key}={value}" for key, value in (self.policy | self.data).items())])


PACKED: Changes = {"data.documents": True}

CASES = [
    Case(Shape(x=2), {"policy.recompute": "block", "policy.loss_chunk": 24}),
    Case(Shape(y=2), {"policy.keep_gathered": True}),
    Case(Shape(z=2), {"policy.keep_weights": True}, PACKED),
    Case(Shape(data=2), {"policy.shard_optimizer": True, "policy.bucket_bytes": 20_000}),
    Case(Shape(y=3), {"policy.recompute": "attention"}),
    Case(Shape(x=2, z=2), {}, PACKED),
    Case(Shape(y=2, data=2, order=("data", "y", "x", "z")), {"policy.activations": "replicated"}),
    Case(Shape(z=2, data=2), {"policy.shard_optimizer": True, "policy.loss_chunk": 16}),
]
"""Every axis and option, on 2, 3 and 4 ranks; 3 cut the residual stream of both models, since 48 = 3 * 16."""

MORE_CASES = [
    Case(Shape(x=4), {"policy.recompute": "attention"}),
    Case(Shape(y=4)),
    Case(Shape(z=4), {"batch.micro_steps": 2}),
    Case(Shape(data=4), {"policy.shard_optimizer": True, "policy.bucket_bytes": 20_000}),
    Case(Shape(x=2, y=2), {"policy.recompute": "block", "policy.loss_chunk": 24}),
    Case(Shape(x=2, z=2), {"policy.activations": "replicated"}, PACKED),
    Case(Shape(x=2, data=2), {"policy.keep_gathered": True, "policy.keep_weights": True}, PACKED),
    Case(Shape(z=2, data=2), {"policy.shard_optimizer": True, "batch.micro_steps": 2}, PACKED),
    Case(Shape(x=2, y=2, z=2), {"policy.loss_chunk": 7}),
    Case(Shape(x=2, z=2, data=2), {"policy.shard_optimizer": True, "policy.recompute": "block"}, PACKED),
    Case(Shape(y=2, z=2, data=2), {"policy.activations": "replicated", "policy.shard_optimizer": True}),
    Case(Shape(x=2, y=2, data=2), {"policy.activations": "replicated"}, PACKED),
    Case(Shape(x=4, z=2)),
    Case(Shape(y=2, data=4)),
]
"""Further cases on up to 8 ranks, which only the soak has time for."""


def bound(dtype: str, steps: int) -> float:
    """Return how far curves may differ, relative to their largest value.

    fp64 rounds at 1e-16: 1e-9 is far above what sums in another order give, and far below any mistake. fp32 rounds
    at 6e-8, and each step hands its error on to the next, AdamW enlarging it where gradients are near 0; over 20
    steps 5e-7 is seen, over 200 steps 2e-4, so it grows about as the square of the steps.
    """
    return 1e-9 if dtype == "fp64" else 1e-5 * max(1.0, steps / 20) ** 2


@dataclass(frozen=True)
class Deviation:
    """The largest differences of any step, relative to the largest value of the curve of one process."""

    loss: float
    grad_norm: float
    evaluation: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.evaluation)


def write_texts(folder: Path) -> Path:
    """Write documents of words, some shorter than a row and some longer; they are the same every time."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randrange(1, 8))) for _ in range(60)]
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(DOCUMENTS):
        text = " ".join(draw.choices(words, k=draw.choice([1, 2, 3, 30])))
        (texts / f"{number:03}.txt").write_text(text)
    return texts


def config_of(name: str, dtype: str, steps: int, folder: Path, shape: Shape, changes: Changes) -> TrainConfig:
    """Return the resolved config of a small run."""
    given: Changes = {
        "model.name": name,
        "model.seq": SEQ,
        "policy.dtype": dtype,
        "data.sources": [{"path": str(folder / "texts")}],
        "data.held_out": 0.1,
        "batch.rows": ROWS,
        "batch.seq": SEQ,
        "optimizer.warmup": min(3, steps),
        "train.steps": steps,
        "train.seed": 3,
        "train.evaluate_every": 10,
        "train.evaluate_batches": 2,
        "log.peak_flops": 1e12,  # measuring it takes longer than a run
        **{f"grid.{axis}": size for axis, size in shape.named.items()},
        "grid.order": list(shape.order),
        **changes,
    }
    return resolve(read_config(None, list(given.items())), shape.world, on_gpu=False, memory_bytes=1 << 34)


class Curves(MemorySink):
    """Keeps the events, and returns them by column."""

    def column(self, event: str, key: str) -> list[Any]:
        return [found[key] for found in self.events if found["event"] == event]


def train(config: TrainConfig, folder: Path, grid: Grid | None = None) -> dict[str, Any]:
    """Train the whole run on this rank; return its curves, and a digest of the parameters at the end."""
    run = Run(config, grid or grid_of(config.grid.shape), folder)
    kept = Curves()
    run.sinks = [kept]
    run.train()
    digest = hashlib.sha256()
    for name, parameter in run.model.named_parameters():
        digest.update(name.encode())
        digest.update(local_of(parameter).detach().cpu().contiguous().numpy().tobytes())
    return {
        "loss": kept.column("step", "loss"),
        "grad_norm": kept.column("step", "grad_norm"),
        "evaluation": kept.column("evaluation", "loss"),
        "parameters": digest.hexdigest(),
    }


def alone(name: str, dtype: str, steps: int, folder: Path, changes: Changes) -> dict[str, Any]:
    """Train the run in this process alone."""
    return train(config_of(name, dtype, steps, folder, Shape(), changes), folder, Grid.alone("cpu"))


def deviation(one: dict[str, Any], other: dict[str, Any]) -> Deviation:
    def largest(kind: str) -> float:
        pairs = zip(one[kind], other[kind], strict=True)
        relative = [abs(a - b) / max(map(abs, one[kind])) for a, b in pairs]
        return max((value if value == value else float("inf") for value in relative), default=0.0)

    return Deviation(largest("loss"), largest("grad_norm"), largest("evaluation"))


def check(
    pools: Callable[[int], Ranks],
    name: str,
    dtype: str,
    steps: int,
    folder: Path,
    *,
    cases: Sequence[Case] = CASES,
    changes: Changes | None = None,
    known: dict[str, dict[str, Any]] | None = None,
    timeout: float = 120,
) -> dict[str, Deviation]:
    """Return the deviation of each case from one process; `changes` apply to all runs. Raise if ranks differ.

    The curves of one process are kept in `known`, for the next call.
    """
    write_texts(folder)
    one = {} if known is None else known
    found: dict[str, Deviation] = {}
    # A pool is expensive, so one pool runs all its cases before the next one starts.
    for case in sorted(cases, key=lambda case: case.shape.world):
        pool = pools(case.shape.world)
        shared = (changes or {}) | case.data
        pool.start(train, config_of(name, dtype, steps, folder, case.shape, shared | case.policy), folder)
        key = str((name, dtype, steps, shared))
        if key not in one:
            one[key] = alone(name, dtype, steps, folder, shared)
        results = pool.results(timeout)
        for rank, result in enumerate(results):
            if any(result[kind] != results[0][kind] for kind in ("loss", "grad_norm", "evaluation")):
                raise AssertionError(f"{case}: the curves of rank {rank} differ from those of rank 0")
        found[str(case)] = deviation(one[key], results[0])
    return found
