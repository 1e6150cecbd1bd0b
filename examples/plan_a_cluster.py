"""Plan a cluster from Python, without a device.

    python examples/plan_a_cluster.py

Ranks the grids of a model on a machine, and shows what a network with twice the bandwidth would gain. For another
model, machine and number of devices:

    python examples/plan_a_cluster.py --model gpt-80b --machine frontier --devices 1024 --rows 8192
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

import fourfold as ff
from fourfold.planner.grid_plan import GridPlan
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Task
from fourfold.planner.search import search


def table(plan: GridPlan, top: int) -> str:
    """Return the fastest grids with their throughput, exposed communication and peak memory."""
    lines = [f"{'grid':38}{'s/step':>8}{'tokens/s':>10}{'MFU':>7}{'exposed s':>11}{'peak GiB':>10}"]
    for found in plan.ranked[:top]:
        exposed = sum(found.totals.exposed.values())
        memory = found.memory.total / 2**30
        lines.append(
            f"{found.candidate.shape!s:38}{found.seconds:8.2f}{found.tokens_per_second:10,.0f}{found.mfu:7.1%}"
            f"{exposed:11.2f}{memory:10.1f}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> tuple[GridPlan, GridPlan]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-20b", help="a published size")
    parser.add_argument("--machine", default="perlmutter", help="a known machine, or a file from `fourfold calibrate`")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64, help="sequences per step")
    parser.add_argument("--top", type=int, default=5, help="grids to show")
    given = parser.parse_args(arguments)

    config, machine = ff.models.config(given.model), load_machine(given.machine)
    if machine.between is None:
        parser.error(f"{machine.name} has only one node and so no network; choose a machine with several nodes")
    task = Task(config, machine, given.rows, config.seq)
    now = search(task, given.devices, top=given.top)
    print(f"{given.model} on {given.devices} devices of {machine.name}\n{table(now, given.top)}\n")

    network = replace(machine.between, bandwidth=2 * machine.between.bandwidth)
    wider = replace(machine, name=f"{machine.name} with twice the network", between=network)
    then = search(replace(task, machine=wider), given.devices, top=given.top)
    print(f"the same with twice the bandwidth between nodes\n{table(then, given.top)}\n")

    gain = now.best.seconds / then.best.seconds - 1
    print(f"{now.best.candidate.shape} now, {then.best.candidate.shape} then: {gain:.1%} more tokens per second")
    return now, then


if __name__ == "__main__":
    main()
