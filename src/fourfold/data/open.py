"""Opens a path as a source of tokens, whatever kind of file it is. Text is tokenized once and cached."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fourfold.data.text import STANDARD_LIBRARY, TextFile, digest, missing, prepare_files, text_files
from fourfold.data.token_files import MegatronPair, NanoGPTFile, TokenFile, TokenSource
from fourfold.data.tokenizer import Tokenizer


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
    that ends documents in files that do not say so themselves.
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
    return _prepared(path, files, tokenizer, cache, progress)


def _open_tokens(path: Path, tokenizer: Tokenizer | None, eod: int | None) -> TokenSource | None:
    """Open a path that has tokens; return None for text. The prefix of a Megatron pair is not a file itself."""
    pair = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    index = Path(f"{pair}.idx")
    if index.is_file() and (path.suffix in (".bin", ".idx") or not path.exists()):
        return MegatronPair(pair, eod)
    if not path.exists():
        raise missing(path)
    if path.is_file() and path.suffix == ".bin":
        return NanoGPTFile(path, eod)
    if path.is_file() and path.suffix == ".tokens":
        source = TokenFile(path)
        _check_tokenizer(source, tokenizer, eod)
        return source
    return None


def _check_tokenizer(source: TokenFile, tokenizer: Tokenizer | None, eod: int | None) -> None:
    """Refuse a token file that another tokenizer made: its ids have another meaning."""
    if eod not in (None, source.eod):
        raise ValueError(f"{source.path} ends documents with {source.eod}, not eod={eod}; omit eod")

    def identity(description: dict[str, str]) -> str | None:
        return description.get("sha256") or description.get("name")  # a file may be renamed; its content decides

    if tokenizer is not None and identity(tokenizer.description) != identity(source.tokenizer):
        raise ValueError(
            f"{source.path} was made by the tokenizer {source.tokenizer}, not by {tokenizer.description}; give that "
            "tokenizer, or prepare the text again with this one"
        )


def _prepared(
    path: str | Path,
    files: list[TextFile],
    tokenizer: Tokenizer,
    cache: Path,
    progress: Callable[[int, int], None] | None,
) -> TokenFile:
    """Return the cached token file of this text; write it first if there is none."""
    name = Path(path).resolve().name
    kept = cache / f"{name}-{digest(files, tokenizer)}.tokens"
    if kept.exists():
        try:
            return TokenFile(kept, name)
        except ValueError:
            pass  # it was damaged after it was written, and is replaced below
    prepare_files(files, kept, tokenizer, progress=progress)
    return TokenFile(kept, name)
