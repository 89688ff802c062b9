"""How pixels were normalised for the ViTs that we know."""

from typing import NamedTuple


class Normalization(NamedTuple):
    """Mean and deviation of the pixels (red, green, blue, from 0 to 1) that a ViT was trained with."""

    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]


NORMALIZATIONS = {
    "imagenet": Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # InternViT
    "clip": Normalization((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),  # LLaVA's ViT
    "half": Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),  # Qwen3-VL's
    "unit": Normalization((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),  # as they are (Gemma 4 without towers)
}
"""Normalisations by the names in dataset manifests."""
