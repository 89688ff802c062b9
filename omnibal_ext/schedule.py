"""Pipeline schedules as plain data: for every rank, the list of what it does, in order.

A stage is one contiguous slice of the layer chain; a `Placement` says which (rank, chunk) it is.

An action waits for: F, the forward of its microbatch one stage earlier; B, that forward here and the backward one stage
later; W, the backward here. In lists without W, B computes the gradients of inputs and of weights together.
"""

import re
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

from omnibal_ext.errors import UserError
from omnibal_ext.placement import Placement
from omnibal_ext.playing import Item, Loads, played, repeated


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank: `kind` is "F" forward, "B" backward, "W" gradient of the weights where B leaves it out."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}(microbatch {self.microbatch}, chunk {self.chunk})"

    @property
    def word(self) -> str:
        """As plan.json has it: "B3.1" is the backward of microbatch 3 in chunk 1."""
        return f"{self.kind}{self.microbatch}.{self.chunk}"

    @classmethod
    def of_word(cls, word: str) -> "Action":
        """Read `word`. Raises UserError for any other text."""
        found = re.fullmatch(r"([FBW])(\d{1,9})\.(\d{1,9})", word, re.ASCII)
        if found is None:
            raise UserError(f"{word[:40]!r} is no action; write F, B or W, the microbatch, a dot and the chunk: B3.1")
        return cls(found[1], int(found[2]), int(found[3]))


Schedule = list[list[Action]]


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


def of_items(lists: list[list[Item]]) -> Schedule:
    """The schedule of (kind, microbatch, chunk) lists."""
    return [[Action(*item) for item in items] for items in lists]


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
V_SHAPED = ("zb_v", "v_half", "v_min", "zb_v_auto")
"""Those on a V-shaped placement."""


def placement_of(name: str, ranks: int, chunks: int = 1) -> Placement:
    """Where the stages of a schedule of that name sit."""
    return Placement.v_shaped(ranks, chunks) if name in V_SHAPED else Placement.interleaved(ranks, chunks)


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


def has_weight_gradients(schedule: Schedule) -> bool:
    """True where the backward is split into B (inputs) and W (weights)."""
    return any(action.kind == "W" for action in schedule[0])


def counts_of(schedule: Schedule) -> tuple[int, int, int]:
    """Of how many ranks, microbatches and chunks lists of actions are."""
    actions = [action for actions in schedule for action in actions]
    return len(schedule), 1 + max(a.microbatch for a in actions), 1 + max(a.chunk for a in actions)


def in_flight_limits(schedule: Schedule) -> list[list[int]]:
    """Per rank and chunk: the most microbatches whose activations are held at once (at the rank's own peak)."""
    release = "W" if has_weight_gradients(schedule) else "B"
    limits = []
    for actions in schedule:
        held: dict[int, int] = defaultdict(int)
        most: dict[int, int] = defaultdict(int)
        for action in actions:
            held[action.chunk] += (action.kind == "F") - (action.kind == release)
            most[action.chunk] = max(most[action.chunk], held[action.chunk])
        limits.append([most[chunk] for chunk in range(max(most, default=0) + 1)])
    return limits


def check_schedule(schedule: Schedule, microbatches: int, placement: Placement | None = None) -> list[tuple[int, int]]:
    """Refuse a schedule that loses or doubles work or would deadlock; return a valid order as (rank, position) pairs.

    Without a placement every rank has one stage. Raises UserError naming the rank and the action.
    """
    placement = placement or Placement.interleaved(len(schedule))
    chunks = placement.chunks
    kinds = ("F", "B", "W") if any(a.kind == "W" for actions in schedule for a in actions) else ("F", "B")
    wanted = {Action(kind, m, c) for kind in kinds for m in range(microbatches) for c in range(chunks)}
    for rank, actions in enumerate(schedule):
        seen: set[Action] = set()
        for action in actions:
            if action not in wanted or action in seen:
                raise UserError(
                    f"schedule: rank {rank} has {action} {'twice' if action in seen else 'but no such work'}"
                )
            seen.add(action)
        if seen != wanted:
            missing = min(wanted - seen, key=lambda a: (a.microbatch, a.chunk, kinds.index(a.kind)))
            raise UserError(f"schedule: rank {rank} never does {missing}")
    return _dependency_order(schedule, placement)


def check_packs(schedule: Schedule, chunks: int = 1) -> None:
    """Refuse a schedule that takes packs in another order than they come: in each chunk from microbatch 0 up.

    In all else ranks are free: receives are posted in the order of their sender (`omnibal_ext.posting`).
    Raises UserError naming rank and action.
    """
    for rank, actions in enumerate(schedule):
        awaited = [0] * chunks
        for action in actions:
            if action.kind == "F":
                if action.microbatch != awaited[action.chunk]:
                    raise UserError(
                        f"schedule: rank {rank} runs {action} where the pack of microbatch {awaited[action.chunk]} "
                        "comes; put the forwards of a chunk in the order of microbatches"
                    )
                awaited[action.chunk] += 1


def giver(action: Action, rank: int, placement: Placement) -> tuple[int, Action] | None:
    """Who makes the tensor that an action takes: (rank, action) of the stage before for F, of the next one for B."""
    return _of_neighbour(action, rank, placement, {"F": -1, "B": 1, "W": 0}[action.kind])


def taker(action: Action, rank: int, placement: Placement) -> tuple[int, Action] | None:
    """Who takes the tensor that an action makes: (rank, action) of the next stage for F, of the one before for B."""
    return _of_neighbour(action, rank, placement, {"F": 1, "B": -1, "W": 0}[action.kind])


def dependencies(action: Action, rank: int, placement: Placement) -> list[tuple[int, Action]]:
    """What an action waits for besides the rank's own list order: (rank, action) pairs."""
    before = {"F": None, "B": "F", "W": "B"}[action.kind]
    own = [] if before is None else [(rank, Action(before, action.microbatch, action.chunk))]
    given = giver(action, rank, placement)
    return own if given is None else [*own, given]


def _of_neighbour(action: Action, rank: int, placement: Placement, step: int) -> tuple[int, Action] | None:
    """The same kind of action so many stages further on, and its rank; None beyond the chain's ends."""
    stage = placement.stages_of[rank][action.chunk] + step
    if not step or not 0 <= stage < placement.stages:
        return None
    where, chunk = placement.rank_and_chunk(stage)
    return where, Action(action.kind, action.microbatch, chunk)


def _dependency_order(schedule: Schedule, placement: Placement) -> list[tuple[int, int]]:
    """Let every rank run as far as it can until all are done; a rank resumes when what it waited for is done."""
    ranks = len(schedule)
    position = [0] * ranks
    done: set[tuple[int, Action]] = set()
    waiting: dict[tuple[int, Action], list[int]] = defaultdict(list)
    order: list[tuple[int, int]] = []
    ready = deque(range(ranks))
    while ready:
        rank = ready.popleft()
        while position[rank] < len(schedule[rank]):
            action = schedule[rank][position[rank]]
            missing = next((d for d in dependencies(action, rank, placement) if d not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            done.add((rank, action))
            order.append((rank, position[rank]))
            position[rank] += 1
            ready.extend(waiting.pop((rank, action), ()))
    for rank, actions in enumerate(schedule):
        if position[rank] < len(actions):
            action = actions[position[rank]]
            other, needed = next(d for d in dependencies(action, rank, placement) if d not in done)
            raise UserError(
                f"schedule deadlocks: rank {rank} waits for ever at {action} for {needed} of rank {other}; "
                "put that earlier in its list"
            )
    return order


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
        times = [finish.get(needed) for needed in dependencies(action, rank, placement)]
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
