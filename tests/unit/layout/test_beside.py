"""A tower beside the pipeline, planned: what E and V take, bytes and owners by hand; the faster layout is taken."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import LayerCost, PackSizes, Profile
from omnibal_ext.costs.tower import TowerCosts, language_profile, owners_by_bytes
from omnibal_ext.errors import UserError
from omnibal_ext.layout.anneal import judged
from omnibal_ext.layout.beside import TowerBeside, largest_share
from omnibal_ext.layout.insertion_search import insertion_costs
from omnibal_ext.layout.lists import state_of
from omnibal_ext.layout.problem import LayoutProblem
from omnibal_ext.layout.search import find_plan, make_plan
from omnibal_ext.layout.tower_layout import _best_insertions, _with_insertions, plan_beside, plan_tower
from omnibal_ext.plan import Plan
from omnibal_ext.plan_tower import Tower
from omnibal_ext.report.timeline import layout_of, predicted, problem_of
from omnibal_ext.schedules.actions import Beside
from omnibal_ext.schedules.weaving import first_and_last, in_time
from omnibal_ext.trained import Trained
from tests.unit.drawn import drawn_parts
from tests.unit.layout.instances import make_profile
from tests.unit.report.subjects import assert_whole

VIT = LayerCost(0.3, 0.6, 8.0, 1.0, 10.0, 4.0, forward_fit=(0.1, 0.05, 0.0), backward_fit=(0.2, 0.1, 0.0))


def small(trained: bool = True, tensor: int = 1) -> Profile:
    """Two ViT layers of a fit, four language layers; four tiles fill the budget."""
    sizes = {"patch_embed": 1, "vit": 10, "projector": 2, "word_embed": 5, "llm": 9, "head": 5}
    profile = make_profile(2, 4, {"vit": VIT}, sizes)
    tower = {kind: profile.layers[kind] for kind in ("patch_embed", "vit", "projector")}
    if not trained:
        idle: dict[str, Any] = dict.fromkeys(("backward_seconds", "kept_bytes", "recompute_kept_bytes"), 0.0)
        tower = {kind: replace(cost, **idle, backward_fit=None) for kind, cost in tower.items()}
    whole = tower if tensor > 1 else {}
    return replace(
        profile, layers=profile.layers | tower, trained=Trained(() if trained else ("vit", "projector")),
        tensor_model_parallel_size=tensor, whole_layers=whole, transfer_seconds_per_byte=0.01,
        transfer_latency_seconds=0.02, replica_seconds_per_byte=0.001, action_seconds=0.003,
    )  # fmt: skip


def packs(seed: int, microbatches: int, replicas: int = 2) -> PackSizes:
    random = np.random.default_rng(seed)
    tokens = random.integers(32, 129, (2, replicas, microbatches))
    return PackSizes(random.integers(0, 5, tokens.shape), tokens, tokens**2)


def problem(
    seed: int = 0, ranks: int = 2, microbatches: int = 4, trained: bool = True, **fields: object
) -> LayoutProblem:
    given = {"packs": packs(seed, microbatches), "memory_bytes": 500.0} | fields
    return LayoutProblem(small(trained), ranks, microbatches, **given)  # type: ignore[arg-type]


def test_what_a_tower_takes_by_hand() -> None:
    costs = TowerCosts.of(small(), 4)
    tiles = {"tiles": np.array([0.0, 1.0, 4.0])}
    # Light layers take 0.1 and 0.2 at four tiles, in proportion; ViT layers as their fits say.
    assert costs.forward(tiles) == pytest.approx([0.0, 2 * 0.15 + 2 * 0.1 / 4, 2 * 0.3 + 2 * 0.1])
    assert costs.backward(tiles) == pytest.approx([0.0, 2 * 0.3 + 2 * 0.2 / 4, 2 * 0.6 + 2 * 0.2])
    assert costs.backward(tiles, (1,))[2] == pytest.approx(2 * 0.6 + 2 * 0.2 + 0.3)
    assert costs.kept_bytes("tiles") == pytest.approx((2 * 8 + 2) / 4)
    assert costs.kept_bytes("tiles", (2,)) == pytest.approx((8 + 1 + 2) / 4)
    assert (costs.working_bytes("tiles"), costs.working_bytes("tiles", (2,))) == (0, 7 / 4)
    assert costs.output_bytes("tiles") == pytest.approx(1 / 4)
    assert costs.parameters == (1, 10, 10, 2)
    assert costs.copy_bytes == 23 * (2 + 4)
    assert costs.exchange_seconds == pytest.approx(23 * 6 * 0.001)
    shared = small(tensor=2)
    assert TowerCosts.of(shared, 4).forward(tiles).tolist() == costs.forward(tiles).tolist()
    with pytest.raises(UserError, match=r"layer patch_embed: .* tensor-parallel size 2, .* --tower-profile"):
        TowerCosts.of(replace(shared, whole_layers={}), 4)
    assert owners_by_bytes([5, 1, 4, 4, 2], 2) == (0, 0, 1, 1, 0)
    assert owners_by_bytes([1, 1, 1], 4) == (0, 1, 2)
    frozen = TowerCosts.of(small(trained=False), 4)
    assert (frozen.copy_bytes, frozen.exchange_seconds, frozen.kept_bytes("tiles")) == (23 * 2, 0.0, 0.0)


def test_features_travel_with_the_outputs_and_the_language_chain_has_none() -> None:
    profile = replace(small(), feature_layers=(0, 1))
    assert TowerCosts.of(profile, 4).output_bytes("tiles") == pytest.approx(3 / 4)
    language = language_profile(profile)
    assert language.chain == ("word_embed", "llm", "llm", "llm", "llm", "head")
    assert set(language.features_after) == {0}


def test_analytic_profiles_price_whole_layers_only_when_asked() -> None:
    model = preset("qwen2.5-vl-7b")
    plain, asked = (
        analytic_profile(model, "h100", {"tiles": 4096, "tokens": 4096}, 2, 4, replica_ranks=ranks) for ranks in (0, 8)
    )
    assert plain.hash == replace(asked, whole_layers={}, image_tiles=0.0, replica_seconds_per_byte=0.0).hash
    assert not {"whole_layers", "image_tiles", "replica_seconds_per_byte"} & set(plain.to_record())
    one = analytic_profile(model, "h100", {"tiles": 4096, "tokens": 4096}, 1, 4)
    assert set(asked.whole_layers) == {"patch_embed", "vit", "vit.7", "projector"}
    assert all(cost == one.layers[kind] for kind, cost in asked.whole_layers.items())
    assert Profile.from_record(asked.to_record()) == asked


def test_the_largest_share_of_equal_images() -> None:
    costs, load = TowerCosts.of(small(), 4), {"tiles": np.array([0.0, 3.0, 8.0, 9.0])}
    assert largest_share(costs, load, 4)["tiles"].tolist() == [0.0, 1.0, 2.0, 3.0]
    larger = replace(costs, profile=replace(costs.profile, image_tiles=3.0))
    assert largest_share(larger, load, 4)["tiles"] == pytest.approx([0.0, 3.0, 8 / 3, 3.0])


def test_encoding_by_hand() -> None:
    profile = small(tensor=2)
    tower = Tower(4, (0, 1, 2, 3), ((0, 1), (1,)), recompute=(1,))
    sizes = PackSizes(np.array([[[4, 3]]]), np.array([[[9, 9]]]), np.array([[[81, 81]]]))
    beside = TowerBeside(tower, TowerCosts.of(profile, 4), profile, 2, sizes)
    assert beside.loads["tiles"].tolist() == [[1.0, 2.0]]  # four tiles on four workers; three on two
    costs, found = beside.costs, beside.encoding(0)
    expected = costs.forward({"tiles": np.array([1.0, 2.0])}) + 0.003
    assert found.seconds[0] == pytest.approx(np.array([[expected[0], 0.0], expected]))
    back = costs.backward({"tiles": np.array([1.0, 2.0])}, (1,)) + 0.003
    assert found.seconds[1] == pytest.approx(np.array([[back[0], 0.0], back]))
    assert found.hops == pytest.approx([0.02 + 0.01 * 0.25, 0.02 + 0.01 * 0.5])
    assert found.kept[1] == pytest.approx([costs.kept_bytes("tiles", (1,)), 2 * costs.kept_bytes("tiles", (1,))])
    assert found.kept[0] == pytest.approx([costs.kept_bytes("tiles", (1,)), 0.0])
    assert found.waiting == pytest.approx([0.25, 0.5])
    assert found.fixed_bytes == pytest.approx([10 + 138, 10 + 138])  # the fullest tensor rank's layer, copies and sums
    assert found.step == pytest.approx([0.138, 0.138])


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b", 2), ("zb_h1", 1), ("zb_v", 2)])
def test_the_search_judges_places_as_the_simulator_plays_their_lists(schedule: str, chunks: int, trained: bool) -> None:
    for seed in range(6):
        whole = problem(seed, 2, 5, trained, chunks=chunks, schedule_name=schedule, memory_bytes=1e6)
        assert whole.packs is not None
        # A pack without tiles costs an action all the same in the search, and nothing in the simulator.
        if full := seed % 2 == 0:
            whole = replace(whole, packs=replace(whole.packs, tiles=np.maximum(1, whole.packs.tiles)))
        costs = TowerCosts.of(whole.profile, 4)
        alone = replace(whole, profile=language_profile(whole.profile))
        layout = find_plan(alone, "layers")[1][0].layout
        owners = owners_by_bytes(costs.owner_bytes(), 2)
        aside = TowerBeside(Tower(4, owners, ((0,),) * 5), costs, whole.profile, 2, whole.packs)
        costs_of_insertions, state = insertion_costs(whole, alone, layout, aside, 0.0), state_of(alone, layout)
        beside = Beside(drawn_parts(2, 5, seed), not trained)
        early = [in_time(alone.schedule, 5, alone.placement, beside, *how) for how in ((), (3, 2))]
        for insertions in (first_and_last(alone.schedule, beside), *early):
            built = _with_insertions(whole, alone, aside, insertions)
            found = judged(state._replace(insertions=insertions), costs_of_insertions)
            if full:
                assert found == pytest.approx(built.step_seconds(layout), rel=1e-9)
            assert found >= built.step_seconds(layout) * (1 - 1e-9)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_auto"])
def test_a_plan_beside_is_a_plan_that_the_report_reads_back(schedule: str, trained: bool) -> None:
    """Of the fastest: all layers once, bytes within the memory, and what it is judged by is the same again."""
    whole = problem(3, 2, 6, trained, schedule_name=schedule)
    found, (best,) = plan_beside(whole, "joint", seconds=0.2)
    plan = make_plan(found, [best], "joint")
    plan.validate()
    record = plan.to_record()
    read = Plan.from_record(record)
    assert read == plan
    assert plan.tower is not None
    assert plan.tower.mode in (("first", "bubbles") if trained else ("ahead",))
    assert plan.stages[0].layers[0] == 4
    again = problem_of(read, whole.profile, whole.packs)
    assert again.step_seconds(layout_of(read)) == pytest.approx(best.step_seconds, rel=1e-12)
    assert plan.predicted["step_seconds"] == pytest.approx(best.step_seconds)
    assert max(again.stage_peak_bytes(layout_of(read))) <= whole.memory_bytes
    timeline = predicted(again, layout_of(read))
    assert_whole(timeline)
    of_parts = [span for lane in timeline.lanes for span in lane.spans if span.action.kind in "EV"]
    assert {piece.part for span in of_parts for piece in span.pieces} == {"vit", "other"}


def test_the_faster_layout_is_taken_and_said() -> None:
    whole = problem(1, 2, 6)
    cut = find_plan(whole, "joint", seconds=0.2)[1][0].step_seconds
    beside = plan_beside(whole, "joint", seconds=0.2)[1][0].step_seconds
    found, candidates, said = plan_tower(whole, "auto", "joint", seconds=0.2)
    tower = said["tower"]
    assert candidates[0].step_seconds == min(cut, beside)
    assert (tower["cut_step_seconds"], tower["beside_step_seconds"]) == (cut, beside)
    assert tower["road"] == ("cut" if cut <= beside else "beside")
    assert (found.beside is None) == (tower["road"] == "cut")
    text = find_plan(replace(whole, profile=language_profile(whole.profile)), "joint", seconds=0.2)[1][0].step_seconds
    assert tower["share_of_text_only"] == pytest.approx(text / min(cut, beside))
    assert plan_tower(whole, "cut", "joint", seconds=0.2)[2] == {}


def test_a_layout_that_has_no_plan_is_said_or_refused() -> None:
    alone = problem(1, 1, 4)
    _, _, said = plan_tower(alone, "auto", "joint", seconds=0.2)
    assert said["tower"]["road"] == "cut"
    assert "needs two pipeline ranks" in said["tower"]["no_plan_beside"]
    with pytest.raises(UserError, match="needs two pipeline ranks"):
        plan_tower(alone, "beside", "joint", seconds=0.2)
    full = problem(1, 2, 4, memory_bytes=100.0)
    needs = r"pipeline rank 0 needs .* bytes for the tower beside .*, of 100 bytes: cut the chain"
    with pytest.raises(UserError, match=needs):
        plan_beside(full, "joint", seconds=0.2)


def test_places_that_take_more_bytes_than_there_are_are_left_out() -> None:
    """Outputs that wait, which the search of places does not count, are large here."""
    whole = problem(2, 2, 6, memory_bytes=1e6, packs=None)
    layers = whole.profile.layers | {"projector": replace(whole.profile.layers["projector"], output_bytes=300.0)}
    whole = replace(whole, profile=replace(whole.profile, layers=layers, transfer_seconds_per_byte=0.0))
    costs = TowerCosts.of(whole.profile, 4)
    aside = TowerBeside(Tower(4, (0, 1, 0, 1), ((0,),) * 6), costs, whole.profile, 2, None)
    alone = replace(whole, profile=language_profile(whole.profile))
    layout = find_plan(alone, "layers")[1][0].layout
    found, *_ = _best_insertions(whole, alone, layout, aside, 0.0, 0.05)
    assert found is not None
    most = max(found[0].stage_peak_bytes(layout))
    less, short, fullest = _best_insertions(replace(whole, memory_bytes=most - 1), alone, layout, aside, 0.0, 0.05)
    if less is None:
        assert short > 0
        assert fullest in (0, 1)
    else:
        assert max(less[0].stage_peak_bytes(layout)) < most
        assert less[1].step_seconds >= found[1].step_seconds
