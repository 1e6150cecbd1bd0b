"""A plan as one document: numbers for tables and pages, the reason why each grid lost, a timeline of the winner."""

from __future__ import annotations

from typing import Any

from fourfold.cost.price import Priced, Task, memory_of
from fourfold.cost.search import Estimated, Plan
from fourfold.cost.seconds import Route, Seconds
from fourfold.grid import AXES
from fourfold.models.config import Config


def model_facts(config: Config, name: str) -> dict[str, Any]:
    sizes = {key: getattr(config, key) for key in ("layers", "hidden", "heads", "mlp_hidden", "vocab")}
    return {"name": name, "parameters": config.parameters, **sizes}


def plan_document(plan: Plan, model: dict[str, Any]) -> dict[str, Any]:
    """Everything that is shown of a plan, as JSON has it; `why` and `config_toml` are for the caller to add."""
    task, machine = plan.task, plan.task.machine
    return {
        "model": {**model, "seq": task.seq},
        "machine": {
            "name": machine.name,
            "about": machine.about,
            "devices_per_node": machine.devices_per_node,
            "device": machine.device,
            "memory_bytes": machine.memory,
            "usable_bytes": machine.memory - machine.reserve,
            "peak_flops": machine.peak[task.dtype],
        },
        "devices": plan.devices,
        "batch_tokens": task.tokens,
        "seq": task.seq,
        "searched": {
            "grids": len(plan.ranked) + len(plan.estimated) + len(plan.refused),
            "candidates": plan.candidates,
            "simulated": plan.simulated,
            "seconds": plan.seconds,
        },
        "grids": [entry(found, plan.best, rank) for rank, found in enumerate(plan.ranked, start=1)],
        "estimated": [estimated_entry(task, found) for found in plan.estimated],
        "refused": [{"grid": shape.sizes, "reason": reason} for shape, reason in plan.refused],
        "timeline": planned_timeline(plan.best),
        "why": None,
        "config_toml": "",
        "assumptions": assumptions(task),
    }


def entry(found: Priced, best: Priced, rank: int) -> dict[str, Any]:
    """One grid with its best configuration."""
    choice, totals, memory = found.choice, found.totals, found.memory
    prices = Seconds(found.task.machine, choice.shape)
    cut = [axis for axis in AXES if choice.shape.sizes[axis] > 1]
    return {
        "rank": rank,
        "grid": choice.shape.sizes,
        "order": list(choice.shape.order),
        "policy": {
            "activations": choice.policy.activations,
            "recompute": choice.policy.recompute,
            "keep_gathered": choice.policy.keep_gathered,
            "keep_weights": choice.policy.keep_weights,
            "loss_chunk": choice.policy.loss_chunk,
            "shard_optimizer": choice.policy.shard_optimizer,
            "halves": found.halves,
        },
        "rows": choice.rows,
        "micro_steps": choice.micro_steps,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "compute_seconds": totals.compute,
        "link_seconds": {axis: totals.link.get(axis, 0.0) for axis in cut},
        "exposed_seconds": {axis: totals.exposed.get(axis, 0.0) for axis in cut},
        "bandwidth": {axis: prices.link(axis).bandwidth for axis in cut},
        "memory_bytes": memory.kinds,
        "peak_bytes": memory.total,
        "bound_by": found.bound_by,
        "reason": "" if found is best else reasons(found, best)[0],
    }


def estimated_entry(task: Task, found: Estimated) -> dict[str, Any]:
    """A grid that was not simulated, because it seems slower than those that were."""
    return {
        "grid": found.choice.shape.sizes,
        "order": list(found.choice.shape.order),
        "seconds": found.seconds,
        "peak_bytes": memory_of(task, found.choice).total,
    }


def reasons(loser: Priced, winner: Priced) -> list[str]:
    """What the loser loses on, the most first; and what it is better at."""
    prices = [Seconds(found.task.machine, found.choice.shape) for found in (loser, winner)]
    lost: list[tuple[float, str]] = []
    more = loser.totals.compute - winner.totals.compute
    lost.append((more, f"{describe(more)} of computation: {_compute_reason(loser, winner)}"))
    for axis in AXES:
        more = loser.totals.exposed.get(axis, 0.0) - winner.totals.exposed.get(axis, 0.0)
        routes = [price.link(axis) for price in prices]
        lost.append((more, f"{describe(more)} exposed over {axis}: {_route_reason(loser, winner, axis, *routes)}"))
    worth_saying = 0.01 * winner.seconds
    said = [text for more, text in sorted(lost, key=lambda each: -each[0]) if abs(more) > worth_saying]
    gap = loser.seconds - winner.seconds
    return said or [f"{describe(gap)} a step, from nothing larger than {worth_saying:.2g} s each"]


def describe(seconds: float) -> str:
    """`0.42 s more`, `12 ms less`"""
    size = abs(seconds)
    shown = f"{size:.2f} s" if size >= 0.1 else f"{size * 1e3:.1f} ms"
    return f"{shown} {'more' if seconds >= 0 else 'less'}"


def _compute_reason(loser: Priced, winner: Priced) -> str:
    ours, theirs = loser.choice, winner.choice
    if ours.policy.recompute != theirs.policy.recompute:
        return f"recompute={ours.policy.recompute} against {theirs.policy.recompute}"
    if ours.micro_steps != theirs.micro_steps:
        return f"{ours.micro_steps} micro-steps of {ours.rows} rows against {theirs.micro_steps} of {theirs.rows}"
    return "its local products have other shapes"


def _route_reason(loser: Priced, winner: Priced, axis: str, ours: Route, theirs: Route) -> str:
    sizes = [found.choice.shape.sizes[axis] for found in (loser, winner)]
    where = "crosses nodes" if ours.crosses else "stays inside a node"
    here = f"{axis}={sizes[0]} {where} at {ours.bandwidth / 1e9:.3g} GB/s"
    if sizes[0] == 1:
        return f"{axis} does not cut it, {axis}={sizes[1]} cuts the best grid"
    if sizes[1] == 1:
        return f"{here}, the best grid does not use {axis}"
    there = "crosses nodes" if theirs.crosses else "stays inside a node"
    return f"{here}, the best grid's {axis}={sizes[1]} {there} at {theirs.bandwidth / 1e9:.3g} GB/s"


def planned_timeline(found: Priced) -> list[dict[str, Any]]:
    """A micro-step of a few layers; lanes of one axis share its track."""
    line = found.timeline()
    begins = [(totals.seconds, phase) for phase, totals in line.marks]
    spans = []
    for span in line.spans:
        phase = span.phase or next((phase for at, phase in reversed(begins) if at <= span.start), "forward")
        track = span.track.split()[0]
        spans.append({"track": track, "label": span.label, "start": span.start, "end": span.end, "phase": phase})
    return spans


def assumptions(task: Task) -> list[str]:
    machine = task.machine
    estimates = sorted(key for key, source in machine.sources.items() if source.startswith(("estimate", "fitted")))
    lines = [
        "a step is periodic in its layers and micro-steps: up to eight layers are simulated and the rest added up",
        "every rank is as fast as every other, and nothing else uses the network",
        f"weights are {str(task.parameters).removeprefix('torch.')}, products and messages {task.dtype}; AdamW",
    ]
    if estimates:
        lines.append(f"of the machine {machine.name} these are estimates or fitted: {', '.join(estimates)}")
    return lines
