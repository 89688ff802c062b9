"""What a layout is judged by: simulated step time on the packs, and bytes on every rank at the budgets.

A layout cuts the chain at `edges` and recomputes some layers of each stage:

    edges      0        4          7       9           stage s holds layers edges[s] .. edges[s + 1] - 1
    recompute  (1, 2)   ()         (7,)                 layer ids
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numba import njit
from numpy.typing import NDArray

from omnibal_ext.chain import KINDS
from omnibal_ext.errors import UserError
from omnibal_ext.profile_data import PackSizes, Profile
from omnibal_ext.schedule import Schedule, build_schedule
from omnibal_ext.simulate import BACKWARD, FORWARD, WEIGHT, Program, Simulation, StageCosts, compile_schedule, simulate

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_VIT, _LLM = KINDS.index("vit"), KINDS.index("llm")


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the chain is cut, and which layer ids of each stage are recomputed."""

    edges: tuple[int, ...]
    recompute: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class KindTables:
    """Costs by kind (in the order of `KINDS`): seconds float64 [kinds, cases, microbatches], bytes float64 [kinds]."""

    forward: Floats
    backward: Floats
    recompute: Floats
    weight: Floats
    transfer: Floats
    load: Floats
    """Units over the budget, [kinds, cases, microbatches]."""
    kept: Floats
    recompute_kept: Floats
    fixed: Floats
    step: Floats


@dataclass(frozen=True)
class LayoutProblem:
    """A profile, a pipeline and the packs to run on it. A layout's figures are methods, so that all planners agree."""

    profile: Profile
    ranks: int
    microbatches: int
    chunks: int = 1
    schedule_name: str = "1f1b"
    memory_bytes: float = float("inf")
    """Of one rank, for weights and activations."""
    packs: PackSizes | None = None
    """[iterations, data-parallel ranks, microbatches]; None: every microbatch fills both budgets."""

    def __post_init__(self) -> None:
        layers = len(self.profile.chain)
        if self.stages > layers:
            raise UserError(
                f"{self.ranks} pipeline ranks x {self.chunks} chunks are {self.stages} stages, but the chain has only "
                f"{layers} layers; lower --pipeline-model-parallel-size"
            )
        if not self.memory_bytes > 0:
            raise UserError(f"memory of a rank must be above 0 bytes, got {self.memory_bytes}")
        if self.packs is not None and self.packs.tiles.shape[-1] != self.microbatches:
            raise UserError(
                f"packs of {self.packs.tiles.shape[-1]} microbatches given for a plan of {self.microbatches}"
            )

    @property
    def stages(self) -> int:
        """Global stages: ranks x chunks."""
        return self.ranks * self.chunks

    @cached_property
    def schedule(self) -> Schedule:
        """The lists of actions."""
        return build_schedule(self.schedule_name, self.ranks, self.microbatches, self.chunks)

    @cached_property
    def program(self) -> Program:
        """The schedule laid flat for the simulator."""
        return compile_schedule(self.schedule, self.microbatches, self.chunks)

    @cached_property
    def kind_ids(self) -> Ints:
        """int64 [layers]: each layer's kind as an index of `KINDS`."""
        return np.array([KINDS.index(kind) for kind in self.profile.chain], dtype=np.int64)

    @cached_property
    def cases(self) -> tuple[int, int]:
        """(iterations, data-parallel ranks) of the packs."""
        return (1, 1) if self.packs is None else (self.packs.tiles.shape[0], self.packs.tiles.shape[1])

    @cached_property
    def tables(self) -> KindTables:
        """Costs of every kind on every microbatch."""
        rows = [self._kind_row(kind) for kind in KINDS]
        return KindTables(*(np.ascontiguousarray(np.stack(column)) for column in zip(*rows, strict=True)))

    def _kind_row(self, kind: str) -> tuple[Floats, ...]:
        shape = (self.cases[0] * self.cases[1], self.microbatches)
        if kind not in self.profile.layers:
            return (*[np.zeros(shape)] * 6, *[np.zeros(())] * 4)
        cost = self.profile.layers[kind]
        if self.packs is None:
            load = np.ones(shape)
            forward, backward = load * cost.forward_seconds, load * cost.backward_seconds
        else:
            load = self.profile.load_factor(kind, self.packs).reshape(shape)
            forward = self.profile.forward_seconds(kind, self.packs).reshape(shape)
            backward = self.profile.backward_seconds(kind, self.packs).reshape(shape)
        share = 0.5 if cost.weight_gradient_seconds is None else cost.weight_gradient_seconds / cost.backward_seconds
        transfer = self.profile.transfer_latency_seconds + (
            self.profile.transfer_seconds_per_byte * cost.output_bytes * load
        )
        recompute = forward * (cost.extra_seconds / cost.forward_seconds)
        bytes_ = [cost.kept_bytes, cost.recompute_kept_bytes, cost.weight_bytes, cost.step_seconds]
        weight = backward * (0.0 if cost.frozen else share)
        return forward, backward, recompute, weight, transfer, load, *map(np.asarray, bytes_)

    @cached_property
    def held(self) -> list[Ints]:
        """Per rank: int64 [vectors, chunks], the greatest numbers of microbatches held at once, chunk by chunk."""
        release = "W" if self.program.split_backward else "B"
        found = []
        for actions in self.schedule:
            now, seen = [0] * self.chunks, {(0,) * self.chunks}
            for action in actions:
                now[action.chunk] += (action.kind == "F") - (action.kind == release)
                seen.add(tuple(now))
            found.append(_maximal(np.array(sorted(seen), dtype=np.int64)))
        return found

    def counts(self, layout: Layout) -> tuple[Ints, Ints]:
        """int64 [stages, kinds]: layers of each kind a stage holds, and recomputes."""
        held = np.zeros((self.stages, len(KINDS)), dtype=np.int64)
        again = np.zeros_like(held)
        for s, (first, end) in enumerate(pairwise(layout.edges)):
            np.add.at(held[s], self.kind_ids[first:end], 1)
            np.add.at(again[s], self.kind_ids[list(layout.recompute[s])], 1)
        return held, again

    def rank_bytes(self, rank: int, held: Ints, again: Ints) -> float:
        """Peak bytes of a rank; counts are int64 [chunks, kinds] of its stages.

        Weights + the worst moment's microbatches x kept bytes + the layer being recomputed (its layers first in the
        stage, so that those after it are done with by then; zero-bubble lists keep them for W).
        """
        tables = self.tables
        kept = (held - again) @ tables.kept + again @ tables.recompute_kept
        saved = np.maximum(tables.kept - tables.recompute_kept, 0.0)
        extra = 0.0
        for chunk in range(held.shape[0]):
            extra = max(extra, self._transient(held[chunk], again[chunk], saved))
        return float(
            self.profile.overhead_bytes + held.sum(axis=0) @ tables.fixed + (self.held[rank] @ kept).max() + extra
        )

    def _transient(self, held: Ints, again: Ints, saved: Floats) -> float:
        """Bytes above the held ones when the stage's last recomputed layer of either kind is run again."""
        if self.program.split_backward:
            return float(max(saved[_VIT] * (again[_VIT] > 0), saved[_LLM] * (again[_LLM] > 0)))
        kept = self.tables.kept
        after_llm = (held[_LLM] - again[_LLM]) * kept[_LLM] + held[KINDS.index("head")] * kept[KINDS.index("head")]
        between = sum(held[k] * kept[k] for k in (KINDS.index("projector"), KINDS.index("word_embed")))
        llm_all = after_llm + again[_LLM] * self.tables.recompute_kept[_LLM]
        after_vit = (held[_VIT] - again[_VIT]) * kept[_VIT] + between + llm_all
        vit = saved[_VIT] - after_vit if again[_VIT] else 0.0
        llm = saved[_LLM] - after_llm if again[_LLM] else 0.0
        return float(max(0.0, vit, llm))

    def stage_peak_bytes(self, layout: Layout) -> list[float]:
        """Peak bytes of every pipeline rank, at the budgets."""
        held, again = self.counts(layout)
        return [self.rank_bytes(r, held[r :: self.ranks], again[r :: self.ranks]) for r in range(self.ranks)]

    def recompute_ids(self, edges: Sequence[int], again: Ints) -> tuple[tuple[int, ...], ...]:
        """The layer ids behind recompute counts int64 [stages, kinds]: the first layers of a kind in the stage."""
        ids = []
        for s, (first, end) in enumerate(pairwise(edges)):
            of_kind = {k: [i for i in range(first, end) if self.kind_ids[i] == k] for k in (_VIT, _LLM)}
            ids.append(tuple(of_kind[_VIT][: again[s, _VIT]] + of_kind[_LLM][: again[s, _LLM]]))
        return tuple(ids)

    def step_seconds(self, layout: Layout) -> float:
        """Simulated step time: mean over iterations of the slowest data-parallel rank."""
        held, again = self.counts(layout)
        return self.step_seconds_of_counts(held, again, self.kind_ids[np.array(layout.edges[1:]) - 1])

    def step_seconds_of_counts(self, held: Ints, again: Ints, last_kind: Ints) -> float:
        """`step_seconds` from int64 [stages, kinds] counts and the kind of each stage's last layer."""
        t, program = self.tables, self.program
        ends = _case_ends(
            program.steps, program.ranks, program.split_backward, (held, again, last_kind),
            (t.forward, t.backward, t.recompute, t.weight, t.transfer),
        )  # fmt: skip
        step = (held @ t.step).reshape(-1, self.ranks).sum(axis=0)
        return float((ends + step).max(axis=1).reshape(self.cases).max(axis=1).mean())

    def stage_costs(self, layout: Layout, case: int = 0) -> StageCosts:
        """What the simulator needs, for one case (iteration x data-parallel rank)."""
        held, again = self.counts(layout)
        t = self.tables
        at = [table[:, case] for table in (t.forward, t.backward, t.recompute, t.weight, t.transfer, t.load)]
        forward, backward, recompute, weight, transfer, load = at
        last_kind = self.kind_ids[np.array(layout.edges[1:]) - 1]
        kept = ((held - again) * t.kept + again * t.recompute_kept) @ load
        saved = np.maximum(t.kept - t.recompute_kept, 0.0)
        transient = np.array([self._transient(h, a, saved) for h, a in zip(held, again, strict=True)])
        return StageCosts(
            forward=held @ forward,
            backward=held @ backward + again @ recompute,
            weight=held @ weight,
            transfer=transfer[last_kind] * (self.ranks > 1),
            kept=kept,
            transient=np.broadcast_to(transient[:, None], kept.shape).copy(),
            fixed_bytes=held @ t.fixed + self.profile.overhead_bytes * (np.arange(self.stages) < self.ranks),
            step=held @ t.step,
        )

    def simulate(self, layout: Layout, case: int = 0) -> Simulation:
        """Play one case with timeline and bytes."""
        return simulate(self.program, self.stage_costs(layout, case))

    def ideal_seconds(self) -> float:
        """All needed work spread evenly over the ranks: no bubble, no recomputation, no transfer."""
        t = self.tables
        work = np.bincount(self.kind_ids, minlength=len(KINDS)) @ (t.forward + t.backward).sum(axis=2)
        return float(work.reshape(self.cases).mean() / self.ranks)


def _maximal(vectors: Ints) -> Ints:
    """The rows that no other row reaches in every column."""
    keep = [not ((vectors >= v).all(axis=1) & (vectors > v).any(axis=1)).any() for v in vectors]
    return vectors[keep]


@njit(cache=True)
def _case_ends(  # pragma: no cover - compiled
    steps: Ints, ranks: int, split: bool, layout: tuple[Ints, Ints, Ints], tables: tuple[Floats, ...]
) -> Floats:
    """float64 [cases, ranks]: last end of every rank, with stage costs summed up from the tables on the way."""
    held, again, last_kind = layout
    forward, backward, recompute, weight, transfer = tables
    kinds, cases, microbatches = forward.shape
    stages = held.shape[0]
    clock = np.zeros((cases, ranks))
    seconds = np.empty((3, stages, microbatches))
    end = np.empty(steps.shape[1])
    for case in range(cases):
        seconds[:] = 0.0
        for s in range(stages):
            for k in range(kinds):
                if held[s, k] == 0:
                    continue
                for m in range(microbatches):
                    seconds[FORWARD, s, m] += held[s, k] * forward[k, case, m]
                    seconds[BACKWARD, s, m] += held[s, k] * backward[k, case, m] + again[s, k] * recompute[k, case, m]
                    seconds[WEIGHT, s, m] += held[s, k] * weight[k, case, m]
        if split:
            seconds[BACKWARD] -= seconds[WEIGHT]
        for i in range(steps.shape[1]):
            rank, stage, kind, microbatch = steps[0, i], steps[1, i], steps[2, i], steps[3, i]
            begin = clock[case, rank]
            if steps[4, i] >= 0:
                link = stage - 1 if kind == FORWARD else stage
                carry = transfer[last_kind[link], case, microbatch] if ranks > 1 else 0.0
                begin = max(begin, end[steps[4, i]] + carry)
            end[i] = begin + seconds[kind, stage, microbatch]
            clock[case, rank] = end[i]
    return clock
