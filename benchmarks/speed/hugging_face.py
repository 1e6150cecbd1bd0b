"""The Llama of transformers on several ranks: `ff.parallelize` beside torch's own TP and FSDP2 on the same grids.

    python benchmarks/speed/hugging_face.py                          # 4 gloo ranks on the CPU
    python benchmarks/speed/hugging_face.py --model plain --size gpu # on a GPU, without transformers: a plain Llama

All lines train the same module on the same batch in the same dtype, and stay in memory at once. Each round measures
every line once and starts with a different line; the slowest rank counts. A step is forward, backward and a plain SGD
update of the shards. The peers:

- **FSDP2**: `fully_shard` on the embedding, each block, norm and head, and the root.
- **TP**: transformers' own plan (colwise, rowwise), with a sharded vocabulary and `loss_parallel`.
- **TP + SP**: the same with sequence parallelism between sublayers, as in torch's tutorial. Positions are passed in,
  because the model would count those of its own part of the sequence.
- **FSDP2 x TP**: both on a two-dimensional mesh, with and without SP.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
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

import fourfold as ff
from benchmarks.shared import peers
from benchmarks.shared.decoder import Decoder
from benchmarks.shared.models import BenchmarkModel, SgdModel
from benchmarks.shared.rank_pool import RankPool, has_gpu, multi_process_service
from benchmarks.shared.tables import RESULTS
from benchmarks.shared.workloads import Line, Workload
from benchmarks.speed import rank_jobs

TIMEOUT = 240.0
WORKLOADS = {
    # hidden, layers, heads, mlp, vocab, rows, seq, dtype
    "cpu": Workload(
        "cpu",
        ff.models.config(
            "llama-tiny", hidden=256, layers=2, heads=8, kv_heads=8, head_dim=32, mlp_hidden=704, vocab=4096, seq=256
        ),
        rows=8,
        dtype=torch.float32,
    ),
    "tiny": Workload("tiny", ff.models.config("llama-tiny", vocab=256), rows=4, dtype=torch.float32),
    "gpu": Workload(
        "gpu",
        ff.models.config(
            "llama-3-8b", hidden=4096, layers=4, heads=32, kv_heads=32, mlp_hidden=11008, vocab=32000, seq=2048
        ),
        rows=8,
        dtype=torch.bfloat16,
    ),
}


OURS = "ff.parallelize"
SEQUENCE_PARALLEL = "SP"
"""The variant of a TP line that shards the sequence between sublayers."""


def lines_of(world: int, model: str) -> list[Line]:
    """Return our line and its peers on each grid. The peers' plan for the plain model always includes SP."""
    found = []
    for x in sorted({1, 2, world}):
        shape = ff.Shape(x=x, z=world // x)
        found.append(Line(OURS, shape))
        if x == 1:
            found.append(Line("FSDP2", shape))
            continue
        variants = (SEQUENCE_PARALLEL,) if model == "plain" else ("", SEQUENCE_PARALLEL)
        found += [Line("FSDP2 x TP" if shape.z > 1 else "TP", shape, variant) for variant in variants]
    return found


def make_module(workload: Workload, model: str, device: torch.device) -> nn.Module:
    """Build the module with the same weights on every rank and for every line."""
    torch.manual_seed(0)
    with device:
        module = HubStyleLlama(Decoder(workload.config)) if model == "plain" else _transformers_llama(workload)
        return module.to(workload.dtype)


def _transformers_llama(workload: Workload) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = workload.config
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=config.hidden,
            intermediate_size=config.mlp_hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            vocab_size=config.vocab,
            max_position_embeddings=config.seq,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )


class HubStyleLlama(nn.Module):
    """The peers' Llama with the call signature of transformers."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Output:  # noqa: ARG002
        return Output(self.model(input_ids))


@dataclass
class Output:
    logits: Tensor


class WrappedModel(SgdModel):
    """The module wrapped by `ff.parallelize`, with the same loss function as the peers."""

    def __init__(self, line: Line, workload: Workload, state: rank_jobs.RankModels, model: str) -> None:
        self.grid = state.grid(line.shape)
        policy = ff.Policy(keep_gathered=True)  # as torch's TP does
        module = ModelWithLoss(make_module(workload, model, self.grid.device))
        self.module = ff.parallelize(module, self.grid, policy=policy)
        self.tokens, self.targets = (ff.local_rows(part, self.grid) for part in workload.batch(self.grid.device))

    def forward_backward(self) -> Tensor:
        loss = self.module(self.tokens, self.targets)
        loss.backward()
        return loss


class ModelWithLoss(nn.Module):
    """A model and its loss in one module, so that logits stay sharded over the vocabulary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class TorchModel(SgdModel):
    """The module under torch's TP, FSDP2 or both, on a mesh with dims (replicate, dp, tp)."""

    def __init__(self, line: Line, workload: Workload, state: rank_jobs.RankModels, model: str) -> None:
        x, z = line.shape.x, line.shape.z
        mesh, device = state.mesh(line), state.grid(ff.Shape(data=state.world)).device
        self.module = make_module(workload, model, device)
        plain = model == "plain"
        self.shards_vocabulary = x > 1
        if x > 1 and plain:
            peers.tensor_parallel(self.module.model, mesh["tp"])  # type: ignore[union-attr]
        elif x > 1:
            tensor_parallel(self.module, mesh["tp"], sequence=line.variant == SEQUENCE_PARALLEL)
        if z > 1:
            self.shard_fully(mesh["dp"], workload.dtype, plain=plain)
        self.tokens, self.targets = peers.rows_of(workload, mesh["dp"], device)
        self.positions = torch.arange(workload.config.seq, device=device)[None]

    def shard_fully(self, mesh: DeviceMesh, dtype: torch.dtype, *, plain: bool) -> None:
        model: Any = self.module
        if plain:
            peers.shard_fully(model.model, mesh, dtype)
        else:
            inside = model.model
            parts = [inside.embed_tokens, [inside.norm, model.lm_head]]
            peers.shard_parts(model, parts, inside.layers, mesh, dtype)

    def forward_backward(self) -> Tensor:
        with loss_parallel() if self.shards_vocabulary else nullcontext():
            logits = self.module(input_ids=self.tokens, position_ids=self.positions).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
            loss.backward()
        return loss.to_local() if isinstance(loss, DTensor) else loss


def tensor_parallel(model: Any, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Apply transformers' plan for its Llama through torch's API."""
    rest = Shard(1) if sequence else Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=rest),
            "lm_head": ColwiseParallel(input_layouts=rest, output_layouts=Shard(-1), use_local_output=False),
            **({"model.norm": SequenceParallel()} if sequence else {}),
        },
    )
    inside: dict[str, Any] = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=rest),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=rest),
    }
    if sequence:
        whole = {"hidden_states": Replicate()}
        inside |= {
            "input_layernorm": SequenceParallel(),
            "post_attention_layernorm": SequenceParallel(),
            "self_attn": PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts=whole
            ),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        }
    for block in model.model.layers:
        parallelize_module(block, mesh, inside)


def build(state: rank_jobs.RankModels, line: Line, workload: Workload, model: str, warmup: int) -> list[float]:
    kind: Callable[..., BenchmarkModel] = WrappedModel if line.kind == OURS else TorchModel
    built = state.models[line.name] = kind(line, workload, state, model)
    return [float(built.step()) for _ in range(warmup)]


def turn(state: rank_jobs.RankModels, name: str) -> float:
    state.barrier()
    began = time.perf_counter()
    state.models[name].step()
    state.synchronize()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    workload = WORKLOADS[options.size]
    lines = lines_of(options.ranks, options.model)
    seconds: dict[str, list[float]] = {line.name: [] for line in lines}
    losses: dict[str, float] = {}
    with multi_process_service(options.device) as service:
        pool = RankPool(options.ranks, options.device, rank_jobs.RankModels)
        try:
            for line in lines:
                found = pool.run(build, line, workload, options.model, options.warmup, timeout=TIMEOUT)
                losses[line.name] = sum(rank[0] for rank in found) / len(found)
                print(f"  warm: {line.name}, first loss {losses[line.name]:.6f}", flush=True)
            for number in range(options.rounds):
                first = number * len(lines) // options.rounds
                for line in [*lines[first:], *lines[:first]]:
                    seconds[line.name].append(max(pool.run(turn, line.name, timeout=TIMEOUT)))
            machine = pool.run(rank_jobs.describe, timeout=TIMEOUT)[0]
        finally:
            pool.close()
    text = render(options, workload, lines, seconds, losses, {**machine, "mps": service})
    options.out.write_text(text)
    print(text)
    return 0


def render(
    options: argparse.Namespace,
    workload: Workload,
    lines: Sequence[Line],
    seconds: dict[str, list[float]],
    losses: dict[str, float],
    machine: dict[str, Any],
) -> str:
    config = workload.config
    kind = "Llama of transformers" if options.model == "hugging-face" else "plain Llama of the peers"
    rows = [
        f"# {kind}: `ff.parallelize` beside torch's TP and FSDP2",
        "",
        f"`python benchmarks/speed/hugging_face.py {' '.join(options.given)}`, {date.today()}, {options.ranks} ranks "
        f"on {machine['device']} ({len(os.sched_getaffinity(0))} cores), torch {machine['torch']}, "
        f"MPS {machine['mps']}.",
        "",
        f"hidden {config.hidden}, {config.layers} layers, {config.heads} heads, MLP {config.mlp_hidden}, vocabulary "
        f"{config.vocab}, {workload.rows} x {config.seq} tokens, {str(workload.dtype).removeprefix('torch.')}; "
        f"{options.rounds} interleaved rounds, medians; a ratio within the spread is a tie.",
        "",
        "| line | step, ms | range, ms | best peer on this grid / ours | |",
        "|---|---:|---:|---:|---|",
    ]
    for line in lines:
        own = seconds[line.name]
        cells = [line.name, f"{median(own) * 1e3:.0f}", f"{min(own) * 1e3:.0f} to {max(own) * 1e3:.0f}"]
        rows.append(f"| {' | '.join((*cells, *_verdict(line, lines, seconds)))} |")
    spread = max(losses.values()) - min(losses.values())
    rows += ["", f"The first losses of all lines agree within {spread:.1e}.", ""]
    return "\n".join(rows)


def _verdict(line: Line, lines: Sequence[Line], seconds: dict[str, list[float]]) -> tuple[str, str]:
    """Compare our line with the best peer on the same grid; ranges that overlap are a tie."""
    if line.kind != OURS:
        return "", ""
    rivals = [other for other in lines if other is not line and other.shape == line.shape]
    own = seconds[line.name]
    best = min((seconds[other.name] for other in rivals), key=median)
    ratio = median(best) / median(own)
    if min(own) > max(best):
        return f"{ratio:.2f}", "slower"
    return f"{ratio:.2f}", "faster" if max(own) < min(best) else "tie"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = has_gpu()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--model", choices=["hugging-face", "plain"], default="hugging-face")
    parser.add_argument("--size", choices=list(WORKLOADS), default="gpu" if gpu else "cpu")
    parser.add_argument("--ranks", type=int, choices=[4, 8], default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each line before measuring")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-hugging-face.md")
    options = parser.parse_args(arguments)
    for name in ("rounds", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be at least 1")
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())
