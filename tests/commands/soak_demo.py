"""`fourfold demo --quick`, for real, and once more until Ctrl-C: what a newcomer sees is there. `make soak` runs it.

python tests/commands/soak_demo.py            # about a minute
python tests/commands/soak_demo.py --full     # the whole tour instead of the quick one, with its seconds
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "fourfold.cli", "demo"]
SECONDS = 600.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="fourfold-demo-") as folder:
        quick = [] if "--full" in sys.argv[1:] else ["--quick"]
        walk(Path(folder) / "whole", quick)
        interrupt(Path(folder) / "interrupted")
    return 0


def walk(out: Path, options: list[str]) -> None:
    """All of it; every step leaves what it promises."""
    began = time.monotonic()
    command = [*COMMAND, *options, "--out", str(out)]
    left = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    seconds = time.monotonic() - began
    if left.returncode:
        sys.exit(f"it ended with {left.returncode}:\n{left.stdout}\n{left.stderr}")
    text = left.stdout
    require(len(re.findall(r"^\$ fourfold ", text, re.MULTILINE)) == 7, "seven commands are shown", text)
    require(re.search(r"^1  x=\d+ ", text, re.MULTILINE) is not None, "a table of grids", text)
    require((out / "run" / "report.html").stat().st_size > 1_000_000, "a report with its figures", text)
    events = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    require([event["grid"] for event in events if event["event"] == "resumed"] == ["z=2"], "another grid", text)
    require(losses[-1] < losses[0], "a loss that falls", text)
    require((out / "hugging-face" / "model.safetensors").is_file(), "an export", text)
    _, _, said = text.partition("$ fourfold sample")
    require("\nimport " in said, "a sample", text)
    print(f"{len(losses)} steps, loss {losses[0]:.4f} to {losses[-1]:.4f}, {seconds:.0f} s", flush=True)


def interrupt(out: Path) -> None:
    """Ctrl-C while it trains: it ends at once, and so do its ranks."""
    command = [*COMMAND, "--out", str(out)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    deadline = time.monotonic() + SECONDS
    while b'"event": "step"' not in read(out / "run" / "metrics.jsonl"):
        require(child.poll() is None and time.monotonic() < deadline, "training that begins", str(out))
        time.sleep(0.2)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    text, _ = child.communicate(timeout=60)
    require(child.returncode == 130, f"exit code 130, not {child.returncode}", text)
    require("The tour ends here." in text and "Traceback" not in text, "a quiet end", text)
    alive = [each for each in Path("/proc").glob("[0-9]*/cmdline") if str(out).encode() in read(each)]
    require(not alive, f"nobody left behind, but {alive}", text)
    print("interrupted while it trained: nobody is left, and it says where what was made is", flush=True)


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def require(holds: bool, what: str, text: str) -> None:
    if not holds:
        sys.exit(f"missing: {what}\n{text}")


if __name__ == "__main__":
    sys.exit(main())
