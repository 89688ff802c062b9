"""Which tokens of a pack each rank of a team runs: short documents whole, long ones cut, all places level in tokens.

    documents 9 | 2 | 2 | 3 over 4 places, 4 tokens each
    place 0  document 0: 0-1, document 3: 0-3      place 2  document 0: 3-5, document 2: 0-2
    place 1  document 0: 1-3, document 1: 0-2      place 3  document 0: 5-9

Only documents on more than one place need others' tokens for attention, so only these are exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """Tokens [begin, end) of a document of the pack."""

    document: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of one pack, a part for each place of the team that runs it."""

    spans: tuple[tuple[Span, ...], ...]
    """Of every place, its spans, ascending by document; of one document a place has one span at most."""
    tokens: tuple[int, ...]
    """Of every place, filled up to the multiple: what it runs."""
    cut: tuple[int, ...]
    """Documents on more than one place, ascending: only these are exchanged."""
    exchanged: int
    """Tokens of those documents."""


def share_tokens(lengths: Sequence[int], width: int, multiple: int = 1) -> Shares:
    """Divide the documents of a pack, of `lengths` tokens, over the `width` places of a team.

    1. A place runs at most an equal share of the tokens, filled up to `multiple`.
    2. Documents that fit lie whole, the longest first, each on the emptiest place. Where that leaves one no room, try
       the fullest place that has room, and take what cuts fewer tokens.
    3. What no place has room for is poured into what places have left, in their order, the longest document first.

    Of `width` 1 the one place has every document whole.
    """
    total = sum(lengths)
    most = -(-total // (width * multiple)) * multiple
    places = _whole(lengths, width, most, emptiest=True)
    if any(place < 0 and length <= most for place, length in zip(places, lengths, strict=True)):
        tight = _whole(lengths, width, most, emptiest=False)
        places = min((places, tight), key=lambda each: _tokens_cut(lengths, each))
    spans = _pour(lengths, places, width, most)
    cut = tuple(document for document, place in enumerate(places) if place < 0)
    tokens = tuple(-(-sum(end - begin for _, begin, end in own) // multiple) * multiple for own in spans)
    return Shares(tuple(tuple(sorted(own)) for own in spans), tokens, cut, _tokens_cut(lengths, places))


def tokens_sent(cut: int, width: int) -> int:
    """Tokens that each of `width` ranks sends to the others: its part of the `cut` ones, of all heads but its own."""
    return -(-cut * (width - 1) // width**2)


def _whole(lengths: Sequence[int], width: int, most: int, emptiest: bool) -> list[int]:
    """Return the place of every document that lies whole, -1 for the others."""
    places, left = [-1] * len(lengths), [most] * width
    for document in sorted(range(len(lengths)), key=lambda document: -lengths[document]):
        with_room = [place for place in range(width) if left[place] >= lengths[document]]
        if with_room:
            place = (max if emptiest else min)(with_room, key=left.__getitem__)
            places[document] = place
            left[place] -= lengths[document]
    return places


def _tokens_cut(lengths: Sequence[int], places: Sequence[int]) -> int:
    return sum(length for length, place in zip(lengths, places, strict=True) if place < 0)


def _pour(lengths: Sequence[int], places: Sequence[int], width: int, most: int) -> list[list[Span]]:
    """Return the spans of every place; documents of no place go where there is room."""
    spans: list[list[Span]] = [[] for _ in range(width)]
    left = [most] * width
    for document, place in enumerate(places):
        if place >= 0:
            spans[place].append(Span(document, 0, lengths[document]))
            left[place] -= lengths[document]
    place = 0
    without = (document for document, own in enumerate(places) if own < 0)
    for document in sorted(without, key=lambda document: -lengths[document]):
        begin = 0
        while begin < lengths[document]:
            end = min(lengths[document], begin + left[place])
            if end > begin:
                spans[place].append(Span(document, begin, end))
                left[place] -= end - begin
            begin = end
            place += left[place] == 0
    return spans
