"""Pipelines on one rank, for the benchmarks of schedules: real runtimes, with stages that sleep or are MLP blocks.

Fourfold runs `pipeline.PipelineStep` over its grid's lanes, torch runs torch.distributed.pipelining. A stage that
sleeps takes given seconds for F, B and W, so that ranks idle for real however few cores there are.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torch_schedules

import fourfold as ff
from benchmarks.shared.models import BenchmarkModel, filled_on_device
from benchmarks.speed.pipeline_lines import ALONE, DEEPSPEED, OURS, PipeLine
from benchmarks.speed.pipeline_stages import Block, Sleeper, SleepingModule, StackSize, loss_of
from benchmarks.speed.rank_jobs import RankModels
from fourfold import comm
from fourfold.layout import Init
from fourfold.models.transformer import Elsewhere, Half, MicroBatch, Transformer
from fourfold.nn.attention import Batch
from fourfold.nn.layer import Layer, assemble, recompute
from fourfold.nn.linear import MLP
from fourfold.pipeline import PipelineStep
from fourfold.schedule.action import Action, Lane, Schedule
from fourfold.schedule.play import StageSeconds
from fourfold.schedule.stages import Stages

HOPS = 12
"""Messages there and back by which a hop is timed; the median counts."""


# --- Fourfold


class StackModel(Layer, ABC):
    """What the runtime needs of a model, for stages without embedding and head."""

    def __init__(self, size: StackSize, grid: ff.Grid, policy: ff.Policy, stages: Stages) -> None:
        super().__init__(grid, policy)
        self.stages, self.compute, self.tokens, self.table_on_two_ranks = stages, size.dtype, size.tokens, None
        generator = torch.Generator(grid.device).manual_seed(grid.rank)
        self.source = torch.randn(size.tokens, size.hidden, generator=generator, device=grid.device, dtype=size.dtype)
        """What the first stage reads."""
        self.source.requires_grad_()

    def empty_stream(self, _: MicroBatch) -> Tensor:
        return torch.empty_like(self.source, requires_grad=False)

    def report(self, batch: MicroBatch, faults: Tensor) -> None:
        """Do nothing: rows that the benchmark has made are never refused."""

    def batches(self, number: int) -> list[MicroBatch]:
        tokens = torch.zeros(1, self.tokens, dtype=torch.long, device=self.grid.device)
        half = Half(tokens, tokens, Batch.of(tokens, None, None), self.tokens)
        return [MicroBatch([half], tokens.shape, True, -100, "")] * number

    def run_stage(self, stage: int, _: MicroBatch, arrived: Tensor | None, __: object) -> tuple[Tensor, Tensor]:
        a = self.through(stage, self.source if arrived is None else arrived)
        return loss_of(a) if self.stages.has_head(stage) else a, torch.zeros((), device=self.grid.device)

    @abstractmethod
    def through(self, stage: int, a: Tensor) -> Tensor:
        """Run a stage."""


class SleepingModel(StackModel):
    """Every stage sleeps for F, and in backward for B; W is a product that the engine may hold back."""

    def __init__(self, size: StackSize, grid: ff.Grid, policy: ff.Policy, stages: Stages) -> None:
        super().__init__(size, grid, policy, stages)
        self.sleeper = Sleeper(size.sleep_seconds / stages.chunks)

    def through(self, stage: int, a: Tensor) -> Tensor:  # noqa: ARG002  # all stages sleep alike
        return SleepingStage.apply(a, self)


class SleepingStage(torch.autograd.Function):
    """A stage that sleeps: its gradients go the way of a layer's, through the engine's queue."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, model: SleepingModel) -> Tensor:
        ctx.model = model
        model.sleeper.sleep("F")
        return a.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        model: SleepingModel = ctx.model
        model.gradients.expect_end()
        model.sleeper.sleep("B")
        model.engine.wgrad_queue.add(partial(model.sleeper.sleep, "W"))
        return gradient, None


class BlockModel(StackModel):
    """A stack of MLP blocks, a + mlp(a)."""

    def __init__(self, size: StackSize, grid: ff.Grid, policy: ff.Policy, stages: Stages) -> None:
        super().__init__(size, grid, policy, stages)
        held = {layer for stage in stages.of_rank(grid.coords["pipe"]) for layer in stages.layers_of(stage)}
        out_init = Init(std=0.02 / (2 * size.layers) ** 0.5)
        sizes: Any = dict(kind="gelu", bias=False, init=Init(std=0.02), out_init=out_init)
        self.blocks = nn.ModuleList(
            MLP(grid, policy, size.hidden, size.mlp_hidden, **sizes) if layer in held else Elsewhere()
            for layer in range(size.layers)
        )

    def through(self, stage: int, a: Tensor) -> Tensor:
        for layer in self.stages.layers_of(stage):
            a = self._block(layer, a)
        return a

    def _block(self, layer: int, a: Tensor) -> Tensor:
        def run(a: Tensor) -> Tensor:
            return a + self.blocks[layer](a, self.tokens)

        return recompute(run, self.clock, a) if self.policy.recompute == "block" else run(a)


class TimedStep(PipelineStep):
    """A step that times its actions, without their waits for messages."""

    def __init__(self, *args: Any, synchronize: Callable[[], None] = lambda: None) -> None:
        """Take what makes the device idle before and after each action; by default the host's time counts."""
        super().__init__(*args)
        self.synchronize = synchronize
        self.waited = 0.0
        self.measured: dict[tuple[str, int], list[float]] = defaultdict(list)

    def act(self, action: Action) -> None:
        self.synchronize()
        began, self.waited = time.perf_counter(), 0.0
        super().act(action)
        self.synchronize()
        self.measured[action.kind, action.stage].append(time.perf_counter() - began - self.waited)

    def _take(self, action: Action) -> Tensor:
        began = time.perf_counter()
        taken = super()._take(action)
        self.waited += time.perf_counter() - began
        return taken

    @property
    def seconds(self) -> dict[tuple[str, int], float]:
        """The median seconds of each kind of action in each stage of this rank."""
        return {key: median(times) for key, times in self.measured.items()}


class FourfoldPipeline(BenchmarkModel):
    """A schedule of Fourfold on this rank."""

    shard_inits = []  # noqa: RUF012  # weights stay: a step changes none

    def __init__(self, model: StackModel, schedule: Schedule) -> None:
        self.module, self.schedule = model, schedule
        self.batches = model.batches(schedule.micro_steps)
        self.host_seconds: dict[tuple[str, int], float] = {}
        """What the actions of the last step took on the host, of stages that sleep."""

    def step(self) -> Tensor:
        sleeps = isinstance(self.module, SleepingModel)
        made = TimedStep if sleeps else PipelineStep
        step = made(cast(Transformer, self.module), self.batches, self.schedule, None)
        step.run()
        if isinstance(step, TimedStep):
            self.host_seconds = step.seconds
        loss = step.loss() / self.schedule.micro_steps
        self.drop_gradients()
        return loss

    def drop_gradients(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None
        cast(StackModel, self.module).source.grad = None

    def action_seconds(self, synchronize: Callable[[], None]) -> dict[tuple[str, int], float]:
        """Return the seconds of each kind of action in each stage of this rank, computed without messages."""
        model = cast(StackModel, self.module)
        with comm.muted(model.grid):
            step = TimedStep(model, self.batches, self.schedule, None, synchronize=synchronize)
            step.run()
        self.drop_gradients()
        return step.seconds


# --- torch


class TorchPipeline(BenchmarkModel):
    """A schedule of torch.distributed.pipelining on this rank."""

    shard_inits = []  # noqa: RUF012

    def __init__(self, line: PipeLine, size: StackSize, parts: Sequence[nn.Module], rank: int, device: torch.device):
        self.module = nn.ModuleList(parts)
        placement = line.stages(size.layers).placement
        own = [stage for stage, holder in enumerate(placement) if holder == rank]
        stages = [
            PipelineStage(part, stage, len(placement), device, group=dist.group.WORLD)
            for part, stage in zip(parts, own, strict=True)
        ]
        make: Any = getattr(torch_schedules, f"Schedule{line.schedule}")
        several = issubclass(make, torch_schedules.PipelineScheduleMulti)
        self.schedule = make(
            stages if several else stages[0], n_microbatches=line.micro_batches, loss_fn=loss_of, scale_grads=False
        )
        self.first, self.last = 0 in own, len(placement) - 1 in own
        generator = torch.Generator(device).manual_seed(rank)
        shape = size.tokens * line.micro_batches if self.first or self.last else 0, size.hidden
        self.source = torch.randn(shape, generator=generator, device=device, dtype=size.dtype)

    def step(self) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (self.source,) if self.first else ()
        target = self.source if self.last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        self.module.zero_grad()
        return torch.stack(losses).detach().mean() if self.last else None


class Unpipelined(BenchmarkModel):
    """One rank's share of the computation in plain torch, without any message."""

    shard_inits = []  # noqa: RUF012

    def __init__(self, line: PipeLine, size: StackSize, parts: Sequence[nn.Module], device: torch.device) -> None:
        self.module, self.micro_batches = nn.Sequential(*parts), line.micro_batches
        self.source = torch.randn(size.tokens, size.hidden, device=device, dtype=size.dtype).requires_grad_()

    def step(self) -> Tensor:
        loss = torch.zeros((), device=self.source.device)
        for _ in range(self.micro_batches):
            one = loss_of(self.module(self.source))
            one.backward()
            loss += one.detach()
        self.module.zero_grad()
        self.source.grad = None
        return loss / self.micro_batches


# --- jobs


class PipelineRank(RankModels):
    """A rank with the weights of its stages, which the lines of one kind share."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        super().__init__(rank, world, device)
        self.stacks: dict[object, StackModel] = {}
        """Fourfold's models by their stages and policy."""
        self.blocks: list[nn.Module] = []
        """Torch's blocks of this rank: as many of the same size for every placement."""
        self.shared_bytes = 0
        """Bytes of all of these."""


def build(state: PipelineRank, line: PipeLine, size: StackSize, schedule: Schedule | None) -> None:
    """Make the model of a line; `schedule` is Fourfold's."""
    cuda = state.device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    known = state.shared_bytes
    model: BenchmarkModel
    if line.kind == OURS:
        if schedule is None:
            raise ValueError(f"{line.name} needs a schedule")
        model = FourfoldPipeline(_stack(state, line, size), schedule)
    elif line.kind == DEEPSPEED:
        from benchmarks.speed.pipeline_deepspeed import DeepSpeedPipeline  # an optional peer, slow to import

        model = DeepSpeedPipeline(line, size)
    else:
        device = torch.device("cuda", 0) if cuda else state.device
        parts = _parts(state, line, size, device)
        alone = line.kind == ALONE
        model = (
            Unpipelined(line, size, parts, device) if alone else TorchPipeline(line, size, parts, state.rank, device)
        )
    own = sum(parameter.nbytes for parameter in model.module.parameters())
    # what this line shares with others is its own as well; what only others hold is not
    model.base_bytes = before - (own if state.shared_bytes == known else 0)
    state.models[line.name], state.compiled[line.name] = model, False


def _stack(state: PipelineRank, line: PipeLine, size: StackSize) -> StackModel:
    grid, stages = state.grid(line.shape), line.stages(size.layers)
    key = stages, line.policy
    if key not in state.stacks:
        made = (SleepingModel if size.sleep_seconds else BlockModel)(size, grid, line.policy, stages)
        with filled_on_device():
            assemble(made, grid, line.policy, dtype=size.dtype)
        state.stacks[key] = made
        state.shared_bytes += sum(parameter.nbytes for parameter in made.parameters())
    return state.stacks[key]


def _parts(state: PipelineRank, line: PipeLine, size: StackSize, device: torch.device) -> list[nn.Module]:
    """Return the modules of this rank's stages."""
    if size.sleep_seconds:
        sleeper = Sleeper(size.sleep_seconds / line.chunks)
        return [SleepingModule(sleeper, size.hidden) for _ in range(line.chunks)]
    each = size.layers // line.ranks
    if not state.blocks:
        with torch.device(device):
            state.blocks = [Block(size).to(size.dtype) for _ in range(each)]
        state.shared_bytes += sum(p.nbytes for block in state.blocks for p in block.parameters())
    chunk = each // line.chunks
    return [nn.Sequential(*state.blocks[first : first + chunk]) for first in range(0, each, chunk)]


def action_seconds(state: PipelineRank, line: PipeLine, size: StackSize) -> dict[tuple[str, int], float]:
    """Return the seconds of the actions of this rank's stages, timed one by one while the other ranks do the same."""
    model = FourfoldPipeline(_stack(state, line, size), line.timed_schedule(size.layers))
    model.action_seconds(state.synchronize)  # warm up
    return model.action_seconds(state.synchronize)


def hop_seconds(state: PipelineRank, ranks: int, size: StackSize) -> float:
    """Return the seconds of a message between neighbours: half of there and back, with all pairs at it."""
    grid = state.grid(ff.Shape(pipe=ranks))
    here = grid.coords["pipe"]
    other = here ^ 1
    message = torch.zeros(size.tokens, size.hidden, dtype=size.dtype, device=grid.device)
    arriving = torch.empty_like(message)
    ways: list[Callable[[], comm.Pending[Any]]]
    if here < other:
        ways = [
            lambda: comm.send(message, grid, Lane.F_HIGHER, other),
            lambda: comm.receive(arriving, grid, Lane.B_LOWER, other),
        ]
    else:
        ways = [
            lambda: comm.receive(arriving, grid, Lane.F_HIGHER, other),
            lambda: comm.send(message, grid, Lane.B_LOWER, other),
        ]
    seconds = []
    for _ in range(HOPS):
        state.barrier()
        began = time.perf_counter()
        for way in ways:
            way().wait()
            state.synchronize()
        seconds.append((time.perf_counter() - began) / 2)
    return median(seconds)


def stay_awake(state: PipelineRank, name: str, awake: bool) -> None:
    """Say whether the stages of a line sleep."""
    for sleeper in _sleepers(state, name):
        sleeper.awake = awake


def slept(state: PipelineRank, name: str) -> dict[str, list[float]]:
    """Return the sleeps of a line by kind since the last call, and forget them."""
    found: dict[str, list[float]] = defaultdict(list)
    for sleeper in _sleepers(state, name):
        for kind, seconds in sleeper.slept:
            found[kind].append(seconds)
        sleeper.slept.clear()
    return dict(found)


def host_seconds(state: PipelineRank, name: str) -> dict[tuple[str, int], float]:
    """Return what the actions of a line's last step took on the host, its sleeps included."""
    model = state.models[name]
    return model.host_seconds if isinstance(model, FourfoldPipeline) else {}


def _sleepers(state: PipelineRank, name: str) -> set[Sleeper]:
    modules = state.models[name].module.modules()
    return {module.sleeper for module in modules if isinstance(module, (SleepingModel, SleepingModule))}


def merged_seconds(found: Sequence[dict[tuple[str, int], float]], stages: int) -> StageSeconds:
    """Return the seconds of all stages from those that each rank has measured of its own."""
    by_action = {key: seconds for rank in found for key, seconds in rank.items()}
    merged = {kind: [by_action.get((kind, stage), 0.0) for stage in range(stages)] for kind in ("F", "B", "W")}
    for stage in range(stages):
        merged["B"][stage] += by_action.get(("BW", stage), 0.0)  # B and W in one take what both take together
    return merged
