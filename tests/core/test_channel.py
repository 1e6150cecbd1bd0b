"""The laws of the channel: texts reach the right ranks, waits end, names stay apart, and nothing is left behind.

Ranks are threads that share one store in memory; the last tests run on processes and on a store over TCP.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from fourfold import job
from fourfold.errors import FailedElsewhereError, Failure, LateRanksError, LostStoreError
from fourfold.grid import Shape
from fourfold.job import Channel, agree
from harness import grid_of


class Heard(Exception):
    """A signal."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def hear(*_: object) -> None:
        raise Heard

    before = signal.signal(signal.SIGALRM, hear)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def on_threads(act: Callable[[Channel], Any], ranks: tuple[int, ...], store: dist.Store, **options: Any) -> dict:
    """What each rank returns or raises."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = act(Channel("test", ranks, store, rank=rank, seconds=20.0, **options))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def channel_of(rank: int, ranks: tuple[int, ...], store: dist.Store | None = None, **options: Any) -> Channel:
    return Channel("test", ranks, store or dist.HashStore(), rank=rank, **options)


ALL = (0, 1, 2, 3)


def test_every_rank_gets_the_verdict_on_all_texts_in_their_order() -> None:
    def act(one: Channel) -> list[str]:
        return [one.decide(f"{one.rank}{turn}", ",".join) for turn in range(5)]

    expected = [f"0{turn},1{turn},2{turn},3{turn}" for turn in range(5)]
    assert on_threads(act, ALL, dist.HashStore()) == dict.fromkeys(ALL, expected)


def test_the_first_rank_gathers_and_nobody_else_waits() -> None:
    found = on_threads(lambda one: one.gather("word", f"of {one.rank}"), ALL, dist.HashStore())
    assert found == {0: {rank: f"of {rank}" for rank in ALL}, 1: {}, 2: {}, 3: {}}


def test_a_text_reaches_whoever_asks_for_it_by_rank() -> None:
    def act(one: Channel) -> str:
        one.put("word", f"of {one.rank}")
        return one.get("word", (one.rank + 1) % 4) + one.get("word")

    found = on_threads(act, ALL, dist.HashStore())
    assert found == {rank: f"of {(rank + 1) % 4}of 0" for rank in ALL}


def test_nobody_passes_a_meeting_before_all_have_come() -> None:
    came: list[int] = []

    def act(one: Channel) -> int:
        time.sleep(0.02 * one.rank)
        came.append(one.rank)
        one.meet()
        return len(came)

    assert on_threads(act, ALL, dist.HashStore()) == dict.fromkeys(ALL, 4)


def test_one_rank_is_the_first_to_announce() -> None:
    def act(one: Channel) -> bool:
        assert one.announced("other") is None
        first = one.announce("word", f"of {one.rank}")
        one.meet()
        assert one.announced("word") in {f"of {rank}" for rank in ALL}
        return first

    assert sorted(on_threads(act, ALL, dist.HashStore()).values()) == [False, False, False, True]


def test_everybody_adds_to_a_list() -> None:
    def act(one: Channel) -> list[str]:
        one.append("names", f"{one.rank}:name")
        one.meet()
        return sorted(one.words("names"))

    assert on_threads(act, ALL, dist.HashStore()) == {one: [f"{rank}:name" for rank in ALL] for one in ALL}


# --- sets of ranks and names


def test_a_part_of_the_ranks_decides_without_the_others() -> None:
    """Both parts at once, under one name, and a set that overlaps both after them."""
    store, found = dist.HashStore(), {}
    parts = [(1, 3), (0, 2)]

    def act(part: tuple[int, ...]) -> None:
        found.update(on_threads(lambda one: one.decide(str(one.rank), ",".join), part, store))

    threads = [threading.Thread(target=act, args=[part]) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {1: "1,3", 3: "1,3", 0: "0,2", 2: "0,2"}
    assert on_threads(lambda one: one.gather("word", "a"), (2, 3), store) == {2: {2: "a", 3: "a"}, 3: {}}


def test_a_rank_outside_the_set_is_refused() -> None:
    with pytest.raises(ValueError, match="channel 'test' is of ranks 1, 3, and this is rank 0"):
        channel_of(0, (1, 3))


def test_ranks_of_a_part_are_named_by_their_numbers_in_the_job() -> None:
    found = on_threads(lambda one: agree(one, "the size", str(one.rank // 3)), (1, 2, 3), dist.HashStore())
    assert {str(error) for error in found.values()} == {
        "ranks disagree on the size: rank 1 has '0', rank 3 has '1' (ranks unlike rank 1: 3); give every rank the same"
    }


def test_fresh_channels_of_one_name_do_not_see_each_other() -> None:
    store = dist.HashStore()
    first, second = (channel_of(0, ALL, store, fresh=True) for _ in range(2))
    first.put("word", "old")
    assert second.collect("word", [0], 0.0, partial=True) == {}
    other = channel_of(1, ALL, store, fresh=True)
    assert other.get("word", 0, 1.0) == "old", "the first one of each rank is the same"


def test_a_channel_of_one_rank_asks_nobody() -> None:
    alone = channel_of(3, (3,))
    assert alone.decide("a", "".join) == "a"
    assert alone.gather("word", "a") == {3: "a"}
    alone.meet()


# --- deadlines and signals


@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize(
    "act",
    [
        lambda one: one.get("never", 1, 60),
        lambda one: one.gather("never", "", 60),
        lambda one: one.decide("", "".join, 60),
        lambda one: one.meet(60),
    ],
    ids=["get", "gather", "decide", "meet"],
)
def test_a_signal_is_handled_during_every_wait(act: Callable[[Channel], object]) -> None:
    with pytest.raises(Heard):
        act(channel_of(0, ALL))


@pytest.mark.parametrize(
    ("act", "late"),
    [
        (lambda one: one.get("word", 3, 0.05), (3,)),
        (lambda one: one.gather("word", "", 0.05), (1, 3)),
        (lambda one: one.decide("", "".join, 0.05), (1, 2, 3)),
        (lambda one: one.meet(0.05), (1, 2, 3)),
    ],
    ids=["get", "gather", "decide", "meet"],
)
def test_a_deadline_names_the_ranks_that_are_missing(act: Callable[[Channel], object], late: tuple[int, ...]) -> None:
    store = dist.HashStore()
    channel_of(2, ALL, store).put("word", "here")
    began = time.monotonic()
    with pytest.raises(LateRanksError, match=rf"{job.ranks_text(late)} did not answer within 0\.05 s") as caught:
        act(channel_of(0, ALL, store))
    assert caught.value.ranks == late
    assert time.monotonic() - began < 10


def test_who_came_in_time_counts_where_a_part_is_enough() -> None:
    store = dist.HashStore()
    channel_of(2, ALL, store).put("word", "here")
    assert channel_of(0, ALL, store).gather("word", "mine", 0.05, partial=True) == {0: "mine", 2: "here"}


def test_a_rank_that_comes_after_the_others_gave_up_ends_too() -> None:
    store = dist.HashStore()
    first, second = (channel_of(rank, (0, 1), store) for rank in range(2))
    with pytest.raises(LateRanksError):
        first.meet(0.05)
    with pytest.raises(LateRanksError):
        first.meet(0.05)
    with pytest.raises(LateRanksError, match="rank 0 did not answer"):
        second.meet(0.05)


def test_a_rank_that_is_only_late_is_waited_for() -> None:
    def act(one: Channel) -> str:
        time.sleep(0.3 if one.rank == 2 else 0.0)
        return one.decide(str(one.rank), "".join, 10.0)

    assert on_threads(act, ALL, dist.HashStore()) == dict.fromkeys(ALL, "0123")


def test_a_store_that_is_gone_is_noticed() -> None:
    served = job.serve(job.LOOPBACK)
    one = channel_of(0, ALL, dist.TCPStore(job.LOOPBACK, served.port))
    one.put("word", "here")
    del served
    with pytest.raises(LostStoreError, match="the job's store does not answer"):
        one.get("word", 1, 20.0)


# --- what stays in the store


def test_decisions_and_gathers_leave_no_more_than_the_last_of_them() -> None:
    def keys_after(turns: int) -> int:
        store = dist.HashStore()

        def act(one: Channel) -> None:
            for turn in range(turns):
                one.decide(str(turn), max)
                one.gather(f"word {turn}", "a")
                one.meet()

        assert set(on_threads(act, ALL, store).values()) == {None}
        return store.num_keys()

    assert keys_after(20) == keys_after(1)


# --- threads, processes


def use_from_threads() -> list[str]:
    """The main thread waits inside the job's store while two others talk through connections of their own."""
    grid = grid_of(Shape(x=2, z=2))
    channels = [Channel(f"thread {number}", fresh=True, own_connection=True) for number in range(2)]
    found: dict[int, str] = {}

    def act(number: int) -> None:
        for turn in range(10):
            found[number] = channels[number].decide(f"{number}{turn}{grid.rank}", ",".join)

    threads = [threading.Thread(target=act, args=[number]) for number in range(2)]
    for thread in threads:
        thread.start()
    mine = [grid.channel.decide(str(grid.rank), "".join) for _ in range(10)][-1]
    for thread in threads:
        thread.join()
    return [mine, found[0], found[1]]


def test_several_threads_of_each_rank_use_the_store_at_once(ranks) -> None:
    expected = ["0123", "090,091,092,093", "190,191,192,193"]
    assert ranks(4).run(use_from_threads) == [expected] * 4


def fail_on_one_rank() -> tuple[str, Failure]:
    grid = grid_of(Shape(x=2, z=2))

    def act() -> None:
        if grid.rank == 2:
            raise OSError("no space")

    try:
        grid.run_together("writing", act)
    except FailedElsewhereError as error:
        return str(error), error.failure
    except OSError as error:
        return str(error), Failure.USER
    return "nothing", Failure.ERROR


def test_what_fails_on_one_rank_reaches_all_with_its_kind(ranks) -> None:
    found = ranks(4).run(fail_on_one_rank)
    assert found[2] == ("no space", Failure.USER)
    assert {found[rank] for rank in (0, 1, 3)} == {("writing failed on rank 2: OSError: no space", Failure.USER)}
