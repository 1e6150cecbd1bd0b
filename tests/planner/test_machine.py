"""Machines are data with sources, and prices follow from them by hand-worked rules."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.planner.machine import (
    ASSUMED,
    CARD,
    OF_THE_HOST,
    HostSpeed,
    LinkSpeed,
    Machine,
    Seconds,
    Timed,
    count_spread,
    inside_link,
    load_machine,
    machine_names,
    parse_machine,
    spread_of,
    to_toml,
)

GB = 1e9


def small(**changes: object) -> Machine:
    """Two devices a node, round numbers."""
    machine = Machine(
        name="small",
        about="two devices a node",
        device="cpu",
        devices_per_node=2,
        memory=1 << 30,
        reserve=1 << 20,
        peak={"fp32": 4e12},
        gemm={"fp32": 2e12},
        gemm_half=100.0,
        attention=0.5,
        memory_bandwidth=1e11,
        overhead=1e-6,
        launch=5e-6,
        contention=1.25,
        turn=1e-4,
        inside={(1, 2): LinkSpeed(64e9, 1e-6)},
        between=LinkSpeed(16e9, 8e-6),
    )
    return replace(machine, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", machine_names())
def test_a_packaged_machine_loads_and_survives_being_written(name: str, tmp_path: Path) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert all(source.strip() for source in machine.sources.values())
    file = tmp_path / "copy.toml"
    file.write_text(to_toml(machine))
    assert load_machine(str(file)) == machine
    assert len({machine, load_machine(str(file))}) == 1


def test_what_calibrate_adds_survives_being_written() -> None:
    perlmutter = load_machine("perlmutter")
    measured = (Timed(8, 16, 32, "bf16", 1 / 3), Timed(1, 2, 3, "fp32", 1e-7))
    odd = replace(
        perlmutter,
        about='quotes " and \\ and \x7f and ü',
        measured=measured,
        between=None,
        launch=0.1 + 0.2,
        sources={**perlmutter.sources, "measured": "today"},
    )
    again = parse_machine(to_toml(odd), "odd.toml")
    kept = {key: source for key, source in odd.sources.items() if not key.startswith("between")}
    assert again == replace(odd, sources=kept)


def test_the_host_survives_being_written_and_may_be_left_out() -> None:
    host = {"eager": HostSpeed(1.2e-5, 1 / 3000), "captured": HostSpeed(1e-6, 0.0)}
    sources = {f"host.{mode}.{name}": "today" for mode in host for name in ("item", "step")}
    perlmutter = load_machine("perlmutter")
    machine = replace(perlmutter, host=host, sources={**perlmutter.sources, **sources})
    text = to_toml(machine)
    assert parse_machine(text, "host.toml") == machine
    assert perlmutter.host == {}
    assert "unknown key host.captive (did you mean 'captured'?)" in refusal(
        text.replace("[host.captured]", "[host.captive]")
    )
    for index, path in constants(text):
        if path.startswith("host."):
            key = path.rpartition(".")[2]
            assert f"{path} = -1; it must be seconds of the host" in refusal(
                changed(text, index, f'{key} = {{ value = -1, source = "s" }}')
            )
            assert f"{path} is missing (seconds of the host" in refusal(changed(text, index, ""))


def test_what_is_assumed_about_the_host_is_said() -> None:
    host = {"eager": HostSpeed(1.2e-5, 3e-4)}
    gpu, cpu = load_machine("perlmutter"), small()
    assert replace(gpu, host=host).describe_host("eager") == "eager: 12.0 us per item and 0.30 ms per step"
    assert gpu.describe_host("captured") == "captured: not measured, assumed to be never late"
    assert cpu.describe_host("compiled") == "compiled: not measured, 1.0 us per item assumed"


def constants(text: str) -> Iterator[tuple[int, str]]:
    """Line and full key of every constant in a machine file."""
    section, stride, size = "", "", ""
    for index, line in enumerate(text.splitlines()):
        if found := re.fullmatch(r"\[+([\w.]+)\]+", line):
            section = f"{found[1]}."
        elif found := re.match(r"(\w+) = (.*)", line):
            key, value = found[1], found[2]
            stride, size = (value if key == "stride" else stride), (value if key == "size" else size)
            if value.startswith("{"):
                yield index, (f"inside[{stride},{size}].{key}" if section == "inside." else section + key)


def changed(text: str, index: int, line: str) -> str:
    lines = text.splitlines()
    lines[index] = line
    return "\n".join(lines)


def refusal(text: str) -> str:
    with pytest.raises(ValueError) as caught:
        parse_machine(text, "some.toml")
    assert str(caught.value).startswith("some.toml: ")
    return str(caught.value)


def test_every_constant_is_needed_possible_and_has_a_source() -> None:
    text = to_toml(load_machine("perlmutter"))
    found = list(constants(text))
    assert len(found) == 15 + 2 * 2 + 3 + 2 * 3
    for index, path in found:
        key = re.split(r"\.", path)[-1]
        for value in ("-1", "nan", "inf", '"many"', "true"):
            message = refusal(changed(text, index, f'{key} = {{ value = {value}, source = "s" }}'))
            assert f"{path} = " in message and "it must be" in message and "number" in message
        for line in (f"{key} = {{ value = 1 }}", f'{key} = {{ value = 1, source = " " }}'):
            assert f"{path}.source is missing or empty" in refusal(changed(text, index, line))
        assert f"{path} = 1; it must be written as" in refusal(changed(text, index, f"{key} = 1"))
        assert f"{path}.value is missing" in refusal(changed(text, index, f'{key} = {{ source = "s" }}'))
        extra = refusal(changed(text, index, f'{key} = {{ value = 1, source = "s", sauce = "" }}'))
        assert f"unknown key {path}.sauce (did you mean 'source'?)" in extra
        if key in ASSUMED:
            without = parse_machine(changed(text, index, ""), "some.toml")
            assert getattr(without, key) == ASSUMED[key][0]
            assert key in without.uncertain
        elif key in OF_THE_HOST:
            assert getattr(parse_machine(changed(text, index, ""), "some.toml"), key) is None
        elif path == "between.ring_bandwidth":
            between = parse_machine(changed(text, index, ""), "some.toml").between
            assert between is not None and between.per_ring(1) == between.bandwidth
        elif section_of(path) not in ("peak", "gemm"):
            missing = refusal(changed(text, index, ""))
            assert re.search(r"(?:^|[ .\]])" + key + " is missing", missing), missing


def section_of(path: str) -> str:
    return path.split(".")[0] if "." in path else ""


ZERO = ("reserve", "gemm_half", "overhead", "launch", "turn", "latency", "sharing", "congestion")


def test_zero_is_refused_where_it_is_impossible() -> None:
    text = to_toml(load_machine("perlmutter"))
    for index, path in constants(text):
        key = path.split(".")[-1]
        zero = changed(text, index, f'{key} = {{ value = 0, source = "s" }}')
        if key in ZERO:
            parse_machine(zero, "some.toml")
        else:
            assert f"{path} = 0; it must be" in refusal(zero)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "perlmutter"', "", "name is missing"),
        ('name = "perlmutter"', 'name = ""', "name = ''; it must be a text that is not empty"),
        ("gemm_half", "gem_half", "unknown key gem_half (did you mean 'gemm_half'?)"),
        ("bf16 =", "bf61 =", "unknown key peak.bf61 (did you mean 'bf16'?)"),
        ("[gemm]\nbf16", "[gemm]\nfp16", "gemm has fp16, fp32; it must be given for the dtypes of peak: bf16, fp32"),
        ("value = 2.57e+14", "value = 3.2e+14", "gemm.bf16 = 3.2e+14; it must be at most peak.bf16 = 3.12e+14"),
        ("value = 2500000000", "value = 50e9", "reserve = 50000000000; it must be less than memory"),
        ("stride = 2\n", "stride = 3\n", "inside[2] has stride 3, size 2; it must be a group inside a node of 4"),
        ("stride = 2\n", "stride = 1\n", "inside[2] has stride 1, size 2; it must be a group inside a node of 4"),
        ("size = 4\n", "size = 1\n", "inside[1].size = 1; it must be a whole number from 2 up"),
        (
            "ring_bandwidth = { value = 8e+10",
            "ring_bandwidth = { value = 8e+11",
            "between.ring_bandwidth = 8e+11; it must be at most between.bandwidth = 1e+11",
        ),
        ("[[inside]]\n", '[[inside]]\nring_bandwidth = { value = 1, source = "s" }\n', "unknown key inside[0].ring_"),
        ("[[inside]]", "[inside]", "no TOML"),
        ("value = 4,", "value = 4.5,", "devices_per_node = 4.5; it must be the devices of a node, a whole number"),
    ],
)
def test_a_file_that_is_wrong_says_where_and_what_is_right(old: str, new: str, said: str) -> None:
    text = to_toml(load_machine("perlmutter"))
    assert old in text
    assert said in refusal(text.replace(old, new, 1))


@pytest.mark.parametrize(
    "row", ["[1, 2, 3]", '[0, 2, 3, "bf16", 1.0]', '[1, 2, 3, "int8", 1.0]', '[1, 2, 3, "bf16", 0]']
)
def test_a_measured_product_is_checked(row: str) -> None:
    text = to_toml(load_machine("perlmutter"))
    assert "measured.products[0]" in refusal(f'{text}\n[measured]\nsource = "today"\nproducts = [{row}]')
    assert "measured.source" in refusal(f"{text}\n[measured]\nproducts = []")


def test_a_node_of_several_devices_needs_an_inside() -> None:
    text = to_toml(load_machine("perlmutter"))
    assert "inside = []; it must be one [[inside]] or more" in refusal(text[: text.index("\n[[inside]]")])


def test_an_unknown_machine_names_the_nearest_and_all() -> None:
    with pytest.raises(
        ValueError, match=r"no machine 'perlmuter' \(did you mean 'perlmutter'\?\); there are dgx-a100, dgx-h100, "
    ):
        load_machine("perlmuter")
    with pytest.raises(FileNotFoundError, match=r"no machine file none.toml; `fourfold calibrate --out none.toml`"):
        load_machine("none.toml")


PUBLISHED = {
    "perlmutter": {(1, 2): 76, (1, 4): 225, (2, 2): 76},
    "frontier": {(1, 2): 129, (1, 4): 52, (1, 8): 135, (2, 2): 50, (2, 4): 72, (4, 2): 36},
}
BETWEEN = {"perlmutter": (4, 100, 80), "frontier": (8, 100, 40)}
"""Devices of a node, GB/s of its network cards, and GB/s of a single ring."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_bandwidths_of_axes_are_the_published_ones(name: str) -> None:
    """Inside a node the table, across nodes that of the cards / min(devices per node, P), at most that of one ring."""
    machine, (devices, cards, ring) = replace(load_machine(name), congestion=0.0), BETWEEN[name]
    for stride in (1, 2, 4, 8, 16):
        for size in (2, 4, 8, 16):
            route = Seconds(machine, Shape(x=stride, z=size, data=4)).link("z")
            if stride * size <= devices:
                assert (route.bandwidth, route.crosses) == (PUBLISHED[name][stride, size] * GB, False)
            else:
                rings = min(devices, stride)
                assert (route.bandwidth, route.crosses) == (min(ring, cards / rings) * GB, True)
                assert route.load == pytest.approx(min(1.0, rings * ring / cards), rel=1e-12)


def test_the_order_of_axes_decides_their_strides() -> None:
    machine = load_machine("perlmutter")
    assert Seconds(machine, Shape(x=8, z=4)).link("z").bandwidth == 25 * GB
    turned = Seconds(machine, Shape(x=8, z=4, order=("z", "x", "y", "data")))
    assert turned.link("z").bandwidth == 225 * GB
    assert turned.link("x").bandwidth == 25 * GB
    assert turned.link("y").bandwidth == math.inf


def hops_between_nodes(stride: int, size: int, world: int, per_node: int) -> tuple[int, int, int]:
    """Nodes of the most spread group, most members on a node, most hops that leave one node, by walking every ring."""
    leaving, nodes, members = [0] * (world // per_node + 1), 0, 0
    for base in range(world):
        if base // stride % size == 0:
            places = [(base + index * stride) // per_node for index in range(size)]
            nodes, members = max(nodes, len(set(places))), max(members, *(places.count(place) for place in places))
            for here, there in zip(places, places[1:] + places[:1], strict=True):
                leaving[here] += here != there
    return nodes, members, max(leaving)


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 8])
def test_rings_across_nodes_are_counted_for_any_sizes(per_node: int) -> None:
    for stride in (1, 2, 3, 4, 5, 6, 8, 12):
        for size in (2, 3, 4, 5, 8):
            for blocks in (1, 2, 3, 7):
                sizes = (stride, size, stride * size * blocks, per_node)
                found = spread_of(*sizes)
                assert (found.nodes, found.members, found.rings) == hops_between_nodes(*sizes), sizes
                assert found == count_spread(*sizes), sizes


def test_a_group_that_was_not_measured_takes_the_nearest() -> None:
    machine = load_machine("frontier")
    assert inside_link(machine, 1, 3).bandwidth == 52 * GB  # 4 is nearer than 2 in log space
    assert inside_link(machine, 2, 3).bandwidth == 72 * GB  # the same stride comes first
    assert inside_link(machine, 3, 2).bandwidth == 36 * GB


def test_rings_take_the_closed_form() -> None:
    """Two nodes of two: four ranks have two hops of 1 us and two of 8 us, of which a pass leaves a cheap one out."""
    nbytes = 1 << 24
    seconds = Seconds(small(), Shape(x=2, z=2))
    inside = 5e-6 + 1e-6 + nbytes / 2 / 64e9
    assert seconds.collective(Collective("all_gather", "x", nbytes, 2)) == inside
    assert seconds.collective(Collective("reduce_scatter", "x", nbytes, 2)) == inside
    assert seconds.collective(Collective("all_reduce", "x", nbytes, 2)) == 5e-6 + 2e-6 + nbytes / 64e9
    assert seconds.collective(Collective("all_gather", "z", nbytes, 2)) == 5e-6 + 8e-6 + nbytes / 2 / 8e9
    line = Seconds(small(), Shape(z=4))
    gather = 5e-6 + (8e-6 + 8e-6 + 1e-6) + 3 * nbytes / 4 / 16e9
    assert line.collective(Collective("all_gather", "z", nbytes, 4)) == pytest.approx(gather, rel=1e-15)
    assert line.collective(Collective("all_reduce", "z", nbytes, 4)) == pytest.approx(2 * gather - 5e-6, rel=1e-15)


def test_a_single_ring_between_nodes_does_not_use_all_cards() -> None:
    """And a file that does not say so is priced as if it did."""
    limited = small(between=LinkSpeed(16e9, 8e-6, ring_bandwidth=6e9))
    for shape, axis, bandwidth, load in (
        (Shape(z=4), "z", 6e9, 6 / 16),  # one ring over all ranks
        (Shape(x=2, z=2), "z", 6e9, 12 / 16),  # two rings with one rank of each node
        (Shape(x=2, z=2, data=2), "data", 6e9, 12 / 16),
    ):
        assert Seconds(limited, shape).link(axis).bandwidth == bandwidth
        assert Seconds(limited, shape).link(axis).load == load
        assert Seconds(small(), shape).link(axis).load == 1.0
    wide = small(between=LinkSpeed(16e9, 8e-6, ring_bandwidth=10e9))
    assert Seconds(wide, Shape(x=2, z=2)).link("z").bandwidth == 8e9  # the cards limit two rings
    assert Seconds(wide, Shape(x=2, z=2)).link("z").load == 1.0


def test_a_small_sum_over_many_takes_a_tree() -> None:
    seconds = Seconds(small(), Shape(data=64))
    tree = 5e-6 + 2 * (1e-6 + 5 * 8e-6) + 2 * 64 / 16e9  # one hop inside a node, five levels of 32 nodes
    assert seconds.collective(Collective("all_reduce", "data", 64, 64)) == pytest.approx(tree, rel=1e-12)
    ring = 5e-6 + 2 * (32 * 8e-6 + 31 * 1e-6) + 2 * 63 / 64 * (1 << 30) / 16e9
    assert seconds.collective(Collective("all_reduce", "data", 1 << 30, 64)) == pytest.approx(ring, rel=1e-12)


def test_a_ring_is_never_faster_than_its_links_inside_the_nodes() -> None:
    seconds = Seconds(small(inside={(1, 2): LinkSpeed(4e9, 1e-6)}), Shape(z=4))
    assert seconds.link("z").bandwidth == 4e9


def test_transfers_across_nodes_share_the_card() -> None:
    seconds = Seconds(small(), Shape(x=2, z=2, data=2))
    for axis, resource in (("x", "x"), ("z", CARD), ("data", CARD)):
        record = Collective("all_gather", axis, 1 << 20, 2)
        transfer = seconds.transfer(record)
        assert transfer.link == resource
        assert transfer.seconds == seconds.collective(record)
        assert transfer.moving == record.wire_bytes / seconds.link(axis).bandwidth
        on_its_way = transfer.fixed + transfer.moving
        assert transfer.beside * on_its_way == pytest.approx(on_its_way + 1e-4)


def test_products_of_experts_run_at_the_speed_of_their_size() -> None:
    """Equally many rows each; with an imbalance one has more, and only the speed of small products changes."""
    gpu, cpu = (Seconds(small(device=device, gemm_half=100.0), Shape()) for device in ("gpu", "cpu"))
    one, whole = gpu.product(1000, 4000, 4000, "fp32"), gpu.product(8000, 4000, 4000, "fp32")
    assert gpu.products(8000, 4000, 4000, "fp32", parts=8) == pytest.approx(8 * one)
    assert 8 * one > whole == gpu.products(8000, 4000, 4000, "fp32")
    assert gpu.products(4000, 8000, 4000, "fp32", parts=8, is_wgrad=True) == pytest.approx(
        8 * gpu.product(4000, 1000, 4000, "fp32")
    )
    assert gpu.products(8, 4, 4, "fp32", parts=8) == 1e-6  # one kernel ...
    assert cpu.products(8, 4, 4, "fp32", parts=8) > 8 * 1e-6  # ... which the CPU has not
    uneven = Seconds(small(device="gpu", gemm_half=100.0), Shape(), imbalance=4.5)
    found = uneven.products(8000, 4000, 4000, "fp32", parts=8)
    assert found == pytest.approx(gpu.product(4500, 4000, 4000, "fp32") + 7 * gpu.product(500, 4000, 4000, "fp32"))


def test_products_and_kernels_take_what_bounds_them() -> None:
    seconds = Seconds(small(device="gpu"), Shape())
    assert seconds.product(1000, 1000, 1000, "fp32") == pytest.approx(2e9 / (2e12 * 1000 / 1100))
    assert seconds.product(100, 4000, 4000, "fp32") == pytest.approx(2 * 100 * 16e6 / 1e12)  # half of the rate
    skinny = small(device="gpu", gemm_half=0.0)
    assert Seconds(skinny, Shape()).product(1, 4000, 4000, "fp32") == pytest.approx(4 * (16e6 + 8e3) / 1e11)
    assert seconds.product(1, 1, 1, "fp32") == seconds.kernel(1) == seconds.attention(1, 1, "fp32") == 1e-6
    assert seconds.product(0, 64, 64, "fp32") == 1e-6
    assert seconds.kernel(1e9) == 1e-2
    assert seconds.attention(1e12, 1, "fp32") == 1.0
    assert seconds.attention(1, 1e9, "fp32") == 1e-2


def test_on_the_cpu_the_host_comes_on_top() -> None:
    gpu, cpu = (Seconds(small(device=device), Shape()) for device in ("gpu", "cpu"))
    assert cpu.kernel(1e9) == pytest.approx(gpu.kernel(1e9) + 1e-6, rel=1e-12)
    assert cpu.attention(1e12, 1, "fp32") == pytest.approx(gpu.attention(1e12, 1, "fp32") + 1e-6, rel=1e-12)
    assert cpu.product(999, 999, 999, "fp32") == pytest.approx(gpu.product(999, 999, 999, "fp32") + 1e-6, rel=1e-12)


def test_measured_products_win_near_them_and_nowhere_else() -> None:
    plain = Seconds(small(device="gpu"), Shape())
    twice = Timed(512, 512, 512, "fp32", 2 * plain.product(512, 512, 512, "fp32"))
    known = Seconds(small(device="gpu", measured=(twice,)), Shape())
    assert known.product(512, 512, 512, "fp32") == pytest.approx(twice.seconds, rel=1e-12)
    ratios = [
        known.product(512, 512, 512 << far, "fp32") / plain.product(512, 512, 512 << far, "fp32") for far in range(9)
    ]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[2] == pytest.approx(math.sqrt(2))  # a factor of 4 away both weigh the same
    assert ratios[-1] < 1.05


def test_what_a_machine_cannot_do_is_said() -> None:
    node = load_machine("h200-node")
    with pytest.raises(ValueError, match=r"z=16 has 16 ranks, but h200-node is one node of 8 devices; add \[between\]"):
        Seconds(node, Shape(z=16))
    with pytest.raises(
        ValueError, match=r"h200-node has no FLOP/s for fp64, it has them for bf16, fp32; add peak.fp64"
    ):
        Seconds(node, Shape()).product(8, 8, 8, "fp64")
    with pytest.raises(ValueError, match="is of 4 ranks and not of the grid z=8"):
        Seconds(node, Shape(z=8)).collective(Collective("all_gather", "z", 8, 4))
