"""Every family and variant over many grids of 2 to 8 ranks, in both modes: all laws of test_families.py at length.

    python tests/wrap/soak_families.py
    python tests/wrap/soak_families.py --families llama,t5 --grids x=2,z=2:x=3     # some of them
    python tests/wrap/soak_families.py --start 120                                 # go on where a run ended

One line a case, then a summary; the exit status is 1 where a case failed. Padding, fp64 all through, accumulation,
checkpointing, and whose hands the optimizer steps through, take turns. The order is fixed: numbers of ranks in turn,
then grids, then families. Then each family once with bf16 parameters: at most twice the error of one process in bf16.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

from test_families import arrays, check

import fourfold as ff
from families import FAMILIES, Case, batch, build
from fourfold.grid import Shape
from fourfold.wrap import whole_tensors
from harness import close_pools, grid_of, pool

GRIDS = [
    Shape(x=2),
    Shape(y=2),
    Shape(z=2),
    Shape(data=2),
    Shape(x=3),
    Shape(y=3),
    Shape(z=3),
    Shape(x=2, y=2),
    Shape(x=2, z=2),
    Shape(y=2, z=2),
    Shape(x=4),
    Shape(y=4),
    Shape(x=3, z=2),
    Shape(x=2, y=2, z=2),
    Shape(x=2, y=2, data=2),
    Shape(x=4, z=2),
    Shape(y=2, z=2, data=2),
    Shape(x=8),
]
"""x and y of 3 and 8 cut through heads, or leave more ranks than heads of keys and values."""


def all_cases(families: list[str], grids: list[Shape]) -> list[Case]:
    cases = []
    for shape in sorted(grids, key=lambda shape: shape.world):
        for number, name in enumerate(families):
            for turn, activations in enumerate(("sharded", "replicated")):
                # bits of a number that differs from case to case, so that their combinations occur
                bits = len(cases) + len(cases) // 8 + number + turn
                padded = bool(bits & 1) and FAMILIES[name].batch != "images"
                cases.append(
                    Case(
                        name,
                        shape,
                        activations,
                        padded,
                        widened=bool(bits & 2),
                        through_dtensors=bool(bits & 4),
                        accumulates=bits % 5 == 0 and shape.places in (2, 4),
                        # what is widened is not when it is computed again
                        checkpoints=bits % 3 == 0 and not bits & 2 and not (padded and FAMILIES[name].eager),
                    )
                )
    return cases


def narrow_step(name: str, dtype: torch.dtype, grid: ff.Grid | None) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of one step with weights that were rounded to bf16, computed in that dtype."""
    model = build(name).bfloat16().to(dtype)
    inputs = batch(Case(name, Shape(), "sharded", padded=False), 0)
    inputs = {own: rows.to(dtype) if rows.is_floating_point() else rows for own, rows in inputs.items()}
    if grid is not None:
        model = ff.parallelize(model, grid)
        inputs = {own: ff.local_rows(rows, grid) for own, rows in inputs.items()}
    loss = model(**inputs).loss
    loss.backward()
    if grid is not None:
        found = {own: gradient.float() for own, gradient in whole_tensors(model, "gradient").items()}
    else:
        found = {own: p.grad.float() for own, p in model.named_parameters(remove_duplicate=False)}
    return loss.item(), arrays(found)


def narrow_on_ranks(name: str, shape: Shape) -> tuple[float, dict[str, Any]]:
    return narrow_step(name, torch.bfloat16, grid_of(shape))


def narrow_error(found: tuple[float, dict[str, Any]], wanted: tuple[float, dict[str, Any]]) -> float:
    """The relative error of all gradients together, and of the loss."""
    own, exact = (
        torch.cat([torch.as_tensor(g).flatten() for _, g in sorted(side[1].items())]) for side in (found, wanted)
    )
    return max(((own - exact).norm() / exact.norm()).item(), abs(found[0] - wanted[0]) / abs(wanted[0]))


def check_narrow(name: str, shape: Shape) -> str:
    """What bf16 costs on the grid and on one process, beside fp32; raises where the grid's error is more than twice."""
    exact, alone = narrow_step(name, torch.float32, None), narrow_step(name, torch.bfloat16, None)
    usual = narrow_error(alone, exact)
    worst = max(
        narrow_error(found, exact) for found in pool(shape.world).run(narrow_on_ranks, name, shape, timeout=300)
    )
    if not worst <= 2 * usual + 1e-3:
        raise ValueError(f"{worst:.1e}, where one process has {usual:.1e}")
    return f"{worst:.1e}, one process {usual:.1e}"


def shape_of(text: str) -> Shape:
    try:
        return Shape(**{axis: int(size) for axis, size in (part.split("=") for part in text.split(","))})
    except (TypeError, ValueError) as fault:
        raise argparse.ArgumentTypeError(f"a grid reads x=2,z=2, several are joined by ':'; got {text!r}") from fault


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, joined by commas; default: all")
    parser.add_argument(
        "--grids",
        type=lambda text: [shape_of(part) for part in text.split(":")],
        default=GRIDS,
        help="such as x=2,z=2:x=3; default: all of this file's",
    )
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    chosen = parser.parse_args()
    chosen.families = chosen.families.split(",")
    if unknown := sorted(set(chosen.families) - set(FAMILIES)):
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    return chosen


def main() -> int:
    chosen = options()
    cases = all_cases(chosen.families, chosen.grids)
    began, failed, worst = time.monotonic(), [], {1e-9: 0.0, 1e-5: 0.0}
    for number, case in enumerate(cases[chosen.start :], chosen.start):
        since = time.monotonic()
        try:
            error = check(pool(case.shape.world), case, timeout=300)
        except Exception as fault:
            failed.append(f"{number} {case}")
            print(f"{number} {case}: FAILED: {fault}", flush=True)
            continue
        worst[case.tolerance] = max(worst[case.tolerance], error)
        print(f"{number} {case}: {error:.1e} of {case.tolerance:.0e}, {time.monotonic() - since:.1f} s", flush=True)
    narrow = [(name, chosen.grids[number % len(chosen.grids)]) for number, name in enumerate(chosen.families)]
    for name, shape in narrow if not chosen.start else []:
        try:
            print(f"bf16 {name} {shape}: {check_narrow(name, shape)}", flush=True)
        except Exception as fault:
            failed.append(f"bf16 {name} {shape}")
            print(f"bf16 {name} {shape}: FAILED: {fault}", flush=True)
    close_pools()
    largest = ", ".join(f"{error:.1e} of {tolerance:.0e}" for tolerance, error in worst.items())
    print(f"{len(cases) - chosen.start} cases, {len(failed)} failed, largest errors {largest}")
    print(f"{time.monotonic() - began:.0f} s", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
