"""Fields of inputs as datasets list them: the JSON of a sample in the column `media`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.vlm.data.media.crc import LARGEST
from megatron.vlm.data.media.images import path_below_root
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.modalities.item import Item, Rule
from omnibal_ext.modalities.place import Mark
from omnibal_ext.reading.checks import Check, integer, listing, one_of, text
from omnibal_ext.reading.checks import anything as any_value

MARK = re.compile(r"\d{1,18}-[!-~]{0,200}")
"""Pattern of the mark of an object in a store: length and ETag."""
MOST_INPUTS = 2**10
"""Most inputs of one kind in a sample."""


@dataclass(frozen=True)
class Schema:
    """How a dataset lists the inputs of a modality: checks of its JSON, and what is made of it."""

    inputs: Check[list[dict[str, Any]]]
    """Checks the JSON of a sample's inputs, in the order of their tokens."""
    made: Callable[[list[dict[str, Any]]], Sequence[Item]]
    """Makes items of what `inputs` has checked. Raises UserError naming the field at fault."""
    rule: Check[dict[str, Any]] | None = None
    """Checks a manifest's entry of the modality's name; None: images, whose fields are the manifest's own."""
    made_rule: Callable[[Mapping[str, Any]], Rule] | None = None
    """Makes the `Rule` of what `rule` has checked."""


def image_path(where: str, value: Any) -> str:
    """Return a path below the root of media. Raises UserError if it is none, or is not normalised."""
    path = text(where, value)
    try:
        if path_below_root(path) == path:
            return path
    except Rejected:
        pass
    raise UserError(f"{where} must be a path below the image root without detours, got {path[:100]!r}")


def place_check(where: str, value: Any) -> Any:
    """Return the value: [] for a file of its own, or a `Place` in the input file. Raises UserError if it is neither."""
    kind, *inside = listing(any_value, most=4)(where, value) or [None]
    if kind is not None:
        one_of("bytes", "base64", "cell")(f"{where}[0]", kind)
        rest = (text, integer(), integer(-1)) if kind == "cell" else (integer(), integer())
        for check, one in zip(rest, listing(any_value, len(rest), len(rest))(where, inside), strict=True):
            check(where, one)
    return value


def mark_check(where: str, value: Any) -> Mark:
    """Return a `Mark`. Raises UserError for what is none."""
    if isinstance(value, str) and MARK.fullmatch(value):
        return value
    return integer(0, LARGEST)(where, value)


def as_tuples(item: dict[str, Any], where: str) -> None:
    """Turn lists in `item` to tuples, in place, and check the path of a file. Raises UserError naming `where`."""
    item |= {name: tuple(value) for name, value in item.items() if isinstance(value, list)}
    if not item.setdefault("place", ()):  # else the path is a name inside the input file
        image_path(f"{where}.path", item["path"])
