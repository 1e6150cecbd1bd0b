"""The policies of a model: what is sharded, kept and cast, and how much communication overlaps with computation.

Policies are frozen dataclasses. Only the two dtypes and the number of halves may change a result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast, get_args

import torch

from fourfold.context_way import ContextWay
from fourfold.schedule.action import Schedule
from fourfold.schedule.stages import Stages
from fourfold.schedule.text import read_schedule

Activations = Literal["sharded", "replicated"]
Recompute = Literal["none", "attention", "block"]
Gathering = Literal["use", "block", "step"]
Placing = Literal["auto", "rows", "documents"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much communication overlaps with computation. Only `halves` may change a result, by rounding."""

    prefetch: bool = True
    """Gather weights over z before their use, in the order recorded in the first pass."""
    defer: bool = True
    """Reduce weight gradients over z behind the rest of backward."""
    wgrad_behind_messages: bool = True
    """In backward compute a weight gradient while the collective that the input gradient needs is in flight."""
    halves: int | None = None
    """Number of parts, 1 or 2, of the local batch that take turns, so that the messages of one over x and y, or to
    experts, overlap with the products of the other. By default 2 if there are two rows and that pays off, else 1. With
    2, a single row is cut as well: attention of its second half also reads the keys of the first."""
    reduce_early: bool = True
    """Sum gradients over data as soon as they are final, and with a sharded optimizer gather the stepped parameters
    behind the next forward. Reading such a parameter waits for it; tensors taken from it before the step do not."""
    receive_ahead: bool = True
    """In a pipeline on the CPU: begin to receive a message one message before it is needed. Without it, and on a GPU,
    where a receive that waits for its message slows down products, it begins when by the schedule that is sent."""
    bytes_in_flight: int | None = None
    """Bound on the bytes of prefetched weights, and on those of gradients being reduced; by default twice the largest
    message."""
    joint_bytes: int = 16 << 20
    """With `prefetch`, weights over z that are used one after another are gathered in one message until it has this
    many bytes, or half of what may be in flight; with `defer` their gradients are reduced so. Latency decides about
    smaller messages. 0 sends each by itself."""

    def __post_init__(self) -> None:
        if self.halves is not None and self.halves not in (1, 2):
            raise ValueError(f"halves={self.halves} must be 1 or 2, or None for the policy to choose")
        if self.bytes_in_flight is not None and self.bytes_in_flight < 1:
            raise ValueError(f"bytes_in_flight={self.bytes_in_flight} must be at least 1, or None")
        if self.joint_bytes < 0:
            raise ValueError(f"joint_bytes={self.joint_bytes} must be a number of bytes, or 0")

    def most_in_flight(self, largest: int) -> int:
        """Return the bytes that may be in flight. Two messages keep a link busy: one travels while one is used."""
        return 2 * largest if self.bytes_in_flight is None else self.bytes_in_flight

    def least_joint(self, largest: int) -> int:
        """Return the bytes with which a message is launched: one must travel while one is used."""
        return min(self.joint_bytes, self.most_in_flight(largest) // 2)

    def receives_ahead(self, device: str) -> bool:
        """Return whether a kind of device receives messages between stages one message ahead."""
        return self.receive_ahead and device != "cuda"

    @classmethod
    def off(cls, *, halves: int = 1) -> Overlap:
        """Return the policy without overlap: every collective is waited for where it is launched."""
        return cls(
            prefetch=False,
            defer=False,
            wgrad_behind_messages=False,
            halves=halves,
            reduce_early=False,
            receive_ahead=False,
        )


class Halves(NamedTuple):
    """The number of parts that a batch is cut into, and the reason for it in words."""

    number: int
    reason: str


WORTH_HIDING_NBYTES = 1 << 20
"""If the message of half a batch is smaller than this, latency dominates, and two messages would pay it twice."""


def choose_halves(policy: Policy, rows: int, nbytes: int, whole: str) -> Halves:
    """Decide the number of halves for `rows` rows whose messages over x or y, or to experts, have up to `nbytes` bytes.

    `whole` says why a model cannot cut a single row; it is empty if it can.
    """
    asked = policy.overlap.halves
    if policy.recompute == "attention":
        whole = whole or "recompute=attention runs the attention of a half again by itself"
    if rows < 2 and (whole or asked is None):
        return Halves(1, f"{rows} row is not cut: {whole or 'only if the policy says halves=2'}")
    if asked is not None:
        return Halves(asked, f"the policy says halves={asked}")
    if nbytes == 0:
        return Halves(1, "nothing is sent over x or y, or to experts")
    if nbytes // 2 < WORTH_HIDING_NBYTES:
        return Halves(1, f"messages over x or y, or to experts, of at most {nbytes} bytes are too small to be cut")
    return Halves(2, f"messages over x or y, or to experts, of {nbytes} bytes are worth hiding")


LEFT_OPEN: dict[str, tuple[Any, ...]] = {"recompute": ("none", "block")}
"""Fields of `Policy` that a run may leave to the planner, and the values to choose from, the fastest first."""
SAVES_MEMORY: dict[str, Any] = {"mlp_chunk": 2048, "offload": True}
"""Fields of `Policy` that save memory and little else, and the values that the planner tries where nothing fits without
them: products of 2,048 tokens are as fast as larger ones on a GPU."""
CHOICES: dict[str, Any] = {
    "activations": Activations,
    "recompute": Recompute,
    "gather_weights": Gathering,
    "assignment": Placing,
}
"""Fields of `Policy` that take one of a few words."""
LESS_MEMORY = (
    "policy.recompute=block, policy.loss_chunk, policy.mlp_chunk, policy.offload, more batch.micro_steps, or a grid "
    "with a larger z"
)
"""The keys of a run's config that lower its peak memory, for the error of a device that is out of memory."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is sharded, what is kept for backward, and in which precision."""

    activations: Activations = "sharded"
    """`sharded` cuts activations over all axes; `replicated` is the published algorithm, which cuts them less."""
    keep_gathered: bool = False
    """Keep the gathered input of a product for backward, instead of gathering it again."""
    keep_weights: bool = False
    """Keep weights gathered over z from forward to backward, instead of gathering them again."""
    gather_weights: Gathering = "use"
    """In `ff.forward_backward`: how often weights are gathered over z, for every use, once for passes of one stage that
    follow each other (block), or once in a step (step); they stay gathered meanwhile, in the dtype of the products."""
    keep_casts: bool = True
    """Keep this rank's shards in the dtype of the products where it differs from the parameters' dtype, and cast them
    once in a pass instead of before every use. Nothing is kept where the dtypes are equal."""
    recompute: Recompute = "none"
    """What backward computes again instead of keeping it: nothing, the inside of attention, or whole blocks."""
    offload: bool = False
    """With recompute of whole blocks: let their inputs, the residual stream, wait for backward in pinned host memory.
    They are copied behind computation, and about two of them are on the device at a time."""
    compute_dtype: torch.dtype | None = None
    """Dtype of gathered weights, activations and their messages; by default that of the parameters."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which weight gradients are reduced over z; by default that of the parameters."""
    router_dtype: torch.dtype = torch.float32
    """Dtype in which routers of mixtures compute logits and scores, fp32 or fp64, unless that of products is wider."""
    pad_experts: bool = False
    """Whether tokens are sent to experts on a fold in as many rows as the experts' capacity allows, empty ones among
    them. The host then waits for no counts, and recorded steps (CUDA graphs) can contain it."""
    loss_chunk: int = 0
    """Number of tokens per place whose logits exist at the same time; 0 stands for all. Limits the memory that a large
    vocabulary needs."""
    mlp_chunk: int = 0
    """Number of tokens per place that the MLP of a block computes at the same time; 0 stands for all. Hidden units then
    exist for one chunk, and backward computes them again. With two halves, each is cut into chunks."""
    shard_optimizer: bool = False
    """Shard gradients and optimizer state over data as well (ZeRO-1); `optim.AdamW` then gathers parameters."""
    bucket_bytes: int = 25 << 20
    """About the size in bytes of the messages in which gradients are summed; by default 25 MiB, as in torch's DDP."""
    compile: bool = False
    """Compile the computation between collectives: region by region, and where nothing travels inside a block (x, y and
    z are 1) all of it as one function."""
    overlap: Overlap = Overlap()
    """How much communication overlaps with computation."""
    stages: Stages | None = None
    """On a grid with a pipe axis: which layers each stage has, and which pipe rank holds it. By default every pipe rank
    holds one stage, with equally many layers."""
    schedule: str | Schedule = "auto"
    """The order in which pipe ranks work on micro-batches: a schedule, its name (`schedule.choose`), or the path of a
    .csv file, which is read at once."""
    assignment: Placing = "auto"
    """On a grid with context: which tokens each member of a context group holds. `rows` cuts every row alike;
    `documents` balances packed documents by their lengths; `auto` does so where the host knows them."""
    context_way: str = "auto"
    """How K and V travel inside a context group: gather, exchange, ring, ulysses:U, or ulysses:U+ring and so on
    (`context.move`); `auto` exchanges only what is read where that is less than half of everything, else gathers."""
    even_tokens: bool = False
    """Promise that all places along z have equally many tokens in every pass, as they have in the trainer. Then tokens
    may go to the embedding's table instead of the table to the tokens, where that sends fewer bytes. A first pass that
    breaks the promise is refused; later passes are not checked, and ranks would wait for each other forever."""
    check_inputs: bool = False
    """Check token ids on a GPU as well, which makes the host wait for them; on the CPU they are always checked."""

    def __post_init__(self) -> None:
        for name, kind in CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise ValueError(f"{name}={getattr(self, name)!r} is none of {get_args(kind)}")
        self._read_schedule()
        if self.context_way != "auto":
            ContextWay.parse(self.context_way)
        for name in ("compute_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name}={dtype!r} must be a floating-point dtype such as torch.bfloat16, or None")
        if self.router_dtype not in (torch.float32, torch.float64):
            raise ValueError(f"router_dtype={self.router_dtype!r} must be torch.float32 or torch.float64")
        for name in ("loss_chunk", "mlp_chunk"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be a number of tokens, or 0 for all at once")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={self.bucket_bytes} must be at least 1")

    def _read_schedule(self) -> None:
        if isinstance(self.schedule, str) and self.schedule.endswith(".csv"):
            object.__setattr__(self, "schedule", read_schedule(self.schedule))

    def of_stage(self, stage: int) -> Policy:
        """Return the policy of the blocks of a stage, whose recompute `stages` may name."""
        kinds = () if self.stages is None else cast("tuple[Recompute, ...]", self.stages.recompute)
        return replace(self, recompute=kinds[stage]) if kinds else self

    @property
    def runs_blocks_again(self) -> bool:
        """Whether a block keeps its input alone, and backward runs all of it again."""
        return self.recompute == "block"

    @property
    def keeps_for_backward(self) -> bool:
        """Whether backward reads the weights that forward has gathered."""
        return self.keep_weights or self.gather_weights == "step"

    def require_offload(self) -> None:
        """Refuse to offload if blocks do not run again: they keep more than their inputs then."""
        if self.offload and not self.runs_blocks_again:
            raise ValueError(
                f"offload=True with recompute={self.recompute!r}: what waits on the host is the input of blocks that "
                "run again in backward; use recompute='block', or offload=False"
            )

    def require_any_module(self) -> None:
        """Refuse options that only the reference models implement, for a model with other people's code."""
        if self.gather_weights != "use":
            raise ValueError(
                f"gather_weights={self.gather_weights!r} is for ff.forward_backward, which runs the reference models; "
                "use 'use', or keep_weights=True"
            )
        if self.overlap.halves not in (None, 1):
            raise ValueError(
                f"halves={self.overlap.halves}: a module's own code runs a batch as one; use halves=None or 1"
            )
        if self.loss_chunk:
            raise ValueError(
                f"loss_chunk={self.loss_chunk}: a module's own code makes all logits at once; use loss_chunk=0"
            )
        if self.mlp_chunk:
            raise ValueError(
                f"mlp_chunk={self.mlp_chunk}: a module's own code runs its MLP on all tokens; use mlp_chunk=0"
            )
        if self.offload:
            raise ValueError("offload=True works with the blocks of the reference models only; use offload=False")
        if self.recompute == "attention":
            raise ValueError("recompute='attention' works with the reference models only; use 'block' or 'none'")
