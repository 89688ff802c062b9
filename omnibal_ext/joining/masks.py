"""What tokens of a pack see in models whose images are seen in both directions (Gemma): masks within samples."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Seen = NDArray[np.bool_]
SEEN: dict[str, Callable[[Seen, Seen, Seen], tuple[Seen, Seen]]] = {
    "gemma3": lambda causal, near, image: (causal | image, near & (causal | image)),
    "gemma4": lambda causal, near, image: (causal, near & (causal | image)),
    "gemma4_unified": lambda causal, near, image: (causal | image, near & causal | image),
}
"""What a token sees in full-attention and in sliding-window layers: of those not after it, those not too far before it
and those of its own image."""


def image_masks(config: Any, ids: NDArray[Any], lengths: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Return masks [1, 1, T, T] by kind of layer; {} for a model without any, or a pack without images.

    They are bool; for eager attention, which adds them to scores, fp32: 0 or its least number. transformers' own would
    be wrong for packs: it takes positions within samples for positions in the sequence.
    """
    text, kind = config.get_text_config(), config.model_type
    of_image = ids == config.image_token_id
    if not of_image.any() or kind not in SEEN or text.use_bidirectional_attention is None:
        return {}
    begins = of_image & ~np.roll(of_image, 1)
    image = np.where(of_image, begins.cumsum(), -1)
    sample = np.arange(len(lengths)).repeat(lengths)
    distance = np.arange(len(image))[:, None] - np.arange(len(image))
    together = (image[:, None] == image) & of_image
    masks = [
        (mask & (sample[:, None] == sample))[None, None]
        for mask in SEEN[kind](distance >= 0, distance < text.sliding_window, together)
    ]
    if text._attn_implementation == "eager":
        masks = [np.where(mask, np.float32(0), np.finfo(np.float32).min) for mask in masks]
    return dict(zip(("full_attention", "sliding_attention"), masks, strict=True))
