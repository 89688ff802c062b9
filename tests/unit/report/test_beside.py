"""The report of a run whose tower stands beside the pipeline: every E and V drawn, shares whole, both layouts said."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from omnibal_ext.layout.problem import Layout
from omnibal_ext.plan import Plan
from omnibal_ext.report.breakdown import EXECUTOR, NEEDED, RECOMPUTED, breakdown, changes
from omnibal_ext.report.page import heading, report
from omnibal_ext.report.subject import Subject
from omnibal_ext.report.timeline import predicted
from tests.unit.report.subjects import MICROBATCHES, RANKS, REPLICAS, assert_whole, planned, ran


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    folder = tmp_path_factory.mktemp("beside")
    planned(folder, road="beside")
    return Subject.of_run(ran(folder))


def test_the_page_draws_every_action_and_the_towers_in_the_colours_of_the_vit(subject: Subject) -> None:
    """Predicted and measured."""
    page, plan = report([subject]), subject.plan
    assert plan.tower is not None
    parts = sum(len(ranks) for ranks in plan.tower.encoding_ranks)
    for kind, phase in (("E", "forward"), ("V", "backward")):
        drawn = re.findall(rf"aria-label=.rank \d: {kind}\d+, tower, [^;]*; ([^\"']*)", page)
        assert len(drawn) == 2 * REPLICAS * parts
        assert all(f"vit {phase}" in made_of or made_of.startswith("other") for made_of in drawn)
    stages = re.findall(r"aria-label=.rank \d: [FB]\d+, stage \d", page)
    assert len(stages) == 2 * REPLICAS * RANKS * MICROBATCHES * 2


def test_the_causes_are_all_of_the_iteration_with_e_and_v_among_them(subject: Subject) -> None:
    """Of predictions each action is as long as what it is made of; what V runs again is no needed work."""
    timeline, beside = subject.predicted, subject.problem.beside
    assert beside is not None
    assert_whole(timeline)
    shares, every = breakdown(timeline), timeline.seconds * len(timeline.lanes)
    assert sum(shares.values()) == pytest.approx(1)
    assert all(share > -1e-9 for share in shares.values())
    again = replace(beside.tower, recompute=beside.costs.vit_layers)
    rerun = predicted(replace(subject.problem, beside=replace(beside, tower=again)), subject.layout)
    more = breakdown(rerun)[RECOMPUTED] * rerun.seconds * len(rerun.lanes) - shares[RECOMPUTED] * every
    encoded = [(r, m) for r in range(REPLICAS) for m, ranks in enumerate(beside.tower.encoding_ranks) for _ in ranks]
    parts = [{size: load[one] for size, load in beside.loads.items()} for one in encoded]
    backward, layers = beside.costs.backward, beside.costs.vit_layers
    assert more == pytest.approx(float(sum(backward(n, layers) - backward(n, beside.tower.recompute) for n in parts)))


def test_what_was_measured_as_predicted_is_read_as_predicted(subject: Subject) -> None:
    assert subject.measured is not None
    found, expected = breakdown(subject.measured), breakdown(subject.predicted)
    for cause in (NEEDED, RECOMPUTED, EXECUTOR):  # waits are told apart by where measured ranks meet
        assert found[cause] == pytest.approx(expected[cause], abs=1e-6)
    of_tower = [p for p in subject.predicted.transfers() if {p[0].action.kind, p[2].action.kind} & {"E", "V"}]
    ways = {(made.action.kind, taken.action.kind) for made, _, taken, _ in of_tower}
    assert ways == {("E", "F"), ("B", "V")}
    for made, _, taken, _ in of_tower:
        assert made.end <= taken.start


def test_only_recomputation_is_tried_and_the_towers_with_it(subject: Subject) -> None:
    """Other schedules and numbers of microbatches would be planned anew; of what is tried the gain is a problem's own
    that keeps all."""
    beside = subject.problem.beside
    assert beside is not None
    again = replace(beside.tower, recompute=beside.costs.vit_layers)
    rerun = replace(subject.problem, beside=replace(beside, tower=again))
    bare = Layout(subject.layout.edges, ((),) * RANKS)
    kept = replace(subject.problem, beside=replace(beside, tower=replace(again, recompute=())))
    gain = rerun.step_seconds(subject.layout) / kept.step_seconds(bare) - 1
    (found,) = changes(rerun, subject.layout)
    assert found.gain == pytest.approx(gain)
    assert found.gain > 0.05
    assert {change.what for change in changes(subject.problem, subject.layout)} <= {"nothing recomputed"}
    assert "are not tried here" in report([subject])


def test_the_chain_is_cut_behind_the_tower(subject: Subject) -> None:
    """And what V recomputes of it is marked."""
    tower = subject.plan.tower
    assert tower is not None
    (listed,) = re.findall(r"<ol class='stages' start='0'>(.*?)</ol>", report([subject]))
    stages = re.findall("<li>(.*?)</li>", listed)
    assert len(stages) == RANKS
    assert stages[0].startswith("word_embed")
    assert not any("vit" in stage for stage in stages)
    plan = replace(subject.plan, tower=replace(tower, recompute=(1,)))
    page = report([replace(subject, plan=plan)])
    assert len(re.findall("class='layer (?:patch_embed|vit|projector) recomputed'", page)) == 1


def test_both_layouts_are_said_with_their_shares_of_text_only_speed(subject: Subject) -> None:
    assert subject.plan.tower is not None
    said = {"road": "beside", "beside_step_seconds": 1.25, "cut_step_seconds": 1.6, "text_only_step_seconds": 1.0}
    for given, words in (
        (said, "cut 1,600.00 ms, 62.5% of text-only speed; beside 1,250.00 ms, 80.0% of text-only speed"),
        ({"road": "beside", "no_plan_cut": "why", "beside_step_seconds": 1.25}, "cut: why; beside 1,250.00 ms"),
    ):
        plan = replace(subject.plan, predicted={"tower": given})
        found = dict(heading(replace(subject, plan=plan)))["vision tower"]
        assert found == f"beside, {subject.plan.tower.mode} (predicted: {words})"
    own = subject.plan.predicted["tower"]
    assert f"{own['share_of_text_only']:.1%} of text-only speed" in dict(heading(subject))["vision tower"]


def test_a_plan_is_predicted_on_other_packs_than_it_was_made_for(subject: Subject) -> None:
    """E and V too."""
    folder = Path(subject.name).parent
    on_packs, full = (Subject.of_plan(folder / "plan.json", None, packs) for packs in (folder / "packs", None))
    assert on_packs.problem.step_seconds(on_packs.layout) > 0
    longest = max(lane.end for lane in predicted(full.problem, full.layout).lanes)
    assert longest == pytest.approx(full.problem.step_seconds(full.layout))
    assert longest > max(lane.end for lane in on_packs.predicted.lanes)
    assert Plan.load(folder / "plan.json").tower is not None
