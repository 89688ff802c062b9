"""Names of the Hugging Face weights that make each of ours: the families' tables, applied to one model.

The tables use one spelling of a name; `table_name` converts the others (transformers' modules, older checkpoints).
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from megatron.vlm.hf.forms import Scope
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import layer_names
from omnibal_ext.families.family import Family
from omnibal_ext.families.registry import MODEL_TYPES, MODELS, family_of
from omnibal_ext.families.weights import Weight
from omnibal_ext.modalities.language.layer import Layer

FIRST_EXPERT = r"^language_model\.model\.layers\.\d+\.mlp\.experts\.0\."
"""Pattern that matches a table name if the checkpoint has one tensor for each expert, not one for all."""
SPELLINGS = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(?=layers\.|embed_tokens\.|norm\.)", "language_model.model."),
    (r"^model\.(?=vision_tower|multi_modal_projector|image_newline|visual\.)", ""),
    (r"^vision_tower\.vision_model\.", "vision_tower."),
)
"""(pattern, replacement) from other spellings to the tables', of all families."""

UNUSED = (
    r"vision_tower\.(post_layernorm|head)\.",
    r"vision_tower\.embeddings\.position_ids$",
    r".*rotary_emb\.inv_freq$",
)
"""Weights that checkpoints of all families have and no model uses; kept so that an export has them again."""


@dataclass(frozen=True)
class WeightSource:
    """Hugging Face weights (table names) that make one of ours, and the form (`hf/forms.py`) that joins them."""

    theirs: tuple[str, ...]
    form: str
    scope: Scope
    chunk: "TensorChunk | None" = None
    """Chunk of theirs that ours is; None: all of it."""


@dataclass(frozen=True)
class TensorChunk:
    """Chunk `number` of `count` equal ones along an axis, as `torch.chunk` cuts."""

    axis: int
    number: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return this chunk of a tensor. Raises ValueError if the axis does not divide."""
        if tensor.dim() <= self.axis or tensor.shape[self.axis] % self.count:
            raise ValueError(f"{list(tensor.shape)} has no {self.count} equal chunks along axis {self.axis}")
        size = tensor.shape[self.axis] // self.count
        return tensor.narrow(self.axis, self.number * size, size)


def table_name(name: str, family: Family) -> str:
    """Convert a weight's name in a Hugging Face folder to the spelling of the families' tables."""
    for pattern, replacement in (*SPELLINGS, *family.spellings):
        name = re.sub(pattern, replacement, name)
    return name


VIT_LAYER = re.compile(r"(?:vision_tower|vision_model|video_tower)\.encoder\.layers?\.(\d+)\.")


def is_unused(name: str, architecture: Architecture, stored: Collection[str]) -> bool:
    """Return whether a weight outside of the tables is one that the model is known not to use: of `UNUSED`, of its
    family's, of a ViT layer behind the last whose output is read, or of the layer that predicts a second token.
    `stored`: the table names that the checkpoint has."""
    vision = architecture.vision
    if (layer := VIT_LAYER.match(name)) and vision.layers <= int(layer[1]):
        return int(layer[1]) < vision.layers + vision.unread
    if name.startswith(behind := f"language_model.model.layers.{architecture.language.layers}."):
        return f"{behind}eh_proj.weight" in stored
    return any(re.match(pattern, name) for pattern in (*UNUSED, *family_of(architecture).idle))


def sources(
    architecture: Architecture, vision: str, language: str, stored: Collection[str] = ()
) -> dict[str, WeightSource]:
    """Return the source of every weight of the chain, in its order, by name in our checkpoints.

    `vision` is the `model_type` of a config.json, `language` that of its language model, `stored` the table names that
    the checkpoint has.
    """
    tower, words = MODELS[vision].model_type, MODEL_TYPES[language]
    separate = any(re.search(FIRST_EXPERT, name) for name in stored)
    table = (*tower.weights, *(words.weights_apart if separate and words.weights_apart else words.weights))
    found, counts = {}, Counter(architecture.chain)
    layers = zip(architecture.chain, layer_names(architecture.chain), architecture.layers, strict=True)
    for kind, name, layer in layers:
        number, scope = name.partition(".")[2], Scope(architecture, layer if isinstance(layer, Layer) else None)
        for weight in _present_weights(table, kind, scope):
            features = range(len(architecture.vision.feature_layers)) if "{f}" in weight.ours else (0,)
            for feature in map(str, features):
                names = tuple(
                    theirs.replace("{n}", number).replace("{f}", feature)
                    for theirs in _of_experts(weight, architecture)
                )
                ours = weight.ours.replace("{f}", feature)
                chunk = None if weight.part_of is None else TensorChunk(weight.part_of, int(number), counts[kind])
                found[f"links.{name.replace('.', '_')}.{ours}"] = WeightSource(names, weight.form, scope, chunk)
    return found


def _of_experts(weight: Weight, architecture: Architecture) -> tuple[str, ...]:
    """Return the Hugging Face names of a weight, expert by expert where each has its own tensor."""
    experts = architecture.language.experts
    if experts is None or "{e}" not in weight.theirs[0]:
        return weight.theirs
    return tuple(name.replace("{e}", str(expert)) for expert in range(experts.count) for name in weight.theirs)


def _present_weights(table: Iterable[Weight], kind: str, scope: Scope) -> Iterator[Weight]:
    for weight in table:
        layer, of_layers = scope.layer, weight.of_layers
        is_here = weight.kind == kind and (layer is None or of_layers is None or of_layers(layer))
        if is_here and (not weight.when or attrgetter(weight.when)(layer or scope.model)):
            yield weight
