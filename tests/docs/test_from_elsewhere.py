"""The tables of docs/from_elsewhere.md say what the table of synonyms says, about keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fourfold.synonyms import find_synonym
from fourfold.train.config import TrainConfig
from fourfold.train.schema import keys_of

PAGE = (Path(__file__).parents[2] / "docs" / "from_elsewhere.md").read_text(encoding="utf-8")
KEYS = [key.path for key in keys_of(TrainConfig)]
FRAMEWORKS = ("torchtitan", "Megatron-LM", "TrainingArguments", "Lightning", "DeepSpeed")
"""The tables whose first column has names of another framework, and whose second has keys of ours."""


def rows_of(framework: str) -> list[tuple[str, str]]:
    table = PAGE.partition(f"\n| {framework} | here |\n|---|---|\n")[2].partition("\n\n")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [(theirs, ours) for theirs, ours in cells]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_table_agrees_with_the_synonyms(framework: str) -> None:
    rows = rows_of(framework)
    assert len(rows) > 9
    for theirs, ours in rows:
        for word in re.findall(r"`(-*[a-z][\w.-]*)`", theirs):
            found = find_synonym(word)
            assert found is not None, word
            if found.key or found.option:
                assert f"`{found.key or found.option}`" in ours, word
            else:  # there is nothing like it, or several keys do it
                assert ours == "not available" or re.findall(r"`(\w+\.\w+)`", ours)[0] in found.how, word


def test_every_key_of_the_page_exists() -> None:
    sections = "|".join({key.partition(".")[0] for key in KEYS})
    tables = "\n".join(ours for framework in FRAMEWORKS for _, ours in rows_of(framework))
    named = re.findall(rf"`((?:{sections})\.\w+)`", tables)
    assert len(named) > 80
    assert set(named) <= set(KEYS)
