"""One case of law 1: a model on a grid beside the same model on one process.

`on_ranks` runs on every rank and returns what this rank holds; `on_one_process` computes the same in plain
torch; `errors` compares shard by shard, replicas included.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

import fourfold as ff
import plain
from fourfold import layout
from fourfold.axes import AXES
from fourfold.ledger import Collective
from fourfold.params import local_of
from fourfold.policy import Overlap, Policy
from fourfold.shape import Shape, shapes_of
from harness import grid_of

MAX_NORM = 0.5
SEED = 11


@dataclass(frozen=True)
class Options:
    llama: bool = False
    bias: bool = True
    tied: bool = True
    few_kv_heads: bool = False
    qk_norm: bool = False
    masked: bool = False
    odd_vocab: bool = False
    odd_tokens: bool = False
    keep_gathered: bool = False
    keep_weights: bool = False
    accumulate: bool = False
    two_layers: bool = False
    halves: bool = False
    aligned: bool = False
    even_tokens: bool = False
    experts: bool = False
    """A mixture of experts, with an MLP beside them, behind a first dense block."""

    def __str__(self) -> str:
        return "+".join(f.name for f in dataclasses.fields(self) if getattr(self, f.name)) or "none"


def pad_small_logits() -> AbstractContextManager[Any]:
    """Pad the logits of small vocabularies in fp64 too, to tens of columns, of which no size here is a multiple."""
    return mock.patch.multiple(layout, ALIGNED_COLUMNS=10, ALIGNED_ITEMSIZES=(8,), LEAST_TO_PADDING=0)


NAMES = [field.name for field in dataclasses.fields(Options) if field.name != "experts"]
"""The options that are drawn. Mixtures have cases of their own (nn/test_moe.py): no plan predicts what they send."""


@dataclass(frozen=True)
class Case:
    shape: Shape
    activations: str
    options: Options
    most_steps: int = 2
    """Of AdamW on up to 4 ranks, which soak.py gives 5; beyond that 2."""

    def __str__(self) -> str:
        return f"{self.shape}, {self.activations}: {self.options}"

    @property
    def config(self) -> ff.models.ModelConfig:
        """24 heads and widths that every grid of up to 8 ranks can cut."""
        options = self.options
        mixture: dict[str, Any] = {}
        if options.experts:
            mixture = dict(experts=5, top_k=2, expert_hidden=24, shared_hidden=24, dense_layers=1)
        return ff.models.config(
            "llama-tiny" if options.llama or options.experts else "gpt-tiny",
            layers=2 if options.two_layers or options.experts else 1,
            hidden=24,
            head_dim=8,
            # 3 heads for 24: x or y of 2, 4, 6, 8 cut through them or leave ranks without one of their own
            kv_heads=3 if options.few_kv_heads else 24,
            mlp_hidden=24,
            bias=options.bias and not options.experts,
            tied=options.tied,
            qk_norm=options.qk_norm,
            # large enough for tokens to go to the table
            vocab=(53 if options.odd_vocab else 48) * (10 if options.even_tokens else 1),
            seq=16,
            **mixture,
        )

    @property
    def policy(self) -> Policy:
        options = self.options
        return Policy(
            activations=self.activations,
            keep_gathered=options.keep_gathered,
            keep_weights=options.keep_weights,
            bucket_bytes=10_000,  # several buckets even here
            even_tokens=options.even_tokens,
            overlap=Overlap(halves=2 if options.halves else 1),
        )

    def padding(self) -> AbstractContextManager[Any]:
        return pad_small_logits() if self.options.aligned else nullcontext()

    @property
    def steps(self) -> int:
        """Fewer where many ranks share few cores."""
        return self.most_steps if self.shape.world <= 4 else 2

    @property
    def micro_steps(self) -> int:
        return 2 if self.options.accumulate else 1

    @property
    def place(self) -> tuple[int, int]:
        """Rows and sequence of a (data, z) place; 7 tokens divide by no x."""
        return (1, 7) if self.options.odd_tokens else (2, 12)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """[micro_steps, rows, seq] of the whole batch."""
        rows, seq = self.place
        generator = torch.Generator().manual_seed(step)
        whole = (self.micro_steps, rows * self.shape.data * self.shape.z, seq)
        tokens = torch.randint(self.config.vocab, whole, generator=generator)
        targets = torch.randint(self.config.vocab, whole, generator=generator)
        if self.options.masked:
            # row r keeps about 1 in r + 1 of its targets, so places and micro-steps count differently
            keep = torch.rand(whole, generator=generator) < 1 / torch.arange(1.0, whole[0] * whole[1] + 1).view(
                *whole[:2], 1
            )
            keep[0, 0, 0] = True
            targets = targets.masked_fill(~keep, -100)
        return tokens, targets


def on_one_process(case: Case) -> dict[str, Any]:
    model = plain.make(case.config, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(case.steps):
        loss = torch.zeros((), dtype=torch.float64)
        tokens, targets = case.batch(step)
        count = (targets != -100).sum()
        streams = []
        for micro_tokens, micro_targets in zip(tokens, targets, strict=True):
            a = model.hidden(micro_tokens)
            a.retain_grad()
            streams.append(a)
            logits = model.logits(a)
            loss = (
                loss + functional.cross_entropy(logits.flatten(0, 1), micro_targets.flatten(), reduction="sum") / count
            )
        loss.backward()
        if step == 0:
            found["logits"] = logits.detach()
            found["stream"] = streams[-1].grad.flatten(0, 1)
            found["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        found["losses"].append(loss.item())
        found["norms"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = {name: p.detach() for name, p in model.named_parameters()}
    return found


def on_ranks(case: Case) -> dict[str, Any]:
    with case.padding():
        return _on_ranks(case)


def _on_ranks(case: Case) -> dict[str, Any]:
    grid = grid_of(case.shape)
    model = ff.models.build(case.config, grid, policy=case.policy, seed=SEED, dtype=torch.float64)
    optimizer = LocalAdamW(model.parameters())
    streams: list[Tensor] = []

    def keep_stream(_: Any, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].retain_grad()
        streams[:] = [inputs[0]]

    def keep_logits(head: Any, _: Any, logits: Tensor) -> None:
        ids = head.columns()
        found["logits"] = ids, logits[:, : len(ids)].detach().cpu().numpy().copy()

    found: dict[str, Any] = {"losses": [], "norms": [], "coords": grid.coords}
    # hooked layers do not pause inside, so halves are compared by gradients alone
    watched = not case.options.halves
    if watched:
        model.layers[0].register_forward_pre_hook(keep_stream)
        hook = model.head.register_forward_hook(keep_logits)
    for step in range(case.steps):
        with grid.ledger.watch() as records:
            loss = backward(model, case, step)
            if step == 0 and watched:
                hook.remove()
                found["stream"] = streams[0].grad.cpu().numpy().copy()
            if step == 0:
                found["gradients"] = {name: shard_of(p.grad) for name, p in model.named_parameters()}
            norm = ff.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        found["losses"].append(loss)
        found["norms"].append(norm.item())
    found["parameters"] = {name: shard_of(p) for name, p in model.named_parameters()}
    found["boxes"] = {
        name: [(part.start, part.stop) for part in spec.box(grid)]
        for name, (_, spec) in model.gradients.parameters.items()
    }
    found["records"] = [dataclasses.astuple(record) for record in records]
    return found


class LocalAdamW:
    """torch's AdamW over the shards themselves. It computes what AdamW computes over the DTensors
    (test_optimizers_of_torch_take_the_parameters), without deriving anew for each mesh how each of its
    elementwise operations is cut, which takes torch seconds."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.shards = [torch.nn.Parameter(local_of(parameter).detach()) for parameter in self.parameters]
        self.adamw = torch.optim.AdamW(self.shards, lr=1e-3, fused=True)

    def step(self) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad, parameter.grad = local_of(parameter.grad), None
        self.adamw.step()


def backward(model: ff.models.Transformer, case: Case, step: int) -> float:
    tokens, targets = (
        torch.stack([ff.local_rows(rows, model.grid) for rows in whole]).to(model.grid.device)
        for whole in case.batch(step)
    )
    if case.micro_steps == 1:
        loss = model(tokens[0], targets[0])
        loss.backward()
        return loss.item()
    count = ff.count_targets(targets, model.grid)
    total = 0.0
    with ff.accumulate(model):
        for micro in range(case.micro_steps - 1):
            loss = model(tokens[micro], targets[micro], count=count)
            loss.backward()
            total += loss.item()
    loss = model(tokens[-1], targets[-1], count=count)
    loss.backward()
    return total + loss.item()


def shard_of(tensor: Tensor) -> Any:
    return local_of(tensor).detach().cpu().numpy().copy()


def errors(case: Case, one: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Law 1's error by kind: max|a - b| / max(max|b|, s), s the largest value of that kind in the model."""
    worst: dict[str, float] = {}

    def compare(kind: str, a: Any, b: Tensor, scale: Tensor) -> None:
        difference = (torch.as_tensor(a) - b).abs().max().item() if b.numel() else 0.0
        if not difference <= float("inf"):
            difference = float("inf")
        worst[kind] = max(worst.get(kind, 0.0), difference / scale.item())

    for found in ranks:
        for kind in ("gradients", "parameters"):
            scale = max(whole.abs().max() for whole in one[kind].values())
            for name, whole in one[kind].items():
                box = tuple(slice(start, stop) for start, stop in found["boxes"][name])
                compare(kind, found[kind][name], whole[box], scale)
        for kind in ("losses", "norms"):
            values = torch.tensor(one[kind])
            compare(kind, torch.tensor(found[kind]), values, values.abs().max())
        if case.options.halves:
            continue
        ids, logits = found["logits"]
        rows = local_block(one["logits"], case.shape, found["coords"]).flatten(0, 1)[:, ids.start : ids.stop]
        compare("logits", logits, rows, one["logits"].abs().max())
        # what reaches the stream is, as under DDP, the gradient of the place's own loss: the average is still to come
        stream = stream_block(one["stream"], case, found["coords"]) * case.shape.places
        compare("input gradient", torch.as_tensor(found["stream"])[: len(stream)], stream, one["stream"].abs().max())
    return worst


def local_block(whole: Tensor, shape: Shape, coords: dict[str, int]) -> Tensor:
    places = shape.data * shape.z
    return whole.chunk(places)[coords["data"] * shape.z + coords["z"]]


def stream_block(whole: Tensor, case: Case, coords: dict[str, int]) -> Tensor:
    """The residual stream of one rank at rest: tokens over data, z, x, features over y."""
    tokens = local_block(whole, case.shape, coords)
    if case.activations == "sharded":
        size = -(-len(tokens) // case.shape.x)
        tokens = tokens[coords["x"] * size : (coords["x"] + 1) * size]
    return tokens.chunk(case.shape.y, dim=1)[coords["y"]]


def predicted(case: Case, rank: int) -> list[Collective]:
    from fourfold.planner.sizes import LocalSizes
    from fourfold.planner.transformer import step_program

    rows, seq = case.place
    with case.padding():
        sizes = LocalSizes(case.config, case.shape, case.policy, rows, seq, torch.float64, rank)
        return step_program(sizes, micro_steps=case.micro_steps, optimizer=False, clip=True).records


WORLDS = (1, 2, 3, 4, 6, 8)


DOUBLING = ("accumulate", "two_layers")
"""Options that double the work of a case: rare where many ranks share few cores."""


def rotating_cases() -> list[Case]:
    """Every grid in both modes, those of 8 ranks that one or two axes cut in one of them, in some rank order, with
    options drawn so that every pair of them occurs, both on and off. Both modes everywhere in `make soak`."""
    draw = random.Random(57)
    modes = ("sharded", "replicated")
    cases = []
    for world in WORLDS:
        rare = 0.4 if world <= 4 else 0.1
        for number, plain_shape in enumerate(shapes_of(world)):
            shape = plain_shape.reordered(tuple(draw.sample(AXES, len(AXES))))
            both = world < 8 or len(shape.used_axes) == 3
            for activations in modes if both else [modes[number % 2]]:
                options = {name: draw.random() < (rare if name in DOUBLING else 0.5) for name in NAMES}
                cases.append(Case(shape, activations, Options(**options)))
    return cases
