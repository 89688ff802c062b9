"""Tokenizers that return the character range of every token: sentencepiece model files and `tokenizer.json`.

Special tokens that a file lacks get ids after its vocabulary. A sentencepiece model's folder may declare tokens in
`added_tokens.json` or `tokenizer_config.json`: InternLM2's model file, for one, has no piece named `<|im_end|>`.
"""

import hashlib
import re
import string
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import tokenizers
from numpy.typing import NDArray

from megatron.vlm.preprocessing.tokenizer_files import ADDED, CONFIG, TOKEN_ID, read_neighbour, token_text
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.reading.costs import SECONDS, is_panic, tried
from omnibal_ext.reading.files import read_bytes

REMEDY = "download it again, or give another tokenizer"
MOST_BYTES = 2**26
"""Most bytes of a tokenizer's file: published ones have up to 34 MB."""
BYTES_A_SECOND = 2**23
"""Bytes of a tokenizer's file for each of which it may take a second more than `SECONDS`: half of what is usual."""
SAMPLE = 4 * f"{string.printable} Zürich\u0301 \u4e2d\u6587 \u0643\u062a\u0627\u0628 \U0001f642 <|im_start|>user\n"
"""What a tokenizer must encode to be used."""


class TokenizedText(NamedTuple):
    """Token ids int32 [T] and half-open character ranges: starts, ends int64 [T]."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, ids: Sequence[int], ranges: Sequence[tuple[int, int]]) -> "TokenizedText":
        """Make it of ids and their character ranges (start, end)."""
        bounds = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        return cls(np.array(ids, dtype=np.int32), bounds[:, 0], bounds[:, 1])

    def covers(self, start: int, end: int) -> NDArray[np.bool_]:
        """Return which tokens have a character in [start, end): bool [T].

        If a character is several byte tokens, only the last may have its range; the empty ones count at its start.
        """
        return (self.starts < end) & ((self.ends > start) | (self.starts >= start))


MORE = ("lstrip", "rstrip", "single_word")
"""Flags of tokens that strip spaces around them or match entire words only: not supported for sentencepiece."""


class SentencePieceTokenizer:
    """A sentencepiece model file. Each text between special tokens is encoded separately (dummy prefix and all).

    `reserved`: further texts that conversations must not contain. `vocab_size` is above all ids, those of appended
    special tokens included, `vocabulary_size` the file's own. `pad_token_id` is never trained; 0: there is none.
    """

    kind = "sentencepiece"

    def __init__(self, path: Path, special_tokens: Sequence[str]) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_proto=read_bytes(path, REMEDY, MOST_BYTES))
        self._pieces = [self._model.id_to_piece(number) for number in range(self._model.vocab_size())]
        self._special = declared_tokens(path.parent)
        flagged = [token for token in _decoder(path.parent).values() if isinstance(token, dict)]
        plain = {token_text(token) for token in flagged if token.get("special") is False}
        taking_more = {token_text(token) for token in flagged if any(map(token.get, MORE))}
        self.reserved = frozenset(self._special) & (_ends(path.parent) - plain | taking_more)
        self.vocabulary_size = len(self._pieces)
        self.reserved |= self._second_names({*self.reserved, *special_tokens})
        self.vocab_size = max([self.vocabulary_size, *(number + 1 for number in self._special.values())])
        for token in special_tokens:
            if token not in self._special:
                self._special[token] = self._known_or_new(token)
        longest_first = sorted(self._special, key=len, reverse=True)
        self._splitter = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        padding = self._model.pad_id() if self._model.pad_id() >= 0 else self._model.eos_id()
        self.pad_token_id = max(padding, 0)

    def _second_names(self, tokens: Iterable[str]) -> frozenset[str]:
        """Return the model file's own names of tokens that the folder renames; in a text they become the same ids.

        InternLM2's file, for one, has `[UNUSED_TOKEN_145]` for `<|im_end|>`.
        """
        ids = {self._special[token] for token in tokens if token in self._special}
        pieces = {number: self._pieces[number] for number in ids if number < self.vocabulary_size}
        names = {number: piece.replace("\u2581", " ") for number, piece in pieces.items()}
        return frozenset(name for number, name in names.items() if number in self._model.encode(name))

    def _known_or_new(self, token: str) -> int:
        known = self._model.piece_to_id(token)
        if self._model.id_to_piece(known) == token:
            return int(known)
        self.vocab_size += 1
        return self.vocab_size - 1

    def encode(self, text: str) -> TokenizedText:
        """Encode `text`, nothing added before or after."""
        ids: list[int] = []
        ranges: list[tuple[int, int]] = []
        position = 0
        for piece in self._splitter.split(text):
            if piece in self._special:
                ids.append(self._special[piece])
                ranges.append((position, position + len(piece)))
            elif piece:
                mapped = self._model.encode(piece, return_type="offset_mapping")
                ids += mapped["ids"]
                ranges += [(position + start, position + end) for start, end in mapped["offsets"]]
            position += len(piece)
        return TokenizedText.of(ids, ranges)

    def token_id(self, token: str) -> int:
        """Return the id of a special token."""
        return self._special[token]

    def vocabulary_hash(self) -> str:
        """Hash the file's vocabulary without added tokens, the same for both file formats of one tokenizer."""
        return _vocabulary_hash((piece, number) for number, piece in enumerate(self._pieces))


class HuggingFaceTokenizer:
    """A `tokenizer.json` of Hugging Face's `tokenizers` library; fields and methods as of `SentencePieceTokenizer`."""

    kind = "huggingface"

    def __init__(self, path: Path, special_tokens: Sequence[str]) -> None:
        self._model = tokenizers.Tokenizer.from_buffer(read_bytes(path, REMEDY, MOST_BYTES))
        self._model.no_truncation()
        self._model.no_padding()
        own = self._model.get_added_tokens_decoder().values()
        self.reserved = _ends(path.parent) & {token.content for token in own if token.special}
        self._model.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in special_tokens])
        self.vocabulary_size: int = self._model.get_vocab_size(with_added_tokens=False)
        self._ids: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        self.vocab_size = TOKEN_ID(f"{path}: the largest id", max(self._ids.values())) + 1
        padding = token_text(read_neighbour(path.parent, CONFIG).get("pad_token"))
        self.pad_token_id = self._ids.get(padding, 0)

    def encode(self, text: str) -> TokenizedText:
        """Encode `text`, nothing added before or after. Raises `Rejected` (no_tokens) if the library fails."""
        try:
            encoded = self._model.encode(text, add_special_tokens=False)
        except BaseException as error:  # of the file's parts any may fail at any text
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise Rejected("no_tokens", f"the tokenizer fails: {str(error)[:200]}") from None
        return TokenizedText.of(encoded.ids, encoded.offsets)

    def token_id(self, token: str) -> int:
        """Return the id of a special token."""
        return self._ids[token]

    def vocabulary_hash(self) -> str:
        """Hash the file's vocabulary like `SentencePieceTokenizer.vocabulary_hash`."""
        return _vocabulary_hash(self._model.get_vocab(with_added_tokens=False).items())


ChatTokenizer = SentencePieceTokenizer | HuggingFaceTokenizer
"""Either tokenizer; each maps every special token in a text to one id."""


def _vocabulary_hash(pieces: Iterable[tuple[str, int]]) -> str:
    lines = sorted(f"{number}\t{piece}\n" for piece, number in pieces)
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def load_tokenizer(path: Path, special_tokens: Sequence[str]) -> ChatTokenizer:
    """Open a tokenizer file and make sure that each of `special_tokens` is one id.

    Raises `UserError` if the file is missing or is no tokenizer, or takes more time or memory than is allowed.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; --tokenizer-model is a sentencepiece .model or a tokenizer.json")
    status, special = path.stat(), tuple(special_tokens)
    _try(path, special, (status.st_ino, status.st_size, status.st_mtime_ns))
    return _kind(path)(path, special)


def _kind(path: Path) -> type[ChatTokenizer]:
    return HuggingFaceTokenizer if path.suffix == ".json" else SentencePieceTokenizer


@lru_cache(2**6)
def _try(path: Path, special_tokens: tuple[str, ...], version: tuple[int, ...]) -> None:
    """Try, once for each version of a file, to open it and encode a text, with limits: both libraries may fail in any
    way, and end the process. Raises UserError."""
    seconds = SECONDS + path.stat().st_size // BYTES_A_SECOND
    tried(partial(_use, path, special_tokens), str(path), REMEDY, seconds)


def _use(path: Path, special_tokens: tuple[str, ...]) -> None:
    kind = _kind(path)
    try:
        kind(path, special_tokens).encode(SAMPLE + "a\n".join(special_tokens))
    except (UserError, MemoryError):
        raise
    except BaseException as error:
        detail = error.detail if isinstance(error, Rejected) else " ".join(str(error)[:200].split())
        raise UserError(f"{path}: not a {kind.kind} tokenizer ({detail}); {REMEDY}") from error


def model_tokenizer(folder: Path) -> Path | None:
    """Return the tokenizer file of a model's folder, if there is one."""
    files = (folder / name for name in ("tokenizer.json", "tokenizer.model"))
    return next((file for file in files if file.is_file()), None)


def declared_tokens(folder: Path) -> dict[str, int]:
    """Return token -> id of what Hugging Face's files in `folder` add to a sentencepiece model."""
    declared = {token_text(token): int(number) for number, token in _decoder(folder).items()}
    return declared | read_neighbour(folder, ADDED)


def _decoder(folder: Path) -> dict[str, Any]:
    """Return the tokens that tokenizer_config.json adds, with their flags, by id as text."""
    found: dict[str, Any] = read_neighbour(folder, CONFIG).get("added_tokens_decoder", {})
    return found


def _ends(folder: Path) -> frozenset[str]:
    """Return the texts of bos, eos and pad tokens in a folder's tokenizer_config.json."""
    config = read_neighbour(folder, CONFIG)
    tokens = (token_text(config.get(name)) for name in ("bos_token", "eos_token", "pad_token"))
    return frozenset(token for token in tokens if token.strip())
