"""A plan as text: the ranked table and the answer to `--why` for a terminal, and the sentences that the page shares.

Everything comes from the plan's JSON document. On a terminal the table fits the width: a grid takes one line if all
columns fit, otherwise a line with the main columns and the other columns below it. In a pipe a grid is always one line.
Colours need `rich`; without it, and in a pipe, the text is plain.
"""

from __future__ import annotations

import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec
from io import StringIO
from itertools import groupby
from typing import Any

from fourfold.axes import PIPE, WAITED_FOR
from fourfold.grid import Shape
from fourfold.report.units import DASH, aligned, count, duration, money, nbytes, percent, plural

PlanDocument = Mapping[str, Any]
"""A plan as JSON, as `fourfold plan --json` writes it. It has at least one grid: a search in which none fits raises."""

PlannedGrid = Mapping[str, Any]
"""One of the document's `grids`."""

KEEPS = {(False, False): DASH, (True, False): "inputs", (False, True): "weights", (True, True): "both"}
"""The tensors that stay gathered from forward to backward, by (keep_gathered, keep_weights)."""

SHORT = {"sharded": "shard", "replicated": "repl", "attention": "attn"}
"""Short forms of policies, so that more columns fit."""

LEFT = ("grid", "order", "policy", "keeps")
"""Columns of text, aligned to the left; all others are numbers, aligned to the right."""

MAIN = ("#", "grid", "policy", "micro", "s/step", "tokens/s", "hours", "cost", "MFU", "HFU", "compute", "peak")
"""Columns of the first line of a grid on a terminal that is too narrow for all columns."""

FEW = ("#", "grid", "s/step", "tokens/s", "hours", "MFU", "peak")
"""Columns of the first line on a terminal that is too narrow even for `MAIN`."""

UNLIMITED = 10**6
"""A width that no line reaches, in characters: textwrap has no value for "do not wrap"."""


def plan_table(document: PlanDocument, top: int, *, width: int | None = None, colour: bool | None = None) -> str:
    """Return the `top` best grids as a table, with a heading and a legend of the columns.

    `width` is the number of characters to fit into; None means the width of the terminal, and no limit elsewhere.
    `colour=None` means colours on a terminal if `rich` is installed.
    """
    if top < 1:
        raise ValueError(f"top={top}: a table must show at least 1 grid")
    width = _terminal_width() if width is None else width
    shown = document["grids"][:top]
    axes = [axis for axis in WAITED_FOR if any(axis in entry["link_seconds"] for entry in shown)]
    head, rows = _fitted(shown, axes, document.get("training"), width)
    lines = [*((line, "bold") for line in _wrapped([headline(document)], width)), ("", ""), (head, "bold")]
    for place, (first, *rest) in enumerate(rows):
        lines += [(first, "" if place else "green"), *((line, "dim") for line in rest)]
    if pipelines := [f"#{entry['rank']} {pipeline_text(entry)}" for entry in shown if entry.get("pipeline")]:
        lines += [("", ""), *((line, "") for line in _wrapped(pipelines, width))]
    if held := _wrapped(robust_text(document), width):
        lines += [("", ""), *((line, "") for line in held)]
    if whole := _wrapped(training_text(document), width):
        lines += [("", ""), *((line, "bold") for line in whole)]
    if said := _wrapped(goodput_text(document), width):
        lines += [*([] if whole else [("", "")]), *((line, "") for line in said)]
    lines += [("", ""), *((line, "dim") for line in _wrapped(_legend(document, axes), width))]
    if colour is None:
        colour = sys.stdout.isatty()
    return coloured(lines) if colour and find_spec("rich") else "\n".join(line for line, _ in lines)


def pipeline_text(entry: PlannedGrid) -> str:
    """Return a sentence about the pipeline of a grid: layers by stage, schedule, bubble and memory by pipe rank."""
    found = entry["pipeline"]
    pipe, stages = entry["grid"]["pipe"], len(found["placement"])
    order = "" if stages == pipe else f" on pipe ranks {_runs(found['placement'])}"
    recompute = dict.fromkeys(found["recompute"])
    again = next(iter(recompute)) if len(recompute) == 1 else f"by stage {_runs(found['recompute'])}"
    batches = f"{found['micro_steps']:,} micro-batch{'' if found['micro_steps'] == 1 else 'es'}"
    return (
        f"pipe={pipe}: layers by stage {_runs(found['layers'])}{order}; {found['schedule']} with {batches}, bubble "
        f"{percent(found['bubble'])}; recompute {again}; peak by pipe rank "
        f"{_runs([nbytes(size) for size in found['peak_bytes']])}."
    )


def _runs(values: Sequence[Any]) -> str:
    """Return values in a row, equal neighbours once with their number: `8 x 3, 6`."""
    runs = [(value, len(list(same))) for value, same in groupby(values)]
    return ", ".join(f"{value} x {times}" if times > 1 else str(value) for value, times in runs)


def why_text(document: PlanDocument, *, width: int | None = None) -> str:
    """Return the answer to `--why`: two grids side by side, and why one beats the other."""
    width = _terminal_width() if width is None else width
    pair = aligned(asked_pair(document), right=(1, 2, 3))
    reasons = _wrapped(document["why"]["lines"], width, bullet="- ")
    return "\n".join([why_title(document["why"]), *(f"  {row}" for row in pair), *reasons])


def asked_pair(document: PlanDocument) -> list[tuple[str, str, str, str]]:
    """Return the two grids that `--why` asked about side by side; nothing if one of them was refused.

    A row has a name, the value of the one, the value of the other, and how much more the other takes.
    """
    asked = document["why"]
    one = next((entry for entry in document["grids"] if entry["grid"] == asked["grid"]), None)
    other = next((entry for entry in document["grids"] if entry["grid"] == asked["against"]), None)
    if one is None or other is None:
        return []
    left, right = one["exposed_seconds"], other["exposed_seconds"]
    axes = [axis for axis in WAITED_FOR if axis in left or axis in right]
    hosts = [entry.get("host_seconds", 0.0) for entry in (one, other)]
    pairs = [
        ("step", one["seconds"], other["seconds"], duration),
        ("compute", one["compute_seconds"], other["compute_seconds"], duration),
        *((f"exposed over {axis}", left.get(axis, 0.0), right.get(axis, 0.0), duration) for axis in axes),
        *([("waiting for the host", *hosts, duration)] if any(hosts) else []),
        ("peak memory", one["peak_bytes"], other["peak_bytes"], nbytes),
    ]
    bubbles = [(entry.get("pipeline") or {}).get("bubble", 0.0) for entry in (one, other)]
    if any(bubbles):
        pairs.append(("bubble", *bubbles, percent))
    if document.get("training"):
        mine, theirs = one["training"], other["training"]
        pairs.append(("training", 3600 * mine["hours"], 3600 * theirs["hours"], duration))
        if mine["cost"] is not None:
            pairs.append(("cost", mine["cost"], theirs["cost"], money))
    rows = [("", grid_name(one["grid"]), grid_name(other["grid"]), "difference")]
    for name, mine, theirs, shown in pairs:
        sign = "+" if theirs > mine else "-" if theirs < mine else ""
        rows.append((name, shown(mine), shown(theirs), sign + shown(abs(theirs - mine))))
    return rows


def why_title(asked: Mapping[str, Any]) -> str:
    """Return the question of `--why`."""
    return f"Why {grid_name(asked['grid'])} and not {grid_name(asked['against'])}?"


def grid_name(grid: Mapping[str, Any]) -> str:
    """Return the axes that are longer than 1: `x=2 z=8 data=64`."""
    return str(Shape(**grid))


def order_name(entry: PlannedGrid) -> str:
    """Return the order of the axes, fastest-varying first, without those of size 1: `x z data`."""
    return " ".join(axis for axis in entry["order"] if entry["grid"][axis] > 1) or DASH


def headline(document: PlanDocument) -> str:
    """Return the subject of the plan: the model, the devices and the batch."""
    model, machine = document["model"], document["machine"]
    return (
        f"{model['name']} ({model_size(model)}) on {document['devices']:,} x {machine['device']} "
        f"({machine['name']}), {count(document['batch_tokens'])} tokens per step"
    )


def model_size(model: Mapping[str, Any]) -> str:
    """Return the parameters of a model, and of a mixture of experts also those that compute something for a token."""
    total = f"{count(model['parameters'])} parameters"
    if "experts" not in model:
        return total
    chosen = f"{model['top_k']} of {model['experts']} experts"
    return f"{total}, {count(model['active_parameters'])} active: {chosen} for a token"


def searched(document: PlanDocument) -> str:
    """Return how many grids and candidates the planner searched, and how long that took."""
    found = document["searched"]
    return (
        f"{plural(found['grids'], 'grid')}, {plural(found['candidates'], 'candidate')}, {found['simulated']:,} of them "
        f"simulated, in {duration(found['seconds'])}"
    )


def reasons_it_wins(document: PlanDocument) -> list[str]:
    """Return sentences about the best grid: its parts of a step, the hidden share, and why the next best is slower."""
    best, *others = document["grids"]
    exposed, link = sum(best["exposed_seconds"].values()), sum(best["link_seconds"].values())
    # waiting for other stages is mostly no matter of links
    sent, waited = link - best["link_seconds"].get(PIPE, 0.0), exposed - best["exposed_seconds"].get(PIPE, 0.0)
    by_axis = ", ".join(f"{axis} {duration(value)}" for axis, value in best["exposed_seconds"].items())
    late = best.get("host_seconds", 0.0)
    waits = f"and {duration(exposed)} waiting for communication ({by_axis})" if exposed else "and no waiting"
    if late:
        waits += f", and {duration(late)} waiting for the host" if exposed else f" but {duration(late)} for the host"
    computes = (
        f"{duration(best['compute_seconds'])} of computation ({percent(best['compute_seconds'] / best['seconds'])})"
    )
    said = [f"A step takes {duration(best['seconds'])}: {computes} {waits}."]
    if sent:
        hidden, inside = max(0.0, 1 - waited / sent), " inside stages" if best.get("pipeline") else ""
        said.append(f"{percent(hidden)} of the {duration(sent)} on the links{inside} is hidden behind computation.")
    if others:
        more, reason = others[0]["seconds"] - best["seconds"], others[0]["reason"]
        name = grid_name(others[0]["grid"])
        if more >= 0:
            takes = f"takes {duration(more)} ({percent(more / best['seconds'])}) longer" if more else "takes as long"
            said.append(f"The next best, {name}, {takes}{f': {reason}' if reason else ''}.")
        else:  # a robust choice need not be the fastest
            takes = f"takes {duration(-more)} ({percent(-more / best['seconds'])}) less by the machine file"
            said.append(f"{name} {takes}, but loses more if the file is off.")
    if best.get("pipeline"):
        said.append(f"Its stages, {pipeline_text(best)}")
    return [*said, *robust_text(document), *training_text(document), *goodput_text(document)[:-1]]


def robust_text(document: PlanDocument) -> list[str]:
    """Return sentences about how sure a plan is: its band, its regret, what is an estimate; and what would help."""
    best, machine, said = document["grids"][0], document["machine"], []
    if robust := document.get("robust"):
        low, high = robust["band_seconds"]
        worst, fastest = robust["worst"], robust["fastest"]
        band = f"A step takes {duration(low)} to {duration(high)}, as far as the machine file may be off."
        regret = f"at worst {percent(worst['regret'])} longer than the best of {robust['candidates']} candidates"
        chosen = f"The choice takes {regret} ({worst['scenario']})"
        if worst["regret"] is not None and worst["regret"] < 5e-4:
            chosen = f"The choice is the best of {robust['candidates']} candidates in every case"
        if fastest["chosen"]:
            said.append(f"{band} {chosen}; it is also the fastest by the file.")
        else:
            off = "does not fit" if fastest["regret"] is None else f"takes up to {percent(fastest['regret'])} longer"
            off = f"{off} ({fastest['scenario']})"
            if fastest["regret"] is not None and fastest["regret"] < 5e-4:
                off = "is about as good, but less simple"
            elif None not in (fastest["regret"], worst["regret"]) and fastest["regret"] <= worst["regret"]:
                off = f"{off}, but is less simple"  # of candidates about as good the simplest is chosen
            grid = grid_name(fastest["grid"])
            grid = f"{grid} with other settings" if fastest["grid"] == best["grid"] else grid
            said.append(f"{band} {chosen}; {grid}, {duration(fastest['seconds'])} by the file (--risk fastest), {off}.")
    if uncertain := machine.get("uncertain"):
        said.append(f"{uncertain_text(uncertain)}.")
    usable = machine["usable_bytes"]
    left = nbytes(max(0, usable - best["peak_bytes"]))
    said.append(
        f"A device needs {nbytes(best['peak_bytes'])} of the {nbytes(usable)} that it can use: {left} are left"
        f"{_saved(best)}."
    )
    if found := document.get("helps"):
        named = [one["what"] + ("" if one["gain"] is None else f" (+{percent(one['gain'])})") for one in found]
        said.append(f"What would help: {'; '.join(named)}.")
    return said


def _saved(entry: PlannedGrid) -> str:
    """Return what a grid saves memory with, and the host memory that it needs; empty if nothing."""
    chosen = {name: value for name, value in entry["policy"].items() if name.endswith("_chunk") and value}
    said = [f"policy.{name}={value}" for name, value in chosen.items()]
    if host := entry.get("host_bytes"):
        said.append(f"policy.offload=true, which takes {nbytes(host)} of the host's memory")
    return f", with {' and '.join(said)}" if said else ""


def uncertain_text(kinds: Sequence[str]) -> str:
    """Return which constants of a machine file were not measured, without a full stop."""
    return f"Estimates or fitted, which fourfold calibrate would measure: {', '.join(kinds)}"


def training_text(document: PlanDocument) -> list[str]:
    """Return a sentence about the whole training on the best grid; none if the plan is about one step only."""
    asked = document.get("training")
    if not asked:
        return []
    best = document["grids"][0]["training"]
    said = (
        f"{count(asked['tokens'])} tokens are {asked['steps']:,} steps: {duration(3600 * best['hours'])} "
        f"({best['hours'] / 24:.3g} days) on {document['devices']:,} devices, {best['device_hours']:,.0f} device-hours"
    )
    if asked["price"] is not None:
        said += f", which cost {money(best['cost'])} at {asked['price']:g} each"
    return [f"{said}; evaluation comes on top."]


def goodput_text(document: PlanDocument) -> list[str]:
    """Return sentences about the goodput of the best grid and its checkpoints; none in a plan without failures."""
    failures, best = document.get("failures"), document["grids"][0]
    if not failures:
        return []
    said = f"Goodput {best['goodput']:.1%} with failures and checkpoints"
    if best.get("training"):
        said += f"; without them it would be {duration(3600 * best['training']['undisturbed_hours'])}"
    every = f"{duration(best['interval_seconds'])} ({plural(best['interval_steps'], 'step')})"
    if failures["optimum_seconds"] > failures["recommended_seconds"]:
        every += f"; {duration(failures['optimum_seconds'])} would lose a little less on average, but more at once"
    job = (
        f"The job fails once in {duration(failures['between_failures_seconds'])}; a checkpoint has "
        f"{nbytes(failures['checkpoint_bytes'])}, stops training for {duration(failures['stop_seconds'])}, and is "
        f"complete {duration(failures['write_seconds'])} later"
    )
    return [
        f"{said}. Best checkpoint interval: {every}.",
        f"{job}. Assumed: {'; '.join(failures['assumptions'])}.",
    ]


def named_policies(entry: PlannedGrid) -> list[str]:
    """Return the policies of a grid that have a name as their value, such as activations."""
    return [name for name, value in entry["policy"].items() if isinstance(value, str)]


def next_commands(document: PlanDocument, arguments: Sequence[str]) -> list[str]:
    """Return what to run after `fourfold` with these arguments: another grid explained, the config, the training."""
    second = next((entry["grid"] for entry in document["grids"][1:]), None)
    asked = [] if second is None else ["--why", grid_name(second).replace(" ", ",")]
    found = [shlex.join(["fourfold", *arguments, *asked])] if asked else []
    if not document["config_toml"]:
        return found  # a module of the user's own
    config = config_name(document)
    if config in arguments:  # the model itself is a file of that name
        config = f"run-{config}"
    if "--config" in arguments:
        config = arguments[list(arguments).index("--config") + 1]
    else:
        found.append(shlex.join(["fourfold", *arguments, "--config", config]))
    return [*found, command(document, config)]


def config_name(document: PlanDocument) -> str:
    """Return the name under which the page saves the config of the best grid."""
    return f"{document['model']['name']}.toml"


def command(document: PlanDocument, config: str | None = None) -> str:
    """Return the command that trains the best grid once its config is saved, under `config_name` or this name."""
    each, devices = document["machine"]["devices_per_node"], document["devices"]
    train = f"train {shlex.quote(config or config_name(document))}"
    if devices <= each:
        return f"fourfold {train}"
    # The fewest nodes among which the devices can be divided evenly: torchrun starts as many ranks on each node.
    nodes = next(nodes for nodes in range(-(-devices // each), devices + 1) if devices % nodes == 0)
    ranks = f"--nnodes {nodes} --nproc-per-node {devices // nodes}"
    return f"torchrun {ranks} --rdzv-backend fourfold --rdzv-endpoint node0:29400 -m fourfold.cli {train}"


def _columns(axes: Sequence[str], scale: float, training: Any) -> dict[str, Callable[[PlannedGrid], str]]:
    """Return the columns of the table, name by name, as functions that write the cell of a grid.

    `training` is what the plan's document says about the whole training, if it does.
    """
    # Show three digits of the fastest step, whose seconds are `scale`: smaller differences decide nothing.
    places = max(1, 2 - math.floor(math.log10(scale))) if scale > 0 else 1

    def seconds(axis: str) -> Callable[[PlannedGrid], str]:
        return lambda entry: (
            f"{entry['exposed_seconds'].get(axis, 0.0):.{places}f}/{entry['link_seconds'][axis]:.{places}f}"
            if axis in entry["link_seconds"]
            else DASH
        )

    def policy(entry: PlannedGrid) -> str:
        return "/".join(SHORT.get(entry["policy"][name], entry["policy"][name]) for name in named_policies(entry))

    whole: dict[str, Callable[[PlannedGrid], str]] = {}
    if training:
        whole["hours"] = lambda entry: f"{entry['training']['hours']:,.1f}"
        if training["price"] is not None:
            whole["cost"] = lambda entry: money(entry["training"]["cost"])

    return {
        "#": lambda entry: str(entry["rank"]),
        "grid": lambda entry: grid_name(entry["grid"]),
        "order": order_name,
        "policy": policy,
        "keeps": lambda entry: KEEPS[entry["policy"]["keep_gathered"], entry["policy"]["keep_weights"]],
        "micro": lambda entry: str(entry["micro_steps"]),
        "s/step": lambda entry: f"{entry['seconds']:.{places + 1}f}",
        "tokens/s": lambda entry: count(entry["tokens_per_second"]),
        **whole,
        "MFU": lambda entry: f"{entry['mfu']:.1%}",
        "HFU": lambda entry: f"{entry['hfu']:.1%}",
        "compute": lambda entry: f"{entry['compute_seconds']:.{places}f}",
        **{axis: seconds(axis) for axis in axes},
        "peak": lambda entry: nbytes(entry["peak_bytes"]),
    }


def _fitted(
    shown: Sequence[PlannedGrid], axes: Sequence[str], training: Any, width: int | None
) -> tuple[str, list[list[str]]]:
    """Return the heading and the lines of each grid, with as many columns side by side as fit."""
    columns = _columns(axes, shown[0]["seconds"], training)
    for names in (columns, MAIN, FEW):
        beside = [name for name in names if name in columns]
        cells = [beside, *([columns[name](entry) for name in beside] for entry in shown)]
        head, *lines = aligned(cells, [place for place, name in enumerate(beside) if name not in LEFT])
        if width is None or max(map(len, (head, *lines))) <= width:
            break
    indent = " " * (2 + max(len(str(entry["rank"])) for entry in shown))
    rows = []
    for line, entry in zip(lines, shown, strict=True):
        # Lines break only between items, so that a value stays on the line of its name.
        below = [f"{name} {cell(entry)}" for name, cell in columns.items() if name not in beside]
        items = "  ".join(item.replace(" ", "\N{NO-BREAK SPACE}") for item in below)
        more = textwrap.wrap(items, width or UNLIMITED, initial_indent=indent, subsequent_indent=indent)
        rows.append([line, *(part.replace("\N{NO-BREAK SPACE}", " ") for part in more)])
    return head, rows


def _legend(document: PlanDocument, axes: Sequence[str]) -> list[str]:
    refused = document["refused"]
    by_axis = f"{', '.join(axes)}: seconds exposed / on the link. " if axes else ""
    policy = f"policy: {'/'.join(named_policies(document['grids'][0]))}. "
    keeps = "keeps: what stays gathered until backward (policy.keep_gathered, policy.keep_weights)."
    more = ""
    if refused:
        first = f"{grid_name(refused[0]['grid'])}: {refused[0]['reason']}"
        more = f"; {plural(len(refused), 'grid')} refused, such as {first}"
    lines = [f"{by_axis}order: fastest axis first. {policy}{keeps}", f"{searched(document)}{more}."]
    host = document["machine"].get("host")
    return [*lines, f"the host, {host}."] if host else lines


def _wrapped(lines: Iterable[str], width: int | None, bullet: str = "") -> list[str]:
    # A break at the hyphen of a name such as gpt-80b would make it unreadable.
    wrapper = textwrap.TextWrapper(width or UNLIMITED, bullet, " " * len(bullet), break_on_hyphens=False)
    return [part for line in lines for part in wrapper.wrap(line)]


def _terminal_width() -> int | None:
    # A pipe or a file has no width, and whoever reads it wants one line per grid.
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def coloured(lines: Iterable[tuple[str, str]]) -> str:
    """Return the text with the colours that the terminal has; with none if NO_COLOR is set."""
    from rich.console import Console
    from rich.text import Text

    out = StringIO()
    # rich writes no colours to anything but a terminal, and the text only goes there later.
    console = Console(file=out, force_terminal=True)
    for line, style in lines:
        console.print(Text(line, style=style), soft_wrap=True)
    return out.getvalue().removesuffix("\n")
