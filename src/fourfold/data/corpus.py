"""Text that is on every machine: the source of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
"""Folders that are not on every machine, or are no part of the library proper."""


def library_modules() -> tuple[Path, list[Path]]:
    """The folder of the library, and its modules below it in the order of their paths; about 11 MB."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = set(folders) - NOT_THE_LIBRARY
        found += [Path(root, name) for name in names if name.endswith(".py")]
    if not found:
        raise FileNotFoundError(f"no Python source in {folder}; this Python was installed without it")
    return folder, sorted(found, key=lambda path: path.relative_to(folder).parts)
