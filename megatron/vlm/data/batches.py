"""Text inputs of a pack for transformers' models: one sequence, in which `position_ids` mark where samples begin.

samples          s I I t t s t t                 of a `ChatDataset`, `I` the image tokens
input_ids        s I I t t s t t       [1, T]    end to end
position_ids     0 1 2 3 4 0 1 2       [1, T]    from 0 in each sample: transformers isolates attention by them
labels           . . . t t . t t       [1, T]    -100 where there is no loss; models shift them by one
use_cache        False                           with a KV cache transformers would ignore position_ids
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from omnibal_ext.errors import UserError

IGNORED = -100
"""PyTorch's `ignore_index`."""


def join_words(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Concatenate samples' `input_ids` and `labels` to a model's text inputs. Raises UserError if there are no
    samples."""
    if not samples:
        raise UserError("a pack without samples: its step has fewer than packs; ask for fewer ranks or micro-batches")
    # The first label is ignored: after the shift the sample before it would predict it.
    labels = [torch.cat([sample["labels"].new_full((1,), IGNORED), sample["labels"][1:]]) for sample in samples]
    return {
        "input_ids": torch.cat([sample["input_ids"] for sample in samples])[None],
        "position_ids": torch.cat([torch.arange(len(sample["input_ids"])) for sample in samples])[None],
        "labels": torch.cat(labels)[None],
        "use_cache": False,
    }


def boundaries(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return flash-attention's varlen arguments: cumulative lengths int32 [samples + 1], and the longest."""
    lengths = torch.tensor([len(sample["input_ids"]) for sample in samples])
    edges = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    longest = int(lengths.max())
    return {"cu_seq_lens_q": edges, "cu_seq_lens_k": edges, "max_length_q": longest, "max_length_k": longest}
