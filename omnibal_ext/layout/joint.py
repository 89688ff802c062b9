"""Joint search: cuts and recomputed layers together, for the least simulated step time that fits the memory.

1. Start from the best layouts the other methods found (so it is never worse than any of them).
2. Walk: move a cut, or neighbouring cuts together, by a few layers, as long as that helps. A layout that does not fit
   is ranked by the bytes it is short of, so the walk also leads into the memory.
3. Walk from the other starts, and from the best with some cuts moved at random, until many such walks in a row found
   nothing better, or the time is up.

Time is counted work, in seconds that it takes an idle core, about: the plan does not depend on the machine's load.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, product

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.arrays import Ints
from omnibal_ext.layout.frontier import minimal
from omnibal_ext.layout.problem import Edges, Layout, LayoutProblem
from omnibal_ext.layout.recompute import recompute_all
from omnibal_ext.layout.tables import prefix_sums

LEAST_GAIN = 1e-9
"""Share of the seconds; smaller differences are rounding."""
KICKED_RUNS = 3
"""Most runs of cuts moved at random before the next walk."""
PATIENCE = 200
"""Walks in a row without gain after which the search ends. With 50, 1 of some 150 small models was 1% slower than it
can be; on large ones 200 take a second more."""
SECONDS_MORE_TO_FIT = 10.0
"""Seconds by which a walk is prolonged while nothing fits."""
A_CALL, AN_ACTION, A_LOOK = 1e-4, 8e-9, 1e-5
"""Seconds: to play a layout or list a rank's recompute counts, of each action played, to look at a cut."""


@dataclass(slots=True)
class _Best:
    """Cuts with recompute counts, and their score: bytes short of the memory (0: they fit), then seconds."""

    short_bytes: float
    seconds: float
    edges: Edges
    recomputed: Ints

    @property
    def score(self) -> tuple[float, float]:
        return self.short_bytes, self.seconds

    def beats(self, other: "_Best") -> bool:
        """Return whether this one is better: fewer bytes short, or as many and faster by more than rounding."""
        if self.short_bytes != other.short_bytes:
            return self.short_bytes < other.short_bytes
        return self.seconds < other.seconds * (1 - LEAST_GAIN)


class RankOptions:
    """Finds, and remembers, the recompute counts with which a rank fits its memory.

    Step time grows with every count, so only the minimal counts that fit can be best (`frontier`). A rank with one
    stage gets all of them; if all microbatches are equal, the one that adds the least time. With virtual chunks there
    are too many, and trying more cuts gains more: a rank gets one choice, which is near the best:

    1. Add layers one by one, first where they free most bytes a second, until the rank fits. A layer recomputed
       whole takes the place of one whose cheap outputs are.
    2. Take back what was added last as far as the rank fits without it.
    """

    def __init__(self, problem: LayoutProblem) -> None:
        self.problem = problem
        self._known: dict[tuple[int, bytes], list[Ints]] = {}
        self._seconds = problem.tables.recompute.sum(axis=(1, 2))

    @property
    def listed(self) -> int:
        """Number of pairs (rank, counts of its layers) searched so far."""
        return len(self._known)

    def of(self, rank: int, held: Ints) -> list[Ints]:
        """Return the recompute counts, int64 [chunks, options] each, that let a rank with layers [chunks, columns] fit:
        those that add least time first; [] if none do."""
        key = (rank, held.tobytes())
        if key not in self._known:
            self._known[key] = self._of_one_stage(rank, held) if len(held) == 1 else self._of_many_stages(rank, held)
        return self._known[key]

    def _of_one_stage(self, rank: int, held: Ints) -> list[Ints]:
        problem = self.problem
        counts = minimal(problem.stage_bytes[rank], held[0], self._seconds, problem.tables.offered)
        found = sorted((count[None] for count in counts), key=lambda count: float((count @ self._seconds).sum()))
        return found[:1] if problem.packs is None else found

    def _of_many_stages(self, rank: int, held: Ints) -> list[Ints]:
        added = self._added(rank, held)
        fitting = self._fits(rank, held, np.stack(added))
        if not fitting.any():
            return []
        recomputed = added[int(fitting.argmax())]
        for chunk, option in reversed(self._axes(rank, held)):
            less = np.repeat(recomputed[None], recomputed[chunk, option] + 1, axis=0)
            less[:, chunk, option] = np.arange(recomputed[chunk, option], -1, -1)
            recomputed = less[int(self._fits(rank, held, less).cumprod().sum()) - 1]
        return [recomputed]

    def _added(self, rank: int, held: Ints) -> list[Ints]:
        """Return recompute counts: nothing recomputed, then one layer more each time, in the order of `_axes`."""
        recomputed = np.zeros((len(held), len(self.problem.columns.of_option)), dtype=np.int64)
        added = [recomputed.copy()]
        kinds, whole = self.problem.columns.of_option, self.problem.columns.whole
        for chunk, option in self._axes(rank, held):
            layers = held[chunk, kinds[option]]
            (other,) = np.flatnonzero((kinds[option] == kinds) & (whole[option] != whole))
            most = layers if whole[option] else layers - recomputed[chunk, other]
            for count in range(1, int(most) + 1):
                recomputed[chunk, option] = count
                recomputed[chunk, other] = min(recomputed[chunk, other], layers - count)
                added.append(recomputed.copy())
        return added

    def _axes(self, rank: int, held: Ints) -> list[tuple[int, int]]:
        """Return (chunk, option) of all that can be recomputed, that which frees most bytes a second first."""
        tables, in_flight = self.problem.tables, self.problem.held[rank].max(axis=0)
        gains = in_flight[:, None] * tables.saved / np.maximum(self._seconds, 1e-300)
        axes = np.argwhere(held[:, self.problem.columns.of_option] * tables.offered).tolist()
        return sorted(((chunk, option) for chunk, option in axes), key=lambda axis: -float(gains[axis]))

    def _fits(self, rank: int, held: Ints, counts: Ints) -> NDArray[np.bool_]:
        """Return for each of recompute counts [many, chunks, options] whether the rank fits: bool [many]."""
        return np.asarray(self.problem.bytes_of_counts(rank, held, counts) <= self.problem.memory_bytes)


def joint_search(
    problem: LayoutProblem,
    starts: Sequence[Edges],
    layouts: Sequence[Layout] = (),
    seconds: float = 4.0,
    top_k: int | None = None,
) -> list[tuple[Layout, float]]:
    """Find the `top_k` best layouts (None: all), best first, and their step seconds. Stop after `seconds` of work, as
    counted rather than timed; half of them are for the first walk.

    `starts` are cuts to begin with, `layouts` layouts that fit and that the result may not be slower than.

    Raises UserError, naming the pipeline rank and the bytes it is short of, if no layout was found that fits.
    """
    search = _Search(problem, seconds)
    for edges in dict.fromkeys(starts):
        search.try_cuts(edges)
    for layout in layouts:
        search.take(layout)
    search.walk(search.best.edges, search.spent + seconds / 2)
    search.kick(starts)
    if search.best.short_bytes > 0:
        recompute_all(problem, search.best.edges)
    ranked = sorted((c for c in search.seen.values() if c.short_bytes <= 0), key=lambda candidate: candidate.score)
    return [(problem.layout(c.edges, c.recomputed), c.seconds) for c in ranked[:top_k]]


class _Search:
    """State of one `joint_search`: all cuts judged so far, the best of them, and the work spent."""

    def __init__(self, problem: LayoutProblem, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.spent = 0.0
        """Seconds of counted work so far; deadlines count these."""
        self.a_play = A_CALL + AN_ACTION * len(problem.program.listed) * problem.cases[0] * problem.cases[1]
        self.options, self.stages = RankOptions(problem), problem.stages
        self.best = _Best(np.inf, np.inf, (), np.zeros((self.stages, len(problem.columns.of_option)), dtype=np.int64))
        self.seen: dict[Edges, _Best] = {}
        self.moves = list(self._moves())
        seconds = (problem.tables.forward + problem.tables.backward).sum(axis=2)
        self.work = prefix_sums(problem.per_layer(seconds))
        """[layers + 1, cases] Seconds of the layers before each, on all microbatches."""

    def try_cuts(self, edges: Edges) -> _Best:
        """Return cuts with their best recompute counts, judged once for all; update the best of all cuts."""
        if edges not in self.seen:
            self.seen[edges] = self._judge(edges)
            if self.seen[edges].beats(self.best):
                self.best = self.seen[edges]
        return self.seen[edges]

    def take(self, layout: Layout) -> None:
        """Judge a given layout that fits, with its own recomputed layers, and update the best of all."""
        judged, took = self.try_cuts(layout.edges), self.problem.step_seconds(layout)
        if judged.short_bytes > 0 or took < judged.seconds:
            taken = self.seen[layout.edges] = _Best(0.0, took, layout.edges, self.problem.counts(layout)[1])
            if taken.beats(self.best):
                self.best = taken

    def _judge(self, edges: Edges) -> _Best:
        problem, ranks, listed = self.problem, self.problem.ranks, self.options.listed
        held = problem.slices(edges)
        stages_of = problem.placement.stages_of
        choices = [self.options.of(rank, held[mine]) for rank, mine in enumerate(stages_of)]
        self.spent += A_LOOK * ranks + A_CALL * (self.options.listed - listed)
        short = sum(self._short_bytes(rank, held[mine]) for rank, mine in enumerate(stages_of) if not choices[rank])
        recomputed = np.zeros_like(self.best.recomputed)
        if short > 0:
            return _Best(short, np.inf, edges, recomputed)
        for rank in range(ranks):
            recomputed[stages_of[rank]] = choices[rank][0]
        seconds = self._play(held, recomputed, edges)
        for rank in range(ranks):
            for other in choices[rank][1:]:
                changed = recomputed.copy()
                changed[stages_of[rank]] = other
                if (took := self._play(held, changed, edges)) < seconds:
                    seconds, recomputed = took, changed
        return _Best(0.0, seconds, edges, recomputed)

    def _play(self, held: Ints, recomputed: Ints, edges: Edges) -> float:
        self.spent += self.a_play
        return self.problem.step_seconds_of_counts(held, recomputed, edges)

    def _short_bytes(self, rank: int, held: Ints) -> float:
        """Return the bytes that a rank lacks with all its layers recomputed, at least 1."""
        everything = held[:, self.problem.columns.of_option] * self.problem.columns.whole
        return max(1.0, self.problem.rank_bytes(rank, held, everything) - self.problem.memory_bytes)

    def walk(self, start: Edges, until: float) -> None:
        """Move cuts from `start` on, keeping what improves, until a round brings nothing or `until` seconds of work are
        spent. While nothing fits it may take longer. Results are in `best` and `seen`."""
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
        """Walk from the other starts, then from the best with cuts moved at random, until work or `PATIENCE` ends."""
        for start in starts:
            self.walk(start, self.deadline)
        random, without_gain = np.random.default_rng(0), 0
        while self.spent < self.deadline and self.stages > 1:
            if without_gain == PATIENCE and self.best.short_bytes <= 0:
                return
            self.spent += A_LOOK
            before, edges = self.best, self.best.edges
            for _ in range(int(random.integers(1, KICKED_RUNS + 1))):
                first = int(random.integers(1, self.stages))
                end = int(random.integers(first + 1, self.stages + 1))
                edges = self._moved(edges, first, end, int(random.choice([-2, -1, 1, 2]))) or edges
            self.walk(edges, self.deadline)
            without_gain = min(without_gain + 1, PATIENCE) if self.best is before else 0

    def _moves(self) -> Iterator[tuple[int, int, int]]:
        """Yield how cuts can move: (first cut, one past the last, shift in layers); single cuts come first."""
        for length, shift in product(range(1, self.stages), (1, -1, 2, -2)):
            for first in range(1, self.stages - length + 1):
                yield first, first + length, shift

    def _moved(self, edges: Edges, first: int, end: int, shift: int) -> Edges | None:
        moved = tuple(e + shift for e in edges[first:end])
        if edges[first - 1] < moved[0] and moved[-1] < edges[end]:
            return (*edges[:first], *moved, *edges[end:])
        return None

    def _worth_playing(self, edges: Edges, here: _Best) -> bool:
        """Return whether these cuts could beat `here`: False if one rank's work alone takes as long as that step."""
        if here.short_bytes > 0:
            return True
        done = self.work[list(edges)]
        by_rank = self.problem.placement.by_rank(done[1:] - done[:-1])
        return self.problem.over_cases(by_rank.max(axis=0)) < here.seconds
