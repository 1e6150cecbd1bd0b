"""The errors that somebody acts on, each with a type of its own, and the spelling that an error suggests.

This file imports no torch, because command-line options are parsed without it.

What happens after a failure never depends on the words of a message: it depends on the type of the exception, or, where
a failure crosses from one process to another, on the `Failure` that travels beside the message.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches
from enum import StrEnum
from typing import Any


class Failure(StrEnum):
    """The kind of a failure. It is written beside the message into failure files and into the job's store."""

    USER = "user"
    """The user must change something: another start would fail in the same way."""
    DAMAGED_CHECKPOINT = "damaged checkpoint"
    """The checkpoint that was asked for is damaged, or all of them are: a run that may choose falls back by itself."""
    LOST_PEER = "lost peer"
    """The connection to another rank, or to the job's store, broke: an effect of another failure, not a cause."""
    OUT_OF_MEMORY = "out of memory"
    """The memory of the machine does not suffice for its ranks: another start would need as much."""
    ERROR = "error"
    """Any other exception, which is a bug or a fault of the machine."""
    DIAGNOSIS = "diagnosis"
    """The ranks found out together why they stand still."""
    DEATH = "death"
    """The same, and the reason is that a rank's process has died."""

    @property
    def may_pass(self) -> bool:
        """Whether another start may succeed without anybody changing anything."""
        return self not in (Failure.USER, Failure.DAMAGED_CHECKPOINT, Failure.OUT_OF_MEMORY)

    @property
    def is_diagnosis(self) -> bool:
        """Whether the message is what all ranks found out together."""
        return self in (Failure.DIAGNOSIS, Failure.DEATH)


class End(StrEnum):
    """How a run ended. A run that a signal stopped has `stopped by` and its name instead, one that failed its error."""

    FINISHED = "finished"
    OUT_OF_TIME = "train.minutes are over"
    """As finished, before the last step: with an evaluation and a checkpoint."""
    INTERRUPTED = "interrupted"
    """Ctrl-C twice: without a last checkpoint."""


class CollectiveError(RuntimeError):
    """A collective failed; the message names it."""


class LostPeerError(CollectiveError):
    """A collective failed because the connection to another rank broke."""


class LostStoreError(RuntimeError):
    """The job's store does not answer: the process or node that serves it is gone, so nobody can be asked why."""


class LateRanksError(TimeoutError):
    """Some ranks did not come in time; the message names them."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class UnlikeRanksError(RuntimeError):
    """This rank does something that other ranks do not do, and they wait for it in a collective; the message says what
    each of them does."""


class FailedElsewhereError(RuntimeError):
    """Another rank could not do its part; the message says which rank and why, `failure` of which kind it was."""

    def __init__(self, message: str, failure: Failure = Failure.ERROR) -> None:
        super().__init__(message)
        self.failure = failure


class DamagedCheckpointError(ValueError):
    """A checkpoint cannot be used: its files are not the ones that were written, or hold numbers that are not finite.

    Reading it again would find the same, so a run passes over such a checkpoint and resumes from an earlier one.
    """


class MissingCheckpointError(DamagedCheckpointError, FileNotFoundError):
    """A file of a checkpoint, or all of it, is missing."""


class UnreadableCheckpointError(OSError):
    """The system does not let us read a file of a checkpoint, which may be intact: another try may succeed."""


class ChangedDataError(ValueError):
    """The content of a source of data is not the one that a run was trained on before; a user may accept that."""


class UnsupportedModelError(ValueError):
    """A config.json describes a model that no `ModelConfig` can express. `reason` says why, without the way out."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class NoPlanError(ValueError):
    """The planner has no plan for a number of devices. `short` says why in a few words, for a table."""

    def __init__(self, message: str, short: str) -> None:
        super().__init__(message)
        self.short = short


class NotSavedError(OSError):
    """A checkpoint was not written; the message says which checkpoint is there instead."""


class LostReaderError(BrokenPipeError):
    """The program that reads our standard output ended before it had read all data, as `head` does."""


class ReplicasDifferError(RuntimeError):
    """Parameters that must be equal on several ranks are not; the message names the ranks."""


class CallbackError(RuntimeError):
    """A callback of the user raised an error; the message names the callback."""


class BadStepsError(RuntimeError):
    """The run cannot continue with such losses or gradients."""


class NotFiniteError(BadStepsError):
    """A parameter or the optimizer's state is not finite, so it was not saved; the message names the tensor."""


class RollBackError(BadStepsError):
    """The run is to resume from its newest checkpoint, with the data that follows `data`, a loader's state."""

    def __init__(self, why: str, step: int, data: dict[str, Any]) -> None:
        super().__init__(why)
        self.step, self.data = step, data


USERS = (ValueError, OSError, ImportError, FailedElsewhereError, BadStepsError, CallbackError, ReplicasDifferError)
"""Errors that tell the user what to change; every other exception shows its traceback."""


NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
"""Parts of the sentences in which torch says that the machine has no memory left; it has no type for it."""


def failure_of(error: BaseException) -> Failure:
    """Return the kind of failure that an exception stands for."""
    if isinstance(error, FailedElsewhereError):
        return error.failure
    if is_damaged(error):
        return Failure.DAMAGED_CHECKPOINT
    if is_out_of_memory(error):
        return Failure.OUT_OF_MEMORY
    if isinstance(error, (LostPeerError, LostStoreError)):
        return Failure.LOST_PEER
    return Failure.USER if isinstance(error, USERS) else Failure.ERROR


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the machine had no memory for an allocation; the memory of a device has torch's own type.

    This is the only place that reads the sentences of torch's allocator.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in NO_MEMORY)
    return isinstance(error, MemoryError)


def is_damaged(error: BaseException) -> bool:
    """Return whether the files of a checkpoint are at fault, on this rank or on another."""
    if isinstance(error, FailedElsewhereError):
        return error.failure is Failure.DAMAGED_CHECKPOINT
    return isinstance(error, DamagedCheckpointError)


LONGEST_SHOWN = 200
"""Characters of a text from elsewhere, such as a key or a value, that an error shows. A name that people write is
shorter, and a file may hold one of any size."""


def shortened(text: str) -> str:
    """Return a text from elsewhere as an error shows it: whole, or its beginning and its length."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({len(text):,} characters)"


LONGEST_LINE = 4000
"""Characters of a line of a message that are shown. Longer ones repeat a text from a file, which may have any size."""


def readable(message: str) -> str:
    """Return a message whose lines all have a length that people read: of longer ones the beginning and the end.

    The end stays because the way out stands there.
    """
    part = LONGEST_LINE // 2
    return "\n".join(
        line
        if len(line) <= LONGEST_LINE
        else f"{line[:part]} ... ({len(line) - 2 * part:,} characters) ... {line[-part:]}"
        for line in message.split("\n")
    )


MOST_NAMES_SHOWN = 3
"""How many missing or unknown names an error shows."""


def name_some(names: Iterable[str], others: Iterable[str] = ()) -> str:
    """Return the first few names, each with the nearest spelling among the others, and how many more there are."""
    listed, known = list(names), list(others)
    first = ", ".join(f"{name!r}{nearest(name, known)}" for name in listed[:MOST_NAMES_SHOWN])
    left = len(listed) - MOST_NAMES_SHOWN
    return f"{first} and {left} more" if left > 0 else first


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'train'?)`, or an empty text if no known word is near, or the word is no name at all."""
    if len(word) > LONGEST_SHOWN:  # the comparison takes a time that grows with the square of the length
        return ""
    bare = {name.lstrip("-"): name for name in known}  # options are compared without their dashes
    word = word.lstrip("-")
    found = get_close_matches(word, bare, n=1) or get_close_matches(word.lower(), bare, n=1)
    if not found:  # one part of a longer name, such as `rate` of `learning_rate`; 0.8 lets one letter of five differ
        parts = {part: name for name in bare for part in name.split("_") if len(part) > 2}
        found = [parts[part] for part in get_close_matches(word.lower(), parts, n=1, cutoff=0.8)]
    return f" (did you mean {bare[found[0]]!r}?)" if found else ""
