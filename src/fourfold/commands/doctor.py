"""`fourfold doctor`: explains what went wrong with a run, and checks with --preflight what a future run needs.

`doctor RUN` reads the files that the ranks of a run have left behind. `doctor --preflight` measures, on the ranks of a
future run, what `watch.checks` judges. Ranks exchange their facts through a channel, and every wait for another rank, a
device, a link or a disk has a deadline: whatever may hang runs on a thread that is left behind. Only the links need
process groups. Rank 0 gathers all facts, judges and prints them, and is the rank that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from fourfold.checkpoint.load import CHECKPOINTS
from fourfold.commands.local_ranks import (
    chosen_device,
    default_folder,
    grid_options,
    let_sigint_end_ranks,
    put_json,
    require_world,
    wanted_ranks,
)
from fourfold.commands.probe import (
    MEET_SECONDS,
    TRIPS,
    Budget,
    FolderMark,
    LinkTimer,
    ask_clock,
    free_bytes,
    look_at,
    myself,
    product_flops,
    within,
)
from fourfold.environment import Environment, inside_a_job
from fourfold.errors import End, LateRanksError, LostStoreError
from fourfold.grid import Grid, Shape
from fourfold.job import Channel, find_early_store, ranks_text
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.launch import launch, share_cores
from fourfold.train.planning import Hardware, memory_bytes, predict, resolve
from fourfold.train.progress import output
from fourfold.train.run_folder import last_end
from fourfold.watch.checks import Check, Disk, Facts, MeasuredLink, Needs, Rank, judge, lines, most_kept
from fourfold.watch.diagnose import diagnose
from fourfold.watch.tape import DIAGNOSIS, EARLIER_DIAGNOSIS, TapeReading, read_all

T = TypeVar("T")

PREFLIGHT_ONLY = ("grid", "ranks", "out", "changes", "device", "json")
"""Options that only --preflight takes, by their names in the namespace."""
SECONDS = 55.0
"""Seconds that the whole preflight takes at most, so that a user waits less than a minute."""
JOIN_SECONDS = 25.0
"""Seconds that ranks have to find each other and make process groups; with NCCL this takes several on many nodes."""
PRODUCT_SECONDS, DISK_SECONDS, PLAN_SECONDS, CLOCK_SECONDS = 10.0, 10.0, 10.0, 5.0
"""Seconds that each of these parts takes at most: several times what a healthy node needs."""
JOINING = "joining the job"
STATES = 3
"""A checkpoint holds three tensors per parameter: the parameter, and AdamW's two moments in the same dtype."""


def doctor(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Explain a run, or run the preflight; return the exit code."""
    folder = options.path
    if options.preflight:
        if folder is not None and folder.is_dir():
            raise ValueError(f"--preflight {folder} is a folder; give the config of the future run, CONFIG.toml")
        return preflight(options, arguments)
    if given := [name for name in PREFLIGHT_ONLY if getattr(options, name) not in (None, [])]:
        name = "set" if given[0] == "changes" else given[0]
        raise ValueError(f"--{name} only works with --preflight; to examine a run give only its folder")
    if folder is None:
        raise ValueError("give the folder of a run, or --preflight to check what a run needs before it starts")
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(f"{folder} has no run.json; give the folder of a run of fourfold train")
    for line in explain(folder):
        print(line)
    return 0


def explain(folder: Path) -> Iterator[str]:
    """Yield the lines that explain how a run ended."""
    damaged: list[str] = []
    end, tapes = last_end(folder / "metrics.jsonl"), read_all(folder, damaged)
    yield f"{folder}: " + (f"ended at step {end['step']}: {end['reason']}" if end else "has no recorded end")
    for name, whose in ((EARLIER_DIAGNOSIS, "the ranks of an earlier start"), (DIAGNOSIS, "its ranks")):
        if (found := folder / name).is_file():
            when = datetime.fromtimestamp(found.stat().st_mtime).isoformat(" ", "seconds")
            yield f"\nthe diagnosis of {whose} ({when}):"
            yield from found.read_text(errors="replace").rstrip().splitlines()
    if damaged:
        yield "\ntapes that cannot be read:"
        yield from (f"  {text}" for text in damaged)
    if not tapes:
        yield "\nits ranks left no tapes" if not damaged else "\nno other rank left a tape"
    elif end is None or end["reason"] not in (End.FINISHED, End.OUT_OF_TIME):
        yield "\nthe tapes of its ranks:"
        # the ranks' own diagnosis is better: it knows which rank did not answer
        if not (folder / DIAGNOSIS).is_file():
            yield from diagnose(tapes, {}).lines()
        yield from (f"  {last_words(reading)}" for _, reading in sorted(tapes.items()))


def last_words(reading: TapeReading) -> str:
    """Return a line about the last thing that a rank did."""
    when = datetime.fromtimestamp(reading.last_seen).strftime("%H:%M:%S") if reading.last_seen else "never"
    doing = f"{reading.doing.what}, step {reading.doing.step}" if reading.doing is not None else "nothing"
    return f"rank {reading.who.rank}, last seen at {when}: {doing}"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The run that the preflight is for."""

    config: TrainConfig | None
    """The resolved config; None if only the machine is checked."""
    shape: Shape
    folder: str | None


def preflight(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check this job, or local ranks that this command launches; return the exit code."""
    device = chosen_device(options.device)
    ranks = 1 if inside_a_job() else wanted_ranks(requested(options), options.ranks, device)
    if ranks == 1:
        return _preflight(options, device)
    plan = planned(options, ranks, device)
    grid = grid_options(plan.shape)
    decided = ["--ranks", str(ranks), "--device", device, *(grid if plan.config else grid[:2])]
    return launch(ranks, [*arguments, *decided], sys.stderr)


def requested(options: argparse.Namespace) -> TrainConfig:
    """Return the config with the changes of the command line, or the defaults if no config is given."""
    if options.path is None and options.changes:
        raise ValueError(f"--set {options.changes[0][0]} changes a config; give CONFIG.toml with it")
    changes = [*options.changes, *((f"grid.{axis}", size) for axis, size in (options.grid or {}).items())]
    if options.out is not None:
        changes.append(("train.out", options.out))
    return read_config(options.path, changes, forget_grid=options.grid is not None)


def planned(options: argparse.Namespace, ranks: int, device: str) -> PlannedRun:
    """Return the planned run on this number of ranks; without a config all ranks are along data."""
    config = requested(options)
    if options.path is None:
        return PlannedRun(None, Shape(data=ranks) if config.grid.auto else config.grid.shape, options.out)
    config = resolve(config, ranks, on_gpu=device == "cuda", memory_bytes=memory_bytes(device))
    return PlannedRun(config, config.grid.shape, config.train.out or default_folder(config))


def _preflight(options: argparse.Namespace, device: str) -> int:
    """Run the preflight as one rank of the job."""
    began = time.monotonic()
    let_sigint_end_ranks()
    job = Environment.read()
    require_world(options.ranks, job.world)
    plan = planned(options, job.world, device)
    if plan.shape.world != job.world:
        raise ValueError(
            f"the grid {plan.shape} has {plan.shape.world} ranks, but this job has {job.world}; change one"
        )
    here = torch.device("cuda", job.local_rank % torch.cuda.device_count()) if device == "cuda" else torch.device("cpu")
    channel = Channel("preflight", range(job.world), find_early_store(job, JOIN_SECONDS), rank=job.rank)
    look = Preflight(channel, Budget(SECONDS), plan, here, first_of_node=job.local_rank == 0)
    facts = look.facts()
    failed = []
    if facts is not None:
        checks = judge(facts)
        failed = list(dict.fromkeys(check.name for check in checks if check.state == "FAILED"))
        show(checks, facts, options.json, time.monotonic() - began)
    look.meet()  # the process of rank 0 may host the store, which the other ranks use until here
    if failed:
        raise ValueError(f"not fit for a long run: {', '.join(failed)} FAILED; the advice is printed beside each check")
    if inside_a_job():
        sys.stdout.flush()
        os._exit(0)  # an orderly exit would wait for a rank or a device that hangs
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def show(checks: Sequence[Check], facts: Facts, json_to: str | None, seconds: float) -> None:
    """Print the checks with a summary, and write them as JSON if --json asks for it."""
    stream = output(json_to)
    for line in lines(checks):
        print(line, file=stream)
    found = Counter(check.state for check in checks)
    said = ", ".join(f"{count} {state}" for state, count in found.items())
    print(f"\n{len(checks)} checks in {seconds:.0f} s: {said}", file=stream, flush=True)
    if json_to is not None:
        table = {"checks": [asdict(check) for check in checks], **asdict(facts), "seconds": seconds}
        put_json(table | {"ranks": list(table["ranks"].values())}, json_to)


class Preflight:
    """The measurements of one rank; all ranks make the same ones together."""

    def __init__(
        self, channel: Channel, budget: Budget, plan: PlannedRun, device: torch.device, *, first_of_node: bool
    ) -> None:
        self.channel, self.budget = channel, budget
        self.plan, self.device, self.first_of_node = plan, device, first_of_node
        self.faults: dict[str, str] = {}

    def facts(self) -> Facts | None:
        """Measure everything; return the facts of all ranks on rank 0."""
        channel, world = self.channel, len(self.channel.ranks)
        grid = self._try(JOINING, JOIN_SECONDS, self._join)
        if self.device.type == "cpu":
            share_cores()
        me = self._try("its device", MEET_SECONDS, lambda: myself(channel.rank, self.device)) or Rank(
            channel.rank, "unknown", "unknown", {}, str(self.device)
        )
        self.meet()  # ranks that share a node must measure at the same time, as they will train at the same time
        flops = self._try("a product", PRODUCT_SECONDS, lambda: product_flops(self.device))
        free = self._try("free memory", MEET_SECONDS, lambda: free_bytes(self.device))
        me = replace(me, flops=flops, free=free, clock=self._clock(), disk=self._disk(), faults=self.faults)
        gathered = channel.gather("ranks", json.dumps(asdict(me)), self.budget.left(MEET_SECONDS), partial=True)
        ranks = {rank: rank_of(text) for rank, text in gathered.items()}
        needs = Needs()
        if channel.leads:
            needs = self._needs()
            channel.put("unlinked", why_unlinked(ranks, world))
        unlinked = channel.get("unlinked", seconds=self.budget.left())
        links: list[MeasuredLink] = []
        if not unlinked and grid is not None:
            found = LinkTimer(channel, self.budget, grid)
            links = found.measure()
            ranks = {rank: one for rank, one in ranks.items() if rank not in found.lost}
        return Facts(world, ranks, links, needs, unlinked) if channel.leads else None

    def meet(self) -> None:
        """Wait for all ranks, within the budget; a rank that is missing is noticed when facts are gathered."""
        with suppress(LateRanksError, LostStoreError):  # the store may end with its rank once all have met
            self.channel.meet(self.budget.left(MEET_SECONDS))

    def _try(self, part: str, seconds: float, act: Callable[[], T]) -> T | None:
        """Return what `act` returns; if it fails, note why and return None."""
        try:
            return within(self.budget.left(seconds), act)
        except Exception as error:
            # 300 characters are enough to see the cause, and keep the table of checks readable
            self.faults[part] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return None

    def _join(self) -> Grid:
        Grid.alone(self.device)  # joins the job with all its ranks
        return Grid.of_shape(self.plan.shape, device=self.device)

    def _clock(self) -> tuple[float, float] | None:
        """Compare the clock of each node's first rank with the clock of rank 0, which answers several times."""
        channel, left = self.channel, self.budget.left
        firsts = channel.gather("first of node", str(int(self.first_of_node)), left(MEET_SECONDS), partial=True)
        if not channel.leads:
            return ask_clock(channel, left(MEET_SECONDS + CLOCK_SECONDS)) if self.first_of_node else None
        until = time.monotonic() + CLOCK_SECONDS
        for rank in (rank for rank, first in firsts.items() if first == "1" and rank):
            with suppress(TimeoutError):
                for trip in range(TRIPS):
                    channel.get(f"clock/{trip}", rank, left(max(0.0, until - time.monotonic())))
                    channel.put(f"clock/{trip}/{rank}", repr(time.time()))
        return None

    def _disk(self) -> Disk | None:
        """Look at the run's folder, in which rank 0 leaves a mark while all ranks look."""
        channel, mark, found = self.channel, None, None
        if self.plan.folder is None:
            return None
        if channel.leads:
            folder = Path(self.plan.folder).absolute()
            mark = self._write(lambda: FolderMark.leave(folder, f"{os.getpid()}"))
            channel.put("mark", str(mark.path) if isinstance(mark, FolderMark) else "")
        there = channel.get("mark", seconds=self.budget.left())
        if there:
            found = self._write(lambda: look_at(Path(there), channel.rank))
        self.meet()  # the mark must stay until every rank has looked
        if isinstance(mark, FolderMark):
            self._write(mark.remove)
        return mark if isinstance(mark, Disk) else found

    def _write(self, act: Callable[[], T]) -> T | Disk:
        """Return what `act` returns, or the disk with its fault."""
        try:
            return within(self.budget.left(DISK_SECONDS), act)
        except OSError as error:  # TimeoutError too: a network file system may hang
            return Disk(seen=False, fault=error.strerror or str(error))

    def _needs(self) -> Needs:
        """Return what the run needs according to the planner and the config."""
        config, folder = self.plan.config, self.plan.folder
        if config is None:
            return Needs(folder=folder)
        section, saved = config.checkpoint, Path(folder or "") / CHECKPOINTS
        there = self._write(lambda: sum(path.stat().st_size for path in saved.rglob("*") if path.is_file()))
        needs = Needs(
            folder=folder,
            saves=section.save,
            # how large a model of the user is, only building it would tell
            checkpoint=0
            if config.model.is_own
            else STATES * config.policy.parameters.itemsize * config.model.build().parameters,
            kept=most_kept(
                config.train.steps,
                section.every,
                section.keep_last,
                section.keep_every,
                by_time=bool(section.minutes),
            ),
            there=there if isinstance(there, int) else 0,
        )
        on_gpu = self.device.type == "cuda"
        job = Hardware.here(len(self.channel.ranks), on_gpu=on_gpu, memory_bytes=memory_bytes(self.device.type))
        try:
            found = within(self.budget.left(PLAN_SECONDS), lambda: predict(config, job))
        except Exception as error:  # a run that cannot be priced can still work
            return replace(needs, unknown=" ".join(str(error).split()))
        return replace(needs, peak=found.price.memory.total, reserve=found.price.task.machine.reserve)


def rank_of(text: str) -> Rank:
    """Read a rank's facts from the JSON that the rank sent."""
    found = json.loads(text)
    clock, disk = found.pop("clock"), found.pop("disk")
    return Rank(**found, clock=tuple(clock) if clock else None, disk=Disk(**disk) if disk else None)


def why_unlinked(ranks: dict[int, Rank], world: int) -> str:
    """Return why links cannot be measured; empty if they can."""
    apart = [rank for rank in range(world) if rank not in ranks or JOINING in ranks[rank].faults]
    return f"{ranks_text(apart)} of {world} did not join the job" if apart else ""
