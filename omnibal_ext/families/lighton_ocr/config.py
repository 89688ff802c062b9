"""Read the config.json of LightOnOCR: Mistral 3's ViT and merger, Qwen3's layers."""

from omnibal_ext.architectures.architecture import Architecture, PromptFormat
from omnibal_ext.families.mistral3.config import read_pixtral
from omnibal_ext.families.section import Section
from omnibal_ext.families.towers.languages import read_language
from omnibal_ext.families.towers.llama import tied


def read_lighton_ocr(name: str, config: Section) -> Architecture:
    """Read a lighton_ocr's config.json. Raises UserError naming an unsupported field."""
    # Published files have Mistral 3's fields, and what Qwen3's layers always are.
    config.must(spatial_merge_size=2, projector_hidden_act="gelu", vision_feature_layer=-1)
    config.must(multimodal_projector_bias=False)
    tower, text = config.towers("pixtral", "qwen3")
    text.must(use_qk_norm=True)
    image, older = config.take("image_token_id"), config.take_if("image_token_index")
    if older is not None and image != 151655:  # the class's, which a file that says nothing has
        config.must(image_token_index=image)
    return Architecture(
        name,
        read_pixtral(tower),
        read_language(text),
        merger="matrix",
        projector_bias=False,
        tied=tied(config),
        prompt=PromptFormat("lighton_ocr", image if older is None else older, None, "native_edge"),
        types=("lighton_ocr", "qwen3"),
    )
