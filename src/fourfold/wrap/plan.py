"""The words of a plan, what they match, and what other people's words mean.

A plan says of modules, by name, what they are on the grid. A key is the name of a module, or a pattern in which `*`
stands for one step of a name: `model.layers.*.mlp.up_proj`. It may leave out the first steps, as Hugging Face's plans
do. A key that matches nothing is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class Word:
    """What a module is on the grid."""


@dataclass(frozen=True, slots=True)
class Expand(Word):
    """A linear layer from the residual stream to the inside of a sublayer: out-features over x, in-features over y.

    `parts`: how many equal layers the weight holds, one after the other (gate and up: 2), or "qkv" for the queries,
    keys and values of the attention that it is part of.
    """

    parts: int | str = 1


@dataclass(frozen=True, slots=True)
class Contract(Word):
    """A linear layer from the inside of a sublayer back: out-features over y, in-features over x."""


@dataclass(frozen=True, slots=True)
class Head(Word):
    """A linear layer to any number of outputs, such as logits over a vocabulary."""


@dataclass(frozen=True, slots=True)
class Embedding(Word):
    """A table of vectors by token, rows over x, features over y."""


@dataclass(frozen=True, slots=True)
class Norm(Word):
    """A norm of the residual stream, statistics over all features."""


@dataclass(frozen=True, slots=True)
class HeadNorm(Word):
    """A norm of each attention head by itself."""


@dataclass(frozen=True, slots=True)
class Heads(Word):
    """A module whose outputs' last dim is attention heads, such as a table of biases by position."""


@dataclass(frozen=True, slots=True)
class Whole(Word):
    """Its own code on whole tensors, that of the modules inside it included; parameters are cut over z and gathered."""


@dataclass(frozen=True, slots=True)
class Convolution(Word):
    """A convolution: out-channels over x, in-channels over y; `contract` swaps the two, so that layers alternate. One
    in groups keeps the cut of its input, which `contract` says as for a norm."""

    contract: bool = False


@dataclass(frozen=True, slots=True)
class ChannelNorm(Word):
    """BatchNorm, GroupNorm or InstanceNorm of channels that are cut; a BatchNorm's statistics are over the whole batch.
    `contract`: they are cut as a contracting convolution leaves them."""

    contract: bool = False


HUGGING_FACE: dict[str, Word] = {
    "colwise": Expand(),
    "colwise_rep": Head(),
    "colwise_gather_output": Head(),
    "packed_colwise": Expand(parts=2),
    "rowwise": Contract(),
    "rowwise_rep": Contract(),
    "rowwise_split_input": Contract(),
    "embedding_rowwise": Embedding(),
    "sequence_parallel": Norm(),
    "replicated_with_grad_allreduce": HeadNorm(),
    "replicate": Whole(),
}
"""The words of a `tp_plan` in transformers."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A word, and why it was chosen."""

    word: Word
    why: str


def resolve(plan: Mapping[str, Word | str], names: Iterable[str], why: str) -> dict[str, Choice]:
    """The word for every module that the plan names."""
    names = list(names)
    if not isinstance(plan, Mapping):
        raise ValueError(f"plan={plan!r}: a plan is a dict of words by the names of modules, or None")
    chosen: dict[str, Choice] = {}
    for key, word in plan.items():
        matching = matches(key, names)
        if not matching:
            near = get_close_matches(key, [pattern_of(name) for name in names], n=1, cutoff=0)
            raise ValueError(
                f"plan: {key!r} matches no module of the model; the nearest name is {near[0]!r}"
                if near
                else f"plan: {key!r} matches no module, the model has none"
            )
        chosen |= dict.fromkeys(matching, Choice(meaning(key, word), f"{why}: {key!r}"))
    return chosen


def whole_below(chosen: Mapping[str, Choice], names: Iterable[str]) -> dict[str, Choice]:
    """What is inside a module that runs on whole tensors does so too, unless the plan says otherwise."""
    spread = dict(chosen)
    for name, choice in chosen.items():
        if isinstance(choice.word, Whole):
            spread |= {
                below: choice for below in names if below.startswith(f"{name}." if name else "") and below not in chosen
            }
    return spread


def pattern_of(name: str) -> str:
    """The same for all of several equal blocks: their numbers are `*`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", f".{name}").lstrip(".")


def matches(key: str, names: Iterable[str]) -> list[str]:
    """Names that are the key, or else those that end in it."""
    pattern = r"\.".join("[^.]+" if step == "*" else re.escape(step).replace(r"\*", "[^.]*") for step in key.split("."))
    names = list(names)
    return [name for name in names if re.fullmatch(pattern, name)] or [
        name for name in names if re.fullmatch(rf".*\.{pattern}", name)
    ]


def meaning(key: str, word: Word | str) -> Word:
    if isinstance(word, Word):
        return word
    if isinstance(word, str) and word in HUGGING_FACE:
        return HUGGING_FACE[word]
    raise ValueError(
        f"plan: {key!r} has {word!r}; words are Expand(), Contract(), Head(), Embedding(), Norm(), HeadNorm(), "
        "Heads(), Whole(), Convolution(), ChannelNorm() of fourfold.wrap, or Hugging Face's "
        f"{', '.join(map(repr, HUGGING_FACE))}"
    )
