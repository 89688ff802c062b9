"""Choosing more than the layout: budgets, parallel sizes, microbatches and schedule, for given GPUs and global batch.

1. Every setting whose tensor x pipeline x data sizes make up the GPUs is tried, with chunks, schedules and budgets.
2. Microbatches: as many packs as hold the global batch's samples, shared by the data-parallel ranks.
3. The layout of the chosen method on the real packs; what cannot be planned is kept with the reason.
4. Ranked by predicted samples a second.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from typing import Any

from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import Candidate, find_plan
from omnibal_ext.layout.workload import Workload, pack_workload
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes

ProfileSource = Callable[[int, int, int, int, int], Profile]
"""(vit_budget, llm_budget, tensor, data, expert parallel size) -> profile; UserError where it has none."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the sweep."""

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
    """What a setting gives. Without a problem there is only the reason why not."""

    setting: Setting
    reason: str = ""
    problem: LayoutProblem | None = None
    candidates: tuple[Candidate, ...] = ()
    samples_per_second: float = 0.0
    fraction_of_ideal: float = 0.0
    """Needed work (no padding, no recomputation) spread evenly over all ranks, over the predicted step."""

    def to_record(self) -> dict[str, Any]:
        """For scripts: the setting, its figures, and the reason where there is no plan."""
        return asdict(self.setting) | {
            "num_microbatches": self.problem.microbatches if self.problem else None,
            "samples_per_second": self.samples_per_second,
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
    """All settings that use exactly `gpus`; one pipeline rank has one chunk and one schedule.

    Experts are dealt over as many ranks as divide those of a pipeline rank.
    """
    for t in tensor_sizes:
        for p in pipeline_sizes:
            if gpus % (t * p):
                continue
            d = gpus // (t * p)
            dealt = [e for e in expert_sizes if t * d % e == 0]
            orders = product(chunks, schedules) if p > 1 else [(1, "1f1b")]
            for (v, schedule), (vit, llm), e in product(orders, budgets, dealt):
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
) -> list[Outcome]:
    """Outcomes of all settings, most samples a second first, those that cannot be planned last.

    `global_batch` counts samples of an iteration over all data-parallel ranks; `seconds` limits each joint search.
    """

    @cache
    def workload(vit: int, llm: int, data_parallel: int, microbatches: int) -> Workload:
        options = PackOptions(packing, vit, llm, micro_batches=microbatches, data_parallel_size=data_parallel)
        return pack_workload(sizes, options)

    @cache
    def samples_per_pack(vit: int, llm: int) -> float:
        few = workload(vit, llm, 1, 8)
        return few.samples / 8

    outcomes = []
    for point in points:
        try:
            vit, llm, d = point.vit_budget, point.llm_budget, point.data_parallel_size
            microbatches = max(1, round(global_batch / samples_per_pack(vit, llm) / d))
            work = workload(vit, llm, d, microbatches)
            tensor, experts = point.tensor_model_parallel_size, point.expert_model_parallel_size
            profile = profile_source(work.vit_budget, work.llm_budget, tensor, d, experts)
            outcomes.append(judge_setting(point, profile, work, memory_bytes, method, seconds))
        except UserError as error:
            outcomes.append(Outcome(point, reason=str(error)))
    return sorted(outcomes, key=lambda outcome: -outcome.samples_per_second)


def judge_setting(
    point: Setting,
    profile: Profile,
    work: Workload,
    memory_bytes: float,
    method: str = "joint",
    seconds: float = 1.0,
    recompute: str = "fewest",
) -> Outcome:
    """Plan one setting. Raises UserError where it cannot be planned."""
    shape = (point.pipeline_model_parallel_size, work.packs.tiles.shape[-1], point.chunks, point.schedule, memory_bytes)
    problem = LayoutProblem(profile, *shape, packs=work.packs)
    problem, candidates = find_plan(problem, method, recompute=recompute, seconds=seconds)
    step = candidates[0].step_seconds
    ideal = LayoutProblem(profile, *shape, packs=work.needed).ideal_seconds()
    return Outcome(point, "", problem, tuple(candidates), work.samples / step, ideal / step)
