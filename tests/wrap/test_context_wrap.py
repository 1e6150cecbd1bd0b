"""`ff.parallelize` on grids with a context size: losses and gradients are those of one process, K and V travel over
context, and whatever mixes tokens in another way than causal attention is refused with a way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from families import Widened, build
from fourfold.axes import CONTEXT
from fourfold.grid import Shape
from fourfold.policy import Policy
from fourfold.wrap import whole_tensors
from harness import grid_of, what_is_said
from share import others_slow

SEED, VOCAB, ROWS, SEQ, WIDTH, HEADS = 7, 29, 4, 24, 32, 4


class Attention(nn.Module):
    """Causal attention as nanoGPT writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, a: Tensor) -> Tensor:
        rows, seq, width = a.size()
        q, k, v = self.qkv(a).split(width, dim=2)
        q, k, v = (part.view(rows, seq, HEADS, width // HEADS).transpose(1, 2) for part in (q, k, v))
        return self.out(self.attend(q, k, v).transpose(1, 2).contiguous().view(rows, seq, width))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class BooleanMask(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class AddedMask(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.full((1, 1, q.size(-2), k.size(-2)), torch.finfo(q.dtype).min, dtype=q.dtype).triu(1)
        return functional.scaled_dot_product_attention(q, k, v, mask, scale=0.3)


class Rotary(Attention):
    """Positions as complex numbers, as Llama's own code writes them."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seq, size = q.shape[-2:]
        angles = torch.outer(torch.arange(seq).double(), 10.0 ** -torch.arange(0, 1, 2 / size).double())
        turns = torch.polar(torch.ones_like(angles), angles)
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2))) * turns).flatten(3) for part in (q, k)
        )
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Multihead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, a: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(a.shape[1], dtype=a.dtype)
        return self.inner(a, a, a, attn_mask=mask, need_weights=False)[0]


class Block(nn.Module):
    def __init__(self, attention: type[nn.Module]) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, a: Tensor) -> Tensor:
        a = a + self.attention(self.first(a))
        return a + self.down(functional.gelu(self.up(self.second(a))))


def nano_loss(logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def shifted_loss(logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    logits, labels = logits[..., :-1, :].contiguous(), tokens[..., 1:].contiguous()
    return functional.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1))


def by_class_loss(logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    return functional.cross_entropy(logits.transpose(1, 2), targets.clamp(min=0), label_smoothing=0.1)


def masked_loss(logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    """As people write it by hand: each place's own, so that all of them need equally many targets."""
    kept = (torch.arange(SEQ) > 2).expand_as(targets).flatten()
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten(), reduction="none")
    return (losses * kept).sum() / kept.sum()


def picked_loss(logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])
    return -picked.squeeze(-1).mean(dim=(0, 1)) + 1e-2 * logits.pow(2).mean()


def pooled_loss(logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:  # noqa: ARG001
    """One class for a row, from the mean over its tokens."""
    return functional.cross_entropy(logits.mean(1), targets[:, -1])


def summed_loss(logits: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
    flat = logits.flatten(0, 1), targets.flatten()
    return functional.cross_entropy(*flat, reduction="sum", ignore_index=-1) / len(tokens) + functional.mse_loss(
        logits[:, 1:].tanh(), functional.one_hot(tokens, VOCAB).double()[:, :-1]
    )


OWN_LOSSES = ("masked_loss", "picked_loss", "summed_loss")
"""Losses that are written by hand are each row place's own, as under DDP; their mean is that of the whole batch."""
LOSSES = {
    one.__name__: one
    for one in (nano_loss, shifted_loss, by_class_loss, masked_loss, picked_loss, pooled_loss, summed_loss)
}


class Model(nn.Module):
    """A language model as nanoGPT writes it."""

    def __init__(self, attention: type[nn.Module] = Attention, loss: str = "nano_loss") -> None:
        super().__init__()
        self.table, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.loss = LOSSES[loss]

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        rows, seq = tokens.size()
        a = self.table(tokens) + self.positions(torch.arange(seq, device=tokens.device))
        for block in self.blocks:
            a = block(a)
        logits = self.head(self.norm(a))
        assert logits.shape == (rows, seq, VOCAB)
        return logits, None if targets is None else self.loss(logits, tokens, targets)


class Tied(Model):
    """The head has the weight of the table, and positions are a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__(Rotary)
        self.head.weight = self.table.weight
        del self.positions
        self.places = nn.Parameter(torch.randn(1, SEQ + 3, WIDTH))

    def positions(self, at: Tensor) -> Tensor:
        return self.places[:, : len(at)]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "nano": Model,
    "boolean mask": lambda: Model(BooleanMask),
    "added mask": lambda: Model(AddedMask),
    "tied, rotary": Tied,
    "multihead": lambda: Model(Multihead),
    **{loss: lambda loss=loss: Model(loss=loss) for loss in LOSSES if loss != "nano_loss"},
}


def batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets; masked targets lie unevenly on rows and on positions."""
    generator = torch.Generator().manual_seed(SEED)
    tokens, targets = torch.randint(VOCAB, (2, ROWS, SEQ), generator=generator)
    masked = torch.rand(targets.shape, generator=generator) < torch.linspace(0.9, 0.0, SEQ)
    return tokens, targets.masked_fill(masked, -1)


def made(name: str) -> nn.Module:
    torch.manual_seed(SEED)
    return MODELS[name]().double()


@cache
def alone(name: str) -> tuple[float, Tensor, list[dict[str, Tensor]]]:
    model = made(name)
    (tokens, targets), names = batch(), [name for name, _ in model.named_parameters()]
    logits, loss = model(tokens, targets)
    outside = functional.cross_entropy(logits.flatten(0, 1), targets.clamp(min=0).flatten())
    both = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in (loss, outside)]
    return loss.item(), logits.detach(), [dict(zip(names, one, strict=True)) for one in both]


@dataclass(frozen=True)
class Case:
    name: str
    policy: Policy = Policy()


def steps(shape: Shape, cases: list[Case]) -> list[dict[str, Any]]:
    grid, found = grid_of(shape), []
    for case in cases:
        model = ff.parallelize(made(case.name), grid, policy=case.policy)
        rows = [ff.local_rows(part, grid) for part in batch()]
        with grid.ledger.watch() as records:
            logits, loss = model(*rows)
            loss.backward()
        sent = sum(record.wire_bytes for record in records if record.axis == CONTEXT)
        gradients = whole_tensors(model, "gradient")
        for parameter in model.parameters():
            parameter.grad = None
        outside = model(rows[0])[0]  # whole, for a loss outside of the model
        functional.cross_entropy(outside.flatten(0, 1), rows[1].clamp(min=0).flatten()).backward()
        found.append(
            {
                "loss": loss.item(),
                "logits": logits.detach() + 0.0,
                "outside": outside.detach(),
                "gradients": gradients,
                "gradients outside": whole_tensors(model, "gradient"),
                "sent": sent,
                "first": grid.shape.row_place(grid.rank),
            }
        )
    return found


WIDE, CUT = Shape(z=2, data=2, context=4), Shape(x=2, z=2, context=2)
GRIDS = [CUT, Shape(z=4, context=2), WIDE, Shape(y=2, data=2, context=2), Shape(data=2, context=2)]


def close(found: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance, msg=lambda said: f"{what}: {said}")


def compare(results: list[list[dict[str, Any]]], cases: list[Case], tolerance: float = 1e-10) -> None:
    for number, case in enumerate(cases):
        losses = [found[number]["loss"] for found in results]
        assert sum(losses) / len(losses) == pytest.approx(alone(case.name)[0], rel=0, abs=tolerance), case
        if case.name not in OWN_LOSSES:
            assert max(losses) == pytest.approx(min(losses), rel=0, abs=tolerance), case
    for found in results:
        for case, result in zip(cases, found, strict=True):
            _, logits, gradients = alone(case.name)
            rows = len(result["logits"])
            own = logits[result["first"] * rows :][:rows]
            close(result["logits"], own, tolerance, str(case))
            close(result["outside"], own, tolerance, str(case))
            for which, wanted in zip(("gradients", "gradients outside"), gradients, strict=True):
                for name, gradient in wanted.items():
                    close(result[which][name], gradient, tolerance, f"{case} {which} {name}")
            assert result["sent"] > 0, case


@pytest.mark.slow
def test_some_models_as_people_write_them(ranks) -> None:
    cases = [Case(name) for name in [*MODELS][::8]]
    compare(ranks(GRIDS[0].world).run(steps, GRIDS[0], cases), cases)


@pytest.mark.slow
@pytest.mark.parametrize("shape", GRIDS, ids=str)
def test_models_as_people_write_them(ranks, shape: Shape) -> None:
    cases = [Case(name) for name in MODELS]
    compare(ranks(shape.world).run(steps, shape, cases, timeout=200), cases)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [WIDE, CUT], ids=str)
def test_every_policy(ranks, shape: Shape) -> None:
    """However K and V travel, and whatever is kept or computed again."""
    policies = [
        *(Policy(context_way=way) for way in ("gather", "exchange", "ring", "ulysses:2", "ulysses:2+ring")),
        Policy(keep_gathered=True),
        Policy(recompute="block", assignment="rows"),
        Policy(activations="replicated"),
        Policy(keep_weights=True),
    ]
    cases = [Case("nano", policy) for policy in policies]
    compare(ranks(shape.world).run(steps, shape, cases, timeout=200), cases)


# --- Hugging Face

FAMILY_NAMES = ("llama", "qwen2", "qwen3", "gpt2", "opt", "phi3", "gpt-neox", "gemma", "falcon")


def family_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(3, VOCAB, (ROWS, SEQ), generator=generator)
    masked = torch.rand(ids.shape, generator=generator) < torch.linspace(0.0, 0.9, SEQ)
    return dict(input_ids=ids, labels=ids.masked_fill(masked, -100))


@cache
def family_alone(name: str) -> tuple[float, Tensor, dict[str, Tensor]]:
    model = build(name)
    with Widened():
        out = model(**family_batch())
    out.loss.backward()
    return out.loss.item(), out.logits.detach(), {own: p.grad for own, p in model.named_parameters()}


def family_steps(shape: Shape, names: tuple[str, ...]) -> list[dict[str, Any]]:
    grid, found = grid_of(shape), []
    for name in names:
        model = ff.parallelize(build(name), grid)
        inputs = {own: ff.local_rows(value, grid) for own, value in family_batch().items()}
        count = (inputs["labels"][:, 1:] != -100).sum()
        with Widened(), grid.ledger.watch() as records:
            out = model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]))
            out.loss.backward()
            gradients = whole_tensors(model, "gradient")
            for parameter in model.parameters():
                parameter.grad = None
            counted = model(**inputs, num_items_in_batch=count)
            counted.loss.backward()
        found.append(
            {
                "losses": [out.loss.item(), counted.loss.item()],
                "logits": [out.logits.detach() + 0.0],
                "gradients": [gradients, whole_tensors(model, "gradient")],
                "sent": sum(record.wire_bytes for record in records if record.axis == CONTEXT),
                "first": grid.shape.row_place(grid.rank),
            }
        )
    return found


FAMILY_CASES = [
    (CUT, ("llama", "gpt2")),
    *((shape, FAMILY_NAMES) for shape in (CUT, WIDE, Shape(z=4, context=2), Shape(z=2, context=2))),
]


@pytest.mark.parametrize("case", others_slow(FAMILY_CASES, 5), ids=str)
def test_models_of_transformers(ranks, case: tuple[Shape, tuple[str, ...]]) -> None:
    shape, names = case
    results = ranks(shape.world).run(family_steps, shape, names, timeout=200)
    for found in results:
        for name, result in zip(names, found, strict=True):
            loss, logits, gradients = family_alone(name)
            assert result["losses"] == pytest.approx([loss] * 2, rel=0, abs=1e-10), name
            rows = len(result["logits"][0])
            own = logits[result["first"] * rows :][:rows]
            torch.testing.assert_close(result["logits"][0], own, rtol=0, atol=1e-9)
            for both in result["gradients"]:
                for own_name, gradient in gradients.items():
                    scale = max(1.0, gradient.abs().max().item())
                    torch.testing.assert_close(
                        both[own_name], gradient, rtol=0, atol=1e-10 * scale, msg=f"{name} {own_name}"
                    )
            assert result["sent"] > 0, name


# --- what is refused


class Eager(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


class EinsumEager(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


class Bidirectional(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v)


class Window(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(-4)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Bias(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        far = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        mask = (-0.1 * far).double().masked_fill(far < 0, -torch.inf)
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Dropping(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)


class Cached(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (torch.cat([torch.zeros(*part.shape[:2], 1, part.shape[3]).double(), part], dim=2) for part in (k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Acting(Model):
    """A model that does something to its stream."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.norm.register_forward_hook(lambda _module, _inputs, out: act(out))


class RowsMixed(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return a - a.mean(0, keepdim=True)


def write_first(a: Tensor) -> Tensor:
    a = a.clone()
    a[:, 0] = 0
    return a


MIXING: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "last token": (lambda a: a[:, -1], "reads token -1 alone"),
    "last tokens": (lambda a: a[:, [-1]], "some places hold none"),
    "list of tokens": (lambda a: a[:, [1, -1]], "__getitem__"),
    "every other token": (lambda a: a[:, ::2], "across sequences or places"),
    "neighbours": (lambda a: a[:, 1:] - a[:, :-1], "mixes neighbours"),
    "shifted": (lambda a: torch.cat([torch.zeros_like(a), a[:, :-1]], dim=1), "further tokens"),
    "cumsum": (lambda a: a.cumsum(1), "cumsum"),
    "roll": (lambda a: a.roll(1, 1), "roll"),
    "roll of all": (lambda a: a.roll(1), "roll"),
    "flip": (lambda a: a.flip(1), "flip"),
    "softmax over tokens": (lambda a: a.softmax(1), "softmax"),
    "largest": (lambda a: a.amax(1), "amax"),
    "largest of all": (lambda a: a / a.max(), "max"),
    "variance of all": (lambda a: a / a.std(), "std"),
    "variance, biased": (lambda a: a / a.var(False), "var"),
    "sorted": (lambda a: a.sort(1)[0], "sort"),
    "merged": (lambda a: a.reshape(len(a), -1), "merges tokens"),
    "windows": (lambda a: a.view(len(a), SEQ // 4, 4, WIDTH).mean(2), "takes sequences apart"),
    "padding": (lambda a: functional.pad(a, (0, 0, 1, 0)), "pad"),
    "boolean index": (lambda a: a[torch.arange(SEQ).expand(len(a), -1) > 3], "__getitem__"),
    "norm over tokens": (lambda a: functional.layer_norm(a, a.shape[1:]), "layer_norm"),
    "normalised over tokens": (lambda a: functional.normalize(a), "normalize"),
    "product with tokens": (lambda a: a.transpose(1, 2) @ a, "sums over tokens"),
    "product over tokens": (lambda a: torch.ones(SEQ, SEQ).double().tril() @ a, "sums over tokens"),
    "linear over tokens": (lambda a: functional.linear(a.mT, torch.ones(SEQ, SEQ).double()), "linear"),
    "convolution": (lambda a: functional.conv1d(a.mT, torch.ones(WIDTH, WIDTH, 3).double()), "conv1d"),
    "written": (write_first, "__setitem__"),
    "read by the host": (lambda a: a * float(a.isnan().any()), "any"),
    "unfold": (lambda a: a.unfold(1, 2, 1), "unfold"),
    "autograd function": (lambda a: Doubled.apply(a), "Doubled"),
    "whole batch": (lambda a: a + ff.whole_batch(a).mean(), "whole_batch"),
    "repeated": (lambda a: a.repeat(1, 2, 1), "repeats tokens"),
    "split": (lambda a: a.chunk(2, dim=1)[0], "chunk"),
}
ATTENTIONS: dict[type[nn.Module], str] = {
    Eager: 'attn_implementation="sdpa"',
    EinsumEager: 'attn_implementation="sdpa"',
    Bidirectional: "is_causal=True",
    Window: "not the causal one",
    Bias: "not the causal one",
    Dropping: "dropout to 0",
    Cached: "use_cache=False",
}


def refusals(shape: Shape, one_in: int) -> dict[str, str]:
    grid, said = grid_of(shape), {}
    tokens, targets = (ff.local_rows(part, grid) for part in batch())
    models = {name: lambda act=act: Acting(act) for name, (act, _) in MIXING.items()}
    models |= {kind.__name__: lambda kind=kind: Model(kind) for kind in ATTENTIONS}
    for name, make in islice(models.items(), 0, None, one_in):
        model = ff.parallelize(make().double(), grid)
        try:
            model(tokens, targets)
            said[name] = "nothing was said"
        except Exception as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize(
    ("shape", "one_in"),
    [
        (Shape(z=2, context=2), 4),
        pytest.param(Shape(z=2, context=2), 1, marks=pytest.mark.slow),
        pytest.param(Shape(x=2, data=2, context=2), 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_whatever_mixes_tokens_is_refused(ranks, shape: Shape, one_in: int) -> None:
    wanted = {name: word for name, (_, word) in MIXING.items()}
    wanted |= {kind.__name__: word for kind, word in ATTENTIONS.items()}
    for said in ranks(shape.world).run(refusals, shape, one_in, timeout=120):
        assert len(said) == -(-len(wanted) // one_in)
        assert not {name: message for name, message in said.items() if wanted[name] not in message}
        assert not {name: message for name, message in said.items() if "context=1" not in message}


# --- what else a model may do


def step(model: nn.Module, shape: Shape | None, *inputs: Tensor) -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients, on one process or on a grid."""
    if shape is not None:
        grid = grid_of(shape)
        model, inputs = ff.parallelize(model, grid), tuple(ff.local_rows(part, grid) for part in inputs)
    loss = model(*inputs)
    loss.backward()
    if shape is None:
        return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), whole_tensors(model, "gradient")


class Series(nn.Module):
    """Sequences of numbers instead of ids, and a loss of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(5, WIDTH), Block(Attention), nn.Linear(WIDTH, 5)

    def forward(self, numbers: Tensor, wanted: Tensor) -> Tensor:
        return functional.smooth_l1_loss(self.last(self.block(self.first(numbers)).relu()), wanted)


def series_step(shape: Shape | None) -> tuple[float, dict[str, Tensor]]:
    torch.manual_seed(SEED)
    model, batch = Series().double(), torch.randn(ROWS, SEQ + 1, 5).double()
    return step(model, shape, batch[:, :-1], batch[:, 1:])


def test_sequences_of_numbers(ranks) -> None:
    loss, gradients = series_step(None)
    for found, found_gradients in ranks(CUT.world).run(series_step, CUT):
        assert found == pytest.approx(loss, rel=0, abs=1e-12)
        for name, gradient in gradients.items():
            close(found_gradients[name], gradient, 1e-12, name)


def drop_and_read(shape: Shape) -> tuple[Tensor, Tensor, str]:
    """What dropout keeps, what logits look like to a reader outside, and what `explain` says."""
    grid = grid_of(shape)
    tokens, targets = (ff.local_rows(part, grid) for part in batch())
    model = ff.parallelize(Acting(lambda a: functional.dropout(torch.ones_like(a), 0.5)).double(), grid)
    model.head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    kept: list[Any] = []
    logits, loss = model(tokens, targets)
    loss.backward()
    last = logits[:, -1].argmax(-1)  # lies on one place, and is read by all
    return kept[0].whole(), last == logits.whole()[:, -1].argmax(-1), ff.explain(model)


def test_dropout_reading_outside_and_explain(ranks) -> None:
    results = ranks(2).run(drop_and_read, Shape(z=2, context=2))
    for kept, last, explained in results:
        assert torch.equal(kept, results[0][0])  # gathered from all members
        assert 0.4 < (kept == 0).double().mean() < 0.6
        tokens = kept.flatten(0, 1)
        assert len(tokens.unique(dim=0)) == len(tokens), "members have drawn the same numbers"
        assert last.all()
        assert "sequences cut over context=2" in explained


def said_of_inputs() -> dict[str, str]:
    grid = grid_of(Shape(z=4, context=2))
    tokens, targets = (ff.local_rows(part, grid) for part in batch())
    model = ff.parallelize(Model().double(), grid)

    def mixes_rows(_: Any) -> None:
        mixing = Model().double()
        mixing.norm = nn.Sequential(mixing.norm, RowsMixed())  # no hook: those do not run in the check of rows
        ff.parallelize(mixing, grid)(tokens, targets)

    acts: dict[str, Callable[[Any], Any]] = {
        "odd": lambda _: model(tokens[:, 1:], targets[:, 1:]),
        "rows of ranks": lambda _: ff.parallelize(Model().double(), grid)(tokens + grid.coords[CONTEXT], targets),
        "rows": mixes_rows,
        "not cut": lambda _: ff.parallelize(nn.Linear(SEQ, 3).double(), grid)(targets.double()),
        "sequence first": lambda grid: ff.parallelize(Model(), grid, rows_dim=1),
        "padding": lambda grid: _family("llama", grid)(tokens, attention_mask=(targets > 0).long()),
        "eager": lambda grid: _family("llama", grid, attn_implementation="eager")(tokens),
        "cache": lambda grid: _twice(_family("llama", grid), tokens),
        "generate": lambda grid: _family("llama", grid).generate(tokens),
        "sliding": lambda grid: _family("mistral", grid)(tokens, use_cache=False),
        "not causal": lambda grid: _family("bert", grid)(tokens[:, :16]),
    }
    return what_is_said(acts, grid)


def _family(name: str, grid: Any, **changes: Any) -> Any:
    model = build(name)
    for own, value in changes.items():
        setattr(model.config, f"_{own}", value)
    return ff.parallelize(model, grid)


def _twice(model: Any, tokens: Tensor) -> Any:
    return model(tokens, past_key_values=model(tokens, use_cache=True).past_key_values)


def test_what_inputs_and_models_of_transformers_are_refused(ranks) -> None:
    wanted = {
        "odd": "sequences of 23 tokens cannot be cut evenly over context=2; pad them",
        "rows of ranks": "different rows",
        "rows": "depends on the other rows",
        "not cut": "no tensor of the model was cut",
        "sequence first": "use a model that takes [rows, seq]",
        "padding": "leave the mask out",
        "eager": 'attn_implementation="sdpa"',
        "cache": "use_cache=False",
        "generate": "a cache of keys and values is not cut over context",
        "sliding": "is not the causal one",
        "not causal": "is_causal=False",
    }
    for said in ranks(4).run(said_of_inputs, timeout=120):
        assert not {name: said[name] for name, word in wanted.items() if word not in said[name]}
