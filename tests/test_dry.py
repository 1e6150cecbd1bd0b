"""The dry run: a step of the real code on one rank of thousands, without communication."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_dry_run_equals_closed_form() -> None:
    script = Path(__file__).parent / "dry.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 400
