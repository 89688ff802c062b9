"""A wide pack, which a team of ranks runs together: from the entire pack to the shard of one rank.

    pack of width 2      a a a a a | b b | c c c | f      images of a: A0 A1, of c: C0
    rank 0               a a a a | b b                    makes A0, takes what its tokens show
    rank 1               a | c c c | f                    makes A1 and C0

`omnibal_ext.packing.shards` assigns tokens to ranks, `omnibal_ext.image_assignment` images. A shard has the spans of
cut samples first, then entire samples, then padding.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.vlm.data.inputs.images import Shown
from megatron.vlm.media import Images, together
from megatron.vlm.microbatch import FeatureRoute, Microbatch, PackShard, SplitSamples
from omnibal_ext.arrays import Ints
from omnibal_ext.image_assignment import assign_pieces
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.packing.shards import PackShards, TokenSpan


def with_filler(
    shards: PackShards, lengths: Sequence[int], multiple: int
) -> tuple[tuple[int, ...], tuple[tuple[TokenSpan, ...], ...]]:
    """Return segment lengths of a pack and spans of every rank, with each rank's padding as one more segment.

    Every rank gets at least `multiple` tokens.
    """
    filled, spans = list(lengths), []
    for mine, tokens in zip(shards.spans, shards.tokens, strict=True):
        filler = max(tokens, multiple) - sum(span.end - span.begin for span in mine)
        spans.append((*mine, TokenSpan(len(filled), 0, filler)) if filler else mine)
        filled += [filler] if filler else []
    return tuple(filled), tuple(spans)


def shard_of_rank(
    pack: Microbatch, spans: Sequence[Sequence[TokenSpan]], shown: Sequence[Shown], rank: int
) -> tuple[Microbatch, list[Shown]]:
    """Return one rank's shard of a wide pack without pixels, and those of its images `shown` that the rank encodes.

    Images, and temporal steps of videos, are encoded on one rank each.
    """
    tiles = [image.tiles // image.steps for _, image, _ in shown for _ in range(image.steps)]
    makers = np.array(assign_pieces(tiles, pack.pack, tuple(range(len(spans))), 1), np.int64)
    maker, own = iter(makers.tolist()), []
    for sample, image, _ in shown:
        if steps := [step for step in range(image.steps) if next(maker) == rank]:
            own.append(Shown(sample, image.at_steps(steps)))
    features = [int(each * shown[0].sample.data.manifest["tokens_per_tile"]) for each in tiles]
    shard = shard_of(pack, spans, makers.repeat(features), rank)
    grids = tuple((image.steps, image.rows, image.columns) for _, image, _ in own) if Images.of(pack).grids else ()
    media = replace(Images.of(shard), pieces=together(sum(one.tiles for one in own)), grids=grids)
    return replace(shard, media={**shard.media, VISION.size: media}), own


def shard_of(pack: Microbatch, spans: Sequence[Sequence[TokenSpan]], makers: Ints, rank: int) -> Microbatch:
    """Return the shard of one rank of a team, of a pack without pixels.

    `spans`: the tokens of every rank. `makers` [features]: the rank that computes each image feature of the pack.
    """
    ranks = Counter(number for mine in spans for number in {span.document for span in mine})
    numbers_cut = sorted(number for number, holders in ranks.items() if holders > 1)
    parts = [sorted(mine, key=lambda span: (span.document not in numbers_cut, span)) for mine in spans]
    cut, rows = _cut(pack.lengths, parts, numbers_cut), [_rows(pack.lengths, mine) for mine in parts]
    asked, images = _tokens_of_images(pack, rows, rank)
    numbers, begins, ends = zip(*parts[rank], strict=True)
    shard = PackShard(
        team_rank=rank,
        width=len(parts),
        pack=pack.with_tensors(lambda _: None),
        segments=numbers,
        begins=begins,
        rows=torch.from_numpy(rows[rank]),
        split=cut,
        features=feature_route(makers, asked, rank),
    )
    real = {number: end - begin for number, begin, end in parts[rank] if number < pack.samples}
    squares = sum(length**2 for number, length in real.items() if number not in cut.samples)
    return replace(
        pack,
        lengths=tuple(end - begin for begin, end in zip(begins, ends, strict=True)),
        samples=sum(begin == 0 for number, begin in zip(numbers, begins, strict=True) if number in real),
        useful_tokens=sum(real.values()),
        useful_squares=squares + sum(length**2 for length in cut.lengths) // len(parts),
        shard=shard,
        **_text(pack, shard.rows),
        media={**pack.media, VISION.size: replace(Images.of(pack), **images)},
    )


def feature_route(makers: Ints, asked: Sequence[Ints], rank: int) -> FeatureRoute:
    """Return how a rank sends and receives features. `makers` [features]: the rank that computes each; `asked`: the
    features that each rank reads, in order."""
    position_of, ranks = np.zeros(len(makers), np.int64), len(asked)
    for maker in range(ranks):
        made = makers == maker
        position_of[made] = np.arange(int(made.sum()))
    leaving = [position_of[wanted[makers[wanted] == rank]] for wanted in asked]
    mine = asked[rank]
    arriving = np.empty(len(mine), np.int64)
    arriving[np.argsort(makers[mine], kind="stable")] = np.arange(len(mine))
    takes = np.bincount(makers[mine], minlength=ranks)
    return FeatureRoute(
        send_rows=torch.from_numpy(np.concatenate(leaving)),
        send_counts=tuple(map(len, leaving)),
        receive_counts=tuple(takes.tolist()),
        receive_rows=torch.from_numpy(arriving),
    )


def _cut(lengths: Sequence[int], parts: Sequence[Sequence[TokenSpan]], cut: Sequence[int]) -> SplitSamples:
    """Return lengths, rows on each rank and order of the samples `cut` (numbers), of which several ranks have rows."""
    arrived = [part for mine in parts for part in mine if part[0] in cut]
    keys = [(number, token) for number, begin, end in arrived for token in range(begin, end)]
    order = np.lexsort(np.array(keys, np.int64).reshape(-1, 2).T[::-1])
    rows = tuple(sum(end - begin for number, begin, end in mine if number in cut) for mine in parts)
    return SplitSamples(tuple(cut), tuple(lengths[number] for number in cut), rows, torch.from_numpy(order))


def _rows(lengths: Sequence[int], parts: Sequence[TokenSpan]) -> Ints:
    """Return the indices in the pack of a rank's tokens, in the rank's order."""
    starts = [*accumulate(lengths, initial=0)]
    return np.concatenate([np.arange(starts[n] + begin, starts[n] + end) for n, begin, end in parts])


def _text(pack: Microbatch, rows: Tensor) -> dict[str, Any]:
    whole = {name: getattr(pack, name) for name in ("input_ids", "labels", "loss_mask", "segment_ids")}
    found = {name: values[rows] for name, values in whole.items() if values is not None}
    return found | ({"supervised": found["loss_mask"].nonzero().squeeze(1)} if "loss_mask" in found else {})


def _tokens_of_images(pack: Microbatch, rows: Sequence[Ints], rank: int) -> tuple[list[Ints], dict[str, Any]]:
    """Return the features that every rank reads (none if the stage reads no tokens), and this rank's image fields."""
    images = Images.of(pack)
    if images.positions is None:
        return [np.empty(0, np.int64) for _ in rows], {}
    number = np.full(sum(pack.lengths), -1)
    number[images.positions.numpy()] = np.arange(len(images.positions))
    shown = [number[mine] for mine in rows]
    tokens = [found[found >= 0] for found in shown]
    here: dict[str, Any] = {"positions": torch.from_numpy(np.flatnonzero(shown[rank] >= 0))}
    if images.sources is None:
        return tokens, here
    sources = [images.sources.numpy()[found] for found in tokens]
    asked = [np.unique(found[found >= 0]) for found in sources]
    mine = sources[rank]
    there = np.where(mine < 0, mine, np.searchsorted(asked[rank], mine))
    weights = None if images.weights is None else images.weights[torch.from_numpy(tokens[rank])]
    return asked, {**here, "sources": torch.from_numpy(there), "weights": weights}
