"""What a model of transformers must be so that packs give what their samples give one by one."""

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from omnibal_ext.errors import UserError
from omnibal_ext.families.family import Packs
from omnibal_ext.families.registry import MODELS

KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}
"""Modules of the kernels that keep samples apart in layers of linear attention, and what pip calls them."""
HANDS_ON = (5, 10)
"""The first transformers that tells them where samples begin."""
READ_MASKS = ("sdpa", "eager")
"""Implementations of attention that do."""


def packs_of(config: Any) -> Packs:
    """Return how packs are joined for a model, by its `model_type`. Raises UserError for unknown types."""
    known = {kind: model.packs for kind, model in MODELS.items() if model.packs}
    if config.model_type not in known:
        raise UserError(f"packs for models of type {config.model_type!r} are not known; known: {', '.join(known)}")
    return known[config.model_type]


def check_model(config: Any) -> Packs:
    """Return how packs are joined for a model. Raises UserError if in packs it would compute something else."""
    packs = packs_of(config)
    _check_layers(config, packs)
    _check_attention(config, packs)
    return packs


def check_rotation(config: Any, longest: int) -> None:
    """Raise UserError if rotary angles change with length, and the longest sample's is beyond their limit."""
    language = config.text_config
    rope = getattr(language, "rope_parameters", None) or {}
    if rope.get("rope_type") not in ("dynamic", "longrope"):
        return
    limit = rope.get("original_max_position_embeddings") if rope["rope_type"] == "longrope" else None
    limit = limit or language.max_position_embeddings
    if longest > limit:
        raise UserError(
            f"packs for {config.model_type}: its {rope['rope_type']} rotation turns all of a pack as its longest "
            f"sample asks, and one has {longest} tokens, more than {limit}; preprocess again with --max-tokens {limit}"
        )


def _check_layers(config: Any, packs: Packs) -> None:
    """Raise UserError for layers of the language model that would mix the samples of a pack."""
    language, kind = config.get_text_config(), config.model_type
    other = set(getattr(language, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if packs.linear_attention and other == {"linear_attention"}:
        if lacking := _lacking():
            raise UserError(
                f"packs for {kind}: transformers keeps samples apart in its layers of linear_attention with kernels "
                f"alone, torch's stand-in carries on from one to the next: pip install {' '.join(lacking)}"
            )
    elif other:
        raise UserError(
            f"packs for {kind}: its layers of {', '.join(sorted(other))} do not tell samples apart in transformers; "
            "omnibal launch trains the families of docs/models.md"
        )
    if getattr(language, "use_bidirectional_attention", None) in (True, "all"):
        raise UserError(f"packs for {kind}: use_bidirectional_attention of all tokens; supported: of images alone")


def _lacking() -> list[str]:
    """List what pip has to install before layers of linear attention keep samples apart."""
    kernels = [name for module, name in KERNELS.items() if find_spec(module) is None]
    is_old = tuple(map(int, version("transformers").split(".")[:2])) < HANDS_ON
    return [f"'transformers>={HANDS_ON[0]}.{HANDS_ON[1]}'"] * is_old + kernels


def _check_attention(config: Any, packs: Packs) -> None:
    """Raise UserError for attention kernels that would not read a pack's masks, or its samples' positions."""
    for name in sorted({"text_config", "vision_config"} - set(packs.flash)):
        found = getattr(config, name)._attn_implementation
        if found not in READ_MASKS and (found or name == "text_config"):  # where there is no ViT, it has none
            raise UserError(
                f"packs for {config.model_type}: its {name} computes the same with attn_implementation 'sdpa' or "
                f"'eager' alone, not {found!r}"
            )
