"""A dataset folder, opened and checked; `dataset` says what is in it."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.vlm.data.columns import REMEDY, columns_of
from megatron.vlm.data.manifest import check_manifest, read_rules
from megatron.vlm.data.moved import sources_now
from megatron.vlm.data.sources import Sources
from omnibal_ext.errors import UserError
from omnibal_ext.families.media import TILINGS
from omnibal_ext.files.folders import refuse_without_manifest
from omnibal_ext.files.records import verify_checksums
from omnibal_ext.modalities.item import Rule
from omnibal_ext.modalities.modality import FURTHER, VISION, Modality, Size
from omnibal_ext.modalities.vision.normalization import NORMALIZATIONS, Normalization
from omnibal_ext.modalities.vision.tiling import TilingRule
from omnibal_ext.reading.document import read_json
from omnibal_ext.sizes import Sizes

if TYPE_CHECKING:
    from megatron.vlm.data.media.tile_cache import TileCache  # with torch, which `omnibal look` goes without


class DatasetFolder:
    """A memory-mapped dataset folder.

    Raises `UserError` if the folder is incomplete, of another version, or its index files are damaged.
    """

    def __init__(self, folder: str | Path, checks_images: bool = True, tile_cache: "TileCache | None" = None) -> None:
        """Open a folder; with `checks_images`, an image whose CRC-32 is not the recorded one counts as unreadable.
        `tile_cache` keeps the tiles of those that are checked."""
        self.folder, self.checks_images, self.tile_cache = Path(folder), checks_images, tile_cache
        refuse_without_manifest(self.folder, "a dataset", "omnibal preprocess")
        self.manifest = read_json(self.folder / "manifest.json", check_manifest, REMEDY)
        self._verify(lambda name: not name.endswith((".bin", ".jsonl")))
        self.modalities = (VISION, *(one for one in FURTHER if one.name in self.manifest))
        """Modalities of the inputs, in the order in which the manifest lists them."""
        self.sizes = Sizes.load(self.folder / "sizes.npz", [one.size for one in self.modalities[1:]])
        self.sources = Sources(sources_now(self.folder, self.manifest["sources"]))
        from megatron.vlm.data.indexed_columns import open_column  # with core, which `omnibal look` goes without

        self.columns = {name: open_column(self.folder, name) for name in columns_of(self.manifest)}
        held = {"sizes.npz": self.sizes.tokens}
        held |= {name: column.sequence_lengths for name, column in self.columns.items()}
        for name, lengths in held.items():
            if len(lengths) != len(self):
                count = f"{name} holds {len(lengths)} samples"
                raise UserError(f"{self.folder}: {count}, the manifest says {len(self)}; {REMEDY}")
        if not np.array_equal(held["tokens"], held["loss_mask"]):
            raise UserError(f"{self.folder}: tokens and loss_mask have other lengths; {REMEDY}")

    def __len__(self) -> int:
        return int(self.manifest["samples"])

    def verify(self) -> None:
        """Read every byte and compare with the checksums of the manifest. Raises UserError naming the file."""
        self._verify(lambda _: True)

    def _verify(self, chosen: Callable[[str], bool]) -> None:
        checksums = {name: value for name, value in self.manifest["checksums"].items() if chosen(name)}
        verify_checksums(self.folder, checksums, "preprocess again")

    @cached_property
    def amounts(self) -> dict[Modality, NDArray[Any]]:
        """Units of each modality's inputs (tiles, mel frames) in every sample, [N]."""
        return {one: self.sizes.of(one.size) for one in self.modalities}

    @cached_property
    def media_tokens(self) -> dict[Size, list[int]]:
        """Ids of tokens that features of images, videos, sounds replace, by what the encoder counts (tiles, frames)."""
        images = (self.manifest["image_token_id"], self.manifest.get("video_token_id"))
        shown = {VISION.size: [token for token in images if token is not None]}
        return shown | {one.size: [self.manifest[f"{one.name}_token_id"]] for one in self.modalities[1:]}

    @cached_property
    def further_rules(self) -> dict[Modality, Rule]:
        """Rules by which preprocessing made encoder inputs of sounds and of separately encoded videos, by modality."""
        return read_rules(self.manifest)

    @property
    def rule(self) -> TilingRule:
        """Tiling rule by which images were cut."""
        return TILINGS[self.manifest["tiling"]["rule"]]

    @property
    def normalization(self) -> Normalization:
        """Mean and standard deviation by which the model's pixels are normalised."""
        return NORMALIZATIONS[self.manifest["normalization"]]
