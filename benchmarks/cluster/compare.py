"""Fourfold and its peers on an emulated cluster: the same model, batch and dtype, side by side in one job.

    python benchmarks/cluster/compare.py                                     # every setting; an hour, needs root
    python benchmarks/cluster/compare.py --settings 4x2-200-few --rounds 3 --lines 'DDP|pipeline'
    python benchmarks/cluster/compare.py --table                             # only table and plot, from stored runs

A setting is NODESxRANKS-MBIT-SIZE (`settings.py`). For each setting the cluster is created (`emulate.py`) and
calibrated, the planner chooses a grid, and all lines take turns in every round (`job.py`): Fourfold on every grid and
on the planned one, the published algorithm, and each peer on every mesh that it can use, with gloo's reduce-scatter and
with the minimal one. Seconds are those of the slowest rank; bytes are counted by the nodes' interfaces.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

from benchmarks.cluster import compare_table, runs
from benchmarks.cluster.emulate import EmulationUnavailableError, exit_on_signals
from benchmarks.cluster.settings import (
    FOURFOLD,
    PLANNED,
    Setting,
    grids_of,
    own_pipelines,
    peers_of,
    published_of,
)
from benchmarks.shared.workloads import Line
from fourfold.axes import AXES
from fourfold.planner.machine import Machine
from fourfold.planner.search import search
from fourfold.planner.space import Space

SETTINGS = ("4x2-200-few", "4x2-100-few", "4x2-200-many", "4x2-50-few")


def planned_line(setting: Setting, machine: Machine) -> Line:
    """Return the line that the planner chooses when it may choose everything."""
    space = Space(micro_steps=(1, 2, 4, 8), axes=AXES)
    choice = search(setting.task(machine), setting.cluster.world, space=space).best.candidate
    return Line(FOURFOLD, choice.shape, PLANNED, choice.policy, micro_batches=choice.micro_steps)


def lines_of(setting: Setting, chosen: re.Pattern[str], machine: Machine) -> list[Line]:
    """Return the planned line, and the others whose name matches."""
    planned = planned_line(setting, machine)
    print(f"{setting}: the planner chose {planned.grid}, {planned.label}", flush=True)
    others = [*grids_of(setting), *own_pipelines(setting), *published_of(setting, machine), *peers_of(setting)]
    return [planned, *(line for line in others if chosen.search(line.name))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs.add_options(parser, SETTINGS)
    parser.add_argument(
        "--lines",
        type=re.compile,
        default=re.compile(""),
        help="regular expression; measure only the planned line and those whose name matches",
    )
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure peak memory")
    parser.add_argument("--table", action="store_true", help="only make the table and the plot of the runs in --out")
    options = runs.parse(parser, "cluster/compare.py", sys.argv[1:] if arguments is None else arguments)
    try:
        with exit_on_signals():
            for setting in () if options.table else options.settings:
                found = runs.run(setting, partial(lines_of, setting, options.lines), options, memory=options.memory)
                found.write(options.out)
    except EmulationUnavailableError as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"compare: interrupted; the settings that were finished are in {options.out}", file=sys.stderr)
        return 130
    found = [runs.ClusterRun.read(path) for path in sorted(options.out.glob("*.json"))]
    # runs of `planner/validate.py --measured` have no planned line
    complete = [run for run in found if any(one.planned for one in run.results)]
    if not complete:
        print(f"compare: error: no runs in {options.out}; omit --table to measure some", file=sys.stderr)
        return 2
    for path in compare_table.write(complete, options.out.parent / options.out.name.replace("cluster", "compare")):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
