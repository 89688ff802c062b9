"""Small models like LLaVA, InternVL, Qwen2.5-VL and Gemma 3 in folders, and four samples for each.

Samples are what processors make: words of each from a range of its own, image tokens with what stands around them,
pixels by transformers' image processor from a picture of noise; labels at the words of the second half. The first has
an image at its end, the second none, the third two of other shapes, the last one at its beginning; or none has one.

`prove` reads samples by their names here, `llava_images`, `qwen_words`: see `run.py`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

IGNORED, WORDS, SAMPLES = -100, 20, 4
BEGIN, END, IMAGE, PADDING, VIDEO = 100, 101, 102, 103, 104
"""Tokens: words of sample n are 20 n to 20 n + 19; what stands around an image, and each of its places."""
VOCABULARY, TILE, PATCH = 112, 56, 14
TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCABULARY, "max_position_embeddings": 512,
    "pad_token_id": PADDING, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARE = {"height": TILE, "width": TILE}
KINDS = ("llava", "internvl", "qwen", "gemma")
SHAPES: tuple[tuple[str | tuple[int, int], ...], ...] = (
    ("word", "word", "word", "word", (56, 56)),
    ("word",) * 7,
    ("word", (112, 56), "word", "word", (56, 84), "word", "word", "word"),
    ((56, 56), *("word",) * 5),
)  # fmt: skip
"""Of each sample: words, and pictures by height and width."""


def model_of(kind: str) -> Any:
    """Return a model of random weights."""
    import transformers as of

    common: dict[str, Any] = {"tie_word_embeddings": False, "initializer_range": 0.2}
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
    fixed = VISION | {"initializer_range": 0.2}
    configs: dict[str, Any] = {
        "llava": lambda: of.LlavaConfig(
            vision_config=of.CLIPVisionConfig(**VISION, image_size=TILE, patch_size=PATCH, projection_dim=32),
            text_config=of.LlamaConfig(**TEXT), image_token_index=IMAGE, image_seq_length=16, **common,
        ),
        "internvl": lambda: of.InternVLConfig(
            vision_config={**fixed, "image_size": [TILE, TILE], "patch_size": [PATCH, PATCH]},
            text_config={**TEXT, "model_type": "qwen2"}, image_token_id=IMAGE, image_seq_length=4, **common,
        ),
        "qwen": lambda: of.Qwen2_5_VLConfig(
            vision_config={"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": PATCH,
                           "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 56,
                           "initializer_range": 0.2},
            text_config={**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                     "mrope_section": [2, 3, 3]}}, **ids, **common,
        ),
        "gemma": lambda: of.Gemma3Config(
            vision_config={**fixed, "model_type": "siglip_vision_model", "image_size": TILE, "patch_size": PATCH},
            text_config={**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=BEGIN, eoi_token_index=END, **common,
        ),
    }  # fmt: skip
    config = configs[kind]()
    name = type(config).__name__.replace("Config", "ForConditionalGeneration")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return getattr(of, name)(config)


def image_processor_of(kind: str) -> Any:
    """Return transformers' image processor, of Pillow and numpy."""
    import transformers as of

    makers: dict[str, Any] = {
        "llava": lambda: of.CLIPImageProcessorPil(size=SQUARE, crop_size=SQUARE),
        "internvl": lambda: of.GotOcr2ImageProcessorPil(
            size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=12
        ),
        "qwen": lambda: of.Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=112 * 112, patch_size=PATCH),
        "gemma": lambda: of.Gemma3ImageProcessorPil(size=SQUARE),
    }
    return makers[kind]()


def picture(number: int, place: int, shape: tuple[int, int], other: bool = False) -> Image.Image:
    """Return noise of a height and width, of a sample's number and the place in it; other noise if told."""
    noise = np.random.default_rng([number, place, other]).integers(0, 256, (*shape, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def sample_of(kind: str, number: int, images: bool, other: bool = False) -> dict[str, Any]:
    """Return what a processor makes of a sample, with labels: `other` words and pictures if told."""
    ids: list[int] = []
    for place, part in enumerate(SHAPES[number]):
        if isinstance(part, str):
            ids.append(WORDS * number + (place + 7 * other) % WORDS)
        elif images:
            ids += tokens_of(kind, picture(number, place, part))
    shown = pictures(number, other) if images else []
    media = dict(image_processor_of(kind)(shown, return_tensors="pt")) if shown else {}
    made = torch.tensor(ids)
    labels = made.masked_fill((torch.arange(len(ids)) < len(ids) // 2) | (made >= BEGIN), IGNORED)
    types = {"qwen": "mm_token_type_ids", "gemma": "token_type_ids"}
    more = {types[kind]: (made == IMAGE).long()} if kind in types else {}
    media = {key: value for key, value in media.items() if key in ("pixel_values", "image_grid_thw")}
    return {"input_ids": made, "attention_mask": torch.ones_like(made), "labels": labels, **more, **media}


def pictures(number: int, other: bool = False) -> list[Image.Image]:
    """Return the pictures of a sample."""
    shapes = enumerate(SHAPES[number])
    return [picture(number, place, part, other) for place, part in shapes if not isinstance(part, str)]


def tokens_of(kind: str, shown: Image.Image) -> list[int]:
    """Return an image's tokens, and what stands around them."""
    made = image_processor_of(kind)([shown], return_tensors="pt")
    counts = {"llava": lambda: 16, "internvl": lambda: 4 * len(made["pixel_values"]), "gemma": lambda: 4,
              "qwen": lambda: int(made["image_grid_thw"].prod()) // 4}  # fmt: skip
    inside = [IMAGE] * counts[kind]()
    return inside if kind == "llava" else [BEGIN, *inside, END]


def samples_of(kind: str, images: bool, changed: int | None = None) -> list[dict[str, Any]]:
    """Return all samples, the `changed` one with other words and pictures."""
    return [sample_of(kind, number, images, number == changed) for number in range(SAMPLES)]


def whose(ids: Sequence[int]) -> tuple[int, bool]:
    """Return which sample these tokens are, and whether it is the changed one; trainers' collators read pictures
    anew."""
    number, first = divmod(next(token for token in ids if token < BEGIN), WORDS)
    return number, first != next(place for place, part in enumerate(SHAPES[number]) if isinstance(part, str))


def kind_of(config: Any) -> str:
    """Return the kind of a model's configuration."""
    return next(kind for kind in KINDS if config.model_type.startswith(kind))


def __getattr__(name: str) -> list[dict[str, Any]]:
    kind, _, what = name.partition("_")
    if kind in KINDS and what in ("images", "words"):
        return samples_of(kind, what == "images")
    raise AttributeError(name)


def write(folder: Path) -> None:
    """Write a folder of each kind."""
    for kind in KINDS:
        if not (folder / kind / "config.json").exists():
            model_of(kind).save_pretrained(folder / kind)
