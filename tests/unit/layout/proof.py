"""Is a layout the fastest? Proven for pipelines without virtual chunks, far beyond what brute force could list.

Depth-first over the cuts from the first stage on, with every recompute choice worth looking at. A branch is left when a
lower bound on all layouts that share its part reaches the time to beat. The bounds leave waits out and nothing else, so
they hold for any schedule list and any packs:

* `slice_bounds`: one stage alone. Its rank waits for the first microbatch to come through the layers before it, then
  does all its work, and the last gradient goes back through the layers before it; and it can start its first backward
  only after that microbatch has been through the whole chain.
* `prefix_bound`: the first stages played, the layers after them a delay of each microbatch, without any queue.
"""

import numpy as np
from numba import njit

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.layout.joint import RankOptions
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.tables import prefix_sums
from omnibal_ext.schedules.actions import BACKWARD, FORWARD, Action
from omnibal_ext.schedules.clock import Rows


class Bounds:
    """Prefix sums over the chain, [cases, layers + 1] unless said, and the bounds made of them."""

    def __init__(self, problem: LayoutProblem) -> None:
        self.problem = problem
        t, per_layer = problem.tables, problem.per_layer
        self.forward = prefix_sums(per_layer(t.forward))
        """[layers + 1, cases, microbatches]"""
        self.backward = prefix_sums(per_layer(t.backward))
        self.weight = prefix_sums(per_layer(t.weight) * problem.program.split_backward)
        self.step = prefix_sums(per_layer(t.step))
        self.least_transfer = problem.transfers.min(axis=0)

    def slice_bounds(self) -> Floats:
        """float64 [stages, layers + 1, layers + 1]: bound with layers i .. j - 1 on stage s; inf: no fit."""
        return np.stack([self._of_stage(s) for s in range(self.problem.stages)])

    def _of_stage(self, s: int) -> Floats:
        actions = self.problem.schedule[self.problem.placement.ranks_of[s]]
        first_b = next(i for i, a in enumerate(actions) if a.kind == "B")
        last_b = max(i for i, a in enumerate(actions) if a.kind == "B")
        m_in, m_turn, m_out = actions[0].microbatch, actions[first_b].microbatch, actions[last_b].microbatch
        input_gradient = self.backward - self.weight
        hops = s * self.least_transfer
        come = self.forward[..., m_in] + hops[:, m_in]
        go = input_gradient[..., m_out] + hops[:, m_out]
        hops_turn = (self.problem.stages - 1) * self.least_transfer[:, m_turn]
        whole_way = (
            self.forward[-1, :, m_turn] + hops_turn + (self.problem.stages - 1 - s) * self.least_transfer[:, m_turn]
        )
        turn = whole_way + input_gradient[-1, :, m_turn] - input_gradient[..., m_turn]
        all_work, to_last = self._work(actions), self._work(actions[: last_b + 1])
        from_turn, own = self._work(actions[first_b : last_b + 1]), self.step
        recomputed = self._least_recomputed(s)

        iterations, ranks = self.problem.cases
        return _slices(np.stack([come, go, turn, all_work, to_last, from_turn]), own, recomputed, iterations, ranks)

    def _work(self, actions: list[Action]) -> Floats:
        """[layers + 1, cases]: prefix sums of what these actions of one rank take, layer by layer."""
        microbatches = self.problem.microbatches
        chosen = {kind: np.zeros(microbatches) for kind in "FBW"}
        for action in actions:
            chosen[action.kind][action.microbatch] = 1.0
        return np.asarray(
            self.forward @ chosen["F"] + (self.backward - self.weight) @ chosen["B"] + self.weight @ chosen["W"]
        )

    def _least_recomputed(self, s: int) -> Floats:
        """[layers + 1, layers + 1, cases]: least seconds of recomputing that free the bytes missing, as if layers could
        be split (the best bytes a second first); inf where even everything is too little."""
        problem, t = self.problem, self.problem.tables
        moments, *_ = problem.moments[problem.placement.ranks_of[s]]
        early, later = max(moments[:, :, 0].tolist(), key=sum)  # one moment of those that must fit
        kept, saved = early * t.kept + later * t.late, early * t.saved + later * t.saved_late
        counts = problem.kind_counts[None] - problem.kind_counts[:, None]
        missing = problem.profile.overhead_bytes + counts @ (t.fixed + kept) - problem.memory_bytes
        seconds = t.recompute.sum(axis=2)
        out = np.zeros((*missing.shape, seconds.shape[1]))
        if not np.isfinite(problem.memory_bytes):
            return out
        for case in range(seconds.shape[1]):
            left = np.maximum(missing, 0.0)
            for price, freed, kind in _steps(saved, seconds[:, case], problem.columns.of_option):
                take = np.minimum(left, counts[..., kind] * freed)
                out[..., case] += take * price
                left = left - take
            out[left > 1e-9 * problem.memory_bytes, case] = np.inf
        return out

    def prefix_bound(self, edges: list[int], held: Ints, recomputed: Ints) -> float:
        """Bound of all layouts that begin with the stages of `edges` (0, ..., e); counts int64 [stages, ...]."""
        problem, t, e = self.problem, self.problem.tables, edges[-1]
        weight = np.tensordot(held, t.weight, 1) * problem.program.split_backward
        backward = np.tensordot(held, t.backward, 1) + np.tensordot(recomputed, t.recompute, 1) - weight
        seconds = np.stack([np.tensordot(held, t.forward, 1), backward, weight])
        hops = 2 * (problem.stages - len(edges) + 1) * self.least_transfer
        there_and_back = (self.forward[-1] - self.forward[e]) + (self.backward - self.weight)[-1]
        there_and_back = there_and_back - (self.backward - self.weight)[e] + hops
        transfers = problem.transfers[np.array(edges[1:]) - 1]
        ends = _prefix_ends(problem.program.rows, seconds, transfers, there_and_back)
        step = problem.placement.by_rank(np.pad(held @ t.step, (0, problem.stages - len(held))))
        return problem.over_cases((ends + step).max(axis=1))


def faster_layout(problem: LayoutProblem, seconds: float, looks: int = 100_000) -> Layout | None:
    """A layout without chunks that fits and takes less than `seconds`; None: it is proven that there is none.

    Raises RuntimeError after so many `looks` at a stage.
    """
    return _Search(problem, seconds, looks).descend([0], [])


class _Search:
    def __init__(self, problem: LayoutProblem, seconds: float, looks: int) -> None:
        assert problem.chunks == 1
        self.problem, self.seconds, self.looks = problem, seconds, looks
        self.bounds, self.options = Bounds(problem), RankOptions(problem)
        self.allowed = self.bounds.slice_bounds()
        """[stages, layers + 1, layers + 1]"""
        self.least = np.full((problem.stages + 1, len(problem.profile.chain) + 1), np.inf)
        """[stages + 1, layers + 1] The least worst bound of stages s .. end holding the layers from i on."""
        self.least[-1, -1] = 0.0
        for s in range(problem.stages - 1, -1, -1):
            self.least[s] = np.maximum(self.allowed[s], self.least[s + 1][None, :]).min(axis=1)

    def descend(self, edges: list[int], recomputed: list[Ints]) -> Layout | None:
        """A faster layout that begins with these stages."""
        stage, first = len(edges) - 1, edges[-1]
        if stage == self.problem.stages:
            layout = self.problem.layout(edges, np.stack(recomputed))
            return layout if self.problem.step_seconds(layout) < self.seconds else None
        bounds = np.maximum(self.allowed[stage, first], self.least[stage + 1])
        for end in np.argsort(bounds, kind="stable").tolist():
            if bounds[end] >= self.seconds:
                break
            path = [*edges, end]
            held = self.problem.slices(path)
            for choice in self.options.of(stage, held[-1:]):
                self.looks -= 1
                if self.looks < 0:
                    raise RuntimeError("too many layouts for the bounds")
                counts = [*recomputed, choice[0]]
                if self.bounds.prefix_bound(path, held, np.stack(counts)) < self.seconds:
                    found = self.descend(path, counts)
                    if found is not None:
                        return found
        return None


def _steps(saved: Floats, seconds: Floats, kinds: Ints) -> list[tuple[float, float, int]]:
    """(seconds a byte, bytes, kind) of recomputing a layer, and of recomputing more of it, the best price first.

    Of a kind's ways only those are there that a mixture of others does not beat, each against the one before: prices
    of a kind rise from step to step.
    """
    steps = []
    for kind in dict.fromkeys(kinds.tolist()):
        ways, done, spent = [w for w in np.flatnonzero(kind == kinds) if saved[w] > 0], 0.0, 0.0
        while ways:
            price, best = min(((seconds[w] - spent) / (saved[w] - done), w) for w in ways)
            steps.append((float(price), float(saved[best] - done), kind))
            done, spent = saved[best], seconds[best]
            ways = [w for w in ways if saved[w] > done]
    return sorted(steps)


@njit(cache=True)
def _prefix_ends(
    rows: Rows, seconds: Floats, transfers: Floats, there_and_back: Floats
) -> Floats:  # pragma: no cover - compiled
    """float64 [cases, ranks]: last ends when only the first stages work; seconds [3, stages, cases, microbatches]."""
    stages, cases = seconds.shape[1], seconds.shape[2]
    steps, clock = rows.steps, np.zeros((cases, rows.ranks))
    end = np.empty(steps.shape[1])
    turned = np.empty(seconds.shape[3])
    for case in range(cases):
        for i in range(steps.shape[1]):
            rank, stage, kind, microbatch = steps[0, i], steps[1, i], steps[2, i], steps[3, i]
            if stage >= stages:
                continue
            begin = clock[case, rank]
            if kind == BACKWARD and stage == stages - 1:
                begin = max(begin, turned[microbatch] + there_and_back[case, microbatch])
            else:
                for wait in range(rows.first[i], rows.first[i + 1]):
                    begin = max(begin, end[rows.waits[0, wait]] + transfers[rows.waits[1, wait], case, microbatch])
            end[i] = begin + seconds[kind, stage, case, microbatch]
            clock[case, rank] = end[i]
            if kind == FORWARD and stage == stages - 1:
                turned[microbatch] = end[i]
    return clock


@njit(cache=True)
def _slices(
    sums: Floats, own: Floats, recomputed: Floats, iterations: int, ranks: int
) -> Floats:  # pragma: no cover - compiled
    """The bound of every slice of a stage; sums [6, layers + 1, cases]: come, go, turn, three prefix sums of work."""
    come, go, turn, all_work, to_last, from_turn = sums[0], sums[1], sums[2], sums[3], sums[4], sums[5]
    out = np.full((own.size, own.size), np.inf)
    for i in range(own.size):
        for j in range(i + 1, own.size):
            total = 0.0
            for iteration in range(iterations):
                worst = 0.0
                for case in range(iteration * ranks, (iteration + 1) * ranks):
                    alone = come[i, case] + all_work[j, case] - all_work[i, case] + own[j] - own[i]
                    through = come[i, case] + to_last[j, case] - to_last[i, case] + go[i, case]
                    turned = turn[j, case] + from_turn[j, case] - from_turn[i, case] + go[i, case]
                    worst = max(worst, max(alone, through, turned) + recomputed[i, j, case])
                total += worst
            out[i, j] = total / iterations
    return out
