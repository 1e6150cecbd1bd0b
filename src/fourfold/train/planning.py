"""What the planner does for a run: it fills in the config, chooses the grid, and predicts the time of a step.

`resolve` fills in what a config leaves open; for `--grid auto` it asks the planner for the grid that loses least if the
machine is not as its file says. A machine that the config names is used as its file describes it. The machine `auto` is
the packaged file of this kind of device, with the nodes and the memory of this job.

When a run starts, rank 0 prices its grid and policy. After a few steps it compares their median with the price. A
prediction never ends a run: if the run cannot be priced, the reason is recorded and training continues.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fractions import Fraction
from math import ceil, gcd
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fourfold.atomic import write_json
from fourfold.axes import AXES, BATCH, PIPE, WAITED_FOR
from fourfold.data.bags import BagOrder, check_bag_rows, most_bag_rows, steps_of_epochs
from fourfold.data.sampling import cut_windows
from fourfold.data.sources import is_text
from fourfold.data.token_files import TokenSource
from fourfold.data.tokenizer import load_tokenizer
from fourfold.environment import Environment
from fourfold.grid import Grid, Shape
from fourfold.planner.correct import is_corrected
from fourfold.planner.machine import DTYPES as DTYPE_NAMES
from fourfold.planner.machine import Machine, load_machine, machine_names
from fourfold.planner.price import Candidate, Price, Task, memory_of, price
from fourfold.planner.program import LaunchOp, MatmulOp, Work
from fourfold.planner.search import search
from fourfold.planner.simulate import COMPUTE, TimelineSpan, chrome_trace, simulate
from fourfold.planner.space import Space
from fourfold.planner.step_program import step_program
from fourfold.policy import LEFT_OPEN, SAVES_MEMORY, Policy
from fourfold.report.units import duration
from fourfold.schedule.choose import FOUND
from fourfold.schedule.choose import choose as choose_schedule
from fourfold.train.config import AUTO, DTYPES, GridSection, PipelineSection, TrainConfig, naming
from fourfold.train.defaults import fill_in, pipe_micro_steps, warmup
from fourfold.train.launch import cores
from fourfold.train.run_folder import RunEvent

CPU = "laptop"
"""The packaged machine in which a device is a process on the CPU."""
ANY_GPU = "dgx-h100"
"""The packaged machine for a GPU with a name unlike any of the packaged ones."""
UNSTEADY = 2
"""Steps at the start that are not compared: they record the order of gathers, compile, and fill caches."""
COMPARED = 5
"""The median of this many steps is compared; more would delay the comparison."""
DRAWN = 4
"""Layers and micro-batches in a predicted timeline at most; further ones look the same."""
STEP = "step"
"""The track of a timeline that shows the step as a whole."""
PREDICTED = "predicted.json"
"""The file of the predicted timeline, beside the traces of ranks."""
USED_VOCABULARY = 0.9
"""A vocabulary is worth a remark if a smaller share of it are ids of the tokenizer; models pad theirs by a few."""
LONG_SECONDS = 3600.0
"""A run of more seconds is worth a remark before it starts."""
WHOLE_PROCESS = "on the CPU the measured memory is the whole process, including torch itself"


# The machine


@dataclass(frozen=True, slots=True)
class Hardware:
    """The ranks of a job and their devices, which a machine file must fit."""

    ranks: int
    device: str
    """torch's name of the GPU, or `cpu`."""
    memory_bytes: int
    """Memory of a GPU; on the CPU memory of a node, which its ranks share."""
    cores: int
    """Cores that the ranks of a node share."""

    @classmethod
    def here(cls, ranks: int, *, on_gpu: bool, memory_bytes: int) -> Hardware:
        # a config may be resolved for GPUs on a machine that has none
        found = torch.cuda.get_device_name() if on_gpu and torch.cuda.is_available() else "an unknown GPU"
        return cls(ranks, found if on_gpu else "cpu", memory_bytes, cores())

    @property
    def ranks_per_node(self) -> int:
        """The number that the launcher says; ranks that are still to be started are all on this node."""
        return min(self.ranks, Environment.read().local_world or self.ranks)


def memory_bytes(device: str) -> int:
    """Return the memory of the first GPU, or of this computer."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def locate(name: str, job: Hardware, compute: torch.dtype) -> tuple[Machine, list[str]]:
    """Return the machine of that name or file, and notes that a reader of its prices must know.

    For `auto` it is the packaged machine that is most like this hardware.
    """
    machine, notes = _automatic(job) if name == AUTO else (load_machine(name), [])
    dtype = DTYPE_NAMES[compute]
    if dtype not in machine.gemm and "fp32" in machine.gemm:
        part = 0.5 if dtype == "fp64" else 1.0  # CPUs and data-center GPUs reach half the FLOP/s
        peak, gemm = ({**rates, dtype: part * rates["fp32"]} for rates in (machine.peak, machine.gemm))
        half = "half of " if part < 1 else ""
        notes.append(f"{machine.name} has no FLOP/s for {dtype}: priced with {half}those of fp32")
        machine = replace(machine, peak=peak, gemm=gemm)
    packaged = name == AUTO or name in machine_names()
    # `fourfold calibrate` always writes the products that it has measured
    if packaged or not (machine.measured or is_corrected(machine)):
        notes.append(f"{machine.name}: estimates; `fourfold calibrate` measures this machine")
    elif machine.device != job.device:
        notes.append(f"{machine.name} was measured on {machine.device}, and this is {job.device}")
    return machine, notes


def _automatic(job: Hardware) -> tuple[Machine, list[str]]:
    """Return the packaged machine that is most like this hardware, with its nodes and memory."""
    machine, notes = (load_machine(CPU), []) if job.device == "cpu" else _like(job.device)
    several = job.ranks_per_node < job.ranks
    if several and machine.between is None:  # the file describes a single node, such as a laptop
        notes.append(f"{machine.name} has no network between nodes: priced as one node")
        several = False
    # on one node the file may have fewer devices than the job has ranks: processes on a CPU are as many as one starts
    devices = job.ranks_per_node if several else max(machine.devices_per_node, job.ranks)
    machine = replace(machine, devices_per_node=devices, memory=job.memory_bytes)
    if job.device != "cpu":
        return machine, notes
    part = job.cores / job.ranks_per_node  # a device of the CPU's file is one core; a rank gets its share of the node
    machine = replace(
        machine,
        memory=job.memory_bytes // job.ranks_per_node,
        peak={dtype: part * rate for dtype, rate in machine.peak.items()},
        gemm={dtype: part * rate for dtype, rate in machine.gemm.items()},
        memory_bandwidth=part * machine.memory_bandwidth,
        overhead=machine.overhead / min(1.0, part),  # the host's own work is not faster with more than one core
    )
    return machine, notes


def _like(device: str) -> tuple[Machine, list[str]]:
    """Return the packaged machine with that GPU, else the one with the GPU of the nearest name."""
    # reversed, so that of several machines with the same GPU the first name wins
    packaged = {machine.device: machine for machine in map(load_machine, reversed(machine_names()))}
    if device in packaged:
        return packaged[device], []
    near = get_close_matches(device, [name for name in packaged if name != "cpu"], n=1)
    machine = packaged[near[0]] if near else load_machine(ANY_GPU)
    return machine, [f"no packaged machine has {device}: priced as {machine.name}, which has {machine.device}"]


# The config


def resolve(
    config: TrainConfig, ranks: int, *, on_gpu: bool, memory_bytes: int, say: Callable[[str], object] = lambda _: None
) -> TrainConfig:
    """Return the config with everything filled in, for this number of ranks on this kind of device.

    It checks what must fit across sections. If the planner chooses the grid, `say` receives the planner's reason in one
    line.
    """
    dtype = ("bf16" if on_gpu else "fp32") if config.policy.dtype == "auto" else config.policy.dtype
    compiled = on_gpu if config.policy.compile == "auto" else config.policy.compile
    with naming("model"):
        config = fill_in(config, ranks, on_gpu=on_gpu)
        if not config.model.is_own:
            seq = config.model.seq or max(config.batch.seq, config.model.build().seq)
            config = replace(config, model=replace(config.model, seq=seq))
    compare = config.plan.machine not in (AUTO, *machine_names())
    if config.plan.compare != AUTO:
        compare = config.plan.compare is True
    policy = replace(config.policy, dtype=dtype, compile=compiled)
    config = replace(config, policy=policy, plan=replace(config.plan, compare=compare))
    if config.train.epochs is None:  # otherwise the steps are known once the data is open: `count_steps` goes on then
        config = fill_schedule(config)
    with naming("policy"):
        if config.model.is_own:
            config.build_policy().require_any_module()
    if config.model.is_own and config.grid.shape.sizes[PIPE] > 1:
        raise ValueError(
            f"grid.pipe={config.grid.shape.sizes[PIPE]} is for reference models, and {config.model.name} is a model of "
            "your own: nobody knows where to cut it; leave pipe out of --grid"
        )
    if config.model.is_own and config.lora.rank:
        raise ValueError(
            f"lora.rank={config.lora.rank} is for reference models; {config.model.name} can return a module with "
            "adapters of peft, or with frozen weights of its own"
        )
    _check_length(config)
    # only now, because the planner needs the dtype and the sequence length that were filled in above
    config = choose(config, Hardware.here(ranks, on_gpu=on_gpu, memory_bytes=memory_bytes), say)
    shape = config.grid.shape
    if not config.model.is_own:
        built = config.build_policy()
        config.model.build().check(shape, built)
        if built.stages is not None:
            with naming("pipeline"):
                choose_schedule(built.schedule, built.stages, config.batch.micro_steps)
    places, rows = shape.row_places, config.batch.rows // config.batch.micro_steps
    if rows % places:
        sizes = "*".join(str(shape.sizes[axis]) for axis in BATCH)
        raise ValueError(
            f"batch.rows={config.batch.rows} in micro_steps={config.batch.micro_steps} gives {rows} rows, which is not "
            f"divisible by {'*'.join(BATCH)} = {sizes}; use a multiple of {places * config.batch.micro_steps} rows"
        )
    return fill_bags(config, rows // places)


def fill_bags(config: TrainConfig, rows: int) -> TrainConfig:
    """Return the config with the size of bags of whole documents, for so many rows of a place in a micro-batch."""
    data, seq = config.data, config.batch.seq
    if data.pack != "whole":
        if data.bag_rows is not None:
            raise ValueError(f'data.bag_rows={data.bag_rows} is for data.pack="whole"; set that, or leave bag_rows out')
        return config
    model = config.model.build()
    learned = model.positions == "learned"
    most = model.seq // seq if learned else rows
    bag_rows = data.bag_rows or most_bag_rows(min(rows, most), rows)
    if learned and bag_rows > most:
        raise ValueError(
            f"data.bag_rows={bag_rows} lets documents have {bag_rows * seq} tokens, but the model has {model.seq} "
            f"learned positions; increase model.seq, or set data.bag_rows={most} or less"
        )
    with naming("data"):
        check_bag_rows(bag_rows, rows)
    return replace(config, data=replace(data, bag_rows=bag_rows))


def choose(config: TrainConfig, job: Hardware, say: Callable[[str], object]) -> TrainConfig:
    """Return the config with a grid, micro-batches and a whole policy; `say` receives the reason for a choice."""
    given = config.grid.shape
    piped = given.sizes[PIPE] > 1
    if job.device == "cpu" or config.model.is_own:
        number = config.batch.micro_steps or (pipe_micro_steps(config.batch.rows, given) if piped else 1)
        if config.grid.auto and job.ranks > 1 and not config.model.is_own:
            number = config.batch.micro_steps  # which the planner needs to choose, for grids with pipe ranks
        config = with_memory_choices(config, number, config.build_policy())
    if config.grid.auto and job.ranks == 1:
        config = replace(config, grid=GridSection(**Shape().named, order=config.grid.order))
    if config.grid.auto and config.model.is_own:
        shape, reason = grid_for_own_model(config, job.ranks)
        config = replace(config, grid=GridSection(**shape.named, order=shape.order))
        say(reason)
    elif config.grid.auto or not config.batch.micro_steps or len(config.candidates()) > 1:
        config, reason = ask_planner(config, job)
        say(reason)
    return config


def _check_length(config: TrainConfig) -> None:
    """Raise if the model cannot take the rows of the batch."""
    if config.model.is_own:
        if config.data.apart:
            asked = 'data.pack="whole"' if config.data.pack == "whole" else "data.documents=true"
            raise ValueError(
                f"{asked} needs a model that takes positions; {config.model.name} takes tokens and targets"
            )
        return
    model = config.model.build()
    if model.positions == "learned" and config.batch.seq > model.seq:
        raise ValueError(
            f"batch.seq={config.batch.seq} is longer than the {model.seq} learned positions of the model; "
            "increase model.seq or decrease batch.seq"
        )


def grid_for_own_model(config: TrainConfig, ranks: int) -> tuple[Shape, str]:
    """Return a grid for a module that the planner cannot price, and the reason for it in one line.

    Each rank holds a part of every weight and computes rows of its own: right for any module, and lean in memory. Ranks
    that the rows cannot be divided among share rows, along x.
    """
    z = gcd(config.batch.rows // config.batch.micro_steps, ranks)
    shape = Shape(x=ranks // z, z=z, order=config.grid.order)
    why = f"the planner cannot price {config.model.name}, so weights are cut over ranks that train on rows of their own"
    return shape, f"grid {shape}: {why}; --grid changes it"


def fill_schedule(config: TrainConfig) -> TrainConfig:
    """Return the config with the warm-up that follows from the number of steps, if it has none."""
    with naming("optimizer"):
        if config.optimizer.warmup is None:
            config = replace(config, optimizer=replace(config.optimizer, warmup=warmup(config.train.steps)))
        _ = config.schedule  # checks the keys against each other
    return config


def count_steps(config: TrainConfig, sources: Sequence[TokenSource]) -> TrainConfig:
    """Return a resolved config with the steps that its epochs over these sources take, rounded up.

    An epoch has as many samples as all sources together have training windows. Sources take turns by their weights, so
    with several of them one may be passed through more often than another. With bags of whole documents the number is
    estimated from the first ones. A config without epochs stays as it is.
    """
    if config.train.epochs is None:
        return config
    seq, rows, data = config.batch.seq, config.batch.rows, config.data
    windows = [cut_windows(source.name, source.tokens, seq, data.held_out) for source in sources]
    # exact arithmetic on the decimal that was written, so that every machine counts the same steps
    epochs = Fraction(str(config.train.epochs))
    if data.bag_rows is None:
        steps = max(1, ceil(epochs * sum(one.train for one in windows) / rows))
    else:
        weights = [source.weight for source in data.sources]
        bags: Any = dict(bags=rows // data.bag_rows, tokens=data.bag_rows * seq)
        steps = steps_of_epochs(BagOrder(sources, windows, weights, config.train.seed, **bags), epochs)
    return fill_schedule(replace(config, train=replace(config.train, steps=steps)))


def with_memory_choices(config: TrainConfig, micro_steps: int, policy: Policy) -> TrainConfig:
    """Return the config with what decides about the memory of activations: micro-batches, what it left open, and what
    the planner may set where nothing else fits."""
    section = replace(config.policy, **{name: getattr(policy, name) for name in (*LEFT_OPEN, *SAVES_MEMORY)})
    return replace(config, batch=replace(config.batch, micro_steps=micro_steps), policy=section)


def with_pipeline(config: TrainConfig, policy: Policy) -> TrainConfig:
    """Return the config with the stages and the schedule of a policy that the planner has chosen, if it chose any."""
    if policy.stages is None or config.pipeline.given:
        return config
    return replace(config, pipeline=PipelineSection.of(policy.stages, policy.schedule))


def ask_planner(config: TrainConfig, job: Hardware) -> tuple[TrainConfig, str]:
    """Return the config with what the planner chooses where it leaves something open, and the reason in one line.

    A grid is chosen by its largest regret (`robust.py`); on a given grid the fastest settings are taken. The planner
    chooses the grid, the number of micro-batches and what is `auto` in the config's policy, each if it is open. A given
    order of the axes is kept; with the default order the planner also chooses the order. With a grid of its own it
    also sets `SAVES_MEMORY` of the policy where nothing fits otherwise. If a given grid seems not to
    fit, the run takes the least memory: it is tried all the same, because memory is an estimate.
    """
    task, notes = _task(config, job)
    given, order = config.grid.shape, tuple(config.grid.order)
    # without keys of [pipeline] the planner also chooses stages and schedule
    policies = config.candidates() if config.pipeline.given else config.policy.candidates(config.overlap)
    micro_steps = (config.batch.micro_steps,) if config.batch.micro_steps else None
    if micro_steps is None and given.sizes[PIPE] > 1:
        least, most = pipe_micro_steps(config.batch.rows, given), max(1, config.batch.rows // given.row_places)
        micro_steps = tuple(number for number in range(least, most + 1) if most % number == 0)
    space = Space(
        shapes=None if config.grid.auto else (given,),
        policies=tuple(policies),
        micro_steps=micro_steps,
        orders=None if config.grid.auto and order == AXES else (order,),
        axes=AXES,
        saves_memory=config.grid.auto,
    )
    try:
        plan = search(task, job.ranks, space=space, risk="robust" if config.grid.auto else "fastest")
    except ValueError as error:
        if config.grid.auto:
            raise ValueError(f"--grid auto: {error}; or give a grid, such as --grid z={job.ranks}") from error
        most = max(1, config.batch.rows // given.row_places)  # one row at a time
        frugal = with_memory_choices(config, config.batch.micro_steps or most, policies[-1])
        return frugal, f"as little memory as possible, because the planner expects too little for {given}: {error}"
    best, *others = plan.ranked
    found, shape = best.candidate, best.candidate.shape
    chosen = [f"grid {shape}"] if config.grid.auto else []
    if not config.batch.micro_steps and found.micro_steps > 1:
        chosen.append(f"{found.micro_steps} micro-batches")
    chosen += [f"{name} {getattr(found.policy, name)}" for name in LEFT_OPEN if getattr(config.policy, name) == AUTO]
    saving = {name: getattr(found.policy, name) for name in SAVES_MEMORY}
    chosen += [f"{name} {value}" for name, value in saving.items() if value != getattr(config.policy, name)]
    if found.policy.stages is not None and not config.pipeline.given:
        name = found.policy.schedule if isinstance(found.policy.schedule, str) else FOUND
        chosen.append(f"schedule {name} of {len(found.policy.stages.placement)} stages")
    said = f"{', '.join(chosen)} by the planner: {duration(best.seconds)} per step on {task.machine.name}"
    if others:
        grids = len(plan.ranked) + len(plan.waiting)
        said += f"; next of {grids} grids that fit, {others[0].candidate.shape}: {_slower(others[0], best)}"
    elif config.grid.auto:
        said += "; no other grid fits"
    config = replace(config, grid=GridSection(**shape.named, order=shape.order))
    config = with_pipeline(with_memory_choices(config, found.micro_steps, found.policy), found.policy)
    return config, f"{said} ({'; '.join(notes)})" if notes else said


def remarks(config: TrainConfig, job: Hardware) -> list[str]:
    """Return what somebody should know about a resolved config before it runs: ids that no token has, hours to wait."""
    if config.model.is_own:
        return []  # nobody knows its size
    said = []
    vocab, reads_text = config.model.build().vocab, any(is_text(source.path) for source in config.data.sources)
    if reads_text and (known := load_tokenizer(config.data.tokenizer, config.data.eod).vocab) < USED_VOCABULARY * vocab:
        said.append(
            f"the tokenizer {config.data.tokenizer} has {known:,} ids and the model {vocab:,}: the others are never "
            f"trained; set data.tokenizer to the model's tokenizer.json, or model.vocab={known}"
        )
    with suppress(ValueError, OSError):  # what cannot be priced is trained all the same
        if config.train.epochs is not None:
            return said  # its steps are counted when the data is open
        seconds = predict(config, job).price.seconds * config.train.steps
        if seconds > LONG_SECONDS:
            steps = f"{config.train.steps:,} steps"
            said.append(f"{steps} will take about {duration(seconds)}, by the planner's estimate; --steps sets fewer")
    return said


def _slower(other: Price, best: Price) -> str:
    """Say how much slower a grid is, with the largest part of the difference: `18 ms, 5 ms more exposed over x`."""
    exposed, least = other.totals.exposed, best.totals.exposed
    parts = {f"exposed over {name}": exposed.get(name, 0.0) - least.get(name, 0.0) for name in WAITED_FOR}
    parts["of computing"] = other.totals.compute - best.totals.compute
    worst = max(parts, key=lambda part: parts[part])
    if parts[worst] <= 0:
        return duration(other.seconds)
    return f"{duration(other.seconds)}, {duration(parts[worst])} more {worst}"


def _task(config: TrainConfig, job: Hardware) -> tuple[Task, list[str]]:
    """Return what the planner is to price: the model and batch of a config on its machine; and notes on the machine."""
    compute = DTYPES[config.policy.dtype]
    machine, notes = locate(config.plan.machine, job, compute)
    if config.optimizer.name != "adamw":
        notes.append(f"the memory and time of {config.optimizer.name} are those of adamw")
    if config.lora.rank:
        notes.append("LoRA is priced as the training of all weights, which takes longer and needs more memory")
    batch = config.batch
    sizes = batch.rows, batch.seq, config.policy.parameters, compute
    captured, packed = config.train.graph == "auto", config.data.apart
    return Task(config.model.build(), machine, *sizes, captured=captured, packed=packed), notes


# The prediction


@dataclass(frozen=True, slots=True)
class Prediction:
    """The price of a run's grid and policy, and notes on the machine that it was computed for."""

    price: Price
    notes: list[str]

    @property
    def facts(self) -> RunEvent:
        """The prediction as run.json stores it."""
        found, totals = self.price, self.price.totals
        memory = memory_of(found.task, found.candidate)
        axes = found.candidate.shape.message_axes

        def by_axis(seconds: Mapping[Any, float]) -> dict[str, float]:
            return {axis: seconds.get(axis, 0.0) for axis in axes}

        return {
            "machine": found.task.machine.name,
            "notes": self.notes,
            "seconds": found.seconds,
            "compute_seconds": totals.compute,
            "link_seconds": by_axis(totals.link),
            "exposed_seconds": by_axis(totals.exposed),
            "host_seconds": totals.host,
            "host": found.task.machine.describe_host(
                found.task.host_mode(found.candidate.policy, found.candidate.shape)
            ),
            "peak_memory_bytes": memory.total,
            "memory_bytes": memory.kinds,
            "peak_at": memory.at,
            "halves": found.halves,
            "mfu": found.mfu,
            "hfu": found.hfu,
        }

    def trace(self) -> dict[str, Any]:
        """Return the timeline of a step for Perfetto, with the same names as the traces of ranks."""
        task, candidate = self.price.task, self.price.candidate
        layers, micro_steps = (min(number, DRAWN) for number in (task.config.layers, candidate.micro_steps))
        program = step_program(candidate.sizes(task, layers=layers), micro_steps=micro_steps)
        seconds = task.seconds_on(candidate)
        line = simulate(program.work, seconds, task.dtype, phases=program.phases, trace=True)
        drawn = f"{layers} of {task.config.layers} layers, {micro_steps} of {candidate.micro_steps} micro-steps"
        whole = TimelineSpan(STEP, f"step ({drawn})", 0.0, line.seconds, STEP)
        return chrome_trace([whole, *named(program.work, line.spans)], process=f"predicted on {task.machine.name}")


def named(work: Sequence[Work], spans: Iterable[TimelineSpan]) -> list[TimelineSpan]:
    """Return the spans with the names that the ledger and the profiler use."""
    products = {item.label for item in work if isinstance(item, MatmulOp)}
    launched: defaultdict[str, list[str]] = defaultdict(list)
    for item in work:
        if isinstance(item, LaunchOp):
            launched[item.lane].append(str(item.record))
    left = {lane: iter(records) for lane, records in launched.items()}  # a lane runs them in the order of their launch
    found = []
    for span in spans:
        if span.track == COMPUTE:
            label = f"product {span.label}" if span.label in products else span.label
        else:
            label = next(left[span.track])
        found.append(replace(span, label=f"fourfold::{label}"))
    return found


def predict(config: TrainConfig, job: Hardware) -> Prediction:
    """Price a resolved config on the machine that it names."""
    task, notes = _task(config, job)
    batch, shape = config.batch, config.grid.shape
    rows = batch.rows // batch.micro_steps // shape.row_places
    return Prediction(price(task, Candidate(shape, config.build_policy(), rows, batch.micro_steps)), notes)


def predict_run(
    config: TrainConfig, grid: Grid, traced: range, folder: Path | None
) -> tuple[RunEvent, PredictionCheck | None, Price | None]:
    """Return the prediction for run.json, the check that compares it, and the price; else the reason and None twice.

    If the run keeps the traces of steps in a folder, the predicted timeline is written beside them.
    """
    on_gpu = grid.device.type == "cuda"
    job = Hardware.here(grid.shape.world, on_gpu=on_gpu, memory_bytes=memory_bytes(grid.device.type))
    try:
        found = predict(config, job)
        facts = found.facts
        trace = found.trace() if traced and folder is not None else None
    except Exception as error:  # a bug in the planner must not end a training run
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        return {"unpriced": " ".join(f"{kind}{error}".split())}, None, None
    if trace is not None and folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / PREDICTED, trace)
    return facts, PredictionCheck(facts, traced=traced, on_gpu=on_gpu), found.price


class PredictionCheck:
    """Collects the events of steps and returns, once, how they compare with the prediction.

    Traced steps are slower and count only if there are no others.
    """

    def __init__(self, predicted: RunEvent, *, traced: range, on_gpu: bool) -> None:
        self.predicted, self.traced, self.on_gpu = predicted, traced, on_gpu
        self._steps: list[RunEvent] = []
        self._compared = False

    def add(self, step: RunEvent) -> RunEvent | None:
        """Add a step; return the comparison if this step completes it."""
        if self._compared:
            return None
        self._steps.append(step)
        return self._compare(self._steady) if len(self._steady) == COMPARED else None

    def finish(self) -> RunEvent | None:
        """Return the comparison of a run that ended before it was complete, from the steps that it has."""
        if self._compared or not self._steps:
            return None
        return self._compare(self._steady or self._steps[UNSTEADY:] or self._steps[-1:])

    @property
    def _steady(self) -> list[RunEvent]:
        return [step for step in self._steps[UNSTEADY:] if step["step"] not in self.traced]

    def _compare(self, steps: Sequence[RunEvent]) -> RunEvent:
        self._compared = True
        predicted = self.predicted

        def pair(predicted: float, measured: Sequence[float]) -> dict[str, float | None]:
            found = median(measured)
            return {"predicted": predicted, "measured": found, "ratio": found / predicted if predicted else None}

        waits = [step["exposed_seconds"] for step in steps if step["exposed_seconds"] is not None]
        memory = pair(predicted["peak_memory_bytes"], [step["peak_memory_bytes"] for step in steps])
        if not self.on_gpu:
            memory["ratio"] = None  # one is the memory of tensors, the other of the whole process
        return {
            "event": "compared",
            "step": self._steps[-1]["step"],
            "steps": [step["step"] for step in steps],
            "machine": predicted["machine"],
            "notes": [*predicted["notes"], *([] if self.on_gpu else [WHOLE_PROCESS])],
            "seconds": pair(predicted["seconds"], [step["seconds"] for step in steps]),
            "exposed_seconds": {
                axis: pair(seconds, [waited.get(axis, 0.0) for waited in waits])
                for axis, seconds in predicted["exposed_seconds"].items()
                if waits
            },
            "peak_memory_bytes": memory,
        }
