"""Small datasets of demo conversations, and their packs."""

import json
from pathlib import Path
from typing import Any

from examples.demo.data import make_demo_data
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.preprocessing.job import open_job
from megatron.vlm.preprocessing.preprocess import preprocess
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions


def demo_dataset(raw: Path, output: Path, samples: int, seed: int = 3, **changed: Any) -> ChatDataset:
    """Of conversations that are made in a folder of their own."""
    make_demo_data(raw, samples=samples, heldout_samples=1, seed=seed)
    return preprocessed(raw, raw / "train.jsonl", output, **changed)


def demo_recipe(raw: Path, max_tiles: int = 32, **changed: Any) -> Recipe:
    """For the tiny preset; fields that are named are others."""
    usual: dict[str, Any] = {"template": "internlm2-chat", "tiling": Tiling(32, max_tiles=max_tiles)}
    return Recipe(raw, raw / "tokenizer.model", **{**usual, "tokens_per_tile": 4, **changed})


def preprocessed(
    raw: Path, conversations: Path, output: Path, max_rejects: int | None = None, **changed: Any
) -> ChatDataset:
    """Some of the demo's conversations, by such a recipe."""
    return dataset_of(conversations, demo_recipe(raw, **changed), output, max_rejects)


def dataset_of(records: Any, recipe: Recipe, output: Path, max_rejects: int | None = 0) -> ChatDataset:
    """Of conversations, or of a file that holds them."""
    file = records if isinstance(records, Path) else written(output.with_suffix(".jsonl"), *records)
    preprocess(open_job([file], recipe, output), max_rejects=max_rejects)
    return ChatDataset(output)


def written(path: Path, *records: Any) -> Path:
    """A file with a line of JSON for each."""
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def turns(*words: str) -> list[dict[str, str]]:
    """A question, its answer, and so on."""
    return [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(words)]


def demo_packs(data: ChatDataset, output: Path, options: PackOptions) -> PackedIndex:
    """The packs of a dataset."""
    return build_index(Corpus.of_dataset(data.folder), output, options, {"data": {"manifest": data.manifest}})[0]


def byte_level(texts: list[str], size: int = 300, **model: Any) -> Any:
    """A tokenizer of bytes and their pairs, as GPT-2's, Llama 3's and Qwen's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
