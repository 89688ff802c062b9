"""Zero-bubble lists for any placement: by playing the pipeline greedily, or by repeating a pattern.

On a V every rank's activations peak at the same bytes: what is kept longest on the first stage of a rank is kept
shortest on its last (Qi et al. 2024, arXiv 2405.15362). So the bytes of 1F1B's first rank are enough for nearly no
bubble, and half of them for a small one; a third is the least, with the pattern of `repeated`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from omnibal_ext.schedules.actions import Action, Schedule
from omnibal_ext.schedules.placement import Placement


class _Play:
    """A pipeline played greedily, every action a second long:

    1. Take the rank that can act earliest (ties: the lowest rank) and, of its actions, what can start earliest:
    2. a forward if the last action but W was a backward, else a backward, else the other of the two; of several the one
       of the oldest microbatch. A forward needs room;
    3. the oldest weight gradient if it can start earlier than both.
    """

    def __init__(self, placement: Placement, microbatches: int) -> None:
        self.placement, self.microbatches = placement, microbatches
        self.lists: Schedule = [[] for _ in range(placement.ranks)]
        self.clock, self.last = [0.0] * placement.ranks, [""] * placement.ranks
        self.ends: dict[tuple[str, int, int], float] = {}
        """(kind, stage, microbatch) -> second in which the action ends."""
        self.done = {kind: [0] * placement.stages for kind in "FBW"}
        """Microbatches through F, B and W of each stage."""
        self.waiting_w: list[deque[tuple[int, int]]] = [deque() for _ in range(placement.ranks)]
        """(microbatch, stage) between B and W, for each rank."""

    def run(self) -> Schedule:
        """Play to the end; return the actions of every rank in order. Every rank needs room for a microbatch."""
        ranks = range(self.placement.ranks)
        near = [{rank, *(r for edge in self.placement.edges if rank in edge for r in edge)} for rank in ranks]
        best = [self._best(rank) for rank in ranks]
        while any(best):
            start, rank, choice = min((found[0], rank, found[2:]) for rank, found in enumerate(best) if found)
            oldest = self.oldest
            self._do(rank, start, *choice)
            for other in near[rank] if self.oldest == oldest else ranks:
                best[other] = self._best(other)
        return self.lists

    @property
    def oldest(self) -> int:
        """The oldest microbatch that has not been through the last stage's F."""
        return self.done["F"][-1]

    def next_of(self, kind: str, rank: int) -> Iterable[int]:
        """Return the rank's stages whose next action of `kind` (F or B) may be taken."""
        return self.placement.stages_of[rank]

    def has_room(self, rank: int, stage: int, microbatch: int) -> bool:
        """Return whether the rank may hold one more microbatch in this stage, so that its F can begin."""
        raise NotImplementedError

    def _best(self, rank: int) -> tuple[float, int, int, int, str, int] | None:
        """Return the rank's next action, the least (start, priority, microbatch, -stage or 0, kind, stage) of those
        that can start; None: none can."""
        found: list[tuple[float, int, int, int, str, int]] = []
        for kind, priority in (("F", 0 if self.last[rank] == "B" else 2), ("B", 1)):
            for stage in self.next_of(kind, rank):
                microbatch = self.done[kind][stage]
                at = self._arrival(kind, stage, microbatch)
                if at is not None and (kind == "B" or self.has_room(rank, stage, microbatch)):
                    found.append((max(at, self.clock[rank]), priority, microbatch, -stage, kind, stage))
        if self.waiting_w[rank]:
            microbatch, stage = self.waiting_w[rank][0]
            found.append((self.clock[rank], 3, microbatch, 0, "W", stage))
        return min(found, default=None)

    def _do(self, rank: int, start: float, microbatch: int, _: int, kind: str, stage: int) -> None:
        self.lists[rank].append(Action(kind, microbatch, self.placement.rank_and_chunk(stage)[1]))
        self.clock[rank] = self.ends[kind, stage, microbatch] = start + 1.0
        self.done[kind][stage] += 1
        if kind == "W":
            self.waiting_w[rank].popleft()
            return
        self.last[rank] = kind
        if kind == "B":
            self.waiting_w[rank].append((microbatch, stage))

    def _arrival(self, kind: str, stage: int, microbatch: int) -> float | None:
        """Return the second from which an F or B has its inputs; None: not known yet."""
        if microbatch == self.microbatches:
            return None
        needs = [(kind, stage + (1 if kind == "B" else -1), microbatch)] + [("F", stage, microbatch)] * (kind == "B")
        times = [self.ends.get(need) for need in needs if 0 <= need[1] < self.placement.stages]
        return None if None in times else max((time for time in times if time is not None), default=0.0)


class _InSlices(_Play):
    """A play in which a rank holds at most `slices` (a microbatch in one stage each), and at most `in_flight`
    microbatches are between their first F and last B."""

    def __init__(self, placement: Placement, microbatches: int, slices: int, in_flight: int) -> None:
        super().__init__(placement, microbatches)
        self.slices, self.in_flight = slices, in_flight

    def has_room(self, rank: int, stage: int, microbatch: int) -> bool:
        """Return whether an F keeps both limits and leaves the oldest microbatch the slices that it still needs here:
        so that one always finds room, and nothing deadlocks."""
        (f, b, w), mine = self.done.values(), self.placement.stages_of[rank]
        left_free = 0 if microbatch == self.oldest else sum(f[one] <= self.oldest for one in mine)
        held = sum(f[one] - w[one] for one in mine)
        return (stage > 0 or microbatch - b[0] < self.in_flight) and held + left_free < self.slices


class _InGroups(_Play):
    """A play with F and B in fixed `orders`, and limits on how many slices (a microbatch in one stage) a rank holds."""

    def __init__(
        self, placement: Placement, microbatches: int, orders: Mapping[str, list[Action]], limits: list[int]
    ) -> None:
        super().__init__(placement, microbatches)
        self.orders, self.limits = orders, limits

    def next_of(self, kind: str, rank: int) -> list[int]:
        """Return the stage whose turn it is in the order of `kind`; [] at the end."""
        mine = self.placement.stages_of[rank]
        following = self.orders[kind][sum(self.done[kind][stage] for stage in mine) :][:1]
        return [mine[action.chunk] for action in following]

    def has_room(self, rank: int, stage: int, microbatch: int) -> bool:
        """Return whether one more F keeps the limits: the rank's from F to B, and the first rank's from F to W."""
        f, b, w = (sum(self.done[kind][one] for one in self.placement.stages_of[rank]) for kind in "FBW")
        return f - b < self.limits[rank] and f - w < self.limits[0]


def in_slices(placement: Placement, microbatches: int, slices: int, in_flight: int) -> Schedule:
    """Return lists of actions from playing greedily; a rank holds at most `slices` (a microbatch in one stage each),
    and at most `in_flight` microbatches are between their first F and last B."""
    return _InSlices(placement, microbatches, slices, in_flight).run()


def in_groups(
    placement: Placement, microbatches: int, orders: Mapping[str, list[Action]], limits: list[int]
) -> Schedule:
    """Return lists of actions from playing with F and B in `orders` (by kind); rank r holds at most `limits[r]` slices
    (a microbatch in one stage each) from F to B, and `limits[0]` from F to W."""
    return _InGroups(placement, microbatches, orders, limits).run()


def repeated(placement: Placement, microbatches: int) -> Schedule:
    """Return every rank's list, from a pattern that repeats and holds the fewest bytes possible (V-Min).

        rank 0   . . F0 F1 . . . . B1 B0 . .
        rank 1   . F0 . . F1 . . B1 . . B0 .
        rank 2   F0 . . . . F1 B1 . . . . B0

    1. Lay out one microbatch; at each turn wait until no rank would have two actions in one second when all is repeated
       every 3 x chunks seconds, a rank's work on a microbatch (where that cannot be, do not wait). Each W goes to the
       first free second behind its B.
    2. Repeat it for every microbatch; a rank's list is its actions by their seconds.
    """
    period = 3 * placement.chunks
    lists: list[list[tuple[int, str, int, int]]] = [[] for _ in range(placement.ranks)]
    for second, kind, stage in _one_microbatch(placement, period):
        rank, chunk = placement.rank_and_chunk(stage)
        lists[rank] += [(second + period * m, kind, m, chunk) for m in range(microbatches)]
    return [[Action(kind, m, chunk) for _, kind, m, chunk in sorted(items)] for items in lists]


def _one_microbatch(placement: Placement, period: int) -> Iterator[tuple[int, str, int]]:
    """Yield (second, kind, stage) of the first microbatch's actions; others follow every `period` seconds."""
    ranks, stages, now = placement.ranks, placement.stages, 0
    taken: list[set[int]] = [set() for _ in range(ranks)]
    backwards = []
    path = [*(("F", stage) for stage in range(stages)), *(("B", stage) for stage in reversed(range(stages)))]
    for way in (path[begin : begin + ranks] for begin in range(0, len(path), ranks)):
        way_ranks = [placement.ranks_of[stage] for _, stage in way]
        now = next(
            (begin for begin in range(now, now + period)
             if all((begin + n) % period not in taken[rank] for n, rank in enumerate(way_ranks))),
            now,
        )  # fmt: skip
        for kind, stage in way:
            taken[placement.ranks_of[stage]].add(now % period)
            backwards += [(now, stage)] if kind == "B" else []
            yield now, kind, stage
            now += 1
    for second, stage in backwards:
        mine, later = taken[placement.ranks_of[stage]], second + 1
        while later % period in mine and len(mine) < period:
            later += 1
        mine.add(later % period)
        yield later, "W", stage
