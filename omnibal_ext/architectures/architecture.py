"""A vision-language model as plain data: the sizes that the planner prices, and what the trainer builds from them."""

import hashlib
import json
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain as joined
from itertools import pairwise
from typing import Any

from omnibal_ext.chain import chain_kind, cost_kinds, layer_chain, separate_layers
from omnibal_ext.errors import UserError
from omnibal_ext.flow import Extra, blocks_after, encoder_extras, features_after, language_extras
from omnibal_ext.modalities.encoder import Encoder, EncoderArchitecture, Features
from omnibal_ext.modalities.fields import LATER, hashed
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Layer
from omnibal_ext.modalities.language.noted import noted
from omnibal_ext.modalities.modality import ENCODED, FURTHER, LANGUAGE, MODALITIES, VISION, Budgets, Modality
from omnibal_ext.modalities.vision.architecture import VisionArchitecture


@dataclass(frozen=True)
class PromptFormat:
    """Text and tiles that the model was trained on; a dataset must match. No effect on sizes and costs."""

    image_markup: str = "internvl"  # or "llava": text around an image (`families/registry.py`)
    image_token_id: int | None = None
    """Id of the token that stands for one image feature; None: unknown."""
    chat_template: str | None = None
    """Name of the chat template (megatron.vlm.data.templates); None: unknown."""
    tiling: str = "internvl"
    """Rule by which images are tiled (a key of `TILINGS` in omnibal_ext/families/media.py)."""
    further_token_ids: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Ids of the tokens that stand for one feature of further encoders, by size; without unknown ones."""


@dataclass(frozen=True)
class Architecture:
    """A vision-language model. The projector joins `shuffle` x `shuffle` patches into one LLM token.

    Raises UserError if a tile's patches cannot be joined so, or for invalid feature layers.
    """

    name: str
    vision: VisionArchitecture
    language: LanguageArchitecture
    shuffle: int = 2
    projector_norm: bool = True  # InternVL; LLaVA's two-layer MLP has none
    projector_bias: bool = True
    pools: bool = False
    """The projector averages these patches instead, followed by a norm and one matrix (Gemma 3)."""
    merger: str = field(default="perceptron", metadata=LATER)
    """The projector's layers. At native resolution: "perceptron", a two-layer MLP as wide as the joined patches (Qwen);
    "two_norms", the same with another norm before its own (PaddleOCR-VL); "matrix", a matrix that merges them into one
    patch, then two layers (Mistral 3); "gated", two matrices, then a gated MLP (GLM-4.1V); "normed", a norm without
    weight, then one matrix (Gemma 4 without towers). With tiles: "shuffled", one matrix after the pixel shuffle
    (Idefics 3, PaliGemma)."""
    merger_width: int = field(default=0, metadata=LATER)
    """Inner width of the MLP of "gated"."""
    class_token: bool = False
    """The language model also gets the tile's class token."""
    newline: bool = False
    """Features of an image's tiles are joined, without padding, and a learned token ends every row (LLaVA-1.6,
    LLaVA-OneVision)."""
    further: tuple[EncoderArchitecture, ...] = ()
    """The sizes of its encoders besides the ViT; one of each modality."""
    tied: bool = False
    """Word embedding and head share one weight."""
    prompt: PromptFormat = PromptFormat()
    types: tuple[str, str] = field(default=("internvl", "llama"), compare=False, repr=False)
    """`model_type` in config.json of the model and of its language model, by which family and names of weights are
    found. No effect on sizes."""

    def __post_init__(self) -> None:
        side = self.vision.image_size // self.vision.patch_size
        if side % self.shuffle and not self.vision.native:
            raise UserError(
                f"model {self.name!r}: a tile has {side} x {side} patches (image size {self.vision.image_size}, patch "
                f"size {self.vision.patch_size}), which cannot be joined {self.shuffle} x {self.shuffle}; "
                f"the side must be a multiple of {self.shuffle}"
            )
        taken = self.vision.feature_layers
        ascending = all(a < b for a, b in pairwise((-1, *taken, self.vision.layers)))
        if not ascending or (len(taken) > self.language.layers and not self.vision.side_by_side):
            raise UserError(
                f"model {self.name!r}: features of the ViT's layers {list(taken)}; supported: ascending numbers below "
                f"{self.vision.layers}, no more than the {self.language.layers} language layers that they enter"
            )

    @property
    def joined_width(self) -> int:
        """Input width of the projector's first matrix."""
        squares = 1 if self.pools else self.shuffle**2
        return self.vision.hidden_size * squares * max(1, len(self.vision.side_by_side))

    @property
    def streams(self) -> int:
        """Number of tensors of image tokens after the projector: hidden states, and features that are added later."""
        return self.encoder(VISION).features.streams

    @property
    def untied(self) -> bool:
        """Whether the head has a weight of its own."""
        return not self.tied

    @property
    def image_tokens_per_tile(self) -> int:
        """LLM tokens of one tile, after the pixel shuffle; 0 at native resolution, see `least_tiles`."""
        return self.image_tokens(1)

    @property
    def least_tiles(self) -> int:
        """Fewest tiles that become an integer number of LLM tokens."""
        return self.vision.native.merge**2 if self.vision.native else 1

    def image_tokens(self, tiles: int) -> int:
        """Return the LLM tokens of `tiles` tiles."""
        return tiles * self.vision.patches // self.shuffle**2 + tiles * self.class_token

    def check_budgets(self, budgets: Budgets) -> None:
        """Raise UserError if there is a budget for a modality that the model does not have."""
        for one in MODALITIES:
            if one.size in budgets and one not in self.modalities:
                flag = f"--{one.budget.replace('_', '-')} {budgets[one.size]}"
                raise UserError(f"{flag}: {self.name} has no encoder of {one.units}; leave it out")

    def profiled(self, budgets: Budgets) -> Budgets:
        """Return the budgets for which layers are measured, one for each modality of the model: as given, by default 1;
        at least 1 for encoders besides the ViT."""
        least = {one.size: int(one in FURTHER) for one in MODALITIES if one in self.modalities}
        return {size: max(budgets.get(size, 1), most) for size, most in least.items()}

    @cached_property
    def encoders(self) -> tuple[Encoder, ...]:
        """Encoders of the model, in the order of the chain."""
        vision = self.vision
        layers = tuple(number in vision.full_layers for number in range(vision.layers))
        features = Features(vision.feature_layers, bool(vision.side_by_side))
        found = {VISION: Encoder(VISION, layers, vision.rows, self.image_tokens, features)}
        found |= {one.modality: one.encoder for one in self.further}
        return tuple(found[one] for one in ENCODED if one in found)

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """Modalities that the model reads, in the order of the chain."""
        return (*(one.modality for one in self.encoders), LANGUAGE)

    def sizes(self, modality: Modality) -> EncoderArchitecture | VisionArchitecture:
        """Return the encoder's fields (layers, widths, heads) of a modality that the model has."""
        further: dict[Modality, EncoderArchitecture | VisionArchitecture] = {one.modality: one for one in self.further}
        return {VISION: self.vision, **further}[modality]

    def encoder(self, modality: Modality) -> Encoder:
        """Return the `Encoder` of a modality that the model has."""
        return next(one for one in self.encoders if one.modality == modality)

    def projected_with(self, modality: Modality) -> tuple[Modality, ...]:
        """Return the modalities whose encoders use this modality's projector, in the order of the chain."""
        return tuple(one.modality for one in self.encoders if one.modality.projected_by == modality)

    @cached_property
    def chain(self) -> tuple[str, ...]:
        """The model as one flat list of layer kinds."""
        return layer_chain({one.modality: len(one.layers) for one in self.encoders} | {LANGUAGE: self.language.layers})

    @cached_property
    def layers(self) -> tuple[Hashable, ...]:
        """A value for each layer of the chain; layers of a kind with equal values have the same matrices and costs."""
        encoded = joined.from_iterable((None, *one.layers, None) for one in self.encoders)
        return (*encoded, None, *self.language.each_layer, None)

    def layer(self, name: str) -> Layer:
        """Return the first language layer with this cost key."""
        found = self.layers[self.cost_kinds.index(name)]
        assert isinstance(found, Layer)
        return found

    @cached_property
    def layers_apart(self) -> dict[str, tuple[int, ...]]:
        """Layers that differ from the first of their kind: {cost key: their numbers within the kind}."""
        return separate_layers(self.chain, self.layers)

    @cached_property
    def cost_kinds(self) -> tuple[str, ...]:
        """Cost key (in `Profile.layers`) of every layer of the chain."""
        return cost_kinds(self.chain, self.layers_apart)

    def kinds_apart(self, kind: str) -> dict[str, Hashable]:
        """Return the cost keys of a kind's layers, each with the value in `layers` of the first layer that has it."""
        found: dict[str, Hashable] = {}
        for name, layer in zip(self.cost_kinds, self.layers, strict=True):
            if chain_kind(name) == kind:
                found.setdefault(name, layer)
        return found

    def extras(self, ranks: int = 1, is_shared_out: bool = True) -> tuple[Extra, ...]:
        """Return the tensors passed along the chain in addition to the hidden states, on one of `ranks` tensor-parallel
        ranks; `is_shared_out`: hidden states are sharded over these (sequence parallelism)."""
        given = encoder_extras(self.chain, self._features, self.language.hidden_size, self.vision.hidden_size)
        return (*given, *language_extras(self.chain, self.language, ranks, is_shared_out))

    @cached_property
    def features_after(self) -> tuple[int, ...]:
        """Number of features (outputs of encoder layers) passed on with the output of every layer of the chain."""
        return features_after(self.chain, self._features)

    @property
    def _features(self) -> dict[Modality, Features]:
        return {one.modality: one.features for one in self.encoders}

    def carried_after(self, ranks: int = 1, is_shared_out: bool = True) -> tuple[int, ...]:
        """Return the size of language layers' extras (`flow.language_extras`) passed on with every layer's output, in
        multiples of the hidden states, on one of `ranks` tensor-parallel ranks; () without such."""
        extras = tuple(language_extras(self.chain, self.language, ranks, is_shared_out))
        return blocks_after(extras, len(self.chain), self.language.hidden_size) if extras else ()

    @property
    def hash(self) -> str:
        """Hash of all that affects costs: models with the same hash can share a profile and a plan."""
        sizes = {name: value for name, value in hashed(self).items() if name not in ("further", "prompt", "types")}
        further = {one.modality.name: hashed(one) for one in self.further}
        text = json.dumps(sizes | further | {"language": noted(self.language)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def was_noted(self, name: str, noted: str) -> bool:
        """Return whether a file was written for this model, given the name and hash of its model in the file.

        The hash covers the name, which of a model's folder is the folder's: it may have been renamed since.
        """
        return noted in (self.hash, replace(self, name=name).hash)


def differences(one: Architecture, other: Architecture) -> list[tuple[str, object, object]]:
    """Return the fields in which two models compute differently, each with both values.

    Names, the maximum length and dynamic RoPE scaling, which affects long samples only, are not compared.
    """
    first, second = map(_compared, (one, other))
    compared = (first.keys() | second.keys()) - {"name", "types", "language.max_positions", "vision.unread"}
    return [(name, *pair) for name in sorted(compared) if (pair := (first.get(name), second.get(name)))[0] != pair[1]]


def _compared(model: Architecture) -> dict[str, Any]:
    """Return a model's fields by name, those of ViT and language model as "vision.NAME" and "language.NAME"."""
    further = {one.modality.name: asdict(one) for one in model.further}
    values = asdict(model) | further | {"language": noted(model.language)}
    if (values["language"].get("rope_scaling") or {}).get("kind") == "dynamic":
        values["language"]["rope_scaling"] = None
    towers = {part: values.pop(part) for part in ("vision", "language")}
    del values["further"]
    return values | {f"{part}.{name}": value for part, fields in towers.items() for name, value in fields.items()}
