"""Text to token ids, with the character range of every token, whatever file the tokenizer comes from."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from omnibal_ext.errors import UserError


class Encoding(NamedTuple):
    """Token ids int32 [T] and the half-open character range of each: starts, ends int64 [T]."""

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]

    def covers(self, start: int, end: int) -> NDArray[np.bool_]:
        """Which tokens hold a character of [start, end): bool [T].

        A character written as several byte tokens has its range on the last of them; the empty ones before it count
        where it starts.
        """
        return (self.starts < end) & ((self.ends > start) | (self.starts >= start))


class ChatTokenizer(Protocol):
    """What preprocessing needs of a tokenizer. Special tokens in a text are always recognised, as one id each."""

    kind: str
    vocab_size: int  # ids are below it, the appended special tokens included
    pad_token_id: int

    def encode(self, text: str) -> Encoding:
        """The tokens of `text`, nothing added before or after."""

    def token_id(self, token: str) -> int:
        """The id of a special token."""


class SentencePieceTokenizer:
    """A sentencepiece model file. Special tokens that it lacks get ids after its vocabulary, in the order given."""

    kind = "sentencepiece"

    def __init__(self, path: Path, special_tokens: Sequence[str]) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self._special: dict[str, int] = {}
        self.vocab_size = self._model.vocab_size()
        for token in dict.fromkeys(special_tokens):
            known = self._model.piece_to_id(token)
            if self._model.id_to_piece(known) != token:
                known, self.vocab_size = self.vocab_size, self.vocab_size + 1
            self._special[token] = known
        longest_first = sorted(self._special, key=len, reverse=True)
        self._splitter = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        padding = self._model.pad_id() if self._model.pad_id() >= 0 else self._model.eos_id()
        self.pad_token_id = max(padding, 0)

    def encode(self, text: str) -> Encoding:
        """The tokens of `text`; the model file's own rules (dummy prefix or none) hold between special tokens."""
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
        bounds = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        return Encoding(np.array(ids, dtype=np.int32), bounds[:, 0], bounds[:, 1])

    def token_id(self, token: str) -> int:
        """The id of a special token."""
        return self._special[token]


def load_tokenizer(path: Path, special_tokens: Sequence[str]) -> ChatTokenizer:
    """Open a tokenizer file and make sure that each of `special_tokens` is one id.

    Raises `UserError` if the file is missing or is no tokenizer.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such tokenizer file; give --tokenizer-model a sentencepiece .model")
    try:
        return SentencePieceTokenizer(path, special_tokens)
    except (RuntimeError, OSError) as error:
        raise UserError(f"{path}: not a sentencepiece model ({error})") from error
