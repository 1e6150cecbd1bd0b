"""What `fourfold train` does once its options are read."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from fourfold.axes import AXES
from fourfold.commands.doctor import disagreement
from fourfold.commands.local_ranks import (
    chosen_device,
    close,
    default_folder,
    grid_options,
    require_world,
    wanted_ranks,
)
from fourfold.compare import compare_serial
from fourfold.data.loader import Loader
from fourfold.environment import inside_a_job, is_watched
from fourfold.errors import RollBackError
from fourfold.grid import Grid
from fourfold.models.transformer import build
from fourfold.train.auto_grid import memory_bytes
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
    what_was_lost,
)
from fourfold.train.config import TrainConfig, read_config, resolve
from fourfold.train.launch import RestartPolicy, launch, share_cores
from fourfold.train.loop import Run, open_sources
from fourfold.train.process import TERMINATED, listen_to_signals
from fourfold.train.progress import PlainProgress, ProgressBar, output, predicted, progress
from fourfold.train.run_folder import (
    KINDS,
    MemorySink,
    RunEvent,
    Sink,
    check_folder,
    open_sinks,
    require_unowned,
    require_writing,
    strict,
    write_for_us_alone,
)
from fourfold.train.run_log import RankLog, RunLog, note
from fourfold.train.schema import to_table


def train(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    check_options(options)
    device = chosen_device(options.device)
    if inside_a_job():
        return _train(options, device)
    asked = requested(options, options.ranks)
    check_profile(options, asked)
    ranks = wanted_ranks(asked, options.ranks, device)
    people = sys.stderr if options.print_config else output(options.json)

    def resolved(ranks: int) -> TrainConfig:
        return resolve(
            asked,
            ranks,
            on_gpu=device == "cuda",
            memory_bytes=memory_bytes(device),
            say=lambda reason: print(reason, file=people, flush=True),
        )

    config = resolved(ranks)
    if options.print_config:
        print(config.toml(), end="")
        return 0
    restarts = wanted_restarts(config, options.restarts, ranks)
    if ranks == 1 and not restarts:
        return _train(options, device)
    out = config.train.out or default_folder(config)
    if options.resume is None and options.compare_serial is None:
        check_folder(Path(out), save=config.checkpoint.save)  # ranks that are started again take a run there for theirs
    if options.resume is not None:
        require_unowned(options.resume)
        start = start_at(options.resume, config, options.step)
        if is_done(start, config, options.resume, people):
            return 0

    def decided(config: TrainConfig) -> list[str]:
        """What the ranks of such a run are told."""
        world = str(config.grid.shape.world)
        return [*arguments, "--ranks", world, *grid_options(config.grid.shape), "--out", out, "--device", device]

    may_shrink = asked.grid.auto and options.ranks is None and device == "cuda"
    return launch(
        ranks,
        decided(config),
        sys.stderr,
        restarts=restarts,
        grace=config.watch.grace,
        policy=RunRestarts(Path(out), (lambda left: decided(resolved(left))) if may_shrink else None),
    )


class RunRestarts(RestartPolicy):
    """Restarts a run from its folder.

    `arguments_for` gives the arguments of a start on fewer ranks, where GPUs are lost; without it the number of ranks
    stays.
    """

    def __init__(self, out: Path, arguments_for: Callable[[int], Sequence[str]] | None = None) -> None:
        self._out, self._arguments_for = out, arguments_for

    def resume_step(self) -> int:
        return newest_step(self._out)

    def resume_text(self, step: int) -> str:
        return f"after step {step}" if step else "from step 0"

    def after_sigterm(self) -> str:
        return what_was_lost(self._out)

    def evidence(self, since: float) -> str:
        return disagreement(self._out, since)

    def next_start(self, ranks: int, arguments: Sequence[str]) -> tuple[int, Sequence[str]]:
        if self._arguments_for is not None and 0 < (left := gpus_left()) < ranks:
            return left, self._arguments_for(left)
        return ranks, arguments

    def note(self, kind: str, text: str) -> None:
        note(self._out, kind, text)


def _train(options: argparse.Namespace, device: str) -> int:
    """As one rank of the job."""
    write_for_us_alone()
    if inside_a_job():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler could not run while the ranks wait for each other
    grid, config, reason = join(options, device)
    if reason and grid.rank == 0:
        print(reason, file=sys.stderr if options.print_config else output(options.json), flush=True)
    listen_to_signals()
    if options.print_config:
        if grid.rank == 0:
            print(config.toml(), end="")
        return 0
    if options.compare_serial is not None:
        if options.json is not None:
            raise ValueError("--compare-serial prints a table and writes no --json; leave one of them away")
        return _compare(config, grid, options.compare_serial)
    return _run(config, grid, options)


def _run(config: TrainConfig, grid: Grid, options: argparse.Namespace) -> int:
    """Train and leave a run's folder behind."""
    stream = output(options.json)
    require_named_folder(config.train.out)
    out = Path(grid.hear(config.train.out or default_folder(config)))
    again = any_restarted(grid)
    resumes = options.resume is not None or again
    check_outputs(grid, out, config, options.json, resumes=resumes)
    # ranks that died and were started again go on from what they have saved since
    start = find_start(grid, out, config, None if again else options.step) if resumes else Start()
    if is_done(start, config, out, stream if grid.rank == 0 else None):
        close(grid)
        return 0
    kept = [MemorySink()] if options.json is not None else []
    profile = steps_to_profile(options.profile, start.step, asked=not again)
    while True:
        run = prepare(Run(config, grid, out, profile=profile), start, stream, kept)
        try:
            with RankLog(out, grid), run.stop.listening():
                run.train()
            break
        except RollBackError as error:
            del run  # its memory is needed
            start = roll_back(grid, out, config, error)
            profile = steps_to_profile(profile, start.step, asked=False)
            for one in kept:
                one.rewind(start.step)
        except BaseException:
            with suppress(OSError):  # must not hide what ended the run
                write_result(options.json, run, kept)
            raise
    write_result(options.json, run, kept)
    if grid.rank == 0:
        farewell(run, stream)
    close(grid)
    return TERMINATED if run.stopped else 0


def prepare(run: Run, start: Start, stream: IO[str], kept: Sequence[MemorySink]) -> Run:
    """Let it go on from there, open what records it, and say what is about to run."""
    run.load(start)
    shown = progress(stream, run.config.train.steps, start.step)
    if start.newer and run.grid.rank == 0:
        gone = ", ".join(folder.name for folder in start.newer)
        shown.say(f"goes back to step {start.step}: removes {gone} and what was recorded after that step")
    taken_up = start.step if start.resumes else None
    told: list[PlainProgress | ProgressBar] = [shown]

    def sinks() -> list[Sink]:
        opened = open_sinks(run.config.log, run.out, run.config, taken_up)
        told.append(RunLog(run.out, run.config.train.steps, start.step))
        return [*opened, *told, *kept]

    run.begin(sinks, start)
    if run.grid.rank == 0:
        greet(run, told, start)
    return run


def farewell(run: Run, stream: IO[str]) -> None:
    """What the run has left behind, and what can be done with it."""
    out, saved = run.out, run.saving is not None
    if run.stopped:
        what = f"saved at step {run.step}; `fourfold train --resume {out}` goes on" if saved else "nothing is saved"
        print(f"fourfold: asked to stop by SIGTERM; {what}", file=sys.stderr, flush=True)
        return
    print(f"\n{out}: config, metrics{', checkpoints' if saved else ''}.", file=stream)
    print(f"  fourfold report {out}", file=stream)
    if saved:
        print(f"  fourfold sample {out} --prompt 'import '", file=stream)


def check_outputs(grid: Grid, out: Path, config: TrainConfig, json_to: str | None, *, resumes: bool) -> None:
    """Before anything is made: rank 0 must be able to write what is asked for."""

    def check() -> None:
        require_unowned(out)  # which the run would be told later, after all the loading
        if resumes:
            require_writing(save=config.checkpoint.save)
        else:
            check_folder(out, save=config.checkpoint.save)
        if json_to not in (None, "-"):
            Path(json_to).open("a").close()

    grid.first_alone("the run's folder", check)


def join(options: argparse.Namespace, device: str) -> tuple[Grid, TrainConfig, str]:
    """This rank's place on the grid, the config resolved for it, and why the planner chose the grid if it did."""
    first = Grid.alone(device)  # joins the job, whose size the grid may depend on
    world = dist.get_world_size()
    del first
    require_world(options.ranks, world)
    config = requested(options, world)
    check_profile(options, config)
    said: list[str] = []
    config = resolve(config, world, on_gpu=device == "cuda", memory_bytes=memory_bytes(device), say=said.append)
    grid = Grid.of_shape(config.grid.shape, device=device)
    if device == "cpu":
        share_cores()
    return grid, config, "".join(said)


def write_result(path: str | None, run: Run, kept: Sequence[MemorySink]) -> None:
    """What `--json` asks for, by rank 0."""
    if path is None or run.grid.rank != 0:
        return
    by_kind: dict[str, list[RunEvent]] = {kind: [] for kind in KINDS}
    for event in kept[0].events:
        by_kind[event["event"]].append({key: value for key, value in event.items() if key != "event"})
    result = {
        "config": to_table(run.config),
        "grid": run.grid.shape.sizes,
        "predicted": run.stored.get("predicted"),
        "compared": run.stored.get("compared"),
        "steps": by_kind["step"],
        "evaluations": by_kind["evaluation"],
        "skipped": by_kind["skipped"],
        "spikes": by_kind["spike"],
        "saved": by_kind["saved"],
        "resumed": by_kind["resumed"],
        "stragglers": by_kind["straggler"],
        "end": by_kind["end"][-1] if by_kind["end"] else None,
    }
    text = json.dumps(strict(result), indent=1)
    if path == "-":
        print(text, flush=True)
    else:
        Path(path).write_text(text + "\n")


def greet(run: Run, told: Sequence[PlainProgress | ProgressBar], start: Start) -> None:
    """Tell what is about to run."""
    for text in greeting(run, start):
        for one in told:
            one.say(text)


def greeting(run: Run, start: Start) -> Iterator[str]:
    config, grid, policy = run.config, run.grid, run.config.policy
    batch = config.batch
    tokens = sum(source.tokens for source in run.sources)
    micro = f" in {batch.micro_steps} micro-steps" if batch.micro_steps > 1 else ""
    yield (
        f"{config.model.name}: {run.model_config.parameters / 1e6:.1f}M parameters, {policy.dtype}, "
        f"{grid.shape.world} rank{'s' if grid.shape.world > 1 else ''} ({grid}) on {grid.device.type}"
    )
    names = ", ".join(source.name for source in run.sources)
    yield f"{tokens / 1e6:.1f}M tokens of {names}; {batch.rows} x {batch.seq} tokens a step{micro}"
    sizes = ", ".join(f"{kind} {nbytes / 1e6:.1f} MB" for kind, nbytes in run.kept_bytes.items())
    yield f"kept for backward by a rank, by kind of recompute: {sizes}; in use: {policy.recompute}"
    yield f"peak of a device: {run.peak.flops / 1e12:.3g} TFLOP/s ({run.peak.origin})"
    if "predicted" in run.stored:
        yield predicted(run.stored["predicted"])
    yield from start.notes
    if run.evaluation is None:
        yield "no evaluation: data.held_out or train.evaluate_every is 0"
    yield f"knowing only how frequent each token is, the loss would be {run.entropy:.4f} (unigram entropy)\n"


def _compare(config: TrainConfig, grid: Grid, steps: int) -> int:
    """Train beside one process, on the run's own batches, each in one micro-step, and show the differences."""
    if steps < 1 or config.data.documents:
        raise ValueError(
            f"--compare-serial {steps} with data.documents={config.data.documents}: compare at least one step, of rows "
            "that are not packed with documents"
        )
    model, policy, seed = config.model.build(), config.build_policy(), config.train.seed
    with tempfile.TemporaryDirectory() as cache:
        loader = Loader(
            open_sources(config, grid, Path(cache)),
            [source.weight for source in config.data.sources],
            Grid.alone(grid.device),  # whole batches
            rows=config.batch.rows,
            seq=config.batch.seq,
            vocab=model.vocab,
            seed=seed,
            held_out=config.data.held_out,
            device=torch.device("cpu"),
        )
        with loader:
            batches = [loader.next()[0][:2] for _ in range(steps)]
    found = compare_serial(
        lambda place: build(model, place, policy=policy, seed=seed, dtype=config.policy.parameters),
        batches,
        grid,
        max_norm=config.optimizer.clip,
    )
    if grid.rank == 0:
        print(found)
    close(grid)
    return 0


def check_options(options: argparse.Namespace) -> None:
    """Refuse what does not go together."""
    if options.resume is not None:
        if options.out is not None and Path(options.out) != options.resume:
            raise ValueError(
                f"--resume {options.resume} goes on in that folder, so --out {options.out} has no use; leave one away"
            )
        if options.compare_serial is not None:
            raise ValueError("--compare-serial trains no run and has none to --resume; leave one of them away")
    elif options.step is not None:
        raise ValueError(f"--step {options.step} names a checkpoint to go on from; give its run with --resume")
    if options.restarts is not None:
        if options.restarts < 0:
            raise ValueError(f"--restarts {options.restarts}: there cannot be fewer than 0")
        if inside_a_job() and not is_watched():
            raise ValueError("--restarts is for ranks that are started here; torchrun has --max-restarts for its own")


def requested(options: argparse.Namespace, ranks: int | None) -> TrainConfig:
    """The config file, or that of the run which goes on, with what the command line changes of it.

    A run that goes on with another number of ranks has its grid found again.
    """
    source = config_to_read(options.config, options.resume, [options.model])
    changes = list(options.changes)
    if options.grid is not None:
        changes += [(f"grid.{axis}", size) for axis, size in options.grid.items()]
    if options.data is not None:
        changes.append(("data.sources", [{"path": path} for path in options.data]))
    given = {
        "model.name": options.model,
        "train.steps": options.steps,
        "policy.dtype": options.dtype,
        "train.out": options.out if options.resume is None else str(options.resume),
        "plan.machine": options.machine,
    }
    changes += [(key, value) for key, value in given.items() if value is not None]
    config = read_config(source, changes, forget_grid=options.grid is not None)
    if options.resume is None or options.grid or config.grid.auto:
        return config
    if ranks in (None, config.grid.shape.world):
        return config
    # the order that is stored was found for the other grid
    return read_config(source, [("grid.order", list(AXES)), *changes], forget_grid=True)


def check_profile(options: argparse.Namespace, config: TrainConfig) -> None:
    """Refuse to profile steps that there will not be."""
    if not options.profile:
        return
    if options.compare_serial is not None:
        raise ValueError("--compare-serial trains no run and has no steps to --profile; leave one of them away")
    first, last, steps = options.profile[0], options.profile[-1], config.train.steps
    if last > steps:
        asked = first if first == last else f"{first}-{last}"
        raise ValueError(
            f"--profile {asked}: this run has train.steps={steps}; name a step from 1 to {steps}, or such as 1-{steps}"
        )


def gpus_left() -> int:
    """That still answer, asked by a new process: this one has counted them when it began."""
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    return int(found.stdout) if found.returncode == 0 else 0


def wanted_restarts(config: TrainConfig, asked: int | None, ranks: int) -> int:
    """How often to start local ranks again: by default where there is something to go on from."""
    if asked is not None:
        return asked
    return 3 if ranks > 1 and config.checkpoint.save and config.checkpoint.every else 0
