"""One attention layer over a context group, beside DeepSpeed's Ulysses: every way in one run, on the CPU.

    pip install 'fourfold[peers]'
    python benchmarks/context/ulysses.py                                    # 4 ranks of this machine
    python benchmarks/context/ulysses.py --nodes 2 --ranks 2 --mbit 1000    # 2 emulated nodes of 2 ranks; needs root

Every rank holds the q, k and v of its part of one causal sequence, or of packed documents, fp32, and computes its part
of the output and the gradients. DeepSpeed's `DistributedAttention` swaps tokens for heads around torch's SDPA, as its
users run it: parts are neighbouring tokens, and documents are a mask. Fourfold's parts are pairs of chunks, or
documents by their lengths, and K and V travel in each of its ways. Sides take turns, one step each in every round, in
one order and then in the other; a step takes as long as its slowest rank. Bytes are those that a rank sends in one
step, forward and backward: DeepSpeed's by the shapes of its eight all-to-alls. Results are compared with one process.

Ranks are processes that share the machine's cores. Without `--nodes` they send over loopback: times tell what the host
and copies cost, not how links would be used. With it torchrun starts them on an emulated cluster
(`cluster/emulate.py`), whose nodes are joined by links of `--mbit`.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from benchmarks.cluster.each_rank import add_ranks, ranks_of, run_rank
from benchmarks.shared.deepspeed_cpu import start_deepspeed
from benchmarks.shared.rank_pool import RankContext
from benchmarks.shared.tables import RESULTS, markdown_table, verdict
from fourfold.axes import CONTEXT
from fourfold.context.assign import assign_documents, assign_rows
from fourfold.context.move import ContextAttention
from fourfold.context_way import ContextWay
from fourfold.engine import Engine, Overlap
from fourfold.tiles import indices

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 64
ROUNDS = 7
DEEPSPEED = "DeepSpeed Ulysses"
WHOLE_BAR, PACKED_BAR = 1.05, 0.5
"""The most that a step may take of DeepSpeed's: `ulysses` for one document, and every way for packed documents."""

Question = tuple[tuple[int, ...], list[str]]
"""The lengths of documents, and the sides that attend to them."""


class LayerRound(NamedTuple):
    """What a rank measured of one side."""

    seconds: list[float]
    error: float
    """The largest difference of output and gradients from one process."""
    sent: int


def whole_sequence(tokens: int) -> list[Tensor]:
    """q, k, v and the gradient of the output of the whole sequence, [tokens, heads, head_dim]."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, heads, HEAD_DIM, generator=draw) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]


def mask_of(lengths: tuple[int, ...]) -> Tensor | None:
    """Return which token reads which, [tokens, tokens]; None for one document."""
    if len(lengths) == 1:
        return None
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (document[:, None] == document).tril()


def causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of one process: [rows, tokens, heads, head_dim] each."""
    heads = [part.transpose(1, 2) for part in (q, k, v)]
    options: Any = dict(attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[2] != k.shape[2])
    return functional.scaled_dot_product_attention(*heads, **options).transpose(1, 2)


def step_of(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Run forward and backward; return the output and the gradients of q, k and v."""
    leaves = [part.detach().requires_grad_() for part in (q, k, v)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


class FusedAttention(nn.Module):
    """The local attention of DeepSpeed's layer."""

    def __init__(self, mask: Tensor | None) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
        return causal(q, k, v, self.mask)


def deepspeed_side(lengths: tuple[int, ...]) -> tuple[Callable[..., Tensor], Tensor, int]:
    """Return DeepSpeed's attention, the tokens of this rank, and the bytes that it sends in a step."""
    start_deepspeed()
    from deepspeed.sequence.layer import DistributedAttention

    ranks, rank = dist.get_world_size(), dist.get_rank()
    layer = DistributedAttention(FusedAttention(mask_of(lengths)), dist.group.WORLD, scatter_idx=2, gather_idx=1)
    own = torch.arange(sum(lengths)).chunk(ranks)[rank]
    elements = 2 * len(own) * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS)  # forward and backward of q, k, v and the output
    sent = elements * 4 * (ranks - 1) // ranks
    return lambda q, k, v: layer(q[None], k[None], v[None], 0)[0], own, sent


def fourfold_side(context: RankContext, way: str, lengths: tuple[int, ...]) -> tuple[Callable[..., Tensor], Tensor]:
    """Return Fourfold's attention in one way, and the tokens of this rank."""
    ranks = dist.get_world_size()
    grid = context.grid(ff.Shape(z=ranks, context=ranks))
    by_rows = assign_rows(1, sum(lengths), lengths, ranks)
    assignment = by_rows if len(lengths) == 1 else assign_documents(lengths, ranks)
    here = ContextAttention(assignment, ContextWay.parse(way), grid)
    engine = Engine(Overlap(), flights=True)
    own = indices(here.assignment.own(here.member), torch.device("cpu"))
    return lambda q, k, v: engine.alone(here.attend(q, k, v, engine, "attention")), own


def measure(context: RankContext, lengths: tuple[int, ...], sides: list[str], rounds: int) -> dict[str, LayerRound]:
    """Run every side in turn, on this rank."""
    parts, mask = whole_sequence(sum(lengths)), mask_of(lengths)
    right = step_of(lambda q, k, v: causal(q[None], k[None], v[None], mask)[0], *parts)
    ready, found = {}, {}
    for side in sides:
        attend, own, *sent = deepspeed_side(lengths) if side == DEEPSPEED else fourfold_side(context, side, lengths)
        ready[side] = attend, [part[own] for part in parts]
        grid = context.grid(ff.Shape(z=dist.get_world_size(), context=dist.get_world_size()))
        with grid.ledger.watch() as records:
            results = step_of(*(attend, *ready[side][1]))
        error = max(float((one - whole[own]).abs().max()) for one, whole in zip(results, right, strict=True))
        nbytes = sum(record.wire_bytes for record in records if record.axis == CONTEXT)
        found[side] = LayerRound([], error, sent[0] if sent else nbytes)
    for number in range(rounds):
        for side in sides if number % 2 else reversed(sides):
            attend, own_parts = ready[side]
            context.barrier()
            began = time.perf_counter()
            step_of(attend, *own_parts)
            found[side].seconds.append(time.perf_counter() - began)
    return found


def measure_all(context: RankContext, setting: dict[str, Any]) -> list[dict[str, LayerRound]]:
    """Answer every question of the setting on this rank: the lengths of documents, and sides."""
    return [measure(context, tuple(lengths), sides, setting["rounds"]) for lengths, sides in setting["questions"]]


def packed_lengths(tokens: int) -> tuple[int, ...]:
    """Return documents of many lengths, a fourth of all tokens in the longest."""
    draw, found = random.Random(0), [tokens // 4]
    while sum(found) < tokens:
        found.append(min(draw.randint(tokens // 64, tokens // 8), tokens - sum(found)))
    return tuple(found)


def table(every: Sequence[Sequence[Mapping[str, LayerRound]]], questions: Sequence[Question]) -> list[str]:
    """Return the lines of the table, by what every rank found for every question."""
    rows = []
    for number, (lengths, sides) in enumerate(questions):
        ranks = {side: [LayerRound(*found[number][side]) for found in every] for side in sides}
        times = {
            side: [max(each) for each in zip(*(one.seconds for one in ranks[side]), strict=True)] for side in sides
        }
        for side in sides:
            ratios = [own / peer for own, peer in zip(times[side], times[DEEPSPEED], strict=True)]
            ratio, (low, _, high) = statistics.median(ratios), statistics.quantiles(ratios)
            judged = side != DEEPSPEED and (len(lengths) > 1 or side.startswith("ulysses"))
            bar = WHOLE_BAR if len(lengths) == 1 else PACKED_BAR
            rows.append(
                [
                    f"{sum(lengths):,}",
                    str(len(lengths)),
                    side,
                    f"{1e3 * statistics.median(times[side]):.0f}",
                    f"{ratio:.2f}",
                    f"{low:.2f} to {high:.2f}",
                    f"{bar}: {verdict(ratio <= bar)}" if judged else "",
                    f"{max(one.sent for one in ranks[side]) / 2**20:.1f}",
                    f"{max(one.error for one in ranks[side]):.0e}",
                ]
            )
    head = [
        "tokens", "documents", "way", "ms", "of DeepSpeed's", "half of the rounds", "bar", "MiB sent by a rank",
        "error",
    ]  # fmt: skip
    return list(markdown_table(head, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_ranks(parser, ROUNDS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="of the whole sequence")
    options = parser.parse_args()
    if options.rank_of is not None:
        return run_rank(options.rank_of, measure_all)
    ranks = ranks_of(parser, options)
    ulysses = f"ulysses:{ranks.world}"
    whole, packed = [DEEPSPEED, ulysses, "gather", "ring"], [DEEPSPEED, ulysses, "exchange"]
    questions: list[Question] = [
        *(((tokens,), whole) for tokens in options.tokens),
        *((packed_lengths(tokens), packed) for tokens in options.tokens),
    ]
    setting, load = {"questions": questions, "rounds": options.rounds}, os.getloadavg()[0]
    every = ranks.measure(__file__, measure_all, setting)
    text = (
        "# Attention over a context group, beside DeepSpeed's Ulysses\n\n"
        f"`{shlex.join(['python', 'benchmarks/context/ulysses.py', *sys.argv[1:]])}`, {date.today()}, {ranks}, torch "
        f"{torch.__version__}, DeepSpeed {version('deepspeed')}. Forward and backward of causal attention, {HEADS} "
        f"query heads and {KV_HEADS} KV heads of {HEAD_DIM}, fp32; medians of {options.rounds} rounds, ratios within a "
        f"round. Load average of the machine before: {load:.1f}.\n\n" + "\n".join(table(every, questions))
    )
    (options.out or RESULTS / f"{date.today()}-{ranks.named('ulysses')}.md").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
