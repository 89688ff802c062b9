"""One pack as the model sees it: what a stage is handed for one microbatch."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.vlm import platform
from omnibal_ext.packing.shards import tokens_sent

PixelStatistics = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation of each colour, from 0 to 1, over the data that a ViT was trained with."""


Grid = tuple[int, int, int]
"""Steps in time, rows and columns of patches of an image or video at native resolution; a step is a patch's frames."""


@dataclass
class Segments(PackedSeqParams):
    """Where the samples of a pack lie, in the form core's layers hand to the attention.

    `qkv_format` stays "sbhd": core then asks the device nothing, layer by layer; only our attention reads this.
    """

    lengths: tuple[int, ...] = ()
    causal: bool = True
    masks: tuple[Tensor | None, ...] = ()
    """Of each segment what is added to its scores [length, length], in the place of `causal`; None: nothing. Empty: to
    none."""
    rotation: tuple[Tensor, Tensor] | None = None
    """By which query and key of each row turn (`models.rotation`); None: they do not."""
    meeting: "Meeting | None" = None
    """How the first rows, of samples that lie on several ranks, find the rest of these; None: there are none."""


@dataclass(frozen=True)
class Meeting:
    """Samples that several ranks of a team hold parts of: each computes some heads of all their rows.

    place 0   a0 a1 a2 b0 | c c c         arrived   a0 a1 a2 b0 a3 a4 b1 b2
    place 1   a3 a4 b1 b2 | d d d         order     a0 a1 a2 a3 a4 b0 b1 b2
    """

    rows: tuple[int, ...]
    """Of every place of the team, those it holds: its first ones."""
    order: Tensor
    """int64 [sum(rows)]: which rows, as they arrive place after place, are the samples end to end."""
    place: int
    team: ProcessGroup
    segments: Segments
    """The samples, whole."""


FP8_ROWS = 32
"""Products in eight bits take a multiple of so many tokens: 16 with scales of whole tensors, 32 with MXFP8's blocks."""


def sequence_multiple(args: Namespace) -> int:
    """What the tokens of a pack are padded up to a multiple of, on each tensor-parallel rank that holds a share."""
    shares = args.tensor_model_parallel_size if args.sequence_parallel else 1
    return shares * (FP8_ROWS if args.fp8 else 1)


def segment_ids(lengths: Sequence[int]) -> Tensor:
    """[T] the number of the segment that each token is of, on the host."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths), output_size=sum(lengths))


def segments_of(
    lengths: Sequence[int],
    causal: bool = True,
    masks: tuple[Tensor | None, ...] = (),
    rotation: tuple[Tensor, Tensor] | None = None,
) -> Segments:
    """Segments of these lengths, end to end, on this rank's device."""
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
        masks=masks,
        rotation=rotation,
    )


@dataclass(frozen=True)
class Cut:
    """The samples of a wide pack of which several ranks hold parts; see `Meeting`."""

    samples: tuple[int, ...]
    """Their numbers among the pack's segments."""
    lengths: tuple[int, ...]
    rows: tuple[int, ...]
    order: Tensor


@dataclass(frozen=True)
class FeatureRoute:
    """The way of image features from the ranks of a team that make them to those whose tokens take them."""

    leaving: Tensor
    """int64: which of the features made here go, place after place."""
    gives: tuple[int, ...]
    """How many go to every place."""
    takes: tuple[int, ...]
    """How many come from every place."""
    arriving: Tensor
    """int64: which of those that arrived the tokens here take, in order."""


@dataclass(frozen=True)
class Share:
    """One rank's part of a pack that a team of `width` ranks runs together."""

    place: int
    width: int
    pack: "Microbatch"
    """The whole pack's sizes, without its tensors."""
    segments: tuple[int, ...]
    """Of every segment here its number among the pack's: first those of which others hold parts too."""
    begins: tuple[int, ...]
    """Where in it the part begins."""
    rows: Tensor
    """int64 [T], on the host: which tokens of the pack these are."""
    cut: Cut
    features: FeatureRoute
    team: ProcessGroup | None = None


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
    # of the loader uint8 [tiles, size, size, 3] or [tiles, frames, size, size, 3]
    pixel_statistics: PixelStatistics | None = None  # with which pixels of the loader are to be normalised
    input_ids: Tensor | None = None  # [T]
    image_positions: Tensor | None = None  # [image tokens], into input_ids
    image_sources: Tensor | None = None  # [image tokens] or [.., 4], of projected tokens, -1 a newline; None: in order
    image_weights: Tensor | None = None  # [image tokens, 4] where sources are: shares of four features in a token
    labels: Tensor | None = None  # [T]
    supervised: Tensor | None = None  # [tokens that count], into labels; None: the loss of every token is wanted
    loss_mask: Tensor | None = None  # [T], 1 where the label counts
    segment_ids: Tensor | None = None  # [T], which of the pack's `lengths` the token is of
    targets: Tensor | None = None  # fp32 [len(lengths)], tokens to be predicted of each, where there are experts
    sample_weights: Tensor | None = None  # fp32 [len(lengths)], of each in the loss; None: routers are not balanced
    sample_lengths: tuple[int, ...] = ()  # [samples], without padding; (): as in `lengths`
    sources: Tensor | None = None  # [len(lengths)], which input file of the dataset each sample came from
    pack: int = -1  # its number in the index; -1: an empty one
    iteration: int = 0  # of training, from 1 on, which layers draw for; 0: they go on from what was drawn before
    sample_ids: tuple[int, ...] = ()  # [samples], rows of the dataset
    broken: tuple[tuple[int, str], ...] = ()  # samples whose images are stand-ins, and why
    grids: tuple[Grid, ...] = ()  # of every image at native resolution, in order
    image_starts: tuple[int, ...] = ()  # where the tokens of each image begin, where the model asks for it
    prefixes: tuple[int, ...] = ()  # [samples], tokens before each one's answer, where the model asks for it
    seconds: tuple[float, ...] = ()  # of each of these images between two steps in time; (): the pack has no video
    share: Share | None = None  # of a pack that several ranks run: tiles, lengths and tokens are those here, what is
    # said of samples one by one is of the whole pack
    units: tuple[
        int, ...
    ] = ()  # of what a rank encodes of a pack: tiles of each unit of all of it (`omnibal_ext.tower`)
    own: tuple[bool, ...] = ()  # which of these units it encodes

    def pin_memory(self) -> "Microbatch":
        """The same in memory that a device reads by itself; torch's DataLoader calls this in a thread of its own."""
        pinned = {name: value.pin_memory() for name, value in vars(self).items() if _has_content(value)}
        return replace(self, **pinned)

    @property
    def tokens(self) -> int:
        """T: tokens of the sequence, padding included."""
        return sum(self.lengths)

    def units_of_images(self) -> tuple[int, ...]:
        """Tiles, or patches, of each unit of the pack's images (`omnibal_ext.tower`), in order."""
        return tuple(steps * rows * columns for steps, rows, columns in self.grids) or (1,) * self.tiles

    @property
    def squares(self) -> int:
        """Sum of the squared lengths of all segments: what attention runs."""
        if self.share is None:
            return sum(length * length for length in self.lengths)
        cut = self.share.cut
        own = sum(length * length for length in self.lengths[self.parts :])
        return own + sum(length * length for length in cut.lengths) // self.share.width

    @property
    def width(self) -> int:
        """Ranks that run the pack together."""
        return 1 if self.share is None else self.share.width

    @property
    def exchanged(self) -> int:
        """Tokens that a rank sends to others of its team."""
        return 0 if self.share is None else tokens_sent(sum(self.share.cut.lengths), self.width)

    @property
    def whole(self) -> "Microbatch":
        """The pack that this is a share of, in sizes; itself where it is one rank's."""
        return self if self.share is None else self.share.pack

    @property
    def parts(self) -> int:
        """Segments, the first ones, of which other ranks hold parts too."""
        return 0 if self.share is None else sum(number in self.share.cut.samples for number in self.share.segments)

    @property
    def pictured(self) -> bool:
        """Whether the whole pack has images."""
        return self.whole.tiles > 0

    @property
    def counted(self) -> int:
        """Tokens that are to be predicted; of a stage that does not know them, all useful ones."""
        return self.useful_tokens if self.supervised is None else len(self.supervised)

    @cached_property
    def own_units(self) -> Tensor:
        """int64, on this rank's device: the numbers of the units that it encodes."""
        return platform.to_device(torch.tensor([number for number, own in enumerate(self.own) if own]))

    @cached_property
    def segments(self) -> Segments:
        """The samples' boundaries on this rank's device."""
        return segments_of(self.lengths)

    @cached_property
    def positions(self) -> Tensor:
        """[T] position of every token inside its own sample."""
        return platform.to_device(self.host_positions)

    @property
    def host_segment_ids(self) -> Tensor:
        """[T] the pack's number of the segment that each token is of, on the host."""
        ids = segment_ids(self.lengths)
        return ids if self.share is None else torch.tensor(self.share.segments)[ids]

    @property
    def host_positions(self) -> Tensor:
        """The same on the host."""
        begins = self.share.begins if self.share else (0,) * len(self.lengths)
        pairs = zip(begins, self.lengths, strict=True)
        return torch.cat([torch.arange(begin, begin + length) for begin, length in pairs])


def _has_content(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_meta
