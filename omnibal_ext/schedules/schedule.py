"""Schedules by name: each builds the lists of actions of all ranks (`omnibal_ext.schedules.actions`)."""

from collections.abc import Callable
from functools import cache
from itertools import accumulate

from omnibal_ext.errors import UserError
from omnibal_ext.schedules.actions import Action, Schedule, has_weight_gradients
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.playing import in_groups, in_slices, repeated


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Build 1F1B (PipeDream-Flush): rank s holds at most min(ranks - s, microbatches) microbatches.

    1. Warm up with ranks - s - 1 forwards.
    2. Alternate one forward, one backward.
    3. Drain the backwards that are left.
    """
    forwards, backwards = (_grouped(kind, [microbatches], 1) for kind in "FB")
    return [_alternate(forwards, backwards, ranks - s - 1) for s in range(ranks)]


def gpipe(ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Build GPipe: all forwards, then all backwards, the last microbatch first."""
    forwards = [Action("F", m, c) for c in range(chunks) for m in range(microbatches)]
    backwards = [Action("B", a.microbatch, a.chunk) for a in reversed(forwards)]
    return [forwards + backwards for _ in range(ranks)]


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Build interleaved 1F1B (Narayanan et al. 2021), for any number of microbatches.

    1. Cut the microbatches into groups as even as can be, each of at least `ranks`; fewer than `ranks` are one group.
    2. Forwards go group by group, each group through all chunks; backwards likewise, last chunk first.
    3. Rank s warms up with 2 (ranks - s - 1) + (chunks - 1) (first group's size) forwards, alternates, drains.

    With equal stages and at least `ranks` microbatches the bubble is (ranks - 1) / chunks rounds, divisible or not.
    """
    sizes = _even_groups(ranks, microbatches)
    forwards, backwards = _grouped("F", sizes, chunks), _grouped("B", sizes, chunks)
    return [_alternate(forwards, backwards, 2 * (ranks - s - 1) + (chunks - 1) * sizes[0]) for s in range(ranks)]


def zero_bubble(ranks: int, microbatches: int, chunks: int = 1, extra_in_flight: bool = False) -> Schedule:
    """Build a zero-bubble schedule (Qi et al. 2023), also with virtual chunks: weight gradients fill the waits.

    Without `extra_in_flight` no rank holds more than 1F1B's first rank (their H1), with it about twice that (H2). Made
    by playing the pipeline with F, B and W of one second each (`playing`); forwards go in groups of `ranks`
    microbatches, each group through all chunks, backwards likewise, last chunk first.

    With chunks every rank may hold ranks x chunks slices, which is what 1F1B's first rank holds: so the bubble shrinks
    by the chunks without the memory of interleaved 1F1B.
    """
    most = ranks * chunks if not extra_in_flight else 2 * ranks * chunks - 1
    limits = [most if chunks > 1 else max(1, most - s * (2 if extra_in_flight else 1)) for s in range(ranks)]
    sizes = [min(ranks, microbatches - m) for m in range(0, microbatches, ranks)]
    orders = {kind: _grouped(kind, sizes, chunks) for kind in "FB"}
    return in_groups(Placement.interleaved(ranks, chunks), microbatches, orders, limits)


def zb_v(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Build a zero-bubble schedule on a V: any rank holds what 1F1B's first does, and waits only as the pipe fills."""
    placement = Placement.v_shaped(ranks, chunks)
    return in_slices(placement, microbatches, placement.stages, microbatches)


def v_half(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Build a zero-bubble schedule on a V that holds ranks / 2 + 1 microbatches' activations, with a larger bubble."""
    return in_slices(Placement.v_shaped(ranks, chunks), microbatches, (ranks + 2) * chunks // 2, ranks)


def v_min(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Build a zero-bubble schedule on a V with about a third of 1F1B's activation bytes, and the largest bubble."""
    return repeated(Placement.v_shaped(ranks, chunks), microbatches)


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
"""Name -> (ranks, microbatches, chunks) -> for every rank its F and B (and all W, or none) in order.

A schedule is added as a row here, and in `V_SHAPED` if its stages sit on a V. It must also work for (1, 1, 1), have a
chunk's F in the order of microbatches, and leave out E and V (`weaving`). Property tests take every name from here.
"""
SCHEDULE_NAMES = tuple(_BUILDERS)
INSTEAD = {"gpipe": "1f1b", "zb_h2": "zb_auto", "v_half": "zb_v_auto", "v_min": "zb_v_auto"}
"""Schedules that are never the fastest but run where an older plan names them; and what to use in their place."""
OFFERED = tuple(name for name in SCHEDULE_NAMES if name not in INSTEAD)
V_SHAPED = ("zb_v", "v_half", "v_min", "zb_v_auto")
"""Schedules on a V-shaped placement."""


def placement_of(name: str, ranks: int, chunks: int = 1) -> Placement:
    """Return the placement that the named schedule is built for."""
    return Placement.v_shaped(ranks, chunks) if name in V_SHAPED else Placement.interleaved(ranks, chunks)


def offered(name: str) -> str:
    """Return `name` if new plans may use that schedule. Raises UserError for others, with what to use instead."""
    if name in INSTEAD:
        raise UserError(f"schedule {name} is run where a plan names it, but is never the fastest; use {INSTEAD[name]}")
    if name not in OFFERED:
        raise UserError(f"schedule {name!r} is not known; choose one of {', '.join(OFFERED)}")
    return name


def build_schedule(name: str, ranks: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Build the named schedule's list for every rank; "1f1b" with several chunks is interleaved 1F1B. Raises UserError
    for an unknown name and for counts under one."""
    if name not in _BUILDERS:
        raise UserError(f"schedule {name!r} is not known; choose one of {', '.join(SCHEDULE_NAMES)}")
    for what, value in (("pipeline ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise UserError(f"schedule {name}: {what} must be at least 1, got {value}")
    return [list(actions) for actions in _build_cached(name, ranks, microbatches, chunks)]


def splits_backward(name: str) -> bool:
    """Return whether the named schedule splits the backward into B (inputs) and W (weights)."""
    return has_weight_gradients(build_schedule(name, 1, 1))


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
