"""The picture of a traced step: its lanes, its seconds and its title, from traces of the CPU and of a GPU."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speed import timeline
from benchmarks.speed.timeline import GATHERS, REDUCTIONS, draw, main, merged, read_step, shown, without

SVG = "{http://www.w3.org/2000/svg}"


def event(kind: str, name: str, begin: float, end: float, **args: Any) -> dict[str, Any]:
    """Milliseconds."""
    return {"ph": "X", "cat": kind, "name": name, "ts": 1e3 * begin, "dur": 1e3 * (end - begin), "args": args}


def span(name: str, begin: float, end: float) -> dict[str, Any]:
    return event("user_annotation", name if name.startswith("step ") else f"fourfold::{name}", begin, end)


def of_the_cpu() -> dict[str, Any]:
    """Two steps; a gather of the second one was launched in the first, a reduction is waited for after it."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            span("step 2", 0, 100),
            span("all_gather[data] parameters", 90, 91),
            span("step 3", 100, 1100),
            span("wait all_gather[data] parameters", 100, 150),
            span("all_gather[z] layers.0.mlp.up", 150, 160),
            span("all_gather[z] layers.0.mlp.up", 160, 170),
            event("cpu_op", "aten::linear", 170, 180),
            span("wait all_gather[z] layers.0.mlp.up", 200, 300),
            span("product E1 layers.0.mlp.up", 300, 500),
            span("wait all_gather[z] layers.0.mlp.up", 500, 510),
            span("product E2 layers.0.mlp.up", 510, 600),
            span("reduce_scatter[x] layers.0.mlp.up", 600, 601),
            span("product E3 layers.0.mlp.up", 610, 810),
            span("wait reduce_scatter[x] layers.0.mlp.up", 810, 850),
            span("reduce_scatter[z] layers.0.mlp.up", 900, 901),
        ]
    }


def test_a_step_of_the_cpu() -> None:
    step = read_step(of_the_cpu(), 3)
    assert step.seconds == pytest.approx(1.0)
    assert step.axes == ["x", "z", "data"]
    assert step.flights["z", GATHERS] == [(150e3, 510e3)]  # two that overlap
    assert step.flights["z", REDUCTIONS] == [(900e3, 1100e3)]  # to the step's end, where nobody has waited for it
    assert step.flights["data", GATHERS] == [(100e3, 150e3)]  # since the step before
    assert step.forward == [(300e3, 500e3)]
    assert step.backward == [(510e3, 600e3), (610e3, 810e3)]
    assert {axis: round(step.exposed_seconds(axis), 6) for axis in step.axes} == {"x": 0.04, "z": 0.11, "data": 0.05}
    assert step.in_flight_seconds("z") == pytest.approx(0.56)
    everything = [*step.forward, *step.backward, *step.other, *(one for waits in step.waits.values() for one in waits)]
    assert merged(everything) == [(100e3, 1100e3)]  # the host does one thing or another


def kernel(name: str, at: float, begin: float, end: float, number: int, stream: int) -> list[dict[str, Any]]:
    """Launched by the host at some moment, run by the device later."""
    return [
        event("cuda_runtime", "cudaLaunchKernel", at, at + 0.1, correlation=number),
        event("kernel", name, begin, end, correlation=number, stream=stream),
    ]


def of_a_gpu() -> dict[str, Any]:
    """The host is done after 20 ms, the device after 130."""
    return {
        "traceEvents": [
            span("step 7", 0, 20),
            span("all_gather[z] layers.0.mlp.up", 1, 2),
            event("user_annotation", "nccl:coalesced", 1.1, 1.9),
            *kernel("ncclDevKernel_AllGather_RING_LL", 1.5, 5, 45, 1, 20),
            *kernel("rms_norm", 2.5, 10, 30, 2, 7),
            span("wait all_gather[z] layers.0.mlp.up", 3, 3.2),
            span("product E1 layers.0.mlp.up", 4, 5),
            *kernel("sm90_gemm", 4.5, 45, 65, 3, 7),
            span("reduce_scatter[x] layers.0.mlp.up", 6, 7),
            *kernel("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", 6.5, 65, 85, 4, 24),
            span("product E3 layers.0.mlp.up", 8, 9),
            *kernel("sm90_gemm", 8.5, 65, 100, 5, 7),
            span("wait reduce_scatter[x] layers.0.mlp.up", 10, 10.2),  # has arrived before the stream comes there
            *kernel("adamw", 11, 100, 130, 6, 7),
            *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 12, 100, 110, 8, 24),  # nobody's
            span("step 8", 20, 40),
            *kernel("adamw", 25, 140, 150, 9, 7),
        ]
    }


def test_a_step_of_a_gpu() -> None:
    step = read_step(of_a_gpu(), 7)
    assert (step.begin, step.end) == (5e3, 130e3)  # the device's time
    assert step.axes == ["x", "z"]
    assert step.flights["z", GATHERS] == [(5e3, 45e3)]
    assert step.flights["x", REDUCTIONS] == [(65e3, 85e3)]
    assert step.forward == [(45e3, 65e3)]
    assert step.backward == [(65e3, 100e3)]
    assert step.other == [(10e3, 30e3), (100e3, 130e3)]
    assert dict(step.waits) == {"z": [(30e3, 45e3)]}
    assert step.exposed_seconds("x") == 0


def test_the_picture_has_lanes_totals_and_a_title() -> None:
    picture = draw(read_step(of_the_cpu(), 3), "overlap <off>")
    root = ET.fromstring(picture)
    assert root.findtext(f"{SVG}title") == "overlap <off>"
    lanes = [lane.findtext(f"{SVG}title") for lane in root.iter(f"{SVG}g")]
    assert lanes == [
        "computing: products 490 ms, other 310 ms",
        "axis x: in flight 250 ms, exposed 40 ms",
        "axis z: in flight 560 ms, exposed 110 ms",
        "axis data: in flight 50 ms, exposed 50 ms",
    ]
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words[0] == "overlap <off>"
    assert words[-1] == "1 s"
    assert min(int(text.get("font-size", 0)) for text in root.iter(f"{SVG}text")) >= 12
    assert "#ffffff" in picture.splitlines()[0]  # readable on dark pages too


def test_pictures_can_share_a_scale() -> None:
    """A bar of a step that is drawn on an axis of twice its seconds is half as long."""

    def widths(picture: str) -> list[float]:
        red = timeline.COLOURS["exposed"]
        paths = [path.get("d", "") for path in ET.fromstring(picture).iter(f"{SVG}path") if path.get("fill") == red]
        return [float(width) for path in paths for width in re.findall(r"h([\d.]+)v", path)]

    step = read_step(of_the_cpu(), 3)
    whole, half = widths(draw(step, "")), widths(draw(step, "", seconds=2.0))
    assert len(whole) == 4
    assert half == pytest.approx([width / 2 for width in whole], abs=0.1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "rank-1.json").write_text(json.dumps(of_the_cpu()))
    (tmp_path / "run.json").write_text(json.dumps({"grid": {"x": 2, "y": 1, "z": 2, "data": 2}}))
    out = tmp_path / "drawn" / "step.svg"
    assert main(["--run", str(tmp_path), "--rank", "1", "--step", "3", "--out", str(out), "--title", "on"]) == 0
    assert "<title>on: x=2 z=2 data=2, rank 1, step 3: 1.00 s</title>" in out.read_text()
    assert "axis z: in flight 560 ms, exposed 110 ms" in capsys.readouterr().out

    assert main(["--run", str(tmp_path), "--rank", "1", "--step", "4", "--out", str(out)]) == 2
    assert "the trace has no step 4; it has step 2, step 3" in capsys.readouterr().err
    assert main(["--run", str(tmp_path), "--rank", "0", "--step", "3", "--out", str(out)]) == 2
    assert "rank-0.json" in capsys.readouterr().err


def test_arithmetic_of_intervals() -> None:
    assert merged([(4, 5), (0, 2), (1, 3)]) == [(0, 3), (4, 5)]
    assert merged([(4, 5), (0, 3)], apart=1) == [(0, 5)]
    assert without((0, 10), [(2, 3), (8, 12), (2, 4)]) == [(0, 2), (4, 8)]
    assert without((0, 10), []) == [(0, 10)]
    assert [shown(seconds) for seconds in (1.234, 0.82, 0.0042, 0)] == ["1.23 s", "820 ms", "4.2 ms", "0 ms"]
