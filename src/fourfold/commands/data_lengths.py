"""`fourfold data lengths`: how long documents are, and how even attention over a context group would be.

Bags are drawn as training would draw them: windows that are cut anywhere, or whole documents. Each is assigned to the
members of context groups in both ways that `policy.assignment` knows. Nothing is trained, and no token is read.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fourfold.commands.output import show_document
from fourfold.context.assign import Assignment, assign_documents, assign_rows
from fourfold.data.bags import BagOrder, padding
from fourfold.data.loader import WindowReader
from fourfold.data.sampling import SampleOrder
from fourfold.data.sources import is_text, open_source
from fourfold.data.token_files import TokenSource
from fourfold.data.tokenizer import load_tokenizer
from fourfold.report.units import aligned, percent, plural

ANY_ID = 1 << 32
"""A vocabulary that has every id of a token file: the command reads none."""
MOST_DRAWN = 1 << 30
"""The most tokens in the bags that are drawn: of documents of ordinary lengths this takes minutes."""
SAMPLE = 4096
"""The most lengths that are written for the planner."""
QUANTILES = 0.1, 0.25, 0.5, 0.75, 0.9, 0.99
"""The parts of all documents that are at most as long as the lengths that are shown."""


def show_lengths(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the lengths and the table of assignments, or write them as JSON."""
    drawn = options.rows * options.seq * options.bags
    if drawn > MOST_DRAWN:
        raise ValueError(
            f"--rows {options.rows} of --seq {options.seq} in --bags {options.bags} are {drawn:,} tokens to draw; give "
            f"numbers whose product is at most {MOST_DRAWN:,}"
        )
    with tempfile.TemporaryDirectory() as cache:
        sources = [_open(path, options, Path(cache)) for path in options.inputs]
        if (tokens := sum(source.tokens for source in sources)) < options.rows * options.seq:
            raise ValueError(
                f"{', '.join(options.inputs)}: {tokens:,} tokens, but a bag of --rows {options.rows} of --seq "
                f"{options.seq} has {options.rows * options.seq:,}; give more data, or fewer and shorter rows"
            )
        if max(options.context) > tokens:
            raise ValueError(f"--context {max(options.context)}: a context group has at most a rank for each token")
        document = lengths_document(
            sources, options.seq, options.rows, options.context, draws=options.bags, seed=options.seed
        )
    return show_document(document, lengths_text, options.json)


def _open(path: str, options: argparse.Namespace, cache: Path) -> TokenSource:
    """Open a source; --eod is an id for files that do not record it, and a token of the tokenizer for text."""
    if is_text(path):
        tokenizer = load_tokenizer(options.tokenizer, options.eod)
        return open_source(path, tokenizer=tokenizer, cache=cache, column=options.column)
    if options.eod is not None and not options.eod.isdecimal():
        raise ValueError(f"--eod {options.eod}: {path} has ids and no text; give the id that ends documents")
    eod = None if options.eod is None else int(options.eod)
    return open_source(path, tokenizer=None, eod=eod, cache=cache)


def lengths_document(
    sources: Sequence[TokenSource], seq: int, rows: int, members: Sequence[int], *, draws: int, seed: int = 0
) -> dict[str, Any]:
    """Return everything that the command knows: numbers, texts, lists and dicts only."""
    reader = WindowReader(sources, seq=seq, held_out=0.0, vocab=ANY_ID, documents=True)
    order = BagOrder(sources, reader.windows, None, seed, bags=1, tokens=rows * seq)
    windows, whole = _window_bags(reader, rows, draws, seed), list(_whole_bags(order, draws))
    real = [sum(lengths) for lengths in whole]
    filled = [(*lengths, *padding(rows * seq - tokens)) for lengths, tokens in zip(whole, real, strict=True)]
    return {
        "sources": [{"name": source.name, "tokens": source.tokens} for source in sources],
        "documents": _distribution(sources, seq),
        "sample": _sample(sources, seed),
        "seq": seq,
        "rows": rows,
        "bags": draws,
        "padding": 1 - sum(real) / (draws * rows * seq),
        "cut": sum(each.cut for each in order.pieces),
        "assignments": [
            {"pack": pack, "context": each, **_assigned(bags, each, shape)}
            for pack, bags, shape in (("windows", windows, (rows, seq)), ("whole", filled, (1, rows * seq)))
            for each in members
        ],
    }


def _distribution(sources: Sequence[TokenSource], seq: int) -> dict[str, Any]:
    """Return the number, the tokens and the quantiles of documents that are not empty."""
    lengths = torch.cat([block for source in sources for block in source.document_lengths()]).sort().values
    lengths = lengths[lengths > 0]
    number, tokens, longer = len(lengths), int(lengths.sum()), lengths[lengths > seq]
    return {
        "number": number,
        "tokens": tokens,
        "mean": tokens / number,
        "longest": int(lengths[-1]),
        "quantiles": {str(part): int(lengths[min(number - 1, int(part * number))]) for part in QUANTILES},
        "longer_than_seq": len(longer) / number,
        "tokens_in_longer": int(longer.sum()) / tokens,
    }


def _sample(sources: Sequence[TokenSource], seed: int) -> list[int]:
    """Return some lengths in a random order, for `fourfold plan --lengths`."""
    lengths = torch.cat([block for source in sources for block in source.document_lengths()])
    lengths = lengths[lengths > 0]
    return lengths[torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed))[:SAMPLE]].tolist()


def _window_bags(reader: WindowReader, rows: int, draws: int, seed: int) -> list[tuple[int, ...]]:
    """Return the lengths of documents in bags of windows."""
    order = SampleOrder(reader.windows, None, seed)
    picked = [
        [reader.lengths(source, order.window(source, one)) for source, one in order.take(rows)] for _ in range(draws)
    ]
    return [tuple(length for row in bag for length in row) for bag in picked]


def _whole_bags(order: BagOrder, draws: int) -> Iterator[tuple[int, ...]]:
    """Yield the lengths of documents in bags of whole ones, without padding."""
    for _ in range(draws):
        (bag,) = order.take_bags()
        yield tuple(piece.inputs for piece in bag)


def _assigned(bags: Sequence[tuple[int, ...]], members: int, shape: tuple[int, int]) -> dict[str, Any]:
    """Return how even and how cheap both assignments of these bags are."""
    lacking = (1,) * (-sum(bags[0]) % members)  # as a model adds them, so that all members have equally many
    return {
        "rows": _summary([assign_rows(*shape, (*bag, *lacking), members) for bag in bags]),
        "documents": _summary([assign_documents((*bag, *lacking), members) for bag in bags]),
    }


def _summary(found: Sequence[Assignment]) -> dict[str, float]:
    """Return the attention of the busiest member divided by the mean, and the K and V that travel of a gather's."""
    imbalance = [one.imbalance for one in found]
    gathered = sum((len(one.members) - 1) * sum(one.lengths) for one in found)
    moved = sum(one.moved for one in found)
    return {
        "imbalance": statistics.mean(imbalance),
        "worst_imbalance": max(imbalance),
        "moved": moved / gathered if gathered else 0.0,
    }


def lengths_text(document: dict[str, Any]) -> Iterator[str]:
    """Yield the lines that people read."""
    found, seq, rows = document["documents"], document["seq"], document["rows"]
    names = ", ".join(source["name"] for source in document["sources"])
    yield f"{names}: {found['tokens']:,} tokens in {plural(found['number'], 'document')}"
    parts = {f"{100 * float(part):g}%": f"{length:,}" for part, length in found["quantiles"].items()}
    head = ["of the documents", *parts, "longest", "mean"]
    cells = ["have at most", *parts.values(), f"{found['longest']:,}", f"{found['mean']:,.0f}"]
    yield from aligned([head, cells], right=range(1, len(head)))
    longer, tokens = percent(found["longer_than_seq"]), percent(found["tokens_in_longer"])
    yield f"{longer} of them, with {tokens} of the tokens, are longer than {seq:,} tokens"
    yield ""
    bags = plural(document["bags"], "bag")
    yield f"{bags} of {rows * seq:,} tokens ({rows} rows of {seq:,}), cut over context groups:"
    table = [["pack", "context", "rows: imbalance", "worst", "moved", "documents: imbalance", "worst", "moved"]]
    for line in document["assignments"]:
        ways = [line["rows"], line["documents"]]
        cells = [(f"{way['imbalance']:.2f}", f"{way['worst_imbalance']:.2f}", f"{way['moved']:.0%}") for way in ways]
        table.append([line["pack"], str(line["context"]), *cells[0], *cells[1]])
    yield from aligned(table, right=range(1, 8))
    yield ""
    yield "imbalance: attention of the busiest member divided by the mean; moved: K and V that travel, of a gather's"
    cut = plural(document["cut"], "document")
    yield f"pack whole: {percent(document['padding'])} of the tokens are padding; {cut} of the corpus must be cut"
