"""Read the config.json of PaliGemma (arXiv 2407.07726) and PaliGemma 2 (arXiv 2412.03555): SigLIP, one matrix, Gemma.

Attention over the prompt, images and text, is bidirectional. Gemma 2 soft-caps scores and logits, has norms after both
branches and, in every other layer, a sliding window beyond the prompt.
"""

from dataclasses import replace

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import FULL, SLIDING, Sizes, grouped_sizes, kinds_of_layers, tied
from omnibal_ext.families.towers.rotation import PLAIN, read_rope, rotation_fields
from omnibal_ext.families.towers.tiles import siglip
from omnibal_ext.modalities.language.architecture import LanguageArchitecture
from omnibal_ext.modalities.language.layer import Attention, Layer
from omnibal_ext.modalities.language.rope import Rope
from omnibal_ext.reading.checks import shown

PUBLISHED = ("num_image_tokens", "projector_hidden_act")
"""Fields of published vision_configs that nothing reads."""
ACTIVATION = {"gelu_pytorch_tanh": "gelu_tanh"}
MEANT = {"gelu": "gelu_tanh"}
"""Activation that Gemma's files call "gelu": tanh-approximated GELU. Gemma 2's files do not."""


def read_paligemma(name: str, config: Section) -> Architecture:
    """Read a paligemma's config.json. Raises UserError naming an unsupported field."""
    for field in ("vision_config", "text_config"):  # without which transformers takes sizes of its own
        if not config.get(field):
            raise UserError(f"{config.where}.{field} is missing")
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
    sizes = grouped_sizes(section)
    rope, theta = rotation_fields(section, PLAIN)
    if read_rope(section, rope) is not None:
        raise UserError(f"{section.where}: rope scaling {shown(rope)}; supported: none")
    attention = sizes.attention(rope=Rope(theta), sees_prefix=True)
    if second:
        layers, cap = _of_the_second(section, sizes, attention), section.take_if("final_logit_softcapping")
    else:
        activation = section.choose("hidden_act", ACTIVATION | MEANT)
        layers, cap = [Layer(attention, sizes.ffn_hidden_size, activation=activation)] * sizes.layers, None
    section.refuse_unread()
    return sizes.model(layers, centred_norms=True, scaled_words=True, logit_cap=cap, older=sizes.older)


def _of_the_second(section: Section, sizes: Sizes, usual: Attention) -> list[Layer]:
    """Return the layers of Gemma 2 (PaliGemma 2), which cap scores, with a window in every other if not listed."""
    scale = section.take("query_pre_attn_scalar")
    kinds = kinds_of_layers(section, sizes.layers, 2)
    window = section.take("sliding_window") if SLIDING in kinds else None
    query_scale, cap = None if scale == sizes.head_dim else scale, section.take_if("attn_logit_softcapping")
    far = replace(usual, query_scale=query_scale, score_cap=cap)
    mixers = {FULL: far, SLIDING: replace(far, window=window)}
    activation = section.choose("hidden_activation", ACTIVATION)
    return [Layer(mixers[kind], sizes.ffn_hidden_size, activation=activation, branch_norms=True) for kind in kinds]
