"""Schedule lists built for a plan's own stages, packs and bytes, by simulated annealing.

All ranks keep one order of forwards and one of backwards; a rank's list is then an order of kinds, whose n-th F is the
n-th of the forwards:

    forwards    0 1 2 3        backwards   0 1 2 3       (microbatches; with chunks, of a chunk each)
    rank 0      F F F B W F B W B W B W
    rank 1      F F B F B W F B B W W W

1. Start from the problem's lists and a layout for them.
2. Change one thing: move an action of one rank to another place of its list; exchange neighbours in the order of
   forwards or backwards, of all ranks at once; where cuts may move, move cuts, or recompute more or fewer layers.
3. Leave out what deadlocks, and what holds more bytes than the rank has. Of the rest take what is faster, and what is
   slower by d with probability exp(-d / temperature); the temperature falls from a share of an action to nothing.
4. Do so with F and B alone on the mean of all cases, several times over: each W is done where its rank would wait, or
   lacks the bytes to go on. Then from the fastest, now with W at any place, on all cases.
5. Keep the fastest met. It is never slower than what the search began with.

Work is counted in changes, and random numbers are a function of seed and position: the load of the machine changes
nothing.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Floats
from omnibal_ext.layout.anneal import LAYOUTS, LISTS, anneal
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.state import Costs, State
from omnibal_ext.layout.tables import prefix_sums
from omnibal_ext.schedules.actions import WEIGHT, Action, Schedule
from omnibal_ext.schedules.weaving import NONE

RUNS = 3
"""Number of runs on the mean of all cases, each with other random numbers."""
SHARE_OF_MEAN = 0.7
"""Share of the work that these runs get."""
WARM, COLD = 0.2, 0.001
"""First and last temperature of these runs, as shares of the mean seconds of an action."""
WARM_AGAIN = 0.01
"""First temperature on all cases, as such a share."""
A_CHANGE, AN_ACTION, A_CASE = 3e-6, 1e-8, 2e-9
"""Seconds on an idle core, about: for a change, for each action, and for each action in each case."""
MOST_ACTIONS = 8000
"""Actions of a rank: longer lists have next to no bubble, and would not fit into a line of plan.json."""


def build_lists(
    problem: LayoutProblem, layout: Layout, seconds: float = 4.0, seed: int = 0, movable: bool = True
) -> tuple[LayoutProblem, Layout]:
    """Search faster lists of actions for a problem whose backward is split (as zb_auto's), from its own lists and a
    `layout` that fits; return the problem with them, and their layout. Both are as given if nothing faster was found.

    `seconds` of counted work. Unless `movable`, the layout stays as it is.
    """
    state = state_of(problem, layout)
    ranks, length = state.kinds.shape
    if ranks == 1 or length > MOST_ACTIONS:
        return problem, layout
    costs, cases = costs_of(problem), problem.cases[0] * problem.cases[1]
    mean, what = mean_of(costs), LAYOUTS if movable else LISTS
    an_action = float(costs.seconds[:, -1].sum() / cases / (ranks * length))
    warm, cold = WARM * an_action, COLD * an_action

    def changes(share: float, cases: int) -> int:
        return int(share * seconds / (A_CHANGE + ranks * length * (AN_ACTION + A_CASE * cases)))

    bare = state._replace(kinds=np.array([[kind for kind in row if kind < WEIGHT] for row in state.kinds.tolist()]))
    share = changes(SHARE_OF_MEAN / RUNS, 1)
    runs = [anneal(bare, mean, what, share, warm, cold, RUNS * seed + run) for run in range(RUNS)]
    starts = [min(runs, key=lambda run: run[1])[0], state]
    fastest = min(starts, key=lambda start: LayoutProblem.step_seconds(*_with_lists(problem, start)))
    share = changes(1 - SHARE_OF_MEAN, cases)
    best, _ = anneal(fastest, costs, what, share, WARM_AGAIN * an_action, cold, RUNS * seed)
    built, found = _with_lists(problem, best)
    return (built, found) if built.step_seconds(found) < problem.step_seconds(layout) else (problem, layout)


def _with_lists(problem: LayoutProblem, state: State) -> tuple[LayoutProblem, Layout]:
    return replace(problem, lists=_lists(state)), problem.layout(state.edges.tolist(), state.recomputed)


def state_of(problem: LayoutProblem, layout: Layout) -> State:
    """Return a problem's lists and a layout as a `State` to anneal; no rank encodes for a tower."""
    schedule = problem.schedule
    kinds = np.array([["FBW".index(action.kind) for action in actions] for actions in schedule])
    orders = [[[(a.microbatch, a.chunk) for a in actions if a.kind == k] for k in "FB"] for actions in schedule]
    recomputed, insertions = problem.counts(layout)[1], np.full((2, problem.ranks, problem.microbatches), NONE)
    return State(kinds, np.array(orders).transpose(0, 1, 3, 2).copy(), np.array(layout.edges), recomputed, insertions)


def _lists(state: State) -> Schedule:
    lists: Schedule = []
    for kinds, orders in zip(state.kinds.tolist(), state.orders, strict=True):
        items = [iter(orders[min(kind, 1)].T.tolist()) for kind in range(3)]
        lists.append([Action("FBW"[kind], *next(items[kind])) for kind in kinds])
    return lists


def costs_of(problem: LayoutProblem) -> Costs:
    """Return the seconds and bytes by which states of the problem are judged; a replicated tower's are 0."""
    t, kinds, profile, split = problem.tables, problem.kind_ids, problem.profile, problem.program.split_backward
    work = (t.forward, t.backward - t.weight * split, t.weight)
    recompute, ranks, action = _cases_last(t.recompute), problem.ranks, float(profile.action_seconds)
    return Costs(
        seconds=_cases_last(np.stack([prefix_sums(problem.per_layer(one)) for one in work])),
        recompute=recompute,
        transfers=_cases_last(problem.transfers),
        tower_seconds=np.zeros((1, 2, *recompute.shape[1:])),
        hops=np.zeros((1, *recompute.shape[1:])),
        step=prefix_sums(problem.per_layer(t.step)),
        holds=np.stack([prefix_sums((kinds == kind).astype(np.int64)) for kind in problem.columns.of_option]),
        of_option=problem.columns.of_option,
        bytes=np.stack([prefix_sums(problem.per_layer(one)) for one in (t.fixed, t.kept, t.late)]),
        received=problem.received @ t.kept,
        saved=np.stack([t.saved, t.saved_late]),
        encoded=np.zeros(1),
        room=np.full(ranks, float(problem.memory_bytes - profile.overhead_bytes)),
        rank_step=np.full(ranks, float(profile.iteration_seconds)),
        ranks_of=np.array(problem.placement.ranks_of),
        stages_of=np.array(problem.placement.stages_of),
        offered=np.flatnonzero(t.offered),
        action_seconds=action,
        split=split,
        ahead=False,
        replicas=problem.cases[1],
    )


def of_cases(costs: Costs, choose: Callable[[Floats], Floats], replicas: int) -> Costs:
    """Return the costs on other cases: `choose` maps tables' last axis, and `replicas` of them are one iteration."""
    names = ("seconds", "recompute", "transfers", "tower_seconds", "hops")
    tables: dict[str, Any] = {name: np.ascontiguousarray(choose(getattr(costs, name))) for name in names}
    return costs._replace(**tables, replicas=replicas)


def mean_of(costs: Costs) -> Costs:
    """Return the costs on a single case whose seconds are the mean of all."""
    return of_cases(costs, lambda table: table.mean(axis=-1, keepdims=True), 1)


def _cases_last(table: NDArray) -> NDArray:
    return np.ascontiguousarray(table.swapaxes(-1, -2))
