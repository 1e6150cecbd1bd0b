"""Which units of a model stand in which stage of a pipeline, and which pipe rank holds a stage. Pure arithmetic.

The units of a model with L layers are its embedding (unit 0), its layers (units 1 to L) and its head with the loss
(unit L + 1). A stage is a range of units, which may be empty between the first stage and the last: an empty stage
passes on what it receives. A pipe rank may hold several stages, its chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fourfold.errors import nearest

PLACEMENTS = ("loop", "wave")
"""How stages are dealt to pipe ranks: `loop` starts again at rank 0 for every chunk; `wave` goes down and up again, so
that neighbouring chunks share a rank at each turn, and the first and last stage share rank 0 if there are 2 chunks."""


def place(placement: str, pipe: int, chunks: int) -> tuple[int, ...]:
    """Return the pipe rank of every stage."""
    if pipe < 1 or chunks < 1:
        raise ValueError(f"pipe={pipe}, chunks={chunks}: a pipeline needs at least 1 rank and 1 chunk per rank")
    if placement not in PLACEMENTS:
        raise ValueError(f"there is no placement {placement!r}{nearest(placement, PLACEMENTS)}; use loop or wave")
    down = tuple(range(pipe))
    turned = down[::-1] if placement == "wave" else down
    return tuple(rank for chunk in range(chunks) for rank in (turned if chunk % 2 else down))


def stages_of(placement: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the stages that a pipe rank holds, in the order of the model."""
    return tuple(stage for stage, holder in enumerate(placement) if holder == rank)


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a model: their units, their pipe ranks, and what each computes again in backward."""

    cuts: tuple[int, ...]
    """The first unit of every stage, and at the end the number of units: stage s has cuts[s] to cuts[s + 1] - 1."""
    placement: tuple[int, ...]
    """The pipe rank of every stage."""
    recompute: tuple[str, ...] = field(default=())
    """What every stage computes again in backward, in the words of the policy; empty: what the policy says."""

    def __post_init__(self) -> None:
        stages = len(self.placement)
        if len(self.cuts) != stages + 1:
            raise ValueError(
                f"{len(self.cuts)} cuts for {stages} stages: give the first unit of each stage, and the number of "
                f"units at the end, {stages + 1} numbers in all"
            )
        fallen = [stage for stage in range(stages) if self.cuts[stage] > self.cuts[stage + 1]]
        if fallen:
            stage = fallen[0]
            raise ValueError(
                f"stage {stage} begins at unit {self.cuts[stage]} and ends before unit {self.cuts[stage + 1]}; cuts "
                "must not decrease: give equal ones for an empty stage"
            )
        if self.cuts[0] != 0 or self.cuts[-1] < 2:
            raise ValueError(
                f"cuts {self.cuts} miss a unit: the first must be 0, the embedding, and the last the number of units, "
                "which is the number of layers + 2"
            )
        if self.cuts[1] == 0 or self.cuts[-2] == self.cuts[-1]:
            raise ValueError(
                f"cuts {self.cuts} leave the first or the last stage empty: the first takes the tokens and needs the "
                "embedding, the last computes the loss and needs the head; only stages between them may be empty"
            )
        if set(self.placement) != set(range(self.pipe)):
            without = min(set(range(self.pipe)) - set(self.placement))
            raise ValueError(
                f"placement {self.placement}: pipe rank {without} has no stage; give it one, if an empty one"
            )
        if self.recompute and len(self.recompute) != stages:
            raise ValueError(
                f"recompute names {len(self.recompute)} kinds for {stages} stages: give one for each stage"
            )

    @classmethod
    def even(cls, layers: int, pipe: int, chunks: int = 1, placement: str = "loop") -> Stages:
        """Return stages with equally many layers, or one more in the earlier ones, for a model with so many layers.

        The embedding stands in the first stage and the head in the last. Stages beyond the number of layers are empty.
        """
        stages = pipe * chunks
        each, more = divmod(layers, stages)
        first = [1 + each * stage + min(stage, more) for stage in range(stages)]
        return cls((0, *first[1:], layers + 2), place(placement, pipe, chunks))

    @property
    def pipe(self) -> int:
        """The number of pipe ranks."""
        return max(self.placement) + 1

    @property
    def chunks(self) -> int:
        """The largest number of stages that one rank holds."""
        return max(self.placement.count(rank) for rank in range(self.pipe))

    @property
    def layers(self) -> int:
        """The number of layers of the whole model."""
        return self.cuts[-1] - 2

    def units(self, stage: int) -> range:
        """Return the units of a stage: 0 is the embedding, 1 the first layer."""
        return range(self.cuts[stage], self.cuts[stage + 1])

    def layers_of(self, stage: int) -> range:
        """Return the layers of a stage, by their numbers in the whole model."""
        units = self.units(stage)
        return range(max(units.start - 1, 0), max(min(units.stop - 1, self.layers), 0))

    def has_embedding(self, stage: int) -> bool:
        """Return whether a stage turns tokens into the stream."""
        return 0 in self.units(stage)

    def has_head(self, stage: int) -> bool:
        """Return whether a stage computes the loss."""
        return self.layers + 1 in self.units(stage)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a pipe rank holds."""
        return stages_of(self.placement, rank)
