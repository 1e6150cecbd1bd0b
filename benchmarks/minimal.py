"""Every reduce-scatter of torch on the CPU by Fourfold's algorithm: what gloo lacks is lent to its peers.

gloo sums the whole tensor on every rank and then keeps a part, twice the bytes that a reduce-scatter must send. Whoever
asks (FSDP2, DTensor's functional collectives, DeepSpeed, Megatron), the call ends in one of three operators of torch's
dispatcher; inside `minimal_reduce_scatter` these have a kernel that calls `fourfold.comm`. A call that is
asynchronous is finished by a thread of its own, so that it goes on while the caller computes.

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

from fourfold import comm

Boxed = torch.ScriptObject


@contextmanager
def minimal_reduce_scatter() -> Iterator[None]:
    """Inside, reduce-scatters of CPU tensors send the minimum; all ranks enter and leave together."""
    kernels = _Kernels()
    library = torch.library.Library("c10d", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Warning only once for all operators,  other operators may also be overridden"
            )
            library.impl("_reduce_scatter_base_", kernels.of_one, "CPU")
            library.impl("reduce_scatter_tensor_coalesced_", kernels.of_several, "CPU")
            library.impl("reduce_scatter_", kernels.of_lists, "CPU")
        yield
    finally:
        library._destroy()  # torch's own kernels are back


class _Kernels:
    """In place of torch's kernels, with their signatures."""

    def __init__(self) -> None:
        self.tags: dict[str, Iterator[int]] = defaultdict(itertools.count)
        """By group. Its ranks launch in the same order and so count alike."""

    def of_one(
        self, output: Tensor, whole: Tensor, group: Boxed, op: Boxed, async_op: bool = True, timeout: int = -1
    ) -> tuple[Tensor, Boxed]:
        return output, self.of_several([output], [whole], group, op, async_op, timeout)

    def of_lists(
        self,
        outputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor]],
        group: Boxed,
        op: Boxed,
        async_op: bool = True,
        timeout: int = -1,
    ) -> tuple[Sequence[Tensor], Boxed]:
        if any(part.shape != output.shape for output, own in zip(outputs, parts, strict=True) for part in own):
            raise NotImplementedError("dist.reduce_scatter of parts that differ in shape; leave minimal_reduce_scatter")
        return outputs, self.of_several(
            outputs, [torch.stack(list(own)) for own in parts], group, op, async_op, timeout
        )

    def of_several(
        self,
        outputs: Sequence[Tensor],
        wholes: Sequence[Tensor],
        group: Boxed,
        op: Boxed,
        async_op: bool = True,
        timeout: int = -1,  # noqa: ARG002  # the group's own holds for the messages
    ) -> Boxed:
        if op.op() != dist.ReduceOp.SUM:
            raise NotImplementedError(f"the minimal reduce-scatter sums, and does not {op.op()}; as gloo, ask for SUM")
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
        link = comm.Link(group, tag=next(self.tags[group.group_name]))
        finish = comm._launch_reduce_scatter(whole.reshape(group.size(), -1), link)
        return lambda: output.copy_(finish().view_as(output))


def _finish(finishes: Sequence[Callable[[], object]], outputs: list[Tensor], done: Future[list[Tensor]]) -> None:
    try:
        with torch.no_grad():
            for finish in finishes:
                finish()
    except Exception as error:  # raised again where the work is waited for
        done.set_exception(error)
    else:
        done.set_result(outputs)
