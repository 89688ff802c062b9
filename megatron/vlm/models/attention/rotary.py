"""Rotary positions of a pack, counted from the start of each sample."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.vlm import platform
from megatron.vlm.media import Images
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.attention.rotation import Rotation, rotation
from omnibal_ext.errors import UserError
from omnibal_ext.joining.positions import text_and_image_positions
from omnibal_ext.modalities.language.rope import Rope, RopeScaling
from omnibal_ext.modalities.vision.architecture import NativeResolution


class Rotary(torch.nn.Module):
    """A module that makes the rotation of every token, by its position inside its sample."""

    def __init__(
        self, rope: Rope, width: int, max_positions: int | None = None, native: NativeResolution | None = None
    ) -> None:
        super().__init__()
        self.rope, self.width, self.max_positions, self.native = rope, width, max_positions, native
        scaling = rope.scaling
        self.scaling = scaling if scaling and scaling.kind == "dynamic" else None
        # No buffers: a model in half precision would round them.
        self.axes = torch.tensor(rotary_axes(rope.sections, rope.interleaved))
        self.frequencies = rotary_frequencies(rope, width)

    def forward(self, batch: Microbatch, dtype: torch.dtype) -> Rotation:
        """Return the rotation of a pack's query and key, in `dtype`. Raises UserError if a sample is too long."""
        scaling = self.rope.scaling
        found = rotation(self.angles(batch), dtype, scaling.attention_factor if scaling else 1.0)
        if scaling is None or not scaling.query_beta:
            return found
        contexts = torch.floor(batch.positions / scaling.original_positions)
        factors = 1 + scaling.query_beta * torch.log(1 + contexts)
        return found._replace(query_factors=factors.to(dtype)[:, None, None, None])

    def angles(self, batch: Microbatch) -> Tensor:
        """Return tokens' angles, [T, 1, 1, rotary width]. Raises UserError if a sample is too long for the model."""
        longest = max(batch.full_pack.lengths)
        if self.max_positions is not None and longest > self.max_positions:
            raise UserError(
                f"a sample of {longest} tokens; beyond {self.max_positions} this model slides a window "
                "(config.json), which is not done here; reject longer samples in preprocessing (--max-tokens)"
            )
        self.frequencies = platform.once_on(batch.positions.device, self.frequencies)
        if len(self.axes):
            self.axes = platform.once_on(batch.positions.device, self.axes)
            return self._by_axis(batch)
        if self.scaling and longest > self.scaling.original_positions:
            return self._of_long_samples(batch, self.scaling)
        angles = torch.outer(batch.positions.float(), self.frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]

    def _of_long_samples(self, batch: Microbatch, scaling: RopeScaling) -> Tensor:
        """Compute angles under dynamic scaling: the frequencies of each sample depend on its length."""
        lengths = batch.full_pack.lengths
        widths = torch.stack(
            [stretched_frequencies(self.rope.theta, self.width, scaling, length) for length in lengths]
        )
        ids = platform.to_device(batch.host_segment_ids)
        angles = batch.positions.float()[:, None] * platform.to_device(widths)[ids]
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]

    def _by_axis(self, batch: Microbatch) -> Tensor:
        """Compute M-RoPE's angles: each frequency turns by the position on one axis, time, row or column."""
        pack, native = batch.full_pack, self.native
        assert native is not None
        seen = Images.of(pack)
        positions = text_and_image_positions(pack.lengths, seen.grids, seen.starts, native, seen.seconds, seen.turns)
        if batch.shard is not None:
            positions = positions[:, batch.shard.rows.numpy()]
        angles = platform.to_device(torch.from_numpy(positions)).float()[self.axes].T * self.frequencies
        return torch.cat([angles, angles], dim=-1)[:, None, None, :]


def rotary_axes(sections: Sequence[int], interleaved: bool) -> list[int]:
    """Return the axis of each frequency of M-RoPE: 0 time, 1 row, 2 column; section by section.

    Interleaved, they take turns while rows and columns have some left, and time has the rest: 0 1 2 0 1 2 ... 0 0.
    """
    if not interleaved:
        return [axis for axis, section in enumerate(sections) for _ in range(section)]
    return [number % 3 if number < 3 * sections[number % 3] else 0 for number in range(sum(sections))]


def stretched_frequencies(theta: float, width: int, scaling: RopeScaling, length: int) -> Tensor:
    """Return radians a position for a sample of `length`, fp32 [width / 2]: the base grows with it (NTK-aware)."""
    longer = max(length, scaling.original_positions) / scaling.original_positions
    base = (scaling.factor * longer - (scaling.factor - 1)) ** (width / (width - 2))
    return _plain_frequencies(theta * base, width)


def _plain_frequencies(theta: float, width: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


def rotary_frequencies(rope: Rope, width: int) -> Tensor:
    """Return radians a position, fp32 [width / 2], scaled as the model says; under dynamic scaling a short sample's."""
    frequencies = _plain_frequencies(rope.theta, width)
    match rope.scaling:
        case None | RopeScaling(kind="dynamic"):
            return frequencies
        case RopeScaling(kind="linear", factor=factor):
            return frequencies / factor
        case RopeScaling(kind="proportional", factor=factor, turning=share):
            turning = int(share * width // 2)
            return frequencies / factor * (torch.arange(len(frequencies)) < turning)
        case RopeScaling(kind="llama3") as scaling:
            return _long_waves_slower(frequencies, scaling)
        case RopeScaling(kind="yarn") as scaling:
            return _yarn(frequencies, scaling, rope.theta)
        case scaling:
            raise UserError(
                f"rotary scaling {scaling.kind!r} is not known; known: linear, dynamic, llama3, yarn, proportional"
            )


def _yarn(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    """Scale frequencies by YaRN: as Llama 3.1's, but partly by the index of the frequency, not by its wave."""
    width = 2 * len(frequencies)

    def number(waves_in_context: float) -> float:
        return width * math.log(scaling.original_positions / (waves_in_context * 2 * math.pi)) / (2 * math.log(theta))

    first, last = number(scaling.high_frequency_factor), number(scaling.low_frequency_factor)
    if scaling.whole_dimensions:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, width - 1)
    slowed = ((torch.arange(len(frequencies)) - first) / ((last - first) or 1e-3)).clamp(0, 1)
    return (1 - slowed) * frequencies + slowed * frequencies / scaling.factor


def _long_waves_slower(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale frequencies as Llama 3.1: waves as long as the original context wholly, short ones not, others partly."""
    waves_in_context = scaling.original_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = ((waves_in_context - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * frequencies / scaling.factor + kept * frequencies
