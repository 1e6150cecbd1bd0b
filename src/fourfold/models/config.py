"""The config of a reference model: sizes and choices, checked against a grid before the model is built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf, log
from typing import Any, Literal, get_args, get_origin, get_type_hints

from fourfold.errors import nearest
from fourfold.models.sizes import SIZES
from fourfold.nn.rope import Rope, RopeScaling
from fourfold.nn.router import Routing, Score
from fourfold.policy import Halves, Policy, choose_halves
from fourfold.shape import Shape, shapes_of
from fourfold.synonyms import find_synonym

Reads = Literal["current", "previous"]


def unit_of(name: str, layers: int) -> int:
    """Return the unit that a parameter of this name is in: the embedding, a layer, or the head (`schedule.stages`)."""
    part, _, rest = name.partition(".")
    if part == "layers":
        return 1 + int(rest.partition(".")[0])
    return 0 if part in ("embedding", "positions") else layers + 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and choices of a decoder-only transformer."""

    layers: int
    """Number of blocks, each with attention and an MLP."""
    hidden: int
    """Width of the residual stream, in features."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key-value heads; fewer than query heads is grouped-query attention."""
    head_dim: int
    """Width of a head, in features."""
    mlp_hidden: int
    """Width inside the MLP, in features."""
    vocab: int
    """Number of tokens that the model knows."""
    seq: int
    """Longest sequence, in tokens, that learned positions allow; rotary positions allow any length."""
    norm: Literal["layer", "rms"] = "layer"
    """Kind of all norms: LayerNorm or RMSNorm."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    """Kind of the MLP: two products around a GELU, or three with SwiGLU."""
    positions: Literal["learned", "rope"] = "learned"
    """How attention knows positions: a learned table, or rotary positions (RoPE)."""
    rope_theta: float = 10000.0
    """Base of the rotary positions' wavelengths, a number without unit."""
    rope_scaling: RopeScaling = "none"
    """How rotary positions are scaled for sequences longer than `rope_original_seq` (`nn.rope`)."""
    rope_factor: float = 1.0
    """How many times slower the angles that are scaled turn, a number without unit."""
    rope_original_seq: int = 8192
    """Length of the sequences, in tokens, that the model was trained on before its positions were scaled."""
    rope_slow: float = 1.0
    """Number of turns in a sequence of that length below which angles are scaled wholly, for llama3 and yarn."""
    rope_fast: float = 0.0
    """Number of turns above which they are not scaled; 0 stands for 4 with llama3 and 32 with yarn."""
    rope_attention: float = 0.0
    """Number by which cos and sin are multiplied; 0 stands for 0.1 ln(rope_factor) + 1 with yarn, else for 1."""
    bias: bool = True
    """Whether linear layers and LayerNorms have biases."""
    tied: bool = True
    """Whether the head uses the weight of the embedding."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, head by head."""
    dropout: float = 0.0
    """Probability with which an activation of the residual stream is dropped in training."""
    attention_dropout: float | None = None
    """Probability with which an attention weight is dropped in training; by default `dropout`."""
    norm_eps: float = 1e-5
    """Number that norms add to the variance, against division by zero."""
    experts: int = 0
    """Number of experts of a mixture, which blocks have in place of an MLP; 0 stands for no mixture."""
    top_k: int = 2
    """Number of experts that a token goes through."""
    expert_hidden: int = 0
    """Width inside an expert, in features."""
    shared_hidden: int = 0
    """Width inside the MLP beside the experts that all tokens go through, in features; 0 stands for none."""
    dense_layers: int = 0
    """Number of first blocks that have an MLP all the same."""
    score: Score = "softmax"
    """What makes scores of the router's logits."""
    normalize_top_k: bool = True
    """Whether the scores of a token's experts are divided by their sum."""
    route_scale: float = 1.0
    """Number by which the scores of a token's experts are multiplied."""
    groups: int = 1
    """Number of groups of neighbours, equally many each, that the experts are divided into."""
    top_groups: int = 1
    """Number of groups from which a token chooses its experts: those with the largest sums of two best scores."""
    capacity: float = 0.0
    """Number of tokens that an expert takes of a sequence, the first ones that choose it, as a multiple of its share if
    all experts were used equally; 0 takes all."""
    moe_reads: Reads = "current"
    """What router and experts read: the stream behind the block's attention (current), or before it (previous)."""
    aux: float = 0.0
    """Weight of the loss that a router has if the experts of a sequence are used unequally, a number without unit."""
    z_loss: float = 0.0
    """Weight of the loss that a router has for large logits, a number without unit."""
    bias_rate: float = 0.0
    """Number by which a router's bias for the choice of an expert moves in a step, towards equal use; 0 has no bias."""

    def __post_init__(self) -> None:
        self._check_values()
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}; "
                "every KV head must serve the same number of query heads"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary positions")
        self._check_scaling()
        self._check_mixture()
        self._check_product()
        for name in ("dropout", "attention_dropout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name}={value} must be at least 0 and below 1")

    def _check_values(self) -> None:
        """Check each field by itself."""
        for name, kind in MODEL_FIELDS.items():
            value = getattr(self, name)
            least = int(name not in MAY_BE_ZERO)
            if kind is int and not least <= value <= MOST.get(name, LARGEST_SIZE):
                raise ValueError(f"{name}={value} must be at least {least} and at most {MOST.get(name, LARGEST_SIZE)}")
            if kind is float and value is not None and not 0 <= value < inf:
                raise ValueError(f"{name}={value} must be a finite number of at least 0")
            if get_origin(kind) is Literal and value not in get_args(kind):
                raise ValueError(f"{name}={value!r} is none of {get_args(kind)}")

    def _check_product(self) -> None:
        """Check the sizes together: each may be possible, and all of them absurd."""
        if self.parameters > MOST_PARAMETERS:
            sizes = sorted(
                (name for name, kind in MODEL_FIELDS.items() if kind is int), key=lambda it: -getattr(self, it)
            )
            raise ValueError(
                f"these sizes make {self.parameters:.3g} parameters, and a model has at most {MOST_PARAMETERS:.0e}; "
                f"the largest are {', '.join(f'{name}={getattr(self, name)}' for name in sizes[:3])}"
            )

    def _check_scaling(self) -> None:
        if not self.rope_theta > 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be above 0")
        if self.rope_factor < 1:
            raise ValueError(f"rope_factor={self.rope_factor} must be at least 1")
        if self.rope_scaling in ("llama3", "yarn") and not 0 < self.rope_slow < self.rope.fast:
            raise ValueError(f"rope_slow={self.rope_slow} must be above 0 and below rope_fast={self.rope.fast}")

    def _check_mixture(self) -> None:
        if not self.experts:
            given = [
                name for name in OF_A_MIXTURE if getattr(self, name) != ModelConfig.__dataclass_fields__[name].default
            ]
            if given:
                raise ValueError(
                    f"{given[0]}={getattr(self, given[0])} is for a mixture of experts; give experts as well"
                )
            return
        if self.expert_hidden < 1:
            raise ValueError(f"experts={self.experts} needs expert_hidden, the width inside an expert")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k} must be at most experts={self.experts}")
        if self.dense_layers >= self.layers:
            raise ValueError(f"dense_layers={self.dense_layers} of layers={self.layers} leaves no block for experts")
        if self.mlp != "swiglu" or self.bias:
            raise ValueError("experts are gated and have no biases; a mixture needs mlp='swiglu' and bias=False")
        self._check_numbers()
        self._check_groups()
        if self.moe_reads == "previous" and not self.shared_hidden:
            raise ValueError(
                "moe_reads='previous' with shared_hidden=0: the experts read the stream before attention, so nothing "
                "in the block would read what attention adds; give shared_hidden, or use moe_reads='current'"
            )

    def _check_numbers(self) -> None:
        if not self.route_scale > 0:
            raise ValueError(f"route_scale={self.route_scale} must be a number above 0; 1 changes nothing")

    def _check_groups(self) -> None:
        if self.experts % self.groups or self.top_groups > self.groups:
            raise ValueError(
                f"groups={self.groups} must divide experts={self.experts}, and top_groups={self.top_groups} must be at "
                "most groups"
            )
        each = self.experts // self.groups
        if self.groups > 1 and each < 2:
            raise ValueError(
                f"groups={self.groups} of experts={self.experts} have one expert each; a group is chosen by its two "
                f"best scores: use at most {self.experts // 2} groups"
            )
        if self.top_k > self.top_groups * each:
            raise ValueError(
                f"top_k={self.top_k} must be at most {self.top_groups * each}, the number of experts in "
                f"top_groups={self.top_groups} of groups={self.groups}"
            )

    @property
    def routing(self) -> Routing:
        """How tokens choose their experts."""
        return Routing(
            self.experts,
            self.top_k,
            self.score,
            self.normalize_top_k,
            self.route_scale,
            self.groups,
            self.top_groups,
            self.capacity,
            self.bias_rate,
            self.aux,
            self.z_loss,
        )

    @property
    def reads_previous(self) -> bool:
        """Whether routers and experts read the stream before attention."""
        return self.moe_reads == "previous"

    def is_mixture(self, layer: int) -> bool:
        """Return whether a block has a mixture of experts in place of an MLP."""
        return self.experts > 0 and layer >= self.dense_layers

    def one_layer(self, *, mixture: bool) -> ModelConfig:
        """Return the model with a single block, one with a mixture of experts or one with an MLP."""
        fields = type(self).__dataclass_fields__
        dense = {name: fields[name].default for name in ("experts", *OF_A_MIXTURE)}
        return replace(self, layers=1, **({"dense_layers": 0} if mixture else dense))

    def shorter(self, layers: int) -> ModelConfig:
        """Return the model with so many layers; of a mixture of experts at least one is left."""
        return replace(self, layers=layers, dense_layers=min(self.dense_layers, layers - 1))

    @property
    def rope(self) -> Rope:
        """The rotary positions, if they are what `positions` says."""
        fast = self.rope_fast or (32.0 if self.rope_scaling == "yarn" else 4.0)
        usual = 0.1 * log(self.rope_factor) + 1 if self.rope_scaling == "yarn" else 1.0
        scaling = self.rope_scaling, self.rope_factor, self.rope_original_seq, self.rope_slow, fast
        return Rope(self.head_dim, self.rope_theta, *scaling, self.rope_attention or usual)

    @property
    def dropout_of_attention(self) -> float:
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    def check(self, shape: Shape, policy: Policy) -> None:
        """Raise an error if the model cannot be cut over a grid of this shape."""
        if shape.folded and not self.experts:
            raise ValueError(
                f"the grid {shape} is folded for experts, and the model has none; leave out "
                f"{', '.join(name for name, size in shape.fold_sizes.items() if size > 1)}"
            )
        misfit = self.misfit(shape, policy)
        if misfit:
            what, value, cuts, axes = misfit
            fits = [str(other) for other in shapes_of(shape.world, shape.order) if not self.misfit(other, policy)]
            raise ValueError(
                f"{what}={value} is not divisible by {axes} on the grid {shape} with {policy.activations} activations; "
                f"grids of {shape.world} ranks that fit: {'; '.join(fits[:10])}{'; ...' if len(fits) > 10 else ''}; "
                f"or build a model with {what}={-(-value // cuts) * cuts}"
            )

    def misfit(self, shape: Shape, policy: Policy) -> tuple[str, int, int, str] | None:
        """Return the first size that a grid of this shape cannot cut: its name, its value, the divisor and its axes."""
        x, y = shape.x, shape.y
        inner, name = (x * y, f"x*y={x}*{y}") if policy.activations == "sharded" else (x, f"x={x}")
        rules = (
            ("hidden", self.hidden, y, f"y={y}"),
            ("heads", self.heads, inner, name),
            *self._mlp_rules(shape, inner, name),
            ("kv_heads*head_dim", self.kv_heads * self.head_dim, x, f"x={x}"),
        )
        # KV heads need not divide by the ranks, but their features must: K and V are then made whole and selected.
        return next((rule for rule in rules if rule[1] % rule[2]), None)

    def _mlp_rules(self, shape: Shape, inner: int, name: str) -> Iterator[tuple[str, int, int, str]]:
        """Yield the rules of `misfit` for the widths inside what blocks have behind attention."""
        if not self.experts or self.dense_layers:
            yield "mlp_hidden", self.mlp_hidden, inner, name
        if self.shared_hidden:
            yield "shared_hidden", self.shared_hidden, inner, name
        if self.experts:
            cuts, along = inner, name
            if shape.folded:  # ex is there in place of x
                y = inner // shape.x
                cuts, along = shape.ex * y, f"ex*y={shape.ex}*{y}" if y > 1 else f"ex={shape.ex}"
            yield "expert_hidden", self.expert_hidden, cuts, along

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = self.hidden * self.mlp_hidden * (3 if self.mlp == "swiglu" else 2)
        biases = self.head_dim * (self.heads + 2 * self.kv_heads) + 2 * self.hidden + self.mlp_hidden
        if self.mlp == "swiglu":
            biases += self.mlp_hidden
        # A LayerNorm has a weight and a bias, an RMSNorm only a weight.
        norm = self.hidden * (2 if self.norm == "layer" and self.bias else 1)
        block = attention + mlp + 2 * norm + (biases if self.bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        tables = self.vocab * (1 if self.tied else 2) + (self.seq if self.positions == "learned" else 0)
        mixtures = sum(map(self.is_mixture, range(self.layers)))
        experts = self.hidden * (self.experts + 3 * (self.experts * self.expert_hidden + self.shared_hidden))
        return self.layers * block + mixtures * (experts - mlp) + norm + tables * self.hidden

    @property
    def active_parameters(self) -> int:
        """The number of parameters that compute something for one token: all but those of the experts it leaves out."""
        mixtures = sum(map(self.is_mixture, range(self.layers)))
        return self.parameters - mixtures * 3 * self.hidden * self.expert_hidden * (self.experts - self.top_k)


OF_A_MIXTURE = (
    "top_k", "expert_hidden", "shared_hidden", "dense_layers", "score", "normalize_top_k", "route_scale", "groups",
    "top_groups", "capacity", "moe_reads", "aux", "z_loss", "bias_rate",
)  # fmt: skip
"""The fields that need `experts`."""
MOST = {"layers": 1 << 16}
"""The most of a size that costs work by itself; other sizes may have `LARGEST_SIZE`."""
LARGEST_SIZE = (1 << 31) - 1
"""The largest size of a model, which torch's kernels can still index."""
MOST_PARAMETERS = 10**16
"""A thousand times the largest models; larger numbers are slips of the keyboard or damaged files."""
MAY_BE_ZERO = ("experts", "expert_hidden", "shared_hidden", "dense_layers")
"""The whole numbers that may be 0, which stands for none."""
MODEL_FIELDS: dict[str, Any] = {**get_type_hints(ModelConfig), "attention_dropout": float}
"""The type of each field that is given. Whoever needs a list of the fields takes it from here."""


def config(name: str, **changes: Any) -> ModelConfig:
    """Return the published size of that name, with some fields changed."""
    if name not in SIZES:
        raise ValueError(f"there is no model {name!r}{nearest_size(name)}; there are {', '.join(SIZES)}")
    require_fields(changes)
    return ModelConfig(**{**SIZES[name], **changes})


OF_HUGGING_FACE = {"gpt2": "gpt-125m", "gpt2-small": "gpt-125m", "gpt2-xl": "gpt-1.4b"}
"""Names that people know, with the size of ours that is closest in its kind and number of parameters."""


def nearest_size(name: str) -> str:
    """Return words about a name that is no size: the size that was probably meant, and how to bring any other model.

    A name with other numbers is not a typing error but another model: gpt2 is not gpt-20b.
    """
    bring = "; a model of Hugging Face is named by the folder of its config.json: hf download NAME --local-dir FOLDER"
    if like := OF_HUGGING_FACE.get(name.lower().rpartition("/")[2]):
        return f" (the nearest is {like!r}{bring})"

    def numbers(text: str) -> list[float]:
        return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]

    def alike(size: str) -> bool:
        pairs = list(zip(numbers(name), numbers(size), strict=False))
        return len(numbers(name)) <= len(numbers(size)) and all(0.8 * a <= b <= 1.25 * a for a, b in pairs)

    return nearest(name, list(filter(alike, SIZES))) or f" ({bring.removeprefix('; ')})"


def require_fields(names: Iterable[str], where: str = "") -> None:
    """Raise an error if one of these names is no field of a model; the error begins with `where`."""
    for name in names:
        if name not in MODEL_FIELDS:
            near, synonym = nearest(name, list(MODEL_FIELDS)), find_synonym(name)
            if synonym is not None and synonym.key is not None and synonym.key.startswith("model."):
                near = f" (did you mean {synonym.key.removeprefix('model.')!r}?)"
            raise ValueError(f"{where}a model has no {name!r}{near}; it has {', '.join(MODEL_FIELDS)}")


def halves_of(
    config: ModelConfig, shape: Shape, policy: Policy, rows: int, seq: int, itemsize: int, *, packed: bool, alike: bool
) -> Halves:
    """Return into how many interleaved parts the rows of a place are cut, and why.

    The largest message of a layer that a second part could hide decides: activations over x or y, or rows to experts.
    `packed` rows have several documents each. Rows to experts only decide if all places have `alike` rows.
    """
    over_x = config.hidden // shape.y if shape.x > 1 else 0
    over_y = config.mlp_hidden // shape.x if shape.y > 1 else 0
    # a token goes to as many ranks as have some of its experts, from the rank that holds it at rest
    to_experts = min(config.top_k, shape.expert) * (config.hidden // shape.y) // shape.x
    widest = max(over_x, over_y, to_experts if alike and shape.expert > 1 else 0)
    tokens = rows * seq // shape.context
    whole = _why_whole(config, shape, seq, packed)
    return choose_halves(policy, rows, tokens * widest * itemsize, whole)


def _why_whole(config: ModelConfig, shape: Shape, seq: int, packed: bool) -> str:
    """Return why a single row cannot be cut into halves; empty if it can."""
    if seq < 2:
        return "it has one token"
    if shape.context > 1:
        return "places share it"
    if packed:
        return "it has packed documents"
    if config.experts and config.routing.counts_by_sequence:
        return "the experts of a sequence are counted together"
    if config.dropout_of_attention:
        return "attention drops weights, whose mask is that of whole rows"
    return ""
