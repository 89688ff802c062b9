"""Which rank runs which batch: the one for which the fewest bytes cross between nodes, then between ranks."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from omnibal_ext.arrays import Floats, Ints


def place_batches(batch: Ints, sources: Sequence[tuple[Ints, Floats]], ranks: int, ranks_per_node: int) -> Ints:
    """The rank of each batch, int64 [ranks], a permutation: a transportation problem, solved exactly.

    Args:
        batch: of each sample, [N].
        sources: what each sample needs in this phase: the ranks it is on, [N], and its bytes, [N].
        ranks: neighbours share a node, `ranks_per_node` each.
    """
    held = np.zeros((ranks, ranks))
    for home, size in sources:
        np.add.at(held, (batch, home), size)
    of_node = held.reshape(ranks, -1, ranks_per_node).sum(axis=2).repeat(ranks_per_node, axis=1)
    stays = of_node + held / (held.sum() + 1.0)  # to stay on a rank is worth less than any byte in its node
    return np.asarray(linear_sum_assignment(stays, maximize=True)[1], np.int64)


def share_across_nodes(place: Ints, sources: Sequence[tuple[Ints, Floats]], ranks_per_node: int) -> float:
    """The share of all bytes that go to another node, where samples go to `place` [N]."""
    across = sum(float(size[place // ranks_per_node != home // ranks_per_node].sum()) for home, size in sources)
    return across / max(1.0, sum(float(size.sum()) for _, size in sources))
