"""Checks of a dataset folder's manifest and of its column of media."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.vlm.data.columns import columns_of, files_of
from megatron.vlm.data.media.videos import READING
from megatron.vlm.data.schemas.images import TILES
from megatron.vlm.data.schemas.registry import SCHEMAS
from omnibal_ext.errors import UserError
from omnibal_ext.families.media import TILINGS
from omnibal_ext.families.registry import MARKUPS, TEMPLATES
from omnibal_ext.modalities.item import Item, Rule
from omnibal_ext.modalities.modality import FURTHER, Modality
from omnibal_ext.modalities.vision.normalization import NORMALIZATIONS
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

_ID = integer(0, MOST_WORDS)
_TOKENIZER = record(
    {"path": text, "sha256": text, "type": text, "vocabulary": record({"size": integer(0, MOST_WORDS), "sha256": text})}
)
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


def _template(where: str, value: Any) -> str:
    """Return the name of a template of ours, or of a template's file. Raises UserError if it is neither."""
    name = text(where, value)
    return name if name.endswith((".jinja", ".json")) else one_of(*TEMPLATES)(where, name)


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
        "tiling": record({"rule": one_of(*TILINGS), "min_tiles": TILES, "max_tiles": TILES, "thumbnail": flag}),
        "normalization": one_of(*NORMALIZATIONS),
        "checksums": mapping(text),
        "made_from": record({"recipe": record({"max_tokens": anything, "system_message": anything})}),
    },
    # Older datasets have none of these.
    {"video_token_id": maybe(_ID), "video_files": integer(), "video_reading": integer(), "chat_program": text}
    | {f"{one.name}_token_id": _ID for one in FURTHER}
    | {one.name: rule for one in FURTHER if (rule := SCHEMAS[one].rule)},
)


def check_manifest(where: str, manifest: Any) -> dict[str, Any]:
    """Return a dataset's manifest if it is as preprocessing writes it. Raises UserError naming the field at fault."""
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if type(version) is not int or version != SCHEMA_VERSION:
        raise UserError(f"schema version {shown(version)}, this program reads {SCHEMA_VERSION}")
    check_seal(manifest)
    checked = _MANIFEST(where, manifest)
    if sum(source["samples"] for source in checked["sources"]) != checked["samples"]:
        raise UserError(f"sources have other samples than the {checked['samples']} of all")
    for one in FURTHER:
        if (one.name in checked) != (f"{one.name}_token_id" in checked):
            raise UserError(f"one of {one.name} and {one.name}_token_id is missing")
    if set(checked["checksums"]) != (files := files_of(columns_of(checked))):
        raise UserError(f"checksums must be those of {', '.join(sorted(files))}")
    further = (f"{one.name}_token_id" for one in FURTHER)
    for name in ("image_token_id", "video_token_id", *further, "pad_token_id", "eos_token_id"):
        if (checked.get(name) or 0) >= checked["vocab_size"]:
            raise UserError(f"{name} {checked[name]} is behind the vocabulary of {checked['vocab_size']}")
    read_rules(checked)
    if not is_read_alike(checked):
        raise UserError("frames of its videos were chosen by another way of counting and turning them than is read now")
    return checked


def is_read_alike(manifest: dict[str, Any]) -> bool:
    """Return whether frames of a dataset's video files, if it has any, are numbered today as when it was made."""
    return not manifest.get("video_files") or manifest.get("video_reading") == READING


def read_media(columns: Mapping[str, bytes]) -> dict[Modality, Sequence[Item]]:
    """Read a sample's images, sounds, ... in the order of their tokens, from JSON by column: "media" or, in older
    datasets, "images" and "sounds". Raises UserError if it is damaged."""
    found = {name: decode(content) for name, content in columns.items()}
    media = mapping(anything)("media", found["media"]) if "media" in found else found
    if unknown := media.keys() - {one.inputs for one in SCHEMAS}:
        known = ", ".join(one.inputs for one in SCHEMAS)
        raise UserError(f"media has {', '.join(map(shown, sorted(unknown)))}; known: {known}")
    return {one: of.made(of.inputs(one.inputs, media.get(one.inputs, []))) for one, of in SCHEMAS.items()}


def read_rules(manifest: Mapping[str, Any]) -> dict[Modality, Rule]:
    """Read, by modality, how sounds and separately encoded videos became inputs. Raises UserError naming the field."""
    found = dict[Modality, Rule]()
    for one, schema in SCHEMAS.items():
        if one.name in manifest and schema.made_rule:
            try:
                found[one] = schema.made_rule(manifest[one.name])
            except TypeError as error:
                raise UserError(f"{one.name}: {error}") from error
    return found
