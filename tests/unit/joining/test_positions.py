"""Positions of a pack of words, images, films and sounds are those that transformers computes of each sample by itself,
bit for bit."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megatron.vlm.data.media.video_sounds import token_turns
from omnibal_ext.errors import UserError
from omnibal_ext.joining.pack_positions import has_positions, pack_positions, positions_by_kind
from omnibal_ext.modalities.vision.architecture import VideoClock

pytest.importorskip("transformers")
from tests.unit.hf import models
from tests.unit.hf.models import AUDIO_START, AUDIO_TOKEN, IMAGE_TOKEN, VIDEO_TOKEN, VISION_START

OMNIS = ("qwen2.5-omni", "qwen3-omni")
STEPS_APART = ("qwen3-vl", "qwen3-vl-moe", "qwen3.5", "qwen3.5-moe", "glm-4.1v", "glm-4.6v dense, tied, biases",
               "glm-4.5v", "glm ocr")  # fmt: skip
FAMILIES = ("qwen2-vl", "qwen2.5-vl", "paddleocr-vl", *STEPS_APART, *OMNIS)
RATES = (2.0, 1.0, 3.0, 0.3, 7.0, 24.0)
"""Frames a second that processors are told."""
HEARD_RATES = (2.0, 1.0, 0.5, 6.9, 23.7)
"""Of films that may be heard: steps and tokens of sound meet at whole positions or never. Where they meet behind a
fraction, transformers' model may round it so that its order is not that in which its processor wrote the tokens."""


def model_of(family: str, pace: float = 25) -> Any:
    model: Any = models.build(family, seed=0)
    if family in OMNIS:
        model.config.position_id_per_seconds = pace
    if family == "qwen2.5-vl":
        model.config.vision_config.tokens_per_second = pace
    return model


class Sample:
    """Words, and in between whatever is drawn, in ids and in what is told about them."""

    def __init__(self, family: str, config: Any, generator: np.random.Generator, rate: float) -> None:
        self.family, self.config, self.generator, self.seconds = family, config, generator, 2 / float(rate)
        self.ids: list[int] = []
        self.kinds: list[int] = []
        self.grids: dict[str, list[tuple[int, ...]]] = {"image": [], "film": []}
        self.frames: list[int] = []
        self.heard = False

    def add(self, tokens: Sequence[int], kind: int = 0) -> None:
        self.ids += tokens
        self.kinds += [kind] * len(tokens)

    def words(self, least: int = 1) -> None:
        self.add(self.generator.integers(0, AUDIO_START, self.generator.integers(least, 40)).tolist())

    def draw(self) -> None:
        """Any of what the family takes. A heard film is in a sample whose films are all heard: it is one flag."""
        kinds = ["image", "film", "film", "image"]
        if self.family in OMNIS:
            self.heard = bool(self.generator.integers(2))
            whole = self.family == "qwen2.5-omni" or self.seconds * self.config.position_id_per_seconds % 1 == 0
            kinds = ["image", *["heard"] * (2 if whole else 1)] if self.heard else [*kinds, "sound"]
        for kind in self.generator.permutation(kinds)[: self.generator.integers(0, len(kinds) + 1)]:
            self.words()
            getattr(self, "heard_film" if kind == "heard" else kind)()
        self.words()

    def image(self) -> None:
        self.show("image", (1, *self.sides()))

    def film(self) -> None:
        self.show("film", (int(self.generator.integers(1, 30)), *self.sides()))

    def sides(self) -> tuple[int, int]:
        rows, columns = (2 * self.generator.integers(1, 9, 2)).tolist()
        return rows, columns

    def show(self, kind: str, grid: tuple[int, int, int]) -> None:
        self.grids[kind].append(grid)
        glm, film = self.family.startswith("glm"), kind == "film"
        token, tokens = VIDEO_TOKEN if film and not glm else IMAGE_TOKEN, grid[0] * grid[1] * grid[2] // 4
        parts = [tokens // grid[0]] * grid[0] if film and self.family in STEPS_APART else [tokens]
        if glm and film:
            self.add([self.config.video_start_token_id])
        for part in parts:
            self.add([VISION_START])
            self.add([token] * part, 1 + film)
            self.add([7])
        if glm and film:
            self.add([self.config.video_end_token_id])

    def sound(self) -> None:
        frames = int(self.generator.integers(40, 700))
        self.frames.append(frames)
        self.add([AUDIO_START, *[AUDIO_TOKEN] * tokens_of(self.family, frames), 7])

    def heard_film(self) -> None:
        grid = (int(self.generator.integers(1, 30)), *self.sides())
        frames = int(self.generator.integers(8, 4000))
        self.grids["film"].append(grid)
        self.frames.append(frames)
        chunk = self.config.seconds_per_chunk if self.family == "qwen2.5-omni" else None
        clock = VideoClock(self.config.position_id_per_seconds, chunk)
        turns = token_turns(clock, grid[0], grid[1] * grid[2] // 4, self.seconds, tokens_of(self.family, frames))
        self.add([VISION_START, AUDIO_START])
        for turn, count in enumerate(turns):
            self.add([AUDIO_TOKEN if turn % 2 else VIDEO_TOKEN] * count)
        self.add([7, 7])

    def theirs(self, model: Any) -> torch.Tensor:
        ids, (images, films) = torch.tensor(self.ids)[None], (tensor(self.grids[kind]) for kind in ("image", "film"))
        seconds = torch.tensor([self.seconds] * len(self.grids["film"]))
        if self.family not in OMNIS:
            kinds = torch.tensor(self.kinds)[None]
            more = {"second_per_grid_ts": seconds} if self.family == "qwen2.5-vl" else {}
            return model.model.get_rope_index(ids, kinds, images, films, **more)[0][:, 0]
        if images is None and films is None:
            return torch.arange(len(self.ids)).expand(3, -1)
        mask = torch.ones_like(ids)
        return model.get_rope_index(ids, images, films, mask, self.heard, torch.tensor(self.frames), seconds)[0][:, 0]


def tensor(grids: list[tuple[int, ...]]) -> torch.Tensor | None:
    return torch.tensor(grids) if grids else None


def tokens_of(family: str, frames: int) -> int:
    """Of a sound of so many mel frames."""
    if family == "qwen2.5-omni":
        return ((frames - 1) // 2 + 1 - 2) // 2 + 1
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths

    return int(_get_feat_extract_output_lengths(torch.tensor(frames)))


def drawn(family: str, config: Any, generator: np.random.Generator) -> list[Sample]:
    """The samples of a pack."""
    samples = []
    for _ in range(generator.integers(1, 7)):
        samples.append(Sample(family, config, generator, generator.choice(HEARD_RATES if family in OMNIS else RATES)))
        samples[-1].draw()
    return samples


def joined(samples: Sequence[Sample]) -> tuple[Any, ...]:
    """ids, bounds, grids of images and of films, and seconds of a pack."""
    ids = np.array([token for sample in samples for token in sample.ids])
    images, films = ([grid for sample in samples for grid in sample.grids[kind]] for kind in ("image", "film"))
    seconds = [sample.seconds for sample in samples for _ in sample.grids["film"]]
    return ids, np.cumsum([0, *(len(sample.ids) for sample in samples)]), np.array(images), np.array(films), seconds


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("pace", [25, 13])
def test_tokens_stand_where_transformers_puts_them(family: str, pace: float, is_long: bool) -> None:
    if pace != 25 and family not in (*OMNIS, "qwen2.5-vl"):
        pytest.skip("has no pace")
    model, generator = model_of(family, pace), np.random.default_rng(1)
    seen, fractions = 0, False
    for number in range(300 if is_long else 8):
        samples = drawn(family, model.config, generator)
        wanted = torch.cat([sample.theirs(model) for sample in samples], dim=1).numpy()
        given = joined(samples)
        as_tensors = [torch.as_tensor(np.asarray(one)) for one in given]
        found = pack_positions(model.config, *(as_tensors if number % 2 else given))
        assert isinstance(found, torch.Tensor if number % 2 else np.ndarray)
        np.testing.assert_array_equal(np.asarray(found), wanted)
        seen += len(given[2]) + len(given[3])
        fractions |= bool((wanted % 1).any())
    assert seen > 20
    assert fractions == (family == "qwen3-omni")


def test_every_family_with_positions_of_its_own_is_tried() -> None:
    from omnibal_ext.families.registry import MODELS

    tried = {models.classes(family)[0].model_type for family in FAMILIES}
    known = {kind for kind, model in MODELS.items() if "image_grid_thw" in model.takes}
    assert known - tried == {"qwen2_5_omni", "qwen3_omni_moe"}, "whole ones, whose thinkers are tried"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in OMNIS])
def test_images_of_a_model_that_is_not_known_stand_where_all_put_them(family: str) -> None:
    model, generator = model_of(family), np.random.default_rng(2)
    samples = [Sample(family, model.config, generator, 2.0) for _ in range(4)]
    for sample in samples:
        for _ in range(generator.integers(0, 4)):
            sample.words()
            sample.image()
        if family in STEPS_APART:
            sample.film()
        sample.words()
    wanted = torch.cat([sample.theirs(model) for sample in samples], dim=1).numpy()
    _, bounds, *grids, _ = joined(samples)
    kinds = [kind for sample in samples for kind in sample.kinds]
    np.testing.assert_array_equal(positions_by_kind(kinds, bounds, *grids), wanted)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"image_grids": [[1, 4, 4]]}, "sample 1 of the pack: more images than grids"),
        ({"image_grids": [[1, 4, 4], [1, 8, 8]]}, "sample 1 of the pack: images: 4 tokens of one whose grid .* has 16"),
        ({"image_grids": [[1, 4, 4]] * 3}, "grids of 1 images or videos without tokens"),
        ({"bounds": [0, 6, 6, 12]}, "must rise from 0 to 12"),
        ({"bounds": [0, 6]}, "must rise from 0 to 12"),
        ({"seconds": [1.0]}, "seconds between steps of 1 videos, but the grids of 0"),
    ],
)
def test_grids_and_bounds_that_are_not_those_of_the_tokens_are_refused(changed: dict[str, Any], said: str) -> None:
    config = model_of("qwen2.5-vl").config
    given = {"ids": [1, *[IMAGE_TOKEN] * 4, 7] * 2, "bounds": [0, 6, 12], "image_grids": [[1, 4, 4]] * 2}
    assert pack_positions(config, **given).tolist()[2] == [0, 1, 2, 1, 2, 3] * 2
    with pytest.raises(UserError, match=said):
        pack_positions(config, **given | changed)


def test_models_whose_positions_are_those_of_words_are_refused() -> None:
    config = models.build("llava", seed=0).config  # type: ignore[attr-defined]
    assert not has_positions(config)
    with pytest.raises(UserError, match=re.escape("'llava': not known to have positions of their own; qwen2_vl, ")):
        pack_positions(config, [1], [0, 1])
