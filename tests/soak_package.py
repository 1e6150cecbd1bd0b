"""The wheel, then the source distribution, in an environment that has nothing else; packages come from pip's index.

First torch alone: the core takes a step of training. Then the extras train and report: `fourfold train`, `report`.
Times are printed; `make soak` runs it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from test_package import build, built

STEP = """
import torch, fourfold as ff
model = ff.models.build("gpt-tiny", ff.Grid())
optimizer = ff.optim.AdamW(model, lr=1e-3)
tokens = torch.arange(64).view(4, 16)
before = model(tokens, tokens)
before.backward()
optimizer.step()
assert model(tokens, tokens) < before
"""


def timed(what: str, *command: str | Path, cwd: Path) -> None:
    began = time.monotonic()
    subprocess.run([str(word) for word in command], cwd=cwd, check=True, timeout=3600, stdout=subprocess.DEVNULL)
    print(f"{what}: {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source").mkdir()
        wheel = build(folder / "source")
        venv = folder / "venv"
        timed("a new environment", sys.executable, "-m", "venv", venv, cwd=folder)
        pip = (venv / "bin" / "pip", "--disable-pip-version-check", "install", "--quiet")
        fourfold = venv / "bin" / "fourfold"
        timed("pip install fourfold", *pip, wheel, cwd=folder)
        timed("fourfold --help", fourfold, "--help", cwd=folder)
        timed("a step with torch alone", venv / "bin" / "python", "-W", "ignore", "-c", STEP, cwd=folder)
        timed("pip install fourfold[train,report]", *pip, f"{wheel}[train,report]", cwd=folder)
        train = ("train", "--model", "gpt-tiny", "--grid", "x=2", "--steps", "4", "--device", "cpu", "--out", "run")
        timed("fourfold train", fourfold, *train, cwd=folder)
        timed("fourfold report", fourfold, "report", "run", cwd=folder)
        timed("fourfold completion bash", fourfold, "completion", "bash", cwd=folder)
        sdist = built(folder / "source", "sdist")
        timed("pip install the source distribution", *pip, "--force-reinstall", "--no-deps", sdist, cwd=folder)
        timed("a step of it", venv / "bin" / "python", "-W", "ignore", "-c", STEP, cwd=folder)


if __name__ == "__main__":
    main()
