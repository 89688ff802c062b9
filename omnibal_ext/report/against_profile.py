"""What the profile of a plan says of iterations that were recorded, beside what they took."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from omnibal_ext.costs.corrected import EXCHANGE, OTHER, UPDATE, WHOLE, Compared
from omnibal_ext.costs.profile import Profile
from omnibal_ext.plan import Plan
from omnibal_ext.report.subject import Subject
from omnibal_ext.report.timeline import Timeline

PARTS = ("vit", "projector", "llm", "head", OTHER, EXCHANGE, UPDATE, WHOLE)


def against_profile(plan: Plan, profile: Profile, records: Sequence[Mapping[str, Any]]) -> list[Compared]:
    """Seconds of a rank and iteration, mean over `records`, lines of timeline.jsonl; predicted for the packs they ran.

    Gradients of weights that come apart (W) are recorded as a whole: they are dealt over the parts as planned. A tower
    beside the pipeline is predicted as a whole: its projector counts as its ViT.
    """
    found: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for record in records:
        for side, timeline in enumerate(Subject("", plan, profile, records=(dict(record),)).timelines):
            for (part, phase), seconds in _seconds(timeline).items():
                whole = "vit" if plan.tower and part == "projector" else part
                found[whole, phase][side] += seconds / len(records)
    weights = [both for (_, phase), both in found.items() if phase == "weight"]
    planned, measured = (sum(both[side] for both in weights) for side in (0, 1))
    for both in weights if planned else ():
        both[1] = both[0] * measured / planned
    in_order = sorted(found.items(), key=lambda one: PARTS.index(one[0][0]))
    return [Compared(part, phase, *seconds) for (part, phase), seconds in in_order]


def _seconds(timeline: Timeline) -> dict[tuple[str, str], float]:
    """Of a rank, by part and phase; and of the whole iteration."""
    totals = {**timeline.totals(), (UPDATE, UPDATE): sum(lane.end - lane.updates for lane in timeline.lanes)}
    return {**{key: total / len(timeline.lanes) for key, total in totals.items()}, (WHOLE, WHOLE): timeline.seconds}
