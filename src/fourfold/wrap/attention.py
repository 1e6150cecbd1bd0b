"""Attention on heads that are cut: torch's fused kernel on each rank's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Size, Tensor
from torch.nn import functional

from fourfold.nn.moment import drawing
from fourfold.wrap.layouts import Shared
from fourfold.wrap.placed import Blocks, Placed, whole
from fourfold.wrap.rules import key_of_parts, rule

ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""Those that `scaled_dot_product_attention` takes by position; torch gives no signature of it."""
HEADS = 1
"""The dim of heads in [rows, heads, seq, head_dim]."""


@rule(functional.scaled_dot_product_attention)
def attend(func: Callable, args: tuple, kwargs: dict) -> Any:
    named = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
    query, key, value = named.pop("query"), named.pop("key"), named.pop("value")
    if not isinstance(query, Placed) or type(query.placement) is not Blocks or query.dim() != 4:
        return NotImplemented
    layout = query.placement
    if layout.dim != HEADS or query.shape[HEADS] % layout.parts:
        return NotImplemented
    if any(tensor.dim() != 4 or tensor.shape[0] != query.shape[0] for tensor in (key, value)):
        return NotImplemented
    grouped = named.get("enable_gqa", False)
    own = [_own(tensor, layout, query.shape[HEADS], grouped=grouped) for tensor in (key, value)]
    if any(tensor is None for tensor in own) or own[0].shape[HEADS] != own[1].shape[HEADS]:  # type: ignore[union-attr]
        return NotImplemented
    if named.get("attn_mask") is not None:
        named["attn_mask"] = _own_mask(named["attn_mask"], layout, Size((*query.shape[:3], key.shape[2])))
    named["enable_gqa"] = own[0].shape[HEADS] != query.local.shape[HEADS]  # type: ignore[union-attr]
    shape = (*query.shape[:-1], value.shape[-1])
    if not named.get("dropout_p", 0.0):
        return Placed(func(query.local, *own, **named), layout, shape)
    with drawing(key_of_parts(query), query.device):
        return Placed(func(query.local, *own, **named), layout, shape)


def _own(tensor: Tensor, layout: Blocks, heads: int, *, grouped: bool) -> Tensor | None:
    """The heads of K or V that this rank's queries read; None where parts do not say."""
    if isinstance(tensor, Placed):
        if isinstance(tensor.placement, Shared):
            shared = tensor.placement
            follows = shared.over == layout.over and shared.heads * shared.group == heads
            return shared.for_queries(tensor.local) if follows and shared.dim == HEADS and shared.size == 1 else None
        even = tensor.shape[HEADS] % layout.parts == 0
        if tensor.placement == layout and even and (grouped or tensor.shape[HEADS] == heads):
            return tensor.local
        tensor = tensor.whole()
    if tensor.shape[HEADS] != heads:
        tensor = tensor.repeat_interleave(heads // tensor.shape[HEADS], HEADS)
    return layout.part(tensor, Size((*tensor.shape[:HEADS], heads, *tensor.shape[HEADS + 1 :])))


def _own_mask(mask: Tensor, layout: Blocks, scores: Size) -> Tensor:
    """What this rank's heads read of a mask that is broadcast to the scores."""
    if isinstance(mask, Placed) and mask.placement == layout and mask.shape == scores:
        return mask.local
    return layout.part(whole(mask), scores)
