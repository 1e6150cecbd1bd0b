"""Opens a path as a source of tokens, whatever kind of file it is; text is tokenized once, into a cached token file.

A file is one document. In a `.jsonl` or `.jsonl.gz` file each line is one document, its text under a key; in a
`.parquet` file each row is one, its text in a column. The key and the column are "text", or the `column` that is asked
for. In a folder, the files with a suffix of `TEXT_SUFFIXES` are read, in the order of their paths and including all
subfolders, except names that begin with a dot. A file that is named directly is text whatever its suffix is.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from fourfold.data.token_files import MegatronPair, NanoGPTFile, TokenFile, TokenSource, TokenWriter
from fourfold.data.tokenizer import Tokenizer
from fourfold.errors import nearest, shortened
from fourfold.parse import parse_json

STANDARD_LIBRARY = "standard-library"
"""The name of a corpus that is on every machine, about 11 MB: the source of Python's standard library."""

NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
"""Folders beside the standard library that are not on every machine, or are not part of the library proper."""

PROSE = (".txt", ".text", ".md", ".rst", ".tex", ".html", ".htm", ".xml", ".log")
COLUMN = "text"
"""The key or column with the text of a document by default."""
CHATS = ("messages", "conversations", "conversation", "chosen", "turns")
"""The keys under which files of chats have their turns."""
LINES, ZIPPED_LINES, PARQUET = ".jsonl", ".jsonl.gz", ".parquet"
IN_COLUMNS = (LINES, ZIPPED_LINES, PARQUET)
"""Suffixes of files with several documents, each under a key or in a column."""
RECORDS = (".json", *IN_COLUMNS, ".csv", ".tsv", ".yaml", ".yml", ".toml", ".ini", ".cfg", ".sql")
CODE = (".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".java", ".kt", ".scala", ".js", ".ts", ".go")
MORE_CODE = (".rs", ".swift", ".hs", ".rb", ".php", ".lua", ".pl", ".r", ".jl", ".sh")
TEXT_SUFFIXES = PROSE + RECORDS + CODE + MORE_CODE
"""Suffixes of the files that are read from a folder; other files there are often binary."""

CHUNK_BYTES = 4 << 20
"""Bytes of text that are read and tokenized at once: enough to keep all cores busy, little enough for any memory. A
longer file is cut at the end of the line that passes this size."""
ROWS_AT_ONCE = 256
"""Rows of a .parquet file that are decoded at once: few enough that rows of whole books fit any memory."""

# Opening a path


def open_source(
    path: str | Path,
    *,
    tokenizer: Tokenizer | None,
    eod: int | None = None,
    cache: Path,
    column: str = COLUMN,
    progress: Callable[[int, int], None] | None = None,
) -> TokenSource:
    """Open a token file, a Megatron pair (by its prefix or either file), nanoGPT's `.bin`, or text.

    Text (a file, a folder, `standard-library`) is tokenized into a token file in `cache`, which is used again until the
    text or the tokenizer changes. A token file must have been made by `tokenizer`, unless that is None. `eod` is the id
    that ends documents in files that do not record it. `column` has the text in `.jsonl` and `.parquet` files.
    """
    if str(path) != STANDARD_LIBRARY:
        path = Path(path).expanduser()
        source = _open_tokens(path, tokenizer, eod)
        if source is not None:
            if column != COLUMN:
                raise ValueError(f"column={column!r}: {path} has tokens and no columns; leave column out")
            return source
    if eod is not None and (tokenizer is None or eod != tokenizer.eod):
        raise ValueError(f"eod={eod} is for .bin files; in the text {path} the tokenizer decides how documents end")
    files = text_files(path)
    _require_columns(files, column, path)
    if tokenizer is None:
        raise ValueError(f"{path} is text: give a tokenizer, bytes or a tokenizer.json")
    name = Path(path).resolve().name
    # The key changes when a file or the tokenizer does, so a cached file is never of another text.
    content = [[[file.name, file.size, file.changed] for file in files], tokenizer.description, tokenizer.eod]
    content += [column] if column != COLUMN else []
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    cached = cache / f"{name}-{key}.tokens"
    with suppress(FileNotFoundError, ValueError):  # not there yet, or damaged since it was written
        return TokenFile(cached, name)
    prepare([path], cached, tokenizer, column=column, progress=progress)
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
    if path.is_symlink():
        return FileNotFoundError(
            f"{path} is a link to {os.readlink(path)!r}, which is not there; mount its storage, or mend the link"
        )
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
    column: str = COLUMN,
    progress: Callable[[int, int], None] | None = None,
) -> TokenFile:
    """Tokenize the text of files and folders (or `standard-library`) into one token file, and return it opened.

    `column` has the text in `.jsonl` and `.parquet` files. `progress(bytes_done, bytes_total)` is called every few
    megabytes.
    """
    inputs = list(inputs)
    files = [file for name in inputs for file in text_files(name)]
    _require_columns(files, column, ", ".join(map(str, inputs)))
    out = Path(out).expanduser()
    if out.suffix != ".tokens":
        raise ValueError(f"{out}: the name of a token file ends in .tokens; write {out.with_suffix('.tokens')}")
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; give the path of a file to write")
    if not files:
        raise ValueError(f"{out}: there is no input; name files, folders or {STANDARD_LIBRARY}")
    total, done = sum(file.size for file in files), 0
    out.parent.mkdir(parents=True, exist_ok=True)
    with TokenWriter(out, vocab=tokenizer.vocab, eod=tokenizer.eod, tokenizer=tokenizer.description) as writer:
        for group in _groups(chunk for file in files for chunk in _chunks(file.path, column)):
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


def _require_columns(files: Iterable[TextFile], column: str, where: object) -> None:
    """Raise if a column is asked for and none of the files has columns."""
    if column != COLUMN and not any(_has_suffix(file.name, IN_COLUMNS) for file in files):
        raise ValueError(f"column={column!r}: {where} has no {' or '.join(IN_COLUMNS)} file; leave column out")


def _has_suffix(name: str, suffixes: tuple[str, ...]) -> bool:
    return name.lower().endswith(suffixes)


def _walk(folder: Path, suffixes: tuple[str, ...], wanted: Callable[[str], bool]) -> list[TextFile]:
    """Return the files below a folder that have one of the suffixes; skip names and folders that are not wanted."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = filter(wanted, folders)  # changed in place, since os.walk visits what is left in this list
        found += [Path(root, name) for name in names if wanted(name) and _has_suffix(name, suffixes)]
    # Sorted by the parts of the path: the order must be the same on every machine, whatever the file system lists.
    paths = sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).parts)
    return [_text_file(path, folder) for path in paths]


def _text_file(path: Path, folder: Path) -> TextFile:
    state = path.stat()
    return TextFile(path, path.relative_to(folder).as_posix(), state.st_size, state.st_mtime_ns)


def _chunks(path: Path, column: str) -> Iterator[TextChunk]:
    """Read the documents of a file chunk by chunk."""
    if _has_suffix(path.name, (PARQUET,)):
        yield from _parquet_rows(path, column)
        return
    if _has_suffix(path.name, (ZIPPED_LINES,)):
        yield from _zipped_lines(path, column)
        return
    with path.open("rb") as file:
        if b"\0" in file.read(8192):  # a zero byte near the beginning marks a binary file
            raise ValueError(
                f"{path} is not UTF-8 text: there are zero bytes in it; unpack or convert it, or leave it out"
            )
        file.seek(0)
        if _has_suffix(path.name, (LINES,)):
            for number, line in enumerate(file, 1):
                yield TextChunk(_text_of_line(path, number, line, column), True, len(line))
            return
        while text := file.read(CHUNK_BYTES):
            text += file.readline()  # cut at the end of a line, which is never inside of a character
            yield TextChunk(text, False, len(text))
    yield TextChunk(b"", True, 0)


def _zipped_lines(path: Path, column: str) -> Iterator[TextChunk]:
    """Read the lines of a zipped `.jsonl` file; the bytes of a chunk are those that its lines took in the file."""
    done = 0
    with path.open("rb") as packed, gzip.GzipFile(fileobj=packed) as file:
        try:
            for number, line in enumerate(file, 1):
                yield TextChunk(_text_of_line(path, number, line, column), True, packed.tell() - done)
                done = packed.tell()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} cannot be unpacked ({error}); copy it again") from error


def _parquet_rows(path: Path, column: str) -> Iterator[TextChunk]:
    """Read the rows of a `.parquet` file; a row without text is an empty document."""
    try:
        import pyarrow  # type: ignore[import-not-found]
        from pyarrow.parquet import ParquetFile  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(f"{path} needs the package pyarrow: pip install 'fourfold[parquet]'") from error
    try:
        with ParquetFile(path) as file:
            names, rows = file.schema_arrow.names, file.metadata.num_rows
            if column not in names:
                raise ValueError(
                    f"{path} has no column {column!r}{nearest(column, names)}; it has {', '.join(names)}; set the "
                    "column of the source"
                )
            size, done = path.stat().st_size, 0
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=[column]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str | None):
                        raise ValueError(
                            f"{path}, row {done + 1}: the column {column!r} has {type(text).__name__}, not text; set "
                            "the column of the source"
                        )
                    done += 1
                    share = size * done // rows - size * (done - 1) // rows  # rows have no size of their own
                    yield TextChunk((text or "").encode(errors="replace"), True, share)
    except pyarrow.ArrowException as error:
        said = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a sound .parquet file ({said}); copy it again") from error


def _text_of_line(path: Path, number: int, line: bytes, key: str) -> bytes:
    """Return the text of a line of JSON; a blank line has no text."""
    if not line.strip():
        return b""
    try:
        record = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not JSON ({error}); each line of a .jsonl is one object") from error
    turns = next(
        (name for name in (key, *CHATS) if isinstance(record, dict) and isinstance(record.get(name), list)), None
    )
    if turns is not None and not isinstance(record.get(key), str):
        raise ValueError(
            f'{path}, line {number}: "{turns}" is a list of turns, so this is a file of chats, and Fourfold trains on '
            "text; write each chat as one text under a key of its own, such as with apply_chat_template(..., "
            "tokenize=False) of the model's tokenizer in transformers, and name that key as the column"
        )
    if not isinstance(record, dict) or not isinstance(record.get(key), str):
        found = f"keys {shortened(str(sorted(record)))}" if isinstance(record, dict) else type(record).__name__
        raise ValueError(
            f'{path}, line {number}: no "{key}" with a string ({found}); set the column of the source to the key that '
            "has the text"
        )
    return record[key].encode(errors="replace")


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
