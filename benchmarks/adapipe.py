"""AdaPipe's two-level dynamic program (Sun et al., ASPLOS 2024), the special case the joint search is compared with.

It plans 1F1B without chunks on one mean microbatch. Inside a stage: recompute what costs least time in the memory left.
Over stages, from the last to the first, with F and B of the stage and n microbatches on p ranks:

    warm-up  W = F + max(W' + B', (p - s - 1) F)          ' is the next stage
    ending   E = B + max(E' + F', (p - s - 1) B)
    pace     M = max(M', F + B)
    time     T = W + E + (n - p + s) M

1. best[s, i] = the least T of stages s .. p - 1 over the layers from i on, with the W, E, M, F and B it was reached by.
2. best[s, i] = min over j of the stage i .. j - 1 put before best[s + 1, j]. (Keeping one entry a state is its
   approximation: a larger T may have the smaller M.)
3. best[0, 0] is the layout.
"""

from dataclasses import dataclass

import numpy as np

from omnibal_ext.errors import UserError
from omnibal_ext.layout.joint import RankOptions
from omnibal_ext.layout.problem import Layout, LayoutProblem


@dataclass(frozen=True, slots=True)
class _Tail:
    """Stages s .. p - 1 over the layers from i on."""

    time: float
    warm_up: float
    ending: float
    pace: float
    forward: float
    backward: float
    edges: tuple[int, ...]
    again: tuple[tuple[int, ...], ...]


def adapipe_layout(problem: LayoutProblem) -> Layout:
    """AdaPipe's layout. Raises UserError for virtual chunks, which it does not plan, and where nothing fits."""
    if problem.chunks > 1:
        raise UserError("AdaPipe plans no virtual chunks")
    layers, stages = len(problem.profile.chain), problem.stages
    options = RankOptions(problem)
    tables = problem.tables
    forward, backward, again = (t.mean(axis=(1, 2)) for t in (tables.forward, tables.backward, tables.recompute))
    kinds, received = problem.kind_counts, problem.received
    tails: dict[int, _Tail] = {layers: _Tail(0, 0, 0, 0, 0, 0, (layers,), ())}
    for s in range(stages - 1, -1, -1):
        longer: dict[int, _Tail] = {}
        for i in range(s, layers - (stages - s) + 1) if s else (0,):
            for j, tail in tails.items():
                if j <= i:
                    continue
                held = kinds[j] - kinds[i] + received[i]
                choices = options.of(s, held[None])
                if not choices:
                    continue
                f, b = float(held @ forward), float(held @ backward + choices[0][0] @ again)
                entry = _put_before(problem, s, f, b, tail, i, tuple(choices[0][0].tolist()))
                if i not in longer or entry.time < longer[i].time:
                    longer[i] = entry
        tails = longer
    if 0 not in tails:
        raise UserError("AdaPipe finds no layout that fits the memory")
    best = tails[0]
    return problem.layout(best.edges, np.array(best.again))


def _put_before(
    problem: LayoutProblem, s: int, f: float, b: float, tail: _Tail, first: int, again: tuple[int, ...]
) -> _Tail:
    later = problem.ranks - s - 1
    warm_up = f + max(tail.warm_up + tail.backward, later * f)
    ending = b + max(tail.ending + tail.forward, later * b)
    pace = max(tail.pace, f + b)
    time = warm_up + ending + max(0, problem.microbatches - problem.ranks + s) * pace
    return _Tail(time, warm_up, ending, pace, f, b, (first, *tail.edges), (again, *tail.again))
