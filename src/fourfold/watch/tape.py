"""A tape: the last launches of a rank and what it waits for, on disk, so that they can be read when the rank is gone.

A tape is a file of fixed size that is mapped into memory: a header of `HEAD` bytes, then a ring of `ENTRIES` launches
of `TapeEntry.FORMAT`. Writing is a copy into memory and takes a few microseconds; the kernel writes it to the disk,
even after the process was killed.

    head    which rank this is, as JSON | launches so far | what it waits for | what it does | launches by line
    ring    launch n is entry n % ENTRIES

Along an axis all ranks of a group launch the same collectives in the same order, so the n-th launch of one rank meets
the n-th of the others. A message between two pipe ranks has one end on each: the n-th send of a lane to a rank meets
the n-th receive there from this one. `number` counts the launches of a *line*: an axis, or one end of a lane to a peer.

Invariant: an entry is complete before the count includes it, so a reader never sees half an entry.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import get_args

from fourfold.atomic import replacing
from fourfold.environment import start_name
from fourfold.grid import Shape
from fourfold.ledger import Collective, Op, RecordedStep
from fourfold.parse import parse_json
from fourfold.schedule.action import Lane

ENTRIES = 2048
"""The number of launches that a tape keeps: several steps of most models, in about 300 KB."""
MAGIC = b"fourfold tape 1\n"
"""The first bytes of a tape: the kind of the file, and the version of its format."""
WHO = 1024
"""Bytes of the header for the JSON that says which rank this is."""
AXIS = 16
"""Bytes of the name of an axis, or of a line of messages such as `pipe:F+>3`."""
LANE_CODES = {Lane.F_HIGHER: "F+", Lane.F_LOWER: "F-", Lane.B_HIGHER: "B+", Lane.B_LOWER: "B-"}
"""The lanes in the name of a line, where `>` and the pipe coordinate of the receiver, or `<` and that of the sender,
follow."""
LABEL = 88
"""Bytes of the label of a collective. A longer label loses its beginning: its end says more about the layer."""
REPLAYS = 4
"""Replays of a recorded step whose numbers a tape remembers: the host is one or two steps ahead of its device."""
WHAT = 115
"""Bytes of the text that says what a rank does."""
COUNT, WAITING, DOING, ALONG = (struct.Struct(f"<{form}") for form in ("Q", f"dQ{AXIS}s", f"dBI{WHAT}s", f"Q{AXIS}s"))
COUNT_AT = len(MAGIC) + WHO
WAITING_AT = COUNT_AT + COUNT.size
DOING_AT = WAITING_AT + WAITING.size
ALONG_AT = DOING_AT + DOING.size
MAX_LINES = 32
"""The number of lines whose launches the header has room to count: the axes, and about four for each neighbour along
pipe. Of further lines, which only a strange placement of stages has, nothing is told."""
HEAD = 2048
"""Bytes of the header, padded so that the format can grow without moving the ring."""
OPS: tuple[Op, ...] = get_args(Op)
"""The operations; a tape has the place of an operation in this tuple."""


class Waits(IntEnum):
    """The kind of wait of a rank's host while it is not inside a collective; one byte of the tape."""

    NOTHING = 0
    RANKS = 1
    """Other ranks, through the job's store."""
    DEVICE = 2
    """Its own device, and therefore every collective that it has launched there."""


@dataclass(frozen=True, slots=True)
class Who:
    """The rank that wrote a tape, and the shape of its job."""

    rank: int
    sizes: dict[str, int]
    order: list[str]
    host: str
    process: int
    start: str = ""
    """The start of the job in which the tape was made; no two starts have the same name."""

    @property
    def shape(self) -> Shape:
        return Shape(**self.sizes, order=tuple(self.order))


@dataclass(frozen=True, slots=True)
class TapeEntry:
    """A collective that a rank has launched."""

    time: float
    """When it was launched, by the wall clock, which the nodes of a job share more or less."""
    step: int
    number: int
    """Its number among the launches of its line, counted from 1."""
    record: Collective

    @property
    def line(self) -> str:
        return line_of(self.record)

    FORMAT = struct.Struct(f"<dQQIIB{AXIS - 1}s{LABEL}s")


def line_of(record: Collective) -> str:
    """Return the line in which a launch is counted: its axis, or for one end of a message `pipe:F+>3`."""
    if not record.lane:
        return record.axis
    return f"{record.axis}:{LANE_CODES[Lane(record.lane)]}{'>' if record.op == 'send' else '<'}{record.peer}"


def other_end(line: str, peer: int) -> str:
    """Return the line of the same messages at their other end, where the rank of this line has that coordinate."""
    lane, send, _ = line.partition(">")
    return f"{lane}<{peer}" if send else f"{line.partition('<')[0]}>{peer}"


class Tape:
    """The tape that this rank writes. Launches and waits of a step come from one thread at a time."""

    def __init__(self, path: Path, rank: int, shape: Shape) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        who = Who(rank, shape.named, list(shape.order), socket.gethostname(), os.getpid(), start_name())
        head = MAGIC + json.dumps(asdict(who)).encode().ljust(WHO)
        size = HEAD + ENTRIES * TapeEntry.FORMAT.size
        with replacing(path) as partial, partial.open("wb+") as file:  # a reader finds a complete tape, or none
            # Take all the space now: a later write to a full disk through the mapping would kill the process.
            file.write(head.ljust(size, b"\0"))
            file.flush()
            self._file = mmap.mmap(file.fileno(), size)
        self._map: mmap.mmap | bytearray = self._file  # a buffer in memory once the tape is frozen
        self.step = 0
        self.since: float | None = None
        """When this rank began to wait, by the monotonic clock; None while it does not wait."""
        self._count = 0
        self._numbers: dict[str, int] = {}
        # Collectives in flight, by identity: equal records of one axis may be in flight at the same time.
        self._flying: dict[int, int] = {}
        self._recorded: RecordedStep | None = None
        self._replays: deque[dict[str, int]] = deque(maxlen=REPLAYS)
        """The launches by line before each of the last replays."""
        self._replayed = 0

    def launched(self, record: Collective) -> None:
        """Write a launch; the ledger calls it."""
        name = line_of(record)
        self._numbers[name] = number = self._numbers.get(name, 0) + 1
        self._flying[id(record)] = number
        while len(self._flying) > ENTRIES:  # sends that nobody had to wait for
            del self._flying[next(iter(self._flying))]
        line, at = name.encode(), HEAD + self._count % ENTRIES * TapeEntry.FORMAT.size
        numbers = (time.time(), number, record.nbytes, self.step, record.ranks, OPS.index(record.op))
        TapeEntry.FORMAT.pack_into(self._map, at, *numbers, line, record.label.encode()[-LABEL:])
        self._count += 1
        COUNT.pack_into(self._map, COUNT_AT, self._count)  # after the entry, so that a reader finds it complete
        place = list(self._numbers).index(name)
        if place < MAX_LINES:
            ALONG.pack_into(self._map, ALONG_AT + place * ALONG.size, number, line)

    def waits(self, record: Collective) -> None:
        """Write that this rank waits for a collective; the ledger calls it."""
        self.since = time.monotonic()
        number = self._flying.pop(id(record), 0)
        WAITING.pack_into(self._map, WAITING_AT, time.time(), number, line_of(record).encode())

    def landed(self) -> None:
        """Write that the wait is over; the ledger calls it."""
        self.since = None
        WAITING.pack_into(self._map, WAITING_AT, 0.0, 0, b"")

    def replayed(self, step: RecordedStep) -> None:
        """Write the launches of a recorded step, all of which the device has got at once; the ledger calls it."""
        if step is not self._recorded:
            self._recorded, self._replayed = step, 0
        self._replays.append(dict(self._numbers))
        self._replayed += 1
        for record in step.launches:
            self.launched(record)
        self._flying.clear()  # nobody waits for them one by one

    def look(self) -> None:
        """Write which collective of a recorded step the device waits for, if the host waits for the device.

        Any thread may call this: it reads the progress that the graph itself has written, without a call of CUDA.
        """
        since = self.since
        if self._recorded is None or since is None:
            return
        begun, passed = self._recorded.progress
        behind = self._replayed - begun  # replays that the device has not begun yet
        if not 0 <= behind < len(self._replays) or passed >= len(self._recorded.waits):
            return
        record = self._recorded.waits[passed]
        numbers = Counter(self._replays[-1 - behind])
        for launch in self._recorded.launches:
            numbers[line_of(launch)] += 1
            if launch is record:
                break
        moment = time.time() - (time.monotonic() - since)
        WAITING.pack_into(self._map, WAITING_AT, moment, numbers[line_of(record)], line_of(record).encode())

    def doing(self, what: str, waits: Waits = Waits.NOTHING) -> None:
        """Write what this rank does from now on, in at most `WHAT` bytes, and what it waits for meanwhile."""
        self.since = time.monotonic() if waits else None
        if self._recorded is not None:
            WAITING.pack_into(self._map, WAITING_AT, 0.0, 0, b"")  # `look` may have written a wait that is over
        DOING.pack_into(self._map, DOING_AT, time.time(), waits, self.step, what.encode()[:WHAT])

    def freeze(self) -> None:
        """Keep the tape as it is, and write it to the disk for other nodes; later writes are lost."""
        if self._map is self._file:
            self.look()
            self._file.flush()
            self._map = bytearray(len(self._file))

    def close(self) -> None:
        self._map = bytearray(len(self._file))
        self._file.close()


@dataclass(frozen=True, slots=True)
class Waiting:
    """The wait of a rank for the launch with this number of a line."""

    since: float
    line: str
    number: int


@dataclass(frozen=True, slots=True)
class Doing:
    """The present activity of a rank, in words, and what it waits for meanwhile."""

    since: float
    waits: Waits
    step: int
    what: str


@dataclass(frozen=True, slots=True)
class TapeReading:
    """The contents of a tape."""

    who: Who
    entries: tuple[TapeEntry, ...]
    """The last launches, the newest last."""
    launched: dict[str, int]
    """The number of launches by line since the start."""
    waiting: Waiting | None
    doing: Doing | None

    @property
    def waits_for(self) -> list[TapeEntry]:
        """The launches that the rank waits for, as far as they are on the tape.

        A rank waits for one collective or, if it waits for its device, for the last one of each line.
        """
        numbers = self.launched if self.doing is not None and self.doing.waits is Waits.DEVICE else {}
        if self.waiting is not None:
            numbers = {self.waiting.line: self.waiting.number}
        return [one for one in self.entries if numbers.get(one.line) == one.number]

    @property
    def waits(self) -> bool:
        """Whether the rank waits for anything that other ranks must do."""
        return self.waiting is not None or (self.doing is not None and self.doing.waits is not Waits.NOTHING)

    @property
    def last_seen(self) -> float:
        """When the rank wrote something last, by the wall clock; 0 if never."""
        times = [entry.time for entry in self.entries[-1:]]
        times += [found.since for found in (self.waiting, self.doing) if found is not None]
        return max(times, default=0.0)


def read(path: Path) -> TapeReading:
    """Read a tape, also while it is being written."""
    found = path.read_bytes()
    if not found.startswith(MAGIC) or len(found) != HEAD + ENTRIES * TapeEntry.FORMAT.size:
        raise ValueError(f"{path} is not a tape: a tape begins with {MAGIC.decode().strip()!r} and is complete")
    try:
        reading = _read(found, path)
        if not 0 <= reading.last_seen < LATEST:
            raise ValueError(f"it was written at {reading.last_seen}")
    except (IndexError, OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is a damaged tape ({error})") from error
    return reading


def _read(found: bytes, path: Path) -> TapeReading:
    try:
        head = parse_json(found[len(MAGIC) : COUNT_AT])
        head.pop("began", None)  # of earlier versions
        who = Who(**head)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a tape: its head is damaged ({error})") from error
    (count,) = COUNT.unpack_from(found, COUNT_AT)
    entries = []
    for place in range(max(0, count - ENTRIES + 1), count):  # without the oldest, which may be overwritten right now
        fields = TapeEntry.FORMAT.unpack_from(found, HEAD + place % ENTRIES * TapeEntry.FORMAT.size)
        moment, number, nbytes, step, ranks, op, line, label = fields
        axis, lane, peer = _parsed(_text(line))
        record = Collective(OPS[op], axis, nbytes, ranks, _text(label), lane, peer)
        entries.append(TapeEntry(moment, step, number, record))
    since, number, line = WAITING.unpack_from(found, WAITING_AT)
    waiting = Waiting(since, _text(line), number) if since else None
    since, waits, step, what = DOING.unpack_from(found, DOING_AT)
    doing = Doing(since, Waits(waits), step, _text(what)) if since else None
    along = (ALONG.unpack_from(found, ALONG_AT + place * ALONG.size) for place in range(MAX_LINES))
    launched = {_text(line): launches for launches, line in along if launches}
    return TapeReading(who, tuple(entries), launched, waiting, doing)


def _parsed(line: str) -> tuple[str, str, int]:
    """Return axis, lane and peer of a line; a collective has neither of the last two."""
    axis, _, end = line.partition(":")
    lane = next((lane for lane, code in LANE_CODES.items() if end.startswith(code)), "")
    return axis, lane, int(end[3:]) if lane else -1


def _text(found: bytes) -> str:
    return found.rstrip(b"\0").decode(errors="replace")


LATEST = float(1 << 36)
"""Seconds of the wall clock that no tape reaches, some two thousand years from 1970."""
DIAGNOSIS = Path("watch/diagnosis.txt")
"""The file in a run's folder with the diagnosis of the ranks of its last start."""
EARLIER_DIAGNOSIS = Path("watch/earlier-diagnosis.txt")
"""The file with the last diagnosis of an earlier start."""


def tape_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's tape in a run's folder."""
    return folder / "watch" / f"rank-{rank:05}.tape"


def read_all(folder: Path, damaged: list[str] | None = None) -> dict[int, TapeReading]:
    """Read all tapes of a run's last start, by rank. Tapes of an earlier start on another grid are left out.

    Every grid has the first rank, so its tape is of the last start; the clocks of several nodes could not tell. A tape
    that cannot be read must not hide the others: `damaged` gets what is wrong with it.
    """
    tapes = []
    for path in sorted((folder / "watch").glob("rank-*.tape")):
        try:
            tapes.append(read(path))
        except (OSError, ValueError) as error:
            if damaged is not None:
                damaged.append(str(error))
    return {tape.who.rank: tape for tape in tapes if tape.who.shape == tapes[0].who.shape}
