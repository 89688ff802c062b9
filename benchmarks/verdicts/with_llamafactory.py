"""LLaMA-Factory's packs: `PackedSupervisedDatasetProcessor` joins, `SFTDataCollatorWith4DAttentionMask` batches."""

import sys
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks.verdicts.folders import (
    BEGIN,
    END,
    IMAGE,
    PADDING,
    image_processor_of,
    kind_of,
    model_of,
    pictures,
    whose,
)
from benchmarks.verdicts.ways import Features, Way

PACKAGE = "llamafactory"
APART_BY_NEAT = "packing: true (keeps none apart; neat_packing does)"
WAYS = {
    "neat_packing": Way("neat_packing: true, cutoff_len a multiple of 8", ("eager", "sdpa")),
    "neat_packing_odd": Way("neat_packing: true, cutoff_len no multiple of 8", ("eager", "sdpa")),
    "neat_packing_flash": Way("neat_packing: true, cutoff_len a multiple of 8", ("flash",)),
    "neat_packing_flash_odd": Way("neat_packing: true, cutoff_len no multiple of 8", ("flash",)),
    "packing": Way(f"{APART_BY_NEAT}, cutoff_len a multiple of 8"),
    "packing_odd": Way(f"{APART_BY_NEAT}, cutoff_len no multiple of 8"),
}
"""A pack is filled up to `cutoff_len` tokens as the user gives it, and by the collator to a multiple of eight."""
PLUGINS = {"llava": "llava", "internvl": "intern_vl", "qwen": "qwen2_vl", "gemma": "gemma3"}
NAME = "<IMG_CONTEXT>"
PROCESSOR = {
    "crop_to_patches": True, "min_patches": 1, "max_patches": 3, "image_seq_length": 4, "image_token_id": IMAGE,
    "patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default",
    "boi_token": "<|vision_start|>", "full_image_sequence": f"<|vision_start|>{NAME * 4}<|vision_end|>",
    "start_image_token": "<|vision_start|>", "end_image_token": "<|vision_end|>",
}  # fmt: skip
"""What its plugins ask of a processor."""


def _batch(features: list[Features], config: Any, *, neat: bool, kernel: str, odd: int) -> Features:
    """Return a pack; `odd`: tokens by which `cutoff_len` is no multiple of eight."""
    plugin = _plugin(kind_of(config))
    from llamafactory.data.collator import SFTDataCollatorWith4DAttentionMask

    kind = kind_of(config)
    processor = SimpleNamespace(image_processor=image_processor_of(kind), tokenizer=_tokenizer(), **PROCESSOR)
    collator = SFTDataCollatorWith4DAttentionMask(
        tokenizer=_tokenizer(), model=model_of(kind), template=SimpleNamespace(mm_plugin=plugin),
        processor=processor, pad_to_multiple_of=8, block_diag_attn=neat, attn_implementation=kernel,
        neat_packing=neat,
    )  # fmt: skip
    batch = dict(collator(_packed(features, neat, odd)))
    return {name: value for name, value in batch.items() if name not in ("num_crops", "rope_deltas")}


neat_packing, neat_packing_odd = (partial(_batch, neat=True, kernel="sdpa", odd=odd) for odd in (0, 1))
neat_packing_flash, neat_packing_flash_odd = (
    partial(_batch, neat=True, kernel="flash_attention_2", odd=odd) for odd in (0, 1)
)
packing, packing_odd = (partial(_batch, neat=False, kernel="sdpa", odd=odd) for odd in (0, 1))


def _plugin(kind: str) -> Any:
    audio = ModuleType("torchaudio")  # which sounds alone need
    audio.__spec__ = ModuleSpec("torchaudio", None)
    sys.modules.setdefault("torchaudio", audio)
    from llamafactory.data.mm_plugin import get_mm_plugin

    plugin = get_mm_plugin(PLUGINS[kind], image_token=NAME)
    plugin._validate_input = lambda *_: None  # that the processor is a whole one
    return plugin


def _packed(features: list[Features], neat: bool, odd: int) -> list[Features]:
    """What `preprocess_dataset` makes of samples that are encoded already."""
    from llamafactory.data.processor.supervised import PackedSupervisedDatasetProcessor

    class Encoded(PackedSupervisedDatasetProcessor):
        def _encode_data_example(self, system: int, **_: Any) -> tuple[list[int], list[int]]:
            return features[system]["input_ids"].tolist(), features[system]["labels"].tolist()

    count, most = len(features), sum(len(one["input_ids"]) for one in features)
    given = -(-(most + 1) // 8) * 8 + odd
    options = SimpleNamespace(cutoff_len=given - 1, neat_packing=neat)  # as DataArguments.__post_init__ leaves it
    shown = [pictures(*whose(one["input_ids"].tolist())) if "pixel_values" in one else [] for one in features]
    rows = {"_prompt": [["?"]] * count, "_response": [["!"]] * count, "_system": [*range(count)], "_images": shown,
            "_tools": [""] * count, "_videos": [[]] * count, "_audios": [[]] * count}  # fmt: skip
    columns = Encoded(template=None, tokenizer=_tokenizer(), processor=None, data_args=options).preprocess_dataset(rows)
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _tokenizer() -> Any:
    """One that pads, and knows what stands for an image and around it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    named = {NAME: IMAGE, "<|vision_start|>": BEGIN, "<|vision_end|>": END}
    words = {f"<{number}>": number for number in range(PADDING + 1) if number not in named.values()} | named
    made: Callable[..., Any] = PreTrainedTokenizerFast
    return made(tokenizer_object=Tokenizer(models.WordLevel(words, f"<{PADDING}>")), pad_token=f"<{PADDING}>",
                additional_special_tokens=[*named])  # fmt: skip
