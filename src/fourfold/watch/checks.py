"""Checks whether ranks are fit for a long run, from measurements that each rank made before it. Pure functions.

Each rank describes itself, its device, its node and its disk (`Rank`), two neighbours along an axis measure the link
between them (`MeasuredLink`), and the planner predicts the memory and disk of the run (`Needs`). `judge` turns these
into checks:

    ok        nothing speaks against the run
    warning   the run would work, but slower than it could, or with little memory or disk to spare
    FAILED    the run would not start, not save, or not end
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from stat import S_IWOTH
from statistics import median
from typing import Literal, TypeVar

from fourfold.job import ranks_text
from fourfold.report.units import count, nbytes

K = TypeVar("K")
V = TypeVar("V")

State = Literal["ok", "warning", "FAILED"]

SLOW_DEVICE = 0.85
"""A device is slow when its products run at less than this share of the median rate. Healthy GPUs of one kind differ by
a few percent; a device that is throttled or shared loses more."""
SLOW_LINK = 0.5
"""A link is slow below this share of the median rate of its class, inside a node or between nodes. Healthy links
vary with the traffic beside them, so only a rate far below the usual one is suspicious."""
CLOCK_SECONDS = 1.0
"""Seconds by which the clocks of nodes may differ; with more, logs and tapes of several nodes do not line up."""
LITTLE_DISK = 0.1
"""The share of the bytes of checkpoints that should stay free beside them, for logs and other users of the disk."""
MAY_DIFFER = ("python", "driver")
"""Versions that may differ between nodes without stopping a run."""
WHERE = {True: "inside a node", False: "between nodes"}
"""The two classes of links, by whether all ranks of a link are on one node."""


@dataclass(frozen=True, slots=True)
class Check:
    """A finding about the job, and the advice that goes with it."""

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
    """Seconds that the write took, while all ranks wrote at once."""


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
    """Measurements that failed on this rank, and why: `{"a product": "no memory"}`."""

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """The link between two neighbours along an axis, or a whole group that could not open its connections."""

    axis: str
    ranks: tuple[int, ...]
    rate: float | None
    """Bytes per second in each direction, both at once; None if there was no answer in time."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory and disk that the run needs."""

    peak: int | None = None
    """The peak bytes of a rank's tensors that the planner predicts; None if it predicts nothing."""
    reserve: int = 0
    """Bytes that a device must have besides its tensors: context, communicators, fragments."""
    unknown: str = ""
    """Why the planner predicts nothing."""
    folder: str | None = None
    saves: bool = False
    checkpoint: int = 0
    """Bytes of one checkpoint; 0 if the size is not known."""
    kept: int = 0
    """The largest number of checkpoints at once, including the one that is being written."""
    there: int = 0
    """Bytes of the checkpoints that exist already."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All measurements of a job, and what its run needs."""

    world: int
    ranks: Mapping[int, Rank]
    """The ranks that have answered."""
    links: Sequence[MeasuredLink]
    needs: Needs
    unlinked: str = ""
    """Why links were not measured although they should have been."""

    @property
    def nodes(self) -> dict[str, list[Rank]]:
        return grouped((self.ranks[rank].node, self.ranks[rank]) for rank in sorted(self.ranks))

    @property
    def on_gpu(self) -> bool:
        return any(rank.uuid for rank in self.ranks.values())


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, in the order in which they come."""
    found: defaultdict[K, list[V]] = defaultdict(list)
    for key, value in pairs:
        found[key].append(value)
    return dict(found)


def judge(facts: Facts) -> list[Check]:
    """Return the checks, part by part: the findings against the run, or one `ok` if there are none.

    Each part yields its `ok` last, whatever it found before; here an `ok` beside other findings is left out.
    """
    parts = (check_ranks, check_versions, check_devices, check_speed, check_memory, check_clocks, check_links)
    found = [list(part(facts)) for part in (*parts, check_disk, check_space)]
    return [one for checks in found for one in [check for check in checks if check.state != "ok"] or checks]


def lines(checks: Sequence[Check]) -> Iterator[str]:
    """Yield the lines of a table to print, with advice below each finding."""
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
            yield Check("ranks", "FAILED", f"{rank}: {part}: {why}", "fix this, then run the preflight again")
    yield Check("ranks", "ok", f"{_many(facts.world, 'rank')} on {_many(len(facts.nodes), 'node')}")


def check_versions(facts: Facts) -> Iterator[Check]:
    """Name the ranks with another version than most ranks."""
    ranks, usual = list(facts.ranks.values()), {}
    for name in dict.fromkeys(name for rank in ranks for name in rank.versions):
        has = {rank.rank: rank.versions.get(name, "none") for rank in ranks}
        usual[name] = Counter(has.values()).most_common(1)[0][0]
        for version, unlike in grouped((version, rank) for rank, version in has.items()).items():
            if version == usual[name]:
                continue
            evidence = f"{name} is {version} on {_named(unlike, facts)}, and {usual[name]} on most"
            state: State = "warning" if name in MAY_DIFFER else "FAILED"
            yield Check("versions", state, evidence, f"install the same {name} on every node")
    yield Check("versions", "ok", ", ".join(f"{name} {version}" for name, version in usual.items()))


def check_devices(facts: Facts) -> Iterator[Check]:
    kinds = Counter(rank.device for rank in facts.ranks.values())
    found = ", ".join(f"{number} x {device}" for device, number in kinds.items())
    for uuid, ranks in grouped((rank.uuid, rank.rank) for rank in facts.ranks.values()).items():
        if uuid and len(ranks) > 1:
            evidence = f"{_named(ranks, facts)} share the GPU {uuid}"
            yield Check("devices", "FAILED", evidence, "start no more ranks on a node than it has GPUs")
    if len(kinds) > 1:
        yield Check("devices", "warning", f"of several kinds: {found}", "all ranks wait for the slowest; use one kind")
    for node, ranks in facts.nodes.items():
        if not facts.on_gpu and len(ranks) > ranks[0].cores:
            evidence = f"{len(ranks)} ranks share {_many(ranks[0].cores, 'core')} of {node}"
            yield Check("devices", "warning", evidence, "start no more ranks on a node than it has cores")
    yield Check("devices", "ok", found + (", a rank on each" if facts.on_gpu else ""))


def check_speed(facts: Facts) -> Iterator[Check]:
    rates = {rank.rank: rank.flops for rank in facts.ranks.values() if rank.flops is not None}
    if not rates:
        return
    usual = median(rates.values())  # the median, because one slow or fast device must not move it
    for rank in [rank for rank, rate in rates.items() if rate < SLOW_DEVICE * usual]:
        own, others = f"{count(rates[rank])}FLOP/s", f"{count(usual)}FLOP/s"
        evidence = f"a product runs at {own} on {facts.ranks[rank]}, at {others} on most"
        look = "its clock, heat and power (nvidia-smi -q -d PERFORMANCE)" if facts.on_gpu else "the cores that it has"
        yield Check("speed", "warning", evidence, f"look at who else uses it, and at {look}, or leave its node out")
    yield Check("speed", "ok", f"a product runs at {_span(rates.values(), 'FLOP/s')}")


def check_memory(facts: Facts) -> Iterator[Check]:
    """Compare the free memory of each GPU with the needs of a rank; on CPUs, of each node with all of its ranks."""
    needs = facts.needs
    # Ranks on GPUs have a memory each; on CPUs the ranks of a node share one, and its first rank has measured it.
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
        free = f"at least {nbytes(least)} free"
        if needs.unknown:
            evidence = f"{free}; the planner cannot predict what the run needs: {needs.unknown}"
            yield Check("memory", "warning", evidence, "give the planner a machine that it knows: plan.machine")
        yield Check("memory", "ok", f"{free}; give CONFIG.toml to compare it with what the run needs")
        return
    advice = "end other processes there, or take less: more batch.micro_steps, a larger z, or what fourfold plan finds"
    for place, free, ranks in places:
        peak, spare = needs.peak * ranks, needs.reserve * ranks
        by = "" if ranks == 1 else f" for {ranks} ranks"
        evidence = f"{place} has {nbytes(free)} free, and the planner predicts a peak of {nbytes(peak)}{by}"
        if free < peak:
            yield Check("memory", "FAILED", evidence, advice)
        elif free < peak + spare:
            wanted = f"{evidence}; contexts, communicators and fragments want {nbytes(spare)} more"
            yield Check("memory", "warning", wanted, advice)
    yield Check("memory", "ok", f"at least {nbytes(least)} free, a rank's predicted peak is {nbytes(needs.peak)}")


def check_clocks(facts: Facts) -> Iterator[Check]:
    """Compare the clock of each node's first rank with that of rank 0."""
    others = [ranks[0] for ranks in facts.nodes.values() if ranks[0].rank != 0]
    if not others:
        yield Check("clocks", "ok", "one node, one clock")
        return
    advice = "let the nodes keep time with chrony or ntpd, so that their logs and tapes line up"
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
        yield Check("links", "FAILED", f"not measured: {facts.unlinked}", "fix this, then run the preflight again")
        return
    timed = grouped((_inside(link, facts), link.rate) for link in facts.links if link.rate is not None)
    usual = {inside: median(rates) for inside, rates in timed.items()}
    for link in facts.links:
        inside = _inside(link, facts)
        what = f"{link.axis}: {_named(link.ranks, facts)}"
        if link.rate is None:
            advice = "look at the network between them: firewall, interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)"
            yield Check("links", "FAILED", f"{what} do not reach each other in time", advice)
        elif link.rate < SLOW_LINK * usual[inside]:
            peers = f"other links {WHERE[inside]} {count(usual[inside])}B/s"
            advice = "look at their cards and cables, or leave one of the nodes out"
            yield Check("links", "warning", f"{what} exchange {count(link.rate)}B/s, {peers}", advice)
    rates_of = grouped(((link.axis, _inside(link, facts)), link.rate or 0.0) for link in facts.links)
    all_links = "; ".join(
        f"{axis}: {len(rates)} {WHERE[inside]}, {_span(rates, 'B/s')}" for (axis, inside), rates in rates_of.items()
    )
    yield Check("links", "ok", all_links or "one rank, no links")


def check_disk(facts: Facts) -> Iterator[Check]:
    """Check that every rank can write to the run's folder."""
    folder, disks = facts.needs.folder, {rank.rank: rank.disk for rank in facts.ranks.values() if rank.disk}
    if folder is None:
        yield Check("disk", "ok", "not checked: no --out, and no config that names train.out")
        return
    for fault, ranks in grouped((disk.fault, rank) for rank, disk in disks.items() if disk.fault).items():
        evidence = f"{_named(ranks, facts)} cannot write to {folder}: {fault}"
        yield Check("disk", "FAILED", evidence, "give another --out, or make that folder writable for this user")
    apart = [rank for rank, disk in disks.items() if not disk.seen and not disk.fault]
    if apart:
        evidence = f"{_named(apart, facts)} do not see the file that rank 0 has written to {folder}"
        state: State = "FAILED" if facts.needs.saves else "warning"
        yield Check("disk", state, evidence, "give --out on a file system that all nodes share")
    if any(disk.mode & S_IWOTH for disk in disks.values() if disk.seen):
        evidence = f"everybody may write to {folder}"
        yield Check("disk", "warning", evidence, f"another user could change the run; chmod o-w {folder}")
    yield Check("disk", "ok", f"every rank writes to {folder}")


def check_space(facts: Facts) -> Iterator[Check]:
    """Check that there is room for the checkpoints, and estimate how long writing one takes."""
    needs = facts.needs
    disks = [rank.disk for rank in facts.ranks.values() if rank.disk and rank.disk.seen and not rank.disk.fault]
    if not disks:
        return
    # All ranks wrote at once, so the sum of their rates is the rate at which a whole checkpoint is written.
    free, rate = min(disk.free for disk in disks), sum(disk.nbytes / disk.seconds for disk in disks if disk.seconds)
    slowest = max(disks, key=lambda disk: disk.seconds)
    written = f"{nbytes(free)} free; a rank writes {nbytes(slowest.nbytes)} in at most {slowest.seconds:.2g} s"
    if not needs.saves or not needs.checkpoint:
        yield Check("space", "ok", written)
        return
    if rate:
        written += f", a checkpoint in about {needs.checkpoint / rate:.3g} s"
    # The largest number at once counts: a new checkpoint is complete before an old one is removed.
    total = needs.checkpoint * needs.kept
    wanted = f"{_many(needs.kept, 'checkpoint')} of {nbytes(needs.checkpoint)} at once need {nbytes(total)}"
    wanted += f", {nbytes(needs.there)} of it there already" if needs.there else ""
    short = max(0, total - needs.there)
    advice = "make room, or keep fewer: checkpoint.keep_last, checkpoint.keep_every"
    state: State = "FAILED" if free < short else "warning" if free < (1 + LITTLE_DISK) * short else "ok"
    yield Check("space", state, f"{written}; {wanted}", "" if state == "ok" else advice)


def most_kept(steps: int, every: int, keep_last: int, keep_every: int, *, by_time: bool = False) -> int:
    """Return how many checkpoints exist at once while the last one of a run is being written, including that one.

    With `by_time` checkpoints are also saved by the clock, so there may be one of any step.
    """
    before = -(-steps // every) - 1 if every else 0  # the last step is saved too, whether `every` divides it or not
    last = min(keep_last, steps - 1 if by_time else before)
    for_good = every * max(0, before - last) // lcm(every, keep_every) if every and keep_every else 0
    return for_good + last + 1


def _span(rates: Collection[float], unit: str) -> str:
    """Format the range of rates: `1.1 GB/s to 1.3 GB/s`, or one rate if all look the same."""
    return " to ".join(dict.fromkeys(f"{count(rate)}{unit}" for rate in (min(rates), max(rates))))


def _many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _named(ranks: Sequence[int], facts: Facts) -> str:
    """Name ranks with their hosts: `ranks 0, 3 (one, two)`."""
    hosts = dict.fromkeys(facts.ranks[rank].host for rank in ranks if rank in facts.ranks)
    return f"{ranks_text(ranks)} ({', '.join(list(hosts)[:4])}{', ...' if len(hosts) > 4 else ''})"


def _inside(link: MeasuredLink, facts: Facts) -> bool:
    return len({facts.ranks[rank].node for rank in link.ranks if rank in facts.ranks}) <= 1
