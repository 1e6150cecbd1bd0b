"""Attention of one Llama-8B layer over a context group, beside torch's `context_parallel`: every way in one run.

    python benchmarks/context/torch_context.py                              # 4 NCCL ranks, each with a quarter of a GPU
    python benchmarks/context/torch_context.py --device cpu --tokens 512    # a smoke test, without torch's side

Every rank holds the q, k and v of its part of one causal sequence, or of packed documents, in bf16, and computes its
part of the output and the gradients. torch's side runs SDPA inside `context_parallel` with each of its kernels and
rotations; it has no packed documents for SDPA, so there it reads all tokens before a token, which is more than asked.
Sides take turns, one step each in every round; a step takes as long as its slowest rank. Outputs are compared with one
process where that fits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import fourfold as ff
from benchmarks.context.ulysses import packed_lengths, step_of
from benchmarks.shared.rank_pool import PARTITION, RankContext, RankPool, has_gpu, multi_process_service
from benchmarks.shared.tables import RESULTS, markdown_table
from fourfold.context.assign import assign_documents, assign_rows
from fourfold.context.move import ContextAttention
from fourfold.context_way import ContextWay
from fourfold.engine import Engine, Overlap
from fourfold.tiles import Tiles, attend, document_tiles, indices

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ROUNDS = 5
COMPARED = 40_000
"""The most tokens for which one rank computes everything, to compare with."""


class Side(NamedTuple):
    """One way to compute the layer on this rank."""

    step: Callable[[], list[Tensor]]
    """Runs forward and backward; returns the output and the gradients of q, k and v."""
    own: Tensor | None
    """The tokens of this rank; None if their order is torch's own."""


def whole_sequence(tokens: int, device: torch.device) -> list[Tensor]:
    """q, k, v and the gradient of the output of the whole sequence, [tokens, heads, head_dim]."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(tokens, heads, HEAD_DIM, device=device, dtype=dtype) for heads in sizes]


def fourfold_side(context: RankContext, way: str, lengths: tuple[int, ...]) -> Side:
    ranks = dist.get_world_size()
    grid = context.grid(ff.Shape(z=ranks, context=ranks))
    one = len(lengths) == 1
    assignment = assign_rows(1, *lengths, lengths, ranks) if one else assign_documents(lengths, ranks)
    here = ContextAttention(assignment, ContextWay.parse(way), grid)
    engine = Engine(Overlap(), flights=False)
    own = indices(here.assignment.own(here.member), context.device)
    parts = [part[own] for part in whole_sequence(sum(lengths), context.device)]

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return engine.alone(here.attend(q, k, v, engine, "attention"))

    return Side(lambda: step_of(read, *parts), own)


def torch_side(kernel: str, rotation: str, grouped: bool, lengths: tuple[int, ...]) -> Side:
    """`grouped`: whether SDPA is told that query heads share KV heads, instead of being given copies of them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("context",))
    chosen = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[kernel]
    heads = [part.transpose(0, 1)[None] for part in whole_sequence(sum(lengths), torch.device("cuda"))]
    if not grouped:
        heads[1:3] = [part.repeat_interleave(HEADS // KV_HEADS, dim=1) for part in heads[1:3]]
    heads = [part.contiguous() for part in heads]
    sharding: AbstractContextManager[None] = context_parallel(mesh, buffers=heads, buffer_seq_dims=[2] * 4)
    sharding.__enter__()  # cuts the buffers in place, once; what it patches is entered again in every step
    cut = [part.clone() for part in heads]
    sharding.__exit__(None, None, None)
    for part in heads:
        part.untyped_storage().resize_(0)

    def read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        options: Any = {"enable_gqa": True} if grouped else {}
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, **options)

    def step() -> list[Tensor]:
        set_rotate_method(rotation)
        small = torch.zeros(2 * dist.get_world_size(), device="cuda")  # it wants a buffer
        with (
            context_parallel(mesh, buffers=[small], buffer_seq_dims=[0], no_restore_buffers={small}),
            sdpa_kernel(chosen),
        ):
            return step_of(read, *cut)

    return Side(step, None)


def make(context: RankContext, name: str, lengths: tuple[int, ...]) -> Side:
    kind, *more = name.split()
    if kind == "torch":
        return torch_side(more[0], more[1], "copies" not in more, lengths)
    return fourfold_side(context, more[0], lengths)


def measure(context: RankContext, lengths: tuple[int, ...], names: list[str], rounds: int) -> dict[str, Any]:
    """Run every side in turn, on this rank; return its seconds, or why it cannot run."""
    torch.cuda.empty_cache() if context.device.type == "cuda" else None
    right = expected(lengths, context.device) if sum(lengths) <= COMPARED else None
    found: dict[str, Any] = {}
    sides: dict[str, Side] = {}
    for name in names:
        try:
            side = make(context, name, lengths)
            results = side.step()
            if right is not None and side.own is not None:
                found[name] = max(error(one, whole[side.own]) for one, whole in zip(results, right, strict=True))
            sides[name] = side
        except (RuntimeError, NotImplementedError, ValueError, AssertionError) as fault:
            if kind_of(name) == "fourfold":
                raise
            found[name] = f"{type(fault).__name__}: {str(fault).splitlines()[0][:120]}"
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            context.barrier()
            began = time.perf_counter()
            side.step()
            context.synchronize()
            times[name].append(time.perf_counter() - began)
    return {"errors": found, "times": times}


def kind_of(name: str) -> str:
    return name.split()[0]


def expected(lengths: tuple[int, ...], device: torch.device) -> list[Tensor]:
    """Return what one process computes."""
    q, k, v, dout = whole_sequence(sum(lengths), device)
    tiles: Tiles = document_tiles(lengths)
    return step_of(lambda q, k, v: attend(q, k, v, tiles), q, k, v, dout)


def error(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right.float()).norm() / right.float().norm())


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--tokens", type=int, nargs="+", default=[32768, 131072], help="of the whole sequence")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if has_gpu() else "cpu")
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    options.add_argument("--sides", nargs="+", help="those whose names contain one of these")
    options.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-torch-context.md")
    chosen = options.parse_args()
    peers = [f"torch {kernel} {rotation}" for kernel in ("flash", "cudnn") for rotation in ("allgather", "alltoall")]
    peers = [*peers, "torch flash allgather copies", "torch cudnn allgather copies"] if chosen.device == "cuda" else []
    ways = ["gather", "ring", f"ulysses:{chosen.ranks}"]
    questions = [((tokens,), [*peers, *(f"fourfold {way}" for way in ways)]) for tokens in chosen.tokens]
    packed = [*peers, *(f"fourfold {way}" for way in ("exchange", f"ulysses:{chosen.ranks}"))]
    questions += [(packed_lengths(tokens), packed) for tokens in chosen.tokens]
    os.environ[PARTITION] = str(100 // chosen.ranks)
    rows = []
    with multi_process_service(chosen.device):
        pool = RankPool(chosen.ranks, chosen.device, RankContext)
        try:
            for lengths, names in questions:
                wanted = [name for name in names if not chosen.sides or any(part in name for part in chosen.sides)]
                every = pool.run(measure, lengths, wanted, chosen.rounds)
                rows += table_rows(lengths, wanted, every)
                print("\n".join(" ".join(row) for row in rows[-len(wanted) :]), flush=True)
        finally:
            pool.close()
    head = ["tokens", "documents", "side", "ms", "of torch's fastest", "error"]
    device = (
        torch.cuda.get_device_name(0) if chosen.device == "cuda" else f"{os.cpu_count()} {os.uname().machine} cores"
    )
    text = (
        "# Attention of one Llama-8B layer over a context group, beside torch's context_parallel\n\n"
        f"`python benchmarks/context/torch_context.py --tokens {' '.join(map(str, chosen.tokens))} --rounds "
        f"{chosen.rounds}`, {date.today()}, {chosen.ranks} ranks that share {device}, torch {torch.__version__}. "
        f"Forward and backward of causal attention, {HEADS} query heads and {KV_HEADS} KV heads of {HEAD_DIM}, bf16; "
        f"medians of {chosen.rounds} rounds in which sides took turns.\n\n" + "\n".join(markdown_table(head, rows))
    )
    chosen.out.write_text(text + "\n")
    print(text)
    return 0


def table_rows(lengths: tuple[int, ...], names: list[str], every: list[dict[str, Any]]) -> list[list[str]]:
    """Return a row for every side, from what all ranks measured."""
    times = {
        name: statistics.median(max(each) for each in zip(*(found["times"][name] for found in every), strict=True))
        for name in names
        if all(name in found["times"] for found in every)
    }
    fastest = min((seconds for name, seconds in times.items() if kind_of(name) == "torch"), default=None)
    rows = []
    for name in names:
        faults = [found["errors"].get(name, "-") for found in every]
        worst = next((fault for fault in faults if isinstance(fault, str)), None) or f"{max(faults):.0e}"
        measured = [f"{1e3 * times[name]:.1f}"] if name in times else ["-"]
        ratio = f"{times[name] / fastest:.2f}" if name in times and fastest else "-"
        rows.append([f"{sum(lengths):,}", str(len(lengths)), name, *measured, ratio, worst])
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
