"""The result of a command: text on the screen, or a JSON document for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fourfold.atomic import write_json


def show_document(document: Mapping[str, Any], text: Callable[[Any], Iterable[str]], where: str | None) -> int:
    """Print the lines of a document, or with `--json -` the document itself; with `--json FILE` write it too."""
    if where == "-":
        print(json.dumps(document, indent=1))
        return 0
    print("\n".join(text(document)))
    if where is not None:
        write_json(Path(where), dict(document))
        print(f"fourfold: wrote {where}", file=sys.stderr)
    return 0
