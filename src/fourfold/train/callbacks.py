"""Callbacks: classes of users that hear of a run's steps, evaluations, checkpoints and end.

`train.callbacks = ["package.module:Class"]` names them. Rank 0 makes one object of each class, without arguments, and
calls its methods after it has recorded the event; all of them are optional:

    on_start(folder, config)      before the first step: the run's folder, and the resolved config as nested tables
    on_step(step, metrics)        a step was read: loss, grad_norm, learning_rate, seconds, tokens_per_second ...
    on_evaluation(step, metrics)  the held-out data was evaluated: loss, unigram_entropy
    on_checkpoint(step, folder)   a checkpoint is complete in this folder
    on_end(step, reason)          the run ends: "finished", or why it ends earlier

A callback runs on rank 0 while the other ranks go on to their next collective and wait there. So it should be quick,
and it must not communicate. It gets copies: nothing that it changes reaches the run.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fourfold.checkpoint.load import CHECKPOINTS, Checkpoints
from fourfold.errors import CallbackError, nearest
from fourfold.parse import import_object
from fourfold.train.config import TrainConfig
from fourfold.train.run_folder import RunEvent
from fourfold.train.schema import to_table

METHODS = ("on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end")
"""The methods that a callback may have."""


class Callbacks:
    """The sink that calls the callbacks of a run."""

    def __init__(self, names: Sequence[str], folder: Path, config: TrainConfig) -> None:
        """Make the callbacks and tell them that the run starts."""
        self._checkpoints = Checkpoints(folder / CHECKPOINTS)
        self._callbacks = [(name, _made(name)) for name in names]
        self._call("on_start", "at the start", lambda: (folder, to_table(config)))

    def write(self, event: RunEvent) -> None:
        step = event["step"]
        numbers = {key: value for key, value in event.items() if key not in ("event", "step")}
        match event["event"]:
            case "step" | "evaluation" as kind:
                self._call(f"on_{kind}", f"after step {step}", lambda: (step, copy.deepcopy(numbers)))
            case "saved":
                self._call("on_checkpoint", f"after step {step}", lambda: (step, self._checkpoints.path(step)))
            case "end":
                self._call("on_end", f"after step {step}", lambda: (step, str(event["reason"])))

    def _call(self, method: str, when: str, arguments: Callable[[], tuple[Any, ...]]) -> None:
        """Call the method of every callback that has it; an error names the callback and where it was raised."""
        for name, callback in self._callbacks:
            if hasattr(callback, method):
                try:
                    getattr(callback, method)(*arguments())
                except Exception as error:
                    last = traceback.extract_tb(error.__traceback__)[-1]
                    where = f"{last.filename}, line {last.lineno}"
                    raise CallbackError(
                        f"the callback {name} failed in {method} {when}: {type(error).__name__}: {error} ({where}); "
                        "correct it, or remove it from train.callbacks"
                    ) from error

    def close(self) -> None:
        """Do nothing: the end of the run was an event."""


def _made(name: str) -> object:
    """Return an object of the class of this name, after checking that it has methods that are called."""
    kind = import_object(name, "package.module:Class")
    if not isinstance(kind, type):
        raise ValueError(f"train.callbacks: {name} is {type(kind).__name__}, not a class; give package.module:Class")
    known = ", ".join(METHODS)
    for method in dir(kind):
        if method.startswith("on_") and method not in METHODS:
            near = nearest(method, METHODS)
            raise ValueError(f"train.callbacks: nothing calls {name}.{method}{near}; the methods are {known}")
    if not any(hasattr(kind, method) for method in METHODS):
        raise ValueError(f"train.callbacks: {name} has no method that is called; the methods are {known}")
    try:
        return kind()
    except TypeError as error:
        raise ValueError(f"train.callbacks: {name} cannot be made without arguments: {error}") from error
