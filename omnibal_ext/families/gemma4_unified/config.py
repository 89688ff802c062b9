"""Read the config.json of Gemma 4 without towers (12B): its language model, and patches that no ViT sees."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.errors import UserError
from omnibal_ext.families.gemma4.config import read_language
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import tied
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture
from omnibal_ext.reading.checks import shown

NOT_HERE = ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers")
"""Fields of Gemma 4's language model that this one lacks in transformers, or that are not supported for it."""


def read_gemma4_unified(name: str, config: Section) -> Architecture:
    """Read a gemma4_unified's config.json. Raises UserError naming an unsupported field."""
    if not config.get("vision_config"):
        raise UserError(f"{config.where}.vision_config is missing; only models with images are supported")
    patches, language = config.towers("gemma4_unified_vision", "gemma4_unified_text")
    for field in NOT_HERE:
        if language.get(field):
            raise UserError(f"{language.where}.{field} is {shown(language.get(field))}; supported: 0, or none")
    return Architecture(
        name,
        _patches(patches),
        read_language(language, images_whole=True),
        shuffle=1,
        merger="normed",
        projector_norm=False,
        tied=tied(config),
        prompt=PromptFormat("gemma4", config.take("image_token_id"), "gemma4", "gemma4_unified"),
        types=("gemma4_unified", "gemma4_unified_text"),
    )


def _patches(section: Section) -> VisionArchitecture:
    """Read the embedding of patches as a ViT without layers; a square of the processor's patches is one patch here."""
    side = section.take("patch_size") * section.take("pooling_kernel_size")
    width = section.take("mm_embed_dim")
    section.must(model_patch_size=side, output_proj_dims=width)
    vision = VisionArchitecture(
        layers=0,
        hidden_size=width,
        heads=1,
        ffn_hidden_size=0,
        patch_size=side,
        image_size=side,
        norm_epsilon=section.take("rms_norm_eps"),
        embedding_norms=True,
        pixels="unit",
        native=NativeResolution(merge=1, frames=1, axis_positions=section.take("mm_posemb_size")),
    )
    section.refuse_unread()
    return vision
