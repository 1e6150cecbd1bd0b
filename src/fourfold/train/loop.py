"""The training loop: one run on this rank, from a resolved config.

On a GPU the host runs one step ahead: it reads the results of a step after it has launched the next one, so reading
never makes the device wait.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fourfold
from fourfold.atomic import write_json, write_text
from fourfold.data.loader import Evaluation, Loader, unigram_entropy
from fourfold.data.open import open_source
from fourfold.data.token_files import TokenSource
from fourfold.data.tokenizer import load_tokenizer
from fourfold.environment import is_watched
from fourfold.errors import CollectiveError, End, LostPeerError, LostStoreError
from fourfold.grid import Grid
from fourfold.models.generate import evaluating
from fourfold.models.transformer import build
from fourfold.nn.loss import count_targets
from fourfold.optim import AdamW, Clipped
from fourfold.planner.trace import kept_bytes
from fourfold.planner.transformer import flops_per_token
from fourfold.train.bad_steps import BadStep, StepJudge
from fourfold.train.checkpoints import RunSaver, Start, earlier_parts, remove_newer, restore
from fourfold.train.config import DTYPES, TrainConfig
from fourfold.train.guard import Guard, NoGuard
from fourfold.train.metrics import Meter, StepMetrics, peak_of
from fourfold.train.prediction import PredictionCheck, predict_run
from fourfold.train.profile import StepProfiler
from fourfold.train.run_folder import FolderLock, RunEvent, Sink, make_folder, read_facts, rewind, strict
from fourfold.train.stop import Stop
from fourfold.watch.peers import check_replicas
from fourfold.watch.tape import Waits


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was launched and that the host has not read yet."""

    step: int
    learning_rate: float
    loss: Tensor
    limit: float
    """The loss above which this step is a spike."""
    clipped: Clipped
    metrics: Callable[[], StepMetrics]
    """Returns the metrics of the step once the device has finished it."""


class Run:
    """A training run. Every rank has one; rank 0 records it. `profile` names the steps to trace."""

    def __init__(self, config: TrainConfig, grid: Grid, out: Path, *, profile: range = range(0)) -> None:
        self.config, self.grid, self.out = config, grid, out
        self.model_config = config.model.build()
        self.policy = config.build_policy()
        self.sources = open_sources(config, grid, out / "data")
        batch, data = config.batch, config.data
        common: dict[str, Any] = dict(
            seq=batch.seq, vocab=self.model_config.vocab, held_out=data.held_out, documents=data.documents
        )
        weights = [source.weight for source in data.sources]
        self.loader = Loader(
            self.sources,
            weights,
            grid,
            rows=batch.rows,
            micro_steps=batch.micro_steps,
            seed=config.train.seed,
            **common,
        )
        self.evaluation = None
        if config.train.evaluate_every and data.held_out:
            rows, batches = batch.rows // batch.micro_steps, config.train.evaluate_batches * batch.micro_steps
            self.evaluation = Evaluation(self.sources, grid, rows=rows, batches=batches, **common)
        self.model = build(
            self.model_config, grid, policy=self.policy, seed=config.train.seed, dtype=config.policy.parameters
        )
        section = config.optimizer
        self.optimizer = AdamW(
            self.model,
            section.learning_rate,
            betas=(section.beta1, section.beta2),
            eps=section.eps,
            weight_decay=section.weight_decay,
        )
        self.schedule = config.schedule
        self.flops = flops_per_token(self.model_config, batch.seq, self.policy.recompute)
        self.peak = peak_of(grid, DTYPES[config.policy.dtype], config.log.peak_flops)
        shares = [weight / sum(weights) for weight in weights]
        self.entropy = sum(
            share * unigram_entropy(source, self.model_config.vocab, held_out=data.held_out, seq=batch.seq)
            for share, source in zip(shares, self.sources, strict=True)
        )
        self.local_rows = batch.rows // batch.micro_steps // grid.shape.places
        self.meter = Meter(grid)
        self.profile = StepProfiler(profile, grid, out / "profile")
        self.sinks: list[Sink] = []
        self.stored: RunEvent = {}
        """The contents of run.json, on rank 0 after `begin`."""
        self._prediction_check: PredictionCheck | None = None
        self.saving: RunSaver | None = None
        """Set by `begin` if the config asks for checkpoints."""
        self.guard = NoGuard()
        """Watches the ranks after `begin`."""
        self.lock: FolderLock | None = None
        """The lock on the run's folder, on rank 0 after `begin`."""
        self.stop = Stop(grid, config.watch.grace)
        self.stopped = False
        """Whether the run stopped before its last step because of SIGTERM."""
        self.step = 0
        self.step_judge = StepJudge(config.watch, config.train.max_skipped)
        self._in_flight: deque[StepInFlight] = deque()

    @cached_property
    def kept_bytes(self) -> dict[str, int]:
        """Bytes that one rank keeps for backward, by kind of recompute."""
        return kept_bytes(
            self.model_config,
            self.grid,
            self.policy,
            self.local_rows,
            self.config.batch.seq,
            dtype=self.config.policy.parameters,
            documents=self.config.data.documents,
        )

    def facts(self) -> RunEvent:
        """Return the description of the run for run.json."""
        shape = self.grid.shape
        return {
            "fourfold": fourfold.__version__,
            "torch": torch.__version__,
            "device": device_name(self.grid.device),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "grid": shape.sizes,
            "order": list(shape.order),
            "ranks": shape.world,
            "model": self.config.model.name,
            "parameters": self.model_config.parameters,
            "flops_per_token": {"model": self.flops.model, "hardware": self.flops.hardware},
            "peak_flops": self.peak.flops,
            "peak_flops_from": self.peak.origin,
            "unigram_entropy": self.entropy,
            "tokens": sum(source.tokens for source in self.sources),
            "kept_bytes": self.kept_bytes,
            "recompute": self.policy.recompute,
            "halves": self.model.halves(self.local_rows, self.config.batch.seq)._asdict(),
            "tokens_per_step": self.config.batch.tokens,
            "steps": self.config.train.steps,
        }

    def load(self, start: Start) -> None:
        """Load the checkpoint that the run resumes from, before the first step."""
        self.step_judge.restore(restore(start, self.model, self.optimizer, self.loader))
        self.step = start.step

    def describe(self, before: list[RunEvent]) -> None:
        """Write run.json on rank 0, with the planner's prediction and the earlier parts of a resumed run."""
        self.stored = self.facts()
        if before:
            self.stored["resumed"] = before
        if self.config.plan.compare:
            profile = self.profile
            self.stored["predicted"], self._prediction_check = predict_run(
                self.config, self.grid, profile.steps, profile.folder
            )
        write_json(self.out / "run.json", strict(self.stored))

    def _record_comparison(self, compared: RunEvent | None) -> None:
        """Record how the run compares with its prediction, if that is known now."""
        if compared is not None:
            self.stored["compared"] = {key: value for key, value in compared.items() if key != "event"}
            write_json(self.out / "run.json", strict(self.stored))
            self._record(compared)

    def begin(self, sinks: Callable[[], Sequence[Sink]], start: Start | None = None) -> None:
        """Prepare the folder and open the sinks on rank 0, then start saving and watching on every rank.

        If rank 0 fails, all ranks raise. When a run resumes, records and checkpoints after its step are removed first.
        """
        start = start or Start()

        def prepare_folder() -> None:
            make_folder(self.out)
            self.lock = FolderLock(self.out)
            remove_newer(start)
            write_text(self.out / "config.toml", self.config.stored(self.out).toml())
            if start.resumes:
                rewind(self.out / "metrics.jsonl", start.step)
            self.describe(earlier_parts(read_facts(self.out), start.step) if start.resumes else [])
            self.sinks = list(sinks())
            if start.step:
                where = {"grid": str(self.grid.shape), "checkpoint": str(start.checkpoint)}
                left_out = {} if start.skipped is None else {"passed_over": str(start.skipped)}
                self._record({"event": "resumed", "step": start.step, **where, **left_out})

        def find_folder() -> None:
            if self.config.checkpoint.save and not (self.out / "run.json").exists():
                raise FileNotFoundError(
                    f"{self.out.absolute()}, which rank 0 has made, does not exist on rank {self.grid.rank}; put --out "
                    "on a file system that all nodes share, or set checkpoint.save=false"
                )

        try:
            self.grid.run_on_rank0("starting the run", prepare_folder)
            self.grid.run_together("finding the run's folder", find_folder)
            if self.config.checkpoint.save:
                self.saving = RunSaver(self.config, self.grid, self.out)
            if self.grid.shape.world > 1:
                self.guard = Guard(self.grid, self.out, self.config.watch.deadline)
        except BaseException:
            if self.lock is not None:
                self.lock.release()
            raise

    def train(self) -> None:
        """Train the remaining steps, and record why training ended."""
        reason: str = End.FINISHED
        failed: BaseException | None = None
        try:
            self.meter.begin()
            for step in range(self.step + 1, self.config.train.steps + 1):
                self._run_step(step)
                self._record_saved()
                last = step == self.config.train.steps
                if self.evaluation is not None and (last or step % self.config.train.evaluate_every == 0):
                    self._drain()
                    self.guard.doing("evaluating")
                    with self.profile.aside("evaluation"):
                        self._record({"event": "evaluation", "step": step, **self.evaluate()})
                    self.meter.begin()
                self._check_replicas(step)
                self.guard.doing("asking the others whether to stop", Waits.RANKS)
                self.stopped = not last and self.stop.after(step)
                self.guard.doing("between steps")
                if self.stop.met_after == step:
                    self._record_stragglers(step)
                self._save(step, last=last or self.stopped)  # after the records of the step are written
                if self.stopped:
                    reason = End.STOPPED
                    break
            self._drain()
            if self._prediction_check is not None:
                self._record_comparison(self._prediction_check.finish())
        except KeyboardInterrupt as error:
            reason, failed = End.INTERRUPTED, error
            raise
        except Exception as error:
            reason, failed = f"{type(error).__name__}: {error}", error
            # our launcher sees which process died, so a lost connection needs no diagnosis of the ranks
            if isinstance(error, CollectiveError) and not (is_watched() and isinstance(error, LostPeerError)):
                self.guard.failed(str(error))
            raise
        finally:
            self._end(reason, failed)

    def _run_step(self, step: int) -> None:
        """Run one step, and start or end the profile if the step is its first or last."""
        if self.profile.begins_with(step):
            self._drain()
            self.profile.begin()
            self.meter.begin()
        with self.profile.step(step):
            self._launch(step)
        self._read_down_to(1 if self.meter.on_gpu else 0)
        if self.profile.ends_with(step):
            self._drain()
            self._record(self.profile.end())
            self.meter.begin()

    def _launch(self, step: int) -> None:
        """Launch forward, backward and the optimizer of a step, without waiting for the device."""
        model, optimizer = self.model, self.optimizer
        model.clock.begin_step(step)
        self.guard.begin_step(step)
        learning_rate = self.schedule.apply(optimizer, step)
        batches = self.loader.next()
        self.guard.doing("computing")
        count = None
        if len(batches) > 1:
            count = count_targets(torch.stack([targets for _, targets, _ in batches]), self.grid)
        loss = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        model.gradients.begin_step(len(batches))
        for tokens, targets, positions in batches:
            share = model(tokens, targets, positions=positions, count=count)
            share.backward()
            loss += share.detach()
        limit, skip_above = self.step_judge.limit, self.step_judge.skip_above
        jumps = loss > skip_above if isfinite(skip_above) else None
        clipped = optimizer.clip_and_step(self.config.optimizer.clip, unless=jumps)
        optimizer.zero_grad()
        self._in_flight.append(StepInFlight(step, learning_rate, loss, limit, clipped, self.meter.end()))

    def _drain(self) -> None:
        """Read all steps in flight."""
        self._read_down_to(0)

    def _read_down_to(self, left: int) -> None:
        """Read the oldest steps in flight until this many are left."""
        while len(self._in_flight) > left:
            self._read(self._in_flight.popleft())

    def _read(self, done: StepInFlight) -> None:
        """Wait for the results of a step and record them."""
        self.guard.doing("reading results of its device", Waits.DEVICE if self.meter.on_gpu else Waits.NOTHING)
        loss, norm = done.loss.item(), done.clipped.norm.item()  # waits until the device has finished the step
        self.guard.doing("recording the step")
        metrics = done.metrics()
        self.guard.took(metrics.seconds, metrics.exposed_seconds)
        self.profile.add(done.step, metrics)
        bad = self.step_judge.judge(done.step, loss, norm, done.limit)
        tokens_per_second = self.config.batch.tokens / metrics.seconds
        mfu, hfu = self.peak.utilization(self.flops, tokens_per_second, self.grid.shape.world)
        self.step = done.step
        event: RunEvent = {
            "event": "step",
            "step": done.step,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": done.learning_rate,
            "seconds": metrics.seconds,
            "tokens_per_second": tokens_per_second,
            "mfu": mfu,
            "hfu": hfu,
            "wire_bytes": metrics.wire_bytes,
            "exposed_seconds": metrics.exposed_seconds,
            "peak_memory_bytes": metrics.peak_memory_bytes,
            "skipped": bad is not None and bad.in_a_row > 0,
        }
        self._record(event)
        if self._prediction_check is not None:
            self._record_comparison(self._prediction_check.add(event))
        if bad is not None:
            self._handle_bad_step(bad, done.clipped)

    def _handle_bad_step(self, bad: BadStep, clipped: Clipped) -> None:
        """Record a bad step and take the action that the config names."""
        name = None
        if bad.spike:
            facts = {"loss": bad.loss, "limit": bad.limit, "action": bad.action}
            self._record({"event": "spike", "step": bad.step, **facts})
        else:
            with self.grid.ledger.not_counted(), self.profile.aside("skipped"):  # its all-reduces belong to no step
                name = clipped.first_not_finite()
            self._record({"event": "skipped", "step": bad.step, "parameter": name, "in_a_row": bad.in_a_row})
        self.step_judge.act(bad, name, self.loader.state())

    @torch.no_grad()
    def evaluate(self) -> RunEvent:
        """Return the mean loss over the held-out batches."""
        if self.evaluation is None:
            raise ValueError("there is no held-out data; set data.held_out and train.evaluate_every above 0")
        total, count = (torch.zeros((), dtype=torch.float64, device=self.grid.device) for _ in range(2))
        with evaluating(self.model):
            for tokens, targets, positions in self.evaluation:
                targets_here = count_targets(targets, self.grid)
                total += self.model(tokens, targets, positions=positions, count=targets_here) * targets_here
                count += targets_here
        return {"loss": (total / count).item(), "unigram_entropy": self.entropy}

    def _check_replicas(self, step: int) -> None:
        """Compare the replicas of the parameters, if that is due after this step."""
        every = self.config.watch.replicas_every
        if every and step % every == 0:
            self._drain()
            self.guard.doing("comparing replicas")
            with self.profile.aside("replicas"):
                check_replicas(self.model, self.grid)
            self.meter.begin()

    def _record_stragglers(self, step: int) -> None:
        """Record the ranks that became slow, on rank 0, from the step times that all ranks have exchanged."""
        for one in self.guard.stragglers():
            facts = {"kind": one.kind, "ranks": list(one.ranks), "seconds": one.seconds, "peers": one.peers}
            self._record({"event": "straggler", "step": step, **facts, "said": str(one)})

    def _save(self, step: int, *, last: bool) -> None:
        """Save a checkpoint if one is due after this step; wait for the last one."""
        if self.saving is None or not (last or self.saving.due(step)):
            return
        self._drain()
        self.guard.doing("saving a checkpoint")
        with self.profile.aside("saving"):
            self.saving.save(step, self.model, self.optimizer, self.loader, self.step_judge, last=last)
        self._record_saved()
        self.meter.begin()

    def _record_saved(self) -> None:
        """Record the checkpoints that were completed since the last call."""
        for event in () if self.saving is None else self.saving.completed():
            self._record(event)

    def _record(self, event: RunEvent) -> None:
        for sink in self.sinks:
            sink.write(event)

    def _end(self, reason: str, failed: BaseException | None) -> None:
        """Close everything that the run opened, and record why it ended."""
        self.guard.close(done=failed is None)
        self.loader.close()
        self.profile.close()
        # a sink that fails now, for example because the disk is full, must not hide why the run ended
        with nullcontext() if reason == End.FINISHED else suppress(OSError), ExitStack() as stack:
            if self.lock is not None:
                stack.callback(self.lock.release)
            for sink in self.sinks:
                stack.callback(sink.close)
            if self.saving is not None:
                # hurry if a user waits for the end, or if the part of a dead rank will never come
                self.saving.wait_for_own_part(
                    hurried=isinstance(failed, (KeyboardInterrupt, LostPeerError, LostStoreError))
                )
                self._record_saved()
            self._record({"event": "end", "step": self.step, "reason": reason})


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or the architecture of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu: {platform.machine()}"


def open_sources(config: TrainConfig, grid: Grid, cache: Path) -> list[TokenSource]:
    """Open the sources of a run on every rank. Rank 0 opens them first, because it may have to prepare text once."""
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod)

    def opened() -> list[TokenSource]:
        return [
            open_source(source.path, tokenizer=tokenizer, eod=source.eod, cache=cache) for source in config.data.sources
        ]

    found = grid.run_together("opening the data", lambda: opened() if grid.rank == 0 else [])
    return grid.run_together("opening the data", lambda: found or opened())
