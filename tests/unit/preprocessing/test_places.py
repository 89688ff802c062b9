"""Where files of a folder say one thing differently, ours reads the file that transformers reads."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.vlm.hf.folder import WeightFolder
from megatron.vlm.preprocessing.folder_files import folder_settings, video_rule
from megatron.vlm.preprocessing.folder_template import folder_template
from megatron.vlm.preprocessing.measures.sounds import rule_in, rule_of
from megatron.vlm.preprocessing.tokenizer_files import TEMPLATE_FILES, template_source
from omnibal_ext.architectures.presets import preset
from omnibal_ext.families.media import VIDEO_RULES

pytest.importorskip("transformers")
from transformers.feature_extraction_utils import FeatureExtractionMixin
from transformers.image_processing_base import ImageProcessingMixin
from transformers.modeling_utils import _get_resolved_checkpoint_files
from transformers.processing_utils import ProcessorMixin
from transformers.video_processing_utils import BaseVideoProcessor

QWEN, HEARS = preset("qwen3-vl-8b"), preset("qwen2.5-omni-7b")
JINJA = "{% for message in messages %}{{ '<' + message.role + ' NUMBER>' + message.content + '</s>' }}{% endfor %}"
TOKENIZER = {"added_tokens": [{"id": 0, "content": "</s>", "special": True}]}
PATCH = 16**2  # pixels
Write = Callable[[Path, int], None]


def put(file: Path, fields: Mapping[str, Any]) -> None:
    """Add fields to a JSON file."""
    file.write_text(json.dumps({**(json.loads(file.read_text()) if file.exists() else {}), **fields}))


def place(name: str, made: Callable[[int], Mapping[str, Any]], inside: str = "") -> Write:
    """A JSON file's fields, or those of an object inside."""
    return lambda folder, number: put(folder / name, {inside: made(number)} if inside else made(number))


def template(name: str) -> Write:
    def write(folder: Path, number: int) -> None:
        text = JINJA.replace("NUMBER", str(number))
        if name.endswith(".jinja"):
            (folder / name).write_text(text)
        else:
            put(folder / name, {"chat_template": text})

    return write


def pixels(number: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": 65536, "longest_edge": 2**20 * (1 + number)}}


def window(number: int) -> dict[str, Any]:
    return {"feature_extractor_type": "WhisperFeatureExtractor", "hop_length": 100 + number}


def single(folder: Path, number: int) -> None:
    save_file({"head.weight": torch.full((2,), float(number))}, folder / "model.safetensors", {"format": "pt"})


def shards(folder: Path, number: int) -> None:
    save_file({"head.weight": torch.full((2,), float(number))}, folder / "part.safetensors", {"format": "pt"})
    index = {"metadata": {"total_size": 8}, "weight_map": {"head.weight": "part.safetensors"}}
    put(folder / "model.safetensors.index.json", index)


@dataclass(frozen=True)
class Fact:
    """Where it may stand, and what of a folder says it: to us, and to transformers."""

    places: tuple[Write, ...]
    ours: Callable[[Path], Any]
    theirs: Callable[[Path], Any]


def their_template(folder: Path) -> str:
    """The processor's; without one the tokenizer's, which `tokenizer.apply_chat_template` uses."""
    found = ProcessorMixin.get_processor_dict(folder)[0].get("chat_template")
    return str(found or json.loads((folder / "tokenizer_config.json").read_text())["chat_template"])


def their_weights(folder: Path) -> list[float]:
    (file,), _ = _get_resolved_checkpoint_files(folder, None, None, True, {}, is_remote_code=False)
    return list(load_file(file)["head.weight"].tolist())


FACTS = {
    "template": Fact(
        tuple(map(template, TEMPLATE_FILES)),
        lambda folder: template_source(folder / (folder_template(folder) or ("", ""))[1]), their_template,
    ),
    "pixels of images": Fact(
        (place("processor_config.json", pixels, "image_processor"), place("preprocessor_config.json", pixels)),
        lambda folder: folder_settings(folder, QWEN)["max-tiles"].value * PATCH,
        lambda folder: ImageProcessingMixin.get_image_processor_dict(folder)[0]["size"]["longest_edge"],
    ),
    "pixels of films": Fact(
        (place("processor_config.json", pixels, "video_processor"), place("video_preprocessor_config.json", pixels),
         place("preprocessor_config.json", pixels)),
        lambda folder: video_rule(folder, VIDEO_RULES[QWEN.prompt.image_markup], QWEN.vision).value.max_pixels,
        lambda folder: BaseVideoProcessor.get_video_processor_dict(folder)[0]["size"]["longest_edge"],
    ),
    "steps of sounds": Fact(
        (place("processor_config.json", window, "feature_extractor"),
         place("processor_config.json", window, "audio_processor"), place("preprocessor_config.json", window)),
        lambda folder: rule_in(folder, rule_of(HEARS))[0].hop,
        lambda folder: FeatureExtractionMixin.get_feature_extractor_dict(folder)[0]["hop_length"],
    ),
    "weights": Fact(
        (single, shards), lambda folder: WeightFolder(folder).tensor("head.weight").tolist(), their_weights
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTS)
def test_of_several_places_the_one_speaks_that_transformers_takes(name: str, tmp_path: Path) -> None:
    fact = FACTS[name]
    numbers = range(len(fact.places))
    sets = chain.from_iterable(combinations(numbers, count) for count in range(1, len(numbers) + 1))
    unlike = []
    for which in sets:
        folder = tmp_path / "-".join(map(str, which))
        folder.mkdir()
        put(folder / "tokenizer.json", TOKENIZER)
        for number in which:
            fact.places[number](folder, number)
        ours, theirs = fact.ours(folder), fact.theirs(folder)
        if ours != theirs:
            unlike.append((which, ours, theirs))
    assert not unlike
