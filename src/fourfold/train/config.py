"""What a run is: sections of validated fields, from TOML and from the command line.

A config may leave much open (`"auto"`, no grid, no folder). `resolve` fills that in for a number of ranks and a kind
of device; the resolved config is stored with the run and gives the same run again.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fourfold.axes import AXES, BATCH
from fourfold.grid import Shape
from fourfold.old_versions import upgrade_config
from fourfold.optim import Schedule
from fourfold.policy import Overlap, Policy
from fourfold.spelling import nearest
from fourfold.train.auto_grid import Hardware, find_grid
from fourfold.train.schema import parse, to_table, to_toml
from fourfold.train.sections import (
    BatchSection,
    CheckpointSection,
    DataSection,
    GridSection,
    LogSection,
    Model,
    OptimizerSection,
    PlanSection,
    PolicySection,
    TrainSection,
    WatchSection,
)

BYTES = "bytes"
"""The tokenizer that has no file."""


@dataclass(frozen=True, slots=True)
class Config:
    model: Model = field(default_factory=Model)
    grid: GridSection = field(default_factory=GridSection)
    policy: PolicySection = field(default_factory=PolicySection)
    overlap: Overlap = field(default_factory=Overlap)
    data: DataSection = field(default_factory=DataSection)
    batch: BatchSection = field(default_factory=BatchSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    plan: PlanSection = field(default_factory=PlanSection)
    watch: WatchSection = field(default_factory=WatchSection)

    @property
    def schedule(self) -> Schedule:
        section = self.optimizer
        return Schedule(
            section.rate,
            self.train.steps,
            warmup=min(10, self.train.steps) if section.warmup is None else section.warmup,
            shape=section.schedule,
            decay=section.decay,
            floor=section.floor,
            batch=None if section.base_rows is None else self.batch.rows,
            base_batch=section.base_rows,
        )

    def build_policy(self) -> Policy:
        """As the model takes it: the sections policy and overlap in one."""
        return self.policy.build(self.overlap)

    def toml(self) -> str:
        return to_toml(to_table(self))

    def stored(self, folder: Path) -> Config:
        """As a run's folder keeps it: run again it gets another one, and a tokenizer in it moves with it."""
        name, data = Path(self.data.tokenizer), self.data
        if self.data.tokenizer != BYTES and name.expanduser().parent.resolve() == folder.resolve():
            data = replace(data, tokenizer=name.name)
        return replace(self, data=data, train=replace(self.train, out=None))


def read_config(path: Path | None, changes: Sequence[tuple[str, Any]] = (), *, forget_grid: bool = False) -> Config:
    """The config of a TOML file (or the defaults) with some keys changed: `("batch.rows", 32)`.

    With `forget_grid` the sizes of the file's grid do not count.
    """
    table: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            if path.is_dir():
                raise IsADirectoryError(
                    f"{path} is a folder; give a config, CONFIG.toml; a run goes on by --resume {path}"
                )
            raise FileNotFoundError(f"there is no config {path}; give the path of a TOML file")
        try:
            table = tomllib.loads(path.read_text())
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no TOML: {error}") from error
        try:
            table = upgrade_config(table)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        _put_beside(table, path.parent)
    if forget_grid and isinstance(table.get("grid"), dict):
        table["grid"] = {key: value for key, value in table["grid"].items() if key not in AXES}
    for key, value in changes:
        _put(table, key, value)
    try:
        return parse(Config, table)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path is not None else str(error)) from error


def beside(name: str, folder: Path) -> str:
    """The tokenizer that a config in this folder names: a bare name, or a path that is not there any more, is that of
    a file beside the config if there is one. So a run that has its own can be moved."""
    path, own = Path(name).expanduser(), folder / Path(name).name
    return str(own) if name != BYTES and own.is_file() and (path.name == name or not path.is_file()) else name


def _put_beside(table: dict[str, Any], folder: Path) -> None:
    data = table.get("data")
    if isinstance(data, dict) and isinstance(data.get("tokenizer"), str):
        data["tokenizer"] = beside(data["tokenizer"], folder)


def table_of(section: str) -> list[str]:
    """The keys of a section."""
    return [field.name for field in dataclasses.fields(getattr(Config(), section))]


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    sections = [section.name for section in dataclasses.fields(Config)]
    section, dot, name = key.partition(".")
    if not dot or section not in sections:
        near = nearest(section, sections)
        if homes := [each for each in sections if not dot and key in table_of(each)]:
            near = f" (did you mean {' or '.join(f'{home}.{key}' for home in homes)}?)"
        raise ValueError(f"{key!r} is no key{near}; write section.key=value, sections are {', '.join(sections)}")
    keys = table.setdefault(section, {})
    if isinstance(keys, dict):  # otherwise `parse` says what is wrong with it
        keys[name] = value


def resolve(
    config: Config, ranks: int, *, on_gpu: bool, memory_bytes: int, say: Callable[[str], object] = lambda _: None
) -> Config:
    """Fill in what is left open, for that many ranks on that kind of device.

    Where the planner chooses the grid, why it takes this one is said in one line.
    """
    dtype = ("bf16" if on_gpu else "fp32") if config.policy.dtype == "auto" else config.policy.dtype
    compiled = on_gpu if config.policy.compile == "auto" else config.policy.compile
    policy = replace(config.policy, dtype=dtype, compile=compiled)
    with _section("model"):
        model = replace(config.model, seq=config.model.seq or max(config.batch.seq, config.model.build().seq))
    with _section("optimizer"):
        optimizer = replace(config.optimizer, warmup=config.schedule.warmup)
    config = replace(config, policy=policy, model=model, optimizer=optimizer)
    with _section("policy"):
        built = config.build_policy()
    if model.build().positions == "learned" and config.batch.seq > model.build().seq:
        raise ValueError(
            f"batch.seq={config.batch.seq} is longer than the {model.build().seq} learned positions of the model; "
            "raise model.seq or lower batch.seq"
        )
    if config.grid.auto:
        shape = Shape(order=config.grid.order)
        if ranks > 1:
            shape, reason = choose_grid(config, Hardware.here(ranks, on_gpu=on_gpu, memory_bytes=memory_bytes))
            say(reason)
        config = replace(config, grid=GridSection(**shape.sizes, order=shape.order))  # type: ignore[arg-type]
    shape = config.grid.shape
    config.model.build().check(shape, built)
    places, rows = shape.places, config.batch.rows // config.batch.micro_steps
    if rows % places:
        sizes = "*".join(str(shape.sizes[axis]) for axis in BATCH)
        raise ValueError(
            f"batch.rows={config.batch.rows} in micro_steps={config.batch.micro_steps} are {rows} rows, which "
            f"{'*'.join(BATCH)} = {sizes} does not divide; take a multiple of {places * config.batch.micro_steps} rows"
        )
    return config


@contextmanager
def _section(name: str) -> Iterator[None]:
    """Errors inside name the section."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def choose_grid(config: Config, job: Hardware) -> tuple[Shape, str]:
    """The planner's grid for the job, and why it is taken."""
    return find_grid(
        config.model.build(),
        config.build_policy(),
        job,
        rows=config.batch.rows,
        seq=config.batch.seq,
        micro_steps=config.batch.micro_steps,
        order=config.grid.order,
        parameters=config.policy.parameters,
        machine=config.plan.machine,
    )
