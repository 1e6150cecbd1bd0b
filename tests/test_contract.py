"""The shape of the project: public names, import order, dependencies, one owner for collectives."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import fourfold
from fourfold import models, nn, wrap

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fourfold"

ORDER = [
    "axes",
    "synonyms",
    "shape",
    "errors",
    "parse",
    "environment",
    "atomic",
    "schedule",
    "action_times",
    "expert_counts",
    "ledger",
    "recording",
    "job",
    "gate",
    "pass_order",
    "dtensor_hooks",
    "torch_hooks",
    "grid",
    "context_way",
    "policy",
    "layout",
    "expert_placement",
    "offload",
    "engine",
    "kernels",
    "tiles",
    "wire",
    "comm",
    "params",
    "replicas",
    "operators",
    "context",
    "grad_hooks",
    "grad_norm",
    "gradients",
    "param_group",
    "product",
    "place_order",
    "old_versions",
    "nn",
    "pipeline",
    "models",
    "optim",
    "step_graph",
    "data",
    "wrap",
    "checkpoint",
    "compare",
    "planner",
    "report",
    "watch",
    "train",
    "commands",
    "cli",
]
"""A file may import only from what stands before it. Folders count as one; inside them `INSIDE` holds."""

INSIDE = {
    "context": ["__init__", "assign", "traffic", "move"],
    "schedule": ["__init__", "stages", "action", "named", "play", "find", "choose", "receives", "text"],
    "nn": [
        "rng", "layer", "lora", "linear", "norm", "loss", "embedding", "rope", "router", "attention", "dispatch", "moe",
        "images/__init__", "images/channels", "images/conv", "images/channel_norm", "__init__",
    ],
    "models": [
        "sizes", "config", "compiled_block", "block", "row_cutter", "row_checks", "transformer", "generate",
        "hugging_face", "count", "open", "__init__",
    ],
    "data": ["__init__", "tokenizer", "token_files", "sources", "sampling", "bags", "loader"],
    "wrap": [
        "plan", "own_tokens", "grid_tensor", "sequence_tensor", "placements", "ops", "ops_dims", "ops_sequence",
        "detect", "adapters", "linear_adapters", "experts", "untouched", "draws", "rows", "parameters", "integrations",
        "passes", "lora", "images", "structure", "build", "__init__",
    ],
    "checkpoint": [
        "__init__", "format", "training_state", "load", "save", "renumber", "hf_weights", "dcp",
    ],
    "planner": [
        "__init__", "goodput", "machine", "lengths", "parameters", "sizes", "size_names", "program",
        "step_parts", "context", "layers", "mixture", "transformer", "step_program", "memory", "trace", "simulate",
        "price", "fit", "calibrate", "pipe", "estimate", "robust", "grid_plan", "space", "folds", "fitting", "search",
        "explain", "correct",
    ],
    "watch": ["__init__", "memory", "processes", "tape", "diagnose", "liveness", "peers", "checks"],
    "report": ["__init__", "units", "page", "run_data", "run_places", "run_page", "plan_text", "plan_page"],
    "train": [
        "__init__", "console", "signals", "fork_server", "rendezvous", "arrivals", "launch", "schema", "config",
        "defaults", "run_folder", "planning", "callbacks", "language_model", "metrics", "progress",
        "correction", "guard", "checkpoints", "loop",
    ],
    "commands": [
        "__init__", "options", "completion", "local_ranks", "probe", "doctor", "train", "sample",
        "report", "import_export", "output", "data_lengths", "calibrate", "plan_numbers", "plan_memory", "plan",
        "schedule", "experts", "checkpoint", "cluster_scripts", "demo",
    ],
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def place(path: Path) -> tuple[int, int]:
    """Where a file stands in the order."""
    first, *rest = path.relative_to(PACKAGE).with_suffix("").parts
    return ORDER.index(first), INSIDE[first].index("/".join(rest)) if rest else 0


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
    assert len(fourfold.__all__) <= 20
    assert all(hasattr(fourfold, name) for name in fourfold.__all__)


def test_names_come_from_where_type_checkers_find_them() -> None:
    """What is imported lazily is what stands under TYPE_CHECKING."""
    (block,) = (node for node in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(node, ast.If))
    named = {alias.name: line.module for line in block.body for alias in line.names}
    assert sorted(named) == sorted(fourfold.__all__)
    assert {name: home for name, home in named.items() if home != "fourfold"} == {
        name: f"fourfold.{home}" for name, home in fourfold._HOMES.items()
    }


LAZY = """
import sys
from importlib import import_module
{before}
import fourfold
assert sorted([*fourfold.__all__, "__version__"]) == dir(fourfold)
assert not hasattr(fourfold, "gird")
{after}
loaded = [name for name in sys.modules if name == "torch" or name.startswith("fourfold.")]
print(*sorted(loaded))
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("import fourfold.cli", "fourfold.cli.parser()"),
        ("import contextlib, fourfold.cli", "with contextlib.suppress(SystemExit): fourfold.cli.main(['--version'])"),
        ("import contextlib, fourfold.cli", "with contextlib.suppress(SystemExit): fourfold.cli.main(['trian'])"),
    ],
    ids=["import", "parser", "version", "misspelt"],
)
def test_neither_import_nor_help_waits_for_torch(before: str, after: str) -> None:
    code = LAZY.format(before=before, after=after)
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    loaded = left.stdout.splitlines()[-1].split() if left.stdout.strip() else []
    torch_free = {f"fourfold.{name}" for name in ("axes", "environment", "errors", "parse", "synonyms")}
    commands = ("fourfold.cli", "fourfold.commands", "fourfold.train")
    assert not [name for name in loaded if not name.startswith(commands) and name not in torch_free]
    torch_free_train = {f"fourfold.train{name}" for name in ("", ".console", ".fork_server", ".signals")}
    assert set(loaded) & torch_free_train == {name for name in loaded if ".train" in name}


@pytest.mark.slow
def test_importing_a_module_of_a_package_keeps_the_public_names() -> None:
    code = (
        "import fourfold.wrap.ops_dims, fourfold as ff; from fourfold.wrap import ExpandParallel, parallelize\n"
        "assert ff.parallelize is parallelize and callable(ff.explain)\n"
        "import fourfold.nn.loss\n"
        "assert ff.nn.loss.global_mean is ff.global_mean\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.slow
def test_torchrun_imports_little_of_fourfold() -> None:
    """Whoever runs torchrun with Fourfold installed has its rendezvous loaded, and no more."""
    code = (
        "import sys, torch.distributed.run\n"
        "print(*sorted(name for name in sys.modules if name.startswith('fourfold')))\n"
    )
    left = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert left.stdout.split() == [
        "fourfold",
        "fourfold.environment",
        "fourfold.errors",
        "fourfold.job",
        "fourfold.train",
        "fourfold.train.rendezvous",
    ]


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Every text that stands as a statement of its own, and what it belongs to: docstrings, also of fields."""
    for owner in ast.walk(tree):
        for statement in getattr(owner, "body", ()) if not isinstance(owner, (ast.Lambda, ast.IfExp)) else ():
            if isinstance(statement, ast.Expr) and isinstance(value := getattr(statement.value, "value", None), str):
                yield owner, value.strip()


FRAGMENTS = re.compile(r"(Of|That|Those|These|Whose|Who|Then|And|From now on)\b|\.\.\.")
"""How a docstring begins that does not name its subject."""
QUESTIONS = re.compile(r"(What|Which|Where|How|Whether)\b")
"""How the docstring of a value may begin; that of a function says what it does."""


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_are_sentences_that_name_their_subject(path: Path) -> None:
    for owner, text in docstrings(ast.parse(path.read_text())):
        assert not FRAGMENTS.match(text), text
        if isinstance(owner, ast.FunctionDef) and "property" not in "".join(map(ast.unparse, owner.decorator_list)):
            assert not QUESTIONS.match(ast.get_docstring(owner) or ""), text


def defined_names(tree: ast.Module) -> Iterator[str]:
    """The classes and type aliases of a file."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, (ast.Subscript, ast.BinOp)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and re.fullmatch(r"_?[A-Z][a-z]+\w*", target.id):
                yield target.id.lstrip("_")


def test_a_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in modules():
        for name in defined_names(ast.parse(path.read_text())):
            homes.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


@pytest.mark.parametrize(("word", "most"), [("qk_norm", 5), ("loss_chunk", 6), ("mlp_chunk", 6), ("recompute", 20)])
def test_few_files_know_an_option(word: str, most: int) -> None:
    """What a new option of the model costs: the files that have to know its name."""
    knowing = [str(path.relative_to(PACKAGE)) for path in modules() if re.search(rf"\b{word}\b", path.read_text())]
    assert len(knowing) <= most, knowing


def test_no_behaviour_depends_on_the_words_of_an_error() -> None:
    """Types and `Failure` kinds decide. What torch only says in words is recognised in these files."""
    edges = {"job.py": "gloo and NCCL", "errors.py": "torch's allocator"}
    name = r"\w*(error|failed|caught)"
    reads = re.compile(rf"\bin str\({name}\)|str\({name}\)\.(startswith|endswith)|in \w+\.message\b(?!\()")
    found = {str(path.relative_to(PACKAGE)) for path in modules() if reads.search(path.read_text())}
    assert found <= edges.keys()


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


def test_ruff_bans_collectives_outside_wire() -> None:
    for code in (
        "import torch.distributed as dist\n\ndist.all_reduce(None)\n",
        "from torch.distributed import reduce_scatter_tensor\n\nreduce_scatter_tensor(None, None)\n",
        "import torch\n\ntorch.distributed.isend(None, 0)\n",
    ):
        assert "TID251" in ruff(code, "product.py")
        assert "TID251" not in ruff(code, "wire.py")


def test_the_api_pages_name_what_exists() -> None:
    """Every public name has an entry on one page and a line in the index, and every entry and member is there."""
    pages = {path.name: path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")}
    index = pages.pop("index.md")
    assert not [name for name in pages if f"]({name}" not in index]
    assert not [name for name in fourfold.__all__ if f"[`ff.{name}`]" not in index]
    entries = [entry for page in pages.values() for entry in re.split(r"^::: ", page, flags=re.MULTILINE)[1:]]
    shown = Counter(re.findall(r'heading: "(.*)"', "".join(entries)))
    assert set(shown.values()) == {1}
    for prefix, package in {"ff": fourfold, "ff.models": models, "ff.nn": nn, "fourfold.wrap": wrap}.items():
        again = fourfold.__all__ if package is not fourfold else ()
        names = [name for name in package.__all__ if not isinstance(getattr(package, name), ModuleType)]
        assert {f"{prefix}.{name}" for name in names if name not in again} <= shown.keys()
    for entry in entries:
        home, _, name = entry.split()[0].rpartition(".")
        try:
            found = getattr(import_module(home), name)
        except (ModuleNotFoundError, AttributeError):  # a method, or a module
            owner, _, kind = home.rpartition(".")
            found = getattr(getattr(import_module(owner), kind), name, None) or import_module(f"{home}.{name}")
        for member in re.findall(r"members: \[(.*)\]", entry):
            known = {*dir(found), *getattr(found, "__annotations__", {})}
            assert set(member.split(", ")) <= known, (name, set(member.split(", ")) - known)


def test_readme_tree_names_every_file() -> None:
    text = (ROOT / "README.md").read_text()
    for path in modules():
        relative = path.relative_to(PACKAGE)
        assert (relative.parts[0] if len(relative.parts) > 1 else relative.name) in text, relative


def shown_torchrun_commands() -> Iterator[tuple[str, str]]:
    """Every torchrun command that a reader may copy, with its file: of pages, docstrings, help and scripts."""
    folders = [(ROOT / "docs", "*.md"), (ROOT / "examples", "*"), (PACKAGE, "*.py"), (ROOT, "*.md")]
    for folder, pattern in folders:
        for path in folder.glob(pattern) if folder == ROOT else folder.rglob(pattern):
            if path.is_file() and path.name not in ("CHANGELOG.md", "log.md") and path.suffix in (".md", ".py"):
                text = re.sub(r"\\+\n\s*", "", path.read_text())
                for found in re.findall(r"torchrun (?:-|\{|\.\.\.)[^\n`]*", text):
                    yield str(path.relative_to(ROOT)), found


SAY_HOW_TO_CLOSE_THE_STORE = {"docs/security.md", "docs/clusters.md", "src/fourfold/train/rendezvous.py"}
"""The files that show our rendezvous on one node: for a network that is not trusted."""


def test_torchrun_is_shown_plainly_on_one_node_and_with_our_rendezvous_on_several() -> None:
    """On one node nothing else is needed. On several, torch's rendezvous keeps the addresses of ranks that are gone.

    Without an endpoint torchrun warns that "master_addr is only used for static rdzv_backend".
    """
    found = list(shown_torchrun_commands())
    assert len(found) >= 20
    for where, command in found:
        several = "--nnodes" in command or "{ranks}" in command
        ours = "--rdzv-backend fourfold" in command
        assert ours == ("--rdzv-endpoint" in command), (where, command)
        assert ours if several else not ours or where in SAY_HOW_TO_CLOSE_THE_STORE, (where, command)
        assert "--rdzv-backend" not in command.replace("--rdzv-backend fourfold", "") and "--standalone" not in command
    kubernetes = (PACKAGE / "commands" / "cluster_scripts.py").read_text()
    assert kubernetes.count('"torchrun"') == kubernetes.count("--rdzv-backend={BACKEND}") == 1
