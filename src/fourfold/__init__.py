"""Fourfold trains neural networks on a four-dimensional grid of devices."""

from fourfold import models, nn, optim
from fourfold.compare import compare_serial
from fourfold.data.rows import local_rows
from fourfold.gradients import accumulate, clip_grad_norm_
from fourfold.grid import Grid, Shape
from fourfold.layout import Policy
from fourfold.nn.loss import count_targets, global_mean
from fourfold.overlap import Overlap
from fourfold.parallelize import explain, parallelize

__version__ = "0.1.0"

__all__ = [
    "Grid",
    "Overlap",
    "Policy",
    "Shape",
    "accumulate",
    "clip_grad_norm_",
    "compare_serial",
    "count_targets",
    "explain",
    "global_mean",
    "local_rows",
    "models",
    "nn",
    "optim",
    "parallelize",
]
