"""Expert parallelism in plain torch, as torchtitan computes it: the peer of Fourfold's mixture of experts.

Each rank has its tokens and an equal share of the experts. Pairs of a token and an expert are sorted by expert; the
ranks tell each other how many come, the host reads that, rows travel by all-to-all with autograd and come back the same
way, and the scores multiply what comes back. Products are `grouped_mm` in bf16 on a GPU, and a loop on the CPU. It
never reads Fourfold's code of experts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd  # noqa: TID251
from torch.nn import functional

from benchmarks.experts.waits import HostWaits
from benchmarks.experts.workload import BlockResult, BlockSize, joined, tokens_of
from benchmarks.shared.rank_pool import RankContext


class ExpertParallelLayer(nn.Module):
    """A router, and this rank's experts."""

    def __init__(self, size: BlockSize, weights: Mapping[str, Tensor], waits: HostWaits) -> None:
        super().__init__()
        self.size, self.ranks, self.waits = size, dist.get_world_size(), waits
        if size.experts % self.ranks:
            raise ValueError(f"{size.experts} experts on {self.ranks} ranks: every rank must have equally many")
        self.own = size.experts // self.ranks
        """The number of experts of this rank."""
        first = self.own * dist.get_rank()
        self.router = nn.Parameter(weights["router.weight"].clone())
        cut = {name: weights[name][first : first + self.own].clone() for name in ("gate", "up", "down")}
        self.gate, self.up, self.down = (nn.Parameter(cut[name]) for name in ("gate", "up", "down"))

    def forward(self, a: Tensor) -> Tensor:
        chosen = self.size.chosen
        scores = functional.linear(a.float(), self.router.float()).softmax(dim=-1)
        scores, ids = scores.topk(chosen, dim=-1)
        scores = scores / scores.sum(dim=-1, keepdim=True)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(self.size.experts).scatter_add_(0, flat, torch.ones_like(flat))
        arriving = torch.empty_like(counts)  # by source and expert of this rank
        with self.waits.waiting():
            dist.all_to_all_single(arriving, counts)  # noqa: TID251
            sent, taken = torch.stack([counts, arriving]).view(2, self.ranks, self.own).sum(2).tolist()
        rows = a.index_select(0, order // chosen)
        rows = all_to_all_single_autograd(rows, taken, sent, dist.group.WORLD)
        out = self._experts(rows, arriving, sum(taken))
        out = all_to_all_single_autograd(out, sent, taken, dist.group.WORLD)
        by_token = torch.empty_like(out).index_copy(0, order, out).view(-1, chosen, a.shape[1])
        return torch.bmm(scores[:, None], by_token.float())[:, 0].to(a.dtype)

    def _experts(self, rows: Tensor, arriving: Tensor, number: int) -> Tensor:
        """Return the outputs of this rank's experts for rows that come by source and then by expert."""
        expert = torch.arange(self.own, device=rows.device).repeat(self.ranks)
        order = expert.repeat_interleave(arriving, output_size=number).argsort(stable=True)
        counts = arriving.view(self.ranks, self.own).sum(0)
        rows = rows.index_select(0, order)
        if rows.is_cuda:
            ends = counts.cumsum(0).to(torch.int32)
            gate, up = (functional.grouped_mm(rows, w.transpose(1, 2), offs=ends) for w in (self.gate, self.up))
            out = functional.grouped_mm(functional.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        else:
            parts = zip(rows.split(counts.tolist()), self.gate, self.up, self.down, strict=True)
            out = torch.cat([(functional.silu(each @ g.T) * (each @ u.T)) @ d.T for each, g, u, d in parts])
        return torch.empty_like(out).index_copy(0, order, out)


class ExpertParallelBlock:
    """The peer's side: forward and backward, and the sum of the router's gradient over all ranks."""

    def __init__(self, context: RankContext, size: BlockSize, weights: Mapping[str, Tensor]) -> None:
        self.waits = HostWaits(context.device)
        self.module = ExpertParallelLayer(size, weights, self.waits)
        a, self.dout = tokens_of(size, context.rank, context.device)
        self.a = a.requires_grad_()

    def step(self) -> tuple[Tensor, Tensor]:
        found = self._forward_backward()
        self.module.zero_grad()
        return found

    def results(self) -> BlockResult:
        out, da = self._forward_backward()
        module, whole = self.module, {}
        for name, parameter in (("gate", module.gate), ("up", module.up), ("down", module.down)):
            whole[name] = joined(parameter.grad)  # type: ignore[arg-type]
        found = BlockResult(out, da, {"router.weight": module.router.grad.clone(), **whole})  # type: ignore[union-attr]
        module.zero_grad()
        return found

    def _forward_backward(self) -> tuple[Tensor, Tensor]:
        out = self.module(self.a)
        out.backward(self.dout)
        dist.all_reduce(self.module.router.grad)  # noqa: TID251
        da: Tensor = self.a.grad  # type: ignore[assignment]
        self.a.grad = None
        return out.detach(), da
