"""A profile that is wrong by part of the model comes back from what a run measured, and its plan with it."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from omnibal_ext.costs.corrected import BACKWARD, EXCHANGED, FORWARD, Compared, corrected
from omnibal_ext.costs.profile import LayerCost, Profile
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.layout.workload import packs_of_index
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.plan import Plan
from omnibal_ext.report.subject import Subject, against_profile
from tests.unit.layout.instances import make_profile
from tests.unit.report.subjects import MICROBATCHES, RANKS, lane_of, planned, vars_of

PARTS = {"patch_embed": 0, "vit": 0, "projector": 1, "word_embed": 2, "llm": 2, "head": 3}
Wrong = tuple[tuple[float, ...], tuple[float, ...], float, float]
"""By what forwards and backwards of ViT, projector, language layers and head are off, the executor and the update."""
BY = {"run": "RUN", "profile_hash": "ab", "iterations": [4]}


def falsified(profile: Profile, by: Wrong) -> Profile:
    """The profile with its seconds divided, part by part, figure by figure."""
    forwards, backwards, other, update = by

    def wrong(kind: str, cost: LayerCost) -> LayerCost:
        forward, backward, changed = forwards[PARTS[kind]], backwards[PARTS[kind]], {}
        for entry in fields(LayerCost):
            value, name = getattr(cost, entry.name), entry.name
            if name.startswith(("host", "exchange")) or not name.endswith(("seconds", "fit")) or value is None:
                continue
            is_forward = name.startswith(("forward", "recompute"))
            off = update if name == "step_seconds" else forward if is_forward else backward
            changed[name] = tuple(one / off for one in value) if isinstance(value, tuple) else value / off
        return replace(cost, **changed)

    layers, whole = ({kind: wrong(kind, cost) for kind, cost in costs.items()}
                     for costs in (profile.layers, profile.whole_layers))  # fmt: skip
    return replace(profile, layers=layers, whole_layers=whole, action_seconds=profile.action_seconds / other,
                   iteration_seconds=profile.iteration_seconds / update)  # fmt: skip


def record_of(plan: Plan, profile: Profile, index: PackedIndex) -> dict[str, Any]:
    """An iteration of the plan's on a machine on which this profile holds, where all ranks meet before the update. Of W
    no part of the model is recorded; of E and V the projector is, which is predicted as one with the ViT."""
    subject = Subject("", plan, profile, index)
    packs = [[pack[:] for pack in zip(*(kind[0][d].tolist() for kind in vars_of(subject)), strict=True)]
             for d in range(vars_of(subject)[0].shape[1])]  # fmt: skip
    lanes = [lane_of(lane, 0.0, packs[lane.data_parallel_rank]) for lane in subject.predicted.lanes]
    last = max(lane["actions"][-1][4] for lane in lanes)
    for lane in lanes:
        lane["end"] += last - lane["actions"][-1][4]
    for action in (action for lane in lanes for action in lane["actions"] if action[0] == "W"):
        action[5] = [["other", "weight", action[4] - action[3]]]
    for action in (action for lane in lanes for action in lane["actions"] if action[0] in "EV"):
        vit = [[part, phase, 0.75 * seconds] for part, phase, seconds in action[5] if part == "vit"]
        projector = [["projector", phase, seconds / 3] for _, phase, seconds in vit]
        action[5] = [piece for piece in action[5] if piece[0] != "vit"] + vit + projector
    return {"iteration": 4, "lanes": lanes}


@pytest.mark.parametrize(
    ("schedule", "road", "wrong_by"),
    [("1f1b", "cut", ((3.0, 0.5, 0.4, 1.2), (2.0, 0.7, 0.3, 1.5), 1.6, 2.5)),
     ("zb_h1", "cut", ((3.0, 0.5, 0.4, 1.2), (1.7,) * 4, 1.7, 2.5)),
     ("1f1b", "beside", ((3.0, 3.0, 0.4, 1.2), (2.0, 2.0, 0.3, 1.5), 1.6, 1.0))],
    ids=["layers run again", "weight gradients apart", "a tower beside"],
)  # fmt: skip
def test_a_profile_wrong_by_part_comes_back_and_plans_as_the_true_one(
    tmp_path: Path, schedule: str, road: str, wrong_by: Wrong
) -> None:
    plan, index = Plan.load(planned(tmp_path, 200, schedule, road)), PackedIndex.open(tmp_path / "packs")
    first, *others = plan.stages
    if schedule == "1f1b":
        plan = replace(plan, stages=(replace(first, recompute=(first.layers[0] + 1, first.layers[0] + 2)), *others))
    true = replace(Profile.load(tmp_path / "profile.json"), action_seconds=2e-3, iteration_seconds=0.05)
    wrong = falsified(true, wrong_by)
    compared = against_profile(plan, wrong, [record_of(plan, true, index)])
    found = corrected(wrong, compared, BY)
    for ours, theirs in ((found.layers, true.layers), (found.whole_layers, true.whole_layers)):
        for kind in theirs:
            for entry in fields(LayerCost):
                wanted = getattr(theirs[kind], entry.name)
                assert getattr(ours[kind], entry.name) == pytest.approx(wanted), (kind, entry.name)
    assert found.action_seconds == pytest.approx(true.action_seconds)
    assert (found.iteration_seconds, found.corrected_by) == (pytest.approx(true.iteration_seconds), BY)
    if road == "cut":
        cuts = []
        for profile in (true, found, wrong):
            packs = packs_of_index(index, profile, MICROBATCHES, 1)
            problem = LayoutProblem(profile, RANKS, MICROBATCHES, 1, schedule, 74 * 2**30, packs)
            cuts.append(find_layouts(problem, "profile")[0].layout)
        assert cuts[0] == cuts[1] != cuts[2]


def test_every_second_of_a_layer_is_scaled_but_the_hosts() -> None:
    seconds = {entry.name for entry in fields(LayerCost) if entry.name.endswith(("seconds", "fit"))}
    hosts = {name for name in seconds if name.startswith("host")}
    assert {*FORWARD, *BACKWARD, *EXCHANGED, "step_seconds"} == seconds - hosts


def test_what_did_not_run_or_had_no_seconds_stays_as_it_is() -> None:
    """No images, an update that the profile takes for free, backwards shorter than what they are said to hold again."""
    profile = make_profile()
    compared = [Compared("vit", "forward", 0.0, 0.0), Compared("update", "update", 0.0, 1.0),
                Compared("llm", "backward", 2.0, 1.0), Compared("llm", "recompute", 4.0, 0.0),
                Compared("head", "forward", 1.0, 3.0)]  # fmt: skip
    found = corrected(profile, compared, BY)
    assert found.layers == profile.layers | {"head": found.layers["head"]}
    assert found.layers["head"].forward_seconds == 3 * profile.layers["head"].forward_seconds


def test_a_corrected_profile_says_so_when_it_is_read_again(tmp_path: Path) -> None:
    found = corrected(make_profile(), [], BY)
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found
    assert found.hash != make_profile().hash
