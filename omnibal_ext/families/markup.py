"""How a model's text shows an image: the words around the place that its features take; each family has its own.

    InternVL   <img><IMG_CONTEXT><IMG_CONTEXT>...</img>
    Mistral 3  [IMG][IMG]...[IMG_BREAK][IMG][IMG]...[IMG_END], a row of features each
    Qwen3-VL   <|vision_start|><0.3 seconds><|vision_start|><|video_pad|>...<|vision_end|><1.3 seconds>...<|vision_end|>

The context token is written once, or once a row or tile, and repeated later, when the tiles are counted. Markup belongs
to the model, not to the chat template: a token that the model never had is an id behind its vocabulary. The texts are
those of transformers' processors, to which the tests compare them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"  # in the user's data
MARKS = re.compile(f"{IMAGE_MARK}|{VIDEO_MARK}")


@dataclass(frozen=True, slots=True)
class Steps:
    """How the steps of a video stand apart in the words, each with its time."""

    before: str
    after: str
    stamp: Callable[[float], str]
    """Of so many seconds."""
    behind: bool = False
    """The time stands behind its step."""

    def text(self, step: str, times: Sequence[float]) -> str:
        """All of a video, `step` being what each becomes."""
        stamped = (step + self.stamp(time) if self.behind else self.stamp(time) + step for time in times)
        return self.before + "".join(stamped) + self.after


@dataclass(frozen=True, slots=True)
class Places:
    """Where the features of an image, or of a video, stand in the words: as many at each place."""

    rows: int = 1
    columns: int = 1
    whole: bool = False
    """The whole image has one more, behind those of its tiles."""

    @property
    def count(self) -> int:
        """Of all of them."""
        return self.rows * self.columns + self.whole


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
    steps: "Steps | None" = None
    """How each step of a video stands apart; None: they stand together."""
    between: str = ""
    """Between the places of an image whose features stand at several in the words, row by row."""

    def image_text(self, places: Places) -> str:
        """What an `<image>` mark becomes, of an image at these places."""
        return self.before + self.between.join([self.context] * places.count) + self.after

    def video_text(self, times: Sequence[float]) -> str:
        """What a `<video>` mark becomes, for steps at so many seconds."""
        step = self.before + self.video + self.after
        return self.steps.text(step, times) if self.steps else step

    @property
    def reserved(self) -> tuple[str, ...]:
        """What nobody's words may contain; where the context token is the mark itself, marks are counted instead."""
        around = (self.steps.before, self.steps.after) if self.steps else ()
        written = (self.before, self.context, self.video, self.between, self.after, *around)
        words = dict.fromkeys(word.strip() for word in written)
        return tuple(word for word in words if word not in ("", IMAGE_MARK))
