"""Hardware as data: what the devices and links of a machine do, and how long one piece of work takes on it.

A machine is a TOML file, packaged in `machines/` or written by `fourfold calibrate`. Every constant is a table
`{ value = 312e12, source = "NVIDIA A100 data sheet, dense bf16" }`. A key that is missing or unknown, a value that is
impossible and a constant without a source are refused with the key and the file.

`Seconds` prices one collective, product or kernel that runs alone (docs/planner.md, P1 to P7). A collective is a ring:
launch + latency of the hops + wire bytes / bandwidth, with one pass for an all-gather or a reduce-scatter, two for an
all-reduce. An all-reduce may take a tree instead, with 2 log2(ranks) hops and the whole buffer both ways, if that is
faster. The bandwidth depends on where a group lies: inside a node it is the one measured with all groups active; across
nodes it is the bandwidth of the node's network cards, divided by the number of rings that cross there, at most what a
single ring reaches (`ring_bandwidth`), and less the more nodes the job has (`congestion`). What happens when several
pieces of work run at once is up to the simulation (simulate.py); `transfer` says what they share.

Invariant: `parse_machine(to_toml(machine)) == machine`.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fourfold.axes import FOLDED
from fourfold.errors import nearest
from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.parse import parse_toml

DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
"""The names that a machine file gives the dtypes of products."""
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
"""Dense bf16 FLOP/s by torch's name of the device, from the vendors' data sheets."""

ITEMSIZE = {name: dtype.itemsize for dtype, name in DTYPES.items()}
"""Bytes of one element by the name of its dtype."""


UNCERTAIN_SOURCES = ("estimate", "fitted")
"""A machine file marks a constant as uncertain by the first word of its source: `estimate: ...` or `fitted: ...`. This
is part of the file's format."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """The speed of one ring while all groups of its kind are active."""

    bandwidth: float
    """Bytes per second that each rank sends."""
    latency: float
    """Seconds per hop."""
    ring_bandwidth: float = math.inf
    """Bytes per second that a single ring between nodes reaches, if it cannot use all network cards of a node. Links
    inside a node do not have it."""

    def per_ring(self, rings: int) -> float:
        """Return the bytes per second of each of so many rings that leave a node."""
        return min(self.ring_bandwidth, self.bandwidth / rings)

    def scaled(self, factor: float) -> LinkSpeed:
        """Return a link of so many times the bandwidth, also of what a single ring reaches."""
        return replace(self, bandwidth=factor * self.bandwidth, ring_bandwidth=factor * self.ring_bandwidth)


@dataclass(frozen=True, slots=True)
class Timed:
    """A measured product [m, k] x [k, n]."""

    m: int
    k: int
    n: int
    dtype: str
    seconds: float


HostMode = Literal["eager", "compiled", "captured"]
"""How the host gives a step to the device: call by call, with compiled computation between collectives, or as the
replay of a step that was recorded as a CUDA graph."""
HOST_MODES: tuple[HostMode, ...] = get_args(HostMode)
KernelMode = Literal["eager", "compiled"]
"""How the kernels between products are made; a recorded step replays either."""
KERNEL_MODES: tuple[KernelMode, ...] = get_args(KernelMode)


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """The time that the host needs for a step in one mode."""

    item: float
    """Seconds per item: a product, an attention kernel, any other kernel of a program, or, on a GPU, the launch of a
    collective."""
    step: float
    """Seconds per step beside its items."""


@dataclass(frozen=True)
class Machine:
    """Nodes of equal devices and the links between them."""

    name: str
    about: str
    device: str
    """torch's name of the device, such as "NVIDIA A100-SXM4-40GB", or "cpu"."""
    devices_per_node: int
    memory: int
    """Bytes of a device."""
    reserve: int
    """Bytes of the memory that tensors cannot use: the context, buffers of communicators, fragmentation."""
    peak: Mapping[str, float]
    """Advertised FLOP/s by dtype."""
    gemm: Mapping[str, float]
    """FLOP/s that a large product reaches, by dtype."""
    gemm_half: float
    """The smallest dim d with which a product reaches half of `gemm`: rate = gemm * d / (d + gemm_half)."""
    attention: float
    """Fraction of `gemm` that the attention kernel reaches."""
    memory_bandwidth: float
    """Bytes per second that elementwise kernels read and write."""
    overhead: float
    """On a GPU the least seconds that a kernel takes. On the CPU, where the host computes itself, its seconds per piece
    of work, which are added."""
    launch: float
    """Seconds that a collective takes before the first byte moves."""
    contention: float
    """The factor by which products slow down while a collective is in flight; 1 means not at all."""
    turn: float
    """Seconds that a collective waits for its turn if the device computes all the time: for a core, or for the
    multiprocessors of a GPU to finish what they have begun."""
    inside: Mapping[tuple[int, int], LinkSpeed]
    """Links inside a node by (stride, size) of the group, which has the ranks base, base + stride, ..."""
    between: LinkSpeed | None
    """The link across nodes: its bandwidth is the sum of a node's network cards, of which one ring may reach less. None
    if there is only one node."""
    sharing: float = 0.0
    """How much longer a collective inside a node takes for each other communicator in flight there: 0 if each has links
    of its own, 1 if all share the same. The network cards of a node are always shared."""
    congestion: float = 0.0
    """How much longer a transfer between nodes takes for each doubling of the nodes of a job: 0 if the network keeps
    its bandwidth, however many nodes send at once."""
    all_to_all: float = 1.0
    """The fraction of a link's bandwidth that an all-to-all reaches, in which every rank sends to every other; it may
    be above 1 where several paths are faster than a ring."""
    host_bandwidth: float | None = None
    """Bytes per second that a device copies to the memory of its host, or back, while all devices of the node do; None
    if it is not known, or if the device is the host itself."""
    host_memory: int | None = None
    """Bytes of the host's memory for each device of a node; None if it is not known."""
    measured: tuple[Timed, ...] = ()
    """Measured products; shapes near them follow these times rather than `gemm` and `gemm_half`."""
    traffic: Mapping[KernelMode, float] = field(default_factory=dict)
    """How many times the bytes of fused kernels move between products, by whether these are compiled: norms, rotations
    and activations are several kernels each without compiling, and some of those do not reach the bandwidth. Where it
    is missing, the kernels are taken to be fused."""
    host: Mapping[HostMode, HostSpeed] = field(default_factory=dict)
    """The time that the host needs for a step, by mode. In a mode that is missing, the host of a GPU is never late, and
    on the CPU it takes `overhead`."""
    sources: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    """The source of each constant by its key, such as "gemm.bf16" or "inside[1,2].latency"."""

    def __hash__(self) -> int:
        return hash((self.name, self.device, self.memory))  # prices are cached by machine, so hashing must be quick

    @property
    def uncertain(self) -> list[str]:
        """The keys of the constants that are estimates or fitted, neither published nor measured."""
        return sorted(key for key, source in self.sources.items() if source.startswith(UNCERTAIN_SOURCES))

    def host_in(self, mode: HostMode) -> HostSpeed:
        """Return the time of the host in one mode; it is 0 if it was not measured."""
        return self.host.get(mode, HostSpeed(0.0, 0.0))

    def describe_host(self, mode: HostMode) -> str:
        """Describe the time of the host in one mode, or what is assumed about it."""
        if mode in self.host:
            speed = self.host[mode]
            return f"{mode}: {speed.item * 1e6:,.1f} us per item and {speed.step * 1e3:,.2f} ms per step"
        if self.device == "cpu":
            return f"{mode}: not measured, {self.overhead * 1e6:,.1f} us per item assumed"
        return f"{mode}: not measured, assumed to be never late"


NO_MACHINE = Machine(
    "", "", "", 1, 1, 0, {}, {}, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, {}, None
)  # fmt: skip
"""Stands for every machine, where only the work counts and not what it costs."""


# --- machine files


def machine_names() -> list[str]:
    """Return the names of the machines that come with the package."""
    found = resources.files("fourfold").joinpath("machines").iterdir()
    return sorted(file.name.removesuffix(".toml") for file in found if file.name.endswith(".toml"))


def load_machine(name_or_path: str) -> Machine:
    """Return the packaged machine of that name, or the one in that .toml file."""
    if name_or_path.endswith(".toml"):
        path = Path(name_or_path)
        if not path.is_file():
            raise FileNotFoundError(
                f"no machine file {path}; `fourfold calibrate --out {path}` measures this machine and writes one, "
                f"and these come with Fourfold: {', '.join(machine_names())}"
            )
        return parse_machine(path.read_bytes(), str(path))
    names = machine_names()
    if name_or_path not in names:
        raise ValueError(
            f"no machine {name_or_path!r}{nearest(name_or_path, names)}; there are {', '.join(names)}, or give the "
            "path of a .toml file, as `fourfold calibrate` writes it"
        )
    file = resources.files("fourfold").joinpath("machines", f"{name_or_path}.toml")
    return parse_machine(file.read_text(encoding="utf-8"), f"machines/{name_or_path}.toml")


def parse_machine(text: str | bytes, file: str) -> Machine:
    """Return a machine from TOML; errors name the file."""
    try:
        table = parse_toml(text)
    except ValueError as error:
        raise ValueError(f"{file}: no TOML: {error}") from error
    return _Reader(file).machine(table)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """The values that a constant may have."""

    what: str
    low: float = 0.0
    low_itself: bool = False
    """Whether the value may be `low` itself."""
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
    "devices_per_node": _Bounds("the devices of a node", 1, True, whole=True),
    "memory": _Bounds("bytes of a device", whole=True),
    "reserve": _Bounds("bytes of a device that tensors cannot use", 0, True, whole=True),
    "gemm_half": _Bounds("the smallest dim of a product that reaches half of its FLOP/s", 0, True),
    "attention": _Bounds("the fraction of gemm that attention reaches", 0, high=1),
    "memory_bandwidth": _Bounds("bytes per second of elementwise kernels"),
    "overhead": _Bounds("seconds that a kernel takes at least", 0, True),
    "launch": _Bounds("seconds before a collective moves its first byte", 0, True),
    "contention": _Bounds("the factor by which products slow down beside a collective", 1, True),
    "turn": _Bounds("seconds that a collective waits while the device computes", 0, True),
    "sharing": _Bounds("how much longer a collective takes for each other communicator in flight", 0, True, high=2),
    "congestion": _Bounds("how much longer a transfer between nodes takes for each doubling of nodes", 0, True, high=1),
    "all_to_all": _Bounds("the fraction of a link's bandwidth that an all-to-all reaches"),
}
"""The constants of a machine file that are single numbers."""
OF_THE_HOST = {
    "host_bandwidth": _Bounds("bytes per second between a device and the memory of its host"),
    "host_memory": _Bounds("bytes of the host's memory for each device", whole=True),
}
"""Further single numbers, which are not known where a file leaves them out: nothing is assumed in their place."""
FLOPS = _Bounds("FLOP/s")
LINK = {"bandwidth": _Bounds("bytes per second of a ring"), "latency": _Bounds("seconds per hop", 0, True)}
"""The constants of a link."""
RING = {"ring_bandwidth": _Bounds("bytes per second that one ring between nodes reaches")}
"""The constants that `[between]` may have as well."""
HOST = {
    "item": _Bounds("seconds of the host per item of a step", 0, True),
    "step": _Bounds("seconds of the host per step beside its items", 0, True),
}
"""The constants of the host in one mode."""
TRAFFIC = _Bounds("how many times the bytes of fused kernels move", 1, True)
TEXTS = ("name", "about", "device")
"""The keys without a source."""
ASSUMED = {
    "sharing": (0, "estimate: not measured; every communicator is taken to have links of its own"),
    "congestion": (0, "estimate: not measured; the network is taken to keep its bandwidth with any number of nodes"),
    "all_to_all": (1, "estimate: not measured; an all-to-all is taken to reach the bandwidth of a ring"),
}
"""The constants that a file may leave out: the value that is assumed then, and the source that says so."""
REQUIRED = [*TEXTS, *(key for key in CONSTANTS if key not in ASSUMED), "peak", "gemm"]
KEYS = [*REQUIRED, *ASSUMED, *OF_THE_HOST, "between", "inside", "measured", "host", "traffic"]


class _Reader:
    """Reads one machine file and collects the sources of its constants."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.sources: dict[str, str] = {}

    def wrong(self, key: str, found: str, right: str) -> ValueError:
        return ValueError(f"{self.file}: {key} {found}; it must be {right}")

    def machine(self, table: Mapping[str, Any]) -> Machine:
        self.check_keys("", table, KEYS, REQUIRED)
        values: dict[str, Any] = {key: self.text(key, table[key]) for key in TEXTS}
        assumed = {key: {"value": value, "source": source} for key, (value, source) in ASSUMED.items()}
        given = assumed | dict(table)
        rules = CONSTANTS | {key: rule for key, rule in OF_THE_HOST.items() if key in table}
        values |= {key: self.constant(key, given[key], rule) for key, rule in rules.items()}
        values |= {key: self.flops(key, table[key]) for key in ("peak", "gemm")}
        values["between"] = self.link("between", table["between"], RING) if "between" in table else None
        values["inside"] = self.inside(table.get("inside", []), values["devices_per_node"])
        values["measured"] = self.measured(table["measured"], values["gemm"]) if "measured" in table else ()
        values["host"] = self.host(table.get("host", {}))
        values["traffic"] = self.traffic(table.get("traffic", {}))
        self.check_together(values)
        return Machine(**values, sources=self.sources)

    def check_together(self, values: Mapping[str, Any]) -> None:
        """Check the rules that involve several constants."""
        if values["reserve"] >= values["memory"]:
            raise self.wrong("reserve", f"= {values['reserve']}", f"less than memory = {values['memory']}")
        if values["gemm"].keys() != values["peak"].keys():
            raise self.wrong(
                "gemm", f"has {', '.join(values['gemm'])}", f"given for the dtypes of peak: {', '.join(values['peak'])}"
            )
        between = values["between"]
        if between is not None and between.bandwidth < between.ring_bandwidth < math.inf:
            limit = f"at most between.bandwidth = {between.bandwidth:g}, which is that of all rings of a node"
            raise self.wrong("between.ring_bandwidth", f"= {between.ring_bandwidth:g}", limit)
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
                rule = CONSTANTS.get(key) or LINK.get(key) or HOST.get(key) or {"peak": FLOPS, "gemm": FLOPS}.get(key)
                said = f"{_join(path, key)} is missing" + (f" ({rule})" if rule else "")
                raise ValueError(f"{self.file}: {said}; {path or 'a machine'} needs {', '.join(required)}")

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value.strip():
            raise self.wrong(key, f"= {value!r}", "a text that is not empty")
        return value

    def constant(self, key: str, table: Any, rule: _Bounds) -> float | int:
        """Return the value of `{ value = ..., source = "..." }`."""
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

    def link(self, key: str, table: Any, optional: Mapping[str, _Bounds] | None = None) -> LinkSpeed:
        rules = {**LINK, **(optional or {})}
        self.check_keys(key, table, list(rules), list(LINK))
        given = {name: rule for name, rule in rules.items() if name in table}
        return LinkSpeed(**{name: self.constant(f"{key}.{name}", table[name], rule) for name, rule in given.items()})

    def host(self, table: Any) -> dict[HostMode, HostSpeed]:
        self.check_keys("host", table, list(HOST_MODES), [])
        found: dict[HostMode, HostSpeed] = {}
        for mode in HOST_MODES:
            if mode in table:
                key = f"host.{mode}"
                self.check_keys(key, table[mode], list(HOST), list(HOST))
                values = {name: self.constant(f"{key}.{name}", table[mode][name], rule) for name, rule in HOST.items()}
                found[mode] = HostSpeed(**values)
        return found

    def traffic(self, table: Any) -> dict[KernelMode, float]:
        self.check_keys("traffic", table, list(KERNEL_MODES), [])
        return {mode: self.constant(f"traffic.{mode}", table[mode], TRAFFIC) for mode in KERNEL_MODES if mode in table}

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
        seconds = _Bounds("seconds")
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
    """Return the text of the machine's file."""
    lines = [f"{key} = {_text(getattr(machine, key))}" for key in TEXTS]
    numbers = {key: getattr(machine, key) for key in (*CONSTANTS, *OF_THE_HOST)}
    lines += [_constant(machine, key, value) for key, value in numbers.items() if value is not None]
    for key in ("peak", "gemm"):
        lines.append(f"\n[{key}]")
        lines += [_constant(machine, f"{key}.{dtype}", value) for dtype, value in getattr(machine, key).items()]
    if machine.between is not None:
        lines += ["\n[between]", *_link(machine, "between", machine.between)]
    for (stride, size), link in machine.inside.items():
        lines += [f"\n[[inside]]\nstride = {stride}\nsize = {size}", *_link(machine, f"inside[{stride},{size}]", link)]
    for mode, speed in machine.host.items():
        lines.append(f"\n[host.{mode}]")
        lines += [_constant(machine, f"host.{mode}.{name}", getattr(speed, name)) for name in HOST]
    if machine.traffic:
        lines.append("\n[traffic]")
        lines += [_constant(machine, f"traffic.{mode}", factor) for mode, factor in machine.traffic.items()]
    if machine.measured:
        rows = [f'  [{one.m}, {one.k}, {one.n}, "{one.dtype}", {_number(one.seconds)}],' for one in machine.measured]
        lines += [f"\n[measured]\nsource = {_text(machine.sources['measured'])}\nproducts = [", *rows, "]"]
    return "\n".join(lines) + "\n"


def _link(machine: Machine, path: str, link: LinkSpeed) -> list[str]:
    return [_constant(machine, f"{path}.{name}", value) for name, value in link_constants(link).items()]


def link_constants(link: LinkSpeed) -> dict[str, float]:
    """Return the constants of a link by their names in a machine file."""
    found = {name: getattr(link, name) for name in (*LINK, *RING)}
    return {name: value for name, value in found.items() if value < math.inf}


def _constant(machine: Machine, path: str, value: float) -> str:
    key = path.rpartition(".")[2]
    return f"{key} = {{ value = {_number(value)}, source = {_text(machine.sources[path])} }}"


def _number(value: float) -> str:
    """Return a short text that reads as the same number."""
    short = f"{value:.4g}"
    return short if isinstance(value, float) and float(short) == value else repr(value)


def _text(text: str) -> str:
    """Quote a text for TOML, which differs from JSON in one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


# --- seconds of one piece of work

CARD = "card"
"""The resource that all transfers across nodes share: the network cards of a node."""
NEAR = math.log(4)
"""The distance in log space from a measured product at which the measurement and the formula weigh the same: shapes
that differ by a factor of 4 in one dim."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How the groups of an axis are placed on nodes."""

    nodes: int
    """The number of nodes of the most spread group."""
    members: int
    """The most ranks that one group has on one node."""
    rings: int
    """The most groups that cross the boundary of one node; 0 if none does."""


@dataclass(frozen=True, slots=True)
class TransferCost:
    """The time that a collective takes alone, and what it uses."""

    host: float
    """Seconds of the launch if the host also computes; on a GPU they are part of `fixed`."""
    fixed: float
    """Seconds of latency, which do not depend on the load of the link."""
    moving: float
    """Seconds for which the collective occupies the link."""
    link: str
    """The resource: `CARD`, which all axes share, or an axis. Axes inside a node share by `Machine.sharing`."""
    beside: float
    """The factor by which the collective is slower while the device computes all the time, because it waits for its
    turn."""
    load: float = 1.0
    """The part of the network cards that the collective uses while it is alone there: below 1 if its rings cannot use
    them all."""

    @property
    def seconds(self) -> float:
        return self.host + self.fixed + self.moving


@dataclass(frozen=True, slots=True)
class Route:
    """The path of a ring or tree along an axis."""

    latency: float
    """Seconds of all hops of one pass around the ring."""
    tree_latency: float
    """Seconds of the hops of an all-reduce up and down a tree."""
    bandwidth: float
    """Bytes per second that a rank sends while all groups of the axis are active."""
    crosses: bool
    rings: int
    """The number of rings that share a node's network cards; 0 inside a node."""
    load: float = 1.0
    """The part of the network cards that these rings use together."""


@lru_cache(maxsize=256)
def in_mode(machine: Machine, mode: HostMode) -> Machine:
    """Return the machine with the `overhead` that a piece of work has in this mode.

    On the CPU these are the host's seconds. On a GPU a recorded step may have less between two kernels than single
    launches do.
    """
    speed = machine.host.get(mode)
    if speed is None:
        return machine
    overhead = speed.item if machine.device == "cpu" else min(machine.overhead, speed.item)
    return replace(machine, overhead=overhead)


class Seconds:
    """Prices of work on a grid of this shape, in which rank r is on node r // devices_per_node.

    `mode` says how the host gives the work to the device, `compiled` whether kernels between products are fused. Axes
    in `routes` have these links, as in a larger grid of which this one is a part. Of the experts of a mixture one has
    `imbalance` times the mean of their rows, and the others share the rest; where tokens are sent to experts, the rank
    that has that one sets the pace, with `imbalance` times the rows.
    """

    def __init__(
        self,
        machine: Machine,
        shape: Shape,
        mode: HostMode = "eager",
        *,
        compiled: bool | None = None,
        routes: Mapping[str, Route] | None = None,
        imbalance: float = 1.0,
    ) -> None:
        if shape.world > machine.devices_per_node and machine.between is None:
            raise ValueError(
                f"the grid {shape} has {shape.world} ranks, but {machine.name} is one node of "
                f"{machine.devices_per_node} devices; add [between] to its file, or take a grid that fits"
            )
        self.machine, self.shape, self.imbalance = in_mode(machine, mode), shape, imbalance
        self.host = machine.host_in(mode)
        compiled = mode == "compiled" if compiled is None else compiled
        self.traffic = machine.traffic.get("compiled" if compiled else "eager", 1.0)
        self._routes: dict[str, Route] = dict(routes or {})
        self._transfers: dict[tuple[str, str, int], TransferCost] = {}

    def link(self, axis: str) -> Route:
        if axis not in self._routes:
            parts = [route_of(self.machine, *part, self.shape.world) for part in self.shape.strides(axis)]
            self._routes[axis] = parts[0] if len(parts) == 1 else joined(parts)
        return self._routes[axis]

    def collective(self, record: Collective) -> float:
        """Return the seconds from launch to arrival with no other traffic."""
        return self.transfer(record).seconds

    def transfer(self, record: Collective) -> TransferCost:
        key = (record.op, record.axis, record.nbytes if record.sent < 0 else record.sent)
        if key not in self._transfers:
            if record.ranks != self.shape.group_sizes[record.axis]:
                raise ValueError(f"{record} is of {record.ranks} ranks and not of the grid {self.shape}")
            self._transfers[key] = self._transfer(record)
        return self._transfers[key]

    def _transfer(self, record: Collective) -> TransferCost:
        if record.ranks == 1:
            return TransferCost(0.0, 0.0, 0.0, record.axis, 1.0)
        if record.op == "receive":  # who sends it pays for it
            return TransferCost(0.0, 0.0, 0.0, record.axis, 1.0)
        route, launch = self.link(record.axis), self.machine.launch
        host = launch if self.machine.device == "cpu" else 0.0
        if record.op == "send":
            latency = launch - host + self._hop_latency(record.axis)
            moving, link = record.nbytes / route.bandwidth, CARD if route.crosses else record.axis
            return TransferCost(host, latency, moving, link, 1.0, route.load)
        if record.op == "all_to_all":
            return self._all_to_all(record, route, host)
        passes = 2 if record.op == "all_reduce" else 1
        ring = (launch - host + passes * route.latency, record.wire_bytes / route.bandwidth)
        tree = (launch - host + route.tree_latency, 2 * record.nbytes / route.bandwidth)
        fixed, moving = min(ring, tree, key=sum) if record.op == "all_reduce" else ring
        link = CARD if route.crosses else record.axis
        return TransferCost(host, fixed, moving, link, self._beside(fixed + moving), route.load)

    def _beside(self, alone: float) -> float:
        """Return how much longer a collective takes while the device computes; 0 seconds: nothing is sent."""
        return 1 + self.machine.turn / alone if alone else 1.0

    def _all_to_all(self, record: Collective, route: Route, host: float) -> TransferCost:
        """Price a message to every other rank: all ranks of a node share its cards for what leaves the node."""
        machine, between = self.machine, self.machine.between
        fixed = machine.launch - host + self._hop_latency(record.axis)
        nbytes = record.wire_bytes * (self.imbalance if record.axis in FOLDED else 1.0)
        if not route.crosses or between is None:
            moving = nbytes / route.bandwidth / machine.all_to_all
            return TransferCost(host, fixed, moving, record.axis, self._beside(fixed + moving), route.load)
        per_node = machine.devices_per_node
        spreads = [spread_of(*part, self.shape.world, per_node) for part in self.shape.strides(record.axis)]
        near = min(record.ranks, math.prod(spread.members for spread in spreads))
        far = (record.ranks - near) / (record.ranks - 1)
        moving = far * nbytes * per_node / between.bandwidth
        if not far:  # the shape is a part of the grid whose route this is
            moving = nbytes / route.bandwidth
        moving /= machine.all_to_all
        return TransferCost(host, fixed, moving, CARD, self._beside(fixed + moving))

    def _hop_latency(self, axis: str) -> float:
        """Return the seconds of one hop between neighbours along an axis, of which some may be on different nodes."""
        route, size = self.link(axis), self.shape.group_sizes[axis]
        between = self.machine.between
        return between.latency if route.crosses and between is not None else route.latency / max(1, size - 1)

    def product(self, m: int, k: int, n: int, dtype: str) -> float:
        """Return the seconds of the product [m, k] x [k, n]."""
        return with_host(self.machine, _product(self.machine, m, k, n, dtype))

    def products(
        self, m: int, k: int, n: int, dtype: str, *, parts: int = 1, is_wgrad: bool = False, sent: bool = False
    ) -> float:
        """Return the seconds of a product whose m rows, or k rows where it makes dw, are those of several experts.

        Each expert has a product of its own, which runs at the speed of products of that size. On a GPU one kernel
        computes all of them. If tokens were `sent` to these experts, all ranks wait for that of the busiest expert.
        """
        rows = k if is_wgrad else m
        if sent:
            rows = round(self.imbalance * rows)
            m, k = (m, rows) if is_wgrad else (rows, k)
        if parts == 1:
            return self.product(m, k, n, dtype)
        most = min(rows, round((1.0 if sent else self.imbalance) * rows / parts))

        def one(rows: int) -> float:
            sizes = (m, rows, n) if is_wgrad else (rows, k, n)
            return _product(self.machine, *sizes, dtype) if rows else 0.0

        low = (rows - most) // (parts - 1)
        more = rows - most - low * (parts - 1)  # experts that have one row more than the others
        seconds = one(most) + more * one(low + 1) + (parts - 1 - more) * one(low)
        if self.machine.device == "cpu":
            return seconds + parts * self.machine.overhead
        return with_host(self.machine, seconds)

    def attention(self, flops: Any, nbytes: Any, dtype: str) -> Any:
        """Return the seconds of an attention kernel, or of many where sizes are tensors."""
        rate = _gemm(self.machine, dtype) * self.machine.attention
        return with_host(self.machine, _larger(flops / rate, nbytes / self.machine.memory_bandwidth))

    def kernel(self, nbytes: Any) -> Any:
        """Return the seconds of a memory-bound kernel that reads and writes these bytes, or of many."""
        return with_host(self.machine, nbytes / self.machine.memory_bandwidth)

    def copy(self, nbytes: int) -> float:
        """Return the seconds of a copy to the memory of the host or back; 0 if the speed of that link is not known."""
        bandwidth = self.machine.host_bandwidth
        return 0.0 if bandwidth is None else nbytes / bandwidth

    def fused(self, nbytes: Any) -> Any:
        """Return the seconds of kernels that read and write these bytes if they are fused into one, or of many."""
        return self.kernel(self.traffic * nbytes)


def with_slower_products(machine: Machine, dtype: str, ratio: float) -> Machine:
    """Return the machine whose products in a dtype take `ratio` times as long, but not less than at its peak.

    Attention, whose speed is a fraction of theirs, takes as long as before.
    """
    gemm = min(machine.peak[dtype], machine.gemm[dtype] / ratio)
    timed = tuple(replace(one, seconds=one.seconds * ratio) if one.dtype == dtype else one for one in machine.measured)
    attention = min(1.0, machine.attention * machine.gemm[dtype] / gemm)
    return replace(machine, gemm={**machine.gemm, dtype: gemm}, measured=timed, attention=attention)


def with_host(machine: Machine, seconds: Any) -> Any:
    """Add the host's overhead to the seconds of a piece of work; a number, or a tensor of numbers."""
    return seconds + machine.overhead if machine.device == "cpu" else _larger(seconds, machine.overhead)


def _larger(one: Any, other: Any) -> Any:
    """Return the larger of two numbers, or of each pair where the first is a tensor."""
    return torch.maximum(one, torch.as_tensor(other)) if isinstance(one, torch.Tensor) else max(one, other)


def joined(parts: Sequence[Route]) -> Route:
    """Return the path of a group that goes along several axes: the hops of all, at the speed of the slowest."""
    slowest = min(parts, key=lambda one: one.bandwidth)
    latency, tree = sum(one.latency for one in parts), sum(one.tree_latency for one in parts)
    crosses = any(one.crosses for one in parts)
    return replace(slowest, latency=latency, tree_latency=tree, crosses=crosses)


@lru_cache(maxsize=4096)
def route_of(machine: Machine, stride: int, size: int, world: int) -> Route:
    if size == 1:
        return Route(0.0, 0.0, math.inf, False, 0)
    spread = spread_of(stride, size, world, machine.devices_per_node)
    if not spread.rings or machine.between is None:
        link = inside_link(machine, stride, size)
        deep = math.ceil(math.log2(size))
        return Route((size - 1) * link.latency, 2 * deep * link.latency, link.bandwidth, False, 0)
    between, near = machine.between, size - spread.nodes  # `near`: hops inside nodes in a whole round
    doublings = math.log2(max(1, world / machine.devices_per_node))
    alone = between.per_ring(spread.rings)
    bandwidth, hop = alone / (1 + machine.congestion * doublings), 0.0
    if near:
        inner = inside_link(machine, stride, spread.members)
        bandwidth, hop = min(bandwidth, inner.bandwidth), inner.latency
    # a pass has one hop less than a round; the slowest chunk makes all hops except the cheapest
    latency = spread.nodes * between.latency + near * hop - (min(hop, between.latency) if near else between.latency)
    deep, wide = math.ceil(math.log2(spread.members)), math.ceil(math.log2(spread.nodes))
    load = alone * spread.rings / between.bandwidth
    return Route(latency, 2 * (deep * hop + wide * between.latency), bandwidth, True, spread.rings, load)


def inside_link(machine: Machine, stride: int, size: int) -> LinkSpeed:
    """Return the link of a group inside a node: its own, else the nearest one, if possible of the same stride."""

    def distance(group: tuple[int, int]) -> tuple[bool, float, tuple[int, int]]:
        return group[0] != stride, math.hypot(math.log(group[0] / stride), math.log(group[1] / size)), group

    return machine.inside[min(machine.inside, key=distance)]


@lru_cache(maxsize=4096)
def spread_of(stride: int, size: int, world: int, per_node: int) -> Spread:
    """Return where the groups with ranks base, base + stride, ... lie, if rank r is on node r // per_node.

    Ranks increase along a group, so its ring enters and leaves each of its nodes once.
    """
    block = stride * size
    if world <= per_node or per_node % block == 0:
        return Spread(1, size, 0)
    if stride % per_node == 0:
        return Spread(size, 1, per_node)
    if per_node % stride == 0 and block % per_node == 0:
        return Spread(block // per_node, per_node // stride, stride)
    return count_spread(stride, size, world, per_node)


def count_spread(stride: int, size: int, world: int, per_node: int) -> Spread:
    """Return the same for any sizes by counting rank by rank until the pattern repeats."""
    block = stride * size
    members: Counter[tuple[int, int, int]] = Counter()
    nodes: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for rank in range(min(world, math.lcm(block, per_node))):
        group, node = (rank // block, rank % stride), rank // per_node
        members[*group, node] += 1
        nodes[group].add(node)
    crossing = Counter(node for visited in nodes.values() if len(visited) > 1 for node in visited)
    return Spread(max(map(len, nodes.values())), max(members.values()), max(crossing.values(), default=0))


def _gemm(machine: Machine, dtype: str) -> float:
    if dtype not in machine.gemm:
        raise ValueError(
            f"{machine.name} has no FLOP/s for {dtype}, it has them for {', '.join(machine.gemm)}; add peak.{dtype} "
            f"and gemm.{dtype} to its file, or compute in one of these"
        )
    return machine.gemm[dtype]


@lru_cache(maxsize=1 << 16)
def _product(machine: Machine, m: int, k: int, n: int, dtype: str) -> float:
    """Return the seconds of a product without the host."""
    seconds = formula_seconds(machine, m, k, n, dtype)
    if min(m, k, n) > 0 and machine.measured:
        seconds *= math.exp(_correction(machine, m, k, n, dtype))
    return seconds


def formula_seconds(machine: Machine, m: int, k: int, n: int, dtype: str) -> float:
    """Return the seconds of a product by its smallest dim and its bytes, without the host."""
    least = min(m, k, n)
    rate = _gemm(machine, dtype) * least / (least + machine.gemm_half) if least else math.inf
    nbytes = ITEMSIZE[dtype] * (m * k + k * n + m * n)
    return max(2 * m * k * n / rate, nbytes / machine.memory_bandwidth)


def _correction(machine: Machine, m: int, k: int, n: int, dtype: str) -> float:
    """Return the log of measured / formula, interpolated between measured products by their distance in log space.

    A measured product gets exactly its own seconds; far from all of them the formula applies.
    """
    weights, total = 1 / NEAR**2, 0.0
    for one, error in _errors(machine):
        if one.dtype == dtype:
            apart = math.log(m / one.m) ** 2 + math.log(k / one.k) ** 2 + math.log(n / one.n) ** 2
            if apart == 0:
                return error
            weights += 1 / apart
            total += error / apart
    return total / weights


@lru_cache(maxsize=64)
def _errors(machine: Machine) -> list[tuple[Timed, float]]:
    return [
        (one, math.log(one.seconds / formula_seconds(machine, one.m, one.k, one.n, one.dtype)))
        for one in machine.measured
    ]
