"""Zero-bubble lists for any placement: from playing the pipeline, and from a pattern that repeats.

On a V all ranks hold alike: what is kept longest on the first stage of a rank is kept shortest on its last (Qi et al.
2024, arXiv 2405.15362). So the bytes of 1F1B's first rank are enough for nearly no bubble, and half of them for a small
one; a third is the least, with the pattern of `repeated`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from omnibal_ext.schedules.placement import Placement

Item = tuple[str, int, int]
"""Kind, microbatch, chunk."""


@dataclass(frozen=True, slots=True)
class Loads:
    """What a microbatch costs on every stage, and what ranks have room for."""

    seconds: Mapping[str, Sequence[float]]
    """Of F, B and W."""
    kept: Sequence[float]
    """Bytes from F to B."""
    late: Sequence[float]
    """Bytes from B to W."""
    room: Sequence[float]
    """Bytes of every rank."""

    @classmethod
    def alike(cls, placement: Placement, slices: int) -> "Loads":
        """A second for everything, and room for so many slices of microbatches on every rank."""
        ones = [1.0] * placement.stages
        return cls(dict.fromkeys("FBW", ones), ones, ones, [float(slices)] * placement.ranks)


def played(placement: Placement, microbatches: int, loads: Loads, in_flight: int) -> list[list[Item]] | None:
    """Of every rank, its actions in order, from playing the pipeline; None where one microbatch finds no room.

    1. Of all ranks take the one that can act earliest (ties: the lowest rank); on it, of what can start earliest,
    2. a forward if the last action but W was a backward, else a backward, else the other of the two; of several the one
       of the oldest microbatch. A microbatch enters while fewer than `in_flight` are between their first F and last B;
       a forward needs room for what it keeps;
    3. the oldest weight gradient if it can start earlier than both.

    The oldest microbatch that is not through its forwards always finds room: the others leave it as much as it still
    needs. So nothing deadlocks.
    """
    play = _Play(placement, microbatches, loads, in_flight)
    best = [play.best(rank) for rank in range(placement.ranks)]
    while any(best):
        start, rank, choice = min((found[0], rank, found[2:]) for rank, found in enumerate(best) if found)
        oldest = play.oldest
        play.do(rank, start, *choice)
        near = {rank, *(other for edge in placement.edges if rank in edge for other in edge)}
        for other in near if play.oldest == oldest else range(placement.ranks):
            best[other] = play.best(other)
    complete = all(len(items) == 3 * microbatches * placement.chunks for items in play.lists)
    return play.lists if complete else None


class _Play:
    def __init__(self, placement: Placement, microbatches: int, loads: Loads, in_flight: int) -> None:
        self.placement, self.microbatches, self.loads, self.in_flight = placement, microbatches, loads, in_flight
        ranks, stages = placement.ranks, placement.stages
        self.lists: list[list[Item]] = [[] for _ in range(ranks)]
        self.clock, self.held, self.last = [0.0] * ranks, [0.0] * ranks, [""] * ranks
        self.ends: dict[tuple[str, int, int], float] = {}
        """(kind, stage, microbatch) -> second."""
        self.done = {kind: [0] * stages for kind in "FB"}
        """Microbatches through F, through B, of each stage."""
        self.late: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        """Of each rank, (microbatch, stage) between B and W."""

    @property
    def oldest(self) -> int:
        """The oldest microbatch that is not through its forwards."""
        return self.done["F"][-1]

    def best(self, rank: int) -> tuple[float, int, int, int, str, int] | None:
        """(start, priority, microbatch, -chunk or 0, kind, stage) of what the rank would do next."""
        found: list[tuple[float, int, int, int, str, int]] = []
        for chunk, stage in enumerate(self.placement.stages_of[rank]):
            for kind, priority in (("F", 0 if self.last[rank] == "B" else 2), ("B", 1)):
                microbatch = self.done[kind][stage]
                at = self._arrival(kind, stage, microbatch)
                if at is not None and (kind == "B" or self._has_room(rank, stage, microbatch)):
                    found.append((max(at, self.clock[rank]), priority, microbatch, -chunk, kind, stage))
        if self.late[rank]:
            microbatch, stage = self.late[rank][0]
            found.append((self.clock[rank], 3, microbatch, 0, "W", stage))
        return min(found, default=None)

    def do(self, rank: int, start: float, microbatch: int, _: int, kind: str, stage: int) -> None:
        """Act."""
        self.lists[rank].append((kind, microbatch, self.placement.rank_and_chunk(stage)[1]))
        self.clock[rank] = self.ends[kind, stage, microbatch] = start + self.loads.seconds[kind][stage]
        kept, late = self.loads.kept[stage], self.loads.late[stage]
        self.held[rank] += {"F": kept, "B": late - kept, "W": -late}[kind]
        if kind == "W":
            self.late[rank].pop(0)
            return
        self.done[kind][stage] += 1
        self.last[rank] = kind
        if kind == "B":
            self.late[rank].append((microbatch, stage))

    def _arrival(self, kind: str, stage: int, microbatch: int) -> float | None:
        """From when on an F or B can start; None: not yet known."""
        if microbatch == self.microbatches:
            return None
        needs = [(kind, stage + (1 if kind == "B" else -1), microbatch)] + [("F", stage, microbatch)] * (kind == "B")
        times = [self.ends.get(need) for need in needs if 0 <= need[1] < self.placement.stages]
        return None if None in times else max((time for time in times if time is not None), default=0.0)

    def _has_room(self, rank: int, stage: int, microbatch: int) -> bool:
        if stage == 0 and microbatch - self.done["B"][0] >= self.in_flight:
            return False
        needs = self.loads.kept[stage]
        if microbatch != self.oldest:
            mine = self.placement.stages_of[rank]
            needs += sum(self.loads.kept[one] for one in mine if self.done["F"][one] <= self.oldest)
        return self.held[rank] + needs <= self.loads.room[rank] * (1 + 1e-9)


def repeated(placement: Placement, microbatches: int) -> list[list[Item]]:
    """Of every rank, its actions in order, from a pattern that repeats and keeps as little as can be (V-Min).

        rank 0   . . F0 F1 . . . . B1 B0 . .
        rank 1   . F0 . . F1 . . B1 . . B0 .
        rank 2   F0 . . . . F1 B1 . . . . B0

    1. Lay out one microbatch; at each turn wait until no rank meets itself when all is repeated every 3 x chunks
       seconds, a rank's work on a microbatch (where that cannot be, do not wait). Each W goes to the first free second
       behind its B.
    2. Repeat it for every microbatch; a rank's list is its actions by their seconds.
    """
    period = 3 * placement.chunks
    lists: list[list[tuple[int, Item]]] = [[] for _ in range(placement.ranks)]
    for second, kind, stage in _one_microbatch(placement, period):
        rank, chunk = placement.rank_and_chunk(stage)
        lists[rank] += [(second + period * m, (kind, m, chunk)) for m in range(microbatches)]
    return [[item for _, item in sorted(items)] for items in lists]


def _one_microbatch(placement: Placement, period: int) -> Iterator[tuple[int, str, int]]:
    """(second, kind, stage) of every action of the first microbatch."""
    ranks, stages, now = placement.ranks, placement.stages, 0
    taken: list[set[int]] = [set() for _ in range(ranks)]
    backwards = []
    path = [*(("F", stage) for stage in range(stages)), *(("B", stage) for stage in reversed(range(stages)))]
    for way in (path[begin : begin + ranks] for begin in range(0, len(path), ranks)):
        places = [placement.ranks_of[stage] for _, stage in way]
        now = next(
            (begin for begin in range(now, now + period)
             if all((begin + n) % period not in taken[rank] for n, rank in enumerate(places))),
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
