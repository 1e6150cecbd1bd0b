"""Which cases of a long table run: a share of them in `make test`, all in `make soak`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

Case = TypeVar("Case")

ALL = os.environ.get("FOURFOLD_TEST_ALL") == "1"


def share(cases: Iterable[Case], one_in: int) -> list[Case]:
    """Every `one_in`-th, the same ones each time; neighbours of a table differ least."""
    return list(islice(cases, 0, None, 1 if ALL else one_in))
