"""The shape of the project: public names, import order, dependencies, one owner for collectives, README code."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fourfold

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fourfold"

ORDER = [
    "ledger",
    "store",
    "agree",
    "grid",
    "ahead",
    "overlap",
    "layout",
    "local",
    "pending",
    "comm",
    "arriving",
    "gradients",
    "operators",
    "unit",
    "product",
    "nn",
    "models",
    "optim",
    "data",
    "parallelize",
    "checkpoint",
    "compare",
    "cost",
    "watch",
    "report",
    "train",
    "cli",
]
"""A file may import only from what stands before it. Folders count as one; inside them `INSIDE` holds."""

INSIDE = {
    "nn": [
        "initial", "moment", "recompute", "layer", "linear", "norm", "loss",
        "embedding", "chunked", "dropout", "attention", "mlp", "channels", "convolve", "conv", "channel_norm",
        "batch_norm", "__init__",
    ],
    "models": ["sizes", "config", "transformer", "generate", "foreign", "outside", "__init__"],
    "data": [
        "__init__", "rows", "sampler", "corpus", "tokenizer", "source", "tokens", "foreign", "text", "opening", "order",
        "samples", "loader",
    ],
    "parallelize": [
        "run", "placed", "layouts", "rules", "shapes", "along", "attention", "space", "together", "layers", "gathered",
        "losses", "low_rank", "state", "borrow", "root", "generate", "swap", "normal", "plan", "recipes", "lora",
        "loops", "alternate", "structure", "images", "values", "place", "explain", "build", "__init__",
    ],
    "checkpoint": [
        "__init__", "files", "record", "folder", "write", "read", "weights", "training", "save", "load", "whole",
        "names", "exchange", "dcp_metadata", "dcp",
    ],
    "cost": [
        "__init__", "share", "owed", "volume", "flops", "kept", "held", "lives", "memory", "machine", "seconds",
        "work", "rehearse", "program", "simulate", "fit", "calibrate", "caught", "dry", "price", "estimate",
        "candidates", "search", "modules", "explain", "published",
    ],
    "watch": ["__init__", "tape", "diagnose", "alarm", "straggle", "replicas", "spikes", "preflight"],
    "report": [
        "units", "html", "run", "figures", "ranks", "summary", "profile", "predicted", "page", "plan_text",
        "plan_figures", "plan", "__init__",
    ],
    "train": [
        "__init__", "schema", "rendezvous", "launch", "job", "sections", "config", "record", "meter", "predicted",
        "profile", "progress", "story", "numbers", "stop", "sources", "guard", "resume", "saving", "loop", "begin",
        "options", "talk", "probe", "preflight", "doctor", "command", "sample", "calibrate", "plan", "checkpoint",
        "exchange", "places",
    ],
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def place(path: Path) -> tuple[int, int]:
    """Where a file stands in the order."""
    first, *rest = path.relative_to(PACKAGE).with_suffix("").parts
    return ORDER.index(first), INSIDE[first].index(rest[0]) if rest else 0


def imported(path: Path) -> set[Path]:
    """The package's own files that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    found = set()
    for name in names:
        if name.startswith("fourfold."):
            file = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
            found |= {candidate for candidate in (file, file.with_suffix("") / "__init__.py") if candidate.exists()}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_import_only_from_above(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        return
    for other in imported(path):
        assert place(other) < place(path), f"{path} imports {other}"


def test_few_public_names_and_each_exists() -> None:
    assert len(fourfold.__all__) <= 15
    assert all(hasattr(fourfold, name) for name in fourfold.__all__)


def test_core_needs_torch_alone() -> None:
    others = ["numpy", "safetensors", "transformers", "tokenizers", "rich", "plotly", "tensorboard", "scipy"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({others}))\n"
        "import torch, fourfold as ff\n"
        "model = ff.models.build('gpt-tiny', ff.Grid())\n"
        "model(torch.arange(8).view(1, 8), torch.arange(8).view(1, 8)).backward()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def ruff(code: str, name: str) -> str:
    command = [Path(sys.executable).parent / "ruff", "check", "--no-cache", "--stdin-filename", PACKAGE / name, "-"]
    return subprocess.run(command, input=code, capture_output=True, text=True, cwd=ROOT, timeout=60).stdout


def test_ruff_bans_collectives_outside_comm() -> None:
    for code in (
        "import torch.distributed as dist\n\ndist.all_reduce(None)\n",
        "from torch.distributed import reduce_scatter_tensor\n\nreduce_scatter_tensor(None, None)\n",
        "import torch\n\ntorch.distributed.isend(None, 0)\n",
    ):
        assert "TID251" in ruff(code, "product.py")
        assert "TID251" not in ruff(code, "comm.py")


def test_no_file_outgrows_its_role() -> None:
    for path in modules():
        assert len(path.read_text().splitlines()) <= 400, path


def test_readme_code_runs() -> None:
    """Every Python block, one after another, as one program of one rank."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    code = "\n".join(blocks).replace('"llama-3-8b"', '"llama-tiny"').replace("Grid(x=2, z=2)", "Grid()")
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120, cwd=ROOT)


def test_readme_tree_names_every_file() -> None:
    text = (ROOT / "README.md").read_text()
    for path in modules():
        relative = path.relative_to(PACKAGE)
        assert (relative.parts[0] if len(relative.parts) > 1 else relative.name) in text, relative
