"""A generator of models, losses and loops as people write them: a seed gives a case, the same in every process.

A case is run on a grid and on one process, and every result is compared: outputs, losses, every gradient of every
step, parameters and buffers after the last. A case is exact, or it is refused in its first step with an error that says
what to do instead. Everything else is a fault: a SILENT difference, or a CRASH.

What one process computes: where the loss is that of the whole batch (a loss of torch's with reduction="mean" inside of
the model, or `ff.global_mean`), the plain module on the whole batch; otherwise the mean over the places of each place's
loss, which the plain module computes on the rows of that place alone.
"""

# ruff: noqa: ARG002  # stems, as blocks, are built from width and sequence length

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.params import local_of
from fourfold.policy import Policy
from fourfold.wrap import whole_tensors
from fourfold.wrap.grid_tensor import GridTensor
from harness import grid_of
from people_blocks import BLOCKS, Draws, Stateful
from people_losses import ENDINGS, OF_WEIGHTS, PENALTIES, Batch, Results, draw_batch, weights_outside
from people_steps import BY_HAND, HABITS, PASSES

TOLERANCE = 1e-9
GRIDS = (
    Shape(x=2),
    Shape(y=2),
    Shape(z=2),
    Shape(data=2),
    Shape(x=2, z=2),
    Shape(y=2, data=2),
)
RARE_GRIDS = (Shape(x=2, y=2), Shape(z=2, data=2))
STEPS = 3


# a case


@dataclass(frozen=True)
class Case:
    seed: int
    shape: Shape = Shape(x=2)
    mode: str = "sharded"
    blocks: tuple[str, ...] = ("mlp",)
    ending: str = "outside: squares"
    stem: str = "linear"
    wrap: str = "tensor"
    penalty: str = ""
    weights_outside: bool = False
    loop: str = "plain"
    habit: str = ""
    optimizer: str = "sgd"
    width: int = 6
    seq: int = 4
    rows: int = 2
    """Rows of a place."""
    options: tuple[tuple[str, Any], ...] = ()
    """Of the policy."""
    shared: bool = False
    """The first block runs once more at the end."""

    def __str__(self) -> str:
        default = Case(self.seed)
        said = [f"{self.seed}: {self.shape} {self.mode}"]
        for own in fields(self)[3:]:
            value = getattr(self, own.name)
            if own.name in ("blocks", "ending") or value != getattr(default, own.name):
                text = " + ".join(value) if own.name == "blocks" else str(value)
                said.append(text if own.name in ("blocks", "ending") else f"{own.name}={text}")
        return ", ".join(said)

    @property
    def places(self) -> int:
        return self.shape.z * self.shape.data

    @property
    def sorts(self) -> set[str]:
        """What its blocks and its ending need of a batch."""
        ending = ENDINGS[self.ending]
        found = {BLOCKS[name].sort for name in self.blocks}
        return found | ({"companions"} if ending.companions else set()) | ({"whole batch"} if ending.whole else set())

    @property
    def together(self) -> bool:
        """Whether the plain module must see the whole batch at once."""
        return bool(self.sorts & {"batch norm", "companions", "whole batch"})


def draw(seed: int, grids: tuple[Shape, ...] = ()) -> Case:
    """The case of a seed. The first seeds take each block alone, each ending, each loop, each stem and each penalty by
    turns, twice, on different grids; later ones combine them at random, but for what torch takes seconds for on
    DTensors."""
    draws = Random(seed)
    mode = draws.choice(("sharded", "replicated"))
    by_turns = grids or GRIDS
    shape = by_turns[seed % len(by_turns)]
    if not grids and draws.random() < 0.08:
        shape = draws.choice(RARE_GRIDS)
    case = Case(seed, shape, mode, seq=draws.choice((1, 3, 4, 5, 7)), rows=draws.choice((1, 2, 2, 3)))
    singles = list(one_at_a_time())
    if seed < 2 * len(singles):
        return fitting(replace(case, **singles[seed % len(singles)]), draws)
    return fitting(combined(case, draws), draws)


def one_at_a_time() -> Iterator[dict[str, Any]]:
    for name in BLOCKS:
        yield dict(blocks=(name,))
    for name in ENDINGS:
        yield dict(ending=name)
    for name in LOOPS:
        yield dict(loop=name)
    for name in HABITS:
        yield dict(habit=name)
    for name in STEMS:
        yield dict(stem=name)
    for name in OPTIMIZERS:
        yield dict(optimizer=name)
    for wrap in WRAPS:
        yield dict(wrap=wrap, penalty="activations")
    for name in PENALTIES:
        yield dict(penalty=name, wrap="dict")
        yield dict(penalty=name, wrap="tuple", ending="inside: cross entropy")
    yield dict(weights_outside=True)
    yield dict(shared=True)
    yield dict(options=(("recompute", "block"),), blocks=("mlp", "mlp"))


def combined(case: Case, draws: Random) -> Case:
    ordinary = [name for name, kind in BLOCKS.items() if kind.sort != "companions"]
    blocks = tuple(draws.choice(ordinary) for _ in range(draws.choice((1, 2, 2, 3))))
    if draws.random() < 0.03:
        blocks = (*blocks, draws.choice([name for name, kind in BLOCKS.items() if kind.sort == "companions"]))
    options = draws.choice(
        (*[()] * 5, (("recompute", "block"),), (("keep_gathered", True),), (("keep_weights", True),))
    )
    return replace(
        case,
        blocks=blocks,
        ending=draws.choice(list(ENDINGS)),
        stem=draws.choice(list(STEMS)),
        wrap=draws.choice(list(WRAPS)),
        penalty=draws.choice([name for name in PENALTIES if name != "all weights"]) if draws.random() < 0.3 else "",
        loop=draws.choice([name for name in LOOPS if name not in ALONE]) if draws.random() < 0.6 else "plain",
        optimizer=draws.choice(list(OPTIMIZERS)),
        width=draws.choice((4, 5, 6, 6, 7, 8, 9, 12, 13)),
        options=options,
        shared=draws.random() < 0.1,
        habit=draws.choice(list(HABITS)) if draws.random() < 0.5 else "",
    )


BY_PLACE = {"early exit", "experts that nobody asked are left out"}
"""Blocks that use other layers on some places than on others, as the rows there ask for."""


def fitting(case: Case, draws: Random) -> Case:
    """The same with sizes that its blocks can be built for, and without what cannot stand together."""
    widths = sorted({case.width, 6, 8, 12}, key=lambda width: (width != case.width, width))
    fits = [w for w in widths if all(w % BLOCKS[name].multiple == 0 for name in case.blocks)]
    case = replace(case, width=fits[0])
    ending = ENDINGS[case.ending]
    if case.together and ending.inside and ending.rule == "place" and not ending.by_rows:
        case = replace(case, ending="inside: cross entropy")
        ending = ENDINGS[case.ending]
    if ending.tokens and case.stem not in TABLES:
        case = replace(case, stem=draws.choice(TABLES))
    if case.ending == "outside: gradient penalty":  # attention of torch's cannot be differentiated twice
        case = replace(case, blocks=(draws.choice(("mlp", "film", "norm by hand", "many operations")),), penalty="")
        case = replace(case, stem=case.stem if case.stem in GIVEN else "linear")
    case = without(case, BY_PLACE if case.shape.z > 1 else set())  # as under FSDP places must use the same layers
    if "companions" in case.sorts:  # these are refused only where the check can tell them from chance
        case = without(case, {name for name, kind in BLOCKS.items() if kind.by_chance})
    if "energy and forces" in case.blocks and case.loop == "evaluated first":  # no gradients in inference mode
        case = replace(case, loop="evaluated between")
    if "teacher in buffers" in case.blocks and (case.loop == "two forwards" or case.shared):  # torch refuses it too
        case = replace(case, loop="plain", shared=False)
    if case.loop in ("input gradients", "adversarial") and (
        case.stem not in GIVEN or case.together or ending.rule == "batch"
    ):
        case = replace(case, loop="plain")
    if case.wrap == "tensor" and (case.penalty or ending.inside or ending.head.__name__ == "Pair"):
        case = replace(case, wrap="tuple")
    if case.places > 1 and "batch norm" in case.sorts and case.rows == 1 and case.seq == 1:
        case = replace(case, seq=3)
    return case


def without(case: Case, blocks: set[str]) -> Case:
    return replace(case, blocks=tuple(block for block in case.blocks if block not in blocks) or ("mlp",))


# models


class Linear(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.lift = nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.lift(x)


class Embedded(nn.Module):
    def __init__(self, width: int, seq: int, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width, padding_idx=padding)
        self.positions = nn.Embedding(seq, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))


class Bagged(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, width, mode="sum")
        self.spread = nn.Linear(width, seq * width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.spread(self.bag(tokens)).view(*tokens.shape, -1)


class Identity(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x


class SeveralInputs(nn.Module):
    """A dict, a number and nothing beside each other."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.lift, self.embed = nn.Linear(5, width), Embedded(width, seq)

    def forward(self, parts: dict[str, Any], scale: float, nothing: None = None) -> Tensor:
        h = self.lift(parts["x"]) + scale * self.embed(parts["tokens"])
        return h * parts["mask"].unsqueeze(-1)


class Keywords(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width + 5, width)
        self.embed = Embedded(width, seq, padding=0)

    def forward(self, *, tokens: Tensor, pair: tuple[Tensor, Tensor], bias: Tensor | None = None) -> Tensor:
        h = self.mix(torch.cat([self.embed(tokens), pair[0]], dim=-1))
        return h if bias is None else h + bias


class Image(nn.Module):
    """Patches of an image [rows, 1, seq, 5]."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, (1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.patch(x.unsqueeze(1)).flatten(2).transpose(1, 2)


STEMS: dict[str, tuple[Callable[[int, int], nn.Module], Callable[[Batch], tuple[tuple, dict]]]] = {
    "linear": (Linear, lambda b: ((b["x"],), {})),
    "tokens": (Embedded, lambda b: ((b["tokens"],), {})),
    "padded tokens": (partial(Embedded, padding=0), lambda b: ((b["tokens"],), {})),
    "bag": (Bagged, lambda b: ((b["tokens"],), {})),
    "identity": (Identity, lambda b: ((b["x"],), {})),
    "several": (SeveralInputs, lambda b: (({"x": b["x"], "tokens": b["tokens"], "mask": b["mask"]}, 0.5, None), {})),
    "keywords": (
        Keywords,
        lambda b: ((), {"tokens": b["tokens"], "pair": (b["x"], b["ids"]), "bias": b["number"][:, None, None]}),
    ),
    "image": (Image, lambda b: ((b["x"],), {})),
}
"""The first part of a model, and what of a batch it is given."""
TABLES = ("tokens", "padded tokens")
GIVEN = ("linear", "identity", "image")
"""Those that are given one tensor of numbers."""


@dataclass
class Output:
    out: Tensor | None = None
    extra: Tensor | None = None
    loss: Tensor | None = None
    aux: Tensor | None = None
    note: str = "a result"


class Named(NamedTuple):
    out: Tensor | None = None
    extra: Tensor | None = None
    loss: Tensor | None = None
    aux: Tensor | None = None


KEYS = ("out", "extra", "loss", "aux")
WRAPS: dict[str, Callable[[Results], Any]] = {
    "tensor": lambda found: next(iter(found.values())),
    "tuple": lambda found: tuple(found.get(key) for key in KEYS),
    "list": lambda found: [found.get(key) for key in KEYS],
    "dict": lambda found: dict(found),
    "nested": lambda found: {"results": [dict(found)], "n": 3},
    "dataclass": lambda found: Output(**found),
    "named tuple": lambda found: Named(**found),
}


def unwrapped(result: Any, wrap: str, first: str) -> Results:
    if wrap == "tensor":
        return {first: result}
    if wrap == "nested":
        return result["results"][0]
    if wrap == "dict":
        return result
    if wrap in ("tuple", "list"):
        found = dict(zip(KEYS, result, strict=True))
    else:
        found = {key: getattr(result, key) for key in KEYS}
    return {key: value for key, value in found.items() if value is not None}


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.stem = STEMS[case.stem][0](case.width, case.seq)
        made = [BLOCKS[name].make(case.width, case.seq) for name in case.blocks]
        self.blocks = nn.ModuleList(made + made[:1] if case.shared else made)
        self.head = ENDINGS[case.ending].head(case.width)
        if case.penalty == "own weight":
            self.own = nn.Parameter(torch.randn(case.width) * 0.3)
        self.case = case

    def forward(self, *args: Any, targets: Batch | None = None, **kwargs: Any) -> Any:
        h = self.stem(*args, **kwargs)
        for part in self.blocks:
            h = part(h)
        if self.case.penalty == "own weight":
            h = h + self.own
        ending = ENDINGS[self.case.ending]
        found = self.head(h, targets, self.stem.table.weight) if ending.tokens else self.head(h, targets)
        if self.case.penalty:
            penalty = 0.05 * PENALTIES[self.case.penalty](self, h)
            if "loss" in found:
                found["loss"] = found["loss"] + penalty
            else:
                found["aux"] = penalty
        return WRAPS[self.case.wrap](found)


def build(case: Case) -> Model:
    torch.manual_seed(case.seed)
    return Model(case).double()


def batch_of(case: Case, step: int, micro: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(case.seed * 1000 + step * 10 + micro)
    features = case.width if case.stem == "identity" else 5
    return draw_batch(case.rows * case.places, case.seq, features, generator)


# one process and a grid


@dataclass
class Pass:
    """A forward pass: the result of the model by name, and the loss that the loop made."""

    results: Results
    loss: Tensor


def run(case: Case, model: Model, batch: Batch, grid: Grid | None) -> Pass:
    """Forward and loss on these rows, as a loop would write it."""
    ending = ENDINGS[case.ending]
    args, kwargs = STEMS[case.stem][1](batch)
    if case.ending == "outside: gradient penalty":
        vars(model)["given"] = batch["x"].requires_grad_()
    if ending.inside and model.training:
        kwargs["targets"] = {key: value for key, value in batch.items() if key not in ("x", "tokens")}
    if case.ending == "outside: what a hook kept":
        vars(model)["kept"] = {}
        hook = model.blocks[0].register_forward_hook(lambda _, __, out: model.kept.update(hidden=out))
    results = unwrapped(model(*args, **kwargs), case.wrap, "out")
    if case.ending == "outside: what a hook kept":
        hook.remove()
    if not model.training:
        return Pass(results, torch.zeros(()))
    return Pass(results, with_penalties(case, ending.loss(results, batch, model), results, batch, model, grid))


def with_penalties(case: Case, loss: Tensor, results: Results, batch: Batch, model: Model, grid: Grid | None) -> Tensor:
    globally = ENDINGS[case.ending].globally
    if grid is not None and globally is not None:
        loss = globally(loss, batch, grid)
    if "aux" in results:
        loss = loss + results["aux"]
    return loss + weights_outside(model) if case.weights_outside else loss


def by_place(case: Case, batch: Batch) -> list[dict[str, Tensor]]:
    rows = case.rows
    return [
        {key: value[place * rows : (place + 1) * rows] for key, value in batch.items()} for place in range(case.places)
    ]


Drawn = list[list[Tensor]]
"""The random numbers of a pass, by block and in the order in which they were drawn."""


def give(model: Model, drawn: list[Drawn], places: Iterable[int]) -> None:
    """Let the next pass use what these places drew for their rows. One number for all rows is repeated for each."""
    blocks = [module for module in model.modules() if isinstance(module, Draws)]
    for at, block in enumerate(blocks if drawn else ()):
        block.given = [
            by_rows(each, model.case.rows) for each in zip(*(drawn[place][at] for place in places), strict=True)
        ]


def by_rows(numbers: Iterable[Tensor], rows: int) -> Tensor:
    return torch.cat([own if own.dim() else own.expand(rows, 1, 1) for own in numbers])


def alone(case: Case, model: Model, batch: Batch, drawn: list[Drawn]) -> tuple[Tensor, list[Pass]]:
    """What one process computes: the loss whose gradient counts, and what each place should see."""
    ending = ENDINGS[case.ending]
    give(model, drawn, range(case.places))
    if not model.training or (ending.rule == "batch" or (case.together and ending.inside)):
        whole = run(case, model, batch, None)
        return whole.loss, [Pass(rows_of(whole.results, case, place), whole.loss) for place in range(case.places)]
    if case.together:
        whole = run(case, model, batch, None)
        passes = []
        for place, part in enumerate(by_place(case, batch)):
            results = rows_of(whole.results, case, place)
            loss = with_penalties(case, ending.loss(results, part, model), results, part, model, None)
            passes.append(Pass(results, loss))
    else:
        passes = []
        for place, part in enumerate(by_place(case, batch)):
            give(model, drawn, [place])
            with unchanged(model, last=len(passes) == case.places - 1):
                passes.append(run(case, model, part, None))
    return torch.stack([each.loss for each in passes]).mean(), passes


def rows_of(results: Results, case: Case, place: int) -> Results:
    return {key: value.chunk(case.places)[place] if value.dim() else value for key, value in results.items()}


@contextmanager
def unchanged(model: Model, *, last: bool) -> Iterator[None]:
    """What a module counts, it counts once a step, however many places one process stands for. Each place has buffers
    of its own, for autograd may need those of the place before."""
    modules = list(model.modules())
    counts = {module: module.calls for module in modules if hasattr(module, "calls")}
    states = {module: module.state() for module in modules if isinstance(module, Stateful)}
    buffers = [(module, name, buffer) for module in modules for name, buffer in module._buffers.items()]
    for module, name, buffer in buffers:
        module._buffers[name] = buffer.clone()
    yield
    if last:
        return
    for module, calls in counts.items():
        module.calls = calls
    for module, state in states.items():
        module.set_state(state)
    for module, name, buffer in buffers:
        module._buffers[name] = buffer


# loops


@dataclass
class Side:
    """One of the two that are compared, and what was found so far."""

    case: Case
    model: Model
    grid: Grid | None
    optimizer: Any = None
    found: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    leaf: Tensor = field(default_factory=lambda: torch.empty(0))
    """The input of the last pass, where the loop asked for its gradient."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a habit keeps from step to step; tensors under a name with "parameter" are compared at the end."""
    drawn: list[Any] = field(default_factory=list)
    """The random numbers of each pass: a `Drawn` of this place on a grid, and one of each place on one process."""
    warned: str = ""
    """The warning that numbers of a part of a weight are not those of the weight."""

    def forward(self, micro: int = 0, name: str = "", *, leaf: bool = False, shift: Tensor | float = 0.0) -> Tensor:
        """A forward pass on a batch; keeps what is compared and returns the loss."""
        batch = batch_of(self.case, self.step, micro)
        name = f"step {self.step}{f'.{micro}' if micro else ''} {name}".strip()
        if self.grid is not None:
            batch = {key: ff.local_rows(value, self.grid).clone() for key, value in batch.items()}
        batch["x"] = batch["x"] + shift
        if leaf:
            self.leaf = batch["x"].requires_grad_()
        if self.grid is None:
            with mock.patch.object(ff, "whole_batch", lambda rows: rows):  # here one process has the whole batch
                loss, passes = alone(self.case, self.model, batch, self.drawn.pop(0) if self.drawn else [])
            self.found[f"{name}: passes"] = [
                ({key: plain(value) for key, value in each.results.items()}, plain(each.loss)) for each in passes
            ]
            return loss
        own = run(self.case, self.model, batch, self.grid)
        self.drawn.append([module.noted for module in self.model.modules() if isinstance(module, Draws)])
        for module in self.model.modules():
            if isinstance(module, Draws):
                module.noted = []
        self.found[f"{name}: pass"] = {key: plain(value) for key, value in own.results.items()}, plain(own.loss)
        return own.loss

    def evaluate(self, name: str) -> None:
        self.model.eval()
        with torch.no_grad():
            self.forward(1, name)
        self.model.train()

    def log(self, name: str, *numbers: Any) -> None:
        """Keep numbers that the loop has read, in order."""
        key = f"step {self.step}: statistic {name}"
        new = [
            plain(number).double() if isinstance(number, Tensor) else torch.tensor(float(number)) for number in numbers
        ]
        self.found[key] = torch.cat([self.found.get(key, torch.empty(0)).double(), torch.stack(new).double()])

    def gradients(self) -> None:
        if self.grid is None:
            found = {
                name: torch.zeros_like(p) if p.grad is None else p.grad
                for name, p in self.model.named_parameters(remove_duplicate=False)
            }
        else:
            found = whole_tensors(self.model, "gradient")
        self.found |= {f"step {self.step}: gradient {name}": value.clone() for name, value in found.items()}

    def finish(self) -> None:
        if self.grid is None:
            values = dict(self.model.named_parameters(remove_duplicate=False))
        else:
            values = whole_tensors(self.model)
        self.found |= {f"parameter {name}": value.detach() for name, value in values.items()}
        self.found |= {f"buffer {name}": plain(value) for name, value in self.model.named_buffers()}
        for name, values in self.kept.items():
            if name.startswith("parameter "):
                each = values.items() if isinstance(values, dict) else enumerate(values)
                self.found |= {f"{name} {key}": plain(value) for key, value in each}


def plain(value: Tensor) -> Tensor:
    value = value.detach()
    value = value.whole() if isinstance(value, GridTensor) else value
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.clone()


def plain_step(side: Side) -> None:
    side.forward().backward()


def accumulated(side: Side) -> None:
    with nullcontext() if side.grid is None else ff.accumulate(side.model):
        for micro in range(2):
            (side.forward(micro) / 3).backward()
    (side.forward(2) / 3).backward()


def accumulated_naively(side: Side) -> None:
    for micro in range(2):
        (side.forward(micro) / 2).backward()


def two_forwards(side: Side) -> None:
    (side.forward(0) + 0.5 * side.forward(1)).backward()


def clipped(side: Side) -> None:
    side.forward().backward()
    clip = torch.nn.utils.clip_grad_norm_ if side.grid is None else ff.clip_grad_norm_
    side.found[f"step {side.step}: norm"] = plain(clip(side.model.parameters(), 0.1))


def evaluated_between(side: Side) -> None:
    side.forward().backward()
    side.evaluate("evaluation")


def evaluated_first(side: Side) -> None:
    with torch.inference_mode():
        side.model.eval()
        side.forward(1, "evaluation")
        side.model.train()
    side.forward().backward()


def twice_backward(side: Side) -> None:
    loss = side.forward()
    loss.backward(retain_graph=True)
    (2 * loss).backward()


def scaled(side: Side) -> None:
    (side.forward() * 64).backward()
    for parameter in side.model.parameters():
        if parameter.grad is not None:
            local_of(parameter.grad).div_(64) if side.grid is not None else parameter.grad.div_(64)


def frozen_later(side: Side) -> None:
    first = next(p for p in side.model.parameters() if p.requires_grad or side.step)
    first.requires_grad_(side.step != 1)
    side.forward().backward()


def input_gradients(side: Side) -> None:
    """The loop reads the gradient of its input, which is of the place's own loss."""
    side.forward(leaf=True).backward()
    side.found[f"step {side.step}: input"] = side.leaf.grad.clone()


def adversarial(side: Side) -> None:
    """The loop moves its input up the slope of its loss, then trains on that."""
    (slope,) = torch.autograd.grad(side.forward(leaf=True), side.leaf)
    if side.grid is None:
        slope = slope * side.case.places
    side.forward(1, shift=0.1 * slope).backward()


def by_parameters(side: Side) -> None:
    """Gradients by torch.autograd.grad, as meta-learning has them."""
    trained = [parameter for parameter in side.model.parameters() if parameter.requires_grad]
    for parameter, gradient in zip(trained, torch.autograd.grad(side.forward(), trained), strict=True):
        parameter.grad = gradient


def hooked(side: Side) -> None:
    """A hook on a parameter halves its gradient."""
    parameter = next(p for p in reversed(list(side.model.parameters())) if p.requires_grad)
    if not side.step:
        parameter.register_hook(lambda gradient: gradient / 2)
    side.forward().backward()


def hooked_after(side: Side) -> None:
    """A hook on a parameter counts its gradients."""
    parameter = next(p for p in reversed(list(side.model.parameters())) if p.requires_grad)
    calls: list[int] = []
    hook = parameter.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    side.forward().backward()
    hook.remove()
    side.found[f"step {side.step}: gradient hooks"] = torch.tensor([len(calls)])


def clamped(side: Side) -> None:
    """Weights are kept within bounds after each step, as in WGAN."""
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.clamp_(-0.3, 0.3)
    side.forward().backward()


def keeps_zeros(side: Side) -> None:
    """zero_grad(set_to_none=False), before the step as many write it."""
    side.model.zero_grad(set_to_none=False)
    side.forward().backward()


LOOPS: dict[str, Callable[[Side], None]] = {
    "plain": plain_step,
    "accumulated": accumulated,
    "accumulated naively": accumulated_naively,
    "two forwards": two_forwards,
    "clipped": clipped,
    "evaluated between": evaluated_between,
    "evaluated first": evaluated_first,
    "twice backward": twice_backward,
    "scaled": scaled,
    "frozen later": frozen_later,
    "input gradients": input_gradients,
    "keeps zeros": keeps_zeros,
    "adversarial": adversarial,
    "hooks on parameters": hooked,
    "hooks after gradients": hooked_after,
    "autograd.grad by parameters": by_parameters,
    "clamped weights": clamped,
    **PASSES,
}
ALONE = ("autograd.grad by parameters", "clamped weights")
"""Loops that ask for all parameters to be used, or that torch takes seconds for on DTensors: not in combinations."""
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.02),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=1e-2, eps=1e-4),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-2, eps=1e-2),
    **BY_HAND,
}
"""Their eps lie above rounding, so that a gradient that is 0 but for rounding moves nothing."""


class OnShards:
    """An optimizer of torch's over the shards themselves, as parity.LocalAdamW: it computes what it would over the
    DTensors, without the seconds that torch takes to derive how each operation is cut."""

    def __init__(
        self, make: Callable[[list[Tensor]], torch.optim.Optimizer], parameters: Iterable[nn.Parameter]
    ) -> None:
        self.parameters = list(parameters)
        self.shards = [nn.Parameter(local_of(p).detach()) for p in self.parameters]
        self.optimizer = make(self.shards)

    def step(self) -> None:
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            shard.grad = None if parameter.grad is None else local_of(parameter.grad)
        self.optimizer.step()


def train(side: Side) -> Iterator[int]:
    """Runs the steps; yields before each, so that the caller knows in which one an error came."""
    parameters = [parameter for parameter in side.model.parameters() if parameter.requires_grad]
    make = OPTIMIZERS[side.case.optimizer]
    itself = side.grid is None or side.case.optimizer in BY_HAND
    optimizer = make(parameters) if itself else OnShards(make, parameters)
    for side.step in range(STEPS):
        yield side.step
        LOOPS[side.case.loop](side)
        habit = HABITS[side.case.habit](side) if side.case.habit else iter(())
        next(habit, None)
        side.gradients()
        optimizer.step()
        next(habit, None)
        side.model.zero_grad(set_to_none=side.case.loop != "keeps zeros")
    yield STEPS
    side.finish()


# comparing


@dataclass(frozen=True)
class Verdict:
    kind: str
    """exact, refused, warned (it differs, and a warning has said so), SILENT, CRASH, BAD (the case itself does not run
    on one process), or diverged (on one process the numbers are infinite after some steps, so that there is nothing to
    compare)."""
    said: str = ""
    error: float = 0.0

    @property
    def fault(self) -> bool:
        return self.kind not in ("exact", "refused", "warned", "diverged")


def check(case: Case) -> Verdict:
    """Run by every rank."""
    one = Side(case, build(case), None)
    if any(isinstance(module, Draws) for module in one.model.modules()):
        return check_drawn(case, one)
    if (bad := run_alone(one)) is not None:
        return bad
    two, refused = run_on_grid(case)
    return refused or compared(one, two)


def check_drawn(case: Case, one: Side) -> Verdict:
    """The same for a model that draws random numbers: one process is given those that the places have drawn."""
    two, refused = run_on_grid(case)
    every: list[Any] = [None] * case.shape.world
    dist.all_gather_object(every, (place_of(case, two.grid), None if refused else two.drawn))
    by_place = {place: drawn for place, drawn in every if drawn is not None}
    if refused or len(by_place) < case.places:
        return refused or Verdict("refused", "on another place; use the same rule on all")
    one.drawn = [list(each) for each in zip(*(by_place[place] for place in range(case.places)), strict=True)]
    return run_alone(one) or compared(one, two)


def run_alone(one: Side) -> Verdict | None:
    try:
        for _ in train(one):
            pass
    except Exception:
        return Verdict("BAD", " ".join(traceback.format_exc().splitlines()[-3:]))
    return None


def run_on_grid(case: Case) -> tuple[Side, Verdict | None]:
    grid, step = grid_of(case.shape), -1
    two = Side(case, build(case), grid)
    try:
        policy = Policy(activations=case.mode, **dict(case.options))  # type: ignore[arg-type]
        ff.parallelize(two.model, grid, policy=policy)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for step in train(two):  # noqa: B007
                pass
    except Exception as error:
        return two, judged(error, step)
    two.warned = next((str(each.message) for each in said if "is one of the parts" in str(each.message)), "")
    return two, None


def place_of(case: Case, grid: Grid) -> int:
    return grid.coords["data"] * case.shape.z + grid.coords["z"]


WAY_OUT = re.compile(
    r"\b(use|give|write|keep|put|change|make|leave|read|run|choose|replace|call|copy|pass|set|take|gather|compute)s?\b"
)


def judged(error: Exception, step: int) -> Verdict:
    """A refusal comes from the package, in the first step, and says what to do instead."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = "/fourfold/" in frames[-1].filename and (frames[-1].line or "").startswith("raise ")
    said = f"{type(error).__name__}: {error}"
    where = "" if step <= 0 else f" (in step {step})"
    if ours and step <= 0 and WAY_OUT.search(str(error)) and len(str(error)) < 900:
        return Verdict("refused", said)
    lines = [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-6:]]
    return Verdict("CRASH", f"{said}{where} at {' '.join(lines)}")


KINDS = ("statistic", "gradient", "parameter", "buffer", "norm", "input")


def kind_of(name: str) -> str:
    return next(kind for kind in KINDS if kind in name)


class Comparison:
    """What differs between one process and this rank, and by how much."""

    def __init__(self, one: dict[str, Any]) -> None:
        self.wrong: list[str] = []
        self.worst = 0.0
        self.scales: dict[str, float] = {}
        for name, value in tensors_in(one).items():
            self.scales[kind_of(name)] = max(self.scales.get(kind_of(name), 0.0), largest(value))

    def note(self, name: str, expected: Tensor, got: Tensor, scale: float = 0.0) -> None:
        """Law 1's error: against the largest value of that kind over the model, where there is one."""
        if expected.shape != got.shape:
            self.wrong.append(f"{name} is {tuple(got.shape)}, not {tuple(expected.shape)}")
            return
        expected, got = expected.to(torch.complex128), got.to(torch.complex128)
        error = largest(expected - got) / (max(scale, largest(expected)) or 1.0)
        self.worst = max(self.worst, error)
        if not error <= TOLERANCE:
            ratio = (expected.conj() * got).sum() / expected.abs().square().sum()
            self.wrong.append(f"{name}: {error:.1e} (times {ratio.real.item():.4g})")

    def verdict(self) -> Verdict:
        if not self.wrong:
            return Verdict("exact", error=self.worst)
        first = sorted(self.wrong, key=lambda text: ("step" not in text, text))
        return Verdict("SILENT", f"{len(self.wrong)} differ: " + "; ".join(first[:4]), self.worst)


def tensors_in(found: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def largest(value: Tensor) -> float:
    return value.to(torch.complex128).abs().max().item() if value.numel() else 0.0


def compared(process: Side, ranks: Side) -> Verdict:
    case, one, two, grid = process.case, process.found, ranks.found, grid_of(process.case.shape)
    for name, value in tensors_in(one).items():
        if not value.isfinite().all():
            return Verdict("diverged", f"{name} is not finite on one process")
    comparison = Comparison(one)
    place = place_of(case, grid)
    for name in sorted(tensors_in(one).keys() | tensors_in(two).keys()):
        if name not in one or name not in two:
            comparison.wrong.append(f"{name} is on one side only")
            continue
        expected = one[name]
        if name.endswith(": input"):  # what each place finds is the gradient of its own loss
            expected = expected.chunk(case.places)[place] * case.places
        comparison.note(name, expected, two[name], comparison.scales[kind_of(name)])
    for name in [name for name in one if name.endswith(": passes")]:
        compare_passes(comparison, case, name, one[name], two[name.removesuffix("es")], place)
    verdict = comparison.verdict()
    return Verdict("warned", ranks.warned) if ranks.warned and verdict.kind == "SILENT" else verdict


def compare_passes(
    comparison: Comparison, case: Case, name: str, passes: list[Any], own: tuple[Results, Tensor], place: int
) -> None:
    """Results of a forward pass. Where rows are looked at together, numbers without rows are compared by their mean
    over the places."""
    averaged = case.together or case.penalty not in ("", *OF_WEIGHTS)
    results, loss = passes[place]
    own_results, own_loss = own
    if results.keys() != own_results.keys():
        comparison.wrong.append(f"{name}: {sorted(own_results)}, not {sorted(results)}")
        return
    for key, value in results.items():
        if value.dim() or not averaged:
            comparison.note(f"{name} {key}", value, own_results[key])
    if averaged:
        loss, own_loss = torch.stack([loss for _, loss in passes]).mean(), mean_of_ranks(own_loss)
    comparison.note(f"{name} loss of the loop", loss, own_loss)


def mean_of_ranks(value: Tensor) -> Tensor:
    total = value.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def check_all(cases: list[Case]) -> list[Verdict]:
    return [check(case) for case in cases]


def joint(case: Case, verdicts: Iterable[Verdict]) -> Verdict:
    """What all ranks found: the worst of it. Where rows that depend on each other are all that is unusual, the refusal
    must name the way out that the package has for them."""
    order = ("BAD", "CRASH", "SILENT", "warned", "diverged", "refused", "exact")
    verdicts = list(verdicts)
    worst = min(verdicts, key=lambda verdict: order.index(verdict.kind))
    if worst.kind == "refused" and any(verdict.kind != "refused" for verdict in verdicts):
        return Verdict("CRASH", f"refused on some ranks only: {worst.said}")
    others = {BLOCKS[name].sort for name in case.blocks if name != "mlp"} - {"companions"}
    companions = case.places > 1 and "companions" in case.sorts and not others
    if worst.kind == "refused" and companions and "whole_batch" not in worst.said:
        return Verdict("CRASH", f"the error does not name ff.whole_batch: {worst.said}")
    return worst


def refusal(said: str) -> str:
    """A message without the names in it, to group by."""
    return re.sub(r"blocks\.\d+(\.\w+)*|stem(\.\w+)*|head(\.\w+)*|\d+", "_", said)[:160]
