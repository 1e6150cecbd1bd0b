"""From a path to a source of tokens, whatever kind of file it is; text is prepared once and kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fourfold.data.foreign import Megatron, NanoGPT
from fourfold.data.source import Source
from fourfold.data.text import STANDARD_LIBRARY, TextFile, digest, missing, prepare_files, text_files
from fourfold.data.tokenizer import Tokenizer
from fourfold.data.tokens import TokenFile


def open_source(
    path: str | Path,
    *,
    tokenizer: Tokenizer | None,
    eod: int | None = None,
    cache: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Source:
    """A token file, a Megatron pair (by its prefix or either file), nanoGPT's `.bin`, or text.

    Text (a file, a folder, `standard-library`) is written by `tokenizer` into a token file in `cache`, and read
    from there as long as neither changes. A token file must have been made by `tokenizer`, unless that is None.
    `eod` says which id ends documents in files that do not say so themselves.
    """
    if str(path) != STANDARD_LIBRARY:
        path = Path(path).expanduser()
        source = _token_source(path, tokenizer, eod)
        if source is not None:
            return source
    if eod is not None and (tokenizer is None or eod != tokenizer.eod):
        raise ValueError(f"eod={eod} is for .bin files; in the text {path} documents end as the tokenizer says")
    files = text_files(path)
    if tokenizer is None:
        raise ValueError(f"{path} is text: give a tokenizer, bytes or a tokenizer.json")
    return _prepared(path, files, tokenizer, cache, progress)


def _token_source(path: Path, tokenizer: Tokenizer | None, eod: int | None) -> Source | None:
    """The source of a path that has tokens; none if it is text. A prefix of a Megatron pair need not exist itself."""
    pair = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    index = Path(f"{pair}.idx")
    if index.is_file() and (path.suffix in (".bin", ".idx") or not path.exists()):
        return Megatron(pair, eod)
    if not path.exists():
        raise missing(path)
    if path.is_file() and path.suffix == ".bin":
        return NanoGPT(path, eod)
    if path.is_file() and path.suffix == ".tokens":
        return _checked(TokenFile(path), tokenizer, eod)
    return None


def _checked(source: TokenFile, tokenizer: Tokenizer | None, eod: int | None) -> TokenFile:
    """Refuse a token file made by another tokenizer: its ids mean something else."""
    if eod not in (None, source.eod):
        raise ValueError(f"{source.path} ends documents with {source.eod}, not eod={eod}; leave eod away")
    if tokenizer is not None and _identity(tokenizer.description) != _identity(source.tokenizer):
        raise ValueError(
            f"{source.path} was made by the tokenizer {source.tokenizer}, not by {tokenizer.description}; give that "
            "tokenizer, or prepare the text again with this one"
        )
    return source


def _identity(description: dict[str, str]) -> str | None:
    """A file of the same content is the same tokenizer, whatever it is called."""
    return description.get("sha256") or description.get("name")


def _prepared(
    path: str | Path,
    files: list[TextFile],
    tokenizer: Tokenizer,
    cache: Path,
    progress: Callable[[int, int], None] | None,
) -> TokenFile:
    name = Path(path).resolve().name
    kept = cache / f"{name}-{digest(files, tokenizer)}.tokens"
    if kept.exists():
        try:
            return TokenFile(kept, name)
        except ValueError:
            pass  # damaged since; what follows replaces it
    prepare_files(files, kept, tokenizer, progress=progress)
    return TokenFile(kept, name)
