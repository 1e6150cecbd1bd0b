"""A plan in words: the ranked table and the `--why` text for a terminal, and the sentences that the page shares.

Everything comes from the plan's JSON document. On a terminal the table fits its width: a grid takes one line where
all columns fit, else a line with the main ones and the rest below it. In a pipe a grid is one line, however long.
Colours need `rich`; without it, and in a pipe, the text is plain.
"""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from typing import Any

from fourfold.axes import AXES
from fourfold.grid import Shape
from fourfold.report.units import DASH, aligned, count, duration, nbytes, percent

Document = Mapping[str, Any]
Entry = Mapping[str, Any]
"""One of the document's `grids`."""

KEEPS = {(False, False): DASH, (True, False): "inputs", (False, True): "weights", (True, True): "both"}
"""What backward finds still gathered, by (keep_gathered, keep_weights)."""

SHORT = {"sharded": "shard", "replicated": "repl", "attention": "attn"}


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    cell: Callable[[Entry], str]
    right: bool = True


def plan_table(document: Document, top: int, *, width: int | None = None, colour: bool | None = None) -> str:
    """The `top` best grids as a table, with a heading and what the columns mean.

    `width`: columns to fit into; None: those of the terminal, or without end where the output is none.
    `colour`: None: on a terminal where `rich` is installed.
    """
    if top < 1:
        raise ValueError(f"top={top}: a table shows at least 1 grid")
    width = _terminal_width() if width is None else width
    shown = document["grids"][:top]
    if not shown:
        return "\n".join([*_wrapped([headline(document)], width), "", *_nothing_fits(document, top)])
    axes = [axis for axis in AXES if any(axis in entry["link_seconds"] for entry in shown)]
    head, rows = _fitted(shown, axes, width)
    lines = [*((line, "bold") for line in _wrapped([headline(document)], width)), ("", ""), (head, "bold")]
    for place, (first, *rest) in enumerate(rows):
        lines += [(first, "" if place else "green"), *((line, "dim") for line in rest)]
    lines += [("", ""), *((line, "dim") for line in _wrapped(_legend(document, axes), width))]
    if colour is None:
        colour = sys.stdout.isatty()
    return _coloured(lines) if colour and find_spec("rich") else "\n".join(line for line, _ in lines)


def why_text(document: Document, *, width: int | None = None) -> str:
    """Why the best grid is the best; or, where the plan was asked about a pair, why the one beats the other."""
    width = _terminal_width() if width is None else width
    asked = document["why"]
    if asked is None:
        if not document["grids"]:
            return "\n".join(_nothing_fits(document, 20))
        title = f"Why {grid_name(document['grids'][0]['grid'])}?"
        return "\n".join([title, *_wrapped(reasons_it_wins(document), width, bullet="- ")])
    lines = _wrapped(asked["lines"], width, bullet="- ")
    pair = aligned(asked_pair(document), right=(1, 2, 3))
    return "\n".join([why_title(asked), *(f"  {row}" for row in pair), *lines])


def asked_pair(document: Document) -> list[tuple[str, str, str, str]]:
    """The two grids that `--why` was asked about side by side; nothing where one of them was refused."""
    one, other = (entry_of(document, document["why"][name]) for name in ("grid", "against"))
    return [] if one is None or other is None else comparison(one, other)


def why_title(asked: Mapping[str, Any]) -> str:
    return f"Why {grid_name(asked['grid'])} and not {grid_name(asked['against'])}?"


def grid_name(grid: Mapping[str, int]) -> str:
    """`x=2 z=8 data=64`: the axes that are longer than 1."""
    return str(Shape(*(grid[axis] for axis in AXES)))


def order_name(entry: Entry) -> str:
    """`x z data`: fastest-varying axis first, without those of size 1, whose place means nothing."""
    return " ".join(axis for axis in entry["order"] if entry["grid"][axis] > 1) or DASH


def headline(document: Document) -> str:
    model, machine = document["model"], document["machine"]
    return (
        f"{model['name']} ({count(model['parameters'])} parameters) on {document['devices']:,} x {machine['device']} "
        f"({machine['name']}), {count(document['batch_tokens'])} tokens a step"
    )


def searched(document: Document) -> str:
    found = document["searched"]
    return (
        f"{found['grids']:,} grids, {found['candidates']:,} candidates, {found['simulated']:,} of them simulated, "
        f"in {duration(found['seconds'])}"
    )


def reasons_it_wins(document: Document) -> list[str]:
    """Sentences about the best grid: what its step consists of, what is hidden, what the next best one lacks."""
    best, *others = document["grids"]
    exposed, link = sum(best["exposed_seconds"].values()), sum(best["link_seconds"].values())
    by_axis = ", ".join(f"{axis} {duration(value)}" for axis, value in best["exposed_seconds"].items())
    waits = f"and {duration(exposed)} waiting for communication ({by_axis})" if exposed else "and no wait"
    computes = (
        f"{duration(best['compute_seconds'])} of computing ({percent(best['compute_seconds'] / best['seconds'])})"
    )
    said = [f"A step takes {duration(best['seconds'])}: {computes} {waits}."]
    if link:
        hidden = max(0.0, 1 - exposed / link)
        said.append(f"Of {duration(link)} on the links {percent(hidden)} is hidden behind computation.")
    if best["reason"]:
        said.append(_sentence(best["reason"]))
    if others:
        said.append(_sentence(f"The next best, {grid_name(others[0]['grid'])}, {_slower(others[0], best)}"))
    usable = document["machine"]["usable_bytes"]
    said.append(f"A device needs {nbytes(best['peak_bytes'])} of the {nbytes(usable)} that it can use.")
    return said


def comparison(one: Entry, other: Entry) -> list[tuple[str, str, str, str]]:
    """Rows of two grids side by side: what, the one, the other, how much more the other takes."""
    rows = [("", grid_name(one["grid"]), grid_name(other["grid"]), "difference")]

    def add(name: str, left: float, right: float, shown: Callable[[float], str]) -> None:
        sign = "+" if right > left else "-" if right < left else ""
        rows.append((name, shown(left), shown(right), sign + shown(abs(right - left))))

    add("step", one["seconds"], other["seconds"], duration)
    add("compute", one["compute_seconds"], other["compute_seconds"], duration)
    for axis in AXES:
        left, right = (entry["exposed_seconds"].get(axis) for entry in (one, other))
        if left is not None or right is not None:
            add(f"exposed over {axis}", left or 0.0, right or 0.0, duration)
    add("peak memory", one["peak_bytes"], other["peak_bytes"], nbytes)
    return rows


def entry_of(document: Document, grid: Mapping[str, int]) -> Entry | None:
    """The entry of that grid; None where it was refused."""
    return next((entry for entry in document["grids"] if entry["grid"] == grid), None)


def command(document: Document) -> str:
    """What trains the winner once its config is saved."""
    each, devices = document["machine"]["devices_per_node"], document["devices"]
    train = f"train {document['model']['name']}.toml"
    if devices <= each:
        return f"fourfold {train}"
    nodes = next(nodes for nodes in range(-(-devices // each), devices + 1) if devices % nodes == 0)
    return f"torchrun --nnodes {nodes} --nproc-per-node {devices // nodes} -m fourfold.cli {train}"


def _slower(entry: Entry, best: Entry) -> str:
    more = entry["seconds"] - best["seconds"]
    takes = f"takes {duration(more)} ({percent(more / best['seconds'])}) longer" if more > 0 else "takes as long"
    return f"{takes}: {entry['reason']}" if entry["reason"] else takes


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _columns(axes: Sequence[str], scale: float) -> list[Column]:
    # three digits of the fastest step: what is smaller decides nothing
    places = max(1, 2 - math.floor(math.log10(scale))) if scale > 0 else 1

    def seconds(axis: str) -> Callable[[Entry], str]:
        return lambda entry: (
            f"{entry['exposed_seconds'].get(axis, 0.0):.{places}f}/{entry['link_seconds'][axis]:.{places}f}"
            if axis in entry["link_seconds"]
            else DASH
        )

    def policy(name: str) -> Callable[[Entry], str]:
        return lambda entry: SHORT.get(entry["policy"][name], entry["policy"][name])

    return [
        Column("#", lambda entry: str(entry["rank"])),
        Column("grid", lambda entry: grid_name(entry["grid"]), right=False),
        Column("order", order_name, right=False),
        Column("act.", policy("activations"), right=False),
        Column("recomp.", policy("recompute"), right=False),
        Column(
            "keeps",
            lambda entry: KEEPS[entry["policy"]["keep_gathered"], entry["policy"]["keep_weights"]],
            right=False,
        ),
        Column("micro", lambda entry: str(entry["micro_steps"])),
        Column("s/step", lambda entry: f"{entry['seconds']:.{places + 1}f}"),
        Column("tokens/s", lambda entry: count(entry["tokens_per_second"])),
        Column("MFU", lambda entry: f"{entry['mfu']:.1%}"),
        Column("HFU", lambda entry: f"{entry['hfu']:.1%}"),
        Column("compute", lambda entry: f"{entry['compute_seconds']:.{places}f}"),
        *(Column(axis, seconds(axis)) for axis in axes),
        Column("peak", lambda entry: nbytes(entry["peak_bytes"])),
    ]


MAIN = ("#", "grid", "recomp.", "micro", "s/step", "tokens/s", "MFU", "HFU", "compute", "peak")
FEW = ("#", "grid", "s/step", "tokens/s", "MFU", "peak")


def _fitted(shown: Sequence[Entry], axes: Sequence[str], width: int | None) -> tuple[str, list[list[str]]]:
    """The heading and the lines of each grid, as many columns beside each other as fit."""
    columns = _columns(axes, shown[0]["seconds"])
    for names in ([column.name for column in columns], MAIN, FEW):
        beside = [column for column in columns if column.name in names]
        below = [column for column in columns if column.name not in names]
        cells = [[column.name for column in beside], *([column.cell(entry) for column in beside] for entry in shown)]
        head, *lines = aligned(cells, [place for place, column in enumerate(beside) if column.right])
        if width is None or max(map(len, (head, *lines))) <= width:
            break
    indent = " " * (2 + max(len(str(entry["rank"])) for entry in shown))
    rows = []
    for line, entry in zip(lines, shown, strict=True):
        # a value stays with its name: only the gaps between items may break
        items = "  ".join(f"{column.name} {column.cell(entry)}".replace(" ", "\N{NO-BREAK SPACE}") for column in below)
        more = textwrap.wrap(items, width or 10**6, initial_indent=indent, subsequent_indent=indent)
        rows.append([line, *(part.replace("\N{NO-BREAK SPACE}", " ") for part in more)])
    return head, rows


def _legend(document: Document, axes: Sequence[str]) -> list[str]:
    refused = document["refused"]
    by_axis = f"{', '.join(axes)}: seconds exposed / on the link. " if axes else ""
    keeps = "keeps: what backward finds still gathered (policy.keep_gathered, policy.keep_weights)."
    more = f"; {len(refused):,} grids refused, such as {_refusal(refused[0])}" if refused else ""
    return [f"{by_axis}order: fastest axis first. {keeps}", f"{searched(document)}{more}."]


def _nothing_fits(document: Document, top: int) -> list[str]:
    refused = document["refused"]
    more = [f"... and {len(refused) - top:,} more"] if len(refused) > top else []
    return ["No grid fits:", *(f"  {_refusal(entry)}" for entry in refused[:top]), *more]


def _refusal(entry: Entry) -> str:
    return f"{grid_name(entry['grid'])}: {entry['reason']}"


def _wrapped(lines: Iterable[str], width: int | None, bullet: str = "") -> list[str]:
    indent = " " * len(bullet)
    return [
        part
        for line in lines
        for part in textwrap.wrap(
            line, width or 10**6, initial_indent=bullet, subsequent_indent=indent, break_on_hyphens=False
        )
    ]


def _terminal_width() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _coloured(lines: Iterable[tuple[str, str]]) -> str:
    """The same text with the terminal's colours, as many as it has; none where NO_COLOR asks for none."""
    from rich.console import Console
    from rich.text import Text

    out = StringIO()
    console = Console(file=out, force_terminal=True)
    for line, style in lines:
        console.print(Text(line, style=style), soft_wrap=True)
    return out.getvalue().removesuffix("\n")
