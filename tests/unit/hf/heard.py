"""Run as a program: from sounds and films to logits, ours and transformers', which its own feature extractor gives
sounds.

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

from megatron.vlm.data.arrival import with_values
from megatron.vlm.data.batches import join_words
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import ImageReader
from megatron.vlm.data.inputs.sounds import SoundReader
from megatron.vlm.data.loader import Needs, PackDataset
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.media.videos import join_tiles
from megatron.vlm.data.sample import Sample
from megatron.vlm.hf.convert import from_hugging_face
from megatron.vlm.hf.pack_inputs import INPUTS, Pack
from megatron.vlm.pixels import normalise
from megatron.vlm.single import single_process
from omnibal_ext.architectures.presets import preset
from omnibal_ext.families.media import SOUND_RULES, VIDEO_RULES
from omnibal_ext.joining.checks import packs_of
from tests.media import audio_of
from tests.unit.data.clips import noise, write_talkie
from tests.unit.data.noises import chirp, write_wav
from tests.unit.data.test_loader import pack_of
from tests.unit.data.test_sound_samples import made, with_pictures
from tests.unit.hf import models
from tests.unit.hf.parity import load

LENGTHS = (5000, 801, 12345, 59999, 24000)
SAMPLES: tuple[tuple[list[int], str, bool], ...] = (
    ([0, 1], "<audio><image> x <audio> y", False),
    ([], "<image>What?", False),
    ([2], "<audio>", False),
    ([0], "<video> x <audio><image>", False),
    ([3, 2, 4], "<video><image> x <audio> y <video>", True),
)
"""The sounds of each sample, its question, and whether it hears its films."""
FILMS = {3: (20, 64, 48), 4: (13, 80, 40)}
"""Frames, four a second, width and height of the films that have the sounds of these numbers."""
ORDINARY = 100
"""Ids below stand for words; those of images and sounds are above."""


def main() -> None:
    folder, *families = sys.argv[1:]
    with_pictures(Path(folder))
    for number, length in enumerate(LENGTHS):
        write_wav(Path(folder) / f"{number}.wav", chirp(length, seed=number))
    for number, (frames, *size) in FILMS.items():
        write_talkie(
            Path(folder) / f"{number}.mkv", noise(frames, *size, number), 4, chirp(LENGTHS[number], seed=number)
        )
    with single_process("tiny", ["--ckpt-format", "torch_dist", "--no-gradient-accumulation-fusion"]) as inputs:
        found = {family: difference(family, Path(folder), inputs.args) for family in families}
    print("RESULT " + json.dumps(found))


def difference(family: str, folder: Path, args: Namespace) -> float:
    """The largest difference of logits, of a pack of all samples."""
    theirs: Any = models.build(family, seed=1)
    theirs.save_pretrained(folder / family / "theirs")
    from_hugging_face(folder / family / "theirs", folder / family / "ours")
    architecture = preset(str(folder / family / "ours"))
    assert audio_of(architecture) is not None
    markup, vision = architecture.prompt.image_markup, architecture.vision
    rule, sight = SOUND_RULES[markup](audio_of(architecture)), VIDEO_RULES[markup]
    assert vision.native is not None
    tiling = Tiling(vision.patch_size, 4, 64, False, "native")
    sight = replace(sight, min_pixels=4 * vision.patch_size**2, max_pixels=64 * vision.patch_size**2)
    how = {"audio": rule, "tiling": tiling, "video": sight, "clock": vision.native.clock}
    data = made(folder, records(), f"{family}-data", markup=markup, **how)
    batch = PackDataset(data, pack_of(np.arange(len(SAMPLES))), Needs(frozenset({"tiles", "frames"}), True, True))[0]
    assert batch.input_ids is not None
    stage = load(architecture, folder / family / "ours", args)
    with torch.no_grad():
        ours: Tensor = stage(replace(with_values(batch), labels=None, input_ids=known(batch.input_ids, data)))
        given = [inputs_of(data, sample, folder) for sample in range(len(SAMPLES))]
        expected = [theirs(**one).logits[0] for one in given]
    assert torch.equal(joined_positions(data, theirs.config), torch.cat([positions(theirs, one) for one in given], 1))
    found, wanted = ours[:, : models.VOCABULARY], torch.cat(expected)
    assert found.shape == wanted.shape
    assert wanted.abs().max() > 1, "logits so small that any model would pass"
    return (found - wanted).abs().max().item()


def joined_positions(data: ChatDataset, config: Any) -> Tensor:
    """Of all samples, as transformers' model is told them of a pack: [3, T]."""
    samples = [{**data[number], "input_ids": known(data[number]["input_ids"], data)} for number in range(len(data))]
    pack = Pack(samples, join_words(samples), config, packs_of(config), data.normalization)
    return INPUTS["image_grid_thw"](pack)["position_ids"][1:, 0].float()


def positions(theirs: Any, given: dict[str, Any]) -> Tensor:
    """Of one sample, as it computes them itself."""
    grids = [given.get(f"{kind}_grid_thw") for kind in ("image", "video")]
    mask = given.get("feature_attention_mask")
    found, _ = theirs.get_rope_index(
        given["input_ids"], *grids, given["attention_mask"], given["use_audio_in_video"],
        None if mask is None else mask.sum(1), given.get("video_second_per_grid"),
    )  # fmt: skip
    return found[:, 0].float()


def records() -> list[dict[str, object]]:
    """A line for each sample."""
    return [
        {
            "audio": [f"{number}.wav" for number in sounds if number not in FILMS],
            "image": "p.png" if "<image>" in question else None,
            "videos": [f"{number}.mkv" for number in FILMS][: question.count("<video>")],
            "use_audio_in_video": heard,
            "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": "A cat."}],
        }
        for sounds, question, heard in SAMPLES
    ]


def seen(sample: Sample) -> dict[str, Tensor]:
    """Patches of two frames, of images and of films apart."""
    given: dict[str, Tensor] = {}
    for name, film in (("pixel_values", False), ("pixel_values_videos", True)):
        if shown := [image for image in sample.images if bool(image.film) is film]:
            tiles = torch.from_numpy(join_tiles([ImageReader(sample.data).decode(sample, one) for one in shown]))
            pixels = normalise(tiles, sample.data.normalization)
            pixels = pixels if film else pixels.unsqueeze(2).expand(-1, -1, 2, -1, -1)
            grids = torch.tensor([grid for one in shown for grid in one.grids])
            given |= {name: pixels.flatten(1), "video_grid_thw" if film else "image_grid_thw": grids}
            given |= {"video_second_per_grid": torch.tensor([one.film.seconds for one in shown])} if film else {}
    return given


def known(ids: Tensor, data: ChatDataset) -> Tensor:
    """The dataset's ids as ids of the small model: of images and sounds its own, of words any."""
    marks = [data.manifest[f"{kind}_token_id"] for kind in ("image", "video", "audio")]
    words = ids % ORDINARY
    for mark, token in zip(marks, (models.IMAGE_TOKEN, models.VIDEO_TOKEN, models.AUDIO_TOKEN), strict=True):
        words = torch.where(ids == mark, token, words)
    for kind, token in (("vision", models.VISION_START), ("audio", models.AUDIO_START)):
        for name in (f"<|{kind}_bos|>", f"<|{kind}_start|>"):
            if name in data.manifest["special_tokens"]:
                words = torch.where(ids == data.manifest["special_tokens"][name], token, words)
    return words


def inputs_of(data: ChatDataset, number: int, folder: Path) -> dict[str, Any]:
    """What transformers' model is given of a sample: sounds by its own extractor, each alone."""
    sample, rule = data.sample(number), SoundReader(data).rule
    ids = known(torch.from_numpy(sample.text[0].astype(np.int64)), data)[None]
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["mm_token_type_ids"] = (ids == models.IMAGE_TOKEN).long()
    given |= {"use_audio_in_video": SAMPLES[number][2], **seen(sample)}
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
