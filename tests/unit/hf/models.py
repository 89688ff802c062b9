"""Small random models of every family, built by transformers; and inputs of every kind for them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.data.chat_program import GENERATION
from omnibal_ext.families.registry import TEMPLATES

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VOCABULARY, SIDE, TILE = 127, 126, 125, 130, 4, 16
AUDIO_TOKEN, AUDIO_START = 124, 123
GRIDS = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
GEMMA_JINJA, MISTRAL_JINJA, GLM_JINJA, GLM_THINKING_JINJA = (
    GENERATION.sub("", TEMPLATES[name].read_text()) for name in ("gemma", "mistral-v7", "glm-4.1v", "glm-4.5v")
)
"""Programs as folders have them, without tags of what is trained."""
CLAMPING = "gemma 4 with a ViT that clamps, heads that two ranks do not share evenly"
PARTS: dict[str, dict[str, Any]] = {}
"""Of configs, by name; also as names of this module. Why some are as they are:

QWEN3_5_TEXT: what a linear layer says of a sample's first tokens goes with one product of a query and a key; where that
is next to nothing the norm behind blows rounding up: with transformers' own epsilon a word's last bit moves logits by
5e-5. MINISTRAL: beyond 16 tokens queries are scaled. GEMMA, PALIGEMMA_2: windows shorter than the samples, and narrower
than an image with words around it; scores and logits near their caps. PALIGEMMA, GEMMA_4, PADDLEOCR_TEXT: transformers'
word of padding has no gradient, so that it is one which no sample has. PALIGEMMA_VIT: four features an image. GEMMA_4:
global layers have wider heads in one group, whose keys are values. GEMMA_4_PATCHES: squares of two patches a side, as
large as others' patches; places for images of up to ten a side. GEMMA_4_INPUTS: as E2B, the fourth layer takes keys and
values of the third, the fifth of the second. vip-llava: layers whose features stand side by side, no more than run.
"""


def merged(part: Any) -> dict[str, Any]:
    """A part by its name, as it is, or of a list of these, later ones over earlier ones."""
    if isinstance(part, list):
        return {field: value for one in part for field, value in merged(one).items()}
    return PARTS[part] if isinstance(part, str) else dict(part)


_TABLES = json.loads(Path(__file__).with_name("families.json").read_text())
for _name, _part in _TABLES["parts"].items():
    PARTS[_name] = merged(_part)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    family: (prefix, *map(merged, parts)) for family, (prefix, *parts) in _TABLES["families"].items()
}
"""name: (class prefix, vision, language, further fields)"""
AT_ONE_RANK, OF_A_KIND, OF_AN_ENGINE = (tuple(names) for names in _TABLES["tried"].values())
"""What parity tries at one rank too; one of every kind of layer (Transformer Engine has its own, all else is as
without it); one of every kind that Transformer Engine has a layer for."""


def __getattr__(name: str) -> dict[str, Any]:
    """A part of configs."""
    try:
        return PARTS[name]
    except KeyError:
        raise AttributeError(name) from None


def classes(family: str) -> tuple[Any, Any]:
    import transformers

    prefix = FAMILIES[family][0]
    return getattr(transformers, f"{prefix}Config"), getattr(transformers, f"{prefix}ForConditionalGeneration")


def config_fields(family: str) -> dict[str, Any]:
    prefix, vision, text, fields = FAMILIES[family]
    if prefix.startswith(("Qwen", "Glm", "Gemma4", "Paddle")):
        fields = {"image_token_id": IMAGE_TOKEN, "video_token_id": VIDEO_TOKEN, **fields}
        sounds = {"audio_token_id": AUDIO_TOKEN, "audio_start_token_id": AUDIO_START}
        fields = {"vision_start_token_id": VISION_START, **sounds, **fields} if "Omni" in prefix else fields
    elif prefix in ("Idefics3", "SmolVLM", "LightOnOcr", "DeepseekVL"):
        fields = {"image_token_id": IMAGE_TOKEN, **fields}
    elif prefix == "InternVL":
        fields = {"image_token_id": IMAGE_TOKEN, **fields}
        vision = {**PARTS["INTERN_VIT"], **vision}
    else:
        fields = {"image_token_index": IMAGE_TOKEN, **fields}
        vision = (
            vision if prefix in ("LlavaOnevision", "Gemma3", "Mistral3", "PaliGemma") else {**PARTS["CLIP"], **vision}
        )
    if prefix == "VideoLlava":
        fields = {"video_token_index": VIDEO_TOKEN, **fields}
    if prefix.startswith("LlavaNext"):
        fields = {"image_grid_pinpoints": GRIDS, **fields}
    if prefix == "LlavaOnevision":
        side = vision["image_size"]
        fields = {"image_grid_pinpoints": [[side * h, side * w] for h in range(1, 7) for w in range(1, 7)], **fields}
    return {**fields, "vision_config": vision, "text_config": text}


def build(family: str, seed: int) -> torch.nn.Module:
    """A model of that family; every weight is random, those too that transformers starts from zero or one."""
    make_config, make_model = classes(family)
    return randomised(make_model(make_config(**config_fields(family))), seed)


def randomised(model: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The model with every weight drawn, about one where transformers starts from one.

    Of Gemma 4 norms of query and key about a half: no root divides its scores, and as large ones blow rounding up.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        kept = model.state_dict(keep_vars=True)  # with numbers that are not trained
        for weight in [*model.parameters(), *(one for one in kept.values() if not one.requires_grad)]:
            center = 1.0 if weight.dim() == 1 and weight.mean() > 0.5 else 0.0
            weight.copy_(center + 0.1 * torch.randn(weight.shape, generator=generator))
        for name, weight in model.named_parameters():
            if getattr(model.config, "model_type", "").startswith("gemma4") and name.endswith(
                ("q_norm.weight", "k_norm.weight")
            ):
                weight.mul_(0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        for name, module in model.named_modules():
            if hasattr(module, "input_min"):
                _clamp(module, name, generator)
    return model.eval()


def with_random_adapters(model: Any) -> Any:
    """Peft's model with random numbers in its adapters."""
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return model


def _clamp(matrix: torch.nn.Module, name: str, generator: torch.Generator) -> None:
    """Ranges that bite, of every matrix its own; but what goes into the first layer's is clamped alike, as published.

    Far out, where values are few: one at a bound would have its gradient or none as it is rounded. Not in all of them
    lies zero, which heads have that fill up ranks; and some have no bound, as transformers' at first.
    """
    kind = name.rpartition(".")[2]
    into, out_of = {"o_proj": (1.5, 1.1), "down_proj": (0.9, 0.4)}.get(kind, (2.6, 1.7))
    alike = ".layers.0." in name
    for end, scale in (("input", into), ("output", out_of)):
        drawn = scale * (1 + 0.3 * torch.rand(2, generator=generator))
        low, high = (-scale, scale) if alike and end == "input" else (-drawn[0], drawn[1])
        getattr(matrix, f"{end}_min").fill_(low)
        getattr(matrix, f"{end}_max").fill_(high)
    if ".layers.1." in name and kind in ("v_proj", "o_proj"):
        (matrix.output_min if kind == "v_proj" else matrix.input_min).fill_(0.05)
    if ".layers.2." in name and kind in ("k_proj", "up_proj"):
        matrix.output_max.fill_(torch.inf)


@dataclass(frozen=True)
class Sample:
    """One conversation: token ids [T] with image tokens in place, tiles [n, 3, S, S], (width, height) of the images.

    At native resolution tiles are patches, [n, 3, 2, S, S] where a pack has videos.
    """

    ids: Tensor
    pixels: Tensor
    sizes: tuple[tuple[int, int], ...]
    shown: tuple["Shown", ...] = ()
    sounds: tuple[Tensor, ...] = ()
    """Mel frames of each, [frames, bins]."""
    films: Tensor | None = None
    """Videos that have an encoder of their own, [videos, frames, 3, S, S]."""


@dataclass(frozen=True)
class Shown:
    """An image at native resolution, or a video: patches in time, height and width, seconds between its steps."""

    grid: tuple[int, int, int]
    seconds: float | None = None
    """None: an image."""

    @property
    def patches(self) -> int:
        steps, rows, columns = self.grid
        return steps * rows * columns


def samples(
    image_tokens: dict[tuple[int, int], tuple[int, int]], per_sample: list[list[tuple[int, int]]], tile: int = TILE
) -> list[Sample]:
    """Samples with images of the sizes listed; `image_tokens` says how many tokens and tiles an image of a size has."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for number, sizes in enumerate(per_sample):
        pieces = [torch.randint(0, IMAGE_TOKEN, (3 + number,), generator=generator)]
        for size in sizes:
            pieces.append(torch.full((image_tokens[size][0],), IMAGE_TOKEN))
            pieces.append(torch.randint(0, IMAGE_TOKEN, (4,), generator=generator))
        tiles = sum(image_tokens[size][1] for size in sizes)
        made.append(Sample(torch.cat(pieces), torch.randn(tiles, 3, tile, tile, generator=generator), tuple(sizes)))
    return made
