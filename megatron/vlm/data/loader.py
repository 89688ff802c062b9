"""From a packed index to the microbatches of one pipeline stage, and where a resumed run continues."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import tee
from multiprocessing import forkserver
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megatron.vlm import platform
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.media.features import order_tensors
from megatron.vlm.data.media.tiling import FRAMES
from megatron.vlm.data.media.videos import join_tiles
from megatron.vlm.data.pack_images import PackImages, SampleTiles
from megatron.vlm.data.pack_shard import shard_of, with_filler
from megatron.vlm.data.sources import Sources
from megatron.vlm.microbatch import Microbatch, segment_ids
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.errors import UserError
from omnibal_ext.image_assignment import assign_units
from omnibal_ext.launch.parent_watch import exit_with_parent
from omnibal_ext.packing.index.dispatch import EMPTY_PACK, PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.shards import shard_tokens


@dataclass(frozen=True)
class Needs:
    """Which tensors of a microbatch a stage's layers read. Every stage gets the sizes."""

    pixels: bool
    tokens: bool
    labels: bool
    targets: bool = False

    @classmethod
    def of(cls, kinds: tuple[str, ...], language: LanguageArchitecture) -> "Needs":
        """For a slice of the chain."""
        return cls(
            pixels="patch_embed" in kinds,
            tokens="word_embed" in kinds or ("llm" in kinds and language.layer_inputs is not None),
            labels="head" in kinds,
            targets="llm" in kinds and language.experts is not None,
        )


class PackDataset(Dataset):
    """Pack number -> Microbatch on the host; pixels are uint8, to be normalised on the device."""

    def __init__(
        self,
        data: ChatDataset,
        index: PackedIndex,
        needs: Needs,
        sequence_multiple: int = 1,
        decodes: bool = True,
        rank: int = 0,
    ) -> None:
        """T is padded to a multiple of `sequence_multiple` (`microbatch.sequence_multiple`).

        `decodes`: if false, another rank broadcasts the pixels, and a meta tensor has their shape. `rank`: the
        data-parallel rank, which decides its shard of a wide pack.

        Raises UserError if the index was made from another dataset, or is damaged.
        """
        index.check({"built_from.data.manifest": data.manifest})
        index.verify()
        index.check_samples(len(data))
        self.data, self.index, self.needs, self.sequence_multiple = data, index, needs, sequence_multiple
        self.decodes, self.rank = decodes, rank
        self.sources = Sources(data.manifest)

    @property
    def reads_images(self) -> bool:
        """Whether this rank decodes images."""
        return self.needs.pixels and self.decodes

    def __getitem__(self, pack: int) -> Microbatch:
        samples = self.index.samples(pack) if pack >= 0 else np.empty(0, dtype=np.int64)
        real = [int(self.data.sizes.tokens[sample]) for sample in samples]
        if pack >= 0 and (width := self.index.width(pack)) > 1:
            return self._shard(pack, samples, real, width)
        longest = max(real, default=0)
        lengths = [longest] * len(real) if self.index.pad else list(real)
        if filler := -sum(lengths) % self.sequence_multiple if lengths else self.sequence_multiple:
            lengths.append(filler)
        tiles = self.data.sizes.tiles[samples]
        shown = zip(samples[tiles > 0].tolist(), tiles[tiles > 0].tolist(), strict=True)
        pixels, broken = self._pixels([SampleTiles(sample, None, count) for sample, count in shown])
        return replace(self._pack(pack, samples, real, lengths, self.needs.targets), pixels=pixels, broken=broken)

    def _shard(self, pack: int, samples: np.ndarray, real: list[int], width: int) -> Microbatch:
        """This rank's shard of a pack that a team of `width` ranks runs."""
        place, steps = self.rank % width, PackImages.of(self.data, samples)
        lengths, spans = with_filler(shard_tokens(real, width, self.sequence_multiple), real, self.sequence_multiple)
        makers = np.array(assign_units(steps.tiles.tolist(), pack, tuple(range(width)), 1), np.int64)
        own = steps.subset(makers == place)
        entire = self._pack(pack, samples, real, list(lengths), self.needs.targets or self.needs.labels)
        shard = shard_of(entire, spans, makers.repeat(steps.features), place)
        pixels, broken = self._pixels(own.tiles_to_read)
        grids = own.grids if self.data.rule.native else ()
        return replace(shard, tiles=int(own.tiles.sum()), grids=grids, pixels=pixels, broken=broken)

    def _pack(
        self, pack: int, samples: np.ndarray, real: list[int], lengths: list[int], tells_targets: bool
    ) -> Microbatch:
        """A pack without pixels, of segments of these lengths."""
        reads = self.needs.tokens or self.needs.labels or self.needs.targets
        ids, mask = self._text(samples, lengths) if reads else (None, None)
        targets = None
        if mask is not None and tells_targets:
            targets = torch.stack([part.sum() for part in mask.split(lengths)])
        mask = mask if self.needs.labels else None
        return Microbatch(
            tiles=int(self.data.sizes.tiles[samples].sum()),
            lengths=tuple(lengths),
            samples=len(samples),
            useful_tokens=sum(real),
            useful_squares=sum(length * length for length in real),
            pixel_statistics=self.data.normalization if self.needs.pixels else None,
            input_ids=ids if self.needs.tokens else None,
            image_positions=self._image_positions(ids) if self.needs.tokens and ids is not None else None,
            **(self._image_sources(samples) if self.needs.tokens and self.data.rule.joins_tiles else {}),
            prefixes=tuple(map(self.data.prefix, map(int, samples))) if self.data.rule.prefix_attention else (),
            labels=None if mask is None or ids is None else torch.roll(ids, -1),
            supervised=None if mask is None else mask.nonzero().squeeze(1),
            loss_mask=mask,
            segment_ids=segment_ids(lengths) if self.needs.labels else None,
            targets=targets,
            sample_lengths=tuple(real) if self.needs.targets else (),
            sources=self._sources(samples, len(lengths)) if self.needs.labels else None,
            pack=pack,
            sample_ids=tuple(map(int, samples)),
            **(
                self._grids_and_starts(samples, lengths)
                if self.data.rule.needs_image_starts or self.data.rule.native
                else {}
            ),
        )

    def _grids_and_starts(self, samples: np.ndarray, lengths: list[int]) -> dict[str, Any]:
        """For all stages: where each run of image tokens starts and, at native resolution, its grid and the seconds
        between a video's steps."""
        grids, starts, seconds = [], [], []
        for begin, sample in zip(np.cumsum([0, *lengths]).tolist(), map(int, samples), strict=False):
            if self.data.sizes.tiles[sample]:
                starts += [
                    begin + start for start in self.data.image_starts(sample) if self.data.rule.needs_image_starts
                ]
                for image in self.data.images(sample) if self.data.rule.native else ():
                    grids += image.grids
                    seconds += [image.film.seconds if image.film else 1.0] * len(image.grids)
        return {"grids": tuple(grids), "image_starts": tuple(starts), "seconds": tuple(seconds)}

    def _text(self, samples: np.ndarray, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """Token ids [T]; loss mask [T], 1 where the next token of the same sample is supervised."""
        ids = torch.full((sum(lengths),), self.data.manifest["pad_token_id"], dtype=torch.long)
        mask = torch.zeros(len(ids), dtype=torch.float32)
        for start, sample in zip(np.cumsum([0, *lengths]), samples, strict=False):
            tokens, counts = self.data.text(int(sample))
            ids[start : start + len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            mask[start : start + len(counts) - 1] = torch.from_numpy(counts[1:].astype(np.float32))
        return ids, mask

    def _sources(self, samples: np.ndarray, segments: int) -> Tensor:
        """The source of each segment; padding, without supervised tokens, counts as the first file's."""
        sources = torch.zeros(segments, dtype=torch.long)
        sources[: len(samples)] = torch.from_numpy(self.sources.of(samples))
        return sources

    def _image_positions(self, ids: Tensor) -> Tensor:
        return torch.isin(ids, torch.tensor(self.data.image_tokens)).nonzero().squeeze(1)

    def _image_sources(self, samples: np.ndarray) -> dict[str, Any]:
        """Which of the pack's features each image token is."""
        return order_tensors(
            (image.tiles * self.data.manifest["tokens_per_tile"], order)
            for sample in map(int, samples)
            for image, order in zip(self.data.images(sample), self.data.feature_orders(sample), strict=True)
        )

    def _pixels(self, tiles_to_read: Sequence[SampleTiles]) -> tuple[Tensor | None, tuple[tuple[int, str], ...]]:
        """The tiles; (sample, error) where an image cannot be read and tiles are black."""
        if not self.needs.pixels:
            return None, ()
        size, tiles = self.data.manifest["tile_size"], sum(reading.tiles for reading in tiles_to_read)
        if not self.decodes or not tiles:
            frames = (FRAMES,) if any(map(self._has_video, tiles_to_read)) else ()
            return torch.empty(tiles, *frames, size, size, 3, dtype=torch.uint8, device="meta"), ()
        cut, broken = [], []
        for reading in tiles_to_read:
            try:
                cut.append(self._tiles(reading))
            except UserError as error:
                broken.append((reading.sample, str(error)))
                frames = (FRAMES,) if self._has_video(reading) else ()  # the other ranks expect this shape
                cut.append(np.zeros((reading.tiles, *frames, size, size, 3), dtype=np.uint8))
        return torch.from_numpy(join_tiles(cut)), tuple(broken)

    def _tiles(self, reading: SampleTiles) -> NDArray[np.uint8]:
        if reading.steps is None:
            return self.data.tiles(reading.sample)
        images = zip(self.data.images(reading.sample), reading.steps, strict=False)
        return join_tiles(
            [self.data.image_tiles(reading.sample, image.at_steps(steps)) for image, steps in images if steps]
        )

    def _has_video(self, reading: SampleTiles) -> bool:
        if reading.steps is not None:
            return reading.film
        return self.data.rule.native and any(image.film for image in self.data.images(reading.sample))


class PackOrder:
    """The pack numbers of one data-parallel rank, from an iteration on, without end."""

    def __init__(self, stream: PackStream, rank: int, first_iteration: int) -> None:
        self.stream, self.rank, self.first_iteration = stream, rank, first_iteration

    def __iter__(self) -> Iterator[int]:
        iteration = self.first_iteration
        while True:
            yield from self.stream.iteration(iteration)[self.rank].tolist()
            iteration += 1


class PackLoader:
    """Iterates over a rank's microbatches; `reread` gives those since `begin_iteration` once more.

    `reading()` makes a context manager for the wait for each microbatch, for timers.
    """

    def __init__(
        self,
        dataset: Any,
        order: Iterable[Any],
        num_workers: int = 0,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`dataset` (`PackDataset`, `ImageShardDataset`) gives a `Microbatch` for every item of `order`."""
        self.dataset, self.reading = dataset, reading
        self.taken: list[Any] = []
        self._order, order = tee(order)
        self._batches = microbatches(dataset, order, num_workers)

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        with self.reading():
            batch = next(self._batches)
        self.taken.append(next(self._order))
        return batch

    def begin_iteration(self) -> None:
        """`reread` starts here."""
        self.taken.clear()

    def close(self) -> None:
        """End the worker processes, and with them the iteration."""
        self._batches.close()

    def reread(self) -> Iterator[Microbatch]:
        """Read the microbatches since `begin_iteration` again."""
        return (self.dataset[pack] for pack in tuple(self.taken))


def microbatches(dataset: Any, order: Iterable[Any], num_workers: int = 0) -> Generator[Microbatch, None, None]:
    """The microbatches of a rank's packs, on the host (pinned with CUDA).

    `num_workers` processes read datasets with images; others are read here, which is faster than to transfer them.
    """
    workers = num_workers if dataset.reads_images else 0
    if workers:
        _start_forkserver()
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=order,
        num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
        persistent_workers=workers > 0,
        pin_memory=platform.HAS_CUDA,
        worker_init_fn=exit_with_parent,
        generator=torch.Generator(),  # for workers' seeds: on CPU the default one is dropout's
    )
    yield from loader


@cache
def _start_forkserver() -> None:
    """Start the server that all workers are forked from.

    It preloads this module and the main module, which every worker would import itself otherwise. It sees no GPU, so
    that workers neither open one nor import packages for GPUs.
    """
    main = getattr(sys.modules["__main__"].__spec__, "name", None)
    multiprocessing.set_forkserver_preload([__name__, *([main] if main else [])])
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        os.environ.update({} if seen is None else {"CUDA_VISIBLE_DEVICES": seen})


def first_iteration(consumed_packs: int, packs_an_iteration: int) -> int:
    """The iteration at which a resumed run continues, at any data-parallel size.

    Raises UserError if the global batch size changed and the position is inside of an iteration.
    """
    if consumed_packs % packs_an_iteration:
        raise UserError(
            f"resuming after {consumed_packs} packs, which is no whole number of iterations of {packs_an_iteration} "
            "packs; resume with the --global-batch-size the run was started with"
        )
    return consumed_packs // packs_an_iteration


def samples_before(stream: PackStream, index: PackedIndex, iteration: int) -> int:
    """Samples of all ranks before this iteration; those of a wide pack count once, empty packs have none."""
    sizes = np.append(np.diff(index.pack_offsets), 0)  # an empty pack is number -1: the last entry
    assert EMPTY_PACK == -1
    slots = sizes / np.append([1] * index.num_packs if index.wide is None else index.wide.pack_widths, 1)
    starts = range(0, iteration, 1000)
    return round(sum(slots[stream.iterations(start, min(start + 1000, iteration))].sum() for start in starts))
