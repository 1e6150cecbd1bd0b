"""The program of attention over the members of a context group: context/move.py as a rehearsal.

Sizes are those of one piece of the heads, of which all pieces are alike (`LocalSizes`).
"""

from __future__ import annotations

from functools import partial

from fourfold.axes import CONTEXT
from fourfold.engine import Turns
from fourfold.ledger import Collective
from fourfold.planner.program import NOTHING_SENT, AttentionOp, ElementwiseOp, PlannedWait, Rehearsal
from fourfold.planner.sizes import ContextForm, LocalSizes


class ContextProgram:
    """Attention of one half over its context group, in one layer; it keeps `kept` bytes and its output."""

    def __init__(self, host: Rehearsal, half: LocalSizes, form: ContextForm, label: str, kept: int) -> None:
        self.host, self.half, self.form, self.label, self.kept = host, half, form, label, kept
        self._returning: dict[int, PlannedWait] = {}
        """The gradients of each piece on their way home."""

    def attend(self, *, stops: bool) -> Turns[None]:
        """Swap tokens for heads if neighbours do so, attend to the keys that travel, and swap back.

        With `stops` nothing follows attention itself: backward reads nothing of it, so the runtime does not repeat it.
        """
        half = self.half
        if self.form.swaps:
            self.host.compute(ElementwiseOp(f"pack {self.label}", 2 * half.swapped_nbytes))
            yield from self._swap(half.swapped_nbytes, half.swapped_sent_nbytes)
        if self.form.hops:
            self._go_around()
        else:
            yield from self._read_pieces()
        if self.host.engine.recomputing:
            self.host.enter_part("again")
        if self.form.swaps and not stops:
            yield from self._swap(half.query_cut_nbytes, half.swapped_back_nbytes)

    def _swap(self, nbytes: int, sent: int) -> Turns[None]:
        def swap() -> list[Collective]:
            return self.half.all_to_all(nbytes, sent, self.label)

        swapping = self.host.move(CONTEXT, swap, swap, arrives=nbytes, leaves=nbytes)
        yield
        swapping.land()

    # --- gather and exchange

    def _read_pieces(self) -> Turns[None]:
        """Attend to one piece of the heads while the next ones travel."""
        host, half, arriving = self.host, self.half, []
        for piece in range(self.form.pieces):
            host.allocate(half.arrived_nbytes)
            arriving.append(host.launch(self._there))
            host.on_backward(partial(self._land_back, piece), reads=False)
        yield
        for moving in arriving:
            moving.wait()
            host.compute(ElementwiseOp(f"order keys {self.label}", 2 * half.keys_nbytes))
            host.need(half.keys_nbytes)
            self._read()
            host.free(half.arrived_nbytes)
        self._keep()
        host.on_backward(self._unread_pieces)

    def _unread_pieces(self) -> None:
        host, half = self.host, self.half
        host.allocate(half.query_cut_nbytes + half.local_kv_nbytes)
        moving = self._again()
        host.engine.wgrad_queue.run_one()
        for piece in reversed(range(self.form.pieces)):
            moving.wait()
            moving = self._again() if piece else NOTHING_SENT
            self._unread()
            host.need(3 * half.keys_nbytes + half.arrived_nbytes)  # keys, their gradients, and these in two orders
            host.free(half.reread_nbytes("arrived_nbytes"))
            self._returning[piece] = host.launch(self._back)
        self._forget()

    def _there(self) -> list[Collective]:
        """Return the message of one piece of K and V."""
        half, form = self.half, self.form
        if form.to_all:
            return half.message("all_gather", CONTEXT, half.piece_nbytes, self.label)
        return half.all_to_all(half.piece_nbytes, half.piece_sent_nbytes, self.label) if form.moves else []

    def _back(self) -> list[Collective]:
        """Return the message of the gradients of one piece."""
        half, form = self.half, self.form
        if form.to_all:
            return half.message("reduce_scatter", CONTEXT, half.piece_nbytes, self.label)
        return half.all_to_all(half.piece_nbytes, half.piece_returned_nbytes, self.label) if form.moves else []

    def _again(self) -> PlannedWait:
        """Launch a piece of K and V again, for backward."""
        host = self.host
        if host.policy.keep_gathered:
            return NOTHING_SENT
        host.enter_part("reread")
        host.allocate(self.half.reread_nbytes("arrived_nbytes"))
        moving = host.launch(self._there)
        host.enter_part("backward")
        return moving

    def _land_back(self, piece: int) -> None:
        self._returning[piece].wait()

    # --- ring

    def _go_around(self) -> None:
        """Attend to K and V that go around: half of the heads in each direction, if there are two."""
        self._travel(unread=False)
        self._keep()
        self.host.on_backward(self._go_around_back)

    def _go_around_back(self) -> None:
        self.host.allocate(self.half.query_cut_nbytes + self.half.local_kv_nbytes)
        self._travel(unread=True)
        self._forget()

    def _travel(self, *, unread: bool) -> None:
        both = 4 * self.half.own_nbytes  # what is read and what arrives, in both directions
        self.host.allocate(both)
        returning = []
        for moving in [self._shift() for _ in range(self.form.pieces)]:
            self.host.need(self.half.own_nbytes if unread else 0)  # gradients that arrive while others are made
            returning.append(self._around(moving, unread))
        if unread:
            self.host.engine.wgrad_queue.run_one()
        for last in returning:
            last.wait()
        self.host.free(both)

    def _around(self, moving: PlannedWait, unread: bool) -> PlannedWait:
        """Read what one direction brings. In backward gradients go around behind it; return their last hop, home."""
        returning, hops = NOTHING_SENT, self.form.hops
        for hop in range(hops + 1):
            self._unread() if unread else self._read()
            returning.wait()
            if hop < hops:
                moving.wait()
                moving = self._shift() if hop < hops - 1 else NOTHING_SENT
            returning = self._shift() if unread else NOTHING_SENT
        return returning

    def _shift(self) -> PlannedWait:
        own = self.half.own_nbytes
        return self.host.launch(lambda: self.half.all_to_all(own, own, self.label))

    # --- attention itself

    def _read(self) -> None:
        self.host.compute(AttentionOp(f"attention {self.label}", self.half.piece_flops, self._read_nbytes))

    def _unread(self) -> None:
        self.host.compute(AttentionOp(f"dattention {self.label}", 2 * self.half.piece_flops, 2 * self._read_nbytes))

    @property
    def _read_nbytes(self) -> int:
        return 2 * self.half.piece_query_nbytes + self.half.keys_nbytes

    def _keep(self) -> None:
        self.host.allocate(self.kept + self.half.query_cut_nbytes, "activations")

    def _forget(self) -> None:
        self.host.free(self.half.query_cut_nbytes)
        self.host.free(self.kept + self.half.query_cut_nbytes, "activations")
