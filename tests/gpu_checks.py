"""Runs checks on a GPU one after another and prints a line for each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from harness import DEVICE, Ranks, pool

Check = Callable[[], Sequence[str]]
"""Returns what each rank found wrong, empty texts if nothing; a text that starts with "ok" is shown and fine."""


def run_checks(checks: Mapping[str, Check], names: Sequence[str]) -> int:
    """Run the checks whose names contain one of these, or all; return the exit code."""
    if DEVICE != "cuda" or not torch.cuda.is_available():
        print("set FOURFOLD_TEST_DEVICE=cuda on a machine with a GPU")
        return 2
    failed = 0
    for name, check in checks.items():
        if names and not any(part in name for part in names):
            continue
        began = time.monotonic()
        try:
            found = check()
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        wrong = [text for text in found if text and not text.startswith("ok")]
        failed += bool(wrong)
        said = (wrong or found)[0].removeprefix("ok").strip()
        print(f"{'FAILED' if wrong else 'ok    '} {time.monotonic() - began:5.1f} s {name}: {said}", flush=True)
    return failed > 0


def on_ranks(world: int, job: Callable[..., str], *args: object) -> Check:
    """Return a check that runs on so many ranks, which all GPU checks share."""

    def check() -> Sequence[str]:
        ranks: Ranks = pool(world)
        return ranks.run(job, *args, timeout=200)

    return check
