"""One damaged file of a whole one: choices, drawn at random or by atheris, say what happens to it.

JSON is changed where it means something: a field is lost, a value becomes an odd one, a list grows, a branch deepens;
an archive in one of its files; a table or tar where all else stays in its place.
Every file is also changed as a disk or a cut-off copy changes it: bits flip, blocks vanish, move, repeat or end early.
"""

import io
import json
import zipfile
from collections.abc import Callable
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, -48, 2, 7, 0.9, 1e308, float("nan"), float("inf"), 10**9, 10**12, 2**31, 2**63,
    10**400, "", "0", "vit", "../../x.safetensors", "a\nb", "\x00", "\ud800", "x" * 70_000, [], {}, [[]], [0, -5],
    ["a", 1], {"": None}, [[[[]]]], {"a": {"b": []}}, ["llm"] * 300,
)  # fmt: skip
WHOLE = (b"", b"[" * 100_000, b'{"a":' * 50_000, b"\0" * 5000, b"null", b"[]", b"{}", b"1" * 6000)


class Choices:
    """A string of bytes as a source of decisions; zeros once it is used up."""

    def __init__(self, content: bytes) -> None:
        self.content, self.position = content, 0

    def below(self, count: int) -> int:
        """A number from 0 to `count` - 1."""
        width = 1 if count <= 256 else 3
        drawn = self.content[self.position : self.position + width]
        self.position += width
        return int.from_bytes(drawn, "little") % max(1, count)

    def one(self, options: Any) -> Any:
        return options[self.below(len(options))]


def damaged(name: str, content: bytes, choices: Choices) -> bytes:
    """The file with one to four changes, mostly behind its format."""
    inside = next((change for ending, change in INSIDE.items() if name.endswith(ending)), _bytes)
    change = inside if choices.below(5) else _bytes
    for _ in range(1 + choices.below(4)):
        content = change(content, choices)
    return content


def _bytes(content: bytes, choices: Choices) -> bytes:
    return choices.one(CHANGES)(content, choices.below(len(content) + 1), 1 + choices.below(64), choices)


def _flip(content: bytes, at: int, size: int, choices: Choices) -> bytes:
    flipped = bytearray(content)
    if flipped:
        flipped[at % len(flipped)] ^= 1 << choices.below(8)
    return bytes(flipped)


def _move(content: bytes, at: int, size: int, choices: Choices) -> bytes:
    start = choices.below(len(content) + 1)
    return content[:at] + content[start : start + size] + content[at + size :]


def _insert(content: bytes, at: int, size: int, choices: Choices) -> bytes:
    return content[:at] + bytes(choices.below(256) for _ in range(size)) + content[at:]


CHANGES: tuple[Callable[[bytes, int, int, Choices], bytes], ...] = (
    _flip, _move, _insert, lambda content, at, size, _: content[:at],
    lambda content, at, size, _: content[:at] + content[at + size :],
    lambda content, at, size, _: content[:at] + content[at : at + size] * 2 + content[at + size :],
    lambda content, at, size, _: content[:at] + b"\xff" * size + content[at + size :],
    lambda content, at, size, _: content + content[-size:],
    lambda content, at, size, choices: choices.one(WHOLE),
)  # fmt: skip


def _json(content: bytes, choices: Choices) -> bytes:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return _lines(content, choices) if content.count(b"\n") > 1 else _bytes(content, choices)
    return json.dumps(_changed(value, choices)).encode()


def _lines(content: bytes, choices: Choices) -> bytes:
    lines = content.split(b"\n")
    at = choices.below(len(lines))
    lines[at] = _json(lines[at], choices) if b"\n" not in lines[at] else lines[at]
    return b"\n".join(lines)


def _changed(value: Any, choices: Choices) -> Any:
    if isinstance(value, dict) and value and choices.below(8):
        name, how = choices.one(list(value)), choices.below(8)
        if how == 0:
            return {key: one for key, one in value.items() if key != name}
        if how == 1:
            return {(f"{key}\n" if key == name else key): one for key, one in value.items()}
        return {**value, name: _changed(value[name], choices)}
    if isinstance(value, list) and value and choices.below(8):
        at, how = choices.below(len(value)), choices.below(8)
        middle = value[at : at + 1] * (how * 2) if how < 2 else [_changed(value[at], choices)]
        return [*value[:at], *middle, *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and choices.below(2):
        return value + choices.one((1, -1, 2, -value, 10**6))
    return choices.one(ODD)


def _zip(content: bytes, choices: Choices) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            files = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, ValueError, RuntimeError, OSError, EOFError, NotImplementedError):
        return _bytes(content, choices)
    name = choices.one(sorted(files))
    files[name] = _bytes(files[name], choices)
    changed = io.BytesIO()
    with zipfile.ZipFile(changed, "w") as archive:
        for each, bytes_ in files.items():
            archive.writestr(each, bytes_)
    return changed.getvalue()


def _behind_header(content: bytes, choices: Choices) -> bytes:
    return content[:HEADER] + _bytes(content[HEADER:], choices)


def _in_place(content: bytes, choices: Choices) -> bytes:
    """Change some bytes and move none. Choices that are used up change the middle, not how the file begins."""
    at = (len(content) // 2 + choices.below(len(content) + 1)) % (len(content) + 1)
    size, how = 1 + choices.below(64), choices.below(3)
    if how == 0:
        return _flip(content, at, size, choices)
    start = choices.below(len(content) + 1)
    block = content[start : start + size] if how == 1 else b"\xff" * size
    return content[:at] + block[: len(content) - at] + content[at + len(block) :]


HEADER = 48
"""Bytes by which an image is known: what it is, and how large."""
PICTURES = (".png", ".jpeg", ".webp", ".gif", ".tiff", ".bmp", ".jpeg2000", ".ppm")
INSIDE: dict[str, Callable[[bytes, Choices], bytes]] = {
    **{".json": _json, ".jsonl": _json, ".npz": _zip}, **dict.fromkeys(PICTURES, _behind_header),
    **dict.fromkeys((".parquet", ".arrow", ".tar"), _in_place),
}  # fmt: skip
"""By a name's ending: what changes the content behind the format."""
