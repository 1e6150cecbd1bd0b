"""Sharing is found: a Llama of transformers communicates what the reference model does, byte for byte."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import fourfold as ff
from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.policy import Overlap
from harness import grid_of
from share import others_slow

ROWS, SEQ, VOCAB = 2, 12, 53
SIZES = dict(hidden=48, heads=8, head_dim=6, mlp_hidden=96, layers=2, vocab=VOCAB, seq=SEQ, qk_norm=False, bias=False)
SHAPES = [Shape(x=2, y=2), Shape(x=2, z=2), Shape(y=2, data=2), Shape(x=4), Shape(y=4)]


def hugging_face(kv_heads: int, tied: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=kv_heads,
            vocab_size=VOCAB,
            max_position_embeddings=SEQ,
            tie_word_embeddings=tied,
        )
    )


def ledgers(shape: Shape, activations: str, kv_heads: int, tied: bool) -> tuple[list[Collective], list[Collective]]:
    """Of the second step, whose inputs are no longer compared between ranks."""
    grid = grid_of(shape)
    policy = ff.Policy(activations=activations, overlap=Overlap(halves=1))
    config = ff.models.config("llama-tiny", **SIZES, kv_heads=kv_heads, tied=tied)
    reference = ff.models.build(config, grid, policy=policy)
    foreign = ff.parallelize(hugging_face(kv_heads, tied), grid, policy=policy)
    tokens = torch.randint(VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    found = []
    for step in (
        lambda: reference(tokens, tokens.roll(-1, 1)),
        lambda: foreign(input_ids=tokens, labels=tokens, use_cache=False).loss,
    ):
        step().backward()
        with grid.ledger.watch() as records:
            step().backward()
        found.append(list(records))
    return found[0], found[1]


@pytest.mark.parametrize("activations", ["sharded", "replicated"])
@pytest.mark.parametrize("shape", others_slow(SHAPES, 5), ids=str)
def test_llama_of_transformers_communicates_what_the_reference_does(ranks, shape: Shape, activations: str) -> None:
    kv_heads, tied = (2, False) if shape.x == 4 or shape.y == 4 else (8, shape.z == 1)
    for reference, foreign in ranks(4).run(ledgers, shape, activations, kv_heads, tied):
        assert summed(foreign) == summed(reference)
        (own, theirs) = ([r for r in each if not is_bucket(r)] for each in (reference, foreign))
        averaged = [r for r in theirs if is_average(r)]
        assert [r.axis for r in averaged] == [axis for axis in ("z", "data") if shape.sizes[axis] > 1]
        theirs = [r for r in theirs if not is_average(r)]
        assert counted(theirs) == counted(own)
        assert [(r.op, r.axis, r.nbytes) for r in theirs] == [(r.op, r.axis, r.nbytes) for r in own]


def is_average(record: Collective) -> bool:
    """The gradient of a loss in a module's own code, which places may have multiplied by different numbers."""
    return (record.op, record.label, record.nbytes) == ("all_reduce", "loss", 4)


def is_bucket(record: Collective) -> bool:
    """Those of the reference end with a unit of the model where three ranks or more are summed."""
    return record.label.startswith("gradients ")


def summed(records: list[Collective]) -> Counter[str]:
    """The bytes of gradients that are summed over each axis."""
    found: Counter[str] = Counter()
    for record in filter(is_bucket, records):
        found[record.axis] += record.nbytes
    return found


@pytest.mark.parametrize("kind", ["self_attn.q_proj+k_proj+v_proj", "mlp.gate_proj+up_proj"])
def test_layers_that_read_the_same_tensor_enter_once(ranks, kind: str) -> None:
    _, foreign = ranks(4).run(ledgers, Shape(x=4), "sharded", 8, False)[0]
    for layer in range(2):
        inside = kind.split(".")[0]
        of_sublayer = [r for r in foreign if f"layers.{layer}.{inside}." in r.label and r.op == "all_gather"]
        entering = [r for r in of_sublayer if r.label == f"model.layers.{layer}.{kind}"]
        assert len(entering) == 2, "once in forward, and once more in backward, where it was not kept"
        closing = [r for r in of_sublayer if r not in entering]
        assert {r.label.rpartition(".")[2] for r in closing} <= {"o_proj", "down_proj"}


def counted(records: list[Collective]) -> Counter[tuple[str, str, int]]:
    return Counter((r.op, r.axis, r.nbytes) for r in records)
