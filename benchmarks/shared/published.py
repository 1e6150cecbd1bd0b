"""The published communication model, by which earlier planners ranked grids and with which ours is compared.

It has the rings and bandwidths of arXiv 2305.13525 and 2502.08145, without latency, computation, overlap, memory,
embedding, head, and messages that recompute repeats. A layer O = I W, I [m, k], W [k, n], on m tokens of a replica:

    gather of W over z          (z-1) k n / (x y z) / b_z
    reduce-scatter of dW over z ((z-1)/z) k n / (x y) / b_z
    all-reduce of O over y      2 ((y-1)/y) m n / (z x) / b_y
    all-reduce of dI over x     2 ((x-1)/x) m k / (z y) / b_x
    all-reduce of dW over data  2 ((d-1)/d) k n / (x y z) / b_data

with x and y swapped in every second layer. The planner must not depend on this file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from fourfold.axes import CUTS
from fourfold.models.config import ModelConfig
from fourfold.planner.machine import Machine, inside_link
from fourfold.policy import Policy
from fourfold.shape import Shape, shapes_of

MESSAGE_ITEMSIZE = 2
"""Bytes of an element of weights and activations in messages: by default they are sent in bf16."""
GRADIENT_ITEMSIZE = 4
"""Bytes of an element of gradients in the all-reduce over data, which is in fp32."""


class PublishedLayer(NamedTuple):
    """A product with weights [k, n]; in a transposed layer x cuts the in-features and y the out-features."""

    k: int
    n: int
    transposed: bool = False


class Ranked(NamedTuple):
    """A grid with the seconds that its communication takes per step."""

    shape: Shape
    seconds: float


def layers_of(config: ModelConfig) -> list[PublishedLayer]:
    """Return the layers of one block; every second layer is transposed."""
    heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    up = config.mlp_hidden * (2 if config.mlp == "swiglu" else 1)
    return [
        PublishedLayer(config.hidden, heads + 2 * kv),
        PublishedLayer(heads, config.hidden, transposed=True),
        PublishedLayer(config.hidden, up),
        PublishedLayer(config.mlp_hidden, config.hidden, transposed=True),
    ]


def published_bandwidth(machine: Machine, shape: Shape, axis: str) -> float:
    """Return the bytes per second of a ring along the axis.

    Inside a node this is the measured bandwidth; between nodes the rings of a node share what the published model takes
    for the bandwidth of its network cards, which is that of one ring.
    """
    size, stride = shape.sizes[axis], 1
    for faster in shape.order[: shape.order.index(axis)]:
        stride *= shape.sizes[faster]
    if size == 1:
        return inf
    if stride * size <= machine.devices_per_node:
        return inside_link(machine, stride, size).bandwidth
    if machine.between is None:
        raise ValueError(
            f"axis {axis}={size} of the grid {shape} leaves the one node of {machine.devices_per_node} devices that "
            f"{machine.name} is; add [between] to its file, or choose a grid that fits"
        )
    return machine.between.per_ring(1) / min(machine.devices_per_node, stride)


def layer_elements(layer: PublishedLayer, shape: Shape, m: float) -> dict[str, float]:
    """Return the elements that a rank sends for one layer, by axis, with m tokens per replica."""
    x, y, z, data = shape.x, shape.y, shape.z, shape.data
    one, other = ("x", "y") if not layer.transposed else ("y", "x")
    cut_n, cut_k = shape.sizes[one], shape.sizes[other]
    weight = layer.k * layer.n / (x * y)
    return {
        other: 2 * (cut_k - 1) / cut_k * m * layer.n / (z * cut_n),
        one: 2 * (cut_n - 1) / cut_n * m * layer.k / (z * cut_k),
        "z": 2 * (z - 1) / z * weight,  # the gather and the reduce-scatter
        "data": 2 * (data - 1) / data * weight / z,
    }


def published_seconds(
    config: ModelConfig, shape: Shape, rows: int, seq: int, machine: Machine, message_itemsize: int = MESSAGE_ITEMSIZE
) -> dict[str, float]:
    """Return the seconds of a step's communication by axis, for a batch of `rows` sequences over all ranks."""
    elements = dict.fromkeys(CUTS, 0.0)
    for layer in layers_of(config):
        for axis, number in layer_elements(layer, shape, rows * seq / shape.data).items():
            elements[axis] += config.layers * number
    itemsize = {axis: GRADIENT_ITEMSIZE if axis == "data" else message_itemsize for axis in CUTS}
    return {
        axis: number * itemsize[axis] / published_bandwidth(machine, shape, axis) for axis, number in elements.items()
    }


def published_ranking(
    config: ModelConfig, devices: int, rows: int, seq: int, machine: Machine, order: Sequence[str] = CUTS
) -> list[Ranked]:
    """Return every grid of this number of devices that can cut the model and the batch, the fastest first."""
    ranked = [
        Ranked(shape, sum(published_seconds(config, shape, rows, seq, machine).values()))
        for shape in _grids(config, devices, rows, order)
    ]
    return sorted(ranked, key=lambda one: (one.seconds, tuple(one.shape.sizes.values())))


def _grids(config: ModelConfig, devices: int, rows: int, order: Sequence[str]) -> Iterator[Shape]:
    policy = Policy(activations="replicated")
    for shape in shapes_of(devices, order):
        if rows % (shape.z * shape.data) == 0 and config.misfit(shape, policy) is None:
            yield shape
