"""Forward and backward of a pack of random content through a single stage, to be timed; backward in one piece or split
into B and W."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from math import isqrt
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.utils import unwrap_model
from megatron.training.training import get_model
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.chain import Chain
from megatron.vlm.pipeline.stage import Stage
from megatron.vlm.pipeline.weight_gradients import Late, WeightGradients, accumulate
from megatron.vlm.profiling.stopwatch import Seconds, Timer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.joining.positions import Grid
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.modality import Size
from omnibal_ext.modalities.vision.architecture import NativeResolution
from omnibal_ext.modalities.vision.works import IMAGE_PATCHES


def wrapped_stage(chain: Chain, first: int, end: int, recompute_cheap: bool = False) -> Any:
    """Links [first, end) as a stage in Megatron's DDP wrapper, which accumulates gradients as in training.

    `recompute_cheap`: built to recompute norms and activation functions.
    """

    def provide(**_: object) -> Stage:
        return Stage(chain, first, end, recompute_cheap=tuple(range(first, end)) if recompute_cheap else ())

    (module,) = get_model(provide, ModelType.encoder_or_decoder)
    return module


class StagePass:
    """Forward and backward of one pack through a stage, with random input if it is not the first."""

    def __init__(self, chain: Chain, module: torch.nn.Module, pack: Microbatch) -> None:
        self.module, self.pack, self.stage = module, pack, unwrap_model(module)
        self.output: Tensor | None = None
        self.entering: Tensor | None = None
        if self.stage.first > 0:
            takes_images = self.stage.kinds[0] == "word_embed"
            rows = len(pack.image_positions) if takes_images and pack.image_positions is not None else None
            shape = chain.shape_before(self.stage.first, pack, rows)
            self.entering = torch.randn(shape, device="cuda", dtype=chain.language.pipeline_dtype)
            self.entering.requires_grad_(self.stage.sends_gradient)

    def forward(self) -> None:
        """Run the stage."""
        self.stage.set_input_tensor(self.entering)
        self.output = self.module(self.pack)

    def backward(self) -> None:
        """Compute the gradients of trained weights, and of the input if the previous stage needs it."""
        if self.stage.has_backward:
            assert self.output is not None
            torch.autograd.backward(self.output, torch.ones_like(self.output))


class SplitBackward:
    """Layers built for a split backward (zero-bubble schedules), run with microbatches in flight."""

    def __init__(self, args: Namespace, chain: Chain, first: int, count: int, pack: Microbatch) -> None:
        before, args.delay_wgrad_compute = args.delay_wgrad_compute, platform.HAS_TRANSFORMER_ENGINE
        self.chain = Chain.of(args, chain.architecture)
        self.module = wrapped_stage(self.chain, first, first + count)
        args.delay_wgrad_compute = before
        self.count, self.pack = count, pack
        self.gradients = WeightGradients()
        self.gradients.attach(unwrap_model(self.module))
        self.in_flight: list[StagePass] = []
        self.pending: list[list[Late]] = []
        self.timer = Timer()
        self.late_bytes = 0.0
        """Bytes of one layer that B keeps for W."""

    def run(self) -> Seconds:
        """Return seconds of (forward, B, W), each on a different microbatch, as in a schedule."""
        if not self.in_flight:
            self._start()
            self._start()
            self._backward()
        step = StagePass(self.chain, self.module, self.pack)
        passes = (partial(self._start, step), self._backward, self._weight_gradients)
        taken = self.timer(*passes, before=self._full_pass)
        storages = [tensor.untyped_storage() for late in self.pending[-1] for tensor in late.held]
        self.late_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) / self.count
        return taken

    def release(self) -> None:
        """Free the module; `run` is not called after this."""
        self.in_flight.clear()
        self.pending.clear()
        del self.module

    def _full_pass(self) -> None:
        self._start()
        self._backward()
        self._weight_gradients()

    def _start(self, step: StagePass | None = None) -> None:
        self.in_flight.append(step or StagePass(self.chain, self.module, self.pack))
        self.in_flight[-1].forward()

    def _backward(self) -> None:
        late: list[Late] = []
        with self.gradients.delaying(late):
            self.in_flight.pop(0).backward()
        self.pending.append(late)

    def _weight_gradients(self) -> None:
        accumulate(self.pending.pop(0))


SOUND_FRAMES = 3000
"""Mel frames of a sound: half a minute."""


def synthetic_pack(architecture: Architecture, units: Mapping[Size, int], lengths: Sequence[int]) -> Microbatch:
    """A pack of samples of these lengths (tokens) that begins with as many image tokens as fit.

    `units`: of each size that it has any of. At native resolution tiles are patches, in nearly square images of up to
    `IMAGE_PATCHES`. Mel frames are of the first sample's sounds, whose tokens are at the end; more of them than the
    pack has overwrite each other.
    """
    tiles, frames = units.get("tiles", 0), units.get("frames", 0)
    size, tokens = architecture.vision.image_size, sum(lengths)
    grids: tuple[Grid, ...] = ()
    if architecture.vision.native:
        grids, starts = _images(architecture.vision.native, tiles, lengths)
    else:
        starts = _tile_starts(architecture, tiles, lengths)
    if grids:
        tiles = sum(rows * columns for _, rows, columns in grids)
    ids = torch.randint(0, architecture.language.vocab_size, (tokens,), device="cuda")
    image_tokens = torch.arange(min(tokens, architecture.image_tokens(tiles)), device="cuda")
    heard = _sounds(architecture.audio, frames, tokens, len(lengths)) if architecture.audio else {}
    return Microbatch(
        tiles=tiles,
        lengths=tuple(lengths),
        samples=len(lengths),
        useful_tokens=tokens,
        prefixes=tuple(lengths),
        pixels=torch.randn(tiles, 3, size, size, device="cuda"),
        input_ids=ids,
        image_positions=image_tokens,
        image_sources=image_tokens,
        labels=ids,
        loss_mask=torch.ones(tokens, device="cuda"),
        grids=grids,
        image_starts=starts,
        **heard,
    )


def _sounds(audio: AudioArchitecture, frames: int, tokens: int, samples: int) -> dict[str, Any]:
    """The fields of a `Microbatch` with sounds of so many mel frames."""
    each = tuple(min(SOUND_FRAMES, frames - begin) for begin in range(0, frames, SOUND_FRAMES))
    heard = torch.arange(sum(map(audio.tokens, each)), device="cuda")
    return {
        "sounds": (each, *[()] * (samples - 1)),
        "mels": torch.randn(frames, audio.mel_bins, device="cuda"),
        "audio_positions": tokens - 1 - heard % tokens,
    }


def _tile_starts(architecture: Architecture, tiles: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """First token of each tile whose tokens are all in one sample."""
    edges, per_tile = _edges(lengths), architecture.image_tokens_per_tile
    starts = (tile * per_tile for tile in range(tiles))
    return tuple(start for start in starts if _fits(start, per_tile, edges))


def _edges(lengths: Sequence[int]) -> list[int]:
    """Where samples of these lengths begin, and the end of the last."""
    return [sum(lengths[:n]) for n in range(len(lengths) + 1)]


def _fits(start: int, tokens: int, edges: Sequence[int]) -> bool:
    """Whether so many tokens from `start` on are all in one sample."""
    return any(a <= start and start + tokens <= b for a, b in pairwise(edges))


def _images(native: NativeResolution, patches: int, lengths: Sequence[int]) -> tuple[tuple[Grid, ...], tuple[int, ...]]:
    """(grids, first token of each image); the sequence's end for the first that crosses samples, and all behind it."""
    merge, grids, starts, left, begin, edges = native.merge, [], [], patches, 0, _edges(lengths)
    while left >= merge**2:
        most = min(left, IMAGE_PATCHES)
        columns = isqrt(most) // merge * merge
        rows = most // columns // merge * merge
        count = rows * columns // merge**2
        grids.append((1, rows, columns))
        begin = begin if _fits(begin, count, edges) else edges[-1]
        starts.append(begin)
        left, begin = left - rows * columns, min(begin + count, edges[-1])
    return tuple(grids), tuple(starts)


def equal_lengths(tokens: int, samples: int) -> list[int]:
    """Lengths of `samples` samples with `tokens` in all, as equal as possible."""
    return [tokens // samples + (sample < tokens % samples) for sample in range(samples)]
