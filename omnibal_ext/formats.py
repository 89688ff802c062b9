"""What plan.json and profile.json must hold, as data; what parts say of each other is checked where they are read.

The most of everything is far beyond any run, and little enough for a list of it to be made.
"""

from omnibal_ext.chain import KINDS, PARTS
from omnibal_ext.reading.checks import anything, finite, flag, listing, mapping, maybe, one_of, record, text, whole

MOST_LAYERS, MOST_RANKS, MOST_MICROBATCHES = 2**14, 2**14, 2**16
MOST_BUDGET = 2**31
MOST_LORA_RANK = 2**16
OF_A_PART = ("recompute_attention", "recompute_mlp")
"""Of stages in older plans: layers of which a part alone was recomputed, which are recomputed whole now."""

PLAN_COUNTS = {
    "num_microbatches": whole(1, MOST_MICROBATCHES),
    "pipeline_model_parallel_size": whole(1, MOST_RANKS),
    "virtual_pipeline_model_parallel_size": whole(1, MOST_LAYERS),
    "tensor_model_parallel_size": whole(1, MOST_RANKS),
    "expert_model_parallel_size": whole(1, MOST_RANKS),
    "vit_budget": whole(0, MOST_BUDGET),
    "llm_budget": whole(0, MOST_BUDGET),
    "lora_rank": whole(0, MOST_LORA_RANK),
}
_CHAIN = listing(one_of(*KINDS), least=1, most=MOST_LAYERS)
_LAYER = whole(0, MOST_LAYERS)
_LAYERS = listing(_LAYER, most=MOST_LAYERS)
_STAGE = record({"layers": listing(_LAYER, 2, 2)}, dict.fromkeys(("recompute", "recompute_cheap", *OF_A_PART), _LAYERS))
_STAGES = listing(_STAGE, least=1, most=MOST_LAYERS)
TOWER_MODES = ("first", "bubbles", "ahead")
_TOWER = record(
    {
        "links": whole(1, MOST_LAYERS),
        "owners": listing(whole(0, MOST_RANKS**2), least=1, most=MOST_LAYERS),
        "parts": listing(listing(whole(0, MOST_RANKS), least=1, most=MOST_RANKS), least=1, most=MOST_MICROBATCHES),
        "mode": one_of(*TOWER_MODES),
    },
    {"recompute": _LAYERS, "again": flag},
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
        "memory_gib": maybe(finite()),
        "frozen": listing(one_of(*PARTS)),
        "lora_targets": listing(one_of(*PARTS)),
        "lists": listing(text, most=MOST_RANKS),
        "stage_ranks": listing(whole(0, MOST_RANKS), most=MOST_LAYERS),
        "tower": _TOWER,
        "predicted": _PREDICTED,
        "alternatives": listing(_ALTERNATIVE, most=2**10),
        "trials": listing(mapping(anything), most=2**10),
    },
)

MEASURED = record({}, {"layers": mapping(mapping(anything))})
"""Some lines of a profile, to be put in another one's place."""
PROFILE_COUNTS = {
    "vit_budget": whole(1, MOST_BUDGET),
    "llm_budget": whole(1, MOST_BUDGET),
    "tensor_model_parallel_size": whole(1, MOST_RANKS),
    "expert_model_parallel_size": whole(1, MOST_RANKS),
    "transfer_seconds_per_byte": finite(),
    "transfer_latency_seconds": finite(),
    "overhead_bytes": finite(),
    "action_seconds": finite(),
    "host_action_seconds": finite(),
    "iteration_seconds": finite(),
    "lora_rank": whole(0, MOST_LORA_RANK),
    "image_tiles": finite(),
    "supervised_share": finite(0.0, 1.0),
    "replica_seconds_per_byte": finite(),
}
PROFILE = record(
    {
        "model": text,
        "model_hash": text,
        "chain": _CHAIN,
        "layers": mapping(mapping(anything)),
        **{name: PROFILE_COUNTS[name] for name in ("vit_budget", "llm_budget")},
    },
    {
        "parameters": mapping(whole()),
        "whole_layers": mapping(mapping(anything)),
        "frozen": listing(one_of(*PARTS)),
        "lora_targets": listing(one_of(*PARTS)),
        "feature_layers": _LAYERS,
        "features_joined": flag,
        "carried_after": listing(whole(0, 2**16)),
        "layers_apart": mapping(_LAYERS),
        "full_layers": _LAYERS,
        "linear_layers": _LAYERS,
        "device": text,
        "dtype": text,
        "measured_with": mapping(anything),
        "corrected_by": mapping(anything),
        "notes": mapping(anything),
    },
)
