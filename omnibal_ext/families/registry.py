"""All families. A new one is a folder next to this file and a line in `FAMILIES`; rules of images that only it has are
found by `media.py` next to this file, its torch modules by `megatron/vlm/families/modules.py`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.errors import UserError
from omnibal_ext.families.deepseek_vl.family import FAMILY as DEEPSEEK_VL
from omnibal_ext.families.family import Family, Model
from omnibal_ext.families.gemma3.family import FAMILY as GEMMA3
from omnibal_ext.families.gemma4.family import FAMILY as GEMMA4
from omnibal_ext.families.gemma4_unified.family import FAMILY as GEMMA4_UNIFIED
from omnibal_ext.families.glm_ocr.family import FAMILY as GLM_OCR
from omnibal_ext.families.glm_v.family import FAMILY as GLM_V
from omnibal_ext.families.idefics3.family import FAMILY as IDEFICS3
from omnibal_ext.families.internvl.family import FAMILY as INTERNVL
from omnibal_ext.families.lighton_ocr.family import FAMILY as LIGHTON_OCR
from omnibal_ext.families.llava.family import FAMILY as LLAVA
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.mistral3.family import FAMILY as MISTRAL3
from omnibal_ext.families.paddleocr_vl.family import FAMILY as PADDLEOCR_VL
from omnibal_ext.families.paligemma.family import FAMILY as PALIGEMMA
from omnibal_ext.families.qwen3_5.family import FAMILY as QWEN3_5
from omnibal_ext.families.qwen_omni.family import FAMILY as QWEN_OMNI
from omnibal_ext.families.qwen_vl.family import FAMILY as QWEN_VL
from omnibal_ext.families.section import ModelType
from omnibal_ext.families.towers.languages import LANGUAGES
from omnibal_ext.families.towers.tiles import TOWERS
from omnibal_ext.families.video_llava.family import FAMILY as VIDEO_LLAVA

FAMILIES: tuple[Family, ...] = (
    INTERNVL, LLAVA, QWEN_VL, QWEN3_5, GEMMA3, GEMMA4, GEMMA4_UNIFIED, MISTRAL3, GLM_V, IDEFICS3, PALIGEMMA,
    LIGHTON_OCR, GLM_OCR, DEEPSEEK_VL, PADDLEOCR_VL, QWEN_OMNI, VIDEO_LLAVA,
)  # fmt: skip
MODELS: Mapping[str, Model] = {kind: model for family in FAMILIES for kind, model in family.models.items()}
"""Whole models by `model_type`."""
MODEL_TYPES: Mapping[str, ModelType] = {
    **{kind: model_type for kind, (model_type, _) in LANGUAGES.items()},
    **TOWERS,
    **{kind: model_type for family in FAMILIES for kind, model_type in family.model_types.items()},
}
"""Sections inside a config.json by `model_type`."""
MARKUPS: Mapping[str, ImageMarkup] = {markup.name: markup for family in FAMILIES for markup in family.markups}
"""Text that models expect around images, by the names in dataset manifests."""
TEMPLATES = {file.stem: file for file in sorted(Path(__file__).parent.glob("*/*.jinja"))}
"""Name -> program of the chat templates that are ours."""
_FAMILY_OF = {kind: family for family in FAMILIES for kind in family.models}
_BY_CLASS = {name: kind for family in FAMILIES for name, kind in family.classes.items()}


def model_type(config: Mapping[str, Any]) -> Any:
    """Return a config.json's model type, unchecked: the field, or what a family says of its `architectures`."""
    named = config.get("architectures")
    own = [_BY_CLASS[name] for name in named if name in tuple(_BY_CLASS)] if isinstance(named, list) else []
    return own[0] if own else config.get("model_type", "")


def model_of(config: Mapping[str, Any]) -> Model:
    """Return the registry's entry for a config.json's model type, which must be known."""
    return MODELS[model_type(config)]


def family_of(architecture: Architecture) -> Family:
    """Return the family that a model belongs to, by its model type."""
    return _FAMILY_OF[architecture.types[0]]


def image_markup(name: str) -> ImageMarkup:
    """Return the markup (text around images) of this name. Raises UserError naming the known ones."""
    if name not in MARKUPS:
        raise UserError(f"unknown image markup {name!r}; known: {', '.join(MARKUPS)}")
    return MARKUPS[name]
