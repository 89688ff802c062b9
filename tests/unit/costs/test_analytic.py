"""Analytic profiles against counts done by hand, and against what was published."""

from dataclasses import replace
from itertools import cycle

import pytest

from omnibal_ext.architectures.presets import PRESETS, preset
from omnibal_ext.chain import chain_kind
from omnibal_ext.costs import analytic
from omnibal_ext.costs.analytic import DEVICES, analytic_profile
from omnibal_ext.costs.works import layer_works
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.language.experts import Experts
from tests.languages import altered

INTERNVL = preset("internvl-chat-1.5")


@pytest.mark.parametrize(("name", "device"), zip(PRESETS, cycle(DEVICES), strict=False))
def test_every_preset_has_a_sound_profile_on_a_device(device: str, name: str) -> None:
    """On each of them in turn: what is asked of a device is not told by the model."""
    model = preset(name)
    profile = analytic_profile(model, device, {"tiles": 4 * model.least_tiles, "tokens": 4096})
    profile.validate()
    assert profile.chain == model.chain


@pytest.mark.parametrize(
    ("name", "kinds", "wanted", "within"),
    [
        ("internvl-chat-1.5", "vit patch_embed", 5.54e9, 0.01),  # InternViT-6B without its last layers
        ("internvl-chat-1.5", "llm word_embed head", 19.86e9, 0.01),
        ("internvl-chat-1.5", "projector", 4 * 3200 * 6144 + 6144 * 6144, 0),  # of the patches that pixel shuffle joins
        # arXiv 2503.19786, table 1: vision encoder, embedding, and what is neither
        *((f"gemma-3-{size}", "vit patch_embed", 417e6, 0.015) for size in ("4b", "12b", "27b")),
        ("gemma-3-4b", "word_embed", 675e6, 0.01), ("gemma-3-4b", "llm", 3209e6, 0.001),
        ("gemma-3-12b", "word_embed", 1012e6, 0.01), ("gemma-3-12b", "llm", 10759e6, 0.001),
        ("gemma-3-27b", "word_embed", 1416e6, 0.01), ("gemma-3-27b", "llm", 25600e6, 0.001),
        ("gemma-3-27b", "projector", 1152 * 5376, 0),
        # Cards of Gemma 4: both kinds of layers, experts and all; to the last one without towers, but for those of
        # sounds, a number a layer that is not trained, and the last norm.
        ("gemma-4-31b", "word_embed llm", 30.7e9, 0.01), ("gemma-4-26b-a4b", "word_embed llm", 25.2e9, 0.01),
        ("gemma-4-12b", "patch_embed vit projector word_embed llm", 11_959_730_224 - 640 * 3840 - 48 - 3840, 0),
    ],
)  # fmt: skip
def test_parameters_are_those_of_the_published_models(name: str, kinds: str, wanted: float, within: float) -> None:
    model = preset(name)
    of = analytic_profile(model, "h100", {"tiles": 4 * model.least_tiles, "tokens": 4096}).parameters
    counted = sum(of[kind] for kind in model.cost_kinds if chain_kind(kind) in kinds.split())
    assert counted == pytest.approx(wanted, rel=within)


@pytest.mark.parametrize(("name", "far"), [("12b", 2), ("31b", 1)])
def test_layers_whose_images_see_both_ways_compute_whole_squares(name: str, far: int) -> None:
    """Gemma 4's global layers are causal; without towers images are seen whole there too."""
    model = PRESETS[f"gemma-4-{name}"]
    each = model.language.each_layer
    near, far_layer = (replace(one, mixer=replace(one.mixer, reads_keys=True)) for one in (each[0], each[-1]))
    seen = replace(model.language, each_layer=(*each[:-7], *([near] * 6), far_layer))
    ways = [replace(model, language=language) for language in (seen, altered(seen, sees_images=False))]
    masked, plain = (analytic_profile(one, "h100", {"tiles": 9, "tokens": 4096}).layers for one in ways)
    times = {kind: masked[kind].forward_fit[2] / plain[kind].forward_fit[2] for kind in plain if kind.startswith("llm")}
    layers = dict(zip(ways[0].cost_kinds, ways[0].layers, strict=True))
    assert len(times) == 4
    assert all(times[kind] == (2 if layers[kind].attention.window else far) for kind in times)


@pytest.mark.parametrize(
    ("name", "weights", "active"),
    [("qwen3-vl-30b-a3b", 30_532_122_624, 3.35e9), ("internvl3.5-241b-a28b", 235_093_634_560, 22.2e9)],
)
def test_experts_weigh_all_and_work_by_the_chosen(name: str, weights: int, active: float) -> None:
    """Weights of the published Qwen3-30B-A3B and Qwen3-235B-A22B: in all to the last one, and those of one token."""
    model = PRESETS[name]
    works, of = (
        layer_works(model, {"tiles": 4, "tokens": 4096}, 1),
        analytic_profile(model, "h100", {"tiles": 4, "tokens": 4096}),
    )
    counts = {kind: model.chain.count(kind) for kind in ("word_embed", "llm", "head")}
    assert sum(of.parameters[kind] * count for kind, count in counts.items()) == weights
    multiplied = sum(works[kind].matrix_weights * count for kind, count in counts.items())
    assert multiplied + works["word_embed"].parameters == pytest.approx(active, rel=0.002)
    assert of.layers["llm"].weight_bytes == 18 * of.parameters["llm"], "memory is that of all"
    expert = 3 * model.language.hidden_size * model.language.usual.ffn_hidden_size
    one_more = replace(model, language=altered(model.language, experts=Experts(128, 9)))
    more = layer_works(one_more, {"tiles": 4, "tokens": 4096}, 1)["llm"]
    assert (more.matrix_weights - works["llm"].matrix_weights, more.parameters) == (expert, works["llm"].parameters)
    sizes = 2 * 4096 * (model.language.hidden_size + 3 * model.language.usual.ffn_hidden_size)
    assert more.kept - works["llm"].kept == sizes, "a sorted copy, and what goes in and out of its perceptron"


@pytest.mark.parametrize(
    ("name", "theirs", "sizes"),
    [
        ("qwen3.5-9b", "Qwen3_5", {}), ("qwen3.5-35b-a3b", "Qwen3_5Moe", {}),
        ("qwen3.5-27b", "Qwen3_5", {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24,
                                    "intermediate_size": 17408, "linear_num_value_heads": 48}),
    ],
)  # fmt: skip
def test_linear_layers_weigh_what_those_of_transformers_do(name: str, theirs: str, sizes: dict[str, int]) -> None:
    """The language model to the last weight; theirs holds none, on the meta device."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = getattr(transformers, f"{theirs}TextConfig")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{theirs}ForCausalLM")(config)
    profile = analytic_profile(PRESETS[name], "h100", {"tiles": 4, "tokens": 4096})
    kinds = [kind for kind in profile.cost_kinds if chain_kind(kind) in ("word_embed", "llm", "head")]
    assert sum(map(profile.parameters.__getitem__, kinds)) == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(("name", "theirs"), [("glm-4.1v-9b", "Glm4v"), ("glm-4.5v", "Glm4vMoe")])
def test_glm_weighs_what_those_of_transformers_do(name: str, theirs: str) -> None:
    """All of the model but biases: ViT, merger, layers with experts and without. The ViT's norms are taken to have
    biases, those outside of layers are not counted: a few numbers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = getattr(transformers, f"{theirs}Config")()
    config.text_config.vocab_size, config.vision_config.intermediate_size = 151552, PRESETS[name].merger_width
    config.text_config.head_dim = 128
    with torch.device("meta"):
        model = getattr(transformers, f"{theirs}ForConditionalGeneration")(config)
    profile = analytic_profile(PRESETS[name], "h100", {"tiles": 4, "tokens": 4096})
    weights = {name: weight.numel() for name, weight in model.named_parameters() if not name.endswith("bias")}
    counted = sum(map(profile.parameters.__getitem__, profile.cost_kinds))
    assert counted == pytest.approx(sum(weights.values()), rel=1e-5)


MOE = PRESETS["qwen3-vl-30b-a3b"]
EXPERT = 3 * 2048 * 768
"""Weights of one of its 128."""


@pytest.mark.parametrize(("count", "chosen"), [(1, 1), (8, 2), (128, 8), (129, 8)])
@pytest.mark.parametrize(("t", "e"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_a_layer_of_experts_keeps_what_the_dense_one_does_and_what_routes(
    t: int, e: int, count: int, chosen: int
) -> None:
    """Of all ranks, a token: two fp32 scores of each expert; a copy in bf16 for each that it goes through, on every
    rank that has a share of all experts; and what goes in and out of so many perceptrons in the place of one."""
    language = MOE.language
    dense, routed = (
        layer_works(replace(MOE, language=altered(language, experts=experts)), {"tiles": 4, "tokens": 4096}, t, ranks)[
            "llm"
        ]
        for experts, ranks in ((None, 1), (Experts(count, chosen), e))
    )
    scores, perceptrons = 2 * 4 * count, 2 * 3 * 768 * (chosen - 1)
    copies = 2 * 2048 * chosen * (1 if e > 1 else t)
    assert routed.kept - dense.kept == 4096 * (scores + copies + perceptrons)
    router = 2048 * count
    assert routed.parameters - dense.parameters == (count - 1) * EXPERT + router
    assert routed.matrix_weights - dense.matrix_weights == (chosen - 1) * EXPERT + router


@pytest.mark.parametrize(("t", "d", "e"), [(1, 8, 8), (2, 8, 4), (2, 4, 2), (1, 32, 8)])
def test_dealt_experts_weigh_their_share(t: int, d: int, e: int) -> None:
    """6 bytes a weight, and 12 over the ranks that have the same: d of them, of experts t d / e."""
    profile = analytic_profile(MOE, "h100", {"tiles": 4, "tokens": 4096}, t, d, expert_model_parallel_size=e)
    experts = 128 * EXPERT
    others = profile.parameters["llm"] - experts
    by_hand = others / t * (6 + 12 / d) + experts / e * (6 + 12 * e / (t * d))
    assert profile.layers["llm"].weight_bytes == pytest.approx(by_hand)
    whole = analytic_profile(MOE, "h100", {"tiles": 4, "tokens": 4096}, t, d)
    assert profile.parameters == whole.parameters, "all ranks' together"
    for kind in ("vit", "projector", "word_embed", "head"):
        assert profile.layers[kind] == whole.layers[kind]
    frozen = analytic_profile(
        MOE, "h100", {"tiles": 4, "tokens": 4096}, t, d, frozen=("llm",), expert_model_parallel_size=e
    )
    assert frozen.layers["llm"].weight_bytes == pytest.approx(2 * (others / t + experts / e))


@pytest.mark.parametrize(
    ("t", "e", "near", "far"), [(1, 2, 1 / 2, 0), (1, 8, 7 / 8, 0), (1, 16, 7 / 16, 8 / 16), (4, 32, 7 / 32, 24 / 32)]
)
def test_tokens_travel_to_their_experts_over_the_slower_link(
    t: int, e: int, near: float, far: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight copies of each of a rank's tokens, there and back; sorted once more; nothing is gathered around them."""
    monkeypatch.setattr(analytic, "HOST_SECONDS", {})
    one, dealt = (
        analytic_profile(MOE, "h100", {"tiles": 4, "tokens": 4096}, t, 16, expert_model_parallel_size=ranks).layers[
            "llm"
        ]
        for ranks in (1, e)
    )
    copies, node, network = 8 * 2048 * 4096 * 2 / t, 450e9 * 0.8, 50e9 * 0.8
    sorting = 4 * copies / (3.35e12 * 0.8)
    gathered = 2 * 2048 * 4096 * 2 * (t - 1) / t / node
    travel = 2 * copies * max(near / node, far / network) - gathered
    assert dealt.forward_seconds - one.forward_seconds == pytest.approx(travel + sorting, rel=1e-6)
    assert dealt.backward_seconds - one.backward_seconds == pytest.approx(travel + 2 * sorting, rel=1e-6)
    assert dealt.weight_gradient_seconds == one.weight_gradient_seconds


@pytest.mark.parametrize("device", ["a100", "h100"])
@pytest.mark.parametrize("t", [1, 2, 8, 16])
def test_ranks_exchange_over_the_node_or_over_the_network(device: str, t: int) -> None:
    """Two all-reduces a layer and way, 2 (t - 1) / t times its bytes: over the node's links up to its eight GPUs."""
    gpu, cost = DEVICES[device], analytic_profile(INTERNVL, device, {"tiles": 9, "tokens": 4096}, t).layers["llm"]
    work, weights = (
        layer_works(INTERNVL, {"tiles": 9, "tokens": 4096}, t)["llm"],
        6144 * (2 * 6144 + 2 * 8 * 128) + 3 * 6144 * 16384,
    )
    stream, link = 2 * 4096 * 6144, 0.8 * (gpu.node_bandwidth if t <= 8 else gpu.network_bandwidth)
    reductions = 2 * stream * 2 * (t - 1) / t / link
    computed = 2 * 4096 * (work.matrix_weights if t > 8 else weights) / t / (gpu.flops * gpu.matrix_efficiency)
    moved = work.passes * stream / t / (gpu.memory_bandwidth * 0.8)
    attention = 2 * 6144 * 4096**2 / t / (gpu.flops * gpu.attention_efficiency)
    assert cost.forward_seconds == pytest.approx(computed + moved + reductions + attention)
    assert cost.backward_seconds == pytest.approx(2 * computed + 2 * moved + reductions + 2.5 * attention)
    assert cost.weight_gradient_seconds == pytest.approx(computed)
    assert cost.recompute_kept_bytes == cost.output_bytes == stream / t
    assert cost.forward_fit == pytest.approx((0.0, (computed + moved + reductions) / 4096, attention / 4096**2))
    assert cost.backward_fit == pytest.approx(
        (0.0, (2 * computed + 2 * moved + reductions) / 4096, 2.5 * attention / 4096**2)
    )


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize(("t", "d"), [(1, 1), (2, 4), (8, 1), (4, 4), (1, 16), (8, 2)])
def test_the_step_reduces_within_a_node_only_where_its_ranks_are_in_one(t: int, d: int, distributed: bool) -> None:
    """A quarter of 4 bytes of gradient reduced (twice over without sharding) and 2 of weights gathered; 40 bytes a
    weight that the optimizer moves."""
    profile, gpu = analytic_profile(INTERNVL, "h100", {"tiles": 9, "tokens": 4096}, t, d, distributed), DEVICES["h100"]
    weights = profile.parameters["llm"] / t
    link = 0.8 * (gpu.node_bandwidth if t * d <= 8 else gpu.network_bandwidth)
    carried = 0.25 * (6 if distributed else 8) * weights * (d - 1) / d / link
    moved = 40 * weights / (d if distributed else 1) / (0.8 * gpu.memory_bandwidth)
    assert profile.layers["llm"].step_seconds == pytest.approx(carried + moved)


@pytest.mark.parametrize("t", [1, 2, 4])
def test_what_a_profile_says_beside_its_layers(t: int) -> None:
    """Packs without tiles pass the ViT by at no cost."""
    profile = analytic_profile(INTERNVL, "a100", {"tiles": 9, "tokens": 4096}, t)
    assert profile.transfer_seconds_per_byte == pytest.approx(1 / (25e9 * 0.8))
    assert (profile.transfer_latency_seconds, profile.overhead_bytes) == (2e-5, 4 * 2**30)
    assert not any(cost.empty_seconds for cost in profile.layers.values())


def test_unknown_devices_and_sizes_are_refused_and_experts_dealt_alike_or_not_at_all() -> None:
    for model, device, tiles, d, e, words in (
        (INTERNVL, "tpu", 9, 1, 1, "'tpu' is not known"), (INTERNVL, "a100", 0, 1, 1, "at least 1, got 0"),
        (INTERNVL, "h100", 4, 8, 2, "has no experts"), (MOE, "h100", 4, 6, 3, "does not divide the 128 experts"),
        (MOE, "h100", 4, 6, 4, "does not divide the 6 ranks"), (MOE, "h100", 4, 1, 0, "at least 1"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            analytic_profile(model, device, {"tiles": tiles, "tokens": 4096}, 1, d, expert_model_parallel_size=e)


@pytest.mark.parametrize(("ranks", "groups"), [(1, 2), (2, 2), (4, 4), (8, 8)])
def test_groups_of_heads_that_fill_up_cost_what_they_cost(ranks: int, groups: int) -> None:
    """InternVL2-1B: 14 heads of 64, 7 of which share a key and a value; 4 ranks hold 7 heads each, two ranks zeros."""
    model = PRESETS["internvl2-1b"]
    found = layer_works(model, {"tiles": 1, "tokens": 1024}, ranks)["llm"]
    assert found.attention == 2 * groups * 7 * 64 * 1024**2
    width, perceptron = 896, 3 * 896 * 4864
    assert found.matrix_weights == width * groups * (2 * 7 + 2) * 64 + perceptron


def test_ranks_that_share_a_group_need_no_more() -> None:
    """Qwen2.5-VL-3B: 16 heads, 2 groups; 4 ranks divide the heads, and two share a group."""
    attention = PRESETS["qwen2.5-vl-3b"].language.each_layer[0].attention
    assert [attention.groups_over(ranks) for ranks in (1, 2, 3, 4, 8)] == [2, 2, 3, 2, 2]


@pytest.mark.parametrize(("name", "sees", "groups"), [("gemma-3-4b", "images", 4), ("paligemma-3b-224", "prefix", 1)])
def test_attention_under_masks_counts_whole_squares(name: str, sees: str, groups: int) -> None:
    model = PRESETS[name]
    blind = replace(model, language=altered(model.language, **{f"sees_{sees}": False}))
    whole, half = (analytic_profile(one, "h100", {"tiles": 9, "tokens": 4096}).layers["llm"] for one in (model, blind))
    square = 2 * 8 * 256 * 4096**2 / (989e12 * 0.45)
    assert whole.forward_seconds - half.forward_seconds == pytest.approx(square)
    assert whole.kept_bytes - half.kept_bytes == 4096 * 2 * 2 * (8 - groups) * 256, "keys and values are repeated"
    assert whole.forward_fit[2] == pytest.approx(2 * half.forward_fit[2])


@pytest.mark.parametrize("ranks", [1, 2])
def test_capped_scores_are_read_and_written(ranks: int) -> None:
    """PaliGemma 2 3B: 8 heads, a score 56 bytes of 3.35 TB/s at the share of it that is reached."""
    model = PRESETS["paligemma2-3b-224"]
    free = replace(model, language=altered(model.language, score_cap=None))
    capped, plain = (
        analytic_profile(one, "h100", {"tiles": 9, "tokens": 4096}, ranks).layers["llm"] for one in (model, free)
    )
    a_pair = 8 * 56 / (3.35e12 * 0.8) / ranks
    assert capped.forward_seconds - plain.forward_seconds == pytest.approx(a_pair * 4096**2)
    assert capped.backward_seconds - plain.backward_seconds == pytest.approx(2.5 * a_pair * 4096**2)
    assert capped.forward_fit[2] - plain.forward_fit[2] == pytest.approx(a_pair)
    assert capped.kept_bytes == plain.kept_bytes


def test_cuts_carry_what_was_published() -> None:
    """REFERENCE section 1, bf16: 9 x 1025 x 3200 in the ViT, 9 x 256 x 6144 after the projector, 4096 x 6144 later."""
    layers = analytic_profile(INTERNVL, "a100", {"tiles": 9, "tokens": 4096}).layers
    numbers = {"vit": 9 * 1025 * 3200, "projector": 9 * 256 * 6144, "llm": 4096 * 6144}
    assert {kind: layers[kind].output_bytes / 2 for kind in numbers} == numbers


def test_a_frozen_layer_saves_one_of_three_matrix_products_and_an_idle_one_its_backward() -> None:
    trained, tower, language = (
        analytic_profile(INTERNVL, "a100", {"tiles": 9, "tokens": 4096}, frozen=frozen).layers
        for frozen in ((), ("vit",), ("llm",))
    )
    assert tower["vit"].backward_seconds == tower["vit"].kept_bytes == tower["vit"].step_seconds == 0.0
    assert (tower["vit"].forward_seconds, tower["llm"]) == (trained["vit"].forward_seconds, trained["llm"])
    assert language["llm"].backward_seconds == pytest.approx(
        trained["llm"].backward_seconds - trained["llm"].weight_gradient_seconds
    )
    assert language["llm"].kept_bytes == trained["llm"].kept_bytes
    assert language["llm"].weight_bytes == pytest.approx(trained["llm"].weight_bytes / 9)
    assert trained["llm"].late_bytes > 0.0 == language["llm"].late_bytes == tower["vit"].late_bytes


def test_cheap_outputs_are_those_of_two_norms_and_the_activation_where_a_weight_would_keep_them() -> None:
    """InternViT-6B: 3200 wide, 12800 inside; Qwen3-30B-A3B's layer of experts keeps what goes into its router."""
    of = analytic_profile(INTERNVL, "a100", {"tiles": 9, "tokens": 4096}, 4).layers["vit"]
    assert of.kept_bytes - of.recompute_cheap_kept_bytes == 2 * 9 * 1025 * (2 * 3200 + 12800) / 4
    assert 0 < of.recompute_cheap_seconds < 0.05 * of.forward_seconds
    experts = analytic_profile(PRESETS["qwen3-vl-30b-a3b"], "h100", {"tiles": 4, "tokens": 4096}).layers["llm"]
    assert experts.kept_bytes - experts.recompute_cheap_kept_bytes == 2 * 4096 * 2048
    frozen = analytic_profile(INTERNVL, "a100", {"tiles": 9, "tokens": 4096}, frozen=("llm",)).layers["llm"]
    assert (frozen.recompute_cheap_seconds, frozen.recompute_cheap_kept_bytes) == (None, None)


@pytest.mark.parametrize("tiles", [1, 900])
def test_a_host_takes_its_time_for_a_layer_however_large(tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which adds nothing to the device's; and it is said which kinds are bound by it."""
    model = preset("internvl3.5-8b")
    monkeypatch.setattr(analytic, "HOST_SECONDS", {})
    plain = analytic_profile(model, "h100", {"tiles": tiles, "tokens": 4096})
    monkeypatch.setattr(analytic, "HOST_SECONDS", {"vit": (2e-3, 3e-3)})
    asked = analytic_profile(model, "h100", {"tiles": tiles, "tokens": 4096})
    idle = analytic_profile(model, "h100", {"tiles": tiles, "tokens": 4096}, frozen=("vit",))
    before, vit = plain.layers["vit"], asked.layers["vit"]
    assert replace(vit, host_forward_seconds=0.0, host_backward_seconds=0.0) == before
    assert (vit.host_forward_seconds, vit.host_backward_seconds) == (2e-3, 3e-3)
    assert (asked.layers["llm"], asked.bound_by_host) == (plain.layers["llm"], ("vit",) if tiles == 1 else ())
    assert (idle.layers["vit"].backward_seconds, idle.layers["vit"].host_backward_seconds) == (0.0, 0.0)


@pytest.mark.parametrize(("name", "faster"), [
    ("internvl-chat-1.5", {"llm"}), ("qwen2.5-vl-7b", {"llm", "vit"}), ("gemma-3-4b", set()),
])  # fmt: skip
def test_the_kernel_for_packs_attends_where_there_are_packs(name: str, faster: set[str]) -> None:
    """Over words, and images at their own size; tiles and masks go to torch. Seconds differ by attention's alone."""
    model, slow, fast = preset(name), "flash_attention", "flash_attention_4"
    budgets = {"tiles": 4 * model.least_tiles, "tokens": 4096}
    plain, *ways = (analytic_profile(model, "h100", budgets, attention=kernel) for kernel in ("", slow, fast))
    one, other = (way.layers for way in ways)
    assert {chain_kind(kind) for kind in one if one[kind] != other[kind]} == faster
    device = DEVICES["h100"]
    for kind in (kind for kind in one if chain_kind(kind) in faster):
        attention = layer_works(model, model.profiled(budgets), 1)[kind].attention
        taken = [attention / (device.flops * device.attention_kernels[kernel]) for kernel in (slow, fast)]
        assert one[kind].forward_seconds - other[kind].forward_seconds == pytest.approx(taken[0] - taken[1])
        assert one[kind].backward_seconds - other[kind].backward_seconds == pytest.approx(2.5 * (taken[0] - taken[1]))
    assert ways[1].notes["attention_efficiency"] == 0.46
    assert plain.notes["attention_efficiency"] == device.attention_efficiency
    assert analytic_profile(model, "a100", budgets, attention=fast) == analytic_profile(model, "a100", budgets)


def test_float8_halves_three_products() -> None:
    profile = analytic_profile(INTERNVL, "h100", {"tiles": 9, "tokens": 4096}, 4)
    work, cost = layer_works(INTERNVL, profile.budgets, 4)["llm"], profile.layers["llm"]
    products = 3 * 2 * work.tokens * work.matrix_weights / 4 / (989e12 * 0.6)
    seconds = cost.forward_seconds + cost.backward_seconds
    gain = seconds / (seconds - products / 2)
    assert profile.notes["float8"].keys() == {"llm"}, "the ViT stays in bf16"
    assert profile.notes["float8"]["llm"] == pytest.approx({"layer, at most": gain})
    measured = replace(DEVICES["h100"], attention_kernels={})
    assert "float8" in analytic_profile(INTERNVL, "h100", {"tiles": 9, "tokens": 4096}, measured=measured).notes


@pytest.mark.parametrize(("name", "device"), [
    ("internvl-chat-1.5", "a100"), ("qwen3-vl-30b-a3b", "h100"), ("qwen3.5-9b", "h100"),
])  # fmt: skip
def test_float8_is_no_gain_where_it_is_refused(name: str, device: str) -> None:
    """By the card, of experts, of linear attention."""
    assert "float8" not in analytic_profile(preset(name), device, {"tiles": 16, "tokens": 4096}).notes
