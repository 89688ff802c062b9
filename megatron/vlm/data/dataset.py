"""The dataset folder: what preprocessing writes and training reads. It refers to images and sounds, it has none itself.

tokens.bin/.idx     int32   token ids of every sample, one image token for each run of        (core's IndexedDataset)
                            image tokens; `Sample.text` repeats it
loss_mask.bin/.idx  uint8   1 where the token itself is to be predicted
media.bin/.idx      uint8   JSON object of lists, under `Modality.inputs` (of older folders: images.bin, sounds.bin):
                            "images": {"path", "columns", "rows", "thumbnail"}; "place", its location inside the input
                            file; "film", a video's sampled frames; "crcs", CRC-32 of its file or frames' files
                            "sounds": {"path", "samples", "frames", "tokens", "place", "crcs"}; "video" and "turns", of
                            a video's own sound which one it is and how their tokens take turns
sizes.npz                   of every sample: tiles, tokens (all image and audio tokens counted), supervised tokens, its
                            line number in the input file, and mel frames for models that hear
manifest.json               tokenizer, special tokens, template, markup, tiling, counts, samples of each file, checksums
rejected.jsonl              {"file", "line", "reason", "detail"} of every rejected line
moved.json                  where input files and images lie, if they were moved since (`moved`)
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.dataset_folder import DatasetFolder
from megatron.vlm.data.inputs.registry import readers_of
from megatron.vlm.data.media.tile_cache import TileCache
from megatron.vlm.data.sample import Sample


class ChatDataset(DatasetFolder, Dataset):
    """A memory-mapped dataset folder; map-style, for any DataLoader.

    Raises `UserError` if the folder is incomplete, of another version, its index files are damaged, or packages that
    read its images or sounds are missing.
    """

    def __init__(self, folder: str | Path, checks_images: bool = True, tile_cache: TileCache | None = None) -> None:
        """Open a folder; with `checks_images`, an image whose CRC-32 is not the recorded one counts as unreadable.
        `tile_cache` keeps the tiles of those that are checked."""
        super().__init__(folder, checks_images, tile_cache)
        self.readers = readers_of(self)
        for reader in self.readers.values():
            reader.require()

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return input_ids and labels int64 [T] (-100: no loss), pixel_values (`pixels_of`), images (`Sample.images`).

        For models that hear also input_features fp32 [frames, mel bins] of all sounds, feature_lengths int64 [sounds],
        the frames of each, and turns (`Sample.turns`): `InputReader.arguments` of each modality. Raises as these do.
        """
        sample = self.sample(number)
        tokens, mask = sample.text
        ids = torch.from_numpy(tokens.astype(np.int64))
        read = {"input_ids": ids, "labels": ids.where(torch.from_numpy(mask > 0), IGNORED)}
        for reader in self.readers.values():
            read |= reader.arguments(sample)
        return read

    def sample(self, number: int) -> Sample:
        """Return one sample, none of it read yet."""
        return Sample(self, int(number))
