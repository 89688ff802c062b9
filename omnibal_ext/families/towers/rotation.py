"""Rotary positions in a config.json: base, scaling, M-RoPE and partial rotation; what is not known is refused."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.fields import BASE, FACTOR, POSITIONS, SHARE
from omnibal_ext.families.section import Section
from omnibal_ext.modalities.language.rope import Rope, RopeScaling
from omnibal_ext.reading.checks import finite, flag, integer, listing, maybe, record, shown, text

ROPE_FIELDS = (
    "rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings", "partial_rotary_factor", "beta_fast", "beta_slow", "attention_factor",
    "truncate", "mscale", "mscale_all_dim",
)  # fmt: skip
ROPE = record({}, {"rope_type": maybe(text), "type": maybe(text), "rope_theta": maybe(BASE)})
INTERLEAVED = ("mrope_interleaved", "interleaved")
"""Names that config.json may give the same field."""
ROUNDING = 1e-6
"""Tolerance for an amplitude that is written in a file."""
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
    """RoPE as the code of a model type has it, whatever config.json says."""

    base: float = 1e4
    """Base if config.json has none."""
    outside: bool = False
    """Whether a `rope_theta` inside the RoPE fields is not read (InternLM2's own code)."""
    sections: tuple[int, ...] = ()
    """Frequencies of M-RoPE for time, row and column if config.json has none; (): no M-RoPE."""
    interleaved: bool = False


PLAIN = Rotation()


def rotation_fields(section: Section, code: Rotation) -> tuple[dict[str, Any], float]:
    """Return config.json's object of RoPE fields, and the base, from where transformers takes them.

    1. Of `rope_scaling` and `rope_parameters` the first that is there; the other is not read.
    2. The base inside it, else the one outside it, else the model type's own.

    Another base in the file is a fault of the section: other versions of transformers would take that.
    """
    fields = {name: section.take_if(name, ROPE) or {} for name in ("rope_scaling", "rope_parameters")}
    outside = section.take_if("rope_theta")
    rope = fields["rope_scaling"] or fields["rope_parameters"]
    inside = None if code.outside else rope.get("rope_theta")
    base = float(inside or outside or code.base)
    written = {f"{name}.rope_theta": each.get("rope_theta") for name, each in fields.items()} | {"rope_theta": outside}
    for which, value in written.items():
        if value and value != base:
            section.faults.append(
                f"{section.where}.{which} is {value:g}, but transformers takes another base, {base:g}: make them one"
            )
    return rope, base


def read_rope(section: Section, rope: dict[str, Any], sections: tuple[int, ...] = ()) -> RopeScaling | None:
    """Return RoPE scaling, None without; unsupported fields are faults of the section, or raise UserError."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = "default" if kind == "mrope" and sections else kind
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        section.faults.append(f"{section.where}: partial rotation is not supported")
    known = (*ROPE_FIELDS, "mrope_section", *INTERLEAVED) if sections else ROPE_FIELDS
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
                raise UserError(f"{section.where}: dynamic rope scaling with mrope_section is not supported")
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


def with_query_scale(section: Section, rope: Mapping[str, Any]) -> RopeScaling:
    """Return YaRN scaling with queries scaled by position. Raises UserError if the file lacks either."""
    beta, others = rope.get("llama_4_scaling_beta"), {"llama_4_scaling_beta", "max_position_embeddings"}
    scaling = read_rope(section, {name: value for name, value in rope.items() if name not in others})
    if scaling is None or scaling.kind != "yarn" or beta is None:
        raise UserError(f"{section.where}.rope_parameters: supported: type yarn, with llama_4_scaling_beta")
    return replace(scaling, query_beta=finite(0, 1e3)(f"{section.where}.rope_parameters.llama_4_scaling_beta", beta))


def rotary_sections(section: Section, rope: Mapping[str, Any], code: Rotation) -> tuple[int, ...]:
    """Return M-RoPE's numbers of frequencies for time, row and column; () in other models. Another order than the
    code's is a fault of the section; raises UserError unless there are three numbers."""
    if not code.sections:
        return ()
    for name in INTERLEAVED:
        if rope.get(name, code.interleaved) != code.interleaved:
            section.faults.append(f"{section.where}.{name} is {shown(rope[name])}; supported: {code.interleaved}")
    given = rope.get("mrope_section") or list(code.sections)
    return tuple(listing(integer(0, 2**20), 3, 3)(f"{section.where}.mrope_section", given))


def rotary_share(section: Section, rope: Mapping[str, Any], usual: float) -> float:
    """Return the fraction of a head that RoPE rotates: from the RoPE fields, else next to them, else `usual`."""
    outside, inside = section.take_if("partial_rotary_factor"), rope.get("partial_rotary_factor")
    if inside is not None:
        return SHARE(f"{section.where}.rope_parameters.partial_rotary_factor", inside)
    return usual if outside is None else outside


def partial_rotation(
    section: Section, rope: Mapping[str, Any], base: float, rotated: int, head_dim: int, code: Rotation
) -> Rope:
    """Return M-RoPE over `rotated` of a head's `head_dim` dimensions. Raises UserError if its sections do not sum to
    half of them."""
    sections = rotary_sections(section, rope, code)
    if 2 * sum(sections) != rotated:
        raise UserError(
            f"{section.where}: mrope_section {list(sections)} does not sum to half of a head's {rotated} rotary "
            "dimensions"
        )
    fields = {name: rope[name] for name in rope if name != "partial_rotary_factor"}
    scaling, fraction = read_rope(section, fields, sections), None if rotated == head_dim else rotated
    return Rope(base, scaling, sections, code.interleaved, fraction)
