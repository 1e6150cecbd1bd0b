"""Text into tokens: which files of a folder are text, what a document is, and `prepare`, which writes a token file.

A file is one document; in a `.jsonl` file each line is one, the text under its key "text". Of a folder the files
with a suffix of `TEXT` are taken, in the order of their paths, all folders below it included, except those whose
name begins with a dot. A file given by its own name is text whatever its suffix is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from fourfold.data.corpus import library_modules
from fourfold.data.tokenizer import Tokenizer
from fourfold.data.tokens import TokenWriter

STANDARD_LIBRARY = "standard-library"
PROSE = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".log")
RECORDS = (".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".sql")
CODE = (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".ts", ".go")
MORE_CODE = (".rs", ".swift", ".hs", ".rb", ".php", ".lua", ".pl", ".r", ".jl", ".sh")
TEXT = PROSE + RECORDS + CODE + MORE_CODE
PIECE = 4 << 20
"""Bytes that are read and encoded at once. A longer file is cut after the line that goes beyond."""


class TextFile(NamedTuple):
    """A file of a corpus; `name` is its path below the folder that was given."""

    path: Path
    name: str
    size: int
    changed: int  # mtime in nanoseconds


class Piece(NamedTuple):
    """Bytes of a document, or the rest of it; `read`: how many bytes of the file they came from."""

    text: bytes
    ends_document: bool
    read: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What `prepare` has written; `empty` files gave nothing."""

    path: Path
    tokens: int
    documents: int
    files: int
    empty: int
    text_bytes: int
    vocab: int


def prepare(
    inputs: Iterable[str | Path],
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Write the text of files and folders (or `standard-library`) into one token file.

    `progress(bytes_done, bytes_total)` is called after each few megabytes.
    """
    files = [file for name in inputs for file in text_files(name)]
    return prepare_files(files, Path(out).expanduser(), tokenizer, progress=progress)


def prepare_files(
    files: list[TextFile], out: Path, tokenizer: Tokenizer, *, progress: Callable[[int, int], None] | None = None
) -> Summary:
    """`prepare` for files that were found already."""
    if out.suffix != ".tokens":
        raise ValueError(f"{out}: a token file's name ends in .tokens; write {out.with_suffix('.tokens')}")
    if not files:
        raise ValueError(f"{out}: no input was given; name files, folders or {STANDARD_LIBRARY}")
    total, done = sum(file.size for file in files), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        _naming(out),
        TokenWriter(out, vocab=tokenizer.vocab, eod=tokenizer.eod, tokenizer=tokenizer.description) as writer,
    ):
        for group in _groups(piece for file in files for piece in _pieces(file.path)):
            for piece, ids in zip(group, tokenizer.encode_many([piece.text for piece in group]), strict=True):
                writer.append(ids)
                if piece.ends_document:
                    writer.end_document()
                done += piece.read
            if progress is not None:
                progress(done, total)
    empty = sum(file.size == 0 for file in files)
    return Summary(out, writer.tokens, writer.documents, len(files), empty, total, tokenizer.vocab)


@contextmanager
def _naming(out: Path) -> Iterator[None]:
    """A disk that is full says so of no file."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OSError(error.errno, f"cannot write {out} ({error.strerror}); make room there") from error


def text_files(name: str | Path) -> list[TextFile]:
    """The text files that a name stands for; at least one of them has text."""
    if str(name) == STANDARD_LIBRARY:
        folder, paths = library_modules()
        return [_text_file(path, folder) for path in paths]
    path = Path(name).expanduser()
    if path.is_dir():
        found = [_text_file(file, path) for file in _walk(path)]
        if not found:
            raise FileNotFoundError(
                f"the folder {path} has no text file; of a folder those with a known suffix are read "
                f"({' '.join(PROSE)} ...); give files with another suffix by their names"
            )
    elif path.exists():
        found = [_text_file(path, path.parent)]
    else:
        raise missing(path)
    if not any(file.size for file in found):
        raise ValueError(f"{path} is empty: there are 0 bytes of text in {len(found)} files; give text to learn from")
    return found


def digest(files: Iterable[TextFile], tokenizer: Tokenizer) -> str:
    """A short key that changes when a file or the tokenizer does."""
    parts = [[file.name, file.size, file.changed] for file in files]
    return hashlib.sha256(json.dumps([parts, tokenizer.description, tokenizer.eod]).encode()).hexdigest()[:16]


def missing(path: Path) -> FileNotFoundError:
    """What to say of a path that is not there: the names that come nearest, in the folder nearest to it."""
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = [entry.name for entry in folder.iterdir()]
    near = get_close_matches(path.name, [*names, STANDARD_LIBRARY], n=3, cutoff=0.4)
    hint = f"nearest to it are {', '.join(near)}" if near else f"{STANDARD_LIBRARY} is text that is always there"
    return FileNotFoundError(f"there is no {path.name!r} in {folder.absolute()} ({len(names)} entries); {hint}")


def _text_file(path: Path, folder: Path) -> TextFile:
    state = path.stat()
    return TextFile(path, path.relative_to(folder).as_posix(), state.st_size, state.st_mtime_ns)


def _walk(folder: Path) -> list[Path]:
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".") and Path(name).suffix.lower() in TEXT]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).parts)


def _pieces(path: Path) -> Iterator[Piece]:
    """The documents of a file, in pieces."""
    with path.open("rb") as file:
        if b"\0" in file.read(8192):
            raise ValueError(
                f"{path} is no UTF-8 text: there are zero bytes in it; unpack or convert it, or leave it out"
            )
        file.seek(0)
        if path.suffix.lower() == ".jsonl":
            for number, line in enumerate(file, 1):
                yield Piece(_text_of(path, number, line), True, len(line))
            return
        while text := file.read(PIECE):
            text += file.readline()  # a line's end is never inside of a character
            yield Piece(text, False, len(text))
    yield Piece(b"", True, 0)


def _text_of(path: Path, number: int, line: bytes) -> bytes:
    """The text of a line of JSON; a blank line has none."""
    if not line.strip():
        return b""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}); each line of a .jsonl is one object") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        found = f"keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(f'{path}, line {number}: no "text" with a string ({found}); rename the key that has the text')
    return record["text"].encode(errors="replace")


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces by the few megabytes: tokenizers work through a group on all cores."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text) + 1  # blank ones count too, lest a group has no end
        if size >= PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group
