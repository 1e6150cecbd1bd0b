"""The sections of a config: each a frozen dataclass whose fields are the keys of its TOML table, checked by itself.

What must fit across sections (the model and the grid, rows and ranks) is checked by `config.resolve`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, make_dataclass
from math import inf
from typing import Literal

import torch

from fourfold import models
from fourfold.axes import AXES
from fourfold.grid import Shape
from fourfold.optim import Decay
from fourfold.policy import Activations, Overlap, Policy, Recompute
from fourfold.train.auto_grid import AUTO

Dtype = Literal["fp32", "bf16", "fp64"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}

REQUIRED = tuple(field.name for field in dataclasses.fields(models.ModelConfig) if field.default is dataclasses.MISSING)
"""What a model of no published size must say of itself."""


@dataclass(frozen=True, slots=True)
class Model:
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
    reduce_dtype: Dtype | None = None
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
            compute_dtype=DTYPES[self.dtype],
            reduce_dtype=None if self.reduce_dtype is None else DTYPES[self.reduce_dtype],
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
