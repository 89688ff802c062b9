"""Read the config.json of PaddleOCR-VL (arXiv 2510.14528): SigLIP at native resolution, whose learned positions are
stretched over an image, with rotary ones besides; Llama's layers with M-RoPE (ERNIE 4.5)."""

from functools import partial

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.llama import Llama, read_llama, tied_as_either_says
from omnibal_ext.families.towers.native import ACTIVATIONS, native_sizes, rotary_base
from omnibal_ext.families.towers.rotation import Rotation
from omnibal_ext.modalities.vision.architecture import NativeResolution, VisionArchitecture
from omnibal_ext.reading.checks import anything, mapping

VISION, TEXT = "paddleocr_vl_vision", "paddleocr_vl_text"
OLDER = "paddleocr_vl"
"""Name of the ViT's section in published files."""
OUTSIDE = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
"""Fields of the language model without a default here."""
read_language = partial(read_llama, code=Llama(Rotation(5e5, sections=(16, 24, 24)), bias="use_bias"))


def read_paddleocr(name: str, config: Section) -> Architecture:
    """Read a paddleocr_vl's config.json. Raises UserError naming an unsupported field."""
    return Architecture(
        name,
        _vision(config),
        read_language(_language_section(config)),
        merger="two_norms",
        projector_norm=False,
        tied=tied_as_either_says(config),
        prompt=PromptFormat("paddleocr-vl", config.take("image_token_id"), None, "native_widened"),
        types=("paddleocr_vl", TEXT),
    )


def _language_section(config: Section) -> Section:
    """Return the language model's section; in published files its fields are those of the top level."""
    if config.take_if("text_config", mapping(anything)) is not None:
        section = config.inner("text_config", TEXT)
        section.must_be(TEXT)
        return section
    known = {*config.inner_types[TEXT].defaults, *OUTSIDE}
    outside = {field: value for field, value in config.values.items() if field in known}
    config.asked.update(outside)
    return config.section_of("text_config", TEXT, outside)


def _vision(config: Section) -> VisionArchitecture:
    values = config.take_if("vision_config", mapping(anything)) or {}
    tower = config.inner("vision_config", VISION, always=values.get("model_type") == OLDER)
    tower.must_be(VISION)
    tower.must(num_channels=3, attention_dropout=0.0, spatial_merge_size=2)
    sizes = native_sizes(tower, "num_hidden_layers", heads="num_attention_heads")
    vision = VisionArchitecture(
        **sizes,
        ffn_hidden_size=tower.take("intermediate_size"),
        norm_epsilon=tower.take("layer_norm_eps"),
        activation=tower.choose("hidden_act", ACTIVATIONS),
        final_norm=True,
        pixels="half",
        native=NativeResolution(
            frames=1,
            theta=rotary_base(tower),
            learned_positions=tower.take("image_size") // sizes["patch_size"],
            edges_aligned=True,
        ),
    )
    tower.refuse_unread()
    return vision
