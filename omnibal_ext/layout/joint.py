"""The joint search: cuts and recomputed layers together, for the least simulated step time that fits the memory.

1. Start from the best layouts the other methods found (so it is never worse than any of them).
2. Walk: move a cut, or neighbouring cuts together, by a few layers, as long as that helps. A layout that does not fit
   is ranked by the bytes it is short of, so the walk also leads into the memory.
3. Prove: depth-first over the cuts from the first stage on, with every minimal recompute choice (`options`). A branch
   is left when a lower bound (`bounds`) reaches the best step time so far. What remains at the end is the best of all
   layouts.
4. If the time for that was up first, walk from the other starts, and from the best with some cuts moved at random,
   until all time is up. The layout is then the best found, and `proven` is False.

Time is counted work, in seconds that it takes an idle core, about: the plan does not depend on the machine's load.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.layout.bounds import Bounds
from omnibal_ext.layout.options import RankOptions
from omnibal_ext.layout.problem import Edges, Layout, LayoutProblem
from omnibal_ext.layout.recompute import recompute_all
from omnibal_ext.layout.tables import KIND_OF_WAY, WAYS, WHOLE

LEAST_GAIN = 1e-9
"""Relative; smaller differences are rounding."""
KICKED_RUNS = 3
"""Most runs of cuts moved at random before walking again."""
SECONDS_MORE_TO_FIT = 10.0
"""Before saying that nothing fits, the walk goes on so long."""
A_CALL, AN_ACTION, A_LOOK = 1e-4, 8e-9, 1e-5
"""Seconds: of playing a layout or listing a rank's recompute counts, beside each action played; of a look at a cut."""


@dataclass(frozen=True, slots=True)
class Found:
    """A layout of the search. `proven`: no layout is faster, by more than rounding."""

    layout: Layout
    step_seconds: float
    proven: bool


@dataclass(slots=True)
class _Best:
    """What is ranked: first bytes short of (0 where it fits), then seconds."""

    short_bytes: float
    seconds: float
    edges: Edges
    again: Ints

    @property
    def score(self) -> tuple[float, float]:
        return self.short_bytes, self.seconds

    def beats(self, other: "_Best") -> bool:
        """By more than rounding."""
        if self.short_bytes != other.short_bytes:
            return self.short_bytes < other.short_bytes
        return self.seconds < other.seconds * (1 - LEAST_GAIN)


def joint_search(
    problem: LayoutProblem, starts: Sequence[Edges], layouts: Sequence[Layout] = (), seconds: float = 4.0
) -> list[Found]:
    """Layouts by step time, the best first; stops after `seconds` of counted work (half of it for the first walk).

    `starts` are cuts to begin with, `layouts` layouts that fit and that the result may not be slower than.

    Raises UserError, naming the stage and the bytes it is short of, if no layout was found that fits.
    """
    search = _Search(problem, seconds)
    for edges in dict.fromkeys(starts):
        search.try_cuts(edges)
    for layout in layouts:
        search.take(layout)
    search.walk(search.best.edges, search.spent + seconds / 2)
    # With chunks the bounds are weak: large instances are not proven in any time, and walking on gains more.
    share = 0.5 if problem.chunks == 1 else 0.25
    proven = search.prove(search.spent + share * seconds) and search.options.exact
    if not proven:
        search.kick(starts)
    if search.best.short_bytes > 0:
        recompute_all(problem, search.best.edges)
    ranked = sorted(search.seen.values(), key=lambda candidate: candidate.score)
    fitting = [c for c in ranked if c.short_bytes <= 0]
    return [Found(problem.layout(c.edges, c.again), c.seconds, proven and i == 0) for i, c in enumerate(fitting)]


class _Search:
    def __init__(self, problem: LayoutProblem, deadline: float) -> None:
        self.problem, self.deadline, self.prove_until = problem, deadline, deadline
        self.spent = 0.0
        """Seconds of counted work so far; deadlines are of this clock."""
        self.a_play = A_CALL + AN_ACTION * problem.program.steps.shape[1] * problem.cases[0] * problem.cases[1]
        self.options, self.bounds = RankOptions(problem), Bounds(problem)
        self.layers, self.stages = len(problem.profile.chain), problem.stages
        self.best = _Best(np.inf, np.inf, (), np.zeros((self.stages, len(WAYS)), dtype=np.int64))
        self.seen: dict[Edges, _Best] = {}
        self.moves = list(self._moves())
        self.work = (self.bounds.forward + self.bounds.backward).sum(axis=2)

    def try_cuts(self, edges: Edges) -> _Best:
        """Judge cuts with their best recompute choice, and remember the best of all."""
        if edges not in self.seen:
            self.seen[edges] = self._judge(edges)
            if self.seen[edges].beats(self.best):
                self.best = self.seen[edges]
        return self.seen[edges]

    def take(self, layout: Layout) -> None:
        """Compare with a layout that fits."""
        took = self.problem.step_seconds(layout)
        if self.best.short_bytes > 0 or took < self.best.seconds:
            self.best = _Best(0.0, took, layout.edges, self.problem.counts(layout)[1])
            self.seen[layout.edges] = self.best

    def _judge(self, edges: Edges) -> _Best:
        problem, ranks, listed = self.problem, self.problem.ranks, self.options.listed
        held = problem.slices(edges)
        stages_of = problem.placement.stages_of
        choices = [self.options.of(rank, held[mine]) for rank, mine in enumerate(stages_of)]
        self.spent += A_LOOK * ranks + A_CALL * (self.options.listed - listed)
        short = sum(self._short_bytes(rank, held[mine]) for rank, mine in enumerate(stages_of) if not choices[rank])
        again = np.zeros_like(self.best.again)
        if short > 0:
            return _Best(short, np.inf, edges, again)
        for rank in range(ranks):
            again[stages_of[rank]] = choices[rank][0]
        seconds = self._play(held, again, edges)
        for rank in range(ranks):
            for other in choices[rank][1:]:
                changed = again.copy()
                changed[stages_of[rank]] = other
                if (took := self._play(held, changed, edges)) < seconds:
                    seconds, again = took, changed
        return _Best(0.0, seconds, edges, again)

    def _play(self, held: Ints, again: Ints, edges: Edges) -> float:
        self.spent += self.a_play
        return self.problem.step_seconds_of_counts(held, again, edges)

    def _short_bytes(self, rank: int, held: Ints) -> float:
        everything = held[:, KIND_OF_WAY] * WHOLE
        return max(1.0, self.problem.rank_bytes(rank, held, everything) - self.problem.memory_bytes)

    def walk(self, start: Edges, until: float) -> None:
        """Go round the moves, take each that improves on where we stand, and stop after a round in which none did."""
        here, tried = self.try_cuts(start), 0
        for move in cycle(self.moves):
            self.spent += A_LOOK
            late = self.spent - until
            if tried >= len(self.moves) or late > (0 if self.best.short_bytes <= 0 else SECONDS_MORE_TO_FIT):
                return
            tried += 1
            edges = self._moved(here.edges, *move)
            if edges and self._worth_playing(edges, here):
                there = self.try_cuts(edges)
                if there.beats(here):
                    here, tried = there, 0

    def kick(self, starts: Sequence[Edges]) -> None:
        """Until the time is up: walk from the other starts, then from the best with some cuts moved at random."""
        for start in starts:
            self.walk(start, self.deadline)
        random = np.random.default_rng(0)
        while self.spent < self.deadline and self.stages > 1:
            self.spent += A_LOOK
            edges = self.best.edges
            for _ in range(int(random.integers(1, KICKED_RUNS + 1))):
                first = int(random.integers(1, self.stages))
                end = int(random.integers(first + 1, self.stages + 1))
                edges = self._moved(edges, first, end, int(random.choice([-2, -1, 1, 2]))) or edges
            self.walk(edges, self.deadline)

    def _moves(self) -> Iterator[tuple[int, int, int]]:
        """(first cut, one past the last, shift) of runs of neighbouring cuts: single cuts first, then longer runs."""
        for length, shift in product(range(1, self.stages), (1, -1, 2, -2)):
            for first in range(1, self.stages - length + 1):
                yield first, first + length, shift

    def _moved(self, edges: Edges, first: int, end: int, shift: int) -> Edges | None:
        moved = tuple(e + shift for e in edges[first:end])
        if edges[first - 1] < moved[0] and moved[-1] < edges[end]:
            return (*edges[:first], *moved, *edges[end:])
        return None

    def _worth_playing(self, edges: Edges, here: _Best) -> bool:
        """False where one rank's work alone, nothing recomputed, takes as long as the step where we stand."""
        if here.short_bytes > 0:
            return True
        done = self.work[list(edges)]
        by_rank = self.problem.placement.by_rank(done[1:] - done[:-1])
        return self.problem.over_cases(by_rank.max(axis=0)) < here.seconds

    def prove(self, until: float) -> bool:
        """Search everything that the bounds leave; False if the time was up first."""
        self.prove_until = until
        if self.problem.chunks > 1:
            least = np.zeros((self.stages + 1, self.layers + 1))
            allowed = None
        else:
            allowed = self.bounds.slice_bounds()
            least = _least_of_the_rest(allowed)
        return self._descend([0], [], allowed, least)

    def _descend(self, edges: list[int], again: list[Ints], allowed: NDArray | None, least: NDArray) -> bool:
        stage, first = len(edges) - 1, edges[-1]
        if stage == self.stages:
            return self._finish(tuple(edges), again)
        last = self.layers - (self.stages - stage - 1)
        ends = range(first + 1, last + 1) if stage < self.stages - 1 else (self.layers,)
        for end in sorted(ends, key=lambda e: 0.0 if allowed is None else allowed[stage, first, e]):
            self.spent += A_LOOK
            if self.spent > self.prove_until:
                return False
            if self._too_slow(least[stage + 1, end]) or (
                allowed is not None and self._too_slow(allowed[stage, first, end])
            ):
                continue
            path = [*edges, end]
            held = self.problem.slices(path)
            for choice in self._choices(stage, held):
                counts = [*again, choice]
                self.spent += 2 * self.a_play  # as long as two
                if self._too_slow(self.bounds.prefix_bound(path, held, np.stack(counts))):
                    continue
                if not self._descend(path, counts, allowed, least):
                    return False
        return True

    def _choices(self, stage: int, held: Ints) -> list[Ints]:
        """Recompute counts [ways] for the newest stage; with chunks they are chosen in `_finish`."""
        if self.problem.chunks > 1:
            return [np.zeros(len(WAYS), dtype=np.int64)]
        return [choice[0] for choice in self.options.of(stage, held[-1:])]

    def _finish(self, edges: Edges, again: list[Ints]) -> bool:
        """All stages are cut: play what is left to choose."""
        problem, stages_of = self.problem, self.problem.placement.stages_of
        held = problem.slices(edges)
        per_rank = [[np.stack(again)[mine]] for mine in stages_of]
        if problem.chunks > 1:
            per_rank = [self.options.of(rank, held[mine]) for rank, mine in enumerate(stages_of)]
        for way in product(*per_rank):
            if self.spent > self.prove_until:
                return False
            counts = np.empty_like(self.best.again)
            for rank, chosen in enumerate(way):
                counts[stages_of[rank]] = chosen
            took = self._play(held, counts, edges)
            if self.best.short_bytes > 0 or took < self.best.seconds * (1 - LEAST_GAIN):
                self.best = _Best(0.0, took, edges, counts)
                self.seen[edges] = self.best
        return True

    def _too_slow(self, bound: float) -> bool:
        limit = np.inf if self.best.short_bytes > 0 else self.best.seconds * (1 - LEAST_GAIN)
        return bool(bound >= limit)


def _least_of_the_rest(allowed: NDArray) -> NDArray:
    """float64 [stages + 1, layers + 1]: the least worst bound of stages s .. end holding the layers from i on."""
    stages, size = allowed.shape[0], allowed.shape[1]
    least = np.full((stages + 1, size), np.inf)
    least[stages, size - 1] = 0.0
    for s in range(stages - 1, -1, -1):
        least[s] = np.maximum(allowed[s], least[s + 1][None, :]).min(axis=1)
    return least
