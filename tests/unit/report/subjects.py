"""Plans and packs for the tests of the report."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_layouts, make_plan
from omnibal_ext.layout.tower_layout import plan_tower
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.report.subject import Subject
from omnibal_ext.report.timeline import Lane, Timeline
from omnibal_ext.sizes import Sizes

RANKS, REPLICAS, MICROBATCHES = 4, 2, 6


def planned(folder: Path, samples: int = 400, schedule: str = "1f1b", road: str = "cut") -> Path:
    """Samples, packs, profile and plan of a 6B + 20B model in a folder; the plan's path."""
    random = np.random.default_rng(0)
    tiles = random.choice([0, 1, 3, 7], samples, p=[0.05, 0.7, 0.15, 0.1])
    tokens = np.minimum(256 * tiles + random.integers(8, 400, samples), 4096)
    path = folder / "sizes.npz"
    Sizes.from_arrays(tiles, tokens).save(path)
    options = PackOptions("balanced", 6, 4096, micro_batches=MICROBATCHES, data_parallel_size=REPLICAS)
    built_from = {"sizes": {str(path): ""}}
    index, _ = build_index(Corpus.load([path]), folder / "packs", options, built_from)
    replica = 0 if road == "cut" else 4 * RANKS
    profile = analytic_profile(
        preset("internvl-chat-1.5"), "a100", {"tiles": 6, "tokens": 4096}, 4, replica_ranks=replica
    )
    profile.save(folder / "profile.json")
    packs = packs_of_index(index, profile, MICROBATCHES, 1)
    problem = LayoutProblem(profile, RANKS, MICROBATCHES, 1, schedule, 74 * 2**30, packs)
    if road == "cut":
        plan = make_plan(problem, find_layouts(problem, "profile"), "profile")
    else:
        problem, candidates, said = plan_tower(problem, road, "profile", seconds=0.3)
        plan = make_plan(problem, candidates, "profile")
        plan = replace(plan, predicted=plan.predicted | said)
    plan.save(folder / "plan.json")
    return folder / "plan.json"


def ran(folder: Path, late: float = 0.0) -> Path:
    """A run of the plan in `folder`, as it would have written it had all gone as predicted, but for its first packs,
    which were so many seconds late; its folder."""
    subject, run = Subject.of_plan(folder / "plan.json", None, folder / "packs"), folder / f"late-{late}"
    run.mkdir()
    paths = {name: str(folder / name) for name in ("plan.json", "profile.json", "packs")}
    noted = {name.removesuffix(".json"): path for name, path in paths.items()}
    (run / "inputs.json").write_text(json.dumps({**noted, "versions": "python 3.11.4, megatron-core 0.19.2"}))
    packs = np.stack([kind[0] for kind in vars_of(subject)], axis=-1).tolist()
    lanes = [lane_of(lane, late, packs[lane.data_parallel_rank]) for lane in subject.predicted.lanes]
    write_lines(run / "timeline.jsonl", *({"iteration": number, "lanes": lanes} for number in (4, 6, 8)))
    lines = [{"iteration": n, "seconds": 2.0 + n, "samples": 10 * n, "samples_per_second": 10 * n / (2.0 + n),
              "loss": 9.0 / n, "model_tflops": 100.0 * n, "mfu": 0.1 * n} for n in (1, 2, 3)]  # fmt: skip
    write_lines(run / "metrics.jsonl", *lines)
    return run


def vars_of(subject: Subject) -> list[Any]:
    """Tiles, tokens and squares of the packs that a subject is predicted on."""
    packs = subject.problem.packs
    assert packs is not None
    return [packs.tiles, packs.tokens, packs.squares]


def lane_of(lane: Lane, late: float, packs: list[list[int]]) -> dict[str, Any]:
    """As `megatron.vlm.monitoring.recorder` writes it."""
    actions = [
        [s.action.kind, s.action.microbatch, s.action.chunk, s.start + late, s.end + late,
         [[piece.part, piece.phase, piece.seconds] for piece in s.pieces]]
        for s in lane.spans
    ]  # fmt: skip
    return {
        "data_parallel_rank": lane.data_parallel_rank, "rank": lane.rank, "end": lane.end + late, "actions": actions,
        "reads": [[0.0, late]] if lane.rank == 0 else [], "held": [[at, held] for at, held in lane.held],
        "packs": packs,
    }  # fmt: skip


def assert_whole(timeline: Timeline) -> None:
    """Each action is as long as what it is made of."""
    for span in (span for lane in timeline.lanes for span in lane.spans):
        assert sum(piece.seconds for piece in span.pieces) == pytest.approx(span.end - span.start)


def write_lines(path: Path, *records: Any) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
