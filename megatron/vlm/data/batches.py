"""Packs for models of transformers, in any PyTorch loop: ready batches of one sequence each, without a mask.

samples          s I I t t s t t                 of a `ChatDataset`, `I` the image tokens
input_ids        s I I t t s t t       [1, T]    end to end
position_ids     0 1 2 3 4 0 1 2       [1, T]    from 0 in each sample
labels           . . . t t . t t       [1, T]    -100 where nothing counts; models shift them by one
weights          0 0 0 1 1 0 1 1       [1, T]    what each label weighs in the mean over the global batch
cu_seq_lens_q/k  0 5 8                 int32     where samples begin and end, as flash-attention's varlen takes it
max_length_q/k   5                     int
pixel_values     [tiles, 3, size, size]          left out where the pack has no tiles
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.vlm.loss import REDUCTIONS

IGNORED = -100
"""The label that losses of PyTorch leave out."""


@dataclass(frozen=True)
class JoinPack:
    """Joins the samples of a pack: the `collate_fn` of a DataLoader over a `ChatDataset` and a `PackBatchSampler`.

    reduction: of the weights, one of `megatron.vlm.loss.REDUCTIONS`; without one there are no weights in the batch, as
    `transformers.Trainer` hands a model all that it finds.
    """

    reduction: str | None = None

    def __call__(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """The batch of a pack that has samples."""
        lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
        boundaries = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
        longest = int(lengths.max())
        labels = torch.cat([_first_left_out(sample["labels"]) for sample in samples])
        batch = {
            "input_ids": torch.cat([sample["input_ids"] for sample in samples])[None],
            "position_ids": torch.cat([torch.arange(int(length)) for length in lengths])[None],
            "labels": labels[None],
            "cu_seq_lens_q": boundaries,
            "cu_seq_lens_k": boundaries,
            "max_length_q": longest,
            "max_length_k": longest,
        }
        pixels = [sample["pixel_values"] for sample in samples if len(sample["pixel_values"])]
        if pixels:
            batch["pixel_values"] = torch.cat(pixels)
        if self.reduction is not None:
            parts = labels.split(lengths.tolist())
            batch["weights"] = torch.cat([self._weights(part, REDUCTIONS[self.reduction]) for part in parts])[None]
        return batch

    @staticmethod
    def _weights(labels: Tensor, power: float) -> Tensor:
        counts = (labels != IGNORED).float()
        return counts * counts.sum().clamp(min=1) ** -power


def _first_left_out(labels: Tensor) -> Tensor:
    """Shifted by one, the first label of a sample would be predicted by the sample before it."""
    return torch.cat([labels.new_full((1,), IGNORED), labels[1:]])
