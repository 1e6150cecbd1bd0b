"""Opens a path as a source of tokens, whatever kind of file it is; text is tokenized once, into a cached token file.

A file is one document. In a `.jsonl` file each line is one document, its text under the key "text". In a folder, the
files with a suffix of `TEXT_SUFFIXES` are read, in the order of their paths and including all subfolders, except names
that begin with a dot. A file that is named directly is text whatever its suffix is.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from fourfold.data.token_files import MegatronPair, NanoGPTFile, TokenFile, TokenSource, TokenWriter
from fourfold.data.tokenizer import Tokenizer
from fourfold.parse import parse_json

STANDARD_LIBRARY = "standard-library"
"""The name of a corpus that is on every machine, about 11 MB: the source of Python's standard library."""

NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
"""Folders beside the standard library that are not on every machine, or are not part of the library proper."""

PROSE = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".log")
RECORDS = (".json", ".jsonl", ".csv", ".tsv", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".sql")
CODE = (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".ts", ".go")
MORE_CODE = (".rs", ".swift", ".hs", ".rb", ".php", ".lua", ".pl", ".r", ".jl", ".sh")
TEXT_SUFFIXES = PROSE + RECORDS + CODE + MORE_CODE
"""Suffixes of the files that are read from a folder; other files there are often binary."""

CHUNK_BYTES = 4 << 20
"""Bytes of text that are read and tokenized at once: enough to keep all cores busy, little enough for any memory. A
longer file is cut at the end of the line that passes this size."""

# Opening a path


def open_source(
    path: str | Path,
    *,
    tokenizer: Tokenizer | None,
    eod: int | None = None,
    cache: Path,
    progress: Callable[[int, int], None] | None = None,
) -> TokenSource:
    """Open a token file, a Megatron pair (by its prefix or either file), nanoGPT's `.bin`, or text.

    Text (a file, a folder, `standard-library`) is tokenized into a token file in `cache`, which is used again until the
    text or the tokenizer changes. A token file must have been made by `tokenizer`, unless that is None. `eod` is the id
    that ends documents in files that do not record it.
    """
    if str(path) != STANDARD_LIBRARY:
        path = Path(path).expanduser()
        source = _open_tokens(path, tokenizer, eod)
        if source is not None:
            return source
    if eod is not None and (tokenizer is None or eod != tokenizer.eod):
        raise ValueError(f"eod={eod} is for .bin files; in the text {path} the tokenizer decides how documents end")
    files = text_files(path)
    if tokenizer is None:
        raise ValueError(f"{path} is text: give a tokenizer, bytes or a tokenizer.json")
    name = Path(path).resolve().name
    # The key changes when a file or the tokenizer does, so a cached file is never of another text.
    content = [[[file.name, file.size, file.changed] for file in files], tokenizer.description, tokenizer.eod]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    cached = cache / f"{name}-{key}.tokens"
    with suppress(FileNotFoundError, ValueError):  # not there yet, or damaged since it was written
        return TokenFile(cached, name)
    prepare([path], cached, tokenizer, progress=progress)
    return TokenFile(cached, name)


def is_text(path: str) -> bool:
    """Return whether a source is text, which a tokenizer must read, and not a file of tokens."""
    found = Path(path).expanduser()
    return path == STANDARD_LIBRARY or (found.exists() and found.suffix not in (".bin", ".idx", ".tokens"))


def _open_tokens(path: Path, tokenizer: Tokenizer | None, eod: int | None) -> TokenSource | None:
    """Open a path that has tokens; return None for text. The prefix of a Megatron pair is not a file itself."""
    pair = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    index = Path(f"{pair}.idx")
    if index.is_file() and (path.suffix in (".bin", ".idx") or not path.exists()):
        return MegatronPair(pair, eod)
    if not path.exists():
        raise _missing(path)
    if not path.is_file() or path.suffix not in (".bin", ".tokens"):
        return None
    if path.suffix == ".bin":
        return NanoGPTFile(path, eod)
    source = TokenFile(path)
    if eod not in (None, source.eod):
        raise ValueError(f"{path} ends documents with {source.eod}, not eod={eod}; omit eod")

    def identity(description: dict[str, str]) -> str | None:
        return description.get("sha256") or description.get("name")  # a file may be renamed; its content decides

    # Under another tokenizer the same ids mean another text.
    if tokenizer is not None and identity(tokenizer.description) != identity(source.tokenizer):
        raise ValueError(
            f"{path} was made by the tokenizer {source.tokenizer}, not by {tokenizer.description}; give that "
            "tokenizer, or prepare the text again with this one"
        )
    return source


def _missing(path: Path) -> FileNotFoundError:
    """Return the error for a path that does not exist, with the most similar names in the nearest folder that does."""
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = [entry.name for entry in folder.iterdir()]
    near = get_close_matches(path.name, [*names, STANDARD_LIBRARY], n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else f"{STANDARD_LIBRARY} is text that every machine has"
    return FileNotFoundError(f"there is no {path.name!r} in {folder.absolute()} ({len(names)} entries); {hint}")


# Text into tokens


class TextFile(NamedTuple):
    """A file of a corpus; `name` is its path relative to the folder that was given."""

    path: Path
    name: str
    size: int
    changed: int  # mtime in nanoseconds


class TextChunk(NamedTuple):
    """A part of a document; `file_bytes` is the number of bytes of the file that it was read from."""

    text: bytes
    ends_document: bool
    file_bytes: int


def prepare(
    inputs: Iterable[str | Path],
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> TokenFile:
    """Tokenize the text of files and folders (or `standard-library`) into one token file, and return it opened.

    `progress(bytes_done, bytes_total)` is called every few megabytes.
    """
    files = [file for name in inputs for file in text_files(name)]
    out = Path(out).expanduser()
    if out.suffix != ".tokens":
        raise ValueError(f"{out}: the name of a token file ends in .tokens; write {out.with_suffix('.tokens')}")
    if not files:
        raise ValueError(f"{out}: there is no input; name files, folders or {STANDARD_LIBRARY}")
    total, done = sum(file.size for file in files), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with TokenWriter(out, vocab=tokenizer.vocab, eod=tokenizer.eod, tokenizer=tokenizer.description) as writer:
        for group in _groups(chunk for file in files for chunk in _chunks(file.path)):
            for chunk, ids in zip(group, tokenizer.encode_many([chunk.text for chunk in group]), strict=True):
                writer.append(ids)
                if chunk.ends_document:
                    writer.end_document()
                done += chunk.file_bytes
            if progress is not None:
                progress(done, total)
    return TokenFile(out)


def text_files(name: str | Path) -> list[TextFile]:
    """Return the text files of a file, a folder or `standard-library`. At least one of them is not empty."""
    if str(name) == STANDARD_LIBRARY:
        folder = Path(sysconfig.get_paths()["stdlib"])
        found = _walk(folder, (".py",), lambda entry: entry not in NOT_THE_LIBRARY)
        if not found:
            raise FileNotFoundError(f"there is no Python source in {folder}; this Python was installed without it")
        return found
    path = Path(name).expanduser()
    if path.is_dir():
        found = _walk(path, TEXT_SUFFIXES, lambda entry: not entry.startswith("."))
        if not found:
            raise FileNotFoundError(
                f"the folder {path} has no text file; in a folder only files with a known suffix are read "
                f"({' '.join(PROSE)} ...); name files with another suffix one by one"
            )
    elif path.exists():
        found = [_text_file(path, path.parent)]
    else:
        raise _missing(path)
    if not any(file.size for file in found):
        raise ValueError(f"{path} is empty: there are 0 bytes of text in {len(found)} files; give text to train on")
    return found


def _walk(folder: Path, suffixes: tuple[str, ...], wanted: Callable[[str], bool]) -> list[TextFile]:
    """Return the files below a folder that have one of the suffixes; skip names and folders that are not wanted."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = filter(wanted, folders)  # changed in place, since os.walk visits what is left in this list
        found += [Path(root, name) for name in names if wanted(name) and Path(name).suffix.lower() in suffixes]
    # Sorted by the parts of the path: the order must be the same on every machine, whatever the file system lists.
    paths = sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).parts)
    return [_text_file(path, folder) for path in paths]


def _text_file(path: Path, folder: Path) -> TextFile:
    state = path.stat()
    return TextFile(path, path.relative_to(folder).as_posix(), state.st_size, state.st_mtime_ns)


def _chunks(path: Path) -> Iterator[TextChunk]:
    """Read the documents of a file chunk by chunk."""
    with path.open("rb") as file:
        if b"\0" in file.read(8192):  # a zero byte near the beginning marks a binary file
            raise ValueError(
                f"{path} is not UTF-8 text: there are zero bytes in it; unpack or convert it, or leave it out"
            )
        file.seek(0)
        if path.suffix.lower() == ".jsonl":
            for number, line in enumerate(file, 1):
                yield TextChunk(_text_of_line(path, number, line), True, len(line))
            return
        while text := file.read(CHUNK_BYTES):
            text += file.readline()  # cut at the end of a line, which is never inside of a character
            yield TextChunk(text, False, len(text))
    yield TextChunk(b"", True, 0)


def _text_of_line(path: Path, number: int, line: bytes) -> bytes:
    """Return the text of a line of JSON; a blank line has no text."""
    if not line.strip():
        return b""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}); each line of a .jsonl is one object") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        found = f"keys {sorted(record)}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(f'{path}, line {number}: no "text" with a string ({found}); rename the key that has the text')
    return record["text"].encode(errors="replace")


def _groups(chunks: Iterable[TextChunk]) -> Iterator[list[TextChunk]]:
    """Collect chunks into groups of about `CHUNK_BYTES`; a tokenizer works on a group with all cores."""
    group: list[TextChunk] = []
    size = 0
    for chunk in chunks:
        group.append(chunk)
        size += len(chunk.text) + 1  # count empty chunks too, or many blank lines would make one endless group
        if size >= CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
