"""The product and what it communicates, against numbers worked by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

import fourfold as ff
from closed_form import APART, ClosedForm
from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy
from harness import grid_of


def one_layer(policy: Policy, names: list[str], m: int, k: int, n: int) -> tuple[list[Collective], list[Collective]]:
    """Records of forward and of backward for layers that read one tensor of m/z tokens."""
    grid = grid_of(Shape(2, 2, 2))
    layers = torch.nn.ModuleDict({name: ff.nn.Expand(grid, policy, k, n, bias=False) for name in names})
    ff.nn.assemble(layers, grid, policy)
    tokens = m // 2
    a = torch.ones(tokens if policy.activations == "replicated" else tokens // 2, k // 2, requires_grad=True)
    with grid.ledger.watch() as forward:
        out = ff.nn.expand_together(list(layers.values()), a, tokens)
    with grid.ledger.watch() as backward:
        sum(part.sum() for part in out).backward()
    return forward, backward


def test_published_oracle(ranks) -> None:
    """PAPER: m=16, k=32, n=64, fp32, grid 2,2,2 in the published mode."""
    for forward, backward in ranks(8).run(one_layer, Policy(activations="replicated"), ["w"], 16, 32, 64):
        assert forward == [
            Collective("all_gather", "z", 2048, 2, "w"),
            Collective("all_reduce", "y", 1024, 2, "w"),
        ]
        assert backward == [
            Collective("all_gather", "z", 2048, 2, "w"),
            Collective("all_reduce", "x", 512, 2, "w"),  # dw is found behind it
            Collective("reduce_scatter", "z", 2048, 2, "w"),
        ]


def test_sharded_activations_move_half_the_bytes_of_the_published_mode(ranks) -> None:
    """Every all-reduce becomes one all-gather or reduce-scatter of the same buffer, here with kept input."""
    for forward, backward in ranks(8).run(one_layer, Policy(keep_gathered=True), ["w"], 16, 32, 64):
        assert forward == [
            Collective("all_gather", "x", 512, 2, "w"),
            Collective("all_gather", "z", 2048, 2, "w"),
            Collective("reduce_scatter", "y", 1024, 2, "w"),
        ]
        assert [(record.op, record.axis, record.nbytes) for record in backward] == [
            ("all_gather", "y", 1024),
            ("all_gather", "z", 2048),
            ("reduce_scatter", "x", 512),
            ("reduce_scatter", "z", 2048),
        ]


def test_layers_that_read_one_tensor_share_enter_gather_and_spread(ranks) -> None:
    for forward, _ in ranks(8).run(one_layer, Policy(), ["q", "k", "v"], 16, 32, 64):
        assert forward == [
            Collective("all_gather", "x", 512, 2, "q+k+v"),
            Collective("all_gather", "z", 3 * 2048, 2, "q+k+v"),
            Collective("reduce_scatter", "y", 3 * 1024, 2, "q+k+v"),
        ]


def total(records: list[Collective], op: str, axis: str) -> int:
    return sum(record.nbytes for record in records if (record.op, record.axis) == (op, axis))


def layer_elements(shape: Shape, policy: Policy, rows: int, seq: int) -> dict[tuple[str, str], int]:
    config = ff.models.config("gpt-5b", hidden=96, heads=12, kv_heads=12, head_dim=8, mlp_hidden=384, bias=False)
    program = step_program(LocalSizes(replace(config, layers=1), shape, policy, rows, seq), optimizer=False)
    layer = [record for record in program.records if record.label.startswith("layers.0.")]
    big = [record for record in layer if "norm" not in record.label]
    return {key: total(big, *key) // 4 for key in {(record.op, record.axis) for record in big}}


def test_published_volume_of_a_gpt_layer() -> None:
    """PAPER: elements of a layer in the published mode, with m_z tokens: 12 h m_z / x over y, 4 h m_z / y over x."""
    h, m = 96, 2 * 16
    for x, y, z in [(2, 2, 2), (4, 2, 1), (2, 3, 4), (3, 1, 2)]:
        apart = Policy(activations="replicated", overlap=APART)
        found = layer_elements(Shape(x, y, z), apart, rows=2, seq=16)
        assert found.get(("all_reduce", "y"), 0) == (12 * h * m // x if y > 1 else 0)
        assert found.get(("all_reduce", "x"), 0) == (4 * h * m // y if x > 1 else 0)
        assert found.get(("all_gather", "z"), 0) == (2 * 12 * h * h // (x * y) if z > 1 else 0)
        assert found.get(("reduce_scatter", "z"), 0) == (12 * h * h // (x * y) if z > 1 else 0)


LLAMA = ff.models.config("llama-tiny", hidden=64, heads=8, kv_heads=8, head_dim=8, mlp_hidden=128, vocab=256)


def step_of(shape: Shape, policy: Policy = Policy(), **options) -> list[Collective]:
    return step_program(LocalSizes(LLAMA, shape, policy, rows=4, seq=32), optimizer=False, **options).records


def test_data_axis_is_ddp() -> None:
    """Every gradient all-reduced once, and three fp64 statistics of the loss."""
    records = step_of(Shape(data=4))
    assert {(record.op, record.axis) for record in records} == {("all_reduce", "data")}
    assert total(records, "all_reduce", "data") == 4 * LLAMA.parameters + 24


def test_z_axis_is_fsdp() -> None:
    """Every weight gathered for forward and again for backward, where a lookup needs none; reduced once."""
    records = step_of(Shape(z=4))
    assert total(records, "all_gather", "z") == 4 * (2 * LLAMA.parameters - LLAMA.vocab * LLAMA.hidden)
    assert total(records, "reduce_scatter", "z") == 4 * LLAMA.parameters
    assert total(records, "all_reduce", "z") == 24


def test_x_axis_is_megatron_with_sequence_parallelism() -> None:
    """Per sublayer and pass one all-gather and one reduce-scatter of the stream; as many for embedding and head."""
    stream = 4 * 4 * 32 * LLAMA.hidden
    statistics = 4 * 3 * 4 * 32 * 4  # three numbers a token from four ranks for the loss
    records = step_of(Shape(x=4), Policy(keep_gathered=True))
    sublayers = 2 * LLAMA.layers
    assert total(records, "reduce_scatter", "x") == (2 * sublayers + 2) * stream
    assert total(records, "all_gather", "x") == (2 * sublayers + 2) * stream + statistics
    again = step_of(Shape(x=4))
    assert total(again, "all_gather", "x") == total(records, "all_gather", "x") + (sublayers + 1) * stream


def test_accumulation_reduces_over_data_once() -> None:
    once, four = step_of(Shape(data=2)), step_of(Shape(data=2), micro_steps=4)
    buckets = [
        Counter(record for record in records if record.label.startswith("gradients")) for records in (once, four)
    ]
    assert buckets[0] == buckets[1]
    assert sum(buckets[0].values()) > 0


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_volume_of_published_sizes_is_instant(mode: str) -> None:
    """A grid of thousands of ranks needs no process."""
    policy = Policy(activations=mode)
    records = ClosedForm(
        ff.models.config("gpt-80b"), Shape(8, 4, 8, 4), policy, 4, 2048, torch.bfloat16
    ).training_step()
    weights = 12 * 42 * 12288**2 // 32 * 2
    assert total(records, "reduce_scatter", "z") == pytest.approx(weights, rel=0.02)  # tables and vectors on top
