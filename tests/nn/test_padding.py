"""Padding of logits to aligned columns: where it is, that no copy is made for it, and that nothing else notices it.

Law 1 holds with padding on every grid: tests/parity.py has an option for it.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from closed_form import APART
from fourfold.grid import Grid, Shape
from fourfold.layout import logits_columns
from fourfold.nn.layer import specs_of
from fourfold.nn.linear import join
from fourfold.params import local_of
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy
from fourfold.product import MEMORY
from harness import grid_of, join_shards
from parity import pad_small_logits

BF16 = torch.bfloat16
VOCAB, PADDED = 53, 60
"""The ids of a small model, and its columns where `pad_small_logits` is on."""
TOKENS = (torch.arange(2 * 16) * 37 % VOCAB).view(2, 16)


@pytest.mark.parametrize(
    ("vocab", "x", "cuts", "itemsize", "columns"),
    [
        (50257, 1, 1, 2, 50304),  # 786 * 64
        (50257, 2, 1, 2, 25152),  # 25129 rows on the first rank; 393 * 64
        (50257, 1, 2, 2, 50304),
        (50257, 1, 5, 2, 50560),  # 158 * 320
        (50257, 1, 5, 4, 50260),  # wider products gain nothing, but y must divide the columns
        (50257, 1, 1, 4, 50257),
        (128256, 1, 1, 2, 128256),  # 2004 * 64
        (1024, 1, 1, 2, 1024),
        (1023, 1, 1, 2, 1023),  # padding would be more than a sixteenth of the smallest padded size
        (1025, 1, 1, 2, 1088),
        (53, 2, 2, 2, 28),
    ],
)
def test_columns_by_hand(vocab: int, x: int, cuts: int, itemsize: int, columns: int) -> None:
    assert logits_columns(vocab, x, cuts, itemsize) == columns


def test_no_other_product_of_a_published_model_needs_padding() -> None:
    """The widths of all products are multiples of 8 elements, 16 bytes in bf16, however x and y cut them."""
    seen = 0
    for name in ff.models.SIZES:
        config = ff.models.config(name)
        for x, y in itertools.product(range(1, 65), repeat=2):
            if name.endswith("tiny") or x * y > 64 or config.misfit(Shape(x=x, y=y), Policy()):
                continue
            seen += 1
            q, kv = (heads * config.head_dim // x for heads in (config.heads, config.kv_heads))
            widths = config.hidden // y, q, q + 2 * kv, config.mlp_hidden // x
            assert not any(width % 8 for width in widths), (name, x, y, widths)
    assert seen > 300


# --- one process


@pytest.fixture
def pads_small() -> Iterator[None]:
    with pad_small_logits():
        yield


def build(
    *, tied: bool = True, dtype: torch.dtype = torch.float64, vocab: int = VOCAB, **policy: Any
) -> ff.models.Transformer:
    config = ff.models.config("gpt-tiny", layers=1, vocab=vocab, seq=16, tied=tied)
    return ff.models.build(config, Grid.alone("cpu"), policy=Policy(**policy), dtype=dtype)


def table_of(model: ff.models.Transformer) -> nn.Parameter:
    return model.head.weight_member.parameter


def read_table(model: ff.models.Transformer) -> Tensor:
    """The table as the head's product reads it."""
    return join(model.head).with_biases.launch()[0].wait().w


def results(model: ff.models.Transformer) -> list[Tensor]:
    loss = model(TOKENS, TOKENS.roll(-1, 1))
    loss.backward()
    found = [loss.detach(), model(TOKENS).detach(), *(local_of(p.grad).clone() for p in model.parameters())]
    for parameter in model.parameters():
        parameter.grad = None
    return found


@pytest.mark.usefixtures("pads_small")
@pytest.mark.parametrize("tied", [True, False])
def test_padding_lies_behind_the_table_and_stays_zero(tied: bool) -> None:
    model = build(tied=tied)
    table = table_of(model)
    read = read_table(model)
    assert read.shape == (PADDED, 48)
    assert read.data_ptr() == local_of(table).data_ptr()  # no copy
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        model(TOKENS, TOKENS).backward()
        optimizer.step()
    assert table.shape == table.grad.shape == (VOCAB, 48)
    assert {tuple(state["exp_avg"].shape) for state in [optimizer.state[table]]} == {(VOCAB, 48)}
    assert torch.equal(read[:VOCAB], local_of(table))
    assert not read[VOCAB:].any()
    assert model(TOKENS).shape == (*TOKENS.shape, VOCAB)
    # of the two ends only the head is padded
    others = [p for p in model.parameters() if p is not table and getattr(p, MEMORY, None) is not None]
    assert [tuple(p.shape) for p in others] == [(48, 48)]  # q, with k and v behind it


@pytest.mark.usefixtures("pads_small")
@pytest.mark.parametrize("options", [{}, {"loss_chunk": 10}], ids=["whole", "chunked"])
def test_no_value_of_the_padding_reaches_a_result(options: dict[str, Any]) -> None:
    """Not even a large one: in the loss, in logits, in gradients."""
    model = build(**options)
    clean = results(model)
    read_table(model)[VOCAB:] = 1e4
    for one, other in zip(clean, results(model), strict=True):
        assert torch.equal(one, other)
    assert all(found.isfinite().all() for found in clean)


@pytest.mark.usefixtures("pads_small")
@pytest.mark.parametrize("move", [copy.deepcopy, lambda model: model.to(BF16).double()])
def test_a_table_that_was_moved_is_padded_in_a_buffer(move: Callable) -> None:
    model = build()
    with torch.no_grad():
        for parameter in model.parameters():  # to what bf16 holds
            local_of(parameter).copy_(local_of(parameter).to(BF16))
    expected, moved = results(model), move(model)
    read = read_table(moved)
    assert read.shape == (PADDED, 48)
    assert read.data_ptr() != local_of(table_of(moved)).data_ptr()
    for one, other in zip(expected, results(moved), strict=True):
        assert torch.equal(one, other)


def test_only_products_of_16_bits_are_padded() -> None:
    for dtype, compute, rows in [
        (torch.float32, None, 1031),
        (torch.float32, BF16, 1088),
        (BF16, None, 1088),
        (BF16, torch.float32, 1031),
    ]:
        model = build(vocab=1031, dtype=dtype, compute_dtype=compute)
        assert read_table(model).shape == (rows, 48)
        assert read_table(model).dtype == (compute or dtype)
        assert local_of(table_of(model)).shape == (1031, 48)


# --- on ranks

WIDE = ff.models.config("gpt-tiny", layers=1, vocab=2065, seq=8, tied=False)


def train(shape: Shape, policy: Policy) -> dict[str, Any]:
    """A step in bf16 from bf16 weights, and the same in fp32 in one process."""
    grid = grid_of(shape)
    model = ff.models.build(WIDE, grid, policy=policy, dtype=BF16)
    tokens = (torch.arange(4 * 8) * 71 % WIDE.vocab).view(4, 8)
    with grid.ledger.watch() as records:
        loss = model(*(ff.local_rows(tokens, grid) for _ in range(2)))
        loss.backward()
    own = ff.local_rows(tokens, grid)
    alone = ff.models.build(WIDE, Grid.alone("cpu"), dtype=BF16).float()
    alone_loss = alone(tokens, tokens)
    alone_loss.backward()
    table, spec = model.head.weight, specs_of(model)["head.weight"]
    expected = local_of(alone.head.weight.grad)
    return {
        "records": records,
        "width": model.head.width,
        "loss": (loss.item(), alone_loss.item()),
        "logits": (model(own).float() - alone(own)).abs().max().item() / alone(own).abs().max().item(),
        "gradient": (join_shards(local_of(table.grad), spec, grid) - expected).norm().item() / expected.norm().item(),
    }


@pytest.mark.parametrize(
    ("shape", "policy", "width"),
    [
        (Shape(x=2, y=2), Policy(overlap=APART), 1088),  # 1033 columns of 2065
        pytest.param(Shape(y=2, z=2), Policy(loss_chunk=13, overlap=APART), 2112, marks=pytest.mark.slow),
        pytest.param(Shape(x=2, z=2), Policy("replicated", overlap=APART), 1088, marks=pytest.mark.slow),
    ],
    ids=["spread", "chunked", "replicated"],
)
def test_ranks_send_padded_logits_as_predicted(ranks, shape: Shape, policy: Policy, width: int) -> None:
    for rank, found in enumerate(ranks(4).run(train, shape, policy)):
        assert found["width"] == width
        rows = 4 // (shape.z * shape.data)
        sizes = LocalSizes(WIDE, shape, policy, rows=rows, seq=8, dtype=BF16, rank=rank)
        assert sizes.vocab_columns == width
        assert Counter(found["records"]) == Counter(step_program(sizes, optimizer=False).records)
        # bf16 keeps 8 bits: a product is off by about 2^-9 of its size, a chain of ten by a few times that
        assert found["loss"][0] == pytest.approx(found["loss"][1], rel=0.01)
        assert found["logits"] < 0.03
        assert found["gradient"] < 0.03


# --- wrapped models


class Tied(nn.Module):
    """A user's model, which reads its logits in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(53, 8), nn.Linear(8, 8), nn.Linear(8, 53, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.hidden(self.table(tokens))))
        flat = logits.reshape(-1, 53)
        loss = functional.cross_entropy(flat, tokens.flatten())
        return loss + flat.softmax(-1).square().sum() + (1 / (2 + flat)).mean(), logits.view(-1)


def wrap(shape: Shape) -> tuple[list[Tensor], list[Tensor], tuple[int, ...]]:
    grid = grid_of(shape)
    plain = Tied().double()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.copy_(torch.rand_like(parameter))
    tokens = torch.arange(24).view(4, 6)
    with pad_small_logits():
        wrapped = ff.parallelize(copy.deepcopy(plain), grid)
        found = []
        for model in (plain, wrapped):
            loss, logits = model(tokens)
            loss.backward()
            gradients = [getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for p in model.parameters()]
            found.append([loss.detach(), logits.detach(), *gradients])
    memory = getattr(wrapped.head.weight, MEMORY, torch.empty(0))
    return found[0], found[1], tuple(memory.shape)


def test_a_wrapped_head_is_padded_without_a_copy_and_its_logits_are_not(ranks) -> None:
    for shape, reserved in ((Shape(), 60 * 8), (Shape(x=2, y=2), 30 * 4)):  # 27 rows of 53, half of 8 columns
        for plain, wrapped, memory in ranks(shape.world).run(wrap, shape):
            assert memory == (reserved,)
            for one, other in zip(plain, wrapped, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
