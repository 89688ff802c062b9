"""The dataset folder: what preprocessing writes and training reads. It refers to images and does not contain them.

tokens.bin/.idx     int32   token ids of every sample, one image token for each run of        (core's IndexedDataset)
                            image tokens; `ChatDataset.text` repeats it
loss_mask.bin/.idx  uint8   1 where the token itself is to be predicted
images.bin/.idx     uint8   JSON list of {"path", "columns", "rows", "thumbnail"}; "place", its location inside the
                            input file; "film", a video's sampled frames; "crcs", CRC-32 of its file or frames' files
sizes.npz                   of every sample: tiles, tokens (all image tokens counted), supervised tokens, and its line
                            number in the input file
manifest.json               tokenizer, special tokens, template, markup, tiling, counts, samples of each file, checksums
rejected.jsonl              {"file", "line", "reason", "detail"} of every rejected line
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from numpy.typing import NDArray
from torch.utils.data import Dataset

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.manifest import check_manifest, read_images
from megatron.vlm.data.media.crc import ChangedError
from megatron.vlm.data.media.features import FeatureOrder
from megatron.vlm.data.media.images import NORMALIZATIONS, Normalization, load_rgb
from megatron.vlm.data.media.tiling import TiledImage, TilingRule
from megatron.vlm.data.media.videos import cut_frames, join_tiles, read_frames, require_decoder
from megatron.vlm.data.pixels import normalise
from megatron.vlm.data.sources import Sources
from megatron.vlm.families.media import TILINGS
from omnibal_ext.errors import UserError
from omnibal_ext.files.checksums import verify_checksums
from omnibal_ext.files.folders import refuse_without_manifest
from omnibal_ext.reading.columns import column_lengths
from omnibal_ext.reading.document import read_json
from omnibal_ext.sizes import Sizes

REMEDY = "preprocess again with tools/preprocess_data.py"
COLUMNS = {"tokens": np.int32, "loss_mask": np.uint8, "images": np.uint8}


class ChatDataset(Dataset):
    """A memory-mapped dataset folder; map-style, for any DataLoader.

    Raises `UserError` if the folder is incomplete, of another version, or its index files are damaged.
    """

    def __init__(self, folder: str | Path, checks_images: bool = True) -> None:
        """`checks_images`: an image whose CRC-32 is not the recorded one counts as unreadable."""
        self.folder, self.checks_images = Path(folder), checks_images
        refuse_without_manifest(self.folder, "a dataset", "tools/preprocess_data.py")
        self.manifest = read_json(self.folder / "manifest.json", check_manifest, REMEDY)
        self._verify(lambda name: not name.endswith((".bin", ".jsonl")))
        self.sizes = Sizes.load(self.folder / "sizes.npz")
        if self.manifest.get("video_files"):
            require_decoder(str(self.folder))
        self._sources = Sources(self.manifest)
        held: dict[str, NDArray[Any]] = {"sizes.npz": self.sizes.tokens, **self._lengths()}
        for name, lengths in held.items():
            if len(lengths) != len(self):
                count = f"{name} holds {len(lengths)} samples"
                raise UserError(f"{self.folder}: {count}, the manifest says {len(self)}; {REMEDY}")
        if not np.array_equal(held["tokens"], held["loss_mask"]):
            raise UserError(f"{self.folder}: tokens and loss_mask have other lengths; {REMEDY}")
        self._columns = {name: IndexedDataset(str(self.folder / name)) for name in COLUMNS}

    def _lengths(self) -> dict[str, NDArray[np.int32]]:
        return {name: column_lengths(self.folder, name, dtype, REMEDY) for name, dtype in COLUMNS.items()}

    def __len__(self) -> int:
        return int(self.manifest["samples"])

    def __getitem__(self, sample: int) -> dict[str, Any]:
        """input_ids and labels int64 [T] (-100: no loss), pixel_values (`pixels`) and images (`images`) of a sample.

        Raises as these do.
        """
        tokens, mask = self.text(sample)
        ids = torch.from_numpy(tokens.astype(np.int64))
        labels = ids.where(torch.from_numpy(mask > 0), IGNORED)
        images = tuple(self.images(sample))
        return {"input_ids": ids, "labels": labels, "pixel_values": self.pixels(sample), "images": images}

    def verify(self) -> None:
        """Read every byte and compare with the checksums of the manifest. Raises UserError naming the file."""
        self._verify(lambda _: True)

    def _verify(self, chosen: Callable[[str], bool]) -> None:
        checksums = {name: value for name, value in self.manifest["checksums"].items() if chosen(name)}
        verify_checksums(self.folder, checksums, "preprocess again")

    def text(self, sample: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Token ids int32 [T], one image token for each image feature; loss mask uint8 [T], 1 where the token itself is
        to be predicted.

        Raises UserError for an id outside of the vocabulary, and if T is not what sizes.npz says.
        """
        tokens, mask = (self._columns[name][sample] for name in ("tokens", "loss_mask"))
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.manifest["vocab_size"]:
            raise UserError(f"{self.folder}: sample {sample} has token ids behind the vocabulary; {REMEDY}")
        if self.sizes.tiles[sample]:
            repeats = self._repeats(sample)
            if len(repeats) != (marks := int(np.isin(tokens, self.image_tokens).sum())):
                raise UserError(f"{self.folder}: sample {sample} has {len(repeats)} images, {marks} marks; {REMEDY}")
            tokens, mask = expand_images(tokens, mask, self.image_tokens, repeats)
        if len(tokens) != self.sizes.tokens[sample]:
            wanted = f"{len(tokens)} tokens where sizes.npz says {self.sizes.tokens[sample]}"
            raise UserError(f"{self.folder}: sample {sample} has {wanted}; {REMEDY}")
        return tokens, mask

    def images(self, sample: int) -> list[TiledImage]:
        """The images and videos of a sample, in the order of their tokens.

        Raises UserError if the list is damaged or has other tiles than sizes.npz says.
        """
        try:
            images = read_images(self._columns["images"][sample].tobytes())
            if (tiles := sum(image.tiles for image in images)) != self.sizes.tiles[sample]:
                raise UserError(f"images have {tiles} tiles, sizes.npz says {self.sizes.tiles[sample]}")
        except UserError as error:
            raise UserError(f"{self.folder}: sample {sample}: {error}; {REMEDY}") from None
        return images

    def feature_orders(self, sample: int) -> list[FeatureOrder]:
        """For each image of a sample, which of its tiles' features each token is; -1 is a newline."""
        return [self._order(image) for image in self.images(sample)]

    def _order(self, image: TiledImage) -> FeatureOrder:
        return self.rule.order(image, self.manifest["tokens_per_tile"])

    def image_starts(self, sample: int) -> list[int]:
        """The index in `text` of the first token of each run of image tokens."""
        marks = np.flatnonzero(np.isin(self._columns["tokens"][sample], self.image_tokens))
        features = np.array(self._repeats(sample), dtype=np.int64)
        return (marks + np.cumsum(features) - features - np.arange(len(marks))).tolist()

    def prefix(self, sample: int) -> int:
        """Tokens in `text` before the first that is to be predicted; all images come before it."""
        mask = self._columns["loss_mask"][sample]
        return int(self.sizes.tokens[sample]) - len(mask) + int(mask.argmax())

    def _repeats(self, sample: int) -> list[int]:
        """The length of each run of image tokens: of an image, of each of its rows or tiles, or of a video's step."""
        shown = [(len(self._order(image)), self.rule.places(image).count) for image in self.images(sample)]
        return [features // places for features, places in shown for _ in range(places)]

    @property
    def image_tokens(self) -> list[int]:
        """The ids that features of images and videos replace."""
        tokens = (self.manifest["image_token_id"], self.manifest.get("video_token_id"))
        return [token for token in tokens if token is not None]

    @property
    def rule(self) -> TilingRule:
        """How images were cut."""
        return TILINGS[self.manifest["tiling"]["rule"]]

    @property
    def normalization(self) -> Normalization:
        """Mean and deviation of the pixels that the model was trained with."""
        return NORMALIZATIONS[self.manifest["normalization"]]

    def pixels(self, sample: int) -> torch.Tensor:
        """The tiles of a sample, normalised: float32 [tiles, 3, tile_size, tile_size]; raises as `tiles` does.

        With videos [tiles, 3, frames, tile_size, tile_size].
        """
        return normalise(torch.from_numpy(self.tiles(sample)), self.normalization)

    def tiles(self, sample: int) -> NDArray[np.uint8]:
        """The tiles of a sample as they were cut: uint8 [tiles, tile_size, tile_size, 3].

        With videos [tiles, frames, tile_size, tile_size, 3]. Raises `UserError` naming file and sample if an image or
        video cannot be read, or is not what was preprocessed.
        """
        size = self.manifest["tile_size"]
        nothing = np.zeros((0, size, size, 3), dtype=np.uint8)
        return join_tiles([nothing, *(self.image_tiles(sample, image) for image in self.images(sample))])

    def image_tiles(self, sample: int, image: TiledImage) -> NDArray[np.uint8]:
        """As `tiles`, of one of a sample's `images`; only a video's tiles have a frames dimension."""
        size = self.manifest["tile_size"]
        image = image if self.checks_images else replace(image, crcs=())
        source = self._sources.entry(sample)
        root = Path(source["image_root"] or "")
        path = Path(source["path"]) if image.place else root / image.path
        try:
            if image.film:
                return _video_tiles(root, path, image, size)
            return self.rule.cut(load_rgb(path, image.place, *image.crcs), image, size)
        except ChangedError as error:
            raise UserError(f"{error}; sample {sample} of {self.folder}") from error
        except Exception as error:  # Pillow's and FFmpeg's readers raise nearly anything on a damaged file
            raise UserError(f"{path}: cannot be decoded ({error}); sample {sample} of {self.folder}") from error


def _video_tiles(root: Path, path: Path, video: TiledImage, size: int) -> NDArray[np.uint8]:
    """The patches of a video file, or of a list of frame files."""
    assert video.film is not None
    if files := video.film.files:
        crcs = video.crcs or (None,) * len(files)
        frames = (np.asarray(load_rgb(root / file, crc=crc)) for file, crc in zip(files, crcs, strict=True))
        return cut_frames(frames, video, size)
    crc = video.crcs[0] if video.crcs else None
    return cut_frames(read_frames(path, video.place, video.film.frames, crc=crc), video, size)


def expand_images(
    tokens: NDArray[np.int32], loss_mask: NDArray[np.uint8], image_tokens: Sequence[int], repeats: list[int]
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Repeat the k-th image token `repeats[k]` times: one for each of the projector's outputs.

    <img> CONTEXT </img> What is it?  ->  <img> CONTEXT CONTEXT ... CONTEXT </img> What is it?
    """
    counts = np.ones(len(tokens), dtype=np.int64)
    counts[np.isin(tokens, image_tokens)] = repeats
    return np.repeat(tokens, counts), np.repeat(loss_mask, counts)


class ColumnWriter:
    """Appends samples to one column of a dataset folder; each sample is a document of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self._index = folder / f"{name}.idx"
        self._builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=COLUMNS[name])

    def append(self, values: NDArray[Any], lengths: NDArray[np.int64]) -> None:
        """Add samples of `lengths`, concatenated in `values`."""
        self._builder.add_document(values, lengths.tolist())

    def close(self) -> None:
        """Write the index."""
        # The builder took every call for one document; a call a sample would take ten times as long.
        self._builder.document_indices = list(range(len(self._builder.sequence_lengths) + 1))
        self._builder.finalize(str(self._index))
