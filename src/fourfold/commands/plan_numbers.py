"""`fourfold plan --devices 64..1024`: the best plan for each number of devices, what it costs, and where to stop."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from typing import Any

from fourfold.axes import AXES
from fourfold.commands.output import show_document
from fourfold.errors import NoPlanError
from fourfold.planner.explain import entry, kinds_of, model_facts, robustness, training_of
from fourfold.planner.goodput import FailureRates
from fourfold.planner.price import Task
from fourfold.planner.robust import Risk
from fourfold.planner.search import search
from fourfold.planner.space import Space
from fourfold.report.plan_text import grid_name, uncertain_text
from fourfold.report.units import DASH, aligned, count, money, nbytes, percent

WORTHWHILE = 0.8
"""More devices are worth it if the step becomes at least this share of their factor faster: 1.6 times for twice as
many."""
KEYS = ("grid", "order", "seconds", "tokens_per_second", "mfu", "peak_bytes", "micro_steps", "pipeline")
"""What is shown of the best grid for a number of devices."""


def compare_numbers(options: argparse.Namespace, task: Task, name: str, rates: FailureRates) -> int:
    """Plan the same batch for each number of devices, show the plans, and return the exit code."""
    found = []
    for devices in options.devices:
        found.append(best_for(task, devices, rates, options.risk))
        print(f"fourfold: {devices:,} devices: {grid_or_reason(found[-1])}", file=sys.stderr)
    document = numbers_document(task, model_facts(task.config, name), found, options.tokens, options.price)
    document["assumptions"] = rates.assumptions
    return show_document(document, numbers_text, options.json)


def best_for(task: Task, devices: int, rates: FailureRates, risk: Risk) -> dict[str, Any]:
    """Return the best grid for a number of devices with its goodput, or why there is none.

    With the risk `robust` it also has the seconds between which a step lies, as far as the machine file may be off.
    """
    job = rates.job(task.config.parameters, devices)
    try:
        job.require_progress()  # now, because the search may take a minute
        plan = search(task, devices, space=Space(axes=AXES), top=1, risk=risk)
        goodput = job.plan(plan.best.seconds)
    except NoPlanError as error:
        return {"devices": devices, "refused": str(error), "refused_short": error.short}
    shown = entry(plan.best, plan.best, 1)
    band = None if plan.robust is None else robustness(plan.robust, plan.best.seconds)["band_seconds"]
    return {"devices": devices, **{key: shown[key] for key in KEYS}, "band_seconds": band, **goodput}


def grid_or_reason(one: Mapping[str, Any]) -> str:
    """Return the grid for a number of devices, or in a few words why there is none."""
    return grid_name(one["grid"]) if "grid" in one else one["refused_short"]


def numbers_document(
    task: Task, model: Mapping[str, Any], found: Sequence[dict[str, Any]], tokens: float | None, price: float | None
) -> dict[str, Any]:
    """Return the plans with what more devices gain: efficiency counts tokens per second and device, and is 1 for the
    fewest devices that have a plan."""
    fits = [one for one in found if "refused" not in one]
    if not fits:
        last = found[-1]
        raise ValueError(
            f"{model['name']} has no plan for any of these numbers of devices; for {last['devices']}: {last['refused']}"
        )
    first = fits[0]["tokens_per_second"] / fits[0]["devices"]
    for one in fits:
        one["efficiency"] = one["tokens_per_second"] / one["devices"] / first
        if tokens is not None:
            one |= training_of(ceil(tokens / task.tokens), one, one["devices"], price)
    return {
        "model": dict(model),
        "machine": task.machine.name,
        "uncertain": kinds_of(task.machine.uncertain),
        "batch_tokens": task.tokens,
        "tokens": tokens,
        "price": price,
        "numbers": list(found),
        "advice": list(advice(fits)),
    }


def advice(fits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield where more devices stop being worth it, and with a price which number is the cheapest.

    Both count goodput: a job on more devices fails more often.
    """
    stop = fits[0]
    for fewer, more in pairwise(fits):
        gain = fewer["seconds"] / fewer["goodput"] / (more["seconds"] / more["goodput"])
        factor = more["devices"] / fewer["devices"]
        if gain < WORTHWHILE * factor:
            yield (
                f"stop at {fewer['devices']:,} devices: {more['devices']:,} are {gain:.2f} times as fast, less than "
                f"{WORTHWHILE:.0%} of {factor:g}"
            )
            break
        stop = more
    if stop is fits[-1] and len(fits) > 1:
        yield f"up to {stop['devices']:,} devices, more of them are worth it: training becomes faster nearly as they do"
    if fits[0].get("cost") is not None:
        cheapest = min(fits, key=lambda one: one["cost"])
        yield (
            f"the cheapest is {cheapest['devices']:,} devices: {money(cheapest['cost'])} in "
            f"{days(cheapest)}; evaluation comes on top"
        )


def days(one: Mapping[str, Any]) -> str:
    return f"{one['hours'] / 24:.3g} days"


def numbers_text(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table, one line for each number of devices, the advice, and how sure the numbers are."""
    model = document["model"]["name"]
    yield f"{model} on {document['machine']}, {document['batch_tokens']:,} tokens per step"
    yield ""
    with_hours = document["tokens"] is not None
    with_cost = document["price"] is not None
    robust = any(one.get("band_seconds") for one in document["numbers"])
    head = [
        "devices",
        "grid",
        "micro",
        "s/step",
        *["at worst"] * robust,
        "tokens/s",
        "efficiency",
        "MFU",
        "peak",
        "goodput",
    ]
    head += ["time"] * with_hours + ["cost"] * with_cost
    rows = [head]
    for one in document["numbers"]:
        if "refused" in one:
            rows.append([f"{one['devices']:,}", grid_or_reason(one), *[DASH] * (len(head) - 2)])
            continue
        row = [f"{one['devices']:,}", grid_or_reason(one), str(one["micro_steps"]), f"{one['seconds']:.3f}"]
        row += [f"{one['band_seconds'][1]:.3f}"] if robust else []
        row += [count(one["tokens_per_second"]), percent(one["efficiency"]), percent(one["mfu"])]
        row += [nbytes(one["peak_bytes"]), f"{one['goodput']:.1%}"]
        row += [days(one)] if with_hours else []
        rows.append(row + ([money(one["cost"])] if with_cost else []))
    yield from aligned(rows, right=range(2, len(head)))
    yield ""
    yield from (f"- {line}" for line in document["advice"])
    yield from (f"- {one['devices']:,} devices: {one['refused']}" for one in document["numbers"] if "refused" in one)
    if robust:
        yield (
            "- each grid is the one that loses least if the machine is not as its file says (--risk fastest: the one "
            "with the fewest seconds by the file); a step takes s/step by the file, and up to `at worst` as far as the "
            "file may be off; all other columns are by the file"
        )
    if document["uncertain"]:
        yield f"- {uncertain_text(document['uncertain'])}"
    yield f"- goodput assumes: {'; '.join(document['assumptions'])}"
