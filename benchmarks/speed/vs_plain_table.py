"""Print or write the table of `vs_plain_torch.py` from its results, with the bars that were reached.

python benchmarks/speed/vs_plain_table.py RESULTS.jsonl [TABLE.md]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

from benchmarks.shared.pairs import Pairs
from benchmarks.shared.tables import markdown_table, verdict

PLAIN, FOURFOLD = "plain", "fourfold"
"""The first word of a side's name."""
GPU_BAR = 1.0
"""Our best mode takes at most this part of the time of plain torch's best mode, on a GPU."""
GPU_AIMS = {"gpt-125m:8x1024": 0.9, "gpt-125m:16x128": 0.9}
"""What we aim at beyond the bar, by case."""
EAGER_BARS = {"gpt-125m:8x1024": 1.3}
"""The most of plain eager's time that our eager mode may take on a GPU, by case."""
CPU_BAR, CPU_BARS = 1.02, {"llama-tiny:16x128": 1.1}
"""The most of plain eager's time that our eager mode may take on the CPU, and the cases with another bar."""
MEMORY_BAR = 1.0
"""Our best mode reserves at most this part of the memory of plain torch's best mode."""
LOSSES = {"bf16": 0.01, "fp32": 1e-4}
"""The largest relative difference between the losses of any two sides, by the dtype of products: sums in another order
round otherwise, and AdamW's first steps magnify that."""
COLUMNS = (
    "side",
    "ms per step",
    "spread",
    "tokens/s",
    "MFU",
    "peak GiB",
    "this / best plain",
    "losses, first and last",
)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the latest result of each case, weights and set of sides."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for text in path.read_text().splitlines():
        result = json.loads(text)
        key = result["case"], result["weights"], result["device"], *(side["side"] for side in result["sides"])
        found[key] = result
    return list(found.values())


def render(path: Path) -> str:
    results = read(path)
    dates = sorted({result["date"] for result in results})
    machines = dict.fromkeys(f"{result['device']}, torch {result['torch']}" for result in results)
    commands = dict.fromkeys(result["command"] for result in results)
    head = (
        f"# One Fourfold process beside plain torch, {' and '.join(dates)}\n\n"
        "`benchmarks/speed/vs_plain_torch.py`: forward, backward, clipping and fused AdamW, from the same weights. The "
        "sides of a section took turns in one run; times are medians over rounds, spread = (max - min) / median. "
        "Ratios are medians of the ratios of each round; less is better. Peak memory is what the allocator reserves "
        "for a side during a step, pools of CUDA graphs included. MFU counts 6 FLOPs per matmul parameter and token, "
        "and half of the attention scores because attention is causal.\n\n"
        f"On {'; '.join(machines)}:\n\n```\n" + "\n".join(commands) + "\n```"
    )
    return "\n\n".join([head, *(section(result) for result in results)]) + "\n"


def section(result: dict[str, Any]) -> str:
    precision = f"{result['weights']} weights, products in {result['dtype']}"
    parts = [f"## {result['case']}: {result['parameters'] / 1e6:.0f} M parameters, {precision}, {result['device']}"]
    if result["sides"]:
        parts += ["\n".join(markdown_table(COLUMNS, [_row(side, result) for side in result["sides"]]))]
    if told := [*bars(result), *(f"{side} was not measured: {why}" for side, why in result["failures"].items())]:
        parts.append("\n".join(f"- {bar}" for bar in told))
    return "\n\n".join(parts)


def _row(side: dict[str, Any], result: dict[str, Any]) -> list[str]:
    seconds = median(side["seconds"])
    spread = (max(side["seconds"]) - min(side["seconds"])) / seconds
    rate, peak = result["tokens"] / seconds, result["peak_flops"]
    rival = best(result, PLAIN)
    return [
        side["side"],
        f"{seconds * 1e3:.2f}",
        f"{spread:.1%}",
        f"{rate:.0f}",
        f"{rate * result['flops_per_token'] / peak:.1%}" if peak else "-",
        f"{side['peak_bytes'] / 2**30:.2f}" if side["peak_bytes"] else "-",
        f"{pairs(side, rival).median:.3f}" if rival else "-",
        f"{side['losses'][0]:.4f}, {side['losses'][-1]:.4f}",
    ]


def best(result: dict[str, Any], who: str) -> dict[str, Any] | None:
    """Return the fastest side of Fourfold or of plain torch."""
    sides = [side for side in result["sides"] if side["side"].startswith(who)]
    return min(sides, key=lambda side: median(side["seconds"]), default=None)


def pairs(side: dict[str, Any], other: dict[str, Any]) -> Pairs:
    return Pairs([mine / theirs for mine, theirs in zip(side["seconds"], other["seconds"], strict=True)])


# --- bars


def bars(result: dict[str, Any]) -> Iterator[str]:
    """Yield one sentence per bar, with what was reached."""
    sides = {side["side"]: side for side in result["sides"]}
    ours, theirs = best(result, FOURFOLD), best(result, PLAIN)
    on_cpu, case = result["device"] == "cpu", result["case"]
    if ours is not None and theirs is not None and not on_cpu:
        yield from _against_best(case, ours, theirs)
    bar = CPU_BARS.get(case, CPU_BAR) if on_cpu else EAGER_BARS.get(case)
    if bar is not None and f"{FOURFOLD} eager" in sides and f"{PLAIN} eager" in sides:
        found = pairs(sides[f"{FOURFOLD} eager"], sides[f"{PLAIN} eager"])
        yield f"eager: at most {bar} of plain eager's time: {verdict(found.median <= bar)}, {found}"
    for less, more in (("eager", "compiled"), ("captured", "captured compiled")):
        if (slow := sides.get(f"{FOURFOLD} {less}")) and (quick := sides.get(f"{FOURFOLD} {more}")):
            found = pairs(quick, slow)
            yield f"{FOURFOLD} {more} is not slower than {less}: {verdict(found.not_above_one)}, {found}"
    yield from _losses(result)


def _against_best(case: str, ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    found = pairs(ours, theirs)
    text = (
        f"{ours['side']} takes at most {GPU_BAR} of the time of plain torch's best mode ({theirs['side']}): "
        f"{verdict(found.median <= GPU_BAR)}, {found}"
    )
    if (aim := GPU_AIMS.get(case)) is not None:
        text += f"; the aim of {aim} is {verdict(found.median <= aim)}"
    yield text
    if ours["peak_bytes"] and theirs["peak_bytes"]:
        ratio = ours["peak_bytes"] / theirs["peak_bytes"]
        yield f"{ours['side']} needs at most that mode's memory: {verdict(ratio <= MEMORY_BAR)}, {ratio:.3f} of it"


def _losses(result: dict[str, Any]) -> Iterator[str]:
    """Compare the losses of the first steps, step by step: all sides train the same model from the same weights."""
    if len(result["sides"]) < 2:
        return
    steps = list(zip(*(side["losses"] for side in result["sides"]), strict=True))
    apart = max((max(losses) - min(losses)) / min(losses) for losses in steps)
    most = LOSSES[result["dtype"]]
    yield f"all losses agree within {most:g} over the first {len(steps)} steps: {verdict(apart <= most)}, {apart:.2g}"


def main(arguments: Sequence[str]) -> int:
    if len(arguments) not in (1, 2):
        print(__doc__)
        return 2
    text = render(Path(arguments[0]))
    if len(arguments) == 1:
        print(text)
    else:
        Path(arguments[1]).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
