"""Predicted (by the profile) and measured seconds of recorded iterations."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from omnibal_ext.chain import TIMED_PART_OF
from omnibal_ext.costs.corrected import EXCHANGE, OTHER, UPDATE, WHOLE, Compared
from omnibal_ext.costs.profile import Profile
from omnibal_ext.plan import Plan
from omnibal_ext.report.subject import Subject
from omnibal_ext.report.timeline import Timeline

PARTS = (*dict.fromkeys(TIMED_PART_OF.values()), OTHER, EXCHANGE, UPDATE, WHOLE)
"""What is compared, in the order shown."""


def against_profile(plan: Plan, profile: Profile, records: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """Return predicted and measured seconds per rank and iteration by part and phase, mean over `records` (lines of
    timeline.jsonl); predictions are for the packs of these iterations.

    Separate weight gradients (W) are recorded without parts: they are divided among the parts as predicted. A
    replicated vision tower is predicted as one part: its projector counts as "vit".
    """
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        for side, timeline in enumerate(Subject("", plan, profile, records=(dict(record),)).timelines):
            for (part, phase), seconds in _seconds(timeline).items():
                named = "vit" if plan.tower and part == "projector" else part
                found[named, phase][side] += seconds / len(records)
    weights = [both for (_, phase), both in found.items() if phase == "weight"]
    planned, measured = (sum(both[side] for both in weights) for side in (0, 1))
    for both in weights if planned else ():
        both[1] = both[0] * measured / planned
    in_order = sorted(found.items(), key=lambda one: PARTS.index(one[0][0]))
    return [Compared(part, phase, *seconds) for (part, phase), seconds in in_order]


def _seconds(timeline: Timeline) -> dict[tuple[str, str], float]:
    """Seconds by part and phase, mean over ranks; and those of the whole iteration."""
    totals = {**timeline.totals(), (UPDATE, UPDATE): sum(lane.end - lane.update_at for lane in timeline.lanes)}
    return {**{key: total / len(timeline.lanes) for key, total in totals.items()}, (WHOLE, WHOLE): timeline.seconds}
