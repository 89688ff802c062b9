"""How a model's text shows an image: the words around the place that its features take.

    InternVL   <img><IMG_CONTEXT><IMG_CONTEXT>...</img>
    LLaVA      <image><image>...
    Qwen-VL    <|vision_start|><|image_pad|><|image_pad|>...<|vision_end|>
               <|vision_start|><|video_pad|><|video_pad|>...<|vision_end|>
    Qwen3-VL   <|vision_start|><0.3 seconds><|vision_start|><|video_pad|>...<|vision_end|><1.3 seconds>...<|vision_end|>
    Gemma 4    <|image><|image|><|image|>...<image|>
    Gemma 3    <start_of_image><image_soft_token><image_soft_token>...<end_of_image>, an empty line before and after

The context token is written once and repeated later, when the tiles are counted. Markup belongs to the model, not to
the chat template: a token that the model never had is an id behind its vocabulary. The texts are those of transformers'
processors, to which the tests compare them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"  # in the user's data
MARKS = re.compile(f"{IMAGE_MARK}|{VIDEO_MARK}")


@dataclass(frozen=True, slots=True)
class ImageMarkup:
    """`context` stands for one image feature; `tokens` are the special tokens the model has for images.

    Their order is that in which ids are given to those that a tokenizer lacks, as in the model's own checkpoints.
    """

    name: str
    context: str
    tokens: tuple[str, ...]
    before: str = ""
    after: str = ""
    gap: str = "\n"
    """Between an image that is a part of a message and what follows it, as the models' chat templates write it."""
    video: str = ""
    """Stands for one feature of a video, where the model sees videos."""
    stamped: bool = False
    """Each step of a video stands apart, behind its time."""

    @property
    def text(self) -> str:
        """What an `<image>` mark becomes."""
        return self.before + self.context + self.after

    def video_text(self, times: Sequence[float]) -> str:
        """What a `<video>` mark becomes, for steps at so many seconds."""
        step = self.before + self.video + self.after
        if not self.stamped:
            return step
        return self.before + "".join(f"<{time:.1f} seconds>{step}" for time in times) + self.after

    @property
    def reserved(self) -> tuple[str, ...]:
        """What nobody's words may contain; where the context token is the mark itself, marks are counted instead."""
        words = (word.strip() for word in (self.before, self.context, self.video, self.after))
        return tuple(word for word in words if word not in ("", IMAGE_MARK))
