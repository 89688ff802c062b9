"""What a model's folder says is read from its files; what they say and we cannot do is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.preprocessing.folder_template import folder_template
from megatron.vlm.preprocessing.model_recipe import resolve_settings
from omnibal_ext.errors import UserError
from tests.unit.hf.models import GEMMA_JINJA

pytest.importorskip("jinja2")

INTERNVL = {
    "model_type": "internvl", "image_token_id": 9, "text_config": {"model_type": "qwen2", "vocab_size": 600},
    "vision_config": {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]},
}  # fmt: skip
PROCESSOR = {
    "image_processor_type": "GotOcr2ImageProcessor", "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225], "do_resize": True, "resample": 3, "rescale_factor": 0.00392156862745098,
    "size": {"height": 28, "width": 28}, "min_patches": 2, "max_patches": 6,
}  # fmt: skip
# As published: InternVL3's processor, Qwen2.5's tokenizer (shortened), Vicuna as LLaVA's makers wrote it.
INTERNVL_JINJA = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_JINJA = (
    "{{ bos_token }}{%- for message in messages -%}{{- '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% generation %}{{- '<|im_end|>' + '\n' }}{% endgeneration %}{%- endfor %}"
)
PLAIN_JINJA = CHATML_JINJA.replace("{{ bos_token }}", "")
MISTRAL_JINJA = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
    "{{ ' ' + message['content'] + eos_token }}{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def settled(folder: Path, template: str) -> dict[str, Any]:
    """Every flag's value for a folder that has no template or tokenizer of its own."""
    given = {"chat-template": template, "tokenizer-model": folder / "tokenizer.json"}
    return {flag: choice.value for flag, choice in resolve_settings(given, str(folder)).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "chat_template.jinja").write_text(INTERNVL_JINJA)
    (tmp_path / "tokenizer.json").write_text("{}")
    return write(tmp_path, config=INTERNVL, preprocessor_config=PROCESSOR)


def test_a_folder_is_enough_and_every_value_has_its_file(folder: Path) -> None:
    wanted = {
        "config.json": {"tiling": "internvl", "tile-size": 28, "tokens-per-tile": 1, "image-markup": "internvl"},
        "preprocessor_config.json": {"normalize": "imagenet", "min-tiles": 2, "max-tiles": 6},
        "usual": {"thumbnail": True}, "chat_template.jinja": {"chat-template": "hermes-2"},
        "tokenizer.json": {"tokenizer-model": folder / "tokenizer.json"},
    }  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for flag, choice in resolve_settings({}, str(folder)).items():
        found.setdefault(choice.origin, {})[flag] = choice.value
    assert found == wanted
    assert resolve_settings({"max-tiles": 3, "chat-template": "llama3"}, str(folder))["max-tiles"].value == 3
    (folder / "preprocessor_config.json").unlink()  # newer folders keep the processor in one file
    write(folder, processor_config={"image_processor": PROCESSOR, "image_seq_length": 1})
    assert resolve_settings({}, str(folder))["max-tiles"].origin == "processor_config.json"


def test_internvls_own_config_says_its_tiles(folder: Path) -> None:
    own = {"min_dynamic_patch": 1, "max_dynamic_patch": 7, "use_thumbnail": False, "dynamic_image_size": False}
    write(folder, config=INTERNVL | own, preprocessor_config={})
    chosen = resolve_settings({}, str(folder))
    taken = {flag: chosen[flag].value for flag in ("min-tiles", "max-tiles", "thumbnail", "tiling")}
    assert taken == {"min-tiles": 1, "max-tiles": 7, "thumbnail": False, "tiling": "fixed"}


HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}
PIXTRAL = {"model_type": "mistral3", "text_config": {"model_type": "mistral", "vocab_size": 600},
           "vision_config": {"model_type": "pixtral", "patch_size": 14}}  # fmt: skip
# config.json, the processor's file, and further ones
OWN = (INTERNVL, PROCESSOR, {})
DEEPSEEK = ({"model_type": "deepseek_vl", "vision_config": SIGLIP, "text_config": {"model_type": "llama"}}, HALF, {})
GEMMA_3 = ({"model_type": "gemma3", "vision_config": SIGLIP, "text_config": {"model_type": "gemma3_text"},
            "mm_tokens_per_image": 1}, HALF | {"resample": 2, "do_pan_and_scan": None}, {})  # fmt: skip
UNIFIED = ({"model_type": "gemma4_unified", "vision_config": {"model_type": "gemma4_unified_vision"}},
           {"image_processor_type": "Gemma4UnifiedImageProcessor", "max_soft_tokens": 560}, {})  # fmt: skip
PADDLE = ({"model_type": "paddleocr_vl"}, HALF | {"patch_size": 14, "temporal_patch_size": 1}, {})
EDGE = (PIXTRAL, {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 1540}},
        {"processor_config": {"patch_size": 14, "spatial_merge_size": 2}})  # fmt: skip


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (OWN, {"image_mean": [0.4, 0.5, 0.5]}, r"preprocessor_config.json: image_mean \[0.4, 0.5, 0.5\]"),
        (OWN, {"image_std": 0.5}, "image_std 0.5 are none of"),
        (OWN, {"resample": 2}, "resample is 2; supported: 3"),
        (OWN, {"do_normalize": False}, "do_normalize is False"),
        (OWN, {"rescale_factor": 0.5}, "rescale_factor is 0.5"),
        (OWN, {"rescale_factor": 0.001}, "rescale_factor is 0.001"),
        (OWN, {"size": {"height": 56, "width": 28}}, "size is 56, the model of config.json sees tiles of 28"),
        (OWN, {"crop_size": 14}, "crop_size is 14"),
        (DEEPSEEK, {"image_mean": None}, r"image_mean is None; supported: \[0.5, 0.5, 0.5\]"),  # which means CLIP's
        (DEEPSEEK, {"do_pad": False}, "do_pad is False; supported: True"),
        (DEEPSEEK, {"min_size": 1}, "min_size is 1; supported: 14"),
        (DEEPSEEK, {"size": {"height": 28, "width": 56}}, "size is 56"),
        (GEMMA_3, {"do_pan_and_scan": True}, "do_pan_and_scan is True"),  # which makes further crops
        (GEMMA_3, {"resample": 3}, "supported: 2"),
        (UNIFIED, {"pooling_kernel_size": 2}, "patches of 16 pixels, 2 a side, the model of config.json has 48 pixels"),
        (UNIFIED, {"patch_size": 14}, "patches of 14 pixels, 3 a side"),
        (UNIFIED, {"patch_size": "wide"}, "patch_size must be"),
        (UNIFIED, {"max_soft_tokens": 0.5}, "max_soft_tokens must be"),
        (PADDLE, {"min_pixels": 147385}, "is 147385; supported: mult"),
        (PADDLE, {"temporal_patch_size": 2}, "2, the"),
        (EDGE, {"size": {"longest_edge": 1024}}, "longest_edge is 1024"),
        ((*EDGE[:2], {}), {}, "patches of 16 pixels, 1 a side, the model of config.json has 28 pixels"),
        ((*EDGE[:2], {"processor_config": {"patch_size": 14, "spatial_merge_size": 1}}), {}, "of 14 pixels, 1 a side"),
    ],
)
def test_a_processor_that_gives_other_pixels_is_refused_by_its_field(
    tmp_path: Path, model: Any, change: dict[str, Any], message: str
) -> None:
    config, pixels, more = model
    write(tmp_path, config=config, preprocessor_config=pixels | change, **more)
    with pytest.raises(UserError, match=message):
        settled(tmp_path, "llama3")


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        (DEEPSEEK, {"normalize": "half"}), (EDGE, {"max-tiles": 110**2}),
        (GEMMA_3, {"tiling": "gemma", "image-markup": "gemma", "normalize": "half"}),
        (UNIFIED, {"tile-size": 48, "min-tiles": 1, "max-tiles": 560}),
        *(((PADDLE[0], PADDLE[1] | pixels, {}), {"min-tiles": least, "max-tiles": most}) for pixels, least, most in (
            ({"min_pixels": 112896, "max_pixels": 1003520}, 576, 5120),
            ({"min_pixels": 147384, "max_pixels": 2822400}, 751, 14400),  # limits may be no whole patches
            ({"size": {"shortest_edge": 384**2, "longest_edge": 1536**2}}, 752, 12037), ({}, 752, 12037),
        )),
    ],
)  # fmt: skip
def test_a_processor_s_file_says_how_images_are_seen(tmp_path: Path, model: Any, wanted: dict[str, Any]) -> None:
    config, pixels, more = model
    write(tmp_path, config=config, preprocessor_config=pixels, **more)
    assert wanted.items() <= settled(tmp_path, "llama3").items()


@pytest.mark.parametrize(
    ("files", "template", "file"),
    [
        ({"tokenizer_config": {**TOKENS, "chat_template": CHATML_JINJA}}, "internlm2-chat", "tokenizer_config.json"),
        ({"tokenizer_config": {"chat_template": CHATML_JINJA}}, "hermes-2", "tokenizer_config.json"),
        ({"tokenizer_config": TOKENS, "chat_template": {"chat_template": MISTRAL_JINJA}}, "mistral",
         "chat_template.json"),
        (  # the tokenizer begins the text, as its own file says
            {"tokenizer_config": {**TOKENS, "chat_template": PLAIN_JINJA, "add_bos_token": True}},
            "internlm2-chat", "tokenizer_config.json",
        ),
        (
            {"tokenizer_config": {"chat_template": PLAIN_JINJA},
             "tokenizer": {"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, {
                 "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}]}]}}},
            "internlm2-chat", "tokenizer_config.json",
        ),
        ({"tokenizer_config": {"bos_token": "<bos>"}, "chat_template": {"chat_template": GEMMA_JINJA}}, "gemma",
         "chat_template.json"),
        (
            {"tokenizer_config": {**TOKENS, "chat_template": [{"name": "rag", "template": "x"},
                                                              {"name": "default", "template": MISTRAL_JINJA}]}},
            "mistral", "tokenizer_config.json",
        ),
    ],
)  # fmt: skip
def test_a_template_is_known_by_what_it_writes(tmp_path: Path, files: dict[str, Any], template: str, file: str) -> None:
    assert folder_template(write(tmp_path, **files)) == (template, file)


def test_a_template_that_ends_no_answer_is_refused(tmp_path: Path) -> None:
    assert folder_template(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text(INTERNVL_JINJA.replace("<|im_end|>", "<|end|>"))
    with pytest.raises(UserError, match="writes no special token of the tokenizer behind an answer"):
        folder_template(tmp_path)


@pytest.mark.parametrize(("kind", "processor", "markup"), [
    ("glm4v", "Glm4vProcessor", "glm-4.1v"), ("glm46v", None, "glm-4.6v"), ("glm4v_moe", None, "glm-4.1v"),
    ("glm4v_moe", "Glm46VProcessor", "glm-4.6v"),
])  # fmt: skip
def test_glms_folder_says_how_times_are_written(tmp_path: Path, kind: str, processor: str | None, markup: str) -> None:
    text = {"partial_rotary_factor": 0.5, "head_dim": 128}
    pixels = {"size": {"shortest_edge": 12544, "longest_edge": 9633792}, "processor_class": processor}
    write(tmp_path, config={"model_type": kind, "text_config": text}, preprocessor_config=pixels)
    found = settled(tmp_path, "glm-4.5v")
    assert (found["image-markup"], found["min-tiles"], found["max-tiles"]) == (markup, 32, 24576)
    assert found["video"].sampling == ("by length" if markup == "glm-4.6v" else "by second")
