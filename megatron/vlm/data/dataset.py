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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from megatron.vlm.data.batches import IGNORED
from megatron.vlm.data.columns import REMEDY, columns_of
from megatron.vlm.data.manifest import check_manifest, read_media
from megatron.vlm.data.media.crc import ChangedError
from megatron.vlm.data.media.images import NORMALIZATIONS, Normalization, load_rgb
from megatron.vlm.data.media.mel import log_mels
from megatron.vlm.data.media.sounds import load_sound, require_hearing
from megatron.vlm.data.media.videos import cut_frames, join_tiles, read_frames, require_decoder
from megatron.vlm.data.moved import sources_now
from megatron.vlm.data.sources import Sources
from megatron.vlm.pixels import normalise
from omnibal_ext.errors import UserError
from omnibal_ext.families.media import TILINGS
from omnibal_ext.files.folders import refuse_without_manifest
from omnibal_ext.files.records import verify_checksums
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.audio.sounds import Sound, SoundRule
from omnibal_ext.modalities.modality import AUDIO, FURTHER, VISION, Size
from omnibal_ext.modalities.vision.features import FeatureOrder
from omnibal_ext.modalities.vision.tiling import TiledImage, TilingRule
from omnibal_ext.reading.document import read_json
from omnibal_ext.sizes import Sizes


class ChatDataset(Dataset):
    """A memory-mapped dataset folder; map-style, for any DataLoader.

    Raises `UserError` if the folder is incomplete, of another version, or its index files are damaged.
    """

    def __init__(self, folder: str | Path, checks_images: bool = True) -> None:
        """`checks_images`: an image whose CRC-32 is not the recorded one counts as unreadable."""
        self.folder, self.checks_images = Path(folder), checks_images
        refuse_without_manifest(self.folder, "a dataset", "omnibal preprocess")
        self.manifest = read_json(self.folder / "manifest.json", check_manifest, REMEDY)
        self._verify(lambda name: not name.endswith((".bin", ".jsonl")))
        self.further = [one for one in FURTHER if one.name in self.manifest]
        """Modalities of its inputs beyond images."""
        self.hears = AUDIO in self.further
        self.sizes = Sizes.load(self.folder / "sizes.npz", [one.size for one in self.further])
        self.frames = self.sizes.more.get(AUDIO.size, np.zeros(len(self.sizes), np.int64))
        """[N] mel frames of each sample."""
        if self.manifest.get("video_files"):
            require_decoder(str(self.folder))
        if self.frames.any():
            require_hearing(str(self.folder))
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

    def __getitem__(self, number: int) -> dict[str, Any]:
        """input_ids and labels int64 [T] (-100: no loss), pixel_values (`Sample.pixels`) and images (`Sample.images`).

        For models that hear also input_features fp32 [frames, mel bins] of all sounds, feature_lengths int64 [sounds],
        the frames of each, and turns (`Sample.turns`). Raises as these do.
        """
        sample = self.sample(number)
        tokens, mask = sample.text
        ids = torch.from_numpy(tokens.astype(np.int64))
        labels = ids.where(torch.from_numpy(mask > 0), IGNORED)
        read = {"input_ids": ids, "labels": labels, "pixel_values": sample.pixels(), "images": tuple(sample.images)}
        if self.hears:
            lengths = torch.tensor([sound.frames for sound in sample.sounds], dtype=torch.long)
            read |= {"input_features": sample.hear_all(), "feature_lengths": lengths, "turns": tuple(sample.turns)}
        return read

    def verify(self) -> None:
        """Read every byte and compare with the checksums of the manifest. Raises UserError naming the file."""
        self._verify(lambda _: True)

    def _verify(self, chosen: Callable[[str], bool]) -> None:
        checksums = {name: value for name, value in self.manifest["checksums"].items() if chosen(name)}
        verify_checksums(self.folder, checksums, "preprocess again")

    def sample(self, number: int) -> "Sample":
        """One sample."""
        return Sample(self, int(number))

    @cached_property
    def media_tokens(self) -> dict[Size, list[int]]:
        """By the size of what is read of media: the ids that their features replace."""
        images = (self.manifest["image_token_id"], self.manifest.get("video_token_id"))
        shown = {VISION.size: [token for token in images if token is not None]}
        return shown | {one.size: [self.manifest[f"{one.name}_token_id"]] for one in self.further}

    @cached_property
    def sound_rule(self) -> SoundRule | None:
        """How sounds were heard; None: the model does not hear."""
        if not self.hears:
            return None
        said = dict(self.manifest["audio"])
        try:
            return SoundRule(AudioArchitecture(**said.pop("encoder")), **said)
        except TypeError as error:
            raise UserError(f"{self.folder}: manifest.json: audio: {error}; {REMEDY}") from error

    @property
    def rule(self) -> TilingRule:
        """How images were cut."""
        return TILINGS[self.manifest["tiling"]["rule"]]

    @property
    def normalization(self) -> Normalization:
        """Mean and deviation of the pixels that the model was trained with."""
        return NORMALIZATIONS[self.manifest["normalization"]]


class Sample:
    """One sample of a dataset. Each part is read where it is first asked for: its list of images is decoded once."""

    def __init__(self, data: ChatDataset, number: int) -> None:
        self.data, self.number = data, number
        self.length, self.tiles = int(data.sizes.tokens[number]), int(data.sizes.tiles[number])
        """Tokens of the text, image and audio tokens included; tiles of all images."""
        self.frames = int(data.frames[number])
        """Mel frames of all sounds."""

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
        if self.tiles or self.frames:
            heard = [run for sound in self.sounds for run in sound.turns[1::2] or (sound.tokens,)]
            of_media = {VISION.size: (self.runs if self.tiles else [], "images"), AUDIO.size: (heard, "sounds")}
            for size, ids in self.data.media_tokens.items():
                runs, what = of_media[size]
                if len(runs) != (marks := int(np.isin(tokens, ids).sum())):
                    raise UserError(f"{self} has {len(runs)} {what}, {marks} marks; {REMEDY}")
                tokens, mask = expand_runs(tokens, mask, ids, runs)
        if len(tokens) != self.length:
            raise UserError(f"{self} has {len(tokens)} tokens where sizes.npz says {self.length}; {REMEDY}")
        return tokens, mask

    @cached_property
    def _media(self) -> dict[str, list[Any]]:
        names = self.data.columns.keys() - {"tokens", "loss_mask"}
        return read_media({name: self._column(name).tobytes() for name in names})

    @cached_property
    def images(self) -> list[TiledImage]:
        """The images and videos, in the order of their tokens.

        Raises UserError if the list is damaged or has other tiles than sizes.npz says.
        """
        try:
            images: list[TiledImage] = self._media[VISION.inputs]
            if (tiles := sum(image.tiles for image in images)) != self.tiles:
                raise UserError(f"images have {tiles} tiles, sizes.npz says {self.tiles}")
        except UserError as error:
            raise UserError(f"{self}: {error}; {REMEDY}") from None
        return images

    @cached_property
    def sounds(self) -> list[Sound]:
        """The sounds, in the order of their tokens.

        Raises UserError if the list is damaged or has other frames than sizes.npz says.
        """
        if not self.frames:
            return []
        try:
            sounds: list[Sound] = self._media[AUDIO.inputs]
            if (frames := sum(sound.frames for sound in sounds)) != self.frames:
                raise UserError(f"sounds have {frames} frames, sizes.npz says {self.frames}")
            if any(sound.turns and sum(sound.turns[1::2]) != sound.tokens for sound in sounds):
                raise UserError("the turns of a sound have other tokens than the sound")
        except UserError as error:
            raise UserError(f"{self}: {error}; {REMEDY}") from None
        return sounds

    @cached_property
    def orders(self) -> list[FeatureOrder]:
        """For each image, which of its tiles' features each token is; -1 is a newline."""
        rule, each = self.data.rule, self.data.manifest["tokens_per_tile"]
        return [rule.order(image, each) for image in self.images]

    @cached_property
    def turns(self) -> list[tuple[int, ...]]:
        """For each image, the `Sound.turns` of a video that is heard too, else ()."""
        heard = {sound.video: sound.turns for sound in self.sounds if sound.turns}
        return [heard.get(number, ()) for number in range(len(self.images))]

    @cached_property
    def _whole_runs(self) -> list[int]:
        """As `runs`, but a video that is heard too is a single run."""
        places = [self.data.rule.places(image).count for image in self.images]
        return [len(order) // count for order, count in zip(self.orders, places, strict=True) for _ in range(count)]

    @property
    def runs(self) -> list[int]:
        """The length of each run of image tokens: of an image, of each of its rows or tiles, of a video's step, or of
        each turn of a video that is heard too."""
        if not any(self.turns):
            return self._whole_runs
        pairs = zip(self._whole_runs, self.turns, strict=True)  # of such models each image and video is one
        return [run for whole, turns in pairs for run in turns[::2] or (whole,)]

    @property
    def image_starts(self) -> list[int]:
        """The index in `text` of the first token of each run of image tokens, of a heard video of its first."""
        shown = np.flatnonzero(np.isin(self.text[0], self.data.media_tokens[VISION.size]))
        runs = np.array(self._whole_runs, dtype=np.int64)
        return shown[np.cumsum(runs) - runs].tolist()

    @property
    def prefix(self) -> int:
        """Tokens in `text` before the first that is to be predicted; all images and sounds come before it."""
        mask = self._column("loss_mask")
        return self.length - len(mask) + int(mask.argmax())

    def read(self, image: TiledImage) -> NDArray[np.uint8]:
        """The tiles of one of `images`: uint8 [tiles, tile_size, tile_size, 3], a video's [tiles, frames, ..., 3].

        Raises `UserError` naming file and sample if it cannot be read, or is not what was preprocessed.
        """
        size = self.data.manifest["tile_size"]
        image = image if self.data.checks_images else replace(image, crcs=())
        root, path = self._file(image)
        with self._named(path):
            if image.film:
                return _video_tiles(root, path, image, size)
            return self.data.rule.cut(load_rgb(path, image.place, *image.crcs), image, size)

    def hear(self, sound: Sound) -> Tensor:
        """What is heard of one of `sounds`: log-mel frames, fp32 [frames, mel bins].

        Raises `UserError` naming file and sample if it cannot be decoded, or is not what was preprocessed.
        """
        rule, (_, path) = self.data.sound_rule, self._file(sound)
        assert rule is not None
        crc = sound.crcs[0] if sound.crcs and self.data.checks_images else None
        with self._named(path):
            wave = load_sound(path, sound.place, rule.rate, crc)
            if len(wave) != sound.samples:
                raise ValueError(f"{len(wave)} samples where {sound.samples} were preprocessed")
            return log_mels(rule, wave)

    def hear_all(self) -> Tensor:
        """What is heard of all sounds, end to end: fp32 [frames, mel bins]."""
        bins = self.data.manifest["audio"]["encoder"]["mel_bins"] if self.data.hears else 0
        return torch.cat([torch.zeros(0, bins), *map(self.hear, self.sounds)])

    def _file(self, media: TiledImage | Sound) -> tuple[Path, Path]:
        """The root of media, and the file of an image or sound."""
        source = self.data.sources.entry(self.number)
        root = Path(source["image_root"] or "")
        return root, Path(source["path"]) if media.place else root / media.path

    @contextmanager
    def _named(self, path: Path) -> Iterator[None]:
        """What fails in it is a UserError that names the file and this sample."""
        try:
            yield
        except ChangedError as error:
            raise UserError(f"{error}; sample {self.number} of {self.data.folder}") from error
        except Exception as error:  # Pillow's and FFmpeg's readers raise nearly anything on a damaged file
            raise UserError(
                f"{path}: cannot be decoded ({error}); sample {self.number} of {self.data.folder}"
            ) from error

    def read_all(self) -> NDArray[np.uint8]:
        """The tiles of all images, as of `read`; if one is a video, all have its dimensions."""
        size = self.data.manifest["tile_size"]
        return join_tiles([np.zeros((0, size, size, 3), dtype=np.uint8), *map(self.read, self.images)])

    def pixels(self) -> Tensor:
        """All tiles, normalised: float32 [tiles, 3, tile_size, tile_size]; with videos [tiles, 3, frames, ...]."""
        return normalise(torch.from_numpy(self.read_all()), self.data.normalization)


def _video_tiles(root: Path, path: Path, video: TiledImage, size: int) -> NDArray[np.uint8]:
    """The patches of a video file, or of a list of frame files."""
    assert video.film is not None
    if files := video.film.files:
        crcs = video.crcs or (None,) * len(files)
        frames = (np.asarray(load_rgb(root / file, crc=crc)) for file, crc in zip(files, crcs, strict=True))
        return cut_frames(frames, video, size)
    crc = video.crcs[0] if video.crcs else None
    return cut_frames(read_frames(path, video.place, video.film.frames, crc=crc), video, size)


def expand_runs(
    tokens: NDArray[np.int32], loss_mask: NDArray[np.uint8], of_media: Sequence[int], repeats: Sequence[int]
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """Repeat the k-th token `of_media` (ids) `repeats[k]` times: one for each of the projector's outputs.

    <img> CONTEXT </img> What is it?  ->  <img> CONTEXT CONTEXT ... CONTEXT </img> What is it?
    """
    counts = np.ones(len(tokens), dtype=np.int64)
    counts[np.isin(tokens, of_media)] = repeats
    return np.repeat(tokens, counts), np.repeat(loss_mask, counts)
