"""One sample of a dataset folder: its text, and the images and sounds that it lists."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.columns import REMEDY
from megatron.vlm.data.dataset_folder import DatasetFolder
from megatron.vlm.data.manifest import read_media
from megatron.vlm.data.media.crc import ChangedError
from omnibal_ext.errors import UserError
from omnibal_ext.modalities.item import Item
from omnibal_ext.modalities.modality import AUDIO, VISION, Modality
from omnibal_ext.modalities.vision.features import FeatureOrder
from omnibal_ext.modalities.vision.tiling import TiledImage


class Sample:
    """One sample of a dataset. Each part is read when it is first asked for: its list of images is decoded once."""

    def __init__(self, data: DatasetFolder, number: int) -> None:
        self.data, self.number = data, number
        self.amounts = {one: int(column[number]) for one, column in data.amounts.items()}
        """Units of all inputs of each modality: tiles, mel frames."""
        self.length, self.tiles = int(data.sizes.tokens[number]), self.amounts[VISION]
        """Number of tokens of the text, those of images and sounds included; of tiles of all images."""

    def __str__(self) -> str:
        return f"{self.data.folder}: sample {self.number}"

    def _column(self, name: str) -> NDArray[Any]:
        try:
            column: NDArray[Any] = self.data.columns[name][self.number]
        except ValueError as error:  # of an index that points behind its data
            raise UserError(f"{self}: {name}.idx: {error}; {REMEDY}") from error
        return column

    @cached_property
    def text(self) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids int32 [T], one image or audio token for each feature; loss mask uint8 [T], 1 where the token itself
        is to be predicted.

        Raises UserError for an id outside of the vocabulary, and if T is not what sizes.npz says.
        """
        tokens, mask = self._column("tokens"), self._column("loss_mask")
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.data.manifest["vocab_size"]:
            raise UserError(f"{self} has token ids behind the vocabulary; {REMEDY}")
        for one in self.data.modalities if any(self.amounts.values()) else ():
            runs, ids = self.runs(one), self.data.media_tokens[one.size]
            if len(runs) != (marks := int(np.isin(tokens, ids).sum())):
                raise UserError(f"{self} has {len(runs)} {one.inputs}, {marks} marks; {REMEDY}")
            tokens, mask = expand_runs(tokens, mask, ids, runs)
        if len(tokens) != self.length:
            raise UserError(f"{self} has {len(tokens)} tokens where sizes.npz says {self.length}; {REMEDY}")
        return tokens, mask

    @cached_property
    def _media(self) -> dict[Modality, Sequence[Any]]:
        names = self.data.columns.keys() - {"tokens", "loss_mask"}
        try:
            found = read_media({name: self._column(name).tobytes() for name in names})
            for one, items in found.items():
                if (units := sum(item.units for item in items)) != (amount := self.amounts.get(one, 0)):
                    raise UserError(f"{one.inputs} have {units} {one.size}, sizes.npz says {amount}")
        except UserError as error:
            raise UserError(f"{self}: {error}; {REMEDY}") from None
        return found

    def items(self, modality: Modality) -> Sequence[Any]:
        """Return the images, or the sounds, in the order of their tokens. Raises UserError if the list is damaged or
        has other units than sizes.npz says."""
        return self._media[modality] if self.amounts.get(modality) else ()

    @property
    def images(self) -> Sequence[TiledImage]:
        """Images and videos, in the order of their tokens."""
        return self.items(VISION)

    @cached_property
    def orders(self) -> list[FeatureOrder]:
        """Orders of tokens, one for each image: which of its tiles' features each token is; -1 is a newline."""
        rule, each = self.data.rule, self.data.manifest["tokens_per_tile"]
        return [rule.order(image, each) for image in self.images]

    @cached_property
    def turns(self) -> list[tuple[int, ...]]:
        """Lengths of alternating runs of a video's and its own sound's tokens, for each image; () if there is none."""
        heard = {sound.video: sound.turns for sound in self.items(AUDIO) if sound.turns}
        return [heard.get(number, ()) for number in range(len(self.images))]

    @cached_property
    def _whole_runs(self) -> list[int]:
        """Lengths of runs of image tokens as `runs` says, but a video that is heard too is a single run."""
        counts = [self.data.rule.runs(image).count for image in self.images]
        return [len(order) // count for order, count in zip(self.orders, counts, strict=True) for _ in range(count)]

    def runs(self, modality: Modality) -> list[int]:
        """Return the length of each run of a modality's tokens: of images, of an image, of each of its rows or tiles,
        of a video's step, or of each turn of a video that is heard too."""
        if modality != VISION:
            return [run for item in self.items(modality) for run in item.runs]
        if not any(self.turns):
            return self._whole_runs
        pairs = zip(self._whole_runs, self.turns, strict=True)  # of such models each image and video is one
        return [run for whole, turns in pairs for run in turns[::2] or (whole,)]

    @property
    def image_starts(self) -> list[int]:
        """Index in `text` of the first token of each run of image tokens; of a heard video, of its first run."""
        shown = np.flatnonzero(np.isin(self.text[0], self.data.media_tokens[VISION.size]))
        runs = np.array(self._whole_runs, dtype=np.int64)
        return shown[np.cumsum(runs) - runs].tolist()

    @property
    def prefix(self) -> int:
        """Number of tokens in `text` before the first that is to be predicted; all images and sounds come before it."""
        mask = self._column("loss_mask")
        return self.length - len(mask) + int(mask.argmax())

    def file(self, item: Item) -> tuple[Path, Path]:
        """Return the root of media, and the file that an image or sound is, or lies in. Raises as `Sources.places`."""
        file, root = self.data.sources.places(self.number)
        return root, file if item.place else root / item.path

    @contextmanager
    def decoding(self, path: Path) -> Iterator[None]:
        """Make a context in which failures become a UserError that names the file and this sample."""
        try:
            yield
        except ChangedError as error:
            raise UserError(f"{error}; sample {self.number} of {self.data.folder}") from error
        except Exception as error:  # Pillow's and FFmpeg's readers raise nearly anything on a damaged file
            raise UserError(
                f"{path}: cannot be decoded ({error}); sample {self.number} of {self.data.folder}"
            ) from error


def expand_runs(
    tokens: NDArray[np.int32], loss_mask: NDArray[np.uint8], of_media: Sequence[int], repeats: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Repeat the k-th token `of_media` (ids) `repeats[k]` times: one for each of the projector's outputs.

    <img> CONTEXT </img> What is it?  ->  <img> CONTEXT CONTEXT ... CONTEXT </img> What is it?
    """
    counts = np.ones(len(tokens), dtype=np.int64)
    counts[np.isin(tokens, of_media)] = repeats
    return np.repeat(tokens, counts), np.repeat(loss_mask, counts)
