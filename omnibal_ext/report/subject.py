"""What a report is about: a plan, or a run's folder with its files.

RUN/plan.json        the plan                   RUN/timeline.jsonl   what every rank did in some iterations
RUN/profile.json     costs of layers            RUN/metrics.jsonl    rates and losses
RUN/inputs.json      paths of the plan, the profile and the packs that the run was started with
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from omnibal_ext.chain import AS_LAYERS, TIMED_PART_OF
from omnibal_ext.costs.corrected import EXCHANGE, OTHER, UPDATE, WHOLE, Compared
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.report.timeline import (
    Lane,
    Timeline,
    layout_of,
    packs_of_record,
    predicted,
    problem_of,
    recorded,
)
from omnibal_ext.run_metrics import TIMELINE, complete_lines, evaluations, noted_inputs, training_intervals

Curves = dict[str, list[tuple[float, float]]]
"""Points (x, y) by name of the curve."""

WARM = 3
"""The last iteration of the warm-up."""


@dataclass(frozen=True)
class Subject:
    """A plan or run, read from its files."""

    name: str
    plan: Plan
    profile: Profile
    index: PackedIndex | None = None
    records: tuple[dict[str, Any], ...] = ()
    """Lines of timeline.jsonl, see `megatron.vlm.monitoring.recorder`."""
    metrics: Path | None = None
    date: str = ""
    """When the run's last metrics, or the plan, were written."""
    versions: str = ""
    """Versions of Python, torch and megatron-core that the run was started with; "": unknown."""

    @classmethod
    def of_plan(cls, plan: Path, profile: Path | None, packs: Path | None) -> "Subject":
        """Read a plan alone; `profile` is by default the profile.json in its folder.

        Raises UserError where the plan was made from another profile.
        """
        found, profile = Plan.load(plan), profile or plan.with_name("profile.json")
        costs = Profile.load(profile)
        if found.profile_hash and found.profile_hash != costs.hash:
            raise UserError(
                f"{plan}: was made from another profile (hash {found.profile_hash}) than "
                f"{profile} (hash {costs.hash}); give its own with --profile"
            )
        index = PackedIndex.open(packs) if packs else None
        return cls(str(plan), found, costs, index, date=_date_of(plan))

    @classmethod
    def of_run(
        cls, folder: Path, plan: Path | None = None, profile: Path | None = None, packs: Path | None = None
    ) -> "Subject":
        """Read a run's folder, by default with the plan, profile and packs that it was started with. With `plan` the
        default profile is in the plan's folder. Raises UserError if there is no plan."""
        noted = noted_inputs(folder)
        if packs is None and Path(noted.get("packs", folder / "none")).exists():
            packs = Path(noted["packs"])
        if plan is None:
            plan = Path(noted.get("plan", folder / "plan.json"))
            profile = profile or (Path(noted["profile"]) if "profile" in noted else None)
        subject = cls.of_plan(plan, profile, packs)
        records = tuple({line["iteration"]: line for line in complete_lines(folder / TIMELINE)[0]}.values())
        subject = replace(subject, name=str(folder), records=records, versions=noted.get("versions", ""))
        metrics = folder / "metrics.jsonl"
        return replace(subject, metrics=metrics, date=_date_of(metrics)) if metrics.exists() else subject

    @cached_property
    def layout(self) -> Layout:
        """The plan's cuts and recomputed layers."""
        return layout_of(self.plan)

    @cached_property
    def typical(self) -> dict[str, Any] | None:
        """The recorded iteration of median length after the warm-up; None if none was recorded."""
        warm = [r for r in self.records if r["iteration"] > WARM] or list(self.records)
        ordered = sorted(warm, key=lambda record: max(lane["end"] for lane in record["lanes"]))
        return ordered[len(ordered) // 2] if ordered else None

    @cached_property
    def problem(self) -> LayoutProblem:
        """The plan's layout problem, with packs of the typical iteration, else of the index, else full ones."""
        packs: PackSizes | None = None
        if self.typical:
            packs = packs_of_record(self.typical)
        elif self.index is not None:
            packs = packs_of_index(self.index, self.profile, self.plan.num_microbatches)
        return problem_of(self.plan, self.profile, packs)

    @cached_property
    def predicted(self) -> Timeline:
        """One iteration of the plan, simulated on the problem's packs."""
        return replace(predicted(self.problem, self.layout), padding=self.padding)

    @cached_property
    def measured(self) -> Timeline | None:
        """The typical recorded iteration; None if none was recorded."""
        return replace(self.measured_of(self.typical), padding=self.padding) if self.typical else None

    def measured_of(self, record: dict[str, Any]) -> Timeline:
        """Return a recorded iteration as a timeline."""
        return recorded(record, self.plan.placement, self.plan.tower.beside if self.plan.tower else None)

    @property
    def is_of_profile(self) -> bool:
        """Whether the run's device is the profile's; True if nothing was recorded."""
        return self.typical is None or is_of_device(self.profile, self.typical)

    @property
    def timelines(self) -> list[Timeline]:
        """Predicted, then measured if there is one."""
        return [self.predicted, *([self.measured] if self.measured else [])]

    @property
    def seen(self) -> Timeline:
        """The measured iteration, or else the predicted one."""
        return self.measured or self.predicted

    def stage_seconds(self) -> Curves:
        """Return every rank's work per microbatch in each recorded iteration: curves of (iteration, ms)."""
        return self._of_ranks(lambda lane: lane.work_seconds / self.plan.num_microbatches * 1e3)

    def read_seconds(self) -> Curves:
        """Return every rank's wait for packs in each recorded iteration: curves of (iteration, ms)."""
        return self._of_ranks(lambda lane: sum(end - start for start, end in lane.reads) * 1e3)

    def held_bytes(self) -> Curves:
        """Return the most bytes that every rank held in each recorded iteration: curves of (iteration, MiB)."""
        return self._of_ranks(lambda lane: max(held for _, held in lane.held) / 2**20 if lane.held else None)

    def _of_ranks(self, figure: Callable[[Lane], float | None]) -> Curves:
        """Return `figure` of every pipeline rank of the first replica in each recorded iteration, if it has one."""
        curves: Curves = {}
        for record in self.records:
            for lane in self.measured_of(record).lanes:
                if lane.data_parallel_rank == 0 and (value := figure(lane)) is not None:
                    curves.setdefault(f"rank {lane.rank}", []).append((float(record["iteration"]), value))
        return curves

    @cached_property
    def intervals(self) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl for the run's intervals of training; [] without that file."""
        return training_intervals(self.metrics) if self.metrics else []

    @cached_property
    def padding(self) -> float:
        """Share of the run's tokens that fill up batches; 0 without metrics."""
        lines = [line for line in self.intervals if "padding" in line]
        seconds = sum(line["seconds"] for line in lines)
        return float(sum(line["padding"] * line["seconds"] for line in lines) / seconds) if lines else 0.0

    def samples_per_second(self) -> float | None:
        """Return the run's samples a second, averaged as by `a_second`; None without metrics."""
        return self.a_second([line["samples"] for line in self.intervals])

    def a_second(self, amounts: Sequence[float]) -> float | None:
        """Return the mean iteration's amount / the median iteration's seconds; None without metrics.

        So the start, saves and whatever else delayed some iterations do not count. `amounts`: of every interval.
        """
        if not amounts:
            return None
        iterations = np.diff([line["iteration"] for line in self.intervals], prepend=0)
        median = np.median([line["seconds"] for line in self.intervals] / iterations)
        return float(np.sum(amounts) / iterations.sum() / median)

    def curves(self) -> dict[str, Curves]:
        """Return loss (training and held out) and samples a second: curves over iterations."""
        if not self.metrics:
            return {}
        names = {"loss": "training", "samples_per_second": "samples/s"}
        training = {line["iteration"]: line for line in self.intervals}
        found = {name: {label: _curve(training, name)} for name, label in names.items()}
        if held_out := evaluations(self.metrics):
            found["loss"]["held out"] = _curve(held_out, "loss")
        return found


PARTS = (*dict.fromkeys(TIMED_PART_OF.values()), OTHER, EXCHANGE, UPDATE, WHOLE)
"""What is compared, in the order shown."""


def is_of_device(profile: Profile, record: Mapping[str, Any]) -> bool:
    """Say whether a recorded iteration ran on the profile's device ("h100" is that of NVIDIA H100 80GB HBM3 too); True
    for records of older versions, which do not name theirs."""
    return profile.device.casefold() in record.get("device", profile.device).casefold()


def against_profile(plan: Plan, profile: Profile, records: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """Return predicted and measured seconds per rank and iteration by part and phase, mean over `records` (lines of
    timeline.jsonl); predictions are for the packs of these iterations.

    Separate weight gradients (W) are recorded without parts: they are divided among the parts as predicted. A
    replicated tower is predicted as one part: its projector counts as "vit".
    """
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        for side, timeline in enumerate(Subject("", plan, profile, records=(dict(record),)).timelines):
            for (part, phase), seconds in _seconds(timeline).items():
                named = AS_LAYERS.get(part, part) if plan.tower else part
                found[named, phase][side] += seconds / len(records)
    weights = [both for (_, phase), both in found.items() if phase == "weight"]
    planned, measured = (sum(both[side] for both in weights) for side in (0, 1))
    for both in weights if planned else ():
        both[1] = both[0] * measured / planned
    in_order = sorted(found.items(), key=lambda one: PARTS.index(one[0][0]))
    return [Compared(part, phase, *seconds) for (part, phase), seconds in in_order]


def _seconds(timeline: Timeline) -> dict[tuple[str, str], float]:
    """Return seconds by part and phase, mean over ranks; and those of the whole iteration."""
    totals = {**timeline.totals(), (UPDATE, UPDATE): sum(lane.end - lane.update_at for lane in timeline.lanes)}
    return {**{key: total / len(timeline.lanes) for key, total in totals.items()}, (WHOLE, WHOLE): timeline.seconds}


def _date_of(path: Path) -> str:
    """Return when a file was last written, as text."""
    return datetime.fromtimestamp(path.stat().st_mtime).astimezone().strftime("%Y-%m-%d %H:%M %Z")


def _curve(lines: Mapping[int, Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    """Return points (iteration, figure) of the lines in which the figure is not null."""
    return [(float(iteration), line[name]) for iteration, line in sorted(lines.items()) if line[name] is not None]
