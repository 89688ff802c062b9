"""NeMo Automodel's packs: `PackedDatasetWrapper` joins, `neat_packed_vlm_collater` makes the batch, as in finetune.py.

Its shift gives each token the next one's label and drops a sample's last token. Samples get one token more at their
ends, which is what it drops; its loss is of logits and labels as they stand, so labels move one place on to be where
transformers' losses look for them.
"""

import inspect
from typing import Any

import torch
from torch.nn.functional import pad

from benchmarks.verdicts.folders import IGNORED, PADDING, kind_of, model_of
from benchmarks.verdicts.ways import Features, Way

PACKAGE = "nemo-automodel"
WAYS = {
    "neat_packing": Way("packed_sequence.pack_size", ("eager", "sdpa")),
    "neat_packing_flash": Way("packed_sequence.pack_size", ("flash",)),
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
    rope = _get_rope_index(model_of(kind_of(config)))
    _configure(kernel)
    packs = PackedDatasetWrapper(longer, [[*range(len(longer))]], most, PADDING, get_rope_index=rope)
    batch = neat_packed_vlm_collater([packs[0]], padding_idx=PADDING, attn_implementation=kernel)
    return _given(batch, config)


def _get_rope_index(model: Any) -> Any:
    """What the recipe takes M-RoPE's positions from: 0.5.0 looks at the outer model, which has none."""
    try:
        from nemo_automodel._transformers.utils import resolve_get_rope_index
    except ImportError:
        return getattr(model, "get_rope_index", None)
    return resolve_get_rope_index(model)


def _configure(kernel: str) -> None:
    """Let 0.5.0 replace what it replaces in transformers for flash-attention; 0.7.0 replaces nothing."""
    from nemo_automodel.components.models.common import packing

    if hasattr(packing, "_passthrough_create_causal_mask"):
        packing.configure_packing(kernel)


def _given(batch: Features, config: Any) -> Features:
    """What the model is given of it, labels one place on."""
    import transformers

    known = inspect.signature(getattr(transformers, config.architectures[0]).forward).parameters
    more = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    made = {name: value for name, value in batch.items() if name in known or name in more}
    if "token_type_ids" in known and "mm_token_type_ids" in batch:
        made["token_type_ids"] = batch["mm_token_type_ids"]
    return made | {"labels": pad(batch["labels"].to(torch.long)[:, :-1], (1, 0), value=IGNORED)}
