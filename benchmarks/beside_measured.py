"""The vision tower cut into stages with all of the chain, or beside the pipeline: trained in turns on gloo ranks.

    python benchmarks/beside_measured.py [--ranks 2] [--launches 3] [--rounds 9]

A small model, whose vision is about a fifth of the work, is profiled on these ranks; both layouts are planned from that
profile for the same packs, and trained in turns on them: a tower that is trained, with E and V in bubbles, and a frozen
one, encoded an iteration ahead. On one rank, which has no bubbles, the tower's copies are compared with the chain as it
is. Needs as many idle cores as ranks.

A ratio is the median over rounds of both plans' seconds in the same round. Where other programs took a processor away
from a rank, a round is left out, if enough are left. Losses are the same samples'. The last line is the speed beside
the pipeline over the cut's, measured and predicted, of a trained tower and of a frozen one.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.two_ranks import Case, Contents, Llama, Packs, Shape, Trained, profile, sizes_of, train
from omnibal_ext.console import print_table
from omnibal_ext.costs.tower import language_profile
from omnibal_ext.errors import run_tool
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_plan, make_plan
from omnibal_ext.layout.tower_layout import plan_beside
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.plan import Plan
from omnibal_ext.plan_tower import Tower
from omnibal_ext.schedules.placement import Placement
from omnibal_ext.schedules.schedule import build_schedule
from omnibal_ext.schedules.weaving import in_time, woven

SHAPE = Shape(
    "a fifth of vision",
    VisionArchitecture(layers=6, hidden_size=96, heads=4, ffn_hidden_size=384, patch_size=8, image_size=64),
    Llama(layers=8, hidden_size=256, heads=4, kv_heads=2, ffn_hidden_size=768, vocab_size=512),
    vit_budget=8,
    llm_budget=256,
)
MICROBATCHES = 6
TOWERS: dict[str, tuple[str, ...]] = {"trained": (), "frozen": ("vit", "projector")}


CALM, ENOUGH = 0.05, 5
"""Rounds count in which no rank was without a processor for more of its actions' time; all of them where so few are."""


@dataclass(frozen=True)
class Compared:
    """A tower, cut and beside the pipeline."""

    tower: str
    vision: float
    """Share of the work."""
    predicted: tuple[float, float]
    """Seconds of the cut's iteration, and of that beside the pipeline; 0: one rank, of which none is predicted."""
    seconds: tuple[float, float]
    """Measured, medians."""
    ratio: float
    """How many times as fast beside is, median of the rounds."""
    rounds: str
    """Counted, of how many."""
    losses: float
    """Largest relative difference of two losses of an iteration."""

    @property
    def expected(self) -> str:
        """The ratio, predicted."""
        return f"{self.predicted[0] / self.predicted[1]:.3f}x" if self.predicted[1] else "-"

    @property
    def row(self) -> tuple[str, ...]:
        """As printed."""
        said, measured = ([f"{seconds * 1e3:.0f}" for seconds in pair] for pair in (self.predicted, self.seconds))
        times = (f"{measured[layout]} ({said[layout]})" for layout in (0, 1))
        ratios = f"{self.ratio:.3f}x", self.expected
        return self.tower, f"{self.vision:.0%}", *times, *ratios, self.rounds, f"{self.losses:.0e}"


def main() -> None:
    """Profile, plan, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of the pipeline (default %(default)s)")
    parser.add_argument("--launches", type=int, default=3, help="starts of torchrun a tower (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="iterations of each plan a launch (default %(default)s)")
    arguments = parser.parse_args()
    found = [compare(tower, arguments.ranks, arguments.launches, arguments.rounds) for tower in TOWERS]
    columns = (
        "tower", "vision", "cut ms (predicted)", "beside ms (predicted)", "beside / cut speed", "predicted", "rounds",
        "losses differ by",
    )  # fmt: skip
    print_table(f"{arguments.ranks} ranks, {MICROBATCHES} microbatches", columns, [one.row for one in found])
    said = ", ".join(f"{one.tower} {one.ratio:.3f}x (predicted {one.expected})" for one in found)
    print(f"speed beside the pipeline over the cut: {said}")


def compare(tower: str, ranks: int, launches: int, rounds: int) -> Compared:
    """Plan both layouts from a profile of these ranks, and train both plans in turns."""
    (packs, contents), frozen = nearly_full(), TOWERS[tower]
    costs = profile(SHAPE, ranks=ranks, frozen=frozen)
    problem = LayoutProblem(costs, ranks, MICROBATCHES, packs=sizes_of(packs))
    plans = one_rank(problem) if ranks == 1 else both_layouts(problem)
    cases = [Case(layout, plan, packs, contents) for layout, plan in plans.items()]
    runs = [train(SHAPE, cases, rounds, pipeline=ranks, ranks=ranks, count_bytes=False, frozen=frozen)
            for _ in range(launches)]  # fmt: skip
    every = np.array([[trained.seconds for trained in run] for run in runs]).transpose(0, 2, 1).reshape(-1, 2)
    lost = np.array([[trained.disturbed for trained in run] for run in runs]).max(axis=1).ravel()
    counted = every[lost <= CALM] if (lost <= CALM).sum() >= ENOUGH else every
    cut, beside = np.median(counted, axis=0).tolist()
    predicted = [plan.predicted.get("step_seconds", 0.0) for plan in plans.values()]
    return Compared(
        tower, vision_share(problem), (predicted[0], predicted[1]), (cut, beside),
        float(np.median(counted[:, 0] / counted[:, 1])), f"{len(counted)} of {len(every)}", max(map(apart, runs)),
    )  # fmt: skip


def both_layouts(problem: LayoutProblem) -> dict[str, Plan]:
    """The best plan of either."""
    found = {layout: find(problem, "joint") for layout, find in (("cut", find_plan), ("beside", plan_beside))}
    return {layout: make_plan(planned, candidates, "joint") for layout, (planned, candidates) in found.items()}


def one_rank(problem: LayoutProblem) -> dict[str, Plan]:
    """The chain as it is, and with its tower beside it: E shortly before F, V shortly behind B."""
    chain, layers = problem.profile.chain, problem.profile.chain.index("word_embed")
    cut = Plan.from_cuts(chain, (), num_microbatches=MICROBATCHES, trained=problem.profile.trained)
    ahead = bool(problem.profile.trained.frozen)
    tower = Tower(layers, (0,) * layers, ((0,),) * MICROBATCHES, "ahead" if ahead else "bubbles")
    base = build_schedule("1f1b", 1, MICROBATCHES)
    lists = woven(base, in_time(base, MICROBATCHES, Placement.interleaved(1), tower.beside))
    words = tuple(" ".join(action.word for action in actions) for actions in lists)
    stage = replace(cut.stages[0], layers=(layers, len(chain)))
    return {"cut": cut, "beside": replace(cut, stages=(stage,), tower=tower, lists=words)}


def vision_share(problem: LayoutProblem) -> float:
    """Of all work, what comes before the word embedding."""
    language = replace(problem, profile=language_profile(problem.profile))
    return 1 - language.ideal_seconds() / problem.ideal_seconds()


def apart(run: Sequence[Trained]) -> float:
    """The largest relative difference of both layouts' losses in an iteration."""
    cut, beside = (np.array(one.losses) for one in run)
    return float(np.abs(beside / cut - 1).max())


def nearly_full(seed: int = 0) -> tuple[Packs, Contents]:
    """Packs as balanced packing makes them, of three samples, and what these are: alike on all ranks."""
    random = np.random.default_rng(seed)
    packs, contents = [], []
    for first in range(0, 3 * MICROBATCHES, 3):
        tiles = int(random.integers(SHAPE.vit_budget - 2, SHAPE.vit_budget + 1))
        tokens = int(random.integers(SHAPE.llm_budget * 9 // 10, SHAPE.llm_budget + 1))
        shares = [(whole // 2, whole // 4, whole - whole // 2 - whole // 4) for whole in (tiles, tokens)]
        packs.append((tiles, shares[1]))
        contents.append(tuple(zip(range(first, first + 3), *shares, strict=True)))
    return tuple(packs), tuple(contents)


if __name__ == "__main__":
    run_tool(main)
