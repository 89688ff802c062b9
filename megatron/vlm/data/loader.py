"""From a packed index to the microbatches of one stage: what to read, how to lay it out, where to resume."""

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
from megatron.vlm.data.media.anyres import order_tensors
from megatron.vlm.data.media.tiles import FRAMES
from megatron.vlm.data.media.videos import join_tiles
from megatron.vlm.data.pack_images import PackImages, SampleTiles
from megatron.vlm.data.sharing import share_of, with_filler
from megatron.vlm.data.sources import Sources
from megatron.vlm.microbatch import Microbatch, segment_ids
from omnibal_ext.architectures.language import LanguageArchitecture
from omnibal_ext.dealing import deal
from omnibal_ext.errors import UserError
from omnibal_ext.lifeline import end_with_starter
from omnibal_ext.packing.index.dispatch import EMPTY_PACK, PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.shares import share_tokens


@dataclass(frozen=True)
class Needs:
    """What the layers of a stage read of a microbatch. Every stage gets the sizes."""

    pixels: bool
    tokens: bool
    labels: bool
    targets: bool = False

    @classmethod
    def of(cls, kinds: tuple[str, ...], language: LanguageArchitecture) -> "Needs":
        """The needs of a slice of the chain of a model with this language model."""
        return cls(
            pixels="patch_embed" in kinds,
            tokens="word_embed" in kinds or ("llm" in kinds and language.layer_inputs is not None),
            labels="head" in kinds,
            targets="llm" in kinds and language.experts is not None,
        )


class PackDataset(Dataset):
    """Pack number -> Microbatch, on the host; pixels as they were cut, to be normalised on the device."""

    def __init__(
        self,
        data: ChatDataset,
        index: PackedIndex,
        needs: Needs,
        sequence_multiple: int = 1,
        decodes: bool = True,
        rank: int = 0,
    ) -> None:
        """T is padded up to a multiple of `sequence_multiple` (`microbatch.sequence_multiple`).

        The data-parallel `rank` says what is read of a pack that several run together.

        Without `decodes` the pixels are another rank's to bring: a tensor without content says their shape.

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
            return self._share(pack, samples, real, width)
        longest = max(real, default=0)
        lengths = [longest] * len(real) if self.index.pad else list(real)
        if filler := -sum(lengths) % self.sequence_multiple if lengths else self.sequence_multiple:
            lengths.append(filler)
        tiles = self.data.sizes.tiles[samples]
        shown = zip(samples[tiles > 0].tolist(), tiles[tiles > 0].tolist(), strict=True)
        pixels, broken = self._pixels([SampleTiles(sample, None, count) for sample, count in shown])
        return replace(self._pack(pack, samples, real, lengths, self.needs.targets), pixels=pixels, broken=broken)

    def _share(self, pack: int, samples: np.ndarray, real: list[int], width: int) -> Microbatch:
        """What this rank holds of a pack that a team of `width` runs together."""
        place, steps = self.rank % width, PackImages.of(self.data, samples)
        lengths, spans = with_filler(share_tokens(real, width, self.sequence_multiple), real, self.sequence_multiple)
        makers = np.array(deal(steps.tiles.tolist(), pack, tuple(range(width)), 1), np.int64)
        own = steps.subset(makers == place)
        whole = self._pack(pack, samples, real, list(lengths), self.needs.targets or self.needs.labels)
        share = share_of(whole, spans, makers.repeat(steps.features), place)
        pixels, broken = self._pixels(own.tiles_to_read)
        grids = own.grids if self.data.is_native else ()
        return replace(share, tiles=int(own.tiles.sum()), grids=grids, pixels=pixels, broken=broken)

    def _pack(
        self, pack: int, samples: np.ndarray, real: list[int], lengths: list[int], tells_targets: bool
    ) -> Microbatch:
        """A pack without pixels, its segments of `lengths`."""
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
            **(self._image_sources(samples) if self.needs.tokens and self.data.joins_tiles else {}),
            prefixes=tuple(map(self.data.prefix, map(int, samples))) if self.data.has_prefix_attention else (),
            labels=None if mask is None or ids is None else torch.roll(ids, -1),
            supervised=None if mask is None else mask.nonzero().squeeze(1),
            loss_mask=mask,
            segment_ids=segment_ids(lengths) if self.needs.labels else None,
            targets=targets,
            sample_lengths=tuple(real) if self.needs.targets else (),
            sources=self._sources(samples, len(lengths)) if self.needs.labels else None,
            pack=pack,
            sample_ids=tuple(map(int, samples)),
            **(self._grids_and_starts(samples, lengths) if self.data.needs_image_starts or self.data.is_native else {}),
        )

    def _grids_and_starts(self, samples: np.ndarray, lengths: list[int]) -> dict[str, Any]:
        """Of every place of an image where its tokens begin and, at native resolution, its patches and the time: all
        stages go by them."""
        grids, starts, seconds = [], [], []
        for begin, sample in zip(np.cumsum([0, *lengths]).tolist(), map(int, samples), strict=False):
            if self.data.sizes.tiles[sample]:
                starts += [begin + start for start in self.data.image_starts(sample) if self.data.needs_image_starts]
                for image in self.data.images(sample) if self.data.is_native else ():
                    grids += image.grids
                    seconds += [image.film.seconds if image.film else 1.0] * len(image.grids)
        return {"grids": tuple(grids), "image_starts": tuple(starts), "seconds": tuple(seconds)}

    def _text(self, samples: np.ndarray, lengths: list[int]) -> tuple[Tensor, Tensor]:
        """The tokens, and of each place whether the next token of the same sample counts."""
        ids = torch.full((sum(lengths),), self.data.manifest["pad_token_id"], dtype=torch.long)
        mask = torch.zeros(len(ids), dtype=torch.float32)
        for start, sample in zip(np.cumsum([0, *lengths]), samples, strict=False):
            tokens, counts = self.data.text(int(sample))
            ids[start : start + len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            mask[start : start + len(counts) - 1] = torch.from_numpy(counts[1:].astype(np.float32))
        return ids, mask

    def _sources(self, samples: np.ndarray, segments: int) -> Tensor:
        """Of each segment; padding, in which no token counts, is put down to the first file."""
        sources = torch.zeros(segments, dtype=torch.long)
        sources[: len(samples)] = torch.from_numpy(self.sources.of(samples))
        return sources

    def _image_positions(self, ids: Tensor) -> Tensor:
        return torch.isin(ids, torch.tensor(self.data.image_tokens)).nonzero().squeeze(1)

    def _image_sources(self, samples: np.ndarray) -> dict[str, Any]:
        """Which of the pack's features its image tokens are: the images' own orders, one behind the other."""
        return order_tensors(
            (image.tiles * self.data.manifest["tokens_per_tile"], order)
            for sample in map(int, samples)
            for image, order in zip(self.data.images(sample), self.data.feature_orders(sample), strict=True)
        )

    def _pixels(self, tiles_to_read: Sequence[SampleTiles]) -> tuple[Tensor | None, tuple[tuple[int, str], ...]]:
        """The tiles, and the samples that have black ones because an image of theirs cannot be read, and why."""
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
                frames = (FRAMES,) if self._has_video(reading) else ()  # the other ranks reckon with its shape
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
        return self.data.is_native and any(image.film for image in self.data.images(reading.sample))


class PackOrder:
    """The pack numbers of one data-parallel rank, from an iteration on, for ever."""

    def __init__(self, stream: PackStream, rank: int, first_iteration: int) -> None:
        self.stream, self.rank, self.first_iteration = stream, rank, first_iteration

    def __iter__(self) -> Iterator[int]:
        iteration = self.first_iteration
        while True:
            yield from self.stream.iteration(iteration)[self.rank].tolist()
            iteration += 1


class PackLoader:
    """The microbatches of a rank's packs, which remembers those of an iteration so that it can be run again.

    `reading()` is a context entered around the wait for each, for those who measure.
    """

    def __init__(
        self,
        dataset: Any,
        order: Iterable[Any],
        num_workers: int = 0,
        reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`dataset[what]` is a `Microbatch` for all that `order` has, as a `PackDataset` or `ImageShardDataset`."""
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
        """Forget the packs taken before."""
        self.taken.clear()

    def close(self) -> None:
        """End the processes that read ahead; there are no more packs then."""
        self._batches.close()

    def reread(self) -> Iterator[Microbatch]:
        """The packs taken since, read once more."""
        return (self.dataset[pack] for pack in tuple(self.taken))


def microbatches(dataset: Any, order: Iterable[Any], num_workers: int = 0) -> Generator[Microbatch, None, None]:
    """The microbatches of a rank's packs, on the host, for `Arrivals` to take.

    Images are read ahead by `num_workers` processes; the rest is read here, which takes less than to hand it over.
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
        worker_init_fn=end_with_starter,
        generator=torch.Generator(),  # for the workers' seeds: torch's own is dropout's where there is no CUDA
    )
    yield from loader


@cache
def _start_forkserver() -> None:
    """Start the process that workers are forks of, those for evaluations too.

    It has imported what they need, and what the main module imports, which Python runs anew in each; it sees no GPU:
    workers neither open one nor import what is for GPUs.
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
    """Where a resumed run goes on: the packs consumed say it, at any data-parallel size.

    Raises UserError if the global batch changed, so that the position falls inside an iteration.
    """
    if consumed_packs % packs_an_iteration:
        raise UserError(
            f"resuming after {consumed_packs} packs, which is no whole number of iterations of {packs_an_iteration} "
            "packs; resume with the --global-batch-size the run was started with"
        )
    return consumed_packs // packs_an_iteration


def samples_before(stream: PackStream, index: PackedIndex, iteration: int) -> int:
    """Samples that the iterations before this one run, over all ranks; padding is none, a wide pack's count once."""
    sizes = np.append(np.diff(index.pack_offsets), 0)  # an empty pack is number -1: the last entry
    assert EMPTY_PACK == -1
    seats = sizes / np.append([1] * index.num_packs if index.teams is None else index.teams.pack_widths, 1)
    starts = range(0, iteration, 1000)
    return round(sum(seats[stream.iterations(start, min(start + 1000, iteration))].sum() for start in starts))
