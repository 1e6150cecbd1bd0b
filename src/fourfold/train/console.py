"""Printing that neither ends a run nor makes it wait.

The reader of a pipe can end (`| head -1`) or stop reading (`| less`), a terminal can be closed or held by Ctrl-S, the
file behind `> out.txt` can be on a full disk. A rank that waited in `print` would make all ranks wait, and they would
blame it. So inside `unblocked_output` a print only puts its text into a queue, which a thread empties. The queue is
bounded: while nobody reads, further lines are dropped, and their number is printed when somebody reads again. The run's
log.txt has all of them. Data for programs (`--json -`) takes no part in this: `write_data` waits for its reader.

Only what Python prints goes through the queue. Libraries in C++ write to the descriptors themselves.
This file imports no torch, because a command uses it before it imports torch.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TextIO, cast

from fourfold.errors import LostReaderError

MOST_QUEUED_BYTES = 1 << 20
"""The most bytes that wait for a reader: about ten thousand lines, which is more than anybody scrolls back."""
FLUSH_SECONDS = 0.1
"""The most seconds that `flush` waits, once for each time that the reader stops: far longer than a reader that reads
takes, and too short to disturb a run."""
DRAIN_SECONDS = 2.0
"""The most seconds that a process that ends waits for its readers: enough for a slow terminal."""

logger = logging.getLogger("fourfold")
logger.addHandler(logging.NullHandler())  # a program that imports Fourfold decides itself what to show
logger.setLevel(logging.INFO)


class OutputThread(threading.Thread):
    """Writes to one open file what the streams give it. Two streams of one terminal share a thread, to keep the order.

    A write that fails loses its lines, and the next one is tried again: a full disk may have room by then.
    """

    def __init__(self) -> None:
        super().__init__(name="fourfold-output", daemon=True)  # must not keep a process alive while nobody reads
        self._queue: SimpleQueue[tuple[int, bytes] | threading.Event | None] = SimpleQueue()
        self._lock = threading.RLock()  # reentrant: a signal handler may print in the middle of a print
        self._bytes = self._dropped = 0
        """Bytes in the queue, and the lines that were dropped since the last time that their number was printed."""
        self.stalled = False
        """Whether the reader was found not to read, and nothing was written since."""

    def put(self, descriptor: int, data: bytes) -> None:
        """Queue a text, or drop it if too much waits. Once a line is dropped, all are until the queue is empty."""
        with self._lock:
            if self._bytes and (self._dropped or self._bytes + len(data) > MOST_QUEUED_BYTES):
                self._dropped += data.count(b"\n")
                return
            self._bytes += len(data)
            self._queue.put((descriptor, data))

    def run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            descriptor, data = item
            written = self._write(descriptor, data)
            with self._lock:
                self._bytes -= len(data)
                if not written:
                    self._dropped += data.count(b"\n")
                    continue
                # somebody reads again, and has read all that was queued before the first dropped line
                dropped = 0 if self._bytes else self._dropped
                self._dropped -= dropped
            if dropped:
                begin = "" if data.endswith(b"\n") else "\n"
                note = (
                    f"{dropped} line{'s' * (dropped > 1)} could not be printed; log.txt and logs/ of the run have them"
                )
                if not self._write(descriptor, f"{begin}[fourfold: {note}]\n".encode()):
                    with self._lock:
                        self._dropped += dropped

    def _write(self, descriptor: int, data: bytes) -> bool:
        """Write a text, however long that takes; return whether it was possible."""
        try:
            write_all(descriptor, data)
        except OSError:
            return False
        self.stalled = False
        return True

    def drain(self, seconds: float) -> None:
        """Wait until all that was queued has been written, but not longer than this."""
        reached = threading.Event()
        self._queue.put(reached)
        self.stalled = not reached.wait(seconds)

    def finish(self) -> None:
        """Let the thread end after what is queued."""
        self._queue.put(None)


class UnblockedStream:
    """Stands for standard output or error: complete lines go to a thread; all but writing is the real stream's."""

    def __init__(self, stream: TextIO, thread: OutputThread) -> None:
        self._stream, self._thread, self._descriptor = stream, thread, stream.fileno()
        self._begun = ""
        """The beginning of a line that is not complete."""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        if not self._thread.is_alive():  # in a forked process, or after `unblocked_output`
            return self._stream.write(text)
        with self._lock:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            self._put(lines + newline)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Pass on a line that is not complete, and wait a moment, so that what is printed next comes after it."""
        if not self._thread.is_alive():
            self._stream.flush()
            return
        with self._lock:
            begun, self._begun = self._begun, ""
            self._put(begun)
        if not self._thread.stalled:
            self._thread.drain(FLUSH_SECONDS)

    def _put(self, text: str) -> None:
        if text:
            data = text.encode(self._stream.encoding or "utf-8", "backslashreplace")
            self._thread.put(self._descriptor, data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def unblocked_output() -> Iterator[None]:
    """Inside, printing to standard output and error never waits for a reader and never fails."""
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    out, err = (stream or open(os.devnull, "w") for stream in before)  # noqa: SIM115 (as long as the process)
    drain_output()  # what was printed before comes first
    threads: list[OutputThread] = []
    if _has_descriptor(out):
        threads.append(OutputThread())
        sys.stdout = cast(TextIO, UnblockedStream(out, threads[0]))
    if _has_descriptor(err):
        if not threads or not os.path.sameopenfile(out.fileno(), err.fileno()):
            threads.append(OutputThread())
        sys.stderr = cast(TextIO, UnblockedStream(err, threads[-1]))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        drain_output()
        for thread in threads:
            thread.finish()
        sys.stdout, sys.stderr = before


def drain_output() -> None:
    """Wait for the readers of what was printed, for a bounded time. A process calls this before it ends at once."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody is left to read it, or somebody has closed the stream
            if stream is not None:
                stream.flush()
    deadline = time.monotonic() + DRAIN_SECONDS
    # the threads know what is queued; the streams may be wrapped, as by rich's progress bar
    for thread in threading.enumerate():
        if isinstance(thread, OutputThread):
            thread.drain(max(0.0, deadline - time.monotonic()))


def write_data(text: str) -> None:
    """Print data for another program, and wait for it as long as it reads; raise if it has gone."""
    try:
        if isinstance(sys.stdout, UnblockedStream):
            sys.stdout.flush()
            write_all(sys.stdout.fileno(), text.encode(sys.stdout.encoding))
        else:
            print(text, end="", flush=True)
    except BrokenPipeError as error:
        raise LostReaderError(error.errno, "the reader of standard output has gone before it had all data") from error


def write_all(descriptor: int, data: bytes) -> None:
    """Write bytes, without the buffers of Python: these would be flushed again, and fail again, when it ends."""
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:  # another program has made the terminal that we share non-blocking
            select.select([], [descriptor], [])


def write_now(text: str) -> None:
    """Write a text to standard error from a signal handler, which may have interrupted another `print`."""
    if isinstance(sys.stderr, UnblockedStream):
        print(text, end="", file=sys.stderr, flush=True)
    else:
        with suppress(OSError):
            os.write(2, text.encode())  # Python's own streams raise if a handler prints in the middle of a print


def warn(text: str) -> None:
    """Tell people about something that does not end the run: on standard error and in the log of this rank."""
    with suppress(OSError):  # raised only outside of `unblocked_output`
        print(f"fourfold: warning: {text}", file=sys.stderr, flush=True)
    logger.warning("%s", text)


def _open_closed_descriptors() -> None:
    """Open standard streams that were closed (`>&-`) on /dev/null: otherwise the next file would get their number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened == number:
                os.set_inheritable(number, True)
            else:
                os.dup2(opened, number)
                os.close(opened)


def _has_descriptor(stream: Any) -> bool:
    """Return whether a stream writes to a descriptor. Others, such as a notebook's, have no reader to wait for."""
    if isinstance(stream, UnblockedStream):
        return False  # a command inside of a command
    try:
        return stream.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False
