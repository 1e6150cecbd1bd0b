"""Run every reduce-scatter of torch on the CPU with Fourfold's algorithm, so that peers do not suffer from gloo's.

gloo sums the whole tensor on every rank and then keeps a part, which sends twice the bytes that a reduce-scatter needs.
Whoever calls it (FSDP2, DTensor's functional collectives, DeepSpeed, Megatron), the call reaches one of three operators
of torch's dispatcher; inside `minimal_reduce_scatter` these have a kernel that calls `fourfold.comm`. An asynchronous
call is completed by a thread of its own, so that it runs while the caller computes.

    with minimal_reduce_scatter():
        trainer.step()
"""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

from fourfold import wire

Boxed = torch.ScriptObject


@contextmanager
def minimal_reduce_scatter() -> Iterator[None]:
    """Make reduce-scatters of CPU tensors send the minimum. All ranks must enter and leave together."""
    kernels = _Kernels()
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Warning only once for all operators,  other operators may also be overridden"
            )
            library.impl("_reduce_scatter_base_", kernels.single, "CPU")
            library.impl("reduce_scatter_tensor_coalesced_", kernels.coalesced, "CPU")
            library.impl("reduce_scatter_", kernels.lists, "CPU")
        yield
    finally:
        library._destroy()  # restores torch's own kernels


class _Kernels:
    """Replacements for torch's kernels, with the same signatures."""

    def __init__(self) -> None:
        self.tags: dict[str, Iterator[int]] = defaultdict(itertools.count)
        """A counter per group. All ranks of a group launch in the same order, so their tags match."""

    def single(
        self, output: Tensor, whole: Tensor, group: Boxed, op: Boxed, async_op: bool = True, timeout: int = -1
    ) -> tuple[Tensor, Boxed]:
        return output, self.coalesced([output], [whole], group, op, async_op, timeout)

    def lists(
        self,
        outputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        group: Boxed,
        op: Boxed,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Sequence[Tensor], Boxed]:
        if any(part.shape != output.shape for output, own in zip(outputs, parts, strict=True) for part in own):
            raise NotImplementedError(
                "dist.reduce_scatter with parts of different shapes does not work inside minimal_reduce_scatter"
            )
        return outputs, self.coalesced(outputs, [torch.stack(list(own)) for own in parts], group, op, async_op, timeout)

    def coalesced(
        self,
        outputs: Sequence[Tensor],
        wholes: Sequence[Tensor],
        group: Boxed,
        op: Boxed,
        async_op: bool = True,
        timeout: int = -1,  # noqa: ARG002  # the messages use the group's own timeout
    ) -> Boxed:
        if op.op() != dist.ReduceOp.SUM:
            raise NotImplementedError(f"the minimal reduce-scatter supports SUM only, like gloo, and not {op.op()}")
        finishes = [self._launch(*pair, dist.ProcessGroup.unbox(group)) for pair in zip(outputs, wholes, strict=True)]
        done: Future[list[Tensor]] = Future()
        if async_op:
            Thread(target=_finish, args=(finishes, list(outputs), done), daemon=True).start()
        else:
            _finish(finishes, list(outputs), done)
        return _create_work_from_future(done).boxed()

    def _launch(self, output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Callable[[], object]:
        if group.size() == 1:
            return lambda: output.copy_(whole.view_as(output))
        link = wire.Link(group, tag=next(self.tags[group.group_name]))
        finish = wire.reduce_scatter([whole.reshape(group.size(), -1)], link)
        return lambda: output.copy_(finish()[0].view_as(output))


def _finish(finishes: Sequence[Callable[[], object]], outputs: list[Tensor], done: Future[list[Tensor]]) -> None:
    try:
        with torch.no_grad():
            for finish in finishes:
                finish()
    except Exception as error:  # raised again by the work's `wait`
        done.set_exception(error)
    else:
        done.set_result(outputs)
