"""Which cases of a long table run: a share of them in `make test`, all in `make slow` or `make soak`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")

ALL = os.environ.get("FOURFOLD_TEST_ALL") == "1"


def share(cases: Iterable[Case], one_in: int) -> list[Case]:
    """Every `one_in`-th, the same ones each time; neighbours of a table differ least."""
    return list(islice(cases, 0, None, 1 if ALL else one_in))


def others_slow(cases: Iterable[Case], one_in: int) -> list[Any]:
    """Return all of them as parameters of a test; all but every `one_in`-th run in `make slow`."""
    return [pytest.param(case, marks=[pytest.mark.slow] if place % one_in else []) for place, case in enumerate(cases)]
