"""Text around an image's tokens in a model's prompt; each family has its own.

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

from omnibal_ext.modalities.modality import AUDIO, FURTHER, VISION, Modality
from omnibal_ext.modalities.vision.runs import TokenRuns

IMAGE_MARK, VIDEO_MARK = VISION.mark, "<video>"  # in the user's data
KINDS = {mark: mark.strip("<>") for mark in (IMAGE_MARK, VIDEO_MARK, *(one.mark for one in FURTHER))}
"""Mark -> type of a part of a message."""
QUOTED = "\U0010fff0"
"""Stands for the "<" of a mark that is nothing but words; it is one again where a conversation is written."""


def media_first(parts: Sequence[str]) -> tuple[str, ...]:
    """Return the parts of a message, texts and marks (`<image>`, ...), with the marks in front."""
    return tuple(sorted(parts, key=lambda part: part not in KINDS))


def joined(parts: Sequence[str], gap: str) -> str:
    """Return the parts of a message, texts and marks (`<image>`, ...), as one text, `gap` behind each mark."""
    return "".join(part + gap * (part in KINDS) for part in parts)


@dataclass(frozen=True, slots=True)
class Steps:
    """How a video is written whose temporal steps are separate runs of tokens, each with its time as text."""

    before: str
    after: str
    stamp: Callable[[float], str]
    """Function from a step's seconds to the text before it."""
    behind: bool = False
    """Whether the time is after its step."""

    def text(self, step: str, times: Sequence[float]) -> str:
        """Return the text of a video whose steps are at `times` (seconds); `step`: a step's own text."""
        stamped = (step + self.stamp(time) if self.behind else self.stamp(time) + step for time in times)
        return self.before + "".join(stamped) + self.after


@dataclass(frozen=True, slots=True)
class HeardTurns:
    """How often runs of a video's tokens and of its own sound's take turns."""

    turns: int
    """Number of all runs."""

    @property
    def count(self) -> int:
        """Number of the video's runs; the first of all runs is one."""
        return (self.turns + 1) // 2


@dataclass(frozen=True, slots=True)
class FurtherMarkup:
    """Text that a model expects around one input beyond images, such as a sound."""

    modality: Modality
    token: str
    """Token of one of its features."""
    before: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        """Text that replaces its mark, with one token."""
        return self.before + self.token + self.after


@dataclass(frozen=True, slots=True)
class ImageMarkup:
    """Text around images: `context` stands for one feature; `tokens` are the model's special tokens for images.

    Tokens that a tokenizer lacks get ids in this order, as in the model's own checkpoints.
    """

    name: str
    context: str
    tokens: tuple[str, ...]
    before: str = ""
    after: str = ""
    gap: str = "\n"
    """Text after an image that is a part of a message, as the models' chat templates write it."""
    first: bool = False
    """Whether a message's images stand before its words, as the models' chat templates write them."""
    video: str = ""
    """Token of one video feature; "": the model does not see videos."""
    steps: "Steps | None" = None
    """Video steps as separate runs; None: one run for the entire video."""
    between: str = ""
    """Text between the runs of an image that has several (a row of features each)."""
    further: tuple[FurtherMarkup, ...] = ()
    """Text of what the model takes beyond images and videos."""

    def image_text(self, runs: TokenRuns) -> str:
        """Return the text that replaces an `<image>` mark; its token is there once a run, and repeated later."""
        return self.before + self.between.join([self.context] * runs.count) + self.after

    def video_text(self, times: Sequence[float]) -> str:
        """Return the text that replaces a `<video>` mark; `times`: seconds of its temporal steps."""
        step = self.before + self.video + self.after
        return self.steps.text(step, times) if self.steps else step

    def heard_video_text(self, turns: HeardTurns) -> str:
        """Return the text that replaces the mark of a video that is heard too: tokens of both, by turns."""
        sound = self.of(AUDIO)
        said = "".join(sound.token if turn % 2 else self.video for turn in range(turns.turns))
        return self.before + sound.before + said + sound.after + self.after

    def of(self, modality: Modality) -> FurtherMarkup:
        """Return the markup of inputs of a modality beyond images, which the model must take."""
        return next(one for one in self.further if one.modality == modality)

    @property
    def tokens_of_further(self) -> dict[Modality, str]:
        """Token that stands for a feature, by modality beyond images."""
        return {one.modality: one.token for one in self.further}

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks in users' text that the model takes: of images, and of modalities beyond images and videos."""
        return (IMAGE_MARK, *(one.modality.mark for one in self.further))

    @property
    def any_mark(self) -> re.Pattern[str]:
        """Pattern that finds one of `marks`, or a video's."""
        return re.compile("|".join((*self.marks, VIDEO_MARK)))

    @property
    def reserved(self) -> tuple[str, ...]:
        """Texts of the model's own that no message may contain; marks, which are counted, are not among them."""
        around = (self.steps.before, self.steps.after) if self.steps else ()
        heard = (text for one in self.further for text in (one.token, one.before, one.after))
        written = (self.before, self.context, self.video, self.between, self.after, *around, *heard)
        words = dict.fromkeys(word.strip() for word in written)
        return tuple(word for word in words if word not in ("", *self.marks))
