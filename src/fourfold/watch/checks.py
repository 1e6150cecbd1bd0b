"""Checks whether ranks are fit for a long run, from what each rank measured before it. Pure functions.

Each rank describes itself, its device, its node and its disk (`Rank`), two neighbours along an axis measure the link
between them (`MeasuredLink`), and the planner says what the run needs (`Needs`). `judge` turns that into checks:

    ok        nothing stands against the run
    warning   the run would work, but slower than it could or with less to spare than it should have
    FAILED    the run would not begin, not save, or not end
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from stat import S_IWOTH
from statistics import median
from typing import Literal

from fourfold.job import ranks_text

State = Literal["ok", "warning", "FAILED"]

SLOW_DEVICE = 0.85
"""A device is slow when its products run at less than this share of the median rate."""
SLOW_LINK = 0.5
"""A link is slow below this share of the median rate of its class: inside a node, or between nodes."""
CLOCK_SECONDS = 1.0
"""Seconds by which the clocks of nodes may differ: beyond that, logs and tapes of several nodes do not line up."""
LITTLE_DISK = 0.1
"""The share of the bytes of checkpoints that should stay free beside them."""
MAY_DIFFER = ("python", "driver")
"""Versions that may differ between nodes without stopping a run."""


@dataclass(frozen=True, slots=True)
class Check:
    """A finding, and what to do about it."""

    name: str
    state: State
    evidence: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Disk:
    """The run's folder as a rank finds it."""

    seen: bool
    """Whether the rank sees the file that rank 0 has written there."""
    fault: str = ""
    """Why the rank cannot write there itself; empty if it can."""
    mode: int = 0o755
    free: int = 0
    nbytes: int = 0
    """Bytes that the rank wrote there."""
    seconds: float = 0.0
    """Seconds that this took, while all ranks wrote at once."""


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank as it describes itself."""

    rank: int
    host: str
    node: str
    """The host, with the number of the launcher's node."""
    versions: Mapping[str, str]
    device: str
    """torch's name of the GPU, or `cpu`."""
    uuid: str = ""
    """The identity of the GPU; empty on the CPU."""
    cores: int = 1
    """Cores that the ranks of its node share."""
    flops: float | None = None
    """FLOP/s of a product while all ranks compute one."""
    free: int | None = None
    """Free bytes of its GPU's memory, or of its node's."""
    clock: tuple[float, float] | None = None
    """For a node's first rank: seconds by which its clock is ahead of rank 0's, and the uncertainty of that."""
    disk: Disk | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    """Why it could not measure something, by what that is."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The link between two neighbours along an axis; or a whole group that could not open its connections."""

    axis: str
    ranks: tuple[int, ...]
    rate: float | None
    """Bytes per second in each direction, both at once; None if there was no answer in time."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory and disk that the run needs."""

    peak: int | None = None
    """The peak bytes of a rank's tensors, as the planner predicts."""
    reserve: int = 0
    """Bytes that a device must have beside them."""
    unknown: str = ""
    """Why the planner predicts nothing."""
    folder: str | None = None
    saves: bool = False
    checkpoint: int = 0
    """Bytes of one checkpoint; 0 if that is not known."""
    kept: int = 0
    """The largest number of checkpoints at once, including the one that is being written."""
    there: int = 0
    """Bytes of the checkpoints that exist already."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that was measured."""

    world: int
    ranks: Mapping[int, Rank]
    """The ranks that have answered."""
    links: Sequence[MeasuredLink]
    needs: Needs
    unlinked: str = ""
    """Why links were not measured although they should have been."""

    @property
    def nodes(self) -> dict[str, list[Rank]]:
        found: defaultdict[str, list[Rank]] = defaultdict(list)
        for rank in sorted(self.ranks):
            found[self.ranks[rank].node].append(self.ranks[rank])
        return dict(found)

    @property
    def on_gpu(self) -> bool:
        return any(rank.uuid for rank in self.ranks.values())


def judge(facts: Facts) -> list[Check]:
    """Return the checks, part by part: the findings against the run, or one `ok` where there are none."""
    parts = (check_ranks, check_versions, check_devices, check_speed, check_memory, check_clocks, check_links)
    found = [list(part(facts)) for part in (*parts, check_disk, check_space)]
    return [one for checks in found for one in [check for check in checks if check.state != "ok"] or checks]


def lines(checks: Sequence[Check]) -> Iterator[str]:
    """Yield the lines of a table for people, with advice below each finding."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        yield f"{check.state:<7}  {check.name:<{width}}  {check.evidence}"
        if check.advice:
            yield f"{'':<7}  {'':<{width}}  -> {check.advice}"


def check_ranks(facts: Facts) -> Iterator[Check]:
    missing = [rank for rank in range(facts.world) if rank not in facts.ranks]
    if missing:
        evidence = f"{ranks_text(missing)} of {facts.world} did not answer in time"
        yield Check("ranks", "FAILED", evidence, "look at what they wrote last, and at whether their nodes are up")
    for rank in facts.ranks.values():
        for part, why in rank.faults.items():
            yield Check("ranks", "FAILED", f"{rank}: {part}: {why}", "mend that, then look again")
    yield Check("ranks", "ok", f"{_many(facts.world, 'rank')} on {_many(len(facts.nodes), 'node')}")


def check_versions(facts: Facts) -> Iterator[Check]:
    """Name the ranks with another version than most ranks."""
    ranks, usual = list(facts.ranks.values()), {}
    for name in dict.fromkeys(name for rank in ranks for name in rank.versions):
        has = {rank.rank: rank.versions.get(name, "none") for rank in ranks}
        usual[name] = Counter(has.values()).most_common(1)[0][0]
        others: defaultdict[str, list[int]] = defaultdict(list)
        for rank, version in has.items():
            if version != usual[name]:
                others[version].append(rank)
        for version, unlike in others.items():
            evidence = f"{name} is {version} on {_named(unlike, facts)}, and {usual[name]} on most"
            state: State = "warning" if name in MAY_DIFFER else "FAILED"
            yield Check("versions", state, evidence, f"install the same {name} on every node")
    yield Check("versions", "ok", ", ".join(f"{name} {version}" for name, version in usual.items()))


def check_devices(facts: Facts) -> Iterator[Check]:
    by_uuid: defaultdict[str, list[int]] = defaultdict(list)
    for rank in facts.ranks.values():
        if rank.uuid:
            by_uuid[rank.uuid].append(rank.rank)
    kinds = Counter(rank.device for rank in facts.ranks.values())
    found = ", ".join(f"{count} x {device}" for device, count in kinds.items())
    for uuid, ranks in by_uuid.items():
        if len(ranks) > 1:
            evidence = f"{_named(ranks, facts)} share the GPU {uuid}"
            yield Check("devices", "FAILED", evidence, "start no more ranks on a node than it has GPUs")
    if len(kinds) > 1:
        yield Check("devices", "warning", f"of several kinds: {found}", "all wait for the slowest; take one kind")
    for node, ranks in facts.nodes.items():
        if not facts.on_gpu and len(ranks) > ranks[0].cores:
            evidence = f"{len(ranks)} ranks share {_many(ranks[0].cores, 'core')} of {node}"
            yield Check("devices", "warning", evidence, "start no more ranks on a node than it has cores")
    yield Check("devices", "ok", found + (", a rank on each" if facts.on_gpu else ""))


def check_speed(facts: Facts) -> Iterator[Check]:
    rates = {rank.rank: rank.flops for rank in facts.ranks.values() if rank.flops is not None}
    if not rates:
        return
    usual = median(rates.values())
    for rank in [rank for rank, rate in rates.items() if rate < SLOW_DEVICE * usual]:
        evidence = f"a product runs at {_flops(rates[rank])} on {facts.ranks[rank]}, at {_flops(usual)} on most"
        look = "its clock, heat and power (nvidia-smi -q -d PERFORMANCE)" if facts.on_gpu else "the cores that it has"
        yield Check("speed", "warning", evidence, f"look at who else uses it, and at {look}; or leave its node out")
    yield Check("speed", "ok", f"a product runs at {_span(list(rates.values()), _flops)}")


def check_memory(facts: Facts) -> Iterator[Check]:
    """Compare each GPU's free memory with what a rank needs, on the CPU each node's with what all its ranks need."""
    needs = facts.needs
    places = [
        (str(rank) if facts.on_gpu else node, rank.free, 1 if facts.on_gpu else len(ranks))
        for node, ranks in facts.nodes.items()
        for rank in (ranks if facts.on_gpu else ranks[:1])
        if rank.free is not None
    ]
    if not places:
        return
    least = min(free for _, free, _ in places)
    if needs.peak is None:
        free = f"{size(least)} free at the least"
        if needs.unknown:
            evidence = f"{free}; the planner cannot say what the run needs: {needs.unknown}"
            yield Check("memory", "warning", evidence, "give the planner a machine that it knows: plan.machine")
        yield Check("memory", "ok", f"{free}; give CONFIG.toml, to weigh it against what the run needs")
        return
    less = "policy.recompute=block, policy.loss_chunk, more batch.micro_steps or a larger z need less"
    for place, free, ranks in places:
        peak, spare = needs.peak * ranks, needs.reserve * ranks
        by = "" if ranks == 1 else f" for {ranks} ranks"
        evidence = f"{place} has {size(free)} free, and the planner predicts a peak of {size(peak)}{by}"
        if free < peak:
            yield Check("memory", "FAILED", evidence, f"end what else runs there; {less}")
        elif free < peak + spare:
            wanted = f"{evidence}; contexts, communicators and fragments want {size(spare)} more"
            yield Check("memory", "warning", wanted, f"end what else runs there; {less}")
    yield Check("memory", "ok", f"{size(least)} free at the least, a rank's predicted peak is {size(needs.peak)}")


def check_clocks(facts: Facts) -> Iterator[Check]:
    """Compare the clock of each node's first rank with that of rank 0."""
    others = [ranks[0] for ranks in facts.nodes.values() if ranks[0].rank != 0]
    if not others:
        yield Check("clocks", "ok", "one node, one clock")
        return
    advice = "let the nodes keep time (chrony or ntpd), or their logs and tapes do not line up"
    for rank in others:
        if rank.clock is None:
            yield Check("clocks", "warning", f"the clock of {rank.host} is not known: no answer in time", advice)
        elif abs(rank.clock[0]) > CLOCK_SECONDS:
            offset, within = rank.clock
            where = f"{abs(offset):.3f} s {'ahead of' if offset > 0 else 'behind'} that of rank 0"
            yield Check("clocks", "warning", f"the clock of {rank.host} is {where} (+- {1e3 * within:.1f} ms)", advice)
    most, within = max((rank.clock for rank in others if rank.clock), key=lambda clock: abs(clock[0]), default=(0, 0))
    yield Check("clocks", "ok", f"at most {1e3 * abs(most):.1f} ms (+- {1e3 * within:.1f} ms) from that of rank 0")


def check_links(facts: Facts) -> Iterator[Check]:
    """Compare each link with the others of its class: inside a node, or between nodes."""
    if facts.unlinked:
        yield Check("links", "FAILED", f"not measured: {facts.unlinked}", "mend that, then look again")
        return
    by_class: defaultdict[bool, list[float]] = defaultdict(list)
    for link in facts.links:
        if link.rate is not None:
            by_class[_inside(link, facts)].append(link.rate)
    usual = {inside: median(rates) for inside, rates in by_class.items()}
    for link in facts.links:
        inside = _inside(link, facts)
        what = f"{link.axis}: {_named(link.ranks, facts)}"
        if link.rate is None:
            advice = "look at the network between them: firewall, interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
            yield Check("links", "FAILED", f"{what} do not reach each other in time", advice)
        elif link.rate < SLOW_LINK * usual[inside]:
            peers = f"other links {'inside a node' if inside else 'between nodes'} {_rate(usual[inside])}"
            yield Check(
                "links",
                "warning",
                f"{what} exchange {_rate(link.rate)}, {peers}",
                "look at their cards and cables, or leave one of the nodes out",
            )
    yield Check("links", "ok", _all_links(facts) or "one rank, no links")


def _all_links(facts: Facts) -> str:
    """Sum up all links: `x: 4 inside a node, 1.1 to 1.3 GB/s; z: ...`."""
    by_axis: defaultdict[tuple[str, bool], list[float]] = defaultdict(list)
    for link in facts.links:
        by_axis[link.axis, _inside(link, facts)].append(link.rate or 0.0)
    return "; ".join(
        f"{axis}: {len(rates)} {'inside a node' if inside else 'between nodes'}, {_span(rates, _rate)}"
        for (axis, inside), rates in by_axis.items()
    )


def check_disk(facts: Facts) -> Iterator[Check]:
    """Check that every rank can write to the run's folder."""
    folder, disks = facts.needs.folder, {rank.rank: rank.disk for rank in facts.ranks.values() if rank.disk}
    if folder is None:
        yield Check("disk", "ok", "not looked at: no --out, and no config that names train.out")
        return
    by_fault: defaultdict[str, list[int]] = defaultdict(list)
    for rank, disk in disks.items():
        if disk.fault:
            by_fault[disk.fault].append(rank)
    for fault, ranks in by_fault.items():
        evidence = f"{_named(ranks, facts)} cannot write to {folder}: {fault}"
        yield Check("disk", "FAILED", evidence, "give another --out, or make that folder writable for whoever trains")
    apart = [rank for rank, disk in disks.items() if not disk.seen and not disk.fault]
    if apart:
        evidence = f"{_named(apart, facts)} do not see in {folder} what rank 0 has written there"
        state: State = "FAILED" if facts.needs.saves else "warning"
        yield Check("disk", state, evidence, "give --out on a file system that all nodes share")
    if any(disk.mode & S_IWOTH for disk in disks.values() if disk.seen):
        evidence = f"everybody may write to {folder}"
        yield Check("disk", "warning", evidence, f"whoever does could change what is trained; chmod o-w {folder}")
    yield Check("disk", "ok", f"every rank writes to {folder}")


def check_space(facts: Facts) -> Iterator[Check]:
    """Check that there is room for the checkpoints, and estimate how long writing one takes."""
    needs = facts.needs
    disks = [rank.disk for rank in facts.ranks.values() if rank.disk and rank.disk.seen and not rank.disk.fault]
    if not disks:
        return
    free, rate = min(disk.free for disk in disks), sum(disk.nbytes / disk.seconds for disk in disks if disk.seconds)
    slowest = max(disks, key=lambda disk: disk.seconds)
    written = f"{size(free)} free; a rank writes {size(slowest.nbytes)} in {slowest.seconds:.2g} s at the most"
    if not needs.saves or not needs.checkpoint:
        yield Check("space", "ok", written)
        return
    if rate:
        written += f", a checkpoint in about {needs.checkpoint / rate:.3g} s"
    total = needs.checkpoint * needs.kept
    wanted = f"{_many(needs.kept, 'checkpoint')} of {size(needs.checkpoint)} at once need {size(total)}"
    wanted += f", {size(needs.there)} of it there already" if needs.there else ""
    short = max(0, total - needs.there)
    advice = "make room, or keep fewer: checkpoint.keep_last, checkpoint.keep_every"
    if free < short:
        yield Check("space", "FAILED", f"{written}; {wanted}", advice)
    elif free < (1 + LITTLE_DISK) * short:
        yield Check("space", "warning", f"{written}; {wanted}", advice)
    else:
        yield Check("space", "ok", f"{written}; {wanted}")


def most_kept(steps: int, every: int, keep_last: int, keep_every: int) -> int:
    """Return how many checkpoints exist at once while the last one of a run is being written, including that one."""
    before = -(-steps // every) - 1 if every else 0
    last = min(keep_last, before)
    for_good = every * (before - last) // lcm(every, keep_every) if every and keep_every else 0
    return for_good + last + 1


def size(nbytes: float) -> str:
    """Format bytes of memory and files, in the units of plans and reports."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _rate(rate: float) -> str:
    """Format the rate of a link, in the units of data sheets."""
    return f"{rate / 1e9:.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.1f} MB/s"


def _flops(rate: float) -> str:
    return f"{rate / 1e12:.3g} TFLOP/s"


def _span(rates: Sequence[float], text: Callable[[float], str]) -> str:
    low, high = text(min(rates)), text(max(rates))
    return low if low == high else f"{low} to {high}"


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _named(ranks: Sequence[int], facts: Facts) -> str:
    """Name ranks with their hosts: `ranks 0, 3 (one, two)`."""
    hosts = dict.fromkeys(facts.ranks[rank].host for rank in ranks if rank in facts.ranks)
    return f"{ranks_text(ranks)} ({', '.join(list(hosts)[:4])}{', ...' if len(hosts) > 4 else ''})"


def _inside(link: MeasuredLink, facts: Facts) -> bool:
    return len({facts.ranks[rank].node for rank in link.ranks if rank in facts.ranks}) <= 1
