"""What the host has to do for a recorded step, which the device repeats without Python (`step_graph`).

While a step is recorded, `Grid.recording` refers to a `Recording`. Whoever keeps a value on the host that the step
depends on, or that it changes, adds what has to be done before or after each replay: the optimizer writes its learning
rates into the tensors that the graph reads, and counts that its parameters have changed.

A replay launches all its collectives at once, so the host cannot know how far the device has come. The graph therefore
writes its own progress into pinned memory: a mark whenever the device has passed a wait for a collective.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fourfold.ledger import Collective

MOST_MARKS = 1 << 16
"""The number of waits in a step up to which each has a mark of its own; the table of marks takes 512 KiB. A step of 200
layers with 8 micro-batches has about 50,000 waits. Further waits count as the last mark."""


class Recording:
    """The host's part in a recorded step: its collectives, what to do around each replay, and the device's progress."""

    def __init__(self, device: torch.device, earlier: dict[int, int]) -> None:
        self.launches: list[Collective] = []
        """The collectives of the step, in the order of their launch."""
        self.waits: list[Collective] = []
        """The same records in the order in which the device waits for them."""
        self.before: list[Callable[[], None]] = []
        """Called before each replay."""
        self.after: list[Callable[[], None]] = []
        """Called after each replay was launched."""
        self.kept: list[object] = []
        """What holds tensors of before the recording that the graph reads, and that others may let go of."""
        self.earlier = earlier
        """How often each gradient of before the step was written, by its id; a replay finds others in their place."""
        self._marks = torch.arange(MOST_MARKS, device=device)
        self._replays = torch.zeros(1, dtype=torch.int64, device=device)
        self._progress = torch.zeros(2, dtype=torch.int64, pin_memory=device.type == "cuda")

    def begin(self) -> None:
        """Let each replay say that it has begun; called as the first thing that is recorded."""
        self._replays.add_(1)
        self._progress[1:].copy_(self._marks[:1], non_blocking=True)
        self._progress[:1].copy_(self._replays, non_blocking=True)

    def landed(self, record: Collective) -> None:
        """Let each replay say that the device has passed the wait for this collective."""
        self.waits.append(record)
        mark = min(len(self.waits), MOST_MARKS - 1)
        self._progress[1:].copy_(self._marks[mark : mark + 1], non_blocking=True)

    @property
    def progress(self) -> tuple[int, int]:
        """The number of replays that the device has begun, and of waits that it has passed in the last of them.

        Reading it is no call of CUDA, so any thread may do it at any time.
        """
        replays, waits = self._progress.tolist()
        return replays, waits
