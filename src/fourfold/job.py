"""The job: its key-value store, and the channel through which its ranks exchange small values.

The store listens at one address of the machine; torch's own would listen on all of them. A `Channel` is the one
protocol over the store. It needs no process group beyond the default one, waits with a deadline, names the ranks that
did not come, and lets signal handlers run while it waits.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import queue
import socket
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from threading import Thread, main_thread
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from fourfold.environment import (
    AGENT_HAS_STORE,
    MAX_SECONDS,
    Environment,
    agent_has_store,
    is_loopback,
    is_watched,
    master_address,
    rank_name,
    starts_before,
)
from fourfold.errors import CollectiveError, Failure, LateRanksError, LostPeerError, LostStoreError

LOOPBACK = "127.0.0.1"
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""Parts of the sentences in which gloo and NCCL say that another process is gone; they have no type for it."""
START_SECONDS = 600.0
"""Seconds that ranks have to join their job, unless the config sets watch.start. Importing torch from a slow file
system takes a busy node minutes."""
STORE_SECONDS = 5.0
"""Seconds beyond the deadline of joining after which a rank no longer waits for the store: the ranks that are late are
named by then, if the store answers at all."""
LOOK_SECONDS = 1.0
"""Seconds between two looks at whether joining has failed for all ranks."""
RESOLVE_SECONDS, RESOLVE_PAUSE = 5.0, 0.5
"""Seconds for which a name that is not known is looked up again, and between two attempts: the name of a pod appears
moments after the pod."""
JOINING = "join"
"""The name of the channel on which ranks join."""
MAX_NAMED_RANKS = 12
"""A sentence names up to this many ranks one by one."""

# --- the store


def serve(host: str, port: int = 0, timeout: timedelta | None = None) -> dist.TCPStore:
    """Return a new store that is reached by this name of the machine alone; port 0 takes any free port."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.create_server(address[:2], family=family, backlog=socket.SOMAXCONN) as listening:
        store = dist.TCPStore(
            host,
            listening.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timeout or dist.default_pg_timeout,
            master_listen_fd=listening.fileno(),
        )
        listening.detach()  # the store owns the socket now
    return store


def join(environment: Environment, seconds: float = START_SECONDS, timeout: timedelta | None = None) -> dist.Store:
    """Join the job: return its store once all ranks have come to it.

    All of it takes at most about `seconds`; then an error names the ranks that did not come, or the address at which no
    store answers. `timeout` is how long the store lets later calls wait.
    """
    if environment.world == 1 and not is_watched():
        return dist.HashStore()
    host, port = master_address()

    def find_and_meet() -> dist.Store:
        until = time.monotonic() + seconds
        store = find_store(environment, seconds)
        meet_ranks(Channel(JOINING, range(environment.world), store, rank=environment.rank), until)
        store.set_timeout(timeout or dist.default_pg_timeout)
        return store if environment.world > 1 else dist.HashStore()

    # In a thread, because a store whose process is stopped leaves its clients waiting without any deadline.
    done: queue.SimpleQueue[dist.Store | Exception] = queue.SimpleQueue()
    Thread(target=lambda: done.put(_result(find_and_meet)), daemon=True).start()
    try:
        found = done.get(timeout=min(seconds + STORE_SECONDS, MAX_SECONDS))
    except queue.Empty:
        raise TimeoutError(
            f"joining the job: the store at {host}:{port} accepts connections and has not answered for {seconds:g} s; "
            f"{_server()} is stopped, or its node is overloaded"
        ) from None
    if isinstance(found, Exception):
        raise found
    return found


@contextmanager
def reporting(text: str) -> Iterator[bool]:
    """Report an error with this text inside; yield whether this rank should report all of it.

    Of several ranks with the same error only the first should. The others wait until it has: whoever started the ranks
    ends all of them when one ends.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield True
        return
    key = f"{zlib.crc32(text.encode()):08x}"
    try:
        channel = Channel("errors", seconds=STORE_SECONDS)
        first = channel.announce(key, text)
        until = time.monotonic() + STORE_SECONDS
        while not first and channel.announced(f"{key}/done") is None:
            time.sleep(Channel.MAX_PAUSE)
            first = time.monotonic() > until  # the first one did not come to an end
    except Exception:  # the store is gone, as may happen when a job fails
        yield True
        return
    yield first
    with suppress(Exception):
        channel.announce(f"{key}/done", text)


@cache  # a program may join several jobs, one after another; a hook inside of a hook would wait for itself
def share_tracebacks() -> None:
    """Let one rank print the traceback of an error that several ranks of the job raise; the others print its text."""
    before = sys.excepthook

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception_only(kind, error)).strip()
        with reporting(text) as whole:
            if whole:
                before(kind, error, trace)
                sys.stderr.flush()
            else:
                print(f"{rank_name()}{text} (another rank has printed the traceback)", file=sys.stderr)

    sys.excepthook = report


def _result(act: Callable[[], dist.Store]) -> dist.Store | Exception:
    try:
        return act()
    except Exception as error:
        return error


def _server() -> str:
    return "the agent that serves it" if agent_has_store() else "rank 0, which serves it,"


def find_store(environment: Environment, seconds: float) -> dist.Store:
    """Return the job's store, at the address that the environment names; rank 0 serves it unless an agent does.

    Raise TimeoutError unless the store answers in time, and ValueError if there can be none at that address.
    """
    host, port = master_address()
    timeout = timedelta(seconds=min(seconds, MAX_SECONDS))
    require_resolvable(host)
    if environment.rank == 0 and not agent_has_store():
        require_reachable(host, environment.world // (environment.local_world or environment.world))
        try:
            return serve(host, port, timeout)
        except OSError as error:
            raise ValueError(_cannot_serve(host, port, error)) from error
    try:
        _await_server(host, port, seconds)
        store = dist.TCPStore(host, port, timeout=timeout)
        return dist.PrefixStore(f"start {starts_before()}", store) if _finds_old_keys(environment) else store
    except (OSError, RuntimeError) as error:
        raise TimeoutError(
            f"joining the job: no store answers at {host}:{port} (MASTER_ADDR, MASTER_PORT) within {seconds:g} s; see "
            f"whether {_server()} was started, and whether this node reaches that address"
        ) from error


def _finds_old_keys(environment: Environment) -> bool:
    """Return whether the store has keys of ranks that are gone: torchrun's own rendezvous keeps one for all starts.

    On one node all ranks know how often they were started. On several, agents count by themselves, and
    `--rdzv-backend fourfold` makes a new store for each start.
    """
    return agent_has_store() and starts_before() > 0 and environment.local_world == environment.world


def _await_server(host: str, port: int, seconds: float) -> None:
    """Wait until somebody listens there; torch would wait too, but print a trace of its own when it gives up."""
    until = time.monotonic() + seconds
    while True:
        left = until - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=max(0.1, min(left, MAX_SECONDS))).close()
            return
        except OSError:
            if left <= LOOK_SECONDS / 4:
                raise
        time.sleep(LOOK_SECONDS / 4)


def find_early_store(environment: Environment, seconds: float) -> dist.Store:
    """Return the job's store for a command that looks at the ranks before they join, as `find_store` does."""
    if environment.world == 1:
        return dist.HashStore()
    store = find_store(environment, seconds)
    os.environ[AGENT_HAS_STORE] = "True"  # so that ranks that join later connect to this store; none serves a second
    return store


def _cannot_serve(host: str, port: int, error: OSError) -> str:
    where = f"rank 0 cannot serve the job's store at {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{where}: MASTER_PORT={port} is in use, by another program or by a second process with RANK=0; choose "
            "another port, the same for all ranks"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{where}: MASTER_ADDR={host} is no address of this machine; set it to the node of rank 0"
    return f"{where} (MASTER_ADDR, MASTER_PORT): {error.strerror}; choose another address or port"


def meet_ranks(channel: Channel, until: float) -> None:
    """Wait until all ranks of the channel are here; raise with those that are not at that moment of the clock.

    If two processes have the same rank, the second one is refused, and every rank that waits learns it.
    """
    seconds = until - time.monotonic()
    me = f"process {os.getpid()} on {socket.gethostname()}"
    # A store may outlive the ranks that torchrun restarts, and they are other processes than those before.
    first = channel.claim(f"process/{starts_before()}", me)
    if first != me:
        said = f"two processes have RANK={channel.rank}: {first} and {me}; give each rank a number of its own"
        channel.announce("refused", said)
        raise ValueError(said)
    channel.put("here", me)
    while True:
        left = until - time.monotonic()
        try:
            channel.collect("here", seconds=max(0.0, min(LOOK_SECONDS, left)))
            return
        except LateRanksError as late:
            if said := channel.announced("refused"):
                raise ValueError(said) from None
            if left <= 0:
                raise LateRanksError(
                    f"joining the job: {ranks_text(late.ranks)} of {len(channel.ranks)} did not come within "
                    f"{seconds:.0f} s; see whether they were started, and what they print",
                    late.ranks,
                ) from None


def arrived(store: dist.Store, world: int) -> set[int]:
    """Return the ranks that have joined the job whose store this is, without waiting for any."""
    return set(Channel(JOINING, range(world), store, rank=0).collect("here", seconds=0.0, partial=True))


def require_resolvable(host: str) -> None:
    """Raise within seconds if no name server knows the host."""
    until = time.monotonic() + RESOLVE_SECONDS
    while True:
        try:
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return
        except (socket.gaierror, UnicodeError) as error:
            if time.monotonic() > until:
                raise ValueError(
                    f"MASTER_ADDR={host} is not a known address ({error}); set it to the host of rank 0, by a name or "
                    "number that every node can resolve"
                ) from error
        time.sleep(RESOLVE_PAUSE)


def require_reachable(host: str, nodes: int) -> None:
    """Refuse a name that means the loopback on its own machine where other nodes must find it."""
    if nodes > 1 and is_loopback(host):
        found = {str(address[0]) for *_, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
        raise ValueError(
            f"MASTER_ADDR={host} is {', '.join(sorted(found))} on its own node, where no other node reaches it; set "
            "MASTER_ADDR to that node's address on the network that the ranks shall use"
        )


@contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """Turn the backend's errors into types: `LostPeerError` where another process is gone, else `CollectiveError`.

    This is the only place that reads the sentences of gloo and NCCL.
    """
    try:
        yield
    except RuntimeError as error:
        typed = typed_error(what, error)
        if typed is None:
            raise
        raise typed from error


def typed_error(what: str, error: RuntimeError) -> CollectiveError | None:
    """Return the error that `typed_errors` raises for one of the backend's, or None for one that keeps its type."""
    if isinstance(error, (torch.OutOfMemoryError, CollectiveError)):
        return None  # callers may free memory and try again
    lost = isinstance(error, dist.DistNetworkError) or any(words in str(error) for words in LOST_PEER)
    return (LostPeerError if lost else CollectiveError)(f"collective failed: {what}: {error}")


# --- the channel


class Channel:
    """Exchange of small texts between a set of ranks, through the job's store.

    Each rank that uses a channel names the same `name` and `ranks`, and makes the same calls in the same order.

        put, get        one rank's text under a key, read by any other
        gather          everybody's text, on the first rank of the set
        decide, meet    everybody's text, judged once, and the verdict on all ranks; a barrier
        announce        a text that whoever comes first may set
        append          a list that everybody may add to

    Every wait has a deadline: `seconds` of the call, else those of the channel, else the store's timeout. A wait polls
    the store instead of blocking in it, because no signal handler could run meanwhile: Ctrl-C would not be heard.

    One thread uses a channel at a time. A channel with `own_connection` may be used by another thread than the main
    one, which may use the job's store at the same time.
    """

    MIN_PAUSE, MAX_PAUSE = 1e-4, 0.02
    """Seconds between two questions to the store; the pause doubles from one to the other."""
    AFTER_MAIN_SECONDS = 30.0
    """A thread waits no longer than this once the main thread has ended, or it would keep the process alive."""

    def __init__(
        self,
        name: str,
        ranks: Collection[int] | None = None,
        store: dist.Store | None = None,
        *,
        rank: int | None = None,
        seconds: float | None = None,
        fresh: bool = False,
        own_connection: bool = False,
    ) -> None:
        """By default the ranks are all ranks of the job, and store and rank those of the default process group.

        With `fresh` the channel shares no key with earlier ones of the same name: the n-th fresh channel of one rank
        meets the n-th of the others.
        """
        self.rank = dist.get_rank() if rank is None else rank
        self.ranks = tuple(sorted(range(dist.get_world_size()) if ranks is None else ranks))
        if self.rank not in self.ranks:
            raise ValueError(f"channel {name!r} is of {ranks_text(self.ranks)}, and this is rank {self.rank}")
        if store is None and (len(self.ranks) == 1 or dist.get_backend() == "fake"):
            # a fake process group has one process, which stands for all ranks
            self.ranks, store = (self.rank,), dist.HashStore()
        # torch's stubs know neither `clone` nor `timeout` of a store
        found: Any = dist.distributed_c10d._get_default_store() if store is None else store
        self._store: Any = found.clone() if own_connection else found
        self.seconds = found.timeout.total_seconds() if seconds is None else seconds
        self.name = name
        # channels of the same name over different sets of ranks must not see each other's keys
        self._prefix = f"fourfold/{name}/{zlib.crc32(repr(self.ranks).encode()):08x}"
        # a channel that is not fresh continues the decisions of earlier ones, so the store counts them
        self._decisions: Iterator[int] = iter(lambda: self._count("decisions"), None)
        if fresh:
            self._prefix += f"/{self._count('made')}"
            self._decisions = itertools.count(1)

    def open(
        self, name: str, *, seconds: float | None = None, fresh: bool = False, own_connection: bool = False
    ) -> Channel:
        """Return a channel of another name between the same ranks; the options are those of the constructor."""
        return Channel(
            name,
            self.ranks,
            self._store,
            rank=self.rank,
            seconds=seconds,
            fresh=fresh,
            own_connection=own_connection,
        )

    def set_seconds(self, seconds: float) -> None:
        """Let waits of this channel, and of channels that are opened later on its store, take at most that long."""
        self.seconds = seconds
        self._store.set_timeout(timedelta(seconds=min(seconds, MAX_SECONDS)))

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of the set."""
        return self.rank == self.ranks[0]

    # values by rank

    def put(self, key: str, text: str) -> None:
        """Show a text of this rank under a key."""
        self._ask(self._store.set, self._key(key, self.rank), text)

    def drop(self, key: str, ranks: Collection[int] | None = None) -> None:
        """Remove this rank's text, or those of other ranks, where nobody will read them any more."""
        for rank in (self.rank,) if ranks is None else ranks:
            self._ask(self._store.delete_key, self._key(key, rank))

    def get(self, key: str, rank: int | None = None, seconds: float | None = None) -> str:
        """Wait for the text that a rank, by default the first one, puts under a key."""
        rank = self.ranks[0] if rank is None else rank
        return self.collect(key, (rank,), seconds)[rank]

    def collect(
        self, key: str, ranks: Collection[int] | None = None, seconds: float | None = None, *, partial: bool = False
    ) -> dict[int, str]:
        """Wait for the texts that these ranks, by default all, put under a key; return them by rank.

        With `partial` return those that came in time; otherwise raise `LateRanksError`, which names the others.
        """
        keys = {rank: self._key(key, rank) for rank in (self.ranks if ranks is None else ranks)}
        try:
            self.wait_for_keys(list(keys.values()), seconds, key, keys)
        except LateRanksError as late:
            if not partial:
                raise
            keys = {rank: there for rank, there in keys.items() if rank not in late.ranks}
        found = self._ask(self._store.multi_get, list(keys.values())) if keys else []
        return {rank: text.decode() for rank, text in zip(keys, found, strict=True)}

    def gather(self, key: str, text: str, seconds: float | None = None, *, partial: bool = False) -> dict[int, str]:
        """Return everybody's text by rank on the first rank, which removes them from the store; {} elsewhere.

        Nobody waits but the first rank.
        """
        self.put(key, text)
        if not self.leads:
            return {}
        found = self.collect(key, seconds=seconds, partial=partial)
        self.drop(key, found)
        return found

    # decisions

    def decide(self, text: str, judge: Callable[[Sequence[str]], str], seconds: float | None = None) -> str:
        """Let the last rank to come judge the texts of all, in the order of the ranks; every rank gets the verdict."""
        if len(self.ranks) == 1:
            return judge([text])
        number = next(self._decisions)
        now, before = f"decision/{number}", f"decision/{number - 1}"
        self.put(now, text)
        if number > 1:
            self.drop(before)  # the others have read it, or do not wait for it any more
        verdict = self._key(now, "verdict")
        if self.come(now) == len(self.ranks):
            texts = self.collect(now, seconds=seconds)
            for what in ("came", "verdict"):
                # all ranks have read that verdict, because they have come to this decision
                self._ask(self._store.delete_key, self._key(before, what))
            self._ask(self._store.set, verdict, judge([texts[rank] for rank in self.ranks]))
        self.wait_for_keys([verdict], seconds, self.name, {rank: self._key(now, rank) for rank in self.ranks})
        return self._ask(self._store.get, verdict).decode()

    def meet(self, seconds: float | None = None) -> None:
        """Wait until all ranks have come here."""
        self.decide("", lambda _: "", seconds)

    # values of nobody in particular

    def announce(self, key: str, text: str) -> bool:
        """Set a text that all ranks can read, unless a rank has set it before; return whether this rank was first."""
        if self._ask(self._store.add, self._key(key, "announcements"), 1) > 1:
            return False
        self._ask(self._store.set, self._key(key, "text"), text)
        return True

    def claim(self, key: str, text: str) -> str:
        """Set a text of this rank's unless there is one already, of another process with the same rank; return it."""
        return self._ask(self._store.compare_set, self._key(key, self.rank), "", text).decode()

    def announced(self, key: str, seconds: float | None = None) -> str | None:
        """Return the text that a rank has announced; wait this long for it, by default not at all."""
        text = self._key(key, "text")
        if seconds is not None:
            with suppress(LateRanksError):
                self.wait_for_keys([text], seconds, key, {})
        return self._ask(self._store.get, text).decode() if self._ask(self._store.check, [text]) else None

    def come(self, key: str) -> int:
        """Count this rank under a key; return the number of ranks that have come there."""
        return self._ask(self._store.add, self._key(key, "came"), 1)

    def append(self, key: str, word: str) -> None:
        """Add a word to a list that all ranks can read."""
        self._ask(self._store.append, self._key(key, "list"), f"{word} ")

    def words(self, key: str) -> list[str]:
        """Return all words of a list, to which this rank has added one before."""
        return self._ask(self._store.get, self._key(key, "list")).decode().split()

    # the store

    def _key(self, key: str, of: object) -> str:
        return f"{self._prefix}/{key}/{of}"

    def _count(self, what: str) -> int:
        """Count how often this rank did something; the store keeps the number, so that no process state is needed."""
        return self._ask(self._store.add, self._key(what, self.rank), 1)

    def wait_for_keys(self, keys: Sequence[str], seconds: float | None, what: str, by_rank: dict[int, str]) -> None:
        """Wait until the store has all keys; raise with the ranks that have not put theirs after the deadline."""
        seconds = self.seconds if seconds is None else seconds
        until, pause = time.monotonic() + seconds, self.MIN_PAUSE
        while not self._ask(self._store.check, list(keys)):
            if not main_thread().is_alive():
                until = min(until, time.monotonic() + self.AFTER_MAIN_SECONDS)
            if time.monotonic() > until:
                late = tuple(rank for rank, key in by_rank.items() if not self._ask(self._store.check, [key]))
                if self._ask(self._store.check, list(keys)):
                    return  # the last text came meanwhile
                who = ranks_text(late) if late else "the last rank to come, which was to judge,"
                raise LateRanksError(f"{what}: {who} did not answer within {seconds:.3g} s; look at their logs", late)
            time.sleep(pause)
            pause = min(2 * pause, self.MAX_PAUSE)

    def _ask(self, act: Callable[..., Any], *args: Any) -> Any:
        """Call the store; raise `LostStoreError` where it does not answer any more."""
        try:
            return act(*args)
        except dist.DistNetworkError as error:
            raise LostStoreError(f"the job's store does not answer: its process or node is gone ({error})") from error


# --- what ranks agree on


def agree(channel: Channel, what: str, text: str, fault: Exception | None = None) -> None:
    """Raise the same error on every rank unless all of them hold the same text; then raise this rank's fault."""
    if verdict := channel.decide(text, partial(difference, what, channel.ranks)):
        raise ValueError(verdict)
    if fault is not None:
        raise fault


def agree_on_facts(channel: Channel, facts: Mapping[str, str]) -> None:
    """Raise the same error on every rank unless all of them hold the same facts; it names ranks, key and values."""

    def judge(texts: Sequence[str]) -> str:
        told = [json.loads(text) for text in texts]
        keys = dict.fromkeys(key for found in told for key in found)
        differing = [key for key in keys if any(found.get(key) != told[0].get(key) for found in told)]
        if not differing:
            return ""
        said = difference(differing[0], channel.ranks, [str(found.get(differing[0])) for found in told])
        return said + (f"; they also differ in {', '.join(differing[1:6])}" if differing[1:] else "")

    if verdict := channel.decide(json.dumps(facts), judge):
        raise ValueError(verdict)


def first_fault(channel: Channel, what: str, fault: str, failure: Failure, same: str = "") -> tuple[str, Failure, str]:
    """Return the first rank's fault in words, its kind, and how the ranks' `same` texts differ."""
    judge = partial(_faults, what, channel.ranks)
    found, failure, differs = json.loads(channel.decide(json.dumps([fault, failure, same]), judge))
    return found, Failure(failure), differs


def _faults(what: str, ranks: Sequence[int], texts: Sequence[str]) -> str:
    told = dict(zip(ranks, map(json.loads, texts), strict=True))
    faults = ((f"rank {rank}: {fault}", failure) for rank, (fault, failure, _) in told.items() if fault)
    differs = difference(what, ranks, [same for *_, same in told.values()])
    return json.dumps([*next(faults, ("", Failure.ERROR)), differs])


def difference(what: str, ranks: Sequence[int], texts: Sequence[str]) -> str:
    """Return how the texts of these ranks differ; empty if they do not."""
    others = [(rank, text) for rank, text in zip(ranks, texts, strict=True) if text != texts[0]]
    if not others:
        return ""
    first, (rank, text) = ranks[0], others[0]
    named = ", ".join(str(rank) for rank, _ in others[:8]) + (" ..." if len(others) > 8 else "")
    return (
        f"ranks disagree on {what}: rank {first} has {texts[0]!r}, rank {rank} has {text!r} "
        f"(ranks unlike rank {first}: {named}); give every rank the same"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Name ranks in a sentence: `rank 3`, `ranks 0, 1, 4`, `ranks 0, 1, ... (64 of them)`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    named = ", ".join(str(rank) for rank in ranks[:MAX_NAMED_RANKS])
    return f"ranks {named}" + (f", ... ({len(ranks)} of them)" if len(ranks) > MAX_NAMED_RANKS else "")
