"""A layout's figures: simulated step time on the packs, and bytes on every rank at the budgets.

A layout cuts the chain at `edges` and recomputes some layers of each stage, whole or cheaply:

    edges            0        4          7       9     stage s holds layers edges[s] .. edges[s + 1] - 1
    recompute        (1, 2)   ()         (7,)          layer ids
    recompute_cheap  (3,)     (5, 6)     ()

With a replicated tower the chain is the rest of it, numbered from 0, and E and V are played too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.beside import TowerBeside
from omnibal_ext.layout.frontier import StageBytes, on_top
from omnibal_ext.layout.tables import Columns, KindTables, kind_tables, prefix_sums
from omnibal_ext.schedules.actions import BACKWARD, ENCODE, Schedule
from omnibal_ext.schedules.clock import Seconds, last_ends, moved_bytes
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.program import Program, compile_schedule
from omnibal_ext.schedules.schedule import build_schedule, placement_of
from omnibal_ext.schedules.simulate import Simulation, StageCosts, simulate, with_encoding

Edges = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Edges that cut the chain into stages, and ids of each stage's layers that are recomputed: whole, or cheaply."""

    edges: tuple[int, ...]
    recompute: tuple[tuple[int, ...], ...]
    recompute_cheap: tuple[tuple[int, ...], ...] = ()
    """Empty: none in any stage."""

    def of_stage(self, stage: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return a stage's layer ids: those recomputed whole, and those recomputed cheaply."""
        return self.recompute[stage], self.recompute_cheap[stage] if self.recompute_cheap else ()

    def moved(self, by: int) -> "Layout":
        """Return this layout for a chain with `by` more layers in front: `by` is added to all edges and layer ids."""
        recompute, cheap = (
            tuple(tuple(layer + by for layer in ids) for ids in stages)
            for stages in (self.recompute, self.recompute_cheap)
        )
        return Layout(tuple(edge + by for edge in self.edges), recompute, cheap)


@dataclass(frozen=True)
class LayoutProblem:
    """What layouts are judged on: costs, pipeline, memory, packs. Figures are methods, so that planners agree."""

    profile: Profile
    ranks: int
    microbatches: int
    chunks: int = 1
    schedule_name: str = "1f1b"
    memory_bytes: float = float("inf")
    """Bytes of one rank for weights and activations."""
    packs: PackSizes | None = None
    """[iterations, data-parallel ranks, microbatches]; None: every microbatch fills both budgets."""
    lists: Schedule | None = None
    """Lists of actions made for this problem; None: those of `schedule_name`."""
    beside: TowerBeside | None = None
    """A replicated tower, whose E and V are in `lists`; it is played on the problem's packs."""

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
        if self.beside is not None and self.beside.packs is not self.packs:
            object.__setattr__(self, "beside", replace(self.beside, packs=self.packs))

    @property
    def whole_profile(self) -> Profile:
        """Profile of the whole chain; with a replicated tower, `profile` is only that of the chain behind it."""
        return self.beside.profile if self.beside else self.profile

    @property
    def layers_beside(self) -> int:
        """Number of layers in the replicated tower, which come before the chain that is cut; 0 without one."""
        return self.beside.tower.layers if self.beside else 0

    @property
    def stages(self) -> int:
        """Number of stages on all ranks: ranks x chunks."""
        return self.ranks * self.chunks

    @cached_property
    def placement(self) -> Placement:
        """Which rank holds each stage, as the named schedule has it."""
        return placement_of(self.schedule_name, self.ranks, self.chunks)

    @cached_property
    def schedule(self) -> Schedule:
        """Actions of every rank in order: `lists`, or those of the schedule named `schedule_name`."""
        if self.lists is not None:
            return self.lists
        return build_schedule(self.schedule_name, self.ranks, self.microbatches, self.chunks)

    @cached_property
    def program(self) -> Program:
        """The schedule's actions in one order in which they can be simulated, each behind what it waits for."""
        return compile_schedule(self.schedule, self.microbatches, self.placement)

    @cached_property
    def kind_ids(self) -> Ints:
        """int64 [layers]: index of each layer's kind in `columns.kinds`."""
        return np.array([self.columns.kinds.index(kind) for kind in self.profile.chain], dtype=np.int64)

    @cached_property
    def columns(self) -> Columns:
        """Kinds of layers, and options to recompute them, for which `tables` have figures."""
        return Columns.of(self.profile)

    @cached_property
    def cases(self) -> tuple[int, int]:
        """(iterations, data-parallel ranks) of the packs: so many cases, each simulated alone; (1, 1) without packs."""
        return (1, 1) if self.packs is None else (self.packs.tiles.shape[0], self.packs.tiles.shape[1])

    @cached_property
    def tables(self) -> KindTables:
        """Costs of one layer of every kind on every microbatch of the packs."""
        return kind_tables(self.profile, self.packs, self.microbatches, self.program.split_backward)

    @cached_property
    def moments(self) -> list[list[Ints]]:
        """Per rank, how many microbatches it may hold at once: a list of int64 [vectors, 2, chunks]. Entry 0 counts
        between actions, entry 1 + c while a B of chunk c runs; [:, 0] are held from F to the end of B, [:, 1] from
        there to W. Vectors that another one reaches in every number are left out: they are never the peak."""
        rank, stage, kind, _ = self.program.steps
        moved = np.stack(moved_bytes(np.array([1, 0]), np.array([0, 1]) * self.program.split_backward))
        chunks = np.array([self.placement.rank_and_chunk(s)[1] for s in range(self.stages)])
        found = []
        for mine in (np.flatnonzero((rank == r) & (kind < ENCODE)) for r in range(self.ranks)):
            kinds, chunk, numbers = kind[mine], chunks[stage[mine]], np.arange(mine.size)
            change = np.zeros((mine.size, 2, self.chunks), dtype=np.int64)
            change[numbers, :, chunk] = moved[kinds]
            after = change.cumsum(axis=0)
            in_backward = [(after - change)[(chunk == c) & (kinds == BACKWARD)] for c in range(self.chunks)]
            found.append([_maximal(moments) for moments in (np.concatenate([0 * after[:1], after]), *in_backward)])
        return found

    @cached_property
    def held(self) -> list[Ints]:
        """Per rank: int64 [vectors, chunks], microbatches held between actions, those before B and before W in sum."""
        return [vectors.sum(axis=1) for vectors, *_ in self.moments]

    def counts(self, layout: Layout) -> tuple[Ints, Ints]:
        """Count a layout's layers for `tables`: int64 [stages, columns], each stage's by kind (and the features it
        receives); int64 [stages, options], those it recomputes by each option."""
        held = self.slices(layout.edges)
        recomputed = np.zeros((len(held), len(self.columns.of_option)), dtype=np.int64)
        for whole, of_stages in ((True, layout.recompute), (False, layout.recompute_cheap)):
            for s, ids in enumerate(of_stages):
                kinds = self.kind_ids[list(ids)]
                columns = (kinds[:, None] == self.columns.of_option) & (whole == self.columns.whole)
                recomputed[s] += columns.sum(axis=0)
        return held, recomputed

    def slices(self, edges: Sequence[int]) -> Ints:
        """Count each stage's layers by kind, and features it receives, if cut at `edges`: int64 [stages, columns]."""
        cuts = np.asarray(edges)
        held: Ints = np.diff(self.kind_counts[cuts], axis=0) + self.received[cuts[:-1]]
        return held

    @cached_property
    def kind_counts(self) -> Ints:
        """int64 [layers + 1, columns]: layers of each kind before each layer, and in the whole chain (prefix sums)."""
        return prefix_sums(self._columns)

    @cached_property
    def _columns(self) -> Ints:
        """int64 [layers, columns]: 1 in the column of a layer's kind, and in that of `layers_apart` if it has one."""
        found = (self.kind_ids[:, None] == np.arange(2 * len(self.columns.kinds))).astype(np.int64)
        separate = [[kind == name for name in self.profile.layers_apart] for kind in self.profile.cost_kinds]
        return np.hstack([found, np.array(separate, dtype=np.int64)])

    def per_layer(self, table: Floats) -> Floats:
        """Return the costs of each layer of the chain from a table by column: [columns, ...] -> [layers, ...]."""
        return np.tensordot(self._columns, table, 1)

    @cached_property
    def received(self) -> Ints:
        """int64 [layers + 1, columns]: features that a stage receives if it begins with each layer."""
        found = np.zeros_like(self.kind_counts)
        layers, held = np.arange(1, len(found)), len(self.columns.kinds) + self.kind_ids
        found[layers, held] = self.profile.features_after
        for kind, passing in self.profile.tokens_after.items():
            found[layers, len(self.columns.kinds) + self.columns.kinds.index(kind)] += passing
        return found

    @cached_property
    def transfers(self) -> Floats:
        """float64 [layers, cases, microbatches]: seconds to send what the next stage needs if cut behind the layer."""
        latency = self.profile.transfer_latency_seconds
        features = np.array(self.profile.features_after)[:, None, None]
        carried = (self.tables.transfer[self.kind_ids] - latency) * (1 + features)
        for kind, passing in self.profile.tokens_after.items():
            tokens = self.tables.transfer[self.columns.kinds.index(kind)] - latency
            carried = carried + tokens * np.array(passing)[:, None, None]
        return np.asarray((latency + carried) * (self.ranks > 1))

    def fits(self, layout: Layout) -> bool:
        """Return whether every rank's peak bytes, with packs that fill the budgets, are within `memory_bytes`."""
        return max(self.stage_peak_bytes(layout)) <= self.memory_bytes

    def rank_bytes(self, rank: int, held: Ints, recomputed: Ints) -> float:
        """Return a rank's peak bytes from `counts` of its stages, int64 [chunks, columns] and [chunks, options]."""
        return float(self.bytes_of_counts(rank, held, recomputed[None])[0])

    def bytes_of_counts(self, rank: int, held: Ints, recomputed: Ints) -> Floats:
        """Return a rank's peak bytes for many ways to recompute its layers `held` [chunks, columns]: float64 [many].

        `recomputed`: int64 [many, chunks, options]. Overhead + weights + the worst of all moments: bytes that its
        microbatches keep, and in a chunk's B the layer that is being recomputed.
        """
        tables = self.tables
        kept, late = held @ tables.kept - recomputed @ tables.saved, held @ tables.late - recomputed @ tables.saved_late
        fixed = self.profile.overhead_bytes + held.sum(axis=0) @ tables.fixed
        between, *in_chunks = [
            (kept @ vectors[:, 0].T + late @ vectors[:, 1].T).max(axis=1) for vectors in self.moments[rank]
        ]
        in_backward = np.stack(in_chunks, axis=1) + self.transient(held, recomputed)
        return np.asarray(fixed + np.maximum(between, in_backward.max(axis=1)))

    @cached_property
    def stage_bytes(self) -> list[StageBytes]:
        """Arrays, by rank, for compiled searches that check memory as `bytes_of_counts` does; ranks have one stage."""
        t, room = self.tables, float(self.memory_bytes - self.profile.overhead_bytes)
        found = []
        for between, in_backward, *_ in self.moments:
            moments = (np.ascontiguousarray(between[:, :, 0]), np.ascontiguousarray(in_backward[:, :, 0]))
            of = (self.columns.of_option, self.columns.backward, self.columns.pairs)
            split = self.program.split_backward
            found.append(StageBytes(t.fixed, t.kept, t.late, t.saved, t.saved_late, *moments, *of, room, split))
        return found

    def transient(self, held: Ints, recomputed: Ints) -> Floats:
        """Return the most bytes that recomputing in a stage's backward takes on top of those held, float64 [...], from
        counts of its layers [..., columns] and of those recomputed [..., options]. See `frontier.on_top`."""
        t, split = self.tables, self.program.split_backward
        counts = np.moveaxis(held, -1, 0), np.moveaxis(recomputed, -1, 0)
        return np.asarray(on_top(*counts, t.kept, t.saved, self.columns.of_option, self.columns.backward, split))

    def stage_peak_bytes(self, layout: Layout) -> list[float]:
        """Return peak bytes of every pipeline rank, with packs that fill the budgets."""
        if self.beside:
            return replace(self, packs=None).simulate(layout).peak_bytes.tolist()
        held, recomputed = self.counts(layout)
        stages_of = enumerate(self.placement.stages_of)
        return [self.rank_bytes(rank, held[mine], recomputed[mine]) for rank, mine in stages_of]

    def layout(self, edges: Sequence[int], recomputed: Ints) -> Layout:
        """Return the layout with these cuts and recompute counts, int64 [stages, options]: of each kind in a stage, the
        first layers are recomputed whole, and those that follow cheaply."""
        found = []
        for counts, (first, end) in zip(recomputed.tolist(), pairwise(edges), strict=True):
            whole: list[int] = []
            cheap: list[int] = []
            for cheap_option, whole_option in self.columns.pairs.tolist():
                kind = self.columns.of_option[whole_option]
                ids = [i for i in range(first, end) if self.kind_ids[i] == kind]
                if ids:
                    whole += ids[: counts[whole_option]]
                    cheap += ids[counts[whole_option] :][: counts[cheap_option]]
            found.append((tuple(sorted(whole)), tuple(sorted(cheap))))
        whole_of_stages, cheap_of_stages = zip(*found, strict=True)
        return Layout(tuple(edges), whole_of_stages, cheap_of_stages if any(cheap_of_stages) else ())

    def step_seconds(self, layout: Layout) -> float:
        """Return the simulated step time: mean over iterations of the slowest data-parallel rank."""
        held, recomputed = self.counts(layout)
        return self.step_seconds_of_counts(held, recomputed, layout.edges)

    def iteration_seconds(self, layout: Layout) -> Floats:
        """Return the simulated seconds of each iteration's slowest data-parallel rank: float64 [iterations]."""
        held, recomputed = self.counts(layout)
        return self._slowest(self._case_seconds(held, recomputed, layout.edges))

    def step_seconds_of_counts(self, held: Ints, recomputed: Ints, edges: Sequence[int]) -> float:
        """Return `step_seconds` of a layout that is given by its cuts and its `counts`, int64 [stages, columns] and
        [stages, options]."""
        return self.over_cases(self._case_seconds(held, recomputed, edges))

    def _case_seconds(self, held: Ints, recomputed: Ints, edges: Sequence[int]) -> Floats:
        """Return the simulated seconds of every iteration on every data-parallel rank: float64 [cases]."""
        t, program = self.tables, self.program
        work = np.zeros((3, len(held), *t.forward.shape[1:]))
        forward, backward, weight = work.reshape(3, len(held), -1)
        layers = held.astype(np.float64)
        np.dot(layers, t.forward.reshape(len(t.forward), -1), out=forward)
        np.dot(layers, t.backward.reshape(len(t.backward), -1), out=backward)
        if recomputed.any():
            backward += recomputed @ t.recompute.reshape(len(t.recompute), -1)
        if program.split_backward:  # else there is no W
            np.dot(layers, t.weight.reshape(len(t.weight), -1), out=weight)
            backward -= weight
        work += self.profile.action_seconds
        seconds = Seconds(work, self.transfers[np.array(edges[1:]) - 1], self.host_seconds(held, recomputed))
        step = self.placement.by_rank(held @ t.step) + self.profile.iteration_seconds
        if self.beside:
            seconds, step = with_encoding(seconds, self.beside.seconds, self.beside.hops), step + self.beside.step
        return np.asarray((last_ends(program.rows, seconds) + step).max(axis=1))

    def host_seconds(self, held: Ints, recomputed: Ints) -> Floats:
        """Return the seconds in which the CPU launches F, B and W, float64 [3, stages], from a layout's `counts`."""
        t = self.tables
        forward = held @ t.host_forward
        backward = held @ t.host_backward + recomputed @ (t.host_forward[self.columns.of_option] * self.columns.whole)
        return np.stack([forward, backward, np.zeros_like(forward)]) + self.profile.host_action_seconds

    def over_cases(self, seconds: Floats) -> float:
        """Return the mean over iterations of the slowest rank, from seconds [iterations x data-parallel ranks]."""
        return float(self._slowest(seconds).mean())

    def _slowest(self, seconds: Floats) -> Floats:
        """Reduce seconds of all cases, float64 [cases], to those of each iteration's slowest rank: [iterations]."""
        return np.asarray(seconds.reshape(self.cases).max(axis=1))

    def stage_costs(self, layout: Layout, case: int = 0) -> StageCosts:
        """Return the stages' seconds and bytes for `simulate`; `case`: iteration x data-parallel ranks + rank."""
        held, recomputed = self.counts(layout)
        t = self.tables
        at = [table[:, case] for table in (t.forward, t.backward, t.recompute, t.weight, t.load)]
        forward, backward, recompute, weight, load = at
        kept = (held * t.kept) @ load - (recomputed * t.saved) @ load[self.columns.of_option]
        late = (held * t.late) @ load - (recomputed * t.saved_late) @ load[self.columns.of_option]
        transient = self.transient(held, recomputed)
        action, ranks_and_chunks = self.profile.action_seconds, map(self.placement.rank_and_chunk, range(self.stages))
        once_a_rank = np.array([chunk == 0 for _, chunk in ranks_and_chunks])
        split = self.program.split_backward
        return StageCosts(
            forward=held @ forward + action,
            backward=held @ backward + recomputed @ recompute + action * (2 if split else 1),
            weight=held @ weight + action * split,
            transfer=self.transfers[np.array(layout.edges[1:]) - 1, case],
            kept=kept,
            late=late,
            transient=np.broadcast_to(transient[:, None], kept.shape).copy(),
            fixed_bytes=held @ t.fixed + self.profile.overhead_bytes * once_a_rank,
            step=held @ t.step + self.profile.iteration_seconds * once_a_rank,
            host=self.host_seconds(held, recomputed),
        )

    def simulate(self, layout: Layout, case: int = 0) -> Simulation:
        """Simulate one case (as in `stage_costs`): when every action runs, and the bytes that ranks hold."""
        encoding = self.beside.encoding(case) if self.beside else None
        return simulate(self.program, self.stage_costs(layout, case), encoding)

    def ideal_seconds(self) -> float:
        """Return the seconds of forwards and backwards alone, spread evenly over ranks: no bubble, no recomputation."""
        t = self.tables
        work = self.kind_counts[-1] @ (t.forward + t.backward).sum(axis=2)
        tower = self.beside.work_seconds() if self.beside else 0.0
        return float((work.reshape(self.cases).mean() + tower) / self.ranks)


def _maximal(moments: Ints) -> Ints:
    """Return the rows of int64 [rows, ...] that no other row reaches in every number; of equal rows one."""
    vectors = np.unique(moments.reshape(len(moments), -1), axis=0)
    keep = [not ((vectors >= v).all(axis=1) & (vectors > v).any(axis=1)).any() for v in vectors]
    return vectors[keep].reshape(-1, *moments.shape[1:])
