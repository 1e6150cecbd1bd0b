"""The gate in front of collectives that a line of the user's own code asks for.

A number read from a sharded tensor is a collective, and so is a pass that evaluates a model: every rank that holds a
part must come to the same line. A rank alone, as in `if rank == 0: print(p.grad.norm())`, would wait for ever, or its
message would meet another one of the ranks that went on. At the gate ranks meet through the job's store, so no
communicator is touched before all are there, and a rank that nobody joins is refused and may go on.

To meet costs the store a round. A line from which all ranks came together will bring them together again, so it is
asked the first time, and at doubling intervals from then on. A line is known by all calls in the user's code that lead
to it, without those inside of torch, which differ on a rank that has hooks.

Invariant: whether a call is let in is decided once, by whichever rank is first to announce it, and is equal on all.
"""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from collections import Counter
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from fourfold.job import Channel, ranks_text

GATE_SECONDS = 300.0
"""Seconds that a rank waits at the gate: half of what NCCL lets the others wait in their next collective, so that these
live on, and longer than a rank usually saves or evaluates by itself before it comes."""
PASS_SECONDS = 600.0
"""Seconds that a rank waits with a forward pass that others may come to later: after one of them was refused elsewhere,
or has saved or evaluated by itself. NCCL would let it wait as long in the pass's first collective."""
TOLD_SECONDS = 10.0
"""Seconds after which the first of the ranks says that it waits at the gate; it is the one that people let log."""
WAITS_AT = "waits at"
"""The key under which a rank shows the line at which it waits, or waited in vain the last time."""
LIBRARIES = tuple(str(Path(module).parent) + os.sep for module in (str(torch.__file__), __file__))
"""Folders of the code that is not the user's."""


class Gate:
    """Lets the ranks that share a tensor communicate about it; one for each grid."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel.open("gate", fresh=True)
        self._passed = Counter[int]()
        """How often all ranks have come here, by ranks and stack of calls."""
        self._ranks: dict[tuple[object, tuple[bool, ...]], tuple[int, ...]] = {}

    def enter(self, mesh: DeviceMesh, dims: tuple[bool, ...], what: str, *, seconds: float = 0.0) -> None:
        """Return when all ranks along these dims of a mesh of the grid are here; raise if one of them does not come.

        `what` names the collective. `seconds` is the deadline, by default `GATE_SECONDS`.
        """
        if len(self._channel.ranks) == 1:  # a fake process group has one rank that stands for all
            return
        seconds = seconds or GATE_SECONDS
        ranks = self._ranks_along(mesh, dims)
        if len(ranks) == 1:
            return
        calls = _calls()
        key = hash((ranks, calls))
        passed = self._passed[key]
        if passed & (passed - 1) == 0:
            name = f"{zlib.crc32(repr((ranks, calls)).encode()):08x}/{passed}"
            here = "{0}:{2}".format(*next(iter(calls), ("a hook", "", 0)))
            about = f"{what} at {here} is a message between {ranks_text(ranks)}, which hold parts of what it reads"
            self._channel.put(WAITS_AT, here)
            missing = self._missing(name, ranks, about, seconds)
            if not missing:
                self._channel.drop(WAITS_AT)
            else:  # others may be refused later, and read where this rank has waited
                others = self._channel.collect(WAITS_AT, ranks, 0.0, partial=True)
                elsewhere = [f" (rank {rank} came to {there})" for rank, there in others.items() if there != here]
                raise RuntimeError(
                    f"{about}, and {missing} did not come here within {seconds:g} s{''.join(elsewhere[:1])}: "
                    "do it on all of them, from the same line, and print or log the result on one"
                )
        self._passed[key] = passed + 1

    def _ranks_along(self, mesh: DeviceMesh, dims: tuple[bool, ...]) -> tuple[int, ...]:
        """Return the ranks of the job that differ from this one along these dims of the mesh at most."""
        key = mesh.mesh_dim_names, dims  # the two meshes of a folded grid have other names
        if key not in self._ranks:
            here = mesh.get_coordinate() or [0] * mesh.ndim
            place = tuple(slice(None) if along else at for along, at in zip(dims, here, strict=True))
            self._ranks[key] = tuple(sorted(mesh.mesh[place].flatten().tolist()))
        return self._ranks[key]

    def _missing(self, name: str, ranks: tuple[int, ...], about: str, seconds: float) -> str:
        """Return the ranks that did not come in time, in words; empty if all came. All ranks get the same answer."""
        channel = self._channel
        if (found := channel.announced(name)) is not None:  # decided before this rank came, and for good
            return found
        channel.put(name, "here")
        if all_came := channel.come(name) == len(ranks):
            channel.announce(name, "")
        told = TOLD_SECONDS if seconds <= GATE_SECONDS else seconds / 10  # ranks begin to train at unequal times
        if not all_came and channel.announced(name, min(told, seconds)) is None and channel.rank == ranks[0]:
            warnings.warn(f"{about}; rank {channel.rank} waits here for the others", stacklevel=2)
        if channel.announced(name, seconds) is None:
            late = [rank for rank in ranks if rank not in channel.collect(name, ranks, 0.0, partial=True)]
            channel.announce(name, ranks_text(late) if late else "")  # not heard if the last rank has come just now
        found = channel.announced(name, seconds)
        channel.drop(name)
        return ranks_text(ranks) if found is None else found


def _calls() -> tuple[tuple[str, str, int], ...]:
    """Return file, function and line of the calls in progress, the innermost first, without those of the libraries."""
    frame, calls = sys._getframe(2), []
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARIES):
            calls.append((os.path.basename(code.co_filename), code.co_name, frame.f_lineno))
        frame = frame.f_back
    return tuple(calls)
