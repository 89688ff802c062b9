"""Reads Hugging Face's config.json as an `Architecture`; refuses fields that we do not support exactly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.architectures.folder import ADAPTER, WITH_ADAPTERS, config_path, read_config
from omnibal_ext.errors import UserError
from omnibal_ext.families.registry import MODEL_TYPES, MODELS, model_type
from omnibal_ext.families.section import whole_model


def read_architecture(path: Path) -> Architecture:
    """Return the model of a config.json, or of its folder.

    Raises UserError naming all unknown or unsupported fields, up to the first fault that prevents reading further.
    """
    path = config_path(path)
    folder = path.resolve().parent
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{folder}: an adapter ({ADAPTER}) lies next to the model, and would not be applied as peft does; move it "
            f"to a folder of its own: {WITH_ADAPTERS}"
        )
    return read_fields(model_name(folder), read_config(path), str(path), path.parent)


def model_name(folder: Path) -> str:
    """Return the name of the model in a folder: the folder's, or if that is "huggingface" (of a converted model) its
    parent's."""
    folder = folder.resolve()
    return (folder.parent if folder.name == "huggingface" else folder).name


def read_fields(name: str, fields: Mapping[str, Any], where: str, folder: Path | None = None) -> Architecture:
    """Return the model of a config.json's fields; `where` names it in messages, `folder` has its other files.

    Raises UserError as `read_architecture` does.
    """
    model_types = {kind: model.model_type for kind, model in MODELS.items()}
    config = whole_model(where, {**fields, "model_type": model_type(fields)}, model_types, MODEL_TYPES, folder)
    try:
        model = MODELS[config["model_type"]].read(name, config)
        config.refuse_unread()
    except UserError as error:
        config.faults.append(str(error))
    if len(config.faults) > 1:
        all_of_them = "; ".join(fault.removeprefix(where).lstrip(".: ") for fault in config.faults)
        raise UserError(f"{where}: {len(config.faults)} things are in the way: {all_of_them}")
    if config.faults:
        raise UserError(config.faults[0])
    return model
