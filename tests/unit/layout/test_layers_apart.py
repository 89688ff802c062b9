"""Layers of other kinds than the rest of their part, features that travel beside the hidden states, and chains with an
audio encoder in front: what each costs, wherever the cut lies.
"""

from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from omnibal_ext.architectures.presets import preset
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.errors import UserError
from omnibal_ext.flow import features_after
from omnibal_ext.layout.frontier import minimal
from omnibal_ext.layout.partition import cut_bytes
from omnibal_ext.layout.problem import Layout, LayoutProblem
from omnibal_ext.layout.search import find_layouts
from omnibal_ext.layout.tables import columns_of
from omnibal_ext.layout.tower_layout import plan_tower
from omnibal_ext.modalities.encoder import Features
from omnibal_ext.modalities.modality import VISION
from omnibal_ext.modalities.vision.works import IMAGE_PATCHES
from omnibal_ext.packing.costs import PackCosts
from tests.chains import layer_chain

from .instances import FRAMES, FULL, LANGUAGE_LAYERS, make_profile, random_problem

KINDS = (FULL, *LANGUAGE_LAYERS)
OTHERS = (0, 1, 3)
"""Of the four layers of a part, those that are of another kind."""
SECONDS = {"forward_seconds": 1.5, "backward_seconds": 3.5}
BYTES = {"kept_bytes": 9.0, "weight_bytes": 3.0, "late_bytes": 5.0, "step_seconds": 0.5}
PARTS = {"vit": range(1, 5), "llm": range(7, 11)}
"""Their layers: the chain is patch_embed, vit 0 to 3, projector, word_embed, llm 0 to 3, head."""


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
    promised = [max(costs[one].kept_bytes for one in PARTS["llm"]) if layer in PARTS["llm"] else cost.kept_bytes
                for layer, cost in enumerate(costs)]  # fmt: skip
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
    layers = PARTS[part]
    mean = np.mean([profile.layers[profile.cost_kinds[layer]].forward_seconds for layer in layers])
    plain = problem.step_seconds(Layout((0, 12), ((),)))
    for count in range(5):
        again = problem.step_seconds(Layout((0, 12), (tuple(layers)[:count],)))
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
    profile = analytic_profile(model, "h100", {"tiles": 16384, "tokens": 4096})
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
    profile = analytic_profile(model, "h100", {"tiles": 4096, "tokens": 16384})
    assert profile.cost_kinds.count("llm") == 48, "the first layer is linear"
    assert profile.cost_kinds.count("llm.3") == 16
    long, short = (PackSizes(*np.array([[0], [16384], [squares]])) for squares in (16384**2, 4 * 4096**2))
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


def test_features_travel_from_their_vit_layer_to_their_language_layer() -> None:
    """Of layers 1 and 2: the first enters behind llm.0, the second behind llm.1; side by side they go to the projector.
    Layers: patch_embed, vit.0 to vit.3, projector, word_embed, llm.0 to llm.2, head."""
    chain = layer_chain(4, 3)
    assert features_after(chain, {VISION: Features((1, 2))}) == (0, 0, 1, 2, 2, 2, 2, 1, 0, 0, 0)
    assert features_after(chain, {VISION: Features((1, 2), joined=True)}) == (0, 0, 1, 2, 2, 0, 0, 0, 0, 0, 0)
    assert set(features_after(chain, {VISION: Features()})) == {0}
    alone = replace(make_profile(4, 3), transfer_seconds_per_byte=0.5, feature_layers=(1,))
    assert not LayoutProblem(alone, 1, 2).transfers.any()


def test_analytic_features_side_by_side_are_those_of_the_model() -> None:
    """ViP-LLaVA-7B: a LayerNorm, 5 x 1024 to 4096 and 4096 to 4096; one tensor of image tokens goes on."""
    profile = analytic_profile(preset("vip-llava-7b"), "h100", {"tiles": 16, "tokens": 2048})
    assert profile.parameters["projector"] == 5 * 1024 * 4096 + 4096 * 4096
    assert [profile.features_after[1 + layer] for layer in (4, 5, 13, 16, 19, 22)] == [0, 1, 2, 3, 4, 4]
    assert not any(profile.features_after[24:])
    image = profile.layers["projector"].output_bytes
    assert image == 16 * 576 * 4096 * 2
    assert cut_bytes(profile)[24] == image


@pytest.mark.parametrize(
    ("edge", "features", "output"), [(3, 1, 4.0), (5, 2, 4.0), (6, 2, 1.0), (7, 2, 1.0), (8, 1, 2.0)]
)
def test_a_cut_carries_and_keeps_them(edge: int, features: int, output: float) -> None:
    """Outputs of ViT layers are 4 bytes, of projector and word embedding 1, of language layers 2."""
    plain = replace(make_profile(4, 3), transfer_seconds_per_byte=0.5, transfer_latency_seconds=0.25)
    profile = replace(plain, feature_layers=(1, 2))
    layout = Layout((0, edge, 11), ((), ()))
    with_them, without = (LayoutProblem(one, ranks=2, microbatches=3) for one in (profile, plain))
    assert with_them.stage_costs(layout).transfer[0].tolist() == [0.25 + 0.5 * output * (1 + features)] * 3
    assert without.stage_costs(layout).transfer[0].tolist() == [0.25 + 0.5 * output] * 3
    assert cut_bytes(profile)[edge - 1] == output * (1 + features)
    more = np.subtract(with_them.stage_peak_bytes(layout), without.stage_peak_bytes(layout))
    assert more.tolist() == [0.0, features * output]  # the last rank has one microbatch in flight
    assert with_them.step_seconds(layout) > without.step_seconds(layout)


def test_analytic_mergers_are_those_of_the_model() -> None:
    """Qwen3-VL-8B: four mergers of 4608 x 4608 and 4608 x 4096; a token's features are as wide as its state."""
    profile = analytic_profile(preset("qwen3-vl-8b"), "h100", {"tiles": 4096, "tokens": 2048})
    assert profile.parameters["projector"] == 4 * (4608 * 4608 + 4608 * 4096)
    assert profile.parameters["patch_embed"] == 3 * 16 * 16 * 2 * 1152 + 2304 * 1152
    assert profile.features_after[28] == 3
    assert cut_bytes(profile)[profile.chain.index("llm") - 1] == 4 * 2048 * 4096 * 2


PROFILE = replace(make_profile(2, 2, audio=2), transfer_seconds_per_byte=0.5)
"""audio_embed audio audio audio_projector | patch_embed vit vit projector | word_embed llm llm head"""


def packs(*frames: int) -> PackSizes:
    """One microbatch of 2 tiles of 4 and 64 tokens of 128 for each of these frames of 32."""
    heard = np.array(frames, dtype=np.int64)[None, None]
    return PackSizes(0 * heard + 2, 0 * heard + 64, 0 * heard, more={"frames": heard})


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
    assert PROFILE.tokens_after == {"audio_projector": (0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0)}
    assert cut_bytes(PROFILE)[[3, 5]].tolist() == [1.0, vit.output_bytes + 1.0]


def test_chains_that_do_not_hear_have_no_columns_for_it() -> None:
    deaf, hears = make_profile(2, 2), make_profile(2, 2, audio=1)
    assert len(columns_of(deaf)) == 2 * 6 == len(columns_of(hears)) - 6
    tables = LayoutProblem(deaf, 1, 1).tables
    assert len(tables.forward) == 2 * 6
    assert len(tables.offered) == 4 == len(LayoutProblem(hears, 1, 1).tables.offered) - 2


@pytest.mark.parametrize("seed", range(12))
def test_recompute_counts_of_three_kinds_are_all_those_worth_looking_at(seed: int) -> None:
    """Against all counts: each that fits has one among them that takes no longer in any of the kinds."""
    problem = replace(random_problem(seed, True, chunks=1, ranks=1), memory_bytes=1.0)
    held = problem.slices((0, len(problem.profile.chain)))
    kinds, offered, seconds = (
        problem.columns.of_option,
        problem.tables.offered,
        problem.tables.recompute.sum(axis=(1, 2)),
    )
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


@pytest.mark.parametrize("name", ["qwen2.5-omni-3b", "qwen3-omni-30b-a3b"])
def test_the_joint_search_cuts_through_both_towers(name: str) -> None:
    """On packs that are mostly sounds the audio encoder takes more than a stage."""
    profile = analytic_profile(preset(name), "h100", {"tiles": 1024, "tokens": 4096, "frames": 100_000}, 2)
    heard = np.array([0, 90_000, 100_000, 95_000] * 2, dtype=np.int64)[None, None]
    sizes = PackSizes(0 * heard + 1024, 0 * heard + 4096, 0 * heard + 4096**2 // 4, more={"frames": heard})
    problem, candidates, _ = plan_tower(LayoutProblem(profile, 8, 8, packs=sizes), "cut", "joint", seconds=1)
    stages = [set(profile.chain[a:b]) for a, b in pairwise(candidates[0].layout.edges)]
    assert sum("audio" in stage for stage in stages) > 1
    assert problem.fits(candidates[0].layout)
