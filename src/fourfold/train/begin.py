"""How a run begins: its folder, what records it, who watches over it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fourfold.atomic import write_text
from fourfold.train.checkpoints import RunSaver, Start, earlier_parts, remove_newer
from fourfold.train.guard import Guard
from fourfold.train.loop import Run
from fourfold.train.record import Owned, Sink, make_folder, read_facts, rewind


def begin(run: Run, sinks: Callable[[], Sequence[Sink]], start: Start | None = None) -> None:
    """Rank 0 writes what the run is and opens what records it; what fails there fails on all ranks.

    Where a run is taken up, what was recorded or saved after the step that it goes on from is taken back.
    """
    start = start or Start()

    def write() -> None:
        make_folder(run.out)
        run.owned = Owned(run.out)
        remove_newer(start)
        write_text(run.out / "config.toml", run.config.stored(run.out).toml())
        if start.resumes:
            rewind(run.out / "metrics.jsonl", start.step)
        run.describe(earlier_parts(read_facts(run.out), start.step) if start.resumes else [])
        run.sinks = list(sinks())
        if start.step:
            where = {"grid": str(run.grid.shape), "checkpoint": str(start.checkpoint)}
            left_out = {} if start.skipped is None else {"passed_over": str(start.skipped)}
            run._record({"event": "resumed", "step": start.step, **where, **left_out})

    def find() -> None:
        if run.config.checkpoint.save and not (run.out / "run.json").exists():
            raise FileNotFoundError(
                f"{run.out.absolute()}, which rank 0 has made, is not there on rank {run.grid.rank}; give --out on a "
                "file system that all nodes share, or checkpoint.save=false"
            )

    try:
        run.grid.run_on_rank0("starting the run", write)
        run.grid.run_together("finding the run's folder", find)
        if run.config.checkpoint.save:
            run.saving = RunSaver(run.config, run.grid, run.out)
        if run.grid.shape.world > 1:
            run.guard = Guard(run.grid, run.out, run.config.watch.deadline)
    except BaseException:
        if run.owned is not None:
            run.owned.release()
        raise
