"""Shards of wide packs: every token once, short documents complete, ranks balanced, hardly more cut than must be."""

import numpy as np
import pytest

from omnibal_ext.packing.shards import PackShards, TokenSpan, shard_tokens


def _cases(count: int, most_documents: int, widths: tuple[int, ...]) -> list[tuple[list[int], int, int]]:
    draw = np.random.default_rng(0)
    lengths = (
        draw.integers(1, draw.choice([6, 30, 300]), draw.integers(1, most_documents + 1)).tolist() for _ in range(count)
    )
    return [(own, int(draw.choice(widths)), int(draw.choice([1, 4, 16]))) for own in lengths]


def _most(lengths: list[int], width: int, multiple: int) -> int:
    return int(np.ceil(np.ceil(sum(lengths) / width) / multiple)) * multiple


def test_small_packs_written_out() -> None:
    """The picture of the docstring; a document that fits only on the fullest rank; equal ones in any run."""
    shares = shard_tokens([9, 2, 2, 3], 4)
    assert shares.spans == (
        (TokenSpan(0, 0, 1), TokenSpan(3, 0, 3)), (TokenSpan(0, 1, 3), TokenSpan(1, 0, 2)),
        (TokenSpan(0, 3, 5), TokenSpan(2, 0, 2)), (TokenSpan(0, 5, 9),),
    )  # fmt: skip
    assert (shares.tokens, shares.cut, shares.exchanged) == ((4, 4, 4, 4), (0,), 9)
    assert shard_tokens([50, 50, 34, 33, 33], 2).exchanged == 0
    assert shard_tokens((7, 7, 7, 1), 2) == shard_tokens([7, 7, 7, 1], 2)


def test_every_token_is_on_one_rank_and_no_rank_has_more_than_its_part() -> None:
    for lengths, width, multiple in _cases(500, 40, (1, 2, 3, 4, 8)):
        shares = shard_tokens(lengths, width, multiple)
        seen = [np.zeros(length, np.int64) for length in lengths]
        for spans, tokens in zip(shares.spans, shares.tokens, strict=True):
            own = [span.document for span in spans]
            assert own == sorted(set(own))  # one span a document, ascending
            for document, begin, end in spans:
                assert 0 <= begin < end <= lengths[document]
                seen[document][begin:end] += 1
            held = sum(end - begin for _, begin, end in spans)
            assert held <= tokens < held + multiple
            assert tokens % multiple == 0
            assert tokens <= _most(lengths, width, multiple)
        assert len(shares.spans) == width
        assert all((count == 1).all() for count in seen)
        over = [d for d in range(len(lengths)) if sum(d == s.document for own in shares.spans for s in own) > 1]
        assert shares.cut == tuple(over)
        for document in over:  # its parts follow each other from rank to rank
            parts = [span for own in shares.spans for span in own if span.document == document]
            assert [part.begin for part in parts] == [0, *(part.end for part in parts[:-1])]
        assert shares.exchanged == sum(lengths[document] for document in over)


def _least_cut(lengths: list[int], width: int, most: int) -> int:
    """Fewest tokens of documents that are cut, over all placements; cut documents always find room."""
    best = {(most,) * width: 0}
    for length in lengths:
        for room, whole in list(best.items()):
            for place in {left: place for place, left in enumerate(room) if left >= length}.values():
                left = tuple(sorted((*room[:place], room[place] - length, *room[place + 1 :])))
                best[left] = max(best.get(left, 0), whole + length)
    return sum(lengths) - max(best.values())


def test_at_most_one_short_document_more_is_cut_than_must_be() -> None:
    exactly = 0
    cases = _cases(400, 9, (2, 4))
    for lengths, width, multiple in cases:
        most = _most(lengths, width, multiple)
        beyond = shard_tokens(lengths, width, multiple).exchanged - _least_cut(lengths, width, most)
        assert 0 <= beyond <= max((length for length in lengths if length <= most), default=0)
        exactly += beyond == 0
    assert exactly > 0.95 * len(cases)


@pytest.mark.parametrize("lengths", [[5], [3, 4, 5]])
def test_width_1_cuts_nothing(lengths: list[int]) -> None:
    whole = tuple(TokenSpan(document, 0, length) for document, length in enumerate(lengths))
    assert shard_tokens(lengths, 1, 8) == PackShards((whole,), (-(-sum(lengths) // 8) * 8,), (), 0)
