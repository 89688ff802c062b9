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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megatron.vlm.data.formats import json_list, lines, table, tar
from megatron.vlm.data.formats.rows import ROWS_PER_PART, InputFile, PartSource
from omnibal_ext.errors import UserError
from omnibal_ext.files.folders import refuse_no_images
from omnibal_ext.files.locks import working_on
from omnibal_ext.files.records import write_text
from omnibal_ext.reading.checks import is_number, shown

FORMATS = {"lines": lines, "json_list": json_list, "table": table, "tar": tar}
"""Modules that `cut` a file into parts and read the `rows` of one."""
TABLES = (".parquet", ".arrow")
SPLIT = re.compile(r"(train|valid(?:ation)?|val|dev|test|eval)(?=[-_.])")
"""Matches the split in names of files from the Hugging Face hub."""
META_FIELDS = ("annotation", "root", "repeat_time", "max_dynamic_patch", "length", "data_augment")
LARGEST_META = 2**24  # bytes
MOST_REPEATS = 1e6


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
    """Cut a file into parts and hash it. Raises `UserError` if it cannot be read."""
    try:
        found: InputFile = FORMATS[kind].cut(path, lines_per_part)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    return found


def _read_once(path: Path, lines_per_part: int, kind: str, notes: Path) -> InputFile:
    try:
        found = path.stat()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    key = [str(path), found.st_size, found.st_ino, found.st_mtime_ns, lines_per_part]
    note = notes / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"
    with working_on(note):  # the others wait for the first
        if note.exists():
            noted = json.loads(note.read_text(encoding="utf-8"))
            parts = (PartSource(**{**part, "file": Path(part["file"])}) for part in noted["parts"])
            return InputFile(path, noted["sha256"], noted["lines"], tuple(parts))
        read = read_input(path, lines_per_part, kind)
        write_text(note, json.dumps(asdict(read), default=str))
    return read


def _tables(folder: Path) -> list[Path]:
    """The files of a dataset saved to a folder, in order."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        raise UserError(f"{folder}: has the splits {', '.join(splits)}; name one of their folders")
    found = sorted(file for file in folder.rglob("*") if file.suffix in TABLES and not file.name.startswith("cache-"))
    if not found:
        raise UserError(f"{folder}: no {' and no '.join(TABLES)} files here; name files of another format one by one")
    splits = sorted({match[1] for file in found if (match := SPLIT.match(file.name))})
    if len(splits) > 1:
        raise UserError(f"{folder}: has files of the splits {', '.join(splits)}; name those of one of them")
    return found


def _kind(path: Path) -> str:
    if path.suffix in TABLES:
        return "table"
    if path.suffix == ".tar":
        return "tar"
    if path.suffix != ".json":
        return "lines"
    try:
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip()[:1]
            if start == b"[":
                return "json_list"
            file.seek(0)
            content = file.read(LARGEST_META + 1)
        sets = json.loads(content) if len(content) <= LARGEST_META else None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:  # several objects, a line each
        return "lines"
    entries = sets.values() if isinstance(sets, dict) else ()
    return "meta" if any(isinstance(one, dict) and "annotation" in one for one in entries) else "lines"


def _sets(path: Path) -> Iterator[_InputSet]:
    """The datasets of a meta file. Relative paths are looked up next to it, then in the working directory."""
    for name, given in json.loads(path.read_bytes()).items():
        where = f"{path}: set {name!r}"
        if not isinstance(given, dict) or not isinstance(given.get("annotation"), str):
            raise UserError(f"{where}: has no 'annotation', the file of its conversations")
        if unknown := [field for field, value in given.items() if value and field not in META_FIELDS]:
            raise UserError(f"{where}: field {unknown[0]!r} is not known; known: {', '.join(META_FIELDS)}")
        if given.get("data_augment"):
            raise UserError(f"{where}: 'data_augment' changes images at random, which is not done; set it to false")
        weight, limit = given.get("repeat_time", 1), given.get("max_dynamic_patch")
        if not is_number(weight) or not 0 < weight <= MOST_REPEATS:
            raise UserError(
                f"{where}: repeat_time is {shown(weight)}, must be a number above 0 and at most {MOST_REPEATS:g}"
            )
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise UserError(f"{where}: max_dynamic_patch is {limit!r}, must be 1 or more")
        annotation, root = _resolve(path, given["annotation"]), _resolve(path, given.get("root") or "")
        kind = _kind(annotation)
        if kind == "meta":
            raise UserError(f"{where}: {annotation} is a meta file itself; name its sets here")
        yield _InputSet(annotation, kind, root, float(weight), limit)


def _resolve(path: Path, name: str) -> Path:
    relative = path.parent / name
    return relative if relative.exists() else Path(os.path.normpath(name))
