"""Every reader of files that others wrote: whole files for it, and what a program does with them."""

import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.media.images import MAX_PIXELS, image_size, load_rgb
from megatron.vlm.data.media.sounds import load_sound, sound_length
from megatron.vlm.data.media.videos import read_frames, video_facts
from megatron.vlm.data.rejects import RejectCount, Rejected
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
from omnibal_ext.errors import UserError
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
from tests.unit.architectures import test_huggingface as published
from tests.unit.data.clips import noise, write_video
from tests.unit.data.noises import chirp, encoded

Files = Mapping[str, bytes]


@dataclass(frozen=True)
class Reader:
    """What is read: whole files by name, and a program that reads them in a folder."""

    files: Files
    read: Callable[[Path], Any]
    mend: Callable[[Path], None] = lambda folder: None
    """Makes hashes true again, so that what lies behind them is reached too."""


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def all_readers(folder: Path) -> dict[str, Reader]:
    """Every reader by its name; whole files are made in the folder."""
    from tests.fuzz.folder_readers import folder_readers  # which needs `Reader`

    return {
        "plan": _plan(), "profile": _profile(), "index": _index(folder / "index"), "sizes": _sizes(folder),
        "dataset": _dataset(folder / "demo"), "config": _config(), "weights": _weights(folder / "model"),
        "metrics": _metrics(), "rejects": _rejects(), "chat": _chat(), "images": _images(), "videos": _videos(),
        "sounds": _sounds(),
        "tokenizer": _tokenizer(),
        **folder_readers(folder),
    }  # fmt: skip


def _plan() -> Reader:
    predicted = {"step_seconds": 1.0, "bubble_fraction": 0.1, "stage_seconds": [0.5, 0.5], "stage_peak_bytes": [1, 2]}
    other = {"stages": [{"layers": [0, 5]}, {"layers": [5, 11]}], "step_seconds": 2.0, "predicted": predicted}
    plan = Plan.from_cuts(TINY.chain, (4,), ((1, 2), (7,)), num_microbatches=4, model="tiny", model_hash=TINY.hash,
                          vit_budget=4, llm_budget=64, predicted=predicted, alternatives=(other,))  # fmt: skip

    def read(folder: Path) -> None:
        found = Plan.load(folder / "plan.json")
        for number in range(len(found.alternatives)):
            found.alternative(number)
        found.check_model("tiny", TINY.hash, TINY.chain)
        if found.num_microbatches * len(found.stages) < 10_000:  # what a run would need anyway
            found.build_schedule()

    return Reader({"plan.json": json.dumps(plan.to_record()).encode()}, read)


def _profile() -> Reader:
    profile = analytic_profile(TINY, "h100", 4, 64)
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

    return Reader(content_of(folder), read, _true_hashes)


def _true_hashes(folder: Path) -> None:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
        for name in manifest["checksums"]:
            manifest["checksums"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        path.write_text(json.dumps(sealed(manifest)))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return


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

    return Reader({**files, "manifest.json": json.dumps(manifest).encode()}, read, _true_hashes)


def _dataset(folder: Path) -> Reader:
    demo_dataset(folder, folder / "dataset", 8)

    def read(folder: Path) -> None:
        data = ChatDataset(folder)
        for sample in range(len(data)):
            one = data.sample(sample)
            _ = one.text, one.images, one.orders

    return Reader(content_of(folder / "dataset"), read, _true_hashes)


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

    def read(folder: Path) -> None:
        errors = []
        for path in sorted(folder.glob("*.json")):
            try:
                _ = read_architecture(path).hash
            except UserError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    return Reader(files, read)


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


def _images() -> Reader:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 32, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6
    files = {}
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, kind, **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}))
        files[f"image.{kind.lower()}"] = out.getvalue()

    def read(folder: Path) -> None:
        for path in sorted(folder.glob("image.*")):
            try:
                image_size(path)
            except Rejected:
                continue
            try:
                load_rgb(path)
            except Exception as error:  # training names the file; Pillow's readers raise nearly anything
                raise UserError(f"{path}: {error!r}") from error

    return Reader(files, read)


def _videos() -> Reader:
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, codec in (("video.mp4", "mpeg4"), ("video.mkv", "mpeg4"), ("video.avi", "mjpeg")):
            write_video(Path(folder) / name, noise(6, 32, 24), 3, codec)
            files[name] = (Path(folder) / name).read_bytes()

    def read(folder: Path) -> None:
        for path in sorted(folder.glob("video.*")):
            try:
                facts = video_facts(path, (), MAX_PIXELS)
            except Rejected:
                continue
            try:
                list(read_frames(path, (), range(min(facts.frames, 16))))
            except Exception as error:  # training names the file; FFmpeg raises nearly anything
                raise UserError(f"{path}: {error!r}") from error

    return Reader(files, read)


def _sounds() -> Reader:
    wave, files = chirp(3000, 16000, 2), dict[str, bytes]()
    for container, codec in (("wav", "pcm_s16le"), ("flac", "flac"), ("mp3", "libmp3lame"), ("ogg", "libopus"),
                             ("ipod", "aac"), ("matroska", "aac"), ("aiff", "pcm_s16be")):  # fmt: skip
        files[f"sound.{container}"] = encoded(wave, 48000, codec, container)

    def read(folder: Path) -> None:
        for path in sorted(folder.glob("sound.*")):
            try:
                sound_length(path, (), 16000)
            except Rejected:
                continue
            try:
                load_sound(path, (), 16000)
            except Exception as error:  # training names the file; FFmpeg raises nearly anything
                raise UserError(f"{path}: {error!r}") from error

    return Reader(files, read)


def _tokenizer() -> Reader:
    config = {"pad_token": {"content": "</s>"}, "added_tokens_decoder": {"5": {"content": "<a>", "special": True}}}
    files = {"tokenizer_config.json": json.dumps(config).encode(), "added_tokens.json": b'{"<b>": 9}'}
    return Reader(files, declared_tokens)
