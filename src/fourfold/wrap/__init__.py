"""Any module onto the grid: `parallelize`, `explain`, and the words of a plan."""

import fourfold.wrap.along
import fourfold.wrap.attention
import fourfold.wrap.einsums
import fourfold.wrap.shapes
import fourfold.wrap.space  # noqa: F401  # these register what runs on parts
from fourfold.wrap.build import parallelize
from fourfold.wrap.explain import explain
from fourfold.wrap.plan import (
    ChannelNorm,
    Contract,
    Convolution,
    Embedding,
    Expand,
    Head,
    HeadNorm,
    Heads,
    Norm,
    Whole,
)
from fourfold.wrap.state import whole_tensors

__all__ = [
    "ChannelNorm",
    "Contract",
    "Convolution",
    "Embedding",
    "Expand",
    "Head",
    "HeadNorm",
    "Heads",
    "Norm",
    "Whole",
    "explain",
    "parallelize",
    "whole_tensors",
]
