"""Layers on the grid."""

from fourfold.nn.attention import Attention, Batch
from fourfold.nn.embedding import Embedding, Head, Positions
from fourfold.nn.layer import Dropout, Layer, assemble
from fourfold.nn.linear import MLP, Contract, Expand, expand_together
from fourfold.nn.loss import count_targets, cross_entropy, global_mean
from fourfold.nn.norm import HeadNorm, Norm

__all__ = [
    "MLP",
    "Attention",
    "Batch",
    "Contract",
    "Dropout",
    "Embedding",
    "Expand",
    "Head",
    "HeadNorm",
    "Layer",
    "Norm",
    "Positions",
    "assemble",
    "count_targets",
    "cross_entropy",
    "expand_together",
    "global_mean",
]
