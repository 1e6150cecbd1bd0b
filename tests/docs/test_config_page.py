"""docs/config.md is what its script writes now, with every key of a config."""

from __future__ import annotations

import runpy
from pathlib import Path

from fourfold.train.config import TrainConfig
from fourfold.train.schema import keys_of

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_the_script_writes() -> None:
    written = runpy.run_path(str(DOCS / "write_config.py"))["page"]()
    assert (DOCS / "config.md").read_text(encoding="utf-8") == written, "it is old: python docs/write_config.py"
    for key in keys_of(TrainConfig):
        assert f"\n| `{key.path.partition('.')[2]}` | {key.meaning} |" in written
