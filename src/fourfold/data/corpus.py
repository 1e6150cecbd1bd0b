"""Text that is on every machine: the source of Python's standard library."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from fourfold.nn.initial import key_of

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
        raise _no_library(folder)
    return folder, sorted(found, key=lambda path: path.relative_to(folder).parts)


def standard_library(max_bytes: int = 8 << 20) -> Tensor:
    """The library's modules one after another in the order of their names, up to `max_bytes`; uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise _no_library(folder)
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def _no_library(folder: Path) -> FileNotFoundError:
    return FileNotFoundError(f"no Python source in {folder}; this Python was installed without it")


def random_windows(corpus: Tensor, rows: int, seq: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """A whole batch of (tokens, targets), each [rows, seq]: the same on every rank of every grid."""
    if len(corpus) <= seq:
        raise ValueError(f"a corpus of {len(corpus)} bytes is too short for sequences of {seq}; it needs {seq + 1}")
    generator = torch.Generator("cpu").manual_seed(key_of(seed, "windows", step))
    starts = torch.randint(len(corpus) - seq, (rows, 1), generator=generator, device="cpu")
    windows = corpus[starts + torch.arange(seq + 1, device="cpu")].long()
    return windows[:, :-1], windows[:, 1:]
