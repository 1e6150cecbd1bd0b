"""Published FSDP runs on the validation's page: fitted and held-out rows apart, bars, and residuals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import exp, log
from statistics import fmean
from typing import NamedTuple

from benchmarks.planner.judge import Judge
from benchmarks.planner.published_fsdp import (
    FSDP_ASSUMPTIONS,
    FSDP_CAUSES,
    FSDP_FITTED,
    GEOMETRIC_MEAN,
    MACHINES,
    MEAN_FACTOR,
    WORST_FACTOR,
    FsdpRun,
    read_runs,
)
from benchmarks.planner.replay_fsdp import NO_LOSS, replay_run
from benchmarks.planner.validate_measured import correlation, ranks
from benchmarks.shared.tables import markdown_table, verdict

WORST_SHOWN = 8
"""How many of the rows that are furthest off are listed."""


class ReplayedRun(NamedTuple):
    """A published run with its predicted seconds."""

    run: FsdpRun
    unfitted: float
    """With the machine file as it is."""
    fitted: float

    @property
    def residual(self) -> float:
        """The log of predicted / published, fitted."""
        return log(self.fitted / self.run.seconds)


class Accuracy(NamedTuple):
    """How well the predictions of some rows meet the published seconds."""

    geometric_mean: float
    """Of predicted / published."""
    mean_factor: float
    """The geometric mean of the factors by which predictions are off, in either direction."""
    worst: float
    spearman: float
    """The rank correlation of predicted and published seconds per FLOP of the model, that is of utilisation."""


def accuracy(runs: Sequence[FsdpRun], predicted: Sequence[float]) -> Accuracy:
    residuals = [log(seconds / run.seconds) for run, seconds in zip(runs, predicted, strict=True)]
    flops = [_model_flops(run) for run in runs]
    ranked = [
        ranks([seconds / work for seconds, work in zip(both, flops, strict=True)])
        for both in (predicted, [run.seconds for run in runs])
    ]
    off = [abs(residual) for residual in residuals]
    return Accuracy(exp(fmean(residuals)), exp(fmean(off)), exp(max(off)), correlation(*ranked))


def _model_flops(run: FsdpRun) -> float:
    """Return the FLOPs of a device in a step, without recompute."""
    block = run.hidden * (4 * run.hidden + 2 * run.mlp_hidden + run.seq)
    return 6.0 * run.rows * run.micro_steps * run.seq * (run.layers * block + run.vocab * run.hidden)


def fsdp_runs(judge: Judge) -> Iterator[str]:
    """Yield the section, and judge its figures."""
    found = [
        ReplayedRun(run, *(replay_run(run, fit).seconds for fit in (NO_LOSS, FSDP_FITTED[run.machine])))
        for run in read_runs()
    ]
    yield f"## {len(found)} published runs of torch's FSDP (LLM Foundry): seconds per step, predicted / published"
    for machine, factors in FSDP_FITTED.items():
        yield (
            f"- {machine}: LLM Foundry's products take {factors.products:.3f} times, its attention "
            f"{factors.attention:.3f} times as long as with the rates of the machine file"
        )
    yield ""
    rows = []
    for kind, is_fitted in (("fitted", True), ("held-out", False)):
        chosen = [one for one in found if one.run.fitted == is_fitted]
        for device in (*MACHINES, "all"):
            some = [one for one in chosen if device in (one.run.device, "all")]
            runs = [one.run for one in some]
            both = ("as it is", [one.unfitted for one in some]), ("fitted", [one.fitted for one in some])
            for how, predicted in both:
                result = accuracy(runs, predicted)
                rows.append([f"{kind} rows", device, str(len(runs)), how, *(f"{figure:.3f}" for figure in result)])
                if device == "all":
                    judge_accuracy(judge, f"FSDP, {kind} rows, machine {how}", result)
    yield from markdown_table(
        ["rows", "device", "number", "machine", "geometric mean", "mean factor off", "worst", "Spearman"], rows
    )
    yield ""
    yield "Spearman is that of seconds per FLOP of the model, that is of utilisation."
    yield ""
    held_out = [one for one in found if not one.run.fitted]
    yield from bars(judge, accuracy([one.run for one in held_out], [one.fitted for one in held_out]))
    yield ""
    yield "Predicted / published, fitted, on the geometric mean of all rows (number of rows):"
    yield ""
    yield from residuals(found)
    yield ""
    yield "The rows that are furthest off:"
    yield ""
    worst = sorted(found, key=lambda one: -abs(one.residual))[:WORST_SHOWN]
    yield from markdown_table(
        ["run", "rows", "predicted", "published", "predicted / published", "suspected"],
        [
            [
                one.run.name, "fitted" if one.run.fitted else "held-out", f"{one.fitted:.2f}", f"{one.run.seconds:.2f}",
                f"{exp(one.residual):.2f}", FSDP_CAUSES.get(one.run.model, "-"),
            ]
            for one in worst
        ],
    )  # fmt: skip
    yield ""
    yield from (f"- assumed: {text}" for text in FSDP_ASSUMPTIONS)


def judge_accuracy(judge: Judge, name: str, result: Accuracy) -> None:
    """Compare the figures of some rows with the recorded ones, each as its distance from 1."""
    for figure in ("geometric_mean", "mean_factor", "worst"):
        judge.compare(f"{name}, {figure.replace('_', ' ')}", abs(getattr(result, figure) - 1))


def bars(judge: Judge, result: Accuracy) -> Iterator[str]:
    """Yield the bars for held-out rows."""
    low, high = GEOMETRIC_MEAN
    for what, value, reached in (
        (f"geometric mean within {low:g} to {high:g}", result.geometric_mean, low <= result.geometric_mean <= high),
        (f"mean factor off at most {MEAN_FACTOR:g}", result.mean_factor, result.mean_factor <= MEAN_FACTOR),
        (f"worst at most {WORST_FACTOR:g}", result.worst, result.worst <= WORST_FACTOR),
    ):
        yield f"- held-out rows, {what}: {verdict(reached)}, {value:.3f}"
        if not reached:
            judge.miss(f"FSDP, held-out rows, {what}", f"{value:.3f}")


GROUPS: dict[str, Callable[[FsdpRun], str]] = {
    "model": lambda run: run.model,
    "devices": lambda run: str(run.devices),
    "tokens per sequence": lambda run: f"{run.seq:,}",
    "tokens per device and micro-step": lambda run: tokens_group(run.rows * run.seq),
    "recompute": lambda run: "all blocks" if run.recompute else "none",
}
"""The properties of a run by which residuals are shown: what they depend on, the simulator lacks."""


def tokens_group(tokens: int) -> str:
    return "below 8,192" if tokens < 8192 else "8,192 to 32,767" if tokens < 32768 else "32,768 and more"


def residuals(found: Sequence[ReplayedRun]) -> Iterator[str]:
    """Yield a table of predicted / published by properties of the runs."""
    rows = []
    for group, value_of in GROUPS.items():
        by_value: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for one in sorted(found, key=lambda one: (one.run.hidden, one.run.devices, one.run.seq)):
            by_value[value_of(one.run)][one.run.device].append(one.residual)
        for value, devices in by_value.items():
            cells = [
                f"{exp(fmean(devices[device])):.2f} ({len(devices[device])})" if devices[device] else "-"
                for device in MACHINES
            ]
            rows.append([group, value, *cells])
    return markdown_table(["property", "value", *MACHINES], rows)
