"""Names of Gemma 3's projector; its ViT's are CLIP's, its language model's those of `families.weights`."""

from collections.abc import Iterator

from omnibal_ext.families.weights import Weight, norm


def projector_weights() -> Iterator[Weight]:
    """With the last norm of the ViT."""
    projector = "multi_modal_projector"
    yield from norm("projector", "vision_norm", "vision_tower.post_layernorm")
    yield Weight("projector", "norm.weight", (f"{projector}.mm_soft_emb_norm.weight",))
    yield Weight("projector", "linear.weight", (f"{projector}.mm_input_projection_weight",), "transposed")
