"""Seconds of every stage, the bubble and peak bytes of every rank, measured for the run's metrics; and a comparison of
each part of the model in the first iterations with the plan's profile.

1. The first iterations warm up and are not timed.
2. In all others, events are recorded before and after every action. They are read at the end of the iteration, when the
   device has finished it, since the gradient norm has been read.
3. At the end of an interval the timings of its iterations are gathered over all ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron.vlm.monitoring.journal import Journal
from megatron.vlm.monitoring.meters import all_gathered
from megatron.vlm.platform import Moment, peak_bytes, to_device
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.report.subject import against_profile, is_of_device
from omnibal_ext.run_metrics import noted_inputs
from omnibal_ext.schedules.actions import OF_TOWER, Action

WARM_UP = 2  # iterations


class StageMeter:
    """A meter that times the actions of training iterations; every rank makes the same calls."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.iterations = 0
        self.timing = False
        self.actions: list[tuple[int, Moment, Moment]] = []
        """(chunk, start, end) of each action of this iteration; a replicated tower counts as the last chunk."""
        self.timed: list[list[float]] = []
        """[iterations][chunks + 1]: seconds of work of each chunk (a replicated tower is the last), and from the
        first start to the last end."""

    @contextmanager
    def iteration(self, training: bool) -> Iterator[None]:
        """Make a context that times one iteration's actions, if it trains; if it is rerun, only the last run counts."""
        self.actions, self.timing = [], training and self.iterations >= WARM_UP
        yield
        self.timing = False

    @contextmanager
    def watch(self, action: Action) -> Iterator[None]:
        """Make a context around the computing of one action, to time it."""
        if not self.timing:
            yield
            return
        started = Moment()
        yield
        chunks = self.plan.virtual_pipeline_model_parallel_size
        self.actions.append((chunks if action.kind in OF_TOWER else action.chunk, started, Moment()))

    def end_iteration(self) -> None:
        """Read the timings of a training iteration, which the device has finished."""
        self.iterations += 1
        if not self.actions:
            return
        worked = [0.0] * (self.plan.virtual_pipeline_model_parallel_size + (self.plan.tower is not None))
        for chunk, start, end in self.actions:
            worked[chunk] += start.seconds_until(end)
        self.timed.append([*worked, self.actions[0][1].seconds_until(self.actions[-1][2])])
        self.actions = []

    def end_interval(self) -> dict[str, Any]:
        """Return metrics since the last call; collective, after the same number of iterations on every rank.

        bubble                 idle share of the ranks' time, from the first start to the last end of work
        stage_seconds[stage]   of a microbatch, forward and backward
        stage_peak_bytes[rank] per pipeline rank, since the start; on GPUs only
        """
        if not self.timed:
            return {}
        worked, spans, peaks = gather_timings(torch.tensor(self.timed, dtype=torch.float64), peak_bytes())
        self.timed = []
        ranks_and_chunks = map(self.plan.placement.rank_and_chunk, range(len(self.plan.stages)))
        stages = torch.stack([worked[:, rank, :, chunk] for rank, chunk in ranks_and_chunks], dim=-1).mean(dim=(0, 1))
        seconds = (stages / self.plan.num_microbatches).tolist()
        found = {"bubble": bubble(worked, spans), "stage_seconds": seconds}
        return found | ({"stage_peak_bytes": peaks} if any(peaks) else {})


def gather_timings(timed: Tensor, peak: int | None) -> tuple[Tensor, Tensor, list[int]]:
    """Gather `timed` [iterations, chunks + 1] seconds and peak bytes over the ranks that share a tensor-parallel rank.

    Returns seconds of work [data-parallel ranks, pipeline ranks, iterations, chunks], seconds from first start to last
    end (the same without chunks), and for each pipeline rank the most bytes of its replicas (0: unknown).
    """
    mine = torch.cat([timed.flatten(), torch.tensor([float(peak or 0)], dtype=torch.float64)])
    pipeline = all_gathered(to_device(mine), parallel_state.get_pipeline_model_parallel_group())
    replicas = all_gathered(pipeline, parallel_state.get_data_parallel_group()).cpu()
    table = replicas[..., :-1].unflatten(-1, timed.shape)
    return table[..., :-1], table[..., -1], [int(most) for most in replicas[..., -1].amax(dim=0)]


def bubble(worked: Tensor, spans: Tensor) -> float:
    """Return the idle share of a pipeline's time, mean of iterations and replicas; arguments as from `gather_timings`.

    A pipeline's time is the longest span of its ranks: that of the rank where forwards begin and backwards end.
    """
    total = spans.amax(dim=1) * spans.shape[1]
    return (1 - worked.sum(dim=(1, 3)) / total.clamp(min=1e-12)).mean().item()


SKIPPED, COMPARED = 3, 3
"""Iterations after a start that are not compared with the profile, and how many then are."""


class ProfileCheck:
    """A comparison of some early iterations with the plan's profile; all ranks record the same ones for it.

        iterations since the start   1  2  3  [4]  5  [6]  7  [8]     [recorded], as for timeline.jsonl

    The rank that writes metrics.jsonl compares once: a table in the log, and a line from which `omnibal launch
    --replan` makes a new plan.
    """

    def __init__(self, plan: Plan, plan_path: Path, metrics_file: Path, journal: Journal) -> None:
        self.plan, self.journal = plan, journal
        self.plan_path, self.metrics_file = plan_path, metrics_file
        self.first = 0
        self.records: list[dict[str, Any]] = []
        self.done = False

    def wants(self, number: int) -> bool:
        """Return whether to record iteration `number` (0: evaluation), never two in succession.

        The first number asked for is the first iteration of this start.
        """
        self.first = self.first or number
        return number - self.first in range(SKIPPED, SKIPPED + 2 * COMPARED, 2)

    def add(self, record: dict[str, Any]) -> None:
        """Take the record of an iteration, as in timeline.jsonl; compare when there are enough."""
        if record["iteration"] >= self.first + SKIPPED and not self.done:
            self.records.append(record)
            if len(self.records) == COMPARED:
                self.close()

    def close(self) -> None:
        """Compare what was recorded, and write it to the journal; called when it is enough, or training has ended."""
        self.done, records = True, self.records
        if records and (profile := self._profile()):
            numbers = [record["iteration"] for record in records]
            compared = against_profile(self.plan, profile, records)
            other = "" if is_of_device(profile, records[0]) else profile.device
            self.journal.profile_check(numbers, self.plan.model_hash, profile.hash, compared, other)
        self.records = []

    def _profile(self) -> Profile | None:
        """Return the plan's profile, from where inputs.json says or next to the plan; None if neither is it."""
        try:
            noted: dict[str, str] = noted_inputs(self.metrics_file.parent)
        except UserError:
            noted = {}
        next_to_plan = self.plan_path.with_name("profile.json")
        for path in (noted.get("profile", next_to_plan), next_to_plan):
            try:
                if (profile := Profile.load(path)).hash == self.plan.profile_hash:
                    return profile
            except UserError:
                continue
        return None
