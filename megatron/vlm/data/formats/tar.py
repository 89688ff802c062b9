"""WebDataset tars: the files of one conversation follow each other and share their name up to the first dot.

    000.json  {"conversations": [...]}      names images by file name or extension ("jpg", "1.png"); a record that
    000.jpg                                 names none has all images of its key, in order; so for videos and sounds,
                                            if its text has marks of them; a list alone is the turns

Nothing is unpacked: a tar is not compressed, so an image is read at its offset.
"""

import hashlib
import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from io import BufferedReader
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any

from megatron.vlm.data.formats.kinds import IMAGES, MEDIA
from megatron.vlm.data.formats.rows import MOST_BYTES, InputFile, PartSource, Row, bulk_of, named_errors
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.place import Place
from omnibal_ext.reading.files import open_plain, size_of, version_of
from omnibal_ext.reading.tars import Member, members

FIELDS = tuple(name for kind in MEDIA for name in kind.fields)
NAMED = re.compile(f'"(?:images|url|path|source|base64|{"|".join(part for kind in MEDIA for part in kind.parts)})":')
"""Pattern of message parts that name images, videos or sounds, in JSON as Python writes it."""
ENDINGS = tuple(ending for kind in MEDIA for ending in kind.endings)
REMEDY = "copy the tar again, or make it anew; compressed ones are to be unpacked"
LINKS = (tarfile.LNKTYPE, tarfile.SYMTYPE)
MOST_MEMBERS = 2**16
"""Most files of one conversation."""


def cut(path: Path, rows_per_part: int) -> InputFile:
    """Cut a tar into parts of conversations; the hash is of names, sizes and records. Raises UserError for a damaged
    one."""
    digest, starts = hashlib.sha256(), []
    with named_errors(path, "is no whole tar", REMEDY), open_plain(path, REMEDY) as file:
        for _, sample in _samples(path, file, 0, size_of(file)):
            starts.append(sample[0].offset)
            for member in sample:
                digest.update(f"{member.name}\0{member.start}\0{member.size}\n".encode("utf-8", "replace"))
                if member.name.endswith(".json"):
                    for start in range(0, member.size, MOST_BYTES):
                        digest.update(_content(file, member, start))
        end = size_of(file)
    parts = []
    for first in range(0, len(starts), rows_per_part):
        count = min(rows_per_part, len(starts) - first)
        stop = starts[first + count] if first + count < len(starts) else end
        parts.append(PartSource(path, starts[first], stop - starts[first], first + 1, count, "tar"))
    return InputFile(path, digest.hexdigest(), len(starts), tuple(parts))


def rows(part: PartSource) -> Iterator[Row]:
    """Yield the conversations of a part, numbered within the tar."""
    with named_errors(part.file, "is no whole tar", REMEDY), open_plain(part.file, REMEDY) as file:
        samples = _samples(part.file, file, part.offset, part.offset + part.size)
        for number, (key, sample) in enumerate(samples, start=part.first_line):
            yield _row(file, number, key, sample)


def _samples(path: Path, file: BufferedReader, start: int, end: int) -> Iterator[tuple[str, list[Member]]]:
    """Yield key (name up to the first dot) and members of each conversation with headers at bytes [start, end)."""
    found = takewhile(lambda member: member.offset < end, members(file, size_of(file), start))
    content = (_linked(path, file, member) for member in found if member.is_file or _is_link(member))
    for key, group in groupby(content, key=lambda member: _key(member.name)):
        sample = list(islice(group, MOST_MEMBERS + 1))
        if len(sample) > MOST_MEMBERS:
            raise UserError(f"more than {MOST_MEMBERS} files are of one conversation, {key[:200]!r}")
        yield key, sample


def _is_link(member: Member) -> bool:
    return member.kind in LINKS and member.name.lower().endswith((".json", *ENDINGS))


def _linked(path: Path, file: BufferedReader, member: Member) -> Member:
    """Return the member, or for a hard link the file to which it leads, by the link's name."""
    if member.kind != tarfile.LNKTYPE:
        return member
    target = _targets(path, version_of(file)).get(member.offset)
    return replace(target, name=member.name, offset=member.offset) if target else member


@lru_cache(maxsize=4)
def _targets(path: Path, version: tuple[int | str, ...]) -> dict[int, Member]:
    """Map offsets of hard links to the files before them to which they lead, also through other links."""
    with open_plain(path, REMEDY) as file:
        size = size_of(file)
        links = (member for member in members(file, size) if member.kind == tarfile.LNKTYPE)
        wanted = {os.path.normpath(link.target) for link in links}
        found: dict[int, Member] = {}
        files: dict[str, Member] = {}
        for member in members(file, size):
            name, target = os.path.normpath(member.name), os.path.normpath(member.target)
            if member.kind == tarfile.LNKTYPE and target in files:
                found[member.offset] = files[target]
            if name in wanted and (member.is_file or member.offset in found):
                files[name] = found.get(member.offset, member)
    return found


def _key(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.partition('.')[0]}"


def _row(file: BufferedReader, number: int, key: str, sample: list[Member]) -> Row:
    if any(member.name.startswith("/") or ".." in member.name.split("/") for member in sample):
        return Row(number, {}, fault=("path_outside_root", f"{sample[0].name[:200]!r} leads out of the tar"))
    if dangling := next((member for member in sample if not member.is_file), None):
        what = f"{dangling.name[:200]!r} is a link to {dangling.target[:200]!r}, no file before it in the tar"
        return Row(number, {}, fault=("missing_image", what))
    records = [member for member in sample if member.name.endswith(".json")]
    if len(records) != 1:
        return Row(number, {}, fault=("malformed_line", f"{len(records)} .json files of {key[:200]!r}, one is due"))
    named: dict[str, Place] = {}
    for member in sample:
        if not member.name.lower().endswith(ENDINGS):
            continue
        base = member.name.rpartition("/")[2]
        for name in (member.name, base, base.partition(".")[2]):
            named[name] = ("bytes", member.start, member.size)
    if fault := bulk_of(text := _content(file, records[0], most=MOST_BYTES + 1)):
        return Row(number, {}, fault=fault)
    return Row(number, _with_media(text, [member.name for member in sample]), records[0].start, named)


def _with_media(text: bytes, names: list[str]) -> bytes | dict[str, Any]:
    """Return a JSON record; one that names no media gets those among `names`, the files of its conversation."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return text  # refused with its own reason
    is_turns = isinstance(record, list)
    if is_turns:
        record = {"conversations": record}
    found = {
        kind.fields[1]: [name for name in names if name.lower().endswith(kind.endings)]
        for kind in MEDIA
        if kind == IMAGES or kind.mark.encode() in text
    }
    if not isinstance(record, dict) or not any(found.values()) or _names_its_own(record):
        return record if is_turns else text
    return {**record, **found}


def _names_its_own(record: dict[str, Any]) -> bool:
    """Return whether a record names images, videos or sounds; img2dataset's `url` of an image does not count."""
    turns = [record.get("conversations"), record.get("messages")]
    return any(record.get(name) for name in FIELDS) or NAMED.search(json.dumps(turns)) is not None


def _content(file: BufferedReader, member: Member, start: int = 0, most: int = MOST_BYTES) -> bytes:
    """Read at most `most` bytes of a member, from its byte `start` on."""
    file.seek(member.start + start)
    return file.read(min(member.size - start, most))
