"""`generate` of a parallelised model: the same prompts on all ranks in, all rows out.

The rows are cut over the (data, z) places as in training, with copies of the last one where they do not divide; the
model's own method runs on each place's rows; ranks of places that are done early go on with the others, whose weights
they hold a part of. All ranks of a place draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from fourfold import comm
from fourfold.axes import BATCH
from fourfold.data.rows import local_rows
from fourfold.grid import Grid
from fourfold.nn.initial import key_of
from fourfold.nn.moment import drawing


def generate_on_grid(own: Callable[..., Any], model: nn.Module, grid: Grid, *args: Any, **kwargs: Any) -> Any:
    """`own` is the plain class's method. Returns the token ids of all rows, padded to the longest."""
    if kwargs.get("return_dict_in_generate") or kwargs.get("streamer") is not None:
        raise ValueError(
            "generate on a grid gives token ids; return_dict_in_generate and streamer see the rows of one place only"
        )
    rows = _rows(args, kwargs)
    places = grid.shape.places
    missing = -rows % places

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != rows:
            return value
        return local_rows(torch.cat([value, value[-1:].expand(missing, *value.shape[1:])]), grid).to(grid.device)

    args = tree_map(cut, args)
    kwargs = {name: value if name.endswith("_token_id") else tree_map(cut, value) for name, value in kwargs.items()}
    kwargs.setdefault("synced_gpus", grid.size("z") > 1)
    # a number that all ranks have, so that torch.manual_seed on the first one decides
    drawn = int(comm.from_first(torch.randint(1 << 52, (1,), dtype=torch.float64, device=grid.device), grid))
    key = key_of(drawn, *(f"{axis}={grid.coords[axis]}" for axis in BATCH))
    with drawing(key, grid.device):
        tokens = own(model, *args, **kwargs)
    return _joined(tokens, grid, _padding(model, kwargs))[: rows * (len(tokens) * places // (rows + missing))]


def _rows(args: tuple, kwargs: dict) -> int:
    others = {name: value for name, value in kwargs.items() if not name.endswith("_token_id")}
    for value in tree_leaves((args, kwargs.get("inputs"), kwargs.get("input_ids"), others)):
        if isinstance(value, Tensor) and value.dim() > 0:
            return value.shape[0]
    raise ValueError("generate on a grid needs the prompts as a tensor [rows, ...], the same on all ranks")


def _padding(model: nn.Module, kwargs: dict) -> int:
    """The id that fills rows which ended early."""
    for place in (kwargs.get("generation_config"), getattr(model, "generation_config", None)):
        for name in ("pad_token_id", "eos_token_id"):
            value = kwargs.get(name, getattr(place, name, None))
            if value is not None:
                return int(torch.as_tensor(value).flatten()[0])
    return 0


def _joined(tokens: Tensor, grid: Grid, padding: int) -> Tensor:
    """The rows of all places, from lengths that may differ."""
    for axis in reversed(BATCH):  # data is the outer cut of rows
        length = torch.tensor([tokens.shape[1]], device=tokens.device)
        longest = int(comm.all_gather(length, grid, axis, label="generate").wait().max())
        tokens = functional.pad(tokens, (0, longest - tokens.shape[1]), value=padding)
        tokens = comm.all_gather(tokens.contiguous(), grid, axis, label="generate").wait()
    return tokens
