"""--input: find the files, cut them into parts and hash them; shards share the results in a folder of notes.

| input | rows |
|---|---|
| `.json` that begins with `[` | the elements of the list (LLaVA) |
| `.json` of datasets with `annotation` (InternVL's meta file) | those of all datasets |
| `.parquet`, `.arrow`, or a folder of them | rows of the table |
| `.tar` | files of one key (WebDataset) |
| any other file | its lines |
"""

import codecs
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from megatron.vlm.data.formats import json_list, lines, table, tar
from megatron.vlm.data.formats.rows import ROWS_PER_PART, InputFile, PartSource
from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import refuse_no_images
from omnibal_ext.files.locks import working_on
from omnibal_ext.files.records import write_text
from omnibal_ext.reading.checks import anything, integer, is_number, listing, record, shown, text
from omnibal_ext.reading.document import decode, read_json, sealed, sealed_by
from omnibal_ext.reading.files import open_plain, read_bytes, version_of
from omnibal_ext.reading.stores import StorePath

FORMATS = {"lines": lines, "json_list": json_list, "table": table, "tar": tar}
"""Modules that `cut` a file into parts and read the `rows` of one."""
TABLES = (".parquet", ".arrow")
SPLIT = re.compile(r"(train|valid(?:ation)?|val|dev|test|eval)(?=[-_.])")
"""Pattern of the split in names of files from the Hugging Face hub."""
META_FIELDS = ("annotation", "root", "repeat_time", "max_dynamic_patch", "length", "data_augment")
LARGEST_META = 2**24  # bytes
MOST_REPEATS = 1e6
MOST_TILES = 2**20
REMEDY = "name a readable file, or copy it again"
_NOTE = record(
    {"of": listing(anything), "sha256": text, "lines": integer(), "parts": listing(listing(integer(), 3, 3))}
)
_SPLITS = record({"splits": listing(text, 1)})


@dataclass(frozen=True, slots=True)
class _InputSet:
    """An input file and its settings, from a meta file or defaults."""

    path: Path
    kind: str
    root: Path
    weight: float = 1.0
    max_tiles: int | None = None


def read_inputs(
    paths: Sequence[Path],
    lines_per_part: int = ROWS_PER_PART,
    notes: Path | None = None,
    image_root: Path | None = None,
) -> tuple[InputFile, ...]:
    """Cut and hash the files of `paths`, or take the result from another shard's note in the folder `notes`.

    A note is valid for a file of the same path, size, inode and modification time. Raises UserError naming a file that
    cannot be read, is damaged, or has unsupported settings.
    """
    if notes is not None:
        notes.mkdir(parents=True, exist_ok=True)
    return tuple(_read(one, lines_per_part, notes) for path in paths for one in _files(path, image_root))


def _files(path: Path, root: Path | None) -> Iterator[_InputSet]:
    if path.is_dir():
        yield from (_InputSet(file, "table", root or path) for file in _tables(path))
        return
    kind = _kind(path)
    if kind == "meta":
        yield from _sets(path)
    else:
        yield _InputSet(path, kind, root or path.parent)


def _read(one: _InputSet, lines_per_part: int, notes: Path | None) -> InputFile:
    refuse_no_images(one.root)
    how = (lines_per_part, one.kind)
    read = _read_once(one.path, *how, notes) if notes else read_input(one.path, *how)
    parts = tuple(replace(part, root=one.root, max_tiles=one.max_tiles) for part in read.parts)
    return replace(read, parts=parts, root=one.root, weight=one.weight)


def read_input(path: Path, lines_per_part: int, kind: str = "lines") -> InputFile:
    """Cut a file of a format (`kind`) into parts and hash it. Raises `UserError` if it cannot be read."""
    found: InputFile = FORMATS[kind].cut(path, lines_per_part)
    return found


def _read_once(path: Path, lines_per_part: int, kind: str, notes: Path) -> InputFile:
    with open_plain(path, REMEDY) as file:
        key = [str(path), *version_of(file), lines_per_part, kind]
    note = notes / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    with working_on(note):  # the others wait for the first
        with suppress(UserError):  # none yet, or a damaged one: it is made anew
            return _noted(path, key, read_json(note, sealed_by(_NOTE), ""))
        read = read_input(path, lines_per_part, kind)
        parts = [[part.offset, part.size, part.lines] for part in read.parts]
        write_text(note, json.dumps(sealed({"of": key, "sha256": read.sha256, "lines": read.lines, "parts": parts})))
    return read


def _noted(path: Path, key: list[Any], note: dict[str, Any]) -> InputFile:
    """Return the input file that a note describes. Raises UserError if the note is another file's."""
    if note["of"] != key:
        raise UserError(f"the note is of {shown(note['of'])}")
    counts = [lines for _, _, lines in note["parts"]]
    parts = (
        PartSource(path, offset, size, first + 1, lines, key[-1])
        for (offset, size, lines), first in zip(note["parts"], accumulate(counts, initial=0), strict=False)
    )
    return InputFile(path, note["sha256"], note["lines"], tuple(parts))


def _tables(folder: Path) -> list[Path]:
    """List the Parquet and Arrow files in a folder, sorted. Raises UserError for none, or for several splits."""
    if (listed := folder / "dataset_dict.json").exists():
        splits = read_json(listed, _SPLITS, "name a folder of one split")["splits"]
        raise UserError(f"{folder}: has the splits {_some(splits)}; name one of their folders")
    found = sorted(file for file in folder.rglob("*") if file.suffix in TABLES and not file.name.startswith("cache-"))
    if not found:
        raise UserError(f"{folder}: no {' and no '.join(TABLES)} files here; name files of another format one by one")
    splits = sorted({match[1] for file in found if (match := SPLIT.match(file.name))})
    if len(splits) > 1:
        raise UserError(f"{folder}: has files of the splits {_some(splits)}; name those of one of them")
    return found


def _some(names: Sequence[str]) -> str:
    return ", ".join(name[:60] for name in names[:20])


def _kind(path: Path) -> str:
    if path.suffix in TABLES:
        return "table"
    if path.suffix == ".tar":
        return "tar"
    if path.suffix != ".json":
        return "lines"
    with open_plain(path, REMEDY) as file:
        if json_list.is_list(file.read(4096)):
            return "json_list"
        file.seek(0)
        content = file.read(LARGEST_META + 1)
    try:
        sets = decode(content.removeprefix(codecs.BOM_UTF8)) if len(content) <= LARGEST_META else None
    except UserError:  # several objects, a line each
        return "lines"
    entries = sets.values() if isinstance(sets, dict) else ()
    return "meta" if any(isinstance(one, dict) and "annotation" in one for one in entries) else "lines"


def _sets(path: Path) -> Iterator[_InputSet]:
    """Yield the datasets of a meta file. Relative paths are looked up next to it, then in the working directory."""
    for name, given in _given(path).items():
        where = f"{path}: set {shown(name)}"
        if not isinstance(given, dict) or not isinstance(given.get("annotation"), str):
            raise UserError(f"{where}: has no 'annotation', the file of its conversations")
        if unknown := [field for field, value in given.items() if value and field not in META_FIELDS]:
            raise UserError(f"{where}: field {shown(unknown[0])} is not known; known: {', '.join(META_FIELDS)}")
        if given.get("data_augment"):
            raise UserError(f"{where}: 'data_augment' changes images at random, which is not done; set it to false")
        weight, limit = given.get("repeat_time", 1), given.get("max_dynamic_patch")
        if not is_number(weight) or not 0 < weight <= MOST_REPEATS:
            raise UserError(
                f"{where}: repeat_time is {shown(weight)}, must be a number above 0 and at most {MOST_REPEATS:g}"
            )
        if limit is not None and (type(limit) is not int or not 1 <= limit <= MOST_TILES):
            raise UserError(f"{where}: max_dynamic_patch is {shown(limit)}, must be from 1 to {MOST_TILES}")
        names = [text(f"{where}: {field}", given.get(field) or "") for field in ("annotation", "root")]
        annotation, root = (_resolve(path, one) for one in names)
        kind = _kind(annotation)
        if kind == "meta":
            raise UserError(f"{where}: {annotation} is a meta file itself; name its sets here")
        yield _InputSet(annotation, kind, root, float(weight), limit)


def _given(path: Path) -> dict[str, Any]:
    """Return the sets of a meta file by name. Raises UserError if one is given twice, of which JSON keeps the last."""
    content = read_bytes(path, REMEDY, LARGEST_META).removeprefix(codecs.BOM_UTF8)
    try:
        sets: dict[str, Any] = json.loads(content, object_pairs_hook=_each_once)
    except UserError as error:
        raise UserError(f"{path}: {error}; choose another name for one of them") from None
    return sets


def _each_once(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(fields)
    if len(found) < len(fields):
        name = next(name for name, count in Counter(name for name, _ in fields).items() if count > 1)
        raise UserError(f"{shown(name)} is given twice")
    return found


def _resolve(path: Path, name: str) -> Path:
    relative = path.parent / name
    if isinstance(path, StorePath):  # in which names are relative
        return relative
    try:
        return relative if relative.exists() else Path(os.path.normpath(name))
    except OSError as error:
        raise UserError(f"{path}: {shown(name)}: {error.strerror}; {REMEDY}") from None
