"""The published schedules, each built for any number of ranks, chunks and micro-batches.

All of them keep the order of micro-batches on every stage, so that they give the same bits. Fewer micro-batches than
ranks are valid everywhere.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise

from fourfold.errors import nearest
from fourfold.schedule.action import Action, Kind, Schedule
from fourfold.schedule.stages import place, stages_of

Order = Sequence[Action]
"""The actions of one rank."""


def named(name: str, pipe: int, chunks: int, micro_steps: int) -> Schedule:
    """Build a schedule by its name, such as `1f1b` or `blocks:8`."""
    if pipe < 1 or chunks < 1 or micro_steps < 1:
        raise ValueError(
            f"pipe={pipe}, chunks={chunks}, micro-batches={micro_steps}: a schedule needs at least 1 of each"
        )
    kind, _, size = name.partition(":")
    if kind == "blocks":
        if not re.fullmatch(r"[1-9]\d*", size, re.ASCII):
            raise ValueError(f"{name!r}: give the micro-batches of a block as a number, such as blocks:8")
        return blocks(pipe, chunks, micro_steps, int(size))
    if name not in BUILDERS:
        raise ValueError(f"there is no schedule {name!r}{nearest(name, NAMES)}; choose from {', '.join(NAMES)}")
    build, allowed = BUILDERS[name]
    if chunks not in allowed:
        only = f"chunks={allowed.start}" if len(allowed) == 1 else "chunks=2 or more"
        others = ", ".join(each for each, (_, fits) in BUILDERS.items() if chunks in fits)
        raise ValueError(f"{name} with chunks={chunks}: it needs {only}; with chunks={chunks} use {others} or blocks:u")
    return build(pipe, chunks, micro_steps)


def gpipe(pipe: int, chunks: int, micro_steps: int) -> Schedule:
    """Build GPipe: all F, then all backward passes; it keeps every micro-batch."""
    orders = [
        [*(Action("F", rank, i) for i in range(micro_steps)), *(Action("BW", rank, i) for i in range(micro_steps))]
        for rank in range(pipe)
    ]
    return _schedule(place("loop", pipe, chunks), micro_steps, orders)


def one_f_one_b(pipe: int, chunks: int, micro_steps: int) -> Schedule:
    """Build 1F1B: a backward pass as soon as there is one, so that rank r keeps at most pipe - r micro-batches."""
    orders = [list(_alternate(rank, pipe - rank, micro_steps)) for rank in range(pipe)]
    return _schedule(place("loop", pipe, chunks), micro_steps, orders)


def _alternate(rank: int, warm_up: int, micro_steps: int) -> Iterator[Action]:
    """Yield 1F1B's order of a rank that keeps at most `warm_up` micro-batches."""
    for i in range(micro_steps + warm_up):
        if i >= warm_up:
            yield Action("BW", rank, i - warm_up)
        if i < micro_steps:
            yield Action("F", rank, i)


def interleaved(pipe: int, chunks: int, micro_steps: int) -> Schedule:
    """Build interleaved 1F1B in Megatron's order: groups of `pipe` micro-batches go through chunk after chunk.

    Where `pipe` does not divide the micro-batches, as in torch, there are micro_steps // pipe groups, here of sizes
    that differ by at most 1; with fewer micro-batches than ranks there is one group.
    """
    groups = max(1, micro_steps // pipe)
    firsts = [micro_steps * group // groups for group in range(groups + 1)]
    taken = [(chunk, i) for a, b in pairwise(firsts) for chunk in range(chunks) for i in range(a, b)]
    returned = [(chunk, i) for a, b in pairwise(firsts) for chunk in reversed(range(chunks)) for i in range(a, b)]
    largest = max(b - a for a, b in pairwise(firsts))
    orders = []
    for rank in range(pipe):
        forward = [Action("F", chunk * pipe + rank, i) for chunk, i in taken]
        backward = [Action("BW", chunk * pipe + rank, i) for chunk, i in returned]
        warm_up = min((chunks - 1) * largest + 2 * (pipe - 1 - rank), len(forward))
        order = forward[:warm_up]
        for place_of, action in enumerate(backward):
            order += [*forward[warm_up + place_of : warm_up + place_of + 1], action]
        orders.append(order)
    return _schedule(place("loop", pipe, chunks), micro_steps, orders)


def looped_bfs(pipe: int, chunks: int, micro_steps: int) -> Schedule:
    """Build the looped breadth-first schedule: all micro-batches of a chunk, then the next chunk; then back.

    Each chunk's backward passes run in the order of micro-batches; torch's LoopedBFS reverses them.
    """
    orders = []
    for rank in range(pipe):
        held = [chunk * pipe + rank for chunk in range(chunks)]
        forward = [Action("F", stage, i) for stage in held for i in range(micro_steps)]
        orders.append([*forward, *(Action("BW", stage, i) for stage in reversed(held) for i in range(micro_steps))])
    return _schedule(place("loop", pipe, chunks), micro_steps, orders)


def zb_h1(pipe: int, chunks: int, micro_steps: int) -> Schedule:
    """Build ZB-H1: 1F1B's order of F and B, with W of rank r delayed by r micro-batches into what were bubbles.

    Every rank keeps at most `pipe` micro-batches, as rank 0 of 1F1B does.
    """
    orders = []
    for rank in range(pipe):
        order: list[Action] = []
        for kind, stage, i in _alternate(rank, pipe - rank, micro_steps):
            order.append(Action("B" if kind == "BW" else "F", stage, i))
            if kind == "BW" and i >= rank:
                order.append(Action("W", stage, i - rank))
        order += [Action("W", rank, i) for i in range(max(0, micro_steps - rank), micro_steps)]
        orders.append(order)
    return _schedule(place("loop", pipe, chunks), micro_steps, orders)


def v_half(pipe: int, chunks: int, micro_steps: int) -> Schedule:
    """Build V-Half, which keeps about half of 1F1B's micro-batches, on a wave of two chunks.

    Its building block repeats every 6 slots: F of the first chunk moves on every second slot and F of the second every
    slot, B of the second chunk every second slot and B of the first every slot (Qi et al., 2024). The gap before B
    keeps the four apart on every rank. W fills the slots that are left.
    """
    gap = 0 if pipe % 2 else 3
    orders = []
    for rank in range(pipe):
        down, up = rank, 2 * pipe - 1 - rank
        starts: dict[tuple[Kind, int], int] = {
            ("F", down): 2 * rank,
            ("F", up): 3 * pipe - 2 - rank,
            ("B", up): 3 * pipe - 1 + gap + 2 * rank,
            ("B", down): 6 * pipe - 2 + gap - rank,
        }
        timed = [
            (start + 6 * i, Action(kind, stage, i))
            for (kind, stage), start in starts.items()
            for i in range(micro_steps)
        ]
        orders.append([action for _, action in sorted(timed)])
    return fill(place("wave", pipe, chunks), micro_steps, orders, pipe + 2)


def zb_v(pipe: int, chunks: int, micro_steps: int) -> Schedule:
    """Build ZB-V, which keeps as many micro-batches as 1F1B, on a wave of two chunks.

    A rank runs F of its first chunk until the first micro-batch comes back, then all four in turn: F and B of the first
    chunk, F and B of the second. Where F, B and W take equally long, ranks idle only while the first micro-batch goes
    down the wave, if there are enough of them (Qi et al., 2023). W fills the slots that are left.
    """
    orders = []
    for rank in range(pipe):
        down, up = rank, 2 * pipe - 1 - rank
        forward_down, backward_down, forward_up, backward_up = (
            deque(Action(kind, stage, i) for i in range(micro_steps)) for stage in (down, up) for kind in ("F", "B")
        )
        turns = [
            *[forward_down] * (2 * (pipe - rank) - 1),
            *[forward_up, forward_down] * rank,
            *[forward_up, backward_up] * (pipe - rank),
            *[forward_down, backward_down, forward_up, backward_up] * micro_steps,
        ]
        orders.append([line.popleft() for line in turns if line])
    return fill(place("wave", pipe, chunks), micro_steps, orders, 2 * pipe)


def blocks(pipe: int, chunks: int, micro_steps: int, size: int) -> Schedule:
    """Build ZeroPP's units: blocks of `size` micro-batches, each breadth-first, with W in the bubbles.

    A stage runs the F of a whole block, and later its B, without another stage in between, so weights that are sharded
    need to be gathered only twice per block. A rank keeps one block, and micro-batches whose W wait for the bubble in
    which the next block turns from F to B: 2 * (pipe - 1) slots.
    """
    orders = []
    placement = place("loop", pipe, chunks)
    for rank in range(pipe):
        held = stages_of(placement, rank)
        order: list[Action] = []
        for first in range(0, micro_steps, size):
            micros = range(first, min(first + size, micro_steps))
            order += [Action("F", stage, i) for stage in held for i in micros]
            order += [Action("B", stage, i) for stage in reversed(held) for i in micros]
        orders.append(order)
    return fill(placement, micro_steps, orders, size * chunks + 2 * (pipe - 1))


def fill(placement: Sequence[int], micro_steps: int, orders: Sequence[Order], most: int) -> Schedule:
    """Add the W to orders of F and B: where a rank would wait, and before an F that would keep more than `most`.

    Time runs in slots, one per action. `most` counts micro-batches of single stages. If no W is owed, the F runs.
    """
    stages, pipe = len(placement), len(orders)
    ended: set[Action] = set()
    filled: list[list[Action]] = [[] for _ in orders]
    owed: list[deque[Action]] = [deque() for _ in orders]
    kept, at = [0] * pipe, [0] * pipe
    for _ in count():
        ran: list[Action] = []
        for rank, order in enumerate(orders):
            following = order[at[rank]] if at[rank] < len(order) else None
            ready = following is not None and ((needed := _input_of(following, stages)) is None or needed in ended)
            full = following is not None and following.kind == "F" and kept[rank] >= most
            if owed[rank] and (not ready or full):
                ran.append(owed[rank].popleft())
            elif ready and following is not None:
                ran.append(following)
                at[rank] += 1
            else:
                continue
            filled[rank].append(ran[-1])
            kept[rank] += (ran[-1].kind == "F") - (ran[-1].kind == "W")
        if not ran:
            break
        for action in ran:
            ended.add(action)
            if action.kind == "B":
                owed[placement[action.stage]].append(Action("W", action.stage, action.micro))
    return _schedule(tuple(placement), micro_steps, filled)


def _input_of(action: Action, stages: int) -> Action | None:
    """Return the F or B whose result an F or B needs; None for the F of the first stage."""
    kind, stage, micro = action
    if kind == "F":
        return Action("F", stage - 1, micro) if stage else None
    return Action("B", stage + 1, micro) if stage + 1 < stages else Action("F", stage, micro)


def _schedule(placement: tuple[int, ...], micro_steps: int, orders: Sequence[Order]) -> Schedule:
    return Schedule(len(placement), micro_steps, placement, tuple(map(tuple, orders)))


ONE, TWO, SEVERAL = range(1, 2), range(2, 3), range(2, 1 << 30)
"""Numbers of chunks that a schedule exists for."""
BUILDERS: dict[str, tuple[Callable[[int, int, int], Schedule], range]] = {
    "gpipe": (gpipe, ONE),
    "1f1b": (one_f_one_b, ONE),
    "interleaved": (interleaved, SEVERAL),
    "looped-bfs": (looped_bfs, SEVERAL),
    "zb-h1": (zb_h1, ONE),
    "v-half": (v_half, TWO),
    "zb-v": (zb_v, TWO),
}
"""How to build the schedules whose name has no number, and the chunks they take."""
NAMES = (*BUILDERS, "blocks:u")
"""The names of all schedules; u stands for the micro-batches of a block."""
