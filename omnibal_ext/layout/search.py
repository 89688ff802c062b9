"""Search for layouts: from a method's name to ranked ones, and from the best of them to a plan with its predictions."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from omnibal_ext.errors import UserError
from omnibal_ext.layout.joint import joint_search
from omnibal_ext.layout.lists import build_lists
from omnibal_ext.layout.partition import bmp_candidates, even_edges, layer_weights
from omnibal_ext.layout.problem import Edges, Layout, LayoutProblem
from omnibal_ext.layout.recompute import fewest_that_fit, recompute_all
from omnibal_ext.plan import Plan, StagePlan
from omnibal_ext.schedules.schedule import build_schedule
from omnibal_ext.units import GIB

METHODS = ("parameters", "layers", "profile", "bmp", "joint")
RECOMPUTE_RULES: dict[str, Callable[[LayoutProblem, Edges], Layout]] = {
    "fewest": fewest_that_fit,
    "full": recompute_all,
}
BUILT: dict[str, tuple[str, ...]] = {"zb_auto": (), "zb_v_auto": ("v_half", "v_min")}
"""Schedules whose lists are built for the plan, and other schedules that the search may begin with too."""
NEAR_LIMIT = 0.97
"""A stage within this share of the slowest one's seconds, or of the memory, counts as limited by it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that fits, and its simulated step time."""

    layout: Layout
    step_seconds: float


def find_layouts(
    problem: LayoutProblem,
    method: str,
    *,
    recompute: str = "fewest",
    radius: int = 1,
    top_k: int = 10,
    seconds: float = 4.0,
) -> list[Candidate]:
    """Find layouts of one of `METHODS` that fit the memory, fastest first by simulation.

    `recompute` is "fewest" (the paper's rule) or "full" (everything, what unbalanced training does); joint chooses what
    to recompute itself. `seconds` limits the joint search. Raises UserError for an unknown method, a rule the method
    cannot follow, and where no candidate fits.
    """
    if method not in METHODS:
        raise UserError(f"layout method {method!r} is not known; choose one of {', '.join(METHODS)}")
    if recompute != "fewest" and method == "joint":
        raise UserError(f"method joint chooses what to recompute itself: leave out --recompute {recompute}")
    if method == "joint":
        return _joint(problem, radius, top_k, seconds)
    if method == "bmp":
        cuts = bmp_candidates(problem, radius, top_k)
    else:
        cuts = [even_edges(layer_weights(problem, method), problem.stages)]
    return judge(problem, cuts, recompute)


def find_plan(
    problem: LayoutProblem, method: str, *, recompute: str = "fewest", radius: int = 1, top_k: int = 10,
    seconds: float = 4.0,
) -> tuple[LayoutProblem, list[Candidate]]:  # fmt: skip
    """Run `find_layouts`; for zb_auto and zb_v_auto build lists for the best layout, and judge all layouts on these.

    The returned problem has the lists; its first candidate is never slower than with those the search begins with.
    `seconds` limit the joint search, and again the search for lists. Raises UserError as `find_layouts` does.
    """
    others = BUILT.get(problem.schedule_name, ())
    shape = (problem.ranks, problem.microbatches, problem.chunks)
    starts = [problem, *(replace(problem, lists=build_schedule(name, *shape)) for name in others)]
    options = {"recompute": recompute, "radius": radius, "top_k": top_k, "seconds": seconds / len(starts)}
    problem, candidates = _fastest_start(starts, method, options)
    if problem.schedule_name not in BUILT:
        return problem, candidates
    built, layout = build_lists(problem, candidates[0].layout, seconds, movable=method == "joint")
    if built is problem:
        return problem, candidates
    if method == "joint":
        return built, [Candidate(*one) for one in joint_search(built, [layout.edges], [layout], seconds / 4, top_k)]
    fitting = [Candidate(c.layout, built.step_seconds(c.layout)) for c in candidates if built.fits(c.layout)]
    return built, sorted(fitting, key=lambda candidate: candidate.step_seconds)


def _fastest_start(
    starts: Sequence[LayoutProblem], method: str, options: Mapping[str, Any]
) -> tuple[LayoutProblem, list[Candidate]]:
    """Return the problem of `starts` whose best layout is fastest, and its layouts. Raises UserError if nothing
    fits."""
    found: list[tuple[LayoutProblem, list[Candidate]]] = []
    for number, start in enumerate(starts):
        with suppress(*([UserError] if found or number < len(starts) - 1 else [])):
            found.append((start, find_layouts(start, method, **options)))
    return min(found, key=lambda one: one[1][0].step_seconds)


def _joint(problem: LayoutProblem, radius: int, top_k: int, seconds: float) -> list[Candidate]:
    """Run the joint search from where all other methods end, and from cuts even in forward + backward seconds."""
    layouts: list[Layout] = []
    for method in METHODS[:-1]:
        with suppress(UserError):  # a method that finds nothing that fits, or lacks figures, gives no start
            layouts += [c.layout for c in find_layouts(problem, method, radius=radius, top_k=top_k)]
    tables = problem.tables
    whole = (tables.forward + tables.backward).sum(axis=(1, 2))
    recomputed, columns = whole.copy(), problem.columns
    recomputed[columns.of_option[columns.whole]] += tables.recompute[columns.whole].sum(axis=(1, 2))
    weights = (whole, recomputed)
    starts = [even_edges(problem.per_layer(weight), problem.stages) for weight in weights]
    return [Candidate(*one) for one in joint_search(problem, starts, layouts, seconds, top_k)]


def judge(problem: LayoutProblem, cuts: list[Edges], recompute: str = "fewest") -> list[Candidate]:
    """Choose each cut's recomputed layers by the rule `recompute`, leave out cuts that do not fit, and sort by
    simulated step time. Raises the first UserError if none fits."""
    found, refusal = [], None
    for edges in cuts:
        try:
            layout = RECOMPUTE_RULES[recompute](problem, edges)
        except UserError as error:
            refusal = refusal or error
        else:
            found.append(Candidate(layout, problem.step_seconds(layout)))
    if not found and refusal:
        raise refusal
    return sorted(found, key=lambda candidate: candidate.step_seconds)


def make_plan(problem: LayoutProblem, candidates: list[Candidate], method: str) -> Plan:
    """Return the plan of the first candidate; the others become its alternatives."""
    profile, best = problem.whole_profile, candidates[0]
    layout = best.layout.moved(problem.layers_beside)
    return Plan.from_cuts(
        profile.chain,
        layout.edges[1:-1],
        layout.recompute,
        layout.recompute_cheap,
        num_microbatches=problem.microbatches,
        virtual_pipeline_model_parallel_size=problem.chunks,
        tensor_model_parallel_size=profile.tensor_model_parallel_size,
        expert_model_parallel_size=profile.expert_model_parallel_size,
        schedule=problem.schedule_name,
        lists=tuple(" ".join(action.word for action in actions) for actions in problem.lists or ()),
        tower=problem.beside.tower if problem.beside else None,
        model=profile.model,
        model_hash=profile.model_hash,
        profile_hash=profile.hash,
        trained=profile.trained,
        budgets=profile.budgets,
        method=method,
        memory_gib=problem.memory_bytes / GIB if np.isfinite(problem.memory_bytes) else None,
        predicted=predictions(problem, best.layout),
        alternatives=tuple(_alternative(problem, best, other) for other in candidates[1:]),
    )


def predictions(problem: LayoutProblem, layout: Layout) -> dict[str, Any]:
    """Return `predicted` of plan.json for a layout: seconds, bytes, bubble, and what limits each stage."""
    plays = [problem.simulate(layout, case) for case in range(problem.cases[0] * problem.cases[1])]
    costs = [problem.stage_costs(layout, case) for case in range(len(plays))]
    forward = np.mean([c.forward.mean(axis=1) for c in costs], axis=0)
    backward = np.mean([c.backward.mean(axis=1) for c in costs], axis=0)
    step, ideal = problem.step_seconds(layout), problem.ideal_seconds()
    peaks = problem.stage_peak_bytes(layout)
    return {
        "step_seconds": step,
        "bubble_fraction": float(np.mean([play.bubble_fraction for play in plays])),
        "ideal_seconds": ideal,
        "fraction_of_ideal": ideal / step,
        "stage_seconds": (forward + backward).tolist(),
        "stage_forward_seconds": forward.tolist(),
        "stage_backward_seconds": backward.tolist(),
        "stage_peak_bytes": peaks,
        "stage_limit": _limits(problem, layout, forward + backward, peaks),
    } | ({"tower_seconds": problem.beside.mean_seconds()} if problem.beside else {})


def _limits(problem: LayoutProblem, layout: Layout, seconds: Any, peaks: list[float]) -> list[str]:
    """Return for each stage "time" if its rank paces the pipeline, "memory" if it recomputes to fit, or both or
    "none"."""
    by_rank = problem.placement.by_rank(seconds)
    limits = []
    for stage, rank in enumerate(problem.placement.ranks_of):
        slow = by_rank[rank] >= NEAR_LIMIT * by_rank.max()
        full = any(layout.of_stage(stage)) or peaks[rank] >= NEAR_LIMIT * problem.memory_bytes
        limits.append(" and ".join(["time"] * bool(slow) + ["memory"] * full) or "none")
    return limits


def _alternative(problem: LayoutProblem, best: Candidate, other: Candidate) -> dict[str, Any]:
    slower = other.step_seconds / best.step_seconds - 1
    whole = sum(map(len, other.layout.recompute)) - sum(map(len, best.layout.recompute))
    cheap = sum(map(len, other.layout.recompute_cheap)) - sum(map(len, best.layout.recompute_cheap))
    slowest, reference = (float(_rank_seconds(problem, c.layout).max()) for c in (other, best))
    why = f"{slower:.2%} slower; its slowest rank works {slowest / reference - 1:+.2%}, {whole:+d} recomputed layers"
    why += f", {cheap:+d} of which it is what is cheap" * bool(cheap)
    layout = other.layout.moved(problem.layers_beside)
    edges = pairwise(layout.edges)
    stages = [StagePlan(layers, *layout.of_stage(number)).to_record() for number, layers in enumerate(edges)]
    predicted = predictions(problem, other.layout)
    return {"stages": stages, "step_seconds": other.step_seconds, "why": why, "predicted": predicted}


def _rank_seconds(problem: LayoutProblem, layout: Layout) -> Any:
    costs = problem.stage_costs(layout)
    return problem.placement.by_rank((costs.forward + costs.backward).sum(axis=1))
