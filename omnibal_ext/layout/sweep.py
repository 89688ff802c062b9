"""Choice of more than the layout: budgets, parallel sizes, microbatches and schedule, for given GPUs and global batch.

1. Every setting whose tensor x pipeline x data sizes make up the GPUs is tried, with chunks, schedules and budgets.
2. Microbatches: as many packs as hold the global batch's samples, shared by the data-parallel ranks.
3. The layout of the chosen method on the real packs; what cannot be planned is kept with the reason.
4. Judged on as many more iterations as it takes for the noise to be small; ranked by predicted samples a second.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import Candidate, find_plan
from omnibal_ext.layout.workload import PackedCorpus, Workload, pack_corpus, packed_once
from omnibal_ext.modalities.modality import Budgets
from omnibal_ext.packing.costs import PackCosts, are_patches
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import lower_bound_packs
from omnibal_ext.packing.ordering.order_packs import MANY
from omnibal_ext.packing.packers.budgets import further_budgets_for
from omnibal_ext.sizes import Sizes

SEARCHED, JUDGED = 6, 32
"""Iterations on which layouts and lists are searched, and on which the best is judged, at least."""
MOST_NOISE = 0.003
"""Relative standard error of an iteration's mean seconds above which more iterations are judged."""
ProfileSource = Callable[[int, int, int, int, int], Profile]
"""(vit_budget, llm_budget, tensor, data, expert parallel size) -> profile; UserError where it has none."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Parallel sizes, schedule and budgets that a sweep tries together."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    data_parallel_size: int
    chunks: int
    schedule: str
    vit_budget: int
    llm_budget: int
    expert_model_parallel_size: int = 1

    def __str__(self) -> str:
        sizes = (
            f"TP {self.tensor_model_parallel_size} PP {self.pipeline_model_parallel_size} DP {self.data_parallel_size}"
        )
        if self.expert_model_parallel_size > 1:
            sizes += f" EP {self.expert_model_parallel_size}"
        return f"{sizes}, {self.schedule} x {self.chunks}, {self.vit_budget} tiles {self.llm_budget} tokens"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A setting's plan and predicted figures; if it has no plan, `problem` is None and `reason` says why."""

    setting: Setting
    reason: str = ""
    problem: LayoutProblem | None = None
    candidates: tuple[Candidate, ...] = ()
    samples_per_second: float = 0.0
    noise: float = 0.0
    """Relative standard error of `samples_per_second`, as only some iterations of an epoch are judged."""
    step_seconds: float = 0.0
    """Mean of the judged iterations."""
    judged: Workload | None = None
    """Iterations on which the layout was judged."""
    fraction_of_ideal: float = 0.0
    """Seconds of the needed work (no padding, no recomputation) spread evenly over all ranks / predicted step."""

    def to_record(self) -> dict[str, Any]:
        """Return the setting, its figures, and the reason where there is no plan, for scripts."""
        return asdict(self.setting) | {
            "num_microbatches": self.problem.microbatches if self.problem else None,
            "samples_per_second": self.samples_per_second,
            "noise": self.noise,
            "iterations": len(self.judged.packs.tiles) if self.judged else 0,
            "fraction_of_ideal": self.fraction_of_ideal,
            "reason": self.reason,
        }


def settings(
    gpus: int,
    tensor_sizes: Sequence[int],
    pipeline_sizes: Sequence[int],
    chunks: Sequence[int],
    schedules: Sequence[str],
    budgets: Sequence[tuple[int, int]],
    expert_sizes: Sequence[int] = (1,),
) -> Iterator[Setting]:
    """Yield all settings that use exactly `gpus`; one pipeline rank has one chunk and one schedule.

    Expert-parallel sizes are those that divide the tensor x data ranks of a pipeline rank.
    """
    for t in tensor_sizes:
        for p in pipeline_sizes:
            if gpus % (t * p):
                continue
            d = gpus // (t * p)
            experts = [e for e in expert_sizes if t * d % e == 0]
            orders = product(chunks, schedules) if p > 1 else [(1, "1f1b")]
            for (v, schedule), (vit, llm), e in product(orders, budgets, experts):
                yield Setting(t, p, d, v, schedule, vit, llm, e)


def sweep(
    points: Iterable[Setting],
    sizes: Sizes,
    global_batch: int,
    memory_bytes: float,
    profile_source: ProfileSource,
    method: str = "joint",
    packing: str = "balanced",
    seconds: float = 1.0,
    further: Budgets | None = None,
) -> list[Outcome]:
    """Judge all settings; return outcomes, most samples a second first, those that cannot be planned last.

    `global_batch` counts samples of an iteration over all data-parallel ranks; `seconds` limits each joint search;
    `further`: budgets of mel frames and the like in all settings, where `sizes` have some; by default as tokens bring.
    Packs of patches are balanced by the profile of the first setting, as a tile of the model by default is no patch.
    """
    points, make = list(points), packed_once()
    costs = _costs_of_patches(points, profile_source) if are_patches(sizes) else None

    def options_of(vit: int, llm: int, microbatches: int, data_parallel: int) -> PackOptions:
        return PackOptions(packing, vit, llm, further_budgets_for(sizes, llm, further), microbatches, data_parallel)

    @cache
    def packed(*asked: int) -> PackedCorpus:
        return pack_corpus(sizes, options_of(*asked), make, costs)

    @cache
    def samples_per_pack(vit: int, llm: int) -> float:
        options = options_of(vit, llm, 8, 1)
        if lower_bound_packs(sizes, options.all_budgets) < 2 * MANY:  # of more, twins are packed
            options = replace(options, seconds=0.0)  # effort changes no number of packs
        return float(pack_corpus(sizes, options, make, costs).samples.mean())

    outcomes = []
    for point in points:
        try:
            vit, llm, d = point.vit_budget, point.llm_budget, point.data_parallel_size
            microbatches = max(1, round(global_batch / samples_per_pack(vit, llm) / d))
            corpus = packed(vit, llm, microbatches, d)
            tensor, experts = point.tensor_model_parallel_size, point.expert_model_parallel_size
            profile = profile_source(corpus.vit_budget, corpus.llm_budget, tensor, d, experts)
            outcomes.append(judge_setting(point, profile, corpus, memory_bytes, method, seconds))
        except UserError as error:
            outcomes.append(Outcome(point, reason=str(error)))
    return sorted(outcomes, key=lambda outcome: -outcome.samples_per_second)


def _costs_of_patches(points: Sequence[Setting], profile_source: ProfileSource) -> PackCosts | None:
    """Return the costs by which packs of patches are balanced, from the profile of the first setting that has one.

    None if `profile_source` raises UserError for all settings.
    """
    for one in points:
        shape = one.tensor_model_parallel_size, one.data_parallel_size, one.expert_model_parallel_size
        with suppress(UserError):
            return PackCosts.of_profile(profile_source(one.vit_budget, one.llm_budget, *shape))
    return None


def judge_setting(
    point: Setting,
    profile: Profile,
    corpus: PackedCorpus,
    memory_bytes: float,
    method: str = "joint",
    seconds: float = 1.0,
    recompute: str = "fewest",
) -> Outcome:
    """Plan one setting on some packs, and judge it on more. Raises UserError where it cannot be planned."""
    microbatches = corpus.iterations.shape[-1]
    shape = (point.pipeline_model_parallel_size, microbatches, point.chunks, point.schedule, memory_bytes)
    problem = LayoutProblem(profile, *shape, packs=corpus.workload(SEARCHED).packs)
    problem, candidates = find_plan(problem, method, recompute=recompute, seconds=seconds)
    count, of = JUDGED, len(corpus.iterations)
    while True:
        work = corpus.workload(count)
        taken = replace(problem, packs=work.packs).iteration_seconds(candidates[0].layout)
        noise = _noise(taken, of)
        if noise <= MOST_NOISE:  # of all iterations there is none
            break
        count *= 2
    ideal = LayoutProblem(profile, *shape, packs=work.needed).ideal_seconds()
    step = float(taken.mean())
    return Outcome(point, "", problem, tuple(candidates), corpus.mean_samples / step, noise, step, work, ideal / step)


def _noise(seconds: NDArray[np.float64], of: int) -> float:
    """Return the relative standard error of the mean of `seconds`, drawn from `of` iterations; 0 for all or one."""
    count = len(seconds)
    if count in (1, of):
        return 0.0
    return float(seconds.std(ddof=1) / seconds.mean() * np.sqrt((1 - count / of) / count))
