"""Names of LLaVA's projector; those of its ViT are CLIP's."""

from collections.abc import Iterator

from omnibal_ext.families.weights import Weight, linear, norm


def projector_weights() -> Iterator[Weight]:
    """Of the projector, and the newline."""
    yield from linear("projector", "linear_fc1", "multi_modal_projector.linear_1", when="projector_bias")
    yield from linear("projector", "linear_fc2", "multi_modal_projector.linear_2", when="projector_bias")
    yield from norm("projector", "norm", "multi_modal_projector.projector_layernorm", when="projector_norm")
    yield Weight("word_embed", "newline", ("image_newline",), "row", when="newline")
