"""What a rank launched last and what it waits for, on disk, so that it can be read when the rank is gone.

A tape is a file of fixed size that is mapped into memory: a header of `HEAD` bytes, then a ring of `ENTRIES` launches
of `Entry.FORMAT`. Writing is a copy into memory, a few microseconds; the kernel brings it to the disk, also after
the process was killed.

    head    what the rank is, as JSON | launches so far | what it waits for | what it does | launches by axis
    ring    launch n is entry n % ENTRIES

Along an axis all ranks of a group launch the same collectives in the same order, so the n-th launch of one rank
meets the n-th of the others: `number` counts them by axis.

Invariant: an entry is complete before the count says so, hence a reader never sees half of one.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import get_args

from fourfold.atomic import replacing
from fourfold.grid import Shape
from fourfold.ledger import Collective, Op

ENTRIES = 2048
MAGIC = b"fourfold tape 1\n"
WHO = 1024
"""Bytes of the header for what the rank is."""
AXIS = 16
"""Bytes of an axis' name."""
COUNT, WAITING, DOING, ALONG = (struct.Struct(f"<{form}") for form in ("Q", f"dQ{AXIS}s", "dBI115s", f"Q{AXIS}s"))
COUNT_AT = len(MAGIC) + WHO
WAITING_AT = COUNT_AT + COUNT.size
DOING_AT = WAITING_AT + WAITING.size
ALONG_AT = DOING_AT + DOING.size
MOST_AXES = 16
HEAD = 2048
OPS: tuple[Op, ...] = get_args(Op)


class Waits(IntEnum):
    """What the host of a rank waits for while it is not inside a collective; stands on the tape as one byte."""

    NOTHING = 0
    RANKS = 1
    """Other ranks, through the job's store."""
    DEVICE = 2
    """Its own device, and so every collective that it has launched there."""


@dataclass(frozen=True, slots=True)
class Who:
    """Which rank of which job a tape is of."""

    rank: int
    sizes: dict[str, int]
    order: list[str]
    host: str
    process: int
    began: float
    """When, by the wall clock."""

    @property
    def shape(self) -> Shape:
        return Shape(**self.sizes, order=tuple(self.order))


@dataclass(frozen=True, slots=True)
class Entry:
    """A launch."""

    time: float
    """Of the wall clock, which ranks of several nodes share more or less."""
    step: int
    number: int
    """Of the launches along its axis, from 1 on."""
    record: Collective

    FORMAT = struct.Struct("<dQQIIB15s88s")


class Tape:
    """Written by one rank. Launches and waits of a step come from one thread at a time."""

    def __init__(self, path: Path, rank: int, shape: Shape) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        who = Who(rank, shape.sizes, list(shape.order), socket.gethostname(), os.getpid(), time.time())
        head = MAGIC + json.dumps(asdict(who)).encode().ljust(WHO)
        size = HEAD + ENTRIES * Entry.FORMAT.size
        with replacing(path) as partial, partial.open("wb+") as file:  # whoever finds a tape finds a whole one
            file.write(head.ljust(size, b"\0"))  # all of it: a disk that is full later must not end this process
            file.flush()
            self._file = mmap.mmap(file.fileno(), size)
        self._map: mmap.mmap | bytearray = self._file
        self.step = 0
        self.since: float | None = None
        """When the wait began that this rank is in, by the monotonic clock."""
        self._count = 0
        self._numbers: dict[str, int] = {}
        self._flying: dict[int, int] = {}

    def launched(self, record: Collective) -> None:
        self._numbers[record.axis] = number = self._numbers.get(record.axis, 0) + 1
        self._flying[id(record)] = number
        axis = record.axis.encode()
        Entry.FORMAT.pack_into(
            self._map,
            HEAD + self._count % ENTRIES * Entry.FORMAT.size,
            time.time(),
            number,
            record.nbytes,
            self.step,
            record.ranks,
            OPS.index(record.op),
            axis,
            record.label.encode()[-88:],
        )
        self._count += 1
        COUNT.pack_into(self._map, COUNT_AT, self._count)
        place = list(self._numbers).index(record.axis)
        ALONG.pack_into(self._map, ALONG_AT + place * ALONG.size, number, axis)

    def waits(self, record: Collective) -> None:
        self.since = time.monotonic()
        number = self._flying.pop(id(record), 0)
        WAITING.pack_into(self._map, WAITING_AT, time.time(), number, record.axis.encode())

    def landed(self) -> None:
        self.since = None
        WAITING.pack_into(self._map, WAITING_AT, 0.0, 0, b"")

    def doing(self, what: str, waits: Waits = Waits.NOTHING) -> None:
        """Write what this rank does from now on, in about a hundred characters, and what it waits for meanwhile."""
        self.since = time.monotonic() if waits else None
        DOING.pack_into(self._map, DOING_AT, time.time(), waits, self.step, what.encode()[:115])

    def freeze(self) -> None:
        """What is on it stays, also for other nodes: what this rank does from now on is not written any more."""
        if self._map is self._file:
            self._file.flush()
            self._map = bytearray(len(self._file))

    def close(self) -> None:
        self._map = bytearray(len(self._file))
        self._file.close()


@dataclass(frozen=True, slots=True)
class Waiting:
    """For the collective of that number along an axis."""

    since: float
    axis: str
    number: int


@dataclass(frozen=True, slots=True)
class Doing:
    since: float
    waits: Waits
    step: int
    what: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What a tape says."""

    who: Who
    entries: tuple[Entry, ...]
    """The last launches, the newest last."""
    launched: dict[str, int]
    """Launches by axis since the start."""
    waiting: Waiting | None
    doing: Doing | None

    @property
    def waits_for(self) -> list[Entry]:
        """The launches that it waits for, as far as they are on the tape: one, or with its device all of them, the
        last along each axis."""
        numbers = self.launched if self.doing is not None and self.doing.waits is Waits.DEVICE else {}
        if self.waiting is not None:
            numbers = {self.waiting.axis: self.waiting.number}
        return [one for one in self.entries if numbers.get(one.record.axis) == one.number]

    @property
    def waits(self) -> bool:
        """For anything that others must do."""
        return self.waiting is not None or (self.doing is not None and self.doing.waits is not Waits.NOTHING)

    @property
    def last_seen(self) -> float:
        """When it wrote something for the last time; 0: never."""
        newest = self.entries[-1].time if self.entries else 0.0
        return max(newest, self.waiting.since if self.waiting else 0.0, self.doing.since if self.doing else 0.0)


def read(path: Path) -> Reading:
    """What is on a tape, also while it is written."""
    found = path.read_bytes()
    if not found.startswith(MAGIC) or len(found) != HEAD + ENTRIES * Entry.FORMAT.size:
        raise ValueError(f"{path} is no tape of a rank: it must begin with {MAGIC.decode().strip()!r} and be whole")
    who = Who(**json.loads(found[len(MAGIC) : COUNT_AT]))
    (count,) = COUNT.unpack_from(found, COUNT_AT)
    numbers = range(max(0, count - ENTRIES + 1), count)  # the oldest may be under the pen
    entries = tuple(_entry(found, HEAD + number % ENTRIES * Entry.FORMAT.size) for number in numbers)
    since, number, axis = WAITING.unpack_from(found, WAITING_AT)
    waiting = Waiting(since, _text(axis), number) if since else None
    since, waits, step, what = DOING.unpack_from(found, DOING_AT)
    doing = Doing(since, Waits(waits), step, _text(what)) if since else None
    along = (ALONG.unpack_from(found, ALONG_AT + place * ALONG.size) for place in range(MOST_AXES))
    return Reading(who, entries, {_text(axis): launches for launches, axis in along if launches}, waiting, doing)


def _entry(found: bytes, at: int) -> Entry:
    moment, number, nbytes, step, ranks, op, axis, label = Entry.FORMAT.unpack_from(found, at)
    return Entry(moment, step, number, Collective(OPS[op], _text(axis), nbytes, ranks, _text(label)))


def _text(found: bytes) -> str:
    return found.rstrip(b"\0").decode(errors="replace")


DIAGNOSIS = Path("watch/diagnosis.txt")
"""In a run's folder: what its ranks have found out together."""


def tape_path(folder: Path, rank: int) -> Path:
    """Of that rank in a run's folder."""
    return folder / "watch" / f"rank-{rank:05}.tape"


def read_all(folder: Path) -> dict[int, Reading]:
    """All tapes of a run by rank; those that a start with more ranks, or on another grid, has left are not of it."""
    tapes = [read(path) for path in sorted((folder / "watch").glob("rank-*.tape"))]
    newest = max(tapes, key=lambda tape: tape.who.began, default=None)
    return {tape.who.rank: tape for tape in tapes if newest is not None and tape.who.shape == newest.who.shape}
