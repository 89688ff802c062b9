"""What `--check` says of two models' logits, and on which samples."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.vlm.data.inputs.images import pixels_of
from megatron.vlm.data.sample import Sample
from megatron.vlm.hf import check
from megatron.vlm.hf.check import nan_max
from megatron.vlm.hf.check_samples import CheckSample, random_samples, samples_of
from omnibal_ext.architectures.presets import preset
from omnibal_ext.modalities.vision.tiling import VideoFrames
from tests.demo import demo_dataset
from tests.media import audio_of


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_logit_that_is_no_number_is_the_difference(place: int) -> None:
    differences = [torch.zeros(2, 3), torch.ones(4, 3), torch.full((1, 3), 0.5)]
    assert nan_max(differences) == 1
    differences[place][-1, -1] = math.nan
    assert math.isnan(nan_max(differences))


def test_a_datasets_shortest_sample_with_images_and_without(tmp_path: Path) -> None:
    data = demo_dataset(tmp_path, tmp_path / "data", 40)
    shown = data.sizes.tiles > 0
    assert 0 < shown.sum() < len(data)
    for sample, group in zip(samples_of(data.folder), (shown, ~shown), strict=True):
        assert len(sample.ids) == data.sizes.tokens[group].min()
        (number,) = [one for one in np.flatnonzero(group) if np.array_equal(data.sample(one).text[0], sample.ids)][:1]
        assert torch.equal(sample.pixels, pixels_of(data.sample(number)))
        assert sum(features for features, _ in sample.images) == 4 * data.sizes.tiles[number]


def test_a_sample_whose_image_cannot_be_read_is_passed_by(tmp_path: Path) -> None:
    data = demo_dataset(tmp_path, tmp_path / "data", 40)
    order = [one for one in np.argsort(data.sizes.tokens, kind="stable") if data.sizes.tiles[one]]
    for image in data.sample(order[0]).images:
        (tmp_path / image.path).unlink()
    second = next(one for one in order if all((tmp_path / image.path).exists() for image in data.sample(one).images))
    assert torch.equal(samples_of(data.folder)[0].pixels, pixels_of(data.sample(second)))


@pytest.mark.parametrize("name", ["tiny", "qwen3-vl-8b", "qwen2.5-omni-3b", "qwen3-omni-30b-a3b", "llava-1.5-7b"])
def test_random_words_mean_nothing_else(name: str) -> None:
    """Of a small vocabulary any word may come; each run of an image's or a sound's tokens is as long as it is."""
    model, words = preset(name), 16
    hears = audio_of(model) and replace(model.prompt, further_token_ids={"frames": 4})
    model = replace(model, language=replace(model.language, vocab_size=words), prompt=hears or model.prompt)
    samples = random_samples(model, 5, {1, 2, 3})
    assert not {1, 2, 3} & {int(token) for sample in samples for token in sample.ids}
    assert {*range(6, words)} <= {int(token) for sample in samples for token in sample.ids}
    for sample in samples:
        assert (sample.ids == 5).sum() == sum(len(order) for _, order in sample.images)
        heard = (
            sum(audio_of(model).tokens(len(sound)) for sound in sample.further.get("frames", ()))
            if audio_of(model)
            else 0
        )
        assert (sample.ids == 4).sum() == heard or not audio_of(model)


def test_logits_of_videos_alone_are_compared_on_random_samples_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, seen = demo_dataset(tmp_path, tmp_path / "data", 40), []
    image = next(image for one in range(len(data)) for image in data.sample(one).images)
    all_films = [replace(image, film=VideoFrames((0,), (0.0,), 1.0, False))]
    monkeypatch.setattr(Sample, "images", all_films)

    def logits(samples: list[CheckSample]) -> list[torch.Tensor]:
        seen.append(samples)
        return [torch.zeros(len(sample.ids), 2) for sample in samples]

    monkeypatch.setattr(check, "_our_logits", lambda *given, **_: (logits(given[3]), None))
    monkeypatch.setattr(check, "_their_logits", lambda *given: logits(given[1]))
    monkeypatch.setattr(check, "_image_token", lambda _: 7)
    monkeypatch.setattr(check, "_meant", lambda _: set())
    monkeypatch.setattr(check, "preset", lambda _: preset("tiny"))
    found = check.compared(tmp_path, tmp_path, data=data.folder)
    assert found == check.LogitDifference(0.0)
    assert any(len(sample.pixels) for sample in seen[0])
    assert f"{data.folder}: has no samples but with videos" in capsys.readouterr().err
