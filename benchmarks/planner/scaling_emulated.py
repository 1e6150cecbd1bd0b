"""Weak and strong scaling on the emulated cluster, for the plots of the scaling study.

    python benchmarks/planner/scaling_emulated.py       # needs root; then: python benchmarks/planner/scaling.py

It measures from one node of two ranks to four nodes. In the strong series the batch is fixed; in the weak series it
grows with the number of ranks. All ranks share the machine's cores, so in the weak series computation takes longer with
more ranks: the figure that can be compared is the share of a step that is computation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`


from benchmarks.cluster.compare import planned_line
from benchmarks.cluster.emulate import Cluster, ClusterShape, EmulationUnavailableError, exit_on_signals
from benchmarks.cluster.runs import LineResult, calibrate, measure
from benchmarks.cluster.settings import MINIMAL, WORKLOADS, Setting, published_of
from benchmarks.planner.scaling_measured import KINDS, Measured
from benchmarks.shared.tables import RESULTS
from benchmarks.shared.workloads import Line
from fourfold.grid import Shape
from fourfold.planner.machine import Machine
from fourfold.planner.price import Candidate, price

NODES, RANKS = (1, 2, 4), 2
ROWS_OF_RANK = 2
"""Rows per rank in the weak series; the strong series always has the rows of the largest cluster."""


def settings_of(kind: str, mbit: float) -> Iterator[Setting]:
    for nodes in NODES:
        rows = ROWS_OF_RANK * RANKS * (nodes if kind == "weak" else max(NODES))
        yield Setting(ClusterShape(nodes, RANKS, mbit), replace(WORKLOADS["few"], rows=rows))


def lines_of(setting: Setting, machine: Machine) -> list[Line]:
    """Return Fourfold as planned, the published algorithm's first choice, and the peers that shard the model."""
    world, inside = setting.cluster.world, setting.cluster.ranks
    found = [
        planned_line(setting, machine),
        *published_of(setting, machine)[:1],
        Line("FSDP2", Shape(z=world), MINIMAL),
        Line("TP", Shape(x=world), MINIMAL),
    ]
    if world > inside:
        found.append(Line("FSDP2 x TP", Shape(x=inside, z=world // inside), MINIMAL))
    return found


def measure_setting(kind: str, setting: Setting, options: argparse.Namespace) -> list[Measured]:
    with Cluster(setting.cluster) as cluster:
        machine = calibrate(cluster, options.calibrate)
        lines = lines_of(setting, machine)
        results = measure(cluster, setting, lines, rounds=options.rounds, seconds=600)
    ours = results[0]
    if ours.compute is None:
        raise RuntimeError(f"{ours.name} was not measured on {setting}: {ours.error}")
    rows = lines[0].shape.z * lines[0].shape.data
    choice = Candidate(lines[0].shape, lines[0].policy, setting.workload.rows // rows, 1)
    predicted = price(setting.task(machine), choice).seconds
    return [
        _measured(one, kind, setting, predicted if one is ours else None, ours.compute)
        for one in results
        if one.measured
    ]


def _measured(one: LineResult, kind: str, setting: Setting, predicted: float | None, compute: float) -> Measured:
    side = {"published": "replicated"}.get(one.kind, one.kind)
    model = f"4.3M, {setting.cluster.mbit:g} Mbit/s"
    return Measured(side, setting.cluster.world, str(one.shape), model, one.step, predicted, kind, compute)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=400.0, help="Mbit/s of each node's link; default %(default)g")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calibrate", type=float, default=90.0, help="seconds to calibrate each cluster")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-emulated-scaling.json")
    options = parser.parse_args(arguments)
    found: list[Measured] = []
    try:
        with exit_on_signals():
            for kind in KINDS:
                for setting in settings_of(kind, options.mbit):
                    print(f"{kind}: {setting}", flush=True)
                    found += measure_setting(kind, setting, options)
    except EmulationUnavailableError as error:
        print(f"scaling_emulated: error: {error}", file=sys.stderr)
        return 2
    options.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    print(f"wrote {options.out}; python benchmarks/planner/scaling.py draws it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
