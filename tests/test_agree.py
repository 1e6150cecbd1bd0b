"""Ranks that wait for each other hear signals meanwhile, and do not wait for ever."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from fourfold.agree import wait_for


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


@pytest.mark.usefixtures("alarm")
def test_a_signal_is_heard_while_others_are_waited_for() -> None:
    with pytest.raises(Heard):
        wait_for(dist.HashStore(), ["never"], 60)


def test_nobody_waits_for_ever() -> None:
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"after 0 s some ranks had not come to never"):
        wait_for(dist.HashStore(), ["never"], 0.05)
    assert time.monotonic() - began < 10


def test_what_is_there_is_not_waited_for() -> None:
    store = dist.HashStore()
    store.set("here", "yes")
    wait_for(store, ["here"])
