"""Which candidates of a search fit into a device's memory, and what is changed so that more of them do.

A lower bound that is cheap rules out most candidates at once. The others are tried as they are, then without kept casts
or with logits in chunks, and, where the search may do so, with what saves memory and costs time
(`policy.SAVES_MEMORY`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import inf
from typing import Any

import torch

from fourfold.planner.estimate import FRUGAL, LEVERS, Lever
from fourfold.planner.grid_plan import GIB, Refused
from fourfold.planner.memory import Memory, MemoryReading, least_nbytes
from fourfold.planner.pipe import rough_pipeline, rough_stages, too_large
from fourfold.planner.price import Candidate, MemoryByKind, Task, memory_of
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.space import Space
from fourfold.policy import SAVES_MEMORY, Policy
from fourfold.shape import Shape

LOSS_CHUNK = 2048
"""Tokens per chunk of the logits, if the logits of all tokens do not fit."""


class MemoryFitter:
    """What fits into the memory of a task's machine; the grids that it rules out go to `refused`."""

    def __init__(self, task: Task, space: Space, refused: list[Refused], *, saves: bool) -> None:
        """`saves`: whether candidates that do not fit are tried with what saves memory."""
        self.task, self.space, self.refused, self.saves = task, space, refused, saves
        self.limit = task.usable_bytes

    def rule_out_too_large(
        self, candidates: Sequence[Candidate]
    ) -> tuple[list[Candidate], list[LocalSizes], torch.Tensor]:
        """Return the candidates that a lower bound of their memory admits, with their sizes and whether that bound
        admits each lever: [candidate, lever]. Refuse the other grids."""
        sizes = [candidate.sizes(self.task) for candidate in candidates]
        lean = self._lean_sizes(candidates, sizes)
        frugal = self.least_nbytes(candidates, lean, FRUGAL)
        fits = (frugal <= self.limit).nonzero()[:, 0].tolist()
        possible = {candidates[place].shape for place in fits}
        refused: dict[Shape, float] = {}
        for candidate, nbytes in zip(candidates, frugal.tolist(), strict=True):
            if candidate.shape not in possible:
                refused[candidate.shape] = min(nbytes, refused.get(candidate.shape, inf))
        for shape, nbytes in refused.items():
            reason = f"needs more than {nbytes / GIB:.1f} GiB of {self.limit / GIB:.1f} GiB for weights, gradients, "
            reason += "optimizer state and what layers keep"
            self.refused.append(Refused(shape, reason, round(nbytes) - self.limit))
        candidates, sizes, lean = ([each[place] for place in fits] for each in (candidates, sizes, lean))
        least = {FRUGAL.recompute: frugal[fits]}
        for lever in LEVERS:
            if lever.recompute not in least:
                least[lever.recompute] = self.least_nbytes(candidates, lean, lever)
        by_lever = torch.stack([least[lever.recompute] for lever in LEVERS], dim=1)
        return candidates, sizes, by_lever <= self.limit

    def fit(self, candidate: Candidate, lever: Lever) -> Candidate | None:
        """Return the candidate with the lever if it fits, with logits in chunks or what else saves memory if it fits
        only then."""
        wanted = replace(candidate, policy=lever.on(candidate.policy))
        fit = self._fit_pipe if wanted.shape.pipe > 1 else self._fit_plain
        if (fitted := fit(wanted)) is not None or not self.saves:
            return fitted
        return next(filter(None, map(fit, self.saving(wanted))), None)

    def saving(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidate with each set of what saves memory, those that are likely to cost least first.

        Inputs of blocks wait on the host only where that link is known, and where blocks run again.
        """
        machine, policy = self.task.machine, candidate.policy
        chunks, offload = ({name: value} for name, value in SAVES_MEMORY.items())
        in_chunks = not self.task.config.experts and candidate.sizes(self.task).m > chunks["mlp_chunk"]
        sets = [chunks] if in_chunks else []
        if policy.runs_blocks_again and machine.device != "cpu" and machine.host_bandwidth is not None:
            sets += [offload, *({**each, **offload} for each in sets)]
        for each in sets:
            if (saving := replace(policy, **each)) != policy:
                yield replace(candidate, policy=saving)

    def has_room(self, memory: MemoryByKind) -> bool:
        return memory.total <= self.limit and self.task.has_host_memory(memory)

    def most_frugal(self, candidate: Candidate) -> Candidate:
        """Return the candidate as it needs the least memory."""
        if self.space.policies is None:
            candidate = replace(candidate, policy=FRUGAL.on(candidate.policy))
        return self._lean(candidate)

    def least(self, candidate: Candidate) -> Memory:
        frugal = self.most_frugal(candidate)
        least = self._frugal(frugal)[1]
        if self.saves and not self.has_room(least):  # the host may have too little memory where the device has enough
            chunks = next(self.saving(replace(frugal, policy=replace(frugal.policy, **saving_nothing()))), frugal)
            without = self._frugal(chunks)[1]
            least = without if self.has_room(without) else least
        return least

    def least_nbytes(self, candidates: Sequence[Candidate], sizes: Sequence[LocalSizes], lever: Lever) -> torch.Tensor:
        """Return a lower bound of the bytes of each candidate with a lever: [candidate].

        It is quick, and it is the answer for most candidates that do not fit.
        """
        first = {pipe: self._first_layers(pipe) for pipe in {one.shape.pipe for one in candidates}}
        layers = [first[one.shape.pipe] for one in candidates]
        passes = [min(one.shape.pipe, one.micro_steps) for one in candidates]
        counts = torch.tensor([layers, passes, [one.micro_steps for one in candidates]], dtype=torch.float64)
        return least_nbytes(sizes, lever.recompute, *counts)

    def _first_layers(self, pipe: int) -> int:
        """Return the layers of the first of so many pipe ranks; 0 if a given schedule may keep less than 1F1B does."""
        if pipe > 1 and self.space.keeps_stages:
            return 0
        return len(rough_stages(self.task.config, pipe, self.task.seq).layers_of(0))

    def _fit_plain(self, wanted: Candidate) -> Candidate | None:
        """Return a candidate without a pipe axis if it fits, with logits in chunks if need be."""
        reading = MemoryReading(wanted.sizes(self.task), wanted.micro_steps)
        if reading.least > self.limit:
            return None  # this is quick, and it is the answer for most candidates that do not fit
        tried, memory = self._frugal(wanted, reading)
        return tried if self.has_room(memory) else None

    def _fit_pipe(self, wanted: Candidate) -> Candidate | None:
        """Return a candidate with a pipe axis if a first look says that it fits, with logits in chunks if need be."""
        laid = wanted if self.space.keeps_stages else rough_pipeline(self.task, wanted)
        rank = too_large(self.task, laid, self.limit)
        if rank is None:
            return laid
        # only the last rank has logits
        in_chunks = rank == laid.shape.pipe - 1 and laid.sizes(self.task).m > LOSS_CHUNK
        if self.space.policies is not None or not in_chunks:
            return None
        chunked = replace(laid, policy=replace(laid.policy, loss_chunk=LOSS_CHUNK))
        return chunked if too_large(self.task, chunked, self.limit) is None else None

    def _lean(self, candidate: Candidate) -> Candidate:
        """Return the candidate with all that saves memory; the candidate itself if that is not tried."""
        return [candidate, *(self.saving(candidate) if self.saves else ())][-1]

    def _lean_sizes(self, candidates: Sequence[Candidate], sizes: Sequence[LocalSizes]) -> Sequence[LocalSizes]:
        """Return the sizes with which lower bounds of memory are found, where blocks run again or not."""
        if not self.saves:
            return sizes
        again = (replace(one, policy=replace(one.policy, recompute=FRUGAL.recompute)) for one in candidates)
        return [self._lean(one).sizes(self.task) for one in again]

    def _frugal(self, candidate: Candidate, reading: MemoryReading | None = None) -> tuple[Candidate, Memory]:
        """Return a candidate and its memory; if it does not fit, without kept casts, else with logits in chunks."""
        reading = reading or MemoryReading(candidate.sizes(self.task), candidate.micro_steps)
        memory = reading.memory()
        if self.space.policies is not None or memory.total <= self.limit:
            return candidate, memory
        # both cost time, so each is tried only if nothing but what it saves is in the way
        if memory.total - reading.casts <= self.limit:
            lean = replace(candidate, policy=replace(candidate.policy, keep_casts=False))
            less = memory_of(self.task, lean)
            if less.total <= self.limit:
                return lean, less
        in_chunks = candidate.sizes(self.task).m > LOSS_CHUNK
        if in_chunks and memory.total - memory.logits <= self.limit:
            chunked = replace(candidate, policy=replace(candidate.policy, loss_chunk=LOSS_CHUNK))
            less = memory_of(self.task, chunked)
            if less.total < memory.total:
                return chunked, less
        return candidate, memory


def saving_nothing() -> dict[str, Any]:
    """Return the fields of a policy that save memory, as they are by default."""
    return {one.name: one.default for one in fields(Policy) if one.name in SAVES_MEMORY}
