"""Paths of the files that a dataset refers to: as its manifest says or, if they were moved since, moved.json."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.vlm.data.formats.rows import InputFile
from omnibal_ext.errors import UserError
from omnibal_ext.files.records import write_record
from omnibal_ext.reading.checks import listing, maybe, record, text
from omnibal_ext.reading.document import read_json, sealed, sealed_by

FILE = "moved.json"
REMEDY = "remove it, and name the files again to omnibal preprocess"
_WHERE = record({"sources": listing(record({"path": text, "image_root": maybe(text)}))})

Where = Mapping[str, str | None]
"""`path` of an input file, `image_root` of the images and sounds that it names; both absolute."""


def where_is(file: InputFile) -> Where:
    """Return the absolute paths of an input file and of the root of its images."""
    return {"path": str(file.path.resolve()), "image_root": str(file.root.resolve()) if file.root else None}


def sources_now(folder: Path, sources: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a manifest's sources with the paths of moved.json, if there is one. Raises UserError if that is
    damaged."""
    path = folder / FILE
    if not path.exists():
        return [dict(source) for source in sources]
    moved = read_json(path, sealed_by(_WHERE), REMEDY)["sources"]
    if len(moved) != len(sources):
        raise UserError(f"{path}: says where {len(moved)} files are, the dataset is of {len(sources)}; {REMEDY}")
    return [{**source, **where} for source, where in zip(sources, moved, strict=True)]


def note_moved(folder: Path, files: Sequence[Where]) -> None:
    """Write moved.json: where a dataset's input files lie now, in the order of its sources."""
    write_record(folder / FILE, sealed({"sources": list(files)}))
