"""The grid of devices: shape arithmetic, rank order, process groups.

`Shape` is pure arithmetic and needs no process: it maps ranks to coordinates and back. `Grid` is a shape with this
process placed on it: torch's DeviceMesh, process groups for each axis, the device, and the ledger of collectives.
Nothing here issues a collective.

Invariant: a mesh has one dim per axis that may cut a tensor, in the order of `CUTS`, whatever the order of the ranks
is; only `AXES` says how many axes there are. The ranks of each pipe coordinate have a mesh of their own, and a folded
grid a second one, with the axes of `FOLD`.
"""

from __future__ import annotations

import itertools
import os
import socket
import zlib
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from math import inf
from typing import ClassVar, NoReturn, Protocol, TypeVar, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fourfold.axes import AXES, BATCH, CONTEXT, CUTS, FOLD, FOLDED, PIPE
from fourfold.environment import Environment, stay_on_loopback
from fourfold.errors import FailedElsewhereError, Failure, LateRanksError, UnlikeRanksError, failure_of
from fourfold.gate import Gate
from fourfold.job import (
    START_SECONDS,
    Channel,
    agree,
    difference,
    first_fault,
    join,
    ranks_text,
    share_tracebacks,
    typed_errors,
)
from fourfold.ledger import Ledger
from fourfold.pass_order import PassOrder
from fourfold.recording import Recording
from fourfold.schedule.action import Lane
from fourfold.shape import Shape, axes_signature
from fourfold.torch_hooks import GRID, install_torch_hooks

T = TypeVar("T")

FURTHER_LANES = (*((PIPE, lane) for lane in ("reduce", *Lane)), (CONTEXT, "gather"), (CONTEXT, "reduce"))
"""The lanes beside those of the axes that cut tensors. Along pipe: sums over its ranks, and messages between stages."""
LANES_OF_FOLD = (("expert",), ("ex",), ("ez", "gather"), ("ez", "reduce"), ("edata",))
"""The lanes of a fold: those of an axis that names none are one."""
CORES_FOR_TWO_LANES = 4
"""CPU cores that a rank needs before the only axis of a grid of GPUs gets two communicators. Over a network each
communicator keeps threads busy while a message is in flight; with fewer cores two are slower than one."""


class CommunicatorUser(Protocol):
    """Something that must let go of a grid's communicators before they are destroyed."""

    def release(self) -> None: ...


class Grid:
    """A grid of devices, with this process placed on it.

    It reads torchrun's or SLURM's environment, or takes the process group that exists already; without any of them it
    has one rank. Every rank must make the same grids in the same order.
    """

    _made = itertools.count(1)
    with_pipe: ClassVar[WeakSet[Grid]] = WeakSet()
    """The grids of this process that have pipe ranks."""

    def __init__(
        self,
        *sizes: int,
        order: Sequence[str] = AXES,
        device: str | torch.device | None = None,
        timeout: timedelta | None = None,
        **named: int,
    ) -> None:
        """Take the size of each axis by name, `Grid(x=2, z=2)`, or in the order of AXES; the others have one rank."""
        join_process_group(device, timeout)
        job = Channel("grid")
        shape = _checked_shape(sizes, named, order)
        if isinstance(shape, Shape):
            agree(job, "the grid", f"{shape} on {_device(device).type}")
            self._place(shape, range(shape.world), device, timeout, job)
        else:
            agree(job, "the grid", str(shape), fault=shape)

    @classmethod
    def of_shape(
        cls, shape: Shape, *, device: str | torch.device | None = None, timeout: timedelta | None = None
    ) -> Grid:
        """Make a grid of this shape from all ranks of the job."""
        return cls(**shape.named, order=shape.order, device=device, timeout=timeout)

    @classmethod
    def over_parts(
        cls,
        shape: Shape,
        parts: Sequence[Sequence[int]],
        *,
        device: str | torch.device | None = None,
        timeout: timedelta | None = None,
    ) -> Grid | None:
        """Make a grid of this shape over each of several parts of the job; return the one that this rank is on.

        Each part lists ranks of the job in increasing order; a rank is in one part at most and gets None if it is in
        none. All ranks of the job call this with the same parts: torch makes process groups with all ranks of the job,
        members or not, in the same order. Whatever takes a grid (models, gradients, norms, checkpoints, agreement)
        then concerns the ranks of its part alone.
        """
        join_process_group(device, timeout)
        job = Channel("grid")
        agree(job, "the parts of the job", f"{shape} over {[list(ranks) for ranks in parts]}", _misfit(shape, parts))
        own = None
        for ranks in parts:
            grid = cls.__new__(cls)
            grid._place(shape, ranks, device, timeout, job)
            own = grid if dist.get_rank() in ranks else own
        return own

    @classmethod
    def alone(cls, device: str | torch.device | None = None) -> Grid:
        """Make a grid of this process by itself, also inside a larger job; it never communicates."""
        join_process_group(device)
        here = dist.get_rank()
        grid = cls.__new__(cls)
        grid._place(Shape(), (here,), device, None, Channel("grid", (here,)))
        return grid

    def _place(
        self,
        shape: Shape,
        ranks: Sequence[int],
        device: str | torch.device | None,
        timeout: timedelta | None,
        job: Channel,
    ) -> None:
        """Put this process on the grid, or help to make the groups of a grid that it is not on."""
        self.shape = shape
        self.ranks = tuple(ranks)
        """The ranks of the job that are on the grid: number n of the grid is rank `ranks[n]` of the job."""
        self.device = _device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        member = dist.get_rank() in self.ranks
        alone = shape.world == 1
        if alone and not member:
            return
        with typed_errors(f"making the groups of the grid {shape}"):
            meshes = self._meshes(self._mesh_ranks().movedim(AXES.index(PIPE), 0), CUTS, alone=alone)
            here = self.ranks.index(dist.get_rank()) if member else 0
            self.coords = {**shape.coords(here), CONTEXT: shape.member(here)}
            self.mesh = meshes[self.coords[PIPE]]
            self.fold_mesh: DeviceMesh | None = None
            if shape.folded:
                self.coords |= shape.fold_coords(here)
                ranks_of_fold = torch.tensor(self.ranks)[shape.fold_mesh_ranks()]
                self.fold_mesh = self._meshes(ranks_of_fold, FOLD, alone=alone)[self.coords[PIPE]]
            self._groups = {} if alone else self._lanes(timeout, job, member=member)
        if not alone:
            job.meet()  # a rank that ended now would close connections that others are still making
        if not member:
            return
        self.rank = self.ranks.index(dist.get_rank())
        self.channel = Channel("grid", self.ranks)
        self._timeout = inf if timeout is None else timeout.total_seconds()
        self.gate = Gate(self.channel)
        self.ledger = Ledger()
        self.tags = {axis: itertools.count() for axis in (*AXES, CONTEXT, *FOLDED)}
        """The next message tag of each axis. All ranks along an axis launch in the same order, so their tags match."""
        self.muted = False
        """Whether collectives are recorded without being sent; `comm.muted` sets it."""
        self.recording: Recording | None = None
        """What the host must do for the step that is being recorded now; None while steps run as usual."""
        self.agreed: dict[str, str] = {}
        """What all ranks have agreed on last, such as the number of micro-batches (`agree_on_change`)."""
        self._channels: dict[tuple[str, ...], Channel] = {}
        """The channels of the ranks along some axes (`agree_in_time`)."""
        self._passes: dict[tuple[str, ...], PassOrder] = {}
        """The order of the passes that send messages along some axes (`come`)."""
        self.connected: set[tuple[int, ...]] = set()
        """The placements of stages between whose ranks messages have travelled."""
        self.broken_off = ""
        """The error that ended a step of a pipeline before all its messages had arrived; empty if there was none."""
        self.graphs: WeakSet[CommunicatorUser] = WeakSet()
        """The recorded steps that contain collectives of this grid."""
        self.before_replays: list[Callable[[], None]] = []
        """What a recorded step calls before each replay, because a replay runs no hooks of its optimizer."""
        # torch caches the placements of DTensor operations by mesh, and takes meshes of equal shape for the same one
        for mesh in filter(None, (self.mesh, self.fold_mesh)):
            mesh._thread_id = -next(self._made)
            setattr(mesh, GRID, self)  # for `Grid.of`
        if shape.pipe > 1:
            self.with_pipe.add(self)
        install_torch_hooks()

    def _meshes(self, by_pipe: torch.Tensor, axes: tuple[str, ...], *, alone: bool) -> list[DeviceMesh]:
        """Return the mesh of each pipe coordinate; torch makes their groups on all ranks of the job in this order."""
        return [
            DeviceMesh(self.device.type, ranks, mesh_dim_names=axes, _init_backend=not alone)
            for ranks in by_pipe.contiguous()
        ]

    def mesh_of(self, axes: Sequence[str]) -> DeviceMesh:
        """Return the mesh with these axes."""
        mesh = self.mesh if tuple(axes) == CUTS else self.fold_mesh
        if mesh is None:
            raise ValueError(f"the grid {self} is not folded, so no tensor on it is cut over {', '.join(axes)}")
        return mesh

    def _mesh_ranks(self) -> torch.Tensor:
        """Return the ranks of the job by coordinates, one dim per axis."""
        return torch.tensor(self.ranks)[self.shape.mesh_ranks()]

    def _lanes(
        self, timeout: timedelta | None, job: Channel, *, member: bool
    ) -> dict[tuple[str, str], dist.ProcessGroup]:
        """Make the group of each lane along each axis, on all ranks of the job in the same order.

        On a GPU their streams have high priority: otherwise running computation keeps a collective's kernel from
        starting. The mesh's own groups have no such streams; DTensors use them. On the CPU gathers use the mesh's
        groups.
        """
        groups: dict[tuple[str, str], dist.ProcessGroup] = {}
        on_gpu = self.device.type == "cuda" and dist.get_backend() != "fake"
        two = self.shape.two_lanes
        if on_gpu and len(self.shape.used_axes) == 1 and _cores_per_rank(job) < CORES_FOR_TWO_LANES:
            two = ()
        for axis in CUTS:
            group = self.mesh.get_group(axis) if member else None
            if timeout is not None and group is not None:  # the mesh made its groups with torch's default timeout
                dist.distributed_c10d._set_pg_timeout(timeout, group)
            if on_gpu and self.size(axis) > 1:
                group = self._new_group(axis, timeout)
            reduce = self._new_group(axis, timeout) if axis in two and dist.get_backend() != "fake" else group
            if group is not None and reduce is not None:
                groups[axis, "gather"], groups[axis, "reduce"] = group, reduce
        for axis, lane in FURTHER_LANES:
            if self.size(axis) > 1:
                group = self._new_group(axis, timeout) if dist.get_backend() != "fake" else dist.group.WORLD
                if group is not None:
                    groups[axis, lane] = group
        return groups | self._lanes_of_fold(timeout) if self.shape.folded else groups

    def _lanes_of_fold(self, timeout: timedelta | None) -> dict[tuple[str, str], dist.ProcessGroup]:
        groups: dict[tuple[str, str], dist.ProcessGroup] = {}
        for axis, *lane in LANES_OF_FOLD:
            if self.size(axis) > 1:
                group = self._new_group(axis, timeout) if dist.get_backend() != "fake" else dist.group.WORLD
                if group is not None:
                    groups |= dict.fromkeys(((axis, name) for name in lane or ("gather", "reduce")), group)
        return groups

    def _new_group(self, axis: str, timeout: timedelta | None) -> dist.ProcessGroup | None:
        """Make a group for every line of ranks along an axis; return this rank's, or None if it is on no line."""
        if axis in FOLDED:
            of_fold = torch.tensor(self.ranks)[self.shape.fold_mesh_ranks()]
            lines = of_fold.movedim(1 + FOLD.index(axis), -1).reshape(-1, self.size(axis)).tolist()
        else:
            along = [AXES.index(one) for one in (BATCH if axis == CONTEXT else (axis,))]  # neighbouring places
            fastest = list(range(-len(along), 0))
            lines = self._mesh_ranks().movedim(along, fastest).reshape(-1, self.size(axis)).tolist()
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            if timeout is not None:
                options._timeout = timeout  # torch warns if the two differ
            made, _ = dist.new_subgroups_by_enumeration(lines, timeout, "nccl", options)
        else:
            made, _ = dist.new_subgroups_by_enumeration(lines, timeout)
        return cast("dist.ProcessGroup | None", made)

    @staticmethod
    def of(parameter: torch.Tensor) -> Grid:
        """Return the grid that a parameter is on."""
        grid = getattr(parameter.device_mesh, GRID, None) if isinstance(parameter, DTensor) else None
        if grid is None:
            raise ValueError(
                "expected a parameter of a Fourfold module (a DTensor on a grid's mesh), got "
                f"{type(parameter).__name__} of shape {tuple(parameter.shape)}"
            )
        return grid

    def __str__(self) -> str:
        return str(self.shape)

    def __repr__(self) -> str:
        return f"Grid({self}, rank={self.rank} of {self.shape.world}, device={self.device})"

    def __deepcopy__(self, memo: dict[int, object]) -> Grid:
        return self  # a copy of a model is on the same grid

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled; pickling any DTensor on the grid comes here, through its mesh."""
        raise shards_alone_error()

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis, or of a context group."""
        return self.shape.context if axis == CONTEXT else self.shape.cuts[axis]

    def group(self, axis: str, lane: str = "gather") -> dist.ProcessGroup:
        return self._groups[axis, lane]

    def agree(self, what: str, text: str) -> None:
        """Raise the same error on every rank unless all ranks hold the same `text`."""
        agree(self.channel, what, text)

    def agree_in_time(self, what: str, text: str, axes: Sequence[str] = ()) -> None:
        """Agree where a rank has come by what it alone knows: the others come with the same text, or this rank raises.

        It raises before the collectives in which the others may wait have reached their deadline. `axes`: only the
        ranks along these agree, by default all of the grid.
        """
        channel = self.channel
        if axes and not self.shape.folded:
            channel = self._channels.get(tuple(axes)) or Channel(f"over {' '.join(axes)}", self.ranks_along(axes))
            self._channels[tuple(axes)] = channel
        try:
            found = channel.decide(text, partial(difference, what, channel.ranks), self.deadline / 2)
        except LateRanksError as late:
            raise UnlikeRanksError(
                f"ranks disagree on {what}: this rank, {self.channel.rank}, has {text!r} since now, and "
                f"{ranks_text(late.ranks) if late.ranks else 'another rank'} did not change; give every rank the same"
            ) from late
        if found:
            raise ValueError(found)

    def agree_on_change(self, what: str, text: str) -> None:
        """Agree on a text whenever it is another one than before on this rank; then it is the same on all ranks."""
        if self.agreed.get(what) != text and self.shape.world > 1:
            self.agree_in_time(what, text)
            self.agreed[what] = text

    def come(self, kind: str, axes: Sequence[str]) -> None:
        """Begin a pass that sends messages along these axes; raise if the ranks along them begin another one.

        A pipeline agrees on its number of micro-batches instead: its ranks along pipe run passes of their own.
        """
        along = tuple(axis for axis in axes if self.size(axis) > 1)
        if not along or self.muted or self.recording is not None or self.size(PIPE) > 1 or len(self.channel.ranks) == 1:
            return
        if along not in self._passes:
            ranks = self.ranks_along(along)
            self._passes[along] = PassOrder(Channel(f"passes over {' '.join(along)}", ranks))
        # before the collectives in which the others may wait reach their deadline
        self._passes[along].come(kind, self.deadline / 2)

    @property
    def deadline(self) -> float:
        """The seconds for which collectives wait for other ranks."""
        return min(self.channel.seconds, self._timeout)

    def ranks_along(self, axes: Sequence[str]) -> list[int]:
        """Return the ranks of the job that have this rank's coordinates but along these axes."""
        own = {axis: place for axis, place in self.shape.coords(self.rank).items() if axis not in axes}
        coords: Iterator[dict[str, int]] = (dict(self.shape.coords(rank)) for rank in range(self.shape.world))
        return [self.ranks[rank] for rank, each in enumerate(coords) if own.items() <= each.items()]

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every rank."""
        return self.channel.decide(text, lambda texts: texts[0])

    def texts_by_pipe(self, text: str) -> list[str]:
        """Return the text of every pipe coordinate, in their order; the first rank of each speaks for its others.

        All ranks call it. It serves to tell ranks along pipe what the others hold, such as the names of tensors.
        """
        if self.size(PIPE) == 1:
            return [text]
        said = ""
        if all(self.coords[axis] == 0 for axis in CUTS):
            # compressed, because names repeat and a store refuses texts of more than 8 MiB
            said = f"{self.coords[PIPE]} {b64encode(zlib.compress(text.encode())).decode()}"
        together = self.channel.decide(said, lambda texts: "\n".join(filter(None, texts)))
        by_pipe = {int(place): packed for place, packed in map(str.split, together.splitlines())}
        return [zlib.decompress(b64decode(by_pipe[place])).decode() for place in sorted(by_pipe)]

    def run_together(self, what: str, act: Callable[[], T], *, same: str = "") -> T:
        """Call `act` on every rank and return its result; if it fails on one rank, raise on all of them.

        Otherwise the other ranks would wait for the failed one. The failed rank raises its own error, the others an
        error that names the rank and its reason. All ranks must also hold the `same` text.
        """
        result, fault = None, None
        try:
            result = act()
        except Exception as error:
            error.add_note(f"{what} failed")
            fault = error
        said = "" if fault is None else f"{type(fault).__name__}: {fault}"
        failure = Failure.ERROR if fault is None else failure_of(fault)
        found, failure, differs = first_fault(self.channel, what, said, failure, same)
        if fault is None and found:
            raise FailedElsewhereError(f"{what} failed on {found}", failure)
        if fault is None and differs:
            raise ValueError(differs)
        if fault is not None:
            raise fault
        return result  # type: ignore[return-value]

    def run_on_rank0(self, what: str, act: Callable[[], object]) -> None:
        """Call `act` on rank 0 while the other ranks wait; if it fails, raise on all ranks."""
        self.run_together(what, act if self.rank == 0 else lambda: None)

    def close(self) -> None:
        """Destroy the process groups of this grid; the default process group stays."""
        for graph in self.graphs:
            graph.release()
        if self.shape.world > 1:
            for group in {id(group): group for group in self._groups.values()}.values():
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)


Grid.__signature__ = axes_signature(order=AXES, device=None, timeout=None)  # type: ignore[attr-defined]


def _device(device: str | torch.device | None) -> torch.device:
    """Return the given device, else this process's GPU, else the CPU; a GPU always with its index."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _checked_shape(sizes: Sequence[int], named: Mapping[str, int], order: Sequence[str]) -> Shape | Exception:
    """Return the shape, or the error to raise once all ranks know about it."""
    try:
        shape = Shape(*sizes, order=order, **named)
    except (TypeError, ValueError) as error:
        return error
    world = dist.get_world_size()
    if shape.world != world:
        product = "*".join(str(size) for size in shape.sizes.values())
        return ValueError(
            f"Grid({shape}): {'*'.join(AXES)} = {product} = {shape.world}, but this job has {world} ranks; "
            f"start {shape.world} ranks or choose sizes whose product is {world}"
        )
    return shape


def _misfit(shape: Shape, parts: Sequence[Sequence[int]]) -> Exception | None:
    """Return why no grid of this shape lies over each of these parts of the job."""
    known = range(dist.get_world_size())
    listed = [rank for ranks in parts for rank in ranks]
    for ranks in parts:
        if len(ranks) != shape.world or list(ranks) != sorted(ranks):
            return ValueError(f"a part of the job for {shape} lists {shape.world} ranks in increasing order: {ranks}")
    if len(set(listed)) != len(listed) or not set(listed) <= set(known):
        return ValueError(
            f"parts of a job of {len(known)} ranks list each rank below {len(known)} at most once: {parts}"
        )
    return None


def join_process_group(
    device: str | torch.device | None, timeout: timedelta | None = None, store: dist.Store | None = None
) -> None:
    """Join the job's process group unless that was done already; `timeout` is how long its collectives may take.

    `store` is the job's store if this rank has joined the job before, else the rank joins it here.
    """
    if dist.is_initialized():
        return
    here = Environment.read()
    on_gpu = _device(device).type == "cuda"
    stay_on_loopback(here, nccl=on_gpu)
    if on_gpu:
        torch.cuda.set_device(here.local_rank % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
    if store is None:
        store = join(here, START_SECONDS if timeout is None else timeout.total_seconds(), timeout)
    with typed_errors("joining the job's process group"):
        dist.init_process_group(backend, store=store, rank=here.rank, world_size=here.world, timeout=timeout)
    if here.world > 1:
        share_tracebacks()


def _cores_per_rank(channel: Channel) -> float:
    """Return the number of cores of the rank that has fewest; ranks with the same cores of one host share them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return float(channel.decide(f"{socket.gethostname()}: {','.join(map(str, cores))}", _fewest_cores))


def _fewest_cores(texts: Sequence[str]) -> str:
    return str(min((text.count(",") + 1) / ranks for text, ranks in Counter(texts).items()))


def shards_alone_error() -> TypeError:
    """Return the error for code that would write a rank's shards as if they were the model."""
    return TypeError(
        "torch.save, pickle and safetensors would write this rank's shards alone, which fit nowhere else; on all ranks "
        "call ff.save(folder, model, optimizer), which ff.load reads on any grid, or state = "
        "fourfold.wrap.whole_tensors(model, 'state') and save that on one of them (load_state_dict takes it, or what "
        "safetensors' load_file reads, on any grid), or save model.state_dict() and the optimizer's with "
        "torch.distributed.checkpoint"
    )
