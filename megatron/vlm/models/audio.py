"""Layers of an audio encoder: log-mel spectrograms to rows, layers over these, and rows to audio tokens.

Rows are laid out as a ViT's (`models.vit.layers`): [rows, 1, width], all sounds end to end; under sequence parallelism
each rank holds its share. The layers are those of a ViT at native resolution, without rotation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import gelu

from megatron.vlm import platform
from megatron.vlm.media import Media
from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models.configs import ACTIVATIONS, outside_layers
from megatron.vlm.models.encoder_layers import EncoderLayers
from megatron.vlm.models.norm import build_norm
from megatron.vlm.models.vit.layers import join_rows, share_rows
from megatron.vlm.models.vit.native import RowViewer
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.arrays import Ints
from omnibal_ext.image_assignment import Pieces
from omnibal_ext.modalities.audio.architecture import AudioArchitecture
from omnibal_ext.modalities.modality import AUDIO
from omnibal_ext.modalities.vision.architecture import VisionArchitecture

TIMED_FRAMES = 3000
"""Mel frames of one made-up sound, for timing: half a minute."""
LONGEST_WAVE = 10_000
"""Base of the sinusoidal positions: the slowest one turns by one radian in so many rows."""


@dataclass(frozen=True)
class ChunkLayout:
    """Indices of a pack's mel frames and rows in the chunks that convolutions take, on the host."""

    frames: Ints
    """[all frames]: index of each in the chunks, which are padded to equal length."""
    rows: Ints
    """[rows]: index of each in the rows of the padded chunks."""
    seen: Ints
    """[chunks]: frames of each that convolutions see; zeros follow."""


@lru_cache(maxsize=64)
def chunk_layout(sounds: Pieces, audio: AudioArchitecture) -> ChunkLayout:
    """Cut sounds, given by their numbers of frames, into chunks. As in transformers, convolutions over time and
    frequency see each chunk padded to the longest of its sample, those over time alone see it unpadded."""
    real = [[one for frames in sample for one in audio.chunks(frames)] for sample in sounds]
    seen = [max(sample) if audio.channels else one for sample in real for one in sample]
    lengths = [one for sample in real for one in sample]
    rows = [audio.rows(one) for one in lengths]
    return ChunkLayout(
        _positions(lengths, audio.chunk), _positions(rows, audio.rows(audio.chunk)), np.array(seen, dtype=np.int64)
    )


def _positions(lengths: Sequence[int], width: int) -> Ints:
    """Return the indices of the first `lengths[n]` items of every n-th part of `width` items."""
    return np.concatenate([np.zeros(0, np.int64), *(n * width + np.arange(one) for n, one in enumerate(lengths))])


class AudioEmbed(MegatronModule):
    """The layer from mel frames to rows: convolutions over chunks, and sinusoidal positions that restart in each.

    mels fp32 [frames, bins] -> this rank's share of the rows.
    """

    def __init__(self, config: TransformerConfig, audio: AudioArchitecture) -> None:
        super().__init__(config)
        self.audio, width, dtype = audio, audio.hidden_size, config.params_dtype
        layers: list[torch.nn.Conv1d | torch.nn.Conv2d]
        if channels := audio.channels:
            pairs = pairwise((1, channels, channels, channels))
            layers = [torch.nn.Conv2d(*pair, 3, 2, padding=1, dtype=dtype) for pair in pairs]
            self.projection = torch.nn.Linear(channels * audio.halved(audio.mel_bins), width, bias=False, dtype=dtype)
            config.init_method(self.projection.weight.data)
        else:
            first = torch.nn.Conv1d(audio.mel_bins, width, 3, padding=1, dtype=dtype)
            layers = [first, torch.nn.Conv1d(width, width, 3, 2, padding=1, dtype=dtype)]
        for layer in layers:
            config.init_method(layer.weight.data)
            assert layer.bias is not None
            torch.nn.init.zeros_(layer.bias)
        self.convolutions = torch.nn.ModuleList(layers)
        # No buffer: a model in half precision would round it.
        self.positions = sinusoids(audio.rows(audio.chunk), width)

    def forward(self, hidden: None, batch: Microbatch) -> Tensor:
        """Map the mel frames of the pack's sounds to rows [rows here, 1, width]."""
        sounds, audio = batch.media_of(AUDIO.size), self.audio
        mels, layout = sounds.values, chunk_layout(sounds.kept, audio)
        assert mels is not None
        frames, rows, seen = map(platform.to_device, map(torch.from_numpy, (layout.frames, layout.rows, layout.seen)))
        dtype = self.config.params_dtype
        filled = mels.new_zeros(len(layout.seen) * audio.chunk, audio.mel_bins).index_copy(0, frames, mels)
        chunks = filled.view(-1, audio.chunk, audio.mel_bins).mT.to(dtype)
        chunks = self._over_both(chunks, seen) if audio.channels else self._over_time(chunks, seen)
        self.positions = platform.once_on(chunks.device, self.positions)
        chunks = chunks + self.positions.to(chunks)
        return share_rows(chunks.flatten(0, 1)[rows].unsqueeze(1), self.config)

    def _over_time(self, chunks: Tensor, seen: Tensor) -> Tensor:
        """Apply the convolutions over time, [chunks, bins, frames] -> [chunks, frames / 2, width]."""
        first, second = self.convolutions
        return gelu(second(_within(gelu(first(chunks)), seen))).mT

    def _over_both(self, chunks: Tensor, seen: Tensor) -> Tensor:
        """Apply the convolutions over time and frequency, [chunks, bins, frames] -> [chunks, frames / 8, width]."""
        chunks = chunks.unsqueeze(1)
        for layer in self.convolutions:
            chunks, seen = gelu(layer(chunks)), (seen + 1) // 2
            chunks = _within(chunks, seen)
        projected: Tensor = self.projection(chunks.permute(0, 3, 1, 2).flatten(2))
        return projected


def _within(chunks: Tensor, lengths: Tensor) -> Tensor:
    """Set chunks [chunks, ..., frames] to zero behind these lengths."""
    inside = torch.arange(chunks.shape[-1], device=chunks.device) < lengths[:, None]
    return chunks * inside.view(len(chunks), *[1] * (chunks.dim() - 2), -1)


def sinusoids(rows: int, width: int) -> Tensor:
    """Return the positions of Whisper's encoder, fp32 [rows, width], on the host."""
    step = np.log(LONGEST_WAVE) / (width // 2 - 1)
    turns = torch.arange(rows)[:, None] * torch.exp(-step * torch.arange(width // 2).float())
    return torch.cat([turns.sin(), turns.cos()], dim=1)


class AudioProjector(MegatronModule):
    """The layer from this rank's rows to audio tokens [tokens, 1, LLM width], on every tensor-parallel rank."""

    def __init__(self, audio: AudioArchitecture, config: TransformerConfig, language: TransformerConfig) -> None:
        super().__init__(outside_layers(config))
        self.audio, self.shared, width = audio, config, audio.hidden_size
        linear = {"config": self.config, "init_method": config.init_method, "bias": True}
        self.norm = build_norm(self.config, width, config.layernorm_epsilon, "LayerNorm")
        if audio.pooled:
            self.linear = ColumnParallelLinear(width, language.hidden_size, gather_output=False, **linear)
        else:
            self.linear_fc1 = ColumnParallelLinear(width, width, gather_output=False, **linear)
            self.linear_fc2 = RowParallelLinear(
                width, language.hidden_size, input_is_parallel=True, skip_bias_add=False, **linear
            )

    def forward(self, hidden: Tensor, batch: Microbatch) -> Tensor:
        """Map this rank's rows to audio tokens, sound after sound."""
        lengths = [*map(self.audio.rows, batch.media_of(AUDIO.size).inputs)]
        rows = join_rows(hidden, sum(lengths), self.shared)
        if not self.audio.pooled:
            inner, _ = self.linear_fc1(self.norm(rows))
            out, _ = self.linear_fc2(ACTIVATIONS[self.audio.activation](inner))
            return out
        if any(rows % 2 for rows in lengths):
            rows = rows[platform.to_device(torch.from_numpy(_pairs(lengths)))]
        part, _ = self.linear(self.norm(rows.view(-1, 2, 1, rows.shape[-1]).mean(1)))
        whole: Tensor = gather_from_tensor_model_parallel_region(part)  # behind adapters, which add to a rank's part
        return whole


def _pairs(lengths: Sequence[int]) -> Ints:
    """Return the indices of the rows of sounds of these lengths, without the last row of a sound with an odd number."""
    begins = np.cumsum([0, *lengths])
    return np.concatenate([begin + np.arange(one // 2 * 2) for begin, one in zip(begins, lengths, strict=False)])


class AudioLayers(EncoderLayers):
    """The layers of an audio encoder: convolutions, layers as a ViT's at native resolution, and a projector."""

    viewed = AUDIO.kinds[1:2]

    def layers(self, model: Architecture) -> VisionArchitecture:
        """Return the sizes of a ViT whose transformer layers are those of the audio encoder."""
        return AudioArchitecture.among(model.further).as_vit

    def embed(self, config: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Build the layer from mel frames to rows."""
        return AudioEmbed(config, AudioArchitecture.among(model.further))

    def projector(self, config: TransformerConfig, language: TransformerConfig, model: Architecture) -> torch.nn.Module:
        """Build the layer from rows to audio tokens."""
        return AudioProjector(AudioArchitecture.among(model.further), config, language)

    def made_up(self, model: Architecture, units: int, lengths: Sequence[int]) -> Media:
        """Make random sounds of half a minute, `units` mel frames in all, in the first of samples of these lengths.
        Their tokens are at the pack's end, several at one position if they are more than the pack's."""
        audio, tokens = AudioArchitecture.among(model.further), sum(lengths)
        each = tuple(min(TIMED_FRAMES, units - begin) for begin in range(0, units, TIMED_FRAMES))
        heard = torch.arange(sum(map(audio.tokens, each)), device="cuda")
        return Media(
            pieces=(each, *[()] * (len(lengths) - 1)),
            values=torch.randn(units, audio.mel_bins, device="cuda"),
            positions=tokens - 1 - heard % tokens,
        )

    def viewer(self, config: TransformerConfig, model: Architecture) -> RowViewer:
        """Return the module that makes segments of a pack's sounds: windows, whose rows attend to each other."""
        return RowViewer(config, AUDIO.size, AudioArchitecture.among(model.further).windows)
