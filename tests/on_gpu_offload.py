"""The GPU tier of offloaded activations. Needs torch and numpy, no pytest.

    FOURFOLD_TEST_DEVICE=cuda python tests/on_gpu_offload.py [names of checks]

Every check prints a line. The checks of time and memory want a GPU with 24 GiB or more, and 8 GiB of host memory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

import fourfold as ff
from fourfold import offload
from fourfold.grid import Grid, Shape
from fourfold.params import local_of
from fourfold.pipeline import forward_backward
from fourfold.policy import Overlap, Policy
from gpu_checks import Check, on_ranks, run_checks
from harness import DEVICE, grid_of

BF16 = torch.bfloat16
CYCLES = 20_000_000
"""GPU cycles of a delay, about 10 ms: longer than everything else in a step of a tiny model."""
LARGE: dict[str, Any] = dict(layers=24, hidden=1024, heads=8, kv_heads=8, head_dim=128, mlp_hidden=4096, vocab=32000)
ROWS, SEQ = 16, 4096  # so that the inputs of blocks take more memory than gradients, which come as inputs go
STREAM_NBYTES = ROWS * SEQ * LARGE["hidden"] * BF16.itemsize


def train(grid: Grid, config: Any, policy: Policy, steps: int, rows: int, seq: int, micro_steps: int = 1) -> Any:
    """Return the losses, the parameters afterwards, and how much was offloaded."""
    model = ff.models.build(config, grid, policy=policy)
    optimizer = ff.optim.AdamW(model, lr=1e-3)
    draw, losses = torch.Generator().manual_seed(5), []
    for _ in range(steps):
        whole = torch.randint(0, 250, (micro_steps, rows, seq), generator=draw)
        parts = [ff.local_rows(tokens, grid).to(grid.device) for tokens in whole]
        losses.append(forward_backward(model, [(tokens, tokens) for tokens in parts]).item())
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
    return losses, [local_of(parameter).clone() for parameter in model.parameters()], model.engine.offloader


CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "alone": (Shape(), {}),
    "halves": (Shape(), dict(overlap=Overlap(halves=2))),
    "chunks": (Shape(), dict(mlp_chunk=50, loss_chunk=40, compute_dtype=BF16)),
    "x=2 z=2": (Shape(x=2, z=2), dict(overlap=Overlap(halves=2))),
    "y=2 data=2": (Shape(y=2, data=2), dict(shard_optimizer=True, mlp_chunk=50)),
    "pipe=2 1f1b": (Shape(z=2, pipe=2), dict(schedule="1f1b")),
    "pipe=4 zb-h1": (Shape(pipe=4), dict(schedule="zb-h1")),
    "context": (Shape(z=4, context=2), {}),
}


def agree(name: str, slow: str = "") -> str:
    """Return an empty text if steps with offload equal those without bit for bit, else what differs.

    `slow`: the side that is delayed, so that a missing wait shows: the copies, or the computation.
    """
    shape, options = CASES[name]
    grid = grid_of(shape) if shape.world > 1 else Grid.alone(DEVICE)
    torch.use_deterministic_algorithms(True)
    config = ff.models.config("llama-tiny", layers=8)
    found = []
    for on in (False, True):
        policy = Policy(recompute="block", offload=on, **options)
        with delayed(slow if on else ""):
            found.append(train(grid, config, policy, 4, 8, 64, micro_steps=4))
    (losses, parameters, _), (others, theirs, offloader) = found
    if shape.pipe < 4 and not offloader.counts.prefetched:  # with pipe=4 a rank has two layers, and may send one
        return "nothing was prefetched"
    if offloader.pool.nbytes:
        return f"{offloader.pool.nbytes} bytes of the host were not given back"
    if losses != others:
        return f"losses differ: {losses} and {others}"
    return "" if all(map(torch.equal, parameters, theirs)) else "parameters differ"


@contextmanager
def delayed(side: str) -> Iterator[None]:
    """Let the copies, or the computation before each copy, take long."""
    plain = offload.copy_behind

    def slowly(stream: Any, source: Any, target: Any, *after: Any) -> Any:
        with torch.cuda.stream(stream if side == "copies" else torch.cuda.current_stream()):
            torch.cuda._sleep(CYCLES)
        return plain(stream, source, target, *after)

    offload.copy_behind = slowly if side else plain
    try:
        yield
    finally:
        offload.copy_behind = plain


def measure(**policy: Any) -> tuple[float, int, Any]:
    """Return the median seconds of a step of the large model, what forward keeps in bytes, and the offloader."""
    config = ff.models.config("llama-tiny", **LARGE, seq=SEQ)
    grid = Grid.alone(DEVICE)
    options: dict[str, Any] = dict(compute_dtype=BF16, recompute="block", loss_chunk=2048, **policy)
    model = ff.models.build(config, grid, policy=Policy(**options))
    tokens = torch.randint(0, 250, (ROWS, SEQ), device=grid.device)
    seconds = []
    for _ in range(8):
        torch.cuda.synchronize()
        before, began = torch.cuda.memory_allocated(), time.perf_counter()
        loss = model(tokens, tokens)
        kept = torch.cuda.memory_allocated() - before  # torch counts a tensor until its copies are done
        loss.backward()
        del loss
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        model.zero_grad()
    return median(seconds[3:]), kept, model.engine.offloader


def copy_seconds() -> float:
    """Return the seconds that all copies of a step take by themselves, there and back."""
    there = torch.empty(STREAM_NBYTES, dtype=torch.uint8, device=DEVICE)
    host = torch.empty(STREAM_NBYTES, dtype=torch.uint8, pin_memory=True)
    for _ in range(2):  # the first time warms up
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(LARGE["layers"]):
            host.copy_(there, non_blocking=True)
            there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
    return time.perf_counter() - began


def hidden() -> str:
    """Compare the time and the memory of steps with and without offload."""
    without, most, _ = measure()
    torch.cuda.empty_cache()
    with_it, less, offloader = measure(offload=True)
    alone, saved = copy_seconds(), (most - less) / STREAM_NBYTES
    said = (
        f"{without * 1e3:.1f} ms without, {with_it * 1e3:.1f} ms with, copies alone {alone * 1e3:.1f} ms; kept "
        f"{most / 2**30:.2f} and {less / 2**30:.2f} GiB, {saved:.1f} of {LARGE['layers']} inputs saved; host "
        f"{offloader.pool.most_nbytes / 2**30:.2f} GiB in {offloader.pool.made} buffers"
    )
    # A quarter of the copies may show: the first one back has less to hide behind, and copies slow down computation.
    good = with_it - without < alone / 4 and saved > LARGE["layers"] - 4 and offloader.pool.made == LARGE["layers"]
    return f"ok {said}" if good else said


def main(names: list[str]) -> int:
    checks: dict[str, Check] = {"time and memory": lambda: [hidden()]}
    for name, (shape, _) in CASES.items():
        if shape.world > 1:
            checks[name] = on_ranks(shape.world, agree, name)
            continue
        for slow in ("", "copies", "computation"):
            checks[f"{name}, slow {slow}" if slow else name] = lambda name=name, slow=slow: [agree(name, slow)]
    return run_checks(checks, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
