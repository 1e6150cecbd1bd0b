"""Generates text with a reference model on any grid, token by token.

The rows of a batch are cut over places as in training. Each place computes its own rows, its first rank chooses their
next tokens, and one sum over the grid gives every choice to every rank. So all ranks continue with the same tokens,
even if rounding differs between them.

There is no KV cache: every token computes its whole context again, which is right on every grid and policy, and slow
for long texts. Experts take all tokens that choose them, whatever the capacity of a mixture in training: so what a text
goes on with depends neither on the length of other texts, nor on tokens that are still to come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from operator import index

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.axes import BATCH, CONTEXT, CUTS
from fourfold.layout import chunk
from fourfold.models.transformer import Transformer
from fourfold.nn.rng import key_of

NO_CHOICE = -1
"""Stands in for the token of a row with logits that are not finite. No token has a negative id."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits; the fields are those of `generate`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    ids: int | None = None

    @property
    def fault(self) -> str:
        """The first invalid option and its rule; empty if all options are valid."""
        if not (isfinite(self.temperature) and self.temperature >= 0):
            return f"temperature={self.temperature} must be a number from 0 (greedy) up"
        if self.top_k is not None and self.top_k < 1:
            return f"top_k={self.top_k} must be at least 1, or None for all tokens"
        if self.top_p is not None and not 0 < self.top_p <= 1:
            return f"top_p={self.top_p} must be above 0 and at most 1, or None for all tokens"
        if self.ids is not None and self.ids < 1:
            return f"ids={self.ids} must be at least 1, or None for all ids of the model"
        return ""

    def choose(self, logits: Tensor, point: float) -> int:
        """Return a token by inverting the cumulative distribution at `point` in [0, 1), likeliest token first.

        `top_k` keeps the k likeliest tokens. Of these `top_p` keeps the fewest likeliest that together have at least
        this probability. Among equal logits the lower id comes first.
        """
        logits = logits[: self.ids].double()  # fp64, so that cumulative sums on different devices agree
        if not isfinite(logits.max()):
            return NO_CHOICE
        if self.temperature == 0:
            return int((logits == logits.max()).nonzero()[0])
        ordered, ids = logits.sort(descending=True, stable=True)
        ordered, ids = ordered[: self.top_k], ids[: self.top_k]
        cumulative = ((ordered - ordered[0]) / self.temperature).softmax(0).cumsum(0)
        if self.top_p is not None:
            kept = 1 + int((cumulative[:-1] < self.top_p).sum())
            cumulative = cumulative[:kept]
        passed = int((cumulative <= point * cumulative[-1]).sum())
        return int(ids[min(passed, len(cumulative) - 1)])  # point * sum may round up to the sum itself


def generate(
    model: Transformer,
    prompts: Tensor | Sequence[Sequence[int]],
    new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    ids: int | None = None,
    seed: int = 0,
    stop: int | None = None,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """Return `new_tokens` tokens that follow each prompt; fewer for a row that ends with the token `stop`.

    All ranks call it with the same prompts, which may differ in length, and all get the whole result. A draw depends
    only on the seed, the row and the position, so two grids give different tokens only where rounding decides.
    `temperature=0` takes the likeliest token. `ids` limits the choice to ids below that number, for a tokenizer with a
    smaller vocabulary than the model. The model reads the last `config.seq` tokens of a text. `on_token(row, token)` is
    called on every rank as soon as a token is chosen.
    """
    grid, sampling = model.grid, Sampling(temperature, top_k, top_p, ids)
    texts = _ids(prompts)
    fault = sampling.fault or _fault(texts, new_tokens, stop, model.config.vocab)
    asked = key_of(texts, new_tokens, sampling, seed, stop)
    grid.agree("what to generate", fault or f"prompts and options with digest {asked:x}")
    if fault:
        raise ValueError(fault)
    starts = [len(text) for text in texts]
    active = list(range(len(texts)))
    with torch.no_grad(), evaluating(model), model.dropless():
        for _ in range(new_tokens):
            chosen = _next_tokens(model, texts, active, sampling, seed)
            for row, token in zip(active, chosen, strict=True):
                texts[row].append(token)
                if on_token is not None:
                    on_token(row, token)
            active = [row for row, token in zip(active, chosen, strict=True) if token != stop]
            if not active:
                break
    return [text[start:] for text, start in zip(texts, starts, strict=True)]


def _ids(prompts: Tensor | Sequence[Sequence[int]]) -> list[list[int]]:
    try:
        rows = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        return [[index(token) for token in row] for row in rows]
    except TypeError as error:
        raise TypeError(f"prompts must be rows of whole-number ids, as a tokenizer gives them: {error}") from error


def _fault(texts: Sequence[Sequence[int]], new_tokens: int, stop: int | None, vocab: int) -> str:
    if new_tokens < 0:
        return f"new_tokens={new_tokens} must be at least 0"
    if not texts or not all(texts):
        return f"got {len(texts)} prompts of {[len(text) for text in texts]} tokens; each needs at least one"
    low, high = min(map(min, texts)), max(map(max, texts))
    if low < 0 or high >= vocab:
        return f"prompts hold ids from {low} to {high}: all must be at least 0 and below vocab={vocab}"
    if stop is not None and not 0 <= stop < vocab:
        return f"stop={stop} must be a token, at least 0 and below vocab={vocab}, or None"
    return ""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model in eval mode; afterwards give every module its own mode back."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def _next_tokens(
    model: Transformer, texts: Sequence[Sequence[int]], active: Sequence[int], sampling: Sampling, seed: int
) -> list[int]:
    """Return the next token of every active row, on every rank."""
    grid = model.grid
    places = grid.shape.row_places
    # The rows of this place; every place has the same number, and rows from len(active) on are padding.
    rows = chunk(-(-len(active) // places) * places, places, grid.shape.row_place(grid.rank))
    # Padding repeats the last row, since all places must take part in the collectives; nobody reads the result.
    own = [texts[active[min(row, len(active) - 1)]] for row in rows]
    length = min(max(len(texts[row]) for row in active), model.config.seq)
    contexts = [text[-length:] for text in own]
    # Attention is causal, so the tokens of a text never see the padding on its right.
    tokens = torch.tensor([[*context, *[0] * (length - len(context))] for context in contexts], device=grid.device)
    last = torch.tensor([len(context) - 1 for context in contexts], device=grid.device)
    logits = model.whole_rows(model(tokens), tokens.shape)[torch.arange(len(own), device=grid.device), last]
    chosen = torch.zeros(len(active), dtype=torch.long)
    choosing = (*(axis for axis in CUTS if axis not in BATCH), CONTEXT)
    if all(grid.coords[axis] == 0 for axis in choosing):  # one rank of those that have the rows chooses for all
        for row, scores in zip(rows, logits.cpu(), strict=True):
            if row < len(active):
                chosen[row] = sampling.choose(scores, _point(seed, active[row], len(texts[active[row]])))
    chosen = chosen.to(grid.device)
    for axis in CUTS:  # every row is nonzero on one rank only, so the sum is the choice
        chosen = comm.all_reduce(chosen, grid, axis, label="generate").wait()
    tokens_of_rows = chosen.tolist()
    if NO_CHOICE in tokens_of_rows:
        row = active[tokens_of_rows.index(NO_CHOICE)]
        raise ValueError(f"row {row}: the logits after {len(texts[row])} tokens are not finite; check the weights")
    return tokens_of_rows


def _point(seed: int, row: int, position: int) -> float:
    """Draw a number in [0, 1) that is the same in every process."""
    generator = torch.Generator("cpu").manual_seed(key_of("generate", seed, row, position))
    return torch.rand((), generator=generator, dtype=torch.float64).item()
