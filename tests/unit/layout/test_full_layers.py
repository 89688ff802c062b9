"""ViT layers that see whole images among layers that see windows: each costs what it does, wherever the cut lies."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import FULL
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.costs.works import IMAGE_PATCHES, layer_works
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.packing.costs import PackCosts

from .instances import make_profile, random_problem


def profile_of(full_layers: tuple[int, ...] = (1, 3), **changes: float) -> Profile:
    """Four ViT layers of 1 s forward and 2 s backward; those that see whole images take 1.5 and 3.5."""
    plain = make_profile(4, 2)
    full = replace(plain.layers["vit"], **{"forward_seconds": 1.5, "backward_seconds": 3.5} | changes)
    return replace(plain, layers=plain.layers | {FULL: full}, layers_apart={FULL: full_layers})


@pytest.mark.parametrize("edge", range(1, 9))
def test_a_stage_takes_what_its_layers_take(edge: int) -> None:
    """The chain is patch_embed, vit 0 to 3, projector, word_embed, llm 0 and 1, head; a pack of two of four tiles."""
    packs = PackSizes(*(np.array([[[size, size]]], dtype=np.int64) for size in (2, 128, 128**2)))
    costs = profile_of()
    problem = LayoutProblem(costs, ranks=2, microbatches=2, packs=packs)
    found = problem.stage_costs(Layout((0, edge, 10), ((), ())))
    forward = np.array([0.05, 0.5, 0.75, 0.5, 0.75, 0.05, 0.1, 2.0, 2.0, 0.1])
    backward = np.array([0.1, 1.0, 1.75, 1.0, 1.75, 0.1, 0.2, 4.0, 4.0, 0.2])
    assert found.forward[:, 0] == pytest.approx([forward[:edge].sum(), forward[edge:].sum()])
    assert found.backward[:, 0] == pytest.approx([backward[:edge].sum(), backward[edge:].sum()])
    assert problem.ideal_seconds() == pytest.approx(2 * (forward.sum() + backward.sum()) / 2)
    windows = LayoutProblem(replace(costs, layers_apart={}), ranks=2, microbatches=2, packs=packs)
    assert problem.stage_peak_bytes(Layout((0, edge, 10), ((), ()))) == windows.stage_peak_bytes(
        Layout((0, edge, 10), ((), ()))
    )


def test_running_one_again_takes_the_mean() -> None:
    """Half of the ViT's layers take 1.5 s forward instead of 1."""
    problem = LayoutProblem(profile_of(), ranks=1, microbatches=1)
    plain, again = (problem.step_seconds(Layout((0, 10), (ids,))) for ids in ((), (1, 2, 3)))
    assert again - plain == pytest.approx(3 * 1.25)


@pytest.mark.parametrize("full", [(0, 1), (2, 3)])
def test_the_cut_follows_them(full: tuple[int, ...]) -> None:
    """With the heavy ViT layers first, or last, even shares of forward and backward lie elsewhere."""
    costs = profile_of(full, forward_seconds=4.0, backward_seconds=8.0)
    problem = LayoutProblem(costs, ranks=2, microbatches=32)
    best = find_layouts(problem, "joint")[0]
    cuts = {edge: problem.step_seconds(Layout((0, edge, 10), ((), ()))) for edge in range(1, 10)}
    assert best.layout.edges[1] == min(cuts, key=lambda edge: cuts[edge])
    seconds = np.array([0.3, *(12.0 if layer in full else 3.0 for layer in range(4)), 0.3, 0.3, 6.0, 6.0, 0.3])
    assert best.layout.edges[1] == min(range(1, 10), key=lambda e: max(seconds[:e].sum(), seconds[e:].sum()))


@pytest.mark.parametrize("seed", [7, 17, 27, 37, 47, 57])
def test_random_problems_have_them(seed: int) -> None:
    """So that brute force and the bounds' tests (test_joint.py) meet them."""
    profile = random_problem(seed).profile
    assert profile.layers_apart[FULL]
    assert FULL in profile.layers


def test_the_two_kinds_make_up_the_mean_of_qwen2_5_vl() -> None:
    """4 of 32 layers see 2,304 patches, the others 64 (windows of 4 x 4 squares of 2 x 2 patches)."""
    model = preset("qwen2.5-vl-7b")
    profile = analytic_profile(model, "h100", 16384, 4096)
    assert profile.cost_kinds.count(FULL) == 4
    assert profile.cost_kinds[1 + 7] == FULL
    near, far = profile.layers["vit"], profile.layers[FULL]
    attention = far.forward_seconds - near.forward_seconds
    # 4 operations a pair and number of the width (1,280), forward; flash attention at 45% of 989 TFLOP/s.
    assert attention == pytest.approx(4 * 1280 * 16384 * (IMAGE_PATCHES - 64) / (989e12 * 0.45))
    assert far.backward_seconds - near.backward_seconds == pytest.approx(2.5 * attention)
    assert far.kept_bytes == near.kept_bytes
    mean = layer_works(model, 16384, 4096, 1)["vit"].attention / (989e12 * 0.45)
    assert (28 * near.forward_seconds + 4 * far.forward_seconds) / 32 - near.forward_seconds == pytest.approx(
        mean * (1 - 64 / (4 / 32 * IMAGE_PATCHES + 28 / 32 * 64))
    )
    tiles = PackCosts.of_profile(profile).parts["vision"]["tiles"] * 16384
    layers = [profile.layers[kind] for kind in profile.cost_kinds[:34]]
    assert tiles == pytest.approx(sum(cost.forward_seconds + cost.backward_seconds for cost in layers))


def test_their_costs_are_read_again_and_missed(tmp_path: Path) -> None:
    profile = profile_of()
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    layers = {kind: cost for kind, cost in profile.layers.items() if kind != FULL}
    with pytest.raises(UserError, match=f"layer {FULL}: no costs, but the chain has one"):
        replace(profile, layers=layers).validate()
