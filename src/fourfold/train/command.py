"""What `fourfold train` and `fourfold sample` do once their options are read."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.checkpoint.weights import load_weights
from fourfold.compare import compare_serial
from fourfold.data.loader import Loader
from fourfold.data.tokenizer import load_tokenizer
from fourfold.grid import Grid, Shape
from fourfold.models.generate import generate
from fourfold.models.transformer import build
from fourfold.train.config import Config, read_config, resolve
from fourfold.train.job import memory_bytes
from fourfold.train.launch import inside_a_job, launch, listen_to_signals, share_cores
from fourfold.train.loop import Run, begin, open_sources
from fourfold.train.progress import Bar, Plain, output, predicted, progress
from fourfold.train.record import KINDS, Event, Kept, check_folder, open_sinks, strict
from fourfold.train.schema import to_table


def train(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    config = requested(options)
    check_profile(options, config)
    device = chosen_device(options.device)
    if inside_a_job():
        return _train(config, options, device)
    ranks = wanted_ranks(config, options.ranks, device)
    people = sys.stderr if options.print_config else output(options.json)
    config = resolve(
        config,
        ranks,
        on_gpu=device == "cuda",
        memory_bytes=memory_bytes(device),
        say=lambda reason: print(reason, file=people, flush=True),
    )
    if options.print_config:
        print(config.toml(), end="")
        return 0
    if ranks == 1:
        return _train(config, options, device)
    out = config.train.out or default_folder(config)
    decided = ["--ranks", str(ranks), *grid_options(config.grid.shape), "--out", out, "--device", device]
    return launch(ranks, [*arguments, *decided], sys.stderr)


def grid_options(shape: Shape) -> list[str]:
    """The grid for ranks that are started here, so that they need not find it again."""
    sizes = ",".join(f"{axis}={size}" for axis, size in shape.sizes.items())
    return ["--grid", sizes, "--set", f"grid.order={json.dumps(shape.order)}"]


def chosen_device(asked: str | None) -> str:
    found = torch.cuda.is_available()
    if asked == "cuda" and not found:
        raise ValueError("--device cuda, but torch finds no GPU here; leave --device away to train on the CPU")
    return asked or ("cuda" if found else "cpu")


def requested(options: argparse.Namespace) -> Config:
    """The config file with what the command line changes of it."""
    changes = list(options.changes)
    if options.grid is not None:
        changes += [(f"grid.{axis}", size) for axis, size in options.grid.items()]
    if options.data is not None:
        changes.append(("data.sources", [{"path": path} for path in options.data]))
    given = {
        "model.name": options.model,
        "train.steps": options.steps,
        "policy.dtype": options.dtype,
        "train.out": options.out,
        "plan.machine": options.machine,
    }
    changes += [(key, value) for key, value in given.items() if value is not None]
    return read_config(options.config, changes, forget_grid=options.grid is not None)


def check_profile(options: argparse.Namespace, config: Config) -> None:
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


def wanted_ranks(config: Config, ranks: int | None, device: str) -> int:
    """How many local ranks to start."""
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks {ranks}: there must be at least one")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    world = (ranks or gpus or 1) if config.grid.auto else config.grid.shape.world
    if gpus and world > gpus:
        raise ValueError(
            f"{world} ranks, but this machine has {gpus} GPUs; start fewer, or use torchrun on more machines"
        )
    if config.grid.auto:
        return world
    if ranks not in (None, world):
        raise ValueError(
            f"--ranks {ranks}, but the grid {config.grid.shape} has {world}; leave --ranks away or change one"
        )
    return world


def default_folder(config: Config) -> str:
    return f"runs/{Path(config.model.name).name}-{datetime.now():%Y%m%d-%H%M%S}"


def _train(config: Config, options: argparse.Namespace, device: str) -> int:
    """As one rank of the job."""
    if inside_a_job():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler could not run while the ranks wait for each other
    grid, config, reason = join(config, device, options.ranks)
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
    out = Path(grid.hear(config.train.out or default_folder(config)))
    check_outputs(grid, out, config, options.json)
    run = Run(config, grid, out, profile=options.profile)
    shown = progress(stream, config.train.steps)
    kept = [Kept()] if options.json is not None else []
    begin(run, lambda: [*open_sinks(config.log, out, config), shown, *kept])
    if grid.rank == 0:
        greet(run, shown)
    try:
        run.train()
        if config.train.save:
            run.save()
    except BaseException:
        with suppress(OSError):  # must not hide what ended the run
            write_result(options.json, run, kept)
        raise
    write_result(options.json, run, kept)
    if grid.rank == 0:
        print(f"\n{out}: config, metrics{', weights' if config.train.save else ''}.", file=stream)
        print(f"  fourfold report {out}", file=stream)
        if config.train.save:
            print(f"  fourfold sample {out} --prompt 'import '", file=stream)
    close(grid)
    return 0


def check_outputs(grid: Grid, out: Path, config: Config, json_to: str | None) -> None:
    """Before anything is made: rank 0 must be able to write what is asked for."""

    def check() -> None:
        check_folder(out, save=config.train.save)
        if json_to not in (None, "-"):
            Path(json_to).open("a").close()

    grid.first_alone("the run's folder", check)


def join(config: Config, device: str, ranks: int | None) -> tuple[Grid, Config, str]:
    """This rank's place on the grid, the config resolved for it, and why the planner chose the grid if it did."""
    first = Grid.alone(device)  # joins the job, whose size the grid may depend on
    world = dist.get_world_size()
    del first
    if ranks not in (None, world):
        raise ValueError(
            f"--ranks {ranks}, but this job has {world}; leave --ranks away where something else starts them"
        )
    said: list[str] = []
    config = resolve(config, world, on_gpu=device == "cuda", memory_bytes=memory_bytes(device), say=said.append)
    grid = place(config.grid.shape, device)
    if device == "cpu":
        share_cores()
    return grid, config, "".join(said)


def place(shape: Shape, device: str) -> Grid:
    return Grid(shape.x, shape.y, shape.z, shape.data, order=shape.order, device=device)


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
        "end": by_kind["end"][-1] if by_kind["end"] else None,
    }
    text = json.dumps(strict(result), indent=1)
    if path == "-":
        print(text, flush=True)
    else:
        Path(path).write_text(text + "\n")


def greet(run: Run, shown: Plain | Bar) -> None:
    """What is about to run."""
    config, grid, policy = run.config, run.grid, run.config.policy
    batch = config.batch
    tokens = sum(source.tokens for source in run.sources)
    micro = f" in {batch.micro_steps} micro-steps" if batch.micro_steps > 1 else ""
    shown.say(
        f"{config.model.name}: {run.model_config.parameters / 1e6:.1f}M parameters, {policy.dtype}, "
        f"{grid.shape.world} rank{'s' if grid.shape.world > 1 else ''} ({grid}) on {grid.device.type}"
    )
    names = ", ".join(source.name for source in run.sources)
    shown.say(f"{tokens / 1e6:.1f}M tokens of {names}; {batch.rows} x {batch.seq} tokens a step{micro}")
    sizes = ", ".join(f"{kind} {nbytes / 1e6:.1f} MB" for kind, nbytes in run.kept_bytes.items())
    shown.say(f"kept for backward by a rank, by kind of recompute: {sizes}; in use: {policy.recompute}")
    shown.say(f"peak of a device: {run.peak.flops / 1e12:.3g} TFLOP/s ({run.peak.origin})")
    if "predicted" in run.stored:
        shown.say(predicted(run.stored["predicted"]))
    if run.evaluation is None:
        shown.say("no evaluation: data.held_out or train.evaluate_every is 0")
    shown.say(f"knowing only how frequent each token is, the loss would be {run.entropy:.4f} (unigram entropy)\n")


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


def sample(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    for name in ("config.toml", "weights"):
        if not (options.folder / name).exists():
            raise FileNotFoundError(
                f"{options.folder} has no {name}; give the folder of a run that has ended, trained with train.save"
            )
    config = read_config(options.folder / "config.toml")
    shape = Shape(**options.grid)
    device = chosen_device(options.device)
    if not inside_a_job() and shape.world > 1:
        return launch(shape.world, [*arguments, "--device", device], sys.stderr)
    grid = place(shape, device)
    listen_to_signals()
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod)
    policy = replace(config.build_policy(), compile=False)  # every token would be another shape to compile
    model = build(config.model.build(), grid, policy=policy, dtype=config.policy.parameters)
    load_weights(model, options.folder / "weights")
    prompt = tokenizer.encode(options.prompt).tolist() or [tokenizer.eod]
    (found,) = generate(
        model,
        [prompt],
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        ids=min(tokenizer.vocab, model.config.vocab),
        seed=options.seed,
        stop=tokenizer.eod,
    )
    if grid.rank == 0:
        print(options.prompt + tokenizer.decode(found))
    close(grid)
    return 0


def close(grid: Grid) -> None:
    """Leave the job in order."""
    grid.close()
    dist.destroy_process_group()
