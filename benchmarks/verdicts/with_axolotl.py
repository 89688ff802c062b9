"""axolotl's packs, of words: its collator of conversations with images refuses packing."""

from importlib.metadata import version
from typing import Any

from benchmarks.verdicts.folders import PADDING, kind_of
from benchmarks.verdicts.ways import Features, Way, listed

PACKAGE = "axolotl"
IS_NEWER = tuple(map(int, version(PACKAGE).split(".")[:2])) >= (0, 19)
WARNS = () if IS_NEWER else (("eager", "the trainer warns"),)  # utils/schemas/validation.py
WAYS = {
    "sample_packing": Way("sample_packing: true", ("eager", "sdpa"), ("words",), against=WARNS),
    "sample_packing_flash": Way("sample_packing: true", ("flash",), ("words",)),
    "images": Way("MultiModalChatDataCollator(packing=True)", samples=("images",),
                  refusal="Packing is currently not supported"),
}  # fmt: skip


def sample_packing(features: list[Features], config: Any) -> Features:
    """Return a pack for eager attention or sdpa."""
    return _batch(features, config, IS_NEWER)  # core/builders/causal.py


def sample_packing_flash(features: list[Features], config: Any) -> Features:
    """Return a pack for flash-attention."""
    return _batch(features, config, True)


def images(features: list[Features], config: Any) -> Features:
    """Return a pack of samples with images."""
    from axolotl.utils.collators.mm_chat import MultiModalChatDataCollator

    return dict(MultiModalChatDataCollator(_tokenizer(), None, packing=True)(features))


def _batch(features: list[Features], config: Any, drops_mask: bool) -> Features:
    """What `AxolotlTrainer` gives the model: of Gemma 3 without the mask, in any case (utils/trainer.py's
    process_datasets_for_packing; 0.19.0 also in core/trainers/base.py)."""
    from axolotl.monkeypatch.multipack import SUPPORTED_MULTIPACK_MODEL_TYPES
    from axolotl.utils.collators import BatchSamplerDataCollatorForSeq2Seq, V2BatchSamplerDataCollatorForSeq2Seq
    from axolotl.utils.trainer import add_position_ids

    is_known = config.model_type in SUPPORTED_MULTIPACK_MODEL_TYPES
    kind = V2BatchSamplerDataCollatorForSeq2Seq if is_known else BatchSamplerDataCollatorForSeq2Seq
    names = ["input_ids", "labels", *["attention_mask"] * (not drops_mask and kind_of(config) != "gemma")]
    return dict(
        kind(_tokenizer(), pad_to_multiple_of=64)([[add_position_ids(listed(one, *names)) for one in features]])
    )


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{number}>": number for number in range(PADDING + 1)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "<0>")), pad_token=f"<{PADDING}>")
