"""What our weights are called at Hugging Face: the tables of the families, for a model and the names that are there.

Other spellings of a name are brought to that of the tables first.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from torch import Tensor

from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import KIND_OF, layer_names
from omnibal_ext.families.registry import FAMILIES, MODELS, PARTS
from omnibal_ext.families.weights import Weight

FIRST_EXPERT = r"^language_model\.model\.layers\.\d+\.mlp\.experts\.0\."
"""In a name of the tables: the weights of experts lie apart."""
SPELLINGS = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(?=layers\.|embed_tokens\.|norm\.)", "language_model.model."),
    (r"^model\.(?=vision_tower|multi_modal_projector|image_newline)", ""),
    (r"^vision_tower\.vision_model\.", "vision_tower."),
    *(spelling for family in FAMILIES for spelling in family.spellings),
)
"""Other spellings (transformers' modules in memory, older checkpoints) of the names in the tables."""

IDLE = (
    r"vision_tower\.(post_layernorm|head)\.",
    r"vision_tower\.encoder\.layers\.\d+\.",
    r"vision_tower\.embeddings\.position_ids$",
    r".*rotary_emb\.inv_freq$",
    *(pattern for family in FAMILIES for pattern in family.idle),
)
"""Weights that a checkpoint has and the model never uses (beyond those in the tables): kept aside for the way back."""


@dataclass(frozen=True)
class Source:
    """Where one weight of ours comes from: names of theirs, as in the tables, and the form."""

    theirs: tuple[str, ...]
    form: str
    part: "Part | None" = None
    """Of theirs, which is all there is of it in ours; None: the whole."""


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts of a weight along an axis."""

    axis: int
    number: int
    count: int

    def of(self, tensor: Tensor) -> Tensor:
        """The part. Raises ValueError where there are no such parts."""
        if tensor.dim() <= self.axis or tensor.shape[self.axis] % self.count:
            raise ValueError(f"{list(tensor.shape)} has no {self.count} parts along axis {self.axis}")
        size = tensor.shape[self.axis] // self.count
        return tensor.narrow(self.axis, self.number * size, size)


def table_name(name: str) -> str:
    """The name as in the tables."""
    for pattern, replacement in SPELLINGS:
        name = re.sub(pattern, replacement, name)
    return name


def is_idle(name: str) -> bool:
    """Whether a weight that no table asks for is one that the model never uses."""
    return any(re.match(pattern, name) for pattern in IDLE)


def sources(architecture: Architecture, vision: str, language: str, stored: Collection[str] = ()) -> dict[str, Source]:
    """Every weight of the chain by its name in our checkpoints, in the chain's order.

    `vision` is the model type of a config.json, `language` that of its language model, `stored` the names that are
    there, as in the tables.
    """
    tower, words = MODELS[vision].part, PARTS[language]
    apart = any(re.search(FIRST_EXPERT, name) for name in stored)
    table = (*tower.weights, *(words.weights_apart if apart and words.weights_apart else words.weights))
    named, found, counts = {weight.kind for weight in table}, {}, Counter(architecture.chain)
    for cost, link in zip(architecture.cost_kinds, layer_names(architecture.chain), strict=True):
        kind, number = cost if cost in named else KIND_OF[cost], link.partition(".")[2]
        for weight in _present(table, kind, architecture):
            features = range(len(architecture.vision.feature_layers)) if "{f}" in weight.ours else (0,)
            for feature in map(str, features):
                names = tuple(
                    name.replace("{n}", number).replace("{f}", feature) for name in _of_experts(weight, architecture)
                )
                ours = weight.ours.replace("{f}", feature)
                part = (
                    None
                    if weight.part_of is None
                    else Part(weight.part_of, int(number), counts[KIND_OF.get(kind, kind)])
                )
                found[f"links.{link.replace('.', '_')}.{ours}"] = Source(names, weight.form, part)
    return found


def _of_experts(weight: Weight, architecture: Architecture) -> tuple[str, ...]:
    """Theirs of all experts in turn, where each has its own."""
    experts = architecture.language.experts
    if experts is None or "{e}" not in weight.theirs[0]:
        return weight.theirs
    return tuple(name.replace("{e}", str(expert)) for expert in range(experts.count) for name in weight.theirs)


def _present(table: Iterable[Weight], kind: str, architecture: Architecture) -> Iterator[Weight]:
    for weight in table:
        if weight.kind == kind and (not weight.when or attrgetter(weight.when)(architecture)):
            yield weight
