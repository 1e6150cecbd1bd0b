"""200 recorded steps beside 200 eager ones over NCCL, 4 ranks on one GPU: the same losses and norms, bit for bit.

    FOURFOLD_TEST_DEVICE=cuda python tests/train/soak_graph.py [grid ...]

Both runs save, evaluate and skip a step; the recorded one is also stopped in the middle and resumed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

import faults
import warm
from fourfold.params import local_of
from harness import DEVICE
from runs import column, lines_of

STEPS = 200
BAD = 30
"""The step that is skipped, because a parameter is not a number while it is computed."""


def install() -> None:
    """Poison a parameter of every rank during one step."""
    from fourfold.train.loop import Run

    os.environ |= {"NCCL_HOSTID": f"rank-{os.environ['RANK']}", "NCCL_IB_DISABLE": "1"}
    torch.use_deterministic_algorithms(True)
    launch = Run._launch

    def launched(run: Run, step: int) -> None:
        if step != BAD:
            return launch(run, step)
        first = local_of(next(iter(run.model.parameters()))).detach().view(-1)[:1]
        kept = first.clone()
        first.fill_(float("nan"))
        launch(run, step)
        first.copy_(kept)
        return None

    Run._launch = launched  # type: ignore[method-assign]


def command(*arguments: str) -> int:
    """Run `fourfold` with these arguments on ranks that share the GPU."""
    from fourfold.cli import main
    from fourfold.commands import train
    from fourfold.train import launch

    tempfile.tempdir = None
    train.wanted_ranks = lambda config, *_: config.grid.shape.world
    start = "\nfrom fourfold.cli"
    launch.RANK = launch.RANK.replace(start, f"\nimport soak_graph\nsoak_graph.install(){start}")
    with warm.ranks():
        return main(arguments)


def run(folder: Path, *arguments: str) -> str:
    said = folder / "said.txt"
    code = warm.Process(command, *arguments, stdout=said, stderr=said).wait(500)
    if code:
        raise RuntimeError(f"exit code {code}: {said.read_text()[-3000:]}")
    return said.read_text()


def compare(grid: str, folder: Path, data: str) -> str:
    """Train all runs on this grid; return what differs, or how fast they were."""
    folder.mkdir()
    more = ["--set", "train.evaluate_every=20", "--set", "checkpoint.every=50", "--set", "model.dropout=0.1"]
    more += ["--set", "model.attention_dropout=0", "--set", "model.layers=2", "--set", "policy.dtype=bf16"]
    outs = {}
    for kind in ("off", "auto"):
        out = outs[kind] = folder / kind
        given = faults.arguments(out, grid, data, *more, "--set", f"train.graph={kind}")
        if kind == "auto":
            run(folder, *given, "--steps", str(STEPS))
            resumed = folder / "resumed"
            given = faults.arguments(resumed, grid, data, *more, "--set", "train.graph=auto")
            run(folder, *given, "--steps", str(STEPS // 2))
            run(folder, "train", "--resume", str(resumed), "--device", DEVICE, "--steps", str(STEPS))
            outs["resumed"] = resumed
        else:
            run(folder, *given, "--steps", str(STEPS))
    notes = [line["said"] for line in lines_of(outs["auto"]) if line["event"] == "note"]
    if any("not replayed" in note for note in notes):
        return f"FAILED: {notes}"
    for kind in ("auto", "resumed"):
        for event, key in (("step", "loss"), ("step", "grad_norm"), ("step", "skipped"), ("evaluation", "loss")):
            one, other = ([str(value) for value in column(outs[name], event, key)] for name in ("off", kind))
            if one != other:
                first = next(place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
                return f"FAILED: {event} {key} of {kind} differs first at {first}: {one[first]} and {other[first]}"
    if sum(column(outs["auto"], "step", "skipped")) != 1:
        return "FAILED: no step was skipped"
    times = {kind: sorted(column(outs[kind], "step", "seconds"))[STEPS // 2] * 1e3 for kind in ("off", "auto")}
    return f"ok, median step {times['off']:.1f} ms eager, {times['auto']:.1f} ms replayed"


def main(grids: list[str]) -> int:
    if DEVICE != "cuda":
        print("nothing is recorded on the CPU, so this only shows that runs resume; set FOURFOLD_TEST_DEVICE=cuda")
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        data = Path(name, "data.txt")
        data.write_text("\n".join(str(number**3) for number in range(20_000)))
        for number, grid in enumerate(grids or ["x=2,z=2", "z=2,data=2"]):
            found = compare(grid, Path(name, str(number)), str(data))
            failed += found.startswith("FAILED")
            print(f"{grid}: {found}", flush=True)
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
