"""The figures of the pages on a phone and on a screen: no text lies on another, none is cut off, ticks are numbers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from test_plan_page import plan
from test_report import records, write_run

from browser import attribute, opened
from fourfold.expert_counts import CountsFile, StepCounts
from fourfold.planner.explain import add_training
from fourfold.planner.goodput import FailureRates
from fourfold.report.plan_page import write_plan_page
from fourfold.report.run_page import write_report
from fourfold.report.units import nbytes, percent

READER = """
setTimeout(() => {
  const overlaps = [], outside = [], ticks = {};
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    const shown = (one) => one.textContent.trim() && !one.closest(".hoverlayer") && one.getBoundingClientRect().width;
    const texts = [...plot.querySelectorAll("svg text")].filter(shown);
    const boxes = texts.map((one) => one.getBoundingClientRect());
    const turned = texts.map((one) => /rotate\\((?!0[,)])/.test(one.getAttribute("transform") ?? ""));
    boxes.forEach((a, first) => boxes.slice(first + 1).forEach((b, after) => {
      const second = first + 1 + after;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 2 && !(turned[first] && turned[second])) {
        overlaps.push([plot.id, texts[first].textContent, texts[second].textContent]);
      }
    }));
    boxes.forEach((box, place) => {
      if (box.left < -1 || box.right > innerWidth + 1) outside.push([plot.id, texts[place].textContent]);
    });
    ticks[plot.id] = [...plot.querySelectorAll(".xtick text")].map((one) => one.textContent);
  }
  const memory = document.querySelector("#memory .hint")?.textContent ?? "";
  document.documentElement.dataset.seen = JSON.stringify({ overlaps, outside, ticks, memory });
}, 2500);
"""


def seen_in(page: Path, width: int) -> dict[str, Any]:
    page.write_text(page.read_text().replace("</body>", f"<script>{READER}</script></body>"))
    html = opened(page, width=width)
    assert attribute(html, "errors") is None
    return json.loads(attribute(html, "seen") or "{}")


def paid_plan() -> dict[str, Any]:
    """A plan with a training and its price, and grids whose seconds differ by more than ten."""
    document = plan()
    for turn, entry in enumerate(document["grids"]):
        entry["seconds"] *= 1 + turn / 8
    add_training(document, FailureRates(), 10**12, 2.5)
    return document


def run_of_a_mixture(folder: Path, steps: int) -> Path:
    write_run(folder, records(20))
    file, chance = CountsFile(folder, 3, 8), random.Random(0)
    for step in range(steps - 20, steps):
        file.write(StepCounts(step, [[chance.randint(50, 200) for _ in range(8)] for _ in range(3)]))
    file.close()
    return folder


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
def test_a_plan_can_be_read(tmp_path: Path, width: int) -> None:
    document = paid_plan()
    seen = seen_in(write_plan_page(document, tmp_path / "plan.html"), width)
    assert seen["overlaps"] == seen["outside"] == []
    numbers = [float(text.replace(",", "")) for text in seen["ticks"]["tradeoff"]]
    assert numbers == sorted(numbers) and len(numbers) > 3, seen["ticks"]["tradeoff"]
    best, usable = document["grids"][0]["peak_bytes"], document["machine"]["usable_bytes"]
    assert seen["memory"].endswith(f": {nbytes(best)}, {percent(best / usable)} of {nbytes(usable)} of usable memory.")


@pytest.mark.parametrize("width", [390, pytest.param(1280, marks=pytest.mark.slow)])
def test_a_run_can_be_read(tmp_path: Path, width: int) -> None:
    seen = seen_in(write_report(run_of_a_mixture(tmp_path / "run", 1_250_000)), width)
    assert "experts" in seen["ticks"]
    assert seen["overlaps"] == seen["outside"] == []
