"""Compares the seconds of each part of the model in a run's first iterations with the plan's profile.

    iterations since the start   1  2  3  [4]  5  [6]  7  [8]     [recorded], as for timeline.jsonl

The rank that writes metrics.jsonl compares once: a table in the log, and a line from which `tools/launch.py --replan`
makes a new plan.
"""

from pathlib import Path
from typing import Any

from megatron.vlm.monitoring.journal import Journal
from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.plan import Plan
from omnibal_ext.report.subject import against_profile
from omnibal_ext.run_metrics import noted_inputs

WARM_UP, COMPARED = 3, 3
"""Iterations skipped after a start, and how many are then compared."""


class ProfileCheck:
    """Chooses the iterations to record, the same on every rank, and compares them on the rank that gets the records."""

    def __init__(self, plan: Plan, plan_path: Path, metrics_file: Path, journal: Journal) -> None:
        self.plan, self.journal = plan, journal
        self.plan_path, self.metrics_file = plan_path, metrics_file
        self.first = 0
        self.records: list[dict[str, Any]] = []
        self.done = False

    def wants(self, number: int) -> bool:
        """Whether to record iteration `number` (0: evaluation), never two in succession.

        The first number asked for is the first iteration of this start.
        """
        self.first = self.first or number
        return number - self.first in range(WARM_UP, WARM_UP + 2 * COMPARED, 2)

    def add(self, record: dict[str, Any]) -> None:
        """Take a recorded iteration, a record as in timeline.jsonl."""
        if record["iteration"] >= self.first + WARM_UP and not self.done:
            self.records.append(record)
            if len(self.records) == COMPARED:
                self.close()

    def close(self) -> None:
        """Compare what was recorded so far; called when it is enough, or training has ended."""
        self.done, records = True, self.records
        if records and (profile := self._profile()):
            numbers = [record["iteration"] for record in records]
            compared = against_profile(self.plan, profile, records)
            self.journal.profile_check(numbers, self.plan.model_hash, profile.hash, compared)
        self.records = []

    def _profile(self) -> Profile | None:
        """Return the plan's profile, by the launcher's inputs.json or next to the plan; None if not found."""
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
