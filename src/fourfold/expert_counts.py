"""What a run records about its experts, in two files of its folder: the tokens of each, and of two together.

`experts.bin` begins with `HEAD`: eight bytes that name the format, then the numbers of blocks and of experts, 4 bytes
each. A record of a step follows another: the step and the number of bytes, 4 bytes each, then the counts of all blocks
and experts, 4 bytes each, block by block, compressed by zlib. All numbers are whole, little-endian and not negative. A
block without experts has zeros. A record that was cut off when a run died is not read, and the next part of the run
writes over it.

`companions.bin` has the same form and other first bytes. A record has E x E numbers for each block: how many tokens
chose both expert e and expert f, in the steps since the record before, with the numbers of all f behind each other. The
run's config says how often a record is made (`log.companions_every`).
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

COUNTS = "experts.bin"
"""The file in a run's folder."""
MAGIC = b"FFEXPRT1"
"""The first bytes of the file; the last one is the version of the format."""
COMPANIONS, COMPANIONS_MAGIC = "companions.bin", b"FFCOMPN1"
HEAD = struct.Struct("<8sII")
RECORD = struct.Struct("<II")
COUNT = "I" if array("I").itemsize == 4 else "L"
"""The type code of a count in Python's arrays: 4 bytes without a sign."""
LARGEST = 2**32 - 1
"""The largest count that a record can have."""


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The tokens of a step that each expert of each block has had, over all places."""

    step: int
    by_block: Sequence[Sequence[int]]

    @property
    def mixtures(self) -> dict[int, Sequence[int]]:
        """The counts of the blocks that have experts, by the number of the block."""
        return {block: counts for block, counts in enumerate(self.by_block) if any(counts)}

    @property
    def loads(self) -> dict[int, float]:
        """The tokens of the busiest expert divided by the mean, by block: 1 if all experts have as many."""
        return {block: max(counts) * len(counts) / sum(counts) for block, counts in self.mixtures.items()}

    @property
    def unused(self) -> int:
        """The number of experts that no token has chosen."""
        return sum(count == 0 for counts in self.mixtures.values() for count in counts)


@dataclass(frozen=True, slots=True)
class StepCompanions:
    """The tokens that chose both of two experts, over all places, in steps up to one."""

    step: int
    by_block: Sequence[int]
    """E x E numbers for each block."""


class StepsFile:
    """A file of a run that trains: records are appended, each whole or not at all.

    A run that resumes after a step drops the records of later steps, which it is about to make again.
    """

    def __init__(self, path: Path, magic: bytes, blocks: int, experts: int, *, after: int = 0) -> None:
        kept = _end_of(path, magic, (blocks, experts), after)
        self._file = path.open("r+b" if kept else "wb", buffering=0)
        self._end = kept
        if not kept:
            self._append(HEAD.pack(magic, blocks, experts))
        self._file.truncate(self._end)

    def append(self, step: int, flat: Iterable[int]) -> None:
        """Append the numbers of a step. A full disk raises OSError and leaves the file as it was."""
        numbers = array(COUNT, flat)
        if sys.byteorder == "big":
            numbers.byteswap()
        packed = zlib.compress(numbers.tobytes(), 1)
        self._append(RECORD.pack(step, len(packed)) + packed)

    def _append(self, content: bytes) -> None:
        self._file.seek(self._end)
        written = self._file.write(content)
        if written != len(content):  # the disk has become full on the way
            self._file.truncate(self._end)
            raise OSError(28, os.strerror(28))
        self._end += written

    def close(self) -> None:
        self._file.close()


class CountsFile:
    """The records of a run about its experts, as it trains: counts of every step, and companions now and then."""

    def __init__(self, folder: Path, blocks: int, experts: int, *, after: int = 0) -> None:
        self._counts = StepsFile(folder / COUNTS, MAGIC, blocks, experts, after=after)
        self._companions = StepsFile(folder / COMPANIONS, COMPANIONS_MAGIC, blocks, experts, after=after)

    def write(self, counts: StepCounts, companions: Iterable[int] | None = None) -> None:
        """Append the counts of a step, and the companions since the last record of them, block by block.

        None is above `LARGEST`.
        """
        self._counts.append(counts.step, (count for block in counts.by_block for count in block))
        if companions is not None:
            self._companions.append(counts.step, companions)

    def close(self) -> None:
        self._counts.close()
        self._companions.close()


def read_counts(folder: Path, most: int | None = None, *, last: int | None = None) -> Iterator[StepCounts]:
    """Yield the counts of all recorded steps of a run, in order; none if it has no mixture of experts.

    With `last` only so many of the last steps are read, and of more than `most` so many, evenly chosen, the last one
    included.
    """
    for step, flat, blocks, experts in _read(folder / COUNTS, MAGIC, most=most, last=last):
        yield StepCounts(step, [flat[block * experts : (block + 1) * experts] for block in range(blocks)])


def read_companions(folder: Path, last: int) -> Iterator[StepCompanions]:
    """Yield the last recorded companions of a run, at most so many records, in order."""
    for step, flat, _, _ in _read(folder / COMPANIONS, COMPANIONS_MAGIC, last=last):
        yield StepCompanions(step, flat)


def _read(
    path: Path, magic: bytes, *, most: int | None = None, last: int | None = None
) -> Iterator[tuple[int, array[int], int, int]]:
    """Yield the step and the numbers of records, with the numbers of blocks and experts; none if there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        blocks, experts = _read_head(path, magic, file.read(HEAD.size))
        records = list(_records(file, path.stat().st_size))
        records = records if last is None else records[-last:]
        every = max(1, -(-len(records) // most)) if most else 1
        for record in records[(len(records) - 1) % every :: every]:
            file.seek(record.begin)
            flat = array(COUNT)
            try:
                flat.frombytes(zlib.decompress(file.read(record.end - record.begin)))
            except (zlib.error, ValueError) as error:
                raise ValueError(
                    f"{path}: the record of step {record.step} is damaged ({error}); copy it again, or move it away"
                ) from error
            if sys.byteorder == "big":
                flat.byteswap()
            yield record.step, flat, blocks, experts


class _CountsAt(NamedTuple):
    """The place of a step's compressed numbers in the file."""

    step: int
    begin: int
    end: int


def _records(file: BinaryIO, size: int) -> Iterator[_CountsAt]:
    """Yield the whole records of a file whose head was read."""
    while len(head := file.read(RECORD.size)) == RECORD.size:
        step, nbytes = RECORD.unpack(head)
        begin = file.tell()
        if begin + nbytes > size:
            return
        yield _CountsAt(step, begin, begin + nbytes)
        file.seek(begin + nbytes)


def _read_head(path: Path, magic: bytes, head: bytes) -> tuple[int, int]:
    if len(head) < HEAD.size or not head.startswith(magic):
        raise ValueError(
            f"{path} has no records of experts: it begins with {head[:8]!r}, and not with {magic!r}; move it away"
        )
    _, blocks, experts = HEAD.unpack(head)
    return blocks, experts


def _end_of(path: Path, magic: bytes, shape: tuple[int, int], after: int) -> int:
    """Return where the records up to a step end; 0 if there is no file of a model with so many blocks and experts."""
    if not after or not path.exists():
        return 0
    with path.open("rb") as file:
        head = file.read(HEAD.size)
        if len(head) < HEAD.size or _read_head(path, magic, head) != shape:
            return 0
        end = HEAD.size
        for record in _records(file, path.stat().st_size):
            if record.step > after:
                break
            end = record.end
        return end
