"""A choice that holds when the machine is not as its file says: the least regret in the worst case, and a band.

A machine file says where each constant comes from, and so how far it may be off. `scenarios` moves them that far, one
kind at a time and all at once: what was measured by 10%, what was published or estimated by more. In each scenario
every candidate is priced again; its regret is how much longer it takes than the best candidate there. A candidate that
is fastest by the file but hides nearly all of its messages behind computation has a large regret where links are
slower. `choose` takes the candidate whose largest regret is the least; among those that are hardly worse, the simplest.

`helps` prices the choice with more of one thing at a time: network, batch, memory, fewer devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Literal, NamedTuple

import torch

from fourfold.axes import BATCH
from fourfold.planner.estimate import Lever
from fourfold.planner.machine import LinkSpeed, Machine
from fourfold.planner.price import Candidate, Price, Task, memory_of, price
from fourfold.shape import Shape

Risk = Literal["robust", "fastest"]
"""How a plan is chosen: by its largest regret, or by its seconds with the machine as its file says."""
MEASURED = ("measured", "corrected")
"""The first words of a source that says that this machine was measured."""
MEASURED_OFF = 1.1
"""The factor by which a measured constant may be off."""
BANDWIDTH_OFF, COMPUTING_OFF, HOST_OFF = 2.0, 1.4, 2.0
"""The factors by which a published or estimated one may be: bandwidths, rates of computation, times of the host."""
LESS_MEMORY = 3 << 30
"""Bytes that a device may have less than its file says: contexts, fragmentation and libraries differ."""
PRICED_AGAIN = 16
"""The candidates that are priced in every scenario, beside the best of each kind."""
FASTEST = 4
"""The fastest candidates by the file, which are priced in every scenario whether they leave memory free or not."""
ABOUT_AS_GOOD = 0.03
"""Candidates whose regret and seconds are within this are about as good; the simplest of them is chosen."""


class Scenario(NamedTuple):
    """A machine as it may be."""

    name: str
    machine: Machine
    less_memory: int = 0
    """Bytes that are missing."""


def scenarios(machine: Machine) -> list[Scenario]:
    """Return the machine as its file says, with each kind of constants worse, and with all of them worse."""
    network, computing, host = _slower_network(machine), _slower_computing(machine), _slower_host(machine)
    everything = _slower_host(_slower_computing(network))
    found = [
        Scenario("as the machine file says", machine),
        Scenario("slower network", network),
        Scenario("slower computing", computing),
        Scenario("slower host", host),
        Scenario("all of them slower", everything),
        Scenario("3 GiB less memory", machine, LESS_MEMORY),
    ]
    return [found[0], *(one for one in found[1:] if one.machine is not machine or one.less_memory)]


def off_by(source: str, otherwise: float) -> float:
    """Return the factor by which a constant with this source may be off."""
    return MEASURED_OFF if source.startswith(MEASURED) else otherwise


def _named(machine: Machine, what: str, **changes: object) -> Machine:
    return replace(machine, name=f"{machine.name}, {what}", **changes)  # type: ignore[arg-type]


def _slower_network(machine: Machine) -> Machine:
    def slower(path: str, link: LinkSpeed) -> LinkSpeed:
        source = machine.sources.get(f"{path}.bandwidth", "")
        return link.scaled(1 / off_by(source, BANDWIDTH_OFF))

    if not machine.inside and machine.between is None:
        return machine
    inside = {group: slower(f"inside[{group[0]},{group[1]}]", link) for group, link in machine.inside.items()}
    between = machine.between and slower("between", machine.between)
    return _named(machine, "slower network", inside=inside, between=between)


def _slower_computing(machine: Machine) -> Machine:
    def factor(key: str) -> float:
        return off_by(machine.sources.get(key, ""), COMPUTING_OFF)

    gemm = {dtype: rate / factor(f"gemm.{dtype}") for dtype, rate in machine.gemm.items()}
    products = tuple(replace(one, seconds=one.seconds * factor("measured")) for one in machine.measured)
    bandwidth = machine.memory_bandwidth / factor("memory_bandwidth")
    return _named(machine, "slower computing", gemm=gemm, measured=products, memory_bandwidth=bandwidth)


def _slower_host(machine: Machine) -> Machine:
    if not machine.host:
        return machine
    host = {
        mode: replace(
            speed,
            item=speed.item * off_by(machine.sources.get(f"host.{mode}.item", ""), HOST_OFF),
            step=speed.step * off_by(machine.sources.get(f"host.{mode}.step", ""), HOST_OFF),
        )
        for mode, speed in machine.host.items()
    }
    link = machine.host_bandwidth
    if link is not None:
        link /= off_by(machine.sources.get("host_bandwidth", ""), BANDWIDTH_OFF)
    return _named(machine, "slower host", host=host, host_bandwidth=link)


# --- the choice


@dataclass(frozen=True)
class Regrets:
    """A candidate in every scenario."""

    price: Price
    seconds: tuple[float, ...]
    """By scenario; inf where it does not fit."""
    regrets: tuple[float, ...]
    """How much longer it takes than the best candidate of each scenario, as a share."""

    @property
    def worst(self) -> float:
        return max(self.regrets)


@dataclass(frozen=True)
class RobustChoice:
    """What was chosen, and what it was chosen from."""

    chosen: Regrets
    fastest: Regrets
    """The candidate that is fastest by the machine file."""
    scenarios: tuple[Scenario, ...]
    compared: tuple[Regrets, ...]
    """All candidates that were priced in every scenario."""

    @property
    def priced(self) -> int:
        """The number of candidates that were priced in every scenario."""
        return len(self.compared)

    @property
    def band(self) -> tuple[float, float]:
        """The seconds of the choice at best and at worst; no better than the file where that was not measured."""
        machine = self.scenarios[0].machine
        main = machine.sources.get(f"gemm.{self.chosen.price.task.dtype}", "")
        known = self.chosen.seconds[0]
        fits = [seconds for seconds in self.chosen.seconds if seconds < inf]
        return (known / MEASURED_OFF if main.startswith(MEASURED) else known), max(fits)

    @property
    def worst_scenario(self) -> str:
        """The scenario in which the choice has its largest regret."""
        return self.worst_of(self.chosen)

    def worst_of(self, one: Regrets) -> str:
        """Return the scenario in which a candidate has its largest regret."""
        return self.scenarios[one.regrets.index(one.worst)].name


def choose(
    priced: Sequence[Price],
    limit: int,
    price_again: Callable[[Task, Candidate], Price],
    closely: Callable[[Price], Price] = lambda one: one,
) -> RobustChoice:
    """Choose among candidates of one task by their largest regret.

    `price_again` prices a candidate of another task in the same way as these were. `closely` returns the seconds to
    show. A quick price may be off by 4%, more than candidates differ, and that of a pipeline is never quick; so the
    seconds of every scenario are multiplied by what the close price is of the quick one.
    """
    task = min(priced, key=lambda one: one.seconds).task
    worlds = scenarios(task.machine)
    # one that does not fit with less memory is never chosen if another does, but says how fast others could be
    roomy = [one for one in priced if one.memory.total <= limit - LESS_MEMORY]
    fastest = sorted(priced, key=lambda one: one.seconds)[:FASTEST]
    listed = shortlist(roomy or priced)
    listed += [one for one in fastest if one not in listed]
    candidates = [closely(one) for one in listed]
    table = [
        _by_scenario(one, quick, worlds, limit, price_again) for quick, one in zip(listed, candidates, strict=True)
    ]
    regrets = _regrets(candidates, table)
    least = min(regrets, key=lambda one: (one.worst, one.price.seconds))
    near = [
        one
        for one in regrets
        if one.worst <= least.worst + ABOUT_AS_GOOD and one.price.seconds <= (1 + ABOUT_AS_GOOD) * least.price.seconds
    ]
    chosen = min(near, key=lambda one: (*complexity(one.price), one.worst, one.price.seconds))
    first = min(regrets, key=lambda one: one.price.seconds)
    return RobustChoice(chosen, first, tuple(worlds), tuple(regrets))


def compare(
    choice: RobustChoice, other: Price, limit: int, price_again: Callable[[Task, Candidate], Price]
) -> tuple[Regrets, Regrets, bool]:
    """Return another candidate and the choice in every scenario, and whether the choice was made among both.

    If it was not, the candidate is priced in every scenario now, and the regrets of both count it.
    """
    known = [one for one in choice.compared if one.price.candidate == other.candidate and one.price.task == other.task]
    if known:
        return known[0], choice.chosen, True
    quick = other if other.candidate.shape.pipe > 1 else price_again(other.task, other.candidate)
    times = _by_scenario(other, quick, choice.scenarios, limit, price_again)
    every = [*choice.compared]
    regrets = _regrets([other, *(one.price for one in every)], [times, *(one.seconds for one in every)])
    return regrets[0], regrets[1 + every.index(choice.chosen)], False


def _by_scenario(
    one: Price,
    quick: Price,
    worlds: Sequence[Scenario],
    limit: int,
    price_again: Callable[[Task, Candidate], Price],
) -> tuple[float, ...]:
    """Return the seconds of a candidate in every scenario; `quick` is its price in the way of `price_again`."""
    times = []
    for world in worlds:
        if world.less_memory:
            times.append(one.seconds if one.memory.total <= limit - world.less_memory else inf)
        elif world.machine is worlds[0].machine:
            times.append(one.seconds)
        else:
            again = price_again(replace(one.task, machine=world.machine), one.candidate).seconds
            times.append(again * one.seconds / quick.seconds)
    return tuple(times)


def _regrets(candidates: Sequence[Price], table: Sequence[tuple[float, ...]]) -> list[Regrets]:
    best = [min(times) for times in zip(*table, strict=True)]
    # where nothing fits with less memory, less memory is no reason to choose one of them
    return [
        Regrets(one, times, tuple(0.0 if low == inf else time / low - 1 for time, low in zip(times, best, strict=True)))
        for one, times in zip(candidates, table, strict=True)
    ]


def shortlist(priced: Sequence[Price]) -> list[Price]:
    """Return the fastest candidates, and the fastest of each kind: they differ in what they depend on."""
    ranked = sorted(priced, key=lambda one: one.seconds)
    found = ranked[:PRICED_AGAIN]
    seen = {_kind(one) for one in found}
    for one in ranked[PRICED_AGAIN:]:
        if (kind := _kind(one)) not in seen:
            seen.add(kind)
            found.append(one)
    return found


def _kind(one: Price) -> tuple[object, ...]:
    shape = one.candidate.shape
    return (
        Lever.of(one.candidate.policy).compute_twice,
        shape.x * shape.y > 1,
        shape.pipe > 1,
        shape.z > 1,
        shape.context > 1,
        shape.expert > 1,
        shape.ex > 1,
    )


def complexity(one: Price) -> tuple[int, bool]:
    """Return how many axes a grid has, and whether x, y and ex reach beyond a node: fewer and inside is simpler."""
    shape, prices = one.candidate.shape, one.task.seconds_on(one.candidate)
    crosses = any(prices.link(axis).crosses for axis in ("x", "y", "ex") if shape.cuts[axis] > 1)
    return len(shape.message_axes), crosses


# --- what would help


class Improvement(NamedTuple):
    """More of one thing, and what it would gain."""

    what: str
    gain: float
    """The share by which tokens per second, of each device where their number changes, would rise."""


def helps(chosen: Price, limit: int) -> list[Improvement]:
    """Return what would make the choice faster, the largest gain first."""
    found = [Improvement(what, gain) for what, gain in _helps(chosen, limit) if gain > WORTH_NAMING]
    return sorted(found, key=lambda one: -one.gain)


WORTH_NAMING = 0.02
"""The gain from which something is named."""


def _helps(chosen: Price, limit: int) -> Iterator[tuple[str, float]]:
    task, candidate = chosen.task, chosen.candidate
    machine, shape, policy = task.machine, candidate.shape, candidate.policy
    now = chosen.tokens_per_second
    if shape.world > 1:
        links = {group: link.scaled(2) for group, link in machine.inside.items()}
        between = machine.between and machine.between.scaled(2)
        faster = _named(machine, "twice the network", inside=links, between=between)
        network = price(replace(task, machine=faster), candidate).tokens_per_second
        yield "a network with twice the bandwidth", network / now - 1
    if isinstance(policy.schedule, str):  # a schedule that was found holds for its own number of micro-batches
        larger = replace(candidate, micro_steps=2 * candidate.micro_steps)
        batch = price(replace(task, rows=2 * task.rows), larger).tokens_per_second
        yield "twice the batch", batch / now - 1
    if (lever := Lever.of(policy)).compute_twice and policy.stages is None:
        kept = replace(candidate, policy=lever.lavish().on(policy))
        lacking = memory_of(task, kept).total - limit
        if 0 < lacking <= machine.memory:  # a device with twice the memory may exist, one with five times does not
            gain = price(task, kept).tokens_per_second / now - 1
            yield f"{ceil(lacking / 2**30)} GiB more memory, to compute nothing twice", gain
    if policy.reduce_dtype is None and task.parameters is torch.float32 and shape.places > 1:
        halved = replace(candidate, policy=replace(policy, reduce_dtype=torch.bfloat16))
        yield "gradients summed in bf16 (policy.reduce_dtype)", price(task, halved).tokens_per_second / now - 1
    for axis in BATCH:
        if shape.sizes[axis] % 2 == 0 and policy.stages is None and shape.context == 1 and not shape.folded:
            half = Shape(*({**shape.sizes, axis: shape.sizes[axis] // 2}).values(), order=shape.order)
            fewer = replace(candidate, shape=half, micro_steps=2 * candidate.micro_steps)
            if memory_of(task, fewer).total <= limit:
                each = 2 * price(task, fewer).tokens_per_second
                yield f"half the devices ({half}), per device", each / now - 1
                break
