"""Fields of a chat line that would change its meaning: unsupported ones are rejected by name.

Supported are `conversations` or `messages`, `image` or `images`, `system` and `tools` of a line, and of a turn `from`,
`value` (or `role`, `content`), `tool_calls`, `reasoning_content`, and `weight`, `loss` or `train`. The other fields
named here are content for the model in other formats (ShareGPT as LLaMA-Factory and ms-swift write it, preference
data). All further fields are ignored: ids, sources, sizes, scores.
"""

import re
from collections.abc import Mapping
from typing import Any

from megatron.vlm.data.formats.kinds import IMAGES, MEDIA
from omnibal_ext.errors import Rejected
from omnibal_ext.families.markup import QUOTED

LINE_FIELDS = frozenset({"conversations", "messages", "image", "images", "system", "tools"})
TURN_FIELDS = frozenset({"from", "value", "tool_calls", "reasoning_content", "weight", "loss", "train"})
WEIGHT_FIELDS = frozenset({"loss", "loss_weight", "train", "weight"})
TRAINING_FIELDS = frozenset(
    {"chosen", "function_call", "kto_tag", "loss_mask", "mask", "objects", "rejected", "rejected_response"}
    | {"tool_calls", "tools"}
)
"""Preferences, masks, boxes that belong in the text; tools and calls at the wrong level."""
IMAGE_WORDS = frozenset({"image", "images", "img", "imgs", "picture", "pictures", "photo", "photos"})
_FIELDS = {name for kind in MEDIA if kind != IMAGES for name in kind.fields}
MEDIA_WORDS = frozenset({"clip", "frames", "speech"} | _FIELDS)
ABOUT_WORDS = frozenset(
    {"caption", "count", "dataset", "domain", "format", "hash", "height", "heights", "id", "ids", "license", "num"}
    | {"origin", "shape", "size", "sizes", "source", "split", "type", "width", "widths"}
)
"""Last words of fields about media, not media: `image_id`, `video_source`."""
MEDIA_MARKS = re.compile(
    r"<(?:video|audio|speech|ImageHere|image[ _-]?(?:placeholder|\d+))>|<\|(?:video|audio|image)\w*\|>"
)
"""Media marks of other programs; ours is `<image>`."""
MARK = re.compile(
    "|".join([*dict.fromkeys(one for kind in MEDIA for one in (kind.mark, *kind.others)), MEDIA_MARKS.pattern])
)
"""Any media mark, ours or another program's."""


def plain(text: str, where: str) -> str:
    """Return the text. Raises `Rejected` (reserved_words) if it has `QUOTED`, a character that only `quoted` writes."""
    if QUOTED in text:
        raise Rejected("reserved_words", f"{where} contains {QUOTED!r}, by which marks are told from words")
    return text


def quoted(text: str) -> str:
    """Return the text with the character `QUOTED` for the "<" of each media mark, so that marks count as words."""
    return MARK.sub(lambda mark: QUOTED + mark[0][1:], text)


def unsupported(fields: Mapping[str, Any], honoured: frozenset[str]) -> tuple[str, str] | None:
    """Return (reason, detail) for the first unsupported field; the reason is unsupported_media or unsupported_field."""
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
