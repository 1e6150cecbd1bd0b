"""The published communication model against numbers worked by hand, and against its own laws."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fourfold.cost.machine import Link, Machine, load_machine
from fourfold.cost.published import (
    Layer,
    layer_elements,
    layers_of,
    published_bandwidth,
    published_ranking,
    published_seconds,
)
from fourfold.grid import AXES, Shape, shapes_of
from fourfold.models.config import config


def flat(bandwidth: float = 1e9) -> Machine:
    """All devices on one node, every ring as fast as any other."""
    machine = load_machine("frontier")
    return replace(machine, devices_per_node=1 << 20, inside={(1, 2): Link(bandwidth, 0.0)}, between=None)


def test_bytes_of_one_layer_are_the_published_ones() -> None:
    """m=16, k=32, n=64 in fp32 on (2, 2, 2): buffers of 2048 over z, 1024 over y, 512 over x; each rank sends half of
    a gather's or reduce-scatter's buffer and the whole of an all-reduce's."""
    sent = layer_elements(Layer(32, 64), Shape(x=2, y=2, z=2), 16)
    assert {axis: 4 * number for axis, number in sent.items()} == {
        "x": 512,
        "y": 1024,
        "z": 2048 / 2 + 2048 / 2,
        "data": 0,
    }


def test_a_transposed_layer_swaps_x_and_y() -> None:
    grid, swapped = Shape(x=2, y=4, z=2, data=3), Shape(x=4, y=2, z=2, data=3)
    ordinary, transposed = layer_elements(Layer(32, 64), swapped, 16), layer_elements(Layer(32, 64, True), grid, 16)
    assert (ordinary["x"], ordinary["y"]) == (transposed["y"], transposed["x"])
    assert (ordinary["z"], ordinary["data"]) == (transposed["z"], transposed["data"])


def test_a_gpt_block_sends_the_published_sums() -> None:
    """12 h m_z / x over y and 4 h m_z / y over x, 12 h^2/(x y) over z each way, 12 h^2/(x y z) over data."""
    gpt, shape, m = config("gpt-5b"), Shape(x=4, y=2, z=8, data=16), 4096
    sums = dict.fromkeys(AXES, 0.0)
    for layer in layers_of(gpt):
        for axis, number in layer_elements(layer, shape, m).items():
            sums[axis] += number
    h, m_z = gpt.hidden, m / 8
    assert sums["y"] == pytest.approx(2 * 1 / 2 * 12 * h * m_z / 4)
    assert sums["x"] == pytest.approx(2 * 3 / 4 * 4 * h * m_z / 2)
    assert sums["z"] == pytest.approx(2 * 7 / 8 * 12 * h**2 / 8)
    assert sums["data"] == pytest.approx(2 * 15 / 16 * 12 * h**2 / 64)


def test_bandwidths_are_the_published_table() -> None:
    perlmutter, frontier = load_machine("perlmutter"), load_machine("frontier")
    shape = Shape(x=2, y=2, z=8, data=4)
    assert [published_bandwidth(perlmutter, shape, axis) / 1e9 for axis in AXES] == [76, 76, 20, 20]
    assert [published_bandwidth(frontier, shape, axis) / 1e9 for axis in AXES] == [129, 50, 10, 5]
    assert published_bandwidth(frontier, Shape(x=8, z=4), "x") == 135e9
    assert published_bandwidth(perlmutter, Shape(z=8), "z") == 80e9
    assert published_bandwidth(perlmutter, Shape(z=8), "x") == math.inf
    assert published_bandwidth(perlmutter, Shape(x=4, z=2, order=("z", "x", "y", "data")), "z") == 76e9
    with pytest.raises(ValueError, match=r"axis z=16 .* leaves the one node of 8 devices that h200-node is"):
        published_bandwidth(load_machine("h200-node"), Shape(z=16), "z")


def test_seconds_worked_by_hand() -> None:
    """GPT-5B (24 layers, h = 4096) on 64 A100, x=4 inside a node, z=4 and data=4 across: 64 rows of 2048 tokens."""
    found = published_seconds(config("gpt-5b"), Shape(x=4, z=4, data=4), 64, 2048, load_machine("perlmutter"))
    m_z = 64 * 2048 / 16
    assert found["x"] == pytest.approx(24 * 2 * 3 / 4 * 4 * 4096 * m_z * 2 / 225e9)
    assert found["x"] == pytest.approx(0.0429497, rel=1e-5)
    assert found["y"] == 0
    assert found["z"] == pytest.approx(24 * 2 * 3 / 4 * 12 * 4096**2 / 4 * 2 / 20e9)
    assert found["z"] == pytest.approx(0.1811939, rel=1e-5)
    assert found["data"] == pytest.approx(24 * 2 * 3 / 4 * 12 * 4096**2 / 16 * 4 / 20e9)
    assert found["data"] == pytest.approx(0.0905970, rel=1e-5)


@pytest.mark.parametrize("side", [1, 2, 3, 4, 7])
def test_at_a_fixed_product_the_best_split_is_three_to_one(side: int) -> None:
    gpt = config("gpt-80b")
    splits = [shape for shape in shapes_of(3 * side**2) if shape.z == shape.data == 1]
    best = min(splits, key=lambda shape: sum(published_seconds(gpt, shape, 8, 2048, flat()).values()))
    assert (best.x, best.y) == (3 * side, side)


def test_the_ranking_holds_every_grid_that_fits_and_rises() -> None:
    gpt, machine = config("gpt-20b"), load_machine("perlmutter")
    ranked = published_ranking(gpt, 32, 64, 2048, machine)
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    fits = [s for s in shapes_of(32) if gpt.heads % s.x == 0 and gpt.hidden % s.y == 0 and 64 % (s.z * s.data) == 0]
    assert {one.shape for one in ranked} == set(fits)
    assert len(fits) < len(list(shapes_of(32)))  # 56 heads are not cut by 16 or 32
    assert ranked[0].seconds == sum(published_seconds(gpt, ranked[0].shape, 64, 2048, machine).values())


def test_faster_links_scale_the_seconds() -> None:
    gpt, shape = config("gpt-5b"), Shape(x=2, y=2, z=2, data=2)
    slow, fast = (published_seconds(gpt, shape, 16, 2048, flat(bandwidth)) for bandwidth in (1e9, 4e9))
    for axis in AXES:
        assert slow[axis] == pytest.approx(4 * fast[axis])
