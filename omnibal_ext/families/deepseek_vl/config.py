"""Read the config.json of DeepSeek-VL (arXiv 2403.05525): SigLIP with its last norm, a two-layer perceptron, Llama."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.languages import read_language
from omnibal_ext.families.towers.llama import tied
from omnibal_ext.families.towers.tiles import siglip


def read_deepseek_vl(name: str, config: Section) -> Architecture:
    """Read a deepseek_vl's config.json. Raises UserError naming an unsupported field."""
    tower, language = config.inner("vision_config", "siglip_vision_model"), config.inner("text_config", "llama")
    tower.must_be("siglip_vision_model")
    return Architecture(
        name,
        siglip(tower, tower.take("num_hidden_layers"), final_norm=True),
        read_language(language),
        shuffle=1,
        projector_norm=False,
        tied=tied(config),
        prompt=PromptFormat("deepseek-vl", config.take("image_token_id"), "deepseek-vl", "letterbox"),
        types=("deepseek_vl", language["model_type"]),
    )
