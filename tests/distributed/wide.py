"""Packs that several ranks run together, dealt over the data-parallel ranks of a test beside others."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megatron.vlm.data.pack_shard import shard_of, with_filler
from megatron.vlm.media import Images, together
from megatron.vlm.microbatch import Microbatch, segment_ids
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.communicator import Teams
from megatron.vlm.pipeline.stage import Stage
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.modalities.work import HeadShares
from omnibal_ext.packing.shards import shard_tokens
from tests.media import seen, with_images
from tests.unit.costs.test_exchange import numbers_sent

Ints = NDArray[np.int64]
WIDTHS = (1, 2, 4)


@cache
def teams() -> Teams:
    """Of this process, made once."""
    found = Teams()
    found.open(WIDTHS)
    return found


def dealt(packs: Sequence[Microbatch], seed: int, multiple: int, model: Architecture) -> list[Microbatch]:
    """What this rank runs of packs whose widths are drawn."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    columns = seats(len(packs), ranks, random.Random(seed))
    return [teams().join(part(packs, *column[rank], multiple, model)) for column in columns]


def numbers_of_a_long_film(chain: Chain, packs: Sequence[Microbatch]) -> float:
    """What a forward pass of a wide pack sends to other ranks, against what is reckoned: the difference."""
    language, place = chain.architecture.language, parallel_state.get_data_parallel_rank()
    pack = teams().join(part(packs, 6, place, 4, 1, chain.architecture))
    assert pack.shard is not None
    sent, all_to_all = [], torch.distributed.all_to_all_single

    def counting(taken: Tensor, given: Tensor, takes: list[int], gives: list[int], team: Any) -> None:
        sent.append(sum(gives) - gives[place])
        all_to_all(taken, given, takes, gives, team)

    torch.distributed.all_to_all_single = counting
    try:
        with torch.no_grad():
            Stage(chain, 0, len(chain.kinds))(pack)
    finally:
        torch.distributed.all_to_all_single = all_to_all
    route = pack.shard.features
    features = (sum(route.send_counts) - route.send_counts[place]) * language.hidden_size * (1 + 2)
    attention = language.attentions[0]
    heads = HeadShares(attention.heads, attention.kv_heads, 4)
    layer = numbers_sent(heads, pack.shard.split.rows, attention.head_dim, place)
    assert sum(sent) > features
    return float(abs(sum(sent) - features - language.layers * layer))


def seats(packs: int, ranks: int, generator: random.Random) -> list[list[tuple[int, int, int]]]:
    """Columns of seats, (pack, place, width) of every data-parallel rank: each pack once, as wide as is drawn.

    Pack -1 is an empty one.
    """
    left, columns = list(range(packs)), []
    while left:
        column: list[tuple[int, int, int]] = []
        while len(column) < ranks:
            fits = [width for width in WIDTHS if width <= ranks - len(column) and len(column) % width == 0]
            width = generator.choice(fits) if left else 1
            pack = left.pop(0) if left else -1
            column += [(pack, place, width) for place in range(width)]
        columns.append(column)
    return columns


def part(
    packs: Sequence[Microbatch], pack: int, place: int, width: int, multiple: int, model: Architecture,
    makers: Ints | None = None,
) -> Microbatch:  # fmt: skip
    """What a rank is handed of a pack; `makers` [units] make the features of its images, drawn unless given."""
    if pack < 0:
        first = seen(packs[0])
        nothing = Images(values=first.values[:0], positions=first.positions[:0])
        empty = replace(packs[0], samples=0, prefixes=(), media={"tiles": nothing})
        return filled(empty, (), (multiple,))
    whole = packs[pack]
    if width == 1:
        missing = -whole.tokens % multiple
        return filled(whole, whole.lengths, (missing,) if missing else ())
    shares = shard_tokens(whole.lengths, width, multiple)
    lengths, spans = with_filler(shares, whole.lengths, multiple)
    whole = filled(whole, whole.lengths, lengths[len(whole.lengths) :])
    units = np.array(
        [s * r * c for s, r, c in seen(whole).grids] if seen(whole).grids else [1] * seen(whole).amount, np.int64
    )
    if makers is None:
        makers = np.random.default_rng(pack).integers(0, width, len(units))  # whatever they are
    own = makers.repeat(units) == place
    each = 1 / model.least_tiles if seen(whole).grids else model.image_tokens_per_tile
    share = shard_of(with_images(whole, values=None), spans, makers.repeat((units * each).astype(int)), place)
    grids = tuple(grid for grid, maker in zip(seen(whole).grids, makers, strict=False) if maker == place)
    values = seen(whole).values[torch.from_numpy(own)]
    return with_images(share, pieces=together(int(own.sum())), values=values, grids=grids)


def filled(pack: Microbatch, lengths: Sequence[int], fillers: Sequence[int]) -> Microbatch:
    """A pack with segments more, in which nothing counts."""
    end, more = sum(lengths), sum(fillers)
    pad = torch.nn.functional.pad
    lengths = (*lengths, *fillers)
    return replace(
        pack, lengths=lengths, input_ids=pad(pack.input_ids[:end], (0, more)), labels=pad(pack.labels[:end], (0, more)),
        loss_mask=(mask := pad(pack.loss_mask[:end], (0, more))), supervised=mask.nonzero().squeeze(1),
        targets=torch.stack([part.sum() for part in mask.split(lengths)]), segment_ids=segment_ids(lengths),
        sources=torch.zeros(len(lengths), dtype=torch.long),
    )  # fmt: skip
