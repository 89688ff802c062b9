"""On a device of shapes: nothing waits, no CPU tensor comes in, and plans count with what is kept and computed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from omnibal_ext.adapters import Adapters, adapted_matrices, adapter_parameters
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import PARTS, chain_kind
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.works import layer_works
from omnibal_ext.modalities.language.works import CHUNK
from omnibal_ext.modalities.work import Work
from tests.languages import altered
from tests.long import short
from tests.programs import fresh_python, result_of
from tests.shapes.program import FRAMES

pytestmark = pytest.mark.starts
MODELS = {
    # tensor-parallel size, tiles and tokens of a pack: the paper's, two of other families, a mixture of experts
    "internvl-chat-1.5": (4, 9, 4096), "internvit-6b+llama3-8b": (1, 9, 4096),
    "internvit-6b+internlm2-20b": (2, 9, 4096), "internvit-6b+llama3-70b": (4, 9, 4096),
    "internvit-6b+qwen1.5-110b": (8, 9, 4096), "internvl3.5-8b": (2, 9, 4096), "internvl3.5-30b-a3b": (2, 9, 4096),
    "llava-1.6-llama3-8b": (2, 5, 4096), "vip-llava-7b": (2, 5, 4096), "qwen2.5-vl-7b": (2, 2304, 4096),
    "mistral-small-3.1-24b": (2, 2304, 4096), "glm-4.1v-9b": (2, 2304, 4096), "glm-4.5v": (2, 2304, 4096),
    "qwen2.5-omni-7b": (2, 2304, 4096),
}  # fmt: skip
WITHOUT_ENGINE = (
    "internvl-chat-1.5", "internvit-6b+llama3-8b", "internvl3.5-8b", "internvl3.5-30b-a3b", "qwen2.5-vl-7b",
)  # fmt: skip
"""Those whose layers core's local parts build too, and count apart."""
OFTEN = (
    *("internvl-chat-1.5", "internvl3.5-30b-a3b", "vip-llava-7b", "qwen2.5-vl-7b", "mistral-small-3.1-24b"),
    "glm-4.5v",
    "qwen2.5-omni-7b",
)
"""One of each kind of tower, experts, and layers with and without them."""
ITERATIONS = {
    # tensor- and pipeline-parallel size, tiles and tokens
    "engine": {"internvit-6b+qwen1.5-110b": (8, 3, 9, 4096)},
    "local": {"qwen2.5-vl-7b": (2, 2, 2304, 4096)},
}
MOST_KERNELS = {
    "internvl-chat-1.5": {"engine": {"vit": 43, "llm": 40}, "local": {"vit": 43, "llm": 75}},
    "internvl3.5-30b-a3b": {"engine": {"llm": 121}, "local": {"llm": 155}},
}
"""Forward and backward of a layer; more are new launches, which small packs pay for. A launch for each of a layer's 128
experts would be many more."""


@cache
def asked(machine: str, is_long: bool) -> dict[str, dict[str, Any]]:
    """What each model asked of the device, with Transformer Engine or without, in one start."""
    models = MODELS if machine == "engine" else {name: MODELS[name] for name in WITHOUT_ENGINE}
    chosen = {name: sizes for name, sizes in models.items() if is_long or name in OFTEN} | MIXED[machine]
    return run("program", machine, {n: sizes for n, sizes in chosen.items() if is_long or (machine, n) not in SELDOM})


@pytest.fixture(scope="module", params=["engine", "local"])
def machine(request: pytest.FixtureRequest, is_long: bool) -> tuple[str, dict[str, dict[str, Any]]]:
    """Of models with one kind of language layers."""
    return request.param, {name: one for name, one in asked(request.param, is_long).items() if name in MODELS}


def run(program: str, machine: str, models: Mapping[str, tuple[int, ...]]) -> dict[str, dict[str, Any]]:
    """What a program of tests/shapes finds of each model on that machine."""
    words = [str(word) for name, sizes in models.items() for word in (name, *sizes)]
    done = fresh_python("-W", "ignore", f"tests/shapes/{program}.py", machine, *words)
    assert not done.returncode, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = result_of(done.stdout)
    return found


def units_first(model: Any, tiles: int, tokens: int, *ranks: int) -> tuple[Any, ...]:
    """What `layer_works` takes."""
    return model, {"tiles": tiles, "tokens": tokens, "frames": FRAMES}, *ranks


def works_here(measured: Mapping[str, Any], *sizes: Any) -> list[tuple[str, Work]]:
    """What those kinds of layers ask for that were measured: of a mixture layers with experts, none without."""
    return [(kind, work) for kind, work in layer_works(*units_first(*sizes)).items() if kind in measured]


def test_nothing_waits_for_the_device(machine: tuple[str, dict[str, dict[str, Any]]]) -> None:
    """A step of every kind of layer and the loss; a CPU tensor beside the device's would have ended the program."""
    for name, found in machine[1].items():
        assert {kind: one["waits"] for kind, one in found.items() if one["waits"]} == {}, name


def test_no_activation_is_copied_in_fp32(machine: tuple[str, dict[str, dict[str, Any]]]) -> None:
    """But inside the kernels of norms, activations and softmax; learned positions are stretched in fp32, at once."""
    for name, found in machine[1].items():
        native = preset(name).vision.native
        stretched = 3 if native and native.learned_positions else 0
        wide = {kind: one["wide"] for kind, one in found.items() if one["wide"]}
        assert all(len(wide.pop(kind, ())) <= stretched for kind in ("patch_embed", "step")), name
        assert wide == {}, name


def test_plans_count_the_bytes_that_are_kept(machine: tuple[str, dict[str, dict[str, Any]]]) -> None:
    for name in machine[1]:
        tensor, tiles, tokens = MODELS[name]
        profile = analytic_profile(preset(name), "h100", {"tiles": tiles, "tokens": tokens, "frames": FRAMES}, tensor)
        for kind in profile.layers.keys() & machine[1][name].keys():
            counted = profile.layers[kind].kept_bytes
            assert counted == pytest.approx(machine[1][name][kind]["kept"], rel=0.05), (name, kind)


def test_plans_count_the_bytes_that_wait_for_w(machine: tuple[str, dict[str, dict[str, Any]]]) -> None:
    """Of a split backward; without Transformer Engine a rank holds its share of a layer's two gathered inputs."""
    for name in machine[1]:
        tensor, tiles, tokens = MODELS[name]
        profile = analytic_profile(preset(name), "h100", {"tiles": tiles, "tokens": tokens, "frames": FRAMES}, tensor)
        for kind, work in works_here(machine[1][name], preset(name), tiles, tokens, tensor):
            counted = profile.layers[kind].late_bytes
            if machine[0] == "local":
                counted -= work.blocks * work.tokens * work.width * 2 * (1 - 1 / tensor)
            assert counted == pytest.approx(machine[1][name][kind]["late"], rel=0.05), (name, kind)


def test_plans_count_what_cheap_outputs_give_back_and_take(machine: tuple[str, dict[str, dict[str, Any]]]) -> None:
    """Bytes kept, and bytes read and written more than where they are kept; no product and no attention runs again."""
    for name in machine[1]:
        tensor, tiles, tokens = MODELS[name]
        profile = analytic_profile(preset(name), "h100", {"tiles": tiles, "tokens": tokens, "frames": FRAMES}, tensor)
        for kind in profile.layers.keys() & {one for one, found in machine[1][name].items() if "cheap" in found}:
            plain, cheap = machine[1][name][kind], machine[1][name][kind]["cheap"]
            counted = profile.layers[kind].recompute_cheap_kept_bytes
            work = layer_works(*units_first(preset(name), tiles, tokens, tensor))[kind]
            assert counted == pytest.approx(cheap["kept"], rel=0.05), (name, kind)
            stream = work.tokens * work.width * 2 / tensor
            assert cheap["bytes"] - plain["bytes"] == pytest.approx(work.cheap_passes * stream, rel=0.05), (name, kind)
            assert cheap["operations"] == plain["operations"], (name, kind)
            assert cheap["attention"] == plain["attention"], (name, kind)
            assert not cheap["waits"] + cheap["wide"], (name, kind)


def test_plans_count_what_adapters_keep_and_compute(machine: tuple[str, dict[str, dict[str, Any]]]) -> None:
    """Of rank 16: bytes kept, weights and products, of inputs once backward and of adapters twice; nothing waits."""
    adapters = Adapters(16, 32.0, tuple(PARTS))
    for name in machine[1]:
        tensor, tiles, tokens = MODELS[name]
        profile = analytic_profile(
            preset(name), "h100", {"tiles": tiles, "tokens": tokens, "frames": FRAMES}, tensor, adapters=adapters
        )
        for kind, numbers in adapter_parameters(preset(name), adapters, tensor).items():
            if kind not in machine[1][name]:  # of kinds that differ in attention alone one is measured
                continue
            found, work = (
                machine[1][name][kind]["adapted"],
                layer_works(*units_first(preset(name), tiles, tokens, tensor))[kind],
            )
            assert profile.layers[kind].kept_bytes == pytest.approx(found["kept"], rel=0.05), (name, kind)
            products = 2 * work.tokens * (2 * work.matrix_weights / tensor + 3 * numbers)
            assert products == pytest.approx(found["operations"], rel=0.05), (name, kind)
            assert not found["waits"] + found["wide"], (name, kind)
            launches = found["kernels"] - machine[1][name][kind]["kernels"]
            assert launches <= 10 * len(adapted_matrices(preset(name))[kind]), (name, kind)


def test_plans_count_the_operations(machine: tuple[str, dict[str, dict[str, Any]]]) -> None:
    """Products within a hundredth; of attention over a pack the device counts what the causal mask leaves out too.

    Not of images and sounds in windows, whose pairs it counts as if all of a pack's rows saw each other.
    """
    for name in machine[1]:
        tensor, tiles, tokens = MODELS[name]
        for kind, work in works_here(machine[1][name], preset(name), tiles, tokens, tensor):
            found = machine[1][name][kind]
            passes = 2 + work.input_gradient
            products = 2 * work.tokens * work.matrix_weights * passes / work.shares(tensor)
            assert products == pytest.approx(found["operations"], rel=0.01), (name, kind)
            if kind == "audio" or (kind == "vit" and preset(name).vision.native):
                continue
            attention = work.attention * 3.5 / tensor * (2 if chain_kind(kind) == "llm" else 1)
            assert attention == pytest.approx(found["attention"], rel=0.01), (name, kind)


def test_a_layer_launches_few_kernels(machine: tuple[str, dict[str, dict[str, Any]]]) -> None:
    kind_of_machine, answers = machine
    for name, machines in MOST_KERNELS.items():
        for kind, most in machines[kind_of_machine].items():
            assert answers[name][kind]["kernels"] <= most, (name, kind, answers[name][kind]["by kernel"])


def test_elementwise_traffic_is_that_of_cores_own_layer(machine: tuple[str, dict[str, dict[str, Any]]]) -> None:
    """InternViT-6B and InternLM2-20B at 4 ranks, with Transformer Engine: at most 1.15 times core's layer of the width.

    The ViT's may add what its LayerScale and its norms of query and key read and write at least.
    """
    kind_of_machine, answers = machine
    if kind_of_machine != "engine":
        pytest.skip("core's layer needs Transformer Engine")
    found, vision = answers["internvl-chat-1.5"], preset("internvl-chat-1.5").vision
    assert found["llm"]["bytes"] <= 1.15 * found["gpt llm"]["bytes"]
    tokens = 9 * vision.tokens_per_tile
    stream = tokens * vision.hidden_size * 2 / 4
    scale = 2 * stream  # of each branch, read once more backward: the scale's own gradient
    head = tokens * 7 * vision.hidden_size // vision.heads * 2  # 28 heads on 4 ranks
    norms = 2 * ((1 + 2) + (2 + 3)) * head  # query and key: summed up, scaled; the same backward, with their gradients
    assert found["vit"]["bytes"] <= 1.15 * found["gpt vit"]["bytes"] + scale + norms


MIXED = {
    "engine": dict.fromkeys(("gemma-4-31b", "gemma-4-e2b"), (2, 2268, 4096)),
    "local": {
        **dict.fromkeys(("gemma-4-26b-a4b", "gemma-4-e2b", "gemma-4-12b", "gemma-4-31b"), (2, 2268, 4096)),
        "qwen3.5-9b": (2, 2304, 1024),
    },
}
"""Models with several kinds of language layers: tensor-parallel size, tiles and tokens."""
SELDOM = {("engine", "gemma-4-e2b"), ("engine", "qwen2.5-vl-7b"),
          ("local", "gemma-4-31b"), ("local", "gemma-4-26b-a4b"), ("local", "gemma-4-12b")}  # fmt: skip
"""Those that the other machine has too, or whose layers and experts other models have."""


@pytest.fixture(scope="module", params=MIXED)
def mixed(request: pytest.FixtureRequest, is_long: bool) -> tuple[str, dict[str, dict[str, Any]]]:
    """Of models with several."""
    return request.param, {
        name: one for name, one in asked(request.param, is_long).items() if name in MIXED[request.param]
    }


@pytest.mark.parametrize("mixed", ["local"], indirect=True)
def test_linear_attention_waits_for_nothing_and_holds_what_plans_count(
    mixed: tuple[str, dict[str, dict[str, Any]]],
) -> None:
    """Without its kernels, of which plans count what they keep: torch's form keeps one copy of what they take."""
    name, (tensor, tiles, tokens) = "qwen3.5-9b", MIXED["local"]["qwen3.5-9b"]
    found = mixed[1][name]["llm"]  # the first layer of the model
    assert not found["waits"]
    model = preset(name)
    work, linear = layer_works(*units_first(model, tiles, tokens, tensor))["llm"], model.layer("llm").linear
    assert linear is not None
    gathered = work.blocks * tokens * work.width * 2 * (1 - 1 / tensor)
    assert found["late"] == pytest.approx(work.late / tensor - gathered, rel=0.001)
    by_kernels = linear.heads * (2 * linear.key_width + linear.value_width + CHUNK)
    more = tokens * (by_kernels - linear.groups * linear.convolved) * 2 / tensor
    assert found["kept"] == pytest.approx(work.kept / tensor - more, rel=0.002)
    matrices = 2 * tokens * work.matrix_weights * 3 / tensor
    assert matrices < found["operations"] < matrices + 5 * work.attention / tensor, "and the rule, forward three times"


def test_plans_count_layers_whose_heads_are_others(mixed: tuple[str, dict[str, dict[str, Any]]]) -> None:
    for name, found in mixed[1].items():
        if name.startswith("gemma"):
            check_heads(mixed[0], name, found)


def check_heads(machine: str, name: str, found: dict[str, Any]) -> None:
    """Gemma 4's with a window and without, its ViT and what stands behind it: bytes, products; and nothing waits."""
    tensor, tiles, tokens = 2, 2268, 4096
    model = preset(name)
    model = replace(model, language=altered(model.language, sees_images=False))  # no masks are made here
    profile = analytic_profile(model, "h100", {"tiles": tiles, "tokens": tokens}, tensor)
    # Cosines and sines of a pack, which a stage holds once, however many layers turn by them.
    layers = [
        (name, layer) for name, layer in zip(model.cost_kinds, model.layers, strict=True) if chain_kind(name) == "llm"
    ]
    angles = Counter({name: 4 * tokens * layer.attention.rotary_width for name, layer in layers})
    for kind, work in layer_works(*units_first(model, tiles, tokens, tensor)).items():
        one, cost = found[kind], profile.layers[kind]
        assert not one["wide"], (name, kind)
        assert not one["waits"] or kind == "llm", (name, kind, one["waits"])
        assert cost.kept_bytes == pytest.approx(one["kept"] - angles[kind], rel=0.05), (name, kind)
        blocks = work.blocks - 1.5 * (kind.startswith("llm") and model.language.layer_inputs is not None)
        gathered = blocks * work.tokens * work.width * 2 * (1 - 1 / tensor) * (machine == "local")
        assert cost.late_bytes - gathered == pytest.approx(one["late"], rel=0.05), (name, kind)
        products = 2 * work.tokens * work.matrix_weights * (2 + work.input_gradient) / work.shares(tensor)
        assert products == pytest.approx(one["operations"], rel=0.01), (name, kind)
    for kind in (name for name in profile.layers if chain_kind(name) in ("vit", "llm")):
        kept = found[kind]["cheap"]["kept"] - angles[kind]
        assert profile.layers[kind].recompute_cheap_kept_bytes == pytest.approx(kept, rel=0.05), (name, kind)
    if work := layer_works(*units_first(model, tiles, tokens, tensor)).get("vit"):
        again, stream = found["vit"]["cheap"]["bytes"] - found["vit"]["bytes"], work.tokens * work.width * 2 / tensor
        assert again == pytest.approx(work.cheap_passes * stream, rel=0.01), "norms, activation, and what clamps them"


@pytest.mark.parametrize("machine", short(ITERATIONS, ["local"]))
def test_nothing_waits_in_an_iteration(machine: str) -> None:
    """Executor, data-parallel reduction, arrival of packs and the meter of stages, on every rank of the pipeline.

    What a rank sends is what its neighbour has memory for.
    """
    for name, ranks in run("iteration", machine, ITERATIONS[machine]).items():
        assert {rank: found["waits"] for rank, found in ranks.items() if found["waits"]} == {}, name
        for schedule in ("1f1b", "zb_h1"):
            messages = [found["messages"] for rank, found in ranks.items() if rank.startswith(schedule)]
            sent, received = (sum(one[f"c10d.{way}.default"] for one in messages) for way in ("send", "recv_"))
            assert sent == received > 0, (name, schedule)
