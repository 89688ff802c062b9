"""What data, model and memory balance bring, trained: the component table of OmniBal (arXiv 2407.20761), on two ranks.

    python benchmarks/end_to_end.py [--rounds 3] [--samples 128]

A model with the cost ratios of InternViT-6B + InternLM2-20B and samples with the published shape (a tile is 100 tokens
here, 256 there; packs hold 9 tiles and 1600 tokens, there 4096) are trained the unbalanced way, then with one kind of
balance after the other, then our way. Every row trains on the same samples once a round, in turns with the others, on
the same two gloo ranks, within one memory budget: what the paper's cut needs with nothing recomputed, as in its plan
for 80 GB. The unbalanced row would need several times as much at its worst microbatch; that is printed. Needs two
idle cores.

Two tables: the ranks as a pipeline, and data-parallel, where there is no model to balance. "of the ideal" is the needed
work (the profile's, without padding and recomputation) over both ranks' time; "of text-only" the LLM's tokens a second
over those of the same language model on text packs of as many tokens, planned for them. "loss" is that of the first and
of the last time that a row saw all samples, whose words can be learned; what real pictures teach, and held-out answers,
is what scripts/quickstart.sh compares. The last lines are the ratios of ours to unbalanced.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.two_ranks import Case, Contents, Llama, Packs, Shape, profile, sizes_of, train
from omnibal_ext.console import print_json, print_table
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.errors import UserError, run_tool
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import Candidate, find_layouts, make_plan
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream, epoch_iterations
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from omnibal_ext.sizes import Sizes

VIT_BUDGET, LLM_BUDGET, TILE_TOKENS = 9, 1600, 100
SHAPE = Shape(
    "shaped like 6B+20B",
    VisionArchitecture(6, 96, 4, 384, patch_size=8, image_size=160),
    Llama(6, 192, 4, 2, 576, vocab_size=512),
    VIT_BUDGET,
    LLM_BUDGET,
)
A_STEP = 128
"""Samples of an iteration, the paper's global batch."""
A_BATCH = 4
"""Samples of a random batch."""
NOTHING = np.zeros(0, dtype=np.int64)
"""The samples of an empty pack."""
ROOM = 1.02
"""The memory budget over what the simulator says that the paper's cut needs."""
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_h1", 2))


@dataclass(frozen=True)
class Way:
    """A row: how samples become packs, where the model is cut, what is recomputed."""

    name: str
    packing: str
    method: str
    recompute: str
    schedules: Sequence[tuple[str, int]] = (("1f1b", 1),)


PIPELINE = (
    Way("unbalanced Megatron", "random", "parameters", "full"),
    Way("+ data", "isf", "parameters", "full"),
    Way("+ model", "isf", "bmp", "full"),
    Way("+ memory", "isf", "bmp", "fewest"),
    Way("ours", "balanced", "joint", "fewest", SCHEDULES),
)
DATA_PARALLEL = (
    Way("unbalanced", "random", "layers", "full"),
    Way("+ data", "isf", "layers", "full"),
    Way("ours", "balanced", "layers", "fewest"),
)


@dataclass(frozen=True)
class Work:
    """The samples, packed one way: the packs of every iteration, in the order the ranks take them."""

    iterations: tuple[Packs, ...]
    contents: tuple[Contents, ...]
    microbatches: int

    def sizes(self, ranks: int) -> PackSizes:
        """For the planner: int64 [iterations, data-parallel ranks, microbatches]."""
        found = [sizes_of(packs) for packs in self.iterations]
        shape = (len(found), self.microbatches, ranks)
        columns = (np.concatenate([getattr(one, name) for one in found]) for name in ("tiles", "tokens", "squares"))
        return PackSizes(*(np.ascontiguousarray(column.reshape(shape).swapaxes(1, 2)) for column in columns))

    def without_images(self) -> "Work":
        """Text packs of as many tokens."""
        iterations = tuple(tuple((0, lengths) for _, lengths in packs) for packs in self.iterations)
        contents = tuple(
            tuple(tuple((number, 0, tokens) for number, _, tokens in samples) for samples in packs)
            for packs in self.contents
        )
        return replace(self, iterations=iterations, contents=contents)

    def words(self) -> list[int]:
        """What each iteration is trained on: all but the first word of every sample."""
        return [
            sum(max(0, tokens - TILE_TOKENS * tiles - 1) for samples in packs for _, tiles, tokens in samples)
            for packs in self.contents
        ]


@dataclass(frozen=True)
class Row:
    """What training a way gave."""

    way: Way
    plan: Plan
    microbatches: int
    seconds: float
    """For all samples, the median over rounds."""
    peak_bytes: float
    of_ideal: float
    losses: list[float]
    """Of each pass over all samples."""


def corpus(samples: int, seed: int) -> Sizes:
    """Tiles 1 or 3 to 7, some none; log-normal text: the published mixture, in tokens of which a tile has fewer."""
    random = np.random.default_rng(seed)
    tiles = random.choice([0, 1, 3, 4, 5, 7], samples, p=[0.03, 0.70, 0.11, 0.05, 0.05, 0.06])
    text = np.maximum(2, random.lognormal(np.log(170 * TILE_TOKENS / 256), 0.8, samples)).astype(np.int64)
    return Sizes.from_arrays(tiles, np.minimum(TILE_TOKENS * tiles + text, LLM_BUDGET))


def pack(sizes: Sizes, packing: str, replicas: int, costs: PackCosts, iterations: int) -> Work:
    """All samples in so many iterations; each rank's microbatches are as many as that takes."""
    count = _packs(sizes, packing)
    microbatches = -(-count // (iterations * replicas))
    options = PackOptions(
        packing, VIT_BUDGET, LLM_BUDGET, micro_batches=microbatches, data_parallel_size=replicas,
        samples_per_pack=A_BATCH, last_iteration="empty",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        index, _ = build_index(sizes, Path(folder) / "index", options, costs=costs)
        chosen = epoch_iterations(PackStream(index, replicas, microbatches))
        held = [[index.samples(p) if p >= 0 else NOTHING for p in _turns(one)] for one in chosen]
        filled = [tuple(_of_pack(samples, sizes, index.pad) for samples in packs) for packs in held]
        contents = [tuple(_content(samples, sizes) for samples in packs) for packs in held]
    return Work(tuple(filled), tuple(contents), microbatches)


def _packs(sizes: Sizes, packing: str) -> int:
    options = PackOptions(packing, VIT_BUDGET, LLM_BUDGET, samples_per_pack=A_BATCH)
    with tempfile.TemporaryDirectory() as folder:
        return build_index(sizes, Path(folder) / "index", options)[0].num_packs


def _turns(iteration: NDArray[np.int64]) -> list[int]:
    """Pack numbers [replicas, microbatches] as ranks take them: every rank's first, every rank's second, ..."""
    return [int(number) for number in iteration.T.ravel()]


def _content(samples: NDArray[np.int64], sizes: Sizes) -> tuple[tuple[int, int, int], ...]:
    """Number, tiles and tokens of every sample."""
    return tuple((int(sample), int(sizes.tiles[sample]), int(sizes.tokens[sample])) for sample in samples)


def _of_pack(samples: NDArray[np.int64], sizes: Sizes, pad: bool) -> tuple[int, tuple[int, ...]]:
    """Tiles, and lengths as they are run; an empty pack has one token, which the models need."""
    if not len(samples):
        return 0, (1,)
    lengths = sizes.tokens[samples].tolist()
    return int(sizes.tiles[samples].sum()), tuple([max(lengths)] * len(lengths) if pad else lengths)


def best_plan(way: Way, costs: Profile, work: Work, ranks: int, memory: float) -> Plan:
    """The way's plan; of several schedules the one predicted fastest."""
    found = []
    for schedule, chunks in way.schedules:
        packs = work.sizes(2 // ranks)
        problem = LayoutProblem(costs, ranks, work.microbatches, chunks, schedule, memory, packs)
        try:
            candidates = find_layouts(problem, way.method, recompute=way.recompute)
        except UserError:
            continue
        found.append((candidates[0].step_seconds, problem, candidates))
    if not found:
        raise UserError(f"{way.name}: no plan keeps {memory / 2**20:.1f} MiB")
    _, problem, candidates = min(found, key=lambda one: one[0])
    return make_plan(problem, [Candidate(candidates[0].layout, candidates[0].step_seconds)], way.method)


def bare_bytes(way: Way, costs: Profile, work: Work, ranks: int) -> float:
    """What the fullest rank needs at its worst microbatches with nothing recomputed, by the simulator."""
    problem = LayoutProblem(costs, ranks, work.microbatches, packs=work.sizes(2 // ranks))
    best = find_layouts(problem, way.method)[0]
    return float(problem.simulate(best.layout).peak_bytes.max())


def measure(
    ways: Sequence[Way], costs: Profile, works: dict[str, Work], ranks: int, memory: float, ideal: float, rounds: int
) -> list[Row]:
    """Train all ways in turns, a round every sample once with each."""
    plans = [best_plan(way, costs, works[way.packing], ranks, memory) for way in ways]
    cases = [
        Case(way.name, plan, packs, contents)
        for way, plan in zip(ways, plans, strict=True)
        for packs, contents in zip(works[way.packing].iterations, works[way.packing].contents, strict=True)
    ]
    trained = iter(train(SHAPE, cases, rounds, warm_up=1, pipeline=ranks))
    rows = []
    for way, plan in zip(ways, plans, strict=True):
        own = [next(trained) for _ in works[way.packing].iterations]
        seconds = statistics.median(map(sum, zip(*(one.seconds for one in own), strict=True)))
        peak = max(max(one.peak_bytes) for one in own)
        losses = np.average([one.losses for one in own], axis=0, weights=works[way.packing].words()).tolist()
        rows.append(Row(way, plan, works[way.packing].microbatches, seconds, peak, ideal / (2 * seconds), losses))
    return rows


def table(name: str, ways: Sequence[Way], ranks: int, costs: Profile, sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Measure and print; the ratios."""
    iterations = max(1, round(len(sizes) / A_STEP))
    pack_costs = PackCosts.of_profile(costs)
    packings = dict.fromkeys(way.packing for way in ways)
    works = {one: pack(sizes, one, 2 // ranks, pack_costs, iterations) for one in packings}
    ideal = _needed(costs, sizes)
    published = [way for way in ways if way.packing == "isf"][-1]
    memory = bare_bytes(published, costs, works["isf"], ranks) * ROOM
    unbalanced = bare_bytes(ways[0], costs, works[ways[0].packing], ranks)
    text = Way("text only", "text", "joint" if ranks > 1 else "layers", "fewest")
    works["text"] = works["balanced"].without_images()
    rows = measure((*ways, text), costs, works, ranks, memory, ideal, rounds)
    alone, shown = rows.pop(), []
    for row in rows:
        layers = " | ".join(str(stage.layers[1] - stage.layers[0]) for stage in row.plan.stages)
        again = sum(len(stage.recompute) for stage in row.plan.stages)
        kept = f"{row.peak_bytes / 2**20:.1f}" + (" over" if row.peak_bytes > memory else "")
        figures = (row.seconds / rows[0].seconds, row.of_ideal, alone.seconds / row.seconds)
        told = (*(f"{figure:.3f}" for figure in figures), f"{row.losses[0]:.2f} to {row.losses[-1]:.2f}")
        shown.append((row.way.name, row.plan.schedule, row.microbatches, layers, again, kept, *told))
    columns = (
        "", "schedule", "microbatches", "layers", "recomputed", "MiB", "time", "of the ideal", "of text-only", "loss",
    )  # fmt: skip
    title = f"{name}: {len(sizes)} samples, budget {memory / 2**20:.0f} MiB a rank"
    print_table(f"{title}; unbalanced, nothing recomputed: {unbalanced / 2**20:.0f} MiB", columns, shown)
    ours = rows[-1]
    return {
        "over_unbalanced": rows[0].seconds / ours.seconds,
        "of_ideal": ours.of_ideal,
        "of_text_only": alone.seconds / ours.seconds,
        "losses": {row.way.name: row.losses for row in rows},
        "within_budget": float(all(row.peak_bytes <= memory for row in rows)),
    }


def _needed(costs: Profile, sizes: Sizes) -> float:
    """Seconds of one rank for all samples' needed work, nothing padded or recomputed."""
    each = PackSizes(*(column.reshape(1, 1, -1) for column in (sizes.tiles, sizes.tokens, sizes.tokens**2)))
    return LayoutProblem(_without_constants(costs), 1, len(sizes), packs=each).ideal_seconds()


def _without_constants(costs: Profile) -> Profile:
    """What a pack costs whatever it holds would be counted once a sample."""
    layers = {}
    for kind, cost in costs.layers.items():
        fits = {}
        for name in ("forward_fit", "backward_fit"):
            fit = getattr(cost, name)
            fits[name] = None if fit is None else (0.0, *fit[1:])
        layers[kind] = replace(cost, **fits)
    return replace(costs, layers=layers)


def main() -> None:
    """Profile once, then both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times each row trains on all samples")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the ratios as one JSON object after the tables")
    arguments = parser.parse_args()
    costs, sizes = profile(SHAPE), corpus(arguments.samples, arguments.seed)
    found = {
        "pipeline": table("two pipeline ranks", PIPELINE, 2, costs, sizes, arguments.rounds),
        "data_parallel": table("two data-parallel ranks", DATA_PARALLEL, 1, costs, sizes, arguments.rounds),
    }
    if arguments.json:
        print_json(found)
    for name, ratios in found.items():
        share = f"{ratios['of_ideal']:.2f} of the ideal, {ratios['of_text_only']:.2f} of text-only throughput"
        print(f"{name.replace('_', ' ')}: {share}; ours / unbalanced {ratios['over_unbalanced']:.2f}x")


if __name__ == "__main__":
    run_tool(main)
