"""What the model is given is what transformers' own processors give: tokens one by one, pixels within rounding."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from megatron.vlm.data.chat_program import GENERATION
from megatron.vlm.data.dataset import ChatDataset
from megatron.vlm.data.inputs.images import pixels_of
from megatron.vlm.data.media.tiles import Tiling
from megatron.vlm.data.templates import chat_template
from megatron.vlm.preprocessing.model_recipe import resolve_settings
from megatron.vlm.preprocessing.recipe import Recipe
from omnibal_ext.families.registry import MARKUPS, TEMPLATES
from tests.demo import byte_level, dataset_of, turns
from tests.unit.data.torchvision_stand_in import stand_in

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TILE, PATCH = 28, 14  # 2 x 2 patches a tile: 4 features, or 1 after InternVL's shuffle
SQUARE = {"height": TILE, "width": TILE}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
EDGES = {"shortest_edge": 16 * PATCH**2, "longest_edge": 120 * PATCH**2}
CLIP, SIGLIP = ({"model_type": f"{kind}_vision_model", "image_size": TILE} for kind in ("clip", "siglip"))
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
CHATML = ["<|im_start|>", "<|im_end|>"]
INTERNVL_TOKENS = ["<img>", "</img>", "<IMG_CONTEXT>", "<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"]


def written_tokenizer(path: Path) -> Path:
    byte_level(["What is in the picture? A cat and a dog.", "USER: ASSISTANT:"]).save(str(path))
    return path


def fast(path: Path, special: list[str], **roles: str) -> Any:
    """The file with special tokens added in that order, and the names of some of them."""
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=roles)


def of_transformers(name: str, model: str, kind: str = "processing") -> Any:
    """A class of transformers; a processor's does not look for its parts: those of videos or sounds need packages."""
    found = getattr(import_module(f"transformers.models.{model}.{kind}_{model}"), name)
    return type(name, (found,), {"check_argument_for_proper_class": lambda *_: None}) if kind == "processing" else found


def pictures_of(name: str, model: str, **how: Any) -> Any:
    return of_transformers(f"{name}ImageProcessorPil", model, "image_processing_pil")(**how)


# Of each model its processor, and the mark of an image in its prompts.


def internvl(path: Path) -> tuple[Any, str]:
    roles = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    tokenizer = fast(path, ["<|im_start|>", "<|im_end|>", *INTERNVL_TOKENS], **roles, video_token="<video>")
    pictures = pictures_of("GotOcr2", "got_ocr2", size=SQUARE, crop_to_patches=True, max_patches=12, **IMAGENET)
    whole = of_transformers("InternVLProcessor", "internvl")(pictures, tokenizer, None, image_seq_length=1)
    return whole, "<IMG_CONTEXT>"


def llava(path: Path, pad: bool = False) -> tuple[Any, str]:
    pictures = pictures_of("Llava", "llava", size={"shortest_edge": TILE}, crop_size=SQUARE, do_pad=pad)
    tokenizer = fast(path, ["<s>", "</s>", "<image>"])
    return of_transformers("LlavaProcessor", "llava")(pictures, tokenizer, **CLIP_FEATURES), "<image>"


def llava_next(path: Path, films: bool = False) -> tuple[Any, str]:
    grids = [[rows * TILE, columns * TILE] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))]
    sizes: dict[str, Any] = {"size": {"shortest_edge": TILE}, "crop_size": SQUARE, "image_grid_pinpoints": grids}
    parts = [pictures_of("LlavaNext", "llava_next", **sizes), fast(path, ["<s>", "</s>", "<image>"])]
    if films:
        whole = of_transformers("LlavaNextVideoProcessor", "llava_next_video")(None, *parts, **CLIP_FEATURES)
    else:
        whole = of_transformers("LlavaNextProcessor", "llava_next")(*parts, **CLIP_FEATURES)
    return whole, "<image>"


def llava_onevision(path: Path) -> tuple[Any, str]:
    grids = [[rows * TILE, columns * TILE] for rows in range(1, 7) for columns in range(1, 7)]
    sizes: dict[str, Any] = {"size": SQUARE, "image_grid_pinpoints": grids, "resample": 3, **HALF}
    pictures, tokenizer = pictures_of("LlavaOnevision", "llava_onevision", **sizes), fast(path, [*CHATML, "<image>"])
    whole = of_transformers("LlavaOnevisionProcessor", "llava_onevision")
    return whole(pictures, tokenizer, None, 4, "full"), "<image>"


def qwen_pictures(**more: Any) -> Any:
    return pictures_of("Qwen2VL", "qwen2_vl", **{"min_pixels": 16 * PATCH**2, "max_pixels": 120 * PATCH**2, **more})


def qwen_vl(path: Path, newer: bool = False) -> tuple[Any, str]:
    tokenizer = fast(path, [*CHATML, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    if newer:
        pictures = pictures_of("Qwen2VL", "qwen2_vl", size=EDGES, patch_size=PATCH, **HALF)
        return of_transformers("Qwen3VLProcessor", "qwen3_vl")(pictures, tokenizer, None), SHOWN_BY_QWEN
    return of_transformers("Qwen2_5_VLProcessor", "qwen2_5_vl")(qwen_pictures(), tokenizer, None), SHOWN_BY_QWEN


def omni_roles(older: bool) -> dict[str, str]:
    """Tokens of Qwen2.5-Omni or Qwen3-Omni, as their tokenizers name them."""
    kinds, (begin, end) = ("image", "video", "audio"), ("bos", "eos") if older else ("start", "end")
    roles = {f"{kind}_token": f"<|{kind.upper()}|>" if older else f"<|{kind}_pad|>" for kind in kinds}
    for kind in ("vision", "audio"):
        roles |= {f"{kind}_bos_token": f"<|{kind}_{begin}|>", f"{kind}_eos_token": f"<|{kind}_{end}|>"}
    return roles


def omni_class(older: bool) -> Any:
    if older:
        return of_transformers("Qwen2_5OmniProcessor", "qwen2_5_omni")
    return of_transformers("Qwen3OmniMoeProcessor", "qwen3_omni_moe")


def omni(path: Path, older: bool) -> tuple[Any, str]:
    """With the same pictures as Qwen2.5-VL's, without the parts that hear."""
    roles = omni_roles(older)
    order = ("vision_bos", "vision_eos", "image", "video", "audio", "audio_bos", "audio_eos")
    tokenizer = fast(path, [*CHATML, *(roles[f"{name}_token"] for name in order)], **roles)
    mark = "".join(roles[name] for name in ("vision_bos_token", "image_token", "vision_eos_token"))
    return omni_class(older)(qwen_pictures(), None, None, tokenizer), mark


def gemma(path: Path) -> tuple[Any, str]:
    roles = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    tokenizer = fast(path, ["<bos>", "<start_of_turn>", "<end_of_turn>", *roles.values()], **roles)
    tokenizer.bos_token = "<bos>"
    pictures = pictures_of("Gemma3", "gemma3", size=SQUARE, **HALF)
    return of_transformers("Gemma3Processor", "gemma3")(pictures, tokenizer, image_seq_length=4), "<start_of_image>"


def gemma4(path: Path, pictures: Any = None) -> tuple[Any, str]:
    roles = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    special = ["<bos>", "<|turn>", "<turn|>", *roles.values()]
    tokenizer = fast(path, special, **roles, boa_token="<|turn>", eoa_token="<turn|>")
    tokenizer.bos_token = tokenizer.pad_token = "<bos>"
    if pictures is not None:
        whole = of_transformers("Gemma4UnifiedProcessor", "gemma4_unified")
    else:
        pictures = pictures_of("Gemma4", "gemma4", patch_size=PATCH, max_soft_tokens=70)
        whole = of_transformers("Gemma4Processor", "gemma4")
    return whole(None, pictures, tokenizer, None), "<|image|>"


def gemma4_unified(path: Path) -> tuple[Any, str]:
    """Gemma 4's, whose patches are then merged by the function of this one's image processor, which needs torchvision
    for all else."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        from transformers.models.gemma4_unified.image_processing_gemma4_unified import patches_merge
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    class Merged(Gemma4ImageProcessorPil):
        def _preprocess(self, *arguments: Any, **options: Any) -> Any:
            """Of one image, the patches that fill up left out."""
            found = super()._preprocess(*arguments, **options)
            places = torch.tensor(np.array(found["image_position_ids"][0]))
            real = places[:, 0] >= 0
            patches, places = torch.tensor(np.array(found["pixel_values"][0]))[real], places[real]
            merged, at = patches_merge(patches[None], places[None], len(patches) // 9)
            return {**found, "pixel_values": merged.numpy(), "image_position_ids": at.numpy()}

    return gemma4(path, Merged(patch_size=PATCH, max_soft_tokens=70))


def pixtral(path: Path) -> tuple[Any, str]:
    from transformers.models.pixtral import image_processing_pil_pixtral as on_pillow

    # The processor imports a function from beside the image processor that needs torchvision.
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", on_pillow)
    marks = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer = fast(path, ["<s>", "</s>", *marks])
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    pictures = on_pillow.PixtralImageProcessorPil(size={"longest_edge": 10 * PATCH}, patch_size=PATCH)
    whole = of_transformers("PixtralProcessor", "pixtral")
    return whole(pictures, tokenizer, patch_size=PATCH, spatial_merge_size=2), "[IMG]"


def glm_pictures() -> Any:
    return pictures_of("Glm4v", "glm4v", size={name: 2 * pixels for name, pixels in EDGES.items()})


def glm(path: Path) -> tuple[Any, str]:
    tokenizer = fast(path, [*chat_template("glm-4.1v").tokens, *MARKUPS["glm-4.1v"].tokens])
    return of_transformers("Glm4vProcessor", "glm4v")(glm_pictures(), tokenizer, None), SHOWN_BY_GLM


def paddleocr(path: Path) -> tuple[Any, str]:
    marks = MARKUPS["paddleocr-vl"]
    tokenizer = fast(path, [*CHATML, *marks.tokens], image_token=marks.context)
    pictures = pictures_of("PaddleOCRVL", "paddleocr_vl", size=EDGES, **HALF)
    whole = of_transformers("PaddleOCRVLProcessor", "paddleocr_vl")(pictures, tokenizer)
    return whole, "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"


def idefics3(path: Path) -> tuple[Any, str]:
    tokenizer = fast(path, ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>"])
    sides = {"size": {"longest_edge": 4 * TILE}, "max_image_size": {"longest_edge": TILE}}
    pictures = pictures_of("Idefics3", "idefics3", **sides)
    return of_transformers("Idefics3Processor", "idefics3")(pictures, tokenizer, image_seq_len=4), "<image>"


def deepseek_vl(path: Path) -> tuple[Any, str]:
    tokenizer = fast(path, [*chat_template("deepseek-vl").tokens, MARK], image_token=MARK)
    # It leaves do_convert_rgb out by default: a palette's transparent colour would then keep its red, green and blue.
    pictures = pictures_of("DeepseekVL", "deepseek_vl", size=SQUARE, do_convert_rgb=True, **HALF)
    return of_transformers("DeepseekVLProcessor", "deepseek_vl")(pictures, tokenizer, num_image_tokens=4), MARK


def paligemma(path: Path) -> tuple[Any, str]:
    class WithSuffix(of_transformers("PaliGemmaProcessor", "paligemma")):  # type: ignore[misc]
        def __call__(self, text: str, **more: Any) -> Any:
            """A prompt and, behind a bar, its answer."""
            prompt, _, answer = text.partition("|")
            return super().__call__(text=prompt, suffix=answer, **more)

    tokenizer = fast(path, ["<bos>", "<eos>", "<image>"], image_token="<image>")
    tokenizer.bos_token, tokenizer.eos_token = "<bos>", "<eos>"
    pictures = pictures_of("Siglip", "siglip", size=SQUARE)
    pictures.image_seq_length = 4
    return WithSuffix(pictures, tokenizer), "<image>"


MARK = "<image_placeholder>"
"""DeepSeek-VL's."""
SHOWN_BY_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
SHOWN_BY_GLM = "<|begin_of_image|><|image|><|end_of_image|>"
CLIP_FEATURES = {"patch_size": PATCH, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


@dataclass(frozen=True)
class Case:
    """A processor, what a recipe is given for it, and the model's config.json."""

    build: Callable[[Path], tuple[Any, str]]
    template: str
    markup: str
    tokens_per_tile: float
    normalization: str
    kind: str
    language: str
    vision: dict[str, Any] = field(default_factory=dict)
    text: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("template", "markup", "tokens_per_tile", "normalization")}

    @property
    def config(self) -> dict[str, Any]:
        text, vision = {"model_type": self.language, **self.text}, {**self.vision, "patch_size": PATCH}
        return {"model_type": self.kind, "text_config": text, "vision_config": vision, **self.own}


GLM_HEADS = {"partial_rotary_factor": 0.5, "head_dim": 128}
CASES = {
    "internvl": Case(internvl, "hermes-2", "internvl", 1, "imagenet", "internvl", "qwen2",
                     {"model_type": "internvl_vision", "image_size": [TILE] * 2}),
    "anyres": Case(llava_next, "mistral", "llava", 4, "clip", "llava_next", "mistral", CLIP),
    "anyres, LLaVA-NeXT-Video": Case(partial(llava_next, films=True), "mistral", "llava", 4, "clip", "llava_next_video",
                                     "mistral", CLIP),
    "pad": Case(partial(llava, pad=True), "vicuna", "llava", 4, "clip", "llava", "llama", CLIP),
    "pad, ViP-LLaVA": Case(partial(llava, pad=True), "llava-v1", "llava", 4, "clip", "vipllava", "llama", CLIP),
    "crop": Case(llava, "vicuna", "llava", 4, "clip", "llava", "llama", CLIP),
    "native": Case(qwen_vl, "hermes-2", "qwen-vl", 0.25, "clip", "qwen2_5_vl", "qwen2_5_vl_text",
                   {"out_hidden_size": 8192}),
    "native, Qwen3-VL": Case(partial(qwen_vl, newer=True), "hermes-2", "qwen3-vl", 0.25, "half", "qwen3_vl",
                             "qwen3_vl_text", {"out_hidden_size": 4096}),
    "native, Qwen2.5-Omni": Case(partial(omni, older=True), "hermes-2", "qwen2.5-omni", 0.25, "clip",
                                 "qwen2_5_omni_thinker", "qwen2_5_omni_text",
                                 own={"audio_config": {"output_dim": 3584}}),
    "native, Qwen3-Omni": Case(partial(omni, older=False), "hermes-2", "qwen3-omni", 0.25, "clip",
                               "qwen3_omni_moe_thinker", "qwen3_omni_moe_text", {"out_hidden_size": 2048},
                               {"head_dim": 128}, {"audio_config": {"output_dim": 2048}}),
    "anyres_max_9": Case(llava_onevision, "qwen-vl", "llava", 4, "half", "llava_onevision", "qwen2", SIGLIP),
    "gemma": Case(gemma, "gemma", "gemma", 4, "half", "gemma3", "gemma3_text", SIGLIP,
                  own={"mm_tokens_per_image": 4}),
    "gemma4": Case(gemma4, "gemma4", "gemma4", 1 / 9, "half", "gemma4", "gemma4_text", {},
                   {"hidden_size_per_layer_input": 0}),
    "gemma4_unified": Case(gemma4_unified, "gemma4", "gemma4", 1, "unit", "gemma4_unified", "gemma4_unified_text"),
    "native_edge": Case(pixtral, "mistral-v7", "mistral", 0.25, "clip", "mistral3", "mistral",
                        {"model_type": "pixtral"}),
    "native_grown": Case(glm, "glm-4.1v", "glm-4.1v", 0.25, "clip", "glm4v", "glm4v_text", {}, GLM_HEADS),
    "native_grown, with thoughts": Case(glm, "glm-4.5v", "glm-4.1v", 0.25, "clip", "glm4v_moe", "glm4v_moe_text", {},
                                        GLM_HEADS),
    "native_widened": Case(paddleocr, "hermes-2", "paddleocr-vl", 0.25, "half", "paddleocr_vl", "paddleocr_vl_text"),
    "split": Case(idefics3, "smolvlm", "idefics3", 4, "half", "smolvlm", "llama", {"image_size": TILE},
                  own={"scale_factor": 1}),
    "letterbox": Case(deepseek_vl, "deepseek-vl", "deepseek-vl", 4, "half", "deepseek_vl", "llama", SIGLIP),
    "paligemma": Case(paligemma, "paligemma", "paligemma", 4, "half", "paligemma", "gemma", SIGLIP,
                      {"hidden_size": 2048}),
}  # fmt: skip
TILINGS = {
    **{rule: Tiling(PATCH, 16, 120, False, rule) for rule in ("native", "native_grown", "native_widened")},
    "native_edge": Tiling(PATCH, 1, 100, False, "native_edge"),
    "gemma4": Tiling(PATCH, 9, 630, False, "gemma4"),
    "gemma4_unified": Tiling(3 * PATCH, 1, 70, False, "gemma4_unified"),
}
QUESTION = "<|im_start|>user\n{0}\nWhat is in the picture?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
PROMPTS = {  # what their chat templates write for one question and answer
    **dict.fromkeys(("hermes-2", "qwen-vl"), QUESTION),  # without the system message, as the dataset is made
    "mistral": "<s>[INST] {0}\nWhat is in the picture? [/INST] A cat.</s>",
    **dict.fromkeys(("llava-v1", "vicuna"), "<s>USER: {0}\nWhat is in the picture? ASSISTANT: A cat.</s>"),
    "glm-4.1v": "[gMASK]<sop><|user|>\n{0}\nWhat is in the picture?<|assistant|>\nA cat.<|user|>",
    "glm-4.5v": "[gMASK]<sop><|user|>\n{0}\nWhat is in the picture?<|assistant|>\n<think></think>\nA cat.<|user|>",
    "mistral-v7": "<s>[INST]{0}\nWhat is in the picture?[/INST]A cat.</s>",
    "smolvlm": "<|im_start|>User:{0}\nWhat is in the picture?<end_of_utterance>\nAssistant: A cat.<end_of_utterance>\n",
    "gemma": "<bos><start_of_turn>user\n{0}\nWhat is in the picture?<end_of_turn>\n<start_of_turn>model\nA cat."
    "<end_of_turn>\n",
    "deepseek-vl": "<\uff5cbegin\u2581of\u2581sentence\uff5c>User: {0}\nWhat is in the picture?\n\n"
    "Assistant: A cat.<\uff5cend\u2581of\u2581sentence\uff5c>",
    "paligemma": "{0}\nWhat is in the picture?|A cat.",
    "gemma4": "<bos><|turn>user\n{0}\nWhat is in the picture?<turn|>\n<|turn>model\nA cat.<turn|>\n",
}


def draw_pictures(folder: Path) -> list[str]:
    """Pictures of many shapes and of every kind that Pillow can write: noise, so that every wrong pixel shows."""
    generator = np.random.default_rng(0)

    def noise(width: int, height: int) -> Image.Image:
        return Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8))

    def turned(by: int) -> Image.Exif:
        exif = Image.Exif()
        exif[0x0112] = by
        return exif

    sizes = [(28, 28), (90, 50), (31, 200), (300, 41), (57, 57), (13, 9)]
    pictures = {f"size{width}.png": (noise(width, height), {}) for width, height in sizes}
    pictures |= {f"turned{by}.jpg": (noise(90, 40), {"exif": turned(by)}) for by in range(1, 9)}
    glass = noise(60, 40)
    glass.putalpha(Image.fromarray(generator.integers(0, 256, (40, 60), dtype=np.uint8)))
    kinds = {"grey.png": "L", "bits.png": "1", "print.jpg": "CMYK"}
    pictures |= {name: (noise(60, 40).convert(kind), {}) for name, kind in kinds.items()}
    pictures |= {"glass.png": (glass, {}), "grey_glass.png": (glass.convert("LA"), {})}
    pictures["palette.png"] = (noise(60, 40).quantize(16), {"transparency": 3})
    for name, (picture, options) in pictures.items():
        picture.save(folder / name, **options)
    return list(pictures)


MOST_TILES = {"split": 16, "anyres_max_9": 36}


def tiling_of(rule: str) -> Tiling:
    return TILINGS.get(rule) or Tiling(TILE, max_tiles=MOST_TILES.get(rule, 12), rule=rule)


def dataset(folder: Path, rule: str, case: Case, asked: str, images: Sequence[str | list[str]]) -> ChatDataset:
    recipe = Recipe(folder, folder / "tokenizer.json", tiling=tiling_of(rule), system_message="", **case.flags)
    return dataset_of(
        [{"image": one, "conversations": turns(asked, "A cat.")} for one in images], recipe, folder / "dataset"
    )


WITH_PROGRAMS = ("hermes-2", "mistral", "gemma", "gemma4", "smolvlm", "mistral-v7", "glm-4.1v", "glm-4.5v")
JINJA = {name: GENERATION.sub("", TEMPLATES[name].read_text()) for name in WITH_PROGRAMS}
"""Programs as folders have them, without tags of what is trained."""


@pytest.mark.parametrize("name", CASES)
def test_the_processors_own_files_say_all_that_a_recipe_needs(name: str, tmp_path: Path) -> None:
    """What `test_tokens_and_pixels_are_the_processors` was given by hand is in the folder that transformers saves."""
    case, rule = CASES[name], name.partition(",")[0]
    processor, _ = case.build(written_tokenizer(tmp_path / "made.json"))
    processor.image_processor.save_pretrained(tmp_path)
    processor.tokenizer.save_pretrained(tmp_path)
    if name == "native_edge":  # the words around an image go by patches that the processor itself knows
        words = {"patch_size": PATCH, "spatial_merge_size": 2}
        (tmp_path / "processor_config.json").write_text(json.dumps(words))
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    if case.template in JINJA:
        (tmp_path / "chat_template.jinja").write_text(JINJA[case.template])
    given = {} if case.template in JINJA else {"chat-template": case.template}
    found, tiling = resolve_settings(given, str(tmp_path)), tiling_of(rule)
    wanted = {
        "tiling": rule, "tile-size": tiling.tile_size, "tokens-per-tile": case.tokens_per_tile,
        "max-tiles": tiling.max_tiles, "image-markup": case.markup, "normalize": case.normalization,
        "chat-template": case.template, "tokenizer-model": tmp_path / "tokenizer.json",
    }  # fmt: skip
    assert {flag: found[flag].value for flag in wanted} == wanted


@pytest.mark.parametrize(("name", "rule"), [("anyres_max_9", "anyres_max_9"), ("internvl", "internvl_each")])
def test_images_among_others_are_the_processors(name: str, rule: str, tmp_path: Path) -> None:
    """In LLaVA-OneVision one padded tile each; in InternVL's of transformers each as it would be alone."""
    processor, mark = CASES[name].build(written_tokenizer(tmp_path / "tokenizer.json"))
    names = draw_pictures(tmp_path)[:3]
    sample = dataset(tmp_path, rule, CASES[name], "<image>" * 3 + "\nWhat is in the picture?", [names]).sample(0)
    theirs = processor(
        text=QUESTION.format(mark * 3), images=[[str(tmp_path / name) for name in names]], return_tensors="np"
    )
    assert sample.text[0].tolist() == theirs["input_ids"][0].tolist()
    pixels = theirs["pixel_values"].reshape(-1, 3, TILE, TILE)
    np.testing.assert_allclose(pixels_of(sample).numpy(), pixels, atol=1e-6)


def square_by_square(patches: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Gemma 4's patches by column and row, colours last, from 0 to 1 -> by square of three, from -1 to 1."""
    found = {(row, column): patch for patch, (column, row) in zip(patches, places.tolist(), strict=True) if row >= 0}
    order = sorted(found, key=lambda at: (at[0] // 3, at[1] // 3, at[0] % 3, at[1] % 3))
    return np.stack([found[at].reshape(PATCH, PATCH, 3).transpose(2, 0, 1) for at in order]) * 2 - 1


@pytest.mark.parametrize("of", CASES)
def test_tokens_and_pixels_are_the_processors(of: str, tmp_path: Path) -> None:
    case, rule = CASES[of], of.partition(",")[0]
    processor, mark = case.build(written_tokenizer(tmp_path / "tokenizer.json"))
    names = draw_pictures(tmp_path)
    data, prompt = dataset(tmp_path, rule, case, "<image>\nWhat is in the picture?", names), PROMPTS[case.template]
    for sample, name in enumerate(names):
        theirs = processor(text=prompt.format(mark), images=[str(tmp_path / name)], return_tensors="np")
        assert data.sample(sample).text[0].tolist() == theirs["input_ids"][0].tolist(), name
        pixels = theirs["pixel_values"]
        if rule in ("native", "native_grown"):  # a patch is two equal frames, colour by colour
            films = pixels.reshape(-1, 3, 2, PATCH, PATCH)
            np.testing.assert_array_equal(films[:, :, 0], films[:, :, 1])
            pixels = films[:, :, 0]
            assert [(1, image.rows, image.columns) for image in data.sample(sample).images] == [
                *map(tuple, theirs["image_grid_thw"])
            ]
        elif rule == "gemma4":
            pixels = square_by_square(theirs["pixel_values"][0], theirs["image_position_ids"][0])
        elif rule == "gemma4_unified":
            (image,), side = data.sample(sample).images, 3 * PATCH
            in_order = [(column, row) for row in range(image.rows) for column in range(image.columns)]
            assert list(map(tuple, theirs["image_position_ids"][0].tolist())) == in_order
            pixels = pixels.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        elif rule == "native_widened":
            (image,) = data.sample(sample).images
            assert (1, image.rows, image.columns) == tuple(theirs["image_grid_thw"][0])
            cells = pixels.reshape(image.rows // 2, 2, image.columns // 2, 2, 3, PATCH, PATCH)
            pixels = cells.swapaxes(1, 2).reshape(-1, 3, PATCH, PATCH)
        elif rule == "native_edge":
            (image,), (height, width) = data.sample(sample).images, theirs["image_sizes"][0]
            assert (image.rows * PATCH, image.columns * PATCH) == (height, width)
            cells = pixels[0].reshape(3, height // TILE, 2, PATCH, width // TILE, 2, PATCH)
            pixels = cells.transpose(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, PATCH, PATCH)
        else:
            pixels = pixels.reshape(-1, 3, TILE, TILE)
            if rule == "anyres_max_9":
                assert data.sample(sample).images[0].thumbnail
        np.testing.assert_allclose(pixels_of(data.sample(sample)).numpy(), pixels, atol=1e-6, err_msg=name)
    context = {"native": "<|image_pad|>", "gemma": "<image_soft_token>", "native_grown": "<|image|>"}
    context |= {"native_widened": "<|IMAGE_PLACEHOLDER|>", "native, Qwen2.5-Omni": "<|IMAGE|>"}
    token = context.get(of) or context.get(rule, mark)
    assert data.manifest["image_token_id"] == processor.tokenizer.convert_tokens_to_ids(token)
    unread = {"<video>"} if rule == "native_grown" else {"<video>", "<|video|>"}  # films that we do not take
    added = {token: number for token, number in processor.tokenizer.get_added_vocab().items() if token not in unread}
    if rule == "paligemma":  # places and segments, which its tokenizer has as words
        added = {token: number for token, number in added.items() if token[:4] not in ("<loc", "<seg")}
    assert data.manifest["special_tokens"] == added
