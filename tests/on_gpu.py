"""The GPU tier: parity in fp64 over NCCL, several ranks on one GPU. Needs torch and numpy, no pytest.

    FOURFOLD_TEST_DEVICE=cuda python tests/on_gpu.py

Every grid of 2, 3 and 4 ranks in both modes with rotating options, each beside plain torch on the CPU, and
its ledger beside the prediction. Start an MPS daemon first where ranks are to run at the same time.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

import alarmed
import fourfold as ff
from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.watch.tape import DIAGNOSIS
from harness import DEVICE, RankFailed, Ranks, grid_of
from parity import errors, on_one_process, on_ranks, predicted, rotating_cases


def step_without_waiting() -> float:
    """A training step during which the host must not wait for the GPU."""
    grid = grid_of(Shape(x=2, z=2))
    model = ff.models.build("llama-tiny", grid, policy=ff.Policy(compute_dtype=torch.bfloat16))
    optimizer = ff.optim.AdamW(model, lr=1e-3)
    tokens = ff.local_rows(torch.arange(64).view(4, 16), grid).to(grid.device)
    for mode in ("default", "error"):  # the first step compares the ranks' rows
        torch.cuda.set_sync_debug_mode(mode)
        loss = model(tokens, tokens, count=64)
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    return loss.item()


def compiled_and_not(shape: Shape) -> float:
    """The largest relative difference of losses and norms that compiling makes in fp64, packed documents included."""
    grid = grid_of(shape)
    found: list[list[float]] = []
    for compiled in (False, True):
        values: list[float] = []
        for name in ("gpt-tiny", "llama-tiny"):
            policy = ff.Policy(compile=compiled, recompute="attention")
            model = ff.models.build(name, grid, policy=policy, dtype=torch.float64)
            optimizer = ff.optim.AdamW(model, lr=1e-2)
            rows = ff.local_rows(torch.arange(64).view(4, 16), grid).to(grid.device)
            positions = (torch.arange(16, device=grid.device) % 6).expand_as(rows).contiguous()
            for given in (None, positions, None):
                loss = model(rows, rows, positions=given)
                loss.backward()
                values += [loss.item(), optimizer.clip_and_step(1.0).norm.item()]
                optimizer.zero_grad()
        found.append(values)
    return max(abs(a - b) / abs(a) for a, b in zip(*found, strict=True))


def refuse_bad_ids() -> str:
    grid = grid_of(Shape(x=2, z=2))
    model = ff.models.build("gpt-tiny", grid, policy=ff.Policy(check_inputs=True))
    tokens = torch.arange(16, device=grid.device).view(2, 8) + (1000 if grid.coords["z"] else 0)
    try:
        model(tokens, tokens)
    except ValueError as error:
        return str(error)
    return "no error"


def alarms(pool: Ranks) -> Iterator[bool]:
    """Whether hosts that wait for their devices, or for each other's word, name the rank that is stopped, late or dead;
    of a dead one they know long before their deadline."""
    soon = alarmed.DEADLINE
    for fault, deadline in {"stop": soon, "delay": soon, "die": 600.0, "die quietly": 600.0}.items():
        for _ in range(2):  # where a process was killed, the service that shares the GPU refuses the next ones once
            with suppress(RankFailed):
                pool.run(alarmed.ready, timeout=120)
                break
        with tempfile.TemporaryDirectory() as folder:
            with suppress(RankFailed):
                pool.run(alarmed.program, folder, fault, 1, deadline, timeout=60, moment=20)
            told = Path(folder, DIAGNOSIS)
            text = told.read_text() if told.exists() else "no diagnosis"
            print(f"a rank that does not come ({fault}): {text.splitlines()[0]}", flush=True)
            yield text.startswith("step 3: ") and "rank 1 never arrived" in text.splitlines()[0]


def main() -> int:
    if DEVICE != "cuda" or not torch.cuda.is_available():
        print("set FOURFOLD_TEST_DEVICE=cuda on a machine with a GPU")
        return 2
    began, failed, worst = time.monotonic(), 0, 0.0
    cases = [case for case in rotating_cases() if case.shape.world in (2, 3, 4)]
    for world in (2, 3, 4):
        pool = Ranks(world)
        for case in (case for case in cases if case.shape.world == world):
            pool.start(on_ranks, case)
            one = on_one_process(case)
            found = pool.results(timeout=120)
            error = max(errors(case, one, found).values())
            ledger = all(
                Counter(Collective(*record) for record in result["records"]) == Counter(predicted(case, rank))
                for rank, result in enumerate(found)
            )
            worst = max(worst, error)
            if error > 1e-10 or not ledger:
                failed += 1
                print(f"FAILED {case}: error {error:.1e}, ledger {'equal' if ledger else 'differs'}", flush=True)
        if world == 4:
            print("a bf16 step without a host wait, losses:", pool.run(step_without_waiting))
            differences = [
                max(pool.run(compiled_and_not, shape, timeout=300)) for shape in (Shape(x=2, y=2), Shape(z=4))
            ]
            print("compiled regions beside eager ones in fp64, largest differences:", differences)
            failed += sum(not difference < 1e-10 for difference in differences)
            refusals = pool.run(refuse_bad_ids)
            failed += sum("vocab=257" not in text and "another place" not in text for text in refusals)
            failed += sum(not found for found in alarms(pool))
        pool.close()
    print(
        f"{len(cases)} cases over NCCL on {torch.cuda.get_device_name()}, torch {torch.__version__}: "
        f"{failed} failed, largest error {worst:.1e}, {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
