"""Images and videos as datasets list them."""

from dataclasses import fields
from typing import Any

from megatron.vlm.data.media.videos import MOST_FRAMES
from megatron.vlm.data.schemas.schema import MOST_INPUTS, Schema, as_tuples, image_path, mark_check, place_check
from omnibal_ext.errors import UserError
from omnibal_ext.families.towers.video_rules import MOST_FRAMES_SEEN
from omnibal_ext.modalities.vision.tiling import FRAMES, TiledImage, VideoFrames
from omnibal_ext.reading.checks import Check, finite, flag, integer, listing, maybe, record, text

MOST_TILES = 2**20
"""Most tiles of an image, or patches at native resolution."""
TILES = integer(1, MOST_TILES)
_FILM = maybe(
    record(
        {
            "frames": listing(integer(0, MOST_FRAMES), 1, MOST_FRAMES_SEEN),
            "times": listing(finite(0), 1, MOST_FRAMES_SEEN),
            "seconds": finite(0),
            "apart": flag,
            "files": listing(image_path, most=MOST_FRAMES_SEEN),
        }
    )
)
_FIELDS = tuple(field.name for field in fields(TiledImage))
_PIXELS = integer(0, 2**31)
_CRCS = listing(mark_check, most=MOST_FRAMES_SEEN)
_INPUTS: Check[list[dict[str, Any]]] = listing(
    record(
        {"path": text, "columns": TILES, "rows": TILES, "thumbnail": flag},
        {"width": _PIXELS, "height": _PIXELS, "place": place_check, "film": _FILM, "crcs": _CRCS},
    ),
    most=MOST_INPUTS,
)


def _made(images: list[dict[str, Any]]) -> list[TiledImage]:
    for number, image in enumerate(images):
        as_tuples(image, where := f"images[{number}]")
        image["film"] = _film(f"{where}.film", image.get("film"))
        files = len(image["film"].files) if image["film"] else 0
        if (crcs := len(image.get("crcs", ()))) not in (0, files or 1):
            raise UserError(f"{where} has {crcs} CRCs of {files or 1} files")
    return [TiledImage(**{name: image[name] for name in _FIELDS if name in image}) for image in images]


def _film(where: str, film: dict[str, Any] | None) -> VideoFrames | None:
    if film is None:
        return None
    counts = (len(film["frames"]), FRAMES * len(film["times"]), len(film["files"]))
    if counts[0] not in (counts[1], counts[1] - 1) or counts[2] not in (0, counts[0]):
        raise UserError(f"{where} has {counts[0]} frames, {len(film['times'])} times, {counts[2]} files")
    if film["frames"] != sorted(set(film["frames"])):
        raise UserError(f"{where}.frames do not grow from one to the next")
    lists = {name: tuple(film[name]) for name in ("frames", "times", "files")}
    return VideoFrames(seconds=film["seconds"], apart=film["apart"], **lists)


SCHEMA = Schema(_INPUTS, _made)
