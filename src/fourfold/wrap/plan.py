"""Plans: which parallel style each module of a model gets, and what other people's words for styles mean.

A plan maps names of modules to styles, as torch's `parallelize_module` does. A key is the name of a module, or a
pattern in which `*` stands for one step of a name: `model.layers.*.mlp.up_proj`. It may leave out the first steps, as
Hugging Face's plans do. A key that matches nothing is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class ParallelStyle:
    """Base of all styles: how a module is run on the grid."""


@dataclass(frozen=True, slots=True)
class ExpandParallel(ParallelStyle):
    """A linear layer from the residual stream into a sublayer: out-features over x, in-features over y.

    `parts` is the number of equal layers that the weight holds one after the other (gate and up: 2), or "qkv" for the
    queries, keys and values of the attention around it.
    """

    parts: int | str = 1


@dataclass(frozen=True, slots=True)
class ContractParallel(ParallelStyle):
    """A linear layer from a sublayer back to the residual stream: out-features over y, in-features over x."""


@dataclass(frozen=True, slots=True)
class HeadParallel(ParallelStyle):
    """A linear layer to any number of outputs, such as logits over a vocabulary."""


@dataclass(frozen=True, slots=True)
class EmbeddingParallel(ParallelStyle):
    """A table of vectors by token: rows over x, features over y."""


@dataclass(frozen=True, slots=True)
class NormParallel(ParallelStyle):
    """A norm of the residual stream, with statistics over all features."""


@dataclass(frozen=True, slots=True)
class HeadNormParallel(ParallelStyle):
    """A norm of each attention head by itself."""


@dataclass(frozen=True, slots=True)
class HeadsParallel(ParallelStyle):
    """A module with attention heads as the last dim of its output, such as a table of biases by position."""


@dataclass(frozen=True, slots=True)
class WholeTensors(ParallelStyle):
    """The module's own code on whole tensors, for the module and all modules inside it.

    Parameters are cut over z and gathered for each use.
    """


@dataclass(frozen=True, slots=True)
class ConvParallel(ParallelStyle):
    """A convolution: out-channels over x, in-channels over y. `contract` swaps the two, so that layers alternate.

    A grouped convolution keeps the cut of its input; there `contract` says, as for a norm, how the input is cut.
    """

    contract: bool = False


@dataclass(frozen=True, slots=True)
class ChannelNormParallel(ParallelStyle):
    """BatchNorm, GroupNorm or InstanceNorm of channels that are cut. BatchNorm's statistics are over the whole batch.

    `contract` says that the channels are cut as a contracting convolution leaves them.
    """

    contract: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsParallel(ParallelStyle):
    """The experts of a mixture, whose weights are cut as an MLP's: hidden units over x, features of the stream over y.

    The router keeps its own code.
    """


@dataclass(frozen=True, slots=True)
class MultiheadParallel(ParallelStyle):
    """An nn.MultiheadAttention. It is found by structure and never written in a plan."""


@dataclass(frozen=True, slots=True)
class LoraParallel(ParallelStyle):
    """One factor of a LoRA pair beside a linear layer. It is found by structure and never written in a plan."""

    base: str
    """The name of the linear layer."""
    factor: str
    """peft's name of the factor: "lora_A" or "lora_B"."""


HUGGING_FACE: dict[str, ParallelStyle] = {
    "colwise": ExpandParallel(),
    "colwise_rep": HeadParallel(),
    "colwise_gather_output": HeadParallel(),
    "packed_colwise": ExpandParallel(parts=2),
    "rowwise": ContractParallel(),
    "rowwise_rep": ContractParallel(),
    "rowwise_split_input": ContractParallel(),
    "embedding_rowwise": EmbeddingParallel(),
    "sequence_parallel": NormParallel(),
    "replicated_with_grad_allreduce": HeadNormParallel(),
    "moe_tp_experts": ExpertsParallel(),
    "replicate": WholeTensors(),
}
"""The style for each word of a `tp_plan` in transformers. Words that differ in who gathers the result mean the
same here, because a tensor is gathered only where code needs it whole."""

RECIPES: dict[str, dict[str, ParallelStyle]] = {
    "gpt2": {"attn.c_attn": ExpandParallel(parts="qkv")},  # the columns of q, then of k, then of v
    "phi3": {"self_attn.qkv_proj": ExpandParallel(parts="qkv"), "mlp.gate_up_proj": ExpandParallel(parts=2)},
    "t5": {"relative_attention_bias": HeadsParallel()},
}
"""Styles that structure does not show, by the `model_type` of a model's config. Modules that no recipe names, and
families that are not here, are found by structure (structure.py)."""
CONTRASTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("clip", "chinese_clip", "metaclip_2", "groupvit"), ("visual_projection", "text_projection")),
    **dict.fromkeys(("siglip", "siglip2"), ("vision_model.head", "text_model.head")),
}
"""For each family, the modules with rows that are compared with each other under return_loss=True."""


@dataclass(frozen=True, slots=True)
class StyleChoice:
    """The style of a module, why it was chosen, and whether the user's plan gave it."""

    style: ParallelStyle
    why: str
    given: bool = False


def resolve(
    plan: Mapping[str, ParallelStyle | str],
    names: Iterable[str],
    source: str,
    *,
    given: bool,
    parameters: Iterable[str] = (),
) -> dict[str, StyleChoice]:
    """Return the style of every module that the plan names; `source` is what the reason calls the plan.

    Transformers' plans also name parameters of modules with experts, `parameters` among them. The module's style, which
    the plan must give as well, says how they are cut.
    """
    names, parameters = list(names), list(parameters)
    if not isinstance(plan, Mapping):
        raise ValueError(f"plan={plan!r}: a plan is a dict from names of modules to styles; give such a dict, or None")
    chosen: dict[str, StyleChoice] = {}
    found = {key: matches(key, names) for key in plan}
    named = {name for matching in found.values() for name in matching}
    for key, style in plan.items():
        matching = found[key]
        owners = set() if matching else {name.rpartition(".")[0] for name in matches(key, parameters)}
        if owners and owners <= named:
            continue
        if not matching:
            # cutoff 0: always name the nearest module, however far
            near = get_close_matches(key, [pattern_of(name) for name in names], n=1, cutoff=0)
            raise ValueError(
                f"plan: {key!r} matches no module of the model; the nearest name is {near[0]!r}"
                if near
                else f"plan: {key!r} matches no module, because the model has none"
            )
        # a later key of the plan replaces an earlier one
        chosen |= dict.fromkeys(matching, StyleChoice(style_of(key, style), f"{source}: {key!r}", given))
    return chosen


def whole_below(chosen: Mapping[str, StyleChoice], names: Iterable[str]) -> dict[str, StyleChoice]:
    """Give modules inside one that runs on whole tensors the same style, unless the plan names them too."""
    extended = dict(chosen)
    for name, choice in chosen.items():
        if isinstance(choice.style, WholeTensors):
            extended |= {
                below: choice for below in names if below.startswith(f"{name}." if name else "") and below not in chosen
            }
    return extended


def pattern_of(name: str) -> str:
    """Replace the numbers in a name by `*`, so that equal blocks have one pattern."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", f".{name}").lstrip(".")


def matches(key: str, names: Iterable[str]) -> list[str]:
    """Return the names that match the key as a whole; if there are none, the names that end in it."""
    pattern = r"\.".join("[^.]+" if step == "*" else re.escape(step).replace(r"\*", "[^.]*") for step in key.split("."))
    names = list(names)
    return [name for name in names if re.fullmatch(pattern, name)] or [
        name for name in names if re.fullmatch(rf".*\.{pattern}", name)
    ]


def style_of(key: str, style: ParallelStyle | str) -> ParallelStyle:
    """Return the style for a value of a plan, which may be one of Hugging Face's words."""
    if isinstance(style, ParallelStyle):
        return style
    if isinstance(style, str) and style in HUGGING_FACE:
        return HUGGING_FACE[style]
    raise ValueError(
        f"plan: {key!r} has {style!r}; use one of the styles ExpandParallel(), ContractParallel(), HeadParallel(), "
        "EmbeddingParallel(), NormParallel(), HeadNormParallel(), HeadsParallel(), ConvParallel(), "
        "ChannelNormParallel(), ExpertsParallel(), WholeTensors() of fourfold.wrap, or Hugging Face's "
        f"{', '.join(map(repr, HUGGING_FACE))}"
    )
