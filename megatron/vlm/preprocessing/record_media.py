"""Images, videos and sounds of a record: the fields that name them, and the marks for them in the text.

    {"image": "a.png"}, {"images": ["a.png", "b.png"]}      images
    {"video": "a.mp4"}                                      a video file
    {"video": ["1.jpg", "2.jpg", ...], "fps": 2}            its frames, and how many a second, or "times": [0, 0.5, ...]
    {"videos": ["a.mp4", {"video": ["1.jpg", ...], "fps": 2}]}     several

    {"audio": "a.wav"}, {"audios": ["a.wav", "b.wav"]}      sounds, also "sound" and "sounds"

    {"video": "a.mp4", "use_audio_in_video": true}          the sound of this record's videos is heard, or it is not

The same as parts of messages: {"type": "image", "image": "a.png"}, {"type": "video", "video": ..., "fps": 2},
{"type": "audio", "audio": "a.wav"}, {"type": "input_audio", "input_audio": {"data": "UklGR...", "format": "wav"}}.
Where a path may stand, an object with it may: {"path": "a.png"}, {"url": ...}, {"base64": ...}, Anthropic's `source`.
Each field of a part or an object is obeyed, says what changes nothing (`ABOUT`), or is refused by its name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megatron.vlm.data.formats.kinds import IMAGES, MEDIA, SOUNDS, VIDEOS, Kind
from megatron.vlm.preprocessing.line_fields import plain, quoted
from omnibal_ext.errors import Rejected
from omnibal_ext.reading.checks import is_number, is_unicode

Turn = Mapping[str, Any]
HEARS_VIDEOS = "use_audio_in_video"
NAMING = (
    *(part for kind in MEDIA if not kind.of_frames for part in kind.parts), "source", "url", "path", "base64", "data",
)  # fmt: skip
"""Fields of an object that name an image or a sound: by a path, an object, or content in base64."""
CONTENT = ("base64", "data")
MOST_WITHIN = 3
"""Objects within each other: a part, its `image`, a row of `datasets`."""
ABOUT = frozenset({"type", "id", "index", "width", "height", "format", "media_type", "mime_type", "cache_control"})
"""Fields of a part that change nothing."""
OF_AN_OBJECT = ABOUT.union(NAMING)
DETAILS = ("auto", "high")
"""OpenAI's `detail` of an image that is seen as well as the model can."""
NAMING_A_VIDEO = ("video", "video_url", "frames", "url", "path")
OF_A_VIDEO = ABOUT.union(NAMING_A_VIDEO, ("fps", "times"))
MOST_A_SECOND = 1e4
LONGEST = 1e6  # seconds


@dataclass(frozen=True, slots=True)
class VideoReference:
    """A video in a record: a video file, or frame files with their times."""

    files: tuple[str, ...]
    times: tuple[float, ...] = ()
    """Seconds of each frame file; () for a video file."""
    rate: float = 0.0
    """Mean frames a second; 0 for a video file."""


@dataclass(frozen=True, slots=True)
class Senses:
    """What a model takes besides text."""

    kinds: tuple[Kind, ...]

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks of images, videos and sounds that a text for the model may have."""
        return tuple(kind.mark for kind in self.kinds)

    def kinds_in(self, text: str) -> list[Kind]:
        """List the kind of each mark in a text."""
        marks = re.findall("|".join(self.marks), text) if "<" in text else []
        return [kind for mark in marks for kind in self.kinds if kind.mark == mark]

    @property
    def hears_videos(self) -> bool:
        """Whether a record may say that the sound of its videos is heard."""
        return VIDEOS in self.kinds and SOUNDS in self.kinds

    @property
    def fields(self) -> frozenset[str]:
        """Fields of a record that name media which the model takes."""
        named = (field for kind in self.kinds for field in kind.fields)
        return frozenset({*named, *([HEARS_VIDEOS] if self.hears_videos else [])})


def media_of(kind: Kind, record: Mapping[str, Any], turns: Sequence[Turn]) -> tuple[Any, ...]:
    """Return a record's media of a kind, in the order of their marks: paths, or `VideoReference`.

    Raises `Rejected`: malformed_line, unsupported_field.
    """
    return (_videos if kind.of_frames else _named_by_paths)(kind, record, turns)


def words_of(part: Any, number: int, senses: Senses) -> str:
    """Return the text of a part of turn `number`, marks in it quoted as words; of an image, video or sound its mark.

    Raises `Rejected`: unsupported_media, unsupported_field, malformed_line.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        _refuse_others(part, ABOUT | {"text", "annotations"}, f"the text of turn {number}")
        return quoted(plain(part["text"], f"turn {number}"))
    mark = next((one.mark for one in senses.kinds if kind in one.parts), None)
    if mark is not None:
        return mark
    if isinstance(kind, str) and kind != "text":
        *some, last = ["text", *(one.plural for one in senses.kinds)]
        known = f"{', '.join(some)} and {last}"
        raise Rejected("unsupported_media", f"turn {number} has a part of type {kind[:40]!r}; {known} are known")
    raise Rejected("malformed_line", f"turn {number} has a part that is no object with a type and its content")


def hears_videos(record: Mapping[str, Any]) -> bool | None:
    """Return whether a record's videos are to be heard; None if it does not say. Raises `Rejected` (malformed_line)."""
    said = record.get(HEARS_VIDEOS)
    if said is not None and not isinstance(said, bool):
        raise Rejected("malformed_line", f"{HEARS_VIDEOS!r} is {str(said)[:40]!r}, must be true or false")
    return said


def _named_by_paths(kind: Kind, record: Mapping[str, Any], turns: Sequence[Turn]) -> tuple[str, ...]:
    references = [_reference(part, kind.noun) for part in _parts(turns, kind.parts)]
    return _paths(*_given(record, kind.fields, references, kind.plural), kind.noun)


def _reference(said: Any, what: str) -> Any:
    """Return the path of an image or a sound, or its content as a `data:` URL, from a text, an object or a part; None:
    a part that names nothing. Raises `Rejected` for what else an object says."""
    name = ""
    for _ in range(MOST_WITHIN):
        if not isinstance(said, Mapping):
            break
        others = {name: value for name, value in said.items() if not (name == "detail" and value in DETAILS)}
        _refuse_others(others, OF_AN_OBJECT, what)
        name, said = _named(said, NAMING, what)
    if name in CONTENT and isinstance(said, str) and not said.startswith("data:"):
        return f"data:;base64,{said}"
    return said


def _named(said: Mapping[str, Any], names: Sequence[str], what: str) -> tuple[str, Any]:
    """Return (field, value) of the one of `names` that is given; ("", None): none. Raises `Rejected` for several."""
    given = {name: said[name] for name in names if said.get(name)}
    if len(given) > 1:
        raise Rejected("malformed_line", f"both {' and '.join(map(repr, given))} name {what}; leave one")
    return next(iter(given.items()), ("", None))


def _refuse_others(said: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    for name, value in said.items():
        if name not in known and value not in (None, "", [], {}):
            raise Rejected(
                "unsupported_field", f"{name[:40]!r} of {what} is not read: sizes and frames are the model's own rule's"
            )


def _paths(name: str, value: Any, what: str) -> tuple[str, ...]:
    paths = [_reference(one, what) for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(path, str) and path and is_unicode(path) for path in paths):
        raise Rejected("malformed_line", f"{name!r} is neither a path nor a list of paths")
    return tuple(paths)


def _videos(kind: Kind, record: Mapping[str, Any], turns: Sequence[Turn]) -> tuple[VideoReference, ...]:
    parts = [
        part if any(value for name, value in part.items() if name != "type") else None
        for part in _parts(turns, kind.parts)
    ]
    name, value = _given(record, kind.fields, parts, kind.plural)
    if name == "video":  # fps or times of a list of frames; next to a file they are metadata
        timing = {key: record[key] for key in ("fps", "times") if not isinstance(value, str) and key in record}
        return (_video(value if isinstance(value, dict) else {"video": value, **timing}),)
    if not isinstance(value, list):
        raise Rejected("malformed_line", f"{name!r} is no list of videos; one video is 'video'")
    return tuple(_video(one if isinstance(one, dict) else {"video": one}) for one in value)


def _parts(turns: Sequence[Turn], kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    for turn in turns:
        for part in turn["value"] if isinstance(turn["value"], list) else ():
            if isinstance(part, dict) and part.get("type") in kinds:
                yield part


def _given(record: Mapping[str, Any], names: Sequence[str], parts: Sequence[Any], what: str) -> tuple[str, Any]:
    """Return (name, value) of the one field of `names` that a record has, or (description, media) of message `parts`,
    of which None is one without. Raises `Rejected` if there are both."""
    given = {name: record[name] for name in names if record.get(name) not in (None, "", [])}
    named = [part for part in parts if part is not None]
    if len(given) > 1:
        raise Rejected("malformed_line", f"both {' and '.join(map(repr, given))} are given; leave one")
    if named and (given or len(named) < len(parts)):
        raise Rejected("malformed_line", f"{what} are named by parts of messages and elsewhere, or by some parts only")
    return next(iter(given.items()), (f"parts with {what}", named))


def _video(said: Mapping[str, Any]) -> VideoReference:
    """Read the video of a message part or of an entry in `videos`."""
    _refuse_others(said, OF_A_VIDEO, "a video")
    _, named = _named(said, NAMING_A_VIDEO, "a video")
    timed = [name for name in ("fps", "times") if said.get(name) is not None]
    files = tuple(_reference(one, "a video") for one in (named if isinstance(named, list) else [named]))
    if not files or not all(isinstance(path, str) and path and is_unicode(path) for path in files):
        raise Rejected("malformed_line", "a video is neither a path nor a list of its frames' paths")
    if not isinstance(named, list):
        if timed:
            raise Rejected("unsupported_field", f"{timed[0]!r} of a video file is in the file; take it out")
        return VideoReference(files)
    if len(timed) != 1:
        raise Rejected(
            "malformed_line", "a list is the frames of one video: say 'fps' or 'times'; several are 'videos'"
        )
    if timed == ["fps"]:
        return _at_a_rate(files, said["fps"])
    return _at_times(files, said["times"])


def _at_a_rate(files: tuple[str, ...], rate: Any) -> VideoReference:
    if not is_number(rate) or not 0 < rate <= MOST_A_SECOND:
        raise Rejected("malformed_line", f"'fps' of frames is {str(rate)[:40]!r}, must be above 0")
    return VideoReference(files, tuple(frame / rate for frame in range(len(files))), float(rate))


def _at_times(files: tuple[str, ...], times: Any) -> VideoReference:
    if not isinstance(times, list) or len(times) != len(files) or not all(map(is_number, times)):
        raise Rejected("malformed_line", f"'times' of {len(files)} frames are no list of as many seconds")
    if not all(0 <= before < after <= LONGEST for before, after in pairwise(times)):
        raise Rejected("malformed_line", f"'times' of frames do not grow from one to the next, up to {LONGEST:g}")
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 1.0
    return VideoReference(files, tuple(map(float, times)), rate)


SIGHT = Senses((IMAGES,))
