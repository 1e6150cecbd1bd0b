"""A plan as one document: numbers for tables and pages, the reason why each grid lost, a timeline of the winner."""

from __future__ import annotations

from typing import Any

from fourfold.axes import AXES
from fourfold.models.config import ModelConfig
from fourfold.planner.price import Priced, Task, memory_of
from fourfold.planner.search import Estimated, GridPlan
from fourfold.planner.seconds import Seconds


def model_facts(config: ModelConfig, name: str) -> dict[str, Any]:
    sizes = {key: getattr(config, key) for key in ("layers", "hidden", "heads", "mlp_hidden", "vocab")}
    return {"name": name, "parameters": config.parameters, **sizes}


def plan_document(plan: GridPlan, model: dict[str, Any], *, others: bool = True) -> dict[str, Any]:
    """Everything that is shown of a plan, as JSON has it; `why` and `config_toml` are for the caller to add. With
    `others` the grids that were not ranked have their estimates too."""
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
            "grids": len(plan.ranked) + len(plan.waiting) + len(plan.refused),
            "candidates": plan.candidates,
            "simulated": plan.simulated,
            "seconds": plan.seconds,
        },
        "grids": [entry(found, plan.best, rank) for rank, found in enumerate(plan.ranked, start=1)],
        "estimated": [estimated_entry(task, found) for found in plan.estimated()] if others else [],
        "refused": [{"grid": refused.shape.sizes, "reason": refused.reason} for refused in plan.refused],
        "timeline": planned_timeline(plan.best),
        "why": None,
        "config_toml": "",
        "assumptions": assumptions(task),
    }


def entry(found: Priced, best: Priced, rank: int) -> dict[str, Any]:
    """One grid with its best configuration."""
    candidate, totals, memory = found.candidate, found.totals, found.memory
    prices = Seconds(found.task.machine, candidate.shape)
    cut = [axis for axis in AXES if candidate.shape.sizes[axis] > 1]
    return {
        "rank": rank,
        "grid": candidate.shape.sizes,
        "order": list(candidate.shape.order),
        "policy": {
            "activations": candidate.policy.activations,
            "recompute": candidate.policy.recompute,
            "keep_gathered": candidate.policy.keep_gathered,
            "keep_weights": candidate.policy.keep_weights,
            "loss_chunk": candidate.policy.loss_chunk,
            "shard_optimizer": candidate.policy.shard_optimizer,
            "halves": found.halves,
        },
        "rows": candidate.rows,
        "micro_steps": candidate.micro_steps,
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
    """A grid that was not ranked, because others seemed faster."""
    return {
        "grid": found.candidate.shape.sizes,
        "order": list(found.candidate.shape.order),
        "seconds": found.seconds,
        "peak_bytes": memory_of(task, found.candidate).total,
    }


def reasons(loser: Priced, winner: Priced) -> list[str]:
    """What the loser loses on, the most first; and what it is better at."""
    more = loser.totals.compute - winner.totals.compute
    lost = [(more, f"{describe(more)} of computation: {_compute_reason(loser, winner)}")]
    for axis in AXES:
        more = loser.totals.exposed.get(axis, 0.0) - winner.totals.exposed.get(axis, 0.0)
        lost.append((more, f"{describe(more)} exposed over {axis}: {_link_reason(loser, winner, axis)}"))
    lost.sort(key=lambda each: -each[0])
    worth_saying = 0.01 * winner.seconds
    said = [text for more, text in lost if abs(more) > worth_saying]
    if lost[0][0] > worth_saying:
        return said
    gap = loser.seconds - winner.seconds
    return [f"{describe(gap)} a step, from nothing larger than {worth_saying:.2g} s each", *said]


def describe(seconds: float) -> str:
    """`0.42 s more`, `12 ms less`"""
    size = abs(seconds)
    shown = f"{size:.2f} s" if size >= 0.1 else f"{size * 1e3:.1f} ms"
    return f"{shown} {'more' if seconds >= 0 else 'less'}"


def _compute_reason(loser: Priced, winner: Priced) -> str:
    """FLOPs that it runs again, and the part of the peak at which it computes."""
    rates = []
    for found in (loser, winner):
        peak = found.task.machine.peak[found.task.dtype] * found.candidate.shape.world
        rates.append(found.flops.hardware * found.task.tokens / found.totals.compute / peak)
    said = f"it computes at {rates[0]:.0%} of the peak, the best grid at {rates[1]:.0%}"
    ours, theirs = loser.candidate.policy.recompute, winner.candidate.policy.recompute
    return said if ours == theirs else f"recompute={ours} against {theirs}; {said}"


def _link_reason(loser: Priced, winner: Priced, axis: str) -> str:
    if loser.candidate.shape.sizes[axis] == 1:
        return f"{_link(winner, axis)} in the best grid, which alone uses {axis}"
    if winner.candidate.shape.sizes[axis] == 1:
        return f"{_link(loser, axis)}; the best grid does not use {axis}"
    return f"{_link(loser, axis)}; the best grid's {_link(winner, axis)}"


def _link(found: Priced, axis: str) -> str:
    """`z=8 crosses nodes at 20 GB/s, 3.1 s on the link`"""
    route = Seconds(found.task.machine, found.candidate.shape).link(axis)
    where = "crosses nodes" if route.crosses else "stays inside a node"
    size, seconds = found.candidate.shape.sizes[axis], found.totals.link.get(axis, 0.0)
    return f"{axis}={size} {where} at {route.bandwidth / 1e9:.3g} GB/s, {seconds:.3g} s on the link"


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
        "a step is periodic in its layers and micro-steps: up to twelve layers are simulated and the rest added up",
        "every rank is as fast as every other, and nothing else uses the network",
        f"weights are {str(task.parameters).removeprefix('torch.')}, products and messages {task.dtype}; AdamW",
    ]
    if estimates:
        lines.append(f"of the machine {machine.name} these are estimates or fitted: {', '.join(estimates)}")
    return lines
