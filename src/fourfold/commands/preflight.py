"""`fourfold doctor --preflight`: measures, on the ranks of a future run, what `watch.checks` judges.

Ranks exchange their facts through a channel, and every wait for another rank, a device, a link or a disk has a
deadline: whatever may hang runs on a thread that is left behind. Only the links need process groups. Rank 0 gathers all
facts, judges and prints them, and is the rank that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist

from fourfold import comm
from fourfold.checkpoint.load import CHECKPOINTS
from fourfold.commands.local_ranks import chosen_device, default_folder, grid_options, require_world, wanted_ranks
from fourfold.commands.probe import Budget, FolderMark, bytes_of, free_bytes, look_at, myself, product_flops, within
from fourfold.environment import Environment, inside_a_job
from fourfold.errors import LateRanksError, LostStoreError
from fourfold.grid import Grid, Shape
from fourfold.job import Channel, find_store, ranks_text
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.launch import launch, share_cores
from fourfold.train.planning import Hardware, memory_bytes, predict, resolve
from fourfold.train.progress import output
from fourfold.train.run_folder import strict
from fourfold.watch.checks import Check, Disk, Facts, MeasuredLink, Needs, Rank, judge, lines, most_kept

T = TypeVar("T")

SECONDS = 55.0
"""The preflight as a whole takes no longer than this, so that a user waits less than a minute."""
JOIN_SECONDS, MEET_SECONDS = 25.0, 7.0
"""Limits for ranks to find each other and make process groups, and for a rank to wait for others that measure."""
PRODUCT_SECONDS, DISK_SECONDS, PLAN_SECONDS, CLOCK_SECONDS = 10.0, 10.0, 10.0, 5.0
"""Limits for one part each."""
TRIPS = 8
"""How often a rank asks rank 0 for its time; the fastest answer counts."""
LINK_SECONDS, LINK_WINDOW = 6.0, 0.4
"""The limit for two ranks to answer each other, and for how long they exchange messages."""
MESSAGE = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Bytes of a message that times a link."""
JOINING = "joining the job"
OPENED = float("inf")
"""Stands for a rate where a group has opened its connections and nothing was timed."""
STATES = 3
"""A checkpoint has the parameters, and AdamW's two moments of them in the same dtype."""


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The run that the preflight is for."""

    config: TrainConfig | None
    """The resolved config; None where only the machine is looked at."""
    shape: Shape
    folder: str | None


def preflight(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check this job, or local ranks that it launches; return the exit code."""
    device = chosen_device(options.device)
    if inside_a_job():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Python handler could not run while the rank waits for others
        return _preflight(options, device)
    ranks = wanted_ranks(requested(options), options.ranks, device)
    if ranks == 1:
        return _preflight(options, device)
    plan = planned(options, ranks, device)
    grid = grid_options(plan.shape)
    decided = ["--ranks", str(ranks), "--device", device, *(grid if plan.config else grid[:2])]
    return launch(ranks, [*arguments, *decided], sys.stderr)


def requested(options: argparse.Namespace) -> TrainConfig:
    """Return the config with the changes of the command line; the defaults where no config is given."""
    if options.path is None and options.changes:
        raise ValueError(f"--set {options.changes[0][0]} changes a config; give CONFIG.toml with it")
    changes = [*options.changes, *((f"grid.{axis}", size) for axis, size in (options.grid or {}).items())]
    if options.out is not None:
        changes.append(("train.out", options.out))
    return read_config(options.path, changes, forget_grid=options.grid is not None)


def planned(options: argparse.Namespace, ranks: int, device: str) -> PlannedRun:
    """Return the planned run for this number of ranks; without a config all ranks are along data."""
    config = requested(options)
    if options.path is None:
        return PlannedRun(None, Shape(data=ranks) if config.grid.auto else config.grid.shape, options.out)
    config = resolve(config, ranks, on_gpu=device == "cuda", memory_bytes=memory_bytes(device))
    return PlannedRun(config, config.grid.shape, config.train.out or default_folder(config))


def _preflight(options: argparse.Namespace, device: str) -> int:
    """Run the preflight as one rank of the job."""
    began = time.monotonic()
    job = Environment.read()
    world = job.world
    require_world(options.ranks, world)
    plan = planned(options, world, device)
    if plan.shape.world != world:
        raise ValueError(f"the grid {plan.shape} has {plan.shape.world} ranks, but this job has {world}; change one")
    here = torch.device("cuda", job.local_rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")
    budget = Budget(SECONDS)
    channel = Channel("preflight", range(world), find_store(job, JOIN_SECONDS), rank=job.rank)
    look = Preflight(channel, budget, plan, here, first_of_node=job.local_rank == 0)
    facts = look.facts()
    failed = []
    if facts is not None:
        checks = judge(facts)
        failed = list(dict.fromkeys(check.name for check in checks if check.state == "FAILED"))
        show(checks, facts, options.json, time.monotonic() - began)
    look.meet()  # the store may be in rank 0
    if failed:
        raise ValueError(f"not fit for a long run: {', '.join(failed)} FAILED; the advice is printed beside each check")
    if inside_a_job():
        sys.stdout.flush()
        os._exit(0)  # an orderly exit would wait for a rank or a device that hangs
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def show(checks: Sequence[Check], facts: Facts, json_to: str | None, seconds: float) -> None:
    stream = output(json_to)
    for line in lines(checks):
        print(line, file=stream)
    found = Counter(check.state for check in checks)
    said = ", ".join(f"{count} {state}" for state, count in found.items())
    print(f"\n{len(checks)} checks in {seconds:.0f} s: {said}", file=stream, flush=True)
    if json_to is not None:
        table = {"checks": [asdict(check) for check in checks], **asdict(facts), "seconds": seconds}
        text = json.dumps(strict(table | {"ranks": list(table["ranks"].values())}), indent=1)
        if json_to == "-":
            print(text, flush=True)
        else:
            Path(json_to).write_text(text + "\n")


class Preflight:
    """The measurements of one rank; all ranks make the same ones together."""

    def __init__(
        self, channel: Channel, budget: Budget, plan: PlannedRun, device: torch.device, *, first_of_node: bool
    ) -> None:
        self.channel, self.budget = channel, budget
        self.plan, self.device, self.first_of_node = plan, device, first_of_node
        self.grid: Grid | None = None
        self.faults: dict[str, str] = {}

    def facts(self) -> Facts | None:
        """Measure everything; return the facts of all ranks on rank 0."""
        channel, world = self.channel, len(self.channel.ranks)
        self.grid = self._try(JOINING, JOIN_SECONDS, self._join)
        if self.device.type == "cpu":
            share_cores()
        me = self._try("its device", MEET_SECONDS, lambda: myself(channel.rank, self.device)) or Rank(
            channel.rank, "unknown", "unknown", {}, str(self.device)
        )
        self.meet()  # ranks that share a node measure together
        flops = self._try("a product", PRODUCT_SECONDS, lambda: product_flops(self.device))
        free = self._try("free memory", MEET_SECONDS, lambda: free_bytes(self.device))
        me = replace(me, flops=flops, free=free, clock=self._clock(), disk=self._disk(), faults=self.faults)
        gathered = channel.gather("ranks", json.dumps(asdict(me)), self.budget.left(MEET_SECONDS), partial=True)
        ranks = {rank: rank_of(text) for rank, text in gathered.items()}
        needs = Needs()
        if channel.leads:
            needs = self._needs()
            channel.put("unlinked", why_unlinked(ranks, world))
        unlinked = channel.get("unlinked", seconds=self.budget.left(SECONDS))
        links: list[MeasuredLink] = []
        if not unlinked and self.grid is not None:
            found = LinkTimer(channel, self.budget, self.grid)
            links = found.measure()
            ranks = {rank: one for rank, one in ranks.items() if rank not in found.lost}
        return Facts(world, ranks, links, needs, unlinked) if channel.leads else None

    def meet(self) -> None:
        """Wait for all ranks, as long as there is time; who does not come is noticed where facts are gathered."""
        with suppress(LateRanksError, LostStoreError):  # the store may leave with its rank once all have met
            self.channel.meet(self.budget.left(MEET_SECONDS))

    def _try(self, part: str, seconds: float, act: Callable[[], T]) -> T | None:
        """Return what `act` returns; note why it failed, if it did."""
        try:
            return within(self.budget.left(seconds), act)
        except Exception as error:
            self.faults[part] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return None

    def _join(self) -> Grid:
        Grid.alone(self.device)  # joins the job
        shape = self.plan.shape
        return Grid.of_shape(shape, device=self.device)

    def _clock(self) -> tuple[float, float] | None:
        """Compare the clock of each node's first rank with rank 0's, which answers with its time several times."""
        channel, left = self.channel, self.budget.left
        firsts = channel.gather("first of node", str(int(self.first_of_node)), left(MEET_SECONDS), partial=True)
        if channel.leads:
            until = time.monotonic() + CLOCK_SECONDS
            for rank in (rank for rank, first in firsts.items() if first == "1" and rank):
                with suppress(TimeoutError):
                    for trip in range(TRIPS):
                        channel.get(f"clock/{trip}", rank, left(max(0.0, until - time.monotonic())))
                        channel.put(f"clock/{trip}/{rank}", repr(time.time()))
            return None
        return ask_clock(channel, left(MEET_SECONDS + CLOCK_SECONDS)) if self.first_of_node else None

    def _disk(self) -> Disk | None:
        """Look at the run's folder, in which rank 0 leaves a mark while all ranks look."""
        channel, mark, found = self.channel, None, None
        if self.plan.folder is None:
            return None
        if channel.leads:
            folder = Path(self.plan.folder).absolute()
            mark = self._write(lambda: FolderMark.leave(folder, f"{os.getpid()}"))
            channel.put("mark", str(mark.path) if isinstance(mark, FolderMark) else "")
        there = channel.get("mark", seconds=self.budget.left(SECONDS))
        if there:
            found = self._write(lambda: look_at(Path(there), channel.rank))
        self.meet()
        if isinstance(mark, FolderMark):
            self._write(mark.remove)
        return mark if isinstance(mark, Disk) else found

    def _write(self, act: Callable[[], T]) -> T | Disk:
        """Return what `act` returns, or the disk with its fault."""
        try:
            return within(self.budget.left(DISK_SECONDS), act)
        except OSError as error:
            return Disk(seen=False, fault=error.strerror or str(error))

    def _needs(self) -> Needs:
        """Return what the run needs, by the planner and the config."""
        config, folder = self.plan.config, self.plan.folder
        if config is None:
            return Needs(folder=folder)
        section = config.checkpoint
        there = self._write(lambda: bytes_of(Path(folder or "") / CHECKPOINTS))
        needs = Needs(
            folder=folder,
            saves=section.save,
            checkpoint=STATES * config.policy.parameters.itemsize * config.model.build().parameters,
            kept=most_kept(config.train.steps, section.every, section.keep_last, section.keep_every),
            there=there if isinstance(there, int) else 0,
        )
        on_gpu = self.device.type == "cuda"
        job = Hardware.here(len(self.channel.ranks), on_gpu=on_gpu, memory_bytes=memory_bytes(self.device.type))
        try:
            found = within(self.budget.left(PLAN_SECONDS), lambda: predict(config, job))
        except Exception as error:  # what cannot be priced can still run
            return replace(needs, unknown=" ".join(str(error).split()))
        return replace(needs, peak=found.price.memory.total, reserve=found.price.task.machine.reserve)


def rank_of(text: str) -> Rank:
    """Read a rank's facts from the text in which it sent them."""
    found = json.loads(text)
    clock, disk = found.pop("clock"), found.pop("disk")
    return Rank(**found, clock=tuple(clock) if clock else None, disk=Disk(**disk) if disk else None)


def why_unlinked(ranks: dict[int, Rank], world: int) -> str:
    """Say why links cannot be measured; return nothing where they can."""
    apart = [rank for rank in range(world) if rank not in ranks or JOINING in ranks[rank].faults]
    return f"{ranks_text(apart)} of {world} did not join the job" if apart else ""


def ask_clock(channel: Channel, seconds: float) -> tuple[float, float] | None:
    """Return by how many seconds this clock is ahead of rank 0's, by the shortest round trip, and half of that trip."""
    trips = []
    with suppress(TimeoutError):
        for trip in range(TRIPS):
            began = time.time()
            channel.put(f"clock/{trip}", "")
            theirs = float(channel.get(f"clock/{trip}/{channel.rank}", seconds=seconds))
            ended = time.time()
            trips.append((ended - began, (began + ended) / 2 - theirs))
    if not trips:
        return None
    took, ahead = min(trips)
    return ahead, took / 2


def pairs_of(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the links of a ring in rounds; in a round every place has at most one link."""
    ring = [(place, (place + 1) % ranks) for place in range(ranks if ranks > 2 else ranks - 1)]
    last = ring.pop() if ranks % 2 and ranks > 1 else None
    yield from (pairs for pairs in (ring[::2], ring[1::2], [last] if last else []) if pairs)


class LinkTimer:
    """Times the links of every axis, those of all groups at once.

    It stops at the first link that does not answer, because the ranks that wait for it cannot measure any other.
    """

    def __init__(self, channel: Channel, budget: Budget, grid: Grid) -> None:
        self.channel, self.budget, self.grid = channel, budget, grid
        self.message = torch.zeros(MESSAGE[grid.device.type] // 4, device=grid.device)
        self.broken = False
        self.lost: list[int] = []

    def measure(self) -> list[MeasuredLink]:
        """Time all links; return them on rank 0."""
        found: list[MeasuredLink] = []
        for name, mine, act in self._rounds():
            if self.broken:
                break
            found += self._round(name, mine, act)
        return [link for link in found if link.rate != OPENED]

    def _rounds(self) -> Iterator[tuple[str, MeasuredLink | None, Callable[[], float]]]:
        """Yield for each round the link of this rank, if it has one, and the function that times it."""
        for axis in self.grid.shape.used_axes:
            group, place = self.grid.shape.ranks_along(axis, self.grid.rank), self.grid.coords[axis]
            yield f"{axis}/open", MeasuredLink(axis, tuple(group), None), partial(self._open, axis)
            for number, pairs in enumerate(pairs_of(len(group))):
                pair = next((pair for pair in pairs if place in pair), None)
                other = -1 if pair is None else sum(pair) - place
                mine = None if pair is None else MeasuredLink(axis, (group[pair[0]], group[pair[1]]), None)
                leads = pair is not None and place == pair[0]
                yield f"{axis}/{number}", mine, partial(self._rate, axis, other, leads)

    def _round(self, name: str, mine: MeasuredLink | None, act: Callable[[], float]) -> list[MeasuredLink]:
        """Run a round; return the links of all ranks. A link counts as answered if both of its ends measured it."""
        own = []
        if mine is not None:
            try:
                own = [replace(mine, rate=within(self.budget.left(LINK_SECONDS), act))]
            except Exception:  # the backend's own, or no end in time
                own = [mine]
        text, left = json.dumps([asdict(link) for link in own]), self.budget.left
        texts = self.channel.gather(f"links/{name}", text, left(MEET_SECONDS), partial=True)
        found: dict[tuple[int, ...], MeasuredLink] = {}
        for one in (one for text in texts.values() for one in json.loads(text)):
            link = MeasuredLink(one["axis"], tuple(one["ranks"]), one["rate"])
            rates = [end.rate for end in (link, found.get(link.ranks, link))]
            found[link.ranks] = replace(link, rate=None if None in rates else min(rate for rate in rates if rate))
        if self.channel.leads:
            self.lost = [rank for rank in self.channel.ranks if rank not in texts]
            broken = self.lost or any(link.rate is None for link in found.values())
            self.channel.put(f"links/{name}/broken", str(int(bool(broken))))
        self.broken = self.channel.get(f"links/{name}/broken", seconds=left(SECONDS)) == "1"
        return list(found.values())

    def _open(self, axis: str) -> float:
        """Gather along the axis, which opens the connections of the group."""
        self._synchronize()
        comm.all_gather(self.message[:1], self.grid, axis, label="preflight").wait()
        self._synchronize()
        return OPENED

    def _rate(self, axis: str, other: int, leads: bool) -> float:
        """Return bytes per second in each direction; the first message waits for the other rank and does not count."""
        self._synchronize()
        until, seconds, go_on = time.monotonic() + LINK_WINDOW, [], True
        while go_on:
            self.message[0] = float(time.monotonic() < until)  # of the two ranks one decides for both
            self._synchronize()
            began = time.perf_counter()
            arrived = comm.exchange(self.message, self.grid, axis, other)
            self._synchronize()
            seconds.append(time.perf_counter() - began)
            go_on = bool((self.message if leads else arrived)[0])
        return self.message.nbytes / median(seconds[1:] or seconds)

    def _synchronize(self) -> None:
        if self.grid.device.type == "cuda":
            torch.cuda.set_device(self.grid.device)  # threads have their own
            torch.cuda.synchronize(self.grid.device)
