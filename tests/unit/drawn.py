"""Lists of actions that nobody would make: any order in which the work can be done."""

import random

from hypothesis import strategies as st

from omnibal_ext.schedules.actions import Action, Schedule
from omnibal_ext.schedules.placement import Placement

placements = st.builds(
    lambda shape, ranks, chunks: shape(ranks, chunks),
    st.sampled_from([Placement.interleaved, Placement.v_shaped]), st.integers(1, 5), st.integers(1, 4),
)  # fmt: skip


def drawn_lists(placement: Placement, microbatches: int, seed: int) -> Schedule:
    """Any order in which all actions can be done, one by one, dealt to their ranks."""
    draw, stages, ranks = random.Random(seed), placement.stages, placement.ranks
    ready = [("F", m, 0) for m in range(microbatches)]
    done: set[tuple[str, int, int]] = set()
    lists: Schedule = [[] for _ in range(ranks)]
    while ready:
        kind, m, stage = ready.pop(draw.randrange(len(ready)))
        done.add((kind, m, stage))
        rank, chunk = placement.rank_and_chunk(stage)
        lists[rank].append(Action(kind, m, chunk))
        if kind == "F" and stage < stages - 1:
            ready.append(("F", m, stage + 1))
        if kind == "B":
            ready.append(("W", m, stage))
        turned = stage if kind == "F" and stage == stages - 1 else stage - 1 if kind == "B" else None
        if turned is not None and turned >= 0:
            ready.append(("B", m, turned))
    return lists


def drawn_parts(ranks: int, microbatches: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """Of every microbatch, any ranks that encode its images."""
    draw = random.Random(seed)
    return tuple(tuple(sorted(draw.sample(range(ranks), draw.randint(1, ranks)))) for _ in range(microbatches))
