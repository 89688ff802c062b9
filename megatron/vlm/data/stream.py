"""Online balancing for loops without packing: the samples of a step are redistributed over ranks before each phase.

    read       each rank reads its own, at random            0: a b | 1: c d
    audio      balanced in mel frames: these are sent        0: a b | 1: c d     of models that hear
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
from omnibal_ext.arrays import Floats, Ints
from omnibal_ext.errors import UserError
from omnibal_ext.rebalance.phases import Phase
from omnibal_ext.rebalance.plan import PhaseInput, PhasePlacement, plan_step

AUDIO, VISION, LANGUAGE = "audio", "vision", "language"
INPUTS = {
    AUDIO: ("input_features", "feature_lengths"),
    VISION: ("pixel_values", "image_grid_thw"),
    LANGUAGE: ("input_ids", "labels", "position_ids"),
}
"""Tensors of a sample that a phase takes, as far as samples have them; the first has a row for each unit of work."""
NAMES = [name for names in INPUTS.values() for name in names]
BYTES_A_NUMBER = 4.0


class Route:
    """Rows that a rank sends to and receives from every other one when samples move between ranks.

        rank 0   a a c c c        ranks before   a 0, b 1, c 0, d 1        rank 0   b d d      after: a 1, b 0, c 1, d 0
        rank 1   b d d            rows           2    1    3    2          rank 1   a a c c c

    Every rank keeps its samples in the order of their numbers, and knows all ranks and row counts. (megatron.core's
    all-to-all takes device tensors only; pixels and token ids are on the host.)
    """

    def __init__(self, source: Ints, target: Ints, rows: Ints, rank: int, ranks: int) -> None:
        """Plan the route; `source`, `target`: rank of each of N samples before and after; `rows`: its number of rows;
        [N] each."""
        own, here = np.flatnonzero(source == rank), np.flatnonzero(target == rank)
        by_target = np.argsort(target[own], kind="stable")
        by_source = np.argsort(source[here], kind="stable")
        self.send_order = _rows_of(by_target, rows[own])
        self.receive_order = torch.argsort(_rows_of(by_source, rows[here]))
        self.send_counts = np.bincount(target[own], rows[own], ranks).astype(int).tolist()
        self.receive_counts = np.bincount(source[here], rows[here], ranks).astype(int).tolist()

    def send(self, rows: Tensor, group: Any) -> Tensor:
        """Exchange rows [n, ...] of this rank's samples before for rows [m, ...] of its samples after.

        Collective, and so is the backward: a rank without samples gives rows [0, ...] that require a gradient.
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
    """Return indices that bring concatenated samples into `order`; sample i has rows[i] rows: int64 [sum of rows]."""
    starts = np.cumsum(rows) - rows
    return torch.from_numpy(np.repeat(starts[order] - (np.cumsum(rows[order]) - rows[order]), rows[order])
                            + np.arange(int(rows.sum())))  # fmt: skip


@dataclass(frozen=True)
class StreamStep:
    """One rank's work in a step, and where its features go between the phases."""

    inputs: Mapping[str, Mapping[str, Tensor]]
    """Tensors of this rank's samples in each phase, end to end, by their names in a sample: `VISION`, and `AUDIO` for
    models that hear."""
    routes: Mapping[str, Route]
    """Routes of features from each sample's rank in these phases to its rank in the language phase."""
    group: Any
    """Process group for features only: gradient reductions run concurrently, in another order."""
    batch: dict[str, Any] | None
    """This rank's samples in the language phase as one sequence with boundaries, without pixels; None: no samples."""
    counted: int
    """Number of tokens of all ranks that count in the loss."""
    samples: int
    """Number of samples of all ranks."""
    placed: Mapping[str, PhasePlacement]

    @property
    def pixels(self) -> Tensor:
        """[tiles, 3, size, size] of this rank's samples in the vision phase."""
        return self.inputs[VISION]["pixel_values"]

    def send(self, features: Tensor, phase: str = VISION) -> Tensor:
        """Exchange features [tokens, width] of a phase's inputs for those of `batch`. Collective, as `Route.send` says:
        all ranks send those of all phases, in the same order."""
        return self.routes[phase].send(features, self.group)


class StreamSteps:
    """An iterator over steps, each of `each` samples of every rank, until a rank has fewer left.

    A thread reads ahead, exchanges sizes, plans, and sends inputs over a process group of its own.
    """

    def __init__(
        self,
        samples: Iterable[Mapping[str, Tensor]],
        each: int,
        tokens_per_tile: float,
        feature_width: int,
        phases: Mapping[str, Phase] | None,
        ranks_per_node: int | None = None,
        audio_token: int | None = None,
    ) -> None:
        """Read samples of a `ChatDataset`, with `position_ids` [T, 4] for M-RoPE and `image_grid_thw` [images, 3] for
        native resolution. Collective: it makes process groups.

        Args:
            phases: cost of a sample by mel frames (`AUDIO`), tiles (`VISION`) and tokens (`LANGUAGE`); None: samples
                stay where they were read.
            ranks_per_node: ranks between which sending is cheap; default: all.
            audio_token: the id that features of sounds replace; None: the model does not hear.

        Raises:
            UserError: a phase has no cost.
        """
        self.samples, self.each, self.phases, self.audio_token = samples, each, phases, audio_token
        self.tokens_per_tile, self.feature_width = tokens_per_tile, feature_width
        self.names = (*((AUDIO,) if audio_token is not None else ()), VISION, LANGUAGE)
        if phases is not None and (lacking := [name for name in self.names if name not in phases]):
            raise UserError(f"phases have no cost of {lacking[0]}: take them of a model that has it (phases_of)")
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
        """Return the next step, or None if a rank has too few samples."""
        own = list(islice(samples, self.each))
        sizes = self._sizes_of_all(own)
        if sizes is None:
            return None
        heard, counted, *columns = sizes.T
        rows = dict(zip(NAMES, columns, strict=True))
        features = {AUDIO: heard, VISION: np.rint(rows["pixel_values"] * self.tokens_per_tile).astype(np.int64)}
        home = np.repeat(np.arange(self.ranks), self.each)
        placed = self._place(home, own[0], rows, features)
        inputs = {phase: self._send(own, phase, home, placed[phase].rank_of, rows) for phase in self.names}
        reads = placed[LANGUAGE].rank_of
        routes = {
            phase: Route(placed[phase].rank_of, reads, features[phase], self.rank, self.ranks)
            for phase in self.names[:-1]
        }
        batch = _joined(inputs.pop(LANGUAGE), rows["input_ids"][reads == self.rank].tolist())
        return StreamStep(inputs, routes, self.of_features, batch, int(counted.sum()), len(home), placed)

    def _sizes_of_all(self, own: list[Mapping[str, Tensor]]) -> Ints | None:
        """Gather a row for each sample of all ranks: audio tokens, tokens in the loss, length of each tensor in
        `NAMES`. Return [ranks * each, 2 + names]; None if a rank has fewer than `each` samples. Collective."""
        mine = torch.full((self.each, 2 + len(NAMES)), -1)
        for row, sample in zip(mine, own, strict=False):
            heard = int((sample["input_ids"] == self.audio_token).sum()) if self.audio_token is not None else 0
            counted = int((sample["labels"][1:] != IGNORED).sum())
            row[:] = torch.tensor([heard, counted, *(len(sample.get(name, ())) for name in NAMES)])
        found = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(found, mine, group=self.group)
        sizes_of_all = torch.cat(found).numpy()
        return sizes_of_all if (sizes_of_all >= 0).all() else None

    def _place(
        self, home: Ints, sample: Mapping[str, Tensor], rows: Mapping[str, Ints], features: Mapping[str, Ints]
    ) -> dict[str, PhasePlacement]:
        """Choose a rank for each sample in every phase, from `rows` by tensor and `features` by phase; `home`: the rank
        that read it; `sample`: any one, for the size of a row."""
        if self.phases is None:
            return {name: PhasePlacement(home, 1.0, 1.0, True) for name in self.names}
        a_feature = BYTES_A_NUMBER * self.feature_width
        outputs = {phase: a_feature * features[phase].astype(np.float64) for phase in self.names[:-1]}
        needs = {
            phase: PhaseInput(
                self.phases[phase],
                rows[INPUTS[phase][0]],
                _input_bytes(phase, sample, rows),
                outputs if phase == LANGUAGE else {},
            )
            for phase in self.names
        }
        return plan_step(home, needs, self.ranks, self.ranks_per_node)

    def _send(
        self, own: list[Mapping[str, Tensor]], phase: str, home: Ints, target: Ints, rows: Mapping[str, Ints]
    ) -> dict[str, Tensor]:
        """Send samples from `home` to `target`, their ranks in a phase; return tensors of what arrives. Collective."""
        found = {name: torch.cat([sample[name] for sample in own]) for name in INPUTS[phase] if name in own[0]}
        if np.array_equal(home, target):
            return found
        routes = {name: Route(home, target, rows[name], self.rank, self.ranks) for name in found}
        return {name: routes[name].send(tensor, self.group) for name, tensor in found.items()}


def _input_bytes(phase: str, sample: Mapping[str, Tensor], rows: Mapping[str, Ints]) -> Floats:
    """Return bytes of each sample's inputs to a phase, [N], from its `rows` by tensor; `sample`: any of them, for the
    size of a row."""
    total = np.zeros(len(rows["input_ids"]))
    for name in INPUTS[phase]:
        if (tensor := sample.get(name)) is not None:
            total += rows[name] * float(tensor.element_size() * math.prod(tensor.shape[1:]))
    return total


def _joined(words: Mapping[str, Tensor], lengths: list[int]) -> dict[str, Any] | None:
    """Join samples of these `lengths` in tokens to one sequence with boundaries; None if there are none."""
    if not lengths:
        return None
    parts = zip(words["input_ids"].split(lengths), words["labels"].split(lengths), strict=True)
    samples = [{"input_ids": ids, "labels": labels} for ids, labels in parts]
    batch = join_words(samples) | boundaries(samples)
    if "position_ids" in words:
        batch["position_ids"] = words["position_ids"].T[:, None]
    return batch
