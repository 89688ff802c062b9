"""A family of vision-language models as one value: all that the rest of the house asks of it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.families.markup import ImageMarkup
from omnibal_ext.families.section import Part, Section


@dataclass(frozen=True)
class Packs:
    """How packs are joined for transformers' model of a type, in any PyTorch loop (`megatron.vlm.hf.packs`)."""

    tiling: str
    """A rule by which images are cut for it (`megatron.vlm.families.media`)."""
    boundaries: bool = False
    """It takes those of samples, which it does not hand on to its ViT; others find samples by their positions."""


@dataclass(frozen=True)
class Model:
    """A model type of whole models."""

    part: Part
    """Its own fields, and the weights of all but the language model."""
    read: Callable[[str, Section], Architecture]
    """The model of that name that a config.json describes. Raises UserError naming what cannot be honoured."""
    takes: tuple[str, ...] = ()
    """What transformers' model takes of a sample with images, beside words and pixels: names of its arguments."""
    packs: Packs | None = None
    """None: packs are not joined for it."""
    in_transformers: bool = True
    """Transformers has its code; else that lies in the model's repository, and is not run."""


@dataclass(frozen=True)
class Preset:
    """A model that is known by its name."""

    config: Mapping[str, Any]
    """Its config.json: `model_type`, and what differs from the defaults."""
    prompt: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its `PromptFormat` that a config.json does not say."""


@dataclass(frozen=True)
class Family:
    """Models that are read, written and shown images in one way."""

    models: Mapping[str, Model]
    """By `model_type` in config.json."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """Sections inside config.json that no other family has, by their model types."""
    presets: Mapping[str, Preset] = field(default_factory=dict)
    markups: tuple[ImageMarkup, ...] = ()
    """Words around images that no other family has; `Architecture.prompt` names a model's."""
    folder_says_template: bool = False
    """The chat template in a model's folder is the one that it was trained with; else what config.json means is."""
    spellings: tuple[tuple[str, str], ...] = ()
    """Patterns and what they become: other names of weights (in memory, of older files), brought to those of tables."""
    modules: tuple[tuple[str, str], ...] = ()
    """Patterns and what they become: names of the tables, brought to those of modules within transformers' `model`."""
    idle: tuple[str, ...] = ()
    """Patterns of weights that a checkpoint has and the model never uses, beside those in the tables."""
