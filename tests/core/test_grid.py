"""Who sits where: shape arithmetic without a process, the start-up environment, process groups on 4 ranks."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import fourfold as ff
from fourfold import comm
from fourfold.axes import AXES
from fourfold.environment import Environment, first_node, set_master_address
from fourfold.grid import Grid, Shape, _fewest_cores
from fourfold.layout import EXPAND_WEIGHT, PRODUCT, Init, Spec
from fourfold.nn.layer import specs_of
from fourfold.params import local_of
from fourfold.policy import Policy
from fourfold.shape import shapes_of
from harness import RankFailed, join_shards
from share import others_slow

ORDERS = [
    ("x", "y", "z", "data"),
    ("data", "z", "y", "x"),
    ("z", "x", "data", "y"),
    ("y", "data", "x", "z"),
]


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
def test_rank_is_the_inverse_of_coords(order) -> None:
    for shape in shapes_of(12, order):
        places = [shape.coords(rank) for rank in range(12)]
        assert [shape.rank(place) for place in places] == list(range(12))
        assert all(0 <= place[axis] < shape.sizes[axis] for place in places for axis in AXES)


def test_x_varies_fastest_then_y_z_data_pipe() -> None:
    shape = Shape(2, 3, 5, 7, 2)
    assert shape.world == 420
    for rank, axis in ((1, "x"), (2, "y"), (6, "z"), (30, "data"), (210, "pipe")):
        assert shape.coords(rank) == {**dict.fromkeys(AXES, 0), axis: 1}
    assert shape.rank({"x": 1, "y": 2, "z": 3, "data": 4, "pipe": 1}) == 1 + 2 * (2 + 3 * (3 + 5 * (4 + 7 * 1)))


def test_the_first_axis_of_the_order_varies_fastest() -> None:
    shape = Shape(x=2, y=1, z=3, data=2, order=("z", "data", "x", "y"))
    assert [shape.coords(rank)["z"] for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [shape.coords(rank)["data"] for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [shape.coords(rank)["x"] for rank in range(0, 12, 3)] == [0, 0, 1, 1]


def test_ranks_along_an_axis_share_all_other_coordinates() -> None:
    shape = Shape(x=2, y=2, z=3)
    assert shape.ranks_along("x", 4) == [4, 5]
    assert shape.ranks_along("y", 5) == [5, 7]
    assert shape.ranks_along("z", 7) == [3, 7, 11]
    assert shape.ranks_along("data", 7) == [7]
    assert Shape(x=2, z=2, order=("z", "x", "y", "data")).ranks_along("x", 3) == [1, 3]


@pytest.mark.parametrize("order", ORDERS, ids=",".join)
def test_mesh_has_each_rank_at_its_coordinates(order) -> None:
    for shape in [Shape(2, 3, 1, 2, order=order), Shape(3, 1, 4, 1, order=order)]:
        mesh = shape.mesh_ranks()
        assert mesh.shape == tuple(shape.sizes.values())
        for place in itertools.product(*(range(size) for size in shape.sizes.values())):
            assert mesh[place] == shape.rank(dict(zip(AXES, place, strict=True)))


@pytest.mark.parametrize(("world", "count"), [(1, 1), (2, 4), (3, 4), (4, 10), (6, 16), (8, 20), (12, 40)])
def test_every_factorisation_is_found_once(world: int, count: int) -> None:
    found = list(shapes_of(world))
    assert len(found) == len(set(found)) == count
    assert all(shape.world == world for shape in found)
    with_pipe = list(shapes_of(world, axes=AXES))
    assert {shape for shape in with_pipe if shape.pipe == 1} == set(found)
    assert len(with_pipe) == sum(
        len(list(shapes_of(world // pipe))) for pipe in range(1, world + 1) if world % pipe == 0
    )


def test_shapes_of_keeps_the_order_of_the_ranks() -> None:
    assert {shape.order for shape in shapes_of(4, ORDERS[1])} == {(*ORDERS[1], "pipe")}


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, None])
def test_an_axis_is_a_whole_number_from_1_up(size) -> None:
    with pytest.raises(ValueError, match=r"grid axis y=.*whole number from 1 up") as error:
        Shape(y=size)
    assert repr(size) in str(error.value)


@pytest.mark.parametrize(
    "order", [("x", "y", "z"), ("x", "y", "z", "z"), ("x", "y", "z", "pipe"), ("x", "y", "z", "data", "x"), ()]
)
def test_an_order_names_each_axis_once(order) -> None:
    with pytest.raises(ValueError, match="must name each axis once, fastest-varying first"):
        Shape(order=order)


def test_a_shape_reads_as_the_axes_that_cut() -> None:
    assert str(Shape()) == "one rank"
    assert str(Shape(x=2, data=3)) == "x=2 data=3"
    assert str(Shape(z=4, order=ORDERS[1])) == "z=4 order=data,z,y,x"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-010,020],cpu1", "gpu003"),
        ("node7", "node7"),
        ("a-b[1,3]", "a-b1"),
        ("n1,n2", "n1"),
        ("n[7-9]-ib,n12-ib", "n7-ib"),
        ("rack[0-63]_blade[2-41]", "rack0_blade2"),  # slurm.conf(5) allows a range in each part of a name
    ],
)
def test_first_node_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", "[1-3]"])
def test_a_node_list_without_a_node_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="set MASTER_ADDR"):
        first_node(nodes)


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "41234",
    "SLURM_NODELIST": "gpu[07-08]",
}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("env", "place"),
    [
        ({}, (0, 1, 0)),
        (TORCHRUN, (3, 6, 1)),
        ({"RANK": "3", "WORLD_SIZE": "6"}, (3, 6, 0)),
        (SLURM, (5, 8, 1)),
        (SLURM | TORCHRUN, (3, 6, 1)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (0, 1, 0)),
    ],
    ids=["none", "torchrun", "torchrun without local rank", "slurm", "torchrun inside slurm", "slurm with one task"],
)
def test_place_comes_from_torchrun_then_slurm_else_one_rank(monkeypatch, env: dict, place: tuple) -> None:
    monkeypatch.setattr(os, "environ", dict(env))
    here = Environment.read()
    assert (here.rank, here.world, here.local_rank) == place


@pytest.mark.parametrize(
    ("env", "local_world"),
    [
        ({}, None),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, 3),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}, 4),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),2", "SLURM_NODEID": "2"}, 2),
        (SLURM | {"SLURM_NTASKS_PER_NODE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "4"}, None),
    ],
)
def test_the_launcher_says_how_many_ranks_a_node_has(monkeypatch, env: dict, local_world: int | None) -> None:
    monkeypatch.setattr(os, "environ", dict(env))
    assert Environment.read().local_world == local_world


def test_slurm_fills_in_the_rendezvous_where_it_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", dict(SLURM))
    set_master_address()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("gpu07", "21234")
    monkeypatch.setattr(os, "environ", {**SLURM, "SLURM_STEP_NODELIST": "gpu08"})
    set_master_address()
    assert os.environ["MASTER_ADDR"] == "gpu08"
    monkeypatch.setattr(os, "environ", {**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "1"})
    set_master_address()
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("here", "1")


def test_without_an_environment_a_grid_has_one_rank() -> None:
    grid = Grid(device="cpu")
    assert (grid.shape, grid.rank, grid.mesh.shape) == (Shape(), 0, (1, 1, 1, 1))
    assert (grid.size("x"), grid.coords["data"]) == (1, 0)


def test_grid_of_a_parameter_is_its_grid_and_a_plain_tensor_has_none() -> None:
    grid, other = Grid.alone("cpu"), Grid.alone("cpu")
    assert Grid.of(layer_on(grid).weight) is grid
    assert Grid.of(layer_on(other).weight) is other
    with pytest.raises(ValueError, match=r"expected a parameter of a Fourfold module.* got Tensor of shape \(2, 3\)"):
        Grid.of(torch.zeros(2, 3))
    foreign = DTensor.from_local(torch.zeros(2), DeviceMesh("cpu", [0], _init_backend=False), run_check=False)
    with pytest.raises(ValueError, match="got DTensor"):
        Grid.of(foreign)


def test_a_cast_parameter_stays_on_its_own_grid_beside_an_equal_one() -> None:
    grids = [Grid.alone("cpu"), Grid.alone("cpu")]
    assert [Grid.of(layer_on(grid).double().weight) is grid for grid in grids] == [True, True]


def layer_on(grid: Grid) -> ff.nn.Layer:
    layer = ff.nn.Layer(grid, Policy())
    layer.declare("weight", Spec((4, 2), EXPAND_WEIGHT, PRODUCT, Init()))
    ff.nn.assemble(layer, grid, Policy())
    return layer


PERMUTED = [
    Shape(x=2, z=2, order=("z", "x", "y", "data")),
    Shape(x=2, y=2, order=("data", "y", "z", "x")),
    Shape(y=2, data=2),
]


@pytest.mark.slow
def test_process_groups_follow_the_order(ranks) -> None:
    for rank, found in enumerate(ranks(4).run(groups_by_gathering)):
        for shape, (coords, along) in zip(PERMUTED, found, strict=True):
            assert coords == {**shape.coords(rank), "context": 0}
            assert along == {axis: shape.ranks_along(axis, rank) for axis in AXES}


def groups_by_gathering() -> list[tuple]:
    found = []
    for shape in PERMUTED:
        grid = Grid(**shape.sizes, order=shape.order, device="cpu")
        me = torch.tensor([dist.get_rank()])
        found.append((grid.coords, {axis: comm.all_gather(me, grid, axis).wait().tolist() for axis in AXES}))
        grid.close()
    return found


@pytest.mark.slow
def test_a_grid_alone_never_communicates_inside_a_larger_job(ranks) -> None:
    # the other ranks do nothing meanwhile: one collective would wait for ever
    assert ranks(4).run(train_on_rank_2_only) == [None, None, (1, {}), None]


def train_on_rank_2_only() -> tuple[int, dict] | None:
    if dist.get_rank() != 2:
        return None
    grid = Grid.alone("cpu")
    model = ff.models.build(ff.models.config("gpt-tiny", layers=1, hidden=24, vocab=16), grid)
    tokens = ff.local_rows(torch.arange(16).view(2, 8), grid)
    model(tokens, tokens).backward()
    ff.clip_grad_norm_(model.parameters(), 1.0)
    return grid.shape.world, dict(grid.ledger.calls)


def test_ranks_that_may_run_on_the_same_cores_share_them() -> None:
    shared, pinned = "a: 0,1,2,3", "b: 6,7"
    assert _fewest_cores([shared]) == "4.0"
    assert _fewest_cores([shared, pinned]) == "2.0"
    assert _fewest_cores([shared, shared, shared, shared, pinned]) == "1.0"


def wholes(model: torch.nn.Module, grid: Grid) -> list[torch.Tensor]:
    specs = specs_of(model)
    return [
        join_shards(local_of(parameter).detach(), specs[name], grid) for name, parameter in model.named_parameters()
    ]


def train_in_parts(parts: list[list[int]], folder: str) -> float | None:
    """Train one step on this rank's part of the job, save, load; return the largest difference from one process."""
    shape = Shape(x=2)
    grid = Grid.over_parts(shape, parts)
    if grid is None:
        return None
    number = next(index for index, ranks in enumerate(parts) if torch.distributed.get_rank() in ranks)
    tokens = torch.arange(32).view(4, 8) + number  # every part has data of its own

    def step(on: Grid) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        model = ff.models.build("gpt-tiny", on, dtype=torch.float64, seed=number)
        optimizer = ff.optim.AdamW(model, lr=0.1)
        loss = model(ff.local_rows(tokens, on), ff.local_rows(tokens, on))
        loss.backward()
        norm = ff.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return model, [loss.detach(), norm, *wholes(model, on)]

    model, found = step(grid)
    folder = f"{folder}/{number}"
    ff.save(folder, model)
    other = ff.models.build("gpt-tiny", grid, dtype=torch.float64, seed=99)
    ff.load(folder, other)
    grid.agree("the part", str(number))  # would fail if it reached beyond the part
    _, expected = step(Grid.alone())
    found += wholes(other, grid)
    expected += expected[2:]
    return max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("parts", others_slow([[[0, 3], [1, 2]], [[0, 1], [2, 3]], [[1, 3]]], 2), ids=str)
def test_a_grid_over_a_part_of_the_job_concerns_its_own_ranks_alone(ranks, tmp_path: Path, parts) -> None:
    members = {rank for part in parts for rank in part}
    for rank, error in enumerate(ranks(4).run(train_in_parts, parts, str(tmp_path))):
        assert (error is not None) == (rank in members)
        assert error is None or error < 1e-10  # law 1


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1], [1, 2]], "at most once"),
        ([[0, 9]], "at most once"),
        ([[1, 0]], "in increasing order"),
        ([[0, 1, 2]], "lists 2 ranks"),
    ],
)
def test_parts_that_do_not_fit_are_refused_on_every_rank(ranks, parts, message: str) -> None:
    with pytest.raises(RankFailed, match=message) as failed:
        ranks(4).run(train_in_parts, parts, "")
    assert len(failed.value.errors) == 4


def made_late(late: int) -> tuple[float, float]:
    """A job: when this rank had its groups, which one rank gets later than the others, and when it had its grid."""
    lanes, done = Grid._lanes, []

    def slow(grid: Grid, *args: Any, **named: Any) -> Any:
        groups = lanes(grid, *args, **named)
        time.sleep(0.5 if dist.get_rank() == late else 0.0)
        done.append(time.time())
        return groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Grid, "_lanes", slow)
        grid = Grid(x=2, z=2)
    found = done[0], time.time()
    grid.close()
    return found


def test_no_rank_has_a_grid_before_all_have_their_groups(ranks) -> None:
    """One that ended right away would close connections that the others are still making."""
    made, returned = zip(*ranks(4).run(made_late, 2), strict=True)
    assert min(returned) >= max(made)
