"""One pack as the model sees it: what a stage is handed for one microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass
class Segments(PackedSeqParams):
    """Where the samples of a pack lie, in the form core's layers hand to the attention.

    `qkv_format` stays "sbhd": core then rotates by the positions it is given and asks the device nothing, layer by
    layer; only our attention reads the boundaries.
    """

    lengths: tuple[int, ...] = ()


def segment_ids(lengths: Sequence[int]) -> Tensor:
    """[T] the number of the segment that each token is of, on the host."""
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


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
    pixels: Tensor | None = None  # [tiles, 3, size, size]
    input_ids: Tensor | None = None  # [T]
    image_positions: Tensor | None = None  # [image tokens], into input_ids
    image_sources: Tensor | None = None  # [image tokens], into the projector's output, -1 a newline; None: in order
    labels: Tensor | None = None  # [T]
    loss_mask: Tensor | None = None  # [T], 1 where the label counts
    segment_ids: Tensor | None = None  # [T], which of `lengths` the token is of
    sources: Tensor | None = None  # [len(lengths)], which input file of the dataset each sample came from

    @property
    def tokens(self) -> int:
        """T: tokens of the sequence, padding included."""
        return sum(self.lengths)

    @cached_property
    def segments(self) -> Segments:
        """The samples' boundaries on this rank's device."""
        boundaries = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        boundaries = boundaries.to("cuda", non_blocking=True)
        longest = max(self.lengths)
        return Segments(
            qkv_format="sbhd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=self.lengths,
        )

    @cached_property
    def positions(self) -> Tensor:
        """[T] position of every token inside its own sample."""
        return torch.cat([torch.arange(length) for length in self.lengths]).to("cuda", non_blocking=True)
