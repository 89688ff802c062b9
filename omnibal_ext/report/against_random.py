"""Balanced packs against random batches: the gain of each kind of balance.

Random batches have the same samples, as many per iteration, padded as by a loader without packing.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import path_noted
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.recompute import recompute_all
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.modalities.modality import FURTHER_SIZES
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes

MOST_SAMPLES = 20_000
"""Most samples of a corpus that are packed at random for the comparison."""
STEPS = 200
"""Iterations whose samples are counted."""


def sizes_of(index: PackedIndex) -> Sizes | None:
    """Return the sizes that an index was packed from, mel frames included; None if the files are gone."""
    paths = [path_noted(index.folder.parent, name) for name in index.manifest["built_from"].get("sizes", ())]
    more = [size for size in FURTHER_SIZES if size in index.load_names]
    return Sizes.load(paths, more) if paths and all(path.exists() for path in paths) else None


def random_index(index: PackedIndex, sizes: Sizes, folder: Path) -> PackedIndex:
    """Pack the corpus, or a sample of it, in random padded batches: same ranks, about as many samples an iteration."""
    if len(sizes) > MOST_SAMPLES:
        chosen = np.random.default_rng(0).choice(len(sizes), MOST_SAMPLES, replace=False)
        sizes = sizes.take(np.sort(chosen))
    manifest = index.manifest
    a_pack = max(1, round(len(index.sample_ids) / index.num_packs))
    options = PackOptions(
        "random",
        manifest["sample_vit_budget"],
        manifest["sample_llm_budget"],
        {name: budget for name, budget in manifest.get("budgets", {}).items() if name in sizes.more},
        micro_batches=manifest["micro_batches"],
        data_parallel_size=manifest["data_parallel_size"],
        samples_per_pack=a_pack,
    )
    return build_index(sizes, folder, options, costs=index.costs)[0]


def contributions(problem: LayoutProblem, layout: Layout, index: PackedIndex, random: PackedIndex) -> dict[str, float]:
    """Return predicted samples per second of four setups: from random batches, cut by parameters and all recomputed, to
    the plan, each with one more kind of balance.

    Setups that exceed the memory are left out. A replicated tower counts as part of the plan's cuts.
    """
    ours = replace(problem, packs=packs_of_index(index, problem.profile, problem.microbatches, 8))
    cut = replace(ours, profile=problem.whole_profile, beside=None, lists=None) if problem.beside else ours
    theirs = replace(cut, packs=_wide_packs(random, problem), lists=None)
    samples = [_samples(one, problem.microbatches) for one in (random, index)]
    setups = (
        ("random batches, cut by parameters, all recomputed", theirs, samples[0], "parameters"),
        ("+ data: packs", cut, samples[1], "parameters"),
        ("+ model: the plan's cuts", ours, samples[1], "plan"),
        ("+ memory: the plan", ours, samples[1], "whole plan"),
    )
    found = {}
    for name, one, count, how in setups:
        try:
            found[name] = count / one.step_seconds(_layout(one, layout, how))
        except UserError:
            continue
    return found


def _samples(index: PackedIndex, microbatches: int) -> float:
    """Return the mean number of samples in an iteration, of the first `STEPS` of epoch 0."""
    iterations = epoch_iterations(PackStream(index, index.global_batch // microbatches, microbatches))[:STEPS]
    counts = np.where(iterations >= 0, np.diff(index.pack_offsets)[iterations], 0)
    return float(counts.sum(axis=(1, 2)).mean())


def _wide_packs(random: PackedIndex, problem: LayoutProblem) -> PackSizes:
    """Return packs of the random batches, read with budgets raised in a copy of the profile: padding exceeds its
    own."""
    wide = replace(problem.profile, budgets=random.budgets)
    return packs_of_index(random, wide, problem.microbatches, 8)


def _layout(problem: LayoutProblem, plan: Layout, how: str) -> Layout:
    if how == "parameters":
        return find_layouts(problem, "parameters", recompute="full")[0].layout
    return recompute_all(problem, plan.edges) if how == "plan" else plan
