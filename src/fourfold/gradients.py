"""Gradients from a product's dw to a complete `parameter.grad`: owed sums and accumulation.

Parameter groups hand over gradients with `Gradients.scatter`, which reduce-scatters them over z and deposits the
shards. The sums that they still owe over other axes are computed in buckets, which depend on the model and its layout
alone. (A place is a coordinate of data and z; its ranks hold the same rows of a batch.) A bucket is launched when no
further gradient of its parameters will come: `ForwardPass` counts every use of a parameter in a forward pass, and every
deposit takes one use away. At the end of a backward pass a callback of autograd completes all buckets, so gradients are
complete when `backward()` returns. Inside `accumulate`, and before the last pass of a step that `begin_step` announced,
nothing is summed over ranks: gradients stay this replica's own part, and the last backward pass sums them all.

Invariant: a gradient is the average over places of the gradient of each place's loss, and a sum over the axes inside a
place (E6). It is divided by the number of places once, when it is deposited; a completed sum is never divided, because
a later pass may add to it.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fourfold import comm, gate
from fourfold.axes import BATCH, CONTEXT, CUTS, REPLICA, REPLICAS
from fourfold.comm import Arrived, Pending
from fourfold.engine import Engine, in_backward
from fourfold.grad_hooks import ParameterHooks
from fourfold.grad_norm import MOST_OF_A_UNIT, counts_here, is_owed
from fourfold.grid import Grid
from fourfold.layout import GATHERED, GATHERED_AXES, Spec, chunk
from fourfold.ledger import joint_label
from fourfold.params import (
    GRAD,
    ShardedParameter,
    adopt,
    grid_dtensor,
    leaf_of,
    local_of,
    own_storage,
    to_back,
    to_front,
)
from fourfold.policy import Policy
from fourfold.replicas import ReplicaCheck

NOTHING = -0.0
"""What a rank adds to a sum for a parameter that it has not used: the only number that changes no sum. If the sum is
this number throughout, no rank has used the parameter."""


class ReductionOrder(Protocol):
    """The order of reductions that all places keep, where each runs code of its own (`PlaceOrder`)."""

    def begin(self, kind: Hashable) -> None: ...
    def before_reduction(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Come to the place of a reduction in the order; return whether other places may not have used these."""
        ...

    def finish(self) -> None: ...
    def forget(self) -> None: ...


class Units(NamedTuple):
    """The units of a model, between which it may be cut into stages: how many there are, and which has a parameter."""

    number: int
    of: Callable[[str], int]


NO_UNITS = Units(0, lambda _: 0)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that owe sums over the same axes and travel together: one message per axis."""

    owes: tuple[str, ...]
    names: tuple[str, ...]
    nbytes: int

    @property
    def span(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[-1]} .. {self.names[0]}"

    @property
    def label(self) -> str:
        return f"gradients {self.span}"


class OwingGradient(NamedTuple):
    """What decides about the bucket of a gradient."""

    name: str
    owes: tuple[str, ...]
    dtype: torch.dtype
    nbytes: int
    """Bytes on this rank."""
    unit: int = 0
    """Gradients of different units share no bucket."""


def bucket_unit(unit: int, owes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return the unit whose gradients a bucket may hold, or 0 for any.

    An all-reduce of three ranks or more adds in an order that depends on the place in the message. So that cuts of
    stages change no bit, gradients of another unit must not move that place. A sum of two has only one order.
    """
    return unit if any(sizes[axis] > 2 for axis in owes) else 0


def fill_buckets(gradients: Sequence[OwingGradient], bucket_bytes: int) -> list[Bucket]:
    """Cut the gradients into buckets.

    A bucket holds gradients of one dtype that owe the same axes, the last layers first, as backward computes them. It
    is closed when the next gradient would exceed `bucket_bytes`. The buckets that backward completes first come first.
    """
    buckets: list[Bucket] = []
    open_for: dict[tuple[tuple[str, ...], torch.dtype, int], int] = {}
    for name, owes, dtype, nbytes, unit in reversed(gradients):
        at = open_for.get((owes, dtype, unit))
        if at is None or buckets[at].nbytes + nbytes > bucket_bytes:
            open_for[owes, dtype, unit] = len(buckets)
            buckets.append(Bucket(owes, (name,), nbytes))
        else:
            buckets[at] = Bucket(owes, (*buckets[at].names, name), buckets[at].nbytes + nbytes)
    place = {gradient.name: index for index, gradient in enumerate(reversed(gradients))}
    return sorted(buckets, key=lambda bucket: place[bucket.names[-1]])


class TrackedParameter:
    """A parameter of the model and what never changes about its gradient."""

    __slots__ = ("complete", "counted", "leaf", "name", "owed", "parameter", "place", "spec", "unit")

    def __init__(self, name: str, parameter: nn.Parameter, spec: Spec, grid: Grid, policy: Policy, unit: int) -> None:
        self.name, self.parameter, self.spec, self.unit = name, parameter, spec, unit
        self.place = 0
        """Where its square stands in the line of all squares (`grad_norm`)."""
        self.owed = spec_like(parameter, owes=spec.owes)
        """The spec of its gradient while sums are owed."""
        self.complete = spec_like(parameter, cut_over=spec.replicas if policy.shard_optimizer else None)
        self.counted = counts_here(parameter, grid, cut_over_replicas=policy.shard_optimizer) and not spec.is_copy
        """Whether this rank's shard counts for the norm."""
        self.leaf: Node | None = None
        """Its AccumulateGrad node if it is trained. Autograd frees such a node, with our hook on it, unless somebody
        refers to it."""


class ForwardPass:
    """Counts the gradients that one forward pass will still produce: uses of parameters minus deposits.

    The autograd graph of the pass refers to this object and `Gradients` refers to it weakly. So a pass whose graph is
    freed without a backward pass expects no gradients any more.
    """

    def __init__(self) -> None:
        """Parameters are known by their ids."""
        self._uses: defaultdict[int, int] = defaultdict(int)
        self._reads: set[int] = set()
        self.deposited = False
        """Whether the running backward pass has deposited gradients of this pass."""
        self.held = False
        """Whether its backward pass has run but for products of weight gradients, which are held back."""
        self.left_out: set[int] = set()
        """The parameters that this backward pass leaves out, by their ids."""

    def use(self, parameters: Iterable[int]) -> None:
        """Count a use of these parameters, each of which will deposit its own gradient."""
        for key in parameters:
            self._uses[key] += 1

    def read(self, parameter: int) -> None:
        """Note a use that autograd itself records; autograd deposits the gradients of all such uses at once."""
        self._reads.add(parameter)

    def expects(self, parameters: Iterable[int]) -> bool:
        """Return whether a gradient of one of these parameters will still come."""
        for key in parameters:  # noqa: SIM110  # a generator would cost a call for each
            if self._uses[key] or key in self._reads:
                return True
        return False

    def take(self, parameters: Iterable[int], uses: int) -> list[int]:
        """Take away `uses` uses of each parameter, whose gradients have come, and return those that had none.

        0 means all uses that autograd itself recorded.
        """
        unexpected = []
        for key in parameters:
            left = self._uses[key]
            if not left and key not in self._reads:
                unexpected.append(key)
                continue
            if uses:
                self._uses[key] = left - uses if left > uses else 0
            else:
                self._reads.discard(key)
            self.deposited = True
        return unexpected

    def end(self) -> None:
        """Write off uses that got no gradient: their outputs were detached or discarded, or autograd left them out."""
        self._uses.clear()
        self._reads.clear()
        self.deposited = False


@dataclass(frozen=True, slots=True, eq=False)
class Scatter:
    """Gradients that are to be reduce-scattered over z (`engine.WeightReduction`)."""

    grid: Grid
    axis: str
    gradients: Sequence[Tensor]
    nbytes: int
    label: str
    use: Callable[[list[Tensor]], None]

    @property
    def alike(self) -> tuple[str, torch.dtype]:
        return self.axis, self.gradients[0].dtype

    def launch(self, *behind: Scatter) -> Sequence[Pending[list[Tensor]]]:
        together = [self, *behind]
        gradients = [gradient for each in together for gradient in each.gradients]
        label = joint_label([each.label for each in together])
        pending = comm.reduce_scatter_together(gradients, self.grid, self.axis, label=label)
        return comm.split_results(pending, [len(each.gradients) for each in together])


@dataclass(slots=True)
class CastShard:
    """A copy of a parameter's shard in the compute dtype, and of what it is a copy."""

    copy: Tensor
    shard: Tensor
    version: tuple[int, int, int]
    """The number of the pass that cast it, and the version counters of the parameter and of its shard at that time."""


class Gradients:
    """The gradients of one model, from their deposit to a complete `parameter.grad`.

    While a gradient owes a sum over an axis, its placement on that axis is Partial, so nobody takes it for complete:
    torch sums it on use, our own functions refuse it. Gradients do not reach parameters through autograd's own
    accumulation. Therefore hooks on parameters are called here (`ParameterHooks`), and autograd is asked which
    parameters `backward(inputs=...)` leaves out.
    """

    def __init__(
        self,
        grid: Grid,
        parameters: Mapping[str, tuple[nn.Parameter, Spec]],
        policy: Policy,
        units: Units = NO_UNITS,
    ) -> None:
        self.grid, self.units = grid, units
        self.parameters = dict(parameters)
        self.policy = policy
        self.engine = Engine(policy.overlap, flights=grid.size("x") > 1 or grid.size("y") > 1 or grid.shape.folded)
        self._places = grid.shape.places
        self._whole_over = [axis for axis in GATHERED_AXES if grid.size(axis) == 1]
        self.casts: dict[int, CastShard] = {}
        """This rank's shards in the compute dtype, by the ids of their parameters (`Policy.keep_casts`)."""
        self.accumulating = False
        self.guarded = False
        self.in_pass = False
        """Whether the model's own code runs, which reads whole tensors where it computes with parameters."""
        """Whether ranks check before every gather that they gather the same parameters, as in a model's first pass."""
        self._tracked = {
            id(parameter): TrackedParameter(name, parameter, spec, grid, policy, units.of(name))
            for name, (parameter, spec) in self.parameters.items()
        }
        behind = Counter[int]()
        for known in self._tracked.values():
            known.parameter.gradients = weakref.ref(self)  # type: ignore[attr-defined]
            known.place = known.unit * MOST_OF_A_UNIT + behind[known.unit]
            behind[known.unit] += 1
        self.line = units.number * MOST_OF_A_UNIT
        """The length of the line of all squares; 0 for a model without units."""
        if self.line and max(behind.values(), default=0) > MOST_OF_A_UNIT:
            raise ValueError(f"a unit of the model has more than {MOST_OF_A_UNIT} parameters")
        self._buckets: list[tuple[Bucket, list[int]]] = []
        self._trained: list[torch.dtype | None] = []
        """The dtypes of the parameters that `_buckets` were made for, None for frozen ones."""
        self.hooks = ParameterHooks(self._tracked)
        self._replicas = ReplicaCheck(grid, self.parameters)
        self.on_two_ranks: frozenset[str] = frozenset()
        """The names of parameters that another pipe rank has too. Their gradients are complete, and their hooks are
        called, when both parts have been added (`copies_added`)."""
        self._left_out: set[int] = set()  # ids of parameters that backward(inputs=...) leaves out
        self._new: set[int] = set()  # ids of parameters with deposits since their hooks were called
        self._passes: set[int] = set()  # ids of running backward passes, one inside another; `_finish` removes them
        self.forward_pass = ForwardPass()
        """The forward pass that began last."""
        self.passes = 0
        """The number of forward passes that have begun, and of backward passes that have ended. The latter count for
        layers outside of a model that begins its passes: an optimizer steps after backward, and torch's fused and
        foreach kernels do not count what they change."""
        self._numbers = itertools.count()
        self._alive = weakref.WeakValueDictionary({next(self._numbers): self.forward_pass})
        """The forward passes whose autograd graphs exist, in their order."""
        self._to_begin = self._to_finish = 0  # passes left of the step that `begin_step` announced
        self._summing = False
        """Whether the backward passes of an announced step have begun: they share its buckets."""
        self._sums_wait = False
        self._unannounced = False
        """Whether the running backward pass has deposited a gradient whose use was not counted, as a second backward
        pass over a retained graph does. More may come, so buckets wait for the end of the pass."""
        self._sums: dict[str, BucketSum] = {}
        self._in_order: Iterator[tuple[Bucket, list[int]]] = iter(())
        self._bucket: tuple[Bucket, list[int]] | None = None  # the next to be launched, with its parameters' ids
        self.places: ReductionOrder | None = None
        """Keeps the places along z in one order, for models in which each place runs code of its own."""
        self.all_come = False
        """Whether all ranks are known to run the same passes, as in a loop of Fourfold's own: nobody asks them. A rank
        that is missing then shows in a collective, which the watch can name."""
        self._came = self._came_to_loss = -1
        """The backward passes that have come to the order of passes last, before messages over z and for a loss."""
        self._came_to_sums = False
        self._watch_leaves()

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        """Return the gradients of a copied model, with nothing in flight."""
        new = Gradients(self.grid, copy.deepcopy(self.parameters, memo), self.policy, self.units)
        new.on_two_ranks = self.on_two_ranks
        new.engine = copy.deepcopy(self.engine, memo)  # through the memo: the copied `StepRng` shares it
        return new

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return whether this is a parameter of the model as it was built."""
        return id(parameter) in self._tracked

    def expects(self, names: Iterable[str]) -> bool:
        """Return whether a pass that is alive will still produce a gradient of one of these parameters."""
        keys = [id(self.parameters[name][0]) for name in names]
        return any(each.expects(keys) for each in self._alive.values())

    def begin_step(self, passes: int, *, until_end_step: bool = False) -> None:
        """Announce that the next `passes` forward and backward passes belong to one step.

        Their gradients are summed over ranks once: each bucket is launched when the last forward pass has begun and no
        pass will still produce a gradient of its parameters. They are complete when the last backward pass ends, or
        when `end_step` is called: between two stages of a pipeline others wait for the last pass, but not for the sums.
        """
        self._to_begin, self._to_finish = passes, passes + until_end_step
        self._summing = False

    def meet(self) -> None:
        """Wait for the ranks that take part in a forward pass, because people call a model on one rank alone.

        Without gradients these are all that hold parts of its parameters. A pass with gradients meets the ranks of its
        place here; those of other places may run other passes, and `_come` meets them where that matters.
        """
        if self.all_come or in_backward():  # in backward it is recomputed
            return
        if torch.is_grad_enabled():
            dims = tuple([axis not in BATCH for axis in CUTS])
            self.grid.gate.enter(self.grid.mesh, dims, "a forward pass", seconds=gate.PASS_SECONDS)
            return
        alike = self.grid.shape.folded or self.grid.size(CONTEXT) > 1
        dims = tuple([alike or axis not in REPLICAS for axis in CUTS])  # places of replicas exchange nothing
        self.grid.gate.enter(self.grid.mesh, dims, "a forward pass without gradients")

    def begin_forward(self, kind: Hashable, *, guarded: bool = False, of_batch: bool = False) -> None:
        """Begin a forward pass of the model; passes of one `kind` use the same weights in the same order.

        `of_batch`: the pass itself sends messages to all places, such as those of a loss.
        """
        self.guarded = guarded
        if self._passes and not in_backward():  # a backward pass failed, so autograd did not call its callback
            self.engine.abandon()
            self._give_up()
        self._come(f"a forward pass ({kind})", BATCH if of_batch else (GATHERED,))
        if self.places is not None:
            self.places.begin(kind)
        self.forward_pass = ForwardPass()
        self.passes += 1
        if torch.is_grad_enabled():
            self._alive[next(self._numbers)] = self.forward_pass
            self._to_begin = max(0, self._to_begin - 1)
        self._watch_leaves()  # a parameter that was frozen may be trained now
        self.engine.begin(kind)

    def come_to_backward(self) -> None:
        """Announce a backward pass before its first message over z. Does nothing outside of a backward pass."""
        this_pass = torch._C._current_graph_task_id()
        if this_pass not in (-1, self._came) and not self._passes:
            self._came = this_pass
            self._come("a backward pass", (GATHERED,))

    def come_to_losses(self) -> None:
        """Announce the messages to all places that a loss or a comparison needs, during a forward pass or after it."""
        if self.grid.size(REPLICA) > 1:  # else the places are those along z, whose passes have come
            self._come("a forward pass with messages to all places", BATCH)

    def come_to_loss_gradient(self) -> None:
        """Announce a backward pass that begins at a loss of all places."""
        this_pass = torch._C._current_graph_task_id()
        if self.grid.size(REPLICA) > 1 and this_pass != self._came_to_loss:
            self._came_to_loss = this_pass
            self._come("a backward pass from a loss", BATCH)

    def come_to_sums(self) -> None:
        """Announce the sums of a step's gradients over all places."""
        if self.grid.size(REPLICA) > 1 and not self._came_to_sums:
            self._came_to_sums = True
            self._come("the sums of gradients", BATCH)

    def come_to_step(self) -> None:
        """Announce a step of an optimizer; between two steps all places run equally many passes."""
        self._come("a step of an optimizer", (GATHERED,))
        if self.grid.size(REPLICA) > 1:
            self._come("a step of an optimizer", BATCH)

    def _come(self, kind: str, axes: Sequence[str]) -> None:
        if self.all_come or len(self.grid.ranks) == 1:
            return
        name, (parameter, _) = next(iter(self.parameters.items()), ("", (None, None)))
        if parameter is not None and not parameter.is_meta:
            self.grid.come(f"{kind} of the model with {name}", axes)

    def forget_step(self) -> None:
        """Forget a step that could not be recorded: nothing was sent, so there is nothing to wait for."""
        self.engine.forget()
        self._give_up()
        self._to_begin = self._to_finish = 0
        for parameter, _ in self.parameters.values():
            parameter.grad = None

    def give_up_step(self) -> None:
        """Expect no further passes of an announced step, which failed; the next pass waits for what is in flight."""
        self._to_begin = self._to_finish = 0
        self._summing = False
        self.engine.wgrad_queue.forget()

    def _give_up(self) -> None:
        """End all passes without completing their gradients."""
        self._passes.clear()
        self._summing = self._came_to_sums = False
        self._new.clear()
        self._sums.clear()
        self.hooks.forget()
        if self.places is not None:
            self.places.forget()
        for earlier in self._alive.values():
            earlier.end()

    def renew_leaves(self) -> None:
        """Let the next forward pass make autograd's nodes of the parameters anew: they remember their stream."""
        for known in self._tracked.values():
            known.leaf = None

    def _watch_leaves(self) -> None:
        """Take over the gradients that autograd computes for parameters used outside of their layer."""
        for known in self._tracked.values():
            parameter = known.parameter
            if type(parameter) is not ShardedParameter:  # model.to(...) has replaced it by a plain DTensor
                adopt(parameter, known.spec, self.grid)
                known.leaf = None
            if known.leaf is None and parameter.requires_grad:
                parameter.label = known.name  # type: ignore[attr-defined]
                parameter.gradients = weakref.ref(self)  # type: ignore[attr-defined]
                parameter.complete, parameter.counted = known.complete, known.counted  # type: ignore[attr-defined]
                parameter.place = known.place  # type: ignore[attr-defined]
                known.leaf = leaf_of(parameter)
                known.leaf.register_prehook(partial(_hand_over, weakref.ref(self), known.name, parameter, known.spec))

    def expect_end(self) -> None:
        """Make the running backward pass complete all gradients at its end; does nothing outside of one."""
        this_pass = torch._C._current_graph_task_id()
        if this_pass in self._passes or not in_backward():
            return
        self.come_to_backward()
        left_out = self.hooks.left_out()
        # a backward pass inside another one (activation checkpointing) reaches other parameters than the outer one
        self._left_out = self._left_out & left_out if self._passes else left_out
        if not self._passes:
            self.hooks.defer()
            self._unannounced = False
            if not self._summing:
                self._sums.clear()
                self._in_order = iter(self._buckets_and_ids())
                self._bucket = next(self._in_order, None)
                self._summing = self._to_finish > 0
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, this_pass))
        self._passes.add(this_pass)

    def deposit(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        *,
        during: ForwardPass | None = None,
        uses: int = 1,
    ) -> None:
        """Add this rank's parts of gradients, summed over z, in the shapes of the local shards and in any dtype.

        They are the gradients of `uses` uses in the forward pass `during`. 0 uses stands for all uses that autograd
        itself recorded, no pass for the oldest one that expects a gradient. The tensors are changed in place and kept.
        """
        if self._places > 1:  # divide before the cast, because the parameter's dtype may be narrower
            torch._foreach_div_(list(gradients), self._places)
        keys = [id(parameter) for parameter in parameters]
        self._count(keys, during, uses)
        for key, gradient in zip(keys, gradients, strict=True):
            if key not in self._left_out:
                self._add(key, gradient)
        if not self._sums_wait and self._bucket is not None and self._final(self._bucket[1]):
            self._begin_final_sums()

    def _deposit_of_others(
        self, parameters: Sequence[nn.Parameter], flags: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Add gradients of parameters that this place has not used, if another place has.

        This makes the host wait, as did the condition in the model's code by which this place skipped them.
        """
        keys = [id(parameter) for parameter in parameters]
        left_out, nothing = self._left_out, all(map(_is_nothing, flags or gradients))
        # autograd knows these parameters from no graph of this place, so it cannot say whether they are left out
        self._left_out = left_out.union(keys) if nothing else left_out.difference(keys)
        self.deposit(parameters, gradients)
        self._left_out = left_out

    @contextmanager
    def sums_wait(self) -> Iterator[None]:
        """Begin no sum inside the block until `begin_sums` is called, because another message must leave first."""
        self._sums_wait = True
        try:
            yield
        except BaseException:
            self._sums_wait = False  # other ranks may not come so far
            raise
        self.begin_sums()

    def begin_sums(self) -> None:
        """Begin the sums that have waited."""
        if self._sums_wait:
            self._sums_wait = False
            self._begin_final_sums()

    def _begin_final_sums(self) -> None:
        while self._bucket is not None and self._final(self._bucket[1]):
            # all ranks launch buckets in one order, whichever parameters each has used
            bucket, _ = self._bucket
            self._sums |= dict.fromkeys(bucket.names, BucketSum(self, bucket))
            self._bucket = next(self._in_order, None)

    def deposit_whole(
        self,
        name: str,
        parameter: nn.Parameter,
        spec: Spec,
        gradient: Tensor,
        *,
        during: ForwardPass | None = None,
        uses: int = 1,
    ) -> None:
        """Add a place's gradient of a whole parameter, which is equal on all ranks of the place."""
        self.expect_end()
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        folded = spec.view is not CUTS
        within = ("x",) if folded else [axis for axis in spec.owes if axis not in BATCH]
        if any(self.grid.coords[axis] for axis in within):
            gradient = torch.zeros_like(gradient)  # all ranks of the place have it; the owed sum must count it once
        # the ranks that hold parts of the same experts are not those of one place
        for axis in ("expert", "ex") if folded else ():
            gradient = comm.all_reduce(gradient, self.grid, axis, label=name).wait()
        part = spec.storage.compute.take(gradient, self.grid)
        own = part.to(self.policy.reduce_dtype or parameter.dtype, copy=True).contiguous()
        if spec.gathered not in spec.storage.axes:
            self.deposit([parameter], [own], during=during, uses=uses)
            return
        largest = spec.storage.compute.box(spec.shape, self.grid.shape.cuts, dict.fromkeys(spec.view, 0))
        nbytes = prod(len(part) for part in largest) * own.element_size()
        along = dict(axis=spec.gathered, dims=[dict(spec.storage.cuts)[spec.gathered]])
        self.scatter([parameter], [own], nbytes, label=name, during=during, uses=uses, **along)

    def scatter(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        nbytes: int,
        *,
        label: str,
        during: ForwardPass | None = None,
        uses: int = 1,
        axis: str = GATHERED,
        dims: Sequence[int] = (),
        unused: bool = False,
    ) -> None:
        """Sum gradients over z and deposit this rank's shards of them at some time before backward ends.

        `axis` is that over which the parameters are gathered, and `dims` are the dims that it cuts, by default 0.
        `nbytes` is the size on the rank that sends most, the same number on all ranks, so that all ranks wait for
        deferred reductions at the same points. `deposit` changes the tensors in place. `unused`: this place has not
        used the parameters, and its gradients are `NOTHING`.
        """
        if axis in self._whole_over:
            self.deposit(parameters, gradients, during=during, uses=uses)
            return
        skippable = self.places is not None and axis == GATHERED and self.places.before_reduction(parameters)
        use: Callable[[list[Tensor]], None] = partial(self.deposit, parameters, during=during, uses=uses)
        flags: list[Tensor] = []
        if unused:
            use = partial(self._deposit_of_others, parameters, flags)
        if dims:
            gradients, deposit = to_front(gradients, dims), use
            use = lambda shards: deposit([shard.contiguous() for shard in to_back(shards, dims)])  # noqa: E731
        parts = self.grid.size(axis)
        if skippable and all(map(partial(_leaves_a_part_empty, parts), gradients)):  # which cannot show anything
            flag = gradients[0].new_full((parts,), NOTHING if unused else 1.0)
            gradients, use = [*gradients, flag], partial(_split_off_flag, flags, use)
        elif skippable and not unused:
            _mark_used(gradients, parts)
        self.engine.deferred.defer(Scatter(self.grid, axis, gradients, nbytes, label, use))

    def _count(self, keys: list[int], during: ForwardPass | None, uses: int) -> None:
        """Count gradients that have come for the forward pass that used their parameters."""
        for key in keys if during is None else during.take(keys, uses):
            during = next((each for each in self._alive.values() if each.expects([key])), None)
            if during is None:
                self._unannounced = True
            else:
                during.take([key], uses)

    def _add(self, key: int, gradient: Tensor) -> None:
        known = self._tracked.get(key)
        if known is None:
            raise RuntimeError(
                f"a parameter with a shard of shape {tuple(gradient.shape)} was replaced after the model was built; "
                "change parameters in place (load_state_dict without assign=True)"
            )
        if known.name in self._sums:  # its bucket was launched too early: treat that sum as the sum of an earlier pass
            self._sums[known.name].complete()
        parameter, before = known.parameter, known.parameter.grad
        if gradient.dtype is not parameter.dtype:
            gradient = gradient.to(parameter.dtype)
        if before is not None and (before._spec is known.owed or is_owed(before)):  # type: ignore[attr-defined]
            local_of(before).add_(gradient)
        else:
            if before is None:
                if self.hooks._earlier:
                    self.hooks.forget(parameter)
            elif key in self._new or not self.hooks.set_aside(parameter):
                recording = self.grid.recording
                # a gradient that the step has set to zero is written by every replay as well
                if recording is not None and recording.earlier.get(id(before)) == local_of(before)._version:
                    raise RuntimeError(
                        "the step adds to gradients of the step before, and a replay would add to the recorded ones; "
                        "call zero_grad() inside the step"
                    )
                self._add_complete(gradient, known)
            GRAD.__set__(parameter, grid_dtensor(gradient, known.owed, parameter))
        self._new.add(key)

    def _final(self, keys: list[int]) -> bool:
        """Return whether no pass of this step will still produce a gradient of a bucket's parameters."""
        if self.accumulating or self._to_begin or self._unannounced or not self.policy.overlap.reduce_early:
            return False
        # the latest pass first: in most steps it is the only one
        return not self.forward_pass.expects(keys) and not any(each.expects(keys) for each in self._alive.values())

    def _add_complete(self, gradient: Tensor, known: TrackedParameter) -> None:
        """Add the complete gradient of earlier passes to a part that will be summed, so that the sum counts it once.

        Of the ranks that hold the same complete gradient the first one adds it; if gradients are sharded over replicas,
        each replica adds its own rows.
        """
        if known.spec.is_copy and id(known.parameter) not in self._new:
            return  # an earlier step has added both copies, and the other pipe rank adds their sum
        cut = self.policy.shard_optimizer
        replicas = known.spec.replicas
        if all(self.grid.coords[axis] == 0 for axis in known.spec.owes if not (cut and axis == replicas)):
            if gradient.dim():
                rows = self.own_rows(gradient, known.spec)
                gradient = gradient[rows.start : rows.stop]
            gradient.add_(local_of(known.parameter.grad))  # type: ignore[arg-type]

    def _finish(self, this_pass: int) -> None:
        """Complete all gradients, when a backward pass ends."""
        if self.places is not None and self._passes == {this_pass}:
            self.engine.wgrad_queue.run_all()
            self.places.finish()
        self.engine.finish_backward()
        self._passes.discard(this_pass)
        if self._passes:
            return  # this pass ran inside another one, which is still running
        self.passes += 1
        if not self.engine.wgrad_queue.holds:  # else `run_held` ends it
            self._end([each for each in self._alive.values() if each.deposited and not each.held])

    def hold(self, held: ForwardPass) -> None:
        """Note that the backward pass of this forward pass has run but for products that the engine holds back."""
        held.held, held.left_out = True, self._left_out

    def run_held(self, held: ForwardPass, key: Hashable) -> None:
        """Run the products that were held back under this key, and end the backward pass."""
        self._left_out = held.left_out
        with torch.no_grad():
            self.engine.wgrad_queue.run_held(key)
        self.engine.deferred.wait_all()
        held.held = False
        self._end([held])

    def end_step(self) -> None:
        """Complete the gradients of a step that was announced to end here; some passes may have used no parameter."""
        if self._to_finish:
            self._to_begin, self._to_finish = 0, 1
            self._end([])

    def _end(self, finished: Sequence[ForwardPass]) -> None:
        """End these passes, and if they were the last of their step, complete all gradients."""
        for each in finished:
            each.end()
        # one backward pass may go through the graphs of several forward passes, whose losses were added up
        self._to_finish = max(0, self._to_finish - max(1, len(finished)))
        if self.accumulating or self._to_finish:
            return
        self._summing = False
        begun = list({id(total): total for total in self._sums.values()}.values())
        self._sums.clear()  # frees the gradients that they refer to
        if self._bucket is not None:
            begun += [BucketSum(self, bucket) for bucket, _ in (self._bucket, *self._in_order)]
        again = [total.bucket for total in begun if total.late]
        self._advance(begun)
        self._advance([BucketSum(self, bucket) for bucket in again])
        waiting = {key for key in self._new if self._tracked[key].name in self.on_two_ranks}
        self._came_to_sums = False
        complete, self._new = self._new - waiting, waiting
        self.hooks.call(complete)
        self._replicas.step()

    def copies_added(self) -> None:
        """Note that the gradients of parameters on two pipe ranks are complete now."""
        complete, self._new = self._new, set()
        self.hooks.call(complete)

    @staticmethod
    def _advance(sums: list[BucketSum]) -> None:
        while sums:  # every bucket launches its next message before any is waited for again
            sums = [total for total in sums if total.advance()]

    def buckets(self) -> list[Bucket]:
        return [bucket for bucket, _ in self._buckets_and_ids()]

    def _buckets_and_ids(self) -> list[tuple[Bucket, list[int]]]:
        """Return the buckets, each with the ids of its parameters; the one whose gradient comes last comes first."""
        trained = [k.parameter.dtype if k.parameter.requires_grad else None for k in self._tracked.values()]
        if trained != self._trained:
            gradients = [
                OwingGradient(
                    known.name,
                    known.spec.owes,
                    known.parameter.dtype,
                    local_of(known.parameter).nbytes,
                    bucket_unit(known.unit, known.spec.owes, self.grid.shape.cuts),
                )
                for known in self._tracked.values()
                if known.parameter.requires_grad
            ]
            self._trained, self._buckets = trained, []
            for bucket in fill_buckets(gradients, self.policy.bucket_bytes):
                self._buckets.append((bucket, [id(self.parameters[name][0]) for name in reversed(bucket.names)]))
        return self._buckets

    def own_rows(self, shard: Tensor, spec: Spec) -> range:
        """Return the rows of a parameter's shard whose optimizer state this replica keeps."""
        if not self.policy.shard_optimizer:
            return range(shard.shape[0])
        return chunk(shard.shape[0], self.grid.size(spec.replicas), self.grid.coords[spec.replicas])


def _is_nothing(total: Tensor) -> bool:
    """Return whether a sum has `NOTHING` throughout: no rank has used the parameter. The host waits for the device."""
    return bool((total.signbit() & (total == 0)).all())


def _split_off_flag(flags: list[Tensor], use: Callable[[list[Tensor]], None], shards: list[Tensor]) -> None:
    flags.append(shards[-1])
    use(shards[:-1])


def _leaves_a_part_empty(parts: int, gradient: Tensor) -> bool:
    """Return whether some rank gets nothing of a gradient that is cut into these parts."""
    return (parts - 1) * -(-len(gradient) // parts) >= len(gradient)


def _mark_used(gradients: Sequence[Tensor], parts: int) -> None:
    """Let every rank's part of the sum of these gradients show that they were used.

    One number of each part is made unlike `NOTHING`, in the gradient with most rows: others may have empty parts.
    """
    longest = max(gradients, key=len)
    if longest.numel():
        rows = -(-len(longest) // parts)
        longest[(slice(None, None, rows), *[0] * (longest.dim() - 1))].add_(0.0)


def _hand_over(
    owner: weakref.ref[Gradients], name: str, parameter: nn.Parameter, spec: Spec, found: tuple[Tensor | None, ...]
) -> tuple[None] | None:
    """Deposit a gradient that autograd computed, in place of autograd's own accumulation."""
    gradients, (gradient,) = owner(), found
    if gradients is None or gradient is None:
        return None
    if isinstance(gradient, DTensor):
        raise RuntimeError(
            f"{name}: its gradient came as a DTensor, of which each rank knows its own part only (the loss read it "
            "through to_local() or redistribute()); compute with the parameter itself, which is gathered for that"
        )
    gradients.deposit_whole(name, parameter, spec, gradient, uses=0)
    return (None,)


class BucketSum:
    """The sums of one bucket, one message for each axis that it owes, one after another.

    Every rank sends the same message, whichever parameters it used. A parameter without a gradient on this rank
    contributes `NOTHING`. If the sum is that throughout, no rank used the parameter, and it gets no gradient;
    otherwise some place used it, and all places get the sum.
    """

    def __init__(self, gradients: Gradients, bucket: Bucket) -> None:
        self.gradients, self.bucket = gradients, bucket
        gradients.come_to_sums()
        self.tracked = [gradients._tracked[id(gradients.parameters[name][0])] for name in bucket.names]
        self.late = False
        """Whether a gradient came after the bucket was launched."""
        self.own: list[Tensor | None] = []
        self.sums: list[Tensor] = []
        for known in self.tracked:
            gradient = known.parameter.grad
            if gradient is not None and (gradient._spec is known.owed or is_owed(gradient)):  # type: ignore[attr-defined]
                self.own.append(gradient._local_tensor)  # type: ignore[attr-defined]
                self.sums.append(gradient._local_tensor)  # type: ignore[attr-defined]
            else:
                self.own.append(None)
                self.sums.append(self._of_earlier_passes(known))
        self._axes = list(bucket.owes)
        self._pending: Pending[list[Tensor]] | Arrived[list[Tensor]] | None = None
        self._launch()

    def _of_earlier_passes(self, known: TrackedParameter) -> Tensor:
        """Return what a parameter without a new gradient contributes: its gradient of earlier passes, or -0.0."""
        nothing = torch.full_like(local_of(known.parameter), NOTHING)
        if known.parameter.grad is not None:
            self.gradients._add_complete(nothing, known)
        return nothing

    def _launch(self) -> None:
        axis, grid, label, sums = self._axes.pop(0), self.gradients.grid, self.bucket.label, self.sums
        if grid.size(axis) == 1:
            self._pending = Arrived(sums)
        elif axis in REPLICAS and self.gradients.policy.shard_optimizer:
            self._pending = comm.reduce_scatter_together(sums, grid, axis, label=label)
        else:
            self._pending = comm.all_reduce_together(sums, grid, axis, label=label).then(lambda _: sums)

    def advance(self) -> bool:
        """Wait for the message in flight and launch the next one; return False if that was the last."""
        if self._pending is None:
            return False
        self.sums, self._pending = self._pending.wait(), None
        if self._axes:
            self._launch()
            return True
        for known, gradient, total in zip(self.tracked, self.own, self.sums, strict=True):
            parameter = known.parameter
            if gradient is not None or parameter.grad is not None:
                # a sum in place lies where the gradient lies, which has a storage of its own
                parameter.grad._local_tensor = total if total is gradient else own_storage(total)  # type: ignore[union-attr]
                parameter.grad._spec = known.complete  # type: ignore[union-attr]
            elif self._used_elsewhere(total):
                GRAD.__set__(parameter, grid_dtensor(total, known.complete, parameter))
        return False

    def _used_elsewhere(self, total: Tensor) -> bool:
        """Return whether another rank sent a gradient. This makes the host wait, so it is asked only if necessary."""
        alone = all(self.gradients.grid.size(axis) == 1 for axis in self.bucket.owes)
        return not alone and not total.is_meta and not _is_nothing(total)

    def complete(self) -> None:
        """Complete the sum now, because a late gradient has come; `Gradients` will sum the bucket again."""
        if not self.late and not self.gradients.grid.muted:
            late = "the gradients that come after their sum"
            self.gradients.grid.agree_in_time(late, self.bucket.label, self.bucket.owes)
        self.late = True
        while self.advance():
            pass


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients of backward passes inside the block without summing them over ranks.

    The first backward pass outside of the block sums them all. Give every micro-step the number of targets in the whole
    batch, so that the sum is the gradient of the batch:

        count = ff.count_targets(targets, grid)
        with ff.accumulate(model):
            for tokens, targets in micro_steps[:-1]:
                model(tokens, targets, count=count).backward()
        model(*micro_steps[-1], count=count).backward()
    """
    gradients = gradients_of(model)
    before, gradients.accumulating = gradients.accumulating, True
    try:
        yield
    finally:
        gradients.accumulating = before


def gradients_of(model: nn.Module) -> Gradients:
    for module in model.modules():
        if isinstance(gradients := getattr(module, "gradients", None), Gradients):
            return gradients
    raise ValueError(f"{type(model).__name__} is not a Fourfold model: it has no layer on a grid")


def spec_like(parameter: nn.Parameter, *, owes: Sequence[str] = (), cut_over: str | None = None) -> DTensorSpec:
    """Return the DTensor spec of a parameter's gradient: owed over some axes, or also cut over the axis of replicas."""
    spec: DTensorSpec = parameter._spec  # type: ignore[attr-defined]
    placements = dict(zip(spec.mesh.mesh_dim_names or (), spec.placements, strict=True))
    placements |= dict.fromkeys(owes, Partial())
    if cut_over:
        placements[cut_over] = Shard(0)
    return DTensorSpec(spec.mesh, tuple(placements.values()), spec.tensor_meta)
