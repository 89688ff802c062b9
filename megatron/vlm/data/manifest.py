"""Checks of a dataset folder's manifest and of its column of media."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from megatron.vlm.data.columns import columns_of, files_of
from megatron.vlm.data.markup import MARKUPS
from megatron.vlm.data.media.crc import LARGEST
from megatron.vlm.data.media.images import NORMALIZATIONS, path_below_root
from megatron.vlm.data.media.sounds import MOST_SECONDS, RATES
from megatron.vlm.data.media.videos import MOST_FRAMES, READING
from megatron.vlm.data.templates import TEMPLATES
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.families.media import TILINGS
from omnibal_ext.families.towers.video_rules import MOST_FRAMES_SEEN
from omnibal_ext.modalities.audio.sounds import Sound
from omnibal_ext.modalities.modality import AUDIO, FURTHER, VISION
from omnibal_ext.modalities.vision.tiling import FRAMES, TiledImage, VideoFrames
from omnibal_ext.reading.checks import (
    Check,
    anything,
    finite,
    flag,
    integer,
    listing,
    mapping,
    maybe,
    one_of,
    record,
    shown,
    text,
)
from omnibal_ext.reading.document import check_seal, decode

SCHEMA_VERSION = 5
MOST_WORDS = 2**24
MOST_IMAGES = 2**10
MOST_TILES = 2**20  # patches, at native resolution
MOST_BINS = 2**10
MOST_SAMPLES = MOST_SECONDS * RATES[-1]

_ID = integer(0, MOST_WORDS)
_TOKENIZER = record(
    {"path": text, "sha256": text, "type": text, "vocabulary": record({"size": integer(0, MOST_WORDS), "sha256": text})}
)
_TILES = integer(1, MOST_TILES)
_SOURCE = record(
    {
        "file": text,
        "samples": integer(),
        "rejected": integer(),
        "weight": finite(),
        "path": text,
        "image_root": maybe(text),
    }
)


def _template(place: str, value: Any) -> str:
    """A name of `TEMPLATES`, or the file of another program."""
    name = text(place, value)
    return name if name.endswith((".jinja", ".json")) else one_of(*TEMPLATES)(place, name)


_AUDIO = record(
    {
        "rate": integer(1, RATES[-1]),
        "window": integer(1, RATES[-1]),
        "hop": integer(1, RATES[-1]),
        "longest": maybe(integer(1, MOST_SECONDS)),
        "encoder": record(
            {"mel_bins": integer(1, MOST_BINS), "chunk": integer(1), "channels": integer(), "pooled": flag}
        ),
    }
)
_MANIFEST: Check[dict[str, Any]] = record(
    {
        "samples": integer(1),
        "rejected": integer(),
        "sources": listing(_SOURCE, least=1),
        "image_root": maybe(text),
        "tokenizer": _TOKENIZER,
        "vocab_size": integer(1, MOST_WORDS),
        "special_tokens": mapping(_ID),
        "image_markup": one_of(*MARKUPS),
        "image_token_id": _ID,
        "pad_token_id": _ID,
        "eos_token_id": _ID,
        "chat_template": _template,
        "tile_size": integer(1, 2**14),
        "tokens_per_tile": finite(1 / 64, 2**16),
        "tiling": record({"rule": one_of(*TILINGS), "min_tiles": _TILES, "max_tiles": _TILES, "thumbnail": flag}),
        "normalization": one_of(*NORMALIZATIONS),
        "checksums": mapping(text),
        "made_from": record({"recipe": record({"max_tokens": anything, "system_message": anything})}),
    },
    # Older datasets have none of these.
    {"video_token_id": maybe(_ID), "video_files": integer(), "video_reading": integer(), "chat_program": text}
    | {"audio_token_id": _ID, "audio": _AUDIO},
)


def check_manifest(place: str, manifest: Any) -> dict[str, Any]:
    """The manifest, if all of it is as `merge` writes it. Raises UserError naming the field at fault."""
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        raise UserError(f"schema version {shown(version)}, this program reads {SCHEMA_VERSION}")
    check_seal(manifest)
    checked = _MANIFEST(place, manifest)
    if sum(source["samples"] for source in checked["sources"]) != checked["samples"]:
        raise UserError(f"sources have other samples than the {checked['samples']} of all")
    for one in FURTHER:
        if (one.name in checked) != (f"{one.name}_token_id" in checked):
            raise UserError(f"one of {one.name} and {one.name}_token_id is missing")
    if set(checked["checksums"]) != (files := files_of(columns_of(checked))):
        raise UserError(f"checksums must be those of {', '.join(sorted(files))}")
    for name in ("image_token_id", "video_token_id", "audio_token_id", "pad_token_id", "eos_token_id"):
        if (checked.get(name) or 0) >= checked["vocab_size"]:
            raise UserError(f"{name} {checked[name]} is behind the vocabulary of {checked['vocab_size']}")
    if not is_read_alike(checked):
        raise UserError("frames of its videos were chosen by another way of counting and turning them than is read now")
    return checked


def is_read_alike(manifest: dict[str, Any]) -> bool:
    """Whether today's code numbers frames of the dataset's video files, if any, as when it was made."""
    return not manifest.get("video_files") or manifest.get("video_reading") == READING


def _image_path(place: str, value: Any) -> str:
    path = text(place, value)
    try:
        if path_below_root(path) == path:
            return path
    except Rejected:
        pass
    raise UserError(f"{place} must be a path below the image root without detours, got {path[:100]!r}")


def _place(place: str, value: Any) -> Any:
    """[] for an image file, else a `formats.rows.Place` inside the input file."""
    kind, *where = listing(anything, most=4)(place, value) or [None]
    if kind is not None:
        one_of("bytes", "base64", "cell")(f"{place}[0]", kind)
        rest = (text, integer(), integer(-1)) if kind == "cell" else (integer(), integer())
        for check, one in zip(rest, listing(anything, len(rest), len(rest))(place, where), strict=True):
            check(place, one)
    return value


_FILM = maybe(
    record(
        {
            "frames": listing(integer(0, MOST_FRAMES), 1, MOST_FRAMES_SEEN),
            "times": listing(finite(0), 1, MOST_FRAMES_SEEN),
            "seconds": finite(0),
            "apart": flag,
            "files": listing(_image_path, most=MOST_FRAMES_SEEN),
        }
    )
)
_FIELDS = tuple(field.name for field in fields(TiledImage))
_PIXELS = integer(0, 2**31)
_CRCS = listing(integer(0, LARGEST), most=MOST_FRAMES_SEEN)
_IMAGES: Check[list[dict[str, Any]]] = listing(
    record(
        {"path": text, "columns": _TILES, "rows": _TILES, "thumbnail": flag},
        {"width": _PIXELS, "height": _PIXELS, "place": _place, "film": _FILM, "crcs": _CRCS},
    ),
    most=MOST_IMAGES,
)


def _images(images: list[dict[str, Any]]) -> list[TiledImage]:
    for number, image in enumerate(images):
        image["place"] = tuple(image.get("place", ()))
        if not image["place"]:  # else the path is a name inside the input file
            _image_path(f"images[{number}].path", image["path"])
        image["film"] = _film(f"images[{number}].film", image.get("film"))
        image["crcs"] = tuple(image.get("crcs", ()))
        files = len(image["film"].files) if image["film"] else 0
        if len(image["crcs"]) not in (0, files or 1):
            raise UserError(f"images[{number}] has {len(image['crcs'])} CRCs of {files or 1} files")
    return [TiledImage(**{name: image[name] for name in _FIELDS if name in image}) for image in images]


_SOUNDS: Check[list[dict[str, Any]]] = listing(
    record(
        {
            "path": text,
            "samples": integer(1, MOST_SAMPLES),
            "frames": integer(1, MOST_SAMPLES),
            "tokens": integer(1, MOST_SAMPLES),
            "place": _place,
            "crcs": listing(integer(0, LARGEST), most=1),
        },
        {"video": integer(-1, MOST_IMAGES), "turns": listing(integer(1, MOST_SAMPLES), most=MOST_SAMPLES)},
    ),
    most=MOST_IMAGES,
)


def _sounds(sounds: list[dict[str, Any]]) -> list[Sound]:
    for number, sound in enumerate(sounds):
        sound |= {name: tuple(sound[name]) for name in ("place", "crcs", "turns") if name in sound}
        if not sound["place"]:  # else the path is a name inside the input file
            _image_path(f"sounds[{number}].path", sound["path"])
    return [Sound(**{name: sound[name] for name in Sound.__slots__ if name in sound}) for sound in sounds]


_KINDS: dict[str, tuple[Check[list[dict[str, Any]]], Callable[[list[dict[str, Any]]], list[Any]]]] = {
    VISION.inputs: (_IMAGES, _images),
    AUDIO.inputs: (_SOUNDS, _sounds),
}


def read_media(columns: Mapping[str, bytes]) -> dict[str, list[Any]]:
    """A sample's images, sounds, ... in the order of their tokens, from its JSON in the column "media", or in `OLDER`.

    Raises UserError if it is damaged.
    """
    found = {name: decode(content) for name, content in columns.items()}
    media = mapping(anything)("media", found["media"]) if "media" in found else found
    if unknown := media.keys() - _KINDS.keys():
        raise UserError(f"media has {', '.join(map(shown, sorted(unknown)))}; known: {', '.join(_KINDS)}")
    return {name: made(check(name, media.get(name, []))) for name, (check, made) in _KINDS.items()}


def _film(place: str, film: dict[str, Any] | None) -> VideoFrames | None:
    if film is None:
        return None
    counts = (len(film["frames"]), FRAMES * len(film["times"]), len(film["files"]))
    if counts[0] not in (counts[1], counts[1] - 1) or counts[2] not in (0, counts[0]):
        raise UserError(f"{place} has {counts[0]} frames, {len(film['times'])} times, {counts[2]} files")
    if film["frames"] != sorted(set(film["frames"])):
        raise UserError(f"{place}.frames do not grow from one to the next")
    lists = {name: tuple(film[name]) for name in ("frames", "times", "files")}
    return VideoFrames(seconds=film["seconds"], apart=film["apart"], **lists)
