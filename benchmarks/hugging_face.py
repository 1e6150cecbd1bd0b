"""The Llama of transformers on several ranks: `ff.parallelize` beside torch's own TP and FSDP2, on each one's grid.

    python benchmarks/hugging_face.py                          # 4 gloo ranks on the CPU
    python benchmarks/hugging_face.py --model plain --size gpu # on a GPU, without transformers: the peers' own Llama

All sides have the same module, batch and dtype and are resident at once. Each round takes every side once, in another
order each time; the slowest rank counts. A step is forward, backward and a plain update of the shards. The peers:

- **FSDP2**: `fully_shard` on the embedding, each block, norm and head, and the root.
- **TP**: transformers' own plan (colwise, rowwise), vocabulary cut, `loss_parallel`.
- **TP + SP**: the same with the stream cut along the sequence between sublayers, as torch's tutorial does; positions
  are given, since the model would count those of its own part.
- **FSDP2 x TP**: both on a mesh of two dims, with and without SP.
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
import peers
import stage
from bed import Bed, multi_process_service
from sides import Side, Size

RESULTS = Path(__file__).parent / "results"
TIMEOUT = 240.0
SIZES = {
    # hidden, layers, heads, mlp, vocab, rows, seq, dtype
    "cpu": Size(
        "cpu",
        ff.models.config(
            "llama-tiny", hidden=256, layers=2, heads=8, kv_heads=8, head_dim=32, mlp_hidden=704, vocab=4096, seq=256
        ),
        rows=8,
        dtype=torch.float32,
    ),
    "tiny": Size("tiny", ff.models.config("llama-tiny", vocab=256), rows=4, dtype=torch.float32),
    "gpu": Size(
        "gpu",
        ff.models.config(
            "llama-3-8b", hidden=4096, layers=4, heads=32, kv_heads=32, mlp_hidden=11008, vocab=32000, seq=2048
        ),
        rows=8,
        dtype=torch.bfloat16,
    ),
}


@dataclass(frozen=True)
class Line:
    """One side of the table: who, and over how many ranks tensors (x) and weights (z) are cut."""

    kind: str
    x: int
    z: int
    sequence: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}{' + SP' if self.sequence else ''} (x={self.x}, z={self.z})"


def lines_of(world: int) -> list[Line]:
    found = []
    for x in sorted({1, 2, world}):
        z = world // x
        found.append(Line("ff.parallelize", x, z))
        peer = "FSDP2 x TP" if x > 1 and z > 1 else "TP" if x > 1 else "FSDP2"
        found += [Line(peer, x, z, sequence) for sequence in ((False, True) if x > 1 else (False,))]
    return found


def make_module(size: Size, model: str, device: torch.device) -> nn.Module:
    """The same numbers on every rank and for every side."""
    torch.manual_seed(0)
    with device:
        return (Answering(peers.Llama(size.config)) if model == "plain" else _of_transformers(size)).to(size.dtype)


def _of_transformers(size: Size) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = size.config
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


class Answering(nn.Module):
    """The peers' Llama with the call of transformers'."""

    def __init__(self, model: peers.Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Answer:  # noqa: ARG002
        return Answer(self.model(input_ids))


@dataclass
class Answer:
    logits: Tensor


class Ours(Side):
    """`ff.parallelize` of the module; the loss is taken outside, as the peers take theirs."""

    def __init__(self, line: Line, size: Size, held: stage.Stage, model: str) -> None:
        self.grid = held.grid(ff.Shape(x=line.x, z=line.z))
        policy = ff.Policy(keep_gathered=True)  # as the peers do
        self.module = ff.parallelize(Losing(make_module(size, model, self.grid.device)), self.grid, policy=policy)
        self.tokens, self.targets = (ff.local_rows(part, self.grid) for part in size.batch(self.grid.device))

    def forward_backward(self) -> Tensor:
        loss = self.module(self.tokens, self.targets)
        loss.backward()
        return loss


class Losing(nn.Module):
    """A model and its loss in one module, so that logits stay cut over the vocabulary."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Torchs(Side):
    """torch's TP, FSDP2 or both on a mesh of (dp, tp) ranks."""

    def __init__(self, line: Line, size: Size, held: stage.Stage, model: str) -> None:
        mesh, device = held.mesh(line.z, line.x), held.grid(ff.Shape(data=held.world)).device
        self.module = make_module(size, model, device)
        plain = model == "plain"
        self.cuts = line.x > 1
        if self.cuts and plain:
            peers.tensor_parallel(self.module.model, mesh["tp"])  # type: ignore[union-attr]
        elif self.cuts:
            tensor_parallel(self.module, mesh["tp"], sequence=line.sequence)
        if line.z > 1:
            self.shard_fully(mesh["dp"], size.dtype, plain=plain)
        rows, place = size.rows // line.z, mesh["dp"].get_local_rank()
        self.tokens, self.targets = (part[place * rows :][:rows] for part in size.batch(device))
        self.positions = torch.arange(size.config.seq, device=device)[None]

    def shard_fully(self, mesh: DeviceMesh, dtype: torch.dtype, *, plain: bool) -> None:
        model: Any = self.module
        if plain:
            peers.shard_fully(model.model, mesh, dtype, explicit=False)
        else:
            inside = model.model
            peers.shard_parts(model, inside.embed_tokens, inside.layers, [inside.norm, model.lm_head], mesh, dtype)

    def forward_backward(self) -> Tensor:
        with loss_parallel() if self.cuts else nullcontext():
            logits = self.module(input_ids=self.tokens, position_ids=self.positions).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
            loss.backward()
        return loss.to_local() if isinstance(loss, DTensor) else loss


def tensor_parallel(model: Any, mesh: DeviceMesh, *, sequence: bool) -> None:
    """transformers' plan for its Llama, in torch's words."""
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


def build(held: stage.Stage, line: Line, size: Size, model: str, warmup: int) -> list[float]:
    kind: Callable[..., Side] = Ours if line.kind == "ff.parallelize" else Torchs
    side = held.sides[line.name] = kind(line, size, held, model)
    return [float(side.step()) for _ in range(warmup)]


def turn(held: stage.Stage, name: str) -> float:
    held.meet()
    began = time.perf_counter()
    held.sides[name].step()
    held.synchronize()
    return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    size = SIZES[options.size]
    lines = lines_of(options.ranks)
    if options.model == "plain":  # the peers' own plan has SP always
        lines = [line for line in lines if line.kind == "ff.parallelize" or line.sequence or line.x == 1]
    seconds: dict[str, list[float]] = {line.name: [] for line in lines}
    losses: dict[str, float] = {}
    with multi_process_service(options.device) as service:
        bed = Bed(options.ranks, options.device, stage.Stage)
        try:
            for line in lines:
                found = bed.run(build, line, size, options.model, options.warmup, timeout=TIMEOUT)
                losses[line.name] = sum(rank[0] for rank in found) / len(found)
                print(f"  warm: {line.name}, first loss {losses[line.name]:.6f}", flush=True)
            for number in range(options.rounds):
                first = number * len(lines) // options.rounds
                for line in [*lines[first:], *lines[:first]]:
                    seconds[line.name].append(max(bed.run(turn, line.name, timeout=TIMEOUT)))
            machine = bed.run(stage.describe, timeout=TIMEOUT)[0]
        finally:
            bed.close()
    text = render(options, size, lines, seconds, losses, {**machine, "mps": service})
    options.out.write_text(text)
    print(text)
    return 0


def render(
    options: argparse.Namespace,
    size: Size,
    lines: Sequence[Line],
    seconds: dict[str, list[float]],
    losses: dict[str, float],
    machine: dict[str, Any],
) -> str:
    config = size.config
    kind = "Llama of transformers" if options.model == "hugging-face" else "plain Llama of the peers"
    rows = [
        f"# {kind}: `ff.parallelize` beside torch's TP and FSDP2",
        "",
        f"`python benchmarks/hugging_face.py {' '.join(options.given)}`, {date.today()}, {options.ranks} ranks on "
        f"{machine['device']} ({len(os.sched_getaffinity(0))} cores), torch {machine['torch']}, MPS {machine['mps']}.",
        "",
        f"hidden {config.hidden}, {config.layers} layers, {config.heads} heads, MLP {config.mlp_hidden}, vocabulary "
        f"{config.vocab}, {size.rows} x {config.seq} tokens, {str(size.dtype).removeprefix('torch.')}; "
        f"{options.rounds} interleaved rounds, medians; a ratio within the spread is a tie.",
        "",
        "| side | step, ms | range, ms | best peer on this grid / ours | |",
        "|---|---:|---:|---:|---|",
    ]
    for line in lines:
        own = seconds[line.name]
        cells = [line.name, f"{median(own) * 1e3:.0f}", f"{min(own) * 1e3:.0f} to {max(own) * 1e3:.0f}"]
        rows.append(f"| {' | '.join((*cells, *_verdict(line, lines, seconds)))} |")
    spread = max(losses.values()) - min(losses.values())
    rows += ["", f"First losses of all sides agree within {spread:.1e}.", ""]
    return "\n".join(rows)


def _verdict(line: Line, lines: Sequence[Line], seconds: dict[str, list[float]]) -> tuple[str, str]:
    rivals = [other for other in lines if other is not line and (other.x, other.z) == (line.x, line.z)]
    if line.kind != "ff.parallelize":
        return "", ""
    own = seconds[line.name]
    best = min((seconds[other.name] for other in rivals), key=median)
    ratio = median(best) / median(own)
    if min(own) > max(best):
        return f"{ratio:.2f}", "slower"
    return f"{ratio:.2f}", "faster" if max(own) < min(best) else "tie"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # the parent must not open the GPU before MPS runs
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--model", choices=["hugging-face", "plain"], default="hugging-face")
    parser.add_argument("--size", choices=list(SIZES), default="gpu" if gpu else "cpu")
    parser.add_argument("--ranks", type=int, choices=[4, 8], default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each side before it is measured")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-hugging-face.md")
    options = parser.parse_args(arguments)
    for name in ("rounds", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be at least 1")
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())
