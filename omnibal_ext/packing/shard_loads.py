"""Loads of a wide pack's fullest shard, and the tokens its rank sends to the team."""

from collections.abc import Sequence

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.packs import ATTENTION, TOKENS, PackList, pack_loads
from omnibal_ext.packing.shards import shard_tokens, tokens_sent
from omnibal_ext.sizes import Sizes

EXCHANGED = "exchanged"
"""Name of the last column: tokens that a rank sends to its team for cut documents, see `shards.tokens_sent`."""


def shard_loads(packs: PackList, sizes: Sizes, widths: Ints) -> Ints:
    """Return the most of each load that one of a pack's ranks has, and the tokens it sends to the others: [P, K + 1].

    Tiles and further sizes divide evenly; the attention of cut documents is divided by heads.
    """
    loads = pack_loads(packs, sizes)
    result = np.column_stack([-(-loads // widths[:, None]), np.zeros(len(packs), np.int64)])
    for pack in np.flatnonzero(widths > 1):
        width = int(widths[pack])
        lengths = sizes.tokens[packs.sample_ids[packs.pack_offsets[pack] : packs.pack_offsets[pack + 1]]].tolist()
        shards = shard_tokens(lengths, width)
        result[pack, TOKENS] = max(shards.tokens)
        result[pack, ATTENTION] = max(_attention(lengths, shards.spans, shards.cut, width))
        result[pack, -1] = tokens_sent(shards.exchanged, width)
    return result


def tokens_cut(packs: PackList, sizes: Sizes, widths: Ints) -> Ints:
    """Return, of each pack [P], the tokens in documents that are cut between the ranks of its team."""
    cut = np.zeros(len(packs), np.int64)
    for pack in np.flatnonzero(widths > 1):
        held = packs.sample_ids[packs.pack_offsets[pack] : packs.pack_offsets[pack + 1]]
        cut[pack] = shard_tokens(sizes.tokens[held].tolist(), int(widths[pack])).exchanged
    return cut


def _attention(
    lengths: Sequence[int], spans: Sequence[Sequence[tuple[int, int, int]]], cut: Sequence[int], width: int
) -> list[int]:
    """Return the sum of squared lengths on each rank; of cut documents a rank computes 1 / width of the heads."""
    of_cut = -(-sum(lengths[document] ** 2 for document in cut) // width)
    cut_documents = set(cut)
    return [of_cut + sum(lengths[d] ** 2 for d, _, _ in held if d not in cut_documents) for held in spans]
