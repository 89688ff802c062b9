"""Language layers of other kinds among those of attention: each costs what it does, wherever the cut lies."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import FULL, LINEAR
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.errors import UserError
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.packing.costs import PackCosts

from .instances import LANGUAGE, make_profile, random_problem

CHANGES = {
    "forward_seconds": 1.5, "backward_seconds": 3.5, "kept_bytes": 9.0, "weight_bytes": 3.0, "late_bytes": 5.0,
    "step_seconds": 0.5,
}  # fmt: skip


def profile_of(*kinds: str) -> Profile:
    """Four language layers of 2 s forward and 4 s backward that keep 6 bytes; 0, 1 and 3 are of these kinds in turn, as
    `CHANGES` says."""
    plain, others = make_profile(1, 4), (0, 1, 3)
    apart = {kind: others[number :: len(kinds)] for number, kind in enumerate(kinds)}
    layers = plain.layers | dict.fromkeys(kinds, replace(plain.layers["llm"], **CHANGES))
    return replace(plain, layers=layers, layers_apart=apart)


PROFILES = [*map(profile_of, LANGUAGE), profile_of(*LANGUAGE)]
"""With layers of each kind, and of all of them."""


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("edge", range(1, 9))
def test_a_stage_takes_and_holds_what_its_layers_do(edge: int, profile: Profile) -> None:
    """The chain is patch_embed, vit, projector, word_embed, llm 0 to 3, head; a pack of two of four tiles."""
    packs = PackSizes(*(np.array([[[size, size]]], dtype=np.int64) for size in (2, 128, 128**2)))
    problem = LayoutProblem(profile, ranks=2, microbatches=2, packs=packs, memory_bytes=1e3)
    layout = Layout((0, edge, 9), ((), ()))
    found, costs = problem.stage_costs(layout), [profile.layers[kind] for kind in profile.cost_kinds]
    assert [cost.kept_bytes for cost in costs[4:8]] == [9.0, 9.0, 6.0, 9.0]
    slices = costs[:edge], costs[edge:]
    scale = [0.5] * 3 + [1.0] * 6  # the pack has half of the tiles
    for name in ("forward", "backward"):
        seconds = np.array([getattr(cost, f"{name}_seconds") for cost in costs]) * scale
        assert getattr(found, name)[:, 0] == pytest.approx([seconds[:edge].sum(), seconds[edge:].sum()])
    assert found.step == pytest.approx([sum(cost.step_seconds for cost in part) for part in slices])
    in_flight = (2, 1)  # of 1F1B on two ranks
    costs[6] = replace(costs[6], kept_bytes=9.0)  # the most of both is promised for either
    slices = costs[:edge], costs[edge:]
    held = [
        sum(cost.weight_bytes + count * cost.kept_bytes for cost in part)
        for part, count in zip(slices, in_flight, strict=True)
    ]
    assert problem.stage_peak_bytes(layout) == pytest.approx(held)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("count", range(5))
def test_running_some_again_takes_the_mean(count: int, profile: Profile) -> None:
    """Three of four take 1.5 s instead of 2."""
    problem = LayoutProblem(profile, ranks=1, microbatches=1, memory_bytes=1e3)
    plain, again = (Layout((0, 9), (ids,)) for ids in ((), tuple(range(4, 4 + count))))
    assert problem.step_seconds(again) - problem.step_seconds(plain) == pytest.approx(count * (3 * 1.5 + 2) / 4)


@pytest.mark.parametrize("seed", [4, 14, 24, 34])
def test_random_problems_have_them(seed: int) -> None:
    """So that brute force and the bounds' tests (test_joint.py) meet them."""
    profile = random_problem(seed).profile
    assert profile.layers_apart[LINEAR]
    assert profile.layers[LINEAR].weight_bytes != profile.layers["llm"].weight_bytes


def test_linear_layers_grow_with_length_and_others_with_its_square() -> None:
    model = preset("qwen3.5-27b")
    profile = analytic_profile(model, "h100", 4096, 16384)
    assert profile.cost_kinds.count(LINEAR) == 48
    assert profile.cost_kinds.count("llm") == 16
    long, short = (
        PackSizes(np.array([0]), np.array([16384]), np.array([squares])) for squares in (16384**2, 4 * 4096**2)
    )
    assert profile.forward_seconds(LINEAR, long) == profile.forward_seconds(LINEAR, short)
    square = 2 * 24 * 256 / (989e12 * 0.45)  # operations a pair of tokens under the causal mask
    full = profile.forward_seconds("llm", long) - profile.forward_seconds("llm", short)
    assert full == pytest.approx(square * (16384**2 - 4 * 4096**2))
    attention = PackCosts.of_profile(profile).parts["language"]["attention"]
    assert attention == pytest.approx(16 * square * 3.5)


@pytest.mark.parametrize("kind", LANGUAGE)
def test_their_costs_are_read_again_and_missed(kind: str, tmp_path: Path) -> None:
    profile = profile_of(kind)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    layers = {name: cost for name, cost in profile.layers.items() if name != kind}
    with pytest.raises(UserError, match=f"layer {kind}: no costs, but the chain has one"):
        replace(profile, layers=layers).validate()


def test_older_files_have_fields_of_their_own_for_them(tmp_path: Path) -> None:
    profile = replace(profile_of(LINEAR), layers_apart={FULL: (0,), LINEAR: (0, 1, 3)})
    profile = replace(profile, layers=profile.layers | {FULL: profile.layers["vit"]})
    record = {name: value for name, value in profile.to_record().items() if name != "layers_apart"}
    older = record | {"full_layers": [0], "linear_layers": [0, 1, 3]}
    (tmp_path / "profile.json").write_text(json.dumps(older))
    assert Profile.load(tmp_path / "profile.json") == profile
