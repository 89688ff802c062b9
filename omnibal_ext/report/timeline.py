"""What each rank does when, in one iteration: predicted by the simulator, or recorded by a run.

lane (data-parallel 0, rank 0)   F0: vit | projector   F1 ...      B0: projector | vit ...     step
lane (data-parallel 0, rank 1)            F0: llm   B0: llm ...                            step
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from omnibal_ext.chain import KINDS, TIMED_PART_OF
from omnibal_ext.costs.corrected import EXCHANGE, OTHER
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.costs.tower import TowerCosts, rest_profile
from omnibal_ext.layout.beside import TowerBeside
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.tables import KindTables, columns_of, kind_tables
from omnibal_ext.modalities.modality import FURTHER_SIZES
from omnibal_ext.plan import Plan
from omnibal_ext.schedules.actions import OF_TOWER, Action, Beside, givers
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.units import GIB

Phase = Literal["forward", "backward", "recompute", "weight"]
PHASES: dict[str, Phase] = {"F": "forward", "B": "backward", "W": "weight", "E": "forward", "V": "backward"}


@dataclass(frozen=True, slots=True)
class SpanPart:
    """Time of one action in "vit", "projector", "llm" or "head", in exchanges of the ranks that share a pack
    ("exchange"), or in none of these ("other")."""

    part: str
    phase: Phase
    seconds: float


@dataclass(frozen=True, slots=True)
class Span:
    """One action: its stage, start and end in seconds, and the parts of the model it spends them in."""

    action: Action
    stage: int
    """The rank's first stage for E and V, which belong to none."""
    start: float
    end: float
    pieces: tuple[SpanPart, ...]
    width: int = 1
    """Data-parallel ranks that share the pack."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One pipeline rank of one data-parallel rank."""

    data_parallel_rank: int
    rank: int
    spans: tuple[Span, ...]
    end: float
    """When the rank has reduced gradients and updated weights."""
    held: tuple[tuple[float, float], ...] = ()
    """(seconds, bytes held from then on)."""
    reads: tuple[tuple[float, float], ...] = ()
    """(start, end) of every wait for a pack; empty where they were not recorded."""
    barrier: float | None = None
    """When all ranks have ended their last action, if this one waits for that to update; None: it does not wait."""

    @property
    def work_seconds(self) -> float:
        """Seconds that the rank spends in actions."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def last_end(self) -> float:
        """Second in which its last action ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def update_at(self) -> float:
        """Second in which it begins to reduce gradients and update weights."""
        return self.last_end if self.barrier is None else self.barrier


@dataclass(frozen=True)
class Timeline:
    """One iteration on all ranks, in seconds from its start."""

    name: str
    lanes: tuple[Lane, ...]
    placement: Placement
    beside: Beside | None = None
    """Which rank encodes what in a replicated tower; None: there is none."""
    padding: float = 0.0
    """Share of the tokens that fill up batches."""

    @property
    def seconds(self) -> float:
        """Length of the iteration."""
        return max(lane.end for lane in self.lanes)

    def transfers(self) -> list[tuple[Span, Lane, Span, Lane]]:
        """Return tensors sent between ranks, each as (sending span, its lane, receiving span, its lane)."""
        where = {(lane.data_parallel_rank, lane.rank, s.action): (s, lane) for lane in self.lanes for s in lane.spans}
        found = []
        for (replica, rank, action), (span, lane) in where.items():
            for other, needed in givers(action, rank, self.placement, self.beside):
                if other != rank and (replica, other, needed) in where:
                    found.append((*where[replica, other, needed], span, lane))
        return found

    def totals(self) -> dict[tuple[str, str], float]:
        """Return the seconds of all lanes by (part, phase)."""
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for lane in self.lanes:
            for span in lane.spans:
                for piece in span.pieces:
                    found[piece.part, piece.phase] += piece.seconds
        return found


def layout_of(plan: Plan) -> Layout:
    """Return the plan's cuts and recomputed layers, numbered from the first layer that the pipeline holds."""
    layers = plan.tower.layers if plan.tower else 0
    edges = (layers, *(stage.layers[1] for stage in plan.stages))
    cheap = tuple(stage.recompute_cheap for stage in plan.stages)
    layout = Layout(edges, tuple(stage.recompute for stage in plan.stages), cheap if any(cheap) else ())
    return layout.moved(-layers)


def problem_of(plan: Plan, profile: Profile, packs: PackSizes | None) -> LayoutProblem:
    """Return the layout problem a plan solves, on packs int64 [iterations, data-parallel ranks, microbatches]."""
    memory = float("inf") if plan.memory_gib is None else plan.memory_gib * GIB
    beside = None
    if plan.tower:
        beside = TowerBeside(
            plan.tower, TowerCosts.of(profile, plan.tower.layers), profile, plan.pipeline_model_parallel_size, packs
        )
    return LayoutProblem(
        rest_profile(profile, plan.tower.layers if plan.tower else 0),
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
    """Simulate one iteration of the problem's packs on all data-parallel ranks."""
    replicas = problem.cases[1]
    lanes = [lane for d in range(replicas) for lane in _lanes(problem, layout, iteration * replicas + d, d)]
    return Timeline(name, tuple(lanes), problem.placement, problem.beside.tower.beside if problem.beside else None)


def _lanes(problem: LayoutProblem, layout: Layout, case: int, replica: int) -> Iterable[Lane]:
    play = problem.simulate(layout, case)
    step = problem.placement.by_rank(problem.stage_costs(layout, case).step)
    step = step + problem.beside.step if problem.beside else step
    split, widths = _ActionSplit(problem, layout, case), _widths(problem, case)
    for rank in range(problem.ranks):
        spans = []
        for action, start, end in play.timeline(rank):
            stage = problem.placement.stages_of[rank][0 if action.kind in OF_TOWER else action.chunk]
            spans.append(Span(action, stage, start, end, split.of(action, stage), widths[action.microbatch]))
        end = spans[-1].end + float(step[rank])
        yield Lane(replica, rank, tuple(spans), end, tuple(play.memory_timeline(rank)))


def _widths(problem: LayoutProblem, case: int) -> list[int]:
    """Return the width of every microbatch's pack."""
    if problem.packs is None or problem.packs.widths is None:
        return [1] * problem.microbatches
    widths: list[int] = problem.packs.widths.reshape(-1, problem.microbatches)[case].tolist()
    return widths


class _ActionSplit:
    """Divides an action's time among parts of the model, by the costs of the layers that its stage holds."""

    def __init__(self, problem: LayoutProblem, layout: Layout, case: int) -> None:
        self.tables, self.case, self.columns = problem.tables, case, columns_of(problem.profile)
        self.held, self.recomputed = problem.counts(layout)
        self.of_option = problem.columns.of_option
        self.split, self.action_seconds = problem.program.split_backward, problem.profile.action_seconds
        self.beside = problem.beside
        self.unexchanged: KindTables | None = None
        """Costs without exchanges between the ranks that share a pack."""
        if problem.packs is not None and problem.packs.exchanged is not None:
            packs = replace(problem.packs, exchanged=None)
            self.unexchanged = kind_tables(problem.profile, packs, problem.microbatches, self.split)

    def of(self, action: Action, stage: int) -> tuple[SpanPart, ...]:
        """Return the parts of an action of a stage in the order they run; their seconds add up to the simulated
        action's, but for what the device waits for its host."""
        if self.beside and action.kind in OF_TOWER:
            found = [SpanPart(*piece) for piece in self.beside.pieces(action.kind, self.case, action.microbatch)]
            return tuple(piece for piece in found if piece.seconds > 0)
        found = self._of_layers(self.tables, action, stage)
        if self.unexchanged is not None:
            found = _with_exchange(found, self._of_layers(self.unexchanged, action, stage))
        return (SpanPart(OTHER, PHASES[action.kind], self.action_seconds),) * (self.action_seconds > 0) + tuple(found)

    def _of_layers(self, t: KindTables, action: Action, stage: int) -> list[SpanPart]:
        if action.kind == "F":
            return self._by_part(t.forward, self.held[stage], action, "forward", KINDS)
        if action.kind == "W":
            return self._by_part(t.weight, self.held[stage], action, "weight", KINDS[::-1])
        seconds = t.backward - t.weight if self.split else t.backward
        by_kind = np.zeros_like(t.forward)
        np.add.at(by_kind, self.of_option, t.recompute * self.recomputed[stage][:, None, None])
        recompute = self._by_part(by_kind, 1, action, "recompute", KINDS[::-1])
        back = self._by_part(seconds, self.held[stage], action, "backward", KINDS[::-1])
        parts = dict.fromkeys(piece.part for piece in (*back, *recompute))
        return [piece for part in parts for piece in (*recompute, *back) if piece.part == part]

    def _by_part(self, table: Any, counts: Any, action: Action, phase: Phase, kinds: Sequence[str]) -> list[SpanPart]:
        seconds = table[:, self.case, action.microbatch] * counts
        totals = dict.fromkeys(dict.fromkeys(TIMED_PART_OF[kind] for kind in kinds), 0.0)
        for kind, taken in zip(self.columns, seconds.tolist(), strict=True):
            totals[TIMED_PART_OF[kind]] += taken
        return [SpanPart(part, phase, total) for part, total in totals.items() if total > 0]


def _with_exchange(pieces: Sequence[SpanPart], unexchanged: Sequence[SpanPart]) -> list[SpanPart]:
    """Return the parts with `unexchanged`'s seconds, then, by phase, what `pieces` take longer, as part "exchange"."""
    without = {(piece.part, piece.phase): piece.seconds for piece in unexchanged}
    exchanged: dict[Phase, float] = {}
    found = []
    for piece in pieces:
        seconds = without.get((piece.part, piece.phase), 0.0)
        found.append(replace(piece, seconds=seconds))
        exchanged[piece.phase] = exchanged.get(piece.phase, 0.0) + piece.seconds - seconds
    found += [SpanPart(EXCHANGE, phase, seconds) for phase, seconds in exchanged.items()]
    return [piece for piece in found if piece.seconds > 0]


def recorded(record: Mapping[str, Any], placement: Placement, beside: Beside | None = None) -> Timeline:
    """Return the timeline in a line of timeline.jsonl, see `megatron.vlm.monitoring.recorder`.

    If every rank ends after the last action of all ranks, they waited for each other there, to reduce gradients or
    their norm.
    """
    lanes = []
    for lane in record["lanes"]:
        spans = tuple(
            Span(
                Action(kind, microbatch, chunk),
                placement.stages_of[lane["rank"]][0 if kind in OF_TOWER else chunk],
                start,
                end,
                tuple(SpanPart(part, phase, seconds) for part, phase, seconds in pieces),
                _width(lane["packs"], microbatch),
            )
            for kind, microbatch, chunk, start, end, pieces in lane["actions"]
        )
        held = tuple((seconds, held) for seconds, held in lane["held"])
        reads = tuple((start, end) for start, end in lane.get("reads", ()))
        lanes.append(Lane(lane["data_parallel_rank"], lane["rank"], spans, lane["end"], held, reads))
    last = max(lane.last_end for lane in lanes)
    if all(lane.end >= last for lane in lanes):
        lanes = [replace(lane, barrier=last) for lane in lanes]
    return Timeline(f"measured, iteration {record['iteration']}", tuple(lanes), placement, beside)


def _width(packs: Sequence[Sequence[int]], microbatch: int) -> int:
    """Return the width of a recorded pack; older runs recorded only tiles, tokens and squares, without it."""
    return packs[microbatch][4] if packs and len(packs[microbatch]) > 3 else 1


def packs_of_record(record: Mapping[str, Any]) -> PackSizes:
    """Return the packs of a recorded iteration: int64 [1, data-parallel ranks, microbatches]."""
    by_replica = {lane["data_parallel_rank"]: lane["packs"] for lane in record["lanes"]}
    columns = max((len(pack) for packs in by_replica.values() for pack in packs), default=0)
    filled = [[[*pack, *[0] * (columns - len(pack))] for pack in by_replica[replica]] for replica in sorted(by_replica)]
    sizes = np.array(filled, dtype=np.int64)[None]
    found = [np.ascontiguousarray(sizes[..., column]) for column in range(sizes.shape[-1])]
    named: dict[str, Any] = dict(zip(("tiles", "tokens", "squares", "exchanged", "widths"), found, strict=False))
    return PackSizes(**named, more=dict(zip(FURTHER_SIZES, found[5:], strict=False)))


def waits(lane: Lane) -> list[tuple[float, float]]:
    """Return (start, end) of every wait between the iteration's start and the lane's update."""
    edges = [0.0, *(edge for span in lane.spans for edge in (span.start, span.end)), lane.update_at]
    return [(one, other) for one, other in list(pairwise(edges))[::2] if other > one]
