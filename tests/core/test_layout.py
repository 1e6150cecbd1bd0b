"""How tensors are cut: by hand, against torch.chunk and DTensor, and what each gradient owes (DESIGN section 3)."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fourfold as ff
from fourfold.axes import AXES, CUTS, FOLDED
from fourfold.grid import Shape
from fourfold.layout import (
    CONTRACT_WEIGHT,
    EXPAND_BIAS,
    EXPAND_WEIGHT,
    POSITIONS,
    RESIDUAL_VECTOR,
    WHOLE,
    Layout,
    boxed,
    chunk,
    overlap,
)
from fourfold.nn.layer import specs_of
from fourfold.policy import Policy
from harness import grid_of

MATRICES = [EXPAND_WEIGHT, CONTRACT_WEIGHT, POSITIONS]
VECTORS = [EXPAND_BIAS, RESIDUAL_VECTOR, WHOLE]


def test_chunk_cuts_as_torch_does() -> None:
    for length, parts in itertools.product(range(1, 40), range(1, 12)):
        mine = [list(chunk(length, parts, index)) for index in range(parts)]
        torchs = [part.tolist() for part in torch.arange(length).chunk(parts)]
        assert [part for part in mine if part] == torchs
        assert mine[: len(torchs)] == torchs  # the empty ones come last


def test_no_length_gives_empty_parts() -> None:
    assert [chunk(0, 3, index) for index in range(3)] == [range(0)] * 3


def test_uneven_vocabulary_by_hand() -> None:
    """53 rows: x takes 18, 18, 17; z halves each into 9 + 9, 9 + 9, 9 + 8."""
    sizes = Shape(x=3, y=2, z=2).sizes
    rows = {
        (0, 0): range(0, 9),
        (0, 1): range(9, 18),
        (1, 0): range(18, 27),
        (1, 1): range(27, 36),
        (2, 0): range(36, 45),
        (2, 1): range(45, 53),
    }
    for (x, z), held in rows.items():
        for y, columns in enumerate([range(0, 3), range(3, 5)]):
            coords = {"x": x, "y": y, "z": z, "data": 0}
            assert EXPAND_WEIGHT.box((53, 5), sizes, coords) == (held, columns)


@pytest.mark.parametrize("sizes", [(3, 2, 2, 1), (2, 3, 4, 2), (5, 1, 7, 1), (1, 1, 1, 3)], ids=str)
def test_boxes_tile_a_tensor_once_per_replica(sizes: tuple[int, ...]) -> None:
    shape = Shape(*sizes)
    for storage in MATRICES + VECTORS:
        for whole in [(53, 5), (7, 24), (2, 3)] if storage in MATRICES else [(53,), (24,), (1,)]:
            held = torch.zeros(whole, dtype=torch.int64)
            for rank in range(shape.world):
                held[slices(storage.box(whole, shape.sizes, shape.coords(rank)))] += 1
            replicas = [size for axis, size in shape.sizes.items() if axis not in storage.axes]
            assert held.unique().tolist() == [torch.tensor(replicas).prod().item()]


def test_compute_layout_is_whole_over_z() -> None:
    shape = Shape(x=3, z=2)
    for rank in range(6):
        held = EXPAND_WEIGHT.compute.box((53, 4), shape.sizes, shape.coords(rank))
        assert held == (chunk(53, 3, rank % 3), range(4))
    assert WHOLE.compute == Layout(())


UNEVEN = [Shape(x=2, z=2), Shape(y=2, z=2, order=("z", "y", "x", "data")), Shape(x=4)]


def test_box_is_what_a_dtensor_holds(ranks) -> None:
    for found in ranks(4).run(boxes_unlike_dtensor):
        assert found == []


def boxes_unlike_dtensor() -> list[str]:
    found = []
    for shape, storage in itertools.product(UNEVEN, MATRICES + VECTORS):
        grid = grid_of(shape)
        # 3 over x=4, and 5 over two axes of 2, leave some ranks with nothing
        for dims in [(7, 5), (3, 9)] if storage in MATRICES else [(5,), (3,)]:
            whole = torch.arange(float(torch.tensor(dims).prod())).view(dims)
            theirs = distribute_tensor(whole, grid.mesh, storage.placements(), src_data_rank=None).to_local()
            mine = whole[slices(storage.box(dims, shape.sizes, grid.coords))]
            if not torch.equal(mine, theirs):
                found.append(f"{shape}, rank {grid.rank}, {storage}, {dims}: {tuple(mine.shape)} {tuple(theirs.shape)}")
    return found


def slices(box: tuple[range, ...]) -> tuple[slice, ...]:
    return tuple(slice(part.start, part.stop) for part in box)


R, S0, S1 = Replicate(), Shard(0), Shard(1)
KINDS = [
    # parameters, placements over (x, y, z, data), axes owed in sharded and in replicated mode
    (r"(embedding|head)\.weight", [S0, S1, S0, R], "z data", "z data"),
    (r"positions\.weight", [R, S1, S0, R], "x z data", "z data"),
    (r"layers\.\d\.(attention\.[qkv]|mlp\.(up|gate))\.weight", [S0, S1, S0, R], "z data", "z data"),
    (r"layers\.\d\.(attention\.[qkv]|mlp\.(up|gate))\.bias", [S0, S0, S0, R], "z data", "z data"),
    (r"layers\.\d\.(attention\.out|mlp\.down)\.weight", [S1, S0, S0, R], "z data", "z data"),
    (r"layers\.\d\.(attention\.out|mlp\.down)\.bias", [R, S0, S0, R], "z data", "z data"),
    (r"(layers\.\d\.(attention|mlp)_)?norm\.(weight|bias)", [R, S0, S0, R], "x z data", "z data"),
    (r"layers\.\d\.attention\.[qk]_norm\.weight", [R, R, S0, R], "x y z data", "x z data"),
]


@pytest.mark.parametrize("mode", ["sharded", "replicated"])
def test_every_parameter_rests_and_owes_as_the_design_says(mode: str) -> None:
    seen = set()
    for name, spec in every_parameter(mode):
        kinds = [kind for kind in KINDS if re.fullmatch(kind[0], name)]
        assert len(kinds) == 1, name
        pattern, placements, *owes = kinds[0]
        seen.add(pattern)
        axes = tuple(owes[mode == "replicated"].split())
        assert spec.storage.placements() == placements, name
        assert replace(spec, storage=spec.storage.compute).owes == axes, name
        # z cuts the storage of every parameter, so a reduce-scatter pays it; the others are all-reduced
        assert spec.owes == tuple(axis for axis in axes if axis != "z"), name
    assert seen == {kind[0] for kind in KINDS}


def every_parameter(mode: str) -> list[tuple]:
    grid = ff.Grid.alone("cpu")
    found = []
    for size in ("gpt-tiny", "llama-tiny"):
        config = ff.models.config(size, layers=1, qk_norm=True, tied=False)
        model = ff.models.build(config, grid, policy=Policy(activations=mode), device="meta")
        specs = specs_of(model)
        assert specs.keys() == dict(model.named_parameters()).keys()
        found += specs.items()
    return found


@pytest.mark.parametrize("activations", ["shraded", "", None, "SHARDED"])
def test_policy_refuses_an_unknown_mode(activations) -> None:
    with pytest.raises(ValueError, match=r"activations=.* is none of \('sharded', 'replicated'\)"):
        Policy(activations=activations)


@pytest.mark.parametrize("bucket_bytes", [0, -1])
def test_policy_refuses_empty_buckets(bucket_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"bucket_bytes={bucket_bytes} must be at least 1"):
        Policy(bucket_bytes=bucket_bytes)


@pytest.mark.parametrize(
    "cuts",
    [(("x", 0), ("x", 1)), (("unknown", 0),)],
    ids=["twice", "unknown"],
)
def test_layout_refuses_axes_that_are_repeated_or_unknown(cuts) -> None:
    with pytest.raises(ValueError, match="at most once") as error:
        Layout(cuts)
    assert str((*AXES, *FOLDED)) in str(error.value)
    assert str(tuple(axis for axis, _ in cuts)) in str(error.value)


@pytest.mark.parametrize("cuts", [(("y", 0), ("x", 1)), (("z", 0), ("data", 0), ("y", 0))])
def test_a_dtensor_cuts_in_the_order_of_its_mesh(cuts) -> None:
    with pytest.raises(ValueError, match="a DTensor is cut over the axes in the order") as error:
        Layout(cuts).placements()
    assert str(CUTS) in str(error.value)


@pytest.mark.parametrize("cuts", [(), (("z", 0), ("x", 0)), (("y", 1), ("x", 0), ("data", 0))], ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (3, 1), (0, 4)], ids=str)
def test_boxes_are_every_rank_s_box_and_partition_the_tensor(cuts, shape: tuple[int, int]) -> None:
    layout, sizes = Layout(cuts), {"x": 2, "y": 3, "z": 2, "data": 2}
    counts = torch.zeros(shape)
    for coords, box in layout.boxes(shape, sizes):
        assert box == layout.box(shape, sizes, coords)
        boxed(counts, box).add_(1)
    assert counts.eq(1).all()
    within = tuple(range(min(1, length), min(3, length)) for length in shape)
    met = [box for _, box in layout.boxes(shape, sizes) if all(overlap(a, b) for a, b in zip(box, within, strict=True))]
    found = [box for _, box in layout.boxes(shape, sizes, within)]
    assert [box for box in found if all(overlap(a, b) for a, b in zip(box, within, strict=True))] == met
