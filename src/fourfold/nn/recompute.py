"""Forget what a function computed in forward and compute it again in backward.

torch's checkpointing, with the time of the first run: dropout draws the same masks whenever backward comes.
Collectives run again as well, but for a last one whose result backward does not read (`Engine.recomputing`); what is
read is the same, so results are bitwise those without recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

from fourfold.nn.rng import RngPoint, StepRng

T = TypeVar("T")


def recompute(function: Callable[..., T], clock: StepRng, *args: Any) -> T:
    """`function(*args)`, of which backward keeps the arguments alone."""
    moment = clock.now
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), _again(clock, moment)),
    )


@contextmanager
def _again(clock: StepRng, moment: RngPoint) -> Iterator[None]:
    before, clock.engine.recomputing = clock.engine.recomputing, True
    try:
        with clock.at(moment):
            yield
    finally:
        clock.engine.recomputing = before
