"""Text that is on every machine: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from fourfold.nn.initial import key_of


def standard_library(max_bytes: int = 8 << 20) -> Tensor:
    """The library's modules one after another in the order of their names, up to `max_bytes`; uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= max_bytes:
            break
    if not text:
        raise FileNotFoundError(f"no Python source in {folder}; this Python was installed without it")
    return torch.frombuffer(text[:max_bytes], dtype=torch.uint8)


def random_windows(corpus: Tensor, rows: int, seq: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """A whole batch of (tokens, targets), each [rows, seq]: the same on every rank of every grid."""
    if len(corpus) <= seq:
        raise ValueError(f"a corpus of {len(corpus)} bytes is too short for sequences of {seq}; it needs {seq + 1}")
    generator = torch.Generator("cpu").manual_seed(key_of(seed, "windows", step))
    starts = torch.randint(len(corpus) - seq, (rows, 1), generator=generator, device="cpu")
    windows = corpus[starts + torch.arange(seq + 1, device="cpu")].long()
    return windows[:, :-1], windows[:, 1:]
