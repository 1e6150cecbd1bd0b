"""`fourfold plan`: reads the model, the machine and the batch, searches for the best grids, and shows them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

import torch

from fourfold import models
from fourfold.atomic import write_json, write_text
from fourfold.axes import AXES
from fourfold.commands.plan_memory import RATE_OPTIONS, plan_memory
from fourfold.commands.plan_numbers import compare_numbers
from fourfold.errors import UnsupportedModelError
from fourfold.grid import Shape
from fourfold.models.config import ModelConfig
from fourfold.models.open import ModelBuilder, config_json_path, open_model, why_data_only
from fourfold.models.sizes import SIZES
from fourfold.planner.explain import add_training, model_facts, plan_document, reasons, why_not_chosen
from fourfold.planner.goodput import FailureRates
from fourfold.planner.grid_plan import GridPlan
from fourfold.planner.lengths import LengthSample
from fourfold.planner.machine import DTYPES, Machine, load_machine
from fourfold.planner.price import PipePrice, Price, Task
from fourfold.planner.search import search, search_built
from fourfold.planner.simulate import chrome_trace, chrome_trace_of_pipe
from fourfold.planner.space import Space
from fourfold.policy import Overlap
from fourfold.report.plan_page import write_plan_page
from fourfold.report.plan_text import (
    PlanDocument,
    PlannedGrid,
    next_commands,
    pipeline_text,
    plan_table,
    why_text,
)
from fourfold.report.units import plural
from fourfold.train.config import (
    MOST_TOKENS,
    BatchSection,
    CheckpointSection,
    GridSection,
    ModelSection,
    PipelineSection,
    PlanSection,
    PolicySection,
    TrainConfig,
    TrainSection,
)
from fourfold.train.defaults import batch_tokens, rows_near, sequence

ONLY_YOU = {
    "data.sources": "YOURS: the text or the tokens to train on; what stands here only shows that the run works.",
    "data.tokenizer": "YOURS: the tokenizer.json of the model, unless the sources are tokens already.",
    "train.steps": "YOURS: how long to train; fourfold plan --tokens computes the steps.",
}
"""Comments of a planned config, at what the planner cannot know."""
NAMED_OTHERWISE = ("dtype", "reduce_dtype", "router_dtype", "compile")
"""Keys of a config's policy that hold a name or `auto`, where a `Policy` holds a dtype or a bool."""


def plan(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Search and show the plan; return the exit code."""
    check(options)
    machine = load_machine(options.machine)
    try:
        opened = open_model(options.model)
    except UnsupportedModelError as error:  # of any other model the plan has no grids, but the memory
        return plan_memory(options, config_json_path(options.model), name_of(options.model), machine, error.reason)
    for note in opened.notes:
        _say(note)
    if reason := why_data_only(opened.model):
        raise ValueError(f"--model {options.model}: {reason}")
    if isinstance(options.devices, list):
        if not isinstance(opened.model, ModelConfig):
            raise ValueError(f"--model {options.model}: your own module is planned for one number of --devices")
        task = task_of(options, opened.model, machine, max(options.devices))
        return compare_numbers(options, task, name_of(options.model), failure_rates(options))
    if counts_failures(options):
        # how many parameters a module has is known only when it was run; with none a checkpoint takes the least time
        parameters = opened.model.parameters if isinstance(opened.model, ModelConfig) else 0
        failure_rates(options).job(parameters, options.devices).require_progress()
    if isinstance(opened.model, ModelConfig):
        found = plan_model(options, opened.model, machine)
        facts = model_facts(opened.model, name_of(options.model))
    else:
        found = plan_module(options, opened.model, machine)
        facts = {"name": options.model, "parameters": found.best.parameters}
    asked = None if options.why is None else why(found, Shape(**options.why))
    document = plan_document(found, facts, others=bool(options.json or options.html))
    if counts_failures(options):
        add_training(document, failure_rates(options), options.tokens, options.price)
    document["why"] = asked
    if isinstance(found.best, Price):
        best = document["grids"][0]
        minutes = float(f"{best['interval_seconds'] / 60:.3g}") if document["failures"] else None
        config = run_config(found.best, options.model, options.machine, options.tokens, minutes)
        comments = {**ONLY_YOU, **pipeline_comment(best), **checkpoint_comment(best)}
        document["config_toml"] = config.toml(comments, unset=False)
    return show(options, arguments, document, found)


def pipeline_comment(best: PlannedGrid) -> dict[str, str]:
    """Return the comment of a config about the stages and the schedule of the plan; none without a pipe axis."""
    return {"grid.pipe": pipeline_text(best)} if best["pipeline"] else {}


def checkpoint_comment(best: PlannedGrid) -> dict[str, str]:
    """Return the comment of a config about the interval between checkpoints; none if the plan did not choose it."""
    if "interval_steps" not in best:
        return {}
    return {"checkpoint.minutes": f"The best interval by the plan, {best['interval_steps']:,} steps."}


def counts_failures(options: argparse.Namespace) -> bool:
    """Return whether the plan of one number of devices is to count failures and checkpoints."""
    return any(getattr(options, name) is not None for name in ("tokens", *RATE_OPTIONS))


def failure_rates(options: argparse.Namespace) -> FailureRates:
    """Return what the options say about failures and checkpoints; the rest is assumed."""
    for name, least in (("mtbf", "above 0 hours"), ("storage", "above 0 GB/s")):
        value = getattr(options, name)
        if value is not None and not 0 < value < inf:
            raise ValueError(f"--{name} {value:g}: it must be {least}, and finite")
    given = {
        "device_hours": options.mtbf,
        "restart_seconds": options.restart,
        "stop_seconds": options.checkpoint,
        "storage_bytes_per_second": None if options.storage is None else 1e9 * options.storage,
    }
    return FailureRates(**{name: value for name, value in given.items() if value is not None})


def _check_why(options: argparse.Namespace) -> None:
    if options.why == {}:
        raise ValueError("--why auto: name the grid to explain, such as --why x=8,z=4")
    if options.why is not None and (asked := Shape(**options.why)).world != options.devices:
        raise ValueError(
            f"--why {asked}: that grid has {asked.world} ranks, but the plan has {options.devices} devices; give "
            f"sizes with the product {options.devices}, or other --devices"
        )


def check(options: argparse.Namespace) -> None:
    """Raise before the search if an option makes no sense."""
    for name in ("devices", "top", "seq"):
        value = getattr(options, name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"--{name} {value}: it must be at least 1")
    if (options.batch_tokens or 0) > MOST_TOKENS:
        raise ValueError(f"--batch-tokens {options.batch_tokens:g}: a step has at most {MOST_TOKENS} tokens")
    if isinstance(options.devices, list):
        check_numbers(options)
    failure_rates(options)
    if options.grid and options.why is not None:
        raise ValueError("--grid prices one grid, and --why compares a grid with the best one; leave out one of them")
    if options.price is not None and not 0 < options.price < inf:
        raise ValueError(f"--price {options.price:g}: it must be above 0")
    if options.price is not None and options.tokens is None:
        raise ValueError(f"--price {options.price:g} needs the length of the training; give --tokens, such as 300G")
    _check_why(options)


def check_numbers(options: argparse.Namespace) -> None:
    """Raise if several numbers of devices are asked for, and something that shows one plan."""
    for name in ("grid", "why", "config", "html", "trace"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} shows one plan; give one number of --devices, not several")


def plan_model(options: argparse.Namespace, config: ModelConfig, machine: Machine) -> GridPlan:
    """Plan a reference model."""
    task = task_of(options, config, machine, options.devices)
    shapes = (Shape(**options.grid),) if options.grid else None
    return search(task, options.devices, space=Space(shapes, axes=AXES), top=options.top, risk=options.risk)


def task_of(options: argparse.Namespace, config: ModelConfig, machine: Machine, devices: int) -> Task:
    """Return the question about a reference model, whose batch so many devices can share."""
    seq = options.seq or sequence(config, on_gpu=machine.device != "cpu")
    if config.positions == "learned" and seq > config.seq:
        raise ValueError(
            f"--seq {seq} is longer than the {config.seq} learned positions of {options.model}; give {config.seq} or "
            "less, or a model with rotary positions, such as llama-3-8b"
        )
    # `fourfold train` records the steps of its models unless its config turns that off
    return replace(make_task(options, config, machine, seq, devices), captured=True)


def plan_module(options: argparse.Namespace, build: ModelBuilder, machine: Machine) -> GridPlan:
    """Plan the user's own module."""
    if options.seq is None or options.batch_tokens is None:
        raise ValueError(
            f"--model {options.model} has no sequence length and batch of its own; give --seq and --batch-tokens"
        )
    if options.grid:
        raise ValueError(f"--model {options.model}: your own module is planned on all grids; leave out --grid")
    if options.config is not None:
        raise ValueError(
            f"--config: {options.model} is planned as a function of grid and policy; fourfold train takes a function "
            "that returns the plain module, as model.name, and the grid of this plan as --grid "
            "(docs/trainer.md#models-of-your-own)"
        )
    placeholder = models.config("gpt-tiny")  # a task needs a config, but the search for a module never reads it
    task = make_task(options, placeholder, machine, options.seq, options.devices)
    return search_built(task, build, options.devices, progress=_say)


def _say(text: str) -> None:
    print(f"fourfold: {text}", file=sys.stderr)


def name_of(model: str) -> str:
    """Return the name to show for a model: a published size, a file's name, or the folder of a config.json."""
    path = Path(model)
    if model in SIZES:
        return model
    if path.is_dir():
        return path.resolve().name
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def make_task(options: argparse.Namespace, config: ModelConfig, machine: Machine, seq: int, devices: int) -> Task:
    """Return the question for the planner: a model, a machine and a batch for so many devices."""
    if devices > machine.devices_per_node and machine.between is None:
        raise ValueError(
            f"--devices {devices}: {machine.name} is one node with {machine.devices_per_node} devices: its "
            "file has no [between]; use a machine with a network, or fewer devices"
        )
    tokens = options.batch_tokens
    if tokens is None:
        tokens = batch_tokens(config, on_gpu=machine.device != "cpu")
        _say(f"{tokens:,} tokens per step, the default of fourfold train for a model of this size (--batch-tokens)")
    rows = rows_near(tokens, seq, devices)
    if abs(rows * seq - tokens) > 0.01 * tokens:  # less than 1% is not worth a line
        _say(f"the batch has {plural(rows, 'sequence')}, {rows * seq:,} tokens: the nearest number that grids divide")
    compute = torch.bfloat16 if "bf16" in machine.gemm else torch.float32
    if options.dtype is not None:
        compute = next(dtype for dtype, name in DTYPES.items() if name == options.dtype)
    sample = None if options.lengths is None else LengthSample.read(options.lengths)
    imbalance = options.imbalance
    if imbalance != 1 and not config.experts:
        raise ValueError(f"--imbalance {imbalance:g} is for a mixture of experts, and this model has none")
    if not 1 <= imbalance <= max(1, config.experts):
        most = f"1 (all experts have equally many tokens) to experts={config.experts} (one has all)"
        raise ValueError(f"--imbalance {imbalance:g} must be from {most}")
    return Task(config, machine, rows, seq, compute=compute, documents=sample, imbalance=imbalance)


def run_config(
    best: Price, model: str, machine: str, tokens: float | None = None, checkpoint_minutes: float | None = None
) -> TrainConfig:
    """Return the config with which `fourfold train` runs the best candidate, for this many tokens if they are given.

    Without minutes between checkpoints, `fourfold train` chooses them.
    """
    candidate, task = best.candidate, best.task
    keys = [field.name for field in fields(PolicySection) if field.name not in NAMED_OTHERWISE]
    shared = {key: getattr(candidate.policy, key) for key in keys}
    if task.machine.device != "cpu" and not candidate.policy.compile:
        shared["compile"] = False  # otherwise auto, which compiles on a GPU
    stages, schedule = candidate.policy.stages, candidate.policy.schedule
    train = TrainSection(graph="auto" if task.captured else "off")
    return TrainConfig(
        # a published size by its name, any other model by all its fields
        model=ModelSection(name=model) if model in SIZES else ModelSection(**asdict(task.config)),
        grid=GridSection(**candidate.shape.named, order=candidate.shape.order),  # type: ignore[arg-type]
        policy=PolicySection(dtype=task.dtype, **shared),  # type: ignore[arg-type]
        overlap=Overlap(halves=best.halves),
        pipeline=PipelineSection() if stages is None else PipelineSection.of(stages, schedule),
        batch=BatchSection(rows=task.rows, seq=task.seq, micro_steps=candidate.micro_steps),
        train=train if tokens is None else replace(train, steps=ceil(tokens / task.tokens)),
        checkpoint=CheckpointSection(minutes=checkpoint_minutes),
        plan=PlanSection(machine=machine),
    )


def why(found: GridPlan, shape: Shape) -> dict[str, Any]:
    """Explain why a grid is slower than the best one, or was not chosen although it is faster, or beats the next one.

    A grid that was not ranked is priced and ranked now.
    """
    best, *others = found.ranked
    asked = {"grid": shape.named, "against": best.candidate.shape.named}
    if shape.named == best.candidate.shape.named:
        if not others or not isinstance(best, Price):
            return {**asked, "lines": ["it is the best grid, and no other was priced"]}
        second = others[0].candidate.shape
        lines = [f"it is the best grid; the next, {second}, loses this:", *reasons(others[0], best)]
        if others[0].seconds < best.seconds:
            lines[0] = f"it is the best grid; of the next, {second}: {why_not_chosen(found, others[0])}"
        return {"grid": shape.named, "against": second.named, "lines": lines}
    loser = next((each for each in found.ranked if each.candidate.shape.named == shape.named), None)
    if loser is None:
        refused = [each.reason for each in found.refused if each.shape.named == shape.named]
        if refused or not isinstance(best, Price):
            return {**asked, "lines": [f"it was refused: {refused[0]}" if refused else "it was not tried"]}
        loser = search(found.task, found.devices, space=Space(shapes=(shape,)), top=1).best
        found.ranked = [best, *sorted([*others, loser], key=lambda each: each.seconds)]  # the choice stays the first
    lines = reasons(loser, best)
    if loser.seconds < best.seconds:  # the choice was not made by seconds alone
        lines = [why_not_chosen(found, loser), *lines]
    return {**asked, "lines": lines}


def show(options: argparse.Namespace, arguments: Sequence[str], document: PlanDocument, found: GridPlan) -> int:
    """Write the files that the options ask for, and print the plan, with the commands to run next."""
    written = [str(path) for path in (options.html, options.trace, options.config) if path is not None]
    if options.html is not None:
        write_plan_page(dict(document), options.html)
    if options.trace is not None:
        best = found.best
        piped = isinstance(best, PipePrice)
        write_json(options.trace, chrome_trace_of_pipe(best.played) if piped else chrome_trace(best.timeline().spans))
    if options.config is not None:
        write_text(options.config, document["config_toml"])
    if options.json == "-":
        print(json.dumps(document, indent=1))
    else:
        if options.json is not None:
            write_json(Path(options.json), dict(document))
            written.append(options.json)
        print(why_text(document) if document["why"] is not None else plan_table(document, options.top))
        if document["why"] is None:
            print("\n".join(["", "next:", *(f"  {command}" for command in next_commands(document, arguments))]))
    if written:
        _say(f"wrote {', '.join(written)}")
    return 0
