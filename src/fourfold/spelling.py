"""The nearest spelling of an unknown word. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'train'?)`, or an empty text if no known word is near."""
    bare = {name.lstrip("-"): name for name in known}  # options are compared without their dashes
    word = word.lstrip("-")
    found = get_close_matches(word, bare, n=1) or get_close_matches(word.lower(), bare, n=1)
    if not found:  # one part of a longer name, such as `rate` of `learning_rate`; 0.8 lets one letter of five differ
        parts = {part: name for name in bare for part in name.split("_") if len(part) > 2}
        found = [parts[part] for part in get_close_matches(word.lower(), parts, n=1, cutoff=0.8)]
    return f" (did you mean {bare[found[0]]!r}?)" if found else ""
