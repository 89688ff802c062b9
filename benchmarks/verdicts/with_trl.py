"""TRL's packs, of words: `SFTTrainer` refuses packing where samples have images."""

import tempfile
from typing import Any

from benchmarks.verdicts.folders import PADDING, kind_of, model_of, pictures, whose
from benchmarks.verdicts.ways import Features, Way, listed

PACKAGE = "trl"
FOR_FLASH = tuple((kernel, "TRL asks for flash") for kernel in ("eager", "sdpa"))
WAYS = {
    "packing": Way("packing=True, tokenizer", samples=("words",), against=FOR_FLASH),
    "padding_free": Way("padding_free=True, tokenizer", samples=("words",), against=FOR_FLASH),
    "images": Way("packing=True, processor", samples=("images",), refusal="Packing is not supported"),
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


def images(features: list[Features], config: Any) -> Features:
    """Return the first batch of a trainer that is given a processor, and samples with images."""
    from datasets import Dataset
    from transformers import ProcessorMixin
    from trl import SFTConfig, SFTTrainer

    processor = object.__new__(ProcessorMixin)
    processor.tokenizer = _tokenizer()
    shown = [pictures(whose(one["input_ids"].tolist())[0]) for one in features]
    rows = Dataset.from_list([{"prompt": "?", "completion": "!", "images": some} for some in shown])
    with tempfile.TemporaryDirectory() as folder:
        given = SFTConfig(folder, packing=True, use_cpu=True, bf16=False, report_to="none")
        trainer = SFTTrainer(model_of(kind_of(config)), given, train_dataset=rows, processing_class=processor)
        return dict(next(iter(trainer.get_train_dataloader())))


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"!": 0, "?": 1}, "?"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="!", eos_token="!")


def _collator() -> Any:
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    return DataCollatorForLanguageModeling(pad_token_id=PADDING, padding_free=True)
