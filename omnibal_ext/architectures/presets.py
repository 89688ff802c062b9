"""Models with a name (presets), and what the flag --model accepts."""

import difflib
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import find_config
from omnibal_ext.architectures.huggingface import read_architecture, read_fields
from omnibal_ext.errors import UserError
from omnibal_ext.families.family import Preset
from omnibal_ext.families.internvl import presets as internvl
from omnibal_ext.families.llava import presets as llava
from omnibal_ext.families.registry import FAMILIES
from omnibal_ext.families.towers.sizes import LANGUAGE_MODELS, VISION_TOWERS
from omnibal_ext.modalities.language.architecture import LanguageArchitecture, Older
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.language.rope import Rope
from omnibal_ext.modalities.vision.architecture import VisionArchitecture

HUB_NAME = re.compile(r"(?P<model>\w[\w.-]*/\w[\w.-]*)(@(?P<revision>\w[\w./-]*))?")
"""OWNER/MODEL or OWNER/MODEL@REVISION on the Hugging Face hub."""
HUB_PAGE = re.compile(
    r"https?://(huggingface\.co|hf\.co)/(?P<model>\w[\w.-]*/\w[\w.-]*)"
    r"(/(tree|blob|resolve|commit)/(?P<revision>[^/?#]+))?([/?#].*)?"
)
"""The URL of a model's page there, and of one of its revisions."""
MODEL_FLAGS = ("--model", "--preset")
"""Two names of one flag in every program; its value is the argument of `preset`."""
TINY = Architecture(
    "tiny",
    VisionArchitecture(layers=4, hidden_size=64, heads=4, ffn_hidden_size=256, patch_size=8, image_size=32),
    LanguageArchitecture(
        (Layer(Attention(4, 2, 32, Rope(1e4)), 352),) * 3, hidden_size=128, vocab_size=512, older=Older()
    ),
)


def _read(name: str, known: Preset) -> Architecture:
    model = read_fields(name, known.config, f"preset {name}")
    return replace(model, prompt=replace(model.prompt, **known.prompt))


PRESETS: dict[str, Architecture] = {
    "tiny": TINY,
    **{name: _read(name, known) for family in FAMILIES for name, known in family.presets.items()},
}


def preset(name: str) -> Architecture:
    """Return a model by name: a preset, VISION+LANGUAGE ("internvit-6b+yi-34b"), or a Hugging Face folder.

    A folder with a config.json has precedence over a preset of the same name.

    Raises UserError naming similar presets, or the unsupported fields of a config.json.
    """
    if name in PRESETS and not find_config(Path(name)):
        return PRESETS[name]
    vision, _, language = name.partition("+")
    if vision in VISION_TOWERS and language in LANGUAGE_MODELS:
        make = llava.assembled if vision.startswith("clip") else internvl.assembled
        return _read(name, make(vision, language))
    if Path(name).exists():
        return read_architecture(Path(name))
    raise UserError(_unknown(name))


def hub_name(name: str) -> tuple[str, str | None] | None:
    """Return OWNER/MODEL on the Hugging Face hub and the revision (branch, tag or commit; None: not said) of a name or
    a page's URL; None if it is neither."""
    if found := HUB_NAME.fullmatch(name) or HUB_PAGE.fullmatch(name):
        return found["model"], found["revision"] and unquote(found["revision"])
    return None


def _unknown(name: str) -> str:
    """Return the message for an unknown name: how to download it, or the nearest presets."""
    siblings = sorted(path.name for path in Path(name).parent.glob("*/")) if "/" in name else []
    if near := difflib.get_close_matches(Path(name).name, siblings, 1, 0.7):
        return f"{name}: no such folder; there is {Path(name).with_name(near[0])}"
    if found := hub_name(name):
        model, revision = found
        folder = model.rpartition("/")[2]
        words = f"{model} --revision {revision}" if revision not in (None, "main") else model
        return (
            f"{name}: no such folder; models are downloaded by `hf download {words} --local-dir {folder}`, then give "
            f"{folder}; or by --download of omnibal launch and omnibal look"
        )
    if "/" in name:
        return f"{name}: no such folder; give one with Hugging Face's config.json, or a preset of docs/models.md"
    nearest = difflib.get_close_matches(name.lower(), PRESETS, 3, 0.7)
    known = f" (the nearest is {' or '.join(nearest)})" if nearest else ""
    return (
        f"{name}: no such folder, and no preset{known}; give a folder with Hugging Face's config.json; presets are "
        f"in docs/models.md, or VISION+LANGUAGE, as {next(iter(VISION_TOWERS))}+{next(iter(LANGUAGE_MODELS))}"
    )


def check_is_folder(model: str, what: str) -> None:
    """Raise UserError unless `model` is a folder with a config.json; `what` completes "a tokenizer, which ..."."""
    preset(model)
    if not find_config(Path(model)):
        raise UserError(
            f"--model {model}: a preset has sizes and no tokenizer, which {what}; give the folder of a model's files, "
            "without weights if you have none (examples/small-model is one), or make dataset and packs with "
            "omnibal preprocess --tokenizer-model and omnibal pack"
        )
