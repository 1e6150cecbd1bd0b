"""The config of a run: sections of validated fields, read from TOML and from the command line.

Each section is a frozen dataclass with the keys of its TOML table as fields, and checks itself. A config may leave much
open (`"auto"`, no grid, no folder); `planning.resolve` fills that in for a number of ranks and a kind of device. The
resolved config is stored with the run, and training it again repeats the run.

The keys of the sections `model`, `grid`, `policy` and `overlap` are the fields of `ModelConfig`, the axes, and the
fields of `Policy` and `Overlap`: a new field there is a key here without any change to this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from itertools import product
from math import inf
from pathlib import Path
from typing import Any, Literal, cast, get_type_hints

import torch

from fourfold import models
from fourfold.axes import AXES, AXIS_MEANINGS, FOLD_SIZES, GIVEN_BESIDES, PIPE
from fourfold.errors import nearest
from fourfold.grid import Shape
from fourfold.job import START_SECONDS
from fourfold.models.config import MODEL_FIELDS
from fourfold.nn.lora import LoraConfig
from fourfold.old_versions import upgrade_config
from fourfold.optim import Decay, LearningRateSchedule
from fourfold.parse import parse_toml
from fourfold.policy import LEFT_OPEN, Overlap, Policy, Recompute
from fourfold.schedule.action import Schedule
from fourfold.schedule.choose import FOUND
from fourfold.schedule.named import BUILDERS, NAMES, named
from fourfold.schedule.stages import Stages, place
from fourfold.schedule.text import read_schedule, to_csv
from fourfold.synonyms import explain_synonym
from fourfold.train.schema import MEANING, OWNER, comments_of, parse, to_table, to_toml, without_unset

AUTO = "auto"
"""The value of keys that `planning.resolve` fills in."""
Dtype = Literal["fp32", "bf16", "fp64"]
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
MOST_TOKENS = 1 << 34
"""The most tokens of a step: a thousand times what the largest runs have."""
MOST_MICRO_STEPS = 1 << 16
"""The most micro-batches of a step: beyond this a plan and the records of a step have no end."""
BYTES = "bytes"
"""The name of the tokenizer that needs no file."""
SCHEDULE_FILE = "schedule.csv"
"""The file of a run's folder with the schedule of its pipeline."""


def require_at_least(section: Any, **least: float) -> None:
    """Raise if a key of the section is below its least value or infinite; a key without a value passes."""
    for name, bound in least.items():
        value = getattr(section, name)
        if value is not None and not bound <= value < inf:
            raise ValueError(f"{name}={value} must be at least {bound}{' and finite' * (value == inf)}")


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put the name of a section or file before the errors inside; an empty name leaves them as they are."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def field_of(owner: type, default: Any = None) -> Any:
    """Return a dataclass field whose meaning is the docstring of the field of that name in another class."""
    return field(default=default, metadata={OWNER: owner})


class ModelKeys:
    """The model: a published size with some keys changed, or a model of another name with all its keys.

    These are the methods of `ModelSection`, and the one key that is no field of `models.ModelConfig`.
    """

    name: str
    """A published size, such as gpt-125m or llama-3-8b; or a name of your own, which needs the keys from layers to seq.
    Keys that are not set have the value of the published size. Or package.module:function, which returns an
    nn.Module."""
    options: dict[str, Any]
    """Arguments of that function. Of the other keys it may have `vocab`, the number of ids that the module knows; by
    default it is that of the tokenizer."""

    def __post_init__(self) -> None:
        if not self.is_own:
            if self.options:
                raise ValueError(f"options={self.options} are for a function, package.module:function, not {self.name}")
            return
        given = [key for key in MODEL_FIELDS if getattr(self, key) is not None and key != "vocab"]
        if given:
            raise ValueError(
                f"{given[0]}={getattr(self, given[0])} is a key of reference models; give {self.name} its arguments in "
                "model.options"
            )

    @property
    def is_own(self) -> bool:
        """Whether the name is that of a function of the user, `package.module:function`."""
        return ":" in self.name

    def build(self) -> models.ModelConfig:
        """Return the model's config: the published size with the given keys changed, or a model of only these keys."""
        if self.is_own:
            raise ValueError(
                f"{self.name} builds a model of your own; the planner, fourfold sample and fourfold export know "
                "reference models only"
            )
        changes = {key: getattr(self, key) for key in MODEL_FIELDS if getattr(self, key) is not None}
        required = [field.name for field in fields(models.ModelConfig) if field.default is MISSING]
        missing = [name for name in required if name not in changes]
        # with none of the required keys, an unknown name is a misspelled size, and `models.config` suggests one
        if self.name in models.SIZES or len(missing) == len(required):
            return models.config(self.name, **changes)
        if not missing:
            return models.ModelConfig(**changes)
        try:
            return models.config(self.name)
        except ValueError as error:
            raise ValueError(f"{error}; a model of another name also needs {', '.join(missing)}") from error


ModelSection = make_dataclass(
    "ModelSection",
    [
        ("name", str, "gpt-tiny"),
        *((name, kind | None, field_of(models.ModelConfig)) for name, kind in MODEL_FIELDS.items()),
        ("options", dict[str, Any], field(default_factory=dict)),
    ],
    bases=(ModelKeys,),
    namespace={"__doc__": ModelKeys.__doc__},
    frozen=True,
)


def _axis_text(axis: str) -> str:
    meaning = AXIS_MEANINGS.get(axis)
    return "" if meaning is None else f"{meaning[0].upper()}{meaning[1:]}."


class GridKeys:
    """Sizes of the axes. If none is given, the planner chooses the grid that loses least if the machine is not as
    its file says.

    These are the methods of `GridSection`, and the one key that is not a size.
    """

    context: int
    expert: int
    ex: int
    ez: int
    order: tuple[str, ...]
    """The axes in which consecutive ranks differ, fastest-varying first. The planner may change the default order."""

    def __post_init__(self) -> None:
        require_at_least(self, **dict.fromkeys((*AXES, *GIVEN_BESIDES), 1))
        if self.auto and (folds := [f"{name}={getattr(self, name)}" for name in FOLD_SIZES if getattr(self, name) > 1]):
            raise ValueError(f"{', '.join(folds)} needs a grid to fold, such as --grid z=4,expert=4")
        if self.auto and self.context > 1:
            raise ValueError(
                f"context={self.context} needs a grid whose z and data it divides, such as "
                f"--grid z={self.context},context={self.context}; --grid auto without it has one where it helps"
            )

    @property
    def auto(self) -> bool:
        return all(getattr(self, axis) is None for axis in AXES)

    @property
    def shape(self) -> Shape:
        sizes = {axis: getattr(self, axis) or 1 for axis in AXES}
        return Shape(**sizes, **{name: getattr(self, name) for name in GIVEN_BESIDES}, order=self.order)


GridSection = make_dataclass(
    "GridSection",
    [
        *((axis, int | None, field(default=None, metadata={MEANING: _axis_text(axis)})) for axis in AXES),
        *((name, int, field(default=1, metadata={MEANING: _axis_text(name)})) for name in GIVEN_BESIDES),
        ("order", tuple[Literal[AXES], ...], AXES),  # type: ignore[valid-type]
    ],
    bases=(GridKeys,),
    namespace={"__doc__": GridKeys.__doc__},
    frozen=True,
)

OTHER_POLICY_FIELDS = (
    "overlap", "compute_dtype", "reduce_dtype", "router_dtype", "compile", "stages", "schedule", "even_tokens",
    "check_inputs",
)  # fmt: skip
POLICY_KEYS = {
    field.name: field.default for field in fields(Policy) if field.name not in {*OTHER_POLICY_FIELDS, *LEFT_OPEN}
}
"""The fields of `Policy` that the config gives as they are, with their defaults. The others have a section of their own
(overlap), another spelling (dtypes, compile), may be `auto` (LEFT_OPEN), hold for every run (even_tokens), or are for
debugging a model by hand (check_inputs)."""


class PolicyKeys:
    """What is sharded, kept, recomputed, cast and compiled. A key that is auto is chosen for the device, and where the
    memory of a GPU matters, by the planner.

    These are the methods of `PolicySection`, and the keys with another spelling than in `Policy`.
    """

    dtype: str
    """Dtype of matrix products, activations and messages; auto is bf16 on a GPU and fp32 on the CPU. Weights are fp32,
    or fp64 with fp64."""
    reduce_dtype: str | None
    router_dtype: str
    compile: str | bool
    """Whether to compile the computation between collectives; auto compiles on a GPU."""

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of the parameters."""
        return torch.float64 if self.dtype == "fp64" else torch.float32

    def candidates(self, overlap: Overlap) -> list[Policy]:
        """Return the policies that these keys leave open, the one that needs no reason first."""
        policy = Policy(
            overlap=overlap,
            compute_dtype=DTYPES[self.dtype],
            reduce_dtype=None if self.reduce_dtype is None else DTYPES[self.reduce_dtype],
            router_dtype=DTYPES[self.router_dtype],
            compile=self.compile is True,
            even_tokens=True,
            **{name: getattr(self, name) for name in POLICY_KEYS},
        )
        given = {name: getattr(self, name) for name in LEFT_OPEN}
        values = [LEFT_OPEN[name] if value == AUTO else (value,) for name, value in given.items()]
        found = [replace(policy, **dict(zip(given, chosen, strict=True))) for chosen in product(*values)]
        found[-1].require_offload()  # the last needs the least memory: blocks run again, unless the keys say otherwise
        return [each for each in found if each.runs_blocks_again or not each.offload]


PolicySection = make_dataclass(
    "PolicySection",
    [
        ("dtype", Literal["auto", "fp32", "bf16", "fp64"], "auto"),
        ("reduce_dtype", Dtype | None, field_of(Policy)),
        ("router_dtype", Literal["fp32", "fp64"], field_of(Policy, "fp32")),
        *((name, get_type_hints(Policy)[name], field_of(Policy, default)) for name, default in POLICY_KEYS.items()),
        *((name, Literal["auto"] | get_type_hints(Policy)[name], field_of(Policy, AUTO)) for name in LEFT_OPEN),
        ("compile", Literal["auto"] | bool, "auto"),
    ],
    bases=(PolicyKeys,),
    namespace={"__doc__": PolicyKeys.__doc__},
    frozen=True,
)

# Before Python 3.12 make_dataclass says "types", where pickle does not find the classes.
ModelSection.__module__ = GridSection.__module__ = PolicySection.__module__ = __name__


@dataclass(frozen=True, slots=True)
class SourceSection:
    """Text or tokens to train on, and their share of the samples."""

    path: str
    """`standard-library`, a text, .jsonl, .jsonl.gz or .parquet file, a folder of them, a .tokens file, a .bin
    file of Megatron, nanoGPT or llm.c."""
    weight: float = 1.0
    """Share of the samples, as a number in proportion to the weights of the other sources."""
    eod: int | None = None
    """The id that ends a document, if the file does not name one."""
    column: str = "text"
    """The key in lines of .jsonl files, and the column of .parquet files, that has the text."""

    def __post_init__(self) -> None:
        if not 0 < self.weight < inf:
            raise ValueError(f"weight={self.weight} must be above 0; to leave a source out, remove it")


@dataclass(frozen=True, slots=True)
class LoraSection:
    """LoRA: the linear layers of a reference model get pairs of narrow matrices, and only those are trained."""

    rank: int = 0
    """The number of features between the two matrices of a pair; 0 trains all weights instead."""
    alpha: float = 16.0
    """A number: what a pair computes is multiplied by alpha / rank."""
    dropout: float = 0.0
    """The share of a pair's input that is dropped in training."""
    targets: tuple[str, ...] = ()
    """The linear layers that get pairs: some of q, k, v, out, gate, up, down; by default all of the model's."""

    def __post_init__(self) -> None:
        require_at_least(self, rank=0)
        if self.rank:
            self.build()

    def build(self) -> LoraConfig | None:
        """Return the pairs of the model, None if all weights are trained."""
        return LoraConfig(self.rank, self.alpha, self.dropout, self.targets) if self.rank else None


@dataclass(frozen=True, slots=True)
class DataSection:
    """What the run trains and evaluates on."""

    sources: tuple[SourceSection, ...] = (SourceSection("standard-library"),)
    """The texts or token files to train on."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face tokenizer.json."""
    eod: str | int | None = None
    """The token that ends a document, or its id, if the tokenizer.json has an unusual name for it."""
    documents: bool = False
    """Whether attention stays inside each of the documents that share a row."""
    pack: Literal["windows", "whole"] = "windows"
    """What rows consist of: windows of batch.seq tokens, in which documents begin and end anywhere; or whole documents,
    which fill bags of several rows, so that they may be longer than batch.seq, and are kept apart."""
    bag_rows: int | None = None
    """The rows of batch.seq tokens in a bag of whole documents; by default all that a place has in a micro-batch, but
    no more than a model has learned positions for. Longer documents are cut. Runs with equal bags read equal
    batches."""
    held_out: float = 0.01
    """The share of every source, at its end, that is only used for evaluation."""
    changed: Literal["refuse", "accept"] = "refuse"
    """What to do if a run resumes and the content of a source is not the one that it was trained on. accept applies to
    one command: the run's folder stores refuse."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources is empty; give at least one, such as standard-library")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out={self.held_out} must be at least 0 and below 1")
        require_at_least(self, bag_rows=1)

    @property
    def apart(self) -> bool:
        """Whether attention stays inside documents."""
        return self.documents or self.pack == "whole"


@dataclass(frozen=True, slots=True)
class PipelineSection:
    """The stages of a grid with a pipe axis, and the order in which they work. The other grids have no such keys."""

    schedule: str = AUTO
    """The order in which pipe ranks work on micro-batches: gpipe, 1f1b, interleaved, looped-bfs, zb-h1, v-half, zb-v,
    blocks:u with u micro-batches in a block, found, which searches for one, or a .csv file in the format of
    torch.distributed.pipelining. auto is 1f1b for one stage per rank, else interleaved, or found on waves."""
    chunks: int | None = None
    """Number of stages of each pipe rank; by default as many as the schedule needs, which is 1 for most."""
    placement: Literal["loop", "wave"] | None = None
    """Which pipe rank holds which stage: loop deals them out from the first rank to the last, again for every chunk;
    wave goes there and back, so that neighbouring chunks share a rank. By default that of the schedule, else loop."""
    cuts: tuple[int, ...] = ()
    """The number of the first unit of each stage, for stages of unequal sizes. Unit 0 is the embedding, unit 1 the
    first layer, and the unit after the last layer the head. By default stages have equally many layers."""
    recompute: tuple[Recompute, ...] = ()
    """What each stage computes again in backward: a value for every stage, in place of policy.recompute."""

    def __post_init__(self) -> None:
        require_at_least(self, chunks=1)
        if self.is_file or self.schedule in (AUTO, FOUND):
            return
        kind, _, size = self.schedule.partition(":")
        if self.schedule not in BUILDERS and not (kind == "blocks" and size.isdecimal() and int(size) > 0):
            known = (AUTO, FOUND, *NAMES)
            raise ValueError(
                f"schedule={self.schedule!r} is no schedule{nearest(self.schedule, known)}; choose from "
                f"{', '.join(known)}, or give the path of a .csv file"
            )

    @classmethod
    def of(cls, stages: Stages, schedule: str | Schedule) -> PipelineSection:
        """Return the section that gives a model these stages and this schedule."""
        found = cls(cuts=stages.cuts[:-1], recompute=cast("tuple[Recompute, ...]", stages.recompute))
        if isinstance(schedule, Schedule):  # it says which rank holds which stage
            return replace(found, schedule=to_csv(schedule))
        loops = stages.placement == place("loop", stages.pipe, stages.chunks)
        placement = "loop" if loops else "wave"
        return replace(found, schedule=schedule, chunks=stages.chunks, placement=placement)

    @property
    def is_file(self) -> bool:
        """Whether the schedule is read from a file, or from the text of one, which has commas."""
        return self.schedule.endswith(".csv") or "," in self.schedule

    @property
    def given(self) -> dict[str, Any]:
        """The keys that differ from their defaults."""
        return {
            each.name: value for each in fields(self) if (value := getattr(self, each.name)) not in (each.default, ())
        }

    def build(self, layers: int, pipe: int) -> tuple[Stages | None, str | Schedule]:
        """Return the stages of a model with so many layers on this many pipe ranks, and their schedule or its name."""
        if pipe == 1:
            for name, value in self.given.items():
                raise ValueError(
                    f"{name}={value!r} needs a grid with pipe ranks; add pipe=2 to --grid, or leave it out"
                )
            return None, AUTO
        schedule = read_schedule(self.schedule) if self.is_file else self.schedule
        placement = self._placement(schedule, pipe)
        cuts = self._cuts(layers, placement)
        if self.recompute and len(self.recompute) != len(placement):
            raise ValueError(
                f"recompute has {len(self.recompute)} values, but there are {len(placement)} stages; give one for each"
            )
        stages = Stages(cuts, placement, self.recompute)
        for rank in range(pipe):
            if not any(map(stages.units, stages.of_rank(rank))):
                way = "give it one with cuts" if self.cuts else f"use pipe={layers} or less"
                raise ValueError(f"pipe={pipe} leaves pipe rank {rank} without any of the {layers} layers; {way}")
        return stages, schedule

    def _placement(self, schedule: str | Schedule, pipe: int) -> tuple[int, ...]:
        """Return the pipe rank of every stage."""
        if isinstance(schedule, Schedule):
            for name in ("chunks", "placement"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)}, but {self.schedule} says which rank holds which stage; leave "
                        f"{name} out"
                    )
            if schedule.pipe != pipe:
                raise ValueError(
                    f"schedule={self.schedule} is for {schedule.pipe} pipe ranks, but the grid has pipe={pipe}; change "
                    "one of them"
                )
            return schedule.placement
        least = BUILDERS[schedule][1].start if schedule in BUILDERS else 1
        chunks = self.chunks or max(least, len(self.cuts) // pipe)
        if self.placement is None and schedule in BUILDERS:
            return named(schedule, pipe, chunks, 1).placement
        return place(self.placement or "loop", pipe, chunks)

    def _cuts(self, layers: int, placement: tuple[int, ...]) -> tuple[int, ...]:
        """Return the first unit of every stage, and the number of units."""
        stages, units = len(placement), layers + 2
        if not self.cuts:
            return Stages.even(layers, stages).cuts
        if len(self.cuts) != stages:
            raise ValueError(
                f"cuts={list(self.cuts)} are the first units of {len(self.cuts)} stages, but there are {stages}; give "
                "as many, or change chunks"
            )
        if self.cuts[0] != 0 or self.cuts[-1] > units or sorted(self.cuts) != list(self.cuts):
            raise ValueError(
                f"cuts={list(self.cuts)} must begin with 0, the embedding, not decrease, and not exceed {units}: the "
                f"model has {units} units, embedding and head among them"
            )
        return (*self.cuts, units)


@dataclass(frozen=True, slots=True)
class BatchSection:
    """The size of a step."""

    rows: int = 0
    """Sequences per step, over all ranks and micro-batches. 0 chooses them by the size of the model and the device."""
    seq: int = 0
    """Tokens per sequence. 0 stands for as many as the model was made for, on the CPU for 128 at most."""
    micro_steps: int = 0
    """Micro-batches per step. They run one after another, and their gradients accumulate. 0 lets the planner choose as
    many as the memory of a GPU asks for, on the CPU 1, and with pipe ranks at least two for each of them."""

    def __post_init__(self) -> None:
        require_at_least(self, rows=0, seq=0, micro_steps=0)
        if max(self.rows, self.seq, self.tokens) > MOST_TOKENS or self.micro_steps > MOST_MICRO_STEPS:
            raise ValueError(
                f"rows={self.rows}, seq={self.seq}, micro_steps={self.micro_steps}: a step has at most {MOST_TOKENS} "
                f"tokens and {MOST_MICRO_STEPS} micro-batches"
            )
        if self.micro_steps and self.rows % self.micro_steps:
            near = -(-self.rows // self.micro_steps) * self.micro_steps
            raise ValueError(
                f"rows={self.rows} cannot be split into micro_steps={self.micro_steps} equal parts; use {near} rows"
            )

    @property
    def tokens(self) -> int:
        return self.rows * self.seq


@dataclass(frozen=True, slots=True)
class OptimizerSection:
    """The optimizer and the schedule of its learning rate."""

    name: str = "adamw"
    """`adamw`, `sgd` with a momentum of 0.9, or `package.module:Class`: an optimizer of torch's interface that takes
    parameters and lr, and treats each element of a parameter by itself."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for sgd or another class, such as momentum; AdamW has keys of its own."""
    learning_rate: float | None = None
    """The highest learning rate; by default it follows from the number of parameters."""
    warmup: int | None = None
    """Steps of linear warmup; by default one in fifty, but at least 10 and at most 2000."""
    schedule: Decay = "cosine"
    """The learning rate after warmup: cosine decays until the last step, stable keeps it and decays linearly at the
    end (WSD), constant keeps it."""
    decay: float = 0.2
    """The share of the steps, at the end, in which a stable schedule decays."""
    floor: float = 0.1
    """The learning rate of the last step, as a share of the highest; a constant schedule has none."""
    base_rows: int | None = None
    """The batch.rows for which the learning rate is meant. With more rows the learning rate grows linearly."""
    beta1: float = 0.9
    """AdamW's share of the old mean in each new mean of gradients."""
    beta2: float = 0.95
    """AdamW's share of the old mean in each new mean of squared gradients."""
    eps: float = 1e-8
    """Number that AdamW adds to the root of the mean square, against division by zero."""
    weight_decay: float = 0.1
    """Share of a weight that a step removes, times the learning rate; applies to matrices, not to biases and norms."""
    clip: float = 1.0
    """Gradients with a larger norm are scaled down to this norm; inf turns clipping off."""

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"clip={self.clip} must be above 0; inf turns clipping off")
        require_at_least(self, learning_rate=0, eps=0, weight_decay=0, base_rows=1)
        if self.name not in ("adamw", "sgd") and ":" not in self.name:
            near = nearest(self.name, ["adamw", "sgd"])
            raise ValueError(f"name={self.name!r} is no optimizer{near}; give adamw, sgd or package.module:Class")
        if self.name == "adamw" and self.options:
            raise ValueError(
                f"options={self.options} are for other optimizers; adamw has the keys beta1, beta2, eps, weight_decay"
            )
        defaults = {each.name: each.default for each in fields(OptimizerSection)}
        for name in ("beta1", "beta2", "eps"):
            if self.name != "adamw" and getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(self, name)} is a key of adamw; give {self.name} its own in options")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class TrainSection:
    """How long the run trains, where it writes, and how often it evaluates."""

    steps: int = 100
    """Optimizer steps of the whole run. The schedule of the learning rate ends with the last of them."""
    epochs: float | None = None
    """Passes over the training data, in place of steps: steps becomes as many as they take, rounded up."""
    minutes: float | None = None
    """Minutes of wall time after which the run ends as if its steps were over, with an evaluation and a checkpoint;
    by default it has no limit. Time counts from the start of the command, including restarts of its ranks; a run that
    is resumed has all its minutes again."""
    seed: int = 0
    """Whole number from which initial weights, dropout and the order of the data follow."""
    out: str | None = None
    """The run's folder; by default runs/MODEL-DATE-TIME."""
    evaluate_every: int = 50
    """Steps between evaluations on the held-out data; the last step is also followed by one. 0 never evaluates."""
    evaluate_batches: int = 8
    """Batches of batch.rows sequences per evaluation."""
    max_skipped: int = 5
    """The run stops after this many skipped steps in a row; see watch.not_finite and watch.spikes."""
    callbacks: tuple[str, ...] = ()
    """Classes, each `package.module:Class`, with methods that rank 0 calls after steps, evaluations, checkpoints and at
    the end; `callbacks.py` lists them."""
    graph: Literal["auto", "off"] = "auto"
    """Whether steps on a GPU are recorded as a CUDA graph and replayed; auto does it unless something forbids it or
    replays are slower, and then says what."""

    def __post_init__(self) -> None:
        require_at_least(self, steps=1, evaluate_every=0, evaluate_batches=1, max_skipped=1)
        for name in ("epochs", "minutes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name}={value} must be above 0 and finite; leave it out for no such limit")


@dataclass(frozen=True, slots=True)
class CheckpointSection:
    """When the whole training state is saved to the run's folder, and which checkpoints are kept."""

    save: bool = True
    """Whether to save at intervals and when the run ends, also after Ctrl-C, SIGTERM and SIGHUP."""
    minutes: float | None = None
    """Minutes between checkpoints; 0 saves only at the end and after every so many steps, if `every` is set. By default
    5 to 30: fewer where a save takes little time, or where so many devices train that one of them fails often."""
    every: int = 0
    """Steps between checkpoints; 0 sets no number of steps."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept."""
    keep_every: int = 0
    """Checkpoints of steps that are multiples of this number are never removed; 0 turns this rule off."""
    asynchronous: bool = True
    """Whether training continues while a copy of the state is written."""

    def __post_init__(self) -> None:
        require_at_least(self, minutes=0, every=0, keep_last=1, keep_every=0)


@dataclass(frozen=True, slots=True)
class LogSection:
    """The places of metrics besides the run's folder, and what MFU is measured against."""

    tensorboard: Literal["auto"] | bool = "auto"
    """auto logs to TensorBoard if the package tensorboard is installed."""
    wandb: str | None = None
    """The Weights & Biases project to log to."""
    peak_flops: float | None = None
    """Peak FLOP/s of one device, for MFU and HFU; by default from its data sheet, on the CPU measured."""
    companions_every: int = 100
    """Steps between records of how many tokens chose both of two experts, which `fourfold experts place` reads; of a
    mixture of experts only. The last step is followed by one too. 0 counts none."""

    def __post_init__(self) -> None:
        require_at_least(self, companions_every=0)
        if self.peak_flops is not None and not 0 < self.peak_flops < inf:
            raise ValueError(f"peak_flops={self.peak_flops} must be above 0 and finite")


@dataclass(frozen=True, slots=True)
class WatchSection:
    """What is watched during training, and what happens when something is wrong."""

    deadline: float = 300.0
    """Seconds that a rank may wait for a collective. After that all ranks stop and report which rank was missing. inf
    waits forever."""

    start: float = START_SECONDS
    """Seconds for every wait before the first step is done: to join the job, and for a rank that is stopped or gone. A
    rank that works, such as on preparing text, has 72 times as many. inf waits forever."""

    replicas_every: int = 100
    """Steps between checks that replicas of the parameters and the optimizer state are equal bit for bit. They are also
    compared before every checkpoint and at the end; 0 compares them only then."""

    not_finite: Literal["skip", "roll_back", "stop"] = "skip"
    """What to do about a step with gradients that are not finite. skip leaves the parameters unchanged, and ends the
    run after train.max_skipped steps in a row; roll_back resumes from the newest checkpoint and skips the data since;
    stop ends the run."""

    spikes: Literal["tell", "skip", "roll_back", "stop"] = "tell"
    """What to do about a step with a spike in the loss: the same actions, or tell, which only reports it."""

    spike_above: float = 8.0
    """A loss is a spike if it is this many standard deviations above the median of the last 64 losses; 0 never finds
    one."""

    grace: float = 600.0
    """Seconds that the run has to end after Ctrl-C, SIGTERM or SIGHUP, including its last checkpoint."""

    def __post_init__(self) -> None:
        for name in ("deadline", "start", "grace"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0; inf waits forever")
        if not 0 <= self.spike_above < inf:
            raise ValueError(f"spike_above={self.spike_above} must be at least 0 and finite; 0 turns it off")
        require_at_least(self, replicas_every=0)


@dataclass(frozen=True, slots=True)
class PlanSection:
    """What the planner does for the run."""

    machine: str = AUTO
    """A packaged machine or the path of a machine file; auto is the packaged machine most like this one."""
    compare: Literal["auto"] | bool = "auto"
    """Whether to predict the step time at the start, compare it with the first measured steps, and write the machine
    file corrected by them into the run's folder. auto does so if `machine` is a file, such as `fourfold calibrate`
    writes: a packaged machine is not the one at hand."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The config of a training run; its fields are the sections."""

    model: ModelSection = field(default_factory=ModelSection)
    grid: GridSection = field(default_factory=GridSection)
    policy: PolicySection = field(default_factory=PolicySection)
    overlap: Overlap = field(default_factory=Overlap)
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    data: DataSection = field(default_factory=DataSection)
    batch: BatchSection = field(default_factory=BatchSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    lora: LoraSection = field(default_factory=LoraSection)
    train: TrainSection = field(default_factory=TrainSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    log: LogSection = field(default_factory=LogSection)
    plan: PlanSection = field(default_factory=PlanSection)
    watch: WatchSection = field(default_factory=WatchSection)

    @property
    def schedule(self) -> LearningRateSchedule:
        """The schedule of the learning rate."""
        section = self.optimizer
        if section.learning_rate is None or section.warmup is None:
            raise RuntimeError("this config is not resolved; `planning.resolve` fills in learning rate and warm-up")
        return LearningRateSchedule(
            section.learning_rate,
            self.train.steps,
            warmup=section.warmup,
            shape=section.schedule,
            decay=section.decay,
            floor=section.floor,
            batch=None if section.base_rows is None else self.batch.rows,
            base_batch=section.base_rows,
        )

    def build_policy(self) -> Policy:
        """Return the policy that the model takes: the sections policy, overlap and pipeline together."""
        return self.candidates()[0]

    def candidates(self) -> list[Policy]:
        """Return the policies that the config leaves open, the one that needs no reason first.

        They have the stages and the schedule of a pipeline if the grid is known.
        """
        policies = self.policy.candidates(self.overlap)
        if self.grid.auto or self.model.is_own:
            return policies
        with naming("pipeline"):
            stages, schedule = self.pipeline.build(self.model.build().layers, self.grid.shape.sizes[PIPE])
        return [replace(policy, stages=stages, schedule=schedule) for policy in policies]

    def toml(self, comments: Mapping[str, str] | None = None, *, explained: bool = False, unset: bool = True) -> str:
        """Return the config as the text of a TOML file.

        Above keys stand their meanings if `explained`, and these comments, by the full names of keys. Keys that are
        not set are named in comments if `unset`, and left out otherwise, as tables without keys are then.
        """
        table = to_table(self) if unset else without_unset(to_table(self))
        return to_toml(table, {**(comments_of(TrainConfig) if explained else {}), **(comments or {})})

    def stored(self, folder: Path) -> TrainConfig:
        """Return the config as the run's folder keeps it.

        It does not name the folder, so that training it again makes another one. A tokenizer in the folder is named
        without its path, so that the folder can be moved; so is a schedule from a file, of which the folder has a copy.
        Changed data is accepted only by the command that says so.
        """
        name, data = Path(self.data.tokenizer), self.data
        if self.data.tokenizer != BYTES and name.expanduser().parent.resolve() == folder.resolve():
            data = replace(data, tokenizer=name.name)
        data = replace(data, changed="refuse")  # what was accepted once must not hide the next change
        pipeline = replace(self.pipeline, schedule=SCHEDULE_FILE) if self.pipeline.is_file else self.pipeline
        return replace(self, data=data, pipeline=pipeline, train=replace(self.train, out=None))


def read_config(
    path: Path | None,
    changes: Sequence[tuple[str, Any]] = (),
    *,
    forget_grid: bool = False,
    forget_stages: bool = False,
) -> TrainConfig:
    """Return the config of a TOML file, or the defaults, with some keys changed, such as `("batch.rows", 32)`.

    `forget_grid` ignores the sizes of the grid in the file, and `forget_stages` then also its stages and its schedule,
    if the number of pipe ranks changes.
    """
    table: dict[str, Any] = {}
    if path is not None:
        if not path.is_file():
            if path.is_dir():
                raise IsADirectoryError(
                    f"{path} is a folder; give a config, CONFIG.toml, or resume the run in it with --resume {path}"
                )
            raise FileNotFoundError(f"the config {path} does not exist; give the path of a TOML file")
        try:
            table = parse_toml(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path} is not valid TOML: {error}") from error
        with naming(str(path)):
            table = upgrade_config(table)
        data = table.get("data")
        if isinstance(data, dict) and isinstance(data.get("tokenizer"), str):
            data["tokenizer"] = beside(data["tokenizer"], path.parent)
        pipeline = table.get("pipeline")
        if isinstance(pipeline, dict) and str(pipeline.get("schedule")).endswith(".csv"):
            pipeline["schedule"] = beside(pipeline["schedule"], path.parent)
    # The order of the axes stays: it says how ranks lie on the machine, whatever the sizes.
    if forget_grid and isinstance(table.get("grid"), dict):
        if forget_stages and (table["grid"].get(PIPE) or 1) != dict(changes).get(f"grid.{PIPE}", 1):
            table.pop("pipeline", None)
        table["grid"] = {key: value for key, value in table["grid"].items() if key not in (*AXES, *GIVEN_BESIDES)}
    for key, value in changes:
        _put(table, key, value)
    with naming("" if path is None else str(path)):
        return parse(TrainConfig, table)


def beside(name: str, folder: Path) -> str:
    """Return the path of the tokenizer, or of the schedule, that a config in this folder names.

    A bare name, or a path that no longer exists, means the file of that name beside the config, if there is one. So a
    run with a tokenizer of its own can be moved.
    """
    path, own = Path(name).expanduser(), folder / Path(name).name
    return str(own) if name != BYTES and own.is_file() and (path.name == name or not path.is_file()) else name


def table_of(section: str) -> list[str]:
    """Return the keys of a section."""
    return [field.name for field in fields(getattr(TrainConfig(), section))]


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    sections = [section.name for section in fields(TrainConfig)]
    section, dot, name = key.partition(".")
    name, inside, option = name.partition(".")  # such as model.options.width
    if inside and not (section in sections and name == "options" and name in table_of(section)):
        name, inside = f"{name}.{option}", ""
    unknown = section not in sections or name not in table_of(section)
    if unknown and (answer := explain_synonym(key, value)):
        raise ValueError(answer)
    if not dot and section in sections:
        raise ValueError(
            f"{key!r} is a section; write {key}.KEY=value with one of its keys, {', '.join(table_of(key))}"
        )
    if not dot or section not in sections:
        near = nearest(section, sections)
        if homes := [each for each in sections if not dot and key in table_of(each)]:
            near = f" (did you mean {' or '.join(f'{home}.{key}' for home in homes)}?)"
        raise ValueError(f"{key!r} is not a key{near}; write section.key=value; the sections are {', '.join(sections)}")
    if unknown and (homes := [f"{each}.{name}" for each in sections if name in table_of(each)]):
        raise ValueError(f"unknown key {key} (did you mean {' or '.join(homes)}?)")
    keys = table.setdefault(section, {})
    if inside and isinstance(keys, dict):
        keys, name = keys.setdefault(name, {}), option
    if isinstance(keys, dict):  # otherwise `parse` reports the error
        keys[name] = value
