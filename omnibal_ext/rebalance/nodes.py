"""Assigns batches to ranks: fewest bytes between nodes, then fewest between ranks."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from omnibal_ext.arrays import Floats, Ints


def place_batches(batch: Ints, sources: Sequence[tuple[Ints, Floats]], ranks: int, ranks_per_node: int) -> Ints:
    """Return the rank of each batch, int64 [ranks], a permutation: an assignment problem, solved exactly.

    Args:
        batch: batch of each sample, [N].
        sources: for each input of the phase (rank that has each sample's input [N], its bytes [N]).
        ranks: neighbours share a node, `ranks_per_node` each.
    """
    bytes_on = np.zeros((ranks, ranks))
    for home, size in sources:
        np.add.at(bytes_on, (batch, home), size)
    bytes_in_node = bytes_on.reshape(ranks, -1, ranks_per_node).sum(axis=2).repeat(ranks_per_node, axis=1)
    value = bytes_in_node + bytes_on / (bytes_on.sum() + 1.0)  # staying on the same rank decides ties only
    return np.asarray(linear_sum_assignment(value, maximize=True)[1], np.int64)


def fraction_across_nodes(rank_of: Ints, sources: Sequence[tuple[Ints, Floats]], ranks_per_node: int) -> float:
    """Return the fraction of all bytes that go to another node, if each sample runs on rank `rank_of` [N]."""
    across = sum(float(size[rank_of // ranks_per_node != home // ranks_per_node].sum()) for home, size in sources)
    return across / max(1.0, sum(float(size.sum()) for _, size in sources))
