"""Programs: the work that one rank's host gives its device in a step, in order; and the rehearsal that writes them.

Every figure of the planner is a reading of a program: the messages are its launches, the FLOPs its products, the memory
its allocations and frees (memory.py), the seconds come from its simulation (simulate.py). A program comes from the
rehearsal of a reference model (step_program.py) or from a dry run of real code (trace.py).

A rehearsal drives the runtime's own overlap engine with names and sizes instead of tensors. `Rehearsal` offers the
parts of layers (operators that move activations, weights that are gathered and reduced, products and their backward)
and writes down the host's work. Launches and waits come in the runtime's order because the same engine decides about
them. The law: launches, waits and products equal those of a dry run of the real code.

With `memory=True` a rehearsal also writes down allocations and frees, as on a GPU: norms and attention are single
kernels there, and the copy of a tensor that is sent counts while it is sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypeVar

from torch import Tensor

from fourfold.axes import PIPE, REPLICAS
from fourfold.engine import BACKWARD, Awaited, Engine, Wait
from fourfold.gradients import Bucket
from fourfold.ledger import Collective, Op, joint_label
from fourfold.planner.parameters import part
from fourfold.planner.sizes import LocalSizes
from fourfold.schedule.action import Action


@dataclass(slots=True, eq=False)
class PlannedGather:
    """A gather of weights that the engine orders as it orders the runtime's (`engine.WeightGather`)."""

    host: Rehearsal
    weights: WeightGroup
    key: tuple[Any, ...]
    """Kind, label and names: the same key means the same weights for the same use."""
    nbytes: int

    def launch(self, *behind: PlannedGather) -> Sequence[Awaited[None]]:
        together = [self.weights, *(each.weights for each in behind)]
        axes = [self.host.structure.gathered_over(weights.names) for weights in together]
        sent = {
            axis: self.host.gather([weights for weights, along in zip(together, axes, strict=True) if along == axis])
            for axis in dict.fromkeys(axes)
        }
        return [sent[axis] for axis in axes]

    def version(self) -> object:
        return 0

    def buffers(self, _: None) -> Sequence[Tensor]:
        return self.host.release(self.weights, kept=self.key[0] in (PRODUCT, EXPERTS) and not self.weights.again)


@dataclass(slots=True, eq=False)
class PlannedReduction:
    """A reduction of gradients that the engine orders as it orders the runtime's (`engine.WeightReduction`)."""

    host: Rehearsal
    weights: WeightGroup
    nbytes: int
    made: int
    """The bytes that backward allocated for the gradients, in a rehearsal of memory."""
    alike: str
    """The axis: reductions along different ones never share a message."""

    def launch(self, *behind: PlannedReduction) -> Sequence[Awaited[None]]:
        together = [self, *behind]
        return [self.host.reduce([each.weights for each in together])] * len(together)

    def use(self, _: None) -> None:
        self.host.deposit(self.weights, self.made)


# --- the operations of a program

MemoryKind = Literal["activations", "logits", "workspace", "weights", "gradients"]
"""The use of memory: activations and logits that forward keeps for backward; workspace for short-lived tensors; weights
that are gathered or cast, and their gradients before they are reduced; complete gradients."""


class LaunchOp(NamedTuple):
    """A collective that starts on a communicator of its axis once the device has done the work before it."""

    flight: int
    record: Collective
    lane: str
    """The communicator; collectives of one lane run one after another."""


class CopyOp(NamedTuple):
    """A copy between the device and its host that starts once the device has done the work before it."""

    flight: int
    label: str
    nbytes: int
    back: bool
    """Whether the copy is one to the device. Each direction has a stream of its own."""


class WaitOp(NamedTuple):
    """A wait of the device for the result of a collective or a copy that was launched before."""

    flight: int


class HostWaitOp(NamedTuple):
    """A wait of the host until the device has done all work so far, of which it reads a result."""


class MatmulOp(NamedTuple):
    """A matrix product [m, k] x [k, n] on this rank, or one kernel that computes as many as there are experts."""

    label: str
    m: int
    k: int
    n: int
    is_wgrad: bool = False
    """Whether the product makes dw, which no message waits for."""
    parts: int = 1
    """How many products share the m rows, or the k rows of a product that makes dw; each has a factor of its own."""
    sent: bool = False
    """Whether tokens were sent to these experts, so that the rank of the busiest expert has more rows."""

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


class AttentionOp(NamedTuple):
    """One attention kernel: scores and their product with the values. A causal mask halves its FLOPs."""

    label: str
    flops: int
    nbytes: int


class ElementwiseOp(NamedTuple):
    """A memory-bound kernel, with the bytes that it reads and writes."""

    label: str
    nbytes: int
    fused: bool = False
    """Whether these are the bytes of one kernel that compiling makes of several; without it they move more."""


class AllocOp(NamedTuple):
    """An allocation, in a rehearsal that writes memory down."""

    nbytes: int
    kind: MemoryKind


class FreeOp(NamedTuple):
    """A free, in a rehearsal that writes memory down."""

    nbytes: int
    kind: MemoryKind


ComputeOp = MatmulOp | AttentionOp | ElementwiseOp
MemoryOp = AllocOp | FreeOp
Work = LaunchOp | CopyOp | WaitOp | HostWaitOp | ComputeOp | MemoryOp


@dataclass(frozen=True, slots=True)
class Program:
    """A step's work in the host's order, and the index at which each phase begins."""

    work: list[Work]
    phases: list[tuple[int, str]]
    moments: list[tuple[int, str]] = field(default_factory=list)
    """The places at which parts of the model begin that may set the memory peak, in a program with memory."""
    actions: list[tuple[int, Action]] = field(default_factory=list)
    """The places at which the actions of a pipeline's schedule begin; empty without a pipe axis."""

    @property
    def records(self) -> list[Collective]:
        """The collectives in order of their launch."""
        return [item.record for item in self.work if isinstance(item, LaunchOp)]

    @property
    def flops(self) -> int:
        """The FLOPs of products and attention, including those that run twice."""
        return sum(item.flops for item in self.work if isinstance(item, MatmulOp | AttentionOp))


def lane_of(record: Collective, two_lanes: Sequence[str]) -> str:
    """Return the communicator of a collective: along `two_lanes` gathers and reductions have one each.

    Along pipe, what a rank sends and what it receives do not wait for each other, nor for sums over its ranks.
    """
    if record.axis == PIPE:
        return f"{PIPE} {record.op if record.op in ('send', 'receive') else 'reduce'}"
    if record.axis not in two_lanes:
        return record.axis
    return f"{record.axis} {'gather' if record.op == 'all_gather' else 'reduce'}"


ADDED = 3
"""How many times its bytes a gradient moves that is added to another: both are read, and the sum is written."""


# --- the rehearsal

T = TypeVar("T")
PRODUCT = "product"
"""The kind of a gather for a product, which may keep the gathered weights."""
EXPERTS = "experts"
"""The kind of a gather for a product of experts, in forward and in backward, which may keep them too."""
Records = Callable[[], Sequence[Collective]]


class PlannedWait:
    """Collectives or copies that were launched together and are waited for together; none if nothing is sent."""

    __slots__ = ("_flights", "_work")

    def __init__(self, work: list[Work], flights: list[int]) -> None:
        self._work, self._flights = work, flights

    def wait(self) -> None:
        if self._flights:
            self._work += map(_wait_op, self._flights)
            self._flights = []


_wait_op = lru_cache(maxsize=1 << 14)(WaitOp)  # the same in every program


NOTHING_SENT = PlannedWait([], [])


class WeightGroup(NamedTuple):
    """Parameters that are gathered over z, or experts over ez, in one message and reduced in one."""

    label: str
    names: tuple[str, ...]
    again: bool = False
    """Whether this is the second gather, for backward, which is left out if the weights were kept."""
    router: bool = False
    """Whether they are the weight of a router, which is used in a dtype of its own (`Policy.router_dtype`)."""


class WeightOrder(NamedTuple):
    """The order in which a forward pass and its backward pass use weights, each with the kind of its use.

    Weights that a structure keeps are listed a second time all the same.
    """

    forward: Sequence[tuple[WeightGroup, str]]
    backward: Sequence[tuple[WeightGroup, str]]
    reduced: Sequence[tuple[str, ...]]
    """The groups of parameters whose gradients backward reduces over z, in any order."""


class BackwardBytes(NamedTuple):
    """Bytes of the tensors around a product's backward."""

    dout: int = 0
    """The gradient of the output, if it is a tensor of its own; the product of dw reads it last."""
    da: int = 0
    """The gradient of the input."""
    kept: int = 0
    """The input that forward keeps for dw."""
    reread: int = 0
    """The input that is gathered again for dw."""
    joins: int = 0
    """Copies that are made while the input is put together from its parts."""
    dout_kind: MemoryKind = "workspace"


@dataclass(slots=True, eq=False)
class _Node:
    """The backward of one operation of forward. If it `reads` tensors that forward kept, a recomputed forward must have
    run before it."""

    run: Callable[[], None]
    reads: bool


class Rehearsal:
    """One rank's host in a training step."""

    def __init__(self, sizes: LocalSizes, *, memory: bool = False, silent: bool = False) -> None:
        """A rehearsal of memory, and one that is silent from the beginning, take names in place of sizes."""
        self.sizes, self.policy, self.memory, self.structure = sizes, sizes.policy, memory, sizes.structure
        self.silent = silent
        """Whether nothing is written down: the engine only records in which order weights are used."""
        self._names = memory or silent
        """Whether `sizes` has names in place of numbers."""
        self.work: list[Work] = []
        self.phases: list[tuple[int, str]] = []
        self.moments: list[tuple[int, str]] = []
        self.actions: list[tuple[int, Action]] = []
        self.engine = Engine(
            sizes.policy.overlap,
            flights=self.structure.over_x or self.structure.over_y or self.structure.folded,
            in_backward=lambda: self._backward,
        )
        self._two_lanes = () if self._names else sizes.shape.two_lanes
        self._gatherings: dict[Hashable, PlannedGather] = {}
        self.reduced: set[tuple[str, ...]] = set()
        """The groups of parameters whose gradients were reduced over z."""
        self.cast: set[str] = set()
        """The parameters whose casts this pass has made and keeps."""
        self._forgetting = False
        """Whether a forward pass runs that keeps nothing, because it will be run again."""
        self._tape: list[_Node] = []
        self._backward = False
        self._flights = 0
        # buckets are filled by size
        self.gradients = None if self._names else GradientMessages(self)

    # --- the host's work

    def enter_phase(self, name: str) -> None:
        self.phases.append((len(self.work), name))

    def enter_action(self, action: Action) -> None:
        """Begin an action of a pipeline's schedule."""
        self.actions.append((len(self.work), action))
        self.enter_phase("forward" if action.kind == "F" else "backward")

    def enter_part(self, name: str) -> None:
        """Begin a phase in a rehearsal of memory, which tells apart the work that is left out if more is kept."""
        if self.memory:
            self.enter_phase(name)

    def compute(self, work: ComputeOp) -> None:
        if not self.silent:
            self.work.append(work)

    def launch(self, records: Records) -> PlannedWait:
        if self.silent or not (found := records()):
            return NOTHING_SENT
        flights: list[int] = []
        for record in found:
            self.work.append(LaunchOp(self._flights, record, lane_of(record, self._two_lanes)))
            flights.append(self._flights)
            self._flights += 1
        return PlannedWait(self.work, flights)

    def copy(self, label: str, nbytes: int, *, back: bool) -> PlannedWait:
        """Launch a copy to the host, or `back` from it; names stand for memory, which copies do not change."""
        if self._names:
            return NOTHING_SENT
        self.work.append(CopyOp(self._flights, label, nbytes, back))
        self._flights += 1
        return PlannedWait(self.work, [self._flights - 1])

    def read_result(self) -> None:
        """Let the host wait for the work so far."""
        if not self.silent:
            self.work.append(HostWaitOp())

    def communicate(self, records: Records) -> None:
        """Launch the collectives one after another and wait for each at once."""
        for record in () if self.silent else records():
            self.launch(lambda record=record: (record,)).wait()

    # --- memory

    def enter_moment(self, name: str) -> None:
        """Mark where a part of the model begins that may set the peak of memory."""
        if self.memory:
            self.moments.append((len(self.work), name))

    def allocate(self, nbytes: int, kind: MemoryKind = "workspace") -> None:
        if self.memory and not self._forgetting:
            self.work.append(AllocOp(nbytes, kind))

    def free(self, nbytes: int, kind: MemoryKind = "workspace") -> None:
        if self.memory and not self._forgetting:
            self.work.append(FreeOp(nbytes, kind))

    def need(self, nbytes: int, kind: MemoryKind = "workspace") -> None:
        """Allocate memory for a moment."""
        self.allocate(nbytes, kind)
        self.free(nbytes, kind)

    # --- backward

    def on_backward(self, run: Callable[[], None], *, reads: bool = True) -> None:
        self._tape.append(_Node(run, reads))

    def begin_step(self, passes: int, *, until_end_step: bool = False) -> None:
        """Announce the passes of a step, whose gradients are summed over ranks once (`Gradients.begin_step`)."""
        if self.gradients is not None:
            self.gradients.begin(passes, until_end_step=until_end_step)

    def begin_forward(self, kind: Hashable) -> None:
        """Begin a forward pass; passes of one kind use the same weights in the same order."""
        self.cast.clear()
        if self.gradients is not None:
            self.gradients.begin_forward()
        self.engine.begin(kind)

    def take_tape(self) -> list[_Node]:
        """Return the backward of all operations since the last call, for a pass whose backward runs later."""
        tape, self._tape = self._tape, []
        return tape

    def run_backward(
        self,
        tape: list[_Node] | None = None,
        *,
        hold: Hashable = None,
        has_parameters: bool = True,
        hand_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the backward of all operations, the latest first as autograd does, then finish what is in flight.

        With `hold` the products of dw are held back under that key until `run_held`, which ends the pass. A pass
        without parameters has nothing to finish, and nobody notes its end. `hand_on` is called when the gradient of the
        input is there.
        """
        nodes = self._tape if tape is None else tape
        self._backward = True
        with nullcontext() if hold is None else self.engine.wgrad_queue.holding(hold):
            while nodes:
                nodes.pop().run()
            hand_on()
            # queued products of dw and deferred reductions are still backward's work, so finish them before it ends
            if has_parameters:
                self.engine.finish_backward()
        self._backward = False
        self.cast.clear()
        if self.gradients is not None and hold is None and has_parameters:
            self.gradients.end_pass()

    def run_held(self, key: Hashable) -> None:
        """Run the products that were held back under this key, and end their backward pass."""
        self.engine.wgrad_queue.run_held(key)
        self.engine.deferred.wait_all()
        if self.gradients is not None:
            self.gradients.end_pass()

    def run_twice(self, function: Callable[[], T]) -> T:
        """Run a function now, and again before the first part of its backward that reads a kept tensor."""
        first, turn = len(self._tape), self.engine.turn
        before, self._forgetting = self._forgetting, True
        result = function()
        self._forgetting = before
        done = False

        def again() -> None:
            nonlocal done
            if not done:
                done = True
                # the second run leaves no new backward: the nodes of the first run are the ones that count
                kept = self._tape, self.engine.turn
                self._tape, self.engine.turn, self.engine.recomputing = [], turn, True
                self.enter_part("again")
                function()
                self.enter_part("backward")
                (self._tape, self.engine.turn), self.engine.recomputing = kept, False

        for node in self._tape[first:]:
            if node.reads:  # whichever of these runs first runs the function again
                node.run = partial(_one_after_the_other, again, node.run)
        return result

    # --- activations

    def move(
        self, axis: str, there: Records, back: Records, *, arrives: int = 0, sends: int = 0, joins: int = 0,
        leaves: int = 0, kind: MemoryKind = "workspace",
    ) -> AsyncMove | NoMove:  # fmt: skip
        """Launch an operator that moves an activation over an axis, and put its conjugate into backward.

        The sizes are bytes of tensors in backward: the one that `arrives`, the copy that it `sends`, the copies that it
        `joins` after arrival, and the tensors that it `leaves` because nothing reads them any more.
        """
        if axis not in self.structure.used_axes:
            return NO_MOVE
        return AsyncMove(self, there, back, (arrives, sends, joins, leaves), kind)

    # --- weights

    def using(self, weights: WeightGroup, kind: str, turns: int, *, keep: bool = False) -> AbstractContextManager[None]:
        """Have weights in compute layout and dtype, for one of `turns` halves."""
        return self.engine.prefetcher.using(self._gathering(weights, kind), uses=turns, keep=keep)

    def _gathering(self, weights: WeightGroup, kind: str) -> PlannedGather:
        key = kind, weights.label, weights.names
        if self._names and kind == EXPERTS:
            key = *key, weights.again  # a rehearsal of names tells apart what is left out if weights are kept
        gathering = self._gatherings.get(key)
        if gathering is None:
            travels, item = self.structure.gathers_over(weights.names), self.structure.itemsize_of(weights.router)
            # with names nothing is gathered ahead, so the engine compares no bytes: any number but 0 will do
            nbytes = 1 if self._names else self.sizes.most_elements(weights.names) * item
            gathering = self._gatherings[key] = PlannedGather(self, weights, key, nbytes if travels else 0)
        return gathering

    def order_of_weights(self, kind: Hashable) -> WeightOrder:
        """Return the order in which forward passes of a kind, and the backward passes after them, have used weights."""
        used, in_backward = (
            [(gathering.weights, gathering.key[0]) for gathering in map(self._gatherings.__getitem__, keys)]
            for keys in map(self.engine.prefetcher.order, (kind, BACKWARD))
        )
        return WeightOrder(used, in_backward, tuple(self.reduced))

    def expect_weights(self, kind: Hashable, order: WeightOrder) -> None:
        """Let the engine begin as after a first step, in which it has recorded the order of the weights."""
        kept, item = self.structure.keeps_weights, self.structure.reduce_itemsize
        used, in_backward = (
            [self._gathering(weights, use) for weights, use in uses if not (kept and weights.again)]
            for uses in (order.forward, order.backward)
        )
        self.engine.prefetcher.expect(kind, used, in_backward)
        self.engine.deferred.expect(self.sizes.most_elements(names) * item for names in order.reduced)

    def gather(self, together: Sequence[WeightGroup]) -> PlannedWait:
        """Launch the gather of these weights, which go along one axis, in one message."""
        sizes, structure = self.sizes, self.structure
        nbytes = 0
        for weights in together:
            self.read_shards(weights)
            if not self.silent:
                count = sizes.message_elements_again if weights.again else sizes.message_elements
                nbytes += count(weights.names) * structure.itemsize_of(weights.router)
        label = joint_label([weights.label for weights in together])
        axis = structure.gathered_over(together[0].names)
        gathering = self.launch(lambda: sizes.message("all_gather", axis, nbytes, label))
        if self.memory and not self.silent:
            for weights in together:
                if structure.copies(weights.names, weights.router):
                    whole = sizes.elements_again if weights.again else sizes.elements
                    self.allocate(whole(weights.names) * structure.itemsize_of(weights.router), "weights")
        return gathering

    def read_shards(self, weights: WeightGroup) -> None:
        """Have this rank's shards of weights in the compute dtype: a message of them is smaller.

        A kept cast serves the whole pass.
        """
        names, structure = weights.names, self.structure
        if self.gradients is not None:  # a sharded optimizer may still be gathering them from other replicas
            self.gradients.need(names)
        item = structure.itemsize_of(weights.router)
        casts, kept = item != self.sizes.dtype.itemsize, structure.policy.keep_casts and self.cast.issuperset(names)
        if casts and not self.silent and not kept:
            self.cast.update(names)
            moved = self.sizes.shard_elements(names) * (self.sizes.dtype.itemsize + item)
            self.compute(ElementwiseOp(f"cast {weights.label}", moved))

    def release(self, weights: WeightGroup, *, kept: bool) -> tuple[()]:
        """Free gathered or cast weights, except those that a product keeps until backward if `kept` is set."""
        if self.memory and self.structure.copies(weights.names, weights.router):
            sizes, names = self.sizes, weights.names
            elements = sizes.elements_again(names) if weights.again else sizes.elements(names)
            released = elements - sizes.kept_elements(names) if kept else elements
            self.free(released * self.structure.itemsize_of(weights.router), "weights")
        return ()

    def expect_gradients(self, weights: WeightGroup) -> None:
        """Announce gradients in forward: one deposit for all halves, none for a forward pass that runs again."""
        if self.gradients is not None and self.engine.turn.index == 0 and not self.engine.recomputing:
            self.gradients.expect(weights.names)

    def add_gradients(self, key: str, weights: WeightGroup, turns: int, *, in_place: bool = True) -> None:
        """Add the gradient of one of `turns` halves; the call of the last half reduces the sum over z.

        With `in_place` a half adds to the sum of the halves before; otherwise it makes a tensor first.
        """
        sizes, made = self.sizes, 0
        first = self.engine.sums.begun((key, weights.names)) is None
        if self.memory:
            made = sizes.elements(weights.names) * self.structure.reduce_itemsize
            self.allocate(made if first or not in_place else 0, "weights")
            self.free(0 if first or in_place else made, "weights")
        if self.engine.sums.add((key, weights.names), [], turns) is None:
            return
        if not self.structure.gathers_over(weights.names):
            self.deposit(weights, made)
            return
        self.reduced.add(weights.names)
        in_flight = 0 if self._names else sizes.most_elements(weights.names) * self.structure.reduce_itemsize
        axis = self.structure.gathered_over(weights.names)
        self.engine.deferred.defer(PlannedReduction(self, weights, in_flight, made, axis))

    def add_shard_gradients(self, key: str, weights: WeightGroup, turns: int) -> None:
        """Add the gradient of one of `turns` halves that is complete over z."""
        made = self.sizes.shard_elements(weights.names) * self.structure.reduce_itemsize
        if self.engine.sums.begun((key, weights.names)) is None:
            self.allocate(made, "weights")
        else:  # it is added to the one of the first half
            self.need(made, "weights")
        if self.engine.sums.add((key, weights.names), [], turns) is not None:
            self.deposit(weights, made)

    def reduce(self, together: Sequence[WeightGroup]) -> PlannedWait:
        """Launch the reduction of the gradients of these weights in one message."""
        sizes, item = self.sizes, self.structure.reduce_itemsize
        label = joint_label([weights.label for weights in together])
        axis = self.structure.gathered_over(together[0].names)
        return self.launch(
            lambda: sizes.message(
                "reduce_scatter",
                axis,
                sum(sizes.message_elements(weights.names) for weights in together) * item,
                label,
            )
        )

    def deposit(self, weights: WeightGroup, made: int) -> None:
        """Take complete gradients, which are added to those of the passes before."""
        if self.memory:
            self.free(made, "weights")
            self.allocate(self.sizes.shard_elements(weights.names) * self.sizes.dtype.itemsize, "gradients")
        if self.gradients is not None:
            if self.gradients.accumulates:
                added = self.sizes.shard_elements(weights.names) * self.sizes.dtype.itemsize
                self.compute(ElementwiseOp(f"add {weights.label}", ADDED * added))
            self.gradients.deposit(weights.names)

    def product(
        self, weights: WeightGroup, m: int, k: int, p: int, reread: Records, tensors: BackwardBytes = BackwardBytes()
    ) -> None:
        """Compute E1 with p columns; in backward E2 and, behind a message, E3. `reread` gathers the input again."""
        turn, label, kept = self.engine.turn, weights.label, self.structure.keeps_weights
        self.allocate(tensors.kept, "activations")
        self.expect_gradients(weights)
        with self.using(weights, PRODUCT, turn.of, keep=kept):
            self.compute(MatmulOp(f"E1 {label}", m, k, p))

        def read() -> PlannedWait:
            self.enter_part("reread")
            self.allocate(tensors.reread)
            reading = self.launch(reread)
            self.enter_part("backward")
            return reading

        def gradients(reading: PlannedWait | None) -> None:
            (reading or read()).wait()
            self.need(tensors.joins)
            self.compute(MatmulOp(f"E3 {label}", p, m, k, is_wgrad=True))
            self.add_gradients("product", weights, turn.of)
            self.free(tensors.reread)
            self.free(tensors.dout, tensors.dout_kind)
            self.free(tensors.kept, "activations")

        def backward() -> None:
            reading = read() if self.policy.overlap.wgrad_behind_messages else None
            if kept:
                self.compute(MatmulOp(f"E2 {label}", m, p, k))
                self.engine.wgrad_queue.add(lambda: gradients(reading))
                return
            self.enter_part("regather")
            again = WeightGroup(label, self.structure.matrices(weights.names), True, weights.router)
            with self.using(again, "weights", turn.of):
                self.enter_part("backward")
                self.allocate(tensors.da)
                self.compute(MatmulOp(f"E2 {label}", m, p, k))
                # inside the block, because the runtime holds the weights until backward of the product returns
                self.engine.wgrad_queue.add(lambda: gradients(reading))
            if self.memory and turn.index == 0:  # backward runs the first half last; it frees what all halves kept
                item = self.structure.itemsize_of(weights.router)
                self.free(self.sizes.kept_elements(weights.names) * item, "weights")

        self.on_backward(backward)


def _one_after_the_other(*functions: Callable[[], None]) -> None:
    for function in functions:
        function()


class NoMove:
    """An activation that is not sent, because its axis has one rank."""

    travels = False
    waits: Wait | None = None

    def land(self) -> None:
        return None


NO_MOVE = NoMove()


class AsyncMove:
    """An activation in flight. Backward launches where forward landed and lands where forward launched."""

    travels = True
    waits: Wait | None = None

    def __init__(
        self, host: Rehearsal, there: Records, back: Records, nbytes: tuple[int, int, int, int], kind: MemoryKind
    ) -> None:
        self._host, self._back, self._nbytes, self._kind = host, back, nbytes, kind
        self._moving = host.launch(there)
        host.on_backward(self._land_back, reads=False)

    def land(self) -> None:
        self._moving.wait()
        self._host.on_backward(self._launch_back, reads=False)

    def _launch_back(self) -> None:
        arrives, sends, _, _ = self._nbytes
        self._host.need(sends, self._kind)
        self._host.allocate(arrives, self._kind)
        self._moving = self._host.launch(self._back)

    def _land_back(self) -> None:
        _, _, joins, leaves = self._nbytes
        self._host.engine.wgrad_queue.run_one()  # this product runs while the activation is in flight
        self._moving.wait()
        self._host.free(leaves, self._kind)
        self._host.need(joins, self._kind)


class GradientMessages:
    """The sums that gradients owe beyond z, and the parameters that a sharded optimizer gathers from other replicas.

    As in the runtime (`gradients.ForwardPass`), every use of a parameter in forward announces a gradient, and a bucket
    is launched when no gradient of its parameters is to come.
    """

    def __init__(self, host: Rehearsal) -> None:
        self.host, self.sizes = host, host.sizes
        self.buckets = host.sizes.buckets()
        self._expected: Counter[str] = Counter()
        self._to_begin = self._to_finish = 0  # forward and backward passes that are left of the step
        self._last = 1  # those that are left during the last backward pass
        self._sums: list[tuple[Bucket, Iterator[str], PlannedWait]] = []
        self._todo: list[Bucket] = []
        self._arriving: dict[str, PlannedWait] = {}
        self._padded: dict[tuple[str, ...], int] = {}  # the bytes of each bucket's message over replicas
        self.sums_wait = False
        """Whether sums wait until another message has left."""

    def begin(self, passes: int, *, until_end_step: bool) -> None:
        """Begin a step of so many passes, which ends with the last of them or with `end_step`."""
        self._to_begin, self._to_finish = passes, passes + until_end_step
        self._last = 1 + until_end_step
        self._todo = self.buckets[::-1]  # a stack: all ranks launch buckets in this one order

    @property
    def accumulates(self) -> bool:
        """Whether the gradients of this pass and of another one are added up.

        Of n passes n - 1 are. The runtime adds in all but the first, a program in all but the last, so that the first
        stands for every further one.
        """
        return self._to_finish > self._last

    def begin_forward(self) -> None:
        self._to_begin = max(0, self._to_begin - 1)

    def expect(self, names: Sequence[str]) -> None:
        """Count one gradient of each parameter that is to come."""
        self._expected.update(names)

    def deposit(self, names: Sequence[str]) -> None:
        """Take gradients that are complete on this rank, and launch the buckets that this completes."""
        for name in names:
            self._expected[name] -= 1
            if self._to_begin or not self.host.policy.overlap.reduce_early:
                continue
            if not self.sums_wait:
                self._begin_final_sums()

    def begin_sums(self) -> None:
        """Begin the sums that have waited for another message to leave."""
        if self.sums_wait:
            self.sums_wait = False
            if not self._to_begin and self.host.policy.overlap.reduce_early:
                self._begin_final_sums()

    def _begin_final_sums(self) -> None:
        # only the next bucket may be launched, even if a later one is complete: ranks must agree on the order
        while self._todo and not any(self._expected[name] for name in self._todo[-1].names):
            self._open(self._todo.pop())

    def _open(self, bucket: Bucket) -> None:
        axes = iter(bucket.owes)
        self._sums.append((bucket, axes, self._launch(bucket, next(axes))))

    def _launch(self, bucket: Bucket, axis: str) -> PlannedWait:
        if axis in REPLICAS and self.host.policy.shard_optimizer:
            return self.host.launch(lambda: self._over_replicas("reduce_scatter", bucket, bucket.label))
        return self.host.launch(lambda: self.sizes.message("all_reduce", axis, bucket.nbytes, bucket.label))

    def _over_replicas(self, op: Op, bucket: Bucket, label: str) -> list[Collective]:
        """Return one message in which the rows of each parameter are padded until the replicas divide them."""
        axis = self.sizes.specs[bucket.names[0]].replicas
        if bucket.names not in self._padded:
            replicas, elements = self.sizes.shape.cuts[axis], 0
            for name in bucket.names:
                parameter = self.sizes.parameter(name)
                elements += part(parameter.rows, replicas, 0) * replicas * parameter.row
            self._padded[bucket.names] = elements * self.sizes.dtype.itemsize
        return self.sizes.message(op, axis, self._padded[bucket.names], label)

    def end_pass(self) -> None:
        """End a backward pass; the last one of a step completes the gradients of all."""
        self._to_finish -= 1
        if not self._to_finish:
            self._complete()

    def end_step(self) -> None:
        """Complete the gradients of a step that was announced to end here."""
        if self._to_finish > 0:
            self._to_finish = 0
            self._complete()

    def _complete(self) -> None:
        """Launch the buckets that are left, one axis after another, and wait for all of them."""
        while self._todo:
            self._open(self._todo.pop())
        while self._sums:
            left = []
            for bucket, axes, waiting in self._sums:
                waiting.wait()
                if (axis := next(axes, None)) is not None:
                    left.append((bucket, axes, self._launch(bucket, axis)))
            self._sums = left

    def gather_parameters(self) -> None:
        """Gather the parameters that the sharded optimizer stepped, the first layers first."""
        for bucket in reversed(self.buckets):
            waiting = self.host.launch(
                lambda bucket=bucket: self._over_replicas("all_gather", bucket, f"parameters {bucket.span}")
            )
            if self.host.policy.overlap.reduce_early:  # wait where a parameter is first used
                self._arriving |= dict.fromkeys(bucket.names, waiting)
            else:
                waiting.wait()

    def need(self, names: Sequence[str]) -> None:
        """Wait until these parameters have arrived from the other replicas."""
        for name in names:
            if waiting := self._arriving.pop(name, None):
                waiting.wait()
