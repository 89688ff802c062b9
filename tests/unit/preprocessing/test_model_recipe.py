"""A model decides how its data are made: what contradicts it is refused before a line is read."""

import json
import random
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from examples.demo.data import train_tokenizer
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.templates import chat_template
from megatron.vlm.data.turns import ASSISTANT, USER, Message
from megatron.vlm.preprocessing.folder_files import folder_settings
from megatron.vlm.preprocessing.model_recipe import check_tokenizer, model_settings, with_pixels
from megatron.vlm.preprocessing.model_recipe import resolve_settings as settle_with_origins
from megatron.vlm.preprocessing.recipe import Recipe
from megatron.vlm.preprocessing.samples import SampleMaker
from omnibal_ext.architectures.huggingface import read_architecture
from omnibal_ext.architectures.presets import PRESETS
from omnibal_ext.errors import UserError
from omnibal_ext.families.internvl.presets import INTERNVL
from omnibal_ext.families.llava.presets import LLAVA
from omnibal_ext.families.media import TILINGS
from omnibal_ext.families.registry import MARKUPS, TEMPLATES
from omnibal_ext.preprocess_flags import DEFAULTS

TOKENIZER = Path("tokenizer.model")
SIDES = {"qwen2-vl-7b": 14, "qwen2.5-vl-7b": 14, "qwen3-vl-8b": 16}
"""Of a patch, in pixels."""
LLAVA_CONFIG: dict[str, Any] = {
    "model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064},
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAVA_CONFIG))
    (tmp_path / "tokenizer.model").write_bytes(train_tokenizer())
    return tmp_path


def resolve_settings(given: dict[str, Any], model: str | None) -> dict[str, Any]:
    return {flag: choice.value for flag, choice in settle_with_origins(given, model).items()}


def maker(tokenizer: Path, **changed: Any) -> SampleMaker:
    return SampleMaker(Recipe(tokenizer.parent, tokenizer, **{"template": "vicuna", "tiling": Tiling(), **changed}))


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_names_what_there_is_and_what_goes_together(name: str) -> None:
    wanted, model = {flag: choice.value for flag, choice in model_settings(PRESETS[name], None).items()}, PRESETS[name]
    assert wanted["image-markup"] in MARKUPS
    assert TILINGS[wanted["tiling"]].joins_tiles == model.newline
    assert wanted["image-markup"].endswith("llava") == ("llava" in name)
    pixels = {"llava-one": "half", "llava": "clip", "qwen2": "clip", "qwen3": "half"}
    pixels |= {"gemma-4-12b": "unit", "gemma": "half"}
    pixels |= {"mistral-small": "clip", "ministral": "clip", "lighton": "clip", "glm": "clip"}
    pixels |= {"idefics3": "half", "smolvlm": "half", "deepseek": "half", "paddle": "half"}
    assert model.vision.pixels == next((pixels[one] for one in pixels if one in name), "imagenet")
    assert TILINGS[wanted["tiling"]].native == (model.vision.native is not None)
    if name != "tiny":
        in_folder = ("glm-ocr", "lighton-ocr-1b", "paddleocr-vl")  # alone
        assert name in in_folder or wanted["chat-template"] in TEMPLATES
        assert model.prompt.image_token_id is None or model.prompt.image_token_id < model.language.vocab_size


def test_presets_have_the_template_of_their_language_model() -> None:
    """By hand, from the models' own chat templates."""
    marks = {
        "internlm2": ("<s>", "<|im_start|>"), "qwen": ("", "<|im_start|>"), "yi": ("", "<|im_start|>"),
        "llama3-70b": ("<|begin_of_text|>", "<|im_start|>"), "llama3-8b": ("<|begin_of_text|>", "<|start_header_id|>"),
        "mistral": ("<s>", "[INST]"), "vicuna": ("<s>", "USER:"),
    }  # fmt: skip
    parts = [(name, language) for name, (_, language, _) in INTERNVL.items()]
    parts += [(name, language) for name, (language, _, _) in LLAVA.items()]
    for name, language in parts:
        beginning, opening = next(mark for start, mark in marks.items() if language.startswith(start))
        template = chat_template(str(PRESETS[name].prompt.chat_template))
        written = template.written((Message(USER, "What?"), Message(ASSISTANT, "A cat.")), default_system=False)[0]
        assert written.startswith(beginning + opening), name


@pytest.mark.parametrize(
    ("kind", "width", "preset_name", "template"),
    [("qwen2_vl", None, "qwen2-vl-2b", "qwen-vl"), ("qwen2_5_vl", 8192, "qwen2.5-vl-3b", "qwen2.5-vl"),
     ("qwen3_vl", 4096, "qwen3-vl-8b", "qwen3-vl"), ("qwen3_5", 4096, "qwen3.5-9b", "qwen3.5")],
)  # fmt: skip
def test_qwens_have_templates(tmp_path: Path, kind: str, width: int | None, preset_name: str, template: str) -> None:
    tower = {"hidden_size": 8192} if width is None else {"out_hidden_size": width}
    config = {"model_type": kind, "vision_config": tower, "text_config": {"model_type": f"{kind}_text"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for known in (PRESETS[preset_name], read_architecture(tmp_path)):
        assert model_settings(known, None)["chat-template"].value == template


def test_what_nobody_says_is_the_models_or_usual() -> None:
    given = {"tokenizer-model": TOKENIZER, "tiling": None}
    assert resolve_settings(given, "llava-1.6-mistral-7b") == {
        "tiling": "anyres", "tile-size": 336, "tokens-per-tile": 576, "normalize": "clip", "image-markup": "llava",
        "chat-template": "mistral", "tokenizer-model": TOKENIZER, "min-tiles": 1, "max-tiles": 12, "thumbnail": True,
    }  # fmt: skip
    alone = resolve_settings({**given, "chat-template": "chatml"}, None)
    assert alone == {**DEFAULTS, "chat-template": "chatml", "tokenizer-model": TOKENIZER}


@pytest.mark.parametrize(
    ("model", "flag", "value", "wanted"),
    [
        ("llava-1.5-7b", "tile-size", 448, 336),
        ("llava-1.5-7b", "tokens-per-tile", 256, 576),
        ("llava-1.5-7b", "normalize", "imagenet", "clip"),
        ("llava-1.5-7b", "tiling", "anyres", "pad"),
        ("llava-1.6-vicuna-7b", "tiling", "internvl", "anyres"),
        ("llava-1.5-7b", "image-markup", "internvl", "llava"),
        ("gemma-3-4b", "tiling", "fixed", "gemma"),
    ],
)
def test_a_flag_that_contradicts_the_model_is_refused_with_both(model: str, flag: str, value: Any, wanted: Any) -> None:
    with pytest.raises(UserError, match=f"--{flag} {value}, but model '{model}' needs {wanted}"):
        resolve_settings({"tokenizer-model": TOKENIZER, flag: value}, model)


def test_what_says_the_same_in_other_words_is_taken() -> None:
    given = {"tokenizer-model": TOKENIZER, "chat-template": "chatml", "tiling": "fixed", "tile-size": 448}
    assert resolve_settings(given, "internvl3-8b").items() >= given.items()


def test_flags_override_what_is_the_users_choice() -> None:
    given = {"tokenizer-model": TOKENIZER, "chat-template": "vicuna", "max-tiles": 6, "thumbnail": False}
    chosen = settle_with_origins(given, "internvl2-8b")
    assert {flag: chosen[flag].value for flag in given} == given
    assert {flag: chosen[flag].origin for flag in given} == {flag: f"--{flag}" for flag in given}
    assert (chosen["tile-size"].origin, chosen["min-tiles"].origin) == ("the preset", "usual")


@pytest.mark.parametrize(
    ("text", "template"),
    [({}, "vicuna"), ({"model_type": "mistral"}, "mistral"), ({"vocab_size": 128320}, "llava-llama3")],
)
def test_a_llavas_language_model_says_the_template(folder: Path, text: dict[str, Any], template: str) -> None:
    config = {**LLAVA_CONFIG, "text_config": {"model_type": "llama", "vocab_size": 32064, **text}}
    (folder / "config.json").write_text(json.dumps(config))
    # As published: the assistant's words without their end.
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    chosen = settle_with_origins({}, str(folder))["chat-template"]
    assert (chosen.value, chosen.origin) == (template, "config.json")


@pytest.mark.parametrize("model", ["qwen2-vl-7b", "qwen2.5-vl-7b", "qwen3-vl-8b"])
@pytest.mark.parametrize("patches", [16, 100, 777, 4096])
def test_most_pixels_of_an_image_are_those_of_the_processor(model: str, patches: int) -> None:
    """transformers' own sizes, with the most that its processor is given."""
    resize = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl").smart_resize
    choices = with_pixels(settle_with_origins({"tokenizer-model": TOKENIZER}, model), patches * SIDES[model] ** 2)
    side, *limits = (choices[flag].value for flag in ("tile-size", "min-tiles", "max-tiles"))
    assert side == SIDES[model]
    generator = np.random.default_rng(patches)
    for width, height in generator.integers(20, 3000, (50, 2)).tolist():
        columns, rows = TILINGS["native"].grid(width, height, side, *limits)
        pixels = [limit * side**2 for limit in limits]
        assert resize(height, width, 2 * side, *pixels) == (rows * side, columns * side)


def test_pixels_that_are_no_limit_of_a_model_are_refused() -> None:
    given = {"tokenizer-model": TOKENIZER}
    native, tiled = (settle_with_origins(given, model) for model in ("qwen2-vl-7b", "internvl3-8b"))
    assert with_pixels(tiled, None) == tiled
    with pytest.raises(UserError, match="images become tiles of 448 pixels a side here; give --max-tiles"):
        with_pixels(tiled, 10**6)
    assert with_pixels(native, 16 * 14**2)["max-tiles"].value == 16
    with pytest.raises(UserError, match="--max-pixels 3135: must be at least 3136"):
        with_pixels(native, 16 * 14**2 - 1)


def test_what_nobody_can_know_is_asked_for(folder: Path) -> None:
    of_folder = resolve_settings({"chat-template": "vicuna"}, str(folder))
    assert (of_folder["tokenizer-model"], of_folder["tiling"]) == (folder / "tokenizer.model", "pad")
    strange = {**LLAVA_CONFIG, "text_config": {"model_type": "llama", "vocab_size": 64064}}
    (folder / "config.json").write_text(json.dumps(strange))
    with pytest.raises(UserError, match=r"no chat template: copy the model's chat_template.jinja into .*, or name one"):
        resolve_settings({}, str(folder))
    (folder / "tokenizer.model").unlink()
    with pytest.raises(
        UserError,
        match=r"no tokenizer: copy the model's tokenizer.json or .*, or name one",
    ):
        resolve_settings({"chat-template": "vicuna"}, str(folder))
    assert resolve_settings({"chat-template": "vicuna", "tokenizer-model": TOKENIZER}, str(folder))["tile-size"] == 336
    with pytest.raises(UserError, match="there is no tokenizer: give --model, or name one by --tokenizer-model"):
        resolve_settings({"chat-template": "chatml"}, None)


SIGLIP = {"image_processor_type": "SiglipImageProcessor"}


@pytest.mark.parametrize("seed", range(60))
def test_llavas_square_is_its_processors_or_refused(folder: Path, seed: int) -> None:
    """Whatever the file says or leaves out: pixels equal those of transformers' processor."""
    pytest.importorskip("transformers")
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    draw = random.Random(seed)
    side = draw.choice([28, 224])
    square, kinds = {"height": side, "width": side}, [True, False, None]
    choices: dict[str, list[Any]] = {"size": [{"shortest_edge": side}, square, side], "crop_size": [square, side],
                                     "do_center_crop": kinds, "do_pad": kinds}  # fmt: skip
    fields = {name: draw.choice(values) for name, values in choices.items() if draw.random() < 0.7}
    theirs, kind = draw.choice([(LlavaImageProcessorPil, {}), (SiglipImageProcessorPil, SIGLIP)])
    (folder / "preprocessor_config.json").write_text(json.dumps({**fields, **kind}))
    config = {**LLAVA_CONFIG, "vision_config": {**LLAVA_CONFIG["vision_config"], "image_size": side}}
    (folder / "config.json").write_text(json.dumps(config))
    try:
        chosen = folder_settings(folder, read_architecture(folder), with_template=False)
    except UserError as error:
        assert re.search("config.json: (do_center_crop is False|(crop_)?size is missing|SigLIP's)", str(error))  # noqa: PT017
        return
    if not {**fields, **kind}:
        assert "tiling" not in chosen  # a folder without a processor's file: as the model was trained
        return
    noise = np.random.default_rng(seed).integers(0, 256, (draw.randint(20, 300), draw.randint(20, 300), 3), np.uint8)
    made = theirs(**fields, do_rescale=False, do_normalize=False)(Image.fromarray(noise), return_tensors="np")
    ours = np.asarray(TILINGS[chosen["tiling"].value].resize(Image.fromarray(noise), (side, side))).transpose(2, 0, 1)
    assert np.array_equal(made["pixel_values"][0], ours)


def test_tokens_that_the_model_has_otherwise_are_refused(folder: Path) -> None:
    """Ids behind its vocabulary, the image token at another place, all of another model's."""
    opened = maker(folder / "tokenizer.model", markup="llava")
    with pytest.raises(UserError, match=f"'<image>' is token {opened.image_token_id}, model .* has it at 32000"):
        check_tokenizer(opened, str(folder))
    words, config = opened.tokenizer.vocab_size, {**LLAVA_CONFIG, "image_token_index": opened.image_token_id}
    for size, refused in ((words, False), (words - 1, True)):
        text = {"model_type": "llama", "vocab_size": size}
        (folder / "config.json").write_text(json.dumps({**config, "text_config": text}))
        said = f"ids reach {words - 1} .*'<image>' is {words - 1}.* has {size} words"
        with pytest.raises(UserError, match=said) if refused else nullcontext():
            check_tokenizer(opened, str(folder))
    tokenizers, other = pytest.importorskip("tokenizers"), folder / "other.json"
    tokenizers.Tokenizer(tokenizers.models.BPE({f"p{number}": number for number in range(1000)}, [])).save(str(other))
    opened = maker(other, markup="llava")
    (folder / "config.json").write_text(json.dumps({**LLAVA_CONFIG, "image_token_index": opened.image_token_id}))
    with pytest.raises(UserError, match=r"other\.json: not the tokenizer .*tokenizer\.model of model"):
        check_tokenizer(opened, str(folder))
