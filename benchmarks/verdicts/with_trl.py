"""TRL's packs: `SFTTrainer` refuses packing and padding_free where samples have images; these are of words."""

from typing import Any

from benchmarks.verdicts.folders import PADDING
from benchmarks.verdicts.ways import Features, Way, listed

PACKAGE = "trl"
WAYS = {
    "packing": Way("packing=True", samples=("words",)),
    "padding_free": Way("padding_free=True", samples=("words",)),
}


def packing(features: list[Features], config: Any) -> Features:
    """Return rows of `pack_dataset`, collated."""
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    rows = Dataset.from_list([listed(one, "input_ids", "labels") for one in features])
    packed = pack_dataset(rows, sum(len(one["input_ids"]) for one in features), "bfd")
    return dict(_collator()([dict(row) for row in packed]))


def padding_free(features: list[Features], config: Any) -> Features:
    """Return samples, collated."""
    return dict(_collator()([listed(one, "input_ids", "labels") for one in features]))


def _collator() -> Any:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(pad_token_id=PADDING, padding_free=True)
