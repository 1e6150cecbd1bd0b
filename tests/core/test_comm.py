"""Collectives against the obvious local computation, what they write into the ledger, and what they really send."""

from __future__ import annotations

import dataclasses
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fourfold as ff
from fourfold import comm, wire
from fourfold.grid import Grid, Shape
from fourfold.layout import chunk
from fourfold.ledger import Collective, Ledger
from harness import RankFailed, grid_of

PATHS = {"one round": 1 << 40, "ring": 0}
GRIDS = [(Shape(x=4), "x"), (Shape(x=2, z=2), "z"), (Shape(y=3), "y")]


@contextmanager
def path(name: str) -> Iterator[None]:
    with patch.object(wire, "ONE_ROUND_NBYTES", PATHS[name]):
        yield


class Draw:
    """Random tensors of every rank along an axis, known to all of them."""

    def __init__(self, grid: Grid, axis: str, dtype: torch.dtype) -> None:
        self.grid, self.axis, self.dtype = grid, axis, dtype
        self.ranks, self.me = grid.size(axis), grid.coords[axis]
        self.draws = 0

    def __call__(self, *shape: int) -> tuple[list[Tensor], Tensor]:
        """All ranks' tensors, and this rank's own as a buffer to pass on; every second one not contiguous."""
        self.draws += 1
        everyone = []
        for rank in self.grid.shape.ranks_along(self.axis, self.grid.rank):
            generator = torch.Generator().manual_seed(1000 * self.draws + rank)
            everyone.append(torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype))
        mine = everyone[self.me].clone()
        if self.draws % 2 == 0 and mine.dim() == 2:
            mine = mine.t().contiguous().t()
        return everyone, mine


def is_sum(found: Tensor, parts: list[Tensor]) -> bool:
    """Each of g - 1 additions rounds by at most eps of the sum of magnitudes; here and in the expectation."""
    wide = torch.stack(parts).double()
    bound = 2 * (len(parts) - 1) * torch.finfo(parts[0].dtype).eps * wide.abs().sum(0)
    same_kind = found.shape == parts[0].shape and found.dtype == parts[0].dtype
    return same_kind and bool(((found.double() - wide.sum(0)).abs() <= bound).all())


@pytest.mark.parametrize(("shape", "axis"), GRIDS, ids=lambda value: str(value))
def test_collectives_equal_the_local_computation(ranks, shape: Shape, axis: str) -> None:
    for wrong in ranks(shape.world).run(wrong_collectives, shape, axis):
        assert wrong == []


def wrong_collectives(shape: Shape, axis: str) -> list[str]:
    grid = grid_of(shape)
    wrong = []
    for name in PATHS:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            with path(name):
                checks = [*gathers(Draw(grid, axis, dtype)), *sums(Draw(grid, axis, dtype))]
            wrong += [f"{name}, {dtype}: {what}" for what, right in checks if not right]
    return wrong


def gathers(draw: Draw) -> Iterator[tuple[str, bool]]:
    grid, axis = draw.grid, draw.axis
    for dim, shape in [(0, (3, 5)), (0, (3, 5)), (1, (3, 5)), (1, (3, 5)), (-1, (2, 1, 3)), (0, (7,))]:
        everyone, mine = draw(*shape)
        found = comm.all_gather(mine, grid, axis, dim=dim).wait()
        yield f"all_gather {shape} along {dim}", torch.equal(found, torch.cat(everyone, dim))
    for count in (1, 3):
        for given in (False, True):
            everyone, mine = zip(*[draw(*shape) for shape in [(2, 3), (5,), (1, 4)][:count]], strict=True)
            expected = [torch.cat(parts) for parts in everyone]
            into = [torch.full_like(whole, 7) for whole in expected] if given else None
            found = comm.all_gather_together(mine, grid, axis, into=into).wait()
            yield f"all_gather_together {count}", all(map(torch.equal, found, expected))
            if into is not None:
                yield "all_gather_together lands in the buffers", all(a is b for a, b in zip(found, into, strict=True))
    # tensors of other dtypes, of which one has a buffer of a third
    everyone, mine = zip(*[draw(*shape) for shape in [(2, 3), (5,), (1, 4)]], strict=True)
    mine = mine[0], mine[1].to(torch.bfloat16), mine[2]
    expected = [torch.cat(everyone[0]).double(), torch.cat(everyone[1]).to(torch.bfloat16), torch.cat(everyone[2])]
    into = [torch.zeros_like(expected[0]), None, torch.zeros_like(expected[2])]
    found = comm.all_gather_together(mine, grid, axis, into=into).wait()
    yield "all_gather_together of several dtypes", all(map(torch.equal, found, expected))


def sums(draw: Draw) -> Iterator[tuple[str, bool]]:
    grid, axis, g = draw.grid, draw.axis, draw.ranks
    for dim, shape in [(0, (g, 5)), (0, (3 * g, 2)), (1, (3, 2 * g)), (1, (3, 2 * g)), (-1, (2, 3, g)), (0, (g,))]:
        everyone, mine = draw(*shape)
        found = comm.reduce_scatter(mine, grid, axis, dim=dim).wait()
        expected = [whole.chunk(g, dim)[draw.me] for whole in everyone]
        yield f"reduce_scatter {shape} along {dim}", is_sum(found, expected)
        yield f"reduce_scatter {shape} along {dim} left its argument alone", torch.equal(mine, everyone[draw.me])
    for shape in [(), (5,), (4, 3), (4, 3)]:
        everyone, mine = draw(*shape)
        found = comm.all_reduce(mine, grid, axis).wait()
        yield f"all_reduce {shape}", is_sum(found, everyone)
        yield f"all_reduce {shape} left its argument alone", torch.equal(mine, everyone[draw.me])
        owned = mine.contiguous()
        found = comm.all_reduce(owned, grid, axis, owned=True).wait()
        yield f"all_reduce {shape} of an owned buffer", is_sum(found, everyone) and found.data_ptr() == owned.data_ptr()
    for count in (1, 3):
        everyone, mine = zip(*[draw(*shape) for shape in [(2 * g, 3), (g,), (g, 4)][:count]], strict=True)
        found = comm.reduce_scatter_together(mine, grid, axis).wait()
        expected = [[whole.chunk(g)[draw.me] for whole in parts] for parts in everyone]
        yield f"reduce_scatter_together {count}", all(map(is_sum, found, expected))
        comm.all_reduce_together(mine, grid, axis).wait()
        yield f"all_reduce_together {count}", all(map(is_sum, mine, everyone))
    (empty,) = comm.reduce_scatter_together([mine[0].new_zeros(2 * g, 0)], grid, axis).wait()
    yield "reduce_scatter_together of nothing is cut too", empty.shape == (2, 0)


def test_pendings_in_flight_at_once_are_waited_in_launch_order(ranks) -> None:
    for wrong in ranks(4).run(wrong_in_flight):
        assert wrong == []


def wrong_in_flight() -> list[str]:
    wrong = []
    for shape in (Shape(x=4), Shape(x=2, z=2)):
        grid = grid_of(shape)
        flights = []
        for turn, name in enumerate(["ring", "one round", "ring", "ring", "one round"]):
            with path(name):
                for axis in ("x", "z"):
                    draw = Draw(grid, axis, torch.float64)
                    draw.draws = 10 * turn
                    everyone, mine = draw(4, 3)
                    expected = torch.stack(everyone).sum(0)
                    g, me = draw.ranks, draw.me
                    flights += [
                        (comm.reduce_scatter(mine, grid, axis), expected.chunk(g)[me], f"{name} reduce_scatter"),
                        (comm.all_gather(mine, grid, axis), torch.cat(everyone), f"{name} all_gather"),
                        (comm.all_reduce(mine, grid, axis), expected, f"{name} all_reduce"),
                    ]
        for pending, expected, what in flights:
            found = pending.wait()
            if not torch.allclose(found, expected, rtol=1e-12, atol=1e-12) or pending.wait() is not found:
                wrong.append(f"{shape}: {what}")
    return wrong


def test_sums_repeat_bitwise_and_an_all_reduce_is_equal_on_all_ranks(ranks) -> None:
    scattered, reduced = zip(*ranks(4).run(repeated_bits), strict=True)
    assert all(len(bits) == 1 for found in scattered for bits in found.values())
    assert len({tuple(sorted(found.items())) for found in reduced}) == 1


def repeated_bits() -> tuple[dict[str, set[bytes]], dict[str, bytes]]:
    """Sums of fp32 in another order would differ: 4096 sums of 4 terms each."""
    grid = grid_of(Shape(x=4))
    _, mine = Draw(grid, "x", torch.float32)(4096, 4)
    scattered, reduced = {}, {}
    for name in PATHS:
        with path(name):
            scattered[name] = set()
            for late in range(4):
                time.sleep(0.01 if grid.rank == late else 0)
                scattered[name].add(bits_of(comm.reduce_scatter(mine, grid, "x").wait()))
            reduced[name] = bits_of(comm.all_reduce(mine, grid, "x").wait())
    return scattered, reduced


def bits_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


@pytest.mark.parametrize("inference", [False, True])
def test_a_sum_of_whole_numbers_keeps_its_dtype_on_every_path(ranks, inference: bool) -> None:
    for found in ranks(4).run(sum_whole_numbers, inference):
        assert found == {name: [("torch.int32", [[4, 8]]), ("torch.int32", [[4, 8]] * 4)] for name in PATHS}


def sum_whole_numbers(inference: bool) -> dict[str, list]:
    grid = grid_of(Shape(x=4))
    found = {}
    for name in PATHS:
        with path(name), torch.inference_mode(inference):
            numbers = torch.tensor([[1, 2]] * 4, dtype=torch.int32)
            results = [op(numbers, grid, "x").wait() for op in (comm.reduce_scatter, comm.all_reduce)]
        found[name] = [(str(result.dtype), result.tolist()) for result in results]
    return found


RECORDS = [
    Collective("all_gather", "x", 4 * 3 * 2 * 8, 4, "a"),
    Collective("reduce_scatter", "x", 8 * 3 * 4, 4, "b"),
    Collective("all_reduce", "x", 5 * 4, 4, "c"),
    Collective("all_gather", "x", 4 * (2 + 2) * 8, 4, "d"),
    Collective("reduce_scatter", "x", (4 * 2 + 8) * 8, 4, "e"),
    Collective("all_reduce", "x", (3 + 4) * 2, 4, "f"),
]


def test_each_launch_leaves_one_record_on_real_and_on_meta_tensors(ranks) -> None:
    for on_cpu, on_meta, calls, wire_bytes in ranks(4).run(launch_each_op):
        assert on_cpu["records"] == on_meta["records"] == [dataclasses.astuple(record) for record in RECORDS]
        assert on_cpu["results"] == on_meta["results"]
        assert calls == {"x": 12}
        # 3/4 of 192, 96, 128, 128 and twice 3/4 of 20, 14, for both devices
        assert wire_bytes == {"x": 2 * (144 + 72 + 30 + 96 + 96 + 21)}


def launch_each_op() -> tuple[dict, dict, dict, dict]:
    grid = Grid(x=4, device="cpu")
    found = []
    for device in ("cpu", "meta"):
        wide, narrow, half = (
            {"device": device, "dtype": dtype} for dtype in (torch.float64, torch.float32, torch.bfloat16)
        )
        with grid.ledger.watch() as records:
            results = [
                comm.all_gather(torch.ones(3, 2, **wide), grid, "x", dim=1, label="a").wait(),
                comm.reduce_scatter(torch.ones(8, 3, **narrow), grid, "x", label="b").wait(),
                comm.all_reduce(torch.ones(5, **narrow), grid, "x", label="c").wait(),
                *comm.all_gather_together(
                    [torch.ones(1, 2, **wide), torch.ones(2, **wide)], grid, "x", label="d"
                ).wait(),
                *comm.reduce_scatter_together(
                    [torch.ones(4, 2, **wide), torch.ones(8, **wide)], grid, "x", label="e"
                ).wait(),
            ]
            comm.all_reduce_together([torch.ones(3, **half), torch.ones(2, 2, **half)], grid, "x", label="f").wait()
        found.append(
            {
                "records": [dataclasses.astuple(record) for record in records],
                "results": [(tuple(result.shape), str(result.dtype)) for result in results],
            }
        )
    return *found, dict(grid.ledger.calls), dict(grid.ledger.wire_bytes)


def test_axes_of_one_rank_and_empty_buffers_vanish(ranks) -> None:
    for found in ranks(4).run(launch_nothing):
        assert found == ([], True, True)


def launch_nothing() -> tuple[list, bool, bool]:
    grid = grid_of(Shape(x=4))
    with grid.ledger.watch() as records:
        same = returns_its_input(torch.ones(5, 3), grid, "y")
        empty = torch.ones(0, 8)
        shapes = [
            comm.all_gather(empty, grid, "x").wait().shape,
            comm.all_gather(empty, grid, "x", dim=1).wait().shape,
            comm.reduce_scatter(empty, grid, "x").wait().shape,
            comm.reduce_scatter(empty, grid, "x", dim=1).wait().shape,
            comm.all_reduce(empty, grid, "x").wait().shape,
            *(whole.shape for whole in comm.all_gather_together([empty], grid, "x").wait()),
            *(part.shape for part in comm.reduce_scatter_together([empty], grid, "x").wait()),
        ]
    return records, same, shapes == [(0, 8), (0, 32), (0, 8), (0, 2), (0, 8), (0, 8), (0, 8)]


def returns_its_input(tensor: Tensor, grid: Grid, axis: str) -> bool:
    before, buffer = tensor.clone(), torch.empty_like(tensor)
    found = [
        comm.all_gather(tensor, grid, axis).wait(),
        comm.reduce_scatter(tensor, grid, axis).wait(),
        comm.all_reduce(tensor, grid, axis).wait(),
        *comm.all_gather_together([tensor, tensor], grid, axis).wait(),
        *comm.reduce_scatter_together([tensor, tensor], grid, axis).wait(),
    ]
    comm.all_reduce_together([tensor, tensor], grid, axis).wait()
    filled = comm.all_gather_together([tensor], grid, axis, into=[buffer]).wait()
    return (
        all(result is tensor for result in found)
        and torch.equal(tensor, before)
        and filled[0] is buffer
        and torch.equal(buffer, before)
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("length", [1, 5, 6, 9])
def test_uneven_chunks_are_those_of_torch_chunk(ranks, length: int, device: str) -> None:
    """The message is padded to equal chunks, the results are not."""
    for rank, (equal, records) in enumerate(ranks(4).run(uneven_collectives, length, device)):
        assert equal == [True] * 4, rank
        padded = -(-length // 4) * 4
        assert [(record.op, record.nbytes) for record in records] == [
            ("reduce_scatter", 2 * padded * 8),
            ("all_gather", 2 * padded * 8),
            ("reduce_scatter", (2 * padded + 4) * 8),
            ("all_gather", (2 * padded + 4) * 8),
        ]


def uneven_collectives(length: int, device: str) -> tuple[list[bool], list]:
    grid = grid_of(Shape(x=4))
    wide = torch.arange(2.0 * length, dtype=torch.float64).view(2, length).to(device)
    tall, four = wide.T.contiguous(), torch.arange(4.0, dtype=torch.float64).to(device)
    own = slice(*(lambda part: (part.start, part.stop))(chunk(length, 4, grid.coords["x"])))

    def equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
        return found.shape == expected.shape and (found.is_meta or torch.equal(found, expected))

    with grid.ledger.watch() as records:
        part = comm.reduce_scatter(wide, grid, "x", dim=1).wait()
        joined = comm.all_gather(wide[:, own], grid, "x", dim=1, length=length).wait()
        tall_part, _ = comm.reduce_scatter_together([tall, four], grid, "x").wait()
        shards = [tall[own], four[grid.coords["x"] :][:1]]
        wholes = comm.all_gather_together(shards, grid, "x", rows=[length, 4]).wait()
    return [
        equal(part, 4 * wide[:, own]),
        equal(joined, wide),
        equal(tall_part, 4 * tall[own]),
        all(equal(found, expected) for found, expected in zip(wholes, (tall, four), strict=True)),
    ], records


def error_of(attempt) -> str:
    try:
        found = attempt().wait()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"no error, but {found}"


@pytest.mark.parametrize(
    ("op", "ranks_", "nbytes", "wire_bytes"),
    [
        ("all_gather", 4, 1000, 750),
        ("reduce_scatter", 4, 1000, 750),
        ("all_reduce", 4, 1000, 1500),
        ("all_reduce", 2, 1000, 1000),
        ("reduce_scatter", 3, 10, 7),  # 6 2/3: half a byte cannot be sent
        ("all_gather", 1, 1000, 0),
    ],
)
def test_wire_bytes_by_hand(op, ranks_: int, nbytes: int, wire_bytes: int) -> None:
    assert Collective(op, "x", nbytes, ranks_).wire_bytes == wire_bytes


def test_watches_nest_and_end() -> None:
    ledger = Ledger()
    a, b, c = (Collective("all_reduce", "x", nbytes, 2) for nbytes in (1, 2, 3))
    with ledger.watch() as outer, ledger.watch() as twin:
        ledger.append(a)
        with pytest.raises(KeyError), ledger.watch() as inner:
            ledger.append(b)
            raise KeyError
        ledger.append(c)
    ledger.append(a)
    assert (outer, twin, inner) == ([a, b, c], [a, b, c], [b])
    assert ledger.calls == {"x": 4}
    assert ledger.wire_bytes == {"x": 1 + 2 + 3 + 1}


def test_of_two_equal_watches_the_one_that_ends_is_let_go() -> None:
    ledger = Ledger()
    record = Collective("all_reduce", "x", 8, 2)
    with ledger.watch() as outer:
        with ledger.watch() as inner:
            pass
        ledger.append(record)
    assert (outer, inner) == ([record], [])


ITERATIONS = 4


def test_large_collectives_send_what_the_ledger_says_and_no_more(ranks) -> None:
    for sent, wire_bytes, gloos in ranks(4).run(send_large):
        assert wire_bytes == {"reduce_scatter": 6 << 20, "all_gather": 6 << 20, "all_reduce": 12 << 20}
        for op, nbytes in sent.items():
            # a message has a header of some 50 bytes; a barrier and what is still under way are as little
            assert 0.99 < nbytes / (ITERATIONS * wire_bytes[op]) < 1.01, op
        # gloo's own reduce-scatter: what the ring is there to avoid, and what this test could not miss
        assert gloos > 1.3 * sent["reduce_scatter"]


def send_large() -> tuple[dict[str, int], dict[str, int], int]:
    """8 MiB on 4 ranks. The kernel's count of this process's own sockets: others on the machine do not disturb."""
    grid = grid_of(Shape(x=4))
    whole, shard = torch.ones(8 << 18), torch.ones(2 << 18)
    with grid.ledger.watch() as records:
        sent = {
            "reduce_scatter": sent_by(lambda: comm.reduce_scatter(whole, grid, "x").wait()),
            "all_gather": sent_by(lambda: comm.all_gather(shard, grid, "x").wait()),
            "all_reduce": sent_by(lambda: comm.all_reduce(whole, grid, "x").wait()),
        }
    group, part = grid.group("x"), torch.empty_like(shard)
    gloos = sent_by(lambda: wire._reduce_scatter_single(part, whole, group=group))
    return sent, {record.op: record.wire_bytes for record in records}, gloos


def sent_by(launch) -> int:
    dist.barrier()
    before = bytes_sent()
    for _ in range(ITERATIONS):
        launch()
    dist.barrier()
    return bytes_sent() - before


def bytes_sent() -> int:
    """Sum of `tcpi_bytes_sent` (linux/tcp.h, since Linux 4.19) over this process's TCP connections."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(fd))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # no socket, or none of TCP
            continue
        total += struct.unpack_from("Q", info, 200)[0]
    return total


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("launched", [True, False], ids=["in flight", "before launch"])
def test_a_collective_that_fails_names_its_record(ranks, name: str, launched: bool) -> None:
    with pytest.raises(RankFailed) as failure:
        ranks(3).run(lose_rank_2, name, launched, timeout=40)
    errors = failure.value.errors
    assert sorted(errors) == [0, 1, 2]
    assert str(errors.pop(2)) == "the process died"
    for error in errors.values():
        assert isinstance(error, RuntimeError)
        assert str(error).startswith("collective failed: reduce_scatter[y] layers.7.mlp.down: ")


def lose_rank_2(name: str, launched: bool) -> None:
    # 3 ranks: both of those left talk to the lost one, whichever way the message goes
    grid = grid_of(Shape(y=3))
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if grid.rank == 2:
        if launched:
            store.wait(["launched/0", "launched/1"])
        os._exit(1)
    if not launched:
        time.sleep(0.3)  # until the kernel has told the others
    with path(name):
        pending = comm.reduce_scatter(torch.ones(3, 1 << 18), grid, "y", label="layers.7.mlp.down")
        store.set(f"launched/{grid.rank}", "")
        pending.wait()


def frames_to_the_network() -> int:
    """The most frames of the package between a layer's method and a call of torch.distributed, both included."""
    package = str(Path(wire.__file__).parent)
    model = ff.models.build("gpt-tiny", grid_of(Shape(x=2, z=2)))
    sends, found = dist.all_to_all_single, []

    def counting(*args: Any, **options: Any) -> Any:
        frame, count, layer = sys._getframe(1), 0, False
        while frame is not None and not layer:
            count += frame.f_code.co_filename.startswith(package)
            layer = isinstance(frame.f_locals.get("self"), nn.Module)
            frame = frame.f_back
        if layer:
            found.append(count)
        return sends(*args, **options)

    tokens = torch.arange(8).view(1, 8)
    with patch.object(dist, "all_to_all_single", counting):
        model(tokens, tokens).backward()
    return max(found)


def test_few_frames_lie_between_a_layer_and_the_network(ranks) -> None:
    """Whoever steps through a layer in a debugger must not lose the thread: FSDP2 has four."""
    assert max(ranks(4).run(frames_to_the_network)) <= 8
