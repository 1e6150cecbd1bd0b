"""The GPU tier: parity in fp64 over NCCL, several ranks on one GPU. Needs torch and numpy, no pytest.

    FOURFOLD_TEST_DEVICE=cuda python tests/on_gpu.py

Every grid of 2, 3 and 4 ranks in both modes with rotating options, each beside plain torch on the CPU, and
its ledger beside the prediction. Start an MPS daemon first where ranks are to run at the same time.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

import torch

from fourfold.ledger import Collective
from harness import DEVICE, Ranks
from parity import errors, on_one_process, on_ranks, predicted, rotating_cases


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
        pool.close()
    print(
        f"{len(cases)} cases over NCCL on {torch.cuda.get_device_name()}, torch {torch.__version__}: "
        f"{failed} failed, largest error {worst:.1e}, {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
