"""Encoders beside the pipeline of models that hear: what E and V take, and what passes the stages behind them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.costs.tower import TowerCosts, rest_profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.beside import TowerBeside, largest_share
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import make_plan
from omnibal_ext.layout.tower_layout import TOWER_LAYOUTS, plan_tower
from omnibal_ext.modalities.modality import AUDIO, Size
from omnibal_ext.plan import Plan
from omnibal_ext.plan_tower import Tower, tower_ends, tower_layout
from omnibal_ext.report.timeline import layout_of, predicted, problem_of

from .instances import FRAMES, make_profile

PROFILE = replace(make_profile(2, 2, audio=2), transfer_seconds_per_byte=0.5)
"""audio_embed audio audio audio_projector | patch_embed vit vit projector | word_embed llm llm head"""


def packs(*frames: int) -> PackSizes:
    """One microbatch of 2 tiles of 4 and 64 tokens of 128 for each of these frames of 32."""
    heard = np.array(frames, dtype=np.int64)[None, None]
    return PackSizes(0 * heard + 2, 0 * heard + 64, 0 * heard, more={"frames": heard})


SIZES: tuple[Size, Size] = ("frames", "tiles")
AUDIO_BESIDE = "audio=beside,vision=cut"
TOWERS = {"beside": 8, AUDIO_BESIDE: 4}
"""Of each layout the layers of the tower, in `PROFILE`'s chain."""


@pytest.mark.parametrize("layout", TOWERS)
def test_what_a_tower_that_hears_takes_by_hand(layout: str) -> None:
    """Of the packs' frames and, with both encoders, of their tiles: seconds, bytes and hops on two ranks."""
    layers, heard = TOWERS[layout], np.array([0, FRAMES, FRAMES // 2]) / FRAMES
    seen = 0.5 * (layout == "beside")  # two of four tiles
    tower = Tower(layers, (0,) * layers, ((0,),) * 3, "bubbles", (1,), dict.fromkeys(SIZES[: 1 + (layers == 8)], 1.0))
    beside = TowerBeside(tower, TowerCosts.of(PROFILE, layers), PROFILE, 2, packs(0, FRAMES, FRAMES // 2))
    found, vit = beside.encoding(0), PROFILE.layers["vit"]
    assert found.seconds[0, 0] == pytest.approx(4 * 0.1 * heard + seen * (0.2 + 2 * vit.forward_seconds))
    again = 0.1 * heard  # of layer 1, an audio layer
    assert found.seconds[1, 0] == pytest.approx(4 * 0.2 * heard + seen * (0.4 + 2 * vit.backward_seconds) + again)
    assert found.hops == pytest.approx(0.5 * (heard + seen))
    assert found.waiting == pytest.approx(heard + seen)
    assert found.kept[0] == pytest.approx(4 * heard + seen * (2 + 2 * vit.kept_bytes))
    both = 4 * 0.1 + 4 * 0.2, 2 * 0.1 + 2 * 0.2 + 2 * (vit.forward_seconds + vit.backward_seconds)
    ratio = (both[0] / FRAMES) / (both[1] / 4) if layers == 8 else 1.0
    assert beside.costs.rates == {"frames": pytest.approx(ratio)} | ({"tiles": 1.0} if layers == 8 else {})


def test_audio_tokens_pass_the_stages_that_hold_the_vision_tower() -> None:
    """With the audio encoder alone beside, as behind the audio projector of the whole chain."""
    behind = rest_profile(PROFILE, 4)
    assert behind.chain[0] == "patch_embed"
    assert behind.tokens_after == {kind: after[4:] for kind, after in PROFILE.tokens_after.items()}
    assert not rest_profile(PROFILE, 8).tokens_after
    given = packs(0, FRAMES, FRAMES // 2)
    whole, rest = LayoutProblem(PROFILE, 3, 3, packs=given), LayoutProblem(behind, 2, 3, packs=given)
    cut = whole.stage_costs(Layout((0, 4, 6, 12), ((), (5,), ())))
    found = rest.stage_costs(Layout((0, 2, 8), ((1,), ())))
    for name in ("forward", "backward", "kept", "transfer"):
        assert getattr(found, name) == pytest.approx(getattr(cut, name)[1:]), name


def test_units_of_both_encoders_are_shared_out_together() -> None:
    """Four images and two sounds over three workers: two of the six alike units each."""
    costs = TowerCosts.of(replace(PROFILE, image_tiles=8.0), 8)
    share = largest_share(costs, {"tiles": np.array(32.0), "frames": np.array(2.0 * AUDIO.typical)}, 3)
    assert share["tiles"] == pytest.approx(32 / 3)
    assert share["frames"] == pytest.approx(2 * AUDIO.typical / 3)


@pytest.mark.parametrize("layout", [*TOWERS, "auto"])
def test_a_tower_that_hears_is_planned_beside_the_pipeline(layout: str, tmp_path: Path) -> None:
    """A plan that the report reads back, as fast as the search says; auto is the fastest of the three."""
    problem = LayoutProblem(PROFILE, 2, 4, packs=packs(0, FRAMES, FRAMES // 2, FRAMES), memory_bytes=1e4)
    found, candidates, said = plan_tower(problem, layout, "joint", seconds=0.2)
    chosen = said["tower"]["road"]
    plan = make_plan(found, candidates, "joint")
    plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    again = problem_of(plan, PROFILE, problem.packs)
    assert again.step_seconds(layout_of(plan)) == pytest.approx(candidates[0].step_seconds)
    assert predicted(again, layout_of(plan)).seconds == pytest.approx(again.iteration_seconds(layout_of(plan))[0])
    if layout == "auto":
        steps = {one: said["tower"][f"{one}_step_seconds"] for one in ("cut", *TOWERS)}
        assert steps[chosen] == min(steps.values())
    else:
        assert (chosen, found.layers_beside) == (layout, TOWERS[layout])
        assert plan.tower is not None
        assert tuple(plan.tower.rates) == SIZES[: 1 + (layout == "beside")]


def test_audio_alone_is_for_models_that_hear() -> None:
    with pytest.raises(UserError, match=f"--tower {AUDIO_BESIDE}: tiny has other encoders"):
        plan_tower(LayoutProblem(make_profile(2, 2), 2, 2), AUDIO_BESIDE, "joint", seconds=0.1)
    assert tower_layout("vision=cut,audio=beside") == AUDIO_BESIDE
    assert tower_ends(PROFILE.chain) == {"beside": "word_embed", AUDIO_BESIDE: "patch_embed"}
    assert [tower_layout(f"audio={one},vision={one}") for one in ("cut", "beside")] == ["cut", "beside"]
    assert tower_layout("audio=cut,vision=beside") not in TOWER_LAYOUTS
