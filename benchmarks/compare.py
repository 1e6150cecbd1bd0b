"""Fourfold and its peers on an emulated cluster: the same model, batch and dtype, side by side in one job.

    python benchmarks/compare.py                                     # every setting; about an hour, needs root
    python benchmarks/compare.py --settings 4x2-200-few --rounds 3
    python benchmarks/compare.py --table                             # table and plot again from what was measured

A setting is NODESxRANKS-MBIT-SIZE (`settings.py`). For each, the cluster is made (`cluster.py`) and calibrated, the
planner chooses, and all lines take turns in every round (`cluster_job.py`): Fourfold on every grid and as planned, the
published algorithm, and each peer with gloo's reduce-scatter and with the minimal one underneath. Seconds are those of
the slowest rank, bytes those that the nodes' interfaces have counted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import compare_table
import emulated
from cluster import NotHereError, ending_in_order
from fourfold.planner.machine import Machine
from fourfold.planner.search import Space, search
from settings import FOURFOLD, PLANNED, Setting, grids_of, peers_of, published_of
from sides import Line

SETTINGS = ("4x2-200-few", "4x2-100-few", "4x2-200-many", "4x2-50-few")


def planned_line(setting: Setting, machine: Machine) -> Line:
    """What the planner chooses when everything is free."""
    choice = search(setting.task(machine), setting.cluster.world, space=Space(micro_steps=(1,))).best.choice
    return Line(FOURFOLD, choice.shape, PLANNED, choice.policy)


def lines_of(setting: Setting, machine: Machine) -> list[Line]:
    planned = planned_line(setting, machine)
    print(f"{setting}: the planner chose {planned.shape}", flush=True)
    return [planned, *grids_of(setting), *published_of(setting, machine), *peers_of(setting)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    emulated.add_options(parser, SETTINGS)
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="do not measure peak memory")
    parser.add_argument("--table", action="store_true", help="measure nothing: table and plot of what is in --out")
    options = emulated.parse(parser, "compare.py", sys.argv[1:] if arguments is None else arguments)
    try:
        with ending_in_order():
            for setting in () if options.table else options.settings:
                found = emulated.run(setting, partial(lines_of, setting), options, memory=options.memory)
                found.write(options.out)
    except NotHereError as error:
        print(f"compare: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"compare: interrupted; settings that were complete are in {options.out}", file=sys.stderr)
        return 130
    found = [emulated.Run.read(path) for path in sorted(options.out.glob("*.json"))]
    runs = [run for run in found if any(one.variant == PLANNED for one in run.results)]  # others are of grids alone
    if not runs:
        print(f"compare: error: no runs in {options.out}; leave --table away to measure some", file=sys.stderr)
        return 2
    for path in compare_table.write(runs, options.out.parent / options.out.name.replace("cluster", "compare")):
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
