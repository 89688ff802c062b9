"""Online balancing for loops without packing: the samples of a step are redistributed over ranks before each phase.

    read       each rank reads its own, at random            0: a b | 1: c d
    vision     balanced in tiles: pixels are sent            0: a d | 1: b c
    language   balanced in tokens: features are sent once    0: b d | 1: a c     one sequence, attention per sample

After OrchMLLM (arXiv 2503.23830), of which only the abstract is known; see `omnibal_ext.rebalance`. The loss, a mean
over the counted tokens of all ranks, is that of the batches as they were read.
"""

import math
import queue
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.vlm.data.batches import IGNORED, boundaries, join_words
from megatron.vlm.data.exchange import Route, exchange
from omnibal_ext.arrays import Ints
from omnibal_ext.rebalance.phases import Phase
from omnibal_ext.rebalance.plan import PhaseInput, PhasePlacement, plan_step

VISION, LANGUAGE = "vision", "language"
BYTES_A_NUMBER = 4.0
BYTES_A_TOKEN = 16.0  # and its label


@dataclass(frozen=True)
class StreamStep:
    """One rank's work in a step, and where its features go between the phases."""

    pixels: Tensor
    """[tiles, 3, size, size] of this rank's samples in the vision phase."""
    route: Route
    """From each sample's rank in the vision phase to its rank in the language phase, in features."""
    group: Any
    """A process group for features only: gradient reductions run concurrently, in another order."""
    batch: dict[str, Any] | None
    """This rank's samples in the language phase as one sequence with boundaries, without pixels; None: no samples."""
    counted: int
    """Tokens of all ranks that count in the loss."""
    samples: int
    """Of all ranks."""
    placed: Mapping[str, PhasePlacement]

    def send(self, features: Tensor) -> Tensor:
        """Features [image tokens, width] of `pixels` -> those of `batch`. Collective, as `exchange` says."""
        return exchange(features, self.route, self.group)


class StreamSteps:
    """Iterates over steps, each of `each` samples of every rank, until a rank has fewer left.

    A thread reads ahead, exchanges sizes, plans, and sends pixels and tokens over a process group of its own.
    """

    def __init__(
        self,
        samples: Iterable[Mapping[str, Tensor]],
        each: int,
        tokens_per_tile: int,
        feature_width: int,
        phases: Mapping[str, Phase] | None,
        ranks_per_node: int | None = None,
    ) -> None:
        """Samples are those of a `ChatDataset`. Collective: it makes process groups.

        Args:
            phases: cost of a sample by tiles (`VISION`) and by tokens (`LANGUAGE`); None: samples stay where they were
                read.
            ranks_per_node: ranks between which sending is cheap; default: all.
        """
        self.samples, self.each, self.phases = samples, each, phases
        self.tokens_per_tile, self.feature_width = tokens_per_tile, feature_width
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.ranks_per_node = ranks_per_node or self.ranks
        self.group, self.of_features = dist.new_group(backend="gloo"), dist.new_group()

    def __iter__(self) -> Iterator[StreamStep]:
        ready: queue.Queue[StreamStep | BaseException | None] = queue.Queue(maxsize=1)
        threading.Thread(target=self._prepare, args=(ready,), daemon=True).start()
        while (step := ready.get()) is not None:
            if isinstance(step, BaseException):
                raise step
            yield step

    def _prepare(self, ready: "queue.Queue[StreamStep | BaseException | None]") -> None:
        try:
            stream = iter(self.samples)
            while step := self._next(list(islice(stream, self.each))):
                ready.put(step)
            ready.put(None)
        except BaseException as error:  # raised by the reader of the queue
            ready.put(error)

    def _next(self, own: list[Mapping[str, Tensor]]) -> StreamStep | None:
        """The next step, or None if a rank has too few samples."""
        sizes = self._sizes_of_all(own)
        if sizes is None:
            return None
        tiles, tokens, counted = sizes.T
        home = np.repeat(np.arange(self.ranks), self.each)
        placed = self._place(home, own, tiles, tokens)
        seen, read = placed[VISION].rank_of, placed[LANGUAGE].rank_of
        pixels = self._send(torch.cat([sample["pixel_values"] for sample in own]), home, seen, tiles)
        words = torch.cat([torch.stack([sample["input_ids"], sample["labels"]], dim=1) for sample in own])
        here = self._send(words, home, read, tokens)
        route = Route(seen, read, tiles * self.tokens_per_tile, self.rank, self.ranks)
        batch = self._joined(here, tokens[read == self.rank])
        return StreamStep(pixels, route, self.of_features, batch, int(counted.sum()), len(home), placed)

    def _sizes_of_all(self, own: list[Mapping[str, Tensor]]) -> Ints | None:
        """Tiles, tokens and counted tokens of all ranks' samples, [ranks * each, 3]; None if a rank has too few."""
        mine = torch.full((self.each, 3), -1)
        for row, sample in zip(mine, own, strict=False):
            labels = sample["labels"][1:]
            sizes = len(sample["pixel_values"]), len(sample["input_ids"]), int((labels != IGNORED).sum())
            row[:] = torch.tensor(sizes)
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(found, mine, group=self.group)
        sizes_of_all = torch.cat(found).numpy()
        return sizes_of_all if (sizes_of_all >= 0).all() else None

    def _place(
        self, home: Ints, own: list[Mapping[str, Tensor]], tiles: Ints, tokens: Ints
    ) -> dict[str, PhasePlacement]:
        if self.phases is None:
            return {name: PhasePlacement(home, 1.0, 1.0, True) for name in (VISION, LANGUAGE)}
        a_tile = BYTES_A_NUMBER * math.prod(own[0]["pixel_values"].shape[1:])
        features = BYTES_A_NUMBER * self.feature_width * self.tokens_per_tile
        needs = {
            VISION: PhaseInput(self.phases[VISION], tiles, a_tile * tiles.astype(np.float64)),
            LANGUAGE: PhaseInput(
                self.phases[LANGUAGE],
                tokens,
                BYTES_A_TOKEN * tokens.astype(np.float64),
                VISION,
                features * tiles.astype(np.float64),
            ),
        }
        return plan_step(home, needs, self.ranks, self.ranks_per_node)

    def _send(self, rows: Tensor, source: Ints, target: Ints, counts: Ints) -> Tensor:
        if np.array_equal(source, target):
            return rows
        return Route(source, target, counts, self.rank, self.ranks).send(rows, self.group)

    @staticmethod
    def _joined(words: Tensor, lengths: Ints) -> dict[str, Any] | None:
        samples = [{"input_ids": part[:, 0], "labels": part[:, 1]} for part in words.split(lengths.tolist())]
        return join_words(samples) | boundaries(samples) if samples else None
