"""`fourfold data prepare`: turns text into a token file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from fourfold.data import sources
from fourfold.data.tokenizer import load_tokenizer
from fourfold.train.progress import percent_of


def prepare(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Write the token file and print a summary of it."""
    tokenizer = load_tokenizer(options.tokenizer, options.eod)
    written = sources.prepare(options.inputs, options.out, tokenizer, progress=percent_of())
    print(f"{written.path}: {written.tokens} tokens of {written.documents} documents, vocabulary {written.vocab}")
    return 0
