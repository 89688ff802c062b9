"""Folders as their authors published them are read whole: of each architecture a public copy, with its address."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.vlm.preprocessing.folder_files import folder_settings
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.huggingface import read_architecture, read_fields
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import MODELS, model_type

pytest.importorskip("transformers")
from transformers import CONFIG_MAPPING

PUBLISHED = json.loads((Path(__file__).parent / "published_folders.json").read_text(encoding="utf-8"))
"""Model -> its class, files without chat templates and tables of tokens, and where each was seen."""
PRESETS = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))
"""Preset -> config.json."""
NOT_SEEN = {
    "vipllava",
    "video_llava",
    "llava_next",
    "qwen2_vl",
    "glm46v",
    "qwen2_5_omni_thinker",
    "qwen3_omni_moe_thinker",
}
"""Model types of which no public copy was found: transformers' defaults of their classes stand for them."""


def written(folder: Path, name: str) -> Path:
    for file, fields in PUBLISHED[name]["files"].items():
        (folder / file).write_text(json.dumps(fields))
    return folder


def as_transformers_says(fields: dict[str, Any], where: str) -> Architecture:
    """The model of all fields that transformers' class makes of some."""
    kind = model_type(fields)
    return read_fields("model", CONFIG_MAPPING[kind](**fields).to_dict(), where)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_folder_is_read_whole(tmp_path: Path, name: str) -> None:
    """Its model is that which transformers' class makes of its fields; nothing of its processors is refused."""
    model, fields = read_architecture(written(tmp_path, name)), PUBLISHED[name]["files"]["config.json"]
    folder_settings(tmp_path, model, with_template=False)
    wanted = as_transformers_says(fields, name)
    for inside in ("vision", "language", "further"):
        assert getattr(model, inside) == getattr(wanted, inside)


@pytest.mark.parametrize("kind", sorted(NOT_SEEN))
def test_no_field_of_a_class_is_unknown(kind: str) -> None:
    """Sizes that do not go together are the class's: no model has its defaults."""
    try:
        read_fields("model", CONFIG_MAPPING[kind]().to_dict(), kind)
    except UserError as error:
        assert "not known here" not in str(error)  # noqa: PT017 - some are read


def test_of_each_architecture_a_folder_is_tried() -> None:
    seen = {model_type(one["files"]["config.json"]) for one in PUBLISHED.values()}
    seen |= {model_type(fields) for fields in PRESETS.values()}
    assert seen | NOT_SEEN == {*MODELS}
    assert not seen & NOT_SEEN
