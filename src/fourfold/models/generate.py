"""Text from a model on any grid, token by token.

Rows of a batch are cut over data and z as in training: each place computes its own rows, its first rank
chooses their next tokens, and one sum over the grid tells every rank every choice. So all ranks walk in step
whatever rounding does on each of them.

There is no cache of keys and values: every token computes its whole context again, which is right on every
grid and policy, and slow for long texts.
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
from fourfold.axes import AXES
from fourfold.grid import Grid
from fourfold.layout import chunk
from fourfold.models.transformer import Transformer
from fourfold.nn.initial import key_of

NO_CHOICE = -1
"""Stands for the token of a row whose logits are not numbers."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen from logits."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    ids: int | None = None

    @property
    def fault(self) -> str:
        """What is wrong with it, if anything."""
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
        """The token where the cumulated probabilities of those kept, likeliest first, pass `point` in [0, 1).

        `top_k` keeps the k likeliest; of these `top_p` keeps the fewest likeliest that together have at least
        that share. Of equal logits the lower id comes first.
        """
        logits = logits[: self.ids].double()
        if not isfinite(logits.max()):
            return NO_CHOICE
        if self.temperature == 0:
            return int((logits == logits.max()).nonzero()[0])
        ordered, ids = logits.sort(descending=True, stable=True)
        ordered, ids = ordered[: self.top_k], ids[: self.top_k]
        cumulated = ((ordered - ordered[0]) / self.temperature).softmax(0).cumsum(0)
        if self.top_p is not None:
            kept = 1 + int((cumulated[:-1] < self.top_p).sum())
            cumulated = cumulated[:kept]
        passed = int((cumulated <= point * cumulated[-1]).sum())
        return int(ids[min(passed, len(cumulated) - 1)])  # point * sum may round up to the sum itself


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
    """The tokens that follow each prompt, `new_tokens` of them or fewer where `stop` ends a row (as its last).

    All ranks call it with the same prompts, which may differ in length, and all get the whole result. A draw
    depends on the seed, the row and the position alone, so grids differ only where rounding of logits decides.
    `temperature=0` takes the likeliest token; only `ids` below that number are taken, where a tokenizer has fewer
    than the model. The model reads the last `config.seq` tokens of a text.
    `on_token(row, token)` is called on every rank as each token is known.
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
    with torch.no_grad(), evaluating(model):
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
    """In eval mode, and afterwards each module as it was."""
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
    """The next token of every active row, on every rank."""
    grid = model.grid
    rows = _own_rows(len(active), grid)
    # Places past the end compute a row again, since all must take part in the collectives; nobody reads it.
    own = [texts[active[min(row, len(active) - 1)]] for row in rows]
    length = min(max(len(texts[row]) for row in active), model.config.seq)
    contexts = [text[-length:] for text in own]
    # Padding on the right is never seen by the tokens before it: attention is causal.
    tokens = torch.tensor([[*context, *[0] * (length - len(context))] for context in contexts], device=grid.device)
    last = torch.tensor([len(context) - 1 for context in contexts], device=grid.device)
    logits = model(tokens)[torch.arange(len(own), device=grid.device), last]
    chosen = torch.zeros(len(active), dtype=torch.long)
    if grid.coords["x"] == grid.coords["y"] == 0:  # the first rank of the place speaks for it
        for row, scores in zip(rows, logits.cpu(), strict=True):
            if row < len(active):
                chosen[row] = sampling.choose(scores, _point(seed, active[row], len(texts[active[row]])))
    chosen = chosen.to(grid.device)
    for axis in AXES:
        chosen = comm.all_reduce(chosen, grid, axis, label="generate").wait()
    tokens_of_rows = chosen.tolist()
    if NO_CHOICE in tokens_of_rows:
        row = active[tokens_of_rows.index(NO_CHOICE)]
        raise ValueError(f"row {row}: the logits after {len(texts[row])} tokens are not finite; check the weights")
    return tokens_of_rows


def _own_rows(count: int, grid: Grid) -> range:
    """The rows of this rank's place, as many on every place; those from `count` on are padding."""
    places = grid.shape.places
    return chunk(-(-count // places) * places, places, grid.shape.place(grid.rank))


def _point(seed: int, row: int, position: int) -> float:
    """A number in [0, 1), the same in every process."""
    generator = torch.Generator("cpu").manual_seed(key_of("generate", seed, row, position))
    return torch.rand((), generator=generator, dtype=torch.float64).item()
