"""What `fourfold train` does once its options are read."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
import torch.distributed as dist

from fourfold.compare import compare_serial
from fourfold.data.loader import Loader
from fourfold.environment import inside_a_job
from fourfold.errors import RollBackError
from fourfold.grid import Grid, Shape
from fourfold.models.transformer import build
from fourfold.train.auto_grid import memory_bytes
from fourfold.train.begin import begin
from fourfold.train.checkpoints import (
    Start,
    any_restarted,
    find_start,
    is_done,
    newest_step,
    require_named_folder,
    roll_back,
    start_at,
    steps_to_profile,
    what_was_lost,
)
from fourfold.train.config import Config, resolve
from fourfold.train.doctor import disagreement
from fourfold.train.launch import RestartPolicy, launch, share_cores
from fourfold.train.loop import Run
from fourfold.train.options import (
    check_options,
    check_profile,
    chosen_device,
    default_folder,
    gpus_left,
    grid_options,
    requested,
    wanted_ranks,
    wanted_restarts,
)
from fourfold.train.process import TERMINATED, listen_to_signals
from fourfold.train.progress import Bar, Plain, output, predicted, progress
from fourfold.train.record import (
    KINDS,
    Event,
    Kept,
    Sink,
    check_folder,
    open_sinks,
    require_unowned,
    require_writing,
    strict,
    write_for_us_alone,
)
from fourfold.train.schema import to_table
from fourfold.train.sources import open_sources
from fourfold.train.story import RankLog, Story, note


def train(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    check_options(options)
    device = chosen_device(options.device)
    if inside_a_job():
        return _train(options, device)
    asked = requested(options, options.ranks)
    check_profile(options, asked)
    ranks = wanted_ranks(asked, options.ranks, device)
    people = sys.stderr if options.print_config else output(options.json)

    def resolved(ranks: int) -> Config:
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

    def decided(config: Config) -> list[str]:
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


def _run(config: Config, grid: Grid, options: argparse.Namespace) -> int:
    """Train and leave a run's folder behind."""
    stream = output(options.json)
    require_named_folder(config.train.out)
    out = Path(grid.broadcast_text(config.train.out or default_folder(config)))
    again = any_restarted(grid)
    resumes = options.resume is not None or again
    check_outputs(grid, out, config, options.json, resumes=resumes)
    # ranks that died and were started again go on from what they have saved since
    start = find_start(grid, out, config, None if again else options.step) if resumes else Start()
    if is_done(start, config, out, stream if grid.rank == 0 else None):
        close(grid)
        return 0
    kept = [Kept()] if options.json is not None else []
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


def prepare(run: Run, start: Start, stream: IO[str], kept: Sequence[Kept]) -> Run:
    """Let it go on from there, open what records it, and say what is about to run."""
    run.take_up(start)
    shown = progress(stream, run.config.train.steps, start.step)
    if start.newer and run.grid.rank == 0:
        gone = ", ".join(folder.name for folder in start.newer)
        shown.say(f"goes back to step {start.step}: removes {gone} and what was recorded after that step")
    taken_up = start.step if start.resumes else None
    told: list[Plain | Bar] = [shown]

    def sinks() -> list[Sink]:
        opened = open_sinks(run.config.log, run.out, run.config, taken_up)
        told.append(Story(run.out, run.config.train.steps, start.step))
        return [*opened, *told, *kept]

    begin(run, sinks, start)
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


def check_outputs(grid: Grid, out: Path, config: Config, json_to: str | None, *, resumes: bool) -> None:
    """Before anything is made: rank 0 must be able to write what is asked for."""

    def check() -> None:
        require_unowned(out)  # which the run would be told later, after all the loading
        if resumes:
            require_writing(save=config.checkpoint.save)
        else:
            check_folder(out, save=config.checkpoint.save)
        if json_to not in (None, "-"):
            Path(json_to).open("a").close()

    grid.run_on_rank0("the run's folder", check)


def join(options: argparse.Namespace, device: str) -> tuple[Grid, Config, str]:
    """This rank's place on the grid, the config resolved for it, and why the planner chose the grid if it did."""
    first = Grid.alone(device)  # joins the job, whose size the grid may depend on
    world = dist.get_world_size()
    del first
    if options.ranks not in (None, world):
        raise ValueError(
            f"--ranks {options.ranks}, but this job has {world}; leave --ranks away where something else starts them"
        )
    config = requested(options, world)
    check_profile(options, config)
    said: list[str] = []
    config = resolve(config, world, on_gpu=device == "cuda", memory_bytes=memory_bytes(device), say=said.append)
    grid = place(config.grid.shape, device)
    if device == "cpu":
        share_cores()
    return grid, config, "".join(said)


def place(shape: Shape, device: str) -> Grid:
    return Grid.of_shape(shape, device=device)


def write_result(path: str | None, run: Run, kept: Sequence[Kept]) -> None:
    """What `--json` asks for, by rank 0."""
    if path is None or run.grid.rank != 0:
        return
    by_kind: dict[str, list[Event]] = {kind: [] for kind in KINDS}
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


def greet(run: Run, told: Sequence[Plain | Bar], start: Start) -> None:
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


def _compare(config: Config, grid: Grid, steps: int) -> int:
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


def close(grid: Grid) -> None:
    """Leave the job in order."""
    grid.close()
    dist.destroy_process_group()
