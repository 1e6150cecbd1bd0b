"""A run's folder: what is written there while it trains, so that it stays readable whenever the run ends.

    config.toml     the resolved config; `fourfold train RUN/config.toml` runs it again
    run.json        what the run is: grid, model, device, versions; what was predicted, and how its steps compare
    metrics.jsonl   one JSON object a line: steps, evaluations, skipped steps, a comparison, a profile, the end
    tensorboard/    the same for TensorBoard, where it is installed
    profile/        traces of the steps that --profile names, their summary, and the predicted timeline of a step
    data/           prepared text
    weights/        the trained weights
    state.json      step and position in the data when the run ended

Rank 0 alone writes the records; every rank writes its own trace and weights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from fourfold.train.config import Config, LogSection
from fourfold.train.schema import to_table

Event = dict[str, Any]
KINDS = ("step", "evaluation", "skipped", "compared", "profile", "end")
"""What events tell of."""


class Sink(Protocol):
    """Something that takes events: a file, TensorBoard, Weights & Biases, the terminal."""

    def write(self, event: Event) -> None: ...
    def close(self) -> None: ...


class Lines:
    """JSON lines, each complete on disk before the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a")

    def write(self, event: Event) -> None:
        try:
            self._file.write(json.dumps(strict(event)) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno, f"cannot log to {self.path} ({error.strerror}); what was written so far stays readable"
            ) from error

    def close(self) -> None:
        with suppress(OSError):  # the line that did not fit was reported already; the file is closed all the same
            self._file.close()


def strict(content: Any) -> Any:
    """As JSON knows it: numbers that are not finite become null."""
    if isinstance(content, dict):
        return {key: strict(value) for key, value in content.items()}
    if isinstance(content, list):
        return [strict(value) for value in content]
    return None if isinstance(content, float) and not isfinite(content) else content


class Kept:
    """Events in memory, for `--json`."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Nothing to close: it is read afterwards."""


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, event: Event) -> None:
        for name, value in scalars(event):
            self._writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, folder: Path, config: Config) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError as error:
            raise ImportError(
                "log.wandb needs the package wandb: pip install wandb, or leave log.wandb away"
            ) from error
        self._run = wandb.init(project=project, dir=str(folder), name=folder.name, config=to_table(config))

    def write(self, event: Event) -> None:
        self._run.log(dict(scalars(event)), step=event["step"])

    def close(self) -> None:
        self._run.finish()


def scalars(event: Event) -> list[tuple[str, float]]:
    """An event's numbers by name, those by axis as `wire_bytes/x`."""
    return [
        found for key, value in event.items() if key != "step" for found in _numbers(f"{event['event']}/{key}", value)
    ]


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [found for key, below in value.items() for found in _numbers(f"{name}/{key}", below)]
    return [(name, float(value))] if isinstance(value, int | float) else []


def open_sinks(log: LogSection, folder: Path, config: Config) -> list[Sink]:
    """All that the config asks for, or none."""
    if log.tensorboard is True and find_spec("tensorboard") is None:
        raise ImportError("log.tensorboard is true but tensorboard is not installed: pip install 'fourfold[train]'")
    sinks: list[Sink] = []
    with ExitStack() as opened:

        def add(sink: Sink) -> None:
            opened.callback(sink.close)
            sinks.append(sink)

        add(Lines(folder / "metrics.jsonl"))
        if log.tensorboard is True or (log.tensorboard == "auto" and find_spec("tensorboard") is not None):
            add(TensorBoard(folder / "tensorboard"))
        if log.wandb is not None:
            add(WeightsAndBiases(log.wandb, folder, config))
        opened.pop_all()
    return sinks


def write_json(path: Path, content: Any) -> None:
    """All of it or nothing."""
    _replace(path, lambda partial: partial.write_text(json.dumps(content, indent=2) + "\n"))


def write_text(path: Path, content: str) -> None:
    _replace(path, lambda partial: partial.write_text(content))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial)
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, f"cannot write {path} ({error.strerror})") from error


def check_folder(out: Path, *, save: bool) -> None:
    """Refuse a folder that holds a run already, and weights that nothing here can write."""
    if (out / "metrics.jsonl").exists():
        raise FileExistsError(f"{out} holds a run already; give another --out, or remove it")
    if save and find_spec("safetensors") is None:
        raise ImportError("writing weights needs safetensors: pip install 'fourfold[train]', or train.save=false")
