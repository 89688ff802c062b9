"""Chains with an audio encoder in front: three sizes of packs, audio tokens that pass the vision tower, three kinds of
layers to recompute."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import PackSizes
from omnibal_ext.errors import UserError
from omnibal_ext.layout.frontier import minimal
from omnibal_ext.layout.partition import cut_bytes
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.tables import SEEING, SEEING_OPTIONS, columns_of
from omnibal_ext.layout.tower_layout import plan_tower

from .instances import FRAMES, make_profile, random_problem

PROFILE = replace(make_profile(2, 2, audio=2), transfer_seconds_per_byte=0.5)
"""audio_embed audio audio audio_projector | patch_embed vit vit projector | word_embed llm llm head"""


def packs(*frames: int) -> PackSizes:
    """One microbatch of 2 tiles of 4 and 64 tokens of 128 for each of these frames of 32."""
    heard = np.array(frames, dtype=np.int64)[None, None]
    return PackSizes(0 * heard + 2, 0 * heard + 64, 0 * heard, frames=heard)


def test_seconds_and_bytes_are_those_of_three_sizes_and_of_sounds_that_pass() -> None:
    """Stages audio_embed audio | audio audio_projector patch_embed vit | vit projector | the rest. Sounds, of
    `output_bytes` of the audio projector, enter the third and the fourth stage beside the hidden states."""
    problem = LayoutProblem(PROFILE, 4, 3, packs=packs(0, FRAMES, FRAMES // 2))
    layout = Layout((0, 2, 6, 8, 12), ((1,), (2, 5), (), ()))
    found, heard, one = problem.stage_costs(layout), np.array([0, 1, 0.5]), np.ones(3)
    audio, other, vit, llm = (PROFILE.layers[kind] for kind in ("audio", "audio_embed", "vit", "llm"))
    light = other.forward_seconds  # of every other kind, at the budgets
    assert audio.forward_seconds == light == 0.1
    assert found.forward[0] == pytest.approx(heard * 2 * light)
    assert found.forward[1] == pytest.approx(heard * 2 * light + one * (light + vit.forward_seconds) / 2)
    assert found.forward[3] == pytest.approx(one * (2 * light + 2 * llm.forward_seconds) / 2)
    assert found.backward[0] == pytest.approx(heard * (2 * 0.2 + light))  # one is run again
    at_budget = PROFILE.transfer_seconds_per_byte
    sounds = PROFILE.layers["audio_projector"].output_bytes * heard
    assert found.transfer[0] == pytest.approx(at_budget * audio.output_bytes * heard)
    assert found.transfer[1] == pytest.approx(at_budget * (vit.output_bytes * one / 2 + sounds))
    assert found.transfer[2] == pytest.approx(at_budget * (PROFILE.layers["projector"].output_bytes * one / 2 + sounds))
    kept = {kind: cost.kept_bytes for kind, cost in PROFILE.layers.items()}
    assert found.kept[2] == pytest.approx((kept["vit"] + kept["projector"]) * one / 2 + sounds)
    assert found.kept[3] == pytest.approx((kept["word_embed"] + 2 * kept["llm"] + kept["head"]) * one / 2 + sounds)
    assert PROFILE.sounds_after == (0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0)
    assert cut_bytes(PROFILE)[[3, 5]].tolist() == [1.0, vit.output_bytes + 1.0]


def test_chains_that_do_not_hear_have_no_columns_for_it() -> None:
    deaf, hears = make_profile(2, 2), make_profile(2, 2, audio=1)
    assert len(columns_of(deaf)) == 2 * SEEING == len(columns_of(hears)) - 6
    tables = LayoutProblem(deaf, 1, 1).tables
    assert len(tables.forward) == 2 * SEEING
    assert len(tables.offered) == SEEING_OPTIONS == len(LayoutProblem(hears, 1, 1).tables.offered) - 2


@pytest.mark.parametrize("seed", range(12))
def test_recompute_counts_of_three_kinds_are_all_those_worth_looking_at(seed: int) -> None:
    """Against all counts: each that fits has one among them that takes no longer in any of the kinds."""
    problem = replace(random_problem(seed, True, chunks=1, ranks=1), memory_bytes=1.0)
    held = problem.slices((0, len(problem.profile.chain)))
    kinds, offered, seconds = problem.kind_of_option, problem.tables.offered, problem.tables.recompute.sum(axis=(1, 2))
    counts = [
        np.array(one)
        for one in product(*(range(held[0, kind] * ok + 1) for kind, ok in zip(kinds, offered, strict=True)))
        if all(sum(np.array(one)[kinds == kind]) <= held[0, kind] for kind in set(kinds.tolist()))
    ]
    needs = problem.bytes_of_counts(0, held, np.array(counts)[:, None])
    for memory in np.quantile(needs, [0.02, 0.2, 0.6]):
        limited = replace(problem, memory_bytes=float(memory * (1 + 1e-9)))
        found = minimal(limited.stage_bytes[0], held[0], seconds, offered)
        assert (limited.bytes_of_counts(0, held, found[:, None]) <= limited.memory_bytes).all()
        groups = [kinds == kind for kind in dict.fromkeys(kinds.tolist())]
        taken = np.stack([found[:, group] @ seconds[group] for group in groups], axis=1)
        for one, need in zip(counts, needs, strict=True):
            if need <= memory:
                mine = np.array([one[group] @ seconds[group] for group in groups])
                assert (taken <= mine + 1e-9).all(axis=1).any()
        for number, mine in enumerate(taken):
            others = np.delete(taken, number, axis=0)
            assert not ((others <= mine).all(axis=1) & (others < mine - 1e-9).any(axis=1)).any()


@pytest.mark.parametrize("road", ["beside", "auto"])
def test_a_tower_of_two_kinds_stands_in_the_pipeline(road: str) -> None:
    problem = LayoutProblem(PROFILE, 2, 2)
    if road == "beside":
        with pytest.raises(UserError, match=r"--tower beside: .* hears"):
            plan_tower(problem, road, "joint", seconds=0.1)
    else:
        _, _, said = plan_tower(problem, road, "joint", seconds=0.1)
        assert said["tower"]["road"] == "cut"


@pytest.mark.parametrize("name", ["qwen2.5-omni-3b", "qwen3-omni-30b-a3b"])
def test_the_joint_search_cuts_through_both_towers(name: str) -> None:
    """On packs that are mostly sounds the audio encoder takes more than a stage."""
    profile = analytic_profile(preset(name), "h100", 1024, 4096, 2, audio_budget=100_000)
    heard = np.array([0, 90_000, 100_000, 95_000] * 2, dtype=np.int64)[None, None]
    sizes = PackSizes(0 * heard + 1024, 0 * heard + 4096, 0 * heard + 4096**2 // 4, frames=heard)
    problem, candidates, _ = plan_tower(LayoutProblem(profile, 8, 8, packs=sizes), "cut", "joint", seconds=1)
    stages = [set(profile.chain[a:b]) for a, b in pairwise(candidates[0].layout.edges)]
    assert sum("audio" in stage for stage in stages) > 1
    assert problem.fits(candidates[0].layout)
