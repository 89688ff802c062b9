"""Positions of words, images, sounds and videos are those that transformers' thinkers compute, bit for bit."""

from typing import Any

import numpy as np
import pytest
import torch

from megatron.vlm.data.media.video_sounds import token_turns
from megatron.vlm.models.attention.positions import text_and_image_positions
from omnibal_ext.architectures.huggingface import read_fields
from omnibal_ext.architectures.vision import NativeResolution, VideoClock

pytest.importorskip("transformers")
from tests.unit.hf import models
from tests.unit.hf.models import AUDIO_START, AUDIO_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN, VISION_START

FAMILIES = ("qwen2.5-omni", "qwen3-omni")
RATES = (2.0, 1.0, 3.0, 0.3, 7.0, 24.0)
"""Frames a second that processors are told."""


def thinker(family: str, pace: float) -> tuple[Any, NativeResolution]:
    """Transformers' model and our reading of its config."""
    model: Any = models.build(family, seed=0)
    model.config.position_id_per_seconds = pace
    native = read_fields(family, model.config.to_dict(), "config.json").vision.native
    assert native is not None
    return model, native


class Sample:
    """Words, and in between whatever `draw` chooses, in ids and in what is told about them."""

    def __init__(self, generator: np.random.Generator, rate: float) -> None:
        self.generator, self.seconds = generator, 2 / rate
        self.ids: list[int] = []
        self.images: list[tuple[int, ...]] = []
        self.videos: list[tuple[int, ...]] = []
        self.frames: list[int] = []
        self.runs: list[tuple[int, tuple[int, ...], float, tuple[int, ...]]] = []
        """Of images and videos: the first token, the grid, seconds between steps, turns of it and its sound."""

    def words(self) -> None:
        self.ids += self.generator.integers(0, AUDIO_START, self.generator.integers(1, 40)).tolist()

    def image(self) -> None:
        self._shown((1, *self._sides()), IMAGE_TOKEN, self.images)

    def video(self) -> None:
        self._shown((int(self.generator.integers(1, 30)), *self._sides()), VIDEO_TOKEN, self.videos)

    def _sides(self) -> tuple[int, int]:
        rows, columns = (2 * self.generator.integers(1, 9, 2)).tolist()
        return rows, columns

    def _shown(self, grid: tuple[int, int, int], token: int, grids: list[tuple[int, ...]]) -> None:
        grids.append(grid)
        self.ids.append(VISION_START)
        self.runs.append((len(self.ids), grid, 1.0 if token == IMAGE_TOKEN else self.seconds, ()))
        self.ids += [token] * (grid[0] * grid[1] * grid[2] // 4) + [7]

    def sound(self, tokens: int) -> None:
        self.ids += [AUDIO_START, *[AUDIO_TOKEN] * tokens, 7]

    def heard(self, clock: VideoClock, frames: int, tokens: int) -> None:
        grid = (int(self.generator.integers(1, 30)), *self._sides())
        self.videos.append(grid)
        self.frames.append(frames)
        self.ids += [VISION_START, AUDIO_START]
        turns = token_turns(clock, grid[0], grid[1] * grid[2] // 4, self.seconds, tokens)
        self.runs.append((len(self.ids), grid, self.seconds, turns))
        for turn, count in enumerate(turns):
            self.ids += [AUDIO_TOKEN if turn % 2 else VIDEO_TOKEN] * count
        self.ids += [7, 7]

    def theirs(self, model: Any, heard: bool = False) -> torch.Tensor:
        ids = torch.tensor(self.ids)[None]
        found, _ = model.get_rope_index(
            ids,
            torch.tensor(self.images) if self.images else None,
            torch.tensor(self.videos) if self.videos else None,
            torch.ones_like(ids),
            heard,
            torch.tensor(self.frames),
            torch.tensor([self.seconds] * len(self.videos)),
        )
        return found[:, 0]


def ours(samples: list[Sample], native: NativeResolution) -> np.ndarray:
    """Of all of them in one pack."""
    lengths = [len(sample.ids) for sample in samples]
    begins = np.cumsum([0, *lengths])
    runs = [(begin + start, *rest) for begin, sample in zip(begins, samples, strict=False)
            for start, *rest in sample.runs]  # fmt: skip
    starts, grids, seconds, turns = map(list, zip(*runs, strict=True))
    return text_and_image_positions(lengths, grids, starts, native, seconds, turns)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pace", [25, 13])
def test_words_images_and_videos_stand_where_transformers_puts_them(family: str, pace: float) -> None:
    model, native = thinker(family, pace)
    generator, samples = np.random.default_rng(1), []
    for rate in RATES * 4:
        sample = Sample(generator, rate)
        for kind in generator.permutation(["image", "video", "video", "image"])[: generator.integers(1, 5)]:
            sample.words()
            getattr(sample, kind)()
            if generator.random() < 0.5:  # the end of one may be right in front of the next
                sample.words()
        samples.append(sample)
    found = ours(samples, native)
    wanted = torch.cat([sample.theirs(model) for sample in samples], dim=1).numpy()
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == wanted.dtype
    assert any((found[0] % 1) > 0) == (family == "qwen3-omni")


@pytest.mark.parametrize("family", FAMILIES)
def test_sounds_are_words_to_positions(family: str) -> None:
    model, native = thinker(family, 25)
    generator, samples = np.random.default_rng(2), []
    for rate in RATES:
        sample = Sample(generator, rate)
        for kind in generator.permutation(["image", "video", "sound", "sound"]):
            sample.words()
            if kind == "sound":
                sample.frames.append(int(generator.integers(40, 700)))
                sample.sound(tokens_of(family, sample.frames[-1]))
            else:
                getattr(sample, kind)()
        samples.append(sample)
    wanted = torch.cat([sample.theirs(model) for sample in samples], dim=1).numpy()
    np.testing.assert_allclose(ours(samples, native), wanted, rtol=1e-6)  # fractions are added in other pieces


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pace", [25, 13])
def test_a_video_and_its_sound_stand_where_transformers_puts_them(family: str, pace: float) -> None:
    """Sounds that end before the video, with it, and long behind it; beside images.

    Where a step and a token of sound meet, transformers' model may round a fraction so that its order is not that in
    which its processor wrote the tokens: one of each then changes places (at 3 frames a second, or behind fractions).
    """
    model, native = thinker(family, pace)
    assert native.clock is not None
    generator, samples = np.random.default_rng(3), []
    for rate in (2.0, 1.0, 0.5, 7.0, 24.0) * 6:
        sample = Sample(generator, rate)
        several = family == "qwen2.5-omni" or 2 / rate * pace % 1 == 0
        for kind in generator.permutation(["image", "heard", "heard"]) if several else ["image", "heard"]:
            sample.words()
            if kind == "heard":
                frames = int(generator.integers(8, 4000))
                sample.heard(native.clock, frames, tokens_of(family, frames))
            else:
                sample.image()
        samples.append(sample)
    wanted = torch.cat([sample.theirs(model, heard=True) for sample in samples], dim=1).numpy()
    np.testing.assert_array_equal(ours(samples, native), wanted)
    assert {len(turns) % 2 for sample in samples for *_, turns in sample.runs if turns} == {0, 1}


def tokens_of(family: str, frames: int) -> int:
    """Of a sound of so many mel frames."""
    if family == "qwen2.5-omni":
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    return int(_get_feat_extract_output_lengths(torch.tensor(frames)))
