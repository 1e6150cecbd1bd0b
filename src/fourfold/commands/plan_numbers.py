"""`fourfold plan --devices 64..1024`: the best plan for each number of devices, what it costs, and where to stop."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

from fourfold.atomic import write_json
from fourfold.axes import AXES
from fourfold.planner.explain import entry, model_facts, training_of
from fourfold.planner.price import Task
from fourfold.planner.search import Space, search
from fourfold.report.plan_text import grid_name
from fourfold.report.units import DASH, aligned, count, money, nbytes, percent

WORTHWHILE = 0.8
"""More devices are worth it if the step becomes at least this share of their factor faster: 1.6 times for twice as
many."""
KEYS = ("grid", "order", "seconds", "tokens_per_second", "mfu", "peak_bytes", "micro_steps", "pipeline")
"""What is shown of the best grid for a number of devices."""


def compare_numbers(options: argparse.Namespace, task: Task, name: str) -> int:
    """Plan the same batch for each number of devices, show the plans, and return the exit code."""
    found = []
    for devices in options.devices:
        found.append(best_for(task, devices))
        grid = grid_name(found[-1]["grid"]) if "grid" in found[-1] else "nothing fits"
        print(f"fourfold: {devices:,} devices: {grid}", file=sys.stderr)
    document = numbers_document(task, model_facts(task.config, name), found, options.tokens, options.price)
    if options.json == "-":
        print(json.dumps(document, indent=1))
        return 0
    if options.json is not None:
        write_json(Path(options.json), document)
    print("\n".join(numbers_text(document)))
    return 0


def best_for(task: Task, devices: int) -> dict[str, Any]:
    """Return the best grid for a number of devices, or why there is none."""
    try:
        best = search(task, devices, space=Space(axes=AXES), top=1).best
    except ValueError as error:
        return {"devices": devices, "refused": str(error)}
    shown = entry(best, best, 1)
    return {"devices": devices, **{key: shown[key] for key in KEYS}}


def numbers_document(
    task: Task, model: Mapping[str, Any], found: Sequence[dict[str, Any]], tokens: float | None, price: float | None
) -> dict[str, Any]:
    """Return the plans with what more devices gain: efficiency counts tokens per second and device, and is 1 for the
    fewest devices on which the model fits."""
    fits = [one for one in found if "refused" not in one]
    if not fits:
        raise ValueError(f"{model['name']} fits on none of these numbers of devices: {found[-1]['refused']}")
    first = fits[0]["tokens_per_second"] / fits[0]["devices"]
    for one in fits:
        one["efficiency"] = one["tokens_per_second"] / one["devices"] / first
        if tokens is not None:
            one |= training_of(ceil(tokens / task.tokens), one["seconds"], one["devices"], price)
    return {
        "model": dict(model),
        "machine": task.machine.name,
        "batch_tokens": task.tokens,
        "tokens": tokens,
        "price": price,
        "numbers": list(found),
        "advice": list(advice(fits)),
    }


def advice(fits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield where more devices stop being worth it, and with a price which number is the cheapest."""
    stop = fits[0]
    for fewer, more in pairwise(fits):
        gain, factor = fewer["seconds"] / more["seconds"], more["devices"] / fewer["devices"]
        if gain < WORTHWHILE * factor:
            yield (
                f"stop at {fewer['devices']:,} devices: {more['devices']:,} are {gain:.2f} times as fast, less than "
                f"{WORTHWHILE:.0%} of {factor:g}"
            )
            break
        stop = more
    else:
        yield f"up to {stop['devices']:,} devices, more of them are worth it: the step becomes faster nearly as they do"
    if fits[0].get("cost") is not None:
        cheapest = min(fits, key=lambda one: one["cost"])
        yield (
            f"the cheapest is {cheapest['devices']:,} devices: {money(cheapest['cost'])} in "
            f"{days(cheapest)}; evaluation, checkpoints and restarts come on top"
        )


def days(one: Mapping[str, Any]) -> str:
    return f"{one['hours'] / 24:.3g} days"


def numbers_text(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table, one line for each number of devices, and the advice."""
    model = document["model"]["name"]
    yield f"{model} on {document['machine']}, {document['batch_tokens']:,} tokens per step"
    yield ""
    with_hours = document["tokens"] is not None
    with_cost = document["price"] is not None
    head = ["devices", "grid", "micro", "s/step", "tokens/s", "efficiency", "MFU", "peak"]
    head += ["time"] * with_hours + ["cost"] * with_cost
    rows = [head]
    for one in document["numbers"]:
        if "refused" in one:
            rows.append([f"{one['devices']:,}", "nothing fits", *[DASH] * (len(head) - 2)])
            continue
        row = [f"{one['devices']:,}", grid_name(one["grid"]), str(one["micro_steps"]), f"{one['seconds']:.3f}"]
        row += [count(one["tokens_per_second"]), percent(one["efficiency"]), percent(one["mfu"])]
        row += [nbytes(one["peak_bytes"])]
        row += [days(one)] if with_hours else []
        rows.append(row + ([money(one["cost"])] if with_cost else []))
    yield from aligned(rows, right=range(2, len(head)))
    yield ""
    yield from (f"- {line}" for line in document["advice"])
