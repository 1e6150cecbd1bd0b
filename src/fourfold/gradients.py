"""Gradients from a product's dw to a complete `parameter.grad`: owed sums, accumulation, norm and clip.

Units hand in gradients that are already summed over z (`Gradients.deposit`). What is still owed over the other axes
is summed in buckets that model and layout fix. A bucket is launched when no gradient of its parameters is to come:
every use of a parameter in a forward pass is counted, and every deposit takes one away (`ForwardPass`). When a backward
pass ends its callback completes all buckets, so that gradients are complete when `backward()` returns. Inside
`accumulate`, and before the last pass of a step that `begin_step` announced, nothing is summed: the gradients keep this
replica's own part and the last backward pass pays for all of them at once.

Invariant: a gradient is the average over places of what each place's loss gives, and a sum over the axes inside a place
(E6). It is divided by the number of places once, as it is handed in; a sum that completes is never divided, since a
later pass may add to it.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fourfold import comm
from fourfold.axes import AXES, BATCH
from fourfold.comm import Pending
from fourfold.engine import Engine, in_backward
from fourfold.grid import Grid
from fourfold.layout import GATHERED, Spec, chunk
from fourfold.params import ShardedParameter, adopt, leaf_of, local_of, own_storage
from fourfold.policy import Policy


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that owe the same sums and travel in one message."""

    owes: tuple[str, ...]
    names: tuple[str, ...]
    nbytes: int

    @property
    def span(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[-1]} .. {self.names[0]}"

    @property
    def label(self) -> str:
        return f"gradients {self.span}"


def fill_buckets(gradients: Sequence[tuple[str, tuple[str, ...], torch.dtype, int]], bucket_bytes: int) -> list[Bucket]:
    """Cut the gradients (name, axes owed, dtype, bytes on this rank) into buckets.

    Gradients of one dtype that owe the same share one, last ones first, as backward makes them; a bucket is closed when
    the next gradient would take it past `bucket_bytes`. Those that backward completes first come first.
    """
    buckets: list[Bucket] = []
    open_for: dict[tuple[tuple[str, ...], torch.dtype], int] = {}
    for name, owes, dtype, nbytes in reversed(gradients):
        at = open_for.get((owes, dtype))
        if at is None or buckets[at].nbytes + nbytes > bucket_bytes:
            open_for[owes, dtype] = len(buckets)
            buckets.append(Bucket(owes, (name,), nbytes))
        else:
            buckets[at] = Bucket(owes, (*buckets[at].names, name), buckets[at].nbytes + nbytes)
    place = {name: index for index, (name, *_) in enumerate(reversed(gradients))}
    return sorted(buckets, key=lambda bucket: place[bucket.names[-1]])


class DeferredHook:
    """A hook in torch's table of them. Does nothing when autograd calls it; the user's handle removes it as ever."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *_: object) -> None:
        return


class ParameterHooks:
    """The hooks on the parameters of one model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.leaves: dict[nn.Parameter, Node] = {}
        """Where autograd would leave the gradients of trained parameters. They are held here: autograd forgets such a
        node, and its hooks, if nobody holds it."""
        self._earlier: dict[nn.Parameter, Tensor] = {}
        """Complete gradients of earlier passes, which hooks on this pass's gradients do not see."""

    def defer(self) -> None:
        """A backward pass begins: autograd is about to call hooks."""
        for parameter in self.parameters.values():
            for table in (on_gradient(parameter), after(parameter)):
                for number, hook in table.items():
                    if not isinstance(hook, DeferredHook):
                        table[number] = DeferredHook(hook)

    def left_out(self) -> set[nn.Parameter]:
        """Parameters to which the backward pass that runs now leads no gradient: `backward(inputs=...)` leaves some
        out, `torch.autograd.grad(loss, inputs)` all."""
        trained = [(p, leaf) for p, leaf in self.leaves.items() if p.requires_grad]
        try:
            return {parameter for parameter, leaf in trained if not torch._C._will_engine_execute_node(leaf)}
        except RuntimeError as error:
            raise RuntimeError(
                "torch.autograd.grad(loss, parameters) cannot return gradients of parameters on a grid, which are "
                "summed over ranks when backward ends; call loss.backward(inputs=parameters) and read parameter.grad"
            ) from error

    def set_aside(self, parameter: nn.Parameter) -> bool:
        """Keep what earlier passes gave a parameter whose gradient hooks will see; False where there are no hooks."""
        if not on_gradient(parameter):
            return False
        self._earlier[parameter] = parameter.grad  # type: ignore[assignment]
        return True

    def forget(self, *parameters: nn.Parameter) -> None:
        """What was set aside for these parameters, or for all: their gradients were cleared, or the pass failed."""
        for parameter in parameters or tuple(self._earlier):
            self._earlier.pop(parameter, None)

    @torch.no_grad()
    def call(self, complete: Iterable[nn.Parameter]) -> None:
        """The gradients of these parameters are complete."""
        known = set(complete)
        for name, parameter in self.parameters.items():
            if parameter not in known:
                continue
            for deferred in list(on_gradient(parameter).values()):
                given = deferred.hook(parameter.grad)
                if given is not None:
                    parameter.grad = _laid_alike(given, parameter.grad, name)
            if (earlier := self._earlier.pop(parameter, None)) is not None:
                local_of(earlier).add_(local_of(parameter.grad))  # type: ignore[arg-type]
                parameter.grad = earlier
            for deferred in list(after(parameter).values()):
                deferred.hook(parameter)


def on_gradient(parameter: nn.Parameter) -> dict[int, Any]:
    """torch's own table of what `register_hook` was given."""
    return parameter._backward_hooks or {}


def after(parameter: nn.Parameter) -> dict[int, Any]:
    """torch's own table of what `register_post_accumulate_grad_hook` was given."""
    return parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


def _laid_alike(given: Tensor, gradient: Tensor | None, name: str) -> Tensor:
    if not isinstance(given, DTensor) or not isinstance(gradient, DTensor) or given.shape != gradient.shape:
        raise TypeError(
            f"a hook on {name} returned {type(given).__name__} of shape {tuple(given.shape)} for a gradient that is "
            f"a DTensor of shape {tuple(gradient.shape)}; return None, or one computed from that DTensor"  # type: ignore[union-attr]
        )
    return given if given.placements == gradient.placements else given.redistribute(placements=gradient.placements)


REPLICA = "data"
"""The axis over which every parameter and every complete gradient is equal."""


class ForwardPass:
    """The gradients that one forward pass has yet to give: uses of parameters without a deposit so far.

    The autograd graph of the pass holds this object, so a pass whose graph is dropped without a backward pass expects
    nothing any more.
    """

    def __init__(self) -> None:
        self._uses: Counter[nn.Parameter] = Counter()
        self._reads: set[nn.Parameter] = set()
        self.deposited = False
        """Whether the backward pass that runs now deposited gradients of this pass."""

    def use(self, parameter: nn.Parameter) -> None:
        """Count a use of the parameter that will deposit its own gradient."""
        self._uses[parameter] += 1

    def read(self, parameter: nn.Parameter) -> None:
        """Note that autograd itself follows the parameter: it deposits the gradients of all such reads at once."""
        self._reads.add(parameter)

    def expects(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient of this parameter is to come."""
        return self._uses[parameter] > 0 or parameter in self._reads

    def take(self, parameter: nn.Parameter, uses: int) -> None:
        """Take away the uses whose gradient came; 0: it is that of autograd's own reads."""
        if uses:
            self._uses[parameter] = max(0, self._uses[parameter] - uses)
        else:
            self._reads.discard(parameter)
        self.deposited = True

    def end(self) -> None:
        """Write off uses that got no gradient: they were detached, discarded, or left out by autograd."""
        self._uses.clear()
        self._reads.clear()
        self.deposited = False


class Gradients:
    """The gradients of one model, on their way to `parameter.grad`.

    While a gradient is owed a sum its placement on that axis is Partial, so nobody takes it for complete:
    torch sums it on use, our own functions refuse it. Gradients reach parameters beside autograd's own path: hooks on
    parameters are called when a pass ends (hooks.py), and what `backward(inputs=...)` leaves out is asked of autograd.
    """

    def __init__(self, grid: Grid, parameters: Mapping[str, tuple[nn.Parameter, Spec]], policy: Policy) -> None:
        self.grid = grid
        self.parameters = dict(parameters)
        self.policy = policy
        self.engine = Engine(policy.overlap, flights=grid.size("x") > 1 or grid.size("y") > 1)
        self.accumulating = False
        self.guarded = False
        """Whether ranks make sure, in a model's first pass, that they gather the same parameters."""
        self._owed = {p: (spec.owes, spec_like(p, owes=spec.owes)) for p, spec in self.parameters.values()}
        cut = policy.shard_optimizer
        self._complete = {p: spec_like(p, cut_over_replicas=cut) for p, _ in self.parameters.values()}
        self._names = {p: name for name, (p, _) in self.parameters.items()}
        self._buckets: tuple[list[tuple[str, tuple[str, ...], torch.dtype, int]], list[Bucket]] | None = None
        self.hooks = ParameterHooks({name: parameter for name, (parameter, _) in self.parameters.items()})
        self._left_out: set[nn.Parameter] = set()  # of this pass, by backward(inputs=...)
        self._new: set[nn.Parameter] = set()  # have had deposits since hooks were called
        self._passes: set[int] = set()  # backward passes under way whose end will call _finish
        self.forward_pass = ForwardPass()
        """The forward pass that began last."""
        self._numbers = itertools.count()
        self._alive = weakref.WeakValueDictionary({next(self._numbers): self.forward_pass})
        """Forward passes whose graphs exist, in their order; the graphs hold them."""
        self._to_begin = self._to_finish = 0  # passes of the step that `begin_step` announced
        self._unannounced = False
        """Whether this backward pass deposited a gradient of which no use was counted, as a second backward pass over
        a retained graph does: more may come, so buckets wait for its end."""
        self._sums: dict[str, BucketSum] = {}
        self._in_order: Iterator[Bucket] = iter(())
        self._bucket: Bucket | None = None  # the next to be launched
        self._watch_leaves()

    def __deepcopy__(self, memo: dict[int, Any]) -> Gradients:
        """The gradients of a copied model; nothing of the original's is in flight there."""
        new = Gradients(self.grid, copy.deepcopy(self.parameters, memo), self.policy)
        new.engine = copy.deepcopy(self.engine, memo)  # which the copied clock has too
        return new

    def knows(self, parameter: nn.Parameter) -> bool:
        """Whether it is a parameter of the model as it was built."""
        return parameter in self._names

    def begin_step(self, passes: int) -> None:
        """Announce that the next `passes` forward and backward passes make one step.

        Their gradients are summed over ranks once: each bucket after the last forward pass has begun and no gradient of
        its parameters is to come from any pass.
        """
        self._to_begin = self._to_finish = passes

    def begin_forward(self, kind: Hashable, *, guarded: bool = False) -> None:
        """A model's forward pass begins; `kind` tells passes apart that use other weights."""
        self.guarded = guarded
        if self._passes and not in_backward():  # a pass failed, and its callback with it
            self._passes.clear()
            self._new.clear()
            self.hooks.forget()
            self.engine.abandon()
            for earlier in self._alive.values():
                earlier.end()
        self.forward_pass = ForwardPass()
        if torch.is_grad_enabled():
            self._alive[next(self._numbers)] = self.forward_pass
            self._to_begin = max(0, self._to_begin - 1)
        self._watch_leaves()  # a parameter may be trained that was frozen before
        self.engine.begin(kind)

    def _watch_leaves(self) -> None:
        """Take what autograd itself finds for a parameter, where somebody computed with it beside its layer."""
        for name, (parameter, spec) in self.parameters.items():
            if type(parameter) is not ShardedParameter:  # the model was moved or cast since
                adopt(parameter, spec, self.grid)
                self.hooks.leaves.pop(parameter, None)
            if parameter.requires_grad and parameter not in self.hooks.leaves:
                parameter.label = name  # type: ignore[attr-defined]
                parameter.gradients = weakref.ref(self)  # type: ignore[attr-defined]
                leaf = self.hooks.leaves[parameter] = leaf_of(parameter)
                leaf.register_prehook(partial(_hand_over, weakref.ref(self), name, parameter, spec))

    def expect_end(self) -> None:
        """Called inside a backward pass: something is on its way that must have arrived when it ends."""
        this_pass = torch._C._current_graph_task_id()
        if this_pass in self._passes or not in_backward():
            return
        left_out = self.hooks.left_out()
        self._left_out = self._left_out & left_out if self._passes else left_out  # one inside leads to others
        if not self._passes:
            self.hooks.defer()
            self._sums.clear()
            self._unannounced = False
            self._in_order = iter(self.buckets())
            self._next_bucket()
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

        They are the gradients of so many uses during a forward pass (0: of all that autograd itself followed; None:
        during the oldest pass that expects any). The tensors are changed in place and kept.
        """
        if self.grid.shape.places > 1:  # before the cast: a parameter's dtype may be the narrower one
            torch._foreach_div_(list(gradients), self.grid.shape.places)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._take(parameter, during, uses)
            self._add(parameter, gradient.to(parameter.dtype))

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
        """Add a place's gradient of a whole parameter, which all of its ranks have found alike."""
        self.expect_end()
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if any(self.grid.coords[axis] for axis in spec.owes if axis not in BATCH):
            gradient = torch.zeros_like(gradient)  # the sum that it owes counts it once
        part = spec.storage.compute.take(gradient, self.grid)
        own = part.to(self.policy.reduce_dtype or parameter.dtype, copy=True).contiguous()
        if GATHERED not in spec.storage.axes:
            self.deposit([parameter], [own], during=during, uses=uses)
            return
        largest = spec.storage.compute.box(spec.shape, self.grid.shape.sizes, dict.fromkeys(AXES, 0))
        nbytes = prod(len(part) for part in largest) * own.element_size()
        self.scatter([parameter], [own], nbytes, label=name, during=during, uses=uses)

    def scatter(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        nbytes: int,
        *,
        label: str,
        during: ForwardPass | None = None,
        uses: int = 1,
    ) -> None:
        """Sum gradients that are whole over z, and deposit this rank's shards some time before backward ends.

        `nbytes` is what the rank with the most sends, the same number on all ranks, so that they wait alike. The
        tensors must be the caller's own: `deposit` changes them in place.
        """
        if self.grid.size(GATHERED) == 1:
            self.deposit(parameters, gradients, during=during, uses=uses)
            return
        pending = comm.reduce_scatter_together(gradients, self.grid, GATHERED, label=label)
        self.engine.deferred.defer(pending, nbytes, partial(self.deposit, parameters, during=during, uses=uses))

    def _take(self, parameter: nn.Parameter, during: ForwardPass | None, uses: int) -> None:
        """Count that a gradient came, for the pass that used the parameter."""
        if during is None or not during.expects(parameter):
            during = next((each for each in self._alive.values() if each.expects(parameter)), None)
        if during is None:
            self._unannounced = True
        else:
            during.take(parameter, uses)

    def _add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        owed = self._owed.get(parameter)
        if owed is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} was replaced after the model was built; "
                "change parameters in place (load_state_dict without assign=True)"
            )
        if parameter in self._left_out:
            return
        name = self._names[parameter]
        if name in self._sums:  # it seemed final, as in every pass before: that sum counts as an earlier pass's
            self._sums[name].complete()
        before = parameter.grad
        if before is not None and is_owed(before):
            local_of(before).add_(gradient)
        else:
            if before is None:
                self.hooks.forget(parameter)
            elif parameter in self._new or not self.hooks.set_aside(parameter):
                self._add_complete(gradient, local_of(before), owed[0])
            # from_local takes a millisecond
            parameter.grad = DTensor(own_storage(gradient), owed[1], requires_grad=False)
        self._new.add(parameter)
        while self._bucket is not None and self._final(self._bucket):
            self._sums |= dict.fromkeys(self._bucket.names, BucketSum(self, self._bucket))
            self._next_bucket()

    def _next_bucket(self) -> None:
        """Buckets are launched one after the other, in the same order on all ranks, whatever each of them used."""
        self._bucket = next(self._in_order, None)

    def _final(self, bucket: Bucket) -> bool:
        """Whether no pass of this step is to begin and none of those alive expects a gradient of its parameters."""
        if self.accumulating or self._to_begin or self._unannounced or not self.policy.overlap.reduce_early:
            return False
        last_first = [self.parameters[name][0] for name in reversed(bucket.names)]  # the one that comes last decides
        return not any(each.expects(parameter) for each in self._alive.values() for parameter in last_first)

    def _add_complete(self, gradient: Tensor, before: Tensor, owes: Sequence[str]) -> None:
        """Add an earlier pass's sum to a part that will be summed again, so that the sum counts it once: the
        first rank of those that hold copies adds it, and where replicas are cut each adds its own rows."""
        cut = self.policy.shard_optimizer
        if all(self.grid.coords[axis] == 0 for axis in owes if not (cut and axis == REPLICA)):
            if gradient.dim():
                rows = self.own_rows(gradient)
                gradient = gradient[rows.start : rows.stop]
            gradient.add_(before)

    def _finish(self, this_pass: int) -> None:
        """Runs when a backward pass ends."""
        self.engine.finish_backward()
        self._passes.discard(this_pass)
        if self._passes:
            return  # it ran inside another one
        for each in self._alive.values():
            if each.deposited:
                each.end()
        self._to_finish = max(0, self._to_finish - 1)
        if self.accumulating or self._to_finish:
            return
        begun = list({id(total): total for total in self._sums.values()}.values())
        self._sums.clear()  # they hold gradients
        if self._bucket is not None:
            begun += [BucketSum(self, bucket) for bucket in (self._bucket, *self._in_order)]
        again = [total.bucket for total in begun if total.late]
        self._advance(begun)
        self._advance([BucketSum(self, bucket) for bucket in again])
        complete, self._new = self._new, set()
        self.hooks.call(complete)

    @staticmethod
    def _advance(sums: list[BucketSum]) -> None:
        while sums:  # all of them move on before any is waited for again
            sums = [total for total in sums if total.advance()]

    def buckets(self) -> list[Bucket]:
        trained = [
            (name, spec.owes, parameter.dtype, local_of(parameter).nbytes)
            for name, (parameter, spec) in self.parameters.items()
            if parameter.requires_grad
        ]
        if self._buckets is None or self._buckets[0] != trained:
            self._buckets = trained, fill_buckets(trained, self.policy.bucket_bytes)
        return self._buckets[1]

    def own_rows(self, shard: Tensor) -> range:
        """The rows of a shard whose optimizer state this replica keeps."""
        if not self.policy.shard_optimizer:
            return range(shard.shape[0])
        return chunk(shard.shape[0], self.grid.size(REPLICA), self.grid.coords[REPLICA])


def _hand_over(
    owner: weakref.ref[Gradients], name: str, parameter: nn.Parameter, spec: Spec, found: tuple[Tensor | None, ...]
) -> tuple[None] | None:
    """Stand before autograd's own accumulation: `Gradients` adds the gradient, in place of autograd."""
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
    """A bucket on its way to completion: the axes that it owes, one message after another.

    Every rank sends the same message whatever it used. A parameter that took no part here counts as -0.0, which is
    the one number that changes no sum: where the sum is -0.0 throughout nobody used the parameter, and it keeps no
    gradient; where it is not, some place did, and all places get the sum.
    """

    def __init__(self, gradients: Gradients, bucket: Bucket) -> None:
        self.gradients, self.bucket = gradients, bucket
        self.parameters = [gradients.parameters[name][0] for name in bucket.names]
        self.late = False
        """A gradient came after it was complete."""
        self.own = [None if p.grad is None or not is_owed(p.grad) else local_of(p.grad) for p in self.parameters]
        self.sums = [
            self._of_earlier_passes(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self.parameters, self.own, strict=True)
        ]
        self._axes = list(bucket.owes)
        self._pending: Pending[list[Tensor]] | None = None
        self._launch()

    def _of_earlier_passes(self, parameter: nn.Parameter) -> Tensor:
        """What a parameter that took no part adds to the sum: its complete gradient, which counts once, or nothing."""
        nothing = torch.full_like(local_of(parameter), -0.0)
        if parameter.grad is not None:
            self.gradients._add_complete(nothing, local_of(parameter.grad), self.bucket.owes)
        return nothing

    def _launch(self) -> None:
        axis, grid, label = self._axes.pop(0), self.gradients.grid, self.bucket.label
        if axis == REPLICA and self.gradients.policy.shard_optimizer:
            self._pending = self._scatter_over_replicas(self.sums, label)
        else:
            sums = self.sums
            self._pending = comm.all_reduce_together(sums, grid, axis, label=label).then(lambda _: sums)

    def advance(self) -> bool:
        """Wait for the message in flight and launch the next; False once there is none."""
        if self._pending is None:
            return False
        self.sums = self._pending.wait()
        self._pending = None
        if self._axes:
            self._launch()
            return True
        for parameter, gradient, total in zip(self.parameters, self.own, self.sums, strict=True):
            complete = self.gradients._complete[parameter]
            if gradient is not None or parameter.grad is not None:
                parameter.grad._local_tensor = own_storage(total)  # type: ignore[union-attr]
                parameter.grad._spec = complete  # type: ignore[union-attr]
            elif self._used_elsewhere(total):
                parameter.grad = DTensor(own_storage(total), complete, requires_grad=False)
        return False

    def _used_elsewhere(self, total: Tensor) -> bool:
        """Whether another rank sent a gradient; the host waits for the sum, but only of a parameter unused here."""
        alone = all(self.gradients.grid.size(axis) == 1 for axis in self.bucket.owes)
        return not alone and not total.is_meta and not bool((total.signbit() & (total == 0)).all())

    def complete(self) -> None:
        """For a gradient that comes late: this sum counts as an earlier pass's, and another one follows."""
        self.late = True
        while self.advance():
            pass

    def _scatter_over_replicas(self, sums: list[Tensor], label: str) -> Pending[list[Tensor]]:
        """This replica's rows of each sum."""
        return comm.reduce_scatter_together(sums, self.gradients.grid, REPLICA, label=label)


@contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Backward passes inside keep their gradients to this replica; the first one outside sums them all.

    Give every micro-step the count of the whole batch's targets, so that the sum is the batch's gradient:

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


def grad_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, equal on every rank and to that of one process."""
    return measure_norms(parameters)[0]


def measure_norms(parameters: Iterable[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """`grad_norm`, and the norm of this rank's shard of each gradient that is there."""
    gradients = _complete_gradients(parameters)
    if not gradients:
        return torch.zeros(()), []
    grid = Grid.of(gradients[0][0])
    wide = torch.promote_types(gradients[0][1].dtype, torch.float32)
    shards = list(torch._foreach_norm([gradient for _, gradient in gradients], 2, wide))
    counted = [norm for (parameter, _), norm in zip(gradients, shards, strict=True) if _counts_here(parameter, grid)]
    squares = torch.zeros((), dtype=torch.float64, device=gradients[0][1].device)
    if counted:
        squares += torch.stack(counted).double().square().sum()
    cut_over_replicas = any(_cuts(parameter.grad, REPLICA) for parameter, _ in gradients)
    for axis in AXES:
        if axis != REPLICA or cut_over_replicas:
            squares = comm.all_reduce(squares, grid, axis, label="gradient norm").wait()
    return squares.sqrt(), shards


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; returns the norm before.

    Like torch's function of the same name, for parameters on a grid.
    """
    parameters = list(parameters)
    norm = grad_norm(parameters)
    scale_gradients(parameters, norm, max_norm)
    return norm


def scale_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients of this norm so that it is at most `max_norm`."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if gradients := [gradient for _, gradient in _complete_gradients(parameters)]:
        torch._foreach_mul_(gradients, scale.to(gradients[0].dtype))


def _complete_gradients(parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    """Parameters with this rank's shard of their gradients."""
    found = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in found:
        Grid.of(parameter)  # refuses what is no parameter of a Fourfold module
    if any(is_owed(gradient) for _, gradient in found):
        raise RuntimeError(
            "gradients are still owed a sum over other ranks: the last backward() ran inside ff.accumulate; "
            "run the last micro-step's backward() outside of it"
        )
    return [(parameter, local_of(gradient)) for parameter, gradient in found]


def spec_like(parameter: nn.Parameter, *, owes: Sequence[str] = (), cut_over_replicas: bool = False) -> DTensorSpec:
    """How a gradient lies that lies as the parameter does, still owed over some axes, or cut over replicas too."""
    spec: DTensorSpec = parameter._spec  # type: ignore[attr-defined]
    placements = dict(zip(AXES, spec.placements, strict=True))
    placements |= dict.fromkeys(owes, Partial())
    if cut_over_replicas:
        placements[REPLICA] = Shard(0)
    return DTensorSpec(spec.mesh, tuple(placements.values()), spec.tensor_meta)


def is_owed(gradient: Tensor) -> bool:
    return any(isinstance(placement, Partial) for placement in gradient.placements)  # type: ignore[attr-defined]


def _cuts(tensor: Tensor | None, axis: str) -> bool:
    return isinstance(tensor.placements[AXES.index(axis)], Shard)  # type: ignore[union-attr]


def _counts_here(parameter: nn.Parameter, grid: Grid) -> bool:
    """Of the ranks that hold equal copies, the first counts; replicas each count their own."""
    return all(axis == REPLICA or _cuts(parameter, axis) or grid.coords[axis] == 0 for axis in AXES)
