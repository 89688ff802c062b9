"""Record by which a family of vision-language models describes itself to the rest of the code."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.section import ModelType, Section


@dataclass(frozen=True)
class Packs:
    """How packs are joined for transformers' model of a type, in any PyTorch loop (`megatron.vlm.hf.packs`)."""

    tiling: str
    """Name of its tiling rule (`omnibal_ext.families.media`)."""
    boundaries: bool = False
    """Whether it takes samples' boundaries, which its ViT does not apply to patches; others find samples by
    positions."""
    linear_attention: bool = False
    """Whether its linear attention takes boundaries, which kernels alone do, and each token's sample (`seq_idx`)."""
    videos_as_images: bool = False
    """Whether a video is given as its steps: its token is an image's, and a batch may have one kind of the two."""
    chunks: bool = False
    """Whether a video and its sound take turns in chunks (`VideoClock`)."""
    flash: tuple[str, ...] = ("text_config", "vision_config")
    """Sections of its configuration that may have flash-attention; others 'sdpa' alone, which reads masks."""


@dataclass(frozen=True)
class Model:
    """A `model_type` of whole models: how it is read from config.json, loaded by transformers, and packed."""

    model_type: ModelType
    """Fields, and all weights but the language model's."""
    read: Callable[[str, Section], Architecture]
    """(name, config.json) -> the model. Raises UserError naming an unsupported field."""
    takes: tuple[str, ...] = ()
    """Arguments of transformers' model for a sample with images, besides words and pixels; with `pixel_values` if it
    takes patches in the order of rows, not of squares."""
    packs: Packs | None = None
    """Join of packs; None: packs are not joined for it."""
    transformers: str = "AutoModelForImageTextToText"
    """Transformers' class that loads it; "": only the model's repository has its code, and that is not run."""
    inside: str = ""
    """Prefix of its modules' names in transformers' class of a larger model, such as `thinker.` in Qwen-Omni's."""


@dataclass(frozen=True)
class Preset:
    """A model that users name, without a folder: its config.json as data."""

    config: Mapping[str, Any]
    """Fields of its config.json: `model_type`, and what differs from the defaults."""
    prompt: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its `PromptFormat` that a config.json does not say."""


@dataclass(frozen=True)
class Family:
    """Models whose config.json, weights and images are read alike."""

    models: Mapping[str, Model]
    """Whole models by `model_type` in config.json."""
    model_types: Mapping[str, ModelType] = field(default_factory=dict)
    """Sections inside config.json that no other family has, by `model_type`."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    markups: tuple[ImageMarkup, ...] = ()
    """Text around images that no other family has; `PromptFormat.image_markup` names a model's."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Class in `architectures` -> `model_type`, for published files whose own `model_type` is another family's."""
    folder_says_template: bool = False
    """Whether a model's folder has the chat template that it was trained with; False: `PromptFormat` names it."""
    spellings: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement): from other names of weights (in memory, in older files) to those of the tables."""
    modules: tuple[tuple[str, str], ...] = ()
    """(pattern, replacement): from the tables' names to those of the modules in transformers' `model`."""
    idle: tuple[str, ...] = ()
    """Patterns of weights that are in checkpoints and that the model never uses."""
    kept: tuple[str, ...] = ()
    """Files of a model's folder that transformers' class needs, named like weights though they are none: copied."""
