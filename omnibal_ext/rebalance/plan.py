"""Placement of a step's samples in each of its phases, and the bytes that travel."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.rebalance.nodes import place_batches
from omnibal_ext.rebalance.phases import Phase

BALANCED = 1.02
"""Samples stay where they were read if the fullest rank then takes at most so many times its reassigned seconds."""


class PhaseInput(NamedTuple):
    """A phase, and what each sample of the step brings to it."""

    phase: Phase
    units: NDArray[np.generic]
    """[N] Patches or tokens of each sample; 0: the sample does not take part in this phase."""
    home_bytes: Floats
    """[N] Bytes of each sample's input to this phase, on the rank that read it."""
    after: str = ""
    """Earlier phase whose outputs are inputs too; "": none."""
    output_bytes: Floats | None = None
    """[N] Bytes of those outputs."""


class PhasePlacement(NamedTuple):
    """Placement of one phase."""

    rank_of: Ints
    """[N] Rank that runs each sample; the one that read it if it does not take part."""
    before: float
    """Seconds of the fullest rank if samples stay where they were read."""
    after: float
    """Seconds of the fullest rank as placed."""
    stays: bool
    """The samples were balanced as read and are not moved."""


def plan_step(
    home: Ints, needs: Mapping[str, PhaseInput], ranks: int, ranks_per_node: int
) -> dict[str, PhasePlacement]:
    """Place the samples of every phase of a step, in order; equal sizes give the same plan on every rank.

    1. Assign the samples of a phase to batches so that the fullest rank has the least.
    2. If that is worth it, give each batch to the rank with the fewest bytes between nodes: inputs come from where they
       were read, outputs of an earlier phase from where that ran.

    Args:
        home: rank that read each sample, [N].
        needs: the phases, by name.
        ranks_per_node: must divide `ranks`.

    Raises:
        UserError: nodes of `ranks_per_node` do not make up `ranks`.
    """
    if ranks < 1 or ranks_per_node < 1 or ranks % ranks_per_node:
        raise UserError(f"{ranks} ranks are no whole number of nodes of {ranks_per_node} ranks")
    placed: dict[str, PhasePlacement] = {}
    for name, need in needs.items():
        members = np.flatnonzero(need.units)
        units, homes = need.units[members], home[members]
        batch = need.phase.assign(units, ranks)
        before, after = (float(need.phase.of_batches(units, ranks_of, ranks).max()) for ranks_of in (homes, batch))
        rank_of, stays = home.copy(), before <= BALANCED * after
        if not stays:
            sources = [(homes, need.home_bytes[members])]
            if need.after and need.output_bytes is not None:
                sources.append((placed[need.after].rank_of[members], need.output_bytes[members]))
            rank_of[members] = place_batches(batch, sources, ranks, ranks_per_node)[batch]
        placed[name] = PhasePlacement(rank_of, before, before if stays else after, stays)
    return placed
