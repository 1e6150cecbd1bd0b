"""A plan as one document: numbers for tables and pages, the reason why each grid lost, a timeline of the winner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, inf
from typing import Any

from fourfold.axes import MESSAGE_AXES, OFFLOAD, PIPE
from fourfold.models.config import ModelConfig
from fourfold.planner.estimate import Lever
from fourfold.planner.goodput import FailureRates
from fourfold.planner.grid_plan import GridPlan
from fourfold.planner.machine import HostMode
from fourfold.planner.price import Candidate, PipePrice, Price, TracedPrice, memory_of, quick_price
from fourfold.planner.robust import ABOUT_AS_GOOD, LESS_MEMORY, RobustChoice, compare, complexity, helps
from fourfold.planner.space import CHOSEN_FIELDS
from fourfold.planner.step_program import recompute_of
from fourfold.schedule.text import to_csv

WORTH_SAYING = 0.01
"""The share of a step from which a difference is named as a reason."""


MOST_SPANS = 2000
"""The actions of a schedule that are written down to be drawn: more cannot be told apart on a screen."""


def model_facts(config: ModelConfig, name: str) -> dict[str, Any]:
    sizes = {key: getattr(config, key) for key in ("layers", "hidden", "heads", "mlp_hidden", "vocab")}
    mixture = {}
    if config.experts:
        mixture = {key: getattr(config, key) for key in ("experts", "top_k", "expert_hidden")}
        mixture["active_parameters"] = config.active_parameters
    return {"name": name, "parameters": config.parameters, **sizes, **mixture}


def plan_document(plan: GridPlan, model: dict[str, Any], *, others: bool = True) -> dict[str, Any]:
    """Return everything that is shown of a plan, as JSON; the caller adds `why`, `config_toml`, and with `add_training`
    `failures` and `training`.

    With `others`, the document also has the estimates of grids that were not ranked.
    """
    task, machine = plan.task, plan.task.machine
    waiting = plan.estimated() if others else []
    return {
        "model": {**model, "seq": task.seq},
        "machine": {
            "name": machine.name,
            "about": machine.about,
            "devices_per_node": machine.devices_per_node,
            "device": machine.device,
            "memory_bytes": machine.memory,
            "usable_bytes": task.usable_bytes,
            "peak_flops": machine.peak[task.dtype],
            "host": machine.describe_host(host_mode(plan.best)),
            "uncertain": kinds_of(machine.uncertain),
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
        "estimated": [
            {
                "grid": found.candidate.shape.named,
                "order": list(found.candidate.shape.order),
                "seconds": found.seconds,
                "peak_bytes": memory_of(task, found.candidate).total,
            }
            for found in waiting
        ],
        "refused": [{"grid": refused.shape.named, "reason": refused.reason} for refused in plan.refused],
        "timeline": planned_timeline(plan.best),
        "robust": None if plan.robust is None else robustness(plan.robust, plan.best.seconds),
        "helps": helpful(plan),
        "failures": None,
        "training": None,
        "why": None,
        "config_toml": "",
        "assumptions": assumptions(plan),
    }


def add_training(document: dict[str, Any], rates: FailureRates, tokens: float | None, price: float | None) -> None:
    """Add to a plan its goodput, and what a training of so many tokens takes, if they are given: hours, device-hours
    and, with a price of one, money. Evaluation comes on top.
    """
    job = rates.job(document["model"]["parameters"], document["devices"])
    document["failures"] = {**job.document(), "assumptions": rates.assumptions}
    for found in document["grids"]:
        found.update(job.plan(found["seconds"]))
    if tokens is None:
        return
    steps = ceil(tokens / document["batch_tokens"])
    document["training"] = {"tokens": tokens, "steps": steps, "price": price}
    for found in document["grids"]:
        found["training"] = training_of(steps, found, document["devices"], price)


def training_of(steps: int, found: Mapping[str, Any], devices: int, price: float | None) -> dict[str, float | None]:
    """Return what so many steps take with the goodput of a grid: hours, device-hours and, with the price of one, money.

    `undisturbed_hours` are those of a run without failures and checkpoints.
    """
    undisturbed = steps * found["seconds"] / 3600
    hours = undisturbed / found["goodput"]
    return {
        "undisturbed_hours": undisturbed,
        "hours": hours,
        "device_hours": hours * devices,
        "cost": None if price is None else price * hours * devices,
    }


def robustness(found: RobustChoice, shown: float) -> dict[str, Any]:
    """Return how the choice does where the machine is not as its file says, beside the fastest by the file.

    The plan shows `shown` seconds for it, which are less than those that were compared if it was tuned since.
    """
    tuned = shown / found.chosen.seconds[0]
    low, high = (tuned * seconds for seconds in found.band)
    names = [scenario.name for scenario in found.scenarios]
    return {
        "band_seconds": [low, high],
        "candidates": found.priced,
        "scenarios": [
            {"name": name, "seconds": finite(tuned * seconds), "regret": finite(regret)}
            for name, seconds, regret in zip(names, found.chosen.seconds, found.chosen.regrets, strict=True)
        ],
        "worst": {"regret": finite(found.chosen.worst), "scenario": found.worst_scenario},
        "fastest": {
            "grid": found.fastest.price.candidate.shape.named,
            "chosen": found.fastest.price is found.chosen.price,
            "seconds": found.fastest.seconds[0],
            "regret": finite(found.fastest.worst),
            "scenario": names[found.fastest.regrets.index(found.fastest.worst)],
        },
    }


def why_not_chosen(plan: GridPlan, other: Price) -> str:
    """Explain why a grid that is faster than the best one by the machine file was not chosen."""
    best = plan.best
    less = f"{best.seconds - other.seconds:.2g} s ({1 - other.seconds / best.seconds:.1%}) less"
    said = f"by the machine file it takes {less} a step"
    if plan.robust is None:  # the choice was made by seconds, among what was simulated
        return f"{said}, but the search had not simulated it in this way"
    mine, chosen, among = compare(plan.robust, other, plan.task.usable_bytes, quick_price)
    less_memory = f"{LESS_MEMORY / 2**30:.0f} GiB less memory than the file says"
    if mine.worst == inf:
        return f"{said}, but would not fit with {less_memory}; the best grid would"
    if chosen.worst == inf:
        return f"{said}, and would fit with {less_memory}, unlike the best grid; the search had not tried it so"
    where, there = plan.robust.worst_of(mine), plan.robust.worst_of(chosen)
    regrets = (
        f"its largest regret is {mine.worst:.1%} ({where}), that of the best grid {chosen.worst:.1%} ({there}): a "
        "step takes that much longer there than with the best of the candidates"
    )
    if mine.worst > chosen.worst + ABOUT_AS_GOOD:
        return f"{said}, but loses more if the file is off: {regrets}"
    if complexity(chosen.price) < complexity(mine.price):
        return f"{said}; both are about as good if the file is off, and the best grid is simpler: {regrets}"
    if mine.worst > chosen.worst:
        return f"{said}, but loses a little more if the file is off: {regrets}"
    unseen = "" if among else ", but the search had not priced it in every scenario"
    return f"{said}, and does not lose more if the file is off{unseen}: {regrets}"


def kinds_of(keys: Sequence[str]) -> list[str]:
    """Return keys of constants by kind: `inside[1,2].latency` and `inside[1,4].latency` are both links inside nodes."""
    names = {"inside": "links inside a node", "between": "links between nodes", "host": "times of the host"}
    return list(dict.fromkeys(names.get(key.split(".")[0].split("[")[0], key) for key in keys))


def finite(number: float) -> float | None:
    """Return the number; None if it is infinite, for which JSON has no word: the candidate does not fit."""
    return number if number < inf else None


def helpful(plan: GridPlan) -> list[dict[str, Any]]:
    """Return what would make the best grid faster."""
    if isinstance(plan.best, TracedPrice):
        return []
    return [one._asdict() for one in helps(plan.best, plan.task.usable_bytes)]


def host_mode(found: Price) -> HostMode:
    """Return how the host gives the steps of a candidate to the device."""
    return found.task.host_mode(found.candidate.policy, found.candidate.shape)


def _chosen(candidate: Candidate) -> dict[str, Any]:
    """Return what the search chose of a policy; the way of K and V where they travel."""
    keys = [key for key in CHOSEN_FIELDS if key != "context_way" or candidate.shape.context > 1]
    return {key: getattr(candidate.policy, key) for key in keys}


def entry(found: Price, best: Price, rank: int) -> dict[str, Any]:
    """Return the numbers of one grid with its best configuration."""
    candidate, totals, memory = found.candidate, found.totals, found.memory
    prices, cut = found.task.seconds_on(candidate), candidate.shape.message_axes
    waits = [*cut, *([OFFLOAD] if candidate.policy.offload else [])]
    return {
        "rank": rank,
        "grid": candidate.shape.named,
        "order": list(candidate.shape.order),
        "policy": {**_chosen(candidate), "halves": found.halves},
        "rows": candidate.rows,
        "micro_steps": candidate.micro_steps,
        "seconds": found.seconds,
        "tokens_per_second": found.tokens_per_second,
        "mfu": found.mfu,
        "hfu": found.hfu,
        "compute_seconds": totals.compute,
        "link_seconds": {name: totals.link.get(name, 0.0) for name in waits},
        "exposed_seconds": {name: totals.exposed.get(name, 0.0) for name in waits},
        "host_seconds": totals.host,
        "bandwidth": {axis: prices.link(axis).bandwidth for axis in cut},
        "memory_bytes": memory.kinds,
        "peak_bytes": memory.total,
        "host_bytes": memory.host,
        "bound_by": found.bound_by,
        "reason": "" if found is best else reasons(found, best)[0],
        "pipeline": pipeline(found) if isinstance(found, PipePrice) else None,
    }


def pipeline(found: PipePrice) -> dict[str, Any]:
    """Return stages, schedule, bubble and memory of a grid with a pipe axis.

    `spans` are the first actions of every pipe rank: kind, stage, micro-batch, start and end. A schedule that was found
    is written down in torch's CSV; others have a name.
    """
    stages, played, policy = found.stages, found.played, found.candidate.policy
    every = range(len(stages.placement))
    each = max(1, MOST_SPANS // len(played.spans))
    return {
        "schedule": found.schedule_name,
        "schedule_csv": None if isinstance(policy.schedule, str) else to_csv(played.schedule),
        "bubble": found.bubble,
        "cuts": list(stages.cuts),
        "placement": list(stages.placement),
        "layers": [len(stages.layers_of(stage)) for stage in every],
        "recompute": [recompute_of(stages, stage, policy) for stage in every],
        "peak_bytes": [memory.total for memory in found.memories],
        "micro_steps": found.candidate.micro_steps,
        "played_micro_steps": played.schedule.micro_steps,
        "spans": [
            [[*span.action, round(span.start, 7), round(span.end, 7)] for span in spans[:each]]
            for spans in played.spans
        ],
    }


def reasons(loser: Price, winner: Price) -> list[str]:
    """Return what the loser loses on, the largest loss first; then what the loser is better at."""
    more = loser.totals.compute - winner.totals.compute
    lost = [(more, f"{describe(more)} of computation: {_compute_reason(loser, winner)}")]
    for axis in MESSAGE_AXES:
        more = loser.totals.exposed.get(axis, 0.0) - winner.totals.exposed.get(axis, 0.0)
        waits = "of waiting for other stages" if axis == PIPE else f"exposed over {axis}"
        lost.append((more, f"{describe(more)} {waits}: {_link_reason(loser, winner, axis)}"))
    more = loser.totals.exposed.get(OFFLOAD, 0.0) - winner.totals.exposed.get(OFFLOAD, 0.0)
    lost.append((more, f"{describe(more)} of waiting for block inputs that are copied to the host and back"))
    more = loser.totals.host - winner.totals.host
    lost.append((more, f"{describe(more)} of waiting for the host, which issues the work"))
    lost.sort(key=lambda each: -each[0])
    least = WORTH_SAYING * winner.seconds
    said = [text for more, text in lost if abs(more) > least]
    if lost[0][0] > least:
        return said
    gap = loser.seconds - winner.seconds
    return [f"{describe(gap)} a step, from nothing larger than {least:.2g} s each", *said]


def describe(seconds: float) -> str:
    """Describe a difference as `0.42 s more` or `12 ms less`."""
    size = abs(seconds)
    shown = f"{size:.2f} s" if size >= 0.1 else f"{size * 1e3:.1f} ms"
    return f"{shown} {'more' if seconds >= 0 else 'less'}"


def _compute_reason(loser: Price, winner: Price) -> str:
    """Compare what the two compute twice, and the shares of the peak at which they compute."""
    ours, theirs = (
        found.flops.hardware * found.task.tokens / found.totals.compute / found.peak_flops for found in (loser, winner)
    )
    said = f"it computes at {ours:.0%} of the peak, the best grid at {theirs:.0%}"
    difference = Lever.of(loser.candidate.policy).compare_computation(Lever.of(winner.candidate.policy))
    return f"{difference}; {said}" if difference else said


def _bubble_of(found: Price) -> str:
    """Describe a pipeline as `bubble 22% with 1f1b, 8 micro-batches on pipe=4`."""
    if not isinstance(found, PipePrice):
        return "no bubble"
    steps, pipe = found.candidate.micro_steps, found.candidate.shape.pipe
    return f"bubble {found.bubble:.0%} with {found.schedule_name}, {steps} micro-batches on pipe={pipe}"


def _link_reason(loser: Price, winner: Price, axis: str) -> str:
    if axis == PIPE:
        return f"{_bubble_of(loser)}; the best grid has {_bubble_of(winner)}"
    if loser.candidate.shape.group_sizes[axis] == 1:
        return f"{_link(winner, axis)} in the best grid, which alone uses {axis}"
    if winner.candidate.shape.group_sizes[axis] == 1:
        return f"{_link(loser, axis)}; the best grid does not use {axis}"
    return f"{_link(loser, axis)}; the best grid's {_link(winner, axis)}"


def _link(found: Price, axis: str) -> str:
    """Describe an axis as `z=8 crosses nodes at 20 GB/s, 3.1 s on the link`."""
    route = found.task.seconds_on(found.candidate).link(axis)
    where = "crosses nodes" if route.crosses else "stays inside a node"
    size, seconds = found.candidate.shape.group_sizes[axis], found.totals.link.get(axis, 0.0)
    return f"{axis}={size} {where} at {route.bandwidth / 1e9:.3g} GB/s, {seconds:.3g} s on the link"


def planned_timeline(found: Price) -> list[dict[str, Any]]:
    """Return the spans of a micro-step of a few layers; lanes of one axis share its track."""
    line = found.timeline()
    begins = [(totals.seconds, phase) for phase, totals in line.marks]
    spans = []
    for span in line.spans:
        phase = span.phase or next((phase for at, phase in reversed(begins) if at <= span.start), "forward")
        track = span.track.split()[0]
        spans.append({"track": track, "label": span.label, "start": span.start, "end": span.end, "phase": phase})
    return spans


def assumptions(plan: GridPlan) -> list[str]:
    task, machine = plan.task, plan.task.machine
    lines = [
        "a step is periodic in its layers and micro-steps: up to twelve layers are simulated and the rest added up",
        "every rank is as fast as every other, and nothing else uses the network",
        f"weights are {str(task.parameters).removeprefix('torch.')}, products and messages {task.dtype}; AdamW",
        f"the host, {machine.describe_host(host_mode(plan.best))}",
    ]
    if any(isinstance(found, PipePrice) for found in plan.ranked):
        lines.append("a pipeline's stages are simulated one by one, then its schedule with their seconds and messages")
    if machine.device != "cpu" and any(found.candidate.shape.context > 1 for found in plan.ranked):
        lines.append(
            "attention over parts of sequences is priced as a fused kernel; on a GPU it runs with plain products yet, "
            "which are slower and need memory for their scores"
        )
    if machine.host_bandwidth is None and any(found.candidate.policy.offload for found in plan.ranked):
        lines.append(f"{machine.name} has no host_bandwidth, so copies of offload take no time here")
    if task.documents is not None:
        lines.append(
            f"rows have packed documents, {task.documents.mean:,.0f} tokens long on average in a sample of "
            f"{len(task.documents.lengths):,}; every micro-step is that of the busiest place"
        )
    if task.config.experts:
        uneven = f"one expert has {task.imbalance:g} times the mean"
        share = uneven if task.imbalance > 1 else "all experts have equally many"
        lines.append(
            "experts stay where they are stored and their weights travel, so every device computes the pairs of its "
            f"own tokens with experts, whichever they choose; of these pairs {share}, and each expert's product takes "
            "what a product of its size takes"
        )
    if machine.uncertain:
        lines.append(f"of the machine {machine.name} these are estimates or fitted: {', '.join(machine.uncertain)}")
    return lines
