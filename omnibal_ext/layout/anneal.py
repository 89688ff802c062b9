"""Simulated annealing over lists and layouts, compiled: one change (`changes`), its seconds (`state`), taken or not.

Of what fits take what is faster, and what is slower by d with probability exp(-d / temperature), which falls.
"""

import numpy as np
from numba import njit

from omnibal_ext.layout.changes import DRAWS, LAYOUTS, changed, same_layers
from omnibal_ext.layout.state import Costs, State, board_of, stages_of, step_seconds
from omnibal_ext.packing.random_bits import below


@njit(cache=True)
def anneal(
    state: State, costs: Costs, what: int, changes: int, warm: float, cold: float, seed: int
) -> tuple[State, float]:  # pragma: no cover - compiled
    """The fastest state met, W filled in, and its step seconds; temperatures `warm` to `cold` in seconds.

    `what` may change: one of `changes.LISTS`, `LAYOUTS`, `ENCODERS`. Never slower than `state`, if that fits.
    """
    board, stages = board_of(state, costs), stages_of(state, costs)
    here = step_seconds(state, stages, costs, board, -1)
    best, best_stages, least = state, stages, here
    for change in range(changes):
        at = change * DRAWS[what]
        other = changed(state, what, costs.holds, costs.offered, costs.ahead, seed, at)
        others = stages_of(other, costs) if what == LAYOUTS and not same_layers(state, other) else stages
        there = step_seconds(other, others, costs, board, change)
        temperature = warm * (cold / warm) ** (change / changes)
        chance = (1 + below(1 << 30, seed, at + DRAWS[what] - 1)) / (1 << 30)
        if there < np.inf and there <= here - temperature * np.log(chance):
            state, stages, here = other, others, there
            if here < least:
                best, best_stages, least = state, stages, here
    step_seconds(best, best_stages, costs, board, changes)
    return State(board.kinds, best.orders, best.edges, best.again, best.places), least


@njit(cache=True)
def judged(state: State, costs: Costs) -> float:  # pragma: no cover - compiled
    """Step seconds of a state."""
    return step_seconds(state, stages_of(state, costs), costs, board_of(state, costs), 0)
