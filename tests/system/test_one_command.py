"""A new user's path: a model's folder and a file of conversations in, one command trains, one brings weights back."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.vlm.data.markup import MARKUPS
from megatron.vlm.data.templates import TEMPLATES
from megatron.vlm.preprocessing.tokenizer import load_tokenizer
from omnibal_ext.packing.index.packed_index import PackedIndex
from omnibal_ext.run_metrics import evaluations
from omnibal_ext.sizes import Sizes
from tests.long import short
from tests.programs import ROOT
from tests.system.test_training import tool
from tests.unit.data.clips import TURNS as FILMED
from tests.unit.data.clips import noise, write_frames, write_video
from tests.unit.hf import models
from tests.unit.preprocessing.test_processors import JINJA

transformers = pytest.importorskip("transformers")
LAUNCH = ("--nproc-per-node", 2, "--analytic", "a100")
LIMITS = ("--max-pixels", 256, "--max-tokens", 300, "--shorten", "truncate", "--vit-budget", 96, "--llm-budget", 400)
LIMITED = {
    "qwen3-vl": (*LIMITS, "--held-out", 0.1, "--micro-batches", 2, "--save-hf"),
    "paligemma-2": ("--max-rejects", 48),
}
"""Families of which the command is given limits, a share to evaluate on, and asked for weights at every save; or which
take no text alone and no several turns."""
WAYS = {"llava-1.5": "tensor", "qwen3-vl-moe": "expert"}
"""How two ranks train a family, the others as a pipeline."""


FAMILIES = (
    "internvl3.5", "llava-1.5", "llava-1.6", "llava-next-video", "vip-llava", "llava-onevision", "qwen2-vl",
    "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "gemma-3", "gemma-4", "gemma-4-unified", "qwen3.5", "qwen3.5-moe",
    "mistral-3", "glm-4.1v", "glm-4.5v", "smolvlm", "paligemma-2",
)  # fmt: skip
ONE_A_KIND = ("internvl3.5", "llava-1.5", "qwen3-vl", "qwen3-vl-moe", "gemma-4", "qwen3.5")
"""Tiles, one square an image, images at their own size and videos, experts, kinds of layers, linear attention."""
UNPACKED = ("qwen3.5", "gemma-4", "mistral", "glm", "smolvlm", "paligemma")
PACKED = [family for family in FAMILIES if not family.startswith(UNPACKED)]
"""Those whose packs transformers can run."""
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


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations."""
    folder = tmp_path_factory.mktemp("demo")
    tool("make_demo_data.py", "--output-dir", folder, "--samples", 48, "--heldout-samples", 4)
    return folder


def build(family: str, demo: Path, folder: Path) -> None:
    """A model in small, with all that a published folder holds, beside conversations."""
    (folder / "demo").symlink_to(demo)
    (folder / "model").mkdir()
    tokenizer = folder / "model/tokenizer.model"
    shutil.copyfile(folder / "demo/tokenizer.model", tokenizer)
    torch.manual_seed(0)
    match family:
        case "internvl3.5":
            processor = internvl(folder)
        case "llava-1.5" | "llava-1.6" | "llava-next-video" | "vip-llava":
            processor = llava(folder, tokenizer, family)
        case "llava-onevision":
            processor = onevision(folder, tokenizer)
        case "gemma-3":
            processor = gemma(folder, tokenizer)
        case "gemma-4" | "gemma-4-unified":
            processor = gemma4(folder, tokenizer, family)
        case "smolvlm":
            processor = smolvlm(folder, tokenizer)
        case "paligemma-2":
            processor = paligemma(folder, tokenizer)
        case "mistral-3":
            processor = mistral(folder, tokenizer)
        case "glm-4.1v" | "glm-4.5v":
            processor = glm(folder, tokenizer, family)
        case _:
            processor = qwen(folder, tokenizer, family)
    (folder / "model/preprocessor_config.json").write_text(json.dumps(processor))


def internvl(folder: Path) -> dict[str, Any]:
    vision = {**models.INTERN_VIT, "num_attention_heads": 4, "image_size": [32, 32], "patch_size": [8, 8]}
    text = {**TEXT, "model_type": "qwen3", "head_dim": 16}
    config = transformers.InternVLConfig(
        vision_config=vision, text_config=text, image_token_id=7, tie_word_embeddings=False
    )
    transformers.InternVLForConditionalGeneration(config).save_pretrained(folder / "model")
    (folder / "model/chat_template.jinja").write_text("{{ bos_token }}" + TURNS)
    (folder / "model/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return {**IMAGENET, "max_patches": 32}


def llava(folder: Path, tokenizer: Path, family: str) -> dict[str, Any]:
    """With Mistral's template; one square an image, or a grid of squares of the folder's choice."""
    image_token = load_tokenizer(tokenizer, (*TEMPLATES["mistral"].tokens, "<image>")).token_id("<image>")
    name, text, grids = {
        "llava-1.5": ("Llava", {**TEXT, **ODD_HEADS, "model_type": "llama"}, {}),
        "llava-1.6": ("LlavaNext", {**models.MISTRAL, "vocab_size": 512}, {"image_grid_pinpoints": models.GRIDS}),
        "llava-next-video": (
            "LlavaNextVideo",
            {**models.MISTRAL, "vocab_size": 512},
            {"image_grid_pinpoints": models.GRIDS},
        ),
        "vip-llava": ("VipLlava", {**TEXT, "model_type": "llama"}, {"vision_feature_layer": [-2, 1]}),
    }[family]
    config = getattr(transformers, f"{name}Config")(
        vision_config=models.CLIP, text_config=text, image_token_index=image_token, **grids
    )
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(folder / "model")
    (folder / "model/chat_template.jinja").write_text(JINJA["mistral"])
    sides = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}, "do_center_crop": True}
    return {**CLIP_PIXELS, **sides, **grids}


def onevision(folder: Path, tokenizer: Path) -> dict[str, Any]:
    image_token = load_tokenizer(tokenizer, (*TEMPLATES["qwen-vl"].tokens, "<image>")).token_id("<image>")
    grids = [[16 * rows, 16 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    config = transformers.LlavaOnevisionConfig(
        vision_config=models.SIGLIP, text_config={**TEXT, "model_type": "qwen2"}, image_token_index=image_token,
        image_grid_pinpoints=grids,
    )  # fmt: skip
    transformers.LlavaOnevisionForConditionalGeneration(config).save_pretrained(folder / "model")
    return {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": {"height": 16, "width": 16}}


def gemma(folder: Path, tokenizer: Path) -> dict[str, Any]:
    special = (*TEMPLATES["gemma"].tokens, *MARKUPS["gemma"].tokens)
    image_token = load_tokenizer(tokenizer, special).token_id("<image_soft_token>")
    config = transformers.Gemma3Config(
        vision_config=models.SIGLIP, text_config={**models.GEMMA, "vocab_size": 512}, image_token_index=image_token,
        mm_tokens_per_image=4,
    )  # fmt: skip
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(folder / "model")
    (folder / "model/chat_template.jinja").write_text(models.GEMMA_JINJA)
    (folder / "model/tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    return {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2, "size": {"height": 16, "width": 16}}


def gemma4(folder: Path, tokenizer: Path, family: str) -> dict[str, Any]:
    special = (*TEMPLATES["gemma4"].tokens, *MARKUPS["gemma4"].tokens)
    inputs = {**models.GEMMA_4_INPUTS, "vocab_size_per_layer_input": 512}
    name, vision, text = {
        "gemma-4": ("Gemma4", models.GEMMA_4_VIT, inputs),
        "gemma-4-unified": (
            "Gemma4Unified",
            {**models.GEMMA_4_PATCHES, "pooling_kernel_size": 3},
            models.GEMMA_4_WORDS,
        ),
    }[family]
    config = getattr(transformers, f"{name}Config")(
        vision_config={**vision, "patch_size": 8}, text_config={**text, "vocab_size": 512},
        image_token_id=load_tokenizer(tokenizer, special).token_id("<|image|>"),
    )  # fmt: skip
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(folder / "model")
    (folder / "model/chat_template.jinja").write_text(JINJA["gemma4"])
    (folder / "model/tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>"}))
    return {"do_normalize": False, "patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 6}


def smolvlm(folder: Path, tokenizer: Path) -> dict[str, Any]:
    special = (*TEMPLATES["smolvlm"].tokens, *MARKUPS["idefics3"].tokens)
    config = transformers.SmolVLMConfig(
        vision_config=models.IDEFICS_3, text_config={**TEXT, "model_type": "llama"},
        image_token_id=load_tokenizer(tokenizer, special).token_id("<image>"),
    )  # fmt: skip
    transformers.SmolVLMForConditionalGeneration(config).save_pretrained(folder / "model")
    (folder / "model/chat_template.jinja").write_text(JINJA["smolvlm"])
    sides = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    return {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 1, **sides}


def paligemma(folder: Path, tokenizer: Path) -> dict[str, Any]:
    special = (*TEMPLATES["paligemma"].tokens, *MARKUPS["paligemma"].tokens)
    config = transformers.PaliGemmaConfig(
        vision_config=models.PALIGEMMA_VIT, text_config={**models.PALIGEMMA_2, "vocab_size": 512}, projection_dim=48,
        image_token_index=load_tokenizer(tokenizer, special).token_id("<image>"),
    )  # fmt: skip
    transformers.PaliGemmaForConditionalGeneration(config).save_pretrained(folder / "model")
    return {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3, "size": {"height": 8, "width": 8}}


def mistral(folder: Path, tokenizer: Path) -> dict[str, Any]:
    special = (*TEMPLATES["mistral-v7"].tokens, *MARKUPS["mistral"].tokens)
    image_token = load_tokenizer(tokenizer, special).token_id("[IMG]")
    config = transformers.Mistral3Config(
        vision_config={**models.PIXTRAL, "patch_size": 8}, text_config={**models.MISTRAL, "vocab_size": 512},
        image_token_index=image_token, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.Mistral3ForConditionalGeneration(config).save_pretrained(folder / "model")
    (folder / "model/chat_template.jinja").write_text(models.MISTRAL_JINJA)
    (folder / "model/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "model/processor_config.json").write_text(json.dumps({"patch_size": 8, "spatial_merge_size": 2}))
    return {**CLIP_PIXELS, "size": {"longest_edge": 64}, "patch_size": {"height": 8, "width": 8}}


def glm(folder: Path, tokenizer: Path, family: str) -> dict[str, Any]:
    special = (*TEMPLATES["glm-4.1v"].tokens, *MARKUPS["glm-4.1v"].tokens)
    image_token = load_tokenizer(tokenizer, special).token_id("<|image|>")
    name, text, template = {
        "glm-4.1v": ("Glm4v", models.GLM_TEXT, models.GLM_JINJA),
        "glm-4.5v": ("Glm4vMoe", models.GLM_MOE_TEXT, models.GLM_THINKING_JINJA),
    }[family]
    config = getattr(transformers, f"{name}Config")(
        vision_config={**models.GLM_VIT, "patch_size": 8, "image_size": 40}, text_config={**text, "vocab_size": 512},
        image_token_id=image_token,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    models.randomised(model, 0).save_pretrained(folder / "model")
    (folder / "model/chat_template.jinja").write_text(template)
    limits = {"size": {"shortest_edge": 1024, "longest_edge": 8192}, "patch_size": 8}
    (folder / "model/video_preprocessor_config.json").write_text(json.dumps(limits))
    film(folder)
    return {**CLIP_PIXELS, "size": {"shortest_edge": 512, "longest_edge": 8192}, "patch_size": 8, "merge_size": 2}


def qwen(folder: Path, tokenizer: Path, family: str) -> dict[str, Any]:
    special = (*TEMPLATES["qwen-vl"].tokens, *MARKUPS["qwen-vl"].tokens)
    loaded = load_tokenizer(tokenizer, special)
    tokens = {f"{kind}_token_id": loaded.token_id(f"<|{kind}_pad|>") for kind in ("image", "video")}
    words = {"vocab_size": 512, "tie_word_embeddings": False}
    name, vision, text, system = {
        "qwen2-vl": ("Qwen2VL", models.QWEN2_VL, MROPE_TEXT, QWEN_SYSTEM),
        "qwen2.5-vl": ("Qwen2_5_VL", {**models.QWEN2_5_VL, "window_size": 32}, MROPE_TEXT, QWEN_SYSTEM),
        "qwen3-vl": ("Qwen3VL", models.QWEN3_VL, models.QWEN3_VL_TEXT, ""),
        "qwen3-vl-moe": ("Qwen3VLMoe", models.QWEN3_VL, {**models.QWEN3_VL_TEXT, **models.EXPERTS}, ""),
        "qwen3.5": ("Qwen3_5", models.QWEN3_5, models.QWEN3_5_TEXT, ""),
        "qwen3.5-moe": ("Qwen3_5Moe", models.QWEN3_5, {**models.QWEN3_5_TEXT, **models.EXPERTS, **models.SHARED}, ""),
    }[family]
    config = getattr(transformers, f"{name}Config")(
        vision_config={**vision, "patch_size": 8}, text_config={**text, **words}, **tokens
    )
    getattr(transformers, f"{name}ForConditionalGeneration")(config).save_pretrained(folder / "model")
    (folder / "model/chat_template.jinja").write_text(system + TURNS)
    limits = {"size": {"shortest_edge": 1024, "longest_edge": 8192}, "patch_size": 8}
    (folder / "model/video_preprocessor_config.json").write_text(json.dumps(limits))
    film(folder)
    pixels = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if family.startswith("qwen3") else CLIP_PIXELS
    return {**pixels, "min_pixels": 256, "max_pixels": 4096, "patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}


def film(folder: Path) -> None:
    """Conversations about a video file and about another's frames."""
    frames = noise(9, 48, 32)
    write_video(folder / "film.mp4", frames, 4)
    shown = [{"video": "film.mp4"}, {"video": write_frames(folder, "frame", frames), "fps": 3}]
    (folder / "films.jsonl").write_text("\n".join(json.dumps({**one, "conversations": FILMED}) for one in shown))


@dataclass(frozen=True)
class Trained:
    """A run of the one command."""

    folder: Path
    words: tuple[object, ...]
    """Of the command."""
    films: int
    """Files of conversations about videos, for the families that see them."""
    said: str


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    build(request.param, demo, folder)
    films = sorted(folder.glob("films.jsonl"))
    inputs = ("--input", folder / "demo/train.jsonl", *films)
    way = WAYS.get(request.param, "pipeline")
    words = ("--model", folder / "model", *inputs, "--run-dir", folder / "run", *LAUNCH)
    words = (
        *words,
        *LIMITED.get(request.param, ()),
        f"--{way}-model-parallel-size",
        2,
        "--",
        "--save-interval",
        2,
        "--log-interval",
        1,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "1")  # transformers then hands its warnings on, which Megatron would print to stdout
        yield Trained(folder, words, len(films), tool("launch.py", *words).stdout)


@pytest.mark.parametrize("trained", short(FAMILIES, ONE_A_KIND), indirect=True)
def test_one_command_trains_and_its_weights_are_transformers_own(trained: Trained) -> None:
    folder = trained.folder
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(metrics) > 1
    assert "conversations ->" in trained.said
    (difference,) = re.findall(r"logit difference +(\S+)", trained.said)
    assert float(difference) < 1e-4
    manifest = json.loads((folder / "run/data/manifest.json").read_text())
    assert [source["samples"] for source in manifest["sources"][1:]] == [2] * trained.films
    assert manifest["video_files"] == trained.films
    held_out = round(0.1 * manifest["samples"]) if "--held-out" in trained.words else 0
    lines = [line for line in metrics if "loss" in line]
    assert sum(line["samples"] for line in lines) == manifest["samples"] - held_out, "one epoch, to the sample"
    evaluated = evaluations(folder / "run/metrics.jsonl").values()
    assert [line["samples"] for line in evaluated] == [held_out] * (len(lines) if held_out else 0)
    if held_out:
        sizes = Sizes.load(folder / "run/data/sizes.npz")
        assert manifest["tiling"]["max_tiles"] == 256 // 8**2
        assert sizes.tokens.max() <= 300
        packs = PackedIndex.open(folder / "run/packs-by-size")
        assert (packs.vit_budget, packs.llm_budget) == (96, 400)
    words = ("--to-hf", folder / "run/checkpoints", "--output-dir", folder / "back", "--check", "--json")
    back = tool("convert_checkpoint.py", *words)
    assert json.loads(back.stdout)["logit_difference"] < 1e-4
    saves = {save.name: save for save in (folder / "run/checkpoints").glob("iter_*[0-9]")}
    exports = {f"{name}-hf" for name in saves} if "--save-hf" in trained.words else set()
    assert {path.name for path in (folder / "run/checkpoints").glob(".*-hf.*")} == set(), "all were waited for"
    assert {path.name for path in (folder / "run/checkpoints").glob("iter_*-hf")} == exports
    if exports:
        files = {path.name: path.read_bytes() for path in (folder / "back").iterdir()}
        last = folder / f"run/checkpoints/{max(exports)}"
        assert {path.name: path.read_bytes() for path in last.iterdir()} == files
    _, report = transformers.AutoModelForImageTextToText.from_pretrained(folder / "back", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]


@pytest.mark.parametrize("trained", short(PACKED, [family for family in ONE_A_KIND if family in PACKED]), indirect=True)
def test_the_readmes_loop_runs_as_printed_on_its_packs(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every family's; the names are those of the README's own command."""
    readme = (ROOT / "README.md").read_text()
    command, loop = re.findall(r"```(?:bash\npython tools/launch|python\n)(.*?)```", readme, re.DOTALL)
    (folder,) = re.findall(r'from_pretrained\("(.*)"\)', loop)
    assert f"--model {folder} " in command
    assert "--run-dir run " in command
    (trained.folder / folder).symlink_to(trained.folder / "model")
    monkeypatch.chdir(trained.folder)
    names: dict[str, Any] = {}
    exec(loop, names)
    assert 0 < float(names["loss"].detach()) < 10
    assert len(names["sampler"]) >= 2


@pytest.mark.parametrize("trained", ["qwen3-vl"], indirect=True)
def test_the_same_command_again_makes_nothing_twice(trained: Trained) -> None:
    made = [trained.folder / path for path in ("run/data/tokens.bin", "run/packs-by-size/manifest.json")]
    stamps = [path.stat().st_mtime_ns for path in made]
    again = tool("launch.py", *trained.words).stdout
    assert "there, made from the same" in again
    assert "nothing is left to train" in " ".join(again.split())
    assert stamps == [path.stat().st_mtime_ns for path in made]


@pytest.fixture(scope="module")
def folder(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    build("internvl3.5", demo, folder)
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "--data is missing; name dataset and packs, or --input"),
        (("--input", "chat.jsonl", "--data", "data"), "--input makes dataset and packs in the run's folder"),
        (("--input", "nowhere.jsonl"), "nowhere.jsonl: cannot be read"),
        (("--input", "nowhere.jsonl", "--check"), "nowhere.jsonl: cannot be read"),
    ],
)
def test_what_is_not_named_or_twice_is_refused_in_a_line(folder: Path, flags: tuple[str, ...], message: str) -> None:
    done = tool("launch.py", "--model", folder / "model", "--run-dir", folder / "refused", *flags, check=False)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
