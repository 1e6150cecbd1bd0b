"""The dry run: one rank's training step of the real code on meta tensors, under a fake process group of any size.

It needs no memory, no communication and no other rank. The collectives come from the grid's ledger, the computation
between them from a dispatch mode, in the host's order:

    product      mm, addmm, bmm and similar, convolutions     `MatmulOp`, labelled by the ledger if a layer runs it
    attention    a fused kernel, forward or backward          `AttentionOp`; a causal mask leaves half of the scores
    view, empty  nothing
    all else     memory-bound                                 `ElementwiseOp`: bytes read and written

The second of two steps is recorded: in the first one the overlap engine learns its prefetch order, so the program is
the one of a steady run. Kernels are the ones of eager code, one per operation, so their bytes are an upper bound of the
bytes that compiled regions and fused kernels move. Any model on the grid can be run: a reference model by its config,
or a model that a function builds from layers or with `ff.parallelize`.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fourfold.axes import PIPE
from fourfold.gradients import accumulate
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective, Event
from fourfold.models.config import ModelConfig
from fourfold.models.open import ModelDefinition, build_on_meta, is_plain
from fourfold.models.transformer import Transformer
from fourfold.nn.loss import count_targets
from fourfold.optim import AdamW
from fourfold.params import LazyTensor, local_of
from fourfold.pipeline import forward_backward
from fourfold.planner.program import (
    AttentionOp,
    ComputeOp,
    ElementwiseOp,
    LaunchOp,
    MatmulOp,
    WaitOp,
    Work,
    lane_of,
)
from fourfold.policy import Policy
from fourfold.wrap.grid_tensor import RULES, grid_tensors_in

FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "addmm_": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}
"""Products, and the names of their two factors."""
CONVOLUTIONS = ("convolution", "convolution_backward")
OVERWRITES = ("copy_", "fill_", "zero_")
"""Operations that do not read the tensor that they write."""
PICKS = ("embedding", "gather", "index", "index_select", "take")
"""Operations that read no more of their first tensor than they write."""
PUTS = ("scatter_", "scatter_add_", "index_add_", "index_copy_", "index_put_")
"""Operations that touch no more of their first tensor than the size of their other inputs."""


MAX_NORM = 1.0
"""The norm to which the dry run clips gradients; the value does not matter."""


# --- a step


@dataclass(frozen=True, slots=True)
class DryRun:
    """The work and the memory of one rank in a training step."""

    program: list[Work]
    kept_bytes: int
    """Bytes that the first forward pass makes and keeps for backward, including weights gathered ahead; 0 on a grid
    with a pipe axis, on which several passes are under way at once."""
    peak_bytes: int
    """The most bytes that exist at once: parameters, gradients, optimizer state if there is one, and all else."""
    parameters: int
    """The number of parameters of the whole model."""

    @property
    def records(self) -> list[Collective]:
        return [work.record for work in self.program if isinstance(work, LaunchOp)]


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
    documents: Sequence[int] | None = None,
) -> DryRun:
    """Run a step of `micro_steps` times `rows` rows of this rank's (data, z) place, `seq` tokens each.

    `documents` are the lengths of packed documents in these rows, one after another, for a reference model.
    With `optimizer` gradients are clipped and AdamW steps. Then the program reaches from one optimizer step to the
    next: parameters that a sharded optimizer stepped are in flight when it begins.
    """
    if rows < 1 or seq < 1 or micro_steps < 1:
        raise ValueError(f"rows={rows}, seq={seq}, micro_steps={micro_steps}: a step has at least 1 of each")
    with fake_ranks(shape, rank) as grid, grid.ledger.events() as events:
        module = build_on_meta(build, grid, policy)
        if is_plain(module):
            raise ValueError(
                f"{getattr(build, '__name__', build)} builds a plain module, which no grid cuts; return "
                "ff.parallelize(module, grid, policy=policy), or build it of the layers of fourfold.nn"
            )
        if isinstance(module, Transformer):
            module.places_alike = True  # a plan knows one place
        step = _TracedStep(module, grid, policy, rows, seq, micro_steps, documents)
        trace = OpTrace(events, shape)
        if optimizer:
            step.optimizer = _MarkedAdamW(module, trace.mark)
        trace.hold([step.tokens, *module.parameters(), *module.buffers(), *step.state()])
        with trace, nullcontext() if isinstance(build, ModelConfig) else foreign_code():
            step.run(lambda _: None)
            if not optimizer:
                trace.mark()
            before = trace.nbytes
            kept: list[int] = []
            step.run(lambda micro_step: kept.append(trace.nbytes - before) if micro_step == 0 else None)
            if not optimizer:
                trace.mark()
        program, peak = trace.between_marks()
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return DryRun(program, kept[0] if kept else 0, peak, parameters)


@contextmanager
def fake_ranks(shape: Shape, rank: int) -> Iterator[Grid]:
    """Yield the grid of one rank of a job without any other ranks."""
    shape.coords(rank)  # raises if the rank is not on the grid
    if dist.is_initialized():
        raise RuntimeError(
            f"a dry run of {shape.world} ranks makes a process group of its own, but this process has joined one of "
            f"{dist.get_world_size()} ranks already; run it in another process, or before the grid is made"
        )
    # imported here: it is internal to torch, and nothing else in the package needs it
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=shape.world)
    try:
        yield Grid(**shape.named, order=shape.order, device="cpu")  # type: ignore[arg-type]
    finally:
        dist.destroy_process_group()


@contextmanager
def foreign_code() -> Iterator[None]:
    """Let code that was not written for a dry run make its tensors on the meta device and use fused attention."""
    with torch.device("meta"), UseFusedAttention():
        yield


class UseFusedAttention(TorchFunctionMode):
    """Uses the fused attention kernel: on the meta device torch would compose attention from plain products."""

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
    """Run `scaled_dot_product_attention` with the CPU's fused kernel, which the meta device supports."""
    if query.dim() != 4 or query.shape[-1] != value.shape[-1]:  # the kernel does not support these
        composed = functional.scaled_dot_product_attention
        return composed(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


class _TracedStep:
    """A training step of a model on the grid, which can be run several times."""

    def __init__(
        self,
        model: nn.Module,
        grid: Grid,
        policy: Policy,
        rows: int,
        seq: int,
        micro_steps: int,
        documents: Sequence[int] | None = None,
    ) -> None:
        self.model, self.grid, self.policy, self.micro_steps = model, grid, policy, micro_steps
        self.options: dict[str, Any] = {} if documents is None else {"documents": documents}
        self.tokens = torch.zeros(rows, seq, dtype=torch.long, device="meta")
        self.optimizer: _MarkedAdamW | None = None

    def state(self) -> Iterator[Tensor]:
        """Make the optimizer's state; torch does not make it on the meta device."""
        if self.optimizer is not None:
            self.optimizer.make_state()
            for state in self.optimizer.state.values():
                yield from state.values()

    def run(self, after_forward: Callable[[int], None]) -> None:
        if self.grid.size(PIPE) > 1:
            self._walk_schedule()
        else:
            self._accumulate(after_forward)
        if self.optimizer is not None:
            self.optimizer.clip_and_step(MAX_NORM)
            if not self.policy.shard_optimizer:  # then AdamW gathers nothing and does not call it
                self.optimizer.on_step()
            self.optimizer.zero_grad()
        self.model.zero_grad(set_to_none=True)

    def _walk_schedule(self) -> None:
        if not isinstance(self.model, Transformer):
            raise ValueError(f"{type(self.model).__name__} on {self.grid.shape}: only a reference model has stages")
        batch = {"tokens": self.tokens, "targets": self.tokens, **self.options}
        forward_backward(self.model, [batch] * self.micro_steps)

    def _accumulate(self, after_forward: Callable[[int], None]) -> None:
        options = dict(self.options)
        if self.micro_steps > 1 and "count" in inspect.signature(self.model.forward).parameters:
            options["count"] = count_targets(self.tokens.expand(self.micro_steps, -1, -1), self.grid)
        for index in range(self.micro_steps):
            with nullcontext() if index == self.micro_steps - 1 else accumulate(self.model):
                loss = self.model(self.tokens, self.tokens, **options)
                after_forward(index)
                loss.backward()
                del loss  # or it would count as live memory in the next forward pass


class _MarkedAdamW(AdamW):
    """AdamW that calls `on_step` after the parameters were stepped and before replicas exchange them."""

    def __init__(self, model: nn.Module, on_step: Callable[[], None]) -> None:
        super().__init__(model, lr=1e-3)
        self.on_step = on_step

    def _gather(self) -> None:
        self.on_step()
        super()._gather()


# --- recording operations as they are dispatched


class StorageCounter(TorchDispatchMode):
    """Counts the bytes of tensors made inside the block: those alive now, and the most that were alive at once.

    Memory that a kernel allocates and frees before it returns is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0
        self.peak_nbytes = 0
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((*args, *kwargs.values()) if kwargs else args)}
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out if isinstance(out, tuple | list) else (out,)):
            if storage._cdata not in given:  # a view has no memory of its own
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._made:
            return
        # torch keeps a storage's Python object as long as the storage, so the callback runs when the memory is freed
        self._made[key] = weakref.ref(storage, partial(self._forget, key, nbytes))
        self.nbytes += nbytes
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)

    def _forget(self, key: int, nbytes: int, _: object) -> None:
        del self._made[key]
        self.nbytes -= nbytes


def _storages(values: Sequence[Any]) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if type(value) is torch.Tensor:
            yield value.untyped_storage()
        elif isinstance(value, tuple | list):
            yield from _storages(value)


@dataclass(frozen=True, slots=True)
class Made:
    """The shape, stride and dtype of a tensor that an operation makes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Operation:
    """The effect and the cost of an operation for inputs of certain shapes."""

    kind: Literal["makes", "changes", "views", "else"]
    """Whether the operation makes new tensors, changes and returns its first argument, returns a view, or does else."""
    work: ComputeOp | None
    made: tuple[Made, ...] = ()
    single: bool = True
    """Whether the operation returns one tensor, not a tuple or list of tensors."""

    def again(self) -> Any:
        found = [made.again() for made in self.made]
        return found[0] if self.single else found


class OpTrace(StorageCounter):
    """Records the program of all code that runs inside the block, and counts the bytes that are alive."""

    def __init__(self, events: list[Event], shape: Shape) -> None:
        """`events` is the list to which the grid's ledger appends."""
        super().__init__()
        self.events, self.shape = events, shape
        self._program: list[Work] = []
        self._flights: dict[int, int] = {}
        self._launched: list[Collective] = []  # kept alive: a wait finds its launch by the record's id()
        self._known: dict[Any, Operation] = {}
        self._label = ""
        self._product: tuple[Any, int | None] = None, None  # the last product, and the tensor that it wrote a part of
        self._marks: list[tuple[list[Work], int]] = []

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that existed before the block."""
        for tensor in tensors:
            shard = local_of(tensor) if isinstance(tensor, DTensor) else tensor
            self._count(shard.untyped_storage())

    def mark(self) -> None:
        """Mark the beginning or the end of a step."""
        self._follow_ledger()
        self._marks.append((self._program, self.peak_nbytes))
        self._program, self.peak_nbytes = [], self.nbytes
        self._flights.clear()
        self._launched.clear()

    def between_marks(self) -> tuple[list[Work], int]:
        """Return the program between the first two marks, and the most bytes that were alive."""
        return self._marks[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(issubclass(kind, (DTensor, LazyTensor)) for kind in types):
            return NotImplemented  # their shards are dispatched here again
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # only a label in a profile
            return func(*args, **kwargs)
        key = func, _key_of(args), _key_of(tuple(kwargs.items())) if kwargs else None
        known = self._known.get(key)
        if known is None:
            out = func(*args, **kwargs)
            known = self._known[key] = _operation(func, args, kwargs, out)
        elif known.kind == "makes":  # the shapes are known, so torch need not infer them again
            out = known.again()
        elif known.kind == "changes":
            out = args[0]
        else:
            out = func(*args, **kwargs)
        if known.kind == "makes":
            for tensor in (out,) if known.single else out:
                self._count(tensor.untyped_storage())
        elif known.kind == "else":
            self._count_new(out, args, kwargs)
        if known.work is not None:
            self._append(known.work, kwargs.get("out"))
        return out

    def _count_new(self, out: Any, args: Any, kwargs: Any) -> None:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())

    def _append(self, work: ComputeOp, into: Tensor | None = None) -> None:
        """Append a piece of work. Products that write one tensor part by part are one grouped product on a GPU."""
        self._follow_ledger()
        if isinstance(work, MatmulOp):
            labelled = bool(self._label)
            if labelled:
                is_wgrad = work.is_wgrad or (into is not None and self._label.startswith("E3 "))
                work, self._label = work._replace(label=self._label, is_wgrad=is_wgrad), ""
            parts_of = None if into is None else into.untyped_storage()._cdata
            before, of_before = self._product
            if not labelled and parts_of is not None and parts_of == of_before and self._program[-1] is before:
                longer = {"k": before.k + work.k} if before.is_wgrad else {"m": before.m + work.m}
                work = before._replace(parts=before.parts + 1, **longer)
                self._program.pop()
            self._product = work, parts_of
        self._program.append(work)

    def _follow_ledger(self) -> None:
        """Append the launches and waits since the last operation."""
        for event in self.events:
            if isinstance(event.what, str):
                self._label = event.what
            elif event.kind == "launch":
                self._flights[id(event.what)] = flight = len(self._launched)
                self._launched.append(event.what)
                self._program.append(LaunchOp(flight, event.what, lane_of(event.what, self.shape.two_lanes)))
            elif id(event.what) in self._flights:  # otherwise it was launched before the step began
                self._program.append(WaitOp(self._flights.pop(id(event.what))))
        self.events.clear()


def _key_of(value: Any) -> Any:
    """Return a key of everything that an operation's shapes and costs depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple([_key_of(part) for part in value])
    return value.__class__, value


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _operation(func: Any, args: Any, kwargs: Any, out: Any) -> Operation:
    given, found = _tensors((args, kwargs)), _tensors(out)
    name = func._schema.name.partition("::")[2]
    if not all(tensor.is_meta for tensor in (*given, *found)):
        return Operation("else", None)  # small tensors of the host
    bound = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if func._schema.is_mutable:
        kind = "changes" if len(found) == 1 and args and found[0] is args[0] else "else"
        return Operation(kind, _work(func, name, bound, out))
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    if any(tensor.untyped_storage()._cdata in storages for tensor in found):
        return Operation("views", None)
    work = None if name.startswith(("empty", "new_empty")) else _work(func, name, bound, out)
    returns = [out] if isinstance(out, Tensor) else out
    if not isinstance(returns, list | tuple) or not all(isinstance(part, Tensor) for part in returns):
        return Operation("else", work)
    made = tuple(Made(tensor.shape, tensor.stride(), tensor.dtype) for tensor in returns)
    return Operation("makes", work, made, isinstance(out, Tensor))


def _work(func: Any, name: str, bound: dict[str, Any], out: Any) -> ComputeOp | None:
    if name in FACTORS:
        a, b = (bound[factor] for factor in FACTORS[name])
        return _matmul(name, prod(a.shape[:-1]), a.shape[-1], b.shape[-1])
    if name in CONVOLUTIONS:
        flops = flop_registry[func._overloadpacket](*bound.values(), out_val=out)
        result = bound.get("grad_output", out)
        m, n = result.numel() // result.shape[1], result.shape[1]
        return _matmul(name, m, flops // (2 * m * n), n)
    nbytes = _nbytes(func, name, bound, out)
    if "scaled_dot_product" in name:
        q, k, v = bound["query"], bound["key"], bound["value"]
        scores = q.shape[:-1].numel() * k.shape[-2] // (2 if bound.get("is_causal") else 1)
        flops = 2 * scores * (q.shape[-1] + v.shape[-1]) * (2 if name.endswith("_backward") else 1)
        return AttentionOp(name.strip("_"), flops, nbytes)
    return ElementwiseOp(name, nbytes) if nbytes else None


def _matmul(label: str, m: int, k: int, n: int) -> MatmulOp | None:
    return MatmulOp(label, m, k, n) if m * k * n else None


def _nbytes(func: Any, name: str, bound: dict[str, Any], out: Any) -> int:
    """Return the bytes that an operation reads and writes."""
    writes = [part.name for part in func._schema.arguments if part.alias_info is not None and part.alias_info.is_write]
    if name.startswith("_fused_adam") and bound.get("grad_scale") is None:
        writes.remove("grads")  # written only if the kernel also scales them
    written = _sizes([bound[key] for key in writes if key in bound] or out)
    unread = ["self"] if name in OVERWRITES else ["out"] if "out" in bound else []
    read = {key: _sizes(value) for key, value in bound.items() if key not in unread}
    if name in PICKS:
        first = next(iter(read))
        read[first] = min(read[first], written)
    elif name in PUTS:
        given = max(size for key, size in read.items() if key != "self")
        read["self"] = written = min(written, given)
    return sum(read.values()) + written


def _sizes(tree: Any) -> int:
    """Return the bytes of tensors; an expanded tensor counts with its storage."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in _tensors(tree))
