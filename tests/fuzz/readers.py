"""Every reader of files that others wrote: whole files for it, and what a program does with them."""

import json
from pathlib import Path

import numpy as np

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.moved import note_moved
from megatron.vlm.data.rejects import RejectCount
from megatron.vlm.hf.convert import KeyMap
from megatron.vlm.hf.folder import Stored, WeightFolder, write_weights
from megatron.vlm.hf.names import sources
from megatron.vlm.hf.shapes import weight_shape
from megatron.vlm.preprocessing.chat import parse_conversation
from megatron.vlm.preprocessing.tokenizer import declared_tokens
from omnibal_ext.architectures.huggingface import read_architecture
from omnibal_ext.architectures.presets import TINY
from omnibal_ext.costs.analytic import analytic_profile
from omnibal_ext.costs.corrected import Compared
from omnibal_ext.costs.profile import Profile
from omnibal_ext.packing.build import build_index
from omnibal_ext.packing.corpus import Corpus
from omnibal_ext.packing.costs import PackCosts
from omnibal_ext.packing.index.dispatch import PackStream
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.packing.options import PackOptions
from omnibal_ext.plan import Plan
from omnibal_ext.reading.document import sealed
from omnibal_ext.run_metrics import evaluations, profile_check, training_intervals
from omnibal_ext.sizes import Sizes
from tests.demo import demo_dataset
from tests.fuzz import record_readers
from tests.fuzz.data_readers import data_readers
from tests.fuzz.folder_readers import folder_readers
from tests.fuzz.media_readers import media_readers
from tests.fuzz.reader import Reader, content_of, each_of, true_hashes
from tests.fuzz.save_readers import save_readers
from tests.unit.architectures import test_huggingface as published


def all_readers(folder: Path) -> dict[str, Reader]:
    """Every reader by its name; whole files are made in the folder."""
    return {
        **data_readers(folder),
        "plan": _plan(), "profile": _profile(), "index": _index(folder / "index"), "sizes": _sizes(folder),
        "dataset": _dataset(folder / "demo"), "config": _config(), "weights": _weights(folder / "model"),
        "metrics": _metrics(), "rejects": _rejects(), "chat": _chat(),
        "tokenizer": _tokenizer(),
        **media_readers(),
        **record_readers.readers(folder),
        **save_readers(folder),
        **folder_readers(folder),
    }  # fmt: skip


def _plan() -> Reader:
    predicted = {"step_seconds": 1.0, "bubble_fraction": 0.1, "stage_seconds": [0.5, 0.5], "stage_peak_bytes": [1, 2]}
    other = {"stages": [{"layers": [0, 5]}, {"layers": [5, 11]}], "step_seconds": 2.0, "predicted": predicted}
    plan = Plan.from_cuts(TINY.chain, (4,), ((1, 2), (7,)), num_microbatches=4, model="tiny", model_hash=TINY.hash,
                          budgets={"tiles": 4, "tokens": 64}, predicted=predicted, alternatives=(other,))  # fmt: skip

    def read(folder: Path) -> None:
        found = Plan.load(folder / "plan.json")
        for number in range(len(found.alternatives)):
            found.alternative(number)
        found.check_model(TINY)
        if found.num_microbatches * len(found.stages) < 10_000:  # what a run would need anyway
            found.build_schedule()

    return Reader({"plan.json": json.dumps(plan.to_record()).encode()}, read)


def _profile() -> Reader:
    profile = analytic_profile(TINY, "h100", {"tiles": 4, "tokens": 64})
    record = json.dumps(profile.to_record()).encode()

    def read(folder: Path) -> None:
        costs = PackCosts.of_profile(Profile.load(folder / "profile.json"))
        costs.seconds(np.array([[1, 2, 4]]), ("tiles", "tokens", "attention"))

    return Reader({"profile.json": record}, read)


def _index(folder: Path) -> Reader:
    generator = np.random.default_rng(0)
    sizes = Sizes.from_arrays(generator.integers(0, 5, 60), generator.integers(5, 90, 60))
    build_index(sizes, folder, PackOptions(vit_budget=9, llm_budget=200, micro_batches=2, seconds=0.0))

    def read(folder: Path) -> None:
        index = PackedIndex.open(folder)
        index.verify()
        index.check_samples(60)
        index.check({"built_from": {}})
        stream = PackStream(index, 1, index.global_batch)
        for number in (0, 1, stream.iterations_per_epoch):
            packs = stream.iteration(number).ravel()
            index.seconds(np.maximum(packs, 0))
            for pack in packs[packs >= 0]:
                index.samples(int(pack))

    return Reader(content_of(folder), read, true_hashes)


def _sizes(folder: Path) -> Reader:
    Sizes.from_arrays([3, 0, 5], [20, 30, 1300]).save(folder / "sizes.npz", lines=np.array([1, 2, 3]))
    rows = [{"vit_num": 3, "token_num": 800, "image_flags": 3}, {"vit_num": 0, "token_num": 12}]
    manifest = sealed({"sources": [{"file": "a.jsonl", "samples": 3, "weight": 1.0}]})
    files = {"sizes.json": json.dumps(rows).encode(), "sizes.npz": (folder / "sizes.npz").read_bytes()}

    def read(folder: Path) -> None:
        for name in ("sizes.json", "sizes.npz"):
            Sizes.load(folder / name)
        corpus = Corpus.of_dataset(folder)
        corpus.origin_of(2)
        corpus.epoch_samples(0, 0, np.ones(3, np.bool_), 4)

    return Reader({**files, "manifest.json": json.dumps(manifest).encode()}, read, true_hashes)


def _dataset(folder: Path) -> Reader:
    demo_dataset(folder, folder / "dataset", 8)
    note_moved(folder / "dataset", [{"path": str(folder / "train.jsonl"), "image_root": str(folder)}])

    def read(folder: Path) -> None:
        data = ChatDataset(folder)
        for sample in range(len(data)):
            one = data.sample(sample)
            _ = one.text, one.images, one.orders

    return Reader(content_of(folder / "dataset"), read, true_hashes)


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
CONFIGS = (
    *(published.INTERNVL_HF, published.INTERNVL_CHAT, published.QWEN3_VL, published.CONFIGS["qwen3.5-35b-a3b"]),
    published.changed(published.OWN["llava-1.6-mistral-7b"], {"text_config.rope_scaling": LLAMA3}),
    published.changed(published.OWN["llava-onevision-7b"], {"text_config.rope_scaling": YARN}),
)


def _config() -> Reader:
    files = {f"{config['model_type']}.json": json.dumps(config).encode() for config in CONFIGS}

    return Reader(files, each_of("*.json", lambda path: read_architecture(path).hash))


def _weights(folder: Path) -> Reader:
    """A small model of InternVL's, in two files and an index."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "internvl", "tie_word_embeddings": False,
        "vision_config": {"model_type": "internvl_vision", "hidden_size": 4, "num_attention_heads": 1,
                          "image_size": [4, 4], "intermediate_size": 4, "num_hidden_layers": 1, "patch_size": [2, 2]},
        "text_config": {"model_type": "llama", "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1,
                        "num_key_value_heads": 1, "intermediate_size": 4, "vocab_size": 6},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    model = read_architecture(folder)
    stored: dict[str, Stored] = {}
    for ours, source in sources(model, "internvl", "llama").items():
        rows, *others = weight_shape(ours, model)
        share = rows // len(source.theirs)
        for name in source.theirs:
            shape = (1, *others) if name.endswith(("cls_token",)) else (share, *others)
            shape = (1, 5, 4) if name.endswith("position_embeddings") else shape
            stored[name] = Stored(f"model-{len(stored) % 2}.safetensors", "F32", shape)
    for file in {entry.file for entry in stored.values()}:
        write_weights(folder / file, {name: entry for name, entry in stored.items() if entry.file == file}, ())
    index = {"metadata": {}, "weight_map": {name: entry.file for name, entry in stored.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def read(folder: Path) -> None:
        weights = WeightFolder(folder)
        KeyMap.of(folder, weights.stored)

    return Reader(content_of(folder), read)


def _metrics() -> Reader:
    line = {"iteration": 1, "seconds": 2.0, "loss": 3.0, "source_losses": {"a": 1.0}, "samples": 4, "padding": 0.0}
    evaluation = {
        "iteration": 1,
        "evaluation": {"loss": 1.0, "source_losses": {"a": 1.0}, "samples": 3, "seconds": 1.0},
    }
    part = {"part": "llm", "phase": "forward", "profile_seconds": 1.0, "measured_seconds": 2.0}
    check = {"model_hash": "m", "profile_hash": "p", "iterations": [4], "parts": [part]}
    lines = (line, evaluation, {"iteration": 1, "profile_check": check}, {**line, "iteration": 2})
    text = "".join(json.dumps(one) + "\n" for one in lines)

    def read(folder: Path) -> None:
        intervals = training_intervals(folder / "metrics.jsonl")
        for one in (profile_check(folder / "metrics.jsonl") or {"parts": []})["parts"]:
            Compared(*(one[name] for name in part))
        evaluations(folder / "metrics.jsonl")
        for one in intervals:
            _ = one.get("seconds", 0.0) + one.get("samples", 0)

    return Reader({"metrics.jsonl": text.encode()}, read)


def _rejects() -> Reader:
    row = {"file": "a.jsonl", "line": 3, "reason": "bad_roles", "detail": "x"}
    text = "".join(json.dumps({**row, "line": number}) + "\n" for number in (1, 2, 3))
    return Reader(
        {"rejected.jsonl": text.encode()}, lambda folder: RejectCount.of_file(folder / "rejected.jsonl").describe()
    )


def _chat() -> Reader:
    turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A cat.", "weight": 1}]
    call = {"type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}
    turns += [
        {"from": "human", "value": "Sure?"},
        {"from": "gpt", "value": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"from": "observation", "value": "A dog."},
        {"from": "gpt", "value": "No."},
    ]
    tools = [{"name": "look", "parameters": {}}]
    line = {"id": 7, "image": "a.png", "system": "Be brief.", "tools": tools, "conversations": turns}
    return Reader(
        {"chat.json": json.dumps(line).encode()},
        lambda folder: parse_conversation((folder / "chat.json").read_bytes(), ("<s>", "<|im_end|>")),
    )


def _tokenizer() -> Reader:
    config = {"pad_token": {"content": "</s>"}, "added_tokens_decoder": {"5": {"content": "<a>", "special": True}}}
    files = {"tokenizer_config.json": json.dumps(config).encode(), "added_tokens.json": b'{"<b>": 9}'}
    return Reader(files, declared_tokens)
