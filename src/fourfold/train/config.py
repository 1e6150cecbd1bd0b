"""What a run is: sections of validated fields, from TOML and from the command line.

A config may leave much open (`"auto"`, no grid, no folder). `resolve` fills that in for a number of ranks and a kind
of device; the resolved config is stored with the run and gives the same run again.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import torch

from fourfold import models
from fourfold.axes import AXES, BATCH
from fourfold.grid import Shape
from fourfold.old_versions import upgrade_config
from fourfold.optim import Decay, Schedule
from fourfold.policy import Activations, Overlap, Policy, Recompute
from fourfold.spelling import nearest
from fourfold.train.auto_grid import AUTO, Hardware, find_grid
from fourfold.train.schema import parse, to_table, to_toml

Dtype = Literal["fp32", "bf16", "fp64"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

REQUIRED = tuple(field.name for field in dataclasses.fields(models.ModelConfig) if field.default is dataclasses.MISSING)
"""What a model of no published size must say of itself."""


@dataclass(frozen=True, slots=True)
class ModelSection:
    """A published size and what is changed of it, or any other name and all of the fields of `models.ModelConfig`."""

    name: str = "gpt-tiny"
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_hidden: int | None = None
    vocab: int | None = None
    seq: int | None = None
    norm: Literal["layer", "rms"] | None = None
    mlp: Literal["gelu", "swiglu"] | None = None
    positions: Literal["learned", "rope"] | None = None
    rope_theta: float | None = None
    bias: bool | None = None
    tied: bool | None = None
    qk_norm: bool | None = None
    dropout: float | None = None
    norm_eps: float | None = None

    def build(self) -> models.ModelConfig:
        changes = {key: value for key, value in dataclasses.asdict(self).items() if key != "name" and value is not None}
        missing = [name for name in REQUIRED if name not in changes]
        if self.name in models.SIZES or len(missing) == len(REQUIRED):
            return models.config(self.name, **changes)
        if not missing:
            return models.ModelConfig(**changes)
        try:
            return models.config(self.name)
        except ValueError as error:
            raise ValueError(f"{error}; a model of another name needs {', '.join(missing)} too") from error


class GridSizes:
    """What `GridSection` does with its sizes."""

    order: tuple[str, ...]

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) is not None and getattr(self, axis) < 1:
                raise ValueError(f"{axis}={getattr(self, axis)} must be at least 1")

    @property
    def auto(self) -> bool:
        return all(getattr(self, axis) is None for axis in AXES)

    @property
    def shape(self) -> Shape:
        return Shape(**{axis: getattr(self, axis) or 1 for axis in AXES}, order=self.order)


GridSection = make_dataclass(
    "GridSection",
    [*((axis, int | None, None) for axis in AXES), ("order", tuple[Literal[AXES], ...], AXES)],  # type: ignore[valid-type]
    bases=(GridSizes,),
    frozen=True,
)
"""Sizes of the axes; with none given the planner finds the fastest grid for the number of ranks. `order` is how ranks
walk the axes, fastest-varying first; this usual order may change where the planner finds the grid."""
GridSection.__module__ = __name__  # make_dataclass says "types" before Python 3.12, and pickle does not find it there


@dataclass(frozen=True, slots=True)
class PolicySection:
    """What is cut, kept, recomputed and cast; as `Policy` says."""

    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """Of products and messages; auto: bf16 on a GPU, fp32 on the CPU. Weights are fp32, or fp64 with fp64."""
    reduce: Dtype | None = None
    """In which gradients are reduced over z; by default that of the weights."""
    activations: Activations = "sharded"
    recompute: Recompute = "none"
    keep_gathered: bool = False
    keep_weights: bool = False
    loss_chunk: int = 0
    shard_optimizer: bool = False
    bucket_bytes: int = 25 << 20
    compile: Literal["auto"] | bool = "auto"
    """Compile the computation between collectives; auto: on a GPU."""

    @property
    def parameters(self) -> torch.dtype:
        return torch.float64 if self.dtype == "fp64" else torch.float32

    def build(self, overlap: Overlap) -> Policy:
        return Policy(
            overlap=overlap,
            activations=self.activations,
            recompute=self.recompute,
            keep_gathered=self.keep_gathered,
            keep_weights=self.keep_weights,
            loss_chunk=self.loss_chunk,
            shard_optimizer=self.shard_optimizer,
            bucket_bytes=self.bucket_bytes,
            compute=DTYPES[self.dtype],
            reduce=None if self.reduce is None else DTYPES[self.reduce],
            compile=self.compile is True,
        )


@dataclass(frozen=True, slots=True)
class SourceSection:
    """Something to train on and its share of the samples."""

    path: str
    """`standard-library`, a text file or folder, a .tokens file, a Megatron or nanoGPT .bin file."""
    weight: float = 1.0
    eod: int | None = None
    """The id that ends a document, where the file does not say."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight={self.weight} must be above 0; leave a source away to not use it")


@dataclass(frozen=True, slots=True)
class DataSection:
    sources: tuple[SourceSection, ...] = (SourceSection("standard-library"),)
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face tokenizer.json."""
    eod: str | int | None = None
    """The token of a tokenizer.json that ends a document, where it has an unusual name."""
    documents: bool = False
    """Keep attention inside each of the documents that share a row."""
    held_out: float = 0.01
    """The last part of every source, for evaluation alone."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty; name at least one, such as standard-library")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class BatchSection:
    rows: int = 16
    """Sequences of a step, over all ranks and micro-steps."""
    seq: int = 128
    micro_steps: int = 1
    """Parts of a step that run one after another, their gradients added up."""

    def __post_init__(self) -> None:
        for name in ("rows", "seq", "micro_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.rows % self.micro_steps:
            near = -(-self.rows // self.micro_steps) * self.micro_steps
            raise ValueError(
                f"rows={self.rows} cannot be cut into micro_steps={self.micro_steps} equal parts; take {near} rows"
            )

    @property
    def tokens(self) -> int:
        return self.rows * self.seq


@dataclass(frozen=True, slots=True)
class OptimizerSection:
    """AdamW and its schedule."""

    rate: float = 1e-3
    warmup: int | None = None
    """Steps until the rate is reached; by default 10, or all where there are fewer."""
    schedule: Decay = "cosine"
    decay: float = 0.2
    """The part of the steps over which a stable schedule decays."""
    floor: float = 0.1
    base_rows: int | None = None
    """The rate is meant for that many rows and grows linearly with them."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    """Largest norm of the gradients; inf: any."""

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be above 0; inf does not clip")
        for name in ("rate", "eps", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")
        if self.base_rows is not None and self.base_rows < 1:
            raise ValueError(f"base_rows={self.base_rows} must be at least 1")


@dataclass(frozen=True, slots=True)
class TrainSection:
    steps: int = 100
    seed: int = 0
    out: str | None = None
    """The run's folder; by default runs/MODEL-DATE-TIME."""
    evaluate_every: int = 50
    """Steps between evaluations on the held-out part, which also follows the last step; 0: never."""
    evaluate_batches: int = 8
    max_skipped: int = 5
    """Skipped steps in a row (watch.not_finite, watch.spikes) after which the run stops."""

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("evaluate_every", 0), ("evaluate_batches", 1), ("max_skipped", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True, slots=True)
class CheckpointSection:
    """When the whole state of training is written to the run's folder, and what stays there."""

    save: bool = True
    """When the run ends, also by SIGTERM, and at intervals."""
    every: int = 0
    """Steps between checkpoints; 0: at the end alone."""
    keep_last: int = 2
    """How many stay; the newest always does."""
    keep_every: int = 0
    """Those of steps that are multiples of this stay for good; 0: of none."""
    asynchronous: bool = True
    """Write while training goes on, from a copy of the step."""

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("keep_last", 1), ("keep_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True, slots=True)
class LogSection:
    tensorboard: Literal["auto"] | bool = "auto"
    """auto: when the package tensorboard is installed."""
    wandb: str | None = None
    """A project of Weights & Biases to log to."""
    peak_flops: float | None = None
    """FLOP/s of one device, for MFU and HFU; by default its data sheet's, on the CPU measured."""

    def __post_init__(self) -> None:
        if self.peak_flops is not None and not self.peak_flops > 0:
            raise ValueError(f"peak_flops={self.peak_flops} must be above 0")


@dataclass(frozen=True, slots=True)
class WatchSection:
    """What is watched while ranks train."""

    deadline: float = 300.0
    """Seconds that a rank may wait for a collective; then all ranks stop and say who did not come. inf: for ever."""

    replicas_every: int = 100
    """Steps between two looks at whether replicas of the parameters are still equal, bit for bit; 0: never."""

    not_finite: Literal["skip", "roll_back", "stop"] = "skip"
    """What becomes of a step whose gradients are not finite: it changes nothing; the run goes on from its newest
    checkpoint without the data since; the run ends. Of skipped steps train.max_skipped in a row end it too."""

    spikes: Literal["tell", "skip", "roll_back", "stop"] = "tell"
    """The same of a step whose loss jumps, or only tell."""

    spike_above: float = 8.0
    """A loss jumps where it is so many standard deviations above the median of the last 64; 0: never."""

    grace: float = 600.0
    """Seconds after SIGTERM in which the run has ended, with a last checkpoint if that takes no longer."""

    def __post_init__(self) -> None:
        for name in ("deadline", "grace"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0; inf waits for ever")
        if not 0 <= self.spike_above < inf:
            raise ValueError(f"spike_above={self.spike_above} must be at least 0, which is never, and finite")
        if self.replicas_every < 0:
            raise ValueError(f"replicas_every={self.replicas_every} must be at least 0")


@dataclass(frozen=True, slots=True)
class PlanSection:
    """What the planner says of the run."""

    machine: str = AUTO
    """A packaged machine or the path of a machine file; auto: the packaged one that is most like this one."""
    compare: bool = True
    """Price the run when it begins, and show that beside what its first steps measure."""


BYTES = "bytes"
"""The tokenizer that has no file."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    model: ModelSection = field(default_factory=ModelSection)
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

    def stored(self, folder: Path) -> TrainConfig:
        """As a run's folder keeps it: run again it gets another one, and a tokenizer in it moves with it."""
        name, data = Path(self.data.tokenizer), self.data
        if self.data.tokenizer != BYTES and name.expanduser().parent.resolve() == folder.resolve():
            data = replace(data, tokenizer=name.name)
        return replace(self, data=data, train=replace(self.train, out=None))


def read_config(
    path: Path | None, changes: Sequence[tuple[str, Any]] = (), *, forget_grid: bool = False
) -> TrainConfig:
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
        return parse(TrainConfig, table)
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
    return [field.name for field in dataclasses.fields(getattr(TrainConfig(), section))]


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    sections = [section.name for section in dataclasses.fields(TrainConfig)]
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
    config: TrainConfig, ranks: int, *, on_gpu: bool, memory_bytes: int, say: Callable[[str], object] = lambda _: None
) -> TrainConfig:
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


def choose_grid(config: TrainConfig, job: Hardware) -> tuple[Shape, str]:
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
