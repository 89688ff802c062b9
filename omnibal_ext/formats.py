"""Schemas of plan.json and profile.json; relations between fields are checked by `Plan` and `Profile`.

Limits exceed any real run, and keep a damaged file from exhausting memory.
"""

from omnibal_ext.chain import KINDS, PARTS
from omnibal_ext.modalities.modality import ALWAYS, ENCODED, FURTHER, MODALITIES
from omnibal_ext.reading.checks import anything, finite, flag, integer, listing, mapping, maybe, one_of, record, text

MOST_LAYERS, MOST_RANKS, MOST_MICROBATCHES = 2**14, 2**14, 2**16
MOST_BUDGET = 2**31
MOST_LORA_RANK = 2**16
OLD_RECOMPUTE = ("recompute_attention", "recompute_mlp")
"""Fields of stages in older plans, for layers recomputed in part; now these are recomputed entirely."""

_BUDGETS = [one.budget for one in MODALITIES]
PLAN_COUNTS = {
    "num_microbatches": integer(1, MOST_MICROBATCHES),
    "virtual_pipeline_model_parallel_size": integer(1, MOST_LAYERS),
    **{f"{name}_model_parallel_size": integer(1, MOST_RANKS) for name in ("pipeline", "tensor", "expert")},
    **dict.fromkeys(_BUDGETS, integer(0, MOST_BUDGET)),
    "lora_rank": integer(0, MOST_LORA_RANK),
}
_CHAIN = listing(one_of(*KINDS), least=1, most=MOST_LAYERS)
_LAYER = integer(0, MOST_LAYERS)
_LAYERS = listing(_LAYER, most=MOST_LAYERS)
_STAGE = record(
    {"layers": listing(_LAYER, 2, 2)}, dict.fromkeys(("recompute", "recompute_cheap", *OLD_RECOMPUTE), _LAYERS)
)
_STAGES = listing(_STAGE, least=1, most=MOST_LAYERS)
_TOWER = record(
    {
        "links": integer(1, MOST_LAYERS),
        "owners": listing(integer(0, MOST_RANKS**2), least=1, most=MOST_LAYERS),
        "parts": listing(listing(integer(0, MOST_RANKS), least=1, most=MOST_RANKS), least=1, most=MOST_MICROBATCHES),
        "mode": one_of("first", "bubbles", "ahead"),
    },
    {
        "recompute": _LAYERS,
        "again": flag,
        "sizes": listing(one_of(*(one.size for one in ENCODED)), least=1, most=len(ENCODED)),
        **dict.fromkeys((one.rate for one in FURTHER), finite()),
    },
)
_SECONDS = listing(finite(), most=MOST_LAYERS)
_PREDICTED = record(
    {},
    {
        "step_seconds": finite(),
        "bubble_fraction": finite(0, 1),
        **dict.fromkeys(("stage_seconds", "stage_forward_seconds", "stage_backward_seconds"), _SECONDS),
        "stage_peak_bytes": listing(finite(), most=MOST_RANKS),
    },
)
_ALTERNATIVE = record({"stages": _STAGES, "step_seconds": finite()}, {"predicted": _PREDICTED})

PLAN = record(
    {
        "chain": _CHAIN,
        "stages": _STAGES,
        **{name: PLAN_COUNTS[name] for name in ("num_microbatches", "pipeline_model_parallel_size")},
    },
    {
        **dict.fromkeys(("model", "model_hash", "profile_hash", "method", "schedule"), text),
        **{name: PLAN_COUNTS[name] for name in _BUDGETS},
        "memory_gib": maybe(finite()),
        "frozen": listing(one_of(*PARTS)),
        "lora_targets": listing(one_of(*PARTS)),
        "lists": listing(text, most=MOST_RANKS),
        "stage_ranks": listing(integer(0, MOST_RANKS), most=MOST_LAYERS),
        "tower": _TOWER,
        "predicted": _PREDICTED,
        "alternatives": listing(_ALTERNATIVE, most=2**10),
        "trials": listing(mapping(anything), most=2**10),
    },
)

PROFILE_COUNTS = {
    **dict.fromkeys(_BUDGETS, integer(1, MOST_BUDGET)),
    **dict.fromkeys(("tensor_model_parallel_size", "expert_model_parallel_size"), integer(1, MOST_RANKS)),
    **dict.fromkeys(("transfer_seconds_per_byte", "replica_seconds_per_byte", "transfer_latency_seconds"), finite()),
    **dict.fromkeys(("action_seconds", "host_action_seconds", "iteration_seconds"), finite()),
    **dict.fromkeys(("overhead_bytes", "image_tiles"), finite()),
    "supervised_share": finite(0.0, 1.0),
    "lora_rank": integer(0, MOST_LORA_RANK),
}
PROFILE = record(
    {
        "model": text,
        "model_hash": text,
        "chain": _CHAIN,
        "layers": mapping(mapping(anything)),
        **{one.budget: PROFILE_COUNTS[one.budget] for one in ALWAYS},
    },
    {
        **PROFILE_COUNTS,
        "parameters": mapping(integer()),
        "whole_layers": mapping(mapping(anything)),
        "frozen": listing(one_of(*PARTS)),
        "lora_targets": listing(one_of(*PARTS)),
        "feature_layers": _LAYERS,
        "features_joined": flag,
        "carried_after": listing(integer(0, 2**16)),
        "layers_apart": mapping(_LAYERS),
        **dict.fromkeys(("device", "dtype"), text),
        **dict.fromkeys(("measured_with", "corrected_by", "notes"), mapping(anything)),
    },
)
