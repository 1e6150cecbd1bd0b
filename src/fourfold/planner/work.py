"""What the host of one rank gives its device to do in a step, in order: the words that programs are written in.

The closed form (program.py) and the dry run of the real code (dry.py) speak them, the simulator plays them.
"""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.ledger import Collective


@dataclass(frozen=True, slots=True)
class Launch:
    """A collective goes on its way on a communicator of its axis, once the device has done what came before."""

    flight: int
    record: Collective
    lane: str
    """Collectives of one lane travel one after another."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What follows needs the result of that flight."""

    flight: int


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product [m, k] x [k, n] on this rank."""

    label: str
    m: int
    k: int
    n: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n


@dataclass(frozen=True, slots=True)
class Attention:
    """Scores and their use in one kernel; the FLOPs count what a causal mask leaves."""

    label: str
    flops: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work that memory bounds: the bytes it reads and writes."""

    label: str
    nbytes: int


Compute = Product | Attention | Kernel
Work = Launch | Wait | Compute
