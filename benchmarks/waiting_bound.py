"""How long ranks wait at least for the dearest pack of a step, whoever packs: packs in random order, a pack a rank.

The mean of the dearest of D packs drawn at random is a sum over packs, the dearest first, with weights that fall: so it
is a sum with weights of no sign but plus over what the k dearest packs cost together, for each k. Whatever the packs:

    alone       the k dearest samples lie in k packs at most, so the k dearest packs cost no less than these
    level       of those k packs, j hold the j dearest samples; the rest is at best shared out evenly
    whole       packs have whole tiles: the k with the most have k mean ones rounded down, and one of those left over
                each; what they lack of the budget of tokens is no more than all packs lack together
"""

import numpy as np
from scipy.special import gammaln

from omnibal_ext.arrays import Floats, Ints


def least_waiting(seconds: Floats, packs: int, ranks: int, whole: Floats | None = None) -> float:
    """Return the least share of the ranks' time in which they wait, in the mean over random orders of the packs.

    Args:
        seconds: what each sample costs, wherever it lies, [N].
        packs: how many there are, P, no fewer than `ranks`.
        whole: `least_of_whole_tiles` of them, [P + 1].
    """
    samples = np.concatenate([[0.0], np.cumsum(np.sort(seconds)[::-1])])
    total, numbers = float(samples[-1]), np.arange(packs + 1)
    alone = samples[np.minimum(numbers, len(seconds))]
    dearest = np.array([np.max(alone[: k + 1] + (k - numbers[: k + 1]) * (total - alone[: k + 1])
                               / np.maximum(1, packs - numbers[: k + 1])) for k in range(packs + 1)])  # fmt: skip
    if whole is not None:
        dearest = np.maximum(dearest, whole)
    is_dearest = np.exp(_log_choices(packs - 1 - numbers, ranks - 1) - _log_choices(packs, ranks))  # the k-th of a step
    falls = is_dearest[:-1] - is_dearest[1:]
    return max(0.0, 1 - total / packs / float(falls @ dearest[1:]))


def least_of_whole_tiles(tiles: Ints, tokens: Ints, costs: tuple[float, float], llm_budget: int, packs: int) -> Floats:
    """Return what the k dearest of `packs` cost at least for their tiles and tokens, for each k, [P + 1].

    Args:
        tiles: of each sample, [N].
        tokens: of each sample, [N].
        costs: seconds of a tile and of a token.
    """
    numbers, (each, left) = np.arange(packs + 1), divmod(int(tiles.sum()), packs)
    lacking = packs * llm_budget - int(tokens.sum())
    return costs[0] * (numbers * each + np.minimum(numbers, left)) + costs[1] * np.maximum(
        0, numbers * llm_budget - lacking
    )


def _log_choices(of: Ints | int, chosen: int) -> Floats:
    """Return the logarithm of the number of ways to choose; of too few to choose from, minus infinity."""
    enough = np.maximum(of, chosen)
    ways = gammaln(enough + 1.0) - gammaln(chosen + 1.0) - gammaln(enough - chosen + 1.0)
    return np.where(np.asarray(of) >= chosen, ways, -np.inf)
