"""A training step that is recorded as a CUDA graph and replayed, so that the device never waits for Python.

    step = ff.StepGraph(train_step, model)
    for tokens, targets in loader:
        loss = step(tokens, targets)

The first calls run the function as it is: they compile, allocate optimizer state, make communicators, and show the
order in which weights are gathered. The next call records it, with the collectives of all lanes inside the graph, and
from then on a call copies its inputs into the tensors that the graph reads, and replays. Nothing is computed while
recording, so a step that cannot be recorded is simply run as before, and `reason` says why. So is one whose replays
turn out to be slower: over a network NCCL calls the host for every collective of a graph, and the device waits for it.

Steps before and after the recording run on one stream of their own. Autograd remembers the stream of each node, and a
step on the default stream would make the recorded backward pass depend on work outside of the graph.

Invariant: a replay computes what the function would compute, bit for bit.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from fourfold.axes import PIPE
from fourfold.gradients import gradients_of
from fourfold.optim import ShardedOptimizer
from fourfold.params import local_of
from fourfold.recording import Recording

T = TypeVar("T")

WARMUP = 3
"""Calls before a step is recorded: the first compiles and allocates, the second follows the recorded order of gathers,
and the third finds everything as all later ones will."""


COMPARED = 5
"""Calls after the recording in which replays are timed, to compare them with the calls before."""
SLOWER = 1.1
"""A graph is given up if its replays take this many times as long as calls without it."""


class StepGraph(Generic[T]):
    """A function of tensors that makes one training step, recorded once and replayed from then on.

    `step` runs forward, backward and the optimizer, and returns tensors, in any nesting. It is called while recording
    and never again, so whatever else it does on the host happens only then: schedulers and logs belong outside. Inputs
    may be tensors and None, also nested; a call with other shapes than the recorded one runs the function itself, and
    so does a call while other parameters are frozen, or other modules in training mode, than in the recorded one. With
    `always` replays are not given up if they are slower than calls without a graph.
    """

    def __init__(self, step: Callable[..., T], model: nn.Module, *, warmup: int = WARMUP, always: bool = False) -> None:
        gradients = gradients_of(model)
        self._step, self._gradients, self._grid = step, gradients, gradients.grid
        self._switches = Switches(model)
        self._warmup = warmup
        self._calls = 0
        self._warmed: Sequence[Any] = ()
        self._alike = 0  # the number of calls in a row with inputs of the shapes of `_warmed`
        self._next_try = warmup + 1
        """The call in which ranks ask each other next whether all of them can record. All make as many calls, but some
        may have got other shapes."""
        self._compare_at = 0
        """The call in which ranks compare the times of replays with those before."""
        self.replayed = False
        """Whether the last call was a replay."""
        self.reason = why_not(model, self._grid.device)
        """Why steps are not recorded, in words; empty if they are, or will be after the first calls."""
        self._stream: torch.cuda.Stream | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._recording: Recording | None = None
        self._recorded_switches: list[bool] = []
        self._times: CallTimes | None = None if self.reason or always or warmup < 2 else CallTimes()
        self._before: GradientsBefore | None = None
        self._inputs: Any = None
        self._outputs: Any = None
        if not self.reason:
            self._stream = torch.cuda.Stream(self._grid.device)
            gradients.renew_leaves()  # those of today were made on another stream
            self._grid.graphs.add(self)

    @property
    def recorded(self) -> bool:
        """Whether calls replay a graph."""
        return self._graph is not None

    def __call__(self, *inputs: Any) -> T:
        if self.reason:
            return self._step(*inputs)
        with self.on_stream():
            self._calls += 1
            if self._graph is None:
                self._warm_up(inputs)
                if self._may_record():
                    self._record(inputs)
                    self._compare_at = self._calls + COMPARED
            if self._times is not None and self._calls == self._compare_at:
                self._give_up_if_slower(self._times)
            self.replayed = self._graph is not None and self._replayable(inputs)
            with self._timed():
                if not self.replayed:
                    return self._step(*inputs)
                self._replay(inputs)
        # on the caller's stream, which has waited: the next replay overwrites the graph's own tensors
        return tree_map_only(Tensor, Tensor.clone, self._outputs)

    def _warm_up(self, inputs: Sequence[Any]) -> None:
        """Count a call before the recording."""
        if not _fits(inputs, self._warmed):
            self._warmed, self._alike = _alike_without_values(inputs), 0
            if self._times is not None:
                self._times.eager.clear()
        self._alike += 1

    def _may_record(self) -> bool:
        """Return whether all ranks have seen enough calls with inputs like these.

        Ranks ask each other in the first call in which they may all have, then ever more rarely.
        """
        ready = self._alike > self._warmup
        if self._grid.shape.world == 1:
            return ready
        if self._calls != self._next_try:
            return False
        self._next_try *= 2
        return bool(self._grid.channel.decide("ready" if ready else "", min))

    @contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the block on the stream of the steps: it waits for the current stream, which waits for it afterwards."""
        outside = torch.cuda.current_stream(self._grid.device) if self._stream is not None else None
        if self._stream is None or outside is None or outside == self._stream:
            yield
            return
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def release(self) -> None:
        """Free the graph. NCCL's communicators cannot be destroyed before graphs that contain their collectives."""
        if self._graph is not None:
            torch.cuda.synchronize(self._grid.device)  # a replay may be running
            self._graph.reset()
        self._graph = self._recording = self._inputs = self._outputs = None
        self._before = None
        self.reason = self.reason or "the graph was released"

    def _record(self, inputs: Sequence[Any]) -> None:
        """Record the step on all ranks; if one rank cannot, note the reason and record it on none."""
        device = self._grid.device
        graph, fault, outer = torch.cuda.CUDAGraph(), "", sys.exception()
        self._inputs = tree_map_only(Tensor, lambda given: given.to(device, copy=True), inputs)
        for parameter, _ in self._gradients.parameters.values():
            local_of(parameter)  # a gather of the last optimizer step may be in flight, and its wait cannot be recorded
        self._before = before = GradientsBefore([parameter for parameter, _ in self._gradients.parameters.values()])
        recording = Recording(device, before.versions())
        torch.cuda.synchronize(device)  # NCCL's watchdog must have nothing left to ask the device about
        gc.collect()
        collects = gc.isenabled()
        gc.disable()  # a tensor that is freed now might belong to work outside of the graph
        steps = OptimizerSteps()
        checks = register_optimizer_step_pre_hook(steps)
        self._grid.recording = recording
        try:
            with (
                self._grid.ledger.recorded(recording),
                # other threads (autograd's, NCCL's watchdog) may call CUDA meanwhile
                torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"),
            ):
                recording.begin()
                self._outputs = self._step(*self._inputs)
                steps.check_gradients(before.parameters)
        except Exception as error:
            fault = _cause(error, outer)
        except BaseException:  # Ctrl-C: the other ranks are not asked
            self._give_up(before)
            raise
        finally:
            self._grid.recording = None
            checks.remove()
            if collects:
                gc.enable()
        fault = self._grid.channel.decide(fault, _first_fault)
        if fault:
            self._give_up(before)  # also on ranks that could record it
            self.reason = fault
        else:
            self._graph, self._recording, self._recorded_switches = graph, recording, self._switches.now()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Let the device time a call: a replay, or one of those before the recording but the first, which compiles."""
        if self._times is None or not (self.replayed or (self._graph is None and self._alike > 1)):
            yield
            return
        began, ended = (torch.cuda.Event(enable_timing=True, blocking=True) for _ in range(2))
        began.record()
        yield
        ended.record()
        (self._times.replays if self.replayed else self._times.eager).append((began, ended))

    def _give_up_if_slower(self, times: CallTimes) -> None:
        """Compare the replays so far with the calls before them; all ranks decide alike."""
        self._times = None
        self.reason = self._grid.channel.decide(times.text(), slower_replays)
        if self.reason:
            self.release()

    def _give_up(self, before: GradientsBefore) -> None:
        """Leave the model as it was before the recording."""
        self._gradients.forget_step()
        before.restore()
        self.release()
        _record_nothing(self._stream, self._grid.device)

    def _replayable(self, inputs: Sequence[Any]) -> bool:
        """Return whether the function would do with these inputs what the graph does."""
        return _fits(inputs, self._inputs) and self._switches.now() == self._recorded_switches

    def _replay(self, inputs: Sequence[Any]) -> None:
        if self._graph is None or self._recording is None:
            raise RuntimeError("this step was not recorded")
        for static, given in zip(tree_leaves(self._inputs), tree_leaves(inputs), strict=True):
            if isinstance(given, Tensor):
                static.copy_(given, non_blocking=True)
        for act in (*self._grid.before_replays, *self._recording.before):
            act()
        self._graph.replay()
        # the device is busy from here on, so the host's own work costs nothing
        self._grid.ledger.replayed(self._recording)
        for act in self._recording.after:
            act()


Span = tuple[torch.cuda.Event, torch.cuda.Event]
"""Where a call began on the device, and where it ended."""


class CallTimes:
    """How long the device took for calls without a graph, and for replays."""

    def __init__(self) -> None:
        self.eager: list[Span] = []
        self.replays: list[Span] = []

    def text(self) -> str:
        """Return the fastest call without a graph and the median replay, in ms, as text for the other ranks.

        Both are 0 on a rank whose inputs had other shapes since.
        """
        if not self.eager or not self.replays:
            return "0 0"
        self.replays[-1][1].synchronize()
        eager, replays = ([began.elapsed_time(ended) for began, ended in spans] for spans in (self.eager, self.replays))
        return f"{min(eager)} {median(replays)}"


def slower_replays(texts: Sequence[str]) -> str:
    """Return why replays are given up, by the times of all ranks, of which the slowest decides; empty if they stay."""
    eager, replay = (max(map(float, times)) for times in zip(*map(str.split, texts), strict=True))
    if replay <= SLOWER * eager:
        return ""
    return f"a replay takes {replay:.1f} ms, where the step without a graph takes {eager:.1f} ms"


class GradientsBefore:
    """The gradients that were there before a recording. A graph reads them if its step sets them to zero, and keeps
    them in memory therefore."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters
        self._kept: list[tuple[nn.Parameter, Any, Tensor, Any]] = []
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                # with its shard and spec: summing a gradient over ranks changes them
                self._kept.append((parameter, gradient, local_of(gradient), gradient._spec))  # type: ignore[attr-defined]

    def versions(self) -> dict[int, int]:
        """Return how often each shard was written, by the id of its gradient."""
        return {id(gradient): shard._version for _, gradient, shard, _ in self._kept}

    def restore(self) -> None:
        """Put them back as they were, since nothing was computed: the step that runs now may add to them."""
        for parameter, gradient, shard, spec in self._kept:
            gradient._local_tensor, gradient._spec = shard, spec
            parameter.grad = gradient


class Switches:
    """What a loop may switch between steps: which parameters are trained, and which modules are in training mode."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter, _ in gradients_of(model).parameters.values()]
        self._modules = list(model.modules())

    def now(self) -> list[bool]:
        return [*[each.requires_grad for each in self._parameters], *[each.training for each in self._modules]]


def _record_nothing(stream: torch.cuda.Stream | None, device: torch.device) -> None:
    """Record a graph that is thrown away: a failed recording leaves torch's generators unusable until the next one."""
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


def why_not(model: nn.Module, device: torch.device) -> str:
    """Return why the steps of this model cannot be recorded on the device, as far as that is known beforehand."""
    if device.type != "cuda":
        return f"a {device.type} has no CUDA graphs"
    if (pipe := gradients_of(model).grid.size(PIPE)) > 1:
        return f"messages between the stages of a pipeline (pipe={pipe}) are not recorded"
    if gradients_of(model).policy.check_inputs:
        return "check_inputs=True makes the host read every batch"
    if gradients_of(model).policy.offload:
        return "offload=True copies activations to the host on other streams, with buffers that the host hands out"
    return next((why for module in model.modules() if (why := getattr(module, "not_recordable", ""))), "")


class OptimizerSteps:
    """Is called before each step of an optimizer while a step is recorded, and refuses what replays would get wrong."""

    def __init__(self) -> None:
        self._any = False

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Refuse an optimizer whose learning rate the graph would keep for ever."""
        self._any = True
        if isinstance(optimizer, ShardedOptimizer):
            if optimizer.not_recordable:
                raise TypeError(f"{type(optimizer).__name__}: {optimizer.not_recordable}")
        elif any(not isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
            raise TypeError(
                f"{type(optimizer).__name__} has its learning rate on the host, where a replay does not see it change; "
                "give it lr=torch.tensor(...) on the device and capturable=True, or use ff.optim.AdamW"
            )

    def check_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse gradients for an optimizer outside: replays set no `parameter.grad`, nor do they add to earlier ones.

        Called when everything is recorded.
        """
        if not self._any and any(parameter.grad is not None for parameter in parameters):
            raise TypeError(
                "the function leaves gradients to an optimizer outside of it, which would not find those of a replay; "
                "let it run forward, backward and the optimizer's step"
            )


def _fits(inputs: Sequence[Any], recorded: Sequence[Any]) -> bool:
    """Return whether inputs have the structure, shapes and dtypes of the recorded ones."""
    (given, structure), (static, expected) = tree_flatten(inputs), tree_flatten(recorded)
    return structure == expected and all(_alike(*pair) for pair in zip(given, static, strict=True))


def _alike_without_values(inputs: Sequence[Any]) -> Sequence[Any]:
    """Return inputs with the shapes and dtypes of these, without their memory."""
    return tree_map_only(Tensor, lambda given: torch.empty_like(given, device="meta"), inputs)


def _alike(given: Any, static: Any) -> bool:
    if isinstance(given, Tensor) and isinstance(static, Tensor):
        return given.shape == static.shape and given.dtype == static.dtype
    return given == static


def _cause(error: BaseException, outer: BaseException | None) -> str:
    """Return the first line of the error that came first: ending a failed recording raises another one.

    `outer` is what the caller of the step was handling already.
    """
    while error.__context__ is not None and error.__context__ is not outer:
        error = error.__context__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _first_fault(faults: Sequence[str]) -> str:
    return next((f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault), "")
