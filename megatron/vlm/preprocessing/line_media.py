"""The media that one line names: found, measured and checked, each once however often it is named."""

import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from megatron.vlm.data.formats.places import embedded
from megatron.vlm.data.formats.rows import PartSource, Row
from megatron.vlm.data.media.crc import crc_of
from megatron.vlm.data.media.images import glance, image_size, path_below_root
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.errors import Rejected, UserError
from omnibal_ext.modalities.place import Mark, Place
from omnibal_ext.reading.stores import SCHEME

Value = TypeVar("Value")


class LineMedia:
    """Finds and measures media that a row names; `source`, its part, may set an image root. All raise `Rejected`."""

    def __init__(self, recipe: Recipe, row: Row, source: PartSource | None, heard: bool = False) -> None:
        """Measure by a recipe; `heard`: whether the sound of the row's videos is read too."""
        self.recipe, self.row, self.source, self.heard = recipe, row, source, heard
        self.root = (source and source.root) or recipe.image_root or Path()
        """Folder from which relative paths start."""
        self._known: dict[Any, Any] = {}
        self._sizes: dict[tuple[Path, Place], tuple[int, int]] = {}
        self._not_decoded: list[tuple[Path, Place]] = []

    def decode_the_rest(self) -> bool:
        """Decode the images that were not yet; return whether one is turned otherwise than its header said."""
        is_turned = False
        for file, place in self._not_decoded:
            size = image_size(file, self.recipe.max_pixels, self.recipe.decode_images, place)
            is_turned |= size != self._sizes[file, place]
            self._sizes[file, place] = size
        self._not_decoded.clear()
        return is_turned

    def found(self, reference: str, what: str) -> tuple[str, Path, Place]:
        """Return (path below the root, file, place in it) of the image, video or sound that a record names."""
        path, place = locate(reference, self.row, self.root, what)
        if place:
            return path, self.source.file if self.source else self.root / path, place
        path = self.once(written_as, self.root, path, what, reference.startswith("file://"))
        return path, self.root / path, place

    def once(self, work: Callable[..., Value], *words: Any) -> Value:
        """Return `work(*words)`, computed once for this row and kept."""
        key = (work, words)
        if key not in self._known:
            self._known[key] = work(*words)
        value: Value = self._known[key]
        return value

    def size(self, file: Path, place: Place = ()) -> tuple[int, int]:
        """Return width and height of an image in pixels."""
        if (file, place) not in self._sizes:
            size, is_whole = glance(file, self.recipe.max_pixels, self.recipe.decode_images, place)
            self._sizes[file, place] = size
            if not is_whole:
                self._not_decoded.append((file, place))
        return self._sizes[file, place]

    def crcs(self, files: Sequence[Path], place: Place, what: str) -> tuple[Mark, ...]:
        """Return the `Mark` of each file; () if they are not recorded."""
        if not self.recipe.image_checksums:
            return ()
        try:
            return tuple(self.once(crc_of, file, place) for file in files)
        except (OSError, UserError, ValueError) as error:  # changed since it was measured
            raise Rejected(f"unreadable_{what}", str(error)[:200]) from error


def written_as(root: Path, path: str, what: str, is_url: bool) -> str:
    """Return `path` as the file below `root` is called: with letters composed or decomposed (NFC, NFD), or with %20 and
    the like decoded. If there is no such file, it is returned as it is.

    Raises `Rejected` (missing_image; `what` in place of image) if only the decoded path exists, and it is no URL.
    """
    if (path.isascii() and "%" not in path) or _is_there(root / path):
        return path
    forms = [unicodedata.normalize(form, path) for form in ("NFC", "NFD")]
    if decoded := "%" in path:
        forms.append(path_below_root(unquote(path)))
    found = next((other for other in forms if _is_there(root / other)), path)
    if decoded and found == forms[-1] != path and not is_url:
        raise Rejected(f"missing_{what}", f"{path}: no such file; {found!r} is there: write it so, or as file://...")
    return found


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long, a folder of others: opening it says so
        return False


def locate(reference: str, row: Row, root: Path, what: str = "image") -> tuple[str, Place]:
    """Return (path below the root, ()) of an image or video file, or (name, place) of one inside the input file.

    Raises `Rejected`: remote_image, unreadable_image (`what` in place of image), path_outside_root.
    """
    if reference in row.images:
        return reference, row.images[reference]
    if reference.startswith("data:"):
        place = embedded(reference, row)
        if place is None:
            raise Rejected(
                f"unreadable_{what}", f"{reference[:40]!r}... is no base64 that stands in the file unescaped"
            )
        return "", place
    if not reference.startswith("file://") and SCHEME.match(reference):
        raise Rejected(
            f"remote_{what}",
            f"{reference[:200]!r}: nothing is fetched from where a record says; name the file from --image-root on",
        )
    path = reference.removeprefix("file://")
    for folder in (root.absolute(), root.resolve()) if path.startswith("/") else ():
        path = path.removeprefix(f"{str(folder).rstrip('/')}/")
    return path_below_root(path), ()
