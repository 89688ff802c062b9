"""The input of a stage for one microbatch: a pack, or one rank's shard of it."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.vlm import platform
from omnibal_ext.joining.positions import Grid
from omnibal_ext.modalities.modality import Size
from omnibal_ext.packing.shards import tokens_sent

PixelStatistics = tuple[tuple[float, ...], tuple[float, ...]]
"""(mean, standard deviation) of each colour channel, in units of 0 to 1, with which a ViT was trained."""


@dataclass
class Segments(PackedSeqParams):
    """Boundaries of a pack's samples, in the form that core's layers pass to the attention.

    `qkv_format` stays "sbhd", with which core does not synchronise with the device; only our attention reads this.
    """

    lengths: tuple[int, ...] = ()
    causal: bool = True
    masks: tuple[Tensor | None, ...] = ()
    """For each segment a bias [length, length] added to its scores instead of `causal`, or None; (): for none."""
    rotation: tuple[Tensor, Tensor, Tensor | None] | None = None
    """RoPE angles of each row (`models/attention/rotation.py`); None: no rotation."""
    exchange: "HeadExchange | None" = None
    """For the first rows, of samples split over several ranks; None: no sample is split."""


@dataclass(frozen=True)
class HeadExchange:
    """The all-to-all of samples split over the ranks of a team: each rank computes some heads of all their rows.

    rank 0 of the team   a0 a1 a2 b0 | c c c         received   a0 a1 a2 b0 a3 a4 b1 b2
    rank 1               a3 a4 b1 b2 | d d d         order      a0 a1 a2 a3 a4 b0 b1 b2
    """

    rows: tuple[int, ...]
    """Rows of split samples on each rank of the team; they are its first ones."""
    order: Tensor
    """int64 [sum(rows)]: indices that sort the received rows by sample and position."""
    team_rank: int
    team: ProcessGroup
    segments: Segments
    """The entire split samples."""


FP8_ROWS = 32
"""FP8 matrix products need a multiple of these tokens: 16 with per-tensor scales, 32 with MXFP8 blocks."""


def sequence_multiple(args: Namespace) -> int:
    """A pack's tokens are padded to a multiple of this, for sequence parallelism and FP8."""
    shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return shards * (FP8_ROWS if args.fp8 else 1)


def segment_ids(lengths: Sequence[int]) -> Tensor:
    """[T] the segment number of each token, on the host."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths), output_size=sum(lengths))


def segments_of(
    lengths: Sequence[int],
    causal: bool = True,
    masks: tuple[Tensor | None, ...] = (),
    rotation: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Segments:
    """Consecutive segments of these lengths, on this rank's device."""
    boundaries = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    boundaries, longest = platform.to_device(boundaries), max(lengths, default=0)
    return Segments(
        qkv_format="sbhd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths),
        causal=causal,
        masks=() if all(mask is None for mask in masks) else masks,
        rotation=rotation,
    )


@dataclass(frozen=True)
class SplitSamples:
    """The samples of a pack that are split over several ranks of a team; see `HeadExchange`."""

    samples: tuple[int, ...]
    """Their segment numbers in the pack."""
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    order: Tensor


@dataclass(frozen=True)
class FeatureRoute:
    """The all-to-all of image features, from the ranks of a team that encode them to those that hold their tokens."""

    send_rows: Tensor
    """int64: indices of the features encoded here to send, by receiving rank."""
    send_counts: tuple[int, ...]
    """Features sent to each rank."""
    receive_counts: tuple[int, ...]
    """Features received from each rank."""
    receive_rows: Tensor
    """int64: indices that sort the received features by this rank's image tokens."""


@dataclass(frozen=True)
class PackShard:
    """One rank's shard of a pack that a team of `width` ranks runs together."""

    team_rank: int
    width: int
    pack: "Microbatch"
    """The entire pack, without its tensors."""
    segments: tuple[int, ...]
    """Segment numbers in the pack of the segments here; the split ones first."""
    begins: tuple[int, ...]
    """Position in its segment of the first token here, for each of `segments`."""
    rows: Tensor
    """int64 [T], on the host: indices of these tokens in the pack."""
    split: SplitSamples
    features: FeatureRoute
    team: ProcessGroup | None = None

    @property
    def split_segments(self) -> int:
        """Number of split segments here; they are the first ones."""
        return sum(number in self.split.samples for number in self.segments)

    @property
    def sent_tokens(self) -> int:
        """Tokens that a rank sends to the other ranks of its team."""
        return tokens_sent(sum(self.split.lengths), self.width)

    def squares(self, lengths: Sequence[int]) -> int:
        """Sum of squared lengths of the segments here, which are so long; of split ones the rank's share."""
        split = sum(length * length for length in self.split.lengths) // self.width
        return split + sum(length * length for length in lengths[self.split_segments :])


@dataclass(frozen=True)
class Microbatch:
    """A pack: tiles for the ViT, one sequence of samples end to end for the language model.

        lengths    |--- 5 ---|-- 3 --|------ 6 ------|      samples, padding included
        input_ids   s I I t t s t t   s I I I I t           T = 14, `I` the image tokens
        labels      I I t t . t t .   I I I I t .           the next token of the same sample
        loss_mask   0 0 1 1 0 1 1 0   0 0 0 0 1 0

    A stage gets only the tensors that its layers need; the rest is None.
    """

    tiles: int
    lengths: tuple[int, ...]
    samples: int  # real ones: padding may add a segment
    useful_tokens: int  # tokens of real samples, without padding
    useful_squares: int = 0  # sum of the squared lengths of real samples, without padding
    pixels: Tensor | None = None  # fp32 [tiles, 3, size, size], with videos [tiles, 3, frames, size, size]
    # from the loader uint8 [tiles, size, size, 3] or [tiles, frames, size, size, 3]
    pixel_statistics: PixelStatistics | None = None  # to normalise the loader's pixels
    input_ids: Tensor | None = None  # [T]
    image_positions: Tensor | None = None  # [image tokens], into input_ids
    image_sources: Tensor | None = None  # [image tokens] or [.., 4], projected tokens, -1: newline; None: in order
    image_weights: Tensor | None = None  # [image tokens, 4] with 4 sources: their weights in a token
    labels: Tensor | None = None  # [T]
    supervised: Tensor | None = None  # [counted tokens], into labels; None: the loss of every token is computed
    loss_mask: Tensor | None = None  # [T], 1 where the label counts
    segment_ids: Tensor | None = None  # [T], index of the token's segment in the pack's `lengths`
    targets: Tensor | None = None  # fp32 [len(lengths)], counted tokens of each segment, for models with experts
    sample_weights: Tensor | None = None  # fp32 [len(lengths)], loss weight of each; None: routers are not balanced
    sample_lengths: tuple[int, ...] = ()  # [samples], without padding; (): as in `lengths`
    sources: Tensor | None = None  # [len(lengths)], number of each sample's input file in the dataset
    pack: int = -1  # its number in the index; -1: an empty pack
    iteration: int = 0  # of training, from 1, seeds what layers draw; 0: random state as it is
    sample_ids: tuple[int, ...] = ()  # [samples], rows of the dataset
    broken: tuple[tuple[int, str], ...] = ()  # (sample, reason) of those with placeholder images
    grids: tuple[Grid, ...] = ()  # of every image at native resolution, in order
    image_starts: tuple[int, ...] = ()  # first token of each image, if the model needs it
    prefixes: tuple[int, ...] = ()  # [samples], tokens before each one's answer, if the model needs it
    seconds: tuple[float, ...] = ()  # of each of `grids` between two temporal steps; (): no video
    turns: tuple[tuple[int, ...], ...] = ()  # of each of `grids`: alternating runs of a video's tokens and its sound's;
    # (): no video is heard
    sounds: tuple[tuple[int, ...], ...] = ()  # [samples], mel frames of each sample's sounds; (): no sound
    mels: Tensor | None = None  # fp32 [frames, mel bins], all sounds end to end
    audio_positions: Tensor | None = None  # [audio tokens], into input_ids
    shard: PackShard | None = None  # of a pack that several ranks run: tiles, lengths and tokens are then those here,
    # values per sample those of the entire pack
    units: tuple[int, ...] = ()  # tiles of every unit of the entire pack, not only this rank's (`tower_encoding`)
    encodes: tuple[bool, ...] = ()  # for each unit, whether this rank encodes it
    heard: tuple[tuple[int, ...], ...] = ()  # `sounds` of the entire pack, where `sounds` are those encoded here

    def pin_memory(self) -> "Microbatch":
        """The microbatch in pinned memory; torch's DataLoader calls this in its pinning thread."""
        pinned: dict[str, Any] = {name: tensor.pin_memory() for name, tensor in self.tensors().items()}
        return replace(self, **pinned)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name, without meta tensors, which stand for what another rank will broadcast."""
        found: dict[str, Any] = vars(self)
        return {name: value for name, value in found.items() if isinstance(value, Tensor) and not value.is_meta}

    @property
    def tokens(self) -> int:
        """T: tokens of the sequence, padding included."""
        return sum(self.lengths)

    @property
    def squares(self) -> int:
        """Sum of squared lengths of all segments, to which attention FLOPs are proportional."""
        return self.shard.squares(self.lengths) if self.shard else sum(length * length for length in self.lengths)

    @property
    def full_pack(self) -> "Microbatch":
        """The pack that this is a shard of, without tensors; itself if it is no shard."""
        return self if self.shard is None else self.shard.pack

    @property
    def has_images(self) -> bool:
        """Whether the entire pack has images."""
        return self.full_pack.tiles > 0

    @property
    def sound_frames(self) -> list[int]:
        """Mel frames of each sound of the pack."""
        return [frames for sample in self.sounds for frames in sample]

    @property
    def frames(self) -> int:
        """Mel frames of all sounds."""
        return sum(self.sound_frames)

    def inputs(self, size: Size) -> Sequence[int]:
        """Return the units of what an encoder sees: mel frames of each sound, tiles of all images together."""
        return self._inputs[size]

    @cached_property
    def _inputs(self) -> dict[Size, Sequence[int]]:
        """`inputs` by size; every link of an encoder asks."""
        return {"frames": self.sound_frames, "tiles": (self.tiles,) if self.tiles else ()}

    @property
    def counted(self) -> int:
        """Tokens that count in the loss; on a stage without labels, all useful ones."""
        return self.useful_tokens if self.supervised is None else len(self.supervised)

    @cached_property
    def encoded_units(self) -> Tensor:
        """int64, on this rank's device: numbers of the units that it encodes."""
        return platform.to_device(torch.tensor([number for number, here in enumerate(self.encodes) if here]))

    @cached_property
    def segments(self) -> Segments:
        """The samples' boundaries on this rank's device."""
        return segments_of(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """[T] position of every token in its sample."""
        return platform.to_device(self.host_positions)

    @property
    def host_segment_ids(self) -> Tensor:
        """[T] each token's segment number in the pack, on the host."""
        ids = segment_ids(self.lengths)
        return ids if self.shard is None else torch.tensor(self.shard.segments)[ids]

    @property
    def host_positions(self) -> Tensor:
        """`positions` on the host."""
        begins = self.shard.begins if self.shard else (0,) * len(self.lengths)
        pairs = zip(begins, self.lengths, strict=True)
        return torch.cat([torch.arange(begin, begin + length) for begin, length in pairs])
