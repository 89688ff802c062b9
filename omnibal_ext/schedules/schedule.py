"""The schedules there are, by name: each builds the lists of all ranks (`omnibal_ext.schedules.actions`)."""

from collections.abc import Callable
from functools import cache
from itertools import accumulate

from omnibal_ext.errors import UserError
from omnibal_ext.schedules.actions import Action, Schedule, givers, has_weight_gradients, of_items
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.playing import Loads, played, repeated


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B (PipeDream-Flush): rank s holds at most min(ranks - s, microbatches) microbatches.

    1. Warm up with ranks - s - 1 forwards.
    2. Alternate one forward, one backward.
    3. Drain the backwards that are left.
    """
    return [_alternate(_in_order("F", microbatches), _in_order("B", microbatches), ranks - s - 1) for s in range(ranks)]


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """GPipe: all forwards, then all backwards, the last microbatch first."""
    forwards = [Action("F", m, c) for c in range(chunks) for m in range(microbatches)]
    backwards = [Action("B", a.microbatch, a.chunk) for a in reversed(forwards)]
    return [forwards + backwards for _ in range(ranks)]


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021), for any number of microbatches.

    1. Cut the microbatches into groups as even as can be, each of at least `ranks`; fewer than `ranks` are one group.
    2. Forwards go group by group, each group through all chunks; backwards likewise, last chunk first.
    3. Rank s warms up with 2 (ranks - s - 1) + (chunks - 1) (first group's size) forwards, alternates, drains.

    With equal stages and at least `ranks` microbatches the bubble is (ranks - 1) / chunks rounds, divisible or not.
    """
    sizes = _even_groups(ranks, microbatches)
    forwards, backwards = _grouped("F", sizes, chunks), _grouped("B", sizes, chunks)
    return [_alternate(forwards, backwards, 2 * (ranks - s - 1) + (chunks - 1) * sizes[0]) for s in range(ranks)]


def zero_bubble(ranks: int, microbatches: int, chunks: int = 1, extra_in_flight: bool = False) -> Schedule:
    """Zero-bubble schedule (Qi et al. 2023), also with virtual chunks: weight gradients fill the waits.

    Without `extra_in_flight` no rank holds more than 1F1B's first rank (their H1), with it about twice that (H2). Made
    by playing the pipeline with F, B and W of one second each; forwards go in groups of `ranks` microbatches, each
    group through all chunks, backwards likewise, last chunk first:

    1. Of all ranks take the one that can act earliest (ties: the lowest rank); on it, of what can start earliest,
    2. a forward if the last action but W was a backward, else a backward, else the other of the two; a forward needs
       room: between F and B, and between F and W, fewer microbatches than the rank's limits;
    3. the oldest weight gradient if it can start earlier than both.

    With chunks every rank may hold ranks x chunks slices, which is what 1F1B's first rank holds: so the bubble shrinks
    by the chunks without the memory of interleaved 1F1B.
    """
    most = ranks * chunks if not extra_in_flight else 2 * ranks * chunks - 1
    limits = [most if chunks > 1 else max(1, most - s * (2 if extra_in_flight else 1)) for s in range(ranks)]
    return _play_greedily(Placement.interleaved(ranks, chunks), microbatches, limits)


def zb_v(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Zero bubble on a V, with as many slices on every rank as 1F1B's first holds: ranks wait for the pipe to fill."""
    placement = Placement.v_shaped(ranks, chunks)
    return _with_slices(placement, microbatches, placement.stages, microbatches)


def v_half(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Zero bubble on a V with half of 1F1B's bytes and a microbatch, ranks / 2 + 1 of them, and a larger bubble."""
    return _with_slices(Placement.v_shaped(ranks, chunks), microbatches, (ranks + 2) * chunks // 2, ranks)


def v_min(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Zero bubble on a V with about a third of 1F1B's bytes, and the largest bubble."""
    return of_items(repeated(Placement.v_shaped(ranks, chunks), microbatches))


def _with_slices(placement: Placement, microbatches: int, slices: int, in_flight: int) -> Schedule:
    lists = played(placement, microbatches, Loads.alike(placement, slices), in_flight)
    assert lists is not None  # there is room for one microbatch on every rank
    return of_items(lists)


def _build_1f1b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    if chunks > 1:
        return interleaved_one_f_one_b(ranks, microbatches, chunks)
    return one_f_one_b(ranks, microbatches)


_BUILDERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "1f1b": _build_1f1b,
    "interleaved": _build_1f1b,
    "gpipe": gpipe,
    "zb_h1": zero_bubble,
    "zb_h2": lambda ranks, microbatches, chunks: zero_bubble(ranks, microbatches, chunks, extra_in_flight=True),
    "zb_auto": zero_bubble,  # the planner begins with these, and puts lists of its own into the plan
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "zb_v_auto": zb_v,  # likewise
}
SCHEDULE_NAMES = tuple(_BUILDERS)
INSTEAD = {"gpipe": "1f1b", "zb_h2": "zb_auto", "v_half": "zb_v_auto", "v_min": "zb_v_auto"}
"""Those that no plan is fastest with, which older plans name; and what is offered in their place."""
OFFERED = tuple(name for name in SCHEDULE_NAMES if name not in INSTEAD)
V_SHAPED = ("zb_v", "v_half", "v_min", "zb_v_auto")
"""Those on a V-shaped placement."""


def placement_of(name: str, ranks: int, chunks: int = 1) -> Placement:
    """Where the stages of a schedule of that name sit."""
    return Placement.v_shaped(ranks, chunks) if name in V_SHAPED else Placement.interleaved(ranks, chunks)


def offered(name: str) -> str:
    """The name, of one that plans are made with. Raises UserError for others."""
    if name in INSTEAD:
        raise UserError(f"schedule {name} is run where a plan names it, but is never the fastest; use {INSTEAD[name]}")
    if name not in OFFERED:
        raise UserError(f"schedule {name!r} is not known; choose one of {', '.join(OFFERED)}")
    return name


def build_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The schedule of that name; "1f1b" with several chunks is interleaved 1F1B.

    Raises UserError for an unknown name and for counts under one.
    """
    if name not in _BUILDERS:
        raise UserError(f"schedule {name!r} is not known; choose one of {', '.join(SCHEDULE_NAMES)}")
    for what, value in (("pipeline ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise UserError(f"schedule {name}: {what} must be at least 1, got {value}")
    return [list(actions) for actions in _build_cached(name, ranks, microbatches, chunks)]


def splits_backward(name: str) -> bool:
    """Whether the schedules of that name split the backward into B (inputs) and W (weights)."""
    return has_weight_gradients(build_schedule(name, 1, 1))


def _in_order(kind: str, microbatches: int) -> list[Action]:
    return [Action(kind, m) for m in range(microbatches)]


def _even_groups(ranks: int, microbatches: int) -> list[int]:
    groups = max(1, microbatches // ranks)
    return [microbatches // groups + (g < microbatches % groups) for g in range(groups)]


def _grouped(kind: str, sizes: list[int], chunks: int) -> list[Action]:
    order = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
    starts = accumulate(sizes, initial=0)
    return [
        Action(kind, m, c)
        for start, size in zip(starts, sizes, strict=False)
        for c in order
        for m in range(start, start + size)
    ]


def _alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    warm_up = min(warm_up, len(forwards))
    steady = [a for pair in zip(forwards[warm_up:], backwards, strict=False) for a in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


@cache
def _build_cached(name: str, ranks: int, microbatches: int, chunks: int) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(actions) for actions in _BUILDERS[name](ranks, microbatches, chunks))


def _play_greedily(placement: Placement, microbatches: int, limits: list[int]) -> Schedule:
    """The play of `zero_bubble`; `limits[rank]`: the most between F and B, the first rank's also between F and W."""
    ranks, chunks = placement.ranks, placement.chunks
    sizes = [min(ranks, microbatches - m) for m in range(0, microbatches, ranks)]
    forwards, backwards = _grouped("F", sizes, chunks), _grouped("B", sizes, chunks)
    finish: dict[tuple[int, Action], int] = {}
    lists: Schedule = [[] for _ in range(ranks)]
    last = [""] * ranks
    next_f, next_b, next_w, clock = [0] * ranks, [0] * ranks, [0] * ranks, [0] * ranks

    def arrival(rank: int, action: Action) -> int | None:
        own = [(rank, Action("F", action.microbatch, action.chunk))] if action.kind == "B" else []
        times = [finish.get(needed) for needed in own + givers(action, rank, placement)]
        return None if None in times else max((t for t in times if t is not None), default=0)

    def has_room(rank: int) -> bool:
        return next_f[rank] - next_b[rank] < limits[rank] and next_f[rank] - next_w[rank] < limits[0]

    def choices(rank: int) -> list[tuple[int, int, int, Action]]:
        """(start, rank, priority, action) of what the rank could do next."""
        found = []
        if next_b[rank] < len(backwards) and (at := arrival(rank, backwards[next_b[rank]])) is not None:
            found.append((max(at, clock[rank]), rank, 1, backwards[next_b[rank]]))
        if next_f[rank] < len(forwards) and has_room(rank):
            action = forwards[next_f[rank]]
            if (at := arrival(rank, action)) is not None:
                found.append((max(at, clock[rank]), rank, 0 if last[rank] == "B" else 2, action))
        if next_w[rank] < next_b[rank]:
            oldest = backwards[next_w[rank]]
            found.append((clock[rank], rank, 3, Action("W", oldest.microbatch, oldest.chunk)))
        return found

    counters = {"F": next_f, "B": next_b, "W": next_w}
    best = [min(choices(rank), key=lambda choice: choice[:3], default=None) for rank in range(ranks)]
    while any(best):
        start, rank, _, action = min((choice for choice in best if choice), key=lambda choice: choice[:3])
        clock[rank] = finish[rank, action] = start + 1
        counters[action.kind][rank] += 1
        last[rank] = last[rank] if action.kind == "W" else action.kind
        lists[rank].append(action)
        for near in {rank, (rank - 1) % ranks, (rank + 1) % ranks}:
            best[near] = min(choices(near), key=lambda choice: choice[:3], default=None)
    return lists
