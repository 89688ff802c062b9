"""Online balancing for loops without packing: the samples of a step are redistributed over ranks before each phase.

    read       each rank reads its own, at random            0: a b | 1: c d
    vision     balanced in tiles: pixels are sent            0: a d | 1: b c
    language   balanced in tokens: features are sent once    0: b d | 1: a c     one sequence, attention per sample

After OrchMLLM (arXiv 2503.23830), of which only the abstract is known; see `omnibal_ext.rebalance`. The loss, a mean
over the counted tokens of all ranks, is that of the batches as they were read.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.vlm.data.batches import IGNORED, boundaries, join_words
from omnibal_ext.arrays import Ints
from omnibal_ext.rebalance.phases import Phase
from omnibal_ext.rebalance.plan import PhaseInput, PhasePlacement, plan_step

VISION, LANGUAGE = "vision", "language"
BYTES_A_NUMBER = 4.0
BYTES_A_TOKEN = 16.0  # and its label


class Route:
    """The rows that a rank sends to and receives from every other one, where samples go from ranks to others.

        rank 0   a a c c c        ranks before   a 0, b 1, c 0, d 1        rank 0   b d d      after: a 1, b 0, c 1, d 0
        rank 1   b d d            rows           2    1    3    2          rank 1   a a c c c

    Every rank keeps its samples in the order of their numbers, and knows all ranks and row counts. (megatron.core's
    all-to-all takes device tensors only; pixels and token ids are on the host.)
    """

    def __init__(self, source: Ints, target: Ints, rows: Ints, rank: int, ranks: int) -> None:
        """`source` and `target`: rank of each of N samples before and after; `rows`: its number of rows. [N] each."""
        own, here = np.flatnonzero(source == rank), np.flatnonzero(target == rank)
        by_target = np.argsort(target[own], kind="stable")
        by_source = np.argsort(source[here], kind="stable")
        self.send_order = _rows_of(by_target, rows[own])
        self.receive_order = torch.argsort(_rows_of(by_source, rows[here]))
        self.send_counts = np.bincount(target[own], rows[own], ranks).astype(int).tolist()
        self.receive_counts = np.bincount(source[here], rows[here], ranks).astype(int).tolist()

    def send(self, rows: Tensor, group: Any) -> Tensor:
        """Rows [n, ...] of the samples of this rank before -> rows [m, ...] of its samples after.

        Collective, and so is the backward pass: a rank without samples gives rows [0, ...] that require a gradient.
        """
        ordered = rows.index_select(0, self.send_order.to(rows.device))
        arrived: Tensor = _AllToAll.apply(ordered, self.send_counts, self.receive_counts, group)
        return arrived.index_select(0, self.receive_order.to(rows.device))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(arrived, rows, received, sent, group)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(gradient.contiguous(), ctx.received, ctx.sent, ctx.group), None, None, None


def _rows_of(order: Ints, rows: Ints) -> Tensor:
    """Indices that bring concatenated samples into `order`; sample i has rows[i] rows: int64 [sum of rows]."""
    starts = np.cumsum(rows) - rows
    return torch.from_numpy(np.repeat(starts[order] - (np.cumsum(rows[order]) - rows[order]), rows[order])
                            + np.arange(int(rows.sum())))  # fmt: skip


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
        """Features [image tokens, width] of `pixels` -> those of `batch`. Collective, as `Route.send` says."""
        return self.route.send(features, self.group)


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
        samples = iter(self.samples)
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self._next, samples)
            while (step := ahead.result()) is not None:
                ahead = reader.submit(self._next, samples)
                yield step

    def _next(self, samples: Iterator[Mapping[str, Tensor]]) -> StreamStep | None:
        """The next step, or None if a rank has too few samples."""
        own = list(islice(samples, self.each))
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
        parts = here.split(tokens[read == self.rank].tolist())
        batch = [{"input_ids": part[:, 0], "labels": part[:, 1]} for part in parts]
        joined = join_words(batch) | boundaries(batch) if batch else None
        return StreamStep(pixels, route, self.of_features, joined, int(counted.sum()), len(home), placed)

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
                {VISION: features * tiles.astype(np.float64)},
            ),
        }
        return plan_step(home, needs, self.ranks, self.ranks_per_node)

    def _send(self, rows: Tensor, source: Ints, target: Ints, counts: Ints) -> Tensor:
        if np.array_equal(source, target):
            return rows
        return Route(source, target, counts, self.rank, self.ranks).send(rows, self.group)
