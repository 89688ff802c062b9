"""Plans and packs for the tests of the report."""

from pathlib import Path

import numpy as np

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_layouts, make_plan
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.sizes import Sizes

RANKS, REPLICAS, MICROBATCHES = 4, 2, 6


def planned(folder: Path, samples: int = 400, schedule: str = "1f1b") -> Path:
    """Samples, packs, profile and plan of a 6B + 20B model in a folder; the plan's path."""
    random = np.random.default_rng(0)
    tiles = random.choice([0, 1, 3, 7], samples, p=[0.05, 0.7, 0.15, 0.1])
    tokens = np.minimum(256 * tiles + random.integers(8, 400, samples), 4096)
    path = folder / "sizes.npz"
    Sizes.from_arrays(tiles, tokens).save(path)
    options = PackOptions("balanced", 6, 4096, micro_batches=MICROBATCHES, data_parallel_size=REPLICAS)
    built_from = {"sizes": {str(path): ""}}
    index, _ = build_index(Corpus.load([path]), folder / "packs", options, built_from)
    profile = analytic_profile(preset("internvl-chat-1.5"), "a100", 6, 4096, 4)
    profile.save(folder / "profile.json")
    packs = packs_of_index(index, profile, MICROBATCHES, 1)
    problem = LayoutProblem(profile, RANKS, MICROBATCHES, 1, schedule, 74 * 2**30, packs)
    plan = make_plan(problem, find_layouts(problem, "profile"), "profile")
    plan.save(folder / "plan.json")
    return folder / "plan.json"
