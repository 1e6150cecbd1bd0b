"""Hardware as data: what a machine's devices and links do, each figure with where it comes from.

A machine is a TOML file, packaged in `machines/` or written by `fourfold calibrate`. Every constant is a table
`{ value = 312e12, source = "NVIDIA A100 data sheet, dense bf16" }`; what is missing, unknown, impossible or without
a source is refused with its key and the file.

Invariant: `parse_machine(to_toml(machine)) == machine`.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from fourfold.spelling import nearest

DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
"""How a machine file names what products are computed in."""
PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bf16 FLOP/s by torch's name of the device, from the vendor's data sheets."""

ITEMSIZE = {name: dtype.itemsize for dtype, name in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """One ring: what it carries while all groups of its kind are active."""

    bandwidth: float
    """Bytes a second that each rank sends."""
    latency: float
    """Seconds a hop."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A product [m, k] x [k, n] that was measured."""

    m: int
    k: int
    n: int
    dtype: str
    seconds: float


@dataclass(frozen=True)
class Machine:
    """Nodes of equal devices, and what joins them."""

    name: str
    about: str
    device: str
    """torch's name of it, such as "NVIDIA A100-SXM4-40GB"; "cpu"."""
    devices_per_node: int
    memory: int
    """Bytes of a device."""
    reserve: int
    """Bytes of it that tensors cannot have: the context, buffers of communicators, fragmentation."""
    peak: Mapping[str, float]
    """Advertised FLOP/s by dtype."""
    gemm: Mapping[str, float]
    """FLOP/s that a large product reaches, by dtype."""
    gemm_half: float
    """The smallest dim of a product with which it reaches half of that: rate = gemm * d / (d + gemm_half)."""
    attention: float
    """Fraction of `gemm` that the attention kernel reaches."""
    memory_bandwidth: float
    """Bytes a second, read and written, that elementwise kernels reach."""
    overhead: float
    """Seconds of the host for a piece of work: on a GPU, where it works ahead, a kernel takes at least that long; on
    the CPU they come on top."""
    launch: float
    """Seconds that a collective takes before the first byte moves."""
    contention: float
    """By which factor products slow down while a collective is in flight; 1: not at all."""
    turn: float
    """Seconds that a collective waits for its turn if the device computes all the time; 0 where nothing that moves
    bytes needs what computes, as network cards do not."""
    inside: Mapping[tuple[int, int], LinkSpeed]
    """Inside a node by (stride, size) of the group: ranks base, base + stride, ..."""
    between: LinkSpeed | None
    """Across nodes: the bandwidth is all that the network cards of a node carry; None where there is one node only."""
    measured: tuple[Timed, ...] = ()
    """Products whose seconds are known; shapes near them follow these rather than `gemm` and `gemm_half`."""
    sources: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """Where each constant comes from, by its key, such as "gemm.bf16" or "inside[1,2].latency"."""

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.memory))  # prices are cached by machine: it must be quick


def machine_names() -> list[str]:
    """The machines that come with the package."""
    found = resources.files("fourfold").joinpath("machines").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in found if file.name.endswith(".toml"))


def load_machine(name_or_path: str) -> Machine:
    """The packaged machine of that name, or the one in that .toml file."""
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise FileNotFoundError(
                f"no machine file {path}; `fourfold calibrate --out {path}` measures this machine and writes one, "
                f"and these come with Fourfold: {', '.join(machine_names())}"
            )
        return parse_machine(path.read_text(encoding="utf-8"), str(path))
    names = machine_names()
    if name_or_path not in names:
        raise ValueError(
            f"no machine {name_or_path!r}{nearest(name_or_path, names)}; there are {', '.join(names)}, or give the "
            "path of a .toml file, as `fourfold calibrate` writes it"
        )
    file = resources.files("fourfold").joinpath("machines", f"{name_or_path}.toml")
    return parse_machine(file.read_text(encoding="utf-8"), f"machines/{name_or_path}.toml")


def parse_machine(text: str, file: str) -> Machine:
    """A machine from TOML; errors name the file."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: no TOML: {error}") from error
    return _Reader(file).machine(table)


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a constant's value may be."""

    what: str
    low: float = 0.0
    low_itself: bool = False
    high: float = math.inf
    whole: bool = False

    def admits(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        return (
            (value >= self.low if self.low_itself else value > self.low)
            and value <= self.high
            and not (self.whole and value != int(value))
        )

    def __str__(self) -> str:
        least = f"{self.low:g} or more" if self.low_itself else f"above {self.low:g}"
        most = "" if self.high == math.inf else f" and at most {self.high:g}"
        return f"{self.what}, a {'whole ' if self.whole else ''}number {least}{most}"


CONSTANTS = {
    "devices_per_node": _Rule("the devices of a node", 1, True, whole=True),
    "memory": _Rule("bytes of a device", whole=True),
    "reserve": _Rule("bytes of a device that tensors cannot have", 0, True, whole=True),
    "gemm_half": _Rule("the smallest dim of a product that reaches half of its FLOP/s", 0, True),
    "attention": _Rule("the fraction of gemm that attention reaches", 0, high=1),
    "memory_bandwidth": _Rule("bytes a second of elementwise kernels"),
    "overhead": _Rule("seconds that a kernel takes at least", 0, True),
    "launch": _Rule("seconds before a collective moves its first byte", 0, True),
    "contention": _Rule("the factor by which products slow down beside a collective", 1, True),
    "turn": _Rule("seconds that a collective waits while the device computes", 0, True),
}
FLOPS = _Rule("FLOP/s")
LINK = {"bandwidth": _Rule("bytes a second of a ring"), "latency": _Rule("seconds a hop", 0, True)}
TEXTS = ("name", "about", "device")
REQUIRED = [*TEXTS, *CONSTANTS, "peak", "gemm"]
KEYS = [*REQUIRED, "between", "inside", "measured"]


class _Reader:
    """Reads one file; gathers the sources on the way."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.sources: dict[str, str] = {}

    def wrong(self, key: str, found: str, right: str) -> ValueError:
        return ValueError(f"{self.file}: {key} {found}; it must be {right}")

    def machine(self, table: Mapping[str, Any]) -> Machine:
        self.check_keys("", table, KEYS, REQUIRED)
        values: dict[str, Any] = {key: self.text(key, table[key]) for key in TEXTS}
        values |= {key: self.constant(key, table[key], rule) for key, rule in CONSTANTS.items()}
        values |= {key: self.flops(key, table[key]) for key in ("peak", "gemm")}
        values["between"] = self.link("between", table["between"]) if "between" in table else None
        values["inside"] = self.inside(table.get("inside", []), values["devices_per_node"])
        values["measured"] = self.measured(table["measured"], values["gemm"]) if "measured" in table else ()
        self.check_together(values)
        return Machine(**values, sources=self.sources)

    def check_together(self, values: Mapping[str, Any]) -> None:
        """What no constant can break by itself."""
        if values["reserve"] >= values["memory"]:
            raise self.wrong("reserve", f"= {values['reserve']}", f"less than memory = {values['memory']}")
        if values["gemm"].keys() != values["peak"].keys():
            raise self.wrong(
                "gemm", f"has {', '.join(values['gemm'])}", f"given for the dtypes of peak: {', '.join(values['peak'])}"
            )
        for dtype, rate in values["gemm"].items():
            if rate > values["peak"][dtype]:
                raise self.wrong(f"gemm.{dtype}", f"= {rate:g}", f"at most peak.{dtype} = {values['peak'][dtype]:g}")

    def check_keys(self, path: str, table: object, known: list[str], required: list[str]) -> None:
        if not isinstance(table, Mapping):
            raise self.wrong(path, f"= {table!r}", f"a table with {', '.join(known)}")
        for key in table:
            if key not in known:
                has = f"{path or 'a machine'} has {', '.join(known)}"
                raise ValueError(f"{self.file}: unknown key {_join(path, key)}{nearest(key, known)}; {has}")
        for key in required:
            if key not in table:
                rule = CONSTANTS.get(key) or LINK.get(key) or {"peak": FLOPS, "gemm": FLOPS}.get(key)
                said = f"{_join(path, key)} is missing" + (f" ({rule})" if rule else "")
                raise ValueError(f"{self.file}: {said}; {path or 'a machine'} needs {', '.join(required)}")

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, f"= {value!r}", "a text that is not empty")
        return value

    def constant(self, key: str, table: Any, rule: _Rule) -> float | int:
        """The value of `{ value = ..., source = "..." }`."""
        if not isinstance(table, Mapping):
            raise self.wrong(key, f"= {table!r}", f'written as {{ value = {table!r}, source = "where it comes from" }}')
        self.check_keys(key, table, ["value", "source"], ["value"])
        value, source = table["value"], table.get("source")
        if not rule.admits(value):
            raise self.wrong(key, f"= {value!r}", str(rule))
        if not isinstance(source, str) or not source.strip():
            right = 'a text that says where it comes from, or "estimate: " and why'
            raise self.wrong(f"{key}.source", "is missing or empty", right)
        self.sources[key] = source
        return int(value) if rule.whole else float(value)

    def flops(self, key: str, table: Any) -> dict[str, float]:
        self.check_keys(key, table, list(ITEMSIZE), [])
        if not table:
            raise self.wrong(key, "is empty", f"FLOP/s of at least one of {', '.join(ITEMSIZE)}")
        return {dtype: self.constant(f"{key}.{dtype}", value, FLOPS) for dtype, value in table.items()}

    def link(self, key: str, table: Any) -> LinkSpeed:
        self.check_keys(key, table, list(LINK), list(LINK))
        return LinkSpeed(**{name: self.constant(f"{key}.{name}", table[name], rule) for name, rule in LINK.items()})

    def inside(self, entries: Any, devices: int) -> dict[tuple[int, int], LinkSpeed]:
        if not isinstance(entries, list) or (devices > 1 and not entries):
            raise self.wrong("inside", f"= {entries!r}", f"one [[inside]] or more for a node of {devices} devices")
        found: dict[tuple[int, int], LinkSpeed] = {}
        for index, entry in enumerate(entries):
            path = f"inside[{index}]"
            self.check_keys(path, entry, ["stride", "size", *LINK], ["stride", "size", *LINK])
            stride, size = (self.whole(f"{path}.{key}", entry[key], low) for key, low in (("stride", 1), ("size", 2)))
            if stride * size > devices or (stride, size) in found:
                raise self.wrong(
                    path, f"has stride {stride}, size {size}", f"a group inside a node of {devices} devices, each once"
                )
            found[stride, size] = self.link(
                f"inside[{stride},{size}]", {key: value for key, value in entry.items() if key in LINK}
            )
        return found

    def whole(self, key: str, value: object, low: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.wrong(key, f"= {value!r}", f"a whole number from {low} up")
        return value

    def measured(self, table: Any, gemm: Mapping[str, float]) -> tuple[Timed, ...]:
        self.check_keys("measured", table, ["products", "source"], ["products"])
        self.sources["measured"] = self.text("measured.source", table.get("source"))
        if not isinstance(table["products"], list):
            raise self.wrong("measured.products", f"= {table['products']!r}", "a list of [m, k, n, dtype, seconds]")
        seconds = _Rule("seconds")
        found = []
        for index, row in enumerate(table["products"]):
            key = f"measured.products[{index}]"
            if not isinstance(row, list) or len(row) != 5 or row[3] not in list(gemm) or not seconds.admits(row[4]):
                right = f"[m, k, n, dtype, seconds] with sizes from 1 up, a dtype of {', '.join(gemm)}, seconds above 0"
                raise self.wrong(key, f"= {row!r}", right)
            m, k, n = (self.whole(key, size, 1) for size in row[:3])
            found.append(Timed(m, k, n, row[3], float(row[4])))
        return tuple(found)


def to_toml(machine: Machine) -> str:
    """The machine as the text of its file."""
    lines = [f"{key} = {_text(getattr(machine, key))}" for key in TEXTS]
    lines += [_constant(machine, key, getattr(machine, key)) for key in CONSTANTS]
    for key in ("peak", "gemm"):
        lines.append(f"\n[{key}]")
        lines += [_constant(machine, f"{key}.{dtype}", value) for dtype, value in getattr(machine, key).items()]
    if machine.between is not None:
        lines += ["\n[between]", *_link(machine, "between", machine.between)]
    for (stride, size), link in machine.inside.items():
        lines += [f"\n[[inside]]\nstride = {stride}\nsize = {size}", *_link(machine, f"inside[{stride},{size}]", link)]
    if machine.measured:
        rows = [f'  [{one.m}, {one.k}, {one.n}, "{one.dtype}", {_number(one.seconds)}],' for one in machine.measured]
        lines += [f"\n[measured]\nsource = {_text(machine.sources['measured'])}\nproducts = [", *rows, "]"]
    return "\n".join(lines) + "\n"


def _link(machine: Machine, path: str, link: LinkSpeed) -> list[str]:
    return [_constant(machine, f"{path}.{name}", getattr(link, name)) for name in LINK]


def _constant(machine: Machine, path: str, value: float) -> str:
    key = path.rpartition(".")[2]
    return f"{key} = {{ value = {_number(value)}, source = {_text(machine.sources[path])} }}"


def _number(value: float) -> str:
    """The shortest text that gives the same number again."""
    short = f"{value:.4g}"
    return short if isinstance(value, float) and float(short) == value else repr(value)


def _text(text: str) -> str:
    """As TOML writes it: as JSON does, but for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
