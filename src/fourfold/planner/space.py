"""What a search may choose from: grids, activation modes, rows of a micro-step, levers and rank orders.

A grid that does not cut the model or the batch evenly is refused with the reason. Nothing here knows what a candidate
costs or how much memory it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations

from fourfold.axes import CUTS, PIPE, REPLICA
from fourfold.planner.estimate import LEVERS, Lever
from fourfold.planner.grid_plan import Refused
from fourfold.planner.pipe import MOST_PIPE
from fourfold.planner.price import Candidate, Task
from fourfold.policy import SAVES_MEMORY, Activations, Policy
from fourfold.shape import Shape, divisors, shapes_of

MANY_DEVICES, WIDE_NODES = 512, 4
"""From this many devices on, grids whose x and y, or z, span more than so many nodes are not combined with pipe: stages
are there to keep these axes short. Pipelines then have sharded activations only, which nearly always win."""
LEAST_TOKENS = 256
"""The fewest tokens of a sequence that a place of a context group has."""
MOST_CONTEXTS = 3
"""Context sizes that are tried on one grid, the smallest that are possible: larger ones send more."""
MOST_TOKENS = 1 << 16
"""The most tokens of a place in one micro-step, unless it takes all of them: more gain little speed and need memory."""
CHOSEN_FIELDS = (
    "activations", *Lever._fields, "keep_casts", "loss_chunk", *SAVES_MEMORY, "shard_optimizer", "context_way"
)  # fmt: skip
"""The fields of a policy that the search chooses."""


@dataclass(frozen=True, slots=True)
class Space:
    """The values that the search may choose from; None means all."""

    shapes: tuple[Shape, ...] | None = None
    policies: tuple[Policy, ...] | None = None
    micro_steps: tuple[int, ...] | None = None
    orders: tuple[tuple[str, ...], ...] | None = None
    axes: tuple[str, ...] = CUTS
    """The axes of the grids that are considered, unless `shapes` names them; with AXES there are pipelines among
    them."""
    saves_memory: bool = False
    """Whether given `policies` may be changed by `SAVES_MEMORY` where they do not fit; without policies they may."""

    @property
    def keeps_stages(self) -> bool:
        """Whether the given policies say how the model is cut into stages or in which order ranks work."""
        given = self.policies or ()
        return any(policy.stages is not None or policy.schedule != "auto" for policy in given)


def ways_of(task: Task, candidate: Candidate) -> list[str]:
    """Return the ways in which K and V may travel on a grid with a context size, except the one that `auto` takes."""
    sizes, context = candidate.sizes(task), candidate.shape.context
    heads = sizes.local_kv // task.config.head_dim
    near = [size for size in range(2, context + 1) if context % size == 0 and heads % size == 0]
    swaps = [f"ulysses:{size}+{over}" for size in near if size < context for over in ("gather", "ring")]
    return ["ring", *swaps, *(f"ulysses:{size}" for size in near if size == context)]


def orders_of(*, pipelines: bool) -> tuple[tuple[str, ...], ...]:
    """Return the rank orders to consider: pipe varies slowest, or next to slowest where replicas lie further apart."""
    every = list(permutations(CUTS))
    near = [(*order[:-1], PIPE, REPLICA) for order in every if order[-1] == REPLICA]
    return *((*order, PIPE) for order in every), *(near if pipelines else ())


def context_sizes(task: Task, shape: Shape) -> list[int]:
    """Return the smallest sizes of a context group that a grid may have."""
    places = shape.places
    possible = [size for size in divisors(places)[1:] if task.rows * size % places == 0]
    return [size for size in possible if task.seq // size >= LEAST_TOKENS][:MOST_CONTEXTS]


class CandidateSource:
    """The candidates of a task within a space; the grids that it refuses go to `refused`."""

    def __init__(self, task: Task, space: Space, refused: list[Refused]) -> None:
        self.task, self.space, self.refused = task, space, refused

    def shapes(self, devices: int) -> list[Shape]:
        """Return the grids that are given, or all of so many devices."""
        return list(self.space.shapes or shapes_of(devices, axes=self.space.axes))

    def candidates(self, shapes: Iterable[Shape]) -> Iterator[Candidate]:
        """Yield these grids in each activation mode with each number of rows; refuse those that cut nothing evenly."""
        task = self.task
        for shape in shapes:
            places = shape.row_places
            if reason := self._why_no_pipe(shape):
                self.refused.append(Refused(shape, reason))
                continue
            if task.rows % places:
                divided = "data*z" if shape.context == 1 else "data*z/context"
                why = f"{divided} = {places} places do not divide a batch of {task.rows} rows"
                self.refused.append(Refused(shape, why))
                continue
            misfits, policies = {}, self._policies(shape)  # reasons by activation mode
            for policy in policies:
                misfit = task.config.misfit(shape, policy)
                if misfit is not None:
                    what, value, _, axes = misfit
                    misfits[policy.activations] = f"{what}={value} is not divisible by {axes}"
                    continue
                possible = list(self._rows(task.rows // places, shape))
                if not possible:
                    rows, steps = task.rows // places, self.space.micro_steps
                    misfits[policy.activations] = f"{rows} rows of a place cannot be cut into {steps} micro-steps"
                for rows in possible:
                    yield Candidate(shape, policy, rows, task.rows // places // rows)
            if len(misfits) == len({policy.activations for policy in policies}):
                self.refused.append(Refused(shape, "; ".join(dict.fromkeys(misfits.values()))))

    def levers(self, candidate: Candidate) -> tuple[bool, ...]:
        """Return for each lever whether it changes anything on this grid; where policies are given, it is theirs."""
        policy, shape = candidate.policy, candidate.shape
        if self.space.policies is not None:
            return tuple(lever.on(policy) == policy for lever in LEVERS)
        return _useful_levers(shape.z > 1, policy.activations == "sharded" and shape.x * shape.y > 1)

    def _policies(self, shape: Shape) -> Sequence[Policy]:
        """Return one policy for each activation mode where the two differ; levers are added to it."""
        if self.space.policies is not None:
            return self.space.policies
        both = shape.x * shape.y > 1 and (shape.pipe == 1 or shape.world < MANY_DEVICES) and not shape.folded
        modes: tuple[Activations, ...] = ("sharded", "replicated") if both else ("sharded",)
        compiles = self.task.machine.device != "cpu"  # as `fourfold train` does
        base = Policy(compute_dtype=self.task.compute, shard_optimizer=True, even_tokens=True, compile=compiles)
        return [replace(base, activations=mode) for mode in modes]

    def _why_no_pipe(self, shape: Shape) -> str:
        """Return why a grid with a pipe axis is not considered; empty if it is."""
        if shape.pipe == 1:
            return ""
        units, wide = self.task.config.layers + 2, WIDE_NODES * self.task.machine.devices_per_node
        if shape.world >= MANY_DEVICES and (shape.x * shape.y > wide or shape.z > wide):
            return f"x*y={shape.x * shape.y} or z={shape.z} has more than {wide} ranks, so pipe is not worth trying"
        if shape.pipe > units:
            return f"pipe={shape.pipe} ranks for {units} units: {self.task.config.layers} layers, embedding and head"
        return f"pipe={shape.pipe} is more than {MOST_PIPE}" if shape.pipe > MOST_PIPE else ""

    def _rows(self, rows: int, shape: Shape) -> Iterator[int]:
        """Yield the possible rows of a micro-step; a pipeline has at least as many micro-steps as ranks if it can.

        Places that share rows have less than one each, unless the grid was asked for or they balance documents: with
        more they would not share.
        """
        if self.space.micro_steps is not None:
            yield from (rows // steps for steps in self.space.micro_steps if rows % steps == 0)
            return
        most = max(1, MOST_TOKENS * shape.context // self.task.seq)
        if shape.context > 1 and self.space.shapes is None and self.task.documents is None:
            most = min(most, shape.context)
        enough = max(1, rows // shape.pipe)
        yield from (each for each in range(1, enough + 1) if rows % each == 0 and (each <= most or each == rows))


@lru_cache(maxsize=4)
def _useful_levers(gathers: bool, enters: bool) -> tuple[bool, ...]:
    """Return for each lever whether it changes anything where weights are gathered, and inputs of products are.

    Without gathers over z, weights in use are the parameters themselves or casts that are kept anyway.
    """
    return tuple((gathers or not lever.keep_weights) and (enters or not lever.keep_gathered) for lever in LEVERS)
