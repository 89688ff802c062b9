"""Reading of language models with Llama's layers; what cannot be honoured exactly is refused by name."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnibal_ext.architectures.folder import weight_files
from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.rotation import (
    PLAIN,
    Rotation,
    read_rope,
    rotary_sections,
    rotation_fields,
    with_query_scale,
)
from omnibal_ext.modalities.language.architecture import LanguageArchitecture, Older
from omnibal_ext.modalities.language.experts import Experts
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.language.rope import Rope
from omnibal_ext.reading.checks import anything, flag, integer, listing, mapping, shown, text
from omnibal_ext.reading.tensors import read_tensor_entries

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Llama:
    """What the code of a model type with Llama's layers does, whatever config.json says."""

    rotation: Rotation = PLAIN
    bias: str = "attention_bias"
    """Field that turns biases on, which are not supported."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    renormalised: bool = False
    """Whether the weights of a token's experts are normalised, whatever config.json says."""
    slides: bool = False
    """Whether `sliding_window` alone turns the window on (Mistral)."""
    scales_queries: bool = False
    """Whether queries are scaled by position beyond the original context (Ministral 3)."""


LLAMA = Llama()


@dataclass(frozen=True)
class Sizes:
    """Sizes of a language model that every config.json has."""

    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    norm_epsilon: float
    older: Older

    def attention(self, **more: Any) -> Attention:
        """Return attention with these heads; `more`: its other fields."""
        return Attention(self.heads, self.kv_heads, self.head_dim, **more)

    def model(self, layers: Iterable[Layer], **more: Any) -> LanguageArchitecture:
        """Return a model of these layers; `more`: its other fields."""
        return LanguageArchitecture(tuple(layers), self.hidden_size, self.vocab_size, self.norm_epsilon, **more)


def language_sizes(section: Section, head_size: int | None, mixture: bool = False) -> Sizes:
    """Read a language model's sizes; `mixture`: experts instead of MLPs, `head_size` None: hidden size / heads.

    Raises UserError if the key-value heads do not divide the heads.
    """
    hidden_size, heads = section.take("hidden_size"), section.take("num_attention_heads")
    kv_heads = section.take_if("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UserError(f"{section.where}: {heads} heads are no multiple of {kv_heads} of keys and values")
    return Sizes(
        layers=section.take("num_hidden_layers"),
        hidden_size=hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_size or hidden_size // heads,
        ffn_hidden_size=section.take("moe_intermediate_size" if mixture else "intermediate_size"),
        vocab_size=section.take("vocab_size"),
        norm_epsilon=section.take("rms_norm_eps"),
        older=Older(head_said=head_size is not None and head_size * heads != hidden_size),
    )


def grouped_sizes(section: Section, mixture: bool = False) -> Sizes:
    """Read `language_sizes` with config.json's width of a head. Raises UserError as `check_groups`."""
    sizes = language_sizes(section, section.take("head_dim"), mixture)
    check_groups(section, sizes.heads, sizes.kv_heads, sizes.head_dim)
    return sizes


def check_groups(section: Section, heads: int, kv_heads: int, head_size: int) -> None:
    """Raise UserError if key-value heads do not divide the heads, or a head's width is odd."""
    if heads % kv_heads or head_size % 2:
        raise UserError(
            f"{section.where}: {heads} heads of width {head_size} and {kv_heads} of keys and values; supported: "
            "heads of an even width, in groups of one size"
        )


def kinds_of_layers(section: Section, layers: int, every: int, other: str = SLIDING) -> list[str]:
    """Return `FULL` or `other` for each layer, as `layer_types` says; without that, each `every`-th is `FULL`. Raises
    UserError for other kinds, or another number than `layers`."""
    usual = [other if number % every else FULL for number in range(1, layers + 1)]
    kinds = section.take_if("layer_types", listing(text)) or usual
    if len(kinds) != layers or set(kinds) - {other, FULL}:
        raise UserError(
            f"{section.where}.layer_types are {shown(kinds)}; supported: {other!r} or {FULL!r} for each layer"
        )
    return kinds


def chosen_experts(section: Section, count: int, field: str = "num_experts_per_tok", least: int = 2) -> int:
    """Return how many experts a token has, from `field`. Raises UserError unless `least` to `count`: of one alone the
    normalised weight is always 1, from which a router learns nothing."""
    chosen = section.take(field)
    if not least <= chosen <= count:
        raise UserError(f"{section.where}.{field} is {chosen}; supported: {least} up to the {count} experts")
    return chosen


def read_llama(section: Section, code: Llama = LLAMA) -> LanguageArchitecture:
    """Read a language model with Llama's layers; unsupported fields are in `section.faults`, or raise UserError."""
    section.must(hidden_act="silu", mlp_bias=False, attention_dropout=0.0, pretraining_tp=1)
    section.must(**{code.bias: False})
    rope, base = rotation_fields(section, code.rotation)
    sections = rotary_sections(section, rope, code.rotation)
    scaling = with_query_scale(section, rope) if code.scales_queries else read_rope(section, rope, sections)
    window = section.take_if("sliding_window") if _slides(section, code.slides) else None
    head_size = section.take_if("head_dim")
    sizes = language_sizes(section, head_size, code.experts)
    width = head_size or sizes.hidden_size / sizes.heads
    if width % 2:
        raise UserError(f"{section.where}: heads are {width:g} wide; supported: even widths")
    if sections and 2 * sum(sections) != width:
        section.faults.append(f"{section.where}: mrope_section {list(sections)} is not half of a head's width")
    rotation = Rope(base, scaling, sections, code.rotation.interleaved)
    attention = sizes.attention(rope=rotation, qkv_bias=code.qkv_bias, qk_norm=code.qk_norm)
    experts = _experts(section, code.renormalised) if code.experts else None
    section.refuse_unread()
    layers = (Layer(attention, sizes.ffn_hidden_size, experts),) * sizes.layers
    return sizes.model(layers, max_positions=window, older=sizes.older)


def _slides(section: Section, always: bool) -> bool:
    """Return whether any layer has a sliding window; `layer_types` decides before `max_window_layers`."""
    slides = always or bool(section.take_if("use_sliding_window"))
    kinds = section.take_if("layer_types", listing(text))
    if set(kinds or ()) - ({FULL, SLIDING} if slides else {FULL}):
        section.faults.append(f"{section.where}.layer_types has others than {FULL!r}; supported: that alone")
    first = section.take_if("max_window_layers", integer(0, 2**20))
    if not slides or first is None:
        return slides
    return SLIDING in kinds if kinds else first < section.take("num_hidden_layers")


def _experts(section: Section, always: bool) -> Experts:
    """Read experts, which all layers must have (else a fault of the section). Raises UserError for too few a token."""
    section.must(decoder_sparse_step=1)
    if section.get("mlp_only_layers"):
        section.must(mlp_only_layers=[])
    saved = section.take_if("num_local_experts")  # by transformers 5; models are published with the other name
    count = section.take_if("num_experts") or saved or section.take("num_experts")
    if always:
        section.must(norm_topk_prob=True)
    renormalised = always or section.take("norm_topk_prob")
    chosen = chosen_experts(section, count, least=2 if renormalised else 1)
    return Experts(count, chosen, renormalised, section.take("router_aux_loss_coef"))


def tied_as_either_says(config: Section) -> bool:
    """Return what `tied` does, where older files say it in the language model's section instead."""
    inner = config.take_if("text_config", mapping(anything)) or {}
    outside = flag(f"{config.where}.text_config.tie_word_embeddings", inner.get("tie_word_embeddings", False))
    return tied(config, outside)


def tied(config: Section, inside: bool = False) -> bool:
    """Return whether word embedding and head share one weight, as transformers decides: if config.json says so, or
    `inside` (its language model's section does), unless the folder's weights hold a head of their own."""
    said = config.take("tie_word_embeddings") or inside
    return said and not (config.folder and _has_head(config.folder))


def _has_head(folder: Path) -> bool:
    heads = {name: folder / file for name, file in weight_files(folder).items() if name.endswith("lm_head.weight")}
    return any(file.exists() and name in read_tensor_entries(file) for name, file in heads.items())
