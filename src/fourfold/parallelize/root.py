"""The outermost module of a parallelised model, where a pass begins and ends, and its repeated blocks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.axes import BATCH
from fourfold.comm import equal_along
from fourfold.grid import Grid
from fourfold.layout import REPEATED
from fourfold.nn.initial import key_of
from fourfold.nn.loss import sum_over_batch
from fourfold.nn.moment import drawing, drawing_outside_torch
from fourfold.nn.recompute import recompute
from fourfold.parallelize.borrow import require_unchanged
from fourfold.parallelize.layers import Adapter
from fourfold.parallelize.layouts import Columns
from fourfold.parallelize.loops import require_unscaled_count
from fourfold.parallelize.losses import GlobalLosses
from fourfold.parallelize.placed import Placed, version_of
from fourfold.parallelize.precision import require_precision
from fourfold.parallelize.rows import Sample, check_rows, leaves_of, whole_batch
from fourfold.parallelize.run import Run
from fourfold.parallelize.together import at_rest
from fourfold.parameter import whole_tensor

COUNT = "num_items_in_batch"
"""What Hugging Face's models divide the sum of a batch's losses by. Like all else that a model is given here it is
about the rows of one place."""


CONTRASTIVE = "return_loss"
"""What Hugging Face's models of images and texts are told where their loss compares all rows with each other."""
EVERYWHERE = "the same rows everywhere"
"""In `Root.compared`: whether all places were given the same rows has been looked at."""


class Root(Adapter):
    """Begins and ends a pass. Takes the rows of this rank's (data, z) place and gives back whole tensors for them."""

    def __init__(self, name: str, run: Run, why: str) -> None:
        super().__init__(name, run, why)
        self.compared: set[str] = set()
        self.checked: set[tuple[str, ...]] = set()
        """The kinds of calls of which the rows were checked for depending on each other."""
        self.evaluations = 0

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self.run
        if run.depth:
            return forward(*args, **kwargs)
        require_precision(run)
        self._require_unscaled_count(kwargs)
        self._require_same_rows(args, kwargs)
        self._warn_of_same_rows(module, args, kwargs)
        first = self._trains_first(module, args, kwargs)
        suspicious = self._check_rows(module, forward, args, kwargs) if first else set()
        if module.training:
            run.clock.advance()
        run.gradients.begin_forward("training" if torch.is_grad_enabled() else "evaluation", guarded=first)
        buffers = module.named_buffers() if module.training else ()
        before = {name: (buffer, version_of(buffer)) for name, buffer in buffers}
        # in step on all ranks of a place, so that they drop the same of what they all hold
        self.evaluations += not module.training
        name = self.name if module.training else f"{self.name} evaluation {self.evaluations}"
        key = run.clock.key(name, run.grid, REPEATED)
        with in_step(key, run.grid.device), drawing_outside_torch(key):
            result = self._pass(forward, args, kwargs)
        if before:
            self._require_same_buffers(module, before)
        if suspicious:
            _refuse_losses(module, result, suspicious)
        return result

    def _pass(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        run = self.run
        run.counted, run.compares_rows = kwargs.get(COUNT) is not None, bool(kwargs.get(CONTRASTIVE))
        if run.counted:
            kwargs = {**kwargs, COUNT: _of_all_places(kwargs[COUNT], run.grid)}
        run.require_own_modules()
        run.require_own_parameters()
        run.begin()
        try:
            with GlobalLosses(run), counted_changes(run):
                result = forward(*args, **kwargs)
                for group in list(run.shared):
                    group.part()
                result = self._given(result)
            require_unchanged(run)
        finally:
            run.end()
        return result

    def _trains_first(self, module: nn.Module, args: Any, kwargs: Any) -> bool:
        """Whether this is the first training pass of its kind: with these arguments given."""
        run = self.run
        flags = [str(value) if isinstance(value, (bool, str)) else "given" for value in args]
        given = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
        asked = (str(module.training), *flags, *given)
        trains = torch.is_grad_enabled() and run.grid.shape.places > 1 and not run.grid.muted
        if not trains or asked in self.checked:
            return False
        self.checked.add(asked)
        return True

    def _check_rows(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> set[int]:
        """See whether rows need each other (rows.py)."""
        run = self.run

        def on_sample(sample: Sample, args: tuple, kwargs: dict) -> Any:
            run.sample = sample
            try:
                run.gradients.begin_forward("check of rows", guarded=True)
                return self._pass(forward, args, kwargs)
            finally:
                run.sample = None

        return check_rows(run, module, on_sample, args, kwargs)

    def _given(self, value: Any) -> Any:
        """Whole tensors in place of placed ones; logits of which a loss was made stay cut until somebody reads them."""
        if isinstance(value, DTensor):  # computed from parameters alone, without gradients
            return whole_tensor(value)
        if isinstance(value, Placed):
            unread = isinstance(value.placement, Columns) and self.run.reads_logits and self.run.grad_enabled
            return value if unread else value.whole()
        if isinstance(value, MutableMapping):
            for key in list(value):
                given = self._given(value[key])
                if given is not value[key]:
                    value[key] = given
            return value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                object.__setattr__(value, field.name, self._given(getattr(value, field.name)))
            return value
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._given(entry) for entry in value))
        if type(value) is list or type(value) is tuple:
            return type(value)(self._given(entry) for entry in value)
        return value

    def _require_unscaled_count(self, kwargs: Any) -> None:
        """Once, and before the check of rows, which passes over what a model's code raises."""
        if kwargs.get(COUNT) is not None and self.run.grid.shape.world > 1 and COUNT not in self.compared:
            self.compared.add(COUNT)
            require_unscaled_count()

    def _require_same_rows(self, args: Any, kwargs: Any) -> None:
        """Once is enough for a loop that reads its rows wrongly."""
        if "" in self.compared:
            return
        self.compared.add("")
        tensors = _tensors((args, kwargs))
        if tensors and not equal_along(key_of(*map(_digest, tensors)), self.run.grid, ("x", "y")):
            raise ValueError(
                "ranks of one (data, z) place were given different rows; all ranks that differ in x and y alone read "
                "the same ones (ff.local_rows cuts a batch so)"
            )

    def _warn_of_same_rows(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Once, in the first training pass: a loop that forgot to cut its batch computes it in every place again."""
        grid, trains = self.run.grid, module.training and torch.is_grad_enabled()
        if not trains or EVERYWHERE in self.compared or grid.muted or grid.shape.places == 1:
            return
        self.compared.add(EVERYWHERE)
        tensors = _tensors((args, kwargs))
        if tensors and equal_along(key_of(*map(_digest_of_order, tensors)), grid, BATCH) and grid.rank == 0:
            warnings.warn(
                f"all {grid.shape.places} (data, z) places of the grid {grid} were given the same rows "
                "and compute the same; give each place its own with ff.local_rows(batch, grid)",
                stacklevel=2,
            )

    def _require_same_buffers(self, module: nn.Module, before: dict[str, tuple[Tensor, int | None]]) -> None:
        """What a forward pass writes into a buffer must not depend on the rows: each place has others."""
        for name, buffer in module.named_buffers():
            old, version = before.get(name, (None, 0))
            if isinstance(buffer, Placed):
                owner, _, own = name.rpartition(".")
                buffer = module.get_submodule(owner)._buffers[own] = buffer.whole()
            if (buffer is old and version_of(buffer) == version) or name in self.compared or buffer.is_meta:
                continue
            self.compared.add(name)
            if not equal_along(key_of(_digest(buffer)), self.run.grid, BATCH):
                owner, _, own = name.rpartition(".")
                raise RuntimeError(
                    f"{owner or 'the model'} ({type(module.get_submodule(owner)).__name__}) writes its buffer {own!r} "
                    "in forward from the rows it sees, and each (data, z) place sees others: the copies would drift "
                    "apart; use a layer whose statistics are over the whole batch (nn.BatchNorm is), or keep the "
                    "buffer out of forward"
                )

    def describe(self) -> tuple[str, str]:
        return "rows of the place in, whole tensors for them out", "losses over z and data"


def _refuse_losses(module: nn.Module, result: Any, suspicious: set[int]) -> None:
    """A scalar of the whole batch that is no mean over rows, and is trained, needs the whole batch."""
    leaves = leaves_of(result)
    trained = [at for at in suspicious if isinstance(leaves[at], Tensor) and leaves[at].requires_grad]
    if trained:
        raise RuntimeError(
            f"{type(module).__name__}: its scalar output {trained[0]} is no mean over rows, and what places find for "
            "their own rows does not average to what the whole batch gives; gather the rows that it needs with "
            "ff.whole_batch(tensor) inside forward, or compute it outside of the model, which averages it as DDP does"
        )


def _of_all_places(count: Any, grid: Grid) -> Tensor:
    own = torch.as_tensor(count, device=grid.device)
    return sum_over_batch(own.double(), grid, "count targets").to(own.dtype)


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor) and not leaf.is_meta]


def _digest_of_order(tensor: Tensor) -> int:
    """Of the numbers and their order, which the sum of small ids would not tell."""
    flat = tensor.detach().double().nan_to_num().flatten()
    weights = torch.arange(1, flat.numel() + 1, dtype=flat.dtype, device=flat.device)
    return key_of(tuple(tensor.shape), (flat * weights).sum().item())


def _digest(tensor: Tensor) -> int:
    whole = tensor.detach()
    return key_of(tuple(whole.shape), whole.double().nan_to_num().sum().item())


@contextmanager
def counted_changes(run: Run) -> Iterator[None]:
    """Torch counts no changes in place under inference_mode; where tensors are cut the count is needed (`settle`)."""
    if not run.cuts or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # the former alone would turn gradients on
        yield


@contextmanager
def in_step(key: int, device: torch.device) -> Iterator[None]:
    """Inside the block torch draws from `key`, on the host and on that device."""
    with drawing(key, torch.device("cpu")), drawing(key, device) if device.type != "cpu" else nullcontext():
        yield


def _drawing(
    key: int, device: torch.device, again: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a block that draws alike when it is computed again; outside torch only if it will be, for that is slow."""
    with in_step(key, device), drawing_outside_torch(key) if again else nullcontext():
        return forward(*args, **kwargs)


class Contrasted(Adapter):
    """A module whose rows a contrastive loss compares: where there is such a loss, it gives the rows of all places."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        out = forward(*args, **kwargs)
        return whole_batch(out) if self.run.compares_rows else out

    def describe(self) -> tuple[str, str]:
        return "with return_loss: the rows of all places", "rows over z and data"


class Block(Adapter):
    """One of several equal modules that the residual stream passes. Lets it rest if it does not yet."""

    def __init__(self, name: str, run: Run, why: str, features: int) -> None:
        super().__init__(name, run, why)
        self.features = features

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args:
            args = (self._resting(args[0]), *args[1:])
        elif "hidden_states" in kwargs:
            kwargs = {**kwargs, "hidden_states": self._resting(kwargs["hidden_states"])}
        again = self.run.policy.recompute == "block" and module.training and torch.is_grad_enabled()
        if module.training and self.run.sample is None:
            key = int(torch.randint(1 << 62, (), device="cpu"))
            forward = partial(_drawing, key, self.run.grid.device, again, forward)
        if again:
            return recompute(partial(forward, **kwargs), self.run.clock, *args)
        return forward(*args, **kwargs)

    def _resting(self, a: Any) -> Any:
        if not self.run.cuts:
            return a
        stream = isinstance(a, Tensor) and a.dim() > 1 and a.shape[-1] == self.features and a.is_floating_point()
        return at_rest(a, self.run) if stream else a

    def describe(self) -> tuple[str, str]:
        again = ", computed again in backward" if self.run.policy.recompute == "block" else ""
        return f"residual stream [m/x, {self.features}/y] at rest{again}", ""
