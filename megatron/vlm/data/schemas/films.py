"""Videos that have an encoder of their own as datasets list them, and which of their frames are seen."""

from collections.abc import Mapping
from typing import Any

from megatron.vlm.data.media.videos import MOST_FRAMES
from megatron.vlm.data.schemas.schema import MOST_INPUTS, Schema, as_tuples, image_path, mark_check, place_check
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.film.architecture import Film, FilmRule
from omnibal_ext.reading.checks import Check, integer, listing, record, text

MOST_SEEN = 2**10
MOST_TOKENS = 2**24
_INPUTS: Check[list[dict[str, Any]]] = listing(
    record(
        {
            "path": text,
            "frames": listing(integer(0, MOST_FRAMES), 1, MOST_SEEN),
            "tokens": integer(1, MOST_TOKENS),
            "files": listing(image_path, most=MOST_SEEN),
            "place": place_check,
            "crcs": listing(mark_check, most=MOST_SEEN),
        }
    ),
    most=MOST_INPUTS,
)


def _made(films: list[dict[str, Any]]) -> list[Film]:
    for number, film in enumerate(films):
        as_tuples(film, where := f"videos[{number}]")
        files, frames = len(film["files"]), film["frames"]
        if files not in (0, len(frames)) or list(frames) != sorted(frames):
            raise UserError(f"{where} has {files} files for frames {frames[:9]}, which must not go back")
        if len(film["crcs"]) not in (0, files or 1):
            raise UserError(f"{where} has {len(film['crcs'])} CRCs of {files or 1} files")
    return [Film(**film) for film in films]


_RULE = record(
    {
        "side": integer(1, 2**14),
        "tokens": integer(1, MOST_TOKENS),
        "frames": integer(1, MOST_SEEN),
        "tiling": text,
    }
)


def _made_rule(said: Mapping[str, Any]) -> FilmRule:
    return FilmRule(**said)


SCHEMA = Schema(_INPUTS, _made, _RULE, _made_rule)
