"""Run as a program: from sound files to logits, ours and transformers', which its own feature extractor gives sounds.

heard.py FOLDER FAMILY...
    prints, for each family, the largest difference of logits of a pack that the loader reads
"""

import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from megatron.vlm.data.arrival import with_pixels
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.loader import Needs, PackDataset
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.families.media import SOUND_RULES
from megatron.vlm.hf.convert import from_hugging_face
from megatron.vlm.single import single_process
from omnibal_ext.architectures.presets import preset
from tests.unit.data.noises import chirp, write_wav
from tests.unit.data.test_loader import pack_of
from tests.unit.data.test_sound_samples import made, with_pictures
from tests.unit.hf import models
from tests.unit.hf.parity import load

LENGTHS = (5000, 801, 12345)
SAMPLES: tuple[tuple[list[int], str], ...] = (
    ([0, 1], "<audio><image> x <audio> y"),
    ([], "<image>What?"),
    ([2], "<audio>"),
)
"""The sounds of each sample, and its question."""
ORDINARY = 100
"""Ids below stand for words; those of images and sounds are above."""


def main() -> None:
    folder, *families = sys.argv[1:]
    with_pictures(Path(folder))
    for number, length in enumerate(LENGTHS):
        write_wav(Path(folder) / f"{number}.wav", chirp(length, seed=number))
    with single_process("tiny", ["--ckpt-format", "torch_dist", "--no-gradient-accumulation-fusion"]) as inputs:
        found = {family: difference(family, Path(folder), inputs.args) for family in families}
    print("RESULT " + json.dumps(found))


def difference(family: str, folder: Path, args: Namespace) -> float:
    theirs: Any = models.build(family, seed=1)
    theirs.save_pretrained(folder / family / "theirs")
    from_hugging_face(folder / family / "theirs", folder / family / "ours")
    architecture = preset(str(folder / family / "ours"))
    assert architecture.audio is not None
    markup, vision = architecture.prompt.image_markup, architecture.vision
    rule = SOUND_RULES[markup](architecture.audio)
    tiling = Tiling(vision.patch_size, 4, 64, False, "native")
    data = made(folder, records(), f"{family}-data", markup=markup, audio=rule, tiling=tiling)
    batch = PackDataset(data, pack_of(np.arange(len(SAMPLES))), Needs(True, True, True, mels=True))[0]
    assert batch.input_ids is not None
    stage = load(architecture, folder / family / "ours", args)
    with torch.no_grad():
        ours: Tensor = stage(replace(with_pixels(batch), labels=None, input_ids=known(batch.input_ids, data)))
        expected = [theirs(**inputs_of(data, sample, folder)).logits[0] for sample in range(len(SAMPLES))]
    found, wanted = ours[:, : models.VOCABULARY], torch.cat(expected)
    assert found.shape == wanted.shape
    assert wanted.abs().max() > 1, "logits so small that any model would pass"
    return (found - wanted).abs().max().item()


def records() -> list[dict[str, object]]:
    return [
        {"audio": [f"{number}.wav" for number in sounds], "image": "p.png" if "<image>" in question else None,
         "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "A cat."}]}
        for sounds, question in SAMPLES
    ]  # fmt: skip


def known(ids: Tensor, data: ChatDataset) -> Tensor:
    """The dataset's ids as ids of the small model: of images and sounds its own, of words any."""
    marks = data.manifest["image_token_id"], data.manifest["audio_token_id"]
    words = ids % ORDINARY
    for mark, token in zip(marks, (models.IMAGE_TOKEN, models.AUDIO_TOKEN), strict=True):
        words = torch.where(ids == mark, token, words)
    for kind, token in (("vision", models.VISION_START), ("audio", models.AUDIO_START)):
        for name in (f"<|{kind}_bos|>", f"<|{kind}_start|>"):
            if name in data.manifest["special_tokens"]:
                words = torch.where(ids == data.manifest["special_tokens"][name], token, words)
    return words


def inputs_of(data: ChatDataset, number: int, folder: Path) -> dict[str, Tensor]:
    """What transformers' model is given of a sample: sounds by its own extractor, each alone."""
    sample, rule = data.sample(number), data.sound_rule
    assert rule is not None
    ids = known(torch.from_numpy(sample.text[0].astype(np.int64)), data)[None]
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["mm_token_type_ids"] = (ids == models.IMAGE_TOKEN).long()
    if sample.images:
        pixels = sample.pixels().unsqueeze(2).expand(-1, -1, 2, -1, -1)
        given |= {"pixel_values": pixels.flatten(1), "image_grid_thw": torch.tensor(sample.images[0].grids)}
    if sounds := SAMPLES[number][0]:
        extractor = WhisperFeatureExtractor(feature_size=rule.encoder.mel_bins, chunk_length=300)
        how = {"padding": True, "truncation": False} if rule.longest is None else {"padding": "max_length"}
        waves = [(np.round(chirp(LENGTHS[one], seed=one)[0] * 2**15) / 2**15).astype(np.float32) for one in sounds]
        heard = [extractor([wave], sampling_rate=16000, return_attention_mask=True, **how) for wave in waves]
        lengths = [int(np.asarray(one["attention_mask"]).sum()) for one in heard]
        most = max(lengths)
        features = torch.zeros(len(waves), rule.encoder.mel_bins, most)
        mask = torch.zeros(len(waves), most, dtype=torch.long)
        for row, (one, length) in enumerate(zip(heard, lengths, strict=True)):
            features[row, :, :length] = torch.from_numpy(np.asarray(one["input_features"])[0, :, :length])
            mask[row, :length] = 1
        given |= {"input_features": features, "feature_attention_mask": mask}
    return given


if __name__ == "__main__":
    main()
