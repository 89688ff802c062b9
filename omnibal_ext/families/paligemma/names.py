"""Names of PaliGemma's projector; its ViT's are SigLIP's, its language model's those of `families.weights`."""

from collections.abc import Iterator

from omnibal_ext.families.weights import Weight, linear, norm


def projector_weights() -> Iterator[Weight]:
    """With the last norm of the ViT."""
    yield from norm("projector", "vision_norm", "vision_tower.post_layernorm")
    yield from linear("projector", "linear", "multi_modal_projector.linear")
