"""The wheel and the source distribution: what is in them, what they say, and that the wheel runs by itself."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import fourfold

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fourfold"
PARTS = ("src", "pyproject.toml", "README.md", "LICENSE")


def build(folder: Path) -> Path:
    """Return the wheel of the source as it is, made elsewhere lest anything of an earlier one gets in."""
    copy_source(folder)
    return built(folder, "wheel")


def copy_source(folder: Path) -> None:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, folder / part)


def built(folder: Path, kind: str) -> Path:
    """Return the wheel or the sdist of the source in this folder."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, timeout=120)
    (found,) = (folder / "dist").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("source"))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    files = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names == {path.relative_to(PACKAGE.parent).as_posix() for path in files}
    for part in ("py.typed", "machines/perlmutter.toml", "report/run_page.js", "cli.py", "commands/options.py"):
        assert f"fourfold/{part}" in names


def test_a_wheel_of_the_source_distribution_is_the_same(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    copy_source(tmp_path / "source")
    sdist = built(tmp_path / "source", "sdist")
    assert sdist.name == f"fourfold-{fourfold.__version__}.tar.gz"
    with tarfile.open(sdist) as opened:
        opened.extractall(tmp_path, filter="data")
    folder = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert {"README.md", "LICENSE", "pyproject.toml", "PKG-INFO"} <= {path.name for path in folder.iterdir()}
    again = built(folder, "wheel")
    with zipfile.ZipFile(wheel) as one, zipfile.ZipFile(again) as other:
        same = [name for name in one.namelist() if not name.endswith("RECORD")]
        assert sorted(one.namelist()) == sorted(other.namelist())
        assert all(one.read(name) == other.read(name) for name in same)


def test_the_newest_changes_are_those_of_this_version() -> None:
    headings = re.findall(r"^## (\S+?),? ?(?:unreleased)?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == fourfold.__version__


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        (info,) = {name.partition("/")[0] for name in opened.namelist() if ".dist-info/" in name}
        metadata = email.message_from_bytes(opened.read(f"{info}/METADATA"))
        entries = opened.read(f"{info}/entry_points.txt").decode()
        assert f"{info}/licenses/LICENSE" in opened.namelist()
    assert wheel.name == f"fourfold-{fourfold.__version__}-py3-none-any.whl"
    assert metadata["Version"] == fourfold.__version__
    assert metadata["Author"] == "The Fourfold authors"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert {"train", "hf", "report", "dev"} <= set(metadata.get_all("Provides-Extra"))
    needed = [text for text in metadata.get_all("Requires-Dist") if "extra ==" not in text]
    assert needed == ["torch<2.14,>=2.11"]
    assert metadata.get_payload().startswith("# ")  # the README
    assert "fourfold = fourfold.cli:main" in entries
    assert "fourfold = fourfold.train.rendezvous:handler" in entries


def test_the_wheel_runs_by_itself(wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, "--no-compile", "--target", tmp_path, wheel], check=True, timeout=120)
    # its folder stands before that of the source, which is installed here too
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(*arguments: str | Path) -> str:
        command = [sys.executable, "-s", "-P", *arguments]
        left = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120
        )
        return left.stdout

    assert run(tmp_path / "bin" / "fourfold", "--version") == f"fourfold {fourfold.__version__}\n"
    assert Path(run("-c", "import fourfold; print(fourfold.__file__)").strip()).is_relative_to(tmp_path)
    assert "perlmutter" in run(tmp_path / "bin" / "fourfold", "completion", "bash")


def test_the_version_stands_in_one_place_and_is_cited() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fourfold.__version__"}
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == fourfold.__version__


def test_what_an_extra_needs_is_what_the_tests_have() -> None:
    """Every package of an extra is pinned in dev, at a version that the extra takes."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = dict(entry.split("==") for entry in extras["dev"])
    for name in ("train", "hf", "parquet", "report"):
        for entry in extras[name]:
            package, least = re.match(r"([\w-]+)>=([\d.]+)", entry).groups()
            assert [*map(int, pinned[package].split("."))] >= [*map(int, least.split("."))], entry
