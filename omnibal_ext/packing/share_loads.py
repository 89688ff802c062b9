"""What one rank runs of a wide pack: loads of its fullest share, and what it sends to the others of its team."""

from collections.abc import Sequence

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.packing.packs import ATTENTION, TOKENS, Packs, pack_loads
from omnibal_ext.packing.shares import share_tokens, tokens_sent
from omnibal_ext.sizes import Sizes

EXCHANGED = "exchanged"
"""The last column: tokens that a rank sends to others of its team, where heads of cut documents travel: each of `width`
ranks has 1 / width of the tokens, and sends all but its own part of the heads."""


def share_loads(packs: Packs, sizes: Sizes, widths: Ints) -> Ints:
    """Return the loads of each pack's fullest share, in every column, and tokens sent: [P, K + 1].

    Tiles and further sizes are divided evenly; documents that are cut are attended to by all ranks alike.
    """
    loads = pack_loads(packs, sizes)
    result = np.column_stack([-(-loads // widths[:, None]), np.zeros(len(packs), np.int64)])
    for pack in np.flatnonzero(widths > 1):
        width = int(widths[pack])
        lengths = sizes.tokens[packs.sample_ids[packs.pack_offsets[pack] : packs.pack_offsets[pack + 1]]].tolist()
        shares = share_tokens(lengths, width)
        result[pack, TOKENS] = max(shares.tokens)
        result[pack, ATTENTION] = max(_attention(lengths, shares.spans, shares.cut, width))
        result[pack, -1] = tokens_sent(shares.exchanged, width)
    return result


def tokens_cut(packs: Packs, sizes: Sizes, widths: Ints) -> Ints:
    """Return the tokens of each pack that are in documents on more than one rank, [P]."""
    cut = np.zeros(len(packs), np.int64)
    for pack in np.flatnonzero(widths > 1):
        own = packs.sample_ids[packs.pack_offsets[pack] : packs.pack_offsets[pack + 1]]
        cut[pack] = share_tokens(sizes.tokens[own].tolist(), int(widths[pack])).exchanged
    return cut


def _attention(
    lengths: Sequence[int], spans: Sequence[Sequence[tuple[int, int, int]]], cut: Sequence[int], width: int
) -> list[int]:
    """Return the sum of squared lengths that each place attends to, of cut documents its part of the heads."""
    everywhere = -(-sum(lengths[document] ** 2 for document in cut) // width)
    apart = set(cut)
    return [everywhere + sum(lengths[d] ** 2 for d, _, _ in own if d not in apart) for own in spans]
