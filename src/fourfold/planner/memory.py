"""Peak bytes of one rank in a training step, by kind: a closed form for the reference models.

The peak is the largest of a few moments: the head's product, the loss, a layer's backward (the last layer's, when all
activations are there; the first one's, when all gradients are; the one at which reductions in flight have filled up),
the embedding's backward, the optimizer's step. Bytes are those that torch's allocator hands out: contexts,
communicators and libraries' workspaces come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import ceil
from typing import Literal

from fourfold.planner.held import Held
from fourfold.planner.lives import NONE, Lives, Moment
from fourfold.planner.share import Share

At = Literal["head", "loss", "backward", "embedding", "optimizer"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the moment when it holds most."""

    parameters: int
    gradients: int
    optimizer: int
    weights_in_flight: int
    """Gathered weights, in use and ahead; gradients of weights being made and reduced; weights that are kept."""
    activations: int
    """What forward has kept for backward, logits apart."""
    logits: int
    workspace: int
    """What comes and goes: gradients of activations, gathered inputs, copies in a wider dtype."""
    at: At

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "at"}

    @property
    def total(self) -> int:
        kept = self.parameters + self.gradients + self.optimizer + self.activations
        return kept + self.weights_in_flight + self.logits + self.workspace


def peak_memory(share: Share, *, micro_steps: int = 1, optimizer_bytes_per_parameter: float = 8.0) -> Memory:
    """One rank's peak in a step of so many micro-steps, after the first, when the optimizer's state is there."""
    return _Step(share, micro_steps, optimizer_bytes_per_parameter).peak()


def kept_for_backward(share: Share) -> int:
    """Bytes that a forward pass of one micro-step leaves for backward."""
    return Held(share).kept()


def fit(first: Sequence[int], cycle: Sequence[int], cycles: int, bound: int) -> int:
    """Bytes of what is in flight: one after the other as long as they fit, but always the first; then whole cycles."""
    total = 0
    for nbytes in first:
        if total and total + nbytes > bound:
            return total
        total += nbytes
    if not cycles or not cycle:
        return total
    whole = sum(cycle)
    repeats = min(cycles, max(0, bound - total) // whole)
    total += repeats * whole
    return total if repeats == cycles else total + fit_rest(cycle, bound - total, always=not total)


def fit_rest(cycle: Sequence[int], bound: int, *, always: bool) -> int:
    total = 0
    for nbytes in cycle:
        if total + nbytes > bound and (total or not always):
            return total
        total += nbytes
    return total


class _Step:
    def __init__(self, share: Share, micro_steps: int, optimizer_bytes: float) -> None:
        self.held = held = Held(share)
        self.policy, self.config, self.shape = share.policy, share.config, share.shape
        self.layers = self.config.layers
        self.halves = held.halves
        self.accumulates = micro_steps > 1
        cut = self.shape.data if self.policy.shard_optimizer else 1
        self.parameters = held.parameters * held.stored
        self.optimizer = ceil(held.parameters / cut * optimizer_bytes)
        self.all_gradients = self.parameters
        self.own_gradients = ceil(self.parameters / cut)

        # weights: down, up, out, qkv, the order of backward
        self.units = [held.down, held.up, held.out, held.qkv]
        overlap = self.policy.overlap
        positions = self.config.seq * held.k if self.config.positions == "learned" else 0
        largest = max(held.table, positions, *self.units)
        self.gathered = [self._whole(unit) for unit in self.units]
        self.table = self._whole(held.padded_table)
        self.sent_along = 1 / self.shape.z if held.casts else 0.0
        """Of a gathered weight: the cast shard, which is held until the gather has been waited for."""
        self.prefetcher = overlap.most_in_flight(largest * held.compute) if held.travels and overlap.prefetch else 0
        self.behind = overlap.most_in_flight(largest * held.reduce) if held.travels and overlap.defer else 0
        self.made = [unit * held.reduce for unit in self.units]
        self.table_made = held.padded_table * held.reduce
        again = self.gathered[::-1] if self.policy.recompute == "block" else []
        reads = [] if held.keeps_weights else self.gathered
        self.cycle = [*again, *reads]
        """What a layer's backward gathers, in its order."""
        self.cycle_nbytes, self.made_nbytes = sum(self.cycle), sum(self.made)

        keeps = held.keeps_weights and self.policy.recompute != "block"
        self.kept_weights = held.layer_weights() if keeps else 0
        self.kept_layer = held.layer() - self.kept_weights

    def _whole(self, elements: int) -> int:
        """A gathered or cast weight."""
        return elements * self.held.compute if self.held.travels or self.held.casts else 0

    def _memory(
        self, at: At, *, gradients: int, weights: int, activations: int = 0, logits: int = 0, workspace: int = 0
    ) -> Memory:
        gradients = max(gradients, self.all_gradients if self.accumulates and at != "optimizer" else 0)
        return Memory(self.parameters, gradients, self.optimizer, weights, activations, logits, workspace, at)

    def peak(self) -> Memory:
        moments = [*self._ends(), self._at_embedding(), self._at_optimizer()]
        lives = Lives(self.held).play()
        moments += [self._at_layer(done, lives) for done in self._depths()]
        return max(moments, key=lambda memory: memory.total)

    # --- weights over z

    def _in_flight_ahead(self, first: Sequence[int], layers: int) -> int:
        if not self.prefetcher:
            return 0
        everything = sum(first) + layers * self.cycle_nbytes
        if everything <= self.prefetcher:
            return ceil(everything * (1 + self.sent_along))
        return ceil(fit(first, self.cycle, layers, self.prefetcher) * (1 + self.sent_along))

    def _in_flight_behind(self, sent: int, done: int) -> int:
        """Reductions, the youngest first: of this layer, of those above, of the head."""
        if not self.behind:
            return 0
        here, above = self.made[: max(sent, 0)][::-1], self.made[::-1]
        if sent < 0:
            here, done = above[1:], done - 1
        everything = sum(here) + max(done, 0) * self.made_nbytes
        if everything <= self.behind:
            fits = everything + self.table_made <= self.behind
            return everything + (self.table_made if fits else 0)
        return fit(here, above, max(done, 0), self.behind)

    # --- gradients

    def _gradients(self, done: int, elements: int = 0) -> int:
        """Shards of what backward has reduced so far: the head's, those of layers, so many elements of this layer."""
        held = self.held
        found = (held.table_shard + done * held.layer_shard + elements // self.shape.z) * held.stored
        return found + self._scattered(found)

    def _scattered(self, gradients: int) -> int:
        """Rows of this replica beside whole gradients, until backward ends."""
        return gradients // self.shape.data if self.policy.shard_optimizer and self.shape.data > 1 else 0

    # --- the moments

    @property
    def _all_kept(self) -> int:
        return self.held.before_layers() + self.layers * self.kept_layer

    def _ends(self) -> list[Memory]:
        return self._in_chunks() if self.policy.loss_chunk else self._whole_loss()

    def _whole_loss(self) -> list[Memory]:
        """The head's product, the loss forward or backward, the head's backward."""
        held = self.held
        kept = self._all_kept + held.norm_and_input()
        weights = self.layers * self.kept_weights + (self.table if held.keeps_weights else 0)
        again = [] if held.keeps_weights else [self.table]
        ahead = self._in_flight_ahead(again, self.layers)
        gathered = held.entered if held.sharded and self.shape.x > 1 else 0
        there, joining = held.logits, 0
        if held.inner_cut > 1:
            one = held.logits // self.halves
            there = 2 * one + held.logits_cut  # one half's are whole over y, once more to be sent
            joining = 3 * one + held.logits_cut // self.halves  # it arrives, is cut apart and joined
        rereads = 0 if self.policy.keep_gathered else gathered
        after = self._in_flight_ahead([], self.layers)
        in_use = (0 if held.keeps_weights else self.table) + after + self.table_made
        return [
            self._memory("head", gradients=0, weights=weights + ahead + self.table, activations=kept,
                         logits=there, workspace=gathered),
            self._memory("loss", gradients=0, weights=weights + ahead, activations=kept,
                         logits=held.logits_cut + self._loss_copies()),
            self._memory("head", gradients=0, weights=weights + in_use, activations=kept,
                         logits=held.logits, workspace=rereads + held.entered_whole),
            # a second half's arrive when the first has made its dw
            self._memory("head", gradients=0, weights=weights + (ahead if self.halves == 1 else in_use),
                         activations=kept, logits=joining),
        ]  # fmt: skip

    def _loss_copies(self) -> int:
        """What the loss makes of the logits that are there, forward or backward, the last half beside all others."""
        held = self.held
        whole = self.shape.x == 1 and held.inner_cut == 1
        if self.policy.compile or (whole and held.compute >= 4):
            return held.logits_cut
        wide = held.logits_cut // held.compute * held.wide
        cast = held.logits_cut if held.compute < held.wide else 0
        before = (self.halves - 1) * held.logits_cut
        return (before + self._wide_copies * wide + cast) // self.halves

    @property
    def _wide_copies(self) -> int:
        """Of the gradient of logits: padding makes another one."""
        share = self.held.share
        return 2 if share.vocab_columns > share.vocab_rows else 1

    def _in_chunks(self) -> list[Memory]:
        """Head and loss chunk by chunk, which find da and dw in forward; backward scales them."""
        held = self.held
        kept = self._all_kept + held.at_rest + held.statistics
        tokens = min(self.policy.loss_chunk, ceil(held.m / self.halves))
        whole = tokens * held.columns * held.compute
        cut = whole // held.inner_cut
        wide = cut // held.compute * held.wide
        cast = cut if held.compute < held.wide else 0
        before = whole if tokens * self.halves < held.m else 0  # the gradient of the chunk before
        joined = 2 * cut + 3 * whole if held.inner_cut > 1 else 0
        copies = before + max(cut + self._wide_copies * wide + cast, joined)
        gathered = held.entered if held.sharded and self.shape.x > 1 else 0
        ahead = self._in_flight_ahead([], self.layers)
        weights = self.layers * self.kept_weights + ahead + self.halves * self.table_made
        da = held.entered_whole
        return [
            self._memory("loss", gradients=0, weights=weights + self.table, activations=kept + da, logits=copies,
                         workspace=gathered + held.at_rest // self.halves),
            self._memory("head", gradients=0, weights=weights + self.table_made, activations=kept + da, workspace=da),
        ]  # fmt: skip

    def _depths(self) -> set[int]:
        """How many layers are done at the moments that may hold most."""
        last = self.layers - 1
        return {0, min(ceil(self.behind / self.made_nbytes), last), last}

    def _at_layer(self, done: int, lives: Sequence[Moment]) -> Memory:
        """The largest moment of a layer's backward, with so many layers behind it."""
        held, below = self.held, self.layers - 1 - done
        reads = [] if held.keeps_weights else self.gathered
        ahead = [self._in_flight_ahead(reads[used:], below) for used in range(5)] if self.prefetcher else [0] * 5
        sent = [self._gradients(done, sum(self.units[:number])) for number in range(5)]
        behind = [self._in_flight_behind(number, done) for number in range(5)] if self.behind else [0] * 5
        sent.append(sent[0])  # -1: not even the last one of the layer above
        behind.append(self._in_flight_behind(-1, done))
        most, found = -1, (0, 0, 0)
        for moment in lives:
            weights = ahead[moment.used] + behind[moment.sent]
            if moment.using != NONE and reads:
                weights += reads[moment.using]
            if moment.making != NONE:
                weights += self.made[moment.making]
            total = moment.nbytes + weights + sent[moment.sent]
            if total > most:
                most, found = total, (sent[moment.sent], weights, moment.nbytes)
        gradients, weights, workspace = found
        return self._memory(
            "backward",
            gradients=gradients,
            weights=weights + (below + 1) * self.kept_weights,
            activations=held.before_layers() + (below + 1) * self.kept_layer + min(workspace, 0),
            workspace=max(workspace, 0),
        )

    def _at_embedding(self) -> Memory:
        held = self.held
        gathered = held.entered if held.sharded and self.shape.x > 1 else 0
        cast = held.m * held.k * held.reduce if held.compute != held.reduce else 0
        summed = self.table_made if self.halves > 1 else 0
        behind = self._in_flight_behind(0, self.layers)
        gradients = self._gradients(self.layers)
        return self._memory(
            "embedding",
            gradients=gradients,
            weights=behind + summed + held.table * held.reduce,
            activations=held.before_layers(),
            workspace=held.at_rest + (gathered + cast) // self.halves,
        )

    def _at_optimizer(self) -> Memory:
        """Backward's end, when whole gradients and this replica's rows of them are there, or the step."""
        gradients = self.all_gradients + self._scattered(self.all_gradients)
        return self._memory("optimizer", gradients=gradients, weights=0)
