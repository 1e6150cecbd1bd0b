"""torch's nn.MultiheadAttention on the grid: queries, keys and values are cut by head, as in any other attention.

`in_proj_weight` holds three layers. Each is cut by itself and stored as its part; the module's own `out_proj` leads
back to the stream. The module's own code runs for inputs that it refuses or that have no batch dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold.layout import REPEATED, WHOLE, Spec
from fourfold.nn.layer import Layer
from fourfold.nn.linear import Expand
from fourfold.wrap.adapters import Adapter, LayerParameter, PlainSlice
from fourfold.wrap.context import ModelContext
from fourfold.wrap.grid_tensor import to_whole
from fourfold.wrap.shared_input import expand_all


class MultiheadAdapter(Adapter):
    """Runs an nn.MultiheadAttention with each rank's heads."""

    def __init__(self, name: str, context: ModelContext, why: str, module: nn.MultiheadAttention) -> None:
        super().__init__(name, context, why)
        self.features, self.sizes = module.embed_dim, (module.embed_dim, module.kdim, module.vdim)
        self.packed, bias = module.in_proj_weight is not None, module.in_proj_bias is not None
        self.readers = tuple(
            Expand(context.grid, context.policy, size, self.features, bias=bias) for size in self.sizes
        )
        self.extra = Layer(context.grid, context.policy)
        """Holds the key and the value that are added to every row, which all ranks read whole."""
        for own in ("bias_k", "bias_v"):
            if module._parameters.get(own) is not None:
                self.extra.declare(own, Spec((1, 1, self.features), WHOLE, REPEATED))

    @property
    def layers(self) -> Sequence[Layer]:
        return (*self.readers, self.extra)

    def parameters(self) -> Mapping[str, LayerParameter]:
        found: dict[str, LayerParameter] = {}
        for index, (layer, letter) in enumerate(zip(self.readers, "qkv", strict=True)):
            rows = range(index * self.features, (index + 1) * self.features)
            if self.packed:
                found[f"in_proj_weight_{index}"] = layer, "weight", PlainSlice("in_proj_weight", rows)
            else:
                found[f"{letter}_proj_weight"] = layer, "weight", PlainSlice(f"{letter}_proj_weight")
            if "bias" in layer.specs:
                found[f"in_proj_bias_{index}"] = layer, "bias", PlainSlice("in_proj_bias", rows)
        return found | {own: (self.extra, own, PlainSlice(own)) for own in self.extra.specs}

    def input_dtype(self, *, autocast: bool) -> torch.dtype | None:
        own: Any = self.readers[0].weight
        return self.context.policy.compute_dtype or (own.dtype if autocast else None)

    def __call__(
        self,
        module: Any,
        forward: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        """Take and return what the module's own forward does."""
        self.context.last_layer = self.name
        if not self._fits(module, (query, key, value), key_padding_mask, attn_mask, causal=is_causal):
            return forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        q, k, v = (_by_head(a, module) for a in self._read(query, key, value))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _merge_masks(attn_mask, key_padding_mask, q)
        for added in self._added(module, k):
            k, v = (torch.cat([a, more], dim=2) for a, more in zip((k, v), added, strict=True))
            mask = None if mask is None else functional.pad(mask, (0, 1))
        dropout = module.dropout if module.training else 0.0
        if not need_weights:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
            return module.out_proj(_by_row(mixed, module)), None
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = functional.dropout(weights, dropout) if dropout else weights
        out = module.out_proj(_by_row(weights @ v, module))
        return out, weights.mean(dim=1) if average_attn_weights else weights

    def _fits(
        self,
        module: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        *,
        causal: bool,
    ) -> bool:
        """Return whether the inputs have a batch dim and all shapes are those that torch asks for."""
        if any(a.is_nested or a.dim() != 3 for a in inputs) or tuple(a.shape[-1] for a in inputs) != self.sizes:
            return False
        query, key, value = (a.shape[:2] if module.batch_first else a.shape[1::-1] for a in inputs)
        rows, length, keys = *query, key[1]
        if key != (rows, keys) or value != (rows, keys) or (causal and attn_mask is None):
            return False
        allowed = {
            "key_padding_mask": [(rows, keys)],
            "attn_mask": [(length, keys), (rows * module.num_heads, length, keys)],
        }
        return all(
            mask is None
            or ((mask.dtype is torch.bool or mask.dtype.is_floating_point) and tuple(mask.shape) in allowed[name])
            for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask))
        )

    def _read(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return q, k and v with features cut; layers that read the same tensor read it together."""
        q, k, v = self.readers
        if query is key is value:
            groups: list[tuple[list[Expand], Tensor]] = [([q, k, v], query)]
        elif key is value:
            groups = [([q], query), ([k, v], key)]
        else:
            groups = [([q], query), ([k], key), ([v], value)]
        outs = [out for layers, a in groups for out in expand_all(self.context, layers, a, None)]
        return outs if self.context.is_cut else [out.whole() for out in outs]

    def _added(self, module: Any, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values [rows, heads, 1, head_dim] that every row gets besides its own."""
        shape = (keys.shape[0], keys.shape[1], 1, keys.shape[3])
        if self.extra.specs:
            key, value = (to_whole(added).view(1, *shape[1:]).expand(shape) for added in (module.bias_k, module.bias_v))
            yield key, value
        if module.add_zero_attn:
            zeros = torch.zeros(shape, dtype=keys.dtype, device=keys.device)
            yield zeros, zeros

    def describe(self) -> tuple[str, str]:
        layout = (
            "q, k, v: w[n/x, k/y]/z: rest -> heads" if self.packed else "q, k, v apart: w[n/x, k/y]/z: rest -> heads"
        )
        return layout, "enter over x, w over z, spread over y"


def _by_head(a: Tensor, module: Any) -> Tensor:
    """[rows, seq, features], or [seq, rows, features] without batch_first, -> [rows, heads, seq, head_dim]."""
    apart = a.unflatten(-1, (module.num_heads, -1))
    return apart.transpose(1, 2) if module.batch_first else apart.permute(1, 2, 0, 3)


def _by_row(a: Tensor, module: Any) -> Tensor:
    """[rows, heads, seq, head_dim] -> the shape of the module's inputs."""
    return (a.transpose(1, 2) if module.batch_first else a.permute(2, 0, 1, 3)).flatten(2)


def _merge_masks(attn_mask: Tensor | None, key_padding_mask: Tensor | None, queries: Tensor) -> Tensor | None:
    """Return both masks as one that is added to scores [rows, heads, seq, keys]."""
    rows, heads = queries.shape[:2]
    found: list[Tensor] = []
    if attn_mask is not None:
        wide = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (rows, heads))
        found.append(_as_added(to_whole(wide), queries.dtype))
    if key_padding_mask is not None:
        found.append(_as_added(to_whole(key_padding_mask)[:, None, None], queries.dtype))
    return sum(found[1:], found[0]) if found else None


def _as_added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores; in a boolean mask True hides a key."""
    if mask.is_floating_point():
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)
