"""Replay the published FSDP runs on our simulator, and fit two factors to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import log

import torch

from benchmarks.planner.published_fsdp import FsdpFit, FsdpRun, read_runs
from benchmarks.planner.replay import descend
from fourfold.models.config import ModelConfig
from fourfold.planner.machine import Machine, load_machine
from fourfold.planner.price import CLOSE_LAYERS, SIMULATED_MICRO_STEPS, Candidate, Task, without_replica_traffic
from fourfold.planner.program import FreeOp, MatmulOp, Program, Work
from fourfold.planner.simulate import Totals, simulate
from fourfold.planner.step_program import step_program
from fourfold.policy import Overlap, Policy
from fourfold.shape import Shape

NO_LOSS = FsdpFit(products=1.0, attention=1.0)
"""The machine file as it is."""
PURE = ("A100-80GB", "MPT-70b")
"""Device and model of the runs that reduced gradients in bf16."""
NO_WORK = FreeOp(0, "workspace")


def config_of(run: FsdpRun) -> ModelConfig:
    return ModelConfig(
        layers=run.layers,
        hidden=run.hidden,
        heads=run.heads,
        kv_heads=run.heads,
        head_dim=run.hidden // run.heads,
        mlp_hidden=run.mlp_hidden,
        vocab=run.vocab,
        seq=run.seq,
        bias=False,
        tied=True,
    )


def candidate_of(run: FsdpRun) -> Candidate:
    config = config_of(run)
    block_nbytes = 2 * config.hidden * (4 * config.hidden + 2 * config.mlp_hidden)
    policy = Policy(
        # with recompute: gathered once more in backward, and kept from there on
        keep_weights=run.recompute or run.strategy == "SHARD_GRAD_OP",
        recompute="block" if run.recompute else "none",
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16 if (run.device, run.model) == PURE else torch.float32,
        overlap=Overlap(halves=1, joint_bytes=block_nbytes, bytes_in_flight=2 * block_nbytes),
    )
    return Candidate(Shape(z=run.devices), policy, run.rows, run.micro_steps)


def fsdp_task(run: FsdpRun, fit: FsdpFit) -> Task:
    machine = slowed_machine(load_machine(run.machine), fit)
    return Task(config_of(run), machine, run.rows * run.devices * run.micro_steps, run.seq)


def slowed_machine(machine: Machine, fit: FsdpFit) -> Machine:
    """Return the machine on which products and attention take so many times as long, with torch's own kernels."""
    gemm = {dtype: rate / fit.products for dtype, rate in machine.gemm.items()}
    attention = min(1.0, machine.attention * fit.products / fit.attention)
    name = f"{machine.name} slowed {fit.products:g} {fit.attention:g}"
    return replace(machine, name=name, gemm=gemm, attention=attention, traffic={})


# --- seconds


def replay_run(run: FsdpRun, fit: FsdpFit) -> Totals:
    """Simulate a few layers and micro-steps of a run, and extrapolate to all of them."""
    few, more = (min(layers, run.layers) for layers in CLOSE_LAYERS)
    begin = _few_layers(run, fit, few)
    if few == more:
        return begin
    further = _few_layers(run, fit, more).plus(begin, -1.0)
    return begin.plus(further, (run.layers - few) / (more - few))


def _few_layers(run: FsdpRun, fit: FsdpFit, layers: int) -> Totals:
    task, program = fsdp_task(run, fit), _program(run, layers)
    line = simulate(program.work, task.seconds_on(candidate_of(run)), task.dtype, phases=program.phases)
    further = run.micro_steps - SIMULATED_MICRO_STEPS
    if further <= 0:
        return line.totals
    first, second = [totals for phase, totals in line.marks if phase == "forward"][-2:]
    return line.totals.plus(without_replica_traffic(second.plus(first, -1.0)), further)


@lru_cache(maxsize=512)
def _program(run: FsdpRun, layers: int) -> Program:
    sizes = candidate_of(run).sizes(fsdp_task(run, NO_LOSS), layers=layers)
    return stop_early(step_program(sizes, micro_steps=min(run.micro_steps, SIMULATED_MICRO_STEPS)))


def stop_early(program: Program) -> Program:
    """Return the program without the last product of a recomputed block, of which backward needs only the input."""
    begins, phase = dict(program.phases), ""
    work: list[Work] = []
    for index, item in enumerate(program.work):
        phase = begins.get(index, phase)
        again = phase == "backward" and isinstance(item, MatmulOp) and item.label.startswith("E1 ")
        work.append(NO_WORK if again and item.label.endswith(".down") else item)
    return replace(program, work=work)


# --- the fit


def fit_fsdp(machine: str, report: Callable[[str], None]) -> FsdpFit:
    """Fit by least squares over the fitted rows of a machine."""
    runs = [run for run in read_runs() if run.machine == machine and run.fitted]
    found = descend(NO_LOSS, lambda tried: _squares(tried, runs))
    report(f"{machine}, FSDP: products x {found.products:.3f}, attention x {found.attention:.3f} as long")
    return found


def _squares(tried: FsdpFit, runs: Sequence[FsdpRun]) -> float:
    return sum(log(replay_run(run, tried).seconds / run.seconds) ** 2 for run in runs)
