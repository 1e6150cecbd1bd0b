"""The nearest spelling of a word that is not known. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'train'?)`, or nothing where no known word is near."""
    bare = {name.lstrip("-"): name for name in known}  # options are compared without their dashes
    found = get_close_matches(word.lstrip("-"), bare, n=1) or get_close_matches(word.lstrip("-").lower(), bare, n=1)
    return f" (did you mean {bare[found[0]]!r}?)" if found else ""
