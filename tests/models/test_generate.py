"""Generated text: the same on every grid, row by row, and chosen as the options say."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.models.generate import NO_CHOICE, Sampling, generate
from fourfold.params import local_of
from fourfold.policy import Policy
from harness import DEVICE, grid_of
from share import share

GPT = ff.models.config("gpt-tiny", layers=1, vocab=53, seq=6, dropout=0.5)
LLAMA = ff.models.config("llama-tiny", tied=False, layers=1, vocab=53, seq=6)
NEW = 6
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [2, 7], [31, 41, 5]]
"""Some reach the longest context, one begins past it; five divide by no number of places but one."""


def model_on(grid: Grid, config: ff.models.ModelConfig = GPT, policy: Policy = Policy()) -> ff.models.Transformer:
    """With weights so large that the likeliest token depends on the whole context."""
    model = ff.models.build(config, grid, policy=policy, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                local_of(parameter).mul_(8)
    return model


def texts(shape: Shape, config: ff.models.ModelConfig, policy: Policy, options: dict[str, Any]) -> list[list[int]]:
    return generate(model_on(grid_of(shape), config, policy), PROMPTS, NEW, **options)


@functools.cache
def texts_alone(config: ff.models.ModelConfig, **options: Any) -> list[list[int]]:
    return generate(model_on(Grid.alone(DEVICE), config), PROMPTS, NEW, **options)


GRIDS = [
    (Shape(z=2, data=2), Policy()),
    (Shape(x=2, y=2), Policy()),
    (Shape(y=2, data=2), Policy(activations="replicated")),
]


@pytest.mark.parametrize(
    ("shape", "policy"), share(GRIDS, 3), ids=lambda value: str(value) if isinstance(value, Shape) else ""
)
def test_every_grid_writes_the_text_of_one_process(ranks, shape: Shape, policy: Policy) -> None:
    stop = texts_alone(GPT, temperature=0)[0][2]  # ends rows at different times, so that fewer than places are left
    for config, options in (
        (GPT, {"temperature": 0}),
        (LLAMA, {"temperature": 0, "stop": stop}),
        (GPT, {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 3, "stop": stop}),
    ):
        alone = texts_alone(config, **options)
        assert len({token for text in alone for token in text}) > 3  # the law says nothing about one token repeated
        assert ranks(4).run(texts, shape, config, policy, options) == [alone] * 4


def messages() -> list[tuple[str, str, int]]:
    grid = grid_of(Shape(x=2, z=2))
    model = model_on(grid)
    with grid.ledger.watch() as records:
        generate(model, PROMPTS, 1)
    return [(record.op, record.axis, record.nbytes) for record in records if record.label == "generate"]


def test_choices_travel_in_one_small_sum_over_each_axis(ranks) -> None:
    assert ranks(4).run(messages) == [[("all_reduce", "x", 5 * 8), ("all_reduce", "z", 5 * 8)]] * 4


def disagreement() -> str:
    grid = grid_of(Shape(x=2, z=2))
    with pytest.raises(ValueError, match="ranks disagree on what to generate") as caught:
        generate(model_on(grid), [[grid.rank]], 1)
    return str(caught.value)


def test_ranks_that_ask_for_different_texts_are_told(ranks) -> None:
    assert len(set(ranks(4).run(disagreement))) == 1


def not_a_number() -> str:
    """The last place alone has a row whose logits are none."""
    grid = grid_of(Shape(x=2, z=2))
    model = model_on(grid, LLAMA)
    if grid.coords["x"] == grid.coords["z"] == 1:
        local_of(model.embedding.weight)[-1] = math.nan  # that of id 52
    with pytest.raises(ValueError, match=r"row 1: the logits after 3 tokens are not finite") as caught:
        generate(model, [[1], [5, 52, 6]], 1)
    return str(caught.value)


def test_logits_that_are_no_numbers_raise_on_all_ranks(ranks) -> None:
    assert len(set(ranks(4).run(not_a_number))) == 1


def test_rows_do_not_know_of_each_other() -> None:
    """Prompts of different lengths in one call, and each by itself; as a tensor too."""
    for config in (GPT, LLAMA):
        model = model_on(Grid.alone(DEVICE), config)
        together = generate(model, PROMPTS, NEW, temperature=0)
        assert together == [generate(model, [prompt], NEW, temperature=0)[0] for prompt in PROMPTS]
        assert together[2] == generate(model, torch.tensor(PROMPTS[2:3]), NEW, temperature=0)[0]
        assert together[2] == generate(model, [PROMPTS[2][-config.seq :]], NEW, temperature=0)[0]


def test_a_greedy_text_is_what_the_logits_say() -> None:
    model = model_on(Grid.alone(DEVICE)).eval()
    text = [3, 1, 4]
    for _ in range(4):
        text.append(int(model(torch.tensor([text], device=model.grid.device))[0, -1].argmax()))
    assert generate(model, [[3, 1, 4]], 4, temperature=0) == [text[3:]]


def test_the_seed_fixes_the_text_and_rows_draw_apart() -> None:
    model = model_on(Grid.alone(DEVICE))
    first = generate(model, [[3, 1]] * 2, 9, seed=1, temperature=2.0)
    assert first == generate(model, [[3, 1]] * 2, 9, seed=1, temperature=2.0)
    assert first[0] != first[1]
    assert first != generate(model, [[3, 1]] * 2, 9, seed=2, temperature=2.0)
    # position, not step: a text that goes on from its own beginning draws the same
    assert generate(model, [[3, 1, *first[0][:4]]], 5, seed=1, temperature=2.0) == [first[0][4:]]


def test_a_stop_token_ends_its_row_alone() -> None:
    model = model_on(Grid.alone(DEVICE))
    free = generate(model, PROMPTS, NEW, temperature=0)
    stop = free[0][2]
    seen: list[tuple[int, int]] = []
    stopped = generate(
        model, PROMPTS, NEW, temperature=0, stop=stop, on_token=lambda row, token: seen.append((row, token))
    )
    ends = [text.index(stop) + 1 if stop in text else len(text) for text in free]
    assert min(ends) < max(ends)
    assert stopped == [text[:end] for text, end in zip(free, ends, strict=True)]
    assert [[token for at, token in seen if at == row] for row in range(len(PROMPTS))] == stopped
    assert generate(model, PROMPTS, 0) == [[]] * len(PROMPTS)


def test_the_model_is_left_as_it_was() -> None:
    model = model_on(Grid.alone(DEVICE)).train()
    model.layers[0].eval()
    before = [module.training for module in model.modules()]
    generate(model, [[1]], 1)
    assert [module.training for module in model.modules()] == before
    with pytest.raises(RuntimeError, match="enough"):
        generate(model, [[1]], 1, on_token=fail)
    assert [module.training for module in model.modules()] == before
    assert all(parameter.grad is None for parameter in model.parameters())


def fail(row: int, token: int) -> None:
    raise RuntimeError(f"enough of {token} in {row}")


LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=torch.float64).log() + 7
"""Likeliest first: 1 (0.4), 3 (0.3), 2 (0.2), 0 (0.1); cumulated 0.4, 0.7, 0.9, 1."""


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        # tokens at the points 0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 0.999
        (Sampling(), [1, 1, 3, 3, 2, 2, 0, 0]),
        (Sampling(temperature=0), [1] * 8),
        (Sampling(top_k=1), [1] * 8),
        (Sampling(top_k=2), [1, 1, 1, 3, 3, 3, 3, 3]),  # 4/7 = 0.571
        (Sampling(top_k=99), [1, 1, 3, 3, 2, 2, 0, 0]),
        (Sampling(top_p=0.3), [1] * 8),
        (Sampling(top_p=0.65), [1, 1, 1, 3, 3, 3, 3, 3]),
        (Sampling(top_p=0.75), [1, 1, 1, 3, 3, 2, 2, 2]),  # 4/9 = 0.444, 7/9 = 0.778
        (Sampling(top_p=1.0), [1, 1, 3, 3, 2, 2, 0, 0]),
        (Sampling(top_k=3, top_p=0.75), [1, 1, 1, 3, 3, 3, 3, 3]),  # of the three 7/9 > 0.75 are enough
        (Sampling(temperature=0.5), [1, 1, 1, 3, 3, 2, 2, 0]),  # 16, 9, 4, 1 of 30: 0.533, 0.833, 0.967
        (Sampling(temperature=1e-300), [1] * 8),
    ],
    ids=str,
)
def test_a_token_is_chosen_as_worked_by_hand(sampling: Sampling, expected: list[int]) -> None:
    points = (0, 0.39, 0.41, 0.69, 0.71, 0.89, 0.91, 0.999)
    assert [sampling.choose(LOGITS, point) for point in points] == expected


def test_equal_logits_go_by_id_and_masked_ones_never_come() -> None:
    assert Sampling(temperature=0).choose(torch.tensor([1.0, 2.0, 2.0]), 0.9) == 1
    assert Sampling(top_k=2).choose(torch.tensor([2.0, 2.0, 2.0]), 0.999) == 1
    masked = torch.tensor([-math.inf, 0.0, -math.inf])
    assert {Sampling().choose(masked, point) for point in (0, 0.5, 1 - 2**-53)} == {1}
    for bad in (math.nan, math.inf):
        assert Sampling().choose(torch.tensor([0.0, bad]), 0.5) == NO_CHOICE


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1]], {"temperature": -1.0}, r"temperature=-1.0 must be a number from 0"),
        ([[1]], {"temperature": math.nan}, r"temperature=nan"),
        ([[1]], {"top_k": 0}, r"top_k=0 must be at least 1"),
        ([[1]], {"top_p": 1.5}, r"top_p=1.5 must be above 0"),
        ([[1]], {"stop": 53}, r"stop=53 must be a token, at least 0 and below vocab=53"),
        ([[1]], {"new_tokens": -1}, r"new_tokens=-1"),
        ([], {}, r"got 0 prompts"),
        ([[1], []], {}, r"2 prompts of \[1, 0\] tokens; each needs at least one"),
        ([[1, 53]], {}, r"ids from 1 to 53: all must be at least 0 and below vocab=53"),
        (["text"], {}, r"rows of whole-number ids, as a tokenizer gives them"),
        (torch.ones(1, 2), {}, r"rows of whole-number ids"),
        (torch.ones(2, dtype=torch.long), {}, r"rows of whole-number ids"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompts: Any, options: dict[str, Any], message: str) -> None:
    model = ff.models.build(GPT, Grid.alone(DEVICE))
    with pytest.raises((ValueError, TypeError), match=message):
        generate(model, prompts, **{"new_tokens": 1, **options})
