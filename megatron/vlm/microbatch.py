"""The input of a stage for one microbatch: a pack, or one rank's shard of it."""

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.vlm import platform
from megatron.vlm.media import NO_MEDIA, Media, with_tensors
from omnibal_ext.modalities.modality import Size
from omnibal_ext.packing.shards import tokens_sent


@dataclass
class Segments(PackedSeqParams):
    """Boundaries of a pack's samples, in the form that core's layers pass to the attention.

    `qkv_format` stays "sbhd", with which core does not synchronise with the device; only our attention reads this.
    """

    lengths: tuple[int, ...] = ()
    causal: bool = True
    masks: tuple[Tensor | None, ...] = ()
    """Bias [length, length] for each segment, added to its scores instead of `causal`, or None; (): for none."""
    rotation: tuple[Tensor, Tensor, Tensor | None] | None = None
    """RoPE angles of each row (`models/attention/rotation.py`); None: no rotation."""
    exchange: "HeadExchange | None" = None
    """Exchange of the first rows, of samples split over several ranks; None: no sample is split."""


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
    """Return the multiple to which a pack's tokens are padded, for sequence parallelism and FP8."""
    shards = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return shards * (FP8_ROWS if args.fp8 else 1)


def segment_ids(lengths: Sequence[int]) -> Tensor:
    """Return the segment number of each token, [T], on the host."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths), output_size=sum(lengths))


def segments_of(
    lengths: Sequence[int],
    causal: bool = True,
    masks: tuple[Tensor | None, ...] = (),
    rotation: tuple[Tensor, Tensor, Tensor | None] | None = None,
) -> Segments:
    """Return consecutive segments of these lengths, on this rank's device."""
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
    """Segment numbers in the pack."""
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
    """A pack: media for the encoders, one sequence of samples end to end for the language model.

        lengths    |--- 5 ---|-- 3 --|------ 6 ------|      samples, padding included
        input_ids   s I I t t s t t   s I I I I t           T = 14, `I` the image tokens
        labels      I I t t . t t .   I I I I t .           the next token of the same sample
        loss_mask   0 0 1 1 0 1 1 0   0 0 0 0 1 0

    A stage gets only the tensors that its layers need; the rest is None.
    """

    lengths: tuple[int, ...]
    samples: int  # real ones: padding may add a segment
    useful_tokens: int  # tokens of real samples, without padding
    useful_squares: int = 0  # sum of the squared lengths of real samples, without padding
    media: Mapping[Size, Media] = field(default_factory=dict)  # what each encoder reads
    input_ids: Tensor | None = None  # [T]
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
    broken: tuple[tuple[int, str], ...] = ()  # (sample, reason) of those with placeholders for media
    prefixes: tuple[int, ...] = ()  # [samples], tokens before each one's answer, if the model needs it
    shard: PackShard | None = None  # of a pack that several ranks run: images, lengths and tokens are then those here,
    # values per sample those of the entire pack

    def pin_memory(self) -> "Microbatch":
        """Copy the microbatch to pinned memory; torch's DataLoader calls this in its pinning thread."""
        return self.with_tensors(Tensor.pin_memory)

    def with_tensors(self, change: Callable[[Tensor], Tensor | None]) -> "Microbatch":
        """Return a copy with `change` applied to each tensor, but meta tensors, which another rank broadcasts."""

        def changed(tensor: Tensor) -> Tensor | None:
            return tensor if tensor.is_meta else change(tensor)

        media = {size: with_tensors(one, changed) for size, one in self.media.items()}
        return replace(with_tensors(self, changed), media=media)

    def media_of(self, size: Size) -> Media:
        """Return the inputs whose amount is counted in `size` (tiles, frames, ...); empty if the pack has none."""
        return self.media.get(size, NO_MEDIA)

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
    def counted(self) -> int:
        """Number of tokens that count in the loss; on a stage without labels, of all useful ones."""
        return self.useful_tokens if self.supervised is None else len(self.supervised)

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
        """[T] position of every token in its sample, on the host."""
        begins = self.shard.begins if self.shard else (0,) * len(self.lengths)
        pairs = zip(begins, self.lengths, strict=True)
        return torch.cat([torch.arange(begin, begin + length) for begin, length in pairs])
