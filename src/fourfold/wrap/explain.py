"""`explain`: what every module of a parallelised model does on the grid, and why."""

from __future__ import annotations

from torch import nn

from fourfold.wrap.plan import pattern_of
from fourfold.wrap.run import Run
from fourfold.wrap.swap import adapters_of


def explain(model: nn.Module) -> str:
    """A line per module (blocks that are alike once): its layout, who communicates what, and why that choice.

    After a pass also the operations for which tensors were made whole, which are where time can be saved.
    """
    rows: dict[tuple[str, ...], list[str]] = {}
    run: Run | None = None
    for name, module in model.named_modules():
        for adapter in adapters_of(module):
            run = adapter.run
            pattern = pattern_of(name) or "(the model)"
            layout, travels = adapter.describe()
            rows.setdefault((pattern, type(module).__name__, layout, travels, adapter.why), []).append(name)
    if run is None:
        raise ValueError(f"{type(model).__name__} is not parallelised; call ff.parallelize(model, grid) first")
    head = f"{type(model).__name__} on {run.grid}, {run.policy.activations} activations"
    lines = [head, *_table([("module", "kind", "layout", "communicates", "why"), *rows])]
    lines.append("batch in one part (halves=1): a module's own code runs it as one")
    if run.own_losses:
        lines.append(
            "torch's losses inside the model are each place's own: they are called once per row, or by some places"
        )
    if run.unchecked:
        lines.append(f"whether rows depend on each other could not be checked: {run.unchecked}")
    if run.made_whole:
        lines += ["", "Made whole in the last pass (the operation is right, and slower than on parts):"]
        lines += [f"  {count} x {operation} {place}" for (place, operation), count in run.made_whole.most_common()]
    return "\n".join(lines)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
