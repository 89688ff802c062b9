"""A model of every family in small, in a folder with all that a published one holds."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm.data.templates import chat_template
from megatron.vlm.preprocessing.tokenizer import load_tokenizer
from omnibal_ext.families.registry import MARKUPS
from omnibal_ext.modalities.modality import AUDIO
from tests.unit.data.clips import TURNS as FILMED
from tests.unit.data.clips import noise, write_frames, write_video
from tests.unit.data.noises import TURNS as HEARD
from tests.unit.data.noises import chirp, write_wav
from tests.unit.hf import models
from tests.unit.preprocessing.test_processors import JINJA

transformers = pytest.importorskip("transformers")
Fields = Mapping[str, Any]
TEXT = {**models.TEXT, "vocab_size": 512, "tie_word_embeddings": False}
ODD_HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
"""That two ranks share no groups of evenly."""
MROPE_TEXT = {**models.TEXT, "rope_parameters": models.MROPE}
TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% for part in m.content %}{{ part.text }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
)
QWEN_SYSTEM = (
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
)
CLIP_PIXELS = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SQUARE = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "do_center_crop": True}
GRIDS = {"image_grid_pinpoints": models.GRIDS}
IMAGE_INDEX = {"image_token_index": "<image>"}


@dataclass(frozen=True)
class Family:
    name: str
    """How transformers' classes begin."""
    vision: Fields
    text: Fields
    processor: Fields
    """Of preprocessor_config.json."""
    words: tuple[str, str]
    """Names of the chat template and, where it has tokens of its own, of the image's markup."""
    tokens: Mapping[str, str]
    """Fields of the config that hold a token's number."""
    jinja: str = ""
    more: Fields = field(default_factory=dict)
    """Other fields of the config."""
    files: Mapping[str, Fields] = field(default_factory=dict)
    """Others beside it."""
    drawn: bool = False
    """All weights are, those too that begin alike."""

    @property
    def sees_films(self) -> bool:
        return "video_preprocessor_config.json" in self.files or "video_token_index" in self.tokens

    @property
    def hears(self) -> bool:
        return "audio_config" in self.more


def llava(name: str, text: Fields, more: Fields) -> Family:
    """With Mistral's template; one square an image, or a grid of squares of the folder's choice."""
    processor = {**CLIP_PIXELS, **SQUARE, **more}
    return Family(name, models.CLIP, text, processor, ("mistral", ""), IMAGE_INDEX, JINJA["mistral"], more)


def gemma4(name: str, vision: Fields, text: Fields) -> Family:
    processor = {"do_normalize": False, "patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 6}
    files = {"tokenizer_config.json": {"bos_token": "<bos>"}}
    return Family(name, {**vision, "patch_size": 8}, {**text, "vocab_size": 512}, processor, ("gemma4", "gemma4"),
                  {"image_token_id": "<|image|>"}, JINJA["gemma4"], files=files)  # fmt: skip


FILMS = {"size": {"shortest_edge": 1024, "longest_edge": 8192}, "patch_size": 8}


def glm(name: str, text: Fields, template: str) -> Family:
    limits = {"size": {"shortest_edge": 512, "longest_edge": 8192}, "patch_size": 8, "merge_size": 2}
    vision = {**models.GLM_VIT, "patch_size": 8, "image_size": 40}
    return Family(name, vision, {**text, "vocab_size": 512}, {**CLIP_PIXELS, **limits}, ("glm-4.1v", "glm-4.1v"),
                  {"image_token_id": "<|image|>"}, template, files={"video_preprocessor_config.json": FILMS},
                  drawn=True)  # fmt: skip


def mistral(text: Fields) -> Family:
    return Family("Mistral3", {**models.PIXTRAL, "patch_size": 8}, text,
                  {**CLIP_PIXELS, "size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
                  ("mistral-v7", "mistral"), {"image_token_index": "[IMG]"}, models.MISTRAL_JINJA,
                  {"tie_word_embeddings": False},
                  {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"},
                   "processor_config.json": {"patch_size": 8, "spatial_merge_size": 2}})  # fmt: skip


def omni(name: str, vision: Fields, text: Fields, markup: str, system: str = "") -> Family:
    known = MARKUPS[markup]
    tokens = {
        "image_token_id": known.context,
        "vision_start_token_id": known.before,
        "audio_token_id": known.of(AUDIO).token,
    }
    tokens["audio_start_token_id"] = known.of(AUDIO).before
    family = qwen(name, vision, text, system)
    more = models.HEARD_2_5 if "2_5" in name else models.HEARD_3
    processor = {**family.processor, "feature_size": models.AUDIO["num_mel_bins"], "chunk_length": 300}
    return replace(family, processor=processor, words=("qwen-vl", markup), tokens=tokens, more=more, files={})


def qwen(name: str, vision: Fields, text: Fields, system: str = "") -> Family:
    pixels = CLIP_PIXELS if system else HALVES
    limits = {"min_pixels": 256, "max_pixels": 4096, "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    tokens = {f"{kind}_token_id": f"<|{kind}_pad|>" for kind in ("image", "video")}
    return Family(name, {**vision, "patch_size": 8}, {**text, "vocab_size": 512, "tie_word_embeddings": False},
                  {**pixels, **limits}, ("qwen-vl", "qwen-vl"), tokens, system + TURNS,
                  files={"video_preprocessor_config.json": FILMS})  # fmt: skip


FAMILIES = {
    "internvl3.5": Family(
        "InternVL", {**models.INTERN_VIT, "num_attention_heads": 4, "image_size": [32, 32], "patch_size": [8, 8]},
        {**TEXT, "model_type": "qwen3", "head_dim": 16}, {**IMAGENET, "max_patches": 32}, ("", ""), {},
        "{{ bos_token }}" + TURNS, {"image_token_id": 7, "tie_word_embeddings": False},
        {"tokenizer_config.json": {"bos_token": "<s>"}},
    ),
    "llava-1.5": llava("Llava", {**TEXT, **ODD_HEADS, "model_type": "llama"}, {}),
    "llava-1.6": llava("LlavaNext", {**models.MISTRAL, "vocab_size": 512}, GRIDS),
    "llava-next-video": llava("LlavaNextVideo", {**models.MISTRAL, "vocab_size": 512}, GRIDS),
    "video-llava": replace(
        llava("VideoLlava", {**TEXT, "model_type": "llama"}, {}), words=("mistral", "video-llava"),
        tokens={**IMAGE_INDEX, "video_token_index": "<video>"},
    ),
    "vip-llava": llava("VipLlava", {**TEXT, "model_type": "llama"}, {"vision_feature_layer": [-2, 1]}),
    "llava-onevision": Family(
        "LlavaOnevision", models.SIGLIP, {**TEXT, "model_type": "qwen2"}, {**HALVES, "size": SQUARE["crop_size"]},
        ("qwen-vl", ""), IMAGE_INDEX,
        more={"image_grid_pinpoints": [[16 * rows, 16 * columns] for rows in range(1, 7) for columns in range(1, 7)]},
    ),
    "qwen2-vl": qwen("Qwen2VL", models.QWEN2_VL, MROPE_TEXT, QWEN_SYSTEM),
    "qwen2.5-vl": qwen("Qwen2_5_VL", {**models.QWEN2_5_VL, "window_size": 32}, MROPE_TEXT, QWEN_SYSTEM),
    "qwen3-vl": qwen("Qwen3VL", models.QWEN3_VL, models.QWEN3_VL_TEXT),
    "qwen3-vl-moe": qwen("Qwen3VLMoe", models.QWEN3_VL, {**models.QWEN3_VL_TEXT, **models.EXPERTS}),
    "qwen2.5-omni": omni("Qwen2_5OmniThinker", {**models.QWEN2_5_VL, "window_size": 32}, MROPE_TEXT, "qwen2.5-omni",
                         QWEN_SYSTEM),
    "qwen3-omni": omni(
        "Qwen3OmniMoeThinker", models.QWEN3_VL, {**models.QWEN3_VL_TEXT, **models.EXPERTS}, "qwen3-omni"
    ),
    "gemma-3": Family(
        "Gemma3", models.SIGLIP, {**models.GEMMA, "vocab_size": 512},
        {**HALVES, "resample": 2, "size": SQUARE["crop_size"]}, ("gemma", "gemma"),
        {"image_token_index": "<image_soft_token>"}, models.GEMMA_JINJA, {"mm_tokens_per_image": 4},
        {"tokenizer_config.json": {"bos_token": "<bos>"}},
    ),
    "gemma-4": gemma4("Gemma4", models.GEMMA_4_VIT, {**models.GEMMA_4_INPUTS, "vocab_size_per_layer_input": 512}),
    "gemma-4-unified": gemma4(
        "Gemma4Unified", {**models.GEMMA_4_PATCHES, "pooling_kernel_size": 3}, models.GEMMA_4_WORDS
    ),
    "qwen3.5": qwen("Qwen3_5", models.QWEN3_5, models.QWEN3_5_TEXT),
    "qwen3.5-moe": qwen("Qwen3_5Moe", models.QWEN3_5, {**models.QWEN3_5_TEXT, **models.EXPERTS, **models.SHARED}),
    "mistral-3": mistral({**models.MISTRAL, "vocab_size": 512}),
    "ministral-3": mistral({**models.MINISTRAL, "vocab_size": 512}),
    "lighton-ocr": Family(
        "LightOnOcr", {**models.PIXTRAL, "patch_size": 8}, {**TEXT, "model_type": "qwen3", "head_dim": 16},
        {**CLIP_PIXELS, "size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}},
        ("qwen-vl", "lighton_ocr"), {"image_token_id": "<|image_pad|>"}, TURNS, {"tie_word_embeddings": False},
        {"processor_config.json": {"patch_size": 8, "spatial_merge_size": 2}},
    ),
    "paddleocr-vl": Family(
        "PaddleOCRVL", {**models.PADDLEOCR_VIT, "patch_size": 8, "image_size": 40},
        {**models.PADDLEOCR_TEXT, "vocab_size": 512, "pad_token_id": 511},
        {**HALVES, "min_pixels": 256, "max_pixels": 4096, "patch_size": 8, "merge_size": 2, "temporal_patch_size": 1},
        ("qwen-vl", "paddleocr-vl"), {"image_token_id": "<|IMAGE_PLACEHOLDER|>"}, TURNS,
    ),
    "glm-ocr": glm("GlmOcr", models.GLM_OCR_TEXT, models.GLM_JINJA),
    "glm-4.1v": glm("Glm4v", models.GLM_TEXT, models.GLM_JINJA),
    "glm-4.5v": glm("Glm4vMoe", models.GLM_MOE_TEXT, models.GLM_THINKING_JINJA),
    "smolvlm": Family(
        "SmolVLM", models.IDEFICS_3, {**TEXT, "model_type": "llama"},
        {**HALVES, "resample": 1, "size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
        ("smolvlm", "idefics3"), {"image_token_id": "<image>"}, JINJA["smolvlm"],
    ),
    "deepseek-vl": Family(
        "DeepseekVL", models.SIGLIP, {**TEXT, "model_type": "llama"}, {**HALVES, "size": SQUARE["crop_size"]},
        ("deepseek-vl", "deepseek-vl"), {"image_token_id": "<image_placeholder>"}, more={"tie_word_embeddings": False},
    ),
    "paligemma-2": Family(
        "PaliGemma", models.PALIGEMMA_VIT, {**models.PALIGEMMA_2, "vocab_size": 512},
        {**HALVES, "resample": 3, "size": {"height": 8, "width": 8}}, ("paligemma", "paligemma"), IMAGE_INDEX,
        more={"projection_dim": 48},
    ),
}  # fmt: skip
UNPACKED = ("paligemma-2",)
PACKED = [family for family in FAMILIES if family not in UNPACKED]
"""Those whose packs transformers can run."""
WITH_KERNELS = ("qwen3.5", "qwen3.5-moe")
"""Of them those that need kernels of linear attention, for which `loops.py` has stand-ins."""


def build(family: str, demo: Path, folder: Path) -> None:
    """The model in `folder`/model, beside conversations; about films and sounds too, where they are for it."""
    (folder / "demo").symlink_to(demo)
    save_model(family, folder / "model", demo / "tokenizer.model")
    if FAMILIES[family].hears:
        for number in range(3):
            write_wav(folder / f"sound{number}.wav", chirp(12000 + 9000 * number, seed=number))
        image = min(path.name for path in (demo / "images").iterdir())
        shown = [
            {"audio": "sound0.wav", "image": f"demo/images/{image}"},
            {"audio": ["sound1.wav", "sound2.wav"]},
        ]
        turns = [[{**HEARD[0], "value": marks + HEARD[0]["value"]}, HEARD[1]] for marks in ("<image>", "<audio>")]
        lines = [json.dumps({**one, "conversations": said}) for one, said in zip(shown, turns, strict=True)]
        (folder / "sounds.jsonl").write_text("\n".join(lines))
    if FAMILIES[family].sees_films:
        frames = noise(9, 48, 32)
        write_video(folder / "film.mp4", frames, 4)
        shown = [{"video": "film.mp4"}, {"video": write_frames(folder, "frame", frames), "fps": 3}]
        (folder / "films.jsonl").write_text("\n".join(json.dumps({**one, "conversations": FILMED}) for one in shown))


def save_model(name: str, folder: Path, tokenizer: Path) -> None:
    family = FAMILIES[name]
    folder.mkdir()
    shutil.copyfile(tokenizer, folder / "tokenizer.model")
    torch.manual_seed(0)
    template, markup = family.words
    special = MARKUPS[markup].tokens if markup else tuple(family.tokens.values())
    loaded = load_tokenizer(tokenizer, (*chat_template(template).tokens, *special)) if family.tokens else None
    tokens = {name: loaded.token_id(token) for name, token in family.tokens.items()} if loaded else {}
    config = getattr(transformers, f"{family.name}Config")(
        vision_config=dict(family.vision), text_config=dict(family.text), **tokens, **family.more
    )
    model = getattr(transformers, f"{family.name}ForConditionalGeneration")(config)
    (models.randomised(model, 0) if family.drawn else model).save_pretrained(folder)
    for file, fields in {**family.files, "preprocessor_config.json": family.processor}.items():
        (folder / file).write_text(json.dumps(fields))
    if family.jinja:
        (folder / "chat_template.jinja").write_text(family.jinja)
