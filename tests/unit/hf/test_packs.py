"""A pack through `JoinPack` gives transformers' model of every family what its samples give it one by one."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.vlm.hf.packs import JoinPack
from megatron.vlm.media import Images
from omnibal_ext.architectures.huggingface import read_architecture
from omnibal_ext.errors import UserError
from omnibal_ext.joining import checks
from omnibal_ext.joining.checks import packs_of
from omnibal_ext.modalities.vision.normalization import NORMALIZATIONS
from omnibal_ext.modalities.vision.tiling import TiledImage, VideoFrames
from tests.unit.hf import models
from tests.unit.hf.models import IMAGE_TOKEN, VIDEO_TOKEN, Sample

pytest.importorskip("transformers")
ELSEWHERE = ("paligemma", "qwen3.5", "internvl dynamic", "gemma 4 untied")
"""Not packed; with kernels, in tests/system/test_loops.py; refused for samples beyond its rotation's
length, and for squares of another side."""
PACKED = [family for family in models.FAMILIES if not family.startswith(ELSEWHERE)]


class Case:
    """A small random model, samples, and what there is of a dataset that they are in."""

    def __init__(self, family: str, folder: Path) -> None:
        from tests.unit.hf.parity import packed  # which imports every family's classes

        self.model = models.build(family, seed=1)
        self.config = self.model.config
        self.config.save_pretrained(folder)
        architecture = read_architecture(folder)
        batch, samples = packed(architecture)
        # Qwen3-Omni's convolutions see a short sound otherwise beside a long one, in transformers.
        self.samples = samples[:3] if family == "qwen3-omni" else samples
        self.apart = len(Images.of(batch).grids) > sum(len(sample.shown) for sample in samples)
        self.how = packs_of(self.config)
        made_for = {"rule": self.how.tiling, "min_tiles": 1, "max_tiles": 36}
        size = self.samples[0].pixels.shape[-1]
        self.data: Any = SimpleNamespace(
            manifest={"tiling": made_for, "tile_size": size, "image_token_id": IMAGE_TOKEN},
            sizes=SimpleNamespace(tokens=np.array([len(sample.ids) for sample in self.samples])),
            normalization=NORMALIZATIONS[architecture.vision.pixels],
            folder=folder,
        )

    def as_of_a_dataset(self, sample: Sample) -> dict[str, Any]:
        images = [TiledImage("", 1, 1, False, width, height) for width, height in sample.sizes]
        for item in sample.shown:
            steps, rows, columns = item.grid
            film = None if item.seconds is None else VideoFrames((), (0.0,) * steps, item.seconds, self.apart)
            images.append(TiledImage("", columns, rows, False, film=film))
        ids, pixels = sample.ids, sample.pixels
        if self.how.videos_as_images:
            ids = ids.masked_fill(ids == VIDEO_TOKEN, IMAGE_TOKEN)
        if pixels.dim() == 5 and not any(image.film for image in images):
            pixels = pixels[:, :, 0]
        read = {"input_ids": ids, "labels": sample.ids, "pixel_values": pixels, "images": tuple(images)}
        if sample.films is not None:  # frames of a video are as many in each of a dataset's
            read |= {"pixel_values_videos": sample.films}
        if sample.sounds:
            read |= {"input_features": torch.cat(sample.sounds)}
        return read | {"feature_lengths": torch.tensor([len(mels) for mels in sample.sounds], dtype=torch.long)}


@pytest.mark.parametrize("family", PACKED)
def test_a_pack_gives_what_its_samples_give_one_by_one(family: str, tmp_path: Path) -> None:
    from tests.unit.hf.parity import reference

    case = Case(family, tmp_path)
    logits, loss = reference(case.model, case.samples)
    wanted = {name: weight.grad for name, weight in case.model.named_parameters() if weight.grad is not None}
    case.model.zero_grad()
    found = case.model(**JoinPack(case.data, case.config)([case.as_of_a_dataset(one) for one in case.samples]))
    found.loss.backward()
    assert logits.abs().max() > 1, "logits so small that any model would pass"
    assert (found.logits[0] - logits).abs().max() < 1e-5
    assert abs(found.loss.item() - loss) < 1e-5
    gradients = {name: weight.grad for name, weight in case.model.named_parameters() if weight.grad is not None}
    assert gradients.keys() == wanted.keys()
    least = 1e-3 * max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).abs().max() < 1e-5 * max(least, float(gradient.abs().max())), name


@pytest.mark.parametrize(
    ("absent", "version", "said"),
    [
        (["fla"], "5.10.0", "qwen3_5: .* layers of linear_attention .*: pip install flash-linear-attention$"),
        (["causal_conv1d"], "6.0.dev0", "pip install causal-conv1d$"),
        (["fla", "causal_conv1d"], "5.9.1", "install 'transformers>=5.10' flash-linear-attention causal-conv1d$"),
        ([], "4.60.0", "pip install 'transformers>=5.10'$"),
        ([], "5.10.0", None),
    ],
    ids=["no states", "no convolution", "nothing", "old transformers", "all there"],
)
def test_linear_attention_without_its_kernels_is_refused(
    absent: list[str], version: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What transformers takes instead drops where samples begin, or fails once it runs."""
    case = Case("qwen3.5", tmp_path)
    monkeypatch.setattr(checks, "find_spec", lambda module: None if module in absent else module)
    monkeypatch.setattr(checks, "version", lambda _: version)
    if said is None:
        pack = JoinPack(case.data, case.config)([case.as_of_a_dataset(one) for one in case.samples])
        edges = pack["cu_seq_lens_q"].tolist()
        assert edges == [0, *np.cumsum([len(one.ids) for one in case.samples])]
        assert pack["seq_idx"][0].tolist() == [number for number, one in enumerate(case.samples) for _ in one.ids]
        assert pack["seq_idx"].dtype == torch.int32
        return
    with pytest.raises(UserError, match=said):
        JoinPack(case.data, case.config)


@pytest.mark.parametrize(
    ("family", "part", "attention", "refused"),
    [
        ("gemma 3", "text_config", "eager", False),
        ("gemma 3", "text_config", "flex_attention", True),
        ("gemma 4", "text_config", "flash_attention_2", True),
        ("glm-4.5v", "text_config", "flash_attention_2", True),
        ("glm-4.5v", "vision_config", "flash_attention_2", False),
        ("glm-4.1v", "text_config", "flash_attention_2", False),
        ("qwen3.5", "vision_config", "flash_attention_2", True),
        ("qwen3.5", "text_config", "flash_attention_2", False),
    ],
)
def test_kernels_that_would_not_tell_samples_apart_are_refused(
    family: str, part: str, attention: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(family, tmp_path)
    monkeypatch.setattr(checks, "find_spec", lambda module: module)
    getattr(case.config, part)._attn_implementation = attention
    said = f"its {part} .* attn_implementation 'sdpa' or 'eager' alone, not '{attention}'"
    with pytest.raises(UserError, match=said) if refused else nullcontext():
        JoinPack(case.data, case.config)


def test_words_that_see_what_comes_after_them_are_refused(tmp_path: Path) -> None:
    case = Case("gemma 4", tmp_path)
    case.config.text_config.use_bidirectional_attention = "all"
    with pytest.raises(UserError, match="gemma4: use_bidirectional_attention of all tokens"):
        JoinPack(case.data, case.config)
