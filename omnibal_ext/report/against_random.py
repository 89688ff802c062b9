"""Balanced beside random: the load of ranks over the steps, and what each kind of balance brings.

Random batches are of the same samples, as many an iteration, padded, as a loader without a packer makes them.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.recompute import recompute_all
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.packing.ordering.metrics import wait
from omnibal_ext.sizes import Sizes

MOST_SAMPLES = 20_000
"""Of a large corpus, packed at random for the comparison."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Seconds of work that each worker has in every step, float64 [steps, workers].

    Workers are data-parallel ranks; with one of them, the microbatches of its pipeline.
    """

    workers: str
    seconds: NDArray[np.float64]
    samples: float
    """Samples a step."""

    @property
    def spread(self) -> float:
        """Share of the workers' time that is waiting for the fullest."""
        return wait(self.seconds[..., None])


def sizes_of(index: PackedIndex) -> Sizes | None:
    """The sizes that an index was packed from, where the files are still there."""
    paths = list(index.manifest["built_from"].get("sizes", ()))
    return Sizes.load(paths) if paths and all(Path(path).exists() for path in paths) else None


def random_index(index: PackedIndex, sizes: Sizes, folder: Path) -> PackedIndex:
    """The same corpus in random padded batches, for the same ranks and about as many samples an iteration."""
    if len(sizes) > MOST_SAMPLES:
        chosen = np.random.default_rng(0).choice(len(sizes), MOST_SAMPLES, replace=False)
        sizes = sizes.take(np.sort(chosen))
    manifest = index.manifest
    a_pack = max(1, round(len(index.sample_ids) / index.num_packs))
    options = PackOptions(
        "random",
        manifest["sample_vit_budget"],
        manifest["sample_llm_budget"],
        micro_batches=manifest["micro_batches"],
        data_parallel_size=manifest["data_parallel_size"],
        samples_per_pack=a_pack,
    )
    return build_index(sizes, folder, options, costs=index.costs)[0]


def loads_of(index: PackedIndex, costs: PackCosts, replicas: int, steps: int = 200) -> Loads:
    """The first steps of epoch 0, of so many data-parallel ranks."""
    stream = PackStream(index, replicas, index.global_batch // replicas)
    iterations = epoch_iterations(stream)[:steps]
    loads = np.asarray(index.loads[np.maximum(iterations, 0).ravel()])
    seconds = costs.waited_for(loads, index.load_names, one_sum=True)[:, 0].reshape(iterations.shape)
    seconds = np.where(iterations >= 0, seconds, 0.0)
    samples = np.where(iterations >= 0, np.diff(index.pack_offsets)[iterations], 0).sum(axis=(1, 2)).mean()
    if replicas > 1:
        return Loads("data-parallel rank", seconds.sum(axis=2), float(samples))
    return Loads("microbatch", seconds[:, 0], float(samples))


@dataclass(frozen=True, slots=True)
class Contribution:
    """A way to train, and its predicted samples a second."""

    name: str
    samples_per_second: float
    needed: float
    """Share of the ranks' time that is needed work."""


def contributions(
    problem: LayoutProblem, layout: Layout, index: PackedIndex, random: PackedIndex
) -> list[Contribution]:
    """From random batches, cut by parameters, all recomputed, one kind of balance after the other to the plan.

    Ways that do not fit the memory are left out. A tower beside the pipeline comes with the plan's cuts.
    """
    ours = replace(problem, packs=packs_of_index(index, problem.profile, problem.microbatches, 8))
    cut = replace(ours, profile=problem.whole_profile, beside=None, lists=None) if problem.beside else ours
    theirs = replace(cut, packs=_wide_packs(random, problem), lists=None)
    costs = PackCosts.of_profile(problem.whole_profile)
    samples = [loads_of(one, costs, one.global_batch // problem.microbatches).samples for one in (random, index)]
    needed_a_sample = ours.ideal_seconds() * problem.ranks / samples[1]
    ways = (
        ("random batches, cut by parameters, all recomputed", theirs, samples[0], "parameters"),
        ("+ data: packs", cut, samples[1], "parameters"),
        ("+ model: the plan's cuts", ours, samples[1], "plan"),
        ("+ memory: the plan", ours, samples[1], "whole plan"),
    )
    found = []
    for name, one, count, how in ways:
        try:
            step = one.step_seconds(_layout(one, layout, how))
        except UserError:
            continue
        found.append(Contribution(name, count / step, needed_a_sample * count / (step * problem.ranks)))
    return found


def _wide_packs(random: PackedIndex, problem: LayoutProblem) -> PackSizes:
    """Padded batches exceed the budgets that the profile is of; only bytes are limited by those, seconds are not."""
    wide = replace(problem.profile, vit_budget=random.vit_budget, llm_budget=random.llm_budget)
    return packs_of_index(random, wide, problem.microbatches, 8)


def _layout(problem: LayoutProblem, plan: Layout, how: str) -> Layout:
    if how == "parameters":
        return find_layouts(problem, "parameters", recompute="full")[0].layout
    return recompute_all(problem, plan.edges) if how == "plan" else plan
