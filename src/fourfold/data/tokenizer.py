"""Tokenizers: the bytes of the text as ids, or a JSON file in the format of Hugging Face's `tokenizers`."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<｜end▁of▁sentence｜>")  # noqa: RUF001
"""Usual names of the token that ends a document. The first of them that is in the vocabulary is used."""
RUST_PANIC = "pyo3_runtime"
"""The module that the exception of a panic in Rust names as its own; it cannot be imported."""


class Tokenizer(ABC):
    """Turns text into ids and ids into text.

    vocab        all ids are below this number
    eod          the id that ends a document
    description  what a token file records about its tokenizer: the name and, for a file, its sha256
    """

    vocab: int
    eod: int
    description: dict[str, str]

    @abstractmethod
    def encode_many(self, texts: Sequence[bytes]) -> list[Tensor]:
        """Return the ids of each text (UTF-8 bytes) as int64, without an end-of-document token."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def encode(self, text: str | bytes) -> Tensor:
        """Return the ids of one text."""
        return self.encode_many([text.encode(errors="replace") if isinstance(text, str) else text])[0]

    def decode(self, ids: Sequence[int] | Tensor) -> str:
        """Return the text of these ids, without end-of-document tokens."""
        ids = ids.tolist() if isinstance(ids, Tensor) else list(ids)
        outside = [found for found in ids if not 0 <= found < self.vocab]
        if outside:
            raise ValueError(
                f"the id {outside[0]} is outside of the vocabulary of the tokenizer {self.description['name']}, "
                f"which has ids 0 to {self.vocab - 1}; decode with the tokenizer that made the ids"
            )
        return self._decode([found for found in ids if found != self.eod])


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the text; 256 ends a document."""

    vocab = 257
    eod = 256
    description = {"name": "bytes"}  # noqa: RUF012  # never written to

    def encode_many(self, texts: Sequence[bytes]) -> list[Tensor]:
        empty = torch.empty(0, dtype=torch.int64, device="cpu")
        return [torch.frombuffer(bytearray(text), dtype=torch.uint8).long() if text else empty for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")

    @classmethod
    def to_json(cls) -> dict[str, Any]:
        """Return the same tokenizer in the format of Hugging Face's `tokenizers`: byte-level BPE without merges."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        end = {"id": cls.eod, "content": END_OF_DOCUMENT[0], "special": True}
        end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return {
            "version": "1.0",
            **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor")),
            "added_tokens": [end],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {_letter(byte): byte for byte in range(cls.eod)}, "merges": []},
        }

    @classmethod
    def is_json(cls, found: Mapping[str, Any]) -> bool:
        """Return whether a tokenizer in that format has these ids, also if another program has written it again."""
        model, ours = found.get("model") or {}, cls.to_json()
        vocab = {token: number for token, number in (model.get("vocab") or {}).items() if number != cls.eod}
        added = [(token.get("id"), token.get("content")) for token in found.get("added_tokens") or ()]
        return (
            model.get("type") == "BPE"
            and vocab == ours["model"]["vocab"]
            and not model.get("merges")
            and added == [(cls.eod, END_OF_DOCUMENT[0])]
        )


def _letter(byte: int) -> str:
    """Return the letter that stands for a byte in byte-level BPE: Latin-1's, or one beyond it if that is no letter."""
    unseen = [*range(33), *range(127, 161), 173]  # control characters and spaces
    return chr(256 + unseen.index(byte)) if byte in unseen else chr(byte)


class JsonTokenizer(Tokenizer):
    """A tokenizer from a JSON file. `eod` is the end-of-document token, or its id, if its name is unusual."""

    def __init__(self, path: Path, eod: str | int | None = None) -> None:
        self._tokenizer = _load(path)
        # The file may ask to truncate texts to a model's length or to pad them; neither is wanted for training data.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ValueError(f"{path} is a tokenizer without a token; give one that was trained on texts")
        self.vocab = max(ids.values()) + 1  # not len(ids): ids may have gaps
        self.eod = _end_of_document(path, ids, self.vocab, eod)
        self.description = {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}

    def encode_many(self, texts: Sequence[bytes]) -> list[Tensor]:
        decoded = [text.decode(errors="replace") for text in texts]
        with _naming_errors(
            f"the tokenizer {self.description['name']} cannot encode a text", "give one that knows every text"
        ):
            found = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [torch.tensor(encoding.ids, dtype=torch.int64, device="cpu") for encoding in found]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def load_tokenizer(name: str | Path, eod: str | int | None = None) -> Tokenizer:
    """Return the tokenizer `bytes`, or the one in a `tokenizer.json` at the path `name`."""
    if str(name) == "bytes":
        if eod not in (None, ByteTokenizer.eod):
            raise ValueError(f"eod={eod!r}: the tokenizer bytes ends documents with {ByteTokenizer.eod}; omit eod")
        return ByteTokenizer()
    path = Path(name).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no tokenizer {str(name)!r}; give bytes or the path of a tokenizer.json of Hugging Face"
        )
    return JsonTokenizer(path, eod)


def _load(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            f"reading {path} needs the package tokenizers: pip install 'fourfold[train]', or use the tokenizer bytes"
        ) from error
    with _naming_errors(f"{path} is not a tokenizer", "give a tokenizer.json of Hugging Face's tokenizers"):
        return tokenizers.Tokenizer.from_file(str(path))


@contextmanager
def _naming_errors(what: str, way_out: str) -> Iterator[None]:
    """Turn every error of the package tokenizers into one that says what failed and what to do.

    It raises a bare Exception, and where Rust panics a BaseException that no module exports, such as where a regular
    expression like (a+)+$ has tried ten million ways to match.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__module__ != RUST_PANIC:
            raise
        raise ValueError(f"{what}: {error}; {way_out}") from error


def _end_of_document(path: Path, ids: dict[str, int], vocab: int, eod: str | int | None) -> int:
    if isinstance(eod, int):
        if not 0 <= eod < vocab:
            raise ValueError(f"eod={eod}: {path} has ids 0 to {vocab - 1}; give one of them or the text of a token")
        return eod
    for name in END_OF_DOCUMENT if eod is None else (eod,):
        if name in ids:
            return ids[name]
    tried = " ".join(END_OF_DOCUMENT) if eod is None else repr(eod)
    raise ValueError(f"{path} has no token that ends a document (tried {tried}); name one of its tokens with eod=")
