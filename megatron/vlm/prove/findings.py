"""What is wrong with a pack, from values: tokens, labels, positions, images and sounds, the loss; none runs a model."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
SHORTEST = 3
"""Tokens by which a part of a sample is known; fewer may stand between samples by chance."""
Ids = NDArray[np.int64]


class Finding(NamedTuple):
    """A fault of a pack, in words."""

    check: str
    says: str
    samples: tuple[int, ...] = ()


class Piece(NamedTuple):
    """Tokens of a sample, from its token `offset` on, and where they stand in a batch."""

    sample: int
    offset: int
    row: int
    columns: Ids

    @property
    def own(self) -> slice:
        """Slice of the sample's tokens that these are."""
        return slice(self.offset, self.offset + len(self.columns))


def find_pieces(ids: Tensor, real: Tensor, samples: Sequence[Ids]) -> list[Piece]:
    """Return where the samples' tokens stand in a batch [B, T], of which `real` (bool) are no padding; tokens that are
    no sample's are left out."""
    found: list[Piece] = []
    for row in range(len(ids)):
        columns, at = np.flatnonzero(real[row].numpy()), 0
        while at < len(columns):
            ahead = ids[row].numpy()[columns[at:]]
            sample, offset, count = _longest(ahead, samples, {piece.sample for piece in found})
            if count >= min(SHORTEST, len(samples[sample])):
                found.append(Piece(sample, offset, row, columns[at : at + count]))
            at += max(count, 1)
    return found


def _longest(tokens: Ids, samples: Sequence[Ids], used: set[int]) -> tuple[int, int, int]:
    """Find the samples' tokens with which `tokens` begin: return the sample, its first of them, and their number. A
    whole sample is preferred, then the most tokens, then a sample that is not in `used`."""
    ranked = [(False, 0, True, True, 0, 0)]
    for number, own in enumerate(samples):
        for at in np.flatnonzero(own == tokens[0]).tolist():
            most = min(len(tokens), len(own) - at)
            count = int(np.append(tokens[:most] != own[at : at + most], True).argmax())
            ranked.append((count == len(own), count, at == 0, number not in used, -number, -at))
    _, count, _, _, number, at = max(ranked)
    return -number, -at, count


def judge_tokens(pieces: Sequence[Piece], lengths: Sequence[int]) -> Iterable[Finding]:
    """Yield faults: samples (of `lengths` tokens) that are lost from a batch, cut, or in it twice."""
    for number, length in enumerate(lengths):
        times = np.zeros(length, int)
        for piece in pieces:
            times[piece.own] += piece.sample == number
        for chosen, says in ((times == 0, "lacks"), (times > 1, "has more than once")):
            if chosen.any():
                first, last = np.flatnonzero(chosen)[[0, -1]]
                where = "all tokens" if chosen.all() else f"tokens {first} to {last} of {length}"
                yield Finding("tokens", f"sample {number} {says} {where}", (number,))


def judge_labels(pieces: Sequence[Piece], labels: Tensor, wanted: Sequence[Ids]) -> Iterable[Finding]:
    """Yield faults of a batch's labels [B, T], which are not shifted: lost, unlike the sample's (`wanted`), at tokens
    of no sample, or at a sample's first token."""
    values = labels.numpy()
    elsewhere = values != IGNORED
    for piece in pieces:
        mine, given, own = (piece.sample,), values[piece.row, piece.columns], wanted[piece.sample][piece.own]
        elsewhere[piece.row, piece.columns] = False
        if piece.columns[0] > 0 and given[0] != IGNORED:
            where = f"token {piece.offset}, predicted from what stands before it and is not its own"
            where = where if piece.offset else "first token, across a border"
            yield Finding("labels", f"sample {piece.sample}: one at its {where}", mine)
        if len(unlike := 1 + np.flatnonzero(given[1:] != own[1:])):
            lost, first = int((given[unlike] == IGNORED).sum()), piece.offset + unlike[0]
            says = f"sample {piece.sample}: {lost} lost, {len(unlike) - lost} others, from its token {first} on"
            yield Finding("labels", says, mine)
    if elsewhere.any():
        yield Finding("labels", f"{elsewhere.sum()} at tokens of no sample")


def judge_positions(pieces: Sequence[Piece], given: Tensor, wanted: Sequence[Tensor]) -> Iterable[Finding]:
    """Yield samples whose positions in a batch, `given` [axes, B, T], are not those that they have alone, `wanted`
    [axes, T] each; one shift of an entire sample is allowed, as rotations read differences alone."""
    for piece in pieces:
        positions = given[:, piece.row, piece.columns]
        if _are_shifted(positions, wanted[piece.sample][:, piece.own]):
            continue
        says, count = "are not the model's own", positions.shape[1]
        others = [number for number, other in enumerate(wanted) if _are_shifted(positions, other[:, :count])]
        if _are_shifted(positions, torch.arange(count)[None]):
            says = "count words, the model counts time, row and column"
        elif others:
            says = f"are those of sample {others[0]}"
        yield Finding("positions", f"those of sample {piece.sample} {says}", (piece.sample,))


def _are_shifted(positions: Tensor, own: Tensor) -> bool:
    apart = positions.float() - own.float() if positions.shape[1] == own.shape[1] else torch.arange(2.0)[None]
    return bool((apart == apart[0, 0]).all())


def rows_of(field: Tensor) -> Tensor:
    """Return a field of images or sounds with a row for each; of tiles, [images, tiles, ...], a row for each tile."""
    return field.flatten(0, 1) if field.dim() == 5 else field


def find_rows(rows: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[int]:
    """Return for each of a batch's rows the index of the equal one of the samples' rows (`wanted`), its own index if
    that is equal; -1: none. A batch's rows may be padded to the largest."""
    known = {(row.shape, row.numpy().tobytes()): index for index, row in reversed([*enumerate(wanted)])}
    shapes, found = {row.shape for row in wanted}, []
    for index, row in enumerate(rows):
        if index < len(wanted) and torch.equal(_cropped(row, wanted[index].shape), wanted[index]):
            found.append(index)
        else:
            keys = ((shape, _cropped(row, shape).numpy().tobytes()) for shape in shapes)
            found.append(next((known[key] for key in keys if key in known), -1))
    return found


def _cropped(row: Tensor, shape: Sequence[int]) -> Tensor:
    return row[tuple(slice(side) for side in shape)].contiguous() if row.dim() == len(shape) else row


def judge_rows(field: str, found: Sequence[int], owners: Sequence[int]) -> Iterable[Finding]:
    """Yield images and sounds that are lost, doubled, or where others belong. `found`: what `find_rows` returns;
    `owners`: the sample of each row that is wanted."""
    given = [owners[row] if row >= 0 else -1 for row in found]
    wrong = [
        (own, there) for index, (own, there) in enumerate(zip(owners, given, strict=False)) if found[index] != index
    ]
    for own, there in dict.fromkeys(wrong):
        whose = f"rows of sample {there}" if there >= 0 else "rows of no sample"
        says = f"{field}: {whose} stand where sample {own}'s belong"
        yield Finding("media", f"{field}: sample {own}'s are in another order" if own == there else says, (own,))
    for sample in sorted(set(owners)):
        if (there := given.count(sample)) != (rows := owners.count(sample)):
            yield Finding("media", f"{field}: {there} rows of sample {sample}, which has {rows}", (sample,))


def judge_loss(loss: float, summed: float, count: int, divisors: Mapping[str, float], tolerance: float
               ) -> tuple[float, list[Finding]]:  # fmt: skip
    """Return how many times the mean over supervised tokens (`summed` / `count`) a loss is, 1 within `tolerance`; if it
    is not, also a fault that says by which of `divisors` the sum was divided."""
    factor = loss * count / summed if summed else 1.0
    if abs(factor - 1) <= tolerance:
        return 1.0, []
    named = (name for name, value in divisors.items() if value and abs(summed / value - loss) <= tolerance * abs(loss))
    says = f"not {count} supervised tokens, but {next(named, f'{count / factor:.4g}' if factor else 'inf')}"
    return factor, [Finding("normaliser", says)]
