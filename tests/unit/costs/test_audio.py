"""What plans count of audio encoders: by shapes of weights, by windows, by a budget of mel frames."""

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from megatron.vlm.hf.shapes import _shapes
from omnibal_ext.architectures.presets import preset
from omnibal_ext.chain import size_of
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.operations import ModelOperations
from omnibal_ext.costs.profile import PackSizes, Profile
from omnibal_ext.costs.works import layer_works
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.modality import AUDIO, VISION
from omnibal_ext.packing.costs import PackCosts
from tests.media import audio_of

HEARING = ("qwen2.5-omni-7b", "qwen3-omni-30b-a3b")


@pytest.mark.parametrize("name", HEARING)
def test_parameters_are_those_of_the_weights(name: str) -> None:
    """Of layers without the biases of their matrices, as a ViT's are counted."""
    model = preset(name)
    works = layer_works(model, {"tiles": 4, "tokens": 4096, "frames": 3000}, 1)
    for kind in AUDIO.kinds:
        shapes = _shapes(kind, model)
        biases = sum(prod(shape) for weight, shape in shapes.items() if kind == "audio" and "linear" in weight[:-4]
                     and weight.endswith("bias"))  # fmt: skip
        assert works[kind].parameters == sum(map(prod, shapes.values())) - biases, kind


@pytest.mark.parametrize("name", HEARING)
def test_operations_are_those_of_convolutions_rows_and_windows(name: str) -> None:
    """Of a minute: each convolution's outputs times its kernel, matrices of every row, rows of a window squared."""
    audio, frames = audio_of(preset(name)), 6000
    assert audio is not None
    works, rows = layer_works(preset(name), {"tiles": 4, "tokens": 4096, "frames": frames}, 1), audio.rows(frames)
    h, bins, c = audio.hidden_size, audio.mel_bins, audio.channels
    if c:  # 100 frames are 50, 25 and 13 after each convolution
        by_chunk = 50 * bins // 2 * c * 9 + 25 * bins // 4 * c * 9 * c + 13 * bins // 8 * c * 9 * c
        convolved = 60 * (by_chunk + 13 * c * bins // 8 * h)
    else:
        convolved = frames * 3 * bins * h + rows * 3 * h * h
    embed, layer = works["audio_embed"], works["audio"]
    assert embed.tokens * embed.matrix_weights == pytest.approx(convolved, rel=0.04)  # 13 rows of 8 frames are 104
    assert layer.matrix_weights == 4 * h * h + 2 * h * audio.ffn_hidden_size
    assert layer.attention == 4 * h * sum(one * one for one in audio.windows(frames))


def test_seconds_and_bytes_grow_with_frames_alone(tmp_path: Path) -> None:
    profile = analytic_profile(preset("qwen2.5-omni-3b"), "h100", {"tiles": 2304, "tokens": 4096, "frames": 6000})
    profile.save(tmp_path / "profile.json")
    profile = Profile.load(tmp_path / "profile.json")
    assert profile.budget("frames") == 6000
    none = np.zeros(3, np.int64)
    frames = np.array([0, 3000, 6000])
    packs = PackSizes(none, none, none, more={"frames": frames})
    for kind in profile.layers:
        heard = size_of(kind) == "frames"
        seconds, full = profile.forward_seconds(kind, packs), profile.layers[kind].forward_seconds
        assert seconds.tolist() == pytest.approx([0.0, full / 2, full] if heard else [0.0] * 3), kind
        assert profile.load_factor(kind, packs).tolist() == ([0, 0.5, 1] if heard else [0, 0, 0])
    deaf = PackSizes(frames, frames, none)
    assert all(not profile.forward_seconds(kind, deaf).any() for kind in AUDIO.kinds)
    assert all(profile.forward_seconds(kind, deaf).any() for kind in VISION.kinds)


@pytest.mark.parametrize("name", HEARING)
def test_every_tensor_parallel_rank_sends_all_image_and_audio_tokens(name: str) -> None:
    """Behind the projectors they are not sharded as rows are, nor where audio tokens pass by the ViT."""
    model, frames = preset(name), 6000
    assert audio_of(model) is not None
    for ranks in (1, 2, 4):
        layers = analytic_profile(model, "h100", {"tiles": 2304, "tokens": 4096, "frames": frames}, ranks).layers
        assert layers["audio_projector"].output_bytes == 2 * audio_of(model).tokens(frames) * model.language.hidden_size
        assert layers["projector"].output_bytes == 2 * model.image_tokens(2304) * model.language.hidden_size
        assert layers["audio"].output_bytes == 2 * audio_of(model).rows(frames) * audio_of(model).hidden_size / ranks


def test_a_budget_of_frames_is_for_models_that_hear() -> None:
    hears, sees = (
        analytic_profile(preset(name), "h100", {"tiles": 2304, "tokens": 4096})
        for name in ("qwen2.5-omni-3b", "qwen2.5-vl-3b")
    )
    assert "audio_budget" not in sees.to_record()
    with pytest.raises(UserError, match="audio_budget is 0, but the chain needs a budget of mel frames"):
        replace(hears, budgets={"tiles": 1, "tokens": 1}).validate()
    with pytest.raises(UserError, match="audio_budget is 7, but the chain has no layers for it"):
        replace(sees, budgets={**sees.budgets, "frames": 7}).validate()


def test_a_packs_seconds_have_a_part_for_what_it_hears() -> None:
    profile = analytic_profile(preset("qwen3-omni-30b-a3b"), "h100", {"tiles": 2304, "tokens": 4096, "frames": 6000})
    costs, loads = PackCosts.of_profile(profile), np.array([[0, 0, 0, 6000]])
    assert list(costs.parts) == ["vision", "language", "audio"]
    seconds = costs.seconds(loads, ("tiles", "tokens", "attention", "frames"))[0]
    layers = [profile.layers[kind] for kind in profile.cost_kinds if size_of(kind) == "frames"]
    assert seconds.tolist() == pytest.approx([0, 0, sum(one.forward_seconds + one.backward_seconds for one in layers)])


def test_model_flops_have_a_term_for_frames() -> None:
    """A frozen encoder runs forward only; whole windows are counted."""
    model = preset("qwen2.5-omni-3b")
    assert audio_of(model) is not None
    works = layer_works(model, {"frames": audio_of(model).chunk}, 1)
    counted = {"audio_embed": 1, "audio": audio_of(model).layers, "audio_projector": 1}
    products = {kind: 2 * works[kind].tokens * works[kind].matrix_weights * n for kind, n in counted.items()}
    mels = (1 - works["audio_embed"].input_gradient) * products["audio_embed"]  # spectrograms have no gradients
    squares = works["audio"].attention * audio_of(model).layers
    trained, frozen = ModelOperations.of(model), ModelOperations.of(model, ("vit", "projector"))
    assert trained.units["frames"] * audio_of(model).chunk == pytest.approx(
        3 * sum(products.values()) - mels + 3 * squares
    )
    assert frozen.units["frames"] * audio_of(model).chunk == pytest.approx(sum(products.values()) + squares)
    assert trained.total({"frames": 10}, 0, 0) == 10 * trained.units["frames"]
