"""Plans with a replicated tower: first the chain behind it as any chain, then E and V among its actions.

1. For a few choices of what is kept from E to V (all; inputs alone of half, or of all, of the tower's layers), those
   with most bytes first: subtract the tower's bytes from the memory, and plan the chain behind it as any chain.
2. Search the ranks that encode each microbatch and the positions of E and V (`insertion_search`); what fits is
   simulated on all packs.
3. Where ranks are short of bytes with the outputs that wait there, plan once more with so much less memory.
4. Take the fastest of all, and search its positions longer. Where one recomputes nothing of the language model,
   no later one can be faster.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from omnibal_ext.arrays import Ints
from omnibal_ext.costs.tower import TowerCosts, language_profile, owners_by_bytes, rest_profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.beside import TowerBeside, largest_share
from omnibal_ext.layout.insertion_search import insertion_costs, searched_insertions
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import Candidate, find_plan
from omnibal_ext.plan_tower import LAYOUTS, Tower, tower_ends
from omnibal_ext.schedules.actions import Beside
from omnibal_ext.schedules.weaving import NONE, first_and_last, woven
from omnibal_ext.units import in_bytes

Planned = tuple[LayoutProblem, Candidate]
Search = Callable[[float], tuple[Planned | None, float, int]]
"""Search for positions within so many seconds, returns what `_best_insertions` does."""
TOWER_LAYOUTS = (*LAYOUTS, "auto")
JUDGED = 4
"""Number of positions that fit, the fastest on some iterations, which are simulated on all."""
TRIES = 3
"""Number of times that each choice of what is kept is planned, each with less memory by the bytes it was short of."""


@dataclass(frozen=True)
class Kept:
    """What a rank keeps from E to V, the tower's forward and backward."""

    recompute: tuple[int, ...]
    """Encoders' layers of which only the input is kept."""
    packs: float
    """Packs between E and V that a rank has room for."""


def plan_tower(
    problem: LayoutProblem, tower: str, method: str, *, recompute: str = "fewest", radius: int = 1, top_k: int = 10,
    seconds: float = 4.0,
) -> tuple[LayoutProblem, list[Candidate], dict[str, Any]]:  # fmt: skip
    """Plan with encoders cut into stages ("cut"), replicated (as "beside"), or the faster of both ("auto").

    Also returns what plan.json says of the choice: step seconds of each layout (or why it has no plan), those of the
    language model alone, without the tower's work, and the share of that throughput that the plan reaches. Raises
    UserError where nothing fits.
    """
    options: dict[str, Any] = {"recompute": recompute, "radius": radius, "top_k": top_k}
    if tower == "cut":
        return *find_plan(problem, method, seconds=seconds, **options), {}
    plans: dict[str, tuple[LayoutProblem, list[Candidate]]] = {}
    said: dict[str, Any] = {}
    for name in ("cut", *tower_ends(problem.profile.chain)) if tower == "auto" else (tower,):
        plan: Callable[..., Any] = find_plan if name == "cut" else partial(plan_beside, layout=name)
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
        language = replace(problem, profile=language_profile(problem.profile))
        text = find_plan(language, method, seconds=seconds, **options)[1][0].step_seconds
        said |= {"text_only_step_seconds": text, "share_of_text_only": text / step}
    return *plans[chosen], {"tower": {"road": chosen, **said}}


def plan_beside(
    problem: LayoutProblem, method: str, *, layout: str = "beside", seconds: float = 4.0, **options: Any
) -> tuple[LayoutProblem, list[Candidate]]:
    """Find the fastest plan with a replicated tower, for a `problem` whose profile is of the whole chain.

    The returned problem is of the chain behind the tower (`tower_ends`), with the tower's costs and lists of actions;
    it has one candidate. Raises UserError where nothing fits, as `find_plan` does, and for profiles without costs of
    whole layers.
    """
    if layout not in (ends := tower_ends(problem.profile.chain)):
        which = " or ".join(ends)
        raise UserError(f"--tower {layout}: {problem.profile.model} has other encoders; use --tower {which}")
    if problem.ranks == 1:
        raise UserError("a replicated tower needs two pipeline ranks or more, got 1: use --tower cut")
    if problem.packs is not None and problem.packs.widths is not None:
        raise UserError(
            "packs wider than a rank go with no tower beside the pipeline: --tower cut, or pack without --widths"
        )
    costs = TowerCosts.of(problem.profile, problem.profile.chain.index(ends[layout]))
    found: list[tuple[Planned, Search]] = []
    refusal: UserError | None = None
    choices = list(_kept_choices(problem, costs))
    for kept in choices:
        try:
            found.append(_plan_kept(problem, costs, kept, method, seconds / len(choices), options))
        except UserError as error:
            refusal = refusal or error
            continue
        stages = found[-1][0][1].layout
        if not (any(stages.recompute) or any(stages.recompute_cheap)):
            break
    if not found:
        assert refusal is not None
        raise refusal
    best, search = min(found, key=lambda one: one[0][1].step_seconds)
    longer, *_ = search(seconds)
    whole, candidate = min((best, longer or best), key=lambda planned: planned[1].step_seconds)
    return whole, [candidate]


def _kept_choices(problem: LayoutProblem, costs: TowerCosts) -> Iterator[Kept]:
    """Yield what may be kept from E to V, most bytes first; for a tower without backward, that nothing is."""
    if not costs.trained:
        yield Kept((), 0)
        return
    share, vit = problem.microbatches / problem.ranks, costs.vit_layers
    yield from (Kept((), packs) for packs in dict.fromkeys((np.ceil(share), min(share, 2.0))))
    yield Kept(vit[::2], min(share, 2.0))
    yield Kept(vit, min(share, 3.0))


def _plan_kept(
    problem: LayoutProblem, costs: TowerCosts, kept: Kept, method: str, seconds: float, options: dict[str, Any]
) -> tuple[Planned, Search]:
    """Plan the chain behind the tower, then E and V, with so much kept from E to V; also return the search for
    positions, to go on with. Raises UserError if nothing fits after `TRIES`."""
    profile = problem.profile
    owners = owners_by_bytes(costs.owner_bytes(), problem.ranks * profile.tensor_model_parallel_size)
    encoding_ranks = ((0,),) * problem.microbatches
    tower = Tower(costs.layers, owners, encoding_ranks, "bubbles", kept.recompute, costs.rates)
    beside = TowerBeside(tower, costs, profile, problem.ranks, problem.packs)
    share = largest_share(costs, costs.full_pack, profile.tensor_model_parallel_size)
    held, given = (
        float(costs.total(of_unit, share))
        for of_unit in (
            lambda size: (
                costs.kept_bytes(size, kept.recompute) * kept.packs + costs.working_bytes(size, kept.recompute)
            ),
            costs.output_bytes,
        )
    )
    waiting = given * min(problem.microbatches, 2 * problem.ranks)
    less = float(beside.fixed_bytes.max()) + held + waiting
    for _ in range(TRIES):
        if less >= problem.memory_bytes:
            rank = beside.fixed_bytes.argmax()
            raise UserError(
                f"pipeline rank {rank} needs {in_bytes(less)} for the tower beside the pipeline (copies, sums, "
                f"what is kept and waits), of {in_bytes(problem.memory_bytes)}: cut the chain, or use more memory"
            )
        rest = rest_profile(profile, costs.layers)
        language = replace(problem, profile=rest, memory_bytes=problem.memory_bytes - less)
        language, candidates = find_plan(language, method, seconds=seconds / 2, **options)
        search = partial(_best_insertions, problem, language, candidates[0].layout, beside, waiting)
        found, short, fullest = search(seconds / 2)
        if found is not None:
            return found, search
        less, waiting = less + short, waiting + short
    raise UserError(
        f"pipeline rank {fullest} is {in_bytes(short)} short of {in_bytes(problem.memory_bytes)} with the "
        "tower beside the pipeline: cut the chain, or use more memory"
    )


def _best_insertions(
    problem: LayoutProblem, language: LayoutProblem, layout: Layout, beside: TowerBeside, waiting: float, seconds: float
) -> tuple[Planned | None, float, int]:
    """Search positions of E and V for a layout; return the fastest plan that fits, or None, then the fewest bytes that
    any positions lack (negative: free), and the rank that lacks them."""
    fitting: list[Planned] = []
    least_short, fullest = np.inf, 0
    for insertions in searched_insertions(
        language, layout, insertion_costs(problem, language, layout, beside, waiting), beside, seconds
    ):
        whole = _with_insertions(problem, language, beside, insertions)
        peaks = whole.stage_peak_bytes(layout)
        short = max(peaks) - problem.memory_bytes
        least_short, fullest = min((least_short, fullest), (short, peaks.index(max(peaks))))
        if short <= 0:
            fitting.append((whole, Candidate(layout, whole.step_seconds(layout))))
        if len(fitting) == JUDGED:
            break
    return min(fitting, key=lambda planned: planned[1].step_seconds, default=None), float(least_short), fullest


def _with_insertions(
    problem: LayoutProblem, language: LayoutProblem, beside: TowerBeside, insertions: Ints
) -> LayoutProblem:
    """Return the problem with E and V inserted into its lists at these points, and with all of its memory again."""
    encoding_ranks = tuple(
        tuple(np.flatnonzero(insertions[0, :, m] != NONE).tolist()) for m in range(problem.microbatches)
    )
    mode = "bubbles" if beside.costs.trained else "ahead"
    if mode == "bubbles" and np.array_equal(insertions, first_and_last(language.schedule, Beside(encoding_ranks))):
        mode = "first"
    beside = replace(beside, tower=replace(beside.tower, encoding_ranks=encoding_ranks, mode=mode))
    return replace(
        language, lists=woven(language.schedule, insertions), beside=beside, memory_bytes=problem.memory_bytes
    )
