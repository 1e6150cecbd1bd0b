"""The parts of a step: seconds of products, attention, other kernels, and messages by axis.

A program has its parts by the machine's constants (`work_seconds`). A trace has those that were measured. On a GPU they
are the kernels of the trace. A kernel belongs to the step, and to the collective, during which the host launched it. On
the CPU they are torch's operators, each without the operators that it calls, and the ledger times messages. What is
left of a step that was not traced is the host's: tracing slows the host down.

Names of kernels and operators are recognised here alone.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple, get_args

import torch
from torch.profiler import ProfilerActivity

from fourfold.axes import AXES, PIPE
from fourfold.ledger import Collective, Flight, Op
from fourfold.planner.machine import Seconds
from fourfold.planner.program import AttentionOp, ElementwiseOp, LaunchOp, MatmulOp, Work, lane_of

PRODUCTS, ATTENTION, KERNELS, HOST_PART = "products", "attention", "kernels", "host"
"""The names of the parts that are no axis."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """Seconds of a step on one rank, as they were predicted or measured."""

    seconds: float
    products: float
    attention: float
    kernels: float
    """Seconds of all other kernels: norms, activations, losses, casts, copies, the optimizer."""
    host: float
    """Seconds that the device waited because the host was late. On the CPU, which computes itself, the host's own
    work."""
    link: Mapping[str, float] = field(default_factory=dict)
    """Seconds that messages of each axis were under way; an axis that was not measured is missing."""
    exposed: Mapping[str, float] = field(default_factory=dict)
    """Seconds that computation waited for messages of each axis."""

    def named(self) -> dict[str, float]:
        """Return the seconds by the name of the part, as tables show them."""
        found = {PRODUCTS: self.products, ATTENTION: self.attention, KERNELS: self.kernels, HOST_PART: self.host}
        return found | {f"messages over {axis}": seconds for axis, seconds in self.link.items()}


class WorkPiece(NamedTuple):
    """A piece of work without its name, so that equal ones are counted together."""

    kind: str
    """`products`, `attention`, `fused`, `plain`, or the op of a collective."""
    sizes: tuple[int, ...]
    axis: str = ""


StepWork = Counter[WorkPiece]
"""How often each piece of work occurs in a step; it does not depend on the machine."""


def pieces(work: Iterable[Work]) -> StepWork:
    """Count the pieces of a program."""
    found: StepWork = Counter()
    for item in work:
        if isinstance(item, MatmulOp):
            how = item.parts, int(item.is_wgrad and (item.parts > 1 or item.sent)), int(item.sent)
            found[WorkPiece(PRODUCTS, (item.m, item.k, item.n, *how))] += 1
        elif isinstance(item, AttentionOp):
            found[WorkPiece(ATTENTION, (item.flops, item.nbytes))] += 1
        elif isinstance(item, ElementwiseOp):
            found[WorkPiece("fused" if item.fused else "plain", (item.nbytes,))] += 1
        elif isinstance(item, LaunchOp):
            record = item.record
            found[WorkPiece(record.op, (record.nbytes, record.ranks, record.sent), record.axis)] += 1
    return found


class WorkSeconds(NamedTuple):
    """Seconds of a step's work, each piece of it by itself."""

    products: float
    attention: float
    fused: float
    plain: float
    host: float
    fixed: Mapping[str, float]
    """Seconds of latency of the messages of each axis."""
    moving: Mapping[str, float]
    """Seconds of the messages of each axis on the link."""


def work_seconds(seconds: Seconds, dtype: str, work: StepWork) -> WorkSeconds:
    """Return the seconds of a step's work on a machine, each piece of it by itself."""
    on_cpu = seconds.machine.device == "cpu"
    own = seconds.machine.overhead if on_cpu else 0.0  # there the host's seconds are part of every piece of work
    spent: defaultdict[str, float] = defaultdict(float)
    fixed: defaultdict[str, float] = defaultdict(float)
    moving: defaultdict[str, float] = defaultdict(float)
    host = seconds.host.step if on_cpu else 0.0
    for (kind, sizes, axis), number in work.items():
        if axis:
            op: Op = kind  # type: ignore[assignment]
            nbytes, ranks, sent = sizes
            cost = seconds.transfer(Collective(op, axis, nbytes, ranks, sent=sent))
            host += number * cost.host
            fixed[axis] += number * cost.fixed
            moving[axis] += number * cost.moving
            continue
        price_of: dict[str, Callable[..., float]] = {
            PRODUCTS: lambda m, k, n, parts, is_wgrad, sent: seconds.products(
                m, k, n, dtype, parts=parts, is_wgrad=bool(is_wgrad), sent=bool(sent)
            ),
            ATTENTION: lambda flops, nbytes: seconds.attention(flops, nbytes, dtype),
            "fused": seconds.fused,
            "plain": seconds.kernel,
        }
        spent[kind] += number * (price_of[kind](*sizes) - own)
        host += number * own
    return WorkSeconds(spent[PRODUCTS], spent[ATTENTION], spent["fused"], spent["plain"], host, fixed, moving)


# --- a trace

Interval = tuple[float, float]
"""Begin and end, in any unit of time."""

LAUNCH = tuple(f"fourfold::{op}[" for op in get_args(Op))
"""Prefixes of the spans of launches; the spans of waits and products have others."""
STEP = "step "
"""The prefix of the spans of steps."""
MESSAGE_KERNELS = ("nccl",)
ATTENTION_KERNELS = ("flash", "fmha", "sdpa", "attention", "attn")
PRODUCT_KERNELS = ("gemm", "cutlass", "nvjet", "cublas", "xmma", "gemv", "splitk", "triton_tem")
"""Parts of the names of kernels, in lower case. A kernel is of the first kind that fits: CUTLASS also makes
attention."""
GENERATED, TEMPLATES = "triton_", "triton_tem_"
"""Prefixes of kernels that torch.compile generates. Their names list all operators around them, attention too, but only
those made from templates compute products or attention."""
PRODUCT_OPERATORS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv", "aten::dot")
ATTENTION_OPERATORS = ("aten::scaled_dot_product_", "aten::_scaled_dot_product_", "aten::_efficient_attention_")
"""Names of products, and prefixes of attention, among the operators of the CPU. What they call belongs to them."""
OPERATOR = "aten::"
"""The prefix of operators that compute. What else a trace names is the host's: autograd, spans, optimizers."""
KINDS = PRODUCTS, ATTENTION, KERNELS
"""The kinds of computation, in the order of the fields of `TracedParts` and `StepParts`."""
LEAST_KEPT = 0.5
"""The least share of traced seconds that counts, however much tracing seems to have lengthened them."""


class TraceEvent(NamedTuple):
    """A span of a trace: an operator, an annotation or a call of the runtime on the host; a kernel on the device."""

    name: str
    start: float
    end: float
    """Both in seconds."""
    thread: int = 0
    on_device: bool = False
    correlation: int = -1
    """The number that a kernel shares with the call that launched it."""


@dataclass(frozen=True, slots=True)
class TracedParts:
    """What one rank measured in its traced steps, in seconds per step."""

    pipe: int
    """The pipe coordinate of the rank: ranks of other stages have other work."""
    products: float
    attention: float
    kernels: float
    link: dict[str, float] = field(default_factory=dict)
    """Seconds of messages under way; an axis whose messages cannot be told from waiting is missing."""
    exposed: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds of a traced step."""
    spans: dict[str, float] = field(default_factory=dict)
    """On the CPU the number of spans of each kind in a step, and of the host's under "": each took time to write."""


def new_profiler(*, on_gpu: bool) -> torch.profiler.profile:
    """Return a profiler that traces what the host and its device do, and writes nothing to stderr meanwhile."""
    os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
    gpu = [ProfilerActivity.CUDA] if on_gpu else []
    return torch.profiler.profile(activities=[ProfilerActivity.CPU, *gpu])


QUIET = "6"
"""The log level at which torch's profiler does not write to stderr when it starts and stops."""


def events_of(profiler: torch.profiler.profile) -> list[TraceEvent]:
    """Return the spans of a profile that was stopped, without writing it to a file first."""
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    found = []
    for event in results.events():
        on_device = event.device_type() != torch.profiler.DeviceType.CPU
        if on_device and event.is_user_annotation():
            continue  # a copy of an annotation of the host, drawn over the kernels that it launched
        start = event.start_ns() / 1e9
        end = start + event.duration_ns() / 1e9
        found.append(TraceEvent(event.name(), start, end, event.start_thread_id(), on_device, event.correlation_id()))
    return found


# --- a GPU


def device_parts(events: Sequence[TraceEvent]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the seconds of kernels by kind and those of messages by axis, of all steps in a trace of a GPU.

    Messages between pipe ranks are left out: their kernels also wait for the other rank to come.
    """
    steps = HostSpans(((one.start, one.end), one.name) for one in events if one.name.startswith(STEP))
    launches = HostSpans(((one.start, one.end), one.name) for one in events if one.name.startswith(LAUNCH))
    # only calls of the runtime: operators of the host have numbers of their own, which may be the same
    calls = {one.correlation: one.start for one in events if not one.on_device and one.name.startswith("cu")}
    spent = dict.fromkeys(KINDS, 0.0)
    link: defaultdict[str, float] = defaultdict(float)
    for one in events:
        moment = calls.get(one.correlation) if one.on_device else None
        if moment is None or not steps.at(moment):
            continue
        name, seconds = one.name.lower(), one.end - one.start
        if any(part in name for part in MESSAGE_KERNELS):
            axis = axis_of(launches.at(moment))
            if axis and axis != PIPE:
                link[axis] += seconds  # each lane has a stream of its own, so no two of its kernels overlap
        else:
            spent[kernel_kind(name)] += seconds
    return spent, dict(link)


def kernel_kind(name: str) -> str:
    """Return what a kernel that sends no message is, from its name in lower case."""
    if name.startswith(GENERATED) and not name.startswith(TEMPLATES):
        return KERNELS
    if any(part in name for part in ATTENTION_KERNELS):
        return ATTENTION
    return PRODUCTS if any(part in name for part in PRODUCT_KERNELS) else KERNELS


def axis_of(launch: str) -> str:
    """Return the axis in the name of a launch: `z` of `fourfold::all_gather[z] layers.0.mlp.up`; empty if none."""
    return launch.partition("[")[2].partition("]")[0]


class HostSpans:
    """Named, non-overlapping intervals of host time.

    They may come from several threads: autograd's thread launches collectives while the main thread waits for it.
    """

    def __init__(self, named: Iterable[tuple[Interval, str]]) -> None:
        self._named = sorted(named)

    def at(self, moment: float) -> str:
        """Return the name of the interval that contains this moment; empty if none does."""
        place = bisect_right(self._named, moment, key=lambda named: named[0][0]) - 1
        if place < 0:
            return ""
        (_, end), name = self._named[place]
        return name if moment <= end else ""


def covered(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


# --- the CPU


def host_parts(events: Sequence[TraceEvent]) -> tuple[dict[str, float], Counter[str]]:
    """Return the seconds of operators and the number of spans by kind, of all steps in a trace of the CPU."""
    steps = HostSpans(((one.start, one.end), one.name) for one in events if one.name.startswith(STEP))
    spent = dict.fromkeys((*KINDS, ""), 0.0)
    spans: Counter[str] = Counter()
    open_by_thread: defaultdict[int, list[tuple[float, str]]] = defaultdict(list)
    for one in sorted(events, key=lambda one: (one.start, -one.end)):  # a caller comes before what it calls
        callers = open_by_thread[one.thread]
        while callers and callers[-1][0] <= one.start:
            callers.pop()
        caller = callers[-1][1] if callers else ""
        kind = caller if caller in (PRODUCTS, ATTENTION) else operator_kind(one.name)
        callers.append((one.end, kind))
        if steps.at(one.start):
            spans[kind] += 1
            spent[kind] += one.end - one.start
            spent[caller] -= one.end - one.start  # its own seconds are those without what it calls
    return {kind: spent[kind] for kind in KINDS}, spans


def operator_kind(name: str) -> str:
    """Return what an operator of the CPU is; empty if it is the host's own work."""
    if name in PRODUCT_OPERATORS:
        return PRODUCTS
    if name.startswith(ATTENTION_OPERATORS):
        return ATTENTION
    return KERNELS if name.startswith(OPERATOR) else ""


def flight_seconds(flights: Iterable[Flight], two_lanes: Sequence[str]) -> dict[str, float]:
    """Return the seconds for which messages of each axis were under way.

    Messages of one lane take turns, so one that was launched behind another begins when that one has arrived. Those
    between pipe ranks are left out, as on a GPU.
    """
    by_lane: defaultdict[tuple[str, str], list[Interval]] = defaultdict(list)
    for record, began, ended in flights:
        if record.axis != PIPE:
            by_lane[record.axis, lane_of(record, two_lanes)].append((began, ended))
    found: defaultdict[str, float] = defaultdict(float)
    for (axis, _), intervals in by_lane.items():
        found[axis] += covered(intervals)
    return dict(found)


# --- all ranks


def combine(ranks: Sequence[TracedParts], seconds: float, pipe: int) -> StepParts | None:
    """Return the parts of a step that takes these seconds when it is not traced; None if no rank has measured any.

    `pipe` is the coordinate of the ranks that count, those whose stage the planner takes to be the busiest. Kernels are
    averaged over them. Of messages the least counts: on all other ranks they also waited for this one.
    """
    found = [one for one in ranks if one.pipe == pipe and one.products + one.attention + one.kernels > 0]
    if not found:
        return None
    kinds: defaultdict[str, list[float]] = defaultdict(list)
    for one in found:
        # tracing makes a step of the CPU longer, by as much for every span that it writes
        each = max(0.0, one.seconds - seconds) / sum(one.spans.values()) if one.spans else 0.0
        spent = {kind: getattr(one, kind) for kind in KINDS}
        spent = {kind: max(LEAST_KEPT * took, took - each * one.spans.get(kind, 0)) for kind, took in spent.items()}
        for kind, took in spent.items():
            kinds[kind].append(took)
        kinds[HOST_PART].append(max(0.0, seconds - sum(one.exposed.values()) - sum(spent.values())))

    def by_axis(parts: Sequence[Mapping[str, float]], choose: Any) -> dict[str, float]:
        known = [axis for axis in AXES if all(axis in part for part in parts)]
        return {axis: choose([part[axis] for part in parts]) for axis in known}

    link = by_axis([one.link for one in found], min)
    exposed = by_axis([one.exposed for one in found], fmean)
    return StepParts(seconds, **{kind: fmean(each) for kind, each in kinds.items()}, link=link, exposed=exposed)
