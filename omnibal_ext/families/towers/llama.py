"""Reads language models with Llama's layers; what cannot be honoured exactly is refused by name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

from omnibal_ext.architectures.experts import Experts
from omnibal_ext.architectures.folder import weight_files
from omnibal_ext.architectures.language import LanguageArchitecture, RopeScaling
from omnibal_ext.errors import UserError
from omnibal_ext.families.fields import BASE, FACTOR, POSITIONS, SHARE
from omnibal_ext.families.section import Section
from omnibal_ext.reading.checks import anything, finite, flag, integer, listing, mapping, maybe, record, shown, text
from omnibal_ext.reading.tensors import read_tensor_entries

ROPE_FIELDS = (
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor", "beta_fast", "beta_slow", "attention_factor",
    "truncate", "mscale", "mscale_all_dim",
)  # fmt: skip

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE = record({}, {"rope_type": maybe(text), "type": maybe(text), "rope_theta": maybe(BASE)})
ROUNDING = 1e-6
"""Of an amplitude written out in a file."""
LINEAR = record({"factor": FACTOR})
YARN = record(
    {"factor": FACTOR, "original_max_position_embeddings": POSITIONS},
    {
        **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"), maybe(FACTOR)),
        "truncate": maybe(flag),
    },
)
LLAMA3 = record(
    {
        **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), FACTOR),
        "original_max_position_embeddings": POSITIONS,
    }
)


@dataclass(frozen=True)
class Rotation:
    """What the code of a model type does about positions, whatever its file says."""

    base: float = 1e4
    """Where a config.json has none."""
    beside: bool = False
    """The base inside the rotation's fields is not read (InternLM2's own code)."""
    sections: tuple[int, ...] = ()
    """Of M-RoPE: frequencies for time, row and column where a config.json has none; () in models without."""
    interleaved: bool = False


@dataclass(frozen=True)
class Llama:
    """What the code of a model type with Llama's layers does, whatever its file says."""

    rotation: Rotation = Rotation()
    bias: str = "attention_bias"
    """The field that would add biases, which are not supported."""
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    renormalised: bool = False
    """What a token's experts weigh adds up to 1, whatever the file says."""
    slides: bool = False
    """Layers slide a window wherever there is one, without a field that turns it on (Mistral)."""
    scales_queries: bool = False
    """Queries are scaled by their position beyond the context of the rotation (Ministral 3)."""


LLAMA = Llama()


def language_sizes(section: Section, head_size: int | None, mixture: bool = False) -> dict[str, Any]:
    """Fields of `LanguageArchitecture` that every config.json has; perceptrons are experts in a `mixture`.

    `head_size`: None: as wide as all heads together fill the hidden size.
    Raises UserError for heads that are not in groups of one size.
    """
    hidden_size, heads = section.take("hidden_size"), section.take("num_attention_heads")
    kv_heads = section.take_if("num_key_value_heads") or heads
    if heads % kv_heads:
        raise UserError(f"{section.where}: {heads} heads are no multiple of {kv_heads} of keys and values")
    return {
        "layers": section.take("num_hidden_layers"),
        "hidden_size": hidden_size,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_hidden_size": section.take("moe_intermediate_size" if mixture else "intermediate_size"),
        "vocab_size": section.take("vocab_size"),
        "norm_epsilon": section.take("rms_norm_eps"),
        "head_size": None if head_size is None or head_size * heads == hidden_size else head_size,
    }


def kinds_of_layers(section: Section, layers: int, usual: Callable[[int], str], other: str = SLIDING) -> list[str]:
    """`FULL` or `other` of each layer, as `usual` has it by number where the file is silent. Raises UserError for
    others, and for more or fewer than there are layers."""
    kinds = section.take_if("layer_types", listing(text)) or [usual(number) for number in range(layers)]
    if len(kinds) != layers or set(kinds) - {other, FULL}:
        raise UserError(
            f"{section.where}.layer_types are {shown(kinds)}; supported: {other!r} or {FULL!r} for each layer"
        )
    return kinds


def chosen_experts(section: Section, count: int, field: str = "num_experts_per_tok", least: int = 2) -> int:
    """Of `count` experts, how many a token goes through: `least` or more. Of one alone the normalised weight is 1
    whatever the router says, which would learn nothing. Raises UserError for other numbers."""
    chosen = section.take(field)
    if not least <= chosen <= count:
        raise UserError(f"{section.where}.{field} is {chosen}; supported: {least} up to the {count} experts")
    return chosen


def read_llama(section: Section, code: Llama = LLAMA) -> LanguageArchitecture:
    """The language model that a section describes; its faults, or UserError, name what cannot be honoured."""
    section.must(hidden_act="silu", mlp_bias=False, attention_dropout=0.0, pretraining_tp=1)
    section.must(**{code.bias: False})
    rope, base = rotation_fields(section, code.rotation)
    sections = rotary_sections(section, rope, code.rotation)
    scaling = _with_query_scale(section, rope) if code.scales_queries else read_rope(section, rope, sections)
    window = section.take_if("sliding_window") if _slides(section, code.slides) else None
    head_size = section.take_if("head_dim")
    sizes = language_sizes(section, head_size, code.experts)
    width = head_size or sizes["hidden_size"] / sizes["heads"]
    if width % 2:
        raise UserError(f"{section.where}: heads are {width:g} wide; supported: even widths")
    if sections and 2 * sum(sections) != width:
        section.faults.append(f"{section.where}: mrope_section {list(sections)} is not half of a head's width")
    language = LanguageArchitecture(
        **sizes,
        rope_theta=base,
        qkv_bias=code.qkv_bias,
        qk_norm=code.qk_norm,
        rope_scaling=scaling,
        rotary_sections=sections,
        rotary_interleaved=code.rotation.interleaved,
        max_positions=window,
        experts=_experts(section, code.renormalised) if code.experts else None,
    )
    section.refuse_unread()
    return language


def _slides(section: Section, always: bool) -> bool:
    """Whether any layer looks back over a window; as in transformers, a list of kinds goes before their number."""
    slides = always or bool(section.take_if("use_sliding_window"))
    kinds = section.take_if("layer_types", listing(text))
    if set(kinds or ()) - ({FULL, SLIDING} if slides else {FULL}):
        section.faults.append(f"{section.where}.layer_types has others than {FULL!r}; supported: that alone")
    first = section.take_if("max_window_layers", integer(0, 2**20))
    if not slides or first is None:
        return slides
    return SLIDING in kinds if kinds else first < section.take("num_hidden_layers")


def rotation_fields(section: Section, code: Rotation) -> tuple[dict[str, Any], float]:
    """The fields that describe the rotation, and its base, from where transformers takes them.

    1. Of `rope_scaling` and `rope_parameters` the first that is there; the other is not read.
    2. The base inside it, else the one beside it, else the model type's own.

    Raises UserError where another base stands in the file: other versions of transformers would take that.
    """
    fields = {name: section.take_if(name, ROPE) or {} for name in ("rope_scaling", "rope_parameters")}
    beside = section.take_if("rope_theta")
    rope = fields["rope_scaling"] or fields["rope_parameters"]
    inside = None if code.beside else rope.get("rope_theta")
    base = float(inside or beside or code.base)
    written = {f"{name}.rope_theta": each.get("rope_theta") for name, each in fields.items()} | {"rope_theta": beside}
    for place, value in written.items():
        if value and value != base:
            section.faults.append(
                f"{section.where}.{place} is {value:g}, but transformers takes another base, {base:g}: make them one"
            )
    return rope, base


def _experts(section: Section, always: bool) -> Experts:
    """Of every layer. Raises UserError where a layer has none, or their number is not to be had."""
    section.must(decoder_sparse_step=1)
    if section.get("mlp_only_layers"):
        section.must(mlp_only_layers=[])
    count = section.take("num_local_experts")
    count = section.take_if("num_experts") or count  # as published; transformers 5 writes the other name
    if always:
        section.must(norm_topk_prob=True)
    renormalised = always or section.take("norm_topk_prob")
    chosen = chosen_experts(section, count, least=2 if renormalised else 1)
    return Experts(count, chosen, renormalised, section.take("router_aux_loss_coef"))


def read_rope(section: Section, rope: dict[str, Any], sections: tuple[int, ...] = ()) -> RopeScaling | None:
    """Scaling of the rotation. Raises UserError naming what cannot be honoured."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "default" if kind == "mrope" and sections else kind
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        section.faults.append(f"{section.where}: partial rotation is not supported")
    known = (*ROPE_FIELDS, "mrope_section", "mrope_interleaved") if sections else ROPE_FIELDS
    if unknown := [shown(name) for name, value in rope.items() if value and name not in known]:
        section.faults.append(
            f"{section.where}: rotary field {', '.join(unknown)} is not known here; known: {', '.join(known)}"
        )
    match kind:
        case "default":
            return None
        case "dynamic":
            LINEAR(f"{section.where}: dynamic rope scaling", rope)
            if sections:
                raise UserError(f"{section.where}: dynamic rope scaling beside mrope_section is not supported")
            limit = section.take("max_position_embeddings")
            return RopeScaling("dynamic", float(rope["factor"]), original_positions=limit)
        case "linear":
            LINEAR(f"{section.where}: linear rope scaling", rope)
            return RopeScaling("linear", float(rope["factor"]))
        case "yarn":
            return _yarn(section, rope)
        case "llama3":
            LLAMA3(f"{section.where}: llama3 rope scaling", rope)
            return RopeScaling(
                "llama3",
                float(rope["factor"]),
                float(rope["low_freq_factor"]),
                float(rope["high_freq_factor"]),
                rope["original_max_position_embeddings"],
            )
        case _:
            known_kinds = "linear, dynamic, llama3, yarn"
            raise UserError(f"{section.where}: rope scaling {kind!r} is not supported; known: {known_kinds}")


def _yarn(section: Section, rope: dict[str, Any]) -> RopeScaling:
    YARN(f"{section.where}: yarn rope scaling", rope)
    scaling = RopeScaling(
        "yarn",
        float(rope["factor"]),
        float(rope.get("beta_slow") or 1),
        float(rope.get("beta_fast") or 32),
        rope["original_max_position_embeddings"],
        rope.get("truncate") is not False,
    )
    amplitude = rope.get("attention_factor")
    both = [rope[name] for name in ("mscale", "mscale_all_dim") if rope.get(name)]
    if not amplitude and len(both) == 2:
        above, below = (0.1 * mscale * log(scaling.factor) + 1 if scaling.factor > 1 else 1.0 for mscale in both)
        amplitude = above / below
    if not amplitude or abs(amplitude - scaling.attention_factor) <= ROUNDING:
        return scaling
    return replace(scaling, amplitude=amplitude)


def _with_query_scale(section: Section, rope: Mapping[str, Any]) -> RopeScaling:
    """Scaling of the rotation by yarn, and of queries. Raises UserError where either is missing."""
    beta, others = rope.get("llama_4_scaling_beta"), {"llama_4_scaling_beta", "max_position_embeddings"}
    scaling = read_rope(section, {name: value for name, value in rope.items() if name not in others})
    if scaling is None or scaling.kind != "yarn" or beta is None:
        raise UserError(f"{section.where}.rope_parameters: supported: type yarn, with llama_4_scaling_beta")
    return replace(scaling, query_beta=finite(0, 1e3)(f"{section.where}.rope_parameters.llama_4_scaling_beta", beta))


def rotary_sections(section: Section, rope: Mapping[str, Any], code: Rotation) -> tuple[int, ...]:
    """Of M-RoPE: frequencies for time, row and column, none in other models.

    Raises UserError if they are not as the model's code has them, whatever the file says.
    """
    if not code.sections:
        return ()
    if rope.get("mrope_interleaved", code.interleaved) != code.interleaved:
        section.faults.append(
            f"{section.where}.mrope_interleaved is {shown(rope['mrope_interleaved'])}; supported: {code.interleaved}"
        )
    given = rope.get("mrope_section") or list(code.sections)
    return tuple(listing(integer(0, 2**20), 3, 3)(f"{section.where}.mrope_section", given))


def rotary_share(section: Section, rope: Mapping[str, Any], usual: float) -> float:
    """Of a head, what turns: as the rotation's fields say, else as the one beside them, else `usual`."""
    beside, inside = section.take_if("partial_rotary_factor"), rope.get("partial_rotary_factor")
    if inside is not None:
        return SHARE(f"{section.where}.rope_parameters.partial_rotary_factor", inside)
    return usual if beside is None else beside


def partial_rotation(section: Section, rope: Mapping[str, Any], rotated: int, code: Rotation) -> dict[str, Any]:
    """What `LanguageArchitecture` has of M-RoPE that turns `rotated` numbers of a head, but for how many these are.

    Raises UserError where its sections are not half of them.
    """
    sections = rotary_sections(section, rope, code)
    if 2 * sum(sections) != rotated:
        raise UserError(
            f"{section.where}: mrope_section {list(sections)} is not half of the {rotated} numbers of a head that turn"
        )
    fields = {name: rope[name] for name in rope if name != "partial_rotary_factor"}
    return {"rope_scaling": read_rope(section, fields, sections), "rotary_sections": sections}


def tied_as_either_says(config: Section) -> bool:
    """The same where older files say it of the language model alone."""
    inner = config.take_if("text_config", mapping(anything)) or {}
    beside = flag(f"{config.where}.text_config.tie_word_embeddings", inner.get("tie_word_embeddings", False))
    return tied(config, beside)


def tied(config: Section, inside: bool = False) -> bool:
    """Whether word embedding and head share one weight, as transformers decides: as the config says, or its language
    model's section (`inside`), unless the weights hold a head of their own."""
    said = config.take("tie_word_embeddings") or inside
    return said and not (config.folder and _has_head(config.folder))


def _has_head(folder: Path) -> bool:
    heads = {name: folder / file for name, file in weight_files(folder).items() if name.endswith("lm_head.weight")}
    return any(file.exists() and name in read_tensor_entries(file) for name, file in heads.items())
