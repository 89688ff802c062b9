"""Fields of a chat line that change what it means. What is not honoured is rejected by name, never read as text.

Honoured are `conversations` or `messages`, `image` or `images`, `system` and `tools` of a line, and of a turn `from`,
`value` (or `role`, `content`), `tool_calls`, `reasoning_content`, and `weight`, `loss` or `train`. The fields named
here belong to other formats (ShareGPT as LLaMA-Factory and ms-swift write it, preference data) and hold what the model
would have to be given too. All other fields are the user's own: ids, sources, sizes, scores.
"""

import re
from collections.abc import Mapping
from typing import Any

LINE_FIELDS = frozenset({"conversations", "messages", "image", "images", "system", "tools"})
TURN_FIELDS = frozenset({"from", "value", "tool_calls", "reasoning_content", "weight", "loss", "train"})
WEIGHT_FIELDS = frozenset({"loss", "loss_weight", "train", "weight"})
TRAINING_FIELDS = frozenset(
    {"chosen", "function_call", "kto_tag", "loss_mask", "mask", "objects", "rejected", "rejected_response"}
    | {"tool_calls", "tools"}
)
"""Preferences, masks, boxes to be written into the words; tools and calls where they do not belong."""
IMAGE_WORDS = frozenset({"image", "images", "img", "imgs", "picture", "pictures", "photo", "photos"})
MEDIA_WORDS = frozenset({"audio", "audios", "clip", "frames", "speech", "video", "videos"})
ABOUT_WORDS = frozenset(
    {"caption", "count", "dataset", "domain", "format", "hash", "height", "heights", "id", "ids", "license", "num"}
    | {"origin", "shape", "size", "sizes", "source", "split", "type", "width", "widths"}
)
"""`image_id` and `video_source` speak about a picture or film; they are none."""
MEDIA_MARKS = re.compile(
    r"<(?:video|audio|speech|ImageHere|image[ _-]?(?:placeholder|\d+))>|<\|(?:video|audio|image)\w*\|>"
)
"""Places for media in the words, as other programs mark them; `<image>` is ours."""


def unsupported(fields: Mapping[str, Any], honoured: frozenset[str]) -> tuple[str, str] | None:
    """The reason (unsupported_media, unsupported_field) and what to tell, for the first field that is not honoured."""
    for name, value in fields.items():
        if name in honoured or value in (None, "", False, [], {}):
            continue
        words = re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower())
        is_about = isinstance(value, int | float) or (bool(words) and words[-1] in ABOUT_WORDS)
        if name in TRAINING_FIELDS or (name in WEIGHT_FIELDS and value != 1):
            return "unsupported_field", f"{name!r} is not read here; take it out if it may be ignored"
        if MEDIA_WORDS & set(words) and not is_about:
            return "unsupported_media", f"{name!r} is given; images are all that the model sees"
        if IMAGE_WORDS & set(words) and not is_about:
            return (
                "unsupported_field",
                f"{name!r} is not read, images are named by 'image' or 'images'; rename or remove it",
            )
    return None
