"""Read the config.json of Idefics 3 (arXiv 2408.12637) and SmolVLM: SigLIP, squares of patches, one matrix, Llama.

Their ViT stretches its positions over patches that are filled; its processor fills every tile, so that each patch has
the position of its own place.
"""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.errors import UserError
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.languages import read_language
from omnibal_ext.families.towers.llama import tied
from omnibal_ext.families.towers.tiles import siglip

PUBLISHED = (
    "_flash_attn_2_enabled", "is_llama_config", "neftune_noise_alpha", "perceiver_config", "pixel_shuffle_factor",
    "use_resampler",
)  # fmt: skip
"""Fields of published text_configs that nothing reads."""
TEMPLATES = {128259: "idefics3"}
"""Vocabulary size -> chat template: Idefics 3's; other models have SmolVLM's."""


def read_idefics3(name: str, config: Section) -> Architecture:
    """Read Idefics 3's or SmolVLM's config.json. Raises UserError naming an unsupported field."""
    kind = config["model_type"]
    tower = config.inner("vision_config", f"{kind}_vision", always=True)  # published ones are called as the whole is
    if not config.get("text_config"):
        raise UserError(f"{config.where}.text_config is missing")
    language = config.inner("text_config", "llama")
    language.must_be("llama")
    language.asked.update(PUBLISHED)
    template = TEMPLATES.get(language.take("vocab_size"), "smolvlm")
    vision = siglip(tower, tower.take("num_hidden_layers"), final_norm=True)
    if vision.image_size % 2:
        raise UserError(
            f"{tower.where}.image_size is {vision.image_size}; supported: even ones, as processors make them"
        )
    return Architecture(
        name,
        vision,
        read_language(language),
        shuffle=config.take("scale_factor"),
        projector_norm=False,
        projector_bias=False,
        merger="shuffled",
        tied=tied(config),
        prompt=PromptFormat("idefics3", config.take("image_token_id"), template, "split"),
        types=(kind, "llama"),
    )
