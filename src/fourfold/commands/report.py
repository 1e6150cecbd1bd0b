"""`fourfold report`: writes the HTML page about a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fourfold.report.run_page import write_report


def report(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the page and print its path."""
    print(write_report(options.folder, options.out))
    return 0
