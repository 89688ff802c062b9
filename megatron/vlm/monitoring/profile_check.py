"""Does the plan's profile hold here? Seconds of each part of the model in a run's first iterations, beside its own.

    iterations of this start   1  2  3  [4]  5  [6]  7  [8]     recorded, as those of timeline.jsonl are

They are compared once, by the rank that writes metrics.jsonl: a table in the log, and a line that
`tools/launch.py --replan` plans again from.
"""

from pathlib import Path
from typing import Any

from megatron.vlm.monitoring.journal import Journal
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.report.against_profile import against_profile
from omnibal_ext.run_metrics import noted_inputs

WARM_UP, COMPARED = 3, 3
"""Iterations of a start that come first, and how many are compared."""


class ProfileCheck:
    """Gets the recorded iterations; every rank asks it alike which these are, and one has their records."""

    def __init__(self, plan: Plan, plan_path: Path, metrics_file: Path, journal: Journal) -> None:
        self.plan, self.journal = plan, journal
        self.plan_path, self.metrics_file = plan_path, metrics_file
        self.first = 0
        self.records: list[dict[str, Any]] = []
        self.done = False

    def wants(self, number: int) -> bool:
        """Whether iteration `number` (0: one that is no training) is to be recorded; the first one asked for is the
        first of this start. None of them are neighbours."""
        self.first = self.first or number
        return number - self.first in range(WARM_UP, WARM_UP + 2 * COMPARED, 2)

    def saw(self, record: dict[str, Any]) -> None:
        """A recorded iteration, as a line of timeline.jsonl."""
        if record["iteration"] >= self.first + WARM_UP and not self.done:
            self.records.append(record)
            if len(self.records) == COMPARED:
                self.close()

    def close(self) -> None:
        """Compare what was recorded: enough of it, or training has ended."""
        self.done, records = True, self.records
        if records and (profile := self._profile()):
            numbers = [record["iteration"] for record in records]
            compared = against_profile(self.plan, profile, records)
            self.journal.profile_check(numbers, self.plan.model_hash, profile.hash, compared)
        self.records = []

    def _profile(self) -> Profile | None:
        """The plan's: as the launcher noted, or beside the plan. None where it is not there: a plan can do without."""
        try:
            noted: dict[str, str] = noted_inputs(self.metrics_file.parent)
        except UserError:
            noted = {}
        beside = self.plan_path.with_name("profile.json")
        for path in (noted.get("profile", beside), beside):
            try:
                if (profile := Profile.load(path)).hash == self.plan.profile_hash:
                    return profile
            except UserError:
                continue
        return None
