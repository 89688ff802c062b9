"""NeMo Automodel's packs: `PackedDatasetWrapper` joins, `neat_packed_vlm_collater` makes the batch.

Its shift gives each token the next one's label and drops a sample's last token. Samples get one token more at their
ends, which is what it drops; labels are handed on as `shift_labels`, as they stand.
"""

import inspect
from typing import Any

import torch
from torch.nn.functional import pad

from benchmarks.verdicts.folders import IGNORED, PADDING, kind_of, model_of
from benchmarks.verdicts.ways import Features, Way

PACKAGE = "nemo-automodel"
WAYS = {
    "neat_packing": Way("neat packing", ("eager", "sdpa")),
    "neat_packing_flash": Way("neat packing", ("flash",)),
}


def neat_packing(features: list[Features], config: Any) -> Features:
    """Return a pack for eager attention or sdpa."""
    return _batch(features, config, "sdpa")


def neat_packing_flash(features: list[Features], config: Any) -> Features:
    """Return a pack for flash-attention."""
    return _batch(features, config, "flash_attention_2")


def _batch(features: list[Features], config: Any, kernel: str) -> Features:
    from nemo_automodel.components.datasets.vlm.collate_fns import neat_packed_vlm_collater
    from nemo_automodel.components.datasets.vlm.neat_packing_vlm import PackedDatasetWrapper

    fillers = {"input_ids": PADDING, "labels": IGNORED, "attention_mask": 1, "mm_token_type_ids": 0}
    longer = [
        one | {name: pad(one[name], (0, 1), value=filler) for name, filler in fillers.items() if name in one}
        for one in features
    ]
    most = sum(len(one["input_ids"]) for one in features)
    rope = getattr(model_of(kind_of(config)).model, "get_rope_index", None)
    packs = PackedDatasetWrapper(longer, [[*range(len(longer))]], most, PADDING, get_rope_index=rope)
    batch = neat_packed_vlm_collater([packs[0]], padding_idx=PADDING, attn_implementation=kernel)
    return _given(batch, config)


def _given(batch: Features, config: Any) -> Features:
    """What the model is given of it; labels where transformers shifts none."""
    import transformers

    known = inspect.signature(getattr(transformers, config.architectures[0]).forward).parameters
    more = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    made = {name: value for name, value in batch.items() if name in known or name in more}
    if "token_type_ids" in known and "mm_token_type_ids" in batch:
        made["token_type_ids"] = batch["mm_token_type_ids"]
    return made | {"shift_labels": batch["labels"].to(torch.long), "labels": batch["labels"]}
