"""`fourfold train`: starts local ranks if necessary, and trains a run as one rank of a job.

Outside of a job `train` resolves the config and launches the ranks. Each rank runs the same command with the resolved
grid, calls `train` again inside the job, and trains in `_run`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from fourfold.axes import AXES
from fourfold.commands.local_ranks import (
    chosen_device,
    close,
    default_folder,
    grid_options,
    group_timeout,
    join_watched,
    let_sigint_end_ranks,
    put_json,
    require_world,
    wanted_ranks,
)
from fourfold.commands.probe import versions
from fourfold.compare import compare_serial
from fourfold.data.loader import Loader
from fourfold.environment import Environment, command_began, inside_a_job, is_watched
from fourfold.errors import FailedElsewhereError, Failure, RollBackError
from fourfold.grid import Grid
from fourfold.job import Channel, agree_on_facts
from fourfold.planner.machine import load_machine
from fourfold.train import fork_server
from fourfold.train.callbacks import Callbacks
from fourfold.train.checkpoints import (
    Start,
    any_restarted,
    config_to_read,
    find_start,
    is_done,
    newest_step,
    require_named_folder,
    roll_back,
    start_at,
    steps_to_profile,
    still_to_rewind,
    what_is_saved,
)
from fourfold.train.config import AUTO, TrainConfig, read_config
from fourfold.train.console import write_data
from fourfold.train.language_model import build_model, vocab_of
from fourfold.train.launch import RestartPolicy, launch, require_startable, share_cores, wait_after_restart
from fourfold.train.loop import Run, open_sources, open_sources_here
from fourfold.train.planning import Hardware, count_steps, memory_bytes, remarks, resolve
from fourfold.train.progress import PlainProgress, ProgressBar, RankLog, RunLog, note, output, predicted, progress
from fourfold.train.run_folder import (
    KINDS,
    MemorySink,
    RunEvent,
    Sink,
    check_folder,
    deny_others_write,
    open_sinks,
    require_unowned,
    require_writing,
)
from fourfold.train.schema import to_table
from fourfold.train.signals import NAMES, ignore_signals, raise_on_signals
from fourfold.watch.diagnose import diagnose, missed_by
from fourfold.watch.liveness import NoAlarm, Phase
from fourfold.watch.tape import TapeReading, read_all

LISTED = {
    "steps": "step", "evaluations": "evaluation", "skipped": "skipped", "spikes": "spike", "saved": "saved",
    "resumed": "resumed", "stragglers": "straggler",
}  # fmt: skip
"""The lists of events in the JSON of --json, and the kind of events in each."""
MOST_EPOCHS = 4.0
"""How often data can be repeated before that helps much less than new data (arXiv 2305.16264)."""
RESTARTS = 3
"""How often to restart local ranks without a new checkpoint by default: some failures of a node last for a while."""


def train(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Train, in this process or on local ranks that it launches, and return the exit code."""
    check_options(options)
    device = chosen_device(options.device)
    if inside_a_job():
        return _train(options, device)
    asked = requested(options, options.ranks)
    if asked.train.epochs is None:
        check_profile(options, asked)
    device, memory, ranks = hardware(options, asked, device)
    people = sys.stderr if options.print_config else output(options.json)
    say = partial(print, file=people, flush=True)

    def resolved(ranks: int, say: Callable[[str], object]) -> TrainConfig:
        return resolve(asked, ranks, on_gpu=device == "cuda", memory_bytes=memory, say=say)

    reasons: list[str] = []
    config = resolved(ranks, reasons.append)
    restarts = wanted_restarts(config, options.restarts, ranks)
    if ranks == 1 and not restarts and not options.print_config:
        fork_server.close()
        return _train(options, device)  # which resolves the config and prints the reasons itself
    print(*reasons, sep="\n", end="\n" if reasons else "", file=people, flush=True)
    if options.print_config:
        write_data(count_steps_here(config).toml(explained=True))
        return 0
    out = config.train.out or default_folder(config)
    if options.resume is None and options.compare_serial is None:
        # before the first start, because restarted ranks would resume whatever run the folder holds
        check_folder(Path(out), save=config.checkpoint.save)
    if options.resume is not None:
        require_unowned(options.resume)
        start = start_at(options.resume, config, options.step)
        # with epochs the ranks find out, because only they open the data
        if config.train.epochs is None and is_done(start, config, options.resume, people):
            return 0

    def rank_arguments(config: TrainConfig) -> list[str]:
        """Return the arguments for the ranks, with the grid and the folder that were decided here."""
        world = str(config.grid.shape.world)
        chosen = [f"--set={key}={json.dumps(value)}" for key, value in planned_keys(asked, config)]
        grid = grid_options(config.grid.shape)
        return [*arguments, "--ranks", world, *grid, *chosen, "--out", out, "--device", device]

    print_remarks(config, device, ranks, people)
    print(f"starting {ranks} rank{'s' if ranks > 1 else ''}: {config.grid.shape}", file=people, flush=True)
    may_shrink = asked.grid.auto and options.ranks is None and device == "cuda"
    return launch(
        ranks,
        rank_arguments(config),
        sys.stderr,
        restarts=restarts,
        grace=config.watch.grace,
        start=config.watch.start,
        policy=RunRestarts(
            Path(out),
            (lambda left: rank_arguments(resolved(left, say))) if may_shrink else None,
            from_nothing=options.restarts is not None,
        ),
    )


def hardware(options: argparse.Namespace, asked: TrainConfig, device: str) -> tuple[str, int, int]:
    """Return the kind of device, its memory, and the number of ranks that a config is resolved for.

    A config that is only printed is for the machine that it names, which need not be this one: on the login node of a
    cluster its defaults are those of `fourfold plan --config`.
    """
    if not options.print_config or options.device is not None or asked.plan.machine == AUTO:
        ranks = wanted_ranks(asked, options.ranks, device)
        if not options.print_config:
            require_startable(ranks)  # before a grid is searched for them
        return device, memory_bytes(device), ranks
    machine = load_machine(asked.plan.machine)
    ranks = options.ranks or (machine.devices_per_node if asked.grid.auto else None)
    # no GPU of this machine is counted
    return "cpu" if machine.device == "cpu" else "cuda", machine.memory, wanted_ranks(asked, ranks, "cpu")


def planned_keys(asked: TrainConfig, config: TrainConfig) -> Iterator[tuple[str, Any]]:
    """Yield the keys that the planner may have chosen for a config, with their values."""
    for section in ("batch", "policy", "pipeline"):
        before, after = to_table(getattr(asked, section)), to_table(getattr(config, section))
        yield from ((f"{section}.{key}", value) for key, value in after.items() if value != before[key])


def print_remarks(config: TrainConfig, device: str, ranks: int, stream: IO[str]) -> None:
    """Print what somebody should know about a resolved config before it runs."""
    job = Hardware.here(ranks, on_gpu=device == "cuda", memory_bytes=memory_bytes(device))
    for text in remarks(config, job):
        print(f"note: {text}", file=stream, flush=True)


class RunRestarts(RestartPolicy):
    """Restarts a run from its newest checkpoint.

    `arguments_for` returns the arguments for fewer ranks, in case GPUs are lost; without it the number of ranks is
    fixed. A run without a checkpoint begins again only if the user asked for restarts, with `from_nothing`.
    """

    def __init__(
        self, out: Path, arguments_for: Callable[[int], Sequence[str]] | None = None, *, from_nothing: bool = True
    ) -> None:
        self._out, self._arguments_for, self._from_nothing = out, arguments_for, from_nothing

    def resume_step(self) -> int:
        return newest_step(self._out)

    def resume_text(self, step: int) -> str:
        return f"after step {step}" if step else "from step 0"

    def restarts_from_nothing(self) -> bool:
        return self._from_nothing

    def left_behind(self) -> str:
        return what_is_saved(self._out)

    def evidence(self, start: str) -> str:
        """Return how the ranks of this start launched different collectives, by their tapes; empty if they did not."""
        found = diagnose(self._tapes(start), {})
        return found.headline if found.disagreement is not None else ""

    def missed(self, rank: int, start: str) -> str:
        return missed_by(self._tapes(start), rank)

    def _tapes(self, start: str) -> dict[int, TapeReading]:
        return {rank: tape for rank, tape in read_all(self._out).items() if tape.who.start == start}

    def next_start(self, ranks: int, arguments: Sequence[str]) -> tuple[int, Sequence[str]]:
        if self._arguments_for is not None and 0 < (left := gpus_left()) < ranks:
            return left, self._arguments_for(left)
        return ranks, arguments

    def note(self, kind: str, text: str) -> None:
        note(self._out, kind, text)


def _train(options: argparse.Namespace, device: str) -> int:
    """Run the command as one rank of the job."""
    deny_others_write()
    let_sigint_end_ranks()
    wait_after_restart()
    here = Environment.read()
    require_world(options.ranks, here.world)
    config = requested(options, here.world)
    if config.train.epochs is None:
        check_profile(options, config)
    with join_watched(device, here, config.watch) as alarm:
        grid, config, reason = make_grid(config, device, options)
        people = sys.stderr if options.print_config else output(options.json)
        if reason and grid.rank == 0:
            print(reason, file=people, flush=True)
        if grid.rank == 0 and not is_watched() and not options.print_config:  # else the launcher has printed them
            print_remarks(config, device, here.world, people)
        raise_on_signals()  # only now: while a rank waited for others to join, a Python handler could not run
        if options.print_config:
            if grid.rank == 0:
                write_data(count_steps_here(config).toml(explained=True))
            return 0
        if options.compare_serial is not None:
            if options.json is not None:
                raise ValueError("--compare-serial prints a table and writes no --json; leave one of them out")
            return _compare(config, grid, options.compare_serial)
        return _run(config, grid, options, alarm)


def _run(config: TrainConfig, grid: Grid, options: argparse.Namespace, alarm: NoAlarm) -> int:
    """Train the run, again after each rollback, and return the exit code."""
    began = command_began()
    alarm.enter(Phase.FOLDER)
    stream = output(options.json)
    require_named_folder(config.train.out)
    # rank 0 decides for all ranks, because the name of a default folder contains the time
    out = Path(grid.broadcast_text(config.train.out or default_folder(config)))
    again = any_restarted(grid)
    resumes = options.resume is not None or again
    check_outputs(grid, out, config, options.json, resumes=resumes)
    if config.train.epochs is not None:
        alarm.enter(Phase.DATA)
        config = count_steps(config, open_sources(config, grid, out / "data"))
        grid.agree("the number of steps", str(config.train.steps))
        check_profile(options, config)
        alarm.enter(Phase.FOLDER)
    step = options.step if not again or still_to_rewind(grid, out, options.step) else None
    start = find_start(grid, out, config, step) if resumes else Start()
    if is_done(start, config, out, stream if grid.rank == 0 else None):
        close(grid)
        return 0
    # outlives a rollback and a restart: --json lists all steps
    before = out / "metrics.jsonl" if again else None
    memory = [MemorySink(before, start.step)] if options.json is not None else []
    profile = steps_to_profile(options.profile, start.step, asked=not again)
    trained = False
    say = partial(print, file=stream, flush=True)
    while True:
        tell = say if grid.rank == 0 else lambda _: None
        run = Run(config, grid, out, profile=profile, alarm=alarm, began=began, tell=tell)
        prepare(run, start, stream, memory)
        try:
            with RankLog(out, grid), run.stop.listening():
                run.train()
                trained = True
                end_together(options.json, run, memory)  # a signal must still end it if nobody reads the JSON
            break
        except RollBackError as error:
            del run  # frees the memory of the model and optimizer before the next run builds its own
            start = roll_back(grid, out, config, error)
            profile = steps_to_profile(profile, start.step, asked=False)
            for sink in memory:
                sink.rewind(start.step)
        except BaseException as error:
            if not trained:
                with suppress(OSError):  # a failed write must not hide the error that ended the run
                    write_result(options.json, run, memory)
            if isinstance(error, KeyboardInterrupt) and grid.rank == 0:
                raise KeyboardInterrupt(what_is_saved(out)) from None
            raise
    ignore_signals()  # the run has ended: a signal could only disturb what is left to say
    if grid.rank == 0:
        farewell(run, stream)
    close(grid)
    return 128 + run.stopped if run.stopped else 0


def prepare(run: Run, start: Start, stream: IO[str], memory: Sequence[MemorySink]) -> None:
    """Load the checkpoint of the start, open the sinks, and print what is about to run."""
    run.load(start)
    shown = progress(stream, run.config.train.steps, start.step)
    if start.newer and run.grid.rank == 0:
        gone = ", ".join(folder.name for folder in start.newer)
        shown.say(f"returns to step {start.step}: removes {gone} and all records after that step")
    resumed_after = start.step if start.resumes else None
    speakers: list[PlainProgress | ProgressBar] = [shown]

    def sinks() -> list[Sink]:
        opened = open_sinks(run.config.log, run.out, run.config, resumed_after)
        speakers.append(RunLog(run.out, run.config.train.steps, start.step))
        # last: everything is recorded before a callback of the user may fail
        return [*opened, *speakers, *memory, Callbacks(run.config.train.callbacks, run.out, run.config)]

    run.begin(sinks, start)
    if run.grid.rank == 0:
        for text in greeting(run, start):
            for speaker in speakers:
                speaker.say(text)


def farewell(run: Run, stream: IO[str]) -> None:
    """Print what the run has written, and the commands that use it."""
    out, saved = run.out, run.saving is not None
    if run.stopped:
        if not is_watched():  # a launcher reports it itself, once all ranks have ended
            said = f"stopped by {NAMES[run.stopped]}; {what_is_saved(out)}"
            print(f"fourfold: {said}", file=sys.stderr, flush=True)
        return
    if run.out_of_time:
        train = run.config.train
        over = f"train.minutes={train.minutes:g} are over after step {run.step} of {train.steps}"
        print(f"{over}; {what_is_saved(out)}", file=stream)
    print(f"\n{out}: config, metrics{', checkpoints' if saved else ''}.", file=stream)
    print(f"  fourfold report {shlex.quote(str(out))}", file=stream)
    if saved and not run.config.model.is_own:
        print(f"  fourfold sample {shlex.quote(str(out))} --prompt 'import '", file=stream)


def check_outputs(grid: Grid, out: Path, config: TrainConfig, json_to: str | None, *, resumes: bool) -> None:
    """Check on rank 0, before anything is built, that it can write everything that the options ask for."""

    def check() -> None:
        require_unowned(out)  # the run checks it again when it takes the lock, but only after it has loaded everything
        if resumes:
            require_writing(save=config.checkpoint.save)
        else:
            check_folder(out, save=config.checkpoint.save)
        if json_to not in (None, "-") and (not Path(json_to).exists() or Path(json_to).is_file()):
            # raises now if the file cannot be written at the end; a reader of a pipe would take this for the end of it
            Path(json_to).open("a").close()

    grid.run_on_rank0("the run's folder", check)


def make_grid(config: TrainConfig, device: str, options: argparse.Namespace) -> tuple[Grid, TrainConfig, str]:
    """Return the grid over all ranks, the resolved config, and the planner's reason if it chose the grid."""
    world = dist.get_world_size()
    reasons: list[str] = []
    config = resolve(config, world, on_gpu=device == "cuda", memory_bytes=memory_bytes(device), say=reasons.append)
    if world > 1:
        agree_on_facts(Channel("start"), start_facts(config, device, options))
    grid = Grid.of_shape(config.grid.shape, device=device, timeout=group_timeout(config.watch))
    if device == "cpu":
        share_cores()  # otherwise every rank starts as many threads as the node has cores
    return grid, config, "".join(reasons)


def start_facts(config: TrainConfig, device: str, options: argparse.Namespace) -> dict[str, str]:
    """Return what must be the same on all ranks before they train together: config, code and options.

    The folder is not among the facts, because rank 0 decides it. Neither are the paths of the data, which may differ
    between nodes: the loader compares the content.
    """
    found: dict[str, str] = {}

    def add(key: str, value: object) -> None:
        if isinstance(value, dict):
            for name, below in value.items():
                add(f"{key}.{name}" if key else name, below)
        elif isinstance(value, (list, tuple)):
            for number, below in enumerate(value):
                add(f"{key}[{number}]", below)
        elif key != "train.out" and not key.endswith("].path"):
            found[key] = str(value)

    shape = config.grid.shape
    add("", {**to_table(config), "grid": {**shape.named, "order": shape.order}})
    for name in ("step", "profile", "compare_serial", "print_config"):
        found[f"--{name.replace('_', '-')}"] = str(getattr(options, name))
    shared = versions(on_gpu=device == "cuda")
    return found | {"device": device} | {name: shared[name] for name in shared if name not in ("python", "driver")}


def write_result(path: str | None, run: Run, memory: Sequence[MemorySink]) -> None:
    """Write the JSON that `--json` asks for, on rank 0."""
    if path is None or run.grid.rank != 0:
        return
    by_kind: dict[str, list[RunEvent]] = {kind: [] for kind in KINDS}
    for event in memory[0].events:
        by_kind[event["event"]].append({key: value for key, value in event.items() if key != "event"})
    result = {
        "config": to_table(run.config),
        "grid": run.grid.shape.named,
        "predicted": run.stored.get("predicted"),
        "compared": run.stored.get("compared"),
        "corrected": run.stored.get("corrected"),
        **{key: by_kind[kind] for key, kind in LISTED.items()},
        "end": by_kind["end"][-1] if by_kind["end"] else None,
    }
    put_json(result, path)


def end_together(path: str | None, run: Run, memory: Sequence[MemorySink]) -> None:
    """Write the JSON on rank 0, if any, and wait until all ranks have ended the run; raise on all if writing fails.

    A rank that left earlier could not see that another one never comes to its end. And if rank 0 failed while others
    end, the launcher would stop them, and would take that for the cause and restart a run that is complete.
    """
    failed: OSError | None = None
    try:
        write_result(path, run, memory)
    except OSError as error:
        failed = error
    channel = run.grid.channel.open("result", seconds=inf, fresh=True)  # its reader may take any time
    if channel.decide(str(int(failed is not None)), max) == "1":
        raise failed or FailedElsewhereError(f"rank 0 could not write --json {path}", Failure.USER)


def greeting(run: Run, start: Start) -> Iterator[str]:
    """Yield the lines that describe the run before its first step."""
    config, grid, policy = run.config, run.grid, run.config.policy
    batch = config.batch
    tokens = sum(source.tokens for source in run.sources)
    micro = f" in {batch.micro_steps} micro-batches" if batch.micro_steps > 1 else ""
    yield (
        f"{config.model.name}: {run.language_model.parameters / 1e6:.1f}M parameters, {policy.dtype}, "
        f"{grid.shape.world} rank{'s' if grid.shape.world > 1 else ''} ({grid}) on {grid.device.type}"
    )
    names = ", ".join(source.name for source in run.sources)
    read = config.train.steps * batch.tokens / tokens
    yield (
        f"{tokens / 1e6:.1f}M tokens of {names}, of which {config.train.steps:,} steps read "
        f"{f'{read:.2g} epochs' if read > 1 else f'{read:.2%}'}; {batch.rows} x {batch.seq} tokens per step{micro}"
    )
    if config.data.bag_rows is not None:
        number, size = batch.rows // config.data.bag_rows, config.data.bag_rows * batch.seq
        bags = "one bag" if number == 1 else f"{number} bags"
        yield f"whole documents fill {bags} of {size:,} tokens a step; tokens/s do not count padding"
    if read > MOST_EPOCHS:
        yield f"note: the data is read {read:.0f} times and will be learned by heart; add data, or take fewer steps"
    if config.train.epochs is not None:
        yield f"{config.train.steps} steps, which are {config.train.epochs:g} epochs"
    yield from run.language_model.notes()
    yield f"peak of one device: {run.peak.flops / 1e12:.3g} TFLOP/s ({run.peak.origin})"
    if "predicted" in run.stored:
        yield predicted(run.stored["predicted"])
    yield from start.notes
    if run.evaluation is None:
        yield "no evaluation: data.held_out or train.evaluate_every is 0"
    yield f"a model that only knows the frequency of each token has a loss of {run.entropy:.4f} (unigram entropy)\n"


def _compare(config: TrainConfig, grid: Grid, steps: int) -> int:
    """Compare training on the grid with training in one process, on the run's own batches, without micro-batches."""
    if config.data.apart:
        raise ValueError(
            f"--compare-serial {steps} with data.documents={config.data.documents} and data.pack={config.data.pack}: "
            "compare with data.documents=false and data.pack=windows"
        )
    seed = config.train.seed
    with tempfile.TemporaryDirectory() as cache:
        loader = Loader(
            open_sources(config, grid, Path(cache)),
            [source.weight for source in config.data.sources],
            Grid.alone(grid.device),  # reads whole batches
            rows=config.batch.rows,
            seq=config.batch.seq,
            vocab=vocab_of(config),
            seed=seed,
            held_out=config.data.held_out,
            device=torch.device("cpu"),
        )
        with loader:
            batches = [loader.next()[0][:2] for _ in range(steps)]
    found = compare_serial(
        lambda place: build_model(config, place).module,
        batches,
        grid,
        max_norm=config.optimizer.clip,
    )
    if grid.rank == 0:
        write_data(f"{found}\n")
    close(grid)
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Raise if options contradict each other."""
    if options.profile and options.compare_serial is not None:
        raise ValueError("--compare-serial does not train, so it has no steps to --profile; leave one of them out")
    if options.resume is not None:
        if options.out is not None and options.out != options.resume:
            raise ValueError(
                f"--resume {options.resume} resumes in that folder, so --out {options.out} has no effect; leave one out"
            )
        if options.compare_serial is not None:
            raise ValueError("--compare-serial does not train, so it cannot --resume a run; leave one of them out")
    elif options.step is not None:
        raise ValueError(f"--step {options.step} names a checkpoint to resume from; give its run with --resume")
    if options.restarts is not None:
        if options.restarts < 0:
            raise ValueError(f"--restarts {options.restarts} must be at least 0")
        if inside_a_job() and not is_watched():
            raise ValueError("--restarts only works for ranks that fourfold starts; use torchrun's --max-restarts")


def requested(options: argparse.Namespace, ranks: int | None) -> TrainConfig:
    """Return the config file, or the config of the run to resume, with the changes of the command line.

    If a run resumes on another number of ranks, its grid is planned again.
    """
    source = config_to_read(options.config, options.resume, [options.model])
    changes = list(options.changes)
    if options.grid is not None:
        changes += [(f"grid.{axis}", size) for axis, size in options.grid.items()]
    if options.data is not None:
        changes.append(("data.sources", [{"path": path} for path in options.data]))
    out = options.out if options.resume is None else options.resume
    given = {
        "model.name": options.model,
        "train.steps": options.steps,
        "train.epochs": options.epochs,
        "train.minutes": options.minutes,
        "policy.dtype": options.dtype,
        "train.out": None if out is None else str(out),
        "plan.machine": options.machine,
    }
    changes += [(key, value) for key, value in given.items() if value is not None]
    changed = dict(changes)
    if "train.steps" in changed:
        if changed.get("train.epochs") is not None:
            raise ValueError(
                f"train.epochs={changed['train.epochs']} decides the number of steps, and train.steps="
                f"{changed['train.steps']} does too; give one of them"
            )
        changes.append(("train.epochs", None))  # the command line wins over the epochs of a file or of a stored run
    resumes = options.resume is not None
    config = read_config(source, changes, forget_grid=options.grid is not None, forget_stages=resumes)
    if options.resume is None or options.grid or config.grid.auto:
        return config
    if ranks in (None, config.grid.shape.world):
        return config
    # the planner chose the stored order for the other grid
    return read_config(source, [("grid.order", list(AXES)), *changes], forget_grid=True, forget_stages=True)


def count_steps_here(config: TrainConfig) -> TrainConfig:
    """Return a resolved config with the steps that its epochs take, to be printed: text is prepared and forgotten."""
    if config.train.epochs is None:
        return config
    with tempfile.TemporaryDirectory() as cache:
        return count_steps(config, open_sources_here(config, Path(cache)))


def check_profile(options: argparse.Namespace, config: TrainConfig) -> None:
    """Raise if --profile names steps that the run does not have."""
    if not options.profile:
        return
    first, last, steps = options.profile[0], options.profile[-1], config.train.steps
    if last > steps:
        asked = first if first == last else f"{first}-{last}"
        raise ValueError(
            f"--profile {asked}: this run has train.steps={steps}; name steps from 1 to {steps}, for example 1-{steps}"
        )


def gpus_left() -> int:
    """Return how many GPUs still answer. A new process counts them, because torch caches the count of this one."""
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    return int(found.stdout) if found.returncode == 0 else 0


def wanted_restarts(config: TrainConfig, asked: int | None, ranks: int) -> int:
    """Return how often to restart local ranks: by default only if the run saves checkpoints to resume from."""
    if asked is not None:
        return asked
    section = config.checkpoint
    return RESTARTS if ranks > 1 and section.save and (section.every or section.minutes) else 0
