"""Is the simulator right? Predicted against measured step seconds and peak bytes, on two ranks of this machine.

    python benchmarks/simulator.py [--rounds 7]

A small model is profiled as users profile theirs. Then layouts x schedules x packs are predicted from the profile, and
trained in turns by the real executor. Needs two idle cores; what disturbs one disturbs the figures.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.two_ranks import Case, Llama, Packs, Shape, profile, sizes_of, train
from omnibal_ext.chain import RECOMPUTABLE_KINDS
from omnibal_ext.console import print_table
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import run_tool
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.modalities.vision.architecture import VisionArchitecture
from omnibal_ext.plan import Plan
from omnibal_ext.report.timeline import layout_of
from omnibal_ext.schedules.schedule import splits_backward

SHAPE = Shape(
    "simulated",
    VisionArchitecture(layers=6, hidden_size=192, heads=4, ffn_hidden_size=768, patch_size=8, image_size=48),
    Llama(layers=4, hidden_size=256, heads=4, kv_heads=2, ffn_hidden_size=768, vocab_size=512),
    vit_budget=8,
    llm_budget=256,
)
MICROBATCHES = 6
# Layer ids: patch_embed 0, vit 1 to 6, projector 7, word_embed 8, llm 9 to 12, head 13. Schedule, cuts, and the stages
# whose layers are recomputed.
LAYOUTS: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = (
    ("1f1b", (8,), ()),
    ("1f1b", (5,), ()),
    ("1f1b", (11,), ()),
    ("1f1b", (8,), (0,)),
    ("1f1b", (6,), (0, 1)),
    ("gpipe", (8,), ()),
    ("zb_h1", (8,), ()),
    ("1f1b", (4, 8, 11), ()),
)
LARGER = 0.10
"""Two cases are ranked where their measured steps differ by more."""


def main() -> None:
    """Profile, predict, train, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="iterations of each case (default %(default)s)")
    rounds = parser.parse_args().rounds
    cases = [case for name, packs in packings().items() for case in _cases(name, packs)]
    costs = profile(SHAPE)
    trained = train(SHAPE, cases, rounds)
    rows, errors, byte_errors, steps = [], [], [], []
    for case, found in zip(cases, trained, strict=True):
        seconds, peaks = predict(costs, case)
        measured = statistics.median(found.seconds)
        steps.append((seconds, measured))
        errors.append(seconds / measured - 1)
        off = [one / other - 1 for one, other in zip(peaks, found.peak_bytes, strict=True)]
        byte_errors += off
        counted = " ".join(f"{peak / 2**20:.1f}" for peak in found.peak_bytes)
        figures = (f"{seconds * 1e3:.1f}", f"{measured * 1e3:.1f}", f"{errors[-1]:+.1%}", counted)
        rows.append((case.name, *figures, " ".join(f"{one:+.1%}" for one in off)))
    columns = ("packs, schedule, cuts, recomputed stages", "predicted ms", "measured ms", "error", "peak MiB", "error")
    print_table(f"{len(cases)} cases, {rounds} rounds", columns, rows)
    right, pairs = ranked(steps)
    print(f"pairs that differ by more than {LARGER:.0%}: {right} of {pairs} ranked right")
    for kind, holds in KINDS.items():
        of_kind = [error for case, error in zip(cases, errors, strict=True) if holds(case)]
        others = [error for case, error in zip(cases, errors, strict=True) if not holds(case)]
        apart = statistics.median(of_kind) - statistics.median(others)
        print(f"{kind}: median error {statistics.median(of_kind):+.1%}, {apart:+.1%} beside the others")
    print(f"median error of peak bytes: {_median_size(byte_errors):.1%}, largest {max(map(abs, byte_errors)):.1%}")
    order = "right" if right == pairs else "wrong"
    print(f"median error of the step: {_median_size(errors):.1%}; rank order {order}")


def packings(seed: int = 0) -> dict[str, Packs]:
    """Level packs at the budgets; packs of all sizes, two of them without an image."""
    level = tuple((SHAPE.vit_budget, (64,) * 4) for _ in range(MICROBATCHES))
    tiles = np.random.default_rng(seed).integers(2, SHAPE.vit_budget + 1, MICROBATCHES)
    uneven = [(int(t), (int(t) * 10, int(t) * 10, int(t) * 12)) for t in tiles]
    uneven[1] = uneven[4] = (0, (32,) * 6)
    return {"level": level, "uneven": tuple(uneven)}


KINDS: dict[str, Callable[[Case], bool]] = {
    "uneven packs": lambda case: case.name.startswith("uneven"),
    "zero bubble": lambda case: splits_backward(case.plan.schedule),
    "recomputed": lambda case: any(stage.recompute for stage in case.plan.stages),
}
"""Kinds of cases that should be no further off than the others."""


def _cases(name: str, packs: Packs) -> list[Case]:
    chain, found = SHAPE.architecture.chain, []
    for schedule, cuts, again in LAYOUTS:
        stages = enumerate(pairwise((0, *cuts, len(chain))))
        ids = [[i for i in range(*s) if n in again and chain[i] in RECOMPUTABLE_KINDS] for n, s in stages]
        chunks = (len(cuts) + 1) // 2
        plan = Plan.from_cuts(
            chain,
            cuts,
            ids,
            num_microbatches=MICROBATCHES,
            virtual_pipeline_model_parallel_size=chunks,
            schedule=schedule,
        )
        label = f"{name}, {schedule}, {' '.join(map(str, cuts))}" + (f", {again}" if again else "")
        found.append(Case(label, plan, packs))
    return found


def predict(costs: Profile, case: Case) -> tuple[float, list[float]]:
    """Step seconds, and peak bytes of both ranks."""
    plan = case.plan
    chunks = plan.virtual_pipeline_model_parallel_size
    problem = LayoutProblem(costs, 2, plan.num_microbatches, chunks, plan.schedule, packs=sizes_of(case.packs))
    layout = layout_of(plan)
    return problem.step_seconds(layout), problem.simulate(layout).peak_bytes.tolist()


def ranked(steps: list[tuple[float, float]]) -> tuple[int, int]:
    """Of the pairs whose measured seconds differ by more than `LARGER`: how many are ranked right, and how many."""
    differ = [
        (one, other)
        for one, other in combinations(steps, 2)
        if max(one[1], other[1]) > (1 + LARGER) * min(one[1], other[1])
    ]
    return sum((one[0] < other[0]) == (one[1] < other[1]) for one, other in differ), len(differ)


def _median_size(errors: list[float]) -> float:
    return statistics.median(map(abs, errors))


if __name__ == "__main__":
    run_tool(main)
