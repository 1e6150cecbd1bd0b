"""Draw the schedules of docs/pipeline.md again: a text block behind `fourfold schedule` commands is what they print.

python docs/write_schedules.py
"""

from __future__ import annotations

import io
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

from fourfold.cli import main

PAGE = Path(__file__).parent / "pipeline.md"
DRAWN = re.compile(r"(```bash\n((?:fourfold schedule (?:show|find) [^\n]*\n)+)```\n\n```text\n).*?(?=```\n)", re.DOTALL)
"""A block of commands that draw, and the block of text behind it."""


def page(text: str) -> str:
    """Return the page with every drawing as the commands before it print it."""
    return DRAWN.sub(lambda found: found[1] + "\n".join(map(printed, found[2].splitlines())), text)


def printed(command: str) -> str:
    """Return what a command prints."""
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(shlex.split(command)[1:])
    if code:
        raise SystemExit(f"{command} ended with {code}")
    return out.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
