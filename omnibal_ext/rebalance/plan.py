"""A step of several phases: where each sample is in each of them, and what travels."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.rebalance.nodes import place_batches
from omnibal_ext.rebalance.phases import Phase

LEVEL = 1.02
"""The fullest rank over the one after dealing anew: batches that are nearer are left where they are."""


class Need(NamedTuple):
    """A phase of the samples of a step, and what it takes for it."""

    phase: Phase
    units: NDArray[np.generic]
    """[N] Patches or tokens of each sample; 0: the sample has no part in this phase."""
    home_bytes: Floats
    """[N] What a sample needs here of what its rank has read."""
    after: str = ""
    """An earlier phase whose outputs it needs, if any."""
    output_bytes: Floats | None = None
    """[N] Of those outputs."""


class Placed(NamedTuple):
    """One phase, placed."""

    place: Ints
    """[N] The rank of each sample; the one that has read it where it has no part."""
    before: float
    """Seconds of the fullest rank, had the samples stayed where they were read."""
    after: float
    """Its seconds now."""
    stays: bool
    """They were level as read, and nothing is dealt anew."""


def plan_step(home: Ints, needs: Mapping[str, Need], ranks: int, ranks_per_node: int) -> dict[str, Placed]:
    """Place every phase of a step, in their order; the same on every rank that knows the same sizes.

    1. Deal the samples of a phase so that no rank is fuller than it must be.
    2. If that is worth it, give each batch to the rank for which the fewest bytes cross between nodes: inputs from
       where they were read, outputs of an earlier phase from where that was run, so that they travel once.

    Args:
        home: the rank that has read each sample, [N].
        needs: of each phase, by its name.

    Raises:
        UserError: nodes of so many ranks do not make up all of them.
    """
    if ranks < 1 or ranks_per_node < 1 or ranks % ranks_per_node:
        raise UserError(f"{ranks} ranks are no whole number of nodes of {ranks_per_node} ranks")
    placed: dict[str, Placed] = {}
    for name, need in needs.items():
        own = np.flatnonzero(need.units)
        units, homes = need.units[own], home[own]
        batch = need.phase.deal(units, ranks)
        before, after = (float(need.phase.of_batches(units, ranks_of, ranks).max()) for ranks_of in (homes, batch))
        place, stays = home.copy(), before <= LEVEL * after
        if not stays:
            sources = [(homes, need.home_bytes[own])]
            if need.after and need.output_bytes is not None:
                sources.append((placed[need.after].place[own], need.output_bytes[own]))
            place[own] = place_batches(batch, sources, ranks, ranks_per_node)[batch]
        placed[name] = Placed(place, before, before if stays else after, stays)
    return placed
