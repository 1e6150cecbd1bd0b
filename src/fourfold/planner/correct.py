"""Correction: change the constants of a machine so that it predicts what a real step has measured.

A step has parts: products, attention, other kernels, the host, and the messages of each axis. `parts_of` reads them
from a price, and a run measures the same ones. `correct` compares both, and changes a constant for each part that is
off:

    products    gemm, and the times of measured products
    attention   attention
    kernels     traffic, which multiplies the bytes of fused kernels; memory_bandwidth where traffic would be below 1
    host        host.<mode>: seconds per item and per step, by the same factor
    an axis     the link that its messages take, inside a node or between nodes: its bandwidth, or its latency if the
                messages are too small to show the bandwidth

Parts influence each other: kernels are slower beside messages, messages wait for their turn beside kernels, and a host
that is late hides behind both. So the constants are changed and the step is priced again until the parts agree.

Invariant: a corrected machine obeys the rules of machine files, and every constant that changed names what was
measured, what was predicted, and its value before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from fourfold.axes import AXES
from fourfold.grid import Shape
from fourfold.planner.machine import (
    HOST,
    LINK,
    HostMode,
    HostSpeed,
    KernelMode,
    LinkSpeed,
    Machine,
    inside_link,
    link_constants,
    spread_of,
    with_slower_products,
)
from fourfold.planner.price import Candidate, PipePrice, Price, Task, price, shorter_models
from fourfold.planner.search import search
from fourfold.planner.space import CHOSEN_FIELDS, Space
from fourfold.planner.step_parts import (
    ATTENTION,
    HOST_PART,
    KERNELS,
    PRODUCTS,
    StepParts,
    StepWork,
    WorkSeconds,
    pieces,
    work_seconds,
)
from fourfold.planner.step_program import optimizer_program, part_of, recompute_of, stage_program, step_program
from fourfold.policy import Policy

LEAST_SHARE = 0.02
"""A part with a smaller share of the step is not corrected: its error hardly changes the step, and may be noise."""
TOLERANCE = 0.05
"""A part that is off by a smaller share of its prediction is not corrected: steps of one run differ as much."""
HOST_TOLERANCE = 0.03
"""The host is not corrected if it is off by a smaller share of the step: it is what the other parts leave."""
FASTER = 0.05
"""Another plan is worth telling if it takes this share less time; less is within the planner's error."""
PRICED_PLANS = 3
"""The best plans of a search that are priced with the whole policy of a run."""
ROUNDS = 12
"""Rounds of changing constants and pricing again, at most; usually three are enough."""
CLOSE = 0.003
"""Parts that are off by a smaller share need no further round."""
STRIDES = 0.1, 10.0
"""The least and the largest factor by which a constant changes in one round, so that no round overshoots far."""
BYTES_OF_SLOW, BYTES_OF_FAST = 0.1, 0.5
"""The least share of the messages' time that their bytes take for the bandwidth of the link to be corrected, else its
latency is. The bandwidth of a link that is too slow may be far lower than its file says; one that is too fast can save
no more than the time of the bytes."""
HOST_HALVINGS = 8
"""Steps of the bisection of the host's factor between two powers of two: its error is then below 0.4%."""
MOST_HOST = 1 << 16
"""The largest factor that is tried for the host, up or down."""
USUAL_ITEM = 1e-6
"""Seconds of the host per item from which the search begins if the machine's file has none for the mode."""
COUNTED_LAYERS = 2, 3
"""The two numbers of layers whose work is counted; a further layer adds their difference."""
CORRECTED = "corrected by "
"""How the source of a corrected constant begins; this is part of the file's format, as `UNCERTAIN_SOURCES` are."""
ABOUT = f" ({CORRECTED}"
"""Where the text about a machine begins to say what corrected it."""

# --- the parts of a step that is priced


def work_of(found: Price) -> StepWork:
    """Return the work of a step on one rank, or on the busiest pipe rank without its messages to other stages."""
    if isinstance(found, PipePrice):
        return _work_of_pipe(found)
    task, candidate = found.task, found.candidate

    def with_layers(micro_steps: int) -> StepWork:
        total: Counter[Any] = Counter()
        for config, times in shorter_models(task.config, *COUNTED_LAYERS):
            sizes = candidate.sizes(replace(task, config=config))
            for piece, many in pieces(step_program(sizes, micro_steps=micro_steps).work).items():
                total[piece] += round(times) * many
        return total

    if candidate.micro_steps == 1:
        return with_layers(1)
    return _further(with_layers(1), with_layers(2), candidate.micro_steps - 1)


def _further(first: StepWork, second: StepWork, times: int) -> StepWork:
    """Return the first work and so many times what the second has more.

    One kernel over all layers, such as the optimizer's, has another size in the second: its bytes add up all the same,
    because the smaller one is then counted a negative number of times.
    """
    return Counter({one: first[one] + times * (second[one] - first[one]) for one in first.keys() | second.keys()})


def _work_of_pipe(found: PipePrice) -> StepWork:
    task, candidate, stages = found.task, found.candidate, found.stages
    split = not any(action.kind == "BW" for action in found.played.schedule.orders[0])
    rank = max(range(stages.pipe), key=lambda each: found.played.work[each])
    sizes = candidate.without_stages.sizes(task)
    work: StepWork = Counter()
    for stage in stages.of_rank(rank):
        again = recompute_of(stages, stage, candidate.policy)
        program = stage_program(sizes, part_of(stages, stage), again, split=split, passes=1)
        for one, number in pieces(program.work).items():
            work[one] += number * candidate.micro_steps
    work.update(pieces(optimizer_program(candidate.sizes(task, pipe_rank=rank)).work))
    return work


def _alone(found: Price, work: StepWork) -> WorkSeconds:
    """Return the seconds of a step's work on the machine of its price."""
    return work_seconds(found.task.seconds_on(found.candidate), found.task.dtype, work)


def parts_of(found: Price, work: StepWork | None = None) -> StepParts:
    """Return the predicted parts of a step; `work` is that of the price, if it was counted before."""
    totals, alone = found.totals, _alone(found, work_of(found) if work is None else work)
    on_cpu = found.task.machine.device == "cpu"
    computing = alone.products + alone.attention + alone.fused + alone.plain + (alone.host if on_cpu else 0.0)
    # the simulation knows how much slower computation is beside messages, and spreads that over all of it alike
    slower = totals.compute / computing if computing else 1.0
    axes = found.candidate.shape.message_axes
    return StepParts(
        totals.seconds,
        slower * alone.products,
        slower * alone.attention,
        slower * (alone.fused + alone.plain),
        slower * alone.host if on_cpu else totals.host,
        {axis: totals.link.get(axis, 0.0) for axis in axes},
        {axis: totals.exposed.get(axis, 0.0) for axis in axes},
    )


# --- the correction


@dataclass(frozen=True, slots=True)
class Change:
    """A constant of the machine that a measurement has changed."""

    part: str
    key: str
    was: float | None
    """None if the file had no such constant."""
    now: float


@dataclass(frozen=True, slots=True)
class Correction:
    """A corrected machine, and the step by which it was corrected."""

    machine: Machine
    changes: tuple[Change, ...]
    predicted: StepParts
    measured: StepParts
    corrected: StepParts
    """The parts that the corrected machine predicts."""


def is_off(predicted: float, measured: float, step: float) -> bool:
    """Return whether a part is large enough, and its prediction wrong enough, to correct the machine."""
    return predicted > 0 and max(predicted, measured) >= LEAST_SHARE * step and _error(predicted, measured) > TOLERANCE


def _error(predicted: float, measured: float) -> float:
    """Return by which factor two numbers differ, less one; the same for too slow and for too fast."""
    least, most = sorted((predicted, measured))
    return most / least - 1 if least > 0 else float(most > 0)


def correct(found: Price, measured: StepParts, source: str) -> Correction:
    """Return the machine of a price with those constants changed that a measured step shows to be wrong.

    `source` says where the measurement comes from, such as "a run on x=2, 2026-11-18"; every changed constant names it.
    """
    return _Corrector(found, measured, source).run()


class _Corrector:
    """Changes one machine round by round."""

    def __init__(self, found: Price, measured: StepParts, source: str) -> None:
        self.task, self.candidate, self.measured, self.source = found.task, found.candidate, measured, source
        self.before = found.task.machine
        self.work = work_of(found)
        self.predicted = parts_of(found, self.work)
        self.mode: HostMode = found.task.host_mode(found.candidate.policy, found.candidate.shape)
        self.kernel_mode: KernelMode = "compiled" if found.candidate.policy.compile else "eager"
        self.dtype = found.task.dtype
        self.shape = found.candidate.shape
        step = measured.seconds
        both = {
            name: (getattr(self.predicted, name), getattr(measured, name)) for name in (PRODUCTS, ATTENTION, KERNELS)
        }
        self.off = {name for name, pair in both.items() if is_off(*pair, step)}
        self.judged_attention = measured.attention >= LEAST_SHARE * step
        axes = [axis for axis in measured.link if axis in self.predicted.link]
        self.off_axes = [axis for axis in axes if is_off(self.predicted.link[axis], measured.link[axis], step)]
        self.host_off = abs(self.predicted.host - measured.host) > HOST_TOLERANCE * step
        self._tried = 0

    def run(self) -> Correction:
        machine = self.before
        for _ in range(2 if self.host_off else 1):  # the host may hide what the other parts take, and they the host
            machine = self._device(machine)
            if self.host_off:
                machine = self._host(machine)
        # a run on few ranks of a node may have links that a file of such nodes cannot have
        most = machine.devices_per_node
        machine = replace(machine, inside={of: link for of, link in machine.inside.items() if of[0] * of[1] <= most})
        changes = self._changes(machine)
        about = self.before.about.partition(ABOUT)[0]  # of an earlier correction
        machine = replace(
            machine,
            name=self.before.name,
            about=f"{about}{ABOUT}{self.source})" if changes else self.before.about,
            sources=self._sources(machine, changes),
        )
        corrected = parts_of(self._price(machine), self.work)
        return Correction(machine, tuple(changes), self.predicted, self.measured, corrected)

    def _price(self, machine: Machine) -> Price:
        return price(replace(self.task, machine=machine), self.candidate)

    def _renamed(self, machine: Machine, **changes: Any) -> Machine:
        """Return a machine with these changes and a name of its own: prices are cached by the name."""
        self._tried += 1
        return replace(machine, name=f"{self.before.name}, correction {self._tried}", **changes)

    def _device(self, machine: Machine) -> Machine:
        """Return the machine with products, attention, kernels and links as measured."""
        for _ in range(ROUNDS):
            found = self._price(machine)
            now, alone = parts_of(found, self.work), _alone(found, self.work)
            pairs = [(getattr(now, name), getattr(self.measured, name)) for name in self.off]
            pairs += [(now.link[axis], self.measured.link[axis]) for axis in self.off_axes]
            if all(_error(*pair) < CLOSE for pair in pairs):
                break
            kept = machine
            if KERNELS in self.off:
                machine = self._kernels(machine, now.kernels, alone)
            if PRODUCTS in self.off:
                machine = self._products(machine, _stride(self.measured.products / now.products))
            if ATTENTION in self.off:
                share = machine.attention / _stride(self.measured.attention / now.attention)
                machine = self._renamed(machine, attention=min(1.0, share))
            machine = self._links(machine, now, alone)
            if replace(machine, name=kept.name) == kept:
                break  # every constant is as far as the rules of machine files let it go
        return machine

    def _products(self, machine: Machine, ratio: float) -> Machine:
        slower = with_slower_products(machine, self.dtype, ratio)
        if not self.judged_attention:
            slower = replace(slower, attention=machine.attention)
        return self._renamed(slower)

    def _kernels(self, machine: Machine, now: float, alone: WorkSeconds) -> Machine:
        kernels, traffic = alone.fused + alone.plain, machine.traffic.get(self.kernel_mode, 1.0)
        missing = (self.measured.kernels - now) * kernels / now  # of kernels that run alone
        if alone.fused > 0:
            wanted = max(1.0, traffic * _stride(1 + missing / alone.fused))
            if wanted != traffic:
                return self._renamed(machine, traffic={**machine.traffic, self.kernel_mode: wanted})
        bandwidth = machine.memory_bandwidth / _stride(self.measured.kernels / now)
        return self._renamed(machine, memory_bandwidth=bandwidth)

    def _links(self, machine: Machine, now: StepParts, alone: WorkSeconds) -> Machine:
        """Change the links of the axes that are off; axes that share a link are judged together."""
        sharing: defaultdict[str, list[str]] = defaultdict(list)
        for axis in self.measured.link:
            if axis in now.link:
                sharing[_key(link_of(machine, self.shape, axis))].append(axis)
        for axes in sharing.values():
            if not set(axes) & set(self.off_axes):
                continue
            place = link_of(machine, self.shape, axes[0])
            speed = _speed(machine, place)
            seconds = sum(now.link[axis] for axis in axes)
            ratio = sum(self.measured.link[axis] for axis in axes) / seconds
            fixed, moving = (sum(of.get(axis, 0.0) for axis in axes) for of in (alone.fixed, alone.moving))
            # of a pipeline's sums over data nothing is counted: those are large, so bytes take their time
            counted = fixed + moving >= 0.5 * seconds
            by_bytes = moving / (fixed + moving) if counted else 1.0
            if by_bytes >= (BYTES_OF_SLOW if ratio > 1 else BYTES_OF_FAST) or not speed.latency:
                # the latency stays, so the bytes take all of the difference
                factor = 1 / _stride(1 + (ratio - 1) / by_bytes)
                # a step does not tell a ring's limit from that of the network cards: both change alike
                speed = speed.scaled(factor)
            else:
                speed = replace(speed, latency=speed.latency * _stride(1 + (ratio - 1) / (1 - by_bytes)))
            if place is None:
                machine = self._renamed(machine, between=speed)
            else:
                machine = self._renamed(machine, inside={**machine.inside, place: speed})
        return machine

    def _host(self, machine: Machine) -> Machine:
        """Return the machine whose host is late for as long as measured."""
        base = machine.host.get(self.mode)
        if base is None or base == HostSpeed(0.0, 0.0):
            base = HostSpeed(machine.overhead or USUAL_ITEM if machine.device == "cpu" else USUAL_ITEM, 0.0)
        # a host that is never late may still be nearly late: take the slowest one that fits
        target = max(self.measured.host, CLOSE * self.measured.seconds)

        def with_factor(factor: float) -> Machine:
            speed = HostSpeed(base.item * factor, base.step * factor)
            return self._renamed(machine, host={**machine.host, self.mode: speed})

        def is_quick(factor: float) -> bool:
            return parts_of(self._price(with_factor(factor)), self.work).host < target

        low = high = 1.0
        while is_quick(high) and high < MOST_HOST:
            low, high = high, 2 * high
        while low == high and low > 1 / MOST_HOST:  # already too slow, so the factor is below 1
            low, high = (low / 2, low) if is_quick(low / 2) else (low / 2, low / 2)
        for _ in range(HOST_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if is_quick(middle) else (low, middle)
        return with_factor(low)

    # --- what changed

    def _changes(self, machine: Machine) -> list[Change]:
        was, now = constants(self.before), constants(machine)
        for place in machine.inside.keys() - self.before.inside.keys():  # before, such messages took the nearest link
            was |= {f"{_key(place)}.{name}": getattr(inside_link(self.before, *place), name) for name in LINK}
        changed = [key for key in now if was.get(key, 0.0) != now[key]]  # a new constant of 0 changes nothing
        return [Change(self._part(key), key, was.get(key), now[key]) for key in changed]

    def _part(self, key: str) -> str:
        """Return the part whose measurement changed a constant."""
        first = key.partition(".")[0]
        if first in ("gemm", "measured"):
            return PRODUCTS
        if first == ATTENTION:
            return ATTENTION if ATTENTION in self.off else PRODUCTS
        if first in ("traffic", "memory_bandwidth"):
            return KERNELS
        if first == "host":
            return HOST_PART
        axes = [axis for axis in self.measured.link if axis in self.predicted.link]
        return " and ".join(axis for axis in axes if first in map(_key, links_of(self.before, self.shape, axis)))

    def _sources(self, machine: Machine, changes: Iterable[Change]) -> dict[str, str]:
        sources = {**self.before.sources}
        for stride, size in machine.inside.keys() - self.before.inside.keys():
            like = next(of for of, link in self.before.inside.items() if link is inside_link(self.before, stride, size))
            for name in LINK:
                sources[f"{_key((stride, size))}.{name}"] = f"as {_key(like)}: {sources[f'{_key(like)}.{name}']}"
        for change in changes:
            was = "" if change.was is None else f", was {change.was:.4g}"
            sources[change.key] = f"{CORRECTED}{self.source}: {self._seconds_text(change.part)}{was}"
        if machine.measured != self.before.measured:
            text = self._seconds_text(PRODUCTS)
            sources["measured"] = f"{sources['measured']}; times of {self.dtype} corrected by {self.source}: {text}"
        gone = {f"{_key(place)}.{name}" for place in self.before.inside.keys() - machine.inside.keys() for name in LINK}
        sources = {key: text for key, text in sources.items() if key not in gone}
        for key in (key for key in constants(machine).keys() - sources.keys() if key.startswith("host.")):
            sources[key] = f"{CORRECTED}{self.source}: a step tells the host's time per item and per step not apart"
        for key in constants(machine).keys() - sources.keys():  # a run fills in what a file lacks, such as a dtype
            sources[key] = "estimate: filled in for the run by which this file was corrected"
        return sources

    def _seconds_text(self, part: str) -> str:
        if part in (PRODUCTS, ATTENTION, KERNELS, HOST_PART):
            measured, predicted = getattr(self.measured, part), getattr(self.predicted, part)
            return f"{part} measured {measured:.4g} s a step, predicted {predicted:.4g} s"
        axes = part.split(" and ")
        measured, predicted = (sum(of.link[axis] for axis in axes) for of in (self.measured, self.predicted))
        return f"messages over {part} measured {measured:.4g} s a step, predicted {predicted:.4g} s"


def _stride(factor: float) -> float:
    """Return a factor within what one round may change."""
    least, most = STRIDES
    return min(most, max(least, factor))


def is_corrected(machine: Machine) -> bool:
    """Return whether a run has corrected a constant of the machine."""
    return any(source.startswith(CORRECTED) for source in machine.sources.values())


def constants(machine: Machine) -> dict[str, float]:
    """Return the constants that a correction may change, and those of links, by the keys of their sources."""
    found = {"attention": machine.attention, "memory_bandwidth": machine.memory_bandwidth}
    found |= {f"peak.{dtype}": rate for dtype, rate in machine.peak.items()}
    found |= {f"gemm.{dtype}": rate for dtype, rate in machine.gemm.items()}
    found |= {f"traffic.{mode}": factor for mode, factor in machine.traffic.items()}
    for mode, speed in machine.host.items():
        found |= {f"host.{mode}.{name}": getattr(speed, name) for name in HOST}
    links: dict[str, LinkSpeed] = {_key(group): link for group, link in machine.inside.items()}
    if machine.between is not None:
        links[_key(None)] = machine.between
    for path, link in links.items():
        found |= {f"{path}.{name}": value for name, value in link_constants(link).items()}
    return found


Place = tuple[int, int] | None
"""A link of a machine: the (stride, size) of a group inside a node, or None for the link between nodes."""


def links_of(machine: Machine, shape: Shape, axis: str) -> list[Place]:
    """Return the links that the messages of an axis take, the one that limits them first."""
    stride, size = shape.strides(axis)[-1]
    spread = spread_of(stride, size, shape.world, machine.devices_per_node)
    if not spread.rings or machine.between is None:
        return [(stride, size)]
    if size == spread.nodes:
        return [None]
    # some hops are inside nodes, and the slowest hop limits all
    inner = inside_link(machine, stride, spread.members)
    places: list[Place] = [None, (stride, spread.members)]
    return places if machine.between.per_ring(spread.rings) <= inner.bandwidth else places[::-1]


def link_of(machine: Machine, shape: Shape, axis: str) -> Place:
    """Return the link that limits the messages of an axis."""
    return links_of(machine, shape, axis)[0]


def _speed(machine: Machine, place: Place) -> LinkSpeed:
    if place is not None:
        return inside_link(machine, *place)
    if machine.between is None:
        raise ValueError(f"{machine.name} has no link between nodes")
    return machine.between


def _key(place: Place) -> str:
    return "between" if place is None else f"inside[{place[0]},{place[1]}]"


# --- another plan


def faster_plan(task: Task, candidate: Candidate) -> tuple[Price, Price | None]:
    """Return the price of a candidate, and the fastest plan for the same ranks if it takes 5% less time.

    The search is that of `fourfold plan`. What it does not choose stays as the candidate has it, so that the two differ
    in nothing but the plan.
    """
    own, policy = price(task, candidate), candidate.policy
    devices = candidate.shape.world
    if devices == 1:
        return own, None
    try:
        found = search(replace(task, machine=_searched(task, policy)), devices, space=Space(axes=AXES)).ranked
    except ValueError:  # nothing fits by the planner's estimate, yet the run runs
        return own, None
    prices = []
    for one in found[:PRICED_PLANS]:
        chosen = {name: getattr(one.candidate.policy, name) for name in (*CHOSEN_FIELDS, "stages", "schedule")}
        with suppress(ValueError):  # the rest of the policy may not fit the plan
            prices.append(price(task, replace(one.candidate, policy=replace(policy, **chosen))))
    best = min(prices, key=lambda each: each.seconds, default=own)
    return own, best if best.seconds <= (1 - FASTER) * own.seconds else None


def _searched(task: Task, policy: Policy) -> Machine:
    """Return the machine to search with: the search prices policies that do not compile, so eager work takes what the
    work of this policy takes."""
    machine, mode = task.machine, task.host_mode(policy)
    factor = machine.traffic.get("compiled" if policy.compile else "eager", 1.0)
    host = dict(machine.host)
    if mode in host:
        host["eager"] = host[mode]
    return replace(machine, name=f"{machine.name}, searched", traffic={"eager": factor}, host=host)
