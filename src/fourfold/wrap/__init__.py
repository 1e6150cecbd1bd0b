"""Any module onto the grid: `parallelize`, `explain`, the styles of a plan, and `whole_tensors`."""

import fourfold.wrap.ops
import fourfold.wrap.ops_dims
import fourfold.wrap.ops_sequence  # noqa: F401  # importing them registers the rules
from fourfold.wrap.build import explain, parallelize
from fourfold.wrap.parameters import whole_tensors
from fourfold.wrap.plan import (
    ChannelNormParallel,
    ContractParallel,
    ConvParallel,
    EmbeddingParallel,
    ExpandParallel,
    ExpertsParallel,
    HeadNormParallel,
    HeadParallel,
    HeadsParallel,
    NormParallel,
    WholeTensors,
)

__all__ = [
    "ChannelNormParallel",
    "ContractParallel",
    "ConvParallel",
    "EmbeddingParallel",
    "ExpandParallel",
    "ExpertsParallel",
    "HeadNormParallel",
    "HeadParallel",
    "HeadsParallel",
    "NormParallel",
    "WholeTensors",
    "explain",
    "parallelize",
    "whole_tensors",
]
