"""The dry run: one rank's training step of the real code on meta tensors, under a fake process group of any size.

No memory, no communication, no other rank. The collectives come from the grid's ledger, the computation between them
from a dispatch mode, in the host's order. Of two steps the second is written down: the first records the order in
which the overlap engine gathers ahead, so that the program is that of a steady run. Kernels are those of eager code,
one for each operation, so their bytes are an upper bound of what compiled regions and a device's fused kernels move.

Any module may be run: a reference model by its config, a function that builds layers on a grid, or a plain module,
which is replicated over data and whose gradients are summed in buckets as DDP does.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fourfold import comm
from fourfold.comm import Pending
from fourfold.gradients import Bucket, accumulate, fill_buckets
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective
from fourfold.models.config import ModelConfig
from fourfold.models.open import ModelDefinition, build_on_meta, is_plain
from fourfold.nn.loss import count_targets
from fourfold.optim import AdamW
from fourfold.planner.caught import Caught
from fourfold.planner.work import Launch, Work
from fourfold.policy import Policy
from fourfold.wrap.grid_tensor import RULES, grid_tensors_in

MAX_NORM = 1.0


@dataclass(frozen=True, slots=True)
class Dry:
    """What one rank does in a training step."""

    program: list[Work]
    kept_bytes: int
    """What the first forward pass makes and keeps for backward, weights gathered ahead included."""
    peak_bytes: int
    """The most that ever exists at once: parameters, gradients, optimizer state where there is one, and all else."""
    parameters: int
    """Of the whole model."""

    @property
    def records(self) -> list[Collective]:
        return [work.record for work in self.program if isinstance(work, Launch)]


def dry_run(
    build: ModelDefinition,
    shape: Shape,
    *,
    rank: int = 0,
    rows: int,
    seq: int,
    policy: Policy = Policy(),
    micro_steps: int = 1,
    optimizer: bool = False,
) -> Dry:
    """A step of `micro_steps` times `rows` rows of this rank's (data, z) place, `seq` tokens each.

    With `optimizer` gradients are clipped and AdamW steps, and the program runs from one step of it to the next:
    parameters that a sharded optimizer stepped are on their way when it begins.
    """
    if rows < 1 or seq < 1 or micro_steps < 1:
        raise ValueError(f"rows={rows}, seq={seq}, micro_steps={micro_steps}: a step has at least 1 of each")
    with fake_ranks(shape, rank) as grid, grid.ledger.events() as events:
        module = build_on_meta(build, grid, policy)
        step = (_Plain if is_plain(module) else _Layers)(module, grid, policy, rows, seq, micro_steps)
        caught = Caught(events, shape)
        step.prepare(caught.mark if optimizer else None)
        caught.hold([step.tokens, *module.parameters(), *module.buffers(), *step.state()])
        with caught, nullcontext() if isinstance(build, ModelConfig) else foreign_code():
            step.run(lambda _: None)
            if not optimizer:
                caught.mark()
            before = caught.nbytes
            kept: list[int] = []
            step.run(lambda micro_step: kept.append(caught.nbytes - before) if micro_step == 0 else None)
            if not optimizer:
                caught.mark()
        program, peak = caught.between_marks()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Dry(program, kept[0], peak, parameters)


@contextmanager
def fake_ranks(shape: Shape, rank: int) -> Iterator[Grid]:
    """The grid of one rank of so many, none of which exist."""
    shape.coords(rank)  # refuses a rank that is not on the grid
    if dist.is_initialized():
        raise RuntimeError(
            f"a dry run of {shape.world} ranks makes a process group of its own, but this process has joined one of "
            f"{dist.get_world_size()} ranks already; run it in another process, or before the grid is made"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.world)
    try:
        yield Grid.of_shape(shape, device="cpu")
    finally:
        dist.destroy_process_group()


@contextmanager
def foreign_code() -> Iterator[None]:
    """Code that was not written for a dry run makes its tensors on the meta device and takes the fused attention."""
    with torch.device("meta"), FusedAttention():
        yield


class FusedAttention(TorchFunctionMode):
    """On the meta device torch would compose attention from plain products, which no device does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if grid_tensors_in((args, kwargs)):  # heads of a parallelised module
            on_parts = RULES[func](fused_attention, args, kwargs)
            return func(*args, **kwargs) if on_parts is NotImplemented else on_parts
        return fused_attention(*args, **kwargs)


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch's function of the same arguments, as the kernel that the meta device has: the CPU's."""
    if query.dim() != 4 or query.shape[-1] != value.shape[-1]:  # for which there is none
        composed = functional.scaled_dot_product_attention
        return composed(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


class _Step(ABC):
    """A training step of some module, again and again."""

    def __init__(self, model: nn.Module, grid: Grid, policy: Policy, rows: int, seq: int, micro_steps: int) -> None:
        self.model, self.grid, self.policy, self.micro_steps = model, grid, policy, micro_steps
        self.tokens = torch.zeros(rows, seq, dtype=torch.long, device="meta")
        self.optimizer: torch.optim.Optimizer | None = None

    @abstractmethod
    def prepare(self, on_step: Callable[[], None] | None) -> None:
        """With `on_step`, which is called when parameters have been stepped, there is an optimizer."""

    def state(self) -> Iterator[Tensor]:
        """Tensors of the optimizer, which are there from the start: torch makes them on devices that it lists."""
        if self.optimizer is not None:
            for parameter in (part for group in self.optimizer.param_groups for part in group["params"]):
                state = {name: torch.zeros_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {"step": torch.zeros((), device="meta"), **state}
                yield from self.optimizer.state[parameter].values()

    def run(self, after_forward: Callable[[int], None]) -> None:
        options = self.options()
        for index in range(self.micro_steps):
            with nullcontext() if index == self.micro_steps - 1 else self.accumulating():
                loss = self.model(self.tokens, self.tokens, **options)
                after_forward(index)
                loss.backward()
                del loss
        self.finish()
        self.model.zero_grad(set_to_none=True)

    def options(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def accumulating(self) -> AbstractContextManager[None]:
        """Around every micro-step but the last."""

    @abstractmethod
    def finish(self) -> None:
        """After the last backward pass."""


class _Stepping(AdamW):
    """AdamW that says when parameters have been stepped, before replicas are given each other's."""

    def __init__(self, model: nn.Module, on_step: Callable[[], None]) -> None:
        super().__init__(model, lr=1e-3)
        self.on_step = on_step

    def _gather(self) -> None:
        self.on_step()
        super()._gather()


class _Layers(_Step):
    """A model of layers on the grid, which sum their gradients themselves."""

    def prepare(self, on_step: Callable[[], None] | None) -> None:
        self.optimizer = None if on_step is None else _Stepping(self.model, on_step)

    def options(self) -> dict[str, Any]:
        if self.micro_steps == 1 or "count" not in inspect.signature(self.model.forward).parameters:
            return {}
        return {"count": count_targets(self.tokens.expand(self.micro_steps, -1, -1), self.grid)}

    def accumulating(self) -> AbstractContextManager[None]:
        return accumulate(self.model)

    def finish(self) -> None:
        if isinstance(self.optimizer, _Stepping):
            self.optimizer.clip_and_step(MAX_NORM)
            if not self.policy.shard_optimizer:
                self.optimizer.on_step()
            self.optimizer.zero_grad()


class _Plain(_Step):
    """A plain module, replicated: gradients are summed over data in buckets, in the order in which the first backward
    pass completes them, each bucket when its last gradient is there, and waited for when backward ends. Of the policy
    the size of buckets alone concerns it."""

    def prepare(self, on_step: Callable[[], None] | None) -> None:
        self.on_step = on_step
        self.names = {parameter: name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.parameters = {name: parameter for parameter, name in self.names.items()}
        self.ready: list[str] = []
        self.buckets: list[Bucket] = []
        self.flights: list[Pending[None]] = []
        self.last = True
        for parameter in self.names:
            parameter.register_post_accumulate_grad_hook(self._complete)
        if on_step is not None:
            self.optimizer = torch.optim.AdamW(self.parameters.values(), fused=True)

    def _complete(self, parameter: Tensor) -> None:
        if self.last:
            self.ready.append(self.names[parameter])  # type: ignore[index]
            while len(self.flights) < len(self.buckets):
                bucket = self.buckets[len(self.flights)]
                if not set(bucket.names) <= set(self.ready):
                    return
                self._launch(bucket)

    def _launch(self, bucket: Bucket) -> None:
        gradients = [self.parameters[name].grad for name in bucket.names]
        sums = [gradient for gradient in gradients if gradient is not None]
        self.flights.append(comm.all_reduce_together(sums, self.grid, "data", label=bucket.label))

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self.last = False
        try:
            yield
        finally:
            self.last = True

    def finish(self) -> None:
        if not self.buckets:
            completed = [(name, self.parameters[name]) for name in reversed(self.ready)]
            sizes = [(name, ("data",), parameter.dtype, parameter.nbytes) for name, parameter in completed]
            self.buckets = fill_buckets(sizes, self.policy.bucket_bytes)
        for bucket in self.buckets[len(self.flights) :]:
            self._launch(bucket)
        for pending in self.flights:
            pending.wait()
        self.flights.clear()
        self.ready.clear()
        if self.optimizer is not None and self.on_step is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), MAX_NORM)
            self.optimizer.step()
            self.on_step()
