"""From a packed index to the microbatches of one pipeline stage, and where a resumed run continues."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from multiprocessing import forkserver
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatron.vlm import log_noise, platform
from megatron.vlm.data.dataset import ChatDataset, Sample
from megatron.vlm.data.pack_media import Shown, all_broken, order_tensors, read_mels, read_tiles
from megatron.vlm.data.pack_shard import shard_of_place, with_filler
from megatron.vlm.microbatch import Microbatch, segment_ids
from omnibal_ext.errors import UserError
from omnibal_ext.launch.processes import exit_with_parent
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.shards import TokenSpan, shard_tokens


@dataclass(frozen=True)
class Needs:
    """Which tensors of a microbatch a stage's layers read. Every stage gets the sizes."""

    pixels: bool
    tokens: bool
    labels: bool
    targets: bool = False
    mels: bool = False

    @classmethod
    def of(cls, kinds: tuple[str, ...], language: LanguageArchitecture) -> "Needs":
        """For a slice of the chain."""
        return cls(
            pixels="patch_embed" in kinds,
            tokens="word_embed" in kinds or ("llm" in kinds and language.layer_inputs is not None),
            labels="head" in kinds,
            targets="llm" in kinds and language.experts is not None,
            mels="audio_embed" in kinds,
        )


class PackDataset(Dataset):
    """Pack number -> Microbatch on the host; pixels are uint8, to be normalised on the device. Mel frames are fp32."""

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

        `decodes`: if false, another rank broadcasts pixels and mel frames, and meta tensors have their shapes. `rank`:
        the data-parallel rank, which decides its shard of a wide pack.

        Raises UserError if the index was made from another dataset, is damaged, or has wide packs of sounds.
        """
        index.check({"built_from.data.manifest": data.manifest})
        index.verify()
        index.check_samples(len(data))
        wide: list[int] = [] if index.wide is None else np.flatnonzero(index.wide.pack_widths > 1).tolist()
        if any(data.frames[index.samples(pack)].any() for pack in wide):
            raise UserError(
                f"{index.folder}: has packs with sounds that several ranks share, which is not supported; pack again "
                "without --widths"
            )
        self.data, self.index, self.needs, self.sequence_multiple = data, index, needs, sequence_multiple
        self.decodes, self.rank = decodes, rank
        self.sources = data.sources

    @property
    def reads_images(self) -> bool:
        """Whether this rank decodes images or sounds."""
        return (self.needs.pixels or self.needs.mels) and self.decodes

    def __getitem__(self, pack: int) -> Microbatch:
        """A pack; of a wide one this rank's shard. Images and sounds with placeholders are in `broken`."""
        samples = [*map(self.data.sample, self.index.samples(pack))] if pack >= 0 else []
        real, width = [sample.length for sample in samples], self.index.width(pack) if pack >= 0 else 1
        lengths, spans = self._segments(real, width)
        batch = Microbatch(
            tiles=sum(sample.tiles for sample in samples),
            lengths=tuple(lengths),
            samples=len(samples),
            useful_tokens=sum(real),
            useful_squares=sum(length * length for length in real),
            pixel_statistics=self.data.normalization if self.needs.pixels else None,
            prefixes=tuple(sample.prefix for sample in samples) if self.data.rule.prefix_attention else (),
            sample_lengths=tuple(real) if self.needs.targets else (),
            pack=pack,
            sample_ids=tuple(sample.number for sample in samples),
            sounds=sounds_of(samples),
            **self._text(samples, lengths, width),
            **self._images(samples, lengths),
        )
        looks = self.needs.pixels or width > 1
        shown = [Shown(one, image) for one in samples if looks and one.tiles for image in one.images]
        if width > 1:
            batch, shown = shard_of_place(batch, spans, shown, self.rank % width)
        if self.needs.pixels:
            pixels, broken = read_tiles(shown, self.data.manifest["tile_size"], self.decodes)
            batch = replace(batch, pixels=pixels, broken=broken)
        if self.needs.mels and self.data.sound_rule:
            mels, silent = read_mels(samples, self.data.sound_rule.encoder.mel_bins, self.decodes)
            batch = replace(batch, mels=mels, broken=all_broken(batch.broken, silent))
        return batch

    def _segments(self, real: Sequence[int], width: int) -> tuple[Sequence[int], Sequence[Sequence[TokenSpan]]]:
        """Lengths of all segments of a pack, padding included; of a wide one the spans of every place, too."""
        if width > 1:
            return with_filler(shard_tokens(real, width, self.sequence_multiple), real, self.sequence_multiple)
        lengths = [max(real, default=0)] * len(real) if self.index.pad else [*real]
        if filler := -sum(lengths) % self.sequence_multiple if lengths else self.sequence_multiple:
            lengths.append(filler)
        return lengths, ()

    def _text(self, samples: Sequence[Sample], lengths: Sequence[int], width: int) -> dict[str, Any]:
        """What the stage needs of the text: ids, labels, which tokens count, which are of images and sounds."""
        needs, found = self.needs, dict[str, Any]()
        if not (needs.tokens or needs.labels or needs.targets):
            return found
        ids = torch.full((sum(lengths),), self.data.manifest["pad_token_id"], dtype=torch.long)
        mask = torch.zeros(len(ids), dtype=torch.float32)  # 1 where the next token of the same sample is supervised
        for start, sample in zip(accumulate(lengths, initial=0), samples, strict=False):
            tokens, counts = sample.text
            ids[start : start + len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
            mask[start : start + len(counts) - 1] = torch.from_numpy(counts[1:].astype(np.float32))
        if needs.targets or (needs.labels and width > 1):
            found["targets"] = torch.stack([part.sum() for part in mask.split(list(lengths))])
        if needs.tokens:
            shown = torch.isin(ids, torch.tensor(self.data.image_tokens)).nonzero().squeeze(1)
            found |= {"input_ids": ids, "image_positions": shown}
            if self.data.hears:
                heard = torch.isin(ids, torch.tensor(self.data.audio_tokens))
                found["audio_positions"] = heard.nonzero().squeeze(1)
        if needs.labels:
            sources = torch.zeros(len(lengths), dtype=torch.long)  # padding counts as the first file's
            sources[: len(samples)] = torch.from_numpy(self.sources.of(np.array([one.number for one in samples])))
            found |= {"labels": torch.roll(ids, -1), "supervised": mask.nonzero().squeeze(1), "loss_mask": mask}
            found |= {"segment_ids": segment_ids(lengths), "sources": sources}
        return found

    def _images(self, samples: Sequence[Sample], lengths: Sequence[int]) -> dict[str, Any]:
        """For all stages: where each run of image tokens starts and, at native resolution, its grid, the seconds
        between a video's steps, and how it and its own sound take turns. If tiles are joined, which features each image
        token is."""
        rule, begins = self.data.rule, accumulate(lengths, initial=0)
        shown = [pair for pair in zip(begins, samples, strict=False) if pair[1].tiles]
        starts = [begin + one for begin, sample in shown if rule.needs_image_starts for one in sample.image_starts]
        images = [image for _, sample in shown if rule.native for image in sample.images]
        turns = [one for _, sample in shown if rule.native for one in sample.turns]
        pairs = (pair for one in samples for pair in zip(one.images, one.orders, strict=True))
        each, joins = self.data.manifest["tokens_per_tile"], rule.joins_tiles and self.needs.tokens
        return {
            "grids": tuple(grid for image in images for grid in image.grids),
            "image_starts": tuple(starts),
            "seconds": tuple(image.film.seconds if image.film else 1.0 for image in images for _ in image.grids),
            "turns": tuple(turns) if any(turns) else (),
            **(order_tensors((image.tiles * each, order) for image, order in pairs) if joins else {}),
        }


def sounds_of(samples: Sequence[Sample]) -> tuple[tuple[int, ...], ...]:
    """Mel frames of each sample's sounds; () if there are none."""
    found = tuple(tuple(sound.frames for sound in sample.sounds) for sample in samples)
    return found if any(found) else ()


def microbatches(
    dataset: Any, order: Iterable[Any], num_workers: int = 0,
    reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Generator[Microbatch, None, None]:  # fmt: skip
    """The microbatches that a dataset has for the items of `order`, on the host (pinned with CUDA).

    `num_workers` processes read datasets with images; others are read here, which is faster than to transfer them.
    `reading()` makes a context manager for the wait for each microbatch, for timers. Closing it ends the processes.
    """
    workers = num_workers if dataset.reads_images else 0
    if workers:
        _start_forkserver()
    loader = DataLoader(
        dataset, batch_size=None, sampler=order, num_workers=workers,
        multiprocessing_context="forkserver" if workers else None,
        pin_memory=platform.HAS_CUDA,
        worker_init_fn=_begin_worker,
        generator=torch.Generator(),  # for workers' seeds: on CPU the default one is dropout's
    )  # fmt: skip
    batches = iter(loader)
    while True:
        with reading():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def _begin_worker(_: int) -> None:
    """Have a worker end with its rank, and open its files without a line for each."""
    exit_with_parent()
    log_noise.quieten_start_up()


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
