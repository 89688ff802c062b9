"""What `prove` says of values, against layouts, positions, rows and losses that were made to be said so."""

import numpy as np
import pytest
import torch

from megatron.vlm.prove.findings import (
    IGNORED,
    Piece,
    find_pieces,
    find_rows,
    judge_labels,
    judge_loss,
    judge_positions,
    judge_rows,
    judge_tokens,
)

SEEDS = range(8)


def sample_ids(draw: np.random.Generator) -> list[np.ndarray]:
    """Samples of which no three tokens are another's."""
    ids = draw.permutation(2000)
    ends = np.cumsum(draw.integers(4, 30, size=draw.integers(2, 7)))
    return [ids[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_found_where_they_were_put(seed: int) -> None:
    """In any order, cut, doubled, with words of no one between them, and beside padding."""
    draw = np.random.default_rng(seed)
    samples = sample_ids(draw)
    rows, wanted, most = [], [], 0
    for row in range(2):
        row_ids: list[int] = []
        for number in draw.permutation([*range(len(samples)), 0]):
            begin = int(draw.integers(0, 2)) * int(draw.integers(0, len(samples[number]) - 3))
            end = len(samples[number]) if begin else int(draw.integers(3, len(samples[number]) + 1))
            wanted.append((int(number), begin, row, len(row_ids), end - begin))
            row_ids += samples[number][begin:end].tolist() + [5000] * int(draw.integers(0, 3))
        rows.append(row_ids)
        most = max(most, len(row_ids))
    ids = torch.tensor([[*row, *[7000] * (most - len(row))] for row in rows])
    found = find_pieces(ids, ids != 7000, samples)
    assert [(one.sample, one.offset, one.row, int(one.columns[0]), len(one.columns)) for one in found] == wanted


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_said_to_be_lost_cut_or_doubled_as_they_are(seed: int) -> None:
    draw = np.random.default_rng(seed)
    length, times = 20, np.zeros(20, int)
    pieces = []
    for _ in range(draw.integers(1, 4)):
        begin, end = sorted(draw.choice(21, 2, replace=False).tolist())
        times[begin:end] += 1
        pieces.append(Piece(0, begin, 0, np.arange(begin, end)))
    said = " ".join(one.says for one in judge_tokens(pieces, [length]))
    assert ("lacks" in said, "more than once" in said) == (bool((times == 0).any()), bool((times > 1).any()))
    if (times == 0).any():
        lost = np.flatnonzero(times == 0)
        assert f"lacks tokens {lost[0]} to {lost[-1]} of 20" in said


def test_every_wrong_label_is_said_and_no_right_one() -> None:
    labels = [np.array([IGNORED, 4, IGNORED, 6]), np.array([7, IGNORED, 9])]
    pieces = [Piece(0, 0, 0, np.arange(4)), Piece(1, 0, 0, np.arange(4, 7))]
    right = torch.tensor([[IGNORED, 4, IGNORED, 6, IGNORED, IGNORED, 9, IGNORED]])
    assert not [*judge_labels(pieces, right, labels)]
    told = {0: "", 1: "1 lost", 2: "1 others", 3: "1 lost", 4: "border", 5: "1 others", 6: "1 lost", 7: "no sample"}
    for place, word in told.items():
        wrong = right.clone()
        wrong[0, place] = IGNORED if wrong[0, place] != IGNORED else 1
        said = [one.says for one in judge_labels(pieces, wrong, labels)]
        assert len(said) == bool(word), place
        assert word in "".join(said), place


@pytest.mark.parametrize("axes", [1, 3])
def test_positions_may_be_shifted_and_nothing_else(axes: int) -> None:
    draw = torch.Generator().manual_seed(axes)
    wanted = [torch.randint(0, 9, (axes, count), generator=draw).cumsum(1) for count in (6, 5)]
    pieces = [Piece(0, 0, 0, np.arange(6)), Piece(1, 0, 0, np.arange(6, 11))]
    right = torch.cat([wanted[0] + 3, wanted[1] + 40], dim=1)[:, None]
    assert not [*judge_positions(pieces, right, wanted)]
    for place in range(11):
        wrong = right.clone()
        wrong[-1, 0, place] += 1
        (found,) = judge_positions(pieces, wrong, wanted)
        assert found.samples == (int(place > 5),)
    others = torch.cat([wanted[0], wanted[0][:, :5]], dim=1)[:, None]
    assert "those of sample 0" in next(iter(judge_positions(pieces, others, wanted))).says
    words = torch.cat([torch.arange(6), torch.arange(5)]).expand(axes, 1, 11)
    assert all("count words" in one.says for one in judge_positions(pieces, words, wanted))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_are_known_wherever_they_stand_and_filled_up(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    wanted = [torch.randn(3, *torch.randint(1, 5, (2,), generator=draw).tolist(), generator=draw) for _ in range(6)]
    order = torch.randperm(6, generator=draw)[: 3 + seed % 4].tolist()
    rows = [torch.zeros(3, 5, 5) for _ in order] + [torch.ones(3, 5, 5)]
    for row, number in zip(rows, order, strict=False):
        row[:, : wanted[number].shape[1], : wanted[number].shape[2]] = wanted[number]
    found = find_rows(rows, wanted)
    assert found == [*order, -1]
    owners = [0, 0, 1, 2, 2, 3]
    said = [one.says for one in judge_rows("pixels", found, owners)]
    lost = {owners[number] for number in set(range(6)) - set(order)}
    assert {number for number in range(4) if any(f"rows of sample {number}, which has" in one for one in said)} == lost
    assert not [*judge_rows("pixels", [*range(6)], owners)]


def test_equal_rows_of_two_samples_are_each_their_own() -> None:
    same = torch.ones(3, 2, 2)
    assert find_rows([same, same], [same, same.clone()]) == [0, 1]


@pytest.mark.parametrize("divisor", ["all tokens", "samples", "1"])
def test_a_loss_is_told_by_what_it_is_divided(divisor: str) -> None:
    divisors = {"num_items_in_batch": 0.0, "all tokens": 90, "samples": 4, "1": 1}
    factor, (found,) = judge_loss(120.0 / divisors[divisor], 120.0, 30, divisors, 1e-5)
    assert factor == pytest.approx(30 / divisors[divisor])
    assert found.says == f"not 30 supervised tokens, but {divisor}"
    assert judge_loss(4.0, 120.0, 30, divisors, 1e-5) == (1.0, [])
    assert "but 60" in judge_loss(2.0, 120.0, 30, divisors, 1e-5)[1][0].says
