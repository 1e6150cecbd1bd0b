"""Optimizers over the shards of a model, with their state optionally sharded over the data axis (ZeRO-1).

torch's own optimizers step this rank's rows as plain tensors, without DTensor's dispatch. With
`Policy(shard_optimizer=True)` each replica keeps optimizer state for its own rows only: gradients are reduce-scattered
over data, and the stepped rows are gathered over data, in the buckets of the gradients.

`AdamW` and `SGD` are fused: one kernel scales gradients and steps, unless the device has found that the step must be
skipped. Any other optimizer that treats each element by itself is put on shards by `on_shards`; the host decides about
its steps.
"""

from __future__ import annotations

import inspect
import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from math import cos, inf, pi, prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.axes import CUTS
from fourfold.comm import Pending
from fourfold.grad_norm import is_incomplete, measure_norms, scale_gradients
from fourfold.gradients import Bucket, gradients_of
from fourfold.grid import Grid
from fourfold.params import GRAD, local_of, restore, wait_on_use
from fourfold.recording import Recording
from fourfold.torch_hooks import ELEMENTWISE

Decay = Literal["cosine", "stable", "constant"]


@dataclass(frozen=True, slots=True)
class Clipped:
    """What `clip_and_step` learned about the gradients; it stays on the device until somebody reads it."""

    norm: Tensor
    """The norm of all gradients before clipping. If it is not finite, the step was skipped."""
    grid: Grid
    names: tuple[str, ...]
    shards: Tensor
    """The norm of this rank's shard of the gradient of each of these parameters."""

    def first_not_finite(self) -> str | None:
        """Return the first parameter whose gradient was not finite on some rank; all ranks must call this.

        Pipe ranks have different parameters: it is the first one of the first of them that has any.
        """
        flags = (~self.shards.isfinite()).float()
        for axis in CUTS:
            flags = comm.all_reduce(flags, self.grid, axis, label="not finite").wait()
        own = next((name for name, flag in zip(self.names, flags.tolist(), strict=True) if flag), "")
        return next(filter(None, self.grid.texts_by_pipe(own)), None)


ParameterState = dict[str, Tensor | float | None]
"""An optimizer's state of one parameter: tensors of its shape, and scalars."""


class ShardedOptimizer(torch.optim.Optimizer):
    """The methods of an optimizer over a model's shards; a subclass also derives from the optimizer of torch.

    `param_groups` hold this rank's rows of the parameters; torch's learning-rate schedulers work with them. Weight
    decay applies to matrices only, not to biases, norms and other vectors.
    """

    kind: type[torch.optim.Optimizer] | None = None
    """The class that `on_shards` puts on shards, which is tried before; None if it treats each element by itself."""
    fused = False
    """Whether torch's kernel scales the gradients, and skips a step that the device finds to be bad."""

    def __init__(self, model: nn.Module, lr: float, *, weight_decay: float, **options: Any) -> None:
        """Make the optimizer of torch with these options on the rows of the model's parameters that this rank steps."""
        if not isinstance(model, nn.Module):
            name = type(self).__name__
            raise TypeError(f"{name} takes the model itself, not its parameters: {type(model).__name__} was given")
        self.options: dict[str, Any] = {"lr": lr, **options}
        """The keyword arguments for the class of torch."""
        self.gradients = gradients_of(model)
        if self.kind is not None:
            dims = {
                len(spec.shape) for parameter, spec in self.gradients.parameters.values() if parameter.requires_grad
            }
            by_pipe = map(json.loads, self.gradients.grid.texts_by_pipe(json.dumps(sorted(dims))))
            dims = {number for stage in by_pipe for number in stage}  # so that all ranks raise, or none
            require_elementwise(self.kind, self.options, weight_decay, dims, self.gradients.grid.device)
        found = [getattr(module, "update_router_biases", None) for module in model.modules()]
        self._balances: list[Callable[..., None]] = [update for update in found if callable(update)]
        """What moves the biases of routers, once a step."""
        self.parts: dict[str, nn.Parameter] = {}
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, (parameter, spec) in self.gradients.parameters.items():
            if parameter.requires_grad:
                local = local_of(parameter).detach()
                if local.dim():  # a parameter without dims has no rows; it is never cut
                    rows = self.gradients.own_rows(local, spec)
                    local = local[rows.start : rows.stop]
                part = nn.Parameter(local)
                self.parts[name] = part
                (decayed if part.dim() > 1 else others).append(part)
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        # A group without parameters is left out, unless a rank at another pipe coordinate has some of it: groups have
        # the same numbers on all ranks, and a rank whose parameters are all frozen has an optimizer that does nothing.
        used = [bool(group["params"]) for group in groups]
        by_pipe = [used, *map(json.loads, self.gradients.grid.texts_by_pipe(json.dumps(used)))]
        kept = [group for group, *uses in zip(groups, *by_pipe, strict=True) if any(uses)]
        super().__init__(kept, **self.options)  # type: ignore[call-arg]
        # what recorded steps read; fp32, which is what torch's fused kernels take
        device = next((part.device for part in self.parts.values()), self.gradients.grid.device)
        self._rates = [torch.zeros((), device=device) for _ in self.param_groups]

    @property
    def not_recordable(self) -> str:
        """Why a step of this optimizer cannot be part of a CUDA graph; empty if it can."""
        return "" if self.fused else "the host decides whether to skip a step of this optimizer"

    def make_state(self) -> None:
        """Make the state of all parameters that have none yet; otherwise the first step makes it.

        Before the first forward pass it gets memory of its own. Made in a step it lies between activations, in memory
        that a step which is recorded later can neither use nor give back.
        """
        for part in self.parts.values():
            if self.fused and not self.state[part]:
                self.state[part] = self.fresh_state(part)

    @abstractmethod
    def fresh_state(self, part: Tensor) -> ParameterState:
        """Return state with the keys, shapes and dtypes that a step gives a parameter; its numbers mean nothing yet."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for name, part in self.parts.items():
            parameter = self.gradients.parameters[name][0]
            gradient = parameter.grad
            if part.untyped_storage().data_ptr() != local_of(parameter).untyped_storage().data_ptr():
                raise RuntimeError(f"{name} has moved since this optimizer was made (model.to(...)?); make it anew")
            if is_incomplete(parameter):
                raise RuntimeError(
                    f"the gradient of {name} is not summed over ranks yet; "
                    "run the last micro-step's backward() outside of ff.accumulate"
                )
            part.grad = None if gradient is None else gradient._local_tensor  # type: ignore[attr-defined]
        recording = self.gradients.grid.recording
        if recording is None:
            super().step()
        else:
            self._joins(recording)
            with self._recordable():
                super().step()
        self._count_changes()
        if self.gradients.policy.shard_optimizer:
            self._gather()
        self._balance(getattr(self, "found_inf", None))
        return result

    def _balance(self, skipped: Tensor | None) -> None:
        """Move the biases of routers, unless the step was skipped."""
        for update in self._balances:
            update(unless=skipped)

    @torch.no_grad()
    def clip_and_step(self, max_norm: float = inf, *, unless: Tensor | None = None) -> Clipped:
        """Scale the gradients so that their norm is at most `max_norm`, and step.

        The step is skipped if the norm is not finite or `unless`, which must be equal on all ranks, is true: parameters
        and optimizer state stay unchanged. The decision is made on the device; the host does not wait for it.
        """
        parameters = [self.gradients.parameters[name][0] for name in self.parts]
        names = [name for name, parameter in zip(self.parts, parameters, strict=True) if parameter.grad is not None]
        norm, shards = measure_norms(parameters, self.gradients)
        bad = ~norm.isfinite() if unless is None else ~norm.isfinite() | unless
        if not self.fused:
            scale_gradients(parameters, norm, max_norm)
            # The host waits for the device here: a plain optimizer has no way to skip a step by itself.
            if bad.item():
                self._balance(bad)
            else:
                self.step()
            return Clipped(norm, self.gradients.grid, tuple(names), shards)
        self.found_inf = bad.float()
        if torch.float64 in [parameter.dtype for parameter in parameters]:
            scale_gradients(parameters, norm, max_norm)
        else:  # the fused kernel scales gradients itself, in fp32, which saves a pass over them
            self.grad_scale = ((norm + 1e-6) / max_norm).clamp(min=1.0).float()
        try:
            self.step()
        finally:
            del self.found_inf
            self.__dict__.pop("grad_scale", None)
        return Clipped(norm, self.gradients.grid, tuple(names), shards)

    def _joins(self, recording: Recording) -> None:
        """Take part in a recorded step: replays read learning rates from the device, and count as changes."""
        fixed = self._fixed()

        def write_rates() -> None:
            if self._fixed() != fixed:
                raise RuntimeError(
                    "since the step was recorded, an option of the optimizer other than lr was changed, its state was "
                    "loaded, or the model was moved; replays would not see it: make a new StepGraph"
                )
            for group, rate in zip(self.param_groups, self._rates, strict=True):
                rate.fill_(group["lr"])

        recording.before.append(write_rates)
        recording.after.append(self._count_changes)

    def _fixed(self) -> tuple[object, ...]:
        """Return what a recorded step keeps as it was: the options of the groups, and which memory it works on."""
        changing = ("params", "lr", "capturable")
        options = [{key: group[key] for key in group if key not in changing} for group in self.param_groups]
        states = [tensor.data_ptr() for part in self.parts.values() for tensor in self.state[part].values()]
        return options, states, [local_of(self.gradients.parameters[name][0]).data_ptr() for name in self.parts]

    def _count_changes(self) -> None:
        """Count that the parameters have changed: torch's fused kernels do not, and the prefetcher relies on it."""
        torch.autograd.graph.increment_version([self.gradients.parameters[name][0] for name in self.parts])

    @contextmanager
    def _recordable(self) -> Iterator[None]:
        """Let torch's step read the learning rates from the device inside the block."""
        before = [dict(group) for group in self.param_groups]
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for group, options in zip(self.param_groups, before, strict=True):
                group.update(options)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for name in self.parts:
            parameter = self.gradients.parameters[name][0]
            if set_to_none:
                GRAD.__set__(parameter, None)
            elif parameter.grad is not None:
                local_of(parameter.grad).zero_()

    def _gather(self) -> None:
        """Give every replica the rows that the others stepped; the first layers go first, as forward needs them."""
        arrivals: list[Arrival] = []
        for bucket in reversed(self.gradients.buckets()):
            if unknown := [name for name in bucket.names if name not in self.parts]:
                raise RuntimeError(f"{unknown[0]} was frozen when this optimizer was made; make it anew")
            arrival = Arrival(self, bucket)
            if self.gradients.grid.recording is not None:
                arrivals.append(arrival)
            elif self.gradients.policy.overlap.reduce_early:
                for parameter in arrival.parameters:
                    wait_on_use(parameter, arrival.wait)
            else:
                arrival.wait()
        for arrival in arrivals:  # what a recorded step launches must end in it
            arrival.wait()


class AdamW(ShardedOptimizer, torch.optim.AdamW):
    """AdamW with weight decay on matrices only, not on biases, norms and other vectors.

    `param_groups` hold this rank's rows of the parameters; torch's learning-rate schedulers work with them.
    """

    fused = True

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(model, lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)

    def fresh_state(self, part: Tensor) -> ParameterState:
        """Return the state that torch's fused AdamW gives a parameter in its first step."""
        moments = {name: torch.zeros_like(part, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), dtype=torch.float32, device=part.device), **moments}


class SGD(ShardedOptimizer, torch.optim.SGD):
    """SGD, by default with momentum and without weight decay; weight decay is added to the gradients of matrices.

    The momentum of the first step starts from zero, also with dampening: a first step that is skipped must leave
    nothing behind.
    """

    fused = True

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        *,
        momentum: float = 0.9,
        dampening: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        options = dict(momentum=momentum, dampening=dampening, nesterov=nesterov, fused=True)
        super().__init__(model, lr, weight_decay=weight_decay, **options)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        self.make_state()  # torch's kernel would leave new momentum without values if the first step is skipped
        return super().step(closure)

    def fresh_state(self, part: Tensor) -> ParameterState:
        """Return momentum of zero, or no state without momentum."""
        return {"momentum_buffer": torch.zeros_like(part, requires_grad=False)} if self.defaults["momentum"] else {}


@cache
def on_shards(kind: type[torch.optim.Optimizer]) -> type[ShardedOptimizer]:
    """Return the optimizer class for shards of a model: `on_shards(torch.optim.Adam)(model, 1e-3, weight_decay=0.1)`.

    It must treat each element of a parameter by itself, which is tried when the optimizer is made. Its options are
    keyword arguments of the class.
    """

    def fresh_state(self: ShardedOptimizer, part: Tensor) -> ParameterState:
        """Return the state of a step without gradients, made on a small parameter and given the size of this one."""
        small = nn.Parameter(torch.zeros([2] * part.dim(), dtype=part.dtype, device=part.device))
        small.grad = torch.zeros_like(small)
        trial = _trial(kind, [{"params": [small]}], self.options)
        trial.step()
        return {
            key: torch.zeros_like(part, dtype=value.dtype, device=value.device, requires_grad=False)
            if isinstance(value, Tensor) and value.dim() and value.shape == small.shape
            else value
            for key, value in trial.state[small].items()
        }

    own = dict(__module__=kind.__module__, __qualname__=kind.__qualname__, kind=kind, fresh_state=fresh_state)
    return type(kind.__name__, (ShardedOptimizer, kind), own)


TRIAL_SHAPES = {2: ((6, 8), (160, 144)), 1: ((8,), (5,)), 3: ((4, 6, 3),), 4: ((4, 6, 3, 3),)}
"""Shapes that are stepped whole and cut, by their number of dims: among them a small matrix, and one of a size from
which some optimizers treat it as a matrix."""
TRIAL_CUTS: tuple[dict[int, int], ...] = ({0: 2}, {1: 2}, {0: 3, 1: 2})
"""Into how many parts each dim is cut: over z or x, over y, and over both."""
TRIAL_STEPS = 3
SAME_STEP = 1e-4
"""By how much steps of the whole and of its parts may differ, as a share of the largest change: fp32 rounds at 1e-7,
and what looks at rows, norms or whole matrices differs by 1e-2 and more."""


def require_elementwise(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    weight_decay: float,
    dims: Collection[int],
    device: torch.device,
) -> None:
    """Raise unless an optimizer with these options steps the parts of a tensor as it steps the whole.

    The optimizer of a rank has a part of every parameter. Here small parameters are cut in several ways, with as many
    dims as those of the model have: an optimizer may take matrices alone.
    """
    if inspect.signature(kind.step).parameters["closure"].default is inspect.Parameter.empty:
        raise ValueError(
            f"{kind.__name__} calls a closure several times a step, as no step on shards can; {ELEMENTWISE}"
        )
    for shapes in [shapes for number, shapes in TRIAL_SHAPES.items() if number in dims]:
        group = {"weight_decay": weight_decay if len(shapes[0]) > 1 else 0.0}
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            off = _largest_difference(kind, group, options, shapes, device)
        if not off <= SAME_STEP:  # also if the steps are not finite
            raise ValueError(
                f"{kind.__name__} cannot step parameters that are cut over a grid: a trial stepped parts of tensors of "
                f"{len(shapes[0])} dims otherwise than whole ones, off by {off:.1g} of the largest change, so it looks "
                f"at rows, norms or whole matrices, or draws random numbers; {ELEMENTWISE}"
            )


def _largest_difference(
    kind: type[torch.optim.Optimizer],
    group: dict[str, Any],
    options: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
) -> float:
    """Return by how much the steps of parts differ from those of whole tensors, as a share of the largest change."""
    draw = torch.Generator().manual_seed(0)
    wholes = [_graded(shape, draw) for shape in shapes]
    gradients = [[_graded(shape, draw) * 0.1**step for shape in shapes] for step in range(TRIAL_STEPS)]

    def changes(own: Callable[[Tensor], Tensor]) -> list[Tensor]:
        parameters = [nn.Parameter(own(whole).to(device, copy=True)) for whole in wholes]
        trial = _trial(kind, [{"params": parameters, **group}], options)
        for now in gradients:
            for parameter, gradient in zip(parameters, now, strict=True):
                parameter.grad = own(gradient).to(device, copy=True)
            trial.step()
        return [each.detach().cpu() - own(whole) for each, whole in zip(parameters, wholes, strict=True)]

    expected, largest = changes(lambda whole: whole), [0.0]
    for cut in TRIAL_CUTS:
        for part in range(prod(cut.values())):
            own = partial(_part, cut, part)
            for change, whole in zip(changes(own), expected, strict=True):
                largest.append(float((change - own(whole)).abs().max() / whole.abs().max().clamp(min=1e-30)))
    return float(torch.tensor(largest).max())  # NaN if one is


def _part(cut: Mapping[int, int], number: int, whole: Tensor) -> Tensor:
    """Return a part of a tensor whose dims are cut into so many parts; a vector has only its first dim."""
    for dim, parts in cut.items():
        whole = whole.tensor_split(parts, dim)[number % parts] if dim < whole.dim() else whole
    return whole


def _graded(shape: Sequence[int], draw: torch.Generator) -> Tensor:
    """Draw a tensor whose scale grows over rows and columns, so that no two parts of it have the same norm."""
    drawn = torch.randn(list(shape), generator=draw)
    for dim, length in enumerate(shape[:2]):
        drawn *= torch.linspace(0.2, 2.0, length).view(-1, *[1] * (len(shape) - 1 - dim))
    return drawn


def _trial(
    kind: type[torch.optim.Optimizer], groups: list[dict[str, Any]], options: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return an optimizer that is ready to step these parameters; some must be told that they train."""
    made = kind(groups, **options)
    if callable(train := getattr(made, "train", None)):
        train()
    return made


class Arrival:
    """The gather over replicas of a bucket's stepped rows, in flight."""

    def __init__(self, optimizer: ShardedOptimizer, bucket: Bucket) -> None:
        gradients = optimizer.gradients
        self.parameters = [gradients.parameters[name][0] for name in bucket.names]
        self.wholes = [local_of(parameter) for parameter in self.parameters]
        rows = [whole.shape[0] for whole in self.wholes]
        self._pending: Pending[list[Tensor]] | None = comm.all_gather_together(
            [optimizer.parts[name].detach() for name in bucket.names],
            gradients.grid,
            gradients.parameters[bucket.names[0]][1].replicas,
            rows=rows,
            into=self.wholes,
            label=f"parameters {bucket.span}",
        )

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the gather and put the plain shards back; the first use of any of the parameters calls this."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.wait()
        for parameter, whole in zip(self.parameters, self.wholes, strict=True):
            torch.autograd.graph.increment_version(whole)
            restore(parameter)


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """The learning rate of each step: linear warm-up, then a plateau, then decay to `floor` times the learning rate.

    `cosine` decays from the end of warm-up to the last step; `stable` keeps it and decays linearly over the last
    `decay` part of the steps. With `base_batch` the learning rate grows linearly with the batch.
    """

    learning_rate: float
    steps: int
    warmup: int = 0
    shape: Decay = "cosine"
    decay: float = 0.2
    floor: float = 0.1
    batch: int | None = None
    base_batch: int | None = None

    def __post_init__(self) -> None:
        if self.shape not in get_args(Decay):
            raise ValueError(f"shape={self.shape!r} is none of {get_args(Decay)}")
        if not 0 <= self.warmup <= self.steps:
            raise ValueError(
                f"warmup={self.warmup} must lie between 0 and steps={self.steps}; lower warmup (optimizer.warmup of a "
                "run), or take more steps"
            )
        if not (0 < self.decay <= 1 and 0 <= self.floor <= 1):
            raise ValueError(f"decay={self.decay} must be above 0, floor={self.floor} from 0 up, neither above 1")
        if (self.batch is None) != (self.base_batch is None):
            raise ValueError("scaling the learning rate needs both batch and base_batch")

    @property
    def peak(self) -> float:
        """The highest learning rate."""
        if self.batch is None or self.base_batch is None:
            return self.learning_rate
        return self.learning_rate * self.batch / self.base_batch

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1; the last step has the floor."""
        if step < self.warmup:
            return self.peak * step / self.warmup
        if self.shape == "constant":
            return self.peak
        begin = self.warmup if self.shape == "cosine" else max(self.warmup, round(self.steps * (1 - self.decay)))
        done = min(1.0, max(0.0, (step - begin) / max(1, self.steps - begin)))
        left = (1 + cos(pi * done)) / 2 if self.shape == "cosine" else 1 - done
        return self.peak * (self.floor + (1 - self.floor) * left)

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the learning rate of every parameter group for this step and return it."""
        # rounded to fp32, so that eager and recorded steps, which read it from the device, use the same number
        rate = torch.tensor(self.at(step), dtype=torch.float32).item()
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate
