"""The training loop: one run on this rank, from a resolved config.

    Run(config, grid, out)   builds loader, model and optimizer
    load(start)              loads the checkpoint that the run resumes from
    begin(sinks, start)      prepares the folder, and starts to save and to watch
    train()                  trains the remaining steps, and records why training ended

On a GPU the host runs one step ahead: it reads the results of a step after it has launched the next one, so reading
never makes the device wait. Work between steps (evaluation, comparing replicas, saving) reads all steps first.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import fourfold
from fourfold.action_times import ActionTimes
from fourfold.atomic import write_json, write_text
from fourfold.axes import AXES, BATCH, CUTS, PIPE
from fourfold.checkpoint.load import PassedOver, remove_checkpoint, set_aside
from fourfold.checkpoint.training_state import require_fit, training_shards
from fourfold.data.loader import Evaluation, Loader, TokenBatch, unigram_entropy
from fourfold.data.sources import open_source
from fourfold.data.token_files import TokenSource
from fourfold.data.tokenizer import load_tokenizer
from fourfold.environment import is_watched
from fourfold.errors import (
    BadStepsError,
    CallbackError,
    CollectiveError,
    End,
    LostPeerError,
    LostStoreError,
    NotFiniteError,
    NotSavedError,
    RollBackError,
)
from fourfold.expert_counts import LARGEST, CountsFile, StepCounts
from fourfold.grid import Grid
from fourfold.models.generate import evaluating
from fourfold.nn.loss import count_targets
from fourfold.optim import SGD, AdamW, Clipped, ShardedOptimizer, on_shards
from fourfold.parse import import_object
from fourfold.schedule.text import to_csv
from fourfold.step_graph import StepGraph
from fourfold.train.checkpoints import GoodStep, RunSaver, Start, earlier_parts, note_return, restore
from fourfold.train.config import DTYPES, SCHEDULE_FILE, OptimizerSection, TrainConfig
from fourfold.train.console import warn
from fourfold.train.correction import LAST_WAIT, RunCorrection, steps_to_trace
from fourfold.train.guard import WAY_OUT, BadStep, Guard, NoGuard, RouterJudge, StepJudge
from fourfold.train.language_model import build_model, vocab_of
from fourfold.train.metrics import Meter, StepMetrics, StepProfiler, peak_of
from fourfold.train.planning import PredictionCheck, predict_run
from fourfold.train.run_folder import (
    MOST_GROUPS,
    FolderLock,
    RunEvent,
    Sink,
    check_folder,
    make_folder,
    remove_drawn_step,
    rewind,
    strict,
    write_documents,
    write_pipe_times,
)
from fourfold.train.signals import NAMES, Stop, Verdict
from fourfold.watch.liveness import NoAlarm, Phase
from fourfold.watch.peers import check_replicas
from fourfold.watch.tape import Waits

DRAWN_STEP = 3
"""The step whose actions are drawn: the first steps make memory and connections, and are slower than all others."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was launched and that the host has not read yet."""

    step: int
    learning_rate: float
    results: Tensor
    """The loss and the norm of the gradients, in the host's memory once the device has finished the step."""
    limit: float
    """The loss above which this step is a spike."""
    clipped: Clipped
    data: dict[str, Any]
    """The loader's state after this step."""
    real_tokens: int
    """The tokens of the whole batch without padding of bags."""
    imbalance: float | None
    """The attention of the busiest member of rank 0's context group divided by the mean; known on rank 0."""
    load: Tensor | None
    """How many tokens each expert of each block has had, in the host's memory once the device has finished the step."""
    companions: Tensor | None
    """How many tokens of each block have chosen both of two experts, likewise; None for most steps."""
    metrics: Callable[[], StepMetrics]
    """Returns the metrics of the step once the device has finished it."""


class Run:
    """A training run. Every rank has one, and rank 0 records it. `profile` names the steps to trace."""

    def __init__(
        self,
        config: TrainConfig,
        grid: Grid,
        out: Path,
        *,
        profile: range = range(0),
        alarm: NoAlarm | None = None,
        began: float | None = None,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`alarm` watches over the ranks of the job already. `tell` gets what the run does before its first step.

        `began` is when the command began, from which `train.minutes` count, in seconds by the monotonic clock.
        """
        self.config, self.grid, self.out, self._tell = config, grid, out, tell
        self._began = time.monotonic() if began is None else began
        self.alarm = alarm or NoAlarm()
        self._enter(Phase.DATA)
        self.sources = open_sources(config, grid, out / "data")
        batch, data, seed = config.batch, config.data, config.train.seed
        weights = [source.weight for source in data.sources]
        vocab = vocab_of(config)
        rows = batch.rows // batch.micro_steps
        common: dict[str, Any] = dict(seq=batch.seq, vocab=vocab, held_out=data.held_out, documents=data.apart)
        steps: dict[str, Any] = dict(rows=batch.rows, micro_steps=batch.micro_steps, bag_rows=data.bag_rows, seed=seed)
        self.loader = Loader(self.sources, weights, grid, **steps, **common)
        self.evaluation = None
        if config.train.evaluate_every and data.held_out:
            batches = config.train.evaluate_batches * batch.micro_steps
            self.evaluation = Evaluation(self.sources, grid, rows=rows, batches=batches, **common)
        self._enter(Phase.MODEL)
        self.language_model = build_model(config, grid)
        self.model = self.language_model.module
        self.optimizer = make_optimizer(self.model, config.optimizer, config.schedule.learning_rate)
        self.schedule = config.schedule
        records = config.train.graph == "auto" and grid.device.type == "cuda"
        piped = "messages between pipe ranks cannot be part of one" if grid.size(PIPE) > 1 else ""
        self._not_replayed = (piped or self.optimizer.not_recordable) if records else ""
        """Why steps are not replayed as a CUDA graph, though they should be."""
        self.step_graph = StepGraph(self._compute, self.model) if records and not self._not_replayed else None
        self._told_reason = False
        """Whether it was recorded why steps are not replayed."""
        self._gradient_names: tuple[str, ...] = ()
        self.peak = peak_of(grid, DTYPES[config.policy.dtype], config.log.peak_flops)
        self.entropy = sum(
            weight / sum(weights) * unigram_entropy(source, vocab, held_out=data.held_out, seq=batch.seq)
            for weight, source in zip(weights, self.sources, strict=True)
        )
        self.meter = Meter(grid)
        self._drawn_step = profile[0] if profile else 0
        """The step whose actions the page about the run draws: the first one that is profiled, else an early one."""
        self.profile = StepProfiler(profile, grid, out / "profile")
        self.step_judge = StepJudge(config.watch, config.train.max_skipped)
        self.stop = Stop(grid, config.watch.grace)
        self.stopped = 0
        """The signal that stopped the run before its last step, 0 if none did."""
        self.out_of_time = False
        """Whether `train.minutes` ended the run before its last step."""
        self.step = 0
        """The last step that was read."""
        self._good: GoodStep | None = GoodStep(0, self.loader.state(), self.step_judge.state())
        """The last step that was not skipped, whose parameters the model holds; None if the model holds a bad step."""
        self._load_notes: list[str] = []
        """What the user should know about the checkpoint's data, recorded when the run begins."""
        # `begin` sets the following; a run that is not begun trains without folder, checkpoints and guard.
        self.sinks: list[Sink] = []
        self.stored: RunEvent = {}
        """The contents of run.json, on rank 0."""
        self.saving: RunSaver | None = None
        self.guard = NoGuard()
        self._lock: FolderLock | None = None
        self._counts: CountsFile | None = None
        self._router_judge = RouterJudge()
        self._prediction_check: PredictionCheck | None = None
        self._correction: RunCorrection | None = None
        self._in_flight: deque[StepInFlight] = deque()

    def _enter(self, phase: Phase) -> None:
        """Note that this rank begins a phase of its start."""
        self.alarm.enter(phase)
        self._tell(phase)

    def facts(self) -> RunEvent:
        """Return the description of the run for run.json."""
        shape, device, flops = self.grid.shape, self.grid.device, self.language_model.flops
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu: {platform.machine()}"
        return {
            "fourfold": fourfold.__version__,
            "torch": torch.__version__,
            "device": name,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "grid": shape.named,
            "order": list(shape.order),
            "ranks": shape.world,
            "model": self.config.model.name,
            "parameters": self.language_model.parameters,
            "flops_per_token": {} if flops is None else {"model": flops.model, "hardware": flops.hardware},
            "peak_flops": self.peak.flops,
            "peak_flops_from": self.peak.origin,
            "unigram_entropy": self.entropy,
            "tokens": sum(source.tokens for source in self.sources),
            **self.language_model.facts(),
            "tokens_per_step": self.config.batch.tokens,
            "steps": self.config.train.steps,
        }

    def load(self, start: Start) -> None:
        """Load the checkpoint that the run resumes from, before the first step."""
        if start.resumes:
            self._enter(Phase.CHECKPOINT)
        accept = self.config.data.changed == "accept"
        state, self._load_notes = restore(start, self.model, self.optimizer, self.loader, accept_changes=accept)
        self.step_judge.restore(state)
        self.step = start.step
        self._good = GoodStep(start.step, self.loader.state(), self.step_judge.state())

    def begin(self, sinks: Callable[[], Sequence[Sink]], start: Start | None = None) -> None:
        """Prepare the folder and open the sinks on rank 0, then start saving and watching on every rank.

        If rank 0 fails, all ranks raise. When a run resumes, records and checkpoints after its step are removed first,
        and damaged checkpoints that it passed over get another name.
        """

        def find_folder() -> None:
            if self.config.checkpoint.save and not (self.out / "run.json").exists():
                raise FileNotFoundError(
                    f"{self.out.absolute()}, which rank 0 has made, does not exist on rank {self.grid.rank}; put --out "
                    "on a file system that all nodes share, or set checkpoint.save=false"
                )

        self.alarm.enter(Phase.BEGINNING)
        if self.config.plan.compare is True and not self.profile.steps:
            # every rank traces: one that is slowed down alone would make the others wait
            steps = steps_to_trace(self.step, self.config.train.steps)
            self.profile = StepProfiler(steps, self.grid, self.profile.folder, keep=False)
        try:
            self.grid.run_on_rank0("starting the run", lambda: self._prepare_folder(sinks, start or Start()))
            self.grid.run_together("finding the run's folder", find_folder)
            if self.config.checkpoint.save:
                self.saving = RunSaver(self.config, self.grid, self.out, self.step)
            if self.grid.shape.world > 1:
                self.guard = Guard(self.grid, self.out, self.config.watch.deadline, self.alarm)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    def _prepare_folder(self, sinks: Callable[[], Sequence[Sink]], start: Start) -> None:
        """Lock the folder, remove what a resumed run is about to do again, describe the run, and open the sinks."""
        make_folder(self.out)
        self._lock = FolderLock(self.out)  # before anything in the folder changes
        if not start.resumes and (self.out / "metrics.jsonl").exists():
            check_folder(self.out, save=self.config.checkpoint.save)  # another job was faster since the first look
        remove_drawn_step(self.out)
        kept = self._return_to(start)
        self._write_config()
        self.stored = self.facts()
        if start.resumes and (before := earlier_parts(self.out, start.step)):
            self.stored["resumed"] = before
        if self.config.plan.compare:
            traces = self.profile.folder if self.profile.keep else None
            predicted = predict_run(self.config, self.grid, self.profile.steps, traces)
            self.stored["predicted"], self._prediction_check, price = predicted
            if price is not None and self.config.plan.compare is True:
                self._correction = RunCorrection(price, self.config, self.out)
        write_json(self.out / "run.json", strict(self.stored))
        self._open_counts(start.step)
        self.sinks = list(sinks())
        for found, path in kept:
            again = f"steps {start.step + 1} to {found.step} are trained again"
            self._note(f"passed over {found.folder}, now {path.name}, because {found.why}; {again}")
        for text in (*self._load_notes, *self.loader.notes):
            self._note(text)
        if start.step:
            where = {"grid": str(self.grid.shape), "checkpoint": str(start.checkpoint)}
            left_out = {} if start.skipped is None else {"passed_over": str(start.skipped)}
            self._record({"event": "resumed", "step": start.step, **where, **left_out})

    def _return_to(self, start: Start) -> list[tuple[PassedOver, Path]]:
        """Remove checkpoints and records after the start; return the damaged checkpoints, each with its new name."""
        for later in reversed(start.newer):  # the newest first, so that an interruption leaves no gap
            remove_checkpoint(later)
        kept = [(found, set_aside(found.folder)) for found in start.passed_over]
        if start.resumes:
            rewind(self.out / "metrics.jsonl", start.step)
        if start.returned_by:  # last: a start that dies before is made up for by the next one
            note_return(self.out, start.step, start.returned_by)
        return kept

    def _require_result(self, begun: int) -> None:
        """Raise if every step since the one after which the run began was skipped: an exit code of 0 would hide it.

        All ranks saw the same losses and gradients, so all of them raise.
        """
        if self.step > begun and self._good is not None and self._good.step <= begun:
            kept = "nothing is saved" if self.saving is None else _kept_text(self.saving.saved)
            raise BadStepsError(
                f"all steps from {begun + 1} to {self.step} were skipped, so nothing was trained; {kept}; {WAY_OUT}"
            )

    def train(self) -> None:
        """Train the remaining steps, and record why training ended."""
        reason: str = End.FINISHED
        failed: BaseException | None = None
        stack, begun = ExitStack(), self.step
        try:
            stack.enter_context(nullcontext() if self.step_graph is None else self.step_graph.on_stream())
            self.optimizer.make_state()
            self.meter.begin()
            self._drawn_step = self._drawn_step or min(self.step + DRAWN_STEP, self.config.train.steps)
            compiles = ", which compiles the model" if self.config.policy.compile is True else ""
            self._tell(f"running the first step{compiles}")
            for step in range(self.step + 1, self.config.train.steps + 1):
                self._run_step(step)
                self._after_step(step, last=step == self.config.train.steps)
                if self.stopped:
                    reason = f"stopped by {NAMES[self.stopped]}"
                    break
                if self.out_of_time:
                    reason = End.OUT_OF_TIME
                    break
            self._read_steps()
            if not self.stopped:
                self._require_result(begun)
            if self._prediction_check is not None:
                self._record_comparison(self._prediction_check.finish())
            # whoever stops a run waits for it to end; without a signal the correction of a short run is worth seconds
            self._record_correction(0.0 if self.stopped else LAST_WAIT)
        except KeyboardInterrupt as error:
            reason, failed = End.INTERRUPTED, error
            raise
        except Exception as error:
            reason, failed = f"{type(error).__name__}: {error}", error
            # Our launcher sees which process died, so a lost connection needs no diagnosis by the ranks.
            if isinstance(error, CollectiveError) and not (is_watched() and isinstance(error, LostPeerError)):
                self.guard.failed(str(error))
            raise
        finally:
            stack.close()
            self._end(reason, failed)

    def _after_step(self, step: int, *, last: bool) -> None:
        """Evaluate, ask whether to stop, compare replicas, and save, as far as each is due after this step."""
        self._record_saved()
        evaluated = last or _due(step, self.config.train.evaluate_every)
        if evaluated:
            self._evaluate_after(step)
        self.guard.doing("asking the others whether to stop", Waits.RANKS)
        overdue = self.saving is not None and self.saving.overdue
        verdict = self.stop.after(step, save=overdue, late=self._is_late) if not last else Verdict()
        self.stopped = verdict.signal
        self.out_of_time = verdict.late and not self.stopped
        self.guard.doing("between steps")
        if self.stop.met_after == step:  # all ranks were here just now, so exchanging times waits for nobody
            for one in self.guard.stragglers():
                facts = {"kind": one.kind, "ranks": list(one.ranks), "seconds": one.seconds, "peers": one.peers}
                self._record({"event": "straggler", "step": step, **facts, "said": str(one)})
        if self.out_of_time and not evaluated:
            self._evaluate_after(step)
        ends = last or self.stopped > 0 or self.out_of_time
        saves = self.saving is not None and (ends or verdict.save or self.saving.due(step))
        if saves or ends or _due(step, self.config.watch.replicas_every):
            with self._between_steps("comparing replicas", "replicas"):
                check_replicas(training_shards(self.model, self.optimizer), self.grid, self.language_model.copies)
        if self.saving is not None and saves:
            # after the records of the step: a checkpoint without them would resume a run with a gap
            with self._between_steps("saving a checkpoint", "saving"):
                if self.grid.rank == 0 and not (self.out / "config.toml").exists():
                    self._describe_again()
                self._save(self.saving, step, ends=ends)
                self._record_saved()

    @property
    def _is_late(self) -> bool:
        """Whether `train.minutes` are over by the clock of this rank."""
        minutes = self.config.train.minutes
        return minutes is not None and time.monotonic() - self._began >= 60 * minutes

    def _evaluate_after(self, step: int) -> None:
        """Evaluate after this step, if the run has held-out data."""
        if self.evaluation is not None:
            with self._between_steps("evaluating", "evaluation"):
                self._record({"event": "evaluation", "step": step, **self.evaluate()})

    def _describe_again(self) -> None:
        """Write the files without which nobody can resume the run, after somebody has moved or removed its folder."""
        warn(f"{self.out} was moved or removed while the run trains; writes config.toml and run.json there again")
        make_folder(self.out)
        self._write_config()
        write_json(self.out / "run.json", strict(self.stored))

    def _write_config(self) -> None:
        """Write the config, and the schedule that pipe ranks walk."""
        write_text(self.out / "config.toml", self.config.stored(self.out).toml())
        if self.language_model.schedule is not None:
            write_text(self.out / SCHEDULE_FILE, to_csv(self.language_model.schedule))

    def _save(self, saving: RunSaver, step: int, *, ends: bool) -> None:
        """Save after this step; if it was skipped, put the save off or, at the end, save the last good step."""
        good = self._good
        if good is not None and (ends or good.step == step):
            if good.step < step:
                first = good.step + 1
                skipped = f"steps {first} to {step} were skipped" if first < step else "the step was skipped"
                self._note(f"{skipped}; {_kept_text(good.step)}")
            saving.save(good, self.model, self.optimizer, last=ends)
        elif saving.put_off():
            self._note("the step was skipped; its checkpoint is put off until a step is not")

    @contextmanager
    def _between_steps(self, doing: str, name: str) -> Iterator[None]:
        """Do work that belongs to no step: earlier steps are read first, and the time is not counted."""
        self._read_steps()
        self.guard.doing(doing)
        with self.profile.aside(name):
            yield
        self.meter.begin()

    def _run_step(self, step: int) -> None:
        """Run one step, and start or end the profile if the step is its first or last."""
        if step in self.profile.steps[:1]:
            self._read_steps()
            self.profile.begin()
            self.meter.begin()
        drawn = self.language_model.schedule is not None and step == self._drawn_step
        if drawn:
            self._read_steps()
            self.language_model.times = ActionTimes(self.grid.device)
        with self.profile.step(step):
            self._launch(step)
        if drawn:
            self._read_steps()
            self._write_times(step)
            self.meter.begin()
        self._read_steps(leave=1 if self.meter.on_gpu else 0)
        if step in self.profile.steps[-1:]:
            self._read_steps()
            if (written := self.profile.end()) is not None:
                self._record(written)
            self._start_correction()
            self.meter.begin()

    def _write_times(self, step: int) -> None:
        """Write when the actions of this step ran: one rank of each pipe coordinate does."""
        grid, times, self.language_model.times = self.grid, self.language_model.times, None
        if times is None or any(grid.coords[axis] for axis in CUTS) or not (self.out / "run.json").exists():
            return
        spans = [[*span.action, span.start, span.end] for span in times.spans()]
        found = {"step": step, "rank": grid.rank, "pipe": grid.coords[PIPE], "spans": spans}
        try:
            write_pipe_times(self.out, found)
        except OSError as error:  # a full disk; the page then shows the schedule as planned
            warn(f"{error.strerror}; the run continues")

    def _write_documents(self, step: int, batches: Sequence[TokenBatch]) -> None:
        """Write the lengths of the documents of this step: one rank of each context group does, or of each place."""
        shape, rank, coords = self.grid.shape, self.grid.rank, self.grid.coords
        group, parts = shape.row_place(rank), [self.language_model.parts(batch) for batch in batches]
        inside = any(coords[axis] for axis in AXES if axis not in BATCH) or shape.member(rank)
        if inside or group >= MOST_GROUPS or not any(parts) or not (self.out / "run.json").exists():
            return
        try:
            write_documents(self.out, {"step": step, "group": group, "micro_batches": parts})
        except OSError as error:  # a full disk; the page then does not show work by place
            warn(f"{error.strerror}; the run continues")

    def _launch(self, step: int) -> None:
        """Launch forward, backward and the optimizer of a step, without waiting for the device."""
        optimizer = self.optimizer
        self.language_model.clock.begin_step(step)
        self.guard.begin_step(step)
        learning_rate = self.schedule.apply(optimizer, step)
        batches = self.loader.next()
        imbalance = self.language_model.imbalance(batches) if self.grid.rank == 0 else None
        if step == self._drawn_step:
            self._write_documents(step, batches)
        self.guard.doing("computing")
        # Use the current limit: on a GPU the previous step has not been judged yet when this step is launched.
        limit = self.step_judge.limit
        skip_above = torch.full((), self.step_judge.skip_above, dtype=torch.float64, device=self.grid.device)
        # A traced step runs eagerly: a trace of a replay would name neither layers nor collectives.
        graph = None if step in self.profile.steps else self.step_graph
        if graph is not None and not graph.reason:
            batches = [batch.for_replay(self.grid.device) for batch in batches]
        loss, norm, shards, load = (self._compute if graph is None else graph)(batches, skip_above)
        if graph is not None:
            self._not_replayed = graph.reason
        if self._not_replayed and not self._told_reason:
            self._told_reason = True
            self._note(f"steps are not replayed as a CUDA graph: {self._not_replayed}")
        clipped = Clipped(norm, self.grid, self._gradient_names, shards)
        data, real_tokens = self.loader.state(), self.loader.real_tokens
        # Copied now: reading them later from the device would wait for the next step, which is launched before.
        results = torch.empty(2, dtype=torch.float64, pin_memory=self.meter.on_gpu)
        results.copy_(torch.stack([loss, norm.to(loss.dtype)]), non_blocking=True)
        due = _due(step, self.config.log.companions_every) or step == self.config.train.steps
        companions = self.language_model.companions() if due else None
        load, companions = self._on_host(load), self._on_host(companions)
        metrics = self.meter.end(replayed=graph is not None and graph.replayed)
        about = data, real_tokens, imbalance, load, companions, metrics
        self._in_flight.append(StepInFlight(step, learning_rate, results, limit, clipped, *about))

    def _on_host(self, counts: Tensor | None) -> Tensor | None:
        """Return the host's copy of counts, which has its values once the device has finished the step."""
        if counts is None:
            return None
        return torch.empty_like(counts, device="cpu", pin_memory=self.meter.on_gpu).copy_(counts, non_blocking=True)

    def _compute(
        self, batches: Sequence[TokenBatch], skip_above: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Run forward, backward and the optimizer of a step, which is skipped if the loss is above `skip_above`.

        Return the loss, the norm of the gradients, the norms of this rank's shards of them, and the load of experts if
        there are any. Everything stays on the device, so that the host does not wait, and a CUDA graph can contain it.
        """
        loss = self.language_model.forward_backward(batches)
        clipped = self.optimizer.clip_and_step(self.config.optimizer.clip, unless=loss > skip_above)
        self.optimizer.zero_grad()
        self._gradient_names = clipped.names
        return loss, clipped.norm, clipped.shards, self.language_model.expert_load()

    def _read_steps(self, leave: int = 0) -> None:
        """Read the oldest steps in flight, and leave this many of the newest."""
        while len(self._in_flight) > leave:
            self._read(self._in_flight.popleft())

    def _read(self, done: StepInFlight) -> None:
        """Wait for the results of a step, record them, and act if the step is bad."""
        bad = self._record_step(done)
        if bad is not None:
            self._handle_bad_step(bad, done.clipped)

    def _record_step(self, done: StepInFlight) -> BadStep | None:
        """Wait for the results of a step, record them, and return what is bad about the step."""
        self.guard.doing("reading results of its device", Waits.DEVICE if self.meter.on_gpu else Waits.NOTHING)
        metrics = done.metrics()  # waits until the device has finished the step
        self.guard.doing("writing the step's metrics and output")
        loss, norm = done.results.tolist()
        self.guard.took(metrics.seconds, metrics.exposed_seconds or {})
        self.profile.add(done.step, metrics)
        bad = self.step_judge.judge(done.step, loss, norm, done.limit)
        if bad is None or bad.action == "tell":
            self._good = GoodStep(done.step, done.data, self.step_judge.state())
        elif not bad.in_a_row:
            self._good = None  # a spike that was not skipped: the parameters hold it now
        tokens_per_second = done.real_tokens / metrics.seconds
        mfu, hfu = self.peak.utilization(self.language_model.flops, tokens_per_second, self.grid.shape.world)
        self.step = done.step
        event: RunEvent = {
            "event": "step",
            "step": done.step,
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": done.learning_rate,
            **asdict(metrics),
            "tokens_per_second": tokens_per_second,
            "mfu": mfu,
            "hfu": hfu,
            "skipped": bad is not None and bad.in_a_row > 0,
        }
        if self.config.data.bag_rows is not None:
            event["padding"] = 1 - done.real_tokens / self.config.batch.tokens
        if done.imbalance is not None:
            event["imbalance"] = done.imbalance
        collapsed = None if done.load is None else self._judge_load(done, done.load, event)
        self._record(event)
        if collapsed:
            self._record({"event": "collapse", "step": done.step, "said": collapsed})
        if self._prediction_check is not None:
            self._record_comparison(self._prediction_check.add(event))
            self._record_correction()
        return bad

    def _judge_load(self, done: StepInFlight, load: Tensor, event: RunEvent) -> str:
        """Add the load of experts to the event of a step, record the counts, and return which routers collapse."""
        counts = StepCounts(done.step, load.tolist())
        loads = counts.loads.values()
        event["expert_load"] = {"worst": max(loads), "mean": fmean(loads), "unused": counts.unused}
        if self._counts is not None:
            # the companions of many steps may be more than a record can say
            companions = None if done.companions is None else done.companions.clamp(max=LARGEST).flatten().tolist()
            try:
                self._counts.write(counts, companions)
            except OSError as error:
                warn(f"the counts of experts are no longer recorded: {error.strerror}; the run continues")
                self._close_counts()
        return self._router_judge.judge(counts, self.language_model.experts_of_a_token)

    def _open_counts(self, after: int) -> None:
        """Open the file of a mixture's counts; a run that resumes keeps those up to the step after which it does."""
        if self.language_model.experts is not None:
            self._counts = CountsFile(self.out, *self.language_model.experts, after=after)

    def _close_counts(self) -> None:
        if self._counts is not None:
            self._counts.close()
            self._counts = None

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
        try:
            self.step_judge.act(bad, name, self.loader.state())
        except RollBackError:
            raise  # the run goes back to its newest checkpoint
        except BadStepsError as error:
            raise BadStepsError(f"{error}; {self._keep_good_step()}") from error

    def _keep_good_step(self) -> str:
        """Save the last good step of a run that bad steps end, and return words for what is kept.

        All ranks saw the same losses and gradients, so all of them come here.
        """
        while self._in_flight:  # their results decide which step the parameters are those of
            self._record_step(self._in_flight.popleft())
        if self.saving is None:
            return "nothing is saved"
        if self._good is None:
            return f"the step is in the parameters, so they are not saved; {_kept_text(self.saving.saved)}"
        self.guard.doing("saving a checkpoint")
        try:
            self.saving.save(self._good, self.model, self.optimizer, last=True)
        except (NotSavedError, NotFiniteError) as error:
            return str(error)
        return _kept_text(self._good.step)

    @torch.no_grad()
    def evaluate(self) -> RunEvent:
        """Return the mean loss over the held-out batches."""
        if self.evaluation is None:
            raise ValueError("there is no held-out data; set data.held_out and train.evaluate_every above 0")
        total, count = (torch.zeros((), dtype=torch.float64, device=self.grid.device) for _ in range(2))
        with evaluating(self.model):
            for batch in self.evaluation:
                targets_in_batch = count_targets(batch.targets, self.grid)
                loss = self.language_model.value(self.language_model.loss(batch, targets_in_batch))
                total += loss * targets_in_batch
                count += targets_in_batch
        self.language_model.expert_load()  # those of the held-out data belong to no step
        return {"loss": (total / count).item(), "unigram_entropy": self.entropy}

    def _record_comparison(self, compared: RunEvent | None) -> None:
        """Record how the run compares with its prediction, if that is known now."""
        if compared is not None:
            self._store(compared)
            self._start_correction()

    def _start_correction(self) -> None:
        """Begin to correct the plan once both are known: how steps compare with it, and the parts of a step."""
        if self._correction is not None and "compared" in self.stored and self.profile.traced:
            self._correction.start(self.profile.traced, self.profile.steps, self.stored["compared"])

    def _record_correction(self, wait: float = 0.0) -> None:
        """Record the corrected plan, if it is known now or within some seconds."""
        if self._correction is not None and (corrected := self._correction.take(wait)) is not None:
            self._store(corrected)

    def _store(self, event: RunEvent) -> None:
        """Record an event, and put it into run.json under its own name."""
        self.stored[event["event"]] = {key: value for key, value in event.items() if key != "event"}
        try:
            write_json(self.out / "run.json", strict(self.stored))
        except OSError as error:  # a full disk; the metrics have the event too
            warn(f"{error.strerror}; the run continues")
        self._record(event)

    def _record_saved(self) -> None:
        """Record the checkpoints that were completed since the last call, if the folder is still this job's."""
        if self._lock is not None:
            self._lock.require_held()
        for event in () if self.saving is None else self.saving.completed():
            self._record(event)

    def _note(self, text: str) -> None:
        """Record something about the run's checkpoints or data that people should know."""
        self._record({"event": "note", "step": self.step, "said": text})

    def _record(self, event: RunEvent) -> None:
        for sink in self.sinks:
            sink.write(event)

    def _end(self, reason: str, failed: BaseException | None) -> None:
        """Close everything that the run opened, and record why it ended."""
        self.guard.close(done=failed is None)
        if self.step_graph is not None and (failed is None or isinstance(failed, RollBackError)):
            # The run may go on from a checkpoint, with a graph of its own. After other failures a rank may be dead, and
            # waiting for the device would take for ever.
            self.step_graph.release()
        self.loader.close()
        self.profile.close()
        # A sink that fails now, because the disk is full or a callback raises, must not hide why the run ended.
        ended_well = reason in (End.FINISHED, End.OUT_OF_TIME)
        with nullcontext() if ended_well else suppress(OSError, CallbackError), ExitStack() as stack:
            if self._lock is not None:
                stack.callback(self._lock.release)
            stack.callback(self._close_counts)
            for sink in self.sinks:
                stack.callback(sink.close)
            if self.saving is not None:
                # Do not wait long after Ctrl-C, nor if a rank is dead and its part will never arrive.
                hurried = isinstance(failed, (KeyboardInterrupt, LostPeerError, LostStoreError))
                self.saving.wait_for_own_part(hurried=hurried)
                self._record_saved()
            self._record({"event": "end", "step": self.step, "reason": reason})


def make_optimizer(model: nn.Module, section: OptimizerSection, rate: float) -> ShardedOptimizer:
    """Return the optimizer that the config names, on the shards of the model, with this learning rate."""
    decay = section.weight_decay
    if section.name == "adamw":
        return AdamW(model, rate, betas=(section.beta1, section.beta2), eps=section.eps, weight_decay=decay)
    kind: type[ShardedOptimizer] = SGD
    if section.name != "sgd":
        found = import_object(section.name, "package.module:Class")
        if not isinstance(found, type) or not issubclass(found, torch.optim.Optimizer):
            raise ValueError(f"optimizer.name={section.name} is no subclass of torch.optim.Optimizer; give one that is")
        kind = on_shards(found)
    try:
        made = kind(model, rate, weight_decay=decay, **section.options)
    except TypeError as error:
        raise ValueError(f"optimizer.options={section.options}: {section.name} does not take them: {error}") from error
    if decay and "weight_decay" not in made.defaults:
        raise ValueError(
            f"optimizer.weight_decay={decay}, but {section.name} has no weight decay; set optimizer.weight_decay=0"
        )
    # state that no checkpoint can hold is refused now, and not when the first one is due
    try:
        require_fit(model, made)
    except TypeError as error:
        raise ValueError(f"optimizer.name={section.name}: {error}") from error
    return made


def _due(step: int, every: int) -> bool:
    """Return whether something that is done after every so many steps is due; 0 never is."""
    return every > 0 and step % every == 0


def _kept_text(step: int) -> str:
    """Return words for the newest checkpoint of a run that cannot save its last step."""
    return f"the newest checkpoint is that of step {step}" if step else "there is no checkpoint"


def open_sources(config: TrainConfig, grid: Grid, cache: Path) -> list[TokenSource]:
    """Open the sources of a run on every rank. Rank 0 opens them first, because it may have to prepare text once."""
    found = grid.run_together("opening the data", lambda: open_sources_here(config, cache) if grid.rank == 0 else [])
    return grid.run_together("opening the data", lambda: found or open_sources_here(config, cache))


def open_sources_here(config: TrainConfig, cache: Path) -> list[TokenSource]:
    """Open the sources of a run in this process; text is prepared into the folder `cache`."""
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.eod)
    return [
        open_source(source.path, tokenizer=tokenizer, eod=source.eod, cache=cache, column=source.column)
        for source in config.data.sources
    ]
