"""The outermost module of a parallelised model, where a pass begins and ends, and its repeated blocks."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fourfold.comm import equal_along
from fourfold.grid import Grid
from fourfold.nn.initial import key_of
from fourfold.nn.loss import sum_over_batch
from fourfold.nn.moment import drawing
from fourfold.nn.recompute import recompute
from fourfold.parallelize.borrow import require_unchanged
from fourfold.parallelize.layers import REPEATED, Adapter
from fourfold.parallelize.layouts import Columns
from fourfold.parallelize.losses import GlobalLosses
from fourfold.parallelize.placed import Placed, version_of
from fourfold.parallelize.run import Run
from fourfold.parallelize.together import at_rest

COUNT = "num_items_in_batch"
"""What Hugging Face's models divide the sum of a batch's losses by. Like all else that a model is given here it is
about the rows of one place."""


LOSS = "loss"
EVERYWHERE = "the same rows everywhere"
"""In `Root.compared`: whether all places were given the same rows has been looked at."""


class Root(Adapter):
    """Begins and ends a pass. Takes the rows of this rank's (data, z) place and gives back whole tensors for them."""

    def __init__(self, name: str, run: Run, why: str) -> None:
        super().__init__(name, run, why)
        self.compared: set[str] = set()
        self.evaluations = 0

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self.run
        if run.depth:
            return forward(*args, **kwargs)
        self._require_same_rows(args, kwargs)
        self._warn_of_same_rows(module, args, kwargs)
        if module.training:
            run.clock.advance()
        run.gradients.begin_forward("training" if torch.is_grad_enabled() else "evaluation")
        if kwargs.get(COUNT) is not None:
            kwargs = {**kwargs, COUNT: _of_all_places(kwargs[COUNT], run.grid)}
        with self._pass(module):
            result = forward(*args, **kwargs)
            for group in list(run.shared):
                group.part()
            result = self._given(result)
        self._require_global_loss(result)
        return result

    def _require_global_loss(self, result: Any) -> None:
        """What a model calls its loss is that of the whole batch, or an error: checked in the first training pass."""
        loss = result.get("loss") if isinstance(result, Mapping) else None
        if (
            not isinstance(loss, Tensor)
            or loss.dim()
            or not loss.requires_grad
            or loss.is_meta
            or LOSS in self.compared
        ):
            return
        self.compared.add(LOSS)
        if not equal_along(key_of(loss.item()), self.run.grid, ("z", "data")):
            raise ValueError(
                "the loss that the model returns differs between (data, z) places: a part of it is not made by torch's "
                "loss functions (a router's loss, or a sum divided by hand), and its gradient would be a sum over the "
                "places; leave that part out of the model, or make it with ff.global_mean(mean, count, grid)"
            )

    @contextmanager
    def _pass(self, module: nn.Module) -> Iterator[None]:
        run = self.run
        run.require_own_modules()
        run.require_own_parameters()
        run.begin()
        buffers = module.named_buffers() if module.training else ()
        before = {name: (buffer, version_of(buffer)) for name, buffer in buffers}
        # in step on all ranks of a place, so that they drop the same of what they all hold
        self.evaluations += not module.training
        name = self.name if module.training else f"{self.name} evaluation {self.evaluations}"
        random = in_step(run.clock.key(name, run.grid, REPEATED), run.grid.device)
        try:
            with GlobalLosses(run), random:
                yield
            require_unchanged(run)
        finally:
            run.depth = 0
            run.lent.clear()
        if before:
            self._require_same_buffers(module, before)

    def _given(self, value: Any) -> Any:
        """Whole tensors in place of placed ones; logits of which a loss was made stay cut until somebody reads them."""
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
        if not trains or EVERYWHERE in self.compared or grid.muted or grid.size("z") * grid.size("data") == 1:
            return
        self.compared.add(EVERYWHERE)
        tensors = _tensors((args, kwargs))
        if tensors and equal_along(key_of(*map(_digest_of_order, tensors)), grid, ("z", "data")) and grid.rank == 0:
            warnings.warn(
                f"all {grid.size('z') * grid.size('data')} (data, z) places of the grid {grid} were given the same rows "
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
            if not equal_along(key_of(_digest(buffer)), self.run.grid, ("z", "data")):
                owner, _, own = name.rpartition(".")
                raise RuntimeError(
                    f"{owner or 'the model'} ({type(module.get_submodule(owner)).__name__}) writes its buffer {own!r} "
                    "in forward from the rows it sees, and each (data, z) place sees others: the copies would drift "
                    "apart; use a layer whose statistics are over the whole batch (nn.BatchNorm is), or keep the "
                    "buffer out of forward"
                )

    def describe(self) -> tuple[str, str]:
        return "rows of the place in, whole tensors for them out", "losses over z and data"


def _of_all_places(count: Any, grid: Grid) -> Tensor:
    own = torch.as_tensor(count, device=grid.device)
    return sum_over_batch(own.double(), grid, "count targets").to(own.dtype)


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and not leaf.is_meta]


def _digest_of_order(tensor: Tensor) -> int:
    """Of the numbers and their order, which the sum of small ids would not tell."""
    flat = tensor.detach().double().nan_to_num().flatten()
    weights = torch.arange(1, flat.numel() + 1, dtype=flat.dtype, device=flat.device)
    return key_of(tuple(tensor.shape), (flat * weights).sum().item())


def _digest(tensor: Tensor) -> int:
    whole = tensor.detach()
    return key_of(tuple(whole.shape), whole.double().nan_to_num().sum().item())


@contextmanager
def in_step(key: int, device: torch.device) -> Iterator[None]:
    """Inside the block torch draws from `key`, on the host and on that device."""
    with drawing(key, torch.device("cpu")), drawing(key, device) if device.type != "cpu" else nullcontext():
        yield


def _drawing(key: int, device: torch.device, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with in_step(key, device):
        return forward(*args, **kwargs)


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
        if module.training:  # drawn alike when it is computed again
            key = int(torch.randint(1 << 62, (), device="cpu"))
            forward = partial(_drawing, key, self.run.grid.device, forward)
        if self.run.policy.recompute == "block" and module.training and torch.is_grad_enabled():
            return recompute(partial(forward, **kwargs), self.run.clock, *args)
        return forward(*args, **kwargs)

    def _resting(self, a: Any) -> Any:
        stream = isinstance(a, Tensor) and a.dim() > 1 and a.shape[-1] == self.features and a.is_floating_point()
        return at_rest(a, self.run) if stream else a

    def describe(self) -> tuple[str, str]:
        again = ", computed again in backward" if self.run.policy.recompute == "block" else ""
        return f"residual stream [m/x, {self.features}/y] at rest{again}", ""
