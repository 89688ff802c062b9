"""Reads the config.json of PaliGemma (arXiv 2407.07726) and PaliGemma 2 (arXiv 2412.03555): SigLIP, one matrix, Gemma.

Attention over the prompt, images and text, is bidirectional. Gemma 2 soft-caps scores and logits, has norms after both
branches and, in every other layer, a sliding window beyond the prompt.
"""

from typing import Any

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import FULL, SLIDING, grouped_sizes, kinds_of_layers, tied
from omnibal_ext.families.towers.rotation import PLAIN, read_rope, rotation_fields
from omnibal_ext.families.towers.tiles import siglip
from omnibal_ext.modalities.language.architecture import LanguageArchitecture, SlidingWindow
from omnibal_ext.reading.checks import shown

PUBLISHED = ("num_image_tokens", "projector_hidden_act")
"""In published vision_configs, where nothing reads them."""
ACTIVATION = {"gelu_pytorch_tanh": "gelu_tanh"}
MEANT = {"gelu": "gelu_tanh"}
"""Gemma's files say "gelu" for tanh-approximated GELU; Gemma 2's do not."""


def read_paligemma(name: str, config: Section) -> Architecture:
    """Read a paligemma's config.json. Raises UserError naming an unsupported field."""
    for part in ("vision_config", "text_config"):  # without which transformers takes sizes of its own
        if not config.get(part):
            raise UserError(f"{config.where}.{part} is missing")
    tower, section = config.towers("siglip_vision_model", "gemma", "gemma2")
    tower.asked.update(PUBLISHED)
    kind = section["model_type"]
    vision = siglip(tower, tower.take("num_hidden_layers"), final_norm=True)
    language = _language(section, kind == "gemma2")
    config.must(projection_dim=language.hidden_size)
    return Architecture(
        name,
        vision,
        language,
        shuffle=1,
        projector_norm=False,
        merger="shuffled",
        tied=tied(config),
        prompt=PromptFormat("paligemma", config.take("image_token_index"), "paligemma", "paligemma"),
        types=("paligemma", kind),
    )


def _language(section: Section, second: bool) -> LanguageArchitecture:
    section.must(attention_bias=False, attention_dropout=0.0)
    sizes, head_size = grouped_sizes(section)
    rope, theta = rotation_fields(section, PLAIN)
    if read_rope(section, rope) is not None:
        raise UserError(f"{section.where}: rope scaling {shown(rope)}; supported: none")
    language = LanguageArchitecture(
        **sizes,
        rope_theta=theta,
        activation=section.choose("hidden_activation", ACTIVATION)
        if second
        else section.choose("hidden_act", ACTIVATION | MEANT),
        centred_norms=True,
        scaled_words=True,
        prefix_attention=True,
        **(_of_the_second(section, sizes["layers"], head_size, theta) if second else {}),
    )
    section.refuse_unread()
    return language


def _of_the_second(section: Section, layers: int, head_size: int, theta: float) -> dict[str, Any]:
    """Fields that only Gemma 2 has."""
    scale = section.take("query_pre_attn_scalar")
    kinds = kinds_of_layers(section, layers, lambda number: (SLIDING, FULL)[number % 2])
    near = tuple(number for number, kind in enumerate(kinds) if kind == SLIDING)
    return {
        "branch_norms": True,
        "query_scale": None if scale == head_size else scale,
        "sliding": SlidingWindow(section.take("sliding_window"), near, theta) if near else None,
        "score_cap": section.take_if("attn_logit_softcapping"),
        "logit_cap": section.take_if("final_logit_softcapping"),
    }
