"""CPU seconds that a test may hold against a number, on machines of any speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean


def reference_seconds(run: Callable[[], object]) -> float:
    """Return the CPU seconds that a run takes on a core that squares 1,200,000 numbers in a tenth of a second.

    This core's speed is measured before and after it, because cores that others share change theirs. A faster core
    counts as that one.
    """
    slowness = [_slowness()]
    taken = cpu_seconds(run)
    slowness.append(_slowness())
    return taken / max(1.0, fmean(slowness))


def cpu_seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def _slowness() -> float:
    """Measure in one piece, which is not shorter than the moments in which a core may be fast."""
    return cpu_seconds(lambda: sum(number * number for number in range(1_200_000))) / 0.1
