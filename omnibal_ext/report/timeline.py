"""When each rank does what in one iteration, as data: predicted by the simulator, or recorded by a run.

lane (data-parallel 0, rank 0)   F0: vit | projector   F1 ...      B0: projector | vit ...     step
lane (data-parallel 0, rank 1)            F0: llm   B0: llm ...                            step
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from omnibal_ext.chain import KIND_OF, KINDS, TIMED_PART_OF
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.costs.tower import TowerCosts, language_profile
from omnibal_ext.layout.beside import TowerBeside
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.tables import APART, COLUMNS, KIND_OF_WAY, KindTables, kind_tables
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.actions import VISION, Action, Beside, givers
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.units import GIB

Phase = Literal["forward", "backward", "recompute", "weight"]
OTHER = "other"
EXCHANGE = "exchange"
"""What ranks that run a pack together send each other."""
PHASES: dict[str, Phase] = {"F": "forward", "B": "backward", "W": "weight", "E": "forward", "V": "backward"}


@dataclass(frozen=True, slots=True)
class Piece:
    """Time in one part of the model ("vit", "projector", "llm", "head"), between ranks of a team ("exchange"), or in
    none of these ("other")."""

    part: str
    phase: Phase
    seconds: float


@dataclass(frozen=True, slots=True)
class Span:
    """One action: where it runs in the chain, from when to when, and what it is made of."""

    action: Action
    stage: int
    """Of E and V the rank's first: they are of none."""
    start: float
    end: float
    pieces: tuple[Piece, ...]
    width: int = 1
    """Data-parallel ranks that run the pack together."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One pipeline rank of one data-parallel rank."""

    data_parallel_rank: int
    rank: int
    spans: tuple[Span, ...]
    end: float
    """When the rank is through with the iteration, gradients reduced and weights updated."""
    held: tuple[tuple[float, float], ...] = ()
    """(seconds, bytes held from then on)."""
    reads: tuple[tuple[float, float], ...] = ()
    """(start, end) of every time in which it waits for a pack; none where it is not recorded."""
    meets: float | None = None
    """When the last of all ranks is through, which this one waits for; None: it begins its update alone."""

    @property
    def worked(self) -> float:
        """Seconds in actions."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def last(self) -> float:
        """When its last action ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def updates(self) -> float:
        """When its gradients are reduced, or its weights updated, without waiting for others."""
        return self.last if self.meets is None else self.meets


@dataclass(frozen=True)
class Timeline:
    """One iteration on all ranks, in seconds from its start."""

    name: str
    lanes: tuple[Lane, ...]
    placement: Placement
    beside: Beside | None = None
    """The tower beside the pipeline, if there is one."""

    @property
    def seconds(self) -> float:
        """Length of the iteration."""
        return max(lane.end for lane in self.lanes)

    def transfers(self) -> list[tuple[Span, Lane, Span, Lane]]:
        """What crosses between ranks: the action that makes a tensor and the one that takes it, with their lanes."""
        where = {(lane.data_parallel_rank, lane.rank, s.action): (s, lane) for lane in self.lanes for s in lane.spans}
        found = []
        for (replica, rank, action), (span, lane) in where.items():
            for other, needed in givers(action, rank, self.placement, self.beside):
                if other != rank and (replica, other, needed) in where:
                    found.append((*where[replica, other, needed], span, lane))
        return found

    def totals(self) -> dict[tuple[str, str], float]:
        """Seconds of all lanes by (part, phase)."""
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for lane in self.lanes:
            for span in lane.spans:
                for piece in span.pieces:
                    found[piece.part, piece.phase] += piece.seconds
        return found


def layout_of(plan: Plan) -> Layout:
    """The plan's cuts and recomputed layers, numbered behind a tower beside the pipeline."""
    links = plan.tower.links if plan.tower else 0
    edges = (links, *(stage.layers[1] for stage in plan.stages))
    cheap = tuple(stage.recompute_cheap for stage in plan.stages)
    layout = Layout(edges, tuple(stage.recompute for stage in plan.stages), cheap if any(cheap) else ())
    return layout.moved(-links)


def problem_of(plan: Plan, profile: Profile, packs: PackSizes | None) -> LayoutProblem:
    """What the plan is judged by, on packs int64 [iterations, data-parallel ranks, microbatches]."""
    memory = float("inf") if plan.memory_gib is None else plan.memory_gib * GIB
    beside = None
    if plan.tower:
        beside = TowerBeside(plan.tower, TowerCosts.of(profile), profile, plan.pipeline_model_parallel_size, packs)
    return LayoutProblem(
        language_profile(profile) if beside else profile,
        plan.pipeline_model_parallel_size,
        plan.num_microbatches,
        plan.virtual_pipeline_model_parallel_size,
        plan.schedule,
        memory,
        packs,
        plan.build_schedule() if plan.lists else None,
        beside,
    )


def predicted(problem: LayoutProblem, layout: Layout, iteration: int = 0, name: str = "predicted") -> Timeline:
    """One iteration of the problem's packs, all data-parallel ranks, as the simulator plays it."""
    replicas = problem.cases[1]
    lanes = [lane for d in range(replicas) for lane in _lanes(problem, layout, iteration * replicas + d, d)]
    return Timeline(name, tuple(lanes), problem.placement, problem.beside.tower.beside if problem.beside else None)


def _lanes(problem: LayoutProblem, layout: Layout, case: int, replica: int) -> Iterable[Lane]:
    play = problem.simulate(layout, case)
    step = problem.placement.by_rank(problem.stage_costs(layout, case).step)
    step = step + problem.beside.step if problem.beside else step
    pieces, widths = _Pieces(problem, layout, case), _widths(problem, case)
    for rank in range(problem.ranks):
        spans = []
        for action, start, end in play.timeline(rank):
            stage = problem.placement.stages_of[rank][0 if action.kind in VISION else action.chunk]
            spans.append(Span(action, stage, start, end, pieces.of(action, stage), widths[action.microbatch]))
        end = spans[-1].end + float(step[rank])
        yield Lane(replica, rank, tuple(spans), end, tuple(play.memory_timeline(rank)))


def _widths(problem: LayoutProblem, case: int) -> list[int]:
    """Of every microbatch."""
    if problem.packs is None or problem.packs.widths is None:
        return [1] * problem.microbatches
    widths: list[int] = problem.packs.widths.reshape(-1, problem.microbatches)[case].tolist()
    return widths


class _Pieces:
    """What actions are made of, from the costs of the layers that a stage holds."""

    def __init__(self, problem: LayoutProblem, layout: Layout, case: int) -> None:
        self.tables, self.case = problem.tables, case
        self.held, self.again = problem.counts(layout)
        self.split, self.action_seconds = problem.program.split_backward, problem.profile.action_seconds
        self.beside = problem.beside
        self.alone: KindTables | None = None
        """Without what ranks of a team exchange."""
        if problem.packs is not None and problem.packs.exchanged is not None:
            packs = replace(problem.packs, exchanged=None)
            self.alone = kind_tables(problem.profile, packs, problem.microbatches, self.split)

    def of(self, action: Action, stage: int) -> tuple[Piece, ...]:
        """In the order they run; they last as long as the simulator's action."""
        if self.beside and action.kind in VISION:
            found = [Piece(*piece) for piece in self.beside.pieces(action.kind, self.case, action.microbatch)]
            return tuple(piece for piece in found if piece.seconds > 0)
        found = self._of_links(self.tables, action, stage)
        if self.alone is not None:
            found = _apart(found, self._of_links(self.alone, action, stage))
        return (Piece(OTHER, PHASES[action.kind], self.action_seconds),) * (self.action_seconds > 0) + tuple(found)

    def _of_links(self, t: KindTables, action: Action, stage: int) -> list[Piece]:
        if action.kind == "F":
            return self._by_part(t.forward, self.held[stage], action, "forward", KINDS)
        if action.kind == "W":
            return self._by_part(t.weight, self.held[stage], action, "weight", KINDS[::-1])
        seconds = t.backward - t.weight if self.split else t.backward
        by_kind = np.zeros((COLUMNS, *t.recompute.shape[1:]))
        np.add.at(by_kind, KIND_OF_WAY, t.recompute * self.again[stage][:, None, None])
        again = self._by_part(by_kind, np.ones(COLUMNS), action, "recompute", KINDS[::-1])
        back = self._by_part(seconds, self.held[stage], action, "backward", KINDS[::-1])
        parts = dict.fromkeys(piece.part for piece in (*back, *again))
        return [piece for part in parts for piece in (*again, *back) if piece.part == part]

    def _by_part(self, table: Any, counts: Any, action: Action, phase: Phase, kinds: Sequence[str]) -> list[Piece]:
        seconds = table[:, self.case, action.microbatch] * counts
        totals = dict.fromkeys(dict.fromkeys(TIMED_PART_OF[kind] for kind in kinds), 0.0)
        for kind in kinds:
            totals[TIMED_PART_OF[kind]] += float(seconds[KINDS.index(kind)])
        for other, column in APART.items():
            totals[TIMED_PART_OF[KIND_OF[other]]] += float(seconds[column])
        return [Piece(part, phase, total) for part, total in totals.items() if total > 0]


def _apart(pieces: Sequence[Piece], alone: Sequence[Piece]) -> list[Piece]:
    """Pieces of a pack that several ranks run, and the same without what they exchange: that is behind each phase."""
    own = {(piece.part, piece.phase): piece.seconds for piece in alone}
    exchanged: dict[Phase, float] = {}
    found = []
    for piece in pieces:
        seconds = own.get((piece.part, piece.phase), 0.0)
        found.append(replace(piece, seconds=seconds))
        exchanged[piece.phase] = exchanged.get(piece.phase, 0.0) + piece.seconds - seconds
    found += [Piece(EXCHANGE, phase, seconds) for phase, seconds in exchanged.items()]
    return [piece for piece in found if piece.seconds > 0]


def recorded(record: Mapping[str, Any], placement: Placement, beside: Beside | None = None) -> Timeline:
    """The timeline in a line of timeline.jsonl, see `megatron.vlm.monitoring.recorder`.

    Ranks that all end behind the last action of all have met there: in the gradients' norm, or their reduction.
    """
    lanes = []
    for lane in record["lanes"]:
        spans = tuple(
            Span(
                Action(kind, microbatch, chunk),
                placement.stages_of[lane["rank"]][0 if kind in VISION else chunk],
                start,
                end,
                tuple(Piece(part, phase, seconds) for part, phase, seconds in pieces),
                _width(lane["packs"], microbatch),
            )
            for kind, microbatch, chunk, start, end, pieces in lane["actions"]
        )
        held = tuple((seconds, held) for seconds, held in lane["held"])
        reads = tuple((start, end) for start, end in lane.get("reads", ()))
        lanes.append(Lane(lane["data_parallel_rank"], lane["rank"], spans, lane["end"], held, reads))
    last = max(lane.last for lane in lanes)
    if all(lane.end >= last for lane in lanes):
        lanes = [replace(lane, meets=last) for lane in lanes]
    return Timeline(f"measured, iteration {record['iteration']}", tuple(lanes), placement, beside)


def _width(packs: Sequence[Sequence[int]], microbatch: int) -> int:
    """Of a recorded pack; lines of older runs say tiles, tokens and squares alone."""
    return packs[microbatch][-1] if packs and len(packs[microbatch]) > 3 else 1


def packs_of_record(record: Mapping[str, Any]) -> PackSizes:
    """The packs that a recorded iteration ran: int64 [1, data-parallel ranks, microbatches]."""
    by_replica = {lane["data_parallel_rank"]: lane["packs"] for lane in record["lanes"]}
    sizes = np.array([by_replica[replica] for replica in sorted(by_replica)], dtype=np.int64)[None]
    return PackSizes(*(np.ascontiguousarray(sizes[..., column]) for column in range(sizes.shape[-1])))


def waits(lane: Lane) -> list[tuple[float, float]]:
    """(start, end) of every time in which a lane waits between the iteration's start and its update."""
    edges = [0.0, *(edge for span in lane.spans for edge in (span.start, span.end)), lane.updates]
    return [(one, other) for one, other in list(pairwise(edges))[::2] if other > one]
