"""Shards of a wide pack: which tokens each rank of a team runs. Only documents that fit no rank are cut.

    documents of 9 | 2 | 2 | 3 tokens over 4 ranks, 4 tokens each
    rank 0  document 0: 0-1, document 3: 0-3      rank 2  document 0: 3-5, document 2: 0-2
    rank 1  document 0: 1-3, document 1: 0-2      rank 3  document 0: 5-9

Ranks count within the team. Only documents cut between ranks are exchanged for attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class TokenSpan(NamedTuple):
    """Tokens [begin, end) of a document of the pack."""

    document: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PackShards:
    """One pack divided over the ranks of its team."""

    spans: tuple[tuple[TokenSpan, ...], ...]
    """Spans of each rank, ascending by document; at most one per document."""
    tokens: tuple[int, ...]
    """Tokens that each rank runs, padded to the multiple."""
    cut: tuple[int, ...]
    """Documents cut between ranks, ascending: only these are exchanged."""
    exchanged: int
    """Tokens of those documents."""


def shard_tokens(lengths: Sequence[int], width: int, multiple: int = 1) -> PackShards:
    """Divide the documents of a pack, of `lengths` tokens, over the `width` ranks of a team.

    1. A rank runs at most an equal part of all tokens, rounded up to `multiple`.
    2. Documents that fit a rank stay complete, longest first, each on the emptiest rank. If one does not fit so, repeat
       with the fullest rank that has room, and keep the result that cuts fewer tokens.
    3. The others, longest first, fill the remaining room of the ranks in order.

    With `width` 1 the one rank has every document.
    """
    total = sum(lengths)
    most = -(-total // (width * multiple)) * multiple
    ranks = _place_complete(lengths, width, most, emptiest=True)
    if any(rank < 0 and length <= most for rank, length in zip(ranks, lengths, strict=True)):
        tight = _place_complete(lengths, width, most, emptiest=False)
        ranks = min((ranks, tight), key=lambda each: _tokens_cut(lengths, each))
    spans = _pour(lengths, ranks, width, most)
    cut = tuple(document for document, rank in enumerate(ranks) if rank < 0)
    tokens = tuple(-(-sum(end - begin for _, begin, end in held) // multiple) * multiple for held in spans)
    return PackShards(tuple(tuple(sorted(held)) for held in spans), tokens, cut, _tokens_cut(lengths, ranks))


def tokens_sent(cut: int, width: int) -> int:
    """Return the tokens that each of `width` ranks sends to the others.

    A rank has 1 / width of the `cut` tokens, and sends their heads, except the 1 / width of heads that it computes.
    """
    return -(-cut * (width - 1) // width**2)


def _place_complete(lengths: Sequence[int], width: int, most: int, emptiest: bool) -> list[int]:
    """Return the rank of each document, the emptiest (or fullest) with room, of `most` tokens; -1: must be cut."""
    ranks, left = [-1] * len(lengths), [most] * width
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        with_room = [rank for rank in range(width) if left[rank] >= lengths[document]]
        if with_room:
            rank = (max if emptiest else min)(with_room, key=left.__getitem__)
            ranks[document] = rank
            left[rank] -= lengths[document]
    return ranks


def _tokens_cut(lengths: Sequence[int], ranks: Sequence[int]) -> int:
    return sum(length for length, rank in zip(lengths, ranks, strict=True) if rank < 0)


def _pour(lengths: Sequence[int], ranks: Sequence[int], width: int, most: int) -> list[list[TokenSpan]]:
    """Return each rank's spans: its complete documents; those of rank -1 are cut over the room that is left."""
    spans: list[list[TokenSpan]] = [[] for _ in range(width)]
    left = [most] * width
    for document, rank in enumerate(ranks):
        if rank >= 0:
            spans[rank].append(TokenSpan(document, 0, lengths[document]))
            left[rank] -= lengths[document]
    rank = 0
    without = (document for document, held in enumerate(ranks) if held < 0)
    for document in sorted(without, key=lambda document: -lengths[document]):
        begin = 0
        while begin < lengths[document]:
            end = min(lengths[document], begin + left[rank])
            if end > begin:
                spans[rank].append(TokenSpan(document, begin, end))
                left[rank] -= end - begin
            begin = end
            rank += left[rank] == 0
    return spans
