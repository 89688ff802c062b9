"""Microbatches of one pipeline stage, loaded by a packed index, and where a resumed run continues."""

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
from torch.utils.data import DataLoader

from megatron.vlm import log_noise, platform
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.look_ahead import LookAhead, Planned, PlannedDataset, with_following
from megatron.vlm.data.pack_shard import shard_of_rank, with_filler
from megatron.vlm.data.sample import Sample
from megatron.vlm.media import Media
from megatron.vlm.microbatch import Microbatch, segment_ids
from omnibal_ext.errors import UserError
from omnibal_ext.launch.processes import exit_with_parent
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.modality import ENCODED, VISION, Size
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.shards import TokenSpan, shard_tokens


@dataclass(frozen=True)
class Needs:
    """Tensors of a microbatch that a stage's layers read. Every stage gets the sizes."""

    media: frozenset[Size]
    """Sizes of the encoders whose values the stage reads."""
    tokens: bool
    labels: bool
    targets: bool = False

    @classmethod
    def of(cls, kinds: tuple[str, ...], language: LanguageArchitecture) -> "Needs":
        """Return what a stage reads whose layers are of these `kinds`, such as "word_embed", "llm" and "head"."""
        return cls(
            media=frozenset(one.size for one in ENCODED if one.kinds[0] in kinds),
            tokens="word_embed" in kinds or ("llm" in kinds and language.layer_inputs is not None),
            labels="head" in kinds,
            targets="llm" in kinds and language.experts is not None,
        )


class PackDataset(PlannedDataset):
    """Dataset: pack number -> Microbatch on the host; pixels uint8, to be normalised on the device, mel frames fp32."""

    def __init__(
        self,
        data: ChatDataset,
        index: PackedIndex,
        needs: Needs,
        sequence_multiple: int = 1,
        decodes: bool = True,
        rank: int = 0,
    ) -> None:
        """Check the index. T is padded to a multiple of `sequence_multiple` (`microbatch.sequence_multiple`).

        `decodes`: if false, another rank broadcasts pixels and mel frames, and meta tensors have their shapes. `rank`:
        the data-parallel rank, which decides its shard of a wide pack.

        Raises UserError if the index was made from another dataset, is damaged, or has wide packs of sounds.
        """
        index.check({"built_from.data.manifest": data.manifest})
        index.verify()
        index.check_samples(len(data))
        wide: list[int] = [] if index.wide is None else np.flatnonzero(index.wide.pack_widths > 1).tolist()
        for one in data.modalities[1:]:
            if any(data.amounts[one][index.samples(pack)].any() for pack in wide):
                raise UserError(
                    f"{index.folder}: has packs with {one.inputs} that several ranks share, which is not supported; "
                    "pack again without --widths"
                )
        self.data, self.index, self.needs, self.sequence_multiple = data, index, needs, sequence_multiple
        self.decodes, self.rank = decodes, rank
        self.sources, self.readers = data.sources, data.readers

    @property
    def reads_media(self) -> bool:
        """Whether this rank decodes images or sounds."""
        return bool(self.needs.media) and self.decodes

    def planned(self, pack: int) -> Planned:
        """Return a pack without what is decoded; of a wide one this rank's shard."""
        samples = [*map(self.data.sample, self.index.samples(pack))] if pack >= 0 else []
        real, width = [sample.length for sample in samples], self.index.width(pack) if pack >= 0 else 1
        lengths, spans = self._segments(real, width)
        batch = Microbatch(
            lengths=tuple(lengths),
            samples=len(samples),
            useful_tokens=sum(real),
            useful_squares=sum(length * length for length in real),
            prefixes=tuple(sample.prefix for sample in samples) if self.data.rule.prefix_attention else (),
            sample_lengths=tuple(real) if self.needs.targets else (),
            pack=pack,
            sample_ids=tuple(sample.number for sample in samples),
            **self._text(samples, lengths, width),
        )
        batch = replace(batch, media=self._media(samples, batch))
        needed = self.needs.media | ({VISION.size} if width > 1 else set())
        inputs = {size: reader.inputs(samples) for size, reader in self.readers.items() if size in needed}
        if width > 1:
            batch, inputs[VISION.size] = shard_of_rank(batch, spans, inputs[VISION.size], self.rank % width)
        return Planned(batch, {size: some for size, some in inputs.items() if size in self.needs.media})

    def _media(self, samples: Sequence[Sample], batch: Microbatch) -> dict[Size, Media]:
        """Return each encoder's inputs without values; if the stage reads tokens, also the positions of theirs."""
        begins, found = [*accumulate(batch.lengths, initial=0)], dict[Size, Media]()
        for size, reader in self.readers.items():
            found[size] = reader.media(samples, begins, self.needs.tokens)
            if batch.input_ids is not None:
                placed = torch.isin(batch.input_ids, torch.tensor(self.data.media_tokens[size]))
                found[size] = replace(found[size], positions=placed.nonzero().squeeze(1))
        return found

    def _segments(self, real: Sequence[int], width: int) -> tuple[Sequence[int], Sequence[Sequence[TokenSpan]]]:
        """Return lengths of all segments of a pack, padding included; for a wide one also the spans of every rank."""
        if width > 1:
            return with_filler(shard_tokens(real, width, self.sequence_multiple), real, self.sequence_multiple)
        lengths = [max(real, default=0)] * len(real) if self.index.pad else [*real]
        if filler := -sum(lengths) % self.sequence_multiple if lengths else self.sequence_multiple:
            lengths.append(filler)
        return lengths, ()

    def _text(self, samples: Sequence[Sample], lengths: Sequence[int], width: int) -> dict[str, Any]:
        """Return what the stage needs of the text: ids, labels, which tokens count in the loss; with padding."""
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
            found["input_ids"] = ids
        if needs.labels:
            sources = torch.zeros(len(lengths), dtype=torch.long)  # padding counts as the first file's
            sources[: len(samples)] = torch.from_numpy(self.sources.of(np.array([one.number for one in samples])))
            found |= {"labels": torch.roll(ids, -1), "supervised": mask.nonzero().squeeze(1), "loss_mask": mask}
            found |= {"segment_ids": segment_ids(lengths), "sources": sources}
        return found


def microbatches(
    dataset: Any, order: Iterable[Any], num_workers: int = 0,
    reading: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Generator[Microbatch, None, None]:  # fmt: skip
    """Yield the microbatches that a dataset has for the items of `order`, on the host (pinned with CUDA).

    `num_workers` processes read what has to be decoded; the rest are read here, which is faster than to transfer them.
    `reading()` makes a context manager for the wait for each microbatch, for timers. Closing it ends the processes.
    Where media lie in a store, those of the next microbatch are read meanwhile.
    """
    workers = num_workers if dataset.reads_media else 0
    if isinstance(dataset, PlannedDataset) and dataset.reads_media and dataset.data.sources.are_stored:
        dataset, order = LookAhead(dataset), with_following(order, workers)
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
        if isinstance(batch, UserError):
            raise batch
        yield batch


def _begin_worker(_: int) -> None:
    """Make a data worker end with its rank, and keep the log lines of opened files quiet."""
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
    """Return the iteration at which a resumed run continues, at any data-parallel size. Raises UserError if the global
    batch size changed and the position is inside of an iteration."""
    if consumed_packs % packs_an_iteration:
        raise UserError(
            f"resuming after {consumed_packs} packs, which is no whole number of iterations of {packs_an_iteration} "
            "packs; resume with the --global-batch-size the run was started with"
        )
    return consumed_packs // packs_an_iteration
