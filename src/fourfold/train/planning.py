"""What `fourfold plan` does: reads the model, the machine and the batch, searches, shows."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fourfold import models
from fourfold.cost.explain import model_facts, plan_document, reasons
from fourfold.cost.machine import DTYPES, Machine, load_machine
from fourfold.cost.modules import search_module
from fourfold.cost.price import Priced, Task
from fourfold.cost.search import Plan, Space, search
from fourfold.cost.simulate import chrome_trace
from fourfold.grid import Shape
from fourfold.models.config import Config as ModelConfig
from fourfold.models.outside import only_over_data, read_model
from fourfold.models.sizes import SIZES
from fourfold.overlap import Overlap
from fourfold.report.plan import write_plan_page
from fourfold.report.plan_text import plan_table, why_text
from fourfold.train.config import BatchSection, Config, GridSection, Model, PolicySection
from fourfold.train.record import write_json, write_text


def plan(options: argparse.Namespace, _: object) -> int:
    opened, machine = read_model(options.model), load_machine(options.machine)
    for note in (*opened.notes, only_over_data(opened.model)):
        if note:
            print(f"fourfold: {note}", file=sys.stderr)
    if isinstance(opened.model, ModelConfig):
        task = make_task(options, machine, opened.model)
        found = search(task, options.devices, top=options.top)
        document = plan_document(found, model_facts(opened.model, Path(options.model).stem))
        document["config_toml"] = run_config(found.best, options.model).toml()
    else:
        task = make_task(options, machine)
        found = search_module(task, opened.model, options.devices, progress=_say)
        document = plan_document(found, {"name": options.model, "parameters": found.best.parameters})
    if options.why is not None:
        document["why"] = why(found, Shape(**options.why))
    return show(options, document, found)


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(f"fourfold: {text}", file=sys.stderr)


def make_task(options: argparse.Namespace, machine: Machine, config: ModelConfig | None = None) -> Task:
    if options.devices < 1:
        raise ValueError(f"--devices {options.devices}: there must be at least one")
    if options.top < 1:
        raise ValueError(f"--top {options.top}: show at least one grid")
    if config is None and options.seq is None:
        raise ValueError(f"--model {options.model} does not say how long its sequences are; give --seq")
    seq = options.seq or config.seq  # type: ignore[union-attr]
    if config is not None and config.positions == "learned" and seq > config.seq:
        raise ValueError(f"--seq {seq} is longer than the {config.seq} learned positions of {options.model}")
    rows = rows_of(options.batch_tokens, seq, options.devices)
    compute = torch.bfloat16 if "bf16" in machine.gemm else torch.float32
    if options.dtype is not None:
        compute = next(dtype for dtype, name in DTYPES.items() if name == options.dtype)
    return Task(config or models.config("gpt-tiny"), machine, rows, seq, compute=compute)


def rows_of(tokens: float, seq: int, devices: int) -> int:
    """Sequences of a batch of about so many tokens: within a twentieth of it the number that most grids divide."""
    rows = max(1, round(tokens / seq))
    steps = [devices << power for power in range(12, -1, -1)]
    steps += [step for step in range(devices - 1, 0, -1) if devices % step == 0]
    return next(near for step in steps if abs((near := round(rows / step) * step) - rows) <= 0.05 * rows)


def run_config(best: Priced, model: str) -> Config:
    """What `fourfold train` takes for the choice."""
    choice, task = best.choice, best.task
    policy = choice.policy
    return Config(
        model=model_section(model, task.config),
        grid=GridSection(**choice.shape.sizes, order=choice.shape.order),  # type: ignore[arg-type]
        policy=PolicySection(
            dtype=task.dtype,  # type: ignore[arg-type]
            activations=policy.activations,
            recompute=policy.recompute,
            keep_gathered=policy.keep_gathered,
            keep_weights=policy.keep_weights,
            loss_chunk=policy.loss_chunk,
            shard_optimizer=policy.shard_optimizer,
        ),
        overlap=Overlap(halves=best.halves),
        batch=BatchSection(rows=task.rows, seq=task.seq, micro_steps=choice.micro_steps),
    )


def model_section(model: str, config: ModelConfig) -> Model:
    """A published size by its name, any other by its fields."""
    return Model(name=model) if model in SIZES else Model(**asdict(config))


def why(found: Plan, shape: Shape) -> dict[str, Any]:
    """What a grid loses on, against the best."""
    best = found.best
    asked = {"grid": shape.sizes, "against": best.choice.shape.sizes}
    if shape.world != found.devices:
        raise ValueError(f"--why {shape}: that grid has {shape.world} ranks and the plan {found.devices} devices")
    if shape.sizes == best.choice.shape.sizes:
        return {**asked, "lines": ["it is the best grid"]}
    loser = next((each for each in found.ranked if each.choice.shape.sizes == shape.sizes), None)
    if loser is None:
        refused = [reason for other, reason in found.refused if other.sizes == shape.sizes]
        if refused:
            return {**asked, "lines": [f"it was refused: {refused[0]}"]}
        loser = search(found.task, found.devices, space=Space(shapes=(shape,)), top=1).best
    return {**asked, "lines": reasons(loser, best)}


def show(options: argparse.Namespace, document: Mapping[str, Any], found: Plan) -> int:
    if options.json is not None:
        if options.json == "-":
            print(json.dumps(document, indent=1))
            return 0
        write_json(Path(options.json), dict(document))
    if options.html is not None:
        write_plan_page(dict(document), options.html)
    if options.trace is not None:
        write_json(options.trace, chrome_trace(found.best.timeline().spans))
    if options.config is not None:
        write_text(options.config, document["config_toml"])
    print(why_text(document) if document["why"] is not None else plan_table(document, options.top))
    written = [str(path) for path in (options.json, options.html, options.trace, options.config) if path is not None]
    if written:
        print(f"wrote {', '.join(written)}", file=sys.stderr)
    return 0
