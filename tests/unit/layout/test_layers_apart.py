"""Layers of other kinds than the rest of their part: each costs what it does, wherever the cut lies.

ViT layers that see whole images among those that see windows; language layers of every kind among those of attention.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.costs.works import IMAGE_PATCHES
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.packing.costs import PackCosts

from .instances import FULL, LANGUAGE, make_profile

KINDS = (FULL, *LANGUAGE)
OTHERS = (0, 1, 3)
"""Of the four layers of a part, those that are of another kind."""
SECONDS = {"forward_seconds": 1.5, "backward_seconds": 3.5}
BYTES = {"kept_bytes": 9.0, "weight_bytes": 3.0, "late_bytes": 5.0, "step_seconds": 0.5}
PARTS = {"vit": range(1, 5), "llm": range(7, 11)}
"""Their links: the chain is patch_embed, vit 0 to 3, projector, word_embed, llm 0 to 3, head."""


def profile_of(*kinds: str) -> Profile:
    """ViT layers of 1 s forward and 2 s backward, language layers of 2 s and 4 s that keep 6 bytes; `OTHERS` are of
    these kinds, in turn, and take 1.5 s and 3.5 s."""
    plain, language = make_profile(4, 4), [kind for kind in kinds if kind != FULL]
    apart = {kind: OTHERS[number :: len(language)] for number, kind in enumerate(language)}
    layers = plain.layers | dict.fromkeys(language, replace(plain.layers["llm"], **SECONDS, **BYTES))
    if FULL in kinds:
        apart |= {FULL: OTHERS}
        layers |= {FULL: replace(plain.layers["vit"], **SECONDS)}
    return replace(plain, layers=layers, layers_apart=apart)


PROFILES = [*map(profile_of, KINDS), profile_of(*KINDS)]
"""With layers of each kind, and of all of them."""


@pytest.mark.parametrize("profile", PROFILES)
def test_a_stage_takes_and_holds_what_its_layers_do(profile: Profile) -> None:
    """Of a pack of two of four tiles, at every cut."""
    packs = PackSizes(*(np.array([[[size, size]]], dtype=np.int64) for size in (2, 128, 128**2)))
    problem = LayoutProblem(profile, ranks=2, microbatches=2, packs=packs, memory_bytes=1e3)
    costs = [profile.layers[kind] for kind in profile.cost_kinds]
    scale = np.array([0.5] * 6 + [1.0] * 6)  # the pack has half of the tiles
    # Of language layers the most that any kind keeps is promised for all.
    promised = [max(costs[one].kept_bytes for one in PARTS["llm"]) if link in PARTS["llm"] else cost.kept_bytes
                for link, cost in enumerate(costs)]  # fmt: skip
    for edge in range(1, len(costs)):
        layout, slices = Layout((0, edge, len(costs)), ((), ())), (slice(edge), slice(edge, None))
        found = problem.stage_costs(layout)
        total = 0.0
        for name in ("forward", "backward"):
            seconds = np.array([getattr(cost, f"{name}_seconds") for cost in costs]) * scale
            assert getattr(found, name)[:, 0] == pytest.approx([seconds[part].sum() for part in slices])
            total += seconds.sum()
        assert found.step == pytest.approx([sum(cost.step_seconds for cost in costs[part]) for part in slices])
        held = [sum(cost.weight_bytes for cost in costs[part]) + in_flight * sum(promised[part])
                for part, in_flight in zip(slices, (2, 1), strict=True)]  # fmt: skip
        assert problem.stage_peak_bytes(layout) == pytest.approx(held)
    assert problem.ideal_seconds() == pytest.approx(total)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("part", PARTS)
def test_running_some_again_takes_the_mean(part: str, profile: Profile) -> None:
    problem = LayoutProblem(profile, ranks=1, microbatches=1, memory_bytes=1e3)
    links = PARTS[part]
    mean = np.mean([profile.layers[profile.cost_kinds[link]].forward_seconds for link in links])
    plain = problem.step_seconds(Layout((0, 12), ((),)))
    for count in range(5):
        again = problem.step_seconds(Layout((0, 12), (tuple(links)[:count],)))
        assert again - plain == pytest.approx(count * mean)


@pytest.mark.parametrize("full", [(0, 1), (2, 3)])
def test_the_cut_follows_them(full: tuple[int, ...]) -> None:
    """With the heavy ViT layers first, or last, even shares of forward and backward lie elsewhere."""
    plain = make_profile(4, 2)
    heavy = replace(plain.layers["vit"], forward_seconds=4.0, backward_seconds=8.0)
    costs = replace(plain, layers=plain.layers | {FULL: heavy}, layers_apart={FULL: full})
    problem = LayoutProblem(costs, ranks=2, microbatches=32)
    best = find_layouts(problem, "joint")[0]
    cuts = {edge: problem.step_seconds(Layout((0, edge, 10), ((), ()))) for edge in range(1, 10)}
    assert best.layout.edges[1] == min(cuts, key=lambda edge: cuts[edge])
    seconds = np.array([0.3, *(12.0 if layer in full else 3.0 for layer in range(4)), 0.3, 0.3, 6.0, 6.0, 0.3])
    assert best.layout.edges[1] == min(range(1, 10), key=lambda e: max(seconds[:e].sum(), seconds[e:].sum()))


def test_the_two_kinds_make_up_the_mean_of_qwen2_5_vl() -> None:
    """4 of 32 layers see 2,304 patches, the others 64 (windows of 4 x 4 squares of 2 x 2 patches)."""
    model = preset("qwen2.5-vl-7b")
    profile = analytic_profile(model, "h100", 16384, 4096)
    assert profile.cost_kinds.count("vit.7") == 4
    assert profile.cost_kinds[1 + 7] == "vit.7"
    near, far = profile.layers["vit"], profile.layers["vit.7"]
    attention = far.forward_seconds - near.forward_seconds
    # 4 operations a pair and number of the width (1,280), forward; flash attention at 45% of 989 TFLOP/s.
    assert attention == pytest.approx(4 * 1280 * 16384 * (IMAGE_PATCHES - 64) / (989e12 * 0.45))
    assert far.backward_seconds - near.backward_seconds == pytest.approx(2.5 * attention)
    assert far.kept_bytes == near.kept_bytes
    tiles = PackCosts.of_profile(profile).parts["vision"]["tiles"] * 16384
    layers = [profile.layers[kind] for kind in profile.cost_kinds[:34]]
    assert tiles == pytest.approx(sum(cost.forward_seconds + cost.backward_seconds for cost in layers))


def test_linear_layers_grow_with_length_and_others_with_its_square() -> None:
    model = preset("qwen3.5-27b")
    profile = analytic_profile(model, "h100", 4096, 16384)
    assert profile.cost_kinds.count("llm") == 48, "the first layer is linear"
    assert profile.cost_kinds.count("llm.3") == 16
    long, short = (
        PackSizes(np.array([0]), np.array([16384]), np.array([squares])) for squares in (16384**2, 4 * 4096**2)
    )
    assert profile.forward_seconds("llm", long) == profile.forward_seconds("llm", short)
    square = 2 * 24 * 256 / (989e12 * 0.45)  # operations a pair of tokens under the causal mask
    full = profile.forward_seconds("llm.3", long) - profile.forward_seconds("llm.3", short)
    assert full == pytest.approx(square * (16384**2 - 4 * 4096**2))
    attention = PackCosts.of_profile(profile).parts["language"]["attention"]
    assert attention == pytest.approx(16 * square * 3.5)


@pytest.mark.parametrize("kind", KINDS)
def test_their_costs_are_read_again_and_missed(kind: str, tmp_path: Path) -> None:
    profile = profile_of(kind)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    layers = {name: cost for name, cost in profile.layers.items() if name != kind}
    with pytest.raises(UserError, match=f"layer {kind}: no costs, but the chain has one"):
        replace(profile, layers=layers).validate()
