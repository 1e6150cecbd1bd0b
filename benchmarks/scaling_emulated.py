"""Weak and strong scaling on the emulated cluster, for the plots of the scaling study.

    python benchmarks/scaling_emulated.py               # needs root; then: python benchmarks/scaling.py

From one node of two ranks to four nodes. Strong: the batch stays, weak: it grows with the ranks. All ranks share the
machine's cores, so computation alone takes longer with more of them in the weak series: what scales is the share of a
step that is computation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

import emulated
from cluster import Cluster, NotHereError, Shape, ending_in_order
from compare import planned_line
from emulated import Result
from fourfold import Shape as Grid
from fourfold.planner.machine import Machine
from fourfold.planner.price import Choice, price
from scaling_measured import KINDS, Measured
from settings import MINIMAL, SIZES, Setting, published_of
from sides import Line

NODES, RANKS = (1, 2, 4), 2
ROWS_OF_RANK = 2
"""In the weak series; the strong one has those of the most ranks throughout."""


def settings_of(kind: str, mbit: float) -> Iterator[Setting]:
    for nodes in NODES:
        rows = ROWS_OF_RANK * RANKS * (nodes if kind == "weak" else max(NODES))
        yield Setting(Shape(nodes, RANKS, mbit), replace(SIZES["few"], rows=rows))


def lines_of(setting: Setting, machine: Machine) -> list[Line]:
    """Fourfold as planned, the published algorithm's first choice, and the peers that cut the model."""
    world, inside = setting.cluster.world, setting.cluster.ranks
    found = [
        planned_line(setting, machine),
        *published_of(setting, machine)[:1],
        Line("FSDP2", Grid(z=world), MINIMAL),
        Line("TP", Grid(x=world), MINIMAL),
    ]
    if world > inside:
        found.append(Line("FSDP2 x TP", Grid(x=inside, z=world // inside), MINIMAL))
    return found


def measure(kind: str, setting: Setting, options: argparse.Namespace) -> list[Measured]:
    with Cluster(setting.cluster) as cluster:
        machine = emulated.calibrate(cluster, options.calibrate)
        lines = lines_of(setting, machine)
        results = emulated.measure(cluster, setting, lines, rounds=options.rounds, seconds=600)
    ours = results[0]
    if ours.compute is None:
        raise RuntimeError(f"{ours.name} was not measured on {setting}: {ours.error}")
    rows = lines[0].shape.z * lines[0].shape.data
    choice = Choice(lines[0].shape, lines[0].policy, setting.size.rows // rows, 1)
    predicted = price(setting.task(machine), choice).seconds
    return [
        _measured(one, kind, setting, predicted if one is ours else None, ours.compute)
        for one in results
        if one.measured
    ]


def _measured(one: Result, kind: str, setting: Setting, predicted: float | None, compute: float) -> Measured:
    side = {"published": "replicated"}.get(one.kind, one.kind)
    model = f"4.3M, {setting.cluster.mbit:g} Mbit/s"
    return Measured(side, setting.cluster.world, str(one.shape), model, one.step, predicted, kind, compute)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=400.0, help="of each node's link; default %(default)g")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calibrate", type=float, default=90.0, help="seconds for calibrating each cluster")
    parser.add_argument("--out", type=Path, default=emulated.RESULTS / f"{date.today()}-emulated-scaling.json")
    options = parser.parse_args(arguments)
    found: list[Measured] = []
    try:
        with ending_in_order():
            for kind in KINDS:
                for setting in settings_of(kind, options.mbit):
                    print(f"{kind}: {setting}", flush=True)
                    found += measure(kind, setting, options)
    except NotHereError as error:
        print(f"scaling_emulated: error: {error}", file=sys.stderr)
        return 2
    options.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print(f"wrote {options.out}; python benchmarks/scaling.py draws it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
