"""The layer chain: builds any of its layers, and knows the shape of the tensor between two layers."""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain as joined
from itertools import combinations
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import sharded_state_dict_default

from megatron.vlm.microbatch import Microbatch
from megatron.vlm.models import transformer_engine
from megatron.vlm.models.adapters import adapters_in, attach
from megatron.vlm.models.alone import alone, config_alone
from megatron.vlm.models.configs import language_config
from megatron.vlm.models.draws import streams_kept
from megatron.vlm.models.encoders import ENCODERS
from megatron.vlm.models.flow import Carrier
from megatron.vlm.models.language import (
    Head,
    WordEmbedding,
    language_layer_config,
    language_layer_spec,
)
from megatron.vlm.models.recompute import recompute_cheap
from megatron.vlm.models.region import Region, is_fit
from megatron.vlm.models.vit.clip import clip
from megatron.vlm.models.vit.layers import shared_rows, vision_layer_spec
from omnibal_ext.adapters import NO_ADAPTERS, Adapters, adapted_matrices
from omnibal_ext.architectures.architecture import Architecture
from omnibal_ext.chain import PART_OF, VISION_NORM, GradientMode, gradient_mode, layer_names, modality_of
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Layer
from omnibal_ext.modalities.modality import ENCODED, LANGUAGE, Modality
from omnibal_ext.modalities.vision.architecture import VisionArchitecture

SEEDS_APART = 2**20
"""Distance of two layers' seeds on the device: more than core adds to one, for a rank and the purpose of a stream."""


@dataclass(frozen=True)
class Chain:
    """The model as one flat list of layers, [patch_embed, vit..., projector, word_embed, llm..., head]."""

    architecture: Architecture
    configs: Mapping[Modality, TransformerConfig]
    """Core's configuration of the language model, and of each encoder."""
    vocab_size: int  # padded, so that every tensor-parallel rank gets the same share
    seed: int
    frozen: tuple[str, ...] = ()
    """Parts whose weights are not trained, of `omnibal_ext.chain.PARTS`."""
    adapters: Adapters = NO_ADAPTERS
    """Adapters of frozen parts; these are trained."""
    is_whole: bool = False
    """Whether layers are built without tensor parallelism, whatever its size."""

    @classmethod
    def of(cls, args: Namespace, architecture: Architecture, language: TransformerConfig | None = None) -> "Chain":
        """Make the chain of a model from Megatron's arguments; `language`: core's configuration, if made already."""
        language = language or language_config(args, architecture)
        configs = configs_of(language, architecture)
        adapters = Adapters.of(args)
        frozen = adapters.frozen(args.freeze)
        return cls(architecture, configs, args.padded_vocab_size, args.seed, frozen, adapters)

    def whole(self) -> "Chain":
        """Copy the chain without tensor parallelism: layers are built unsharded, and run inside `alone`."""
        configs = {modality: config_alone(config) for modality, config in self.configs.items()}
        for encoder in self.architecture.encoders:
            config, sizes = configs[encoder.modality], ENCODERS[encoder.modality].layers(self.architecture)
            config.num_attention_heads = config.num_query_groups = sizes.heads_over(1)
        return replace(self, configs=configs, is_whole=True)

    @property
    def language(self) -> TransformerConfig:
        """Core's configuration of the language model."""
        return self.configs[LANGUAGE]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every layer."""
        return self.architecture.chain

    @property
    def names(self) -> tuple[str, ...]:
        """Name of every layer; the same in every layout, so checkpoints know no layout."""
        return layer_names(self.kinds)

    def build(self, layer: int, recompute: bool = False) -> torch.nn.Module:
        """Build one layer, with the weights that this layer has in every layout: its seed depends on `layer` alone.

        Weights drawn on the device are this tensor-parallel rank's shard and depend on the rank too; layers of a chain
        that `is_whole` begin as with one rank. `recompute`: a transformer layer recomputes norm outputs and activations
        instead of keeping them.
        """
        build = self._build_language if modality_of(self.kinds[layer]) is LANGUAGE else self._build_encoder
        with alone() if self.is_whole else nullcontext(), _seeded(self.seed + layer):
            module, mode = build(layer, recompute), self.gradient_mode(layer)
        if mode != "trained":
            module.requires_grad_(False)
        if norm := getattr(module, VISION_NORM, None):
            norm.requires_grad_(PART_OF[modality_of(self.kinds[layer]).kinds[1]] not in self.frozen)
        for _, adapter in adapters_in(module):
            adapter.requires_grad_(True)
        return module

    def draws(self, layer: int) -> bool:
        """Check whether a layer uses random numbers in training: dropout or drop path."""
        config, sizes = self.config(layer), self._vit(layer)
        drop_path = sizes.drop_path if sizes else 0.0
        return bool(config.hidden_dropout or config.attention_dropout or drop_path)

    def gradient_mode(self, layer: int) -> GradientMode:
        """Return what the backward computes in a layer: gradients of weights, of adapters, of its input, or none."""
        return self._modes[layer]

    @cached_property
    def _modes(self) -> tuple[GradientMode, ...]:
        return tuple(gradient_mode(kind, self.frozen, self.adapters.targets) for kind in self.kinds)

    def is_trained_before(self, layer: int) -> bool:
        """Check whether an earlier layer is trained or has adapters: the tensor that enters `layer` has a gradient."""
        return not {"trained", "adapted"}.isdisjoint(self._modes[:layer])

    def passes_by(self, layer: int, batch: Microbatch) -> bool:
        """Check whether a pack skips a layer: an encoder's, for which the pack has no images or sounds."""
        modality = modality_of(self.kinds[layer])
        if modality is LANGUAGE:
            return False
        others = self.architecture.projected_with(modality) if self.kinds[layer] == modality.kinds[-1] else ()
        return not any(batch.media_of(one.size).amount for one in (modality, *others))

    def config(self, layer: int) -> TransformerConfig:
        """Return core's configuration of the part of the model that a layer belongs to."""
        return self.configs[modality_of(self.kinds[layer])]

    def _vit(self, layer: int) -> VisionArchitecture | None:
        """Return the ViT sizes of the encoder that a layer is of; None for layers of the language model."""
        modality = modality_of(self.kinds[layer])
        return None if modality is LANGUAGE else ENCODERS[modality].layers(self.architecture)

    def _build_encoder(self, layer: int, recompute: bool) -> torch.nn.Module:
        modality = modality_of(self.kinds[layer])
        encoder, config, model = ENCODERS[modality], self.configs[modality], self.architecture
        first, middle, _ = modality.kinds
        if self.kinds[layer] == first:
            return encoder.embed(config, model)
        if self.kinds[layer] == middle:
            sizes = encoder.layers(model)
            return self._layer(
                config, vision_layer_spec(config, sizes, self._norms_apart(layer, recompute)), sizes, layer, recompute
            )
        return self._adapted(layer, encoder.projector(config, self.language, model))

    def _build_language(self, layer: int, recompute: bool) -> torch.nn.Module:
        language = self.architecture.language
        match self.kinds[layer]:
            case "word_embed":
                return WordEmbedding(self.language, self.vocab_size, self.architecture)
            case "llm":
                described = language.each_layer[self.kinds[:layer].count("llm")]
                config = language_layer_config(self.language, described)
                spec = language_layer_spec(config, described, self._norms_apart(layer, recompute))
                return self._layer(config, spec, language, layer, recompute)
            case _:
                return Head(self.language, self.vocab_size, language)

    def _layer(
        self, config: TransformerConfig, spec: ModuleSpec, part: VisionArchitecture | LanguageArchitecture, layer: int,
        recompute: bool,
    ) -> torch.nn.Module:  # fmt: skip
        number = self.kinds[:layer].count(self.kinds[layer])
        module: Any = build_module(spec, config=config, layer_number=number + 1, add_layer_offset=False)
        transformer_engine.mark_delayed(module)
        self._adapted(layer, module)
        if isinstance(part, VisionArchitecture) and part.clipped:
            clip(module, config.hidden_size, config.kv_channels)
        if recompute:
            recompute_cheap(module)
        module.configure(part, number)
        is_clipped = isinstance(part, VisionArchitecture) and part.clipped
        if is_fit(module) and not recompute and not is_clipped:
            described = part.each_layer[number] if isinstance(part, LanguageArchitecture) else part
            module.region = self._regions[modality_of(self.kinds[layer]), described]
        return module

    @cached_property
    def _regions(self) -> defaultdict[tuple[Modality, Layer | VisionArchitecture], Region]:
        """Compiled forms of layers, by what describes these."""
        return defaultdict(Region)

    def _norms_apart(self, layer: int, recompute: bool) -> bool:
        """Check whether a layer's projections need their inputs computed outside: to recompute, clamp or adapt."""
        sizes = self._vit(layer)
        return recompute or bool(sizes and sizes.clipped) or self.gradient_mode(layer) == "adapted"

    def _adapted(self, layer: int, module: torch.nn.Module) -> torch.nn.Module:
        """Attach adapters to a layer where its part has them, and return it."""
        if self.gradient_mode(layer) == "adapted":
            matrices = adapted_matrices(self.architecture)[self.architecture.cost_kinds[layer]]
            attach(module, matrices, self.adapters, self.seed + layer)
        return module

    def shape_before(self, layer: int, batch: Microbatch, rows: int | None = None) -> tuple[int, int, int]:
        """Return the shape (rows, 1, width) of what enters `layer` (not the first): hidden states and extras, joined.

        `rows`: of hidden states, where these are others than the pack's.
        """
        own, middle, width = self.hidden_shape_before(layer, batch)
        return (self.carrier(batch).rows(layer, own if rows is None else rows, width), middle, width)

    def carrier(self, batch: Microbatch) -> Carrier:
        """Return what joins a pack's hidden states and extras to one tensor, and splits it (`omnibal_ext.flow`)."""
        there = frozenset(one for one in ENCODED if batch.full_pack.media_of(one.size).amount)
        return self._carriers[there].at(self._tokens(batch))

    @cached_property
    def _carriers(self) -> dict[frozenset[Modality], Carrier]:
        """Carriers by the set of modalities that a pack has inputs of."""
        config = self.language
        extras = self.architecture.extras(config.tensor_model_parallel_size, config.sequence_parallel)
        subsets = joined.from_iterable(combinations(ENCODED, count) for count in range(len(ENCODED) + 1))
        return {
            frozenset(there): Carrier(tuple(one for one in extras if one.of is None or one.of in there))
            for there in subsets
        }

    def _tokens(self, batch: Microbatch) -> dict[Modality, int]:
        """Count the tokens that each encoder makes of a pack's inputs."""
        return {
            one.modality: sum(map(one.tokens, batch.media_of(one.modality.size).inputs))
            for one in self.architecture.encoders
        }

    def width_behind(self, modality: Modality) -> int:
        """Return the width of the output of a modality's last layer."""
        return self.configs[modality.projected_by or LANGUAGE].hidden_size

    def hidden_shape_before(self, layer: int, batch: Microbatch) -> tuple[int, int, int]:
        """Return the shape (rows, 1, width) of the hidden states that enter `layer`, without extras."""
        modality = modality_of(self.kinds[layer - 1])
        if modality is LANGUAGE:
            share = self.language.tensor_model_parallel_size if self.language.sequence_parallel else 1
            return (batch.tokens // share, 1, self.language.hidden_size)
        if self.kinds[layer - 1] == modality.kinds[-1]:
            return (self._tokens(batch)[modality], 1, self.width_behind(modality))
        config, encoder = self.config(layer - 1), self.architecture.encoder(modality)
        rows = sum(map(encoder.rows, batch.media_of(modality.size).inputs))
        return (shared_rows(rows, config), 1, config.hidden_size)


def configs_of(language: TransformerConfig, architecture: Architecture) -> dict[Modality, TransformerConfig]:
    """Return core's configurations of a model: `language`, and each encoder's."""
    encoders = (one.modality for one in architecture.encoders)
    return {LANGUAGE: language, **{one: ENCODERS[one].config(language, architecture) for one in encoders}}


class Layers(torch.nn.ModuleDict):
    """Layers of the chain by name; weights of those in `whole` are not sharded over tensor-parallel ranks."""

    def __init__(self, layers: dict[str, torch.nn.Module], whole: Collection[str] = ()) -> None:
        super().__init__(layers)
        self.whole = frozenset(whole)
        self.register_load_state_dict_pre_hook(_without_extra_state)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """Return the weights of these layers; core's layers have no other state."""
        state: ShardedStateDict = {}
        for name, layer in self.items():
            with alone() if name in self.whole else nullcontext():
                state |= sharded_state_dict_default(layer, f"{prefix}{name}.", sharded_offsets, metadata)
        return {key: entry for key, entry in state.items() if not key.endswith("_extra_state")}


def _without_extra_state(layers: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the empty extra state that Transformer Engine's layers expect when loading; without FP8 none is saved."""
    for name, module in layers.named_modules():
        if type(module).set_extra_state is not torch.nn.Module.set_extra_state:
            state.setdefault(f"{prefix}{name}._extra_state")


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators with `seed`, and restore their state at the end.

    The host draws whole weights, of which every rank takes its part. On the device each tensor-parallel rank draws its
    own part: core adds the rank to the seed. All expert-parallel ranks draw from one stream, each its own experts.
    """
    with streams_kept():
        tensor_parallel.model_parallel_cuda_manual_seed(seed * SEEDS_APART, ep_rank=0)
        torch.manual_seed(seed)
        yield
