"""The tower beside the pipeline, planned: the language chain as ever, then E and V among its actions.

1. Of a few ways to hold activations from E to V (all, of half of the ViT's layers inputs alone, of all layers), those
   with most bytes first: take the tower's bytes off the memory, and plan the chain from word_embed on as any chain.
2. Deal microbatches to ranks and place E and V (`placing`), from all first and last, and from just in time; E and V of
   what fits are then simulated on all packs.
3. Where ranks are short of bytes with all that waits there, plan once more with so much less.
4. The fastest of all ways. Where a way recomputes nothing of the language model, no later one can be faster.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.costs.tower import TowerCosts, dealt_by_bytes, language_profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.beside import TowerBeside, largest_share, part_seconds
from omnibal_ext.layout.placing import NONE, Costs, anneal_places, judge_places
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import Candidate, find_plan
from omnibal_ext.plan_tower import Tower
from omnibal_ext.schedules.actions import Action, Beside, Schedule
from omnibal_ext.schedules.weaving import Places, first_and_last, in_time, woven
from omnibal_ext.units import GIB

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
ROADS = ("cut", "beside", "auto")
WARM, COLD = 0.3, 0.003
"""First and last temperature, of the mean seconds of an E."""
A_CHANGE, AN_ACTION, A_CASE = 4e-6, 1.2e-8, 4e-9
"""Seconds of an idle core, about: of a change, beside each action; of an action in each case."""
SHARE_OF_MEAN = 0.7
"""Of the changes: on the mean of all cases; the others are judged on some iterations."""
SOME_CASES = 16
TRIES = 3
"""At most so many times a way is planned, each time with the bytes less that it was short of."""


@dataclass(frozen=True)
class Way:
    """What is kept from E to V."""

    recompute: tuple[int, ...]
    """ViT layers of which only the input is."""
    packs: float
    """That a rank has room for between E and V."""


def plan_road(
    problem: LayoutProblem, road: str, method: str, *, recompute: str = "fewest", radius: int = 1, top_k: int = 10,
    seconds: float = 4.0,
) -> tuple[LayoutProblem, list[Candidate], dict[str, Any]]:  # fmt: skip
    """`find_plan` of one of `ROADS`; with "auto" of the faster one.

    Also what plan.json says of the choice: step seconds of each road (or why it has no plan), those of
    the language model alone, the tower's work left out, and the share of that throughput that the plan reaches.
    Raises UserError where nothing fits.
    """
    options: dict[str, Any] = {"recompute": recompute, "radius": radius, "top_k": top_k}
    if road == "cut":
        return *find_plan(problem, method, seconds=seconds, **options), {}
    plans: dict[str, tuple[LayoutProblem, list[Candidate]]] = {}
    said: dict[str, Any] = {}
    for name, plan in (("cut", find_plan), ("beside", plan_beside)):
        if road in (name, "auto"):
            try:
                plans[name] = plan(problem, method, seconds=seconds, **options)
            except UserError as error:
                said[f"no_plan_{name}"] = str(error)
    if not plans:
        raise UserError(" | ".join(said.values()))
    chosen = min(plans, key=lambda name: plans[name][1][0].step_seconds)
    step = plans[chosen][1][0].step_seconds
    said |= {f"{name}_step_seconds": candidates[0].step_seconds for name, (_, candidates) in plans.items()}
    with suppress(UserError):
        alone = replace(problem, profile=language_profile(problem.profile))
        text = find_plan(alone, method, seconds=seconds, **options)[1][0].step_seconds
        said |= {"text_only_step_seconds": text, "share_of_text_only": text / step}
    return *plans[chosen], {"tower": {"road": chosen, **said}}


def plan_beside(
    problem: LayoutProblem, method: str, *, seconds: float = 4.0, **options: Any
) -> tuple[LayoutProblem, list[Candidate]]:
    """The fastest plan with the tower beside the pipeline of `problem`, whose profile is of the whole chain.

    The problem that comes back is of the chain from word_embed on, with lists and the tower; it has one candidate.
    Raises UserError where nothing fits, as `find_plan` does, and for profiles that lack what whole layers cost.
    """
    if problem.ranks == 1:
        raise UserError("a tower stands beside a pipeline, and one rank is none: --tower cut")
    costs = TowerCosts.of(problem.profile)
    best: tuple[LayoutProblem, Candidate] | None = None
    refusal: UserError | None = None
    ways = list(_ways(problem, costs))
    for way in ways:
        try:
            planned = _plan_way(problem, costs, way, method, seconds / len(ways), options)
        except UserError as error:
            refusal = refusal or error
            continue
        if best is None or planned[1].step_seconds < best[1].step_seconds:
            best = planned
        if not (any(planned[1].layout.recompute) or any(planned[1].layout.recompute_cheap)):
            break
    if best is None:
        assert refusal is not None
        raise refusal
    return best[0], [best[1]]


def _ways(problem: LayoutProblem, costs: TowerCosts) -> Iterator[Way]:
    if not costs.trained:
        yield Way((), 0)
        return
    share, vit = problem.microbatches / problem.ranks, costs.vit_links
    yield from (Way((), packs) for packs in dict.fromkeys((np.ceil(share), min(share, 2.0))))
    yield Way(vit[::2], min(share, 2.0))
    yield Way(vit, min(share, 3.0))


def _plan_way(
    problem: LayoutProblem, costs: TowerCosts, way: Way, method: str, seconds: float, options: dict[str, Any]
) -> tuple[LayoutProblem, Candidate]:
    profile, budget = problem.profile, float(problem.profile.vit_budget)
    owners = dealt_by_bytes(costs.owner_bytes(), problem.ranks * profile.tensor_model_parallel_size)
    tower = Tower(costs.links, owners, ((0,),) * problem.microbatches, "bubbles", way.recompute)
    aside = TowerBeside(tower, costs, profile, problem.ranks, problem.packs)
    share = float(largest_share(np.array(budget), profile.tensor_model_parallel_size, costs.unit))
    held = share * (costs.kept_bytes(way.recompute) * way.packs + costs.working_bytes(way.recompute))
    waiting = share * costs.output_bytes * min(problem.microbatches, 2 * problem.ranks)
    less = float(aside.fixed_bytes.max()) + held + waiting
    for _ in range(TRIES):
        if less >= problem.memory_bytes:
            raise UserError(
                f"a rank needs {less / GIB:.2f} GiB for the tower beside the pipeline (copies, sums, what is kept and "
                f"waits), of {problem.memory_bytes / GIB:.2f} GiB: cut the chain, or use more memory"
            )
        alone = replace(problem, profile=language_profile(profile), memory_bytes=problem.memory_bytes - less)
        alone, candidates = find_plan(alone, method, seconds=seconds / 2, **options)
        found, short = _placed(problem, alone, candidates[0].layout, aside, waiting, seconds / 2)
        if found is not None:
            return found
        less, waiting = less + short, waiting + short
    raise UserError(
        f"ranks are {short / GIB:.2f} GiB short with the tower beside the pipeline: cut the chain, or use more memory"
    )


def _placed(
    problem: LayoutProblem, alone: LayoutProblem, layout: Layout, aside: TowerBeside, waiting: float, seconds: float
) -> tuple[tuple[LayoutProblem, Candidate] | None, float]:
    """The fastest places that fit, else None and the bytes that the nearest are short of."""
    best, least_short = None, np.inf
    for places in _searched(alone, _costs(problem, alone, layout, aside, waiting), aside, seconds):
        whole = _with_places(problem, alone, aside, places)
        short = max(whole.stage_peak_bytes(layout)) - problem.memory_bytes
        least_short = min(least_short, short)
        if short > 0:
            continue
        candidate = Candidate(layout, whole.step_seconds(layout))
        if best is None or candidate.step_seconds < best[1].step_seconds:
            best = whole, candidate
    return best, float(least_short)


def _searched(alone: LayoutProblem, every: Costs, aside: TowerBeside, seconds: float) -> list[Ints]:
    """Places to choose from: starts, and what annealing makes of the fastest of them."""
    mean, some = _mean(every), _some(every)
    starts = _starts(alone, not aside.costs.trained)
    ranked = sorted(starts, key=lambda places: judge_places(places, mean))
    typical = float(mean.parts[0, 0].mean()) or 1.0
    actions = every.actions.shape[0] * every.actions.shape[1]
    found = list(starts)
    for seed, start in enumerate(ranked[:2]):
        changes = int(SHARE_OF_MEAN / 2 * seconds / (A_CHANGE + actions * (AN_ACTION + A_CASE)))
        places, _ = anneal_places(start, mean, changes, WARM * typical, COLD * typical, seed)
        found.append(places)
    fastest = min(found, key=lambda places: judge_places(places, some))
    cases = some.seconds.shape[3]
    changes = int((1 - SHARE_OF_MEAN) * seconds / (A_CHANGE + actions * (AN_ACTION + A_CASE * cases)))
    found.append(anneal_places(fastest, some, changes, COLD * 5 * typical, COLD * typical, len(found))[0])
    return found


def _starts(alone: LayoutProblem, ahead: bool) -> list[Ints]:
    """All first and last and just in time, a microbatch on one rank after the other or on all ranks."""
    ranks, microbatches = alone.ranks, alone.microbatches
    everyone = tuple(range(ranks))
    dealt: list[tuple[tuple[int, ...], ...]] = [
        tuple(((m + 1) % ranks,) for m in range(microbatches)),
        tuple(everyone if m < ranks else ((m + 1) % ranks,) for m in range(microbatches)),
        (everyone,) * microbatches,
    ]
    found = []
    for parts in dealt:
        beside = Beside(parts, ahead)
        given = [first_and_last(alone.schedule, beside)]
        shape = (alone.schedule, microbatches, alone.placement, beside)
        given += [in_time(*shape, early, together) for early in (2, 4 * ranks) for together in (1, ranks)]
        found += [_as_array(places, ranks, microbatches) for places in given]
    return found


def _as_array(places: Places, ranks: int, microbatches: int) -> Ints:
    found = np.full((2, ranks, microbatches), NONE, dtype=np.int64)
    for rank, mine in enumerate(places):
        for place, action in mine:
            found["EV".index(action.kind), rank, action.microbatch] = place
    return found


def _with_places(problem: LayoutProblem, alone: LayoutProblem, aside: TowerBeside, places: Ints) -> LayoutProblem:
    """The problem with these lists, its memory whole again."""
    parts = tuple(tuple(np.flatnonzero(places[0, :, m] != NONE).tolist()) for m in range(problem.microbatches))
    schedule = alone.schedule
    listed: Places = [
        [
            (int(place), Action(kind, m, rank))
            for kind, row in zip("EV", places[:, rank], strict=True)
            for m, place in enumerate(row)
            if place != NONE
        ]
        for rank in range(problem.ranks)
    ]
    mode = "bubbles" if aside.costs.trained else "ahead"
    if mode == "bubbles" and listed == first_and_last(schedule, Beside(parts)):
        mode = "first"
    tower = replace(aside.tower, parts=parts, mode=mode)
    lists: Schedule = woven(schedule, listed)
    beside = replace(aside, tower=tower)
    return replace(alone, lists=lists, beside=beside, memory_bytes=problem.memory_bytes)


def _costs(problem: LayoutProblem, alone: LayoutProblem, layout: Layout, aside: TowerBeside, waiting: float) -> Costs:
    cases = [alone.stage_costs(layout, case) for case in range(alone.cases[0] * alone.cases[1])]
    split = alone.program.split_backward
    seconds = np.stack([[c.forward, c.backward - c.weight * split, c.weight] for c in cases], axis=-1)
    counts = np.arange(1, problem.ranks + 1)
    tensor, way = problem.profile.tensor_model_parallel_size, aside.tower
    loads = np.stack([largest_share(aside.tiles, int(k) * tensor, aside.costs.unit) for k in counts])
    profile = problem.profile
    parts = part_seconds(aside.costs, loads, way) + profile.action_seconds
    hops = profile.transfer_latency_seconds + profile.transfer_seconds_per_byte * aside.costs.output_bytes * loads
    full = largest_share(np.array(float(profile.vit_budget)), counts * tensor, aside.costs.unit)
    kept = full * aside.costs.kept_bytes(way.recompute)
    working = full[0] * aside.costs.working_bytes(way.recompute)
    peaks = np.array(replace(alone, memory_bytes=np.inf).stage_peak_bytes(layout))
    step = alone.placement.by_rank(cases[0].step) + aside.step
    return Costs(
        actions=_actions(alone),
        seconds=np.ascontiguousarray(seconds),
        links=np.ascontiguousarray(np.stack([c.transfer for c in cases], axis=-1)),
        parts=np.ascontiguousarray(parts.transpose(1, 0, 3, 2)),
        hops=np.ascontiguousarray(hops.transpose(0, 2, 1)),
        kept=np.repeat(kept[:, None], problem.microbatches, axis=1),
        room=problem.memory_bytes - peaks - aside.fixed_bytes - working - waiting,
        step=step,
        ranks_of=np.array(alone.placement.ranks_of),
        ahead=not aside.costs.trained,
        replicas=alone.cases[1],
    )


def _actions(alone: LayoutProblem) -> Ints:
    stages_of = alone.placement.stages_of
    return np.array(
        [
            [("FBW".index(a.kind), stages_of[rank][a.chunk], a.microbatch) for a in actions]
            for rank, actions in enumerate(alone.schedule)
        ],
        dtype=np.int64,
    )


def _mean(costs: Costs) -> Costs:
    means: dict[str, Any] = {
        name: np.ascontiguousarray(getattr(costs, name).mean(axis=-1, keepdims=True))
        for name in ("seconds", "links", "parts", "hops")
    }
    return costs._replace(**means, replicas=1)


def _some(costs: Costs) -> Costs:
    """Some iterations: as many as make up `SOME_CASES`, at least one."""
    cases = max(1, SOME_CASES // costs.replicas) * costs.replicas
    some: dict[str, Any] = {
        name: np.ascontiguousarray(getattr(costs, name)[..., :cases]) for name in ("seconds", "links", "parts", "hops")
    }
    return costs._replace(**some)
