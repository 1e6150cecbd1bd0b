"""Write docs/config.md: every key of a run's config, from the docstrings of the sections' fields.

python docs/write_config.py
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from fourfold.synonyms import Synonym, synonyms
from fourfold.train.config import TrainConfig
from fourfold.train.schema import ConfigKey, keys_of, sections_of

PAGE = Path(__file__).parent / "config.md"
HEAD = """\
# Config reference

<!-- written by docs/write_config.py; the texts are the docstrings in src/fourfold -->

Every key of the config of a run. A config is a TOML file with these sections, `fourfold train run.toml`; on the command
line a key is changed with `--set`, as below. Keys that are left out have their defaults.

```bash
fourfold train --model gpt-tiny --print-config > run.toml
fourfold train run.toml --set optimizer.learning_rate=3e-4 --set batch.rows=32 --steps 10 --out runs/one
```

The first command writes the whole config of a run, resolved for this machine, with these texts as comments. An unknown
key or a value of another type is an error that names the nearest key or the allowed values. A name from another
framework, such as `lr` or `max_steps`, is answered with the key of the same meaning;
[coming from elsewhere](from_elsewhere.md) compares them.
"""
ELSEWHERE = """\
## Names elsewhere

What torchtitan, Megatron-LM, Hugging Face's Trainer, accelerate, Lightning and DeepSpeed call these keys. Whoever
writes one of these names, in a config, after `--set` or as an option, gets an error with the name and value to write
here.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    about = sections_of(TrainConfig)
    for section, keys in groupby(keys_of(TrainConfig), lambda key: key.path.partition(".")[0]):
        parts.append(f"## {section}\n\n{about[section]}\n")
        rows = [row(key) for key in keys]
        parts.append("\n".join(["| key | meaning | values | default |", "|---|---|---|---|", *rows]) + "\n")
    parts.append(ELSEWHERE)
    lines = [elsewhere(synonym) for synonym in {id(found): found for found in synonyms().values()}.values()]
    parts.append("\n".join(["| elsewhere | here |", "|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def elsewhere(synonym: Synonym) -> str:
    """Return the line of names that other frameworks have for one thing."""
    here = f"`{synonym.key or synonym.option}`" if synonym.key or synonym.option else ""
    translated = [(theirs, str(ours).lower()) for theirs, ours in synonym.values.items()]
    values = ", ".join(f"{theirs} is {ours}" for theirs, ours in translated if theirs != ours)
    said = ": ".join(filter(None, [here, synonym.how or values]))
    return f"| {', '.join(f'`{word}`' for word in synonym.words)} | {said} |"


def row(key: ConfigKey) -> str:
    """Return the line of a key in the table of its section."""
    default = key.default if " " in key.default and not key.default.startswith("[") else f"`{key.default}`"
    cells = (f"`{key.path.partition('.')[2]}`", key.meaning, key.allowed.replace('"', "`"), default)
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
