"""WebDataset tars: the files of one conversation follow each other and share their name up to the first dot.

    000.json  {"conversations": [...]}      names images by file name or extension ("jpg", "1.png"); a record that
    000.jpg                                 names none has all images of its key, in order; so for videos and sounds,
                                            if its text has marks of them; a list alone is the turns

Nothing is unpacked: a tar is not compressed, so an image is read at its offset.
"""

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron.vlm.data.formats.rows import InputFile, PartSource, Place, Row
from omnibal_ext.errors import UserError
from omnibal_ext.families.markup import AUDIO_MARK, VIDEO_MARK

NAMED = re.compile(rb'"(?:image|images|image_url|url|path|video|videos|video_url|audios?|audio_url|sounds?)"\s*:')
"""Matches a record that names images, videos or sounds, in a field or in message parts."""
IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
SOUNDS = (".wav", ".flac", ".mp3", ".m4a", ".ogg", ".oga", ".opus", ".aif", ".aiff")


def cut(path: Path, rows_per_part: int) -> InputFile:
    """Cut a tar; the hash is of names, sizes and records. Raises UserError for a damaged tar."""
    digest, starts, end = hashlib.sha256(), [], 0
    try:
        with path.open("rb") as file:
            for _, members in _samples(file, 0, None):
                starts.append(members[0].offset)
                for member in members:
                    digest.update(f"{member.name}\0{member.offset_data}\0{member.size}\n".encode("utf-8", "replace"))
                    if member.name.endswith(".json"):
                        digest.update(_content(file, member))
                end = members[-1].offset_data + -(-members[-1].size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
            if end > path.stat().st_size:
                raise UserError(f"{path}: ends inside {members[-1].name}; copy the tar again")
    except tarfile.TarError as error:
        raise UserError(f"{path}: is no whole tar ({error}); compressed tars are to be unpacked") from error
    parts = []
    for first in range(0, len(starts), rows_per_part):
        count = min(rows_per_part, len(starts) - first)
        stop = starts[first + count] if first + count < len(starts) else end
        parts.append(PartSource(path, starts[first], stop - starts[first], first + 1, count, "tar"))
    return InputFile(path, digest.hexdigest(), len(starts), tuple(parts))


def rows(part: PartSource) -> Iterator[Row]:
    """The conversations of a part, numbered within the tar."""
    with part.file.open("rb") as file:
        samples = _samples(file, part.offset, part.offset + part.size)
        for number, (key, members) in enumerate(samples, start=part.first_line):
            yield _row(file, number, key, members)


def _samples(file: Any, start: int, end: int | None) -> Iterator[tuple[str, list[tarfile.TarInfo]]]:
    """Key and members of each conversation whose headers are in [start, end)."""
    file.seek(start)
    with tarfile.TarFile(fileobj=file) as tar:
        members = (member for member in _headers(tar, end) if member.isfile())
        for key, group in groupby(members, key=lambda member: _key(member.name)):
            yield key, list(group)
        file.seek(tar.offset)
        if end is None and file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a bad header for the end
            raise tarfile.ReadError(f"no header at byte {tar.offset}")


def _headers(tar: tarfile.TarFile, end: int | None) -> Iterator[tarfile.TarInfo]:
    while (member := tar.next()) is not None and (end is None or member.offset < end):
        tar.members = []  # type: ignore[attr-defined]  # it would keep all headers of a large tar
        yield member


def _key(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.partition('.')[0]}"


def _row(file: Any, number: int, key: str, members: list[tarfile.TarInfo]) -> Row:
    if any(member.name.startswith("/") or ".." in member.name.split("/") for member in members):
        return Row(number, {}, fault=("path_outside_root", f"{members[0].name[:200]!r} leads out of the tar"))
    records = [member for member in members if member.name.endswith(".json")]
    if len(records) != 1:
        return Row(number, {}, fault=("malformed_line", f"{len(records)} .json files of {key!r}, one is due"))
    named: dict[str, Place] = {}
    for member in members:
        if not member.name.lower().endswith((*IMAGES, *VIDEOS, *SOUNDS)):
            continue
        base = member.name.rpartition("/")[2]
        for name in (member.name, base, base.partition(".")[2]):
            named[name] = ("bytes", member.offset_data, member.size)
    text = _content(file, records[0])
    return Row(number, _with_media(text, [member.name for member in members]), records[0].offset_data, named)


def _with_media(text: bytes, names: list[str]) -> bytes | dict[str, Any]:
    """The record, with the images, videos and sounds of its key if it names none."""
    try:
        record = json.loads(text)
    except ValueError:
        return text  # refused with its own reason
    is_turns = isinstance(record, list)
    if is_turns:
        record = {"conversations": record}
    found = {"images": [name for name in names if name.lower().endswith(IMAGES)]}
    if VIDEO_MARK.encode() in text:
        found["videos"] = [name for name in names if name.lower().endswith(VIDEOS)]
    if AUDIO_MARK.encode() in text:
        found["audios"] = [name for name in names if name.lower().endswith(SOUNDS)]
    names_its_own = not isinstance(record, dict) or NAMED.search(text)
    if names_its_own or not any(found.values()):
        return record if is_turns else text
    return {**record, **found}


def _content(file: Any, member: tarfile.TarInfo) -> bytes:
    position = file.tell()
    file.seek(member.offset_data)
    content: bytes = file.read(member.size)
    file.seek(position)
    return content
