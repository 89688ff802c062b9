"""How long ranks wait at least for the slowest, whoever packs: each step is a pack a rank, drawn at random.

What the dearest pack of a step costs in the mean follows from what the k dearest packs cost together, for each k: the
more these cost, the longer the wait. Three reasons why they cost at least so much, whatever the packs are:

    alone       the k dearest samples lie in at most k packs
    level       if j packs hold the j dearest samples, all that is left is at best shared out evenly
    whole       packs hold whole tiles: if the mean is no whole number, some packs have a tile more than others; and
                packs can lack no more tokens of the budget than all packs together do
"""

import numpy as np
from scipy.special import gammaln

from omnibal_ext.arrays import Floats, Ints


def least_waiting(seconds: Floats, packs: int, ranks: int, whole: Floats | None = None) -> float:
    """Return the least share of their time that ranks wait, the mean over random orders of the packs.

    Args:
        seconds: what each sample costs, wherever it lies, [N].
        packs: how many there are, P, no fewer than `ranks`.
        whole: `least_of_whole_tiles` of them, [P + 1].
    """
    samples = np.concatenate([[0.0], np.cumsum(np.sort(seconds)[::-1])])
    total, numbers = float(samples[-1]), np.arange(packs + 1)
    alone = samples[np.minimum(numbers, len(seconds))]
    share_left = (total - alone) / np.maximum(1, packs - numbers)  # of each further pack
    dearest = np.array([np.max(alone[: k + 1] + (k - numbers[: k + 1]) * share_left[: k + 1]) for k in numbers])
    if whole is not None:
        dearest = np.maximum(dearest, whole)
    # The share of steps in which the k-th dearest of all packs is the dearest: it falls with k.
    is_slowest = np.exp(_log_choices(packs - 1 - numbers, ranks - 1) - _log_choices(packs, ranks))
    slowest = float((is_slowest[:-1] - is_slowest[1:]) @ dearest[1:])
    return max(0.0, 1 - total / packs / slowest)


def least_of_whole_tiles(tiles: Ints, tokens: Ints, costs: tuple[float, float], llm_budget: int, packs: int) -> Floats:
    """Return what the k dearest of `packs` cost at least for their tiles and tokens, for each k, [P + 1].

    Args:
        tiles: of each sample, [N].
        tokens: of each sample, [N].
        costs: seconds of a tile and of a token.
    """
    numbers, (each, left) = np.arange(packs + 1), divmod(int(tiles.sum()), packs)
    lacking = packs * llm_budget - int(tokens.sum())
    most_tiles, most_tokens = numbers * each + np.minimum(numbers, left), np.maximum(0, numbers * llm_budget - lacking)
    return costs[0] * most_tiles + costs[1] * most_tokens


def _log_choices(of: Ints | int, chosen: int) -> Floats:
    """Return the logarithm of the number of ways to choose `chosen` of `of`; minus infinity where that is too few."""
    enough = np.maximum(of, chosen)
    ways = gammaln(enough + 1.0) - gammaln(chosen + 1.0) - gammaln(enough - chosen + 1.0)
    return np.where(np.asarray(of) >= chosen, ways, -np.inf)
