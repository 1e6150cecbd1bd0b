"""Any module onto the grid: `parallelize`, `explain`, and the words of a plan."""

import fourfold.parallelize.along
import fourfold.parallelize.attention
import fourfold.parallelize.einsums
import fourfold.parallelize.shapes
import fourfold.parallelize.space  # noqa: F401  # these register what runs on parts
from fourfold.parallelize.build import parallelize
from fourfold.parallelize.explain import explain
from fourfold.parallelize.plan import (
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
from fourfold.parallelize.state import whole_tensors

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
