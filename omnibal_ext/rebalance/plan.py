"""Assigns a step's samples to ranks in each of its phases, minimising bytes sent."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.rebalance.phases import Phase

BALANCED = 1.02
"""Samples are not moved if the slowest rank takes at most so many times its seconds after reassignment."""


class PhaseInput(NamedTuple):
    """A phase, and the work and bytes of each sample in it."""

    phase: Phase
    units: NDArray[np.generic]
    """[N] Patches or tokens of each sample; 0: the sample does not take part in this phase."""
    home_bytes: Floats
    """[N] Bytes of each sample's input to this phase, on the rank that read it."""
    outputs: Mapping[str, Floats] = MappingProxyType({})
    """[N] Bytes of each earlier phase's outputs that are also inputs of this one, by the phase's name."""


class PhasePlacement(NamedTuple):
    """Which rank runs each sample in one phase, and seconds of the slowest rank."""

    rank_of: Ints
    """[N] Rank that runs each sample; the one that read it if it does not take part."""
    before: float
    """Seconds of the slowest rank if samples stay where they were read."""
    after: float
    """Seconds of the slowest rank as placed."""
    stays: bool
    """Samples are not moved, as they were balanced when read."""


def plan_step(
    home: Ints, needs: Mapping[str, PhaseInput], ranks: int, ranks_per_node: int
) -> dict[str, PhasePlacement]:
    """Place the samples of every phase of a step, in order; equal sizes give the same plan on every rank.

    1. Assign the samples of a phase to batches so that the slowest takes as few seconds as possible.
    2. Unless samples stay (`BALANCED`), assign batches to ranks with the fewest bytes between nodes. Inputs come from
       the rank that read them, outputs of an earlier phase from the rank that ran it.

    Args:
        home: rank that read each sample, [N].
        needs: the phases, by name.
        ranks_per_node: must divide `ranks`.

    Raises:
        UserError: `ranks_per_node` does not divide `ranks`.
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
            sources += [(placed[of].rank_of[members], sent[members]) for of, sent in need.outputs.items()]
            rank_of[members] = place_batches(batch, sources, ranks, ranks_per_node)[batch]
        placed[name] = PhasePlacement(rank_of, before, before if stays else after, stays)
    return placed


def place_batches(batch: Ints, sources: Sequence[tuple[Ints, Floats]], ranks: int, ranks_per_node: int) -> Ints:
    """Return the rank of each batch, int64 [ranks], a permutation with the fewest bytes sent between nodes; exact.

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
