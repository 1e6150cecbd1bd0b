"""Fourfold's peers in PyTorch itself, each set up as its own documentation recommends, on one plain decoder.

- **FSDP2**: `fully_shard` as torchtitan applies it: the embedding, each block, norm and head together (not resharded
  after forward, because backward begins with them), then the root. With tied weights the root holds embedding and head.
  Blocks are resharded after forward or not. Explicit prefetch of two blocks, which the documentation offers as an
  alternative, is a peer of its own.
- **HSDP**: FSDP2 on a mesh of replicas and shards.
- **DDP**: gradients are all-reduced in buckets during backward.
- **TP**: the plan of torch's tutorial and of torchtitan, with sequence parallelism and `loss_parallel`; inside FSDP2,
  HSDP or DDP it uses the inner dim of the mesh.

The loss is computed in fp32, as in torchtitan. `pipelines.py` has the pipelines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor  # noqa: TID251  # a type
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from benchmarks.shared.decoder import Decoder, init_of, weight_name
from benchmarks.shared.models import MAX_NORM, ShardInit, SwitchedModel, adamw, local_shard
from benchmarks.shared.workloads import Line, Workload
from fourfold.layout import chunk
from fourfold.models import ModelConfig
from fourfold.nn.rng import fill_, key_of

PREFETCHED_BLOCKS = 2

AXES_OF: dict[str, tuple[str, ...]] = {
    "DDP": ("data",),
    "DDP x TP": ("x", "data"),
    "FSDP2": ("z",),
    "FSDP2 explicit prefetch": ("z",),
    "FSDP2 x TP": ("x", "z"),
    "HSDP": ("z", "data"),
    "HSDP x TP": ("x", "z", "data"),
    "TP": ("x",),
}
"""The peers of this file, and the axes of a layout that each can use: x is TP, z shards weights, data replicates."""


@dataclass(frozen=True)
class PeerSetup:
    """How a peer uses its mesh."""

    ddp: bool = False
    """Replicas are joined by DDP; otherwise by FSDP2, which then also shards."""
    reshard: bool = True
    """FSDP2 frees gathered weights of a block after forward."""
    explicit: bool = False
    """FSDP2 prefetches as it was told, not as it finds out."""

    @classmethod
    def of(cls, line: Line) -> PeerSetup:
        return cls(
            ddp=line.kind.startswith("DDP"),
            reshard=line.reshard,
            explicit=line.kind == "FSDP2 explicit prefetch",
        )


def tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Shard activations along the sequence between sublayers, and along heads and hidden units inside them."""
    outside: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    if model.positions is not None:
        outside["positions"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    inside: dict[str, Any] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    if model.config.mlp == "swiglu":
        inside["mlp.gate"] = ColwiseParallel()
    parallelize_module(model, mesh, outside)
    for block in model.blocks:
        parallelize_module(block, mesh, inside)
    model.tie()


def shard_parts(
    model: nn.Module,
    parts: Sequence[nn.Module | list[nn.Module]],
    layers: Iterable[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    reshard: bool = True,
) -> list[FSDPModule]:
    """Apply FSDP2 to each block of a transformer and to its other parts, and return the blocks. A part that is a list
    is gathered in one group and not resharded after forward."""
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)}
    blocks = [fully_shard(block, **options, reshard_after_forward=reshard) for block in layers]
    for part in parts:
        keep = isinstance(part, list) or not reshard
        fully_shard(part, **options, reshard_after_forward=not keep)  # type: ignore[arg-type]
    fully_shard(model, **options)
    if mesh.device_type == "cpu":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return blocks  # type: ignore[return-value]


def shard_fully(model: Decoder, mesh: DeviceMesh, dtype: torch.dtype, setup: PeerSetup = PeerSetup()) -> None:
    # with tied weights, embedding and head must be in one group, which is the root's
    parts: list[Any] = [] if model.config.tied else [model.embedding, [model.norm, model.head]]
    blocks = shard_parts(model, parts, model.blocks, mesh, dtype, reshard=setup.reshard)
    if setup.explicit:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + PREFETCHED_BLOCKS])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - PREFETCHED_BLOCKS) : index][::-1])


class LocalParameters:
    """Plain parameters for a module that TP has sharded, because DDP cannot reduce DTensors.

    Each DTensor parameter becomes a parameter that is this rank's shard. During forward the module sees DTensors again,
    through attributes that hide the parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.sharded: set[nn.Parameter] = set()
        """The parameters that TP shards; each rank has the whole of the others."""
        self._places: list[tuple[nn.Module, str, nn.Parameter, DTensor]] = []
        made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                if parameter not in made:
                    made[parameter] = nn.Parameter(local_shard(parameter.detach()))
                    made[parameter].register_hook(_arrived)
                    if any(placement.is_shard() for placement in parameter.placements):  # type: ignore[attr-defined]
                        self.sharded.add(made[parameter])
                owner.register_parameter(name, made[parameter])
                self._places.append((owner, name, made[parameter], parameter))  # type: ignore[arg-type]
        module.register_forward_pre_hook(self._show_whole)
        module.register_forward_hook(self._show_local, always_call=True)

    def _show_whole(self, *_: Any) -> None:
        shown: dict[nn.Parameter, DTensor] = {}
        for owner, name, local, like in self._places:
            if local not in shown:
                size = {"shape": like.shape, "stride": like.stride()}
                shown[local] = DTensor.from_local(local, like.device_mesh, like.placements, run_check=False, **size)
            owner.__dict__[name] = shown[local]

    def _show_local(self, *_: Any) -> None:
        for owner, name, *_rest in self._places:
            owner.__dict__.pop(name, None)


def _arrived(gradient: Tensor) -> Tensor:
    """Wait for a gradient that DTensor still reduces."""
    return gradient.wait() if isinstance(gradient, AsyncCollectiveTensor) else gradient


class PeerModel(SwitchedModel):
    """A decoder on a mesh with dims (replicate, dp, tp). A dim of size 1 means that this kind of parallelism is off."""

    module: Decoder

    def __init__(self, workload: Workload, mesh: DeviceMesh, setup: PeerSetup = PeerSetup()) -> None:
        super().__init__()
        device = device_of(mesh)
        rows = mesh["replicate", "dp"]
        self.tokens, self.targets = rows_of(workload, rows, device)
        self.tensor_parallel = mesh["tp"].size() > 1
        # on the meta device tied parameters would come apart
        with torch.device(device if workload.config.tied else "meta"):
            self.module = Decoder(workload.config).to(workload.dtype)
        if self.tensor_parallel:
            tensor_parallel(self.module, mesh["tp"])
        self.compile(self.module.blocks)
        self.model: nn.Module = self.module
        self.local: LocalParameters | None = None
        self.tp_group = mesh["tp"].get_group()
        if rows.size() > 1 and not setup.ddp:
            # a mesh of replicas needs both dims; without replicas FSDP2 takes the mesh of shards
            shards = rows if mesh["replicate"].size() > 1 else mesh["dp"]
            shard_fully(self.module, shards, workload.dtype, setup)
        self.parts = parts_of(self.module)
        if not workload.config.tied:
            self.module.to_empty(device=device)
        if rows.size() > 1 and setup.ddp:
            self._replicate(mesh["replicate"].get_group())
        self.optimizer = adamw(self.module.parameters())

    def _replicate(self, group: dist.ProcessGroup) -> None:
        if self.tensor_parallel:
            self.local = LocalParameters(self.module)
        self.model = DistributedDataParallel(
            self.module, process_group=group, init_sync=False, gradient_as_bucket_view=True
        )

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    @property
    def shard_inits(self) -> list[ShardInit]:  # type: ignore[override]
        """Computed at each call, because FSDP2 may move its shards in the first step."""
        return shard_inits(self.module, self.module.config, self.parts)

    def init_weights(self) -> None:
        """Fill the model with Fourfold's initial weights."""
        init_weights(self.module, self.module.config, self.parts)

    def forward_backward(self) -> Tensor:
        with loss_parallel() if self.tensor_parallel else nullcontext():
            logits = self.model(self.tokens)
            loss = token_loss(logits, self.targets)
            del logits
            loss.backward()
        return loss.to_local() if isinstance(loss, DTensor) else loss

    def update(self) -> None:
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        if self.local is None:
            norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        else:
            sharded = [p for p in parameters if p in self.local.sharded]
            others = [p for p in parameters if p not in self.local.sharded]
            norm = norm_over(self.tp_group, sharded, others)
        clip_grads_with_norm_(parameters, MAX_NORM, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def norm_over(group: dist.ProcessGroup, sharded: Sequence[nn.Parameter], others: Sequence[nn.Parameter] = ()) -> Tensor:
    """Return the norm of all gradients, where each rank of the group has a part of them and the whole of the others."""
    squares = get_total_norm([p.grad for p in sharded if p.grad is not None]).float().square()
    dist.all_reduce(squares, group=group)  # noqa: TID251
    if others:
        squares += get_total_norm([p.grad for p in others if p.grad is not None]).square()
    return squares.sqrt()


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def device_of(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def rows_of(workload: Workload, mesh: DeviceMesh, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and targets: every rank of the mesh has rows of its own."""
    ranks, rank = mesh.size(), 0
    for dim in range(mesh.ndim):
        rank = rank * mesh.size(dim) + mesh.get_local_rank(dim)
    if workload.rows % ranks:
        raise ValueError(f"{workload.rows} rows are not divisible by {ranks} data-parallel ranks")
    rows = workload.rows // ranks
    tokens, targets = (part[rank * rows :][:rows] for part in workload.batch(device))
    return tokens, targets


class Part(NamedTuple):
    """The part of a parameter that this rank holds."""

    box: list[range]
    """The index range of each tensor dim."""
    shape: Sequence[int]
    """The shape of the whole parameter."""


def parts_of(model: nn.Module) -> dict[str, Part]:
    return {name: Part(_box(parameter), parameter.shape) for name, parameter in model.named_parameters()}


def init_weights(model: nn.Module, config: ModelConfig, parts: dict[str, Part] | None = None, seed: int = 0) -> None:
    """Fill the model with Fourfold's initial weights for this seed; each rank draws only its own shards. `parts` says
    which these are, where the parameters themselves do not."""
    parts = parts_of(model) if parts is None else parts
    for name, parameter in model.named_parameters():
        shard = local_shard(parameter.detach())
        fill_(shard, *parts[name], init_of(config, name), seed, weight_name(config, name))


def shard_inits(model: nn.Module, config: ModelConfig, parts: dict[str, Part]) -> list[ShardInit]:
    """Return initial values drawn on the device, which is fast; replicas draw equal ones."""
    return [
        ShardInit(
            local_shard(parameter.detach()), init_of(config, name), key_of(weight_name(config, name), *parts[name].box)
        )
        for name, parameter in model.named_parameters()
    ]


def _box(parameter: Tensor) -> list[range]:
    """Return the index range that this rank holds of each tensor dim. Where two mesh dims shard the same tensor dim,
    FSDP2 shards what TP has sharded already, so the inner mesh dim comes first."""
    box = [range(length) for length in parameter.shape]
    if not isinstance(parameter, DTensor):
        return box
    for dim in reversed(range(parameter.device_mesh.ndim)):
        placement = parameter.placements[dim]
        if not placement.is_replicate():
            held = box[placement.dim]  # type: ignore[attr-defined]
            part = chunk(len(held), parameter.device_mesh.size(dim), parameter.device_mesh.get_local_rank(dim))
            box[placement.dim] = held[part.start : part.stop]  # type: ignore[attr-defined]
    return box
